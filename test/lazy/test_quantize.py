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


LEARNED = {
    "one": ("tensor", [0.1], [1.4], ()),
    "halves": ("tensor", [0.1], [2.5], ()),
    "channels": ("channel", [0.05, 0.1, 0.2, 0.3, 0.4, 0.5], [0, 0.5, 1.5, -2, 9, -20.0], (0,)),
}


@pytest.mark.parametrize("name", LEARNED)
def test_learned_grids(name, monkeypatch):
    monkeypatch.setenv("TORCH_HLO_FALLBACK", "error")
    kind, scale, zero, dim = LEARNED[name]
    op = getattr(torch, f"_fake_quantize_learnable_per_{kind}_affine")
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    results = []
    for device in ("cpu", "hlo"):
        leaves = [
            v.clone().to(device).requires_grad_()
            for v in (x, torch.tensor(scale), torch.tensor(zero))
        ]
        y = op(*leaves, *dim, -8, 7, 0.5)
        (y * torch.linspace(1, 2, 50).to(device)).sum().backward()
        results.append([y.detach().cpu(), *(v.grad.cpu() for v in leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("limits", [(0, 255), (-128, 127)])
def test_grids_that_follow_the_values(symmetric, per_row, limits, monkeypatch):
    monkeypatch.setenv("TORCH_HLO_FALLBACK", "error")
    x = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0))
    x[1] = 0
    x[2] *= 1e-5
    x[3] = x[3].abs()
    n = 6 if per_row else 1

    def run(device):
        on, off = torch.tensor([1]).to(device), torch.tensor([0]).to(device)
        lowest = torch.full((n,), float("inf")).to(device)
        state = lowest, -lowest, torch.ones(n).to(device), torch.zeros(n).int().to(device)
        leaf, found = x.clone().to(device).requires_grad_(), []
        for factor, observe, fake in ((1, on, on), (3, on, on), (9, off, on), (5, on, off)):
            y = torch.fused_moving_avg_obs_fake_quant(
                leaf * factor, observe, fake, *state, 0.1, *limits, 0, per_row, symmetric
            )
            y.square().sum().backward()
            found += [y.detach().cpu(), *(s.clone().cpu() for s in state)]
        return [*found, leaf.grad.cpu()]

    torch.testing.assert_close(run("hlo"), run("cpu"), rtol=1e-4, atol=1e-4)


def test_training_with_fake_quantization(monkeypatch):
    """The modules of torch.ao: losses of a few steps as on the CPU, and nothing falls back."""
    monkeypatch.setenv("TORCH_HLO_FALLBACK", "error")
    from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver

    def run(device):
        torch.manual_seed(0)
        linear = torch.nn.Linear(8, 4).to(device)
        seen = FusedMovingAvgObsFakeQuantize(
            observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255
        ).to(device)
        x, target = torch.randn(16, 8).to(device), torch.randn(16, 4).to(device)
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            loss = torch.nn.functional.mse_loss(seen(linear(x)), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
        return losses

    torch.testing.assert_close(run("hlo"), run("cpu"), rtol=1e-4, atol=1e-4)


def test_observers(monkeypatch):
    monkeypatch.setenv("TORCH_HLO_FALLBACK", "error")
    from torch.ao import quantization as q

    kinds = {
        q.MinMaxObserver: {},
        q.MovingAverageMinMaxObserver: {"averaging_constant": 0.1},
        q.PerChannelMinMaxObserver: {"ch_axis": 1},
        q.MovingAveragePerChannelMinMaxObserver: {"ch_axis": 1},
    }
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for kind, options in kinds.items():
        found = []
        for device in ("cpu", "hlo"):
            observer = kind(**options).to(device)
            observer(x.to(device))
            observer((x * 2).to(device))
            found.append([v.cpu() for v in observer.calculate_qparams()])
        torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("symmetric", [False, True])
def test_fresh_observers_of_rows(symmetric, monkeypatch):
    """Their first call gives the arrays a size."""
    monkeypatch.setenv("TORCH_HLO_FALLBACK", "error")
    from torch.ao import quantization as q

    scheme = torch.per_channel_symmetric if symmetric else torch.per_channel_affine
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))

    def run(device):
        seen = q.FusedMovingAvgObsFakeQuantize(
            observer=q.MovingAveragePerChannelMinMaxObserver,
            quant_min=-128,
            quant_max=127,
            qscheme=scheme,
            dtype=torch.qint8,
        ).to(device)
        values = [seen((x * i).to(device)).cpu() for i in (1, 3, 2)]
        ends = seen.activation_post_process
        return *values, *(
            v.cpu() for v in (seen.scale, seen.zero_point, ends.min_val, ends.max_val)
        )

    torch.testing.assert_close(run("hlo"), run("cpu"))
