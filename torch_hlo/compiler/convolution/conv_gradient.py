"""Gradient of a convolution's weights, channels last: C[tap, c, o] = sum over images and pixels
X[pixel + tap, c] * Y[pixel, o].

    lhs f01b (X), rhs i01o (Y), result 01bf or fb01: the window is the image, the result's positions
        are the taps

For one tap this is a product whose sum runs along rows of pixels, where both operands are
contiguous in their own columns: nothing is packed or padded. The result fb01, which is how PyTorch
keeps weights, is turned at the end. A row of pixels that a tap sees is a run (address in X, address
in Y, length); a block of rows stays in L2 while all taps and tiles pass. Few weights and many
pixels are summed in SPLITS pieces, which are added at the end.
"""

from __future__ import annotations

from dataclasses import replace

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction, Ints, Size, ceildiv, product, round_up, row_major_strides

from ..codegen import Program
from ..conv_forms import digits_of
from ..llvm import Function, Int, item_parameters, signature
from ..matmul import blocking, micro_kernel
from ..matmul.dot_product import SPLITS, sum_parts
from ..matmul.product import hint
from ..matmul.tile import (
    Tile,
)
from ..thresholds import GRADIENT_BLOCK_BYTES, ITEMS_PER_CORE
from .conv_direct import register_tile

GEOMETRY = (
    "window",
    "size",
    "stride",
    "low",
    "taps",
    "dilation",
    "step",
)  # per spatial dimension
NUMBERS = (
    "rows", "rows_each", "rows_block", "m", "n", "ldc", "tap_step", "image_step", "a_step",
    "b_step", "c_split", "tiles_each", "blocks_m", "columns_each", "blocks_n", "groups",
)  # fmt: skip
ENTRY = 3  # words of a run: address in X, address in Y, pixels


def geometry(spatial: int) -> list[tuple[str, str]]:
    return [("i64", f"{what}{i}") for i in range(spatial) for what in GEOMETRY]


def micro(name: str, t: Tile, rows: int, whole: bool) -> Function:
    """C[rows, columns] (+)= sum over runs and their pixels of X[pixel][rows] * Y[pixel][columns].
    `cols` columns are valid, all with `whole`.

    Without rows (0): C[columns] (+)= sum of X[pixel][columns] * Y[pixel][columns], for groups of
    one channel."""
    params = [
        ("ptr noalias", "runs"),
        *signature("i64 count, i64 a_at, i64 b_at, i64 a_step, i64 b_step"),
        ("ptr noalias", "C"),
    ]
    f = Function(
        name,
        params + signature("i64 ldc, i64 cols, i1 more"),
        attrs="noinline #0",
    )
    masks = t.masks(f, "%cols")
    with f.loop(
        0,
        "%count",
        carry=[(t.vector, "zeroinitializer")] * (max(rows, 1) * t.vectors),
    ) as runs:
        entry = f.gep("i64", "%runs", f.mul(runs.index, ENTRY))
        a0, b0 = (
            t.gep(f, f.load("ptr", f.gep("i64", entry, i)), at)
            for i, at in enumerate(("%a_at", "%b_at"))
        )
        carry = [(t.vector, v) for v in runs.vars] + [("ptr", a0), ("ptr", b0)]
        count = f.load_at("i64", entry, 2)
        with f.loop(0, count, carry=carry, known_nonempty=True) as run:
            *sums, a, b = run.vars
            y = _vectors(f, t, b, masks, whole)
            run.next = []
            if not rows:
                x_vectors = _vectors(f, t, a, masks, whole)
                products = zip(x_vectors, y, sums, strict=True)
                run.next += [t.fma(f, *values) for values in products]
            for i in range(rows):
                x = f.splat(t.kind, t.lanes, f.load_at(t.kind, a, i))
                run.next += [t.fma(f, x, y[j], sums[i * t.vectors + j]) for j in range(t.vectors)]
            run.next += [t.gep(f, a, "%a_step"), t.gep(f, b, "%b_step")]
        runs.next = run.vars[:-2]
    micro_kernel.store_tile(f, t, max(rows, 1), runs.vars)
    return f


def _vectors(
    f: Function,
    t: Tile,
    p: str,
    masks: list[str],
    whole: bool,
) -> list[str]:
    """The columns at `p`."""
    places = [t.gep(f, p, j * t.lanes) for j in range(t.vectors)]
    return [t.load(f, p, "" if whole else m) for p, m in zip(places, masks, strict=True)]


def find_runs(name: str, kind: str, spatial: int) -> Function:
    """i64(X, Y, runs, row0, row1, tap, image_step, b_step, geometry…): the runs of rows [row0,
    row1) that `tap` sees, and their number.

    A row is (image, window positions but the last); only pixels for which the tap lies on the input
    belong to its run."""
    params = [
        *signature(
            "ptr X, ptr Y, ptr runs, i64 row0, i64 row1, i64 tap, i64 image_step, i64 b_step"
        ),
        *geometry(spatial),
    ]
    f = Function(name, params, "i64", "noinline #0")
    rest: Int = "%tap"
    firsts: list[Int] = []
    for i in reversed(range(spatial)):
        at = f.rem(rest, f"%taps{i}") if i else rest
        rest = f.div(rest, f"%taps{i}") if i else rest
        # input position of window position 0
        firsts.insert(0, f.sub(f.mul(at, f"%stride{i}"), f"%low{i}"))
    i = spatial - 1
    low = f.ceildiv(f.max(f.sub(0, firsts[i]), 0), f"%dilation{i}")
    high = f.min(
        f.div(
            f.max(f.add(f.sub(f.sub(f"%size{i}", 1), firsts[i]), f"%dilation{i}"), 0),
            f"%dilation{i}",
        ),
        f"%window{i}",
    )
    start = f.mul(f.muladd(low, f"%dilation{i}", firsts[i]), f"%step{i}")
    pixels = f.sub(high, low)
    some = f.icmp("sgt", pixels, 0)
    with f.loop("%row0", "%row1", carry=[("i64", "0")]) as row:
        rest = row.index
        offset = start
        inside = some
        for i in reversed(range(spatial - 1)):
            at = f.rem(rest, f"%window{i}")
            rest = f.div(rest, f"%window{i}")
            position = f.muladd(at, f"%dilation{i}", firsts[i])
            inside = f.op(f"and i1 {inside}, {f.icmp('ult', position, f'%size{i}')}")
            offset = f.muladd(position, f"%step{i}", offset)
        offset = f.muladd(rest, "%image_step", offset)
        entry = f.gep("i64", "%runs", f.mul(row.vars[0], ENTRY))
        f.store("ptr", f.op(f"getelementptr {kind}, ptr %X, i64 {offset}"), entry)
        y = f.mul(f.muladd(row.index, f"%window{spatial - 1}", low), "%b_step")
        f.store("ptr", f.op(f"getelementptr {kind}, ptr %Y, i64 {y}"), f.gep("i64", entry, 1))
        f.store_at("i64", pixels, entry, 2)
        row.next = [f.add(row.vars[0], f.op(f"zext i1 {inside} to i64"))]
    f.ret(f"i64 {row.vars[0]}")
    return f


def task(program: Program, t: Tile, heights: Ints, spatial: int, even: bool) -> str:
    """Items (split, group, row block, column block): void(lo, hi, X, Y, C, NUMBERS…, geometry…).
    `even`: columns are whole tiles."""
    params = [*item_parameters("XYC", NUMBERS), *geometry(spatial)]
    size = f"{'_'.join(map(str, heights))}x{t.vectors}{'e' * even}"
    f = Function(f"conv_gradient_{spatial}_{size}", params)
    made = find_runs(f"find_runs_{t.kind}_{spatial}", t.kind, spatial)
    find = program.define(made)
    runs = f.op(f"alloca i64, i64 {f.mul(f.add('%rows_block', 1), ENTRY)}, align 64")
    tall = f.sub("%m", f.mul(f.ceildiv("%m", heights[0]), heights[1])) if len(heights) > 1 else None
    height = heights[0] or 1
    taps: Int = 1
    for i in range(spatial):
        taps = f.mul(taps, f"%taps{i}")
    with f.items() as item:
        rest, column_block = f.divmod(item, "%blocks_n")
        rest, row_block = f.divmod(rest, "%blocks_m")
        split, group = f.divmod(rest, "%groups")
        first = f.mul(row_block, "%tiles_each")
        last = f.min(f.add(first, "%tiles_each"), f.ceildiv("%m", height))
        n0, n1 = f.part(column_block, "%columns_each", "%n")
        c = t.gep(f, "%C", f.muladd(split, "%c_split", f.mul(group, "%n")))
        row0, row1 = f.part(split, "%rows_each", "%rows")
        x = t.gep(f, "%X", f.mul(group, "%m"))
        y = t.gep(f, "%Y", f.mul(group, "%n"))
        with f.loop(row0, row1, "%rows_block") as r0, f.loop(0, taps) as tap:
            r1 = f.min(f.add(r0, "%rows_block"), row1)
            sizes = (f"%{q}" for _, q in geometry(spatial))
            numbers = (f"i64 {v}" for v in (r0, r1, tap, "%image_step", "%b_step", *sizes))
            count = f.call(find, f"ptr {x}", f"ptr {y}", f"ptr {runs}", *numbers, result="i64")
            c_tap = t.gep(f, c, f.mul(tap, "%tap_step"))
            columns = _Columns(program, f, t, runs, count, c_tap, n0, n1, r0, row0, even)
            with f.loop(first, last) as tile:
                if tall is None:
                    columns.multiply(heights[0], f.mul(tile, height))
                else:
                    is_tall = f.icmp("slt", tile, tall)
                    row = f.muladd(tile, heights[1], f.min(tile, tall))
                    f.choose(
                        is_tall,
                        lambda: columns.multiply(heights[0], row),
                        lambda: columns.multiply(heights[1], row),
                    )
    return program.define(f)


@frozen
class _Columns:
    """The columns of a tap's sums, over `count` runs; `r0` is the first row of the input that they
    are of, `row0` that of the item."""

    program: Program
    f: Function
    t: Tile
    runs: str
    count: str
    c: str
    n0: Int
    n1: Int
    r0: Int
    row0: Int
    even: bool

    def multiply(self, rows: int, row: Int) -> None:
        """A tile of `rows` rows from `row` on."""
        f = self.f
        t = self.t
        with f.loop(self.n0, self.n1, t.columns) as j:
            to = t.gep(f, self.c, f.muladd(row, "%ldc", j))
            cols = f.sub(self.n1, j)
            values = [
                f"i64 {self.count}",
                f"i64 {row if rows else j}",
                f"i64 {j}",
                "i64 %a_step",
                "i64 %b_step",
                f"ptr {to}",
                "i64 %ldc",
                f"i64 {cols}",
                f"i1 {f.icmp('ne', self.r0, self.row0)}",
            ]

            def call(whole: bool) -> None:
                name = f"conv_gradient_{t.suffix}_{rows}x{t.vectors}{'w' * whole}"
                kernel = micro(name, t, rows, whole)
                defined = self.program.define(kernel)
                f.call(defined, f"ptr {self.runs}", *values)

            if self.even:
                call(True)
            else:
                is_whole = f.icmp("sge", cols, t.columns)
                f.choose(is_whole, lambda: call(True), lambda: call(False))


def turn(name: str, t: Tile) -> Function:
    """void(lo, hi, parts, C, taps, channels, features, splits, ldp, ldc): for groups of `lanes`
    features, C[o][c][tap] = sum over splits of parts[split][tap][c][o]; rows of parts are `ldp`
    apart, those of C `ldc`. One part may be panels of `ldp` features, [panel][tap][c][ldp]."""
    numbers = ("taps", "channels", "features", "splits", "ldp", "ldc")
    f = Function(name, item_parameters(("parts", "C"), numbers))
    n = t.lanes
    length = f.mul("%taps", "%channels")
    whole = f.mul(length, "%ldp")
    one = Tile(t.kind, n, n, 1)
    with f.items() as item:
        o = f.mul(item, n)
        mask = f.lane_mask(n, o, "%features")
        rows = f.min(f.sub("%features", o), n)
        parts = t.gep(f, "%parts", f.muladd(f.div(o, "%ldp"), whole, f.rem(o, "%ldp")))
        with f.loop(0, length, n) as q0:
            block: list[str] = []
            tap = f.rem(q0, "%taps")
            c = f.div(q0, "%taps")
            for _ in range(n):
                at = f.mul(f.muladd(tap, "%channels", f.min(c, f.sub("%channels", 1))), "%ldp")
                wrap = f.icmp("eq", f.add(tap, 1), "%taps")
                tap = f.select(wrap, "i64", 0, f.add(tap, 1))
                c = f.select(wrap, "i64", f.add(c, 1), c)
                with f.loop(
                    0,
                    "%splits",
                    carry=[(t.vector, "zeroinitializer")],
                    known_nonempty=True,
                ) as split:
                    p = t.gep(f, parts, f.muladd(split.index, whole, at))
                    split.next = [f.op(f"fadd {t.vector} {split.vars[0]}, {t.load(f, p, mask)}")]
                block.append(split.vars[0])
            columns = f.lane_mask(n, q0, length)
            for i, v in enumerate(one.transposed(f, block)):
                inside = f.icmp("slt", i, rows)
                m = f.op(f"select i1 {inside}, <{n} x i1> {columns}, <{n} x i1> zeroinitializer")
                t.store(f, v, t.gep(f, "%C", f.muladd(f.add(o, i), "%ldc", q0)), m)
    return f


def is_gradient(x: Instruction) -> bool:
    """Whether a convolution has the form that `emit_gradient` takes."""
    digits = digits_of(x)
    labels = [f"f{digits}b_i{digits}o->{out}" for out in (f"{digits}bf", f"fb{digits}")]
    plain = all(w.base_dilation == 1 and not (w.reversal and w.size != 1) for w in x["window"])
    return (
        digits != ""
        and x["dim_labels"] in labels
        and plain
        and x["feature_group_count"] == 1
        and x.kind == "f"
        and isinstance(x.operand.dims[-1], int)
        and len({o.dtype for o in (*x.operands, x)}) == 1
    )


def emit_gradient(program: Program, x: Instruction, kind: str) -> None:
    """Emit a convolution of the form of `is_gradient`."""
    lhs, rhs = x.operands
    window = x["window"]
    spatial = len(x["window"])
    groups = x["batch_group_count"]
    t = register_tile(kind, program.target.vector_bytes)
    turned = x["dim_labels"].endswith(f"fb{''.join(map(str, range(spatial)))}")
    *taps, channels, o = (*x.dims[2:], x.dims[1], x.dims[0]) if turned else x.dims
    depthwise = groups > 1 and channels == 1 and o == groups and t.is_float
    if depthwise:
        groups = 1
        t = replace(t, vectors=4)
    n = o // groups
    # one vector of columns and as many rows as the registers hold
    if groups > 1 and isinstance(n, int) and n <= t.lanes:
        t = replace(t, rows=2 * t.rows, vectors=1)
    m, numbers = _geometry(x, taps, channels, groups == 1 and not depthwise)
    weights = product(x.dims)
    splits, rows_each, block = _rows_of_items(x, t, o, weights)
    heights = (0,) if depthwise else blocking.tile_heights(t, m)
    cut = _cut(t, 1 if depthwise else ceildiv(m, heights[0]), n, splits * groups)
    even = isinstance(n, int) and n % t.columns == 0
    name = program.made(task, t, heights, spatial, even)
    target = program.pointer(x)
    to = ""
    if splits > 1 or turned:
        to = program.at(program.scratch(weights * splits * t.itemsize))
    steps = row_major_strides(lhs.dims)
    rows = lhs.dims[0] * product(w.size for w in window[:-1])
    arguments = [
        rows,
        rows_each,
        block,
        m,
        n,
        o,
        m * o,
        steps[0],
        lhs.dims[-1] * window[-1].window_dilation,
        o,
        weights,
        cut.tiles_each,
        cut.blocks_m,
        cut.columns_each,
        cut.blocks_n,
        groups,
        *numbers,
    ]
    items = splits * groups * cut.blocks_m * cut.blocks_n
    work = float(hint(rows, 64) * hint(window[-1].size, 32)) * hint(weights, 1 << 16)
    pointers = (program.pointer(lhs), program.pointer(rhs), to or target)
    program.parallel(
        name,
        program.arguments(pointers, arguments),
        items,
        cost=100 + work / max(1, hint(items, 8)) / (1.5 * t.lanes),
    )
    add_pieces(program, t, to or target, target, product(taps), channels, o, splits, turned)


def _geometry(
    x: Instruction, taps: list[Size], channels: Size, joins: bool
) -> tuple[Size, list[Size]]:
    """(rows of C per tap, the arguments for `geometry`). With `joins`, taps that are neighbours in
    memory are one with more rows."""
    lhs = x.operand
    window = x["window"]
    m = channels
    steps = row_major_strides(lhs.dims)
    numbers: list[Size] = []
    for i, (w, size, count) in enumerate(zip(window, lhs.dims[1:-1], taps, strict=True)):
        if (
            i == len(window) - 1
            and joins
            and w.stride == 1
            and w.pad_low == 0
            and w.pad_high <= 0
            and isinstance(count, int)
        ):
            # Neighbouring taps of a row meet neighbouring channels: more rows of C.
            m = m * count
            size = size - count + 1
            count = 1
        numbers += [
            w.size,
            size,
            w.stride,
            w.pad_low,
            count,
            w.window_dilation,
            steps[1 + i],
        ]
    return m, numbers


def _rows_of_items(
    x: Instruction,
    t: Tile,
    features: Size,
    weights: Size,
) -> tuple[int, Size, int]:
    """(pieces that the rows of the input are split into, rows of a piece, rows that stay in L2)."""
    lhs = x.operand
    window = x["window"]
    rows = lhs.dims[0] * product(w.size for w in window[:-1])
    channels = hint(lhs.dims[-1], 64) * window[-1].window_dilation
    row_bytes = hint(window[-1].size, 32) * (channels + hint(features, 64)) * t.itemsize
    block = max(1, GRADIENT_BLOCK_BYTES // row_bytes)
    if not isinstance(rows, int):
        return 1, rows, block
    splits = 1
    rows_each = rows
    if rows >= 2 * SPLITS and rows * row_bytes * 3 > 2 * SPLITS * weights * t.itemsize:
        rows_each = ceildiv(rows, SPLITS)
        splits = ceildiv(rows, rows_each)
    return (
        splits,
        rows_each,
        ceildiv(rows_each, ceildiv(rows_each, block)),
    )  # equal blocks


def _cut(t: Tile, tiles: Size, n: Size, others: int) -> blocking.Partition:
    """Items of each of `others` products."""
    wanted = ceildiv(ITEMS_PER_CORE * 2, others) if others < 8 else 1
    blocks_n = max(1, min(wanted, hint(ceildiv(n, 4 * t.columns), 1)))
    columns_each = round_up(ceildiv(n, blocks_n), t.columns)
    across = ceildiv(n, columns_each)
    wanted = ceildiv(wanted, hint(across, 1))
    tiles_each = ceildiv(tiles, max(1, min(wanted, hint(tiles, wanted))))
    return blocking.Partition(tiles_each, columns_each, ceildiv(tiles, tiles_each), across, False)


def add_pieces(
    program: Program,
    t: Tile,
    parts: str,
    target: str,
    taps: Size,
    channels: Size,
    features: Size,
    count: int,
    turned: bool,
    panel: Size = 0,
) -> None:
    """The sum of `count` arrays [tap][channel][feature], also turned to [feature][channel][tap].
    One array that is not turned is there already.
    `panel`: one array is in panels of so many features."""
    if turned:
        name = program.once(("turn", t.kind), lambda: program.define(turn(f"turn_{t.suffix}", t)))
        arguments = (
            taps,
            channels,
            features,
            count,
            panel or features,
            taps * channels,
        )
        program.parallel(
            name,
            program.arguments((parts, target), arguments),
            ceildiv(features, t.lanes),
            cost=0.2 * t.lanes * hint(taps * channels, 512) * count,
        )
    elif count > 1:
        sum_parts(program, t, parts, target, taps * channels * features, count)
