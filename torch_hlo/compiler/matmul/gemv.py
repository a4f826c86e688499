"""Products with few rows: no packing, the large operand streams through once.

rows:      y[m, n] = sum_k x[m, k] w[n, k]        m = 1..ROWS, both contiguous along K
columns:   y[m, n] = sum_k x[m, k] w[k, n]        m = 1 or 2, w contiguous along n
groups:    w holds four-bit numbers, with a scale and an offset per group (dot_narrow.py); any m

The kernel of groups reads each byte once per six rows of x and makes floats of it in registers: two
instructions a vector, beside one multiply-add per row of x. Sums of a group are scaled when it
ends."""

from __future__ import annotations

from torch_hlo.hlo.ir import Instruction, fixed

from ..codegen import Program
from ..llvm import Function, Int
from ..thresholds import GEMV_STRIP, PREFETCH_BYTES
from .product import SOURCES, hint
from .tile import (
    Source,
    Tile,
    converted,
)

HEIGHTS = 6, 3, 2, 1  # rows of x at a time: sums of six fill the registers of AVX2
AHEAD = 4  # groups whose scales are asked for


def gemv_rows(
    name: str, t: Tile, sources: tuple[Source, Source], rows: int, pairs: bool = False
) -> Function:
    """void(x, x_m, w, w_n, y, y_m, y_n, n0, n1, k): columns [n0, n1) of `rows` rows. Strides in
    elements. `pairs`: of bf16, which the processor multiplies as they are."""
    params = "ptr x, i64 x_m, ptr w, i64 w_n, ptr y, i64 y_m, i64 y_n, i64 n0, i64 n1, i64 k"
    f = Function(name, params, attrs="noinline #0")
    # sums in registers
    at_once = max(1, min(8, (24 if t.masks_stores else 12) // rows))
    while at_once & (at_once - 1):
        at_once -= 1
    whole = f.muladd(f.div(f.sub("%n1", "%n0"), at_once), at_once, "%n0")
    with f.loop("%n0", whole, at_once) as n:
        _strip(f, t, sources, rows, at_once, n, pairs)
    if at_once > 1:
        with f.loop(whole, "%n1") as n:
            _strip(f, t, sources, rows, 1, n, pairs)
    return f


def _strip(
    f: Function,
    t: Tile,
    sources: tuple[Source, Source],
    rows: int,
    count: int,
    n: str,
    pairs: bool,
) -> None:
    width = 2 * t.lanes if pairs else t.lanes
    x_rows = [f.gep(sources[0].kind, "%x", f.mul("%x_m", i)) for i in range(rows)]
    w_rows = [f.gep(sources[1].kind, "%w", f.mul("%w_n", f.add(n, j))) for j in range(count)]
    whole = f.op(f"and i64 %k, {-width}")

    def step(k: str, sums: list[str], mask: str) -> list[str]:
        def read(source: Source, row: str) -> str:
            p = f.gep(source.kind, row, k)
            v = f.masked_load(source.kind, width, p, mask)
            return v if pairs else converted(f, t, source, v)

        if not mask:
            for row in w_rows:
                ahead = f.gep("i8", f.gep(sources[1].kind, row, k), PREFETCH_BYTES)
                f.do(f"call void @llvm.prefetch.p0(ptr {ahead}, i32 0, i32 3, i32 1)")
        ws = [read(sources[1], row) for row in w_rows]
        result = list(sums)
        for i, row in enumerate(x_rows):
            x = read(sources[0], row)
            for j, w in enumerate(ws):
                result[j * rows + i] = multiply(f, x, w, sums[j * rows + i])
        return result

    multiply = t.fma_pairs if pairs else t.fma

    with f.loop(0, whole, width, [(t.vector, "zeroinitializer")] * (rows * count)) as loop:
        loop.next = step(loop.index, loop.vars, "")
    sums = loop.vars
    left = f.icmp("slt", whole, "%k")
    sums = f.choose(
        left,
        lambda: step(whole, sums, f.lane_mask(width, whole, "%k")),
        lambda: sums,
        [t.vector] * len(sums),
    )
    for j in range(count):
        for i in range(rows):
            total = f.op(
                f"call reassoc {t.kind} @llvm.vector.reduce.fadd.{t.suffix}({t.kind} -0.0,"
                f" {t.vector} {sums[j * rows + i]})"
            )
            f.store_at(
                t.kind,
                total,
                "%y",
                f.muladd("%y_m", i, f.mul("%y_n", f.add(n, j))),
            )


def gemv_columns(name: str, t: Tile, sources: tuple[Source, Source], rows: int) -> Function:
    """void(x, x_m, x_k, w, w_k, y, y_m, n0, n1, k): columns [n0, n1) of `rows` rows. Strides in
    elements.

    A few rows of w at a time are added to a strip of y, so that memory is read in long pieces.
    """
    params = "ptr x, i64 x_m, i64 x_k, ptr w, i64 w_k, ptr y, i64 y_m, i64 n0, i64 n1, i64 k"
    f = Function(name, params, attrs="noinline #0")
    at_once = 8 // rows
    whole = f.mul(f.div("%k", at_once), at_once)
    with f.loop("%n0", "%n1", GEMV_STRIP) as n:
        count = f.min(f.sub("%n1", n), GEMV_STRIP)
        y_rows = [t.gep(f, "%y", f.muladd("%y_m", i, n)) for i in range(rows)]
        for y in y_rows:
            f.do(
                f"call void @llvm.memset.p0.i64(ptr {y}, i8 0, i64 {f.mul(count, t.itemsize)}, i1"
                " false)"
            )
        for first, last, step in ((0, whole, at_once), (whole, "%k", 1)):
            with f.loop(first, last, step) as k:
                _add_rows(f, t, sources, rows, step, n, count, k, y_rows)
    return f


def _add_rows(
    f: Function,
    t: Tile,
    sources: tuple[Source, Source],
    rows: int,
    at_once: int,
    n: Int,
    count: Int,
    k: Int,
    y_rows: list[str],
) -> None:
    """y[:, strip] += x[:, k : k + at_once] w[k : k + at_once, strip]."""
    right = sources[1]
    factors = _factors(f, t, sources[0], rows, at_once, k)
    w_rows = [f.gep(right.kind, "%w", f.muladd("%w_k", f.add(k, j), n)) for j in range(at_once)]
    for c, mask in f.vectors_of(t.lanes, 0, count):
        ws = []
        for w in w_rows:
            p = f.gep(right.kind, w, c)
            w_elements = f.masked_load(right.kind, t.lanes, p, mask)
            ws.append(converted(f, t, right, w_elements))
        for i, y in enumerate(y_rows):
            p = t.gep(f, y, c)
            total = t.load(f, p, mask)
            for j, w in enumerate(ws):
                total = t.fma(f, factors[i * at_once + j], w, total)
            t.store(f, total, p, mask)


def _factors(
    f: Function,
    t: Tile,
    source: Source,
    rows: int,
    at_once: int,
    k: Int,
) -> list[str]:
    """The elements x[:, k : k + at_once], each in all lanes."""
    one = Tile(t.kind, 1, 1, 1)
    factors = []
    for i in range(rows):
        for j in range(at_once):
            at = f.muladd("%x_m", i, f.mul("%x_k", f.add(k, j)))
            p = f.gep(source.kind, "%x", at)
            v = f.load(f"<1 x {source.kind}>", p)
            v = f.op(f"extractelement <1 x {t.kind}> {converted(f, one, source, v)}, i64 0")
            factors.append(f.splat(t.kind, t.lanes, v))
    return factors


class _Groups(Function):
    """void(lo, hi, x, sums, w, scales, y, m): an item is a strip of `vectors` * `lanes` bytes of a
    block."""

    def __init__(self, x: Instruction, lanes: int) -> None:
        left, sums, w, scales = x.operands
        self.rows = left.dims[0]
        self.source = SOURCES[scales.dtype, "float"]
        self.blocks, self.k, self.half = map(fixed, w.dims)
        self.groups = fixed(sums.dims[1])
        self.n = fixed(scales.dims[1])
        few = hint(self.rows, 512) <= HEIGHTS[1]
        self.t = Tile("float", lanes, HEIGHTS[0], 2 if few and self.half % (2 * lanes) == 0 else 1)
        shape = (*w.dims, self.groups, self.source.name, self.rows)
        pointers = "ptr x, ptr sums, ptr w, ptr scales, ptr y"
        super().__init__(
            f"groups_{'_'.join(map(str, shape))}",
            f"i64 lo, i64 hi, {pointers}, i64 m",
        )
        with self.items() as item:
            strips = self.half // self.t.columns
            block = self.div(item, strips)
            at = self.mul(self.rem(item, strips), self.t.columns)
            low = self.muladd(block, 2 * self.half, at)
            source = self.gep("i8", "%w", self.muladd(block, self.k * self.half, at))
            first: Int = 0
            m: Int = self.rows if isinstance(self.rows, int) else "%m"
            for height in HEIGHTS:
                end = self.sub(m, self.rem(self.sub(m, first), height))
                if first != end:
                    with self.loop(first, end, height) as row:
                        self._tile(source, low, row, height)
                first = end

    def _tile(self, source: str, low: Int, row: Int, height: int) -> None:
        """`height` rows of y from `row` on, of the bytes at `source`, of which the first holds the
        row `low` of the matrix."""
        t = self.t
        group = self.k // self.groups
        columns = [
            self.add(low, half * self.half + v * t.lanes)
            for v in range(t.vectors)
            for half in (0, 1)
        ]
        zeros = [(t.vector, "zeroinitializer")] * (len(columns) * height)
        unroll = 2 if len(zeros) <= 4 else 1  # sums wait for themselves, four cycles
        with self.loop(0, self.groups, 1, zeros) as totals:
            first = self.mul(totals.index, group)
            with self.loop(first, self.add(first, group), unroll, zeros * unroll, True) as sums:
                sums.next = []
                for i in range(unroll):
                    old = sums.vars[i * len(zeros) :]
                    sums.next += self._step(source, self.add(sums.index, i), row, height, old)
            found = sums.vars[: len(zeros)]
            if unroll == 2:
                other = sums.vars[len(zeros) :]
                found = [self.op(f"fadd {t.vector} {a}, {b}") for a, b in zip(found, other)]
            totals.next = self._scaled(totals.index, columns, row, found, totals.vars)
        for i, total in enumerate(totals.vars):
            r, c = divmod(i, len(columns))
            at = self.muladd(self.add(row, r), self.n, columns[c])
            self.store(t.vector, total, self.gep("float", "%y", at))

    def _x(self, pointer: str, row: Int, width: int, at: Int) -> str:
        """An element of a matrix, in all lanes."""
        place = self.muladd(row, width, at)
        return self.splat("float", self.t.lanes, self.load_at("float", pointer, place))

    def _step(self, source: str, k: Int, row: Int, height: int, sums: list[str]) -> list[str]:
        """The products with the bytes of one k: per row of x, per vector, low and high halves."""
        t = self.t
        numbers = []
        integers = f"<{self.t.lanes} x i32>"
        for v in range(t.vectors):
            at = self.gep("i8", source, self.muladd(k, self.half, v * t.lanes))
            code = self.load(f"<{t.lanes} x i8>", at)
            code = self.op(f"zext <{t.lanes} x i8> {code} to {integers}")
            for half in ("and {} {}, splat (i32 15)", "lshr {} {}, splat (i32 4)"):
                q = self.op(half.format(integers, code))
                numbers.append(self.op(f"sitofp {integers} {q} to {t.vector}"))
        following: list[str] = []
        for r in range(height):
            by = self._x("%x", self.add(row, r), self.k, k)
            for q in numbers:
                following.append(t.fma(self, by, q, sums[len(following)]))
        return following

    def _scaled(
        self, group: Int, columns: list[Int], row: Int, sums: list[str], totals: list[str]
    ) -> list[str]:
        """The totals with the sums of a group."""
        t = self.t
        scales = [self._scales(group, c) for c in columns]
        result = []
        for i, (total, found) in enumerate(zip(totals, sums, strict=True)):
            r, c = divmod(i, len(columns))
            whole = self._x("%sums", self.add(row, r), self.groups, group)
            total = t.fma(self, found, scales[c][0], total)
            result.append(t.fma(self, whole, scales[c][1], total))
        return result

    def _scales(self, group: Int, column: Int) -> list[str]:
        """Scales, and offsets less 8 scales, of the rows of a vector."""
        t = self.t
        kind = self.source.kind
        size = 2 * self.source.itemsize
        at = self.muladd(group, self.n, column)
        p = self.gep("i8", "%scales", self.mul(at, size))
        ahead = self.gep("i8", p, AHEAD * self.n * size)
        self.do(f"call void @llvm.prefetch.p0(ptr {ahead}, i32 0, i32 3, i32 1)")
        both = self.load(f"<{2 * t.lanes} x {kind}>", p, 1)
        vector = f"<{2 * t.lanes} x {kind}>"
        pair = []
        for first in (0, 1):
            order = ", ".join(f"i32 {first + 2 * i}" for i in range(t.lanes))
            v = f"shufflevector {vector} {both}, {vector} poison, <{t.lanes} x i32> <{order}>"
            pair.append(converted(self, t, self.source, self.op(v)))
        eight = self.op(f"fmul {t.vector} {pair[0]}, splat (float 8.0)")
        return [pair[0], self.op(f"fsub {t.vector} {pair[1]}, {eight}")]


def emit_groups(program: Program, x: Instruction) -> None:
    """A step with such a product."""
    kernel = _Groups(x, min(program.target.lanes(32), fixed(x.operands[2].dims[2])))
    name = program.define(kernel)
    places = [*map(program.place, x.operands), program.place(x, 0)]
    arguments = program.arguments(places, [kernel.rows])
    items = kernel.blocks * kernel.half // kernel.t.columns
    each = kernel.k * kernel.t.columns * (0.04 + 0.05 * hint(kernel.rows, 512))
    program.parallel(name, arguments, items, cost=50 + each)
