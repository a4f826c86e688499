"""Train a character-level GPT on the Python standard library's own sources, until it writes words.

    python examples/train_gpt.py                     # about a minute on two cores
    python examples/train_gpt.py --steps 300         # a quick look
    python examples/train_gpt.py --layers 6 --width 384 --block 128 --steps 500

First a few steps run in eager PyTorch on the CPU, in a process of their own. Then the same training
runs on the "hlo" device: the whole step (forward, backward, optimizer) is captured by
torch_hlo.compile, so that a step is one call. Both start from the same weights and see the same
batches, so their losses can be compared.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import resource
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn
from torch.nn import functional as F

SETTLED = 10  # steps before times are taken


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, vocab: int, block: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.token.weight
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.token(ids) + self.position(positions))))


def standard_library(limit: int = 2_000_000) -> str:
    """Sources that are on every machine with Python."""
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(f.read_text(encoding="utf-8", errors="ignore") for f in files)[:limit]
    return "".join(c for c in text if c.isascii())


class Training:
    """The model, its optimizer and its batches: the same on every device."""

    def __init__(self, device: str, args: argparse.Namespace, text: str) -> None:
        self.characters = sorted(set(text))
        code = {c: i for i, c in enumerate(self.characters)}
        self.data = torch.tensor([code[c] for c in text])
        self.device, self.args = device, args
        self.vocab = args.vocab or len(self.characters)
        torch.manual_seed(0)
        self.model = GPT(self.vocab, args.block, args.layers, args.width, args.heads).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        self.random = torch.Generator().manual_seed(1)

    def rate(self, step: int) -> float:
        """A short warm-up, then down to a tenth along a cosine."""
        rest = min(1.0, step / self.args.steps)
        return min(1.0, (step + 1) / 40) * (0.55 + 0.45 * math.cos(math.pi * rest))

    def batch(self) -> torch.Tensor:
        """[batch, block + 1] characters, s64."""
        length = self.args.block + 1
        at = torch.randint(len(self.data) - length, (self.args.batch,), generator=self.random)
        return torch.stack([self.data[i : i + length] for i in at]).to(self.device)

    def step(self, window: torch.Tensor) -> torch.Tensor:
        """Forward, backward, update; returns the loss."""
        logits = self.model(window[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, self.vocab), window[:, 1:].reshape(-1))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.detach()


def train(
    training: Training,
    step: Callable[[torch.Tensor], torch.Tensor],
    steps: int,
    shown: Callable[[int, float], None] = lambda step, loss: None,
) -> dict[str, object]:
    """Losses, seconds of the first step, and the median seconds of a later one."""
    losses: list[torch.Tensor] = []
    seconds: list[float] = []
    start = time.perf_counter()
    for number in range(steps):
        losses.append(step(training.batch()))
        if number % 10 == 0 or number < SETTLED:
            shown(number, losses[-1].item())  # waits, so that a step's time is a step's time
            seconds.append((time.perf_counter() - start) / (1 if number <= SETTLED else 10))
            start = time.perf_counter()
    settled = seconds[SETTLED + 1 :] or seconds[-1:]
    return {
        "losses": [x.item() for x in losses],
        "first": seconds[0],
        "step": statistics.median(settled),
    }


def peak_mb() -> float:
    """The most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def eager(arguments: list[str], steps: int) -> dict:
    """The first steps in eager PyTorch, in a process of its own so that its memory is its own."""
    command = [sys.executable, __file__, *arguments, "--eager", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@torch.no_grad()
def generate(training: Training, start: str, count: int) -> str:
    """Sample `count` characters. The window always has `block` ids, so one program serves every
    step."""
    block, device = training.args.block, training.device
    ids = [training.characters.index(c) for c in start]
    random = torch.Generator().manual_seed(2)
    for _ in range(count):
        window = ids[-block:]
        padded = torch.tensor([window + [0] * (block - len(window))]).to(device)
        logits = training.model(padded).cpu()[0, len(window) - 1, : len(training.characters)]
        weights = torch.softmax(logits / 0.7, 0)
        ids.append(int(torch.multinomial(weights, 1, generator=random)))
    return "".join(training.characters[i] for i in ids)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"layers": 4, "width": 128, "heads": 4, "block": 64, "batch": 12, "steps": 2000}
    for name, value in {**sizes, "vocab": 0, "generate": 300}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--eager", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def summary(hlo: dict, cpu: dict, tokens: int, memory: float) -> Table:
    """What the two trainings cost, side by side."""
    table = Table("", "hlo, captured", "eager", "")
    faster = f"{cpu['step'] / hlo['step']:.2f} times as fast"
    table.add_row("step, ms", f"{hlo['step'] * 1e3:.1f}", f"{cpu['step'] * 1e3:.1f}", faster)
    rates = (f"{tokens / r['step']:,.0f}" for r in (hlo, cpu))
    table.add_row("tokens per second", *rates, "")
    table.add_row("first step, s", f"{hlo['first']:.2f}", f"{cpu['first']:.2f}", "hlo compiles")
    table.add_row("peak memory, MB", f"{memory:.0f}", f"{cpu['memory']:.0f}", "whole process")
    return table


def main() -> None:
    args = parse(sys.argv[1:])
    text = standard_library()
    if args.vocab and args.vocab < len(set(text)):
        sys.exit(f"--vocab {args.vocab}: the text has {len(set(text))} different characters")
    if args.eager:
        training = Training("cpu", args, text)
        result = train(training, training.step, args.eager)
        print(json.dumps({**result, "memory": peak_mb()}))
        return
    import torch_hlo

    console = Console()
    compared = min(100, args.steps)
    with console.status(f"{compared} steps in eager PyTorch"):
        cpu = eager(sys.argv[1:], compared)
    training = Training("hlo", args, text)
    columns = (TextColumn("step {task.completed}"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=args.steps)

        def shown(number: int, loss: float) -> None:
            beside = f"  eager {cpu['losses'][number]:.4f}" if number < compared else ""
            progress.update(task, completed=number + 1, description=f"loss {loss:.4f}{beside}")

        hlo = train(training, torch_hlo.compile(training.step), args.steps, shown)
        progress.update(task, completed=args.steps)
    memory = peak_mb()
    compiles = torch_hlo.metrics.counter_value("UncachedCompile") or 0
    fallbacks = [n for n in torch_hlo.metrics.counter_names() if n.startswith("aten::")]
    differences = (abs(a - b) for a, b in zip(hlo["losses"], cpu["losses"], strict=False))
    console.print(summary(hlo, cpu, args.batch * args.block, memory))
    print(f"loss: {hlo['losses'][0]:.3f} at first, {hlo['losses'][-1]:.3f} at the end")
    print(f"largest loss difference: {max(differences):.2e} in {compared} steps")
    print(f"compiles: {compiles} (training)   fallbacks: {', '.join(fallbacks) or 'none'}")
    print(f"\n--- generated ---\n{generate(training, 'def ', args.generate)}")


if __name__ == "__main__":
    main()
