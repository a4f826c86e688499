"""Products on the matrix units of NVIDIA GPUs: which ones, and with which blocks.

| operands | unit | sums |
|---|---|---|
| bf16, f16 | m16n8k16 | f32 |
| f32, where the target allows TF32 | m16n8k8 | f32 |
| f8e4m3fn, f8e5m2, also mixed (8.9 and later) | m16n8k32 | f32 |
| s8, u8 | m16n8k32 | s32 |

Everything else, and operands without a contiguous dimension, goes to gpu_fma.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import DTYPES, ceildiv

from ...gpu.gpu_program import TensorMap
from ...gpu.gpu_writer import GpuWriter
from ...gpu.ptx import MATRIX_UNITS, WARPGROUP, MatrixUnit
from ...gpu.target import GpuTarget, machine
from ...thresholds import (
    ADD_PARTS_NS,
    BAND,
    BLOCK_NS,
    CACHE_BYTES,
    CACHED_BYTES,
    MATRIX_PART_BYTES,
    WARP_SHARE,
)
from ..product import Product, hint
from . import gpu_blocks as blocks, gpu_gemm, gpu_wgmma
from .gpu_blocks import SPLITS, Blocks, Place, Store, divides
from .gpu_gemm import Tile
from .gpu_panel import LINE, Operand

# (block, share of the matrix rate that its warps reach when nothing else is in the way: larger
# warps read less shared memory per product)
TILES: tuple[tuple[Tile, float], ...] = (
    (Tile(128, 256, 64, 64, 3), 1.0),
    (Tile(256, 128, 64, 64, 3), 1.0),
    (Tile(128, 128, 64, 32, 4), 0.9),
    (Tile(128, 128, 64, 32, 3), 0.88),
    (Tile(128, 64, 64, 32, 4), 0.75),
    (Tile(64, 128, 32, 64, 4), 0.75),
    (Tile(64, 64, 32, 32, 4), 0.6),
    (Tile(32, 128, 32, 32, 4), 0.5),
    (Tile(32, 64, 32, 32, 4), 0.4),
)
# On sm_90a: warpgroups multiply from shared memory.
HOPPER_TILES: tuple[tuple[Tile, float], ...] = (
    (Tile(128, 256, 64, 256, 4, WARPGROUP), 0.85),
    (Tile(256, 128, 128, 128, 4, WARPGROUP), 0.83),
    (Tile(128, 192, 64, 192, 5, WARPGROUP), 0.85),
    (Tile(128, 128, 64, 128, 5, WARPGROUP), 0.8),
    (Tile(128, 64, 64, 64, 5, WARPGROUP), 0.7),
    (Tile(64, 128, 64, 64, 5, WARPGROUP), 0.7),
    (Tile(64, 256, 64, 128, 4, WARPGROUP), 0.8),
    (Tile(64, 64, 64, 64, 6, WARPGROUP), 0.6),
)
USUAL = 512  # a size that is not known


def units(
    target: GpuTarget, dtypes: Sequence[str], result: str
) -> tuple[MatrixUnit, MatrixUnit] | None:
    """The matrix units for operands of these types and a result, or None."""
    names = ["tf32" if d == "f32" and target.tf32 else d for d in dtypes]
    if any(d not in MATRIX_UNITS for d in names):
        return None
    a, b = (MATRIX_UNITS[d] for d in names)
    if (
        a.itemsize != b.itemsize
        or a.accumulator != b.accumulator
        or a.itemsize > 1
        and a != b
        or target.capability < max(a.oldest, b.oldest)
    ):
        return None
    kind = DTYPES[result].kind
    fits = (
        kind == "f" and DTYPES[result].bits <= 32
        if a.accumulator == "float"
        else kind in "su" and DTYPES[result].bits in (8, 16, 32)
    )
    return (a, b) if fits else None


@frozen
class Matrix:
    """An engine (see gpu_dot.py): a tile, and the operands' forms. `bulk`: Hopper's
    copy engine copies."""

    blocks: Blocks
    tile: Tile
    a: Operand
    b: Operand
    bulk: bool = False
    resident = 0

    @property
    def kind(self) -> str:
        return self.a.unit.accumulator

    @property
    def threads(self) -> int:
        return self.tile.threads

    @property
    def shared(self) -> int:
        return self.tile.shared + 8 * self.tile.stages * self.bulk

    @property
    def name(self) -> str:
        return f"dot_{'bulk_' * self.bulk}{self.tile.name}_{self.a.name}_{self.b.name}"

    def width(self, most: int) -> int:
        return most

    def write(self, f: GpuWriter, at: Place, lanes: int, store: Store) -> str:
        bases = [
            f.gep("i8", f"%{q}", f.mul(offset, o.unit.itemsize))
            for q, offset, o in (("A", at.a, self.a), ("B", at.b, self.b))
        ]
        kind = (
            gpu_gemm.Product
            if self.tile.team == 1
            else gpu_wgmma.EngineProduct
            if self.bulk
            else gpu_wgmma.Product
        )
        kind(f, self.tile, self.a, self.b, lanes).write(at, bases, store)
        return kind.declarations()

    def maps(self, batch: int) -> tuple[TensorMap, ...]:
        """What the copy engine is told of the operands: their contiguous dimension, the other one,
        those of the batch."""
        if not self.bulk:
            return ()

        def number(name: str) -> int:
            return blocks.argument(name, batch, self.blocks.parts)

        found = []
        for name, rows, o in (("a", "m", self.a), ("b", "n", self.b)):
            inner, outer = ("k", rows) if o.along_k else (rows, "k")
            sizes = (
                number(inner),
                number(outer),
                *(number(f"size{i}") for i in range(batch)),
            )
            strides = (
                number(f"{name}_{outer}"),
                *(number(f"batch_{name}{i}") for i in range(batch)),
            )
            box = (
                LINE // o.unit.itemsize,
                o.rows if o.along_k else o.depth,
                *[1] * batch,
            )
            found.append(TensorMap(number(name.upper()), o.unit.itemsize, sizes, strides, box))
        return tuple(found)


def engines(
    target: GpuTarget,
    p: Product,
    dtypes: Sequence[str],
    result: str,
    repeats: tuple[int, int] = (1, 1),
) -> list[Matrix]:
    """Engines for a product, the least estimated time first; none where no matrix unit takes the
    types, or an operand has no contiguous dimension.
    `repeats`: how often each operand has an element of its array."""
    pair = units(target, dtypes, result)
    if pair is None:
        return []
    forms = _forms(p, pair)
    if forms is None:
        return []
    depth = hint(p.k, USUAL) * pair[0].itemsize
    static = all(isinstance(v, int) for v in (p.m, p.n, p.k))
    splits = [s for s in SPLITS if static and depth >= s * MATRIX_PART_BYTES]
    found: list[tuple[float, Matrix]] = []
    for tile, share in tiles(target):
        if tile.shared > machine(target).shared or not _fits(tile, forms):
            continue
        (unit_a, along_a, width_a), (unit_b, along_b, width_b) = forms
        a = Operand(unit_a, along_a, tile.m, width_a)
        b = Operand(unit_b, along_b, tile.n, width_b)
        bulk = (
            tile.team > 1
            and all(o.width == 16 for o in (a, b))
            and len(p.batch) <= 3
            and all(0 not in entry[1:3] for entry in p.batch)
        )
        for parts in (1, *splits):
            time = _time(target, p, tile, share, parts, depth, repeats)
            found.append(
                (
                    time,
                    Matrix(Blocks(tile.m, tile.n, parts, a.depth), tile, a, b, bulk),
                )
            )
    return [engine for _, engine in sorted(found, key=lambda each: each[0])]


Form = tuple[MatrixUnit, bool, int]  # of an operand: unit, contiguous along k, bytes of a copy


def _forms(p: Product, pair: tuple[MatrixUnit, MatrixUnit]) -> list[Form] | None:
    """None where an operand has no contiguous dimension."""
    forms = []
    for unit, strides, own in zip(pair, (p.a, p.b), (1, 2), strict=True):
        if 1 not in strides:
            return None
        along_k = strides[1] == 1
        others = [
            strides[0] if along_k else strides[1],
            *(entry[own] for entry in p.batch),
        ]
        width = next(w for w in (16, 8, 4, 2, 1) if divides(w, [s * unit.itemsize for s in others]))
        forms.append((unit, along_k, max(width, unit.itemsize)))
    return forms


def _time(
    target: GpuTarget,
    p: Product,
    tile: Tile,
    share: float,
    parts: int,
    depth: int,
    repeats: tuple[int, int],
) -> float:
    """Estimated nanoseconds of a product in tiles that reach `share` of the rate, its `depth` bytes
    of k cut into `parts`."""
    have = machine(target)
    m, n, batch = (hint(s, USUAL) for s in (p.m, p.n, p.count))
    across = -(-n // tile.n)
    down = -(-m // tile.m)
    groups = across * down * batch * parts
    resident = min(
        max(1, have.shared // tile.shared),
        max(1, 1024 // tile.threads),
        max(1, 65536 // (tile.threads * (tile.registers + 64))),
    )
    # blocks that a core goes through; those resident together hide each other's start and end
    each = -(-groups // have.cores)
    slices = -(-depth // (parts * LINE))
    rate = have.rate * share * (WARP_SHARE if tile.team == 1 and target.cpu == "sm_90a" else 1)
    slice_ns = LINE * max(tile.m * tile.n / rate, (tile.m + tile.n) / CACHE_BYTES)
    compute = each * (slices * slice_ns + BLOCK_NS / min(resident, each))
    # groups that run together share what the cache has; a right operand that is larger than its
    # share comes once per band
    bands = ceildiv(down, BAND) if n * depth > CACHED_BYTES else 1
    lines = m / repeats[0] + n * bands / repeats[1]
    sums = m * n * 8 * (parts > 1) * (parts + 1) / have.bandwidth
    moved = lines * depth / have.bandwidth + sums
    return max(compute, batch * moved) + (ADD_PARTS_NS if parts > 1 else 0)


def tiles(target: GpuTarget) -> tuple[tuple[Tile, float], ...]:
    return (*HOPPER_TILES, *TILES) if target.cpu == "sm_90a" else TILES


def _fits(tile: Tile, forms: list[Form]) -> bool:
    """Whether operands whose rows are contiguous fill lines of shared memory, and warps whole
    fragments of reordered rows. Warpgroups transpose 16-bit types only."""
    if tile.team > 1 and not all(along or unit.itemsize == 2 for unit, along, _ in forms):
        return False
    return all(
        along or rows * unit.itemsize % LINE == 0 and (unit.itemsize != 4 or warp % 32 == 0)
        for (unit, along, _), rows, warp in zip(
            forms, (tile.m, tile.n), (tile.warp_m, tile.warp_n), strict=True
        )
    )
