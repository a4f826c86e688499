"""Annotated programs that JAX wrote: the values of one device, and no more bytes and operations
than XLA's partitioner takes (first lines)."""

import re
from pathlib import Path

import numpy as np
import pytest

from test.compiler.spmd.support import run_partitioned
from torch_hlo.compiler.cost import cost
from torch_hlo.compiler.pipeline import random_inputs
from torch_hlo.compiler.spmd.spmd_pipeline import spmd
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir.verify import verify
from torch_hlo.hlo.stablehlo import parse_stablehlo

SAMPLES = sorted(Path(__file__).with_name("samples").glob("*.mlir"))


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.stem)
def test_sample(path):
    text = path.read_text()
    module = verify(parse_stablehlo(text))
    per_device = verify(spmd(module))
    sent, operations = map(
        int,
        re.match(r"// XLA's partitioner: (\d+) bytes sent, (\d+) operations", text).groups(),
    )
    found = cost(per_device)
    assert found.bytes <= sent + 1, found.table()
    assert found.matrix_flops <= operations, found.table()
    if path.stem.startswith("manual"):
        return  # regions that are written per device have no meaning on one
    inputs = random_inputs(module)
    want = evaluate(module, inputs)
    for w, g in zip(
        want, run_partitioned(per_device, inputs, [w.shape for w in want]), strict=True
    ):
        np.testing.assert_allclose(
            g, w, rtol=2e-3, atol=2e-3 * max(1e-3, float(np.max(np.abs(w), initial=0)))
        )


def test_a_megatron_layer_has_one_all_reduce():
    found = cost(
        spmd(
            parse_stablehlo(
                Path(__file__).with_name("samples").joinpath("mlp_megatron_8.mlir").read_text()
            )
        )
    )
    assert dict(found.collectives) == {"all-reduce": 1}
