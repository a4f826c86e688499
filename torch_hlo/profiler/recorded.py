"""A recorded run as a page, as a trace for Chrome or Perfetto, and as advice."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from torch_hlo import config, metrics, pages
from torch_hlo.device.programs import PROFILED
from torch_hlo.lazy.record import session
from torch_hlo.profiler.advice import Advice, advise
from torch_hlo.profiler.steps import Line, collect, measured_limits
from torch_hlo.profiler.timeline import Modules, Span, Timeline

TRACKS = "steps transfers waits compiles programs kernels collectives".split()
MOST = 60_000  # spans on a page


class Recording:
    """What was recorded; complete when the `with` block has ended."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.lines: list[Line] = []
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
        return advise(self.timeline, self.spans, self.lines, self.compiles, self.seconds)

    def data(self) -> dict[str, Any]:
        """What the page shows."""
        line, zero = self.timeline, self.timeline.began
        spans = sorted(self.spans, key=lambda s: -s.seconds)[:MOST]
        texts: dict[str, int] = {}
        rows = [
            [
                TRACKS.index(s.track),
                round((s.start - zero) * 1e6, 1),
                round(s.seconds * 1e6, 2),
                texts.setdefault(s.name, len(texts)),
                texts.setdefault(s.line, len(texts)),
                s.note if isinstance(s.note, (int, str)) else "",
            ]
            for s in sorted(spans, key=lambda s: s.start)
        ]
        names = {program.name: name for program, name in line.programs.items()}
        modules = self._modules()
        when, most, held = line.peak
        return {
            "seconds": self.seconds,
            "limits": asdict(measured_limits("wall")),
            "tracks": TRACKS,
            "spans": rows,
            "left_out": len(line.spans) + len(self.compiles) - len(rows),
            "texts": [*texts],
            "steps": line.steps,
            "kernels": [_kernel(x, names, modules) for x in self.lines],
            "compiles": [asdict(c) for c in self.compiles],
            "memory": [[t - zero, used, scratch] for t, used, scratch in line.memory],
            "peak": {"at": when - zero, "bytes": most, "held": [h._asdict() for h in held]},
            "history": [[h._asdict() for h in now[:12]] for now in line.history[-1:]],
            "advice": [a._asdict() for a in self.advice()],
        }

    def _modules(self) -> dict[tuple[str, str], str]:
        """The module of an operation on a line, for its backward pass: `layers.*.fc` where there
        are several."""
        found: dict[tuple[str, str], set[str]] = defaultdict(set)
        for x in self.lines:
            if x.step.sources and (module := parts(x.step.sources[0])[1]):
                found[_key(x)].add(module)
        several = {k: {re.sub(r"\d+", "*", m) for m in names} for k, names in found.items()}
        return {
            k: [*(names if len(names) == 1 else several[k])][0]
            for k, names in found.items()
            if len(several[k]) == 1
        }

    def save(self, path: str, title: str = "Profile") -> None:
        """Write the page."""
        Path(path).write_text(pages.page("profile", {"title": title, **self.data()}, title))

    def trace(self, path: str) -> None:
        """Write a trace that Chrome (chrome://tracing) and https://ui.perfetto.dev open."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": i, "args": {"name": track}}
            for i, track in enumerate(TRACKS)
        ]
        facts = {}
        for x in self.lines:
            names = x.step.bytes, x.step.flops, x.step.matrix_flops
            facts[x.step.what] = dict(zip(("bytes", "flops", "matrix_flops"), map(str, names)))
            facts[x.step.what] |= {"HLO": x.step.name, "share of the limit": f"{x.limit:.0%}"}
        for s in self.spans:
            args = {"line": s.line, "note": str(s.note), **facts.get(s.name, {})}
            at = {
                "ts": s.start * 1e6,
                "dur": s.seconds * 1e6,
                "pid": 1,
                "tid": TRACKS.index(s.track),
            }
            events.append({"ph": "X", "name": s.name, "cat": s.track, "args": args, **at})
        for when, used, scratch in self.timeline.memory:
            sizes = {"arrays": used, "scratch": scratch}
            events.append({"ph": "C", "name": "memory", "pid": 1, "ts": when * 1e6, "args": sizes})
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def parts(source: str) -> tuple[str, str, bool]:
    """Of an operation's source: file and line, module or "", whether it is of the backward pass."""
    place, *rest = source.split(", in ")
    module = next((r.removeprefix("module ") for r in rest if r.startswith("module ")), "")
    return place, module, any(r.startswith("the backward") for r in rest)


def _key(x: Line) -> tuple[str, str]:
    """The line of a kernel's operation, and its name in the forward pass."""
    return parts(x.step.sources[0])[0], x.step.name.removeprefix("aten.").partition("_backward")[
        0
    ].split(".")[0]


def _kernel(x: Line, names: dict[str, str], modules: dict[tuple[str, str], str]) -> dict[str, Any]:
    step = x.step
    line, module, backward = parts(step.sources[0] if step.sources else "")
    sizes = {"bytes": step.bytes, "flops": step.flops, "matrix": step.matrix_flops}
    return {
        "program": names.get(x.program, x.program),
        "op": step.op,
        "what": step.what,
        "name": step.name,
        "line": line,
        "lines": step.sources,
        "module": module or (modules.get(_key(x), "") if line else ""),
        "backward": backward,
        "calls": x.calls,
        "total": x.total,
        "best": x.best,
        "limit": x.limit,
        "depth": step.depth,
        **{k: v if isinstance(v, int) else str(v) for k, v in sizes.items()},
    }


@contextmanager
def record() -> Iterator[Recording]:
    """Record what happens in the block: what Python does with the device, programs and each of
    their steps, compiles, waits and memory. Programs are compiled for it, and forgotten
    afterwards; recording operations takes longer, since their Python lines are looked for."""
    state = session.current()
    engine = session.engine()
    engine.synchronize()
    engine.clear_cache()
    PROFILED.programs.clear()
    timeline = Timeline(engine)
    found = Recording(timeline)
    before, state.sources, state.modules = state.sources, True, Modules()
    known = len(metrics.explain().compiles)
    try:
        with (
            config.override(PROFILE="wall"),
            torch.autograd.set_detect_anomaly(True, check_nan=False),
            timeline.recording(),
        ):
            yield found
            session.engine().sync()
    finally:
        state.sources, state.modules = before, None
        found.seconds = time.monotonic() - timeline.began
        found.compiles = metrics.explain().compiles[known:]
        found.lines = collect("wall")
        PROFILED.programs.clear()
        engine.clear_cache()
