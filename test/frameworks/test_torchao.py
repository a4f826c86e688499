"""torchao's quantize_ on the device, before and after the model moves there."""

from __future__ import annotations

import copy

import pytest
import torch

import torch_hlo  # noqa: F401
from torch_hlo import config

quantization = pytest.importorskip("torchao.quantization")

CONFIGS = {
    "Int8WeightOnlyConfig": {},
    "Int8DynamicActivationInt8WeightConfig": {},
    "Float8WeightOnlyConfig": {},
    "IntxWeightOnlyConfig": {"weight_dtype": torch.int4},
}


@pytest.mark.parametrize("way", ["moved", "on the device", "compiled"])
@pytest.mark.parametrize("name", CONFIGS)
def test_quantize(name, way):
    torch.manual_seed(0)
    linear = torch.nn.Linear
    model = torch.nn.Sequential(linear(128, 256), torch.nn.GELU(), linear(256, 128)).bfloat16()
    method = getattr(quantization, name)(**CONFIGS[name])
    x, ours = torch.randn(4, 128).bfloat16(), copy.deepcopy(model)
    quantization.quantize_(model, method)
    with torch.no_grad(), config.override(FALLBACK="error"):
        want = model(x)
        if way != "moved":
            ours.to("hlo")
        quantization.quantize_(ours, method)
        ours.to("hlo")
        run = torch.compile(ours, backend="hlo") if way == "compiled" else ours
        torch.testing.assert_close(run(x.to("hlo")).cpu(), want, rtol=2e-2, atol=2e-2)


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8)
        self.first, self.last = torch.nn.Linear(128, 10), torch.nn.Linear(10, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.convolution(x)))
        x = torch.nn.functional.max_pool2d(x, 2).flatten(1)
        return self.last(torch.relu(self.first(x)))


def images():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, 8, 8, generator=generator) for _ in range(4)]


def prepared(device, train=False, dynamic=False):
    """An exported model with observers, or with fake quantization, on the device."""
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e, prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    torch.manual_seed(1)
    quantizer = x86.X86InductorQuantizer()
    config = x86.get_default_x86_inductor_quantization_config(is_qat=train, is_dynamic=dynamic)
    quantizer.set_global(config)
    exported = torch.export.export(Small().train(train), (images()[0],)).module()
    return (prepare_qat_pt2e if train else prepare_pt2e)(exported, quantizer).to(device)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("way", ["moved", "observed on the device", "compiled"])
def test_pt2e(way, dynamic):
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    def converted(device):
        model = prepared(device, dynamic=dynamic)
        for x in images():
            model(x.to(device))
        return convert_pt2e(model)

    x = images()[0]
    with torch.no_grad(), config.override(FALLBACK="error"):
        want = converted("cpu")(x)
        ours = converted("hlo" if way == "observed on the device" else "cpu").to("hlo")
        run = torch.compile(ours, backend="hlo") if way == "compiled" else ours
        torch.testing.assert_close(run(x.to("hlo")).cpu(), want, rtol=1e-4, atol=1e-4)


def test_pt2e_training():
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    def run(device):
        model, losses = prepared(device, train=True), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for x in images():
            loss = model(x.to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model = convert_pt2e(model)
        move_exported_model_to_eval(model)
        with torch.no_grad():
            return losses, model(images()[0].to(device)).cpu()

    with config.override(FALLBACK="error"):
        torch.testing.assert_close(run("hlo"), run("cpu"), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_optimizers_with_narrow_states(name):
    optim = pytest.importorskip("torchao.optim")
    losses = []
    for device in ("cpu", "hlo"):
        torch.manual_seed(0)
        layer = torch.nn.Linear(64, 128).to(device)
        steps = getattr(optim, name)(layer.parameters(), lr=1e-2)
        x = torch.linspace(-1, 1, 512).view(8, 64).to(device)
        losses.append([])
        for _ in range(3):
            loss = layer(x).square().mean()
            loss.backward()
            steps.step()
            steps.zero_grad()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
