"""Recordings that are launched by a function written for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_hlo
from torch_hlo import config
from torch_hlo.lazy.run import executor


@torch_hlo.compile
def double(x, y):
    z = x * 2.5 + y
    return z, x, z.sum()


@pytest.fixture
def jobs(monkeypatch):
    """What was submitted, once it is known; every program is taken for a brief one."""
    found = []
    submit = executor.submit
    monkeypatch.setattr(executor, "BRIEF", 1.0)
    monkeypatch.setattr(executor, "submit", lambda job: (found.append(job), submit(job)))
    with config.override(DYNAMIC=False):  # other tests have seen these programs with other sizes
        yield found


def known(jobs):
    x, y = torch.randn(4, 3).to("hlo"), torch.randn(4, 3).to("hlo")
    for _ in range(6):
        double(x, y)
        torch_hlo.sync()
    jobs.clear()
    return x, y


def check(x, y):
    z, same, total = double(x, y)
    expected = x.cpu() * 2.5 + y.cpu()
    torch.testing.assert_close(z.cpu(), expected)
    torch.testing.assert_close(total.cpu(), expected.sum())
    assert same is x


def test_runs_where_it_is_called(jobs):
    x, y = known(jobs)
    check(x, y)
    check(y, x)
    assert not jobs
    double(*double(x, y)[:2])
    assert not jobs


def test_results_in_another_order_than_the_program_s(jobs):
    @torch_hlo.compile
    def policy(x, y):
        hidden = torch.tanh(x + y)
        return hidden * 2, hidden.sum(), hidden

    x, y = torch.randn(4, 3).to("hlo"), torch.randn(4, 3).to("hlo")
    for _ in range(6):
        policy(x, y)
        torch_hlo.sync()
    jobs.clear()
    double, total, hidden = policy(x, y)
    assert not jobs
    expected = torch.tanh(x.cpu() + y.cpu())
    torch.testing.assert_close(hidden.cpu(), expected)
    torch.testing.assert_close(double.cpu(), expected * 2)
    torch.testing.assert_close(total.cpu(), expected.sum())


def test_other_arguments(jobs):
    x, y = known(jobs)
    check(x, x)
    check(x.t().contiguous().t(), y)
    check(x[:2], y[:2])
    check(x.double(), y.double())
    with torch.inference_mode():
        assert double(x, y)[0].is_inference()
    assert not double(x, y)[0].is_inference()
    check(x, y)


def test_after_what_is_recorded_and_under_way(jobs):
    x, y = known(jobs)
    x += 1
    y.mul_(3)
    check(x, y)
    assert jobs
    z = double(x, y)[0]
    before = z.cpu()
    double(z, y)
    z.add_(1)
    torch.testing.assert_close(z.cpu(), before + 1)


def test_results_are_apart(jobs):
    x, y = known(jobs)
    first = double(x, y)[0]
    kept = first.cpu()
    second = double(y, x)[0]
    second.zero_()
    torch.testing.assert_close(first.cpu(), kept)


def test_modules_keep_their_place(jobs):
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to("hlo")
    run = torch_hlo.compile(lambda x: model(x).detach())
    x = torch.randn(1, 3).to("hlo")
    for _ in range(6):
        run(x)
        torch_hlo.sync()
    jobs.clear()
    run(x)
    assert not jobs
    with torch.no_grad():
        model[0].weight.mul_(2)
    model[2].bias = nn.Parameter(torch.ones(2).to("hlo"))
    expected = [p.cpu() for p in model.parameters()]
    h = torch.tanh(x.cpu() @ expected[0].T + expected[1])
    torch.testing.assert_close(run(x).cpu(), h @ expected[2].T + expected[3])
