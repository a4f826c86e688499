"""Parameters and buffers of `nn.Lazy*` modules on the device.

They have a device and a dtype but no shape yet, and PyTorch tells them by their class. An
`HloTensor` cannot have that class too, so until they are materialized they are plain tensors of the
device without memory. Then they become hlo tensors by swapping contents, so that optimizers made
before keep the parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch.nn.parameter import (
    UninitializedBuffer,
    UninitializedParameter,
    UninitializedTensorMixin,
    is_lazy,
)

from . import tensors
from .around import around
from .participants import plain_attributes
from .registration import PLACE


def convert(
    module: torch.nn.Module, fn: Callable, apply: Callable[[], torch.nn.Module]
) -> torch.nn.Module:
    """`apply()`, which is `module._apply(fn)`, with the uninitialized tensors of `module` itself
    going to or from the device."""
    moved = []
    for holder in (module._parameters, module._buffers):
        for name, tensor in holder.items():
            if is_lazy(tensor):
                with torch.no_grad():
                    probe = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
                if PLACE.names & {probe.device.type, tensor.device.type}:
                    moved.append((holder, name, tensor, probe))
    if not moved:
        return apply()
    for holder, name, _, _ in moved:
        holder[name] = None
    try:
        apply()
    finally:
        for holder, name, tensor, _ in moved:
            holder[name] = tensor
    for _, _, tensor, probe in moved:
        new = type(tensor)(tensor.requires_grad, probe.device, probe.dtype)
        new.__dict__.update(tensor.__dict__)
        _swap(tensor, new)
    return module


def _swap(tensor: torch.Tensor, new: torch.Tensor) -> None:
    with plain_attributes():  # these classes refuse most of what swapping asks
        torch.utils.swap_tensors(tensor, new)


def _patch_new(cls: type) -> None:
    original = cls.__new__

    @functools.wraps(original)
    def __new__(
        cls: type,
        requires_grad: bool = cls is UninitializedParameter,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: object,
    ) -> torch.Tensor:
        data = torch.empty(0, device=device, dtype=dtype)
        if data.device.type not in PLACE.names:
            return original(cls, requires_grad, device=device, dtype=dtype, **options)
        pattern = original(cls, requires_grad, device="cpu", dtype=dtype, **options)
        new = tensors.make_subclass(cls, tensors.plain_tensor((0,), data.dtype), requires_grad)
        new.__dict__.update(pattern.__dict__)
        return new

    cls.__new__ = __new__


def patch() -> None:
    """Teach PyTorch's uninitialized parameters and buffers about the device."""
    _patch_new(UninitializedParameter)
    _patch_new(UninitializedBuffer)

    def materialize(
        original: Callable,
        self: UninitializedTensorMixin,
        shape: Sequence[int],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        device = torch.device(self.device if device is None else device)
        if not PLACE.names & {device.type, self.device.type}:
            return original(self, shape, device, dtype)
        data = torch.empty(shape, device=device, dtype=self.dtype if dtype is None else dtype)
        new = (
            torch.nn.Parameter(data, requires_grad=self.requires_grad)
            if isinstance(self, UninitializedParameter)
            else data
        )
        new.__dict__.update(self.__dict__)
        _swap(self, new)

    around(UninitializedTensorMixin, "materialize", materialize)
