"""Padding with a constant, by reflection or by repeating the border; backward by adding the padded
parts to what they copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from torch_hlo.hlo.ir import Instruction, Size, build

from ..core import (
    Scalar,
    absolute,
    aten,
    expected,
    gather_dim,
    iota,
    is_number,
    lowers,
    maximum,
    minimum,
    pad,
    promote,
    scatter_dim,
)


@lowers(aten.constant_pad_nd)
def constant_pad(x: Instruction, padding: Sequence[Size], value: Scalar = 0) -> Instruction:
    """`padding`: (low, high) pairs from the last dimension backwards."""
    pairs = [(0, 0)] * x.rank
    for i in range(len(padding) // 2):
        pairs[x.rank - 1 - i] = (padding[2 * i], padding[2 * i + 1])
    if is_number(value) and isinstance(value, bool) and x.dtype != "pred":
        value = int(value)
    return pad(x, pairs, value)


def _padded_dims(padding: Sequence[Size]) -> list[tuple[int, Size, Size]]:
    """(dimension from the end, low, high) of each padded dimension."""
    return [(-1 - i, padding[2 * i], padding[2 * i + 1]) for i in range(len(padding) // 2)]


def _reflected(size: Size, low: Size, high: Size) -> Instruction:
    """Source position of every element of the padded dimension: mirrored without repeating the
    border."""
    i = absolute(iota((size + low + high,), 0) - low)
    last = i.like(size) - 1
    return (last - absolute(last - i)).x


def _repeated(size: Size, low: Size, high: Size) -> Instruction:
    i = iota((size + low + high,), 0) - low
    return minimum(maximum(i, 0), i.like(size) - 1).x


def _part(g: Instruction, d: int, start: Size, size: Size) -> Instruction:
    """`size` elements of dimension `d`."""
    starts = [0] * g.rank
    limits = list(g.dims)
    starts[d] = start
    limits[d] = start + size
    return build.slice_(g, starts, limits)


def _pad_by(positions: Callable[..., Any], border: Callable[..., Any]) -> Callable[..., Any]:
    """Borders beside what they copy; by gathering `positions` where sizes are symbolic or a border
    is cut off."""

    def lowering(x: Instruction, padding: Sequence[Size]) -> Instruction:
        for d, low, high in _padded_dims(padding):
            size = x.dims[d]
            axis = x.rank + d
            if all(isinstance(n, int) and n >= 0 for n in (size, low, high)):
                edges = border(x, axis, low, 0), x, border(x, axis, high, size - 1)
                x = build.concatenate([e for e in edges if e.dims[d]], axis)
            else:
                x = gather_dim(x, positions(size, low, high), d)
        return x

    return lowering


def _mirrored(x: Instruction, d: int, many: int, edge: int) -> Instruction:
    """Of `many` elements, those beside the element `edge` of dimension `d`."""
    return build.reverse(_part(x, d, edge - many if edge else 1, many), (d,))


def _edge(x: Instruction, d: int, many: int, edge: int) -> Instruction:
    dims = list(x.dims)
    dims[d] = many
    others = [n for n in range(x.rank) if n != d]
    one = build.reshape(_part(x, d, edge, 1), [dims[n] for n in others])
    return build.broadcast(one, dims, others)


def _at(x: Instruction, d: int, start: int, size: int) -> Instruction:
    """`x` from `start` on in a dimension of `size` elements, zeros around it."""
    pairs = [(0, 0)] * x.rank
    pairs[d] = (start, size - start - x.dims[d])
    return pad(x, pairs, 0)


def _unreflected(g: Instruction, d: int, size: int, low: int, high: int) -> list[Instruction]:
    """What both borders add to the dimension that they mirror."""
    edges = (
        (low, 0, 1),
        (high, low + size, size - 1 - high),
    )  # how many, from where, to where
    return [
        _at(build.reverse(_part(g, d, start, many), (d,)), d, to, size)
        for many, start, to in edges
        if many
    ]


def _unrepeated(g: Instruction, d: int, size: int, low: int, high: int) -> list[Instruction]:
    """What both borders add to the elements that they repeat."""
    found = []
    for many, start, to in ((low, 0, 0), (high, low + size, size - 1)):
        if many:
            total = build.reduce(_part(g, d, start, many), build.full(0, g.dtype), (d,), "add")
            dims = list(g.dims)
            dims[d] = 1
            found.append(_at(build.reshape(total, dims), d, to, size))
    return found


def _backward_by(positions: Callable[..., Any], borders: Callable[..., Any]) -> Callable[..., Any]:
    """Slices that are added; by scattering to `positions` where sizes are symbolic or a border is
    cut off."""

    def lowering(grad: Instruction, x: Instruction, padding: Sequence[Size]) -> Instruction:
        shape = expected()
        g = promote.cast(grad, promote.compute_type(shape.dtype))
        for d, low, high in _padded_dims(padding):
            size = shape.dims[d]
            axis = g.rank + d
            if all(isinstance(n, int) and n >= 0 for n in (size, low, high)):
                g = reduce(build.add, borders(g, axis, size, low, high), _part(g, axis, low, size))
                continue
            dims = list(g.dims)
            dims[d] = shape.dims[d]
            g = scatter_dim(
                promote.full(0, g.dtype, dims),
                positions(shape.dims[d], low, high),
                g,
                d,
            )
        return promote.cast(g, shape.dtype)

    return lowering


lowers(aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d)(
    _pad_by(_reflected, _mirrored)
)
lowers(aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d)(
    _pad_by(_repeated, _edge)
)
lowers(
    aten.reflection_pad1d_backward,
    aten.reflection_pad2d_backward,
    aten.reflection_pad3d_backward,
)(_backward_by(_reflected, _unreflected))
lowers(
    aten.replication_pad1d_backward,
    aten.replication_pad2d_backward,
    aten.replication_pad3d_backward,
)(_backward_by(_repeated, _unrepeated))
