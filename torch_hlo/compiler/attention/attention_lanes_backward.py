"""The backward pass with queries along lanes (attention_lanes.py): weights again from the numbers
per row, gradients of scores, and five sums of products."""

from __future__ import annotations

from functools import partial

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import ceildiv

from ..codegen import Writer, load_real
from ..llvm import Int, math
from .attention_kernel import LOG2E
from .attention_lanes import nothing
from .attention_lanes_scores import LaneScores
from .attention_term import FLOAT_MAX


@frozen
class _Part:
    """A group of queries and a block of keys that starts at `start`. `tiles`: weights, gradients of
    scores, weights after dropout; `queries`, `grad`: transposed; `lse2`, `delta`, `logs`: numbers
    per query."""

    tiles: tuple[str, str, str]
    start: Int
    k: str
    v: str
    queries: str
    grad: str
    lse2: str
    delta: str
    logs: str


class Backward(LaneScores):
    """Items: heads."""

    def item(self, item: Int) -> None:
        f = self.f
        a = self.a
        self.tile_row = self.queries + self.lanes  # rows of tiles: not a multiple of a page
        self.qt, self.gt, self.dqt = (
            self.floats(self.groups * n * self.group)
            for n in (a.size, a.width, self.transposed_bytes(a.size) // self.group)
        )
        self.lse2 = self.floats(self.queries)
        self.delta = self.floats(self.queries)
        self.logs = self.floats(self.queries) if a.softmax else "null"
        self.ones = self.floats(self.group)
        self.span = self.floats(8)
        self.caps = self.store_caps()
        self.p, self.ds = (self.floats((self.keys + self.t.rows) * self.tile_row) for _ in range(2))
        # weights after dropout
        self.used = self.floats((self.keys + self.t.rows) * self.tile_row) if a.factors else self.p
        for j in range(self.t.vectors):
            self.v.store(self.v.const(1), f.gep("float", self.ones, j * self.lanes))
        with f.loop(0, self.queries, self.lanes) as i:  # queries that there are not have no weights
            self.v.store(self.v.const(FLOAT_MAX), f.gep("float", self.lse2, i))
        with self.heads_of(item) as head:
            with f.loop(0, a.rows, self.queries) as first:
                self.queries_block(head, first, f.min(self.queries, f.sub(a.rows, first)))

    def queries_block(self, head: Int, first: Int, count: Int) -> None:
        f = self.f
        a = self.a
        number = f.mul(head, a.rows)
        keys = f.mul(f.div(head, a.group), a.columns)
        grads, queries = (
            self.compact(name, number, first, count, n, self.queries)
            for name, n in (("grad", a.width), ("q", a.size))
        )
        self.zero(self.dqt, self.groups * self.transposed_bytes(a.size))
        self._spread_queries(grads, queries, first, count)
        with f.loop(0, count) as i:
            self._row(i, f.add(number, first, i), grads)
        end = f.min(f.add(first, count), a.columns) if a.causal else a.columns
        with self.key_blocks(end) as (start, width):
            k, v = self.compact_keys(keys, start, width)
            for i, n in enumerate((width, 0, count, 0)):
                f.store_at("i64", n, self.span, i)
            with self.of_groups(first, count) as (g, query, valid):
                seen = self.seen(query, start, width)
                with f.when(f.icmp("sgt", seen, 0)) if a.causal else nothing():
                    self.see(query)
                    self.computed(head, query, valid, start, width)
                    self.by_vectors(
                        valid,
                        lambda vectors: self.of_group(g, query, start, width, seen, k, v, vectors),
                    )
            self._add_to_keys(keys, start, width, first, count, grads, queries)
            if a.bias_gradient:
                with self.of_groups(first, count) as (g, query, valid):
                    self.add_bias_gradient(
                        f.gep("float", self.ds, f.mul(g, self.group)),
                        f.muladd(query, a.columns, start),
                        valid,
                        width,
                    )
        with self.of_groups(first, count) as (g, query, valid):
            self.gather(
                self.at(self.dqt, g, self.transposed_bytes(a.size)),
                self.ones,
                a.size,
                valid,
                self.row("dq", f.add(number, query), a.size),
            )

    def _spread_queries(self, grads: str, queries: str, first: Int, count: Int) -> None:
        """Queries and gradients of the output along lanes."""
        f = self.f
        a = self.a
        group = self.group
        with self.of_groups(first, count) as (g, _, valid):
            skipped = f.mul(g, group)
            self.spread(
                self.at(queries, skipped, a.size),
                "f32",
                a.size,
                valid,
                self.at(self.qt, g, a.size * group),
                self.scale(LOG2E),
            )
            self.spread(
                self.at(grads, skipped, a.width),
                "f32",
                a.width,
                valid,
                self.at(self.gt, g, a.width * group),
                self.scale(),
            )

    def _row(self, i: Int, row: Int, grads: str) -> None:
        """The numbers of query `i` of a block, which is row `row` of the array."""
        f = self.f
        a = self.a
        one = f.typed("float")
        delta = self.inner(
            (self.at(grads, i, a.width), "f32"),
            (self.row("out", row, a.width), self.dtype["out"]),
            a.width,
        )
        f.store_at("float", one.mul(delta, self.scale()), self.delta, i)
        for role, to in (("lse", self.lse2), ("total", self.logs))[: 1 + a.softmax]:
            x = load_real(f, self.dtype[role], self.pointer[role], row)
            f.store_at("float", x if a.softmax else one.mul(x, LOG2E), to, i)

    def _add_to_keys(
        self,
        keys: Int,
        start: Int,
        width: Int,
        first: Int,
        count: Int,
        grads: str,
        queries: str,
    ) -> None:
        """What a block of queries gives to the gradients of a block of keys and values."""
        f = self.f
        a = self.a
        group = self.group
        dk, dv = (
            self.row(name, f.add(keys, start), n) for name, n in (("dk", a.size), ("dv", a.width))
        )
        reached = f.min(f.sub(f.add(first, count), start), width) if a.causal else width
        low: Int = 0
        skipped: Int = 0
        high = reached
        stop = count
        if self.bias:
            low, high, skipped, stop = (f.load_at("i64", self.span, i) for i in range(4))
            stop = f.min(stop, count)
        with f.loop(low, f.min(high, reached), self.t.rows) as j:
            at = self.tile_start(j, width)
            if a.causal:  # queries before the tile's first new key do not see it
                skipped = f.mul(f.div(f.max(f.sub(f.add(start, j), first), 0), group), group)
            for tile, right, to, n in (
                (self.used, grads, dv, a.width),
                (self.ds, queries, dk, a.size),
            ):
                self.add_queries(
                    f.gep("float", self.at(tile, at, self.tile_row), skipped),
                    self.at(right, skipped, n),
                    n,
                    f.sub(stop, skipped),
                    self.at(to, at, n),
                    f.sub(j, at),
                    f.sub(width, at),
                )

    def of_group(
        self,
        g: Int,
        query: Int,
        start: Int,
        width: Int,
        seen: Int,
        k: str,
        v: str,
        vectors: int,
    ) -> None:
        """Weights and gradients of scores of a group and a block of keys, and what they give to the
        gradient of the queries."""
        f = self.f
        a = self.a
        group = self.group
        weights, ds, used = (
            f.gep("float", tile, f.mul(g, group)) for tile in (self.p, self.ds, self.used)
        )
        x = _Part(
            (weights, ds, used),
            start,
            k,
            v,
            self.at(self.qt, g, a.size * group),
            self.at(self.gt, g, a.width * group),
            self.at(self.lse2, g, group),
            self.at(self.delta, g, group),
            self.at(self.logs, g, group) if a.softmax else "null",
        )
        low = "0"
        high = str(seen)
        if self.bias:
            low, high = f.choose(
                self.all_above_hidden(x.lse2, vectors),
                lambda: list(self.visible(seen)),
                lambda: ["0", str(seen)],
                ["i64", "i64"],
            )
            self.clear([weights, ds, *([used] if a.factors else [])], low, high, width, vectors)
            self.extend(g, low, high)
        tile = partial(self._tile, x, vectors)
        self.tiles(query, start, width, low, high, tile)
        with f.when(f.icmp("slt", low, high)) if self.bias else nothing():
            self.add_features(
                "queries",
                self.at(k, low, a.size),
                a.size,
                self.at(ds, low, self.tile_row),
                self.tile_row,
                f.sub(high, low),
                self.at(self.dqt, g, self.transposed_bytes(a.size)),
                None,
                vectors,
            )

    def _tile(self, x: _Part, vectors: int, at: Int, masked: bool) -> None:
        """Weights and gradients of scores of the tile at row `at` of a block of keys."""
        f = self.f
        a = self.a
        factors = self.at(self.factor_tile, at, self.group) if a.factors else "null"
        of_tile = [self.at(tile, at, self.tile_row) for tile in x.tiles]
        self.run(
            f"probabilities{vectors}{'_masked' * masked}",
            "k q to slopes lse logs bias limits fill caps",
            "key",
            lambda f: self._probabilities(f, vectors, masked),
            self.at(x.k, at, a.size),
            x.queries,
            *of_tile[:2],
            x.lse2,
            x.logs,
            self.bias_at(at),
            self.limits or "null",
            self.pointer.get("fill", "null"),
            self.caps,
            f.add(x.start, at),
        )
        self.run(
            f"gradients{vectors}",
            "v grad p ds used factors bias delta",
            "",
            lambda f: self._gradients(f, vectors),
            self.at(x.v, at, a.width),
            x.grad,
            *of_tile,
            factors,
            self.bias_at(at),
            x.delta,
        )

    def clear(
        self,
        tiles: list[str],
        low: Int,
        high: Int,
        width: Int,
        vectors: int,
    ) -> None:
        """0 in the rows of a group's tiles outside [low, high)."""
        f = self.f
        v = self.v
        for first, last in ((0, low), (f.max(high, low), width)):
            with f.loop(first, last) as key:
                for tile in tiles:
                    for j in range(vectors):
                        v.store(
                            v.const(0),
                            f.gep("float", self.at(tile, key, self.tile_row), j * self.lanes),
                        )

    def extend(self, g: Int, low: Int, high: Int) -> None:
        """The keys and queries of a block that have weights are also those of a group."""
        f = self.f
        with f.when(f.icmp("slt", low, high)):
            first = f.mul(g, self.group)
            for i, (pick, x) in enumerate(
                (
                    (f.min, low),
                    (f.max, high),
                    (f.min, first),
                    (f.max, f.add(first, self.group)),
                )
            ):
                p = f.gep("i64", self.span, i)
                f.store("i64", pick(f.load("i64", p), x), p)

    def _probabilities(self, f: Writer, vectors: int, masked: bool) -> None:
        """Weights; derivatives of caps are where the gradients will be."""
        v = f.typed("float", self.lanes)
        found, slopes = self.scores(f, vectors, masked)
        lse = self.loads(f, "%lse", vectors)
        logs = self.loads(f, "%logs", vectors) if self.a.softmax else []
        for n, (p, s) in enumerate(
            zip(self.places("%to", f, self.t.rows, vectors, self.tile_row), found, strict=True)
        ):
            s = v.sub(s, lse[n % vectors])
            v.store(math.exp2(v, v.sub(s, logs[n % vectors]) if logs else s), p)
        for p, slope in zip(
            self.places("%slopes", f, self.t.rows, vectors, self.tile_row),
            slopes,
            strict=False,
        ):
            v.store(slope, p)

    def _gradients(self, f: Writer, vectors: int) -> None:
        v = f.typed("float", self.lanes)
        rows = self.t.rows
        found = self.product(
            f,
            rows,
            vectors,
            self.a.width,
            ("%v", self.a.width, 1),
            ("%grad", self.group),
            ahead=f.gep("float", "%v", rows * self.a.width),
        )
        delta = self.loads(f, "%delta", vectors)
        places = [self.places(p, f, rows, vectors, self.tile_row) for p in ("%p", "%ds", "%used")]
        factors = self.places("%factors", f, rows, vectors, self.group)
        biases = self.bias_values(f, vectors) if self.a.fill else []
        for n, (dp, p, ds, used) in enumerate(zip(found, *places, strict=True)):
            weight = v.load(p)
            if self.a.factors:
                factor = v.load(factors[n])
                dp = v.mul(dp, factor)
                v.store(v.mul(weight, factor), used)
            gradient = v.mul(weight, v.sub(dp, delta[n % vectors]))
            if self.a.fill:
                gradient = self.kept(v, gradient, biases[n])
            v.store(v.mul(gradient, v.load(ds)) if self.a.capped else gradient, ds)

    def add_bias_gradient(self, ds: str, at: Int, valid: Int, width: Int) -> None:
        """dbias[query][key] += ds[key][query] / scale, for a group and a block of keys; `at`: of
        its first element."""

        def body(f: Writer) -> None:
            v = f.typed("float", self.lanes)
            lanes = self.lanes
            t = self.t
            factors = f.splat("float", lanes, f.load("float", "%factor"))
            for part in range(t.vectors):
                with (
                    f.when(f.icmp("sgt", "%valid", part * lanes)),
                    f.loop(0, "%width", lanes) as j,
                ):
                    # keys past the width are read as well: the tile has room for them
                    block = [
                        v.load(
                            f.gep(
                                "float",
                                "%ds",
                                f.muladd(
                                    f.min(f.add(j, k), f.sub("%width", 1)),
                                    self.tile_row,
                                    part * lanes,
                                ),
                            ),
                        )
                        for k in range(lanes)
                    ]
                    mask = f.lane_mask(lanes, j, "%width")
                    for i, row in enumerate(t.transposed(f, block)):
                        with f.when(f.icmp("slt", part * lanes + i, "%valid")):
                            p = f.gep("float", "%to", f.muladd(part * lanes + i, "%stride", j))
                            v.store(v.fma(row, factors, v.load(p, mask=mask)), p, mask=mask)

        one = self.f.typed("float")
        self.f.store("float", one.div(1, self.scale()), self.number)
        self.run(
            "bias_gradient",
            "ds to factor",
            "valid width stride",
            body,
            ds,
            self.f.gep("float", self.dbias, at),
            self.number,
            valid,
            width,
            self.a.columns,
        )

    def add_queries(
        self,
        tile: str,
        right: str,
        width: int,
        depth: Int,
        to: str,
        skip: Int,
        end: Int,
    ) -> None:
        """to[j, c] += sum_i tile[j, i] right[i, c] for a tile's rows in [skip, end)."""
        f = self.f
        step = self.lanes * self.t.vectors
        for first in range(0, width, step):
            columns = min(step, width - first)
            self.run(
                f"keys_{width}_{columns}",
                "tile right to",
                "depth skip end",
                lambda f: self._add_columns(f, width, columns),
                tile,
                f.gep("float", right, first),
                f.gep("float", to, first),
                depth,
                skip,
                end,
            )

    def _add_columns(self, f: Writer, width: int, columns: int) -> None:
        v = f.typed("float", self.lanes)
        vectors = ceildiv(columns, self.lanes)
        masks = [
            (
                f.lane_mask(self.lanes, j * self.lanes, columns)
                if columns < (j + 1) * self.lanes
                else None
            )
            for j in range(vectors)
        ]
        sums = self.product(
            f,
            self.t.rows,
            vectors,
            "%depth",
            ("%tile", self.tile_row, 1),
            ("%right", width),
            masks=masks,
        )
        places = self.places("%to", f, self.t.rows, vectors, width)
        for i in range(self.t.rows):
            with f.when(f.op(f"and i1 {f.icmp('sle', '%skip', i)}, {f.icmp('slt', i, '%end')}")):
                for j, mask in enumerate(masks):
                    p = places[i * vectors + j]
                    v.store(v.add(v.load(p, mask=mask), sums[i * vectors + j]), p, mask=mask)
