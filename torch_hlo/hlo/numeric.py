"""Encoding of element values as bytes, and rounding to the types NumPy does not have (bf16, f8).

Values of bf16 and f8 types are float32 arrays whose elements are representable in the type; `round_to` makes them so.
"""

from __future__ import annotations

import numpy as np

from torch_hlo.hlo.shape import DTYPES, numpy_dtype

# exponent bits, mantissa bits, bias, has infinities, fnuz ("finite, nan, unsigned zero")
SMALL_FLOATS = {
    "f8e4m3fn": (4, 3, 7, False, False),
    "f8e5m2": (5, 2, 15, True, False),
    "f8e4m3fnuz": (4, 3, 8, False, True),
    "f8e5m2fnuz": (5, 2, 16, False, True),
    "f8e4m3": (4, 3, 7, True, False),
    "f8e3m4": (3, 4, 3, True, False),
    "f8e4m3b11fnuz": (4, 3, 11, False, True),
}


def encode(values: np.ndarray, dtype: str) -> bytes:
    """Row-major little-endian bytes of `values` converted to `dtype` (of complex numbers the real parts)."""
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
        return _f8_values(dtype)[np.frombuffer(data, np.uint8)].reshape(dims)
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


_F8_TABLES: dict[str, np.ndarray] = {}


def _f8_values(dtype: str) -> np.ndarray:
    """The 256 values of an f8 type."""
    table = _F8_TABLES.get(dtype)
    if table is None:
        exponent_bits, mantissa_bits, bias, has_inf, fnuz = SMALL_FLOATS[dtype]
        table = np.empty(256, np.float32)
        for code in range(256):
            e, m = (
                (code >> mantissa_bits) & ((1 << exponent_bits) - 1),
                code & ((1 << mantissa_bits) - 1),
            )
            top = (1 << exponent_bits) - 1
            if (
                fnuz
                and code == 0x80
                or not fnuz
                and not has_inf
                and code & 0x7F == 0x7F
                or has_inf
                and e == top
                and m
            ):
                value = np.nan
            elif has_inf and e == top:
                value = np.inf
            elif e:
                value = (1 + m / (1 << mantissa_bits)) * 2.0 ** (e - bias)
            else:
                value = m / (1 << mantissa_bits) * 2.0 ** (1 - bias)
            table[code] = -value if code & 0x80 else value
        _F8_TABLES[dtype] = table
    return table


def _f8_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    table = _f8_values(dtype)
    exponent_bits, mantissa_bits, _, has_inf, fnuz = SMALL_FLOATS[dtype]
    finite = np.array([c for c in range(128) if np.isfinite(table[c])])
    grid = table[finite].astype(np.float64)
    magnitude = np.abs(values.astype(np.float64))
    upper = np.clip(np.searchsorted(grid, magnitude), 0, len(grid) - 1)
    lower = np.maximum(upper - 1, 0)
    nearer_low = magnitude - grid[lower] < grid[upper] - magnitude
    tie = magnitude - grid[lower] == grid[upper] - magnitude
    code = np.where(nearer_low | (tie & (lower % 2 == 0)), lower, upper).astype(np.uint8)
    step = grid[-1] - grid[-2]
    overflow = magnitude >= grid[-1] + step / 2
    top = ((1 << exponent_bits) - 1) << mantissa_bits
    nan_code = np.uint8(0x80 if fnuz else 0x7F if not has_inf else top | 1 << (mantissa_bits - 1))
    infinity = np.uint8(top) if has_inf else nan_code
    code = np.where(overflow, infinity, code)
    sign = np.signbit(values) & ~(np.array(fnuz) & (code == 0)) & (code != 0x80)
    code = np.where(sign, code | 0x80, code).astype(np.uint8)
    return np.where(np.isnan(values), nan_code, code).astype(np.uint8)
