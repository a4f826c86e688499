"""cond, while_loop and scan on lazy tensors: one loop in the program, values like Python's."""

import pytest
import torch
from torch.utils import _pytree as pytree

import torch_hlo
from torch_hlo import metrics
from torch_hlo.lowering.core import SERIALS
from torch_hlo.pytorch.version import VERSION


class _Kept(list):
    def append(self, x):
        super().append(x)
        return x


KEPT = _Kept()


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


def test_gradients_that_would_be_lost_are_errors():
    w, x = torch.ones(3).to("hlo").requires_grad_(), torch.ones(3).to("hlo")
    xs, i = torch.ones(2, 3).to("hlo"), torch.tensor(0).to("hlo")
    calls = {
        "scan": lambda: torch_hlo.scan(lambda c, x: (c * w, c.sum()), x, xs),
        "cond": lambda: torch_hlo.cond(i < 1, lambda a: a * w, lambda a: a - w, (x,)),
        "while_loop": lambda: torch_hlo.while_loop(
            lambda i, a: i < 3, lambda i, a: (i + 1, a * w), (i, x)
        ),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=f"{name} has no gradient"):
            call()
        with torch.no_grad():
            call()


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


def _drops(carry, x):
    dropped = torch.nn.functional.dropout(x, 0.5)
    return carry + dropped, dropped


def test_turns_draw_numbers_of_their_own():
    """Masks differ from turn to turn and call to call, and a seed gives them again."""
    torch.manual_seed(3)
    ones, zero = torch.ones(6, 64).to("hlo"), torch.zeros(64).to("hlo")
    total, masks = torch_hlo.scan(_drops, zero, ones)
    _, others = torch_hlo.scan(_drops, zero, ones)
    after = torch.rand(4, device="hlo")
    rows = {tuple(row) for row in [*masks.tolist(), *others.tolist()]}
    assert len(rows) == 12 and {v for row in rows for v in row} == {0.0, 2.0}
    assert total.tolist() == masks.sum(0).tolist()
    torch.manual_seed(3)
    again = [torch_hlo.scan(_drops, zero, ones)[1] for _ in range(2)]
    assert torch.equal(again[0], masks) and torch.equal(again[1], others)
    assert torch.equal(torch.rand(4, device="hlo"), after)


def _weighted(carry, x):
    """With a scan inside, and a checkpoint."""
    inner, _ = torch_hlo.scan(_drops, torch.zeros_like(x), x.expand(3, 8))
    kept = torch.utils.checkpoint.checkpoint(
        lambda v: torch.nn.functional.dropout(v * v, 0.5), x, use_reentrant=False
    )
    return carry + inner * kept, inner * kept


def _backward(step):
    torch.manual_seed(5)
    x = torch.ones(4, 8, device="hlo", requires_grad=True)
    results = []
    for _ in range(3):
        x.grad = None
        y = step(x)
        results.append((y.detach().cpu(), x.grad.cpu()))
    return results


def _two_ways(x):
    last, ys = torch_hlo.scan(_weighted, x[0] * 0, x)
    (last.sum() * 2 + ys.sum()).backward()
    return ys


@pytest.mark.parametrize("how", ["recorded", "compile", "captured"])
def test_backward_draws_what_forward_drew(how):
    """y = a x * b x^2 with masks a, b: the gradient at 1 is 3 y, whatever the masks are."""
    step = {
        "recorded": _two_ways,
        "compile": torch.compile(_two_ways, backend="hlo"),
        "captured": torch_hlo.compile(_two_ways),
    }[how]
    found = _backward(step)
    for y, grad in found:
        assert 0 < (y != 0).sum() < y.numel()
        torch.testing.assert_close(grad, 9 * y)
    assert not torch.equal(found[1][0], found[2][0])


def test_random_numbers_in_branches_and_other_loops():
    torch.manual_seed(0)
    (x,) = hlo(torch.ones(64))
    drop = torch.nn.functional.dropout
    (y,) = torch_hlo.cond(x.sum() > 0, lambda a: (drop(a),), lambda a: (a,), (x,))
    assert set(y.tolist()) == {0.0, 2.0}
    n, rows, _ = torch_hlo.while_loop(
        lambda i, rows, a: (i < 4) & (torch.rand_like(a[0]) < 2),
        lambda i, rows, a: (i + 1, torch.roll(rows, 1, 0) + 0 * a, drop(a)),
        (torch.tensor(0, device="hlo"), torch.zeros(4, 64, device="hlo"), x),
    )
    assert n.item() == 4


def _hop_scan(x, xs):
    from torch._higher_order_ops.scan import scan

    return scan(lambda c, a: (c * 0.5 + a.sin(), c * a), x, xs, reverse=True)


def _hop_cond(x, xs):
    return torch.cond(x.sum() > 0, lambda a: a.sin() * xs, lambda a: a.cos() * xs, (x,))


def _hop_map(x, xs):
    from torch._higher_order_ops.map import map as mapped

    return mapped(lambda a: a.sin() * x, xs)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fn", [_hop_scan, _hop_cond, _hop_map])
def test_operators_of_pytorch(fn, compiled):
    """PyTorch's own control flow on hlo tensors, with its gradients."""
    x, xs = torch.randn(4), torch.randn(5, 4)

    def run(device, fn):
        given = [t.detach().clone().to(device).requires_grad_() for t in (x, xs)]
        results = torch.utils._pytree.tree_leaves(fn(*given))
        sum(r.square().sum() for r in results).backward()
        return [t.detach().cpu() for t in (*results, given[0].grad, given[1].grad)]

    got = run("hlo", torch.compile(fn, backend="hlo") if compiled else fn)
    for a, b in zip(run("cpu", fn), got, strict=True):
        torch.testing.assert_close(b, a)


def test_branches_of_pytorch_with_changing_sizes():
    for n in (3, 4, 5, 6):  # from the second on they are arguments
        x = torch.randn(n, 2)
        got = [torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)) for y in (x.to("hlo"), x)]
        torch.testing.assert_close(got[0].cpu(), got[1])


def test_while_loop_of_pytorch():
    from torch._higher_order_ops.while_loop import while_loop

    i, y = while_loop(
        lambda i, a: i < 5, lambda i, a: (i + 1, a * 2), tuple(hlo(torch.tensor(0), torch.ones(3)))
    )
    assert i.item() == 5 and y.tolist() == [32.0] * 3


@pytest.mark.parametrize("device", ["cpu", "hlo"])
def test_random_numbers_in_a_compiled_scan(device):
    if device == "cpu" and VERSION < (2, 13):
        pytest.skip("PyTorch finds that this scan shares memory")
    """Each turn has its own mask, and the gradient is the one of the mask that was drawn."""
    from torch._higher_order_ops.scan import scan

    def step(x, xs):
        return scan(_drops, x, xs)

    x, xs = torch.zeros(64, device=device), torch.ones(5, 64, device=device, requires_grad=True)
    _, ys = torch.compile(step, backend="hlo")(x, xs)
    ys.sum().backward()
    assert len({tuple(row) for row in ys.tolist()}) == 5
    assert torch.equal(xs.grad, ys.detach())


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
            lambda x: torch_hlo.scan(
                lambda c, a: (c.uniform_(generator=torch.Generator("hlo")), a), x.sum(), x
            ),
            "generator of its own",
        ),
        (
            lambda x: torch_hlo.scan(lambda c, a: (c + x.add_(1).sum(), a), x.sum(), x),
            "in-place operation",
        ),
        (
            lambda x: torch_hlo.scan(lambda c, a: (c + a.add_(1), a), x.sum(), x),
            "in-place operation",
        ),
        (
            lambda x: torch_hlo.scan(lambda c, a: (c + KEPT.append(c * a), a), x.sum(), x),
            "outlives it",
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
    KEPT.clear()


def _scan(x):
    return torch_hlo.scan(lambda c, v: (c + v, {"before": c, "v": v}), x[0], x)


def _while(x):
    body = lambda i, a, b: (i + 1, b, a + b)
    return torch_hlo.while_loop(lambda i, a, b: (i < 4)[None], body, (x.sum() * 0, x, x))


def _cond(x):
    yes, no = lambda d: {"y": d["x"]}, lambda d: {"y": -d["x"]}
    return torch_hlo.cond(x.sum() > 0, yes, no, ({"x": x},))


@pytest.mark.skipif(VERSION < (2, 13), reason="the graph ends at a loop")
@pytest.mark.parametrize("fn", [_scan, _while, _cond])
def test_loops_are_a_part_of_captured_steps(fn):
    x = torch.arange(6.0).reshape(3, 2).to("hlo")
    expected, step = pytree.tree_leaves(fn(x)), torch_hlo.compile(fn, full_graph=True)
    for _ in range(5):
        found = step(x)
    before = next(SERIALS)
    found = pytree.tree_leaves(step(x))
    assert next(SERIALS) == before + 1  # nothing is recorded
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu())


def test_what_only_python_can_do_in_a_loop_ends_the_graph():
    seen = []

    def loop(x):
        def body(carry, v):
            seen.append(1)
            return carry.add_(v), carry * 1

        return torch_hlo.scan(body, x[0] + 0, x)[0] * 2

    x = torch.ones(3, 2).to("hlo")
    for wrap in torch_hlo.compile, lambda f: torch.compile(f, backend="hlo"):
        step = wrap(loop)
        for _ in range(3):
            assert step(x).tolist() == [8, 8]
    assert len(seen) == 6
