"""Blocks of opcodes with computed positions: gather, scatter, dynamic-slice, dynamic-update-slice.

A device that does not hold a position contributes zero to a sum, or drops the update.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_hlo.hlo.ir import DTYPES, Instruction, build as h
from torch_hlo.hlo.sharding.factors import reducer

from . import halo
from .reshard import Local, Planner
from .rules import Site, identity, localizes, on_first


def _start(p: Planner, local: Local, d: int) -> list[int]:
    """Per device the global index of the first element of its block along dimension d."""
    size = local.x.shape.sizes[d]
    return [i * size for i in p.grid.indices(local.layout[d])]


def _inside(index: Instruction, size: int) -> Instruction:
    zero = h.full_like(index, 0)
    end = h.full_like(index, size)
    return h.and_(h.compare(index, zero, "GE"), h.compare(index, end, "LT"))


def _bounded(index: Instruction, low: int, high: int) -> Instruction:
    return h.clamp(h.full_like(index, low), index, h.full_like(index, high))


def _integers(index: Instruction) -> Instruction:
    """Indices in a type that holds negative numbers and sizes."""
    return (
        index
        if index.kind == "s" and index.bits >= 32
        else h.convert(index, "s64" if index.dtype in ("u64", "u32") else "s32")
    )


def _in_block(
    p: Planner,
    source: Local,
    d: int,
    start: Instruction,
    size: int,
    inside: Instruction | None,
) -> tuple[Instruction, Instruction | None]:
    """Where `size` elements from `start` along dimension `d` begin in the device's block of
    `source`, behind a margin of as many elements; a single one has no margin, and lies in the block
    where `inside` (what it was before, and this) says so."""
    n = source.dims[d]
    block = source.x.shape.sizes[d]
    begin = h.convert(p.grid.table(_start(p, source, d)), start.dtype)
    start = h.subtract(_bounded(start, 0, n - size), begin)
    if size == 1:
        here = _inside(start, block)
        inside = here if inside is None else h.and_(inside, here)
        return _bounded(start, 0, block - 1), inside
    return _bounded(h.add(start, h.full_like(start, size)), 0, block + size), inside


@localizes("dynamic-slice", roles="sum")
def dynamic_slice(s: Site) -> list[Local]:
    x = s.x
    operands = s.operands
    y = operands[0].x
    starts = [_integers(o.x) for o in operands[1:]]
    sizes = list(x["dynamic_slice_sizes"])
    inside: Instruction | None = None
    for d, (n, size) in enumerate(zip(operands[0].dims, x["dynamic_slice_sizes"], strict=True)):
        atoms = operands[0].layout[d]
        block = operands[0].x.shape.sizes[d]
        if not atoms:
            continue
        if size == n:
            sizes[d] = block
            continue
        starts[d], inside = _in_block(s.p, operands[0], d, starts[d], size, inside)
        if size != 1:
            # a margin of zeros, so that a slice that is partly here brings zeros for the rest
            y = h.pad(
                y,
                h.constant(0, y.dtype),
                [(size, size, 0) if e == d else (0, 0, 0) for e in range(y.rank)],
            )
    y = h.dynamic_slice(y, starts, sizes)
    if inside is not None:
        y = h.select(h.broadcast(inside, y.dims, ()), y, h.full_like(y, 0))
    return s.results(y, _sum(x))


def _sum(x: Instruction) -> str:
    """The reducer that adds one value to zeros."""
    return "or" if x.dtype == "pred" else "add"


@localizes("dynamic-update-slice", roles="shift")
def dynamic_update_slice(s: Site) -> list[Local]:
    operands = s.operands
    target = operands[0].x
    update = operands[1].x
    starts = [_integers(o.x) for o in operands[2:]]
    margins = [0] * len(starts)
    inside: Instruction | None = None
    for d, (n, size) in enumerate(zip(operands[0].dims, operands[1].dims, strict=True)):
        if not operands[0].layout[d] or size == n:
            continue
        starts[d], inside = _in_block(s.p, operands[0], d, starts[d], size, inside)
        margins[d] = size if size != 1 else 0
    y = target
    if any(margins):
        y = h.pad(y, h.constant(0, y.dtype), [(m, m, 0) for m in margins])
    if inside is not None:
        old = h.dynamic_slice(y, starts, update.dims)
        update = h.select(h.broadcast(inside, update.dims, ()), update, old)
    y = h.dynamic_update_slice(y, update, starts)
    y = h.slice_(y, margins, [m + n for m, n in zip(margins, target.dims)])
    return s.results(y)


def _shifted_indices(
    p: Planner,
    source: Local,
    indices: Instruction,
    vector_dim: int,
    components: Sequence[int],
    dims: Sequence[int],
    clamped: bool,
) -> tuple[Instruction, Instruction | None]:
    """Index vectors relative to the device's block along the split `dims` of `source`, and where
    they lie in it (pred, without the vector dimension; None when no dimension is split). `clamped`:
    positions outside the array mean its nearest element."""
    indices = _integers(indices)
    vector = vector_dim < indices.rank

    def row(values: Instruction) -> Instruction:
        """One number per component, spread over all index vectors."""
        return (
            h.broadcast(values, indices.dims, (vector_dim,))
            if vector
            else h.broadcast(h.reshape(values, ()), indices.dims, ())
        )

    dtype = indices.dtype
    big = 1 << (DTYPES[dtype].bits - 2)
    split = [d in dims for d in components]
    last = [source.dims[d] - 1 if s else big for d, s in zip(components, split)]
    size = [source.x.dims[d] if s else big for d, s in zip(components, split)]
    begins = [
        (
            h.reshape(h.convert(p.grid.table(_start(p, source, d)), dtype), (1,))
            if s
            else h.constant([0], dtype)
        )
        for d, s in zip(components, split)
    ]
    low = row(h.constant([0 if s else -big for s in split], dtype))
    if clamped:
        indices = h.clamp(low, indices, row(h.constant(last, dtype)))
    indices = h.subtract(indices, row(h.concatenate(begins, 0)))
    inside = h.and_(
        h.compare(indices, low, "GE"),
        h.compare(indices, row(h.constant(size, dtype)), "LT"),
    )
    if vector:
        inside = h.reduce(inside, h.constant(True, "pred"), (vector_dim,), "and")
    return indices, inside


@localizes("gather", roles="sum")
def gather(s: Site) -> list[Local]:
    x = s.x
    source = s.operands[0]
    indices = s.operands[1].x
    looked_up = [
        d
        for d in x["start_index_map"]
        if source.layout[d] and x["slice_sizes"][d] != source.dims[d]
    ]
    sizes = [
        source.x.dims[d] if taken == source.dims[d] else taken
        for d, taken in enumerate(x["slice_sizes"])
    ]
    inside = None
    if looked_up:
        indices, inside = _shifted_indices(
            s.p,
            source,
            indices,
            x["index_vector_dim"],
            x["start_index_map"],
            looked_up,
            True,
        )
    y = s.on_blocks((source.x, indices), slice_sizes=tuple(sizes))
    if inside is not None:
        outer = [d for d in range(y.rank) if d not in x["offset_dims"]]
        y = h.select(h.broadcast(inside, y.dims, outer), y, h.full_like(y, 0))
    return s.results(y, _sum(x))


@localizes("scatter", roles="sum shift")
def scatter(s: Site) -> list[Local]:
    p = s.p
    x = s.x
    operands = s.operands
    n = len(operands) // 2
    targets = operands[:n]
    indices = operands[n]
    updates = operands[n + 1 :]
    known = reducer(x["to_apply"]) if n == 1 else None
    window = set(x["update_window_dims"])
    moved = [
        d
        for d in x["scatter_dims_to_operand_dims"]
        if targets[0].layout[d] and not _full(x, d, targets[0], updates[0])
    ]
    where = indices.x
    if moved:
        where, _ = _shifted_indices(
            p,
            targets[0],
            where,
            x["index_vector_dim"],
            x["scatter_dims_to_operand_dims"],
            moved,
            False,
        )
    bases = [t.x for t in targets]
    changes = [u.x for u in updates]
    if known:
        neutral = identity(known, targets[0].dtype)
        changes = [
            halo.masked(
                p,
                updates[0],
                neutral,
                [d for d in range(len(updates[0].dims)) if d not in window],
            )
        ]
        bases = [on_first(p, bases[0], s.choice.partial, neutral)]
    return s.results(s.on_blocks((*bases, where, *changes)), known or "add")


def _full(x: Instruction, d: int, target: Local, update: Local) -> bool:
    """Whether the updates cover dimension d of the operand."""
    if d in x["inserted_window_dims"]:
        return False
    outside = (*x["inserted_window_dims"], *x["input_batching_dims"])
    place: int = x["update_window_dims"][
        [e for e in range(len(target.dims)) if e not in outside].index(d)
    ]
    return update.dims[place] == target.dims[d]
