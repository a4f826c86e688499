"""Iterative factorizations and sequential algorithms that PyTorch's CPU kernels compute inside the
program.

As in XLA, where LAPACK is called by the compiled program: the graph is not cut and nothing is
counted as a fallback. Only ops belong here whose result shapes follow from the argument shapes.
Where the process has LAPACK's C symbols machine code calls them (compiler/linalg/lapack.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_hlo.compiler.linalg.lapack import SYMBOLS
from torch_hlo.device.cpu import symbols
from torch_hlo.hlo.ir.instruction import Instruction
from torch_hlo.lowering.core.opaque import opaque
from torch_hlo.lowering.core.registry import Results, expected_shapes, lowers
from torch_hlo.pytorch.operators import OpOverload

aten = torch.ops.aten

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


def _call(op: OpOverload) -> Callable[..., Results]:
    def lowering(*args: Any, **kwargs: Any) -> Results:
        routine = _routine(op, *args, **kwargs)
        return opaque(op, args, kwargs, expected_shapes(), library=True, **routine)

    lowering.__name__ = op.name()
    return lowering


for _op in CALLED:
    lowers(_op)(_call(_op))


# PyTorch's kernel makes a table as wide as the longest target of the batch asks for; that of a
# program is as wide as the padded targets.
_library = torch.library.Library("torch_hlo", "FRAGMENT")
_library.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int"
    " blank, bool zero_infinity, int width) -> (Tensor, Tensor)"
)


def _ctc_loss(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *given, width = args
    loss, table = aten._ctc_loss.Tensor(*given)
    return loss, torch.nn.functional.pad(table, (0, width - table.shape[2]))


_library.impl("ctc_loss", _ctc_loss, "CPU")


@lowers(aten._ctc_loss.Tensor)
def ctc_loss(
    log_probs: Instruction,
    targets: Instruction,
    input_lengths: Instruction,
    target_lengths: Instruction,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Results:
    outs = expected_shapes()
    args = (
        log_probs,
        targets,
        input_lengths,
        target_lengths,
        blank,
        zero_infinity,
        outs[1].dims[2],
    )
    return opaque(torch.ops.torch_hlo.ctc_loss.default, args, {}, outs, library=True)
