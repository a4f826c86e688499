"""Activations and their gradients, element by element."""

import math

from torch_hlo.hlo.ir import Instruction

from ..core import (
    Expr,
    Scalar,
    Term,
    absolute,
    aten,
    erf,
    exp,
    expm1,
    is_nan,
    log1p,
    logistic,
    lowers,
    maximum,
    minimum,
    pointwise,
    slice_dim,
    tanh,
    where,
)
from ..core.elementwise import apply
from .pointwise import conjugate

SQRT_2_PI = math.sqrt(2 / math.pi)


@pointwise(aten.relu)
def relu(x: Expr) -> Expr:
    return maximum(x, 0)


@pointwise(aten.hardtanh, arity=3)
def hardtanh(x: Expr, low: Expr = -1, high: Expr = 1) -> Expr:
    return minimum(maximum(x, low), high)


@pointwise(aten.hardtanh_backward, arity=2)
def hardtanh_backward(g: Expr, x: Expr, low: Term, high: Term) -> Expr:
    return where((x <= low) | (x >= high), 0, g)


@pointwise(aten.threshold, arity=3)
def threshold(x: Expr, limit: Expr, value: Expr) -> Expr:
    return where(x <= limit, value, x)


@pointwise(aten.threshold_backward, arity=2)
def threshold_backward(g: Expr, x: Expr, limit: Term) -> Expr:
    return where(x <= limit, 0, g)


@pointwise(aten.leaky_relu)
def leaky_relu(x: Expr, slope: Term = 0.01) -> Expr:
    return where(x > 0, x, x * slope)


@pointwise(aten.leaky_relu_backward, arity=2)
def leaky_relu_backward(g: Expr, x: Expr, slope: Term, is_result: bool) -> Expr:
    return where(x > 0, g, g * slope)


@pointwise(aten._prelu_kernel, arity=2)
def prelu(x: Expr, weight: Expr) -> Expr:
    return where(x > 0, x, weight * x)


@pointwise(aten.elu)
def elu(x: Expr, alpha: Term = 1, scale: Term = 1, input_scale: Term = 1) -> Expr:
    return where(x > 0, x * scale, expm1(x * input_scale) * alpha * scale)


@lowers(aten.elu_backward)
def elu_backward(
    g: Instruction,
    alpha: Scalar,
    scale: Scalar,
    input_scale: Scalar,
    is_result: bool,
    x: Instruction,
) -> Instruction:
    def gradient(g: Expr, x: Expr) -> Expr:
        top = x.like(alpha) * scale
        slope = (x + top if is_result else exp(x * input_scale) * top) * input_scale
        return where(x <= 0, g * slope, g * scale)

    return apply(gradient, (g, x), {}, 2)


@pointwise(aten.gelu)
def gelu(x: Expr, approximate: str = "none") -> Expr:
    if approximate == "tanh":
        return 0.5 * x * (1 + tanh(SQRT_2_PI * (x + 0.044715 * x * x * x)))
    return x * 0.5 * (1 + erf(x * math.sqrt(0.5)))


@pointwise(aten.gelu_backward, arity=2)
def gelu_backward(g: Expr, x: Expr, approximate: str = "none") -> Expr:
    if approximate == "tanh":
        square = x * x
        t = tanh(SQRT_2_PI * (x + 0.044715 * square * x))
        left = 0.5 * (1 + t)
        right = 0.5 * x * (1 - t * t) * SQRT_2_PI * (1 + 3 * 0.044715 * square)
        return g * (left + right)
    cdf = 0.5 * (1 + erf(x * math.sqrt(0.5)))
    return g * (cdf + x * exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi)))


@pointwise(aten.silu)
def silu(x: Expr) -> Expr:
    return x * logistic(x)


@pointwise(aten.silu_backward, arity=2)
def silu_backward(g: Expr, x: Expr) -> Expr:
    s = logistic(x)
    return g * s * (1 + x * (1 - s))


@pointwise(aten.mish)
def mish(x: Expr) -> Expr:
    return x * tanh(_softplus(x))


@pointwise(aten.mish_backward, arity=2)
def mish_backward(g: Expr, x: Expr) -> Expr:
    t = tanh(_softplus(x))
    return g * (t + x * logistic(x) * (1 - t * t))


def _softplus(x: Expr) -> Expr:
    return maximum(x, 0) + log1p(exp(-absolute(x)))


@pointwise(aten.softplus)
def softplus(x: Expr, beta: Term = 1, limit: Term = 20) -> Expr:
    z = x * beta
    return where(z > limit, x, log1p(exp(z)) / beta)


@pointwise(aten.softplus_backward, arity=2)
def softplus_backward(g: Expr, x: Expr, beta: Term, limit: Term) -> Expr:
    z = x * beta
    return where(z > limit, g, g * logistic(z))


@pointwise(aten.hardsigmoid)
def hardsigmoid(x: Expr) -> Expr:
    return minimum(maximum(x + 3, 0), 6) / 6


@pointwise(aten.hardsigmoid_backward, arity=2)
def hardsigmoid_backward(g: Expr, x: Expr) -> Expr:
    return where((x > -3) & (x < 3), g / 6, 0)


@pointwise(aten.hardswish)
def hardswish(x: Expr) -> Expr:
    return x * minimum(maximum(x + 3, 0), 6) / 6


@pointwise(aten.hardswish_backward, arity=2)
def hardswish_backward(g: Expr, x: Expr) -> Expr:
    return where(x <= -3, 0, where(x < 3, g * (x / 3 + 0.5), g))


@pointwise(aten.hardshrink)
def hardshrink(x: Expr, lambd: Term = 0.5) -> Expr:
    return shrink_backward(x, x, lambd)


@pointwise(aten.hardshrink_backward, aten.softshrink_backward, arity=2)
def shrink_backward(g: Expr, x: Expr, lambd: Term) -> Expr:
    return where((x >= -lambd) & (x <= lambd), 0, g)


@pointwise(aten.softshrink)
def softshrink(x: Expr, lambd: Term = 0.5) -> Expr:
    return where(x > lambd, x - lambd, where(x < -lambd, x + lambd, where(is_nan(x), x, 0)))


@pointwise(aten.sigmoid_backward, arity=2)
def sigmoid_backward(g: Expr, y: Expr) -> Expr:
    return g * conjugate((1 - y) * y)


@pointwise(aten.tanh_backward, arity=2)
def tanh_backward(g: Expr, y: Expr) -> Expr:
    return g * conjugate(1 - y * y)


def _halves(x: Instruction, dim: int) -> tuple[Instruction, Instruction]:
    size = x.dims[dim]
    return slice_dim(x, dim, 0, size // 2), slice_dim(x, dim, size // 2, size)
