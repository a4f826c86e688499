"""Elementwise arithmetic: aten op -> opcode, or a short kernel where torch's meaning differs from
the opcode's."""

import math
import operator
from collections.abc import Callable
from functools import partial

from torch_hlo.hlo.ir import Instruction

from ..core import (
    Expr,
    absolute,
    atan2,
    aten,
    binary,
    bitcast,
    ceil,
    cos,
    erf,
    exp,
    expm1,
    floor,
    imag,
    is_nan,
    log,
    log1p,
    logistic,
    lowers,
    maximum,
    minimum,
    pointwise,
    promote,
    real,
    round_even,
    rsqrt,
    sin,
    sqrt,
    tan,
    tanh,
    trunc,
    where,
)
from ..core.elementwise import apply

# Functions of one floating or complex operand (integers were converted by promotion).
FLOAT_UNARY = {
    aten.exp: exp,
    aten.expm1: expm1,
    aten.log: log,
    aten.log1p: log1p,
    aten.sqrt: sqrt,
    aten.rsqrt: rsqrt,
    aten.sin: sin,
    aten.cos: cos,
    aten.tan: tan,
    aten.tanh: tanh,
    aten.sigmoid: logistic,
    aten.special_expit: logistic,
    aten.erf: erf,
    aten.special_erf: erf,
    **{
        getattr(aten, name): operator.methodcaller("op", name)
        for name in ("asin", "acos", "sinh", "cosh", "asinh", "acosh", "atanh")
    },
    **{
        getattr(aten, "arc" + name[1:]): operator.methodcaller("op", name)
        for name in ("asin", "acos", "asinh", "acosh", "atanh")
    },
}
for _packet, _kernel in FLOAT_UNARY.items():
    pointwise(_packet)(_kernel)


def _floating(x: Expr) -> bool:
    return promote.is_floating(x.dtype)


def is_bool(x: Expr) -> bool:
    return x.dtype == "pred"


def is_complex(x: Expr) -> bool:
    return promote.is_complex(x.dtype)


# Rounding: integers stay as they are.
def _rounded(rounding: Callable[[Expr], Expr], x: Expr) -> Expr:
    return rounding(x) if _floating(x) else x


pointwise(aten.floor)(partial(_rounded, floor))
pointwise(aten.ceil)(partial(_rounded, ceil))
pointwise(aten.trunc, aten.fix)(partial(_rounded, trunc))


@pointwise(aten.round)
def round_(x: Expr, decimals: int = 0) -> Expr:
    if not _floating(x):
        return x
    if decimals == 0:
        return round_even(x)
    scale = 10.0 ** abs(decimals)
    return round_even(x * scale) / scale if decimals > 0 else round_even(x / scale) * scale


@pointwise(aten.frac)
def frac(x: Expr) -> Expr:
    return x - trunc(x)


pointwise(aten.neg, aten.negative, aten._neg_view)(operator.neg)


@pointwise(aten.positive)
def positive(x: Expr) -> Expr:
    return x


@pointwise(aten.abs, aten.absolute, operands=True)
def abs_(x: Expr) -> Expr:
    return x if x.kind in "pu" else absolute(x)


@pointwise(aten.sign)
def sign(x: Expr) -> Expr:
    if is_bool(x):
        return x
    if _floating(x):  # not the opcode: torch gives 0 for nan
        return (x > 0).cast(x.dtype) - (x < 0).cast(x.dtype)
    return x.op("sign") if x.kind == "s" else (x > 0).cast(x.dtype)


@pointwise(aten.sgn)
def sgn(x: Expr) -> Expr:
    if not is_complex(x):
        return sign(x)
    size = absolute(x)
    zero = size.eq(0)
    # zero / 1 is zero; two real divisions, where a complex one takes scaling and more of them
    size = where(zero, 1, size)
    return binary("complex", real(x) / size, imag(x) / size)


@pointwise(aten.signbit, operands=True)
def signbit(x: Expr) -> Expr:
    if not _floating(x):
        return x < 0 if x.kind == "s" else x.ne(x)
    return bitcast(x, _LAYOUT[x.dtype][0]) < 0


@pointwise(aten.square)
def square_(x: Expr) -> Expr:
    return x & x if is_bool(x) else x * x


@pointwise(aten.reciprocal)
def reciprocal(x: Expr) -> Expr:
    return 1.0 / x


# Binary and decimal logarithms split off the exponent, so that powers of the base come out exact.
@pointwise(aten.exp2, aten.special_exp2)
def exp2(x: Expr) -> Expr:
    if is_complex(x):
        return exp(x * math.log(2))
    integer, bias, shift = _LAYOUT[x.dtype]
    x = minimum(maximum(x, -3.0 * bias), bias + 1.0)
    n = round_even(x)
    normal = maximum(n, 2.0 - bias)  # the rest is for subnormal results
    y = bitcast(
        bitcast(exp((x - n) * math.log(2)), integer)
        + binary("shift-left", normal.cast(integer), shift),
        x.dtype,
    )
    return y * pow2(maximum(n - normal, 1.0 - bias))


@pointwise(aten.log2)
def log2(x: Expr) -> Expr:
    if is_complex(x):
        return log(x) * (1 / math.log(2))
    mantissa, exponent = split_exponent(x)
    return exponent + log(mantissa) * (1 / math.log(2))


@pointwise(aten.log10)
def log10(x: Expr) -> Expr:
    if is_complex(x):
        return log(x) * (1 / math.log(10))
    mantissa, exponent = split_exponent(x)
    high = 0.30078125  # exponent * high is exact
    low = math.log10(2) - high
    rest = log(mantissa)
    # 1 / log(10) in two parts
    return exponent * high + (
        exponent * low + rest * 1.098319650216765e-17 + rest * 0.4342944819032518
    )


def pow2(n: Expr) -> Expr:
    """2**n for integral n (floating type) in the range of normal numbers."""
    integer, bias, shift = _LAYOUT[n.dtype]
    return bitcast(binary("shift-left", n.cast(integer) + bias, shift), n.dtype)


def split_exponent(x: Expr) -> tuple[Expr, Expr]:
    """(mantissa in [sqrt(1/2), sqrt(2)), exponent) of a float; (x, 0) of what is not positive,
    finite and normal."""
    integer, bias, shift = _LAYOUT[x.dtype]
    ordinary = (x >= 2.0 ** (1 - bias)) & (x < math.inf)
    bits = bitcast(where(ordinary, x, 1), integer)
    exponent = binary("shift-right-arithmetic", bits - _ROOT_HALF[x.dtype], shift)
    return where(
        ordinary,
        bitcast(bits - binary("shift-left", exponent, shift), x.dtype),
        x,
    ), exponent.cast(x.dtype)


_ROOT_HALF = {"f32": 0x3F3504F3, "f64": 0x3FE6A09E667F3BCD}  # bits of sqrt(1/2)
# same-width integer, exponent bias, mantissa bits
_LAYOUT = {"f32": ("s32", 127, 23), "f64": ("s64", 1023, 52)}


@pointwise(aten.atan, aten.arctan)
def atan(x: Expr) -> Expr:
    # -i atanh(i x), by exchanging parts: a product with i loses the signs of zeros
    if is_complex(x):
        r = binary("complex", -imag(x), real(x)).op("atanh")
        return binary("complex", imag(r), -real(r))
    return atan2(x, 1.0)


@lowers(aten.angle)
def angle(x: Instruction) -> Instruction:
    if x.kind == "c":
        return atan2(imag(Expr(x)), real(Expr(x))).x
    return apply(lambda v: where(is_nan(v), v, where(v < 0, math.pi, v.like(0))), (x,), {})


@pointwise(aten._conj_physical, aten.conj_physical, aten._conj, aten.conj, aten.resolve_conj)
def conjugate(x: Expr) -> Expr:
    return binary("complex", real(x), -imag(x)) if is_complex(x) else x
