"""Literal values: the constants of a program as bytes.

literal([[1, 2], [3, 4]], "bf16").numpy()       # array of float32, see numeric.py
"""

import numpy as np

from torch_hlo.frozen import frozen

from .numeric import decode, encode
from .shape import Shape


@frozen
class Literal:
    """A constant value: raw little-endian row-major bytes, so that -0.0, nan payloads and types
    never merge."""

    dtype: str
    dims: tuple[int, ...]
    data: bytes

    @property
    def shape(self) -> Shape:
        return Shape(self.dtype, self.dims)

    def numpy(self) -> np.ndarray:
        """A read-only array of `dims` holding the values (see numpy_dtype)."""
        return decode(self.data, self.dtype, self.dims)

    def __repr__(self) -> str:
        return f"Literal({self.dtype}{list(self.dims)}, {len(self.data)} bytes)"


def literal(value: object, dtype: str) -> Literal:
    """Literal of a scalar, nested list or array, converted to `dtype` (bf16 and f8 round to nearest
    even)."""
    array = np.asarray(value)
    return Literal(dtype, array.shape, encode(array, dtype))
