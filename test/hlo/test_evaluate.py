"""The evaluator: XLA's meaning of every opcode, in particular at the edges."""

import numpy as np
import pytest

from torch_hlo.hlo.evaluate.evaluate import (
    CUSTOM_CALLS,
    MEANINGS,
    EvaluateError,
    evaluate,
)
from torch_hlo.hlo.ir import build as b
from torch_hlo.hlo.ir.instruction import Computation
from torch_hlo.hlo.ir.intern import instr
from torch_hlo.hlo.ir.opcodes import OPCODES
from torch_hlo.hlo.ir.shape import Shape, numpy_dtype
from torch_hlo.hlo.ir.window import WindowDim
from torch_hlo.hlo.text.parser import parse_module

NAMES = {
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "bool": "pred",
    "complex64": "c64",
}


def name_of(array) -> str:
    return NAMES.get(array.dtype.name, array.dtype.name.replace("uint", "u").replace("int", "s"))


def value(fn, *arrays):
    """`fn` of parameters holding `arrays`."""
    arrays = [np.asarray(a) for a in arrays]
    params = [b.parameter(i, Shape(name_of(a), a.shape)) for i, a in enumerate(arrays)]
    results = evaluate(Computation("main", tuple(params), fn(*params)), arrays)
    return results[0] if len(results) == 1 else results


def run(text, *inputs):
    results = evaluate(parse_module(text), inputs)
    return results[0] if len(results) == 1 else results


def test_every_opcode_has_a_meaning():
    assert OPCODES.keys() - MEANINGS.keys() == {"parameter"}
    assert not MEANINGS.keys() - OPCODES.keys()


def test_integer_division_never_traps():
    x, y = np.int32([7, -7, 5, -5, -(2**31)]), np.int32([2, 2, 0, 0, -1])
    assert value(b.divide, x, y).tolist() == [3, -3, -1, -1, -(2**31)]
    assert value(b.remainder, x, y).tolist() == [1, -1, 5, -5, 0]
    assert value(b.divide, np.uint8([7]), np.uint8([0])).tolist() == [255]


def test_shifts_past_the_width():
    x, n = np.int32([-8, -8, -8, 8]), np.int32([1, 31, 32, -1])
    assert value(b.shift_left, x, n).tolist() == [-16, 0, 0, 0]
    assert value(b.shift_right_arithmetic, x, n).tolist() == [-4, -1, -1, 0]
    assert value(b.shift_right_logical, x, n).tolist() == [2**31 - 4, 1, 0, 0]


@pytest.mark.parametrize(
    "dtype, expected",
    [
        ("s8", [0, 2, -2, 127, -128, 127]),
        ("u8", [0, 2, 0, 255, 0, 255]),
        ("s64", [0, 2, -2, 300, -(2**63), 2**63 - 1]),
        ("s4", [0, 2, -2, 7, -8, 7]),
        ("pred", [True] * 6),
    ],
)
def test_float_to_integer_saturates(dtype, expected):
    x = np.float32([np.nan, 2.9, -2.9, 300, -1e30, np.inf])
    assert value(lambda p: b.convert(p, dtype), x).tolist() == expected


def test_integers_wrap():
    assert value(lambda p: b.convert(p, "s8"), np.int32([200, -200])).tolist() == [
        -56,
        56,
    ]
    assert value(lambda p: b.convert(p, "s4"), np.int32([9, -9])).tolist() == [-7, 7]
    assert value(b.power, np.int32([2, 2, -1, 0, 1]), np.int32([31, -1, -3, 0, -5])).tolist() == [
        -(2**31),
        0,
        -1,
        1,
        1,
    ]


def test_nan_and_signed_zero():
    nan, x = np.float32("nan"), np.float32([1, np.nan, -0.0])
    assert np.isnan(value(b.maximum, x, np.float32([nan, 1, 1]))).tolist() == [
        True,
        True,
        False,
    ]
    assert np.signbit(value(b.sign, x)).tolist() == [False, False, True] and np.isnan(
        value(b.sign, x)[1]
    )
    assert value(lambda p: b.compare(p, p, "NE"), x).tolist() == [False, True, False]
    order = instr(
        "compare",
        (b.constant(-0.0, "f32"), b.constant(0.0, "f32")),
        direction="LT",
        type="TOTALORDER",
    )
    assert evaluate(Computation("c", (), order), [])[0]


def test_rounding():
    x = np.float32([0.5, -0.5, 1.5, 2.5, 0.49999997])
    assert value(b.round_nearest_afz, x).tolist() == [1, -1, 2, 3, 0]
    assert value(b.round_nearest_even, x).tolist() == [0, -0.0, 2, 2, 0]


def test_bf16_rounds_after_every_instruction():
    x = b.parameter(0, Shape("bf16", (1,)))
    y = b.subtract(b.add(x, b.full(0.001, "bf16", (1,))), x)
    assert evaluate(Computation("c", (x,), y), [np.float32([256])])[0].tolist() == [0]


def test_popcnt_and_clz():
    x = np.int8([0, 1, -1, 64])
    assert value(b.popcnt, x).tolist() == [0, 1, 8, 1]
    assert value(b.count_leading_zeros, x).tolist() == [8, 7, 0, 1]


def test_reduce_precision():
    x = np.float32([1 + 2**-8, 1e6, 1e-6, np.inf, -3.3])
    expected = [float(np.float16(v)) for v in x[[0, 4]]]
    y = value(lambda p: b.reduce_precision(p, 5, 10), x)
    assert y.tolist() == [expected[0], np.inf, 0, np.inf, expected[1]]


@pytest.mark.parametrize(
    "source, dtype",
    [
        (np.float32([1.5, -2]), "s32"),
        (np.float32([1.5, -2]), "u8"),
        (np.arange(8, dtype=np.uint8).reshape(2, 4), "f32"),
    ],
)
def test_bitcast_convert(source, dtype):
    y = value(lambda p: b.bitcast_convert(p, dtype), source)
    assert y.tobytes() == source.tobytes() and y.dtype == numpy_dtype(dtype)


def test_bitcast_convert_of_nibbles():
    y = value(lambda p: b.bitcast_convert(p, "u4"), np.uint8([0x21, 0xF0]))
    assert y.tolist() == [[1, 2], [0, 15]]


def test_reduce_with_any_computation():
    def fold(a, c):
        return b.add(b.multiply(a, c), c)  # not associative; still every element takes part

    x = np.float32([[1, 2], [3, 4]])
    by = b.computation(fold, (Shape("f32"), Shape("f32")))
    y = value(lambda p: b.reduce(p, b.constant(0.0, "f32"), (1,), by), x)
    assert y.shape == (2,)


def test_variadic_reduce_is_argmax():
    def pick(a, i, c, j):
        keep = b.or_(b.compare(a, c, "GT"), b.and_(b.compare(a, c, "EQ"), b.compare(i, j, "LT")))
        return b.select(keep, a, c), b.select(keep, i, j)

    x = np.random.default_rng(0).integers(0, 5, (6, 9)).astype("f")
    by = b.computation(pick, (Shape("f32"), Shape("s32")) * 2)
    best, where = value(
        lambda p: b.reduce(
            (p, b.iota("s32", (6, 9), 1)),
            (b.constant(-np.inf, "f32"), b.constant(0, "s32")),
            (1,),
            by,
        ),
        x,
    )
    assert np.array_equal(best, x.max(1)) and np.array_equal(where, x.argmax(1))


def test_nothing_to_evaluate():
    assert value(b.cholesky, np.zeros((2, 0, 0), "f")).shape == (2, 0, 0)
    text = """am { a = f32[] parameter(0)
  i = s32[] parameter(1)
  b = f32[] parameter(2)
  j = s32[] parameter(3)
  g = pred[] compare(a, b), direction=GE
  v = f32[] select(g, a, b)
  w = s32[] select(g, i, j)
  ROOT t = (f32[], s32[]) tuple(v, w) }
ENTRY e { x = f32[0,3] parameter(0)
  y = s32[0,3] parameter(1)
  i = f32[] constant(-inf)
  k = s32[] constant(7)
  r = (f32[0], s32[0]) reduce(x, y, i, k), dimensions={1}, to_apply=am
  s = (f32[3], s32[3]) reduce(x, y, i, k), dimensions={0}, to_apply=am
  p = s32[0] get-tuple-element(r), index=1
  q = s32[3] get-tuple-element(s), index=1
  ROOT t = (s32[0], s32[3]) tuple(p, q) }"""
    none, three = run(text, np.zeros((0, 3), "f"), np.zeros((0, 3), np.int32))
    assert none.shape == (0,) and three.tolist() == [7, 7, 7]


def test_reduce_window_with_dilations_and_padding():
    x = np.float32([1, 2, 3])
    window = (WindowDim(2, 1, 1, 1, 2, 2),)  # 0 1 . 2 . 3 0 with holes, taps two apart
    y = value(lambda p: b.reduce_window(p, b.constant(0.0, "f32"), window, "add"), x)
    assert y.tolist() == [0, 3, 0, 5, 0]


def test_select_and_scatter():
    x, source = np.float32([1, 3, 3, 0]), np.float32([10, 20, 30])
    window = (WindowDim(2),)
    y = value(
        lambda p, s: b.select_and_scatter(p, s, b.constant(0.0, "f32"), window, "GE", "add"),
        x,
        source,
    )
    assert y.tolist() == [0, 30, 30, 0]


def test_gather_clamps_and_scatter_drops():
    x = np.arange(12, dtype="f").reshape(4, 3)
    i = np.int32([[-5], [2], [9]])
    rows = value(
        lambda p, q: b.gather(
            p,
            q,
            offset_dims=(1,),
            collapsed_slice_dims=(0,),
            start_index_map=(0,),
            index_vector_dim=1,
            slice_sizes=(1, 3),
        ),
        x,
        i,
    )
    assert np.array_equal(rows, x[[0, 2, 3]])
    u = np.ones((3, 3), "f")
    y = value(
        lambda p, q, r: b.scatter(
            p,
            q,
            r,
            "add",
            update_window_dims=(1,),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0,),
            index_vector_dim=1,
        ),
        x,
        i,
        u,
    )
    assert np.array_equal(y - x, [[0] * 3, [0] * 3, [1] * 3, [0] * 3])


def test_scatter_applies_updates_in_order():
    by = b.computation(lambda old, new: b.add(b.add(old, old), new), (Shape("f32"), Shape("f32")))
    y = value(
        lambda p, q, r: b.scatter(
            p,
            q,
            r,
            by,
            update_window_dims=(),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0,),
            index_vector_dim=1,
        ),
        np.float32([0, 1]),
        np.int32([[0], [0], [1], [0]]),
        np.float32([1, 2, 3, 4]),
    )
    assert y.tolist() == [((1) * 2 + 2) * 2 + 4, 5]


def test_dynamic_slices_clamp():
    x, at = np.arange(5, dtype="f"), np.int32(9)
    assert value(lambda p, i: b.dynamic_slice(p, (i,), (2,)), x, at).tolist() == [3, 4]
    assert value(
        lambda p, u, i: b.dynamic_update_slice(p, u, (i,)),
        x,
        np.float32([7, 8]),
        np.int32(-3),
    ).tolist() == [7, 8, 2, 3, 4]


@pytest.mark.parametrize("direction", ["LT", "GT"])
def test_sort_is_stable_and_puts_nan_last(direction):
    x = np.float32([2, np.nan, 1, 2, -0.0, 0.0, 1])
    i = np.arange(7, dtype=np.int32)
    y, j = value(lambda p, q: b.sort((p, q), 0, direction), x, i)
    expected = np.argsort(x, kind="stable") if direction == "LT" else [1, 0, 3, 2, 6, 4, 5]
    assert j.tolist() == list(expected) and np.array_equal(y, x[j], equal_nan=True)


def test_sort_with_a_comparator_that_calls():
    inner = b.computation(
        lambda p: b.reduce(b.broadcast(p, (2,)), b.constant(0.0, "f32"), (0,), "add"),
        (Shape("f32"),),
    )
    by = b.computation(
        lambda p, q: b.compare(b.call(inner, (p,)), b.call(inner, (q,)), "LT"),
        (Shape("f32"), Shape("f32")),
    )
    assert value(lambda p: b.sort(p, 0, by), np.float32([3, 1, 2])).tolist() == [
        1,
        2,
        3,
    ]


def test_random_permutations_sort_like_numpy():
    x = np.random.default_rng(1).integers(0, 50, (3, 200)).astype(np.int32)
    by = b.computation(
        lambda p, q: b.compare(b.negate(p), b.negate(q), "GT"),
        (Shape("s32"), Shape("s32")),
    )
    assert np.array_equal(value(lambda p: b.sort(p, 1, by), x), np.sort(x, 1))


def test_while_and_conditional():
    text = """
cond { s = (s32[], f32[]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] constant(5)
  ROOT r = pred[] compare(i, n), direction=LT }
body { s = (s32[], f32[]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  one = s32[] constant(1)
  j = s32[] add(i, one)
  v = f32[] get-tuple-element(s), index=1
  w = f32[] add(v, v)
  ROOT r = (s32[], f32[]) tuple(j, w) }
ENTRY e { i = s32[] parameter(0)
  v = f32[] parameter(1)
  s = (s32[], f32[]) tuple(i, v)
  ROOT w = (s32[], f32[]) while(s), condition=cond, body=body }"""
    assert [float(v) for v in run(text, 0, 1.5)] == [5, 48]
    scalar = Shape("f32")
    branches = [
        b.computation(lambda p, k=k: b.add(p, b.constant(float(k), "f32")), (scalar,))
        for k in range(3)
    ]
    for index, expected in ((0, 0), (2, 2), (-1, 2), (7, 2)):
        assert (
            value(
                lambda i, x: b.conditional(i, branches, (x,) * 3),
                np.int32(index),
                np.float32(0),
            )
            == expected
        )


def test_linear_algebra():
    rng = np.random.default_rng(0)
    a, y = rng.standard_normal((2, 4, 4)), rng.standard_normal((2, 4, 4))
    lower = np.tril(a) + 4 * np.eye(4)
    for left in (True, False):
        for transpose in ("NO_TRANSPOSE", "TRANSPOSE"):
            x = value(
                lambda p, q: b.triangular_solve(p, q, left_side=left, transpose_a=transpose),
                lower,
                y,
            )
            op = lower if transpose == "NO_TRANSPOSE" else lower.swapaxes(1, 2)
            np.testing.assert_allclose(op @ x if left else x @ op, y, atol=1e-10)
    spd = a @ a.swapaxes(1, 2) + np.eye(4)
    np.testing.assert_allclose(value(b.cholesky, spd), np.linalg.cholesky(spd), rtol=1e-10)
    assert np.isnan(value(b.cholesky, -spd)[0, 0, 0])


def test_rng_bit_generator_is_xlas():
    # From XLA's CPU backend (jaxlib 0.10.2), state = [0x123456789abcdef0, 2**64 - 2, 5].
    state = np.uint64([0x123456789ABCDEF0, 2**64 - 2, 5])
    fry, bits = value(
        lambda s: b.rng_bit_generator(s, "rng_three_fry", Shape("u32", (5,))), state[:2]
    )
    assert (
        bits.tolist() == [1010520186, 1888741164, 2754706343, 569486026, 1593802813] and fry[1] == 1
    )
    new, bits = value(
        lambda s: b.rng_bit_generator(s, "rng_default", Shape("u32", (4,))), state[:2]
    )
    assert bits.tolist() == [3151517439, 3080049825, 2645875639, 2972309415] and new[1] == 2**64 - 1
    new, bits = value(lambda s: b.rng_bit_generator(s, "rng_philox", Shape("u64", (2,))), state)
    assert bits.tolist() == [
        15813803508474477396,
        1354861976551600639,
    ] and new.tolist()[1:] == [2**64 - 1, 5]


def test_custom_calls_are_python_functions(monkeypatch):
    monkeypatch.setitem(CUSTOM_CALLS, "twice", lambda x, v: 2 * v)
    assert value(lambda p: b.custom_call("twice", (p,), p.shape), np.float32([1, 2])).tolist() == [
        2,
        4,
    ]
    with pytest.raises(EvaluateError, match="'thrice' is not registered"):
        value(lambda p: b.custom_call("thrice", (p,), p.shape), np.float32([1]))


def test_collectives_of_one_device():
    text = "ROOT %0 = f32[4] all-gather(%1), dimensions={0}"
    assert run("%1 = f32[4] parameter(0)\n" + text, np.arange(4, dtype="f")).tolist() == [
        0,
        1,
        2,
        3,
    ]
    with pytest.raises(EvaluateError, match="does not fit a group of 1 device"):
        run("%1 = f32[2] parameter(0)\n" + text, np.arange(2, dtype="f"))


def test_bad_inputs():
    x = b.parameter(0, Shape("f32", (2,)))
    c = Computation("main", (x,), b.negate(x))
    for bad, message in (
        ((), "takes 1 inputs, got 0"),
        ((np.zeros(3, "f"),), "2 is not 3"),
        ((np.zeros(2, np.int32),), "got an array of int32"),
        ((np.zeros((1, 2), "f"),), "sizes"),
    ):
        with pytest.raises(EvaluateError, match=message):
            evaluate(c, bad)


def test_deep_programs_do_not_recurse():
    x = y = b.parameter(0, Shape("f32"))
    for _ in range(20000):
        y = b.negate(y)
    assert evaluate(Computation("main", (x,), y), [1.0])[0] == 1
