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
# rows up to this length are one lane each: a vector along them would be mostly empty, and folding
# its lanes the most work
SHORT_ROW = 16
# the same where a result has an element per point, which lanes write apart from each other
SHORTER_ROW = 8
FEW_ROWS, MANY_ROWS = (
    16,
    256,
)  # neighbouring rows that shorter ones take, and short ones
# elements of a row for which saving a pass is worth more than keeping its exponentials between
# passes
LONG_ROW = 8192


@frozen
class Walk:
    """What plans depend on: how a target walks rows.

    `lanes`: of the vectors that they are written in. `chunks` of rows with partial results: (at
    most, items in all, points that make one worth it); `column_chunks` times as many where there is
    a result per column. `apart`: opcodes that work on whole
    dimensions. `online`: maximum and sum may share a pass. `few`, `long`: fewer rows than this,
    each longer, are cut where only their folds are wanted. `columns`: rows across memory that are
    worth their short bursts.
    """

    lanes: int = 1
    chunks: tuple[int, int, int] = (32, 64, 16384)
    column_chunks: int = 1
    apart: Collection[str] = table.MOVES
    online: bool = True
    few: int = 0
    long: int = 0
    columns: int = STRIDED_ITEMS * 64


@frozen
class Online:
    """A sum of `exponential`, which is exp(x - shift), where `shift` is `maximum`, the row's
    largest x, or a choice between that and something else. It can be taken block by block with the
    maximum so far and scaled when that grows (Milakov and Gimelshein, 2018)."""

    maximum: Instruction
    exponential: Instruction
    shift: Instruction


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
    # sums taken in the pass of the maximum that they need
    online: dict[Instruction, Online] = field(default_factory=dict)
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
    if (
        p.style == "rows"
        and walk.lanes > 1
        and _is_short(p.inner_sizes(), p.outer_sizes(), any(map(is_full, results)))
    ):
        p.style = "strided"
    _levels(p, is_full)
    length = product(p.inner_sizes())
    if (
        walk.online
        and p.passes > 1
        and p.style != "strided"
        and len(p.inner) == 1
        and isinstance(length, int)
        and length > LONG_ROW
    ):
        _take_online(p, is_full)
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


def _is_short(row: Dims, rows: Dims, written: bool) -> bool:
    """Whether neighbouring rows are lanes. `written`: a result has an element per point."""
    length = product(row)
    if not isinstance(length, int) or length > (SHORTER_ROW if written else SHORT_ROW) or not rows:
        return False
    return isinstance(rows[-1], int) and rows[-1] >= (
        FEW_ROWS if length <= SHORTER_ROW else MANY_ROWS
    )


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


def _take_online(p: RowPlan, is_full: Callable[[Instruction], bool]) -> None:
    """Find the sums that can be taken online; they are, if that saves a pass."""
    before, p.stash = p.passes, []
    p.online = {r: found for r in p.row_reduces if (found := _online(p, r)) is not None}
    _levels(p, is_full)
    if p.passes == before:
        p.online, p.stash = {}, []
        _levels(p, is_full)


def _online(p: RowPlan, r: Instruction) -> Online | None:
    if r.is_tuple or r["to_apply"].root.op != "add" or r.operand.dtype not in ("f32", "f64"):
        return None
    e = r.operand
    if e.op == "multiply":  # by something that does not wait for the maximum
        e, other = sorted(e.operands, key=lambda o: o.op != "exponential")
        if p.level[other]:
            return None
    if e.op != "exponential" or e.operand.op != "subtract":
        return None
    x, shift = (_without_reshapes(o) for o in e.operand.operands)
    if shift.op != "broadcast":
        return None
    shift = _without_reshapes(shift.operand)
    for m in shift.operands[1:] if shift.op == "select" else (shift,):
        m = _without_reshapes(m)
        if (
            m in p.row_reduces
            and not m.is_tuple
            and m["to_apply"].root.op == "maximum"
            and _without_reshapes(m.operand) is x
            and p.level[m] == 1
        ):
            return Online(m, e, shift)
    return None


def _without_reshapes(x: Instruction) -> Instruction:
    while x.op == "reshape":
        x = x.operand
    return x


def _levels(p: RowPlan, is_full: Callable[..., Any]) -> None:
    row_set = set(p.row_reduces)
    level = p.level
    for x in p.order:
        at = max((level[o] for o in x.operands), default=0)
        level[x] = at + 1 if x in row_set and x not in p.online else at
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
