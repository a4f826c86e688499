"""Blocks of opcodes that move elements: slice, pad, concatenate, reverse, iota, constant, broadcast, reshape."""
from __future__ import annotations

from collections.abc import Sequence

from torch_hlo.compiler.partition import halo
from torch_hlo.compiler.partition.assign import Assignment, Choice
from torch_hlo.compiler.partition.grid import ceildiv
from torch_hlo.compiler.partition.reshard import Local, Planner, offset
from torch_hlo.compiler.partition.rules import localizes, on_blocks, results
from torch_hlo.hlo import build as h
from torch_hlo.hlo.factors import Factors
from torch_hlo.hlo.ir import Instruction

Range = tuple[list[int], int]  # per block of the result the first element of the operand that it needs, and how many


def needed(x: Instruction, operand: int, d: int, parts: int) -> Range | None:
    """What each of `parts` blocks of dimension d of the result needs of dimension d of an operand; None when blocks cannot be cut like that."""
    block = ceildiv(x.shape.dims[d], parts)
    if x.op == "slice":
        start, _, stride = x["slice"][d]
        return [start + j * block * stride for j in range(parts)], (block - 1) * stride + 1
    if x.op == "pad":
        low, _, interior = x["padding"][d]
        return None if interior else ([j * block - low for j in range(parts)], block)
    if x.op == "reverse":
        return [x.shape.dims[d] - (j + 1) * block for j in range(parts)], block
    before = sum(o.shape.dims[d] for o in x.operands[:operand])
    return [j * block - before for j in range(parts)], block


def _price(p: Planner, x: Instruction, rule: Factors, atoms: Assignment) -> float | None:
    """Bytes that the shifted dimensions cost."""
    total = 0.0
    for d, factors in enumerate(rule.results[0]):
        if not factors or rule.roles[factors[0]] != "shift" or not atoms[factors[0]]:
            continue
        parts = p.grid.parts(atoms[factors[0]])
        for i, operand in enumerate(x.operands if x.op == "concatenate" else x.operands[:1]):
            ranges = needed(x, i, d, parts)
            if ranges is None:
                return None
            layout = [() if not f else atoms[f[0]] for f in rule.operands[i]]
            block = p.grid.block(operand.shape.dims, tuple(layout))
            others = operand.shape.itemsize
            for e, n in enumerate(block):
                others *= 1 if e == d else n
            total += others * halo.cost(operand.shape.dims[d], parts, *ranges)
    return total


def _split(x: Instruction, choice: Choice) -> list[int]:
    """Dimensions that move and are split."""
    moving = {
        "slice": lambda d: x["slice"][d] != (0, x.operands[0].shape.dims[d], 1),
        "pad": lambda d: tuple(x["padding"][d]) != (0, 0, 0),
        "reverse": lambda d: d in x["dimensions"],
        "concatenate": lambda d: d in x["dimensions"],
    }[x.op]
    return [d for d, atoms in enumerate(choice.results[0]) if atoms and moving(d)]


def _shifted(p: Planner, x: Instruction, choice: Choice, local: Local, operand: int, dims: Sequence[int], fill: Instruction | None) -> Instruction:
    """The elements of an operand that this device's block of the result needs."""
    for d in dims:
        starts, size = needed(x, operand, d, p.grid.parts(choice.results[0][d]))
        local = Local(halo.exchange(p, local, d, starts, size, fill), local.dims, local.layout)
    return local.x


@localizes("slice", roles="shift", price=_price)
def slice_(p: Planner, x: Instruction, choice: Choice, operands: Sequence[Local]) -> list[Local]:
    dims = _split(x, choice)
    y = _shifted(p, x, choice, operands[0], 0, dims, None)
    ranges = []
    for d, (start, limit, stride) in enumerate(x["slice"]):
        if d in dims:
            ranges.append((0, y.shape.dims[d], stride))
        elif choice.results[0][d]:
            ranges.append((0, y.shape.dims[d], 1))
        else:
            ranges.append((start, limit, stride))
    return results(p, x, choice, h.slice_(y, *zip(*ranges)) if ranges else y)


@localizes("pad", roles="shift", price=_price)
def pad(p: Planner, x: Instruction, choice: Choice, operands: Sequence[Local]) -> list[Local]:
    dims = _split(x, choice)
    y = _shifted(p, x, choice, operands[0], 0, dims, operands[1].x)
    return results(p, x, choice, h.pad(y, operands[1].x, [(0, 0, 0) if d in dims else t for d, t in enumerate(x["padding"])]))


@localizes("reverse", roles="shift", price=_price)
def reverse(p: Planner, x: Instruction, choice: Choice, operands: Sequence[Local]) -> list[Local]:
    return results(p, x, choice, h.reverse(_shifted(p, x, choice, operands[0], 0, _split(x, choice), None), x["dimensions"]))


@localizes("concatenate", roles="shift", price=_price)
def concatenate(p: Planner, x: Instruction, choice: Choice, operands: Sequence[Local]) -> list[Local]:
    (d,) = x["dimensions"]
    if not choice.results[0][d]:
        return results(p, x, choice, h.concatenate([o.x for o in operands], d))
    grid = p.grid
    blocks = [_shifted(p, x, choice, o, i, [d], None) for i, o in enumerate(operands)]
    line = (blocks[0].shape.dims[d],)
    index = offset(h.iota("s32", line, 0), grid.table(i * line[0] for i in grid.indices(choice.results[0][d])))
    y, end = blocks[-1], x.shape.dims[d]
    for block, o in zip(reversed(blocks[:-1]), reversed(x.operands[1:])):
        end -= o.shape.dims[d]
        before = h.compare(index, h.full(end, "s32", line), "LT")
        y = h.select(h.broadcast(before, y.shape.dims, (d,)), block, y)
    return results(p, x, choice, y)


@localizes("custom-call")
def custom_call(p: Planner, x: Instruction, choice: Choice, operands: Sequence[Local]) -> list[Local]:
    from torch_hlo.hlo.factors import ANNOTATIONS

    if x["custom_call_target"] in ANNOTATIONS:
        return results(p, x, choice, operands[0].x)
    return results(p, x, choice, on_blocks(p, x, choice, [o.x for o in operands]))


@localizes("rng-bit-generator", price=lambda p, x, rule, atoms: None if any(atoms) else 0.0)
def rng_bit_generator(p: Planner, x: Instruction, choice: Choice, operands: Sequence[Local]) -> list[Local]:
    """Every device draws all numbers, the same as one device would, and keeps its own."""
    return results(p, x, choice, on_blocks(p, x, choice, [o.x for o in operands]))
