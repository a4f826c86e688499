"""Loops for lowerings: `loop` and `scan_loop` over Instructions, `while_loop` over Exprs. The body
is compiled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_hlo.hlo.ir import (
    Computation,
    Instruction,
    Shape,
    Size,
    build,
    instr,
    parameters_of,
    tuple_shape,
)

from . import promote
from .expr import Expr
from .promote import reshape
from .registry import LoweringError


def elements(x: Instruction, count: int) -> list[Instruction]:
    return [build.get_tuple_element(x, i) for i in range(count)]


def tupled(values: Sequence[Instruction]) -> Instruction:
    return instr("tuple", values, tuple_shape(*(v.shape for v in values)))


def named_call(
    name: str, config: str, operands: Sequence[Instruction], meaning: Callable
) -> list[Instruction]:
    """The results `meaning(*operands)`, of a call that a kernel may stand for, because `config`
    says what it is."""
    params = parameters_of(o.shape for o in operands)
    results = tuple(meaning(*params))
    call = instr(
        "call",
        operands,
        to_apply=Computation(name, params, tupled(results)),
        backend_config=config,
    )
    return elements(call, len(results))


def loop(condition: Callable, body: Callable, state: Sequence[Instruction]) -> list[Instruction]:
    """Repeat `body(*state) -> state` while `condition(*state) -> pred` holds."""
    start = tupled(state)
    param = instr("parameter", (), start.shape, index=0)
    inner = elements(param, len(state))
    after = body(*inner)
    for i, (old, new) in enumerate(zip(state, after, strict=True)):
        if (old.dtype, old.dims) != (new.dtype, new.dims):
            raise LoweringError(
                f"loop: value {i} is {old.shape} before and {new.shape} after the body; they must"
                " be alike"
            )
    holds = promote.cast(reshape(condition(*inner), ()), "pred")
    result = instr(
        "while",
        (start,),
        start.shape,
        condition=Computation("condition", (param,), holds),
        body=Computation("body", (param,), tupled(after)),
    )
    return elements(result, len(state))


def _at(x: Instruction, i: Instruction) -> Instruction:
    """Element `i` along dimension 0."""
    zero = promote.constant(0, "s64")
    sizes = (1, *x.dims[1:])
    one = instr(
        "dynamic-slice",
        (x, i, *[zero] * (x.rank - 1)),
        Shape(x.dtype, sizes),
        dynamic_slice_sizes=sizes,
    )
    return reshape(one, x.dims[1:])


def _put(x: Instruction, i: Instruction, value: Instruction) -> Instruction:
    zero = promote.constant(0, "s64")
    update = reshape(value, (1, *value.dims))
    return instr("dynamic-update-slice", (x, update, i, *[zero] * (x.rank - 1)), x.shape)


def scan_loop(
    combine: Callable,
    carry: Sequence[Instruction],
    xs: Sequence[Instruction],
    rest: Sequence[Instruction],
    length: Size,
    reverse: bool = False,
) -> tuple[list[Instruction], list[Instruction]]:
    """`combine(carry, x, rest) -> (carry, y)` over dimension 0 of `xs`, from its end when
    `reverse`. Returns the last carry and the ys, stacked: y of x[i] is at i."""
    nc = len(carry)
    nx = len(xs)

    def slices(x_state: Sequence[Instruction], i: Instruction) -> list[Instruction]:
        return [_at(x, i) for x in x_state]

    # The shapes of ys: the body applied once, outside, is not part of the program.
    _, y0 = combine(carry, slices(xs, promote.constant(0, "s64")), rest)
    ys = [promote.full(0, y.dtype, (length, *y.dims)) for y in y0]
    count = promote.scalar(length, "s64")
    state = [promote.constant(0, "s64"), count, *carry, *xs, *rest, *ys]
    first_y = 2 + nc + nx + len(rest)

    def body(i: Instruction, count: Instruction, *values: Instruction) -> list[Instruction]:
        c = values[:nc]
        x = values[nc : nc + nx]
        r = values[nc + nx : first_y - 2]
        out = values[first_y - 2 :]
        after = instr("add", (i, promote.constant(1, "s64")))
        at = instr("subtract", (count, after)) if reverse else i
        new, y = combine(c, slices(x, at), r)
        return [
            after,
            count,
            *new,
            *x,
            *r,
            *[_put(o, at, v) for o, v in zip(out, y, strict=True)],
        ]

    def holds(i: Instruction, count: Instruction, *_: Instruction) -> Instruction:
        return instr("compare", (i, count), direction="LT")

    after = loop(holds, body, state)
    return after[2 : 2 + nc], after[first_y:]


def while_loop(
    condition: Callable,
    body: Callable,
    state: Sequence[Expr],
    limit: int | None = None,
) -> tuple[Expr, ...]:
    """Repeat `body(*state) -> state` while any element of `condition(*state)` holds, at most
    `limit` times."""

    def holds(count: Instruction, *values: Instruction) -> Instruction:
        test = condition(*map(Expr, values))
        if test.dims:
            test = Expr(
                build.reduce(
                    test.x,
                    promote.constant(False, "pred"),
                    tuple(range(len(test.dims))),
                    "or",
                )
            )
        return (test if limit is None else test & (Expr(count) < limit)).x

    def step(count: Instruction, *values: Instruction) -> list[Instruction]:
        return [(Expr(count) + 1).x, *(v.x for v in body(*map(Expr, values)))]

    return tuple(
        map(Expr, loop(holds, step, [promote.constant(0, "s64"), *(v.x for v in state)])[1:])
    )


def parameters(*shapes: Shape) -> tuple[Expr, ...]:
    """Parameters of a computation."""
    return tuple(Expr(instr("parameter", (), s, index=i)) for i, s in enumerate(shapes))
