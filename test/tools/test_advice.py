"""What a profile advises: programs that should get a line of advice, and programs that should not."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import torch_hlo
from torch_hlo import profiler


def here(text: str) -> str:
    """The line of this file that has the text."""
    with open(__file__) as file:
        return f"{__file__}:{next(i for i, x in enumerate(file, 1) if '# ' + text in x)}"


def profiled(body, steps: int = 12, wrap=lambda f: f) -> dict[str, str]:
    """title -> line of what is advised for a loop that calls `body(step, i)`."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8).to("hlo")
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)

    @wrap
    def step(x):
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with profiler.record() as found:
        for i in range(steps):
            body(step, i)
            torch_hlo.mark_step()
    return {a.title: a.line for a in found.advice()}


def batch(n: int = 4):
    return torch.ones(n, 8).to("hlo")


class Mean:
    """A metric whose `update` reads."""

    total = 0.0

    def update(self, value):
        self.total += float(value)  # in a metric


def titles(found: dict[str, str], *words: str) -> set[str]:
    return {line for title, line in found.items() if all(w in title for w in words)}


@pytest.mark.parametrize("wrap", [lambda f: f, torch_hlo.compile])
def test_reads_in_every_step(wrap):
    seen, mean = [], Mean()

    def body(step, i):
        loss = step(batch())
        mean.update(loss)
        seen.append(f"{loss + 1:.3f}")  # in a format
        if loss > 1e9:  # in a condition
            raise AssertionError

    found = profiled(body, wrap=wrap)
    lines = {here("in a metric"), here("in a format"), here("in a condition")}
    assert titles(found, "A read at", "every step") == lines, found


def test_reads_now_and_then():
    def body(step, i):
        loss = step(batch())
        if i % 5 == 4:
            loss.item()

    assert not titles(profiled(body, steps=30), "A read at")


def test_sizes_that_change_and_a_second_program():
    def changing(step, i):
        x = batch(3 + i)
        x = (x * 2).sum(0)[None]  # of a size
        step(x)

    (line,) = titles(profiled(changing, steps=4), "1 compile at", "all sizes")
    assert line == here("of a size")

    def two(step, i):
        step(batch())
        if i == 5:
            torch_hlo.mark_step()
            (batch(2) @ torch.ones(8, 3).to("hlo")).relu()

    assert not titles(profiled(two), "compiles")


def test_tensors_that_are_kept():
    held: list = []

    def leaking(step, i):
        loss = step(batch())
        held.append(loss * 2)  # for ever

    assert titles(profiled(leaking, steps=20), "Memory grows") == {here("for ever")}

    def windowed(step, i):
        held.append(step(batch()) * 2)
        del held[:-4]

    held.clear()
    assert not titles(profiled(windowed, steps=20), "Memory grows")

    def sizes(step, i):
        step((batch(2 + i) * 2).sum(0)[None])

    assert not titles(profiled(sizes, steps=20), "Memory grows")


def test_an_idle_device_and_a_busy_one():
    assert titles(profiled(lambda step, i: step(batch())), "idle") == {""}
    large = torch.ones(700, 700).to("hlo")

    def busy(step, i):
        nonlocal large
        for _ in range(8):
            large = torch.tanh(large @ large)

    assert not titles(profiled(busy), "idle")


def test_what_comes_before_the_steps_leaves_no_device_idle():
    large = torch.ones(700, 700).to("hlo")

    def busy(step, i):
        nonlocal large
        time.sleep(2.0 * (i == 1))  # as Dynamo does
        for _ in range(8):
            large = torch.tanh(large @ large)

    assert not titles(profiled(busy), "idle")


def looped(body, steps: int = 20) -> dict[str, str]:
    """title and text -> line of what is advised for a loop that ends no step itself."""
    layer = nn.Linear(8, 8).to("hlo")
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    with profiler.record() as found:
        for i in range(steps):
            loss = layer(batch()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            body(i, loss)
    return {str(a): a.line for a in found.advice()}


def test_reads_where_no_step_is_marked():
    found = looped(lambda i, loss: loss.item())  # of all
    assert titles(found, "A read at", "20 reads in 20 steps") == {here("of all")}

    def some(i, loss):
        if i % 10 == 9:
            loss.item()  # of some

    found = looped(some)
    assert not titles(found, "A read at"), found
    assert titles(found, "10 passes of the loop", "mark_step()") == {here("of some")}


def test_what_keeps_tensors_is_named():
    history: dict[str, list] = {"losses": []}

    def body(i, loss):
        history["losses"].append(loss.detach())  # put there
        torch_hlo.mark_step()

    text = f"`history` holds them; they are put there at {here('put there')}"
    assert titles(looped(body), "Memory grows", text)
    total, layer = torch.zeros((), device="hlo"), nn.Linear(8, 8).to("hlo")
    with profiler.record() as found:
        for _ in range(20):
            total = total + layer(batch()).square().mean()  # with its history
            torch_hlo.mark_step()
    text = f"backward pass of `total`, which grows at {here('with its')}"
    assert any(text in a.text for a in found.advice() if "Memory grows" in a.title)


def test_slow_data():
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, i):
            time.sleep(0.03)  # to decode
            return torch.ones(8)

    with profiler.record() as found:
        for x in torch.utils.data.DataLoader(Slow(), 1):  # of batches
            (x.to("hlo") * 2).sum()
            torch_hlo.mark_step()
    (advice,) = [a for a in found.advice() if a.title.startswith("Loading data takes")]
    assert advice.line == here("to decode")
    assert advice.title.endswith(f"called at {here('of batches')}")


def test_a_tensor_that_grows():
    cache = torch.ones(2, 8).to("hlo")

    def body(step, i):
        nonlocal cache
        cache = torch.cat([cache, batch(1) * 2])  # longer
        step(cache)

    assert titles(profiled(body, steps=6), "a tensor grows") == {here("longer")}
