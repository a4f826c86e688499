"""Strided matrix products by multiply-adds: every element type that matrix units (matrix.py) do not take.

    C[m, n] = sum_k A[m, k] B[k, n]        exact: f32 sums are of f32 products
"""
from __future__ import annotations

from collections.abc import Sequence

from torch_hlo.compiler.codegen import scalar
from torch_hlo.compiler.codegen.dot import Product
from torch_hlo.compiler.codegen.function import Int
from torch_hlo.compiler.codegen.gpu import blocks, fma
from torch_hlo.compiler.codegen.gpu.blocks import SPLITS, Blocks, divides
from torch_hlo.compiler.codegen.gpu.target import machine
from torch_hlo.compiler.codegen.inline import Writer, load
from torch_hlo.compiler.codegen.scalar import STORAGE
from torch_hlo.hlo.dim import Size

REGISTER_TYPE = {"float": "f32", "double": "f64", "i32": "s32", "i64": "s64"}  # element type that values of a kind are loaded as
LEAST_DEPTH = 256  # of a part of k


def element(f: Writer, dtype: str, kind: str, pointer: str, at: Int, lanes: int = 1) -> list[str]:
    """`lanes` elements, aligned to their total, as values of register type `kind`."""
    storage, e = STORAGE[dtype], f.emit(lanes)
    if lanes == 1:
        value = load(f, dtype, pointer, at)
    else:
        value = scalar.decode(e, dtype, e.typed(storage.memory).load(f.gep(storage.memory, pointer, at), storage.bytes * lanes))
    value = value if storage.register == kind else scalar.convert(e, dtype, REGISTER_TYPE[kind], value)
    return [value] if lanes == 1 else [f.op(f"extractelement {e.type(kind)} {value}, i64 {i}") for i in range(lanes)]


def cut(target, p: Product) -> Blocks:
    """Blocks large enough to read shared memory seldom, small enough to give every multiprocessor one; else k is cut, too."""
    static = all(isinstance(v, int) for v in (p.m, p.n, p.k))
    m, n, batch = (v if isinstance(v, int) else 512 for v in (p.m, p.n, blocks.count(p)))
    cores = machine(target).cores

    def groups(side: int) -> int:
        return -(-m // side) * -(-n // side) * batch

    side = 128 if min(m, n) > 64 and groups(128) >= cores else 64
    fitting = [s for s in SPLITS if static and p.k >= s * LEAST_DEPTH and groups(side) * s <= 2 * cores]
    return Blocks(side, side, max(fitting, default=1), 16)


def emit_product(program, p: Product, kind: str, dtypes: tuple[str, str], pointers: Sequence[str]) -> None:
    """Launch the kernel of a strided product (dot.Product); `pointers` are A, B, C, whose elements are accumulators."""
    found, wide = cut(program.target, p), REGISTER_TYPE[kind]
    lanes = min(QUAD_BYTES // STORAGE[wide].bytes, blocks.lanes_of(p, STORAGE[wide].bytes), program.target.lanes(8 * STORAGE[wide].bytes))
    forms = tuple(_form(program.target, p, dtype, side) for side, dtype in enumerate(dtypes))
    key = ("grid product", found, kind, dtypes, len(p.batch), forms, lanes)
    name = program.once(key, lambda: _write(program, found, kind, dtypes, len(p.batch), forms, lanes))
    if found.parts == 1:
        return blocks.launch(program, name, p, found, pointers)
    total: Size = p.m * p.n * blocks.count(p)
    sums = program.at(program.scratch(STORAGE[wide].bytes * total * found.parts))
    blocks.launch(program, name, p, found, [*pointers[:2], sums], total)
    blocks.add_parts(program, sums, pointers[2], total, found.parts, wide, wide)


QUAD_BYTES = 16


def _form(target, p: Product, dtype: str, side: int) -> tuple[bool, int]:
    """(k is contiguous, elements loaded at a time) of operand 0 or 1."""
    rows, strides = ((p.m, p.a), (p.n, p.b))[side]
    along_k = strides[1] == 1
    inner, outer = (p.k, strides[0]) if along_k else (rows, strides[1])
    whole = 1 in strides and divides(fma.QUAD, [inner, outer, *(entry[1 + side] for entry in p.batch)])
    return along_k, fma.QUAD if whole and target.lanes(8 * STORAGE[dtype].bytes) > 1 else 1


def _write(program, found: Blocks, kind: str, dtypes: tuple[str, str], batch: int, forms, lanes: int) -> str:
    """The group function of a product (see blocks.writer)."""
    names = "".join(f"{'k' if along else 'r'}{n}" for along, n in forms)
    f = blocks.writer(program, f"dot_{found.m}_{dtypes[0]}_{dtypes[1]}_{kind}_{names}_{lanes}", batch, found.parts)
    at = blocks.place(f, found, batch)

    def operand(side: int, pointer: str, offset: Int, size: str, first: Int, strides: tuple[str, str]) -> fma.Operand:
        along_k, together = forms[side]
        free, deep = ("1" if not along_k and together > 1 else strides[0]), strides[1]

        def values(row: Int, k: Int, count: int) -> list[str]:
            across = row if free == "1" else f.mul(row, free)
            return element(f, dtypes[side], kind, pointer, f.add(offset, f.add(across, k if along_k else f.mul(k, deep))), count)

        return fma.Operand(values, size, first, along_k, together)

    def store(i: Int, j: Int, width: int, sums: str) -> None:
        blocks.store_sums(f, REGISTER_TYPE[kind], kind, width, sums, "%C", f.add(at.c, f.add(f.mul(i, "%c_m"), j)))

    block = fma.Block(f, kind, found.m)
    block.write(operand(0, "%A", at.a, "%m", at.row, ("%a_m", "%a_k")), operand(1, "%B", at.b, "%n", at.column, ("%b_n", "%b_k")), at.k, store, lanes)
    f.unit.declare(program)
    return program.group_function(f.name, block.declarations() + f.text(), fma.THREADS)
