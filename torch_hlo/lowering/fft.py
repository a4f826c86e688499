"""Fourier transforms: one dimension at a time, moved innermost. Normalisation codes are torch's: 0 none, 1 by sqrt(n), 2 by n."""
from __future__ import annotations

import math

import torch

from torch_hlo.hlo import build
from torch_hlo.hlo.ir import Instruction
from torch_hlo.lowering import promote
from torch_hlo.lowering.expr import Expr
from torch_hlo.lowering.registry import LoweringError, expected, lowers
from torch_hlo.lowering.shaping import axis, move_dim

aten = torch.ops.aten


def _along(x: Instruction, dim: int, kind: str, length: int) -> Instruction:
    """One-dimensional transform along `dim`; IFFT and IRFFT divide by the length."""
    if not isinstance(length, int):
        raise LoweringError(f"fft of {x.shape} along {dim}: the length must be known; mark the dimension static")
    return move_dim(build.fft(move_dim(x, dim, -1), kind, (length,)), -1, dim)


def _scaled(x: Instruction, normalization: int, count: int, divided: bool) -> Instruction:
    """`divided`: x was divided by `count` already."""
    factor = {0: 1.0, 1: 1 / math.sqrt(count), 2: 1 / count}[normalization] * (count if divided else 1)
    return x if factor == 1 else (Expr(x) * factor).x


def _count(dims, dim) -> int:
    return math.prod(dims[d] for d in dim)


@lowers(aten._fft_c2c)
def fft_c2c(x, dim, normalization, forward):
    dims = x.shape.dims
    for d in dim:
        x = _along(x, axis(d, x.shape.rank), "FFT" if forward else "IFFT", dims[d])
    return _scaled(x, normalization, _count(dims, dim), not forward)


@lowers(aten._fft_r2c)
def fft_r2c(x, dim, normalization, onesided):
    dims = x.shape.dims
    *rest, last = dim
    if onesided:
        y = _along(x, axis(last, x.shape.rank), "RFFT", dims[last])
    else:
        y = _along(promote.cast(x, promote.complex_type(x.shape.dtype)), axis(last, x.shape.rank), "FFT", dims[last])
    for d in rest:
        y = _along(y, axis(d, x.shape.rank), "FFT", dims[d])
    return _scaled(y, normalization, _count(dims, dim), False)


@lowers(aten._fft_c2r)
def fft_c2r(x, dim, normalization, last_dim_size):
    *rest, last = dim
    for d in rest:
        x = _along(x, axis(d, x.shape.rank), "IFFT", x.shape.dims[d])
    y = _along(x, axis(last, x.shape.rank), "IRFFT", last_dim_size)
    return _scaled(y, normalization, _count(expected()[0].dims, dim), True)
