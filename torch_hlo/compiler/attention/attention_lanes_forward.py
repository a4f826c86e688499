"""The forward pass with queries along lanes (attention_lanes.py): an online softmax per lane."""

from __future__ import annotations

import math as numbers

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Size, ceildiv

from ..codegen import Writer
from ..llvm import Int, math
from ..matmul.tile import Tile
from .attention import Attention
from .attention_kernel import LOG2E, block_of
from .attention_lanes import QUERIES, nothing
from .attention_lanes_scores import LaneScores


@frozen
class _Part:
    """A group of queries, by number and first query, and `width` keys from `start`, of which some
    query sees `seen`. `queries`: the group's, transposed; `top`, `sum`: the largest scores so far
    and the sums of weights."""

    g: Int
    query: Int
    start: Int
    width: Int
    seen: Int
    k: str
    v: str
    queries: str
    top: str
    sum: str


class Forward(LaneScores):
    """Items: blocks of query rows, heads outermost."""

    @classmethod
    def items(cls, a: Attention[Size], t: Tile) -> tuple[Size, Size]:
        queries = block_of(a.rows, QUERIES, t.columns)
        return a.heads * ceildiv(a.rows, queries), queries

    def item(self, item: Int) -> None:
        f = self.f
        a = self.a
        group = self.group
        blocks = f.ceildiv(a.rows, self.queries)
        head, block = f.divmod(item, blocks)
        first = f.mul(block, self.queries)
        count = f.min(self.queries, f.sub(a.rows, first))
        number = f.mul(head, a.rows)
        keys = f.mul(f.div(head, a.group), a.columns)
        self._prepare()
        with self.of_groups(first, count) as (g, query, valid):
            self.spread(
                self.row("q", f.add(number, query), a.size),
                self.dtype["q"],
                a.size,
                valid,
                self.at(self.qt, g, a.size * group),
                self.scale(LOG2E),
            )
        end = f.min(f.add(first, count), a.columns) if a.causal else a.columns
        with self.key_blocks(end) as (start, width):
            k, v = self.compact_keys(keys, start, width)
            with self.of_groups(first, count) as (g, query, valid):
                seen = self.seen(query, start, width)
                with f.when(f.icmp("sgt", seen, 0)) if a.causal else nothing():
                    self.see(query)
                    self.computed(head, query, valid, start, width)
                    q = self.at(self.qt, g, a.size * group)
                    top, total = (self.at(p, g, group) for p in (self.tops, self.sums))
                    x = _Part(g, query, start, width, seen, k, v, q, top, total)
                    self.by_vectors(valid, lambda vectors: self._part(x, vectors))
        with self.of_groups(first, count) as (g, query, valid):
            self._store_rows(g, f.add(number, query), valid)

    def _prepare(self) -> None:
        """Memory for a block of queries, with no weights so far."""
        f = self.f
        a = self.a
        group = self.group
        self.qt = self.floats(self.groups * a.size * group)
        self.ot = self.floats(self.groups * self.transposed_bytes(a.width))
        self.tops = self.floats(self.queries)
        self.sums = self.floats(self.queries)
        self.tile = self.floats((self.keys + self.t.rows) * group)
        self.now = self.floats(group)
        self.alpha = self.floats(group)
        self.zero(self.ot, self.groups * self.transposed_bytes(a.width))
        self.zero(self.sums, self.queries)
        self.caps = self.store_caps()
        with f.loop(0, self.queries, self.lanes) as i:
            self.v.store(self.v.const(-numbers.inf), f.gep("float", self.tops, i))

    def _part(self, x: _Part, vectors: int) -> None:
        """What the keys of a block give to a group of `vectors` vectors."""
        f = self.f
        for j in range(vectors):
            self.v.store(
                self.v.load(f.gep("float", x.top, j * self.lanes)),
                f.gep("float", self.now, j * self.lanes),
            )
        if self.bias is None:
            low, high = self._all_scores(x, vectors, 0, x.seen)
        else:
            low, high = self._all_scores(x, vectors, *self.visible(x.seen))
            low, high = f.choose(
                self.all_above_hidden(self.now, vectors),
                lambda: [low, high],
                lambda: self._all_scores(x, vectors, 0, x.seen),
                ["i64", "i64"],
            )
        with f.when(f.icmp("slt", low, high)):
            self._add_output(x, vectors, low, high)

    def _all_scores(self, x: _Part, vectors: int, low: Int, high: Int) -> list[str]:
        """The scores of the keys [low, high) of a block; the largest are in `now`."""
        f = self.f
        group = self.group

        def tile(at: Int, masked: bool) -> None:
            self.run(
                f"scores{vectors}{'_masked' * masked}",
                "k q to tops bias limits fill caps",
                "key",
                lambda f: self._scores(f, vectors, masked),
                self.at(x.k, at, self.a.size),
                x.queries,
                self.at(self.tile, at, group),
                self.now,
                self.bias_at(at),
                self.limits or "null",
                self.pointer.get("fill", "null"),
                self.caps,
                f.add(x.start, at),
            )

        self.tiles(x.query, x.start, x.width, low, high, tile)
        return [str(low), str(high)]

    def _add_output(self, x: _Part, vectors: int, low: Int, high: Int) -> None:
        """Weights of the keys [low, high), and their products with the values."""
        f = self.f
        a = self.a
        some, factors = (
            p if low == "0" or p == "null" else self.at(p, low, self.group)
            for p in (self.tile, self.factor_tile)
        )
        count = f.sub(high, low)
        self.run(
            f"weights{vectors}",
            "scores factors now tops sums alpha",
            "count",
            lambda f: self._weights(f, vectors),
            some,
            factors,
            self.now,
            x.top,
            x.sum,
            self.alpha,
            count,
        )
        self.add_features(
            "output",
            self.at(x.v, low, a.width),
            a.width,
            some,
            self.group,
            count,
            self.at(self.ot, x.g, self.transposed_bytes(a.width)),
            self.alpha,
            vectors,
        )

    def _store_rows(self, g: Int, row: Int, valid: Int) -> None:
        """The output of a group, and its numbers per row."""
        f = self.f
        a = self.a
        top, total = (self.at(p, g, self.group) for p in (self.tops, self.sums))
        for j in range(self.t.vectors):
            self._finish(*(f.gep("float", p, j * self.lanes) for p in (top, total, self.now)))
        self.gather(
            self.at(self.ot, g, self.transposed_bytes(a.width)),
            total,
            a.width,
            valid,
            self.row("out", row, a.width),
        )
        for name, p in (("%lse", top), ("%total", self.now))[: 1 + a.softmax]:
            f.do(
                f"call void @llvm.memcpy.p0.p0.i64(ptr {f.gep('float', name, row)}, ptr {p},"
                f" i64 {f.mul(valid, 4)}, i1 false)"
            )

    def _scores(self, f: Writer, vectors: int, masked: bool) -> None:
        v = f.typed("float", self.lanes)
        found, _ = self.scores(f, vectors, masked)
        for p, s in zip(
            self.places("%to", f, self.t.rows, vectors, self.group),
            found,
            strict=True,
        ):
            v.store(s, p)
        for j in range(vectors):
            p = f.gep("float", "%tops", j * self.lanes)
            top = v.load(p)
            for s in found[j::vectors]:
                top = v.call("maxnum", top, s)
            v.store(top, p)

    def _weights(self, f: Writer, vectors: int) -> None:
        """Scores -> weights relative to the largest so far; the sum, and what older sums are
        multiplied by."""
        v = f.typed("float", self.lanes)
        at = [j * self.lanes for j in range(vectors)]
        tops = [v.load(f.gep("float", "%now", j)) for j in at]
        finite = [v.select(v.cmp("oeq", x, -numbers.inf), 0, x) for x in tops]
        alpha = [
            math.exp2(v, v.sub(v.load(f.gep("float", "%tops", j)), x))
            for j, x in zip(at, finite, strict=True)
        ]
        start = [
            v.mul(v.load(f.gep("float", "%sums", j)), x) for j, x in zip(at, alpha, strict=True)
        ]
        with f.loop(0, "%count", carry=[(v.type, s) for s in start]) as loop:
            loop.next = []
            for j, x, total in zip(at, finite, loop.vars, strict=True):
                at_key = f.muladd(loop.index, self.group, j)
                p = f.gep("float", "%scores", at_key)
                w = math.exp2(v, v.sub(v.load(p), x))
                v.store(
                    (v.mul(w, v.load(f.gep("float", "%factors", at_key))) if self.a.factors else w),
                    p,
                )
                loop.next.append(v.add(total, w))
        for name, values in (("sums", loop.vars), ("alpha", alpha), ("tops", tops)):
            for j, x in zip(at, values, strict=True):
                v.store(x, f.gep("float", f"%{name}", j))

    def _finish(self, top: str, total: str, log: str) -> None:
        """(largest score, sum) -> (log-sum-exp, 1 / sum); of a softmax the largest score stays, and
        the logarithm goes to `log`."""
        v = self.v
        x = v.load(top)
        s = v.load(total)
        if self.a.softmax:
            v.store(v.mul(math.log(v, s), LOG2E), log)
            v.store(v.div(1, s), total)
            return
        s = self.sum_of_weights(v, s)
        x = v.select(v.cmp("oeq", x, -numbers.inf), 0, x)
        v.store(v.fma(x, 1 / LOG2E, math.log(v, s)), top)
        v.store(v.div(1, s), total)
