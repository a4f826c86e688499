"""Elementary functions as straight-line code: polynomials on vectors, no calls (f64 pow and lgamma-like rarities excepted).

Every function takes a `Typed` (float or double) and operands: `tanh(t, x)`. Single precision has its own short polynomials
where speed matters (error below 1.4 ulp); the rarer functions run in double and are rounded once.
Coefficients: Cephes and fdlibm; erf: N. Juffa, and Eigen's for narrow types.
"""
from __future__ import annotations

import math
import struct
from collections.abc import Callable

from torch_hlo.compiler.codegen.emit import Emit, Typed, Unit

INF = math.inf
NAN = math.nan


def _wide(fn: Callable) -> Callable:
    """Run a double-precision function on floats, rounding the result once."""

    def run(t: Typed, *operands: str) -> str:
        if t.kind == "double":
            return fn(t, *operands)
        e = t.e
        wide = [e.cast("fpext", x, "float", "double") for x in operands]
        return e.cast("fptrunc", fn(e.typed("double"), *wide), "double", "float")

    run.__name__, run.__doc__ = fn.__name__, fn.__doc__
    return run


# -- exponential and logarithm -------------------------------------------------------------------------------------------
LOG2E = 1.44269504088896341
_EXP32 = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP64_P = (1.26177193074810590878e-4, 3.02994407707441961300e-2, 9.99999999999999999910e-1)
_EXP64_Q = (3.00198505138664455042e-6, 2.52448340349684104192e-3, 2.27265548208155028766e-1, 2.00000000000000000005e0)


def _scales_in_hardware(t: Typed) -> bool:
    return t.e.lanes == (16 if t.kind == "float" else 8) and t.e.unit.has("avx512f")


def scale(t: Typed, y: str, n: str) -> str:
    """y * 2^n for a whole number n (as a float). Results below the normal range may be flushed by the caller."""
    e = t.e
    if _scales_in_hardware(t):
        v = t.type
        if t.kind == "double":
            return e.op(f"call {v} @llvm.x86.avx512.mask.scalef.pd.512({v} {y}, {v} {n}, {v} {y}, i8 -1, i32 4)")
        return e.op(f"call {v} @llvm.x86.avx512.mask.scalef.ps.512({v} {y}, {v} {n}, {v} {y}, i16 -1, i32 4)")
    # In two steps, because 2^128 and 2^-140 are no normal numbers.
    i = t.ints()
    mantissa, bias = (23, 127) if t.kind == "float" else (52, 1023)
    whole = e.op(f"fptosi {t.type} {n} to {i.type}")
    half = i.bin("ashr", whole, i.const(1))
    for part in (half, i.sub(whole, half)):
        y = t.mul(y, t.from_bits(i.bin("shl", i.add(part, i.const(bias)), i.const(mantissa))))
    return y


def exp(t: Typed, x: str) -> str:
    low, high, overflow = (-87.33, 88.8, 88.722839) if t.kind == "float" else (-708.39, 709.8, 709.782712893384)
    hardware = _scales_in_hardware(t)
    v = x
    if not hardware:
        v = t.select(t.cmp("ogt", v, t.const(low)), v, t.const(low))
        v = t.select(t.cmp("olt", v, t.const(high)), v, t.const(high))
    n = t.call("roundeven", t.mul(v, t.const(LOG2E)))
    if t.kind == "float":
        r = t.fma(n, t.const(-0.693359375), v)
        r = t.fma(n, t.const(2.12194440e-4), r)
        y = t.add(t.fma(t.poly(r, _EXP32), t.mul(r, r), r), t.const(1.0))
    else:
        r = t.fma(n, t.const(-6.93145751953125e-1), v)
        r = t.fma(n, t.const(-1.42860682030941723212e-6), r)
        z = t.mul(r, r)
        p = t.mul(r, t.poly(z, _EXP64_P))
        y = t.div(p, t.sub(t.poly(z, _EXP64_Q), p))
        y = t.add(t.add(y, y), t.const(1.0))
    y = scale(t, y, n)
    # vscalef takes a microcode assist on tiny results: the select folds into its mask, so they become 0 and it never sees them.
    y = t.select(t.cmp("uge", x, t.const(low)), y, t.const(0.0))
    y = t.select(t.cmp("ogt", x, t.const(overflow)), t.const(INF), y)
    return y if hardware else t.select(t.cmp("uno", x, x), x, y)


_EXP2_32 = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1, 6.931472028550421e-1)


def exp2(t: Typed, x: str) -> str:
    """2^x of floats; results below 2^-126 are 0."""
    hardware = _scales_in_hardware(t)
    v = x if hardware else t.select(t.cmp("ogt", x, t.const(-126.0)), x, t.const(-126.0))
    v = v if hardware else t.select(t.cmp("olt", v, t.const(129.0)), v, t.const(129.0))
    n = t.call("roundeven", v)
    r = t.sub(v, n)
    y = scale(t, t.fma(t.poly(r, _EXP2_32), r, t.const(1.0)), n)
    y = t.select(t.cmp("uge", x, t.const(-126.0)), y, t.const(0.0))  # see exp
    return y if hardware else t.select(t.cmp("uno", x, x), x, y)


_LOG32 = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
          2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)  # fmt: skip
_LOG64 = (1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
          2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01)  # fmt: skip


def log(t: Typed, x: str) -> str:
    e, i = t.e, t.ints()
    if t.kind == "float":
        smallest, boost, boost_bits, root_half, shift = 1.17549435e-38, 2.0**23, 23.0, 0x3F3504F3, 23
    else:
        smallest, boost, boost_bits, root_half, shift = 2.2250738585072014e-308, 2.0**52, 52.0, 0x3FE6A09E667F3BCD, 52
    tiny = t.cmp("olt", x, t.const(smallest))
    bits = t.bits(t.select(tiny, t.mul(x, t.const(boost)), x))
    exponent = i.bin("ashr", i.sub(bits, i.const(root_half)), i.const(shift))
    m = t.from_bits(i.sub(bits, i.bin("shl", exponent, i.const(shift))))
    k = e.op(f"sitofp {i.type} {exponent} to {t.type}")
    k = t.sub(k, t.select(tiny, t.const(boost_bits), t.const(0.0)))
    f = t.sub(m, t.const(1.0))
    if t.kind == "float":
        z = t.mul(f, f)
        y = t.mul(t.mul(t.poly(f, _LOG32), f), z)
        y = t.fma(k, t.const(-2.12194440e-4), y)
        y = t.fma(z, t.const(-0.5), y)
        r = t.fma(k, t.const(0.693359375), t.add(f, y))
    else:
        s = t.div(f, t.add(f, t.const(2.0)))
        z = t.mul(s, s)
        r = t.mul(z, t.poly(z, _LOG64))
        half = t.mul(t.const(0.5), t.mul(f, f))
        y = t.fma(s, t.add(half, r), t.mul(k, t.const(1.90821492927058770002e-10)))
        r = t.fma(k, t.const(6.93147180369123816490e-01), t.sub(f, t.sub(half, y)))
    r = t.select(t.cmp("oeq", x, t.const(0.0)), t.const(-INF), r)
    r = t.select(t.cmp("oeq", x, t.const(INF)), t.const(INF), r)
    return t.select(t.cmp("uge", x, t.const(0.0)), t.select(t.cmp("uno", x, x), x, r), t.const(NAN))


def expm1(t: Typed, x: str) -> str:
    """2^n (exp(r) - 1) + 2^n - 1 in floats; in doubles Kahan's (u - 1) x / log u with u = exp x."""
    if t.kind == "float":
        i = t.ints()
        v = t.select(t.cmp("ogt", x, t.const(-20.0)), x, t.const(-20.0))
        v = t.select(t.cmp("olt", v, t.const(88.8)), v, t.const(88.8))
        n = t.call("roundeven", t.mul(v, t.const(LOG2E)))
        r = t.fma(n, t.const(-0.693359375), v)
        r = t.fma(n, t.const(2.12194440e-4), r)
        p = t.fma(t.poly(r, _EXP32), t.mul(r, r), r)
        # with half the power, because 2^128 is no float
        power = i.add(t.e.op(f"fptosi {t.type} {n} to {i.type}"), i.const(126))
        half = t.from_bits(i.bin("shl", power, i.const(23)))
        y = t.fma(half, p, t.sub(half, t.const(0.5)))
        y = t.add(y, y)
        y = t.select(t.cmp("ogt", x, t.const(88.722839)), t.const(INF), y)
        # small: the polynomial itself, which also keeps -0.0
        return t.select(t.cmp("olt", t.abs(x), t.const(0.34)), t.select(t.cmp("oeq", x, t.const(0.0)), x, p), t.select(t.cmp("uno", x, x), x, y))
    u = exp(t, x)
    d = t.sub(u, t.const(1.0))
    r = t.div(t.mul(d, x), log(t, u))
    r = t.select(t.cmp("oeq", u, t.const(1.0)), x, r)
    r = t.select(t.cmp("oeq", d, t.const(-1.0)), t.const(-1.0), r)
    return t.select(t.cmp("oeq", u, t.const(INF)), u, r)


def log1p(t: Typed, x: str) -> str:
    """log(1 + x), plus what rounding 1 + x lost."""
    u = t.add(x, t.const(1.0))
    correction = t.div(t.sub(t.sub(u, t.const(1.0)), x), u)
    r = t.sub(log(t, u), correction)
    r = t.select(t.cmp("oeq", u, t.const(INF)), u, r)
    r = t.select(t.cmp("oeq", u, t.const(0.0)), t.const(-INF), r)
    return t.select(t.cmp("oeq", u, t.const(1.0)), x, r)


def logistic(t: Typed, x: str) -> str:
    return t.div(t.const(1.0), t.add(exp(t, t.neg(x)), t.const(1.0)))


# -- hyperbolic ----------------------------------------------------------------------------------------------------------
_TANH32 = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_TANH64_P = (-9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3)
_TANH64_Q = (1.0, 1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3)


def tanh(t: Typed, x: str) -> str:
    a, z = t.abs(x), t.mul(x, x)
    p = t.poly(z, _TANH32) if t.kind == "float" else t.div(t.poly(z, _TANH64_P), t.poly(z, _TANH64_Q))
    small = t.fma(t.mul(p, z), x, x)
    big = t.sub(t.const(1.0), t.div(t.const(2.0), t.add(exp(t, t.add(a, a)), t.const(1.0))))
    return t.copysign(t.select(t.cmp("olt", a, t.const(0.625)), small, big), x)  # of small too: -0 + 0 * -0 is 0


def _half_exp(t: Typed, a: str) -> str:
    """exp(a) / 2 without overflow before it must."""
    h = exp(t, t.mul(a, t.const(0.5)))
    return t.mul(t.mul(h, t.const(0.5)), h)


def _half_expm1(t: Typed, a: str) -> str:
    """(exp(a) - 1) / 2 of floats from 0 on, also where exp(a) is no float any more."""
    i = t.ints()
    v = t.select(t.cmp("olt", a, t.const(89.5)), a, t.const(89.5))
    n = t.call("roundeven", t.mul(v, t.const(LOG2E)))
    r = t.fma(n, t.const(2.12194440e-4), t.fma(n, t.const(-0.693359375), v))
    p = t.fma(t.poly(r, _EXP32), t.mul(r, r), r)
    quarter = t.from_bits(i.bin("shl", i.add(t.e.op(f"fptosi {t.type} {n} to {i.type}"), i.const(125)), i.const(23)))
    y = t.fma(quarter, p, t.sub(quarter, t.const(0.25)))
    y = t.select(t.cmp("olt", a, t.const(0.34)), t.mul(p, t.const(0.5)), t.add(y, y))
    return t.select(t.cmp("uno", a, a), a, y)


def sinh(t: Typed, x: str) -> str:
    a = t.abs(x)
    if t.kind == "float":
        h = _half_expm1(t, a)
        r = t.add(h, t.div(h, t.add(t.add(h, h), t.const(1.0))))
        return t.copysign(t.select(t.cmp("ogt", a, t.const(89.4159863)), t.const(INF), r), x)
    m = expm1(t, a)
    r = t.mul(t.const(0.5), t.add(m, t.div(m, t.add(m, t.const(1.0)))))
    r = t.select(t.cmp("ogt", a, t.const(30.0)), _half_exp(t, a), r)
    return t.copysign(r, x)


def cosh(t: Typed, x: str) -> str:
    a = t.abs(x)
    if t.kind == "float":
        h = t.add(_half_expm1(t, a), t.const(0.5))
        return t.select(t.cmp("ogt", a, t.const(89.4159863)), t.const(INF), t.add(h, t.div(t.const(0.25), h)))
    u = exp(t, a)
    r = t.mul(t.const(0.5), t.add(u, t.div(t.const(1.0), u)))
    return t.select(t.cmp("ogt", a, t.const(30.0)), _half_exp(t, a), r)


def asinh(t: Typed, x: str) -> str:
    a = t.abs(x)
    z = t.mul(a, a)
    r = log1p(t, t.add(a, t.div(z, t.add(t.sqrt(t.add(z, t.const(1.0))), t.const(1.0)))))
    large = t.add(log(t, a), t.const(math.log(2)))
    r = t.select(t.cmp("ogt", a, t.const(1e8)), large, r)
    return t.copysign(r, x)


def acosh(t: Typed, x: str) -> str:
    m = t.sub(x, t.const(1.0))
    r = log1p(t, t.add(m, t.sqrt(t.fma(m, m, t.add(m, m)))))
    large = t.add(log(t, x), t.const(math.log(2)))
    return t.select(t.cmp("ogt", x, t.const(1e8)), large, r)


def atanh(t: Typed, x: str) -> str:
    a = t.abs(x)
    r = t.mul(t.const(0.5), log1p(t, t.div(t.add(a, a), t.sub(t.const(1.0), a))))
    return t.copysign(r, x)


# -- circular ------------------------------------------------------------------------------------------------------------
_SIN = (1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06, -1.98412698298579493134e-04,
        8.33333333332248946124e-03, -1.66666666666666324348e-01)  # fmt: skip
_COS = (-1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07, 2.48015872894767294178e-05,
        -1.38888888888741095749e-03, 4.16666666666666019037e-02)  # fmt: skip
_HALF_PI = (1.57079632679489655800e00, 6.12323399573676603587e-17, -1.4973849048591833e-33)
_HALF_PI_SHORT = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)  # the first two have 33 bits


def _half_pi(t: Typed) -> tuple[float, ...]:
    """pi/2 in parts whose products with whole numbers are exact: in a fused multiply-add, or because they are short."""
    return _HALF_PI if t.e.unit.fuses else _HALF_PI_SHORT


def sin_cos(t: Typed, x: str) -> tuple[str, str, str]:
    """sin and cos of x minus the nearest multiple of pi/2, and the multiple's number as an integer.

    Accurate for |x| below about 1e15, without a fused multiply-add below 1e6.
    """
    n = t.call("roundeven", t.mul(x, t.const(2 / math.pi)))
    r = x
    for part in _half_pi(t):
        r = t.fma(n, t.const(-part), r)
    z = t.mul(r, r)
    sine = t.fma(t.mul(z, t.poly(z, _SIN)), r, r)
    cosine = t.sub(t.const(1.0), t.sub(t.mul(t.const(0.5), z), t.mul(t.mul(z, z), t.poly(z, _COS))))
    quarter = t.sub(n, t.mul(t.const(4.0), t.call("floor", t.mul(n, t.const(0.25)))))
    quadrant = t.e.op(f"fptosi {t.type} {quarter} to {t.ints().type}")
    return sine, cosine, quadrant


def _circular(t: Typed, x: str, shift: int) -> str:
    sine, cosine, quadrant = sin_cos(t, x)
    i = t.ints()
    q = i.add(quadrant, i.const(shift)) if shift else quadrant
    odd = i.cmp("ne", i.bin("and", q, i.const(1)), i.const(0))
    sign = i.bin("shl", i.bin("and", q, i.const(2)), i.const(62))
    r = t.select(odd, cosine, sine)
    r = t.from_bits(i.bin("xor", t.bits(r), sign))
    return t.select(t.cmp("olt", t.abs(x), t.const(INF)), r, t.const(NAN))


_SIN32 = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS32 = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


def _reduced32(t: Typed, x: str) -> tuple[str, str]:
    """x of floats minus the nearest multiple of pi/2, taken off in double, and that multiple's number modulo 4 as an integer."""
    e, d, i = t.e, t.e.typed("double"), t.ints()
    wide = e.cast("fpext", x, "float", "double")
    n = d.call("roundeven", d.mul(wide, d.const(2 / math.pi)))
    r = wide
    for part in _half_pi(d)[:2]:
        r = d.fma(n, d.const(-part), r)
    q = d.sub(n, d.mul(d.const(4.0), d.call("floor", d.mul(n, d.const(0.25)))))
    return e.cast("fptrunc", r, "double", "float"), e.op(f"fptosi {d.type} {q} to {i.type}")


def _circular32(t: Typed, x: str, shift: int) -> str:
    """sin (shift 0) or cos (1) of floats, by short polynomials."""
    i = t.ints()
    r, q = _reduced32(t, x)
    q = i.add(q, i.const(shift))
    z = t.mul(r, r)
    sine = t.fma(t.mul(t.poly(z, _SIN32), z), r, r)
    cosine = t.add(t.fma(z, t.const(-0.5), t.const(1.0)), t.mul(t.mul(t.poly(z, _COS32), z), z))
    odd = i.cmp("ne", i.bin("and", q, i.const(1)), i.const(0))
    sign = i.bin("shl", i.bin("and", q, i.const(2)), i.const(30))
    y = t.from_bits(i.bin("xor", t.bits(t.select(odd, cosine, sine)), sign))
    return t.select(t.cmp("olt", t.abs(x), t.const(INF)), y, t.const(NAN))


def _falls_back(beyond: Callable) -> Callable:
    """A function whose fast way is wrong for operands where `beyond(t, *operands)` holds: it gets a function of its own, which asks libm
    for all lanes when one holds such operands."""

    def decorate(fn: Callable) -> Callable:
        name = fn.__name__

        def run(t: Typed, *operands: str) -> str:
            unit = t.e.unit
            function = f"torch_hlo.{name}.{t.suffix}"
            if function not in unit.functions:
                unit.functions[function] = body(t, function, len(operands))
            return t.e.op(f"call {t.type} @{function}({', '.join(f'{t.type} {x}' for x in operands)})")

        def body(outer: Typed, function: str, arity: int) -> str:
            lines: list[str] = []
            e = Emit(outer.e.lanes, lines, Unit(outer.e.unit.target))
            t, operands = e.typed(outer.kind), ("%x", "%y")[:arity]
            far = beyond(t, *operands)
            if e.lanes > 1:
                far = e.any(far)
            lines += [f"  br i1 {far}, label %far, label %near", "far:"]
            e.do(f"ret {t.type} {t.external(name + ('f' if t.kind == 'float' else ''), *operands)}")
            lines.append("near:")
            e.do(f"ret {t.type} {fn(t, *operands)}")
            outer.e.unit.externals.update(e.unit.externals)
            parameters = ", ".join(f"{t.type} {x}" for x in operands)
            return "\n".join([f"define internal {t.type} @{function}({parameters}) #0 {{", *lines, "}", ""])

        run.__name__, run.__doc__ = name, fn.__doc__
        return run

    return decorate


_ACCURATE, _ACCURATE_SHORT = 1e12, 1e6  # up to here the parts of pi/2 are enough


@_falls_back
def _any_size(t: Typed, x: str) -> str:
    size = t.abs(x)
    return t.bin_and(t.cmp("oge", size, t.const(_ACCURATE if t.e.unit.fuses else _ACCURATE_SHORT)), t.cmp("olt", size, t.const(INF)))


@_any_size
def sin(t: Typed, x: str) -> str:
    return t.select(t.cmp("oeq", x, t.const(0.0)), x, _circular32(t, x, 0) if t.kind == "float" else _circular(t, x, 0))


@_any_size
def cos(t: Typed, x: str) -> str:
    return _circular32(t, x, 1) if t.kind == "float" else _circular(t, x, 1)


_TAN32 = (9.38540185543e-3, 3.11992232697e-3, 2.44301354525e-2, 5.34112807005e-2, 1.33387994085e-1, 3.33331568548e-1)


@_any_size
def tan(t: Typed, x: str) -> str:
    i = t.ints()
    if t.kind == "float":
        v, quadrant = _reduced32(t, x)
        z = t.mul(v, v)
        sine, cosine = t.fma(t.mul(t.poly(z, _TAN32), z), v, v), t.const(1.0)
    else:
        sine, cosine, quadrant = sin_cos(t, x)
    odd = i.cmp("ne", i.bin("and", quadrant, i.const(1)), i.const(0))
    r = t.div(t.select(odd, t.neg(cosine), sine), t.select(odd, sine, cosine))
    r = t.select(t.cmp("oeq", x, t.const(0.0)), x, r)
    return t.select(t.cmp("olt", t.abs(x), t.const(INF)), r, t.const(NAN))


_ATAN_P = (-8.750608600031904122785e-1, -1.615753718733365076637e1, -7.500855792314704667340e1, -1.228866684490136173410e2,
           -6.485021904942025371773e1)  # fmt: skip
_ATAN_Q = (1.0, 2.485846490142306297962e1, 1.650270098316988542046e2, 4.328810604912902668951e2, 4.853903996359136964868e2,
           1.945506571482613964425e2)  # fmt: skip


_ATAN32 = (8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)


def atan2(t: Typed, y: str, x: str) -> str:
    """From the angle to the nearer axis, whose tangent low / high is at most 1; above a bound from the angle to the diagonal: (low - high) / (low + high)."""
    narrow = t.kind == "float"
    a, b = t.abs(y), t.abs(x)
    steep = t.cmp("ogt", a, b)
    low, high = t.select(steep, b, a), t.select(steep, a, b)
    huge = t.cmp("ogt", high, t.const(1e38 if narrow else 1e308))  # low + high is not to overflow
    low, high = (t.select(huge, t.mul(v, t.const(0.5)), v) for v in (low, high))
    big = t.bin_or(t.cmp("ogt", low, t.mul(high, t.const(0.4142135623730950 if narrow else 0.66))), t.cmp("oeq", low, t.const(INF)))
    v = t.div(t.select(big, t.sub(low, high), low), t.select(big, t.add(low, high), high))
    v = t.select(t.cmp("oeq", low, high), t.const(0.0), v)  # inf / inf; 0 / 0 is not big
    z = t.mul(v, v)
    p = t.poly(z, _ATAN32) if narrow else t.div(t.poly(z, _ATAN_P), t.poly(z, _ATAN_Q))
    r = t.fma(v, t.mul(z, p), v)
    i = t.ints()
    left = i.cmp("slt", t.bits(x), i.const(0))
    for condition, sign, angle in ((big, 1, math.pi / 4), (steep, -1, math.pi / 2), (left, -1, math.pi)):
        whole = struct.unpack("f", struct.pack("f", angle))[0] if narrow else angle
        rest = angle - whole if narrow else angle / math.pi * 1.2246467991473532e-16
        turned = t.add(t.const(whole), t.add(r, t.const(rest))) if sign > 0 else t.add(t.sub(t.const(whole), r), t.const(rest))
        r = t.select(condition, turned, r)
    r = t.copysign(r, y)
    return t.select(t.cmp("uno", x, y), t.add(x, y), r)


_ASIN32 = (4.2163199048e-2, 2.4181311049e-2, 4.5470025998e-2, 7.4953002686e-2, 1.6666752422e-1)


def _asin32(t: Typed, x: str) -> tuple[str, str]:
    """For floats: whether |x| > 1/2, and asin |x|, but then asin sqrt((1 - |x|) / 2), half of acos |x|."""
    a = t.abs(x)
    big = t.cmp("ogt", a, t.const(0.5))
    z = t.select(big, t.fma(a, t.const(-0.5), t.const(0.5)), t.mul(a, a))
    v = t.select(big, t.sqrt(z), a)
    return big, t.fma(t.mul(t.poly(z, _ASIN32), z), v, v)


def asin(t: Typed, x: str) -> str:
    if t.kind == "float":
        big, r = _asin32(t, x)
        return t.copysign(t.select(big, t.fma(r, t.const(-2.0), t.const(math.pi / 2)), r), x)
    one = t.const(1.0)
    return atan2(t, x, t.sqrt(t.mul(t.sub(one, x), t.add(one, x))))


def acos(t: Typed, x: str) -> str:
    if t.kind == "float":
        big, r = _asin32(t, x)
        negative = t.cmp("olt", x, t.const(0.0))
        twice = t.add(r, r)
        outer = t.select(negative, t.sub(t.const(math.pi), twice), twice)
        inner = t.sub(t.const(math.pi / 2), t.copysign(r, x))
        return t.select(big, outer, inner)
    one = t.const(1.0)
    return atan2(t, t.sqrt(t.mul(t.sub(one, x), t.add(one, x))), x)


# -- roots, powers, error function ---------------------------------------------------------------------------------------
def rsqrt(t: Typed, x: str) -> str:
    return t.div(t.const(1.0), t.sqrt(x))


@_wide
def cbrt(t: Typed, x: str) -> str:
    a = t.abs(x)
    r = exp(t, t.mul(log(t, a), t.const(1 / 3)))
    square = t.mul(r, r)
    r = t.sub(r, t.div(t.fma(square, r, t.neg(a)), t.mul(square, t.const(3.0))))
    plain = t.bin_and(t.cmp("ogt", a, t.const(0.0)), t.cmp("olt", a, t.const(INF)))
    return t.copysign(t.select(plain, r, a), x)


_WHOLE = {"float": 2.0**23, "double": 2.0**52}  # quotients below this are rounded to a multiple of at most a half


def _long_quotient(t: Typed, x: str, y: str) -> str:
    if not t.e.unit.fuses:
        return t.cmp("oeq", t.const(0.0), t.const(0.0))
    q = t.abs(t.div(x, y))
    finite = t.bin_and(t.cmp("olt", t.abs(x), t.const(INF)), t.cmp("une", y, t.const(0.0)))
    return t.bin_and(t.cmp("oge", q, t.const(_WHOLE[t.kind])), finite)


@_falls_back(_long_quotient)
def fmod(t: Typed, x: str, y: str) -> str:
    """x - y * n, exactly. A rounded quotient may have reached the next whole number: then the rest has the other sign, and is off by |y|."""
    rest = t.fma(t.neg(t.call("trunc", t.div(x, y))), y, x)
    across = t.cmp("olt", t.mul(rest, t.copysign(t.const(1.0), x)), t.const(0.0))
    rest = t.copysign(t.select(across, t.add(t.abs(rest), t.neg(t.abs(y))), rest), x)
    infinite = t.bin_and(t.cmp("oeq", t.abs(y), t.const(INF)), t.cmp("olt", t.abs(x), t.const(INF)))
    return t.select(infinite, x, rest)


def power(t: Typed, x: str, y: str) -> str:
    if t.kind == "double":
        return t.external("pow", x, y)
    e, d = t.e, t.e.typed("double")
    x, y = (e.cast("fpext", v, "float", "double") for v in (x, y))
    a = d.abs(x)
    r = exp(d, d.mul(y, log(d, a)))
    whole = d.cmp("oeq", d.call("floor", y), y)
    half = d.mul(y, d.const(0.5))
    odd = d.bin_and(whole, d.cmp("une", d.call("floor", half), half))
    r = d.select(odd, d.copysign(r, x), r)
    negative = d.bin_and(d.cmp("olt", x, d.const(0.0)), d.cmp("one", a, d.const(INF)))
    r = d.select(d.bin_and(negative, e.typed("i1").bin("xor", whole, e.typed("i1").const(1))), d.const(NAN), r)
    r = d.select(d.bin_and(d.cmp("oeq", a, d.const(1.0)), d.cmp("oeq", d.abs(y), d.const(INF))), d.const(1.0), r)
    r = d.select(d.cmp("oeq", x, d.const(1.0)), d.const(1.0), r)
    r = d.select(d.cmp("oeq", y, d.const(0.0)), d.const(1.0), r)
    return e.cast("fptrunc", r, "double", "float")


_ERF_SMALL = (-5.96761703e-4, 4.99119423e-3, -2.67681349e-2, 1.12819925e-1, -3.76125336e-1, 1.28379166e-1)


# erf(x) / x in powers of x^2 up to x = 0.51, and (1 + 2 x) exp(x^2) erfc(x) in powers of (x - 4) / (x + 4) (M. Shepherd and J. Laframboise 1981), interpolated at
# Chebyshev's points with 60 digits: relative errors 2e-17 and 6e-17.
_ERF64_SMALL = (
    -1.455468386942428e-07, 1.6364053271433157e-06, -1.49226800024831e-05, 0.0001205527837909284, -0.0008548326400895787, 0.005223977621115625,
    -0.026866170644958408, 0.11283791670954775, -0.3761263890318375, 1.1283791670955126,
)  # fmt: skip
_ERFCX64 = (
    -2.764120233734578e-10, 9.297625263709659e-10, 3.2323973445082033e-09, -1.2338731403798444e-08, -2.0725802488181963e-08, 1.0631817593818149e-07,
    7.771943241086912e-08, -8.210647933297337e-07, 2.9173425573089733e-07, 5.70657829924074e-06, -1.1221135665965907e-05, -2.4397731143023292e-05,
    0.00015062142608651945, -0.0001992571524726518, -0.0007577732435942576, 0.005031970069102256, -0.01619773406293477, 0.037167515526338006,
    -0.06633036581186058, 0.09373283499911264, -0.10103906603631811, 0.06809705425466839, 0.015379652102619974, -0.13962111684056228, 1.2329951186255526,
)  # fmt: skip


def _erf64(t: Typed, x: str) -> str:
    """One division serves both quotients. Errors below 2 ulp."""
    a = t.abs(x)
    a = t.select(t.cmp("ogt", a, t.const(6.0)), t.const(6.0), a)
    z = t.mul(a, a)
    under, low = t.add(a, t.const(4.0)), t.fma(a, t.const(2.0), t.const(1.0))
    inverse = t.div(t.const(1.0), t.mul(under, low))
    q = t.mul(t.mul(t.sub(a, t.const(4.0)), low), inverse)
    rest = t.mul(t.mul(exp(t, t.neg(z)), t.mul(under, inverse)), t.poly(q, _ERFCX64))
    big = t.copysign(t.sub(t.const(1.0), rest), x)
    return t.select(t.cmp("ogt", a, t.const(0.5)), big, t.mul(x, t.poly(z, _ERF64_SMALL)))


def erf(t: Typed, x: str) -> str:
    if t.kind == "double":
        return _erf64(t, x)
    a, z = t.abs(x), t.mul(x, x)
    r = t.fma(t.const(-1.72853470e-5), a, t.const(3.83197126e-4))
    r = t.fma(r, z, t.fma(t.const(-3.88396438e-3), a, t.const(2.42546219e-2)))
    for c in (-1.06777877e-1, -6.34846687e-1, -1.28717512e-1):
        r = t.fma(r, a, t.const(c))
    r = t.fma(r, a, t.neg(a))
    big = t.copysign(t.sub(t.const(1.0), exp(t, r)), x)
    small = t.fma(t.poly(z, _ERF_SMALL), x, x)
    r = t.select(t.cmp("ogt", a, t.const(0.927734375)), big, small)
    return t.select(t.cmp("ogt", a, t.const(4.0)), t.copysign(t.const(1.0), x), r)


_ERF_END = 3.832506856900711
_ERF_OVER = (2.2905065861350646e-4, 3.4082910107109506e-3, 5.0955695062380861e-2, 1.8520832239976145e-1, 1.128379143519084)
_ERF_UNDER = (-1.1791602954361697e-7, 2.3547966471313185e-5, 1.0179625278914885e-3, 1.4070470171167667e-2, 1.1098505178285362e-1, 4.9746925110067538e-1, 1.0)


def erf_narrow(t: Typed, x: str) -> str:
    """A rational function with errors up to 7 ulp of f32 (0.7 on average), in half the instructions. Coefficients: Eigen."""
    x = t.select(t.cmp("ogt", t.abs(x), t.const(_ERF_END)), t.copysign(t.const(_ERF_END), x), x)
    z = t.mul(x, x)
    return t.div(t.mul(x, t.poly(z, _ERF_OVER)), t.poly(z, _ERF_UNDER))


# What may be less exact than FUNCTIONS where the argument was rounded to 11 bits or fewer: f32 arithmetic on such values is exact enough by far.
NARROW: dict[str, Callable] = {"erf": erf_narrow}

FUNCTIONS: dict[str, Callable] = {
    "exponential": exp, "exponential-minus-one": expm1, "log": log, "log-plus-one": log1p, "logistic": logistic,
    "tanh": tanh, "sinh": sinh, "cosh": cosh, "asinh": asinh, "acosh": acosh, "atanh": atanh,
    "sine": sin, "cosine": cos, "tan": tan, "asin": asin, "acos": acos, "atan2": atan2,
    "rsqrt": rsqrt, "cbrt": cbrt, "power": power, "remainder": fmod, "erf": erf,
}  # fmt: skip
