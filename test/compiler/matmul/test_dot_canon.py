"""dot_canon: one form of dot."""

from __future__ import annotations

from test.support import HloTestCase
from torch_hlo.compiler.matmul.dot_canon import dot_canon
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.shape import Shape


def p(*dims, index=0):
    return h.parameter(index, Shape("f32", dims))


class DotCanon(HloTestCase):
    def test_rules(self):
        x, y, w = p(4, 6), p(6, 5, index=1), p(6, 5, index=1)
        b = p(3, 4, 6)
        for before, after in [
            (
                h.dot(h.transpose(p(6, 4), (1, 0)), y, (1,), (0,)),
                h.dot(p(6, 4), y, (0,), (0,)),
            ),
            (
                h.dot(x, h.transpose(p(5, 6, index=1), (1, 0)), (1,), (0,)),
                h.dot(x, p(5, 6, index=1), (1,), (1,)),
            ),
            (
                h.dot(b, h.broadcast(w, (3, 6, 5), (1, 2)), (2,), (1,), (0,), (0,)),
                h.dot(b, w, (2,), (0,)),
            ),
            (
                h.dot(p(1, 6), y, (1,), (0,)),
                h.reshape(h.dot(h.reshape(p(1, 6), (6,)), y, (0,), (0,)), (1, 5)),
            ),
            (
                h.dot(p(4), p(5, index=1), (), ()),
                h.multiply(
                    h.broadcast(p(4), (4, 5), (0,)),
                    h.broadcast(p(5, index=1), (4, 5), (1,)),
                ),
            ),
            (h.dot(p(4, 0), p(0, 5, index=1), (1,), (0,)), h.full(0, "f32", (4, 5))),
            (
                h.dot(p(2, 3, 4), p(3, 2, index=1), (1, 0), (0, 1)),
                h.dot(p(2, 3, 4), p(3, 2, index=1), (0, 1), (1, 0)),
            ),
        ]:
            with self.subTest(str(before)):
                self.assertRewrites(dot_canon, before, after)

    def test_outer_product_of_columns(self):
        m = self.program(h.dot(p(4, 1), p(1, 5, index=1), (1,), (0,)))
        assert not any(i.op == "dot" for i in self.check(dot_canon, m).entry.instructions())

    def test_inner_products(self):
        for x in (
            h.dot(p(64), p(64, index=1), (0,), (0,)),
            h.dot(p(4, 3, 64), p(64, 4, 3, index=1), (2, 1), (0, 2), (0,), (1,)),
        ):
            ops = [i.op for i in self.check(dot_canon, self.program(x)).entry.instructions()]
            self.assertIn("reduce", ops)
            self.assertNotIn("dot", ops)

    def test_bytes(self):
        x, y = h.parameter(0, Shape("s8", (4, 6))), h.parameter(1, Shape("s8", (6, 5)))
        m = self.check(
            dot_canon,
            self.program(h.dot(h.convert(x, "s32"), h.convert(y, "s32"), (1,), (0,))),
        )
        self.assertEqual(
            [[o.shape.dtype for o in i.operands] for i in m.entry.instructions() if i.op == "dot"],
            [["s8", "s8"]],
        )

    def test_kept(self):
        for why, x in {
            "plain": h.dot(p(4, 6), p(6, 5, index=1), (1,), (0,)),
            "the transpose reorders the result": h.dot(
                h.transpose(p(3, 4, 6), (1, 0, 2)), p(6, 5, index=1), (2,), (0,)
            ),
            "a repeated lhs would put its rows first": h.dot(
                h.broadcast(p(4, 6), (3, 4, 6), (1, 2)),
                p(3, 6, 5, index=1),
                (2,),
                (1,),
                (0,),
                (0,),
            ),
        }.items():
            with self.subTest(why):
                self.assertKept(dot_canon, x)

    def test_accumulator_type_is_kept(self):
        x, y = (
            h.parameter(0, Shape("bf16", (4, 1))),
            h.parameter(1, Shape("bf16", (1, 5))),
        )
        m = self.program(h.dot(x, y, (1,), (0,), dtype="f32"))
        assert self.check(dot_canon, m).entry.root.shape == Shape("f32", (4, 5))
