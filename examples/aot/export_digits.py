"""Train a small CNN on scikit-learn's handwritten digits and compile it ahead of time, for a C
program without Python or torch.

    python examples/aot/export_digits.py --output build
    # or build/digits.o
    cc -Ibuild examples/aot/classify.c build/digits.so -Wl,-rpath,build -o build/classify
    build/classify build/*.pgm

    python examples/aot/export_digits.py --output build --target host wasm32
    node examples/aot/classify.mjs build/digits.wasm build/*.pgm

Writes digits.so (.wasm, .o), digits.h, and some images of the test set, named after what they show.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from torch_hlo import aot


def split() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Train images [1437,1,8,8] u8 in 0..255 and labels, then test images [360,1,8,8] and
    labels."""
    digits = load_digits()
    images = (torch.tensor(digits.images)[:, None] / 16 * 255).round().to(torch.uint8)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return (
        images[order[:1437]],
        labels[order[:1437]],
        images[order[1437:]],
        labels[order[1437:]],
    )


class Classifier(nn.Module):
    """Grey images [batch,1,8,8] u8 -> probabilities [batch,10] f32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images.float() / 255).softmax(1)


def train(
    model: Classifier,
    images: torch.Tensor,
    labels: torch.Tensor,
    epochs: int,
    batch: int = 64,
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(epochs):
        order = torch.randperm(len(labels))
        for i in range(0, len(order), batch):
            rows = order[i : i + batch]
            loss = F.nll_loss(model(images[rows]).log(), labels[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def write_pgm(path: Path, image: torch.Tensor) -> None:
    """A grey image [height,width] u8 as a portable graymap."""
    height, width = image.shape
    path.write_bytes(b"P5 %d %d 255\n" % (width, height) + bytes(image.flatten().tolist()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build"),
        help="folder for everything (default build)",
    )
    parser.add_argument(
        "--target",
        nargs="+",
        default=["host"],
        help="any of host, x86_64-linux-gnu, aarch64-linux-gnu and wasm32",
    )
    parser.add_argument(
        "--object",
        action="store_true",
        help="an object file for static linking instead of a library",
    )
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--images", type=int, default=10, help="test images to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is small
    images, labels, test_images, test_labels = split()
    model = Classifier()
    train(model, images, labels, args.epochs)
    model.eval()
    right = (model(test_images).argmax(1) == test_labels).float().mean().item()
    print(f"test accuracy {100 * right:.1f}%")

    args.output.mkdir(parents=True, exist_ok=True)
    program = torch.export.export(
        model,
        (test_images[:4],),
        dynamic_shapes=({0: torch.export.Dim("batch", max=1024)},),
    )
    for target in args.target:
        suffix = "o" if args.object else "wasm" if target == "wasm32" else "so"
        files = aot.compile(program, target=target, output=args.output / f"digits.{suffix}")
        print(f"wrote {files.library} ({files.library.stat().st_size} bytes) and {files.header}")
    for i in range(args.images):
        write_pgm(args.output / f"digit{int(test_labels[i])}_{i}.pgm", test_images[i, 0])


if __name__ == "__main__":
    main()
