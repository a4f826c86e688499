"""Rows that lie along the minor dimension (softmax over channels, a sum over a middle dimension):
one row per lane.

An item of work is a block of neighbouring rows. Its accumulators and what is computed per row are
small arrays on the stack; every pass walks the rows' elements outside and the block inside, so
memory is read in contiguous bursts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch_hlo.hlo.ir import Computation, Instruction, Ints, Size, Users, ceildiv, fixed, product

from ..codegen import Index
from ..codegen.index import ZERO, delinear, divide, linear, regroup
from ..fusion import fusion_table as table
from ..llvm.scalar import STORAGE, Value
from .reducer import Reducer
from .row import ROWS_BLOCK
from .row_kernel import RowForms, RowKernel, stream, tuple_users
from .row_plan import RowPlan

LEAST_VECTORS = 4  # in items of small arrays, so that all threads have some
ITEMS = 16
# which row is asked for, where its distance in bytes is at least so large
ROWS_AHEAD = 8
FAR = 1024


# (indices within the rows, position in the block, accumulators): what is written per element
PointBody = Callable[[dict[int, Index], Index, dict[Instruction, list[str]]], None]


class StridedEmitter:
    """Writes the kernel of a "strided" plan."""

    def __init__(self, forms: RowForms, computation: Computation, plan: RowPlan) -> None:
        self.plan = plan
        self.results = computation.results
        self.reducers = {r: Reducer(r) for r in plan.row_reduces}
        self.gtes = tuple_users(plan.order)
        moved = any(x.op in table.MOVES for x in plan.order)
        self.majors, self.minors = self._split(forms.neighbours(moved))
        self.width = product(plan.dims[d] for d in self.minors)
        self.k = forms.column_kernel(plan, self.width, computation.params, len(self.results))
        self.block = forms.block
        if isinstance(self.width, int):
            others = product(plan.dims[d] for d in self.majors)
            while (
                self.block > forms.lanes * LEAST_VECTORS
                and isinstance(others, int)
                and ceildiv(self.width, self.block) * others < ITEMS
            ):
                self.block //= 2
            self.block = min(self.block, max(1, self.width))
        self.blocks = ceildiv(self.width, self.block * self.k.columns)
        self.accs: dict[Instruction, list[str]] = {}

    def stream(self, nbytes: int) -> None:
        """Write results past the caches when they are larger than this together."""
        if isinstance(self.width, int) and self.width % self.k.lanes == 0:
            stream(self.k, self.plan, self.results, nbytes)

    def _split(self, wanted: int) -> tuple[Ints, Ints]:
        """The outer dimensions: those before, and the last ones, as many neighbours as make a row
        of blocks wide enough."""
        outer = self.plan.outer
        dims = self.plan.dims
        n = 1
        while (
            n < len(outer)
            and outer[-n - 1] == outer[-n] - 1
            and all(isinstance(dims[d], int) for d in outer[-n - 1 :])
        ):
            if fixed(product(dims[d] for d in outer[-n:])) >= wanted:
                break
            n += 1
        return outer[:-n], outer[-n:]

    @property
    def items(self) -> Size:
        return self.blocks * product(self.plan.dims[d] for d in self.majors)

    def emit(self) -> RowKernel:
        k = self.k
        plan = self.plan
        with k.loop("%lo", "%hi", self.items) as item:
            majors = self.majors
            major, block = divide(item, self.blocks) if majors else (ZERO, item)
            sizes = tuple(plan.dims[d] for d in majors)
            self.where = dict(zip(majors, delinear(major, sizes)))
            self.base = self.k.column(block * self.block)
            op = k.level.scalar.op
            left = op(f"sub i64 {k.size(self.width)}, {k.scalar(self.base)}")
            self.count: int | str = op(f"call i64 @llvm.smin.i64(i64 {left}, i64 {self.block})")
            if isinstance(self.width, int) and self.width % self.block == 0:
                self.count = self.block
            for number in range(plan.passes):
                self._pass(number)
            self._row_results()
        return k

    def _rows(self, body: Callable[..., Any], every: bool = False) -> None:
        """A vector loop over the block; `body(j)` gets the position in it. `every`: it runs for
        every element of the rows, and is unrolled; what runs once per row is written once, which
        keeps the code short."""
        unroll = 1 if not every else LEAST_VECTORS if isinstance(self.count, int) else 2
        self.k.lane_loop(
            0,
            self.count,
            self.block,
            lambda j, _: body(j) or [],
            unroll,
            compact=not every,
        )

    def _point(self, inside: dict[int, Index], j: Index) -> list[Index]:
        where = {**self.where, **inside, **self._minor(j)}
        return [where[d] for d in range(len(self.plan.dims))]

    def _row(self, j: Index) -> list[Index]:
        """The row at position `j` of the block: its index over the outer dimensions."""
        where = {**self.where, **self._minor(j)}
        return [where[d] for d in self.plan.outer]

    def _minor(self, j: Index) -> dict[int, Index]:
        return dict(
            zip(self.minors, delinear(self.base + j, tuple(self.plan.dims[d] for d in self.minors)))
        )

    def _row_value(self, x: Instruction, j: Index) -> Value:
        return self.k.value(x, regroup(self._row(j), self.plan.outer_sizes(), x.dims))

    def _pass(self, number: int) -> None:
        k = self.k
        plan = self.plan
        due = [r for r in plan.row_reduces if plan.level[r] - 1 == number]
        writes = plan.full_outputs if number == plan.passes - 1 else []
        if not due and not writes:
            return
        for x in due:
            self.accs[x] = self._new(x)
        blocked = [x for x in due if self.reducers[x].is_float_sum]

        def body(inside: dict[int, Index], j: Index, accs: dict[Instruction, list[str]]) -> None:
            point = self._point(inside, j)
            for x in due:
                r = self.reducers[x]
                values = r.values(k, lambda o: regroup(point, plan.dims, o.dims))
                r.keep(k, accs[x], j, r.combine(k, r.fetched(k, accs[x], j), values))
            at = linear(point, plan.dims)
            if number == 0:
                self._prefetch(at)
            for n in writes:
                x = self.results[n]
                value = k.value(x, regroup(point, plan.dims, x.dims))
                k.store(k.outputs[n], x.dtype, at, value)

        self._walk(plan.inner, {}, self.accs, blocked, body)
        self._finish(due)

    def _walk(
        self,
        dims: Ints,
        inside: dict[int, Index],
        accs: dict[Instruction, list[str]],
        blocked: list[Instruction],
        body: PointBody,
    ) -> None:
        """Loops over `dims` of the rows, around loops over the block. Sums of `blocked` are taken
        in blocks of elements where there are many, so that they stay accurate."""
        k = self.k
        plan = self.plan
        if not dims:
            self._rows(lambda j: body(inside, j, accs), every=True)
            return
        size = plan.dims[dims[0]]
        # threads that share a column take turns along the first dimension
        slices = k.slices if dims == plan.inner else 1
        start = k.slice if slices > 1 else "0"
        if not blocked or isinstance(size, int) and size <= 2 * ROWS_BLOCK * slices:
            nonempty = isinstance(size, int) and slices == 1
            with k.loop(start, k.size(size), size, slices, nonempty=nonempty) as i:
                self._walk(dims[1:], {**inside, dims[0]: i}, accs, blocked, body)
            return
        if slices > 1:
            start = k.level.scalar.op(f"mul i64 {start}, {ROWS_BLOCK}")
        with k.loop(start, k.size(size), size, ROWS_BLOCK * slices, nonempty=False) as b:
            below = {**accs, **{x: self._new(x) for x in blocked}}
            with k.loop(*k.block(b, ROWS_BLOCK, k.size(size)), size) as i:
                self._walk(dims[1:], {**inside, dims[0]: i}, below, blocked, body)
            for x in blocked:
                self._rows(lambda j, x=x: self._add(x, accs, below, j))

    def _add(
        self,
        x: Instruction,
        accs: dict[Instruction, list[str]],
        below: dict[Instruction, list[str]],
        j: Index,
    ) -> None:
        """Add what a block has to what is above it."""
        r = self.reducers[x]
        k = self.k
        total = r.combine(k, r.fetched(k, accs[x], j), r.fetched(k, below[x], j))
        r.keep(k, accs[x], j, total)

    def _prefetch(self, at: Index) -> None:
        """A row that comes later is asked for: the processor's prefetcher stops at pages, and
        neighbours along a row lie in several."""
        k = self.k
        dims = self.plan.dims
        gap = product(dims[self.plan.inner[-1] + 1 :])
        vectors = k.e.lanes > 1 and k.level.tail is None
        if not (k.target.steers_caches and vectors and isinstance(gap, int)):
            return
        for x, pointer in k.leaves.items():
            storage = STORAGE[x.dtype]
            if x.size == self.plan.size and storage.parts == 1 and gap * storage.bytes >= FAR:
                k.prefetch(pointer, storage.memory, at + gap * ROWS_AHEAD)

    # -- accumulators
    def _new(self, x: Instruction) -> list[str]:
        """Accumulators of a block of rows, set to the identity."""
        r = self.reducers[x]
        k = self.k
        first = r.identity(k)
        slots = [
            k.alloca(STORAGE[dtype].memory, self.block * STORAGE[dtype].parts)
            for dtype in r.stored_dtypes()
        ]

        self._rows(lambda j: r.keep(k, slots, j, r.widened(k, first)))
        return slots

    # -- values per row
    def _finish(self, due: list[Instruction]) -> None:
        """Initial values enter; then the values per row that full-size ones read are computed once
        and kept."""
        k = self.k
        for x in due:
            r = self.reducers[x]
            slots = self.accs[x]
            if k.slices > 1:
                self._rows(
                    lambda j, r=r, slots=slots: r.keep(
                        k, slots, j, k.fold_slices(r, r.fetched(k, slots, j))
                    )
                )
            if r.needs_initial():
                self._rows(
                    lambda j, r=r, slots=slots: r.keep(
                        k, slots, j, r.finish(k, r.fetched(k, slots, j))
                    )
                )
            k.bind_reduce(x, self.gtes.get(x, ()), partial(self._finished, x))
        for x in self._read_per_row(due):
            slot = k.alloca(STORAGE[x.dtype].memory, self.block * STORAGE[x.dtype].parts)
            self._rows(lambda j: k.store(slot, x.dtype, j, self._row_value(x, j)))
            k.computed[x] = partial(self._kept, x, slot)

    def _finished(self, x: Instruction, index: tuple[Index, ...]) -> list[Value]:
        """What a reduction has folded, of the row that `index` means."""
        r = self.reducers[x]
        at = self._position(x, index)
        return r.grouped(r.finish_rounded(self.k, r.fetched(self.k, self.accs[x], at)))

    def _kept(self, x: Instruction, slot: str, index: tuple[Index, ...]) -> Value:
        return self.k.load(slot, x.dtype, self._position(x, index))

    def _read_per_row(self, due: list[Instruction]) -> list[Instruction]:
        """Instructions of row size, made from the reductions just finished, that something of
        another size reads."""
        plan = self.plan
        fresh = set(due)
        # what needs a later reduction waits for it
        level = max((plan.level[x] for x in due), default=0)
        reads: Users = {}
        for x in plan.order:
            for o in x.operands:
                reads.setdefault(o, []).append(x)
        found = []
        for x in plan.order:
            if (
                x in fresh
                or x.op == "reduce"
                or plan.level[x] > level
                or not any(o in fresh for o in x.operands)
            ):
                continue
            if x.op == "broadcast" or x.is_tuple or x.size == plan.size:
                continue
            fresh.add(x)
            if x.op != "get-tuple-element" and any(
                u.op == "broadcast" or u.size != x.size for u in reads.get(x, ())
            ):
                found.append(x)
        return found

    def _position(self, x: Instruction, index: tuple[Index, ...]) -> Index:
        """Position in the block of the row that an index of a row-size value means."""
        row = linear(index, x.shape.arrays[0].dims)
        sizes = tuple(self.plan.dims[d] for d in self.majors)
        first = linear([*(self.where[d] for d in self.majors), self.base], (*sizes, self.width))
        return row - first

    def _row_results(self) -> None:
        k = self.k
        sizes = self.plan.outer_sizes()

        def body(j: Index) -> None:
            values = [self._row_value(self.results[n], j) for n in self.plan.row_outputs]
            k.barrier()  # a result may lie in the memory of an operand
            for n, value in zip(self.plan.row_outputs, values, strict=True):
                k.store(k.outputs[n], self.results[n].dtype, linear(self._row(j), sizes), value)

        if self.plan.row_outputs:
            self._rows(body)
