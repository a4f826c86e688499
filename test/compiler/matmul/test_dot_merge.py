"""dot_merge: sums of products, and weights that many small products read."""

from __future__ import annotations

from test.support import HloTestCase
from torch_hlo.compiler.matmul.dot_merge import dot_merge
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.shape import Shape


def p(index, *dims):
    return h.parameter(index, Shape("f32", dims))


def gradient(i, rows=2):
    return h.dot(p(2 * i, rows, 8), p(2 * i + 1, rows, 6), (0,), (0,))


class DotMerge(HloTestCase):
    def test_sum_of_products(self):
        a, b, c = (gradient(i) for i in range(3))
        long = h.dot(
            h.concatenate([p(0, 2, 8), p(2, 2, 8), p(4, 2, 8)], 0),
            h.concatenate([p(1, 2, 6), p(3, 2, 6), p(5, 2, 6)], 0),
            (0,),
            (0,),
        )
        self.assertRewrites(dot_merge, h.add(h.add(a, b), c), long)

    def test_other_terms_stay(self):
        a, b, other = gradient(0), gradient(1), p(4, 8, 6)
        long = h.dot(
            h.concatenate([p(0, 2, 8), p(2, 2, 8)], 0),
            h.concatenate([p(1, 2, 6), p(3, 2, 6)], 0),
            (0,),
            (0,),
        )
        self.assertRewrites(dot_merge, h.add(h.add(a, other), b), h.add(long, other))

    def test_sums_inside_sums(self):
        """A merged sum is an operand of a product that is merged, too."""
        inner = h.add(gradient(0), gradient(1))
        outer = h.add(
            h.dot(h.slice_(inner, (0, 0), (2, 6)), p(4, 2, 8), (0,), (0,)),
            h.dot(p(5, 2, 6), p(6, 2, 8), (0,), (0,)),
        )
        dots = [
            x
            for x in self.check(dot_merge, self.program(outer)).entry.instructions()
            if x.op == "dot"
        ]
        self.assertEqual([x.shape.dims for x in dots], [(8, 6), (6, 8)])

    def test_kept(self):
        shared = gradient(0)
        for why, x in {
            "operands are larger than the result": h.add(gradient(0, 100), gradient(1, 100)),
            "the product has another reader": h.add(h.add(shared, gradient(1)), h.negate(shared)),
            "different shapes": h.add(
                gradient(0),
                h.broadcast(h.dot(p(2, 2, 6), p(3, 2, 6), (0, 1), (0, 1)), (8, 6), ()),
            ),
            "one product": h.add(gradient(0), p(2, 8, 6)),
        }.items():
            with self.subTest(why):
                self.assertKept(dot_merge, x)

    def test_weights_are_turned_once(self):
        w = p(4, 32, 24)
        xs = [p(i, 16, 24) for i in range(4)]
        before = h.tuple_(*(h.dot(x, w, (1,), (1,)) for x in xs))
        turned = h.transpose(w, (1, 0))
        self.assertRewrites(
            dot_merge, before, h.tuple_(*(h.dot(x, turned, (1,), (0,)) for x in xs))
        )

    def test_results_wider_than_operands(self):
        """f32 sums of bf16 stay f32: a layer under autocast, and its weight's gradients."""

        def narrow(index, *dims):
            return h.parameter(index, Shape("bf16", dims))

        w = narrow(4, 32, 24)
        xs = [narrow(i, 16, 24) for i in range(4)]
        turned = h.transpose(w, (1, 0))
        self.assertRewrites(
            dot_merge,
            h.tuple_(*(h.convert(h.dot(x, w, (1,), (1,), dtype="f32"), "bf16") for x in xs)),
            h.tuple_(*(h.convert(h.dot(x, turned, (1,), (0,), dtype="f32"), "bf16") for x in xs)),
        )
        terms = [
            h.dot(narrow(2 * i, 2, 8), narrow(2 * i + 1, 2, 6), (0,), (0,), dtype="f32")
            for i in range(2)
        ]
        long = h.dot(
            h.concatenate([narrow(0, 2, 8), narrow(2, 2, 8)], 0),
            h.concatenate([narrow(1, 2, 6), narrow(3, 2, 6)], 0),
            (0,),
            (0,),
            dtype="f32",
        )
        self.assertRewrites(dot_merge, h.add(*terms), long)

    def test_few_uses_of_a_weight_do_not_pay(self):
        w = p(3, 32, 24)
        self.assertKept(
            dot_merge, h.tuple_(*(h.dot(p(i, 16, 24), w, (1,), (1,)) for i in range(3)))
        )
