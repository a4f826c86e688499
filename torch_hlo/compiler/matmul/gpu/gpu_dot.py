"""Dots on a grid: an engine computes blocks of sums, a finish (gpu_epilogue.py) makes the result of
them.

| engine | for |
|---|---|
| gpu_gemv.py | few rows: bound by reading the matrix |
| gpu_matrix.py | types that the matrix units of NVIDIA GPUs take |
| gpu_fma.py | the rest, and f32 exactly |

An engine has `blocks` (what a group of threads computes), `kind` (register type of sums),
`threads`, `shared` (bytes of shared memory given at launch), `resident` (program.Group), `name`,
`width(most)`: neighbouring columns it stores at a time; `write(f, place, lanes, store)` writes the
kernel into `f` and returns definitions of shared memory; `maps(batch)`: for the copy engine. It is
all that its code depends on but the finish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as with_fields
from typing import Protocol

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    Computation,
    Dims,
    Instruction,
    Size,
    fixed,
)

from ...codegen import CodegenError
from ...gpu.gpu_program import (
    MAP,
    GpuProgram,
    TensorMap,
)
from ...gpu.gpu_writer import GpuWriter
from ...gpu.target import GpuTarget, machine
from ...llvm import Int
from ...llvm.scalar import STORAGE
from ...thresholds import FMA_PART_DEPTH
from ..dot import (
    Output,
    emit_tree,
    emit_widened,
    narrow,
    operands_converted,
    parts_of_output,
)
from ..epilogue import expression
from ..product import (
    ACCUMULATORS,
    SOURCES,
    Product,
    product,
    rewritten,
    roles,
    types_of,
)
from . import gpu_blocks as blocks, gpu_fma, gpu_gemv, gpu_matrix
from .gpu_blocks import REGISTER_TYPE, SPLITS, Blocks, Place as BlockPlace, Store, divides, element
from .gpu_epilogue import Fused, Plain


class Engine(Protocol):
    """See the module. Engines are compared and hashed: equal ones share code."""

    @property
    def blocks(self) -> Blocks: ...
    @property
    def kind(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def shared(self) -> int: ...
    @property
    def resident(self) -> int: ...
    @property
    def name(self) -> str: ...
    def width(self, most: int) -> int: ...
    def maps(self, batch: int) -> tuple[TensorMap, ...]: ...
    def write(self, f: GpuWriter, at: BlockPlace, lanes: int, store: Store) -> str: ...


@frozen
class Fma:
    """Multiply-adds. `forms`: of each operand (k is contiguous, elements loaded at a time)."""

    blocks: Blocks
    kind: str
    dtypes: tuple[str, str]
    forms: tuple[tuple[bool, int], tuple[bool, int]]
    threads = gpu_fma.THREADS
    shared = 0

    @property
    def resident(self) -> int:
        """Two groups hide each other's waits; 64-bit sums, and operands that are walked in two
        ways, need more registers than that leaves."""
        return 2 if self.kind in ("float", "i32") and self.forms[0] == self.forms[1] else 0

    @property
    def name(self) -> str:
        forms = "".join(f"{'k' if along else 'r'}{n}" for along, n in self.forms)
        return f"dot_{self.blocks.m}_{self.dtypes[0]}_{self.dtypes[1]}_{self.kind}_{forms}"

    def width(self, most: int) -> int:
        return min(most, gpu_fma.QUAD)

    def maps(self, batch: int) -> tuple[TensorMap, ...]:
        return ()

    def write(self, f: GpuWriter, at: BlockPlace, lanes: int, store: Store) -> str:
        def operand(
            side: int,
            pointer: str,
            offset: Int,
            size: str,
            first: Int,
            strides: tuple[str, str],
        ) -> gpu_fma.Operand:
            along_k, together = self.forms[side]
            free = 1 if not along_k and together > 1 else strides[0]
            deep = 1 if along_k else strides[1]

            def values(row: Int, k: Int, count: int) -> list[str]:
                return element(
                    f,
                    self.dtypes[side],
                    self.kind,
                    pointer,
                    f.add(offset, f.muladd(row, free, f.mul(k, deep))),
                    count,
                )

            return gpu_fma.Operand(values, size, first, along_k, together)

        block = gpu_fma.Block(f, self.kind, self.blocks.m)
        a = operand(0, "%A", at.a, "%m", at.row, ("%a_m", "%a_k"))
        b = operand(1, "%B", at.b, "%n", at.column, ("%b_n", "%b_k"))
        block.write(a, b, at.k, store, lanes)
        return block.declarations()


def _fma(target: GpuTarget, p: Product, dtypes: tuple[str, str], kind: str) -> Fma:
    """Blocks large enough to read shared memory seldom, small enough to give every multiprocessor
    one; else k is cut, too."""
    static = all(isinstance(v, int) for v in (p.m, p.n, p.k))
    m, n, batch = (v if isinstance(v, int) else gpu_matrix.USUAL for v in (p.m, p.n, p.count))
    cores = machine(target).cores

    def groups(side: int) -> int:
        return -(-m // side) * -(-n // side) * batch

    side = 128 if min(m, n) > 64 and groups(128) >= cores else 64
    fitting = [
        s
        for s in SPLITS
        if static and fixed(p.k) >= s * FMA_PART_DEPTH and groups(side) * s <= 2 * cores
    ]
    forms = _form(target, p, dtypes[0], 0), _form(target, p, dtypes[1], 1)
    return Fma(Blocks(side, side, max(fitting, default=1), 16), kind, dtypes, forms)


def _form(target: GpuTarget, p: Product, dtype: str, side: int) -> tuple[bool, int]:
    """(k is contiguous, elements loaded at a time) of operand 0 or 1."""
    rows, strides = ((p.m, p.a), (p.n, p.b))[side]
    along_k = strides[1] == 1
    inner, outer = (p.k, strides[0]) if along_k else (rows, strides[1])
    whole = 1 in strides and divides(
        gpu_fma.QUAD, [inner, outer, *(entry[1 + side] for entry in p.batch)]
    )
    return along_k, gpu_fma.QUAD if whole and target.lanes(8 * STORAGE[dtype].bytes) > 1 else 1


# -- steps
def dot(program: GpuProgram, x: Instruction) -> None:
    """A dot; element types that no engine takes, and operands without two strides, are
    rewritten."""
    if x.size == 0 or _emit(program, x):
        return
    simpler = rewritten(x)
    if simpler is not None:
        return emit_tree(program, simpler, x.operands, x)
    if ACCUMULATORS[x.dtype][1] == x.dtype:
        types = ", ".join(o.dtype for o in x.operands)
        raise CodegenError(f"dot({types}) -> {x.shape}: no engine on GPUs takes it; convert first")
    _emit_output(program, x, narrow(x))


def fusion(program: GpuProgram, x: Instruction) -> None:
    """A fusion of kind output around a dot."""
    _emit_output(program, x, x["calls"])


def _emit_output(program: GpuProgram, x: Instruction, body: Computation) -> None:
    o = parts_of_output(program, x, body, "dot")
    if o.outer.size == 0:
        return
    with operands_converted(program, x, o.outer):
        if not _emit_fused(program, o):
            emit_widened(program, o)


def _emit(program: GpuProgram, x: Instruction) -> bool:
    """A dot as kernels, if there is an engine for it."""
    found = _chosen(program, x)
    if found is None or x.kind == "p":
        return False
    p, engine, swapped = found
    operands = [program.pointer(o) for o in x.operands]
    operands = operands[::-1] if swapped else operands
    compute(program, p, engine, x.dtype, operands, program.pointer(x), x.size)
    return True


def compute(
    program: GpuProgram,
    p: Product,
    engine: Engine,
    dtype: str,
    operands: Sequence[str],
    result: str,
    total: Size,
) -> None:
    """Launch the kernels of a product of two arrays; `total`: elements of the result."""
    wide = REGISTER_TYPE[engine.kind]
    if engine.blocks.parts == 1:
        return _launch(program, p, engine, Plain(dtype), [*operands, result])
    sums = program.at(program.scratch(STORAGE[wide].bytes * total * engine.blocks.parts))
    _launch(program, p, engine, Plain(wide), [*operands, sums], total)
    blocks.add_parts(program, sums, result, total, engine.blocks.parts, wide, dtype)


def _emit_fused(program: GpuProgram, o: Output) -> bool:
    """One kernel of a fusion of kind output; False where the product is rewritten or cut in k, or
    the expression gathers."""
    found = _chosen(program, o.outer)
    if found is None:
        return False
    p, engine, swapped = found
    if engine.blocks.parts > 1 and o.body.root.op == "convert" and o.body.root.operand is o.inner:
        # the kernel that adds the parts rounds the sums
        operands = [program.pointer(x) for x in o.outer.operands][:: -1 if swapped else 1]
        result = program.at(o.results[0])
        compute(program, p, engine, o.body.root.dtype, operands, result, o.outer.size)
        return True
    if swapped or engine.blocks.parts > 1:
        return False
    wanted = o.body, o.inner, len(roles(o.outer)[2][1]), REGISTER_TYPE[engine.kind]
    e = program.once(("expression", *wanted), lambda: expression(*wanted))
    if e is None:
        return False
    read = [o.operands[o.body.params.index(leaf)] for leaf in e.leaves]
    arrays = [program.at(q) for q in (*read, *o.results)]
    written = [*program.spans(tuple(o.results))]
    apart = not any(
        s.word == w.word and s.overlaps(w) for s in program.spans(tuple(read)) for w in written
    )
    _launch(
        program,
        p,
        engine,
        Fused(e, apart),
        [*(program.pointer(x) for x in o.outer.operands), arrays[-1]],
        more=arrays,
    )
    return True


def _chosen(program: GpuProgram, x: Instruction) -> tuple[Product, Engine, bool] | None:
    """(the strided product, its engine, whether the operands changed places), or None."""
    p = product(x)
    dtypes = types_of(x)
    result = x.dtype
    if p is None or p.k == 0 or x.kind == "c":
        return None
    swapped = p.n == 1 and p.m != 1
    if swapped:
        p = with_fields(
            p,
            m=1,
            n=p.m,
            a=p.b,
            b=p.a,
            c_m=p.m,
            batch=tuple((n, b, a, c) for n, a, b, c in p.batch),
        )
        dtypes = dtypes[1], dtypes[0]
    kind = (
        ACCUMULATORS[result][0]
        if result in ACCUMULATORS and all((d, ACCUMULATORS[result][0]) in SOURCES for d in dtypes)
        else None
    )
    target = program.target
    few = gpu_gemv.engine(target, p, dtypes, kind) if kind else None
    found: list[Engine] = [few] if few else [*gpu_matrix.engines(target, p, dtypes, result)]
    if kind and not found:
        found = [_fma(target, p, dtypes, kind)]
    return (p, found[0], swapped) if found else None


def _launch(
    program: GpuProgram,
    p: Product,
    engine: Engine,
    finish: Plain | Fused,
    pointers: list[str],
    part: Size = 0,
    more: Sequence[str] = (),
) -> None:
    lanes = engine.width(
        blocks.lanes_of(p, finish.bytes) if program.target.vector_bytes == 16 else 1
    )
    name, sizes = program.made(_write, engine, finish, lanes, len(p.batch))
    blocks.launch(
        program,
        name,
        p,
        engine.blocks,
        pointers,
        part,
        program.arguments(more, sizes),
    )


def _write(
    program: GpuProgram,
    engine: Engine,
    finish: Plain | Fused,
    lanes: int,
    batch: int,
) -> tuple[str, Dims]:
    """(the group function of a product, see blocks.writer; the symbolic sizes that `finish` wants
    last)."""
    f = blocks.writer(
        program,
        f"{engine.name}_{finish.name}_{lanes}",
        batch,
        engine.blocks.parts,
        finish.parameters,
    )
    at = blocks.place(f, engine.blocks, batch)
    shared = engine.write(f, at, lanes, finish.store(f, at, engine.kind))
    f.unit.declare(program)
    maps = engine.maps(batch)
    f.params += [(MAP, f"map{i}") for i in range(len(maps))]
    return program.group_function(
        f.name,
        shared + f.text(),
        engine.threads,
        engine.shared,
        maps,
        engine.resident,
    ), tuple(finish.sizes)
