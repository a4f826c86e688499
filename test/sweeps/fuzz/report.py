"""Blocks of programs: how many agree, and a text about each that does not."""

from __future__ import annotations

from collections import Counter

from test.sweeps.fuzz import generate
from test.sweeps.fuzz.compare import Outcome
from test.sweeps.fuzz.run import CALLS, Program, Result, check, check_together, finished
from test.sweeps.fuzz.shrink import shrink, shrink_together
from torch_hlo import config

THREADS = 4
SIZES = 3  # of so many blocks one is compiled for all sizes


def program(seed: int, mode: str) -> tuple[Program, Outcome]:
    """The program of a seed, and what it left on the CPU."""
    made = generate.program(seed, mode)
    wanted = finished(made.scope, made.errors, made.messages)
    return Program(made.kind, tuple(made.lines)), wanted


def check_block(seeds: list[int], mode: str, smaller: bool) -> tuple[dict[str, int], list[str]]:
    """What became of the programs of these seeds, counted, and reports of mismatches."""
    programs, wanted = map(list, zip(*(program(seed, mode) for seed in seeds)))
    # most programs run once: only some are compiled for all sizes, which takes a quarter longer
    sizes = mode in CALLS or seeds[0] // len(seeds) % SIZES == 0
    with config.override(DYNAMIC=sizes):
        return _checked(seeds, programs, wanted, mode, smaller)


def _checked(
    seeds: list[int], programs: list[Program], wanted: list[Outcome], mode: str, smaller: bool
) -> tuple[dict[str, int], list[str]]:
    if mode in CALLS:
        results = [check(p, mode) for p in programs]
    else:
        size = THREADS if mode == "threads" else len(seeds)
        results = []
        for i in range(0, len(programs), size):
            part = slice(i, i + size)
            results += check_together(programs[part], mode, wanted[part])
    notes: Counter[str] = Counter()
    reports = []
    for seed, p, result in zip(seeds, programs, results):
        notes["mismatch" if result.mismatch else result.note or "agree"] += 1
        if result.mismatch:
            reports.append(report(seed, p, result, mode, programs, smaller))
    return dict(notes), reports


def report(
    seed: int, p: Program, result: Result, mode: str, programs: list[Program], smaller: bool
) -> str:
    """A mismatch, and a program that shows it: alone if it fails alone."""
    found = result.mismatch
    assert found is not None
    text = f"--- seed {seed}, mode {mode}, {found.kind}: {found.text}"
    alone = "lazy" if mode in ("together", "threads") else mode
    again = check(p, alone).mismatch
    if again is None:
        some = shrink_together(programs, mode) if smaller else programs
        return "\n".join([text + "\n    (not alone)", *(_shown(x) for x in some)])
    if smaller:
        p = shrink(p, alone, again.kind)
        again = check(p, alone).mismatch or again
        text += f"\n    smaller: {again.text}"
    return f"{text}\n{_shown(p)}"


def _shown(p: Program) -> str:
    return "\n".join(
        [f"    # kind {p.kind}", *("    " + x.replace("\n", "\n    ") for x in p.lines)]
    )
