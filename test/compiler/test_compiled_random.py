"""Random programs, optimised and compiled, against the evaluator; and programs that once failed."""

from __future__ import annotations

import numpy as np
import pytest

from test.compiler.random_hlo import random_module
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.pipeline import random_inputs
from torch_hlo.device.cpu import loader
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir.instruction import Module, outputs
from torch_hlo.hlo.ir.numeric import decode, encode
from torch_hlo.hlo.text.parser import parse_module


def aligned(data: bytes) -> np.ndarray:
    """A 64-byte aligned copy, with room for a vector."""
    raw = np.zeros(len(data) + 128, np.uint8)
    start = -raw.ctypes.data % 64
    view = raw[start : start + len(data) + 64]
    view[: len(data)] = np.frombuffer(data, np.uint8)
    return view


def assert_compiles(m: Module, seed: int = 0) -> None:
    inputs = random_inputs(m, seed)
    program = loader.load(compile_module(m))
    given = [aligned(encode(x, p.shape.dtype)) for x, p in zip(inputs, m.entry.params)]
    wanted = [aligned(bytes(o.shape.nbytes)) for o in outputs(m)]
    program.call([a.ctypes.data for a in given], [a.ctypes.data for a in wanted], [])
    for a, o, expected in zip(wanted, outputs(m), evaluate(m, inputs)):
        s = o.shape
        got = decode(a[: s.nbytes].tobytes(), s.dtype, s.dims)
        if s.kind in "fc":
            np.testing.assert_allclose(
                got, expected, rtol=2e-2 if s.dtype == "bf16" else 2e-3, atol=2e-3
            )
        else:
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("block", range(4))
def test_random_programs(block):
    for seed in range(10 * block, 10 * block + 10):
        try:
            assert_compiles(random_module(seed, 6 + seed % 25))
        except Exception as error:
            error.add_note(f"random_module({seed}, {6 + seed % 25})")
            raise


@pytest.mark.parametrize(
    "body",
    [
        # (5 - i) / 3 is not 1 + (2 - i) / 3 in unsigned arithmetic
        """x = f32[4] parameter(0)
       b = f32[3,4,3] broadcast(x), dimensions={1}
       r = f32[6,6] reshape(b)
       ROOT y = f32[6,6] reverse(r), dimensions={0,1}""",
        # Which operand of the concatenate is read depends on an index that is itself loaded
        """x = f32[4] parameter(0)
       i = s32[5] parameter(1)
       a = f32[1] slice(x), slice={[3:4]}
       b = f32[3] slice(x), slice={[0:3]}
       c = f32[4] concatenate(a, b), dimensions={0}
       ROOT y = f32[5] gather(c, i), offset_dims={}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1}""",
        # |-u| is not |u| for unsigned integers
        """u = u8[5] parameter(0)
       n = u8[5] negate(u)
       ROOT y = u8[5] abs(n)""",
    ],
)
def test_once_failed(body):
    assert_compiles(parse_module("HloModule m\n\nENTRY main {\n" + body + "\n}\n"), seed=1)
