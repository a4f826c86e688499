"""Bessel and Airy functions by Chebyshev series, fitted once per process to PyTorch's own
double-precision functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from ..core import (
    Expr,
    absolute,
    aten,
    cos,
    exp,
    is_nan,
    log,
    pointwise,
    sin,
    sqrt,
    where,
)

special = torch.special


def series(x: Expr, low: float, high: float, fn: Callable) -> Expr:
    """fn(x) for low <= x <= high by Clenshaw's recurrence; the degree follows the dtype."""
    coefficients = _fit(fn, low, high, x.dtype)
    t = (x - (low + high) / 2) * (2 / (high - low))
    a = b = x.like(0)
    for c in coefficients[:0:-1]:
        a, b = 2 * t * a - b + float(c), a
    return t * a - b + float(coefficients[0])


@cache
def _fit(fn: Callable, low: float, high: float, dtype: str) -> tuple[float, ...]:
    def values(t: np.ndarray) -> np.ndarray:
        return fn(torch.from_numpy((t + 1) / 2 * (high - low) + low)).numpy()

    fitted = np.polynomial.chebyshev.chebinterpolate(values, 60)
    enough = np.abs(fitted) > (1e-9 if dtype == "f32" else 1e-17) * np.abs(fitted).max()
    return tuple(fitted[: int(np.nonzero(enough)[0].max()) + 1])


# Modified Bessel functions of the first kind, scaled by exp(-|x|): a series on [0, 8], and one in
# 8/x times 1/sqrt(x).
def _tail(fn: Callable, first: float = 8) -> Callable:
    """sqrt(x) fn(x) as a function of first/x."""

    def of_inverse(u: Tensor) -> Tensor:
        x = first / u.clamp_min(1e-6)
        return x.sqrt() * fn(x)

    return of_inverse


_I0E_TAIL = _tail(special.i0e)
_I1E_TAIL = _tail(special.i1e)


def _by_x(fn: Callable) -> Callable:
    """fn(x) / x: fn is 0 at 0, and has to be as precise there as elsewhere."""

    def slope(x: Tensor) -> Tensor:
        x = x.clamp_min(1e-9)
        return fn(x) / x

    return slope


_I1E = _by_x(special.i1e)
_J1 = _by_x(special.bessel_j1)


def _scaled_first_kind(x: Expr, fn: Callable, tail: Callable) -> Expr:
    near = series(where(x <= 8, x, 0), 0.0, 8.0, fn)
    far = where(x <= 8, 8, x)
    return where(x <= 8, near, series(8 / far, 0.0, 1.0, tail) / sqrt(far))


def _odd(x: Expr, value: Expr) -> Expr:
    return where(x < 0, -value, value)


@pointwise(aten.special_i0e)
def i0e(x: Expr) -> Expr:
    return where(is_nan(x), x, _scaled_first_kind(absolute(x), special.i0e, _I0E_TAIL))


@pointwise(aten.special_i1e)
def i1e(x: Expr) -> Expr:
    a = absolute(x)
    value = _scaled_first_kind(a, _I1E, _I1E_TAIL)
    return where(is_nan(x), x, _odd(x, where(a <= 8, a * value, value)))


def _unscaled(scaled: Callable[[Expr], Expr], x: Expr) -> Expr:
    half = exp(absolute(x) * 0.5)  # two factors: exp(|x|) alone overflows earlier than the product
    return half * scaled(x) * half


i0 = partial(_unscaled, i0e)
i1 = partial(_unscaled, i1e)
pointwise(aten.i0, aten.special_i0, aten.special_modified_bessel_i0)(i0)
pointwise(aten.special_i1, aten.special_modified_bessel_i1)(i1)


# Modified Bessel functions of the second kind: log and I near 0, a series in 2/x beyond 2.
def _k0_smooth(x: Tensor) -> Tensor:
    return special.modified_bessel_k0(x.clamp_min(1e-9)) + (
        x.clamp_min(1e-9) / 2
    ).log() * special.modified_bessel_i0(x.clamp_min(1e-9))


def _k1_smooth(x: Tensor) -> Tensor:
    x = x.clamp_min(1e-5)
    return (special.modified_bessel_k1(x) - (x / 2).log() * special.modified_bessel_i1(x)) * x


_K0_TAIL = _tail(special.scaled_modified_bessel_k0, 2)
_K1_TAIL = _tail(special.scaled_modified_bessel_k1, 2)


def _second_kind(x: Expr, near: Expr, tail: Callable, scaled: bool) -> Expr:
    small = x <= 2
    far = where(small, 2, x)
    large = series(2 / far, 0.0, 1.0, tail) / sqrt(far)
    value = where(small, near * exp(x) if scaled else near, large if scaled else large * exp(-far))
    return where(x.eq(0), math.inf, where(x < 0, math.nan, where(is_nan(x), x, value)))


def _k0(x: Expr, scaled: bool) -> Expr:
    s = where((x <= 2) & (x > 0), x, 1)
    return _second_kind(x, series(s, 0.0, 2.0, _k0_smooth) - log(s * 0.5) * i0(s), _K0_TAIL, scaled)


def _k1(x: Expr, scaled: bool) -> Expr:
    s = where((x <= 2) & (x > 0), x, 1)
    return _second_kind(
        x,
        series(s, 0.0, 2.0, _k1_smooth) / s + log(s * 0.5) * i1(s),
        _K1_TAIL,
        scaled,
    )


pointwise(aten.special_modified_bessel_k0)(lambda x: _k0(x, False))
pointwise(aten.special_modified_bessel_k1)(lambda x: _k1(x, False))
pointwise(aten.special_scaled_modified_bessel_k0)(lambda x: _k0(x, True))
pointwise(aten.special_scaled_modified_bessel_k1)(lambda x: _k1(x, True))


# Ordinary Bessel functions: a series on [0, 8]; beyond it sqrt(2/(pi x)) (P cos(x - phase) - Q
# sin(x - phase)) with smooth P, Q.
def _amplitudes(j: Callable, y: Callable, phase: float) -> tuple[Callable, Callable]:
    def angle_and_size(
        u: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = 8 / u.clamp_min(1e-4)
        return x, x - phase, (math.pi * x / 2).sqrt()

    def p(u: Tensor) -> Tensor:
        x, a, size = angle_and_size(u)
        return size * (j(x) * a.cos() + y(x) * a.sin())

    def q(u: Tensor) -> Tensor:
        x, a, size = angle_and_size(u)
        return size * (y(x) * a.cos() - j(x) * a.sin())

    return p, q


_PQ = {
    0: _amplitudes(special.bessel_j0, special.bessel_y0, math.pi / 4),
    1: _amplitudes(special.bessel_j1, special.bessel_y1, 3 * math.pi / 4),
}


def _asymptotic(x: Expr, order: int) -> tuple[Expr, Expr]:
    """(J, Y) for x > 8."""
    p, q = (series(8 / x, 0.0, 1.0, fn) for fn in _PQ[order])
    angle = x - (order / 2 + 0.25) * math.pi
    size = sqrt(2 / (math.pi * x))
    c = cos(angle)
    s = sin(angle)
    return size * (p * c - q * s), size * (p * s + q * c)


def _first_kind(x: Expr, order: int, fn: Callable) -> Expr:
    a = absolute(x)
    near = series(where(a <= 8, a, 0), 0.0, 8.0, fn)
    value = where(
        a <= 8,
        near * a if order else near,
        _asymptotic(where(a <= 8, 8, where(a.eq(math.inf), 8, a)), order)[0],
    )
    value = where(a.eq(math.inf), 0, value)
    return where(is_nan(x), x, _odd(x, value) if order else value)


pointwise(aten.special_bessel_j0)(lambda x: _first_kind(x, 0, special.bessel_j0))
pointwise(aten.special_bessel_j1)(lambda x: _first_kind(x, 1, _J1))


def _y0_smooth(x: Tensor) -> Tensor:
    x = x.clamp_min(1e-9)
    return special.bessel_y0(x) - 2 / math.pi * x.log() * special.bessel_j0(x)


def _y1_smooth(x: Tensor) -> Tensor:
    x = x.clamp_min(1e-5)
    return (special.bessel_y1(x) - 2 / math.pi * (x.log() * special.bessel_j1(x) - 1 / x)) / x


def _y(x: Expr, order: int) -> Expr:
    small = x <= 8
    s = where(small & (x > 0), x, 1)
    if order == 0:
        near = series(s, 0.0, 8.0, _y0_smooth) + 2 / math.pi * log(s) * series(
            s, 0.0, 8.0, special.bessel_j0
        )
    else:
        near = s * series(s, 0.0, 8.0, _y1_smooth) + 2 / math.pi * (
            log(s) * series(s, 0.0, 8.0, special.bessel_j1) - 1 / s
        )
    value = where(small, near, _asymptotic(where(small, 8, where(x.eq(math.inf), 8, x)), order)[1])
    value = where(x.eq(math.inf), 0, value)
    return where(x.eq(0), -math.inf, where(x < 0, math.nan, where(is_nan(x), x, value)))


pointwise(aten.special_bessel_y0)(lambda x: _y(x, 0))
pointwise(aten.special_bessel_y1)(lambda x: _y(x, 1))


# Airy function: series up to and from -2.09, where PyTorch's values jump by 3e-6; an exponential
# tail; an oscillating one fitted through its zeta variable.
def _airy_right(u: Tensor) -> Tensor:
    x = 4 / u.clamp_min(1e-2)
    return special.airy_ai(x) * (2 / 3 * x**1.5).exp() * x**0.25


# u_k of Ai's asymptotic expansion (DLMF 9.7.2).
_AIRY = [1.0]
for _k in range(1, 10):
    _AIRY.append(_AIRY[-1] * (6 * _k - 5) * (6 * _k - 3) * (6 * _k - 1) / (216 * _k * (2 * _k - 1)))


def _alternating(coefficients: list[float], x: Expr) -> Expr:
    """c0 - c1 x + c2 x^2 - ..."""
    total = x.like(0)
    for k, c in reversed(list(enumerate(coefficients))):
        total = total * x + (-c if k % 2 else c)
    return total


@pointwise(aten.special_airy_ai)
def airy_ai(x: Expr) -> Expr:
    middle = (x > -10) & (x < 4)
    low = where(middle & (x < -2.09), x, -3)
    high = where(middle & (x >= -2.09), x, 0)
    near = where(
        x < -2.09,
        series(low, -10.0, -2.09 - 1e-12, special.airy_ai),
        series(high, -2.09, 4.0, special.airy_ai),
    )
    r = where(x >= 4, x, 4)
    right = exp(r * sqrt(r) * (-2 / 3)) * series(4 / r, 0.04, 1.0, _airy_right) / sqrt(sqrt(r))
    left = where(x <= -10, -x, 10)
    z = left * sqrt(left) * (2 / 3)
    square = 1 / (z * z)
    p = _alternating(_AIRY[0::2], square)
    q = _alternating(_AIRY[1::2], square) / z
    angle = z - math.pi / 4
    oscillating = (cos(angle) * p + sin(angle) * q) / (math.sqrt(math.pi) * sqrt(sqrt(left)))
    value = where(middle, near, where(x >= 4, right, oscillating))
    return where(absolute(x).eq(math.inf), 0, where(is_nan(x), x, value))
