"""Meanings of the element-wise opcodes. Operands may be larger than `x.shape` says (see
interpreter.apply): never reshape to it."""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np

from ..ir import DTYPES, Instruction, decode, encode, numpy_dtype
from .interpreter import MEANINGS, UFUNCS, Array, EvaluateError, Value, meaning, wide, wrap_bits

_erf_objects, _erfc_objects = (np.frompyfunc(f, 1, 1) for f in (math.erf, math.erfc))


def _erf_inv(x: float) -> float:
    """A quantile of the normal distribution, and Newton steps on erf, or on erfc where that has
    more digits."""
    a = abs(x)
    if not a < 1 or a == 0:
        return x * math.inf if a == 1 else x if a == 0 else math.nan
    r = -NormalDist().inv_cdf((1 - a) / 2) / math.sqrt(2)
    for _ in range(3):
        r -= (
            (math.erf(r) - a if a < 0.5 else (1 - a) - math.erfc(r))
            * math.exp(r * r)
            * math.sqrt(math.pi)
            / 2
        )
    return math.copysign(r, x)


_erf_inv_objects = np.frompyfunc(_erf_inv, 1, 1)


def _round_half_away(v: Array) -> Any:
    whole = np.trunc(v)
    return np.where(np.abs(v - whole) >= 0.5, whole + np.copysign(1, v), np.copysign(whole, v))


def _cbrt(v: Array) -> Any:
    return np.cbrt(v) if v.dtype.kind != "c" else np.power(v, 1 / 3)


# Functions evaluated in double precision and rounded once.
_PRECISE: dict[str, Callable[..., Any]] = {
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atanh": np.arctanh,
    "cbrt": _cbrt,
    "cosine": np.cos,
    "cosh": np.cosh,
    "exponential": np.exp,
    "exponential-minus-one": np.expm1,
    "log": np.log,
    "log-plus-one": np.log1p,
    "logistic": lambda v: 1 / (1 + np.exp(-v)),
    "rsqrt": lambda v: 1 / np.sqrt(v),
    "sine": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
    "erf": lambda v: np.asarray(_erf_objects(v), np.float64),
    "erfc": lambda v: np.asarray(_erfc_objects(v), np.float64),
    "erf-inv": lambda v: np.asarray(_erf_inv_objects(v), np.float64),
}
# Functions with one exact result, evaluated in the operands' own type.
_EXACT: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "ceil": np.ceil,
    "floor": np.floor,
    "imag": np.imag,
    "is-finite": np.isfinite,
    "negate": np.negative,
    "not": np.invert,
    "real": np.real,
    "round-nearest-afz": _round_half_away,
    "round-nearest-even": np.rint,
    "subtract": np.subtract,
    "select": np.where,
    **UFUNCS,
}


def _precise(fn: Callable[[Array], Value]) -> Callable[..., Any]:
    return lambda x, v: fn(wide(v, x.operand.shape))


def _exact(fn: Callable[..., Value]) -> Callable[..., Any]:
    return lambda x, *operands: fn(*operands)


for _name, _fn in _PRECISE.items():
    MEANINGS[_name] = _precise(_fn)
for _name, _fn in _EXACT.items():
    MEANINGS[_name] = _exact(_fn)


@meaning("sign")
def _sign(x: Instruction, v: Array) -> Value:
    if x.kind == "c":
        size = np.abs(v)
        return np.where(size == 0, v, v / np.where(size == 0, 1, size))
    return np.where(v == 0, v, np.sign(v))  # keeps -0.0


@meaning("divide")
def _divide(x: Instruction, a: Array, b: Array) -> Value:
    if x.kind not in "su":
        return np.divide(a, b)
    # XLA: x / 0 is all ones, the smallest integer / -1 is itself.
    smallest = np.iinfo(a.dtype).min
    zero = b == 0
    negate = (b == -1) if x.kind == "s" else np.zeros_like(b, bool)
    safe = np.where(zero | negate, np.ones_like(b), b)
    quotient = (a - np.fmod(a, safe)) // safe
    quotient = np.where(negate, np.where(a == smallest, a, -a), quotient)
    return np.where(zero, np.invert(np.zeros_like(a)), quotient)


@meaning("remainder")
def _remainder(x: Instruction, a: Array, b: Array) -> Value:
    if x.kind not in "su":
        return np.fmod(a, b)
    whole = (b == 0) | (b == -1 if x.kind == "s" else False)
    safe = np.where(whole, np.ones_like(b), b)
    return np.where(b == 0, a, np.where(whole, np.zeros_like(a), np.fmod(a, safe)))


@meaning("power")
def _power(x: Instruction, a: Array, b: Array) -> Value:
    if x.kind not in "su":
        return np.power(wide(a, x.shape), wide(b, x.shape))
    base, exponent = np.broadcast_arrays(a, b)
    result = np.ones_like(base)
    left = np.where(exponent > 0, exponent, 0).astype(np.uint64)
    square = base.copy()
    while left.any():
        result = np.where(left & np.uint64(1) == 1, result * square, result)
        square = square * square
        left = left >> np.uint64(1)
    if x.kind == "s":
        odd = exponent % 2 != 0
        of_minus_one = np.where(odd, -1, 1)
        inverse = np.where(base == 1, 1, np.where(base == -1, of_minus_one, 0))
        result = np.where(exponent < 0, inverse.astype(base.dtype), result)
    return result


@meaning("atan2")
def _atan2(x: Instruction, a: Array, b: Array) -> Value:
    a = wide(a, x.shape)
    b = wide(b, x.shape)
    return (
        np.arctan2(a, b) if x.kind != "c" else -1j * np.log((b + 1j * a) / np.sqrt(a * a + b * b))
    )


@meaning("next-after")
def _next_after(x: Instruction, a: Array, b: Array) -> Value:
    dtype = x.dtype
    if dtype in ("f32", "f64"):
        return np.nextafter(a, b)
    a, b = np.broadcast_arrays(a, b)
    width = DTYPES[dtype].bits
    form = np.dtype(f"u{-(-width // 8)}")
    codes = np.frombuffer(encode(a, dtype), form).astype(np.int64).reshape(a.shape)
    sign = 1 << width - 1
    stepped = codes + np.where((b > a) != (a < 0), 1, -1)
    stepped = np.where(a == 0, np.where(b < 0, sign | 1, 1), stepped)
    if dtype.endswith("fnuz"):  # has no -0
        stepped = np.where(stepped == sign, 0, stepped)
    moved = decode(stepped.astype(form).tobytes(), dtype, a.shape)
    return np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), np.where(a == b, b, moved))


@meaning("complex")
def _complex(x: Instruction, re: Array, im: Array) -> Value:
    result = np.empty(np.broadcast(re, im).shape, numpy_dtype(x.dtype))
    result.real = re
    result.imag = im
    return result


_COMPARE = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}


@meaning("compare")
def _compare(x: Instruction, a: Array, b: Array) -> Value:
    if x.get("type") == "TOTALORDER" and x.operand.kind == "f":
        a = total_order(a)
        b = total_order(b)
    return _COMPARE[x["direction"]](a, b)


def total_order(v: Array) -> Array:
    """Integers ordered like floats: -nan < -inf < … < -0 < +0 < … < inf < nan."""
    bits = np.ascontiguousarray(v).view(f"i{v.dtype.itemsize}").reshape(v.shape)
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


def _width(x: Instruction) -> int:
    return x.bits if x.dtype != "pred" else 1


def _unsigned(x: Instruction, v: Array) -> Array:
    """The bits of integers (or truth values) as uint64."""
    if v.dtype == bool:
        return v.astype(np.uint64)
    return (
        v.astype(np.int64).view(np.uint64) & np.uint64((1 << _width(x)) - 1)
        if v.dtype.kind == "i"
        else v.astype(np.uint64)
    )


def _shift(x: Instruction, a: Array, b: Array) -> tuple[Array, Array, Array]:
    amount = _unsigned(x, b)
    big = amount >= _width(x)
    return _unsigned(x, a), np.where(big, np.uint64(0), amount), big


@meaning("shift-left", "shift-right-logical")
def _shift_logical(x: Instruction, a: Array, b: Array) -> Value:
    bits, amount, big = _shift(x, a, b)
    moved = bits << amount if x.op == "shift-left" else bits >> amount
    return np.where(big, np.uint64(0), moved).astype(a.dtype)


@meaning("shift-right-arithmetic")
def _shift_right_arithmetic(x: Instruction, a: Array, b: Array) -> Value:
    _, amount, big = _shift(x, a, b)
    signed = (
        wrap_bits(a, _width(x), True)
        if _width(x) < 8
        else a.view(f"i{a.dtype.itemsize}")
        if a.dtype.kind == "u"
        else a
    )
    amount = np.where(big, np.uint64(_width(x) - 1), amount).astype(np.int64)
    return (signed.astype(np.int64) >> amount).astype(a.dtype)


def _ones(v: Array) -> Array:
    """Number of set bits of uint64 values."""
    count = np.zeros(v.shape, np.int64)
    while v.any():
        count += (v & np.uint64(1)).astype(np.int64)
        v = v >> np.uint64(1)
    return count


@meaning("count-leading-zeros")
def _count_leading_zeros(x: Instruction, v: Array) -> Value:
    bits = _unsigned(x, v)
    for step in (1, 2, 4, 8, 16, 32):
        bits = bits | (bits >> np.uint64(step))
    return (_width(x) - _ones(bits)).astype(v.dtype)


def convert(v: Array, dtype: str) -> Value:
    """XLA's conversion: float to integer truncates and saturates, nan becomes 0; integers wrap;
    anything to pred is `!= 0`."""
    row = DTYPES[dtype]
    target = numpy_dtype(dtype)
    if row.kind == "p":
        return v != 0
    if v.dtype.kind == "c" and row.kind != "c":
        v = v.real
    if v.dtype.kind == "f" and row.kind in "su":
        low, high = row.limits
        v = np.trunc(np.nan_to_num(v.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf))
        inside = (v > low) & (v < high)  # the bounds themselves may round as floats
        exact = np.where(inside, v, 0).astype(target)
        return np.where(
            v >= high,
            np.array(high, target),
            np.where(v <= low, np.array(low, target), exact),
        )
    if row.kind in "su" and row.bits < 8:
        return wrap_bits(v.astype(target), row.bits, row.kind == "s")
    return v.astype(target)


@meaning("stochastic-convert")
def _stochastic_convert(x: Instruction, v: Array, random: Array) -> Value:
    if x.kind not in "su":
        raise EvaluateError(
            f"stochastic-convert to {x.dtype}: only integer results have a defined meaning"
        )
    whole = np.trunc(np.abs(wide(v, x.operand.shape)))
    fraction = np.abs(wide(v, x.operand.shape)) - whole
    up = fraction * 2.0 ** (8 * random.dtype.itemsize) > random.astype(np.float64)
    return convert(np.copysign(whole + up, v), x.dtype)


def _per_channel(x: Instruction, v: Array, scale: Array, zero_point: Array) -> tuple[Array, Array]:
    axes = x.get("dimensions", ())
    dims = [n if d in axes else 1 for d, n in enumerate(v.shape)]
    return scale.astype(np.float64).reshape(dims), zero_point.astype(np.float64).reshape(dims)


@meaning("uniform-quantize")
def _uniform_quantize(x: Instruction, v: Array, scale: Array, zero_point: Array) -> Value:
    scale, zero_point = _per_channel(x, v, scale, zero_point)
    return convert(np.rint(v / scale) + zero_point, x.dtype)


@meaning("uniform-dequantize")
def _uniform_dequantize(x: Instruction, v: Array, scale: Array, zero_point: Array) -> Value:
    scale, zero_point = _per_channel(x, v, scale, zero_point)
    return (v - zero_point) * scale


MEANINGS["clamp"] = lambda x, low, v, high: np.minimum(np.maximum(v, low), high)
MEANINGS["popcnt"] = lambda x, v: _ones(_unsigned(x, v)).astype(v.dtype)
MEANINGS["convert"] = lambda x, v: convert(v, x.dtype)
MEANINGS["bitcast-convert"] = lambda x, v: reinterpret(v, x.operand.dtype, x.dtype)


def reinterpret(v: Array, source: str, target: str) -> Array:
    """The bits of `v` read as `target`; a narrower type adds a minor dimension, a wider one removes
    it."""
    have = DTYPES[source].bits
    want = DTYPES[target].bits
    dims = v.shape if have == want else (*v.shape, have // want) if have > want else v.shape[:-1]
    data = encode(v, source)
    codes = np.frombuffer(data, np.uint8)
    if have < 8 <= want:
        shifts = np.arange(8 // have, dtype=np.uint8) * have
        parts = (codes.reshape(-1, 8 // have) & ((1 << have) - 1)) << shifts
        data = parts.sum(axis=1).astype(np.uint8).tobytes()
    elif want < 8 <= have:
        shifts = np.arange(8 // want, dtype=np.uint8) * want
        parts = codes[:, None] >> shifts & ((1 << want) - 1)
        data = parts.astype(np.uint8).tobytes()
    values = decode(data, target, dims)
    kind = DTYPES[target].kind
    return wrap_bits(values, want, kind == "s") if want < 8 and kind != "f" else values


# mantissa bits and the unsigned type of each float's own encoding
_LAYOUT = {
    "f64": (52, "u8"),
    "f32": (23, "u4"),
    "f16": (10, "u2"),
    "bf16": (7, "u2"),
}


@meaning("reduce-precision")
def _reduce_precision(x: Instruction, v: Array) -> Value:
    dtype = x.dtype
    if dtype not in _LAYOUT:
        raise EvaluateError(f"reduce-precision of {dtype}: use one of {', '.join(_LAYOUT)}")
    mantissa, unsigned = _LAYOUT[dtype]
    exponent = DTYPES[dtype].bits - 1 - mantissa
    bits = np.frombuffer(encode(v, dtype), unsigned).astype(np.uint64)
    keep_mantissa = x["mantissa_bits"]
    keep_exponent = x["exponent_bits"]
    one = np.uint64(1)
    if keep_mantissa < mantissa:
        dropped = np.uint64(mantissa - keep_mantissa)
        last = (bits >> dropped) & one
        bits = (bits + (one << (dropped - one)) - one + last) & ~((one << dropped) - one)
    if keep_exponent < exponent:
        sign = bits & (one << np.uint64(DTYPES[dtype].bits - 1))
        magnitude = bits & ~sign
        bias = (1 << (exponent - 1)) - 1
        kept_bias = (1 << (keep_exponent - 1)) - 1
        field = (magnitude >> np.uint64(mantissa)).astype(np.int64)
        infinity = np.uint64(((1 << exponent) - 1) << mantissa)
        magnitude = np.where(
            field > bias + kept_bias,
            infinity,
            np.where(field <= bias - kept_bias, np.uint64(0), magnitude),
        )
        bits = sign | magnitude
    result = decode(bits.astype(unsigned).tobytes(), dtype, v.shape)
    return np.where(np.isnan(v), v if keep_mantissa else np.copysign(np.inf, v), result)
