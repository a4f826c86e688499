"""Attention that is written out, in training through torch.compile: a kernel forward and a kernel
backward, and only two numbers per row kept between them."""

import math

import pytest
import torch
import torch._dynamo as dynamo
from torch import nn

import torch_hlo.debug
from torch_hlo.compiler.attention.attention import attention_of
from torch_hlo.compiler.pipeline import optimize
from torch_hlo.dynamo.call import Caller

S, T = 40, 48
LATER = torch.arange(T) > torch.arange(S)[:, None]
# the last sequence has no tokens
PADDED = torch.arange(T) >= torch.tensor([48, 31, 0])[:, None, None, None]

SCORES = {
    "plain": lambda s, bias: s,
    "later": lambda s, bias: s.masked_fill(LATER, -math.inf),
    "padded": lambda s, bias: s.masked_fill(PADDED, -1e9),
    "where": lambda s, bias: torch.where(LATER, torch.finfo(s.dtype).min, s),
    "biased": lambda s, bias: s + bias,
    "capped": lambda s, bias: (torch.tanh(s / 3) * 3).masked_fill(LATER, -math.inf),
    "both": lambda s, bias: (s + bias).masked_fill(LATER, -math.inf),
}


@pytest.fixture
def programs(monkeypatch):
    dynamo.reset()
    found = []
    module = Caller.module

    def kept(self):
        m = module(self)
        found.append(
            [
                x
                for x in optimize(m).entry.instructions()
                if x.op not in ("parameter", "get-tuple-element", "tuple")
            ]
        )
        return m

    monkeypatch.setattr(Caller, "module", kept)
    return found


def attention(q, k, v, bias, change, drop=0.0):
    s = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    w = torch.dropout(torch.softmax(change(s, bias).float(), dim=-1), drop, True)
    return w.type_as(q) @ v


def arrays(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    shapes = (3, 2, S, 16), (3, 2, T, 16), (3, 2, T, 24), (1, 2, S, T)
    return [torch.randn(s, generator=g).to(dtype).requires_grad_() for s in shapes]


def gradients(fn, args, of) -> list:
    y = fn(*args)
    weights = torch.arange(y.numel()).reshape(y.shape).sin().to(y.dtype)
    return [
        y,
        *torch.autograd.grad(
            (y * weights).sum(), [a for a, used in zip(args, of, strict=True) if used]
        ),
    ]


def is_score(x) -> bool:
    return (
        x.shape.is_tuple is False and x.shape.dims[-2:] == (S, T) and x.shape.size >= 3 * 2 * S * T
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCORES)
def test_halves(programs, name, dtype) -> None:
    args = arrays(dtype)
    of = True, True, True, name in ("biased", "both")

    def fn(*args):
        return attention(*args, SCORES[name])

    got, want = (
        gradients(torch.compile(fn, backend="hlo"), args, of),
        gradients(fn, [a.detach().float().requires_grad_() for a in args], of),
    )
    for g, w in zip(got, want, strict=True):
        tol = 1e-4 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(g.float(), w, rtol=tol, atol=tol * float(w.detach().abs().max()))
    assert [attention_of(x).kind for p in programs for x in p if attention_of(x)] == [
        "forward",
        "backward",
    ]
    assert not any(is_score(x) for p in programs for x in p)


def test_dropout(programs) -> None:
    """The mask is kept, the weights are not: with values of 1 the output says which weights were
    dropped, and gradients follow."""
    q, k, v, bias = arrays()

    def fn(q, k, v):
        return attention(q, k, v, bias, SCORES["plain"], 0.3)

    fast = torch.compile(fn, backend="hlo")
    identity = torch.eye(T).expand(3, 2, T, T).clone().requires_grad_()  # the output is the weights
    w = fast(q, k, identity)
    whole = torch.softmax(q @ k.mT / 4, -1)
    mask = (w != 0).float()
    assert 0.65 < mask.mean() < 0.75
    torch.testing.assert_close(w, whole * mask / 0.7)
    weights = torch.randn(w.shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad((w * weights).sum(), (q, k, identity))
    want = torch.autograd.grad(((whole * mask / 0.7) @ identity * weights).sum(), (q, k, identity))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert [attention_of(x).kind for p in programs for x in p if attention_of(x)] == [
        "forward",
        "backward",
    ]


def test_weights_that_are_returned(programs) -> None:
    q, k, v, _ = arrays()

    def fn(q, k, v):
        w = torch.softmax(q @ k.mT / 4, -1)
        return w @ v, w

    got, want = torch.compile(fn, backend="hlo")(q, k, v), fn(q, k, v)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got[0].sum() + got[1].square().sum(), (q, k, v)),
        torch.autograd.grad(want[0].sum() + want[1].square().sum(), (q, k, v)),
        rtol=1e-4,
        atol=1e-5,
    )
    assert not [x for p in programs for x in p if attention_of(x)]


def test_hlo_tensors() -> None:
    """Their forward and backward are one program, in which attention is found as a whole."""
    dynamo.reset()
    q, k, v, _ = arrays()
    fn = torch.compile(lambda q, k, v: torch.softmax(q @ k.mT / 4, -1) @ v, backend="hlo")
    args = [x.detach().to("hlo").requires_grad_() for x in (q, k, v)]
    got = torch.autograd.grad(fn(*args).sin().sum(), args)
    text = torch_hlo.debug.optimized_text(got)
    assert [
        kind
        for kind in ("forward", "backward")
        if f'"attention":"{kind}"' in text.replace("\\", "")
    ] == ["forward", "backward"]
    want = torch.autograd.grad((torch.softmax(q @ k.mT / 4, -1) @ v).sin().sum(), (q, k, v))
    torch.testing.assert_close([x.cpu() for x in got], list(want), rtol=1e-4, atol=1e-5)


def test_sizes_that_vary() -> None:
    dynamo.reset()
    m = nn.Linear(16, 48)

    def fn(x):
        q, k, v = m(x).chunk(3, -1)
        return torch.softmax(q @ k.mT / 4, -1) @ v

    fast = torch.compile(fn, backend="hlo", dynamic=True)
    for b, s in ((2, 40), (3, 64), (2, 33)):
        x = torch.randn(b, s, 16, requires_grad=True)
        torch.testing.assert_close(
            torch.autograd.grad(fast(x).square().sum(), x),
            torch.autograd.grad(fn(x).square().sum(), x),
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [3, S])
def test_soft_caps(programs, rows, dtype) -> None:
    """Scores capped by tanh, as in Gemma 2: one kernel in inference; queries along lanes, on tiles,
    few."""
    q, k, v, _ = (a.detach() for a in arrays(dtype))
    q = q[:, :, :rows] * 4

    def fn(q, k, v):
        s = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        s = torch.tanh(s / 3) * 3
        return torch.softmax(s.masked_fill(LATER[:rows], -math.inf).float(), -1).type_as(q) @ v

    got, want = (
        torch.compile(fn, backend="hlo")(q, k, v),
        fn(q.float(), k.float(), v.float()),
    )
    torch.testing.assert_close(
        got.float(),
        want,
        rtol=1e-5 if dtype is torch.float32 else 3e-2,
        atol=1e-5 if dtype is torch.float32 else 3e-2,
    )
    assert [attention_of(x).capped for p in programs for x in p if attention_of(x)] == [True]
