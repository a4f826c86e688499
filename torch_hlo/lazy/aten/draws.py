"""Draws whose weights PyTorch judges: at the call if they came from the CPU, else when they have
been computed (conditions.py)."""

from __future__ import annotations

import math

import torch

from torch_hlo.lazy.record import conditions, recording
from torch_hlo.lazy.record.handlers import call, handles
from torch_hlo.lazy.record.meta import aten, numel
from torch_hlo.lazy.record.tensor import HloTensor

_record = recording.recorder(aten.multinomial.default)


@handles(aten.multinomial.default)
def multinomial(args: tuple, kwargs: dict) -> HloTensor:
    """`aten.multinomial(weights, samples, replacement)`."""
    result = _record(args, kwargs)
    weights = args[0]
    if not numel(weights._meta.size):
        return result
    samples = args[1] if len(args) > 1 else kwargs["num_samples"]
    replacement = args[2] if len(args) > 2 else kwargs.get("replacement", False)
    low, high = call(aten.aminmax.default, weights)
    total = call(aten.amin.default, call(aten.sum.dim_IntList, weights, [-1]))
    one_by_one = replacement and samples > 1

    def check(found: torch.Tensor) -> None:
        _judge(*found.tolist(), one_by_one)

    conditions.expect(call(aten.stack.default, [low, high, total]), check)
    return result


def _judge(low: float, high: float, total: float, one_by_one: bool) -> None:
    """In the words of the CPU's kernels: the one for several draws with replacement has others."""
    if not (low >= 0 and high < math.inf):
        raise RuntimeError(
            "probability tensor contains either `inf`, `nan` or element < 0"
            if not one_by_one
            else "invalid multinomial distribution (encountering probability entry < 0)"
            if not low >= 0
            else "invalid multinomial distribution (encountering probability entry = infinity or"
            " NaN)"
        )
    if total <= 0:
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
