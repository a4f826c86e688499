"""Matrix multiplication kernels written as LLVM IR: C[m, n] = sum_k A[m, k] B[k, n], any strides of A and B, C row-major.

The scheme is BLIS's. A chunk of work owns a range of row tiles and of column panels of C:

    for each block of columns (fits L2)          for each block of K (KC)
        pack B into panels [K][lanes]                for each tile of rows: pack A into [K][lanes]
                                                         for each pair of panels: micro-kernel, C tile in registers

Measured on one Granite Rapids core (AVX-512, f32) against MKL: 0.93 to 1.17 of its speed from 64x64x64 to 1576x384x384, 1.5 on 512x50257x384, 2.6 on 96
batches of 512x512x64.

Packing brings any stride (and any narrower element type) into one form, so one micro-kernel per tile height serves every
dot of a program. Rows of A along K for few columns, a small A whose rows are adjacent, and rows of B that are not far apart are read where they are. Sizes are IR values or Python ints: nothing but the tile heights is specialised.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache

from torch_hlo.compiler.codegen import emit
from torch_hlo.compiler.codegen.function import Function, Int
from torch_hlo.hlo.dim import Size, ceildiv

KC = 384  # depth of a packed block: A tile 24 KB in L1
LOCAL_GAP = (
    16  # elements between the rows of a tile of sums: rows 2 KB apart would share a few sets of L1
)
KC_DIRECT = 256  # the same when B is read in place
PREFETCH = 8  # rows of B that are asked for in advance
NC = 512  # columns of a packed block of 4-byte elements: 768 KB of B in L2


@dataclass(frozen=True, slots=True)
class Tile:
    """The register block of a micro-kernel for accumulators of LLVM type `kind`: `rows` x (`vectors` * `lanes`)."""

    kind: str
    itemsize: int
    lanes: int
    rows: int
    vectors: int

    @property
    def vector(self) -> str:
        return f"<{self.lanes} x {self.kind}>"

    @property
    def columns(self) -> int:
        return self.lanes * self.vectors

    @property
    def block_columns(self) -> int:
        """Columns of a packed block of B."""
        return NC * 4 // self.itemsize

    @property
    def is_float(self) -> bool:
        return self.kind in ("float", "double")

    @property
    def suffix(self) -> str:
        return f"v{self.lanes}" + {"float": "f32", "double": "f64"}.get(self.kind, self.kind)

    @property
    def scratch_bytes(self) -> int:
        """Packing space of one chunk: a block of B panels and a tile of A."""
        return (
            self.itemsize
            * (
                KC * (self.block_columns + self.columns)
                + KC * self.lanes
                + 2 * self.lanes * self.lanes
            )
            + 256
        )

    @property
    def sums_bytes(self) -> int:
        """Space of a row tile's sums over a block of columns."""
        return self.itemsize * self.lanes * (self.block_columns + LOCAL_GAP)


def tile(kind: str, vector_bytes: int) -> Tile:
    """The tile for an accumulator type on a machine with `vector_bytes`-wide registers (64: 32 registers; 32, 16: 16)."""
    itemsize = {"float": 4, "double": 8, "i32": 4, "i64": 8}[kind]
    lanes = vector_bytes // itemsize
    registers = 28 if vector_bytes >= 64 else 12
    rows = min(14 if vector_bytes >= 64 else 6, lanes)  # a packed row of A is one vector
    return Tile(kind, itemsize, lanes, rows, registers // rows)


@dataclass(frozen=True, slots=True)
class Source:
    """How elements of an operand become accumulators: LLVM type in memory, and the expressions that convert a value `{v}`."""

    name: str
    kind: str
    itemsize: int
    steps: tuple[
        str, ...
    ] = ()  # {s} is the source's vector type, {d} the accumulator's, {i} and {f} i32 and float


def converted(f: Function, t: Tile, source: Source, value: str) -> str:
    s, d, i, single = (f"<{t.lanes} x {kind}>" for kind in (source.kind, t.kind, "i32", "float"))
    for step in source.steps:
        value = f.op(step.format(v=value, s=s, d=d, i=i, f=single))
    return value


def lane_mask(f: Function, lanes: int, first: Int, count: Int) -> str:
    """`<lanes x i1>`: lane i is on when first + i < count."""
    return f.op(
        f"call <{lanes} x i1> @llvm.get.active.lane.mask.v{lanes}i1.i64(i64 {first}, i64 {count})"
    )


def masked_load(f: Function, kind: str, lanes: int, pointer: str, mask: str, align: int) -> str:
    vector, suffix = f"<{lanes} x {kind}>", f"v{lanes}{KIND_SUFFIX[kind]}"
    return f.op(
        f"call {vector} @llvm.masked.load.{suffix}.p0(ptr align {align} {pointer}, <{lanes} x i1> {mask}, {vector} zeroinitializer)"
    )


def masked_store(
    f: Function, kind: str, lanes: int, value: str, pointer: str, mask: str, align: int
) -> None:
    vector, suffix = f"<{lanes} x {kind}>", f"v{lanes}{KIND_SUFFIX[kind]}"
    f.do(
        f"call void @llvm.masked.store.{suffix}.p0({vector} {value}, ptr align {align} {pointer}, <{lanes} x i1> {mask})"
    )


KIND_SUFFIX = {
    "float": "f32",
    "double": "f64",
    "half": "f16",
    "bfloat": "bf16",
    "i8": "i8",
    "i16": "i16",
    "i32": "i32",
    "i64": "i64",
}


def pack_copy(name: str, t: Tile, source: Source) -> Function:
    """Pack where the lanes are adjacent in memory: dst[k][lane] = src[k * k_stride + lane], lanes >= valid are zero."""
    f = Function(
        name,
        "void",
        [("ptr", "src"), ("i64", "k_stride"), ("i64", "depth"), ("i64", "valid"), ("ptr", "dst")],
        attrs="noinline #0",
    )
    mask = lane_mask(f, t.lanes, 0, "%valid")
    with f.loop(0, "%depth", known_nonempty=True) as k:
        ahead = f.gep(source.kind, "%src", f.mul(f.add(k, PREFETCH), "%k_stride"))
        f.do(f"call void @llvm.prefetch.p0(ptr {ahead}, i32 0, i32 3, i32 1)")
        p = f.gep(source.kind, "%src", f.mul(k, "%k_stride"))
        v = converted(f, t, source, masked_load(f, source.kind, t.lanes, p, mask, source.itemsize))
        f.store(t.vector, v, f.gep(t.kind, "%dst", f.mul(k, t.lanes)), t.itemsize)
    return f


def pack_transpose(name: str, t: Tile, source: Source) -> Function:
    """Pack where K is adjacent in memory: dst[k][lane] = src[lane * lane_stride + k]. Unused lanes repeat the last one."""
    f = Function(
        name,
        "void",
        [
            ("ptr", "src"),
            ("i64", "lane_stride"),
            ("i64", "depth"),
            ("i64", "valid"),
            ("ptr", "dst"),
        ],
        attrs="noinline #0",
    )
    last = f.sub("%valid", 1)
    rows = [
        f.gep(source.kind, "%src", f.mul(f.min(i, last) if i else 0, "%lane_stride"))
        for i in range(t.lanes)
    ]
    with f.loop(0, "%depth", t.lanes, known_nonempty=True) as k:
        mask = lane_mask(f, t.lanes, k, "%depth")
        block = [
            converted(
                f,
                t,
                source,
                masked_load(
                    f, source.kind, t.lanes, f.gep(source.kind, r, k), mask, source.itemsize
                ),
            )
            for r in rows
        ]
        to = f.gep(t.kind, "%dst", f.mul(k, t.lanes))
        for i, v in enumerate(transposed(f, t, block)):
            f.store(t.vector, v, f.gep(t.kind, to, i * t.lanes), t.itemsize)
    return f


def transposed(f: Function, t: Tile, block: list[str], group: int = 1) -> list[str]:
    """Transpose of as many vectors as one has groups of `group` elements, see emit.py."""
    return emit.transposed(f.op, t.kind, t.lanes, block, group)


def pack_strided(name: str, t: Tile, source: Source) -> Function:
    """Pack with any strides, one element at a time."""
    params = [
        ("ptr", "src"),
        ("i64", "lane_stride"),
        ("i64", "k_stride"),
        ("i64", "depth"),
        ("i64", "valid"),
        ("ptr", "dst"),
    ]
    f = Function(name, "void", params, attrs="noinline #0")
    one = Tile(t.kind, t.itemsize, 1, 1, 1)
    with f.loop(0, "%depth") as k, f.loop(0, t.lanes) as lane:
        inside = f.icmp("slt", lane, "%valid")
        at = f.add(f.mul(f.select(inside, "i64", lane, 0), "%lane_stride"), f.mul(k, "%k_stride"))
        v = f.op(
            f"load <1 x {source.kind}>, ptr {f.gep(source.kind, '%src', at)}, align {source.itemsize}"
        )
        v = converted(f, one, source, v)
        f.store(
            f"<1 x {t.kind}>", v, f.gep(t.kind, "%dst", f.add(f.mul(k, t.lanes), lane)), t.itemsize
        )
    return f


def multiply_add(f: Function, t: Tile, a: str, b: str, c: str) -> str:
    if t.is_float:
        return f.op(
            f"call {t.vector} @llvm.fma.{t.suffix}({t.vector} {a}, {t.vector} {b}, {t.vector} {c})"
        )
    return f.op(f"add {t.vector} {c}, {f.op(f'mul {t.vector} {a}, {b}')}")


def splat(f: Function, kind: str, lanes: int, scalar) -> str:
    vector = f"<{lanes} x {kind}>"
    v = f.op(f"insertelement {vector} poison, {kind} {scalar}, i64 0")
    return f.op(f"shufflevector {vector} {v}, {vector} poison, <{lanes} x i32> zeroinitializer")


SHARED = 7  # rows of A, read where they are, that follow one pointer
_MULTIPLES = (
    (0, 0),
    (0, 1),
    (0, 2),
    (1, 1),
    (0, 4),
    (2, 1),
    (1, 2),
)  # i = (1, 3, 5)[which] * scale: registers and the scales that addresses have
LOADS = 1.7  # vectors that one core loads per two multiplications, when it does nothing else: 2


def embedded(t: Tile, rows: int) -> int:
    """How many rows of a register tile are broadcast by each multiplication that reads them, as an operand in memory, instead of once by an instruction.

    Such a row takes one slot of the processor's front end less and `vectors` - 1 loads more. Slots are what decides where a core has half of them,
    because its other hyperthread is busy: the 14 x 32 tile went from 54 per element of K, with 28 multiplications, to 40.
    """
    if t.lanes * t.itemsize < 64 or t.vectors == 1 or not t.is_float:
        return 0  # only AVX-512 has such operands
    spare = LOADS / 2 * rows * t.vectors - rows - t.vectors
    return max(0, min(rows, int(spare) // (t.vectors - 1)))


def micro(name: str, t: Tile, rows: int, partial: bool = False, direct: bool = False, whole: bool = False, ahead: int = 0,
          block_ahead: bool = False, in_rows: bool = False, in_lanes: bool = False, unroll: int = 1, fetch: bool = True) -> Function:  # fmt: skip
    """C[rows, columns] (+)= A panel x B. `cols` columns are valid, all with `whole`; with `partial` only `%valid_rows` rows.

    B holds `vectors` panels of [depth][lanes], one after the other; with `direct` it is the unpacked operand, its rows
    `%b_k` elements apart. (A masked load takes a multiplier's port, which costs a `direct` kernel 6 % when nothing is masked.)
    With `ahead`, every `ahead` iterations ask for the cache line `%ahead_step` bytes after the last one: 2 to 5 % of products of large matrices. With
    `block_ahead` they ask for one after the other from `%block` on. With `in_rows` A is the unpacked operand, rows along K `%a_free` elements apart, with
    `in_lanes` one whose rows are adjacent and whose K is `%a_k` elements apart. `unroll` divides the depth. `fetch`: rows of a `direct` B are asked for in advance.
    """
    params = [
        ("ptr noalias", "A"),
        ("ptr noalias", "B"),
        ("i64", "depth"),
        ("ptr noalias", "C"),
        ("i64", "ldc"),
        ("i64", "cols"),
        ("i1", "more"),
    ]
    params += (
        [("i64", "valid_rows")] * partial
        + [("i64", "b_k")] * direct
        + [("ptr", "ahead"), ("i64", "ahead_step")] * (ahead > 0)
        + [("ptr", "block")] * block_ahead
    )
    params += [("i64", "a_free")] * in_rows + [("i64", "a_k")] * in_lanes
    f = Function(name, "void", params, attrs="noinline #0")
    masks = [lane_mask(f, t.lanes, j * t.lanes, "%cols") for j in range(t.vectors)]
    # Operands are followed by pointers: with addresses computed from the loop's index, loads move away from their use and accumulators to memory.
    right = ["%B"]
    for _ in range(0 if direct else t.vectors - 1):
        right.append(f.gep(t.kind, right[-1], f.mul("%depth", t.lanes)))
    if in_rows:
        left = [f.gep(t.kind, "%A", f.mul("%a_free", i)) for i in range(0, rows, SHARED)]
        distances = [f.mul("%a_free", t.itemsize * i) for i in (1, 3, 5)]
        again = 0
    else:
        again = 0 if in_lanes else embedded(t, rows)
        left = ["%A"] * (
            t.vectors if again else 1
        )  # what several pointers read, LLVM does not load once for all
    far = f.mul("%b_k", PREFETCH) if direct else 0
    a_step = "%a_k" if in_lanes else t.lanes
    sums = rows * t.vectors

    def broadcast(pointers: list[str], i: int, u: int) -> list[str]:
        """Element `u` of row `i`, for each vector of B."""
        if in_rows:
            at, (which, scale) = pointers[i // SHARED], _MULTIPLES[i % SHARED]
            places = [
                f.gep(t.kind, f.gep(f"i{8 * scale}", at, distances[which]) if scale else at, u)
            ]
        else:
            places = [
                f.gep(t.kind, f.gep(t.kind, p, f.mul(a_step, u)), i)
                for p in (pointers if i < again else pointers[:1])
            ]
        values = [splat(f, t.kind, t.lanes, f.load(t.kind, p, t.itemsize)) for p in places]
        return values if len(values) == t.vectors else values * t.vectors

    def right_vectors(pointers: list[str], u: int) -> list[str]:
        if not direct:
            return [f.load(t.vector, f.gep(t.kind, p, u * t.lanes), t.itemsize) for p in pointers]
        row = f.gep(t.kind, pointers[0], f.mul("%b_k", u))
        coming = f.gep(t.kind, row, far) if fetch else row
        for j in range(t.vectors * fetch):
            f.do(
                f"call void @llvm.prefetch.p0(ptr {f.gep(t.kind, coming, j * t.lanes)}, i32 0, i32 3, i32 1)"
            )
        places = [f.gep(t.kind, row, j * t.lanes) for j in range(t.vectors)]
        if whole:
            return [f.load(t.vector, p, t.itemsize) for p in places]
        return [
            masked_load(f, t.kind, t.lanes, p, m, t.itemsize)
            for p, m in zip(places, masks, strict=True)
        ]

    carry = [(t.vector, "zeroinitializer")] * sums + [("ptr", p) for p in (*left, *right)]
    with f.loop(0, "%depth", unroll, carry=carry, known_nonempty=True) as loop:
        c, a_at, b_at = (
            loop.vars[:sums],
            loop.vars[sums : sums + len(left)],
            loop.vars[sums + len(left) :],
        )
        if ahead:
            line = f.gep("i8", "%ahead", f.mul(f.div(loop.index, ahead), "%ahead_step"))
            f.do(f"call void @llvm.prefetch.p0(ptr {line}, i32 0, i32 2, i32 1)")
        if block_ahead:
            f.do(
                f"call void @llvm.prefetch.p0(ptr {f.gep(t.kind, '%block', loop.index)}, i32 0, i32 2, i32 1)"
            )
        for u in range(unroll):
            b = right_vectors(b_at, u)
            for i in range(rows):
                for j, a in enumerate(broadcast(a_at, i, u)):
                    at = i * t.vectors + j
                    c[at] = multiply_add(f, t, a, b[j], c[at])
        a_at = [f.gep(t.kind, p, unroll if in_rows else f.mul(a_step, unroll)) for p in a_at]
        b_at = [
            f.gep(t.kind, p, f.mul("%b_k", unroll) if direct else unroll * t.lanes) for p in b_at
        ]
        loop.next = [*c, *a_at, *b_at]
    store_tile(f, t, rows, loop.vars[:sums], masks, partial)
    return f


def store_tile(
    f: Function, t: Tile, rows: int, values: list[str], masks: list[str], partial: bool
) -> None:
    """Store a register tile to %C (leading dimension %ldc), adding what is there when %more."""
    add = "fadd" if t.is_float else "add"
    more, plain, end = (f.label(x) for x in ("more", "plain", "end"))

    def places():
        for i in range(rows):
            row = f.gep(t.kind, "%C", f.mul("%ldc", i))
            inside = f.icmp("slt", i, "%valid_rows") if partial else None
            for j in range(t.vectors):
                mask = masks[j]
                if inside:
                    mask = f.op(
                        f"select i1 {inside}, <{t.lanes} x i1> {mask}, <{t.lanes} x i1> zeroinitializer"
                    )
                yield values[i * t.vectors + j], f.gep(t.kind, row, j * t.lanes), mask

    f.branch("%more", more, plain)
    f.start(more)
    for value, p, mask in places():
        old = masked_load(f, t.kind, t.lanes, p, mask, t.itemsize)
        masked_store(
            f, t.kind, t.lanes, f.op(f"{add} {t.vector} {value}, {old}"), p, mask, t.itemsize
        )
    f.jump(end)
    f.start(plain)
    for value, p, mask in places():
        masked_store(f, t.kind, t.lanes, value, p, mask, t.itemsize)
    f.jump(end)
    f.start(end)


@dataclass(frozen=True, slots=True)
class Partition:
    """How one product is cut for threads: `blocks_m` x `blocks_n` items; `prepacked`: A is packed beforehand."""

    tiles_each: Size
    columns_each: Size
    blocks_m: Size
    blocks_n: Size
    prepacked: bool


ITEMS_PER_CORE = 4
WORK = 1 << 18  # multiply-adds that make an item worth its overhead
IMBALANCE = {
    1: 0.08,
    2: 0.015,
    4: 0.0,
}  # items per core -> share of the time lost by waiting for the last one
NEAR = 1 << 20  # bytes of an operand that stay in L2 while its packing runs again and again
PACK_NS = {
    "copy": (0.1, 0.35),
    "transpose": (0.15, 0.3),
    "strided": (1.5, 1.5),
    "direct": (0.03, 0.2),
    "rows": (0.02, 0.1),
    "lanes": (0.02, 0.1),
    "packed": (0.02, 0.06),
}  # per element: near, far
PREPACK_NS, READ_NS = 0.5, (0.05, 0.3)  # to pack all of A beforehand; to read that again


def partition(t: Tile, tiles: Size, m: Size, n: Size, k: Size, batch: Size, forms: tuple[str, str], cores: int,
              may_prepack: bool) -> Partition:  # fmt: skip
    """The cheapest cut into items for so many cores: A is packed once per block of columns and B once per block of rows, unless A is packed
    beforehand, while few items leave cores idle at the end. `forms`: how the operands are read; the costs above were measured on one thread. Which cut is taken does not change results: every element of C is summed in one item.
    """
    step = t.columns
    if not (isinstance(tiles, int) and isinstance(n, int)):
        rows, columns = 16, 8 * step
        return Partition(rows, columns, ceildiv(tiles, rows), ceildiv(n, columns), False)
    m, k, batch = (
        v if isinstance(v, int) else usual for v, usual in ((m, 512), (k, 512), (batch, 8))
    )
    far_a, far_b = m * k * t.itemsize > NEAR, n * k * t.itemsize > NEAR
    multiply = m * n * k / (4.7 * t.lanes)
    best = (float("inf"), 1, 1, False)
    for per_core, idle in IMBALANCE.items():
        items = max(1, min(per_core * cores, m * n * k * batch // WORK) // max(1, batch))
        for blocks_n in range(1, min(items, ceildiv(n, step)) + 1):
            blocks_m = min(ceildiv(items, blocks_n), tiles)
            lost = multiply * (idle + max(0, 1 - blocks_m * blocks_n / items))
            passes = blocks_n * ceildiv(ceildiv(n, blocks_n), t.block_columns)
            for prepacked in (False, True) if may_prepack and passes > 1 else (False,):
                a_cost = (
                    PREPACK_NS + READ_NS[far_a] * passes
                    if prepacked
                    else PACK_NS[forms[0]][far_a] * passes
                )
                best = min(
                    best,
                    (
                        m * k * a_cost + blocks_m * n * k * PACK_NS[forms[1]][far_b] + lost,
                        blocks_m,
                        blocks_n,
                        prepacked,
                    ),
                )
    return cut(t, tiles, n, *best[1:])


def cut(
    t: Tile, tiles: int, n: int, blocks_m: int, blocks_n: int, prepacked: bool = False
) -> Partition:
    """At most `blocks_m` x `blocks_n` items of whole tiles."""
    tiles_each, columns_each = (
        ceildiv(tiles, blocks_m),
        ceildiv(ceildiv(n, blocks_n), t.columns) * t.columns,
    )
    return Partition(
        tiles_each, columns_each, ceildiv(tiles, tiles_each), ceildiv(n, columns_each), prepacked
    )


@dataclass(frozen=True, slots=True)
class Strides:
    """Element strides of a matrix operand: along its free dimension (rows of A, columns of B) and along K."""

    free: Int
    k: Int

    @property
    def form(self) -> str:
        return "copy" if self.free == 1 else "transpose" if self.k == 1 else "strided"


def tile_heights(t: Tile, m: Int) -> tuple[int, ...]:
    """Heights of the row tiles for M rows: balanced (two neighbouring heights), or the full height when M is symbolic."""
    if not isinstance(m, int):
        return (t.rows,)
    count = max(1, -(-m // t.rows))
    high = -(-m // count)
    return (high,) if m % count == 0 else (high, high - 1)


L1_BYTES = 32 << 10  # of a block of B that is read again from the first cache
MOST = 4  # vectors of a tile's rows
CALL = 20.0  # cycles around a call of a micro-kernel
PACK_CYCLES = {"copy": 2.0, "transpose": 6.0, "strided": 40.0}  # of a row tile, per element of K


@lru_cache(1024)
def tile_shape(t: Tile, m: int, n: int, k: int, form_a: str) -> tuple[tuple[int, ...], int]:
    """(heights of the row tiles, vectors of a tile) in which an m x n product costs least: narrow matrices in tiles that they fill, few rows in as many vectors
    as there are registers for.

    A step along K takes half a cycle per multiplication, and at least the four that each waits for the one before it; a quarter per element of A; a quarter
    or one per vector of B, which comes from the first cache or the second; and what packing A takes per row tile.
    """
    read = 0.25 if min(n, t.block_columns) * min(k, KC_DIRECT) * t.itemsize <= L1_BYTES else 1.0
    registers, best = (
        31 if t.lanes * t.itemsize >= 64 else 15,
        (float("inf"), (1,), 1),
    )  # beside the element of A
    for vectors in range(1, min(MOST, ceildiv(n, t.lanes)) + 1):
        for high in range(min(t.lanes, (registers - vectors) // vectors, m), 0, -1):
            heights, count = tile_heights(replace(t, rows=high), m), ceildiv(m, high)
            tall = m - count * heights[1] if len(heights) > 1 else count
            tiles = ((heights[0], tall), (heights[-1], count - tall))
            each = sum(
                number
                * (
                    max(4.0, rows * vectors / 2)
                    + rows / 4
                    + vectors * read
                    + (CALL + rows * vectors) / k
                )
                for rows, number in tiles
            )
            cost = each * ceildiv(n, vectors * t.lanes) + count * PACK_CYCLES.get(form_a, 0.0)
            if cost < best[0] * 0.98:
                best = (cost, heights, vectors)
    return best[1:]


@dataclass(frozen=True, slots=True)
class Depth:
    """One block of K inside a kernel: its `size`, where it starts (`first`, an element of K), whether C already holds a sum, and whether it
    is the `last`."""

    size: Int
    first: Int
    more: str
    last: str


BLOCK_PARAMETERS = (("ptr", "A"), ("i64", "a_free"), ("i64", "a_k"), ("ptr", "B"), ("i64", "b_free"), ("i64", "b_k"), ("ptr", "C"), ("i64", "ldc"),
                    ("i64", "tile0"), ("i64", "tile1"), ("i64", "m"), ("i64", "n0"), ("i64", "n1"), ("i64", "k"), ("ptr", "scratch"))  # fmt: skip


class Gemm:
    """The functions of one kind of product. `functions` collects name -> text of everything that `block` needs.

    `prepacked`: A lies as `prepack` leaves it. `even`: every range of columns is a multiple of the tile's.

    `epilogue` (epilogue.py) is called on every row tile of a block of columns that is finished. C then holds sums; with `local`, which is
    for a K of a single block, it is not used: the sums of a row tile stay in scratch memory.

    `unroll` divides K. `fetch`: see `micro`. With `form_b` "packed" the whole of B lies as `prepack_b` leaves it, and its column stride is the number of its columns.
    """

    def __init__(self, t: Tile, source_a: Source, source_b: Source, form_a: str, form_b: str, heights: tuple[int, ...], static_m: bool,
                 prepacked: bool = False, even: bool = False, epilogue=None, local: bool = False, unroll: int = 1, fetch: bool = True) -> None:  # fmt: skip
        self.t, self.heights, self.static_m, self.prepacked, self.unroll = (
            t,
            heights,
            static_m,
            prepacked,
            unroll,
        )
        self.epilogue, self.local, self.fetch = epilogue, local, fetch
        self.direct, self.even = form_b == "direct", even
        self.kept = form_b == "packed"
        self.in_rows, self.in_lanes = (
            form_a == form and not prepacked for form in ("rows", "lanes")
        )
        self.block_ahead = form_b not in ("strided", "direct") and not source_b.steps
        self.sources, self.forms = (source_a, source_b), (form_a, form_b)
        self.functions: dict[str, str] = {}
        height = (
            "_".join(map(str, heights))
            + "p" * (not static_m)
            + "q" * prepacked
            + "e" * even
            + "n" * (not fetch)
            + f"u{unroll}"
        )
        self.name = f"gemm_{t.suffix}_{source_a.name}{form_a[0]}_{source_b.name}{form_b[0]}_{height}_{t.vectors}"
        self.extra: tuple[tuple[str, str], ...] = ()  # parameters besides BLOCK_PARAMETERS
        if epilogue is not None:
            self.extra = (("i64", "first_row"), *epilogue.parameters)
            self.name += f"{'l' * local}_{epilogue.name}"

    @property
    def scratch_bytes(self) -> int:
        return self.t.scratch_bytes + self.t.sums_bytes * self.local

    def function(self, make, name: str, *args) -> str:
        """Name of the function `make(name, *args)`, written once."""
        if name not in self.functions:
            self.functions[name] = make(name, *args).text()
        return name

    def _pack(
        self,
        f: Function,
        side: int,
        src: str,
        strides: tuple[str, str],
        depth: Int,
        valid: Int,
        dst: str,
    ) -> None:
        t, source, form = self.t, self.sources[side], self.forms[side]
        make = {"copy": pack_copy, "transpose": pack_transpose, "strided": pack_strided}[form]
        name = self.function(make, f"pack_{form}_{t.suffix}_{source.name}", t, source)
        free, k = strides
        args = {"copy": [k], "transpose": [free], "strided": [free, k]}[form]
        f.call(
            "void",
            name,
            f"ptr {src}",
            *(f"i64 {a}" for a in args),
            f"i64 {depth}",
            f"i64 {valid}",
            f"ptr {dst}",
        )

    @contextmanager
    def k_blocks(self, f: Function) -> Iterator[Depth]:
        """The loop over blocks of K."""
        depth = f.ceildiv("%k", f.max(f.ceildiv("%k", KC_DIRECT if self.direct else KC), 1))
        depth = f.mul(
            f.ceildiv(depth, self.t.lanes), self.t.lanes
        )  # packing writes whole vectors of K
        with f.loop(0, "%k", depth) as k0:
            size = f.min(depth, f.sub("%k", k0))
            yield Depth(size, k0, f.icmp("ne", k0, 0), f.icmp("eq", f.add(k0, size), "%k"))

    def pack_a(self, f: Function, depth: Depth, row: Int, height: Int, to: str) -> None:
        """Write rows [row, row + height) of the block of A as [depth][lanes]."""
        at = f.add(f.mul(row, "%a_free"), f.mul(depth.first, "%a_k"))
        self._pack(
            f, 0, f.gep(self.sources[0].kind, "%A", at), ("%a_free", "%a_k"), depth.size, height, to
        )

    def prepack(self) -> str:
        """Define void(lo, hi, A, packed, m, a_free, a_k, k): row tiles [lo, hi) of A as [tile][k + lanes][lanes].

        Worth its pass over A when several blocks of columns use it. (A packing may spill over the end of its block, hence the gap.)
        """
        t, source = self.t, self.sources[0]
        name = f"prepack_{self.name}"
        params = [
            ("i64", "lo"),
            ("i64", "hi"),
            ("ptr", "A"),
            ("ptr", "packed"),
            *(("i64", q) for q in ("m", "a_free", "a_k", "k")),
        ]
        f = Function(name, "void", params)
        tall = self._tall(f)
        with f.loop("%lo", "%hi") as i:
            row, height, _ = self._rows(f, i, tall)
            with f.loop(0, "%k", KC) as k0:
                src = f.add(f.mul(row, "%a_free"), f.mul(k0, "%a_k"))
                to = f.gep(
                    t.kind, "%packed", f.mul(f.add(f.mul(i, f.add("%k", t.lanes)), k0), t.lanes)
                )
                self._pack(
                    f,
                    0,
                    f.gep(source.kind, "%A", src),
                    ("%a_free", "%a_k"),
                    f.min(f.sub("%k", k0), KC),
                    height,
                    to,
                )
        self.functions[name] = f.text()
        return name

    def prepacked_bytes(self, m: Size, k: Size) -> Size:
        """Size of the memory that `prepack` fills."""
        return ceildiv(m, self.heights[0]) * (k + self.t.lanes) * (self.t.lanes * self.t.itemsize)

    def prepack_b(self) -> str:
        """Define void(lo, hi, B, packed, n, b_free, b_k, k): panels [lo, hi) of `lanes` columns of B as [block of K][panel][depth][lanes]. K is a
        multiple of `lanes`: packing writes nothing beyond a panel."""
        t, source = self.t, self.sources[1]
        name = f"prepack_b_gemm_{t.suffix}_{source.name}_{self.forms[1]}"
        f = Function(
            name,
            "void",
            [
                ("i64", "lo"),
                ("i64", "hi"),
                ("ptr", "B"),
                ("ptr", "packed"),
                *(("i64", q) for q in ("n", "b_free", "b_k", "k")),
            ],
        )
        with f.loop("%lo", "%hi") as panel, self.k_blocks(f) as depth:
            column = f.mul(panel, t.lanes)
            self.pack_b(
                f,
                depth,
                column,
                f.min(f.sub("%n", column), t.lanes),
                self._kept_panel(f, "%packed", "%n", depth, column),
            )
        self.functions[name] = f.text()
        return name

    def kept_bytes(self, n: int, k: int) -> int:
        """Size of the memory that `prepack_b` fills, and what a micro-kernel may read past it."""
        t = self.t
        return t.itemsize * (ceildiv(n, t.lanes) * t.lanes * k + KC * MOST * t.lanes)

    def _kept_panel(self, f: Function, base: str, n: Int, depth: Depth, column: Int) -> str:
        """Where the panel of `column`, a multiple of `lanes`, is in a block of K of what `prepack_b` wrote."""
        t = self.t
        columns = f.mul(f.ceildiv(n, t.lanes), t.lanes)
        return f.gep(t.kind, base, f.add(f.mul(depth.first, columns), f.mul(column, depth.size)))

    def _tall(self, f: Function) -> Int | None:
        """How many of the row tiles have the greater of two heights."""
        if len(self.heights) == 1:
            return None
        return f.sub("%m", f.mul(f.ceildiv("%m", self.heights[0]), self.heights[1]))

    def _rows(self, f: Function, i: Int, tall: Int | None) -> tuple[Int, Int, str | None]:
        """(first row, height, whether it is one of the tall ones) of row tile `i`."""
        high = self.heights[0]
        if tall is not None:
            is_tall = f.icmp("slt", i, tall)
            return (
                f.add(f.mul(i, self.heights[1]), f.min(i, tall)),
                f.select(is_tall, "i64", high, self.heights[1]),
                is_tall,
            )
        row = f.mul(i, high)
        return row, high if self.static_m else f.min(high, f.sub("%m", row)), None

    def pack_b(self, f: Function, depth: Depth, column: Int, count: Int, to: str) -> None:
        """Write columns [column, column + min(count, lanes)) of the block of B as [depth][lanes]."""
        at = f.add(f.mul(column, "%b_free"), f.mul(depth.first, "%b_k"))
        self._pack(
            f, 1, f.gep(self.sources[1].kind, "%B", at), ("%b_free", "%b_k"), depth.size, count, to
        )

    def block(self) -> str:
        """Define and return the name of: void(A, a_free, a_k, B, b_free, b_k, C, ldc, tile0, tile1, m, n0, n1, k, scratch, extra…).

        Computes the columns [n0, n1) of the row tiles [tile0, tile1) of C. `first_row`: what number row 0 has for the epilogue.
        """
        t = self.t
        params = [*BLOCK_PARAMETERS, *self.extra]
        if self.name in self.functions:
            return self.name
        f = Function(self.name, "void", params, attrs="noinline #0")
        a_panel = f.gep(t.kind, "%scratch", KC * (t.block_columns + t.columns) + t.lanes * t.lanes)
        nc = t.block_columns // t.columns * t.columns
        tall = self._tall(f)
        with f.loop("%n0", "%n1", nc) as j0:
            j1 = f.min(f.add(j0, nc), "%n1")
            with self.k_blocks(f) as depth:
                panel = f.mul(depth.size, t.lanes)
                if not self.direct and not self.kept:
                    with f.loop(j0, j1, t.lanes) as j:
                        number = f.div(f.sub(j, j0), t.lanes)
                        self.pack_b(
                            f,
                            depth,
                            j,
                            f.min(f.sub(j1, j), t.lanes),
                            f.gep(t.kind, "%scratch", f.mul(number, panel)),
                        )
                coming = self._next_block(f, depth, j0, j1) if self.block_ahead else None
                with f.loop("%tile0", "%tile1") as i:
                    self._row_tile(f, i, tall, depth, a_panel, panel, j0, j1, coming)
        self.functions[self.name] = f.text()
        return self.name

    def _next_block(self, f: Function, depth: Depth, j0: Int, j1: Int) -> str:
        """Where the block of B begins that comes after this one: further along K, or the next columns."""
        to = f.add(depth.first, depth.size)
        k, j = f.select(depth.last, "i64", 0, to), f.select(depth.last, "i64", j1, j0)
        if self.kept:  # all blocks are as deep, but for the last
            return self._kept_panel(
                f, "%B", "%b_free", Depth(depth.size, k, depth.more, depth.last), j
            )
        return f.gep(self.sources[1].kind, "%B", f.add(f.mul(j, "%b_free"), f.mul(k, "%b_k")))

    def _row_tile(
        self,
        f: Function,
        i: Int,
        tall: Int | None,
        depth: Depth,
        a_panel: str,
        panel: Int,
        j0: Int,
        j1: Int,
        coming: str | None,
    ) -> None:
        """Pack tile `i` of A and multiply it with every pair of panels; each of these calls asks for a line of B's block that begins at `coming`."""
        high = self.heights[0]
        row, height, is_tall = self._rows(f, i, tall)
        if self.prepacked:
            a_panel = f.gep(
                self.t.kind,
                "%A",
                f.mul(f.add(f.mul(i, f.add("%k", self.t.lanes)), depth.first), self.t.lanes),
            )
        elif self.in_rows or self.in_lanes:
            a_panel = f.gep(
                self.t.kind, "%A", f.add(f.mul(row, "%a_free"), f.mul(depth.first, "%a_k"))
            )
        else:
            self.pack_a(f, depth, row, height, a_panel)
        if self.local:
            c_row, ldc = (
                f.gep("i8", "%scratch", self.t.scratch_bytes),
                self.t.block_columns + LOCAL_GAP,
            )
        else:
            c_row, ldc = f.gep(self.t.kind, "%C", f.add(f.mul(row, "%ldc"), j0)), "%ldc"

        ahead = (
            {"transpose": self.t.lanes, "copy": 2}.get(self.forms[0], 0)
            if not self.prepacked
            else 0
        )

        def kernel(rows: int, partial: bool, whole: bool) -> str:
            name = f"micro_{self.t.suffix}_{rows}x{self.t.vectors}{'p' * partial}{'d' * self.direct}{'w' * whole}{f'a{ahead}' * (ahead > 0)}{'b' * self.block_ahead}{'r' * self.in_rows}{'l' * self.in_lanes}{'n' * (not self.fetch)}u{self.unroll}"
            return self.function(
                micro,
                name,
                self.t,
                rows,
                partial,
                self.direct,
                whole,
                ahead,
                self.block_ahead,
                self.in_rows,
                self.in_lanes,
                self.unroll,
                self.fetch,
            )

        def multiply(rows: int, partial: bool = False) -> None:
            rest = [f"i64 {height}"] * partial + ["i64 %b_k"] * self.direct
            with f.loop(j0, j1, self.t.columns) as j:
                if self.direct:
                    b = f.gep(self.t.kind, "%B", f.add(j, f.mul(depth.first, "%b_k")))
                elif self.kept:
                    b = self._kept_panel(f, "%B", "%b_free", depth, j)
                else:
                    b = f.gep(
                        self.t.kind, "%scratch", f.mul(f.div(f.sub(j, j0), self.t.lanes), panel)
                    )
                c, cols = f.gep(self.t.kind, c_row, f.sub(j, j0)), f.sub(j1, j)
                arguments = [
                    f"ptr {a_panel}",
                    f"ptr {b}",
                    f"i64 {depth.size}",
                    f"ptr {c}",
                    f"i64 {ldc}",
                    f"i64 {cols}",
                    f"i1 {depth.more}",
                    *rest,
                ]
                if ahead:  # every call asks for a part of the next tile: one row, or half of K where the rows are contiguous
                    number, next_row, k, step = (
                        f.div(f.sub(j, j0), self.t.columns),
                        f.add(row, height),
                        depth.first,
                        self.sources[0].itemsize,
                    )
                    if self.forms[0] == "transpose":
                        next_row, step = f.add(next_row, f.rem(number, 16)), step * self.t.lanes
                    else:
                        half = f.ceildiv(
                            depth.size, 2
                        )  # four calls: the lines of the first rows, then those of the last
                        next_row = f.add(
                            next_row, f.select(f.icmp("slt", number, 2), "i64", 0, high - 1)
                        )
                        k, step = f.add(k, f.mul(f.rem(number, 2), half)), f.mul("%a_k", step)
                    q = f.gep(
                        self.sources[0].kind,
                        "%A",
                        f.add(f.mul(next_row, "%a_free"), f.mul(k, "%a_k")),
                    )
                    arguments += [f"ptr {q}", f"i64 {step}"]
                if coming is not None:
                    calls = f.ceildiv(f.sub(j1, j0), self.t.columns)
                    call = f.add(
                        f.mul(f.sub(i, "%tile0"), calls), f.div(f.sub(j, j0), self.t.columns)
                    )
                    along_k = self.forms[1] == "transpose"
                    if self.kept:
                        line = f.mul(f.min(call, f.sub(j1, j0)), depth.size)
                    else:
                        line = f.mul(
                            f.min(call, f.sub(j1, j0) if along_k else depth.size),
                            "%b_free" if along_k else "%b_k",
                        )
                    arguments.append(f"ptr {f.gep(self.sources[1].kind, coming, line)}")

                arguments += ["i64 %a_free"] * self.in_rows + ["i64 %a_k"] * self.in_lanes

                def run(whole: bool, arguments=arguments) -> None:
                    f.call("void", kernel(rows, partial, whole), *arguments)

                if self.direct and not self.even:
                    f.choose(
                        f.icmp("sge", cols, self.t.columns), lambda: run(True), lambda: run(False)
                    )
                else:
                    run(self.direct)

        if is_tall is not None:
            f.choose(is_tall, lambda: multiply(high), lambda: multiply(self.heights[1]))
        elif self.static_m:
            multiply(high)
        else:
            f.choose(
                f.icmp("eq", height, high), lambda: multiply(high), lambda: multiply(high, True)
            )
        if self.epilogue is not None:
            with nullcontext() if self.local else f.when(depth.last):
                self.epilogue.call(
                    f, f.add("%first_row", row), height, j0, f.sub(j1, j0), c_row, ldc
                )
