"""Several Python threads that record and cut steps at the same time."""
from __future__ import annotations

import sys
import threading

import pytest
import torch

import torch_hlo

STEPS, THREADS, ROUNDS = 20, 2, 2


def train(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(16, 16, generator=generator, dtype=torch.float64).to("hlo").requires_grad_()
    for _ in range(STEPS):
        x = y = torch.randn(8, 16, generator=generator, dtype=torch.float64).to("hlo")
        for _ in range(2):
            y = torch.tanh(y @ w) + x * 0.1
        y.square().mean().backward()
        with torch.no_grad():
            w -= 0.1 * w.grad
        w.grad = None
        torch_hlo.mark_step()
    return w.detach().cpu()


@pytest.fixture
def restless():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_training_loops_in_threads_do_not_disturb_each_other(restless) -> None:
    alone = [train(seed) for seed in range(THREADS)]
    for _ in range(ROUNDS):
        found: dict[int, torch.Tensor] = {}
        threads = [threading.Thread(target=lambda s=s, found=found: found.__setitem__(s, train(s))) for s in range(THREADS)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
        assert sorted(found) == list(range(THREADS)), "a thread raised, or waits for ever"
        for seed, w in found.items():
            torch.testing.assert_close(w, alone[seed])
