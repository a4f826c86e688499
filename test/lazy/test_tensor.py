"""Tensors that are made ahead, while the device computes."""

from __future__ import annotations

import torch

import torch_hlo
from torch_hlo.lazy.record import session, tensor


def step(x: torch.Tensor) -> list[torch.Tensor]:
    y = (x @ x).relu()
    return [y.sum(0), y.t(), *y.split(2)]


def ahead() -> None:
    """What a thread does that waits for a program."""
    for work in session.current().executor.meanwhile:
        work(lambda: False)


def test_the_next_step_takes_them(monkeypatch):
    x = torch.randn(4, 4).to("hlo")
    session.current().taken.clear()
    want = [v.tolist() for v in step(x)]
    torch_hlo.sync()
    session.current().taken.clear()
    results = step(x)
    ahead()
    made = []
    new = tensor._new
    monkeypatch.setattr(tensor, "_new", lambda meta: made.append(meta) or new(meta))
    again = step(x)
    assert not made
    assert len({*map(id, results), *map(id, again)}) == 2 * len(again)
    assert [v.tolist() for v in again] == want
    step(x)
    assert made  # they are taken once


def test_inference_mode_has_its_own():
    x = torch.randn(4, 4).to("hlo")
    step(x)
    ahead()
    with torch.inference_mode():
        assert all(v.is_inference() for v in (x @ x, (x @ x).relu().sum(0)))
        step(x.clone())
        ahead()
        assert (x @ x).is_inference()
    values = step(x.requires_grad_())
    assert not any(v.is_inference() for v in values)
    sum(v.sum() for v in values).backward()
    assert x.grad.shape == x.shape


def test_those_that_nobody_takes_are_let_go():
    session.current().taken.clear()
    step(torch.randn(4, 4).to("hlo"))
    ahead()
    stocked = list(session.current().stocked)
    assert any(meta.spare[0] for meta in stocked)
    torch.randn(3, 3).to("hlo").exp()
    ahead()
    assert not any(meta.spare[0] for meta in stocked if meta not in session.current().stocked)
    for _ in range(2 * session.current().taken.maxlen):
        torch.empty(7, device="hlo")
    ahead()
    assert (
        sum(len(meta.spare[0]) for meta in session.current().stocked)
        <= session.current().taken.maxlen
    )


def test_it_ends_when_the_program_does():
    session.current().taken.clear()
    for n in range(101, 109):
        torch.empty(n, device="hlo")
    for work in session.current().executor.meanwhile:
        work(lambda: True)
    assert len(session.current().stocked) == 8 and not any(
        meta.spare[0] for meta in session.current().stocked
    )
