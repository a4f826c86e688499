"""Train a character-level GPT on the Python standard library's own sources, on the "hlo" device, next to CPU eager.

    python examples/train_gpt.py                      # 4 layers, width 128: a minute or two on a laptop
    python examples/train_gpt.py --layers 6 --width 384 --block 128 --vocab 50257

Prints the loss, tokens per second on both, the largest difference of the losses, the number of compiles, and generated text.
"""

from __future__ import annotations

import argparse
import pathlib
import sysconfig
import time

import torch
from rich.progress import track
from torch import nn
from torch.nn import functional as F

import torch_hlo


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
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.token(ids) + self.position(positions))))


def standard_library(limit: int = 2_000_000) -> str:
    """Sources that are on every machine with Python."""
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(f.read_text(encoding="utf-8", errors="ignore") for f in files)[:limit]
    return "".join(c for c in text if c.isascii())


def train(
    device: str, args: argparse.Namespace, data: torch.Tensor, vocab: int
) -> tuple[GPT, list[float], float]:
    """Returns the model, the loss of each step, and the median seconds per step (the first three left out)."""
    torch.manual_seed(0)
    model = GPT(vocab, args.block, args.layers, args.width, args.heads).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    batches = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    for _ in track(range(args.steps), description=f"{device:>4}"):
        start = time.perf_counter()
        at = torch.randint(len(data) - args.block - 1, (args.batch,), generator=batches)
        window = torch.stack([data[i : i + args.block + 1] for i in at]).to(device)
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, vocab), window[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "hlo":
            torch_hlo.mark_step()
        losses.append(loss.detach())
        if len(losses) % 10 == 0 or len(losses) < 4:
            losses[
                -1
            ].item()  # keep the host from running ahead, so that a step's time is a step's time
        seconds.append(time.perf_counter() - start)
    losses = [x.item() for x in losses]
    steady = seconds[3:] or seconds
    return model, losses, sum(steady) / len(steady)


@torch.no_grad()
def generate(model: GPT, ids: list[int], block: int, count: int, device: str) -> list[int]:
    """Sample `count` characters. The window always has `block` ids, so one program serves every step."""
    random = torch.Generator().manual_seed(2)
    for _ in range(count):
        window = ids[-block:]
        padded = torch.tensor([window + [0] * (block - len(window))], device=device)
        logits = (
            model(padded)[0, len(window) - 1]
            if device == "cpu"
            else model(padded).cpu()[0, len(window) - 1]
        )
        ids = ids + [
            int(
                torch.multinomial(torch.softmax(logits.float() / 0.8, 0).cpu(), 1, generator=random)
            )
        ]
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (
        ("layers", 4),
        ("width", 128),
        ("heads", 4),
        ("block", 64),
        ("batch", 12),
        ("steps", 100),
        ("vocab", 0),
        ("generate", 200),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    text = standard_library()
    characters = sorted(set(text))
    code = {c: i for i, c in enumerate(characters)}
    data = torch.tensor([code[c] for c in text])
    vocab = args.vocab or len(characters)
    if vocab < len(characters):
        parser.error(
            f"--vocab {vocab} is smaller than the {len(characters)} characters of the text"
        )

    model, hlo, hlo_seconds = train("hlo", args, data, vocab)
    compiles = torch_hlo.metrics.counter_value("UncachedCompile") or 0
    fallbacks = [n for n in torch_hlo.metrics.counter_names() if n.startswith("aten::")]
    _, cpu, cpu_seconds = train("cpu", args, data, vocab)

    print("\nstep      loss hlo   loss cpu")
    for i in sorted({0, 1, *range(9, args.steps, 10), args.steps - 1}):
        print(f"{i + 1:4d}    {hlo[i]:10.5f} {cpu[i]:10.5f}")
    tokens = args.batch * args.block
    print(f"\nlargest loss difference: {max(abs(a - b) for a, b in zip(hlo, cpu)):.2e}")
    print(
        f"tokens/s: hlo {tokens / hlo_seconds:,.0f}   cpu eager {tokens / cpu_seconds:,.0f}   ({cpu_seconds / hlo_seconds:.2f}x)"
    )
    print(f"compiles: {compiles} (training)   fallbacks: {fallbacks or 'none'}")
    sample = generate(model, [code[c] for c in "def "], args.block, args.generate, "hlo")
    print(
        "\n--- generated ---\n"
        + "".join(characters[i] if i < len(characters) else "?" for i in sample)
    )


if __name__ == "__main__":
    main()
