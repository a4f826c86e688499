"""PyTorch's CPU tensors in the device's memory: large results of torch.compile, which PyTorch would
put into fresh pages at every call.

Touching a fresh page costs more than computing what it will hold; the pool (runtime.py) gives pages
again that a tensor has left."""

import ctypes
import math

import torch

from .buffer import HUGE
from .memory import Memory
from .runtime import make_room

__all__ = ["LARGE", "empty_strided", "make_room"]

LARGE = HUGE  # bytes; below that PyTorch's allocator has blocks that are warm


def empty_strided(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """An uninitialised dense tensor like `torch.empty_strided`'s, but that its storage does not
    grow. Raises MemoryError."""
    nbytes = math.prod(size) * dtype.itemsize
    if nbytes < LARGE:
        return torch.empty_strided(size, stride, dtype=dtype)
    memory = Memory(nbytes)
    data = (ctypes.c_uint8 * nbytes).from_address(memory.address)
    data.memory = memory  # goes back to the pool with the storage
    return torch.empty(0, dtype=dtype).set_(
        torch.frombuffer(data, dtype=torch.uint8).untyped_storage(), 0, size, stride
    )
