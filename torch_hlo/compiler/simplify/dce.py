"""Values that nobody reads. Instructions that the root does not reach are not part of a program to
begin with; what is left are elements of tuples that one instruction makes at once: loop state,
conditional results, extra operands of sort, reduce and the like.

    while((i, x, unused))      ->  while((i, x))
    while((i, constant))       ->  while((i)), the constant moved into the body, when the body hands
        it on unchanged
"""

from __future__ import annotations

from torch_hlo.hlo.ir import (
    OPCODES,
    Computation,
    Instruction,
    Module,
    Replacements,
    all_or_none,
    build as h,
    called,
    carry_meta,
    instr,
    postorder,
    rebuild,
    replace,
    tuple_shape,
    with_computations,
)

from ..hlo_pass import hlo_pass


@hlo_pass
def dce(module: Module) -> Module:
    """Drop tuple elements that nobody reads. Every change makes a tuple shorter."""
    return module.with_root(_shrink_root(module.entry.root, {}))


def _shrink_computation(c: Computation, memo: dict[Computation, Computation]) -> Computation:
    found = memo.get(c)
    if found is None:
        root = _shrink_root(c.root, memo)
        found = memo[c] = c.with_root(root)
    return found


def _shrink_root(root: Instruction, memo: dict[Computation, Computation]) -> Instruction:
    order = postorder((root,))
    if not any(x.op in _SHRINK or x.attrs and called(x) for x in order):
        return root
    reads = _reads(order, root)
    done: Replacements = {}
    kept: dict[Instruction, list[int]] = {}  # shrunk instruction -> surviving elements
    for x in order:
        operands = tuple([done[o] for o in x.operands])
        if x.op == "get-tuple-element" and x.operand in kept:
            left = kept[x.operand]
            source = operands[0]
            done[x] = (
                h.get_tuple_element(source, left.index(x["index"])) if source.is_tuple else source
            )
            continue
        y = x if operands == x.operands else replace(x, operands)
        if y.attrs and y.op != "fusion" and (inner := called(y)):
            y = with_computations(y, {c: _shrink_computation(c, memo) for c in inner})
        shrink = _SHRINK.get(x.op)
        if shrink is not None and x.is_tuple and x in reads:
            smaller = shrink(y, reads[x])
            if smaller is not None:
                y, kept[x] = smaller
        carry_meta(x, y)
        done[x] = y
    return done[root]


def _reads(order: list[Instruction], root: Instruction) -> dict[Instruction, set[int]]:
    """Elements read of each tuple-valued instruction; those used as a whole are left out."""
    found: dict[Instruction, set[int]] = {x: set() for x in order if x.op in _SHRINK and x.is_tuple}
    found.pop(root, None)
    for x in order:
        for o in x.operands:
            if o in found:
                if x.op == "get-tuple-element":
                    found[o].add(x["index"])
                else:
                    del found[o]
    return found


def _elements_used(root: Instruction, param: Instruction) -> set[int] | None:
    """Elements of the tuple `param` that `root` depends on; None when it uses the tuple as a
    whole."""
    found = set()
    for x in postorder((root,)):
        if param in x.operands:
            if x.op != "get-tuple-element":
                return None
            found.add(x["index"])
    return None if root is param else found


def _shrink_while(x: Instruction, read: set[int]) -> tuple[Instruction, list[int]] | None:
    body = x["body"]
    condition = x["condition"]
    state = x.operand
    n = len(x.elements)
    if body.root.op != "tuple" or any(
        "impure" in OPCODES[i.op].traits for i in body.instructions()
    ):
        return None
    needs = all_or_none(_elements_used(r, body.params[0]) for r in body.root.operands)
    tested = _elements_used(condition.root, condition.params[0])
    if tested is None or needs is None:
        return None
    param = body.params[0]
    constants = {
        i: initial
        for i in range(n)
        if _is_constant(initial := h.get_tuple_element(state, i))
        and body.root.operands[i] is instr("get-tuple-element", (param,), index=i)
    }
    live = set()
    pending = list((read | tested) - constants.keys())
    while pending:
        i = pending.pop()
        if i not in live:
            live.add(i)
            pending.extend(j for j in needs[i] if j not in live and j not in constants)
    kept = sorted(live | read)
    if len(kept) == n:
        return None
    shape = tuple_shape(*(x.elements[i] for i in kept))
    new_param = h.parameter(0, shape)

    def moved(c: Computation, outputs: list[int] | None) -> Computation:
        table = {}
        for i in range(n):
            element = instr("get-tuple-element", (c.params[0],), index=i)
            if i in constants:
                table[element] = constants[i]
            elif i in kept:
                table[element] = h.get_tuple_element(new_param, kept.index(i))
        if outputs is None:
            return Computation(c.name, (new_param,), rebuild(c.root, table))
        results = rebuild(instr("tuple", tuple(c.root.operands[i] for i in outputs)), table)
        fixed = [
            h.get_tuple_element(new_param, k) if i in constants else r
            for k, (i, r) in enumerate(zip(outputs, results.operands))
        ]
        return Computation(c.name, (new_param,), h.tuple_(*fixed))

    start = h.tuple_(*(h.get_tuple_element(state, i) for i in kept))
    return h.while_(moved(condition, None), moved(body, kept), start), kept


def _is_constant(x: Instruction) -> bool:
    return x.op in ("constant", "iota") or x.op == "broadcast" and x.operand.op == "constant"


def _shrink_conditional(x: Instruction, read: set[int]) -> tuple[Instruction, list[int]] | None:
    branches = x["branch_computations"]
    if len(read) == len(x.elements) or any(c.root.op != "tuple" for c in branches):
        return None
    kept = sorted(read)
    smaller = [
        Computation(c.name, c.params, h.tuple_(*(c.root.operands[i] for i in kept)))
        for c in branches
    ]
    return h.conditional(x.operand, smaller, x.operands[1:]), kept


def _shrink_sort(x: Instruction, read: set[int]) -> tuple[Instruction, list[int]] | None:
    comparator = x["to_apply"]
    compared = {p["index"] // 2 for p in postorder((comparator.root,)) if p.op == "parameter"}
    kept = sorted(read | compared)
    if len(kept) == len(x.operands) or not kept:
        return None
    params = [
        h.parameter(2 * k + side, comparator.params[2 * i + side].shape)
        for k, i in enumerate(kept)
        for side in (0, 1)
    ]
    old = [comparator.params[2 * i + side] for i in kept for side in (0, 1)]
    smaller = Computation(
        comparator.name,
        tuple(params),
        rebuild(comparator.root, dict(zip(old, params))),
    )
    return h.sort([x.operands[i] for i in kept], x["dimensions"][0], smaller, x["is_stable"]), kept


def _shrink_reduce(x: Instruction, read: set[int]) -> tuple[Instruction, list[int]] | None:
    """Results of a variadic reduce that neither are read nor take part in those that are."""
    c = x["to_apply"]
    n = len(x.elements)
    if c.root.op != "tuple":
        return None
    needs = [
        {p["index"] % n for p in postorder((r,)) if p.op == "parameter"} for r in c.root.operands
    ]
    live = set()
    pending = list(read)
    while pending:
        i = pending.pop()
        if i not in live:
            live.add(i)
            pending.extend(needs[i])
    kept = sorted(live)
    if len(kept) == n or not kept:
        return None
    old = [c.params[i] for i in kept] + [c.params[n + i] for i in kept]
    params = [h.parameter(k, p.shape) for k, p in enumerate(old)]
    roots = rebuild(instr("tuple", tuple(c.root.operands[i] for i in kept)), dict(zip(old, params)))
    root = roots.operand if len(kept) == 1 else roots
    attrs = {
        **dict(x.attrs),
        "to_apply": Computation(c.name, tuple(params), root),
    }
    return (
        instr(
            x.op,
            tuple(x.operands[i] for i in kept) + tuple(x.operands[n + i] for i in kept),
            **attrs,
        ),
        kept,
    )


_SHRINK = {
    "while": _shrink_while,
    "conditional": _shrink_conditional,
    "sort": _shrink_sort,
    "reduce": _shrink_reduce,
    "reduce-window": _shrink_reduce,
}
