"""The LLVM text of a corpus of programs, before and after a refactoring: code that only moved must
write the same code.

    python -m test.sweeps.llvm_text write before.json       # a digest per program and target
    python -m test.sweeps.llvm_text compare before.json     # exit 1 and the names of those that
                                                            # differ

The corpus: random programs, the programs that JAX wrote, steps of models that PyTorch recorded; for
AMX, AVX-512, AVX2, SSE, NEON, and three kinds of GPU. `--texts DIR` also writes the texts, for
`diff`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import torch_hlo
from test.compiler import (
    programs,
    random_hlo,
    random_programs,
)
from test.sweeps import counted
from torch_hlo import config
from torch_hlo.compiler import compile as compiler
from torch_hlo.compiler.gpu.gpu_program import GpuProgram
from torch_hlo.compiler.gpu.target import gpu_target
from torch_hlo.compiler.llvm.target import Target, platform_target
from torch_hlo.compiler.pipeline import optimize, passes_for
from torch_hlo.device import programs as loading
from torch_hlo.hlo.ir.instruction import Module
from torch_hlo.hlo.text.parser import parse_module

DATA = Path(__file__).parents[1] / "data" / "jax_programs.npz"


def targets() -> dict[str, Target]:
    v4 = platform_target("x86_64-linux-gnu", "x86-64-v4", threads=True)
    amx = "+amx-bf16,+amx-int8,+amx-tile,+avx512bf16,+avx512vnni,+avx512fp16"
    found = {
        "amx": replace(v4, cpu="sapphirerapids", features=f"{v4.features},{amx}"),
        "avx512": v4,
        "avx2": platform_target("x86_64-linux-gnu", "x86-64-v3", threads=True),
        "sse": platform_target("x86_64-linux-gnu", "x86-64-v2", threads=True),
        "neon": platform_target("aarch64-linux-gnu", threads=True),
    }
    found = {name: replace(t, cores=4) for name, t in found.items()}
    return found | {name: gpu_target(name) for name in ("nvptx:sm_80", "nvptx:sm_90a")}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(24, 32, 2, batch_first=True), nn.Linear(32, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


def convolutions() -> nn.Module:
    def layer(i: int, o: int, size: int = 3, **options: int) -> list[nn.Module]:
        return [
            nn.Conv2d(i, o, size, padding=size // 2, **options),
            nn.BatchNorm2d(o),
            nn.ReLU(),
        ]

    return nn.Sequential(
        *layer(3, 16, 7, stride=2),
        nn.MaxPool2d(3, 2, 1),
        *layer(16, 32),
        *layer(32, 32, groups=32),
        *layer(32, 48, 1),
        *layer(48, 48),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(192, 10),
    )


def models() -> Iterator[tuple[str, Module]]:
    """The programs of a few steps of training and inference, as the lazy device gives them to the
    compiler."""
    cases: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "mlp": (
            lambda: nn.Sequential(
                nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 10)
            ),
            (32, 64),
        ),
        "transformer": (
            lambda: nn.Sequential(Block(64, 4), Block(64, 4), nn.Linear(64, 100)),
            (2, 48, 64),
        ),
        "convolutions": (convolutions, (4, 3, 64, 64)),
        "recurrent": (Recurrent, (5, 12, 24)),
    }
    kept: list[Module] = []
    compile_module = loading.compile_module

    def keeping(module: Module, *args: object, **options: object) -> object:
        kept.append(module)
        return compile_module(module, *args, **options)

    with (
        config.override(CACHE="", ASYNC=False),
        patch.object(loading, "compile_module", keeping),
    ):
        for name, (make, dims) in cases.items():
            for dtype in (torch.float32, torch.bfloat16):
                torch.manual_seed(0)
                model, x = make().to("hlo", dtype), torch.randn(dims).to("hlo", dtype)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                for _ in range(2):
                    loss = model(x).float().square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    torch_hlo.sync()
                with torch.no_grad():
                    model.eval()(x).float().sum().item()
                torch_hlo.sync()
                for number, module in enumerate(kept):
                    yield f"{name} {dtype} {number}", module
                kept.clear()


def modules(count: int) -> Iterator[tuple[str, Module]]:
    for make in (
        programs.softmax,
        programs.layernorm,
        programs.layernorm_backward,
        programs.cross_entropy,
        programs.adam,
    ):
        yield make.__name__, make()
    for seed in range(count):
        yield f"random_hlo {seed}", random_hlo.random_module(seed)
        yield f"random_programs {seed}", random_programs.random_module(seed)
    with np.load(DATA) as data:
        for name in data.files:
            if name.endswith("/hlo"):
                yield name, parse_module(data[name].tobytes().decode())
    yield from models()


class Texts:
    """Where functions that run on the host are written to, in place of LLVM."""

    def __init__(self) -> None:
        self.declarations: dict[str, str] = {}
        self.functions: list[str] = []

    def add(self, name: str, text: str) -> None:
        self.functions.append(text)


def llvm_text(module: Module, target: Target) -> str:
    """All that is written for LLVM; or the error that says why there is no code, which must stay
    the same too."""
    texts = Texts()
    try:
        optimized = optimize(module, passes=passes_for(target))
        program, report = compiler.emit(optimized, target, objects=texts)
        device = program.device_text() if isinstance(program, GpuProgram) else ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    # The numbers of names depend on which equal instructions garbage collection left.
    report = re.sub(r"\.\d+$", "", report, flags=re.MULTILINE)
    return "\n".join([report, *map(str, program.declarations.values()), *texts.functions, device])


def digests(count: int, folder: Path | None) -> dict[str, str]:
    found = {}
    for name, module in counted("LLVM text", modules(count)):
        for target_name, target in targets().items():
            key = f"{name} {target_name}"
            text = llvm_text(module, target)
            found[key] = hashlib.sha256(text.encode()).hexdigest()[:16]
            if folder is not None:
                (folder / f"{key.replace('/', '_')}.ll").write_text(text)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--random", type=int, default=20, help="random programs of each kind")
    parser.add_argument("--texts", type=Path, help="folder that gets the texts")
    options = parser.parse_args()
    if options.texts is not None:
        options.texts.mkdir(parents=True, exist_ok=True)
    before = json.loads(options.file.read_text()) if options.what == "compare" else {}
    found = digests(options.random, options.texts)
    if options.what == "write":
        options.file.write_text(json.dumps(found, indent=0))
        print(f"{len(found)} texts of {len(set(found.values()))} kinds")
        return 0
    different = sorted(
        name for name in before.keys() | found.keys() if before.get(name) != found.get(name)
    )
    print(
        f"{len(found)} texts, {len(different)} differ"
        + "".join(f"\n  {name}" for name in different[:40])
    )
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
