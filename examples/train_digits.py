"""Train an MLP and a small CNN on scikit-learn's handwritten digits, on the "hlo" device, next to
CPU eager.

    python examples/train_digits.py [--model mlp|cnn|both] [--epochs 30]

Prints loss and test accuracy (above 97 %), the speed of both, compiles and fallbacks.
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.progress import track
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import torch_hlo

MODELS = {
    "mlp": lambda: nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    ),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    ),
}


def split() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Train images [1437,1,8,8] f32 in 0..1 and labels, then test images [360,1,8,8] and labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return images[train], labels[train], images[test], labels[test]


def train(name: str, device: str, epochs: int, batch: int = 64) -> tuple[list[float], float, float]:
    """Returns the losses of all steps, the test accuracy, and milliseconds per step."""
    images, labels, test_images, test_labels = split()
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    shuffle = torch.Generator().manual_seed(1)
    losses = []
    start = time.perf_counter()
    for _ in track(range(epochs), description=f"{name} {device:>4}"):
        order = torch.randperm(len(labels), generator=shuffle)
        for i in range(0, len(order) - batch + 1, batch):
            x, y = (
                images[order[i : i + batch]].to(device),
                labels[order[i : i + batch]].to(device),
            )
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if device == "hlo":
                torch_hlo.mark_step()
        schedule.step()
    losses = [x.item() for x in losses]
    milliseconds = (time.perf_counter() - start) / len(losses) * 1e3
    model.eval()
    with torch.no_grad():
        predicted = model(test_images.to(device)).argmax(1).cpu()
    return losses, (predicted == test_labels).float().mean().item(), milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[*MODELS, "both"], default="both")
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()
    for name in MODELS if args.model == "both" else [args.model]:
        torch_hlo.metrics.clear_all()
        hlo, accuracy, ms = train(name, "hlo", args.epochs)
        compiles = torch_hlo.metrics.counter_value("UncachedCompile") or 0
        fallbacks = [n for n in torch_hlo.metrics.counter_names() if n.startswith("aten::")]
        cpu, cpu_accuracy, cpu_ms = train(name, "cpu", args.epochs)
        first = min(100, len(hlo))
        print(
            f"{name}: loss {hlo[0]:.4f} -> {hlo[-1]:.4f} (cpu {cpu[0]:.4f} -> {cpu[-1]:.4f};"
            f" largest difference in {first} steps"
            f" {max(abs(a - b) for a, b in zip(hlo[:first], cpu[:first])):.1e})"
        )
        print(f"     test accuracy {accuracy:.2%} (cpu {cpu_accuracy:.2%})")
        print(
            f"     {ms:.2f} ms/step on hlo, {cpu_ms:.2f} on cpu eager ({cpu_ms / ms:.2f}x),"
            f" {compiles} compiles, fallbacks: {fallbacks or 'none'}"
        )


if __name__ == "__main__":
    main()
