"""What `torch_hlo.debug`, the profiler and TORCH_HLO_NAN cost while they are off: each question
that is asked for them, timed by itself, over the time of what asks it.

python -m benchmarks.seeing
"""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable

import torch
from torch import nn

import torch_hlo
from torch_hlo import config
from torch_hlo.lazy.record import session
from torch_hlo.pytorch import participants

STATE = session.current()
ENGINE = session.engine()

# a question, and how often it is asked for a recorded operation, a recorded step, a captured call,
# a read
QUESTIONS: dict[str, tuple[Callable[[], object], tuple[int, int, int, int]]] = {
    "do operations know their line?": (lambda: STATE.sources and 1, (1, 0, 0, 0)),
    "TORCH_HLO_NAN?": (lambda: config.get("NAN"), (0, 1, 2, 0)),
    "are steps to be checked?": (lambda: ENGINE.unchecked and 1, (0, 1, 0, 0)),
    "is anything looked at?": (lambda: session.current().expected and 1, (0, 2, 2, 1)),
    "does PyTorch's profiler run?": (participants.profiled, (0, 1, 1, 0)),
}


def _alone(question: Callable[[], object], count: int = 200_000) -> float:
    """Seconds, without those of a call that does nothing."""
    empty = min(timeit.repeat(lambda: None, number=count, repeat=7))
    return max(min(timeit.repeat(question, number=count, repeat=7)) - empty, 0) / count


def _median(run: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _works() -> list[tuple[str, float]]:
    """The median seconds of an operation, a step, a captured call and a read, all small."""
    x = torch.ones(64, 64).to("hlo")
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to("hlo")

    def record() -> None:
        y = x
        for _ in range(100):
            y = y + 1
        del y

    def step() -> None:
        kept.append(model(x).relu() * 2)
        torch_hlo.mark_step()
        kept.clear()

    kept: list[torch.Tensor] = []
    captured = torch_hlo.compile(lambda x: model(x).relu() * 2)
    number = (x * 3).sum()
    works = [("operation", record), ("step", step), ("captured call", lambda: captured(x))]
    works.append(("read", number.item))
    with torch.no_grad():
        for _ in range(30):
            for _, run in works:
                run()
        torch_hlo.sync()
        found = [(name, _median(run, 1000)) for name, run in works]
    return [(name, t / 100 if name == "operation" else t) for name, t in found]


def main() -> None:
    times = {name: _alone(question) for name, (question, _) in QUESTIONS.items()}
    print("| what | its time, us | questions | their time, ns | share |\n|---|---|---|---|---|")
    for i, (name, seconds) in enumerate(_works()):
        asked = {q: counts[i] for q, (_, counts) in QUESTIONS.items()}
        spent = sum(times[q] * n for q, n in asked.items())
        print(
            f"| {name} | {seconds * 1e6:.1f} | {sum(asked.values())} | {spent * 1e9:.0f} |"
            f" {spent / seconds:.2%} |"
        )


if __name__ == "__main__":
    main()
