"""Small collectives of the same kind among the same devices become one: fewer meetings, fuller
messages.

    a = all-reduce(x); b = all-reduce(y)      ->      (a, b) = all-reduce(x, y)

Collectives are taken in program order; each joins the open group of its kind unless it needs a
result of that group, through other groups too, or the group would exceed THRESHOLD bytes. A
reduce-scatter has one operand (in StableHLO too), so several travel side by side in one matrix
whose row i is for the group's i-th device.
"""

from torch_hlo.hlo.ir import (
    Computation,
    Instruction,
    Module,
    Replacements,
    build as h,
    carry_meta,
    fixed,
    on_operands,
    postorder,
    replace,
)

from ..hlo_pass import hlo_pass, over_computations

COMBINED = frozenset(("all-reduce", "all-gather", "reduce-scatter"))
THRESHOLD = 4 << 20  # bytes of the operands of one combined collective


@hlo_pass
def collective_combine(module: Module) -> Module:
    """Independent all-reduces, all-gathers and reduce-scatters among the same devices are combined
    up to a few megabytes."""
    return combined(module, THRESHOLD)


def combined(module: Module, threshold: int) -> Module:
    """The module with collectives combined up to `threshold` bytes of operands."""
    return over_computations(module, lambda c: _combined(c, threshold))


class _Group:
    """Collectives that become one; `needs`: bit set of the groups whose results its members depend
    on."""

    __slots__ = ("members", "bytes", "needs", "number")

    def __init__(self, number: int) -> None:
        self.members: list[Instruction] = []
        self.bytes = 0
        self.needs = 0
        self.number = number


def _combined(c: Computation, threshold: int) -> Computation:
    groups: list[_Group] = []
    open_: dict[tuple[object, ...], _Group] = {}
    needs: dict[Instruction, int] = {}
    for x in postorder((c.root,)):
        bits = 0
        for o in x.operands:
            bits |= needs[o]
        if x.op in COMBINED and len(x.operands) == 1 and x.operand.is_static:
            same = tuple(
                (k, v)
                for k, v in x.attrs
                if k != "channel_id" and (k != "dimensions" or x.op != "reduce-scatter")
            )
            key = (x.op, same, x.get("channel_id") is None, x.dtype)
            group = open_.get(key)
            size = fixed(x.operand.nbytes)
            if (
                group is None
                or group.bytes + size > threshold
                or _needs(groups, bits, group.number)
            ):
                group = open_[key] = _Group(len(groups))
                groups.append(group)
            group.members.append(x)
            group.bytes += size
            group.needs |= bits
            bits |= 1 << group.number
        needs[x] = bits
    member = {x: g for g in groups if len(g.members) > 1 for x in g.members}
    return _rebuilt(c, member) if member else c


def _needs(groups: list[_Group], bits: int, number: int) -> bool:
    """Whether a group in `bits`, or one that they depend on, is the one of this number."""
    target = 1 << number
    seen = 0
    pending = bits
    while pending:
        if pending & target:
            return True
        low = pending & -pending
        seen |= low
        pending = (pending ^ low) | groups[low.bit_length() - 1].needs & ~seen
    return False


def _rebuilt(c: Computation, member: dict[Instruction, _Group]) -> Computation:
    """The computation with each group one instruction. Members may come before operands of others
    in program order, so this walks by need."""
    new: Replacements = {}
    stack = [c.root]
    while stack:
        x = stack[-1]
        if x in new:
            stack.pop()
            continue
        group = member.get(x)
        pending = [
            o for m in (group.members if group else (x,)) for o in m.operands if o not in new
        ]
        if pending:
            stack.extend(reversed(pending))
            continue
        stack.pop()
        if group is None:
            new[x] = on_operands(x, new)
            if new[x] is not x:
                carry_meta(x, new[x])
            continue
        results = (_scattered if x.op == "reduce-scatter" else _variadic)(
            group.members, [new[m.operand] for m in group.members]
        )
        new.update(zip(group.members, results, strict=True))
    return Computation(c.name, c.params, new[c.root])


def _variadic(members: list[Instruction], operands: list[Instruction]) -> list[Instruction]:
    whole = replace(members[0], operands)
    return [h.get_tuple_element(whole, i) for i in range(len(members))]


def _scattered(members: list[Instruction], operands: list[Instruction]) -> list[Instruction]:
    rows = []
    for m, x in zip(members, operands, strict=True):
        (d,) = m["dimensions"]
        dims = x.dims
        n = dims[d] // m.dims[d]
        parts = h.reshape(x, (*dims[:d], n, m.dims[d], *dims[d + 1 :]))
        rows.append(
            h.reshape(h.transpose(parts, (d, *range(d), *range(d + 1, len(dims) + 1))), (n, m.size))
        )
    mine = replace(members[0], (h.concatenate(rows, 1),), dimensions=(0,))
    results = []
    at = 0
    for m in members:
        end = at + fixed(m.size)
        results.append(h.reshape(h.slice_(mine, (0, at), (1, end)), m.dims))
        at = end
    return results
