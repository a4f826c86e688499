"""Attention as programs write it: equal to the CPU's, forward and backward, and without an array of
scores."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import torch_hlo
from torch_hlo.compiler import pipeline
from torch_hlo.compiler.attention.attention import attention_of

B, H, S, D = 2, 3, 72, 16
FORMS = {}


def form(f):
    FORMS[f.__name__] = f
    return f


@form
def plain(q, k, v, causal, keys, bias):
    return F.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), -1) @ v


@form
def filled(q, k, v, causal, keys, bias):
    return (
        F.softmax(
            (q @ k.transpose(-2, -1) / math.sqrt(D)).masked_fill(~causal, float("-inf")),
            -1,
        )
        @ v
    )


@form
def biased_and_filled(q, k, v, causal, keys, bias):
    return F.softmax((q @ k.mT * 0.25 + bias).masked_fill(~keys, -1e9), -1) @ v


@form
def einsum(q, k, v, causal, keys, bias):
    s = torch.where(causal, torch.einsum("bhid,bhjd->bhij", q, k) * D**-0.5, -1e9)
    return torch.einsum("bhij,bhjd->bhid", s.softmax(-1), v)


@form
def wide_softmax(q, k, v, causal, keys, bias):
    s = torch.matmul(q, k.transpose(2, 3)) * D**-0.5 + torch.where(
        causal, 0.0, torch.finfo(q.dtype).min
    )[None, None].to(q.dtype)
    return torch.matmul(F.softmax(s, -1, dtype=torch.float32).to(q.dtype), v).transpose(1, 2)


@form
def learned_bias(q, k, v, causal, keys, bias):
    return F.softmax(q @ k.mT * 0.25 + bias, -1) @ v


@form
def bias_of_two_layers(q, k, v, causal, keys, bias):
    s = bias[None] + torch.where(keys, 0.0, torch.finfo(q.dtype).min)
    for _ in range(2):
        q = F.softmax(q @ k.mT * 0.25 + s, -1) @ v
    return q


@form
def windows(q, k, v, causal, keys, bias):
    """As Swin does: a bias for heads, then a mask for windows."""
    s = q * 0.25 @ k.mT + bias[None]
    s = s.view(1, B, H, S, S) + torch.where(causal, 0.0, -100.0).expand(B, S, S)[None, :, None]
    return F.softmax(s.view(B, H, S, S), -1) @ v


@form
def capped(q, k, v, causal, keys, bias):
    """As Gemma 2 does: scores between -2 and 2, then the mask."""
    s = torch.tanh(q @ k.mT * D**-0.5 / 2) * 2 + torch.where(
        causal, 0.0, torch.finfo(q.dtype).min
    ).to(q.dtype)
    return F.softmax(s, -1, dtype=torch.float32).to(q.dtype) @ v


def run(f, device: str, dtype=torch.float32, seed=None):
    g = torch.Generator().manual_seed(0)
    q, k, v = leaves = [
        torch.randn(B, H, S, D, generator=g).to(dtype).to(device).requires_grad_() for _ in range(3)
    ]
    bias = torch.randn(H, S, S, generator=g).to(dtype).to(device).requires_grad_()
    causal, keys = (
        torch.ones(S, S, dtype=torch.bool).tril(),
        torch.rand(B, 1, 1, S, generator=g) > 0.3,
    )
    if seed is not None:
        torch.manual_seed(seed)
    y = f(q, k, v, causal.to(device), keys.to(device), bias)
    (y * torch.randn(y.shape, generator=g).to(device)).sum().backward()
    return [x.cpu() for x in (y.detach(), *(t.grad for t in (*leaves, bias) if t.grad is not None))]


@pytest.fixture
def fusions(monkeypatch):
    """Kinds of the attentions of what is compiled, and the largest array of its steps."""
    found = []

    def optimize(module, dump, passes):
        module = original(module, dump, passes)
        if not any(p.name == "fusion" for p in passes):  # the rewrites before
            return module
        found.extend(
            attention_of(x).kind
            for x in module.entry.instructions()
            if x.op == "fusion" and x.get("kind") == "custom" and attention_of(x)
        )
        return module

    original = pipeline.optimize
    monkeypatch.setattr(pipeline, "optimize", optimize)
    monkeypatch.setenv("TORCH_HLO_CACHE", "")
    return found


@pytest.mark.parametrize("name", FORMS)
def test_written_out(name, fusions) -> None:
    found = run(FORMS[name], "hlo")
    layers = 1 + (name == "bias_of_two_layers")
    assert fusions == ["forward"] * layers + ["backward"] * layers
    for x, y in zip(found, run(FORMS[name], "cpu"), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "wide_softmax", "learned_bias", "capped"])
def test_bfloat16(name, fusions) -> None:
    found = run(FORMS[name], "hlo", torch.bfloat16)
    assert fusions == ["forward", "backward"]
    for x, y in zip(found, run(FORMS[name], "cpu"), strict=True):
        torch.testing.assert_close(x.float(), y, rtol=2e-2, atol=4e-2)


@pytest.mark.parametrize("name", ["dropout", "sdpa", "dropout_of_bfloat16"])
def test_dropout_is_what_the_program_draws(name, fusions, monkeypatch) -> None:
    def f(q, k, v, causal, keys, bias):
        if name == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
        return F.dropout(F.softmax(q @ k.mT * 0.25, -1), 0.3) @ v

    dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
    found = run(f, "hlo", dtype, seed=3)
    assert fusions == ["forward", "backward"]
    monkeypatch.setenv("TORCH_HLO_DISABLE", "attention,attention_match")
    for x, y in zip(found, run(f, "hlo", dtype, seed=3), strict=True):
        torch.testing.assert_close(
            x,
            y,
            rtol=1e-4 if dtype == torch.float32 else 5e-2,
            atol=1e-5 if dtype == torch.float32 else 5e-2,
        )


@pytest.mark.parametrize("weights", [False, True])
def test_module(weights, fusions) -> None:
    """nn.MultiheadAttention turns its arrays; averaged weights that nobody reads cost nothing."""
    results = []
    for device in ("hlo", "cpu"):
        torch.manual_seed(0)
        m = torch.nn.MultiheadAttention(H * D, H, batch_first=True).to(device)
        x = torch.randn(B, S, H * D).to(device)
        m(x, x, x, need_weights=weights)[0].square().sum().backward()
        results.append([p.grad.cpu() for p in m.parameters()])
    assert fusions == ["forward", "backward"]
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


def test_a_learned_bias_of_capped_scores(fusions) -> None:
    """No kernel: its gradient is that of scores before the cap's."""

    def f(q, k, v, causal, keys, bias):
        return F.softmax(torch.tanh(q @ k.mT / 8) * 2 + bias, -1) @ v

    for x, y in zip(run(f, "hlo"), run(f, "cpu"), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert not fusions


def test_weights_that_are_returned_are_kept(fusions) -> None:
    q = torch.randn(B, H, S, D).to("hlo").requires_grad_()
    w = F.softmax(q @ q.mT, -1)
    (w @ q).sum().backward()
    torch_hlo.sync()
    assert fusions == [] and w.sum().item() == pytest.approx(B * H * S, rel=1e-4)


@pytest.mark.parametrize("mask", ["causal", "window", "padding", "blocks"])
def test_hidden_blocks(mask, fusions) -> None:
    """Keys that a block of queries does not see are skipped where that changes nothing; rows that
    see nothing are as on the CPU."""
    n = {"causal": 700, "window": 701, "padding": 702, "blocks": 703}[mask]
    i = torch.arange(n)
    seen = {
        "causal": i[:, None] >= i,
        "window": (i[:, None] - i).abs() < 40,
        "padding": (i < 130).expand(n, n),
        "blocks": i[:, None] // 64 % 3 == i // 64 % 3,
    }[mask]

    def step(device: str, number: float, seen: torch.Tensor):
        g = torch.Generator().manual_seed(0)
        q, k, v = leaves = [
            torch.randn(1, 2, n, 8, generator=g).to(device).requires_grad_() for _ in range(3)
        ]
        s = q @ k.mT * 0.5
        s = (
            s.masked_fill(~seen.to(device), number)
            if mask != "blocks"
            else s + torch.where(seen, 0.0, number).to(device)
        )
        y = F.softmax(s, -1) @ v
        del s
        (y * torch.randn(y.shape, generator=g).to(device)).sum().backward()
        return [x.cpu() for x in (y.detach(), *(t.grad for t in leaves))]

    for number in (-math.inf, -1e9, -2.0):
        rows = seen if number == -math.inf else seen & (i[:, None] != 333)
        for x, y in zip(step("hlo", number, rows), step("cpu", number, rows), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
    # or one of the programs before, with symbolic sizes
    assert fusions in (["forward", "backward"], [])


def test_symbolic_lengths(fusions) -> None:
    """Programs of another length each: the second one is for all lengths."""
    for n in (90, 91, 130):

        def step(device: str, n=n):
            g = torch.Generator().manual_seed(0)
            q, k, v = leaves = [
                torch.randn(1, 2, n, 24, generator=g).to(device).requires_grad_() for _ in range(3)
            ]
            causal = torch.ones(n, n, dtype=torch.bool).tril().to(device)
            y = F.softmax((q @ k.mT * 0.2).masked_fill(~causal, -1e9), -1) @ v
            # a step of its own: no other test has made a program for its sizes
            (y.tanh() * torch.randn(y.shape, generator=g).to(device)).sum().backward()
            return [x.cpu() for x in (y.detach(), *(t.grad for t in leaves))]

        for x, y in zip(step("hlo"), step("cpu"), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
    assert fusions[:2] == ["forward", "backward"] and len(fusions) % 2 == 0


def _with_slope(score, batch, head, i, j):
    return score + 0.01 * (i - j)


@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention(compiled):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    near = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 4), 1, 1, 16, 16, "hlo", 16)
    function = torch.compile(flex_attention, backend="hlo") if compiled else flex_attention
    given = [torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3)]
    here = [t.detach().to("hlo").requires_grad_() for t in given]
    out = function(*here, score_mod=_with_slope, block_mask=near)
    out.square().sum().backward()
    distance = torch.arange(16)[:, None] - torch.arange(16)
    slope = torch.where((distance >= 0) & (distance < 4), 0.01 * distance, -torch.inf)
    want = torch.nn.functional.scaled_dot_product_attention(*given, slope)
    want.square().sum().backward()
    torch.testing.assert_close(out.cpu(), want)
    for a, b in zip(here, given):
        torch.testing.assert_close(a.grad.cpu(), b.grad)
