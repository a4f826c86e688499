"""The first few of sorted rows, against the sort itself; and which sorts become that."""

from __future__ import annotations

import numpy as np
import pytest

from test.compiler.compiled import check, module, parameter
from test.support import short
from torch_hlo.compiler.sort.partial_sort import partial_sort
from torch_hlo.hlo.ir import build as b
from torch_hlo.hlo.ir.numeric import round_to

rng = np.random.default_rng(0)


def first(dtype: str, dims, k: int, axis: int, direction: str, cut: int = 0):
    x = parameter(0, dtype, *dims)
    both = b.sort([x, b.iota("s64", dims, axis)], axis, direction, True)
    limits = [*dims]
    limits[axis] = k
    starts = [0] * len(dims)
    starts[axis] = cut
    return module(
        [x],
        *(b.slice_(b.get_tuple_element(both, i), tuple(starts), tuple(limits)) for i in (0, 1)),
    )


def values(dtype: str, dims):
    v = rng.standard_normal(dims) * 30
    if dtype.startswith(("f", "bf")):
        v = np.where(
            rng.random(dims) < 0.1,
            rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0], dims),
            v,
        )
    return round_to(np.abs(v) if dtype.startswith("u") else v, dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64", "s8", "u8", "s64", "f16"])
@pytest.mark.parametrize("direction", ["LT", "GT"])
def test_types_and_ties(dtype, direction):
    """Small integers and rounded floats have many equal elements: they stay in the order of their
    positions."""
    m = first(dtype, (3, 333), 17, 1, direction)
    assert "custom" in short(partial_sort(m))
    check(m, [values(dtype, (3, 333))], 0, optimize=True)


@pytest.mark.parametrize(
    ("dims", "axis", "k"),
    [((1000,), 0, 1), ((4, 130, 6), 1, 5), ((70, 3), 0, 4), ((20, 512), 1, 128)],
)
def test_shapes(dims, axis, k):
    check(first("f32", dims, k, axis, "GT"), [values("f32", dims)], 0, optimize=True)


@pytest.mark.parametrize(
    "make", [lambda n: np.arange(n), lambda n: -np.arange(n), lambda n: np.zeros(n)]
)
def test_rows_in_order(make):
    """Rows that bring better and better elements are sorted after all."""
    x = np.stack([make(2000), make(2000) * 2.5]).astype(np.float32)
    check(first("f32", (2, 2000), 40, 1, "GT"), [x], 0, optimize=True)


@pytest.mark.parametrize(("n", "k", "cut"), [(2000, 40, 39), (100, 20, 10), (50000, 200, 199)])
def test_one_of_the_first(n, k, cut):
    """The k-th value, and the threshold of sampling: what is read starts later; of a long row many
    are kept."""
    m = first("f32", (2, n), k, 1, "GT", cut)
    assert "custom" in short(partial_sort(m))
    check(m, [rng.standard_normal((2, n)).astype(np.float32)], 0, optimize=True)


def test_one_after_another():
    """Nearest neighbours of what the nearest neighbours were: the second sort is of what the first
    selection gives."""
    x = parameter(0, "f32", 6, 200)

    def nearest(y):
        both = b.sort([y, b.iota("s64", (6, 200), 1)], 1, "GT", True)
        return b.slice_(b.get_tuple_element(both, 0), (0, 0), (6, 8))

    again = b.multiply(
        x,
        b.broadcast(b.reduce(nearest(x), b.constant(0.0, "f32"), (1,), "add"), (6, 200), (0,)),
    )
    m = module([x], nearest(again))
    assert short(partial_sort(m)).count("kind=custom") == 2
    check(m, [values("f32", (6, 200)).clip(-9, 9)], 0, optimize=True)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64", "s8", "u8", "s64", "f16"])
@pytest.mark.parametrize("direction", ["LT", "GT"])
def test_one_in_the_middle(dtype, direction):
    """Of equal elements it is the one that a stable sort would leave there."""
    m = first(dtype, (3, 333), 167, 1, direction, 166)
    assert '{"nth":166}' in short(partial_sort(m))
    check(m, [values(dtype, (3, 333))], 0, optimize=True)


@pytest.mark.parametrize(
    ("dims", "axis", "k"),
    [
        ((1000,), 0, 1000),
        ((4, 130, 6), 1, 65),
        ((70, 3), 0, 35),
        ((64, 64, 2), 0, 33),
        ((20, 5000), 1, 2500),
    ],
)
def test_one_in_the_middle_by_shape(dims, axis, k):
    check(
        first("f32", dims, k, axis, "GT", k - 1),
        [values("f32", dims)],
        0,
        optimize=True,
    )


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_across_memory_are_transposed(axis):
    m = first("f32", (200, 70, 30), 5, axis, "GT")
    assert "transpose" in short(partial_sort(m))
    check(m, [values("f32", (200, 70, 30))], 0, optimize=True)


def test_what_stays_a_sort():
    for m in (
        first("f32", (3, 100), 60, 1, "GT"),
        first("f32", (3, 4000), 500, 1, "LT"),
        first("f32", (3, 50), 25, 1, "LT", 24),
    ):
        assert partial_sort(m) is m  # most of a row; too many to keep in order; a short row
    m = first("f32", (3, 100), 5, 1, "GT")
    root = m.entry.root
    whole = b.tuple_(*root.operands, root.operands[0].operands[0])
    assert partial_sort(m.with_root(whole)) is not None and "custom" not in short(
        partial_sort(m.with_root(whole))
    )
