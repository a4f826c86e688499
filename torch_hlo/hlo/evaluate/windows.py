"""Meanings of reduce, reduce-window, select-and-scatter, convolution and batch normalisation."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..ir import Computation, Instruction, Ints, Window, WindowDim, numpy_dtype
from .indexing import combine_at, pad
from .interpreter import Array, Value, apply, meaning, pointwise, run, simple_fold, wide


def _result(x: Instruction, values: list[Array]) -> Array | tuple[Array, ...]:
    return tuple(values) if x.is_tuple else values[0]


@meaning("reduce")
def _reduce(x: Instruction, *values: Array) -> Value:
    count = len(values) // 2
    arrays = values[:count]
    inits = values[count:]
    dimensions = x["dimensions"]
    kept = [d for d in range(arrays[0].ndim) if d not in dimensions]
    ufunc = simple_fold(x["to_apply"]) if count == 1 else None
    if ufunc is not None:
        terms, start = (wide(v, x.operand.shape) for v in (arrays[0], np.asarray(inits[0])))
        return ufunc.reduce(terms, tuple(dimensions), dtype=terms.dtype, initial=start[()])
    dims = [arrays[0].shape[d] for d in kept]
    depth = math.prod(arrays[0].shape[d] for d in dimensions)
    lines = [a.transpose(*dimensions, *kept).reshape(depth, *dims) for a in arrays]
    return _result(x, fold_lines(lines, inits, x["to_apply"]))


def fold_lines(
    lines: list[Array], inits: tuple[Array, ...], computation: Computation
) -> list[Array]:
    """Fold the first dimension with a (variadic) computation, in order, pairing neighbours."""
    dims = lines[0].shape[1:]
    if not pointwise(computation):
        results = [np.empty(dims, v.dtype) for v in lines]
        for i in np.ndindex(dims):
            state: tuple[Any, ...] = tuple(np.asarray(v) for v in inits)
            for k in range(len(lines[0])):
                value = run(computation, [*state, *(np.asarray(v[(k, *i)]) for v in lines)])
                state = value if isinstance(value, tuple) else (value,)
            for r, s in zip(results, state, strict=True):
                r[i] = s
        return results
    while len(lines[0]) > 1:
        even = len(lines[0]) // 2 * 2
        paired = apply(computation, [*(v[0:even:2] for v in lines), *(v[1:even:2] for v in lines)])
        lines = [np.concatenate([p, v[even:]]) for p, v in zip(paired, lines, strict=True)]
    first = [np.broadcast_to(i, dims) for i in inits]
    return list(apply(computation, [*first, *(v[0] for v in lines)])) if len(lines[0]) else first


def _dilated(v: Array, fill: Value, window: Window) -> Array:
    return pad(v, fill, [(w.pad_low, w.pad_high, w.base_dilation - 1) for w in window])


def _taps(v: Array, window: Window, counts: Ints) -> list[Array]:
    """For each position in the window, in row-major order, the elements of `v` that every output
    sees there."""
    every = itertools.product(*map(_positions, window))
    return [v[_tap(offset, window, counts)] for offset in every]


def _positions(w: WindowDim) -> range:
    assert isinstance(w.size, int)
    return range(w.size)


def _tap(offset: Sequence[int], window: Window, counts: Sequence[int]) -> tuple[Any, ...]:
    """Slices of the elements that `counts` positions of the window see at `offset` in it."""
    return tuple(
        slice(
            o * w.window_dilation,
            o * w.window_dilation + (n - 1) * w.stride + 1 if n else 0,
            w.stride,
        )
        for o, w, n in zip(offset, window, counts, strict=True)
    )


@meaning("reduce-window")
def _reduce_window(x: Instruction, *values: Array) -> Value:
    count = len(values) // 2
    window = x.get("window", ())
    computation = x["to_apply"]
    counts = x.shape.arrays[0].sizes
    ufunc = simple_fold(computation) if count == 1 else None
    if ufunc is not None:
        terms, start = (wide(np.asarray(v), x.operand.shape) for v in values)
        base = _dilated(terms, start, window)
        result = np.full(counts, start, base.dtype)
        for tap in _taps(base, window, counts):
            result = ufunc(result, tap)
        return result
    bases = [_dilated(v, i, window) for v, i in zip(values[:count], values[count:], strict=True)]
    state: Sequence[Array] = [np.broadcast_to(i, counts) for i in values[count:]]
    for taps in zip(*(_taps(b, window, counts) for b in bases)):
        state = apply(computation, [*state, *taps])
    return _result(x, list(state))


@meaning("select-and-scatter")
def _select_and_scatter(x: Instruction, v: Array, source: Array, init: Array) -> Value:
    window = x.get("window", ())
    counts = source.shape
    positions = np.arange(v.size).reshape(v.shape)
    inside = _dilated(positions, -1, window)
    best_at = np.full(counts, -1)
    best = np.zeros(counts, v.dtype)
    flat = v.ravel()
    for at in _taps(inside, window, counts):
        candidate = flat[np.maximum(at, 0)] if flat.size else np.zeros(counts, v.dtype)
        keeps = apply(x["select"], [best, candidate])[0]
        takes = (at >= 0) & ((best_at < 0) | ~keeps)
        best_at = np.where(takes, at, best_at)
        best = np.where(takes, candidate, best)
    chosen = best_at.ravel() >= 0
    target = [np.full(v.size, init, v.dtype)]
    combine_at(target, best_at.ravel()[chosen], [source.ravel()[chosen]], x["scatter"])
    return target[0].reshape(v.shape)


def conv_axes(dim_labels: str) -> tuple[list[int], list[int], list[int]]:
    """Axes of `b01f_01io->b01f` as ([batch, feature, spatial…], [output feature, input feature,
    spatial…], [batch, feature, spatial…])."""
    inputs, rest = dim_labels.split("_")
    kernel, output = rest.split("->")
    spatial = [str(d) for d in range(len(inputs) - 2)]
    return (
        [inputs.index(c) for c in ("b", "f", *spatial)],
        [kernel.index(c) for c in ("o", "i", *spatial)],
        [output.index(c) for c in ("b", "f", *spatial)],
    )


@meaning("convolution")
def _convolution(x: Instruction, lhs: Array, rhs: Array) -> Value:
    window = x["window"]
    lhs_axes, rhs_axes, out_axes = conv_axes(x["dim_labels"])
    groups = x["feature_group_count"]
    batch_groups = x["batch_group_count"]
    data = wide(lhs, x.operand.shape).transpose(lhs_axes)
    kernel = wide(rhs, x.operands[1].shape).transpose(rhs_axes)
    if x.kind in "su":
        data, kernel = (v.astype(numpy_dtype(x.dtype)) for v in (data, kernel))
    flipped = tuple(2 + i for i, w in enumerate(window) if w.reversal)
    kernel = np.flip(kernel, flipped) if flipped else kernel
    edges = [(w.pad_low, w.pad_high, w.base_dilation - 1) for w in window]
    data = pad(data, 0, [(0, 0, 0), (0, 0, 0), *edges])
    n, features, *spatial = (x.shape.sizes[d] for d in out_axes)
    # One axis g for both kinds of groups: a batch group takes a slice of the batch, a feature group
    # a slice of the features.
    every = groups * batch_groups
    kernel = kernel.reshape(every, features // every, *kernel.shape[1:])
    if batch_groups > 1:
        data = data.reshape(batch_groups, n, *data.shape[1:])
    else:
        per_group = -1 if data.size else data.shape[1] // groups
        data = np.moveaxis(data.reshape(n, groups, per_group, *data.shape[2:]), 1, 0)
    result = np.zeros((len(kernel), kernel.shape[1], n, *spatial), data.dtype)
    for offset in itertools.product(*map(_positions, window)):
        tap = data[(..., *_tap(offset, window, spatial))]
        columns = np.moveaxis(tap, 2, 1).reshape(
            len(kernel), kernel.shape[2], n * math.prod(spatial)
        )
        at: tuple[Any, ...] = (..., *offset)
        result += np.matmul(kernel[at], columns).reshape(result.shape)
    whole = np.moveaxis(result.reshape(features, n, *spatial), 0, 1)
    return np.moveaxis(whole, range(whole.ndim), out_axes)


def _along(v: Array, axis: int, rank: int) -> Array:
    return v.reshape([-1 if d == axis else 1 for d in range(rank)])


def _statistics(v: Array, axis: int) -> tuple[Array, Array]:
    """Mean and variance of all elements with the same index along `axis`."""
    others = tuple(d for d in range(v.ndim) if d != axis)
    count = np.prod([v.shape[d] for d in others], dtype=np.int64)
    mean = v.sum(others) / count
    return mean, ((v - _along(mean, axis, v.ndim)) ** 2).sum(others) / count


@meaning("batch-norm-training")
def _batch_norm_training(x: Instruction, v: Array, scale: Array, offset: Array) -> Value:
    axis = x["feature_index"]
    shape = x.operand.shape
    v, scale, offset = (wide(a, shape) for a in (v, scale, offset))
    mean, variance = _statistics(v, axis)
    return (
        _normalised(v, scale, offset, mean, variance, x["epsilon"], axis),
        mean,
        variance,
    )


@meaning("batch-norm-inference")
def _batch_norm_inference(x: Instruction, *operands: Array) -> Value:
    v, scale, offset, mean, variance = (wide(a, x.shape) for a in operands)
    return _normalised(v, scale, offset, mean, variance, x["epsilon"], x["feature_index"])


def _normalised(
    v: Array,
    scale: Array,
    offset: Array,
    mean: Array,
    variance: Array,
    epsilon: float,
    axis: int,
) -> Value:
    factor = scale / np.sqrt(variance + epsilon)
    mean, factor, offset = (_along(a, axis, v.ndim) for a in (mean, factor, offset))
    return (v - mean) * factor + offset


@meaning("batch-norm-grad")
def _batch_norm_grad(x: Instruction, *operands: Array) -> Value:
    v, scale, mean, variance, grad = (wide(a, x.operand.shape) for a in operands)
    axis = x["feature_index"]
    rank = v.ndim
    others = tuple(d for d in range(rank) if d != axis)
    count = np.prod([v.shape[d] for d in others], dtype=np.int64)
    inverse = 1 / np.sqrt(variance + x["epsilon"])
    centred = (v - _along(mean, axis, rank)) * _along(inverse, axis, rank)
    grad_offset = grad.sum(others)
    grad_scale = (grad * centred).sum(others)
    mean_offset = _along(grad_offset / count, axis, rank)
    mean_scale = _along(grad_scale / count, axis, rank)
    inner = grad - mean_offset - centred * mean_scale
    return inner * _along(scale * inverse, axis, rank), grad_scale, grad_offset
