"""Ops of which PyTorch judges the values of an argument, such as the weights of draws: at the call
if they came from the CPU, else when they have been computed (conditions.py)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torch_hlo.pytorch.operators import OpOverload

from ..record import Handler, HloTensor, aten, call, checks, conditions, handles, recording
from ..record.meta import numel


def _judging(
    op: OpOverload,
    position: int,
    wrong: Callable[[float, float], str],
    computed: bool = True,
) -> Handler:
    """Handler of an op that is an error if `wrong(lowest, highest)` says so of the elements of the
    argument at `position`. Both are nan where an element is. `computed`: not only of elements that
    came from the CPU."""
    record = recording.recorder(op)

    def run(args: tuple, kwargs: dict) -> torch.Tensor:
        result = record(args, kwargs)
        values = args[position]
        if type(values) is not HloTensor or not numel(values._meta.size):
            return result
        if computed or conditions.from_cpu(values._storage.value):

            def check(found: torch.Tensor) -> None:
                words = wrong(*found.tolist())
                if words:
                    raise RuntimeError(words)

            ends = call(aten.stack.default, list(call(aten.aminmax.default, values)))
            conditions.expect(ends, check)
        return result

    return run


def _probabilities(low: float, high: float) -> str:
    if 0 <= low and high <= 1:
        return ""
    return f"Expected p_in >= 0 && p_in <= 1 to be true, but p_in is from {low} to {high}."


def _deviations(low: float, high: float) -> str:
    return "" if low >= 0 else "normal expects all elements of std >= 0.0"


def _between_0_and_1(low: float, high: float) -> str:
    return "" if 0 <= low and high <= 1 else "all elements of input should be between 0 and 1"


for _op, _position, _wrong, _computed in (
    (aten.bernoulli.default, 0, _probabilities, True),
    (aten.bernoulli.Tensor, 1, _probabilities, True),
    (aten.normal.Tensor_Tensor, 1, _deviations, True),
    (aten.normal.float_Tensor, 1, _deviations, True),
    # It is in the middle of training steps, where it would take as long as the loss itself.
    (aten.binary_cross_entropy.default, 0, _between_0_and_1, False),
):
    handles(_op)(_judging(_op, _position, _wrong, _computed))


@handles(aten.bernoulli.out)
def bernoulli_out(args: tuple, kwargs: dict) -> torch.Tensor:
    """As PyTorch does it: in place, so `out` may have any dtype."""
    out = kwargs["out"]
    if type(out) is not HloTensor:
        checks.admit_target(out, args)
    p = checks.admit(args[0])
    call(aten.resize_.default, out, list(p.shape))
    return call(aten.bernoulli_.Tensor, out, p, generator=kwargs.get("generator"))


_WHOLE = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_record_histc = recording.recorder(aten.histc.default)


@handles(aten.histc.default)
def histc(args: tuple, kwargs: dict) -> HloTensor:
    """`aten.histc(x, bins, min, max)`: without a range it is that of the elements. Whole numbers
    are counted, too, as on a GPU: routers of experts do."""
    x = args[0]
    if type(x) is HloTensor and x.dtype in _WHOLE:
        found = histc((call(aten._to_copy.default, x, dtype=torch.float32), *args[1:]), kwargs)
        return call(aten._to_copy.default, found, dtype=x.dtype)
    if (*args, *(100, 0, 0)[len(args) - 1 :])[2:] == (0, 0) and not kwargs:
        return _histc_of_all(args, kwargs)
    return _record_histc(args, kwargs)


def _infinite(low: float, high: float) -> str:
    finite = math.isfinite(low) and math.isfinite(high)
    return "" if finite else f"torch.histc: range of [{low:g}, {high:g}] is not finite"


_histc_of_all = _judging(aten.histc.default, 0, _infinite)
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
