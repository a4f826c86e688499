"""Meanings of the opcodes that move elements: slices, broadcasts, gather, scatter, sort, …"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..ir import Computation, Instruction, Ints, numpy_dtype
from ..ir.build import compared
from .elementwise import reinterpret, total_order
from .interpreter import MEANINGS, Array, EvaluateError, Value, apply, meaning, pointwise, run

MEANINGS["constant"] = lambda x: x["literal"].numpy()
MEANINGS["concatenate"] = lambda x, *values: np.concatenate(values, x["dimensions"][0])
MEANINGS["dynamic-slice"] = lambda x, v, *indices: v[_block(v, indices, x["dynamic_slice_sizes"])]
MEANINGS["get-dimension-size"] = lambda x, v: np.array(v.shape[x["dimensions"][0]], np.int32)
MEANINGS["pad"] = lambda x, v, fill: pad(v, fill, x["padding"])
MEANINGS["reverse"] = lambda x, v: np.flip(v, x["dimensions"]) if x["dimensions"] else v
MEANINGS["slice"] = lambda x, v: v[tuple(slice(*s) for s in x["slice"])]
MEANINGS["transpose"] = lambda x, v: v.transpose(x["dimensions"])
meaning("reshape", "dynamic-reshape")(lambda x, v, *sizes: v.reshape(x.shape.sizes))
meaning("copy", "opt-barrier", "domain", "add-dependency", "all-reduce-done", "async-update")(
    lambda x, v, *after: v
)


@meaning("iota")
def _iota(x: Instruction) -> Value:
    axis = x["iota_dimension"]
    line = np.arange(x.shape.sizes[axis]).astype(numpy_dtype(x.dtype))
    return np.broadcast_to(
        line.reshape([-1 if d == axis else 1 for d in range(x.rank)]),
        x.shape.sizes,
    )


@meaning("broadcast")
def _broadcast(x: Instruction, v: Array) -> Value:
    dimensions = x["dimensions"]
    order = np.argsort(dimensions, kind="stable")
    v = v.transpose(order)  # XLA allows unsorted dimensions
    dims = [1] * x.rank
    for size, d in zip(v.shape, sorted(dimensions), strict=True):
        dims[d] = size
    return np.broadcast_to(v.reshape(dims), x.shape.sizes)


@meaning("bitcast")
def _bitcast(x: Instruction, v: Array) -> Value:
    if x.operand.dtype != x.dtype:
        v = reinterpret(v.ravel(), x.operand.dtype, x.dtype)
    return v.reshape(x.shape.sizes)


def pad(v: Array, fill: Value, padding: Sequence[tuple[Any, Any, int]]) -> Array:
    """`v` with (low, high, interior) padding per dimension; negative low and high crop."""
    # along each dimension: extent with interior padding, low, high, step
    edges = [
        (n + max(n - 1, 0) * inner, low, high, inner + 1)
        for n, (low, high, inner) in zip(v.shape, padding, strict=True)
    ]
    grown = np.full([n + max(low, 0) + max(high, 0) for n, low, high, _ in edges], fill, v.dtype)
    inside = [slice(max(low, 0), max(low, 0) + n, step) for n, low, _, step in edges]
    grown[tuple(inside)] = v
    crop = [slice(max(-low, 0), max(-low, 0) + max(low + high + n, 0)) for n, low, high, _ in edges]
    return grown[tuple(crop)]


def _block(v: Array, indices: tuple[Array, ...], sizes: Ints) -> tuple[slice, ...]:
    """Where a block of these sizes is; one that reaches outside is moved inside."""
    if len(indices) == 1 and np.ndim(indices[0]) == 1:  # the old form: one vector of start indices
        indices = tuple(indices[0])
    starts = [
        min(max(int(i), 0), n - size) for i, n, size in zip(indices, v.shape, sizes, strict=True)
    ]
    return tuple(slice(i, i + n) for i, n in zip(starts, sizes))


@meaning("dynamic-update-slice")
def _dynamic_update_slice(x: Instruction, v: Array, update: Array, *indices: Array) -> Value:
    result = np.array(v)
    result[_block(v, indices, update.shape)] = update
    return result


@meaning("set-dimension-size")
def _set_dimension_size(x: Instruction, v: Array, size: Array) -> Value:
    if int(size) != v.shape[x["dimensions"][0]]:
        raise EvaluateError(
            f"set-dimension-size of dimension {x['dimensions'][0]} of {x.operand.shape} to"
            f" {int(size)}: the evaluator has no bounded sizes; use a symbolic size"
        )
    return v


def _index_columns(indices: Array, vector_dim: int) -> Array:
    """Index vectors along the last dimension, as int64."""
    if indices.dtype == np.uint64:
        indices = np.minimum(indices, np.uint64(np.iinfo(np.int64).max))
    indices = indices.astype(np.int64)
    return (
        indices[..., None] if vector_dim == indices.ndim else np.moveaxis(indices, vector_dim, -1)
    )


def _window_indices(
    dims: Ints,
    batch: Ints,
    starts: list[Array | None],
    window_sizes: list[int],
    window_dims: list[int],
) -> list[Array]:
    """For each operand dimension, indices of sizes `batch + window_sizes`. `window_dims` are the
    operand dims the window spans."""
    rank = len(batch) + len(window_sizes)
    columns = []
    for d in range(len(dims)):
        start = starts[d]
        column: Array = (
            np.zeros((1,) * rank, np.int64)
            if start is None
            else start.reshape((*batch, *[1] * len(window_sizes)))
        )
        if d in window_dims:
            k = window_dims.index(d)
            shape = [1] * rank
            shape[len(batch) + k] = window_sizes[k]
            column = column + np.arange(window_sizes[k]).reshape(shape)
        columns.append(column)
    return columns


def _batch_starts(
    x: Instruction,
    rank: int,
    indices: Array,
    index_map: Ints,
    operand_batching: Ints,
    indices_batching: Ints,
) -> tuple[Ints, list[Array | None]]:
    """The sizes of the indices without the index vector; start index of each operand dimension for
    each index vector, None where the window starts at 0."""
    vector_dim = x["index_vector_dim"]
    columns = _index_columns(indices, vector_dim)
    batch = columns.shape[:-1]
    starts: list[Array | None] = [None] * rank
    for k, d in enumerate(index_map):
        starts[d] = columns[..., k]
    for d, i in zip(operand_batching, indices_batching):
        i -= i > vector_dim
        shape = [1] * len(batch)
        shape[i] = batch[i]
        starts[d] = np.broadcast_to(np.arange(batch[i]).reshape(shape), batch)
    return batch, starts


@meaning("gather")
def _gather(x: Instruction, v: Array, indices: Array) -> Value:
    sizes = x["slice_sizes"]
    offset_dims = x["offset_dims"]
    operand_batching = x.get("operand_batching_dims", ())
    indices_batching = x.get("start_indices_batching_dims", ())
    batch, starts = _batch_starts(
        x, v.ndim, indices, x["start_index_map"], operand_batching, indices_batching
    )
    starts = [
        s if s is None else np.clip(s, 0, max(n - size, 0))
        for s, n, size in zip(starts, v.shape, sizes)
    ]
    dropped = {*x.get("collapsed_slice_dims", ()), *operand_batching}
    window_dims = [d for d in range(v.ndim) if d not in dropped]
    where = _window_indices(v.shape, batch, starts, [sizes[d] for d in window_dims], window_dims)
    rank = len(batch) + len(window_dims)
    result = np.broadcast_to(
        v[tuple(np.broadcast_arrays(*where))] if where else v,
        (*batch, *[sizes[d] for d in window_dims]),
    )
    batch_positions = [d for d in range(rank) if d not in offset_dims]
    return np.moveaxis(result, range(rank), [*batch_positions, *offset_dims])


@meaning("scatter")
def _scatter(x: Instruction, *values: Array) -> Value:
    count = (len(values) - 1) // 2
    operands = values[:count]
    updates = values[count + 1 :]
    dims = values[0].shape
    window_update_dims = x["update_window_dims"]
    operand_batching = x.get("input_batching_dims", ())
    indices_batching = x.get("scatter_indices_batching_dims", ())
    batch, starts = _batch_starts(
        x,
        len(dims),
        values[count],
        x["scatter_dims_to_operand_dims"],
        operand_batching,
        indices_batching,
    )
    dropped = {*x.get("inserted_window_dims", ()), *operand_batching}
    window_dims = [d for d in range(len(dims)) if d not in dropped]
    scatter_dims = [d for d in range(updates[0].ndim) if d not in window_update_dims]
    turned = [u.transpose(*scatter_dims, *window_update_dims) for u in updates]
    sizes = turned[0].shape[len(scatter_dims) :]
    # A window that does not fit is dropped whole.
    fits: Array = np.ones(batch, bool)
    for d, start in enumerate(starts):
        size = sizes[window_dims.index(d)] if d in window_dims else 1
        if start is not None:
            fits &= (start >= 0) & (start <= dims[d] - size)
        elif size > dims[d]:
            fits[...] = False
    where = _window_indices(dims, batch, starts, list(sizes), window_dims)
    fits = np.broadcast_to(fits.reshape((*batch, *[1] * len(sizes))), (*batch, *sizes)).ravel()
    flat: Array = np.zeros((*batch, *sizes), np.int64)
    for n, column in zip(dims, where):
        flat = flat * n + column
    flat = flat.ravel()[fits]
    results: list[Array] = [np.array(o).ravel() for o in operands]
    combine_at(results, flat, [u.ravel()[fits] for u in turned], x["to_apply"])
    results = [r.reshape(dims) for r in results]
    return tuple(results) if x.is_tuple else results[0]


def combine_at(
    targets: list[Array],
    where: Array,
    updates: list[Array],
    computation: Computation,
) -> None:
    """`targets[where[i]] = computation(targets[where[i]], updates[i])` for each i in order; flat
    arrays, in place."""
    root = computation.root
    count = len(targets)
    if count == 1 and root is computation.params[1]:
        targets[0][where] = updates[0]
        return
    # Updates of one target are applied in rounds: round k applies the k-th update of every target.
    order = np.argsort(where, kind="stable")
    ordered = where[order]
    first = np.ones(len(ordered), bool)
    first[1:] = ordered[1:] != ordered[:-1]
    begins = np.flatnonzero(first)
    ranks = np.arange(len(ordered)) - np.repeat(begins, np.diff(np.append(begins, len(ordered))))
    by_round = order[np.argsort(ranks, kind="stable")]
    begin = 0
    for end in np.cumsum(np.bincount(ranks)):
        chosen = by_round[begin:end]
        at = where[chosen]
        new = apply(computation, [*(t[at] for t in targets), *(u[chosen] for u in updates)])
        for target, value in zip(targets, new, strict=True):
            target[at] = value
        begin = end


@meaning("sort")
def _sort(x: Instruction, *values: Array) -> Value:
    axis = x["dimensions"][0]
    moved = [np.moveaxis(v, axis, -1) for v in values]
    dims = moved[0].shape
    rows = [m.reshape(int(np.prod(dims[:-1])), dims[-1]) for m in moved]
    order = sort_order(rows, x["to_apply"])
    sorted_values = [
        np.moveaxis(np.take_along_axis(r, order, -1).reshape(dims), -1, axis) for r in rows
    ]
    return tuple(sorted_values) if x.is_tuple else sorted_values[0]


def sort_order(rows: list[Array], comparator: Computation) -> Array:
    """Indices that sort each row stably by `comparator(a0, b0, a1, b1, …)`, true when a comes
    before b."""
    n = rows[0].shape[-1]
    key = _sort_key(rows, comparator)
    if key is not None:
        return np.argsort(key, -1, kind="stable")
    if not pointwise(comparator):
        return (
            np.stack([_sort_slowly([r[i] for r in rows], comparator) for i in range(len(rows[0]))])
            if len(rows[0])
            else np.zeros((0, n), int)
        )
    return _sort_merging(rows, comparator)


def _sort_key(rows: list[Array], comparator: Computation) -> Array | None:
    """A key whose ascending stable order is the comparator's, when it only compares one operand
    with < or >."""
    found = compared(comparator)
    if found is None:
        return None
    operand, descending = found
    key = rows[operand]
    if key.dtype.kind == "f":
        if comparator.root.get("type") == "TOTALORDER":
            key = total_order(key)
        elif np.isnan(key).any():
            return None
    elif key.dtype.kind not in "iub":
        return None
    return key if not descending else -key if key.dtype.kind == "f" else ~key


def _sort_slowly(row: list[Array], comparator: Computation) -> Array:
    def compare(i: int, j: int) -> int:
        def less(i: int, j: int) -> bool:
            return bool(run(comparator, [np.asarray(v[k]) for v in row for k in (i, j)]))

        return -1 if less(i, j) else int(less(j, i))

    return np.array(sorted(range(len(row[0])), key=functools.cmp_to_key(compare)), np.int64)


def _sort_merging(rows: list[Array], comparator: Computation) -> Array:
    """Bottom-up merge of all rows at once: an element's place is its place in its own run plus its
    rank in the other run."""
    count, n = rows[0].shape
    order = np.broadcast_to(np.arange(n), (count, n)).copy()
    width = 1
    while width < n:
        position = np.arange(n)
        run_start = position // width * width
        in_left = position // width % 2 == 0
        other_start = np.minimum(np.where(in_left, run_start + width, run_start - width), n)
        other_end = np.minimum(other_start + width, n)
        current = [np.take_along_axis(r, order, -1) for r in rows]
        low = np.broadcast_to(other_start, (count, n)).copy()
        high = np.broadcast_to(other_end, (count, n)).copy()
        while (low < high).any():
            middle = np.minimum((low + high) // 2, n - 1)
            other = [np.take_along_axis(c, middle, -1) for c in current]
            # Equal elements of the left run come first.
            other_first = apply(comparator, [v for o, c in zip(other, current) for v in (o, c)])[0]
            self_first = apply(comparator, [v for o, c in zip(other, current) for v in (c, o)])[0]
            before = np.where(in_left, other_first, ~self_first)
            active = low < high
            low = np.where(active & before, middle + 1, low)
            high = np.where(active & ~before, middle, high)
        place = (
            np.where(in_left, run_start, other_start) + (position - run_start) + (low - other_start)
        )
        merged = np.empty_like(order)
        np.put_along_axis(merged, place, order, -1)
        order = merged
        width = width * 2
    return order


@meaning("topk")
def _topk(x: Instruction, v: Array) -> Value:
    k = x["k"] if x.get("k") is not None else x.elements[0].dims[-1]
    key = total_order(v) if v.dtype.kind == "f" else v
    key = ~key if x.get("largest", True) else key
    order = np.argsort(key, -1, kind="stable")[..., :k]
    return np.take_along_axis(v, order, -1), order.astype(np.int32)
