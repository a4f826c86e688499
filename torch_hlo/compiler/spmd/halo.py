"""Ranges of a split dimension that devices need from each other: windows, slices, padding,
reversal.

    exchange(planner, local, dim, starts, size, fill)     # block j gets elements starts[j] …
                                                          # starts[j] + size - 1

`starts` has one global index per block (not per device), in any order: which neighbour needs what
is computed here, once, for every opcode. When all blocks need the same strip of the block at some
distance, as windows do, each distance is one collective-permute and the strips lie side by side.
Otherwise strips are sent in rounds, in each of which a block sends and gets at most once, and are
written where they belong.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction, Ints, build as h, ceildiv

from .grid import Grid, Layout
from .reshard import Local, Planner, resized, sliced

Bounds = tuple[int, int]


@frozen
class Edge:
    """Block `target` needs elements low … high - 1 of block `source`."""

    source: int
    target: int
    low: int
    high: int

    @property
    def size(self) -> int:
        return self.high - self.low


@lru_cache(4096)
def edges(block: int, starts: Ints, size: int, bounds: Bounds) -> tuple[Edge, ...]:
    """What every block needs, elements outside `bounds` left out."""
    found = []
    for j, start in enumerate(starts):
        low = max(start, bounds[0])
        high = min(start + size, bounds[1])
        if low < high:
            for k in range(low // block, ceildiv(high, block)):
                found.append(Edge(k, j, max(low - k * block, 0), min(high - k * block, block)))
    return tuple(found)


def by_distance(found: Sequence[Edge]) -> dict[int, list[Edge]]:
    table: dict[int, list[Edge]] = {}
    for e in found:
        table.setdefault(e.source - e.target, []).append(e)
    return table


def rounds(found: Sequence[Edge]) -> list[list[Edge]]:
    """The edges between different blocks, long ones first; in a round no block sends twice or gets
    twice."""
    result: list[list[Edge]] = []
    for e in sorted(found, key=lambda e: -e.size):
        if e.source != e.target:
            for r in result:
                if all(e.source != o.source and e.target != o.target for o in r):
                    r.append(e)
                    break
            else:
                result.append([e])
    return result


def _span(found: Sequence[Edge]) -> tuple[int, int]:
    return min(e.low for e in found), max(e.high for e in found)


def _strips_cost(found: Sequence[Edge]) -> int:
    """Elements sent when every distance is one permutation."""
    total = 0
    for distance, group in by_distance(found).items():
        low, high = _span(group)
        total += (high - low) * len(group) if distance else 0
    return total


def _rounds_cost(found: Sequence[Edge]) -> int:
    return sum(r[0].size * len(r) for r in rounds(found))


def across(block: Ints, dim: int) -> int:
    """Elements of a block at one place along `dim`."""
    return math.prod((*block[:dim], *block[dim + 1 :]))


def cost(
    n: int,
    parts: int,
    starts: Sequence[int],
    size: int,
    bounds: Bounds | None = None,
) -> float:
    """Elements along the dimension that a device sends, on average."""
    found = edges(ceildiv(n, parts), tuple(starts), size, bounds or (0, n))
    return min(_strips_cost(found), _rounds_cost(found)) / parts


def exchange(
    planner: Planner,
    local: Local,
    dim: int,
    starts: Sequence[int],
    size: int,
    fill: Instruction | None,
    bounds: Bounds | None = None,
) -> Instruction:
    """The `size` elements from starts[block of the device] on; those outside `bounds` (default: the
    array) are `fill`, or arbitrary when it is None."""
    grid = planner.grid
    atoms = local.layout[dim]
    bounds = bounds or (0, local.dims[dim])
    block = grid.block(local.dims, local.layout)[dim]
    found = edges(block, tuple(starts), size, bounds)
    if not found:
        dims = [size if d == dim else n for d, n in enumerate(local.x.dims)]
        return h.broadcast(h.constant(0, local.dtype) if fill is None else fill, dims, ())
    if _strips_cost(found) <= _rounds_cost(found):
        result = _side_by_side(planner, local, dim, found, starts, size, block)
    else:
        result = _written(planner, local, dim, found, starts, size, block)
    if fill is not None and any(s < bounds[0] or s + size > bounds[1] for s in starts):
        result = mask(
            grid,
            result,
            dim,
            [starts[i] for i in grid.indices(atoms)],
            bounds,
            fill,
        )
    return result


def _side_by_side(
    planner: Planner,
    local: Local,
    dim: int,
    found: Sequence[Edge],
    starts: Sequence[int],
    size: int,
    block: int,
) -> Instruction:
    """One permutation per distance. What a block needs is contiguous in the strips in order of
    distance, because blocks between its first and its last one are needed up to their ends."""
    grid = planner.grid
    pieces: list[Instruction] = []
    place: dict[int, int] = {}  # distance -> where that block's element 0 would be
    length = 0
    for distance, group in sorted(by_distance(found).items()):
        low, high = _span(group)
        piece = range_of(local.x, dim, low, high)
        if distance:
            piece = planner.permute(piece, pairs(grid, local.layout, dim, group))
        pieces.append(piece)
        place[distance] = length - low
        length += high - low
    begins = [0] * len(starts)
    for e in reversed(found):  # the first edge of a block counts
        begins[e.target] = place[e.source - e.target] + starts[e.target] - e.source * block
    return padded_window(
        grid,
        h.concatenate(pieces, dim),
        dim,
        [begins[i] for i in grid.indices(local.layout[dim])],
        size,
    )


def _written(
    planner: Planner,
    local: Local,
    dim: int,
    found: Sequence[Edge],
    starts: Sequence[int],
    size: int,
    block: int,
) -> Instruction:
    """Strips, of as many elements as the longest one of their round, written into a buffer with
    margins for what is not needed of them."""
    grid = planner.grid
    index = grid.indices(local.layout[dim])
    margin = max(e.size for e in found)
    result = h.broadcast(h.constant(0, local.dtype), resized(local.x, dim, size + 2 * margin), ())
    own = [e for e in found if e.source == e.target]
    for r in ([own] if own else []) + rounds(found):
        length = max(e.size for e in r)
        begin = [0] * len(starts)
        to = [0] * len(starts)
        for e in r:
            begin[e.source] = min(e.low, block - length)
            to[e.target] = e.source * block + begin[e.source] - starts[e.target] + margin
        piece = window_of(grid, local.x, dim, [begin[i] for i in index], length)
        if r is not own:
            piece = planner.permute(piece, pairs(grid, local.layout, dim, r))
        place = grid.table(to[i] for i in index)
        zero = h.constant(0, "s32")
        result = h.dynamic_update_slice(
            result,
            piece,
            [place if d == dim else zero for d in range(piece.rank)],
        )
    return range_of(result, dim, margin, margin + size)


def pairs(grid: Grid, layout: Layout, dim: int, found: Sequence[Edge]) -> list[tuple[int, int]]:
    """(source, target) devices: the blocks of the edges, with equal indices along all other
    axes."""
    return sorted(
        (group[e.source], group[e.target]) for group in grid.groups(layout[dim]) for e in found
    )


def padded_window(
    grid: Grid,
    x: Instruction,
    dim: int,
    begins: Sequence[int],
    size: int,
    value: Instruction | None = None,
) -> Instruction:
    """`window_of` that may reach beyond both ends of `x`, where it finds `value` (default 0)."""
    before, after = (
        max(0, -min(begins)),
        max(0, max(begins) + size - x.shape.sizes[dim]),
    )
    value = h.constant(0, x.dtype) if value is None else value
    x = h.pad(x, value, [(before, after, 0) if d == dim else (0, 0, 0) for d in range(x.rank)])
    return window_of(grid, x, dim, [b + before for b in begins], size)


def window_of(
    grid: Grid, x: Instruction, dim: int, begins: Sequence[int], size: int
) -> Instruction:
    """`size` elements along `dim` from begins[device] on."""
    if len(set(begins)) == 1:
        return range_of(x, dim, begins[0], begins[0] + size)
    return sliced(grid, x, dim, begins, size)


def range_of(x: Instruction, dim: int, low: int, high: int) -> Instruction:
    return h.slice_(
        x,
        [low if d == dim else 0 for d in range(x.rank)],
        [high if d == dim else n for d, n in enumerate(x.dims)],
    )


def mask(
    grid: Grid,
    x: Instruction,
    dim: int,
    starts: Sequence[int],
    bounds: Bounds,
    fill: Instruction,
) -> Instruction:
    """`x` with elements whose global index (starts[device] + local index) lies outside `bounds`
    replaced by the scalar `fill`."""
    size, (low, high) = x.shape.sizes[dim], bounds
    line = (size,)
    index = h.add(h.iota("s32", line, 0), h.broadcast(grid.table(starts), line, ()))
    inside = None
    if any(s + size > high for s in starts):
        inside = h.compare(index, h.full(high, "s32", line), "LT")
    if any(s < low for s in starts):
        above = h.compare(index, h.full(low, "s32", line), "GE")
        inside = above if inside is None else h.and_(inside, above)
    if inside is None:
        return x
    return h.select(h.broadcast(inside, x.dims, (dim,)), x, h.broadcast(fill, x.dims, ()))


def masked(
    planner: Planner,
    local: Local,
    fill: Instruction,
    dims: Sequence[int] | None = None,
) -> Instruction:
    """The block with padding beyond the array's end replaced by `fill`, along `dims` (default:
    all)."""
    grid = planner.grid
    x = local.x
    block = grid.block(local.dims, local.layout)
    for d, atoms in enumerate(local.layout):
        if atoms and (dims is None or d in dims) and block[d] * grid.parts(atoms) != local.dims[d]:
            x = mask(
                grid,
                x,
                d,
                [i * block[d] for i in grid.indices(atoms)],
                (0, local.dims[d]),
                fill,
            )
    return x
