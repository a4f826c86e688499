"""Kernels of fusions with reductions whose rows are walked one after the other: softmax, layernorm
and their gradients, sums.

Each row is walked in as many passes as reductions depend on each other. A pass computes in vectors
what its reductions need, straight from the operands: the row is in cache after the first pass. Row
results live in registers. Values with an element per point are written in the last pass. Results
that are complete only after the last row ("late", see row_plan.py) accumulate in partial buffers,
one per chunk of rows, and fusion_step.py combines them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    Computation,
    Dims,
    Instruction,
    Ints,
    Size,
    ceildiv,
    fixed,
    product,
    round_up,
)

from ..codegen import Index, Kernel
from ..codegen.index import (
    ZERO,
    combine,
    delinear,
    divide,
    linear,
    regroup,
)
from ..fusion import fusion_table as table
from ..llvm import Emit
from ..llvm.scalar import STORAGE, Value
from ..thresholds import PREFETCHED_ROW
from .reducer import Reducer
from .row_kernel import RowForms, RowKernel, stream, tuple_users
from .row_plan import RowPlan, Walk

# elements summed into one set of accumulators before they are added to the next level: rounding
# errors stay small
BLOCK = 4096
ROWS_BLOCK = 64  # the same for rows and other outer loops


class Chunks:
    """How the rows of a "partial" plan are cut: `kept` × `count` items, `per` rows (or lanes, when
    `by_lanes`) each."""

    def __init__(self, plan: RowPlan, walk: Walk) -> None:
        limit, items, points = walk.chunks
        columns = any(set(k) & set(plan.inner) for k in plan.late_kept.values())
        if columns:
            limit *= walk.column_chunks
        late_outer = next(iter(plan.late_kept.values())) if not plan.row_reduces else ()
        self.kept_dims = tuple(d for d in plan.outer if d in late_outer)
        self.rest_dims = tuple(d for d in plan.outer if d not in late_outer)
        self.kept = product(plan.dims[d] for d in self.kept_dims)
        rest = product(plan.dims[d] for d in self.rest_dims)
        self.count = limit // 2
        if isinstance(plan.size, int):
            most = max(1, min(limit, plan.size // points))
            kept = fixed(self.kept)
            self.count = max(1, min(most, items // kept)) if kept < items else 1
            if columns:
                self.count = max(1, min(self.count, fixed(rest) // 16))
        self.by_lanes = (
            not columns and not plan.row_reduces and isinstance(rest, int) and rest < self.count
        )
        self.total = plan.dims[plan.inner[-1]] if self.by_lanes else rest
        self.per = ceildiv(self.total, self.count)
        if self.by_lanes:
            self.per = round_up(self.per, 64)
        self.rows = rest

    @property
    def items(self) -> Size:
        return self.kept * self.count


@frozen
class _Work:
    """What a pass does at every element: reductions in registers, those in columns of partial
    buffers, numbers of results."""

    reducers: list[Reducer]
    identities: list[list[str]]
    columns: list[Instruction]
    writes: list[int]


class RowEmitter:
    """Writes the main kernel of a "rows" or "partial" plan."""

    def __init__(self, forms: RowForms, computation: Computation, plan: RowPlan) -> None:
        self.forms = forms
        self.plan = plan
        self.results = computation.results
        self.reducers = {r: Reducer(r) for r in (*plan.row_reduces, *plan.late_reduces)}
        self.gtes = tuple_users(plan.order)
        self.chunks = Chunks(plan, forms.walk) if plan.style == "partial" else None
        # how many of them, each with partial results
        self.count = self.chunks.count if self.chunks else 0
        # number of the first array of each late result's partial ones
        self.partials: dict[Instruction, int] = {}
        at = len(self.results)
        for r in plan.late_reduces:
            self.partials[r] = at
            at += len(self.reducers[r].stored_dtypes())
        self.partial_count = at - len(self.results)
        self.column_blocks = self._needs_column_blocks()
        extra = self.partial_count * (2 if self.column_blocks else 1)
        self.k = forms.row_kernel(plan, computation.params, len(self.results) + extra)
        if all(map(self._ends_in_row, plan.late_reduces)):
            self.k.padded.update(self.k.outputs[len(self.results) :])
        self.in_block = False
        # late reduces in registers: their accumulators, per item
        self.slots: dict[Instruction, list[str]] = {}
        self.lane_range: tuple[str, str] | None = None
        self.chunk: Index = ZERO
        self.current_pass = 0
        self.where: dict[int, Index] | None = None
        self.unroll = (
            2
            if len(plan.order) > 24 or any(table.CLASS.get(x.op) == table.HEAVY for x in plan.order)
            else 4
        )
        self._make_stash()

    def _needs_column_blocks(self) -> bool:
        """True when a chunk has so many rows that float sums over all of them would lose
        accuracy."""
        c = self.chunks
        if (
            c is None
            or c.by_lanes
            or not any(self.reducers[r].is_float_sum for r in self.plan.late_reduces)
        ):
            return False
        return not isinstance(c.per, int) or c.per > 2 * ROWS_BLOCK

    @property
    def items(self) -> Size:
        """Number of items of work."""
        return self.chunks.items if self.chunks else product(self.plan.outer_sizes())

    def stream(self, nbytes: int) -> None:
        """Write results past the caches when they are larger than this together, and rows can be
        walked in aligned vectors."""
        plan = self.plan
        lanes = self.k.lanes
        length = plan.dims[plan.inner[-1]] if plan.inner else 1
        # vectors of a loop that carries accumulators start where the row does
        carries = plan.late_reduces or any(plan.level[r] == plan.passes for r in plan.row_reduces)
        if isinstance(length, int) and (
            length % lanes == 0 or length >= PREFETCHED_ROW and not carries
        ):
            stream(self.k, plan, self.results, nbytes)
            self.k.ragged = bool(self.k.nontemporal) and length % lanes != 0

    def emit(self) -> RowKernel:
        k = self.k
        plan = self.plan
        c = self.chunks
        if c is None:
            with (
                k.loop("%lo", "%hi", product(plan.outer_sizes()))
                if plan.outer
                else nullcontext(ZERO)
            ) as item:
                self._row(dict(zip(plan.outer, delinear(item, plan.outer_sizes()))))
            return k
        with k.loop("%lo", "%hi", c.items) as item:
            kept, self.chunk = divide(item, c.count) if c.kept != 1 else (ZERO, item)
            where = dict(zip(c.kept_dims, delinear(kept, tuple(plan.dims[d] for d in c.kept_dims))))
            self._start_late(kept)
            low, high = self._range(c)
            if c.by_lanes:
                self.lane_range = (low, high)
                low = "0"
                high = k.size(c.rows)
            rest = tuple(plan.dims[d] for d in c.rest_dims)
            registers = [r for r in plan.late_reduces if r in self.slots]
            sums = [(self.reducers[r], self.reducers[r].identity(k)) for r in registers]
            top = [self.slots[r] for r in registers]
            with (
                self._in_blocks(low, high, c.rows, sums, top, kept)
                if rest
                else nullcontext((ZERO, top))
            ) as (row, slots):
                self.slots = dict(zip(registers, slots))
                self._row({**where, **dict(zip(c.rest_dims, delinear(row, rest)))})
            self.slots = dict(zip(registers, top))
            self._finish_late(c, kept)
        return k

    def _range(self, c: Chunks) -> tuple[str, str]:
        """First and last row (or lane) of the current chunk."""
        op = self.k.level.scalar.op
        total = self.k.size(c.total)
        low = self.k.scalar(combine(((self.chunk, c.per),)))
        low = op(f"call i64 @llvm.smin.i64(i64 {low}, i64 {total})")
        high = op(f"add i64 {low}, {self.k.size(c.per)}")
        return low, op(f"call i64 @llvm.smin.i64(i64 {high}, i64 {total})")

    # -- one row
    def _row(self, where: dict[int, Index]) -> None:
        k = self.k
        plan = self.plan
        self.stashed.clear()
        for number in range(plan.passes):
            self._pass(number, where)
        row = [where[d] for d in plan.outer]
        sizes = plan.outer_sizes()
        # All values first: a result may lie in the memory of an operand.
        values = [
            k.value(self.results[n], regroup(row, sizes, self.results[n].dims))
            for n in plan.row_outputs
        ]
        if values:
            k.barrier()
        for n, value in zip(plan.row_outputs, values):
            k.store(k.outputs[n], self.results[n].dtype, linear(row, sizes) if row else ZERO, value)

    def _pass(self, number: int, where: dict[int, Index]) -> None:
        k = self.k
        plan = self.plan
        self.current_pass = number
        due = [r for r in plan.row_reduces if plan.level[r] - 1 == number]
        late = [r for r in plan.late_reduces if plan.level[r] == number]
        writes = plan.full_outputs if number == plan.passes - 1 else []
        if not due and not late and not writes:
            return
        registers = [r for r in late if r in self.slots]
        columns = [r for r in late if r not in self.slots]
        in_registers = due + registers
        reducers = [self.reducers[r] for r in in_registers]
        identities = [r.identity(k) for r in reducers]
        work = _Work(reducers, identities, columns, writes)
        length = plan.dims[plan.inner[-1]]
        low, high = self.lane_range or (
            0,
            length if isinstance(length, int) else k.size(length),
        )
        block = BLOCK * k.workers
        blocked = any(r.is_float_sum for r in reducers) and not (
            isinstance(high, int) and high <= block
        )
        nested = len(plan.inner) > 1 or blocked
        sums = list(zip(reducers, identities))
        top = [self._new_slots(r, first) for r, first in sums] if nested else []

        def nest(
            dims: Ints,
            inside: dict[int, Index],
            slots: list[list[str]],
        ) -> None:
            if dims:
                size = plan.dims[dims[0]]
                turns = self._in_blocks("0", k.size(size), size, sums if nested else [], slots)
                with turns as (i, below):
                    nest(dims[1:], {**inside, dims[0]: i}, below)
            elif blocked:
                with k.loop(str(low), str(high), length, block, nonempty=False) as b:
                    first, end = k.block(b, block, str(high))
                    self._lanes(work, inside, first, end, slots)
            else:
                self._lanes(work, inside, low, high, slots)

        nest(plan.inner[:-1], where, top)
        finals = [self._load(r, slot) for r, slot in zip(reducers, top)] if nested else self.finals
        for x, r, accs in zip(in_registers, reducers, finals):
            if x in self.slots:
                self._into(r, self.slots[x], accs)
            else:
                self._bind(x, r.fold_lanes(k, accs))

    def _lanes(
        self,
        work: _Work,
        inside: dict[int, Index],
        first: int | str,
        end: int | str,
        slots: list[list[str]],
    ) -> None:
        """Elements [first, end) of the innermost dimension."""
        k = self.k
        last = self.plan.inner[-1]
        length = self.plan.dims[last]
        carry = [
            (kind, v)
            for r, vs in zip(work.reducers, work.identities)
            for kind, v in zip(r.kinds, vs, strict=True)
        ]

        def body(j: Index, carried: list[str]) -> list[str]:
            point = {**inside, last: j}
            return self._point(point, work.reducers, carried, work.columns, work.writes)

        # up to the first element that is aligned in memory, then from there
        if k.ragged and work.writes:
            head = self._first_aligned({**inside, last: ZERO}, end)
            k.lane_loop(str(first), head, length, body, 1, compact=True)
            first = head
        copies = k.lane_loop(first, end, length, body, self.unroll, carry)
        self.finals = self._split(work.reducers, [list(c) for c in copies])
        for r, slot, accs in zip(work.reducers, slots, self.finals):
            self._into(r, slot, accs)

    def _first_aligned(self, row: dict[int, Index], end: int | str) -> str:
        """Number of the first element of a row, at most `end`, that is aligned in memory."""
        k = self.k
        dims = self.plan.dims
        op = k.level.scalar.op
        start = k.scalar(linear([row[d] for d in range(len(dims))], dims))
        missing = op(f"and i64 {op(f'sub i64 0, {start}')}, {k.lanes - 1}")
        return op(f"call i64 @llvm.smin.i64(i64 {missing}, i64 {end})")

    def _bind(self, x: Instruction, folded: Sequence[str]) -> None:
        """Give a row's reduction its scalar accumulators as value."""
        k = self.k
        r = self.reducers[x]
        values = r.grouped(r.finish(k, folded))
        # An index that seems to vary within the row still means this row.
        k.bind_reduce(
            x,
            self.gtes.get(x, ()),
            lambda index: [k.splat(v, t) if k.e.lanes > 1 else v for v, t in zip(values, r.dtypes)],
        )

    @contextmanager
    def _in_blocks(
        self,
        low: str,
        high: str,
        extent: Size,
        sums: list[tuple[Reducer, list[str]]],
        slots: list[list[str]],
        kept: Index | None = None,
    ) -> Iterator[tuple[Index, list[list[str]]]]:
        """A scalar loop. When it is long, accumulators collect ROWS_BLOCK iterations before they
        are added to `slots`: sums stay accurate. Yields the index and the accumulators to use
        inside. `kept`: it runs over a chunk's rows; column sums then collect a block apart, too."""
        k = self.k
        columns: list[tuple[Instruction, Index]] = []
        if kept is not None:
            blocked = self.column_blocks
            columns = [(x, kept) for x in self._columns()]
        else:
            short = isinstance(extent, int) and extent <= 2 * ROWS_BLOCK
            blocked = not short and any(r.is_float_sum for r, _ in sums)
        if not blocked:
            nonempty = isinstance(extent, int) and low == "0" and extent > 0
            with k.loop(low, high, extent, nonempty=nonempty) as i:
                yield i, slots
            return
        with k.loop(low, high, extent, ROWS_BLOCK, nonempty=False) as b:
            below = [self._new_slots(r, first) for r, first in sums]
            for place in columns:
                self._fill_columns(*place, block=True)
            around = self.in_block
            self.in_block = around or kept is not None
            with k.loop(*k.block(b, ROWS_BLOCK, high), extent) as i:
                yield i, below
            self.in_block = around
            for (r, _), slot, inner in zip(sums, slots, below):
                self._into(r, slot, self._load(r, inner))
            for place in columns:
                self._flush_columns(*place)

    def _point(
        self,
        where: dict[int, Index],
        reducers: list[Reducer],
        carried: list[str],
        columns: Sequence[Instruction],
        writes: Sequence[int],
    ) -> list[str]:
        """One vector: the next accumulators; column sums and results go to memory."""
        k = self.k
        plan = self.plan
        point = [where[d] for d in range(len(plan.dims))]
        at = linear(point, plan.dims)
        self.where = where

        def index_of(x: Instruction) -> tuple[Index, ...]:
            return regroup(point, plan.dims, x.dims)

        following: list[str] = []
        used = 0
        for r in reducers:
            old = carried[used : used + len(r.kinds)]
            used += len(r.kinds)
            following += r.keep_masked(k, r.combine(k, old, r.values(k, index_of)), old)
        for x in columns:
            self._add_column(x, where, index_of)
        if self.current_pass == plan.passes - 1 and plan.passes > 1:
            self._prefetch(at, product(plan.inner_sizes()))
        for n in writes:
            x = self.results[n]
            k.store(k.outputs[n], x.dtype, at, k.value(x, index_of(x)))
        return following

    def _prefetch(self, at: Index, ahead: Size) -> None:
        """While elements are read for the last time, from the cache, memory brings those that
        follow `ahead` of them: the next block, or row."""
        k = self.k
        if (
            not k.target.steers_caches
            or not isinstance(ahead, int)
            or ahead < PREFETCHED_ROW
            or k.e.lanes == 1
            or k.level.tail is not None
        ):
            return
        for x, pointer in k.leaves.items():
            if x.size == self.plan.size and x.kind != "c":
                k.prefetch(pointer, STORAGE[x.dtype].memory, at + ahead)

    def _split(self, reducers: list[Reducer], copies: list[list[str]]) -> list[list[str]]:
        """Per reducer the accumulators of all unrolled copies folded into one."""
        finals = []
        used = 0
        for r in reducers:
            n = len(r.kinds)
            finals.append(r.fold_copies(self.k, [c[used : used + n] for c in copies]))
            used += n
        return finals

    # -- accumulators in memory
    def _type(self, kind: str) -> str:
        return f"<{self.k.lanes} x {kind}>" if self.k.lanes > 1 else kind

    def _new_slots(self, r: Reducer, first: Sequence[str]) -> list[str]:
        slots = [self.k.alloca(self._type(kind)) for kind in r.kinds]
        wide = Emit(self.k.lanes, self.k.level.lines, self.k.unit)
        for slot, kind, v in zip(slots, r.kinds, first, strict=True):
            wide.do(f"store {self._type(kind)} {wide.splat(kind, v)}, ptr {slot}")
        return slots

    def _load(self, r: Reducer, slots: Sequence[str]) -> list[str]:
        return [
            self.k.level.scalar.op(f"load {self._type(kind)}, ptr {slot}")
            for kind, slot in zip(r.kinds, slots, strict=True)
        ]

    def _into(self, r: Reducer, slots: Sequence[str], accs: Sequence[str]) -> None:
        new = r.fold_copies(self.k, [self._load(r, slots), list(accs)])
        for slot, kind, v in zip(slots, r.kinds, new, strict=True):
            self.k.level.scalar.do(f"store {self._type(kind)} {v}, ptr {slot}")

    # -- late results
    def _ends_in_row(self, r: Instruction) -> bool:
        inner = self.plan.inner
        row = len(inner) == 1 and self.plan.late_kept[r][-1:] == inner
        return row and isinstance(self.plan.dims[inner[0]], int)

    def widths(self, r: Instruction) -> tuple[Dims, Dims]:
        """The dimensions that a late reduction keeps, and those of its partial results in a chunk:
        the last one has whole vectors where `padded`."""
        kept = tuple(self.plan.dims[d] for d in self.plan.late_kept[r])
        if not self.k.padded.intersection(self._pointers(r)[:1]):
            return kept, kept
        return kept, (*kept[:-1], round_up(kept[-1], self.k.lanes))

    def _columns(self) -> list[Instruction]:
        """Late reductions with a result per column: they accumulate in memory."""
        return [
            r for r in self.plan.late_reduces if set(self.plan.late_kept[r]) & set(self.plan.inner)
        ]

    def _start_late(self, kept: Index) -> None:
        columns = self._columns()
        for r in self.plan.late_reduces:
            if r in columns:
                self._fill_columns(r, kept)
            else:
                self.slots[r] = self._new_slots(self.reducers[r], self.reducers[r].identity(self.k))

    def _pointers(self, r: Instruction, block: bool = False) -> list[str]:
        """The partial buffers of a late reduction; `block`: those for the current block of rows."""
        return self.k.outputs[self.partials[r] + (self.partial_count if block else 0) :]

    def _each_column(
        self, r: Instruction, kept: Index, write: Callable[[Index], None], unroll: int = 1
    ) -> None:
        """Loop over the current item's columns in the partial buffer."""
        k = self.k
        plan = self.plan
        inside = [d for d in plan.late_kept[r] if d in plan.inner]
        count = product(plan.dims[d] for d in inside)
        _, widths = self.widths(r)
        base = combine(((self.chunk, product(widths)), (kept, product(widths[-len(inside) :]))))
        end = count if isinstance(count, int) else k.size(count)
        k.lane_loop(0, end, count, lambda j, _: write(base + j), unroll)
        k.barrier()

    def _fill_columns(self, r: Instruction, kept: Index, block: bool = False) -> None:
        k = self.k
        reducer = self.reducers[r]
        first = reducer.identity(k)
        pointers = self._pointers(r, block)
        self._each_column(
            r, kept, lambda at: reducer.keep(k, pointers, at, reducer.widened(k, first))
        )

    def _flush_columns(self, r: Instruction, kept: Index) -> None:
        """Add the block's column sums to the chunk's."""
        k = self.k
        reducer = self.reducers[r]
        whole = self._pointers(r)

        def write(at: Index) -> None:
            both = (reducer.fetched(k, p, at) for p in (whole, self._pointers(r, True)))
            reducer.keep(k, whole, at, reducer.combine(k, *both))

        k.barrier()
        self._each_column(r, kept, write, 2)

    def _add_column(
        self,
        x: Instruction,
        where: dict[int, Index],
        index_of: Callable[..., Any],
    ) -> None:
        k = self.k
        plan = self.plan
        r = self.reducers[x]
        _, widths = self.widths(x)
        column = linear([where[d] for d in plan.late_kept[x]], widths)
        at = combine(((self.chunk, product(widths)), (column, 1)))
        pointers = self._pointers(x, self.in_block)
        old = r.fetched(k, pointers, at)
        r.keep(k, pointers, at, r.combine(k, old, r.values(k, index_of)))

    def _finish_late(self, c: Chunks, kept: Index) -> None:
        k = self.k
        for x, slots in self.slots.items():
            r = self.reducers[x]
            folded = r.fold_lanes(k, self._load(r, slots))
            r.keep(k, self._pointers(x), combine(((self.chunk, c.kept), (kept, 1))), folded)

    # -- expensive values kept between passes
    def _make_stash(self) -> None:
        """Values that several passes need are computed once per row and kept on the stack, when the
        row is short."""
        self.stashed: dict[Instruction, int] = {}  # the pass that kept it, in the current row
        length = product(self.plan.inner_sizes())
        if not isinstance(length, int) or length > self.forms.stash_limit:
            return
        for x in self.plan.stash[:4]:
            storage = STORAGE[x.dtype]
            form = {"float": "f32", "double": "f64"}.get(storage.register)
            if storage.parts == 2 or form is None:
                continue
            slot = self.k.alloca(storage.register, length)

            def value(
                index: tuple[Index, ...], x: Instruction = x, slot: str = slot, form: str = form
            ) -> Value | None:
                at = self._inner_position(x, index)
                if at is None:
                    return None
                if self.stashed.setdefault(x, self.current_pass) < self.current_pass:
                    return self.k.load(slot, form, at)
                v = Kernel._compute(self.k, x, index)
                self.k.store(slot, form, at, v)
                return v

            self.k.computed[x] = value

    def _inner_position(self, x: Instruction, index: tuple[Index, ...]) -> Index | None:
        """Position within the current row of a full-size index; None when it is some other
        point."""
        if self.where is None:
            return None
        point = [self.where[d] for d in range(len(self.plan.dims))]
        if regroup(point, self.plan.dims, x.dims) != index:
            return None
        return linear([self.where[d] for d in self.plan.inner], self.plan.inner_sizes())
