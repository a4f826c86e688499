"""Updates that are written where they belong: loops write what they compute into slices of larger
arrays.

    h = tanh(x); s = dynamic-update-slice(stack, reshape(h), i, 0, 0)     ->  the kernel of h writes
        it into the stack, in place

Runs on the finished grouping (fusion_plan.py). A kernel iterates over the elements of what is
`written`; compiler/loops/elementwise_loops.py writes them. An update joins only when its array has
no other reader, so that it can be overwritten: loops over time (scans, recurrent networks) fill
their results a slice per turn.
"""

from torch_hlo.hlo.ir import Instruction

from ..thresholds import MAX_INPUTS, MAX_MEMBERS
from .fusion_plan import FULL, SAME, Group, Plan, merge_into, reads_of_both
from .fusion_table import FREE, REDUCE


def behind_reshapes(x: Instruction) -> Instruction:
    while x.op == "reshape":
        x = x.operand
    return x


def written(x: Instruction) -> Instruction:
    """What a kernel computes, element by element, to write its result `x`."""
    return x.operands[1] if x.op == "dynamic-update-slice" else x


def place(plan: Plan) -> None:
    """Move updates of `plan` to the kernels that compute what they write."""
    for i, x in enumerate(plan.order):
        if x.op == "dynamic-update-slice" and x.size != 0 and _stands_alone(plan, i):
            for g in _kernels(plan, i):
                if _fits(plan, i, g) and _join(plan, i, g):
                    break


def _stands_alone(plan: Plan, i: int) -> bool:
    """Whether instruction number `i` is a kernel or step of its own that may become part of
    another."""
    g = plan.group(i)
    source = plan.number[plan.order[i].operand]
    return (
        g is not None
        and len(g.roles) == 1
        and plan.users[source] == [i]
        and plan.kind[source] != FREE
    )


def _kernels(plan: Plan, i: int) -> list[Group]:
    """The kernels that compute what instruction number `i` writes, or what this is computed from on
    the way; then those that read it."""
    n = plan.number[behind_reshapes(written(plan.order[i]))]
    free = plan.kind[n] == FREE
    numbers = [s for s, _ in plan.sources[n]] if free else [n, *plan.users[n]]
    found = {id(g): g for m in numbers if (g := plan.group(m)) is not None}
    return [g for g in found.values() if not g.step and g is not plan.group(i)]


def _fits(plan: Plan, i: int, g: Group) -> bool:
    """Whether kernel `g` is a plain loop over as many elements as are written, and needs no value
    of its own at another index for them."""
    x = plan.order[i]
    own = plan.group_of(i)
    if any(
        plan.kind[m] == REDUCE or plan.order[m].op in ("dot", "convolution") for m in g.roles
    ) or any(r is not FULL for r in g.roles.values()):
        return False
    if len(g.roles) >= MAX_MEMBERS or len(g.reads.keys() | own.reads.keys()) > MAX_INPUTS:
        return False
    value = written(x)
    n = plan.number[behind_reshapes(value)]
    if (
        value.size != g.size
        or plan.kind[n] == FREE
        and any(s in g.roles and edge is not SAME for s, edge in plan.sources[n])
    ):
        return False
    read = [plan.number[behind_reshapes(o)] for o in (x.operand, *x.operands[2:])]
    return not any(n in g.roles for n in read) and read[0] not in g.reads


def _join(plan: Plan, i: int, g: Group) -> bool:
    own = plan.group_of(i)
    if i in g.reads or plan.depends(g, own) or plan.depends(own, g):
        return False
    raised = plan.below(g, own)
    if raised is None:
        return False
    roles = {**g.roles, i: FULL}
    merge_into(Group(g.size, roles, None, g.cuts, reads_of_both(g, own)), g, own, raised)
    return True
