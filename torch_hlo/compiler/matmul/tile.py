"""The register tile of a matrix kernel, and the vector operations that kernels make of it: loads
and stores under a mask, conversions of elements, multiply-add, transposes."""

from __future__ import annotations

from collections.abc import Iterator

from torch_hlo.frozen import frozen

from ..llvm import BITS, Function, Int, emit
from ..thresholds import KC, LOCAL_GAP, NC


@frozen
class Tile:
    """The register block of a micro-kernel for accumulators of LLVM type `kind`: `rows` x
    (`vectors` * `lanes`)."""

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

    def load(self, f: Function, pointer: str, mask: str = "") -> str:
        """A vector, see `masked_load`."""
        return masked_load(f, self.kind, self.lanes, pointer, mask)

    def store(self, f: Function, value: str, pointer: str, mask: str = "") -> None:
        masked_store(f, self.kind, self.lanes, value, pointer, mask)

    def masks(self, f: Function, count: Int) -> list[str]:
        """For each vector of a row which lanes are below `count`."""
        return [lane_mask(f, self.lanes, j * self.lanes, count) for j in range(self.vectors)]

    @property
    def block_columns(self) -> int:
        """Columns of a packed block of B."""
        return NC * 4 // self.itemsize

    @property
    def is_float(self) -> bool:
        return self.kind in ("float", "double")

    @property
    def masks_stores(self) -> bool:
        """See Target."""
        return self.lanes * self.itemsize >= 64

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


def product_tile(kind: str, vector_bytes: int) -> Tile:
    """The tile for an accumulator type on a machine with `vector_bytes`-wide registers (64: 32
    registers; 32, 16: 16)."""
    itemsize = {"float": 4, "double": 8, "i32": 4, "i64": 8}[kind]
    lanes = vector_bytes // itemsize
    registers = 28 if vector_bytes >= 64 else 12
    rows = min(14 if vector_bytes >= 64 else 6, lanes)  # a packed row of A is one vector
    return Tile(kind, itemsize, lanes, rows, registers // rows)


@frozen
class Source:
    """How elements of an operand become accumulators: LLVM type in memory, and the expressions that
    convert a value `{v}`."""

    name: str
    kind: str
    itemsize: int
    # {s} is the source's vector type, {d} the accumulator's, {i} and {f} i32 and float
    steps: tuple[str, ...] = ()


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


def vectors_of(f: Function, lanes: int, first: Int, end: Int) -> Iterator[tuple[Int, str]]:
    """A loop over the vectors of the elements [first, end), as (index, mask); whole ones have no
    mask ("")."""
    count = f.sub(end, first)
    whole = f.sub(end, f.rem(count, lanes))
    with f.loop(first, whole, lanes) as i:
        yield i, ""
    with f.when(f.icmp("slt", whole, end)):
        yield whole, lane_mask(f, lanes, whole, end)


def masked_load(f: Function, kind: str, lanes: int, pointer: str, mask: str) -> str:
    """The lanes that are on, or all where there is no mask ("")."""
    vector = f"<{lanes} x {kind}>"
    suffix = f"v{lanes}{KIND_SUFFIX[kind]}"
    if not mask:
        return f.load(vector, pointer)
    return f.op(
        f"call {vector} @llvm.masked.load.{suffix}.p0(ptr align {BITS[kind] // 8} {pointer},"
        f" <{lanes} x i1> {mask}, {vector} zeroinitializer)"
    )


def masked_store(
    f: Function,
    kind: str,
    lanes: int,
    value: str,
    pointer: str,
    mask: str,
) -> None:
    """Store the lanes that are on, or all where there is no mask (""). Where such a store is slow
    (see Target.masks_stores), whole vectors are stored without."""
    vector = f"<{lanes} x {kind}>"
    suffix = f"v{lanes}{KIND_SUFFIX[kind]}"
    align = BITS[kind] // 8
    if not mask:
        return f.store(vector, value, pointer)

    def some() -> None:
        f.do(
            f"call void @llvm.masked.store.{suffix}.p0({vector} {value}, ptr align {align}"
            f" {pointer}, <{lanes} x i1> {mask})"
        )

    if lanes >= 16 or lanes * align >= 64:
        return some()
    whole = f.op(f"call i1 @llvm.vector.reduce.and.v{lanes}i1(<{lanes} x i1> {mask})")
    f.choose(whole, lambda: f.store(vector, value, pointer), some)


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


def transposed(f: Function, t: Tile, block: list[str], group: int = 1) -> list[str]:
    """Transpose of as many vectors as one has groups of `group` elements, see
    compiler/llvm/emit.py."""
    return emit.transposed(f.op, t.kind, t.lanes, block, group)


def multiply_add(f: Function, t: Tile, a: str, b: str, c: str) -> str:
    if t.is_float:
        return f.op(
            f"call {t.vector} @llvm.fma.{t.suffix}({t.vector} {a}, {t.vector} {b}, {t.vector} {c})"
        )
    return f.op(f"add {t.vector} {c}, {f.op(f'mul {t.vector} {a}, {b}')}")


def multiply_pairs(f: Function, t: Tile, a: str, b: str, c: str) -> str:
    """AVX512-BF16: `c` and the products of pairs of neighbours of `a` and `b`, vectors of i16."""
    words = f"<{2 * t.lanes} x i16>"
    left, right = (f.op(f"bitcast {words} {v} to <32 x bfloat>") for v in (a, b))
    return f.op(
        f"call {t.vector} @llvm.x86.avx512bf16.dpbf16ps.512({t.vector} {c}, <32 x bfloat> {left},"
        f" <32 x bfloat> {right})"
    )


def splat(f: Function, kind: str, lanes: int, scalar: Int | float) -> str:
    vector = f"<{lanes} x {kind}>"
    v = f.op(f"insertelement {vector} poison, {kind} {scalar}, i64 0")
    return f.op(f"shufflevector {vector} {v}, {vector} poison, <{lanes} x i32> zeroinitializer")
