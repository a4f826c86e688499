"""Normalisations: layer, RMS, batch, group; forward and backward. Statistics are computed in f32 or
wider."""

from collections.abc import Sequence
from typing import Any

import torch

from torch_hlo.hlo.ir import Instruction, Ints, Size, build

from ..core import (
    Expr,
    Results,
    aten,
    bare,
    compute,
    expected_shapes,
    lowers,
    promote,
    reshape,
    rsqrt,
    sqrt,
    square,
)
from ..reduction.reduce import (
    average,
    count,
    fold,
    keep,
    variance,
)


def _results(*values: Expr | None) -> Results:
    """Each value in the dtype and dims PyTorch expects; a result that PyTorch leaves empty becomes
    an empty array."""
    results = []
    for value, shape in zip(values, expected_shapes(), strict=True):
        if shape is None:
            results.append(None)
        elif value is None or (shape.dims == (0,) and value.dims != (0,)):
            results.append(promote.full(0, shape.dtype, shape.dims))
        else:
            results.append(reshape(value.cast(shape.dtype).x, shape.dims))
    return tuple(results)


def _like(x: Instruction | None, like: Expr) -> Expr | None:
    """`x` in the compute type, broadcast (trailing alignment) to `like`."""
    return None if x is None else like.like(x)


def _normalised_dims(x: Expr, normalized_shape: Sequence[Size]) -> Ints:
    return tuple(range(x.rank - len(normalized_shape), x.rank))


@lowers(aten.native_layer_norm)
def native_layer_norm(
    x: Instruction,
    normalized_shape: Sequence[Size],
    weight: Instruction | None,
    bias: Instruction | None,
    eps: float,
) -> Results:
    value = compute(x)
    dims = _normalised_dims(value, normalized_shape)
    spread, mean = variance(value, dims, 0)
    rstd = rsqrt(spread + eps)
    out = (value - keep(mean, value.dims, dims)) * keep(rstd, value.dims, dims)
    return _results(_affine(out, _like(weight, out), _like(bias, out)), mean, rstd)


def _affine(x: Expr, weight: Expr | None, bias: Expr | None) -> Expr:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


@lowers(aten.native_layer_norm_backward)
def native_layer_norm_backward(*args: Any) -> Results:
    return _results(*_layer_gradients(*args))


def _layer_gradients(
    grad: Instruction,
    x: Instruction,
    normalized_shape: Sequence[Size],
    mean: Instruction | None,
    rstd: Instruction,
    weight: Instruction | None,
    bias: Instruction | None,
    mask: Sequence[bool],
) -> tuple[Expr | None, ...]:
    """Of `x`, rstd * (g - mean(g) - normal * mean(g * normal)) for the gradient g of what is
    normalised, of the weight and of the bias. Without a `mean` none was subtracted (RMS)."""
    value = compute(x)
    g = compute(grad)
    dims = _normalised_dims(value, normalized_shape)
    outer = tuple(range(dims[0] if dims else value.rank))
    rstd = value.like(rstd)
    normal = (value if mean is None else value - value.like(mean)) * rstd
    dx = dw = db = None
    if mask[0]:
        scaled = g if weight is None else g * _like(weight, g)
        inner = scaled if mean is None else scaled - keep(average(scaled, dims), g.dims, dims)
        dx = rstd * (inner - normal * keep(average(scaled * normal, dims), g.dims, dims))
    if mask[1] and weight is not None:
        dw = fold(g * normal, outer)
    if bias is not None and mask[2]:
        db = fold(g, outer)
    return dx, dw, db


@lowers(aten._fused_rms_norm)
def fused_rms_norm(
    x: Instruction,
    normalized_shape: Sequence[int],
    weight: Instruction | None,
    eps: float | None,
) -> Results:
    value = compute(x)
    dims = _normalised_dims(value, normalized_shape)
    if eps is None:
        eps = torch.finfo(promote.HLO_TO_TORCH[value.dtype]).eps
    rstd = rsqrt(average(square(value), dims) + eps)
    out = value * keep(rstd, value.dims, dims)
    return _results(_affine(out, _like(weight, out), None), rstd)


@lowers(aten._fused_rms_norm_backward)
def fused_rms_norm_backward(
    grad: Instruction,
    x: Instruction,
    normalized_shape: Sequence[int],
    rstd: Instruction,
    weight: Instruction | None,
    mask: Sequence[bool],
) -> Results:
    found = _layer_gradients(grad, x, normalized_shape, None, rstd, weight, None, mask)
    return _results(*found[:2])


# Batch normalisation: the channel is dimension 1.
def _channel(x: Instruction | Expr, like: Expr) -> Expr:
    """A vector over channels repeated over an array of shape [N, C, …]."""
    return Expr(build.broadcast(promote.cast(bare(x), like.dtype), like.dims, (1,)))


def _batch_norm(
    x: Instruction,
    weight: Instruction | None,
    bias: Instruction | None,
    running_mean: Instruction | None,
    running_var: Instruction | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Expr, ...]:
    """(output, save_mean, save_rstd, new running mean, new running variance); the last two None
    without statistics."""
    value = compute(x)
    dims = _but(1, value.rank)
    if training:
        spread, mean = variance(value, dims, 0)
        rstd = rsqrt(spread + eps)
        n = count(value, dims)
        unbiased = spread * (n / (n - 1))
        new = tuple(
            _running(old, fresh, momentum)
            for old, fresh in ((running_mean, mean), (running_var, unbiased))
        )
    else:
        mean = compute(running_mean)
        rstd = 1 / sqrt(compute(running_var) + eps)
        new = tuple(None if v is None else Expr(v) for v in (running_mean, running_var))
    out = (value - _channel(mean, value)) * _channel(rstd, value)
    scale, shift = (None if v is None else _channel(v, value) for v in (weight, bias))
    return _affine(out, scale, shift), mean, rstd, *new


def _running(old: Instruction | None, fresh: Expr, momentum: float) -> Expr | None:
    if old is None:
        return None
    before = compute(old)
    fresh = fresh.cast(before.dtype)
    return before * (1 - before.like(momentum)) + fresh * momentum


@lowers(aten.native_batch_norm.default)
def native_batch_norm(*args: Any, **kwargs: Any) -> Results:
    return _results(*_batch_norm(*args, **kwargs)[:3])


@lowers(aten._native_batch_norm_legit_functional.default)
def native_batch_norm_functional(*args: Any, **kwargs: Any) -> Results:
    return _results(*_batch_norm(*args, **kwargs))


# The others have no statistics, or no choice whether to take those of the batch.
@lowers(aten._native_batch_norm_legit.no_stats)
def native_batch_norm_no_stats(*args: Any) -> Results:
    return _results(*_batch_norm(*args[:3], None, None, True, *args[4:])[:3])


@lowers(aten._native_batch_norm_legit_no_training.default)
def native_batch_norm_no_training(*args: Any) -> Results:
    return _results(*_batch_norm(*args[:5], False, *args[5:])[:3])


@lowers(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update(*args: Any) -> Results:
    out, mean, rstd, *new = _batch_norm(*args[:5], True, *args[5:])
    return _results(out, mean, rstd, None, *new)


@lowers(aten._batch_norm_no_update.default)
def batch_norm_no_update(*args: Any) -> Results:
    training = args[3] is None  # without statistics
    return _results(*_batch_norm(*args[:5], training, *args[5:])[:3], None)


@lowers(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    grad: Instruction,
    x: Instruction,
    weight: Instruction | None,
    running_mean: Instruction | None,
    running_var: Instruction | None,
    save_mean: Instruction | None,
    save_invstd: Instruction | None,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> Results:
    value = compute(x)
    g = compute(grad)
    dims = _but(1, value.rank)
    if train:
        mean = compute(save_mean)
        rstd = compute(save_invstd)
    else:
        mean = compute(running_mean)
        rstd = rsqrt(compute(running_var) + eps)
    normal = (value - _channel(mean, value)) * _channel(rstd, value)
    products = fold(g * normal, dims)
    sums = fold(g, dims)
    dx = None
    # weights are the same for all that is summed: the gradients of weight and bias are the sums
    # that dx needs
    if mask[0]:
        n = count(value, dims)
        inner = g - _channel(sums / n, g) - normal * _channel(products / n, g) if train else g
        dx = (
            _channel(rstd if weight is None else rstd * compute(weight).cast(rstd.dtype), g) * inner
        )
    return _results(dx, products if mask[1] else None, sums if mask[2] else None)


@lowers(aten.batch_norm_backward.default)
def batch_norm_backward(*args: Any) -> Results:
    return native_batch_norm_backward(*args[:-1])  # the last: what a kernel kept


# Group normalisation. Everything that is summed is first summed per image and channel, [N, C], and
# what is the same in a group is spread to
# [N, C] in memory: the passes over the whole array then are those of batch normalisation, whichever
# dimension is innermost.
def _spatial(x: Expr) -> Ints:
    return tuple(range(2, x.rank))


def _group_mean(sums: Expr, groups: int, n: Expr) -> Expr:
    """[N, groups] from sums [N, C]; `n`: elements of a group."""
    images, channels = sums.dims
    return fold(sums.reshape((images, groups, channels // groups)), (2,)) / n


def _spread(x: Expr, channels: Size) -> Expr:
    """[N, groups] -> [N, C], as an array of its own."""
    images, groups = x.dims
    wide = build.broadcast(x.x, (images, groups, channels // groups), (0, 1))
    return Expr(build.opt_barrier(reshape(wide, (images, channels))))


@lowers(aten.native_group_norm)
def native_group_norm(
    x: Instruction,
    weight: Instruction | None,
    bias: Instruction | None,
    n: Size,
    c: Size,
    hxw: Size,
    group: int,
    eps: float,
) -> Results:
    value = compute(x)
    images, channels = value.dims[:2]
    size = count(value, _spatial(value)) * (channels // group)
    mean = _group_mean(fold(value, _spatial(value)), group, size)
    centered = value - _spread(mean, channels).spread(value.dims)
    rstd = rsqrt(_group_mean(fold(square(centered), _spatial(value)), group, size) + eps)
    scaled = centered * _spread(rstd, channels).spread(value.dims)
    return _results(
        _affine(scaled, *(None if v is None else _channel(v, value) for v in (weight, bias))),
        mean,
        rstd,
    )


@lowers(aten.native_group_norm_backward)
def native_group_norm_backward(
    grad: Instruction,
    x: Instruction,
    mean: Instruction,
    rstd: Instruction,
    weight: Instruction | None,
    n: Size,
    c: Size,
    hxw: Size,
    group: int,
    mask: Sequence[bool],
) -> Results:
    value = compute(x)
    g = compute(grad)
    images, channels = value.dims[:2]
    size = count(value, _spatial(value)) * (channels // group)
    mean, rstd = (
        _spread(Expr(reshape(v, (images, group))).cast(value.dtype), channels) for v in (mean, rstd)
    )
    centered = value - mean.spread(value.dims)
    sums = fold(g, _spatial(g))
    products = fold(g * centered, _spatial(g)) * rstd
    dx = None
    if mask[0]:
        scaled = [v if weight is None else v * _like(weight, v) for v in (sums, products)]
        first, second = (_spread(_group_mean(v, group, size), channels) for v in scaled)
        scale = rstd if weight is None else rstd * _like(weight, rstd)
        dx = (
            g * scale.spread(g.dims)
            - (rstd * first).spread(g.dims)
            - centered * (square(rstd) * second).spread(g.dims)
        )
    return _results(
        dx,
        fold(products, (0,)) if mask[1] else None,
        fold(sums, (0,)) if mask[2] else None,
    )


# torch.nn.utils.weight_norm: w = v * g / |v|, with a norm and a g for each index of dimension
# `dim`.


def _but(dim: int, rank: int) -> Ints:
    return tuple(d for d in range(rank) if d != dim % rank)


@lowers(aten._weight_norm_interface)
def weight_norm(v: Instruction, g: Instruction, dim: int = 0) -> Results:
    value = compute(v)
    others = _but(dim, value.rank)
    norm = sqrt(fold(square(value), others))
    return _results(value * (_like(g, value) / keep(norm, value.dims, others)), norm)


@lowers(aten._weight_norm_interface_backward)
def weight_norm_backward(
    grad: Instruction,
    v: Instruction,
    g: Instruction,
    norms: Instruction,
    dim: int,
) -> Results:
    """(gradient of v, gradient of g)."""
    value = compute(v)
    dw = compute(grad)
    others = _but(dim, value.rank)
    scale = _like(g, value)
    norm = Expr(reshape(norms, (value.dims[dim],))).cast(value.dtype)
    along = fold(dw * value, others) / norm
    return _results(
        scale
        / keep(norm, value.dims, others)
        * (dw - value * keep(along / norm, value.dims, others)),
        along,
    )
