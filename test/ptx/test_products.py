"""What is fused to products on matrix units, executed by the PTX evaluator: all tiles, blocks that
the result fills and others."""

from unittest import mock

import numpy as np
import pytest

from test.compiler.steps import module_of
from test.ptx.test_kernels import run
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.gpu.target import gpu_target
from torch_hlo.compiler.matmul.gpu import gpu_matrix
from torch_hlo.compiler.pipeline import random_inputs
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir import Shape, build as b

TILES = {tile.name: (tile, share) for tile, share in (*gpu_matrix.HOPPER_TILES, *gpu_matrix.TILES)}


def finished(x, w, bias, y):
    """gelu'(y) (x w + bias), rounded, plus y."""
    dims = y.dims
    wide = b.convert(y, "f32")
    sums = b.add(b.dot(x, w, (1,), (0,), dtype="f32"), b.broadcast(bias, dims, (1,)))
    slope = b.tanh(b.multiply(wide, b.logistic(wide)))
    rounded = b.convert(b.multiply(sums, b.add(slope, wide)), "bf16")
    return b.add(rounded, y)


@pytest.mark.parametrize("rows", (256, 261))
@pytest.mark.parametrize("name", ("w128x192_5", "w128x256_4", "64x128_4"))
def test_finishes(name, rows):
    shapes = [
        Shape("bf16", (rows, 72)),
        Shape("bf16", (72, 200)),
        Shape("f32", (200,)),
        Shape("bf16", (rows, 200)),
    ]
    module = module_of(finished, shapes)
    inputs = random_inputs(module, 0)
    with mock.patch.object(gpu_matrix, "tiles", lambda target: (TILES[name],)):
        (got,) = run(module, inputs, "test.ptx.driver:sm_90a")
    (want,) = evaluate(module.entry, inputs)
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)


def test_parts_are_rounded_once():
    """A product that is cut in k has two kernels, not three."""
    shapes = [Shape("bf16", (16, 1, 1024)), Shape("bf16", (16, 1024, 128))]
    module = module_of(
        lambda x, w: b.convert(b.dot(x, w, (2,), (1,), (0,), (0,), dtype="f32"), "bf16"), shapes
    )
    assert len(compile_module(module, gpu_target("nvptx:sm_90a")).kernels) == 2
    inputs = random_inputs(module, 0)
    (got,) = run(module, inputs, "test.ptx.driver:sm_90a")
    (want,) = evaluate(module.entry, inputs)
    np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2)
