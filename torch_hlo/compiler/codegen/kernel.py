"""A kernel under construction: loops, addresses, and the values of instructions inside them.

    k = Kernel(target, lanes=16, leaves=[p, q])
    with k.loop("%lo", "%hi", rows) as i:                       # scalar loop
        # 16 columns at a time
        k.lane_loop(0, columns, lambda j, _: k.store(…, k.value(root, (i, j))))
    # void name(i64 lo, i64 hi, ptr p0, ptr p1, …, i64 n0, …)
    name = k.define(program, "name")

`k.value(x, index)` is the element of `x` at `index`, written at the loop level where the index
varies: what does not depend on the lane loop is one scalar outside of it, what does is a vector of
`lanes`. Leaves are loaded; every other instruction goes through VALUES. Indices are symbolic
(index.py), so an address becomes a contiguous load, a splat or a gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol

from torch_hlo.hlo.ir import Size

from ..llvm import Emit
from .index import Index, Var, constant, of, variable
from .kernel_values import KernelValues, Level
from .program import Program

# what is written per vector: (index, what is carried) -> what is carried on
Body = Callable[[Index, list[str]], list[str] | None]
Carried = list[list[str]]  # what each copy of a loop's body hands on to the next turn


class Fold(Protocol):
    """How accumulators, register values of `kinds`, become one (compiler/loops/reducer.py)."""

    op: str | None
    kinds: list[str]

    def combine(self, k: Kernel, a: Sequence[str], b: Sequence[str]) -> list[str]: ...


class Kernel(KernelValues):
    """A KernelValues with the loops around what is computed."""

    # -- loops
    @contextmanager
    def loop(
        self,
        low: str | int,
        high: str | int,
        extent: Size,
        step: int = 1,
        nonempty: bool = True,
    ) -> Iterator[Index]:
        """Scalar loop over [low, high); yields its Index, whose values are in [0, extent).
        `nonempty`: low < high is known."""
        parent = self.levels[-1]
        # a thread, or a group, has one item: see compiler/gpu/gpu_program.py
        if self.target.item_per_call and (low, high) == ("%lo", "%hi"):
            yield of(self.named("%lo", extent, 0))
            return
        label = self._label("loop")
        end = self._label("end")
        name = f"%i{self.unit.number()}"
        var = self.named(name, extent, parent.depth + 1)
        level = self._enter([], label, lanes=1)
        try:
            yield of(var)
        finally:
            self._pop(parent)
        before = parent.label
        lines = parent.lines
        if not nonempty:
            test = parent.scalar.op(f"icmp slt i64 {low}, {high}")
            lines.append(f"  br i1 {test}, label %{label}, label %{end}")
        else:
            lines.append(f"  br label %{label}")
        lines += [
            f"{label}:",
            f"  {name} = phi i64 [{low}, %{before}], [{name}n, %{level.label}]",
        ]
        lines += level.lines
        lines += [
            f"  {name}n = add nuw nsw i64 {name}, {step}",
            f"  {name}c = icmp slt i64 {name}n, {high}",
            f"  br i1 {name}c, label %{label}, label %{end}",
            f"{end}:",
        ]
        parent.label = end

    def block(self, first: Index, size: int, high: str) -> tuple[str, str]:
        """Where a block of `size` iterations begins and ends, the last one at `high`."""
        start = self.scalar(first)
        op = self.level.scalar.op
        past = op(f"add i64 {start}, {size}")
        return start, op(f"call i64 @llvm.smin.i64(i64 {past}, i64 {high})")

    def lane_loop(
        self,
        low: str | int,
        high: str | int,
        extent: Size,
        body: Body,
        unroll: int = 1,
        carry: Sequence[tuple[str, str]] = (),
        aligned: bool = False,
        compact: bool = False,
    ) -> Carried:
        """Vector loop over [low, high) in steps of `lanes`; the range may be empty. `low` is a
        multiple of `lanes`, unless the kernel is `ragged`.

        `body(index, carried)` writes one vector's worth; it runs once per unrolled copy and for the
        tail, in which `mask()` is set. `carry`: (scalar kind, initial scalar operand) of values
        carried between iterations, `lanes` wide, each copy having its own; the body returns the
        next ones (in the tail it must leave masked lanes as they were). Returns the final ones per
        copy.
        `aligned`: low and high are multiples of lanes * unroll, there is no tail. `compact`: write
          the body once, always masked where the target masks stores (for bodies so long that a mask
          costs nothing and another copy much).
        """
        compact = compact and self.target.masks_stores
        var, kinds, state = self._carried(extent, carry, unroll)
        saved = self.lane_var
        self.lane_var = var
        try:
            if isinstance(low, int) and isinstance(high, int):
                aligned = (high - low) % (self.lanes * unroll) == 0
                if not compact or high - low <= self.lanes:
                    return self._static_lanes(var, low, high, body, kinds, state)
            if aligned or compact:
                masked = compact and not aligned and self.lanes > 1
                return self._vector_loop(
                    var,
                    str(low),
                    str(high),
                    body,
                    kinds,
                    state,
                    nonempty=False,
                    tail=masked,
                )
            return self._dynamic_lanes(var, low, high, body, kinds, state)
        finally:
            self.lane_var = saved

    def _carried(
        self, extent: Size, carry: Sequence[tuple[str, str]], unroll: int = 1
    ) -> tuple[Var, list[str], Carried]:
        """The variable of a new lane loop, and types and first values of what it carries."""
        parent = self.levels[-1]
        var = variable("loop", (f"%i{self.unit.number()}",), extent, parent.depth + 1)
        outside = Emit(self.lanes, parent.lines, parent.scalar.unit)
        state = [[outside.splat(kind, value) for kind, value in carry] for _ in range(unroll)]
        return var, [outside.type(kind) for kind, _ in carry], state

    def lanes_at(self, first: Index, extent: Size, body: Callable[[Index], None]) -> None:
        """One vector of a loop over [0, extent) whose iterations are threads: `body(index)` writes
        the lanes from `first` on, a multiple of `lanes` that divides `extent`."""
        with self._lanes_from(self.scalar(first), extent) as index:
            body(index)

    @contextmanager
    def _lanes_from(self, start: str, extent: Size) -> Iterator[Index]:
        """The index of one vector of lanes, the first one of which is `start`."""
        parent = self.levels[-1]
        var = variable("loop", (f"%t{self.unit.number()}",), extent, parent.depth + 1)
        self._names[var] = start
        saved = self.lane_var
        self.lane_var = var
        self._enter(parent.lines)
        with self._stored_last():
            yield of(var)
        self._pop(parent)
        self.lane_var = saved

    def tile(
        self, row: Var, column: Var, body: Callable[[Index, Index], None], looped: bool
    ) -> None:
        """A square tile: `body(number, lane index)` writes row `row + number`, for numbers below
        `lanes`; the lanes start at `column`. Arrays that are contiguous along `row` are loaded in
        blocks and transposed in registers. Both variables are `tile_start`s; tiles may overlap
        where sizes do not divide, so nothing that is written may be read. `looped`: the body is
        written once, in a loop over the rows."""
        every = [constant(n) for n in range(self.lanes)]
        with self.loop(0, self.lanes, self.lanes) if looped else nullcontext() as number:
            self._tile_rows(row, column, [number] if number else every, body)

    def _tile_rows(
        self,
        row: Var,
        column: Var,
        numbers: Sequence[Index],
        body: Callable[[Index, Index], None],
    ) -> None:
        lines = self.levels[-1].lines
        blocks: dict[tuple[str, Index], list[str]] = {}
        with self._lanes_from(self._names[column], column.extent + self.lanes - 1) as index:
            for number in numbers:
                self._tile = row, column, number, blocks
                before = len(lines)
                body(number, index)
                self.body_lines = max(self.body_lines, len(lines) - before)
            self._tile = None

    def tile_start(self, tile: Index, extent: int) -> Var:
        """The variable of a tile's first row: `lanes * tile`, moved back where the last tile would
        leave [0, extent)."""
        start = self.scalar(tile * self.lanes)
        level = self.levels[tile.depth]
        if extent % self.lanes:
            start = level.scalar.op(
                f"call i64 @llvm.umin.i64(i64 {start}, i64 {extent - self.lanes})"
            )
        starts = extent - self.lanes + 1
        var = variable("loop", (f"%t{self.unit.number()}",), starts, tile.depth)
        self._names[var] = start
        return var

    def _static_lanes(
        self,
        var: Var,
        low: int,
        high: int,
        body: Body,
        kinds: list[str],
        state: Carried,
    ) -> Carried:
        unroll = len(state)
        step = self.lanes * unroll
        main_end = low + (high - low) // step * step
        if main_end - low == step:
            main_end = low  # a single iteration is straight-line code
        parent = self.levels[-1]
        if main_end > low:
            state = self._vector_loop(
                var,
                str(low),
                str(main_end),
                body,
                kinds,
                state,
                nonempty=True,
            )
        copies = []
        for copy, at in enumerate(range(main_end, high, self.lanes)):
            left = high - at
            tail = (
                None
                if left >= self.lanes
                else "<"
                + ", ".join(f"i1 {'true' if i < left else 'false'}" for i in range(self.lanes))
                + ">"
            )
            copies.append((copy % unroll, at, tail))
        lines: list[str] = []
        with self._stored_last():
            for copy, at, tail in copies:
                self._names[var] = str(at)
                self._enter(lines, tail=tail)
                try:
                    state[copy] = body(of(var), state[copy]) or state[copy]
                    self.body_lines = self.body_lines or len(lines)
                finally:
                    self._pop(parent)
        parent.lines += lines
        return state

    def _dynamic_lanes(
        self,
        var: Var,
        low: str | int,
        high: str | int,
        body: Body,
        kinds: list[str],
        state: Carried,
    ) -> Carried:
        parent = self.levels[-1]
        step = self.lanes * len(state)
        op = parent.scalar.op
        count = op(f"sub i64 {high}, {low}") if low != 0 and low != "0" else high
        whole = (
            op(f"and i64 {count}, {-step}")
            if step & (step - 1) == 0
            else op(f"sub i64 {count}, {op(f'urem i64 {count}, {step}')}")
        )
        main_end = op(f"add i64 {low}, {whole}") if low != 0 and low != "0" else whole
        if isinstance(var.extent, int) and var.extent < step:
            main_end = str(low)
        else:
            state = self._vector_loop(var, str(low), main_end, body, kinds, state, nonempty=False)
        if step > 1:
            state[:1] = self._vector_loop(
                var,
                main_end,
                str(high),
                body,
                kinds,
                state[:1],
                nonempty=False,
                tail=self.lanes > 1,
            )
        return state

    def _vector_loop(
        self,
        var: Var,
        low: str,
        high: str,
        body: Body,
        kinds: list[str],
        state: Carried,
        nonempty: bool,
        tail: bool = False,
        step: int = 0,
    ) -> Carried:
        parent = self.levels[-1]
        label = self._label("lanes")
        end = self._label("end")
        name = f"%i{self.unit.number()}"
        lines: list[str] = []
        mask = self._tail_mask(lines, name, high) if tail else None
        phis = [[f"%c{self.unit.number()}" for _ in kinds] for _ in state]
        self._names[var] = name
        results = self._copies(lines, label, mask, var, body, phis)
        self.lane_var = var
        before = parent.label
        out = parent.lines
        if nonempty:
            out.append(f"  br label %{label}")
        else:
            test = parent.scalar.op(f"icmp slt i64 {low}, {high}")
            out.append(f"  br i1 {test}, label %{label}, label %{end}")
        out += [
            f"{label}:",
            f"  {name} = phi i64 [{low}, %{before}], [{name}n, %{label}]",
        ]
        for copy in zip(phis, state, results, strict=True):
            out += [
                f"  {p} = phi {kind} [{first}, %{before}], [{following}, %{label}]"
                for kind, p, first, following in zip(kinds, *copy, strict=True)
            ]
        out += lines
        out += [
            f"  {name}n = add nuw nsw i64 {name}, {step or self.lanes * len(state)}",
            f"  {name}c = icmp slt i64 {name}n, {high}",
            f"  br i1 {name}c, label %{label}, label %{end}",
            f"{end}:",
        ]
        parent.label = end
        if nonempty:
            return results
        merge = f"phi {{}} [{{}}, %{before}], [{{}}, %{label}]".format
        return [
            [parent.scalar.op(merge(*ends)) for ends in zip(kinds, *both, strict=True)]
            for both in zip(state, results, strict=True)
        ]

    def _copies(
        self,
        lines: list[str],
        label: str,
        tail: str | None,
        var: Var,
        body: Body,
        carried: Carried,
    ) -> Carried:
        """Write the body once per entry of `carried`, and then what they all store. Returns what is
        carried on."""
        parent = self.levels[-1]
        results: Carried = []
        if isinstance(var.extent, int) and tail is None:
            # the first copy stays so far from the end as the others are ahead of it
            reach = max(self.lanes, var.extent - self.lanes * (len(carried) - 1))
            name = self._names[var]
            self.lane_var = var = variable("loop", var.payload, reach, var.depth)
            self._names[var] = name
        with self._stored_last():
            for copy, values in enumerate(carried):
                self._enter(lines, label, tail)
                try:
                    results.append(body(of(var) + copy * self.lanes, values) or values)
                    self.body_lines = self.body_lines or len(lines)
                finally:
                    self._pop(parent)
        return results

    @contextmanager
    def _stored_last(self) -> Iterator[None]:
        """What is stored inside is written at the end, after all that is loaded."""
        pending: list[Callable[[], None]] = []
        outer = self._pending
        self._pending = pending
        yield
        self._pending = outer
        for write in pending:
            write()

    def _tail_mask(self, lines: list[str], position: str, high: str) -> str:
        """Which lanes from `position` on are below `high`."""
        e = Emit(self.lanes, lines, self.unit)
        one = Emit(1, lines, self.unit)
        left = one.op(f"sub i64 {high}, {position}")
        capped = one.op(f"call i64 @llvm.umin.i64(i64 {left}, i64 {self.lanes})")
        small = one.op(f"trunc i64 {capped} to i32")
        return e.typed("i32").cmp("ult", e.iota("i32"), e.splat("i32", small))

    # -- groups of threads that work on one item together (compiler/loops/gpu_rows.py)
    workers = 1

    def fold_threads(self, reducer: Fold, accs: Sequence[str]) -> list[str]:
        """Scalar accumulators folded over the threads of a group."""
        return list(accs)

    columns = 1  # neighbouring columns of an item whose threads have one each
    slices = 1  # threads that share a column; `slice` is the number of this one
    slice = "0"

    def column(self, block: Index) -> Index:
        """The column of an item, or of a thread of it."""
        return block

    def fold_slices(self, reducer: Fold, accs: Sequence[str]) -> list[str]:
        """Scalar accumulators folded over the threads that share a column."""
        return list(accs)

    def barrier(self) -> None:
        """What any thread of the group wrote before is seen by all after it."""

    def named(self, name: str, extent: Size, depth: int) -> Var:
        """A variable whose value is the operand `name`."""
        var = variable("loop", (name,), extent, depth)
        self._names[var] = name
        return var

    def _enter(
        self,
        lines: list[str],
        label: str = "",
        tail: str | None = None,
        lanes: int = 0,
    ) -> Level:
        """A level within the innermost one, of vectors unless `lanes` says otherwise; its code
        goes on in the block `label`, or in the outer level's."""
        parent = self.levels[-1]
        level = Level(
            parent.depth + 1, lines, label or parent.label, lanes or self.lanes, self.unit, tail
        )
        self.levels.append(level)
        self.level = level
        self.e = level.emit
        return level

    def _pop(self, parent: Level) -> None:
        self.levels.pop()
        self.level = parent
        self.e = parent.emit

    def _label(self, hint: str) -> str:
        return f"{hint}.{self.unit.number()}"

    def define(self, program: Program, name: str) -> str:
        """Add the function to the program; returns the name to call it by."""
        self.unit.declare(program)
        return program.function(name, self.text(name))

    def text(self, name: str) -> str:
        """The function's definition: `void name(i64 lo, i64 hi, ptr p0, …, i64 n0, …)`."""
        return self.definition(name, ("i64 %lo", "i64 %hi"), (*self.leaves.values(), *self.outputs))

    def definition(self, name: str, first: Sequence[str], pointers: Iterable[str]) -> str:
        """The same with the parameters `first`, `pointers` and the sizes."""
        params = [
            *first,
            *(f"ptr {p}" for p in pointers),
            *(f"i64 {n}" for n in self.sizes.values()),
        ]
        return (
            f"define void @{name}({', '.join(params)}) #0 {{\nentry:\n"
            + "\n".join(self.levels[0].lines)
            + "\n  ret void\n}\n"
        )
