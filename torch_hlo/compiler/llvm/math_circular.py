"""sin, cos, tan and their inverses, as straight-line code (see math.py)."""

from __future__ import annotations

import math
import struct

from .emit import BITS, Typed
from .math_function import INF, NAN, Elementary, falls_back, quotient

# -- circular
_SIN = (
    1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06,
    -1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01,
)  # fmt: skip
_COS = (
    -1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07,
    2.48015872894767294178e-05, -1.38888888888741095749e-03, 4.16666666666666019037e-02,
)  # fmt: skip
_HALF_PI = (
    1.57079632679489655800e00,
    6.12323399573676603587e-17,
    -1.4973849048591833e-33,
)
# the first two have 33 bits
_HALF_PI_SHORT = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)


def _half_pi(t: Typed) -> tuple[float, ...]:
    """pi/2 in parts whose products with whole numbers are exact: in a fused multiply-add, or
    because they are short."""
    return _HALF_PI if t.e.unit.fuses else _HALF_PI_SHORT


def sin_cos(t: Typed, x: str) -> tuple[str, str, str]:
    """sin and cos of x minus the nearest multiple of pi/2, and the multiple's number as an integer.

    Accurate for |x| below about 1e15, without a fused multiply-add below 1e6.
    """
    n = t.call("roundeven", t.mul(x, 2 / math.pi))
    r = x
    for part in _half_pi(t):
        r = t.fma(n, -part, r)
    z = t.mul(r, r)
    sine = t.fma(t.mul(z, t.poly(z, _SIN)), r, r)
    cosine = t.sub(1.0, t.sub(t.mul(0.5, z), t.mul(t.mul(z, z), t.poly(z, _COS))))
    quarter = t.sub(n, t.mul(4.0, t.call("floor", t.mul(n, 0.25))))
    quadrant = t.e.op(f"fptosi {t.type} {quarter} to {t.ints().type}")
    return sine, cosine, quadrant


def in_quadrant(t: Typed, sine: str, cosine: str, q: str) -> str:
    """The sine of x + q pi/2, of those of x."""
    i = t.ints()
    odd = i.cmp("ne", i.bin("and", q, 1), 0)
    sign = i.bin("shl", i.bin("and", q, 2), BITS[t.kind] - 2)
    return t.from_bits(i.bin("xor", t.bits(t.select(odd, cosine, sine)), sign))


def _circular(t: Typed, x: str, shift: int) -> str:
    sine, cosine, quadrant = sin_cos(t, x)
    i = t.ints()
    q = i.add(quadrant, shift) if shift else quadrant
    r = in_quadrant(t, sine, cosine, q)
    return t.select(t.cmp("olt", t.abs(x), INF), r, NAN)


_SIN32 = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS32 = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


def _reduced32(t: Typed, x: str) -> tuple[str, str]:
    """x of floats minus the nearest multiple of pi/2, taken off in double, and that multiple's
    number modulo 4 as an integer."""
    e = t.e
    d = t.e.typed("double")
    i = t.ints()
    wide = e.cast("fpext", x, "float", "double")
    n = d.call("roundeven", d.mul(wide, 2 / math.pi))
    r = wide
    for part in _half_pi(d)[:2]:
        r = d.fma(n, -part, r)
    q = d.sub(n, d.mul(4.0, d.call("floor", d.mul(n, 0.25))))
    return e.cast("fptrunc", r, "double", "float"), e.op(f"fptosi {d.type} {q} to {i.type}")


def _circular32(t: Typed, x: str, shift: int, reduced: tuple[str, str]) -> str:
    """sin (shift 0) or cos (1) of floats, by short polynomials."""
    i = t.ints()
    r, q = reduced
    q = i.add(q, shift)
    z = t.mul(r, r)
    sine = t.fma(t.mul(t.poly(z, _SIN32), z), r, r)
    cosine = t.add(t.fma(z, -0.5, 1.0), t.mul(t.mul(t.poly(z, _COS32), z), z))
    y = in_quadrant(t, sine, cosine, q)
    return t.select(t.cmp("olt", t.abs(x), INF), y, NAN)


_ACCURATE = 1e12  # up to here the parts of pi/2 are enough
_ACCURATE_SHORT = 1e6


@falls_back
def _any_size(t: Typed, x: str) -> str:
    size = t.abs(x)
    return t.bin_and(
        t.cmp("oge", size, _ACCURATE if t.e.unit.fuses else _ACCURATE_SHORT),
        t.cmp("olt", size, INF),
    )


_TAN32 = (
    9.38540185543e-3,
    3.11992232697e-3,
    2.44301354525e-2,
    5.34112807005e-2,
    1.33387994085e-1,
    3.33331568548e-1,
)


def _tan_of(t: Typed, x: str, sine: str, cosine: str, quadrant: str) -> str:
    i = t.ints()
    odd = i.cmp("ne", i.bin("and", quadrant, 1), 0)
    r = t.div(t.select(odd, t.neg(cosine), sine), t.select(odd, sine, cosine))
    r = t.select(t.cmp("oeq", x, 0.0), x, r)
    return t.select(t.cmp("olt", t.abs(x), INF), r, NAN)


def _tan32(t: Typed, x: str, reduced: tuple[str, str]) -> str:
    v, quadrant = reduced
    z = t.mul(v, v)
    return _tan_of(t, x, t.fma(t.mul(t.poly(z, _TAN32), z), v, v), t.const(1.0), quadrant)


def _sin(t: Typed, x: str) -> str:
    return t.select(
        t.cmp("oeq", x, 0.0),
        x,
        _circular32(t, x, 0, _reduced32(t, x)) if t.kind == "float" else _circular(t, x, 0),
    )


def _cos(t: Typed, x: str) -> str:
    return _circular32(t, x, 1, _reduced32(t, x)) if t.kind == "float" else _circular(t, x, 1)


def _tan(t: Typed, x: str) -> str:
    return _tan32(t, x, _reduced32(t, x)) if t.kind == "float" else _tan_of(t, x, *sin_cos(t, x))


# up to here a float's multiple of pi/2 is a short number, and the first part taken off leaves an
# exact rest
_NEAR32 = 8192.0
_HALF_PI32 = (1.57079637050628662109375, -4.37113900018624283e-8, -1.71512451e-15)


def _reduced_near32(t: Typed, x: str) -> tuple[str, str]:
    """As _reduced32, in floats, for |x| up to _NEAR32."""
    n = t.call("roundeven", t.mul(x, 2 / math.pi))
    r = x
    for part in _HALF_PI32:
        r = t.fma(n, -part, r)
    return r, t.e.op(f"fptosi {t.type} {n} to {t.ints().type}")


def _circular_function(name: str, near32: Elementary, middle: Elementary) -> Elementary:
    """Floats that are not large in floats; what is not enormous in doubles; libm."""

    def named(fn: Elementary, as_name: str) -> Elementary:
        def run(t: Typed, x: str) -> str:
            return fn(t, x)

        run.__name__ = as_name
        return run

    wide = _any_size(named(middle, name))
    by_floats = falls_back(lambda t, x: t.cmp("uge", t.abs(x), _NEAR32), wide)(
        named(near32, name + ".near")
    )
    return lambda t, x: by_floats(t, x) if t.kind == "float" and t.e.unit.fuses else wide(t, x)


sin = _circular_function(
    "sin",
    lambda t, x: t.select(t.cmp("oeq", x, 0.0), x, _circular32(t, x, 0, _reduced_near32(t, x))),
    _sin,
)
cos = _circular_function("cos", lambda t, x: _circular32(t, x, 1, _reduced_near32(t, x)), _cos)
tan = _circular_function("tan", lambda t, x: _tan32(t, x, _reduced_near32(t, x)), _tan)
_ATAN_P = (
    -8.750608600031904122785e-1,
    -1.615753718733365076637e1,
    -7.500855792314704667340e1,
    -1.228866684490136173410e2,
    -6.485021904942025371773e1,
)
_ATAN_Q = (
    1.0, 2.485846490142306297962e1, 1.650270098316988542046e2, 4.328810604912902668951e2,
    4.853903996359136964868e2, 1.945506571482613964425e2,
)  # fmt: skip
_ATAN32 = (8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)


def _atan64(t: Typed, x: str) -> str:
    """Of doubles: from the angle to the vertical, to the diagonal, or to the horizontal."""
    a = t.abs(x)
    a = t.select(t.cmp("ogt", a, 1e300), 1e300, a)
    steep = t.cmp("ogt", a, 1 + math.sqrt(2))
    middle = t.cmp("ogt", a, 0.66)
    one = t.const(1.0)
    over = t.select(steep, -1.0, t.select(middle, t.sub(a, one), a))
    under = t.select(steep, a, t.select(middle, t.add(a, one), one))
    v = quotient(t, over, under)
    z = t.mul(v, v)
    r = t.fma(v, t.mul(z, quotient(t, t.poly(z, _ATAN_P), t.poly(z, _ATAN_Q))), v)
    angle = t.select(steep, math.pi / 2, t.select(middle, math.pi / 4, 0.0))
    rest = t.select(steep, 6.123233995736766e-17, t.select(middle, 3.061616997868383e-17, 0.0))
    return t.copysign(t.add(angle, t.add(r, rest)), x)


def atan2(t: Typed, y: str, x: str) -> str:
    if t.kind == "double" and x == t.const(1.0):
        return _atan64(t, y)
    return _atan2(t, y, x)


def _atan2(t: Typed, y: str, x: str) -> str:
    """From the angle to the nearer axis, whose tangent low / high is at most 1; above a bound from
    the angle to the diagonal: (low - high) / (low + high)."""
    narrow = t.kind == "float"
    a = t.abs(y)
    b = t.abs(x)
    steep = t.cmp("ogt", a, b)
    low = t.select(steep, b, a)
    high = t.select(steep, a, b)
    huge = t.cmp("ogt", high, 1e38 if narrow else 1e308)  # low + high is not to overflow
    low, high = (t.select(huge, t.mul(v, 0.5), v) for v in (low, high))
    big = t.bin_or(
        t.cmp("ogt", low, t.mul(high, 0.4142135623730950 if narrow else 0.66)),
        t.cmp("oeq", low, INF),
    )
    v = t.div(t.select(big, t.sub(low, high), low), t.select(big, t.add(low, high), high))
    v = t.select(t.cmp("oeq", low, high), 0.0, v)  # inf / inf; 0 / 0 is not big
    z = t.mul(v, v)
    p = t.poly(z, _ATAN32) if narrow else quotient(t, t.poly(z, _ATAN_P), t.poly(z, _ATAN_Q))
    r = t.fma(v, t.mul(z, p), v)
    i = t.ints()
    left = i.cmp("slt", t.bits(x), 0)
    for condition, sign, angle in (
        (big, 1, math.pi / 4),
        (steep, -1, math.pi / 2),
        (left, -1, math.pi),
    ):
        whole = struct.unpack("f", struct.pack("f", angle))[0] if narrow else angle
        rest = angle - whole if narrow else angle / math.pi * 1.2246467991473532e-16
        turned = t.add(whole, t.add(r, rest)) if sign > 0 else t.add(t.sub(whole, r), rest)
        r = t.select(condition, turned, r)
    r = t.copysign(r, y)
    return t.select(t.cmp("uno", x, y), t.add(x, y), r)


# (asin(v) - v) / v^3 in powers of v^2 up to 1/4; of doubles interpolated at Chebyshev's points with
# 50 digits: relative error 1e-16
_ASIN = {
    "float": (4.2163199048e-2, 2.4181311049e-2, 4.5470025998e-2, 7.4953002686e-2, 1.6666752422e-1),
    "double": (
        0.028757851367421566, -0.014851887071247204, 0.01740087944269402, 0.005457506718640358,
        0.01032281435018578, 0.011479177415184906, 0.013971212973552933, 0.017352392720869973,
        0.02237217294214989, 0.030381944138531247, 0.04464285714635543, 0.07499999999998433,
        0.16666666666666669,
    ),
}  # fmt: skip
# of pi as a double; a float's polynomial is no better than pi as a float
_PI_REST = {"float": 0.0, "double": 1.2246467991473532e-16}


def _asin(t: Typed, x: str) -> tuple[str, str]:
    """Whether |x| > 1/2, and asin |x|, but then asin sqrt((1 - |x|) / 2), half of acos |x|."""
    a = t.abs(x)
    big = t.cmp("ogt", a, 0.5)
    z = t.select(big, t.fma(a, -0.5, 0.5), t.mul(a, a))
    v = t.select(big, t.sqrt(z), a)
    return big, t.fma(t.mul(t.poly(z, _ASIN[t.kind]), z), v, v)


def _from(t: Typed, angle: float, r: str) -> str:
    """angle - r for a multiple of pi."""
    rest = angle / math.pi * _PI_REST[t.kind]
    return t.sub(angle, t.sub(r, rest) if rest else r)


def asin(t: Typed, x: str) -> str:
    big, r = _asin(t, x)
    return t.copysign(t.select(big, _from(t, math.pi / 2, t.add(r, r)), r), x)


def acos(t: Typed, x: str) -> str:
    big, r = _asin(t, x)
    twice = t.add(r, r)
    outer = t.select(t.cmp("olt", x, 0.0), _from(t, math.pi, twice), twice)
    return t.select(big, outer, _from(t, math.pi / 2, t.copysign(r, x)))
