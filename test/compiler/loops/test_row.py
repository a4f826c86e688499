"""Row kernels: rows contiguous and strided, short and long, with partial results, in place, with
symbolic sizes."""

from __future__ import annotations

import numpy as np
import pytest

from test.compiler import programs
from test.compiler.compiled import module, run
from test.compiler.random_programs import random_module
from test.compiler.steps import Compiled, check
from torch_hlo.compiler.llvm import math
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir import build as b
from torch_hlo.hlo.ir.instruction import Module
from torch_hlo.hlo.ir.shape import Shape, numpy_dtype


def check_module(m: Module, seed: int = 0, rtol: float = 2e-5) -> None:
    inputs = programs.inputs_for(m, seed)
    for got, want in zip(Compiled(m, optimize=True)(*inputs), evaluate(m, inputs), strict=True):
        np.testing.assert_allclose(
            got, want, rtol=rtol, atol=rtol * max(1, np.abs(want).max(initial=0))
        )


@pytest.mark.parametrize(
    ("dims", "axis"),
    [
        ((64, 100), 1),
        ((7, 1000), 1),
        ((3, 5000), 1),
        ((40, 9000), 1),
        ((1, 300), 1),
        ((2, 70000), 1),
        ((300,), 0),
        ((3, 20, 50), 1),
        ((20, 50), 0),
        ((4, 300, 70), 1),
        ((5, 6, 7, 8), 2),
        ((16, 1), 1),
        ((9, 3), 1),
        ((3, 20, 5), 2),
        ((37, 8), 1),
        ((300, 9), 1),
    ],
)
def test_softmax(dims, axis):
    check_module(programs.softmax(dims, axis))


@pytest.mark.parametrize("dims", [(8, 16, 96), (4, 768), (1, 768), (3, 1, 33), (2, 3, 5000)])
def test_layernorm(dims):
    check_module(programs.layernorm(dims))


@pytest.mark.parametrize("dims", [(8, 16, 96), (256, 768), (64, 129, 96), (3, 40), (2000, 33)])
def test_layernorm_backward(dims):
    check_module(programs.layernorm_backward(dims))


@pytest.mark.parametrize("dims", [(32, 200), (64, 5000), (3, 7), (500, 10)])
def test_cross_entropy(dims):
    check_module(programs.cross_entropy(dims))


@pytest.mark.parametrize("dims", [(4, 20, 3), (1, 17, 8), (5, 16, 2), (2, 9, 4)])
@pytest.mark.parametrize("whole", [False, True])
def test_distances(dims, whole):
    """Neighbouring short rows are lanes: of differences of all pairs of points, which are results
    or are not."""
    pairs = (dims[0], dims[1], dims[1], dims[2])

    def fn(x):
        d = b.subtract(b.broadcast(x, pairs, (0, 1, 3)), b.broadcast(x, pairs, (0, 2, 3)))
        kernel = b.exponential(
            b.negate(b.reduce(b.multiply(d, d), b.constant(0.0, "f32"), (3,), "add"))
        )
        return [kernel, d] if whole else [kernel]

    check(
        fn,
        np.random.default_rng(0).standard_normal(dims).astype(np.float32),
        optimize=True,
    )


@pytest.mark.parametrize("dims", [(4, 8, 6, 6), (2, 3, 40, 40), (16, 5)])
def test_batch_statistics(dims):
    """Rows are channels: strided pieces of memory."""
    axes = (0, *range(2, len(dims)))

    def fn(x):
        centred = b.subtract(x, b.broadcast(programs.mean(x, axes), dims, (1,)))
        var = programs.mean(b.multiply(centred, centred), axes)
        scale = b.rsqrt(b.add(var, programs.scalar(1e-5, var)))
        return [b.multiply(centred, b.broadcast(scale, dims, (1,))), var]

    check(
        fn,
        np.random.default_rng(0).standard_normal(dims).astype(np.float32),
        optimize=True,
    )


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f64"])
def test_other_types(dtype):
    x = (
        np.random.default_rng(0)
        .standard_normal((20, 130))
        .astype({"f64": np.float64, "f16": np.float16}.get(dtype, np.float32))
    )
    check(
        lambda x: b.convert(
            programs.softmax_of(b.convert(x, "f64" if dtype == "f64" else "f32")), dtype
        ),
        x,
        dtypes=[dtype],
        optimize=True,
    )


def test_narrow_values_are_kept_between_passes(monkeypatch):
    """Computed once per row, in the registers' type."""
    inside, written = math.exp_inside, []
    monkeypatch.setattr(math, "exp_inside", lambda *a: written.append(1) or inside(*a))
    counts = []
    for dtype in ("f32", "bf16", "f16"):
        x = b.parameter(0, Shape(dtype, (40, 1000)))
        m = module([x], programs.softmax_of(x))
        values = np.random.default_rng(0).standard_normal((40, 1000)).astype(numpy_dtype(dtype))
        written.clear()
        (got,), (want,) = run(m, [values], optimize=True), evaluate(m, [values])
        np.testing.assert_allclose(got, want, atol=0 if dtype == "f32" else 2e-4, rtol=1e-2)
        counts.append(len(written))
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize("symbolic", [{(0, 0): "s0"}, {(0, 1): "s0"}, {(0, 0): "s0", (0, 1): "s1"}])
def test_symbolic_softmax(symbolic):
    x = np.random.default_rng(0).standard_normal((37, 150)).astype(np.float32)
    check(lambda x: programs.softmax_of(x), x, symbolic=symbolic, optimize=True)
    check(lambda x: programs.softmax_of(x, 0), x, symbolic=symbolic, optimize=True)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_log_sum_exp_reads_values_of_two_passes(axis):
    """The result needs the maximum of the first pass and the sum of the second."""

    def fn(x):
        kept = tuple(d for d in range(3) if d != axis)
        top = b.reduce(x, b.constant(float("-inf"), "f32"), (axis,), "maximum")
        safe = b.select(b.is_finite(top), top, programs.scalar(0.0, top))
        total = b.reduce(
            b.exponential(b.subtract(x, programs.across(safe, x.shape.dims, kept))),
            programs.zero(),
            (axis,),
            "add",
        )
        out = b.add(b.log(total), safe)
        return [
            out,
            b.exponential(b.subtract(x, programs.across(out, x.shape.dims, kept))),
        ]

    check(
        fn,
        np.random.default_rng(0).standard_normal((5, 6, 13)).astype(np.float32),
        optimize=True,
    )


def test_symbolic_partial_results():
    def fn(dy, x):
        dims = x.shape.dims
        top = b.reduce(x, programs.zero(), (1,), "maximum")
        y = b.multiply(dy, b.subtract(x, b.broadcast(top, dims, (0,))))
        return [
            y,
            b.reduce(y, programs.zero(), (0,), "add"),
            b.reduce(y, programs.zero(), (0, 1), "add"),
        ]

    r = np.random.default_rng(0)
    x, y = (r.standard_normal((300, 70)).astype(np.float32) for _ in range(2))
    check(fn, x, y, symbolic={(0, 0): "s0", (1, 0): "s0"}, optimize=True)
    check(
        fn,
        x,
        y,
        symbolic={(0, 0): "s0", (1, 0): "s0", (0, 1): "s1", (1, 1): "s1"},
        optimize=True,
    )
    check(fn, x, y, optimize=True)


def test_masked_rows():
    """Rows that are all -inf but one element, and an exponential that underflows."""
    x = np.random.default_rng(0).standard_normal((6, 200)).astype(np.float32)
    x[1, 1:] = -np.inf
    x[2, 5:] = -1e9
    check(lambda x: programs.softmax_of(x), x, optimize=True)


@pytest.mark.parametrize("seed", range(20))
def test_random_programs(seed):
    check_module(random_module(seed, 30, (5, 40, 33)), seed, 1e-4)


@pytest.mark.parametrize(("dims", "dim"), [((1100, 4096), 1), ((300, 15000), 0), ((4096, 1025), 1)])
@pytest.mark.parametrize("in_place", [False, True])
def test_large_results_pass_the_caches(dims, dim, in_place):
    """Rows, columns, and rows whose vectors are not aligned; and over the operand itself."""
    from test.compiler import compiled

    x = compiled.parameter(0, "f32", *dims)
    kept = (1 - dim,)
    top = b.reduce(x, b.constant(-np.inf, "f32"), (dim,), "maximum")
    y = b.subtract(x, b.broadcast(top, dims, kept))
    value = np.random.default_rng(0).standard_normal(dims).astype(np.float32)
    compiled.check(
        compiled.module([x], y, aliases=((0, 0),) if in_place else ()),
        [value],
        0,
        optimize=True,
    )


@pytest.mark.parametrize("guarded", [False, True])
def test_long_rows_are_summed_below_their_maximum(guarded):
    """softmax and logsumexp of rows that are walked in blocks: maxima that are not finite, or lie
    late in their row."""
    rng = np.random.default_rng(0)
    v = rng.standard_normal((12, 20000)).astype(np.float32) * 3
    v[1] = np.linspace(-200, 200, 20000)
    v[2] = np.linspace(200, -200, 20000)
    v[3] = -np.inf
    v[4, :15000] = -np.inf
    v[5, 15000] = np.inf
    v[6, 100] = np.nan
    v[7, 9000:] = -np.inf
    v[8] -= 1e30
    v[9, 10000] = 1e30
    v[10] = -1e4

    def fn(x):
        m = b.reduce(x, b.constant(-np.inf, "f32"), (1,), "maximum")
        if guarded:
            m = b.select(b.compare(b.abs_(m), b.full_like(m, np.inf), "EQ"), b.full_like(m, 0), m)
        e = b.exponential(b.subtract(x, b.broadcast(m, x.shape.dims, (0,))))
        total = b.reduce(e, b.constant(0.0, "f32"), (1,), "add")
        return [
            b.divide(e, b.broadcast(total, x.shape.dims, (0,))),
            b.add(b.log(total), m),
        ]

    with np.errstate(all="ignore"):
        check(fn, v, optimize=True, rtol=1e-4)


def test_large_results_of_rows_that_start_anywhere():
    """Rows of an odd length, whose results bypass the caches."""
    check_module(programs.softmax((420, 10003), 1))


@pytest.mark.parametrize("more", [(0,), (1,), (2,), (0, 1, 2)])
def test_what_else_is_made_of_long_rows(more):
    """Results with an element per point, per column, and one of all, none of which waits for it."""

    def fn(x):
        m = b.reduce(x, b.constant(-np.inf, "f32"), (1,), "maximum")
        e = b.exponential(b.subtract(x, b.broadcast(m, x.shape.dims, (0,))))
        zero = b.constant(0.0, "f32")
        doubled = b.multiply(x, b.full_like(x, 2.0))
        others = [doubled, *(b.reduce(doubled, zero, dims, "add") for dims in ((0,), (0, 1)))]
        return [b.log(b.reduce(e, zero, (1,), "add")), *(others[i] for i in more)]

    v = np.random.default_rng(0).standard_normal((6, 9001)).astype(np.float32)
    check(fn, v, optimize=True, rtol=1e-4)


def test_large_results_beside_sums_of_rows_that_start_anywhere():
    """Vectors of a row that begins where memory is not aligned do not bypass the caches."""

    def fn(x):
        return [b.add(x, x), b.reduce(x, b.constant(0.0, "f32"), (1,), "add")]

    check(fn, np.ones((600, 9003), np.float32), optimize=True)
