"""torch_hlo.debug.nan_checks inside of loops and branches: the operation, its line, and the turn."""

import inspect

import pytest
import torch
from torch._higher_order_ops import cond, scan, while_loop

import torch_hlo
from torch_hlo import debug


def line(fn, text):
    """`file:line` of the line of a function that has this text."""
    lines, first = inspect.getsourcelines(fn)
    at = next(i for i, x in enumerate(lines) if text in x)
    return f"{inspect.getsourcefile(fn)}:{first + at}"


def body(i, x):
    y = (x - 1).sqrt()  # in the loop
    return i + 1, y


def looped(x, loop=while_loop):
    start = torch.zeros((), dtype=torch.long, device=x.device)
    return loop(lambda i, x: i < 6, body, (start, x))[1].sum()


def combine(carry, x):
    y = (carry - x).log()  # in the scan
    return y + 1, y * 2


def scanned(x, loop=scan):
    return loop(combine, x[0] + 5, x)[1].sum()


def yes(x):
    return x.log()


def no(x):
    y = x + 1
    return y.rsqrt()  # in the branch


def branched(x, loop=cond):
    return loop(x.sum() > 0, yes, no, (x,)).sum()


def nested(x, loop=scan):
    def outer(carry, row):
        got = loop(combine, carry.clone(), row)  # the inner one
        return got[0], got[1].sum(0)

    return loop(outer, x[0, 0] + 9, x)[1].sum()


def error_of(fn, *args):
    with pytest.raises(FloatingPointError) as error, debug.nan_checks():
        fn(*args).item()
    return str(error.value)


HOW = {
    "alone": lambda f: f,
    "captured": torch_hlo.compile,
    "compile": lambda f: torch.compile(f, backend="hlo"),
    "cpu": lambda f: torch.compile(f, backend="hlo"),
}
OURS = {looped: torch_hlo.while_loop, scanned: torch_hlo.scan, branched: torch_hlo.cond}
CASES = {
    looped: (torch.tensor([9.0, 6.0]), "sqrt", line(body, "in the loop"), 4, "while_loop"),
    scanned: (torch.ones(6, 2), "log", line(combine, "in the scan"), 4, "scan"),
    branched: (torch.full((3,), -4.0), "rsqrt", line(no, "in the branch"), 1, "cond"),
    nested: (torch.ones(4, 2, 2), "log", line(combine, "in the scan"), 2, "scan"),
}


@pytest.mark.parametrize("how", [*HOW, "ours"])
@pytest.mark.parametrize("fn", CASES)
def test_the_operation_its_line_and_the_turn(fn, how):
    torch._dynamo.reset()
    x, op, where, turn, what = CASES[fn]
    x = x if how == "cpu" else x.to("hlo")
    if how == "ours":
        run = lambda x: fn(x, OURS.get(fn, torch_hlo.scan))  # noqa: E731
    else:
        run = HOW[how](fn)
    text = error_of(run, x)
    assert op in text and where in text, text
    turns = f"turn {turn} of {what}"
    assert turns in text or what == "cond" and "in a branch of cond" in text, text


def test_a_turn_that_makes_none_is_none():
    with debug.nan_checks():
        assert looped(torch.tensor([9000.0]).to("hlo")).isfinite() is not None


@pytest.mark.parametrize("device", ["hlo", "cpu"])
def test_gradients_of_a_loop(device):
    torch._dynamo.reset()

    def step(carry, x):
        y = (carry * x).sqrt()
        return y.clone(), y

    def loss(w, x):
        return scan(step, w, x)[1].sum()  # here

    w = torch.zeros(2, device=device).requires_grad_()
    x = torch.zeros(3, 2, device=device)
    with pytest.raises(FloatingPointError) as error, debug.nan_checks():
        torch.compile(loss, backend="hlo")(w, x).backward()
        w.grad.sum().item()
    text = str(error.value)
    here = line(test_gradients_of_a_loop, "# here")
    assert text.startswith("mul" if device == "hlo" else "aten.mul") and here in text, text
    assert "turn 1 of scan" in text


def test_loops_of_pytorch_on_the_device():
    """They are recorded, called alone as in compiled functions, and give what eager gives."""
    for fn in looped, scanned, branched, nested:
        x = CASES[fn][0].abs() + 20
        for how in "alone", "captured", "compile":
            torch._dynamo.reset()
            f = HOW[how](fn)
            for _ in range(3):
                torch.testing.assert_close(f(x.to("hlo")).cpu(), fn(x), equal_nan=True)


@pytest.mark.parametrize("wrap", [lambda f: f, torch_hlo.compile])
def test_loops_that_draw_random_numbers(wrap):
    def dropped(carry, x):
        h = torch.nn.functional.dropout(carry + x, 0.5)
        return h.clone(), (h - 3).log()  # h is 0 or more than 1

    def tested(x):
        return torch_hlo.scan(dropped, x[0], x)[1].sum()

    def looped(i, x):
        y = torch.rand_like(x) - 0.5
        return i + 1, y.sqrt()

    torch.manual_seed(3)
    x = torch.ones(4, 8).to("hlo")
    at = dropped.__code__.co_firstlineno + 2
    found = error_of(wrap(tested), x)
    assert found.startswith("log makes") and f"{__file__}:{at}" in found
    assert "in turn 1 of scan" in found
    start = torch.zeros((), dtype=torch.long, device="hlo")
    run = wrap(lambda i, x: torch_hlo.while_loop(lambda i, x: i < 3, looped, (i, x))[1].sum())
    found = error_of(run, start, x)
    assert found.startswith("sqrt makes") and "in turn 1 of while_loop" in found


def test_what_fails_while_an_event_waits_is_raised_later():
    event = torch.Event("hlo")
    event.record()
    with debug.nan_checks():
        y = -torch.ones(2).to("hlo")
        y = y.log()
        event.synchronize()
        with pytest.raises(FloatingPointError, match="log makes 2"):
            y.tolist()
