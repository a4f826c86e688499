"""algebra: every line of RULES is a pair (program, what it becomes); negative cases say why they
must stay."""

from __future__ import annotations

import math

from test.support import HloTestCase
from torch_hlo.compiler.simplify.algebra import algebra, exact
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.dim import symbol
from torch_hlo.hlo.ir.intern import instr
from torch_hlo.hlo.ir.shape import Shape

INF = math.inf


def p(dtype="f32", dims=(4, 3), index=0):
    return h.parameter(index, Shape(dtype, dims))


def like(x, value):
    return h.full_like(x, value)


X, Y, Z = p(), p(index=1), p(index=2)
I, J = p("s32"), p("s32", index=1)  # noqa: E741
U, B, P = p("u32"), p("pred"), p("pred", index=3)
V = p("f32", (3,))

ARITHMETIC = {
    "x + 0": (h.add(I, like(I, 0)), I),
    "0 + x": (h.add(like(I, 0), I), I),
    "x + -0.0": (h.add(X, like(X, -0.0)), X),
    "c + x": (h.add(like(X, 2), X), h.add(X, like(X, 2))),
    "x - 0": (h.subtract(I, like(I, 0)), I),
    "x - 0.0": (h.subtract(X, like(X, 0.0)), X),
    "x - x": (h.subtract(I, I), like(I, 0)),
    "0 - x": (h.subtract(like(I, 0), I), h.negate(I)),
    "-0.0 - x": (h.subtract(like(X, -0.0), X), h.negate(X)),
    "x - -y": (h.subtract(X, h.negate(Y)), h.add(X, Y)),
    "x + -y": (h.add(X, h.negate(Y)), h.subtract(X, Y)),
    "-y + x": (h.add(h.negate(Y), X), h.subtract(X, Y)),
    "--x": (h.negate(h.negate(X)), X),
    "-(i - j)": (h.negate(h.subtract(I, J)), h.subtract(J, I)),
    "x * 1": (h.multiply(X, like(X, 1)), X),
    "x * -1": (h.multiply(X, like(X, -1)), h.negate(X)),
    "i * 0": (h.multiply(I, like(I, 0)), like(I, 0)),
    "-x * -y": (h.multiply(h.negate(X), h.negate(Y)), h.multiply(X, Y)),
    "-x / -y": (h.divide(h.negate(X), h.negate(Y)), h.divide(X, Y)),
    "x / 1": (h.divide(X, like(X, 1)), X),
    "x / -1": (h.divide(X, like(X, -1)), h.negate(X)),
    "x / 8": (h.divide(X, like(X, 8)), h.multiply(X, like(X, 0.125))),
    "i % 1": (h.remainder(I, like(I, 1)), like(I, 0)),
    "x ** 0": (h.power(X, like(X, 0)), like(X, 1)),
    "x ** 1": (h.power(X, like(X, 1)), X),
    "x ** 2": (h.power(X, like(X, 2)), h.multiply(X, X)),
    "x ** 3": (h.power(X, like(X, 3)), h.multiply(h.multiply(X, X), X)),
    "x ** -1": (h.power(X, like(X, -1)), h.divide(like(X, 1), X)),
    "exp(x) ** 0.5": (h.power(h.exponential(X), like(X, 0.5)), h.sqrt(h.exponential(X))),
    "1 ** x": (h.power(like(X, 1), X), like(X, 1)),
    "||x||": (h.abs_(h.abs_(X)), h.abs_(X)),
    "|-x|": (h.abs_(h.negate(X)), h.abs_(X)),
    "|x * x|": (h.abs_(h.multiply(X, X)), h.multiply(X, X)),
    "|exp x|": (h.abs_(h.exponential(X)), h.exponential(X)),
    "max(x, x)": (h.maximum(X, X), X),
    "max(x, -inf)": (h.maximum(X, like(X, -INF)), X),
    "min(x, inf)": (h.minimum(X, like(X, INF)), X),
    "max(i, lowest)": (h.maximum(I, like(I, -(2**31))), I),
    "max(i, highest)": (h.maximum(I, like(I, 2**31 - 1)), like(I, 2**31 - 1)),
    "floor ceil": (h.floor(h.ceil(X)), h.ceil(X)),
    "floor of int": (h.floor(h.convert(I, "f32")), h.convert(I, "f32")),
    "i ^ i": (h.xor(I, I), like(I, 0)),
    "i & 0": (h.and_(I, like(I, 0)), like(I, 0)),
    "i & -1": (h.and_(I, like(I, -1)), I),
    "u & ~0": (h.and_(U, like(U, 2**32 - 1)), U),
    "u | ~0": (h.or_(U, like(U, 2**32 - 1)), like(U, 2**32 - 1)),
    "b & true": (h.and_(B, like(B, True)), B),
    "b & false": (h.and_(B, like(B, False)), like(B, False)),
    "b ^ true": (h.xor(B, like(B, True)), h.not_(B)),
    "not not": (h.not_(h.not_(B)), B),
    "not x == y": (h.not_(h.compare(X, Y, "EQ")), h.compare(X, Y, "NE")),
    "not i < j": (h.not_(h.compare(I, J, "LT")), h.compare(I, J, "GE")),
    "i << 0": (h.shift_left(I, like(I, 0)), I),
    "i == i": (h.compare(I, I, "EQ"), like(B, True)),
    "x < x": (h.compare(X, X, "LT"), like(B, False)),
    "b == true": (h.compare(B, like(B, True), "EQ"), B),
    "b != true": (h.compare(B, like(B, True), "NE"), h.not_(B)),
    "f32(b) != 0": (h.compare(h.convert(B, "f32"), like(X, 0), "NE"), B),
    "1 < x": (h.compare(like(X, 1), X, "LT"), h.compare(X, like(X, 1), "GT")),
    "u < 0": (h.compare(U, like(U, 0), "LT"), like(B, False)),
    "true ? x : y": (h.select(like(B, True), X, Y), X),
    "false ? x : y": (h.select(like(B, False), X, Y), Y),
    "p ? x : x": (h.select(P, X, X), X),
    "not p ? x : y": (h.select(h.not_(P), X, Y), h.select(P, Y, X)),
    "p ? true : false": (h.select(P, like(P, True), like(P, False)), P),
    "p ? (p ? x : y) : z": (h.select(P, h.select(P, X, Y), Z), h.select(P, X, Z)),
    "f32(f64(x))": (h.convert(h.convert(X, "f64"), "f32"), X),
    "s8(s16(i))": (h.convert(h.convert(I, "s16"), "s8"), h.convert(I, "s8")),
    "s32(f64(i))": (h.convert(h.convert(I, "f64"), "s32"), I),
    "real(complex)": (h.real(h.complex_(X, Y)), X),
    "imag(complex)": (h.imag(h.complex_(X, Y)), Y),
    "e8m23": (h.reduce_precision(X, 8, 23), X),
    "copy": (h.copy(X), X),
}  # fmt: skip

M = p("f32", (2, 3, 4))
MOVES = {
    "broadcast broadcast": (
        h.broadcast(h.broadcast(V, (2, 3), (1,)), (2, 3, 4), (0, 1)),
        h.broadcast(V, (2, 3, 4), (1,)),
    ),
    "broadcast of [3,1]": (
        h.broadcast(p(dims=(3, 1)), (2, 3, 1), (1, 2)),
        h.broadcast(h.reshape(p(dims=(3, 1)), (3,)), (2, 3, 1), (1,)),
    ),
    "broadcast adds only 1": (h.broadcast(V, (3, 1), (0,)), h.reshape(V, (3, 1))),
    "broadcast unsorted": (
        h.broadcast(X, (5, 3, 4), (2, 1)),
        h.broadcast(h.transpose(X, (1, 0)), (5, 3, 4), (1, 2)),
    ),
    "broadcast iota": (
        h.broadcast(h.iota("s32", (3,), 0), (2, 3), (1,)),
        h.iota("s32", (2, 3), 1),
    ),
    "reshape broadcast": (
        h.reshape(h.broadcast(V, (2, 4, 3), (2,)), (8, 3)),
        h.broadcast(V, (8, 3), (1,)),
    ),
    "reshape of repeated and own": (
        h.reshape(h.broadcast(p(dims=(4, 6)), (5, 4, 6), (1, 2)), (5, 24)),
        h.broadcast(h.reshape(p(dims=(4, 6)), (24,)), (5, 24), (1,)),
    ),
    "transpose broadcast": (
        h.transpose(h.broadcast(V, (3, 2), (0,)), (1, 0)),
        h.broadcast(V, (2, 3), (1,)),
    ),
    "slice broadcast": (
        h.slice_(h.broadcast(V, (4, 3), (1,)), (1, 1), (3, 3)),
        h.broadcast(h.slice_(V, (1,), (3,)), (2, 2), (1,)),
    ),
    "reshape reshape": (h.reshape(h.reshape(X, (12,)), (2, 6)), h.reshape(X, (2, 6))),
    "reshape back": (h.reshape(h.reshape(X, (12,)), (4, 3)), X),
    "transpose transpose": (h.transpose(h.transpose(M, (1, 2, 0)), (2, 0, 1)), M),
    "transpose of 1": (
        h.transpose(p(dims=(4, 1, 3)), (1, 0, 2)),
        h.reshape(p(dims=(4, 1, 3)), (1, 4, 3)),
    ),
    "transpose iota": (
        h.transpose(h.iota("s32", (2, 3), 1), (1, 0)),
        h.iota("s32", (3, 2), 0),
    ),
    "reshape iota": (
        h.reshape(h.iota("s32", (3,), 0), (3, 1)),
        h.iota("s32", (3, 1), 0),
    ),
    "slice slice": (
        h.slice_(h.slice_(X, (1, 0), (4, 3)), (1, 1), (3, 2)),
        h.slice_(X, (2, 1), (4, 2)),
    ),
    "slice slice strided": (
        h.slice_(h.slice_(p(dims=(20,)), (1,), (20,), (3,)), (1,), (6,), (2,)),
        h.slice_(p(dims=(20,)), (4,), (17,), (6,)),
    ),
    "transpose without 1": (
        h.transpose(p(dims=(4, 1, 3)), (2, 1, 0)),
        h.reshape(h.transpose(h.reshape(p(dims=(4, 1, 3)), (4, 3)), (1, 0)), (3, 1, 4)),
    ),
    "slice reshape": (
        h.slice_(h.reshape(p(dims=(2, 12)), (2, 3, 2, 2)), (0, 1, 0, 0), (2, 2, 2, 2)),
        h.reshape(h.slice_(p(dims=(2, 12)), (0, 4), (2, 8)), (2, 1, 2, 2)),
    ),
    "slice transpose": (
        h.slice_(h.transpose(X, (1, 0)), (1, 0), (3, 4)),
        h.transpose(h.slice_(X, (0, 1), (4, 3)), (1, 0)),
    ),
    "slice concatenate": (
        h.slice_(h.concatenate([X, Y, Z], 0), (5, 0), (8, 3)),
        h.slice_(Y, (1, 0), (4, 3)),
    ),
    "slice two of concatenate": (
        h.slice_(h.concatenate([X, Y, Z], 0), (3, 0), (8, 3)),
        h.concatenate([h.slice_(X, (3, 0), (4, 3)), Y], 0),
    ),
    "slice pad inside": (
        h.slice_(h.pad(X, h.constant(0, "f32"), [(1, 1, 0), (0, 0, 0)]), (2, 0), (4, 3)),
        h.slice_(X, (1, 0), (3, 3)),
    ),
    "slice pad outside": (
        h.slice_(h.pad(X, h.constant(7, "f32"), [(2, 1, 0), (0, 0, 0)]), (0, 0), (2, 3)),
        h.full(7, "f32", (2, 3)),
    ),
    "pad pad": (
        h.pad(
            h.pad(V, h.constant(0, "f32"), [(1, 0, 0)]),
            h.constant(0, "f32"),
            [(1, 2, 0)],
        ),
        h.pad(V, h.constant(0, "f32"), [(2, 2, 0)]),
    ),
    "pad crops": (
        h.pad(V, h.constant(0, "f32"), [(-1, 0, 0)]),
        h.slice_(V, (1,), (3,)),
    ),
    "pad of its value": (
        h.pad(h.full(0, "f32", (2,)), h.constant(0, "f32"), [(1, 1, 0)]),
        h.full(0, "f32", (4,)),
    ),
    "concatenate nested": (
        h.concatenate([X, h.concatenate([Y, Z], 0)], 0),
        h.concatenate([X, Y, Z], 0),
    ),
    "concatenate empty": (h.concatenate([X, p(dims=(0, 3), index=1)], 0), X),
    "concatenate slices": (
        h.concatenate([h.slice_(X, (0, 0), (1, 3)), h.slice_(X, (1, 0), (4, 3))], 0),
        X,
    ),
    "concatenate uniform": (
        h.concatenate([h.full(1, "f32", (2,)), h.full(1, "f32", (3,))], 0),
        h.full(1, "f32", (5,)),
    ),
    "reverse reverse": (h.reverse(h.reverse(X, (0, 1)), (1,)), h.reverse(X, (0,))),
    "reverse of 1": (h.reverse(p(dims=(1, 3)), (0,)), p(dims=(1, 3))),
    "reverse broadcast": (
        h.reverse(h.broadcast(V, (2, 3), (1,)), (0,)),
        h.broadcast(V, (2, 3), (1,)),
    ),
    "iota of 1": (h.iota("s32", (1, 3), 0), h.full(0, "s32", (1, 3))),
    "dynamic-slice at 2": (
        h.dynamic_slice(X, [h.constant(2, "s32"), h.constant(0, "s32")], (2, 3)),
        h.slice_(X, (2, 0), (4, 3)),
    ),
    "dynamic-slice clamps": (
        h.dynamic_slice(X, [h.constant(9, "s32"), h.constant(-1, "s32")], (2, 2)),
        h.slice_(X, (2, 0), (4, 2)),
    ),
    "dynamic-slice of all": (h.dynamic_slice(V, [p("s32", (), 1)], (3,)), V),
    "update everything": (h.dynamic_update_slice(X, Y, [p("s32", (), 2)] * 2), Y),
    "update of what is filled": (
        h.dynamic_update_slice(
            h.full(7, "f32", (4, 3)),
            p(dims=(2, 2)),
            [h.constant(1, "s32"), h.constant(5, "s32")],
        ),
        h.pad(p(dims=(2, 2)), h.constant(7, "f32"), [(1, 1, 0), (1, 0, 0)]),
    ),
    "reads its update": (
        h.dynamic_slice(
            h.dynamic_update_slice(V, p(dims=(2,), index=2), [p("s32", (), 1)]),
            [p("s32", (), 1)],
            (2,),
        ),
        p(dims=(2,), index=2),
    ),
    "convert broadcast": (
        h.convert(h.broadcast(V, (2, 3), (1,)), "f64"),
        h.broadcast(h.convert(V, "f64"), (2, 3), (1,)),
    ),
}


def scalar_branches():
    yes = h.computation(h.negate, [X.shape], "yes")
    no = h.computation(h.exponential, [X.shape], "no")
    return [yes, no]


CONTROL = {
    "element of tuple": (instr("get-tuple-element", (h.tuple_(X, Y),), index=1), Y),
    "whole tuple": (
        h.tuple_(*(h.get_tuple_element(h.sort([X, Y], 0, "LT"), i) for i in (0, 1))),
        h.sort([X, Y], 0, "LT"),
    ),
    "if true": (
        h.conditional(h.constant(True, "pred"), scalar_branches(), [X, X]),
        h.negate(X),
    ),
    "index out of range": (
        h.conditional(h.constant(7, "s32"), scalar_branches(), [X, X]),
        h.exponential(X),
    ),
    "reduce of size 1": (
        h.reduce(p(dims=(4, 1)), h.constant(-INF, "f32"), (1,), "maximum"),
        h.reshape(p(dims=(4, 1)), (4,)),
    ),
    "reduce of 1 and 3": (
        h.reduce(p(dims=(4, 1, 3)), h.constant(0, "f32"), (1, 2), "add"),
        h.reduce(h.reshape(p(dims=(4, 1, 3)), (4, 3)), h.constant(0, "f32"), (1,), "add"),
    ),
    "sort of size 1": (h.sort(p(dims=(4, 1)), 1, "LT"), p(dims=(4, 1))),
}

# Why each of these stays as it is.
KEPT = {
    "x + 0.0 turns -0 into 0": h.add(X, like(X, 0.0)),
    "x - x is nan for inf": h.subtract(X, X),
    "x * 0 is nan for inf": h.multiply(X, like(X, 0)),
    "-(x - y) has the other zero": h.negate(h.subtract(X, Y)),
    "x / 3: the reciprocal rounds": h.divide(X, like(X, 3)),
    "x / 2**127: the reciprocal is subnormal": h.divide(X, like(X, 2.0**127)),
    "x == x is false for nan": h.compare(X, X, "EQ"),
    "not x < y is true for nan": h.not_(h.compare(X, Y, "LT")),
    "f32(bf16(x)) rounds": h.convert(h.convert(X, "bf16"), "f32"),
    "s32(f32(i)) rounds": h.convert(h.convert(I, "f32"), "s32"),
    "(x + 1) + 2 rounds twice": h.add(h.add(X, like(X, 1)), like(X, 2)),
    "max(x, 0)": h.maximum(X, like(X, 0)),
    "exp(log(x))": h.exponential(h.log(X)),
    "reshape mixes repeated and own": h.reshape(h.broadcast(V, (3, 2), (0,)), (6,)),
    "real transposition": h.transpose(X, (1, 0)),
    "pad of another value": h.pad(h.full(0, "f32", (2,)), h.constant(1, "f32"), [(1, 1, 0)]),
    "slice of all operands": h.slice_(h.concatenate([X, Y], 0), (1, 0), (7, 3)),
    "slice of an inner part": h.slice_(h.reshape(p(dims=(12,)), (3, 4)), (0, 0), (3, 2)),
    "sqrt(-0) is -0": h.abs_(h.sqrt(X)),
    "bf16 x ** 3 rounds twice": h.power(p("bf16"), like(p("bf16"), 3)),
}


class Algebra(HloTestCase):
    def test_rules(self):
        for name, (before, after) in {**ARITHMETIC, **MOVES, **CONTROL}.items():
            with self.subTest(name):
                self.assertRewrites(algebra, before, after)

    def test_kept(self):
        for name, x in KEPT.items():
            with self.subTest(name):
                self.assertKept(algebra, x)

    def test_constants_combine(self):
        # The sum of the constants is left to the fold pass.
        self.assertRewrites(
            algebra,
            h.add(h.add(I, like(I, 1)), like(I, 2)),
            h.add(I, h.add(like(I, 1), like(I, 2))),
        )

    def test_power_of_half_keeps_special_values(self):
        values = h.constant([-INF, -0.0, 0.0, 4.0, INF, math.nan], "f32")
        x = h.opt_barrier(values)
        for exponent in (0.5, -0.5):
            self.check(algebra, self.program(h.power(x, like(x, exponent))))

    def test_symbolic_sizes(self):
        n = symbol("s0")
        x = p(dims=(n, 4))
        self.assertSame(h.reshape(h.reshape(x, (n * 4,)), (n, 2, 2)), h.reshape(x, (n, 2, 2)))
        self.assertSame(
            h.reshape(h.broadcast(x, (n, 4, 2), (0, 1)), (n * 4, 2)),
            h.broadcast(h.reshape(x, (n * 4,)), (n * 4, 2), (0,)),
        )
        self.assertSame(
            h.slice_(h.broadcast(V, (n, 3), (1,)), (1, 0), (n, 2)),
            h.broadcast(h.slice_(V, (0,), (2,)), (n - 1, 2), (1,)),
        )
        self.assertSame(h.transpose(h.transpose(x, (1, 0)), (1, 0)), x)
        self.assertSame(h.add(x, like(x, -0.0)), x)

    def assertSame(self, before, after):
        m = self.program(before)
        assert algebra(m).entry.root is after

    def test_called_computations(self):
        m = self.hlo("""
            body {
              p = (s32[], f32[4]) parameter(0)
              i = s32[] get-tuple-element(p), index=0
              x = f32[4] get-tuple-element(p), index=1
              one = s32[] constant(1)
              j = s32[] add(i, one)
              n = f32[4] negate(x)
              y = f32[4] negate(n)
              ROOT r = (s32[], f32[4]) tuple(j, y)
            }
            cond {
              p = (s32[], f32[4]) parameter(0)
              i = s32[] get-tuple-element(p), index=0
              three = s32[] constant(3)
              ROOT c = pred[] compare(three, i), direction=GT
            }
            ENTRY main {
              s = (s32[], f32[4]) parameter(0)
              ROOT w = (s32[], f32[4]) while(s), condition=cond, body=body
            }""")
        self.assertPass(
            algebra,
            m,
            """\
%body {
  %0 = (s32[], f32[4]) parameter(0)
  %1 = s32[] get-tuple-element(%0), index=0
  %2 = s32[] constant(1)
  %3 = s32[] add(%1, %2)
  %4 = f32[4] get-tuple-element(%0), index=1
  ROOT %5 = (s32[], f32[4]) tuple(%3, %4)
}

%cond {
  %0 = (s32[], f32[4]) parameter(0)
  %1 = s32[] get-tuple-element(%0), index=0
  %2 = s32[] constant(3)
  ROOT %3 = pred[] compare(%1, %2), direction=LT
}

ENTRY %main {
  %0 = (s32[], f32[4]) parameter(0)
  ROOT %1 = (s32[], f32[4]) while(%0), condition=%cond, body=%body
}
""",
        )

    def test_exact(self):
        for a, b in [
            ("bf16", "f32"),
            ("f16", "f32"),
            ("u8", "s16"),
            ("s32", "f64"),
            ("s16", "f32"),
            ("pred", "bf16"),
            ("f32", "c64"),
            ("u8", "bf16"),
        ]:
            assert exact(a, b), (a, b)
        for a, b in [
            ("f16", "bf16"),
            ("s8", "u16"),
            ("s32", "f32"),
            ("s64", "f64"),
            ("f32", "s64"),
            ("c64", "f32"),
            ("f64", "c64"),
            ("s16", "bf16"),
        ]:
            assert not exact(a, b), (a, b)

    def test_scatter_of_one_element_per_row(self):
        def scattered(base, index, updates, to_apply):
            x = h.scatter(
                base,
                index,
                updates,
                to_apply,
                update_window_dims=(),
                inserted_window_dims=(1,),
                scatter_dims_to_operand_dims=(1,),
                index_vector_dim=2,
                input_batching_dims=(0,),
                scatter_indices_batching_dims=(0,),
            )
            return self.check(algebra, self.program(x)).entry.root.op

        index, updates = p("s64", (4, 1)), p("f32", (4, 1), 1)
        for value, to_apply in ((0, "add"), (2, "add"), (-1, "second")):
            assert scattered(h.full(value, "f32", (4, 3)), index, updates, to_apply) == "select"
        # most of an array stays where it is
        assert scattered(p("f32", (4, 3), 2), index, updates, "add") == "scatter"
        # two may be one
        assert (
            scattered(h.full(0, "f32", (4, 3)), p("s64", (4, 2)), p("f32", (4, 2), 1), "add")
            == "scatter"
        )
