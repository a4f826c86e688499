"""Smaller programs that still fail in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from test.sweeps.fuzz.run import Program, check, check_together

T = TypeVar("T")


def fewest(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """A part of `items` that still fails, of which no single item can be left out."""
    kept = list(items)
    size = max(len(kept) // 2, 1)
    while True:
        start, before = 0, len(kept)
        while start < len(kept):
            fewer = kept[:start] + kept[start + size :]
            if fewer and fails(fewer):
                kept = fewer
            else:
                start += size
        if size == 1 and len(kept) == before:
            return kept
        size = max(size // 2, 1)


def shrink(program: Program, mode: str, kind: str) -> Program:
    """`program` without the statements that its mismatch does not need, and with plainer data."""

    def fails(lines: list[str]) -> bool:
        found = check(Program(program.kind, tuple(lines)), mode).mismatch
        return found is not None and found.kind == kind

    lines = fewest(program.lines, fails)
    for i, line in enumerate(lines):
        for pattern, plain in ((r"torch\.(\w*int\d+|float\d+|bfloat16|complex64|bool)", "torch.float32"),
                               (r", True\)", ")")):  # fmt: skip
            tried = [*lines[:i], re.sub(pattern, plain, line), *lines[i + 1 :]]
            if tried != lines and fails(tried):
                lines = tried
    return replace(program, lines=tuple(lines))


def shrink_together(programs: list[Program], mode: str) -> list[Program]:
    """The fewest programs of a step of which one fails."""

    def fails(some: list[Program]) -> bool:
        return any(r.mismatch for r in check_together(some, mode))

    return fewest(programs, fails) if fails(programs) else programs
