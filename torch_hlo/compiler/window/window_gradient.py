"""window_gradient: select-and-scatter for a device whose threads have one element each.

Two steps without conflicts: each window finds the number of the element that it selects, and each
element adds up the sources of the windows over it that selected it.
"""

import itertools
import math

from torch_hlo.hlo.ir import Instruction, Ints, Module, build as h, fixed, lift, op, rewrite, rules

from ..hlo_pass import hlo_pass

MOST_WINDOWS = 16  # over one element, that are looked at one by one


def looked_at(out: Instruction) -> Instruction | None:
    """select-and-scatter with the scatter "add" -> slices, comparisons and sums; None where too
    many windows overlap, or sizes are symbolic."""
    _, source, init = out.operands
    window = out["window"]
    if (
        not all(o.is_static for o in out.operands)
        or out["scatter"].root.op != "add"
        or any(w.base_dilation != 1 for w in window)
    ):
        return None
    over = [-(-((w.size - 1) * w.window_dilation + 1) // w.stride) for w in window]
    if (
        math.prod(over) > MOST_WINDOWS
        or out.size == 0
        or source.size == 0
        or fixed(out.size) >= 1 << 31
    ):
        return None
    number = h.reshape(h.iota("s32", (out.size,), 0), out.dims)
    chosen = _chosen(out, number)
    # The last window that starts at or before the last element, and windows before the first that
    # `back` would reach.
    last = [(n - 1 + w.pad_low) // w.stride for n, w in zip(out.dims, window)]
    edges = [(o - 1, max(0, q + 1 - n), 0) for o, q, n in zip(over, last, source.dims)]
    choices = h.pad(chosen, h.constant(-1, "s32"), edges)
    sources = h.pad(source, h.constant(0, source.dtype), edges)
    total = h.broadcast(init, out.dims, ())
    for back in itertools.product(*(range(o) for o in over)):
        starts = [o - 1 - b for o, b in zip(over, back)]
        values = _spread(out, sources, starts, last)
        hit = h.compare(_spread(out, choices, starts, last), number, "EQ")
        total = h.add(total, h.select(hit, values, h.full_like(values, 0)))
    return total


def _chosen(out: Instruction, number: Instruction) -> Instruction:
    """For each window the number of the element that it selects."""
    x, source, _ = out.operands
    best = h.full(0, x.dtype, source.dims)
    chosen = h.full(-1, "s32", source.dims)
    none = h.full_like(chosen, 0)
    for offsets in itertools.product(*(range(w.size) for w in out["window"])):
        value = _tap(out, x, 0, offsets)
        at = _tap(out, number, -1, offsets)
        keeps = h.or_(
            h.compare(at, none, "LT"),
            h.and_(lift(out["select"], (best, value)), h.compare(chosen, none, "GE")),
        )
        best = h.select(keeps, best, value)
        chosen = h.select(keeps, chosen, at)
    return chosen


def _tap(out: Instruction, v: Instruction, outside: int, offsets: Ints) -> Instruction:
    """For each window the element of `v` at an offset in it, or `outside`."""
    window = out["window"]
    windows = out.operands[1].dims
    edges = [(w.pad_low, w.pad_high, 0) for w in window]
    starts = [o * w.window_dilation for o, w in zip(offsets, window)]
    limits = [s + (n - 1) * w.stride + 1 for s, n, w in zip(starts, windows, window)]
    padded = h.pad(v, h.constant(outside, v.dtype), edges)
    return h.slice_(padded, starts, limits, [w.stride for w in window])


def _spread(out: Instruction, v: Instruction, starts: list[int], last: list[int]) -> Instruction:
    """For each element the value of the window (position + padding) / stride - back, which is
    `starts` in the padded `v` for the first element."""
    window = out["window"]
    rank = out.rank
    v = h.slice_(v, starts, [s + q + 1 for s, q in zip(starts, last)])
    dims = [n for q, w in zip(last, window) for n in (q + 1, w.stride)]
    v = h.reshape(
        h.broadcast(v, dims, range(0, 2 * rank, 2)),
        [(q + 1) * w.stride for q, w in zip(last, window)],
    )
    low = [w.pad_low for w in window]
    return h.slice_(v, low, [p + n for p, n in zip(low, out.dims)])


RULES = rules((op("select-and-scatter"), looked_at))


@hlo_pass
def window_gradient(module: Module) -> Module:
    """Gradients of max pooling look at the windows over an element."""
    return rewrite(module, RULES)
