"""softmax and log_softmax, forward and backward."""

import math
from typing import Any

import torch

from torch_hlo.hlo.ir import Instruction

from ..core import (
    Expr,
    aten,
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


def _shifted(x: Expr, dim: int) -> Expr:
    """x minus its maximum along `dim`."""
    return x - keep(fold(x, (dim,), "maximum"), x.dims, (dim,))


def softmax(x: Expr, dim: int) -> Expr:
    """In the dtype of `x`."""
    weights = exp(_shifted(x, dim))
    return weights / keep(fold(weights, (dim,)), x.dims, (dim,))


def log_softmax(x: Expr, dim: int) -> Expr:
    shifted = _shifted(x, dim)
    return shifted - keep(log(fold(exp(shifted), (dim,))), x.dims, (dim,))


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
    masked = keep(fold(value, (dim,), "maximum").eq(-math.inf), value.dims, (dim,))
    return finish(where(masked, 0, softmax(value, dim)))


@lowers(aten._softmax_backward_data)
def softmax_backward(
    grad: Instruction,
    output: Instruction,
    dim: int,
    input_dtype: torch.dtype,
) -> Instruction:
    g = compute(grad)
    y = compute(output)
    product = g * y
    return finish(product - y * keep(fold(product, (dim,)), y.dims, (dim,)))


@lowers(aten._log_softmax_backward_data)
def log_softmax_backward(
    grad: Instruction,
    output: Instruction,
    dim: int,
    input_dtype: torch.dtype,
) -> Instruction:
    g = compute(grad)
    y = compute(output)
    return finish(g - exp(y) * keep(fold(g, (dim,)), y.dims, (dim,)))
