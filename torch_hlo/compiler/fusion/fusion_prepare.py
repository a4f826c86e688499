"""Rewrites that let fusion keep large values out of memory; run at the start of the fusion pass.

gather(subtract(x, broadcast(m)), i)     ->  subtract(gather(x, i), gather(broadcast(m), i))
    a few elements are picked
reduce(select(iota == t, g, 0), add)     ->  select(0 <= t < n, g, 0)
    the sum over a one-hot row
reduce(x[n, r, c]), few columns c        ->  reduce(reduce(x[n, r/k, k*c]))
    the first fills vectors
reduce(reduce(x[n, c, h, w]))            ->  reduce(x[n, g, c/g*h*w])
    groups of whole channels are rows
broadcast(reshape(broadcast(m[n, g])))   ->  reshape(broadcast(m[n, g]))
    what rows share
s64 iota == broadcast(t)                 ->  s32 iota == broadcast(t if 0 <= t < n else -1)
    half the lanes
"""

import math
from collections.abc import Container, Mapping, Sequence

from torch_hlo.hlo.ir import (
    Dim,
    Dims,
    Instruction,
    Ints,
    Replacements,
    all_or_none,
    build as b,
    on_operands,
    postorder,
    replace,
    rewrite_bottom_up,
    substituted,
    users,
)

from . import fusion_table as table
from .fusion_table import FREE, HEAVY, LIGHT, STEP

FEWER = 8  # a move that picks at most one in this many elements is small
MAX_OPS = 16
WIDE = 128  # columns that make a reduction over rows fast
FEW_COLUMNS = 32
_PICKS = frozenset(("slice", "gather", "dynamic-slice"))


def prepare(root: Instruction) -> Instruction:
    """The root of a computation after the rewrites."""
    reads = users((root,))
    small = {x for x in reads if x.op in _PICKS and _is_small(x)}

    # Moves are decided on the graph as it is, before anything is replaced.
    moved = {}
    for x in small:
        v = x.operand
        while v.op == "reshape":
            v = v.operand
        if (
            table.classify(v) in (LIGHT, HEAVY)
            and v is not root
            and not _needs_memory(v, reads, small, root)
        ):
            found = _push(x, x.operand, [MAX_OPS])
            if found is not None:
                moved[x] = found
    root = _with_rows(substituted(root, moved) if moved else root)
    return rewrite_bottom_up(
        root,
        lambda x: one_hot_sum(x) or narrow_compare(x) or widen_columns(x) or x,
    )


def _with_rows(root: Instruction) -> Instruction:
    """Reductions of reductions as one over rows, where nothing else reads the first ones, and what
    such rows share repeated in one step."""
    reads = users((root,))
    done: Replacements = {}
    for x in postorder((root,)):
        new = on_operands(x, done)
        if x.op == "reduce" and _only_reader(x.operand, reads):
            new = sum_of_sums(new) or new
        elif x.op == "broadcast":
            new = shared_by_rows(new) or new
        done[x] = new
    return done[root]


def _only_reader(x: Instruction, reads: Mapping[Instruction, Sequence[Instruction]]) -> bool:
    while x.op == "reshape" and len(reads[x]) == 1:
        x = x.operand
    return len(reads[x]) == 1


def sum_of_sums(x: Instruction) -> Instruction | None:
    """reduce(reshape(reduce(y))) where both fold trailing dimensions."""
    outer = x.operand
    inner = _without_views(x.operand)
    if (
        x.is_tuple
        or inner.op != "reduce"
        or inner.is_tuple
        or inner["to_apply"] is not x["to_apply"]
    ):
        return None
    y, init = inner.operands
    if not (
        _are_last(x["dimensions"], outer)
        and _are_last(inner["dimensions"], y)
        and _ignores(init, x["to_apply"].root.op)
    ):
        return None
    if not x.rank or not y.is_static or not x.size:
        return None
    rows = b.reshape(y, (*x.dims, y.size // x.size))
    return b.reduce(rows, x.operands[1], (x.rank,), x["to_apply"])


def shared_by_rows(x: Instruction) -> Instruction | None:
    """broadcast(reshape(broadcast(m))) where both repeat along trailing dimensions."""
    wide = x.operand
    inner = _without_views(wide)
    if wide is inner or inner.op != "broadcast" or not inner.operand.rank or not x.is_static:
        return None
    m = inner.operand
    if inner["dimensions"] != tuple(range(m.rank)) or x["dimensions"] != tuple(range(wide.rank)):
        return None
    if m.dims != inner.dims[: m.rank] or wide.dims != x.dims[: wide.rank] or not m.size:
        return None
    return b.reshape(b.broadcast(m, (*m.dims, x.size // m.size), inner["dimensions"]), x.dims)


def _without_views(x: Instruction) -> Instruction:
    while x.op in ("reshape", "opt-barrier") and not x.is_tuple:
        x = x.operand
    return x


def _are_last(dims: Ints, x: Instruction) -> bool:
    return sorted(dims) == list(range(x.rank - len(dims), x.rank))


def _is_small(x: Instruction) -> bool:
    a = x.size
    size = x.operand.size
    return isinstance(a, int) and isinstance(size, int) and a * FEWER <= size


def _needs_memory(
    v: Instruction,
    reads: Mapping[Instruction, Sequence[Instruction]],
    small: Container[Instruction],
    root: Instruction,
) -> bool:
    """True when something other than elementwise instructions and small moves reads `v`."""
    stack = [v]
    seen = {v}
    while stack:
        for u in reads[stack.pop()]:
            if u is root:
                return True
            if u.op in ("reshape", "broadcast"):
                if u not in seen:
                    seen.add(u)
                    stack.append(u)
            elif u not in small and table.classify(u) not in (
                LIGHT,
                HEAVY,
                table.REDUCE,
            ):
                return True
    return False


def _push(move: Instruction, v: Instruction, budget: list[int]) -> Instruction | None:
    """`move` applied to what the elementwise `v` is computed from; None when that reads another
    large computed value."""
    base = v
    while base.op == "reshape":
        base = base.operand
    kind = table.classify(base)
    if (
        kind in (LIGHT, HEAVY)
        and base.op != "get-tuple-element"
        and all(o.dims == base.dims or not o.dims for o in base.operands)
    ):
        budget[0] -= 1
        if budget[0] < 0:
            return None
        # What is picked from a reshaped value is picked from its reshaped operands.
        parts = all_or_none(
            _push(move, b.reshape(o, v.dims), budget) if o.dims else o for o in base.operands
        )
        if parts is None:
            return None
        return replace(base, parts, base.shape.with_dims(move.dims))
    kind = table.classify(v)
    if kind not in (STEP, FREE) or kind == FREE and not _reads_memory(v):
        return None
    return replace(move, (v, *move.operands[1:]), v.shape.with_dims(move.dims))


def _reads_memory(v: Instruction) -> bool:
    """A broadcast (of something smaller), an iota, a constant, or a view of an array in memory."""
    while v.op == "reshape":
        v = v.operand
    if v.op == "broadcast":
        size = v.size
        small = v.operand.size
        return isinstance(size, int) and isinstance(small, int) and small * FEWER <= size
    return table.classify(v) in (STEP, FREE)


def one_hot_sum(x: Instruction) -> Instruction | None:
    """reduce(select(compare(iota, broadcast(t)), broadcast(g), 0), 0, add) along the iota's
    dimension."""
    if (
        x.op != "reduce"
        or x.is_tuple
        or len(x["dimensions"]) != 1
        or x["to_apply"].root.op != "add"
    ):
        return None
    chosen, init = x.operands
    (d,) = x["dimensions"]
    if chosen.op != "select" or not _is_zero(init) or not _is_zero(chosen.operands[2]):
        return None
    test, value, _ = chosen.operands
    if test.op != "compare" or test["direction"] != "EQ" or isinstance(chosen.dims[d], Dim):
        return None
    numbers, target = test.operands if test.operand.op == "iota" else test.operands[::-1]
    if numbers.op != "iota" or numbers["iota_dimension"] != d or numbers.kind not in "su":
        return None
    t = _without(target, d, x.dims)
    g = _without(value, d, x.dims)
    if t is None or g is None:
        return None
    n = chosen.dims[d]
    inside = b.compare(t, b.full_like(t, n), "LT")
    if t.kind == "s":
        inside = b.and_(inside, b.compare(t, b.full_like(t, 0), "GE"))
    return b.select(inside, g, b.full_like(g, 0))


def widen_columns(x: Instruction) -> Instruction | None:
    """A reduction over dimensions right before a few kept columns: first over fewer rows of k times
    as many columns, then over k."""
    if x.op != "reduce" or x.is_tuple or not x.operand.is_static or not x.size:
        return None
    source, init = x.operands
    if any(_is_of_integers(o) for o in source.operands):
        return None  # few bytes: partial sums would be as many
    dims = source.shape.sizes
    gone = x["dimensions"]
    first = len(dims)
    while first and first - 1 not in gone:
        first -= 1
    columns = math.prod(dims[first:])
    last = first
    while first and first - 1 in gone:
        first -= 1
    rows = math.prod(dims[first:last])
    if not 1 < columns <= FEW_COLUMNS or not _ignores(init, x["to_apply"].root.op):
        return None
    k = math.gcd(rows, 1 << (WIDE // columns).bit_length() - 1)
    if k < 4 or rows < 4 * k:
        return None
    wide = b.reduce(
        b.reshape(source, (*dims[:first], rows // k, k * columns)),
        init,
        (*(d for d in gone if d < first), first),
        x["to_apply"],
    )
    kept = wide.rank - 1
    return b.reshape(
        b.reduce(b.reshape(wide, (*wide.dims[:-1], k, columns)), init, (kept,), x["to_apply"]),
        x.dims,
    )


def _is_of_integers(x: Instruction) -> bool:
    """Whether `x` is made of integers as it is read."""
    while x.op == "reshape":
        (x,) = x.operands
    return x.op == "convert" and x.operand.kind in "su"


def _ignores(init: Instruction, op: str) -> bool:
    """Whether an initial value may enter several times."""
    if init.op != "constant":
        return False
    value = init["literal"].numpy().reshape(-1)[0]
    return (
        op in ("maximum", "minimum", "and", "or")
        or op == "add"
        and value == 0
        or op == "multiply"
        and value == 1
    )


def narrow_compare(x: Instruction) -> Instruction | None:
    """compare(iota, broadcast(t)) for equality, in 32 bits where the iota fits and `t` is smaller
    than the result."""
    if x.op != "compare" or x["direction"] not in ("EQ", "NE"):
        return None
    numbers, target = x.operands if x.operand.op == "iota" else x.operands[::-1]
    if numbers.op != "iota" or numbers.dtype != "s64" or target.op != "broadcast":
        return None
    n = numbers.dims[numbers["iota_dimension"]]
    t = target.operand
    size = x.size
    if (
        not isinstance(n, int)
        or n >= 1 << 31
        or not isinstance(size, int)
        or not isinstance(t.size, int)
        or t.size * FEWER > size
    ):
        return None
    inside = b.and_(b.compare(t, b.full_like(t, 0), "GE"), b.compare(t, b.full_like(t, n), "LT"))
    narrow = b.convert(b.select(inside, t, b.full_like(t, -1)), "s32")
    return b.compare(
        b.iota("s32", x.dims, numbers["iota_dimension"]),
        b.broadcast(narrow, x.dims, target["dimensions"]),
        x["direction"],
    )


def _is_zero(x: Instruction) -> bool:
    while x.op in ("broadcast", "reshape"):
        x = x.operand
    return x.op == "constant" and x.size == 1 and not any(x["literal"].data)


def _without(x: Instruction, d: int, dims: Dims) -> Instruction | None:
    """`x`, a broadcast that does not vary along dimension `d`, without that dimension."""
    if x.op != "broadcast":
        return None
    source = x.operand
    if d in x["dimensions"] or any(n != x.dims[k] for n, k in zip(source.dims, x["dimensions"])):
        return None
    return b.broadcast(source, dims, tuple(k - (k > d) for k in x["dimensions"]))
