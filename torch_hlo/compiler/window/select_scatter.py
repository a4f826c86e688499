"""select-and-scatter: the gradient of max pooling.

    for each window:  find the element that `select` keeps;  to[that element] = scatter(to[that
        element], source[window])

Where the innermost dimension is not windowed (channels last) its elements are lanes: a window's
taps are vectors, the number of the favourite tap is a vector, and every tap is updated under a
comparison with its own number. Rows of the result are filled with the initial value just before the
first window reaches them, while they are in cache.
"""

import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction, Ints, Size, ceildiv, product, row_major_strides

from ..codegen import Program, Writer, apply, load, load_real, store
from ..gather.gather_scatter import Sizes, dot_product, loop_nest
from ..llvm import BITS, Int, scalar, signature
from ..llvm.scalar import STORAGE
from .reduce_window import UNROLLED_TAPS, positions, tap_count

BLOCK_VECTORS = 4  # vectors of an item: 256 bytes of a pixel
POINTERS = tuple(signature("i64 lo, i64 hi, ptr x, ptr source, ptr init, ptr to"))


def select_and_scatter(program: Program, x: Instruction) -> None:
    """Dimensions that the window does not mix are split over threads."""
    if x.size == 0:
        return
    window = x["window"]
    taps = tap_count(x["window"])
    lead = 0
    while lead < len(window) and window[lead].is_trivial:
        lead += 1
    vectors = (
        program.target.computes_in_vectors
        and 0 < lead < len(window)
        and window[-1].is_trivial
        and taps is not None
        and taps <= UNROLLED_TAPS
    )
    if vectors and STORAGE[x.dtype].parts == 1 and all(w.base_dilation == 1 for w in window):
        name, items, sizes = _lanes(program, x, lead)
    else:
        name, items, sizes = _elements(program, x, lead)
    work = 1.0
    for n, w in zip(x.operands[1].dims[lead:], window[lead:], strict=True):
        work *= (n if isinstance(n, int) else 16) * (w.size if isinstance(w.size, int) else 16)
    program.parallel(
        name,
        program.arguments(map(program.pointer, (*x.operands, x)), sizes),
        items,
        cost=(0.2 if vectors else 2.0) * work,
    )


def _lanes(program: Program, x: Instruction, lead: int) -> tuple[str, Size, Iterable[Size]]:
    """An item is a block of lanes of one index of the leading dimensions."""
    writer = _LaneWriter(program, x, lead)
    name = writer.write()
    channels = x.dims[-1]
    block = writer.block
    blocks = ceildiv(channels, block)
    return (
        name,
        product(x.dims[:lead]) * blocks,
        writer.size.names,
    )


@frozen
class _Item:
    """Lanes [first, last) of everything at one index of the leading dimensions; the vectors before
    `whole` are full."""

    first: Int
    whole: Int
    last: Int
    base: Int
    source_base: Int


@frozen
class _Place:
    """Where a window of an item lies: the offsets of its first tap and of its gradient; per
    dimension, whether each offset in the window is an element; and whether all are."""

    corner: Int
    source: Int
    inside: list[list[str]]
    every: str


class _LaneWriter:
    """Writes the function whose items are blocks of lanes."""

    def __init__(self, program: Program, x: Instruction, lead: int) -> None:
        operand, source, _ = x.operands
        self.x = x
        self.lead = lead
        self.window = x["window"][lead:-1]
        self.dtype = x.dtype
        self.dims = operand.dims
        self.out = source.dims
        register = STORAGE[self.dtype].register
        self.lanes = program.target.lanes(max(32, BITS[register]))
        self.f = f = Writer(program, "select_and_scatter_lanes", POINTERS)
        self.size = size = Sizes(f)
        self.strides, self.source_strides = (
            [size(s) for s in row_major_strides(d)[lead:-1]] for d in (self.dims, self.out)
        )
        self.extents = [size(n) for n in self.dims[lead:-1]]
        self.channels = size(self.dims[-1])
        self.block = BLOCK_VECTORS * self.lanes
        self.vector = f"<{self.lanes} x {register}>"
        self.numbers = f"<{self.lanes} x i32>"
        self.best_slot = f.alloca(self.vector, 1, 64)
        self.where_slot = f.alloca(self.numbers, 1, 64)
        self.taps = [*itertools.product(*(range(w.size) for w in self.window))]
        self.offsets = [dot_product(f, self.dilated(tap), self.strides) for tap in self.taps]
        self.even = isinstance(self.dims[-1], int) and self.dims[-1] % self.lanes == 0
        initial = load(f, self.dtype, "%init", 0)
        assert isinstance(initial, str)  # one register: types of two parts are not written here
        self.start = f.emit(self.lanes).splat(register, initial)

    def dilated(self, tap: Ints) -> list[Int]:
        return [o * w.window_dilation for o, w in zip(tap, self.window, strict=True)]

    def write(self) -> str:
        """The name of the function."""
        f = self.f
        size = self.size
        lead = self.lead
        with f.items() as number:
            item = self.item(number)
            with (
                f.loop(0, size(self.out[lead]), carry=[("i64", "0")]) as rows,
                ExitStack() as stack,
            ):
                filled = self.reached(rows.index, rows.vars[0])
                self.fill(item, rows.vars[0], filled)
                rows.next = [filled]
                inner = [(0, size(n)) for n in self.out[lead + 1 : -1]]
                place = self.place(item, [rows.index, *loop_nest(f, stack, inner)])
                self.each(item, lambda c, mask: self.window_at(place, c, mask))
            self.fill(item, rows.vars[0], self.extents[0])
        return f.define()

    def item(self, item: Int) -> _Item:
        f = self.f
        blocks = f.ceildiv(self.channels, self.block)
        number = f.div(item, blocks)
        first = f.mul(f.rem(item, blocks), self.block)
        last = f.min(f.add(first, self.block), self.channels)
        whole = last if self.even else f.sub(last, f.rem(f.sub(last, first), self.lanes))
        base, source_base = (
            f.mul(number, self.size(product(d[self.lead :]))) for d in (self.dims, self.out)
        )
        return _Item(first, whole, last, base, source_base)

    def each(self, item: _Item, body: Callable[[Int, str | None], object]) -> None:
        """body(first lane, mask) for all vectors of the item."""
        f = self.f
        with f.loop(item.first, item.whole, self.lanes) as c:
            body(c, None)
        if not self.even:
            with f.when(f.icmp("slt", item.whole, item.last)):
                body(item.whole, f.lane_mask(self.lanes, item.whole, item.last))

    def fill(self, item: _Item, low: Int, high: Int) -> None:
        """Rows [low, high) of the outermost windowed dimension."""
        f = self.f
        row = self.strides[0]
        with f.loop(f.mul(low, row), f.mul(high, row), self.channels) as pixel:
            self.each(item, lambda c, mask: self.put(self.start, f.add(item.base, pixel, c), mask))

    def reached(self, row: Int, filled: Int) -> Int:
        """How many rows have to be filled before the windows of a row of the source."""
        f = self.f
        w = self.window[0]
        first = f.sub(f.mul(row, w.stride), self.size(w.pad_low))
        reach = f.add(first, (w.size - 1) * w.window_dilation + 1)
        return f.max(filled, f.min(reach, self.extents[0]))

    def place(self, item: _Item, output: list[Int]) -> _Place:
        """The window of the element of the source at `output`."""
        f = self.f
        at = [
            f.sub(f.mul(o, w.stride), self.size(w.pad_low))
            for o, w in zip(output, self.window, strict=True)
        ]
        inside = [
            [f.icmp("ult", f.add(p, o * w.window_dilation), n) for o in range(w.size)]
            for p, w, n in zip(at, self.window, self.extents, strict=True)
        ]
        every = _all(f, [t for tests in inside for t in (tests[0], tests[-1])])
        corner = f.add(item.base, dot_product(f, at, self.strides))
        source = f.add(item.source_base, dot_product(f, output, self.source_strides))
        return _Place(corner, source, inside, every)

    def window_at(self, place: _Place, c: Int, mask: str | None) -> None:
        """Lanes from `c` on of one window."""
        self.f.choose(
            place.every,
            lambda: self.inner_window(place, c, mask),
            lambda: self.edge_window(place, c, mask),
        )

    def inner_window(self, place: _Place, c: Int, mask: str | None) -> None:
        """All taps are elements: the favourite so far stays in registers."""
        best = ""
        where = "zeroinitializer"
        for number, offset in enumerate(self.offsets):
            new = self.get("%x", self.at(place, offset, c), mask)
            if number:
                keeps = self.applied("select", best, new)
                best, where = self.favourite(keeps, best, where, new, number)
            else:
                best = new
        gradient = self.get("%source", self.f.add(place.source, c), mask)
        for number, offset in enumerate(self.offsets):
            self.add(self.at(place, offset, c), mask, where, number, gradient)

    def edge_window(self, place: _Place, c: Int, mask: str | None) -> None:
        """Some taps are not elements: the favourite so far is in memory, none at first."""
        f = self.f
        f.store(self.numbers, "splat (i32 -1)", self.where_slot, 64)
        for number, offset in enumerate(self.offsets):
            with self.when_element(place, number):
                new = self.get("%x", self.at(place, offset, c), mask)
                have = f.load(self.vector, self.best_slot, 64)
                had = f.load(self.numbers, self.where_slot, 64)
                keeps = self.applied("select", have, new)
                some = f.op(f"icmp sge {self.numbers} {had}, zeroinitializer")
                keeps = f.op(f"and <{self.lanes} x i1> {keeps}, {some}")
                best, where = self.favourite(keeps, have, had, new, number)
                f.store(self.vector, best, self.best_slot, 64)
                f.store(self.numbers, where, self.where_slot, 64)
        chosen = f.load(self.numbers, self.where_slot, 64)
        gradient = self.get("%source", f.add(place.source, c), mask)
        for number, offset in enumerate(self.offsets):
            with self.when_element(place, number):
                self.add(self.at(place, offset, c), mask, chosen, number, gradient)

    def when_element(self, place: _Place, number: int) -> AbstractContextManager[None]:
        tap = self.taps[number]
        tests = [tests[o] for tests, o in zip(place.inside, tap, strict=True)]
        return self.f.when(_all(self.f, tests))

    def favourite(self, keeps: str, have: str, had: str, new: str, number: int) -> tuple[str, str]:
        """The value and the number of the favourite tap: the one so far where it is kept, else
        this one."""
        f = self.f
        choice = f"select <{self.lanes} x i1> {keeps}"
        best = f.op(f"{choice}, {self.vector} {have}, {self.vector} {new}")
        where = f.op(f"{choice}, {self.numbers} {had}, {self.numbers} splat (i32 {number})")
        return best, where

    def add(self, to: Int, mask: str | None, where: str, number: int, gradient: str) -> None:
        """Scatter the gradient to the tap `number` in the lanes that chose it."""
        hit = self.f.op(f"icmp eq {self.numbers} {where}, splat (i32 {number})")
        old = self.get("%to", to, mask)
        new = self.applied("scatter", old, gradient)
        choice = f"select <{self.lanes} x i1> {hit}"
        self.put(self.f.op(f"{choice}, {self.vector} {new}, {self.vector} {old}"), to, mask)

    def at(self, place: _Place, offset: Int, c: Int) -> Int:
        return self.f.add(place.corner, offset, c)

    def applied(self, computation: str, a: str, b: str) -> str:
        return scalar.single(apply(self.f, self.x[computation], [a, b], self.lanes)[0])

    def get(self, pointer: str, at: Int, mask: str | None) -> str:
        return load_real(self.f, self.dtype, pointer, at, self.lanes, mask)

    def put(self, value: str, at: Int, mask: str | None) -> None:
        store(self.f, self.dtype, value, "%to", at, self.lanes, mask)


def _all(f: Writer, tests: list[str]) -> str:
    found = tests[0]
    for t in tests[1:]:
        found = f.op(f"and i1 {found}, {t}")
    return found


def _elements(program: Program, x: Instruction, lead: int) -> tuple[str, Size, Iterable[Size]]:
    """An item is one index of the leading dimensions, one element at a time."""
    operand, source, _ = x.operands
    dims = operand.dims
    out = source.dims
    window = x["window"]
    dtype = x.dtype
    f = Writer(program, "select_and_scatter", POINTERS)
    size = Sizes(f)
    strides, source_strides = ([size(s) for s in row_major_strides(d)] for d in (dims, out))
    plane, source_plane = (size(product(d[lead:])) for d in (dims, out))
    best = f.alloca("i64")
    with f.items() as item:
        base = f.mul(item, plane)
        source_base = f.mul(item, source_plane)
        start = load(f, dtype, "%init", 0)
        with f.loop(0, plane) as i:
            store(f, dtype, start, "%to", f.add(base, i))
        with ExitStack() as stack:
            output = loop_nest(f, stack, [(0, size(n)) for n in out[lead:]])
            f.store("i64", -1, best)
            with ExitStack() as inner:
                taps = loop_nest(f, inner, [(0, size(w.size)) for w in window[lead:]])
                place, inside = positions(f, size, window[lead:], dims[lead:], output, taps)
                with f.when(inside) if inside else ExitStack():
                    at = f.add(base, dot_product(f, place, strides[lead:]))
                    so_far = f.load("i64", best)
                    none = f.icmp("slt", so_far, 0)
                    have = load(f, dtype, "%x", f.select(none, "i64", at, so_far))
                    keeps = apply(f, x["select"], [have, load(f, dtype, "%x", at)])[0]
                    new = f.op(f"or i1 {none}, {f.op(f'xor i1 {keeps}, true')}")
                    f.store("i64", f.select(new, "i64", at, so_far), best)
            chosen = f.load("i64", best)
            with f.when(f.icmp("sge", chosen, 0)):
                add = load(
                    f,
                    dtype,
                    "%source",
                    f.add(source_base, dot_product(f, output, source_strides[lead:])),
                )
                store(
                    f,
                    dtype,
                    apply(f, x["scatter"], [load(f, dtype, "%to", chosen), add])[0],
                    "%to",
                    chosen,
                )
    return f.define(), product(dims[:lead]), size.names
