"""autocast("hlo") and GradScaler."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_hlo import metrics

pytestmark = pytest.mark.usefixtures("recorded")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    x = torch.randn(4, 4).to("hlo")
    m = nn.Linear(4, 4).to("hlo")
    conv = nn.Conv2d(1, 2, 3).to("hlo")
    with torch.autocast("hlo", dtype=dtype):
        y = m(x)
        assert (
            y.dtype == dtype
            and (x @ x).dtype == dtype
            and torch.bmm(x[None], x[None]).dtype == dtype
        )
        assert conv(x.view(1, 1, 4, 4)).dtype == dtype
        assert (
            y.softmax(-1).dtype == torch.float32
            and y.sum().dtype == torch.float32
            and F.layer_norm(y, (4,)).dtype == torch.float32
        )
        assert (
            F.cross_entropy(y, torch.zeros(4, dtype=torch.long).to("hlo")).dtype == torch.float32
            and y.exp().dtype == torch.float32
        )
        assert (y + x).dtype == torch.float32 and (y + y).dtype == dtype and y.relu().dtype == dtype
        assert (
            torch.addcmul(y, y, x.to(dtype)).dtype == dtype
            and torch.atan2(y, x).dtype == torch.float32
        )
        assert torch.cat([y, x]).dtype == torch.float32
        assert x.double().matmul(x.double()).dtype == torch.float64
        q = torch.randn(1, 2, 3, 4).to("hlo")
        assert F.scaled_dot_product_attention(q, q, q).dtype == dtype
        with torch.autocast("hlo", enabled=False):
            assert m(x).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(torch.sigmoid(y.float()), x.sigmoid())
    assert m(x).dtype == torch.float32 and not torch.is_autocast_enabled("hlo")
    y.float().sum().backward()
    assert m.weight.grad.dtype == torch.float32


def test_training_follows_the_cpu():
    losses = []
    for device in ("cpu", "hlo"):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)).to(
            device
        )
        o = torch.optim.AdamW(m.parameters(), lr=0.01)
        x, t = torch.randn(8, 4).to(device), (torch.arange(8) % 3).to(device)
        for _ in range(3):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = F.cross_entropy(m(x), t)
            loss.backward()
            o.step()
            o.zero_grad()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=3e-2)


def test_cross_entropy_is_computed_in_float32():
    x, classes = torch.linspace(-3, 3, 20).view(4, 5).bfloat16(), torch.tensor([0, 1, 2, 4])

    def loss(device):
        given = x.to(device).requires_grad_()
        with torch.autocast(device, dtype=torch.bfloat16):
            value = F.cross_entropy(given, classes.to(device), label_smoothing=0.1)
        value.backward()
        return value.item(), given.grad.cpu()

    torch.testing.assert_close(loss("hlo"), loss("cpu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled = torch.compile(lambda x: F.cross_entropy(x, classes), backend="hlo")
        torch.testing.assert_close(compiled(x), F.cross_entropy(x, classes))


def test_grad_scaler():
    metrics.clear_counters()
    for fused in (False, True):
        m = nn.Linear(4, 1).to("hlo")
        o = torch.optim.AdamW(m.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("hlo", init_scale=4.0, growth_interval=1)
        x = torch.ones(2, 4).to("hlo")
        before = m.weight.detach().cpu().clone()
        scaler.scale(m(x).sum()).backward()
        scaler.unscale_(o)
        assert m.weight.grad.cpu().allclose(torch.full((1, 4), 2.0))
        scaler.step(o)
        scaler.update()
        after = m.weight.detach().cpu().clone()
        assert scaler.get_scale() == 8.0 and not after.equal(before)
        o.zero_grad()
        scaler.scale(m(x * float("inf")).sum()).backward()
        scaler.step(o)
        scaler.update()
        assert scaler.get_scale() == 4.0 and m.weight.detach().cpu().equal(after)
    assert not metrics.executed_fallback_ops()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_unscale_as_on_the_cpu(dtype):
    for bad in (None, float("inf"), float("nan")):
        for inverse in (0.25, 1.0):
            for before in (0.0, 1.0):
                results = []
                for device in ("cpu", "hlo"):
                    grads = [
                        torch.arange(4.0).to(dtype).to(device),
                        torch.full((2, 3), 8.0, dtype=dtype).to(device),
                        torch.ones(0, dtype=dtype).to(device),
                    ]
                    if bad is not None:
                        grads[1][0, 1] = bad
                    found, scale = (
                        torch.full((1,), before).to(device),
                        torch.full((1,), inverse).to(device),
                    )
                    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)
                    results.append([t.cpu() for t in (*grads, found)])
                for cpu, ours in zip(*results):
                    assert ours.dtype == cpu.dtype and torch.equal(
                        ours.nan_to_num(-7, posinf=-8), cpu.nan_to_num(-7, posinf=-8)
                    )


def test_update_scale_as_on_the_cpu():
    for found in (0.0, 1.0):
        for tracked in (0, 1):
            for scale in (65536.0, 3e38):
                results = []
                for device in ("cpu", "hlo"):
                    given = (
                        torch.full((), scale).to(device),
                        torch.full((), tracked, dtype=torch.int32).to(device),
                    )
                    torch._amp_update_scale_(*given, torch.full((), found).to(device), 2.0, 0.3, 2)
                    results.append([t.cpu() for t in given])
                assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*results)), (
                    found,
                    tracked,
                    scale,
                )
