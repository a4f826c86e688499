"""Products of quantized operands. The sums are scaled where a scale is the same along the
contracted dimension; nothing that is scaled is rounded before."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_hlo.compiler.matmul.dot_narrow import GROUPS
from torch_hlo.hlo.ir import build, round_up
from torch_hlo.hlo.ir.instruction import Instruction

from ..core import aten, finish, named_call, promote
from ..core.expr import Expr
from ..core.promote import reshape
from ..core.registry import expected, guard, lowers
from ..core.shaping import (
    concatenate,
    permute,
    reduce,
    select_dim,
    slice_dim,
    stack,
)
from .matmul import dot


def _scaled(y: Expr, scale: Instruction) -> Expr:
    return y * y.like(scale)


def _with_bias(y: Expr, bias: Instruction | None) -> Instruction:
    if bias is not None:
        y += y.like(bias)
    return finish(y)


@lowers(aten._weight_int8pack_mm.default)
def weight_int8pack_mm(a: Instruction, w: Instruction, scales: Instruction) -> Instruction:
    """a [m, k] in floats, w [n, k] in s8, scales [n] -> a w^T * scales [m, n] in a's type."""
    return finish(_scaled(dot(a, promote.cast(w, a.dtype), (1,), (1,)), scales))


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
    scale_result: Instruction | None = None,
    *args: Any,
    **kwargs: Any,
) -> Instruction:
    y = _scaled(_scaled(dot(a, b, (1,), (0,)), scale_a), scale_b)
    if bias is not None:
        y += y.like(bias)
    if scale_result is not None and expected().dtype.startswith("f8"):  # as PyTorch's CPU kernel
        y /= y.like(scale_result)
    return finish(y)


# members of torch.nn.functional.ScalingType; how many numbers along k share a scale of blocks
_ONE = 0
_ROWS = 1
_MX = 3
_LINES = 4
_SQUARES = 5
_SHARED = {_MX: 32, _LINES: 128, _SQUARES: 128}


def _fits_blocks(scale: Tensor, recipe: int, swizzle: list[int], rows: int, k: int) -> bool:
    blocks, left = divmod(k, _SHARED.get(recipe, k + 1))
    if left or "float8" not in str(scale.dtype) and scale.dtype is not torch.float32:
        return False
    if recipe == _MX:
        size = round_up(rows, 128) * round_up(blocks, 4)
        return scale.dtype is torch.float8_e8m0fnu and scale.numel() == size and swizzle == [1]
    line = (rows, blocks) if recipe == _LINES else (round_up(blocks, 4), rows / 128)
    return scale.dtype is torch.float32 and tuple(scale.shape) == line and not any(swizzle)


@guard(aten._scaled_mm_v2.default)
def _is_scaled_by_recipe(a: Tensor, b: Tensor, *rest: Any) -> bool:
    scales, recipe, swizzle, others, other, unswizzle, bias, *_ = rest
    if not len(scales) == len(others) == len(recipe) == len(other) == 1:
        return False
    if recipe[0] not in _SHARED:
        return (
            recipe == other
            and recipe in ([_ONE], [_ROWS])
            and not any((*swizzle, *unswizzle))
            and _is_scaled(a, b, *scales, *others, bias)
            and (recipe == [_ROWS] or scales[0].numel() == 1)
        )
    one = torch.empty((), device="meta")
    return (
        _is_scaled(a, b, one, one, bias)
        and (recipe == other or sorted((*recipe, *other)) == [_LINES, _SQUARES])
        and recipe != [_SQUARES, _SQUARES]
        and _fits_blocks(*scales, *recipe, swizzle, *a.shape)
        and _fits_blocks(*others, *other, unswizzle, *b.t().shape)
    )


def _of_blocks(x: Instruction, scale: Instruction, recipe: int) -> Instruction:
    """x [rows, k] in f32, times the scales of its blocks."""
    rows, k = x.shape.sizes
    each = _SHARED[recipe]
    blocks = k // each
    if recipe == _MX:  # tiles of 128 x 4 scales, in which a line has those of rows 32 apart
        tall = round_up(rows, 128)
        wide = round_up(blocks, 4)
        scale = reshape(scale, (tall // 128, wide // 4, 32, 4, 4))
        scale = reshape(permute(scale, (0, 3, 2, 1, 4)), (tall, wide))
        scale = slice_dim(slice_dim(scale, 0, 0, rows), 1, 0, blocks)
    elif recipe == _SQUARES:
        scale = permute(slice_dim(scale, 0, 0, blocks), (1, 0))
        scale = build.broadcast(scale, (rows // 128, 128, blocks), (0, 2))
        scale = reshape(scale, (rows, blocks))
    factors = build.broadcast(promote.cast(scale, "f32"), (rows, blocks, each), (0, 1))
    return reshape((Expr(reshape(x, factors.shape.dims)).cast("f32") * Expr(factors)).x, (rows, k))


@lowers(aten._scaled_mm_v2.default)
def scaled_mm_by_recipe(a: Instruction, b: Instruction, *rest: Any) -> Instruction:
    (scale_a, *_), (recipe, *_), _, (scale_b, *_), (other, *_), _, bias, *_ = rest
    if recipe not in _SHARED:
        return scaled_mm(a, b, scale_a, scale_b, bias)
    a = _of_blocks(a, scale_a, recipe)
    b = _of_blocks(permute(b, (1, 0)), scale_b, other)
    return _with_bias(dot(a, b, (1,), (1,)), bias)


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
    first = 0
    packed = []
    for rows, blocks, apart in _blocks(n):
        half = rows // blocks // 2
        dims = (blocks, 2, half, k) if apart else (blocks, half, 2, k)
        part = reshape(slice_dim(w, 0, first, first + rows), dims)
        low, high = (Expr(select_dim(part, 1 if apart else 2, i)) for i in range(2))
        code = permute((low | high * 16).cast("u8").x, (0, 2, 1))
        packed.append(reshape(code, (rows, k // 2)))
        first += rows
    return concatenate(packed, 0)


@guard(aten._weight_int4pack_mm_for_cpu)
def _has_groups(x: Tensor, packed: Tensor, group: int, scales: Tensor) -> bool:
    n = packed.shape[0]
    k = x.shape[-1]
    return (
        x.dim() == packed.dim() == 2
        and packed.shape[1] * 2 == k
        and n % 16 == k % group == 0
        and group in (32, 64, 128, 256)
        and scales.shape == (k // group, n, 2)
        and scales.dtype is x.dtype
    )


def _of_groups(
    apart: bool, x: Instruction, sums: Instruction, w: Instruction, scales: Instruction
) -> list[Instruction]:
    """f32[m, k], sums of its groups f32[m, groups], u8[blocks, k, half], [groups, n, 2] -> f32[m,
    n]. Each group's sum of products is scaled."""
    m, groups = sums.shape.dims
    blocks, k, half = w.shape.dims
    n = scales.shape.dims[1]
    code = Expr(reshape(w, (blocks, groups, k // groups, half))).cast("s32")
    rows = reshape(x, (m, groups, k // groups))
    halves = [dot(rows, q.cast("f32").x, (2,), (2,), (1,), (1,)).x for q in (code & 15, code >> 4)]
    found = Expr(reshape(_paired(halves, apart), (groups, m, n)))
    scale, zero = (Expr(select_dim(scales, 2, i)).cast("f32") for i in range(2))
    scale, zero, whole = (
        Expr(build.broadcast(v, found.dims, at))
        for v, at in ((scale.x, (0, 2)), ((zero - scale * 8).x, (0, 2)), (sums, (1, 0)))
    )
    return [reduce((found * scale + zero * whole).x, (0,))]


@lowers(aten._weight_int4pack_mm_for_cpu)
def weight_int4pack_mm(
    x: Instruction, packed: Instruction, group: int, scales: Instruction
) -> Instruction:
    """x [m, k] times w [n, k], of which each group along k has the values (q - 8) * scale +
    zero."""
    m, k = x.shape.dims
    n = packed.shape.sizes[0]
    x = promote.cast(x, "f32")
    first = 0
    found = []
    sums = reduce(reshape(x, (m, k // group, group)), (2,))
    for rows, blocks, apart in _blocks(n):
        w = reshape(slice_dim(packed, 0, first, first + rows), (blocks, k, rows // blocks // 2))
        of = x, sums, w, slice_dim(scales, 1, first, first + rows)
        meaning = partial(_of_groups, apart)
        found += named_call("groups", GROUPS, of, meaning) if apart else meaning(*of)
        first += rows
    return promote.cast(concatenate(found, 1), expected().dtype)
