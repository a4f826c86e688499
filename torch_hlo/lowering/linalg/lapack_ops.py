"""Iterative factorizations and sequential algorithms that PyTorch's CPU kernels compute inside the
program.

As in XLA, where LAPACK is called by the compiled program: the graph is not cut and nothing is
counted as a fallback. Only ops belong here whose result shapes follow from the argument shapes.
Where the process has LAPACK's C symbols machine code calls them (compiler/linalg/lapack.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch_hlo.compiler.linalg.lapack import SYMBOLS
from torch_hlo.device.cpu import symbols
from torch_hlo.pytorch.operators import OpOverload

from ..core import Results, aten, expected_shapes, lowers
from ..core.opaque import opaque

CALLED = (
    aten._linalg_svd.default, aten._linalg_eigh.default, aten.linalg_eig.default,
    aten._linalg_eigvals.default, aten.geqrf.default, aten.ormqr.default,
    aten.linalg_ldl_factor_ex.default, aten.linalg_ldl_solve.default,
    aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default,
    aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor, aten.segment_reduce.default,
    aten._segment_reduce_backward.default,
)  # fmt: skip

# The C routine that machine code calls instead, and its options.
ROUTINES: dict[OpOverload, Callable[..., list[Any]]] = {
    aten._linalg_eigh.default: lambda a, side="L", compute_v=True: [
        "syevd",
        side.upper(),
        compute_v,
    ],
    aten._linalg_svd.default: lambda a, full_matrices=False, compute_uv=True, *, driver=None: [
        "gesdd",
        full_matrices,
        compute_uv,
    ],
    aten.linalg_eig.default: lambda a: ["geev"],
    aten._linalg_eigvals.default: lambda a: ["geev"],
}


def _routine(op: OpOverload, *args: Any, **kwargs: Any) -> dict[str, list[Any]]:
    return (
        {"lapack": ROUTINES[op](*args, **kwargs)} if op in ROUTINES and symbols.has(SYMBOLS) else {}
    )


def _call(op: OpOverload, *args: Any, **kwargs: Any) -> Results:
    routine = _routine(op, *args, **kwargs)
    return opaque(op, args, kwargs, expected_shapes(), library=True, **routine)


for _op in CALLED:
    lowers(_op)(partial(_call, _op))
