"""`check`: a training script for a few steps on "hlo" and on the CPU, each in a process of its own;
one page says what it found.

What is watched: `backward()` gives the losses, an optimizer's step ends a step, and functions of
tensors that give values to Python are reads. On the CPU, "hlo" means the CPU.
"""

import argparse
import collections
import contextlib
import functools
import importlib
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode

from torch_hlo import log, metrics
from torch_hlo.dynamo import step
from torch_hlo.lazy import device_module
from torch_hlo.lazy.record import session
from torch_hlo.pytorch.registration import PLACE

CLOSE = 1e-2  # how far losses of the two may be apart, relative to them or to 1


class _Enough(BaseException):
    """As many steps as were asked for are done."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=8, help="of an optimizer, or calls (default 8)")
    add("--way", choices=("cpu", *WAYS), help=argparse.SUPPRESS)  # in the process of one way
    add("--report", help=argparse.SUPPRESS)
    add("file", help="script.py, or module:function that does one step: then it is also captured")
    add("arguments", nargs=argparse.REMAINDER, help="of the script")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.way:
        Path(args.report).write_text(json.dumps(_watched(args)))
        return 0
    ways = ["cpu", *WAYS] if ":" in args.file else ["cpu", "recorded"]
    if ":" not in args.file:
        os.stat(args.file)  # there is such a file
    found = {way: _process(args, way) for way in ways}
    print("\n".join(page(found)))
    good = found["recorded"]["ours"] and not any(r["error"] for r in found.values())
    return 0 if good and difference(found) <= CLOSE else 1


def _process(args: argparse.Namespace, way: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "torch_hlo", "check", "--steps", str(args.steps)]
        command += ["--way", way, "--report", file.name, args.file, *args.arguments]
        ended = subprocess.run(command, capture_output=True, text=True)
        text = Path(file.name).read_text()
        found = _EMPTY | (json.loads(text) if text else {"error": "exit: without a report"})
        if found["error"].startswith("exit: "):
            found["error"] += f"\n{ended.stderr[-2000:]}"
        return found


# ---- in the process of one way


class _Watch(TorchFunctionMode):
    """Notes losses, times of steps and reads; with `cpu`, what is for the device goes there."""

    def __init__(self, cpu: bool, steps: int) -> None:
        super().__init__()
        self.cpu = cpu
        self.steps = steps
        self.losses: list[torch.Tensor] = []
        self.times = [time.perf_counter()]
        self.reads: collections.Counter[str] = collections.Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.cpu:
            args = tuple(map(_on_cpu, args))
            kwargs = {key: _on_cpu(value) for key, value in kwargs.items()}
        if name == "backward" and args and args[0].numel() == 1:
            self.losses.append(args[0].detach())
            if len(self.losses) > 64 * self.steps:  # without an optimizer: nobody counts steps
                raise _Enough
        before = _waits()
        result = func(*args, **kwargs)
        if _waits() > before:
            self.reads[f"{log.source()} {name}"] += 1
        return result

    def stepped(self, *unused: Any) -> None:
        """After a step of an optimizer."""
        if not self.cpu:
            session.engine().mark_step(True)
        self.times.append(time.perf_counter())
        if len(self.times) > self.steps:
            raise _Enough


def _waits() -> int:
    """How many reads had to wait for the device; not of indices that came from the CPU."""
    return metrics.samples("InboundData") - (metrics.counter_value("IndicesLookedAt") or 0)


def _on_cpu(value: Any) -> Any:
    named = isinstance(value, str) and value.partition(":")[0] in PLACE.names
    own = isinstance(value, torch.device) and value.type in PLACE.names
    return torch.device("cpu") if named or own else value


WAYS: dict[str, Callable[[Callable[[], Any]], Callable[[], Any]]] = {
    "recorded": lambda fn: fn,
    "torch.compile": lambda fn: torch.compile(fn, backend="hlo"),
    "captured": step.compile,
}
_EMPTY = dict(error="", losses=[], seconds=0.0, compiles=0, reasons=[], fallbacks={}, reads=[])
_EMPTY |= dict(peak=0, first=0.0, ours=False, drawn=0)


def _watched(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    watch = _Watch(args.way == "cpu", args.steps)
    error = ""
    try:
        (_calls if ":" in args.file else _script)(args, watch)
    except _Enough:
        pass
    except SystemExit as end:
        error = f"exit: {end.code}" if end.code else ""
    except Exception as raised:
        error = _told(raised)
    explained = metrics.explain()
    on_device = any(x.device.type in PLACE.names for x in watch.losses)
    taken = [b - a for a, b in zip(watch.times, watch.times[1:])]
    return _EMPTY | {
        "error": error,
        "losses": [float(x) for x in watch.losses],
        "first": taken[0] if taken else 0.0,
        "seconds": statistics.median(taken[len(taken) // 2 :]) if taken else 0.0,
        "compiles": metrics.counter_value("UncachedCompile") or 0,
        "reasons": explained.splitlines(),
        "ours": on_device or bool(explained.compiles),
        "drawn": device_module.default_generator().get_offset(),
        "fallbacks": {n: metrics.counter_value(n) for n in metrics.executed_fallback_ops()},
        "reads": watch.reads.most_common(10),
        "peak": torch.get_device_module(PLACE.name).max_memory_allocated(),
    }


def _told(raised: BaseException) -> str:
    """An error, the line of the script that it comes from, and what to do."""
    frames = traceback.extract_tb(raised.__traceback__)
    own = [x for x in frames if not x.filename.startswith(log.OURS)]
    said = "".join(traceback.format_exception_only(raised))
    advice = (
        'change: write .to("hlo") for .cuda(), and "hlo" for "cuda"\n' if "CUDA" in said else ""
    )
    return "".join([*traceback.format_list(own[-2:] or frames[-1:]), said, advice])


def _script(args: argparse.Namespace, watch: _Watch) -> None:
    sys.argv = [args.file, *args.arguments]
    sys.path.insert(0, str(Path(args.file).resolve().parent))
    optimizer.register_optimizer_step_post_hook(watch.stepped)
    with watch:
        runpy.run_path(args.file, run_name="__main__")


def _calls(args: argparse.Namespace, watch: _Watch) -> None:
    """The function's result is the loss. It is watched where Python runs it as it is."""
    sys.path.insert(0, "")
    plain = args.way in ("cpu", "recorded")
    with watch if plain else contextlib.nullcontext():
        module, _, name = args.file.partition(":")
        function = getattr(importlib.import_module(module), name)
        given = functools.partial(function, *args.arguments) if args.arguments else function
        call = given if plain else WAYS[args.way](given)
        watch.times = [time.perf_counter()]
        for _ in range(args.steps):
            result = call()
            if isinstance(result, torch.Tensor) and result.numel() == 1:
                watch.losses[len(watch.times) - 1 :] = [result.detach()]
            watch.stepped()


# ---- the page


def difference(found: dict[str, dict[str, Any]]) -> float:
    """The largest of the losses' differences from the CPU's; infinite if their number differs."""
    want = found["cpu"]["losses"]
    worst = 0.0
    for report in found.values():
        if len(report["losses"]) != len(want):
            return float("inf")
        pairs = zip(report["losses"], want)
        worst = max([worst, *(abs(a - b) / max(abs(b), 1.0) for a, b in pairs)])
    return worst


def page(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The lines of what was found, by way."""
    for error in dict.fromkeys(r["error"] for r in found.values() if r["error"]):
        yield f"{', '.join(w for w in found if found[w]['error'] == error)}: fails\n{error}"
    shown = found["recorded"]
    number = len(shown["losses"])
    worst = difference(found)
    word = "agree" if worst <= CLOSE else "DIFFER"
    if number:
        yield f"losses      {number} {word}: relative difference {worst:.1e}"
    else:
        yield "losses      none: no backward() of one number was called"
    if shown["drawn"]:
        yield "            the device draws other random numbers than the CPU: compare without"
    for way in ("cpu", "recorded"):
        yield f"  {way:10s}" + " ".join(f"{x:.4f}" for x in found[way]["losses"][:8])
    for way, report in found.items():
        times = f"{report['seconds'] * 1e3:.2f} ms, the first {report['first']:.2f} s"
        times = times if report["first"] else "no optimizer's step() was called"
        yield f"step        {way}: {times}, {report['compiles']} compiles"
    ran = [way for way in found if way != "cpu" and not found[way]["error"]]
    if len(ran) > 1:
        yield f"fastest     {min(ran, key=lambda way: found[way]['seconds'])} on hlo"
    yield from (f"compiled    {line}" for line in shown["reasons"][:10])
    names = ", ".join(f"{n} ({k} times)" for n, k in shown["fallbacks"].items()) or "no operation"
    if not shown["ours"]:
        names = 'EVERYTHING: import torch_hlo, and move the model and the data to "hlo"'
    if shown["ours"] or not shown["error"]:
        yield f"on the CPU  {names}"
    yield from (f"read        {line}: {times} times" for line, times in shown["reads"])
    if any(times >= max(number, 2) for _, times in shown["reads"]):
        yield "            a read waits for the device: keep tensors, and read every hundredth step"
    yield f"memory      {shown['peak'] / 2**10:.1f} KiB at most"
