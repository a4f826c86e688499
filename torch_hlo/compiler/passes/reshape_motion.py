"""Reshapes, transposes and broadcasts move outward (towards the users), where they meet and cancel, or end in a dot.

    add(reshape(a), broadcast(b))  ->  reshape(add(a, broadcast(b)))
    exponential(broadcast(x))      ->  broadcast(exponential(x))          less work
    reduce(transpose(x))           ->  reduce(x)

A pointwise instruction moves when every operand is one of the same kind or can be rearranged for free (uniform constants, broadcasts).
"""
from __future__ import annotations

from collections.abc import Sequence

from torch_hlo.compiler.passes.base import hlo_pass
from torch_hlo.compiler.passes.moves import groups, reshape_broadcast
from torch_hlo.hlo import build as h
from torch_hlo.hlo.dim import Dim, Size
from torch_hlo.hlo.ir import Instruction, Module, instr
from torch_hlo.hlo.match import op, rewrite, rules, splat
from torch_hlo.hlo.opcodes import OPCODES

POINTWISE = " ".join(name for name, row in OPCODES.items() if "pointwise" in row.traits and "composite" not in row.traits)


def _rebuilt(out: Instruction, operands: Sequence[Instruction]) -> Instruction:
    """The pointwise `out` on operands of other dims."""
    return instr(out.op, tuple(operands), out.shape.with_dims(operands[0].shape.dims), **dict(out.attrs))


def equal_dims(out: Instruction) -> bool:
    """False for a clamp with scalar bounds."""
    return all(o.shape.dims == out.shape.dims for o in out.operands)


def pointwise_of_broadcasts(out: Instruction) -> Instruction | None:
    """f(broadcast(x), broadcast(y)) -> broadcast(f(x, y)) when both repeat along the same dimensions"""
    first = next((o for o in out.operands if o.op == "broadcast" and o.operands[0].shape.rank), None)
    if first is None:
        return None
    dimensions, dims = first["dimensions"], first.operands[0].shape.dims
    operands = []
    for o in out.operands:
        if o.op == "broadcast" and o["dimensions"] == dimensions:
            operands.append(o.operands[0])
        elif splat(o) is not None or o.op == "broadcast" and not o.operands[0].shape.rank:
            operands.append(h.broadcast(o.operands[0], dims, ()))
        else:
            return None
    return h.broadcast(_rebuilt(out, operands), out.shape.dims, dimensions)


def pointwise_of_scalars(out: Instruction) -> Instruction | None:
    """f(broadcast(scalar), broadcast(scalar)) -> broadcast(f(scalar, scalar))"""
    if not out.operands or not out.shape.rank or any(o.op != "broadcast" or o.operands[0].shape.rank for o in out.operands):
        return None
    return h.broadcast(_rebuilt(out, [o.operands[0] for o in out.operands]), out.shape.dims, ())


def _with_dims(o: Instruction, dims: tuple[Size, ...]) -> Instruction | None:
    """`o` reshaped to `dims` without a reshape of its own, or None."""
    if o.op == "reshape":
        return o.operands[0] if o.operands[0].shape.dims == dims else None
    if splat(o) is not None or o.op == "broadcast" and not o.operands[0].shape.rank:
        return h.broadcast(o.operands[0] if o.op == "broadcast" else o, dims, ())
    if o.op == "broadcast":
        moved = reshape_broadcast(instr("reshape", (o,), o.shape.with_dims(dims)), o, o.operands[0])
        # A broadcast of a new reshape is free too: the reshape is of the smaller array.
        return moved
    return None


def pointwise_of_reshapes(out: Instruction) -> Instruction | None:
    """f(reshape(x), reshape(y)) -> reshape(f(x, y))"""
    reshaped = next((o for o in out.operands if o.op == "reshape"), None)
    if reshaped is None:
        return None
    dims = reshaped.operands[0].shape.dims
    operands = []
    for o in out.operands:
        moved = _with_dims(o, dims)
        if moved is None:
            return None
        operands.append(moved)
    return h.reshape(_rebuilt(out, operands), out.shape.dims)


def pointwise_of_transposes(out: Instruction) -> Instruction | None:
    """f(transpose(x), transpose(y)) -> transpose(f(x, y))"""
    transposed = next((o for o in out.operands if o.op == "transpose"), None)
    if transposed is None:
        return None
    perm = transposed["dimensions"]
    dims = transposed.operands[0].shape.dims
    operands = []
    for o in out.operands:
        if o.op == "transpose" and o["dimensions"] == perm:
            operands.append(o.operands[0])
        elif o.op == "broadcast" and o.operands[0].shape.rank < o.shape.rank:
            places = [perm[d] for d in o["dimensions"]]
            order = sorted(range(len(places)), key=places.__getitem__)
            operands.append(h.broadcast(h.transpose(o.operands[0], order), dims, sorted(places)))
        else:
            return None
    return h.transpose(_rebuilt(out, operands), perm)


def reduce_of_transposes(out: Instruction) -> Instruction | None:
    """reduce(transpose(x), dims) -> transpose(reduce(x, dims before)): the kept dimensions move, if any"""
    n = len(out.operands) // 2
    first = out.operands[0]
    if n != 1 or first.op != "transpose":
        return None
    perm = first["dimensions"]
    before = sorted(perm[d] for d in out["dimensions"])
    kept = [d for d in range(len(perm)) if d not in before]
    order = [kept.index(perm[d]) for d in range(len(perm)) if d not in out["dimensions"]]
    reduced = instr("reduce", (first.operands[0], out.operands[1]), dimensions=tuple(before), to_apply=out["to_apply"])
    return h.transpose(reduced, order)


def reduce_of_reshapes(out: Instruction) -> Instruction | None:
    """reduce(reshape(x)) -> reshape(reduce(x)) when whole groups of dimensions are reduced"""
    if len(out.operands) != 2 or out.operands[0].op != "reshape":
        return None
    reshaped = out.operands[0]
    x = reshaped.operands[0]
    before: list[int] = []
    for left, right in groups(x.shape.dims, reshaped.shape.dims) or ():
        inside = [d for d in right if d in out["dimensions"]]
        others = [d for d in right if d not in inside]
        if not inside or all(reshaped.shape.dims[d] == 1 for d in inside) and others:
            continue
        if any(reshaped.shape.dims[d] != 1 for d in others):
            return None
        before += [d for d in left if x.shape.dims[d] != 1]
    if not before:
        return None
    reduced = instr("reduce", (x, out.operands[1]), dimensions=tuple(before), to_apply=out["to_apply"])
    return h.reshape(reduced, out.shape.dims)


def reduce_of_broadcast(out: Instruction) -> Instruction | None:
    """maximum over repeated dimensions (also minimum, and, or) -> the value itself"""
    first = out.operands[0]
    if len(out.operands) != 2 or first.op != "broadcast" or out["to_apply"].root.op not in ("maximum", "minimum", "and", "or"):
        return None
    root, params = out["to_apply"].root, out["to_apply"].params
    idle = [d for d in out["dimensions"] if d not in first["dimensions"]]
    if not idle or set(root.operands) != set(params) or any(isinstance(s, Dim) or s == 0 for s in first.shape.dims):
        return None
    kept = [d for d in range(first.shape.rank) if d not in idle]
    smaller = h.broadcast(first.operands[0], [first.shape.dims[d] for d in kept], [kept.index(d) for d in first["dimensions"]])
    rest = tuple(kept.index(d) for d in out["dimensions"] if d not in idle)
    return instr("reduce", (smaller, out.operands[1]), dimensions=rest, to_apply=out["to_apply"])


RULES = rules(
    (op(POINTWISE, where=equal_dims), pointwise_of_scalars),
    (op(POINTWISE, where=equal_dims), pointwise_of_broadcasts),
    (op(POINTWISE, where=equal_dims), pointwise_of_reshapes),
    (op(POINTWISE, where=equal_dims), pointwise_of_transposes),
    (op("reduce"), reduce_of_transposes),
    (op("reduce"), reduce_of_reshapes),
    (op("reduce"), reduce_of_broadcast),
)


@hlo_pass
def reshape_motion(module: Module) -> Module:
    """Move rearrangements outward. Every firing brings one closer to the root, or makes an array smaller."""
    return rewrite(module, RULES)
