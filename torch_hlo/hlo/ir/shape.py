"""Element types, array and tuple shapes of the HLO language.

`Shape("f32", (8, 16))` prints `f32[8,16]`; `Shape("tuple", elements=(a, b))` prints `(f32[8],
s32[])`. A dimension is an int or a symbolic `Dim` (see dim.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from torch_hlo.frozen import frozen

from .dim import Dim, Ints, Size


@frozen
class DType:
    """One row of DTYPES. `kind`: p(red) s(igned) u(nsigned) f(loat) c(omplex) t(oken)."""

    name: str
    kind: str
    bits: int  # width of a value; those below a byte are stored one per byte
    numpy: str | None  # numpy type that holds it in the evaluator (storage for 4-bit is int8/uint8)
    torch: str | None  # torch dtype name

    @property
    def itemsize(self) -> int:
        return max(self.bits, 8) // 8

    @property
    def limits(self) -> tuple[int, int]:
        """The lowest and the highest integer."""
        if self.kind == "u":
            return 0, (1 << self.bits) - 1
        half = 1 << (self.bits - 1)
        return -half, half - 1


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("pred", "p", 8, "bool", "bool"),
        DType("s2", "s", 2, "int8", None),
        DType("s4", "s", 4, "int8", None),
        DType("s8", "s", 8, "int8", "int8"),
        DType("s16", "s", 16, "int16", "int16"),
        DType("s32", "s", 32, "int32", "int32"),
        DType("s64", "s", 64, "int64", "int64"),
        DType("u2", "u", 2, "uint8", None),
        DType("u4", "u", 4, "uint8", None),
        DType("u8", "u", 8, "uint8", "uint8"),
        DType("u16", "u", 16, "uint16", "uint16"),
        DType("u32", "u", 32, "uint32", "uint32"),
        DType("u64", "u", 64, "uint64", "uint64"),
        DType("f4e2m1fn", "f", 4, "float4_e2m1fn", None),
        DType("f8e8m0fnu", "f", 8, "float8_e8m0fnu", "float8_e8m0fnu"),
        DType("f8e4m3fn", "f", 8, "float8_e4m3fn", "float8_e4m3fn"),
        DType("f8e5m2", "f", 8, "float8_e5m2", "float8_e5m2"),
        DType("f8e4m3fnuz", "f", 8, "float8_e4m3fnuz", "float8_e4m3fnuz"),
        DType("f8e5m2fnuz", "f", 8, "float8_e5m2fnuz", "float8_e5m2fnuz"),
        DType("f8e4m3", "f", 8, "float8_e4m3", None),
        DType("f8e3m4", "f", 8, "float8_e3m4", None),
        DType("f8e4m3b11fnuz", "f", 8, "float8_e4m3b11fnuz", None),
        DType("bf16", "f", 16, "bfloat16", "bfloat16"),
        DType("f16", "f", 16, "float16", "float16"),
        DType("f32", "f", 32, "float32", "float32"),
        DType("f64", "f", 64, "float64", "float64"),
        DType("c64", "c", 64, "complex64", "complex64"),
        DType("c128", "c", 128, "complex128", "complex128"),
        DType("token", "t", 0, None, None),
    )
}


_ITEMSIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}


@frozen
class Shape:
    """Shape of an array (`dtype`, `dims`) or of a tuple (`dtype == "tuple"`, `elements`).

    `layout` is minor-to-major and only records what a text file said; `None` and row-major mean the
    same. After the `layout` pass every array of a program is row-major."""

    dtype: str
    dims: tuple[Size, ...] = ()
    layout: Ints | None = None
    elements: tuple[Shape, ...] = ()

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def is_tuple(self) -> bool:
        return self.dtype == "tuple"

    @property
    def arrays(self) -> tuple[Shape, ...]:
        """The array, or those of a tuple, in order: nested tuples are flattened."""
        if not self.is_tuple:
            return (self,)
        return tuple([a for e in self.elements for a in e.arrays])

    @property
    def is_static(self) -> bool:
        """True when no size is symbolic."""
        return all(e.is_static for e in self.elements) and not any(
            isinstance(d, Dim) for d in self.dims
        )

    @property
    def sizes(self) -> Ints:
        """The dims of a static shape."""
        known = tuple([d for d in self.dims if isinstance(d, int)])
        assert len(known) == len(self.dims), f"{self} has symbolic sizes"
        return known

    @property
    def kind(self) -> str:
        """p, s, u, f, c, t: see DType.kind."""
        return DTYPES[self.dtype].kind

    @property
    def bits(self) -> int:
        """Of an element."""
        return DTYPES[self.dtype].bits

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def size(self) -> Size:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> Size:
        """Bytes of the dense row-major array; of a tuple, the sum over its elements."""
        if self.dtype == "tuple":
            return sum((e.nbytes for e in self.elements), start=0)
        return math.prod(self.dims) * _ITEMSIZES[self.dtype]

    def with_dims(self, dims: Iterable[Size]) -> Shape:
        return Shape(self.dtype, tuple(dims))

    def with_dtype(self, dtype: str) -> Shape:
        return Shape(dtype, self.dims)

    def __str__(self) -> str:
        if self.is_tuple:
            return "(" + ", ".join(map(str, self.elements)) + ")"
        layout = "" if self.layout is None else "{" + ",".join(map(str, self.layout)) + "}"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]" + layout

    __repr__ = __str__


def tuple_shape(*elements: Shape) -> Shape:
    return Shape("tuple", elements=elements)


def row_major_strides(dims: tuple[Size, ...]) -> tuple[Size, ...]:
    """Element strides of a dense row-major array."""
    strides: list[Size] = []
    step: Size = 1
    for d in reversed(dims):
        strides.append(step)
        step *= d
    return tuple(reversed(strides))


def numpy_dtype(name: str) -> np.dtype:
    """NumPy type of the *values* of an element type: bf16, f8 and f4 values are held in float32
    (rounded), 4-bit in 8-bit."""
    text = DTYPES[name].numpy
    if text is None:
        raise TypeError(f"element type {name} has no array form")
    return np.dtype("float32" if text.startswith(("bfloat", "float4", "float8")) else text)
