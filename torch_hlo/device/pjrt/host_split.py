"""Programs around calls into this process: for devices that cannot call Python, a module becomes
stages with host calls between them.

    for stage in stages(module): run stage.module on the values `stage.inputs`, giving
        `stage.values`; then stage.calls on the host
"""

from torch_hlo.frozen import frozen
from torch_hlo.hlo.evaluate import lapack
from torch_hlo.hlo.evaluate.evaluate import CUSTOM_CALLS
from torch_hlo.hlo.ir import (
    Computation,
    Instruction,
    Module,
    Replacements,
    build,
    instr,
    outputs,
    postorder,
    rebuild,
)


@frozen
class Stage:
    """`module`: None when there is nothing to compute. Instructions are those of the program that
    was split."""

    module: Module | None
    inputs: tuple[Instruction, ...]
    values: tuple[Instruction, ...]
    calls: tuple[Instruction, ...]


def is_host_call(x: Instruction) -> bool:
    """Whether only this process can compute `x`: PyTorch operators and LAPACK routines."""
    if x.op != "custom-call":
        return False
    target = x["custom_call_target"]
    return (
        target == "torch_op" and target in CUSTOM_CALLS or lapack.routine(target) in lapack.ROUTINES
    )


def stages(module: Module) -> list[Stage]:
    """One stage more than host calls depend on each other; a single one when there are none."""
    order = list(postorder((module.entry.root,)))
    level: dict[Instruction, int] = {}
    for x in order:
        level[x] = max((level[o] + is_host_call(o) for o in x.operands), default=0)
    given = {
        x
        for x in order
        if x.op == "parameter"
        or is_host_call(x)
        or x.op == "get-tuple-element"
        and is_host_call(x.operand)
    }
    results = [x for x in outputs(module) if x not in given]
    wanted: dict[Instruction, None] = dict.fromkeys(results)
    for x in order:
        if x is module.entry.root and x.is_tuple:
            continue
        for o in x.operands:
            if o not in given and (is_host_call(x) or level[x] > level[o]):
                wanted[o] = None
    found = []
    for k in range(max(level.values()) + 1):
        values = tuple(v for v in wanted if level[v] == k)
        calls = tuple(x for x in order if is_host_call(x) and level[x] == k)
        known = given | {v for v in wanted if level[v] < k}
        found.append(_stage(f"{module.name}.{k}", values, known, calls))
    return found


def _stage(
    name: str,
    values: tuple[Instruction, ...],
    known: set[Instruction],
    calls: tuple[Instruction, ...],
) -> Stage:
    used: Replacements = {}
    seen: set[Instruction] = set()
    pending = list(values)
    while pending:
        x = pending.pop()
        if x in seen:
            continue
        seen.add(x)
        if x in known:
            used[x] = instr("parameter", (), x.shape, index=len(used))
        else:
            pending.extend(x.operands)
    if not values:
        return Stage(None, (), (), calls)
    root = rebuild(build.tuple_(*values), used)
    return Stage(
        Module(name, Computation("main", tuple(used.values()), root)),
        tuple(used),
        values,
        calls,
    )
