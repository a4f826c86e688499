"""Pointwise opcodes on complex values, pairs of floats or doubles. c64 functions run in double
where cancellation would hurt."""

from __future__ import annotations

import math as pymath
from collections.abc import Callable
from typing import Any, TypeVar, cast

from . import math
from .emit import Typed
from .math_circular import atan2 as angle, cos, sin
from .math_function import INF

Pair = tuple[str, str]


F = TypeVar("F", bound=Callable[..., Any])


def _wide(fn: F) -> F:
    """Run a function on pairs of doubles, rounding the result (a pair or one number) once."""

    def run(t: Typed, *operands: Pair) -> Any:
        if t.kind == "double":
            return fn(t, *operands)
        e = t.e
        wide = [tuple(e.cast("fpext", v, "float", "double") for v in p) for p in operands]
        result = fn(e.typed("double"), *wide)
        if isinstance(result, tuple):
            return tuple(e.cast("fptrunc", v, "double", "float") for v in result)
        return e.cast("fptrunc", result, "double", "float")

    return cast("F", run)


def add(t: Typed, a: Pair, b: Pair) -> Pair:
    return t.add(a[0], b[0]), t.add(a[1], b[1])


def subtract(t: Typed, a: Pair, b: Pair) -> Pair:
    return t.sub(a[0], b[0]), t.sub(a[1], b[1])


def multiply(t: Typed, a: Pair, b: Pair) -> Pair:
    return t.sub(t.mul(a[0], b[0]), t.mul(a[1], b[1])), t.add(t.mul(a[0], b[1]), t.mul(a[1], b[0]))


@_wide
def divide(t: Typed, a: Pair, b: Pair) -> Pair:
    """Scaled by the larger part of the divisor (Smith)."""
    swap = t.cmp("olt", t.abs(b[0]), t.abs(b[1]))
    big = t.select(swap, b[1], b[0])
    small = t.select(swap, b[0], b[1])
    ratio = t.div(small, big)
    ratio = t.select(t.cmp("oeq", t.abs(big), 0.0), 0.0, ratio)
    denominator = t.fma(small, ratio, big)
    # a / b = (ar + ai r, ai - ar r) / d, or with parts exchanged (ar r + ai, ai r - ar) / d
    re = t.select(swap, t.fma(a[0], ratio, a[1]), t.fma(a[1], ratio, a[0]))
    im = t.select(swap, t.fma(a[1], ratio, t.neg(a[0])), t.fma(t.neg(a[0]), ratio, a[1]))
    return t.div(re, denominator), t.div(im, denominator)


def absolute(t: Typed, a: Pair) -> str:
    """Scaled by the larger part, so that squares neither overflow nor vanish."""
    x = t.abs(a[0])
    y = t.abs(a[1])
    swap = t.cmp("olt", x, y)
    big = t.select(swap, y, x)
    small = t.select(swap, x, y)
    ratio = t.div(small, big)
    ratio = t.select(t.cmp("oeq", big, small), 1.0, ratio)
    r = t.mul(big, t.sqrt(t.fma(ratio, ratio, 1.0)))
    r = t.select(t.cmp("oeq", big, 0.0), 0.0, r)
    r = t.select(t.cmp("uno", x, y), pymath.nan, r)
    infinite = t.e.typed("i1").bin("or", t.cmp("oeq", x, INF), t.cmp("oeq", y, INF))
    return t.select(infinite, INF, r)


@_wide
def exponential(t: Typed, a: Pair) -> Pair:
    r = math.exp(t, a[0])
    im = t.select(t.cmp("oeq", a[1], 0.0), a[1], t.mul(r, sin(t, a[1])))
    return t.select(t.cmp("oeq", a[1], 0.0), r, t.mul(r, cos(t, a[1]))), im


@_wide
def log(t: Typed, a: Pair) -> Pair:
    return math.log(t, absolute(t, a)), angle(t, a[1], a[0])


@_wide
def expm1(t: Typed, a: Pair) -> Pair:
    e1 = math.expm1(t, a[0])
    half = sin(t, t.mul(a[1], 0.5))
    cos_minus_1 = t.mul(-2.0, t.mul(half, half))
    e0 = t.add(e1, 1.0)
    return t.fma(e0, cos_minus_1, e1), t.mul(e0, sin(t, a[1]))


@_wide
def log1p(t: Typed, a: Pair) -> Pair:
    one_more = t.add(a[0], 1.0)
    # |1 + z|^2 - 1 = 2x + x^2 + y^2
    excess = t.fma(a[1], a[1], t.fma(a[0], a[0], t.add(a[0], a[0])))
    near = t.mul(0.5, math.log1p(t, excess))
    far = math.log(t, absolute(t, (one_more, a[1])))
    return t.select(t.cmp("olt", t.abs(excess), 0.5), near, far), angle(t, a[1], one_more)


@_wide
def sqrt(t: Typed, a: Pair) -> Pair:
    size = absolute(t, a)
    half = t.const(0.5)
    root = t.sqrt(t.mul(half, t.add(size, t.abs(a[0]))))
    other = t.div(t.mul(half, a[1]), root)
    other = t.select(t.cmp("oeq", root, 0.0), a[1], other)
    positive = t.cmp("oge", a[0], 0.0)
    re = t.select(positive, root, t.abs(other))
    im = t.select(positive, other, t.copysign(root, a[1]))
    infinite = t.cmp("oeq", t.abs(a[1]), INF)
    return t.select(infinite, INF, re), t.select(infinite, a[1], im)


@_wide
def rsqrt(t: Typed, a: Pair) -> Pair:
    return divide(t, (t.const(1.0), t.const(0.0)), sqrt(t, a))


@_wide
def sine(t: Typed, a: Pair) -> Pair:
    return (
        t.mul(sin(t, a[0]), math.cosh(t, a[1])),
        t.mul(cos(t, a[0]), math.sinh(t, a[1])),
    )


@_wide
def cosine(t: Typed, a: Pair) -> Pair:
    return (
        t.mul(cos(t, a[0]), math.cosh(t, a[1])),
        t.neg(t.mul(sin(t, a[0]), math.sinh(t, a[1]))),
    )


@_wide
def sinh(t: Typed, a: Pair) -> Pair:
    return (
        t.mul(math.sinh(t, a[0]), cos(t, a[1])),
        t.mul(math.cosh(t, a[0]), sin(t, a[1])),
    )


@_wide
def cosh(t: Typed, a: Pair) -> Pair:
    return (
        t.mul(math.cosh(t, a[0]), cos(t, a[1])),
        t.mul(math.sinh(t, a[0]), sin(t, a[1])),
    )


@_wide
def tanh(t: Typed, a: Pair) -> Pair:
    """(sinh x cosh x + i sin y cos y) / (sinh^2 x + cos^2 y), limited where sinh overflows."""
    limit = t.const(20.0)
    x = t.select(t.cmp("ogt", t.abs(a[0]), limit), t.copysign(limit, a[0]), a[0])
    sh = math.sinh(t, x)
    ch = math.cosh(t, x)
    s = sin(t, a[1])
    c = cos(t, a[1])
    d = t.fma(sh, sh, t.mul(c, c))
    return t.div(t.mul(sh, ch), d), t.div(t.mul(s, c), d)


def _turned(fn: Callable[[Typed, Pair], Pair]) -> Callable[[Typed, Pair], Pair]:
    """-i f(iz)"""

    def run(t: Typed, a: Pair) -> Pair:
        re, im = fn(t, (t.neg(a[1]), a[0]))
        return im, t.neg(re)

    return _wide(run)


tan = _turned(tanh)


@_wide
def logistic(t: Typed, a: Pair) -> Pair:
    one = (t.const(1.0), t.const(0.0))
    return divide(t, one, add(t, exponential(t, (t.neg(a[0]), t.neg(a[1]))), one))


@_wide
def power(t: Typed, a: Pair, b: Pair) -> Pair:
    size = absolute(t, a)
    r = exponential(t, multiply(t, (math.log(t, size), angle(t, a[1], a[0])), b))
    zero = t.cmp("oeq", size, 0.0)
    none = t.bin_and(t.cmp("oeq", b[0], 0.0), t.cmp("oeq", b[1], 0.0))
    grows = t.cmp("ogt", b[0], 0.0)
    at_zero = t.select(grows, 0.0, pymath.nan)
    re = t.select(none, 1.0, t.select(zero, at_zero, r[0]))
    return re, t.select(none, 0.0, t.select(zero, at_zero, r[1]))


@_wide
def cbrt(t: Typed, a: Pair) -> Pair:
    return power(t, a, (t.const(1 / 3), t.const(0.0)))


@_wide
def sign(t: Typed, a: Pair) -> Pair:
    size = absolute(t, a)
    zero = t.cmp("oeq", size, 0.0)
    return t.select(zero, a[0], t.div(a[0], size)), t.select(zero, a[1], t.div(a[1], size))


@_wide
def asinh(t: Typed, a: Pair) -> Pair:
    """log(z + sqrt(z^2 + 1)), in the right half plane where nothing cancels; odd."""
    left = t.ints().cmp("slt", t.bits(a[0]), 0)
    z = (t.select(left, t.neg(a[0]), a[0]), t.select(left, t.neg(a[1]), a[1]))
    # sqrt(1 + iz) sqrt(1 - iz) keeps the branch of sqrt(z^2 + 1)
    root = multiply(t, sqrt(t, (t.sub(1.0, z[1]), z[0])), sqrt(t, (t.add(1.0, z[1]), t.neg(z[0]))))
    re, im = log(t, add(t, z, root))
    return t.select(left, t.neg(re), re), t.select(left, t.neg(im), im)


asin = _turned(asinh)


@_wide
def acos(t: Typed, a: Pair) -> Pair:
    re, im = asin(t, a)
    return t.sub(pymath.pi / 2, re), t.neg(im)


@_wide
def acosh(t: Typed, a: Pair) -> Pair:
    one = t.const(1.0)  # added to the real part only: -0 + 0 would be the other side of the cut
    root = multiply(t, sqrt(t, (t.add(a[0], one), a[1])), sqrt(t, (t.sub(a[0], one), a[1])))
    return log(t, add(t, a, root))


@_wide
def atanh(t: Typed, a: Pair) -> Pair:
    re1, im1 = log1p(t, a)
    re2, im2 = log1p(t, (t.neg(a[0]), t.neg(a[1])))
    half = t.const(0.5)
    return t.mul(half, t.sub(re1, re2)), t.mul(half, t.sub(im1, im2))


@_wide
def atan2(t: Typed, y: Pair, x: Pair) -> Pair:
    """-i log((x + iy) / sqrt(x^2 + y^2))."""
    top = (t.sub(x[0], y[1]), t.add(x[1], y[0]))
    bottom = sqrt(t, add(t, multiply(t, x, x), multiply(t, y, y)))
    re, im = log(t, divide(t, top, bottom))
    return im, t.neg(re)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": add,
    "subtract": subtract,
    "multiply": multiply,
    "divide": divide,
    "abs": absolute,
    "exponential": exponential,
    "log": log,
    "exponential-minus-one": expm1,
    "log-plus-one": log1p,
    "sqrt": sqrt,
    "rsqrt": rsqrt,
    "sine": sine,
    "cosine": cosine,
    "sinh": sinh,
    "cosh": cosh,
    "tanh": tanh,
    "tan": tan,
    "logistic": logistic,
    "power": power,
    "cbrt": cbrt,
    "sign": sign,
    "asinh": asinh,
    "asin": asin,
    "acos": acos,
    "acosh": acosh,
    "atanh": atanh,
    "atan2": atan2,
    "negate": lambda t, a: (t.neg(a[0]), t.neg(a[1])),
    "real": lambda t, a: a[0],
    "imag": lambda t, a: a[1],
}
