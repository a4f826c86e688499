"""Iterative factorizations and sequential algorithms that PyTorch's CPU kernels compute inside the program.

As in XLA, where LAPACK is called by the compiled program: the graph is not cut and nothing is counted as a fallback. Only ops belong here
whose result shapes follow from the argument shapes.
"""
from __future__ import annotations

import torch
from torch._ops import OpOverload

from torch_hlo.lowering.opaque import opaque
from torch_hlo.lowering.registry import expected, lowers

aten = torch.ops.aten

CALLED = (
    aten._linalg_svd.default, aten._linalg_eigh.default, aten.linalg_eig.default, aten._linalg_eigvals.default,
    aten.geqrf.default, aten.ormqr.default, aten.linalg_ldl_factor_ex.default, aten.linalg_ldl_solve.default,
    aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default,
    aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor, aten.segment_reduce.default, aten._segment_reduce_backward.default,
)  # fmt: skip


def _call(op: OpOverload):
    def lowering(*args, **kwargs):
        return opaque(op, args, kwargs, expected(), library=True)

    lowering.__name__ = op.name()
    return lowering


for _op in CALLED:
    lowers(_op)(_call(_op))
