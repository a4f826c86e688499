"""Encoding of element values as bytes, and rounding to the types NumPy does not have (bf16, f8).

Values of bf16 and f8 types are float32 arrays whose elements are representable in the type;
`round_to` makes them so."""

from functools import cache
from typing import NamedTuple

import numpy as np

from .shape import DTYPES, numpy_dtype


class SmallFloat(NamedTuple):
    """Bits of exponent and mantissa, and what the codes at the ends mean."""

    exponent: int
    mantissa: int
    bias: int
    infinite: bool  # has infinities
    fnuz: bool  # finite, nan, unsigned zero
    nan: bool = True
    signed: bool = True

    @property
    def bits(self) -> int:
        return self.signed + self.exponent + self.mantissa


SMALL_FLOATS = {
    "f8e4m3fn": SmallFloat(4, 3, 7, False, False),
    "f8e5m2": SmallFloat(5, 2, 15, True, False),
    "f8e4m3fnuz": SmallFloat(4, 3, 8, False, True),
    "f8e5m2fnuz": SmallFloat(5, 2, 16, False, True),
    "f8e4m3": SmallFloat(4, 3, 7, True, False),
    "f8e3m4": SmallFloat(3, 4, 3, True, False),
    "f8e4m3b11fnuz": SmallFloat(4, 3, 11, False, True),
    "f4e2m1fn": SmallFloat(2, 1, 1, False, False, nan=False),
    "f8e8m0fnu": SmallFloat(8, 0, 127, False, False, signed=False),
}


def encode(values: np.ndarray, dtype: str) -> bytes:
    """Row-major little-endian bytes of `values` converted to `dtype` (of complex numbers the real
    parts)."""
    if np.iscomplexobj(values) and DTYPES[dtype].kind in "suf":
        values = np.real(values)
    if dtype == "bf16":
        return _bf16_bits(np.asarray(values, np.float32)).tobytes()
    if dtype in SMALL_FLOATS:
        return _f8_bits(np.asarray(values, np.float32), dtype).tobytes()
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(np.asarray(values).astype(numpy_dtype(dtype))).tobytes()


def decode(data: bytes, dtype: str, dims: tuple[int, ...]) -> np.ndarray:
    """Inverse of encode."""
    if dtype == "bf16":
        bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(dims)
    if dtype in SMALL_FLOATS:
        table = _f8_values(dtype)
        found: np.ndarray = table[np.frombuffer(data, np.uint8) & len(table) - 1]
        return found.reshape(dims)
    return np.frombuffer(data, numpy_dtype(dtype)).reshape(dims)


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` rounded to nearest even in `dtype`, in the NumPy type that holds it."""
    values = np.asarray(values)
    if np.iscomplexobj(values) and DTYPES[dtype].kind in "suf":
        values = values.real
    if dtype == "bf16" or dtype in SMALL_FLOATS:
        return decode(encode(values, dtype), dtype, values.shape)
    with np.errstate(all="ignore"):
        return values.astype(numpy_dtype(dtype))


def _bf16_bits(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


@cache
def _f8_values(dtype: str) -> np.ndarray:
    """The values of a small type."""
    form = SMALL_FLOATS[dtype]
    if not form.signed:
        return np.array([*2.0 ** np.arange(-127.0, 128), np.nan], np.float32)
    positive = [_f8_value(code, dtype) for code in range(1 << form.bits - 1)]
    negative = [-value for value in positive]
    if form.fnuz:
        negative[0] = -np.nan
    return np.array(positive + negative, np.float32)


def _f8_value(code: int, dtype: str) -> float:
    """The value of a code without sign."""
    form = SMALL_FLOATS[dtype]
    top = (1 << form.exponent) - 1
    e = code >> form.mantissa
    m = code & ((1 << form.mantissa) - 1)
    if form.infinite and e == top:
        return np.nan if m else np.inf
    if form.nan and not form.infinite and not form.fnuz and code == 0x7F:
        return np.nan
    fraction = m / (1 << form.mantissa)
    return (1 + fraction) * 2.0 ** (e - form.bias) if e else fraction * 2.0 ** (1 - form.bias)


def _f8_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    table = _f8_values(dtype)
    form = SMALL_FLOATS[dtype]
    if not form.signed:
        bits = np.ascontiguousarray(values).view(np.uint32)
        half = np.where(bits < 1 << 23, (1 << 22) - 1, 1 << 22).astype(np.uint32)
        return np.where(values > 0, bits + half >> 23, 0xFF).astype(np.uint8)
    minus = 1 << form.bits - 1
    finite = np.array([c for c in range(minus) if np.isfinite(table[c])])
    grid = table[finite].astype(np.float64)
    magnitude = np.abs(values.astype(np.float64))
    upper = np.clip(np.searchsorted(grid, magnitude), 0, len(grid) - 1)
    lower = np.maximum(upper - 1, 0)
    nearer_low = magnitude - grid[lower] < grid[upper] - magnitude
    tie = magnitude - grid[lower] == grid[upper] - magnitude
    code = np.where(nearer_low | (tie & (lower % 2 == 0)), lower, upper).astype(np.uint8)
    step = grid[-1] - grid[-2]
    overflow = magnitude >= grid[-1] + step / 2
    top = ((1 << form.exponent) - 1) << form.mantissa
    nan = 0x80 if form.fnuz else top | 1 << (form.mantissa - 1) if form.infinite else 0x7F
    nan_code = np.uint8(nan)
    infinity = np.uint8(top) if form.infinite else nan_code
    if form.nan:
        code = np.where(overflow, infinity, code)
    else:
        nan_code = np.uint8(minus)
    sign = np.signbit(values) & ~(np.array(form.fnuz) & (code == 0)) & (code != 0x80)
    code = np.where(sign, code | minus, code).astype(np.uint8)
    return np.where(np.isnan(values), nan_code, code).astype(np.uint8)
