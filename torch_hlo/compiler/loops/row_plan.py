"""How a fusion with reductions is walked: which dimensions are rows, which lie inside a row, in how
many passes.

All members of such a fusion live in one space of `size` points (see
compiler/fusion/fusion_plan.py). Its dimensions, split finely enough for every reduction and
broadcast, are divided into `outer` (one iteration per row) and `inner` (walked within a row, lanes
along the last). A reduction is
    row      its kept dimensions are the outer ones: a value per row, which later passes over the
        same row may read
    late     anything else: partial results are combined in a second kernel
`style`: "rows" (an item of work is a row, no late results), "strided" (rows lie along the minor
dimension: an item is a block of neighbouring rows, one per lane), "partial" (an item is a chunk of
rows with its own partial results).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cmp_to_key
from typing import Any

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Computation, Dims, Instruction, Ints, Size, postorder, product

from ..fusion import fusion_table as table
from ..fusion.fusion_plan import rows_fit
from ..fusion.fusion_table import HEAVY, Intervals
from ..thresholds import STRIDED_ITEMS

STRIDED_LENGTH = 2048
SHORT_ROW = 16  # elements of a row that is not worth vectors of its own


@frozen
class Walk:
    """What plans depend on: how a target walks rows.

    `chunks` of rows with partial results: (at most, items in all, points that make one worth it);
    `column_chunks` times as many where there is a result per column. `apart`: opcodes that work on
    whole dimensions. `few`, `long`: fewer rows than this, each longer, are cut where only their
    folds are wanted. `columns`: rows across memory that are worth their short bursts. `alone`:
    elements of a row up to which each lane folds one by itself.
    """

    chunks: tuple[int, int, int] = (32, 64, 16384)
    column_chunks: int = 1
    apart: Collection[str] = table.MOVES
    few: int = 0
    long: int = 0
    columns: int = STRIDED_ITEMS * 64
    alone: int = 0


@dataclass(slots=True)
class RowPlan:
    """See the module's docstring. Positions in `outer`, `inner` index `dims` (major first)."""

    size: Size
    dims: Dims
    style: str
    outer: Ints
    inner: Ints
    row_reduces: list[Instruction]
    late_reduces: list[Instruction]
    # dimensions that each late result keeps
    late_kept: dict[Instruction, Ints] = field(default_factory=dict)
    # first pass in which a value can be computed
    level: dict[Instruction, int] = field(default_factory=dict)
    passes: int = 1
    # numbers of results with an element per point
    full_outputs: list[int] = field(default_factory=list)
    row_outputs: list[int] = field(default_factory=list)
    late_outputs: list[int] = field(default_factory=list)
    # expensive values that several passes need
    stash: list[Instruction] = field(default_factory=list)
    order: list[Instruction] = field(default_factory=list)

    def outer_sizes(self) -> Dims:
        return tuple(self.dims[d] for d in self.outer)

    def inner_sizes(self) -> Dims:
        return tuple(self.dims[d] for d in self.inner)


def plan(computation: Computation, walk: Walk) -> RowPlan:
    """The plan of a fusion's computation, which has at least one reduce."""
    root = computation.root
    results = list(root.operands) if root.op == "tuple" else [root]
    order = postorder((root,))
    reduces = [x for x in order if x.op == "reduce"]
    size = reduces[0].operand.size
    kept = {r: table.kept_intervals(r) for r in reduces}
    deps = _dependencies(order)

    def is_full(x: Instruction) -> bool:
        return not x.is_tuple and x.op != "get-tuple-element" and x.size == size

    read_back = {r for x in order if is_full(x) for r in deps[x] if r is not x}
    rows = kept[next(iter(read_back))] if read_back else _choose_rows(size, reduces, kept, walk)
    dims = _dimensions(size, order, reduces, kept, is_full, walk.apart)
    late = [r for r in reduces if kept[r] != rows]
    p = RowPlan(
        size,
        dims,
        "rows",
        (),
        (),
        [r for r in reduces if kept[r] == rows],
        late,
        order=order,
    )
    p.late_kept = {r: _positions(dims, kept[r]) for r in late}
    _divide(p, rows)
    _levels(p, is_full)
    _sort_results(p, results, rows, deps, is_full)
    return p


def _sort_results(
    p: RowPlan,
    results: Sequence[Instruction],
    rows: Intervals | None,
    deps: dict[Instruction, set[Instruction]],
    is_full: Callable[[Instruction], bool],
) -> None:
    """Which results have an element per point, per row, or are complete after the last row."""
    row_set = set(p.row_reduces)
    late_set = set(p.late_reduces)
    for k, x in enumerate(results):
        if is_full(x):
            p.full_outputs.append(k)
        elif (
            deps[x] & late_set
            or rows is None
            or not (deps[x] & row_set)
            and x.size != product(p.outer_sizes())
        ):
            p.late_outputs.append(k)
        else:
            p.row_outputs.append(k)


def _dependencies(
    order: list[Instruction],
) -> dict[Instruction, set[Instruction]]:
    found: dict[Instruction, set[Instruction]] = {}
    for x in order:
        mine: set[Instruction] = {x} if x.op == "reduce" else set()
        for o in x.operands:
            mine |= found[o]
        found[x] = mine
    return found


def _choose_rows(
    size: Size,
    reduces: list[Instruction],
    kept: dict[Instruction, Intervals],
    walk: Walk,
) -> Intervals | None:
    """Rows when nothing is read back: those of a reduction along the minor dimension, else None
    (chunks with partial results)."""
    roles = {kept[r] for r in reduces}
    for r in roles:
        if (
            r
            and r[0][0] != 1
            and rows_fit(size, r)
            and not (len(roles) == 1 and _few_long(size, r, walk))
        ):
            return r
    if len(roles) == 1:
        (r,) = roles
        if r and r[0][0] == 1 and isinstance(size, int):
            count = product(tuple(high // low for low, high in r))
            if (
                isinstance(count, int)
                and count
                and count >= walk.columns
                and size // count <= STRIDED_LENGTH
            ):
                return r
    return None


def _few_long(size: Size, rows: Intervals, walk: Walk) -> bool:
    count = product(tuple(high // low for low, high in rows))
    return (
        isinstance(size, int)
        and isinstance(count, int)
        and 0 < count < walk.few
        and size // count > walk.long
    )


def _dimensions(
    size: Size,
    order: list[Instruction],
    reduces: list[Instruction],
    kept: dict[Instruction, Intervals],
    is_full: Callable[[Instruction], bool],
    moves: Collection[str],
) -> Dims:
    """Dimensions of the space, major first: every reduction and, where that is possible, every
    broadcast and one of `moves` works on whole ones."""
    cuts = frozenset((1, size)) if size != 1 else frozenset((1,))
    for r in reduces:
        cuts = table.refine(cuts, table.cuts(kept[r])) or cuts
    for x in order:
        if is_full(x) and x.op in ("broadcast", "iota"):
            spans = (
                table.broadcast_intervals(x)
                if x.op == "broadcast"
                else table.intervals(x.dims, (x["iota_dimension"],))
            )
            cuts = table.refine(cuts, table.cuts(spans)) or cuts
    for x in order:
        # rows of a part of an array are loaded as vectors where none runs over several
        if is_full(x) and x.op in moves:
            steps = table.cuts(tuple(table.intervals(x.dims, (d,))[0] for d in _moved(x)))
            cuts = (
                table.refine(
                    cuts,
                    frozenset(
                        s for s in steps if not isinstance(s, int) or s == 1 or s >= SHORT_ROW
                    ),
                )
                or cuts
            )
    ascending = sorted(cuts, key=cmp_to_key(_order))
    return tuple(high // low for low, high in zip(ascending, ascending[1:]))[::-1]


def _order(a: Size, b: Size) -> int:
    """For a sort of cuts: divisors first."""
    return 0 if a is b or a == b else -1 if table.divides(a, b) else 1


def _moved(x: Instruction) -> list[int]:
    """Dimensions of a full-size rearrangement along which its elements are no neighbours in what it
    reads; none of size 1."""
    dims = x.dims
    source = x.operand.dims
    if len(dims) != len(source):
        return []
    kept = x["dimensions"] if x.op == "transpose" else range(len(dims))
    return [
        d
        for d, n in enumerate(dims)
        if n != 1 and (x.op in ("reverse", "gather") or kept[d] != d or n != source[kept[d]])
    ]


def _positions(dims: Dims, chosen: Intervals) -> Ints:
    """Dimensions that lie in the intervals, in order."""
    found = []
    low: Size = 1
    for i in range(len(dims) - 1, -1, -1):
        high = low * dims[i]
        if any(table.divides(a, low) and table.divides(high, b) for a, b in chosen):
            found.append(i)
        low = high
    return tuple(reversed(found))


def _divide(p: RowPlan, rows: Intervals | None) -> None:
    """Set style, outer and inner."""
    every = tuple(range(len(p.dims)))
    if rows is not None:
        p.outer = _positions(p.dims, rows)
        p.inner = tuple(d for d in every if d not in p.outer)
        p.style = "partial" if p.late_reduces else "strided" if rows[0][0] == 1 else "rows"
        return
    p.style = "partial"
    kept = next(iter(p.late_kept.values()))  # all alike when there are no rows
    if kept and kept[-1] == every[-1]:
        # Columns: the trailing kept dimensions are the row, everything else is walked outside.
        inner = []
        for d in reversed(every):
            if d not in kept:
                break
            inner.append(d)
        p.inner = tuple(reversed(inner))
    else:
        p.inner = every[-1:]
    # Kept outer dimensions first: a chunk of rows belongs to one element of them.
    outer = [d for d in every if d not in p.inner]
    p.outer = tuple([d for d in outer if d in kept] + [d for d in outer if d not in kept])


def _levels(p: RowPlan, is_full: Callable[..., Any]) -> None:
    row_set = set(p.row_reduces)
    level = p.level
    for x in p.order:
        at = max((level[o] for o in x.operands), default=0)
        level[x] = at + 1 if x in row_set else at
    p.passes = 1 + max(
        (
            level[x] - (x in row_set)
            for x in p.order
            if is_full(x) and _is_result(p, x) or x.op == "reduce"
        ),
        default=0,
    )
    if p.passes == 1:
        return
    # The passes in which a value is needed: those of the reductions it feeds, and the last one,
    # which writes the results.
    needed: dict[Instruction, set[int]] = {x: set() for x in p.order}
    for x in reversed(p.order):
        if x.op == "reduce":
            own = {level[x] - (x in row_set)}
        elif is_full(x):
            own = needed[x] | ({p.passes - 1} if _is_result(p, x) else set())
        else:
            own = set()
        needed[x] = own
        for o in x.operands:
            needed[o] |= own
    for x in p.order:
        if (
            is_full(x)
            and table.CLASS.get(x.op) == HEAVY
            and x.op not in ("divide", "sqrt", "rsqrt")
            and len(needed[x]) > 1
        ):
            p.stash.append(x)


def _is_result(p: RowPlan, x: Instruction) -> bool:
    root = p.order[-1]
    return x is root or root.op == "tuple" and x in root.operands
