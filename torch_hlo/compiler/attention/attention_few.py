"""Attention of a few queries, as in decoding: keys and values stream through once, features along
the lanes of vectors, sums in f32.

Scores are sums across lanes: as many of them as a vector has lanes (keys x queries) are collected
and reduced together by a transpose. Scores are in units of log 2, so that weights are powers of
two."""

import math as numbers

from torch_hlo.hlo.ir import Size, round_up

from ..codegen import load_real
from ..llvm import Int, math
from ..llvm.scalar import STORAGE
from ..matmul.tile import Tile
from .attention import Attention
from .attention_kernel import LOG2E, AttentionKernel

ROWS = 4  # queries, at most
KEYS = 256  # of a block: their scores stay in L1
SUMS = 16  # vectors that collect values at a time


def fits(a: Attention[Size]) -> bool:
    return a.kind == "forward" and isinstance(a.rows, int) and a.rows <= ROWS


class Forward(AttentionKernel):
    """Items: heads."""

    @classmethod
    def items(cls, a: Attention[Size], t: Tile) -> tuple[Size, Size]:
        return a.heads, a.rows

    @property
    def rows(self) -> int:
        assert isinstance(self.a.rows, int), "see fits"
        return self.a.rows

    def item(self, head: Int) -> None:
        f = self.f
        a = self.a
        v = self.v
        lanes = self.t.lanes
        number = f.mul(head, self.rows)
        keys = f.mul(f.div(head, a.group), a.columns)
        self.depth, self.wide = (round_up(n, lanes) for n in (a.size, a.width))
        self.q = self.floats(self.rows * self.depth)
        self.ot = self.floats(self.rows * self.wide)
        self.weights = self.floats(self.rows * KEYS + lanes)
        self.terms_of = {role: self.floats(KEYS + lanes) for role in self.terms}
        one = f.typed("float")
        rows = range(self.rows)
        scales = self.e.splat("float", self.scale(LOG2E))
        self.caps = [self.e.splat("float", x) for x in self.cap() or ()]
        for r in rows:
            with f.loop(0, a.size, lanes) as c:
                row = self.row("q", f.add(number, r), a.size)
                x = load_real(f, self.dtype["q"], row, c, lanes, self.inside(c, a.size))
                v.store(v.mul(x, scales), f.gep("float", self.q, f.add(c, r * self.depth)))
        self.zero(self.ot, self.rows * self.wide)
        carry = [("float", one.const(x)) for x in (-numbers.inf, 0) for _ in rows]
        with f.loop(0, a.columns, KEYS, carry=carry) as loop:
            width = f.min(KEYS, f.sub(a.columns, loop.index))
            first = f.add(keys, loop.index)
            self.scores(self.row("k", first, a.size), width)
            state = [
                self.weigh(r, head, loop.index, width, loop.vars[r], loop.vars[self.rows + r])
                for r in rows
            ]
            self.add_values(self.row("v", first, a.width), width, [alpha for _, _, alpha in state])
            loop.next = [top for top, _, _ in state] + [total for _, total, _ in state]
        for r in rows:
            total = loop.vars[self.rows + r]
            total = self.sum_of_weights(one, total)
            factor = self.e.splat("float", one.div(1, total))
            out = self.row("out", f.add(number, r), a.width)
            with f.loop(0, a.width, lanes) as c:
                x = v.load(f.gep("float", self.ot, f.add(c, r * self.wide)))
                v.store(v.mul(x, factor), f.gep("float", out, c), mask=self.inside(c, a.width))
            self.store_lse(loop.vars[r], total, f.add(number, r))

    def inside(self, c: Int, width: int) -> str | None:
        """The lanes from column `c` on that are in a row of `width`; None when all always are."""
        return self.f.lane_mask(self.t.lanes, c, width) if width % self.t.lanes else None

    def scores(self, k: str, width: Int) -> None:
        """weights[r, j] = q[r] k[j] for the keys of a block."""
        f = self.f
        a = self.a
        v = self.v
        lanes = self.t.lanes
        each = lanes // (1 << (self.rows - 1).bit_length())  # keys at a time
        last = f.sub(width, 1)
        with f.loop(0, width, each) as j:
            rows = [
                f.gep(STORAGE[self.dtype["k"]].memory, k, f.mul(f.min(f.add(j, i), last), a.size))
                for i in range(each)
            ]
            with f.loop(
                0,
                a.size,
                lanes,
                carry=[(v.type, "zeroinitializer")] * (self.rows * each),
                known_nonempty=True,
            ) as loop:
                mask = self.inside(loop.index, a.size)
                key = [load_real(f, self.dtype["k"], row, loop.index, lanes, mask) for row in rows]
                query = [
                    v.load(f.gep("float", self.q, f.add(loop.index, r * self.depth)))
                    for r in range(self.rows)
                ]
                loop.next = [
                    v.fma(x, y, loop.vars[r * each + i])
                    for r, x in enumerate(query)
                    for i, y in enumerate(key)
                ]
            columns = self.t.transposed(
                f,
                [*loop.vars, *["zeroinitializer"] * (lanes - len(loop.vars))],
            )
            while len(columns) > 1:
                columns = [v.add(x, y) for x, y in zip(columns[::2], columns[1::2], strict=True)]
            for r in range(self.rows):
                part = self.e.shuffle(
                    "float",
                    columns[0],
                    "poison",
                    lanes,
                    range(r * each, (r + 1) * each),
                )
                f.store(
                    f"<{each} x float>",
                    part,
                    f.gep("float", self.weights, f.add(j, r * KEYS)),
                )

    def weigh(
        self, r: int, head: Int, start: Int, width: Int, before: str, older: str
    ) -> tuple[str, str, str]:
        """Scores of a query -> weights relative to the largest so far: (that, sum of weights, what
        older sums are multiplied by)."""
        f = self.f
        v = self.v
        lanes = self.t.lanes
        one = f.typed("float")
        row = f.gep("float", self.weights, r * KEYS)
        limit = f.min(width, f.max(f.sub(r + 1, start), 0)) if self.a.causal else width
        for role in self.terms:
            self.compute(role, head, r, 1, start, width, self.terms_of[role], 0)
        with f.loop(0, width, lanes, carry=[(v.type, v.const(-numbers.inf))]) as loop:
            p = f.gep("float", row, loop.index)
            mask = f.lane_mask(lanes, loop.index, limit)
            s = v.load(p)
            if self.caps:
                s, _ = self.capped(v, s, *self.caps)
            if self.a.bias is not None:
                x = v.load(f.gep("float", self.terms_of["bias"], loop.index))
                s = self.biased(
                    v,
                    s,
                    x,
                    (
                        self.e.splat("float", self.fill(f, self.pointer["fill"]))
                        if self.a.fill
                        else ""
                    ),
                )
            s = v.select(mask, s, -numbers.inf)
            v.store(s, p)
            loop.next = [v.call("maxnum", loop.vars[0], s)]
        top = one.call("maxnum", before, self.total("fmax", "", loop.vars[0]))
        tops = self.e.splat("float", self.finite(top))
        with f.loop(0, width, lanes, carry=[(v.type, "zeroinitializer")]) as loop:
            p = f.gep("float", row, loop.index)
            w = math.exp2(v, v.sub(v.load(p), tops))
            v.store(
                (
                    v.mul(w, v.load(f.gep("float", self.terms_of["factors"], loop.index)))
                    if self.a.factors
                    else w
                ),
                p,
            )
            loop.next = [v.add(loop.vars[0], w)]
        alpha = math.exp2(one, one.sub(before, self.finite(top)))
        return (
            top,
            one.fma(older, alpha, self.total("fadd", "-0.0", loop.vars[0])),
            alpha,
        )

    def add_values(self, values: str, width: Int, alpha: list[str]) -> None:
        """ot[r] = ot[r] alpha[r] + sum_j weights[r, j] values[j] for the keys of a block."""
        f = self.f
        a = self.a
        v = self.v
        lanes = self.t.lanes
        factors = [self.e.splat("float", x) for x in alpha]
        step = max(1, SUMS // self.rows) * lanes
        for low in range(0, a.width, step):
            columns = range(low, min(low + step, a.width), lanes)
            masks = [
                f.lane_mask(lanes, c, a.width) if c + lanes > a.width else None for c in columns
            ]
            places = [
                f.gep("float", self.ot, r * self.wide + c)
                for r in range(len(alpha))
                for c in columns
            ]
            start = [v.mul(v.load(p), factors[n // len(columns)]) for n, p in enumerate(places)]
            with f.loop(0, width, carry=[(v.type, s) for s in start], known_nonempty=True) as loop:
                row = self.at(values, loop.index, a.width, self.dtype["v"])
                x = [
                    load_real(f, self.dtype["v"], row, c, lanes, mask)
                    for c, mask in zip(columns, masks, strict=True)
                ]
                w = [
                    self.e.splat(
                        "float",
                        f.load_at("float", self.weights, f.add(loop.index, r * KEYS)),
                    )
                    for r in range(self.rows)
                ]
                loop.next = [
                    v.fma(y, z, loop.vars[r * len(x) + i])
                    for r, y in enumerate(w)
                    for i, z in enumerate(x)
                ]
            for p, s in zip(places, loop.vars, strict=True):
                v.store(s, p)
