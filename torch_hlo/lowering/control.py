"""Loops for lowerings: `while_loop` over a tuple of Exprs."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_hlo.hlo.build import reduce
from torch_hlo.hlo.ir import Computation, instr
from torch_hlo.hlo.shape import Shape, tuple_shape
from torch_hlo.lowering import promote
from torch_hlo.lowering.expr import Expr


def while_loop(condition: Callable, body: Callable, state: Sequence[Expr], limit: int | None = None) -> tuple[Expr, ...]:
    """Repeat `body(*state) -> state` while any element of `condition(*state)` holds, at most `limit` times."""
    values = (Expr(promote.constant(0, "s64")), *state)
    shape = tuple_shape(*(v.x.shape for v in values))
    param = instr("parameter", (), shape, index=0)
    inner = tuple(Expr(instr("get-tuple-element", (param,), index=i)) for i in range(len(values)))
    holds = condition(*inner[1:])
    if holds.dims:
        holds = Expr(reduce(holds.x, promote.constant(False, "pred"), tuple(range(len(holds.dims))), "or"))
    if limit is not None:
        holds = holds & (inner[0] < limit)
    after = (inner[0] + 1, *body(*inner[1:]))
    for before, new in zip(inner, after, strict=True):
        if before.x.shape != new.x.shape:
            raise ValueError(f"loop state changes from {before.x.shape} to {new.x.shape}")
    root = instr("tuple", tuple(v.x for v in after), shape)
    start = instr("tuple", tuple(v.x for v in values), shape)
    loop = instr("while", (start,), shape, condition=Computation("condition", (param,), holds.x), body=Computation("body", (param,), root))
    return tuple(Expr(instr("get-tuple-element", (loop,), index=i)) for i in range(1, len(values)))


def parameters(*shapes: Shape) -> tuple[Expr, ...]:
    """Parameters of a computation."""
    return tuple(Expr(instr("parameter", (), s, index=i)) for i, s in enumerate(shapes))
