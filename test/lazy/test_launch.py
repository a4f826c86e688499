"""Steps that are launched again: what is updated in place, what takes the memory of what it
replaces, and who must not see that."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_hlo
from torch_hlo.device import runtime
from torch_hlo.lazy.record.storage import Array
from torch_hlo.lazy.run.launch import Launch


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def training(
    device: str, compile: bool = True
) -> tuple[Callable, nn.Module, torch.optim.Optimizer]:
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return torch_hlo.compile(step) if compile else step, model, optimizer


def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.randn(4, 6, generator=g), torch.randint(3, (4,), generator=g)


def side_by_side(
    between: Callable[[int, nn.Module, torch.optim.Optimizer], object], steps: int = 10
) -> None:
    """Train on both devices; `between(i, model, optimizer)` after step i: what it returns is
    compared when all is over, and so are losses and parameters."""
    seen = {}
    for device in ("cpu", "hlo"):
        step, model, optimizer = training(device, device == "hlo")
        losses, kept = [], []
        for i in range(steps):
            losses.append(step(*(t.to(device) for t in batch(i))))
            kept.append(between(i, model, optimizer))
        flat = [
            t
            for t in torch.utils._pytree.tree_leaves(
                (
                    losses,
                    kept,
                    list(model.parameters()),
                    [p.grad for p in model.parameters()],
                )
            )
            if isinstance(t, torch.Tensor)
        ]
        seen[device] = [t.detach().cpu() for t in flat]
    assert len(seen["cpu"]) == len(seen["hlo"])
    for a, b in zip(seen["cpu"], seen["hlo"]):
        torch.testing.assert_close(b, a, rtol=2e-4, atol=2e-5)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each replayed step was launched as the one before."""
    found: list[bool] = []
    launch = Launch.launch
    monkeypatch.setattr(Launch, "launch", lambda *args: found.append(launch(*args)) or found[-1])
    return found


def test_steps_that_come_back_keep_arrays_and_memory(launches: list[bool]) -> None:
    step, model, _ = training("hlo")
    for i in range(8):
        step(*(t.to("hlo") for t in batch(i)))
    torch_hlo.sync()
    held = [p._storage.value for p in model.parameters()] + [
        p.grad._storage.value for p in model.parameters()
    ]
    addresses = [a.data.address for a in held]
    step(*(t.to("hlo") for t in batch(8)))
    step(*(t.to("hlo") for t in batch(9)))  # the one before may still be under way
    assert launches[-4:] == [True] * 4
    now = [p._storage.value for p in model.parameters()]
    assert all(a is b for a, b in zip(now, held))
    assert [a.data.address for a in now] == addresses[: len(now)]
    del held, now
    step(*(t.to("hlo") for t in batch(10)))
    gradients = [p.grad._storage.value for p in model.parameters()]
    before = [a.data.address for a in gradients]
    del gradients
    step(*(t.to("hlo") for t in batch(11)))
    assert [p.grad._storage.value.data.address for p in model.parameters()] == before


def test_results_that_are_kept(launches: list[bool]) -> None:
    side_by_side(lambda i, model, _: None)
    assert launches[-1]


def test_copies_of_parameters_and_gradients_keep_their_values() -> None:
    def between(i: int, model: nn.Module, _) -> list:
        kept = [p.detach().clone() for p in model.parameters()] + [
            p.grad.clone() for p in model.parameters()
        ]
        return kept + [copy.deepcopy(model.state_dict())] if i % 3 == 2 else kept

    side_by_side(between)


def test_deep_copies_between_steps_and_in_place_again(launches: list[bool]) -> None:
    side_by_side(
        lambda i, model, optimizer: (
            copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
            if i in (4, 7)
            else None
        ),
        steps=12,
    )
    assert False in launches and launches[-1]


def test_state_is_loaded_between_steps() -> None:
    saved: dict = {}

    def between(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if i == 3:
            saved.update(
                model=copy.deepcopy(model.state_dict()),
                optimizer=copy.deepcopy(optimizer.state_dict()),
            )
        if i == 6:
            model.load_state_dict(saved["model"])
        if i == 8:
            optimizer.load_state_dict(saved["optimizer"])

    side_by_side(between, steps=14)


def test_other_data_between_steps() -> None:
    def between(i: int, model: nn.Module, _) -> object:
        first = next(iter(model.parameters()))
        if i == 5:
            old = first.data
            first.data = torch.ones_like(old) * 0.1
            return old  # it stays as it was
        if i == 7:
            with torch.no_grad():
                first.mul_(0.5)
        return None

    side_by_side(between, steps=12)


def test_gradients_are_dropped_and_replaced_between_steps() -> None:
    def between(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        if i == 5:
            kept = [p.grad for p in model.parameters()]
            optimizer.zero_grad()
            return kept
        if i == 7:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
        return None

    side_by_side(between, steps=12)


def test_two_functions_over_the_same_parameters() -> None:
    outputs = {}
    for device in ("cpu", "hlo"):
        step, model, _ = training(device, device == "hlo")

        @torch.no_grad()
        def look(x: torch.Tensor, model: nn.Module = model) -> tuple[torch.Tensor, torch.Tensor]:
            return model(x).softmax(-1), next(iter(model.parameters())).grad.sum()

        look = torch_hlo.compile(look) if device == "hlo" else look
        found = []
        for i in range(10):
            x, y = (t.to(device) for t in batch(i))
            found += [step(x, y), *look(x)]
        outputs[device] = [t.detach().cpu() for t in found]
    torch.testing.assert_close(outputs["hlo"], outputs["cpu"], rtol=2e-4, atol=2e-5)


def counter(n: int = 5000) -> tuple[Callable, torch.Tensor]:
    total = torch.zeros(n, device="hlo")

    @torch_hlo.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return total * 2

    for _ in range(4):
        step(torch.ones(n, device="hlo"))
    return step, total


def test_memory_that_another_library_reads_is_not_written_to() -> None:
    step, total = counter()
    torch_hlo.sync()
    doubled = step(torch.ones(5000, device="hlo"))
    outside, result = np.from_dlpack(total), np.from_dlpack(doubled)
    for _ in range(3):
        step(torch.ones(5000, device="hlo"))
    torch_hlo.sync()
    assert (outside == 5).all() and (result == 10).all() and (total.cpu() == 8).all()


def test_views_of_what_is_updated_are_computed_again() -> None:
    step, total = counter()
    part = total[10:20]
    for i in range(3):
        step(torch.ones(5000, device="hlo"))
        assert (part + 1).cpu().tolist() == [6.0 + i] * 10


def test_threads_read_while_steps_run() -> None:
    step, total = counter()
    torn, over = [], threading.Event()

    def read() -> None:
        while not over.is_set():
            values = total.cpu()
            if values.min() != values.max():
                torn.append(values)

    reader = threading.Thread(target=read)
    reader.start()
    results = [step(torch.ones(5000, device="hlo")) for _ in range(300)]
    over.set()
    reader.join()
    assert not torn
    assert [int(r[17].item()) for r in results] == [2 * (5 + i) for i in range(300)]


def test_two_threads_call_one_function() -> None:
    step, total = counter()
    one = torch.ones(5000, device="hlo")
    threads = [threading.Thread(target=lambda: [step(one) for _ in range(100)]) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (total.cpu() == 204).all()


def test_a_call_that_takes_another_way_leaves_what_it_overwrote() -> None:
    """The comparison comes after the first program, whose results have replaced values by then."""
    last = torch.zeros(4, device="hlo")

    @torch_hlo.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        last.copy_(last + x)
        if last.sum().item() > 100:
            last.zero_()
        return last * 3

    expected, seen = torch.zeros(4), []
    for i in range(30):
        expected = expected + i
        expected = torch.zeros(4) if expected.sum() > 100 else expected
        seen.append((step(torch.full((4,), float(i), device="hlo")), expected * 3))
    for ours, right in seen:
        assert torch.equal(ours.cpu(), right)


def test_a_call_that_takes_another_way_leaves_gradients() -> None:
    """Here the first program has made gradients, in the memory of those before it, when the
    comparison comes out otherwise."""
    weight = torch.ones(4, device="hlo", requires_grad=True)
    undone = []

    @torch_hlo.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        (weight * x).sum().backward()
        loss = weight.grad.sum()
        if loss.item() > 30:
            return loss * 0
        return loss + 1

    for i in [1, 2, 3, 4, 5, 6, 9, 9, 2, 3, 9, 1, 4, 9, 2]:
        got = step(torch.full((4,), float(i), device="hlo"))
        undone.append(
            (
                got.item(),
                weight.grad.cpu().tolist(),
                0.0 if i == 9 else 4.0 * i + 1,
                [float(i)] * 4,
            )
        )
    assert [(a, b) for a, b, _, _ in undone] == [(c, d) for _, _, c, d in undone]


def test_numbers_change_between_launches(launches: list[bool]) -> None:
    total = torch.zeros(3, device="hlo")

    @torch_hlo.compile
    def step(x: torch.Tensor, factor: float) -> torch.Tensor:
        total.add_(x, alpha=factor)
        return total + factor

    expected = torch.zeros(3)
    for i in range(8):
        expected = expected + 0.5 * i
        assert torch.equal(step(torch.ones(3, device="hlo"), 0.5 * i).cpu(), expected + 0.5 * i)
    assert launches[-1]


def test_a_returned_copy_of_what_is_updated_in_place(launches: list[bool]) -> None:
    """Both are one output of the program: k-means that returns its centres waited for ever for the
    copy."""
    x, y = torch.arange(4.0).to("hlo"), torch.zeros(3).to("hlo")

    @torch_hlo.compile
    def step(v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        v.add_(1)
        copy = v.clone()
        w.add_(v.sum())
        return copy, w.clone().view(3, 1)

    for i in range(1, 8):
        a, b = step(x, y)
        assert a.tolist() == x.tolist() == [i, i + 1, i + 2, i + 3]
        assert b.flatten().tolist() == y.tolist() == [sum(4 * j + 6.0 for j in range(1, i + 1))] * 3
        del a, b  # else their arrays may not be overwritten
    assert any(launches)
    kept = [step(x, y) for _ in range(3)]
    assert [a.tolist()[0] for a, _ in kept] == [8, 9, 10]


def test_an_array_that_no_program_gave_is_an_error() -> None:
    t = torch.ones(2).to("hlo")
    t._storage.replace(Array(t._storage.value.shape, None))
    with pytest.raises(RuntimeError, match="after its memory was given"):
        t.cpu()


def test_dropped_results_give_their_memory_back() -> None:
    step, _ = counter(1 << 18)
    one = torch.ones(1 << 18, device="hlo")
    step(one)
    torch_hlo.sync()
    gc.collect()
    before = runtime.memory_stats()["bytes"]
    for _ in range(20):
        step(one)
    torch_hlo.sync()
    assert runtime.memory_stats()["bytes"] <= before


def test_results_that_need_gradients_have_no_graph() -> None:
    step, _, _ = training("hlo")
    # more than are made at a time
    results = [step(*(t.to("hlo") for t in batch(i))) for i in range(40)]
    assert all(r.requires_grad and not r.is_leaf for r in results)
    assert len({id(r) for r in results}) == 40
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        results[-1].backward()
    with torch.no_grad():
        assert results[0].item() != results[-1].item()
