"""Bytes of a program's memory: what steps read and write, so that it can be told which of them may run in any order."""

from __future__ import annotations

from dataclasses import dataclass

from torch_hlo.hlo.dim import Size


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, end) behind a word of the program's block. A symbolic bound means all of the word's bytes."""

    word: int
    start: Size
    end: Size

    def overlaps(self, other: Span) -> bool:
        """Whether a byte is in both; true when sizes decide."""
        if any(not isinstance(x, int) for x in (self.start, self.end, other.start, other.end)):
            return True
        return self.start < other.end and other.start < self.end

    def covers(self, other: Span) -> bool:
        """Whether every byte of `other` is in this one for certain."""
        return (
            all(isinstance(x, int) for x in (self.start, self.end, other.start, other.end))
            and self.start <= other.start
            and other.end <= self.end
        )
