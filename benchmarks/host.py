"""What the host does: microseconds to record an op and to start a step that is known, milliseconds
to compile an op.

    python -m benchmarks.host                    # CPU time of one thread, medians; nothing is
                                                 # cached on disk
    python -m benchmarks.host --ops 100,1000,10000
Recording is measured with kernels out of the way: ops of 16 numbers, and starting a step is
everything between its last op and the return of mark_step(). Compiling should be linear: the last
column stays.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import torch_hlo
from torch_hlo import config, metrics


def seconds(fn: Callable[[], object]) -> float:
    """CPU time of this thread in `fn`."""
    start = time.thread_time()
    fn()
    return time.thread_time() - start


def recording(device: str, grad: bool, count: int = 400) -> float:
    """Microseconds per op of a chain of products and sums."""
    x, y = (
        torch.randn(4, 4).to(device).requires_grad_(grad),
        torch.randn(4, 4).to(device),
    )

    def chain() -> None:
        z = x
        for _ in range(count // 2):
            z = (z * y) + y

    samples = []
    for _ in range(15):
        samples.append(seconds(chain) / count * 1e6)
        torch_hlo.sync()
    return statistics.median(samples)


def launching(layers: int) -> tuple[int, float]:
    """(ops of the step, microseconds to start it) of a training step of a multilayer perceptron,
    once it is known."""
    model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(16, 16), nn.ReLU()))).to(
        "hlo"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(8, 16).to("hlo")
    samples = []
    for _ in range(30):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        samples.append(seconds(torch_hlo.mark_step) * 1e6)
        torch_hlo.sync()
    return int(metrics.metric_data("TensorsGraphSize")[2][-1][1]), statistics.median(samples[5:])


def replaying() -> tuple[float, float]:
    """Microseconds of a call of the captured training step of a multilayer perceptron
    (784-256-128-10, AdamW, 26 inputs, 31 results), which is all but running its program: of the
    fastest tenth, and the median."""
    model = nn.Sequential(
        nn.Linear(784, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    ).to("hlo")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(8, 784).to("hlo"), torch.randint(10, (8,)).to("hlo")

    @torch_hlo.compile
    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    samples = []
    for _ in range(400):
        samples.append(seconds(step) * 1e6)
        torch_hlo.sync()
    samples = sorted(samples[20:])
    return samples[len(samples) // 10], statistics.median(samples)


def compiling(ops: int) -> tuple[int, float]:
    """(ops recorded, CPU seconds of the process for lowering and compiling them) of blocks of
    products, norms and sums."""
    w, b, x = (
        torch.randn(32, 32).to("hlo"),
        torch.randn(32).to("hlo"),
        torch.randn(16, 32).to("hlo"),
    )
    for i in range(ops // 9):
        h = torch.tanh(F.layer_norm(x, (32,), b, b) @ w + b * (i + 1))
        x = x + h * 0.5
        x = torch.relu(x) - x.mean(-1, keepdim=True)
    start = time.process_time()
    torch_hlo.sync()
    return int(metrics.metric_data("TensorsGraphSize")[2][-1][1]), time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ops", default="100,1000,10000", help="sizes of the graphs to compile")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for grad in (False, True):
        ours, eager = recording("hlo", grad), recording("cpu", grad)
        print(
            f"recording an op{' with autograd' if grad else '':15s} {ours:8.1f} us   (eager, which"
            f" computes it: {eager:.1f} us)"
        )
    for layers in (3, 30):
        ops, micros = launching(layers)
        print(
            f"starting a known step of {ops:4d} ops  {micros:8.1f} us   {micros / ops:.2f} us"
            " per op"
        )
    print("calling a captured training step {:8.1f} us   (median {:.1f})".format(*replaying()))
    with config.override(CACHE=""):
        compiling(50)  # what is loaded for the first compile
        for n in args.ops.split(","):
            ops, cpu = compiling(int(n))
            print(
                f"compiling {ops:6d} ops             {cpu:8.2f} s    {cpu / ops * 1e3:.2f} ms"
                " per op",
                flush=True,
            )


if __name__ == "__main__":
    main()
