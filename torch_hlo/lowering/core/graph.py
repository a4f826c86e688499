"""A recorded graph of aten ops -> an HLO module. The lazy path and torch.compile both come through
here.

    node = Node(aten.add.Tensor, (leaf, leaf), {}, (Shape("f32", (4,)),))
    module = lower([node], [Out(node, 0)], [leaf])
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch_hlo.hlo.ir import (
    Computation,
    Instruction,
    Ints,
    Meta,
    Module,
    Shape,
    begin_program,
    instr,
    noted,
    tuple_shape,
)
from torch_hlo.hlo.ir.build import full
from torch_hlo.hlo.sharding.sharding import Mesh, Sharding
from torch_hlo.pytorch.operators import HigherOrderOperator, OpOverload

from . import registry
from .opaque import opaque
from .registry import HIGHER_ORDER, LOWERINGS, LoweringError, Results, Weak
from .tape import LIFTS, RECORDING, SERIALS, TAPE

Target: TypeAlias = OpOverload | HigherOrderOperator


class Node:
    """One recorded functional aten op. `args` and `kwargs` hold Out, Leaf, Lift, plain Python
    values and lists of them.

    `outs` are the shapes of the flat results (None for an undefined one); `source` is the Python
    line, or "". `serial` grows with every node, so that operands come first in its order. `place`:
    where it is on the tape (tape.py), on which only those write who record; else -1."""

    __slots__ = (
        "target",
        "args",
        "kwargs",
        "outs",
        "source",
        "serial",
        "place",
        "__weakref__",
    )

    def __init__(
        self,
        target: Target,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outs: tuple[Shape | None, ...],
        source: str = "",
    ) -> None:
        self.target = target
        self.args = args
        self.kwargs = kwargs
        self.outs = outs
        self.source = source
        self.serial = next(SERIALS)
        self.place = -1
        if RECORDING._is_owned():
            words = TAPE.describe(self)
            self.place = TAPE.here()
            TAPE.words += words + [0] * (len(outs) - 1)
            if TAPE.nodes is not None:
                TAPE.nodes.append(self)


class Out:
    """Result `index` (flat) of `node`, and its place on the tape. `array` is the Leaf that holds it
    once the node has been evaluated, else None."""

    __slots__ = ("node", "index", "array", "place")
    is_result = True

    def __init__(self, node: Node, index: int = 0) -> None:
        self.node = node
        self.index = index
        self.array: Leaf | None = None
        self.place = -1 if node.place < 0 else node.place + index


NO_KWARGS: dict[str, Any] = {}  # of nodes without any: nobody writes to it
_new = object.__new__


def recorded(
    target: Target,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outs: tuple[Shape | None, ...],
    source: str,
    base: int,
    words: list[int],
) -> Out:
    """The first result of a new node, as `Out(Node(target, args, kwargs, outs, source))`, in half
    the time: its words for a tape that begins at `base` are known, and Python takes long to call
    `__init__`. The caller holds RECORDING."""
    node = _new(Node)
    node.target = target
    node.args = args
    node.kwargs = kwargs
    node.outs = outs
    node.source = source
    if base != TAPE.base:  # another thread has cut the graph meanwhile
        TAPE.exact = False
        base = TAPE.base
    tape = TAPE.words
    out = _new(Out)
    out.node = node
    out.index = 0
    out.array = None
    node.serial = next(SERIALS)
    node.place = out.place = base + len(tape)
    if len(outs) > 1:
        words += [0] * (len(outs) - 1)
    tape += words
    if TAPE.nodes is not None:
        TAPE.nodes.append(node)
    return out


def further(node: Node, index: int) -> Out:
    """`Out(node, index)`, for the results of `recorded` nodes."""
    out = _new(Out)
    out.node = node
    out.index = index
    out.array = None
    out.place = node.place + index
    return out


class Leaf:
    """An array that the program takes as a parameter. `place`: where it is on the tape (tape.py),
    or was on an earlier one."""

    __slots__ = ("shape", "place", "form", "__weakref__")
    is_result = False

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.place = self.form = -1


class Lift:
    """A Python number that the program takes as a rank-0 parameter of `dtype` ("f64" or "s64"), so
    that another value does not recompile. Seen by lowerings as `Weak`."""

    __slots__ = ("dtype", "place", "form", "__weakref__")
    is_result = False

    def __init__(self, dtype: str = "f64") -> None:
        self.dtype = dtype
        self.place = -1
        self.form = LIFTS[dtype]


# The mesh of a program that is to be partitioned, and the shardings of its leaves and outputs where
# they are known.
Placed = tuple[Mesh, Sequence[Sharding | None], Sequence[Sharding | None]]


class Subgraph:
    """A function among the arguments of a node (a higher-order operator's). `key` identifies what
    it computes."""

    key: tuple


def lower(
    nodes: Sequence[Node],
    outputs: Sequence[Out | Leaf],
    inputs: Sequence[Leaf | Lift],
    aliases: tuple[tuple[int, int], ...] = (),
    name: str = "step",
    symbols: tuple[tuple[str, int, int], ...] = (),
    placed: Placed | None = None,
    constants: Ints = (),
) -> Module:
    """Lower `nodes` (in an order where operands come first). Parameter i of the module is
    `inputs[i]`.

    `aliases`: (output, input) pairs, and `constants`, see Module; `placed` makes an annotated
      program for many devices. Raises LoweringError when an op
    has no lowering or the lowering does not give the recorded shapes.
    """
    begin_program()
    mesh, leaf_shardings, output_shardings = placed or (None, (), ())
    values: dict[int, Instruction | Weak] = {}
    params = []
    for i, leaf in enumerate(inputs):
        shape = leaf.shape if isinstance(leaf, Leaf) else Shape(leaf.dtype)
        known = leaf_shardings[i] if i < len(leaf_shardings) else None
        param = instr("parameter", (), shape, index=i, sharding=_sharding(known, mesh, shape))
        params.append(param)
        values[id(leaf)] = param if isinstance(leaf, Leaf) else Weak(param)

    with registry.numbering_channels():
        roots = apply(nodes, outputs, values)
    shardings = tuple(_sharding(s, mesh, r.shape) for s, r in zip(output_shardings, roots)) or None
    root = instr("tuple", roots, tuple_shape(*(r.shape for r in roots)), sharding=shardings)
    return Module(
        name,
        Computation("main", tuple(params), root),
        aliases,
        symbols,
        mesh,
        constants=constants,
    )


def _sharding(known: Sharding | None, mesh: Mesh | None, shape: Shape) -> Sharding | None:
    """Of an argument or a result: what is known, or free for propagation to choose."""
    return (
        known
        if known is not None or mesh is None
        else Sharding.replicate(mesh, shape.rank, open=True)
    )


def apply(
    nodes: Sequence[Node],
    outputs: Sequence[Out | Leaf],
    values: Mapping[int, Instruction | Weak],
) -> list[Instruction]:
    """Lower `nodes` where the leaf with id i has the value `values[i]`; returns the values of
    `outputs`."""
    results: dict[int, Results] = {}

    def value(x: Any) -> Any:
        kind = type(x)
        if kind is Out:
            return results[id(x.node)][x.index] if x.array is None else values[id(x.array)]
        if isinstance(x, (Leaf, Lift)):
            return values[id(x)]
        if kind is list or kind is tuple:
            return [value(v) for v in x]
        return x

    for node in nodes:
        try:
            results[id(node)] = _lower_node(
                node,
                [value(a) for a in node.args],
                {k: value(v) for k, v in node.kwargs.items()},
            )
        except Exception as error:
            error.node = node
            raise
    return [value(x) for x in outputs]


def _lower_node(
    node: Node,
    args: list[Any],
    kwargs: dict[str, Any],
) -> Results:
    fn = LOWERINGS.get(node.target)
    if fn is not None and all(out is not None and 0 in out.dims for out in node.outs):
        # no element is computed: whatever the op means for these types
        return tuple(full(0, out.dtype, out.dims) for out in node.outs if out is not None)
    if fn is None and isinstance(node.target, HigherOrderOperator):
        fn = HIGHER_ORDER.get(node.target)
    if fn is None:  # a custom operator or a rare one: a custom call that runs it on the CPU

        def fn(*args: Any, **kwargs: Any) -> Results:
            return opaque(node.target, args, kwargs, node.outs)

    registry.EXPECTED.append(node.outs)
    try:
        flat = tuple(_flatten(fn(*args, **kwargs)))
    except LoweringError:
        raise
    except Exception as error:
        error.add_note(f"while lowering {node.target} on {_shapes(args)}{_at(node)}")
        raise
    finally:
        registry.EXPECTED.pop()
    if len(flat) != len(node.outs):
        raise LoweringError(
            f"{node.target}: the lowering gave {len(flat)} results, PyTorch {len(node.outs)}"
        )
    for got, want in zip(flat, node.outs, strict=True):
        if (
            got is not None
            and want is not None
            and (got.dtype, got.dims) != (want.dtype, want.dims)
        ):
            raise LoweringError(
                f"{node.target}({_shapes(args)}): the lowering gave {got.shape}, PyTorch"
                f" {want}{_at(node)}"
            )
    meta = Meta("", str(node.target), node.source)
    stack = [x for x in flat if x is not None and noted(x, meta)]
    while stack:  # what they are made of comes from this line, too
        stack += [o for o in stack.pop().operands if o.operands and noted(o, meta)]
    return flat


def _flatten(result: Any) -> Iterator[Instruction | None]:
    if isinstance(result, (tuple, list)):
        for r in result:
            yield from _flatten(r)
    else:
        yield result


def _shapes(args: Sequence[object]) -> str:
    return ", ".join(str(a.shape) if isinstance(a, Instruction) else repr(a) for a in args)


def _at(node: Node) -> str:
    return f" at {node.source}" if node.source else ""
