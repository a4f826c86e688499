"""Sums over variable groups of rows: embedding_bag and segment_reduce."""

from typing import Any

from torch_hlo.hlo.ir import Instruction, Size

from ..core import (
    Expr,
    Results,
    aten,
    broadcast_to,
    expected,
    expected_shapes,
    finish,
    gather_dim,
    iota,
    lowers,
    lowest,
    promote,
    put_along,
    scatter_dim,
    slice_dim,
    where,
)
from ..reduction.reduce import fold
from ..shape.index import embedding_dense_backward

SUM = 0
MEAN = 1
MAX = 2


def _bag_of(offsets: Instruction, count: Size) -> Expr:
    """s64[count]: the bag each index belongs to (the last whose offset is not beyond it)."""
    dims = (count, offsets.dims[0])
    starts = Expr(broadcast_to(promote.cast(offsets, "s64"), dims))
    reached = (starts <= iota(dims, 0)).cast("s64")
    return fold(reached, (1,)) - 1


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
    index = Expr(indices).cast("s64")
    used = index.ne(padding_idx) if padding_idx >= 0 else index.eq(index)
    rows = Expr(gather_dim(weight, indices, 0)).cast(dtype)
    if per_sample_weights is not None:
        rows *= Expr(per_sample_weights).cast(dtype).spread(rows.dims)
    sizes = Expr(scatter_dim(promote.full(0, "s64", (bags,)), bag.x, used.cast("s64").x, 0))
    kept = used.spread(rows.dims)
    if mode == MAX:
        low = Expr(promote.full(lowest(dtype), dtype, dims))
        best = Expr(scatter_dim(low.x, bag.x, where(kept, rows, lowest(dtype)).x, 0, "maximum"))
        empty = sizes.eq(0).spread(dims)
        out = where(empty, 0, best)
        hit = kept & rows.eq(Expr(gather_dim(best.x, bag.x, 0)))
        large = promote.full((1 << 62), "s64", dims)
        first = scatter_dim(
            large,
            bag.x,
            where(hit, iota(rows.dims, 0), 1 << 62).x,
            0,
            "minimum",
        )
        place = where(empty, 0, Expr(first))
        chosen = gather_dim(index.x, place.x, 0)
        maximum_index = where(empty, 0, Expr(chosen)).x
    else:
        out = Expr(scatter_dim(promote.full(0, dtype, dims), bag.x, where(kept, rows, 0).x, 0))
        if mode == MEAN:
            divisor = where(sizes > 0, sizes, 1).cast(dtype)
            out /= divisor.spread(dims)
        maximum_index = promote.full(0, "s64", shapes[3].dims)
    values = (out.x, bag.x, sizes.x, maximum_index)
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
        g = where(Expr(sizes).eq(0).spread(g.dims), 0, g)  # an empty bag has no maximum
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
