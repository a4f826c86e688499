"""Ops whose result or shape depends on values: they evaluate the graph and run on the CPU, giving
the CPU's results.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_hlo import config
from torch_hlo.lowering.core import Out
from torch_hlo.pytorch.operators import OpOverload

from ..record import (
    HloTensor,
    aten,
    call,
    checks,
    conditions,
    fallback,
    handlers,
    handles,
    meta as metas,
    session,
)


# composite kernels call `item` itself
@handles(aten._local_scalar_dense.default, aten.item.default)
def _local_scalar_dense(args: tuple, kwargs: dict) -> Any:
    x = args[0]
    if metas.numel(x._meta.size) != 1:
        raise RuntimeError(
            f"a Tensor with {metas.numel(x._meta.size)} elements cannot be converted to Scalar"
        )
    return _value(x)


def _value(x: HloTensor) -> Any:
    """The value of one element as a number."""
    known = _known(x)
    return session.engine().number(x) if known is None else known.item()


def _known(x: HloTensor) -> torch.Tensor | None:
    """The value if it does not take a step."""
    if type(x._storage.value) is Out and (config.get("NAN") or not config.get("CPU_NUMBERS")):
        return None
    return conditions.known(x)


def on_cpu(op: OpOverload):
    """A handler that evaluates what was recorded and runs `op` on the CPU."""

    def run(args: tuple, kwargs: dict) -> torch.Tensor:
        return fallback.execute(op, tuple(checks.admit_all(args)), checks.admit_all(kwargs))

    return run


@handles(aten._linalg_check_errors.default)
def _linalg_check_errors(args: tuple, kwargs: dict) -> None:
    """At the call, as torch.linalg documents: code that catches LinAlgError tries something else
    then."""
    info = _known(args[0])
    values = session.engine().values(args[0]) if info is None else info
    aten._linalg_check_errors.default(values, *args[1:], **kwargs)


DATA_DEPENDENT = (
    aten.allclose.default,
    aten.nonzero.default,
    aten.nonzero_static.default,
    aten.masked_select.default,
    aten.argwhere.default,
    aten.repeat_interleave.Tensor,
    aten._unique.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.unique_dim_consecutive.default,
    aten.linalg_lstsq.default,
    aten._ctc_loss.default,
    aten._ctc_loss.Tensor,
    aten.is_nonzero.default,
    aten.histogram.bin_ct,
    aten.histogram.bins_tensor,
    aten._histogramdd_bin_edges.default,
    aten._histogramdd_from_bin_cts.default,
    aten._histogramdd_from_bin_tensors.default,
)
for _op in DATA_DEPENDENT:
    handlers.TABLE[_op] = on_cpu(_op)


_MANY = 1 << 14  # values that are worth counting on the device, where the program is compiled first


@handles(aten.equal.default)
def equal(args: tuple, kwargs: dict) -> bool:
    """Compared on the device where there is much to compare."""
    a, b = args
    if (
        type(a) is type(b) is HloTensor
        and a.shape == b.shape
        and a.dtype == b.dtype
        and a.numel() >= _MANY
    ):
        same = call(aten.all.default, call(aten.eq.Tensor, a, b))
        return bool(_value(same))
    return on_cpu(aten.equal.default)(args, kwargs)


@handles(aten.bincount.default)
def bincount(args: tuple, kwargs: dict):
    """Counted on the device if `minlength` covers the values, as the number of classes does; the
    result's shape depends on them otherwise."""
    x, weights, minlength = (
        *args,
        *(kwargs.get(n, d) for n, d in (("weights", None), ("minlength", 0))[len(args) - 1 :]),
    )
    on_device = (
        type(x) is HloTensor
        and x.dim() == 1
        and x.numel() >= _MANY
        and not x.dtype.is_floating_point
        and x.dtype != torch.bool
    )
    if weights is not None:
        on_device = (
            on_device
            and type(weights) is HloTensor
            and weights.shape == x.shape
            and weights.dtype in (torch.float32, torch.float64)
        )
    if on_device and minlength > 0:
        outside = call(
            aten.any.default,
            call(
                aten.logical_or.default,
                call(aten.lt.Scalar, x, 0),
                call(aten.ge.Scalar, x, minlength),
            ),
        )
        if not _value(outside):
            source = (
                call(aten.ones_like.default, x, dtype=torch.int64) if weights is None else weights
            )
            zeros = call(aten.new_zeros.default, source, [minlength])
            return call(
                aten.scatter_add.default,
                zeros,
                0,
                call(aten._to_copy.default, x, dtype=torch.int64),
                source,
            )
    return on_cpu(aten.bincount.default)(args, kwargs)
