"""Python's operators on tensors, recorded without PyTorch's dispatcher, which would lead to the same handler and takes as long as recording.

    with torch.no_grad(): y = x * scale + bias      # two ops; on this way 7 us each become 4

Only where nobody else takes part in an op: gradients are off, no mode, autocast, tracer or profiler is on, and the operands are tensors of this device or Python's numbers. Only
functional ops: views and writes also have to do with PyTorch's version counters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._ops import OpOverload

from torch_hlo.lazy import backend
from torch_hlo.lazy.meta import aten
from torch_hlo.lazy.tensor import HloTensor

# What PyTorch's methods call for a tensor, and for a number, on the right.
_BINARY: dict[str, tuple[OpOverload, OpOverload]] = {
    **{name: (op, op) for name, op in (
        ("__add__", aten.add.Tensor), ("__radd__", aten.add.Tensor), ("__sub__", aten.sub.Tensor), ("__mul__", aten.mul.Tensor), ("__rmul__", aten.mul.Tensor),
        ("__truediv__", aten.div.Tensor),
    )},
    **{f"__{name}__": (getattr(aten, name).Tensor, getattr(aten, name).Scalar) for name in ("lt", "le", "gt", "ge")},
}  # fmt: skip
_UNARY: dict[str, OpOverload] = {
    "__neg__": aten.neg.default,
    **{name: getattr(aten, name).default for name in (
        "abs", "cos", "exp", "log", "neg", "reciprocal", "relu", "rsqrt", "sigmoid", "sin", "sqrt", "tanh",
    )},
}  # fmt: skip
_NUMBERS = frozenset({bool, int, float})
_grad, _alone = torch.is_grad_enabled, backend.alone


def register() -> None:
    """Give the class its operators."""
    for name, (tensors, numbers) in _BINARY.items():
        setattr(HloTensor, name, _binary(getattr(torch.Tensor, name), tensors, numbers))
    for name, op in _UNARY.items():
        setattr(HloTensor, name, _unary(getattr(torch.Tensor, name), op))
    HloTensor.__getitem__ = _getitem(torch.Tensor.__getitem__)


def _binary(original: Callable, tensors: OpOverload, numbers: OpOverload) -> Callable:
    def operator(self, other):
        if not _grad():
            kind = type(other)
            op = tensors if kind is HloTensor else numbers if kind in _NUMBERS else None
            if op is not None and type(self) is HloTensor and _alone():
                return HloTensor.__torch_dispatch__(op, (), (self, other))
        return original(self, other)

    return _like(original, operator)


def _unary(original: Callable, op: OpOverload) -> Callable:
    def operator(self):
        if not _grad() and type(self) is HloTensor and _alone():
            return HloTensor.__torch_dispatch__(op, (), (self,))
        return original(self)

    return _like(original, operator)


def _getitem(original: Callable) -> Callable:
    op = aten.index.Tensor

    def operator(self, index):
        if (
            type(index) is HloTensor
            and not _grad()
            and type(self) is HloTensor
            and _alone()
            and index.dtype is torch.int64
            and index.dim()
            and self.dim()
        ):
            return HloTensor.__torch_dispatch__(op, (), (self, [index]))
        return original(self, index)

    return _like(original, operator)


def _like(original: Callable, operator: Callable) -> Callable:
    operator.__name__, operator.__qualname__, operator.__doc__ = (
        original.__name__,
        f"Tensor.{original.__name__}",
        original.__doc__,
    )
    return operator
