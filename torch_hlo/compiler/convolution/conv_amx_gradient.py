"""Gradients of the weights of bf16 convolutions on AMX tiles, or with AVX512-BF16: C[tap, c, o] =
sum over pixels X[pixel + tap, c] * Y[pixel, o].

K runs over a grid of output pixels, with room for what a tap reads beside the image: rows and
images lie `Grid.width` and `height` apart, Y is zero in the room. The input is turned once,
channels outermost, onto the same grid; then a tap is a distance between addresses and tiles of A
are read where they lie, for every tap from the same cache lines:

    for each piece of K           for each tap           for each panel of features: micro-kernel
        (compiler/matmul/gemm_amx.py), C[tap] in memory

Strided convolutions have a grid per remainder of the input's positions. In the room X is finite or
zero: what is not a number there, times zero, spoils the sum, as it does where the tap meets it.
"""

import itertools
from contextlib import ExitStack

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    Instruction,
    Ints,
    Window,
    build,
    ceildiv,
    fixed,
    product,
    round_up,
    row_major_strides,
)

from ..codegen import Program
from ..conv_forms import digits_of
from ..llvm import Function, Int, item_parameters
from ..matmul.amx_kernels import (
    BLOCK,
    ELEMENTS,
    WORDS,
    element,
    micro,
    tiles,
)
from ..matmul.dot import emit_tree
from ..matmul.gemm_amx import AmxGemm, b_panel, pieces
from ..thresholds import GRADIENT_AMX_LEAST_RUN, ITEMS_PER_CORE
from .conv_direct import register_tile
from .conv_gradient import add_pieces
from .conv_pack import static_dims
from .conv_winograd import define

BF16 = ELEMENTS["bf16", "bf16"]
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


@frozen
class Axis:
    """One spatial dimension of the grid: positions `room` of which `count` are outputs; what a tap
    reads at output o is element `stride * (o + shifts[tap]) + remainders[tap]` of the input's
    `size`."""

    count: int
    size: int
    stride: int
    shifts: Ints
    remainders: Ints

    @property
    def room(self) -> int:
        low = min(0, *self.shifts)
        high = max(0, *self.shifts)
        return max(ceildiv(self.size, self.stride) - low, self.count + high)


def axes(x: Instruction) -> list[Axis]:
    """The grid of a gradient: its window is the image, strides and dilations have changed
    places."""
    found = []
    for w, size, taps in zip(x["window"], static_dims(x.operand)[1:-1], _parts(x)[0], strict=True):
        places = [tap * w.stride - w.pad_low for tap in range(taps)]
        s = w.window_dilation
        found.append(
            Axis(w.size, size, s, tuple(p // s for p in places), tuple(p % s for p in places))
        )
    return found


def _parts(x: Instruction) -> tuple[Ints, int, int, bool]:
    """(taps per dimension, channels, features, whether features come first) of a gradient's
    result."""
    digits = digits_of(x)
    turned = x["dim_labels"].endswith(f"fb{digits}")
    *taps, channels, features = (
        (*static_dims(x)[2:], static_dims(x)[1], static_dims(x)[0]) if turned else static_dims(x)
    )
    return tuple(taps), channels, features, turned


def is_amx_gradient(program: Program, x: Instruction) -> bool:
    """Whether a convolution has the form that `emit_amx_gradient` takes."""
    window: Window = x["window"]
    digits = "".join(map(str, range(len(window))))
    labels = [f"f{digits}b_i{digits}o->{out}" for out in (f"{digits}bf", f"fb{digits}")]
    return (
        digits != ""
        and x["dim_labels"] in labels
        and element(program.target, ("bf16",)) is not None
        and x.dtype == "f32"
        and x.is_static
        and all(o.dtype == "bf16" and o.is_static for o in x.operands)
        and x["feature_group_count"] * x["batch_group_count"] == 1
        and all(w.base_dilation == 1 and not (w.reversal and w.size != 1) for w in window)
        and _run(x) >= GRADIENT_AMX_LEAST_RUN
    )


def _run(x: Instruction) -> int:
    """Channels, and with few of them those of the neighbouring taps, which are neighbours in
    memory: rows of A."""
    channels = static_dims(x.operand)[-1]
    w = x["window"][-1]
    return channels * (_parts(x)[0][-1] if channels < BLOCK and w.stride == 1 else 1)


def _in_runs(x: Instruction) -> tuple[Instruction, list[Axis], int]:
    """(input, grid, rows of A per tap). Where a row of taps is one run, the input is padded in
    memory and the last dimension has one tap."""
    lhs = x.operand
    grid = axes(x)
    run = _run(x)
    if run == lhs.dims[-1]:
        return lhs, grid, run
    w = x["window"][-1]
    last = grid[-1]
    reach = (last.count - 1) * last.stride + 1
    edges = (
        w.pad_low,
        reach - 1 + run // lhs.dims[-1] - last.size - w.pad_low,
        0,
    )
    padded = build.pad(
        lhs,
        build.full(0, lhs.dtype),
        [*[(0, 0, 0)] * (lhs.rank - 2), edges, (0, 0, 0)],
    )
    return (
        padded,
        [*grid[:-1], Axis(last.count, reach, last.stride, (0,), (0,))],
        run,
    )


TURN_NUMBERS = (
    "channels",
    "pixel_step",
    "pixels",
    "row_bytes",
    "source",
    "array",
    "target",
)


def turn_rows(name: str, levels: int) -> Function:
    """void(lo, hi, X, to, channels, pixel_step, pixels, row_bytes, source, array, target, (count,
    from, step) per level): for groups of 16 channels [lo, hi), rows of `pixels` pixels,
    `pixel_step` elements apart, become runs of one channel in to[array][channel], which is zero
    elsewhere (`array` in bytes). `source` and `target` are the elements at which the first row
    begins; in each of the nested levels rows begin `from` and `step` elements apart. Target rows
    follow each other: a row is written in whole vectors, and the next one overwrites what is too
    much."""
    params = item_parameters(("X", "to"), TURN_NUMBERS)
    params += [("i64", f"{q}{i}") for i in range(levels) for q in ("count", "from", "step")]
    f = Function(name, params)
    with f.items() as group, ExitStack() as stack:
        channel = f.mul(group, 16)
        lanes = f.lane_mask(16, channel, "%channels")
        own = f.gep("i8", "%to", f.muladd(channel, "%row_bytes", "%array"))
        nbytes = f.mul("%row_bytes", 16)
        f.do(f"call void @llvm.memset.p0.i64(ptr {own}, i8 0, i64 {nbytes}, i1 false)")
        source = f.add("%source", channel)
        target: Int = "%target"
        for i in range(levels):
            at = stack.enter_context(f.loop(0, f"%count{i}"))
            source = f.muladd(at, f"%from{i}", source)
            target = f.muladd(at, f"%step{i}", target)
        row = f.gep("i16", "%X", source)
        to = f.gep("i16", own, target)
        with f.loop(0, "%pixels", BLOCK) as first:
            f.choose(
                f.icmp("sle", f.add(first, BLOCK), "%pixels"),
                lambda: _turn_pixels(f, row, to, first, lanes, True),
                lambda: _turn_pixels(f, row, to, first, lanes, False),
            )
    return f


def _turn_pixels(
    f: Function,
    row: str,
    to: str,
    first: Int,
    lanes: str,
    whole: bool,
) -> None:
    """BLOCK pixels of 16 channels from pixel `first` of a row on; `whole`: all exist."""
    order = ", ".join(f"i32 {i // 2 + i % 2 * 16}" for i in range(32))
    words = []
    for pair in range(16):
        both = []
        for at in (f.add(first, 2 * pair), f.add(first, 2 * pair + 1)):
            mask = lanes
            if not whole:
                inside = f.icmp("slt", at, "%pixels")
                mask = f.op(f"select i1 {inside}, <16 x i1> {lanes}, <16 x i1> zeroinitializer")
            pixel = f.gep("i16", row, f.mul(at, "%pixel_step"))
            both.append(f.masked_load("i16", 16, pixel, mask))
        mixed = f.op(
            f"shufflevector <16 x i16> {both[0]}, <16 x i16> {both[1]}, <32 x i32> <{order}>"
        )
        words.append(f.op(f"bitcast <32 x i16> {mixed} to <16 x i32>"))
    for lane, v in enumerate(WORDS.transposed(f, words)):
        place = f.gep("i8", f.gep("i16", to, first), f.mul("%row_bytes", lane))
        f.store("<16 x i32>", v, place, 2)


def task(program: Program) -> str:
    """Items (32 channels, block of columns): void(lo, hi, A, B, C, NUMBERS…, offsets).
    offsets[tap]: bytes from A to the first pixel of the tap in channel 0. Panels of 32 columns of C
    are `panel_step` elements apart, their rows (tap, channel) `ldc`; rows of 32 have room for whole
    panels."""
    f = Function(
        "conv_amx_gradient",
        [
            *item_parameters("ABC", NUMBERS),
            ("ptr", "offsets"),
        ],
    )
    e = element(program.target, ("bf16",))
    assert e is not None
    kernel = define(program, micro, f"micro_amx_{e.name}_strided", e, False, True)
    panels = f.ceildiv("%features", BLOCK)
    in_panels = f.icmp("eq", "%ldc", BLOCK)
    with tiles(f, e), f.items() as item:
        channel = f.mul(f.div(item, "%blocks_n"), BLOCK)
        n0, n1 = f.part(f.rem(item, "%blocks_n"), "%columns_each", "%features")
        rows = f.sub("%channels", channel)
        with pieces(f, "%steps") as (step, count), f.loop(0, "%taps") as tap:
            offset = f.muladd(step, 64, f.load_at("i64", "%offsets", tap))
            a = f.op(f"getelementptr i8, ptr %A, i64 {f.muladd(channel, '%row_bytes', offset)}")
            c = f.gep("float", "%C", f.mul(f.muladd(tap, "%channels", channel), "%ldc"))
            with f.loop(n0, n1, BLOCK) as j:
                number = f.div(j, BLOCK)
                b = b_panel(f, "%B", step, count, number, panels)
                to = f.gep("float", c, f.mul(number, "%panel_step"))
                columns = f.select(in_panels, "i64", BLOCK, f.sub("%features", j))
                f.call(
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
    return program.define(f)


def emit_amx_gradient(program: Program, x: Instruction) -> None:
    """Emit a convolution for which `is_amx_gradient` holds."""
    rhs = x.operands[1]
    lhs, grid, run = _in_runs(x)
    images = static_dims(lhs)[0]
    # elements of the grid
    steps_of = tuple(fixed(s) for s in row_major_strides((images, *(a.room for a in grid))))
    cells = images * product(a.room for a in grid)
    steps = ceildiv(cells, BF16.depth)
    shifts = [
        sum(s * n for s, n in zip(at, steps_of[1:], strict=True))
        for at in itertools.product(*(a.shifts for a in grid))
    ]
    front = round_up(max(0, -min(shifts)), BLOCK)
    row = front + steps * BF16.depth + max(0, max(shifts)) + BLOCK
    # an odd number of cache lines: rows spread over the sets
    row_bytes = (ceildiv(2 * row, 64) | 1) * 64
    rows = round_up(run, BLOCK)
    kinds = [*dict.fromkeys(itertools.product(*(a.remainders for a in grid)))]
    with program.rebound():
        if lhs is not x.operand:
            emit_tree(program, lhs, x.operands[:1], lhs)
        at = _turned_input(program, lhs, run, grid, kinds, (front, row_bytes, rows), steps_of)
        b = _padded_gradient(program, rhs, grid, steps)
        remainders = itertools.product(*(a.remainders for a in grid))
        offsets = [
            kinds.index(r) * rows * row_bytes + 2 * (front + s)
            for r, s in zip(remainders, shifts, strict=True)
        ]
        table = program.at(program.constant(b"".join(o.to_bytes(8, "little") for o in offsets)))
        _sums(program, x, (at, b, table), run, len(shifts), steps, row_bytes)


def _sums(
    program: Program,
    x: Instruction,
    pointers: tuple[str, str, str],
    run: int,
    taps: int,
    steps: int,
    row_bytes: int,
) -> None:
    """Call the task on `pointers` (input, gradient, offsets), and bring its sums into the form of
    the result."""
    sizes, channels, features, turned = _parts(x)
    target = program.pointer(x)
    tiles = ceildiv(run, BLOCK)
    panels = ceildiv(features, BLOCK)
    length = product(sizes) * channels
    ldc, panel_step = (BLOCK, length * BLOCK) if turned else (features, BLOCK)
    to = program.at(program.scratch(length * panels * BLOCK * 4)) if turned else target
    blocks_n = min(panels, ceildiv(ITEMS_PER_CORE * program.target.cores, tiles))
    columns_each = ceildiv(panels, blocks_n) * BLOCK
    blocks_n = ceildiv(features, columns_each)
    at, b, table = pointers
    numbers = (
        steps,
        run,
        features,
        taps,
        row_bytes,
        columns_each,
        blocks_n,
        ldc,
        panel_step,
    )
    texts = [*program.arguments((at, b, to), numbers), f"ptr {table}"]
    name = program.made(task)
    cost = 1000 + BLOCK * columns_each * taps * steps * BF16.depth / 250
    program.parallel(name, texts, tiles * blocks_n, cost=cost)
    if turned:
        t = register_tile("float", program.target.vector_bytes)
        add_pieces(
            program,
            t,
            to,
            target,
            product(sizes),
            channels,
            features,
            1,
            True,
            BLOCK,
        )


def _turned_input(
    program: Program,
    lhs: Instruction,
    run: int,
    grid: list[Axis],
    kinds: list[Ints],
    layout: tuple[int, int, int],
    steps_of: Ints,
) -> str:
    """Emit the grids of the input [remainders][channel][pixel]; the pointer to them. `layout`:
    elements before the first pixel, bytes and number of rows."""
    front, row_bytes, rows = layout
    strides = row_major_strides(lhs.dims)
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
        numbers += [lhs.dims[0], strides[0], steps_of[0]]
        for a, count, from_, step in zip(grid, counts, strides[1:], steps_of[1:]):
            numbers += [count, a.stride * from_, step]
        program.parallel(
            name,
            program.arguments((program.pointer(lhs), to), numbers),
            ceildiv(run, 16),
            cost=100 + 4 * static_dims(lhs)[0] * product(counts) * pixels,
        )
    return to


def _padded_gradient(program: Program, rhs: Instruction, grid: list[Axis], steps: int) -> str:
    """Emit Y on the grid, packed as tiles of B; the pointer to them."""
    features = rhs.dims[-1]
    padded = build.pad(
        rhs,
        build.full(0, rhs.dtype),
        [(0, 0, 0), *((0, a.room - a.count, 0) for a in grid), (0, 0, 0)],
    )
    cells = product(static_dims(padded)[:-1])
    if padded is not rhs:
        emit_tree(program, padded, (rhs,), padded)
    engine = AmxGemm(BF16, "lane", "lane")
    packed = program.at(program.scratch(engine.packed_bytes(features, steps * BF16.depth)))
    name = engine.prepack(1)
    for each, text in engine.functions.items():
        program.function(each, text)
    program.parallel(
        name,
        program.arguments((program.pointer(padded), packed), (features, 1, features, cells)),
        ceildiv(features, BLOCK),
        cost=0.1 * BLOCK * cells,
    )
    return packed
