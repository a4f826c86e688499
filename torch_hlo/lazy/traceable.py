"""hlo tensors under torch.compile: what Dynamo and AOTAutograd need in order to trace programs on
them.

A traceable subclass shows an inner tensor. The inner one of an `HloTensor` is a plain tensor of the
device without memory, whose `hlo` attribute holds what makes the tensor it stands for. While
tracing, PyTorch puts a fake tensor in its place: an HloTensor that holds one (`_inner`) hands every
operation on to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.utils import _pytree as pytree

from torch_hlo.lazy.record import tensor
from torch_hlo.lazy.record.tensor import DEVICE, HloTensor
from torch_hlo.pytorch import tracing
from torch_hlo.pytorch.operators import OpOverload
from torch_hlo.pytorch.tensors import make_wrapper as _make
from torch_hlo.pytorch.tensors import plain_tensor


class _Inner:
    """`tensor.inner`: what stands for the tensor outside of this class."""

    def __get__(self, t: HloTensor | None, cls: type | None = None) -> object:
        if t is None:
            return self
        inner = t.__dict__.get("_inner")
        return shown(t) if inner is None else inner


def shown(t: HloTensor) -> torch.Tensor:
    """A plain tensor that stands for `t`: the same one as long as `t` is the same view of the same
    storage, because Dynamo's guards compare identities."""
    parts = (t._meta, t._storage, t._view)
    plain = t.__dict__.get("_shown")
    if plain is None or any(a is not b for a, b in zip(plain.hlo, parts)):
        plain = t._shown = plain_tensor(t._meta.size, t._meta.dtype)
        plain.hlo = parts
    return plain


def hidden(plain: torch.Tensor) -> HloTensor:
    """Inverse of `shown`; a tensor holding `plain` when that is a fake one."""
    found = plain.__dict__.get("hlo")
    if found is not None:
        return tensor.make(*found)
    t = _make(HloTensor, plain.shape, plain.stride(), 0, dtype=plain.dtype, device=DEVICE)
    t._inner = plain
    return t


def _flatten(self: HloTensor) -> tuple[list[str], None]:
    return ["inner"], None


def _unflatten(
    inner: dict[str, torch.Tensor],
    context: None,
    size: Sequence[int],
    stride: Sequence[int],
) -> HloTensor:
    return hidden(inner["inner"])


def _traced(func: OpOverload, args: tuple, kwargs: dict) -> object:
    """The operation on the inner tensors."""
    from torch.utils._python_dispatch import return_and_correct_aliasing

    inside, inside_kwargs = pytree.tree_map(
        lambda a: a.inner if isinstance(a, HloTensor) else a, (args, kwargs)
    )
    result = pytree.tree_map(
        lambda t: hidden(t) if isinstance(t, torch.Tensor) else t,
        func(*inside, **inside_kwargs),
    )
    return return_and_correct_aliasing(func, args, kwargs, result)


def _is_traced(values: Iterable[object]) -> bool:
    """True if one of the values is a tensor that PyTorch is tracing with."""
    for a in values:
        if isinstance(a, HloTensor):
            if "_inner" in a.__dict__:
                return True
        elif type(a) is list or type(a) is tuple:
            if _is_traced(a):
                return True
    return False


def _dispatch(
    func: OpOverload,
    types: Sequence[type],
    args: tuple = (),
    kwargs: dict | None = None,
) -> object:
    if _is_traced(args) or kwargs and _is_traced(kwargs.values()):
        return _traced(func, args, kwargs or {})
    return tensor.handle(func, types, args, kwargs)


_through: list[tuple[Callable, tuple[type, ...]]] = []  # see `trace_through`


def trace_through(function: Callable, *constants: type) -> None:
    """Under torch.compile `function` becomes the ops that it calls on tensors, instead of ending
    the graph; `constants` are types of arguments that are compared by value."""
    _through.append((function, constants))
    if "__tensor_flatten__" in HloTensor.__dict__:
        tracing.trace_through(function, constants)


def enable() -> None:
    """From now on hlo tensors can be traced. Every op then looks at its arguments, so it happens
    with the first torch.compile."""
    if "__tensor_flatten__" in HloTensor.__dict__:
        return
    tracing.trace_package("torch_hlo")
    for function, constants in _through:
        tracing.trace_through(function, constants)
    HloTensor.inner = _Inner()
    HloTensor.__tensor_flatten__ = _flatten
    HloTensor.__tensor_unflatten__ = staticmethod(_unflatten)
    HloTensor.__torch_dispatch__ = staticmethod(_dispatch)
