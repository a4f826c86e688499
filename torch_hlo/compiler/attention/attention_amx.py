"""Attention of bf16 on AMX tiles, block by block of query rows; the scores of a block stay in the
cache, weights are rounded to bf16.

Forward: an item is a block of query rows of one head. Block by block of columns, it multiplies with
the keys, turns the scores into weights relative to the largest score so far, and adds their product
with the values; causal blocks stop at the diagonal. Backward: an item is one head; each block
recomputes its weights from the saved log-sum-exp and adds to the three gradients."""

from __future__ import annotations

import math as numbers
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch_hlo.hlo.ir import Size, ceildiv, round_up

from ..codegen import Program, load_real, store
from ..llvm import Int, literal, math
from ..llvm.scalar import STORAGE
from ..matmul.amx_kernels import BLOCK, element, tiles
from ..matmul.gemm_amx import AmxGemm
from ..matmul.tile import Tile
from .attention import Attention
from .attention_kernel import LOG2E, Arrays, AttentionKernel, block_of

ROWS, CAUSAL_ROWS = 256, 96  # query rows of a block, at most
COLUMNS = 512  # columns of a block, about: a block of scores takes a part of the L2 cache


def _block_rows(a: Attention[Size]) -> int:
    return block_of(a.rows, CAUSAL_ROWS if a.causal else ROWS, BLOCK)


def _block_columns(a: Attention[Size], t: Tile) -> int:
    """Columns of a block: a multiple of the vector size, evenly divided."""
    if not isinstance(a.columns, int):
        return COLUMNS
    blocks = max(1, round(a.columns / COLUMNS))
    return round_up(ceildiv(a.columns, blocks), t.lanes)


class _Tiles(AttentionKernel):
    """What forward and backward share."""

    weight = "bf16"  # type of a block of weights

    def __init__(self, program: Program, a: Attention[Size], arrays: Arrays, t: Tile) -> None:
        super().__init__(program, a, arrays, t)
        self.block = _block_rows(a)
        self.width = _block_columns(a, t)
        self.stride = self.width + t.lanes  # of rows of scores: not a multiple of a page
        self.computed = {role: self.floats(self.stride) for role in self.terms}  # rows of a block
        found = element(program.target, ("bf16",))
        assert found is not None, "attention_step.py has looked"
        self.element = found
        self.scratch = self.memory(AmxGemm(self.element, "k", "k", adding=True).scratch_bytes)

    def around(self) -> AbstractContextManager[object]:
        return tiles(self.f, self.element)

    def tile(self, dtype: str = "f32") -> str:
        return self.memory(self.block * self.stride * STORAGE[dtype].bytes)

    def product(
        self,
        a: tuple[str, Int, Int],
        b: tuple[str, Int, Int],
        c: str,
        ldc: Int,
        m: Int,
        n: Int,
        k: Int,
        adding: bool = False,
    ) -> None:
        """C[m, n] (+)= A[m, k] B[k, n]; `a` and `b`: (pointer, stride along m or n, stride along
        k). C is f32."""
        f = self.f
        left, right = ("k" if p[2] == 1 else "lane" if p[1] == 1 else "none" for p in (a, b))
        engine = AmxGemm(self.element, left, right, adding=adding)
        name = engine.block()
        for function, text in engine.functions.items():
            self.program.function(function, text)
        arguments = [
            f"ptr {a[0]}",
            f"i64 {a[1]}",
            f"i64 {a[2]}",
            f"ptr {b[0]}",
            f"i64 {b[1]}",
            f"i64 {b[2]}",
            f"ptr {c}",
            f"i64 {ldc}",
        ]
        f.call(
            name,
            *arguments,
            "i64 0",
            f"i64 {f.ceildiv(m, BLOCK)}",
            *(f"i64 {v}" for v in (m, 0, n, k)),
            f"ptr {self.scratch}",
        )

    @contextmanager
    def columns(self, end: Int) -> Iterator[tuple[Int, Int]]:
        """The loop over blocks of columns before `end`: (first column, number of columns)."""
        with self.f.loop(0, end, self.width) as first:
            yield first, self.f.min(self.width, self.f.sub(end, first))

    def rows_of(self, block: Int) -> tuple[Int, Int, Int]:
        """(first row, number of rows, columns that they look at) of a block."""
        f, a = self.f, self.a
        first = f.mul(block, self.block)
        count = f.min(self.block, f.sub(a.rows, first))
        return (
            first,
            count,
            f.min(f.add(first, count), a.columns) if a.causal else a.columns,
        )

    def vectors(
        self,
        row: Int,
        start: Int,
        width: Int,
        end: Int,
        carry: list[tuple[str, str]],
        body: Callable[[Int, str | None, list[str]], list[str] | None],
    ) -> list[str]:
        """Loops over the columns [start, start + width) that the query in `row` sees, in vectors:
        `body(offset, mask, carried)` returns the next carried values. First those seen in full,
        with mask None; then the others."""
        f, lanes = self.f, self.t.lanes
        limit = f.sub(f.min(f.add(row, 1), end) if self.a.causal else end, start)
        whole = f.op(f"and i64 {f.max(f.min(limit, width), 0)}, {-lanes}")
        values = [v for _, v in carry]
        lane = self.e.iota("i32")
        for masked, low, high in ((False, 0, whole), (True, whole, width)):
            with f.loop(
                low,
                high,
                lanes,
                [(kind, v) for (kind, _), v in zip(carry, values, strict=True)],
            ) as loop:
                at, now = (loop.index, loop.vars) if carry else (loop, [])
                mask = None
                if masked:
                    seen = f.op(f"trunc i64 {f.sub(limit, at)} to i32")
                    mask = self.e.typed("i32").cmp("slt", lane, self.e.splat("i32", seen))
                following = body(at, mask, now)
                if carry:
                    loop.next = following
            values = loop.vars if carry else []
        return values

    def of_block(self, head: Int, start: Int, width: Int) -> None:
        """A bias that all rows have, for a block of columns."""
        if self.a.bias is not None and self.a.bias.row == 0:
            self.compute("bias", head, 0, 1, start, width, self.computed["bias"], 0)

    def of_row(self, head: Int, row: Int, start: Int, width: Int) -> None:
        """What is computed for a row and a block of columns."""
        for role in self.terms:
            if role == "factors" or self.a.bias is not None and self.a.bias.row != 0:
                self.compute(role, head, row, 1, start, width, self.computed[role], 0)

    def splat_scalars(self) -> None:
        """What scores are multiplied with and capped by, in all lanes."""
        self.scales = self.e.splat("float", self.scale(LOG2E))
        self.caps = [self.e.splat("float", x) for x in self.cap() or ()]

    def score(self, p: str, k: Int, mask: str | None) -> tuple[str, str]:
        """Scaled and masked scores, in units of log 2, of `lanes` columns from number `k` of a
        block; the derivative by their cap, "" when there is none."""
        v, a, slope = self.v, self.a, ""
        s = v.mul(v.load(p), self.scales)
        if self.caps:
            s, slope = self.capped(v, s, *self.caps)
        if a.bias is not None:
            f = self.f
            x = v.load(self.f.gep("float", self.computed["bias"], k))
            s = self.biased(
                v,
                s,
                x,
                self.e.splat("float", self.fill(f, self.pointer["fill"])) if a.fill else "",
            )
        return s if mask is None else v.select(mask, s, -numbers.inf), slope

    def factor(self, x: str, k: Int) -> str:
        """Weights after dropout, or their gradients."""
        return (
            self.v.mul(x, self.v.load(self.f.gep("float", self.computed["factors"], k)))
            if self.a.factors
            else x
        )


class Forward(_Tiles):
    """Items: blocks of query rows, heads outermost."""

    @classmethod
    def items(cls, a: Attention[Size], t: Tile) -> tuple[Size, Size]:
        return a.heads * ceildiv(a.rows, _block_rows(a)), _block_rows(a)

    def item(self, item: Int) -> None:
        f, a = self.f, self.a
        self.splat_scalars()
        tile = self.tile()
        weights = self.tile(self.weight)
        self.tops, self.sums = (f.alloca("float", self.block, 64) for _ in range(2))
        blocks = f.ceildiv(a.rows, self.block)
        head = f.div(item, blocks)
        first, count, end = self.rows_of(f.rem(item, blocks))
        shared = f.div(head, a.group)
        number = f.muladd(head, a.rows, first)
        q, out = self.row("q", number, a.size), self.row("out", number, a.width)
        keys, values = (
            self.row(name, f.mul(shared, a.columns), n)
            for name, n in (("k", a.size), ("v", a.width))
        )
        dtype = self.dtype["q"]
        self.zero(out, f.mul(count, a.width))
        self.zero(self.sums, count)
        lowest = literal("float", -numbers.inf)
        with f.loop(0, count) as i:
            f.store_at("float", lowest, self.tops, i)
        with self.columns(end) as (start, width):
            k = self.at(keys, start, a.size, dtype)
            v = self.at(values, start, a.width, dtype)
            self.product(
                (q, a.size, 1),
                (k, a.size, 1),
                tile,
                self.stride,
                count,
                width,
                a.size,
            )
            self.of_block(head, start, width)
            with f.loop(0, count) as i:
                row = f.add(first, i)
                self.of_row(head, row, start, width)
                to = self.at(weights, i, self.stride, self.weight)
                self.weights(
                    self.at(tile, i, self.stride),
                    to,
                    i,
                    row,
                    start,
                    width,
                    end,
                    self.at(out, i, a.width),
                )
            self.product(
                (weights, self.stride, 1),
                (v, 1, a.width),
                out,
                a.width,
                count,
                a.width,
                width,
                adding=True,
            )
        self.finish(out, number, count)

    def finish(self, out: str, number: Int, count: Int) -> None:
        """Sums of weighted values -> the output, and the numbers per row."""
        f = self.f
        one = f.typed("float")
        with f.loop(0, count) as i:
            total = f.load_at("float", self.sums, i)
            total = self.sum_of_weights(one, total)
            self.scale_row(self.at(out, i, self.a.width), one.div(1, total))
            self.store_lse(f.load_at("float", self.tops, i), total, f.add(number, i))

    def scale_row(self, row: str, factor: str) -> None:
        f = self.f
        v = self.v
        width = self.a.width
        factors = self.e.splat("float", factor)
        with f.loop(0, width, self.t.lanes) as j:
            mask = f.lane_mask(self.t.lanes, j, width)
            p = f.gep("float", row, j)
            v.store(v.mul(v.load(p, mask=mask), factors), p, mask=mask)

    def weights(
        self,
        scores: str,
        to: str,
        i: Int,
        row: Int,
        start: Int,
        width: Int,
        end: Int,
        out: str,
    ) -> None:
        """Scores of one query -> exp2(score - largest so far); what was summed before is brought to
        the new largest."""
        f = self.f
        v = self.v
        lanes = self.t.lanes
        one = f.typed("float")
        top_at = f.gep("float", self.tops, i)
        sum_at = f.gep("float", self.sums, i)
        before = f.load("float", top_at)

        def largest(k: Int, mask: str | None, carried: list[str]) -> list[str]:
            p = f.gep("float", scores, k)
            s, _ = self.score(p, k, mask)
            v.store(s, p)
            return [v.call("maxnum", carried[0], s)]

        (tops,) = self.vectors(row, start, width, end, [(v.type, v.const(-numbers.inf))], largest)
        top = one.call("maxnum", before, self.total("fmax", "", tops))
        tops = self.e.splat("float", self.finite(top))
        with f.loop(0, width, lanes, [(v.type, "zeroinitializer")]) as loop:
            p = f.gep("float", scores, loop.index)
            w = math.exp2(v, v.sub(v.load(p), tops))
            store(f, self.weight, self.factor(w, loop.index), to, loop.index, lanes)
            loop.next = [v.add(loop.vars[0], w)]
        total = self.total("fadd", "-0.0", loop.vars[0])

        def rescaled() -> list[str]:
            factor = math.exp2(one, one.sub(before, self.finite(top)))
            self.scale_row(out, factor)
            return [one.mul(f.load("float", sum_at), factor)]

        moved = f.op(f"and i1 {f.icmp('ne', start, 0)}, {one.cmp('une', before, top)}")
        (older,) = f.choose(moved, rescaled, lambda: [f.load("float", sum_at)], ["float"])
        f.store("float", one.add(older, total), sum_at)
        f.store("float", top, top_at)


class Backward(_Tiles):
    """Items: heads."""

    def item(self, item: Int) -> None:
        self.tiles = self.tile(), self.tile()
        self.narrow = self.tile(self.weight), self.tile(self.weight)
        with self.heads_of(item) as head:
            self.head(head)

    def head(self, head: Int) -> None:
        f, a = self.f, self.a
        self.splat_scalars()
        sizes = {
            "k": (a.columns, a.size),
            "v": (a.columns, a.width),
            "dk": (a.columns, a.size),
            "dv": (a.columns, a.width),
            "dq": (a.rows, a.size),
        }
        shared = f.div(head, a.group)
        self.of_head = {
            name: self.row(name, f.mul(head if name == "dq" else shared, count), width)
            for name, (count, width) in sizes.items()
        }
        self.zero(self.of_head["dq"], f.mul(a.rows, a.size))
        with f.loop(0, f.ceildiv(a.rows, self.block)) as block:
            first, count, end = self.rows_of(block)
            with self.columns(end) as (start, width):
                self.tile_of(head, first, count, start, width, end)

    def tile_of(self, head: Int, first: Int, count: Int, start: Int, width: Int, end: Int) -> None:
        """The contribution of a block of query rows and columns."""
        f = self.f
        a = self.a
        stride = self.stride
        number = f.muladd(head, a.rows, first)
        q, grad, out = (
            self.row(p, number, n) for p, n in (("q", a.size), ("grad", a.width), ("out", a.width))
        )
        dtype = self.dtype["q"]
        weight = self.weight
        dq = self.at(self.of_head["dq"], first, a.size)
        keys, values, dk, dv = (
            self.at(self.of_head[p], start, n, self.dtype[p])
            for p, n in (
                ("k", a.size),
                ("v", a.width),
                ("dk", a.size),
                ("dv", a.width),
            )
        )
        s, dp = self.tiles
        p, ds = self.narrow
        self.product((q, a.size, 1), (keys, a.size, 1), s, stride, count, width, a.size)
        self.product(
            (grad, a.width, 1),
            (values, a.width, 1),
            dp,
            stride,
            count,
            width,
            a.width,
        )
        self.of_block(head, start, width)
        with f.loop(0, count) as i:
            row = f.add(first, i)
            delta = self.inner(
                (self.at(grad, i, a.width, dtype), dtype),
                (self.at(out, i, a.width, self.dtype["out"]), self.dtype["out"]),
                a.width,
            )
            state = [
                load_real(f, self.dtype[role], self.pointer[role], f.add(number, i))
                for role in ("lse", "total")[: 1 + a.softmax]
            ]
            self.of_row(head, row, start, width)
            rows = [
                *(self.at(q, i, stride) for q in (s, dp)),
                *(self.at(q, i, stride, weight) for q in (p, ds)),
            ]
            self.gradient(rows, row, start, width, end, delta, state)
        for left, right, to, rows_, columns, depth in (
            ((p, 1, stride), (grad, 1, a.width), dv, width, a.width, count),
            ((ds, stride, 1), (keys, 1, a.size), dq, count, a.size, width),
            ((ds, 1, stride), (q, 1, a.size), dk, width, a.size, count),
        ):
            self.product(left, right, to, columns, rows_, columns, depth, adding=True)

    def gradient(
        self,
        rows: list[str],
        row: Int,
        start: Int,
        width: Int,
        end: Int,
        delta: str,
        state: list[str],
    ) -> None:
        """Scores and gradients of weights of one query -> weights and gradients of the unscaled
        scores."""
        f = self.f
        v = self.v
        one = self.f.typed("float")
        s_row, dp_row, p_row, ds_row = rows
        deltas, (sums, *logs) = (
            self.e.splat("float", delta),
            [self.e.splat("float", x if self.a.softmax else one.mul(x, LOG2E)) for x in state],
        )

        scales = self.e.splat("float", self.scale())
        if self.a.bias_gradient:
            dbias = f.gep("float", self.dbias, f.muladd(row, self.a.columns, start))

        def both(k: Int, mask: str | None, _: list[str]) -> None:
            s, slope = self.score(f.gep("float", s_row, k), k, mask)
            s = v.sub(s, sums)
            w = math.exp2(v, v.sub(s, logs[0]) if logs else s)
            dp = self.factor(v.load(f.gep("float", dp_row, k)), k)
            store(f, self.weight, self.factor(w, k), p_row, k, self.t.lanes)
            ds = v.mul(w, v.sub(dp, deltas))
            if self.a.fill:
                ds = self.kept(v, ds, v.load(f.gep("float", self.computed["bias"], k)))
            unscaled = v.mul(ds, slope) if slope else ds
            store(f, self.weight, v.mul(unscaled, scales), ds_row, k, self.t.lanes)
            if self.a.bias_gradient:
                p = f.gep("float", dbias, k)
                v.store(v.add(v.load(p, mask=mask), ds), p, mask=mask)

        self.vectors(row, start, width, end, [], both)


KERNELS = {"forward": Forward, "backward": Backward}
