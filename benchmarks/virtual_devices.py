"""What N virtual devices cost: the same GPT step on one device and spread over N, by batch (data)
or by parameters too (fsdp).

    python -m benchmarks.virtual_devices [--devices 2,4,8] [--layouts data,fsdp] [--rounds 15]

All work is done by the same cores either way, so a ratio of 1 would mean that cutting, meeting and
moving bytes is free. AdamW's update is repeated by every device under `data`. The variants take
turns step by step; quote ratios of medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

import torch_hlo
from benchmarks.workloads import GPT
from torch_hlo import config
from torch_hlo.distributed import Mesh, mark_sharding

VOCABULARY, BLOCK, LAYERS, WIDTH, HEADS, BATCH = 256, 64, 4, 128, 4, 16


def stepper(devices: int, layout: str) -> Callable[[], float]:
    """A function that trains for one step and waits; returns the loss."""
    torch.manual_seed(0)
    model = GPT(VOCABULARY, BLOCK, LAYERS, WIDTH, HEADS).to("hlo")
    ids = torch.randint(VOCABULARY, (BATCH, BLOCK + 1))
    x, y = ids[:, :-1].contiguous().to("hlo"), ids[:, 1:].contiguous().to("hlo")
    if devices > 1:
        mesh = Mesh((devices,), ("d",))
        for tensor in (x, y):
            mark_sharding(tensor, mesh, ("d", None))
        for p in model.parameters():
            spread = layout == "fsdp" and p.shape[0] % devices == 0
            mark_sharding(p, mesh, ("d" if spread else None, *[None] * (p.dim() - 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).reshape(-1, VOCABULARY), y.reshape(-1))
        loss.backward()
        optimizer.step()
        torch_hlo.mark_step()
        return loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", default="2,4,8")
    parser.add_argument("--layouts", default="data,fsdp")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    counts = [int(n) for n in args.devices.split(",")]
    with config.override(CPU_DEVICES=max(counts)):
        variants = {"one device": stepper(1, "")} | {
            f"{n} devices, {layout}": stepper(n, layout)
            for layout in args.layouts.split(",")
            for n in counts
        }
        losses = {name: [step() for _ in range(3)][-1] for name, step in variants.items()}
        wall: dict[str, list[float]] = {name: [] for name in variants}
        cpu: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(args.rounds):
            for name, step in variants.items():
                start, used = time.perf_counter(), time.process_time()
                step()
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - used)
    one = "one device"
    print(f"{'':24}{'wall ms':>10}{'ratio':>8}{'CPU ms':>10}{'ratio':>8}   loss after 3 steps")
    for name in variants:
        w, c = statistics.median(wall[name]), statistics.median(cpu[name])
        print(
            f"{name:24}{w * 1e3:10.1f}{w / statistics.median(wall[one]):8.2f}"
            f"{c * 1e3:10.1f}{c / statistics.median(cpu[one]):8.2f}"
            f"   {losses[name]:.6f}"
        )


if __name__ == "__main__":
    main()
