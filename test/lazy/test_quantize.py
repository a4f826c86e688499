"""Fake quantization: values, masks (as gradients) and no fallback."""

from __future__ import annotations

import pytest
import torch

import torch_hlo  # noqa: F401

CASES = {
    "numbers": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -128, 127),
    "tensors": lambda x: torch.fake_quantize_per_tensor_affine(
        x,
        torch.tensor(0.1, device=x.device),
        torch.tensor(3, dtype=torch.int32, device=x.device),
        0,
        255,
    ),
    "channels": lambda x: torch.fake_quantize_per_channel_affine(
        x,
        torch.linspace(0.05, 0.2, 6, device=x.device),
        torch.arange(6, dtype=torch.int32, device=x.device),
        0,
        -8,
        127,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_fake_quantize(name, monkeypatch):
    monkeypatch.setenv("TORCH_HLO_FALLBACK", "error")
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * 10
    leaves = [x.clone().requires_grad_(), x.to("hlo").requires_grad_()]
    results = [CASES[name](v) for v in leaves]
    for y in results:
        y.square().sum().backward()
    torch.testing.assert_close(results[1].cpu(), results[0])
    torch.testing.assert_close(leaves[1].grad.cpu(), leaves[0].grad)
