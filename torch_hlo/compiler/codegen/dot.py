"""dot: any batch, contracting and free dimensions, through the kernels of gemm.py and gemv.py.

product.py makes matrices of the operands. Nothing is copied for a transposed one: it is only another pair of strides. Results narrower than the
accumulator (bf16, f16, small integers) are converted from a scratch array.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

from torch_hlo.compiler import tune
from torch_hlo.compiler.codegen import gemm
from torch_hlo.compiler.codegen.epilogue import Epilogue, epilogue, on_sums, results_of
from torch_hlo.compiler.codegen.function import Function, Int
from torch_hlo.compiler.codegen.gemm import Gemm, Source, Tile
from torch_hlo.compiler.codegen.gemm_amx import (
    B_BYTES,
    BLOCK,
    COLUMNS,
    ELEMENTS,
    FEATURES,
    K_SINGLE,
    K_TRANSPOSED,
    STEP_BYTES,
    TURNED,
    AmxGemm,
    Element,
    tiles,
)
from torch_hlo.compiler.codegen.gemv import ROWS, STRIP, gemv_columns, gemv_rows
from torch_hlo.compiler.codegen.loop import Store, run_loop
from torch_hlo.compiler.codegen.product import (
    ACCUMULATORS,
    SOURCES,
    Product,
    product,
    retyped,
    rewritten,
    roles,
    swapped,
)
from torch_hlo.compiler.codegen.program import PACKED_HEAD, Place
from torch_hlo.compiler.codegen.registry import emits_step
from torch_hlo.hlo.dim import Size, ceildiv
from torch_hlo.hlo.ir import Computation, Instruction, Module, instr, postorder
from torch_hlo.hlo.text import module_text


def emit_tree(
    program, root: Instruction, known: tuple[Instruction, ...], result: Instruction
) -> None:
    """Emit the instructions between `known` (already in memory) and `root`, and leave the value in `result`'s buffer.

    What lies between gets memory of its own for the duration of the step, even where the program has the same instruction:
    that one's buffer may not be valid here.
    """
    steps = [x for x in postorder((root,), known) if x.op not in ("constant", "parameter")]
    target = program.places(result)
    with program.rebound():
        for x in steps:
            program.bind(x, target if x is root else program.allocate_shape(x.shape))
            program.step(x)


def _on_amx(x: Instruction, target, p: Product) -> bool:
    """Whether a dot is for AMX tiles: of their types, with enough rows and depth to pay."""
    types = tuple(o.shape.dtype for o in x.operands)
    if (
        target.grid
        or types not in ELEMENTS
        or not target.has(FEATURES[types[0]])
        or x.shape.itemsize > 4
    ):
        return False
    if all(isinstance(v, int) and v <= 16 for v in (p.m, p.n, p.k)):
        return False  # an eighth of a step
    return (
        isinstance(p.k, int)
        and p.k >= 16
        and not (isinstance(p.m, int) and p.m <= (4 if p.b[1] == 1 else 2))
        and p.n != 1
    )


def _amx_form(strides: tuple[Size, Size]) -> str:
    """What is contiguous in an operand whose strides along its free dimension and along K are these."""
    return "k" if strides[1] == 1 else "lane" if strides[0] == 1 else "none"


def _takes_amx(
    program,
    x: Instruction,
    p: Product,
    pointers: list[str],
    finish: Finish | None,
    way: str,
    copy: str | None,
) -> bool:
    """Emit a dot on AMX tiles, with a packed `copy` of the right operand if there is one; False when it is not for them."""
    if not _on_amx(x, program.target, p):
        return False
    element = ELEMENTS[tuple(o.shape.dtype for o in x.operands)]
    rows = _hint(p.m, 512)
    estimate = rows * p.k * element.itemsize <= B_BYTES and rows <= _hint(p.n, 512)
    transposed = (
        copy is None and _may_transpose(p) and (estimate if way == STATIC else way == "transposed")
    )
    forms = [_amx_form(p.a), _amx_form(p.b)]
    if transposed:
        p, forms, pointers = (
            replace(p, m=p.n, n=p.m, a=p.b, b=p.a),
            forms[::-1],
            [pointers[1], pointers[0], pointers[2]],
        )
    batch: Size = 1
    for size, *_ in p.batch:
        batch = batch * size
    cut, packed = _cut_amx(p, element, batch, transposed, program.target.cores)
    if copy is not None:
        packed, pointers = (packed[0], True), [pointers[0], copy, pointers[2]]
    if finish is not None and p.k > K_SINGLE and not packed[1]:
        return False  # sums of several blocks of K need an array
    engine = AmxGemm(
        element,
        *forms,
        packed,
        transposed,
        finish and finish.epilogue,
        in_rows=not packed[0] and forms[0] == "k" and _reads_tiles(p, element),
    )
    for side, (lanes, strides) in enumerate(((p.m, p.a), (p.n, p.b))):
        if packed[side] and (side == 0 or copy is None):
            to = program.at(program.scratch(engine.packed_bytes(lanes, p.k)))
            name = program.once(
                ("prepack", element.kind, forms[side], side),
                lambda side=side: _prepack_amx(program, engine, side),
            )
            arguments = [
                f"ptr {pointers[side]}",
                f"ptr {to}",
                *(f"i64 {program.size(v)}" for v in (lanes, *strides, p.k)),
            ]
            program.parallel(
                name, arguments, program.size(ceildiv(lanes, BLOCK)), cost=0.06 * BLOCK * p.k
            )
            pointers = [to if i == side else q for i, q in enumerate(pointers)]
    if packed[1]:
        p = replace(p, b=(p.n, 1))
    name = program.once(
        ("dot", engine.name, len(p.batch)),
        lambda: _engine_task(
            program, engine, (element.kind, element.kind, element.sums), len(p.batch), True
        ),
    )
    _call(program, name, p, batch, cut, pointers, finish, 0.0008)
    return True


def _reads_tiles(p: Product, element: Element) -> bool:
    """Whether tiles of A are read where they are: whole ones, whose rows do not share the sets of L1."""
    static = all(isinstance(v, int) for v in (p.m, p.n, p.k, p.a[0]))
    return (
        static
        and not p.m % BLOCK
        and not p.k % element.depth
        and bool(p.a[0] * element.itemsize % 2048)
    )


def _cut_amx(
    p: Product, element: Element, batch: Size, transposed: bool, cores: int
) -> tuple[gemm.Partition, tuple[bool, bool]]:
    """How a product on AMX is cut, and which of its operands are packed beforehand.

    A block of B that stays in L2 is packed by the item that reads it, which has all rows; of a product with many more rows than columns, whose items
    share blocks of B, it is packed before. A is packed beforehand where several blocks of columns read it.
    """
    tiles, count = ceildiv(p.m, BLOCK), _hint(batch, 8)
    fit = (
        max(
            1,
            min(
                (TURNED if transposed else COLUMNS) // BLOCK,
                B_BYTES // (STEP_BYTES * ceildiv(p.k, element.depth)),
            ),
        )
        * BLOCK
    )
    items = ceildiv(
        max(1, min(2 * cores, _hint(p.m, 512) * _hint(p.n, 512) * p.k * count >> 24)), count
    )
    if not isinstance(tiles, int) or not isinstance(p.n, int):
        return gemm.Partition(16, fit, ceildiv(tiles, 16), ceildiv(p.n, fit), False), (
            False,
            transposed or not p.batch,
        )
    blocks_n = ceildiv(p.n, fit)
    tall = not p.batch and (transposed or p.m > 2 * p.n or p.k > K_SINGLE)
    blocks_m = min(tiles, ceildiv(items, blocks_n)) if tall else 1
    cut = gemm.cut(
        Tile("float", 4, 16, BLOCK, 2),
        tiles,
        p.n,
        blocks_m,
        blocks_n if tall else max(blocks_n, items),
    )
    return cut, (not p.batch and cut.blocks_n > 1, tall)


def _prepack_amx(program, engine: AmxGemm, side: int) -> str:
    name = engine.prepack(side)
    _define(program, engine)
    return name


@dataclass(frozen=True, slots=True)
class Finish:
    """An epilogue and the arguments that its engine is called with for it. `sums()`: an array for the accumulators, for engines that need one."""

    epilogue: Epilogue
    arguments: tuple[str, ...]
    sums: Callable[[], str]


@emits_step("dot")
def dot(program, x: Instruction) -> None:
    """Emit a dot as calls of matrix kernels. Raises CodegenError (through `step`) for element types without a kernel."""
    if x.shape.size == 0:
        return
    if program.target.grid:
        from torch_hlo.compiler.codegen.gpu import dot as grid

        if grid.emit(program, x):
            return
    simpler = rewritten(x)
    if simpler is not None:
        return emit_tree(program, simpler, x.operands, x)
    kind, wide = ACCUMULATORS[x.shape.dtype]
    if wide != x.shape.dtype:
        params = tuple(instr("parameter", (), o.shape, index=i) for i, o in enumerate(x.operands))
        return emit_output(
            program,
            x,
            Computation("narrow", params, instr("dot", params, x.shape, **dict(x.attrs))),
        )
    pointers = [program.pointer(o) for o in (*x.operands, x)]
    if not program.target.grid and _is_long(x):
        return _emit_long(
            program, product(x), kind, tuple(o.shape.dtype for o in x.operands), pointers
        )
    _emit(program, x, pointers, None)


def _emit(program, x: Instruction, pointers: list[str], finish: Finish | None) -> None:
    """A dot that a kernel takes; `pointers`: A, B and C, an array of accumulators. Where the right operand is a constant, the program has two ways: on
    a packed copy of that if the run is given one."""
    p = product(x)
    way = _way(program, x, p)

    def emit(copy: str | None = None) -> None:
        if not _takes_amx(program, x, p, pointers, finish, way, copy):
            emit_product(
                program,
                p,
                ACCUMULATORS[x.shape.dtype][0],
                tuple(o.shape.dtype for o in x.operands),
                pointers,
                finish,
                way,
                copy,
            )

    copy = None if program.target.grid else _packed_copy(program, x, p)
    if copy is None:
        return emit()
    packed = program.code.gep("i8", copy, PACKED_HEAD)
    if program.is_kept(program.place(x.operands[1])):
        return emit(packed)
    program.code.choose(program.code.icmp("ne", copy, "null", "ptr"), lambda: emit(packed), emit)


def _packed_copy(program, x: Instruction, p: Product) -> str | None:
    """Address of a packed copy of the right operand, see Program.packed; None for products that read it as it is, or only a few times."""
    place = program.place(x.operands[1])
    in_loop = program.is_kept(place)
    if (
        not isinstance(place, Place)
        or p.batch
        or not all(isinstance(v, int) for v in (p.n, p.k, *p.b))
        or p.n * p.k < KEPT
    ):
        return None
    kind, types = ACCUMULATORS[x.shape.dtype][0], tuple(o.shape.dtype for o in x.operands)
    if _on_amx(x, program.target, p):
        if p.k > K_SINGLE:
            return None
        engine: Gemm | AmxGemm = AmxGemm(ELEMENTS[types], "k", _amx_form(p.b))
        name, count, nbytes, cost = (
            engine.prepack(1),
            ceildiv(p.n, BLOCK),
            engine.packed_bytes(p.n, p.k),
            0.06 * BLOCK * p.k,
        )
    else:
        t = gemm.tile(kind, program.target.vector_bytes)
        sources = tuple(SOURCES[d, kind] for d in types)
        plan = _plan(p, t, sources)
        direct = plan.form_b == "direct" and not in_loop
        if (
            _hint(p.m, 0) > KEPT_ROWS
            or _is_turned(p, t)
            or plan.kernel != "tiles"
            or direct
            or sources[1].steps
            or p.k % t.lanes
        ):
            return None
        t = replace(t, vectors=plan.vectors)
        engine = Gemm(
            t, *sources, plan.form_a, gemm.Strides(*p.b).form, plan.heights, isinstance(p.m, int)
        )
        name, count, nbytes, cost = (
            engine.prepack_b(),
            ceildiv(p.n, t.lanes),
            engine.kept_bytes(p.n, p.k),
            0.12 * t.lanes * p.k,
        )

    def write(source: str, target: str) -> None:
        _define(program, engine)
        program.parallel(
            name,
            [f"ptr {source}", f"ptr {target}", *(f"i64 {v}" for v in (p.n, *p.b, p.k))],
            count,
            cost=cost,
        )

    return program.packed(place, nbytes, f"{name} {p.n} {p.b} {p.k}", write)


KEPT = 1 << 14  # elements from which on a copy is worth its mark
KEPT_ROWS = 256  # up to which packing weighs, but on AMX, where it does longer


def emit_output(program, x: Instruction, body: Computation) -> None:
    """A step with the value of `body` on the operands of `x`: a dot of parameters, and elementwise instructions on its result."""
    inner, outer, operands, results = parts_of_output(program, x, body, "dot")
    if outer.shape.size == 0:
        return
    converts = [o for o in outer.operands if o.op == "convert" and o not in x.operands]
    if converts:
        outer_bytes = _reading_bytes(outer)
        if not program.target.grid and _reads_rows(program, outer_bytes):
            return _emit_output(program, body, inner, outer_bytes, operands, results)
        with program.rebound():
            for o in converts:
                program.bind(o, program.allocate_shape(o.shape))
                program.step(o)
            return _emit_output(program, body, inner, outer, operands, results)
    _emit_output(program, body, inner, outer, operands, results)


def _reads_rows(program, x: Instruction) -> bool:
    """Whether a dot is for the kernels that read the large operand once."""
    p, kind = product(x), ACCUMULATORS[x.shape.dtype][0]
    return (
        p is not None
        and _plan(
            p,
            gemm.tile(kind, program.target.vector_bytes),
            tuple(SOURCES[o.shape.dtype, kind] for o in x.operands),
        ).kernel
        != "tiles"
    )


def _emit_output(
    program,
    body: Computation,
    inner: Instruction,
    outer: Instruction,
    operands: list[Place],
    results: list[Place],
) -> None:
    wide = ACCUMULATORS.get(outer.shape.dtype, (None, outer.shape.dtype))[1]
    found = None
    if program.target.grid:
        from torch_hlo.compiler.codegen.gpu import dot as grid

        if grid.emit_output(
            program, body, inner, outer, len(roles(outer)[2][1]), operands, results
        ):
            return
    elif rewritten(outer) is None and not _is_long(outer):
        found = epilogue(program, body, inner, len(roles(outer)[2][1]), wide)
    if found is None:
        return emit_apart(
            program, body, inner, retyped(outer, wide, list(outer.operands)), operands, results
        )

    def sums() -> str:
        """The first result's memory where it can hold them."""
        taken = {(p.word, p.offset) for p in operands}
        free = (
            results_of(body)[0].shape.dtype == wide
            and (results[0].word, results[0].offset) not in taken
        )
        return program.at(
            results[0] if free else program.scratch(outer.shape.with_dtype(wide).nbytes)
        )

    finish = Finish(found, arguments_of(program, found, operands, results), sums)
    _emit(program, outer, [*(program.pointer(o) for o in outer.operands), "null"], finish)


def parts_of_output(
    program, x: Instruction, body: Computation, op: str
) -> tuple[Instruction, Instruction, list[Place], list[Place]]:
    """Of a fusion of kind output: its product in `body` and on the operands of `x`, and where operands and results are."""
    inner = next(y for y in postorder((body.root,)) if y.op == op)
    outer = instr(
        op, tuple(_outside(x, o) for o in inner.operands), inner.shape, **dict(inner.attrs)
    )
    results = (
        [program.place(x, i) for i in range(len(x.shape.elements))]
        if x.shape.is_tuple
        else [program.place(x)]
    )
    return inner, outer, [program.place(o) for o in x.operands], results


def _outside(x: Instruction, o: Instruction) -> Instruction:
    """What an operand of the product in the body of the fusion `x` is outside: an operand, or a convert of one."""
    return (
        x.operands[o["index"]]
        if o.op == "parameter"
        else instr("convert", (_outside(x, o.operands[0]),), o.shape)
    )


def _reading_bytes(x: Instruction) -> Instruction:
    """The dot on the operands of converts; its kernel makes the elements floats."""
    return instr(
        "dot",
        tuple(o.operands[0] if o.op == "convert" else o for o in x.operands),
        x.shape,
        **dict(x.attrs),
    )


def arguments_of(
    program, found: Epilogue, operands: list[Place], results: list[Place]
) -> tuple[str, ...]:
    """What an engine passes on to an epilogue."""
    read = [operands[i] for i in found.leaves]
    return (
        *(f"ptr {program.at(p)}" for p in (*read, *results)),
        *(f"i64 {program.size(n)}" for n in found.sizes),
    )


def emit_apart(
    program,
    body: Computation,
    inner: Instruction,
    outer: Instruction,
    operands: list[Place],
    results: list[Place],
) -> None:
    """The product into an array, then a loop."""
    rest, sums = on_sums(body, inner, outer.shape.dtype)
    with program.rebound():
        place = program.allocate_shape(outer.shape)
        program.bind(outer, place)
        program.step(outer)
        read = set(postorder((rest.root,)))
        used = [(p, q) for p, q in zip(rest.params, (*operands, place), strict=True) if p in read]
        run_loop(
            program,
            [Store(r) for r in results_of(rest)],
            [p for p, _ in used],
            [q for _, q in used],
            results,
            key=("output", body, sums),
        )


STATIC = "static"  # the way that costs suggest
SPLITS = 8  # pieces of a long sum: a constant, because they decide how it is rounded


def _is_long(x: Instruction) -> bool:
    """A sum that is long for its few results: no cut of the results reads the operands only once."""
    p, wide = product(x), ACCUMULATORS[x.shape.dtype][1]
    if (
        p.batch
        or x.shape.dtype != wide
        or x.shape.kind != "f"
        or not all(isinstance(v, int) for v in (p.m, p.n, p.k))
    ):
        return False
    operands, results = (p.m + p.n) * p.k, p.m * p.n
    return (
        p.k >= 1024 * SPLITS
        and operands * x.shape.itemsize > 1 << 22
        and 8 * SPLITS * results < operands
    )


def _emit_long(
    program, p: Product, kind: str, dtypes: tuple[str, str], pointers: list[str]
) -> None:
    """A product whose sum is cut into SPLITS pieces, and perhaps a short one, that are added at the end."""
    each, rest = divmod(p.k, SPLITS)
    size = p.m * p.n
    itemsize = {"float": 4, "double": 8}[kind]
    parts = program.scratch(itemsize * size * (SPLITS + 1))
    a, b, c = pointers
    emit_product(
        program,
        replace(p, k=each, batch=((SPLITS, each * p.a[1], each * p.b[1], size),)),
        kind,
        dtypes,
        [a, b, program.at(parts)],
    )
    if rest:
        starts = (
            program.code.gep(SOURCES[d, kind].kind, q, each * SPLITS * s[1])
            for d, q, s in zip(dtypes, (a, b), (p.a, p.b), strict=True)
        )
        to = program.code.gep(kind, program.at(parts), SPLITS * size)
        emit_product(program, replace(p, k=rest), kind, dtypes, [*starts, to])
    sum_parts(
        program,
        gemm.tile(kind, program.target.vector_bytes),
        program.at(parts),
        c,
        size,
        SPLITS + (rest > 0),
    )


def sum_parts(program, t: Tile, parts: str, c: str, size: Size, count: int) -> None:
    """c[i] = sum over p < count of parts[p * size + i], in this order."""
    name = program.once(
        ("sum of parts", t.kind),
        lambda: program.function(f"sum_parts_{t.suffix}", _sum_parts(t).text()),
    )
    program.parallel(
        name,
        [f"ptr {parts}", f"ptr {c}", f"i64 {program.size(size)}", f"i64 {count}"],
        program.size(size),
        grain=4096,
        cost=0.05 * count,
    )


def _sum_parts(t: Tile) -> Function:
    """void(lo, hi, parts, c, size, count): c[i] = sum_p parts[p * size + i]."""
    f = Function(
        f"sum_parts_{t.suffix}",
        "void",
        [
            ("i64", "lo"),
            ("i64", "hi"),
            ("ptr", "parts"),
            ("ptr", "c"),
            ("i64", "size"),
            ("i64", "count"),
        ],
    )
    with f.loop("%lo", "%hi", t.lanes) as i:
        mask = gemm.lane_mask(f, t.lanes, i, "%hi")
        with f.loop(0, "%count", carry=[(t.vector, "zeroinitializer")]) as part:
            p = f.gep(t.kind, "%parts", f.add(f.mul(part.index, "%size"), i))
            part.next = [
                f.op(
                    f"fadd {t.vector} {part.vars[0]}, {gemm.masked_load(f, t.kind, t.lanes, p, mask, t.itemsize)}"
                )
            ]
        gemm.masked_store(
            f, t.kind, t.lanes, part.vars[0], f.gep(t.kind, "%c", i), mask, t.itemsize
        )
    return f


def _is_local(plan: Plan, p: Product) -> bool:
    """Whether the sums of a row tile are finished before the next one's are begun."""
    return (
        plan.kernel != "tiles"
        or isinstance(p.k, int)
        and p.k <= (gemm.KC_DIRECT if plan.form_b == "direct" else gemm.KC)
    )


def emit_product(program, p: Product, kind: str, dtypes: tuple[str, str], pointers: list[str], finish: Finish | None = None,
                 way: str = STATIC, copy: str | None = None) -> None:  # fmt: skip
    """Call the kernels for one strided product; `pointers` are A, B, C; `way`: how it is cut, see `_ways`; `copy`: B as `prepack_b` leaves it."""
    t = gemm.tile(kind, program.target.vector_bytes)
    turned = _is_turned(p, t)
    if turned:
        p, dtypes, pointers = swapped(p), dtypes[::-1], [pointers[1], pointers[0], *pointers[2:]]
    sources = tuple(SOURCES[d, kind] for d in dtypes)
    plan = replace(_plan(p, t, sources), turned=turned)
    if copy is not None:
        plan, p, pointers = (
            replace(plan, form_b="packed"),
            replace(p, b=(p.n, 1)),
            [pointers[0], copy, pointers[2]],
        )
    batch: Size = 1
    for size, *_ in p.batch:
        batch = batch * size
    if plan.kernel != "tiles":
        each = 64 if plan.kernel == "rows" else _columns_each(p.n, program.target.cores)
        cut = gemm.Partition(1, each, 1, ceildiv(p.n, each), False)
    else:
        t = replace(t, vectors=plan.vectors)
        tiles = ceildiv(p.m, plan.heights[0])
        if way == STATIC:
            cut = gemm.partition(
                t,
                tiles,
                p.m,
                p.n,
                p.k,
                batch,
                (plan.form_a, plan.form_b),
                program.target.cores,
                all(d[1] == 0 for d in p.batch),
            )
        else:
            cut = gemm.cut(t, tiles, p.n, *map(int, way.split("x")))
        if plan.form_a == "rows" and _hint(cut.columns_each, 0) >= IN_ROWS:
            plan = replace(plan, form_a="transpose")
    local = finish is not None and _is_local(plan, p)
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
    name, engine = program.once(
        key,
        lambda: _task(
            program, t, sources, plan, p, cut.prepacked, finish and finish.epilogue, local
        ),
    )
    if cut.prepacked:
        pointers = [_prepack(program, engine, pointers[0], p), *pointers[1:]]
    _call(program, name, p, batch, cut, pointers, finish, 1 / (1.5 * t.lanes))


def _ways(x: Instruction, target, p: Product) -> tuple[str, ...]:
    """How a product may be computed, the static choice first: cut into rows x columns of items; on AMX transposed, the right operand's tiles
    made on the way, or not."""
    if (
        p.batch
        or not all(isinstance(v, int) for v in (p.m, p.n, p.k))
        or p.m <= ROWS
        or p.m * p.n * p.k < 1 << 22
    ):
        return (STATIC,)
    if _on_amx(x, target, p):
        return (STATIC, "transposed", "packed") if _may_transpose(p) else (STATIC,)
    counts = {
        (rows, items // rows)
        for items in (c * target.cores for c in (1, 2, 4))
        for rows in (1, 2, 4, 8)
        if items % rows == 0
    }
    return (STATIC, *(f"{rows}x{columns}" for rows, columns in sorted(counts)))


def _way(program, x: Instruction, p: Product) -> str:
    """One of `_ways`: what TORCH_HLO_TUNE found to be fastest."""
    ways = _ways(x, program.target, p) if tune.active() and not program.target.grid else (STATIC,)
    if len(ways) == 1:
        return STATIC
    params = tuple(instr("parameter", (), o.shape, index=i) for i, o in enumerate(x.operands))
    alone = Module(
        "step", Computation("main", params, instr("dot", params, x.shape, **dict(x.attrs)))
    )
    return tune.choose(program.target.cache_key, module_text(alone), ways)


def _may_transpose(p: Product) -> bool:
    """Whether a bf16 product on AMX tiles may be computed transposed."""
    return not p.batch and p.b[1] == 1 and p.k <= K_TRANSPOSED and isinstance(p.n, int)


def _columns_each(n: Size, cores: int) -> int:
    """Columns of an item of gemv_columns: long pieces of rows, but work for every core."""
    share = ceildiv(n, 64 * cores) * 64 if isinstance(n, int) else STRIP // 2
    return max(256, min(share, 2 * STRIP))


def _call(
    program,
    name: str,
    p: Product,
    batch: Size,
    cut: gemm.Partition,
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
        _hint(p.m, 512)
        * _hint(p.n, 512)
        * _hint(p.k, 512)
        / max(1, _hint(cut.blocks_m, 1) * _hint(cut.blocks_n, 1))
    )
    arguments = [f"ptr {q}" for q in pointers] + [f"i64 {program.size(s)}" for s in sizes]
    if finish is not None:
        arguments += finish.arguments
    program.parallel(
        name, arguments, program.size(batch * cut.blocks_m * cut.blocks_n), cost=50 + work * cost
    )


def _prepack(program, engine: Gemm, a: str, p: Product) -> str:
    """Pack all of A, in parallel; returns the pointer to it."""
    packed = program.at(program.scratch(engine.prepacked_bytes(p.m, p.k)))

    def write() -> str:
        name = engine.prepack()
        _define(program, engine)
        return name

    name = program.once(("prepack", engine.name), write)
    arguments = [f"ptr {a}", f"ptr {packed}", *(f"i64 {program.size(v)}" for v in (p.m, *p.a, p.k))]
    program.parallel(
        name,
        arguments,
        program.size(ceildiv(p.m, engine.heights[0])),
        cost=0.12 * engine.heights[0] * _hint(p.k, 1000),
    )
    return packed


def _define(program, engine: Gemm) -> None:
    for name, text in engine.functions.items():
        program.function(name, text)


def _hint(size: Size, usual: int) -> int:
    return size if isinstance(size, int) else usual


def _is_turned(p: Product, t: Tile) -> bool:
    """Whether a product of few columns is computed as the transposed one of few rows, which is written in columns."""
    few = (
        isinstance(p.n, int)
        and isinstance(p.k, int)
        and t.is_float
        and not (isinstance(p.m, int) and _few(p.m, p.k, t))
    )
    return few and (
        p.n == 1 and 1 in p.a or _few(p.n, p.k, t) and p.a[1] == p.b[1] == 1 and p.k >= 4 * t.lanes
    )


def _few(rows: int, k: Size, t: Tile) -> bool:
    """Whether rows are few enough for gemv_rows. It adds up the lanes of each sum at the end: of several sums when there is enough to be summed."""
    return rows == 1 or rows <= ROWS and _hint(k, 512) >= min(16, 2 * rows) * t.lanes


NEAR = (
    32 << 10
)  # bytes of a left operand that stays in L1: rows adjacent in memory are read where they are
SHALLOW, REREAD = (
    64,
    32,
)  # depth up to which strips of B stay in L1, and rows from which on they are read there often enough
CONFLICT = 4096  # rows of A these bytes apart would share one set of L1
IN_ROWS = 384  # columns of an item from which on A is packed: multiplications take elements of a packed tile as operands
FAR = 8192  # bytes between rows of B from which on a packed copy is faster than reading it in place


@dataclass(frozen=True, slots=True)
class Plan:
    """How a product is computed. `kernel`: "tiles" (gemm.py), "rows" or "columns" (gemv.py); forms say how operands are read."""

    kernel: str
    form_a: str
    form_b: str
    heights: tuple[int, ...]
    vectors: int
    even: bool = False  # whole tiles of columns only
    turned: bool = False  # rows of the result are written as columns
    unroll: int = 1  # what K is a multiple of
    fetch: bool = True  # rows of B are asked for before they are read


def _plan(p: Product, t: Tile, sources: tuple[Source, Source]) -> Plan:
    plain = not sources[1].steps
    form_a, form_b = (gemm.Strides(*s).form for s in (p.a, p.b))
    heights = gemm.tile_heights(t, p.m)
    static = isinstance(p.m, int)
    unroll = 2 if isinstance(p.k, int) and p.k % 2 == 0 else 1
    if (
        form_a == "transpose"
        and static
        and not sources[0].steps
        and isinstance(p.a[0], int)
        and p.a[0] * t.itemsize % CONFLICT
    ):
        form_a = "rows"
    if (
        form_a == "copy"
        and static
        and not sources[0].steps
        and isinstance(p.k, int)
        and p.m * p.k * t.itemsize <= NEAR
    ):
        form_a = "lanes"
    if static and _few(p.m, p.k, t) and p.a[1] == 1 and p.b[1] == 1 and t.is_float and p.n != 1:
        return Plan("rows", form_a, form_b, (p.m,), 1)
    if static and p.m in (1, 2) and form_b == "copy" and t.is_float and _hint(p.n, 64) >= 64:
        return Plan("columns", form_a, form_b, (p.m,), 1)
    if (
        form_b == "copy"
        and plain
        and static
        and (p.m <= 5 * t.rows or _hint(p.b[1], FAR) * t.itemsize <= FAR)
    ):
        # Too few rows to pay for packing B, or rows of B that are not far apart: read it where it is.
        if isinstance(p.n, int):
            heights, vectors = gemm.tile_shape(t, p.m, p.n, _hint(p.k, gemm.KC_DIRECT), form_a)
            return Plan(
                "tiles",
                form_a,
                "direct",
                heights,
                vectors,
                p.n % (vectors * t.lanes) == 0,
                unroll=unroll,
                fetch=not (isinstance(p.k, int) and p.k <= SHALLOW and p.m >= REREAD),
            )
        # In wider strips when there are registers left.
        return Plan(
            "tiles",
            form_a,
            "direct",
            heights,
            min(gemm.MOST, max(1, t.rows * t.vectors // heights[0])),
            unroll=unroll,
        )
    if static and isinstance(p.n, int):
        heights, vectors = gemm.tile_shape(t, p.m, p.n, _hint(p.k, gemm.KC), form_a)
        return Plan("tiles", form_a, form_b, heights, vectors, unroll=unroll)
    return Plan(
        "tiles",
        form_a,
        form_b,
        heights,
        min(t.vectors, ceildiv(_hint(p.n, t.columns), t.lanes)),
        unroll=unroll,
    )


def _task(program, t: Tile, sources: tuple[Source, Source], plan: Plan, p: Product, prepacked: bool, epilogue: Epilogue | None,
          local: bool) -> tuple[str, Gemm | None]:  # fmt: skip
    """The function of parallel items for a plan, and the engine it uses."""
    kinds = (t.kind if prepacked else sources[0].kind, sources[1].kind, t.kind)
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
        return _engine_task(program, engine, kinds, len(p.batch), isinstance(p.k, int)), engine
    kernel = f"gemv_{plan.kernel}_{t.suffix}_{sources[0].name}_{sources[1].name}_{plan.heights[0]}"
    make = {"rows": gemv_rows, "columns": gemv_columns}[plan.kernel]
    kernel = program.function(kernel, make(kernel, t, sources, plan.heights[0]).text())
    kernel_name = f"{kernel}_turned" if plan.turned else kernel

    def call(
        f: Function, a: str, b: str, c: str, row_block: Int, n0: Int, n1: Int, first_row: Int
    ) -> None:
        ldc: Int = "%ldc"
        high, count = plan.heights[0], f.sub(n1, n0)
        if epilogue is not None:
            sums, ldc = f.alloca(t.kind, high * 2 * STRIP, 64), high if plan.turned else 2 * STRIP
            c = f.gep(t.kind, sums, f.sub(0, f.mul(n0, high) if plan.turned else n0))
        c_strides = [1, ldc] if plan.turned else [ldc, 1]
        strides = {
            "rows": (["%a_m"], ["%b_n"], c_strides),
            "columns": (["%a_m", "%a_k"], ["%b_k"], c_strides[:1]),
        }[plan.kernel]
        arguments = [
            text
            for q, values in zip((a, b, c), strides, strict=True)
            for text in (f"ptr {q}", *(f"i64 {v}" for v in values))
        ]
        f.call("void", kernel, *arguments, f"i64 {n0}", f"i64 {n1}", "i64 %k")
        if epilogue is not None:
            tile = (
                (f.add(first_row, n0), count, 0, high)
                if plan.turned
                else (first_row, high, n0, count)
            )
            epilogue.call(f, *tile, sums, ldc)

    return _items(
        program, kernel_name, kinds, len(p.batch), isinstance(p.k, int), epilogue, call
    ), None


def _engine_task(
    program, engine: Gemm | AmxGemm, kinds: tuple[str, str, str], batch: int, static_k: bool
) -> str:
    kernel = engine.block()
    _define(program, engine)

    def call(
        f: Function, a: str, b: str, c: str, row_block: Int, n0: Int, n1: Int, first_row: Int
    ) -> None:
        scratch = f.alloca("i8", engine.scratch_bytes, 64)
        first = f.mul(row_block, "%tiles_each")
        last = f.min(f.add(first, "%tiles_each"), f.ceildiv("%m", engine.heights[0]))
        strides = [
            "i64 %a_m",
            "i64 %a_k",
            f"ptr {b}",
            "i64 %b_n",
            "i64 %b_k",
            f"ptr {c}",
            "i64 %ldc",
        ]
        extra = (
            [f"i64 {first_row}", *(f"{kind} %{name}" for kind, name in engine.epilogue.parameters)]
            if engine.epilogue is not None
            else []
        )
        f.call(
            "void",
            kernel,
            f"ptr {a}",
            *strides,
            *(f"i64 {v}" for v in (first, last, "%m", n0, n1, "%k")),
            f"ptr {scratch}",
            *extra,
        )

    return _items(
        program,
        kernel,
        kinds,
        batch,
        static_k,
        engine.epilogue,
        call,
        tiles if isinstance(engine, AmxGemm) else None,
    )


def _items(
    program,
    kernel: str,
    kinds: tuple[str, str, str],
    batch: int,
    static_k: bool,
    epilogue: Epilogue | None,
    call,
    around: Callable | None = None,
) -> str:
    """The function of parallel items: (lo, hi, A, B, C, m, n, k, a_m, a_k, b_n, b_k, ldc, tiles_each, columns_each, blocks_m,
    blocks_n, then four sizes per batch dimension, then the epilogue's). `call` writes the call of the kernel for one block; `around`: a context for all of them."""
    params = [("i64", "lo"), ("i64", "hi"), *(("ptr", q) for q in "ABC")]
    params += [
        ("i64", q)
        for q in (
            "m",
            "n",
            "k",
            "a_m",
            "a_k",
            "b_n",
            "b_k",
            "ldc",
            "tiles_each",
            "columns_each",
            "blocks_m",
            "blocks_n",
        )
    ]
    params += [
        ("i64", f"{q}{i}") for i in range(batch) for q in ("size", "batch_a", "batch_b", "batch_c")
    ]
    params += epilogue.parameters if epilogue is not None else ()
    f = Function(
        f"dot_{kernel}_{batch}{'' if static_k else 'k'}{'' if epilogue is None else f'_{epilogue.name}'}",
        "void",
        params,
    )
    with around(f) if around else nullcontext(), f.loop("%lo", "%hi") as item:
        rest, column_block = f.div(item, "%blocks_n"), f.rem(item, "%blocks_n")
        rest, row_block = f.div(rest, "%blocks_m"), f.rem(rest, "%blocks_m")
        offsets: list[Int] = [0, 0, 0]
        for i in reversed(range(batch)):
            index = f.rem(rest, f"%size{i}") if i else rest
            rest = f.div(rest, f"%size{i}") if i else rest
            offsets = [
                f.add(o, f.mul(index, f"%batch_{q}{i}"))
                for o, q in zip(offsets, "abc", strict=True)
            ]
        a, b, c = (
            f.gep(kind, f"%{q}", o) for kind, q, o in zip(kinds, "ABC", offsets, strict=True)
        )
        first_row = f.div(offsets[2], "%ldc") if epilogue is not None and batch else 0
        n0 = f.mul(column_block, "%columns_each")
        n1 = f.min(f.add(n0, "%columns_each"), "%n")
        if not static_k:
            _empty_sum(f, kinds[2], c, n0, n1, first_row, epilogue)
        call(f, a, b, c, row_block, n0, n1, first_row)
    return program.function(f.name, f.text())


def _empty_sum(
    f: Function, kind: str, c: str, n0: Int, n1: Int, first_row: Int, epilogue: Epilogue | None
) -> None:
    """Where K turns out to be 0, no block of K writes anything: zeros, and what the epilogue makes of them."""
    itemsize = {"float": 4, "double": 8, "i32": 4, "i64": 8}[kind]
    with f.when(f.icmp("eq", "%k", 0)):
        with f.loop(0, "%m") as i:
            row = f.gep(kind, c, f.add(f.mul(i, "%ldc"), n0))
            f.do(
                f"call void @llvm.memset.p0.i64(ptr {row}, i8 0, i64 {f.mul(f.sub(n1, n0), itemsize)}, i1 false)"
            )
        if epilogue is not None:
            epilogue.call(f, first_row, "%m", n0, f.sub(n1, n0), f.gep(kind, c, n0), "%ldc")
