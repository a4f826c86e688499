"""Reductions: sums and means in f32 or wider, extrema with PyTorch's nan rules, argmax, norms,
variances."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from torch_hlo.hlo.ir import Computation, Instruction, Shape, Size, instr, tuple_shape

from ..core import (
    Expr,
    LoweringError,
    Scalar,
    Weak,
    absolute,
    aten,
    axes,
    axis,
    compute,
    exp,
    expected,
    get,
    highest,
    imag,
    iota,
    is_nan,
    log,
    lowers,
    lowest,
    power,
    promote,
    real,
    reduce,
    reshape,
    sqrt,
    where,
)
from ..core.shaping import from_front
from ..pointwise.pointwise import is_complex


def fold(x: Expr, dims: Sequence[int], op: str = "add") -> Expr:
    """Reduce `dims` away."""
    return Expr(reduce(x.x, dims, op))


def keep(x: Expr, dims: Sequence[Size], reduced: Sequence[int]) -> Expr:
    """Undo the removal of `reduced` dimensions: the value repeated over the array of shape
    `dims`."""
    reduced = from_front(reduced, len(dims))
    kept = [1 if i in reduced else d for i, d in enumerate(dims)]
    return x.reshape(kept).broadcast(dims)


def result(x: Expr, index: int = 0) -> Instruction:
    """`x` in the shape (keepdim or not) and dtype of result `index`."""
    shape = expected(index)
    return reshape(x.cast(shape.dtype).x, shape.dims)


def count(x: Expr, dims: Sequence[int], dtype: str | None = None) -> Expr:
    """How many elements a reduction of `dims` folds into one, as a rank-0 value."""
    return Expr(promote.count_elements([x.dims[d] for d in dims], dtype or x.dtype))


def _accumulator(x: Instruction) -> Expr:
    """`x` in the type sums are computed in."""
    return Expr(x).cast(promote.compute_type(expected().dtype))


@lowers(aten.nansum)
def nansum(
    x: Instruction,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Instruction:
    value = _accumulator(x)
    return result(fold(where(is_nan(value), 0, value), axes(dim, x.rank)))


@lowers(aten.mean)
def mean(
    x: Instruction,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Instruction:
    return result(average(_accumulator(x), axes(dim, x.rank)))


def average(x: Expr, dims: Sequence[int]) -> Expr:
    return fold(x, dims) / count(x, dims)


@lowers(aten.logsumexp)
def logsumexp(x: Instruction, dim: Sequence[int], keepdim: bool = False) -> Instruction:
    value = _accumulator(x)
    dims = axes(dim, x.rank)
    top = fold(real(value) if is_complex(value) else value, dims, "maximum")
    top = where(absolute(top).eq(math.inf), 0, top).cast(value.dtype)
    return result(log(fold(exp(value - keep(top, value.dims, dims)), dims)) + top)


def _total(
    of_truths: str,
    of_numbers: str,
    x: Instruction,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Instruction:
    how = of_truths if expected().dtype == "pred" else of_numbers
    return result(fold(_accumulator(x), axes(dim, x.rank), how))


lowers(aten.sum)(partial(_total, "or", "add"))
lowers(aten.prod)(partial(_total, "and", "multiply"))


def _truth(
    how: str, x: Instruction, dim: int | Sequence[int] | None = None, keepdim: bool = False
) -> Instruction:
    dims = () if dim == [] else axes(dim, x.rank)
    return result(fold(Expr(x).cast("pred"), dims, how))


lowers(aten.any)(partial(_truth, "or"))
lowers(aten.all)(partial(_truth, "and"))


def extreme(x: Expr, dims: Sequence[int], largest: bool) -> Expr:
    """Maximum or minimum; nan wins."""
    if x.dtype == "pred":
        return fold(x, dims, "or" if largest else "and")
    return fold(x, dims, "maximum" if largest else "minimum")


def _extreme_value(
    largest: bool, x: Instruction, dim: Sequence[int] = (), keepdim: bool = False
) -> Instruction:
    return result(extreme(Expr(x), axes(dim, x.rank), largest))


def arg_extreme(x: Expr, dim: int, largest: bool) -> tuple[Expr, Expr]:
    """(value, s64 index) of the extreme along `dim`: the first of equal ones; nan wins."""
    if x.dtype == "pred":
        value, index = arg_extreme(x.cast("s32"), dim, largest)
        return value.cast("pred"), index
    shapes = (Shape(x.dtype), Shape("s64")) * 2
    va, ia, vb, ib = (Expr(instr("parameter", (), s, index=i)) for i, s in enumerate(shapes))
    better = va > vb if largest else va < vb
    tie = va.eq(vb)
    if promote.is_floating(x.dtype):
        better |= is_nan(va) & ~is_nan(vb)
        tie |= is_nan(va) & is_nan(vb)
    first = better | (tie & (ia < ib))
    # of the values alone: where no position is read, none is found
    extreme = instr("maximum" if largest else "minimum", (va.x, vb.x))
    root = instr("tuple", (extreme, where(first, ia, ib).x), tuple_shape(*shapes[:2]))
    start = promote.constant(lowest(x.dtype) if largest else highest(x.dtype), x.dtype)
    both = instr(
        "reduce",
        (x.x, iota(x.dims, dim).x, start, promote.constant(highest("s64"), "s64")),
        dimensions=(dim,),
        to_apply=Computation("argmax" if largest else "argmin", (va.x, ia.x, vb.x, ib.x), root),
    )
    return Expr(get(both, 0)), Expr(get(both, 1))


def _extreme_with_index(
    largest: bool, x: Instruction, dim: int, keepdim: bool = False
) -> tuple[Instruction, Instruction]:
    if not x.rank:
        return x, promote.full(0, "s64", ())
    value, index = arg_extreme(Expr(x), axis(dim, x.rank), largest)
    return result(value), result(index, 1)


def _extreme_index(
    largest: bool, x: Instruction, dim: int | None = None, keepdim: bool = False
) -> Instruction:
    if not x.rank:
        return promote.full(0, "s64", expected().dims)
    if dim is None:
        x = reshape(x, (x.size,))
        dim = 0
    return result(arg_extreme(Expr(x), axis(dim, x.rank), largest)[1])


for _fn, _of_largest, _of_smallest in (
    (_extreme_value, (aten.amax, aten.max.default), (aten.amin, aten.min.default)),
    (_extreme_with_index, (aten.max.dim,), (aten.min.dim,)),
    (_extreme_index, (aten.argmax,), (aten.argmin,)),
):
    lowers(*_of_largest)(partial(_fn, True))
    lowers(*_of_smallest)(partial(_fn, False))


# Variance in two passes: exact enough in f32 and easy to fuse.
def variance(x: Expr, dims: Sequence[int], correction: float = 1) -> tuple[Expr, Expr]:
    """(variance, mean), both without the reduced dims; the variance is real."""
    center = average(x, dims)
    difference = x - keep(center, x.dims, tuple(dims))
    squares = fold(squared_size(difference), dims)
    divisor = count(x, dims, squares.dtype) - correction
    return squares / where(divisor < 0, 0, divisor), center


def squared_size(x: Expr) -> Expr:
    """|x|², real."""
    if not is_complex(x):
        return x * x
    return real(x) * real(x) + imag(x) * imag(x)


def _statistics(
    x: Instruction,
    args: Sequence[Sequence[int]],
    kwargs: dict[str, Any],
) -> tuple[Expr, Expr]:
    """Arguments of the default, dim and correction overloads -> (variance, mean)."""
    options = dict(zip(("dim", "unbiased", "keepdim"), args)) | kwargs
    if args and isinstance(args[0], bool):
        options = {"unbiased": args[0]}
    correction = options.get("correction")
    if correction is None:
        correction = 1 if options.get("unbiased", True) else 0
    return variance(compute(x), axes(options.get("dim"), x.rank), correction)


@lowers(aten.var)
def var(x: Instruction, *args: Any, **kwargs: Any) -> Instruction:
    return result(_statistics(x, args, kwargs)[0])


@lowers(aten.std)
def std(x: Instruction, *args: Any, **kwargs: Any) -> Instruction:
    return result(sqrt(_statistics(x, args, kwargs)[0]))


# Norms.
def norm(x: Expr, order: float, dims: Sequence[int]) -> Expr:
    """Vector p-norm over `dims`; real."""
    size = absolute(x) if x.kind != "p" else x
    if order == math.inf:
        return extreme(size, dims, True) if dims else size
    if order == -math.inf:
        return extreme(size, dims, False) if dims else size
    if order == 0:
        return fold(size.ne(0).cast(size.dtype), dims)
    if order == 1:
        return fold(size, dims)
    if order == 2:
        return sqrt(fold(squared_size(x), dims)) if dims else size
    total = fold(power(size, size.like(order)), dims)
    return power(total, total.like(1.0 / order))


@lowers(aten.linalg_vector_norm)
def vector_norm(
    x: Instruction,
    ord: Scalar = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Instruction:
    return result(norm(_norm_operand(x), _order(ord), axes(dim, x.rank)))


def _norm_operand(x: Instruction) -> Expr:
    target = expected().dtype
    if x.kind == "c":
        target = promote.complex_type(target)
    return Expr(x).cast(promote.compute_type(target))


def _order(p: Scalar) -> float:
    if isinstance(p, Weak):
        raise LoweringError(
            "the order of a norm must be a constant of the program, not a lifted scalar"
        )
    return float(p)
