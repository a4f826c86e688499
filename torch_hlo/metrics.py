"""Counters and metrics with torch_xla's names and verbs: what compiled, what fell back to the CPU,
where time went.

    metrics.counter_value("UncachedCompile")      # None when it never counted
    metrics.metric_data("ExecuteTime")            # (samples, total seconds, [(when, seconds), ...])
    print(metrics.metrics_report())
    metrics.to_json(), metrics.to_prometheus()    # texts for programs that watch
    metrics.write_to(SummaryWriter(), step)       # TensorBoard

Counters named `aten::<op>` count ops that ran on the CPU because they have no lowering.
"""

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from . import pages

SAMPLES = 1024  # samples kept per metric; totals count all of them
_STEP = ("MarkStep", "CachedCompile")
_PERCENTILES = (1, 5, 10, 20, 50, 80, 90, 95, 99)


@dataclass(slots=True)
class _Metric:
    unit: str
    count: int = 0
    total: float = 0.0
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def percentile(self, p: int) -> float:
        """Of the last samples."""
        values = sorted(v for _, v in self.samples)
        return values[min(len(values) * p // 100, len(values) - 1)]


@dataclass
class Compile:
    """Why a program was compiled; without a `name`, why something runs without one.

    `kind`: what differs from the nearest program, in a word or two; `line`: the Python line of
    that; `where`: the line that needed the program; `outcome`: what became of it. Times in
    seconds, `began` since 1970."""

    text: str
    name: str = ""
    kind: str = "note"
    advice: str = ""
    line: str = ""
    where: str = ""
    ops: int = 0
    outcome: str = ""
    seconds: float = 0.0
    began: float = field(default_factory=time.time)


class Explanation(str):
    """The reasons of the last compiles as text; in a notebook, a page."""

    compiles: list[Compile]

    def page(self, title: str = "Why programs were compiled", **facts: object) -> str:
        """The text of an HTML file. `facts`: `seconds` of the run, a `sub`title."""
        compiles = [asdict(c) for c in self.compiles]
        facts.setdefault("steps", counter_value("MarkStep"))
        return pages.page("explain", {"title": title, "compiles": compiles, **facts}, title, self)

    def _repr_html_(self) -> str:
        return pages.framed(self.page())


class _Kept:
    """What this process has counted. Counters and metrics are changed under `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counters: dict[str, int] = {}
        self.metrics: dict[str, _Metric] = {}
        self.reasons: deque[Compile] = deque(maxlen=1024)
        self.names: dict[str, str] = {}  # see `rename`


_kept = _Kept()


def count(name: str, value: int = 1) -> None:
    """Add `value` to counter `name`."""
    with _kept.lock:
        _kept.counters[name] = _kept.counters.get(name, 0) + value


def launched(ops: int) -> None:
    """A known step of so many ops has been started: `count` and `record` of what every step counts
    and records, at once."""
    with _kept.lock:
        for name in _STEP:
            _kept.counters[name] = _kept.counters.get(name, 0) + 1
        _sample("TensorsGraphSize", ops, "")


def record(name: str, value: float, unit: str = "s") -> None:
    """Add a sample to metric `name`; `unit` is "s" (seconds), "B" (bytes) or "" (a plain
    number)."""
    with _kept.lock:
        _sample(name, value, unit)


def _sample(name: str, value: float, unit: str) -> None:
    name = _kept.names.get(name, name)
    metric = _kept.metrics.get(name)
    if metric is None:
        metric = _kept.metrics[name] = _Metric(unit)
    metric.count += 1
    metric.total += value
    metric.samples.append((time.time(), value))


def rename(names: dict[str, str]) -> None:
    """From now on samples of metrics in `names` go to those of the other name."""
    _kept.names = names


def moved(seconds: str, start: float, data: str, nbytes: int) -> None:
    """`record` of bytes between the host and the device, and of the time since `start`."""
    with _kept.lock:
        _sample(seconds, time.perf_counter() - start, "s")
        _sample(data, nbytes, "B")


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
    """Record how long the `with` block takes, also when it raises."""
    start = time.perf_counter()
    try:
        yield
    finally:
        record(name, time.perf_counter() - start)


def counter_names() -> list[str]:
    """Names of the counters that have counted, sorted."""
    return sorted(_kept.counters)


def counter_value(name: str) -> int | None:
    """Value of a counter; None when it never counted."""
    return _kept.counters.get(name)


def metric_names() -> list[str]:
    """Names of the metrics that have samples, sorted."""
    return sorted(_kept.metrics)


def metric_data(name: str) -> tuple[int, float, list[tuple[float, float]]] | None:
    """(number of samples, their sum, the last samples as (unix time, value)) of a metric; None when
    it has no sample. Times are in seconds, sizes in bytes."""
    with _kept.lock:
        metric = _kept.metrics.get(name)
        return None if metric is None else (metric.count, metric.total, list(metric.samples))


def samples(name: str) -> int:
    """How many samples a metric has."""
    metric = _kept.metrics.get(name)
    return metric.count if metric else 0


def executed_fallback_ops() -> list[str]:
    """Names of the aten ops that ran on the CPU."""
    return [name for name in counter_names() if name.startswith("aten::")]


def clear_counters() -> None:
    """Forget every counter."""
    with _kept.lock:
        _kept.counters.clear()


def clear_metrics() -> None:
    """Forget every metric."""
    with _kept.lock:
        _kept.metrics.clear()


def clear_all() -> None:
    """Forget counters, metrics and compile reasons."""
    clear_counters()
    clear_metrics()
    _kept.reasons.clear()


def add_compile_reason(text: str) -> None:
    """Remember why a program was compiled."""
    explained(Compile(text))


def explained(compile: Compile) -> None:
    """Remember a compile, whose outcome may follow."""
    _kept.reasons.append(compile)


def last_compile_reason() -> str | None:
    """Why the last program was compiled: the first difference to the nearest cached one. None when
    nothing compiled yet."""
    return _kept.reasons[-1].text if _kept.reasons else None


def explain() -> Explanation:
    """The reasons of the last compiles, oldest first, one paragraph each."""
    compiles = [*_kept.reasons]
    found = Explanation("\n".join(c.text for c in compiles) or "nothing has been compiled")
    found.compiles = compiles
    return found


def _taken() -> tuple[dict[str, int], dict[str, _Metric]]:
    """All counters and metrics, as they are now, by name."""
    with _kept.lock:
        found = sorted(_kept.metrics.items())
        copies = {name: replace(m, samples=m.samples.copy()) for name, m in found}
        return dict(sorted(_kept.counters.items())), copies


def metrics_report() -> str:
    """Everything, in torch_xla's layout."""
    counters, found = _taken()
    lines: list[str] = []
    for name, m in found.items():
        lines += [
            f"Metric: {name}",
            f"  TotalSamples: {m.count}",
            f"  Accumulator: {_show(m.total, m.unit)}",
        ]
        values = m.samples
        span = values[-1][0] - values[0][0]
        if span > 0:
            lines.append(f"  ValueRate: {_show(sum(v for _, v in values) / span, m.unit)} / second")
            lines.append(f"  Rate: {len(values) / span:.6g} / second")
        picks = (f"{p}%={_show(m.percentile(p), m.unit)}" for p in _PERCENTILES)
        lines.append("  Percentiles: " + "; ".join(picks))
    for name, value in counters.items():
        lines += [f"Counter: {name}", f"  Value: {value}"]
    return "\n".join(lines) + ("\n" if lines else "")


def to_json() -> str:
    """Everything, compiles with their reasons too, as JSON. Seconds and bytes."""
    counters, found = _taken()
    metrics = {
        name: {
            "unit": m.unit,
            "samples": m.count,
            "total": m.total,
            "percentiles": {p: m.percentile(p) for p in _PERCENTILES},
        }
        for name, m in found.items()
    }
    compiles = [asdict(c) for c in [*_kept.reasons]]
    return json.dumps({"counters": counters, "metrics": metrics, "compiles": compiles})


def to_prometheus() -> str:
    """Everything in the text format that Prometheus reads: the names of counters and metrics are
    labels."""
    counters, found = _taken()
    lines = ["# TYPE torch_hlo_events_total counter"]
    lines += [f'torch_hlo_events_total{{name="{n}"}} {value}' for n, value in counters.items()]
    for unit, family in (
        ("s", "torch_hlo_seconds"),
        ("B", "torch_hlo_bytes"),
        ("", "torch_hlo_size"),
    ):
        lines.append(f"# TYPE {family} summary")
        for name, m in found.items():
            if m.unit == unit:
                lines += [
                    f'{family}{{name="{name}",quantile="{p / 100}"}} {m.percentile(p)}'
                    for p in _PERCENTILES
                ]
                lines.append(f'{family}_sum{{name="{name}"}} {m.total}')
                lines.append(f'{family}_count{{name="{name}"}} {m.count}')
    return "\n".join(lines) + "\n"


def write_to(writer: Any, step: int) -> None:
    """Give every counter, and of every metric the total and the median of the last samples, to
    `writer.add_scalar(name, value, step)`: torch.utils.tensorboard's SummaryWriter, or another."""
    counters, found = _taken()
    values: dict[str, float] = {**counters}
    for name, m in found.items():
        values |= {f"{name}/total": m.total, f"{name}/median": m.percentile(50)}
    for name, value in values.items():
        writer.add_scalar(f"torch_hlo/{name}", value, step)


_SHORT = (
    "CompileTime",
    "ExecuteTime",
    "TransferToDeviceTime",
    "TransferFromDeviceTime",
    "InboundData",
    "OutboundData",
)


def short_metrics_report(
    counter_names: Iterable[str] | None = None,
    metric_names: Iterable[str] | None = None,
) -> str:
    """The counters and metrics named, one line each. By default compiles, fallbacks, run and
    transfer totals."""
    counters, totals = _taken()
    if counter_names is None:
        shown = "CachedCompile", "UncachedCompile", "MarkStep"
        counter_names = [n for n in counters if n.startswith("aten::") or n in shown]
    lines = []
    for name in _SHORT if metric_names is None else metric_names:
        if name in totals:
            m = totals[name]
            lines.append(f"Metric: {name}  samples {m.count}  total {_show(m.total, m.unit)}")
    lines += [f"Counter: {name}  {counters[name]}" for name in counter_names if name in counters]
    return "\n".join(lines) + ("\n" if lines else "")


def _show(value: float, unit: str) -> str:
    return {"s": _show_time, "B": _show_bytes}.get(unit, "{:.6g}".format)(value)


def _show_time(seconds: float) -> str:
    """01m02s003ms004.005us, as torch_xla prints it."""
    micros = seconds * 1e6
    parts: list[str] = []
    for size, name, width in (
        (86400e6, "d", 1),
        (3600e6, "h", 2),
        (60e6, "m", 2),
        (1e6, "s", 2),
        (1e3, "ms", 3),
    ):
        if micros >= size or parts:
            whole = int(micros // size)
            parts.append(f"{whole:0{width}d}{name}")
            micros -= whole * size
    return "".join(parts) + f"{micros:07.3f}us"


def _show_bytes(value: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if abs(value) < 1024:
            return f"{value:.2f}{unit}"
        value /= 1024
    return f"{value:.2f}TB"
