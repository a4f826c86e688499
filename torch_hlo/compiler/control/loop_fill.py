"""Arrays that a loop writes from end to end begin as memory that nobody has written.

    while (0, broadcast(0), …) { y = dynamic-update-slice(y, update[1,8], i, 0); i = i + 1 } while i
        < 32      ->      while (0, AllocateBuffer(), …)

A loop over time stacks its results: each turn writes one element along the first dimension. The
zeros that it starts with, one array for all results of a shape, would be written and then copied
for each. AllocateBuffer is XLA's name for what the copies become; nothing computes it.
"""

from torch_hlo.hlo.ir import (
    Instruction,
    Module,
    build as h,
    instr,
    replace,
    users,
)

from ..hlo_pass import hlo_pass, over_loops

ALLOCATE = "AllocateBuffer"


@hlo_pass
def loop_fill(module: Module) -> Module:
    """Stacked results of loops are not filled before."""
    return over_loops(module, _without_fill)


def is_unwritten(x: Instruction) -> bool:
    return x.op == "custom-call" and x["custom_call_target"] == ALLOCATE


def _without_fill(x: Instruction) -> Instruction:
    state = x.operand
    body = x["body"]
    if state.op != "tuple" or body.root.op != "tuple":
        return x
    counter, turns = _counted(x)
    if counter is None or not turns:
        return x
    reads = users((body.root,))
    initial = list(state.operands)
    for k, (value, result) in enumerate(zip(initial, body.root.operands, strict=True)):
        element = instr("get-tuple-element", body.params, index=k)
        if (
            value.op == "broadcast"
            and value.operand.op == "constant"
            and reads.get(element) == [result]
            and _is_covered(result, element, counter, turns)
        ):
            initial[k] = h.custom_call(ALLOCATE, (), value.shape, serial=k)
    return x if initial == list(state.operands) else replace(x, (h.tuple_(*initial),))


def _counted(x: Instruction) -> tuple[Instruction | None, int]:
    """(the element of the body's state that counts a loop's turns from 0 on, how many there are);
    (None, 0) for other loops."""
    test = x["condition"].root
    (param,) = x["body"].params
    (tested,) = x["condition"].params
    if test.op != "compare" or test["direction"] != "LT" or test.operands[1].op != "constant":
        return None, 0
    count = test.operand
    if count.op != "get-tuple-element" or count.operand is not tested:
        return None, 0
    element = instr("get-tuple-element", (param,), index=count["index"])
    start = x.operand.operands[count["index"]]
    if (
        start.op != "constant"
        or start["literal"].numpy() != 0
        or _line(x["body"].root.operands[count["index"]], element) != (1, 1)
    ):
        return None, 0
    return element, int(test.operands[1]["literal"].numpy())


def _line(x: Instruction, counter: Instruction) -> tuple[int, int] | None:
    """(a, b) of an index that is a * counter + b."""
    if x is counter:
        return 1, 0
    if x.op == "constant":
        return 0, int(x["literal"].numpy())
    if x.op == "convert" and x.kind in "su":
        return _line(x.operand, counter)
    if x.op not in ("add", "subtract"):
        return None
    p, q = (_line(o, counter) for o in x.operands)
    sign = -1 if x.op == "subtract" else 1
    return None if p is None or q is None else (p[0] + sign * q[0], p[1] + sign * q[1])


def _is_covered(
    result: Instruction, element: Instruction, counter: Instruction, turns: int
) -> bool:
    """Whether `result` is `element` with another one of its `turns` slices written in every
    turn."""
    if (
        result.op != "dynamic-update-slice"
        or result.operand is not element
        or element.dims[0] != turns
    ):
        return False
    return result.operands[1].dims == (1, *element.dims[1:]) and _line(
        result.operands[2], counter
    ) in ((1, 0), (-1, turns - 1))
