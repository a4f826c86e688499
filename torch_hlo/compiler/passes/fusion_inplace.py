"""Which operands of a fusion may share memory with which results."""
from __future__ import annotations

import functools

from torch_hlo.compiler.passes import fusion_table as table
from torch_hlo.compiler.passes.fusion_table import FREE, HEAVY, LIGHT
from torch_hlo.hlo.ir import Computation, Instruction, users


@functools.lru_cache(maxsize=4096)
def in_place(computation: Computation, kind: str) -> frozenset[tuple[int, int]]:
    """Pairs (operand, result): result element i may overwrite operand element i, because a kernel reads the operand only at the
    point where it writes that result, and row kernels write results with one element per point in their last pass."""
    root = computation.root
    results = root.operands if root.op == "tuple" else (root,)
    reads = users((root,))
    full = max((x.shape.size for x in results if isinstance(x.shape.size, int)), default=None)
    found = []
    for k, p in enumerate(computation.params):
        if p not in reads or not _read_at_own_index(p, reads):
            continue
        for j, x in enumerate(results):
            same = x.shape.dtype == p.shape.dtype or x.shape.itemsize == p.shape.itemsize
            if same and x.shape.size == p.shape.size and _is_pointwise(x) and (kind == "loop" or x.shape.size == full):
                found.append((k, j))
    return frozenset(found)


def _read_at_own_index(p: Instruction, reads: dict[Instruction, list[Instruction]]) -> bool:
    """Every path from `p` up to the results or to reductions keeps the linear index."""
    stack, seen = [p], {p}
    while stack:
        x = stack.pop()
        for u in reads[x]:
            if u.op == "tuple" or u.op == "reduce" and x in u.operands[: len(u.operands) // 2]:
                continue
            if u.op != "reshape" and (table.classify(u) not in (LIGHT, HEAVY, FREE) or u.op in ("broadcast", "get-tuple-element")):
                return False
            if u.shape.size != x.shape.size:
                return False
            if u not in seen:
                seen.add(u)
                stack.append(u)
    return True


def _is_pointwise(x: Instruction) -> bool:
    """True for a result with one element per point of the kernel's space; results of reductions are written at other times."""
    stack, seen = [x], {x}
    while stack:
        y = stack.pop()
        if y.op == "reduce":
            return False
        if y.op == "broadcast":
            continue
        for o in y.operands:
            if o not in seen:
                seen.add(o)
                stack.append(o)
    return True
