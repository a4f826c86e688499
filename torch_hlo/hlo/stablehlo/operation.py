"""Operations of MLIR text as data: blocks of operations, whose regions are blocks again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .types import Type


@dataclass(slots=True)
class Block:
    args: list[tuple[str, Type]] = field(default_factory=list)
    ops: list[Operation] = field(default_factory=list)


@dataclass(slots=True)
class Operation:
    name: str  # without the dialect of StableHLO: "add", "func.func", "chlo.erf"
    position: int
    results: list[tuple[str, int]] = field(default_factory=list)
    operands: list[tuple[str, int]] = field(default_factory=list)
    attrs: dict[str, object] = field(default_factory=dict)
    regions: list[Block] = field(default_factory=list)
    types: list[Type] = field(default_factory=list)  # of the results


def free_names(block: Block) -> list[str]:
    """Names that a block uses and does not define, in order of use."""
    found: dict[str, None] = {}
    stack: list[tuple[Block, set[str]]] = [(block, set())]
    while stack:
        current, outer = stack.pop()
        defined = outer | {name for name, _ in current.args}
        for op in current.ops:
            for name, _ in op.operands:
                if name not in defined:
                    found.setdefault(name)
            for inner in op.regions:
                stack.append((inner, set(defined)))
            defined |= {name for name, _ in op.results}
    return list(found)


def walk(block: Block) -> Iterator[Operation]:
    """All operations of a block and its regions."""
    for op in block.ops:
        yield op
        for inner in op.regions:
            yield from walk(inner)
