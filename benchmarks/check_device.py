"""What check_gpu does on a device beside families of kernels: the runtime, PyTorch next to it,
training, rates, benchmarks.

Every function returns a line about what it found, raises when it is wrong, and raises Skip where
something it needs is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from benchmarks.check_kernels import dot, reduction, softmax
from torch_hlo import config
from torch_hlo.device import runtime
from torch_hlo.hlo.ir.instruction import outputs
from torch_hlo.hlo.ir.numeric import decode, encode
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.text.parser import parse_module


class Skip(Exception):
    """Something that this check needs is not here."""


def _cuda():
    """torch.cuda with a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise Skip(f"PyTorch {torch.__version__} sees no GPU")
    return torch.cuda


def facts() -> str:
    """The device, its driver, and PyTorch."""
    import llvmlite
    import torch

    driver = runtime.driver()
    version = driver.version
    cuda = f", CUDA {version // 1000}.{version % 1000 // 10}" if version else ""
    return (
        f"{driver.name} ({driver.target.name}{cuda}), PyTorch {torch.__version__}, llvmlite"
        f" {llvmlite.__version__}, Python {sys.version.split()[0]}"
    )


# -- the runtime
# ------------------------------------------------------------------------------------------
def graphs() -> str:
    """Many runs of a step, whose batches lie at changing addresses, next to the CPU."""
    import torch

    import torch_hlo

    torch.manual_seed(0)
    x, w = torch.randn(12, 64, 128), torch.randn(128, 128) / 12
    expected, there = w.clone(), w.to("hlo")
    kept = []
    for k in range(12):
        expected = expected + 0.01 * torch.tanh(x[k] @ expected).T @ x[k]
        batch = x[k].to("hlo")
        there.add_(0.01 * torch.tanh(batch @ there).T @ batch)
        torch_hlo.mark_step()
        kept.append(batch if k % 3 else None)  # some batches live on: the next ones lie elsewhere
    torch.testing.assert_close(there.cpu(), expected, rtol=1e-3, atol=1e-3)
    return f"12 steps, largest difference {(there.cpu() - expected).abs().max():.1e}"


def out_of_memory() -> str:
    """An array that cannot be: an error that says so, and what was there stays."""
    import torch

    import torch_hlo

    x = torch.arange(1000.0, device="hlo") + 1
    torch_hlo.sync()
    try:
        runtime.allocate(Shape("u8", (1 << 42,)))
    except MemoryError as error:
        message = str(error)
    else:
        raise AssertionError("4 TiB were allocated")
    assert "in use" in message, message
    assert x.sum().item() == 500500
    return message[:160]


def exchange() -> str:
    """Tensors of torch.cuda and back, in the order of PyTorch's streams; DLPack shares memory."""
    import torch

    import torch_hlo

    cuda = _cuda()
    x = torch.randn(1 << 22, device="cuda")
    stream = cuda.Stream()
    for _ in range(5):
        with cuda.stream(stream):
            y = x
            for _ in range(20):
                y = y * 1.01 + 0.01
            z = (y.to("hlo") * 2).to("cuda")
        stream.synchronize()
        torch.testing.assert_close(z, y * 2)
    cuda.synchronize()
    shared = torch_hlo.from_dlpack(x)
    torch.testing.assert_close((shared + 1).to("cuda"), x + 1)
    back = torch.from_dlpack(torch.arange(100.0, device="hlo") * 3)
    assert back.device.type == "cuda" and torch.equal(back.cpu(), torch.arange(100.0) * 3)
    return "copies on a side stream and DLPack both ways are right"


def compiled() -> str:
    """torch.compile(backend="hlo") of a model on torch.cuda: values and gradients next to eager."""
    import torch
    from torch import nn

    cuda = _cuda()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10)
    ).cuda()
    fast = torch.compile(model, backend="hlo")
    worst = 0.0
    for _ in range(4):
        x, y = (
            torch.randn(32, 64, device="cuda"),
            torch.randint(0, 10, (32,), device="cuda"),
        )
        found = []
        for m in (model, fast):
            model.zero_grad()
            loss = nn.functional.cross_entropy(m(x), y)
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4)
            worst = max(worst, float((a - b).abs().max()))
    cuda.synchronize()
    return f"largest difference {worst:.1e}"


def _models():
    import torch
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, 64)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    64, 4, 256, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(2)
            )
            self.head = nn.Linear(64, 100)

        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    cnn = lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    return {
        "transformer": (
            Transformer,
            torch.randint(0, 100, (4, 32)),
            torch.randint(0, 100, (4, 32)),
        ),
        "cnn": (cnn, torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))),
    }


def training(name: str, steps: int = 4) -> str:
    """Losses of a few AdamW steps next to the CPU's; raises AssertionError when they differ."""
    import torch

    import torch_hlo

    torch.manual_seed(0)
    make, x, y = _models()[name]

    def losses(device: str) -> tuple[list[float], float]:
        torch.manual_seed(0)
        model = make().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        xs, ys, found, start = x.to(device), y.to(device), [], 0.0
        for _ in range(steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(xs).flatten(0, -2), ys.flatten())
            loss.backward()
            optimizer.step()
            if device == "hlo":
                torch_hlo.mark_step()
            found.append(loss.item())
        return found, time.perf_counter() - start

    expected, _ = losses("cpu")
    got, seconds = losses("hlo")
    np.testing.assert_allclose(got, expected, rtol=1e-3)
    return (
        f"losses agree to {max(abs(a - b) for a, b in zip(expected, got)):.1e}, {seconds * 1e3:.1f}"
        " ms a step"
    )


# -- rates
# ------------------------------------------------------------------------------------------
def _seconds(action: Callable[[], None], finish: Callable[[], None], times: int = 10) -> float:
    """Of the fastest of some repetitions, several at a time when they are short."""
    action()
    finish()
    start = time.perf_counter()
    action()
    finish()
    each = max(1, min(50, int(0.005 / max(time.perf_counter() - start, 1e-6))))
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        for _ in range(each):
            action()
        finish()
        best = min(best, (time.perf_counter() - start) / each)
    return best


def _timed(text: str, verify: Callable[..., None] | None = None) -> float:
    """Seconds of a program on random values; `verify` gets these and the results."""
    module = parse_module(f"HloModule timed\n{text}\n")
    program = runtime.compile_program(module)
    rng = np.random.default_rng(0)
    given = [
        runtime.from_bytes(
            p.shape,
            encode(rng.standard_normal(p.shape.dims, np.float32), p.shape.dtype),
        )
        for p in module.entry.params
    ]
    results = [runtime.allocate(x.shape) for x in outputs(module)]
    driver = runtime.driver()
    for _ in range(3):
        program.run(given, results)
    if verify is not None:
        verify(
            *(decode(b.bytes.tobytes(), b.shape.dtype, b.shape.dims) for b in (*given, *results))
        )
    return _seconds(lambda: program.run(given, results), driver.synchronize)


@lru_cache
def copy_rate(megabytes: int) -> float:
    """Bytes read and written per second by a device-to-device copy."""
    pool, n = runtime.memory_pool(), megabytes << 20
    size, a = pool.take(n)
    _, b = pool.take(n)
    try:
        return 2 * n / _seconds(lambda: pool.driver.copy(b[1], a[1], n), pool.driver.synchronize)
    finally:
        pool.give(size, a)
        pool.give(size, b)


# Kernels that move bytes: name -> (HLO text by scale, bytes). The scale is 1 for a real device.
STREAMS: dict[str, Callable[[int], tuple[str, int]]] = {
    "negate": lambda s: (
        (
            f"ENTRY main {{\n  x = f32[{1 << 26 >> s}] parameter(0)\n  ROOT r = f32[{1 << 26 >> s}]"
            " negate(x)\n}"
        ),
        8 << 26 >> s,
    ),
    "softmax": lambda s: (softmax(1 << 14 >> s, 4096), 8 * 4096 << 14 >> s),
    "row sum": lambda s: (
        reduction("f32", f"{1 << 14 >> s},4096", f"{1 << 14 >> s}", "1"),
        4 * 4096 << 14 >> s,
    ),
    "column sum": lambda s: (
        reduction("f32", f"{1 << 14 >> s},4096", "4096", "0"),
        4 * 4096 << 14 >> s,
    ),
    "transpose": lambda s: (
        (
            f"ENTRY main {{\n  x = f32[{1 << 13 >> s},8192] parameter(0)\n"
            f"  ROOT r = f32[8192,{1 << 13 >> s}] transpose(x), dimensions={{1,0}}\n}}"
        ),
        8 * 8192 << 13 >> s,
    ),
}


def streaming(name: str, scale: int = 0) -> str:
    """A kernel's bytes per second, as a share of the copy's."""
    text, nbytes = STREAMS[name](scale)
    rate, copy = nbytes / _timed(text), copy_rate(max(512 >> scale, 1))
    return f"{rate / 1e9:.0f} GB/s of the copy's {copy / 1e9:.0f}: {rate / copy:.0%} (target 90 %)"


def _some_rows(x: np.ndarray, y: np.ndarray, found: np.ndarray) -> None:
    """Raises AssertionError when rows of a product are wrong."""
    rows = np.linspace(0, len(x) - 1, 16).astype(int)
    expected = x[rows].astype(np.float32) @ y.astype(np.float32)
    error = np.abs(found[rows].astype(np.float32) - expected).max() / np.abs(expected).max()
    assert error < 1e-2, f"the product's relative error is {error:.1e}"


def products(dtype: str, size: int) -> str:
    """A square product, next to torch.cuda where there is one."""
    import torch

    rate = 2e-12 * size**3 / _timed(dot(dtype, dtype, size, size, size), _some_rows)
    text = f"{rate:.2f} TFLOP/s"
    if not torch.cuda.is_available():
        return text
    x, y = (
        torch.randn(
            size,
            size,
            device="cuda",
            dtype={"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype],
        )
        for _ in range(2)
    )
    theirs = 2e-12 * size**3 / _seconds(lambda: x @ y, torch.cuda.synchronize)
    return f"{text}, {rate / theirs:.0%} of torch.cuda's {theirs:.2f} (target 85 %)"


# -- benchmarks
# ------------------------------------------------------------------------------------------
def benchmark(workload: str, engines: str, seconds: float) -> str:
    """A row of `python -m benchmarks --device cuda`: how many times as long the other engines
    take."""
    if not os.path.exists("benchmarks/__main__.py"):
        raise Skip("benchmarks/ is not in the current folder: start from the repository")
    _cuda()
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "rows.json")
        command = [
            sys.executable,
            "-m",
            "benchmarks",
            "--device",
            "cuda",
            "--workloads",
            workload,
            "--engines",
            engines,
            "--rounds",
            "3",
            "--slice",
            "0.3",
            "--json",
            file,
        ]
        if _has("jax"):
            command += ["--jax", sys.executable]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        if not os.path.exists(file):
            raise RuntimeError(
                f"benchmarks ended with {done.returncode}: {done.stderr.strip()[-300:]}"
            )
        with open(file) as f:
            row = json.load(f)[workload]
    return describe(row)


def describe(row: dict[str, dict]) -> str:
    """Ours in milliseconds, the others as ratios; the share of the copy's rate or of the operations
    per second. Raises when ours failed."""
    ours = row["hlo"]
    if "median_s" not in ours:
        raise RuntimeError(ours.get("error", "no samples"))
    parts = [f"{ours['median_s'] * 1e3:.2f} ms"]
    for engine, r in row.items():
        if engine != "hlo":
            parts.append(
                f"{engine} {r['median_s'] / ours['median_s']:.2f}x"
                if "median_s" in r
                else f"{engine} failed ({r.get('error', '')[:60]})"
            )
    if ours.get("bytes"):
        parts.append(f"{ours['bytes'] / ours['median_s'] / 1e9:.0f} GB/s")
    if ours.get("flops"):
        parts.append(f"{ours['flops'] / ours['median_s'] / 1e12:.1f} TFLOP/s")
    return ", ".join(parts)


def _has(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def suite(seconds: float) -> str:
    """The tests of the lazy device, the lowerings and torch.compile on this device."""
    if not os.path.exists("test/lazy"):
        raise Skip("test/ is not in the current folder: start from the repository")
    command = [
        "env",
        f"TORCH_HLO_DEVICE={config.get('DEVICE')}",
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--maxfail=50",
        "-p",
        "no:cacheprovider",
        "test/lazy",
        "test/lowering",
        "test/test_models.py",
        "test/test_dynamo.py",
        "test/test_op_db.py",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    last = [line for line in done.stdout.splitlines() if line.strip()][-1:] or [done.stderr[-200:]]
    if done.returncode:
        failed = [
            line.split(" - ")[0].removeprefix("FAILED ")
            for line in done.stdout.splitlines()
            if line.startswith("FAILED")
        ]
        raise AssertionError(f"{last[0]}: {', '.join(failed[:20])}")
    return last[0]
