"""Blocks of opcodes with windows: convolution, reduce-window, select-and-scatter. Edges come from
the neighbours (halo.py)."""

from collections.abc import Sequence
from dataclasses import replace

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction, Ints, WindowDim, build as h, ceildiv, fixed, instr
from torch_hlo.hlo.ir.infer_products import conv_dims
from torch_hlo.hlo.sharding.factors import Factors

from . import halo
from .assign import Assignment
from .reshard import Local, Planner
from .rules import Site, localizes


@frozen
class Cut:
    """What a block of window positions needs of the base dimension: `size` elements from
    starts[block] on, and the window over them."""

    starts: list[int]
    size: int
    window: WindowDim


def cut_window(w: WindowDim, outputs: int, parts: int) -> Cut | None:
    """None when the blocks would need windows that differ: a dilated base whose holes fall
    differently in each block."""
    block = ceildiv(outputs, parts)
    return _cut(w, block * w.stride, block, fixed(w.size), parts)


def cut_taps(w: WindowDim, outputs: int, parts: int) -> Cut | None:
    """What a block of the window's elements needs, at all positions."""
    block = ceildiv(fixed(w.size), parts)
    return (
        None
        if w.reversal
        else _cut(replace(w, size=block), block * w.window_dilation, outputs, block, parts)
    )


def _cut(w: WindowDim, step: int, positions: int, taps: int, parts: int) -> Cut | None:
    """`step`: how far apart blocks are in the dilated base."""
    if step % w.base_dilation:
        return None
    reach = (positions - 1) * w.stride + (taps - 1) * w.window_dilation + 1  # in the dilated base
    first = [j * step - fixed(w.pad_low) for j in range(parts)]
    starts = [ceildiv(f, w.base_dilation) for f in first]
    low = starts[0] * w.base_dilation - first[0]
    size = max((reach - 1 - low) // w.base_dilation + 1, 1)
    high = reach - low - ((size - 1) * w.base_dilation + 1)
    return Cut(starts, size, replace(w, pad_low=low, pad_high=high))


def _spatial(x: Instruction) -> list[tuple[int, int, WindowDim]]:
    """(dimension of the operand, of the result, window) of every windowed dimension."""
    if x.op == "convolution":
        n = conv_dims(x["dim_labels"])
        return list(zip(n.lhs_spatial, n.out_spatial, x["window"], strict=True))
    return [(d, d, w) for d, w in enumerate(x["window"])]


def _price(
    p: Planner,
    x: Instruction,
    rule: Factors,
    atoms: Assignment,
    operands: Sequence[Local],
) -> float | None:
    total = 0.0
    for d, out, w in _spatial(x):
        factors = rule.operands[0][d]
        if not factors or rule.roles[factors[0]] == "free" or not atoms[factors[0]]:
            continue
        parts = p.grid.parts(atoms[factors[0]])
        found = (cut_taps if rule.roles[factors[0]] == "sum" else cut_window)(
            w, _positions(x)[out], parts
        )
        if found is None:
            return None
        operand = x.operand
        block = p.grid.block(
            operand.shape.sizes,
            tuple(sum((atoms[f] for f in d), ()) for d in rule.operands[0]),
        )
        others = operand.itemsize * halo.across(block, d)
        total += others * halo.cost(operand.shape.sizes[d], parts, found.starts, found.size)
    return total


def _positions(x: Instruction) -> Ints:
    """Numbers of window positions: the extents of the result, or of the source of a
    select-and-scatter."""
    if x.op == "select-and-scatter":
        return x.operands[1].shape.sizes
    return x.elements[0].sizes if x.is_tuple else x.shape.sizes


def _windowed(s: Site, local: Local, fill: Instruction) -> tuple[Instruction, list[WindowDim]]:
    """The part of the operand under this device's windows, and the windows over it."""
    window = []
    for d, out, w in _spatial(s.x):
        atoms = local.layout[d]
        if not atoms or w == WindowDim(1):
            window.append(w)
            continue
        found = (cut_window if s.choice.results[0][out] else cut_taps)(
            w, _positions(s.x)[out], s.p.grid.parts(atoms)
        )
        assert found is not None
        local = Local(
            halo.exchange(s.p, local, d, found.starts, found.size, fill),
            local.dims,
            local.layout,
        )
        window.append(found.window)
    return local.x, window


@localizes("convolution", roles="sum shift", price=_price)
def convolution(s: Site) -> list[Local]:
    p = s.p
    x = s.x
    n = conv_dims(x["dim_labels"])
    lhs, rhs = s.operands
    zero = h.constant(0, lhs.dtype)
    y, window = _windowed(s, lhs, zero)
    y = halo.masked(p, Local(y, lhs.dims, lhs.layout), zero, [n.lhs_feature])
    kernel = halo.masked(p, rhs, h.constant(0, rhs.dtype), [n.rhs_input, *n.rhs_spatial])
    groups = {}
    if x["feature_group_count"] > 1:
        groups["feature_group_count"] = y.dims[n.lhs_feature] // kernel.dims[n.rhs_input]
    if x["batch_group_count"] > 1:
        groups["batch_group_count"] = (
            y.dims[n.lhs_batch] // p.grid.block(x.shape.sizes, s.choice.results[0])[n.out_batch]
        )
    return s.results(
        s.on_blocks((y, kernel), window=tuple(window), **groups),
    )


@localizes("reduce-window", roles="shift", price=_price)
def reduce_window(s: Site) -> list[Local]:
    operands = s.operands
    n = len(operands) // 2
    parts = [_windowed(s, a, i.x) for a, i in zip(operands[:n], operands[n:])]
    y = instr(
        "reduce-window",
        (*(a for a, _ in parts), *(o.x for o in operands[n:])),
        window=tuple(parts[0][1]),
        to_apply=s.x["to_apply"],
    )
    return s.results(y)


def _overlapping(w: WindowDim, size: int, parts: int) -> tuple[list[int], int]:
    """Per block of the operand the first window that touches it, and how many windows do at
    most."""
    block = ceildiv(size, parts)
    begins = [fixed(w.pad_low) + j * block for j in range(parts)]
    first = [ceildiv(b - fixed(w.size) + 1, w.stride) for b in begins]
    last = [(b + block - 1) // w.stride for b in begins]
    return first, max(b - a + 1 for a, b in zip(first, last))


def _scatter_price(
    p: Planner,
    x: Instruction,
    rule: Factors,
    atoms: Assignment,
    operands: Sequence[Local],
) -> float | None:
    total = 0.0
    for d, w in enumerate(x["window"]):
        factors = rule.results[0][d]
        if factors and rule.roles[factors[0]] == "shift" and atoms[factors[0]]:
            if (
                w.base_dilation != 1
                or w.window_dilation != 1
                or x["select"].root.op != "compare"
                or x["select"].root["direction"] not in ("GE", "GT")
            ):
                return None
            parts = p.grid.parts(atoms[factors[0]])
            first, count = _overlapping(w, x.shape.sizes[d], parts)
            layout = tuple(atoms[f[0]] if f else () for f in rule.results[0])
            others = x.itemsize * halo.across(p.grid.block(x.shape.sizes, layout), d)
            starts = [i * w.stride - w.pad_low for i in first]
            total += others * halo.cost(
                x.shape.sizes[d], parts, starts, (count - 1) * w.stride + w.size
            )
            total += others * halo.cost(x.operands[1].shape.sizes[d], parts, first, count)
    return total


@localizes("select-and-scatter", roles="shift", price=_scatter_price)
def select_and_scatter(s: Site) -> list[Local]:
    """Every device looks at all windows that touch its block, and keeps its block of the result."""
    p = s.p
    x = s.x
    values, source, init = s.operands
    grid = p.grid
    window = []
    crops = []
    for d, w in enumerate(x["window"]):
        atoms = s.choice.results[0][d]
        if not atoms or w == WindowDim(1):
            window.append(w)
            continue
        first, count = _overlapping(w, values.dims[d], grid.parts(atoms))
        starts = [i * w.stride - w.pad_low for i in first]
        size = (count - 1) * w.stride + w.size
        # What lies outside the array must not be chosen, what lies outside the source adds nothing.
        lowest = h.constant(h.lowest(values.dtype), values.dtype)
        values = Local(
            halo.exchange(p, values, d, starts, size, lowest),
            values.dims,
            values.layout,
        )
        source = Local(
            halo.exchange(p, source, d, first, count, init.x),
            source.dims,
            source.layout,
        )
        window.append(WindowDim(w.size, w.stride))
        block = ceildiv(x.shape.sizes[d], grid.parts(atoms))
        crops.append((d, [i * block - starts[i] for i in grid.indices(atoms)], block))
    y = instr(
        "select-and-scatter",
        (values.x, source.x, init.x),
        window=tuple(window),
        select=x["select"],
        scatter=x["scatter"],
    )
    for d, begins, block in crops:  # elements that no window touches keep the initial value
        y = halo.padded_window(grid, y, d, begins, block, init.x)
    return s.results(y)
