"""softmax and log_softmax, forward and backward."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from torch_hlo.hlo.ir import Instruction

from ..core import (
    Expr,
    axis,
    compute,
    exp,
    expected,
    finish,
    log,
    lowers,
    promote,
    where,
)
from ..reduction.reduce import fold, keep

aten = torch.ops.aten


def _shifted(x: Expr, dims: Sequence[int]) -> tuple[Expr, Expr]:
    """x minus its maximum along `dims` (a row of -inf stays so), and the maximum without those
    dims."""
    top = fold(x, dims, "maximum")
    return x - keep(top, x.dims, dims), top


def softmax(x: Expr, dim: int) -> Expr:
    """In the dtype of `x`."""
    if not x.dims:
        return x * 0 + 1
    dims = (axis(dim, len(x.dims)),)
    weights = exp(_shifted(x, dims)[0])
    return weights / keep(fold(weights, dims), x.dims, dims)


def log_softmax(x: Expr, dim: int) -> Expr:
    if not x.dims:
        return x * 0
    dims = (axis(dim, len(x.dims)),)
    shifted, _ = _shifted(x, dims)
    return shifted - keep(log(fold(exp(shifted), dims)), x.dims, dims)


def _operand(x: Instruction) -> Expr:
    return compute(promote.cast(x, expected().dtype))


@lowers(aten._softmax, aten.softmax.int)
def softmax_(x: Instruction, dim: int, *args: Any, **kwargs: Any) -> Instruction:
    return finish(softmax(_operand(x), dim))


@lowers(aten._log_softmax, aten.log_softmax.int)
def log_softmax_(x: Instruction, dim: int, *args: Any, **kwargs: Any) -> Instruction:
    return finish(log_softmax(_operand(x), dim))


@lowers(aten._safe_softmax)
def safe_softmax(x: Instruction, dim: int, dtype: torch.dtype | None = None) -> Instruction:
    """Rows of -inf give 0 instead of nan."""
    value = _operand(x)
    if not value.dims:
        return finish(where(value.eq(-math.inf), 0, softmax(value, dim)))
    dims = (axis(dim, len(value.dims)),)
    masked = keep(fold(value, dims, "maximum").eq(-math.inf), value.dims, dims)
    return finish(where(masked, 0, softmax(value, dim)))


@lowers(aten._softmax_backward_data)
def softmax_backward(
    grad: Instruction,
    output: Instruction,
    dim: int,
    input_dtype: torch.dtype,
) -> Instruction:
    g, y = compute(grad), compute(output)
    if not g.dims:
        return finish(g * 0)
    dims = (axis(dim, len(y.dims)),)
    product = g * y
    return finish(product - y * keep(fold(product, dims), y.dims, dims))


@lowers(aten._log_softmax_backward_data)
def log_softmax_backward(
    grad: Instruction,
    output: Instruction,
    dim: int,
    input_dtype: torch.dtype,
) -> Instruction:
    g, y = compute(grad), compute(output)
    if not g.dims:
        return finish(g - exp(y) * g)
    dims = (axis(dim, len(y.dims)),)
    return finish(g - exp(y) * keep(fold(g, dims), y.dims, dims))
