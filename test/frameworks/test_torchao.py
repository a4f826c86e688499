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
