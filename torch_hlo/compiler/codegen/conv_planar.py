"""Depthwise convolutions of arrays whose channels come first: every plane of pixels is filtered on its own, and pixels of a row are lanes.

    for each plane and block of its rows:   copy the rows that windows meet, zeros around them           S[phase][row][column / stride]
                                            for some rows and vectors of columns: for each column of taps: the rows below, each loaded once
                                            finish (epilogue), or store

A stride along rows takes the copy apart into phases, so that a tap meets neighbouring elements. Nothing is transposed: alone, such a convolution is
a read and a write of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_hlo.compiler.codegen.conv_direct import register_tile
from torch_hlo.compiler.codegen.dot import Finish
from torch_hlo.compiler.codegen.epilogue import Epilogue
from torch_hlo.compiler.codegen.function import Function, Int
from torch_hlo.compiler.codegen.gemm import (
    Tile,
    lane_mask,
    masked_load,
    masked_store,
    multiply_add,
    splat,
)
from torch_hlo.hlo.dim import ceildiv
from torch_hlo.hlo.infer import product
from torch_hlo.hlo.ir import Instruction
from torch_hlo.hlo.window import WindowDim

S_BYTES = 64 << 10  # copied rows of a block
UNROLLED_TAPS = 11  # rows of a window, up to this many, that share what they load
ACCUMULATORS = 16  # vectors, with 32 registers
NUMBERS = (
    "planes_in", "planes_out", "high", "wide", "out_high", "out_wide", "top", "left", "skip", "copied", "ld", "phase", "rows_each", "blocks",
    "taps", "first_tap", "tap_step", "turns", "turn_step", "turn_rows", "dilation", "columns",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Form:
    """What a kernel is written for: rows and vectors of its tile of results, rows of taps that share their loads, strides along columns and rows, and the distance
    of rows of taps."""

    tile: Tile
    taps: int
    stride: int
    row_stride: int
    row_dilation: int

    @property
    def rows(self) -> dict[int, list[tuple[int, int]]]:
        """Row of the copy, from the first that a tile meets -> the (row of the tile, row of taps) that meet there."""
        found: dict[int, list[tuple[int, int]]] = {}
        for i in range(self.tile.rows):
            for tap in range(self.taps):
                found.setdefault(i * self.row_stride + tap * self.row_dilation, []).append((i, tap))
        return dict(sorted(found.items()))


def copy_row(name: str, t: Tile, stride: int) -> Function:
    """void(x, wide, S, left, phase): element i < wide of a row lands at place left + i, which is S[place % stride * phase + place / stride]. Up to a vector
    of zeros follows the last one."""
    f = Function(
        name,
        "void",
        [("ptr", "x"), ("i64", "wide"), ("ptr", "S"), ("i64", "left"), ("i64", "phase")],
        attrs="noinline #0",
    )
    places = [
        f.gep(
            t.kind,
            "%S",
            f.add(
                f.mul(f.rem(f.add("%left", q), stride), "%phase"), f.div(f.add("%left", q), stride)
            ),
        )
        for q in range(stride)
    ]

    def vectors(i: Int, masked: bool) -> None:
        loaded = []
        for v in range(stride):
            p = f.gep(t.kind, "%x", f.add(i, v * t.lanes))
            loaded.append(
                masked_load(
                    f,
                    t.kind,
                    t.lanes,
                    p,
                    lane_mask(f, t.lanes, f.add(i, v * t.lanes), "%wide"),
                    t.itemsize,
                )
                if masked
                else f.load(t.vector, p, t.itemsize)
            )
        for q, place in enumerate(places):
            v = loaded[0]
            if stride == 2:
                lanes = ", ".join(f"i32 {2 * n + q}" for n in range(t.lanes))
                v = f.op(
                    f"shufflevector {t.vector} {loaded[0]}, {t.vector} {loaded[1]}, <{t.lanes} x i32> <{lanes}>"
                )
            f.store(t.vector, v, f.gep(t.kind, place, f.div(i, stride)), t.itemsize)

    step = t.lanes * stride
    whole = f.mul(f.div("%wide", step), step)
    with f.loop(0, whole, step) as i:
        vectors(i, False)
    with f.when(f.icmp("slt", whole, "%wide")):
        vectors(whole, True)
    return f


def tile_of_pixels(name: str, form: Form) -> Function:
    """void(S, W, C, row_step, tap_step, taps, phase, ld, dilation, turns, turn_step, turn_rows, ldc, columns, valid): a tile of `valid` rows and `columns` columns
    of results; the windows of the first one start at S. A turn takes `form.taps` rows of `taps` taps; W[turn * turn_step + row * row_step + tap * tap_step]."""
    form_taps, t = form.taps, form.tile
    names = (
        "row_step",
        "tap_step",
        "taps",
        "phase",
        "ld",
        "dilation",
        "turns",
        "turn_step",
        "turn_rows",
        "ldc",
        "columns",
        "valid",
    )
    f = Function(
        name,
        "void",
        [
            ("ptr noalias", "S"),
            ("ptr noalias", "W"),
            ("ptr noalias", "C"),
            *(("i64", q) for q in names),
        ],
        attrs="noinline #0",
    )
    zeros = [(t.vector, "zeroinitializer")] * (t.rows * t.vectors)
    with f.loop(0, "%turns", carry=zeros, known_nonempty=True) as turn:
        s_turn, w_turn = (
            f.gep(t.kind, "%S", f.mul(turn.index, "%turn_rows")),
            f.gep(t.kind, "%W", f.mul(turn.index, "%turn_step")),
        )
        with f.loop(
            0, "%taps", carry=[(t.vector, v) for v in turn.vars], known_nonempty=True
        ) as tap:
            place = f.mul(tap.index, "%dilation")
            row = f.gep(
                t.kind,
                s_turn,
                f.add(f.mul(f.rem(place, form.stride), "%phase"), f.div(place, form.stride)),
            )
            w = f.gep(t.kind, w_turn, f.mul(tap.index, "%tap_step"))
            weights = [
                splat(
                    f,
                    t.kind,
                    t.lanes,
                    f.load(t.kind, f.gep(t.kind, w, f.mul("%row_step", i)), t.itemsize),
                )
                for i in range(form_taps)
            ]
            sums, at = list(tap.vars), 0
            for n, meets in form.rows.items():
                if n != at:
                    row, at = f.gep(t.kind, row, f.mul("%ld", n - at)), n
                for j in range(t.vectors):
                    x = f.load(t.vector, f.gep(t.kind, row, j * t.lanes), t.itemsize)
                    for i, number in meets:
                        sums[i * t.vectors + j] = multiply_add(
                            f, t, x, weights[number], sums[i * t.vectors + j]
                        )
            tap.next = sums
        turn.next = tap.vars
    masks = [lane_mask(f, t.lanes, j * t.lanes, "%columns") for j in range(t.vectors)]
    for i in range(t.rows):
        with f.when(f.icmp("slt", i, "%valid")):
            for j, mask in enumerate(masks):
                masked_store(
                    f,
                    t.kind,
                    t.lanes,
                    turn.vars[i * t.vectors + j],
                    f.gep(t.kind, f.gep(t.kind, "%C", f.mul("%ldc", i)), j * t.lanes),
                    mask,
                    t.itemsize,
                )
    return f


def task(name: str, form: Form, epilogue: Epilogue | None, program) -> str:
    """Items (plane, block of rows): void(lo, hi, X, W, C, NUMBERS…, the epilogue's). With an epilogue C is not used. Returns the name, its functions defined
    in `program`."""
    t = form.tile
    params = [
        ("i64", "lo"),
        ("i64", "hi"),
        ("ptr", "X"),
        ("ptr", "W"),
        ("ptr", "C"),
        ("i64", "row_tap_step"),
        *(("i64", q) for q in NUMBERS),
    ]
    f = Function(name, "void", params + list(epilogue.parameters if epilogue else ()))
    functions = [
        copy_row(f"planar_row_{t.suffix}_{form.stride}", t, form.stride),
        tile_of_pixels(f"{name}_tile", form),
    ]
    copy, compute = (program.function(made.name, made.text()) for made in functions)
    size = f.mul("%phase", form.stride)
    S = f.op(f"alloca {t.kind}, i64 {size}, align 64")
    sums = (
        f.op(f"alloca {t.kind}, i64 {f.add(f.mul('%rows_each', '%out_wide'), t.lanes)}, align 64")
        if epilogue
        else ""
    )
    with f.loop(0, size, t.lanes) as i:
        f.store(t.vector, "zeroinitializer", f.gep(t.kind, S, i), t.itemsize)
    multiple = f.div("%planes_out", "%planes_in")
    with f.loop("%lo", "%hi") as item:
        plane, r0 = f.div(item, "%blocks"), f.mul(f.rem(item, "%blocks"), "%rows_each")
        r1 = f.min(f.add(r0, "%rows_each"), "%out_high")
        x = f.gep(t.kind, "%X", f.mul(f.div(plane, multiple), f.mul("%high", "%wide")))
        w = f.gep(
            t.kind,
            "%W",
            f.add(f.mul(f.rem(plane, "%planes_out"), f.mul("%taps", "%turns")), "%first_tap"),
        )
        y0 = f.sub(f.mul(r0, form.row_stride), "%top")
        with f.loop(0, "%copied") as i:
            y, to = f.add(y0, i), f.gep(t.kind, S, f.mul(i, "%ld"))

            def inside(y=y, to=to, x=x) -> None:
                row = f.gep(t.kind, x, f.add(f.mul(y, "%wide"), "%skip"))
                f.call(
                    "void",
                    copy,
                    f"ptr {row}",
                    f"i64 {f.sub('%wide', '%skip')}",
                    f"ptr {to}",
                    "i64 %left",
                    "i64 %phase",
                )

            def outside(to=to) -> None:
                for q in range(form.stride):
                    with f.loop(0, "%ld", t.lanes) as c:
                        f.store(
                            t.vector,
                            "zeroinitializer",
                            f.gep(t.kind, to, f.add(f.mul("%phase", q), c)),
                            t.itemsize,
                        )

            f.choose(f.icmp("ult", y, "%high"), inside, outside)
        target = (
            sums
            if epilogue
            else f.gep(t.kind, "%C", f.mul(f.add(f.mul(plane, "%out_high"), r0), "%out_wide"))
        )
        with f.loop(0, f.sub(r1, r0), t.rows) as r, f.loop(0, "%out_wide", t.columns) as c:
            start = f.gep(t.kind, S, f.add(f.mul(r, f.mul("%ld", form.row_stride)), c))
            to = f.gep(t.kind, target, f.add(f.mul(r, "%out_wide"), c))
            numbers = ("%row_tap_step", "%tap_step", "%columns", "%phase", "%ld", "%dilation", "%turns", "%turn_step", "%turn_rows", "%out_wide",
                       f.sub("%out_wide", c), f.sub(f.sub(r1, r0), r))  # fmt: skip
            f.call(
                "void",
                compute,
                f"ptr {start}",
                f"ptr {w}",
                f"ptr {to}",
                *(f"i64 {v}" for v in numbers),
            )
        if epilogue:
            epilogue.call(
                f,
                plane,
                1,
                f.mul(r0, "%out_wide"),
                f.mul(f.sub(r1, r0), "%out_wide"),
                sums,
                f.mul("%rows_each", "%out_wide"),
            )
    return program.function(f.name, f.text())


def emit_planar(program, x: Instruction, kind: str, finish: Finish | None = None) -> None:
    """Emit a convolution of the form of `is_planar` (passes/conv_layout.py), or what `finish` makes of it."""
    lhs, rhs = x.operands
    *rows, last = x["window"]
    down = rows[0] if rows else WindowDim(1)
    (high, wide), (out_high, out_wide) = ((1, *o.shape.dims[2:])[-2:] for o in (lhs, x))
    t = register_tile(kind, program.target.vector_bytes)
    most = ACCUMULATORS if program.target.vector_bytes >= 64 else ACCUMULATORS // 2
    vectors = min(ceildiv(out_wide, t.lanes), 4 if rows else 8)
    vectors = ceildiv(ceildiv(out_wide, t.lanes), ceildiv(ceildiv(out_wide, t.lanes), vectors))
    height = min(max(1, most // vectors), out_high)
    height = ceildiv(out_high, ceildiv(out_high, height))
    unrolled = down.size if down.size <= UNROLLED_TAPS else 1
    form = Form(
        Tile(t.kind, t.itemsize, t.lanes, height, vectors),
        unrolled,
        last.stride,
        down.stride,
        down.window_dilation,
    )

    left, skip = max(last.pad_low, 0), max(-last.pad_low, 0)
    step = t.lanes * last.stride
    places = max(
        (ceildiv(out_wide, vectors * t.lanes) * vectors * t.lanes - 1) * last.stride
        + (last.size - 1) * last.window_dilation
        + 1,
        left + ceildiv(wide, step) * step + last.stride,
    )
    ld = ceildiv(ceildiv(places, last.stride), t.lanes) * t.lanes

    def met(count: int) -> int:
        return (count - 1) * down.stride + (down.size - 1) * down.window_dilation + 1

    rows_each = height
    while (
        rows_each < out_high and met(rows_each + height) * ld * last.stride * t.itemsize <= S_BYTES
    ):
        rows_each += height
    blocks = ceildiv(out_high, rows_each)
    phase = met(rows_each) * ld
    flip_row, flip = (w.reversal and w.size > 1 for w in (down, last))
    row_step, tap_step = -last.size if flip_row else last.size, -1 if flip else 1
    first = (down.size - 1) * last.size * flip_row + (last.size - 1) * flip
    features, planes = x.shape.dims[1], x.shape.dims[0] * x.shape.dims[1]
    turns = down.size // unrolled
    numbers = dict(
        planes_in=lhs.shape.dims[1], planes_out=features, high=high, wide=wide, out_high=out_high, out_wide=out_wide, top=down.pad_low, left=left, skip=skip,
        copied=met(rows_each), ld=ld, phase=phase, rows_each=rows_each, blocks=blocks, taps=unrolled * last.size, first_tap=first, tap_step=tap_step,
        turns=turns, turn_step=row_step * unrolled, turn_rows=ld * down.window_dilation * unrolled, dilation=last.window_dilation, columns=last.size,
    )  # fmt: skip
    key = (form, finish and finish.epilogue)
    label = f"conv_planar_{t.suffix}_{height}x{vectors}_{unrolled}_{last.stride}{down.stride}{down.window_dilation}{'_' + finish.epilogue.name if finish else ''}"
    name = program.once(("conv_planar", *key), lambda: task(label, *key, program))
    pointers = [
        program.pointer(lhs),
        program.pointer(rhs),
        "null" if finish else program.pointer(x),
    ]
    texts = [
        *(f"ptr {p}" for p in pointers),
        f"i64 {row_step}",
        *(f"i64 {numbers[q]}" for q in NUMBERS),
        *(finish.arguments if finish else ()),
    ]
    work = rows_each * ceildiv(out_wide, t.lanes) * product(w.size for w in x["window"])
    program.parallel(
        name, texts, str(planes * blocks), cost=50 + 0.5 * work + 0.5 * rows_each * out_wide
    )
