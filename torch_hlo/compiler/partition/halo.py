"""Ranges of a split dimension that devices need from each other: windows, slices, padding, reversal.

    exchange(planner, local, dim, starts, size, fill)     # device d gets elements starts[d] … starts[d] + size - 1

`starts` has one global index per block (not per device), in any order: which neighbour needs what is computed here, once, for every opcode. Each
distance between blocks costs one collective-permute of the strip that some device needs.
"""
from __future__ import annotations

from collections.abc import Sequence

from torch_hlo.compiler.partition.grid import Grid, Layout
from torch_hlo.compiler.partition.reshard import Local, Planner
from torch_hlo.hlo import build as h
from torch_hlo.hlo.ir import Instruction


def strips(n: int, block: int, parts: int, starts: Sequence[int], size: int) -> dict[int, tuple[int, int, list[int]]]:
    """distance -> (low, high, parts): the parts that need elements from the block `distance` after their own, and which of its elements."""
    found: dict[int, tuple[int, int, list[int]]] = {}
    for j, start in enumerate(starts):
        low, high = max(start, 0), min(start + size, n)
        for k in range(low // block, ceil_part(high, block) if high > low else low // block):
            a, b = max(low - k * block, 0), min(high - k * block, block)
            have = found.get(k - j)
            if have is None:
                found[k - j] = (a, b, [j])
            else:
                have[2].append(j)
                found[k - j] = (min(have[0], a), max(have[1], b), have[2])
    return found


def ceil_part(a: int, b: int) -> int:
    return -(-a // b)


def cost(n: int, parts: int, starts: Sequence[int], size: int) -> float:
    """Elements along the dimension that a device sends, on average."""
    found = strips(n, ceil_part(n, parts), parts, starts, size)
    return sum((high - low) * len(js) for distance, (low, high, js) in found.items() if distance) / parts


def exchange(
    planner: Planner, local: Local, dim: int, starts: Sequence[int], size: int, fill: Instruction | None
) -> Instruction:
    """The `size` elements from starts[block of the device] on; those outside the array are `fill` (a scalar), or arbitrary when it is None."""
    grid = planner.grid
    atoms = local.layout[dim]
    parts = grid.parts(atoms)
    n, block = local.dims[dim], grid.block(local.dims, local.layout)[dim]
    found = strips(n, block, parts, starts, size)
    # Strips side by side, in order of distance; `base[distance]` is where the first element of that block would be.
    pieces: list[Instruction] = []
    at, base = 0, {}
    for distance in sorted(found):
        low, high, js = found[distance]
        piece = _range(local.x, dim, low, high)
        if distance:
            piece = planner.permute(piece, neighbours(grid, local.layout, dim, js, distance))
        pieces.append(piece)
        base[distance] = (at, low, high)
        at += high - low
    if not pieces:  # nobody needs anything of the array
        return _filled(local, dim, size, fill)
    whole = h.concatenate(pieces, dim)
    # Where in `whole` each part's range begins. Ranges must be contiguous there: blocks between the first and the last one are used up to their end.
    begins = []
    for j, start in enumerate(starts):
        low = max(start, 0)
        k = low // block if min(start + size, n) > low else None
        if k is None or (k - j) not in base:
            begins.append(0)
        else:
            place, first, _ = base[k - j]
            begins.append(place + (low - k * block - first) - (low - start))
    return _placed(planner, whole, dim, atoms, begins, starts, size, n, fill, at)


def _filled(local: Local, dim: int, size: int, fill: Instruction | None) -> Instruction:
    dims = [size if d == dim else n for d, n in enumerate(local.x.shape.dims)]
    return h.broadcast(h.constant(0, local.dtype) if fill is None else fill, dims, ())


def _placed(planner, whole, dim, atoms, begins, starts, size, n, fill, length) -> Instruction:
    grid = planner.grid
    before = max(0, -min(begins))
    after = max(0, max(begins) + size - length)
    zero = h.constant(0, whole.shape.dtype)
    if before or after:
        whole = h.pad(whole, zero, [(before, after, 0) if d == dim else (0, 0, 0) for d in range(whole.shape.rank)])
    index = grid.indices(atoms)
    result = window_of(grid, whole, dim, [begins[i] + before for i in index], size)
    if fill is not None and any(s < 0 or s + size > n for s in starts):
        result = mask(grid, result, dim, [starts[i] for i in index], n, fill)
    return result


def window_of(grid: Grid, x: Instruction, dim: int, begins: Sequence[int], size: int) -> Instruction:
    if len(set(begins)) == 1:
        return _range(x, dim, begins[0], begins[0] + size)
    zero = h.constant(0, "s32")
    start = grid.table(begins)
    return h.dynamic_slice(x, [start if d == dim else zero for d in range(x.shape.rank)], [size if d == dim else m for d, m in enumerate(x.shape.dims)])


def _range(x: Instruction, dim: int, low: int, high: int) -> Instruction:
    return h.slice_(x, [low if d == dim else 0 for d in range(x.shape.rank)], [high if d == dim else n for d, n in enumerate(x.shape.dims)])


def neighbours(grid: Grid, layout: Layout, dim: int, parts: Sequence[int], distance: int) -> list[tuple[int, int]]:
    """(source, target) devices: each device of block j in `parts` gets from the device of block j + distance with equal other indices."""
    atoms = layout[dim]
    pairs = []
    for group in grid.groups(atoms):
        pairs += [(group[j + distance], group[j]) for j in parts]
    return sorted(pairs)


def mask(grid: Grid, x: Instruction, dim: int, starts: Sequence[int], n: int, fill: Instruction) -> Instruction:
    """`x` with elements whose global index (starts[device] + local index) lies outside [0, n) replaced by the scalar `fill`."""
    size = x.shape.dims[dim]
    line = (size,)
    index = h.add(h.iota("s32", line, 0), h.broadcast(grid.table(starts), line, ()))
    inside = None
    if any(s + size > n for s in starts):
        inside = h.compare(index, h.full(n, "s32", line), "LT")
    if any(s < 0 for s in starts):
        above = h.compare(index, h.full(0, "s32", line), "GE")
        inside = above if inside is None else h.and_(inside, above)
    if inside is None:
        return x
    return h.select(h.broadcast(inside, x.shape.dims, (dim,)), x, h.broadcast(fill, x.shape.dims, ()))


def masked(planner: Planner, local: Local, fill: Instruction, dims: Sequence[int] | None = None) -> Instruction:
    """The block with padding beyond the array's end replaced by `fill`, along `dims` (default: all)."""
    grid, x = planner.grid, local.x
    block = grid.block(local.dims, local.layout)
    for d, atoms in enumerate(local.layout):
        if atoms and (dims is None or d in dims) and block[d] * grid.parts(atoms) != local.dims[d]:
            x = mask(grid, x, d, [i * block[d] for i in grid.indices(atoms)], local.dims[d], fill)
    return x
