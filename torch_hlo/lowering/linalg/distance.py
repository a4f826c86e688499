"""Pairwise distances: cdist and pdist with gradients. Every norm but the Euclidean works on all
differences at once."""

from __future__ import annotations

import math

import torch

from torch_hlo.hlo.ir import Instruction, Instructions, Size, build

from ..core import (
    Expr,
    absolute,
    add_dim,
    aten,
    broadcast_to,
    compute,
    expected,
    finish,
    gather_dim,
    lowers,
    maximum,
    power,
    promote,
    scatter_dim,
    sqrt,
    where,
)
from ..reduction.reduce import fold, norm
from ..shape.view import sum_to
from .matmul import dot


def _differences(a: Instruction, b: Instruction) -> Expr:
    """[..., p, r, m]: row p of a minus row r of b."""
    rank = a.rank
    dims = (
        *_common_batch(a, b),
        a.dims[-2],
        b.dims[-2],
        a.dims[-1],
    )
    x = Expr(broadcast_to(add_dim(a, rank - 1), dims))
    y = Expr(broadcast_to(add_dim(b, b.rank - 2), dims))
    return x - y


def _common_batch(a: Instruction, b: Instruction) -> tuple:
    return promote.broadcast_dims(a.dims[:-2], b.dims[:-2])


def _by_product(a: Instruction, b: Instruction) -> Expr:
    """Euclidean distances as sqrt(|a|^2 + |b|^2 - 2 a b^T), as PyTorch computes them for many rows:
    one product instead of all differences."""
    x = compute(a)
    y = compute(b)
    dims = (*_common_batch(a, b), x.dims[-2], y.dims[-2])
    rank = len(dims)

    def squares(v: Expr, missing: int) -> Expr:
        total = fold(v * v, (v.rank - 1,))
        return total.add_dim(total.rank - missing).broadcast(dims)

    x, y = (v.broadcast((*dims[:-2], *v.dims[-2:])) for v in (x, y))
    batch = tuple(range(rank - 2))
    product = dot(x.x, y.x, (rank - 1,), (rank - 1,), batch, batch)
    return sqrt(maximum(squares(x, 0) + squares(y, 1) - product * 2, 0))


def _uses_product(a: Instruction, b: Instruction, p: float, mode: int | None) -> bool:
    """PyTorch's rule: mode 1 always, mode 2 never, else for more than 25 rows."""
    rows = a.dims[-2], b.dims[-2]
    return (
        p == 2
        and mode != 2
        and (mode == 1 or any(isinstance(n, int) and n > 25 for n in rows))
        and a.kind == "f"
    )


@lowers(aten._euclidean_dist)
def euclidean(a: Instruction, b: Instruction) -> Instruction:
    return finish(_by_product(a, b))


@lowers(aten._cdist_forward)
def cdist(
    a: Instruction,
    b: Instruction,
    p: float = 2.0,
    compute_mode: int | None = None,
) -> Instruction:
    if _uses_product(a, b, p, compute_mode):
        return finish(_by_product(a, b))
    d = _differences(compute(a).x, compute(b).x)
    return finish(norm(d, float(p), (d.rank - 1,)))


def _gradient(grad: Instruction, d: Expr, distances: Instruction, p: float) -> Expr:
    """Gradient of the differences `d`, whose p-norms are `distances`."""
    g, distance = (
        Expr(broadcast_to(add_dim(promote.cast(v, d.dtype), d.rank - 1), d.dims))
        for v in (grad, distances)
    )
    return g * _slope(d, distance, float(p))


def _slope(d: Expr, distance: Expr, p: float) -> Expr:
    """Derivative of the p-norm of `d` by its elements; `distance` is the norm, repeated."""
    sign = (d > 0).cast(d.dtype) - (d < 0).cast(d.dtype)
    if p == 0:
        return d * 0
    if p == 1:
        return sign
    if p == math.inf:
        return where(absolute(d).eq(distance), sign, 0)
    safe = where(distance.eq(0), 1, distance)
    if p == 2:
        return where(distance.eq(0), 0, d / safe)
    size = absolute(d)
    ratio = power(where(size.eq(0), 1, size) / safe, d.like(p - 1))
    return where(distance.eq(0) | size.eq(0), 0, sign * ratio)


@lowers(aten._cdist_backward)
def cdist_backward(
    grad: Instruction,
    a: Instruction,
    b: Instruction,
    p: float,
    distances: Instruction,
) -> Instruction:
    d = _differences(compute(a).x, compute(b).x)
    total = fold(_gradient(grad, d, distances, p), (d.rank - 2,))
    return finish(sum_to(total.x, expected().dims))


def _pairs(n: Size) -> Instructions:
    """Row numbers (i, j) of all pairs i < j."""
    both = torch.combinations(torch.arange(n), 2) if n > 1 else torch.zeros(0, 2, dtype=torch.int64)
    return tuple(build.constant(rows.numpy(), "s64") for rows in both.T)


def _pair_differences(x: Expr) -> tuple[Expr, Instruction, Instruction]:
    i, j = _pairs(x.dims[0])
    return Expr(gather_dim(x.x, i, 0)) - Expr(gather_dim(x.x, j, 0)), i, j


@lowers(aten._pdist_forward)
def pdist(x: Instruction, p: float = 2.0) -> Instruction:
    d, _, _ = _pair_differences(compute(x))
    return finish(norm(d, float(p), (1,)))


@lowers(aten._pdist_backward)
def pdist_backward(
    grad: Instruction,
    x: Instruction,
    p: float,
    distances: Instruction,
) -> Instruction:
    d, i, j = _pair_differences(compute(x))
    slope = _gradient(grad, d, distances, p)
    zero = promote.full(0, d.dtype, x.dims)
    return finish(scatter_dim(scatter_dim(zero, i, slope.x, 0), j, (-slope).x, 0))
