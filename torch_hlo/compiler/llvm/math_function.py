"""What elementary functions are made with: quotients, functions of
their own, and a slower way where an operand is beyond the polynomials."""

from __future__ import annotations

import math
from collections.abc import Callable

from .emit import Emit, Operand, Typed, Unit

INF = math.inf
NAN = math.nan


Elementary = Callable[..., str]  # of a Typed and its operands


MANTISSA = {"float": (23, 127), "double": (52, 1023)}  # bits, and the bias of the exponent
# three halves of the first number from which on there are no fractions: added to a whole number it
# moves that to the end of the mantissa
SHIFT = {"float": 1.5 * 2.0**23, "double": 1.5 * 2.0**52}


def whole(t: Typed, moved: str) -> tuple[str, str]:
    """Of a number with SHIFT added: the whole number nearest to it, and an integer whose last bits
    are those of that. (Conversions of doubles to integers are calls for each lane with AVX2.)"""
    return t.sub(moved, SHIFT[t.kind]), t.bits(moved)


def scales_in_hardware(t: Typed) -> bool:
    return t.e.lanes == (16 if t.kind == "float" else 8) and t.e.unit.has("avx512f")


def powers_in_hardware(t: Typed) -> bool:
    """Whether 2^x of floats is an instruction, within 2 ulp everywhere."""
    return t.kind == "float" and t.e.unit.has("exp2")


def quotient(t: Typed, a: Operand, b: str) -> str:
    """a / b within an ulp, for a `b` whose reciprocal is normal and a quotient that is: an
    approximation and two corrections, a fourth of the time that dividing vectors of doubles takes.
    What is no such number may become NaN. Floats on GPUs: within 2 ulp, and a number over infinity
    is 0."""
    if powers_in_hardware(t):
        return t.e.op(f"fdiv afn {t.type} {t.of(a)}, {b}")
    if t.kind != "double" or not scales_in_hardware(t):
        return t.div(a, b)
    v = t.type
    r = t.e.op(f"call {v} @llvm.x86.avx512.rcp14.pd.512({v} {b}, {v} zeroinitializer, i8 -1)")
    minus = t.neg(b)
    error = t.fma(minus, r, 1.0)  # 2^-14
    r = t.fma(r, t.fma(error, error, error), r)  # 2^-42
    q = t.mul(a, r)
    return t.fma(t.fma(minus, q, a), r, q)


def own_function(name: str, body: Elementary) -> Elementary:
    """A function of its own: `body(t, *operands) -> result`, which may write branches and return
    from some of them."""

    def run(t: Typed, *operands: str) -> str:
        unit = t.e.unit
        function = f"torch_hlo.{name}.{t.suffix}"
        if function not in unit.functions:
            unit.functions[function] = text(t, function, len(operands))
        return t.e.op(f"call {t.type} @{function}({', '.join(f'{t.type} {x}' for x in operands)})")

    def text(outer: Typed, function: str, arity: int) -> str:
        lines: list[str] = []
        e = Emit(outer.e.lanes, lines, Unit(outer.e.unit.target))
        e.do(f"ret {outer.type} {body(e.typed(outer.kind), *('%x', '%y')[:arity])}")
        outer.e.unit.externals.update(e.unit.externals)
        outer.e.unit.functions.update(e.unit.functions)
        parameters = ", ".join(f"{outer.type} {x}" for x in ("%x", "%y")[:arity])
        return "\n".join(
            [
                f"define internal {outer.type} @{function}({parameters}) #0 {{",
                *lines,
                "}",
                "",
            ]
        )

    run.__name__ = name
    return run


def return_unless(t: Typed, far: str, rare: Callable[[], str]) -> None:
    """In a `own_function`: return `rare()`, for all lanes, if `far` holds in one."""
    e = t.e
    number = t.e.unit.number()
    e.do(f"br i1 {e.any(far) if e.lanes > 1 else far}, label %far{number}, label %near{number}")
    e.lines.append(f"far{number}:")
    e.do(f"ret {t.type} {rare()}")
    e.lines.append(f"near{number}:")


def falls_back(
    beyond: Elementary, rare: Elementary | None = None
) -> Callable[[Elementary], Elementary]:
    """A function whose fast way is wrong for operands where `beyond(t, *operands)` holds: it gets a
    function of its own, which asks `rare`, or libm, for all lanes when one holds such operands."""

    def decorate(fn: Elementary) -> Elementary:
        name = fn.__name__

        def libm(t: Typed, *operands: str) -> str:
            return t.external(name + ("f" if t.kind == "float" else ""), *operands)

        def body(t: Typed, *operands: str) -> str:
            return_unless(t, beyond(t, *operands), lambda: (rare or libm)(t, *operands))
            return fn(t, *operands)

        run = own_function(name, body)
        run.__doc__ = fn.__doc__
        return run

    return decorate
