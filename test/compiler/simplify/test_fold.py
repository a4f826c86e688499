"""fold: what is computed at compile time, and what is too large for it."""

from __future__ import annotations

from test.support import HloTestCase
from torch_hlo.compiler.simplify.fold import LIMIT, fold
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.shape import Shape

V = h.constant([1.0, 2.0, 3.0], "f32")
X = h.parameter(0, Shape("f32", (3,)))


class Fold(HloTestCase):
    def test_folds(self):
        three = h.constant([3, 1, 2], "s32")
        for before, after in [
            (
                h.add(h.full(2, "f32", (1000, 1000)), h.full(3, "f32", (1000, 1000))),
                h.full(5, "f32", (1000, 1000)),
            ),
            (h.convert(h.full(1.7, "f32", (9,)), "s32"), h.full(1, "s32", (9,))),
            (h.constant([2.0] * 5, "f32"), h.full(2, "f32", (5,))),
            (h.reverse(V, (0,)), h.constant([3.0, 2.0, 1.0], "f32")),
            (h.slice_(V, (1,), (3,)), h.constant([2.0, 3.0], "f32")),
            (h.add(V, h.full_like(V, 1)), h.constant([2.0, 3.0, 4.0], "f32")),
            (h.reduce(V, h.constant(0, "f32"), (0,), "add"), h.constant(6, "f32")),
            (h.sort(three, 0, "LT"), h.constant([1, 2, 3], "s32")),
            (h.dot(V, V, (0,), (0,)), h.constant(14, "f32")),
            (
                h.compare(h.full(1, "s8", (7,)), h.full(2, "s8", (7,)), "LT"),
                h.full(True, "pred", (7,)),
            ),
            # rounds as bf16
            (
                h.add(h.constant(1.0, "bf16"), h.constant(2**-9, "bf16")),
                h.constant(1.0, "bf16"),
            ),
            (
                h.exponential(h.parameter(0, Shape("f32", (0, 3)))),
                h.full(0, "f32", (0, 3)),
            ),
            (
                h.reduce(
                    h.parameter(0, Shape("f32", (0, 3))),
                    h.constant(7, "f32"),
                    (0,),
                    "add",
                ),
                h.full(7, "f32", (3,)),
            ),
            (
                h.dot(
                    h.parameter(0, Shape("f32", (3, 0))),
                    h.parameter(1, Shape("f32", (0, 2))),
                    (1,),
                    (0,),
                ),
                None,
            ),
        ]:
            with self.subTest(str(before)):
                self.assertRewrites(fold, before, before if after is None else after)

    def test_kept(self):
        big = h.constant([float(i) for i in range(LIMIT + 1)], "f32")
        for why, x in {
            "an operand is no constant": h.add(V, X),
            "too large": h.negate(big),
            "an iota is cheap to make": h.negate(h.iota("s32", (3,), 0)),
            "one constant is not all": h.concatenate([V, X], 0),
            "-0 and 0 differ": h.constant([0.0, -0.0], "f32"),
        }.items():
            with self.subTest(why):
                self.assertKept(fold, x)
