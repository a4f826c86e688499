"""Elementary functions as straight-line code: polynomials on vectors, no calls (but for arguments
that the polynomials do not reach).

Every function takes a `Typed` (float or double) and operands: `tanh(t, x)`. Single precision has
its own short polynomials where speed matters (errors below 1.4 ulp, of quotients 6); the rarer
functions run in double and are rounded once. Coefficients: Cephes and fdlibm. The error function
and its relatives: math_error.py."""

import math

from .emit import Typed
from .math_circular import acos, asin, atan2, cos, sin, tan
from .math_function import (
    INF,
    MANTISSA,
    NAN,
    SHIFT,
    Elementary,
    falls_back,
    own_function,
    powers_in_hardware,
    quotient,
    return_unless,
    scales_in_hardware,
    whole,
)

Floats = tuple[float, ...]

# -- exponential and logarithm
LOG2E = 1.44269504088896341
_EXP32 = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
# (exp(r) - 1 - r) / r^2 for |r| up to 1/2
_EXP64 = (
    2.0955762289494408e-09, 2.5162744626460177e-08, 2.755712159501279e-07, 2.755704244819296e-06,
    2.480158751780227e-05, 0.00019841270144086635, 0.0013888888888792352, 0.008333333333198127,
    0.04166666666666679, 0.16666666666666835, 0.5,
)  # fmt: skip


def scale(t: Typed, y: str, n: str, power: str) -> str:
    """y * 2^n for a whole number n, whose bits end those of `power`. Results are normal, or the
    caller replaces them."""
    e = t.e
    if scales_in_hardware(t):
        v = t.type
        if t.kind == "double":
            return e.op(
                f"call {v} @llvm.x86.avx512.mask.scalef.pd.512({v} {y}, {v} {n}, {v} {y}, i8 -1,"
                " i32 4)"
            )
        return e.op(
            f"call {v} @llvm.x86.avx512.mask.scalef.ps.512({v} {y}, {v} {n}, {v} {y}, i16 -1,"
            " i32 4)"
        )
    i = t.ints()
    return t.from_bits(i.add(t.bits(y), i.bin("shl", power, MANTISSA[t.kind][0])))


def _expm1_near(t: Typed, r: str) -> str:
    """exp(r) - 1 for |r| up to log(2) / 2, of doubles 1/2."""
    return t.fma(t.poly(r, _EXP32 if t.kind == "float" else _EXP64), t.mul(r, r), r)


_LOG2_PARTS = {
    "float": (-0.693359375, 2.12194440e-4),
    "double": (-6.93145751953125e-1, -1.42860682030941723212e-6),
}


def _in_powers_of_two(t: Typed, x: str, near: float = 0.0) -> tuple[str, str, str]:
    """x = n log(2) + r: the whole number n, which is 0 for |x| < `near`, an integer that ends with
    it, and r."""
    moved = t.fma(x, LOG2E, SHIFT[t.kind])
    if near:
        moved = t.select(t.cmp("olt", t.abs(x), near), SHIFT[t.kind], moved)
    n, power = whole(t, moved)
    r = x
    for part in _LOG2_PARTS[t.kind]:
        r = t.fma(n, part, r)
    return n, power, r


_LOG2E_REST = 1.925963033500e-8  # log2(e) is this more than LOG2E as a float


def _exp_in_hardware(t: Typed, x: str) -> tuple[str, str]:
    """exp(x) as (2^y for y = x log2(e) as a float, what that lacks)."""
    y = t.mul(x, LOG2E)
    rest = t.fma(x, _LOG2E_REST, t.fma(x, LOG2E, t.neg(y)))
    power = t.call("exp2", y)
    return power, t.mul(power, t.mul(rest, math.log(2)))


def exp_inside(t: Typed, x: str) -> str:
    """exp(x) where that is a normal number."""
    if powers_in_hardware(t):
        return t.add(*_exp_in_hardware(t, x))
    n, power, r = _in_powers_of_two(t, x)
    return scale(t, t.add(_expm1_near(t, r), 1.0), n, power)


def exp(t: Typed, x: str) -> str:
    if powers_in_hardware(t):
        power, rest = _exp_in_hardware(t, x)
        # beyond, powers are 0 or infinite and nothing is missing
        return t.select(t.cmp("olt", t.abs(x), 128.0), t.add(power, rest), power)
    low, overflow = (-87.33, 88.722839) if t.kind == "float" else (-708.39, 709.782712893384)
    return _within(t, x, exp_inside(t, x), low, overflow)


def _within(t: Typed, x: str, y: str, low: float, overflow: float) -> str:
    """y, but 0 where x < `low`, infinity where x > `overflow`, and NaN."""
    # vscalef takes a microcode assist on tiny results: the select folds into its mask, so they
    # become 0 and it never sees them.
    if scales_in_hardware(t):
        y = t.select(t.cmp("uge", x, low), y, 0.0)
    else:
        y = t.select(t.cmp("oge", x, low), y, t.select(t.cmp("olt", x, 0.0), 0.0, x))
    return t.select(t.cmp("ogt", x, overflow), INF, y)


_EXP2_32 = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
)


def exp2_inside(t: Typed, n: str, power: str, r: str) -> str:
    """2^(n + r) of floats where that is a normal number; see `scale`."""
    return scale(t, t.fma(t.poly(r, _EXP2_32), r, 1.0), n, power)


def exp2(t: Typed, x: str) -> str:
    """2^x of floats; results below 2^-126 are 0."""
    if powers_in_hardware(t):
        return t.call("exp2", x)
    n, power = whole(t, t.add(x, SHIFT[t.kind]))
    return _within(t, x, exp2_inside(t, n, power, t.sub(x, n)), -126.0, 127.99999)


_LOG32 = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
_LOG64 = (
    1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01,
    2.222219843214978396e-01, 2.857142874366239149e-01, 3.999999999940941908e-01,
    6.666666666666735130e-01,
)  # fmt: skip


_LEAST_NORMAL = {"float": 2.0**-126, "double": 2.0**-1022}
# bits of sqrt(1/2)
_ROOT_HALF = {"float": 0x3F3504F3, "double": 0x3FE6A09E667F3BCD}


def _split(t: Typed, x: str, less: str | float = 0.0) -> tuple[str, str]:
    """m - 1 and k - `less`, where x = 2^k m is positive and normal, and m from sqrt(1/2) on."""
    i = t.ints()
    mantissa, bias = MANTISSA[t.kind]
    shift = SHIFT[t.kind] + MANTISSA[t.kind][1]
    root = _ROOT_HALF[t.kind]
    bits = i.add(t.bits(x), (bias << mantissa) - root)
    m = t.from_bits(i.add(i.bin("and", bits, (1 << mantissa) - 1), root))
    k = i.bin("or", i.bin("lshr", bits, mantissa), t.bits(t.const(SHIFT[t.kind])))
    k = t.sub(t.from_bits(k), t.add(less, shift) if isinstance(less, str) else shift)
    return t.sub(m, 1.0), k


def _log_normal(t: Typed, x: str, less: str) -> str:
    """log(x) - `less` log(2) of a positive normal number."""
    f, k = _split(t, x, less)
    if t.kind == "float":
        z = t.mul(f, f)
        y = t.mul(t.mul(t.poly(f, _LOG32), f), z)
        y = t.fma(k, -2.12194440e-4, y)
        y = t.fma(z, -0.5, y)
        return t.fma(k, 0.693359375, t.add(f, y))
    s = quotient(t, f, t.add(f, 2.0))
    z = t.mul(s, s)
    r = t.mul(z, t.poly(z, _LOG64))
    half = t.mul(0.5, t.mul(f, f))
    y = t.fma(s, t.add(half, r), t.mul(k, 1.90821492927058770002e-10))
    return t.fma(k, 6.93147180369123816490e-01, t.sub(f, t.sub(half, y)))


def log(t: Typed, x: str) -> str:
    boost = MANTISSA[t.kind][0]
    tiny = t.cmp("olt", x, _LEAST_NORMAL[t.kind])
    normal = t.select(tiny, t.mul(x, 2.0**boost), x)
    r = _log_normal(t, normal, t.select(tiny, float(boost), 0.0))
    r = t.select(t.cmp("oeq", x, 0.0), -INF, r)
    r = t.select(t.cmp("uge", x, INF), x, r)
    return t.select(t.cmp("olt", x, 0.0), NAN, r)


# -1 below, infinite above the last
_EXPM1_RANGE = {
    "float": (-20.0, 88.8, 88.722839),
    "double": (-40.0, 709.8, 709.782712893384),
}
# up to here _expm1_near is exact enough by itself, and better than n = 1
_EXPM1_NEAR = {"float": 0.34, "double": 0.5}


def _times_power(t: Typed, p: str, n: str, less: int) -> str:
    """2^(n - less) (p + 1) - 2^-less for a whole number that ends the integer n and is no power's
    by itself."""
    i = t.ints()
    mantissa, bias = MANTISSA[t.kind]
    power = t.from_bits(i.bin("shl", i.add(n, bias - less), mantissa))
    return t.fma(power, p, t.sub(power, 0.5**less))


def expm1(t: Typed, x: str) -> str:
    """2^n (exp(r) - 1) + 2^n - 1."""
    low, high, overflow = _EXPM1_RANGE[t.kind]
    near = _EXPM1_NEAR[t.kind]
    v = t.select(t.cmp("ogt", x, low), x, low)
    v = t.select(t.cmp("olt", v, high), v, high)
    _, n, r = _in_powers_of_two(t, v, near)
    p = _expm1_near(t, r)
    y = _times_power(t, p, n, 1)  # with half the power, because the largest is no float
    y = t.add(y, y)
    y = t.select(t.cmp("ogt", x, overflow), INF, y)
    # small: the polynomial itself, which also keeps -0.0
    return t.select(
        t.cmp("olt", t.abs(x), near),
        t.select(t.cmp("oeq", x, 0.0), x, p),
        t.select(t.cmp("uno", x, x), x, y),
    )


def log1p(t: Typed, x: str) -> str:
    """log(1 + x), plus what rounding 1 + x lost."""
    u = t.add(x, 1.0)
    correction = quotient(t, t.sub(t.sub(u, 1.0), x), u)
    r = t.sub(log(t, u), correction)
    r = t.select(t.cmp("oeq", u, INF), u, r)
    r = t.select(t.cmp("oeq", u, 0.0), -INF, r)
    return t.select(t.cmp("oeq", u, 1.0), x, r)


def logistic(t: Typed, x: str) -> str:
    under = t.add(exp(t, t.neg(x)), 1.0)
    return (quotient if powers_in_hardware(t) else Typed.div)(t, 1.0, under)


# -- hyperbolic
# tanh(x) / x of floats as a quotient of polynomials in x^2, as far as |tanh(x)| is not 1: least
# squares, weighted until the largest relative error was least; as rounded here 3e-8.
_TANH32 = (
    (1.2583144304301186e-08, 1.9446144506218843e-05, 3.3009694889187813e-3, 0.12640409171581268,
     0.9447438716888428),
    (7.333134135478758e-07, 3.101684560533613e-4, 2.4441545829176903e-2, 0.4413185715675354,
     0.9447438716888428),
)  # fmt: skip
_TANH64_P = (
    -9.64399179425052238628e-1,
    -9.92877231001918586564e1,
    -1.61468768441708447952e3,
)
_TANH64_Q = (
    1.0,
    1.12811678491632931402e2,
    2.23548839060100448583e3,
    4.84406305325125486048e3,
)


def odd_quotient(t: Typed, x: str, end: float, over: Floats, under: Floats) -> str:
    """x over(x^2) / under(x^2) of a float, from -1 to 1, which it is beyond `end`: one division in
    place of an exponential and a choice."""
    x = _limited(t, x, end)
    z = t.mul(x, x)
    return _limited(t, quotient(t, t.mul(x, t.horner(z, over)), t.horner(z, under)), 1.0)


# (tanh(x) / x - 1) / x^2 of floats up to 0.6: least squares as above; as rounded here 8e-8
_TANH_NEAR = (1.56404786e-2, -5.22311032e-2, 1.33135200e-1, -3.33326221e-1)


def _tanh_by_power(t: Typed, x: str) -> str:
    a = t.abs(x)
    z = t.mul(a, a)
    small = t.fma(t.mul(t.poly(z, _TANH_NEAR), z), x, x)
    twice = t.add(t.call("exp2", t.mul(a, 2 * LOG2E)), 1.0)
    big = t.fma(quotient(t, 1.0, twice), -2.0, 1.0)
    return t.select(t.cmp("olt", a, 0.6), small, t.copysign(big, x))


def tanh(t: Typed, x: str) -> str:
    if powers_in_hardware(t):
        return _tanh_by_power(t, x)
    if t.kind == "float":
        return odd_quotient(t, x, 9.1, *_TANH32)
    a = t.abs(x)
    a = t.select(t.cmp("ogt", a, 20.0), 20.0, a)  # from here on it is 1
    z = t.mul(a, a)
    small = t.fma(t.mul(quotient(t, t.poly(z, _TANH64_P), t.poly(z, _TANH64_Q)), z), x, x)
    big = t.sub(1.0, quotient(t, t.const(2.0), t.add(exp_inside(t, t.add(a, a)), 1.0)))
    # of small too: -0 + 0 * -0 is 0
    return t.copysign(t.select(t.cmp("oge", a, 0.625), big, small), x)


_HALF_EXP_OVERFLOW = {"float": 89.4159863, "double": 710.4758600739439}


def _half_expm1(t: Typed, a: str) -> str:
    """(exp(a) - 1) / 2 from 0 on, also where exp(a) is too large for a float."""
    overflow = _HALF_EXP_OVERFLOW[t.kind]
    v = t.select(t.cmp("olt", a, overflow), a, overflow)
    near = _EXPM1_NEAR[t.kind]
    _, n, r = _in_powers_of_two(t, v, near)
    p = _expm1_near(t, r)
    y = _times_power(t, p, n, 2)
    y = t.select(t.cmp("olt", a, near), t.mul(p, 0.5), t.add(y, y))
    return t.select(t.cmp("uno", a, a), a, y)


def sinh(t: Typed, x: str) -> str:
    a = t.abs(x)
    h = _half_expm1(t, a)
    r = t.add(h, t.div(h, t.add(t.add(h, h), 1.0)))
    return t.copysign(t.select(t.cmp("ogt", a, _HALF_EXP_OVERFLOW[t.kind]), INF, r), x)


def cosh(t: Typed, x: str) -> str:
    a = t.abs(x)
    h = t.add(_half_expm1(t, a), 0.5)
    return t.select(t.cmp("ogt", a, _HALF_EXP_OVERFLOW[t.kind]), INF, t.add(h, t.div(0.25, h)))


def asinh(t: Typed, x: str) -> str:
    a = t.abs(x)
    z = t.mul(a, a)
    r = log1p(t, t.add(a, t.div(z, t.add(t.sqrt(t.add(z, 1.0)), 1.0))))
    large = t.add(log(t, a), math.log(2))
    r = t.select(t.cmp("ogt", a, 1e8), large, r)
    return t.copysign(r, x)


def acosh(t: Typed, x: str) -> str:
    m = t.sub(x, 1.0)
    r = log1p(t, t.add(m, t.sqrt(t.fma(m, m, t.add(m, m)))))
    large = t.add(log(t, x), math.log(2))
    return t.select(t.cmp("ogt", x, 1e8), large, r)


def atanh(t: Typed, x: str) -> str:
    a = t.abs(x)
    r = t.mul(0.5, log1p(t, t.div(t.add(a, a), t.sub(1.0, a))))
    return t.copysign(r, x)


# -- roots, powers
def rsqrt(t: Typed, x: str) -> str:
    return t.div(1.0, t.sqrt(x))


def cbrt(t: Typed, x: str) -> str:
    a = t.abs(x)
    if t.kind == "float":
        r = _power_of_float(t, a, t.e.typed("double").const(1 / 3))
    else:
        r = exp(t, t.mul(log(t, a), 1 / 3))
        square = t.mul(r, r)
        r = t.sub(r, t.div(t.fma(square, r, t.neg(a)), t.mul(square, 3.0)))
    plain = t.bin_and(t.cmp("ogt", a, 0.0), t.cmp("olt", a, INF))
    return t.copysign(t.select(plain, r, a), x)


# quotients below this are rounded to a multiple of at most a half
_WHOLE = {"float": 2.0**23, "double": 2.0**52}


def _long_quotient(t: Typed, x: str, y: str) -> str:
    if not t.e.unit.fuses:
        return t.cmp("oeq", 0.0, 0.0)
    q = t.abs(t.div(x, y))
    finite = t.bin_and(t.cmp("olt", t.abs(x), INF), t.cmp("une", y, 0.0))
    return t.bin_and(t.cmp("oge", q, _WHOLE[t.kind]), finite)


@falls_back(_long_quotient)
def fmod(t: Typed, x: str, y: str) -> str:
    """x - y * n, exactly. A rounded quotient may have reached the next whole number: then the rest
    has the other sign, and is off by |y|."""
    rest = t.fma(t.neg(t.call("trunc", t.div(x, y))), y, x)
    across = t.cmp("olt", t.mul(rest, t.copysign(1.0, x)), 0.0)
    rest = t.copysign(t.select(across, t.add(t.abs(rest), t.neg(t.abs(y))), rest), x)
    infinite = t.bin_and(t.cmp("oeq", t.abs(y), INF), t.cmp("olt", t.abs(x), INF))
    return t.select(infinite, x, rest)


# (atanh(s) / s - 1 - s^2 / 3) / s^4 in powers of s^2 up to 0.0295
_ATANH = (
    0.053848237436904034, 0.052277640201288667, 0.05883424442783862, 0.06666647852697478,
    0.07692307885876093, 0.09090909089792047, 0.11111111111114337, 0.14285714285714282, 0.2,
)  # fmt: skip
_THIRD = (1 / 3, 1.850371707708594e-17)
_POWER_RANGE = 708.0


def _log_in_parts(t: Typed, a: str) -> tuple[str, str]:
    """log(a) of a positive normal double as the sum of two, with 64 bits or so: k log(2) + 2
    atanh(s), where s = (m - 1) / (m + 1) and its square are in two parts as well."""
    i = t.ints()
    bits = t.bits(a)
    k = i.bin("ashr", i.sub(bits, 0x3FE6A09E667F3BCD), 52)
    f = t.sub(t.from_bits(i.sub(bits, i.bin("shl", k, 52))), 1.0)
    shift = SHIFT[t.kind]
    k = t.sub(t.from_bits(i.add(k, t.bits(t.const(shift)))), shift)
    d = t.add(f, 2.0)
    d_rest = t.sub(f, t.sub(d, 2.0))
    inverse = quotient(t, t.const(1.0), d)
    s = t.mul(f, inverse)
    s_rest = t.mul(t.sub(t.fma(t.neg(s), d, f), t.mul(s, d_rest)), inverse)
    z = t.mul(s, s)
    z_rest = t.fma(t.add(s, s), s_rest, t.fma(s, s, t.neg(z)))
    third, third_rest = (t.const(c) for c in _THIRD)
    u = t.mul(z, third)
    u_rest = t.fma(z, third_rest, t.fma(z_rest, third, t.fma(z, third, t.neg(u))))
    u_rest = t.fma(t.mul(z, z), t.poly(z, _ATANH), u_rest)
    w = t.add(u, u_rest)
    w_rest = t.add(t.sub(u, w), u_rest)
    q = t.mul(s, w)
    q_rest = t.fma(s, w_rest, t.fma(s_rest, w, t.fma(s, w, t.neg(q))))
    r = t.add(s, q)
    r_rest = t.add(t.add(t.sub(s, r), q), t.add(s_rest, q_rest))
    high = t.mul(k, 6.93147180369123816490e-01)
    double = t.add(r, r)
    total = t.add(high, double)
    rest = t.add(
        t.add(t.sub(high, total), double),
        t.fma(k, 1.90821492927058770002e-10, t.add(r_rest, r_rest)),
    )
    both = t.add(total, rest)
    return both, t.add(t.sub(total, both), rest)


def _exp_of_parts(t: Typed, x: str, rest: str) -> str:
    """exp(x + rest) for |x| < _POWER_RANGE and a rest beyond the last place of x: 1 + r, which is
    kept in two parts, and less than an eighth."""
    n, power = whole(t, t.fma(x, LOG2E, SHIFT[t.kind]))
    first, second = (t.const(c) for c in _LOG2_PARTS[t.kind])
    x = t.fma(n, first, x)
    r = t.fma(n, second, x)
    rest = t.add(rest, t.fma(n, second, t.sub(x, r)))
    bent = t.mul(t.poly(r, _EXP64), t.mul(r, r))  # exp(r) - 1 - r
    rest = t.add(bent, t.fma(rest, t.add(r, bent), rest))
    one = t.add(r, 1.0)
    return scale(t, t.add(one, t.add(t.add(t.sub(1.0, one), r), rest)), n, power)


def _pow64(t: Typed, x: str, y: str) -> str:
    """Errors below 0.7 ulp, so what is a double comes out as that. Infinities, NaNs, subnormal
    operands and results ask libm."""
    a = t.abs(x)
    zero = t.cmp("oeq", x, 0.0)
    safe = t.select(zero, 1.0, a)
    log_a, log_rest = _log_in_parts(t, safe)
    p = t.mul(y, log_a)
    p_rest = t.fma(y, log_rest, t.fma(y, log_a, t.neg(p)))
    near = t.bin_and(t.cmp("oge", safe, 2.2250738585072014e-308), t.cmp("olt", safe, INF))
    near = t.bin_and(near, t.cmp("olt", t.abs(p), _POWER_RANGE))
    ones = t.e.typed("i1")
    return_unless(t, ones.bin("xor", near, 1), lambda: t.external("pow", x, y))
    r = t.select(
        zero,
        t.select(t.cmp("olt", y, 0.0), INF, t.select(t.cmp("oeq", y, 0.0), 1.0, 0.0)),
        _exp_of_parts(t, p, p_rest),
    )
    return _signed_power(t, x, y, r)


def _signed_power(t: Typed, x: str, y: str, r: str) -> str:
    """x^y from |x|^y."""
    integer = t.cmp("oeq", t.call("floor", y), y)
    half = t.mul(y, 0.5)
    odd = t.bin_and(integer, t.cmp("une", t.call("floor", half), half))
    r = t.select(odd, t.copysign(r, x), r)
    negative = t.bin_and(t.cmp("olt", x, 0.0), t.cmp("one", x, -INF))
    ones = t.e.typed("i1")
    return t.select(t.bin_and(negative, ones.bin("xor", integer, 1)), NAN, r)


_pow = own_function("pow", _pow64)


def power(t: Typed, x: str, y: str) -> str:
    if t.kind == "double":
        return _pow(t, x, y) if t.e.unit.fuses else t.external("pow", x, y)
    return _power32(t, x, y)


# log2(m) / s in powers of s^2, where s = (m - 1) / (m + 1), and 2^r for |r| <= 1/2: interpolated as
# those of erf, to 2^-45 and 2^-39
_LOG2_ROUNDED = (
    0.28288718263073565, 0.3199066608891474, 0.41220922733052445, 0.5770779426302618,
    0.9617966941123595, 2.8853900817778504,
)  # fmt: skip
_EXP2_ROUNDED = (
    1.3255224878668817e-06, 1.5310079402249296e-05, 0.00015403455852453838, 0.0013333450568000645,
    0.009618129159402558, 0.05550410941205933, 0.2402265069581299, 0.6931471805459335, 1.0,
)  # fmt: skip


def _power_of_float(t: Typed, a: str, exponent: str) -> str:
    """a^exponent for positive floats and an exponent in double, where they and their powers are
    normal."""
    e, d = t.e, t.e.typed("double")
    f, k = _split(d, e.cast("fpext", a, "float", "double"))
    s = quotient(d, f, d.add(f, 2.0))
    log = d.fma(s, d.poly(d.mul(s, s), _LOG2_ROUNDED), k)
    p = _limited(d, d.mul(exponent, log), 200.0)
    n, power = whole(d, d.add(p, SHIFT["double"]))
    r = scale(d, d.poly(d.sub(p, n), _EXP2_ROUNDED), n, power)
    return e.cast("fptrunc", r, "double", "float")


def _power32(t: Typed, x: str, y: str) -> str:
    ones = t.e.typed("i1")
    a = t.abs(x)
    exponent = t.e.cast("fpext", _limited(t, y, 3e38), "float", "double")
    r = _power_of_float(t, a, exponent)
    endless = t.cmp("oeq", a, INF)
    ends = t.select(ones.bin("xor", t.cmp("olt", y, 0.0), endless), INF, 0.0)
    r = t.select(ones.bin("or", t.cmp("oeq", a, 0.0), endless), ends, r)
    r = t.select(t.cmp("uno", x, y), NAN, _signed_power(t, x, y, r))
    return t.select(ones.bin("or", t.cmp("oeq", x, 1.0), t.cmp("oeq", y, 0.0)), 1.0, r)


def _limited(t: Typed, x: str, limit: float) -> str:
    """A number from -limit to limit; NaN stays."""
    x = t.select(t.cmp("olt", x, -limit), -limit, x)
    return t.select(t.cmp("ogt", x, limit), limit, x)


FUNCTIONS: dict[str, Elementary] = {
    "exponential": exp, "exponential-minus-one": expm1, "log": log, "log-plus-one": log1p,
    "logistic": logistic, "tanh": tanh, "sinh": sinh, "cosh": cosh, "asinh": asinh, "acosh": acosh,
    "atanh": atanh, "sine": sin, "cosine": cos, "tan": tan, "asin": asin, "acos": acos,
    "atan2": atan2, "rsqrt": rsqrt, "cbrt": cbrt, "power": power, "remainder": fmod,
}  # fmt: skip
