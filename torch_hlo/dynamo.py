"""`torch.compile(model, backend="hlo")`: Dynamo's graphs through the same lowering and compiler as the lazy device.

Found by PyTorch through the entry point `torch_dynamo_backends`, so torch_hlo need not be imported first. Works on cpu tensors, for
training and inference, with static and dynamic sizes. Options (`torch.compile(..., options={...})`):

    fallback   "warn" (default), "allow" or "error": what to do with an op that has no lowering (it runs on the CPU as a custom call)
    name       name of the programs in logs and dumps
"""
from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import fx

from torch_hlo import config, metrics
from torch_hlo.device import runtime
from torch_hlo.hlo.dim import Dim, Size, substitute, symbol
from torch_hlo.hlo.shape import Shape
from torch_hlo.lazy import executor
from torch_hlo.lowering.fx import FxGraph, from_fx
from torch_hlo.lowering.graph import Leaf, Node, Out, lower
from torch_hlo.lowering.registry import HLO_TO_TORCH, LOWERINGS, LoweringError

aten = torch.ops.aten
OPTIONS: dict[str, tuple[type, tuple]] = {"fallback": (str, ("warn", "allow", "error")), "name": (str, ())}


def hlo(graph_module: fx.GraphModule, example_inputs: Sequence, *, options: dict | None = None, mode: str | None = None) -> Callable:
    """The Dynamo backend. Raises ValueError for an unknown option or value, LoweringError for what cannot be compiled."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    settings = _checked(options)
    compiler = functools.partial(compile_graph, settings=settings)
    return aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, inference_compiler=compiler, decompositions=decompositions(),
        partition_fn=min_cut_rematerialization_partition, keep_inference_input_mutations=True,
    )(graph_module, example_inputs)  # fmt: skip


def _checked(options: dict | None) -> dict:
    settings = {"fallback": config.get("FALLBACK"), "name": "graph"}
    for name, value in (options or {}).items():
        if name not in OPTIONS:
            raise ValueError(f"torch.compile(backend='hlo'): unknown option {name!r}; there are {', '.join(OPTIONS)}")
        kind, choices = OPTIONS[name]
        if not isinstance(value, kind) or choices and value not in choices:
            raise ValueError(f"torch.compile(backend='hlo'): option {name}={value!r}; expected {' or '.join(choices) or kind.__name__}")
        settings[name] = value
    return settings


@functools.cache
def decompositions() -> dict:
    """PyTorch's decompositions for everything that has no lowering of its own."""
    from torch._decomp import core_aten_decompositions, decomposition_table

    table = {**core_aten_decompositions()}
    extra = ("native_dropout", "native_layer_norm", "native_batch_norm", "native_group_norm")
    table.update({op: fn for op, fn in decomposition_table.items() if op._schema.name.removeprefix("aten::") in extra})
    return {op: fn for op, fn in table.items() if op not in LOWERINGS}


def compile_graph(graph_module: fx.GraphModule, example_inputs: Sequence, settings: dict) -> Callable:
    """Compile one FX graph of aten ops into a function of a list of inputs (AOTAutograd's boxed convention)."""
    start = time.perf_counter()
    g = from_fx(graph_module)
    program = _Compiled(g, settings)
    metrics.count("UncachedCompile")
    metrics.record("CompileTime", time.perf_counter() - start)

    def run(args: list) -> list:
        return program(args)

    run._boxed_call = True
    return run


class Foreign:
    """Memory of a CPU tensor, seen as device memory."""

    __slots__ = ("shape", "tensor", "job")

    def __init__(self, shape: Shape, tensor: torch.Tensor) -> None:
        self.shape, self.tensor, self.job = shape, tensor, None

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.shape.nbytes

    @property
    def bytes(self):
        return self.tensor.detach().reshape(-1).view(torch.uint8).numpy() if self.tensor.numel() else self.tensor.new_empty(0, dtype=torch.uint8).numpy()


class _Compiled:
    """A loaded program and how to bind the arguments of the FX graph to it."""

    def __init__(self, g: FxGraph, settings: dict) -> None:
        self.graph = g
        self.symbols, extra = _bind_symbols(g)
        results: list[Out] = []
        index: dict[tuple[int, int], int] = {}

        def result(x: Out) -> int:
            key = (id(x.node), x.index)
            if key not in index:
                index[key] = len(results)
                results.append(x)
            return index[key]

        # Row-major inside: an output that PyTorch expects with other strides is computed in its physical order (see _order).
        self.outputs = [("value", result(x)) if isinstance(x, Out) else ("input", self._position(x)) if isinstance(x, Leaf) else ("size", x) for x in g.outputs]
        self.writes = [(p, ("value", result(v)) if isinstance(v, Out) else ("input", self._position(v))) for p, v in g.writes]
        aliases = []
        for position, (kind, i) in self.writes:
            if kind == "value" and i not in [a for a, _ in aliases] and ("value", i) not in self.outputs:
                aliases.append((i, g.tensor_inputs.index(position)))
        _check_fallback(g.nodes, settings["fallback"])
        inputs = [*g.inputs, *extra]
        self.program = executor.call_compiler(
            lambda: runtime.compile_program(lower(g.nodes, results, inputs, tuple(aliases), settings["name"], self.symbols))
        )
        self.shapes = [x.node.outs[x.index] for x in results]
        self.aliases = dict(self.program.aliases)
        self.static = not self.symbols
        self.constants = [Foreign(leaf.shape, t.detach().contiguous()) for leaf, t in zip(g.inputs[len(g.tensor_inputs) :], g.constants)]
        self.extra = extra

    def _position(self, leaf: Leaf):
        i = self.graph.inputs.index(leaf)
        n = len(self.graph.tensor_inputs)
        return self.graph.tensor_inputs[i] if i < n else -1 - (i - n)

    def __call__(self, args: list) -> list:
        g = self.graph
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        inputs = []
        values = {} if self.static else self._sizes(args)
        for position, leaf in zip(g.tensor_inputs, g.inputs):
            t = args[position]
            dense = t if t.is_contiguous() and not t.is_conj() and not t.is_neg() else t.resolve_conj().resolve_neg().contiguous()
            if dense is not t:
                copies.append((t, dense))
            inputs.append(Foreign(leaf.shape if self.static else _concrete(leaf.shape, values), dense))
        inputs += self.constants
        if g.random:
            inputs += [_scalar(int(torch.randint(2**62, ()))), _scalar(0)]
        inputs += [Foreign(_concrete(leaf.shape, values), torch.empty(0, dtype=torch.uint8)) for leaf in self.extra]
        outputs = []
        for i, shape in enumerate(self.shapes):
            if i in self.aliases:
                outputs.append(inputs[self.aliases[i]])
            else:
                shape = shape if self.static else _concrete(shape, values)
                outputs.append(Foreign(shape, torch.empty(shape.dims, dtype=HLO_TO_TORCH[shape.dtype])))
        self.program.run(inputs, outputs)
        for position, (kind, i) in self.writes:
            source = outputs[i].tensor if kind == "value" else self._input(args, i)
            if source is not args[position]:
                args[position].copy_(source)
        found = [outputs[v].tensor if kind == "value" else self._input(args, v) if kind == "input" else v if not isinstance(v, Dim) else substitute(v, values)
                 for kind, v in self.outputs]  # fmt: skip
        args.clear()
        return found

    def _input(self, args: list, i: int) -> torch.Tensor:
        return args[i] if i >= 0 else self.constants[-1 - i].tensor

    def _sizes(self, args: list) -> dict[str, int]:
        values = {name: int(args[position]) for name, position in self.graph.size_inputs.items()}
        for name, (i, d) in self.graph.size_dims.items():
            values.setdefault(name, args[self.graph.tensor_inputs[i]].shape[d])
        return values


def _bind_symbols(g: FxGraph) -> tuple[tuple[tuple[str, int, int], ...], list[Leaf]]:
    """Where each symbol is read. A symbol that is no dimension of an input gets an input of its own, u8[s,0]: no bytes, but a size."""
    found = [(name, i, d) for name, (i, d) in g.size_dims.items()]
    extra = []
    for name in g.size_inputs:
        if name not in g.size_dims and name.isidentifier():
            found.append((name, len(g.inputs) + len(extra), 0))
            extra.append(Leaf(Shape("u8", (symbol(name), 0))))
    return tuple(found), extra


def _concrete(shape: Shape, values: dict[str, int]) -> Shape:
    return Shape(shape.dtype, tuple(_value(d, values) for d in shape.dims))


def _value(size: Size, values: dict[str, int]) -> int:
    return size if isinstance(size, int) else substitute(size, values)


def _scalar(value: int) -> Foreign:
    return Foreign(Shape("s64"), torch.tensor(value))


def _check_fallback(nodes: list[Node], fallback: str) -> None:
    """Ops without a lowering: with fallback="error" they raise, else `lower` turns them into custom calls."""
    missing = {str(n.target): n.source for n in reversed(nodes) if n.target not in LOWERINGS}
    if not missing:
        return
    text = ", ".join(f"{op}{f' at {where}' if where else ''}" for op, where in sorted(missing.items()))
    if fallback == "error":
        raise LoweringError(f"no lowering for {text}; options={{'fallback': 'allow'}} runs them on the CPU")
    if fallback == "warn":
        warnings.warn(f"torch.compile(backend='hlo'): no lowering for {text}; running on the CPU inside the program", stacklevel=2)
