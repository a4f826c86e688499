"""Random operators: distributions by inversion, dropout, permutations and draws by sorting random
keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch_hlo.hlo.ir import Dims, Instruction, Size
from torch_hlo.hlo.ir.build import get_tuple_element, sort
from torch_hlo.hlo.ir.literal import literal
from torch_hlo.pytorch.operators import OpOverload, OpOverloadPacket

from ..core import (
    Expr,
    Operand,
    Scalar,
    Weak,
    aten,
    binary,
    compute,
    exp,
    expected,
    expected_shapes,
    finish,
    floor,
    iota,
    is_number,
    log,
    log1p,
    lowers,
    promote,
    scalar,
    slice_dim,
    tan,
    where,
)
from ..shape.cumulative import prefix
from ..shape.sort import bisected, sorted_along
from .threefry import DIGITS, Key, normal, open_uniform, random_words, uniform


def _wide() -> str:
    return promote.compute_type(expected().dtype)


def _draws(*targets: OpOverloadPacket | OpOverload) -> Callable:
    """As `lowers`, for functions that take the key of a draw."""

    def register(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def lowering(*args: Any, generator=None, seed=None, offset=None, **kwargs: Any) -> Any:
            return fn(*args, key=(seed, offset), **kwargs)

        lowers(*targets)(lowering)
        return fn

    return register


# Dropout
@_draws(aten.native_dropout)
def native_dropout(
    x: Instruction,
    p: float,
    train: bool | None = True,
    *,
    key: Key,
) -> tuple[Instruction, Instruction]:
    shape, mask_shape = expected_shapes()
    if train is False or (is_number(p) and p == 0):
        return x, promote.full(True, mask_shape.dtype, shape.dims)
    value = Expr(x).cast(promote.compute_type(shape.dtype))
    mask = keep_mask(shape.dims, p, key)
    kept = where(mask, value * _inverse_keep(p, value), 0)
    return finish(kept), finish(mask, 1)


def keep_mask(dims: Sequence[Size], p: float, key: Key) -> Expr:
    """pred: true with probability 1 - p."""
    u = uniform(dims, "f32", key)
    return u >= u.like(p)


def _inverse_keep(p: Scalar, like: Expr) -> Expr:
    keep = 1 - scalar(p, "f64")
    return like.like(where(keep > 0, 1 / keep, 0).cast(like.dtype))


@lowers(aten.native_dropout_backward)
def native_dropout_backward(grad: Instruction, mask: Instruction, scale: float) -> Instruction:
    g = Expr(grad).cast(_wide())
    return finish(g * Expr(mask).cast(g.dtype) * g.like(scale))


# Uniform and normal
@_draws(aten.rand, aten.rand_like)
def rand(
    *args: Any,
    key: Key,
    **kwargs: Any,
) -> Instruction:
    shape = expected()
    if shape.kind == "c":
        return uniform_(args[0], key=key)
    return finish(uniform(shape.dims, shape.dtype, key))


@_draws(aten.randn, aten.randn_like)
def randn(
    *args: Any,
    key: Key,
    **kwargs: Any,
) -> Instruction:
    return normal_(key=key)


@_draws(
    aten.normal.Tensor_Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.normal.float_float,
)
def normal_(
    mean: Operand = 0.0,
    std: Operand = 1.0,
    *args: Any,
    key: Key,
    **kwargs: Any,
) -> Instruction:
    shape = expected()
    if shape.kind == "c":  # variance 1 in all
        part = promote.real_type(shape.dtype)
        halves = [normal(shape.dims, part, key, s) * math.sqrt(0.5) for s in (0, 2)]
        value = binary("complex", *halves)
    else:
        value = normal(shape.dims, shape.dtype, key)
    trivial = is_number(mean) and mean == 0 and is_number(std) and std == 1
    return finish(value if trivial else value * value.like(std) + value.like(mean))


@_draws(aten.uniform)
def uniform_(
    x: Instruction,
    low: float = 0.0,
    high: float = 1.0,
    *,
    key: Key,
) -> Instruction:
    shape = expected()

    def drawn(dtype: str, stream: int) -> Expr:
        u = uniform(shape.dims, dtype, key, stream)
        return u * (u.like(high) - u.like(low)) + u.like(low)

    if shape.kind == "c":
        part = promote.real_type(shape.dtype)
        return binary("complex", *(drawn(part, stream) for stream in (0, 1))).x
    return finish(drawn(shape.dtype, 0))


@_draws(aten.normal_functional)
def normal_functional(x: Instruction, *moments: float, key: Key) -> Instruction:
    return normal_(*moments, key=key)


# Bernoulli and integers
@_draws(aten.bernoulli.p, aten.bernoulli.Tensor)
def bernoulli_p(
    x: Instruction,
    p: Operand = 0.5,
    *,
    key: Key,
) -> Instruction:
    return _bernoulli(p, key)


@_draws(aten.bernoulli.default)
def _bernoulli(p: Operand, key: Key) -> Instruction:
    shape = expected()
    u = uniform(shape.dims, "f32", key)
    return finish(u < u.like(p))


@_draws(aten.randint, aten.randint_like)
def randint(
    *args: Any,
    key: Key,
    **kwargs: Any,
) -> Instruction:
    """(high, size), (low, high, size), (like, high) or (like, low, high)."""
    numbers = [a for a in args if is_number(a) or isinstance(a, Weak)]
    if isinstance(args[0], Instruction) and len(args) > 1 and isinstance(args[1], Instruction):
        numbers = [args[1]]  # randint_like.Tensor
    low, high = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
    return _integers(low, high, key)


def _wide_words(dims: Dims, key: Key) -> Expr:
    a, b = random_words(dims, key)
    return (a.cast("u64") << 32) | b.cast("u64")


def _integers(
    low: Operand,
    high: Operand,
    key: Key,
) -> Instruction:
    """Uniform integers of [low, high)."""
    wide = _wide_words(expected().dims, key)
    low, high = (scalar(v, "s64") for v in (low, high))
    value = binary("remainder", wide, wide.like((high - low).cast("u64"))).cast("s64")
    return finish(value + value.like(low))


@_draws(aten.random.default, getattr(aten.random, "from"), aten.random.to)
def random(
    x: Instruction,
    *bounds: int | None,
    key: Key,
) -> Instruction:
    shape = expected()
    if len(bounds) == 2 and bounds[1] is None:
        bounds = (bounds[0], _largest(shape.dtype))
    low, high = (
        (0, _largest(shape.dtype)) if not bounds else (0, bounds[0]) if len(bounds) == 1 else bounds
    )
    return _integers(low, _rounding_below(high, shape.dtype), key)


def _rounding_below(high: int, dtype: str) -> int:
    """`high`, or less where a number below would be rounded to it."""
    if promote.is_floating(dtype) and float(literal(high - 1, dtype).numpy()) >= high:
        high -= 1 << (high - 1).bit_length() - DIGITS[dtype]
    return high


def _largest(dtype: str) -> int:
    """One more than the largest number that random_() draws."""
    if dtype == "pred":
        return 2
    if promote.is_floating(dtype):
        return (1 << DIGITS[dtype]) + 1
    bits = promote.DTYPES[dtype].bits
    return min(1 << (bits - (promote.kind(dtype) == "s")), (1 << 63) - 1)


# Other distributions, by inversion
def _inverted(key: Key, transform: Callable[[Expr], Expr]) -> Instruction:
    shape = expected()
    dtype = promote.compute_type(shape.dtype) if shape.kind == "f" else "f64"
    return finish(transform(open_uniform(shape.dims, dtype, key)))


@_draws(aten.exponential)
def exponential(
    x: Instruction,
    lambd: float = 1.0,
    *,
    key: Key,
) -> Instruction:
    return _inverted(key, lambda u: -log(_inside(u)) / lambd)


@_draws(aten.geometric)
def geometric(
    x: Instruction,
    p: float,
    *,
    key: Key,
) -> Instruction:
    def transform(u: Expr) -> Expr:
        value = floor(log(u) / log1p(-u.like(p))) + 1
        return where(value < 1, 1, value)

    return _inverted(key, transform)


@_draws(aten.cauchy)
def cauchy(
    x: Instruction,
    median: float = 0.0,
    sigma: float = 1.0,
    *,
    key: Key,
) -> Instruction:
    return _inverted(key, lambda u: tan((u - 0.5) * math.pi) * sigma + median)


@_draws(aten.log_normal)
def log_normal(
    x: Instruction,
    mean: float = 1.0,
    std: float = 2.0,
    *,
    key: Key,
) -> Instruction:
    value = normal(expected().dims, expected().dtype, key)
    return finish(exp(value * std + mean))


# Permutations and draws without replacement, by sorting random keys
@_draws(aten.randperm)
def randperm(
    n: Size,
    *,
    key: Key,
    **kwargs: Any,
) -> Instruction:
    dims = expected().dims
    keys = _wide_words(dims, key)
    return finish(get_tuple_element(sort([keys.x, iota(dims, 0).x], 0, "LT"), 1))


@_draws(aten.multinomial)
def multinomial(
    weights: Instruction,
    num_samples: Size,
    replacement: bool = False,
    *,
    key: Key,
) -> Instruction:
    """The Gumbel trick: the largest of log(weight) + noise is a draw from the weights; several
    without replacement are a top-k. With replacement they are found among running sums."""
    w = compute(weights)
    dim = w.rank - 1
    if replacement and num_samples > 1:
        # sums of f32 are so exact in f64 that none grows by a weight of 0
        sums = prefix(w.cast("f64"), dim, "add").x
        total = slice_dim(sums, dim, w.dims[dim] - 1, w.dims[dim])
        u = open_uniform(expected().dims, "f64", key)
        return finish(bisected(sums, u * u.like(total), False))
    u = open_uniform(w.dims, w.dtype, key)
    _, order = sorted_along((log(w) - log(-log(_inside(u)))).x, dim, True)
    return finish(slice_dim(order, dim, 0, num_samples))


def _inside(u: Expr) -> Expr:
    """(0, 1): neither u nor log(u) is zero."""
    tiny = 2.0**-25 if u.dtype == "f32" else 2.0**-54
    return where(u.eq(1), 1 - tiny * 2, u)


@_draws(aten.rrelu_with_noise_functional)
def rrelu_with_noise(
    x: Instruction,
    noise: Instruction,
    lower: Scalar = 0.125,
    upper: Scalar = 1 / 3,
    training: bool = False,
    generator: None = None,
    *,
    key: Key,
) -> tuple[Instruction, Instruction]:
    """(result, slopes): random slopes for negative elements when training."""
    value = compute(x)
    low = value.like(lower)
    high = value.like(upper)
    if not training:
        return (
            where(value < 0, value * ((low + high) * 0.5), value).cast(x.dtype).x,
            noise,
        )
    slope = uniform(value.dims, "f32", key).cast(value.dtype) * (high - low) + low
    slope = where(value <= 0, slope, 1)
    return (value * slope).cast(x.dtype).x, slope.cast(noise.dtype).x
