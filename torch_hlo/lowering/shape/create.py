"""Tensors out of nothing: full, arange, linspace, eye, tril, and conversions between types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_hlo.hlo.ir.dim import Dim, Size
from torch_hlo.hlo.ir.instruction import Instruction
from torch_hlo.hlo.ir.intern import instr
from torch_hlo.hlo.ir.literal import literal
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.lowering.core import promote
from torch_hlo.lowering.core.expr import Expr, power, where
from torch_hlo.lowering.core.promote import Operand, Scalar, broadcast_to
from torch_hlo.lowering.core.registry import expected, lowers
from torch_hlo.lowering.core.shaping import iota, on_diagonal

aten = torch.ops.aten


def _filled(value: Scalar) -> Instruction:
    shape = expected()
    if isinstance(value, Instruction):
        return broadcast_to(promote.cast(value, shape.dtype), shape.dims)
    return promote.full(value, shape.dtype, shape.dims)


@lowers(aten.full, aten.full_like, aten.new_full, aten.fill.Scalar, aten.fill.Tensor)
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


@lowers(aten.scalar_tensor)
def scalar_tensor(value: Scalar, **kwargs: Any) -> Instruction:
    return _filled(value)


@lowers(aten._to_copy, aten._to_cpu)
def to_copy(x: Operand, *args: Any, **kwargs: Any) -> Instruction:
    dtype = expected().dtype
    return promote.cast(x, dtype) if isinstance(x, Instruction) else promote.scalar(x, dtype)


@lowers(aten.copy.default)
def copy(x: Instruction, source: Instruction, *args: Any, **kwargs: Any) -> Instruction:
    return _filled(source)


@lowers(aten.type_as)
def type_as(x: Instruction, other: Instruction) -> Instruction:
    return promote.cast(x, other.shape.dtype)


@lowers(aten.arange)
def arange(*args: Any, **kwargs: Any) -> Instruction:
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)
    shape = expected()
    # PyTorch accumulates in int64 or double, whatever the result.
    exact = all(isinstance(v, (int, Dim)) for v in (start, step))
    dtype = "s64" if exact or promote.is_integral(shape.dtype) else "f64"
    if exact and shape.dtype in ("f32", "s32", "f64"):
        dtype = shape.dtype if shape.dtype != "f32" or _small(shape, start, step) else "f64"
    value = Expr(iota(shape.dims, 0, dtype))
    value = value if isinstance(step, int) and step == 1 else value * step
    value = value if isinstance(start, int) and start == 0 else value + start
    return promote.cast(value.x, shape.dtype)


def _small(shape: Shape, start: Size, step: Size) -> bool:
    """Every number of the range is exact in f32."""
    last = shape.dims[0]
    return (
        all(isinstance(v, int) for v in (start, step, last))
        and max(abs(start), abs(start + last * step)) < 1 << 24
    )


@lowers(aten.linspace)
def linspace(start: Operand, end: Operand, steps: int, **kwargs: Any) -> Instruction:
    return _spaced(start, end, lambda v: v)


@lowers(aten.logspace)
def logspace(
    start: Operand,
    end: Operand,
    steps: int,
    base: float = 10.0,
    **kwargs: Any,
) -> Instruction:
    return _spaced(start, end, lambda v: power(v.like(base), v))


def _spaced(start: Operand, end: Operand, finish: Callable[..., Any]) -> Instruction:
    """From both ends towards the middle, as PyTorch does, so that the last value is exact."""
    shape = expected()
    dtype = shape.dtype if promote.kind(shape.dtype) in "fc" else "f64"
    dtype = promote.compute_type(dtype)
    real = promote.real_type(dtype)
    (count,) = shape.dims
    if isinstance(count, int) and count <= 1:
        return promote.cast(finish(Expr(promote.operand(start, dtype, shape.dims))).x, shape.dtype)
    first, last = (Expr(promote.operand(v, dtype, shape.dims)) for v in (start, end))
    index = Expr(iota(shape.dims, 0, "s64"))
    intervals = Expr(promote.full(count - 1, dtype, shape.dims))
    if promote.is_integral(shape.dtype):
        first, last = (
            Expr(promote.operand(v, "s64", shape.dims)).cast(dtype) for v in (start, end)
        )
    step = (last - first) / intervals
    back = (
        (count - 1) - index
        if isinstance(count, int)
        else Expr(promote.full(count - 1, "s64", shape.dims)) - index
    )
    # The CPU's kernel rounds once, after the sum: in f64 the product of two f32 numbers is exact.
    wide, real = ("f64", "f64") if dtype == "f32" else (dtype, real)
    first, last, step = (v.cast(wide) for v in (first, last, step))
    low, high = (
        first + step * index.cast(real).cast(wide),
        last - step * back.cast(real).cast(wide),
    )
    half = Expr(promote.full(count // 2, "s64", shape.dims))
    return promote.cast(finish(where(index < half, low, high).cast(dtype)).x, shape.dtype)


@lowers(aten.eye)
def eye(*args: Any, **kwargs: Any) -> Instruction:
    shape = expected()
    return promote.cast(on_diagonal(shape.dims), shape.dtype)


@lowers(aten.tril)
def tril(x: Instruction, diagonal: Size = 0) -> Instruction:
    return _masked(x, on_diagonal(x.shape.dims, diagonal, "LE"))


@lowers(aten.triu)
def triu(x: Instruction, diagonal: Size = 0) -> Instruction:
    return _masked(x, on_diagonal(x.shape.dims, diagonal, "GE"))


def _masked(x: Instruction, mask: Instruction) -> Instruction:
    return instr("select", (mask, x, promote.full(0, x.shape.dtype, x.shape.dims)))


@lowers(aten.tril_indices)
def tril_indices(row: int, col: int, offset: int = 0, **kwargs: Any) -> Instruction:
    return _literal(torch.tril_indices(row, col, offset))


@lowers(aten.triu_indices)
def triu_indices(row: int, col: int, offset: int = 0, **kwargs: Any) -> Instruction:
    return _literal(torch.triu_indices(row, col, offset))


def _literal(values: torch.Tensor) -> Instruction:
    shape = expected()
    return instr("constant", (), shape, literal=literal(values.numpy(), shape.dtype))


@lowers(aten.isreal)
def isreal(x: Instruction) -> Instruction:
    if x.shape.kind != "c":
        return promote.full(True, "pred", x.shape.dims)
    imaginary = instr("imag", (x,))
    return instr(
        "compare",
        (imaginary, promote.full(0, imaginary.shape.dtype, x.shape.dims)),
        direction="EQ",
    )
