"""In-place ops on tensors of which several elements are one place in memory (`x.unfold(0, 2, 1)`).

As on the CPU, an elementwise op meets such a place once for each element, one after the other in
the order of memory; an op that writes some elements leaves the memory of the others alone. Ops that
read elements that they have written are refused. (Expanded tensors, which PyTorch refuses, do not
come here.)"""

from __future__ import annotations

from typing import Any

import torch

from torch_hlo.lazy.record import meta as metas
from torch_hlo.lazy.record.handlers import call
from torch_hlo.lazy.record.meta import DEVICE, Meta, aten
from torch_hlo.lazy.record.storage import read, write
from torch_hlo.lazy.record.tensor import HloTensor
from torch_hlo.pytorch.operators import OpOverload

MAX_PARTS = 256  # ops that one op becomes at most
_POINTWISE = {aten.masked_fill_}  # besides those that PyTorch says
# put values at some places and keep the other elements
_MOVES = {aten.index_fill_, aten.index_copy_, aten.put_, aten.index_put_, aten.tril_, aten.triu_}
_MOVES |= {aten.scatter_}
_ADDS = {aten.index_add_, aten.scatter_add_}  # add values at some places
_RUNNING = {aten.cumsum_, aten.cumprod_, aten.renorm_}


def found(x: torch.Tensor) -> bool:
    """Whether several elements of a tensor are one place, and PyTorch allows to write to it."""
    return type(x) is HloTensor and x._meta.shares and not x._meta.overlaps


def update(op: OpOverload, twin: OpOverload, args: tuple, kwargs: dict) -> bool:
    """`op(*args, **kwargs)`, which writes to args[0], by ops on tensors without shared elements.
    False if it has its result before it writes any: then nothing is done."""
    packet, tags = op.overloadpacket, {*op.tags, *twin.tags}
    accumulates = packet is aten.index_put_ and args[3:] == (True,)
    if op._schema.overload_name.endswith("reduce") or packet in _RUNNING:
        raise _refusal(op, args[0]._meta, "its result depends on the order")
    if torch.Tag.pointwise in tags or packet in _POINTWISE:
        _each(op, args[0], args[1:], kwargs)
    elif accumulates or packet in _ADDS:
        _add(twin, args, kwargs)
    elif packet in _MOVES:
        _move(twin, args, kwargs)
    else:
        return False
    return True


def _refusal(op: OpOverload, meta: Meta, why: str) -> RuntimeError:
    return RuntimeError(
        f"unsupported operation: {op} writes to a tensor of shape {list(meta.size)} and strides"
        f" {list(meta.stride)}, of which more than one element refers to a single memory location;"
        f" {why}. Please clone() the tensor before performing the operation."
    )


def _each(op: OpOverload, x: HloTensor, rest: tuple, kwargs: dict) -> None:
    """An elementwise op on parts of `x` in which no element is shared."""
    meta = x._meta
    shape = list(meta.size)
    parts = _parts(meta, op)
    rest, kwargs = _expanded(rest, shape), {k: _expanded(v, shape) for k, v in kwargs.items()}
    for dims in parts:
        call(op, _at(x, dims), *_at(rest, dims), **{k: _at(v, dims) for k, v in kwargs.items()})


def _parts(meta: Meta, op: OpOverload) -> list[list[tuple[int, int]]]:
    """Which indices of which dimensions to fix, last dimensions first, part by part."""
    size, stride, fixed = list(meta.size), list(meta.stride), []
    while metas.shares(tuple(size), tuple(stride)):
        d = min((d for d, n in enumerate(size) if n > 1), key=lambda d: (size[d], stride[d]))
        # The CPU goes through the largest strides first, and of equal strides the longer dimension.
        outer = d == max(range(len(size)), key=lambda d: (size[d] > 1, stride[d], size[d], -d))
        fixed.append((d, range(size[d]) if outer else range(size[d] - 1, -1, -1)))
        size[d] = 1
    parts: list[list[tuple[int, int]]] = [[]]
    for d, order in fixed:
        parts = [[*part, (d, i)] for part in parts for i in order]
        if len(parts) > MAX_PARTS:
            raise _refusal(op, meta, f"it would take more than {MAX_PARTS} steps")
    return parts


def _expanded(value: Any, shape: list[int]) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_expanded(v, shape) for v in value)
    if isinstance(value, HloTensor) and value.dim():
        return call(aten.expand.default, value, shape)
    return value


def _at(value: Any, dims: list[tuple[int, int]]) -> Any:
    if isinstance(value, tuple):
        return tuple(_at(v, dims) for v in value)
    if isinstance(value, HloTensor) and value.dim():
        for d, i in dims:
            value = call(aten.slice.Tensor, value, d, i, i + 1)
    return value


def _move(twin: OpOverload, args: tuple, kwargs: dict) -> None:
    """An op that puts values at some places of args[0]. What it puts where is seen by what becomes
    of two tensors that differ everywhere."""
    x = args[0]
    other = call(aten._to_copy.default, call(aten.eq.Scalar, x, 0), dtype=x._meta.dtype)
    new = call(twin, *args, **kwargs)
    kept = call(aten.eq.Tensor, call(twin, other, *args[1:], **kwargs), other)
    kept = call(aten.logical_and.default, kept, _same(new, x))
    flat, place = _memory(x)
    # What is written behind the end is dropped.
    place = call(aten.masked_fill.Scalar, place, kept, flat._meta.size[0])
    _write(aten.scatter.src, flat, place, new)


def _add(twin: OpOverload, args: tuple, kwargs: dict) -> None:
    """An op that adds to elements of args[0]."""
    x = args[0]
    zeros = call(aten.zeros_like.default, x, memory_format=torch.contiguous_format)
    _write(aten.scatter_add.default, *_memory(x), call(twin, zeros, *args[1:], **kwargs))


def _memory(x: HloTensor) -> tuple[HloTensor, HloTensor]:
    """The memory of a tensor as a flat one, and where in it the elements are."""
    meta, storage = x._meta, x._storage.meta
    count = metas.numel(storage.size) * storage.dtype.itemsize // meta.dtype.itemsize
    place = call(aten.arange.default, count, dtype=torch.int64, device=DEVICE)
    place = call(aten.as_strided.default, place, meta.size, meta.stride, meta.offset)
    return call(aten.as_strided.default, x, [count], [1], 0), place


def _write(op: OpOverload, flat: HloTensor, place: HloTensor, values: HloTensor) -> None:
    place, values = (call(aten.reshape.default, t, [-1]) for t in (place, values))
    write(flat, read(call(op, flat, 0, place, values)))


def _same(a: HloTensor, b: HloTensor) -> HloTensor:
    """Where elements are equal, or both no numbers."""
    equal = call(aten.eq.Tensor, a, b)
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return equal
    none = call(aten.logical_and.default, *(call(aten.ne.Tensor, t, t) for t in (a, b)))
    return call(aten.logical_or.default, equal, none)
