"""Dynamo's graph -> `FxGraph` without AOTAutograd: the graph, which calls functions and methods of
PyTorch, is run once on recording tensors.

    graph = record(graph_module, example_inputs)      # raises Unsuitable, and whatever running the
                                                      # graph raises

AOTAutograd runs a graph twice on fake tensors and proxies, at about a millisecond per op, to get
rid of gradients, views and in-place writes. Tensors of the lazy device do that at ten microseconds.
What is known to come out the same is recorded: graphs on the CPU, of fixed sizes, that call
functions of PyTorch alone. Autocast casts as on the CPU. Their gradients are recorded by PyTorch's
autograd; cut.py makes two programs of both. A value that Python asks for, a result that is a view
of an input, results that share memory, other operators than PyTorch's: such graphs are
`Unsuitable`, and AOTAutograd has them. Results get the strides that Dynamo has found for them, and
their sizes and types are compared with its.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx

from torch_hlo.lazy.aten import dispatch
from torch_hlo.lazy.record import (
    Array,
    Engine,
    HloTensor,
    Number,
    fresh,
    generator,
    meta as metas,
    read,
    session,
)
from torch_hlo.lowering.core import LOWERINGS, RECORDING, SERIALS, Leaf, Node, Out
from torch_hlo.lowering.fx.fx_graph import FxGraph, Input, source_line
from torch_hlo.lowering.fx.fx_size import Layout, layout_of
from torch_hlo.pytorch import autocast, participants, tracing
from torch_hlo.pytorch.operators import OpOverload, OpOverloadPacket
from torch_hlo.pytorch.registration import PLACE

from .cut import Joint, key_of, shape_of

aten = torch.ops.aten
_CPU = torch.device("cpu")


class Unsuitable(Exception):
    """A graph that is left to AOTAutograd; the message says why."""


class _Recording(Engine):
    """The engine meanwhile: nothing is evaluated; what is uploaded are constants."""

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def materialize(self, tensors: Sequence[HloTensor]) -> list[torch.Tensor]:
        values = [
            t._storage.value.data if t._view is None and type(t._storage.value) is Array else None
            for t in tensors
        ]
        if any(v is None for v in values):
            raise Unsuitable("a value is needed while it is traced")
        return values

    def refuse(self, *args, **kwargs):
        raise Unsuitable("a value is needed while it is traced")

    mark_step = sync = synchronize = later = refuse


@contextlib.contextmanager
def _recording(gradients: bool) -> Iterator[None]:
    """Record here. The random numbers of the lazy device go on as if nothing had been drawn."""
    cast = autocast.as_on_the_cpu(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    with (
        RECORDING,
        session.use(_Recording(), everywhere=False),
        dispatch.uncut(),
        torch.set_grad_enabled(gradients),
        torch.device(PLACE.device),
        cast,
    ):
        drawn = generator.default.get_state()
        try:
            yield
        finally:
            generator.default.set_state(drawn)


def record(graph_module: fx.GraphModule, example_inputs: Sequence) -> FxGraph:
    """The graph of ops, for inputs like `example_inputs` (real tensors); a Joint with its
    gradients, if it has any. Raises Unsuitable, and PyTorch's errors."""
    _suit(graph_module, example_inputs)
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in example_inputs)
    with _recording(gradients), contextlib.ExitStack() as casts:
        return _Recorder(graph_module, example_inputs, gradients, casts).graph()


# ---- what is left to AOTAutograd

_MODULES = {
    "torch.functional",
    "torch.nn.functional",
    "torch._C._nn",
    "torch._C._linalg",
    "torch._C._special",
    "torch._C._fft",
    "_operator",
}
_ATTRIBUTES = {"T", "mT", "H", "mH", "real", "imag"}
# Methods that speak of memory, of gradients, or of other devices.
_METHODS = {
    "as_strided",
    "as_strided_",
    "set_",
    "resize_",
    "resize_as_",
    "stride",
    "storage_offset",
    "data_ptr",
    "untyped_storage",
    "requires_grad_",
    "register_hook",
    "retain_grad",
    "backward",
    "cuda",
    "numpy",
    "share_memory_",
    "pin_memory",
    "is_shared",
    "to_sparse",
    "to_mkldnn",
    "swap_",
}
_FUNCTIONS = {
    torch.as_strided,
    torch.as_strided_copy,
    torch.empty_permuted,
    torch.from_numpy,
    torch.frombuffer,
    torch.resize_as_,
}


def _suit(graph_module: fx.GraphModule, example_inputs: Sequence) -> None:
    """Raises Unsuitable if something is seen without running the graph."""
    if not all(
        type(x) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) for x in example_inputs
    ):
        raise Unsuitable("inputs that are no plain tensors, or sizes that are not fixed")
    if any(
        x.device != _CPU
        or x.layout is not torch.strided
        or x.is_conj()
        or x.is_neg()
        or x.is_quantized
        for x in example_inputs
    ):
        raise Unsuitable("inputs that are not dense tensors of the CPU")
    if [*graph_module.parameters(), *graph_module.buffers()]:
        raise Unsuitable("parameters that are no inputs")
    without = any(x.requires_grad for x in example_inputs) and not torch.is_grad_enabled()
    if participants.saved_tensors_hooks() is not None:
        raise Unsuitable("hooks for saved tensors")
    for n in graph_module.graph.nodes:
        if n.op == "call_module" or n.op == "call_method" and n.target in _METHODS:
            raise Unsuitable(f"a call of {n.target}")
        if (
            n.op == "call_function"
            and not _is_known(n)
            and (n.target is not tracing.set_grad_enabled or without)
        ):
            raise Unsuitable(f"a call of {n.target}")
        value = n.meta.get("example_value")
        if (
            isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
            or isinstance(value, torch.Tensor)
            and any(type(s) is not int for s in value.shape)
        ):
            raise Unsuitable("sizes that are not fixed")


def _is_known(n: fx.Node) -> bool:
    """Whether a call is one of PyTorch's own functions of tensors."""
    target = n.target
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return (
            target.namespace
            if isinstance(target, OpOverload)
            else target._qualified_op_name.split("::")[0]
        ) in ("aten", "prims")
    if target in (
        tracing.log_api_usage,
        tracing.enter_autocast,
        tracing.exit_autocast,
    ):
        return True
    if target is getattr:
        return n.args[1] in _ATTRIBUTES
    module = getattr(target, "__module__", None)
    return (
        module in _MODULES or module == "torch" and isinstance(target, types.BuiltinFunctionType)
    ) and target not in _FUNCTIONS


# ---- running the graph


class _Recorder:
    """State of one run."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        example_inputs: Sequence[torch.Tensor],
        gradients: bool,
        casts: contextlib.ExitStack,
    ) -> None:
        """`casts` ends the blocks of autocast that an error has cut short."""
        self.module, self.examples, self.gradients, self.casts = (
            graph_module,
            example_inputs,
            gradients,
            casts,
        )
        self.leaves: dict[int, Input] = {}
        self.given: list[HloTensor] = []
        self.before: list[tuple] = []  # of each input: metadata, storage, value
        self.env: dict[fx.Node, object] = {}
        # serial number at which a node of the FX graph ended
        self.lines: list[tuple[int, fx.Node]] = []

    def graph(self) -> FxGraph:
        for n in self.module.graph.nodes:
            if n.op == "output":
                return self._finish(list(n.args[0]))
            self.env[n] = result = getattr(self, n.op)(n)
            if isinstance(result, torch.Tensor) and type(result) is not HloTensor:
                raise Unsuitable(f"{n.target} gave a tensor of another device")
        raise Unsuitable("no results")

    def placeholder(self, n: fx.Node) -> HloTensor:
        position = len(self.given)
        example = self.examples[position]
        given = layout_of(example)
        layout = given.without_gaps
        size = tuple(example.shape)
        meta = metas.intern(size, example.stride(), example.dtype)
        if layout is not given:  # made contiguous before each call
            meta = metas.contiguous(size, example.dtype)
        leaf = Array(meta.hlo.with_dims(layout.physical(size)), None)
        self.leaves[id(leaf)] = Input(leaf, position, layout)
        value = (
            leaf
            if layout.plain
            else Out(
                Node(
                    aten.permute.default,
                    (leaf, [layout.order.index(d) for d in range(len(size))]),
                    {},
                    (meta.hlo,),
                )
            )
        )
        tensor = fresh(meta, value)
        if self.gradients and example.requires_grad:
            tensor.requires_grad_()
        self.given.append(tensor)
        self.before.append((meta, tensor._storage, value))
        return tensor

    def get_attr(self, n: fx.Node):
        value = self.module
        for name in n.target.split("."):
            value = getattr(value, name)
        if not isinstance(value, torch.Tensor):
            return value
        if (
            type(value) is not torch.Tensor
            or value.device != _CPU
            or value.requires_grad
            or value.layout is not torch.strided
        ):
            raise Unsuitable(f"the constant {n.target}")
        value = value.resolve_conj().resolve_neg()
        meta = metas.contiguous(tuple(value.shape), value.dtype)
        leaf = Array(meta.hlo, None)
        self.leaves[id(leaf)] = Input(leaf, value.contiguous())
        tensor = fresh(meta, leaf)
        self.before.append((meta, tensor._storage, leaf))
        return tensor

    def call_function(self, n: fx.Node):
        if n.target is tracing.set_grad_enabled:
            return tracing.set_grad_enabled(n.args[0] and self.gradients)
        if n.target is tracing.enter_autocast:
            device, dtype, enabled, cached = n.args
            block = contextlib.ExitStack()
            if device == "cpu":  # others have no tensors here
                block.enter_context(
                    torch.autocast(
                        PLACE.name,
                        dtype or torch.get_autocast_dtype("cpu"),
                        enabled,
                        cached,
                    )
                )
            self.casts.push(block)
            return block
        if n.target is tracing.exit_autocast:
            return self.env[n.args[0]].close()
        return self._call(n, n.target)

    def call_method(self, n: fx.Node):
        if n.target == "cpu":
            return self.env[n.args[0]]
        return self._call(n, getattr(torch.Tensor, n.target))

    def _call(self, n: fx.Node, function: Callable):
        args = self._value(n.args)
        kwargs = self._value(n.kwargs)
        if n.target in ("view", "view_as", torch.Tensor.view) and not isinstance(
            args[1], torch.dtype
        ):
            try:
                result = function(*args, **kwargs)
            except RuntimeError:  # attention, say, has other strides there
                result = torch.reshape(args[0], tuple(n.meta["example_value"].shape))
        else:
            result = function(*args, **kwargs)
        self.lines.append((next(SERIALS), n))
        for ours, theirs in _tensors(result, n.meta.get("example_value")):
            if ours.dtype != theirs.dtype:
                raise Unsuitable(f"{n.target} gives {ours.dtype} instead of {theirs.dtype}")
        return result

    def _value(self, x: object) -> object:
        """An argument of the FX graph, on the recording device."""
        kind = type(x)
        if kind is fx.Node:
            return self.env[x]
        if kind is tuple or kind is list or kind is fx.immutable_collections.immutable_list:
            return (tuple if isinstance(x, tuple) else list)(map(self._value, x))
        if isinstance(x, dict):
            return {k: self._value(v) for k, v in x.items()}
        if kind is slice:
            return slice(self._value(x.start), self._value(x.stop), self._value(x.step))
        if kind is torch.device:
            if x != _CPU:
                raise Unsuitable(f"the device {x}")
            return PLACE.device
        if x == "cpu" and kind is str:
            return PLACE.device
        return x

    def _compare_views(self) -> None:
        """Of a tensor that is written to it matters what is a view of it: the same must be here as
        for Dynamo."""
        for n, result in self.env.items():
            pairs = list(_tensors(result, n.meta.get("example_value")))
            for x in n.all_input_nodes if pairs else ():
                for ours, theirs in _tensors(self.env[x], x.meta.get("example_value")):
                    for r, e in pairs:
                        if not ours._storage.version and not r._storage.version:
                            continue
                        if (ours._storage is r._storage) != (
                            theirs.untyped_storage()._cdata == e.untyped_storage()._cdata
                        ):
                            raise Unsuitable(
                                f"what {n.target} returns is a view for one of Dynamo and this"
                                " device, and is written to"
                            )

    # ---- what was recorded

    def _finish(self, results: list) -> FxGraph:
        self._compare_views()
        g = (Joint if self.gradients else FxGraph)(placeholders=len(self.given))
        used: set[tuple] = set()

        def apart(value: Out | Array) -> Out:
            """The value as a root of its own: memory that nothing else has."""
            key = key_of(value)
            if type(value) is Array or key in used:
                value = Out(Node(aten.clone.default, (value,), {}, (shape_of(value),)))
            used.add(key)
            return value

        for position, (meta, storage, value) in enumerate(self.before):
            tensor = self.given[position] if position < len(self.given) else None
            if tensor is not None and (
                tensor._storage is not storage
                or tensor._meta is not meta
                or tensor._view is not None
            ):
                raise Unsuitable("an input is given other memory or sizes")
            if storage.value is not value:
                if tensor is None:
                    raise Unsuitable("a constant is written to")
                g.writes.append((position, apart(storage.value)))
        self._check_writes([position for position, _ in g.writes])
        inputs = {id(t): position for position, t in enumerate(self.given)}
        storages = {id(storage) for _, storage, _ in self.before}
        returned: dict[int, fx.Node] = {}
        for node in results:
            result = self._value(node)
            if not isinstance(result, HloTensor):
                if isinstance(node, fx.Node) or not isinstance(
                    node, (int, float, bool, type(None))
                ):
                    raise Unsuitable("a result that is no tensor")
                g.outputs.append((result, None))
            elif id(result) in inputs and not self.gradients:
                g.outputs.append((("input", inputs[id(result)]), None))
            elif id(result._storage) in storages:
                raise Unsuitable("a result is a view of an input")
            elif returned.setdefault(id(result._storage), node) is not node:
                raise Unsuitable("results share memory, or are one tensor")
            else:
                g.outputs.append((apart(read(result)), _layout(node, result)))
        if self.gradients:
            g = self._differentiate(g, results)
        self._collect(g)
        return g

    def _differentiate(self, g: Joint, results: list) -> FxGraph:
        """Record the gradients of the results that have any."""
        ends = []
        tangents = []
        for i, (node, (_, layout)) in enumerate(zip(results, g.outputs)):
            result = self._value(node)
            if not isinstance(result, HloTensor) or not result.requires_grad:
                continue
            layout = layout.without_gaps
            meta = (
                metas.contiguous(tuple(result.shape), result.dtype)
                if layout.plain
                else metas.intern(
                    tuple(result.shape),
                    node.meta["example_value"].stride(),
                    result.dtype,
                )
            )
            leaf = Array(meta.hlo, None)
            ends.append(result)
            tangents.append(fresh(meta, leaf))
            g.tangents.append((i, leaf, layout))
        if not ends:
            return FxGraph(g.placeholders, outputs=g.outputs, writes=g.writes)
        starts = [t for t in self.given if t.requires_grad]
        with torch.autocast(PLACE.name, enabled=False):
            found = iter(torch.autograd.grad(ends, starts, tangents, allow_unused=True))
        for tensor, example in zip(self.given, self.examples):
            gradient = next(found) if tensor.requires_grad else None
            if gradient is None:
                g.gradients.append((None, None))
                continue
            if gradient.shape != example.shape or gradient.dtype != example.dtype:
                raise Unsuitable(
                    f"a gradient of {gradient.dtype}{list(gradient.shape)} for"
                    f" {example.dtype}{list(example.shape)}"
                )
            g.gradients.append((read(gradient), layout_of(example).without_gaps))
        return g

    def _check_writes(self, written: list[int]) -> None:
        """Raises Unsuitable if a write is seen by another input, or goes to a tensor with gaps."""
        if any(self.given[position].requires_grad for position in written):
            raise Unsuitable("an input that takes a gradient is written to")
        if not written:
            return
        memory = [x.untyped_storage()._cdata for x in self.examples]
        for position in written:
            layout = layout_of(self.examples[position])
            if memory.count(memory[position]) > 1 or not layout.dense or layout.repeated:
                raise Unsuitable("writes to memory that inputs share")

    def _collect(self, g: FxGraph) -> None:
        """The nodes that are needed, and their leaves as inputs. Numbers are what they were; each
        random op has a place in the order of the graph."""
        values = [value for value, _ in g.outputs if type(value) is Out] + [
            value for _, value in g.writes
        ]
        found: dict[Node, None] = {}
        leaves: dict[int, Array] = {}
        if isinstance(g, Joint):
            values += [value for value, _ in g.gradients if value is not None]
        tangents = {id(leaf) for _, leaf, _ in getattr(g, "tangents", ())}
        stack: list = list(values)
        while stack:
            x = stack.pop()
            kind = type(x)
            if kind is Out:
                if x.node not in found:
                    found[x.node] = None
                    stack += [*x.node.args, *x.node.kwargs.values()]
            elif kind is Array:
                if id(x) not in tangents:
                    leaves[id(x)] = x
            elif kind is list or kind is tuple:
                stack += x
        g.nodes = sorted(found, key=lambda n: n.serial)
        seed: Leaf | None = None
        drawn = 0
        lines = iter(self.lines)
        line = next(lines, None)
        for node in g.nodes:
            if node.target not in LOWERINGS:
                raise Unsuitable(f"{node.target} has no lowering")
            if node.target is aten._softmax_backward_data.default and node.outs[0].rank > 2:
                # attention_saved.py keeps two numbers per row of it
                raise Unsuitable("attention that is written out")
            node.args, node.kwargs = _plain(node.args), _plain(node.kwargs)
            if "seed" in node.kwargs:
                seed = seed or Leaf(metas.contiguous((), torch.int64).hlo)
                node.kwargs["seed"], node.kwargs["offset"] = seed, drawn
                drawn += 1
            while line is not None and line[0] < node.serial:
                line = next(lines, None)
            node.source = source_line(line[1]) if line is not None else ""
        written = {position for position, _ in g.writes}
        for key, leaf in leaves.items():
            if key not in self.leaves:
                self.leaves[key] = Input(leaf, leaf.data)
        g.inputs = [
            x
            for key, x in self.leaves.items()
            if key in leaves or x.source.__class__ is int and x.source in written
        ]
        if seed is not None:
            g.inputs.append(Input(seed, None))


def _plain(x: object) -> object:
    """Arguments of a node with numbers as they are."""
    kind = type(x)
    if kind is Number:
        return x.value
    if kind is tuple or kind is list:
        return kind(map(_plain, x))
    if kind is dict:
        return {k: _plain(v) for k, v in x.items()}
    return x


def _layout(node: fx.Node, result: HloTensor) -> Layout:
    """How PyTorch expects a result to lie."""
    value = node.meta.get("example_value")
    if (
        not isinstance(value, torch.Tensor)
        or value.shape != result.shape
        or value.dtype != result.dtype
        or value.is_conj()
        or value.is_neg()
    ):
        raise Unsuitable(
            f"{node.target}: a result of {result.dtype}{list(result.shape)} instead of {value}"
        )
    return layout_of(value)


def _tensors(ours: object, theirs: object) -> Iterator[tuple[HloTensor, torch.Tensor]]:
    """Recorded tensors, and the fake ones that Dynamo had."""
    if isinstance(ours, HloTensor):
        if isinstance(theirs, torch.Tensor):
            yield ours, theirs
    elif isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        for pair in zip(ours, theirs):
            yield from _tensors(*pair)
