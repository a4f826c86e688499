"""Matrix products: mm, bmm, addmm, linear, … as `dot`; narrow floats accumulate in f32 and round
once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from torch_hlo.hlo.ir import Instruction, build, instr

from ..core import (
    Expr,
    Results,
    Scalar,
    Weak,
    add_dim,
    aten,
    bare,
    broadcast_dims,
    expected,
    finish,
    is_number,
    lowers,
    promote,
    reduce,
    scalar,
    slice_dim,
    where,
)
from ..pointwise.pointwise import conjugate


def dot(
    x: Instruction | Expr,
    y: Instruction | Expr,
    lhs: Sequence[int],
    rhs: Sequence[int],
    lhs_batch: Sequence[int] = (),
    rhs_batch: Sequence[int] = (),
) -> Expr:
    """Contraction in the compute type. Result dims: batch, free of `x`, free of `y`."""
    x = bare(x)
    y = bare(y)
    if x.kind == "c":
        return _complex_dot(x, y, lhs, rhs, lhs_batch, rhs_batch)
    dtype = promote.compute_type(x.dtype)
    return Expr(build.dot(x, y, lhs, rhs, lhs_batch, rhs_batch, dtype))


def _complex_dot(x: Instruction, y: Instruction, *dims: Sequence[int]) -> Expr:
    (a, b), (c, d) = ((instr("real", (v,)), instr("imag", (v,))) for v in (x, y))
    real = dot(a, c, *dims) - dot(b, d, *dims)
    imag = dot(a, d, *dims) + dot(b, c, *dims)
    return Expr(instr("complex", (real.x, imag.x)))


def matrix_product(a: Instruction | Expr, b: Instruction | Expr) -> Expr:
    """[…, n, k] x […, k, m] with equal leading dims."""
    batch = tuple(range(a.rank - 2))
    return dot(a, b, (a.rank - 1,), (b.rank - 2,), batch, batch)


@lowers(aten.mm.default, aten.bmm.default, aten.mm.dtype, aten.bmm.dtype, aten._int_mm.default)
def mm(a: Instruction, b: Instruction, dtype: torch.dtype | None = None) -> Instruction:
    if expected().dtype != a.dtype:
        a, b = (promote.cast(x, expected().dtype) for x in (a, b))
    return finish(matrix_product(a, b))


@lowers(aten._grouped_mm)
def grouped_mm(
    a: Instruction,
    b: Instruction,
    offs: Instruction | None = None,
    bias: Instruction | None = None,
    out_dtype: torch.dtype | None = None,
) -> Instruction:
    """Products of consecutive groups that end at `offs` [g]: of rows [m, k] x [g, k, n], of columns
    [g, m, k] x [k, n], or of the contracted dimension [m, k] x [k, n] -> [g, m, n]. Rows and
    columns after the last group are 0. [g, m, k] x [g, k, n] is bmm."""
    if a.rank == b.rank == 3:
        return mm(a, b)
    groups = offs.dims[0]
    before = build.pad(
        slice_dim(offs, 0, 0, groups - 1),
        promote.full(0, offs.dtype, ()),
        [(1, 0, 0)],
    )
    sizes = (Expr(offs) - Expr(before)).x

    def ragged(x: Instruction, y: Instruction, **dims: Sequence[int]) -> Instruction:
        return build.ragged_dot(x, y, sizes, dtype=promote.compute_type(a.dtype), **dims)

    if b.rank == 3:
        return finish(
            ragged(a, b, lhs_contract=(1,), rhs_contract=(1,), lhs_ragged=(0,), rhs_group=(0,))
        )
    if a.rank == 3:  # the transposed product has ragged rows
        turned = ragged(b, a, lhs_contract=(0,), rhs_contract=(2,), lhs_ragged=(1,), rhs_group=(0,))
        return finish(build.transpose(turned, (1, 0)))
    return finish(ragged(a, b, lhs_contract=(1,), rhs_contract=(0,), lhs_ragged=(1,)))


@lowers(aten.mv, aten.dot)
def mv(a: Instruction, v: Instruction) -> Instruction:
    """Of a matrix, or of a vector."""
    return finish(dot(a, v, (a.rank - 1,), (0,)))


def _combine(bias: Instruction, product: Expr, beta: Scalar, alpha: Scalar) -> Instruction:
    """beta * bias + alpha * product; with beta 0 the bias (even nan) plays no part."""
    shape = expected()
    if not (is_number(alpha) and alpha == 1):
        product *= alpha
    if not (is_number(beta) and beta == 0):
        term = Expr(promote.operand(bias, product.dtype, shape.dims))
        if not (is_number(beta) and beta == 1):
            term *= beta
            if isinstance(beta, Weak):  # known when the program runs
                term = where(scalar(beta, term.dtype).eq(0), 0, term)
        product += term
    return finish(product)


def _added(
    product: Callable[..., Expr],
    bias: Instruction,
    a: Instruction,
    b: Instruction,
    beta: Scalar = 1,
    alpha: Scalar = 1,
) -> Instruction:
    """A product that is added to a bias."""
    return _combine(bias, product(a, b), beta, alpha)


lowers(aten.addmm.default, aten.baddbmm.default)(partial(_added, matrix_product))
lowers(aten.addbmm.default)(partial(_added, lambda a, b: dot(a, b, (0, 2), (0, 1))))
lowers(aten.addmv)(partial(_added, lambda a, v: dot(a, v, (1,), (0,))))


def affine(x: Instruction, weight: Instruction, bias: Instruction | None = None) -> Expr:
    product = dot(x, weight, (x.rank - 1,), (weight.rank - 1,))
    return product if bias is None else product + product.like(bias)


@lowers(aten.linear)
def linear(x: Instruction, weight: Instruction, bias: Instruction | None = None) -> Instruction:
    return finish(affine(x, weight, bias))


@lowers(aten.linear_backward)
def linear_backward(
    x: Instruction,
    grad: Instruction,
    weight: Instruction,
    mask: Sequence[bool],
) -> Results:
    rows = tuple(range(x.rank - 1))
    dx = dw = db = None
    if promote.is_complex(x.dtype):
        x, weight = (conjugate(Expr(v)).x for v in (x, weight))
    if mask[0]:
        dx = dot(grad, weight, (grad.rank - 1,), (0,)).cast(x.dtype).x
    if mask[1]:
        dw = dot(grad, x, rows, rows).cast(weight.dtype).x
    if mask[2]:
        total = reduce(promote.cast(grad, promote.compute_type(grad.dtype)), rows)
        db = promote.cast(total, grad.dtype)
    return dx, dw, db


@lowers(aten._trilinear)
def trilinear(
    a: Instruction,
    b: Instruction,
    c: Instruction,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Instruction:
    """Product of three broadcast tensors, summed over `sumdim`."""
    terms = []
    for x, places in ((a, expand1), (b, expand2), (c, expand3)):
        for d in sorted(places):
            x = add_dim(x, d)
        terms.append(x)
    dims = broadcast_dims(*(t.dims for t in terms))
    dtype = promote.compute_type(expected().dtype)
    x, y, z = (Expr(promote.operand(t, dtype, dims)) for t in terms)
    return finish(reduce((x * y * z).x, sumdim))
