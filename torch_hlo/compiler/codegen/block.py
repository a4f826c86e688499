"""The block: the array of 64-bit words that a program runs on, and what lies behind them.

[arena, constants, host callback, failed, own, sizes…, parameters…, outputs…, packed copies…]. Every
buffer of a program is a `Place`: a base of the block plus a byte offset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias, TypeVar

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction, Shape, Size

# words of the block before the sizes; OWN: see `apart`
ARENA = 0
CONSTANTS = 1
HOST = 2
FAILED = 3
OWN = 4
FIXED_WORDS = 5
ALIGNMENT = 64
PACKED_HEAD = 64  # bytes


class CodegenError(RuntimeError):
    """An instruction that no emitter can compile; names the opcode, the shapes and what to do."""


def blame(error: Exception, x: Instruction) -> None:
    """Say where an instruction comes from in Python, or those of a fusion, unless somebody inside
    has done so."""
    inside = x["calls"].instructions() if x.op == "fusion" else [x]
    found = [y.meta for y in inside if y.meta.source]
    if found and not any(m.source in str(error) for m in found):
        lines = dict.fromkeys(f"{m.op_name} at {m.source}" for m in found)
        error.args = (f"{error} ({', '.join(lines)})",)


@frozen
class Place:
    """Where a buffer lives: `word` of the block holds a base pointer, `offset` bytes are added to
    it."""

    word: int
    offset: Size
    nbytes: Size


Leaf = TypeVar("Leaf")
Nested: TypeAlias = "Leaf | tuple[Nested[Leaf], ...]"
Places: TypeAlias = "Nested[Place]"  # a tuple-shaped value has one entry per element


@frozen
class HostCall:
    """A call of a registered Python function from native code. Shapes may be symbolic. `rare`: only
    where native code has failed."""

    name: str
    attrs: str  # JSON
    outputs: tuple[Shape, ...]
    inputs: tuple[Shape, ...]
    rare: bool = False


@frozen
class Packing:
    """A copy of a parameter in the order in which a kernel reads it, which may outlive a run. Its
    memory begins with PACKED_HEAD bytes whose first word is 0 until a program has filled it; then
    come `nbytes`. Equal `layout`s of one parameter are one copy, in whatever program."""

    parameter: int
    nbytes: int
    layout: str


@frozen
class Span:
    """Bytes [start, end) behind a word of the program's block. A symbolic bound means all of the
    word's bytes."""

    word: int
    start: Size
    end: Size

    @property
    def known(self) -> tuple[int, int] | None:
        """Both bounds, where neither is symbolic."""
        if isinstance(self.start, int) and isinstance(self.end, int):
            return self.start, self.end
        return None

    def overlaps(self, other: Span) -> bool:
        """Whether a byte is in both; true when sizes decide."""
        ours = self.known
        theirs = other.known
        if ours is None or theirs is None:
            return True
        return ours[0] < theirs[1] and theirs[0] < ours[1]

    def covers(self, other: Span) -> bool:
        """Whether every byte of `other` is in this one for certain."""
        ours = self.known
        theirs = other.known
        if ours is None or theirs is None:
            return False
        return ours[0] <= theirs[0] and theirs[1] <= ours[1]


def leaves(places: Nested[Leaf]) -> Iterator[Leaf]:
    """The Places, say, of a nested tuple, in order."""
    if isinstance(places, tuple):
        for p in places:
            yield from leaves(p)
    else:
        yield places
