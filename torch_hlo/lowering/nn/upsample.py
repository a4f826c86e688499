"""Resampling of images: nearest, linear, cubic, with and without antialiasing. Both directions
gather.

A dimension is resampled on its own: `taps` gives, for each output position, a few source positions
and weights. Where sizes are known the taps are tables of constants, and turned around they say for
each source position which outputs it went to: the gradient is then resampled as images are. With
symbolic sizes the gradient is scattered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from torch_hlo.frozen import frozen
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir import Computation, Instruction, Size, build, instr

from ..core import (
    Expr,
    LoweringError,
    Weak,
    absolute,
    aten,
    compute,
    expected,
    finish,
    floor,
    gather_dim,
    iota,
    lowers,
    maximum,
    minimum,
    promote,
    round_even,
    scalar,
    scatter_dim,
    where,
)

# outputs that one source position went to, for which reading them beats adding at computed places
MOST_TAPS = 64
Tap = tuple[Expr, Expr | None]  # (s64[out] source position, weight[out]; None is 1)


@frozen
class Axis:
    """How one dimension is resampled: its size, the result's, whether corners are aligned, the
    scale factor if one was given, and the type of positions."""

    size: Size
    out: Size
    align: bool
    scale: float | None
    dtype: str

    @property
    def index(self) -> Expr:
        return iota((self.out,), 0, self.dtype)

    @property
    def step(self) -> Expr:
        """Source distance between neighbouring outputs: 1 / scale factor if one was given, else the
        ratio of sizes."""
        if isinstance(self.scale, Weak) or (self.scale is not None and self.scale > 0):
            return (1 / scalar(self.scale, "f64")).cast(self.dtype)
        return scalar(self.size, self.dtype) / scalar(self.out, self.dtype)

    @property
    def source(self) -> Expr:
        """The source position of each output."""
        if not self.align:
            return (self.index + 0.5) * self.step - 0.5
        if isinstance(self.out, int) and self.out == 1:
            return self.index * 0
        return self.index * (scalar(self.size - 1, self.dtype) / scalar(self.out - 1, self.dtype))

    def clip(self, position: Expr) -> Expr:
        return minimum(maximum(position, 0), self.size - 1)


def nearest(a: Axis) -> list[Tap]:
    return [(a.clip(floor(a.index * a.step).cast("s64")), None)]


def nearest_exact(a: Axis) -> list[Tap]:
    return [(a.clip(floor((a.index + 0.5) * a.step).cast("s64")), None)]


def linear(a: Axis) -> list[Tap]:
    source = maximum(a.source, 0)
    low = minimum(floor(source).cast("s64"), a.size - 1)
    weight = minimum(maximum(source - low.cast(a.dtype), 0), 1)
    return [(low, 1 - weight), (minimum(low + 1, a.size - 1), weight)]


def _cubic_near(t: Expr, a: float) -> Expr:
    return ((a + 2) * t - (a + 3)) * t * t + 1


def _cubic_far(t: Expr, a: float) -> Expr:
    return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a


def cubic(a: Axis) -> list[Tap]:
    source = a.source
    base = floor(source)
    t = source - base
    first = base.cast("s64")
    slope = -0.75
    weights = [
        _cubic_far(t + 1, slope),
        _cubic_near(t, slope),
        _cubic_near(1 - t, slope),
        _cubic_far(2 - t, slope),
    ]
    return [(a.clip(first + (k - 1)), w) for k, w in enumerate(weights)]


def _triangle(x: Expr) -> Expr:
    return maximum(1 - absolute(x), 0)


def _cubic_filter(x: Expr) -> Expr:
    x = absolute(x)
    a = -0.5
    return where(x < 1, _cubic_near(x, a), where(x < 2, _cubic_far(x, a), 0))


def antialiased(kernel: Callable, reach: float) -> Callable:
    """Taps of a filter of half-width `reach` stretched by the downsampling factor, with normalised
    weights."""

    def taps(a: Axis) -> list[Tap]:
        size = a.size
        out = a.out
        scale = a.scale
        if not isinstance(size, int) or not isinstance(out, int) or isinstance(scale, Weak):
            raise LoweringError("antialiased resampling needs known sizes and scales")
        ratio = (
            (size - 1) / (out - 1)
            if a.align and out > 1
            else 0.0
            if a.align
            else 1 / scale
            if scale
            else size / out
        )
        stretch = max(ratio, 1.0)
        center = (a.index + 0.5) * ratio  # with align_corners, too
        support = reach * stretch
        low = maximum(floor(center - support + 0.5).cast("s64"), 0)
        high = minimum(floor(center + support + 0.5).cast("s64"), size)
        result = []
        for k in range(int(2 * support) + 2):
            position = low + k
            weight = kernel((position.cast(a.dtype) - center + 0.5) * (1 / stretch))
            result.append((a.clip(position), where(position < high, weight, 0)))
        total = result[0][1]
        for _, w in result[1:]:
            total += w
        return [(p, w / total) for p, w in result]

    return taps


def resample(x: Expr, dim: int, taps: list[Tap]) -> Expr:
    """Weighted sum of the taps of `x` along `dim`."""
    total = None
    for position, weight in taps:
        value = Expr(gather_dim(x.x, position.x, dim))
        value = value if weight is None else value * _along(weight, value.dims, dim)
        total = value if total is None else total + value
    return total


def tables(taps: list[Tap], out: Size) -> list[tuple[np.ndarray, np.ndarray | None]] | None:
    """The taps as arrays [out]; None when they depend on more than constants."""
    parts = [v.x for tap in taps for v in tap if v is not None]
    if not isinstance(out, int) or any(_reads(x) for x in parts):
        return None
    found = iter(evaluate(Computation("taps", (), instr("tuple", parts)), []))
    return [(next(found), None if weight is None else next(found)) for _, weight in taps]


def _reads(x: Instruction) -> bool:
    """Whether a value depends on a parameter."""
    return x.op == "parameter" or not x.is_static or any(_reads(o) for o in x.operands)


def constant_taps(found: list[tuple[np.ndarray, np.ndarray | None]], dtype: str) -> list[Tap]:
    return [
        (
            Expr(build.constant(p, "s32")),
            None if w is None else Expr(build.constant(w, dtype)),
        )
        for p, w in found
    ]


def turned(
    found: list[tuple[np.ndarray, np.ndarray | None]],
    size: Size,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Taps [size] that read for each source position the outputs it is part of; missing ones repeat
    the last with weight 0."""
    uses: list[dict[int, float]] = [{} for _ in range(size)]
    for positions, weights in found:
        for o, at in enumerate(positions.tolist()):
            uses[at][o] = uses[at].get(o, 0.0) + (1.0 if weights is None else float(weights[o]))
    rows = [[(o, w) for o, w in sorted(u.items()) if w != 0] for u in uses]
    most = max(map(len, rows))
    last = 0
    for row in rows:
        last = row[-1][0] if row else last
        row += [(last, 0.0)] * (most - len(row))
    return [
        (
            np.array([row[t][0] for row in rows]),
            np.array([row[t][1] for row in rows]),
        )
        for t in range(most)
    ]


def resample_adjoint(grad: Expr, dim: int, size: Size, taps: list[Tap]) -> Expr:
    """The gradient of `resample`: each source position gets the gradients of the outputs it is part
    of, times its weights in them."""
    known = tables(taps, grad.dims[dim]) if isinstance(size, int) and size else None
    back = turned(known, size) if known else []
    if 0 < len(back) <= MOST_TAPS:
        return resample(grad, dim, constant_taps(back, grad.dtype))
    dims = (*grad.dims[:dim], size, *grad.dims[dim + 1 :])
    total = promote.full(0, grad.dtype, dims)
    for position, weight in taps:
        value = grad if weight is None else grad * _along(weight, grad.dims, dim)
        total = scatter_dim(total, position.x, value.x, dim)
    return Expr(total)


def _along(vector: Expr, dims: Sequence[Size], dim: int) -> Expr:
    return vector.reshape((*vector.dims, *(1,) * (len(dims) - dim - 1))).broadcast(dims)


def _in_memory(x: Expr) -> Expr:
    """A resampled array on which the next dimension works: computed where it is read, each tap
    would cost all taps of the dimension before."""
    return Expr(build.opt_barrier(x.x))


def _options(taps: Callable, rest: tuple, rank: int) -> tuple[bool, list]:
    """align_corners, and the dimensions with their scales; what copies has no align_corners."""
    align, scales = (False, rest) if taps in _COPIES else (rest[0], rest[1:])
    return align, list(zip_longest(range(2, rank), scales))


def _forward(
    taps: Callable, x: Instruction, output_size: Sequence[Size], *rest: Any
) -> Instruction:
    shape = expected()
    align, scales = _options(taps, rest, x.rank)
    copies = taps in _COPIES
    dtype = promote.compute_type(x.dtype) if promote.is_floating(x.dtype) else "f32"
    value = Expr(x) if copies else Expr(x).cast(dtype)
    # the innermost first, while arrays are small: it is the dearest
    for d, scale in reversed(scales):
        if not copies and d < x.rank - 1:
            value = _in_memory(value)
        axis = Axis(value.dims[d], shape.dims[d], align, scale, dtype)
        value = resample(value, d, taps(axis))
    if promote.is_integral(shape.dtype) and promote.is_floating(value.dtype):
        value = minimum(maximum(round_even(value), 0), 255)
    return finish(value)


def _backward(
    taps: Callable,
    grad: Instruction,
    output_size: Sequence[Size],
    input_size: Sequence[Size],
    *rest: Any,
) -> Instruction:
    shape = expected()
    align, scales = _options(taps, rest, shape.rank)
    g = compute(grad)
    for d, scale in scales:
        if d > 2:
            g = _in_memory(g)
        axis = Axis(shape.dims[d], g.dims[d], align, scale, g.dtype)
        g = resample_adjoint(g, d, axis.size, taps(axis))
    return finish(g)


_COPIES = (nearest, nearest_exact)
for _taps, *_names in (
    (nearest, "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    (
        nearest_exact,
        "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d",
    ),
    (linear, "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"),
    (cubic, "upsample_bicubic2d"),
    (antialiased(_triangle, 1.0), "_upsample_bilinear2d_aa"),
    (antialiased(_cubic_filter, 2.0), "_upsample_bicubic2d_aa"),
):
    for _name in _names:
        lowers(getattr(aten, _name).default)(partial(_forward, _taps))
        lowers(getattr(aten, f"{_name}_backward").default)(partial(_backward, _taps))
