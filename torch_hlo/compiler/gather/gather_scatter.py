"""gather as a value (it fuses into its users) and scatter as a step, with XLA's semantics for every
dimension number.

gather clamps start indices so that the slice fits; scatter drops windows that do not fit, and
applies updates in index order whatever the number of threads: threads split batch dimensions or the
window, never the updates of one element."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TypeVar

from torch_hlo.hlo.ir import (
    Dim,
    Instruction,
    Instructions,
    Shape,
    Size,
    dim_max,
    postorder,
    row_major_strides,
)

from ..codegen import (
    Kernel,
    Place,
    Program,
    Writer,
    apply,
    index as ix,
    load,
    store,
)
from ..codegen.block import leaves as leaves_of
from ..codegen.inline import Values
from ..control.control_flow import copy_places
from ..llvm import Int, item_parameters
from ..llvm.scalar import Value
from ..loops.elementwise_loops import Store, run_loop

Part = TypeVar("Part", Int, Int | None)  # of an index


def gather(k: Kernel, x: Instruction, index: tuple[ix.Index, ...]) -> Value:
    """The element of the operand that the gather's element at `index` comes from."""
    return k.value(x.operand, gather_index(x, index))


def gather_index(x: Instruction, index: tuple[ix.Index, ...]) -> tuple[ix.Index, ...]:
    """Operand index of a gather's element; start indices become loaded, clamped indices."""
    operand, indices = x.operands
    vector_dim = x["index_vector_dim"]
    sizes = x["slice_sizes"]
    batching = x.get("operand_batching_dims", ())
    dropped = {*x.get("collapsed_slice_dims", ()), *batching}
    batch = [i for d, i in enumerate(index) if d not in x["offset_dims"]]
    offsets = iter([index[d] for d in x["offset_dims"]])
    place = [ix.ZERO if d in dropped else next(offsets) for d in range(operand.rank)]
    for component, d in enumerate(x["start_index_map"]):
        at = list(batch)
        if vector_dim < indices.rank:
            at.insert(vector_dim, ix.constant(component))
        extent = dim_max(operand.dims[d] - sizes[d], 0) + 1
        if extent != 1:
            place[d] += ix.loaded(indices, tuple(at), extent)
    for d, b in zip(batching, x.get("start_indices_batching_dims", ()), strict=True):
        place[d] += batch[b - (b > vector_dim)]
    return tuple(place)


class Sizes:
    """Sizes inside a function's text: ints are literals, symbolic ones trailing i64 parameters."""

    def __init__(self, f: Writer) -> None:
        self.f = f
        self.names: dict[Size, str] = {}

    def __call__(self, size: Size) -> Int:
        if not isinstance(size, Dim):
            return size
        if size not in self.names:
            name = f"n{len(self.names)}"
            self.names[size] = f"%{name}"
            self.f.params.append(("i64", name))
        return self.names[size]


INDEX_KIND = {
    "s8": "i8",
    "s16": "i16",
    "s32": "i32",
    "s64": "i64",
    "u8": "i8",
    "u16": "i16",
    "u32": "i32",
    "u64": "i64",
}


def load_index(f: Writer, shape: Shape, pointer: str, at: Int) -> str:
    """An element of an integer array as i64 (huge unsigned values stay out of every range: they
    become negative)."""
    kind = INDEX_KIND[shape.dtype]
    raw = f.load_at(kind, pointer, at)
    return (
        raw
        if kind == "i64"
        else f.op(f"{'sext' if shape.kind == 's' else 'zext'} {kind} {raw} to i64")
    )


def loop_nest(f: Writer, stack: ExitStack, ranges: Sequence[tuple[Int, Int]]) -> list[Int]:
    """Nested loops entered on `stack`; ranges of one known iteration make no loop."""
    return [
        low if low == 0 and high == 1 else stack.enter_context(f.loop(low, high))
        for low, high in ranges
    ]


def dot_product(f: Writer, values: list[Int], strides: list[Int]) -> Int:
    total: Int = 0
    for v, s in zip(values, strides, strict=True):
        total = f.muladd(v, s, total)
    return total


def digits(f: Writer, value: Int, sizes: list[Int]) -> list[Int]:
    """`value` in a mixed-radix system, most significant first: the multi-index of an element
    number."""
    found: list[Int] = []
    for s in reversed(sizes[1:]):
        found.insert(0, f.rem(value, s))
        value = f.div(value, s)
    return [value, *found] if sizes else []


def scatter(program: Program, x: Instruction) -> None:
    count = len(x.operands) // 2
    places = list(leaves_of(program.places(x)))
    for place, operand in zip(places, x.operands[:count], strict=True):
        copy_places(program, place, program.places(operand))
    _scatter_into(
        program,
        x,
        places,
        [program.place(o) for o in x.operands[count:]],
        x.operands[count + 1 :],
    )


def emit_fused_scatter(program: Program, x: Instruction) -> None:
    """Emit a fusion that compiler/gather/scatter_fusion.py made."""
    inner = x["calls"].root
    place = program.place(x)
    start, indices, updates = inner.operands
    if start.op == "parameter":
        copy_places(program, place, program.places(x.operands[start["index"]]))
    else:
        run_loop(program, [Store(start)], [], [], [place], key=("fill", start))
    leaves = [y for y in postorder((updates,)) if y.op == "parameter"]
    _scatter_into(
        program,
        inner,
        (place,),
        [program.place(x.operands[p["index"]]) for p in (indices, *leaves)],
        leaves,
    )


def _scatter_into(
    program: Program,
    x: Instruction,
    places: Sequence[Place],
    sources: Sequence[Place],
    leaves: Sequence[Instruction],
) -> None:
    """Apply the updates of a scatter to its results, which hold the operands already. `leaves`:
    what the updates are computed from, or the updates;
    `sources`: places of the indices and of the leaves."""
    count = len(x.operands) // 2
    operands = x.operands[:count]
    indices = x.operands[count]
    updates = x.operands[count + 1 :]
    if updates[0].size == 0 or operands[0].size == 0:
        return

    def build() -> tuple[str, list[Size], Size, int, float]:
        results = [f"to{i}" for i in range(count)]
        updaters = [f"by{i}" for i in range(len(leaves))]
        f = Writer(program, "scatter", item_parameters([*results, "indices", *updaters]))
        writer = Scatter(f, x, operands, indices, updates, program.target.strip, leaves)
        items, grain, cost = writer.write()
        return f.define(), [*writer.size.names], items, grain, cost

    computed = updates if tuple(leaves) != tuple(updates) else ()
    key = ("scatter", tuple(o.shape for o in x.operands), x.attrs, computed)
    name, sizes, items, grain, cost = program.once(key, build)
    arguments = program.arguments((*places, *sources), sizes)
    program.parallel(name, arguments, items, grain, cost)


class Scatter:
    """Writes `void scatter(lo, hi, results…, indices, updates…)`; [lo, hi) is a range of the
    dimension that threads split."""

    def __init__(
        self,
        f: Writer,
        x: Instruction,
        operands: Instructions,
        indices: Instruction,
        updates: Instructions,
        lanes: int,
        leaves: Sequence[Instruction] | None = None,
    ) -> None:
        self.f = f
        self.x = x
        self.operands = operands
        self.indices = indices
        self.updates = updates
        # Updates that are computed on the way: what from, and where that is. None: they are in
        # memory.
        self.leaves = (
            None
            if leaves is None or tuple(leaves) == tuple(updates)
            else {p: f"%by{i}" for i, p in enumerate(leaves)}
        )
        self.size = Sizes(f)
        self.vector_dim = x["index_vector_dim"]
        dims = operands[0].dims
        update_dims = updates[0].dims
        batching = tuple(x.get("input_batching_dims", ()))
        dropped = {*x.get("inserted_window_dims", ()), *batching}
        # operand dimension of each window dimension
        self.window_dims = [d for d in range(len(dims)) if d not in dropped]
        self.window_positions = list(x["update_window_dims"])
        self.scatter_positions = [
            d for d in range(len(update_dims)) if d not in self.window_positions
        ]
        self.window_sizes = [update_dims[d] for d in self.window_positions]
        self.dims = dims
        self.update_dims = update_dims
        self.strides = row_major_strides(dims)
        self.update_strides = row_major_strides(update_dims)
        self.window = self._window_loops()
        indices_batching = [
            d - (d > self.vector_dim) for d in x.get("scatter_indices_batching_dims", ())
        ]
        # position among scatter dimensions -> operand dimension
        self.batching = dict(zip(indices_batching, batching, strict=True))
        contiguous = (
            bool(self.window_dims)
            and self.window_dims[-1] == len(dims) - 1
            and self.window_positions[-1:] == [len(update_dims) - 1]
        )
        real = all(o.kind != "c" for o in operands)
        self.lanes = (
            lanes
            if contiguous and real and (isinstance(n := self.window[-1][0], Dim) or n >= 8)
            else 1
        )

    def _window_loops(self) -> list[tuple[Size, Size, Size]]:
        """Loops over a window: (turns, elements from one to the next in the result, in the
        updates). Rows that follow each other in both are one, where updates are in memory."""
        loops: list[tuple[Size, Size, Size]] = []
        dims = zip(self.window_sizes, self.window_dims, self.window_positions, strict=True)
        for n, d, position in dims:
            step, read = self.strides[d], self.update_strides[position]
            if self.leaves is None and loops and loops[-1][1:] == (n * step, n * read):
                n *= loops.pop()[0]
            loops.append((n, step, read))
        return loops

    def write(self) -> tuple[Size, int, float]:
        """Write the body; returns (items, grain, nanoseconds per item)."""
        split, items, grain = self._split()
        total = 1
        for d in self.update_dims:
            total *= d if isinstance(d, int) else 256
        f = self.f
        with ExitStack() as stack:
            ranges: list[tuple[Int, Int]] = [
                ("%lo", "%hi") if split == ("scatter", i) else (0, self.size(self.update_dims[d]))
                for i, d in enumerate(self.scatter_positions)
            ]
            batch = loop_nest(f, stack, ranges)
            start, fits = self.starts(batch)
            with f.when(fits) if fits else ExitStack():
                self._window(batch, start, split)
        items_hint = items if isinstance(items, int) else 256
        return (
            items,
            grain,
            max(1.0, total / max(1, items_hint) * (0.15 if self.lanes > 1 else 2.0)),
        )

    def _split(self) -> tuple[tuple[str, int], Size, int]:
        """Which dimension threads share: a batching dimension, else the window's last or largest,
        else none."""
        if self.batching:
            i = max(
                self.batching,
                key=lambda i: _rough(self.update_dims[self.scatter_positions[i]]),
            )
            return ("scatter", i), self.update_dims[self.scatter_positions[i]], 1
        turns = [n for n, _, _ in self.window]
        if self.lanes > 1 and _rough(turns[-1]) >= 4 * self.lanes:
            return ("window", len(turns) - 1), turns[-1], 2 * self.lanes
        wide = [i for i, n in enumerate(turns[: -1 if self.lanes > 1 else None]) if _rough(n) > 1]
        if wide:
            i = max(wide, key=lambda i: _rough(turns[i]))
            return ("window", i), turns[i], 1
        return ("none", 0), 1, 1

    def starts(self, batch: list[Int]) -> tuple[Int, str | None]:
        """(element offset of the window's start in the operand, condition that the window fits)."""
        f = self.f
        x = self.x
        index_strides = list(row_major_strides(self.indices.dims))
        component_stride = (
            index_strides.pop(self.vector_dim) if self.vector_dim < self.indices.rank else 0
        )
        base = dot_product(f, batch, [self.size(s) for s in index_strides])
        offset: Int = 0
        fits = None
        for component, d in enumerate(x["scatter_dims_to_operand_dims"]):
            i = load_index(
                f,
                self.indices.shape,
                "%indices",
                f.muladd(component, self.size(component_stride), base),
            )
            room = self.dims[d] - (
                self.window_sizes[self.window_dims.index(d)] if d in self.window_dims else 1
            )
            inside = (
                f.icmp("ult", i, self.size(room + 1))
                if not isinstance(room, int) or room >= 0
                else "false"
            )
            fits = inside if fits is None else f.op(f"and i1 {fits}, {inside}")
            offset = f.muladd(i, self.size(self.strides[d]), offset)
        for position, d in self.batching.items():
            offset = f.muladd(batch[position], self.size(self.strides[d]), offset)
        return offset, fits

    def _window(self, batch: list[Int], start: Int, split: tuple[str, int]) -> None:
        f = self.f
        scatter_strides = [self.size(self.update_strides[d]) for d in self.scatter_positions]
        read = dot_product(f, batch, scatter_strides)
        values = None
        if self.leaves is not None:
            values = Values(
                f,
                self.leaves,
                self.updates[0],
                self._update_index(batch, [None] * len(self.window_positions)),
            )
        ranges: list[tuple[Int, Int]] = [
            ("%lo", "%hi") if split == ("window", i) else (0, self.size(n))
            for i, (n, _, _) in enumerate(self.window)
        ]
        with ExitStack() as stack:
            outer = ranges if self.lanes == 1 else ranges[:-1]
            window = loop_nest(f, stack, outer)
            steps = [tuple(map(self.size, each[1:])) for each in self.window[: len(outer)]]
            to = f.add(start, dot_product(f, window, [step for step, _ in steps]))
            by = f.add(read, dot_product(f, window, [step for _, step in steps]))

            def combine(
                at: Int,
                lanes: int,
                mask: str | None = None,
                last: tuple[Int, ...] = (),
            ) -> None:
                types = [u.dtype for u in self.updates]
                if values is None:
                    new = [
                        load(f, t, f"%by{i}", f.add(by, at), lanes, mask)
                        for i, t in enumerate(types)
                    ]
                else:
                    index = self._update_index(batch, [*window, *last])
                    new = [values.element(self.updates[0], index, lanes, mask)]
                self._combine(f.add(to, at), new, lanes, mask)

            if self.lanes == 1:
                combine(0, 1)
                return
            low, high = ranges[-1]
            whole = f.muladd(f.div(f.sub(high, low), self.lanes), self.lanes, low)
            if whole != 0:
                with f.loop(low, whole, self.lanes) as j:
                    combine(j, self.lanes, None, (j,))
            if isinstance(whole, str) or whole != high:
                with f.loop(whole, high, self.lanes) as j:  # at most one, partial, vector
                    combine(j, self.lanes, f.lane_mask(self.lanes, j, high), (j,))

    def _update_index(self, batch: Sequence[Part], window: Sequence[Part]) -> list[Part]:
        """The index of an update, from its parts along scatter and window dimensions."""
        positions = (*self.scatter_positions, *self.window_positions)
        index = dict(zip(positions, (*batch, *window), strict=True))
        return [index[d] for d in range(len(self.update_dims))]

    def _combine(
        self,
        to: Int,
        new: list[Value],
        lanes: int,
        mask: str | None,
    ) -> None:
        f = self.f
        types = [o.dtype for o in self.operands]
        root = self.x["to_apply"].root
        params = self.x["to_apply"].params
        if len(types) == 1 and root is params[1]:
            store(f, types[0], new[0], "%to0", to, lanes, mask)
            return
        old = [load(f, t, f"%to{i}", to, lanes, mask) for i, t in enumerate(types)]
        for i, (t, v) in enumerate(
            zip(types, apply(f, self.x["to_apply"], [*old, *new], lanes), strict=True)
        ):
            store(f, t, v, f"%to{i}", to, lanes, mask)


def _rough(size: Size) -> int:
    return size if isinstance(size, int) else 256
