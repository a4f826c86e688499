"""The function of parallel items of a product: which block of which product an item computes, and
the call of the kernel on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import ceildiv

from ..codegen import Program
from ..llvm import BITS, Function, Int, item_parameters
from ..thresholds import GEMV_STRIP
from . import blocking
from .amx_kernels import tiles
from .dot_plan import Plan
from .epilogue import Epilogue
from .gemm import Gemm
from .gemm_amx import AmxGemm
from .gemv import gemv_columns, gemv_rows
from .product import Product, hint
from .tile import Source, Tile


@frozen
class Finish:
    """An epilogue and the arguments that its engine is called with for it. `sums()`: an array for
    the accumulators, for engines that need one."""

    epilogue: Epilogue
    arguments: tuple[str, ...]
    sums: Callable[[], str]


def call_task(
    program: Program,
    name: str,
    p: Product,
    cut: blocking.Partition,
    pointers: list[str],
    finish: Finish | None,
    cost: float,
) -> None:
    """Call a task on all its items; `cost`: nanoseconds of one multiply-add."""
    sizes = [
        p.m,
        p.n,
        p.k,
        *p.a,
        *p.b,
        p.c_m,
        cut.tiles_each,
        cut.columns_each,
        cut.blocks_m,
        cut.blocks_n,
    ]
    for entry in p.batch:
        sizes += entry
    work = (
        hint(p.m, 512)
        * hint(p.n, 512)
        * hint(p.k, 512)
        / max(1, hint(cut.blocks_m, 1) * hint(cut.blocks_n, 1))
    )
    arguments = program.arguments(pointers, sizes)
    if finish is not None:
        arguments += finish.arguments
    program.parallel(
        name,
        arguments,
        p.count * cut.blocks_m * cut.blocks_n,
        cost=50 + work * cost,
    )


def prepack(program: Program, engine: Gemm, a: str, p: Product) -> str:
    """Pack all of A, in parallel; returns the pointer to it."""
    packed = program.at(program.scratch(engine.prepacked_bytes(p.m, p.k)))

    def write() -> str:
        name = engine.prepack()
        define(program, engine)
        return name

    name = program.once(("prepack", engine.name), write)
    program.parallel(
        name,
        program.arguments((a, packed), (p.m, *p.a, p.k)),
        ceildiv(p.m, engine.heights[0]),
        cost=0.12 * engine.heights[0] * hint(p.k, 1000),
    )
    return packed


def define(program: Program, engine: Gemm | AmxGemm) -> None:
    for name, text in engine.functions.items():
        program.function(name, text)


@frozen
class Block:
    """What an item computes: rows of a block of tiles times the columns [n0, n1). `first_row`: what
    number its row 0 has for the epilogue."""

    a: str
    b: str
    c: str
    row_block: Int
    n0: Int
    n1: Int
    first_row: Int


Call = Callable[[Function, Block], None]  # writes the call of the kernel for one block


def task(
    program: Program,
    t: Tile,
    sources: tuple[Source, Source],
    plan: Plan,
    p: Product,
    prepacked: bool,
    epilogue: Epilogue | None,
    local: bool,
) -> tuple[str, Gemm | None]:
    """The function of parallel items for a plan, and the engine it uses."""
    kinds = (t.kind if prepacked else sources[0].kind, sources[1].kind, t.kind)
    static_k = isinstance(p.k, int)
    if plan.kernel == "tiles":
        engine = Gemm(
            t,
            *sources,
            plan.form_a,
            plan.form_b,
            plan.heights,
            isinstance(p.m, int),
            prepacked,
            plan.even,
            epilogue,
            local,
            plan.unroll,
            plan.fetch,
        )
        return engine_task(program, engine, kinds, len(p.batch), static_k), engine
    left, right = sources
    name = f"gemv_{plan.kernel}_{t.suffix}_{left.name}_{right.name}_{plan.heights[0]}"
    make = {"rows": gemv_rows, "columns": gemv_columns}[plan.kernel]
    if (left.name, right.name, plan.kernel) == ("bf16", "bf16", "rows"):
        if program.target.has("avx512bf16") and t.lanes == 16:
            make = partial(gemv_rows, pairs=True)
            name = f"{name}_pairs"
    kernel = program.function(name, make(name, t, sources, plan.heights[0]).text())

    def call(f: Function, at: Block) -> None:
        _call_gemv(f, at, kernel, t, plan, epilogue)

    name = f"{kernel}_turned" if plan.turned else kernel
    return _items(program, name, kinds, len(p.batch), static_k, epilogue, call), None


def _call_gemv(
    f: Function,
    at: Block,
    kernel: str,
    t: Tile,
    plan: Plan,
    epilogue: Epilogue | None,
) -> None:
    high = plan.heights[0]
    count = f.sub(at.n1, at.n0)
    ldc: Int = "%ldc"
    c = at.c
    sums = ""
    if epilogue is not None:
        sums = f.alloca(t.kind, high * 2 * GEMV_STRIP, 64)
        ldc = high if plan.turned else 2 * GEMV_STRIP
        c = t.gep(f, sums, f.sub(0, f.mul(at.n0, high) if plan.turned else at.n0))
    c_strides: list[Int] = [1, ldc] if plan.turned else [ldc, 1]
    strides: tuple[list[Int], ...]
    if plan.kernel == "rows":
        strides = ["%a_m"], ["%b_n"], c_strides
    else:
        strides = ["%a_m", "%a_k"], ["%b_k"], c_strides[:1]
    arguments: list[str] = []
    for pointer, values in zip((at.a, at.b, c), strides, strict=True):
        arguments += [f"ptr {pointer}", *(f"i64 {v}" for v in values)]
    f.call(kernel, *arguments, f"i64 {at.n0}", f"i64 {at.n1}", "i64 %k")
    if epilogue is not None and plan.turned:
        epilogue.call(f, f.add(at.first_row, at.n0), count, 0, high, sums, ldc)
    elif epilogue is not None:
        epilogue.call(f, at.first_row, high, at.n0, count, sums, ldc)


def engine_task(
    program: Program,
    engine: Gemm | AmxGemm,
    kinds: tuple[str, str, str],
    batch: int,
    static_k: bool,
) -> str:
    kernel = engine.block()
    define(program, engine)
    epilogue = engine.epilogue

    def call(f: Function, at: Block) -> None:
        scratch = f.alloca("i8", engine.scratch_bytes, 64)
        first = f.mul(at.row_block, "%tiles_each")
        last = f.min(f.add(first, "%tiles_each"), f.ceildiv("%m", engine.heights[0]))
        extra: list[str] = []
        if epilogue is not None:
            extra = [
                f"i64 {at.first_row}",
                *(f"{kind} %{name}" for kind, name in epilogue.parameters),
            ]
        f.call(
            kernel,
            f"ptr {at.a}",
            "i64 %a_m",
            "i64 %a_k",
            f"ptr {at.b}",
            "i64 %b_n",
            "i64 %b_k",
            f"ptr {at.c}",
            "i64 %ldc",
            *(f"i64 {v}" for v in (first, last, "%m", at.n0, at.n1, "%k")),
            f"ptr {scratch}",
            *extra,
        )

    around = partial(tiles, e=engine.element) if isinstance(engine, AmxGemm) else None
    return _items(program, kernel, kinds, batch, static_k, epilogue, call, around)


SIZES = (
    "m", "n", "k", "a_m", "a_k", "b_n", "b_k", "ldc", "tiles_each", "columns_each", "blocks_m",
    "blocks_n",
)  # fmt: skip
BATCH_SIZES = ("size", "batch_a", "batch_b", "batch_c")


def _items(
    program: Program,
    kernel: str,
    kinds: tuple[str, str, str],
    batch: int,
    static_k: bool,
    epilogue: Epilogue | None,
    call: Call,
    around: Callable[[Function], AbstractContextManager[None]] | None = None,
) -> str:
    """The function of parallel items: (lo, hi, A, B, C, SIZES, then BATCH_SIZES per batch
    dimension, then the epilogue's). `around`: a context for all calls."""
    batches = [f"{q}{i}" for i in range(batch) for q in BATCH_SIZES]
    params = item_parameters("ABC", [*SIZES, *batches])
    params += epilogue.parameters if epilogue is not None else ()
    name = f"dot_{kernel}_{batch}{'' if static_k else 'k'}"
    name += "" if epilogue is None else f"_{epilogue.name}"
    f = Function(name, params)
    with around(f) if around else nullcontext(), f.items() as item:
        rest, column_block = f.divmod(item, "%blocks_n")
        rest, row_block = f.divmod(rest, "%blocks_m")
        offsets: list[Int] = [0, 0, 0]
        for i in reversed(range(batch)):
            index = f.rem(rest, f"%size{i}") if i else rest
            rest = f.div(rest, f"%size{i}") if i else rest
            steps = (f"%batch_{q}{i}" for q in "abc")
            offsets = [f.muladd(index, step, o) for o, step in zip(offsets, steps, strict=True)]
        a, b, c = (
            f.gep(kind, f"%{q}", o) for kind, q, o in zip(kinds, "ABC", offsets, strict=True)
        )
        first_row = f.div(offsets[2], "%ldc") if epilogue is not None and batch else 0
        n0, n1 = f.part(column_block, "%columns_each", "%n")
        at = Block(a, b, c, row_block, n0, n1, first_row)
        if not static_k:
            _empty_sum(f, kinds[2], at, epilogue)
        call(f, at)
    return program.define(f)


def _empty_sum(f: Function, kind: str, at: Block, epilogue: Epilogue | None) -> None:
    """Where K turns out to be 0, no block of K writes anything: zeros, and what the epilogue makes
    of them."""
    itemsize = BITS[kind] // 8
    with f.when(f.icmp("eq", "%k", 0)):
        with f.loop(0, "%m") as i:
            row = f.gep(kind, at.c, f.muladd(i, "%ldc", at.n0))
            nbytes = f.mul(f.sub(at.n1, at.n0), itemsize)
            f.do(f"call void @llvm.memset.p0.i64(ptr {row}, i8 0, i64 {nbytes}, i1 false)")
        if epilogue is not None:
            columns = f.sub(at.n1, at.n0)
            sums = f.gep(kind, at.c, at.n0)
            epilogue.call(f, at.first_row, "%m", at.n0, columns, sums, "%ldc")
