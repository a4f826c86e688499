"""torch.use_deterministic_algorithms: the same bits with 1 thread and with 8."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_hlo
from torch_hlo.device.cpu import native
from torch_hlo.lazy.record import session
from torch_hlo.lazy.run.program_cache import variant


@pytest.fixture(autouse=True)
def settings():
    threads, state = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(state)


def transformer():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.1)
    model = nn.Sequential(nn.Embedding(100, 32), layer, nn.Linear(32, 100)).to("hlo")
    tokens = torch.randint(0, 100, (8, 33)).to("hlo")

    def loss(model):
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return model, loss


def network():
    """Convolutions whose gradients are sums over many pixels, cut for threads."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    ).to("hlo")
    x, y = torch.randn(16, 3, 32, 32).to("hlo"), torch.randint(0, 10, (16,)).to("hlo")
    return model, lambda model: F.cross_entropy(model(x), y)


def bits(make, how, steps=2):
    """All that training leaves behind, as bytes."""
    model, loss = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    called = torch.compile(model, backend="hlo") if how == "compile" else model
    found = []

    def step():
        value = loss(called)
        optimizer.zero_grad()
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return value.detach(), norm

    train = torch_hlo.compile(step) if how == "captured" else step
    for _ in range(steps):
        found += train()
        torch_hlo.mark_step()
    found += [x.detach() for x in model.state_dict().values()]
    return b"".join(x.cpu().numpy().tobytes() for x in found)


@pytest.mark.parametrize("how", ["recorded", "captured", "compile"])
@pytest.mark.parametrize("make", [transformer, network])
def test_training(make, how):
    torch.use_deterministic_algorithms(True)
    found = set()
    for threads in 1, 8:
        torch.set_num_threads(threads)
        session.engine().clear_cache()
        torch._dynamo.reset()
        found.add(bits(make, how))
    assert len(found) == 1


def test_the_test_can_fail():
    """Without it, the gradient of a convolution's weights is another sum with 8 threads."""
    found = set()
    for threads in 1, 8:
        torch.set_num_threads(threads)
        found.add(bits(network, "recorded"))
    assert len(found) == 2


def test_a_captured_function_does_not_keep_a_program_of_another_mode():
    x, g = torch.randn(16, 8, 32, 32).to("hlo"), torch.randn(16, 8, 32, 32).to("hlo")

    @torch_hlo.compile
    def gradient(x, g):
        return torch.nn.grad.conv2d_weight(x, (8, 8, 3, 3), g, padding=1)

    def run(threads, on):
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(on)
        return gradient(x, g).cpu()

    run(1, False)
    assert torch.equal(run(1, True), run(8, True))


@pytest.mark.parametrize("on", [True, False])
def test_programs_depend_on_the_number_of_threads_only_without_it(on):
    torch.use_deterministic_algorithms(on)
    found = set()
    for threads in 1, 8:
        torch.set_num_threads(threads)
        found.add((variant(), native.target()))
    assert len(found) == (1 if on else 2)


def test_eigenvectors():
    torch.use_deterministic_algorithms(True)
    x = torch.randn(96, 96, generator=torch.Generator().manual_seed(0))
    found = []
    for threads in 1, 8:
        torch.set_num_threads(threads)
        y = x.to("hlo")
        found.append(torch.linalg.eigh(y @ y.mT)[1].cpu())
    assert torch.equal(*found)


SCRIPT = """
import hashlib, torch, torch_hlo
torch.use_deterministic_algorithms(True)
from test.lazy.test_deterministic import bits, network
print(hashlib.sha256(bits(network, "recorded", 1)).hexdigest())
"""


@pytest.mark.slow
def test_processes():
    found = set()
    for threads in "1", "8":
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={"OMP_NUM_THREADS": threads, "TORCH_HLO_CACHE": "", "PATH": "", "HOME": ""},
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert run.returncode == 0, run.stderr
        found.add(run.stdout)
    assert len(found) == 1
