"""Train a GPT on one device and over meshes of four: data parallel, FSDP, 2x2 FSDP + tensor
parallel. The losses are equal.

    # four virtual devices in one process
    python examples/train_gpt_spmd.py
    # one process per device, the same code
    torchrun --nproc-per-node 4 examples/train_gpt_spmd.py
    python examples/train_gpt_spmd.py --strategies fsdp+megatron --steps 50

Prints the losses, their largest difference, and the collectives of one training step with the bytes
that a device sends.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("TORCH_HLO_CPU_DEVICES", "4")

import torch
import torch.distributed as dist
from torch.nn import functional as F
from train_gpt import GPT, standard_library

import torch_hlo
from torch_hlo.distributed import Mesh, Plan, data_parallel, fsdp, megatron, programs

# name -> (shape of the mesh, axes, tactics)
STRATEGIES = {
    "single": None,
    "data parallel": ((4,), ("data",), [data_parallel("data")]),
    "fsdp": ((4,), ("data",), [fsdp("data")]),
    "fsdp+megatron": ((2, 2), ("data", "model"), [megatron("model"), fsdp("data")]),
}


def train(
    strategy, args: argparse.Namespace, data: torch.Tensor, vocabulary: int
) -> tuple[list[float], float]:
    """Losses, and seconds per step after the compiles."""
    torch.manual_seed(0)
    model = GPT(vocabulary, args.block, args.layers, args.width, args.heads).to("hlo")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = None
    if strategy is not None:
        shape, axes, tactics = strategy
        plan = Plan(model, Mesh(shape, axes), tactics)
        plan.mark()
    sampler = torch.Generator().manual_seed(1)
    losses = []
    for step in range(args.steps):
        if step == 2:
            torch_hlo.sync()
            start = time.perf_counter()
        at = torch.randint(len(data) - args.block - 1, (args.batch,), generator=sampler)
        x, y = (
            torch.stack([data[i + shift : i + shift + args.block] for i in at]).to("hlo")
            for shift in (0, 1)
        )
        if plan is not None:
            x, y = plan.mark_batch(x, y)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_hlo.mark_step()
        losses.append(loss.detach())
    torch_hlo.sync()
    return [loss.item() for loss in losses], (time.perf_counter() - start) / (args.steps - 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (
        ("steps", 8),
        ("batch", 16),
        ("block", 32),
        ("layers", 2),
        ("width", 64),
        ("heads", 4),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="comma-separated")
    args = parser.parse_args()
    if args.steps < 3:
        parser.error("--steps: the first two steps compile, take at least 3")
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("cpu:gloo,hlo:gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0

    def say(*words) -> None:
        if first:
            print(*words, flush=True)

    text = standard_library(200_000)
    symbols = sorted(set(text))
    data = torch.tensor([symbols.index(c) for c in text])
    vocabulary = -(-len(symbols) // 16) * 16  # divisible by the axes
    world = dist.get_world_size() if dist.is_initialized() else 0
    where = f"processes: {world}" if world else "one process, 4 virtual devices"
    say(f"{where}; {args.layers} layers of width {args.width}")
    reference: list[float] | None = None
    for name in args.strategies.split(","):
        before = len(programs())
        losses, seconds = train(STRATEGIES[name], args, data, vocabulary)
        reference = reference or losses
        difference = max(abs(a - b) for a, b in zip(losses, reference))
        say(
            f"\n{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {seconds * 1e3:.0f} ms per step,"
            f" largest difference {difference:.1e}"
        )
        if STRATEGIES[name] is not None:
            say(max(programs()[before:], key=lambda p: p.runs).cost.table())
        if difference > 1e-3:
            raise SystemExit(f"{name}: the losses differ")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
