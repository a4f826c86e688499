"""bf16 convolutions on AMX tiles: gathered operands, runs of few channels, epilogues."""

import numpy as np
import pytest

from test.compiler.steps import check
from torch_hlo.compiler.llvm import target
from torch_hlo.compiler.matmul.amx_kernels import element
from torch_hlo.hlo.ir import build
from torch_hlo.hlo.ir.window import WindowDim

pytestmark = pytest.mark.skipif(
    element(target.host(), ("bf16",)) is None, reason="the processor does not multiply bf16"
)


def values(*dims):
    return np.random.default_rng(0).standard_normal(dims).astype("f")


def conv(x_dims, k_dims, window, labels="b01f_oi01->b01f", out=None):
    return check(
        lambda x, k: build.convolution(x, k, window, labels, 1, 1, out),
        values(*x_dims),
        values(*k_dims),
        dtypes=["bf16", "bf16"],
        rtol=1e-4 if out == "f32" else None,
    )


@pytest.mark.parametrize(
    "w",
    [
        WindowDim(3, 1, 1, 1),
        WindowDim(3, 2, 1, 1),
        WindowDim(1, 2),
        WindowDim(5, 1, 0, 3),
        WindowDim(3, 1, 2, 2, 1, 2),
        WindowDim(3, 1, 1, 1, 1, 1, True),
    ],
)
@pytest.mark.parametrize("channels", [16, 32, 40, 100])
def test_windows(w, channels):
    conv((2, 9, 11, channels), (40, channels, w.size, w.size), [w, w], out="f32")


@pytest.mark.parametrize(
    "channels,w",
    [
        (3, WindowDim(7, 2, 3, 3)),
        (8, WindowDim(3, 1, 1, 1)),
        (6, WindowDim(4, 4)),
        (5, WindowDim(5, 1, 2, 0, 1, 1, True)),
    ],
)
def test_few_channels(channels, w):
    conv((2, 20, 24, channels), (70, channels, w.size, w.size), [w, w], out="f32")


@pytest.mark.parametrize("mirrored", [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("channels", [48, 64])
@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("labels", ["b01f_01io->b01f", "b01f_io01->b01f", "b01f_oi01->b01f"])
def test_kernel_orders(labels, taps, channels, mirrored):
    k = [
        {"o": 33, "i": channels, "0": taps, "1": 3}[c] for c in labels.split("_")[1].split("->")[0]
    ]
    conv(
        (2, 9, 11, channels),
        k,
        [WindowDim(n, 1, n // 2, n // 2, 1, 1, m) for n, m in zip((taps, 3), mirrored)],
        labels,
        out="f32",
    )


@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("taps", [1, 2, 3])
def test_gradient_of_strided_input(taps, stride):
    conv(
        (2, 7, 8, 64),
        (64, 40, taps, taps),
        [WindowDim(taps, 1, taps - 1, taps, stride, 1, True)] * 2,
        "b01f_io01->b01f",
        out="f32",
    )


def test_one_feature():
    conv((2, 6, 7, 48), (1, 48, 3, 3), [WindowDim(3, 1, 1, 1)] * 2)


def test_many_features_and_taps():
    conv((1, 7, 7, 130), (600, 130, 3, 3), [WindowDim(3, 1, 1, 1)] * 2, out="f32")
    conv((2, 300, 40), (20, 40, 9), [WindowDim(9, 1, 4, 4)], "b0f_oi0->b0f")
    conv(
        (1, 5, 6, 7, 32),
        (20, 32, 3, 3, 3),
        [WindowDim(3, 1, 1, 1)] * 3,
        "b012f_oi012->b012f",
    )


def test_addresses_that_do_not_fit_on_a_stack():
    conv((1, 6_010, 32), (16, 32, 6_000), [WindowDim(6_000)], "b0f_oi0->b0f")


def test_epilogue():
    def fn(x, k, bias, residual):
        y = build.convolution(x, k, [WindowDim(3, 1, 1, 1)] * 2, "b01f_oi01->b01f")
        y = build.add(build.add(y, build.broadcast(bias, y.shape.dims, (3,))), residual)
        return build.maximum(y, build.full_like(y, 0))

    check(
        fn,
        values(3, 9, 14, 48),
        values(72, 48, 3, 3),
        values(72),
        values(3, 9, 14, 72),
        dtypes=["bf16"] * 4,
        rtol=2e-2,
        optimize=True,
    )


@pytest.mark.parametrize(
    "n,ci,co,size,k,stride,pad,dilation",
    [
        (3, 20, 20, (14, 9), 3, 1, 1, 1),
        (2, 16, 16, (17, 20), 7, 2, 3, 1),
        (4, 40, 33, (7, 7), 3, 1, 1, 1),
        (1, 100, 64, (30, 31), 3, 2, 1, 1),
        (2, 48, 32, (16, 16), 3, 1, 2, 2),
        (2, 16, 80, (64, 40), 3, 1, 0, 1),
        (1, 32, 8, (9, 9), 2, 3, 0, 2),
        (2, 32, 40, (50,), 5, 2, 2, 3),
        (2, 17, 33, (6, 7, 8), 3, 1, 1, 1),
        (2, 32, 32, (1, 1), 3, 1, 1, 1),
        (2, 3, 40, (20, 24), 7, 2, 3, 1),
        (2, 5, 33, (21, 23), 5, 3, 0, 1),
        (1, 20, 16, (40,), 4, 2, 1, 1),
        (3, 16, 16, (11, 12), 1, 2, 0, 1),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_gradient_of_weights(n, ci, co, size, k, stride, pad, dilation, first):
    outputs = [(s + 2 * pad - dilation * (k - 1) - 1) // stride + 1 for s in size]
    digits = "012"[: len(size)]
    window = [
        WindowDim(
            o,
            dilation,
            pad,
            (k - 1) * dilation + (o - 1) * stride + 1 - s - pad,
            1,
            stride,
        )
        for o, s in zip(outputs, size)
    ]
    conv(
        (n, *size, ci),
        (n, *outputs, co),
        window,
        f"f{digits}b_i{digits}o->{f'fb{digits}' if first else f'{digits}bf'}",
        out="f32",
    )
