"""Values that are written where they belong: loops write what they compute into slices of larger
arrays.

    h = tanh(x); s = dynamic-update-slice(stack, reshape(h), i, 0, 0)     ->  the kernel of h writes
        it into the stack, in place
    a = sub(p, q); b = mul(p, q); c = concatenate(a, b)                   ->  the kernel of a and b
        writes both halves of c

Runs on the finished grouping (fusion_plan.py). A kernel iterates over the elements of the `parts`;
compiler/loops/elementwise_loops.py writes them. An update joins only when its array has no other
reader, so that it can be overwritten: loops over time (scans, recurrent networks) fill their
results a slice per turn.
"""

from math import prod

from torch_hlo.hlo.ir import Instruction, Instructions

from ..thresholds import MAX_INPUTS, MAX_MEMBERS
from .fusion_plan import FULL, SAME, Group, Plan, merge_into, reads_of_both
from .fusion_table import FREE, REDUCE

PLACED = frozenset(("dynamic-update-slice", "concatenate"))
# elements in a row: shorter pieces of a concatenation are chosen from per element of the result
SHORTEST_PIECE = 16
# but for these: vectors of rows are scattered, where a choice would compute every piece for every
# element
NARROWEST = 2


def pieces(x: Instruction) -> Instructions:
    """The operands that make up what `x` writes, when one loop can write them side by side: the
    update of an array, the operands of a concatenation when they are alike. Empty for other
    instructions."""
    if x.op == "dynamic-update-slice":
        return x.operands[1:2]
    if x.op != "concatenate" or len({o.size for o in x.operands}) != 1:
        return ()
    row = prod(x.operand.dims[x["dimensions"][0] :])
    return (
        x.operands if isinstance(row, int) and (row >= SHORTEST_PIECE or row <= NARROWEST) else ()
    )


def behind_reshapes(x: Instruction) -> Instruction:
    while x.op == "reshape":
        x = x.operand
    return x


def joined(x: Instruction) -> Instruction | None:
    """The concatenation that an update is, if it has pieces."""
    update = behind_reshapes(x.operands[1]) if x.op == "dynamic-update-slice" else x
    return update if update is not x and update.op == "concatenate" and pieces(update) else None


def parts(x: Instruction) -> Instructions:
    """What a kernel computes, element by element, to write its result `x`."""
    return pieces(joined(x) or x) or (x,)


def place(plan: Plan) -> None:
    """Move updates and concatenations of `plan` to the kernels that compute what they write."""
    for i, x in enumerate(plan.order):
        if x.op in PLACED and x.size != 0 and _stands_alone(plan, i):
            for g in _kernels(plan, i):
                if _fits(plan, i, g) and _join(plan, i, g):
                    break


def _stands_alone(plan: Plan, i: int) -> bool:
    """Whether instruction number `i` is a kernel or step of its own that may become part of
    another."""
    x = plan.order[i]
    g = plan.group(i)
    if g is None or len(g.roles) != 1:
        return False
    if x.op == "concatenate":
        return bool(pieces(x))
    source = plan.number[x.operand]
    return plan.users[source] == [i] and plan.kind[source] != FREE


def _kernels(plan: Plan, i: int) -> list[Group]:
    """The kernels that compute parts of instruction number `i`, or what these are computed from on
    the way; then those that read a part."""
    numbers = [plan.number[behind_reshapes(p)] for p in parts(plan.order[i])]
    makers = [
        plan.group(s) for n in numbers for s in (_sources(plan, n) if plan.kind[n] == FREE else [n])
    ]
    readers = [plan.group(u) for n in numbers if plan.kind[n] != FREE for u in plan.users[n]]
    found = {
        id(g): g
        for g in (*makers, *readers)
        if g is not None and not g.step and g is not plan.group(i)
    }
    return list(found.values())


def _sources(plan: Plan, n: int) -> list[int]:
    return [s for s, _ in plan.sources[n]]


def _fits(plan: Plan, i: int, g: Group) -> bool:
    """Whether kernel `g` is a plain loop over as many elements as each part has, and needs no value
    of its own at another index for the parts."""
    x = plan.order[i]
    own = plan.group_of(i)
    if any(
        plan.kind[m] == REDUCE or plan.order[m].op in ("dot", "convolution") for m in g.roles
    ) or any(r is not FULL for r in g.roles.values()):
        return False
    if len(g.roles) >= MAX_MEMBERS or len(g.reads.keys() | own.reads.keys()) > MAX_INPUTS:
        return False
    for p in parts(x):
        n = plan.number[behind_reshapes(p)]
        if (
            p.size != g.size
            or plan.kind[n] == FREE
            and any(s in g.roles and edge is not SAME for s, edge in plan.sources[n])
        ):
            return False
    if x.op == "dynamic-update-slice":
        read = [plan.number[behind_reshapes(o)] for o in (x.operand, *x.operands[2:])]
        return not any(n in g.roles for n in read) and read[0] not in g.reads
    return True


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
