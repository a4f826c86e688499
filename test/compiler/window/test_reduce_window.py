"""reduce-window (pooling, running folds, large windows) and select-and-scatter."""

import numpy as np
import pytest

from test.compiler.steps import check
from torch_hlo.hlo.ir import build
from torch_hlo.hlo.ir.shape import Shape, numpy_dtype
from torch_hlo.hlo.ir.window import WindowDim

ONE = WindowDim(1)
INIT = {"add": 0, "multiply": 1, "maximum": "low", "minimum": "high"}


def reduced(window, op, dtype, init=None):
    start = INIT[op] if init is None else init
    start = (
        {"low": build.lowest, "high": build.highest}[start](dtype)
        if isinstance(start, str)
        else start
    )
    return lambda x: build.reduce_window(x, build.constant(start, dtype), window, op)


POOLS = [
    (ONE, ONE, WindowDim(3, 2, 1, 1), WindowDim(3, 2, 1, 1)),
    (ONE, ONE, WindowDim(2, 2), WindowDim(2, 2)),
    (ONE, WindowDim(3, 1, 0, 2), WindowDim(2, 3, 1, 0, 1, 2), ONE),
    (ONE, ONE, WindowDim(3, 1, 2, 2, 2), WindowDim(2, 1, 1, 1, 3)),
    (WindowDim(2), ONE, ONE, WindowDim(5, 1, 4, 0)),
    (ONE, ONE, WindowDim(9, 1, 0, 0), WindowDim(9, 2, 3, 3)),
    (
        WindowDim(2, 1, 1, 1),
        WindowDim(3, 1, 1, 1),
        WindowDim(4, 2, 0, 1),
        WindowDim(5, 1, 1, 1),
    ),
]


@pytest.mark.parametrize("window", POOLS)
@pytest.mark.parametrize(
    "op,dtype",
    [
        ("maximum", "f32"),
        ("add", "f32"),
        ("minimum", "s32"),
        ("add", "bf16"),
        ("maximum", "s8"),
        ("add", "f64"),
    ],
)
def test_windows(window, op, dtype):
    rng = np.random.default_rng(0)
    kind = {
        "f32": "float32",
        "s32": "int32",
        "bf16": "float32",
        "s8": "int8",
        "f64": "float64",
    }[dtype]
    check(
        reduced(window, op, dtype),
        rng.integers(-50, 50, (2, 3, 9, 11)).astype(kind),
        dtypes=[dtype],
    )


def test_initial_value_and_computation():
    v = np.random.default_rng(0).standard_normal((4, 30)).astype("float32")
    window = (ONE, WindowDim(3, 1, 1, 1))
    check(reduced(window, "add", "f32", 7), v)
    check(lambda x, i: build.reduce_window(x, i, window, "maximum"), v, np.float32(0.5))


def test_unknown_computations_fold_padding():
    v = np.random.default_rng(0).standard_normal((4, 6)).astype("float32") / 3
    one = build.constant(1, "f32")
    window = (WindowDim(2, 2, 0, 0, 2), WindowDim(3, 1, 2, 1))
    add, times = build.add, build.multiply
    odd = build.computation(lambda a, b: add(add(a, b), times(a, b)), [Shape("f32")] * 2)
    check(lambda x: build.reduce_window(x, one, window, odd), v)
    sums = build.computation(lambda a, b, c, d: (add(a, c), add(b, d)), [Shape("f32")] * 4)
    check(lambda x: build.reduce_window([x, x], [one, one], window, sums), v)


def test_maximum_keeps_nan():
    v = np.random.default_rng(0).standard_normal((4, 30)).astype("float32")
    v[1, 4] = np.nan
    check(reduced((ONE, WindowDim(3, 2, 1, 1)), "maximum", "f32"), v)


@pytest.mark.parametrize(
    "dims,axis",
    [
        ((7,), 0),
        ((3, 40), 1),
        ((40, 3), 0),
        ((2, 30, 33), 1),
        ((1000,), 0),
        ((2, 3, 20), 2),
        ((5, 64), 1),
    ],
)
@pytest.mark.parametrize(
    "op,dtype",
    [
        ("add", "f32"),
        ("add", "s64"),
        ("maximum", "f32"),
        ("add", "bf16"),
        ("multiply", "f64"),
        ("add", "c64"),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_running(dims, axis, op, dtype, backward):
    rng = np.random.default_rng(0)
    n = dims[axis]
    full = WindowDim(n, 1, 0, n - 1) if backward else WindowDim(n, 1, n - 1, 0)
    window = tuple(full if d == axis else ONE for d in range(len(dims)))
    kind = {
        "f32": "float32",
        "s64": "int64",
        "bf16": "float32",
        "f64": "float64",
        "c64": "complex64",
    }[dtype]
    v = rng.integers(-5, 5, dims).astype(kind) if op != "multiply" else rng.uniform(0.9, 1.1, dims)
    check(reduced(window, op, dtype), v, dtypes=[dtype])


def test_running_maximum_from_a_value():
    """An initial value that is not the identity, of a fold where it may enter several times."""
    window = (ONE, WindowDim(300, 1, 299, 0))
    v = np.random.default_rng(0).standard_normal((4, 300)).astype("float32")
    check(lambda x, i: build.reduce_window(x, i, window, "maximum"), v, np.float32(1.5))


def test_running_pairs_and_symbolic_length():
    rng = np.random.default_rng(0)

    def later(a, i, b, j):
        take = build.compare(b, a, "GT")
        return build.select(take, b, a), build.select(take, j, i)

    best = build.computation(later, [Shape("f32"), Shape("s32")] * 2)
    window = (ONE, WindowDim(20, 1, 19, 0))
    inits = [build.constant(-np.inf, "f32"), build.constant(-1, "s32")]
    place = np.broadcast_to(np.arange(20, dtype="int32"), (5, 20))
    check(
        lambda x, i: build.reduce_window([x, i], inits, window, best),
        rng.standard_normal((5, 20)).astype("float32"),
        place,
    )
    check(
        lambda x: reduced(
            (ONE, WindowDim(x.shape.dims[1], 1, x.shape.dims[1] - 1, 0)), "add", "f32"
        )(x),
        rng.standard_normal((5, 20)).astype("float32"),
        symbolic={(0, 0): "s0", (0, 1): "s1"},
    )


def test_symbolic_batch():
    v = np.random.default_rng(0).standard_normal((3, 2, 9, 9)).astype("float32")
    check(
        reduced((ONE, ONE, WindowDim(3, 2, 1, 1), WindowDim(3, 2, 1, 1)), "maximum", "f32"),
        v,
        symbolic={(0, 0): "s0", (0, 1): "s1"},
    )


@pytest.mark.parametrize("window", POOLS[:4])
@pytest.mark.parametrize("select", ["GE", "LE"])
def test_select_and_scatter(window, select):
    rng = np.random.default_rng(0)
    v = rng.integers(-9, 9, (2, 3, 9, 11)).astype("float32")
    out = tuple(w.output_size(n) for w, n in zip(window, v.shape))
    source = rng.standard_normal(out).astype("float32")
    window = tuple(window)
    check(
        lambda x, s: build.select_and_scatter(
            x, s, build.constant(0.5, "f32"), window, select, "add"
        ),
        v,
        source,
    )


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64", "s32", "s8"])
@pytest.mark.parametrize("channels", [1, 16, 37, 150])
@pytest.mark.parametrize(
    "window",
    [
        (ONE, WindowDim(3, 2, 1, 1), WindowDim(3, 2, 1, 1), ONE),
        (ONE, WindowDim(2, 2, 0, -1), WindowDim(2, 2), ONE),
        (ONE, WindowDim(3, 1, 2, 2, 1, 2), WindowDim(2, 3, 0, 1), ONE),
        (ONE, ONE, WindowDim(4, 3, 2, 5), ONE),
    ],
)
def test_select_and_scatter_lanes(window, channels, dtype):
    rng = np.random.default_rng(0)
    v = rng.integers(-9, 9, (2, 9, 10, channels)).astype(numpy_dtype(dtype))
    source = rng.integers(-3, 4, tuple(w.output_size(n) for w, n in zip(window, v.shape))).astype(
        numpy_dtype(dtype)
    )

    def program(x, s):
        return build.select_and_scatter(x, s, build.constant(1, dtype), window, "GE", "add")

    check(program, v, source, dtypes=[dtype, dtype])
    check(program, v, source, dtypes=[dtype, dtype], symbolic={(0, 0): "n", (1, 0): "n"})


@pytest.mark.parametrize("base", [1, 2])
def test_select_and_scatter_twice(base):
    """Functions have symbolic sizes of their own, not those of the ones before them."""
    window = (ONE, WindowDim(2, 2, base_dilation=base), ONE)
    v = np.random.default_rng(0).standard_normal((2, 8, 20)).astype("float32")
    out = tuple(w.output_size(n) for w, n in zip(window, v.shape))
    for turn in range(2):
        check(
            lambda x, s: build.select_and_scatter(
                x, s, build.constant(turn, "f32"), window, "GE", "add"
            ),
            v,
            np.ones(out, "float32"),
            symbolic={(0, 2): "n", (1, 2): "n"},
        )


def test_empty():
    check(reduced((ONE, WindowDim(3)), "add", "f32"), np.ones((3, 2), "float32"))
    check(reduced((ONE, WindowDim(3, 1, 2, 2)), "add", "f32"), np.ones((3, 0), "float32"))
