"""linalg: factors of matrices (LU, QR) that have a kernel.

    c = (f32[8,64,64], s64[8,64], s64[8,64]) call(a), to_apply=lu, backend_config={"linalg":"lu"}
 -> c = (f32[8,64,64], s64[8,64], s64[8,64]) fusion(a), kind=custom, calls=lu, backend_config={"linalg":"lu"}

The called computation is the meaning: loops over whole arrays with masks. Where there is no kernel (complex numbers, GPUs) legalize inlines it.
Results of lu, for matrices [..., m, n]: both factors in one matrix; the pivots, from 0, [..., min(m, n)]; the rows' permutation [..., m].
Results of qr: Q [..., m, k] with k from min(m, n) to m; R on and above the diagonal of a matrix [..., m, n]; memory for the kernel.
"""
from __future__ import annotations

from torch_hlo.compiler.passes.base import hlo_pass
from torch_hlo.hlo.dim import Size
from torch_hlo.hlo.ir import Instruction, Module, instr
from torch_hlo.hlo.match import op, rewrite, rules

BLOCK = 16  # columns that the kernels take at a time
AT_ONCE = 4  # rows of a panel that QR takes at a time
LU, QR = '{"linalg":"lu"}', '{"linalg":"qr"}'


def is_lu(x: Instruction) -> bool:
    """Whether a call or fusion says that it is an LU factorization."""
    return x.get("backend_config") == LU


def is_qr(x: Instruction) -> bool:
    """The same for QR."""
    return x.get("backend_config") == QR


def _fused(out: Instruction) -> Instruction | None:
    if not (is_lu(out) or is_qr(out)) or out.operands[0].shape.dtype not in ("f32", "f64"):
        return None
    return instr("fusion", out.operands, out.shape, kind="custom", calls=out["to_apply"], backend_config=out["backend_config"])


def qr_memory(m: Size, n: Size) -> Size:
    """Numbers that the kernel of QR keeps per matrix besides its results: the reflections of a block [m + AT_ONCE - 1, BLOCK], and a [BLOCK, BLOCK] of each."""
    return (m + AT_ONCE - 1 + (min(m, n) + BLOCK - 1) // BLOCK * BLOCK) * BLOCK


RULES = rules((op("call"), _fused))


@hlo_pass
def linalg(module: Module) -> Module:
    """Calls that say they are factorizations -> kernels, where there are some."""
    return rewrite(module, RULES)
