"""Subclasses of tensors, such as fastai's images, on the device. All its tensors have one class; so
`x.as_subclass(Image)` is a tensor of a class below Image that has no memory and holds `x`. Each
operation takes what is held, and what comes out is made an Image again by Image's own
`__torch_function__`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_hlo.pytorch import tensors

from .record.tensor import HloTensor


class _Cast(torch.autograd.Function):
    """x as a tensor of a class of `_below`, or without one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cls: type[Tensor] | None = None) -> Tensor:
        x = _held(x).detach()
        if cls is None:
            return x
        holder = tensors.make_wrapper(
            cls, x.shape, x.stride(), x.storage_offset(), dtype=x.dtype, device=x.device
        )
        holder._held = x
        return holder

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _held(gradient), None


def _held(x: Tensor) -> Tensor:
    return getattr(x, "_held", x)


def meant(cls: type) -> type:
    """The class that one of `_below` stands for."""
    return getattr(cls, "_meant", cls)


def _dispatch(func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    if torch.Tag.inplace_view in func.tags:
        kind = meant(type(args[0])).__name__
        shape = list(args[0].shape)
        raise NotImplementedError(
            f"{func} of a tensor of class {kind} and shape {shape} on the hlo device, where such"
            " tensors keep their shape: write x = x.reshape(…) instead"
        )
    args, kwargs = pytree.tree_map_only(Tensor, _held, (args, kwargs or {}))
    return func(*args, **kwargs)


class _Meaning(type(Tensor)):  # type: ignore[misc]
    """Tables by class, as torchvision's transforms have, find the class that is meant."""

    def __eq__(cls, other: object) -> bool:
        return meant(cls) is other or cls is other

    def __hash__(cls) -> int:
        return hash(meant(cls))


@functools.cache
def _below(base: type[Tensor]) -> type[Tensor]:
    methods = {
        "__module__": base.__module__,
        "_meant": base,
        "__slots__": ("_held",),  # not in the dictionary, which classes copy to results
        "__torch_dispatch__": staticmethod(_dispatch),
        "__torch_function__": classmethod(
            lambda cls, func, types, *given: base.__torch_function__(
                func, tuple(map(meant, types)), *given
            )
        ),
        "__reduce_ex__": lambda self, protocol: (as_subclass, (self._held, base)),
        "tolist": lambda self: self._held.tolist(),
        "as_subclass": lambda self, cls: as_subclass(_Cast.apply(self), cls),
    }
    return _Meaning(base.__name__, (base,), methods)


def as_subclass(self: HloTensor, cls: type[Tensor]) -> Tensor:
    """The same memory as a tensor of class `cls`."""
    return self if isinstance(self, cls) else _Cast.apply(self, _below(meant(cls)))


def register() -> None:
    HloTensor.as_subclass, HloTensor._meant = as_subclass, Tensor
