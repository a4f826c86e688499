"""Gradients of the weights of bf16 convolutions on AMX tiles: C[tap, c, o] = sum over pixels X[pixel + tap, c] * Y[pixel, o].

K runs over a grid of output pixels, with room for what a tap reads beside the image: rows and images lie `Grid.width` and `height` apart, Y is zero in the
room. The input is turned once, channels outermost, onto the same grid; then a tap is a distance between addresses and tiles of A are read
where they lie, for every tap from the same cache lines:

    for each piece of K           for each tap           for each panel of features: micro-kernel (gemm_amx.py), C[tap] in memory

Strided convolutions have a grid per remainder of the input's positions. In the room X is finite or zero: what is not a number there, times
zero, spoils the sum, as it does where the tap meets it.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import dataclass

from torch_hlo.compiler.codegen.conv_direct import register_tile
from torch_hlo.compiler.codegen.conv_gradient import add_pieces
from torch_hlo.compiler.codegen.conv_pack import product
from torch_hlo.compiler.codegen.conv_winograd import define
from torch_hlo.compiler.codegen.dot import emit_tree
from torch_hlo.compiler.codegen.function import Function, Int
from torch_hlo.compiler.codegen.gemm import ITEMS_PER_CORE, lane_mask, masked_load, transposed
from torch_hlo.compiler.codegen.gemm_amx import (
    BLOCK,
    ELEMENTS,
    WORDS,
    AmxGemm,
    b_panel,
    configure,
    micro,
    pieces,
)
from torch_hlo.hlo import build
from torch_hlo.hlo.dim import ceildiv
from torch_hlo.hlo.ir import Instruction
from torch_hlo.hlo.shape import row_major_strides
from torch_hlo.hlo.window import Window

BF16 = ELEMENTS["bf16", "bf16"]
LEAST_RUN = 16  # rows of A: half of a tile's are idle then
NUMBERS = (
    "steps",
    "channels",
    "features",
    "taps",
    "row_bytes",
    "columns_each",
    "blocks_n",
    "ldc",
    "panel_step",
)


@dataclass(frozen=True, slots=True)
class Axis:
    """One spatial dimension of the grid: positions `room` of which `count` are outputs; what a tap reads at output o is element
    `stride * (o + shifts[tap]) + remainders[tap]` of the input's `size`."""

    count: int
    size: int
    stride: int
    shifts: tuple[int, ...]
    remainders: tuple[int, ...]

    @property
    def room(self) -> int:
        low, high = min(0, *self.shifts), max(0, *self.shifts)
        return max(ceildiv(self.size, self.stride) - low, self.count + high)


def axes(x: Instruction) -> list[Axis]:
    """The grid of a gradient: its window is the image, strides and dilations have changed places."""
    found = []
    for w, size, taps in zip(
        x["window"], x.operands[0].shape.dims[1:-1], _parts(x)[0], strict=True
    ):
        places = [tap * w.stride - w.pad_low for tap in range(taps)]
        s = w.window_dilation
        found.append(
            Axis(w.size, size, s, tuple(p // s for p in places), tuple(p % s for p in places))
        )
    return found


def _parts(x: Instruction) -> tuple[tuple[int, ...], int, int, bool]:
    """(taps per dimension, channels, features, whether features come first) of a gradient's result."""
    digits = "".join(map(str, range(len(x["window"]))))
    turned = x["dim_labels"].endswith(f"fb{digits}")
    *taps, channels, features = (
        (*x.shape.dims[2:], x.shape.dims[1], x.shape.dims[0]) if turned else x.shape.dims
    )
    return tuple(taps), channels, features, turned


def is_amx_gradient(program, x: Instruction) -> bool:
    """Whether a convolution has the form that `emit_amx_gradient` takes."""
    window: Window = x["window"]
    digits = "".join(map(str, range(len(window))))
    labels = [f"f{digits}b_i{digits}o->{out}" for out in (f"{digits}bf", f"fb{digits}")]
    return (digits != "" and x["dim_labels"] in labels and program.target.has("amx-bf16") and x.shape.dtype == "f32" and x.shape.is_static
            and all(o.shape.dtype == "bf16" and o.shape.is_static for o in x.operands) and x["feature_group_count"] * x["batch_group_count"] == 1
            and all(w.base_dilation == 1 and not (w.reversal and w.size != 1) for w in window) and _run(x) >= LEAST_RUN)  # fmt: skip


def _run(x: Instruction) -> int:
    """Channels, and with few of them those of the neighbouring taps, which are neighbours in memory: rows of A."""
    channels, w = x.operands[0].shape.dims[-1], x["window"][-1]
    return channels * (_parts(x)[0][-1] if channels < BLOCK and w.stride == 1 else 1)


def _in_runs(x: Instruction) -> tuple[Instruction, list[Axis], int]:
    """(input, grid, rows of A per tap). Where a row of taps is one run, the input is padded in memory and the last dimension has one tap."""
    lhs, grid, run = x.operands[0], axes(x), _run(x)
    if run == lhs.shape.dims[-1]:
        return lhs, grid, run
    w, last = x["window"][-1], grid[-1]
    reach = (last.count - 1) * last.stride + 1
    edges = (w.pad_low, reach - 1 + run // lhs.shape.dims[-1] - last.size - w.pad_low, 0)
    padded = build.pad(
        lhs, build.full(0, lhs.shape.dtype), [*[(0, 0, 0)] * (lhs.shape.rank - 2), edges, (0, 0, 0)]
    )
    return padded, [*grid[:-1], Axis(last.count, reach, last.stride, (0,), (0,))], run


def turn_rows(name: str, levels: int) -> Function:
    """void(lo, hi, X, to, channels, pixel_step, pixels, row_bytes, source, array, target, (count, from, step) per level): for groups of 16 channels [lo, hi), rows of
    `pixels` pixels, `pixel_step` elements apart, become runs of one channel in to[array][channel], which is zero elsewhere (`array` in bytes). `source` and `target` are the elements at
    which the first row begins; in each of the nested levels rows begin `from` and `step` elements apart. Target rows follow each other: a row is
    written in whole vectors, and the next one overwrites what is too much."""
    params = [("i64", "lo"), ("i64", "hi"), ("ptr", "X"), ("ptr", "to")]
    params += [
        ("i64", q)
        for q in ("channels", "pixel_step", "pixels", "row_bytes", "source", "array", "target")
    ]
    f = Function(
        name,
        "void",
        params + [("i64", f"{q}{i}") for i in range(levels) for q in ("count", "from", "step")],
    )
    order = ", ".join(f"i32 {i // 2 + i % 2 * 16}" for i in range(32))
    with f.loop("%lo", "%hi") as group, ExitStack() as stack:
        channel = f.mul(group, 16)
        lanes = lane_mask(f, 16, channel, "%channels")
        own = f.gep("i8", "%to", f.add("%array", f.mul(channel, "%row_bytes")))
        f.do(
            f"call void @llvm.memset.p0.i64(ptr {own}, i8 0, i64 {f.mul('%row_bytes', 16)}, i1 false)"
        )
        source, target = f.add("%source", channel), "%target"
        for i in range(levels):
            at = stack.enter_context(f.loop(0, f"%count{i}"))
            source, target = (
                f.add(source, f.mul(at, f"%from{i}")),
                f.add(target, f.mul(at, f"%step{i}")),
            )
        row, to = f.gep("i16", "%X", source), f.gep("i16", own, target)

        def pixels(first: Int, whole: bool) -> None:
            words = []
            for pair in range(16):
                both = []
                for at in (f.add(first, 2 * pair), f.add(first, 2 * pair + 1)):
                    mask = lanes
                    if not whole:
                        mask = f.op(
                            f"select i1 {f.icmp('slt', at, '%pixels')}, <16 x i1> {lanes}, <16 x i1> zeroinitializer"
                        )
                    both.append(
                        masked_load(
                            f, "i16", 16, f.gep("i16", row, f.mul(at, "%pixel_step")), mask, 2
                        )
                    )
                mixed = f.op(
                    f"shufflevector <16 x i16> {both[0]}, <16 x i16> {both[1]}, <32 x i32> <{order}>"
                )
                words.append(f.op(f"bitcast <32 x i16> {mixed} to <16 x i32>"))
            for lane, v in enumerate(transposed(f, WORDS, words)):
                f.store(
                    "<16 x i32>",
                    v,
                    f.gep("i8", f.gep("i16", to, first), f.mul("%row_bytes", lane)),
                    2,
                )

        with f.loop(0, "%pixels", BLOCK) as first:
            f.choose(
                f.icmp("sle", f.add(first, BLOCK), "%pixels"),
                lambda: pixels(first, True),
                lambda: pixels(first, False),
            )
    return f


def task(name: str, program) -> str:
    """Items (32 channels, block of columns): void(lo, hi, A, B, C, NUMBERS…, offsets). offsets[tap]: bytes from A to the first pixel of the tap in channel 0.
    Panels of 32 columns of C are `panel_step` elements apart, their rows (tap, channel) `ldc`; rows of 32 have room for whole panels."""
    f = Function(
        name,
        "void",
        [
            ("i64", "lo"),
            ("i64", "hi"),
            *(("ptr", q) for q in "ABC"),
            *(("i64", q) for q in NUMBERS),
            ("ptr", "offsets"),
        ],
    )
    kernel = define(program, micro, f"micro_amx_{BF16.name}_strided", BF16, False, True)
    configure(f)
    panels, in_panels = f.ceildiv("%features", BLOCK), f.icmp("eq", "%ldc", BLOCK)
    with f.loop("%lo", "%hi") as item:
        channel, n0 = (
            f.mul(f.div(item, "%blocks_n"), BLOCK),
            f.mul(f.rem(item, "%blocks_n"), "%columns_each"),
        )
        n1 = f.min(f.add(n0, "%columns_each"), "%features")
        rows = f.sub("%channels", channel)
        with pieces(f, "%steps") as (step, count), f.loop(0, "%taps") as tap:
            offset = f.add(f.load("i64", f.gep("i64", "%offsets", tap), 8), f.mul(step, 64))
            a = f.op(f"getelementptr i8, ptr %A, i64 {f.add(offset, f.mul(channel, '%row_bytes'))}")
            c = f.gep("float", "%C", f.mul(f.add(f.mul(tap, "%channels"), channel), "%ldc"))
            with f.loop(n0, n1, BLOCK) as j:
                number = f.div(j, BLOCK)
                b, to = (
                    b_panel(f, "%B", step, count, number, panels),
                    f.gep("float", c, f.mul(number, "%panel_step")),
                )
                columns = f.select(in_panels, "i64", BLOCK, f.sub("%features", j))
                f.call(
                    "void",
                    kernel,
                    f"ptr {a}",
                    f"ptr {b}",
                    f"i64 {count}",
                    f"ptr {to}",
                    "i64 %ldc",
                    f"i64 {rows}",
                    f"i64 {columns}",
                    f"i1 {f.icmp('ne', step, 0)}",
                    "i64 %row_bytes",
                )
    f.do("call void @llvm.x86.tilerelease()")
    return program.function(f.name, f.text())


def emit_amx_gradient(program, x: Instruction) -> None:
    """Emit a convolution for which `is_amx_gradient` holds."""
    rhs = x.operands[1]
    taps, channels, features, turned = _parts(x)
    lhs, grid, run = _in_runs(x)
    images = lhs.shape.dims[0]
    steps_of = row_major_strides((images, *(a.room for a in grid)))  # elements of the grid
    cells = images * product(a.room for a in grid)
    steps = ceildiv(cells, BF16.depth)
    shifts = [
        sum(s * n for s, n in zip(at, steps_of[1:], strict=True))
        for at in itertools.product(*(a.shifts for a in grid))
    ]
    front = ceildiv(max(0, -min(shifts)), BLOCK) * BLOCK
    row = front + steps * BF16.depth + max(0, max(shifts)) + BLOCK
    row_bytes = (
        ceildiv(2 * row, 64) | 1
    ) * 64  # an odd number of cache lines: rows spread over the sets
    rows = ceildiv(run, BLOCK) * BLOCK
    kinds = [*dict.fromkeys(itertools.product(*(a.remainders for a in grid)))]
    with program.rebound():
        if lhs is not x.operands[0]:
            emit_tree(program, lhs, x.operands[:1], lhs)
        at = _turned_input(program, lhs, run, grid, kinds, (front, row_bytes, rows), steps_of)
        b = _padded_gradient(program, rhs, grid, steps)
        remainders = itertools.product(*(a.remainders for a in grid))
        offsets = [
            kinds.index(r) * rows * row_bytes + 2 * (front + s)
            for r, s in zip(remainders, shifts, strict=True)
        ]
        table = program.at(program.constant(b"".join(o.to_bytes(8, "little") for o in offsets)))
        target = program.pointer(x)
        tiles, panels, length = rows // BLOCK, ceildiv(features, BLOCK), product(taps) * channels
        ldc, panel_step = (BLOCK, length * BLOCK) if turned else (features, BLOCK)
        to = program.at(program.scratch(length * panels * BLOCK * 4)) if turned else target
        blocks_n = min(panels, ceildiv(ITEMS_PER_CORE * program.target.cores, tiles))
        columns_each = ceildiv(panels, blocks_n) * BLOCK
        blocks_n = ceildiv(features, columns_each)
        numbers = (
            steps,
            run,
            features,
            len(shifts),
            row_bytes,
            columns_each,
            blocks_n,
            ldc,
            panel_step,
        )
        name = program.once(("conv_amx_gradient",), lambda: task("conv_amx_gradient", program))
        program.parallel(
            name,
            [f"ptr {p}" for p in (at, b, to)] + [f"i64 {v}" for v in numbers] + [f"ptr {table}"],
            str(tiles * blocks_n),
            cost=1000 + BLOCK * columns_each * len(shifts) * steps * BF16.depth / 250,
        )
        if turned:
            add_pieces(
                program,
                register_tile("float", program.target.vector_bytes),
                to,
                target,
                product(taps),
                channels,
                features,
                1,
                True,
                BLOCK,
            )


def _turned_input(
    program,
    lhs: Instruction,
    run: int,
    grid: list[Axis],
    kinds: list[tuple[int, ...]],
    layout: tuple[int, int, int],
    steps_of,
) -> str:
    """Emit the grids of the input [remainders][channel][pixel]; the pointer to them. `layout`: elements before the first pixel, bytes and number of rows."""
    front, row_bytes, rows = layout
    strides = row_major_strides(lhs.shape.dims)
    to = program.at(program.scratch(len(kinds) * rows * row_bytes))
    name = define(program, turn_rows, f"conv_turn_rows_{len(grid)}", len(grid))
    for number, kind in enumerate(kinds):
        *counts, pixels = (
            max(0, ceildiv(a.size - r, a.stride)) for a, r in zip(grid, kind, strict=True)
        )
        source = sum(r * s for r, s in zip(kind, strides[1:]))
        numbers = [
            run,
            grid[-1].stride * strides[-2],
            pixels,
            row_bytes,
            source,
            number * rows * row_bytes,
            front,
        ]
        numbers += [lhs.shape.dims[0], strides[0], steps_of[0]]
        for a, count, from_, step in zip(grid, counts, strides[1:], steps_of[1:]):
            numbers += [count, a.stride * from_, step]
        program.parallel(
            name,
            [f"ptr {program.pointer(lhs)}", f"ptr {to}", *(f"i64 {v}" for v in numbers)],
            str(ceildiv(run, 16)),
            cost=100 + 4 * lhs.shape.dims[0] * product(counts) * pixels,
        )
    return to


def _padded_gradient(program, rhs: Instruction, grid: list[Axis], steps: int) -> str:
    """Emit Y on the grid, packed as tiles of B; the pointer to them."""
    features = rhs.shape.dims[-1]
    padded = build.pad(
        rhs,
        build.full(0, rhs.shape.dtype),
        [(0, 0, 0), *((0, a.room - a.count, 0) for a in grid), (0, 0, 0)],
    )
    cells = product(padded.shape.dims[:-1])
    if padded is not rhs:
        emit_tree(program, padded, (rhs,), padded)
    engine = AmxGemm(BF16, "lane", "lane")
    packed = program.at(program.scratch(engine.packed_bytes(features, steps * BF16.depth)))
    name = engine.prepack(1)
    for each, text in engine.functions.items():
        program.function(each, text)
    numbers = (features, 1, features, cells)
    program.parallel(
        name,
        [f"ptr {program.pointer(padded)}", f"ptr {packed}", *(f"i64 {v}" for v in numbers)],
        str(ceildiv(features, BLOCK)),
        cost=0.1 * BLOCK * cells,
    )
    return packed
