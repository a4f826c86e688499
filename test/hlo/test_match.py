"""Patterns and the rewrite driver."""

from __future__ import annotations

import gc
import weakref

import pytest

from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.instruction import Computation, Meta, Module
from torch_hlo.hlo.ir.intern import instr
from torch_hlo.hlo.ir.match import (
    RewriteError,
    const,
    inline,
    lift,
    new_mark,
    op,
    rewrite,
    rewrite_module,
    rules,
    splat,
    var,
)
from torch_hlo.hlo.ir.shape import Shape

F4 = Shape("f32", (4,))
X, Y = h.parameter(0, F4), h.parameter(1, F4)
x, y, c = var("x"), var("y"), const(name="c")


def module(root):
    return Module("m", Computation("main", (X, Y), root))


def apply(root, *rows):
    return rewrite(module(root), rules(*rows)).entry.root


def test_same_name_is_the_same_instruction():
    row = (op("subtract", x, x), lambda x: h.full_like(x, 0))
    assert splat(apply(h.subtract(X, X), row)) == 0
    assert apply(h.subtract(X, Y), row).op == "subtract"


def test_commutative_opcodes_match_both_ways():
    row = (op("add", op("negate", x), y), lambda x, y: h.subtract(y, x))
    assert (
        apply(h.add(h.negate(X), Y), row) is apply(h.add(Y, h.negate(X)), row) is h.subtract(Y, X)
    )
    nested = (op("multiply", op("add", x, op("negate", y)), x), lambda x, y: y)
    for root in (
        h.multiply(h.add(h.negate(Y), X), X),
        h.multiply(X, h.add(X, h.negate(Y))),
    ):
        assert apply(root, nested) is Y


def test_constants():
    assert (
        splat(h.full(2.5, "f32", (3, 3))) == 2.5
        and splat(X) is None
        and splat(h.constant([1, 2], "s32")) is None
    )
    row = (op("add", x, const(0)), lambda x: x)
    assert apply(h.add(X, h.full_like(X, 0.0)), row) is X
    assert apply(h.add(X, h.full_like(X, -0.0)), row).op == "add"
    assert apply(
        h.multiply(X, h.full_like(X, 3)),
        (op("multiply", x, c), lambda x, c: h.add(x, c)),
    ) is h.add(X, h.full_like(X, 3))


def test_guard_and_decline():
    row = (op("negate", x), lambda x: x, lambda out, x: x is Y)
    assert apply(h.negate(Y), row) is Y and apply(h.negate(X), row) is h.negate(X)
    assert apply(h.negate(X), (op("negate", x), lambda x: None)) is h.negate(X)


def test_new_instructions_are_rewritten_too():
    root = h.power(X, h.full_like(X, 4))
    fourth = (
        op("power", x, const(4)),
        lambda x: h.power(h.power(x, h.full_like(x, 2)), h.full_like(x, 2)),
    )
    square = (op("power", x, const(2)), lambda x: h.multiply(x, x))
    expected = h.multiply(h.multiply(X, X), h.multiply(X, X))
    assert apply(root, fourth, square) is expected


def test_unchanged_is_the_same_module():
    m = module(h.add(X, Y))
    assert rewrite(m, rules((op("negate", x), lambda x: x))) is m


def test_shape_is_checked():
    with pytest.raises(
        RewriteError,
        match=(
            r"rule negate \(test_match:\d+\) turned negate of shape f32\[4\] into constant of shape"
            r" f32\[\]"
        ),
    ):
        apply(h.negate(X), (op("negate", x), lambda x: h.constant(0, "f32")))


def test_rules_that_fight():
    there = (op("negate", x), lambda x: h.subtract(h.full_like(x, 0), x))
    back = (op("subtract", const(0), x), lambda x: h.negate(x))
    with pytest.raises(
        RewriteError,
        match=r"rules negate .* and subtract .* undo each other on subtract f32\[4\]",
    ):
        apply(h.negate(X), there, back)
    with pytest.raises(RewriteError, match="into something that contains it"):
        apply(h.negate(X), (op("negate", x), lambda out: h.add(out, out)))
    with pytest.raises(
        RewriteError,
        match="firings on a program of 2 instructions; the last rules were negate",
    ):
        apply(h.negate(X), (op("negate", x), lambda x: h.negate(h.add(x, x))))


def test_deep_programs():
    root = X
    for _ in range(20_000):
        root = h.negate(h.abs_(root))
    assert apply(root, (op("negate", x), lambda x: x), (op("abs", x), lambda x: x)) is X


def test_called_computations_once_each():
    seen = []

    def build(x):
        seen.append(x)
        return x

    scalar = Shape("f32")
    double = h.computation(lambda a, b: h.add(h.negate(h.negate(a)), b), (scalar, scalar))
    root = h.add(
        h.reduce(X, h.constant(0, "f32"), (0,), double),
        h.reduce(Y, h.constant(0, "f32"), (0,), double),
    )
    result = apply(root, (op("negate", op("negate", x)), build))
    assert len(seen) == 1 and result.operands[0]["to_apply"].root.operands[0].op == "parameter"


def test_source_locations_follow():
    root = h.negate(h.negate(h.exponential(X)))
    root2 = h.log(root)
    root2.meta = Meta("", "aten::log", "model.py:3")
    result = apply(root2, (op("negate", op("negate", x)), lambda x: x))
    assert result.meta.source == "model.py:3"


def test_settled_instructions_are_not_looked_at_again_and_can_be_collected():
    asked = []

    def fire(x):
        asked.append(x.op)
        return None, ""

    mark, root = new_mark(), h.atan2(h.sine(X), Y)
    rewrite_module(module(root), fire, mark)
    assert asked.count("sine") == asked.count("atan2") == 1
    rewrite_module(module(h.negate(root)), fire, mark)
    assert asked.count("sine") == asked.count("atan2") == 1 and asked.count("negate") == 1
    gone = weakref.ref(root)
    del root
    gc.collect()
    assert gone() is None


def test_inline_and_lift():
    scalar = Shape("f32")
    fma = h.computation(
        lambda a, b: h.add(h.multiply(a, b), h.constant(1, "f32")), (scalar, scalar)
    )
    assert lift(fma, (X, Y)) is h.add(h.multiply(X, Y), h.full(1, "f32", (4,)))
    wide = h.computation(lambda a, b: h.add(a, b), (F4, F4))
    assert inline(wide, (Y, X)) is h.add(Y, X)
    assert lift(h.computation(lambda a: h.reshape(h.reshape(a, (1,)), ()), (scalar,)), (X,)) is None
    assert instr("add", (X, Y)) is h.add(X, Y)
