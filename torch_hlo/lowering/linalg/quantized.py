"""Products of quantized operands. The sums are scaled where a scale is the same along the
contracted dimension; nothing that is scaled is rounded before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_hlo.hlo.ir import build
from torch_hlo.hlo.ir.instruction import Instruction
from torch_hlo.lowering.core import promote
from torch_hlo.lowering.core.expr import Expr, binary
from torch_hlo.lowering.core.promote import reshape
from torch_hlo.lowering.core.registry import expected, guard, lowers
from torch_hlo.lowering.core.shaping import (
    concatenate,
    permute,
    reduce,
    select_dim,
    slice_dim,
    stack,
)
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
def _is_scaled_by_recipe(a: Tensor, b: Tensor, *rest: Any) -> bool:
    (scale_a, *_), recipe, swizzle, (scale_b, *_), other, unswizzle, bias, *_ = rest
    return (
        recipe == other
        and recipe in ([_ONE], [_ROWS])
        and not any((*swizzle, *unswizzle))
        and _is_scaled(a, b, scale_a, scale_b, bias)
        and (recipe == [_ROWS] or scale_a.numel() == 1)
    )


@lowers(aten._scaled_mm_v2.default)
def scaled_mm_by_recipe(a: Instruction, b: Instruction, *rest: Any) -> Instruction:
    (scale_a, *_), _, _, (scale_b, *_), _, _, bias, *_ = rest
    return scaled_mm(a, b, scale_a, scale_b, bias)


# Four bits a number, as PyTorch's CPU kernels keep a matrix [n, k]: blocks of rows, of each block
# [k, rows / 2] bytes. A full block has row i in the low and row i + rows / 2 in the high halves of
# the bytes i; what is left of the matrix has rows 2 i and 2 i + 1 there.
_BLOCKS = {"AVX2": 32, "AVX512": 64}


def _blocks(n: int) -> list[tuple[int, int, bool]]:
    """The parts of a matrix of n rows: rows, blocks, and whether halves are apart."""
    block = _BLOCKS.get(torch.backends.cpu.get_cpu_capability(), n + 1)
    parts = [(n - n % block, n // block, True), (n % block, 1, False)]
    return [part for part in parts if part[0]]


def _paired(halves: Sequence[Instruction], apart: bool) -> Instruction:
    """Arrays [.., rows / 2] of the low and the high halves -> [.., rows]."""
    both = stack(halves, -2 if apart else -1)
    return reshape(both, (*both.shape.dims[:-2], 2 * halves[0].shape.dims[-1]))


@guard(aten._convert_weight_to_int4pack_for_cpu)
def _has_blocks(w: Tensor, inner: int) -> bool:
    return w.dim() == 2 and not (w.shape[0] % 16 or w.shape[1] % 2 or w.dtype is not torch.int32)


@lowers(aten._convert_weight_to_int4pack_for_cpu)
def convert_weight_to_int4pack(w: Instruction, inner: int) -> Instruction:
    """s32[n, k] with values of 0 to 15 -> u8[n, k / 2]."""
    n, k = w.shape.sizes
    first, packed = 0, []
    for rows, blocks, apart in _blocks(n):
        half = rows // blocks // 2
        dims = (blocks, 2, half, k) if apart else (blocks, half, 2, k)
        part = reshape(slice_dim(w, 0, first, first + rows), dims)
        low, high = (Expr(select_dim(part, 1 if apart else 2, i)) for i in range(2))
        code = permute((low | high * 16).cast("u8").x, (0, 2, 1))
        packed.append(reshape(code, (rows, k // 2)))
        first += rows
    return concatenate(packed, 0)


def _numbers(packed: Instruction, groups: int) -> Iterator[tuple[int, bool, list[Instruction]]]:
    """Of each part of a matrix: its rows, whether halves are apart, and the numbers as f32[blocks,
    groups, k, rows / 2] of the low and the high halves."""
    first, k = 0, 2 * packed.shape.sizes[1]
    for rows, blocks, apart in _blocks(packed.shape.sizes[0]):
        part = slice_dim(packed, 0, first, first + rows)
        code = Expr(reshape(part, (blocks, groups, k // groups, rows // blocks // 2))).cast("s32")
        halves = code & 15, binary("shift-right-logical", code, 4)
        yield rows, apart, [v.cast("f32").x for v in halves]
        first += rows


@guard(aten._weight_int4pack_mm_for_cpu)
def _has_groups(x: Tensor, packed: Tensor, group: int, scales: Tensor) -> bool:
    n, k = packed.shape[0], x.shape[-1]
    return (
        x.dim() == packed.dim() == 2
        and packed.shape[1] * 2 == k
        and n % 16 == k % group == 0
        and group in (32, 64, 128, 256)
        and scales.shape == (k // group, n, 2)
        and scales.dtype is x.dtype
    )


@lowers(aten._weight_int4pack_mm_for_cpu)
def weight_int4pack_mm(
    x: Instruction, packed: Instruction, group: int, scales_and_zeros: Instruction
) -> Instruction:
    """x [m, k] times w [n, k], of which each group along k has the values (q - 8) * scale + zero.
    One row of x is multiplied with q as it stands in memory, and each group's sum is scaled; for
    several rows w is made first."""
    (m, k), n = x.shape.dims, packed.shape.sizes[0]
    groups = k // group
    scale, zero = (Expr(select_dim(scales_and_zeros, 2, i)).cast("f32") for i in range(2))
    zero = zero - scale * 8
    found = []
    if m == 1:
        x = promote.cast(reshape(x, (groups, group)), "f32")
        for rows, apart, halves in _numbers(packed, groups):
            sums = [dot(x, w, (1,), (2,), (0,), (1,)).x for w in halves]
            found.append(reshape(_paired(sums, apart), (groups, rows)))
        total = Expr(build.broadcast(reduce(x, (1,)), (groups, n), (0,)))
        scaled = Expr(concatenate(found, 1)) * scale + zero * total
        return promote.cast(reshape(reduce(scaled.x, (0,)), (1, n)), expected().dtype)
    for rows, apart, halves in _numbers(packed, groups):
        q = permute(_paired(halves, apart), (0, 3, 1, 2))
        found.append(reshape(q, (rows, groups, group)))
    numbers = Expr(concatenate(found, 0))
    scale, zero = (
        Expr(build.broadcast(permute(v.x, (1, 0)), numbers.dims, (0, 1))) for v in (scale, zero)
    )
    w = reshape((numbers * scale + zero).x, (n, k))
    return promote.cast(dot(x, w, (1,), (1,)).x, expected().dtype)
