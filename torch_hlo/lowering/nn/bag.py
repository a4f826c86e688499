"""Sums over variable groups of rows: embedding_bag and segment_reduce."""

from typing import Any

from torch_hlo.hlo.ir import Instruction, Size, splat

from ..core import (
    Expr,
    Results,
    Scalar,
    aten,
    expected,
    expected_shapes,
    finish,
    gather_dim,
    iota,
    lowers,
    lowest,
    pad_dim,
    promote,
    put_along,
    scatter_dim,
    slice_dim,
    where,
)
from ..reduction.reduce import fold
from ..shape.cumulative import prefix
from ..shape.index import embedding_dense_backward

SUM = 0
MEAN = 1
MAX = 2


def _evenly(offsets: Instruction, count: Size) -> int:
    """How many indices each bag has, if all have as many as the last one; else 0. Indices in rows
    come so."""
    if offsets.op != "multiply" or offsets.operand.op != "iota":
        return 0
    n = splat(offsets.operands[1])
    return n if isinstance(n, int) and n * offsets.dims[0] == count else 0


def _bag_of(offsets: Instruction, count: Size) -> Expr:
    """s64[count]: the bag each index belongs to (the last whose offset is not beyond it)."""
    if n := _evenly(offsets, count):
        return iota((*offsets.dims, n), 0).reshape((count,))
    none = promote.full(0, "s64", (count,))
    begun = scatter_dim(none, offsets, promote.full(1, "s64", offsets.dims), 0)
    return prefix(Expr(begun), 0, "add") - 1


@lowers(aten._embedding_bag, aten._embedding_bag_forward_only)
def embedding_bag(
    weight: Instruction,
    indices: Instruction,
    offsets: Instruction,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Instruction | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Results:
    """(output, bag of each index, size of each bag, index of each maximum)."""
    shapes = expected_shapes()
    dims = shapes[0].dims
    dtype = promote.compute_type(shapes[0].dtype)
    bags, width = dims
    if include_last_offset:
        offsets = slice_dim(offsets, 0, 0, bags)
    count = indices.dims[0]
    bag = _bag_of(offsets, count)
    each = _evenly(offsets, count)

    def folded(x: Expr, op: str = "add", start: Scalar = 0) -> Expr:
        if each:
            return fold(x.reshape((bags, each, *x.dims[1:])), (1,), op)
        first = promote.full(start, x.dtype, (bags, *x.dims[1:]))
        return Expr(scatter_dim(first, bag.x, x.x, 0, op))

    index = Expr(indices).cast("s64")
    used = index.ne(padding_idx) if padding_idx >= 0 else index.eq(index)
    rows = Expr(gather_dim(weight, indices, 0)).cast(dtype)
    if per_sample_weights is not None:
        rows *= Expr(per_sample_weights).cast(dtype).spread(rows.dims)
    sizes = folded(used.cast("s64"))
    kept = used.spread(rows.dims)
    if mode == MAX:
        low = lowest(dtype)
        best = folded(where(kept, rows, low), "maximum", low)
        empty = sizes.eq(0).spread(dims)
        out = where(empty, 0, best)
        hit = kept & rows.eq(Expr(gather_dim(best.x, bag.x, 0)))
        first = folded(where(hit, iota(rows.dims, 0), 1 << 62), "minimum", 1 << 62)
        place = where(empty, 0, first)
        chosen = gather_dim(index.x, place.x, 0)
        maximum_index = where(empty, 0, Expr(chosen)).x
    else:
        out = folded(where(kept, rows, 0))
        if mode == MEAN:
            divisor = where(sizes > 0, sizes, 1).cast(dtype)
            out /= divisor.spread(dims)
        maximum_index = promote.full(0, "s64", shapes[3].dims)
    last = pad_dim(sizes.x, 0, 0, 1) if include_last_offset else sizes.x
    values = (out.x, bag.x, last, maximum_index)
    return tuple(
        promote.cast(v, s.dtype) if v.dims == s.dims else promote.full(0, s.dtype, s.dims)
        for v, s in zip(values, shapes, strict=True)
    )


@lowers(aten._embedding_bag_dense_backward)
def embedding_bag_backward(
    grad: Instruction,
    indices: Instruction,
    bag: Instruction,
    sizes: Instruction,
    maximum_indices: Instruction,
    num_weights: Size,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Instruction | None,
    padding_idx: int = -1,
) -> Instruction:
    shape = expected()
    dtype = promote.compute_type(shape.dtype)
    g = Expr(grad).cast(dtype)
    if mode == MAX:
        empty = Expr(slice_dim(sizes, 0, 0, g.dims[0])).eq(0)
        g = where(empty.spread(g.dims), 0, g)  # an empty bag has no maximum
        zero = promote.full(0, dtype, shape.dims)
        return finish(put_along(zero, maximum_indices, g.x, 0))
    rows = Expr(gather_dim(g.x, bag, 0))
    if mode == MEAN:
        size = Expr(gather_dim(promote.cast(sizes, dtype), bag, 0))
        rows /= where(size.eq(0), 1, size).spread(rows.dims)
    if per_sample_weights is not None:
        rows *= Expr(per_sample_weights).cast(dtype).spread(rows.dims)
    return embedding_dense_backward(rows.x, indices, num_weights, padding_idx, scale_grad_by_freq)


@lowers(aten._embedding_bag_backward)
def embedding_bag_any_backward(
    grad: Instruction,
    indices: Instruction,
    offsets: Instruction,
    bag: Instruction,
    sizes: Instruction,
    maximum: Instruction,
    num_weights: Size,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    *rest: Any,
) -> Instruction:
    bag = _given_or_bag(bag, grad, indices, offsets)
    kinds = (num_weights, scale_grad_by_freq, mode)
    return embedding_bag_backward(grad, indices, bag, sizes, maximum, *kinds, *rest)


def _given_or_bag(
    bag: Instruction, grad: Instruction, indices: Instruction, offsets: Instruction
) -> Instruction:
    """The bag of each index, which PyTorch's CPU kernel leaves out of plain sums."""
    if bag.dims == indices.dims:
        return bag
    return _bag_of(slice_dim(offsets, 0, 0, grad.dims[0]), indices.dims[0]).x


@lowers(aten._embedding_bag_per_sample_weights_backward)
def per_sample_weights_backward(
    grad: Instruction,
    weight: Instruction,
    indices: Instruction,
    offsets: Instruction,
    bag: Instruction,
    mode: int,
    padding_idx: int = -1,
) -> Instruction:
    shape = expected()
    dtype = promote.compute_type(shape.dtype)
    bag = _given_or_bag(bag, grad, indices, offsets)
    rows = Expr(gather_dim(weight, indices, 0)).cast(dtype) * Expr(
        gather_dim(promote.cast(grad, dtype), bag, 0)
    )
    total = fold(rows, (1,))
    if padding_idx >= 0:
        total = where(Expr(indices).cast("s64").eq(padding_idx), 0, total)
    return finish(total)
