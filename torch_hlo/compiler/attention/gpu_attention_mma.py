"""Attention on matrix units (mma.sync.m16n8k16), for bf16 and f16 on NVIDIA's GPUs.

Each of four warps has 16 rows of its group's block. Scores, weights and outputs stay in registers:
the sums of one product are, rounded and packed, the left operand of the next (Dao 2023,
FlashAttention-2). The group's own block and blocks of the other matrices are in shared memory,
whose rows are 16 bytes longer than the matrix's, so that eight rows start in eight different banks.
Copies are asynchronous: while one product runs, the matrix of the next one arrives. Scores are in
units of log 2, so that weights are powers of two."""

from __future__ import annotations

import math as numbers
from collections.abc import Callable, Sequence

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Size, ceildiv

from ..gpu import ptx
from ..gpu.gpu_program import GpuProgram
from ..gpu.target import GpuTarget, machine
from ..gpu.words import Words
from ..llvm import Int, math
from ..matmul.gpu.gpu_blocks import store_sums
from .attention import Attention, N
from .gpu_attention_kernel import BLOCK, WIDTHS, AttentionKernel, Matrix

WARPS = 4  # of a group; bytes of an asynchronous copy
CHUNK = 16
MOST_WIDTH = 256
KEPT_WIDTH = 128  # up to this, the fragments of queries stay in registers
# the second goes to the low half
_PACK = {
    "bf16": "cvt.rn.bf16x2.f32 $0, $1, $2;",
    "f16": "cvt.rn.f16x2.f32 $0, $1, $2;",
}
LOG2E = 1 / numbers.log(2)

Sums = list[list[str]]  # per 8 columns: row g columns 2t, 2t + 1, then row g + 8, of lane 4g + t


@frozen
class Tile:
    """`rows` rows in shared memory, from address `at` (i32) on, `pitch` bytes apart; `width`:
    elements, a multiple of 16."""

    at: Int
    rows: int
    width: int

    @property
    def pitch(self) -> int:
        return self.width * 2 + CHUNK

    @property
    def nbytes(self) -> int:
        return self.rows * self.pitch


def fits(target: GpuTarget, a: Attention[Size]) -> bool:
    """Whether there are matrix units for these operands: 16-bit types whose rows are whole
    chunks."""
    types = a.dtypes[:3] if a.kind == "forward" else a.dtypes[:4]
    if types[0] not in _PACK or a.size % 8 or a.width % 8 or max(a.size, a.width) > MOST_WIDTH:
        return False
    return all(
        KERNELS[part].needs(a) <= machine(target).shared
        for part in (("forward",) if a.kind == "forward" else ("dq", "dkv"))
    )


class _Warps(AttentionKernel):
    threads = 32 * WARPS

    def __init__(self, program: GpuProgram, a: Attention[Size]) -> None:
        super().__init__(program, a)
        f = self.f
        self.unit = ptx.MATRIX_UNITS[self.dtype["q"]]
        self.w = w = Words(f)
        thread = w.narrow("%kernel.t")
        lane = w.rem(thread, 32)
        warp = w.div(thread, 32)
        self.lane, self.own_rows = lane, w.mul(warp, 16)
        # first row, first column of the lane
        self.g = w.wide(w.add(self.own_rows, w.div(lane, 4)))
        self.t2 = w.wide(w.mul(w.rem(lane, 4), 2))
        self.used: Int = 0
        self.base = ptx.shared_address(f)

    # -- shared memory
    @classmethod
    def tiles(cls, a: Attention[N]) -> dict[str, tuple[int, int]]:
        """(rows, width) of the tiles that the kernel keeps."""
        raise NotImplementedError

    @classmethod
    def needs(cls, a: Attention[N]) -> int:
        """Bytes of shared memory."""
        return sum(Tile(0, rows, _padded(width)).nbytes for rows, width in cls.tiles(a).values())

    def declarations(self) -> str:
        return "@SELF.shared = external addrspace(3) global [0 x i8], align 1024\n"

    def shared_bytes(self) -> int:
        return self.needs(self.a)

    def make_tiles(self) -> list[Tile]:
        made = []
        at = 0
        for rows, width in self.tiles(self.a).values():
            made.append(Tile(self.w.add(self.base, at), rows, _padded(width)))
            at += made[-1].nbytes
        return made

    def bring(self, tile: Tile, m: Matrix, first: Int) -> None:
        """Start copying rows of `m` from `first` on; what lies outside is zero."""
        f = self.f
        w = self.w
        chunks = tile.width // 8
        for start in range(0, tile.rows * chunks, self.threads):
            number = f.add("%kernel.t", start)
            row = f.div(number, chunks)
            chunk = f.rem(number, chunks)
            at = f.add(first, row)
            inside = f.icmp("slt", at, m.count)
            if m.width < tile.width:
                inside = self.one.bin_and(inside, f.icmp("slt", chunk, m.width // 8))
            source = f.gep("i8", m.pointer, f.muladd(at, m.width * 2, f.mul(chunk, CHUNK)))
            to = w.add(tile.at, w.narrow(f.muladd(row, tile.pitch, f.mul(chunk, CHUNK))))
            if start + self.threads > tile.rows * chunks:
                with f.when(f.icmp("slt", number, tile.rows * chunks)):
                    ptx.copy_async(f, CHUNK, to, source, w.where(inside, CHUNK, 0))
            else:
                ptx.copy_async(f, CHUNK, to, source, w.where(inside, CHUNK, 0))

    def commit(self) -> None:
        ptx.commit_copies(self.f)

    def arrive(self, pending: int) -> None:
        """All but the youngest `pending` groups of copies are there, of all threads."""
        ptx.wait_copies(self.f, pending)
        self.f.barrier()

    # -- fragments
    def lefts(self, tile: Tile) -> Callable[[int], list[str]]:
        """The warp's 16 rows as left operands: step of 16 columns -> fragment."""
        w = self.w
        at = w.add(
            tile.at,
            w.mul(w.add(self.own_rows, w.rem(self.lane, 16)), tile.pitch),
            w.mul(w.div(self.lane, 16), CHUNK),
        )
        return lambda step: ptx.load_matrices(self.f, w.add(at, 32 * step))

    def products(self, left: Callable[[int], list[str]], tile: Tile) -> Sums:
        """Inner products of the warp's rows with the rows of `tile`."""
        w = self.w
        row = w.muladd(w.div(self.lane, 16), 8, w.rem(self.lane, 8))
        at = w.add(tile.at, w.mul(row, tile.pitch), w.mul(w.rem(w.div(self.lane, 8), 2), CHUNK))
        sums = [[self.one.const(0)] * 4 for _ in range(tile.rows // 8)]
        for step in range(tile.width // 16):
            a = left(step)
            for n in range(tile.rows // 16):
                b = ptx.load_matrices(self.f, w.add(at, 16 * n * tile.pitch + 32 * step))
                self.multiply(a, b, sums, n)
        return sums

    def add_product(self, weights: Sums, tile: Tile, column: Int, sums: Sums) -> Sums:
        """sums += W M: `weights` of the warp's rows and the rows of `tile`, columns of the tile
        from `column` (i32) on."""
        w = self.w
        sums = list(sums)
        at = w.add(
            tile.at,
            w.mul(w.rem(self.lane, 16), tile.pitch),
            w.mul(w.div(self.lane, 16), CHUNK),
            w.mul(column, 2),
        )
        for step in range(tile.rows // 16):
            low, high = weights[2 * step : 2 * step + 2]
            a = [self.pack(*pair) for some in (low, high) for pair in (some[:2], some[2:])]
            for n in range(len(sums) // 2):
                b = ptx.load_matrices(
                    self.f,
                    w.add(at, 16 * step * tile.pitch + 32 * n),
                    transposed=True,
                )
                self.multiply(a, b, sums, n)
        return sums

    def two_rows(self, first: Int) -> list[Int]:
        """The rows from `first` on that a thread has."""
        return [self.f.add(first, self.g, 8 * half) for half in (0, 1)]

    def multiply(
        self,
        a: list[str],
        b: list[str],
        sums: Sums,
        n: int,
    ) -> None:
        """Add the products of two fragments to the sums `n` of 16 columns."""
        for half in (0, 1):
            at = 2 * n + half
            sums[at] = ptx.matrix_multiply(
                self.f, self.unit, self.unit, a, b[2 * half : 2 * half + 2], sums[at]
            )

    def pack(self, low: str, high: str) -> str:
        return ptx.assembly(
            self.f,
            _PACK[self.dtype["q"]],
            ["i32"],
            [("float", high), ("float", low)],
            effect=False,
        )[0]

    def weights(self, scores: Sums, tops: list[str]) -> Sums:
        """2^(score - top) of a thread's two rows."""
        t = self.one
        return [[self.power(t.sub(x, tops[i // 2])) for i, x in enumerate(some)] for some in scores]

    def power(self, x: str) -> str:
        """2^x."""
        return ptx.assembly(
            self.f,
            "ex2.approx.ftz.f32 $0, $1;",
            ["float"],
            [("float", x)],
            effect=False,
        )[0]

    # -- outputs
    def held(self, width: int) -> int:
        """Columns of an output that the group holds."""
        return min(_padded(width), WIDTHS[self.part])

    def accumulators(self, width: int) -> list[tuple[str, str]]:
        return [("float", self.one.const(0))] * (self.held(width) // 2)

    def column(self, at: Int, width: int) -> Int:
        """The first column that the group computes of an output of which it is to write those from
        `at` on: inside of the padded width."""
        return self.f.min(at, _padded(width) - self.held(width))

    def write(self, m: Matrix, first: Int, at: Int, sums: Sums) -> None:
        """The warp's rows of an output, columns from `at` on."""
        f, pair = self.f, self.f.typed("float", 2)
        start = self.column(at, m.width)
        for half in (0, 1):
            row = f.add(first, self.g, 8 * half)
            with f.when(f.icmp("slt", row, m.count)):
                for n, values in enumerate(sums):
                    column = f.add(start, 8 * n, self.t2)
                    inside = self.one.bin_and(
                        f.icmp("sge", column, at), f.icmp("slt", column, m.width)
                    )
                    with f.when(inside):
                        v = pair.packed(values[2 * half : 2 * half + 2])
                        place = f.muladd(row, m.width, column)
                        store_sums(f, m.dtype, "float", 2, v, m.pointer, place)

    def store_rows(self, m: Matrix, first: Int, values: list[str], condition: str) -> None:
        """One value for each of the lane's two rows, by the first of four lanes."""
        f = self.f
        with f.when(self.one.bin_and(condition, f.icmp("eq", self.t2, 0))):
            for half, v in enumerate(values):
                row = f.add(first, self.g, 8 * half)
                with f.when(f.icmp("slt", row, m.count)):
                    store_sums(f, m.dtype, "float", 1, v, m.pointer, row)

    # -- scores
    def scaled(
        self,
        sums: Sums,
        head: Int,
        partial: str,
        place: Callable[[int, int], tuple[Int, Int]],
        shift: Callable[[int, int], str] | None = None,
    ) -> Sums:
        """Scores in units of log 2, masked where the block is `partial`; `place(n, i)`: row and
        column of element i of 8 columns; `shift(n, i)`: what is added to it."""
        t = self.one
        flat = [s for some in sums for s in some]
        unit = self.a.scale * LOG2E

        def masked() -> list[str]:
            bias = self.bias_of_head(head)
            found = [self.score(s, bias, *place(*divmod(i, 4)), LOG2E) for i, s in enumerate(flat)]
            return [t.add(s, shift(*divmod(i, 4))) for i, s in enumerate(found)] if shift else found

        def plain() -> list[str]:
            if shift is None:
                return [t.mul(s, unit) for s in flat]
            return [t.fma(s, unit, shift(*divmod(i, 4))) for i, s in enumerate(flat)]

        values = (
            masked()
            if self.a.bias is not None
            else self.f.choose(partial, masked, plain, ["float"] * len(flat))
        )
        return _fours(values)

    def partial(self, first_row: Int, first_column: Int) -> str:
        """Whether the mask hides something of a block whose rows begin at `first_row`."""
        f = self.f
        found = f.icmp("sgt", f.add(first_column, BLOCK), self.a.columns)
        return (
            f.op(
                f"or i1 {found},"
                f" {f.icmp('sge', f.add(first_column, BLOCK - 1), f.add(first_row, 1))}"
            )
            if self.a.causal
            else found
        )

    def gradient(self, weights: Sums, dp: Sums, delta: Callable[[int, int], str]) -> Sums:
        """The gradients of the scaled scores."""
        t = self.one
        return [
            [t.mul(p, t.sub(d, delta(n, i))) for i, (p, d) in enumerate(zip(*some, strict=True))]
            for n, some in enumerate(zip(weights, dp, strict=True))
        ]

    def powers(self, scores: Sums) -> Sums:
        return [[self.power(x) for x in some] for some in scores]

    def of_pairs(self, m: Matrix, first: Int, count: int) -> list[str]:
        """Elements of a vector of rows: two neighbours of every eight of the `count` rows from
        `first` on, zero outside."""
        f, pair = self.f, self.f.typed("float", 2)
        whole = m.dtype == "f32" and isinstance(self.a.rows, int) and self.a.rows % count == 0
        found = []
        for n in range(count // 8):
            row = f.add(first, 8 * n, self.t2)
            if whole:
                both = pair.load(f.gep("float", m.pointer, row), 8)
                found += pair.unpacked(both)
            else:
                found += [self.of_row(m, f.add(row, i)) for i in (0, 1)]
        return found

    def scaled_back(self, sums: Sequence[str]) -> Sums:
        """Sums of products with gradients of scaled scores, as those of unscaled ones."""
        return _fours([self.one.mul(x, self.a.scale) for x in sums])


class Forward(_Warps):
    part = "forward"
    inputs = ("q", "k", "v")
    outputs = ("out", "lse")

    @classmethod
    def tiles(cls, a: Attention[N]) -> dict[str, tuple[int, int]]:
        return {"q": (BLOCK, a.size), "k": (BLOCK, a.size), "v": (BLOCK, a.width)}

    def item(self, head: Int, first: Int, at: Int) -> None:
        f = self.f
        a = self.a
        t = self.one
        q, k, v = self.make_tiles()
        self.bring(q, self.q, first)
        self.bring(k, self.k, 0)
        self.commit()
        self.arrive(0)
        left = self.lefts(q)
        if a.size <= KEPT_WIDTH:
            left = [left(step) for step in range(q.width // 16)].__getitem__
        column = self.w.narrow(self.column(at, a.width))
        rows = self.two_rows(first)
        carry = [
            *[("float", t.const(-numbers.inf))] * 2,
            *[("float", t.const(0))] * 2,
            *self.accumulators(a.width),
        ]
        with f.loop(0, self.last_column(first), BLOCK, carry) as loop:
            before = loop.vars[:2]
            sums = loop.vars[2:4]
            totals = _fours(loop.vars[4:])
            self.arrive(0)  # keys; and nobody reads values any more
            self.bring(v, self.v, loop.index)
            self.commit()
            s = self.products(left, k)
            self.arrive(0)  # values; and nobody reads keys any more
            self.bring(k, self.k, f.add(loop.index, BLOCK))
            self.commit()
            s = self.scaled(
                s,
                head,
                self.partial(f.add(first, self.w.wide(self.own_rows)), loop.index),
                lambda n, i: (
                    rows[i // 2],
                    f.add(loop.index, 8 * n + i % 2, self.t2),
                ),
            )
            tops, sums, factors, weights = self.softmax(s, before, sums)
            totals = [[t.mul(x, factors[i // 2]) for i, x in enumerate(some)] for some in totals]
            totals = self.add_product(weights, v, column, totals)
            loop.next = [*tops, *sums, *(x for some in totals for x in some)]
        ptx.wait_copies(f, 0)
        self.finish(loop.vars, first, at)

    def softmax(
        self, s: list[list[str]], before: list[str], sums: list[str]
    ) -> tuple[list[str], list[str], list[str], list[list[str]]]:
        """(largest scores, sums, what older sums are multiplied with, weights) with the scores `s`
        of further columns; two rows for each thread."""
        t = self.one
        tops = [
            _tree(self._larger, [x for some in s for x in some[2 * half : 2 * half + 2]])
            for half in (0, 1)
        ]
        tops = [
            self._larger(p, q)
            for p, q in zip(before, self.across(self._larger, tops, 4), strict=True)
        ]
        finite = [self.finite(x) for x in tops]
        weights = self.weights(s, finite)
        factors = [self.power(t.sub(p, m)) for p, m in zip(before, finite, strict=True)]
        added = [
            _tree(t.add, [x for some in weights for x in some[2 * half : 2 * half + 2]])
            for half in (0, 1)
        ]
        sums = [
            t.fma(old, factor, new) for old, factor, new in zip(sums, factors, added, strict=True)
        ]
        return tops, sums, factors, weights

    def finish(self, state: list[str], first: Int, at: Int) -> None:
        """The output and the log-sum-exp of what the loop over columns ends with."""
        t = self.one
        tops = state[:2]
        sums = self.across(t.add, state[2:4], 4)
        totals = _fours(state[4:])
        sums = [t.select(t.cmp("oeq", x, 0), 1, x) for x in sums]
        factors = [t.div(1, x) for x in sums]
        self.write(
            self.out,
            first,
            at,
            [[t.mul(x, factors[i // 2]) for i, x in enumerate(some)] for some in totals],
        )
        lse = [
            t.fma(self.finite(top), 1 / LOG2E, math.log(t, total))
            for top, total in zip(tops, sums, strict=True)
        ]
        self.store_rows(self.lse, first, lse, self.f.icmp("eq", at, 0))

    def _larger(self, a: str, b: str) -> str:
        return self.one.call("maxnum", a, b)


class QueryGradient(_Warps):
    part = "dq"
    outputs = ("dq", "deltas")

    @classmethod
    def tiles(cls, a: Attention[N]) -> dict[str, tuple[int, int]]:
        return {
            "q": (BLOCK, a.size),
            "grad": (BLOCK, a.width),
            "k": (BLOCK, a.size),
            "v": (BLOCK, a.width),
        }

    def item(self, head: Int, first: Int, at: Int) -> None:
        f = self.f
        a = self.a
        t = self.one
        q, grad, k, v = self.make_tiles()
        for tile, m, start in (
            (q, self.q, first),
            (grad, self.grad, first),
            (v, self.v, 0),
        ):
            self.bring(tile, m, start)
        self.commit()
        self.bring(k, self.k, 0)
        self.commit()
        rows = self.two_rows(first)
        shifts = [t.mul(self.of_row(self.lse, row), -LOG2E) for row in rows]
        deltas = self.row_products(rows, self.w.wide(self.w.rem(self.lane, 4)), 4)
        self.store_rows(self.deltas, first, deltas, f.icmp("eq", at, 0))
        of_q = self.lefts(q)
        of_grad = self.lefts(grad)
        column = self.w.narrow(self.column(at, a.size))
        with f.loop(0, self.last_column(first), BLOCK, self.accumulators(a.size)) as loop:
            self.arrive(1)  # values
            dp = self.products(of_grad, v)
            self.arrive(0)  # keys; and nobody reads values any more
            self.bring(v, self.v, f.add(loop.index, BLOCK))
            self.commit()
            s = self.scaled(
                self.products(of_q, k),
                head,
                self.partial(f.add(first, self.w.wide(self.own_rows)), loop.index),
                lambda n, i: (
                    rows[i // 2],
                    f.add(loop.index, 8 * n + i % 2, self.t2),
                ),
                lambda n, i: shifts[i // 2],
            )
            weights = self.powers(s)
            ds = self.gradient(weights, dp, lambda n, i: deltas[i // 2])
            totals = self.add_product(ds, k, column, _fours(loop.vars))
            self.f.barrier()
            self.bring(k, self.k, f.add(loop.index, BLOCK))
            self.commit()
            loop.next = [x for some in totals for x in some]
        ptx.wait_copies(f, 0)
        self.write(self.dq, first, at, self.scaled_back(loop.vars))


class KeyGradient(_Warps):
    """Warps have rows of keys and values, so scores are turned: their columns are query rows."""

    part = "dkv"
    outputs = ("deltas", "dk", "dv")

    @classmethod
    def rows(cls, a: Attention[N]) -> int:
        """Query rows of a step: fewer where the sums of both outputs take most registers."""
        return BLOCK if a.size + a.width <= KEPT_WIDTH else BLOCK // 2

    @classmethod
    def tiles(cls, a: Attention[N]) -> dict[str, tuple[int, int]]:
        return {
            "k": (BLOCK, a.size),
            "v": (BLOCK, a.width),
            "q": (cls.rows(a), a.size),
            "grad": (cls.rows(a), a.width),
        }

    def item(self, head: Int, first: Int, at: Int) -> None:
        f, a, t, step = self.f, self.a, self.one, self.rows(self.a)
        k, v, q, grad = self.make_tiles()
        start = first if a.causal else 0  # rows before see none of these columns
        for tile, m, place in (
            (k, self.k, first),
            (v, self.v, first),
            (grad, self.grad, start),
        ):
            self.bring(tile, m, place)
        self.commit()
        self.bring(q, self.q, start)
        self.commit()
        columns = self.two_rows(first)
        of_k = self.lefts(k)
        of_v = self.lefts(v)
        at_v, at_k = (self.w.narrow(self.column(at, n)) for n in (a.width, a.size))
        hold_v = self.accumulators(a.width)
        hold_k = self.accumulators(a.size)
        with f.loop(start, a.rows, step, hold_v + hold_k) as loop:
            rows = [f.add(loop.index, 8 * n + i, self.t2) for n in range(step // 8) for i in (0, 1)]
            shifts = [t.mul(x, -LOG2E) for x in self.of_pairs(self.lse, loop.index, step)]
            deltas = self.of_pairs(self.deltas, loop.index, step)
            self.arrive(1)  # gradients of the output
            dp = self.products(of_v, grad)
            self.arrive(0)  # queries
            s = self.scaled(
                self.products(of_k, q),
                head,
                self.partial(loop.index, first),
                lambda n, i: (rows[2 * n + i % 2], columns[i // 2]),
                lambda n, i: shifts[2 * n + i % 2],
            )
            weights = self.powers(s)
            dv = self.add_product(weights, grad, at_v, _fours(loop.vars[: len(hold_v)]))
            self.f.barrier()
            self.bring(grad, self.grad, f.add(loop.index, step))
            self.commit()
            ds = self.gradient(weights, dp, lambda n, i: deltas[2 * n + i % 2])
            dk = self.add_product(ds, q, at_k, _fours(loop.vars[len(hold_v) :]))
            self.f.barrier()
            self.bring(q, self.q, f.add(loop.index, step))
            self.commit()
            loop.next = [x for some in (*dv, *dk) for x in some]
        ptx.wait_copies(f, 0)
        self.write(self.dv, first, at, _fours(loop.vars[: len(hold_v)]))
        self.write(self.dk, first, at, self.scaled_back(loop.vars[len(hold_v) :]))


def _padded(width: int) -> int:
    return ceildiv(width, 16) * 16


def _fours(values: list[str]) -> Sums:
    return [values[i : i + 4] for i in range(0, len(values), 4)]


def _tree(combine: Callable[[str, str], str], values: list[str]) -> str:
    while len(values) > 1:
        values = [
            combine(*values[i : i + 2]) if i + 1 < len(values) else values[i]
            for i in range(0, len(values), 2)
        ]
    return values[0]


KERNELS = {k.part: k for k in (Forward, QueryGradient, KeyGradient)}
