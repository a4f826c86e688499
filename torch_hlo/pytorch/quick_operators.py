"""Python's operators on tensors, recorded without PyTorch's dispatcher, which would lead to the
same handler and takes as long as recording.

    with torch.no_grad(): y = x * scale + bias      # two ops; on this way 7 us each become 4

Only where nobody else takes part in an op: gradients are off, no mode, autocast, tracer or profiler
is on, and the operands are tensors of this device or Python's numbers. Only functional ops: views
and writes also have to do with PyTorch's version counters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import shortcuts
from .operators import OpOverload
from .participants import alone

aten = torch.ops.aten

# What PyTorch's methods call for a tensor, and for a number, on the right.
_BINARY: dict[str, tuple[OpOverload, OpOverload]] = {
    **{
        name: (op, op)
        for name, op in (
            ("__add__", aten.add.Tensor),
            ("__radd__", aten.add.Tensor),
            ("__sub__", aten.sub.Tensor),
            ("__mul__", aten.mul.Tensor),
            ("__rmul__", aten.mul.Tensor),
            ("__truediv__", aten.div.Tensor),
        )
    },
    **{
        f"__{name}__": (getattr(aten, name).Tensor, getattr(aten, name).Scalar)
        for name in ("lt", "le", "gt", "ge")
    },
    "__pow__": (aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar),
}
_UNARY: dict[str, OpOverload] = {
    "__neg__": aten.neg.default,
    **{
        name: getattr(aten, name).default
        for name in (
            "abs",
            "cos",
            "exp",
            "log",
            "neg",
            "reciprocal",
            "relu",
            "rsqrt",
            "sigmoid",
            "sin",
            "sqrt",
            "tanh",
        )
    },
}
_NUMBERS = frozenset({bool, int, float})
_grad, _alone = torch.is_grad_enabled, alone


def register(tensor_class: type[torch.Tensor]) -> None:
    """Give the class of this device's tensors its operators. Its `__torch_dispatch__` is looked up
    at each call: torch.compile puts another one there."""
    if not shortcuts.on("operators"):
        return

    def binary(original: Callable, tensors: OpOverload, numbers: OpOverload) -> Callable:
        def operator(self: torch.Tensor, other: object) -> object:
            if not _grad():
                kind = type(other)
                op = tensors if kind is tensor_class else numbers if kind in _NUMBERS else None
                if op is not None and type(self) is tensor_class and _alone():
                    return tensor_class.__torch_dispatch__(op, (), (self, other))
            return original(self, other)

        return operator

    def unary(original: Callable, op: OpOverload) -> Callable:
        def operator(self: torch.Tensor) -> object:
            if not _grad() and type(self) is tensor_class and _alone():
                return tensor_class.__torch_dispatch__(op, (), (self,))
            return original(self)

        return operator

    def give(name: str, make: Callable, *ops: OpOverload) -> None:
        original = getattr(torch.Tensor, name)
        operator = make(original, *ops)
        operator.__name__, operator.__doc__ = original.__name__, original.__doc__
        operator.__qualname__ = f"Tensor.{original.__name__}"
        setattr(tensor_class, name, operator)

    for name, ops in _BINARY.items():
        give(name, binary, *ops)
    for name, op in _UNARY.items():
        give(name, unary, op)
