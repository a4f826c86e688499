"""nn.Lazy* modules on the device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

pytestmark = pytest.mark.usefixtures("recorded")
X = torch.randn(3, 4)


@pytest.mark.parametrize("how", ["to", "device", "context"])
def test_materialize(how):
    def build(device=None):
        return nn.Sequential(
            nn.LazyLinear(5, device=device),
            nn.ReLU(),
            nn.LazyBatchNorm1d(device=device),
        )

    if how == "context":
        with torch.device("hlo"):
            m = build()
    else:
        m = build("hlo" if how == "device" else None)
    if how == "to":
        m.to("hlo")
    assert (
        all(p.device.type == "hlo" for p in m.parameters())
        and m[2].running_mean.device.type == "hlo"
    )
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    before = list(m.parameters())
    m(X.to("hlo")).square().sum().backward()
    assert type(m[0]) is nn.Linear and all(a is b for a, b in zip(before, m.parameters()))
    reference = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.BatchNorm1d(5))
    assert all(
        isinstance(p, nn.Parameter) and p.is_leaf and p.grad is not None for p in m.parameters()
    )
    assert [n for n, _ in m.named_parameters()] == [n for n, _ in reference.named_parameters()]
    weight = m[0].weight.detach().cpu()
    optimizer.step()
    assert not torch.equal(weight, m[0].weight.cpu())
    reference.load_state_dict({k: v.cpu() for k, v in m.state_dict().items()})
    torch.testing.assert_close(m(X.to("hlo")).cpu(), reference(X))


def test_before_materializing():
    m = nn.LazyLinear(2, device="hlo", dtype=torch.float64)
    assert (
        m.weight.dtype == torch.float64
        and "LazyLinear" in repr(m)
        and isinstance(m.weight, UninitializedParameter)
    )
    m.float()
    assert m.weight.dtype == torch.float32 and m.weight.device.type == "hlo"
    with pytest.raises(RuntimeError, match="uninitialized parameter"):
        _ = m.weight.shape
    back = copy.deepcopy(m).to("cpu")
    assert back(X).device.type == "cpu" and type(back.weight) is nn.Parameter
    m.load_state_dict(back.state_dict())
    torch.testing.assert_close(m(X.to("hlo")).cpu(), back(X))
