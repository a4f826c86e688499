"""Padding with a constant, by reflection or by repeating the border; backward by adding the padded
parts to what they copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce

from torch_hlo.hlo.ir import Dim, Instruction, Size, build

from ..core import LoweringError, Scalar, aten, expected, is_number, lowers, pad, pad_dim, promote


@lowers(aten.constant_pad_nd)
def constant_pad(x: Instruction, padding: Sequence[Size], value: Scalar = 0) -> Instruction:
    """`padding`: (low, high) pairs from the last dimension backwards."""
    pairs = [(0, 0)] * x.rank
    for i in range(len(padding) // 2):
        pairs[x.rank - 1 - i] = (padding[2 * i], padding[2 * i + 1])
    if is_number(value) and isinstance(value, bool) and x.dtype != "pred":
        value = int(value)
    return pad(x, pairs, value)


def _padded_dims(rank: int, padding: Sequence[Size]) -> list[tuple[int, Size, Size]]:
    """(dimension, low, high) of each padded dimension. Negative ones crop."""
    for n in padding:
        if isinstance(n, Dim) and any(c < 0 for _, c in n.terms):
            raise LoweringError(f"padding by {n}, which may be negative")
    return [(rank - 1 - i, padding[2 * i], padding[2 * i + 1]) for i in range(len(padding) // 2)]


def _added(n: Size) -> Size:
    return max(n, 0) if isinstance(n, int) else n


def _part(g: Instruction, d: int, start: Size, size: Size) -> Instruction:
    """`size` elements of dimension `d`."""
    starts = [0] * g.rank
    limits = list(g.dims)
    starts[d] = start
    limits[d] = start + size
    return build.slice_(g, starts, limits)


def _pad_by(
    border: Callable[..., Instruction], x: Instruction, padding: Sequence[Size]
) -> Instruction:
    """Borders beside what they copy."""
    for d, low, high in _padded_dims(x.rank, padding):
        size = x.dims[d]
        more = [_added(low), _added(high)]
        inner = pad_dim(x, d, low - more[0], high - more[1])
        edges = border(x, d, more[0], 0), inner, border(x, d, more[1], size - 1)
        x = build.concatenate([e for e in edges if e.dims[d] != 0] or [inner], d)
    return x


def _mirrored(x: Instruction, d: int, many: Size, edge: Size) -> Instruction:
    """Of `many` elements, those beside the element `edge` of dimension `d`."""
    return build.reverse(_part(x, d, edge - many if edge != 0 else 1, many), (d,))


def _edge(x: Instruction, d: int, many: Size, edge: Size) -> Instruction:
    """`many` times the element `edge`."""
    dims = list(x.dims)
    dims[d] = many
    others = [n for n in range(x.rank) if n != d]
    one = build.reshape(_part(x, d, edge, 1), [dims[n] for n in others])
    return build.broadcast(one, dims, others)


def _at(x: Instruction, d: int, start: Size, size: Size) -> Instruction:
    """`x` from `start` on in a dimension of `size` elements, zeros around it."""
    return pad_dim(x, d, start, size - start - x.dims[d])


def _unreflected(g: Instruction, d: int, size: Size, low: Size, high: Size) -> list[Instruction]:
    """What both borders add to the dimension that they mirror."""
    edges = (
        (low, 0, 1),
        (high, low + size, size - 1 - high),
    )  # how many, from where, to where
    return [
        _at(build.reverse(_part(g, d, start, many), (d,)), d, to, size)
        for many, start, to in edges
        if _added(many) != 0
    ]


def _unrepeated(g: Instruction, d: int, size: Size, low: Size, high: Size) -> list[Instruction]:
    """What both borders add to the elements that they repeat."""
    found = []
    for many, start, to in ((low, 0, 0), (high, low + size, size - 1)):
        if _added(many) != 0:
            total = build.reduce(_part(g, d, start, many), build.full(0, g.dtype), (d,), "add")
            dims = list(g.dims)
            dims[d] = 1
            found.append(_at(build.reshape(total, dims), d, to, size))
    return found


def _backward_by(
    borders: Callable[..., list[Instruction]],
    grad: Instruction,
    x: Instruction,
    padding: Sequence[Size],
) -> Instruction:
    """Slices that are added."""
    shape = expected()
    g = promote.cast(grad, promote.compute_type(shape.dtype))
    for d, low, high in _padded_dims(g.rank, padding):
        inner = pad_dim(g, d, low * -1, high * -1)
        g = reduce(build.add, borders(g, d, shape.dims[d], low, high), inner)
    return promote.cast(g, shape.dtype)


lowers(aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d)(
    partial(_pad_by, _mirrored)
)
lowers(aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d)(
    partial(_pad_by, _edge)
)
lowers(
    aten.reflection_pad1d_backward,
    aten.reflection_pad2d_backward,
    aten.reflection_pad3d_backward,
)(partial(_backward_by, _unreflected))
lowers(
    aten.replication_pad1d_backward,
    aten.replication_pad2d_backward,
    aten.replication_pad3d_backward,
)(partial(_backward_by, _unrepeated))
