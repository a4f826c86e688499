"""Depthwise convolutions whose channels come first."""

import numpy as np
import pytest

from test.compiler.steps import check
from torch_hlo.compiler.pipeline import optimize
from torch_hlo.hlo.ir import build
from torch_hlo.hlo.ir.window import WindowDim

FIRST = "bf01_oi01->bf01"


def conv(x_dims, k_dims, window, labels=FIRST, dtype="float32", **options):
    rng = np.random.default_rng(0)
    x, k = (rng.standard_normal(dims).astype(dtype) for dims in (x_dims, k_dims))
    return check(
        lambda x, k: build.convolution(x, k, window, labels, x_dims[1]),
        x,
        k,
        rtol=1e-4,
        **options,
    )


WINDOWS = [
    [WindowDim(3, 1, 1, 1)] * 2,
    [WindowDim(3, 2, 1, 1)] * 2,
    [WindowDim(5, 2, 2, 1), WindowDim(4, 1, 0, 3)],
    [WindowDim(3, 1, 2, 2, 1, 2)] * 2,
    [WindowDim(3, 2, 2, 2, 1, 3)] * 2,
    [WindowDim(3, 1, -2, -1), WindowDim(5, 2, -3, 4)],
    [WindowDim(3, 1, 1, 1, 1, 1, True), WindowDim(5, 1, 2, 2)],
    [WindowDim(2, 3, 0, 1), WindowDim(3, 1, 1, 1, 1, 1, True)],
    [WindowDim(11, 1, 5, 5), WindowDim(3, 1, 1, 1)],
    [WindowDim(1), WindowDim(1, 2)],
]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_windows(window, dtype):
    conv((2, 3, 17, 35), (6, 1, *(w.size for w in window)), window, dtype=dtype)


@pytest.mark.parametrize("high,wide", [(1, 16), (7, 7), (56, 56), (30, 129), (90, 200)])
@pytest.mark.parametrize("stride", [1, 2])
def test_sizes(high, wide, stride):
    """Some are cut into blocks of rows."""
    conv(
        (2, 2, high, wide),
        (2, 1, 3, 5),
        [WindowDim(3, stride, 1, 1), WindowDim(5, stride, 2, 2)],
    )


@pytest.mark.parametrize(
    "w", [WindowDim(7, 1, 3, 3), WindowDim(4, 2, 1, 2, 1, 3), WindowDim(3, 1, 2, 0)]
)
def test_signals(w):
    conv((2, 4, 300), (8, 1, w.size), [w], "bf0_oi0->bf0")


@pytest.mark.parametrize("stride", [1, 2])
def test_finished_in_the_same_kernel(stride):
    """Bias, a residual, an activation, and the sums themselves."""

    def network(x, k, b, r):
        y = build.convolution(x, k, [WindowDim(3, stride, 1, 1)] * 2, FIRST, 5)
        s = build.add(build.add(y, build.broadcast(b, y.shape.dims, (1,))), r)
        return s, build.multiply(s, build.logistic(s))

    rng = np.random.default_rng(0)
    n = 96 // stride
    arrays = [
        rng.standard_normal(d).astype("float32")
        for d in ((2, 5, 96, 96), (10, 1, 3, 3), (10,), (2, 10, n, n))
    ]
    compiled = check(network, *arrays, rtol=1e-4, optimize=True)
    fusions = [x for x in optimize(compiled.module).entry.instructions() if x.op == "fusion"]
    assert [x["kind"] for x in fusions] == ["output"]
