"""Fake quantization: values rounded to a grid of integers and back, and a mask of those that were
within the grid; grids that are learned, and grids that follow the values that were seen."""

from __future__ import annotations

from typing import Any

from torch_hlo.hlo.ir import Instruction, Instructions

from ..core import (
    Expr,
    Operand,
    Term,
    absolute,
    aten,
    axis,
    broadcast_to,
    compute,
    expected,
    finish,
    guard,
    lowers,
    maximum,
    minimum,
    promote,
    reduce,
    reshape,
    round_even,
    scalar,
    trunc,
    where,
)


def _term(v: Operand, like: Expr, dim: int | None = None) -> Expr:
    """A number, a tensor of one element, or one with an element per index of dimension `dim`, in
    the type and for the dims of `like`."""
    if not isinstance(v, Instruction):
        return like.like(v)
    v = promote.cast(v, like.dtype)
    dims = tuple(n if d == dim else 1 for d, n in enumerate(like.dims)) if dim is not None else ()
    return Expr(broadcast_to(reshape(v, dims), like.dims))


def _numbers(
    x: Instruction, scale: Operand, zero: Operand, dim: int | None
) -> tuple[Expr, Expr, Expr, Expr]:
    """(values, scales, zero points, integers before they are cut off)."""
    value = compute(x)
    scale = _term(scale, value, dim)
    zero = _term(zero, value, dim)
    return value, scale, zero, round_even(value * (1 / scale)) + zero


def clamp(x: Expr, low: Term, high: Term) -> Expr:
    return minimum(maximum(x, low), high)


@lowers(aten.fake_quantize_per_tensor_affine_cachemask)
def _on_grid(
    x: Instruction,
    scale: Operand,
    zero: Operand,
    low: int,
    high: int,
    dim: int | None = None,
    enabled: Instruction | None = None,
) -> tuple[Instruction, Instruction]:
    value, scale, zero, number = _numbers(x, scale, zero, dim)
    inside = (number >= low) & (number <= high)
    result = (clamp(number, low, high) - zero) * scale
    if enabled is not None:
        on = scalar(enabled, "pred")
        result = where(on, result, value)
        inside = inside | ~on
    return finish(result), inside.x


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


def _whole(zero: Instruction, low: int, high: int) -> Instruction:
    """A learned zero point as one of the grid's integers."""
    return clamp(round_even(compute(zero)), low, high).x


@lowers(aten._fake_quantize_learnable_per_tensor_affine)
def learnable(
    x: Instruction,
    scale: Instruction,
    zero: Instruction,
    low: int,
    high: int,
    grad_factor: float = 1.0,
    dim: int | None = None,
) -> Instruction:
    return _on_grid(x, scale, _whole(zero, low, high), low, high, dim)[0]


@lowers(aten._fake_quantize_learnable_per_tensor_affine_backward)
def learnable_backward(
    grad: Instruction,
    x: Instruction,
    scale: Instruction,
    zero: Instruction,
    low: int,
    high: int,
    grad_factor: float = 1.0,
    dim: int | None = None,
) -> Instructions:
    """Gradients of the values, the scale and the zero point. A value beyond the grid moves with its
    end."""
    point = _whole(zero, low, high)
    if dim is None:  # PyTorch's gradients of one grid for all round otherwise
        point = trunc(clamp(compute(zero) + 0.5, low, high)).x
    value, scales, zeros, number = _numbers(x, scale, point, dim)
    inside = (number >= low) & (number <= high)
    below = number < low
    g = Expr(grad).cast(value.dtype)
    error = ((number - zeros) * scales - value) * (1 / scales)
    to_scale = (
        where(inside, g * error, g * (where(below, value.like(low), high) - zeros)) * grad_factor
    )
    to_zero = where(inside, 0, g * -1 * scales * grad_factor)
    summed = [d for d in range(x.rank) if d != dim]
    totals = [reduce(t.x, summed) for t in (to_scale, to_zero)]
    return where(inside, g, 0).cast(grad.dtype).x, *(
        finish(reshape(t, expected(i).dims), i) for i, t in enumerate(totals, 1)
    )


@lowers(aten._fake_quantize_learnable_per_channel_affine)
def learnable_per_channel(
    x: Instruction, scale: Instruction, zero: Instruction, dim: int, *grid: Any
) -> Instruction:
    return learnable(x, scale, zero, *grid, dim=axis(dim, x.rank))


@lowers(aten._fake_quantize_learnable_per_channel_affine_backward)
def learnable_per_channel_backward(
    grad: Instruction, x: Instruction, scale: Instruction, zero: Instruction, dim: int, *grid: Any
) -> Instructions:
    return learnable_backward(grad, x, scale, zero, *grid, dim=axis(dim, x.rank))


_SMALLEST_SCALE = 6.1e-5


def _grid_of(lowest: Expr, highest: Expr, low: int, high: int, middle: bool) -> tuple[Expr, Expr]:
    """(scale, zero point) of the grid from `low` to `high` for values between `lowest` and
    `highest`, in f64; `middle`: zero lies in its middle if there are values on both sides."""
    both = (lowest < 0) & (highest > 0)
    if middle:
        ends = -((high - low) // 2 + 1), (high - low) // 2
        widest = maximum(absolute(lowest / ends[0]), absolute(highest / ends[1]))
        lowest, highest = (
            where(both, widest * e, v).cast("f32").cast("f64")
            for e, v in zip(ends, (lowest, highest))
        )
    lowest = minimum(lowest, 0)
    highest = maximum(highest, 0)
    scale = (highest - lowest) / (high - low)
    scale = where(scale < 2.0**-128, 0.1, scale)  # 1 / scale is no f32
    small = scale < _SMALLEST_SCALE
    larger = _SMALLEST_SCALE / scale
    lowest, highest = (where(small, v * larger, v) for v in (lowest, highest))
    scale = where(small, _SMALLEST_SCALE, scale)
    limits = (low, lowest / scale), (high, highest / scale)
    at = [end - v for end, v in limits]
    errors = [abs(end) - absolute(v) for end, v in limits]
    zero = where(errors[0] < errors[1], *at)
    if middle:
        zero = where(both, (low + high) / 2, zero)
    return scale, round_even(clamp(zero, low, high))


@guard(aten._fused_moving_avg_obs_fq_helper_functional)
def _knows_sizes(*args: Any) -> bool:
    """The first call of a fresh observer of rows gives its arrays their sizes."""
    return all(t.numel() for t in args[3:7])


@lowers(aten._fused_moving_avg_obs_fq_helper_functional)
def moving_average_fake_quantize(
    x: Instruction,
    observing: Instruction,
    rounding: Instruction,
    lowest: Instruction,
    highest: Instruction,
    scale: Instruction,
    zero: Instruction,
    constant: float,
    low: int,
    high: int,
    dim: int,
    per_row: bool = False,
    symmetric: bool = False,
) -> Instructions:
    """Moving averages of the least and the largest value, the grid that follows from them, and the
    values on it."""
    kept = axis(dim, x.rank) if per_row else None
    summed = [d for d in range(x.rank) if d != kept]
    on, fake = (scalar(v, "pred") for v in (observing, rounding))

    def updated(old: Instruction, op: str) -> Expr:
        new = Expr(reshape(reduce(x, summed, op), old.dims)).cast(old.dtype)
        past = Expr(old)
        mean = where(absolute(past).eq(float("inf")), new, past + (new - past) * constant)
        return where(past.like(on), mean, past)

    ends = updated(lowest, "minimum"), updated(highest, "maximum")
    wide = [e.cast("f64").reshape(scale.shape.dims) for e in ends]
    grid = _grid_of(*wide, low, high, symmetric)
    scale, zero = (
        where(new.like(fake), new.cast(old.dtype), Expr(old)).x
        for new, old in zip(grid, (scale, zero))
    )
    return (
        *_on_grid(x, scale, zero, low, high, kept, fake.x),
        *(e.x for e in ends),
        scale,
        zero,
    )
