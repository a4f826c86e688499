"""Sorting and order statistics: sort, topk, kthvalue, median, mode, searchsorted, histograms. nan
is the largest value."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_hlo.hlo.ir import Instruction, Shape, Size, build, row_major_strides

from ..core import (
    HLO_TO_TORCH,
    Expr,
    LoweringError,
    Operand,
    Results,
    Scalar,
    add_dim,
    aten,
    axis,
    broadcast_to,
    compute,
    expected,
    finish,
    gather_dim,
    iota,
    is_nan,
    is_number,
    lowers,
    minimum,
    nested,
    promote,
    reshape,
    scatter_dim,
    select_dim,
    slice_dim,
    swap,
    take_along,
    where,
)
from ..reduction.reduce import arg_extreme, extreme, fold, result


def _of_rows(lowering: Callable[..., Results]) -> Callable[..., Results]:
    """Of a number: the number, and position 0."""

    @functools.wraps(lowering)
    def lower(x: Instruction, *args: Any, **kwargs: Any) -> Results:
        return lowering(x, *args, **kwargs) if x.rank else (x, promote.full(0, "s64", ()))

    return lower


@lowers(aten.sort.default, aten.sort.stable)
@_of_rows
def sorted_along(
    x: Instruction, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Instruction, Instruction]:
    """(sorted values, s64 positions they came from), stable."""
    dim = axis(dim, x.rank)
    both = build.sort([x, iota(x.dims, dim).x], dim, "GT" if descending else "LT", True)
    return build.get_tuple_element(both, 0), build.get_tuple_element(both, 1)


@lowers(aten.topk)
@_of_rows
def topk(
    x: Instruction,
    k: Size,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> tuple[Instruction, Instruction]:
    values, order = sorted_along(x, dim, largest)
    return slice_dim(values, dim, 0, k), slice_dim(order, dim, 0, k)


def _nth(x: Instruction, n: Size, dim: int) -> tuple[Instruction, Instruction]:
    """(value, index) of the n-th smallest along `dim`, in the expected shapes."""
    values, order = sorted_along(x, dim, False)
    return result(Expr(select_dim(values, dim, n))), result(Expr(select_dim(order, dim, n)), 1)


@lowers(aten.kthvalue)
@_of_rows
def kthvalue(
    x: Instruction,
    k: Size,
    dim: int = -1,
    keepdim: bool = False,
) -> Results:
    return _nth(x, k - 1, dim)


@lowers(aten.median.dim)
@_of_rows
def median_dim(x: Instruction, dim: int, keepdim: bool = False) -> tuple[Instruction, Instruction]:
    dim = axis(dim, x.rank)
    value, index = _nth(x, (x.dims[dim] - 1) // 2, dim)
    if not promote.is_floating(x.dtype):
        return value, index
    # A nan anywhere is the median; its first position the index.
    top, place = arg_extreme(Expr(x), dim, True)
    bad = is_nan(Expr(result(top)))
    return (
        where(bad, Expr(result(top)), Expr(value)).x,
        where(bad, Expr(result(place, 1)), Expr(index)).x,
    )


def _of_nothing(dtype: str) -> Instruction:
    """The median of an empty array: nan, or what PyTorch makes of it in a type that has none."""
    value = torch.median(torch.empty(0, dtype=HLO_TO_TORCH[dtype], device="cpu"))
    return promote.full(value.item(), dtype, ())


@lowers(aten.median.default)
def median(x: Instruction) -> Instruction:
    if x.size == 0:
        return _of_nothing(x.dtype)
    flat = reshape(x, (x.size,))
    middle = select_dim(sorted_along(flat, 0, False)[0], 0, (x.size - 1) // 2)
    if not promote.is_floating(x.dtype):
        return middle
    top = extreme(Expr(flat), (0,), True)
    return where(is_nan(top), top, Expr(middle)).x


@lowers(aten.nanmedian.dim)
@_of_rows
def nanmedian_dim(
    x: Instruction,
    dim: int,
    keepdim: bool = False,
) -> Results:
    if not promote.is_floating(x.dtype):
        return _nth(x, (x.dims[dim] - 1) // 2, dim)
    dim = axis(dim, x.rank)
    values, order = sorted_along(x, dim, False)
    numbers = fold((~is_nan(Expr(x))).cast("s64"), (dim,))
    middle = add_dim(where(numbers > 0, (numbers - 1) / 2, 0).x, dim)
    return result(Expr(take_along(values, middle, dim))), result(
        Expr(take_along(order, middle, dim)), 1
    )


@lowers(aten.nanmedian.default)
def nanmedian(x: Instruction) -> Instruction:
    if x.size == 0:
        return _of_nothing(x.dtype)
    flat = reshape(x, (x.size,))
    return nested((Shape(x.dtype), Shape("s64")), nanmedian_dim, flat, 0)[0]


@lowers(aten.mode)
@_of_rows
def mode(x: Instruction, dim: int = -1, keepdim: bool = False) -> tuple[Instruction, Instruction]:
    """The most frequent value, the smallest of several; the index is that of its last
    occurrence."""
    dim = axis(dim, x.rank)
    values, order = sorted_along(swap(x, dim, -1), -1, False)
    v = Expr(values)
    pairs = (*v.dims, v.dims[-1])
    same = Expr(broadcast_to(add_dim(values, v.x.rank), pairs)).eq(
        Expr(broadcast_to(add_dim(values, v.x.rank - 1), pairs))
    )
    counts = fold(same.cast("s64"), (len(pairs) - 1,))
    # Along the sorted row the first of the most frequent values; its run ends count - 1 later.
    most, first = arg_extreme(counts, v.rank - 1, True)
    place = add_dim((first + most - 1).x, v.rank - 1)
    picked, index = (swap(take_along(t, place, -1), dim, -1) for t in (values, order))
    return result(Expr(picked)), result(Expr(index), 1)


# Search in sorted rows
@lowers(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    rows: Instruction,
    values: Operand,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Instruction | None = None,
) -> Instruction:
    right = right or side == "right"
    if sorter is not None:
        rows = take_along(rows, sorter, -1)
    return _search(rows, values, right)


@lowers(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(
    values: Operand,
    boundaries: Instruction,
    *,
    out_int32: bool = False,
    right: bool = False,
) -> Instruction:
    return _search(boundaries, values, right)


def _search(rows: Instruction, values: Operand, right: bool) -> Instruction:
    shape = expected()
    dtype = promote.result_type(rows, values)
    v = Expr(promote.operand(values, dtype, shape.dims))
    return finish(bisected(promote.cast(rows, dtype), v, right))


def bisected(rows: Instruction, v: Expr, right: bool) -> Expr:
    """How many elements of its sorted row are below (right: not above) each value of the same
    type, as s64."""
    size = rows.dims[-1]
    if not isinstance(size, int):
        raise LoweringError(f"searchsorted needs a row of known size, got {rows.shape}")
    if size == 0:
        return Expr(promote.full(0, "s64", v.dims))
    base = Expr(promote.full(0, "s64", v.dims))
    if rows.rank > 1:  # one row per leading index
        row = base
        for d, step in enumerate(row_major_strides(rows.dims)[:-1]):
            row += iota(v.dims, d) * step
        base = row
    flat = reshape(rows, (rows.size,))
    low = Expr(promote.full(0, "s64", v.dims))
    step = 1 << (size.bit_length() - 1)
    while step:  # low elements are known to be below; try `step` more
        reach = low + step
        probe = Expr(gather_dim(flat, (base + minimum(reach, size) - 1).x, 0))
        below = (probe <= v) if right else (probe < v)
        if promote.is_floating(v.dtype):  # nan sorts after everything
            below |= is_nan(v) if right else is_nan(v) & ~is_nan(probe)
        low = where(below & (reach <= size), reach, low)
        step >>= 1
    return low


# Histograms with a given number of bins
@lowers(aten.histc)
def histc(x: Instruction, bins: int = 100, min: Scalar = 0, max: Scalar = 0) -> Instruction:
    shape = expected()
    value = compute(reshape(x, (x.size,)))
    low, high = (value.like(v) for v in (min, max))
    if is_number(min) and is_number(max) and min == max:
        low, high = (value.like(extreme(value, (0,), largest)) for largest in (False, True))
    flat = low.eq(high)
    low = where(flat, low - 1, low)
    high = where(flat, high + 1, high)
    inside = (value >= low) & (value <= high)
    if promote.is_floating(value.dtype):
        position = ((value - low) / (high - low) * bins).cast("s64")
    else:
        position = (value.cast("s64") - low.cast("s64")) * bins / (high - low).cast("s64")
    position = where(position >= bins, bins - 1, where(inside, position, 0))
    counts = scatter_dim(
        promote.full(0, value.dtype, (bins,)),
        where(inside, position, 0).x,
        inside.cast(value.dtype).x,
        0,
    )
    return promote.cast(counts, shape.dtype)
