"""What a profile advises: programs that should get a line of advice, and programs that should not."""

from __future__ import annotations

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

    (line,) = titles(profiled(changing, steps=4), "compiles at", "all sizes")
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
