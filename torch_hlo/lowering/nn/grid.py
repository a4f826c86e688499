"""grid_sample in two and three dimensions, forward and backward, and the grids of affine maps.

A sample is a weighted sum of taps; a tap is (integer position per axis, weight per axis, derivative
of the weight by the source coordinate). Interpolation codes: 0 linear, 1 nearest, 2 cubic. Padding
codes: 0 zeros, 1 border, 2 reflection."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch_hlo.hlo.ir import Instruction, Size, product, row_major_strides

from ..core import (
    Expr,
    absolute,
    aten,
    binary,
    compute,
    expected_shapes,
    floor,
    gather_dim,
    iota,
    lowers,
    maximum,
    minimum,
    move_dim,
    promote,
    reshape,
    round_even,
    scalar,
    scatter_dim,
    select_dim,
    stack,
    where,
)
from ..reduction.reduce import fold, result

LINEAR = 0
NEAREST = 1
CUBIC = 2
ZEROS = 0
BORDER = 1
REFLECTION = 2
Tap = tuple[Expr, Expr, Expr]  # position (float), weight, derivative of the weight


def _unnormalised(x: Expr, size: Size, align: bool) -> tuple[Expr, Expr]:
    """(source coordinate, its derivative by the grid value)."""
    n = scalar(size, x.dtype)
    slope = x.like((n - 1) * 0.5 if align else n * 0.5)
    return ((x + 1) * slope if align else ((x + 1) * n - 1) * 0.5), slope


def _reflected(x: Expr, size: Size, align: bool) -> tuple[Expr, Expr]:
    """(coordinate mirrored into the image, sign of the derivative)."""
    n = x.like(size)
    low, span = (x.like(0), n - 1) if align else (x.like(-0.5), n)
    flat = span.eq(0)
    safe = where(flat, 1, span)
    offset = x - low
    sign = where(offset < 0, x.like(-1), 1)
    offset = absolute(offset)
    extra = binary("remainder", offset, safe)
    odd = binary("remainder", floor(offset / safe), safe.like(2)).ne(0)
    value = where(odd, safe - extra + low, extra + low)
    return where(flat, 0, value), where(flat, 0, where(odd, -sign, sign))


def _clipped(x: Expr, size: Size) -> tuple[Expr, Expr]:
    top = x.like(size) - 1
    inside = (x > 0) & (x < top)
    return minimum(maximum(x, 0), top), inside.cast(x.dtype)


def _placed(x: Expr, size: Size, padding: int, align: bool) -> tuple[Expr, Expr]:
    """A source coordinate made legal by the padding mode, and its derivative."""
    slope = x.like(1)
    if padding == REFLECTION:
        x, slope = _reflected(x, size, align)
    if padding != ZEROS:
        x, inside = _clipped(x, size)
        slope *= inside
    return x, slope


def _taps(x: Expr, size: Size, mode: int, padding: int, align: bool) -> list[Tap]:
    """Taps of one axis; derivatives are by the grid value."""
    source, slope = _unnormalised(x, size, align)
    if mode == CUBIC:
        base = floor(source)
        t = source - base
        result = []
        for k in range(-1, 3):
            position, _ = _placed(base + k, size, padding, align)
            weight, derivative = _cubic(t - k)
            result.append((position, weight, derivative * slope))
        return result
    source, bend = _placed(source, size, padding, align)
    slope *= bend
    if mode == NEAREST:
        return [(round_even(source), source.like(1), source.like(0))]
    low = floor(source)
    t = source - low
    return [(low, 1 - t, -slope), (low + 1, t, slope)]


def _cubic(d: Expr) -> tuple[Expr, Expr]:
    """Cubic convolution kernel with a = -0.75 and its derivative, at signed distance `d` below
    2."""
    a = -0.75
    x = absolute(d)
    sign = where(d < 0, d.like(-1), 1)
    near = (
        ((a + 2) * x - (a + 3)) * x * x + 1,
        (3 * (a + 2) * x - 2 * (a + 3)) * x,
    )
    far = (
        ((a * x - 5 * a) * x + 8 * a) * x - 4 * a,
        (3 * a * x - 10 * a) * x + 8 * a,
    )
    inside = x <= 1
    return where(inside, near[0], far[0]), where(inside, near[1], far[1]) * sign


class Sampler:
    """Shapes: input [N, C, spatial...], grid [N, out..., n]. Works on [N, points]."""

    def __init__(
        self,
        x: Instruction,
        grid: Instruction,
        mode: int,
        padding: int,
        align: bool,
    ) -> None:
        self.n = grid.dims[-1]
        self.sizes = x.dims[2:]
        self.batch, self.channels = x.dims[:2]
        self.out = grid.dims[1:-1]
        self.points = (self.batch, product(self.out))
        places = (
            self.batch,
            *self.sizes,
        )  # known to be few, twice as many indices fit a vector
        self.index = (
            "s32"
            if all(isinstance(d, int) for d in places) and product(places) < 1 << 31
            else "s64"
        )
        flat = compute(reshape(grid, (*self.points, self.n)))
        # The last grid coordinate belongs to the first spatial axis.
        axes = [Expr(select_dim(flat.x, 2, self.n - 1 - i)) for i in range(self.n)]
        self.axes = [
            _taps(c, s, mode, padding, align) for c, s in zip(axes, self.sizes, strict=True)
        ]

    def combinations(self) -> Iterator[tuple[Expr, Expr, tuple[Any, ...]]]:
        """(flat index [N, points], pred inside, taps) of every corner."""
        strides = row_major_strides(tuple(self.sizes))
        for taps in itertools.product(*self.axes):
            inside = None
            index = None
            for (position, _, _), size, stride in zip(taps, self.sizes, strides, strict=True):
                within = (position >= 0) & (position <= size - 1)
                inside = within if inside is None else inside & within
                step = where(within, position, 0).cast(self.index) * stride
                index = step if index is None else index + step
            yield index, inside, taps

    def rows(self, x: Instruction) -> Instruction:
        """[N * pixels, C]"""
        pixels = self.pixels = product(self.sizes)
        return reshape(
            move_dim(reshape(x, (self.batch, self.channels, pixels)), 1, 2),
            (self.batch * pixels, self.channels),
        )

    def place(self, index: Expr) -> Instruction:
        return (index + iota(self.points, 0, self.index) * self.pixels).x

    def spread(self, v: Expr) -> Expr:
        """[N, points] repeated over channels."""
        return v.add_dim(2).broadcast((*self.points, self.channels))


def _product(values: list[Expr]) -> Expr:
    total = values[0]
    for v in values[1:]:
        total *= v
    return total


@lowers(aten.grid_sampler_2d, aten.grid_sampler_3d)
def grid_sampler(
    x: Instruction,
    grid: Instruction,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> Instruction:
    sampler = Sampler(x, grid, interpolation_mode, padding_mode, align_corners)
    rows = sampler.rows(compute(x).x)
    total = None
    for index, inside, taps in sampler.combinations():
        weight = where(inside, _product([w for _, w, _ in taps]), 0)
        term = Expr(gather_dim(rows, sampler.place(index), 0)) * sampler.spread(weight)
        total = term if total is None else total + term
    return result(Expr(move_dim(total.x, 2, 1)))


@lowers(aten.grid_sampler_2d_backward, aten.grid_sampler_3d_backward)
def grid_sampler_backward(
    grad: Instruction,
    x: Instruction,
    grid: Instruction,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    mask: Sequence[bool],
) -> tuple[Instruction | None, Instruction | None]:
    sampler = Sampler(x, grid, interpolation_mode, padding_mode, align_corners)
    rows = sampler.rows(compute(x).x)
    g = Expr(
        move_dim(
            reshape(compute(grad).x, (sampler.batch, sampler.channels, sampler.points[1])),
            1,
            2,
        )
    )
    dx = Expr(promote.full(0, g.dtype, rows.dims))
    slopes: list[Expr | None] = [None] * sampler.n
    for index, inside, taps in sampler.combinations():
        weight = where(inside, _product([w for _, w, _ in taps]), 0)
        place = sampler.place(index)
        dx = Expr(scatter_dim(dx.x, place, (g * sampler.spread(weight)).x, 0))
        pull = where(inside, fold(g * Expr(gather_dim(rows, place, 0)), (2,)), 0)
        for i in range(sampler.n):
            partial = _product([d if k == i else w for k, (_, w, d) in enumerate(taps)])
            term = pull * partial
            slopes[i] = term if slopes[i] is None else slopes[i] + term
    dx_shape, grid_shape = expected_shapes()
    image = dx.reshape((sampler.batch, sampler.pixels, sampler.channels))
    dgrid = stack([s.x for s in reversed(slopes)], -1)
    return (
        None if dx_shape is None else result(Expr(move_dim(image.x, 2, 1))),
        None if grid_shape is None else result(Expr(dgrid), 1),
    )
