"""dot: any batch, contracting and free dimensions, through the kernels of gemm.py and gemv.py.

product.py makes matrices of the operands. Nothing is copied for a transposed one: it is only
another pair of strides. Results narrower than the accumulator (bf16, f16, small integers) are
converted from a scratch array."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace as with_fields

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    Computation,
    Instruction,
    Instructions,
    instr,
    parameters_of,
    postorder,
    replace,
)

from ..codegen import Place, Program
from ..loops.elementwise_loops import Store, run_loop
from .dot_plan import plan_of
from .dot_product import emit_dot, emit_long, is_long
from .dot_task import Finish
from .epilogue import Tiles, epilogue, on_sums
from .product import (
    ACCUMULATORS,
    SOURCES,
    product,
    retyped,
    rewritten,
    roles,
    the_product,
    types_of,
)
from .tile import product_tile


@frozen
class Output:
    """A fusion of kind output: the product `inner` of its `body`, on the step's operands `outer`,
    and where operands and results are."""

    body: Computation
    inner: Instruction
    outer: Instruction
    operands: list[Place]
    results: list[Place]


def emit_tree(
    program: Program,
    root: Instruction,
    known: Instructions,
    result: Instruction,
) -> None:
    """Emit the instructions between `known` (already in memory) and `root`, and leave the value in
    `result`'s buffer.

    What lies between gets memory of its own for the duration of the step, even where the program
    has the same instruction: that one's buffer may not be valid here.
    """
    steps = [x for x in postorder((root,), known) if x.op not in ("constant", "parameter")]
    target = program.places(result)
    with program.rebound():
        for x in steps:
            program.bind(x, target if x is root else program.allocate_shape(x.shape))
            program.step(x)


def dot(program: Program, x: Instruction) -> None:
    """Emit a dot as calls of matrix kernels. Raises CodegenError (through `step`) for element types
    without a kernel."""
    if x.size == 0:
        return
    simpler = rewritten(x)
    if simpler is not None:
        return emit_tree(program, simpler, x.operands, x)
    kind, wide = ACCUMULATORS[x.dtype]
    if wide != x.dtype:
        return emit_output(program, x, narrow(x))
    pointers = [program.pointer(o) for o in (*x.operands, x)]
    if is_long(x):
        return emit_long(program, the_product(x), kind, types_of(x), pointers)
    emit_dot(program, x, pointers, None)


def narrow(x: Instruction) -> Computation:
    """A dot whose result is narrower than its sums, as the body of a fusion."""
    params = parameters_of(o.shape for o in x.operands)
    return Computation("narrow", params, replace(x, params, x.shape))


def fusion(program: Program, x: Instruction) -> None:
    """A fusion of kind output around a dot."""
    emit_output(program, x, x["calls"])


def emit_output(program: Program, x: Instruction, body: Computation) -> None:
    """A step with the value of `body` on the operands of `x`: a dot of parameters, and elementwise
    instructions on its result."""
    o = parts_of_output(program, x, body, "dot")
    if o.outer.size == 0:
        return
    if _converted(x, o.outer) and _reads_rows(program, in_bytes := _reading_bytes(o.outer)):
        return _emit_output(program, with_fields(o, outer=in_bytes))
    with operands_converted(program, x, o.outer):
        _emit_output(program, o)


def _converted(x: Instruction, outer: Instruction) -> list[Instruction]:
    """Operands of the product `outer` that the fusion `x` converts."""
    return [o for o in outer.operands if o.op == "convert" and o not in x.operands]


@contextmanager
def operands_converted(program: Program, x: Instruction, outer: Instruction) -> Iterator[None]:
    """In the `with` block the operands of the product `outer` that the fusion `x` converts are in
    memory."""
    converts = _converted(x, outer)
    with program.rebound() if converts else nullcontext():
        for o in converts:
            program.bind(o, program.allocate_shape(o.shape))
            program.step(o)
        yield


def _reads_rows(program: Program, x: Instruction) -> bool:
    """Whether a dot is for the kernels that read the large operand once."""
    p = product(x)
    kind = ACCUMULATORS[x.dtype][0]
    if p is None:
        return False
    left, right = (SOURCES[o.dtype, kind] for o in x.operands)
    t = product_tile(kind, program.target.vector_bytes)
    return plan_of(p, t, (left, right)).kernel != "tiles"


def _emit_output(program: Program, o: Output) -> None:
    outer = o.outer
    result = o.results[0]
    wide = _wide(o.outer)
    found = None
    if rewritten(outer) is None and not is_long(outer):
        found = epilogue(program, o.body, o.inner, len(roles(outer)[2][1]), wide)
    if found is None:
        return emit_widened(program, o)

    def sums() -> str:
        """The first result's memory where it can hold them."""
        taken = {(p.word, p.offset) for p in o.operands}
        free = o.body.results[0].dtype == wide and (result.word, result.offset) not in taken
        return program.at(result if free else program.scratch(outer.shape.with_dtype(wide).nbytes))

    finish = Finish(found.form, arguments_of(program, found, o), sums)
    emit_dot(program, outer, [*(program.pointer(x) for x in outer.operands), "null"], finish)


def _wide(x: Instruction) -> str:
    """The type of a product's sums."""
    return ACCUMULATORS.get(x.dtype, (None, x.dtype))[1]


def parts_of_output(program: Program, x: Instruction, body: Computation, op: str) -> Output:
    """The fusion `x` of kind output around its product, an `op`."""
    inner = next(y for y in body.instructions() if y.op == op)
    outer = instr(
        op,
        tuple(_outside(x, o) for o in inner.operands),
        inner.shape,
        **dict(inner.attrs),
    )
    results = (
        [program.place(x, i) for i in range(len(x.elements))] if x.is_tuple else [program.place(x)]
    )
    return Output(body, inner, outer, [program.place(o) for o in x.operands], results)


def _outside(x: Instruction, o: Instruction) -> Instruction:
    """What an operand of the product in the body of the fusion `x` is outside: an operand, or a
    convert of one."""
    return (
        x.operands[o["index"]]
        if o.op == "parameter"
        else instr("convert", (_outside(x, o.operand),), o.shape)
    )


def _reading_bytes(x: Instruction) -> Instruction:
    """The dot on the operands of converts; its kernel makes the elements floats."""
    return replace(x, (o.operand if o.op == "convert" else o for o in x.operands), x.shape)


def arguments_of(program: Program, found: Tiles, o: Output) -> tuple[str, ...]:
    """What an engine passes on to an epilogue."""
    read = [o.operands[i] for i in found.leaves]
    return (*program.arguments((f"@{found.name}", *read, *o.results), found.sizes),)


def emit_widened(program: Program, o: Output) -> None:
    """The product as an array of sums, then a loop."""
    sums = retyped(o.outer, _wide(o.outer), list(o.outer.operands))
    emit_apart(program, with_fields(o, outer=sums))


def emit_apart(program: Program, o: Output) -> None:
    """The product into an array, then a loop."""
    outer = o.outer
    rest, sums = on_sums(o.body, o.inner, outer.dtype)
    with program.rebound():
        program.bind(outer, program.allocate_shape(outer.shape))
        program.step(outer)
        place = program.place(outer)
        read = set(postorder((rest.root,)))
        places = zip(rest.params, (*o.operands, place), strict=True)
        used = [(p, q) for p, q in places if p in read]
        run_loop(
            program,
            [Store(r) for r in rest.results],
            [p for p, _ in used],
            [q for _, q in used],
            o.results,
            key=("output", o.body, sums),
        )
