"""The functions on AMX tiles that gemm_amx.py calls: packing into tiles, the micro-kernel, turning
its sums, asking for memory in advance.

A processor without AMX may have AVX512-BF16, which multiplies pairs of bf16 in vector registers: it
gets the same tiles, and another micro-kernel on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch_hlo.frozen import frozen

from ..llvm import Function, Int, Target, signature
from ..thresholds import AMX_ROWS_AHEAD, LANES_AHEAD
from .tile import Tile

BLOCK = 32  # rows and columns of a micro-kernel
STEP_BYTES = 2048  # two tiles: what a step of the micro-kernel takes of each operand
# elements between the rows of sums in scratch memory: rows a power of 2 apart would share few sets
# of a cache
GAP = 16
WORDS = Tile("i32", 16, 16, 1)
# of AVX512-BF16's micro-kernel: rows whose sums are in registers
ROWS = 8
FEW_ROWS = 4
PAIRS_AHEAD = 2  # steps
_PAIRS_OF_LANES = "<32 x i16>"
_NO_LANES = "zeroinitializer"
_SUMS = Tile("float", 16, ROWS, 2)


@frozen
class Element:
    """Types of elements of A and B that the tiles multiply, and of their sums. `depth`: elements of
    K in a step; `group`: those that lie together in B. `instruction`: of the tiles; none where
    vector registers take their place. `ns`: nanoseconds of a multiply-add."""

    name: str
    kind: str
    itemsize: int
    sums: str
    instruction: str
    ns: float = 0.0008

    @property
    def group(self) -> int:
        return 4 // self.itemsize

    @property
    def depth(self) -> int:
        return 64 // self.itemsize


ELEMENTS = {
    ("bf16", "bf16"): Element("bf16", "i16", 2, "float", "tdpbf16ps"),
    ("s8", "s8"): Element("s8", "i8", 1, "i32", "tdpbssd"),
    ("u8", "u8"): Element("u8", "i8", 1, "i32", "tdpbuud"),
}
_FEATURES = {
    "bf16": "amx-bf16",
    "s8": "amx-int8",
    "u8": "amx-int8",
}  # by type of an operand
_PAIRS = Element("pairs", "i16", 2, "float", "", 0.01)  # AVX512-BF16


def element(target: Target, types: tuple[str, ...]) -> Element | None:
    """What multiplies operands of these types on the target's tiles, or on what it has instead."""
    found = ELEMENTS.get((types[0], types[-1]))
    if found is None or target.has(_FEATURES[found.name]):
        return found
    return _PAIRS if found.name == "bf16" and target.has("avx512bf16") else None


# the rows of a tile of A, or of K pairs of B, from element k on: (k, whether K may end) -> vectors
Rows = Callable[[Int, bool], list[str]]


def pack(name: str, side: str, form: str, e: Element) -> Function:
    """void(src, lane_stride, k_stride, depth, valid, dst): 16 lanes (rows of A, columns of B) as
    tiles 2048 bytes apart.

    `form` says what is contiguous: "k", "lane" or "none". Lanes from `valid` on repeat others; K is
    padded with zeros."""
    params = "ptr src, i64 lane_stride, i64 k_stride, i64 depth, i64 valid, ptr dst"
    f = Function(name, params, attrs="noinline #0")
    whole = f.op(f"and i64 %depth, {-e.depth}")
    if (side, form) == ("a", "k"):
        _copy_rows(f, e, whole)
        return f
    read = {
        "k": _rows_along_k,
        "lane": _rows_along_lanes,
        "none": _rows_of_elements,
    }[form](f, e)
    # vectors are [group of k][lane][group], as tiles of B are; else [lane][k], as tiles of A are
    by_groups = form == "lane"

    def block(k: Int, tail: bool) -> None:
        vectors = read(k, tail)
        if by_groups != (side == "b"):
            vectors = WORDS.transposed(f, vectors)
        to = f.gep("i8", "%dst", f.mul(f.div(k, e.depth), STEP_BYTES))
        for i, v in enumerate(vectors):
            f.store("<16 x i32>", v, f.gep("i8", to, 64 * i))

    with f.loop(0, whole, e.depth) as k:
        block(k, False)
    with f.when(f.icmp("slt", whole, "%depth")):
        block(whole, True)
    return f


def _copy_rows(f: Function, e: Element, whole: Int) -> None:
    """Rows along K as they are; one row after the other, so that memory is read in long pieces."""
    last = f.sub("%valid", 1)
    vector = f"<{e.depth} x {e.kind}>"
    rest = f.lane_mask(e.depth, whole, "%depth")
    with f.loop(0, 16) as lane:
        row = f.gep(e.kind, "%src", f.mul(f.min(lane, last), "%lane_stride"))
        to = f.gep("i8", "%dst", f.mul(lane, 64))
        with f.loop(0, whole, e.depth) as k:
            v = f.load(vector, f.gep(e.kind, row, k))
            f.store(vector, v, f.gep("i8", to, f.mul(f.div(k, e.depth), STEP_BYTES)))
        with f.when(f.icmp("slt", whole, "%depth")):
            v = f.masked_load(e.kind, e.depth, f.gep(e.kind, row, whole), rest)
            f.store(vector, v, f.gep("i8", to, f.mul(f.div(whole, e.depth), STEP_BYTES)))


def _rows_along_k(f: Function, e: Element) -> Rows:
    last = f.sub("%valid", 1)
    vector = f"<{e.depth} x {e.kind}>"
    rows = [
        f.gep(e.kind, "%src", f.mul(f.min(i, last) if i else 0, "%lane_stride")) for i in range(16)
    ]

    def read(k: Int, tail: bool) -> list[str]:
        if tail:
            mask = f.lane_mask(e.depth, k, "%depth")
            loaded = [f.masked_load(e.kind, e.depth, f.gep(e.kind, row, k), mask) for row in rows]
        else:
            loaded = [f.load(vector, f.gep(e.kind, row, k)) for row in rows]
        return [f.op(f"bitcast {vector} {v} to <16 x i32>") for v in loaded]

    return read


def _rows_along_lanes(f: Function, e: Element) -> Rows:
    lanes = f.lane_mask(16, 0, "%valid")

    def row(k: Int, tail: bool) -> str:
        mask = lanes
        if tail:
            mask = f.op(
                f"select i1 {f.icmp('slt', k, '%depth')}, <16 x i1> {lanes}, <16 x i1>"
                " zeroinitializer"
            )
        p = f.gep(e.kind, "%src", f.mul(k, "%k_stride"))
        if not tail:
            f.do(
                f"call void @llvm.prefetch.p0(ptr {f.gep('i8', p, LANES_AHEAD)}, i32 0, i32 2,"
                " i32 1)"
            )
        return f.masked_load(e.kind, 16, p, mask)

    def mixed(kind: str, a: str, b: str) -> str:
        order = ", ".join(f"i32 {i // 2 + i % 2 * 16}" for i in range(32))
        return f.op(f"shufflevector <16 x {kind}> {a}, <16 x {kind}> {b}, <32 x i32> <{order}>")

    def read(k: Int, tail: bool) -> list[str]:
        found = []
        for g in range(16):
            parts = [row(f.add(k, e.group * g + i), tail) for i in range(e.group)]
            bits = 8 * e.itemsize
            while len(parts) > 1:
                parts = [
                    f.op(f"bitcast <32 x i{bits}> {mixed(f'i{bits}', a, b)} to <16 x i{2 * bits}>")
                    for a, b in zip(parts[::2], parts[1::2], strict=True)
                ]
                bits *= 2
            found += parts
        return found

    return read


def _rows_of_elements(f: Function, e: Element) -> Rows:
    block = f.alloca(e.kind, 16 * e.depth, 64)
    last = f.sub("%valid", 1)

    def read(k: Int, tail: bool) -> list[str]:
        with f.loop(0, 16) as lane, f.loop(0, e.depth) as i:
            at = f.add(k, i)
            inside = f.icmp("slt", at, "%depth")
            source = f.muladd(
                f.min(lane, last),
                "%lane_stride",
                f.mul(f.select(inside, "i64", at, 0), "%k_stride"),
            )
            v = f.select(inside, e.kind, f.load_at(e.kind, "%src", source), 0)
            f.store_at(e.kind, v, block, f.muladd(lane, e.depth, i))
        return [f.load("<16 x i32>", f.gep("i8", block, 64 * lane), 64) for lane in range(16)]

    return read


def micro(name: str, e: Element, ahead: bool = False, strided: bool = False) -> Function:
    """void(A, B, steps, C, ldc, rows, cols, more): up to 32 x 32 of C from packed panels, added to
    C when `more`.

    With `ahead`, every step asks for a cache line of each of AMX_ROWS_AHEAD rows that begin at
    `%ahead`, `%ahead_row` bytes apart.
    `strided`: A is not packed, it has rows along K that are `%a_row` bytes apart.
    """
    params = signature("ptr A, ptr B, i64 steps, ptr C, i64 ldc, i64 rows, i64 cols, i1 more")
    params += signature("ptr ahead, i64 ahead_row") * ahead + [("i64", "a_row")] * strided
    f = Function(name, params, attrs="noinline #0")
    if not e.instruction:
        _micro_pairs(f, ahead, strided)
        return f
    whole = f.op(f"and i1 {f.icmp('sge', '%rows', BLOCK)}, {f.icmp('sge', '%cols', BLOCK)}")
    row_bytes = f.mul("%ldc", 4)

    def load() -> None:
        for t, p in enumerate(_corners(f, e)):
            f.do(f"call void @llvm.x86.tileloadd64(i8 {t}, ptr {p}, i64 {row_bytes})")

    def zero() -> None:
        for t in range(4):
            f.do(f"call void @llvm.x86.tilezero(i8 {t})")

    def direct() -> None:
        for t, p in enumerate(_corners(f, e)):
            f.do(f"call void @llvm.x86.tilestored64(i8 {t}, ptr {p}, i64 {row_bytes})")

    def spill() -> None:
        for t in range(4):
            p = f.gep(e.sums, temporary, t // 2 * 16 * BLOCK + t % 2 * 16)
            f.do(f"call void @llvm.x86.tilestored64(i8 {t}, ptr {p}, i64 {4 * BLOCK})")
        _store_rows(f, e, temporary)

    f.choose(f.op(f"and i1 {whole}, %more"), load, zero)
    with f.loop(0, "%steps", known_nonempty=True) as s:
        _multiply_step(f, e, s, AMX_ROWS_AHEAD * ahead, strided)
    temporary = f.alloca(e.sums, BLOCK * BLOCK, 64)
    f.choose(whole, direct, spill)
    return f


def _micro_pairs(f: Function, ahead: bool, strided: bool) -> None:
    """The block in parts of `ROWS` rows; a few rows that are left are one of `FEW_ROWS`."""
    with f.loop(0, f.min("%rows", BLOCK), ROWS, known_nonempty=True) as row:
        few = f.icmp("sle", f.sub("%rows", row), FEW_ROWS)
        f.choose(
            few,
            lambda: _multiply_pairs(f, row, FEW_ROWS, ahead, strided),
            lambda: _multiply_pairs(f, row, ROWS, ahead, strided),
        )


def _multiply_pairs(f: Function, row: Int, rows: int, ahead: bool, strided: bool) -> None:
    """`rows` rows of the block of C from `row` on: two vectors of sums each, in registers.

    Operands are followed by pointers, see `micro_kernel._Writing`."""
    a_row: Int = "%a_row" if strided else 64
    a_rows = [f.mul(a_row, i) for i in range(rows)]
    a_start = f.gep("i8", "%A", f.mul(a_row, row))
    none = [(_SUMS.vector, _NO_LANES)] * (2 * rows)
    with f.loop(0, "%steps", carry=none, known_nonempty=True) as step:
        a = f.gep("i8", a_start, f.mul(step.index, 64 if strided else STEP_BYTES))
        b = f.gep("i8", "%B", f.mul(step.index, STEP_BYTES))
        if ahead:
            for part in range(AMX_ROWS_AHEAD):
                line = f.muladd("%ahead_row", part, f.mul(step.index, 64))
                place = f.gep("i8", "%ahead", line)
                f.do(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 2, i32 1)")
        carry = [(_SUMS.vector, v) for v in step.vars]
        carry += [("ptr", a), ("ptr", b)]
        with f.loop(0, 16, carry=carry, known_nonempty=True) as pair:
            *sums, a, b = pair.vars
            sums = _multiply_pair(f, sums, a, a_rows, b)
            pair.next = [*sums, f.gep("i8", a, 4), f.gep("i8", b, 64)]
        step.next = pair.vars[:-2]
    _store_pairs(f, row, step.vars)


def _multiply_pair(f: Function, sums: list[str], a: str, a_rows: list[Int], b: str) -> list[str]:
    """The sums with the products of a pair of K, at `a` of each row and at `b`."""
    right = []
    for j in range(2):
        place = f.gep("i8", b, 1024 * j)
        # its lines are in no order that a processor foresees
        coming = f.gep("i8", place, PAIRS_AHEAD * STEP_BYTES)
        f.do(f"call void @llvm.prefetch.p0(ptr {coming}, i32 0, i32 3, i32 1)")
        right.append(f.load(_PAIRS_OF_LANES, place, 64))
    new = []
    for i, a_at in enumerate(a_rows):
        word = f.load("i32", f.gep("i8", a, a_at))
        one = f.op(f"insertelement <16 x i32> poison, i32 {word}, i64 0")
        spread = f.op(
            f"shufflevector <16 x i32> {one}, <16 x i32> poison, <16 x i32> zeroinitializer"
        )
        left = f.op(f"bitcast <16 x i32> {spread} to {_PAIRS_OF_LANES}")
        new += [_SUMS.fma_pairs(f, left, right[j], sums[2 * i + j]) for j in range(2)]
    return new


def _store_pairs(f: Function, row: Int, sums: list[str]) -> None:
    """Store rows of the block from `row` on, those that are there, added to C when %more."""
    columns = [f.lane_mask(16, 16 * j, "%cols") for j in range(2)]

    def write(more: bool) -> None:
        for n, v in enumerate(sums):
            i, j = divmod(n, 2)
            place = f.gep("float", "%C", f.muladd(f.add(row, i), "%ldc", 16 * j))
            with f.when(f.icmp("slt", f.add(row, i), "%rows")):
                if more:
                    old = f.masked_load("float", 16, place, columns[j])
                    v = f.op(f"fadd {_SUMS.vector} {v}, {old}")
                f.masked_store("float", 16, v, place, columns[j])

    f.choose("%more", lambda: write(True), lambda: write(False))


def _corners(f: Function, e: Element) -> list[str]:
    """Where the four tiles of C begin."""
    below = f.gep(e.sums, "%C", f.mul("%ldc", 16))
    return ["%C", f.gep(e.sums, "%C", 16), below, f.gep(e.sums, below, 16)]


def _multiply_step(f: Function, e: Element, s: Int, rows_ahead: int, strided: bool) -> None:
    """Step `s` of the sums: two tiles of A times two of B."""
    a = f.gep("i8", "%A", f.mul(s, 64 if strided else STEP_BYTES))
    b = f.gep("i8", "%B", f.mul(s, STEP_BYTES))
    a_row: Int = "%a_row" if strided else 64
    below = f.gep("i8", b, 1024), f.gep("i8", a, f.mul(a_row, 16))
    for t, p in ((6, b), (4, a), (7, below[0]), (5, below[1])):
        load = "tileloaddt1" if t > 5 else "tileloadd"
        f.do(f"call void @llvm.x86.{load}64(i8 {t}, ptr {p}, i64 {64 if t > 5 else a_row})")
    for row in range(rows_ahead):
        line = f.gep("i8", "%ahead", f.muladd("%ahead_row", row, f.mul(s, 64)))
        f.do(f"call void @llvm.prefetch.p0(ptr {line}, i32 0, i32 2, i32 1)")
    for t in range(4):
        f.do(f"call void @llvm.x86.{e.instruction}(i8 {t}, i8 {4 + t // 2}, i8 {6 + t % 2})")


def _store_rows(f: Function, e: Element, temporary: str) -> None:
    """Copy the valid part of a 32 x 32 block of sums to C, adding what is there when %more."""
    masks = [f.lane_mask(16, 16 * j, "%cols") for j in range(2)]
    vector = f"<16 x {e.sums}>"
    plus = "fadd" if e.sums == "float" else "add"
    with f.loop(0, f.min("%rows", BLOCK), known_nonempty=True) as r:
        for j, mask in enumerate(masks):
            v = f.load(vector, f.gep(e.sums, temporary, f.muladd(r, BLOCK, 16 * j)), 64)
            to = f.gep(e.sums, "%C", f.muladd(r, "%ldc", 16 * j))
            keep = f.op(f"select i1 %more, <16 x i1> {mask}, <16 x i1> zeroinitializer")
            f.masked_store(
                e.sums,
                16,
                f.op(f"{plus} {vector} {v}, {f.masked_load(e.sums, 16, to, keep)}"),
                to,
                mask,
            )


def turn(name: str, masked: bool) -> Function:
    """void(src, dst, ld, rows, cols): dst[j, i] = src[i, j] of a block of 32 x 32 4-byte elements;
    with `masked` only for i < rows and j < cols."""
    f = Function(
        name,
        "ptr src, ptr dst, i64 ld, i64 rows, i64 cols",
        attrs="noinline #0",
    )
    with (
        f.loop(0, BLOCK, 16, known_nonempty=True) as j,
        f.loop(0, BLOCK, 16, known_nonempty=True) as i,
    ):
        corner = f.gep("i32", "%src", f.muladd(i, BLOCK, j))
        block = WORDS.transposed(
            f,
            [f.load("<16 x i32>", f.gep("i32", corner, BLOCK * r), 64) for r in range(16)],
        )
        to = f.gep("i32", "%dst", f.muladd(j, "%ld", i))
        valid = f.lane_mask(16, i, "%rows") if masked else None
        for r, v in enumerate(block):
            p = f.gep("i32", to, f.mul("%ld", r))
            if not masked:
                f.store("<16 x i32>", v, p)
                continue
            inside = f.icmp("slt", f.add(j, r), "%cols")
            f.masked_store(
                "i32",
                16,
                v,
                p,
                f.op(f"select i1 {inside}, <16 x i1> {valid}, <16 x i1> zeroinitializer"),
            )
    return f


def fetch(name: str) -> Function:
    """void(from, nbytes): ask for the cache lines of [from, from + nbytes)."""
    f = Function(name, "ptr from, i64 nbytes", attrs="noinline #0")
    with f.loop(0, "%nbytes", 256, known_nonempty=True) as at:
        for line in range(0, 256, 64):
            f.do(
                f"call void @llvm.prefetch.p0(ptr {f.gep('i8', '%from', f.add(at, line))}, i32 0,"
                " i32 2, i32 1)"
            )
    return f


def configure(f: Function) -> None:
    """Eight tiles of 16 rows of 64 bytes."""
    config = f.alloca("i8", 64, 64)
    f.do(f"call void @llvm.memset.p0.i64(ptr {config}, i8 0, i64 64, i1 false)")
    f.store("i8", 1, config)
    for t in range(8):
        f.store("i16", 64, f.gep("i8", config, 16 + 2 * t))
        f.store_at("i8", 16, config, 48 + t)
    f.do(f"call void @llvm.x86.ldtilecfg(ptr {config})")


@contextmanager
def tiles(f: Function, e: Element) -> Iterator[None]:
    """Where tile registers may be used. Entering and leaving takes about 100 ns."""
    if e.instruction:
        configure(f)
    yield
    if e.instruction:
        f.do("call void @llvm.x86.tilerelease()")
