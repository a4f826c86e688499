"""nn.LSTM, nn.GRU and nn.RNN as one loop per layer and direction: values and gradients of every
input equal the CPU's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_hlo
from torch_hlo.lazy.record import session
from torch_hlo.lazy.run.fingerprint import operands

NETWORKS = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}
FORMS = {
    "plain": ({}, (7, 3, 4)),
    "deep": ({"num_layers": 2, "bidirectional": True, "batch_first": True}, (3, 7, 4)),
    "no_bias": ({"bias": False}, (5, 1, 4)),
    "one_step": ({"bidirectional": True}, (1, 2, 4)),
    "unbatched": ({"num_layers": 2}, (6, 4)),
}


def _pair(network: str, dtype=torch.float32, **options):
    cls, extra = NETWORKS[network]
    cpu = cls(4, 5, **options, **extra).to(dtype)
    return cpu, copy.deepcopy(cpu).to("hlo")


def _state(model: nn.Module, x: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, ...]:
    count = model.num_layers * (2 if model.bidirectional else 1)
    size = (count, 5) if x.dim() == 2 else (count, x.shape[0 if batch_first else 1], 5)
    return tuple(
        torch.randn(size, dtype=x.dtype) for _ in range(2 if isinstance(model, nn.LSTM) else 1)
    )


def _run(model: nn.Module, x: torch.Tensor, state, loss) -> list[torch.Tensor]:
    device = next(model.parameters()).device
    x = x.to(device).detach().requires_grad_()
    state = [s.to(device).detach().requires_grad_() for s in state]
    out, last = model(x, tuple(state) if len(state) == 2 else state[0]) if state else model(x)
    last = last if isinstance(last, tuple) else (last,)
    loss(out, *last).backward()
    return [
        t.detach().cpu()
        for t in (
            out,
            *last,
            x.grad,
            *(s.grad for s in state),
            *(p.grad for p in model.parameters()),
        )
        if t is not None
    ]


def _weighted(*results):
    return sum(
        (r * torch.linspace(-1, 1, r.numel()).to(r.device).view(r.shape)).sum() for r in results
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("network", NETWORKS)
def test_values_and_gradients(network, form):
    options, shape = FORMS[form]
    cpu, hlo = _pair(network, **options)
    x = torch.randn(shape)
    for state in ((), _state(cpu, x, cpu.batch_first)):
        cpu.zero_grad(), hlo.zero_grad()
        for want, got in zip(
            _run(cpu, x, state, _weighted), _run(hlo, x, state, _weighted), strict=True
        ):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("part", ["output", "last"])
def test_gradient_of_one_result(network, part):
    cpu, hlo = _pair(network)
    x = torch.randn(6, 2, 4)
    loss = (
        (lambda out, *last: out[3].square().sum())
        if part == "output"
        else (lambda out, *last: last[-1].square().sum())
    )
    for want, got in zip(_run(cpu, x, (), loss), _run(hlo, x, (), loss), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("network", NETWORKS)
def test_second_derivative(network):
    cls, extra = NETWORKS[network]
    model = cls(2, 3, bidirectional=True, **extra).double().to("hlo")
    x = torch.randn(4, 2, 2, dtype=torch.float64).to("hlo").requires_grad_()
    grads = torch.autograd.grad(
        model(x)[0].square().sum(), (x, *model.parameters()), create_graph=True
    )
    first = sum(g.square().sum() for g in grads)
    got = torch.autograd.grad(first, (x, *model.parameters()))
    with torch.no_grad():  # one direction in parameter space, by central differences
        direction = [torch.randn(p.shape, dtype=p.dtype).to("hlo") for p in model.parameters()]

    def at(step: float) -> torch.Tensor:
        for p, d in zip(model.parameters(), direction):
            p.data.add_(d, alpha=step)
        g = torch.autograd.grad(model(x)[0].square().sum(), (x, *model.parameters()))
        for p, d in zip(model.parameters(), direction):
            p.data.sub_(d, alpha=step)
        return sum(v.square().sum() for v in g)

    want = (at(1e-5) - at(-1e-5)) / 2e-5
    along = sum((g * d).sum() for g, d in zip(got[1:], direction))
    torch.testing.assert_close(along.cpu(), want.cpu(), rtol=1e-4, atol=1e-6)


def test_inference_and_bfloat16():
    cpu, hlo = _pair("lstm", num_layers=2)
    x = torch.randn(6, 3, 4)
    with torch.inference_mode():
        torch.testing.assert_close(hlo(x.to("hlo"))[0].cpu(), cpu(x)[0], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        half = copy.deepcopy(hlo).bfloat16()
        torch.testing.assert_close(
            half(x.to("hlo").bfloat16())[0].float().cpu(),
            cpu(x)[0],
            rtol=0.05,
            atol=0.05,
        )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_cells(kind, bias):
    """A few steps of a cell: values, gradients, second derivatives."""
    cpu = getattr(nn, kind + "Cell")(4, 5, bias=bias)
    x = torch.randn(3, 2, 4)
    results = []
    for model in (cpu, copy.deepcopy(cpu).to("hlo")):
        xs = x.to(next(model.parameters()).device).detach().requires_grad_()
        state = model(xs[0])
        for t in (1, 2):
            state = model(xs[t], state)
        h = state[0] if kind == "LSTM" else state
        leaves = (xs, *model.parameters())
        grads = torch.autograd.grad(h.square().sum(), leaves, create_graph=True)
        results.append(
            [
                h,
                *grads,
                *torch.autograd.grad(sum(g.square().sum() for g in grads), leaves),
            ]
        )
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-4, atol=1e-5)


def test_dropout_between_layers():
    model = nn.LSTM(4, 5, num_layers=2, dropout=0.5).to("hlo")
    x = torch.randn(6, 3, 4).to("hlo")
    first, second = (model(x)[0].detach().cpu() for _ in range(2))
    assert not torch.equal(first, second)
    model.eval()
    first, second = (model(x)[0].detach().cpu() for _ in range(2))
    assert torch.equal(first, second)


def test_program_does_not_grow_with_time():
    """Ops are recorded per layer, not per time step."""
    model = nn.LSTM(4, 5).to("hlo")
    counts = []
    for length in (4, 64):
        torch_hlo.sync()
        out = model(torch.randn(length, 2, 4).to("hlo"))[0]
        seen, stack = set(), [out._storage.value.node]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack += operands(node)
        counts.append(len(seen))
        assert session.current().pending
    assert counts[0] == counts[1] < 20


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("packed", [False, True])
def test_autocast_runs_the_network_in_the_lower_precision(network, packed):
    """As on CUDA, and as one op: values and gradients of a bf16 network, gradients of f32 weights
    in f32."""
    cpu, hlo = _pair(network)
    lower, x = copy.deepcopy(cpu).bfloat16(), torch.randn(6, 4, 4)

    def run(model, x):
        given = nn.utils.rnn.pack_padded_sequence(x, [6, 3, 3, 1]) if packed else x
        out = model(given)[0]
        out = out.data if packed else out
        out.float().square().sum().backward()
        return out

    want = run(lower, x.bfloat16())
    with torch.autocast("hlo", dtype=torch.bfloat16):
        got = run(hlo, x.to("hlo"))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=2e-2, atol=2e-2)
    for p, q in zip(lower.parameters(), hlo.parameters(), strict=True):
        assert q.grad.dtype == torch.float32
        torch.testing.assert_close(q.grad.cpu(), p.grad.float(), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize(
    ("network", "form"),
    [("lstm", "deep"), ("gru", "deep"), ("tanh", "plain"), ("lstm", "no_bias")],
)
@pytest.mark.parametrize("with_state", [False, True])
def test_packed_sequences(network, form, with_state):
    cpu, hlo = _pair(network, **FORMS[form][0])
    x, lengths = torch.randn(6, 4, 4), [6, 3, 3, 1]
    state = _state(cpu, x, False) if with_state else ()

    def run(model):
        device = next(model.parameters()).device
        leaf = x.to(device).detach().requires_grad_()
        states = [s.to(device).detach().requires_grad_() for s in state]
        packed = nn.utils.rnn.pack_padded_sequence(leaf, lengths)
        out, last = model(
            packed,
            *((tuple(states) if len(states) == 2 else states[0],) if states else ()),
        )
        last = last if isinstance(last, tuple) else (last,)
        _weighted(nn.utils.rnn.pad_packed_sequence(out)[0], *last).backward()
        return [
            t.detach().cpu()
            for t in (
                out.data,
                *last,
                leaf.grad,
                *(s.grad for s in states),
                *(p.grad for p in model.parameters()),
            )
        ]

    for want, got in zip(run(cpu), run(hlo), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_second_derivative_of_packed_sequences():
    cpu, hlo = _pair("gru", dtype=torch.float64)
    found = []
    for model in (cpu, hlo):
        x = (
            torch.linspace(-1, 1, 48, dtype=torch.float64)
            .view(4, 3, 4)
            .to(next(model.parameters()).device)
            .requires_grad_()
        )
        out = model(nn.utils.rnn.pack_padded_sequence(x, [4, 2, 1]))[0].data
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), x)[0].cpu())
    torch.testing.assert_close(found[1], found[0])


# ---- torch.compile


@pytest.fixture
def dynamo():
    """Dynamo without what earlier tests compiled: it counts recompilations of nn.LSTM.forward."""
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize(
    ("network", "form"), [("lstm", "deep"), ("gru", "plain"), ("relu", "no_bias")]
)
def test_compiled_as_one_graph(network, form):
    options, shape = FORMS[form]
    cpu, _ = _pair(network, **options)
    compiled = torch.compile(
        copy.deepcopy(cpu), backend="hlo", fullgraph=True, options={"fallback": "error"}
    )
    x = torch.randn(shape)
    for want, got in zip(
        _run(cpu, x, (), _weighted), _run(compiled, x, (), _weighted), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("dynamo")
def test_compiled_on_the_device_and_with_any_length():
    cpu, hlo = _pair("lstm")
    recorded = torch.compile(hlo, backend="hlo", fullgraph=True)
    dynamic = torch.compile(
        copy.deepcopy(cpu),
        backend="hlo",
        fullgraph=True,
        dynamic=True,
        options={"fallback": "error"},
    )
    for length in (3, 6):
        x = torch.randn(length, 2, 4)
        cpu.zero_grad(), hlo.zero_grad(), dynamic.zero_grad()
        expected = _run(cpu, x, (), _weighted)
        for compiled in (recorded, dynamic):
            for want, got in zip(expected, _run(compiled, x, (), _weighted), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("dynamo")
def test_compiled_under_autocast():
    cpu, _ = _pair("lstm")
    compiled = torch.compile(
        copy.deepcopy(cpu), backend="hlo", fullgraph=True, options={"fallback": "error"}
    )
    x = torch.randn(6, 2, 4)
    with torch.no_grad():
        want = cpu(x)[0]  # in float32: oneDNN has LSTMs of bf16 on some processors only
        with torch.autocast("cpu", torch.bfloat16):
            found = compiled(x)[0]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), want, rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("dynamo")
def test_other_backends_still_break_graphs_at_networks():
    torch.compile(_pair("lstm")[0], backend="hlo")
    with pytest.raises(Exception, match="RNN, GRU, or LSTM"):
        torch.compile(_pair("lstm")[0], backend="eager", fullgraph=True)(torch.randn(6, 2, 4))
