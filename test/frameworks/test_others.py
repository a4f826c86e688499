"""Keras, torchmetrics, timm, diffusers: models and metrics from PyPI, with random weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import torch_hlo

KERAS = """
import torch_hlo, keras, numpy as np
histories = []
for jit in (False, True):
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.Adam(0.05), loss, jit_compile=jit)
    x = np.random.RandomState(0).randn(32, 8).astype("float32")
    fitted = net.fit(x, x[:, 0] > 0, batch_size=8, epochs=3, verbose=0, shuffle=False)
    assert net.weights[0].value.device.type == "hlo"
    histories.append(fitted.history["loss"])
np.testing.assert_allclose(*histories, rtol=1e-4)
assert histories[0][-1] < histories[0][0]
"""


@pytest.mark.slow
def test_keras():
    pytest.importorskip("keras")
    environment = os.environ | {"KERAS_BACKEND": "torch"}
    subprocess.run([sys.executable, "-c", KERAS], check=True, env=environment)


def train(net: torch.nn.Module, loss: Callable, device: str) -> list[float]:
    optimizer = torch.optim.SGD(net.to(device).parameters(), lr=0.01)
    seen = []
    for _ in range(3):
        value = loss(net)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_hlo.mark_step()
        seen.append(value.detach())
    return [float(x) for x in seen]


def same(make: Callable[[], torch.nn.Module], loss: Callable[[torch.nn.Module, str], object]):
    got = {}
    for device in ("cpu", "hlo"):
        torch.manual_seed(0)
        got[device] = train(make(), lambda net: loss(net, device), device)
    assert got["hlo"] == pytest.approx(got["cpu"], rel=1e-3)


def test_torchmetrics():
    metrics = pytest.importorskip("torchmetrics")
    torch.manual_seed(0)
    scores, labels = torch.rand(32, 4).softmax(-1), torch.arange(32) % 4
    for kind in (metrics.Accuracy, metrics.F1Score, metrics.AUROC, metrics.ConfusionMatrix):
        results = []
        for device in ("cpu", "hlo"):
            metric = kind("multiclass", num_classes=4).to(device)
            for part in range(2):
                metric.update(scores[part::2].to(device), labels[part::2].to(device))
            results.append(metric.compute().cpu())
        torch.testing.assert_close(*results)


@pytest.mark.slow
def test_timm():
    timm = pytest.importorskip("timm")
    x, y = torch.randn(2, 3, 32, 32), torch.tensor([1, 3])
    same(
        lambda: timm.create_model("vit_tiny_patch16_224", num_classes=4, img_size=32, depth=2),
        lambda net, d: torch.nn.functional.cross_entropy(net(x.to(d)), y.to(d)),
    )


@pytest.mark.slow
def test_diffusion():
    diffusers = pytest.importorskip("diffusers")
    x, noise, times = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8), torch.tensor([3, 40])
    blocks = dict(down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",))
    sizes = dict(sample_size=8, layers_per_block=1, block_out_channels=(16,), norm_num_groups=4)
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=100)

    def loss(net: torch.nn.Module, device: str) -> torch.Tensor:
        a, b, c = (t.to(device) for t in (x, noise, times))
        return torch.nn.functional.mse_loss(net(scheduler.add_noise(a, b, c), c).sample, b)

    same(lambda: diffusers.UNet2DModel(**sizes, **blocks), loss)


def test_loader_with_workers_and_pinned_memory():
    data = torch.utils.data.TensorDataset(torch.arange(16.0))
    loader = torch.utils.data.DataLoader(data, 4, num_workers=2, pin_memory=True)
    total = sum(float(batch[0].to("hlo", non_blocking=True).sum()) for batch in loader)
    assert total == 120
