"""3x3 convolutions by minimal filtering: the products that it saves, edges, epilogues, errors no
larger than the definition's."""

import numpy as np
import pytest

from test.compiler.steps import Compiled, check, module_of
from torch_hlo import config
from torch_hlo.compiler.convolution.conv_winograd import F23, is_winograd, transposed
from torch_hlo.compiler.convolution.conv_winograd_gradient import is_winograd_gradient
from torch_hlo.hlo.ir import build
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.ir.window import WindowDim

LAST = "b01f_oi01->b01f"


def values(*dims):
    return np.random.default_rng(0).standard_normal(dims).astype("f")


def conv(x_dims, k_dims, window, labels=LAST, **options):
    def fn(x, k):
        y = build.convolution(x, k, window, labels)
        assert is_winograd(y)
        return y

    return check(fn, values(*x_dims), values(*k_dims), rtol=1e-4, **options)


def test_filter_is_a_convolution():
    """A' [(G g) * (B' d)] is the correlation of 4 inputs with 3 taps, exactly."""
    B, G, A = (np.array(m) for m in (F23.B, F23.G, F23.A))
    for i in range(F23.inputs):
        for j in range(F23.taps):
            d, g = np.eye(F23.inputs)[i], np.eye(F23.taps)[j]
            assert np.array_equal(A @ ((G @ g) * (B @ d)), np.correlate(d, g))
    assert transposed(transposed(F23.A)) == F23.A


@pytest.mark.parametrize("pads", [(1, 1, 1, 1), (0, 0, 0, 0), (2, 0, 0, 1), (1, 1, 3, 2)])
@pytest.mark.parametrize("size", [(28, 28), (29, 33), (8, 60)])
def test_edges(pads, size):
    conv(
        (3, *size, 40),
        (70, 40, 3, 3),
        [WindowDim(3, 1, *pads[:2]), WindowDim(3, 1, *pads[2:])],
    )


@pytest.mark.parametrize("ci,co", [(64, 64), (35, 48), (130, 33), (256, 17)])
def test_features(ci, co):
    conv((4, 20, 20, ci), (co, ci, 3, 3), [WindowDim(3, 1, 1, 1)] * 2)


@pytest.mark.parametrize("labels", ["b01f_o01i->b01f", "b01f_01io->b01f", "b01f_io01->b01f"])
def test_kernel_orders(labels):
    k = [{"o": 48, "i": 40, "0": 3, "1": 3}[c] for c in labels.split("_")[1].split("->")[0]]
    for mirrored in (False, True):
        conv((3, 28, 28, 40), k, [WindowDim(3, 1, 1, 1, 1, 1, mirrored)] * 2, labels)


@pytest.mark.parametrize("size", [(28, 28), (27, 31), (6, 150)])
def test_epilogue(size):
    """Bias, residual and activation in the same step."""

    def fn(x, k, bias, residual):
        y = build.convolution(x, k, [WindowDim(3, 1, 1, 1)] * 2, LAST)
        y = build.add(build.add(y, build.broadcast(bias, y.shape.dims, (3,))), residual)
        return build.maximum(y, build.full_like(y, 0))

    check(
        fn,
        values(4, *size, 40),
        values(72, 40, 3, 3),
        values(72),
        values(4, *size, 72),
        rtol=1e-4,
        optimize=True,
    )


def test_errors_are_not_larger_than_those_of_the_definition():
    x, k = values(2, 30, 30, 128), values(64, 128, 3, 3)
    module = module_of(
        lambda a, b: build.convolution(a, b, [WindowDim(3, 1, 1, 1)] * 2, LAST),
        [Shape("f32", x.shape), Shape("f32", k.shape)],
    )
    exact = np.zeros((2, 30, 30, 64))
    padded = np.pad(x.astype("d"), ((0, 0), (1, 1), (1, 1), (0, 0)))
    for i in range(3):
        for j in range(3):
            exact += padded[:, i : i + 30, j : j + 30] @ k[:, :, i, j].astype("d").T
    errors = {}
    for on in (True, False):
        with config.override(WINOGRAD=on):
            errors[on] = float(np.abs(Compiled(module)(x, k)[0] - exact).max())
    assert errors[True] < 1.5 * errors[False], errors


@pytest.mark.parametrize(
    "n,ci,co,high,wide,pad",
    [
        (4, 64, 64, 14, 14, 1),
        (3, 40, 70, 13, 27, 1),
        (2, 130, 33, 16, 16, 0),
        (2, 64, 150, 20, 12, 2),
        (8, 20, 16, 30, 30, 1),
    ],
)
@pytest.mark.parametrize("labels", ["f01b_i01o->fb01", "f01b_i01o->01bf"])
def test_gradient_of_weights(n, ci, co, high, wide, pad, labels):
    out = high + 2 * pad - 2, wide + 2 * pad - 2
    window = [WindowDim(o, 1, pad, pad) for o in out]

    def fn(x, y):
        found = build.convolution(x, y, window, labels)
        assert is_winograd_gradient(found)
        return found

    check(fn, values(n, high, wide, ci), values(n, *out, co), rtol=1e-4)
