"""torch_hlo.debug.print, callback and check: values as they are where the call stands."""

import inspect
import pdb
import subprocess
import sys

import pytest
import torch
from torch import nn

import torch_hlo
from torch_hlo import debug
from torch_hlo.lazy.record import conditions

from .support import no_recording


def lines(capfd):
    torch_hlo.sync()
    return capfd.readouterr().out.splitlines()


@pytest.mark.parametrize("device", ["cpu", "hlo"])
def test_values_are_those_of_the_moment(capfd, device):
    x = torch.arange(3.0).to(device)
    for i in range(2):
        debug.print("{s:.2f} at {i}", s=x.sum(), i=i)
        x.add_(1)
        debug.print("now {}", x)
        torch_hlo.mark_step()
    assert lines(capfd) == [
        "3.00 at 0",
        "now tensor([1., 2., 3.])",
        "6.00 at 1",
        "now tensor([2., 3., 4.])",
    ]


def test_a_step_that_ends_meanwhile_waits_its_turn(monkeypatch):
    """Judging reads values, and reads judge what is done: in order all the same."""
    found, asked = [], iter([True, False])
    done = conditions._computed
    monkeypatch.setattr(
        conditions, "_computed", lambda *args: done(*args) and next(asked, True)
    )  # the second is done after the first has been asked
    x = torch.ones(2).to("hlo")
    other = torch.full((2,), 7.0).to("hlo") + 1
    debug.callback(lambda v: found.append((v.tolist(), other.tolist())), x * 2)
    debug.callback(lambda v: found.append(v.tolist()), x * 3)
    torch_hlo.sync()
    torch_hlo.sync()
    assert found == [([2, 2], [8, 8]), [3, 3]]


def test_a_print_does_not_cut_the_graph(capfd):
    torch_hlo.sync()
    torch_hlo.metrics.clear_all()
    x = torch.ones(3).to("hlo") * 7
    debug.print("{}", x + 1)
    y = x + 2
    torch_hlo.mark_step()
    counted = torch_hlo.metrics.counter_value
    assert (counted("UncachedCompile") or 0) + (counted("CachedCompile") or 0) == 1
    assert y.tolist() == [9, 9, 9] and lines(capfd) == ["tensor([8., 8., 8.])"]


def trained(device, wrap, steps=5):
    torch.manual_seed(0)
    layer = nn.Linear(3, 1).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)

    @wrap
    def step(x):
        optimizer.zero_grad()
        loss = layer(x).square().sum()
        debug.print("loss {loss:.3f}, bias {b:.3f}", loss=loss, b=layer.bias[0])
        loss.backward()
        optimizer.step()
        debug.print("then {:.3f}", layer.bias[0])

    for i in range(steps):
        step(torch.full((2, 3), float(i)).to(device))


def test_captured_steps(capfd):
    trained("cpu", lambda fn: fn)
    expected = lines(capfd)
    trained("hlo", torch_hlo.compile)
    assert lines(capfd) == expected and len(expected) == 10


def test_captured_steps_are_launched(capfd, monkeypatch):
    @torch_hlo.compile
    def step(x):
        y = x * 2
        debug.print("{} {}", x[0], y[0])
        return y

    x = torch.ones(3).to("hlo")
    for _ in range(3):
        step(x)
    no_recording(monkeypatch)
    step(x)
    assert lines(capfd) == ["1.0 2.0"] * 4


@pytest.mark.parametrize("device", ["cpu", "hlo"])
@pytest.mark.parametrize("train", [False, True])
def test_torch_compile(capfd, device, train):
    @torch.compile(backend="hlo", fullgraph=True)
    def fn(x):
        y = x * 2
        debug.print("{y} {s:.1f}", y=y, s=y.sum())
        return y + 1

    for value in (1.0, 3.0):
        x = torch.full((2,), value, requires_grad=train).to(device)
        y = fn(x)
        if train:
            y.sum().backward()
    assert lines(capfd) == ["tensor([2., 2.]) 4.0", "tensor([6., 6.]) 12.0"]


def test_callback():
    found = []
    x = torch.arange(2.0).to("hlo")
    debug.callback(lambda *values: found.append([v.tolist() for v in values]), x, x + 1)
    debug.callback(lambda: found.append("between"))
    debug.callback(lambda value: found.append(value.item()), x.sum())
    torch_hlo.sync()
    assert found == [[[0, 1], [1, 2]], "between", 1]


def test_checks_that_fail_are_one_error():
    x = torch.arange(3.0).to("hlo") + 1
    debug.check(x > 0, "all are positive")
    debug.check(x > 1, "too small")
    debug.check((x < 3).all(), "too large")
    line = inspect.currentframe().f_lineno - 1
    with pytest.raises(RuntimeError, match=f"too small at .*:{line - 1}") as error:
        torch_hlo.sync()
    assert error.value.__notes__ == [f"and RuntimeError: too large at {__file__}:{line}"]
    torch_hlo.sync()
    assert x.tolist() == [1, 2, 3]


@pytest.mark.parametrize("device", ["cpu", "hlo"])
@pytest.mark.parametrize("wrap", [torch_hlo.compile, torch.compile(backend="hlo")])
def test_a_check_in_a_compiled_function_names_its_line(device, wrap):
    def step(x):
        debug.check(x > 0, "wrong")
        return x * 2

    step, line = wrap(step), step.__code__.co_firstlineno + 1
    for _ in range(3):
        with pytest.raises(RuntimeError, match=f"wrong at {__file__}:{line}"):
            step(torch.zeros(2, device=device))
            torch_hlo.sync()


@pytest.mark.parametrize("device", ["cpu", "hlo"])
def test_the_debugger_in_a_graph_has_its_variables(device, monkeypatch):
    seen = []
    monkeypatch.setattr(pdb.Pdb, "run", lambda self, code, scope, names: seen.append((code, names)))

    @torch.compile(backend="hlo", fullgraph=True)
    def step(x):
        doubled = x * 2
        debug.breakpoint()
        debug.print("no values")
        return doubled + 1

    step(torch.ones(2, device=device))
    torch_hlo.sync()
    ((code, names),) = seen
    assert code.co_filename == __file__ and {k: v.tolist() for k, v in names.items()} == {
        "x": [1, 1],
        "doubled": [2, 2],
    }


def test_what_is_left_is_printed_at_exit():
    script = (
        "import torch, torch_hlo\ntorch_hlo.debug.print('last {}', torch.ones(2).to('hlo') * 3)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "last tensor([3., 3.])\n", done.stderr


def test_the_debugger_has_values(monkeypatch):
    seen = []
    monkeypatch.setattr(pdb.Pdb, "set_trace", lambda self, frame: seen.append(frame.f_lineno))
    x = torch.ones(2).to("hlo") + 1
    debug.breakpoint()
    assert seen and x.tolist() == [2, 2]


def test_the_debugger_in_a_captured_step_is_at_its_line(monkeypatch):
    seen = []
    monkeypatch.setattr(pdb.Pdb, "run", lambda self, code, scope, names: seen.append((code, names)))

    def step(x):
        debug.breakpoint(doubled=x * 2, x=x)
        return x + 1

    captured = torch_hlo.compile(step)
    for _ in range(3):
        captured(torch.ones(2).to("hlo"))
        torch_hlo.sync()
    places = {(code.co_filename, code.co_firstlineno, *names) for code, names in seen}
    assert len(seen) == 3
    assert places == {(__file__, step.__code__.co_firstlineno + 1, "doubled", "x")}
