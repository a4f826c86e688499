"""What one kernel saves for another that can compute it from what it reads anyway is computed there.

    s = logistic(x), y = x * s, d = (1 - s) * s    saved are s and d    dx = g * (s + x * d)     d joins the kernel of dx: an array less

Runs on the finished grouping (fusion_plan.py), products included. Nothing is computed twice: all that reads a value which moves is in one other kernel.
"""
from __future__ import annotations

from torch_hlo.compiler.passes import fusion_table as table
from torch_hlo.compiler.passes.fusion_plan import FULL, MAX_INPUTS, MAX_MEMBERS, SAME, Group, Plan
from torch_hlo.compiler.passes.fusion_table import LIGHT, REDUCE


def defer(plan: Plan) -> None:
    """Move elementwise members of groups to the groups that read them, where fewer bytes move."""
    readers: dict[int, list[int]] = {}
    for u in range(len(plan.order)):
        if plan.group(u) is not None:
            for s, _ in plan.sources[u]:
                readers.setdefault(s, []).append(u)
    for i in range(len(plan.order) - 1, -1, -1):
        g = plan.group(i)
        if g is None or g.step or i == plan.root or not _is_simple(plan, i, g):
            continue
        others = {id(h): h for h in map(plan.group, readers.get(i, ()))}
        if len(others) == 1 and id(g) not in others:
            (h,) = others.values()
            part = _with_own_sources(plan, i, g, readers)
            if _fits(plan, i, g, h, part) and _saved(plan, i, g, h, part, readers) > 0:
                _move(plan, g, h, part, readers)


def _is_simple(plan: Plan, i: int, g: Group) -> bool:
    x = plan.order[i]
    return plan.kind[i] == LIGHT and g.roles[i] is FULL and not x.shape.is_tuple and x.op not in ("get-tuple-element", "dynamic-update-slice")


def _with_own_sources(plan: Plan, i: int, g: Group, readers: dict[int, list[int]]) -> set[int]:
    """`i` and the members of its group that are computed for it alone."""
    part, stack = {i}, [i]
    while stack:
        for s, edge in plan.sources[stack.pop()]:
            if s in g.roles and s not in part and edge is SAME and _is_simple(plan, s, g) and part.issuperset(readers[s]) and s != plan.root:
                part.add(s)
                stack.append(s)
    return part


def _inputs(plan: Plan, part: set[int]) -> dict[int, set]:
    """What members read that is none of them, and how."""
    found: dict[int, set] = {}
    for m in part:
        for s, edge in plan.sources[m]:
            if s not in part:
                found.setdefault(s, set()).add(edge)
    return found


def _fits(plan: Plan, i: int, g: Group, h: Group, part: set[int]) -> bool:
    """Whether the other group has an element of its own space for each of the value, and finds what it needs in memory."""
    if h.step or h.reads.get(i) != {SAME} or len(h.roles) + len(part) > MAX_MEMBERS:
        return False
    if any(plan.kind[u] != REDUCE and h.roles[u] is not FULL for u in h.roles if any(s == i for s, _ in plan.sources[u])):
        return False
    inputs = _inputs(plan, part)
    if any(s in g.roles and (edges != {SAME} or g.roles[s] is not FULL) or s in h.roles for s, edges in inputs.items()):
        return False
    cuts = h.cuts
    for m in part:
        cuts = table.refine(cuts, plan.cuts(m))
        if cuts is None:
            return False
    return len(inputs.keys() | h.reads.keys()) <= MAX_INPUTS


def _saved(plan: Plan, i: int, g: Group, h: Group, part: set[int], readers: dict[int, list[int]]) -> float:
    """Bytes that no longer move. Of symbolic sizes, bytes per element: all are alike."""

    def nbytes(m: int) -> float:
        n = plan.order[m].shape.nbytes
        return n if isinstance(n, int) else plan.order[m].shape.itemsize

    saved = 2 * nbytes(i)
    for s in _inputs(plan, part):
        saved -= nbytes(s) * (s not in h.reads)
        if s in g.roles and s != plan.root and all(u in g.roles for u in readers[s]):
            saved -= nbytes(s)  # nobody else needed it in memory
    return saved


def _move(plan: Plan, g: Group, h: Group, part: set[int], readers: dict[int, list[int]]) -> None:
    cuts = h.cuts
    for m in part:
        cuts = table.refine(cuts, plan.cuts(m))
    roles = dict(sorted({**h.roles, **dict.fromkeys(part, FULL)}.items()))
    reads = {s: set(edges) for s, edges in h.reads.items() if s not in part}
    for s, edges in _inputs(plan, part).items():
        reads.setdefault(s, set()).update(edges)
    merged = Group(h.size, roles, h.rows, cuts, reads, h.readers, next(iter(roles)), max(g.reach, h.reach))
    h.merged_into = merged
    for m in part:
        plan.put(m, merged)
    g.roles = {m: role for m, role in g.roles.items() if m not in part}
    if not g.roles:
        g.merged_into = merged
        return
    left = {s for m in g.roles for s, _ in plan.sources[m]}
    g.reads = {s: edges for s, edges in g.reads.items() if s in left}
    g.readers = {u for m in g.roles for u in readers.get(m, ()) if u not in g.roles}
    g.first = next(iter(g.roles))
