"""linalg: factors of matrices (LU, QR) that have a kernel.

    c = (f32[8,64,64], s64[8,64], s64[8,64]) call(a), to_apply=lu, backend_config={"linalg":"lu"}
-> c = (f32[8,64,64], s64[8,64], s64[8,64]) fusion(a), kind=custom, calls=lu,
backend_config={"linalg":"lu"}

The called computation is the meaning: loops over whole arrays with masks. Where there is no kernel
(complex numbers, GPUs) legalize inlines it. Results of lu, for matrices [..., m, n]: both factors
in one matrix; the pivots, from 0, [..., min(m, n)]; the rows' permutation [..., m]. Results of qr:
Q [..., m, k] with k from min(m, n) to m; R on and above the diagonal of a matrix [..., m, n];
memory for the kernel.
"""

import json
from collections.abc import Collection

from torch_hlo.hlo.ir import (
    Computation,
    Instruction,
    Module,
    Size,
    dim_min,
    op,
    postorder,
    replace,
    rewrite,
    rules,
    substituted,
    users,
)
from torch_hlo.hlo.ir.build import kernel_of

from ..hlo_pass import hlo_pass, over_computations

BLOCK = 16  # columns that the kernels take at a time
AT_ONCE = 4  # rows of a panel that QR takes at a time
LU = '{"linalg":"lu"}'
QR = '{"linalg":"qr"}'


def _fused(out: Instruction) -> Instruction | None:
    if out.get("backend_config") not in (LU, QR) or out.operand.dtype not in ("f32", "f64"):
        return None
    return kernel_of(out)


def qr_memory(m: Size, n: Size) -> Size:
    """Numbers that the kernel of QR keeps per matrix besides its results: the reflections of a
    block [m + AT_ONCE - 1, BLOCK], and a [BLOCK, BLOCK] of each."""
    return (m + AT_ONCE - 1 + (dim_min(m, n) + BLOCK - 1) // BLOCK * BLOCK) * BLOCK


def used_results(x: Instruction) -> Collection[int]:
    """Numbers of the results of a call of LAPACK that somebody reads."""
    known = x.get("backend_config")
    return json.loads(known)["used"] if known else range(len(x.elements))


def _with_used(c: Computation) -> Computation:
    calls = [
        x
        for x in postorder((c.root,))
        if x.op == "custom-call"
        and '"lapack"' in (x.get("opaque") or "")
        and x.get("backend_config") is None
    ]
    if not calls:
        return c
    table = users((c.root,))
    new = {}
    for x in calls:
        readers = table[x]
        if readers and all(r.op == "get-tuple-element" for r in readers):
            used = sorted({r["index"] for r in readers})
            new[x] = replace(x, None, x.shape, backend_config=json.dumps({"used": used}))
    return c.with_root(substituted(c.root, new))


RULES = rules((op("call"), _fused))


@hlo_pass
def linalg(module: Module) -> Module:
    """Calls that say they are factorizations -> kernels, where there are some; LAPACK's say which
    of their results are read."""
    return over_computations(rewrite(module, RULES), _with_used)
