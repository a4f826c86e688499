"""Indexing: embedding, index, gather and scatter families. Everything becomes one gather or scatter
on an s64 index array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_hlo.hlo.ir import Dims, Instruction, Size, product, row_major_strides

from ..core import (
    Expr,
    LoweringError,
    Operand,
    Scalar,
    aten,
    axis,
    broadcast_dims,
    broadcast_to,
    expected,
    finish,
    gather_dim,
    guard,
    is_number,
    lowers,
    permute,
    promote,
    put_along,
    reshape,
    scatter_dim,
    slice_dim,
    start_value,
    take_along,
    where,
    wrap_negative,
)
from ..pointwise.binary import floor_divide
from .cumulative import prefix


# Embedding
@lowers(aten.embedding)
def embedding(weight: Instruction, indices: Instruction, *args: Any, **kwargs: Any) -> Instruction:
    return gather_dim(weight, indices, 0)


@lowers(aten.embedding_dense_backward)
def embedding_dense_backward(
    grad: Instruction,
    indices: Instruction,
    num_weights: Size,
    padding_idx: Size,
    scale_grad_by_freq: bool,
) -> Instruction:
    shape = expected()
    dtype = promote.compute_type(shape.dtype)
    g = Expr(grad).cast(dtype)
    if is_number(padding_idx) and padding_idx >= 0:
        padding = Expr(indices).spread(g.dims).eq(padding_idx)
        g = where(padding, 0, g)
    if scale_grad_by_freq:
        ones = promote.full(1, dtype, indices.dims)
        counts = scatter_dim(promote.full(0, dtype, shape.dims[:1]), indices, ones, 0)
        g /= Expr(gather_dim(counts, indices, 0)).spread(g.dims)
    total = scatter_dim(promote.full(0, dtype, shape.dims), indices, g.x, 0)
    return finish(total)


# One index per position of a dimension
@lowers(aten.index_select)
def index_select(x: Instruction, dim: int, index: Instruction) -> Instruction:
    return reshape(gather_dim(_at_least_1d(x), index, dim), expected().dims)


@lowers(aten.take)
def take(x: Instruction, index: Instruction) -> Instruction:
    flat = reshape(x, (x.size,))
    return gather_dim(flat, wrap_negative(index, x.size), 0)


@lowers(aten.put)
def put(
    x: Instruction,
    index: Instruction,
    source: Instruction,
    accumulate: bool = False,
) -> Instruction:
    flat = reshape(x, (x.size,))
    source = reshape(source, index.dims)
    return reshape(
        scatter_dim(flat, wrap_negative(index, x.size), source, 0, "add" if accumulate else None),
        x.dims,
    )


def _at_least_1d(x: Instruction) -> Instruction:
    return reshape(x, (1,)) if not x.rank else x


@lowers(aten.index_add)
def index_add(
    x: Instruction,
    dim: int,
    index: Instruction,
    source: Instruction,
    *,
    alpha: Scalar = 1,
) -> Instruction:
    dtype = promote.compute_type(x.dtype)
    updates = Expr(_at_least_1d(source)).cast(dtype)
    if not (is_number(alpha) and alpha == 1):
        updates *= alpha
    base = _at_least_1d(promote.cast(x, dtype))
    op = "or" if dtype == "pred" else "add"
    result = scatter_dim(base, _at_least_1d(index), updates.x, dim, op)
    return reshape(promote.cast(result, x.dtype), x.dims)


@lowers(aten.index_copy)
def index_copy(x: Instruction, dim: int, index: Instruction, source: Instruction) -> Instruction:
    return reshape(
        scatter_dim(_at_least_1d(x), _at_least_1d(index), _at_least_1d(source), dim, None),
        x.dims,
    )


@lowers(aten.index_fill)
def index_fill(x: Instruction, dim: int, index: Instruction, value: Operand) -> Instruction:
    base = _at_least_1d(x)
    d = axis(dim, base.rank)
    index = wrap_negative(_at_least_1d(index), base.dims[d])
    dims = (*base.dims[:d], *index.dims, *base.dims[d + 1 :])
    return reshape(scatter_dim(base, index, promote.operand(value, x.dtype, dims), d, None), x.dims)


_REDUCERS = {
    "sum": "add",
    "add": "add",
    "mean": "add",
    "prod": "multiply",
    "multiply": "multiply",
    "amax": "maximum",
    "amin": "minimum",
}


def _fold_into(
    base: Instruction,
    reduce: str,
    include_self: bool,
    updates: Instruction,
    write: Callable[[Instruction, Instruction, str], Instruction],
) -> Instruction:
    """Scatter-reduce: `write(target, updates, op)` scatters into `target` with an opcode.

    Without `include_self` the touched elements start from the neutral element.
    """
    op = _REDUCERS[reduce]
    dtype = base.dtype
    if dtype == "pred":
        op = {"add": "or", "multiply": "and", "maximum": "or", "minimum": "and"}[op]
    counts = None
    start = base
    if not include_self or reduce == "mean":
        zeros, ones = (promote.full(i, "s64", x.dims) for i, x in enumerate((base, updates)))
        counts = Expr(write(zeros, ones, "add"))
        if not include_self:
            start = where(counts > 0, Expr(base).like(start_value(op, dtype)), Expr(base)).x
    result = Expr(write(start, updates, op))
    if reduce == "mean":
        divisor = counts + 1 if include_self else where(counts > 0, counts, 1)
        divisor = divisor.cast(dtype)
        result = floor_divide(result, divisor) if promote.is_integral(dtype) else result / divisor
    return result.x


@lowers(aten.index_reduce)
def index_reduce(
    x: Instruction,
    dim: int,
    index: Instruction,
    source: Instruction,
    reduce: str,
    *,
    include_self: bool = True,
) -> Instruction:
    dtype = promote.compute_type(x.dtype)
    base = _at_least_1d(promote.cast(x, dtype))
    updates = _at_least_1d(promote.cast(source, dtype))
    index = _at_least_1d(index)
    folded = _fold_into(
        base,
        reduce,
        include_self,
        updates,
        lambda target, values, op: scatter_dim(target, index, values, dim, op),
    )
    return reshape(promote.cast(folded, x.dtype), x.dims)


# One index per element
@lowers(aten.gather)
def gather(
    x: Instruction,
    dim: int,
    index: Instruction,
    *,
    sparse_grad: bool = False,
) -> Instruction:
    if not x.rank:
        return broadcast_to(x, expected().dims)
    return reshape(take_along(x, _at_least_1d(index), dim), expected().dims)


@lowers(
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_reduce.two,
)
def scatter(
    x: Instruction,
    dim: int,
    index: Instruction,
    source: Operand,
    reduce: str | None = None,
    include_self: bool = True,
) -> Instruction:
    dtype = x.dtype if reduce is None else promote.compute_type(x.dtype)
    base = _at_least_1d(promote.cast(x, dtype))
    index = _at_least_1d(index)
    if isinstance(source, Instruction) and source.rank:
        updates = promote.cast(source, dtype)
        # elements of the source beyond the index play no part
        for d, size in enumerate(index.dims):
            updates = slice_dim(updates, d, 0, size)
    else:
        updates = promote.operand(source, dtype, index.dims)
    updates = reshape(updates, index.dims)

    def write(target: Instruction, values: Instruction, op: str | None) -> Instruction:
        return put_along(target, index, values, dim, op)

    result = (
        write(base, updates, None)
        if reduce is None
        else _fold_into(base, reduce, include_self, updates, write)
    )
    return reshape(promote.cast(result, x.dtype), x.dims)


lowers(aten.scatter_add)(partial(scatter, reduce="add"))


# Advanced indexing
class Plan:
    """x[i, :, j, …]: indexed dims moved to the front and flattened to one, with an index array into
    it."""

    def __init__(self, dims: Sequence[Size], indices: Sequence[Instruction | None]) -> None:
        self.dims = tuple(dims)
        self.places = [d for d, i in enumerate(indices) if i is not None]
        arrays = [i for i in indices if i is not None]
        if any(a.dtype in ("pred",) for a in arrays):
            raise LoweringError(
                "indexing by a mask has a data-dependent size; it cannot be part of a program"
            )
        self.rest = [d for d in range(len(dims)) if d not in self.places]
        common = broadcast_dims(*(a.dims for a in arrays))
        strides = row_major_strides(tuple(dims[d] for d in self.places))
        index = None
        for a, d, stride in zip(arrays, self.places, strides, strict=True):
            step = (
                Expr(broadcast_to(wrap_negative(promote.cast(a, "s64"), dims[d]), common)) * stride
            )
            index = step if index is None else index + step
        self.index = index.x
        adjacent = self.places == list(range(self.places[0], self.places[0] + len(self.places)))
        # The dims of the index array replace adjacent indexed dims, else they come first.
        self.front = self.places[0] if adjacent else 0

    def flatten(self, x: Instruction) -> Instruction:
        """[indexed, rest…]"""
        moved = permute(x, self.places + self.rest)
        rows = product(self.dims[d] for d in self.places)
        return reshape(moved, (rows, *(self.dims[d] for d in self.rest)))

    def restore(self, flat: Instruction) -> Instruction:
        order = self.places + self.rest
        moved = reshape(flat, [self.dims[d] for d in order])
        return permute(moved, [order.index(d) for d in range(len(order))])

    def to_result(self, picked: Instruction) -> Instruction:
        """[index dims…, rest…] -> the dims of the result."""
        n = self.index.rank
        return permute(picked, self._moved(n, self.front, picked.rank))

    def from_result(self, values: Instruction) -> Instruction:
        n = self.index.rank
        return permute(values, self._moved(self.front, n, values.rank))

    @staticmethod
    def _moved(first: int, count: int, rank: int) -> list[int]:
        """Dimension numbers with the `count` ones from `first` on in front."""
        end = first + count
        return [*range(first, end), *range(first), *range(end, rank)]

    @property
    def result_dims(self) -> Dims:
        rest = [self.dims[d] for d in self.rest]
        return (*rest[: self.front], *self.index.dims, *rest[self.front :])


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(x: Instruction, indices: Sequence[Instruction | None]) -> Instruction:
    if all(i is None for i in indices):
        return x
    indices = [*indices, *[None] * (x.rank - len(indices))]
    used = [d for d, i in enumerate(indices) if i is not None]
    if len(used) == 1 and indices[used[0]].dtype != "pred":
        (d,) = used
        return gather_dim(x, wrap_negative(indices[d], x.dims[d]), d)
    plan = Plan(x.dims, indices)
    return plan.to_result(gather_dim(plan.flatten(x), plan.index, 0))


def _is_mask(i: Tensor | None) -> bool:
    return i is not None and i.dtype in (torch.bool, torch.uint8)


@guard(aten.index.Tensor, aten._unsafe_index.Tensor)
def _has_fixed_size(x: Tensor, indices: Sequence[Tensor]) -> bool:
    return not any(_is_mask(i) for i in indices)


@guard(aten.index_put, aten._unsafe_index_put)
def _has_static_positions(
    x: Tensor,
    indices: Sequence[Tensor],
    values: Tensor,
    accumulate: bool = False,
    *args: Any,
) -> bool:
    """A mask may only stand alone, in front."""
    return not any(_is_mask(i) for i in indices) or (
        _is_mask(indices[0]) and all(i is None for i in indices[1:])
    )


@lowers(aten.index_put, aten._unsafe_index_put)
def index_put(
    x: Instruction,
    indices: Sequence[Instruction | None],
    values: Instruction,
    accumulate: bool = False,
    *args: Any,
) -> Instruction:
    values = promote.cast(values, x.dtype)
    masks = [i for i in indices if i is not None and i.dtype in ("pred", "u8")]
    if masks:
        if (
            len(masks) > 1
            or any(i is not None and i is not masks[0] for i in indices)
            or indices[0] is None
        ):
            raise LoweringError(
                "index_put with a mask besides other indices has a data-dependent size"
            )
        return _put_masked(x, promote.cast(masks[0], "pred"), values, accumulate)
    if all(i is None for i in indices):
        values = broadcast_to(values, x.dims)
        return (Expr(x) + Expr(values)).x if accumulate else values
    plan = Plan(x.dims, [*indices, *[None] * (x.rank - len(indices))])
    updates = plan.from_result(broadcast_to(values, plan.result_dims))
    dtype = promote.compute_type(x.dtype) if accumulate else x.dtype
    op = None if not accumulate else "or" if dtype == "pred" else "add"
    flat = scatter_dim(
        promote.cast(plan.flatten(x), dtype),
        plan.index,
        promote.cast(updates, dtype),
        0,
        op,
    )
    return plan.restore(promote.cast(flat, x.dtype))


def _put_masked(
    x: Instruction,
    mask: Instruction,
    values: Instruction,
    accumulate: bool,
) -> Instruction:
    """x[mask] = values, where mask covers the first dims of x."""
    rest = x.dims[mask.rank :]
    everywhere = Expr(mask).spread(x.dims)
    if values.rank > len(rest) and values.dims[0] != 1:
        # values[k, rest…]: element i of the mask takes row (number of set elements before i).
        values = gather_dim(values, _position(mask), 0)
    elif values.rank > len(rest):
        values = reshape(values, values.dims[1:])
    new = Expr(broadcast_to(values, x.dims))
    if accumulate:
        new = Expr(x) + new
    return where(everywhere, new, Expr(x)).x


def _position(mask: Instruction) -> Instruction:
    """s64: how many elements of the mask are set before each one, in row-major order."""
    flat = Expr(reshape(mask, (mask.size,))).cast("s64")
    return reshape((prefix(flat, 0, "add") - flat).x, mask.dims)


@lowers(aten.masked_scatter)
def masked_scatter(x: Instruction, mask: Instruction, source: Instruction) -> Instruction:
    dims = expected().dims
    x = broadcast_to(x, dims)
    mask = broadcast_to(mask, dims)
    if isinstance(source.size, int) and source.size == 0:
        return x
    picked = gather_dim(reshape(source, (source.size,)), _position(mask), 0)
    return where(Expr(mask), Expr(picked), Expr(x)).x
