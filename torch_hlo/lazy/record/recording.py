"""An op as a node of the graph: its arguments as operands, its results as tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_hlo import log
from torch_hlo.device import multi_device as collective_devices
from torch_hlo.lowering.core import GUARDS, NO_KWARGS, TAPE, Node, Out, further, recorded
from torch_hlo.lowering.core.registry import lifts
from torch_hlo.pytorch import participants
from torch_hlo.pytorch.operators import OpOverload, base_name
from torch_hlo.pytorch.registration import PLACE

from . import checks, decompose, filled, generator, session
from .handlers import Handler, has_lowering
from .inference import infer, remembered
from .meta import Meta, Result, aten
from .storage import Number, holding, read
from .tensor import HloTensor, blank, fresh, to_cpu

_session = session.current()


class Arguments:
    """How the arguments of one overload are recorded: which positions and keywords take floats as
    inputs of the program."""

    __slots__ = ("lift", "lift_keywords", "op")

    def __init__(self, op: OpOverload) -> None:
        arguments = op._schema.arguments
        lifted = [lifts(op, a) for a in arguments]
        self.lift = tuple(lifted) + (False,)
        self.lift_keywords = {a.name for a, yes in zip(arguments, lifted) if yes}
        self.op = op

    def varies(self, before: list, number: int) -> bool:
        """Whether the integer after these operands is an input of the program, too."""
        return (
            self.lift[len(before)]  # most integers are sizes and dimensions
            and (self.op, *_traits(before)) in _session.varying
            and -(1 << 63) <= number < 1 << 63
        )


def vary(node: Node, place: int) -> None:
    """The integer at a place of a node's arguments was found to vary: from now on it is recorded as
    an input. Not where results are narrow integers: PyTorch says if a number does not fit those."""
    if all(out is None or out.dtype == "s64" or out.kind not in "su" for out in node.outs):
        _session.varying.add((node.target, *_traits(node.args[:place])))


def _traits(operands: list | tuple) -> tuple:
    """What stands for operands: the shapes of arrays, and other arguments."""
    return tuple([_trait(x) for x in operands])


def _trait(x):
    if isinstance(x, (list, tuple)):
        return _traits(x)
    if isinstance(x, Number):
        return x.dtype
    if type(x) is Out:
        return x.node.outs[x.index]
    return getattr(x, "shape", x)


# Arguments that stay in the graph as they are. In a key their type stands before the value: 1 ==
# 1.0 == True.
_STATIC = frozenset(
    {
        int,
        bool,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)


def operand(a, key: list, words: list[int], lift: bool):
    """Operand of a node for the argument `a`, whose contributions to the metadata key and to the
    tape are appended to `key` and `words`."""
    kind = type(a)
    if kind is HloTensor:
        key.append(a._meta)
        value = read(a)
        words.append(TAPE.place(value))
        return value
    if kind is float:
        key.append(float)
        if lift:
            number = Number(a, "f64")
            words.append(TAPE.place(number))
            return number
        key.append(a.hex())  # 0.0 == -0.0
        return a
    if kind in _STATIC:
        key += (kind, a)
        return a
    if kind is list or kind is tuple:
        return sequence(a, key, words, lift)
    if isinstance(a, torch.Tensor):
        a = checks.admit(a)
        key.append(a._meta)
        value = read(a)
        words.append(TAPE.place(value))
        return value
    if kind is torch.SymFloat:
        key.append(float)
        if lift:
            number = session.engine().symbolic(a)
            words.append(TAPE.place(number))
            return number
        key.append(float(a).hex())
        return float(a)
    if isinstance(a, (torch.SymInt, torch.SymBool)):
        raise TypeError(f"the hlo device cannot record the symbolic value {a}")
    key += (kind, a if kind is not complex else repr(a))
    return a


def copied(node: Node, value: Callable[[Any], Any]) -> Node:
    """The operation of a node, on what `value` makes of its operands."""
    kwargs = {k: value(v) for k, v in node.kwargs.items()}
    return Node(node.target, tuple(map(value, node.args)), kwargs, node.outs, node.source)


def sequence(items: list | tuple, key: list, words: list[int], lift: bool) -> list:
    """Operand for a list: sizes and dimensions at once, the hundreds of tensors of an optimizer in
    one loop, others one by one."""
    kinds = tuple(map(type, items))
    key.append(kinds)
    one_kind = _UNIFORM.get(kinds)
    if one_kind is None:
        one_kind = _UNIFORM[kinds] = (
            HloTensor if {*kinds} == {HloTensor} else int if {*kinds} <= _STATIC else object
        )
    if one_kind is int:
        key.append(tuple(items))
        return list(items)
    if one_kind is object:
        return [operand(x, key, words, lift) for x in items]
    values = []
    base = TAPE.base
    for t in items:
        key.append(t._meta)
        value = t._storage.value if t._view is None else read(t)
        values.append(value)
        place = value.place - base  # TAPE.place, inlined here and below: this is the hot path
        words.append(place if place >= 0 else TAPE.put(value))
    return values


# types of a list's items -> HloTensor for tensors of this device, int for static arguments, else
# object
_UNIFORM: dict[tuple[type, ...], type] = {}


_DROPPED = ("device", "layout", "pin_memory", "generator")


def operands(
    args: tuple, kwargs: dict, arguments: Arguments
) -> tuple[list, dict, tuple, int, list[int]]:
    """Node arguments, node keywords, metadata key; start of the tape, and the words for it (the
    form is left open)."""
    key: list = []
    words = [-1]
    nodes = []
    base = TAPE.base
    for a in args:
        kind = type(a)
        if kind is HloTensor:
            key.append(a._meta)
            value = a._storage.value if a._view is None else read(a)
            nodes.append(value)
            place = value.place - base
            words.append(place if place >= 0 else TAPE.put(value))
        elif kind is list:
            nodes.append(sequence(a, key, words, arguments.lift[len(nodes)]))
        elif kind is int and _session.varying and arguments.varies(nodes, a):
            number = Number(a, "s64")
            key.append(Number)
            words.append(TAPE.place(number))
            nodes.append(number)
        elif kind in _STATIC:
            key.append(kind)
            key.append(a)
            nodes.append(a)
        else:
            nodes.append(operand(a, key, words, arguments.lift[len(nodes)]))
    if not kwargs:
        return nodes, NO_KWARGS, tuple(key), base, words
    keywords = {}
    for name, a in kwargs.items():
        if name in _DROPPED:
            if name == "layout" and a not in (None, torch.strided):
                raise NotImplementedError(f"this op makes no {a} tensors: use .to_sparse()")
            continue
        key.append(name)
        keywords[name] = operand(a, key, words, name in arguments.lift_keywords)
    return nodes, keywords, tuple(key), base, words


def maker(op: OpOverload) -> Handler | None:
    """The handler of an op with a lowering."""
    if not (has_lowering(op) or has_lowering(generator.plain(op))):
        return None
    handler = recorder(op)
    return filled.noted(handler) if op in filled.FILLS else handler


def recorder(op: OpOverload, random: bool | None = None, first: bool = False) -> Handler:
    """Handler that records a functional op. `random`: whether it draws random numbers, where its
    name does not say so; `first`: only the first of its results, which are tensors, is wanted."""
    arguments = Arguments(op)
    cache: dict[tuple, Result] = remembered()
    check = checks.BOUNDS.get(op)
    guard = GUARDS.get(op)
    random = generator.is_random(op) if random is None else random
    target = generator.plain(op)
    has_device = any(a.name == "device" for a in op._schema.arguments)

    def record(args: tuple, kwargs: dict) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if has_device and "device" in kwargs and not on_device(kwargs["device"]):
            return like_on_cpu(op, args, kwargs)
        nodes, keywords, key, base, words = operands(args, kwargs, arguments)
        result = cache.get(key)
        if result is None:
            if guard is not None and not guard(*args, **kwargs):
                return decompose.on_cpu(op, args, kwargs)
            try:
                result = cache[key] = infer(target, args, kwargs)
            except NotImplementedError:
                # no meta kernel: the shapes are not known before the op has run
                return decompose.on_cpu(op, args, kwargs)
        if check is not None:
            check(op, args, kwargs)
        if random:
            value = drawn(target, nodes, keywords, result.outs, kwargs)
        else:
            words[0] = result.taped
            value = recorded(
                target,
                tuple(nodes),
                keywords,
                result.outs,
                _session.sources and source(),
                base,
                words,
            )
        if first or result.form == 0:
            meta = result.metas[0]
            t = blank(meta)  # `fresh`, inlined: this is the hot path
            t._storage = holding(value, meta)
            return t
        node = value.node
        if result.flat is None:
            return build(result.form, result.metas, node)
        results = []
        for meta in result.metas:
            t = None
            if meta is not None:
                t = blank(meta)
                t._storage = holding(further(node, len(results)) if results else value, meta)
            results.append(t)
        return results if result.flat is list else tuple(results)

    return record


def source() -> str:
    """The user's line. While gradients are computed also that of the operation which they are of,
    if PyTorch keeps it."""
    line = session.line()
    if _session.modules is not None and (module := _session.modules()):
        line += f", in module {module}"
    for frame in reversed(participants.forward_trace()):
        file, _, rest = frame.strip().removeprefix('File "').partition('", line ')
        if not file.startswith(log.OURS):
            return f"{file}:{rest.partition(',')[0]}, in the backward pass from {line}"
    return line


def drawn(op: OpOverload, nodes: list, keywords: dict, outs: tuple, kwargs: dict) -> Out:
    """The first result of an op that draws random numbers. `kwargs`: what it was called with."""
    seed, offset = generator.draw(kwargs)
    keywords = {**keywords, "seed": seed, "offset": offset}
    return Out(Node(op, tuple(nodes), keywords, outs, _session.sources and source()))


def build(form, metadata: tuple[Meta | None, ...], node: Node):
    """The results of a node in the nesting `form`."""
    kind = type(form)
    if kind is int:
        meta = metadata[form]
        return None if meta is None else fresh(meta, Out(node, form))
    if kind is dict:
        return form["value"]
    return kind(build(f, metadata, node) for f in form)


def on_device(device) -> bool:
    """True for the hlo device (or no device). Raises for an index that does not exist."""
    if device is None:
        return True
    device = torch.device(device)
    if device.type not in PLACE.names:
        return False
    if device.index and not collective_devices.is_own_index(device.index):
        raise RuntimeError(collective_devices.ORDINAL.format(device.index))
    return True


def like_on_cpu(op: OpOverload, args: tuple, kwargs: dict):
    """`zeros_like(x, device="cpu")` and friends: only the metadata of x counts; of the ends of
    `linspace` and `logspace` it is the values."""
    ends = "space" in base_name(op)

    def stand_in(a):
        if isinstance(a, HloTensor):
            if ends:
                return to_cpu([a])[0]
            return aten.empty_strided.default(
                a._meta.size, a._meta.stride, dtype=a._meta.dtype, device="cpu"
            )
        return a

    return op(*map(stand_in, args), **{k: stand_in(v) for k, v in kwargs.items()})
