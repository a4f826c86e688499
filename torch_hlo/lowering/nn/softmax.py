"""softmax and log_softmax, forward and backward."""

import math
from collections.abc import Callable
from functools import partial
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


def _normalised(
    kernel: Callable[[Expr, int], Expr], x: Instruction, dim: int, *args: Any, **kwargs: Any
) -> Instruction:
    return finish(kernel(_operand(x), dim))


lowers(aten._softmax, aten.softmax.int)(partial(_normalised, softmax))
lowers(aten._log_softmax, aten.log_softmax.int)(partial(_normalised, log_softmax))


@lowers(aten._safe_softmax)
def safe_softmax(x: Instruction, dim: int, dtype: torch.dtype | None = None) -> Instruction:
    """Rows of -inf give 0 instead of nan."""
    value = _operand(x)
    masked = keep(fold(value, (dim,), "maximum").eq(-math.inf), value.dims, (dim,))
    return finish(where(masked, 0, softmax(value, dim)))


def _gradient(
    of_log: bool, grad: Instruction, output: Instruction, dim: int, input_dtype: torch.dtype
) -> Instruction:
    g = compute(grad)
    y = compute(output)
    if not of_log:
        g = g * y
    weights = exp(y) if of_log else y
    return finish(g - weights * keep(fold(g, (dim,)), y.dims, (dim,)))


lowers(aten._softmax_backward_data)(partial(_gradient, False))
lowers(aten._log_softmax_backward_data)(partial(_gradient, True))
