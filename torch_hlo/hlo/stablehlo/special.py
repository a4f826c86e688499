"""Special functions of CHLO as instructions (Cephes, Lanczos, Giles). Narrow floats are computed in
f32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps

from ..ir import DTYPES, Instruction, ShapeError, build as b
from ..ir.coefficients import DIGAMMA, LANCZOS, ZETA
from ..ir.notation import Terms as E


def _floats(fn: Callable[..., E]) -> Callable[..., Instruction]:
    """A function of float arrays; f16, bf16 and f8 are computed in f32."""

    @wraps(fn)
    def of_instructions(*xs: Instruction) -> Instruction:
        dtype = xs[0].dtype
        if xs[0].kind != "f":
            raise ShapeError(f"{fn.__name__.strip('_')}: takes floats, not {xs[0].shape}")
        wide = dtype if DTYPES[dtype].bits >= 32 else "f32"
        return b.convert(fn(*(E(b.convert(x, wide)) for x in xs)).x, dtype)

    return of_instructions


@_floats
def lgamma(x: E) -> E:
    """Lanczos for x >= 1/2, the reflection formula below."""
    low = x < 0.5
    z = (-x).where(low, x - 1)
    total = z.filled(0.99999999999980993227684700473478)
    for i, c in enumerate(LANCZOS):
        total = total + c / (z + (i + 1))
    log_t = (z / 7.5).op("log-plus-one") + math.log(7.5)
    value = (z + 0.5 - (z + 7.5) / log_t) * log_t + (0.5 * math.log(2 * math.pi) + total.op("log"))
    a = x.op("abs")
    fraction = a - a.op("floor")
    log_sine = ((1 - fraction).where(fraction > 0.5, fraction) * math.pi).op("sine").op("log")
    reflected = math.log(math.pi) - log_sine - value
    reflected = reflected.where(log_sine.op("is-finite"), -log_sine)
    return x.filled(math.inf).where(a.eq(math.inf), reflected.where(low, value))


def _digamma(x: E) -> E:
    negative = x < 0.5
    a = (1 - x).where(negative, x)
    total = a.filled(0)
    for _ in range(10):
        small = a < 10
        total = (total - 1 / a).where(small, total)
        a = (a + 1).where(small, a)
    z = 1 / (a * a)
    value = total + a.op("log") - 0.5 / a - z * z.polynomial(DIGAMMA)
    # Reduced first: tan of a large argument has no digits left.
    turned = (x - x.op("round-nearest-even")) * math.pi
    value = (value - math.pi / (turned.op("sine") / turned.op("cosine"))).where(negative, value)
    pole = (x <= 0) & x.eq(x.op("floor"))
    return x.filled(math.nan).where(pole, value.where(x.ne(math.inf), math.inf))


digamma = _floats(_digamma)


def _zeta(x: E, q: E) -> E:
    """Hurwitz zeta by Euler and Maclaurin, for q > 0."""
    total = corrected(x, *powers(x, q))
    whole = q.eq(q.op("floor"))
    total = total.where(q > 0, x.filled(math.inf).where(whole, math.nan))
    return x.filled(math.inf).where(x.eq(1), x.filled(math.nan).where(x < 1, total))


def powers(x: E, q: E) -> tuple[E, E, E]:
    """a = q + 9, a^-x, and the sum of such powers from q on."""
    a = q
    total = power = q.binary("power", -x)
    for _ in range(9):
        a = a + 1
        power = a.binary("power", -x)
        total = total + power
    return a, power, total


def corrected(x: E, a: E, power: E, total: E) -> E:
    """With what Euler and Maclaurin add at the end of a sum."""
    total = total + power * a / (x - 1) - 0.5 * power
    factor = x.filled(1)
    for i, c in enumerate(ZETA):
        factor = factor * (x + 2 * i)
        power = power / a
        gone = factor.eq(math.inf) | power.eq(0)
        total = total + x.filled(0).where(gone, factor * power / c)
        factor = factor * (x + (2 * i + 1))
        power = power / a
    return total


zeta = _floats(_zeta)


@_floats
def polygamma(n: E, x: E) -> E:
    sign = 1 - 2 * ((n + 1) - 2 * ((n + 1) * 0.5).op("floor"))
    factorial = E(lgamma((n + 1).x)).op("exponential").op("round-nearest-even")
    value = sign * factorial * _zeta(n + 1, x)
    legal = n.eq(n.op("floor")) & (n >= 0)
    return _digamma(x).where(n.eq(0), value.where(legal, math.nan))


# Chebyshev series of exp(-x) I1(x) / x on [0, 8], and of exp(-x) I1(x) sqrt(x) in 32/x - 2 beyond
_I1E = (
    (
        2.7779141127610464e-18,
        -2.111421214358166e-17,
        1.5536319577362005e-16,
        -1.1055969477353862e-15,
        7.6006842947354077e-15,
        -5.0421855047279118e-14,
        3.2237933659455748e-13,
        -1.9839743977649436e-12,
        1.1736186298890901e-11,
        -6.6634897235020271e-11,
        3.6255902815521172e-10,
        -1.8872497517228294e-09,
        9.3815373864957726e-09,
        -4.4450590287963281e-08,
        2.0032947535521353e-07,
        -8.5687202646954547e-07,
        3.4702513081376785e-06,
        -1.3273163656039436e-05,
        4.7815651075500542e-05,
        -0.00016176081582589674,
        0.00051228595616857576,
        -0.0015135724506312532,
        0.0041564229443128882,
        -0.010564084894626197,
        0.024726449030626516,
        -0.052945981208094989,
        0.10264365868984709,
        -0.17641651835783406,
        0.25258718644363365,
    ),
    (
        7.5172963108421052e-18,
        4.4143483230717077e-18,
        -4.6503053684893586e-17,
        -3.2095259219934238e-17,
        2.96262899764595e-16,
        3.3082023109209285e-16,
        -1.8803547755107825e-15,
        -3.8144030724370075e-15,
        1.0420276984128802e-14,
        4.272440016711951e-14,
        -2.1015418427726643e-14,
        -4.0835511110921974e-13,
        -7.1985517762459084e-13,
        2.0356285441470896e-12,
        1.4125807436613782e-11,
        3.2526035830154884e-11,
        -1.8974958123505413e-11,
        -5.5897434621965838e-10,
        -3.835380385964237e-09,
        -2.6314688468895196e-08,
        -2.5122362378702088e-07,
        -3.8825648088776906e-06,
        -0.00011058893876262371,
        -0.0097610974913614687,
        0.77857623501828011,
    ),
)


def _chebyshev(x: E, coefficients: Sequence[float]) -> E:
    b0 = b1 = b2 = x.filled(0)
    for c in coefficients:
        b0, b1, b2 = x * b0 - b1 + c, b0, b1
    return (b0 - b2) * 0.5


@_floats
def bessel_i1e(x: E) -> E:
    a = x.op("abs")
    near = _chebyshev(a.where(a <= 8, 8) * 0.5 - 2, _I1E[0]) * a
    far = x.filled(8).where(a <= 8, a)
    value = near.where(a <= 8, _chebyshev(32 / far - 2, _I1E[1]) / far.op("sqrt"))
    return value * x.op("sign")


def mulhi(x: Instruction, y: Instruction) -> Instruction:
    """The upper half of the product of integers."""
    dtype, bits = x.dtype, DTYPES[x.dtype].bits
    if x.kind not in "su":
        raise ShapeError(f"mulhi: takes integers, not {x.shape}")
    wide = f"{x.kind}{2 * bits}" if bits < 64 else "u64"
    u, v = (E(b.convert(w, wide)) for w in (x, y))
    if bits < 64:
        return b.convert((u * v >> bits).x, dtype)
    mask = 0xFFFFFFFF
    (u0, u1), (v0, v1) = ((w & mask, w >> 32) for w in (u, v))
    first = u1 * v0 + (u0 * v0 >> 32)
    second = u0 * v1 + (first & mask)
    high = u1 * v1 + (first >> 32) + (second >> 32)
    if x.kind == "s":  # as unsigned numbers, negative ones are 2^64 too large
        for a, other in ((x, v), (y, u)):
            high = high - other.where(E(a) < 0, 0)
    return b.convert(high.x, dtype)
