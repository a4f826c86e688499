"""MX element types: every value, conversions as ml_dtypes has them, and powers of two as PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import torch_hlo  # noqa: F401
from test.compiler.compiled import run
from torch_hlo import config
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.text.parser import parse_module
from torch_hlo.hlo.text.printer import module_text

ml_dtypes = pytest.importorskip("ml_dtypes")
TYPES = {"f4e2m1fn": ml_dtypes.float4_e2m1fn, "f8e8m0fnu": ml_dtypes.float8_e8m0fnu}
SPECIAL = [0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 2.0**-127, 0.75 * 2.0**-126, 3.4e38]


def program(dtype, n):
    text = f"""HloModule m
ENTRY e {{ x = f32[{n}] parameter(0)  y = {dtype}[{n}] convert(x)
  z = f32[{n}] convert(y)  ROOT t = ({dtype}[{n}], f32[{n}]) tuple(y, z) }}"""
    m = parse_module(text)
    assert parse_module(module_text(m)).entry.root is m.entry.root
    return m


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_conversions(dtype, optimize):
    draw = np.random.default_rng(0)
    scales = 2.0 ** draw.integers(-140 if "m0" in dtype else -4, 128 if "m0" in dtype else 5, 400)
    values = np.array([*SPECIAL, *np.arange(-8, 8, 0.125), *(draw.standard_normal(400) * scales)])
    with np.errstate(all="ignore"):
        x = values.astype(np.float32)
        want = x.astype(TYPES[dtype]).astype(np.float32)
    m = program(dtype, x.size)
    for found in (*evaluate(m, [x]), *run(m, [x], optimize=optimize)):
        np.testing.assert_array_equal(found, want)
        numbers = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(want)[numbers])


def test_powers_of_two_in_pytorch():
    e8m0 = torch.float8_e8m0fnu
    x = torch.cat(
        [torch.tensor(SPECIAL), torch.randn(200) * 2.0 ** torch.randint(-120, 120, (200,))]
    )
    codes = torch.arange(256).to(torch.uint8).view(e8m0)
    with config.override(FALLBACK="error"):
        ours = x.to("hlo").to(e8m0)
        assert torch.equal(ours.cpu().view(torch.uint8), x.to(e8m0).view(torch.uint8))
        back = codes.to("hlo")
        torch.testing.assert_close(
            back.float().cpu(), codes.float(), equal_nan=True, rtol=0, atol=0
        )
        assert torch.equal(back.view(torch.uint8).cpu(), codes.view(torch.uint8))
        for make in (torch.zeros, torch.ones):
            want, made = (make(3, dtype=e8m0, device=d).cpu() for d in ("cpu", "hlo"))
            assert torch.equal(made.view(torch.uint8), want.view(torch.uint8))
