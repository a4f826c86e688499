"""What to change, in plain words, from what a run did."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch_hlo import metrics

from .timeline import Span, Timeline

OFTEN = 0.4  # of all steps
READS = {"read that cuts the step": "cuts", "read": "waits for"}  # names of spans
FEW = 5  # steps from which there is a rule to see


class Advice(NamedTuple):
    """`weight`: the share of the run, or of memory, that it is about."""

    title: str
    text: str
    line: str
    weight: float

    def __str__(self) -> str:
        return f"{self.title}: {self.text}"


def advise(
    timeline: Timeline,
    spans: Sequence[Span],
    compiles: Sequence[metrics.Compile],
    seconds: float,
) -> list[Advice]:
    """What to change, most important first; what has a line before what follows from it."""
    wall = max(seconds, 1e-9)
    found = [
        *_reads(spans, compiles, wall),
        *_compiles(compiles, wall),
        *_leaks(timeline),
        *_busy(spans, wall),
        *_fallbacks(timeline.steps),
    ]
    return sorted(found, key=lambda a: (not a.line, -a.weight))


def _reads(
    spans: Sequence[Span], compiles: Sequence[metrics.Compile], wall: float
) -> Iterator[Advice]:
    marks = Counter(s.line for s in spans if s.name in ("mark_step", "sync"))
    programs = Counter(s.name for s in spans if s.track == "programs")
    # a captured function, or a step that is read at several lines, are several programs
    steps = max((marks or programs).values(), default=0)
    reads = [s for s in spans if s.name in READS]
    for line, n in Counter(s.line for s in reads).items():
        if n >= FEW and n >= OFTEN * steps:
            here = [s for s in reads if s.line == line]
            ((name, _),) = Counter(s.name for s in here).most_common(1)
            spent = sum(s.seconds for s in here)
            spent -= sum(c.seconds for c in compiles if c.where == line)
            yield Advice(
                f"A read at {line} {READS[name]} every step",
                f"{n} reads in {steps} steps, and Python is {_s(max(spent, 0))} there. Read every"
                " 100th step, or keep the tensor (`losses.append(loss.detach())`) and read it"
                " at the end.",
                line,
                spent / wall,
            )


def _compiles(compiles: Sequence[metrics.Compile], wall: float) -> Iterator[Advice]:
    alike: dict[tuple[str, str, str], list[metrics.Compile]] = {}
    for c in compiles:
        if c.advice or c.kind == "all sizes from now on":
            alike.setdefault((c.kind, c.line, c.advice), []).append(c)
    for (kind, line, text), found in alike.items():
        spent = sum(c.seconds for c in found)
        # one for another size, or for other operations, may be a second program of the script
        if len(found) > 1 or not text and spent > 0.1 * wall:
            at = f" at {line}" if line else ""
            text = text or "Few such compiles are right; many mean that a size follows no rule."
            yield Advice(
                f"{len(found)} compiles{at}: {kind}",
                f"{text} They took {_s(spent)}. The last one: {found[-1].text}",
                line,
                spent / wall,
            )


def _leaks(timeline: Timeline) -> Iterator[Advice]:
    history = timeline.history
    if len(history) < FEW:
        return
    # first steps make optimizer states
    points = [history[len(history) * i // 4] for i in (1, 2, 3)] + [history[-1]]
    counts = [{(h.line, h.what): h.arrays for h in held} for held in points]
    peak = max(timeline.peak[1], 1)
    for h in points[-1]:
        grown = [found.get((h.line, h.what), 0) for found in counts]
        if all(a < b for a, b in zip(grown, grown[1:])):
            step = (grown[-1] - grown[0]) / max(len(history) * timeline.every * 3 // 4, 1)
            yield Advice(
                f"Memory grows: tensors made at {h.line} are kept",
                f"{h.arrays} of them ({h.what}, {h.bytes / 2**20:.3g} MiB) are alive at the end,"
                f" about {step:.2g} more in each step. Delete what is not needed, or keep a number"
                " in place of the tensor.",
                h.line,
                h.bytes / peak,
            )


def _busy(spans: Sequence[Span], wall: float) -> Iterator[Advice]:
    compiled = sum(s.seconds for s in spans if s.track == "compiles")
    ran = sum(s.seconds for s in spans if s.track == "programs")
    rest = wall - compiled
    if 0 < ran < 0.4 * rest:
        yield Advice(
            "The device is idle",
            f"Programs ran {_s(ran)} of {_s(rest)} outside of compiles: Python is too slow for it."
            " Capture the step with torch_hlo.compile, use larger batches, or load data in another"
            " thread. (Recording is slower than usual while it is profiled.)",
            "",
            0.3 * (1 - ran / rest),
        )


def _fallbacks(steps: int) -> Iterator[Advice]:
    for op in metrics.executed_fallback_ops():
        n = metrics.counter_value(op) or 0
        if n >= max(OFTEN * steps, FEW):
            text = f"{n} calls have no lowering: each cuts the step. Use another operation."
            yield Advice(f"{op} runs on the CPU", text, "", 0.5)


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
