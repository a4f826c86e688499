"""Optimizer steps: `_foreach_*` ops tensor by tensor, and the fused Adam, AdamW, SGD and
Adagrad."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
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


def _foreach(overload: OpOverload, *args: Any, **kwargs: Any) -> list[Instruction]:
    """Each argument is a list (one element per tensor) or the same for all tensors."""
    fn = LOWERINGS[overload]
    shapes = expected_shapes()
    count = len(shapes)
    results = []
    for i in range(count):
        each = [a[i] if isinstance(a, (list, tuple)) else a for a in args]
        results.append(nested(shapes[i : i + 1], fn, *each, **kwargs))
    return results


def _fused_terms(
    overload: OpOverload,
    xs: Sequence[Instruction],
    a: Sequence[Instruction],
    b: Sequence[Instruction],
    scalars: Operand | Sequence[Scalar] = 1,
) -> Sequence[Instruction]:
    """addcmul and addcdiv: the fourth argument is a scalar, a list of them, or a vector holding one
    per tensor."""
    if isinstance(scalars, Instruction):
        values = [Weak(select_dim(scalars, 0, i)) for i in range(len(xs))]
    else:
        values = scalars if isinstance(scalars, (list, tuple)) else [scalars] * len(xs)
    fn = LOWERINGS[overload]
    return [
        nested((s,), fn, *t, value=v)
        for s, t, v in zip(expected_shapes(), zip(xs, a, b), values, strict=True)
    ]


for _name, _overload in _ELEMENTWISE.items():
    _packet = getattr(aten, f"_foreach_{_name}", None)
    if _packet is not None:
        lowers(_packet)(
            partial(_fused_terms if _name in ("addcmul", "addcdiv") else _foreach, _overload)
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

    def is_on(self, name: str) -> bool:
        """Whether an option is true, or a number may be another than zero."""
        value = self._numbers[name]
        return not is_number(value) or value != 0


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

    def kept(self, new: Expr | None, old: Instruction | None) -> Instruction | None:
        """The new value in the old one's dtype, or the old value when a gradient was infinite; the
        old one where there is no new one."""
        if new is None:
            return old
        value = new.cast(old.dtype)
        if self.found_inf is None:
            return value.x
        return where(scalar(self.found_inf, "f32").eq(1), Expr(old), value).x


State = Sequence[Instruction | None]  # of one parameter: an element of each further list


def _fused(
    step: Callable[[Expr, Expr, State, Scalars], Sequence[Expr | None]],
    params: Sequence[Instruction],
    grads: Sequence[Instruction],
    *lists: Sequence[Instruction],
    maximize: bool,
    grad_scale: Instruction | None = None,
    found_inf: Instruction | None = None,
    **numbers: Any,
) -> list[list[Instruction]]:
    """`step(parameter, gradient, state, scalars)` for each parameter: its new value, and those of
    the state."""
    s = Scalars(**numbers)
    scaling = _Scaling(maximize, grad_scale, found_inf)
    rows = []
    states = (some or [None] * len(params) for some in lists)
    for param, grad, *state in zip(params, grads, *states, strict=True):
        written, g = scaling.ready(grad)
        p, *others = step(compute(param), g, state, s)
        rows.append((scaling.kept(p, param), written, *map(scaling.kept, others, state)))
    columns = [[x for x in c if x is not None] for c in zip(*rows, strict=True)]
    if sum(map(len, columns)) < len(expected_shapes()):  # the counters, as they are
        columns.append(list(lists[-1]))
    return columns


def _decayed(p: Expr, g: Expr, s: Scalars) -> Expr:
    return g + _times(p, s.weight_decay) if s.is_on("weight_decay") else g


def _adam_step(p: Expr, g: Expr, state: State, s: Scalars) -> Sequence[Expr | None]:
    return _moments(p, _decayed(p, g, s), state, s)


def _adamw_step(p: Expr, g: Expr, state: State, s: Scalars) -> Sequence[Expr | None]:
    if s.is_on("weight_decay"):
        p = _times(p, 1 - s.lr * s.weight_decay)
    return _moments(p, g, state, s)


def _moments(p: Expr, g: Expr, state: State, s: Scalars) -> Sequence[Expr | None]:
    """New (parameter, exp_avg, exp_avg_sq, max_exp_avg_sq)."""
    *moments, largest, step = state
    m, v = map(compute, moments)
    m += _times(g - m, 1 - s.beta1)
    v = _times(v, s.beta2) + _times(g * g, 1 - s.beta2)
    count = scalar(step, "f64")
    correction1, correction2 = (1 - power(beta, count) for beta in (s.beta1, s.beta2))
    second = v
    vmax = None
    if s.is_on("amsgrad"):
        vmax = second = maximum(compute(largest), v)
    root = sqrt(second) / second.like(sqrt(correction2).cast(second.dtype)) + s.eps.cast(
        second.dtype
    )
    return p - _times(m / root, s.lr / correction1), m, v, vmax


def _sgd_step(p: Expr, g: Expr, state: State, s: Scalars) -> Sequence[Expr | None]:
    (momentum,) = state
    g = _decayed(p, g, s)
    buffer = None
    if momentum is not None and s.is_on("momentum"):
        buffer = (
            g
            if s.is_on("is_first_step")
            else _times(compute(momentum), s.momentum) + _times(g, 1 - s.dampening)
        )
        g = g + _times(buffer, s.momentum) if s.is_on("nesterov") else buffer
    return p - _times(g, s.lr), buffer


def _adagrad_step(p: Expr, g: Expr, state: State, s: Scalars) -> Sequence[Expr | None]:
    total, step = state
    g = _decayed(p, g, s)
    rate = s.lr / (1 + (scalar(step, "f64") - 1) * s.lr_decay)
    squares = compute(total) + g * g
    return p - _times(g / (sqrt(squares) + s.eps.cast(squares.dtype)), rate), squares


lowers(aten._fused_adam)(partial(_fused, _adam_step))
lowers(aten._fused_adamw)(partial(_fused, _adamw_step))
lowers(aten._fused_sgd)(partial(_fused, _sgd_step))
lowers(aten._fused_adagrad)(partial(_fused, _adagrad_step))
