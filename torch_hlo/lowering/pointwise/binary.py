"""Elementwise ops of two or three operands: arithmetic, comparison, logic, clamp, where, addcmul,
lerp."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from functools import partial

import torch

from torch_hlo.hlo.ir import Instruction

from ..core import (
    Expr,
    Operand,
    Scalar,
    Term,
    absolute,
    atan2,
    aten,
    binary,
    bitcast,
    compare,
    compute,
    cos,
    exp,
    expected,
    finish,
    floor,
    imag,
    is_finite,
    is_nan,
    is_number,
    log,
    log1p,
    lowers,
    maximum,
    minimum,
    pointwise,
    power,
    promote,
    real,
    sin,
    sqrt,
    trunc,
    where,
    while_loop,
)
from ..core.elementwise import apply
from .pointwise import exp2, is_bool, is_complex, signbit


def _integral(x: Expr) -> bool:
    return promote.is_integral(x.dtype)


def _scaled(y: Expr, alpha: Term) -> Expr:
    if is_number(alpha) and alpha == 1:
        return y
    if is_bool(y):
        return y & y.like(bool(alpha))
    return y * alpha


@pointwise(aten.add, arity=2)
def add(x: Expr, y: Expr, alpha: Term = 1) -> Expr:
    y = _scaled(y, alpha)
    return x | y if is_bool(x) else x + y


@pointwise(aten.sub, aten.subtract, arity=2)
def sub(x: Expr, y: Expr, alpha: Term = 1) -> Expr:
    return x - _scaled(y, alpha)


@pointwise(aten.rsub, arity=2)
def rsub(x: Expr, y: Expr, alpha: Term = 1) -> Expr:
    return y - _scaled(x, alpha)


@pointwise(aten.mul, aten.multiply, arity=2)
def mul(x: Expr, y: Expr) -> Expr:
    return x & y if is_bool(x) else x * y


@pointwise(aten.div, aten.divide, aten.true_divide, arity=2)
def div(x: Expr, y: Expr, rounding_mode: str | None = None) -> Expr:
    if rounding_mode == "floor":
        return floor_divide(x, y)
    return trunc(x / y) if rounding_mode == "trunc" and not _integral(x) else x / y


@pointwise(aten.floor_divide, arity=2)
def floor_divide(x: Expr, y: Expr) -> Expr:
    """Rounds towards minus infinity; for floats from the exact remainder, as Python and torch
    do."""
    if x.kind in "pu":
        return x / y
    remainder = binary("remainder", x, y)
    crosses = remainder.ne(0) & ((remainder < 0) ^ (y < 0))
    if _integral(x):
        return x / y - crosses.cast(x.dtype)
    quotient = (x - remainder) / y
    quotient = where(crosses, quotient - 1, quotient)
    below = floor(quotient)
    rounded = where(quotient - below > 0.5, below + 1, below)
    signed_zero = x / y * 0
    return where(y.eq(0), x / y, where(quotient.eq(0), signed_zero, rounded))


pointwise(aten.fmod, arity=2, round_scalars=True)(partial(binary, "remainder"))


@pointwise(aten.remainder, arity=2, round_scalars=True)
def remainder(x: Expr, y: Expr) -> Expr:
    if x.kind in "pu":
        return binary("remainder", x, y)
    r = binary("remainder", x, y)
    return where(r.ne(0) & ((r < 0) ^ (y < 0)), r + y, r)


@pointwise(aten.maximum, arity=2)
def maximum_(x: Expr, y: Expr) -> Expr:
    return x | y if is_bool(x) else maximum(x, y)


@pointwise(aten.minimum, arity=2)
def minimum_(x: Expr, y: Expr) -> Expr:
    return x & y if is_bool(x) else minimum(x, y)


def _without_nan(extreme: Callable[[Expr, Expr], Expr], x: Expr, y: Expr) -> Expr:
    """Of a nan and a number: the number."""
    value = extreme(x, y)
    return value if _integral(x) else where(is_nan(x), y, where(is_nan(y), x, value))


pointwise(aten.fmax, arity=2)(partial(_without_nan, maximum_))
pointwise(aten.fmin, arity=2)(partial(_without_nan, minimum_))
pointwise(aten.atan2, aten.arctan2, arity=2)(atan2)


@pointwise(aten.hypot, arity=2)
def hypot(x: Expr, y: Expr) -> Expr:
    a = absolute(x)
    b = absolute(y)
    large = maximum(a, b)
    small = minimum(a, b)
    ratio = small / where(large.eq(0), 1, large)
    value = large * sqrt(1 + ratio * ratio)
    infinite = a.eq(math.inf) | b.eq(math.inf)
    return where(infinite, math.inf, value)


@pointwise(aten.copysign, arity=2)
def copysign(x: Expr, y: Expr) -> Expr:
    size = absolute(x)
    return where(signbit(y), -size, size)


@pointwise(aten.nextafter, arity=2)
def nextafter(x: Expr, y: Expr) -> Expr:
    integer = {"f32": "s32", "f64": "s64"}[x.dtype]
    bits = bitcast(x, integer)
    away = (y > x).eq(x > 0)
    step = bits + where(away, bits.like(1), -1)
    tiny = bitcast(bits.like(1), x.dtype)
    value = where(x.eq(0), where(y > 0, tiny, -tiny), bitcast(step, x.dtype))
    return where(is_nan(x) | is_nan(y), x + y, where(x.eq(y), y, value))


# Powers.
@lowers(aten.pow)
def pow_(base: Operand, exponent: Operand) -> Instruction:
    if is_number(exponent) and not isinstance(exponent, complex):
        return apply(lambda x: power_number(x, exponent), (base,), {})
    return apply(power_, (base, exponent), {}, 2)


@pointwise(aten.float_power, arity=2)
def power_(x: Expr, y: Expr) -> Expr:
    if is_bool(x):
        return x | ~y
    if not _integral(x):
        return power(x, y)
    return integer_power(x, y)


def integer_power(x: Expr, y: Expr) -> Expr:
    """Square and multiply with wrap-around; a negative exponent gives 0 except for bases 1 and
    -1."""
    bits = promote.DTYPES[x.dtype].bits
    result = x.like(1)
    square = x
    left = y
    # Beyond 63 only 0, 1, -1 and even bases (that wrap to 0) have a short answer; odd ones need
    # every bit.
    for i in range(6 if bits <= 8 else min(bits, 63)):
        result = where((binary("shift-right-logical", left, i) & 1).ne(0), result * square, result)
        square *= square
    if x.kind == "u":
        return result
    odd = (y & 1).ne(0)
    negative = where(x.eq(1), 1, where(x.eq(-1), where(odd, x.like(-1), 1), 0))
    return where(y < 0, negative, result)


def power_number(x: Expr, exponent: int | float) -> Expr:
    """x ** a Python number, by multiplications for the common exponents."""
    if is_bool(x):
        return x | x.like(not exponent)
    special = {
        0: lambda: x.like(1),
        1: lambda: x,
        2: lambda: x * x,
        3: lambda: x * x * x,
    }
    if exponent in special:
        return special[exponent]()
    if _integral(x):
        return integer_power(x, x.like(exponent))
    if exponent == -1:
        return 1.0 / x
    if exponent == -2:
        return 1.0 / (x * x)
    if not is_complex(x):
        if exponent == 0.5:
            return sqrt(x)
        if exponent == -0.5:
            return 1.0 / sqrt(x)
    return power(x, x.like(exponent))


@pointwise(aten.ldexp, arity=2)
def ldexp(x: Expr, y: Expr) -> Expr:
    return x * exp2(y)


@pointwise(aten.xlogy, aten.special_xlogy, arity=2)
def xlogy(x: Expr, y: Expr) -> Expr:
    return where(is_nan(y), y, where(x.eq(0), 0, x * log(y)))


@pointwise(aten.special_xlog1py, arity=2)
def xlog1py(x: Expr, y: Expr) -> Expr:
    return where(is_nan(y), y, where(x.eq(0), 0, x * log1p(y)))


@pointwise(aten.logaddexp, arity=2)
def logaddexp(x: Expr, y: Expr) -> Expr:
    if is_complex(x):
        first = real(x) > real(y)
        high = where(first, x, y)
        low = where(first, y, x)
        return high + log(exp(low - high) + 1)
    top = maximum(x, y)
    same = x.eq(y)
    return where(same & ~is_finite(x), x, top + log1p(exp(-absolute(where(same, 0, x - y)))))


@pointwise(aten.heaviside, arity=2)
def heaviside(x: Expr, values: Expr) -> Expr:
    return where(x.eq(0), values, (x > 0).cast(x.dtype))


@pointwise(aten.lcm, arity=2)
def lcm(x: Expr, y: Expr) -> Expr:
    divisor = gcd(x, y)
    value = x / where(divisor.eq(0), 1, divisor) * y
    return absolute(where(divisor.eq(0), 0, value)) if x.kind == "s" else value


@pointwise(aten.gcd, arity=2)
def gcd(x: Expr, y: Expr) -> Expr:
    """Euclid's algorithm on all elements until every one is done."""
    if x.kind == "s":
        x = absolute(x)
        y = absolute(y)

    def step(a: Expr, b: Expr) -> tuple[Expr, Expr]:
        done = b.eq(0)
        return where(done, a, b), where(done, b, binary("remainder", a, where(done, 1, b)))

    return while_loop(lambda a, b: b.ne(0), step, (x, y))[0]


# Comparison and predicates: computed in the operands' common type.
for _packets, _direction in (
    ((aten.eq.Tensor, aten.eq.Scalar), "EQ"),
    ((aten.ne.Tensor, aten.ne.Scalar, aten.not_equal), "NE"),
    ((aten.lt.Tensor, aten.lt.Scalar, aten.less), "LT"),
    ((aten.le.Tensor, aten.le.Scalar, aten.less_equal), "LE"),
    ((aten.gt.Tensor, aten.gt.Scalar, aten.greater), "GT"),
    ((aten.ge.Tensor, aten.ge.Scalar, aten.greater_equal), "GE"),
):
    pointwise(*_packets, arity=2, operands=True, round_scalars=True)(partial(compare, _direction))


pointwise(aten.isnan, operands=True)(is_nan)


@pointwise(aten.isinf, operands=True)
def isinf(x: Expr) -> Expr:
    if is_complex(x):
        return isinf(real(x)) | isinf(imag(x))
    return x.ne(x) if _integral(x) else absolute(x).eq(math.inf)


@pointwise(aten.nan_to_num)
def nan_to_num(
    x: Expr,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Expr:
    if is_complex(x):
        parts = (nan_to_num(part(x), nan, posinf, neginf) for part in (real, imag))
        return binary("complex", *parts)
    if _integral(x):
        return x
    ends = torch.finfo(promote.HLO_TO_TORCH[expected().dtype])
    high = ends.max if posinf is None else posinf
    low = ends.min if neginf is None else neginf
    return where(
        is_nan(x), nan or 0, where(absolute(x).eq(math.inf), where(x > 0, x.like(high), low), x)
    )


@pointwise(aten.isfinite, operands=True)
def isfinite(x: Expr) -> Expr:
    return x.eq(x) if _integral(x) else ~isinf(x) & ~is_nan(x)


def _is_end(end: float, x: Expr) -> Expr:
    return x.ne(x) if _integral(x) else x.eq(end)


pointwise(aten.isposinf, operands=True)(partial(_is_end, math.inf))
pointwise(aten.isneginf, operands=True)(partial(_is_end, -math.inf))


@pointwise(aten.logical_not, operands=True)
def logical_not(x: Expr) -> Expr:
    return x.eq(0)


def _logical(op: str, x: Expr, y: Expr) -> Expr:
    return binary(op, x if is_bool(x) else x.ne(0), y if is_bool(y) else y.ne(0))


for _packet, _op in (
    (aten.logical_and, "and"),
    (aten.logical_or, "or"),
    (aten.logical_xor, "xor"),
):
    pointwise(_packet, arity=2, operands=True)(partial(_logical, _op))


for _packets, _op in (
    ((aten.bitwise_and, aten.__and__.Scalar, aten.__and__.Tensor), "and"),
    ((aten.bitwise_or, aten.__or__.Scalar, aten.__or__.Tensor), "or"),
    ((aten.bitwise_xor, aten.__xor__.Scalar, aten.__xor__.Tensor), "xor"),
    ((aten.bitwise_left_shift, aten.__lshift__.Tensor, aten.__lshift__.Scalar), "shift-left"),
):
    pointwise(*_packets, arity=2)(partial(binary, _op))


pointwise(aten.bitwise_not)(operator.invert)


@pointwise(aten.bitwise_right_shift, aten.__rshift__.Tensor, aten.__rshift__.Scalar, arity=2)
def right_shift(x: Expr, y: Expr) -> Expr:
    return binary(
        "shift-right-logical" if x.kind == "u" else "shift-right-arithmetic",
        x,
        y,
    )


# Selection.
@lowers(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where_(condition: Instruction, x: Operand, y: Operand) -> Instruction:
    shape = expected()
    chosen = (Expr(promote.operand(v, shape.dtype, shape.dims)) for v in (x, y))
    return where(Expr(promote.operand(condition, "pred", shape.dims)), *chosen).x


@lowers(aten.masked_fill)
def masked_fill(x: Instruction, mask: Instruction, value: Operand) -> Instruction:
    return where_(mask, value, x)


@pointwise(aten.clamp, aten.clip, arity=3)
def clamp(x: Expr, low: Expr | None = None, high: Expr | None = None) -> Expr:
    if low is not None:
        x = maximum(x, low)
    return x if high is None else minimum(x, high)


lowers(aten.clamp_min)(lambda x, low: apply(clamp, (x, low), {}, 2))
lowers(aten.clamp_max)(lambda x, high: apply(clamp, (x, None, high), {}, 3))


# Fused arithmetic.
@lowers(aten.addcmul)
def addcmul(x: Instruction, a: Instruction, b: Instruction, value: Scalar = 1) -> Instruction:
    return apply(lambda x, a, b: x + _scaled(a, value) * b, (x, a, b), {}, 3)


@lowers(aten.addcdiv)
def addcdiv(x: Instruction, a: Instruction, b: Instruction, value: Scalar = 1) -> Instruction:
    return apply(lambda x, a, b: x + _scaled(a, value) / b, (x, a, b), {}, 3)


@pointwise(aten.lerp, arity=3)
def lerp(x: Expr, end: Expr, weight: Expr) -> Expr:
    difference = end - x
    size = absolute(weight)
    return where(size < 0.5, x + weight * difference, end - difference * (1 - weight))


def _parts(*given: Instruction) -> Iterator[Expr]:
    """What complex numbers are made of, in the type and shape of their parts."""
    shape = expected()
    part = promote.real_type(shape.dtype)
    return (Expr(promote.operand(v, part, shape.dims)) for v in given)


@lowers(aten.complex)
def complex_(re: Instruction, im: Instruction) -> Instruction:
    return binary("complex", *_parts(re, im)).x


@lowers(aten.polar)
def polar(size: Instruction, angle: Instruction) -> Instruction:
    length, turn = _parts(size, angle)
    return binary("complex", length * cos(turn), length * sin(turn)).x


@lowers(aten.frexp)
def frexp(x: Instruction) -> tuple[Instruction, Instruction]:
    value = compute(x)
    integer, bias, shift = {"f32": ("s32", 126, 23), "f64": ("s64", 1022, 52)}[value.dtype]
    tiny = absolute(value) < 2.0 ** (2 - bias)
    scaled = where(tiny, value * 2.0 ** (shift + 2), value)
    bits = bitcast(scaled, integer)
    exponent = (
        (binary("shift-right-logical", bits, shift) & (2 * bias + 3))
        - bias
        - where(tiny, bits.like(shift + 2), 0)
    )
    mantissa = bitcast((bits & ~bits.like((2 * bias + 3) << shift)) | (bias << shift), value.dtype)
    plain = is_finite(value) & value.ne(0)
    return finish(where(plain, mantissa, value), 0), finish(where(plain, exponent, 0), 1)
