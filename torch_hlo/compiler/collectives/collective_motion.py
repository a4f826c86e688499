"""Collectives of values that a loop does not change run once, before the loop.

while (w, …) { full = all-gather(w); … }   ->   full = all-gather(w); while (w, full, …) { … }
"""

from torch_hlo.hlo.ir import (
    OPCODES,
    Computation,
    Instruction,
    Module,
    Replacements,
    build as h,
    called,
    postorder,
    replace,
    tuple_shape,
)

from ..hlo_pass import hlo_pass, over_loops

MOVED = frozenset(
    "all-gather all-reduce reduce-scatter all-to-all collective-permute"
    " collective-broadcast".split()
)


@hlo_pass
def collective_motion(module: Module) -> Module:
    """Collectives of loop-invariant values leave the loop."""
    return over_loops(module, _hoisted)


def _hoisted(loop: Instruction) -> Instruction:
    """The loop with its invariant collectives before it; itself when there are none."""
    body = loop["body"]
    condition = loop["condition"]
    (state,) = loop.operands
    if body.root.op != "tuple" or not state.is_tuple:
        return loop
    (param,) = body.params
    kept = {
        o
        for i, o in enumerate(body.root.operands)
        if o.op == "get-tuple-element" and o["index"] == i and o.operand is param
    }
    invariant: dict[Instruction, bool] = {param: False}
    found = []
    for x in postorder((body.root,)):
        if x in invariant:
            continue
        free = x.op in MOVED or "impure" not in OPCODES[x.op].traits
        invariant[x] = (
            x in kept
            or free
            and not any(c for c in called(x) if x.op not in MOVED)
            and all(invariant[o] for o in x.operands)
        )
        if x.op in MOVED and invariant[x]:
            found.append(x)
    # Of chains of collectives only the last one has to come back.
    inner = {o for x in found for o in postorder((x,)) if o is not x}
    found = [x for x in found if x not in inner]
    if not found:
        return loop
    outside: Replacements = {o: h.get_tuple_element(state, o["index"]) for o in kept}
    for x in postorder(found, known=kept):
        outside[x] = x if not x.operands else replace(x, [outside[o] for o in x.operands])
    count = len(state.elements)
    more = [outside[x] for x in found]
    whole = h.tuple_(*(h.get_tuple_element(state, i) for i in range(count)), *more)

    wide = h.while_(_widened(condition, found, False), _widened(body, found, True), whole)
    return h.tuple_(*(h.get_tuple_element(wide, i) for i in range(count)))


def _widened(c: Computation, found: list[Instruction], roots: bool) -> Computation:
    """The condition or body of the loop with what was `found` at the end of its state. `roots`: the
    body, which reads it and hands it on."""
    (old,) = c.params
    count = len(old.elements)
    new_param = h.parameter(old["index"], tuple_shape(*old.elements, *(x.shape for x in found)))
    new: Replacements = {old: h.tuple_(*(h.get_tuple_element(new_param, i) for i in range(count)))}
    if roots:
        new.update((x, h.get_tuple_element(new_param, count + k)) for k, x in enumerate(found))
    for x in postorder((c.root,), known=new):
        operands = [new[o] for o in x.operands]
        new[x] = (
            h.get_tuple_element(operands[0], x["index"])
            if x.op == "get-tuple-element"
            else replace(x, operands)
            if operands
            else x
        )
    root = new[c.root]
    if roots:
        passed = [h.get_tuple_element(new_param, count + k) for k in range(len(found))]
        root = h.tuple_(*root.operands, *passed)
    return Computation(c.name, (new_param,), root)
