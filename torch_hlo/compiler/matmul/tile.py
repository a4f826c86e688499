"""The register tile of a matrix kernel, and the vector operations that kernels make of it: loads
and stores under a mask, conversions of elements, multiply-add, transposes."""

from __future__ import annotations

from torch_hlo.frozen import frozen

from ..llvm import BITS, Function, Int, transposed
from ..thresholds import KC, LOCAL_GAP, NC


@frozen
class Tile:
    """The register block of a micro-kernel for accumulators of LLVM type `kind`: `rows` x
    (`vectors` * `lanes`)."""

    kind: str
    lanes: int
    rows: int
    vectors: int

    @property
    def itemsize(self) -> int:
        return BITS[self.kind] // 8

    @property
    def vector(self) -> str:
        return f"<{self.lanes} x {self.kind}>"

    @property
    def columns(self) -> int:
        return self.lanes * self.vectors

    def load(self, f: Function, pointer: str, mask: str = "") -> str:
        """A vector, see `Function.masked_load`."""
        return f.masked_load(self.kind, self.lanes, pointer, mask)

    def store(self, f: Function, value: str, pointer: str, mask: str = "") -> None:
        f.masked_store(self.kind, self.lanes, value, pointer, mask)

    def gep(self, f: Function, pointer: str, index: Int) -> str:
        return f.gep(self.kind, pointer, index)

    def fma(self, f: Function, a: str, b: str, c: str) -> str:
        return f.typed(self.kind, self.lanes).fma(a, b, c)

    def transposed(self, f: Function, block: list[str], group: int = 1) -> list[str]:
        """Transpose of as many vectors as one has groups of `group` elements."""
        return transposed(f.op, self.kind, self.lanes, block, group)

    def fma_pairs(self, f: Function, a: str, b: str, c: str) -> str:
        """AVX512-BF16: `c` and the products of pairs of neighbours of `a` and `b`, vectors of
        i16."""
        words = f"<{2 * self.lanes} x i16>"
        left, right = (f.op(f"bitcast {words} {v} to <32 x bfloat>") for v in (a, b))
        return f.op(
            f"call {self.vector} @llvm.x86.avx512bf16.dpbf16ps.512({self.vector} {c}, <32 x bfloat>"
            f" {left}, <32 x bfloat> {right})"
        )

    def masks(self, f: Function, count: Int) -> list[str]:
        """For each vector of a row which lanes are below `count`."""
        return [f.lane_mask(self.lanes, j * self.lanes, count) for j in range(self.vectors)]

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
    lanes = 8 * vector_bytes // BITS[kind]
    registers = 28 if vector_bytes >= 64 else 12
    rows = min(14 if vector_bytes >= 64 else 6, lanes)  # a packed row of A is one vector
    return Tile(kind, lanes, rows, registers // rows)


@frozen
class Source:
    """How elements of an operand become accumulators: LLVM type in memory, and the expressions that
    convert a value `{v}`."""

    name: str
    kind: str
    # {s} is the source's vector type, {d} the accumulator's, {i} and {f} i32 and float
    steps: tuple[str, ...] = ()

    @property
    def itemsize(self) -> int:
        return BITS[self.kind] // 8


def converted(f: Function, t: Tile, source: Source, value: str) -> str:
    s, d, i, single = (f"<{t.lanes} x {kind}>" for kind in (source.kind, t.kind, "i32", "float"))
    for step in source.steps:
        value = f.op(step.format(v=value, s=s, d=d, i=i, f=single))
    return value
