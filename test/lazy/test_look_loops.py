"""torch_hlo.debug.print, callback, check and breakpoint inside of loops and branches."""

import os
import pdb
import subprocess
import sys

import pytest
import torch
from torch._higher_order_ops import cond, map, print as pytorch_print, scan, while_loop

import torch_hlo
from torch_hlo import debug
from torch_hlo.pytorch.version import VERSION

from .support import no_recording

guarded = pytest.mark.skipif(
    VERSION < (2, 13), reason="Dynamo takes equal code for equal functions"
)


def lines(capfd):
    torch_hlo.sync()
    return capfd.readouterr().out.splitlines()


def looped(x, loop=while_loop):
    def test(i, x):
        debug.print("test {}", i)
        return i < 2

    def body(i, x):
        debug.print("body {} {:.0f}", i, x.sum())
        return i + 1, x * 2

    return loop(test, body, (torch.zeros((), dtype=torch.long, device=x.device), x))[1]


def scanned(x, loop=scan):
    def combine(carry, x):
        debug.print("{:.0f}", carry.sum())
        return carry + x, carry * x

    debug.print("before {:.0f}", x.sum())
    found = loop(combine, x[0], x)[1].sum()
    debug.print("after {:.0f}", found)
    return found


def branched(x, loop=cond):
    def yes(x):
        debug.print("yes {:.0f}", x.sum())
        return x + 1

    def no(x):
        debug.print("no {:.0f}", x.sum())
        return x - 1

    return loop(x.sum() > 5, yes, no, (loop(x.sum() > 50, yes, no, (x,)),))


def nested(x, loop=scan):
    def inner(carry, x):
        debug.print("in {:.0f}", carry)
        return carry + x, carry * x

    def outer(carry, row):
        debug.print("out {:.0f}", carry)
        last, ys = loop(inner, carry.clone(), row)
        debug.print("end {:.0f}", last)
        return last, ys

    return loop(outer, x[0, 0], x)[1].sum()


def printed(x, loop=scan):
    def combine(carry, x):
        pytorch_print("{} {n}", carry, n=3)
        return carry + x, carry * x

    return loop(combine, x[0], x)[1].sum()


def differentiated(x, loop=scan):
    x = x.clone().requires_grad_()

    def combine(carry, x):
        y = carry * x
        debug.print("{:.0f}", y.sum())
        return y, y + 1

    loop(combine, x[0], x)[1].sum().backward()
    return x.grad.sum()


HOW = {
    "alone": lambda f: f,
    "captured": torch_hlo.compile,
    "compile": lambda f: torch.compile(f, backend="hlo"),
    "cpu": lambda f: torch.compile(f, backend="hlo"),
}
OURS = {looped: torch_hlo.while_loop, branched: torch_hlo.cond}
LINES = {
    looped: ["test 0", "body 0 6", "test 1", "body 1 12", "test 2"],
    scanned: ["before 6", "2", "4", "6", "after 12"],
    branched: ["no 6", "yes 0"],
    nested: ["out 1", "in 1", "in 2", "end 3", "out 3", "in 3", "in 4", "end 5", *
             ["out 5", "in 5", "in 6", "end 7"]],
    printed: [f"tensor([{n}., {n}.]) 3" for n in (1, 2, 3)],
    differentiated: ["2", "2", "2"],
}  # fmt: skip


@pytest.mark.parametrize("how", [*HOW, "ours", "ours captured"])
@pytest.mark.parametrize("fn", LINES, ids=lambda f: f.__name__)
def test_each_turn_in_order(capfd, fn, how):
    loop = (OURS.get(fn, torch_hlo.scan),) if "ours" in how else ()
    run = HOW["captured" if "captured" in how else "alone" if "ours" in how else how](fn)
    x = torch.ones(3, 2).to("cpu" if how == "cpu" else "hlo")
    expected = None
    for _ in range(3 if "captured" in how else 2):
        found = run(x, *loop)
        assert lines(capfd) == LINES[fn]
        expected = found.tolist() if expected is None else expected
        assert found.tolist() == expected


@pytest.mark.parametrize("wrap", [lambda f: f, torch_hlo.compile])
def test_a_print_in_a_loop_does_not_cut_the_graph(capfd, wrap):
    step = wrap(scanned)
    x = torch.ones(3, 2).to("hlo")
    for _ in range(3):
        step(x)
    torch_hlo.sync()
    torch_hlo.metrics.clear_all()
    y = step(x)
    torch_hlo.mark_step()
    counted = torch_hlo.metrics.counter_value
    assert (counted("UncachedCompile") or 0) + (counted("CachedCompile") or 0) == 1
    assert y.item() == 12 and lines(capfd) == LINES[scanned] * 4


def checked(x, loop=scan):
    def combine(carry, x):
        debug.check(carry < 3, "small")
        debug.check(carry < 9, "never")
        debug.check((carry < 4).all(), "smaller")
        return carry + x, carry * x

    return loop(combine, x[0], x)[1].sum()  # the loop


@pytest.mark.parametrize("how", HOW)
def test_checks_name_the_turn(how):
    run, x = HOW[how](checked), torch.ones(5, 2).to("cpu" if how == "cpu" else "hlo")
    at = checked.__code__.co_firstlineno + 7
    for _ in range(3):
        with pytest.raises(RuntimeError) as error:
            run(x)
            torch_hlo.sync()
        where, line = f"of scan at {__file__}:{at}", f"{__file__}:{at - 5}"
        assert str(error.value) == f"small at {line}, in turn 3 {where}"
        assert f"and RuntimeError: smaller at {__file__}:{at - 3}, in turn 4 {where}" in str(
            error.value.__notes__
        )
    torch_hlo.sync()


def test_checks_in_a_branch_and_in_loops_inside_one_another():
    def inner(carry, x):
        debug.check(carry < 4, "small")
        return carry + x, carry * x

    x = torch.ones(3, 2).to("hlo")
    with pytest.raises(RuntimeError, match="small at .*, in turn 2 of turn 2 of scan at"):
        torch_hlo.scan(lambda c, row: torch_hlo.scan(inner, c.clone(), row), x[0, 0], x)
        torch_hlo.sync()
    with pytest.raises(RuntimeError, match="small at .*, in a branch of cond at"):
        branch = lambda x: inner(x + 3, x)[0]  # noqa: E731
        torch_hlo.cond(x.sum() > 0, branch, branch, (x,))
        torch_hlo.sync()


@guarded
@pytest.mark.parametrize("how", HOW)
def test_callbacks(how):
    found = []

    def note(*values):
        found.append([v.tolist() for v in values])

    def body(x):
        debug.callback(note, x, x > 1)
        return x * 2

    x = torch.arange(3.0).to("cpu" if how == "cpu" else "hlo")
    HOW[how](lambda x: map(body, x).sum())(x)
    torch_hlo.sync()
    assert found == [[0, False], [1, False], [2, True]]


@guarded
def test_what_dynamo_would_copy_is_refused():
    def compiled(make):
        @torch.compile(backend="hlo")
        def fn(x):
            debug.callback(make(), x)
            return x + 1

        fn(torch.ones(2).to("hlo"))
        torch_hlo.sync()

    found = []
    for make in (lambda: found.append), (lambda: lambda v: found.append(v)):
        with pytest.raises(RuntimeError, match="define the function outside"):
            compiled(make)
    compiled(lambda: lambda v: print(v))


def test_functions_made_anew_compile_nothing():
    x, found = torch.ones(3, 2).to("hlo"), []

    def run():
        def combine(carry, x):
            debug.callback(lambda v: found.append(v.tolist()), carry)
            return carry + x, carry

        torch_hlo.scan(combine, x[0], x)
        torch_hlo.sync()

    run()
    torch_hlo.metrics.clear_all()
    run()
    assert found == [[1, 1], [2, 2], [3, 3]] * 2
    assert not torch_hlo.metrics.counter_value("UncachedCompile")


def test_the_debugger_has_values_of_each_turn(monkeypatch):
    seen = []

    def run(self, code, names, values):
        seen.append(
            (code.co_filename, code.co_firstlineno, {k: v.tolist() for k, v in values.items()})
        )

    monkeypatch.setattr(pdb.Pdb, "run", run)

    def combine(carry, x):
        y = carry + x
        debug.breakpoint()
        return y, carry

    line = combine.__code__.co_firstlineno + 2
    x = torch.arange(2.0).to("hlo")
    torch_hlo.scan(combine, x.sum(), x)
    torch_hlo.sync()
    expected = [{"carry": 1, "x": 0, "y": 1}, {"carry": 1, "x": 1, "y": 2}]
    assert seen == [(__file__, line, values) for values in expected]

    def named(carry, x):
        debug.breakpoint(carry=carry)
        return carry + x, carry * 2

    seen.clear()
    torch.compile(lambda x: scan(named, x[0], x)[1], backend="hlo")(x)
    torch_hlo.sync()
    assert [values for _, _, values in seen] == [{"carry": 0}, {"carry": 0}]


def test_the_same_program_in_another_process(tmp_path):
    script = f"""
import torch, torch_hlo
from {__name__} import scanned, looped
torch_hlo.compile(scanned)(torch.ones(3, 2).to("hlo"))
looped(torch.ones(3, 2).to("hlo"))
torch_hlo.sync()
"""
    environment = {**os.environ, "TORCH_HLO_CACHE": str(tmp_path)}
    stored = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=environment
        )
        assert done.stdout.splitlines() == LINES[scanned] + LINES[looped], done.stderr
        stored.append({p for p in tmp_path.rglob("*") if p.is_file()})
    assert stored[0] == stored[1] and stored[0]


def test_nan_checks_do_not_print_twice(capfd):
    def combine(carry, x):
        debug.print("{:.0f}", carry.sum())
        return carry - x, (carry - 1).log()

    x = torch.ones(3, 2).to("hlo")
    with pytest.raises(FloatingPointError, match="log makes 2 NaN .* in turn 3 of scan"):
        with debug.nan_checks():
            torch_hlo.scan(combine, x[0] + 1, x)[1].sum().item()
    assert lines(capfd) == ["4", "2", "0"]


def test_captured_steps_with_prints_in_loops_are_launched(capfd, monkeypatch):
    total = torch.zeros(2).to("hlo")

    def body(carry, x):
        debug.print("{:.0f}", carry.sum())
        return carry + x, carry.clone()

    @torch_hlo.compile
    def step(x):
        total.add_(scan(body, total * 1, x)[0])

    x = torch.ones(2, 2).to("hlo")
    for _ in range(4):
        step(x)
    lines(capfd)
    no_recording(monkeypatch)
    for _ in range(2):
        step(x)
    assert lines(capfd) == ["60", "62", "124", "126"]
