"""Optimizer steps: `_foreach_*` ops tensor by tensor, and the fused Adam, AdamW, SGD and
Adagrad."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction
from torch_hlo.pytorch.operators import OpOverload

from ..core import (
    LOWERINGS,
    Expr,
    Operand,
    Scalar,
    Weak,
    absolute,
    aten,
    compute,
    expected,
    expected_shapes,
    is_number,
    lowers,
    maximum,
    nested,
    power,
    promote,
    reshape,
    scalar,
    select_dim,
    sqrt,
    where,
)
from ..reduction.reduce import fold, result, vector_norm

# foreach op -> the overload whose lowering runs on each tensor.
_ELEMENTWISE = {
    **{
        name: getattr(aten, name).default
        for name in (
            "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p"
            " log2 neg reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc maximum"
            " minimum zero clone copy mm"
        ).split()
    },
    "add": aten.add.Tensor,
    "sub": aten.sub.Tensor,
    "mul": aten.mul.Tensor,
    "div": aten.div.Tensor,
    "pow": aten.pow.Tensor_Tensor,
    "clamp_min": aten.clamp_min.Tensor,
    "clamp_max": aten.clamp_max.Tensor,
    "lerp": aten.lerp.Tensor,
    "addcmul": aten.addcmul.default,
    "addcdiv": aten.addcdiv.default,
    "max": aten.max.default,
}


def _foreach(overload: OpOverload) -> Callable:
    """Each argument is a list (one element per tensor) or the same for all tensors."""

    def lowering(*args: Any, **kwargs: Any) -> list[Instruction]:
        fn = LOWERINGS[overload]
        shapes = expected_shapes()
        count = len(shapes)
        results = []
        for i in range(count):
            each = [a[i] if isinstance(a, (list, tuple)) else a for a in args]
            results.append(nested(shapes[i : i + 1], fn, *each, **kwargs))
        return results

    return lowering


def _fused_terms(overload: OpOverload) -> Callable:
    """addcmul and addcdiv: the fourth argument is a scalar, a list of them, or a vector holding one
    per tensor."""
    plain = _foreach(overload)

    def lowering(
        xs: Sequence[Instruction],
        a: Sequence[Instruction],
        b: Sequence[Instruction],
        scalars: Operand | Sequence[Scalar] = 1,
    ) -> Sequence[Instruction]:
        if isinstance(scalars, Instruction):
            values = [Weak(select_dim(scalars, 0, i)) for i in range(len(xs))]
        else:
            values = scalars if isinstance(scalars, (list, tuple)) else [scalars] * len(xs)
        fn = LOWERINGS[overload]
        return [
            nested((s,), fn, *t, value=v)
            for s, t, v in zip(expected_shapes(), zip(xs, a, b), values, strict=True)
        ]

    lowering.__name__ = plain.__name__
    return lowering


for _name, _overload in _ELEMENTWISE.items():
    _packet = getattr(aten, f"_foreach_{_name}", None)
    if _packet is not None:
        lowers(_packet)(
            _fused_terms(_overload) if _name in ("addcmul", "addcdiv") else _foreach(_overload)
        )


@lowers(aten._foreach_norm)
def foreach_norm(
    xs: Sequence[Instruction],
    ord: Scalar = 2,
    dtype: torch.dtype | None = None,
) -> Sequence[Instruction]:
    shapes = expected_shapes()
    return [nested((s,), vector_norm, x, ord, dtype=dtype) for x, s in zip(xs, shapes, strict=True)]


@lowers(aten._foreach_powsum)
def foreach_powsum(
    xs: Sequence[Instruction],
    ord: Scalar = 2,
    dtype: torch.dtype | None = None,
) -> Sequence[Instruction]:
    def one(x: Instruction) -> Instruction:
        value = compute(promote.cast(x, expected().dtype))
        return result(fold(power(absolute(value), value.like(ord)), range(value.rank)))

    return [nested((s,), one, x) for x, s in zip(xs, expected_shapes(), strict=True)]


# GradScaler: found_inf, inv_scale, the scale and its tracker have one element.
@lowers(aten._amp_foreach_non_finite_check_and_unscale)
def amp_unscale(
    grads: Sequence[Instruction],
    found_inf: Instruction,
    inv_scale: Instruction,
) -> tuple[list[Instruction], Instruction]:
    """([gradients * inv_scale], found_inf, or 1 if any gradient was infinite or nan)."""
    new = []
    flag = scalar(found_inf, found_inf.dtype)
    for grad in grads:
        g = compute(grad)
        bad = fold(~(absolute(g) < math.inf), range(grad.rank), "or")
        flag = where(bad, flag.like(1), flag)
        scale = scalar(inv_scale, g.dtype)
        # As the kernels of PyTorch: a scale of one leaves infinities and nans as they are.
        new.append(where(g.like(scale).eq(1), g, _times(g, scale)).cast(grad.dtype).x)
    return new, reshape(flag.x, found_inf.dims)


@lowers(aten._amp_update_scale)
def amp_update_scale(
    scale: Instruction,
    growth_tracker: Instruction,
    found_inf: Instruction,
    scale_growth_factor: float,
    scale_backoff_factor: float,
    growth_interval: int,
) -> tuple[Instruction, Instruction]:
    """(scale, growth_tracker) after a step: smaller if it met an infinity, larger after
    `growth_interval` steps that did not."""
    old = scalar(scale, "f64")
    tracker = scalar(growth_tracker, growth_tracker.dtype)
    s = Scalars(growth=scale_growth_factor, backoff=scale_backoff_factor)
    bad = scalar(found_inf, "f32").ne(0)
    count = tracker + 1
    due = count.eq(tracker.like(growth_interval))
    grown = (old * s.growth).cast(scale.dtype)
    kept = scalar(scale, scale.dtype)
    grown = where(due & (absolute(grown) < math.inf), grown, kept)
    new = where(bad, (old * s.backoff).cast(scale.dtype), grown)
    return reshape(new.x, scale.dims), reshape(
        where(bad | due, tracker.like(0), count).x, growth_tracker.dims
    )


# Fused steps. Scalars are combined in f64, as the CPU kernels do, then rounded.
class Scalars:
    """The numbers of a step (Python, Weak, or a learning-rate tensor) as rank-0 f64 expressions."""

    def __init__(self, **numbers: Any) -> None:
        self._numbers = numbers

    def __getattr__(self, name: str) -> Expr:
        return scalar(self._numbers[name], "f64")

    def is_zero(self, name: str) -> bool:
        value = self._numbers[name]
        return is_number(value) and value == 0


def _times(x: Expr, scalar: Expr) -> Expr:
    return x * x.like(scalar.cast(x.dtype))


@frozen
class _Scaling:
    """What GradScaler has to do with a step, and the direction."""

    maximize: bool
    grad_scale: Instruction | None
    found_inf: Instruction | None

    def ready(self, grad: Instruction) -> tuple[Instruction, Expr]:
        """(gradient as written back, gradient to descend along)."""
        g = compute(grad)
        written = grad
        if self.grad_scale is not None:
            g /= scalar(self.grad_scale, g.dtype)
            written = self.kept(g, grad)
        return written, -g if self.maximize else g

    def kept(self, new: Expr, old: Instruction) -> Instruction:
        """The new value in the old one's dtype, or the old value when a gradient was infinite."""
        value = new.cast(old.dtype)
        if self.found_inf is None:
            return value.x
        return where(scalar(self.found_inf, "f32").eq(1), Expr(old), value).x


def _adam_step(
    p: Expr,
    g: Expr,
    m: Expr,
    v: Expr,
    vmax: Expr,
    step: Instruction,
    s: Scalars,
    decoupled: bool,
    amsgrad: bool,
) -> tuple[Expr, ...]:
    """New (parameter, exp_avg, exp_avg_sq, max_exp_avg_sq)."""
    if not s.is_zero("weight_decay"):
        if decoupled:
            p = _times(p, 1 - s.lr * s.weight_decay)
        else:
            g += _times(p, s.weight_decay)
    m += _times(g - m, 1 - s.beta1)
    v = _times(v, s.beta2) + _times(g * g, 1 - s.beta2)
    count = scalar(step, "f64")
    correction1, correction2 = (1 - power(beta, count) for beta in (s.beta1, s.beta2))
    second = v
    if amsgrad:
        vmax = second = maximum(vmax, v)
    root = sqrt(second) / second.like(sqrt(correction2).cast(second.dtype)) + s.eps.cast(
        second.dtype
    )
    return p - _times(m / root, s.lr / correction1), m, v, vmax


def _fused_adam(decoupled: bool) -> Callable:
    def lowering(
        params: Sequence[Instruction],
        grads: Sequence[Instruction],
        exp_avgs: Sequence[Instruction],
        exp_avg_sqs: Sequence[Instruction],
        max_exp_avg_sqs: Sequence[Instruction],
        steps: Sequence[Instruction],
        *,
        lr: Operand,
        beta1: Scalar,
        beta2: Scalar,
        weight_decay: Scalar,
        eps: Scalar,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Instruction | None = None,
        found_inf: Instruction | None = None,
    ) -> list[list[Instruction]]:
        s = Scalars(lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps)
        scaling = _Scaling(maximize, grad_scale, found_inf)
        rows = []
        for i, (p, grad, m, v, step) in enumerate(
            zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)
        ):
            largest = max_exp_avg_sqs[i] if amsgrad else v
            written, g = scaling.ready(grad)
            new = _adam_step(
                *(compute(t) if isinstance(t, Instruction) else t for t in (p, g, m, v, largest)),
                step,
                s,
                decoupled,
                amsgrad,
            )
            first, *others = map(scaling.kept, new, (p, m, v, largest))
            rows.append((first, written, *others))
        columns = [list(c) for c in zip(*rows, strict=True)]
        if not amsgrad:
            columns[4] = []
        return columns

    lowering.__name__ = "fused_adamw" if decoupled else "fused_adam"
    return lowering


lowers(aten._fused_adam)(_fused_adam(False))
lowers(aten._fused_adamw)(_fused_adam(True))


@lowers(aten._fused_sgd)
def fused_sgd(
    params: Sequence[Instruction],
    grads: Sequence[Instruction],
    momenta: Sequence[Instruction],
    *,
    weight_decay: float,
    momentum: float,
    lr: Operand,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Instruction | None = None,
    found_inf: Instruction | None = None,
) -> tuple[list[Instruction], list[Instruction], list[Instruction]]:
    s = Scalars(weight_decay=weight_decay, momentum=momentum, lr=lr, dampening=dampening)
    scaling = _Scaling(maximize, grad_scale, found_inf)
    new_params = []
    new_grads = []
    new_momenta = []
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        p = compute(param)
        written, g = scaling.ready(grad)
        new_grads.append(written)
        if not s.is_zero("weight_decay"):
            g += _times(p, s.weight_decay)
        if momenta and not s.is_zero("momentum"):
            buffer = (
                g
                if is_first_step
                else _times(compute(momenta[i]), s.momentum) + _times(g, 1 - s.dampening)
            )
            new_momenta.append(scaling.kept(buffer, momenta[i]))
            g = g + _times(buffer, s.momentum) if nesterov else buffer
        elif momenta:
            new_momenta.append(momenta[i])
        new_params.append(scaling.kept(p - _times(g, s.lr), param))
    return new_params, new_grads, new_momenta


@lowers(aten._fused_adagrad)
def fused_adagrad(
    params: Sequence[Instruction],
    grads: Sequence[Instruction],
    sums: Sequence[Instruction],
    steps: Sequence[Instruction],
    *,
    lr: Operand,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Instruction | None = None,
    found_inf: Instruction | None = None,
) -> tuple[list[Instruction], ...]:
    s = Scalars(lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps)
    scaling = _Scaling(maximize, grad_scale, found_inf)
    new_params = []
    new_grads = []
    new_sums = []
    for param, grad, total, step in zip(params, grads, sums, steps, strict=True):
        p = compute(param)
        written, g = scaling.ready(grad)
        new_grads.append(written)
        if not s.is_zero("weight_decay"):
            g += _times(p, s.weight_decay)
        count = scalar(step, "f64")
        rate = s.lr / (1 + (count - 1) * s.lr_decay)
        squares = compute(total) + g * g
        new_sums.append(scaling.kept(squares, total))
        new_params.append(
            scaling.kept(
                p - _times(g / (sqrt(squares) + s.eps.cast(squares.dtype)), rate),
                param,
            )
        )
    if len(expected_shapes()) == 3 * len(params):
        return new_params, new_grads, new_sums
    return new_params, new_grads, new_sums, list(steps)
