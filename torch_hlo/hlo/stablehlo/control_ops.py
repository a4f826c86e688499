"""Rules of calls, composites and control flow."""

from ..ir import build as b, tuple_shape
from .attributes import Symbol
from .converter import Context, Made, rule, unpacked


@rule("func.call", "composite")
def _call(c: Context) -> Made:
    """The meaning of a composite, a named group of operations, is its decomposition."""
    callee = c.attr("callee", "decomposition")
    if not isinstance(callee, Symbol):
        raise c.error("expected the function's @name")
    return c.converter.call(c, callee.name)


@rule("async_start")
def _async_start(c: Context) -> Made:
    """It runs at once: its future is there already."""
    return b.tuple_(*c.converter.inner_block(c, c.op.regions[0], c.x))


@rule("async_done")
def _async_done(c: Context) -> Made:
    return unpacked(c.x[0], len(c.types))


@rule("while")
def _while(c: Context) -> Made:
    cond, body = c.op.regions[:2]
    names, groups = c.converter.captured(c, (cond, body))
    state = b.tuple_(*c.x, *(v for group in groups for v in group))
    shape = tuple_shape(*(o.shape for o in state.operands))
    returned = body.ops[-1].operands if body.ops else []
    constant = [
        i for i, ((arg, _), value) in enumerate(zip(body.args, returned)) if value == (arg, 0)
    ]
    condition = c.converter.open_region(c, cond, state, names, groups, "condition", constant)
    loop = c.converter.open_region(c, body, state, names, groups, "body", constant)
    for before, after in zip(shape.elements, loop.root.elements):
        for p, q in zip(before.dims, after.dims):
            if p != q:
                c.converter.unify(p, q)
    return unpacked(b.while_(condition, loop, state), len(c.x))


@rule("case", "if")
def _case(c: Context) -> Made:
    names, groups = c.converter.captured(c, c.op.regions)
    operand = b.tuple_(*(v for group in groups for v in group))
    branches = [
        c.converter.open_region(c, region, operand, names, groups, f"branch{i}")
        for i, region in enumerate(c.op.regions)
    ]
    if not branches:
        raise c.error("has no branches")
    if any(branch.root.operands for branch in branches):  # also where there are effects alone
        done = b.tuple_(b.constant(True, "pred"))
        branches = [y if y.root.operands else y.with_root(done) for y in branches]
    x = b.conditional(c.x[0], branches, [operand] * len(branches))
    return [b.get_tuple_element(x, i) for i in range(len(x.elements))]
