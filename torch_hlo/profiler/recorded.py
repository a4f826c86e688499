"""A recorded run as a page, as a trace for Chrome or Perfetto, and as advice."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from torch_hlo import config, metrics, pages
from torch_hlo.lazy.record import session

from .advice import Advice, advise
from .steps import Line, compiled_anew, measured_limits
from .timeline import Modules, Span, Timeline

TRACKS = "steps transfers waits compiles programs kernels collectives".split()
MOST = 60_000  # spans on a page


class Recording:
    """What was recorded; complete when the `with` block has ended."""

    def __init__(self, timeline: Timeline, lines: list[Line]) -> None:
        self.timeline = timeline
        self.lines = lines
        self.compiles: list[metrics.Compile] = []
        self.seconds = 0.0

    @property
    def spans(self) -> list[Span]:
        """Everything that took time, compiles too, in the order in which it began."""
        past = time.time() - time.monotonic()
        compiles = [
            Span("compiles", c.name, c.began - past, c.seconds, c.where, c.text)
            for c in self.compiles
            if c.name
        ]
        return sorted([*self.timeline.spans, *compiles], key=lambda s: (s.start, -s.seconds))

    def advice(self) -> list[Advice]:
        """What to change, most important first."""
        return advise(self.timeline, self.spans, self.compiles, self.seconds)

    def data(self) -> dict[str, Any]:
        """What the page shows. Texts of spans are numbers: places in `texts`."""
        line = self.timeline
        spans = self.spans
        longest = sorted(spans, key=lambda s: -s.seconds)[:MOST]
        texts: dict[str, int] = {}

        def number(text: str) -> int:
            return texts.setdefault(text, len(texts))

        rows = [(*map(number, s[:2]), s.start, s.seconds, number(s.line), s.note) for s in longest]
        names = {program.name: name for program, name in line.programs.items()}
        kernels = [
            {**asdict(x.step), **asdict(x), "program": names.get(x.program, x.program)}
            for x in self.lines
        ]
        return {
            "seconds": self.seconds,
            "began": line.began,
            "limits": asdict(measured_limits("wall")),
            "tracks": TRACKS,
            "spans": rows,
            "left_out": len(spans) - len(rows),
            "texts": [*texts],
            "steps": line.steps,
            "kernels": kernels,
            "compiles": [asdict(c) for c in self.compiles],
            "memory": line.memory,
            "peak": line.peak,
            "end": line.history[-1] if line.history else [],
            "advice": self.advice(),
        }

    def save(self, path: str, title: str = "Profile") -> None:
        """Write the page."""
        Path(path).write_text(pages.page("profile", {"title": title, **self.data()}, title))

    def trace(self, path: str) -> None:
        """Write a trace that Chrome (chrome://tracing) and https://ui.perfetto.dev open."""
        found = {"traceEvents": self._events(), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(found, default=str))

    def add_to(self, path: str) -> None:
        """Add the tracks to a trace that PyTorch's profiler has written."""
        found = json.loads(Path(path).read_text())
        past = 1e6 * (time.time() - time.monotonic()) - found.get("baseTimeNanoseconds", 0) / 1e3
        found["traceEvents"] += self._events(past)
        Path(path).write_text(json.dumps(found, default=str))

    def _events(self, past: float = 0.0) -> list[dict[str, Any]]:
        """A track per kind of span, as a process of its own. `past`: microseconds before the
        clock's zero."""
        facts = {x.step.what: {**asdict(x.step), "limit": x.limit} for x in self.lines}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "tid": i, "args": {"name": track}}
            for i, track in enumerate(TRACKS)
        ]
        events.append({"ph": "M", "name": "process_name", "tid": 0, "args": {"name": "hlo"}})
        for s in self.spans:
            args = {"line": s.line, "note": s.note, **facts.get(s.name, {})}
            when = {
                "ts": s.start * 1e6 + past,
                "dur": s.seconds * 1e6,
                "tid": TRACKS.index(s.track),
            }
            events.append({"ph": "X", "name": s.name, "cat": s.track, "args": args, **when})
        for at, used, scratch in self.timeline.memory:
            args = {"arrays": used, "scratch": scratch}
            events.append({"ph": "C", "name": "memory", "ts": at * 1e6 + past, "args": args})
        return [{"pid": "hlo", **e} for e in events]


def record_if_used() -> AbstractContextManager[Recording | None]:
    """`record`, where anything has been on the device and nobody records."""
    used = metrics.metric_data("TransferToDeviceTime") or metrics.counter_value("MarkStep")
    return record() if used and not config.get("PROFILE") else nullcontext()


@contextmanager
def record() -> Iterator[Recording]:
    """Record what happens in the block: what Python does with the device, programs and each of
    their steps, compiles, waits and memory. Programs are compiled for it, and forgotten
    afterwards; recording operations takes longer, since their Python lines are looked for."""
    state = session.current()
    before = state.sources, state.modules
    known = len(metrics.explain().compiles)
    with compiled_anew("wall") as lines:
        found = Recording(Timeline(session.engine()), lines)
        state.sources = True
        state.modules = Modules()
        try:
            with (
                torch.autograd.set_detect_anomaly(True, check_nan=False),
                found.timeline.recording(),
            ):
                yield found
                session.engine().sync()
        finally:
            state.sources, state.modules = before
            found.seconds = time.monotonic() - found.timeline.began
            found.compiles = metrics.explain().compiles[known:]
