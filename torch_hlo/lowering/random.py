"""Random numbers: a counter-based generator on the element's index, so that dropout fuses like any elementwise op.

Threefry-2x32 (13 rounds, the fewest that pass BigCrush) turns (seed, offset, index) into 64 random bits. `seed` and `offset` are inputs of the
program (Weak s64): the recorder gives every op of a step its own offset.
"""

from __future__ import annotations

import math

import torch

from torch_hlo.hlo.build import get_tuple_element, sort
from torch_hlo.hlo.ir import Instruction, instr
from torch_hlo.hlo.shape import Shape
from torch_hlo.lowering import promote
from torch_hlo.lowering.expr import (
    Expr,
    binary,
    cos,
    exp,
    floor,
    is_number,
    log,
    log1p,
    sqrt,
    tan,
    where,
)
from torch_hlo.lowering.promote import broadcast_to, reshape
from torch_hlo.lowering.reduce import arg_extreme
from torch_hlo.lowering.registry import LoweringError, Weak, expected, lowers
from torch_hlo.lowering.shaping import iota, slice_dim, stack
from torch_hlo.lowering.sort import sorted_along

aten = torch.ops.aten
ROUNDS = 13
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_DIGITS = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8}  # significant bits of a uniform number


def threefry(
    key: tuple[Expr, Expr], counter: tuple[Expr, Expr], rounds: int = ROUNDS
) -> tuple[Expr, Expr]:
    """Threefry-2x32 of Salmon et al. 2011, on u32."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for i in range(rounds):
        x = x + y
        turn = _ROTATIONS[i % 8]
        y = (binary("shift-left", y, turn) | binary("shift-right-logical", y, 32 - turn)) ^ x
        if i % 4 == 3:
            round_ = i // 4 + 1
            x, y = x + keys[round_ % 3], y + (keys[(round_ + 1) % 3] + round_)
    return x, y


def random_words(dims, seed, offset, stream: int = 0) -> tuple[Expr, Expr]:
    """Two arrays of random u32; another `stream` gives independent ones."""
    if seed is None or offset is None:
        raise LoweringError(
            "a random op was recorded without seed and offset; record it through torch_hlo's dispatcher"
        )
    seed, offset = (
        v.value if isinstance(v, Weak) else promote.scalar(v, "s64") for v in (seed, offset)
    )
    seed, offset = (
        Expr(promote.cast(reshape(seed, ()), "u64")),
        Expr(promote.cast(reshape(offset, ()), "u64")),
    )
    size = Shape("u32", tuple(dims)).size
    index = Expr(reshape(instr("iota", (), Shape("u32", (size,)), iota_dimension=0), tuple(dims)))

    def low(v):
        return v.cast("u32")

    def high(v):
        return binary("shift-right-logical", v, 32).cast("u32")

    key = (
        index.like(low(seed)),
        index.like(high(seed) ^ high(offset) ^ (0x9E3779B9 * stream & 0xFFFFFFFF)),
    )
    return threefry(key, (index, index.like(low(offset))))


def uniform_bits(words: tuple[Expr, Expr], dtype: str, digits: int | None = None) -> Expr:
    """[0, 1) in f32 or f64, with as many random digits as `dtype` has."""
    digits = digits or _DIGITS[dtype]
    if dtype == "f64":
        wide = binary("shift-left", words[0].cast("u64"), 32) | words[1].cast("u64")
        return binary("shift-right-logical", wide, 64 - digits).cast("f64") * 2.0**-digits
    return binary("shift-right-logical", words[0], 32 - digits).cast("f32") * 2.0**-digits


def uniform(dims, dtype: str, seed, offset, stream: int = 0) -> Expr:
    """[0, 1) in the compute type of `dtype`."""
    return uniform_bits(random_words(dims, seed, offset, stream), dtype)


def open_uniform(dims, dtype: str, seed, offset, stream: int = 0) -> Expr:
    """(0, 1]: safe for a logarithm."""
    wide = promote.compute_type(dtype)
    return 1 - uniform(dims, wide, seed, offset, stream)


def normal(dims, dtype: str, seed, offset, stream: int = 0) -> Expr:
    """Standard normal numbers by Box and Muller, in the compute type."""
    wide = promote.compute_type(dtype)
    a, b = random_words(dims, seed, offset, stream)
    if wide == "f64":
        u = 1 - uniform_bits((a, b), wide)
        v = uniform(dims, wide, seed, offset, stream + 1)
    else:
        u, v = 1 - uniform_bits((a, b), wide), uniform_bits((b, a), wide)
    return sqrt(log(u) * -2) * cos(v * (2 * math.pi))


def _wide() -> str:
    return promote.compute_type(expected()[0].dtype)


def _rounded(x: Expr) -> Instruction:
    shape = expected()[0]
    return promote.cast(broadcast_to(x.x, shape.dims), shape.dtype)


def _number(value, like: Expr) -> Expr:
    """A parameter of a distribution: number, Weak or tensor."""
    return Expr(promote.operand(value, like.dtype, like.dims))


# Dropout
@lowers(aten.native_dropout)
def native_dropout(x, p, train=True, *, seed=None, offset=None):
    shape, mask_shape = expected()
    if train is False or (is_number(p) and p == 0):
        return x, promote.full(True, mask_shape.dtype, shape.dims)
    value = Expr(promote.cast(x, promote.compute_type(shape.dtype)))
    mask = keep_mask(shape.dims, p, seed, offset)
    kept = where(mask, value * _inverse_keep(p, value), 0)
    return promote.cast(kept.x, shape.dtype), promote.cast(mask.x, mask_shape.dtype)


def keep_mask(dims, p, seed, offset) -> Expr:
    """pred: true with probability 1 - p."""
    u = uniform(dims, "f32", seed, offset)
    return u >= _number(p, u)


def _inverse_keep(p, like: Expr) -> Expr:
    keep = 1 - Expr(promote.scalar(p, "f64"))
    return like.like(where(keep > 0, 1 / keep, 0).cast(like.dtype))


@lowers(aten.native_dropout_backward)
def native_dropout_backward(grad, mask, scale):
    g = Expr(promote.cast(grad, _wide()))
    return _rounded(g * Expr(promote.cast(mask, g.dtype)) * g.like(scale))


# Uniform and normal
@lowers(aten.rand, aten.rand_like)
def rand(*args, seed=None, offset=None, **kwargs):
    shape = expected()[0]
    return _rounded(uniform(shape.dims, shape.dtype, seed, offset))


@lowers(aten.randn, aten.randn_like)
def randn(*args, seed=None, offset=None, **kwargs):
    shape = expected()[0]
    return _normal(shape, 0.0, 1.0, seed, offset)


def _normal(shape: Shape, mean, std, seed, offset) -> Instruction:
    if shape.kind == "c":  # variance 1 in all
        part = promote.real_type(shape.dtype)
        halves = [normal(shape.dims, part, seed, offset, s) * math.sqrt(0.5) for s in (0, 2)]
        value = binary("complex", *halves)
    else:
        value = normal(shape.dims, shape.dtype, seed, offset)
    trivial = is_number(mean) and mean == 0 and is_number(std) and std == 1
    return _rounded(value if trivial else value * _number(std, value) + _number(mean, value))


@lowers(aten.uniform)
def uniform_(x, low=0.0, high=1.0, *, generator=None, seed=None, offset=None):
    shape = expected()[0]
    if shape.kind == "c":
        part = promote.real_type(shape.dtype)
        halves = [uniform(shape.dims, part, seed, offset, s) for s in (0, 1)]
        return binary(
            "complex", *(u * (_number(high, u) - _number(low, u)) + _number(low, u) for u in halves)
        ).x
    u = uniform(shape.dims, shape.dtype, seed, offset)
    low, high = _number(low, u), _number(high, u)
    return _rounded(u * (high - low) + low)


@lowers(
    aten.normal.Tensor_Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.normal.float_float,
)
def normal_(mean=0.0, std=1.0, *args, seed=None, offset=None, **kwargs):
    return _normal(expected()[0], mean, std, seed, offset)


@lowers(aten.normal_functional)
def normal_functional(x, mean=0.0, std=1.0, *, generator=None, seed=None, offset=None):
    return _normal(expected()[0], mean, std, seed, offset)


# Bernoulli and integers
@lowers(aten.bernoulli.default)
def bernoulli(p, *, generator=None, seed=None, offset=None):
    return _bernoulli(p, seed, offset)


@lowers(aten.bernoulli.p, aten.bernoulli.Tensor)
def bernoulli_p(x, p=0.5, *, generator=None, seed=None, offset=None):
    return _bernoulli(p, seed, offset)


def _bernoulli(p, seed, offset) -> Instruction:
    shape = expected()[0]
    u = uniform(shape.dims, "f32", seed, offset)
    return promote.cast((u < _number(p, u)).x, shape.dtype)


@lowers(aten.randint, aten.randint_like)
def randint(*args, seed=None, offset=None, **kwargs):
    """(high, size), (low, high, size), (like, high) or (like, low, high)."""
    numbers = [a for a in args if is_number(a) or isinstance(a, Weak)]
    if isinstance(args[0], Instruction) and len(args) > 1 and isinstance(args[1], Instruction):
        numbers = [args[1]]  # randint_like.Tensor
    low, high = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
    return _integers(low, high, seed, offset)


def _integers(low, high, seed, offset) -> Instruction:
    """Uniform integers of [low, high)."""
    shape = expected()[0]
    a, b = random_words(shape.dims, seed, offset)
    wide = binary("shift-left", a.cast("u64"), 32) | b.cast("u64")
    low, high = (Expr(promote.scalar(v, "s64")) for v in (low, high))
    value = binary("remainder", wide, wide.like((high - low).cast("u64"))).cast("s64")
    return _rounded(value + value.like(low))


@lowers(aten.random.default, getattr(aten.random, "from"), aten.random.to)
def random(x, *bounds, generator=None, seed=None, offset=None):
    shape = expected()[0]
    if len(bounds) == 2 and bounds[1] is None:
        bounds = (bounds[0], _largest(shape.dtype))
    low, high = (
        (0, _largest(shape.dtype)) if not bounds else (0, bounds[0]) if len(bounds) == 1 else bounds
    )
    return _integers(low, high, seed, offset)


def _largest(dtype: str) -> int:
    """One more than the largest number that random_() draws."""
    if dtype == "pred":
        return 2
    if promote.is_floating(dtype):
        return (1 << _DIGITS[dtype]) + 1
    bits = promote.DTYPES[dtype].bits
    return min(1 << (bits - (promote.kind(dtype) == "s")), (1 << 63) - 1)


# Other distributions, by inversion
def _inverted(shape: Shape, seed, offset, transform) -> Instruction:
    dtype = promote.compute_type(shape.dtype) if shape.kind == "f" else "f64"
    return _rounded(transform(open_uniform(shape.dims, dtype, seed, offset)))


@lowers(aten.exponential)
def exponential(x, lambd=1.0, *, generator=None, seed=None, offset=None):
    return _inverted(expected()[0], seed, offset, lambda u: -log(u) / _number(lambd, u))


@lowers(aten.geometric)
def geometric(x, p, *, generator=None, seed=None, offset=None):
    def transform(u):
        value = floor(log(u) / log1p(-_number(p, u))) + 1
        return where(value < 1, 1, value)

    return _inverted(expected()[0], seed, offset, transform)


@lowers(aten.cauchy)
def cauchy(x, median=0.0, sigma=1.0, *, generator=None, seed=None, offset=None):
    return _inverted(
        expected()[0],
        seed,
        offset,
        lambda u: _number(median, u) + _number(sigma, u) * tan((u - 0.5) * math.pi),
    )


@lowers(aten.log_normal)
def log_normal(x, mean=1.0, std=2.0, *, generator=None, seed=None, offset=None):
    value = normal(expected()[0].dims, expected()[0].dtype, seed, offset)
    return _rounded(exp(value * _number(std, value) + _number(mean, value)))


# Permutations and draws without replacement, by sorting random keys
@lowers(aten.randperm)
def randperm(n, *, seed=None, offset=None, **kwargs):
    shape = expected()[0]
    a, b = random_words(shape.dims, seed, offset)
    keys = binary("shift-left", a.cast("u64"), 32) | b.cast("u64")
    return promote.cast(
        get_tuple_element(sort([keys.x, iota(shape.dims, 0)], 0, "LT"), 1), shape.dtype
    )


@lowers(aten.multinomial)
def multinomial(weights, num_samples, replacement=False, *, generator=None, seed=None, offset=None):
    """The Gumbel trick: the largest of log(weight) + noise is a draw from the weights; several without replacement are a top-k."""
    shape = expected()[0]
    w = Expr(promote.cast(weights, promote.compute_type(weights.shape.dtype)))
    dim = len(w.dims) - 1
    if replacement and num_samples > 1:
        draws = [
            arg_extreme(
                log(w) - log(-log(_inside(open_uniform(w.dims, w.dtype, seed, offset, 2 * i)))),
                dim,
                True,
            )[1].x
            for i in range(num_samples)
        ]
        return promote.cast(stack(draws, -1), shape.dtype)
    noisy = log(w) - log(-log(_inside(open_uniform(w.dims, w.dtype, seed, offset))))
    _, order = sorted_along(noisy.x, dim, True)
    return promote.cast(slice_dim(order, dim, 0, num_samples), shape.dtype)


def _inside(u: Expr) -> Expr:
    """(0, 1): log(-log(u)) is finite."""
    tiny = 2.0**-25 if u.dtype == "f32" else 2.0**-54
    return where(u.eq(1), 1 - tiny * 2, u)


@lowers(aten.rrelu_with_noise_functional)
def rrelu_with_noise(
    x, noise, lower=0.125, upper=1 / 3, training=False, generator=None, *, seed=None, offset=None
):
    """(result, slopes): random slopes for negative elements when training."""
    value = Expr(promote.cast(x, promote.compute_type(x.shape.dtype)))
    low, high = _number(lower, value), _number(upper, value)
    if not training:
        return promote.cast(
            where(value < 0, value * ((low + high) * 0.5), value).x, x.shape.dtype
        ), noise
    slope = uniform(value.dims, "f32", seed, offset).cast(value.dtype) * (high - low) + low
    slope = where(value <= 0, slope, 1)
    return promote.cast((value * slope).x, x.shape.dtype), promote.cast(slope.x, noise.shape.dtype)
