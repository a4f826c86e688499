"""One product of matrices in memory: the choice of its engine, constant operands that are packed
once, sums cut into pieces."""

from __future__ import annotations

from dataclasses import replace as with_fields

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    Instruction,
    Size,
    ceildiv,
    fixed,
)

from ..codegen import Place, Program
from ..codegen.block import PACKED_HEAD
from ..llvm import BITS, Function, Target
from ..thresholds import (
    IN_ROWS,
    K_SINGLE,
    KEPT_ELEMENTS,
    KEPT_ROWS,
)
from . import blocking
from .amx_kernels import BLOCK, element
from .dot_amx import amx_form, emit_on_amx, on_amx
from .dot_plan import Plan, columns_each_item, is_local, is_turned, plan_of
from .dot_task import Finish, call_task, define, prepack, task
from .gemm import Gemm
from .gemm_amx import AmxGemm
from .product import ACCUMULATORS, SOURCES, Product, hint, swapped, the_product, types_of
from .tile import Tile, product_tile


def emit_dot(program: Program, x: Instruction, pointers: list[str], finish: Finish | None) -> None:
    """A dot that a kernel takes; `pointers`: A, B and C, an array of accumulators. Where the right
    operand is a constant, the program has two ways: on a packed copy of that if the run is given
    one."""
    p = the_product(x)

    def emit(copy: str | None = None) -> None:
        if not emit_on_amx(program, x, p, pointers, finish, copy):
            emit_product(
                program,
                p,
                ACCUMULATORS[x.dtype][0],
                types_of(x),
                pointers,
                finish,
                copy,
            )

    copy = _packed_copy(program, x, p)
    if copy is None:
        return emit()
    packed = program.code.gep("i8", copy, PACKED_HEAD)
    if program.is_kept(program.place(x.operands[1])):
        return emit(packed)
    program.code.choose(program.code.icmp("ne", copy, "null", "ptr"), lambda: emit(packed), emit)


def _packed_copy(program: Program, x: Instruction, p: Product) -> str | None:
    """Address of a packed copy of the right operand, see Program.packed; None for products that
    read it as it is, or only a few times."""
    place = program.place(x.operands[1])
    in_loop = program.is_kept(place)
    if (
        not isinstance(place, Place)
        or p.batch
        or not all(isinstance(v, int) for v in (p.n, p.k, *p.b))
        or fixed(p.n) * fixed(p.k) < KEPT_ELEMENTS
    ):
        return None
    if on_amx(x, program.target, p):
        packing = _packing_amx(x, p, program.target)
    else:
        packing = _packing(x, p, program.target, in_loop)
    if packing is None:
        return None

    def write(source: str, target: str) -> None:
        define(program, packing.engine)
        arguments = program.arguments((source, target), (p.n, *p.b, p.k))
        program.parallel(packing.name, arguments, packing.items, cost=packing.cost)

    key = f"{packing.name} {p.n} {p.b} {p.k}"
    return program.packed(place, packing.nbytes, key, write)


@frozen
class _Packing:
    """The function of an engine that packs the right operand: its name, its items, the bytes that
    it writes and the nanoseconds of an item."""

    engine: Gemm | AmxGemm
    name: str
    items: int
    nbytes: int
    cost: float


def _packing_amx(x: Instruction, p: Product, target: Target) -> _Packing | None:
    n = fixed(p.n)
    k = fixed(p.k)
    e = element(target, types_of(x))
    if k > K_SINGLE or e is None:
        return None
    engine = AmxGemm(e, "k", amx_form(p.b))
    name = engine.prepack(1)
    nbytes = fixed(engine.packed_bytes(n, k))
    return _Packing(engine, name, ceildiv(n, BLOCK), nbytes, 0.06 * BLOCK * k)


def _packing(x: Instruction, p: Product, target: Target, in_loop: bool) -> _Packing | None:
    kind = ACCUMULATORS[x.dtype][0]
    t = product_tile(kind, target.vector_bytes)
    left, right = (SOURCES[o.dtype, kind] for o in x.operands)
    plan = plan_of(p, t, (left, right))
    direct = plan.form_b == "direct" and not in_loop
    n = fixed(p.n)
    k = fixed(p.k)
    other = is_turned(p, t) or plan.kernel != "tiles"
    if other or hint(p.m, 0) > KEPT_ROWS or direct or k % t.lanes:
        return None
    if right.steps:  # half of the bytes stay half: the micro-kernel converts
        if right.itemsize != 2 or kind != "float":
            return None
        right = with_fields(right, steps=())
    t = with_fields(t, vectors=plan.vectors, kind=right.kind)
    form_b = blocking.form_of(p.b)
    engine = Gemm(t, left, right, plan.form_a, form_b, plan.heights, isinstance(p.m, int))
    name = engine.prepack_b()
    nbytes = engine.kept_bytes(n, k)
    return _Packing(engine, name, ceildiv(n, t.lanes), nbytes, 0.12 * t.lanes * k)


SPLITS = 8  # pieces of a long sum: a constant, because they decide how it is rounded


def is_long(x: Instruction) -> bool:
    """A sum that is long for its few results: no cut of the results reads the operands only
    once."""
    p = the_product(x)
    wide = ACCUMULATORS[x.dtype][1]
    if (
        p.batch
        or x.dtype != wide
        or x.kind != "f"
        or not all(isinstance(v, int) for v in (p.m, p.n, p.k))
    ):
        return False
    m = fixed(p.m)
    n = fixed(p.n)
    k = fixed(p.k)
    operands = (m + n) * k
    results = m * n
    return (
        k >= 1024 * SPLITS and operands * x.itemsize > 1 << 22 and 8 * SPLITS * results < operands
    )


def emit_long(
    program: Program,
    p: Product,
    kind: str,
    dtypes: tuple[str, str],
    pointers: list[str],
) -> None:
    """A product whose sum is cut into SPLITS pieces, and perhaps a short one, that are added at the
    end."""
    each, rest = divmod(fixed(p.k), SPLITS)
    size = fixed(p.m) * fixed(p.n)
    itemsize = BITS[kind] // 8
    parts = program.scratch(itemsize * size * (SPLITS + 1))
    a, b, c = pointers
    emit_product(
        program,
        with_fields(p, k=each, batch=((SPLITS, each * p.a[1], each * p.b[1], size),)),
        kind,
        dtypes,
        [a, b, program.at(parts)],
    )
    if rest:
        starts = (
            program.code.gep(SOURCES[d, kind].kind, q, each * SPLITS * fixed(s[1]))
            for d, q, s in zip(dtypes, (a, b), (p.a, p.b), strict=True)
        )
        to = program.code.gep(kind, program.at(parts), SPLITS * size)
        emit_product(program, with_fields(p, k=rest), kind, dtypes, [*starts, to])
    sum_parts(
        program,
        product_tile(kind, program.target.vector_bytes),
        program.at(parts),
        c,
        size,
        SPLITS + (rest > 0),
    )


def sum_parts(program: Program, t: Tile, parts: str, c: str, size: Size, count: int) -> None:
    """c[i] = sum over p < count of parts[p * size + i], in this order."""
    name = program.once(("sum of parts", t.kind), lambda: program.define(_sum_parts(t)))
    program.parallel(
        name,
        program.arguments((parts, c), (size, count)),
        size,
        grain=4096,
        cost=0.05 * count,
    )


def _sum_parts(t: Tile) -> Function:
    """void(lo, hi, parts, c, size, count): c[i] = sum_p parts[p * size + i]."""
    f = Function(
        f"sum_parts_{t.suffix}",
        "i64 lo, i64 hi, ptr parts, ptr c, i64 size, i64 count",
    )
    for i, mask in f.vectors_of(t.lanes, "%lo", "%hi"):
        with f.loop(0, "%count", carry=[(t.vector, "zeroinitializer")]) as part:
            p = t.gep(f, "%parts", f.muladd(part.index, "%size", i))
            part.next = [f.op(f"fadd {t.vector} {part.vars[0]}, {t.load(f, p, mask)}")]
        t.store(
            f,
            part.vars[0],
            t.gep(f, "%c", i),
            mask,
        )
    return f


def emit_product(
    program: Program,
    p: Product,
    kind: str,
    dtypes: tuple[str, str],
    pointers: list[str],
    finish: Finish | None = None,
    copy: str | None = None,
) -> None:
    """Call the kernels for one strided product; `pointers` are A, B, C; `copy`: B
    as `prepack_b` leaves it."""
    t = product_tile(kind, program.target.vector_bytes)
    turned = is_turned(p, t)
    if turned:
        p = swapped(p)
        dtypes = dtypes[::-1]
        pointers = [pointers[1], pointers[0], *pointers[2:]]
    sources = SOURCES[dtypes[0], kind], SOURCES[dtypes[1], kind]
    plan = with_fields(plan_of(p, t, sources), turned=turned)
    if copy is not None:
        plan = with_fields(plan, form_b="packed")
        p = with_fields(p, b=(p.n, 1))
        pointers = [pointers[0], copy, pointers[2]]
    if plan.kernel == "tiles":
        t = with_fields(t, vectors=plan.vectors)
    cut = _cut(p, t, plan, program.target.cores)
    if plan.form_a == "rows" and plan.kernel == "tiles" and hint(cut.columns_each, 0) >= IN_ROWS:
        plan = with_fields(plan, form_a="transpose")
    local = finish is not None and is_local(plan, p)
    if finish is not None and not local:
        pointers = [*pointers[:2], finish.sums()]
    key = (
        "dot",
        kind,
        dtypes,
        plan,
        cut.prepacked,
        len(p.batch),
        isinstance(p.m, int),
        isinstance(p.k, int),
        finish and (finish.epilogue, local),
    )
    epilogue = finish.epilogue if finish else None
    name, engine = program.once(
        key,
        lambda: task(program, t, sources, plan, p, cut.prepacked, epilogue, local),
    )
    if cut.prepacked:
        assert engine is not None
        pointers = [prepack(program, engine, pointers[0], p), *pointers[1:]]
    call_task(program, name, p, cut, pointers, finish, 1 / (1.5 * t.lanes))


def _cut(p: Product, t: Tile, plan: Plan, cores: int) -> blocking.Partition:
    """The items of a product."""
    if plan.kernel != "tiles":
        each = 64 if plan.kernel == "rows" else columns_each_item(p.n, cores)
        return blocking.Partition(1, each, 1, ceildiv(p.n, each), False)
    tiles = ceildiv(p.m, plan.heights[0])
    forms = plan.form_a, plan.form_b
    may_prepack = all(d[1] == 0 for d in p.batch)
    return blocking.partition(t, tiles, p.m, p.n, p.k, p.count, forms, cores, may_prepack)
