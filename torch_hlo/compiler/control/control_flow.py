"""Control flow, and the steps that only name, order or copy values. Called computations become
native functions."""

from torch_hlo.hlo.ir import Computation, Dim, Instruction, fixed

from ..codegen import CodegenError, Place, Program
from ..codegen.block import OWN, Places
from ..codegen.computation import emit_computation
from ..llvm import Function
from .loop_fill import is_unwritten

# bytes of a matrix that come from beyond the second cache in every turn: in the order in which they
# are read, 6 to 18 % sooner
LARGE = 5 << 19


def copy_places(program: Program, target: Places, source: Places) -> None:
    """Copy a value, tuples element by element."""
    if isinstance(target, Place):
        assert isinstance(source, Place)
        program.copy(target, source)
    else:
        assert isinstance(source, tuple)
        for t, s in zip(target, source, strict=True):
            copy_places(program, t, s)


def elements(program: Program, x: Instruction) -> tuple[Places, ...]:
    """Where the elements of a tuple live."""
    found = program.places(x)
    assert isinstance(found, tuple)
    return found


def while_(program: Program, x: Instruction) -> None:
    state = program.places(x)
    (start,) = x.operands
    if start.op == "tuple":
        assert isinstance(state, tuple)
        for target, value in zip(state, start.operands, strict=True):
            if not is_unwritten(value):
                copy_places(program, target, program.places(value))
    else:
        copy_places(program, state, program.places(start))
    if x.get("independent") and program.target.threads and not program.is_apart:
        return _at_once(program, x, elements(program, x))
    keep = program.scratch(1)
    calls = len(program.host_calls)
    condition = emit_computation(program, x["condition"], [state], keep)
    with program.keeping(_factors(x, state)):
        body = emit_computation(program, x["body"], [state], state)
    f = program.code
    with f.while_() as loop:
        program.call(condition, ["ptr %block"])
        # one may fail, and the condition may depend on what it did not compute
        if len(program.host_calls) > calls:
            f.break_if(loop, program.failed())
        f.break_if(loop, f.icmp("eq", program.fetch("i8", keep), 0, "i8"))
        program.call(body, ["ptr %block"])


def _factors(x: Instruction, state: Places) -> list[Place]:
    """Large matrices that a loop does not change and multiplies by."""
    body = x["body"]
    if body.root.op != "tuple":
        return []
    assert isinstance(state, tuple)
    kept = [
        k
        for k, y in enumerate(body.root.operands)
        if y.op == "get-tuple-element" and y.operands == body.params and y["index"] == k
    ]
    shapes = x.elements
    matrices = ((k, place) for k, place in enumerate(state) if isinstance(place, Place))
    return [
        place
        for k, place in matrices
        if k in kept
        and shapes[k].is_static
        and shapes[k].rank == 2
        and fixed(shapes[k].nbytes) >= LARGE
        and _multiplies(body, k)
    ]


def _multiplies(c: Computation, k: int) -> bool:
    """Whether element `k` of the state is the right operand of a product of `c`, or of a loop in
    it."""
    for y in c.instructions():
        at = [
            n
            for n, o in enumerate(y.operands)
            if o.op == "get-tuple-element" and o.operands == c.params and o["index"] == k
        ]
        if at and (
            y.op == "dot"
            and 1 in at
            or y.op == "fusion"
            and any(
                z.op == "dot" and z.operands[1].op == "parameter" and z.operands[1]["index"] in at
                for z in y["calls"].instructions()
            )
        ):
            return True
        if y.op == "while" and any(
            o.op == "get-tuple-element"
            and o.operands == c.params
            and o["index"] == k
            and _multiplies(y["body"], j)
            for j, o in enumerate(y.operand.operands)
        ):
            return True
    return False


def _at_once(program: Program, x: Instruction, state: tuple[Places, ...]) -> None:
    """The turns of a loop are items of a parallel region: each has a copy of the block whose word
    OWN points to memory of its own, where its number is, too."""
    turns = x["independent"]
    calls = len(program.host_calls)
    with program.keeping(_factors(x, state)), program.apart() as nbytes:
        number = program.scratch(8)
        body = emit_computation(program, x["body"], [(number, *state[1:])], (number, *state[1:]))
    if len(program.host_calls) > calls:
        raise CodegenError(
            f"while {x.shape}: its turns are to run at once, but they call the host; leave out"
            " `independent`"
        )
    each = fixed(nbytes())
    f = Function(
        f"turns.{program.number()}",
        "i64 lo, i64 hi, ptr block, ptr memory",
    )
    own = f.alloca("i64", program.words, 64)
    with f.items() as turn:
        f.do(
            f"call void @llvm.memcpy.p0.p0.i64(ptr {own}, ptr %block, i64 {8 * program.words}, i1"
            " false)"
        )
        memory = f.gep("i8", "%memory", f.mul(turn, each))
        f.store_at("ptr", memory, own, OWN)
        f.store("i64", turn, f.gep("i8", memory, fixed(number.offset)))
        f.call(body, f"ptr {own}")
    memory = program.at(program.scratch(each * turns))
    program.parallel(
        program.define(f),
        ["ptr %block", f"ptr {memory}"],
        turns,
        cost=1e6,
    )


def conditional(program: Program, x: Instruction) -> None:
    selector, *operands = x.operands
    branches = x["branch_computations"]
    result = program.places(x)
    f = program.code
    if selector.dtype == "pred":
        chosen = f.select(
            f.icmp("ne", program.fetch("i8", program.place(selector)), 0, "i8"),
            "i64",
            0,
            1,
        )
    else:
        index = f.op(f"sext i32 {program.fetch('i32', program.place(selector))} to i64")
        # Out of range selects the last branch; a negative index is a large unsigned one.
        chosen = f.op(f"call i64 @llvm.umin.i64(i64 {index}, i64 {len(branches) - 1})")
    for i, (branch, operand) in enumerate(zip(branches, operands, strict=True)):
        name = emit_computation(program, branch, [program.places(operand)], result)
        with f.when(f.icmp("eq", chosen, i)):
            program.call(name, ["ptr %block"])


def call(program: Program, x: Instruction) -> None:
    name = emit_computation(
        program,
        x["to_apply"],
        [program.places(o) for o in x.operands],
        program.places(x),
    )
    program.call(name, ["ptr %block"])


def async_start(program: Program, x: Instruction) -> None:
    """Runs at once; the value is (operands, result, …)."""
    operands, result = elements(program, x)[:2]
    assert isinstance(operands, tuple)
    copy_places(program, operands, tuple(program.places(o) for o in x.operands))
    program.call(emit_computation(program, x["calls"], operands, result), ["ptr %block"])


def copy_start(program: Program, x: Instruction) -> None:
    for target in elements(program, x)[:2]:
        copy_places(program, target, program.places(x.operand))


def forward(program: Program, x: Instruction) -> None:
    """The value is that of the operand; the sizes of a dynamic-reshape are already in its shape."""
    copy_places(program, program.places(x), program.places(x.operand))


def copy_done(program: Program, x: Instruction) -> None:
    copy_places(program, program.places(x), elements(program, x.operand)[0])


def async_done(program: Program, x: Instruction) -> None:
    copy_places(program, program.places(x), elements(program, x.operand)[1])


def after_all(program: Program, x: Instruction) -> None:
    """A token holds nothing: steps already run in order."""


def get_dimension_size(program: Program, x: Instruction) -> None:
    size = x.operand.dims[x["dimensions"][0]]
    program.put(
        (
            program.code.op(f"trunc i64 {program.size(size)} to i32")
            if isinstance(size, Dim)
            else size
        ),
        program.place(x),
    )


def set_dimension_size(program: Program, x: Instruction) -> None:
    """Sizes are static or symbolic, never bounded: only a size that changes nothing is accepted."""
    value, size = x.operands
    dimension = x["dimensions"][0]
    current = value.dims[dimension]
    given = size["literal"].numpy().item() if size.op == "constant" else None
    same_source = (
        size.op == "get-dimension-size" and size.operand.dims[size["dimensions"][0]] == current
    )
    if given != current and not same_source:
        raise CodegenError(
            f"set-dimension-size({value.shape}, {size.shape}) of dimension {dimension}: arrays with"
            " a bounded size are not supported; use a symbolic size"
        )
    copy_places(program, program.places(x), program.places(value))
