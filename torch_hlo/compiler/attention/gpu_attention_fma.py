"""Attention with multiply-adds on f32, for every type and target: tiles of 64 x 64 scores that
never leave the group of threads.

Each of 256 threads holds 4 x 4 scores and 4 rows of every output of its group. Matrices come
through shared memory in slices of 16 along what is summed over; elements outside of them are zero.
"""

import math as numbers

from torch_hlo.hlo.ir import Size, ceildiv

from ..gpu.gpu_program import GpuProgram
from ..llvm import Int, Typed, math
from ..matmul.gpu.gpu_blocks import store_sums
from .attention import Attention
from .gpu_attention_kernel import BLOCK, EACH, WIDTHS, AttentionKernel, Matrix

SLICE = 16  # depth of a slice; threads along a side of a tile
SIDE = 16
# elements between the rows of a tile in shared memory: 16-byte aligned, and neighbouring rows start
# in different banks
PITCH = BLOCK + EACH

Sums = list[list[str]]  # [row of the thread][column of the thread]


def _weights(t: Typed, scores: Sums, tops: list[str]) -> Sums:
    return [
        [math.exp(t, t.sub(v, top)) for v in row] for row, top in zip(scores, tops, strict=True)
    ]


class _Tiles(AttentionKernel):
    threads = SIDE * SIDE

    def __init__(self, program: GpuProgram, a: Attention[Size]) -> None:
        super().__init__(program, a)
        f = self.f
        self.shared: dict[str, int] = {}
        # first column and row of the thread
        self.x = f.mul(f.rem("%kernel.t", SIDE), EACH)
        self.y = f.mul(f.div("%kernel.t", SIDE), EACH)

    def declarations(self) -> str:
        return "".join(
            f"@SELF.{n} = internal addrspace(3) global [{count} x float] undef, align 16\n"
            for n, count in self.shared.items()
        )

    def write(self, m: Matrix, row: Int, column: Int, values: list[str]) -> None:
        """Four f32 values of a row, those inside of the matrix."""
        f = self.f
        at = f.muladd(row, m.width, column)
        if m.width % EACH == 0:
            with f.when(f.icmp("slt", column, m.width)):
                store_sums(f, m.dtype, "float", 4, self.four.packed(values), m.pointer, at)
            return
        for i, v in enumerate(values):
            with f.when(f.icmp("slt", f.add(column, i), m.width)):
                store_sums(f, m.dtype, "float", 1, v, m.pointer, f.add(at, i))

    # -- shared memory
    def slot(
        self,
        name: str,
        row: Int,
        column: Int,
        pitch: int = PITCH,
        rows: int = BLOCK,
    ) -> str:
        self.shared[name] = max(self.shared.get(name, 0), pitch * rows)
        return self.f.gep("float", f"@SELF.{name}", self.f.muladd(row, pitch, column))

    def keep(self, name: str, values: Sums, turned: bool) -> None:
        """The threads' values as a tile [row][column] of shared memory; `turned`: [column][row]."""
        for i in range(EACH):
            some = [values[r][i] for r in range(EACH)] if turned else values[i]
            major, minor = (self.x, self.y) if turned else (self.y, self.x)
            self.four.store(
                self.four.packed(some), self.slot(name, self.f.add(major, i), minor), 16
            )

    def _bring_turned(self, name: str, m: Matrix, first: Int, depth: Int) -> None:
        """64 rows of a slice of a matrix's columns, as [column][row]. Four threads read 64
        neighbouring bytes of a row."""
        f = self.f
        piece = f.mul(f.rem("%kernel.t", SLICE // EACH), EACH)
        r = f.div("%kernel.t", SLICE // EACH)
        for i, v in enumerate(
            self.four.unpacked(self.read(m, f.add(first, r), f.add(depth, piece)))
        ):
            f.store("float", v, self.slot(name, f.add(piece, i), r, rows=SLICE))

    def _bring_rows(
        self,
        m: Matrix,
        first: Int,
        column: Int,
        vectors: int,
    ) -> None:
        """16 rows of a matrix, 64 * vectors columns from `column` on, as tile c, [row][column]."""
        f = self.f
        width = BLOCK * vectors
        for part in range(vectors):
            number = f.add("%kernel.t", part * self.threads)
            r = f.div(number, width // EACH)
            c = f.mul(f.rem(number, width // EACH), EACH)
            self.four.store(
                self.read(m, f.add(first, r), f.add(column, c)),
                self.slot("c", r, c, width, SLICE),
                16,
            )

    # -- products
    def _fma(self, left: list[str], right: list[str], sums: list[str]) -> list[str]:
        return [
            self.one.fma(p, q, sums[r * len(right) + c])
            for r, p in enumerate(left)
            for c, q in enumerate(right)
        ]

    def scores(self, a: Matrix, first_row: Int, b: Matrix, first_column: Int) -> Sums:
        """A tile of A B^T: inner products of rows of `a` with rows of `b`."""
        f = self.f
        with f.loop(0, a.width, SLICE, [("float", self.one.const(0))] * (EACH * EACH)) as loop:
            self._bring_turned("a", a, first_row, loop.index)
            self._bring_turned("b", b, first_column, loop.index)
            self.f.barrier()
            sums = list(loop.vars)
            for i in range(SLICE):
                left, right = (
                    self.four.unpacked(self.four.load(self.slot(n, i, at, rows=SLICE), 16))
                    for n, at in (("a", self.y), ("b", self.x))
                )
                sums = self._fma(left, right, sums)
            self.f.barrier()
            loop.next = sums
        return [loop.vars[r * EACH : (r + 1) * EACH] for r in range(EACH)]

    def add_product(
        self, weights: str, m: Matrix, first: Int, column: Int, sums: list[str]
    ) -> list[str]:
        """sums[4 rows][columns] += W^T M: `weights` names a tile [64][rows of the thread's], `m`
        has 64 rows from `first`, columns from `column`."""
        f = self.f
        vectors = len(sums) // (EACH * EACH)
        with f.loop(0, BLOCK, SLICE, [("float", s) for s in sums]) as loop:
            self._bring_rows(m, f.add(first, loop.index), column, vectors)
            self.f.barrier()
            following = list(loop.vars)
            for i in range(SLICE):
                left = self.four.unpacked(
                    self.four.load(self.slot(weights, f.add(loop.index, i), self.y), 16)
                )
                right = []
                for v in range(vectors):
                    right += self.four.unpacked(
                        self.four.load(
                            self.slot("c", i, f.add(self.x, v * BLOCK), vectors * BLOCK, SLICE),
                            16,
                        )
                    )
                following = self._fma(left, right, following)
            self.f.barrier()
            loop.next = following
        return [*loop.vars]

    def write_rows(
        self,
        m: Matrix,
        first: Int,
        column: Int,
        sums: list[str],
        factors: list[str] | None = None,
    ) -> None:
        """The group's part of an output, rows multiplied by factors."""
        f = self.f
        vectors = len(sums) // (EACH * EACH)
        for r in range(EACH):
            row = f.add(first, self.y, r)
            with f.when(f.icmp("slt", row, m.count)):
                for v in range(vectors):
                    at = (r * vectors + v) * EACH
                    values = sums[at : at + EACH]
                    if factors is not None:
                        values = [self.one.mul(s, factors[r]) for s in values]
                    self.write(m, row, f.add(column, self.x, v * BLOCK), values)

    def rows(self, first: Int) -> list[Int]:
        """The thread's rows of the block from `first` on."""
        return [self.f.add(first, self.y, r) for r in range(EACH)]

    def scaled(self, sums: Sums, head: Int, first_row: Int, first_column: Int) -> Sums:
        bias = self.bias_of_head(head)
        f = self.f
        columns = [f.add(first_column, self.x, c) for c in range(EACH)]
        return [
            [self.score(s, bias, row, column) for s, column in zip(some, columns, strict=True)]
            for row, some in zip(self.rows(first_row), sums, strict=True)
        ]

    def of_rows(self, m: Matrix, first: Int) -> list[str]:
        return [self.of_row(m, row) for row in self.rows(first)]

    def store_rows(self, m: Matrix, first: Int, values: list[str], condition: str) -> None:
        """One value per row, by the first thread of a row."""
        f = self.f
        with f.when(f.op(f"and i1 {condition}, {f.icmp('eq', self.x, 0)}")):
            for row, v in zip(self.rows(first), values, strict=True):
                with f.when(f.icmp("slt", row, m.count)):
                    store_sums(f, m.dtype, "float", 1, v, m.pointer, row)

    def accumulators(self, width: int) -> list[tuple[str, str]]:
        """Zeros for the group's part of an output."""
        return [("float", self.one.const(0))] * (
            EACH * EACH * ceildiv(min(width, WIDTHS[self.part]), BLOCK)
        )


class Forward(_Tiles):
    part = "forward"
    inputs = ("q", "k", "v")
    outputs = ("out", "lse")

    def item(self, head: Int, first: Int, at: Int) -> None:
        f = self.f
        a = self.a
        t = self.one
        lowest = t.const(-numbers.inf)
        carry = [
            *[("float", lowest)] * EACH,
            *[("float", t.const(0))] * EACH,
            *self.accumulators(a.width),
        ]
        with f.loop(0, self.last_column(first), BLOCK, carry) as loop:
            before = loop.vars[:EACH]
            sums = loop.vars[EACH : 2 * EACH]
            totals = loop.vars[2 * EACH :]
            s = self.scaled(self.scores(self.q, first, self.k, loop.index), head, first, loop.index)
            tops = self.across(
                self._larger,
                [self._larger(self._larger(*row[:2]), self._larger(*row[2:])) for row in s],
                SIDE,
            )
            tops = [self._larger(p, q) for p, q in zip(before, tops, strict=True)]
            finite = [self.finite(v) for v in tops]
            weights = _weights(t, s, finite)
            factors = [math.exp(t, t.sub(p, m)) for p, m in zip(before, finite, strict=True)]
            self.keep("p", weights, turned=True)
            added = self.across(t.add, [t.add(t.add(*w[:2]), t.add(*w[2:])) for w in weights], SIDE)
            sums = [
                t.fma(old, factor, new)
                for old, factor, new in zip(sums, factors, added, strict=True)
            ]
            per_row = len(totals) // EACH
            totals = self.add_product(
                "p",
                self.v,
                loop.index,
                at,
                [t.mul(v, factors[i // per_row]) for i, v in enumerate(totals)],
            )
            loop.next = [*tops, *sums, *totals]
        tops = loop.vars[:EACH]
        sums = loop.vars[EACH : 2 * EACH]
        totals = loop.vars[2 * EACH :]
        sums = [t.select(t.cmp("oeq", v, 0), 1, v) for v in sums]
        self.write_rows(self.out, first, at, totals, [t.div(1, v) for v in sums])
        lse = [
            t.add(self.finite(top), math.log(t, total))
            for top, total in zip(tops, sums, strict=True)
        ]
        self.store_rows(self.lse, first, lse, f.icmp("eq", at, 0))

    def _larger(self, a: str, b: str) -> str:
        return self.one.call("maxnum", a, b)


class _Backward(_Tiles):
    def gradients(
        self,
        head: Int,
        first_row: Int,
        first_column: Int,
        lse: list[str],
        deltas: list[str],
    ) -> tuple[Sums, Sums]:
        """The weights of a tile and the gradients of its unscaled scores."""
        t = self.one
        s = self.scaled(
            self.scores(self.q, first_row, self.k, first_column),
            head,
            first_row,
            first_column,
        )
        weights = _weights(t, s, lse)
        dp = self.scores(self.grad, first_row, self.v, first_column)
        scale = t.const(self.a.scale)
        return weights, [
            [t.mul(t.mul(w, t.sub(d, delta)), scale) for w, d in zip(*row, strict=True)]
            for *row, delta in zip(weights, dp, deltas, strict=True)
        ]


class QueryGradient(_Backward):
    part = "dq"
    outputs = ("dq", "deltas")

    def item(self, head: Int, first: Int, at: Int) -> None:
        f = self.f
        a = self.a
        lse = self.of_rows(self.lse, first)
        deltas = self.row_products(self.rows(first), f.rem("%kernel.t", SIDE), SIDE)
        self.store_rows(self.deltas, first, deltas, f.icmp("eq", at, 0))
        with f.loop(0, self.last_column(first), BLOCK, self.accumulators(a.size)) as loop:
            _, ds = self.gradients(head, first, loop.index, lse, deltas)
            self.keep("p", ds, turned=True)
            loop.next = self.add_product("p", self.k, loop.index, at, loop.vars)
        self.write_rows(self.dq, first, at, loop.vars)


class KeyGradient(_Backward):
    part = "dkv"
    outputs = ("deltas", "dk", "dv")

    def item(self, head: Int, first: Int, at: Int) -> None:
        f = self.f
        a = self.a
        of_v = self.accumulators(a.width)
        of_k = self.accumulators(a.size)
        # causal: rows before see none of these columns
        with f.loop(first if a.causal else 0, a.rows, BLOCK, of_v + of_k) as loop:
            lse = self.of_rows(self.lse, loop.index)
            deltas = self.of_rows(self.deltas, loop.index)
            weights, ds = self.gradients(head, loop.index, first, lse, deltas)
            self.keep("p", weights, turned=False)
            dv = self.add_product("p", self.grad, loop.index, at, loop.vars[: len(of_v)])
            self.keep("p", ds, turned=False)
            loop.next = [
                *dv,
                *self.add_product("p", self.q, loop.index, at, loop.vars[len(of_v) :]),
            ]
        self.write_rows(self.dv, first, at, loop.vars[: len(of_v)])
        self.write_rows(self.dk, first, at, loop.vars[len(of_v) :])


KERNELS = {k.part: k for k in (Forward, QueryGradient, KeyGradient)}
