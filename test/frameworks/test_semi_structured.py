"""2:4 sparse weights: stored compressed, computed as dense ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.sparse import to_sparse_semi_structured

import torch_hlo

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemi")
assert torch_hlo


def pruned(rows, columns, dtype):
    """With two, one, and no values of four."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    fours = weight.view(rows, -1, 4)
    fours.scatter_(2, fours.abs().topk(2, 2, largest=False).indices, 0)
    fours[0], fours[1, :, 0] = 0, 0
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products(dtype):
    weight = pruned(6, 20, dtype)
    x = torch.randn(3, 5, 20).to(dtype)
    compressed = to_sparse_semi_structured(weight.to("hlo"))
    assert compressed.packed.shape == (6, 10) and compressed.meta.shape == (6, 5)
    assert compressed.meta.dtype is torch.uint8
    assert compressed.to_dense().cpu().equal(weight)
    assert compressed.t().to_dense().cpu().equal(weight.t())
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype is not torch.float32 else {}
    for bias in (None, torch.arange(6).to(dtype)):
        layer = nn.Linear(20, 6, bias=bias is not None, dtype=dtype)
        layer.weight.data = weight
        if bias is not None:
            layer.bias.data = bias
        here = copy.deepcopy(layer).to("hlo")
        here.weight = nn.Parameter(compressed, requires_grad=False)
        given = x.to("hlo").requires_grad_()
        found = here(given)
        torch.testing.assert_close(found.cpu(), layer(x), **close)
    with torch.no_grad():
        found = torch.mm(compressed, x[0].t().to("hlo"))
    torch.testing.assert_close(found.cpu(), weight @ x[0].t(), **close)


def test_refusals():
    with pytest.raises(RuntimeError, match="not 2:4 sparse"):
        to_sparse_semi_structured(torch.ones(4, 8, device="hlo"))
    with pytest.raises(RuntimeError, match=r"not of \[4, 6\]"):
        to_sparse_semi_structured(torch.zeros(4, 6, device="hlo"))
