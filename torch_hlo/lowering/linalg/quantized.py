"""Products of quantized operands. The sums are scaled where a scale is the same along the
contracted dimension; nothing that is scaled is rounded before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_hlo.hlo.ir.instruction import Instruction
from torch_hlo.lowering.core import promote
from torch_hlo.lowering.core.expr import Expr
from torch_hlo.lowering.core.registry import expected, guard, lowers
from torch_hlo.lowering.linalg.matmul import dot

aten = torch.ops.aten


def _scaled(y: Expr, scale: Instruction) -> Expr:
    return y * Expr(promote.operand(scale, y.dtype, y.dims))


def _with_bias(y: Expr, bias: Instruction | None) -> Instruction:
    if bias is not None:
        y = y + Expr(promote.operand(bias, y.dtype, y.dims))
    return promote.cast(y.x, expected().dtype)


@lowers(aten._weight_int8pack_mm.default)
def weight_int8pack_mm(a: Instruction, w: Instruction, scales: Instruction) -> Instruction:
    """a [m, k] in floats, w [n, k] in s8, scales [n] -> a w^T * scales [m, n] in a's type."""
    return _with_bias(_scaled(dot(a, promote.cast(w, a.shape.dtype), (1,), (1,)), scales), None)


@guard(aten._scaled_mm.default)
def _is_scaled(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> bool:
    """f8 matrices with one scale each, or one per row of `a` and one per column of `b`. PyTorch's
    CPU kernel says what is wrong with others."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        return False
    rows = (scale_a.shape, scale_b.shape) == ((a.shape[0], 1), (1, b.shape[1]))
    return (
        all("float8" in str(x.dtype) for x in (a, b))
        and all(s.dtype is torch.float32 for s in (scale_a, scale_b))
        and (rows or scale_a.numel() == scale_b.numel() == 1)
        and (bias is None or bias.numel() == b.shape[1])
    )


@lowers(aten._scaled_mm.default)
def scaled_mm(
    a: Instruction,
    b: Instruction,
    scale_a: Instruction,
    scale_b: Instruction,
    bias: Instruction | None = None,
    *args: Any,
    **kwargs: Any,
) -> Instruction:
    return _with_bias(_scaled(_scaled(dot(a, b, (1,), (0,)), scale_a), scale_b), bias)


_ONE, _ROWS = 0, 1  # members of torch.nn.functional.ScalingType


@guard(aten._scaled_mm_v2.default)
def _is_scaled_by_recipe(
    a: Tensor,
    b: Tensor,
    scales_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scales_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> bool:
    return (
        recipe_a == recipe_b
        and recipe_a in ([_ONE], [_ROWS])
        and not any((*swizzle_a, *swizzle_b))
        and _is_scaled(a, b, scales_a[0], scales_b[0], bias)
        and (recipe_a == [_ROWS] or scales_a[0].numel() == 1)
    )


@lowers(aten._scaled_mm_v2.default)
def scaled_mm_by_recipe(
    a: Instruction,
    b: Instruction,
    scales_a: list[Instruction],
    recipe_a: list[int],
    swizzle_a: list[int],
    scales_b: list[Instruction],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: Instruction | None,
    *args: Any,
    **kwargs: Any,
) -> Instruction:
    return scaled_mm(a, b, scales_a[0], scales_b[0], bias)
