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
from torch_hlo.compiler.codegen.epilogue import expression
from torch_hlo.compiler.codegen.gpu import blocks, gemm, wgmma
from torch_hlo.compiler.codegen.gpu.blocks import SPLITS, Blocks, divides
from torch_hlo.compiler.codegen.gpu.finish import Fused, Plain
from torch_hlo.compiler.codegen.gpu.gemm import Tile
from torch_hlo.compiler.codegen.gpu.panel import LINE, Operand
from torch_hlo.compiler.codegen.gpu.ptx import MATRIX_UNITS, WARPGROUP, MatrixUnit
from torch_hlo.compiler.codegen.gpu.target import machine
from torch_hlo.compiler.codegen.program import Place as MemoryPlace
from torch_hlo.hlo.dim import Size
from torch_hlo.hlo.ir import Computation, Instruction
from torch_hlo.hlo.shape import DTYPES

# (block, share of the matrix rate that its warps reach when nothing else is in the way: larger warps read less shared memory per product)
TILES: tuple[tuple[Tile, float], ...] = (
    (Tile(128, 256, 64, 64, 3), 1.0), (Tile(256, 128, 64, 64, 3), 1.0), (Tile(128, 128, 64, 32, 4), 0.9), (Tile(128, 128, 64, 32, 3), 0.88),
    (Tile(128, 64, 64, 32, 4), 0.75), (Tile(64, 128, 32, 64, 4), 0.75), (Tile(64, 64, 32, 32, 4), 0.6), (Tile(32, 128, 32, 32, 4), 0.5),
    (Tile(32, 64, 32, 32, 4), 0.4),
)  # fmt: skip
# On sm_90a: warpgroups multiply from shared memory.
HOPPER_TILES: tuple[tuple[Tile, float], ...] = (
    (Tile(128, 256, 64, 256, 4, WARPGROUP), 0.95), (Tile(256, 128, 128, 128, 4, WARPGROUP), 0.95), (Tile(128, 128, 64, 128, 5, WARPGROUP), 0.85),
    (Tile(128, 64, 64, 64, 5, WARPGROUP), 0.65), (Tile(64, 128, 64, 64, 5, WARPGROUP), 0.65), (Tile(64, 256, 64, 128, 4, WARPGROUP), 0.75),
    (Tile(64, 64, 64, 64, 6, WARPGROUP), 0.45),
)  # fmt: skip
SUMS = {"float": "f32", "i32": "s32"}  # accumulators as an array
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
    for tile, share in tiles(target):
        if tile.shared > have.shared or not _fits(tile, forms):
            continue
        across, down = -(-n // tile.n), -(-m // tile.m)
        for parts in (1, *(s for s in SPLITS if all(isinstance(v, int) for v in (p.m, p.n, p.k)) and depth >= s * LEAST_DEPTH)):
            groups = across * down * batch * parts
            resident = min(max(1, have.shared // tile.shared), max(1, 1024 // tile.threads), max(1, 65536 // (tile.threads * (tile.registers + 64))))
            each = -(-groups // have.cores)  # blocks that a core goes through; those resident together hide each other's start and end
            slices = -(-depth // (parts * LINE))
            compute = each * (tile.m * tile.n * slices * LINE / (have.rate * share * (0.6 if tile.team == 1 and target.cpu == "sm_90a" else 1)) + 1500 / min(resident, each))
            moved = (min(across, 8) * m + min(down, 8) * n) * depth / have.bandwidth + m * n * 8 * (parts > 1) * (parts + 1) / have.bandwidth
            time = max(compute, batch * moved) + (3000 if parts > 1 else 0)
            if best is None or time < best[0] * 0.999:
                best = time, Plan(tile, *(Operand(u, along, rows, width) for (u, along, width), rows in zip(forms, (tile.m, tile.n), strict=True)), parts)
    return best[1] if best else None


def tiles(target) -> tuple[tuple[Tile, float], ...]:
    return TILES


def _fits(tile: Tile, forms) -> bool:
    """Whether operands whose rows are contiguous fill lines of shared memory, and warps whole fragments of reordered rows. Warpgroups transpose
    16-bit types only."""
    if tile.team > 1 and not all(along or unit.itemsize == 2 for unit, along, _ in forms):
        return False
    return all(along or rows * unit.itemsize % LINE == 0 and (unit.itemsize != 4 or warp % 32 == 0)
               for (unit, along, _), rows, warp in zip(forms, (tile.m, tile.n), (tile.warp_m, tile.warp_n), strict=True))


def emit(program, x: Instruction) -> bool:
    """Launch the kernel of a dot; False when it is not for matrix units."""
    found = _planned(program, x)
    if found is None:
        return False
    p, cut = found
    wide = SUMS[cut.a.unit.accumulator]
    operands, result, total = [program.pointer(o) for o in x.operands], program.pointer(x), x.shape.size
    if cut.parts == 1:
        _launch(program, p, cut, Plain(x.shape.dtype), [*operands, result])
    else:
        sums = program.at(program.scratch(4 * total * cut.parts))
        _launch(program, p, cut, Plain(wide), [*operands, sums], total)
        blocks.add_parts(program, sums, result, total, cut.parts, wide, x.shape.dtype)
    return True


def emit_output(program, body: Computation, inner: Instruction, outer: Instruction, columns: int, operands: Sequence[MemoryPlace],
                results: Sequence[MemoryPlace]) -> bool:
    """Launch the kernel of a fusion of kind output (dot.emit_output); False when its product is not for matrix units, or is better cut in k."""
    found = _planned(program, outer)
    if found is None or found[1].parts > 1:
        return False
    p, cut = found
    e = program.once(("expression", body, inner, columns), lambda: expression(body, inner, columns, SUMS[cut.a.unit.accumulator]))
    if e is None:
        return False
    arrays = [program.at(q) for q in (*(operands[body.params.index(leaf)] for leaf in e.leaves), *results)]
    _launch(program, p, cut, Fused(e), [*(program.pointer(o) for o in outer.operands), arrays[-1]], more=arrays)
    return True


def _planned(program, x: Instruction) -> tuple[Strided, Plan] | None:
    pair = units(program.target, [o.shape.dtype for o in x.operands], x.shape.dtype)
    p = product(x)
    if pair is None or p is None or p.k == 0:
        return None
    batch = blocks.count(p)
    found = plan(program.target, p, pair, batch if isinstance(batch, int) else 8)
    return found and (p, found)


def _launch(program, p: Strided, found: Plan, finish: Plain | Fused, pointers: list[str], part: Size = 0, more: Sequence[str] = ()) -> None:
    lanes = blocks.lanes_of(p, finish.bytes)
    cut = Blocks(found.tile.m, found.tile.n, found.parts, found.a.depth)
    key = ("matrix product", found, finish, lanes, len(p.batch))
    name, sizes = program.once(key, lambda: _write(program, found, cut, finish, lanes, len(p.batch)))
    blocks.launch(program, name, p, cut, pointers, part, [*(f"ptr {q}" for q in more), *(f"i64 {program.size(n)}" for n in sizes)])


def _write(program, found: Plan, cut: Blocks, finish: Plain | Fused, lanes: int, batch: int) -> tuple[str, tuple[Size, ...]]:
    """(the group function of a product, see blocks.writer; the symbolic sizes that `finish` wants last)."""
    tile, a, b = found.tile, found.a, found.b
    f = blocks.writer(program, f"dot_{tile.name}_{a.name}_{b.name}_{finish.name}_{lanes}", batch, cut.parts, finish.parameters)
    at = blocks.place(f, cut, batch)
    bases = [f.gep("i8", f"%{q}", f.mul(offset, o.unit.itemsize)) for q, offset, o in (("A", at.a, a), ("B", at.b, b))]
    kernel = wgmma.Product if tile.team > 1 else gemm.Product
    kernel(f, tile, a, b, lanes).write(*bases, at.k, at.row, at.column, finish.store(f, at, a.unit.accumulator))
    f.unit.declare(program)
    return program.group_function(f.name, gemm.Product.declarations() + f.text(), tile.threads, tile.shared), tuple(finish.sizes)
