"""scatter_fusion: a scatter computes its updates itself, and fills its result itself when it starts
from equal elements.

    u = f32[100000,64] gather(x, j)
    s = f32[20000,64] scatter(broadcast(0), i, u)
-> f = f32[20000,64] fusion(i, x, j), kind=custom, calls={the same},
backend_config={"scatter":"fused"}

The messages of a graph network, or the gradients of a table, are then not written to memory first;
and gradients of tables of one size are no copies of one array of zeros. Each update is computed
once, where it is applied.
"""

from __future__ import annotations

from torch_hlo.hlo.ir import (
    Computation,
    Instruction,
    Module,
    Replacements,
    Users,
    carry_meta,
    fixed,
    instr,
    on_operands,
    postorder,
    replace,
    users,
)
from torch_hlo.hlo.ir.build import kernel

from ..fusion import fusion_table as table
from ..hlo_pass import hlo_pass, over_computations

_CONFIG = '{"scatter":"fused"}'
# elements in a row of a window that make it worth computing them there; single elements would be
# computed one by one
WIDE = 16
MOST = 6  # arrays that the updates are computed from


@hlo_pass
def scatter_fusion(module: Module) -> Module:
    """Scatters that compute their updates, and fill what they start from."""
    return over_computations(module, _scatters)


def _scatters(c: Computation) -> Computation:
    order = postorder((c.root,))
    if not any(x.op == "scatter" for x in order):
        return c
    reads = users((c.root,))
    found = {x: made for x in order if x.op == "scatter" and (made := _fused(x, reads)) is not None}
    if not found:
        return c
    return Computation(c.name, c.params, _replaced(c.root, found))


def _replaced(root: Instruction, found: Replacements) -> Instruction:
    """`root` with fusions for scatters; their operands are instructions of the old program, in
    which there may be others."""
    new: Replacements = {}
    stack = [root]
    while stack:
        x = stack[-1]
        y = found.get(x, x)
        missing = [o for o in y.operands if o not in new]
        if x in new or not missing:
            stack.pop()
            new.setdefault(x, on_operands(y, new))
            carry_meta(x, new[x])
        else:
            stack.extend(reversed(missing))
    return new[root]


def _fused(x: Instruction, reads: Users) -> Instruction | None:
    if x.is_tuple:
        return None
    start, indices, updates = x.operands
    fills = start.op == "broadcast" and _is_number(start.operand)
    inside = _computed(x, reads)
    if not fills and not inside:
        return None
    inputs: Replacements = {}

    def parameter(o: Instruction) -> Instruction:
        if o not in inputs:
            inputs[o] = instr("parameter", (), o.shape, index=len(inputs))
        return inputs[o]

    first = start if fills else parameter(start)
    where = parameter(indices)
    made: Replacements = {}
    for y in inside:  # operands before users
        made[y] = (
            replace(y, tuple(made[o] if o in made else parameter(o) for o in y.operands))
            if y.operands
            else y
        )
    inner = replace(x, (first, where, made.get(updates) or parameter(updates)), x.shape)
    called = Computation("scatter", tuple(inputs.values()), inner)
    return kernel(tuple(inputs), called, _CONFIG)


def _computed(x: Instruction, reads: Users) -> list[Instruction]:
    """What the scatter computes itself: instructions that only its updates need, operands before
    users."""
    start, indices, updates = x.operands
    if not all(isinstance(d, int) for o in x.operands for d in o.dims) or updates.kind == "c":
        return []
    wide = _is_wide(x)
    chosen: dict[Instruction, None] = {}
    for y in reversed(postorder((updates,))):
        if y in (start, indices) or not _is_cheap(y, wide):
            continue
        free = table.classify(y) == table.FREE and y.op != "reshape"
        mine = [u for u in reads[y] if u in chosen or u is x]
        if mine and (free or len(mine) == len(reads[y])):
            chosen[y] = None
    order = list(reversed(chosen))
    arrays = {o for y in order for o in y.operands if o not in chosen}
    return order if len(arrays) <= MOST else []


def _is_cheap(y: Instruction, wide: bool) -> bool:
    if y.op == "gather" or table.classify(y) in (table.LIGHT, table.HEAVY):
        return wide and y.op != "get-tuple-element" and y.kind != "c"
    return y.op in ("broadcast", "iota") or _is_number(y)


def _is_number(y: Instruction) -> bool:
    return y.op == "constant" and y.size == 1


def _is_wide(x: Instruction) -> bool:
    """Whether windows are rows of the result that vectors fit into."""
    rank = x.rank
    last = x.operands[2].rank - 1
    dropped = {
        *x.get("inserted_window_dims", ()),
        *x.get("input_batching_dims", ()),
    }
    return (
        rank > 0
        and rank - 1 not in dropped
        and last in x["update_window_dims"]
        and fixed(x.operands[2].dims[last]) >= WIDE
    )
