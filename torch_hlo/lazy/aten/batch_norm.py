"""Batch norm, which writes to its running statistics without saying so in its schema, and observers
of rows, which give theirs a size."""

import torch

from ..record import aten, call, handles, inference, meta as metas
from .mutation import assign, mutator
from .strides import resize

# ---- mutation that the schema does not declare


@handles(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def native_batch_norm(args: tuple, kwargs: dict):
    x, weight, bias, mean, var, training, momentum, eps = args
    if mean is None:
        return call(
            aten._native_batch_norm_legit.no_stats,
            x,
            weight,
            bias,
            training,
            momentum,
            eps,
        )
    if not training:
        return call(
            aten._native_batch_norm_legit_no_training.default,
            x,
            weight,
            bias,
            mean,
            var,
            momentum,
            eps,
        )
    results = call(aten._native_batch_norm_legit_functional.default, *args)
    assign(mean, results[3])
    assign(var, results[4])
    return results[:3]


@handles(aten.native_batch_norm.out, aten._native_batch_norm_legit.out)
def native_batch_norm_out(args: tuple, kwargs: dict) -> tuple[torch.Tensor, ...]:
    outs = tuple(kwargs[name] for name in ("out", "save_mean", "save_invstd"))
    for target, value in zip(outs, native_batch_norm(args, {})):
        if target._meta.size != value._meta.size:  # the statistics, which are empty in evaluation
            resize(target, value._meta.size)
        assign(target, value)
    return outs


def _eval_batch_norm_metas(x, weight, bias, mean, var, momentum, eps):
    # PyTorch's meta kernel gives sizes to the statistics that the kernels leave empty.
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    empty = metas.contiguous((0,), dtype)
    return [metas.dense(x._meta), empty, empty]


inference.INFER[aten._native_batch_norm_legit_no_training.default] = _eval_batch_norm_metas


_observe = mutator(aten._fused_moving_avg_obs_fq_helper.default)


@handles(aten._fused_moving_avg_obs_fq_helper.default)
def observed(args: tuple, kwargs: dict) -> object:
    """A fresh observer of rows has empty arrays for what it sees."""
    x, _, _, *state = args[:7]
    if any(args[11:12]) and not state[0].numel():
        for array, value in zip(state, (torch.inf, -torch.inf, 1, 0), strict=True):
            array.resize_(x.shape[args[10]]).fill_(value)
    return _observe(args, kwargs)
