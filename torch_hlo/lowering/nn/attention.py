"""Scaled dot-product attention as one op, forward and backward, in f32 inside.

Forward keeps the row log-sum-exp; backward recomputes the probabilities from it. Rows with every
key masked give 0. Both are calls of a computation marked as attention
(compiler/attention/attention.py), which the compiler may replace by a kernel without an array of
scores. attention_ops.py has PyTorch's operators.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    Instruction,
    Size,
)

from ..core import (
    Expr,
    Operand,
    Scalar,
    Term,
    broadcast_to,
    compute,
    exp,
    is_number,
    log,
    named_call,
    on_diagonal,
    promote,
    reshape,
    rsqrt,
    scalar,
    where,
)
from ..linalg.matmul import dot
from ..random.distributions import keep_mask
from ..reduction.reduce import fold, keep
from ..shape.view import sum_to


def _product(a: Expr | Instruction, b: Expr | Instruction, lhs: int, rhs: int) -> Expr:
    """Batched product contracting dimension `lhs` of a with `rhs` of b (both counted from the
    end)."""
    rank = a.rank
    batch = tuple(range(rank - 2))
    return dot(a, b, (rank + lhs,), (rank + rhs,), batch, batch)


def _match_heads(x: Instruction, query: Instruction) -> Instruction:
    """Grouped-query attention: repeat each key/value head for its group of query heads."""
    heads = x.dims[-3]
    wanted = query.dims[-3]
    if x.rank < 3 or heads == wanted:
        return x
    *batch, _, length, size = x.dims
    grouped = reshape(x, (*batch, heads, 1, length, size))
    return reshape(
        broadcast_to(grouped, (*batch, heads, wanted // heads, length, size)),
        (*batch, wanted, length, size),
    )


def _ungroup(grad: Expr, like: Instruction) -> Expr:
    """Gradient of _match_heads."""
    heads = like.dims[-3]
    if like.rank < 3 or grad.dims[-3] == heads:
        return grad
    *batch, wanted, length, size = grad.dims
    return fold(grad.reshape((*batch, heads, wanted // heads, length, size)), (-3,))


def _scale(scale: Scalar | None, query: Instruction, dtype: str) -> Term:
    """The factor of the scores: given (a number of any kind), or 1/sqrt(head size)."""
    if scale is not None:
        return scale
    size = query.dims[-1]
    return 1 / math.sqrt(size) if isinstance(size, int) else rsqrt(scalar(size, dtype))


def _scores(
    query: Instruction,
    key: Instruction,
    bias: Instruction | None,
    is_causal: bool,
    scale: float | None,
) -> Expr:
    s = _product(query, key, -1, -1)
    s *= _scale(scale, query, s.dtype)
    if bias is not None:
        if bias.dtype == "pred":
            s = where(Expr(broadcast_to(bias, s.dims)), s, -math.inf)
        else:
            s += s.like(bias)
    if is_causal:
        s = where(Expr(on_diagonal(s.dims, 0, "LE")), s, -math.inf)
    return s


def _factors(
    query: Instruction,
    key: Instruction,
    probability: float,
    seed: Operand | None,
    offset: Operand | None,
) -> list[Instruction]:
    """Dropout of the weights as numbers to multiply them with: [0 or 1 / (1 - p), [batch…, rows,
    columns]], or [] without dropout."""
    if is_number(probability) and probability == 0:
        return []
    mask = keep_mask((*query.dims[:-1], key.dims[-2]), probability, (seed, offset))
    wide = Expr(promote.full(1.0, promote.compute_type(query.dtype), mask.dims))
    return [where(mask, wide / (1 - wide.like(probability)), 0).x]


def _composite(
    kind: str,
    body: Callable,
    operands: list[Instruction],
    is_causal: bool,
    scale: float | None,
    plain: bool,
    **more: Any,
) -> list[Instruction]:
    """The results of `body(*operands)`, a list. As a call that says what it is when it is `plain`
    attention with a scale known now."""
    size = operands[1].dims[-1]  # of q and k
    if scale is None and isinstance(size, int):
        scale = 1 / math.sqrt(size)
    if not plain or not is_number(scale):
        return body(*operands)
    config = json.dumps(
        {
            "attention": kind,
            "causal": bool(is_causal),
            "scale": float(scale),
            **{n: v for n, v in more.items() if v},
        },
        separators=(",", ":"),
    )
    return named_call("attention", config, operands, body)


def _is_plain(
    query: Instruction,
    key: Instruction,
    value: Instruction,
    bias: Instruction | None,
) -> bool:
    """Whether this is attention as the compiler knows it: the same batch for all but the heads of
    key and value."""
    q, k, v = (x.dims for x in (query, key, value))
    return (
        len(q) == len(k) == len(v)
        and q[:-3] == k[:-3]
        and k[:-1] == v[:-1]
        and (bias is None or bias.rank <= len(q))
    )


def attention(
    query: Instruction,
    key: Instruction,
    value: Instruction,
    bias: Instruction | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    seed: Operand | None = None,
    offset: Operand | None = None,
) -> list[Instruction]:
    """[the output, the log-sum-exp of every row]."""

    def body(
        query: Instruction,
        key: Instruction,
        value: Instruction,
        *more: Any,
    ) -> list[Instruction]:
        k = _match_heads(key, query)
        v = _match_heads(value, query)
        s = _scores(query, k, None if bias is None else more[0], is_causal, scale)
        last = (-1,)
        top = fold(s, last, "maximum")
        top = where(top.eq(-math.inf), 0, top)
        weights = exp(s - keep(top, s.dims, last))
        total = fold(weights, last)
        total = where(total.eq(0), 1, total)
        p = weights / keep(total, s.dims, last)
        if factors:
            p *= Expr(more[-1])
        out = _product(p.cast(v.dtype), v, -1, -2)
        return [out.x, (top + log(total)).x]

    factors = _factors(query, key, dropout_p, seed, offset)
    operands = [query, key, value, *([] if bias is None else [bias]), *factors]
    return _composite(
        "forward",
        body,
        operands,
        is_causal,
        scale,
        _is_plain(query, key, value, bias),
        factors=bool(factors),
    )


def attention_backward(
    grad: Instruction,
    query: Instruction,
    key: Instruction,
    value: Instruction,
    bias: Instruction | None,
    out: Instruction,
    logsumexp: Instruction,
    wants_bias: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    seed: Operand | None = None,
    offset: Operand | None = None,
) -> list[Instruction]:
    """The gradients of [query, key, value, the bias if it is wanted]."""
    factors = _factors(query, key, dropout_p, seed, offset)
    gradients = _Gradients(bias, wants_bias, bool(factors), is_causal, scale)
    more = [*([] if bias is None else [bias]), *factors]
    return gradients.of(grad, query, key, value, out, logsumexp, *more)


@frozen
class _Gradients:
    """The backward pass of one attention. `more` operands of its methods: the bias, if there is
    one, and dropout's factors."""

    bias: Instruction | None
    wants_bias: bool
    dropout: bool
    is_causal: bool
    scale: float | None

    def of(self, *operands: Instruction) -> list[Instruction]:
        """[dq, dk, dv, the bias's if it is wanted]."""
        _, query, key, value, *_ = operands
        bias = self.bias
        same_heads = key.dims[-3] == query.dims[-3]
        dims: Sequence[Size] = (0, 0)
        if bias is not None and self.wants_bias:
            dims = (1,) * (query.rank - bias.rank) + bias.dims
        return _composite(
            "backward",
            self._plain if same_heads else self._grouped,
            list(operands),
            self.is_causal,
            self.scale,
            _is_plain(query, key, value, bias),
            factors=self.dropout,
            bias_gradient=[n != 1 for n in dims[:-2]],
        )

    def _plain(
        self,
        grad: Instruction,
        query: Instruction,
        k: Instruction,
        v: Instruction,
        out: Instruction,
        logsumexp: Instruction,
        *more: Instruction,
    ) -> list[Instruction]:
        bias = self.bias
        s = _scores(query, k, None if bias is None else more[0], self.is_causal, self.scale)
        last = (-1,)
        p = exp(s - keep(Expr(logsumexp).cast(s.dtype), s.dims, last))
        used = p * Expr(more[-1]) if self.dropout else p
        g = compute(grad)
        narrow = v.dtype
        dv = _product(used.cast(narrow), grad, -2, -2)
        dp = _product(grad, v, -1, -1)
        if self.dropout:
            dp *= Expr(more[-1])
        delta = fold(g * Expr(out).cast(g.dtype), last)
        ds = p * (dp - keep(delta, p.dims, last))
        dq = _product(ds.cast(narrow), k, -1, -2)
        dk = _product(ds.cast(narrow), query, -2, -2)
        dq, dk = (x * _scale(self.scale, query, x.dtype) for x in (dq, dk))
        found = [dq.x, dk.x, dv.x]
        return [*found, sum_to(ds.x, bias.dims)] if self.wants_bias else found

    def _grouped(
        self,
        grad: Instruction,
        query: Instruction,
        key: Instruction,
        value: Instruction,
        *rest: Instruction,
    ) -> list[Instruction]:
        """For compilers without a kernel for heads that share keys."""
        k = _match_heads(key, query)
        v = _match_heads(value, query)
        dq, dk, dv, *more = self.of(grad, query, k, v, *rest)
        return [dq, _ungroup(Expr(dk), key).x, _ungroup(Expr(dv), value).x, *more]
