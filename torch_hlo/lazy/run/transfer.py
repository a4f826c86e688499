"""Values between the host and the device."""

import ctypes
import struct

import torch
from torch import Tensor

from torch_hlo.device.memory import Buffer, Memory
from torch_hlo.lowering.core import HLO_TO_TORCH
from torch_hlo.pytorch import participants, tensors

from ..record import meta as metas, views
from . import spmd

NUMBERS = {
    "f32": struct.Struct("f"),
    "f64": struct.Struct("d"),
    "s64": struct.Struct("q"),
    "s32": struct.Struct("i"),
    "pred": struct.Struct("?"),
}

_SMALL = 1 << 16  # bytes


def is_zeros(tensor: Tensor) -> bool:
    """True for the number 0 expanded to a size, as new optimizer states are."""
    if (
        tensor.device.type != "cpu"
        or any(tensor.stride())
        or (memory := tensor.untyped_storage()).nbytes() > 16
    ):
        return False
    return tensor.dim() > 0 and not any(bytes(memory))


def host_view(buffer: Buffer) -> Tensor:
    shape = buffer.shape
    dtype = HLO_TO_TORCH[shape.dtype]
    if not buffer.nbytes:
        return torch.empty(shape.dims, dtype=dtype, device="cpu")
    data = buffer.bytes if isinstance(buffer, Buffer) else spmd.gather(buffer)
    return torch.frombuffer(data, dtype=dtype).view(shape.dims)


def fill(buffer: Buffer, tensor: Tensor) -> None:
    """Copy a tensor of the CPU, or of torch.cuda, row by row."""
    plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if plain and _is_small(buffer) and tensor.device.type == "cpu":
        ctypes.memmove(buffer.memory.address, tensor.data_ptr(), buffer.nbytes)
        return
    with torch.no_grad():
        host_view(buffer).copy_(tensor)


def value(buffer: Buffer, tensor: Tensor) -> Tensor:
    """The tensor's view operations applied to its storage's value; a fresh contiguous tensor."""
    with participants.unseen():
        if tensor._view is None and _is_small(buffer):
            meta = metas.contiguous(buffer.shape.dims, tensor._meta.dtype)
            found = tensors.empty_strided_cpu(meta.size, meta.stride, meta.dtype)
            ctypes.memmove(found.data_ptr(), buffer.memory.address, buffer.nbytes)
            return found
        base = host_view(buffer)
        if tensor._view is None:
            return base.clone()
        found = views.on_host(base, tensor._view).contiguous()
        shared = found.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        return found.clone() if shared else found


def _is_small(buffer: Buffer) -> bool:
    """Whether one call of C copies it sooner than PyTorch's operators have been called."""
    return type(buffer) is Buffer and type(buffer.memory) is Memory and buffer.nbytes <= _SMALL
