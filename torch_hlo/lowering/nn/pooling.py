"""Pooling: average, maximum (with indices), adaptive; forward and backward, in one, two and three
dimensions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    Instruction,
    Instructions,
    Shape,
    Size,
    WindowDim,
    build,
    ceildiv,
    instr,
    row_major_strides,
)

from ..core import (
    Expr,
    add_dim,
    aten,
    compute,
    expected,
    finish,
    gather_dim,
    iota,
    is_nan,
    lowers,
    lowest,
    maximum,
    minimum,
    move_dim,
    pad,
    permute,
    promote,
    reshape,
    scatter_dim,
    take_along,
    where,
)
from ..linalg.matmul import dot
from ..reduction.reduce import arg_extreme, average

Given = Sequence[int] | int  # a number stands for as many as there are dimensions


@frozen
class _Windows:
    """Of each pooled dimension."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]

    @classmethod
    def of(
        cls, n: int, kernel: Given, stride: Given, padding: Given, dilation: Given = 1
    ) -> _Windows:
        def sizes(values: Given) -> list[int]:
            given = list(values) if isinstance(values, (list, tuple)) else [values]
            return given * n if len(given) == 1 else given

        return cls(sizes(kernel), sizes(stride or kernel), sizes(padding), sizes(dilation))

    def each(self) -> Iterator[tuple[int, int, int, int]]:
        """(kernel, stride, padding, dilation) of a dimension."""
        return zip(self.kernel, self.stride, self.padding, self.dilation, strict=True)

    def needs(self, outs: Sequence[Size]) -> list[Size]:
        """Elements that so many windows span."""
        return [
            (o - 1) * st + (k - 1) * d + 1
            for o, (k, st, _, d) in zip(outs, self.each(), strict=True)
        ]

    def over(self, sizes: Sequence[Size], outs: Sequence[Size]) -> list[WindowDim]:
        """The windows of `outs` results over `sizes` elements."""
        return [
            WindowDim(k, st, p, need - s - p, 1, d)
            for s, need, (k, st, p, d) in zip(sizes, self.needs(outs), self.each(), strict=True)
        ]


def _leading(rank: int, n: int) -> list[WindowDim]:
    return [WindowDim(1)] * (rank - n)


def _pooled(x: Instruction, kernel: Sequence[int]) -> int:
    """How many dimensions."""
    return len(kernel) if len(kernel) > 1 else 3 if x.rank == 5 else 2


# Average
def _divisor(
    dims: Sequence[Size],
    sizes: Sequence[Size],
    w: _Windows,
    include_pad: bool,
    override: int | None,
    dtype: str,
) -> Expr | None:
    """How many elements each window of an output of `dims` averages; None when it is the kernel
    size everywhere."""
    n = len(w.kernel)
    if override is not None:
        return Expr(promote.full(override, dtype, dims))
    uniform = all(
        isinstance(o, int)
        and isinstance(s, int)
        and (o - 1) * st + k <= s + 2 * p
        and (include_pad or p == 0)
        for o, s, (k, st, p, _) in zip(dims[-n:], sizes, w.each(), strict=True)
    )
    if uniform:
        return None
    total = Expr(promote.full(1, "s64", dims))
    for d, s, (k, st, p, _) in zip(range(len(dims) - n, len(dims)), sizes, w.each(), strict=True):
        start = iota(dims, d) * st - p
        size = start.like(s)
        stop = minimum(start + k, size + p)
        if not include_pad:
            start = maximum(start, 0)
            stop = minimum(stop, size)
        total *= stop - start
    return total.cast(dtype)


def _averaged(x: Expr, divisor: Expr | None, kernel: Sequence[int]) -> Expr:
    return x / math.prod(kernel) if divisor is None else x / divisor


@lowers(aten.avg_pool2d, aten.avg_pool3d)
def avg_pool(
    x: Instruction,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Instruction:
    n = _pooled(x, kernel)
    w = _Windows.of(n, kernel, stride, padding)
    shape = expected()
    value = compute(x)
    sizes = x.dims[-n:]
    window = _leading(x.rank, n) + w.over(sizes, shape.dims[-n:])
    total = Expr(_window_reduce(value.x, window, "add"))
    divisor = _divisor(shape.dims, sizes, w, count_include_pad, divisor_override, value.dtype)
    return finish(_averaged(total, divisor, w.kernel))


def _window_reduce(x: Instruction, window: list[WindowDim], op: str) -> Instruction:
    """reduce-window; padding that would be negative (rows that no window reaches) is cut off
    first."""
    cuts = []
    fixed = []
    for w in window:
        cut = min(w.pad_high, 0) if isinstance(w.pad_high, int) and w.base_dilation == 1 else 0
        cuts.append((0, cut))
        fixed.append(replace(w, pad_high=w.pad_high - cut))
    init = 0 if op == "add" else lowest(x.dtype)
    return build.reduce_window(pad(x, cuts), promote.constant(init, x.dtype), tuple(fixed), op)


@lowers(aten.avg_pool2d_backward, aten.avg_pool3d_backward)
def avg_pool_backward(
    grad: Instruction,
    x: Instruction,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Instruction:
    n = _pooled(x, kernel)
    shape = expected()
    w = _Windows.of(n, kernel, stride, padding)
    g = compute(grad)
    sizes = x.dims[-n:]
    divisor = _divisor(g.dims, sizes, w, count_include_pad, divisor_override, g.dtype)
    g = _averaged(g, divisor, w.kernel)
    if (
        w.kernel == w.stride
        and not any(w.padding)
        and all(isinstance(v, int) for v in (*sizes, *g.dims[-n:]))
    ):
        return promote.cast(_repeated(g.x, w.kernel, sizes), shape.dtype)
    window = _leading(x.rank, n)
    for s, o, (k, st, p, _) in zip(sizes, g.dims[-n:], w.each(), strict=True):
        # Each input element gets the gradients of the windows over it: a sum over the spread-out
        # output.
        window.append(WindowDim(k, 1, k - 1 - p, s + p - (o - 1) * st - 1, st))
    return promote.cast(_window_reduce(g.x, window, "add"), shape.dtype)


def _repeated(x: Instruction, times: Sequence[Size], sizes: Sequence[Size]) -> Instruction:
    """Every element of the last dimensions of `x` so many times, with zeros up to `sizes` or cut
    there."""
    lead = x.dims[: -len(times)]
    n = len(times)
    spread = [v for d, t in zip(x.dims[-n:], times, strict=True) for v in (d, t)]
    kept = [*range(len(lead)), *range(len(lead), len(lead) + 2 * n, 2)]
    found = reshape(
        build.broadcast(x, (*lead, *spread), kept),
        (*lead, *(d * t for d, t in zip(x.dims[-n:], times, strict=True))),
    )
    edges = [(0, s - d) for s, d in zip(sizes, found.dims[-n:], strict=True)]
    return pad(found, [(0, 0)] * len(lead) + edges)


# Maximum with indices into the flattened spatial dims
@lowers(aten.max_pool2d_with_indices, aten.max_pool3d_with_indices)
def max_pool_with_indices(
    x: Instruction,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = 0,
    dilation: Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Instructions:
    n = _pooled(x, kernel)
    w = _Windows.of(n, kernel, stride, padding, dilation)
    shape = expected()
    sizes = x.dims[-n:]
    outs = shape.dims[-n:]
    lead = x.rank - n
    needs = w.needs(outs)
    low = lowest(x.dtype)
    padded = pad(
        x,
        [(0, 0)] * lead
        + [(p, need - s - p) for p, need, s in zip(w.padding, needs, sizes, strict=True)],
        low,
    )
    steps = row_major_strides(tuple(sizes))
    starts = [iota(shape.dims, lead + i) * st - p for i, (_, st, p, _) in enumerate(w.each())]
    best = Expr(promote.full(low, x.dtype, shape.dims))
    index = _flat([_first_inside(s, d) for s, d in zip(starts, w.dilation, strict=True)], steps)
    # One comparison per window position: strided slices, which fuse into one loop over the output.
    for offsets in itertools.product(*(range(k) for k in w.kernel)):
        shift = [o * d for o, d in zip(offsets, w.dilation, strict=True)]
        ranges = [(0, d, 1) for d in x.dims[:lead]]
        ranges += [
            (sh, sh + (o - 1) * st + 1, st) for sh, o, st in zip(shift, outs, w.stride, strict=True)
        ]
        value = Expr(instr("slice", (padded,), slice=tuple(ranges)))
        better = value > best
        if promote.is_floating(value.dtype):
            better |= is_nan(value)
        best = where(better, value, best)
        index = where(
            better,
            _flat([s + sh for s, sh in zip(starts, shift, strict=True)], steps),
            index,
        )
    # The values alone need neither the padded copy nor the comparisons: they are a window's
    # maximum, and the indices go when nobody reads them.
    window = _leading(x.rank, n) + w.over(sizes, outs)
    return _window_reduce(x, window, "maximum"), index.x


def _first_inside(start: Expr, dilation: int) -> Expr:
    """The first position of a window that is not padding."""
    return where(
        start < 0,
        start - (start - (dilation - 1)) / dilation * dilation if dilation > 1 else start.like(0),
        start,
    )


def _flat(positions: list[Expr], steps: Sequence[Size]) -> Expr:
    total = positions[0] * steps[0]
    for p, s in zip(positions[1:], steps[1:], strict=True):
        total += p * s
    return total


def _keeps(a: Instruction, b: Instruction) -> Instruction:
    """Whether the maximum so far stays when `b` comes: the first of equal ones does, and the last
    NaN."""
    stays = build.not_(build.compare(b, a, "GT"))
    return build.and_(stays, build.compare(b, b, "EQ")) if a.kind == "f" else stays


@lowers(aten.max_pool2d_with_indices_backward, aten.max_pool3d_with_indices_backward)
def max_pool_backward(
    grad: Instruction,
    x: Instruction,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Instruction,
) -> Instruction:
    """Each window's gradient goes to its maximum. `indices` say no more than `x`: autograd hands in
    those of the forward."""
    n = _pooled(x, kernel)
    shape = expected()
    w = _Windows.of(n, kernel, stride, padding, dilation)
    # Where windows overlap gradients are added up in the wide type.
    dtype = (
        promote.compute_type(shape.dtype)
        if any(k > s for k, s in zip(w.kernel, w.stride, strict=True))
        else shape.dtype
    )
    window = _leading(shape.rank, n) + w.over(shape.dims[-n:], grad.dims[-n:])
    select = build.computation(_keeps, (Shape(dtype), Shape(dtype)), f"keeps_{dtype}")
    values = (promote.cast(v, dtype) for v in (x, grad))
    zero = promote.constant(0, dtype)
    return promote.cast(
        build.select_and_scatter(*values, zero, tuple(window), select, "add"),
        shape.dtype,
    )


def _add_at_indices(n: int, grad: Instruction, x: Instruction, *args: Any) -> Instruction:
    """Add each gradient at the position recorded in the last argument."""
    return _unpool_add(grad, args[-1], expected(), n)


for _n in (2, 3):
    lowers(
        getattr(aten, f"adaptive_max_pool{_n}d_backward"),
        getattr(aten, f"fractional_max_pool{_n}d_backward"),
    )(partial(_add_at_indices, _n))


def _unpool_add(grad: Instruction, indices: Instruction, shape: Shape, n: int) -> Instruction:
    lead = shape.dims[: shape.rank - n]
    inner, outer = (math.prod(d[len(d) - n :]) for d in (shape.dims, grad.dims))
    rows = math.prod(lead)
    dtype = promote.compute_type(shape.dtype)
    flat_index = Expr(reshape(indices, (rows, outer)))
    position = flat_index + iota((rows, outer), 0) * inner
    zero = promote.full(0, dtype, (rows * inner,))
    flat = scatter_dim(zero, position.x, promote.cast(reshape(grad, (rows, outer)), dtype), 0)
    return promote.cast(reshape(flat, shape.dims), shape.dtype)


# Adaptive: window o covers [floor(o * in / out), ceil((o + 1) * in / out)).
def _adaptive_bounds(size: Size, out: Size) -> tuple[Expr, Expr]:
    """(start, stop) of each window, s64[out]."""
    o = iota((out,), 0)
    n = o.like(size)
    m = o.like(out)
    return o * n / m, ((o + 1) * n + m - 1) / m


def _adaptive_weights(size: Size, out: Size, dtype: str) -> Expr:
    """[out, size] matrix of averaging weights."""
    start, stop = _adaptive_bounds(size, out)
    dims = (out, size)
    start, stop = (v.reshape((out, 1)).broadcast(dims) for v in (start, stop))
    i = iota(dims, 1)
    return where((i >= start) & (i < stop), 1 / (stop - start).cast(dtype), 0)


@lowers(aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d, aten.adaptive_avg_pool1d)
def adaptive_avg_pool(x: Instruction, output_size: Sequence[Size]) -> Instruction:
    return _apply_weights(x, len(output_size), expected().dims, False)


@lowers(aten._adaptive_avg_pool2d_backward, aten._adaptive_avg_pool3d_backward)
def adaptive_avg_pool_backward(grad: Instruction, x: Instruction) -> Instruction:
    n = 3 if x.rank == 5 else 2
    if x.rank == 4 and grad.dims[1] != x.dims[1]:
        n = 3
    return _apply_weights(grad, n, expected().dims, True)


def _apply_weights(x: Instruction, n: int, dims: Sequence[Size], backward: bool) -> Instruction:
    """Equal windows are average pooling; else each spatial dim is contracted with its averaging
    matrix (or its transpose)."""
    value = compute(x)
    whole, parts = (dims, value.dims) if backward else (value.dims, dims)
    pairs = [*zip(whole[-n:], parts[-n:], strict=True)]
    if (
        all(isinstance(v, int) and v for pair in pairs for v in pair)
        and all(a % b == 0 for a, b in pairs)
        and any(b > 1 for _, b in pairs)
    ):
        times = [a // b for a, b in pairs]
        window = (*_leading(len(dims), n), *(WindowDim(t, t) for t in times))
        found = (
            _repeated(value.x, times, dims[-n:])
            if backward
            else _window_reduce(value.x, [*window], "add")
        )
        return finish(Expr(found) / math.prod(times))
    for d in range(len(dims) - n, len(dims)):
        have = value.dims[d]
        want = dims[d]
        if have == want:
            continue
        small, large = (have, want) if backward else (want, have)
        if isinstance(small, int) and small == 1:
            if backward:
                value = value.broadcast((*value.dims[:d], want, *value.dims[d + 1 :])) / Expr(
                    promote.count_elements((want,), value.dtype)
                )
            else:
                mean = average(value, (d,))
                value = mean.reshape((*value.dims[:d], 1, *value.dims[d + 1 :]))
            continue
        weights = _adaptive_weights(large, small, value.dtype)
        value = Expr(move_dim(dot(value.x, weights.x, (d,), (0 if backward else 1,)).x, -1, d))
    return finish(value)


@lowers(aten.adaptive_max_pool2d, aten.adaptive_max_pool3d)
def adaptive_max_pool(
    x: Instruction,
    output_size: Sequence[int],
) -> tuple[Instruction, Instruction]:
    """Gather each window (padded to the longest by repeating its first element), unless all are
    equal, and take the first maximum."""
    n = len(output_size)
    shape = expected()
    lead = x.rank - n
    value = x
    for i in range(n):
        d = lead + 2 * i
        size = x.dims[lead + i]
        out = shape.dims[lead + i]
        if isinstance(size, int) and isinstance(out, int) and out and size % out == 0:
            value = reshape(
                value,
                (
                    *value.dims[:d],
                    out,
                    size // out,
                    *value.dims[d + 1 :],
                ),
            )
        else:
            value = gather_dim(value, _adaptive_windows(size, out).x, d)
    places = [
        _spread_index(x.dims[lead + i], shape.dims[lead + i], value.dims, lead + 2 * i)
        for i in range(n)
    ]
    flat = _flat(places, row_major_strides(tuple(x.dims[lead:])))
    order = [
        *range(lead),
        *(lead + 2 * i for i in range(n)),
        *(lead + 2 * i + 1 for i in range(n)),
    ]
    window = math.prod(value.dims[lead + 2 * i + 1] for i in range(n))
    value = reshape(permute(value, order), (*shape.dims, window))
    flat = reshape(permute(flat.x, order), (*shape.dims, window))
    best, where_ = arg_extreme(Expr(value), shape.rank, True)
    index = take_along(flat, add_dim(where_.x, shape.rank), shape.rank)
    return best.x, reshape(index, shape.dims)


def _adaptive_windows(size: Size, out: Size) -> Expr:
    """s64[out, longest window]: positions, the first one repeated beyond the end."""
    longest = ceildiv(size, out) + (
        0 if isinstance(size, int) and isinstance(out, int) and size % out == 0 else 1
    )
    if isinstance(size, int):
        longest = min(longest, size)
    dims = (out, longest)
    start, stop = (v.reshape((out, 1)).broadcast(dims) for v in _adaptive_bounds(size, out))
    position = start + iota(dims, 1)
    return where(position < stop, position, start)


def _spread_index(size: Size, out: Size, dims: Sequence[Size], at: int) -> Expr:
    index = _adaptive_windows(size, out)
    place = [1] * len(dims)
    place[at], place[at + 1] = index.dims
    return index.reshape(place).broadcast(dims)
