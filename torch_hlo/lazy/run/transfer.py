"""Values between the host and the device."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from torch_hlo.device.memory import Buffer
from torch_hlo.lazy.record.views import on_host
from torch_hlo.lowering.core import HLO_TO_TORCH
from torch_hlo.pytorch import participants

from . import spmd

ITEMS = {
    "f32": struct.Struct("f"),
    "f64": struct.Struct("d"),
    "s64": struct.Struct("q"),
    "s32": struct.Struct("i"),
    "pred": struct.Struct("?"),
}


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
    return torch.from_numpy(data).view(dtype).view(shape.dims)


def view_on_host(base: Tensor, tensor: Tensor) -> Tensor:
    """The tensor's view operations applied to the storage's value; a fresh contiguous tensor."""
    with (
        participants.without_dispatch(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        if tensor._view is None:
            return base.clone()
        value = on_host(base, tensor._view).contiguous()
        shared = value.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        return value.clone() if shared else value
