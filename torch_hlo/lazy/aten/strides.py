"""Ops that speak of sizes, strides and storages: `as_strided`, `empty_strided`, `resize_`,
`set_`, and
views in place."""

import gc
import sys

import torch

from torch_hlo.lowering.core import Node, Out
from torch_hlo.pytorch.operators import OpOverload

from ..record import (
    Handler,
    HloTensor,
    Meta,
    adopt,
    aten,
    call,
    fresh,
    handlers,
    handles,
    in_inference_mode,
    meta as metas,
    meta_tensor,
    recording,
    views,
)
from ..record.tensor import set_memory, strided
from .view_ops import outside_inference_mode


@handles(aten.as_strided.default)
def as_strided(args: tuple, kwargs: dict):
    x, size, stride, *rest = args
    if in_inference_mode() and not x.is_inference():
        return outside_inference_mode(as_strided, args, kwargs)
    offset = rest[0] if rest else kwargs.get("storage_offset")
    size = tuple(size)
    stride = tuple(stride)
    if len(size) != len(stride) or min(stride, default=0) < 0 or min(size, default=0) < 0:
        meta_tensor(x._meta).as_strided(size, stride, offset or 0)
    meta = metas.intern(size, stride, x._meta.dtype, x._meta.offset if offset is None else offset)
    return strided(x, meta)


@handles(aten.empty_strided.default, aten.new_empty_strided.default)
def empty_strided(args: tuple, kwargs: dict):
    args = args if not isinstance(args[0], torch.Tensor) else (*args[1:], args[0])
    size = tuple(args[0])
    stride = tuple(args[1])
    like = args[2] if len(args) > 2 else None
    dtype = kwargs.get("dtype") or (like.dtype if like is not None else torch.get_default_dtype())
    if "device" in kwargs and not recording.on_device(kwargs["device"]):
        return aten.empty_strided.default(size, stride, dtype=dtype, device=kwargs["device"])
    meta = metas.intern(size, stride, dtype)
    if metas.physical_order(meta) is None:
        flat = _empty(metas.contiguous((metas.extent(meta),), dtype))
        return strided(flat, meta)
    return _empty(meta)


@handles(aten._efficientzerotensor.default)
def efficient_zeros(args: tuple, kwargs: dict) -> torch.Tensor:
    # Forward-mode AD's tangent that is known to be zero; here an ordinary one.
    meta = metas.contiguous(tuple(args[0]), kwargs.get("dtype") or torch.get_default_dtype())
    return _made(aten.zeros.default, meta)


def _empty(meta: Meta) -> HloTensor:
    return _made(aten.empty.memory_format, meta)


def _made(op: OpOverload, meta: Meta) -> HloTensor:
    """What a factory gives for a size and a dtype."""
    return fresh(meta, Out(Node(op, (list(meta.size),), {"dtype": meta.dtype}, (meta.hlo,))))


def resize(
    x: HloTensor,
    size: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
) -> HloTensor:
    """`x.resize_(size)`, row-major if no strides are given: the elements in memory order stay; new
    ones are undefined (zero). Growing grows the storage, which all tensors that alias it go on
    sharing."""
    meta = metas.intern(size, stride or metas.row_major(size), x.dtype, x._meta.offset)
    base = x._storage.meta
    have = metas.numel(base.size)
    need = metas.extent(meta)
    if need * x.dtype.itemsize > have * base.dtype.itemsize:
        if base.dtype != meta.dtype:
            raise NotImplementedError(
                f"resize_ of a {meta.dtype} view of a {base.dtype} storage: call .clone() first"
            )
        _grow(x, need)
    return adopt(x, strided(x, meta))


def _grow(x: HloTensor, count: int) -> None:
    """Make x's storage a flat array of `count` elements that begins with the present ones, in
    memory order."""
    storage = x._storage
    base = storage.meta
    flat = metas.contiguous((count,), base.dtype)
    aliases = [x]
    # more than x, this name and the call: other tensors, which only the collector knows
    if sys.getrefcount(storage) > 3:
        gc.unfreeze()  # it hides what `gc.freeze()` was told to leave alone
        aliases = [
            t
            for t in gc.get_objects()
            if issubclass(type(t), HloTensor) and t.__dict__.get("_storage") is storage
        ]
    shown = [(t, views.restrided(t._view, flat, t._meta)) for t in aliases]
    order = metas.physical_order(base)
    value = storage.value
    shape = base.hlo
    if order != tuple(range(len(order))):
        shape = shape.with_dims([shape.dims[d] for d in order])
        value = Out(Node(aten.permute.default, (value, list(order)), {}, (shape,)))
    have = metas.numel(base.size)
    shape = shape.with_dims([have])
    value = Out(Node(aten.view.default, (value, [have]), {}, (shape,)))
    value = Out(Node(aten.constant_pad_nd.default, (value, [0, count - have]), {}, (flat.hlo,)))
    storage.meta = flat
    storage.replace(value)
    for t, view in shown:
        t._view = view


@handles(aten.resize_.default)
def resize_(args: tuple, kwargs: dict):
    x = args[0]
    size = tuple(args[1])
    memory_format = kwargs.get("memory_format")
    if memory_format is not None:
        resize(x, size, torch.empty(size, device="meta", memory_format=memory_format).stride())
    elif size != x._meta.size:
        resize(x, size)
    return x


@handles(aten.resize_as_.default)
def resize_as_(args: tuple, kwargs: dict):
    x, like = args
    if kwargs.get("memory_format") is not torch.preserve_format:
        return resize_((x, tuple(like.shape)), kwargs)
    return resize(x, tuple(like.shape), torch.empty_like(like, device="meta").stride())


@handles(aten.set_.source_Tensor)
def set_tensor(args: tuple, kwargs: dict):
    if type(args[1]) is not HloTensor:
        raise RuntimeError(
            f"set_: the source is a {args[1].device} tensor, the target an hlo tensor"
        )
    x, source = args
    _same_dtype(x, source)
    return set_memory(x, source, source._meta)


@handles(aten.set_.source_Tensor_storage_offset)
def set_tensor_part(args: tuple, kwargs: dict):
    x, source, offset, size, *stride = args
    _same_dtype(x, source)
    size = tuple(size)
    stride = (
        tuple(stride[0]) if stride and stride[0] else metas.contiguous(size, source.dtype).stride
    )
    return set_memory(x, source, metas.intern(size, stride, source.dtype, offset))


def _same_dtype(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.dtype != source.dtype:
        raise RuntimeError(
            f"set_: could not set a tensor of type {source.dtype} to a tensor of type"
            f" {target.dtype}"
        )


@handles(aten.set_.default)
def set_empty(args: tuple, kwargs: dict):
    return adopt(args[0], _empty(metas.contiguous((0,), args[0].dtype)))


@handles(aten.detach_.default)
def detach_(args: tuple, kwargs: dict):
    return args[0]


def _metadata(view: OpOverload) -> Handler:
    return lambda args, kwargs: adopt(args[0], call(view, *args, **kwargs))


for _name in (
    "t_",
    "transpose_",
    "squeeze_",
    "unsqueeze_",
    "swapaxes_",
    "swapdims_",
    "as_strided_",
):
    _packet = getattr(aten, _name)
    _view = {"swapaxes_": "transpose", "swapdims_": "transpose"}.get(_name, _name[:-1])
    for _overload in _packet.overloads():
        _other = "int" if _view == "transpose" else _overload
        handlers.TABLE[getattr(_packet, _overload)] = _metadata(
            getattr(getattr(aten, _view), _other)
        )
