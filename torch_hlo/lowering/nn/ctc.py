"""Connectionist temporal classification (Graves et al. 2006): the recursion over time as one loop,
and its gradient; lazy/ops/ctc.py does the rest in ordinary ops.

alpha[t, n, s] = labels[t, n, s] + log(sum of exp(alpha[t - 1, n, s - k]), k = 0, 1, and 2 where
`skip[n, s]`): how likely the paths are that have arrived at place s of the labels, blanks between
them, at time t. The first can only be at places 0 and 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_hlo.hlo.ir import Instruction

from ..core import (
    Expr,
    add_dim,
    concatenate,
    exp,
    log,
    lowers,
    maximum,
    promote,
    scan_loop,
    slice_dim,
    where,
)

_library = torch.library.Library("torch_hlo", "FRAGMENT")
# log-probabilities of the labels [time, batch, places], skip [batch, places] -> alpha, of the
# labels' shape
_library.define("ctc(Tensor labels, Tensor skip) -> Tensor")
# gradient of alpha -> gradient of the labels
_library.define("ctc_backward(Tensor grad, Tensor labels, Tensor skip, Tensor alpha) -> Tensor")
CTC = torch.ops.torch_hlo.ctc.default
CTC_BACKWARD = torch.ops.torch_hlo.ctc_backward.default
_library.impl("ctc", lambda labels, skip: labels.new_empty(labels.shape), "Meta")
_library.impl(
    "ctc_backward",
    lambda grad, labels, skip, alpha: labels.new_empty(labels.shape),
    "Meta",
)


def _moved(x: Expr, places: int, fill: float) -> Expr:
    """x[:, s - places], `fill` where there is none."""
    rows, count = x.dims
    size = min(abs(places), count)
    pad = promote.full(fill, x.dtype, (rows, size))
    parts = (
        [pad, slice_dim(x.x, 1, 0, count - size)]
        if places > 0
        else [slice_dim(x.x, 1, size, count), pad]
    )
    return Expr(concatenate(parts, 1))


def _sources(before: Expr, skip: Expr) -> list[Expr]:
    """What `before` holds at the places that each is reached from."""
    return [
        before,
        _moved(before, 1, -math.inf),
        where(skip, _moved(before, 2, -math.inf), -math.inf),
    ]


def _start(labels: Instruction) -> Instruction:
    _, batch, places = labels.dims
    zero = promote.full(0, labels.dtype, (batch, 1))
    return concatenate([zero, promote.full(-math.inf, labels.dtype, (batch, places - 1))], 1)


@lowers(CTC)
def ctc(labels: Instruction, skip: Instruction) -> Instruction:
    def step(
        carry: Sequence[Instruction],
        x: Sequence[Instruction],
        rest: Sequence[Instruction],
    ) -> tuple[list[Instruction], ...]:
        sources = _sources(Expr(carry[0]), Expr(rest[0]))
        most = maximum(maximum(sources[0], sources[1]), sources[2])
        most = where(most.eq(-math.inf), 0.0, most)
        alpha = log(sum(exp(s - most) for s in sources)) + most + Expr(x[0])
        return [alpha.x], [alpha.x]

    return scan_loop(step, [_start(labels)], [labels], [skip], labels.dims[0])[1][0]


@lowers(CTC_BACKWARD)
def ctc_backward(
    grad: Instruction,
    labels: Instruction,
    skip: Instruction,
    alpha: Instruction,
) -> Instruction:
    length = labels.dims[0]
    before = concatenate([add_dim(_start(labels), 0), slice_dim(alpha, 0, 0, length - 1)], 0)

    def step(
        carry: Sequence[Instruction],
        x: Sequence[Instruction],
        rest: Sequence[Instruction],
    ) -> tuple[list[Instruction], ...]:
        grad, labels, alpha, before = map(Expr, x)
        total = grad + Expr(carry[0])
        reached = alpha.ne(-math.inf)
        arrived = where(reached, alpha - labels, 0.0)
        shares = [
            where(reached, total * exp(s - arrived), 0.0) for s in _sources(before, Expr(rest[0]))
        ]
        back = shares[0] + _moved(shares[1], -1, 0.0) + _moved(shares[2], -2, 0.0)
        return [back.x], [total.x]

    first = promote.full(0, labels.dtype, labels.dims[1:])
    return scan_loop(step, [first], [grad, labels, alpha, before], [skip], length, True)[1][0]
