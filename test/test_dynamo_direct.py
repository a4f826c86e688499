"""Graphs that are called without AOTAutograd's Python (dynamo/direct.py): the same gradients,
errors and side effects as with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from test.marks import needs
from torch_hlo.device import runtime
from torch_hlo.dynamo import backend, direct

CALLS = 3  # the first goes through AOTAutograd, later ones do not


@pytest.fixture(autouse=True, params=["recorded", "AOTAutograd"])
def _way(request, monkeypatch):
    """Every test twice: with graphs that are recorded (trace.py), and with AOTAutograd's."""
    torch._dynamo.reset()
    if request.param == "AOTAutograd":
        monkeypatch.setattr(backend, "without_autograd", lambda *args: None)


@pytest.fixture
def functions(monkeypatch) -> list:
    """One entry for each training graph that is called directly."""
    found = []
    make, trained = direct.Graphs._function, direct.Graphs.trained
    monkeypatch.setattr(
        direct.Graphs,
        "_function",
        lambda self, aot: (found.append(aot), make(self, aot))[1],
    )
    monkeypatch.setattr(
        direct.Graphs,
        "trained",
        lambda self, *args: (found.append(args), trained(self, *args))[1],
    )
    return found


def _same(make, inputs, loss=lambda r: r.square().sum()):
    """`make()` compiled and not, over CALLS training calls: results, gradients, buffers."""
    models = make(), make()
    models[1].load_state_dict(models[0].state_dict())
    compiled = torch.compile(models[1], backend="hlo")
    for _ in range(CALLS):
        given = [
            [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs] for _ in models
        ]
        results = models[0](*given[0]), compiled(*given[1])
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
        for r in results:
            loss(r).backward()
        torch.testing.assert_close(
            [x.grad for x in given[1]], [x.grad for x in given[0]], rtol=1e-4, atol=1e-5
        )
    torch.testing.assert_close(
        [p.grad for p in models[1].parameters()],
        [p.grad for p in models[0].parameters()],
        rtol=1e-4,
        atol=1e-4,
    )
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=1e-4, atol=1e-5)


@needs("direct", "no_autograd")
def test_training(functions):
    _same(
        lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)),
        [torch.randn(4, 5, requires_grad=True)],
    )
    assert len(functions) == 1


@needs("direct", "no_autograd")
def test_written_buffers_count_as_written(functions):
    make = lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    _same(make, [torch.randn(3, 2, 6, 6)])
    assert functions
    model = make()
    compiled = torch.compile(model, backend="hlo")
    for _ in range(CALLS):
        before = model[1].running_mean._version
        compiled(torch.randn(3, 2, 6, 6)).sum().backward()
        assert model[1].running_mean._version > before


class _Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x, i):
        y = (x * self.scale).tanh()
        return y, y.detach().argmax(1), y[i].exp()


@needs("direct", "no_autograd")
def test_results_without_gradients(functions):
    _same(
        _Several,
        [torch.randn(3, 4), torch.tensor([2, 0])],
        lambda r: r[0].sum() + r[2].sum(),
    )
    assert functions


def test_results_that_the_loss_leaves_out(functions):
    _same(_Several, [torch.randn(3, 4), torch.tensor([2, 0])], lambda r: r[2].sum())


@needs("direct", "no_autograd")
def test_inputs_whose_gradient_is_nothing_are_left_alone(functions):
    function = torch.compile(lambda x, y: x.sin() + y.detach().cos() + (y > 0), backend="hlo")
    for _ in range(CALLS):
        a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        function(a * 1, b * 1).sum().backward()
        torch.testing.assert_close(a.grad, a.detach().cos())
        assert b.grad is None
    assert functions


@needs("direct", "no_autograd")
def test_sizes_that_vary(functions):
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    compiled = torch.compile(model, backend="hlo", dynamic=True)
    for n in (4, 6, 9, 12):
        x = torch.randn(n, 5)
        got, want = (
            torch.autograd.grad(m(x).square().sum(), list(model.parameters()))
            for m in (compiled, model)
        )
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(functions) == 1


def test_graph_kept_for_a_second_pass(functions):
    compiled = torch.compile(lambda x: (x * x).sin().sum(), backend="hlo")
    for _ in range(CALLS):
        x = torch.randn(5, requires_grad=True)
        y = compiled(x)
        (first,) = torch.autograd.grad(y, x, retain_graph=True)
        (second,) = torch.autograd.grad(y, x)
        torch.testing.assert_close([first, second], [2 * x.detach() * (x * x).detach().cos()] * 2)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(y, x)


@pytest.mark.parametrize("plain_calls", [0, CALLS])
def test_differentiating_twice(plain_calls):
    critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    compiled = torch.compile(critic, backend="hlo")
    x = torch.randn(6, 3, requires_grad=True)
    for _ in range(plain_calls):
        compiled(x).sum().backward()

    def gradients(critic):
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return torch.autograd.grad(
            (slope.norm(dim=1) - 1).square().mean() + critic(x).mean(),
            [*critic.parameters()][:-1],
        )

    want = gradients(critic)
    with pytest.warns(UserWarning, match="create_graph=True"):
        torch.testing.assert_close(gradients(compiled), want)
    torch.testing.assert_close(gradients(compiled), want)


def test_random_graphs_cannot_be_differentiated_twice(functions):
    compiled = torch.compile(lambda x: F.dropout((x * x).sin(), 0.5).sum(), backend="hlo")
    for _ in range(CALLS):
        x = torch.randn(5, requires_grad=True)
        (g,) = torch.autograd.grad(compiled(x), x, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            g.sum().backward()


def test_inputs_of_graphs_differentiated_twice_are_watched():
    compiled = torch.compile(lambda x, y: (x.sin() + y).sum(), backend="hlo")
    for _ in range(CALLS):
        x, y = torch.randn(5, requires_grad=True), torch.randn(5)
        result = compiled(x, y)
        y.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(result, x, create_graph=True)


@needs("direct", "no_autograd")
def test_saved_tensors_are_watched(functions):
    compiled = torch.compile(lambda x, y: (x * y).sum(), backend="hlo")
    for _ in range(CALLS):
        x, y = torch.randn(5, requires_grad=True), torch.randn(5)
        compiled(x, y).backward()
        result = compiled(x, y)
        y.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()
    assert functions


@needs("direct", "no_autograd")
def test_gradients_of_any_layout(functions):
    model = nn.Linear(4, 6)
    compiled = torch.compile(model, backend="hlo")
    x = torch.randn(3, 4)
    for gradient in (
        torch.randn(6, 3).t(),
        torch.ones(()).expand(3, 6),
        torch.randn(3, 12)[:, ::2],
    ):
        got, want = (
            torch.autograd.grad(m(x), list(model.parameters()), gradient) for m in (compiled, model)
        )
        torch.testing.assert_close(got, want)
    assert functions


def test_backward_within_a_compiled_function(functions):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @torch.compile(backend="hlo")
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    x, y = torch.randn(6, 4), torch.randint(2, (6,))
    losses = [step(x, y).item() for _ in range(6)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


def test_compiled_autograd(functions):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    compiled = torch.compile(model, backend="hlo")
    x = torch.randn(6, 4)
    want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for _ in range(CALLS):
        compiled(x).square().sum().backward()
        model.zero_grad()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="hlo")):
        for _ in range(CALLS):
            model.zero_grad()
            compiled(x).square().sum().backward()
            torch.testing.assert_close(
                [p.grad for p in model.parameters()], list(want), rtol=1e-4, atol=1e-5
            )


def test_hooks_on_saved_tensors(functions):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    compiled = torch.compile(model, backend="hlo")
    x = torch.randn(6, 4)
    for _ in range(CALLS):
        compiled(x).sum().backward()
    model.zero_grad()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (packed.append(t.shape), t.clone())[1], lambda t: t
    ):
        compiled(x).square().sum().backward()
    got = [p.grad for p in model.parameters()]
    torch.testing.assert_close(
        got,
        list(torch.autograd.grad(model(x).square().sum(), list(model.parameters()))),
        rtol=1e-4,
        atol=1e-5,
    )
    assert packed


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(mode):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    compiled = torch.compile(model, backend="hlo")
    x = torch.randn(6, 4)
    with mode():
        for _ in range(CALLS):
            y = compiled(x)
            torch.testing.assert_close(y, model(x))
            assert not y.requires_grad and y.is_inference() is (mode is torch.inference_mode)


def test_inference_that_returns_inputs_and_views():
    compiled = torch.compile(lambda x: (x, x.t(), x + 1), backend="hlo")
    x = torch.randn(2, 3)
    for _ in range(CALLS):
        same, turned, more = compiled(x)
        assert same is x and turned.data_ptr() == x.data_ptr()
        torch.testing.assert_close(more, x + 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_results_that_share_memory(dynamic):
    def f(x):
        y = x * 2
        return y, y.detach(), y.split(1)[0], y.reshape(x.shape[0] * x.shape[1])[1:], y.t()

    compiled = torch.compile(f, backend="hlo", dynamic=dynamic)
    for n in range(2, 2 + CALLS):
        found, wanted = compiled(torch.ones(n, n + 1)), f(torch.ones(n, n + 1))
        for y, *_ in (found, wanted):
            y.fill_(7)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted))
        assert [a.stride() for a in found] == [b.stride() for b in wanted]


def test_idle_memory_makes_room_for_the_loss():
    """Gradients of the last step leave 4 MB; PyTorch's cross-entropy of 8 MB takes three times as
    much, in the moment when a step needs most."""
    model, x, y = (
        nn.Linear(512, 2048),
        torch.randn(1024, 512),
        torch.randint(2048, (1024,)),
    )
    torch.hlo.empty_cache()  # what other tests left is enough room
    compiled = torch.compile(model, backend="hlo")
    for step in range(CALLS):
        before = runtime.memory_stats()["cached_bytes"]
        out = compiled(x)
        if step:
            assert before >= 4 << 20 > runtime.memory_stats()["cached_bytes"]
        F.cross_entropy(out, y).backward()
        del out
        model.zero_grad()


def _given_memory(x, w):
    y, z = (x + w).mean(0), x.t()[:2].data
    x.data = w
    w.data = z
    return [y, x * 2, w * 2]


def _given_results(x, w):
    y = (x + w) * 3
    x.data = y[0]
    w.data = y.view(-1)
    return [y, x * 2]


def _given_memory_in_training(w, x):
    y = x * w.sum()
    w.data = y.detach()
    return [y * 2, w * 3]


@pytest.mark.parametrize("fn", [_given_memory, _given_results, _given_memory_in_training])
def test_inputs_that_get_other_memory(fn):
    training = fn is _given_memory_in_training

    def left(run) -> list:
        given = torch.arange(6.0).view(2, 3).requires_grad_(training), torch.ones(2, 3)
        results = run(*given)
        if training:
            results[0].sum().backward()
        with torch.no_grad():  # who shares memory with whom?
            for x in [*given, *results]:
                x.add_(7)
        shown = [*given, *results, given[0].grad]
        return [None if x is None else (x.shape, x.stride(), x.tolist()) for x in shown]

    assert left(torch.compile(fn, backend="hlo", fullgraph=True)) == left(fn)
