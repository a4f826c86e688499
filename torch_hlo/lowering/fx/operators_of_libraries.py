"""Operators that exist only once their library has been imported: prims of Inductor's modules, and
operators of transformers whose Python code loops over the values of a tensor but which are an
opcode here."""

from collections.abc import Callable
from typing import Any

import torch

from torch_hlo.hlo.ir import Instruction, build

from ..core import (
    LOWERINGS,
    Expr,
    Operand,
    expected,
    expected_shapes,
    nested,
    promote,
)
from ..linalg.matmul import grouped_mm


def fma(a: Operand, b: Operand, c: Operand) -> Instruction:
    shape = expected()
    x, y, z = (Expr(promote.operand(v, shape.dtype, shape.dims)) for v in (a, b, c))
    return (x * y + z).x


def grouped_mm_backward(
    x: Instruction,
    weight: Instruction,
    offs: Instruction,
    gradient: Instruction,
) -> tuple[Instruction, Instruction]:
    """Gradients of grouped_mm of rows [s, k], weight [g, k, n] and the groups' ends."""
    to_x, to_weight = expected_shapes()
    return (
        nested((to_x,), grouped_mm, gradient, build.transpose(weight, (0, 2, 1)), offs),
        nested((to_weight,), grouped_mm, build.transpose(x, (1, 0)), gradient, offs),
    )


_OPERATORS: dict[str, Callable[..., Any]] = {
    "prims::fma": fma,
    "transformers::grouped_mm_fallback": grouped_mm,
    "transformers::grouped_mm_fallback_backward": grouped_mm_backward,
}


def register() -> None:
    """Give the operators that exist by now their lowerings. Called before a graph of PyTorch's is
    compiled."""
    for name, fn in _OPERATORS.items():
        namespace, _, op = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), op, None)
        if packet is not None:
            LOWERINGS.setdefault(packet.default, fn)
