"""sort: stability, NaNs, signed zeros, axes, comparators of several arrays."""

import numpy as np
import pytest

from test.compiler.steps import check
from torch_hlo.hlo.ir import build
from torch_hlo.hlo.ir.shape import Shape

SHAPES = [
    ((7,), 0),
    ((3, 50), 1),
    ((50, 3), 0),
    ((4, 5, 6), 1),
    ((1000,), 0),
    ((2, 0), 1),
    ((300, 40), 0),
    ((1,), 0),
]


@pytest.mark.parametrize("dims,axis", SHAPES)
@pytest.mark.parametrize(
    "dtype",
    ["float32", "float64", "float16", "int8", "uint8", "int32", "int64", "bool"],
)
def test_keys(dims, axis, dtype):
    rng = np.random.default_rng(0)
    for direction in ("LT", "GT"):
        for few in (True, False):
            v = (rng.integers(-3, 4, dims) if few else rng.standard_normal(dims) * 50).astype(dtype)
            if v.dtype.kind == "f" and v.size:
                v.flat[rng.integers(v.size)] = np.nan
                v.flat[rng.integers(v.size)] = -0.0
            places = rng.integers(0, 100, dims).astype("int32")
            check(lambda x, y, d=direction: build.sort((x, y), axis, d), v, places)


@pytest.mark.parametrize("dims,axis", SHAPES)
def test_comparator_of_two_arrays(dims, axis):
    rng = np.random.default_rng(0)

    def before(a, b, c, d):
        return build.or_(
            build.compare(a, b, "LT"),
            build.and_(build.compare(a, b, "EQ"), build.compare(c, d, "GT")),
        )

    order = build.computation(before, [Shape("s32")] * 2 + [Shape("f32")] * 2)
    check(
        lambda x, y: build.sort((x, y), axis, order),
        rng.integers(0, 5, dims).astype("int32"),
        rng.standard_normal(dims).astype("float32"),
    )


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3fn", "f8e5m2fnuz"])
def test_small_floats(dtype):
    v = np.random.default_rng(0).standard_normal((5, 30)).astype("float32")
    v[2, 3] = np.nan
    check(lambda x: build.sort((x,), 1, "GT"), v, dtypes=[dtype])


def test_symbolic_length():
    v = np.random.default_rng(0).standard_normal((6, 77)).astype("float32")
    check(lambda x: build.sort((x,), 1, "LT"), v, symbolic={(0, 0): "s0", (0, 1): "s1"})
