"""Linear algebra: Cholesky and triangular solves as opcodes; LU with partial pivoting and
Householder QR as loops over columns.

The loops work on whole arrays with masks, so that any number of leading batch dims costs nothing.
Pivots are LAPACK's, counted from 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_hlo.compiler.linalg.linalg import LU, QR, qr_memory
from torch_hlo.hlo.ir import Instruction, Size, build

from ..core import (
    Expr,
    Results,
    absolute,
    add_dim,
    aten,
    broadcast_dims,
    broadcast_to,
    compute,
    expected,
    expected_shapes,
    finish,
    guard,
    imag,
    iota,
    is_finite,
    log,
    lowers,
    named_call,
    on_diagonal,
    promote,
    real,
    reshape,
    scalar,
    select_dim,
    slice_dim,
    sqrt,
    swap,
    take_along,
    where,
    while_loop,
)
from ..core.opaque import opaque
from ..pointwise.pointwise import conjugate, sgn
from ..reduction.reduce import arg_extreme, fold
from .matmul import matrix_product


def _triangle(x: Instruction, lower: bool, strict: bool = False) -> Instruction:
    """The lower (upper) part of matrices, zero elsewhere."""
    offset = (-1 if lower else 1) if strict else 0
    mask = on_diagonal(x.dims, offset, "LE" if lower else "GE")
    return where(Expr(mask), Expr(x), 0).x


def _is_empty(x: Instruction) -> bool:
    return any(isinstance(d, int) and d == 0 for d in x.dims)


def _identity(dims: Sequence[Size], dtype: str) -> Instruction:
    return promote.cast(on_diagonal(dims), dtype)


def _adjoint(x: Instruction) -> Instruction:
    return conjugate(Expr(swap(x, -1, -2))).x


def _batched(dims: Sequence[Size], *xs: Instruction) -> list[Instruction]:
    """Matrices repeated over the batch dims of `dims`."""
    return [broadcast_to(x, (*dims[:-2], *x.dims[-2:])) for x in xs]


def _solve_triangular(
    a: Instruction,
    b: Instruction,
    lower: bool,
    left: bool = True,
    unit: bool = False,
    transpose: str = "NO_TRANSPOSE",
) -> Instruction:
    return build.triangular_solve(
        a,
        b,
        left_side=left,
        lower=lower,
        unit_diagonal=unit,
        transpose_a=transpose,
    )


# Cholesky
@lowers(aten.cholesky.default)
def cholesky(x: Instruction, upper: bool = False) -> Instruction:
    if _is_empty(x):
        return x
    factor = _triangle(build.cholesky(_adjoint(x) if upper else x), True)
    return _adjoint(factor) if upper else factor


@lowers(aten.linalg_cholesky_ex)
def cholesky_ex(
    x: Instruction,
    *,
    upper: bool = False,
    check_errors: bool = False,
) -> tuple[Instruction, Instruction]:
    """info: 1 where the factor is not finite."""
    factor = Expr(cholesky(x, upper))
    bad = fold(factor.ne(factor), (-2, -1), "or")
    return factor.x, finish(bad, 1)


@lowers(aten.cholesky_solve, aten._cholesky_solve_helper)
def cholesky_solve(b: Instruction, factor: Instruction, upper: bool = False) -> Instruction:
    b, factor = _batched(expected().dims, b, factor)
    lower = _adjoint(factor) if upper else factor
    return _solve_triangular(lower, _solve_triangular(lower, b, True), True, transpose="ADJOINT")


@lowers(aten.cholesky_inverse)
def cholesky_inverse(factor: Instruction, upper: bool = False) -> Instruction:
    return cholesky_solve(_identity(factor.dims, factor.dtype), factor, upper)


@lowers(aten.linalg_solve_triangular)
def linalg_solve_triangular(
    a: Instruction,
    b: Instruction,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Instruction:
    a, b = _batched(expected().dims, a, b)
    return _solve_triangular(a, b, not upper, left, unitriangular)


@lowers(aten.triangular_solve)
def triangular_solve(
    b: Instruction,
    a: Instruction,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[Instruction, Instruction]:
    a, b = _batched(expected().dims, a, b)
    transposed = "TRANSPOSE" if transpose else "NO_TRANSPOSE"
    return _solve_triangular(a, b, not upper, True, unitriangular, transposed), a


# LU with partial pivoting
def _row(x: Expr, index: Expr) -> Expr:
    """Row `index` (one per matrix, or one for all) of matrices, as [..., 1, n] repeated over the
    rows."""
    chosen = iota(x.dims, -2).eq(index.spread(x.dims))
    return fold(where(chosen, x, 0), (-2,)).add_dim(-2).broadcast(x.dims)


def _column(x: Expr, index: Expr) -> Expr:
    """Column `index` of matrices, as [..., m]."""
    return fold(where(iota(x.dims, -1).eq(index), x, 0), (-1,))


def lu_factor(a: Instruction) -> Sequence[Expr]:
    """(L and U in one matrix, s64 pivots from 0, s64 permutation: row i of P^T A is row perm[i] of
    A), as a call that says what it is (compiler/linalg/linalg.py)."""
    if _is_empty(a):
        return _lu_loops(a)
    return _named("lu", LU, a, _lu_loops)


def _named(name: str, config: str, a: Instruction, meaning: Callable) -> list[Expr]:
    """The results of `meaning` as a call that a kernel may stand for."""
    return [Expr(r) for r in named_call(name, config, (a,), lambda x: [r.x for r in meaning(x)])]


def _repeat(
    steps: Size, body: Callable[..., Sequence[Expr]], start: Sequence[Expr]
) -> Sequence[Expr]:
    """The values after `body(k, *values)` for each k below `steps`."""
    if any(_is_empty(v.x) for v in start):
        return start
    return while_loop(
        lambda k, *values: k < steps,
        lambda k, *values: (k + 1, *body(k, *values)),
        (scalar(0, "s64"), *start),
    )[1:]


def _lu_loops(a: Instruction) -> Sequence[Expr]:
    *batch, m, n = a.dims
    steps = min(m, n)
    vector = (*batch, m)
    last = len(vector) - 1

    def body(k: Expr, x: Expr, pivots: Expr, order: Expr) -> tuple[Expr, ...]:
        rows = iota(vector, last)
        size = _size(_column(x, k))
        _, p = arg_extreme(where(rows < k, -1, size), last, True)
        row_k = _row(x, k)
        row_p = _row(x, p)
        i = iota(x.dims, last)
        j = iota(x.dims, last + 1)
        x = where(i.eq(k), row_p, where(i.eq(p.spread(x.dims)), row_k, x))
        order = _swapped(order, k, p)
        pivot = _diagonal_value(row_p, j, k, last).spread(x.dims)
        column = _column(x, k).add_dim(-1).broadcast(x.dims)
        factor = where(
            (i > k) & pivot.ne(0),
            column / where(pivot.eq(0), 1, pivot),
            where(i > k, column, 0),
        )
        x = where((i > k) & (j > k), x - factor * row_p, where((i > k) & j.eq(k), factor, x))
        spots = iota(pivots.dims, -1)
        return x, where(spots.eq(k), p.spread(pivots.dims), pivots), order

    zeros = Expr(promote.full(0, "s64", (*batch, steps)))
    return _repeat(steps, body, (Expr(a), zeros, iota(vector, last)))


def _size(x: Expr) -> Expr:
    """What LAPACK chooses pivots by."""
    return absolute(real(x)) + absolute(imag(x)) if promote.is_complex(x.dtype) else absolute(x)


def _diagonal_value(row: Expr, j: Expr, k: Expr, last: int) -> Expr:
    """Element k of a row repeated over the rows of a matrix."""
    first, columns = (Expr(select_dim(v.x, last, 0)) for v in (row, j))
    return fold(where(columns.eq(k), first, 0), (last,))


def _swapped(order: Expr, k: Expr, p: Expr) -> Expr:
    """`order` with its elements `k` and `p` (one per row) exchanged."""
    places = iota(order.dims, -1)
    at_k = places.eq(k)
    at_p = places.eq(p.spread(order.dims))
    of_k, of_p = (fold(where(at, order, 0), (-1,)).spread(order.dims) for at in (at_k, at_p))
    return where(at_k, of_p, where(at_p, of_k, order))


def _order_of(pivots: Instruction, m: Size) -> Expr:
    """The permutation that a sequence of row swaps (from 1) makes."""
    *batch, steps = pivots.dims

    def body(k: Expr, swaps: Expr, order: Expr) -> tuple[Expr, Expr]:
        return swaps, _swapped(order, k, _column(swaps, k))

    return _repeat(steps, body, (Expr(pivots).cast("s64") - 1, iota((*batch, m), -1)))[1]


def _permuted(x: Instruction, order: Expr) -> Instruction:
    """Rows of `x` in the given order."""
    if _is_empty(x):
        return x
    return take_along(x, order.add_dim(-1).broadcast(x.dims).x, -2)


def _inverse_order(order: Expr) -> Expr:
    pair = build.sort([order.x, iota(order.dims, -1).x], order.rank - 1, "LT")
    return Expr(build.get_tuple_element(pair, 1))


def _info(packed: Expr, index: int) -> Instruction:
    """LAPACK's info: the first zero on the diagonal, counted from 1, or 0."""
    if _is_empty(packed.x):
        return promote.full(0, expected(index).dtype, expected(index).dims)
    *_, m, n = packed.dims
    i, j = (iota(packed.dims, d) for d in (-2, -1))
    zero = i.eq(j) & packed.eq(0)
    first = fold(where(zero, i + 1, m + n), (-2, -1), "minimum")
    return finish(where(first.eq(m + n), 0, first), index)


def _pivots(pivots: Expr, index: int) -> Instruction:
    return finish(pivots + 1, index)


@lowers(aten.linalg_lu_factor_ex)
def linalg_lu_factor_ex(
    a: Instruction,
    *,
    pivot: bool = True,
    check_errors: bool = False,
) -> tuple[Instruction, Instruction, Instruction]:
    packed, pivots, _ = lu_factor(a)
    return packed.x, _pivots(pivots, 1), _info(packed, 2)


@guard(aten.linalg_lu_factor_ex, aten.linalg_lu)
def _pivots_rows(a: torch.Tensor, *, pivot: bool = True, check_errors: bool = False) -> bool:
    return pivot


def _unpacked(packed: Instruction) -> tuple[Instruction, Instruction]:
    """(L with a unit diagonal [..., m, k], U [..., k, n])."""
    *_, m, n = packed.dims
    k = min(m, n)
    lower = slice_dim(packed, -1, 0, k)
    unit = Expr(_triangle(lower, True, True)) + Expr(_identity(lower.dims, packed.dtype))
    return unit.x, _triangle(slice_dim(packed, -2, 0, k), False)


def _permutation_matrix(order: Expr, dtype: str) -> Instruction:
    """P with A = P L U: column i has its one in row order[i]."""
    *batch, m = order.dims
    dims = (*batch, m, m)
    column = order.add_dim(len(batch)).broadcast(dims)
    return column.eq(iota(dims, len(batch))).cast(dtype).x


@lowers(aten.linalg_lu)
def linalg_lu(a: Instruction, *, pivot: bool = True) -> Results:
    packed, _, order = lu_factor(a)
    return _permutation_matrix(order, a.dtype), *_unpacked(packed.x)


@lowers(aten.lu_unpack)
def lu_unpack(
    packed: Instruction,
    pivots: Instruction,
    unpack_data: bool = True,
    unpack_pivots: bool = True,
) -> Results:
    p, lower, upper = expected_shapes()
    parts = (
        _unpacked(packed)
        if unpack_data
        else [promote.full(0, s.dtype, s.dims) for s in (lower, upper)]
    )
    if not unpack_pivots:
        return promote.full(0, p.dtype, p.dims), *parts
    return _permutation_matrix(_order_of(pivots, packed.dims[-2]), p.dtype), *parts


def _lu_solve(packed: Instruction, order: Expr, b: Instruction, adjoint: bool) -> Instruction:
    """x of A x = b, or of A^H x = b."""
    if adjoint:
        y = _solve_triangular(packed, b, False, transpose="ADJOINT")
        return _permuted(
            _solve_triangular(packed, y, True, unit=True, transpose="ADJOINT"),
            _inverse_order(order),
        )
    return _solve_triangular(
        packed,
        _solve_triangular(packed, _permuted(b, order), True, unit=True),
        False,
    )


@lowers(aten.linalg_lu_solve)
def linalg_lu_solve(
    packed: Instruction,
    pivots: Instruction,
    b: Instruction,
    *,
    left: bool = True,
    adjoint: bool = False,
) -> Instruction:
    packed, b = _batched(expected().dims, packed, b)
    order = _order_of(pivots, packed.dims[-1]).broadcast(packed.dims[:-1])
    if left:
        return _lu_solve(packed, order, b, adjoint)
    return _adjoint(_lu_solve(packed, order, _adjoint(b), not adjoint))


@lowers(aten.linalg_inv_ex)
def linalg_inv_ex(a: Instruction, *, check_errors: bool = False) -> tuple[Instruction, Instruction]:
    packed, _, order = lu_factor(a)
    return _lu_solve(packed.x, order, _identity(a.dims, a.dtype), False), _info(packed, 1)


# PyTorch factors the transpose of a contiguous real matrix for its determinant, and autograd relies
# on it.
@guard(aten._linalg_det, aten._linalg_slogdet)
def _is_plain(a: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    return a.is_contiguous() or a.is_complex()


def _factor_transpose(a: Instruction) -> tuple[Expr, ...]:
    return lu_factor(a if promote.is_complex(a.dtype) else swap(a, -1, -2))


def _determinant(packed: Expr, pivots: Expr) -> tuple[Expr, Expr]:
    """(diagonal of U [..., n], sign of the permutation)."""
    diagonal = fold(where(Expr(on_diagonal(packed.dims)), packed, 0), (-1,))
    swaps = pivots.ne(iota(pivots.dims, -1))
    odd = (fold(swaps.cast("s64"), (-1,)) & 1).ne(0)
    return diagonal, where(odd, -1, Expr(promote.full(1, packed.dtype, odd.dims)))


@lowers(aten._linalg_det)
def linalg_det(a: Instruction) -> tuple[Instruction, Instruction, Instruction]:
    packed, pivots, _ = _factor_transpose(a)
    diagonal, sign = _determinant(packed, pivots)
    value = fold(diagonal, (-1,), "multiply") * sign
    return value.x, packed.x, _pivots(pivots, 2)


@lowers(aten._linalg_slogdet)
def linalg_slogdet(
    a: Instruction,
) -> tuple[Instruction, Instruction, Instruction, Instruction]:
    packed, pivots, _ = _factor_transpose(a)
    diagonal, sign = _determinant(packed, pivots)
    return (
        (sign * fold(sgn(diagonal), (-1,), "multiply")).x,
        fold(log(absolute(diagonal)), (-1,)).x,
        packed.x,
        _pivots(pivots, 3),
    )


@lowers(aten._linalg_solve_ex)
def linalg_solve_ex(
    a: Instruction,
    b: Instruction,
    *,
    left: bool = True,
    check_errors: bool = False,
) -> tuple[Instruction, Instruction, Instruction, Instruction]:
    packed, pivots, order = lu_factor(a)
    vector = b.rank == 1 or (b.rank == a.rank - 1 and b.dims == a.dims[:-1])
    if vector:
        b = add_dim(b, b.rank)
    batch = broadcast_dims(a.dims[:-2], b.dims[:-2])
    many, b = _batched((*batch, 1, 1), packed.x, b)
    orders = order.broadcast((*batch, *order.dims[-1:]))
    x = (
        _lu_solve(many, orders, b, False)
        if left or vector
        else _adjoint(_lu_solve(many, orders, _adjoint(b), True))
    )
    return (
        reshape(x, expected().dims),
        packed.x,
        _pivots(pivots, 2),
        _info(packed, 3),
    )


@lowers(aten.linalg_qr)
def linalg_qr(a: Instruction, mode: str = "reduced") -> Results:
    """By Householder reflections; LAPACK's routine for complex matrices."""
    if promote.is_complex(a.dtype):
        return opaque(aten.linalg_qr.default, (a, mode), {}, expected_shapes(), library=True)
    *_, m, n = a.dims
    width = m if mode == "complete" else min(m, n)
    q, r = (
        _qr_loops(a, width)[:2]
        if _is_empty(a)
        else _named("qr", QR, a, lambda x: _qr_loops(x, width))[:2]
    )
    upper = _triangle(r.x, False)
    if mode == "r":
        empty = expected()
        return promote.full(0, empty.dtype, empty.dims), slice_dim(upper, -2, 0, width)
    return q.x, slice_dim(upper, -2, 0, width)


def _qr_loops(a: Instruction, width: Size) -> tuple[Expr, Expr, Expr]:
    """(Q [..., m, width], R [..., m, n], memory for the kernel)."""
    *batch, m, n = a.dims
    steps = min(m, n)
    last = len(batch)

    def body(k: Expr, q: Expr, r: Expr) -> tuple[Expr, ...]:
        rows = iota((*batch, m), last)
        x = where(rows < k, 0, _column(r, k))
        head = fold(where(rows.eq(k), x, 0), (last,))
        below = fold(where(rows > k, x * x, 0), (last,))
        norm = sqrt(head * head + below)
        target = where(below.eq(0), head, where(head >= 0, -norm, norm))
        v = x - where(rows.eq(k), target.spread(x.dims), 0)
        size = fold(v * v, (last,))
        v /= sqrt(where(size.eq(0), 1, size)).spread(v.dims)
        row = v.add_dim(-2)
        column = v.add_dim(-1)
        r -= 2 * matrix_product(column, matrix_product(row, r))
        q -= 2 * matrix_product(matrix_product(q, column), row)
        return q, r

    q, r = _repeat(steps, body, (Expr(_identity((*batch, m, m), a.dtype)), Expr(a)))
    return (
        Expr(slice_dim(q.x, -1, 0, width)),
        r,
        Expr(promote.full(0, a.dtype, (*batch, qr_memory(m, n)))),
    )


@lowers(aten.linalg_householder_product)
def householder_product(a: Instruction, tau: Instruction) -> Instruction:
    """The first n columns of the product of reflections 1 - tau v v^H."""
    *batch, m, n = a.dims
    steps = tau.dims[-1]
    last = len(batch)
    q = Expr(_identity((*batch, m, n), a.dtype))
    for k in reversed(range(steps)):
        rows = iota((*batch, m), last)
        column = Expr(select_dim(a, -1, k))
        v = where(rows.eq(k), 1, where(rows < k, 0, column))
        scale = Expr(select_dim(tau, -1, k)).spread(q.dims)
        row = conjugate(v.add_dim(-2))
        column = v.add_dim(-1)
        q -= scale * matrix_product(column, matrix_product(row, q))
    return q.x


# Norms below which the Taylor polynomial of degree 18 is exact to the last bit (Bader, Blanes,
# Casas 2019).
_TAYLOR_BOUND = {"f32": 3.01, "c64": 3.01, "f64": 1.09, "c128": 1.09}


@lowers(aten.linalg_matrix_exp)
def matrix_exp(a: Instruction) -> Instruction:
    """Taylor polynomial of the matrix divided by a power of two, squared as often as it was
    halved."""
    value = compute(a)
    if _is_empty(value.x):
        return a
    norm = fold(fold(absolute(value), (-2,)), (-1,), "maximum")
    limit = _TAYLOR_BOUND[value.dtype]

    def halve(bound: Expr, scale: Expr, count: Expr) -> tuple[Expr, Expr, Expr]:
        large = bound > limit
        return (
            where(large, bound * 0.5, bound),
            where(large, scale * 0.5, scale),
            where(large, count + 1, count),
        )

    bound = where(is_finite(norm), norm, 0)
    start = (
        bound,
        norm.like(1),
        Expr(promote.full(0, "s64", norm.dims)),
    )
    _, scale, halvings = while_loop(lambda bound, *rest: bound > limit, halve, start)

    def square(left: Expr, total: Expr) -> tuple[Expr, Expr]:
        return left - 1, where((left > 0).spread(total.dims), matrix_product(total, total), total)

    small = value * scale.spread(value.dims).cast(value.dtype)
    _, total = while_loop(lambda left, total: left > 0, square, (halvings, _taylor(small, 18)))
    return finish(total)


def _taylor(x: Expr, degree: int) -> Expr:
    """The exponential series up to `degree`, a multiple of 3: a polynomial in x^3 whose
    coefficients are polynomials in x."""
    one = Expr(_identity(x.dims, x.dtype))
    squared = matrix_product(x, x)
    cubed = matrix_product(squared, x)
    total = one * (1 / math.factorial(degree))
    for k in range(degree - 3, -1, -3):
        block = (
            one * (1 / math.factorial(k))
            + x * (1 / math.factorial(k + 1))
            + squared * (1 / math.factorial(k + 2))
        )
        total = block + matrix_product(cubed, total)
    return total
