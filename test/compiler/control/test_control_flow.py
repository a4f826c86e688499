"""while, conditional, call, tuples through them, and the opcodes that only pass values on."""

import numpy as np
import pytest

from test.compiler.steps import check
from torch_hlo.hlo.ir import build
from torch_hlo.hlo.ir.intern import instr
from torch_hlo.hlo.ir.shape import Shape, tuple_shape

V = Shape("f32", (5,))
STATE = tuple_shape(Shape("s32"), V)
part = build.get_tuple_element


def test_while():
    def body(t):
        return build.add(part(t, 0), build.constant(1, "s32")), build.add(part(t, 1), part(t, 1))

    condition = build.computation(
        lambda t: build.compare(part(t, 0), build.constant(10, "s32"), "LT"), [STATE]
    )
    for start in (0, 9, 10):
        check(
            lambda i, v: build.while_(
                condition, build.computation(body, [STATE]), build.tuple_(i, v)
            ),
            np.int32(start),
            np.arange(5, dtype="float32"),
        )


def test_while_swaps():
    state = tuple_shape(Shape("s32"), V, V)
    body = build.computation(
        lambda t: (
            build.add(part(t, 0), build.constant(1, "s32")),
            part(t, 2),
            part(t, 1),
        ),
        [state],
    )
    condition = build.computation(
        lambda t: build.compare(part(t, 0), build.constant(3, "s32"), "LT"), [state]
    )
    check(
        lambda i, a, b: build.while_(condition, body, build.tuple_(i, a, b)),
        np.int32(0),
        np.arange(5, dtype="float32"),
        np.ones(5, "float32"),
    )


def scaled(k):
    return build.computation(lambda v: build.multiply(v, build.full(float(k), "f32", (5,))), [V])


@pytest.mark.parametrize("index", [-1, 0, 1, 2, 7])
def test_conditional(index):
    check(
        lambda i, v: build.conditional(i, [scaled(k + 2) for k in range(3)], [v, v, v]),
        np.int32(index),
        np.arange(5, dtype="float32"),
    )


@pytest.mark.parametrize("value", [True, False])
def test_conditional_of_predicate(value):
    check(
        lambda i, v: build.conditional(i, [scaled(2), scaled(3)], [v, v]),
        np.bool_(value),
        np.arange(5, dtype="float32"),
    )


def test_call_and_pass_through():
    check(lambda v: build.call(scaled(3), [v]), np.arange(5, dtype="float32"))
    check(
        lambda v: build.add(instr("opt-barrier", (build.negate(v),)), v),
        np.arange(5, dtype="float32"),
    )
    check(
        lambda v: instr("copy-done", (instr("copy-start", (v,)),)),
        np.arange(5, dtype="float32"),
    )
    check(lambda v: build.get_dimension_size(v, 0), np.arange(5, dtype="float32"))
    check(
        lambda v: build.get_dimension_size(v, 0),
        np.arange(5, dtype="float32"),
        symbolic={(0, 0): "s0"},
    )
