"""Blocks of opcodes that move elements: slice, pad, concatenate, reverse, iota, constant,
broadcast, reshape."""

from collections.abc import Sequence
from dataclasses import replace

from torch_hlo.hlo.ir import Instruction, build as h, ceildiv
from torch_hlo.hlo.sharding.factors import ANNOTATIONS, Factors

from . import halo
from .assign import Assignment
from .reshard import Local, Planner, offset
from .rules import Site, localizes, rebuilt

# per block of the result the first element of the operand that it needs, and how many
Range = tuple[list[int], int]


def needed(x: Instruction, operand: int, d: int, parts: int) -> Range | None:
    """What each of `parts` blocks of dimension d of the result needs of dimension d of an operand;
    None when blocks cannot be cut like that."""
    size = x.shape.sizes[d]
    block = ceildiv(size, parts)
    if x.op == "slice":
        start, _, stride = x["slice"][d]
        return [start + j * block * stride for j in range(parts)], (block - 1) * stride + 1
    if x.op == "pad":
        low, _, interior = x["padding"][d]
        return None if interior else ([j * block - low for j in range(parts)], block)
    if x.op == "reverse":
        return [size - (j + 1) * block for j in range(parts)], block
    before = sum(o.shape.sizes[d] for o in x.operands[:operand])
    return [j * block - before for j in range(parts)], block


def _price(
    p: Planner,
    x: Instruction,
    rule: Factors,
    atoms: Assignment,
    operands: Sequence[Local],
) -> float | None:
    """Bytes that the shifted dimensions cost."""
    total = 0.0
    for d, factors in enumerate(rule.results[0]):
        if not factors or rule.roles[factors[0]] != "shift" or not atoms[factors[0]]:
            continue
        parts = p.grid.parts(atoms[factors[0]])
        for i, operand in enumerate(operands if x.op == "concatenate" else operands[:1]):
            ranges = needed(x, i, d, parts)
            if ranges is None:
                return None
            layout = tuple(() if not f else atoms[f[0]] for f in rule.operands[i])
            others = operand.x.itemsize * halo.across(p.grid.block(operand.dims, layout), d)
            starts, bounds = _in_view(operand, d, ranges[0])
            total += others * halo.cost(operand.dims[d], parts, starts, ranges[1], bounds)
    return total


def _in_view(local: Local, d: int, starts: list[int]) -> tuple[list[int], tuple[int, int]]:
    """Positions in an operand as positions in the array that it is a part of, and where the part
    lies."""
    if local.crop is None or local.crop[0] != d:
        return starts, (0, local.dims[d])
    _, start, size = local.crop
    return [s + start for s in starts], (start, start + size)


def seen_through(x: Instruction, operands: Sequence[Local]) -> tuple[Local, ...]:
    """The operands of a moving opcode, with views along the dimensions that it moves replaced by
    the arrays they look at."""
    if x.op not in ("slice", "pad", "concatenate"):
        return tuple(operands)
    found = []
    for o in operands:
        if (
            o.view is not None
            and o.dims
            and o.view[0].layout[o.view[1]]
            and o.view[1] in _moving(x)
        ):
            base, d, start = o.view
            found.append(replace(base, crop=(d, start, o.dims[d]), view=None))
        else:
            found.append(o)
    return tuple(found)


def _moving(x: Instruction) -> list[int]:
    """Dimensions along which elements move."""
    if x.op == "slice":
        sizes = x.operand.dims
        return [d for d, n in enumerate(sizes) if x["slice"][d] != (0, n, 1)]
    if x.op == "pad":
        return [d for d, amounts in enumerate(x["padding"]) if tuple(amounts) != (0, 0, 0)]
    return sorted(x["dimensions"])  # reverse, concatenate


def _split(s: Site) -> list[int]:
    """Dimensions that move and are split."""
    return [d for d in _moving(s.x) if s.choice.results[0][d]]


def _shifted(
    s: Site,
    local: Local,
    operand: int,
    dims: Sequence[int],
    fill: Instruction | None,
) -> Instruction:
    """The elements of an operand that this device's block of the result needs."""
    for d in dims:
        found = needed(s.x, operand, d, s.p.grid.parts(s.choice.results[0][d]))
        assert found is not None, s.x  # else this choice has no price
        starts, bounds = _in_view(local, d, found[0])
        local = replace(local, x=halo.exchange(s.p, local, d, starts, found[1], fill, bounds))
    return _whole_part(local, dims)


def _whole_part(local: Local, done: Sequence[int]) -> Instruction:
    """The meant part of an operand along a dimension that is not split."""
    if local.crop is None or local.crop[0] in done:
        return local.x
    d, start, size = local.crop
    return halo.range_of(local.x, d, start, start + size)


@localizes("slice", roles="shift", price=_price)
def slice_(s: Site) -> list[Local]:
    x = s.x
    operands = s.operands
    dims = _split(s)
    y = _shifted(s, operands[0], 0, dims, None)
    ranges = []
    for d, (start, limit, stride) in enumerate(x["slice"]):
        if d in dims:
            ranges.append((0, y.dims[d], stride))
        elif s.choice.results[0][d]:
            ranges.append((0, y.dims[d], 1))
        else:
            ranges.append((start, limit, stride))
    (result,) = s.results(h.slice_(y, *zip(*ranges)) if ranges else y)
    moved = _moving(x)
    if (
        len(moved) == 1
        and x["slice"][moved[0]][2] == 1
        and operands[0].layout[moved[0]]
        and operands[0].source is None
    ):
        base = operands[0]
        start = x["slice"][moved[0]][0]
        if base.crop is not None:
            start += base.crop[1] if base.crop[0] == moved[0] else 0
        if base.crop is None or base.crop[0] == moved[0]:
            result = replace(result, view=(replace(base, crop=None), moved[0], start))
    return [result]


@localizes("pad", roles="shift", price=_price)
def pad(s: Site) -> list[Local]:
    operands = s.operands
    dims = _split(s)
    y = _shifted(s, operands[0], 0, dims, operands[1].x)
    return s.results(
        h.pad(
            y,
            operands[1].x,
            [(0, 0, 0) if d in dims else t for d, t in enumerate(s.x["padding"])],
        ),
    )


@localizes("reverse", roles="shift", price=_price)
def reverse(s: Site) -> list[Local]:
    return s.results(
        h.reverse(_shifted(s, s.operands[0], 0, _split(s), None), s.x["dimensions"]),
    )


@localizes("concatenate", roles="shift", price=_price)
def concatenate(s: Site) -> list[Local]:
    x = s.x
    (d,) = x["dimensions"]
    if not s.choice.results[0][d]:
        return s.results(h.concatenate([_whole_part(o, ()) for o in s.operands], d))
    grid = s.p.grid
    blocks = [_shifted(s, o, i, [d], None) for i, o in enumerate(s.operands)]
    line = (blocks[0].dims[d],)
    index = offset(
        h.iota("s32", line, 0),
        grid.table(i * line[0] for i in grid.indices(s.choice.results[0][d])),
    )
    y = blocks[-1]
    end = x.dims[d]
    for block, o in zip(reversed(blocks[:-1]), reversed(x.operands[1:])):
        end -= o.dims[d]
        before = h.compare(index, h.full(end, "s32", line), "LT")
        y = h.select(h.broadcast(before, y.dims, (d,)), block, y)
    return s.results(y)


@localizes("custom-call")
def custom_call(s: Site) -> list[Local]:
    if s.x["custom_call_target"] in ANNOTATIONS:
        return s.results(s.operands[0].x)
    return rebuilt(s)


# Every device draws all numbers, the same as one device would, and keeps its own.
localizes(
    "rng-bit-generator",
    price=lambda p, x, rule, atoms, operands: None if any(atoms) else 0.0,
)(rebuilt)
