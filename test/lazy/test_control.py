"""cond, while_loop and scan on lazy tensors: one loop in the program, values like Python's."""

import pytest
import torch

import torch_hlo
from torch_hlo import metrics


def hlo(*tensors):
    return [t.to("hlo") for t in tensors]


@pytest.mark.parametrize("p", [True, False])
def test_cond(p):
    x, w = torch.randn(4), torch.randn(4)
    xh, wh, ph = hlo(x, w, torch.tensor(p))
    y = torch_hlo.cond(ph, lambda a: a.sin() * wh, lambda a: a + 1, (xh,))
    torch.testing.assert_close(y.cpu(), x.sin() * w if p else x + 1)


def test_while_loop_over_values():
    x, limit = torch.rand(5), torch.tensor(100.0)
    i, y = torch_hlo.while_loop(
        lambda i, a: a.sum() < limit.to("hlo") * 1,
        lambda i, a: (i + 1, a * 2),
        hlo(torch.tensor(0), x),
    )
    n, want = 0, x
    while want.sum() < limit:
        n, want = n + 1, want * 2
    assert i.item() == n
    torch.testing.assert_close(y.cpu(), want)


def test_scan_with_captured_weights():
    x, h, w = torch.randn(6, 3), torch.randn(4), torch.randn(7, 4)
    xh, hh, wh = hlo(x, h, w)

    def cell(h, x, w=wh):
        h = torch.tanh(torch.cat([x, h]) @ w)
        return h, h * 2

    last, ys = torch_hlo.scan(cell, hh, xh)
    want, rows = h, []
    for row in x:
        want, y = cell(want, row, w)
        rows.append(y)
    torch.testing.assert_close(last.cpu(), want)
    torch.testing.assert_close(ys.cpu(), torch.stack(rows))


def test_scan_has_gradients():
    """Of init and xs, through every slice; a stranger that wants one is an error, not a zero."""
    h, ws = torch.randn(4), torch.randn(5, 4, 4) * 0.3
    n = torch.arange(5)

    def cell(h, x):
        w, i = x
        new = torch.tanh(h @ w) + i
        return new, (new.sin(), i)

    want = [t.clone().requires_grad_() for t in (h, ws)]
    carry, ys = want[0], []
    for w, i in zip(want[1], n):
        carry, (y, _) = cell(carry, (w, i))
        ys.append(y)
    (carry.sum() + torch.stack(ys).square().sum()).backward()
    got = [t.to("hlo").requires_grad_() for t in (h, ws)]
    last, (rows, same) = torch_hlo.scan(cell, got[0], (got[1], n.to("hlo")))
    (last.sum() + rows.square().sum()).backward()
    for a, b in zip(want, got):
        torch.testing.assert_close(b.grad.cpu(), a.grad)
    assert same.tolist() == n.tolist() and not same.requires_grad
    stranger = torch.randn(4).to("hlo").requires_grad_()
    last, _ = torch_hlo.scan(lambda c, x: (c * stranger, c), got[0], got[1])
    with pytest.raises(RuntimeError, match="hand it in through init or xs"):
        last.sum().backward()


def test_one_program_for_any_count():
    def run(n):
        i, y = torch_hlo.while_loop(
            lambda i, a, n: i < n,
            lambda i, a, n: (i + 1, a + i, n),
            hlo(torch.tensor(0), torch.zeros(3), torch.tensor(n)),
        )[:2]
        return y.cpu()

    run(1)
    before = metrics.counter_value("UncachedCompile")
    assert run(10).tolist() == [45.0] * 3
    assert metrics.counter_value("UncachedCompile") == before


def test_pending_values_are_captured():
    (x,) = hlo(torch.ones(3))
    y = x * 2
    (z,) = torch_hlo.while_loop(lambda a: a.sum() < 50, lambda a: (a + y,), (x,))
    assert z.tolist() == [17.0] * 3


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda x: torch_hlo.while_loop(lambda a: a.sum() < 5, lambda a: (a.sum(),), (x,)),
            "must be alike",
        ),
        (
            lambda x: torch_hlo.while_loop(lambda a: a < 5, lambda a: (a,), (x,)),
            "one element",
        ),
        (
            lambda x: torch_hlo.cond(x.sum() > 0, lambda a: a * a.sum().item(), lambda a: a, (x,)),
            "a value is needed at .*test_control",
        ),
        (
            lambda x: torch_hlo.cond(x.sum() > 0, lambda a: a, lambda a: a.sum(), (x,)),
            "must be alike",
        ),
        (
            lambda x: torch_hlo.scan(lambda c, a: c + a, x.sum(), x),
            "must return \\(carry, y\\)",
        ),
        (
            lambda x: torch_hlo.scan(lambda c, a: (c + torch.rand_like(a), a), x.sum(), x),
            "random",
        ),
        (
            lambda x: torch_hlo.cond(x.cpu().sum() > 0, lambda a: a, lambda a: a, (x,)),
            "takes hlo tensors",
        ),
        (
            lambda x: torch_hlo.cond(x.sum() > 0, lambda a: a, lambda a: a, (x.requires_grad_(),)),
            "no gradient",
        ),
    ],
)
def test_mistakes(call, message):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        call(torch.ones(3).to("hlo"))
