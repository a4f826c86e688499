"""group_products: rows times four-bit numbers with scales per group, in one kernel."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from test.compiler.compiled import module, parameter, run
from torch_hlo.compiler.matmul.dot_narrow import GROUPS, group_products
from torch_hlo.compiler.pipeline import optimize
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir.dim import symbol
from torch_hlo.hlo.ir.numeric import round_to
from torch_hlo.lowering.core.control import named_call
from torch_hlo.lowering.linalg.quantized import _of_groups


def product(m, dtype="bf16", blocks=2, k=96, half=16, group=32, config=GROUPS, symbols=()):
    groups, n = k // group, 2 * half * blocks
    given = [
        parameter(0, "f32", m, k),
        parameter(1, "f32", m, groups),
        parameter(2, "u8", blocks, k, half),
        parameter(3, dtype, groups, n, 2),
    ]
    (y,) = named_call("groups", config, given, partial(_of_groups, True))
    return module(given, y, symbols=symbols)


def inputs(m, rows, seed=0):
    draw = np.random.default_rng(seed)
    _, sums, w, scales = (tuple(p.shape.dims) for p in m.entry.params)
    _, k, _ = w
    x = draw.standard_normal((rows, k)).astype(np.float32)
    whole = x.reshape(rows, sums[1], -1).sum(2)
    factors = round_to(draw.standard_normal(scales), m.entry.params[3].dtype)
    return [x, whole, draw.integers(0, 256, w).astype(np.uint8), factors]


def check(m, rows):
    given = inputs(m, rows)
    (want,) = evaluate(m, given)
    (got,) = run(m, given, optimize=True)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 6, 7, 13, 25])
def test_rows(m):
    check(product(m), m)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("half", [16, 32, 48])
def test_scales_and_blocks(dtype, half):
    check(product(2, dtype, blocks=1, k=64, half=half, group=64), 2)


@pytest.mark.parametrize("rows", [1, 6, 11])
def test_any_number_of_rows(rows):
    m = symbol("m")
    check(product(m, symbols=(("m", 0, 0),)), rows)


def test_one_kernel():
    found = optimize(product(1)).entry.instructions()
    (kernel,) = [x for x in found if x.op == "fusion"]
    assert kernel["backend_config"] == GROUPS


def test_other_calls_stay():
    m = product(1, config='{"product":"other"}')
    assert group_products.run(m) is m
