"""Graphs that are recorded without AOTAutograd (dynamo/trace.py): the same results, strides,
aliases and side effects; which graphs are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from test.marks import needs
from torch_hlo import config
from torch_hlo.dynamo import trace
from torch_hlo.lazy.record import session

pytestmark = needs("no_autograd")


@pytest.fixture
def decisions(monkeypatch) -> list:
    """Of each graph of the test, None if it was recorded, else the reason why not."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    found = []
    record = trace.record

    def watched(*args):
        try:
            graph = record(*args)
        except trace.Unsuitable as reason:
            found.append(str(reason))
            raise
        except Exception as error:
            found.append(repr(error))
            raise
        found.append(None)
        return graph

    monkeypatch.setattr(trace, "record", watched)
    return found


def _copy(x: torch.Tensor) -> torch.Tensor:
    """The same memory again, gaps included."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


@torch.no_grad()
def _same(fn, *inputs, tol=1e-5, calls=2):
    ours, theirs = list(inputs), [_copy(x) for x in inputs]
    compiled = torch.compile(fn, backend="hlo", dynamic=False)
    for _ in range(calls):
        got, want = compiled(*ours), fn(*theirs)
        torch.testing.assert_close(got, want, rtol=tol, atol=tol)
        torch.testing.assert_close(ours, theirs, rtol=tol, atol=tol)
        for g, w in zip(
            torch.utils._pytree.tree_leaves(got),
            torch.utils._pytree.tree_leaves(want),
            strict=True,
        ):
            assert g.stride() == w.stride() and g.dtype == w.dtype and g.device == w.device


def _attention(q, k, v):
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).contiguous().view(2, 6, 12)


def _cache(cache, x, at):
    cache.index_copy_(1, at, x)
    mask = torch.arange(8)[None] <= at[:, None]
    return torch.where(mask, (cache * 2).sum(-1), torch.full((), -1.0)), cache


def _buffers(x, w):
    y = torch.zeros(4, 5)
    y[1:3] = x
    y[:, 0] += 1
    z = y.view(20)
    z.mul_(w.sum())
    return y, z.sum()


RECORDED = {
    "arithmetic": (lambda x: (x * 2 + 1).relu() / 3, [torch.randn(3, 4)]),
    "factories": (
        lambda x: (
            x
            + torch.arange(4)
            + torch.ones(3, 1, device="cpu")
            + torch.tensor([1.0, 2.0, 3.0, 4.0])
        ),
        [torch.randn(3, 4)],
    ),
    "promotion": (
        lambda x, i: (
            x * 2.5,
            i + 1,
            i / 2,
            x + torch.tensor(2.0, dtype=torch.float64),
            i * x,
        ),
        [torch.randn(3).bfloat16(), torch.arange(3)],
    ),
    "complex": (
        lambda x: torch.view_as_real(torch.fft.fft(x) * 1j),
        [torch.randn(3, 8)],
    ),
    "attention": (_attention, [torch.randn(2, 3, 6, 4) for _ in range(3)]),
    "written": (
        lambda x, y: (x.add_(y).mul_(2), x.sum()),
        [torch.randn(3, 4), torch.randn(4)],
    ),
    "copied": (
        lambda x, y, z: (x.copy_(z), y.copy_(z), z + 1)[2],
        [torch.randn(3), torch.randn(3), torch.randn(3)],
    ),
    "cache": (_cache, [torch.randn(1, 8, 4), torch.randn(1, 1, 4), torch.tensor([3])]),
    "buffers": (_buffers, [torch.randn(2, 5), torch.randn(3)]),
    "returned": (
        lambda x, y: (x, x.clone(), y, (x + 1).t()),
        [torch.randn(3, 4), torch.randn(2)],
    ),
    "gaps": (
        lambda x: ((x + 1)[:, ::2], x.sum(0).expand(3, 4)),
        [torch.randn(5, 8)[:, ::2]],
    ),
    "permuted": (lambda x: (x * 2, x.flip(0), x.reshape(12)), [torch.randn(4, 3).t()]),
    "channels last": (
        lambda x, w: F.max_pool2d(F.conv2d(x, w).relu(), 2),
        [
            torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last),
            torch.randn(4, 3, 2, 2),
        ],
    ),
    "index": (
        lambda x, i: (x[i], x[:, None, 1] + 1, x[..., -1] * 2, x.gather(1, i[:, None])),
        [torch.randn(4, 5), torch.tensor([2, 0, 3, 1])],
    ),
    "chunks": (
        lambda x: torch.cat([c.softmax(-1) for c in x.chunk(3, 1)][::-1], 1),
        [torch.randn(2, 9)],
    ),
    "empty": (lambda x: (x.sum(0), x + 1), [torch.randn(0, 4)]),
    "batch norm": (
        lambda x, m, v: F.batch_norm(x, m, v, training=True),
        [torch.randn(6, 3, 4), torch.zeros(3), torch.ones(3)],
    ),
    "integers": (
        lambda i: (i // 3, i % 4, i << 1, ~i, i.bitwise_and(6), i.cumsum(0)),
        [torch.arange(-5, 9)],
    ),
    "linear algebra": (
        lambda x: torch.linalg.vector_norm(x @ x.mT + torch.eye(3), dim=0),
        [torch.randn(3, 3)],
    ),
}


@pytest.mark.parametrize("case", RECORDED)
def test_recorded_like_eager(decisions, case):
    fn, inputs = RECORDED[case]
    _same(fn, *inputs, tol=2e-2 if case == "promotion" else 1e-4)
    assert decisions == [None]


def _needs_value(x):
    return x[: int(x.sum().item() > 0) + 1] + 1


LEFT = {
    "view of an input": (lambda x: x.view(-1), [torch.randn(3, 4)]),
    "share memory": (lambda x: ((y := x + 1), y.t()), [torch.randn(3, 4)]),
    "are one tensor": (lambda x: ((y := x + 1), torch.atleast_2d(y)), [torch.randn(3, 4)]),
    "as_strided": (lambda x: (x + 1).as_strided((2, 2), (1, 2)).clone(), [torch.randn(3, 4)]),
    "memory that inputs share": (lambda x: x.add_(1).sum(), [torch.randn(4, 8)[:, ::2]]),
}  # fmt: skip


@pytest.mark.parametrize("reason", LEFT)
def test_left_to_aot_autograd(decisions, reason):
    fn, inputs = LEFT[reason]
    _same(fn, *inputs, calls=1)
    assert len(decisions) == 1 and reason in decisions[0], decisions


class _Tied(nn.Module):
    """A network with everything that inference has: embeddings, norms, dropout in evaluation,
    convolutions, a buffer that counts."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.conv, self.batch = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 20)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        self.calls += 1
        x = self.norm(self.embed(tokens))
        x = F.dropout(F.gelu(self.batch(self.conv(x.mT))).mT, 0.1, self.training)
        y, _ = self.attention(x, x, x, need_weights=False)
        return self.head(x + y), {"mean": y.mean(), "calls": self.calls.clone()}


def test_model(decisions):
    model = _Tied().eval()
    with torch.no_grad():
        model(torch.randint(20, (2, 5)))
    compiled = torch.compile(model, backend="hlo")
    for i in range(3):
        tokens = torch.randint(20, (2, 5))
        with torch.no_grad():
            got = compiled(tokens)
            assert model.calls == 2 + 2 * i
            want = model(tokens)
        torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got[1]["mean"], want[1]["mean"], rtol=1e-4, atol=1e-5)
        assert int(got[1]["calls"]) == int(want[1]["calls"]) - 1
    with torch.inference_mode():
        assert compiled(tokens)[0].is_inference()
    assert decisions == [None] * len(decisions)


class _Trained(nn.Module):
    """Convolutions, norms with statistics, attention, dropout of nothing, an embedding, tied
    weights."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.conv, self.batch = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 20)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens, target):
        x = self.norm(self.embed(tokens))
        x = F.gelu(self.batch(self.conv(x.mT))).mT
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        y = self.head(x + F.dropout(y, 0.0, self.training) + self.unused.detach().sum())
        with torch.no_grad():
            best = y.argmax(-1)
        return F.cross_entropy(y.flatten(0, 1), target.flatten()), best, y.mT


def test_training(decisions):
    models = _Trained(), _Trained()
    models[1].load_state_dict(models[0].state_dict())
    step = torch.compile(models[0], backend="hlo"), models[1]
    for _ in range(3):
        tokens, target = torch.randint(20, (2, 5)), torch.randint(20, (2, 5))
        results = [s(tokens, target) for s in step]
        for loss, _, y in results:
            (loss + y.square().mean()).backward()
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        assert results[0][2].stride() == results[1][2].stride() and not results[0][1].requires_grad
    torch.testing.assert_close(
        *[[p.grad for p in m.parameters()] for m in models], rtol=1e-3, atol=1e-4
    )
    torch.testing.assert_close(*[m.state_dict() for m in models], rtol=1e-4, atol=1e-5)
    assert decisions == [None]


GRADIENTS = {
    "permuted": (
        lambda x, y: (x.t() * 2 + y).sin(),
        [torch.randn(4, 3), torch.randn(3, 1)],
    ),
    "gaps": (
        lambda x, y: (x * y).sum(1),
        [torch.randn(4, 6)[:, ::2], torch.randn(4, 3)],
    ),
    "written inside": (
        lambda x, y: (z := x * 2, z.mul_(y), z[:, :1].neg_(), z)[3],
        [torch.randn(4, 3), torch.randn(4, 3)],
    ),
    "the gradient itself": (lambda x, y: x + y, [torch.randn(3), torch.randn(3)]),
    "constants": (
        lambda x, y: x * torch.tensor([1.0, 2.0]) + y * torch.arange(2),
        [torch.randn(3, 2), torch.randn(3, 2)],
    ),
    "max pooling": (
        lambda x, y: F.max_pool2d(F.conv2d(x, y), 2),
        [
            torch.randn(2, 3, 7, 7).to(memory_format=torch.channels_last),
            torch.randn(4, 3, 2, 2),
        ],
    ),
    "several": (
        lambda x, y: (x.softmax(0), (x @ y).relu(), y.cumsum(0)),
        [torch.randn(4, 3), torch.randn(3, 2)],
    ),
    "linear algebra": (
        lambda x, y: torch.linalg.norm(x @ x.mT, dim=0) + y.prod(),
        [torch.randn(3, 3), torch.randn(2)],
    ),
    "complex": (
        lambda x, y: torch.fft.rfft(x * y).abs(),
        [torch.randn(3, 8), torch.randn(8)],
    ),
    "indices": (
        lambda x, y: x[[0, 2, 0]] + y.index_select(0, torch.tensor([1, 1, 0])),
        [torch.randn(3, 2), torch.randn(2, 2)],
    ),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients(decisions, case):
    fn, inputs = GRADIENTS[case]
    compiled = torch.compile(fn, backend="hlo", dynamic=False)
    given = [[x.requires_grad_() for x in map(_copy, inputs)] for _ in range(2)]
    got, want = compiled(*given[0]), fn(*given[1])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    flat = [[r for r in torch.utils._pytree.tree_leaves(results)] for results in (got, want)]
    tangents = [torch.randn_like(r) for r in flat[1]]
    found = [torch.autograd.grad(results, xs, tangents) for results, xs in zip(flat, given)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert decisions == [None]


def _half(x, w):
    """Blocks of autocast, one in another; what the CPU casts and what it leaves."""
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, w)
        with (
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            z = x @ w.mT
        return (
            y,
            z,
            F.gelu(y).softmax(-1),
            torch.einsum("ab,cb->ac", z, w @ w.mT),
            F.mse_loss(y, y * 2),
            F.layer_norm(y, y.shape),
            y.exp().cumsum(0),
        )


@pytest.mark.parametrize("around", [False, True])
def test_autocast(decisions, around):
    inputs = torch.randn(5, 6), torch.randn(4, 6)
    compiled = torch.compile(_half, backend="hlo")
    given = [[x.requires_grad_() for x in map(_copy, inputs)] for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        got, want = compiled(*given[0]), _half(*given[1])
    assert [r.dtype for r in got] == [r.dtype for r in want] and not torch.is_autocast_enabled(
        "hlo"
    )
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    tangents = [torch.randn_like(r) for r in want]
    found = [torch.autograd.grad(results, xs, tangents) for results, xs in zip((got, want), given)]
    torch.testing.assert_close(*found, rtol=5e-2, atol=5e-2)
    assert decisions == [None]


def test_autocast_is_not_forgotten_by_a_gradient_of_a_gradient():
    x = torch.randn(3, 4, requires_grad=True)
    f = torch.compile(lambda x: (x @ x.mT).float().sin(), backend="hlo")
    with torch.autocast("cpu", torch.bfloat16):
        y = f(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        g.sum().backward()


def test_masks_are_kept_for_the_backward_pass(decisions):
    compiled = torch.compile(
        lambda x: F.dropout(x, 0.5) + F.scaled_dot_product_attention(x, x, x, dropout_p=0.0),
        backend="hlo",
    )
    x = torch.zeros(1, 1, 64, 8, requires_grad=True)
    torch.manual_seed(3)
    got = torch.autograd.grad(
        torch.compile(lambda x: F.dropout(x, 0.5) * 2, backend="hlo")(x + 1),
        x,
        retain_graph=True,
        grad_outputs=torch.ones_like(x),
    )[0]
    torch.manual_seed(3)
    value = torch.compile(lambda x: F.dropout(x, 0.5) * 2, backend="hlo")(x.detach() + 1)
    assert torch.equal(got, value) and {*got.unique().tolist()} == {0.0, 4.0}
    compiled(x).sum().backward()
    assert x.grad is not None and None in decisions


def test_written_inputs_count_as_written(decisions):
    w = torch.randn(3, requires_grad=True)
    state = torch.zeros(3)
    y = (w * state).sum()
    torch.compile(lambda s: s.add_(1), backend="hlo")(state)
    assert decisions == [None]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_random_numbers_repeat_with_the_seed(decisions):
    noise = torch.compile(
        lambda x: (F.dropout(x, 0.5), torch.rand(100), torch.randn_like(x)),
        backend="hlo",
    )
    x = torch.ones(100)
    state = torch.hlo.get_rng_state()
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append([*noise(x), *noise(x)])
    torch.testing.assert_close(results[0], results[1])
    assert decisions == [None]
    for i, r in enumerate(results[0]):
        assert not torch.equal(r, results[2][i]) and not torch.equal(r, results[0][(i + 3) % 6])
    assert not torch.equal(results[0][1], results[0][2])
    assert 30 < int((results[0][0] == 0).sum()) < 70
    assert torch.equal(torch.hlo.get_rng_state()[8:], state[8:])


def test_tensors_of_the_device_are_left_alone(decisions):
    """What the lazy device has recorded meanwhile is computed as if no graph had been traced."""
    a = torch.arange(4.0, device="hlo") + 1
    r = torch.compile(lambda x: x * 2, backend="hlo")(torch.ones(3))
    b = a * 2
    assert r.tolist() == [2, 2, 2] and b.tolist() == [2, 4, 6, 8] and decisions == [None]


def test_errors_are_pytorchs(decisions):
    def fn(x):
        return torch.linalg.cholesky(x)

    with pytest.raises(torch.linalg.LinAlgError):
        torch.compile(fn, backend="hlo")(-torch.eye(3))
    assert decisions and decisions[0] is not None


def test_graphs_longer_than_steps_may_be(decisions, monkeypatch) -> None:
    def chain(x):
        values = [x]
        for _ in range(30):
            values.append((values[-1] + 1).relu())
        return torch.stack(values)

    monkeypatch.setattr(session.current(), "limit", 10)
    with config.override(MAX_NODES=10):
        _same(chain, torch.randn(3))
    assert decisions == [None] and session.current().limit == 10


def test_results_that_are_one_tensor():
    """What Python does to one of them afterwards holds for the other."""

    def other_memory(x, y):
        x = x * 2
        z = torch.atleast_2d(x)  # x itself
        z.data = y * 1
        return x, z

    def gradient(x, y):
        x = x * 2
        z = x.flatten(1)  # x itself
        z.requires_grad_()
        return x, z

    for fn in other_memory, gradient:
        args = torch.randn(2, 3), torch.randn(2, 1)
        expected, got = fn(*args), torch.compile(fn, backend="hlo")(*args)
        for a, b in zip(expected, got):
            assert a.requires_grad == b.requires_grad
            torch.testing.assert_close(b.detach(), a.detach())
