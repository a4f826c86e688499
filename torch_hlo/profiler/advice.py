"""What to change, in plain words, from what a run did."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from torch_hlo import metrics
from torch_hlo.lazy.run import explain

from .timeline import FEW, Span, Timeline

OFTEN = 0.4  # of all steps
READS = {"read that cuts the step": "cuts", "read": "waits for"}  # names of spans
SLOW = 0.3  # of the time
SEEN = 5  # times that a place was met by the looks at Python: fewer may be chance


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
        *_reads(timeline, spans, wall),
        *_python(timeline, spans, wall),
        *_compiles(compiles, wall),
        *_leaks(timeline),
        *_fallbacks(timeline.steps),
    ]
    return sorted(found, key=lambda a: (not a.line, -a.weight))


def _reads(
    timeline: Timeline,
    spans: Sequence[Span],
    wall: float,
) -> Iterator[Advice]:
    steps = max(timeline.passes.values(), default=0)
    counts: dict[str, Counter[str]] = {}
    last = ""
    for s in (s for s in spans if s.track in ("transfers", "steps")):
        if s.name in READS and not (s.name == "read" and s.line == last):
            counts.setdefault(s.line, Counter())[s.name] += 1  # else a second value at once
        last = s.line if s.name in READS else ""
    for line, kinds in counts.items():
        ((name, n),) = kinds.most_common(1)
        if n >= max(FEW, OFTEN * steps):
            here = (s for s in spans if s.name in READS and s.line == line)
            spent = sum(s.seconds - _compiling(spans, s.start, s.start + s.seconds) for s in here)
            yield Advice(
                f"A read at {line} {READS[name]} every step",
                f"{n} reads in {max(n, steps)} steps, and Python is {_s(spent)} there. Read every"
                " 100th step, or keep the tensor (`losses.append(loss.detach())`) and read it"
                " at the end.",
                line,
                spent / wall,
            )
    passes, line = timeline.unrolled
    if passes >= FEW:
        yield Advice(
            f"{passes} passes of the loop are one program, cut at {line}",
            "It grows with the number of passes, and so does the time to compile it. Call"
            " torch_hlo.mark_step() at the end of each pass.",
            line,
            _compiling(spans) / wall,
        )


def _compiling(spans: Sequence[Span], start: float = 0.0, end: float = inf) -> float:
    """Seconds of compiles between two moments."""
    return sum(s.seconds for s in spans if s.track == "compiles" and start <= s.start < end)


def _python(
    timeline: Timeline,
    spans: Sequence[Span],
    wall: float,
) -> Iterator[Advice]:
    """Where the device waits for Python."""
    rest = wall - _compiling(spans)
    looks = timeline.python.total() or 1
    slow = [
        (at, wall * n / looks) for at, n in timeline.python.most_common(3) if at.line and n >= SEEN
    ]
    slow = [(at, spent) for at, spent in slow if spent > SLOW * rest]
    for at, spent in slow:
        yield Advice(
            f"{'Loading data' if at.loads else 'Python'} takes {_s(spent)} of {_s(rest)} at"
            f" {at.line}{at.caller and f', called at {at.caller}'}",
            "The device has nothing to do meanwhile. Prepare the next batches in the background"
            " (DataLoader with num_workers, or a thread), or do this once, before the loop.",
            at.line,
            spent / wall,
        )
    programs = sorted((s for s in spans if s.track == "programs"), key=lambda s: s.start)
    later = programs[len(programs) // 2 :]  # before it, modules are imported and steps traced
    ran = sum(s.seconds for s in later)
    first = later[0].start if later else inf
    rest = timeline.began + wall - first - _compiling(spans, first)
    if 0 < ran < 0.4 * rest and not slow:
        captured = any(s.name in ("launch", "graph") for s in spans)
        yield Advice(
            "The device is idle",
            f"In the later half of the run, programs ran {_s(ran)} of {_s(rest)} outside of"
            " compiles: Python is too slow for it."
            f" {'Use' if captured else 'Capture the step with torch_hlo.compile, use'} larger"
            " batches, or load data in another thread. (Recording is slower than usual while it is"
            " profiled.)",
            "",
            0.3 * (1 - ran / rest),
        )


def _compiles(compiles: Sequence[metrics.Compile], wall: float) -> Iterator[Advice]:
    alike: dict[tuple[str, str, str], list[metrics.Compile]] = {}
    for c in compiles:
        if c.advice:
            alike.setdefault((c.kind, c.line, c.advice), []).append(c)
    for (kind, line, text), found in alike.items():
        spent = sum(c.seconds for c in found)
        # one for another size, or for other operations, may be a second program of the script
        if len(found) > 1 or kind in explain.SETTLED:
            at = f" at {line}" if line else ""
            yield Advice(
                f"{len(found)} compile{'s' * (len(found) > 1)}{at}: {kind}",
                f"{text} Compiling took {_s(spent)}. The last one: {found[-1].text}",
                line,
                spent / wall,
            )


def _leaks(timeline: Timeline) -> Iterator[Advice]:
    passes = max(len(timeline.history) * timeline.every * 3 // 4, 1)
    for h, grown in timeline.growing():
        yield Advice(
            f"Memory grows: tensors made at {h.line} are kept",
            f"{h.arrays} of them ({h.what}, {h.bytes / 2**20:.3g} MiB) are alive at the end, about"
            f" {(grown[-1] - grown[0]) / passes:.2g} more in each step."
            f"{timeline.holders.get(h[:2], '')} Delete what is not needed, or keep a number in"
            " place of the tensor.",
            h.line,
            h.bytes / max(timeline.peak[1], 1),
        )


def _fallbacks(steps: int) -> Iterator[Advice]:
    for op in metrics.executed_fallback_ops():
        n = metrics.counter_value(op) or 0
        if n >= max(OFTEN * steps, FEW):
            text = f"{n} calls have no lowering: each cuts the step. Use another operation."
            yield Advice(f"{op} runs on the CPU", text, "", 0.5)


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
