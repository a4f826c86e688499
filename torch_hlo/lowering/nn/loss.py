"""Losses and their gradients. Reduction codes are torch's: 0 none, 1 mean, 2 sum."""

from __future__ import annotations

from torch_hlo.hlo.ir import Instruction, Instructions, Size

from ..core import (
    Expr,
    Scalar,
    absolute,
    add_dim,
    aten,
    broadcast_dims,
    broadcast_to,
    compute,
    exp,
    expected,
    finish,
    gather_dim,
    iota,
    log,
    log1p,
    lowers,
    maximum,
    promote,
    reshape,
    square,
    take_along,
    where,
)
from ..reduction.reduce import average, count, fold, result
from ..shape.cumulative import prefix

MEAN = 1
SUM = 2


def reduced(x: Expr, reduction: int) -> Instruction:
    """`x` by the reduction code, in the expected shape and dtype."""
    every = range(x.rank)
    return result(
        average(x, every) if reduction == MEAN else fold(x, every) if reduction == SUM else x
    )


def _terms(*operands: Instruction) -> list[Expr]:
    """Operands broadcast together in their compute type."""
    dtype = promote.compute_type(promote.result_type(*operands))
    dims = broadcast_dims(*(o.dims for o in operands))
    return [Expr(promote.operand(o, dtype, dims)) for o in operands]


def _spread(grad: Instruction, like: Expr, reduction: int) -> Expr:
    """The gradient of each element's loss: repeated, and divided by the count for a mean."""
    g = like.like(grad)
    return g / count(like, range(like.rank)) if reduction == MEAN else g


# Negative log likelihood: classes along dimension 1 (or 0 of a single row).
def _class_dim(x: Instruction) -> int:
    return 1 if x.rank > 1 else 0


def _weights(
    x: Instruction,
    target: Instruction,
    weight: Instruction | None,
    ignore_index: Size,
    dtype: str,
) -> tuple[Instruction, Expr]:
    """(a safe target, the weight of each target: 0 where ignored)."""
    t = Expr(target).cast("s64")
    valid = t.ne(ignore_index)
    safe = where(valid, t, 0)
    one = (
        Expr(promote.full(1, dtype, t.dims))
        if weight is None
        else Expr(gather_dim(weight, safe.x, 0)).cast(dtype)
    )
    return safe.x, where(valid, one, 0)


def _nll_forward(
    x: Instruction,
    target: Instruction,
    weight: Instruction | None,
    reduction: int,
    ignore_index: Size,
) -> Instructions:
    dim = _class_dim(x)
    value = compute(x)
    safe, w = _weights(x, target, weight, ignore_index, value.dtype)
    picked = Expr(
        reshape(
            take_along(value.x, add_dim(safe, dim) if safe.rank < x.rank else safe, dim),
            safe.dims,
        )
    )
    loss = where(w.eq(0), 0, -picked * w) if weight is None else -picked * w
    every = range(loss.rank)
    if reduction == 0:
        out = loss
        total = Expr(promote.constant(0, value.dtype))
    else:
        out = fold(loss, every)
        total = fold(w, every)
        out = out / total if reduction == MEAN else out
    return result(out), result(total, 1)


def _nll_backward(
    grad: Instruction,
    x: Instruction,
    target: Instruction,
    weight: Instruction | None,
    reduction: int,
    ignore_index: Size,
    total_weight: Instruction,
) -> Instruction:
    dim = _class_dim(x)
    shape = expected()
    safe, w = _weights(x, target, weight, ignore_index, promote.compute_type(shape.dtype))
    g = w.like(grad)
    if reduction == MEAN:
        g /= w.like(total_weight)
    g = where(w.eq(0), 0, -g * w)

    def spread(v: Instruction) -> Expr:
        return Expr(broadcast_to(add_dim(v, dim) if v.rank < shape.rank else v, shape.dims))

    chosen = iota(shape.dims, dim).eq(spread(safe))
    return finish(where(chosen, spread(g.x), 0))


lowers(aten.nll_loss_forward, aten.nll_loss2d_forward)(_nll_forward)
lowers(aten.nll_loss_backward, aten.nll_loss2d_backward)(_nll_backward)


# Regression
@lowers(aten.mse_loss)
def mse_loss(x: Instruction, y: Instruction, reduction: int = MEAN) -> Instruction:
    x, y = _terms(x, y)
    return reduced(square(x - y), reduction)


@lowers(aten.mse_loss_backward)
def mse_loss_backward(
    grad: Instruction,
    x: Instruction,
    y: Instruction,
    reduction: int,
) -> Instruction:
    x, y = _terms(x, y)
    return finish((x - y) * 2 * _spread(grad, x, reduction))


def _smooth(z: Expr, beta: Scalar) -> Expr:
    beta = z.like(beta)
    return where(z < beta, 0.5 * z * z / beta, z - 0.5 * beta)


# Classification
@lowers(aten.binary_cross_entropy)
def binary_cross_entropy(
    x: Instruction,
    y: Instruction,
    weight: Instruction | None = None,
    reduction: int = MEAN,
) -> Instruction:
    p, t = _terms(x, y)
    loss = (t - 1) * maximum(log1p(-p), -100) - t * maximum(log(p), -100)
    return reduced(_weighted(loss, weight), reduction)


def _weighted(loss: Expr, weight: Instruction | None) -> Expr:
    return loss if weight is None else loss * loss.like(weight)


@lowers(aten.binary_cross_entropy_backward)
def binary_cross_entropy_backward(
    grad: Instruction,
    x: Instruction,
    y: Instruction,
    weight: Instruction | None = None,
    reduction: int = MEAN,
) -> Instruction:
    p, t = _terms(x, y)
    return finish(
        _weighted(_spread(grad, p, reduction) * (p - t) / maximum((1 - p) * p, 1e-12), weight)
    )


@lowers(aten.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(
    x: Instruction,
    y: Instruction,
    weight: Instruction | None = None,
    pos_weight: Instruction | None = None,
    reduction: int = MEAN,
) -> Instruction:
    x, t = _terms(x, y)
    log_sigmoid = -(maximum(-x, 0) + log1p(exp(-absolute(x))))
    if pos_weight is None:
        loss = (1 - t) * x - log_sigmoid
    else:
        scale = 1 + (x.like(pos_weight) - 1) * t
        loss = (1 - t) * x - scale * log_sigmoid
    return reduced(_weighted(loss, weight), reduction)


def _target_column(x: Expr, target: Instruction) -> tuple[Expr, Expr]:
    """(value at the target class, pred: is the target class) of [N, C]."""
    t = add_dim(promote.cast(target, "s64"), 1)
    chosen = iota(x.dims, 1).eq(Expr(broadcast_to(t, x.dims)))
    return Expr(broadcast_to(take_along(x.x, t, 1), x.dims)), chosen


def _matrix(x: Instruction) -> Expr:
    """The rows, of which one alone may be a vector or a number."""
    return compute(x if x.rank == 2 else reshape(x, (1, x.size)))


def _rows(x: Instruction, target: Instruction) -> tuple[Expr, Instruction]:
    value = _matrix(x)
    return value, reshape(target, value.dims[:1])


def _row_weight(weight: Instruction, target: Instruction, like: Expr) -> Expr:
    return Expr(gather_dim(weight, target, 0)).cast(like.dtype).spread(like.dims)


@lowers(aten.multi_margin_loss_backward)
def multi_margin_loss_backward(
    grad: Instruction,
    x: Instruction,
    target: Instruction,
    p: Scalar,
    margin: Scalar,
    weight: Instruction | None = None,
    reduction: int = MEAN,
) -> Instruction:
    value, target = _rows(x, target)
    at_target, chosen = _target_column(value, target)
    z = margin - at_target + value
    slope = where(z > 0, z.like(1) if p == 1 else 2 * z, 0)
    if weight is not None:
        slope *= _row_weight(weight, target, slope)
    slope = where(chosen, 0, slope) / count(value, (1,))
    total = fold(slope, (1,)).spread(value.dims)
    slope = where(chosen, -total, slope)
    g = Expr(grad).cast(value.dtype)
    g = g.spread(value.dims)
    if reduction == MEAN:
        g /= count(value, (0,))
    return result(slope * g)


class _Labels:
    """Rows of classes, and of the labels that they have. Expressions are [row, label, class]."""

    def __init__(self, x: Instruction, target: Instruction) -> None:
        self.value = _matrix(x)
        n, c = self.value.dims
        self.dims = (n, c, c)
        labels = Expr(reshape(target, (n, c))).cast("s64")
        # labels end at the first -1
        ended = (prefix((labels < 0).cast("s64"), 1, "add") > 0).spread(self.dims)
        label = where(labels < 0, 0, labels)
        self.chosen = iota(self.dims, 2).eq(label.spread(self.dims)) & ~ended
        self.is_label = fold(self.chosen.cast("s64"), (1,)) > 0
        at_label = Expr(take_along(self.value.x, label.x, 1)).spread(self.dims)
        self.margin = 1 - at_label + self.of_class(self.value)
        self.counts = ~self.of_class(self.is_label) & ~ended

    def of_class(self, v: Expr) -> Expr:
        n, c, _ = self.dims
        return v.reshape((n, 1, c)).broadcast(self.dims)


# PyTorch's decomposition counts the first class for each label that is missing
@lowers(aten.multilabel_margin_loss_forward)
def multilabel_margin_loss_forward(
    x: Instruction, target: Instruction, reduction: int
) -> tuple[Instruction, Instruction]:
    rows = _Labels(x, target)
    parts = where(rows.counts, maximum(rows.margin, 0), 0)
    loss = fold(parts, (1, 2)) / count(rows.value, (1,))
    return reduced(loss, reduction), result(rows.is_label, 1)


@lowers(aten.multilabel_margin_loss_backward)
def multilabel_margin_loss_backward(
    grad: Instruction, x: Instruction, target: Instruction, reduction: int, is_target: Instruction
) -> Instruction:
    rows = _Labels(x, target)
    g = compute(grad)
    value = rows.value
    step = (rows.counts & (rows.margin > 0)).cast(value.dtype) / count(value, (1,))
    pull = fold(step, (2,)).spread(rows.dims)
    slope = fold(step - where(rows.chosen, pull, 0), (1,))
    if reduction == MEAN:
        slope /= count(value, (0,))
    return result(slope * g.spread(slope.dims))
