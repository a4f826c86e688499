"""Special functions: erfc, erfinv, lgamma, digamma, polygamma, zeta, igamma, ndtri, … from
classical expansions (Cephes, Lanczos)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_hlo.hlo.ir import Instruction
from torch_hlo.hlo.ir.coefficients import (
    ERFC_P,
    ERFC_Q,
    ERFC_R,
    ERFC_S,
)
from torch_hlo.hlo.stablehlo import special as chlo

from ..core import (
    Expr,
    absolute,
    aten,
    erf,
    erf_inv,
    erfc,
    exp,
    floor,
    is_nan,
    log,
    lowers,
    pointwise,
    power,
    sin,
    sqrt,
    trunc,
    where,
    while_loop,
)
from ..core.elementwise import apply
from .bessel import series


def ratio(x: Expr, p: Sequence[float], q: Sequence[float]) -> Expr:
    return x.polynomial(p) / x.polynomial(q)


def erfcx_positive(x: Expr) -> Expr:
    """exp(x²) erfc(x) for x >= 1."""
    near = where(x < 8, x, 1)
    far = where(x < 8, 8, x)
    inverse = 1 / far  # R/S in 1/x, so that nothing overflows
    tail = inverse * ratio(inverse, ERFC_R[::-1], ERFC_S[::-1])
    return where(x < 8, ratio(near, ERFC_P, ERFC_Q), tail)


pointwise(aten.erfc, aten.special_erfc)(erfc)
pointwise(aten.erfinv, aten.special_erfinv)(erf_inv)


@pointwise(aten.special_erfcx)
def erfcx(x: Expr) -> Expr:
    a = absolute(x)
    near = where(a <= 1, x, 0)
    tail = erfcx_positive(where(a > 1, a, 1))
    inside = exp(near * near) * (1 - erf(near))
    return where(a <= 1, inside, where(x < 0, 2 * exp(x * x) - tail, where(is_nan(x), x, tail)))


# Quantile of the normal distribution: central part, and tails in sqrt(-2 log p) below and above 8
_NDTRI = (
    (
        (
            -5.99633501014107895267e1,
            9.80010754185999661536e1,
            -5.66762857469070293439e1,
            1.39312609387279679503e1,
            -1.23916583867381258016,
        ),
        (
            1.0,
            1.95448858338141759834,
            4.67627912898881538453,
            8.63602421390890590575e1,
            -2.25462687854119370527e2,
            2.00260212380060660359e2,
            -8.20372256168333339912e1,
            1.59056225126211695515e1,
            -1.18331621121330003142,
        ),
    ),
    (
        (
            4.05544892305962419923,
            3.15251094599893866154e1,
            5.71628192246421288162e1,
            4.40805073893200834700e1,
            1.46849561928858024014e1,
            2.18663306850790267539,
            -1.40256079171354495875e-1,
            -3.50424626827848203418e-2,
            -8.57456785154685413611e-4,
        ),
        (
            1.0,
            1.57799883256466749731e1,
            4.53907635128879210584e1,
            4.13172038254672030440e1,
            1.50425385692907503408e1,
            2.50464946208309415979,
            -1.42182922854787788574e-1,
            -3.80806407691578277194e-2,
            -9.33259480895457427372e-4,
        ),
    ),
    (
        (
            3.23774891776946035970,
            6.91522889068984211695,
            3.93881025292474443415,
            1.33303460815807542389,
            2.01485389549179081538e-1,
            1.23716634817820021358e-2,
            3.01581553508235416007e-4,
            2.65806974686737550832e-6,
            6.23974539184983651783e-9,
        ),
        (
            1.0,
            6.02427039364742014255,
            3.67983563856160859403,
            1.37702099489081330271,
            2.16236993594496635890e-1,
            1.34204006088543189037e-2,
            3.28014464682127739104e-4,
            2.89247864745380683936e-6,
            6.79019408009981274425e-9,
        ),
    ),
)


@pointwise(aten.special_ndtri)
def ndtri(p: Expr) -> Expr:
    edge = math.exp(-2)
    upper = p > 1 - edge
    y = where(upper, 1 - p, p)
    central = y > edge
    c = where(central, y, 0.5) - 0.5
    square = c * c
    middle = (c + c * square * ratio(square, *_NDTRI[0])) * math.sqrt(2 * math.pi)
    t = sqrt(log(where(central, edge, y)) * -2)
    z = 1 / t
    tail = t - log(t) / t - z * where(t < 8, ratio(z, *_NDTRI[1]), ratio(z, *_NDTRI[2]))
    value = where(central, middle, where(upper, tail, -tail))
    return where(
        p.eq(0),
        -math.inf,
        where(p.eq(1), math.inf, where((p > 0) & (p < 1), value, math.nan)),
    )


# Gamma function


@pointwise(aten.lgamma, aten.special_gammaln)
def lgamma(x: Expr) -> Expr:
    zeros = (x > 0.5) & (x < 3.25)  # to be as precise there as elsewhere
    s = where(zeros, x, 1.5)
    near = (s - 1) * (s - 2) * series(s, 0.5, 3.25, _between_zeros)
    return where(zeros, near, Expr(chlo.lgamma(x.x)))


def _between_zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.lgamma(x) / ((x - 1) * (x - 2))


@pointwise(aten.digamma, aten.special_digamma, aten.special_psi)
def digamma(x: Expr) -> Expr:
    signed = where(1 / x < 0, x.like(math.inf), -math.inf)
    return where(x.eq(0), signed, Expr(chlo.digamma(x.x)))


@pointwise(aten.special_zeta, arity=2)
def zeta(x: Expr, q: Expr) -> Expr:
    """Hurwitz zeta by Euler and Maclaurin."""
    a, b, total = chlo.powers(x, q)

    def add_term(
        x: Expr,
        a: Expr,
        b: Expr,
        total: Expr,
    ) -> tuple[Expr, ...]:  # only negative q need more than nine
        more = a <= 9
        b = where(more, power(a + 1, -x), b)
        return x, where(more, a + 1, a), b, where(more, total + b, total)

    _, a, b, total = while_loop(lambda x, a, b, total: a <= 9, add_term, (x, a, b, total), 1000)
    total = chlo.corrected(x, a, b, total)
    whole = q.eq(floor(q))
    total = where((q <= 0) & whole, math.inf, where((q <= 0) & x.ne(floor(x)), math.nan, total))
    return where(x.eq(1), math.inf, where(x < 1, math.nan, total))


def trigamma(x: Expr) -> Expr:
    reflect = x < 0.5
    a = where(reflect, 1 - x, x)
    total = a.like(0)
    for _ in range(6):
        total += 1 / (a * a)
        a += 1
    z = 1 / (a * a)
    total += (1 + 1 / (2 * a) + z * (1 / 6 - z * (1 / 30 - z / 42))) / a
    s = sin(x * math.pi)
    return where(reflect, (math.pi * math.pi) / (s * s) - total, total)


@lowers(aten.polygamma, aten.special_polygamma)
def polygamma(n: int, x: Instruction) -> Instruction:
    return apply(lambda x: _polygamma(n, x), (x,), {})


def _polygamma(n: int, x: Expr) -> Expr:
    if n == 0:
        return digamma(x)
    if n == 1:
        return trigamma(x)
    factorial = math.factorial(n) * (1 if n % 2 else -1)
    return zeta(x.like(n + 1), x) * float(factorial)


# Incomplete gamma functions: a power series below, a continued fraction above the transition x =
# max(1, a).
def _gamma_parts(a: Expr, x: Expr) -> tuple[Expr, Expr, Expr]:
    """(use the series; P by series; Q by fraction)."""
    series = (x <= 1) | (x <= a)
    xs = where(series & (x > 0), x, 1)
    tiny = 1e-8 if x.dtype == "f32" else 1e-17
    one = x.like(1)
    safe_a = where(a > 0, a, 1)
    total = _gamma_series(safe_a, where(series, xs, 1), one, tiny)
    log_scale = safe_a * log(xs) - xs - lgamma(safe_a)
    p = exp(log_scale) * total / safe_a
    xf = where(series, safe_a + 2, x)
    answer = _gamma_fraction(safe_a, xf, one, tiny)
    q = answer * exp(safe_a * log(xf) - xf - lgamma(safe_a))
    return series, p, q


def _gamma_series(a: Expr, x: Expr, one: Expr, tiny: float) -> Expr:
    """1 + x/(a+1) + x²/((a+1)(a+2)) + …"""

    def more(*state: Expr) -> Expr:
        *_, term, total = state
        return absolute(term) > absolute(total) * tiny

    def step(*state: Expr) -> tuple[Expr, ...]:
        a, x, r, term, total = state
        r += 1
        term *= x / r
        return a, x, r, term, total + term

    return while_loop(more, step, (a, x, a, one, one), 2000)[-1]


def _gamma_fraction(a: Expr, x: Expr, one: Expr, tiny: float) -> Expr:
    """The continued fraction by the forward recurrence of numerators `p` and denominators `q`."""
    big, small = (1e7, 1e-7) if x.dtype == "f32" else (1e15, 1e-15)
    y = 1 - a
    z = x + (1 - a) + 1
    first = (x + 1) / (z * x)

    def unfinished(*state: Expr) -> Expr:
        return state[-1] > tiny

    def advance(*state: Expr) -> tuple[Expr, ...]:
        x, y, z, c, pkm2, qkm2, pkm1, qkm1, answer, _ = state
        c = c + 1
        y = y + 1
        z = z + 2
        yc = y * c
        pk = pkm1 * z - pkm2 * yc
        qk = qkm1 * z - qkm2 * yc
        value = where(qk.ne(0), pk / where(qk.ne(0), qk, 1), answer)
        change = where(qk.ne(0), absolute((answer - value) / value), 1)
        shrink = where(absolute(pk) > big, pk.like(small), 1)
        terms = [v * shrink for v in (pkm1, qkm1, pk, qk)]
        return (x, y, z, c, *terms, value, change)

    state = (x, y, z, one * 0, one, x, x + 1, z * x, first, one)
    return while_loop(unfinished, advance, state, 2000)[8]


def _gamma_edges(a: Expr, x: Expr, value: Expr, upper: bool) -> Expr:
    """The corners: a or x zero, infinite or negative."""
    at_zero, at_infinity = (1.0, 0.0) if upper else (0.0, 1.0)
    value = where(x.eq(0), at_zero, value)
    value = where(x.eq(math.inf), at_infinity, value)
    value = where(a.eq(math.inf), where(x.eq(math.inf), x.like(math.nan), at_zero), value)
    value = where(a.eq(0), where(x > 0, x.like(at_infinity), math.nan), value)
    return where((a < 0) | (x < 0) | is_nan(a) | is_nan(x), math.nan, value)


@pointwise(aten.igamma, aten.special_gammainc, arity=2)
def igamma(a: Expr, x: Expr) -> Expr:
    series, p, q = _gamma_parts(a, x)
    return _gamma_edges(a, x, where(series, p, 1 - q), False)


@pointwise(aten.igammac, aten.special_gammaincc, arity=2)
def igammac(a: Expr, x: Expr) -> Expr:
    series, p, q = _gamma_parts(a, x)
    return _gamma_edges(a, x, where(series, 1 - p, q), True)


@pointwise(aten.sinc, aten.special_sinc)
def sinc(x: Expr) -> Expr:
    product = x * math.pi
    return where(x.eq(0), 1, sin(product) / product)


@pointwise(aten.special_spherical_bessel_j0)
def spherical_bessel_j0(x: Expr) -> Expr:
    square = x * x
    series = square.polynomial(
        [1 / math.factorial(2 * k + 1) * (-1) ** k for k in range(6, -1, -1)]
    )
    return where(absolute(x) < 0.5, series, where(absolute(x).eq(math.inf), 0, sin(x) / x))


# Orthogonal polynomials by their three-term recurrences: (first degree, next from the last two).
def _recurrence(first: Callable[..., Any], following: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(x: Expr, n: Expr) -> Expr:
        degree = trunc(n)

        def more(x: Expr, n: Expr, k: Expr, p: Expr, q: Expr) -> Expr:
            return k < n

        def step(x: Expr, n: Expr, k: Expr, p: Expr, q: Expr) -> tuple[Expr, ...]:
            new = where(k < n, following(x, k, p, q), q)
            return x, n, k + 1, where(k < n, q, p), new

        start = (x, degree, x.like(1), x.like(1), first(x))
        last = while_loop(more, step, start)[4]
        return where(degree < 0, 0, where(degree.eq(0), 1, where(degree.eq(1), first(x), last)))

    return kernel


def _chebyshev(x: Expr, k: Expr, p: Expr, q: Expr) -> Expr:
    return 2 * x * q - p


def _shifted(first: Callable[..., Any]) -> Callable[..., Any]:
    plain = _recurrence(first, _chebyshev)
    return lambda x, n: plain(2 * x - 1, n)


_POLYNOMIALS = {
    "chebyshev_polynomial_t": _recurrence(lambda x: x, _chebyshev),
    "chebyshev_polynomial_u": _recurrence(lambda x: 2 * x, _chebyshev),
    "chebyshev_polynomial_v": _recurrence(lambda x: 2 * x - 1, _chebyshev),
    "chebyshev_polynomial_w": _recurrence(lambda x: 2 * x + 1, _chebyshev),
    "shifted_chebyshev_polynomial_t": _shifted(lambda x: x),
    "shifted_chebyshev_polynomial_u": _shifted(lambda x: 2 * x),
    "shifted_chebyshev_polynomial_v": _shifted(lambda x: 2 * x - 1),
    "shifted_chebyshev_polynomial_w": _shifted(lambda x: 2 * x + 1),
    "hermite_polynomial_h": _recurrence(lambda x: 2 * x, lambda x, k, p, q: 2 * x * q - 2 * k * p),
    "hermite_polynomial_he": _recurrence(lambda x: x, lambda x, k, p, q: x * q - k * p),
    "laguerre_polynomial_l": _recurrence(
        lambda x: 1 - x,
        lambda x, k, p, q: ((2 * k + 1 - x) * q - k * p) / (k + 1),
    ),
    "legendre_polynomial_p": _recurrence(
        lambda x: x, lambda x, k, p, q: ((2 * k + 1) * x * q - k * p) / (k + 1)
    ),
}
for _name, _kernel in _POLYNOMIALS.items():
    pointwise(getattr(aten, f"special_{_name}"), arity=2)(_kernel)
