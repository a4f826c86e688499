"""Fusions of kind output: a product takes in the elementwise instructions that read it.

    h = add(dot(x, w), broadcast(b)); y = multiply(h, logistic(h))     ->  one kernel; h is in
        memory only if somebody else reads it
    s = add(dot(x, w), residual); n = layernorm(s)                     ->  s with the product, n
        reads s: an array less is moved

Runs on the finished grouping (fusion_plan.py), in which products are steps of their own. A whole
loop group joins the product it reads; of a group with reductions or moves only its elementwise
front does, and only when fewer bytes move. The product's operands stay arrays in memory, or
converts of arrays of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from torch_hlo.hlo.ir import Instruction

from ..conv_forms import is_channels_last, is_planar
from ..thresholds import MAX_INPUTS, MAX_MEMBERS
from .fusion_plan import FULL, SAME, Edge, Group, Plan, Role
from .fusion_table import FREE, HEAVY, LIGHT


def is_product(x: Instruction) -> bool:
    """Whether a fusion may finish the sums of this instruction: a dot, or a convolution whose
    result is a matrix of pixels and features, or of planes and pixels."""
    return x.op == "dot" or x.op == "convolution" and (is_channels_last(x) or is_planar(x))


FEW_ROWS = 8


def product_arrays(x: Instruction) -> list[Instruction]:
    """The arrays that a product reads. Bytes that become floats beside a few rows are converted as
    they are read: there every byte counts."""
    return [
        o.operand if _reads_bytes(x, o, other) else o
        for o, other in zip(x.operands, reversed(x.operands), strict=True)
    ]


def _reads_bytes(x: Instruction, o: Instruction, other: Instruction) -> bool:
    if (
        x.op != "dot"
        or o.op != "convert"
        or o.operand.dtype not in ("s8", "u8")
        or o.kind != "f"
        or x.get("lhs_batch_dims")
    ):
        return False
    contracted = x["lhs_contracting_dims" if other is x.operand else "rhs_contracting_dims"]
    rows = prod(d for i, d in enumerate(other.dims) if i not in contracted)
    return isinstance(rows, int) and rows <= FEW_ROWS


def absorb(plan: Plan) -> None:
    """Merge groups of `plan` into the products they read; a group that reads several goes to the
    last one."""
    products = [
        i for i, x in enumerate(plan.order) if is_product(x) and x.kind == "f" and x.size != 0
    ]
    if products:
        absorber = _Absorber(plan)
        for i in reversed(products):
            for g in absorber.groups_reading(i):
                part = absorber.joining(i, g)
                if part:
                    absorber.move(plan.group_of(i), g, part)


class _Absorber:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        # member -> members that read it, also through FREE instructions
        self.readers: dict[int, list[int]] = {}
        for u in range(len(plan.order)):
            if plan.group(u) is not None:
                for s, _ in plan.sources[u]:
                    self.readers.setdefault(s, []).append(u)

    def groups_reading(self, i: int) -> list[Group]:
        """The kernels that read product `i`, each once, in program order."""
        found = {
            id(g): g
            for g in map(self.plan.group_of, self.readers.get(i, ()))
            if not g.step and g is not self.plan.group(i)
        }
        return list(found.values())

    def joining(self, i: int, g: Group) -> set[int]:
        """The members of `g` that should be computed with product `i`; empty when none."""
        plan = self.plan
        product = self.plan.group_of(i)
        if any(is_product(plan.order[m]) for m in g.roles):
            return set()
        front = self._front(i, g)
        # What the group writes anyway, and what that is computed from, may be worth joining where
        # all of the front is not.
        written = self._closure(front, (m for m in front if self._is_read_outside(m, g)))
        for part in (front, written):
            if (
                not part
                or len(part) + len(product.roles) > MAX_MEMBERS
                or len(self._inputs(part) | product.reads.keys()) > MAX_INPUTS
            ):
                continue
            if self._saved(i, g, part) > 0 and not plan.depends(self._group(part), product):
                return part
        return set()

    def _front(self, i: int, g: Group) -> set[int]:
        """Elementwise members of `g` that depend on product `i` but not on what the rest of the
        group computes, with what they need of the group."""
        plan = self.plan
        size = self.plan.order[i].size
        good: set[int] = set()
        late: set[int] = {i}
        for m in sorted(g.roles):
            x = plan.order[m]
            elementwise = (
                plan.kind[m] in (LIGHT, HEAVY) or plan.kind[m] == FREE and x.op == "convert"
            )
            if (
                not elementwise
                or g.roles[m] is not FULL
                or x.is_tuple
                or x.op == "get-tuple-element"
                or x.size != size
            ):
                continue
            inside = [(s, edge) for s, edge in plan.sources[m] if s in g.roles or s == i]
            if all(edge is SAME and (s in good or s == i) for s, edge in inside):
                good.add(m)
                if any(s in late for s, _ in inside):
                    late.add(m)
        return self._closure(good, good & late)

    def _closure(self, members: set[int], roots: Iterable[int]) -> set[int]:
        """`roots` and the members they are computed from."""
        stack = list(roots)
        found = set(stack)
        while stack:
            for s, _ in self.plan.sources[stack.pop()]:
                if s in members and s not in found:
                    found.add(s)
                    stack.append(s)
        return found

    def _inputs(self, members: Iterable[int]) -> set[int]:
        """What the members read that is none of them."""
        return {s for m in members for s, _ in self.plan.sources[m]}.difference(members)

    def _is_read_outside(self, m: int, g: Group) -> bool:
        return m == self.plan.root or any(r not in g.roles for r in self.readers.get(m, ()))

    def _saved(self, i: int, g: Group, part: set[int]) -> float:
        """Bytes that no longer move when `part` of `g` is computed with product `i`. Of symbolic
        sizes, bytes per element: all are alike."""
        plan = self.plan
        rest = self._inputs(g.roles.keys() - part)

        def nbytes(m: int) -> float:
            n = plan.order[m].nbytes
            return n if isinstance(n, int) else plan.order[m].itemsize

        saved = 0.0
        if i not in rest:
            only = i != plan.root and all(r in part for r in self.readers[i])
            saved = nbytes(i) * (1 + only)
        saved -= sum(nbytes(s) for s in self._inputs(part) & rest if s != i)
        return saved - sum(
            nbytes(m) * (1 if self._is_read_outside(m, g) else 2) for m in part & rest
        )

    def _group(self, members: Iterable[int]) -> Group:
        """A group of these members, which the plan does not know yet."""
        plan = self.plan
        roles: dict[int, Role] = dict.fromkeys(sorted(members), FULL)
        first = next(iter(roles))
        reads: dict[int, set[Edge]] = {s: {SAME} for s in self._inputs(roles)}
        reach = max(
            [
                *roles,
                *(h.reach for s in reads if (h := plan.group(s)) is not None),
            ]
        )
        readers = {r for m in roles for r in self.readers.get(m, ()) if r not in roles}
        return Group(
            plan.order[first].size,
            roles,
            None,
            frozenset(),
            reads,
            readers,
            first,
            reach,
        )

    def move(self, product: Group, g: Group, part: set[int]) -> None:
        """Take `part` out of `g` and make it one group with the product."""
        plan = self.plan
        taken = self._group(part)
        raised = plan.below(product, taken)
        if raised is None:
            return
        merged = self._group(product.roles.keys() | part)
        product.merged_into = merged
        rest = g.roles.keys() - part
        if rest:
            left = self._group(rest)
            g.roles = {m: r for m, r in g.roles.items() if m in rest}
            g.reads = left.reads
            g.readers = left.readers
            g.first = left.first
            for m in part:
                plan.put(m, merged)
        else:
            g.merged_into = merged
        for h in (*raised, g):
            h.reach = max(h.reach, merged.reach)
