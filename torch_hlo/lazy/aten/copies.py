"""Copies: between tensors, between devices, and as another dtype."""

import torch

from torch_hlo.lowering.core import Node, Out
from torch_hlo.pytorch import participants

from ..record import (
    Array,
    HloTensor,
    Meta,
    aten,
    checks,
    exchange,
    fresh,
    from_cpu,
    handlers,
    handles,
    inference,
    meta as metas,
    meta_tensor,
    read,
    recording,
    session,
    write,
)
from ..record.tensor import upload
from .mutation import on_memory

# ---- copies


@handles(aten.copy_.default)
def copy_(args: tuple, kwargs: dict):
    target = args[0]
    source = args[1]
    if type(target) is not HloTensor:
        if not checks.plain(target):
            raise handlers.Foreign
        target.copy_(exchange.fetch(source, target.device))
        return target
    to = target._meta
    if type(source) is HloTensor and source._storage is target._storage:
        if source._meta is to and source._view is target._view:
            return target
        # PyTorch's composites copy memory to itself where they take it for a copy
        if not (to.shares or metas.same_place(to, source._meta)):
            checks.refuse_partial_overlap(target, source)
    if to.shares:
        return on_memory(aten.copy_.default, args, kwargs, [target])
    if type(source) is HloTensor:
        value = read(source)
        dtype = source._meta.dtype
        size = source._meta.size
    elif source.device.type == "meta":
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    elif checks.plain(source):
        with participants.plain_attributes():
            plain = source.detach()
            if plain.layout is not torch.strided:
                plain = plain.to_dense()
            value = upload(plain if plain.dtype == to.dtype else plain.to(to.dtype))
        dtype = to.dtype
        size = tuple(source.shape)
    else:
        raise handlers.Foreign
    if dtype != to.dtype:
        shape = metas.contiguous(size, to.dtype).hlo
        value = Out(Node(aten._to_copy.default, (value,), {"dtype": to.dtype}, (shape,)))
    if size != to.size:
        meta_tensor(to).copy_(torch.empty(size, device="meta"))  # raises if the sizes do not fit
        value = Out(Node(aten.expand.default, (value, list(to.size)), {}, (to.hlo,)))
    write(target, _recorded(value))
    return target


def _recorded(value: Out | Array) -> Out | Array:
    """The value of a whole tensor, for another one. A function that is being captured must see that
    it computes it, so there a copy is an op."""
    if type(value) is Array and session.engine().captures:
        return Out(Node(aten.clone.default, (value,), {}, (value.shape,)))
    return value


def copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """`aten::_copy_from`, which C++ calls where one side is an hlo tensor and `__torch_dispatch__`
    is off."""
    if type(target) is HloTensor:
        return copy_((target, source), {})
    return target.copy_(exchange.fetch(source, target.device))


@handles(aten.clone.default)
def clone(args: tuple, kwargs: dict):
    x = args[0]
    meta = x._meta
    key = (meta, kwargs.get("memory_format"))
    new = _CLONES.get(key)
    if new is None:
        new = _CLONES[key] = inference.infer(aten.clone.default, args, kwargs).metas[0]
    # a value never changes: the copy is another storage with the same value
    return fresh(new, _recorded(read(x)))


_CLONES: dict[tuple, Meta] = {}


def _changes(x: torch.Tensor, options: dict, names: tuple[str, ...]) -> dict:
    """The options of a copy that make another tensor of `x` than leaving them out."""
    same = {"dtype": x.dtype, "layout": x.layout, "memory_format": torch.preserve_format}
    return {
        name: value
        for name in names
        if (value := options.get(name)) is not None and value is not same[name]
    }


@handles(aten._to_copy.default)
def to_copy(args: tuple, kwargs: dict):
    x = args[0]
    device = kwargs.get("device")
    if type(x) is not HloTensor:  # a CPU tensor goes to the device
        recording.on_device(device)
        rest = _changes(x, kwargs, ("dtype", "memory_format"))
        made = from_cpu(aten._to_copy.default(x, **rest) if rest else x)
        if session.engine().captures:
            write(made, _recorded(read(made)))
        return made
    if device is not None and not recording.on_device(device):
        rest = _changes(x, kwargs, ("dtype", "memory_format", "layout"))
        if device.type == "meta":
            return aten._to_copy.default(meta_tensor(x._meta), **rest)
        value = exchange.fetch(x, device)
        if device.type != "cpu":
            rest["device"] = device
        return aten._to_copy.default(value, **rest) if rest else value
    if kwargs.get("layout") not in (None, torch.strided):
        raise NotImplementedError(f".to(layout={kwargs['layout']}): use .to_sparse()")
    dtype = kwargs.get("dtype")
    key = (x._meta, dtype, kwargs.get("memory_format"))
    meta = _COPIES.get(key)
    if meta is None:
        rest = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format")}
        meta = _COPIES[key] = inference.infer(aten._to_copy.default, args, rest).metas[0]
    if dtype is None or dtype == x._meta.dtype:
        return fresh(meta, read(x))
    source = session.current().sources and recording.source()
    return fresh(
        meta,
        Out(Node(aten._to_copy.default, (read(x),), {"dtype": dtype}, (meta.hlo,), source)),
    )


_COPIES: dict[tuple, Meta] = {}


# ---- metadata


@handles(aten._has_compatible_shallow_copy_type.default)
def _compatible(args: tuple, kwargs: dict) -> bool:
    return isinstance(args[1], HloTensor) == isinstance(args[0], HloTensor)
