"""Indexing with masks, and with indices on the CPU. `x[mask] = scalar`, whose shape does not depend
on the mask, is recorded as a `where`.
"""

import warnings

import torch
from torch import Tensor

from ..record import (
    HloTensor,
    aten,
    call,
    checks,
    from_cpu,
    handles,
    recording,
    to_cpu,
)
from .mutation import assign, on_memory, put_expanded

# ---- indexing with masks, and with indices on the CPU


_MASKS = frozenset({torch.bool, torch.uint8})
_BYTES = "indexing with dtype torch.uint8 is now deprecated, please use a dtype torch.bool instead."


def _is_mask(index) -> bool:
    return isinstance(index, Tensor) and index.dtype in _MASKS


def _positions(x: Tensor, indices) -> list:
    """`indices` with CPU tensors moved to the device and masks replaced by the positions of their
    True elements."""
    if len(indices) > x.dim():
        raise IndexError(f"too many indices for tensor of dimension {x.dim()}")
    found: list = []
    for index in indices:
        if not isinstance(index, Tensor):
            found.append(index)
        elif _is_mask(index):
            if index.dtype is torch.uint8:
                warnings.warn(_BYTES, stacklevel=4)
            dim = len(found)
            if tuple(index.shape) != tuple(x.shape[dim : dim + index.dim()]):
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index 0 does not match the shape"
                    f" of the indexed tensor {list(x.shape)} at index {dim}"
                )
            value = to_cpu([index])[0] if isinstance(index, HloTensor) else index
            found += [from_cpu(p.contiguous()) for p in value.nonzero().unbind(1)]
        else:
            found.append(_here(index))
    return found


def _here(index: Tensor) -> HloTensor:
    if type(index) is HloTensor:
        return index
    # Indices may live on the CPU, as with CUDA.
    return (
        from_cpu(index)
        if type(index) is Tensor and index.device.type == "cpu"
        else checks.admit(index)
    )


def _special(indices) -> bool:
    for i in indices:
        if i is not None and (type(i) is not HloTensor or i._meta.dtype in _MASKS):
            return True
    return False


_record_index = recording.recorder(aten.index.Tensor)


@handles(aten.index.Tensor)
def index(args: tuple, kwargs: dict):
    x, indices = args
    if type(x) is not HloTensor:  # a CPU tensor indexed on the device
        checks.admit_target(x, args)
    if _special(indices):
        indices = _positions(x, indices)
    return _record_index((x, indices), _NONE)


_NONE: dict = {}
_record_put = recording.recorder(aten.index_put.default)


@handles(aten.index_put.default)
def index_put(args: tuple, kwargs: dict):
    x, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if _special(indices):
        masked = _as_where(x, indices, values, accumulate)
        if masked is not None:
            return masked
        indices = _positions(x, indices)
    if type(values) is not HloTensor:
        values = checks.admit(values)
    return _record_put((x, indices, values, accumulate), _NONE)


def _as_where(x: HloTensor, indices, values: Tensor, accumulate: bool):
    """`x[mask] = scalar` without looking at the mask; None if that is not what is asked."""
    masks = [i for i in indices if i is not None]
    if (
        len(masks) != 1
        or masks[0].dtype != torch.bool
        or type(masks[0]) is not HloTensor
        or values.numel() != 1
        or accumulate
    ):
        return None
    mask = masks[0]
    dim = next(i for i, m in enumerate(indices) if m is not None)
    if tuple(mask.shape) != tuple(x.shape[dim : dim + mask.dim()]) or values.dtype != x.dtype:
        return None
    value = checks.admit(values)
    full = call(
        aten.view.default,
        mask,
        [1] * dim + list(mask.shape) + [1] * (x.dim() - dim - mask.dim()),
    )
    return call(aten.where.self, full, call(aten.view.default, value, []), x)


@handles(aten.index_put_.default, aten._index_put_impl_.default)
def index_put_(args: tuple, kwargs: dict):
    x = args[0]
    if type(x) is not HloTensor:
        checks.admit_target(x, args)
    rest = args[1:4] if len(args) > 3 else (*args[1:3], kwargs.get("accumulate", False))
    if not x._meta.shares:
        assign(x, index_put((x, *rest), _NONE))
    elif not (x._meta.overlaps and put_expanded(x, *rest)):
        on_memory(aten.index_put_.default, (x, *rest), _NONE, [x])
    return x
