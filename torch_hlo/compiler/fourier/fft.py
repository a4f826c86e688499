"""fft as a step. What the kernels do not take (lengths that are symbolic, odd lengths of real
lines, large prime factors; GPUs) is a host call; with compiler/fourier/fourier.py in the
pipeline only symbolic lengths are left of that.

    fft_plan.py     radices, tables, whether a line is cut in two
    fft_lines.py    what happens to a vector of lines
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction, Size, ceildiv

from ..codegen import Place, Program, Writer
from ..control import host_calls
from ..llvm import Int, item_parameters
from ..matmul.tile import Tile, product_tile
from ..thresholds import (
    FFT_CHUNK,
    FFT_LOCAL_BYTES,
    FFT_MOST,
    ONE_TABLE,
)
from .fft_lines import (
    Block,
    Columns,
    Lines,
    Points,
    RealColumns,
    column_masks,
    mirror_ends,
    mirror_line,
    rows_in,
    rows_out,
    tangle,
    transform,
    untangle,
)
from .fft_plan import (
    SPLIT,
    Plan,
    matrix_twiddles,
    mirror_roots,
    pass_twiddles,
    passes,
    plan,
    radices,
    real_roots,
)
from .fourier import across

_KIND = {"f32": "float", "f64": "double", "c64": "float", "c128": "double"}


@frozen
class _Transform:
    """Transforms of `length` points of a kind (FFT, IFFT, RFFT, IRFFT), in vectors of a tile;
    results are multiplied by `scale`."""

    t: Tile
    kind: str
    length: int
    scale: float = 1.0

    @property
    def real(self) -> str:
        """ "", "I", "R" or "IR"."""
        return self.kind[:-3]

    @property
    def inverse(self) -> bool:
        return self.real in ("I", "IR")

    @property
    def points(self) -> int:
        """Complex ones."""
        return self.length // 2 if self.real in ("R", "IR") else self.length

    @property
    def elements(self) -> tuple[int, int]:
        """Of a line, before and after."""
        return 2 * (self.points + (self.real == "IR")), 2 * (self.points + (self.real == "R"))


def fft(program: Program, x: Instruction) -> None:
    if x.size == 0:
        return
    if not fits(x):
        return host_calls.fft(program, x)
    operand = x.operand
    kind = x["fft_type"]
    lengths = x["fft_length"]
    t = product_tile(_KIND[x.dtype], program.target.vector_bytes)
    inverse = kind in ("IFFT", "IRFFT")
    last = _Transform(t, kind, lengths[-1], 1.0 / prod(lengths) if inverse else 1.0)
    source = program.place(operand)
    target = program.place(x)
    spectrum = operand if kind == "IRFFT" else x
    outer: Size = 1
    for d in x.dims[: -len(lengths)]:
        outer *= d
    # of the dimensions but the last, with how many come before each and lie beside each other
    others: list[tuple[_Transform, Size, Size]] = []
    for i in range(len(lengths) - 1):
        others.append(
            (
                _Transform(t, "IFFT" if inverse else "FFT", lengths[i]),
                outer * prod(lengths[:i]),
                prod(lengths[i + 1 : -1]) * spectrum.dims[-1],
            )
        )
    rows = outer * prod(lengths[:-1])
    if kind == "IRFFT" and others:
        middle = program.scratch(operand.nbytes)
        for number, what in enumerate(others):
            _columns(program, *what, source if number == 0 else middle, middle)
        source = middle
    _rows(program, last, rows, source, target)
    if kind != "IRFFT":
        for what in reversed(others):
            _columns(program, *what, target, target)


def fits(x: Instruction) -> bool:
    """Whether the kernels here compute an fft."""
    lengths = x["fft_length"]
    if not all(isinstance(n, int) and n > 0 for n in lengths):
        return False
    return row_plan(x["fft_type"], lengths[-1], None, 16) is not None and all(
        radices(n) is not None and n <= FFT_MOST for n in lengths[:-1]
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


def _constant(program: Program, values: np.ndarray, t: Tile) -> Place:
    """A table of complex numbers (or of what `in_lanes` made) as elements of the kernel's type."""
    flat = np.ascontiguousarray(values).view(np.float64) if values.dtype.kind == "c" else values
    return program.constant(flat.astype(np.float32 if t.kind == "float" else np.float64).tobytes())


class _Text:
    """A function of a range of items, its tables and scratch memory."""

    def __init__(
        self, program: Program, t: Tile, name: str, pointers: str, sizes: str = ""
    ) -> None:
        self.f = Writer(program, name, item_parameters(pointers.split(), sizes.split()))
        self.c = Lines(self.f, t)
        self.t = t

    def block(self, points: int) -> Block:
        """Room for points 0 to `points`, in whole vectors of `rows_in`."""
        return Block(
            self.c,
            self.f.alloca(
                self.t.kind,
                ceildiv(points + 1, self.t.lanes) * 2 * self.t.lanes * self.t.lanes,
                64,
            ),
        )

    def spare(self, points: int) -> tuple[Block, Block]:
        return self.block(points), self.block(points)

    def masks(self, at: Int, extent: int) -> tuple[str, str] | None:
        return column_masks(self.c, self.f.sub(extent, at)) if extent % self.t.lanes else None


def _in_block(n: int, spare: tuple[Block, Block]) -> Block:
    """Where `transform` may leave its result when it starts from spare[0]."""
    return spare[max(1, len(passes(n))) % 2]


def emit_across(program: Program, x: Instruction) -> None:
    """Emit a fusion that compiler/fourier/fourier.py made of transposes around an fft."""
    found = across(x)
    assert found is not None
    kind, length, d = found
    t = product_tile(_KIND[x.dtype], program.target.vector_bytes)
    outer, beside = (prod(dims, start=1) for dims in (x.dims[:d], x.dims[d + 1 :]))
    scale = 1.0 / length if kind in ("IFFT", "IRFFT") else 1.0
    what = _Transform(t, kind, length, scale)
    _columns(program, what, outer, beside, program.place(x.operand), program.place(x))


def _columns(
    program: Program,
    what: _Transform,
    outer: Size,
    inner: Size,
    source: Place,
    target: Place,
) -> None:
    """Transforms of `outer` matrices of rows of `inner` elements, along the columns; complex ones
    in place if need be."""
    if what.length == 1 and source == target and what.scale == 1.0:
        return
    n = what.points
    name = program.made(_columns_text, what)
    blocks = ceildiv(inner, what.t.lanes)
    tables = (_constant(program, v, what.t) for v in (pass_twiddles(n), real_roots(n)))
    arguments = program.arguments((source, target, *tables), (inner, blocks))
    program.parallel(name, arguments, outer * blocks, cost=_cost(n))


def _columns_text(program: Program, what: _Transform) -> str:
    t = what.t
    real = what.real
    n = what.points
    takes, gives = what.elements
    name = f"{what.kind.lower()}_columns_{what.length}"
    w = _Text(program, t, name, "from to twiddles roots", "inner blocks")
    f = w.f
    c = w.c
    spare = w.spare(n)
    with f.items() as item:
        block = f.rem(item, "%blocks")
        matrix = f.div(item, "%blocks")
        at = f.mul(block, t.lanes)
        left = f.sub("%inner", at)
        masks = column_masks(c, left)
        mask = f.lane_mask(t.lanes, 0, left)

        def side(pointer: str, elements: int, single: bool, scale: float) -> Columns | RealColumns:
            """Elements of a column lie beside those of others: complex numbers, or `single`
            elements."""
            column = f.mul(f.mul(matrix, "%inner"), elements)
            base = c.at(pointer, f.add(column, at if single else f.mul(at, 2)))
            if single:
                return RealColumns(c, base, "%inner", mask, what.inverse, scale)
            return Columns(c, base, f.mul("%inner", 2), masks, real == "I", scale)

        given: Points = side("%from", takes, real == "R", 1.0)
        made = side("%to", gives, real == "IR", what.scale)
        if real == "IR":
            tangle(c, n, given, spare[0])
            given = spare[0]
        done: Points = spare[len(passes(n)) % 2 == 0] if real == "R" else made
        transform(c, n, given, done, spare, "%twiddles")
        if real == "R":
            untangle(c, n, done, made)
    return w.f.define()


def _cost(n: int) -> float:
    """Nanoseconds of a vector of lines."""
    return 20 + n * (2 + 2.0 * len(passes(n)))


def _rows(program: Program, what: _Transform, lines: Size, source: Place, target: Place) -> None:
    """Transforms of contiguous lines."""
    lanes = what.t.lanes
    p = row_plan(what.kind, what.length, lines if isinstance(lines, int) else None, lanes)
    assert p is not None
    if p.rows:
        return _matrices(program, what, p, lines, source, target)
    name = program.made(_rows_text, what)
    tables = [_constant(program, v, what.t) for v in (pass_twiddles(p.n), real_roots(p.n))]
    arguments = program.arguments((source, target, *tables), [lines])
    program.parallel(name, arguments, ceildiv(lines, lanes), cost=1.5 * _cost(p.n))


def _rows_text(program: Program, what: _Transform) -> str:
    t = what.t
    real = what.real
    n = what.points
    name = f"{what.kind.lower()}_rows_{what.length}"
    w = _Text(program, t, name, "from to twiddles roots", "lines")
    f = w.f
    c = w.c
    spare = w.spare(n)
    done = _in_block(n, spare)
    takes, gives = what.elements
    with f.items() as item:
        line = f.mul(item, t.lanes)
        left = f.sub("%lines", line)
        source = c.at("%from", f.mul(line, takes))
        rows_in(c, source, takes, left, takes // 2, spare[0], real == "I")
        if real == "IR":
            tangle(c, n, spare[0], spare[0])
        transform(c, n, spare[0], done, spare, "%twiddles")
        if real == "R":
            untangle(c, n, done, done)
        target = c.at("%to", f.mul(line, gives))
        rows_out(c, target, gives, left, gives // 2, done, what.inverse, what.scale)
    return w.f.define()


class _Matrix:
    """Lines of n = rows x columns points: transforms along the columns, then along the rows, in a
    function or two."""

    POINTERS = "row_twiddles column_twiddles near far roots"

    def __init__(self, w: _Text, p: Plan, what: _Transform) -> None:
        self.w = w
        self.p = p
        self.what = what
        self.spare = w.spare(max(p.rows, p.columns))

    def along_columns(
        self,
        source: str,
        middle: str,
        blocks: tuple[Int, Int],
        swap: bool,
    ) -> None:
        """Columns of `source`, in vectors number `blocks`; results, multiplied, to the same place
        in `middle`."""
        w = self.w
        p = self.p
        f = self.w.f
        c = self.w.c
        vectors = ceildiv(p.columns, c.lanes)
        with f.loop(*blocks) as block:
            at = f.mul(block, c.lanes)
            masks = w.masks(at, p.columns)

            def factor(i: Int) -> tuple[str, str]:
                def table(name: str, row: Int) -> tuple[str, str]:
                    return Block(c, name).get(f.muladd(row, vectors, block))

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
        w = self.w
        p = self.p
        f = self.w.f
        c = self.w.c
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
                self.what.inverse,
                self.what.scale,
            )
            transform(c, p.columns, self.spare[0], made, self.spare, "%column_twiddles")


def _matrices(
    program: Program,
    what: _Transform,
    p: Plan,
    lines: Size,
    source: Place,
    target: Place,
) -> None:
    t = what.t
    real = what.real
    near, *far = matrix_twiddles(p.rows, p.columns, t.lanes, t.itemsize)
    roots = mirror_roots(p.n, t.lanes, t.itemsize) if real in ("R", "IR") else near
    twiddles = pass_twiddles(p.rows), pass_twiddles(p.columns)
    values = (*twiddles, near, far[0] if far else near, roots)
    tables = [_constant(program, v, t) for v in values]
    stages = _Stages(program, what, p, tables)
    if 2 * p.n * t.itemsize <= FFT_LOCAL_BYTES:
        cost = stages.column_vectors * _cost(p.rows) + stages.row_vectors * _cost(p.columns)
        return stages.run("matrix", stages.whole, (source, target), lines, cost)
    # Large lines: each stage is shared by the threads. An item is a vector of columns, of rows, or
    # a chunk of a line.
    nbytes = lines * (2 * p.n * t.itemsize)
    middle = program.scratch(nbytes)
    mirrored = program.scratch(nbytes) if real in ("R", "IR") else target
    if real == "IR":
        stages.mirror_lines((source, mirrored), lines)
        source = mirrored
    stages.transform(source, middle, mirrored if real == "R" else target, lines)
    if real == "R":
        stages.mirror_lines((mirrored, target), lines)


# writes a stage on a part of a line: (text, from, to, number of the part)
Body = Callable[[_Text, str, str, Int], None]


class _Stages:
    """The functions of transforms of lines that are matrices, and their calls."""

    def __init__(self, program: Program, what: _Transform, p: Plan, tables: list[Place]) -> None:
        self.program = program
        self.what = what
        self.p = p
        self.tables = tables
        self.t = t = what.t
        self.real = what.real
        self.takes, self.gives = what.elements
        self.column_vectors = ceildiv(p.columns, t.lanes)
        self.row_vectors = ceildiv(p.rows, t.lanes)
        self.mirror_vectors = ceildiv(p.n // 2, t.lanes)

    def run(
        self,
        name: str,
        build: Callable[[str], str],
        places: tuple[Place, Place],
        items: Size,
        cost: float,
    ) -> None:
        program = self.program
        found = program.once(
            (name, self.what),
            lambda: build(f"{self.what.kind.lower()}_{name}_{self.p.n}"),
        )
        arguments = program.arguments((*places, *self.tables))
        program.parallel(found, arguments, items, cost=cost)

    def matrix(self, w: _Text) -> _Matrix:
        return _Matrix(w, self.p, self.what)

    def whole(self, name: str) -> str:
        """All stages of a line, by one thread."""
        n = self.p.n
        real = self.real
        w = _Text(self.program, self.t, name, f"from to {_Matrix.POINTERS}")
        f = w.f
        c = w.c
        m = self.matrix(w)
        columns = (0, self.column_vectors)
        rows = (0, self.row_vectors)
        mirror = (0, self.mirror_vectors)
        middle = f.alloca(self.t.kind, 2 * n, 64)
        mirrored = f.alloca(self.t.kind, 2 * n, 64) if real in ("R", "IR") else ""
        with f.items() as line:
            given = c.at("%from", f.mul(line, self.takes))
            made = c.at("%to", f.mul(line, self.gives))
            if real == "IR":
                mirror_line(c, n, given, mirrored, mirror, True)
                mirror_ends(c, n, given, mirrored, True)
            m.along_columns(mirrored if real == "IR" else given, middle, columns, real == "I")
            m.along_rows(middle, mirrored if real == "R" else made, rows)
            if real == "R":
                mirror_line(c, n, mirrored, made, mirror, False)
                mirror_ends(c, n, mirrored, made, False)
        return w.f.define()

    def stage(
        self, many: int, from_stride: int, to_stride: int, body: Body
    ) -> Callable[[str], str]:
        """`body` on each of the `many` parts of every line."""

        def build(name: str) -> str:
            w = _Text(self.program, self.t, name, f"from to {_Matrix.POINTERS}")
            f = w.f
            c = w.c
            with f.items() as item:
                line, block = f.divmod(item, many)
                given = c.at("%from", f.mul(line, from_stride))
                body(w, given, c.at("%to", f.mul(line, to_stride)), block)
            return w.f.define()

        return build

    def mirror_lines(self, places: tuple[Place, Place], lines: Size) -> None:
        n = self.p.n
        inverse = self.what.inverse
        chunks = ceildiv(self.mirror_vectors, FFT_CHUNK)

        def body(w: _Text, given: str, made: str, chunk: Int) -> None:
            f = w.f
            low = f.mul(chunk, FFT_CHUNK)
            vectors = low, f.min(f.add(low, FFT_CHUNK), self.mirror_vectors)
            mirror_line(w.c, n, given, made, vectors, inverse)
            with f.when(f.icmp("eq", chunk, 0)):
                mirror_ends(w.c, n, given, made, inverse)

        strides = (self.takes, 2 * n) if inverse else (2 * n, self.gives)
        self.run(
            "mirror",
            self.stage(chunks, *strides, body),
            places,
            lines * chunks,
            FFT_CHUNK * 8.0,
        )

    def transform(self, source: Place, middle: Place, target: Place, lines: Size) -> None:
        """All columns, then all rows."""

        def columns(w: _Text, given: str, made: str, block: Int) -> None:
            m = self.matrix(w)
            m.along_columns(given, made, (block, w.f.add(block, 1)), self.real == "I")

        def rows(w: _Text, given: str, made: str, block: Int) -> None:
            self.matrix(w).along_rows(given, made, (block, w.f.add(block, 1)))

        points = 2 * self.p.n
        for name, body, many, places, n in (
            ("columns", columns, self.column_vectors, (source, middle), self.p.rows),
            ("rows", rows, self.row_vectors, (middle, target), self.p.columns),
        ):
            build = self.stage(many, points, points, body)
            self.run(name, build, places, lines * many, 2 * _cost(n))
