"""Attention with queries along the lanes of vectors, in f32: nothing is packed but the queries, and
no sum runs across lanes.

A group is as many queries as a micro-kernel is wide (32 with AVX-512). Its scores are a tile
[keys][queries], so the largest score, the sum and the rescaling of a query are one lane each
(online softmax: Milakov and Gimelshein 2018, Dao 2023). All five products are one loop, `product`:

    scores      S[j, i] = sum_c K[j, c] Qt[c, i]              K as it is in memory, queries
                                                              transposed once per item
    output      Ot[c, i] = Ot[c, i] alpha[i] + sum_j V[j, c] W[j, i]
    gradients   dP[j, i] = sum_c V[j, c] dOt[c, i],  dS = P (dP - delta)
                dV[j, c] += sum_i P[j, i] dO[i, c],  dK[j, c] += sum_i dS[j, i] Q[i, c]
                dQt[c, i] += sum_j K[j, c] dS[j, i]

Keys that a mask hides from a whole group, at the start and the end of a block, are left out once it
is known that their weights are 0. Scores are in units of log 2, so that weights are powers of two.
Keys come in blocks of KEYS, so that a group's scores stay in L1 and the block in L2. A tile at the
end of a block overlaps the one before: it computes some rows again and adds none twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch_hlo.hlo.ir import Size, round_up

from ..codegen import Program, Writer, load_real
from ..llvm import Int
from ..llvm.scalar import STORAGE
from ..matmul.tile import Tile
from .attention import Attention
from .attention_kernel import Arrays, AttentionKernel, block_of

KEYS = {"forward": 256, "backward": 128}  # keys of a block, at most
QUERIES = 256  # queries of a block, at most
TERM_KEYS = 4  # vectors of keys of which a computed operand is turned at a time


@contextmanager
def nothing() -> Iterator[None]:
    yield


class LaneKernel(AttentionKernel):
    """What forward and backward share. A group of `vectors` vectors has queries in all of them but
    the last, at least."""

    def __init__(self, program: Program, a: Attention[Size], arrays: Arrays, t: Tile) -> None:
        super().__init__(program, a, arrays, t)
        self.group = t.columns
        self.lanes = t.lanes
        self.keys = min(KEYS[a.kind], a.columns) if isinstance(a.columns, int) else KEYS[a.kind]
        self.queries = block_of(a.rows, QUERIES, self.group)
        self.groups = self.queries // self.group
        self.copies: dict[str, str] = {}
        self.v = self.f.typed("float", self.lanes)
        self.number = self.floats(1)
        self.range = self.floats(4)
        bias = a.bias
        self.bias = None if bias is None else "key" if bias.row == 0 else "tile"
        self.bias_tile = (
            ""
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
        # there may be fewer keys than a tile has rows
        self.short = not isinstance(a.columns, int) or a.columns < t.rows
        self.limits = self.floats(self.group) if a.causal or self.short else None

    # -- functions
    def function(
        self, name: str, pointers: str, numbers_: str, body: Callable[[Writer], None]
    ) -> str:
        """A function of pointers and i64 numbers, named in strings; what follows a colon in `name`
        is not in the function's."""
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
            callee,
            *(f"{kind} {value}" for kind, value in zip(kinds, arguments, strict=True)),
        )

    def product(
        self,
        f: Writer,
        rows: int,
        vectors: int,
        depth: Int,
        a: tuple[str, Int, Int],
        b: tuple[str, Int],
        start: list[str] | None = None,
        masks: list[str | None] | None = None,
        ahead: str | None = None,
    ) -> list[str]:
        """start[i, :] + sum_k A[i, k] B[k, :] in registers, `vectors` wide. `a`: (pointer, strides
        of i and k); `b`: (pointer, stride of k)."""
        t = self.t
        a_pointer, a_row, a_k = a
        b_pointer, b_k = b
        start = start or ["zeroinitializer"] * (rows * vectors)
        with f.loop(0, depth, carry=[(t.vector, s) for s in start], known_nonempty=True) as loop:
            from_a = f.gep("float", a_pointer, f.mul(loop.index, a_k))
            from_b = f.gep("float", b_pointer, f.mul(loop.index, b_k))
            v = f.typed("float", t.lanes)
            if ahead:  # what A's next tile is, in equal parts
                f.do(
                    "call void @llvm.prefetch.p0(ptr"
                    f" {f.gep('float', ahead, f.mul(loop.index, rows))}, i32 0, i32 3, i32 1)"
                )
            right = [
                v.load(f.gep("float", from_b, j * t.lanes), mask=masks[j] if masks else None)
                for j in range(vectors)
            ]
            loop.next = []
            for i in range(rows):
                left = f.splat("float", t.lanes, f.load_at("float", from_a, f.mul(a_row, i)))
                loop.next += [
                    v.fma(left, right[j], loop.vars[i * vectors + j]) for j in range(vectors)
                ]
        return [*loop.vars]

    def loads(self, f: Writer, pointer: str, vectors: int, kind: str = "float") -> list[str]:
        """The first vectors at `pointer`."""
        t = f.typed(kind, self.lanes)
        return [t.load(f.gep(kind, pointer, j * self.lanes)) for j in range(vectors)]

    def places(
        self,
        pointer: str,
        f: Writer,
        rows: int,
        vectors: int,
        stride: Int,
    ) -> list[str]:
        return [
            f.gep("float", pointer, f.muladd(stride, i, j * self.lanes))
            for i in range(rows)
            for j in range(vectors)
        ]

    # -- queries to lanes and back
    def spread(self, source: str, dtype: str, width: int, valid: Int, to: str, factor: str) -> None:
        """to[c, i] = factor source[i, c], `factor` an f32, for a group of `valid` rows of `width`
        elements; the other lanes repeat the last row."""

        def body(f: Writer) -> None:
            v = f.typed("float", self.lanes)
            lanes = self.lanes
            factors = f.splat("float", lanes, f.load("float", "%factor"))
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

                def columns(
                    low: Int,
                    count: int,
                    rows: list[str] = rows,
                    part: int = part,
                ) -> None:
                    mask = f.lane_mask(lanes, 0, count) if count < lanes else None
                    block = [v.mul(load_real(f, dtype, r, low, lanes, mask), factors) for r in rows]
                    for c, column in enumerate(self.t.transposed(f, block)[:count]):
                        v.store(
                            column,
                            f.gep(
                                "float",
                                "%to",
                                f.muladd(f.add(low, c), self.group, part * lanes),
                            ),
                        )

                whole = width // lanes * lanes
                if whole:
                    with f.loop(0, whole, lanes, known_nonempty=True) as low:
                        columns(low, lanes)
                if whole < width:
                    columns(whole, width - whole)

        self.f.store("float", factor, self.number)
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

    def gather(
        self,
        source: str,
        factors: str,
        width: int,
        valid: Int,
        to: str,
    ) -> None:
        """to[i, c] = factors[i] source[c, i] for a group of `valid` rows of `width` elements."""

        def body(f: Writer) -> None:
            v = f.typed("float", self.lanes)
            lanes = self.lanes
            for part in range(self.t.vectors):
                with f.when(f.icmp("sgt", "%valid", part * lanes)):
                    factor = v.load(f.gep("float", "%factors", part * lanes))
                    with f.loop(0, width, lanes) as low:
                        mask = f.lane_mask(lanes, low, width) if width % lanes else None
                        # rows past the width are read as well: the tile has room for them
                        block = [
                            v.mul(
                                v.load(
                                    f.gep(
                                        "float",
                                        "%source",
                                        f.muladd(f.add(low, c), self.group, part * lanes),
                                    ),
                                ),
                                factor,
                            )
                            for c in range(lanes)
                        ]
                        for i, row in enumerate(self.t.transposed(f, block)):
                            with f.when(f.icmp("slt", part * lanes + i, "%valid")):
                                v.store(
                                    row,
                                    f.gep("float", "%to", f.add((part * lanes + i) * width, low)),
                                    mask=mask,
                                )

        self.run(
            f"gather_{width}",
            "source factors to",
            "valid",
            body,
            source,
            factors,
            to,
            valid,
        )

    def transposed_bytes(self, width: int) -> int:
        """Of a group's matrix [width][group], with what `gather` reads past its end."""
        return round_up(width, self.lanes) * self.group

    # -- blocks of keys
    @contextmanager
    def key_blocks(self, end: Int) -> Iterator[tuple[Int, Int]]:
        """The loop over nearly equal blocks of keys before `end`: (first key, number of keys)."""
        f = self.f
        columns = self.a.columns
        blocks = f.ceildiv(columns, self.keys)
        if blocks == 1:
            yield 0, columns
            return
        with f.loop(0, blocks) as b:
            first = f.div(f.mul(b, columns), blocks)
            stop = f.div(f.mul(f.add(b, 1), columns), blocks)
            with f.when(f.icmp("slt", first, end)) if self.a.causal else nothing():
                yield first, f.sub(stop, first)

    def compact_keys(self, head: Int, first: Int, count: Int) -> list[str]:
        """`compact` of keys and values."""
        return [
            self.compact(name, head, first, count, width, self.keys)
            for name, width in (("k", self.a.size), ("v", self.a.width))
        ]

    def compact(
        self,
        name: str,
        head: Int,
        first: Int,
        count: Int,
        width: int,
        room: int,
    ) -> str:
        """Rows [first, first + count) of an array in f32, at least as many as a tile has: where
        they are, or a copy in memory for `room` rows."""
        f = self.f
        dtype = self.dtype[name]
        source = self.row(name, f.add(head, first), width)
        if dtype == "f32" and not self.short:
            return source
        to = self.copies.get(name) or self.copies.setdefault(
            name, self.floats((room + self.t.rows) * width + self.lanes)
        )

        def copy() -> list[str]:
            with f.loop(0, f.mul(count, width), self.lanes) as i:
                mask = f.lane_mask(self.lanes, i, f.mul(count, width))
                self.v.store(
                    load_real(f, dtype, source, i, self.lanes, mask),
                    f.gep("float", to, i),
                )
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
