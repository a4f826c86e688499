"""bf16 convolutions of channels-last arrays on AMX tiles, or with AVX512-BF16: a product whose left
operand is gathered from the input, tile by tile.

K runs over taps and, within a tap, over channels in steps of 32 (the last one filled with zeros).
For 32 output pixels a step of the left operand is 32 runs of 32 channels, found by the pointers of
conv_direct.py; nothing is copied but those tiles, which stay in L2:

    for each group of row tiles: find the pointers
        for each piece of K                          for each row tile: gather the tiles of A
                                                         for each panel of features: micro-kernel
                                                             (compiler/matmul/gemm_amx.py), sums in
                                                             scratch memory
        for each row tile: finish (epilogue)
"""

from __future__ import annotations

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    Instruction,
    Size,
    WindowDim,
    build,
    ceildiv,
    fixed,
    product,
    round_up,
    row_major_strides,
)

from ..codegen import Program
from ..conv_forms import digits_of, is_channels_last, sides
from ..llvm import Function, Int, item_parameters
from ..matmul.amx_kernels import (
    BLOCK,
    ELEMENTS,
    GAP,
    STEP_BYTES,
    element,
    micro,
    tiles,
)
from ..matmul.dot import emit_tree
from ..matmul.dot_task import Finish
from ..matmul.epilogue import Epilogue
from ..matmul.gemm_amx import AmxGemm, b_panel, pieces
from ..thresholds import (
    AMX_COLUMNS,
    CONV_AMX_GROUP,
    CONV_AMX_LEAST_RUN,
    ITEMS_PER_CORE,
    PANEL_STEPS,
    TABLE_BYTES,
)
from .conv_direct import POINTERS, geometry, pointer_table, tile_pointers
from .conv_pack import static_dims
from .conv_winograd import define

BF16 = ELEMENTS["bf16", "bf16"]
LD = AMX_COLUMNS + GAP
MOST_SPLIT = 27  # taps that shuffles take apart
NUMBERS = (
    "steps",
    "chunks",
    "channels",
    "features",
    "tiles",
    "columns_each",
    "blocks_n",
)


def gather(name: str) -> Function:
    """void(P, first, count, chunks, channels, to): 16 rows of steps [first, first + count) of K,
    each 64 bytes, at to + STEP_BYTES * step; row r of tap t begins at P[t][r]."""
    params = "ptr P, i64 first, i64 count, i64 chunks, i64 channels, ptr to"
    f = Function(name, params, attrs="noinline #0")
    chunk = f.divmod("%first", "%chunks")
    start = [("i64", str(v)) for v in chunk]
    with f.loop(0, "%count", carry=start, known_nonempty=True) as step:
        tap, chunk = step.vars
        table = f.gep("ptr", "%P", f.mul(tap, POINTERS))
        channel = f.mul(chunk, BLOCK)
        left = f.sub("%channels", channel)
        rows = [f.gep("i16", f.load_at("ptr", table, r), channel) for r in range(POINTERS)]
        to = f.gep("i8", "%to", f.mul(step.index, STEP_BYTES))

        def whole() -> None:
            for r, p in enumerate(rows):
                f.store("<16 x i32>", f.load("<16 x i32>", p, 2), f.gep("i8", to, 64 * r), 64)

        def part() -> None:
            mask = f.lane_mask(BLOCK, 0, left)
            for r, p in enumerate(rows):
                f.store(
                    "<32 x i16>",
                    f.masked_load("i16", BLOCK, p, mask),
                    f.gep("i8", to, 64 * r),
                    64,
                )

        f.choose(f.icmp("sge", left, BLOCK), whole, part)
        wrap = f.icmp("eq", f.add(chunk, 1), "%chunks")
        step.next = [
            f.select(wrap, "i64", f.add(tap, 1), tap),
            f.select(wrap, "i64", 0, f.add(chunk, 1)),
        ]
    return f


def split_taps(name: str, taps: int) -> Function:
    """void(lo, hi, W, to, lanes, step, first, tap_step): to[row * step + first + tap * tap_step +
    lane] = W[row][lane][tap] for rows [lo, hi), zeros for lanes up to whole vectors."""
    params = "i64 lo, i64 hi, ptr W, ptr to, i64 lanes, i64 step, i64 first, i64 tap_step"
    f = Function(name, params)
    n = BLOCK
    vector = f"<{BLOCK} x i16>"
    with f.items() as row, f.loop(0, "%lanes", n) as lane0:
        at = f.gep("i16", "%W", f.mul(f.muladd(row, "%lanes", lane0), taps))
        left = f.mul(f.sub("%lanes", lane0), taps)
        loaded = [
            f.masked_load("i16", n, f.gep("i16", at, n * v), f.lane_mask(n, n * v, left))
            for v in range(taps)
        ]
        to = f.gep("i16", "%to", f.add(f.muladd(row, "%step", "%first"), lane0))
        for tap in range(taps):
            found = ""
            for v, values in enumerate(loaded):
                lanes = [
                    (i * taps + tap) % n + n if (i * taps + tap) // n == v else i if found else -1
                    for i in range(n)
                ]
                if any(lane >= n for lane in lanes):
                    order = ", ".join("i32 poison" if lane < 0 else f"i32 {lane}" for lane in lanes)
                    found = f.op(
                        f"shufflevector {vector} {found or 'poison'}, {vector} {values}, <{n} x"
                        f" i32> <{order}>"
                    )
            f.store(vector, found, f.gep("i16", to, f.mul("%tap_step", tap)))
    return f


def task(program: Program, name: str, spatial: int, many: bool, epilogue: Epilogue) -> str:
    """Items (group of row tiles, block of columns): void(lo, hi, X, B, zeros, NUMBERS…, geometry…,
    the epilogue's). `many`: of the taps."""
    params = item_parameters(("X", "B", "zeros"), NUMBERS)
    f = Function(name, [*params, *geometry(spatial), *epilogue.parameters])
    find = define(program, tile_pointers, f"tile_pointers_i16_{spatial}", "i16", spatial)
    pack = define(program, gather, "conv_amx_gather")
    e = element(program.target, ("bf16",))
    assert e is not None
    kernel = define(program, micro, f"micro_amx_{e.name}", e)
    taps = f.div("%steps", "%chunks")
    half = f.mul(taps, POINTERS)
    P = pointer_table(f, program, f.mul(half, 2 * CONV_AMX_GROUP), many)
    A = f.alloca("i8", PANEL_STEPS * STEP_BYTES, 64)
    sums = f.alloca("float", CONV_AMX_GROUP * BLOCK * LD, 64)
    at = _Group(f, spatial, P, half, A, sums, f.ceildiv("%features", BLOCK))
    with tiles(f, e), f.items() as item:
        group = f.div(item, "%blocks_n")
        n0, n1 = f.part(f.rem(item, "%blocks_n"), "%columns_each", "%features")
        tile0 = f.mul(group, "%tiles")
        held = f.min(f.sub(f.ceildiv("%pixels", BLOCK), tile0), "%tiles")
        at.find_pointers(find, tile0, held)
        with pieces(f, "%steps") as (step, count), f.loop(0, held) as i:
            at.multiply(pack, kernel, i, step, count, n0, n1)
        with f.loop(0, held) as i:
            row = f.mul(f.add(tile0, i), BLOCK)
            c = f.gep("float", sums, f.mul(i, BLOCK * LD))
            epilogue.call(f, row, f.min(f.sub("%pixels", row), BLOCK), n0, f.sub(n1, n0), c, LD)
    return program.define(f)


@frozen
class _Group:
    """The memory of a task for a group of row tiles: pointers (`half` a tile's each), a panel of A,
    sums. `panels`: of B."""

    f: Function
    spatial: int
    pointers: str
    half: Int
    A: str
    sums: str
    panels: Int

    def find_pointers(self, find: str, tile0: Int, tiles: Int) -> None:
        f = self.f
        with f.loop(0, f.mul(tiles, 2)) as i:
            pixel = f.muladd(tile0, BLOCK, f.mul(i, POINTERS))
            pixel = f.min(pixel, f.sub("%pixels", 1))
            to = f.gep("ptr", self.pointers, f.mul(i, self.half))
            numbers = (f"i64 %{q}" for _, q in geometry(self.spatial))
            f.call(
                find,
                "ptr %X",
                "ptr %zeros",
                f"i64 {pixel}",
                f"ptr {to}",
                *numbers,
            )

    def multiply(
        self, pack: str, kernel: str, i: Int, step: Int, count: Int, n0: Int, n1: Int
    ) -> None:
        """Pack `count` steps of row tile `i` from `step` on, and multiply them with the columns
        [n0, n1)."""
        f = self.f
        for side in range(2):
            pointers = f.gep("ptr", self.pointers, f.mul(f.muladd(i, 2, side), self.half))
            to = f.gep("i8", self.A, side * 1024)
            counts = f"i64 {step}", f"i64 {count}", "i64 %chunks", "i64 %channels"
            f.call(pack, f"ptr {pointers}", *counts, f"ptr {to}")
        c = f.gep("float", self.sums, f.mul(i, BLOCK * LD))
        with f.loop(n0, n1, BLOCK) as j:
            b = b_panel(f, "%B", step, count, f.div(j, BLOCK), self.panels)
            f.call(
                kernel,
                f"ptr {self.A}",
                f"ptr {b}",
                f"i64 {count}",
                f"ptr {f.gep('float', c, f.sub(j, n0))}",
                f"i64 {LD}",
                f"i64 {BLOCK}",
                f"i64 {BLOCK}",
                f"i1 {f.icmp('ne', step, 0)}",
            )


def is_amx(program: Program, x: Instruction) -> bool:
    """Whether a convolution has the form that `emit_amx` takes. A product of pairs in vector
    registers takes as long for a few features as for a block of them."""
    e = element(program.target, ("bf16",))
    return (
        e is not None
        and [o.dtype for o in x.operands] == ["bf16", "bf16"]
        and is_channels_last(x)
        and x.is_static
        and all(o.is_static for o in x.operands)
        and x["feature_group_count"] * x["batch_group_count"] == 1
        and static_dims(x)[-1] > (1 if e.instruction else BLOCK // 2)
        and static_dims(x.operand)[-1]
        * (x["window"][-1].size if x["window"][-1].window_dilation == 1 else 1)
        >= CONV_AMX_LEAST_RUN
    )


def emit_amx(program: Program, x: Instruction, finish: Finish) -> None:
    """Emit what `finish` makes of the f32 sums of a convolution for which `is_amx` holds."""
    with program.rebound():
        lhs, window, run = _runs(x)
        if lhs is not x.operand:
            emit_tree(program, lhs, x.operands[:1], lhs)
        _emit(program, x, lhs, window, run, finish)


def _runs(x: Instruction) -> tuple[Instruction, tuple[WindowDim, ...], int]:
    """(input, window, channels in a row that a tap meets). Few channels, padded in memory, are one
    run with those of the neighbouring taps."""
    lhs = x.operand
    window = x["window"]
    channels = static_dims(lhs)[-1]
    w = window[-1]
    if channels >= BLOCK or w.size == 1 or w.window_dilation != 1:
        return lhs, window, channels
    padding = [
        *[(0, 0, 0)] * (lhs.rank - 2),
        (w.pad_low, w.pad_high, 0),
        (0, 0, 0),
    ]
    return (
        build.pad(lhs, build.full(0, lhs.dtype), padding),
        (*window[:-1], WindowDim(1, w.stride)),
        w.size * channels,
    )


def _emit(
    program: Program,
    x: Instruction,
    lhs: Instruction,
    window: tuple[WindowDim, ...],
    channels: int,
    finish: Finish,
) -> None:
    """The convolution of `lhs`, of whose rows a tap of `window` meets `channels` elements."""
    *outputs, features = static_dims(x)
    spatial = len(window)
    pixels = product(outputs)
    taps = product(fixed(w.size) for w in window)
    chunks = ceildiv(channels, BLOCK)
    steps = taps * chunks
    packed = _packed_kernel(program, x, taps, channels, chunks * BLOCK)
    blocks_n = ceildiv(features, AMX_COLUMNS)
    columns_each = round_up(ceildiv(features, blocks_n), BLOCK)
    blocks_n = ceildiv(features, columns_each)
    tiles = ceildiv(pixels, BLOCK)
    wanted = ceildiv(ITEMS_PER_CORE * program.target.cores, blocks_n)
    tiles_each = max(1, min(CONV_AMX_GROUP, ceildiv(tiles, wanted)))
    groups = ceildiv(tiles, tiles_each)
    strides = row_major_strides(lhs.dims)
    numbers: list[Size] = [steps, chunks, channels, features, tiles_each, columns_each, blocks_n]
    numbers += [pixels, strides[0]]
    places = zip(window, lhs.dims[1:-1], x.dims[1:-1], strides[1:], strict=False)
    for w, n, out, stride in places:
        numbers += [out, n, w.stride, w.pad_low, w.size, w.window_dilation, stride]
    zeros = program.constant(bytes(2 * BLOCK * chunks))
    many = taps * POINTERS * 2 * CONV_AMX_GROUP * 8 > TABLE_BYTES
    epilogue = finish.epilogue
    label = f"conv_amx_{spatial}{'m' * many}_{epilogue.name}"
    name = program.made(task, label, spatial, many, epilogue)
    texts = program.arguments((program.pointer(lhs), packed, zeros), numbers)
    texts += finish.arguments
    cost = 1000 + tiles_each * BLOCK * columns_each * steps * BLOCK / 250
    program.parallel(name, texts, groups * blocks_n, cost=cost)


def _packed_kernel(program: Program, x: Instruction, taps: int, channels: int, depth: int) -> str:
    """Emit the packing of the kernel into tiles of B; the pointer to it. The `channels` elements of
    a tap become `depth`."""
    rhs = x.operands[1]
    _, label, _ = sides(x)
    digits = digits_of(x)
    mirrored = [
        label.index(str(i)) for i, w in enumerate(x["window"]) if w.reversal and w.size != 1
    ]
    features = static_dims(x)[-1]
    k = taps * depth
    splits = (
        taps <= MOST_SPLIT
        and channels == rhs.dims[label.index("i")]
        and len(mirrored) in (0, len(x["window"]))
    )
    # in memory [taps, depth, features]: columns of B are contiguous; else [features, taps, depth]
    along = label == f"io{digits}" and splits and channels == depth
    engine = AmxGemm(BF16, "k", "lane" if along else "k")
    packed = program.at(program.scratch(engine.packed_bytes(features, k)))
    name = engine.prepack(1)
    for each, text in engine.functions.items():
        program.function(each, text)
    wide = round_up(features, BLOCK) if taps > 1 else features
    lane_step, k_step = (1, wide) if along else (k, 1)
    with program.rebound():
        if along and taps == 1:
            kernel = program.pointer(rhs)
        elif splits and (along or label == f"oi{digits}" and taps > 1):
            kernel = program.at(program.scratch(wide * k * rhs.itemsize))
            sizes = (
                (channels, features, wide, wide * depth)
                if along
                else (features, channels, k, depth)
            )
            _split(program, rhs, kernel, taps, *sizes, bool(mirrored))
        else:
            order = [label.index(c) for c in f"o{digits}i"]
            turned = build.transpose(build.reverse(rhs, mirrored), order)
            turned = build.reshape(turned, (features, taps, channels))
            edges = [(0, 0, 0), (0, 0, 0), (0, depth - channels, 0)]
            turned = build.pad(turned, build.full(0, rhs.dtype), edges)
            if turned is not rhs:
                emit_tree(program, turned, (rhs,), turned)
            kernel = program.pointer(turned)
        texts = program.arguments((kernel, packed), (features, lane_step, k_step, k))
        program.parallel(name, texts, ceildiv(features, BLOCK), cost=0.1 * BLOCK * k)
    return packed


def _split(
    program: Program,
    rhs: Instruction,
    kernel: str,
    taps: int,
    rows: int,
    lanes: int,
    step: int,
    tap_step: int,
    mirrored: bool,
) -> None:
    """Emit the taps of a kernel apart: of each of `rows`, `lanes` elements per tap, `tap_step`
    elements apart, those of the last tap first if `mirrored`."""
    split = define(program, split_taps, f"split_{taps}_taps", taps)
    first, tap_step = ((taps - 1) * tap_step, -tap_step) if mirrored else (0, tap_step)
    pointers = (program.pointer(rhs), kernel)
    texts = program.arguments(pointers, (lanes, step, first, tap_step))
    program.parallel(split, texts, rows, cost=0.2 * taps * lanes)
