"""Operators that exist only once their library has been imported: prims of Inductor's modules, and operators of transformers whose Python
code loops over the values of a tensor but which are an opcode here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_hlo.hlo import build
from torch_hlo.lowering import promote
from torch_hlo.lowering.expr import Expr
from torch_hlo.lowering.matmul import grouped_mm
from torch_hlo.lowering.registry import LOWERINGS, expected, nested


def fma(a, b, c):
    shape = expected()[0]
    a, b, c = (Expr(promote.operand(v, shape.dtype, shape.dims)) for v in (a, b, c))
    return (a * b + c).x


def grouped_mm_backward(x, weight, offs, gradient):
    """Gradients of grouped_mm of rows [s, k], weight [g, k, n] and the groups' ends."""
    to_x, to_weight = expected()
    return (
        nested((to_x,), grouped_mm, gradient, build.transpose(weight, (0, 2, 1)), offs),
        nested((to_weight,), grouped_mm, build.transpose(x, (1, 0)), gradient, offs),
    )


_LATE: dict[str, Callable] = {
    "prims::fma": fma,
    "transformers::grouped_mm_fallback": grouped_mm,
    "transformers::grouped_mm_fallback_backward": grouped_mm_backward,
}


def register() -> None:
    """Give the operators that exist by now their lowerings. Called before a graph of PyTorch's is compiled."""
    for name, fn in _LATE.items():
        namespace, _, op = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), op, None)
        if packet is not None:
            LOWERINGS.setdefault(packet.default, fn)
