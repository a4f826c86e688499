"""QR factors of real matrices by Householder reflections, in blocks of columns: what a block does
to all that follows is three products.

    (I - tau_0 v_0 v_0^T) (I - tau_1 v_1 v_1^T) … = I - V T V^T

with T upper triangular (Schreiber and Van Loan 1989, LAPACK's geqrt). A block's rows are vectors,
so that one pass over them gives a column's norm and its products with all columns of the block: of
those before it T is made, of those behind it they lose their part. T is kept turned, S = T^T, by
rows.
"""

import functools
from collections.abc import Sequence

from torch_hlo.hlo.ir import Instruction

from ..codegen import Program, Writer, load_real, store
from ..gather.gather_scatter import Sizes
from ..llvm import BITS, Int, item_parameters
from ..thresholds import QR_CHUNK
from .blocked_factors import Kernel, Matrix, run_factors
from .linalg import AT_ONCE, BLOCK


class _Panel(Kernel):
    """Reflections of a block of columns: a panel [rows, BLOCK] holds V, with ones on its diagonal;
    S is [BLOCK, BLOCK]."""

    def __init__(self, f: Writer, dtype: str) -> None:
        super().__init__(f, dtype)
        self.parts = BLOCK // self.lanes
        self.whole: list[str | None] = [None] * self.parts  # masks of a panel's rows
        pointers = [
            f.alloca(self.kind, size, 64) for size in (BLOCK * QR_CHUNK, BLOCK * QR_CHUNK, BLOCK)
        ]
        self.w, self.u, self.row = (
            Matrix(p, 0, width)
            for p, width in zip(pointers, (QR_CHUNK, QR_CHUNK, BLOCK), strict=True)
        )

    def vectors(self, m: Matrix, i: Int, masks: Sequence[str | None]) -> list[str]:
        f = self.f
        lanes = self.lanes
        return [
            load_real(f, self.dtype, m.pointer, m.at(f, i, p * lanes), lanes, mask)
            for p, mask in enumerate(masks)
        ]

    def write(self, values: list[str], m: Matrix, i: Int, masks: Sequence[str | None]) -> None:
        for p, (v, mask) in enumerate(zip(values, masks, strict=True)):
            store(
                self.f,
                self.dtype,
                v,
                m.pointer,
                m.at(self.f, i, p * self.lanes),
                self.lanes,
                mask,
            )

    def all(self, value: str) -> str:
        return self.f.splat(self.kind, self.lanes, value)

    def op(self, name: str, a: str, b: str) -> str:
        return self.f.op(f"{name} {self.vector} {a}, {b}")

    def choose(self, mask: str, a: str, b: str) -> str:
        return self.f.op(f"select <{self.lanes} x i1> {mask}, {self.vector} {a}, {self.vector} {b}")

    def rows_of(self, m: Matrix, i: Int) -> list[list[str]]:
        """AT_ONCE rows of a panel, which may be rows of zeros at its end."""
        return [self.vectors(m, self.f.add(i, r), self.whole) for r in range(AT_ONCE)]

    def begin(self, x: Matrix, v: Matrix, rows: Int, columns: Int) -> None:
        """v := x [rows, columns <= BLOCK], wider by zeros, and AT_ONCE - 1 rows of zeros."""
        f = self.f
        masks = [f.lane_mask(self.lanes, p * self.lanes, columns) for p in range(self.parts)]
        with f.loop(0, rows) as i:
            self.write(self.vectors(x, i, masks), v, i, self.whole)
        with f.loop(rows, f.add(rows, AT_ONCE - 1)) as i:
            self.write(["zeroinitializer"] * self.parts, v, i, self.whole)

    def reflect(self, x: Matrix, s: Matrix, rows: Int, columns: Int) -> None:
        """A panel x := R on and above the diagonal, the reflections below it; s is made."""
        f = self.f
        whole = self.whole
        for_all = ["zeroinitializer"] * self.parts
        with f.loop(0, BLOCK) as j:
            self.write(for_all, s, j, whole)
        with f.loop(0, f.min(columns, rows)) as k:
            below = f.add(k, 1)
            sums = self._products_of_column(x, k, below, rows)
            beta, tau, scale = self._reflection(x, k)
            own = self.vectors(x, k, whole)
            scales = self.all(scale)
            minus = self.all(f.op(f"fneg {self.kind} {tau}"))
            # of v_k with every column; before k, with v_j
            products = [self.fma(scales, total, row) for total, row in zip(sums, own, strict=True)]
            self.write(products, self.row, 0, whole)
            carry = [(self.vector, z) for z in for_all]
            with f.loop(0, k, carry=carry) as j:
                by = self.all(self.get(self.row, 0, j.index))
                j.next = [
                    self.fma(by, row, total)
                    for row, total in zip(self.vectors(s, j.index, whole), j.vars, strict=True)
                ]
            self.write([self.op("fmul", minus, total) for total in j.vars], s, k, whole)
            self.put(tau, s, k, k)
            before, done = (
                [f.lane_mask(self.lanes, p * self.lanes, end) for p in range(self.parts)]
                for end in (k, below)
            )
            less = [
                self.choose(d, "zeroinitializer", self.op("fmul", minus, p))
                for d, p in zip(done, products, strict=True)
            ]
            row = [self.op("fadd", a, b) for a, b in zip(own, less, strict=True)]
            self.write(row, x, k, whole)
            self.put(beta, x, k, k)
            ones = self.all(self.t.const(1.0))
            # column k becomes v_k
            factor = [
                self.choose(b, ones, self.choose(d, scales, ones))
                for b, d in zip(before, done, strict=True)
            ]
            less = [self.op("fmul", scales, p) for p in less]
            self._subtract(x, k, below, rows, factor, less)

    def _products_of_column(self, x: Matrix, k: Int, below: Int, rows: Int) -> list[str]:
        """The products of column k with all columns, below row k; also in `row`."""
        f = self.f
        carry = [(self.vector, "zeroinitializer")] * (self.parts * AT_ONCE)
        with f.loop(below, rows, AT_ONCE, carry=carry) as i:
            tile = self.rows_of(x, i.index)
            by = [self.all(self.get(x, f.add(i.index, r), k)) for r in range(AT_ONCE)]
            i.next = []
            for n, total in enumerate(i.vars):
                r, p = divmod(n, self.parts)
                i.next.append(self.fma(by[r], tile[r][p], total))
        sums = [
            functools.reduce(lambda a, b: self.op("fadd", a, b), i.vars[p :: self.parts])
            for p in range(self.parts)
        ]
        self.write(sums, self.row, 0, self.whole)
        return sums

    def _reflection(self, x: Matrix, k: Int) -> tuple[str, str, str]:
        """(the diagonal element of R, tau, the factor that makes v_k of the column)."""
        f = self.f
        kind = self.kind
        tail = self.get(self.row, 0, k)
        head = self.get(x, k, k)
        norm = self.t.sqrt(self.t.fma(head, head, tail))
        positive = f.op(f"fcmp oge {kind} {head}, 0.0")
        turned = f.select(positive, kind, f.op(f"fneg {kind} {norm}"), norm)
        nothing = f.op(f"fcmp oeq {kind} {tail}, 0.0")  # the column is done
        beta = f.select(nothing, kind, head, turned)
        apart = f.op(f"fsub {kind} {head}, {turned}")
        inverse = f.op(f"fdiv {kind} {self.t.const(1.0)}, {apart}")
        scale = f.select(nothing, kind, "0.0", inverse)
        quotient = f.op(f"fneg {kind} {f.op(f'fdiv {kind} {apart}, {turned}')}")
        return beta, f.select(nothing, kind, "0.0", quotient), scale

    def _subtract(
        self,
        x: Matrix,
        k: Int,
        below: Int,
        rows: Int,
        factor: list[str],
        less: list[str],
    ) -> None:
        """Rows below k: times `factor`, plus column k times `less`."""
        f = self.f
        with f.loop(below, rows, AT_ONCE) as i:
            by = [self.all(self.get(x, f.add(i, r), k)) for r in range(AT_ONCE)]
            for r, row in enumerate(self.rows_of(x, i)):
                values = [
                    self.fma(by[r], p, self.op("fmul", a, m))
                    for a, m, p in zip(row, factor, less, strict=True)
                ]
                self.write(values, x, f.add(i, r), self.whole)

    def finish(self, v: Matrix, x: Matrix, rows: Int, columns: Int) -> None:
        """x := the panel v."""
        masks = [self.f.lane_mask(self.lanes, p * self.lanes, columns) for p in range(self.parts)]
        with self.f.loop(0, rows) as i:
            self.write(self.vectors(v, i, self.whole), x, i, masks)

    def unpack(self, v: Matrix, rows: Int, columns: Int) -> None:
        """v := V of the reflections below its diagonal."""
        f = self.f
        with f.loop(0, f.min(BLOCK, rows)) as i:
            kept = [
                f.lane_mask(self.lanes, p * self.lanes, f.min(i, columns))
                for p in range(self.parts)
            ]
            self.write(self.vectors(v, i, kept), v, i, self.whole)
        with f.loop(0, f.min(columns, rows)) as i:
            self.put(self.t.const(1.0), v, i, i)

    def apply(self, v: Matrix, s: Matrix, c: Matrix, rows: Int, columns: Int) -> None:
        """c := (I - V s V^T) c."""
        f = self.f
        with f.loop(0, columns, QR_CHUNK) as j:
            width = f.min(QR_CHUNK, f.sub(columns, j))
            for target, left, right, depth in (
                (self.w, v.turned, c.part(f, 0, j), rows),
                (self.u, s, self.w, BLOCK),
            ):
                f.do(
                    f"call void @llvm.memset.p0.i64(ptr {target.pointer}, i8 0, i64"
                    f" {BLOCK * QR_CHUNK * BITS[self.kind] // 8}, i1 false)"
                )
                self.subtract_product(target, left, right, BLOCK, width, depth)
            self.subtract_product(c.part(f, 0, j), v, self.u, rows, width, BLOCK)


def emit_qr(program: Program, x: Instruction) -> None:
    """(Q, R on and above the diagonal of a matrix, workspace) of each matrix of a batch, a matrix
    per item."""
    a = x.operand
    *_, m, n = a.dims
    f = Writer(program, "qr", item_parameters(("a", "q", "x", "work")))
    kernel = _Panel(f, a.dtype)
    size = Sizes(f)
    rows = size(m)
    columns = size(n)
    width = size(x.elements[0].dims[-1])
    steps = f.min(rows, columns)
    elements = f.mul(rows, columns)
    count = f.ceildiv(steps, BLOCK)
    with f.items() as item:
        base = f.mul(item, elements)
        kernel.map_rows(lambda own, v: [v], elements, Matrix("%x", base, 1), Matrix("%a", base, 1))
        packed = Matrix("%x", base, columns)
        q = Matrix("%q", f.mul(item, f.mul(rows, width)), width)
        high = f.add(rows, AT_ONCE - 1)
        work = f.mul(item, f.mul(f.muladd(count, BLOCK, high), BLOCK))
        v = Matrix("%work", work, BLOCK)
        kept = Matrix("%work", f.muladd(high, BLOCK, work), BLOCK)
        with f.loop(0, steps, BLOCK) as start:
            wide = f.min(BLOCK, f.sub(columns, start))
            high = f.sub(rows, start)
            s = kept.part(f, start, 0)
            after = f.add(start, wide)
            block = packed.part(f, start, start)
            kernel.begin(block, v, high, wide)
            kernel.reflect(v, s, high, wide)
            kernel.finish(v, block, high, wide)
            kernel.unpack(v, high, wide)
            kernel.apply(v, s, packed.part(f, start, after), high, f.sub(columns, after))
        kernel.map_rows(
            lambda own: ["zeroinitializer"],
            f.mul(rows, width),
            Matrix("%q", q.base, 1),
        )
        with f.loop(0, f.min(rows, width)) as i:
            kernel.put(kernel.t.const(1.0), q, i, i)
        with f.loop(0, count) as back:
            start = f.mul(f.sub(f.sub(count, 1), back), BLOCK)
            high = f.sub(rows, start)
            wide = f.min(BLOCK, f.sub(columns, start))
            kernel.begin(packed.part(f, start, start), v, high, wide)
            kernel.unpack(v, high, wide)
            turned = kept.part(f, start, 0).turned
            below = q.part(f, start, start)
            kernel.apply(v, turned, below, high, f.sub(width, start))
    run_factors(f, x, size, 300)
