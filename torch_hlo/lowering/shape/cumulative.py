"""Running sums, products, extrema. A prefix is a reduce-window as long as the dimension, padded on
its low side."""

import math
from functools import partial

import torch

from torch_hlo.hlo.ir import Computation, Instruction, Shape, WindowDim, build, instr

from ..core import (
    Expr,
    Results,
    absolute,
    aten,
    axis,
    exp,
    expected,
    expected_shapes,
    finish,
    iota,
    is_finite,
    is_nan,
    log1p,
    lowers,
    maximum,
    promote,
    start_value,
    where,
)
from ..core.opaque import opaque


def prefix(x: Expr, dim: int, op: str | Computation, init: float | None = None) -> Expr:
    """Element i is the fold of elements 0..i along `dim`."""
    size = x.dims[dim]
    if isinstance(size, int) and size == 0:
        return x
    window = tuple(
        WindowDim(size, 1, size - 1, 0) if d == dim else WindowDim(1) for d in range(x.rank)
    )
    start = promote.constant(start_value(op, x.dtype) if init is None else init, x.dtype)
    return Expr(build.reduce_window(x.x, start, window, op))


def _cumulative(
    op: str, x: Instruction, dim: int, *, dtype: torch.dtype | None = None
) -> Instruction:
    shape = expected()
    value = Expr(x).cast(promote.compute_type(shape.dtype))
    if not value.dims:
        return finish(value)
    return finish(prefix(value, axis(dim, value.rank), op))


def _cumulative_extreme(op: str, x: Instruction, dim: int) -> tuple[Instruction, Instruction]:
    if not x.rank:
        return x, promote.full(0, "s64", ())
    dim = axis(dim, x.rank)
    value = Expr(x)
    if value.dtype == "pred":
        best, index = _cumulative_extreme(op, promote.cast(x, "s32"), dim)
        return promote.cast(best, "pred"), index
    best = prefix(value, dim, op)
    # The last position so far where the element is the running extreme.
    updates = value.eq(best) | is_nan(value)
    position = where(updates, iota(value.dims, dim), -1)
    return best.x, prefix(position, dim, "maximum").x


lowers(aten.cumsum)(partial(_cumulative, "add"))
lowers(aten.cumprod)(partial(_cumulative, "multiply"))
lowers(aten.cummax)(partial(_cumulative_extreme, "maximum"))
lowers(aten.cummin)(partial(_cumulative_extreme, "minimum"))


@lowers(aten.logcumsumexp)
def logcumsumexp(x: Instruction, dim: int) -> Instruction | Results:
    if promote.is_complex(x.dtype):
        return opaque(aten.logcumsumexp.default, (x, dim), {}, expected_shapes(), library=True)
    value = Expr(x).cast("f64")  # as PyTorch does: its gradient subtracts such sums
    if not value.dims:
        return x
    a, b = (Expr(instr("parameter", (), Shape(value.dtype), index=i)) for i in range(2))
    top = maximum(a, b)
    total = where(is_finite(top), top + log1p(exp(-absolute(where(is_finite(top), a - b, 0)))), top)
    add = Computation("logaddexp", (a.x, b.x), total.x)
    return finish(prefix(value, axis(dim, value.rank), add, -math.inf))
