"""Scores with queries along lanes (attention_lanes.py): a tile of them, what hides keys from
queries, and the keys that none of a group's queries sees."""

from __future__ import annotations

import math as numbers
from collections.abc import Callable

from torch_hlo.hlo.ir import ceildiv

from ..codegen import Writer
from ..llvm import Int
from .attention_lanes import TERM_KEYS, LaneKernel
from .attention_term import REPLACED

# biases up to the first hide a key; two to the power of minus the second is 0
HIDDEN = -1e30
NOTHING = 160.0


def even(total: int, most: int) -> list[int]:
    """`total` in as few parts of at most `most` as possible, nearly equal."""
    parts = ceildiv(total, most)
    return [total // parts + (n < total % parts) for n in range(parts)]


class LaneScores(LaneKernel):
    """Scores of a group and a block of keys, with biases and masks; sums of products over keys."""

    def store_caps(self) -> str:
        """Where the cap and its inverse are."""
        caps = self.floats(2) if self.a.capped else "null"
        for i, x in enumerate(self.cap() or ()):
            self.f.store_at("float", x, caps, i)
        return caps

    def scores(self, f: Writer, vectors: int, masked: bool) -> tuple[list[str], list[str]]:
        """The scores of a tile of keys from %k and queries %q, with bias and mask; the derivatives
        by their caps, none without caps."""
        rows = self.t.rows
        v = f.typed("float", self.lanes)
        found = self.product(
            f,
            rows,
            vectors,
            self.a.size,
            ("%k", self.a.size, 1),
            ("%q", self.group),
            ahead=f.gep("float", "%k", rows * self.a.size),
        )
        slopes: list[str] = []
        if self.a.capped:
            caps = [f.splat("float", self.lanes, f.load_at("float", "%caps", i)) for i in (0, 1)]
            both = [self.capped(v, s, *caps) for s in found]
            found, slopes = ([x[i] for x in both] for i in (0, 1))
        biases = self.bias_values(f, vectors)
        if biases:
            fill = f.splat("float", self.lanes, self.fill(f)) if self.a.fill else ""
            found = [self.biased(v, s, x, fill) for s, x in zip(found, biases, strict=True)]
        if masked:
            i = f.typed("i32", self.lanes)
            first = f.op("trunc i64 %key to i32")
            limits = self.loads(f, "%limits", vectors, "i32")
            seen = [
                i.cmp(
                    "slt",
                    i.add(f.splat("i32", self.lanes, first), n // vectors),
                    limits[n % vectors],
                )
                for n in range(len(found))
            ]
            found = [v.select(c, s, -numbers.inf) for c, s in zip(seen, found, strict=True)]
        return found, slopes

    def bias_values(self, f: Writer, vectors: int) -> list[str]:
        """The bias of a tile, at %bias."""
        rows = self.t.rows
        if self.bias == "key":
            keys = [
                f.splat("float", self.lanes, f.load_at("float", "%bias", i)) for i in range(rows)
            ]
            return [key for key in keys for _ in range(vectors)]
        v = f.typed("float", self.lanes)
        return (
            [v.load(p) for p in self.places("%bias", f, rows, vectors, self.group)]
            if self.bias == "tile"
            else []
        )

    def tiles(
        self,
        query: Int,
        first: Int,
        width: Int,
        low: Int,
        high: Int,
        each: Callable[[Int, bool], None],
    ) -> None:
        """`each(first row, masked)` for the tiles of the keys [low, high) of a block."""
        f = self.f
        rows = self.t.rows
        with f.loop(low, high, rows) as j:
            at = self.tile_start(j, width)
            if self.limits is None:
                each(at, False)
            else:
                end = (
                    f.add(first, width)
                    if not self.a.causal
                    else (
                        f.min(f.add(first, width), f.add(query, 1))
                        if self.short
                        else f.add(query, 1)
                    )
                )
                full = f.icmp("sle", f.add(first, at, rows), end)
                f.choose(full, lambda: each(at, False), lambda: each(at, True))

    def tile_start(self, j: Int, width: Int) -> Int:
        """The first row of the tile that has row `j` of a block and ends in it, if the block is no
        smaller than a tile."""
        last = self.f.sub(width, self.t.rows)
        return self.f.min(j, self.f.max(last, 0) if self.short else last)

    def seen(self, query: Int, first: Int, width: Int) -> Int:
        """How many keys of a block some query of the group sees."""
        f = self.f
        return f.min(f.sub(f.add(query, self.group), first), width) if self.a.causal else width

    def see(self, query: Int) -> None:
        """How many keys each query of a group sees."""
        f = self.f
        if self.limits is None:
            return
        i = f.typed("i32", self.lanes)
        columns = (
            f.splat("i32", self.lanes, f.op(f"trunc i64 {f.add(self.a.columns, 0)} to i32"))
            if self.short
            else ""
        )
        for j in range(self.t.vectors):
            limit = columns
            if self.a.causal:
                limit = i.add(
                    f.splat(
                        "i32",
                        self.lanes,
                        f.op(f"trunc i64 {f.add(query, 1 + j * self.lanes)} to i32"),
                    ),
                    i.e.iota("i32"),
                )
                limit = i.call("smin", limit, columns) if columns else limit
            i.store(limit, f.gep("i32", self.limits, j * self.lanes))

    def computed(
        self,
        head: Int,
        query: Int,
        valid: Int,
        first: Int,
        width: Int,
    ) -> None:
        """The bias and the factors of a group and a block of keys -> [key][query]; a bias that all
        queries have is [key]."""
        if self.bias == "key":
            self.compute("bias", head, query, 1, first, width, self.bias_tile, 0)
        elif self.bias:
            self.turned("bias", head, query, valid, first, width, self.bias_tile)
        if self.a.factors:
            self.turned("factors", head, query, valid, first, width, self.factor_tile)

    def turned(
        self,
        role: str,
        head: Int,
        query: Int,
        valid: Int,
        first: Int,
        width: Int,
        to: str,
    ) -> None:
        """to[key][query] of a computed operand for a group and a block of keys."""
        f = self.f
        step = TERM_KEYS * self.lanes
        ld = step + self.lanes

        with f.loop(0, width, step) as skipped:
            keys = f.min(step, f.sub(width, skipped))
            self.compute(
                role,
                head,
                query,
                valid,
                f.add(first, skipped),
                keys,
                self.term_tile,
                ld,
            )
            self.run(
                "turn",
                "source to",
                "width valid",
                lambda f: self._turn(f, ld),
                self.term_tile,
                self.at(to, skipped, self.group),
                keys,
                valid,
            )

    def _turn(self, f: Writer, ld: int) -> None:
        """to[c, i] = source[i, c], `ld` elements apart, of a group."""
        last = f.sub("%valid", 1)
        v = f.typed("float", self.lanes)
        for part in range(self.t.vectors):
            first = part * self.lanes
            rows = [
                f.gep("float", "%source", f.mul(f.min(first + i, last), ld))
                for i in range(self.lanes)
            ]
            # columns past the width: there is room for them
            with f.loop(0, "%width", self.lanes) as j:
                block = [v.load(f.gep("float", r, j)) for r in rows]
                for k, column in enumerate(self.t.transposed(f, block)):
                    place = f.muladd(f.add(j, k), self.group, first)
                    v.store(column, f.gep("float", "%to", place))

    def visible(self, width: Int) -> tuple[Int, Int]:
        """The range of the keys of a block that the bias does not hide from all queries of a
        group."""
        f = self.f

        def body(f: Writer) -> None:
            lanes, vectors = (1, 1) if self.bias == "key" else (self.lanes, self.t.vectors)
            v = f.typed("float", lanes)
            with f.loop(0, "%width", carry=[("i64", "%width"), ("i64", "0")]) as loop:
                some = None
                for j in range(vectors):
                    x = v.load(
                        f.gep("float", "%bias", f.muladd(loop.index, lanes * vectors, j * lanes)),
                    )
                    seen = v.cmp("une", x, REPLACED) if self.a.fill else v.cmp("ugt", x, HIDDEN)
                    some = seen if some is None else f.typed("i1", lanes).bin("or", some, seen)
                if lanes > 1:
                    some = f.op(f"call i1 @llvm.vector.reduce.or.v{lanes}i1(<{lanes} x i1> {some})")
                low, high = loop.vars
                loop.next = [
                    f.op(f"select i1 {some}, i64 {f.min(low, loop.index)}, i64 {low}"),
                    f.op(f"select i1 {some}, i64 {f.add(loop.index, 1)}, i64 {high}"),
                ]
            for i, x in enumerate(loop.vars):
                f.store_at("i64", x, "%to", i)

        self.run("visible", "bias to", "width", body, self.bias_tile, self.range, width)
        low, high = (f.load_at("i64", self.range, i) for i in (0, 1))
        return low, high

    def all_above_hidden(self, pointer: str, vectors: int) -> str:
        """Whether hidden scores have weights of 0 relative to all of a group's numbers at
        `pointer`."""
        v = self.v
        one = self.f.typed("float")
        least = v.load(pointer)
        for j in range(1, vectors):
            least = v.call(
                "minimum",
                least,
                v.load(self.f.gep("float", pointer, j * self.lanes)),
            )
        hidden = self.fill(self.f, self.pointer["fill"]) if self.a.fill else one.const(HIDDEN)
        return one.cmp("ogt", self.total("fminimum", "", least), one.add(hidden, NOTHING))

    def bias_at(self, key: Int) -> str:
        """Where the bias of a tile starts."""
        return (
            "null"
            if self.bias is None
            else self.f.gep(
                "float",
                self.bias_tile,
                self.f.mul(key, 1 if self.bias == "key" else self.group),
            )
        )

    def add_features(
        self,
        what: str,
        matrix: str,
        width: int,
        tile: str,
        stride: Int,
        depth: Int,
        to: str,
        alpha: str | None,
        vectors: int,
    ) -> None:
        """to[c, i] = to[c, i] alpha[i] + sum_j matrix[j, c] tile[j, i]; without `alpha` it is
        one."""
        f = self.f
        first = 0
        for rows in even(width, self.t.rows):

            def body(f: Writer, rows: int = rows) -> None:
                v = f.typed("float", self.lanes)
                places = self.places("%to", f, rows, vectors, self.group)
                start = [v.load(p) for p in places]
                if alpha:
                    factors = self.loads(f, "%alpha", vectors)
                    start = [v.mul(s, factors[n % vectors]) for n, s in enumerate(start)]
                for p, s in zip(
                    places,
                    self.product(
                        f,
                        rows,
                        vectors,
                        "%depth",
                        ("%matrix", 1, width),
                        ("%tile", stride),
                        start,
                    ),
                    strict=True,
                ):
                    v.store(s, p)

            self.run(
                f"{what}_{rows}x{vectors}",
                "matrix tile to alpha",
                "depth",
                body,
                f.gep("float", matrix, first),
                tile,
                f.gep("float", to, first * self.group),
                alpha or "null",
                depth,
            )
            first += rows
