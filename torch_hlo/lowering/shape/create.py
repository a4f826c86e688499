"""Tensors out of nothing: full, arange, linspace, eye, tril, and conversions between types."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch_hlo.hlo.ir import Dim, Instruction, Shape, Size, instr

from ..core import (
    Expr,
    Operand,
    Scalar,
    aten,
    bitcast,
    broadcast_to,
    expected,
    finish,
    imag,
    iota,
    is_finite,
    lowers,
    maximum,
    on_diagonal,
    promote,
    real,
    where,
)


def _filled(value: Scalar) -> Instruction:
    shape = expected()
    if isinstance(value, Instruction):
        return broadcast_to(promote.cast(value, shape.dtype), shape.dims)
    return promote.full(value, shape.dtype, shape.dims)


@lowers(
    aten.full,
    aten.full_like,
    aten.new_full,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.scalar_tensor,
)
def full(*args: Any, **kwargs: Any) -> Instruction:
    return _filled(args[-1])


@lowers(aten.ones, aten.ones_like, aten.new_ones)
def ones(*args: Any, **kwargs: Any) -> Instruction:
    return _filled(1)


@lowers(
    aten.zeros,
    aten.zeros_like,
    aten.new_zeros,
    aten.zero,
    aten.empty.memory_format,
    aten.empty_like,
    aten.new_empty,
    aten.empty_strided,
    aten.new_empty_strided,
    aten.empty_permuted,
    aten._efficientzerotensor,
)
def zeros(*args: Any, **kwargs: Any) -> Instruction:
    """An uninitialised tensor is a zero one: the value must not depend on what memory held."""
    return _filled(0)


@lowers(aten._to_copy, aten._to_cpu)
def to_copy(x: Operand, *args: Any, **kwargs: Any) -> Instruction:
    dtype = expected().dtype
    return promote.cast(x, dtype) if isinstance(x, Instruction) else promote.scalar(x, dtype)


@lowers(aten.copy.default)
def copy(x: Instruction, source: Instruction, *args: Any, **kwargs: Any) -> Instruction:
    return _filled(source)


@lowers(aten.arange)
def arange(*args: Any, **kwargs: Any) -> Instruction:
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)
    shape = expected()
    # PyTorch accumulates in int64 or double, whatever the result.
    exact = all(isinstance(v, (int, Dim)) for v in (start, step))
    dtype = "s64" if exact or promote.is_integral(shape.dtype) else "f64"
    if exact and shape.dtype in ("f32", "s32", "f64"):
        dtype = shape.dtype if shape.dtype != "f32" or _small(shape, start, step) else "f64"
    value = iota(shape.dims, 0, dtype)
    value = value if isinstance(step, int) and step == 1 else value * step
    value = value if isinstance(start, int) and start == 0 else value + start
    return finish(value)


def _small(shape: Shape, start: Size, step: Size) -> bool:
    """Every number of the range is exact in f32."""
    last = shape.dims[0]
    return (
        all(isinstance(v, int) for v in (start, step, last))
        and max(abs(start), abs(start + last * step)) < 1 << 24
    )


@lowers(aten.linspace)
def linspace(start: Operand, end: Operand, steps: int, **kwargs: Any) -> Instruction:
    first, last = _ends(start, end)
    dtype = expected().dtype
    if not promote.is_complex(dtype):
        return _spaced(first, last).cast(dtype).x
    parts = (_spaced(part(first), part(last)).x for part in (real, imag))
    return instr("complex", parts)


def _ends(start: Operand, end: Operand) -> tuple[Expr, Expr]:
    """Both ends as PyTorch converts them to the type of the result."""
    shape = expected()
    via = "s64" if promote.is_integral(shape.dtype) else None
    first, last = (promote.operand(v, shape.dtype, shape.dims, via) for v in (start, end))
    # A single element is the start.
    single = isinstance(shape.dims[0], int) and shape.dims[0] <= 1
    return Expr(first), Expr(first if single else last)


def _places(dims: Sequence[Size]) -> tuple[Expr, Expr, Expr]:
    """Of each element: its distance from the first one and from the last one, and that of both."""
    index = iota(dims, 0)
    last = index.like(dims[0]) - 1
    return index, last - index, maximum(last, 1)


def _first_half(dims: Sequence[Size]) -> Expr:
    """The elements that are counted from the start. The others are from the end, so that the last
    value is exact."""
    index = iota(dims, 0)
    return index < index.like(dims[0] // 2)


def _spaced(first: Expr, last: Expr) -> Expr:
    """Equal steps, rounded as often as in PyTorch's kernel for the CPU: after each operation in
    short types, else after multiplication and addition together."""
    dtype = "f64" if promote.is_integral(first.dtype) else first.dtype
    wide = promote.compute_type(dtype)

    def rounded(x: Expr) -> Expr:
        return x.cast(dtype).cast(wide)

    index, back, intervals = (rounded(i) for i in _places(first.dims))
    first = first.cast(wide)
    last = last.cast(wide)
    step = rounded(rounded(last - first) / intervals)
    if dtype != wide:
        low = first + rounded(step * index)
        high = last - rounded(step * back)
    elif dtype == "f64":
        low = _fused(step, index, first)
        high = _fused(-step, back, last)
    else:  # in f64 the product of two f32 numbers is exact
        step, index, back, first, last = (x.cast("f64") for x in (step, index, back, first, last))
        low = first + step * index
        high = last - step * back
    return where(_first_half(low.dims), low, high).cast(dtype)


def _fused(a: Expr, count: Expr, b: Expr) -> Expr:
    """`a * count + b` in f64, rounded once; `count`: integers below 2**26."""
    mask = ~((1 << 27) - 1) & ((1 << 64) - 1)
    high = bitcast(bitcast(a, "u64") & mask, "f64")
    large = high * count  # exact
    small = (a - high) * count
    product = large + small
    result = b + product
    added = result - b
    lost = ((large - product) + small) + ((b - (result - added)) + (product - added))
    rounded_twice = b + a * count
    return where(is_finite(rounded_twice), result + lost, rounded_twice)


@lowers(aten.eye)
def eye(*args: Any, **kwargs: Any) -> Instruction:
    shape = expected()
    return promote.cast(on_diagonal(shape.dims), shape.dtype)


def _triangle(direction: str, x: Instruction, diagonal: Size = 0) -> Instruction:
    kept = on_diagonal(x.dims, diagonal, direction)
    return instr("select", (kept, x, promote.full(0, x.dtype, x.dims)))


lowers(aten.tril)(partial(_triangle, "LE"))
lowers(aten.triu)(partial(_triangle, "GE"))
