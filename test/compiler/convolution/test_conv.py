"""convolution: dimension numbers, strides, dilations, groups, gradients, element types."""

import numpy as np
import pytest

from test.compiler.steps import check
from torch_hlo.compiler.pipeline import optimize
from torch_hlo.hlo.ir import build
from torch_hlo.hlo.ir.window import WindowDim


def conv(
    x_dims,
    k_dims,
    window,
    labels="bf01_oi01->bf01",
    groups=1,
    batch_groups=1,
    dtype="float32",
    types=(None, None),
    out=None,
    **options,
):
    rng = np.random.default_rng(0)

    def values(dims):
        if np.dtype(dtype).kind in "iu":
            return rng.integers(-5, 5, dims).astype(dtype)
        v = rng.standard_normal(dims)
        return (v + 1j * rng.standard_normal(dims) if np.dtype(dtype).kind == "c" else v).astype(
            dtype
        )

    return check(
        lambda x, k: build.convolution(x, k, window, labels, groups, batch_groups, out),
        values(x_dims),
        values(k_dims),
        dtypes=types,
        **options,
    )


SQUARE = [
    WindowDim(3, 1, 1, 1),
    WindowDim(3, 2, 1, 1),
    WindowDim(1),
    WindowDim(1, 2),
    WindowDim(7, 2, 3, 3),
    WindowDim(3, 1, 2, 2, 1, 2),
    WindowDim(3, 3, 0, 1),
    WindowDim(3, 1, 1, 1, 2),
    WindowDim(2, 1, 1, 2, 3),
    WindowDim(3, 1, 1, 1, 1, 1, True),
]


@pytest.mark.parametrize("w", SQUARE)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_windows(w, dtype):
    conv((2, 5, 17, 19), (20, 5, w.size, w.size), [w, w], dtype=dtype)


@pytest.mark.parametrize("size", [7, 14, 28, 33])
def test_sizes(size):
    w = WindowDim(3, 1, 1, 1)
    conv((3, 40, size, size), (70, 40, 3, 3), [w, w], rtol=1e-4)
    conv((2, 9, size, 2 * size), (33, 9, 3, 1), [w, WindowDim(1)], rtol=1e-4)


@pytest.mark.parametrize(
    "labels",
    [
        "b01f_01io->b01f",
        "b01f_o01i->bf01",
        "01bf_i01o->01bf",
        "bf10_oi10->bf10",
        "fb01_io01->fb01",
        "b0f1_0o1i->f0b1",
    ],
)
@pytest.mark.parametrize("size", [1, 3])
def test_dimension_orders(labels, size):
    lhs, rhs = labels.split("->")[0].split("_")
    x = [{"b": 2, "f": 5, "0": 9, "1": 11}[c] for c in lhs]
    k = [{"o": 6, "i": 5, "0": size, "1": size}[c] for c in rhs]
    conv(x, k, [WindowDim(size, 1, 1, 0), WindowDim(size, 1, 0, 2)], labels)
    conv(x, k, [WindowDim(size), WindowDim(size)], labels)


@pytest.mark.parametrize(
    "groups,features,outputs", [(3, 9, 12), (8, 8, 8), (8, 8, 16), (2, 70, 40)]
)
def test_feature_groups(groups, features, outputs):
    for stride in (1, 2):
        w = WindowDim(3, stride, 1, 1)
        conv(
            (2, features, 10, 12),
            (outputs, features // groups, 3, 3),
            [w, w],
            groups=groups,
        )


@pytest.mark.parametrize("groups", [2, 4])
def test_batch_groups(groups):
    w = WindowDim(3, 1, 1, 1)
    conv((8, 5, 6, 7), (4, 5, 3, 3), [w, w], batch_groups=groups)


@pytest.mark.parametrize(
    "n,ci,co,size,k,stride,pad",
    [
        (3, 6, 20, 14, 3, 1, 1),
        (2, 3, 16, 17, 7, 2, 3),
        (4, 40, 33, 7, 3, 1, 1),
        (2, 5, 8, 12, 1, 2, 0),
        (1, 4, 4, 30, 3, 2, 1),
    ],
)
def test_gradient_of_weights(n, ci, co, size, k, stride, pad):
    out = (size + 2 * pad - k) // stride + 1
    high = (k - 1) + (out - 1) * stride + 1 - size - pad
    w = WindowDim(out, 1, pad, high, 1, stride)
    conv((n, ci, size, size), (n, co, out, out), [w, w], "fb01_io01->fb01", rtol=1e-4)


def test_gradient_of_weights_in_groups():
    w = WindowDim(10, 1, 1, 1)
    conv(
        (2, 8, 10, 10),
        (2, 12, 10, 10),
        [w, w],
        "fb01_io01->fb01",
        batch_groups=4,
        rtol=1e-4,
    )


@pytest.mark.parametrize(
    "n,ci,co,size,k,stride,pad",
    [
        (3, 6, 20, 14, 3, 2, 1),
        (2, 3, 16, 17, 7, 2, 3),
        (2, 5, 8, 12, 1, 2, 0),
        (1, 4, 4, 30, 3, 1, 1),
        (1, 3, 4, 11, 2, 3, 0),
    ],
)
def test_gradient_of_input(n, ci, co, size, k, stride, pad):
    out = (size + 2 * pad - k) // stride + 1
    low = k - 1 - pad
    w = WindowDim(k, 1, low, size - ((out - 1) * stride + 1) - low + k - 1, stride)
    conv((n, co, out, out), (ci, co, k, k), [w, w], rtol=1e-4)


@pytest.mark.parametrize(
    "n,ci,co,size,k,stride,pad",
    [
        (3, 6, 20, 14, 3, 2, 1),
        (2, 3, 16, 17, 7, 2, 3),
        (2, 5, 8, 12, 1, 2, 0),
        (1, 40, 33, 30, 3, 1, 1),
        (2, 20, 4, 7, 2, 3, 0),
    ],
)
def test_gradient_of_input_with_mirrored_window(n, ci, co, size, k, stride, pad):
    """The kernel as it is stored, [co, ci, k, k]: its output features are the gradient's inputs,
    and the window is reversed."""
    out = (size + 2 * pad - k) // stride + 1
    low = k - 1 - pad
    w = WindowDim(k, 1, low, size - ((out - 1) * stride + 1) - low + k - 1, stride, 1, True)
    conv((n, co, out, out), (co, ci, k, k), [w, w], "bf01_io01->bf01", rtol=1e-4)


@pytest.mark.parametrize("spatial", [0, 1, 3])
def test_ranks(spatial):
    digits = "".join(map(str, range(spatial)))
    w = WindowDim(3, 2, 1, 1)
    conv(
        (2, 5, *(9, 8, 7)[:spatial]),
        (6, 5, *(3,) * spatial),
        [w] * spatial,
        f"bf{digits}_oi{digits}->bf{digits}",
    )


@pytest.mark.parametrize(
    "types,out",
    [
        (("bf16", "bf16"), None),
        (("bf16", "bf16"), "f32"),
        (("f16", "f16"), None),
        (("s8", "s8"), "s32"),
        (("c64", "c64"), None),
    ],
)
def test_element_types(types, out):
    dtype = {"bf16": "float32", "f16": "float16", "s8": "int8", "c64": "complex64"}[types[0]]
    w = WindowDim(3, 1, 1, 1)
    conv((2, 5, 9, 10), (6, 5, 3, 3), [w, w], dtype=dtype, types=types, out=out)


def test_symbolic_batch_and_size():
    w = WindowDim(3, 1, 1, 1)
    conv((3, 5, 9, 10), (20, 5, 3, 3), [w, w], symbolic={(0, 0): "s0"})
    conv(
        (3, 5, 9, 10),
        (20, 5, 3, 3),
        [w, w],
        symbolic={(0, 0): "s0", (0, 2): "s1", (0, 3): "s2"},
    )


def test_empty():
    w = WindowDim(3, 1, 1, 1)
    conv((0, 5, 9, 10), (6, 5, 3, 3), [w, w])
    conv((2, 0, 9, 10), (6, 0, 3, 3), [w, w])


# -- channels last: the forms that conv_layout makes
# ---------------------------------------------------------------------
LAST = "b01f_oi01->b01f"


@pytest.mark.parametrize("w", SQUARE)
@pytest.mark.parametrize("channels,features", [(3, 70), (40, 24)])
def test_channels_last(w, channels, features):
    conv(
        (2, 13, 15, channels),
        (features, channels, w.size, w.size),
        [w, w],
        LAST,
        rtol=1e-4,
    )


@pytest.mark.parametrize(
    "labels,kernel",
    [
        ("b01f_01io->b01f", (3, 3, 8, 50)),
        ("b01f_io01->b01f", (8, 50, 3, 3)),
        ("b01f_o01i->b01f", (50, 3, 3, 8)),
    ],
)
@pytest.mark.parametrize("mirrored", [False, True])
def test_orders_of_the_kernel(labels, kernel, mirrored):
    conv(
        (2, 9, 11, 8),
        kernel,
        [WindowDim(3, 1, 1, 1, 1, 1, mirrored)] * 2,
        labels,
        rtol=1e-4,
    )


@pytest.mark.parametrize(
    "groups,channels,features",
    [
        (32, 32, 32),
        (40, 40, 40),
        (12, 48, 48),
        (3, 24, 24),
        (3, 72, 48),
        (20, 640, 640),
        (24, 24, 48),
        (2, 40, 60),
        (100, 100, 100),
    ],
)
@pytest.mark.parametrize("stride", [1, 2])
def test_groups_channels_last(groups, channels, features, stride):
    conv(
        (2, 9, 11, channels),
        (features, channels // groups, 3, 3),
        [WindowDim(3, stride, 1, 1)] * 2,
        LAST,
        groups=groups,
    )
    conv(
        (2, 9, 11, channels),
        (features, channels // groups, 3, 3),
        [WindowDim(3, 1, 1, 1 + stride % 2, stride)] * 2,
        LAST,
        groups=groups,
    )


@pytest.mark.parametrize(
    "n,ci,co,size,k,stride,pad,dilation,groups",
    [
        (3, 6, 20, 14, 3, 1, 1, 1, 1),
        (2, 3, 16, 17, 7, 2, 3, 1, 1),
        (2, 3, 16, 17, 7, 2, 0, 1, 1),
        (4, 40, 33, 7, 3, 1, 1, 1, 1),
        (1, 4, 64, 30, 3, 2, 1, 1, 1),
        (2, 20, 32, 16, 3, 1, 2, 2, 1),
        (2, 16, 16, 64, 3, 1, 1, 1, 1),
        (2, 8, 12, 10, 3, 1, 1, 1, 4),
        (2, 32, 32, 10, 3, 1, 1, 1, 32),
        (2, 40, 40, 10, 5, 2, 2, 1, 40),
    ],
)
@pytest.mark.parametrize("out", ["01bf", "fb01"])
def test_gradient_channels_last(n, ci, co, size, k, stride, pad, dilation, groups, out):
    outputs = (size + 2 * pad - dilation * (k - 1) - 1) // stride + 1
    w = WindowDim(
        outputs,
        dilation,
        pad,
        (k - 1) * dilation + (outputs - 1) * stride + 1 - size - pad,
        1,
        stride,
    )
    conv(
        (n, size, size, ci),
        (n, outputs, outputs, co),
        [w, w],
        f"f01b_i01o->{out}",
        batch_groups=groups,
        rtol=1e-4,
    )


def test_long_sums():
    """What a sum needs while it is computed does not fit on a stack: packed kernels of 100,000
    channels, addresses of 80,000 taps."""
    conv(
        (1, 3, 100_000),
        (1, 100_000, 16),
        [WindowDim(1)],
        "b0f_0io->b0f",
        rtol=1e-3,
        atol=1e-2,
    )
    conv(
        (1, 160_001, 2),
        (80_000, 2, 2),
        [WindowDim(80_000, 1, 0, 0, 1, 2)],
        "b0f_0io->b0f",
        rtol=1e-3,
        atol=1e-2,
    )


def test_symbolic_channels_last():
    w = WindowDim(3, 1, 1, 1)
    conv(
        (3, 9, 10, 5),
        (20, 5, 3, 3),
        [w, w],
        LAST,
        symbolic={(0, 0): "s0", (0, 1): "s1"},
    )
    conv((3, 9, 10, 32), (32, 1, 3, 3), [w, w], LAST, groups=32, symbolic={(0, 0): "s0"})


@pytest.mark.parametrize(
    "groups,channels,features", [(1, 5, 70), (1, 3, 300), (32, 32, 32), (2, 8, 12)]
)
@pytest.mark.parametrize("symbolic", [None, {(0, 0): "s0"}])
def test_finished_in_the_same_kernel(groups, channels, features, symbolic):
    """Bias, a residual that the result may overwrite, an activation, and the sums themselves."""

    def network(x, k, b, r):
        y = build.convolution(x, k, [WindowDim(3, 1, 1, 1)] * 2, LAST, groups)
        s = build.add(build.add(y, build.broadcast(b, y.shape.dims, (3,))), r)
        return s, build.multiply(s, build.logistic(s))

    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(d).astype("float32")
        for d in (
            (2, 9, 11, channels),
            (features, channels // groups, 3, 3),
            (features,),
            (2, 9, 11, features),
        )
    ]
    if symbolic:
        symbolic = symbolic | {(3, 0): "s0"}
    compiled = check(network, *arrays, symbolic=symbolic, rtol=1e-4, optimize=True)
    assert (
        sum(
            x.op == "fusion" and x["kind"] == "output"
            for x in optimize(compiled.module).entry.instructions()
        )
        == 1
    )


@pytest.mark.parametrize(
    "labels,kernel",
    [
        (LAST, (24, 100, 3, 3)),
        ("b01f_io01->b01f", (100, 24, 3, 3)),
        ("b01f_01io->b01f", (3, 3, 100, 24)),
    ],
)
@pytest.mark.parametrize(
    "w",
    [
        SQUARE[0],
        SQUARE[1],
        WindowDim(3, 1, 2, 2, 1, 2),
        WindowDim(3, 2, 1, 0),
        SQUARE[9],
    ],
)
def test_bf16_channels_last(labels, kernel, w):
    """On machines with AMX a product of patches, on others f32."""
    conv(
        (2, 9, 11, 100),
        kernel,
        [w, w],
        labels,
        types=("bf16", "bf16"),
        out="f32",
        rtol=1e-4,
    )
    conv((2, 9, 11, 100), kernel, [w, w], labels, types=("bf16", "bf16"))
