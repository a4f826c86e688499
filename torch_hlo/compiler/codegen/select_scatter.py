"""select-and-scatter: the gradient of max pooling.

    for each window:  find the element that `select` keeps;  to[that element] = scatter(to[that element], source[window])

Where the innermost dimension is not windowed (channels last) its elements are lanes: a window's taps are vectors, the number of the favourite
tap is a vector, and every tap is updated under a comparison with its own number. Rows of the result are filled with the initial value
just before the first window reaches them, while they are in cache.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack

from torch_hlo.compiler.codegen import index as ix
from torch_hlo.compiler.codegen.emit import BITS
from torch_hlo.compiler.codegen.function import Int
from torch_hlo.compiler.codegen.gemm import lane_mask
from torch_hlo.compiler.codegen.indexing import Sizes, dot_product, loop_nest
from torch_hlo.compiler.codegen.inline import Writer, apply, load, store
from torch_hlo.compiler.codegen.registry import emits_step
from torch_hlo.compiler.codegen.scalar import STORAGE
from torch_hlo.compiler.codegen.window import UNROLLED_TAPS, positions, tap_count
from torch_hlo.hlo.ir import Instruction
from torch_hlo.hlo.shape import row_major_strides

BLOCK_VECTORS = 4  # vectors of an item: 256 bytes of a pixel
POINTERS = [
    ("i64", "lo"),
    ("i64", "hi"),
    ("ptr", "x"),
    ("ptr", "source"),
    ("ptr", "init"),
    ("ptr", "to"),
]


@emits_step("select-and-scatter")
def select_and_scatter(program, x: Instruction) -> None:
    """Dimensions that the window does not mix are split over threads."""
    if x.shape.size == 0:
        return
    window, taps = x["window"], tap_count(x["window"])
    lead = 0
    while lead < len(window) and window[lead].is_trivial:
        lead += 1
    vectors = (
        not program.target.grid
        and 0 < lead < len(window)
        and window[-1].is_trivial
        and taps is not None
        and taps <= UNROLLED_TAPS
    )
    if vectors and STORAGE[x.shape.dtype].parts == 1 and all(w.base_dilation == 1 for w in window):
        name, items, arguments = _lanes(program, x, lead)
    else:
        name, items, arguments = _elements(program, x, lead)
    pointers = [f"ptr {program.pointer(o)}" for o in x.operands] + [f"ptr {program.pointer(x)}"]
    work = 1.0
    for n, w in zip(x.operands[1].shape.dims[lead:], window[lead:], strict=True):
        work *= (n if isinstance(n, int) else 16) * (w.size if isinstance(w.size, int) else 16)
    program.parallel(
        name, pointers + arguments, program.size(items), cost=(0.2 if vectors else 2.0) * work
    )


def _lanes(program, x: Instruction, lead: int) -> tuple[str, ix.Size, list[str]]:
    """An item is a block of lanes of one index of the leading dimensions."""
    operand, source, _ = x.operands
    dtype, window, dims, out = (
        x.shape.dtype,
        x["window"][lead:-1],
        operand.shape.dims,
        source.shape.dims,
    )
    register = STORAGE[dtype].register
    lanes = program.target.lanes(max(32, BITS[register]))
    f = Writer(program, "select_and_scatter_lanes", POINTERS)
    size = Sizes(f)
    strides, source_strides = (
        [size(s) for s in row_major_strides(d)[lead:-1]] for d in (dims, out)
    )
    extents, channels = [size(n) for n in dims[lead:-1]], size(dims[-1])
    block = BLOCK_VECTORS * lanes
    vector, numbers = f"<{lanes} x {register}>", f"<{lanes} x i32>"
    best_slot, where_slot = f.alloca(vector, 1, 64), f.alloca(numbers, 1, 64)
    taps = [*itertools.product(*(range(w.size) for w in window))]
    offsets = [
        dot_product(f, [o * w.window_dilation for o, w in zip(tap, window, strict=True)], strides)
        for tap in taps
    ]
    even = isinstance(dims[-1], int) and dims[-1] % lanes == 0
    start = f.emit(lanes).splat(register, load(f, dtype, "%init", 0))

    with f.loop("%lo", "%hi") as item:
        blocks = f.ceildiv(channels, block)
        number, first = f.div(item, blocks), f.mul(f.rem(item, blocks), block)
        last = f.min(f.add(first, block), channels)
        whole = last if even else f.sub(last, f.rem(f.sub(last, first), lanes))
        base, source_base = (f.mul(number, size(ix.product(d[lead:]))) for d in (dims, out))

        def each(body) -> None:
            """body(first lane, mask) for all vectors of the item."""
            with f.loop(first, whole, lanes) as c:
                body(c, None)
            if not even:
                with f.when(f.icmp("slt", whole, last)):
                    body(whole, lane_mask(f, lanes, whole, last))

        def fill(low: Int, high: Int) -> None:
            """Rows [low, high) of the outermost windowed dimension."""
            with f.loop(f.mul(low, strides[0]), f.mul(high, strides[0]), channels) as pixel:
                each(
                    lambda c, mask: store(
                        f, dtype, start, "%to", f.add(f.add(base, pixel), c), lanes, mask
                    )
                )

        with f.loop(0, size(out[lead]), carry=[("i64", "0")]) as rows, ExitStack() as stack:
            w = window[0]
            reach = f.add(
                f.sub(f.mul(rows.index, w.stride), size(w.pad_low)),
                (w.size - 1) * w.window_dilation + 1,
            )
            filled = f.max(rows.vars[0], f.min(reach, extents[0]))
            fill(rows.vars[0], filled)
            rows.next = [filled]
            place = [rows.index, *loop_nest(f, stack, [(0, size(n)) for n in out[lead + 1 : -1]])]
            at = [
                f.sub(f.mul(o, w.stride), size(w.pad_low))
                for o, w in zip(place, window, strict=True)
            ]
            # Whether offset `o` of dimension `d` is an element, and whether all are.
            inside = [
                [f.icmp("ult", f.add(p, o * w.window_dilation), n) for o in range(w.size)]
                for p, w, n in zip(at, window, extents, strict=True)
            ]
            every = _all(f, [t for tests in inside for t in (tests[0], tests[-1])])
            corner, from_ = (
                f.add(base, dot_product(f, at, strides)),
                f.add(source_base, dot_product(f, place, source_strides)),
            )

            def window_at(c: Int, mask: str | None, inner: bool) -> None:
                best = where = ""

                def look(number: int, offset: Int) -> None:
                    nonlocal best, where
                    new = load(f, dtype, "%x", f.add(f.add(corner, offset), c), lanes, mask)
                    if inner and not number:
                        best, where = new, "zeroinitializer"
                        return
                    have, had = (
                        (best, where)
                        if inner
                        else (f.load(vector, best_slot, 64), f.load(numbers, where_slot, 64))
                    )
                    keeps = apply(f, x["select"], [have, new], lanes)[0]
                    if not inner:
                        keeps = f.op(
                            f"and <{lanes} x i1> {keeps}, {f.op(f'icmp sge {numbers} {had}, zeroinitializer')}"
                        )
                    best = f.op(f"select <{lanes} x i1> {keeps}, {vector} {have}, {vector} {new}")
                    where = f.op(
                        f"select <{lanes} x i1> {keeps}, {numbers} {had}, {numbers} splat (i32 {number})"
                    )
                    if not inner:
                        f.store(vector, best, best_slot, 64)
                        f.store(numbers, where, where_slot, 64)

                def add(number: int, offset: Int) -> None:
                    to = f.add(f.add(corner, offset), c)
                    hit = f.op(f"icmp eq {numbers} {where}, splat (i32 {number})")
                    old = load(f, dtype, "%to", to, lanes, mask)
                    new = apply(f, x["scatter"], [old, gradient], lanes)[0]
                    store(
                        f,
                        dtype,
                        f.op(f"select <{lanes} x i1> {hit}, {vector} {new}, {vector} {old}"),
                        "%to",
                        to,
                        lanes,
                        mask,
                    )

                def taps_that_are_elements(body) -> None:
                    for number, (tap, offset) in enumerate(zip(taps, offsets, strict=True)):
                        with (
                            ExitStack()
                            if inner
                            else f.when(
                                _all(f, [tests[o] for tests, o in zip(inside, tap, strict=True)])
                            )
                        ):
                            body(number, offset)

                if not inner:
                    f.store(numbers, "splat (i32 -1)", where_slot, 64)
                taps_that_are_elements(look)
                where = where if inner else f.load(numbers, where_slot, 64)
                gradient = load(f, dtype, "%source", f.add(from_, c), lanes, mask)
                taps_that_are_elements(add)

            each(
                lambda c, mask: f.choose(
                    every, lambda: window_at(c, mask, True), lambda: window_at(c, mask, False)
                )
            )
        fill(rows.vars[0], extents[0])
    blocks = -(-dims[-1] // block) if isinstance(dims[-1], int) else (dims[-1] + block - 1) // block
    return f.define(), ix.product(dims[:lead]) * blocks, size.arguments(program)


def _all(f: Writer, tests: list[str]) -> str:
    found = tests[0]
    for t in tests[1:]:
        found = f.op(f"and i1 {found}, {t}")
    return found


def _elements(program, x: Instruction, lead: int) -> tuple[str, ix.Size, list[str]]:
    """An item is one index of the leading dimensions, one element at a time."""
    operand, source, _ = x.operands
    dims, out, window, dtype = operand.shape.dims, source.shape.dims, x["window"], x.shape.dtype
    f = Writer(program, "select_and_scatter", POINTERS)
    size = Sizes(f)
    strides, source_strides = ([size(s) for s in row_major_strides(d)] for d in (dims, out))
    plane, source_plane = (size(ix.product(d[lead:])) for d in (dims, out))
    best = f.alloca("i64")
    with f.loop("%lo", "%hi") as item:
        base, source_base = f.mul(item, plane), f.mul(item, source_plane)
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
    return f.define(), ix.product(dims[:lead]), size.arguments(program)
