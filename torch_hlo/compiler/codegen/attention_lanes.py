"""Attention with queries along the lanes of vectors, in f32: nothing is packed but the queries, and no sum runs across lanes.

A group is as many queries as a micro-kernel is wide (32 with AVX-512). Its scores are a tile [keys][queries], so the largest score, the sum and the
rescaling of a query are one lane each (online softmax: Milakov and Gimelshein 2018, Dao 2023). All five products are one loop, `_product`:

    scores      S[j, i] = sum_c K[j, c] Qt[c, i]              K as it is in memory, queries transposed once per item
    output      Ot[c, i] = Ot[c, i] alpha[i] + sum_j V[j, c] W[j, i]
    gradients   dP[j, i] = sum_c V[j, c] dOt[c, i],  dS = P (dP - delta)
                dV[j, c] += sum_i P[j, i] dO[i, c],  dK[j, c] += sum_i dS[j, i] Q[i, c]
                dQt[c, i] += sum_j K[j, c] dS[j, i]

Keys that a mask hides from a whole group, at the start and the end of a block, are left out once it is known that their weights are 0.
Scores are in units of log 2, so that weights are powers of two. Keys come in blocks of KEYS, so that a group's scores stay in L1 and the
block in L2. A tile at the end of a block overlaps the one before: it computes some rows again and adds none twice.
"""

from __future__ import annotations

import math as numbers
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch_hlo.compiler.codegen import gemm, math
from torch_hlo.compiler.codegen.attention_kernel import (
    FLOAT_MAX,
    LOG2E,
    REPLACED,
    Arrays,
    AttentionKernel,
    block_of,
    items_of_heads,
)
from torch_hlo.compiler.codegen.function import Int
from torch_hlo.compiler.codegen.gemm import Tile, lane_mask, splat
from torch_hlo.compiler.codegen.inline import Writer, load
from torch_hlo.compiler.codegen.scalar import STORAGE
from torch_hlo.compiler.passes.attention import Attention
from torch_hlo.hlo.dim import Size, ceildiv

KEYS = {"forward": 256, "backward": 128}  # keys of a block, at most
QUERIES = 256  # queries of a block, at most
HIDDEN, NOTHING = (
    -1e30,
    160.0,
)  # biases up to the first hide a key; two to the power of minus the second is 0
TERM_KEYS = 4  # vectors of keys of which a computed operand is turned at a time


def even(total: int, most: int) -> list[int]:
    """`total` in as few parts of at most `most` as possible, nearly equal."""
    parts = ceildiv(total, most)
    return [total // parts + (n < total % parts) for n in range(parts)]


class _Lanes(AttentionKernel):
    """What forward and backward share. A group of `vectors` vectors has queries in all of them but the last, at least."""

    def __init__(self, program, a: Attention, arrays: Arrays, t: Tile) -> None:
        super().__init__(program, a, arrays, t)
        self.group, self.lanes = t.columns, t.lanes
        self.keys = min(KEYS[a.kind], a.columns) if isinstance(a.columns, int) else KEYS[a.kind]
        self.queries = block_of(a.rows, QUERIES, self.group)
        self.groups = self.queries // self.group
        self.copies: dict[str, str] = {}
        self.v = self.f.emit(self.lanes).typed("float")
        self.number, self.range = self.floats(1), self.floats(4)
        bias = a.bias
        self.bias = None if bias is None else "key" if bias.row == 0 else "tile"
        self.bias_tile = (
            None
            if bias is None
            else self.floats((self.keys + self.lanes) * (1 if self.bias == "key" else self.group))
        )
        self.factor_tile = (
            self.floats((self.keys + self.lanes) * self.group) if a.factors else "null"
        )
        self.term_tile = (
            self.floats(self.group * (TERM_KEYS + 1) * self.lanes)
            if a.factors or self.bias == "tile"
            else ""
        )
        self.short = (
            not isinstance(a.columns, int) or a.columns < t.rows
        )  # there may be fewer keys than a tile has rows
        self.limits = self.floats(self.group) if a.causal or self.short else None

    # -- functions ------------------------------------------------------------------------------------------------
    def function(
        self, name: str, pointers: str, numbers_: str, body: Callable[[Writer], None]
    ) -> str:
        """A function of pointers and i64 numbers, named in strings; what follows a colon in `name` is not in the function's."""
        f = Writer(
            self.program,
            f"attention_{name.split(':')[0]}",
            [
                *(("ptr noalias", p) for p in pointers.split()),
                *(("i64", n) for n in numbers_.split()),
            ],
        )
        f.attrs = "noinline #0"
        body(f)
        return f.define()

    def run(
        self,
        name: str,
        pointers: str,
        numbers_: str,
        body: Callable[[Writer], None],
        *arguments: Int,
    ) -> None:
        """Call such a function, which is defined when it is new."""
        key = ("attention lanes", name, self.a, self.t)
        callee = self.program.once(key, lambda: self.function(name, pointers, numbers_, body))
        kinds = ["ptr"] * len(pointers.split()) + ["i64"] * len(numbers_.split())
        self.f.call(
            "void",
            callee,
            *(f"{kind} {value}" for kind, value in zip(kinds, arguments, strict=True)),
        )

    def product(self, f: Writer, rows: int, vectors: int, depth: Int, a: tuple[str, Int, Int], b: tuple[str, Int], start: list[str] | None = None,
                masks: list[str | None] | None = None, ahead: str | None = None) -> list[str]:  # fmt: skip
        """start[i, :] + sum_k A[i, k] B[k, :] in registers, `vectors` wide. `a`: (pointer, strides of i and k); `b`: (pointer, stride of k)."""
        t = self.t
        (a_pointer, a_row, a_k), (b_pointer, b_k) = a, b
        start = start or ["zeroinitializer"] * (rows * vectors)
        with f.loop(0, depth, carry=[(t.vector, s) for s in start], known_nonempty=True) as loop:
            from_a, from_b = (
                f.gep("float", a_pointer, f.mul(loop.index, a_k)),
                f.gep("float", b_pointer, f.mul(loop.index, b_k)),
            )
            v = f.emit(t.lanes).typed("float")
            if ahead:  # what A's next tile is, in equal parts
                f.do(
                    f"call void @llvm.prefetch.p0(ptr {f.gep('float', ahead, f.mul(loop.index, rows))}, i32 0, i32 3, i32 1)"
                )
            right = [
                v.load(f.gep("float", from_b, j * t.lanes), 4, masks[j] if masks else None)
                for j in range(vectors)
            ]
            loop.next = []
            for i in range(rows):
                left = splat(
                    f, "float", t.lanes, f.load("float", f.gep("float", from_a, f.mul(a_row, i)), 4)
                )
                loop.next += [
                    v.fma(left, right[j], loop.vars[i * vectors + j]) for j in range(vectors)
                ]
        return loop.vars

    def _places(self, pointer: str, f: Writer, rows: int, vectors: int, stride: Int) -> list[str]:
        return [
            f.gep("float", pointer, f.add(f.mul(stride, i), j * self.lanes))
            for i in range(rows)
            for j in range(vectors)
        ]

    def store_caps(self) -> str:
        """Where the cap and its inverse are."""
        caps = self.floats(2) if self.a.capped else "null"
        for i, x in enumerate(self.cap() or ()):
            self.f.store("float", x, self.f.gep("float", caps, i), 4)
        return caps

    def scores(self, f: Writer, vectors: int, masked: bool) -> tuple[list[str], list[str]]:
        """The scores of a tile of keys from %k and queries %q, with bias and mask; the derivatives by their caps, none without caps."""
        rows, v = self.t.rows, f.emit(self.lanes).typed("float")
        found = self.product(
            f,
            rows,
            vectors,
            self.a.size,
            ("%k", self.a.size, 1),
            ("%q", self.group),
            ahead=f.gep("float", "%k", rows * self.a.size),
        )
        slopes = []
        if self.a.capped:
            caps = [
                splat(f, "float", self.lanes, f.load("float", f.gep("float", "%caps", i), 4))
                for i in (0, 1)
            ]
            found, slopes = zip(*(self.capped(v, s, *caps) for s in found), strict=True)
        biases = self.bias_values(f, vectors)
        if biases:
            fill = splat(f, "float", self.lanes, self.fill(f)) if self.a.fill else ""
            found = [self.biased(v, s, x, fill) for s, x in zip(found, biases, strict=True)]
        if masked:
            i = f.emit(self.lanes).typed("i32")
            first = f.op("trunc i64 %key to i32")
            limits = [i.load(f.gep("i32", "%limits", j * self.lanes), 4) for j in range(vectors)]
            seen = [
                i.cmp(
                    "slt",
                    i.add(splat(f, "i32", self.lanes, first), i.const(n // vectors)),
                    limits[n % vectors],
                )
                for n in range(len(found))
            ]
            found = [
                v.select(c, s, v.const(-numbers.inf)) for c, s in zip(seen, found, strict=True)
            ]
        return found, slopes

    def bias_values(self, f: Writer, vectors: int) -> list[str]:
        """The bias of a tile, at %bias."""
        rows = self.t.rows
        if self.bias == "key":
            keys = [
                splat(f, "float", self.lanes, f.load("float", f.gep("float", "%bias", i), 4))
                for i in range(rows)
            ]
            return [key for key in keys for _ in range(vectors)]
        v = f.emit(self.lanes).typed("float")
        return (
            [v.load(p, 4) for p in self._places("%bias", f, rows, vectors, self.group)]
            if self.bias == "tile"
            else []
        )

    # -- queries to lanes and back --------------------------------------------------------------------------------
    def spread(self, source: str, dtype: str, width: int, valid: Int, to: str, factor: str) -> None:
        """to[c, i] = factor source[i, c], `factor` an f32, for a group of `valid` rows of `width` elements; the other lanes repeat the last row."""

        def body(f: Writer) -> None:
            v, lanes = f.emit(self.lanes).typed("float"), self.lanes
            factors = splat(f, "float", lanes, f.load("float", "%factor", 4))
            last = f.sub("%valid", 1)
            for part in range(self.t.vectors):
                rows = [
                    f.gep(
                        STORAGE[dtype].memory,
                        "%source",
                        f.mul(f.min(part * lanes + i, last), width),
                    )
                    for i in range(lanes)
                ]

                def columns(low: Int, count: int, rows=rows, part=part) -> None:
                    mask = lane_mask(f, lanes, 0, count) if count < lanes else None
                    block = [v.mul(load(f, dtype, r, low, lanes, mask), factors) for r in rows]
                    for c, column in enumerate(gemm.transposed(f, self.t, block)[:count]):
                        v.store(
                            column,
                            f.gep(
                                "float",
                                "%to",
                                f.add(f.mul(f.add(low, c), self.group), part * lanes),
                            ),
                            4,
                        )

                whole = width // lanes * lanes
                if whole:
                    with f.loop(0, whole, lanes, known_nonempty=True) as low:
                        columns(low, lanes)
                if whole < width:
                    columns(whole, width - whole)

        self.f.store("float", factor, self.number, 4)
        self.run(
            f"spread_{dtype}_{width}",
            "source to factor",
            "valid",
            body,
            source,
            to,
            self.number,
            valid,
        )

    def gather(self, source: str, factors: str, width: int, valid: Int, to: str) -> None:
        """to[i, c] = factors[i] source[c, i] for a group of `valid` rows of `width` elements."""

        def body(f: Writer) -> None:
            v, lanes = f.emit(self.lanes).typed("float"), self.lanes
            for part in range(self.t.vectors):
                with f.when(f.icmp("sgt", "%valid", part * lanes)):
                    factor = v.load(f.gep("float", "%factors", part * lanes), 4)
                    with f.loop(0, width, lanes) as low:
                        mask = lane_mask(f, lanes, low, width) if width % lanes else None
                        # rows past the width are read as well: the tile has room for them
                        block = [
                            v.mul(
                                v.load(
                                    f.gep(
                                        "float",
                                        "%source",
                                        f.add(f.mul(f.add(low, c), self.group), part * lanes),
                                    ),
                                    4,
                                ),
                                factor,
                            )
                            for c in range(lanes)
                        ]
                        for i, row in enumerate(gemm.transposed(f, self.t, block)):
                            with f.when(f.icmp("slt", part * lanes + i, "%valid")):
                                v.store(
                                    row,
                                    f.gep("float", "%to", f.add((part * lanes + i) * width, low)),
                                    4,
                                    mask,
                                )

        self.run(f"gather_{width}", "source factors to", "valid", body, source, factors, to, valid)

    def transposed_bytes(self, width: int) -> int:
        """Of a group's matrix [width][group], with what `gather` reads past its end."""
        return ceildiv(width, self.lanes) * self.lanes * self.group

    # -- blocks of keys ---------------------------------------------------------------------------------------------
    @contextmanager
    def key_blocks(self, end: Int) -> Iterator[tuple[Int, Int]]:
        """The loop over nearly equal blocks of keys before `end`: (first key, number of keys)."""
        f, columns = self.f, self.a.columns
        blocks = f.ceildiv(columns, self.keys)
        if blocks == 1:
            yield 0, columns
            return
        with f.loop(0, blocks) as b:
            first = f.div(f.mul(b, columns), blocks)
            stop = f.div(f.mul(f.add(b, 1), columns), blocks)
            with f.when(f.icmp("slt", first, end)) if self.a.causal else _nothing():
                yield first, f.sub(stop, first)

    def compact(self, name: str, head: Int, first: Int, count: Int, width: int, room: int) -> str:
        """Rows [first, first + count) of an array in f32, at least as many as a tile has: where they are, or a copy in memory for `room` rows."""
        f, dtype = self.f, self.dtype[name]
        source = self.row(name, f.add(head, first), width)
        if dtype == "f32" and not self.short:
            return source
        to = self.copies.get(name) or self.copies.setdefault(
            name, self.floats((room + self.t.rows) * width + self.lanes)
        )

        def copy() -> list[str]:
            with f.loop(0, f.mul(count, width), self.lanes) as i:
                mask = lane_mask(f, self.lanes, i, f.mul(count, width))
                self.v.store(load(f, dtype, source, i, self.lanes, mask), f.gep("float", to, i), 4)
            return [to]

        if dtype != "f32":
            return copy()[0]
        return f.choose(f.icmp("slt", count, self.t.rows), copy, lambda: [source], ["ptr"])[0]

    @contextmanager
    def of_groups(self, first: Int, count: Int) -> Iterator[tuple[Int, Int, Int]]:
        """The loop over the groups of a block of queries: (number, first query, queries)."""
        f = self.f
        with f.loop(0, f.ceildiv(count, self.group)) as g:
            skipped = f.mul(g, self.group)
            yield g, f.add(first, skipped), f.min(self.group, f.sub(count, skipped))

    def by_vectors(self, valid: Int, body: Callable[[int], None]) -> None:
        """`body(vectors)` with as many vectors as the group's queries take."""
        rows = self.a.rows
        most = self.t.vectors
        if isinstance(rows, int) and (rows % self.group == 0 or rows % self.group > self.lanes):
            return body(most)
        if isinstance(rows, int) and rows <= self.lanes:
            return body(1)
        self.f.choose(self.f.icmp("sgt", valid, self.lanes), lambda: body(most), lambda: body(1))

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
        f, rows = self.f, self.t.rows
        with f.loop(low, high, rows) as j:
            at = self.tile_start(j, width)
            if self.limits is None:
                each(at, False)
            else:
                end = (
                    f.add(first, width)
                    if not self.a.causal
                    else f.min(f.add(first, width), f.add(query, 1))
                    if self.short
                    else f.add(query, 1)
                )
                full = f.icmp("sle", f.add(f.add(first, at), rows), end)
                f.choose(full, lambda: each(at, False), lambda: each(at, True))

    def tile_start(self, j: Int, width: Int) -> Int:
        """The first row of the tile that has row `j` of a block and ends in it, if the block is no smaller than a tile."""
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
        i = f.emit(self.lanes).typed("i32")
        columns = (
            splat(f, "i32", self.lanes, f.op(f"trunc i64 {f.add(self.a.columns, 0)} to i32"))
            if self.short
            else None
        )
        for j in range(self.t.vectors):
            limit = columns
            if self.a.causal:
                limit = i.add(
                    splat(
                        f,
                        "i32",
                        self.lanes,
                        f.op(f"trunc i64 {f.add(query, 1 + j * self.lanes)} to i32"),
                    ),
                    i.e.iota("i32"),
                )
                limit = i.call("smin", limit, columns) if columns else limit
            i.store(limit, f.gep("i32", self.limits, j * self.lanes), 4)

    def computed(self, head: Int, query: Int, valid: Int, first: Int, width: Int) -> None:
        """The bias and the factors of a group and a block of keys -> [key][query]; a bias that all queries have is [key]."""
        if self.bias == "key":
            self.compute("bias", head, query, 1, first, width, self.bias_tile, 0)
        elif self.bias:
            self.turned("bias", head, query, valid, first, width, self.bias_tile)
        if self.a.factors:
            self.turned("factors", head, query, valid, first, width, self.factor_tile)

    def turned(
        self, role: str, head: Int, query: Int, valid: Int, first: Int, width: Int, to: str
    ) -> None:
        """to[key][query] of a computed operand for a group and a block of keys."""
        f, step = self.f, TERM_KEYS * self.lanes
        ld = step + self.lanes

        def turn(f: Writer) -> None:
            last, v = f.sub("%valid", 1), f.emit(self.lanes).typed("float")
            for part in range(self.t.vectors):
                rows = [
                    f.gep("float", "%source", f.mul(f.min(part * self.lanes + i, last), ld))
                    for i in range(self.lanes)
                ]
                with f.loop(
                    0, "%width", self.lanes
                ) as j:  # columns past the width: there is room for them
                    for k, column in enumerate(
                        gemm.transposed(f, self.t, [v.load(f.gep("float", r, j), 4) for r in rows])
                    ):
                        v.store(
                            column,
                            f.gep(
                                "float",
                                "%to",
                                f.add(f.mul(f.add(j, k), self.group), part * self.lanes),
                            ),
                            4,
                        )

        with f.loop(0, width, step) as skipped:
            keys = f.min(step, f.sub(width, skipped))
            self.compute(role, head, query, valid, f.add(first, skipped), keys, self.term_tile, ld)
            self.run(
                "turn",
                "source to",
                "width valid",
                turn,
                self.term_tile,
                self.at(to, skipped, self.group),
                keys,
                valid,
            )

    def visible(self, width: Int) -> tuple[Int, Int]:
        """The range of the keys of a block that the bias does not hide from all queries of a group."""
        f = self.f

        def body(f: Writer) -> None:
            lanes, vectors = (1, 1) if self.bias == "key" else (self.lanes, self.t.vectors)
            v = f.emit(lanes).typed("float")
            with f.loop(0, "%width", carry=[("i64", "%width"), ("i64", "0")]) as loop:
                some = None
                for j in range(vectors):
                    x = v.load(
                        f.gep(
                            "float", "%bias", f.add(f.mul(loop.index, lanes * vectors), j * lanes)
                        ),
                        4,
                    )
                    seen = (
                        v.cmp("une", x, v.const(REPLACED))
                        if self.a.fill
                        else v.cmp("ugt", x, v.const(HIDDEN))
                    )
                    some = seen if some is None else f.emit(lanes).typed("i1").bin("or", some, seen)
                if lanes > 1:
                    some = f.op(f"call i1 @llvm.vector.reduce.or.v{lanes}i1(<{lanes} x i1> {some})")
                low, high = loop.vars
                loop.next = [
                    f.op(f"select i1 {some}, i64 {f.min(low, loop.index)}, i64 {low}"),
                    f.op(f"select i1 {some}, i64 {f.add(loop.index, 1)}, i64 {high}"),
                ]
            for i, x in enumerate(loop.vars):
                f.store("i64", x, f.gep("i64", "%to", i), 8)

        self.run("visible", "bias to", "width", body, self.bias_tile, self.range, width)
        low, high = (f.load("i64", f.gep("i64", self.range, i), 8) for i in (0, 1))
        return low, high

    def all_above_hidden(self, pointer: str, vectors: int) -> str:
        """Whether hidden scores have weights of 0 relative to all of a group's numbers at `pointer`."""
        v, one = self.v, self.f.emit().typed("float")
        least = v.load(pointer, 4)
        for j in range(1, vectors):
            least = v.call(
                "minimum", least, v.load(self.f.gep("float", pointer, j * self.lanes), 4)
            )
        hidden = self.fill(self.f, self.pointer["fill"]) if self.a.fill else one.const(HIDDEN)
        return one.cmp(
            "ogt", self.total("fminimum", "", least), one.add(hidden, one.const(NOTHING))
        )

    def bias_at(self, key: Int) -> str:
        """Where the bias of a tile starts."""
        return (
            "null"
            if self.bias is None
            else self.f.gep(
                "float", self.bias_tile, self.f.mul(key, 1 if self.bias == "key" else self.group)
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
        """to[c, i] = to[c, i] alpha[i] + sum_j matrix[j, c] tile[j, i]; without `alpha` it is one."""
        f = self.f
        first = 0
        for rows in even(width, self.t.rows):

            def body(f: Writer, rows=rows) -> None:
                v = f.emit(self.lanes).typed("float")
                places = self._places("%to", f, rows, vectors, self.group)
                start = [v.load(p, 4) for p in places]
                if alpha:
                    factors = [
                        v.load(f.gep("float", "%alpha", j * self.lanes), 4) for j in range(vectors)
                    ]
                    start = [v.mul(s, factors[n % vectors]) for n, s in enumerate(start)]
                for p, s in zip(
                    places,
                    self.product(
                        f, rows, vectors, "%depth", ("%matrix", 1, width), ("%tile", stride), start
                    ),
                    strict=True,
                ):
                    v.store(s, p, 4)

            self.run(f"{what}_{rows}x{vectors}", "matrix tile to alpha", "depth", body, f.gep("float", matrix, first), tile,
                     f.gep("float", to, first * self.group), alpha or "null", depth)  # fmt: skip
            first += rows


class Forward(_Lanes):
    """Items: blocks of query rows, heads outermost."""

    @classmethod
    def items(cls, a: Attention, t: Tile) -> tuple[Size, Size]:
        queries = block_of(a.rows, QUERIES, t.columns)
        return a.heads * ceildiv(a.rows, queries), queries

    def item(self, item: Int) -> None:
        f, a, group = self.f, self.a, self.group
        blocks = f.ceildiv(a.rows, self.queries)
        head, block = f.div(item, blocks), f.rem(item, blocks)
        first = f.mul(block, self.queries)
        count = f.min(self.queries, f.sub(a.rows, first))
        number, keys = f.mul(head, a.rows), f.mul(f.div(head, a.group), a.columns)
        qt, ot = (
            self.floats(self.groups * a.size * group),
            self.floats(self.groups * self.transposed_bytes(a.width)),
        )
        tops, sums = self.floats(self.queries), self.floats(self.queries)
        scores, now, alpha = (
            self.floats((self.keys + self.t.rows) * group),
            self.floats(group),
            self.floats(group),
        )
        self.zero(ot, self.groups * self.transposed_bytes(a.width))
        self.zero(sums, self.queries)
        caps = self.store_caps()
        with f.loop(0, self.queries, self.lanes) as i:
            self.v.store(self.v.const(-numbers.inf), f.gep("float", tops, i), 4)
        with self.of_groups(first, count) as (g, query, valid):
            self.spread(
                self.row("q", f.add(number, query), a.size),
                self.dtype["q"],
                a.size,
                valid,
                self.at(qt, g, a.size * group),
                self.scale(LOG2E),
            )
        end = f.min(f.add(first, count), a.columns) if a.causal else a.columns
        with self.key_blocks(end) as (start, width):
            k, v = (
                self.compact(name, keys, start, width, n, self.keys)
                for name, n in (("k", a.size), ("v", a.width))
            )
            with self.of_groups(first, count) as (g, query, valid):
                seen = self.seen(query, start, width)
                with f.when(f.icmp("sgt", seen, 0)) if a.causal else _nothing():
                    self.see(query)
                    self.computed(head, query, valid, start, width)
                    q, state = (
                        self.at(qt, g, a.size * group),
                        [self.at(p, g, group) for p in (tops, sums)],
                    )

                    def of(vectors: int) -> None:
                        for j in range(vectors):
                            self.v.store(
                                self.v.load(f.gep("float", state[0], j * self.lanes), 4),
                                f.gep("float", now, j * self.lanes),
                                4,
                            )

                        def all_scores(low: Int, high: Int) -> list[str]:
                            self.tiles(
                                query,
                                start,
                                width,
                                low,
                                high,
                                lambda at, masked: self.run(
                                    f"scores{vectors}{'_masked' * masked}",
                                    "k q to tops bias limits fill caps",
                                    "key",
                                    lambda f: self._scores(f, vectors, masked),
                                    self.at(k, at, a.size),
                                    q,
                                    self.at(scores, at, group),
                                    now,
                                    self.bias_at(at),
                                    self.limits or "null",
                                    self.pointer.get("fill", "null"),
                                    caps,
                                    f.add(start, at),
                                ),
                            )
                            return [str(low), str(high)]

                        if self.bias is None:
                            low, high = all_scores(0, seen)
                        else:
                            low, high = all_scores(*self.visible(seen))
                            low, high = f.choose(
                                self.all_above_hidden(now, vectors),
                                lambda: [low, high],
                                lambda: all_scores(0, seen),
                                ["i64", "i64"],
                            )
                        with f.when(f.icmp("slt", low, high)):
                            some, factors = (
                                p if low == "0" or p == "null" else self.at(p, low, group)
                                for p in (scores, self.factor_tile)
                            )
                            count = f.sub(high, low)
                            self.run(
                                f"weights{vectors}",
                                "scores factors now tops sums alpha",
                                "count",
                                lambda f: self._weights(f, vectors),
                                some,
                                factors,
                                now,
                                *state,
                                alpha,
                                count,
                            )
                            self.add_features(
                                "output",
                                self.at(v, low, a.width),
                                a.width,
                                some,
                                group,
                                count,
                                self.at(ot, g, self.transposed_bytes(a.width)),
                                alpha,
                                vectors,
                            )

                    self.by_vectors(valid, of)
        with self.of_groups(first, count) as (g, query, valid):
            row = f.add(number, query)
            top, total = (self.at(p, g, group) for p in (tops, sums))
            for j in range(self.t.vectors):
                self._finish(*(f.gep("float", p, j * self.lanes) for p in (top, total, now)))
            self.gather(
                self.at(ot, g, self.transposed_bytes(a.width)),
                total,
                a.width,
                valid,
                self.row("out", row, a.width),
            )
            for name, p in (("%lse", top), ("%total", now))[: 1 + a.softmax]:
                f.do(
                    f"call void @llvm.memcpy.p0.p0.i64(ptr {f.gep('float', name, row)}, ptr {p}, i64 {f.mul(valid, 4)}, i1 false)"
                )

    def _scores(self, f: Writer, vectors: int, masked: bool) -> None:
        v = f.emit(self.lanes).typed("float")
        found, _ = self.scores(f, vectors, masked)
        for p, s in zip(
            self._places("%to", f, self.t.rows, vectors, self.group), found, strict=True
        ):
            v.store(s, p, 4)
        for j in range(vectors):
            p = f.gep("float", "%tops", j * self.lanes)
            top = v.load(p, 4)
            for s in found[j::vectors]:
                top = v.call("maxnum", top, s)
            v.store(top, p, 4)

    def _weights(self, f: Writer, vectors: int) -> None:
        """Scores -> weights relative to the largest so far; the sum, and what older sums are multiplied by."""
        v = f.emit(self.lanes).typed("float")
        at = [j * self.lanes for j in range(vectors)]
        tops = [v.load(f.gep("float", "%now", j), 4) for j in at]
        finite = [v.select(v.cmp("oeq", x, v.const(-numbers.inf)), v.const(0), x) for x in tops]
        alpha = [
            math.exp2(v, v.sub(v.load(f.gep("float", "%tops", j), 4), x))
            for j, x in zip(at, finite, strict=True)
        ]
        start = [
            v.mul(v.load(f.gep("float", "%sums", j), 4), x) for j, x in zip(at, alpha, strict=True)
        ]
        with f.loop(0, "%count", carry=[(v.type, s) for s in start]) as loop:
            loop.next = []
            for j, x, total in zip(at, finite, loop.vars, strict=True):
                at_key = f.add(f.mul(loop.index, self.group), j)
                p = f.gep("float", "%scores", at_key)
                w = math.exp2(v, v.sub(v.load(p, 4), x))
                v.store(
                    v.mul(w, v.load(f.gep("float", "%factors", at_key), 4))
                    if self.a.factors
                    else w,
                    p,
                    4,
                )
                loop.next.append(v.add(total, w))
        for name, values in (("sums", loop.vars), ("alpha", alpha), ("tops", tops)):
            for j, x in zip(at, values, strict=True):
                v.store(x, f.gep("float", f"%{name}", j), 4)

    def _finish(self, top: str, total: str, log: str) -> None:
        """(largest score, sum) -> (log-sum-exp, 1 / sum); of a softmax the largest score stays, and the logarithm goes to `log`."""
        v = self.v
        x, s = v.load(top, 4), v.load(total, 4)
        if self.a.softmax:
            v.store(v.mul(math.log(v, s), v.const(LOG2E)), log, 4)
            v.store(v.div(v.const(1), s), total, 4)
            return
        s = self.sum_of_weights(v, s)
        x = v.select(v.cmp("oeq", x, v.const(-numbers.inf)), v.const(0), x)
        v.store(v.fma(x, v.const(1 / LOG2E), math.log(v, s)), top, 4)
        v.store(v.div(v.const(1), s), total, 4)


class Backward(_Lanes):
    """Items: heads."""

    @classmethod
    def items(cls, a: Attention, t: Tile) -> tuple[Size, Size]:
        return items_of_heads(a), a.rows

    def item(self, item: Int) -> None:
        f, a = self.f, self.a
        self.tile_row = self.queries + self.lanes  # rows of tiles: not a multiple of a page
        self.qt, self.gt, self.dqt = (
            self.floats(self.groups * n * self.group)
            for n in (a.size, a.width, self.transposed_bytes(a.size) // self.group)
        )
        self.lse2, self.delta = self.floats(self.queries), self.floats(self.queries)
        self.logs = self.floats(self.queries) if a.softmax else "null"
        self.ones, self.span, self.caps = self.floats(self.group), self.floats(8), self.store_caps()
        self.p, self.ds = (self.floats((self.keys + self.t.rows) * self.tile_row) for _ in range(2))
        self.used = (
            self.floats((self.keys + self.t.rows) * self.tile_row) if a.factors else self.p
        )  # weights after dropout
        for j in range(self.t.vectors):
            self.v.store(self.v.const(1), f.gep("float", self.ones, j * self.lanes), 4)
        with f.loop(0, self.queries, self.lanes) as i:  # queries that there are not have no weights
            self.v.store(self.v.const(FLOAT_MAX), f.gep("float", self.lse2, i), 4)
        with self.heads_of(item) as head:
            with f.loop(0, a.rows, self.queries) as first:
                self.queries_block(head, first, f.min(self.queries, f.sub(a.rows, first)))

    def queries_block(self, head: Int, first: Int, count: Int) -> None:
        f, a, group = self.f, self.a, self.group
        number, keys = f.mul(head, a.rows), f.mul(f.div(head, a.group), a.columns)
        grads, queries = (
            self.compact(name, number, first, count, n, self.queries)
            for name, n in (("grad", a.width), ("q", a.size))
        )
        self.zero(self.dqt, self.groups * self.transposed_bytes(a.size))
        with self.of_groups(first, count) as (g, query, valid):
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
        with f.loop(0, count) as i:
            row = f.add(number, f.add(first, i))
            one = f.emit().typed("float")
            delta = self.inner(
                (self.at(grads, i, a.width), "f32"),
                (self.row("out", row, a.width), self.dtype["out"]),
                a.width,
            )
            f.store("float", one.mul(delta, self.scale()), f.gep("float", self.delta, i), 4)
            for role, to in (("lse", self.lse2), ("total", self.logs))[: 1 + a.softmax]:
                x = load(f, self.dtype[role], self.pointer[role], row)
                f.store(
                    "float",
                    x if a.softmax else one.mul(x, one.const(LOG2E)),
                    f.gep("float", to, i),
                    4,
                )
        end = f.min(f.add(first, count), a.columns) if a.causal else a.columns
        with self.key_blocks(end) as (start, width):
            k, v = (
                self.compact(name, keys, start, width, n, self.keys)
                for name, n in (("k", a.size), ("v", a.width))
            )
            for i, n in enumerate((width, 0, count, 0)):
                f.store("i64", n, f.gep("i64", self.span, i), 8)
            with self.of_groups(first, count) as (g, query, valid):
                seen = self.seen(query, start, width)
                with f.when(f.icmp("sgt", seen, 0)) if a.causal else _nothing():
                    self.see(query)
                    self.computed(head, query, valid, start, width)
                    self.by_vectors(
                        valid,
                        lambda vectors: self.of_group(g, query, start, width, seen, k, v, vectors),
                    )
            dk, dv = (
                self.row(name, f.add(keys, start), n)
                for name, n in (("dk", a.size), ("dv", a.width))
            )
            reached = f.min(f.sub(f.add(first, count), start), width) if a.causal else width
            low, high, skipped, stop = 0, reached, 0, count
            if self.bias:
                low, high, skipped, stop = (
                    f.load("i64", f.gep("i64", self.span, i), 8) for i in range(4)
                )
                stop = f.min(stop, count)
            with f.loop(low, f.min(high, reached), self.t.rows) as j:
                at = self.tile_start(j, width)
                if a.causal:  # queries before the tile's first new key do not see it
                    skipped = f.mul(f.div(f.max(f.sub(f.add(start, j), first), 0), group), group)
                for tile, right, to, n in (
                    (self.used, grads, dv, a.width),
                    (self.ds, queries, dk, a.size),
                ):
                    self.add_queries(f.gep("float", self.at(tile, at, self.tile_row), skipped), self.at(right, skipped, n), n, f.sub(stop, skipped),
                                     self.at(to, at, n), f.sub(j, at), f.sub(width, at))  # fmt: skip
            if a.bias_gradient:
                with self.of_groups(first, count) as (g, query, valid):
                    self.add_bias_gradient(
                        f.gep("float", self.ds, f.mul(g, group)),
                        f.add(f.mul(query, a.columns), start),
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

    def of_group(
        self, g: Int, query: Int, start: Int, width: Int, seen: Int, k: str, v: str, vectors: int
    ) -> None:
        """Weights and gradients of scores of a group and a block of keys, and what they give to the gradient of the queries."""
        f, a, group = self.f, self.a, self.group
        p, ds, used = (
            f.gep("float", tile, f.mul(g, group)) for tile in (self.p, self.ds, self.used)
        )
        q, grad = self.at(self.qt, g, a.size * group), self.at(self.gt, g, a.width * group)
        lse2, delta = self.at(self.lse2, g, group), self.at(self.delta, g, group)
        logs = self.at(self.logs, g, group) if a.softmax else "null"

        def tile(at: Int, masked: bool) -> None:
            factors = self.at(self.factor_tile, at, group) if a.factors else "null"
            of_tile = [self.at(tile, at, self.tile_row) for tile in (p, ds, used)]
            self.run(f"probabilities{vectors}{'_masked' * masked}", "k q to slopes lse logs bias limits fill caps", "key", lambda f: self._probabilities(f, vectors, masked),
                     self.at(k, at, a.size), q, *of_tile[:2], lse2, logs, self.bias_at(at), self.limits or "null", self.pointer.get("fill", "null"), self.caps, f.add(start, at))  # fmt: skip
            self.run(f"gradients{vectors}", "v grad p ds used factors bias delta", "", lambda f: self._gradients(f, vectors), self.at(v, at, a.width), grad,
                     *of_tile, factors, self.bias_at(at), delta)  # fmt: skip

        low, high = "0", str(seen)
        if self.bias:
            low, high = f.choose(
                self.all_above_hidden(lse2, vectors),
                lambda: list(self.visible(seen)),
                lambda: ["0", str(seen)],
                ["i64", "i64"],
            )
            self.clear([p, ds, *([used] if a.factors else [])], low, high, width, vectors)
            self.extend(g, low, high)
        self.tiles(query, start, width, low, high, tile)
        with f.when(f.icmp("slt", low, high)) if self.bias else _nothing():
            self.add_features("queries", self.at(k, low, a.size), a.size, self.at(ds, low, self.tile_row), self.tile_row, f.sub(high, low),
                              self.at(self.dqt, g, self.transposed_bytes(a.size)), None, vectors)  # fmt: skip

    def clear(self, tiles: list[str], low: Int, high: Int, width: Int, vectors: int) -> None:
        """0 in the rows of a group's tiles outside [low, high)."""
        f, v = self.f, self.v
        for first, last in ((0, low), (f.max(high, low), width)):
            with f.loop(first, last) as key:
                for tile in tiles:
                    for j in range(vectors):
                        v.store(
                            v.const(0),
                            f.gep("float", self.at(tile, key, self.tile_row), j * self.lanes),
                            4,
                        )

    def extend(self, g: Int, low: Int, high: Int) -> None:
        """The keys and queries of a block that have weights are also those of a group."""
        f = self.f
        with f.when(f.icmp("slt", low, high)):
            first = f.mul(g, self.group)
            for i, (pick, x) in enumerate(
                ((f.min, low), (f.max, high), (f.min, first), (f.max, f.add(first, self.group)))
            ):
                p = f.gep("i64", self.span, i)
                f.store("i64", pick(f.load("i64", p, 8), x), p, 8)

    def _probabilities(self, f: Writer, vectors: int, masked: bool) -> None:
        """Weights; derivatives of caps are where the gradients will be."""
        v = f.emit(self.lanes).typed("float")
        found, slopes = self.scores(f, vectors, masked)
        lse = [v.load(f.gep("float", "%lse", j * self.lanes), 4) for j in range(vectors)]
        logs = (
            [v.load(f.gep("float", "%logs", j * self.lanes), 4) for j in range(vectors)]
            if self.a.softmax
            else []
        )
        for n, (p, s) in enumerate(
            zip(self._places("%to", f, self.t.rows, vectors, self.tile_row), found, strict=True)
        ):
            s = v.sub(s, lse[n % vectors])
            v.store(math.exp2(v, v.sub(s, logs[n % vectors]) if logs else s), p, 4)
        for p, slope in zip(
            self._places("%slopes", f, self.t.rows, vectors, self.tile_row), slopes, strict=False
        ):
            v.store(slope, p, 4)

    def _gradients(self, f: Writer, vectors: int) -> None:
        v = f.emit(self.lanes).typed("float")
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
        delta = [v.load(f.gep("float", "%delta", j * self.lanes), 4) for j in range(vectors)]
        places = [self._places(p, f, rows, vectors, self.tile_row) for p in ("%p", "%ds", "%used")]
        factors = self._places("%factors", f, rows, vectors, self.group)
        biases = self.bias_values(f, vectors) if self.a.fill else []
        for n, (dp, p, ds, used) in enumerate(zip(found, *places, strict=True)):
            weight = v.load(p, 4)
            if self.a.factors:
                factor = v.load(factors[n], 4)
                dp = v.mul(dp, factor)
                v.store(v.mul(weight, factor), used, 4)
            gradient = v.mul(weight, v.sub(dp, delta[n % vectors]))
            if self.a.fill:
                gradient = self.kept(v, gradient, biases[n])
            v.store(v.mul(gradient, v.load(ds, 4)) if self.a.capped else gradient, ds, 4)

    def add_bias_gradient(self, ds: str, at: Int, valid: Int, width: Int) -> None:
        """dbias[query][key] += ds[key][query] / scale, for a group and a block of keys; `at`: of its first element."""

        def body(f: Writer) -> None:
            v, lanes, t = f.emit(self.lanes).typed("float"), self.lanes, self.t
            factors = splat(f, "float", lanes, f.load("float", "%factor", 4))
            for part in range(t.vectors):
                with f.when(f.icmp("sgt", "%valid", part * lanes)), f.loop(0, "%width", lanes) as j:
                    # keys past the width are read as well: the tile has room for them
                    block = [
                        v.load(
                            f.gep(
                                "float",
                                "%ds",
                                f.add(
                                    f.mul(f.min(f.add(j, k), f.sub("%width", 1)), self.tile_row),
                                    part * lanes,
                                ),
                            ),
                            4,
                        )
                        for k in range(lanes)
                    ]
                    mask = lane_mask(f, lanes, j, "%width")
                    for i, row in enumerate(gemm.transposed(f, t, block)):
                        with f.when(f.icmp("slt", part * lanes + i, "%valid")):
                            p = f.gep("float", "%to", f.add(f.mul(part * lanes + i, "%stride"), j))
                            v.store(v.fma(row, factors, v.load(p, 4, mask)), p, 4, mask)

        one = self.f.emit().typed("float")
        self.f.store("float", one.div(one.const(1), self.scale()), self.number, 4)
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
        self, tile: str, right: str, width: int, depth: Int, to: str, skip: Int, end: Int
    ) -> None:
        """to[j, c] += sum_i tile[j, i] right[i, c] for a tile's rows in [skip, end)."""
        f, step = self.f, self.lanes * self.t.vectors
        for first in range(0, width, step):
            columns = min(step, width - first)
            vectors = ceildiv(columns, self.lanes)

            def body(f: Writer, columns=columns, vectors=vectors) -> None:
                v = f.emit(self.lanes).typed("float")
                masks = [
                    lane_mask(f, self.lanes, j * self.lanes, columns)
                    if columns < (j + 1) * self.lanes
                    else None
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
                places = self._places("%to", f, self.t.rows, vectors, width)
                for i in range(self.t.rows):
                    with f.when(
                        f.op(f"and i1 {f.icmp('sle', '%skip', i)}, {f.icmp('slt', i, '%end')}")
                    ):
                        for j, mask in enumerate(masks):
                            p = places[i * vectors + j]
                            v.store(v.add(v.load(p, 4, mask), sums[i * vectors + j]), p, 4, mask)

            self.run(
                f"keys_{width}_{columns}",
                "tile right to",
                "depth skip end",
                body,
                tile,
                f.gep("float", right, first),
                f.gep("float", to, first),
                depth,
                skip,
                end,
            )


@contextmanager
def _nothing() -> Iterator[None]:
    yield


KERNELS = {"forward": Forward, "backward": Backward}
