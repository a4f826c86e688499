"""Several Python threads that record and cut steps at the same time."""

from __future__ import annotations

import copy
import math
import sys
import threading

import pytest
import torch

import torch_hlo
from torch_hlo.lazy.ops import optimizer_state
from torch_hlo.lazy.record import session, tensor, tracing
from torch_hlo.lowering.core.tape import RECORDING

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
        threads = [
            threading.Thread(target=lambda s=s, found=found: found.__setitem__(s, train(s)))
            for s in range(THREADS)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
        assert sorted(found) == list(range(THREADS)), "a thread raised, or waits for ever"
        for seed, w in found.items():
            torch.testing.assert_close(w, alone[seed])


def test_an_optimizers_first_step_waits_for_other_threads(monkeypatch) -> None:
    """It gives values to recorded ones, which another thread may be lowering."""
    alone = []

    def array(*args) -> optimizer_state.Array:
        alone.append(RECORDING._is_owned())
        return Array(*args)

    Array = optimizer_state.Array
    monkeypatch.setattr(optimizer_state, "Array", array)
    weight = torch.ones(3, device="hlo", requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()
    assert alone and all(alone)


def test_a_copy_is_made_while_no_step_is_cut(monkeypatch) -> None:
    """Two tensors get one value: a step in between may give its memory away."""
    alone = []

    def storage(*args) -> tensor.Storage:
        alone.append(RECORDING._is_owned())
        return Storage(*args)

    x = torch.ones(3, device="hlo")
    Storage = tensor.Storage
    monkeypatch.setattr(tensor, "Storage", storage)
    y = copy.deepcopy(x)
    assert alone == [True] and y.add_(1).tolist() == [2, 2, 2] and x.tolist() == [1, 1, 1]


def captured(seed: int) -> torch.Tensor:
    """A training loop whose step is captured; it computes with numbers in Python and steps a
    schedule."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Linear(8, 3, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    model.to("hlo")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    losses = []

    @torch_hlo.compile
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        losses.append(max(math.sqrt(loss.item()), 0.0))
        loss.backward()
        optimizer.step()
        schedule.step()

    for _ in range(STEPS):
        step(torch.randn(5, 8, generator=generator, dtype=torch.float64).to("hlo"))
    return torch.cat(
        [
            torch.tensor(losses, dtype=torch.float64),
            *[p.detach().cpu().flatten() for p in model.parameters()],
        ]
    )


def test_a_step_is_captured_while_other_threads_record(restless) -> None:
    """What they record is not part of it, and neither are their modules, optimizers and
    schedules."""
    functions = math.sqrt, max, min
    jobs = [lambda: captured(0), lambda: captured(1), lambda: train(2)]
    alone = [job() for job in jobs]
    for _ in range(ROUNDS):
        found: dict[int, torch.Tensor] = {}
        threads = [
            threading.Thread(target=lambda i=i, found=found: found.__setitem__(i, jobs[i]()))
            for i in range(len(jobs))
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
        assert sorted(found) == list(range(len(jobs))), "a thread raised, or waits for ever"
        for i, result in found.items():
            torch.testing.assert_close(result, alone[i])
    assert (math.sqrt, max, min) == functions


def test_a_captured_function_may_wait_for_a_thread_that_records(monkeypatch) -> None:
    monkeypatch.setattr(session.Tracing, "PATIENCE", 0.1)
    weight = torch.ones(3, device="hlo")

    @torch_hlo.compile(full_graph=False)
    def step(x):
        given: list[torch.Tensor] = []
        other = threading.Thread(target=lambda: given.append(weight * 2))
        other.start()
        other.join(60)
        return x + given[0]

    for i in range(4):
        assert step(torch.full((3,), float(i)).to("hlo")).tolist() == [i + 2.0] * 3


def test_gradients_of_functorch_belong_to_the_call(monkeypatch) -> None:
    """Autograd computes them on a thread of its own, which waits for nobody."""
    waited, wait = [], session.Tracing.wait
    monkeypatch.setattr(
        session.Tracing,
        "wait",
        lambda tracing: waited.append(wait(tracing)) or waited[-1],
    )
    weight = torch.ones(3, device="hlo")
    step = torch_hlo.compile(
        torch.func.vmap(torch.func.grad(lambda x: (x * weight).square().sum()))
    )
    for i in range(4):
        assert step(torch.full((2, 3), float(i)).to("hlo")).tolist() == [[2.0 * i] * 3] * 2
    assert waited and True not in waited


def test_no_trace_begins_while_another_thread_is_in_the_middle_of_an_op() -> None:
    """What that thread is about to record would be taken for a part of the call."""

    def trace() -> None:
        with tracing.tracing():
            pass

    with RECORDING:
        other = threading.Thread(target=trace)
        other.start()
        other.join(0.2)
        assert session.current().tracing is None and other.is_alive()
    other.join(60)
    assert session.current().tracing is None and not other.is_alive()
