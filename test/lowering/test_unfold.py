"""Patches as columns and back: every geometry that differs, against PyTorch's kernels, forward and
gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch_hlo  # noqa: F401

GEOMETRIES = (  # kernel, dilation, padding, stride
    ((3, 3), (1, 1), (1, 1), (1, 1)),
    ((2, 3), (2, 1), (0, 2), (2, 1)),
    ((4, 4), (1, 1), (0, 0), (4, 4)),  # neighbours: nothing is added
    ((3, 2), (1, 2), (2, 1), (3, 2)),
    ((1, 1), (1, 1), (0, 0), (1, 1)),
)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("dims", [(2, 3, 9, 11), (3, 8, 8)])
def test_unfold_and_fold(geometry, dims) -> None:
    torch.manual_seed(0)
    x = torch.randn(*dims, requires_grad=True)
    y = F.unfold(x, *geometry)
    g = torch.randn_like(y)
    device = x.detach().to("hlo").requires_grad_()
    found = F.unfold(device, *geometry)
    assert torch.equal(found.detach().cpu(), y)
    for got, want in zip(
        torch.autograd.grad(found, device, g.to("hlo")),
        torch.autograd.grad(y, x, g),
        strict=True,
    ):
        torch.testing.assert_close(got.cpu(), want)
    torch.testing.assert_close(
        F.fold(g.to("hlo"), dims[-2:], *geometry).cpu(), F.fold(g, dims[-2:], *geometry)
    )
