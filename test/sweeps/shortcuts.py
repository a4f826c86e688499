"""What each shortcut past PyTorch saves (torch_hlo/pytorch/shortcuts.py): programs in processes of
their own, with all shortcuts and with all but one, in turns.

    python -m test.sweeps.shortcuts [NAME ...] [--rounds N]

prints medians over the rounds of: seconds of CPU until the first result, resident and peak memory
there, microseconds of CPU per step afterwards."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

from test.sweeps import counted
from torch_hlo.pytorch.shortcuts import ROWS

HEAD = """
import json, os, resource, time
def used():
    r = resource.getrusage(resource.RUSAGE_SELF)
    return r.ru_utime + r.ru_stime
import torch
begin = used()
import torch_hlo
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
"""
TAIL = """
step(); torch_hlo.sync()
first = used() - begin
rss = int(open("/proc/self/statm").read().split()[1]) * 4096
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
for _ in range(8): step()
torch_hlo.sync()
times = []
for _ in range(STEPS):
    start = time.process_time(); step(); times.append(time.process_time() - start)
times.sort()
torch_hlo.sync()
print(json.dumps({"first_s": first, "rss_mb": rss / 1e6, "peak_mb": peak / 1e6, "step_us": times[len(times) // 2] * 1e6}))
"""
TRAIN = """
STEPS = 60
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 10)).to("hlo")
x, labels = torch.randn(4, 3, 8, 8).to("hlo"), torch.arange(4).to("hlo")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    F.cross_entropy(model(x), labels).backward()
    optimizer.step()
    torch_hlo.mark_step()
"""
# PyTorch's optimizers import Dynamo
MODEL = TRAIN.replace("    optimizer.zero_grad()\n", "").replace("    optimizer.step()\n", "")
MODEL = MODEL.replace("optimizer =", "# optimizer =")
INFER = """
STEPS = 60
x, y = torch.randn(16, 16).to("hlo"), torch.randn(16, 16).to("hlo")
@torch.no_grad()
def step():
    z = x
    for _ in range(20):
        z = (z * 2 + y).sigmoid() - z / 3
    out = z.exp()
    torch_hlo.mark_step()
"""
COMPILED = """
STEPS = 200
net = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
x = torch.randn(8, 32)
model = torch.compile(net, backend="hlo")
def step():
    model(x).sum().backward()
"""
# a size that varies: AOTAutograd has it
SYMBOLIC = COMPILED.replace('backend="hlo"', 'backend="hlo", dynamic=True')
EVALUATED = COMPILED.replace("model(x).sum().backward()", "\n    with torch.no_grad(): model(x)")
CAPTURED = """
STEPS = 400
net = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1)).to("hlo")
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
x = torch.randn(8, 32).to("hlo")
@torch_hlo.compile
def step():
    optimizer.zero_grad()
    net(x).sum().backward()
    optimizer.step()
"""
WORKLOADS = {
    "captured": CAPTURED,
    "train": TRAIN,
    "model": MODEL,
    "infer": INFER,
    "compiled": COMPILED,
    "symbolic": SYMBOLIC,
    "evaluated": EVALUATED,
}
ON = {
    "direct_steps": ("captured",),
    "dispatch_rule": ("model", "infer"),
    "dtensor": ("infer", "model"),
    "dynamo_unneeded": ("model",),
    "plain_sizes": ("model",),
    "operators": ("infer",),
    "release_code": ("model", "train"),
    "openmp": ("compiled",),
    "no_autograd": ("compiled",),
    "direct": ("symbolic",),
    "inductor_unneeded": ("symbolic",),
}


def measured(workload: str, shortcuts: str) -> dict[str, float]:
    """One process."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + WORKLOADS[workload] + TAIL],
        env={**os.environ, "TORCH_HLO_SHORTCUTS": shortcuts},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(ON))
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    optional = [row.name for row in ROWS if not row.needed]
    for name in counted("shortcuts", chosen.names):
        without = ",".join(n for n in optional if n != name)
        for workload in ON[name]:
            measured(workload, "1"), measured(workload, without)  # fills the cache of programs
            runs: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
            for _ in range(chosen.rounds):
                runs["with"].append(measured(workload, "1"))
                runs["without"].append(measured(workload, without))
            for key in runs["with"][0]:
                a, b = (statistics.median(r[key] for r in runs[side]) for side in runs)
                print(
                    f"{name:18} {workload:10} {key:8} {a:9.2f} without {b:9.2f}"
                    f"  saves {100 * (b - a) / b:5.1f} %",
                    flush=True,
                )


if __name__ == "__main__":
    main()
