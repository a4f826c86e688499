"""Fake quantization: values rounded to a grid of integers and back, and a mask of those that were
within the grid."""

from __future__ import annotations

import torch

from torch_hlo.hlo.ir import Instruction
from torch_hlo.lowering.core import (
    Expr,
    Operand,
    axis,
    broadcast_to,
    compute,
    expected,
    lowers,
    maximum,
    minimum,
    promote,
    reshape,
    round_even,
    where,
)

aten = torch.ops.aten


def _term(v: Operand, like: Expr, dim: int | None = None) -> Expr:
    """A number, a tensor of one element, or one with an element per index of dimension `dim`, in
    the type and for the dims of `like`."""
    if not isinstance(v, Instruction):
        return Expr(promote.full(v, like.dtype, like.dims))
    v = promote.cast(v, like.dtype)
    dims = tuple(n if d == dim else 1 for d, n in enumerate(like.dims)) if dim is not None else ()
    return Expr(broadcast_to(reshape(v, dims), like.dims))


def _on_grid(
    x: Instruction,
    scale: Operand,
    zero: Operand,
    low: int,
    high: int,
    dim: int | None = None,
    enabled: Instruction | None = None,
) -> tuple[Instruction, Instruction]:
    value = compute(x)
    scale, zero = _term(scale, value, dim), _term(zero, value, dim)
    number = round_even(value * (1 / scale)) + zero
    inside = (number >= low) & (number <= high)
    result = (minimum(maximum(number, low), high) - zero) * scale
    if enabled is not None:
        on = Expr(promote.cast(broadcast_to(reshape(enabled, ()), value.dims), "pred"))
        result, inside = (
            where(on, result, value),
            where(on, inside, Expr(promote.full(1, "pred", value.dims))),
        )
    return promote.cast(result.x, expected().dtype), inside.x


@lowers(aten.fake_quantize_per_tensor_affine_cachemask)
def fake_quantize_per_tensor_affine(
    x: Instruction,
    scale: float,
    zero_point: int,
    quant_min: int,
    quant_max: int,
) -> tuple[Instruction, Instruction]:
    return _on_grid(x, scale, zero_point, quant_min, quant_max)


@lowers(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams)
def fake_quantize_tensor_qparams(
    x: Instruction,
    scale: Instruction,
    zero_point: Instruction,
    fake_quant_enabled: Instruction,
    quant_min: int,
    quant_max: int,
) -> tuple[Instruction, Instruction]:
    return _on_grid(x, scale, zero_point, quant_min, quant_max, enabled=fake_quant_enabled)


@lowers(aten.fake_quantize_per_channel_affine_cachemask)
def fake_quantize_per_channel_affine(
    x: Instruction,
    scale: Instruction,
    zero_point: Instruction,
    dim: int,
    quant_min: int,
    quant_max: int,
) -> tuple[Instruction, Instruction]:
    return _on_grid(x, scale, zero_point, quant_min, quant_max, axis(dim, x.rank))
