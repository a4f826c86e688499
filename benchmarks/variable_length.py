"""Training a BERT-like encoder on batches of random lengths: one program for all sizes against
padding to powers of two.

    python -m benchmarks.variable_length [--steps 200] [--shortest 17] [--longest 512] [--engines
        eager,hlo,hlo_padded]

Prints, per engine, compiles, seconds in all and without compiling, and microseconds per real token
(the padding does not count). The engines take turns step by step on the same batches, so that a
busy neighbour slows all of them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

BATCH, WIDTH, HEADS, LAYERS, VOCABULARY = 4, 128, 4, 2, 1000


class Encoder(nn.Module):
    """Learned positions, pre-norm blocks, a masked language model's head. `lengths`: real tokens
    per row, None when all are."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Embedding(longest, WIDTH),
        )
        layer = nn.TransformerEncoderLayer(
            WIDTH,
            HEADS,
            4 * WIDTH,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.body(x, src_key_padding_mask=padding))


class Trainer:
    def __init__(self, device: str, longest: int, padded: bool) -> None:
        torch.manual_seed(0)
        self.device, self.padded = device, padded
        self.model = Encoder(longest).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> None:
        start = time.perf_counter()
        padding = None
        if self.padded:
            length = ids.shape[1]
            size = 1 << (length - 1).bit_length()
            padding = (
                (torch.arange(size) >= length).expand(ids.shape[0], -1).contiguous().to(self.device)
            )
            ids, labels = (
                F.pad(ids, (0, size - length)),
                F.pad(labels, (0, size - length), value=-100),
            )
        logits = self.model(ids.to(self.device), padding)
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), labels.to(self.device).view(-1))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the step
        self.seconds.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--shortest", type=int, default=17)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--engines", default="eager,hlo,hlo_padded")
    args = parser.parse_args()
    import torch_hlo

    trainers = {}
    for name in args.engines.split(","):
        kind, _, padded = name.partition("_")
        trainers[name] = Trainer("cpu" if kind == "eager" else "hlo", args.longest, bool(padded))
    rng = random.Random(0)
    compiles = dict.fromkeys(trainers, 0)
    # seconds per token of the steps that compiled nothing
    steady: dict[str, list[float]] = {name: [] for name in trainers}
    tokens = 0
    for step in range(args.steps):
        length = rng.randint(args.shortest, args.longest)
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCABULARY, (BATCH, length), generator=generator)
        labels = torch.randint(VOCABULARY, (BATCH, length), generator=generator)
        tokens += ids.numel()
        for name, trainer in trainers.items():
            before = torch_hlo.metrics.counter_value("UncachedCompile") or 0
            trainer.step(ids, labels)
            fresh = (torch_hlo.metrics.counter_value("UncachedCompile") or 0) - before
            compiles[name] += fresh
            if not fresh:
                steady[name].append(trainer.seconds[-1] / ids.numel())
    print(f"{args.steps} steps, lengths {args.shortest} to {args.longest}, {tokens} real tokens")
    print(
        f"{'engine':12}{'compiles':>10}{'seconds':>10}{'us/token':>10}"
        f"{'us/token (median, no compile)':>32}{'last loss':>12}"
    )
    for name, t in trainers.items():
        steady_us = statistics.median(steady[name]) * 1e6 if steady[name] else float("nan")
        print(
            f"{name:12}{compiles[name]:>10}{sum(t.seconds):>10.2f}"
            f"{sum(t.seconds) / tokens * 1e6:>10.1f}{steady_us:>32.1f}{t.losses[-1]:>12.5f}"
        )


if __name__ == "__main__":
    main()
