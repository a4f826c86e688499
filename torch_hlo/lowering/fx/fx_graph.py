"""An FX graph of aten ops (from AOTAutograd or torch.export) -> Nodes, inputs and outputs for
`lowering.graph.lower`.

Placeholders become Leafs; SymInts become symbolic sizes; a tensor that lies permuted in memory
becomes a parameter in physical order; random ops take their number within the graph as offset, and
one seed is an input. Higher-order ops keep their graphs as arguments."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from torch_hlo.hlo.ir import Dim, Shape, Size, symbols
from torch_hlo.log import OURS
from torch_hlo.pytorch.graphs import with_effects
from torch_hlo.pytorch.operators import HigherOrderOperator, OpOverload

from ..core import (
    HIGHER_ORDER,
    Leaf,
    Lift,
    LoweringError,
    Node,
    Out,
    aten,
    is_random,
    look,
)
from ..core.looks import TOKEN, At, Check, Logged, log
from ..core.registry import lifts
from .expand import EXPANDED, RANDOM, expanded, node_arguments, traced_again
from .fx_size import Layout, layout_of, shape_of, size_of


@dataclass
class Input:
    """A parameter of the program: `source` is a placeholder position, a constant tensor, None for
    the seed, or a Python expression of the numbers that are placeholders."""

    leaf: Leaf | Lift
    source: int | Tensor | str | None
    layout: Layout | None = None
    lazy_bits: bool = False  # conjugated or negated without having been computed


@dataclass
class FxGraph:
    """What `from_fx` found.

    `sizes`: symbol -> position of the SymInt placeholder that has its value; `numbers`: the same
      for floats. `outputs`: for each output of the FX graph an Out or Leaf, a
    number (int, symbolic, float) or None, with the Layout that PyTorch expects of a tensor.
    `writes`: (placeholder position, new value) of in-place writes at the end of the graph.
    `checks`: (value, function that raises if it is wrong), for the caller: a program cannot raise.
    `tokens`: of a graph in another one that has checks, the first and the last (see core/looks.py).
    """

    placeholders: int = 0
    nodes: list[Node] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    outputs: list[tuple[object, Layout | None]] = field(default_factory=list)
    writes: list[tuple[int, Out | Leaf]] = field(default_factory=list)
    checks: list[tuple[Out | Leaf, Check]] = field(default_factory=list)
    tokens: tuple[Leaf, Out | Leaf] | None = None

    def input_at(self, position: int) -> int:
        """Number of the program's parameter for a placeholder."""
        return next(
            i for i, x in enumerate(self.inputs) if type(x.source) is int and x.source == position
        )

    def places(self) -> dict[str, tuple[int, int]]:
        """The parameter and dimension from which each symbol is read."""
        found: dict[str, tuple[int, int]] = {}
        for i, x in enumerate(self.inputs):
            for d, size in enumerate(x.leaf.shape.dims if isinstance(x.leaf, Leaf) else ()):
                if _is_symbol(size):
                    found.setdefault(str(size), (i, d))
        return found


def _is_symbol(size: Size) -> bool:
    return isinstance(size, Dim) and str(size).isidentifier()


class _Reader:
    """State of one conversion. One method per kind of FX node."""

    def __init__(
        self,
        module: fx.GraphModule,
        random: Callable[[], tuple] | None,
        inner: bool,
        logged: Logged | None,
    ) -> None:
        self.module = module
        self.inner = inner
        self.logged = logged
        self.g = FxGraph()
        self.lifted: dict[str, Lift] = {}
        self.env: dict[fx.Node, object] = {}
        self.seed: Leaf | None = None
        self.drawn = 0
        # symbols that are sizes of inputs; None where numbers have no inputs of their own
        self.sizes: set[str] | None = None if inner else set()
        self.random = random or self._random

    def _random(self) -> tuple:
        """Seed and offset of the next random op."""
        if self.seed is None:
            self.seed = Leaf(Shape("s64"))
        self.drawn += 1
        return self.seed, self.drawn - 1

    def placeholder(self, n: fx.Node) -> None:
        g = self.g
        value = n.meta.get("val")
        position = self.g.placeholders
        g.placeholders += 1
        # a token, which orders effects: None when called
        if any(u.target is with_effects and u.args[0] is n for u in n.users):
            self.env[n] = None
        elif isinstance(value, Tensor):
            shape = shape_of(value)
            # others are made contiguous before each call
            layout = Layout.row_major(shape.rank) if self.inner else layout_of(value).without_gaps
            leaf = Leaf(Shape(shape.dtype, layout.physical(shape.dims)))
            if self.sizes is not None:
                self.sizes.update(*map(symbols, shape.dims))
            g.inputs.append(Input(leaf, position, layout, value.is_conj() or value.is_neg()))
            self.env[n] = leaf if layout.plain else self._permuted(leaf, layout, shape)
        elif isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            self.env[n] = size = size_of(value)
            if _is_symbol(size):
                g.sizes.setdefault(str(size), position)
        elif isinstance(value, torch.SymFloat):
            g.numbers[str(value.node.expr)] = position
            self.env[n] = self._number(value)
        elif value is None or isinstance(value, (bool, float)):
            self.env[n] = value
        else:
            raise LoweringError(
                f"input {n.name} of type {type(value).__name__} is not supported: pass tensors and"
                " numbers"
            )

    def _number(self, x: torch.SymFloat | torch.SymInt | torch.SymBool) -> Lift:
        """A number that Python computes before each call, as an input of the program."""
        from torch.utils._sympy.printers import PythonPrinter

        text = PythonPrinter().doprint(x.node.expr)
        if text not in self.lifted:
            self.lifted[text] = lift = Lift("f64" if isinstance(x, torch.SymFloat) else "s64")
            self.g.inputs.append(Input(lift, text))
        return self.lifted[text]

    def _size(self, x: int | torch.SymInt) -> Size | Lift:
        try:
            return size_of(x)
        except LoweringError:  # as data it may still be used
            return self._number(x)

    def _permuted(self, leaf: Leaf, layout: Layout, shape: Shape) -> Out:
        back = [layout.order.index(d) for d in range(shape.rank)]
        node = Node(aten.permute.default, (leaf, back), {}, (shape,))
        self.g.nodes.append(node)
        return Out(node)

    def _operands(self, n: fx.Node) -> tuple[list[Any], dict[str, Any]]:
        """Its arguments, and keywords."""
        schema = n.target._schema.arguments if isinstance(n.target, OpOverload) else ()
        data = {a.name: self.sizes is not None and lifts(n.target, a) for a in schema}
        args = zip(n.args, [*data.values(), *[False] * len(n.args)])
        keywords = {k: self._operand(v, data.get(k, False)) for k, v in n.kwargs.items()}
        return [self._operand(x, is_data) for x, is_data in args], keywords

    def _operand(self, x: Any, data: bool) -> Any:
        """An argument; as `data` a number that Python gives and that is no size is an input, for it
        may be negative, or large."""
        if data and isinstance(x, (list, tuple)):
            return [self._operand(v, data) for v in x]
        found = self.arg(x)
        if data and isinstance(found, Dim) and symbols(found) - self.sizes:
            return self._number(x.meta["val"] if isinstance(x, fx.Node) else x)
        return found

    def arg(self, x: Any) -> Any:
        if isinstance(x, fx.Node):
            return self.env[x]
        if isinstance(x, (list, tuple)):
            return [self.arg(v) for v in x]
        if isinstance(x, torch.SymInt):
            return self._size(x)
        return x

    def get_attr(self, n: fx.Node) -> None:
        value = self.module
        for name in n.target.split("."):
            value = getattr(value, name)
        if isinstance(value, Tensor):
            self.env[n] = leaf = Leaf(shape_of(value))
            self.g.inputs.append(
                Input(leaf, value.detach().resolve_conj().resolve_neg().contiguous())
            )
        else:
            self.env[n] = value

    def call_function(self, n: fx.Node) -> None:
        value = n.meta.get("val")
        target = n.target
        if target is operator.getitem and not isinstance(value, (torch.SymInt, int)):
            self.env[n] = self.arg(n.args[0])[n.args[1]]
        elif isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            self.env[n] = self._size(value)
        elif isinstance(value, (torch.SymFloat, torch.SymBool)):
            self.env[n] = self._number(value)
        elif isinstance(value, (bool, float)):
            self.env[n] = value
        elif (
            target is aten.copy_.default
            and isinstance(n.args[0], fx.Node)
            and n.args[0].op == "placeholder"
        ):
            self._write(n)
        elif target in CHECKS:
            self._check(n, target, n.args)
            self.env[n] = None
        elif target in _NO_RESULT:
            self.env[n] = None
        elif target is with_effects and n.args[1] in CHECKS:
            self._check(n, n.args[1], n.args[2:])
            self.env[n] = (None,)
        elif isinstance(target, (OpOverload, HigherOrderOperator)):
            self._operator(n, value)
        else:
            raise LoweringError(
                f"{target} ({source_line(n) or 'no source line'}) is not an operator that hlo can"
                " compile"
            )

    def _check(self, n: fx.Node, op: OpOverload, args: tuple) -> None:
        value = self.arg(args[0])
        check = At(lambda value: op(value, *args[1:], **n.kwargs), source_line(n))
        if self.logged is None:
            self.g.checks.append((value, check))
        else:
            first, last = self._tokens()
            token = self._add(log, (last, value, self.logged.number(check)), {}, TOKEN)
            self.g.tokens = first, token

    def _tokens(self) -> tuple[Leaf, Out | Leaf]:
        """Of the list that `logged` hands on."""
        if self.g.tokens is None:
            start = Leaf(TOKEN)
            self.g.tokens = start, start
        return self.g.tokens

    def _write(self, n: fx.Node) -> None:
        target = n.args[0]
        source = n.args[1]
        position = list(self.module.graph.find_nodes(op="placeholder")).index(target)
        have = source.meta["val"]
        want = target.meta["val"]
        value = self.arg(source)
        if have.dtype != want.dtype:
            value = self._add(
                aten._to_copy.default,
                (value,),
                {"dtype": want.dtype},
                Shape(shape_of(want).dtype, shape_of(have).dims),
            )
        if tuple(have.shape) != tuple(want.shape):
            value = self._add(
                aten.expand.default,
                (value, list(shape_of(want).dims)),
                {},
                shape_of(want),
            )
        self.env[n] = value
        self.g.writes.append((position, value))

    def _add(self, op: OpOverload, args: tuple, kwargs: dict, shape: Shape) -> Out:
        node = Node(op, args, kwargs, (shape,))
        self.g.nodes.append(node)
        return Out(node)

    def _operator(self, n: fx.Node, value: Any) -> None:
        if n.target in EXPANDED:
            self.env[n] = self._inline(expanded(n), n)
            return
        if value is None and n.users:
            value = traced_again(n)
        flat, tree = pytree.tree_flatten(value, is_leaf=lambda v: v is None)
        if any(isinstance(v, Tensor) and free_unbacked_symbols(v) for v in flat):
            raise LoweringError(
                f"{n.target} at {source_line(n) or 'an unknown line'}: the size of the result"
                " depends on values; let the graph break there"
                " (torch._dynamo.config.capture_dynamic_output_shape_ops = False)"
            )
        outs = tuple(shape_of(v) if isinstance(v, Tensor) else None for v in flat)
        args, kwargs = self._operands(n)
        if _has(self.module, n, _draws):
            kwargs["seed"], kwargs["offset"] = self.random()
        logs = n.target in HIGHER_ORDER and _has(self.module, n, _is_check)
        if logs:
            logged = self.logged or Logged(f"{n.target.name()} at {source_line(n)}")
            args = [self._inner(a, logged) for a in args]
            if self.logged is not None:
                kwargs["token"] = self._tokens()[1]
        node = Node(n.target, tuple(args), kwargs, (*outs, *[TOKEN] * logs), source_line(n))
        self.g.nodes.append(node)
        if logs:
            token = Out(node, len(outs))
            if self.logged is None:
                self.g.checks.append((token, logged))
            else:
                self.g.tokens = self._tokens()[0], token
        self.env[n] = pytree.tree_unflatten(
            [Out(node, i) if s is not None else None for i, s in enumerate(outs)],
            tree,
        )

    def _inner(self, x: Any, logged: Logged) -> Any:
        return from_fx(x, True, logged) if isinstance(x, fx.GraphModule) else x

    def _inline(self, module: fx.GraphModule, n: fx.Node) -> Any:
        """The results of a graph whose inputs are the flat node arguments of `n`."""
        reader = _Reader(module, self.random, self.inner, self.logged)
        reader.g = self.g
        reader.lifted = self.lifted
        reader.sizes = None
        operands = iter(node_arguments(n))
        for inner in module.graph.nodes:
            if inner.op == "placeholder":
                reader.env[inner] = self.env[next(operands)]
            elif inner.op == "output":
                return pytree.tree_map(
                    lambda v: reader.env[v] if isinstance(v, fx.Node) else v,
                    inner.args[0],
                )
            else:
                inner.meta.setdefault("stack_trace", n.meta.get("stack_trace"))
                getattr(reader, inner.op)(inner)
        raise LoweringError(f"{n.target}: a graph without output")

    def output(self, n: fx.Node) -> None:
        values = n.args[0] if isinstance(n.args[0], (list, tuple)) else [n.args[0]]
        for v in values:
            fake = v.meta.get("val") if isinstance(v, fx.Node) else None
            found = self.arg(v)
            if isinstance(found, Lift):
                found = next(i.source for i in self.g.inputs if i.leaf is found)
            self.g.outputs.append(
                (
                    found,
                    layout_of(fake) if isinstance(fake, Tensor) else None,
                )
            )


def from_fx(
    module: fx.GraphModule,
    inner: bool = False,
    logged: Logged | None = None,
) -> FxGraph:
    """Convert. Random ops take their seed from the last input. `inner`: a graph inside another one,
    whose inputs are row-major whatever their strides; its checks go to `logged`.

    Raises LoweringError naming the op when a call is not an operator.
    """
    reader = _Reader(module, None, inner, logged)
    for n in module.graph.nodes:
        getattr(reader, n.op)(n)
    if reader.seed is not None:
        reader.g.inputs.append(Input(reader.seed, None))
    return reader.g


def _has(module: fx.GraphModule, n: fx.Node, judge: Callable[[fx.Node], bool]) -> bool:
    """Whether a call, or one in a graph that it is given, is such."""
    if judge(n):
        return True
    if not isinstance(n.target, HigherOrderOperator):
        return False
    given = [getattr(module, str(x.target), None) for x in n.all_input_nodes if x.op == "get_attr"]
    inner = [g for g in given if isinstance(g, fx.GraphModule)]
    return any(_has(g, m, judge) for g in inner for m in g.graph.nodes)


def _draws(n: fx.Node) -> bool:
    """Whether a call draws random numbers."""
    return isinstance(n.target, OpOverload) and is_random(n.target) or n.target in RANDOM


def any_check(module: fx.GraphModule) -> bool:
    """Whether a graph has checks, or loops and branches in it."""
    return any(_has(module, n, _is_check) for n in module.graph.nodes)


def _is_check(n: fx.Node) -> bool:
    return n.target in CHECKS or n.target is with_effects and n.args[1] in CHECKS


# Assertions about sizes that Dynamo's guards have checked, and calls for their effect on tracing
# alone.
_NO_RESULT = {
    aten._assert_scalar.default,
    aten._assert_tensor_metadata.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}

# Calls that only raise, depending on their first argument.
CHECKS = {
    aten._linalg_check_errors.default,
    aten._assert_async.msg,
    aten._assert_async.default,
    look,
}


def source_line(n: fx.Node) -> str:
    """`file.py:12` of the user's line, from the stack trace that Dynamo recorded."""
    trace = n.meta.get("stack_trace") or ""
    for line in reversed(trace.splitlines()):
        parts = line.strip().split('"')
        if parts[0] == "File " and not parts[1].startswith(OURS):
            return f"{parts[1]}:{parts[2].split(',')[1].strip().removeprefix('line ')}"
    return ""
