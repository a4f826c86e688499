"""Dots on the matrix units of NVIDIA GPUs: which ones, with which blocks, and their launch.

| operands | unit | sums |
|---|---|---|
| bf16, f16 | m16n8k16 | f32 |
| f32, where the target allows TF32 | m16n8k8 | f32 |
| f8e4m3fn, f8e5m2, mixed (8.9 and later) | m16n8k32 | f32 |
| s8, u8, mixed | m16n8k32 | s32 |

Everything else, and operands without a contiguous dimension, goes to the scalar kernels (dot.py).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_hlo.compiler.codegen.dot import Product as Strided
from torch_hlo.compiler.codegen.dot import product
from torch_hlo.compiler.codegen.function import Int
from torch_hlo.compiler.codegen.gpu import blocks, gemm
from torch_hlo.compiler.codegen.gpu.blocks import SPLITS, Blocks, divides
from torch_hlo.compiler.codegen.gpu.gemm import Tile
from torch_hlo.compiler.codegen.gpu.panel import LINE, Operand
from torch_hlo.compiler.codegen.gpu.ptx import MATRIX_UNITS, MatrixUnit
from torch_hlo.compiler.codegen.gpu.target import machine
from torch_hlo.compiler.codegen.scalar import STORAGE
from torch_hlo.hlo.dim import Size
from torch_hlo.hlo.ir import Instruction
from torch_hlo.hlo.shape import DTYPES

# (block, share of the matrix rate that its warps reach when nothing else is in the way: larger warps read less shared memory per product)
TILES: tuple[tuple[Tile, float], ...] = (
    (Tile(128, 256, 64, 64, 3), 1.0), (Tile(256, 128, 64, 64, 3), 1.0), (Tile(128, 128, 64, 32, 4), 0.9), (Tile(128, 128, 64, 32, 3), 0.88),
    (Tile(128, 64, 64, 32, 4), 0.75), (Tile(64, 128, 32, 64, 4), 0.75), (Tile(64, 64, 32, 32, 4), 0.6), (Tile(32, 128, 32, 32, 4), 0.5),
    (Tile(32, 64, 32, 32, 4), 0.4),
)  # fmt: skip
USUAL = 512  # a size that is not known
LEAST_DEPTH = 512  # bytes of k per part


def units(target, dtypes: Sequence[str], result: str) -> tuple[MatrixUnit, MatrixUnit] | None:
    """The matrix units for operands of these types and a result, or None."""
    if target.family.name != "nvptx":
        return None
    names = ["tf32" if d == "f32" and target.tf32 else d for d in dtypes]
    if any(d not in MATRIX_UNITS for d in names):
        return None
    a, b = (MATRIX_UNITS[d] for d in names)
    if a.itemsize != b.itemsize or a.accumulator != b.accumulator or a.itemsize > 1 and a != b or target.capability < max(a.oldest, b.oldest):
        return None
    kind = DTYPES[result].kind
    fits = kind == "f" and DTYPES[result].bits <= 32 if a.accumulator == "float" else kind in "su" and DTYPES[result].bits in (8, 16, 32)
    return (a, b) if fits else None


@dataclass(frozen=True, slots=True)
class Plan:
    """How a product is cut: its block, the operands' forms, parts of k."""

    tile: Tile
    a: Operand
    b: Operand
    parts: int


def plan(target, p: Strided, pair: tuple[MatrixUnit, MatrixUnit], batch: int) -> Plan | None:
    """The plan with the least estimated time; None when an operand has no contiguous dimension. `batch`: number of products."""
    forms = []
    for unit, strides, own in zip(pair, (p.a, p.b), (1, 2), strict=True):
        if 1 not in strides:
            return None
        along_k = strides[1] == 1
        others = [strides[0] if along_k else strides[1], *(entry[own] for entry in p.batch)]
        width = next(w for w in (16, 8, 4, 2, 1) if divides(w, [s * unit.itemsize for s in others]))
        forms.append((unit, along_k, max(width, unit.itemsize)))
    best: tuple[float, Plan] | None = None
    m, n, k = (s if isinstance(s, int) else USUAL for s in (p.m, p.n, p.k))
    depth = k * pair[0].itemsize
    have = machine(target)
    for tile, share in TILES:
        if tile.shared > have.shared or not _fits(tile, forms):
            continue
        across, down = -(-n // tile.n), -(-m // tile.m)
        for parts in (1, *(s for s in SPLITS if all(isinstance(v, int) for v in (p.m, p.n, p.k)) and depth >= s * LEAST_DEPTH)):
            groups = across * down * batch * parts
            resident = min(max(1, have.shared // tile.shared), max(1, 1024 // tile.threads), max(1, 65536 // (tile.threads * (tile.registers + 64))))
            each = -(-groups // have.cores)  # blocks that a core goes through; those resident together hide each other's start and end
            slices = -(-depth // (parts * LINE))
            compute = each * (tile.m * tile.n * slices * LINE / (have.rate * share) + 1500 / min(resident, each))
            moved = (min(across, 8) * m + min(down, 8) * n) * depth / have.bandwidth + m * n * 8 * (parts > 1) * (parts + 1) / have.bandwidth
            time = max(compute, batch * moved) + (3000 if parts > 1 else 0)
            if best is None or time < best[0] * 0.999:
                best = time, Plan(tile, *(Operand(u, along, rows, width) for (u, along, width), rows in zip(forms, (tile.m, tile.n), strict=True)), parts)
    return best[1] if best else None


def _fits(tile: Tile, forms) -> bool:
    """Whether operands whose rows are contiguous fill lines of shared memory, and warps whole fragments of reordered rows."""
    return all(along or rows * unit.itemsize % LINE == 0 and (unit.itemsize != 4 or warp % 32 == 0)
               for (unit, along, _), rows, warp in zip(forms, (tile.m, tile.n), (tile.warp_m, tile.warp_n), strict=True))


def emit(program, x: Instruction) -> bool:
    """Launch the kernel of a dot; False when it is not for matrix units."""
    pair = units(program.target, [o.shape.dtype for o in x.operands], x.shape.dtype)
    p = product(x)
    if pair is None or p is None or p.k == 0:
        return False
    batch = blocks.count(p)
    found = plan(program.target, p, pair, batch if isinstance(batch, int) else 8)
    if found is None:
        return False
    dtype = x.shape.dtype
    wide = {"float": "f32", "i32": "s32"}[pair[0].accumulator]
    pointers, result, total = [program.pointer(o) for o in x.operands], program.pointer(x), x.shape.size
    if found.parts == 1:
        _launch(program, p, found, dtype, [*pointers, result], 0)
    else:
        sums = program.at(program.scratch(4 * total * found.parts))
        _launch(program, p, found, wide, [*pointers, sums], total)
        blocks.add_parts(program, sums, result, total, found.parts, wide, dtype)
    return True


def _launch(program, p: Strided, found: Plan, dtype: str, pointers: list[str], part: Size) -> None:
    lanes = blocks.lanes_of(p, STORAGE[dtype].bytes)
    cut = Blocks(found.tile.m, found.tile.n, found.parts, found.a.depth)
    key = ("matrix product", found, dtype, lanes, len(p.batch))
    name = program.once(key, lambda: _write(program, found, cut, dtype, lanes, len(p.batch)))
    blocks.launch(program, name, p, cut, pointers, part)


def _write(program, found: Plan, cut: Blocks, dtype: str, lanes: int, batch: int) -> str:
    """The group function of a product (see blocks.writer)."""
    tile, a, b = found.tile, found.a, found.b
    f = blocks.writer(program, f"dot_{tile.name}_{a.name}_{b.name}_{dtype}_{lanes}", batch, cut.parts)
    at = blocks.place(f, cut, batch)
    bases = [f.gep("i8", f"%{q}", f.mul(offset, o.unit.itemsize)) for q, offset, o in (("A", at.a, a), ("B", at.b, b))]

    def store(i: Int, j: Int, width: int, sums: str) -> None:
        blocks.store_sums(f, dtype, a.unit.accumulator, width, sums, "%C", f.add(at.c, f.add(f.mul(i, "%c_m"), j)))

    gemm.Product(f, tile, a, b, lanes).write(*bases, at.k, at.row, at.column, store)
    f.unit.declare(program)
    return program.group_function(f.name, gemm.Product.declarations() + f.text(), tile.threads, tile.shared)
