"""linalg: factors of matrices that have a kernel.

    c = (f32[8,64,64], s64[8,64], s64[8,64]) call(a), to_apply=lu, backend_config={"linalg":"lu"}
 -> c = (f32[8,64,64], s64[8,64], s64[8,64]) fusion(a), kind=custom, calls=lu, backend_config={"linalg":"lu"}

The called computation is the meaning: loops over whole arrays with masks. Where there is no kernel (complex numbers, GPUs) legalize inlines it.
Results of lu, for matrices [..., m, n]: both factors in one matrix; the pivots, from 0, [..., min(m, n)]; the rows' permutation [..., m].
"""
from __future__ import annotations

from torch_hlo.compiler.passes.base import hlo_pass
from torch_hlo.hlo.ir import Instruction, Module, instr
from torch_hlo.hlo.match import op, rewrite, rules

CONFIG = '{"linalg":"lu"}'


def is_lu(x: Instruction) -> bool:
    """Whether a call or fusion says that it is an LU factorization."""
    return x.get("backend_config") == CONFIG


def _fused(out: Instruction) -> Instruction | None:
    if not is_lu(out) or out.operands[0].shape.dtype not in ("f32", "f64"):
        return None
    return instr("fusion", out.operands, out.shape, kind="custom", calls=out["to_apply"], backend_config=CONFIG)


RULES = rules((op("call"), _fused))


@hlo_pass
def linalg(module: Module) -> Module:
    """Calls that say they are factorizations -> kernels, where there are some."""
    return rewrite(module, RULES)
