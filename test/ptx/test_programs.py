"""Whole programs for NVIDIA GPUs, executed and checked by the PTX evaluator: plans, memory, kernels
of every family, training."""

import re
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks import check_gpu
from test.ptx import driver
from test.ptx.evaluate import Image
from torch_hlo import config
from torch_hlo.compiler.fusion import fusion_narrow
from torch_hlo.device.gpu.driver import DriverError
from torch_hlo.hlo.text.parser import parse_module

SLOW = {
    "attention gradient",
    "attention gradient bf16",
    "long sort",
}  # for the evaluator


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in check_gpu.PROGRAMS],
)
def test_family_of_kernels(name):
    with config.override(DEVICE="test.ptx.driver", CACHE=""):
        check_gpu.check(name)


@pytest.mark.parametrize(
    ("cpu", "name"),
    [
        *(("sm_80", n) for n in ("softmax", "dot bf16", "fused transpose", "attention bf16")),
        ("sm_100", "softmax"),
        ("sm_100", "loop"),
    ],
)
def test_other_architectures(cpu, name):
    with config.override(DEVICE=f"test.ptx.driver:{cpu}", CACHE=""):
        check_gpu.check(name)


def test_results_do_not_depend_on_chance():
    module = check_gpu.program("wide softmax")
    x = np.random.default_rng(0).standard_normal((3, 20000)).astype(np.float32)
    with config.override(DEVICE="test.ptx.driver", CACHE=""):
        first, second = (check_gpu.run(module, [x])[0].tobytes() for _ in range(2))
    assert first == second


def steps(device, make, x, y, n=2):
    """Losses of a few steps, and a parameter after them."""
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(n):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().cpu() for p in model.parameters()]


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = (
            torch.nn.LSTM(6, 8, batch_first=True),
            torch.nn.Linear(8, 5),
        )

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


MODELS = {
    "mlp": (
        lambda: torch.nn.Sequential(
            torch.nn.Linear(12, 16),
            torch.nn.GELU(),
            torch.nn.LayerNorm(16),
            torch.nn.Linear(16, 5),
        ),
        (8, 12),
    ),
    "cnn": (
        lambda: torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 3, padding=1),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(64, 5),
        ),
        (4, 2, 8, 8),
    ),
    "lstm": (Recurrent, (3, 4, 6)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "cnn" else ()) for n in MODELS]
)
def test_training(name):
    make, shape = MODELS[name]
    torch.manual_seed(1)
    x, y = torch.randn(shape), torch.randint(0, 5, shape[:1])
    expected, wanted = steps("cpu", make, x, y)
    with config.override(DEVICE="test.ptx.driver", CACHE=""):
        found, got = steps("hlo", make, x, y)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("model", ["transformer", "cnn"])
@pytest.mark.slow
def test_training_of_check_gpu(model):
    with config.override(DEVICE="test.ptx.driver", CACHE=""):
        assert "losses agree" in check_gpu.training(model, 2)


class Block(torch.nn.Module):
    """A token mixer and a feed-forward part, wide enough for the largest matrix instructions."""

    def __init__(self, d=128, heads=2):
        super().__init__()
        self.heads, self.embed, self.norm = (
            heads,
            torch.nn.Embedding(256, d),
            torch.nn.LayerNorm(d),
        )
        self.qkv, self.up, self.down = (
            torch.nn.Linear(d, 3 * d),
            torch.nn.Linear(d, 4 * d),
            torch.nn.Linear(4 * d, d),
        )

    def forward(self, tokens):
        x = self.embed(tokens)
        b, t, d = x.shape
        q, k, v = (
            y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).split(d, 2)
        )
        x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(
            1, 2
        ).reshape(b, t, d)
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


@pytest.mark.slow
def test_bf16_on_matrix_units(monkeypatch):
    """Autocast: products by wgmma from tensor copies, attention by mma.sync, forward and
    backward."""
    opcodes = set()
    launch = Image.launch

    def recorded(self, kernel, *arguments, **options):
        opcodes.update(x.opcode for x in self.module.functions[kernel].body)
        return launch(self, kernel, *arguments, **options)

    monkeypatch.setattr(Image, "launch", recorded)

    def gradients(device):
        torch.manual_seed(0)
        model, tokens = Block().to(device), torch.randint(0, 256, (2, 64)).to(device)
        with torch.autocast(device, torch.bfloat16):
            loss = model(tokens).float().square().mean()
        loss.backward()
        return [loss.item(), *(p.grad.cpu() for p in model.parameters())]

    expected = gradients("cpu")
    with config.override(DEVICE="test.ptx.driver", CACHE=""):
        found = gradients("hlo")
    assert {"wgmma", "mma", "ldmatrix", "cp", "mbarrier"} <= opcodes
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-2)
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert (a - b).norm() <= 0.03 * b.norm()


# -- the device itself
# ---------------------------------------------------------------------------------------------------------------
def test_every_barrier_between_threads_counts(monkeypatch):
    """Without one of its barriers a kernel is reported, or it had no need of it because nobody
    reads afterwards."""
    load = driver.Evaluator.load
    module = check_gpu.program("softmax")
    x = np.random.default_rng(0).standard_normal((64, 1000)).astype(np.float32)
    found = 0
    for which in range(6):

        def without(self, image, kernels, which=which):
            text = image.decode()
            at = [m.span() for m in re.finditer(r"bar\.sync[^\n]*", text)][which]
            return load(self, (text[: at[0]] + text[at[1] :]).encode(), kernels)

        monkeypatch.setattr(driver.Evaluator, "load", without)
        with config.override(DEVICE="test.ptx.driver", CACHE=""):
            try:
                check_gpu.run(module, [x])
            except DriverError as error:
                assert re.search(
                    r"kernel k\d+_rows_\d+, line \d+: .*(with no barrier in between|never come).*"
                    r" \(of fusion f32\[64,1000\]\)",
                    str(error),
                )
                found += 1
    assert found == 6


def test_a_freed_array_is_not_read_again():
    pool = driver.pool_of("sm_80")
    address = pool.driver.allocate(64)
    pool.driver.memory.check(np.array([address]), 64)
    pool.driver.free(address)
    with pytest.raises(Exception, match="outside of every array"):
        pool.driver.memory.check(np.array([address]), 4)


def test_unknown_architecture():
    with pytest.raises(
        DriverError, match=r"TORCH_HLO_DEVICE=test.ptx.driver:sm_10: no GPU target.*nvptx:sm_80"
    ):
        driver.Evaluator("sm_10")


def test_kernels_that_are_not_launched_are_not_decoded():
    module = parse_module(
        "HloModule e\nENTRY main {\n  x = f32[4] parameter(0)\n  ROOT r = f32[4] negate(x)\n}\n"
    )
    with config.override(DEVICE="test.ptx.driver", CACHE=""):
        np.testing.assert_array_equal(
            check_gpu.run(module, [np.arange(4, dtype=np.float32)])[0], -np.arange(4)
        )


def test_factorizations():
    """Matrices of six rows: no vector of a thread fits."""

    def gradient(x):
        square = x @ x.mT + 4 * torch.eye(6, device=x.device)
        solved = torch.linalg.solve(square, x).sum() + torch.linalg.inv(square).sum()
        return solved + torch.linalg.cholesky(square).sum() + torch.linalg.qr(x)[1].abs().sum()

    torch.manual_seed(0)
    found = []
    with config.override(DEVICE="test.ptx.driver:sm_90a", CACHE=""):
        for device in ("cpu", "hlo"):
            torch.manual_seed(0)
            x = torch.randn(2, 6, 6).to(device).requires_grad_()
            found.append(torch.autograd.grad(gradient(x), x)[0].cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_all_results_of_attention_may_be_narrow(dtype):
    """Sums of rows, too: what is written is as wide as the array."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 70, 16, dtype=dtype) for _ in range(3)]
    op = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
    with (
        config.override(DEVICE="test.ptx.driver:sm_90a", CACHE=""),
        mock.patch.object(fusion_narrow, "SMALLEST", 1),
    ):
        # what nobody holds is no result of the program
        found = [x.half() for x in op(*(x.to("hlo") for x in inputs))[:2]]
        found = [x.cpu().float() for x in found]
    q, k, v = (x.double() for x in inputs)
    scores = q @ k.mT / 4
    wanted = [(scores.softmax(-1) @ v).float(), scores.logsumexp(-1).float()]
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
