"""fft as a step. What the kernels do not take (lengths that are symbolic, odd lengths of real lines, large prime factors; GPUs) is a host call; with
passes/fourier.py in the pipeline only symbolic lengths are left of that.

    fft_plan.py     radices, tables, whether a line is cut in two
    fft_lines.py    what happens to a vector of lines
"""

from __future__ import annotations

from math import prod

import numpy as np

from torch_hlo.compiler.codegen import gemm, host
from torch_hlo.compiler.codegen.fft_lines import (
    Block,
    Columns,
    Lines,
    RealColumns,
    column_masks,
    mirror_ends,
    mirror_line,
    rows_in,
    rows_out,
    tangle,
    transform,
    untangle,
)  # fmt: skip
from torch_hlo.compiler.codegen.fft_plan import (
    MOST,
    ONE_TABLE,
    SPLIT,
    Plan,
    matrix_twiddles,
    mirror_roots,
    pass_twiddles,
    plan,
    radices,
    real_roots,
)
from torch_hlo.compiler.codegen.function import Int
from torch_hlo.compiler.codegen.inline import Writer
from torch_hlo.compiler.codegen.program import Place
from torch_hlo.compiler.codegen.registry import emits_step
from torch_hlo.compiler.passes.fourier import across
from torch_hlo.hlo.dim import Size, ceildiv
from torch_hlo.hlo.ir import Instruction

_KIND = {"f32": "float", "f64": "double", "c64": "float", "c128": "double"}
LOCAL_BYTES = (
    1 << 18
)  # of an array between columns and rows that one thread keeps; larger ones are cut, and shared by the threads
CHUNK = 256  # vectors of points in an item of `mirror_line`


@emits_step("fft")
def fft(program, x: Instruction) -> None:
    if x.shape.size == 0:
        return
    if not fits(program.target, x):
        return host.fft(program, x)
    operand, kind, lengths = x.operands[0], x["fft_type"], x["fft_length"]
    t = gemm.tile(_KIND[x.shape.dtype], program.target.vector_bytes)
    inverse = kind in ("IFFT", "IRFFT")
    scale = 1.0 / prod(lengths) if inverse else 1.0
    source, target, spectrum = (
        program.place(operand),
        program.place(x),
        operand if kind == "IRFFT" else x,
    )
    outer: Size = 1
    for d in x.shape.dims[: -len(lengths)]:
        outer = outer * d
    others = []  # (transforms of the same kind before it, points, numbers beside each other) of the dimensions but the last
    for i in range(len(lengths) - 1):
        others.append(
            (
                outer * prod(lengths[:i]),
                lengths[i],
                prod(lengths[i + 1 : -1]) * spectrum.shape.dims[-1],
            )
        )
    rows = outer * prod(lengths[:-1])
    if kind == "IRFFT" and others:
        middle = program.scratch(operand.shape.nbytes)
        for number, what in enumerate(others):
            _columns(program, t, "IFFT", *what, source if number == 0 else middle, middle, 1.0)
        source = middle
    _rows(program, t, kind, lengths[-1], rows, source, target, scale)
    if kind != "IRFFT":
        for what in reversed(others):
            _columns(program, t, "IFFT" if inverse else "FFT", *what, target, target, 1.0)


def fits(target, x: Instruction) -> bool:
    """Whether the kernels here compute an fft."""
    lengths = x["fft_length"]
    if target.grid or not all(isinstance(n, int) and n > 0 for n in lengths):
        return False
    return row_plan(x["fft_type"], lengths[-1], None, 16) is not None and all(
        radices(n) is not None and n <= MOST for n in lengths[:-1]
    )


def row_plan(kind: str, n: int, lines: int | None, lanes: int) -> Plan | None:
    """Plan of the transforms along the last dimension, of length `n`."""
    if kind in ("FFT", "IFFT"):
        return plan(n, lines, lanes)
    if n % 2:
        return None
    found = plan(n // 2, lines, lanes)
    if found and found.rows and n // 2 < 4 * lanes:
        found = Plan(n // 2, ns=found.ns)
    return found


def _constant(program, values: np.ndarray, t: gemm.Tile) -> Place:
    """A table of complex numbers (or of what `in_lanes` made) as elements of the kernel's type."""
    flat = np.ascontiguousarray(values).view(np.float64) if values.dtype.kind == "c" else values
    return program.constant(flat.astype(np.float32 if t.kind == "float" else np.float64).tobytes())


class _Text:
    """A function of a range of items, its tables and scratch memory."""

    def __init__(self, program, t: gemm.Tile, name: str, pointers: str, sizes: str = "") -> None:
        self.f = Writer(
            program,
            name,
            [
                ("i64", "lo"),
                ("i64", "hi"),
                *(("ptr", p) for p in pointers.split()),
                *(("i64", s) for s in sizes.split()),
            ],
        )
        self.c, self.t = Lines(self.f, t), t

    def block(self, points: int) -> Block:
        """Room for points 0 to `points`, in whole vectors of `rows_in`."""
        return Block(
            self.c,
            self.f.alloca(
                self.t.kind, ceildiv(points + 1, self.t.lanes) * 2 * self.t.lanes * self.t.lanes, 64
            ),
        )

    def spare(self, points: int) -> tuple[Block, Block]:
        return self.block(points), self.block(points)

    def masks(self, at: Int, extent: int) -> tuple[str, str] | None:
        return column_masks(self.c, self.f.sub(extent, at)) if extent % self.t.lanes else None

    def define(self) -> str:
        return self.f.define()


def _in_block(n: int, spare: tuple[Block, Block]) -> Block:
    """Where `transform` may leave its result when it starts from spare[0]."""
    return spare[max(1, len(radices(n))) % 2]


def emit_across(program, x: Instruction) -> None:
    """Emit a fusion that passes/fourier.py made of transposes around an fft."""
    kind, length, d = across(x)
    t = gemm.tile(_KIND[x.shape.dtype], program.target.vector_bytes)
    outer, beside = (prod(dims, start=1) for dims in (x.shape.dims[:d], x.shape.dims[d + 1 :]))
    scale = 1.0 / length if kind in ("IFFT", "IRFFT") else 1.0
    _columns(
        program,
        t,
        kind,
        outer,
        length,
        beside,
        program.place(x.operands[0]),
        program.place(x),
        scale,
    )


def _columns(
    program,
    t: gemm.Tile,
    kind: str,
    outer: Size,
    length: int,
    inner: Size,
    source: Place,
    target: Place,
    scale: float,
) -> None:
    """Transforms of `outer` matrices of `length` rows of `inner` elements, along the columns; complex ones in place if need be."""
    if length == 1 and source == target and scale == 1.0:
        return
    real = kind[:-3]  # "", "I", "R", "IR"
    n, inverse = length // 2 if real in ("R", "IR") else length, real in ("I", "IR")
    takes, gives = (
        {"R": length, "IR": length + 2}.get(real, 2 * n),
        {"R": length + 2, "IR": length}.get(real, 2 * n),
    )  # elements of a column

    def build() -> str:
        w = _Text(
            program, t, f"{kind.lower()}_columns_{length}", "from to twiddles roots", "inner blocks"
        )
        f, c, spare = w.f, w.c, w.spare(n)
        with f.loop("%lo", "%hi") as item:
            block, matrix = f.rem(item, "%blocks"), f.div(item, "%blocks")
            at = f.mul(block, t.lanes)
            left = f.sub("%inner", at)
            masks, mask = column_masks(c, left), gemm.lane_mask(f, t.lanes, 0, left)

            def side(
                pointer: str, elements: int, single: bool, scale: float
            ) -> Columns | RealColumns:
                """Elements of a column lie beside those of others: complex numbers, or `single` elements."""
                base = c.at(
                    pointer,
                    f.add(f.mul(f.mul(matrix, "%inner"), elements), at if single else f.mul(at, 2)),
                )
                if single:
                    return RealColumns(c, base, "%inner", mask, inverse, scale)
                return Columns(c, base, f.mul("%inner", 2), masks, real == "I", scale)

            given, made = (
                side("%from", takes, real == "R", 1.0),
                side("%to", gives, real == "IR", scale),
            )
            if real == "IR":
                tangle(c, n, given, spare[0], "%roots")
                given = spare[0]
            done = made
            if real == "R":
                done = spare[len(radices(n)) % 2 == 0]
            transform(c, n, given, done, spare, "%twiddles")
            if real == "R":
                untangle(c, n, done, made, "%roots")
        return w.define()

    name = program.once(("fft columns", t, kind, length, scale), build)
    blocks = ceildiv(inner, t.lanes)
    arguments = [
        f"ptr {program.at(p)}"
        for p in (
            source,
            target,
            *(_constant(program, v, t) for v in (pass_twiddles(n), real_roots(n))),
        )
    ]
    arguments += [f"i64 {program.size(s)}" for s in (inner, blocks)]
    program.parallel(name, arguments, program.size(outer * blocks), cost=_cost(n))


def _cost(n: int) -> float:
    """Nanoseconds of a vector of lines."""
    return 20 + n * (2 + 2.0 * len(radices(n)))


def _rows(
    program,
    t: gemm.Tile,
    kind: str,
    length: int,
    lines: Size,
    source: Place,
    target: Place,
    scale: float,
) -> None:
    """Transforms of contiguous lines of `length` points."""
    p = row_plan(kind, length, lines if isinstance(lines, int) else None, t.lanes)
    if p.rows:
        return _matrices(program, t, kind, p, lines, source, target, scale)
    n, real = p.n, kind[:-3]  # "", "I", "R", "IR"
    inverse = real in ("I", "IR")

    def build() -> str:
        w = _Text(program, t, f"{kind.lower()}_rows_{length}", "from to twiddles roots", "lines")
        f, c, spare = w.f, w.c, w.spare(n)
        done = _in_block(n, spare)
        takes, gives = (2 * (n + (real == name)) for name in ("IR", "R"))
        with f.loop("%lo", "%hi") as item:
            line = f.mul(item, t.lanes)
            left = f.sub("%lines", line)
            rows_in(
                c, c.at("%from", f.mul(line, takes)), takes, left, takes // 2, spare[0], real == "I"
            )
            if real == "IR":
                tangle(c, n, spare[0], spare[0], "%roots")
            transform(c, n, spare[0], done, spare, "%twiddles")
            if real == "R":
                untangle(c, n, done, done, "%roots")
            rows_out(
                c, c.at("%to", f.mul(line, gives)), gives, left, gives // 2, done, inverse, scale
            )
        return w.define()

    name = program.once(("fft rows", t, kind, length, scale), build)
    tables = [pass_twiddles(n), real_roots(n)]
    arguments = [
        f"ptr {program.at(q)}"
        for q in (source, target, *(_constant(program, v, t) for v in tables))
    ] + [f"i64 {program.size(lines)}"]
    program.parallel(name, arguments, program.size(ceildiv(lines, t.lanes)), cost=1.5 * _cost(n))


class _Matrix:
    """Lines of n = rows x columns points: transforms along the columns, then along the rows, in a function or two."""

    POINTERS = "row_twiddles column_twiddles near far roots"

    def __init__(self, w: _Text, p: Plan, inverse: bool, scale: float) -> None:
        self.w, self.p, self.inverse, self.scale = w, p, inverse, scale
        self.spare = w.spare(max(p.rows, p.columns))

    def along_columns(self, source: str, middle: str, blocks: tuple[Int, Int], swap: bool) -> None:
        """Columns of `source`, in vectors number `blocks`; results, multiplied, to the same place in `middle`."""
        w, p, f, c = self.w, self.p, self.w.f, self.w.c
        vectors = -(-p.columns // c.lanes)
        with f.loop(*blocks) as block:
            at = f.mul(block, c.lanes)
            masks = w.masks(at, p.columns)

            def factor(i: Int) -> tuple[str, str]:
                def table(name: str, row: Int) -> tuple[str, str]:
                    return Block(c, name).get(f.add(f.mul(row, vectors), block))

                if p.n <= ONE_TABLE:
                    return table("%near", i)
                return c.product(table("%near", f.rem(i, SPLIT)), table("%far", f.div(i, SPLIT)))

            given, made = (
                Columns(c, c.at(pointer, f.mul(at, 2)), 2 * p.columns, masks, s)
                for pointer, s in ((source, swap), (middle, False))
            )
            made.factor = factor
            transform(c, p.rows, given, made, self.spare, "%row_twiddles")

    def along_rows(self, middle: str, target: str, blocks: tuple[Int, Int]) -> None:
        """Rows of `middle`; point k of row r is number k * rows + r of the line's transform."""
        w, p, f, c = self.w, self.p, self.w.f, self.w.c
        with f.loop(*blocks) as block:
            at = f.mul(block, c.lanes)
            rows_in(
                c,
                c.at(middle, f.mul(at, 2 * p.columns)),
                2 * p.columns,
                f.sub(p.rows, at),
                p.columns,
                self.spare[0],
                False,
            )
            made = Columns(
                c,
                c.at(target, f.mul(at, 2)),
                2 * p.rows,
                w.masks(at, p.rows),
                self.inverse,
                self.scale,
            )
            transform(c, p.columns, self.spare[0], made, self.spare, "%column_twiddles")


def _matrices(
    program,
    t: gemm.Tile,
    kind: str,
    p: Plan,
    lines: Size,
    source: Place,
    target: Place,
    scale: float,
) -> None:
    n, real = p.n, kind[:-3]
    inverse = real in ("I", "IR")
    takes, gives = (2 * (n + (real == name)) for name in ("IR", "R"))
    near, *far = matrix_twiddles(p.rows, p.columns, t.lanes, t.itemsize)
    roots = mirror_roots(n, t.lanes, t.itemsize) if real in ("R", "IR") else near
    tables = [
        _constant(program, v, t)
        for v in (
            pass_twiddles(p.rows),
            pass_twiddles(p.columns),
            near,
            far[0] if far else near,
            roots,
        )
    ]
    key = (t, kind, p.n, scale)
    of_columns, of_rows, of_mirror = (
        -(-p.columns // t.lanes),
        -(-p.rows // t.lanes),
        -(-(n // 2) // t.lanes),
    )

    def run(name: str, build, pointers, items: Size, cost: float) -> None:
        found = program.once((name, *key), lambda: build(f"{kind.lower()}_{name}_{n}"))
        program.parallel(
            found,
            [f"ptr {program.at(q)}" for q in (*pointers, *tables)],
            program.size(items),
            cost=cost,
        )

    if 2 * n * t.itemsize <= LOCAL_BYTES:

        def whole(name: str) -> str:
            w = _Text(program, t, name, f"from to {_Matrix.POINTERS}")
            f, c, m = w.f, w.c, _Matrix(w, p, inverse, scale)
            middle, mirrored = (
                f.alloca(t.kind, 2 * n, 64),
                f.alloca(t.kind, 2 * n, 64) if real in ("R", "IR") else "",
            )
            with f.loop("%lo", "%hi") as line:
                given, made = c.at("%from", f.mul(line, takes)), c.at("%to", f.mul(line, gives))
                if real == "IR":
                    mirror_line(c, n, given, mirrored, "%roots", (0, of_mirror), True)
                    mirror_ends(c, n, given, mirrored, True)
                m.along_columns(
                    mirrored if real == "IR" else given, middle, (0, of_columns), real == "I"
                )
                m.along_rows(middle, mirrored if real == "R" else made, (0, of_rows))
                if real == "R":
                    mirror_line(c, n, mirrored, made, "%roots", (0, of_mirror), False)
                    mirror_ends(c, n, mirrored, made, False)
            return w.define()

        return run(
            "matrix",
            whole,
            (source, target),
            lines,
            of_columns * _cost(p.rows) + of_rows * _cost(p.columns),
        )

    # Large lines: each stage is shared by the threads. An item is a vector of columns, of rows, or a chunk of a line.
    middle = program.scratch(lines * (2 * n * t.itemsize))
    mirrored = program.scratch(lines * (2 * n * t.itemsize)) if real in ("R", "IR") else None
    chunks = -(-of_mirror // CHUNK)

    def stage(many: int, from_stride: int, to_stride: int, body):
        def build(name: str) -> str:
            w = _Text(program, t, name, f"from to {_Matrix.POINTERS}")
            f, c = w.f, w.c
            with f.loop("%lo", "%hi") as item:
                line, block = f.div(item, many), f.rem(item, many)
                body(
                    w,
                    c.at("%from", f.mul(line, from_stride)),
                    c.at("%to", f.mul(line, to_stride)),
                    block,
                )
            return w.define()

        return build

    def mirror(w: _Text, given: str, made: str, chunk: Int) -> None:
        f = w.f
        low = f.mul(chunk, CHUNK)
        mirror_line(
            w.c, n, given, made, "%roots", (low, f.min(f.add(low, CHUNK), of_mirror)), inverse
        )
        with f.when(f.icmp("eq", chunk, 0)):
            mirror_ends(w.c, n, given, made, inverse)

    def columns(w: _Text, given: str, made: str, block: Int) -> None:
        _Matrix(w, p, inverse, scale).along_columns(
            given, made, (block, w.f.add(block, 1)), real == "I"
        )

    def rows(w: _Text, given: str, made: str, block: Int) -> None:
        _Matrix(w, p, inverse, scale).along_rows(given, made, (block, w.f.add(block, 1)))

    if real == "IR":
        run(
            "mirror",
            stage(chunks, takes, 2 * n, mirror),
            (source, mirrored),
            lines * chunks,
            CHUNK * 8.0,
        )
        source = mirrored
    run(
        "columns",
        stage(of_columns, 2 * n, 2 * n, columns),
        (source, middle),
        lines * of_columns,
        2 * _cost(p.rows),
    )
    run(
        "rows",
        stage(of_rows, 2 * n, 2 * n, rows),
        (middle, mirrored if real == "R" else target),
        lines * of_rows,
        2 * _cost(p.columns),
    )
    if real == "R":
        run(
            "mirror",
            stage(chunks, 2 * n, gives, mirror),
            (mirrored, target),
            lines * chunks,
            CHUNK * 8.0,
        )
