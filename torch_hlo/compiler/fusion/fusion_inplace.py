"""Which operands of a fusion may share memory with which results."""

import functools

from torch_hlo.hlo.ir import Computation, Instruction, Users, users

from . import fusion_table as table
from .fusion_table import FREE, HEAVY, LIGHT


@functools.lru_cache(maxsize=4096)
def in_place(computation: Computation, kind: str) -> frozenset[tuple[int, int]]:
    """Pairs (operand, result): result element i may overwrite operand element i.

    A kernel reads such an operand only at the point where it writes that result. Kernels with
    reductions write results with one element per point in their last pass, and all others after
    everything of that element was read."""
    root = computation.root
    if kind == "custom":
        start = root.operand if root.op == "scatter" else None
        return frozenset(
            [(start["index"], 0)]
            if start is not None and start.op == "parameter" and len(users((root,))[start]) == 1
            else []
        )
    results = computation.results
    reads = users((root,))
    full = next((x.operand.size for x in reads if x.op == "reduce"), None)
    found = []
    for k, p in enumerate(computation.params):
        if p not in reads:
            continue
        if all(
            u.op == "dynamic-update-slice" and u.operand is p and p not in u.operands[1:]
            for u in reads[p]
        ):
            found += [
                (k, j) for j, x in enumerate(results) if x is reads[p][0] and len(reads[p]) == 1
            ]
            continue
        is_full = full is None or p.size == full
        if not _read_at_own_index(p, reads, reductions=is_full):
            continue
        for j, x in enumerate(results):
            if (
                x.op != "dynamic-update-slice"
                and x.itemsize == p.itemsize
                and x.size == p.size
                and (not is_full or _is_pointwise(x))
            ):
                found.append((k, j))
    return frozenset(found)


def _read_at_own_index(p: Instruction, reads: Users, reductions: bool) -> bool:
    """Every path from `p` up to the results (or, if allowed, to reductions) keeps the linear
    index."""
    stack = [p]
    seen = {p}
    while stack:
        x = stack.pop()
        for u in reads[x]:
            if (
                u.op == "tuple"
                or reductions
                and u.op == "reduce"
                and x in u.operands[: len(u.operands) // 2]
            ):
                continue
            if u.op == "dynamic-update-slice" and x is u.operands[1] and x not in u.operands[2:]:
                continue  # a result that is written when all values at this index have been read
            if u.op != "reshape" and (
                table.classify(u) not in (LIGHT, HEAVY, FREE)
                or u.op in ("broadcast", "get-tuple-element")
            ):
                return False
            if u.size != x.size:
                return False
            if u not in seen:
                seen.add(u)
                stack.append(u)
    return True


def _is_pointwise(x: Instruction) -> bool:
    """True for a result with one element per point of the kernel's space; results of reductions are
    written at other times."""
    stack = [x]
    seen = {x}
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
