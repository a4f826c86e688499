"""The weights of an attention that is written out, as a graph says that it knows them: two ops, and
calls that are marked (compiler/attention/attention.py).

    weights, top, total = attention_weights(scores)           softmax along the last dimension
    weights = attention_weights_again(scores, top, total)     the same, from two numbers per row

top is the largest score of a row, total the logarithm of the sum of weights relative to it, both in
units of log 2. All is f32."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import torch
from torch import Tensor

from torch_hlo.hlo.ir import (
    Computation,
    Instruction,
    Instructions,
    instr,
    parameters_of,
    product,
    tuple_shape,
)

from ..core import Expr, exp, log, lowers, reshape
from ..reduction.reduce import fold, keep

_library = torch.library.Library("torch_hlo", "FRAGMENT")
_library.define("attention_weights(Tensor scores) -> (Tensor, Tensor, Tensor)")
_library.define("attention_weights_again(Tensor scores, Tensor top, Tensor total) -> Tensor")
WEIGHTS = torch.ops.torch_hlo.attention_weights.default
WEIGHTS_AGAIN = torch.ops.torch_hlo.attention_weights_again.default


@torch.library.register_fake("torch_hlo::attention_weights", lib=_library)
def _(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = scores.shape[:-1]
    return (
        scores.new_empty(scores.shape),
        scores.new_empty(rows),
        scores.new_empty(rows),
    )


@torch.library.register_fake("torch_hlo::attention_weights_again", lib=_library)
def _(scores: Tensor, top: Tensor, total: Tensor) -> Tensor:
    return scores.new_empty(scores.shape)


def _marked(
    kind: str,
    body: Callable[..., tuple[Expr, ...]],
    *operands: Instruction,
) -> Instruction:
    """A call that computes `body` and says what that is."""
    params = parameters_of(o.shape for o in operands)
    results = [r.x for r in body(*map(Expr, params))]
    root = (
        instr("tuple", results, tuple_shape(*(r.shape for r in results)))
        if len(results) > 1
        else results[0]
    )
    config = json.dumps({"attention": kind, "late": True}, separators=(",", ":"))
    meaning = Computation("attention_weights", params, root)
    return instr("call", operands, to_apply=meaning, backend_config=config)


def _flat(x: Instruction, kept: int) -> Instruction:
    """`x` with one batch dimension, as its products have it: views around a call would stay."""
    batch = x.dims[:-kept]
    rest = x.dims[-kept:]
    return reshape(x, (product(batch), *rest))


@lowers(WEIGHTS)
def weights(scores: Instruction) -> Instructions:
    def body(s: Expr) -> tuple[Expr, ...]:
        last = (-1,)
        top = fold(s, last, "maximum")
        powers = exp(s - keep(top, s.dims, last))
        total = fold(powers, last)
        in_bits = 1 / math.log(2)
        return (
            powers / keep(total, s.dims, last),
            top * in_bits,
            log(total) * in_bits,
        )

    call = _marked("weights", body, _flat(scores, 2))
    dims = scores.dims
    return tuple(
        reshape(instr("get-tuple-element", (call,), index=i), own)
        for i, own in enumerate((dims, dims[:-1], dims[:-1]))
    )


@lowers(WEIGHTS_AGAIN)
def weights_again(scores: Instruction, top: Instruction, total: Instruction) -> Instruction:
    def body(s: Expr, top: Expr, total: Expr) -> tuple[Expr, ...]:
        last = (-1,)
        relative = s * (1 / math.log(2)) - keep(top, s.dims, last) - keep(total, s.dims, last)
        return (exp(relative * math.log(2)),)

    call = _marked("weights again", body, _flat(scores, 2), _flat(top, 1), _flat(total, 1))
    return reshape(call, scores.dims)
