"""Reductions of every type, opcode and set of dimensions against the evaluator."""

from __future__ import annotations

import re

import numpy as np
import pytest

from test.compiler.steps import check, module_of
from torch_hlo.compiler.compile import compile_module
from torch_hlo.hlo.ir import build as b
from torch_hlo.hlo.ir.instruction import Instruction
from torch_hlo.hlo.ir.numeric import round_to
from torch_hlo.hlo.ir.shape import Shape, numpy_dtype

rng = np.random.default_rng(0)
_INIT = {"add": 0, "multiply": 1, "or": 0, "and": -1, "xor": 0}


def values(dtype: str, *dims: int) -> np.ndarray:
    kind = numpy_dtype(dtype)
    if dtype == "pred":
        return rng.random(dims) < 0.9
    if kind.kind in "iu":
        return rng.integers(0 if kind.kind == "u" else -5, 6, dims).astype(kind)
    x = rng.standard_normal(dims)
    if kind.kind == "c":
        x = x + 1j * rng.standard_normal(dims)
    return round_to(x, dtype) if kind.kind == "f" else x.astype(kind)


def initial(op: str, dtype: str) -> Instruction:
    if op in ("maximum", "minimum"):
        return b.constant(b.lowest(dtype) if op == "maximum" else b.highest(dtype), dtype)
    if op == "and":
        return b.constant(
            True if dtype == "pred" else np.array(-1).astype(numpy_dtype(dtype)), dtype
        )
    return b.constant(_INIT[op], dtype)


def folded(op: str, dims):
    return lambda x: b.reduce(x, initial(op, x.shape.dtype), dims, op)


FLOATS, INTS = ("f32", "f64", "bf16", "f16"), ("s8", "u8", "s32", "s64", "u32")
CASES = [(t, op) for t in FLOATS for op in ("add", "maximum", "minimum", "multiply")]
CASES += [
    (t, op) for t in INTS for op in ("add", "maximum", "minimum", "and", "or", "xor", "multiply")
]
CASES += [("pred", op) for op in ("and", "or", "maximum", "minimum")] + [
    ("c64", "add"),
    ("c128", "add"),
    ("c64", "multiply"),
]


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_every_type_and_opcode(dtype, op):
    x = values(dtype, 3, 37)
    for dims in ((1,), (0,), (0, 1)):
        y = x if op != "multiply" or x.dtype.kind not in "fc" else (1 + x / 20).astype(x.dtype)
        check(folded(op, dims), y, dtypes=[dtype])


@pytest.mark.parametrize(
    "dims",
    [
        (0,),
        (1,),
        (2,),
        (3,),
        (0, 1),
        (0, 2),
        (0, 3),
        (1, 2),
        (1, 3),
        (2, 3),
        (0, 1, 2),
        (0, 2, 3),
        (1, 2, 3),
        (0, 1, 2, 3),
    ],
)
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (4, 1, 40, 33), (33, 2, 1, 1)])
def test_every_set_of_dimensions(shape, dims):
    x = values("f32", *shape)
    check(folded("add", dims), x)
    check(folded("maximum", dims), x)


@pytest.mark.parametrize("length", [2, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "s8"])
def test_short_rows(dtype, length):
    """A row per lane: up to eight elements apart, lanes are picked from whole vectors."""
    check(folded("maximum", (1,)), values(dtype, 531, length))


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((1 << 20,), (0,)),
        ((3, 400000), (1,)),
        ((5000, 70), (0,)),
        ((700, 3000), (0,)),
        ((7, 3000, 9), (1,)),
        ((40, 3, 3, 500), (0, 3)),
        ((2, 9000, 3), (1, 2)),
        ((4, 5000, 40), (0, 1)),
        ((100000, 2), (1,)),
    ],
)
def test_large_sums_are_accurate(shape, dims):
    x = (rng.random(shape) + 0.5).astype(np.float32)
    check(folded("add", dims), x, rtol=1e-6, atol=0)


def argmax_computation(dtype: str):
    def better(a, i, c, j):
        first = b.or_(b.compare(a, c, "GT"), b.and_(b.compare(a, c, "EQ"), b.compare(i, j, "LT")))
        return b.tuple_(b.select(first, a, c), b.select(first, i, j))

    return b.computation(better, (Shape(dtype), Shape("s64"), Shape(dtype), Shape("s64")), "argmax")


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((5, 100), 1),
        ((100, 5), 0),
        ((3, 50, 20), 1),
        ((20000,), 0),
        ((2, 40000), 1),
        ((400, 70), 0),
        ((4, 30, 600), 1),
    ],
)
@pytest.mark.parametrize("optimize", [False, True])
def test_argmax(shape, dim, optimize):
    def argmax(x):
        index = b.iota("s64", x.shape.dims, dim)
        both = b.reduce(
            [x, index],
            [b.constant(b.lowest("f32"), "f32"), b.constant(0, "s64")],
            (dim,),
            argmax_computation("f32"),
        )
        return [b.get_tuple_element(both, 0), b.get_tuple_element(both, 1)]

    check(argmax, rng.integers(0, 50, shape).astype(np.float32), optimize=optimize)


def test_initial_value_counts_once():
    x = values("f32", 50, 70)
    for dims in ((0,), (1,), (0, 1)):
        check(lambda x, dims=dims: b.reduce(x, b.constant(3.5, "f32"), dims, "add"), x)
    check(lambda x, i: b.reduce(x, i, (1,), "maximum"), x, np.float32(1.5))


def test_nan_and_infinity():
    x = values("f32", 4, 40)
    x[1, 7], x[2, 3] = np.nan, np.inf
    check(folded("maximum", (1,)), x)
    check(folded("minimum", (0,)), x)
    check(folded("add", (1,)), x)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (1,), (1, 1), (3, 1)])
def test_empty_and_single(shape):
    x = values("f32", *shape)
    for dims in [(d,) for d in range(len(shape))] + [tuple(range(len(shape)))]:
        check(folded("add", dims), x)
        check(folded("maximum", dims), x, optimize=True)


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize(
    "symbolic",
    [{(0, 0): "s0"}, {(0, 2): "s0"}, {(0, 0): "s0", (0, 1): "s1", (0, 2): "s2"}],
)
def test_symbolic_sizes(dims, symbolic):
    check(folded("add", dims), values("f32", 5, 6, 35), symbolic=symbolic, optimize=True)


@pytest.mark.parametrize("at", [0, 1, 2, 11, 63, 66, 125, 129])
@pytest.mark.parametrize("symbolic", [{}, {(0, 0): "s0"}])
def test_several_folds_see_every_lane(at, symbolic):
    """One extreme value, wherever it stands. LLVM 22 left half of the lanes out of the first of two
    folds on machines with AVX-512."""

    def both(x):
        return folded("maximum", (0,))(x), folded("minimum", (0,))(x)

    for dtype in ("s32", "f32", "s64", "s8"):
        x = np.zeros(130, numpy_dtype(dtype))
        for extreme in (7, -7):
            x[at] = extreme
            check(both, x, symbolic=symbolic, optimize=True)


def test_producers_and_epilogues_are_one_step():
    def fn(x, y):
        total = b.reduce(b.multiply(b.exponential(x), y), b.constant(0.0, "f32"), (0, 1), "add")
        return b.sqrt(total)

    x = values("f32", 64, 300)
    check(fn, x, np.abs(x), optimize=True)
    text: list[str] = []
    compile_module(
        module_of(fn, [Shape("f32", (64, 300))] * 2),
        dump=lambda name, t: text.append(t) if name == "buffers" else None,
    )
    assert "sqrt" not in text[0].split("\n", 1)[0]


def test_results_do_not_depend_on_threads():
    from torch_hlo import config

    x = values("f32", 4096, 130)
    with config.override(THREADS=1):
        one = check(folded("add", (0,)), x)(x)[0]
    with config.override(THREADS=2):
        two = check(folded("add", (0,)), x)(x)[0]
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("dims", "cut", "axis"),
    [
        ((2, 40, 9, 33), (0, 0, 0, 1), 1),
        ((3, 20, 40), (0, 0, 20), 2),
        ((6, 5, 4, 30), (0, 1, 2, 3), 0),
        ((300, 5, 3), (0, 1, 1), 1),
    ],
)
@pytest.mark.parametrize("op", ["slice", "pad"])
def test_parts_of_arrays_are_read_in_vectors(dims, cut, axis, op):
    """Rows of a part are no neighbours: vectors that run over several would be gathered."""

    def squares(x: Instruction) -> Instruction:
        moved = (
            b.slice_(x, cut, dims)
            if op == "slice"
            else b.pad(x, b.constant(0, "f32"), [(c, 0, 0) for c in cut])
        )
        return b.reduce(b.multiply(moved, moved), b.constant(0, "f32"), (axis,), "add")

    found = check(squares, values("f32", *dims), rtol=1e-5, atol=1e-5, optimize=True)
    texts: list[str] = []
    compile_module(
        found.module,
        dump=lambda name, value: texts.append(value) if name == "llvm" else None,
    )
    assert dims[-1] < 16 or "masked.gather" not in "\n".join(texts)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "s32", "c64"])
@pytest.mark.parametrize(("dims", "axis"), [((2000, 41), 0), ((4, 300, 37), 1), ((300, 19), 0)])
def test_accumulators_are_whole_vectors(dims, axis, dtype):
    """Processors wait long for what was stored under a mask: only results are."""

    def total(x: Instruction) -> Instruction:
        shifted = b.add(x, b.broadcast(b.constant(1, dtype), x.dims, ()))
        return b.reduce(shifted, b.constant(0, dtype), (axis,), "add")

    found = check(total, values(dtype, *dims), dtypes=[dtype], rtol=1e-2, atol=1e-2, optimize=True)
    texts: list[str] = []
    compile_module(
        found.module,
        dump=lambda name, value: texts.append(value) if name == "llvm" else None,
    )
    stores = re.findall(r"call void @llvm.masked.store.*", "\n".join(texts))
    assert dtype == "c64" or len(stores) <= 1, stores
