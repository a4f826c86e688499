"""Depthwise convolutions of arrays whose channels come first: every plane of pixels is filtered on
its own, and pixels of a row are lanes.

    for each plane and block of its rows:   copy the rows that windows meet, zeros around them
        S[phase][row][column / stride]
                                            for some rows and vectors of columns: for each column of
                                                taps: the rows below, each loaded once
                                            finish (epilogue), or store

A stride along rows takes the copy apart into phases, so that a tap meets neighbouring elements.
Nothing is transposed: alone, such a convolution is a read and a write of memory.
"""

from __future__ import annotations

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction, WindowDim, ceildiv, fixed, product, round_up

from ..codegen import Program
from ..llvm import Function, Int, Loop, item_parameters, parameters
from ..matmul.dot_task import Finish
from ..matmul.epilogue import Epilogue
from ..matmul.tile import (
    Tile,
)
from ..thresholds import COPIED_ROWS_BYTES, UNROLLED_TAPS
from .conv_direct import register_tile
from .conv_pack import static_dims

ACCUMULATORS = 16  # vectors, with 32 registers
NUMBERS = (
    "planes_in", "planes_out", "high", "wide", "out_high", "out_wide", "top", "left", "skip",
    "copied", "ld", "phase", "rows_each", "blocks", "taps", "first_tap", "tap_step", "turns",
    "turn_step", "turn_rows", "dilation", "columns",
)  # fmt: skip


@frozen
class Form:
    """What a kernel is written for: rows and vectors of its tile of results, rows of taps that
    share their loads, strides along columns and rows, and the distance of rows of taps."""

    tile: Tile
    taps: int
    stride: int
    row_stride: int
    row_dilation: int

    @property
    def rows(self) -> dict[int, list[tuple[int, int]]]:
        """Row of the copy, from the first that a tile meets -> the (row of the tile, row of taps)
        that meet there."""
        found: dict[int, list[tuple[int, int]]] = {}
        for i in range(self.tile.rows):
            for tap in range(self.taps):
                found.setdefault(i * self.row_stride + tap * self.row_dilation, []).append((i, tap))
        return dict(sorted(found.items()))


def copy_row(name: str, t: Tile, stride: int) -> Function:
    """void(x, wide, S, left, phase): element i < wide of a row lands at place left + i, which is
    S[place % stride * phase + place / stride]. Up to a vector of zeros follows the last one."""
    f = Function(
        name,
        "ptr x, i64 wide, ptr S, i64 left, i64 phase",
        attrs="noinline #0",
    )
    places = [
        t.gep(
            f,
            "%S",
            f.muladd(f.rem(f.add("%left", q), stride), "%phase", f.div(f.add("%left", q), stride)),
        )
        for q in range(stride)
    ]

    def vectors(i: Int, masked: bool) -> None:
        loaded = []
        for v in range(stride):
            at = f.add(i, v * t.lanes)
            mask = f.lane_mask(t.lanes, at, "%wide") if masked else ""
            loaded.append(t.load(f, t.gep(f, "%x", at), mask))
        for q, place in enumerate(places):
            made = loaded[0]
            if stride == 2:
                lanes = ", ".join(f"i32 {2 * n + q}" for n in range(t.lanes))
                made = f.op(
                    f"shufflevector {t.vector} {loaded[0]}, {t.vector} {loaded[1]}, <{t.lanes} x"
                    f" i32> <{lanes}>"
                )
            t.store(f, made, t.gep(f, place, f.div(i, stride)))

    step = t.lanes * stride
    whole = f.mul(f.div("%wide", step), step)
    with f.loop(0, whole, step) as i:
        vectors(i, False)
    with f.when(f.icmp("slt", whole, "%wide")):
        vectors(whole, True)
    return f


TILE_NUMBERS = (
    "row_step", "tap_step", "taps", "phase", "ld", "dilation", "turns", "turn_step", "turn_rows",
    "ldc", "columns", "valid",
)  # fmt: skip


def tile_of_pixels(name: str, form: Form) -> Function:
    """void(S, W, C, row_step, tap_step, taps, phase, ld, dilation, turns, turn_step, turn_rows,
    ldc, columns, valid): a tile of `valid` rows and `columns` columns of results; the windows of
    the first one start at S. A turn takes `form.taps` rows of `taps` taps; W[turn * turn_step + row
    * row_step + tap * tap_step]."""
    t = form.tile
    pointers = [("ptr noalias", q) for q in "SWC"]
    params = [*pointers, *parameters(numbers=TILE_NUMBERS)]
    f = Function(name, params, attrs="noinline #0")
    zeros = [(t.vector, "zeroinitializer")] * (t.rows * t.vectors)
    with f.loop(0, "%turns", carry=zeros, known_nonempty=True) as turn:
        s_turn = t.gep(f, "%S", f.mul(turn.index, "%turn_rows"))
        w_turn = t.gep(f, "%W", f.mul(turn.index, "%turn_step"))
        carry = [(t.vector, v) for v in turn.vars]
        with f.loop(0, "%taps", carry=carry, known_nonempty=True) as tap:
            tap.next = _tap_of_tile(f, form, tap, s_turn, w_turn)
        turn.next = tap.vars
    masks = t.masks(f, "%columns")
    for i in range(t.rows):
        with f.when(f.icmp("slt", i, "%valid")):
            for j, mask in enumerate(masks):
                to = t.gep(f, t.gep(f, "%C", f.mul("%ldc", i)), j * t.lanes)
                value = turn.vars[i * t.vectors + j]
                t.store(f, value, to, mask)
    return f


def _tap_of_tile(
    f: Function,
    form: Form,
    tap: Loop,
    s_turn: str,
    w_turn: str,
) -> list[str]:
    """The sums of a tile after one more tap of every row of the window."""
    t = form.tile
    place = f.mul(tap.index, "%dilation")
    column = f.mul(f.rem(place, form.stride), "%phase")
    row = t.gep(f, s_turn, f.add(column, f.div(place, form.stride)))
    w = t.gep(f, w_turn, f.mul(tap.index, "%tap_step"))
    weights = []
    for i in range(form.taps):
        weight = f.load_at(t.kind, w, f.mul("%row_step", i))
        weights.append(f.splat(t.kind, t.lanes, weight))
    sums, at = list(tap.vars), 0
    for n, meets in form.rows.items():
        if n != at:
            row, at = t.gep(f, row, f.mul("%ld", n - at)), n
        for j in range(t.vectors):
            x = t.load(f, t.gep(f, row, j * t.lanes))
            for i, number in meets:
                k = i * t.vectors + j
                sums[k] = t.fma(f, x, weights[number], sums[k])
    return sums


def task(program: Program, name: str, form: Form, epilogue: Epilogue | None) -> str:
    """Items (plane, block of rows): void(lo, hi, X, W, C, NUMBERS…, the epilogue's). With an
    epilogue C is not used. Returns the name, its functions defined in `program`."""
    t = form.tile
    params = item_parameters("XWC", ("row_tap_step", *NUMBERS))
    f = Function(name, params + list(epilogue.parameters if epilogue else ()))
    functions = [
        copy_row(f"planar_row_{t.suffix}_{form.stride}", t, form.stride),
        tile_of_pixels(f"{name}_tile", form),
    ]
    copy, compute = (program.define(made) for made in functions)
    size = f.mul("%phase", form.stride)
    S = f.op(f"alloca {t.kind}, i64 {size}, align 64")
    sums = ""
    if epilogue:
        count = f.muladd("%rows_each", "%out_wide", t.lanes)
        sums = f.op(f"alloca {t.kind}, i64 {count}, align 64")
    with f.loop(0, size, t.lanes) as i:
        t.store(f, "zeroinitializer", t.gep(f, S, i))
    multiple = f.div("%planes_out", "%planes_in")
    with f.items() as item:
        plane = f.div(item, "%blocks")
        r0 = f.mul(f.rem(item, "%blocks"), "%rows_each")
        r1 = f.min(f.add(r0, "%rows_each"), "%out_high")
        x = t.gep(f, "%X", f.mul(f.div(plane, multiple), f.mul("%high", "%wide")))
        w_plane = f.mul(f.rem(plane, "%planes_out"), f.mul("%taps", "%turns"))
        w = t.gep(f, "%W", f.add(w_plane, "%first_tap"))
        y0 = f.sub(f.mul(r0, form.row_stride), "%top")
        with f.loop(0, "%copied") as i:
            y = f.add(y0, i)
            to = t.gep(f, S, f.mul(i, "%ld"))
            _copy_or_zeros(f, form, copy, x, y, to)
        target = sums
        if not epilogue:
            pixel = f.mul(f.muladd(plane, "%out_high", r0), "%out_wide")
            target = t.gep(f, "%C", pixel)
        _tiles_of_pixels(f, form, compute, S, w, target, (r0, r1))
        if epilogue:
            first = f.mul(r0, "%out_wide")
            count = f.mul(f.sub(r1, r0), "%out_wide")
            epilogue.call(f, plane, 1, first, count, sums, f.mul("%rows_each", "%out_wide"))
    return program.define(f)


def _copy_or_zeros(
    f: Function,
    form: Form,
    copy: str,
    x: str,
    y: Int,
    to: str,
) -> None:
    """Row `y` of a plane `x` in phases at `to`, zeros outside of the plane."""
    t = form.tile

    def inside() -> None:
        row = t.gep(f, x, f.muladd(y, "%wide", "%skip"))
        wide = f.sub("%wide", "%skip")
        f.call(
            copy,
            f"ptr {row}",
            f"i64 {wide}",
            f"ptr {to}",
            "i64 %left",
            "i64 %phase",
        )

    def outside() -> None:
        for q in range(form.stride):
            with f.loop(0, "%ld", t.lanes) as c:
                place = t.gep(f, to, f.muladd("%phase", q, c))
                t.store(f, "zeroinitializer", place)

    f.choose(f.icmp("ult", y, "%high"), inside, outside)


def _tiles_of_pixels(
    f: Function,
    form: Form,
    compute: str,
    S: str,
    w: str,
    target: str,
    rows: tuple[Int, Int],
) -> None:
    """The loop over the tiles of the given rows of results."""
    t, (r0, r1) = form.tile, rows
    with (
        f.loop(0, f.sub(r1, r0), t.rows) as r,
        f.loop(0, "%out_wide", t.columns) as c,
    ):
        start = t.gep(f, S, f.muladd(r, f.mul("%ld", form.row_stride), c))
        to = t.gep(f, target, f.muladd(r, "%out_wide", c))
        numbers = (
            "%row_tap_step",
            "%tap_step",
            "%columns",
            "%phase",
            "%ld",
            "%dilation",
            "%turns",
            "%turn_step",
            "%turn_rows",
            "%out_wide",
            f.sub("%out_wide", c),
            f.sub(f.sub(r1, r0), r),
        )
        pointers = f"ptr {start}", f"ptr {w}", f"ptr {to}"
        f.call(compute, *pointers, *(f"i64 {v}" for v in numbers))


def emit_planar(program: Program, x: Instruction, kind: str, finish: Finish | None = None) -> None:
    """Emit a convolution of the form of `is_planar` (compiler/conv_forms.py), or what `finish`
    makes of it."""
    lhs, rhs = x.operands
    *rows, last = x["window"]
    down = rows[0] if rows else WindowDim(1)
    (high, wide), (out_high, out_wide) = ((1, *static_dims(o)[2:])[-2:] for o in (lhs, x))
    form = _form(program, kind, down, last, bool(rows), out_high, out_wide)
    t, unrolled, height = form.tile, form.taps, form.tile.rows
    ld = _row_elements(t, last, wide, out_wide)

    def met(count: int) -> int:
        return (count - 1) * down.stride + (fixed(down.size) - 1) * down.window_dilation + 1

    rows_each = height
    row_bytes = ld * last.stride * t.itemsize
    while rows_each < out_high and met(rows_each + height) * row_bytes <= COPIED_ROWS_BYTES:
        rows_each += height
    blocks = ceildiv(out_high, rows_each)
    flip_row, flip = (w.reversal and fixed(w.size) > 1 for w in (down, last))
    row_step = -last.size if flip_row else last.size
    tap_step = -1 if flip else 1
    features = x.dims[1]
    planes = x.dims[0] * x.dims[1]
    numbers = dict(
        planes_in=lhs.dims[1],
        planes_out=features,
        high=high,
        wide=wide,
        out_high=out_high,
        out_wide=out_wide,
        top=down.pad_low,
        left=max(last.pad_low, 0),
        skip=max(-last.pad_low, 0),
        copied=met(rows_each),
        ld=ld,
        phase=met(rows_each) * ld,
        rows_each=rows_each,
        blocks=blocks,
        taps=unrolled * last.size,
        first_tap=(down.size - 1) * last.size * flip_row + (last.size - 1) * flip,
        tap_step=tap_step,
        turns=down.size // unrolled,
        turn_step=row_step * unrolled,
        turn_rows=ld * down.window_dilation * unrolled,
        dilation=last.window_dilation,
        columns=last.size,
    )
    epilogue = finish.epilogue if finish else None
    label = f"conv_planar_{t.suffix}_{height}x{t.vectors}_{unrolled}"
    label += f"_{last.stride}{down.stride}{down.window_dilation}"
    label += f"_{epilogue.name}" if epilogue else ""
    name = program.made(task, label, form, epilogue)
    pointers = program.pointer(lhs), program.pointer(rhs), "null" if finish else program.pointer(x)
    texts = program.arguments(pointers, (row_step, *(numbers[q] for q in NUMBERS)))
    texts += finish.arguments if finish else ()
    taps = fixed(product(w.size for w in x["window"]))
    work = rows_each * ceildiv(out_wide, t.lanes) * taps
    cost = 50 + 0.5 * work + 0.5 * rows_each * out_wide
    program.parallel(name, texts, planes * blocks, cost=cost)


def _form(
    program: Program,
    kind: str,
    down: WindowDim,
    last: WindowDim,
    has_rows: bool,
    out_high: int,
    out_wide: int,
) -> Form:
    """The kernel for a window: as many vectors as a row fills, as many rows as the registers
    hold, balanced."""
    t = register_tile(kind, program.target.vector_bytes)
    most = ACCUMULATORS if program.target.vector_bytes >= 64 else ACCUMULATORS // 2
    across = ceildiv(out_wide, t.lanes)
    vectors = ceildiv(across, ceildiv(across, min(across, 4 if has_rows else 8)))
    height = min(max(1, most // vectors), out_high)
    height = ceildiv(out_high, ceildiv(out_high, height))
    rows = fixed(down.size)
    unrolled = rows if rows <= UNROLLED_TAPS else 1
    tile = Tile(t.kind, t.lanes, height, vectors)
    return Form(tile, unrolled, last.stride, down.stride, down.window_dilation)


def _row_elements(t: Tile, last: WindowDim, wide: int, out_wide: int) -> int:
    """Elements of a phase of a row's copy: what all windows of whole tiles see, and what
    `copy_row` writes."""
    pixels = round_up(out_wide, t.columns)
    step = t.lanes * last.stride
    seen = (pixels - 1) * last.stride + (fixed(last.size) - 1) * last.window_dilation + 1
    written = max(fixed(last.pad_low), 0) + round_up(wide, step) + last.stride
    return round_up(ceildiv(max(seen, written), last.stride), t.lanes)
