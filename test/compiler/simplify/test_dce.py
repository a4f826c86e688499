"""dce: loop state, sort payloads and branch results that nobody reads."""

from __future__ import annotations

from test.support import HloTestCase
from torch_hlo.compiler.simplify.dce import dce
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.shape import Shape

X = h.parameter(0, Shape("f32", (4,)))
Y = h.parameter(1, Shape("f32", (4,)))


class Dce(HloTestCase):
    def test_loop_state(self):
        m = self.hlo("""
            body {
              p = (s32[], f32[4], f32[4], f32[4]) parameter(0)
              i = s32[] get-tuple-element(p), index=0
              x = f32[4] get-tuple-element(p), index=1
              half = f32[4] get-tuple-element(p), index=2
              unread = f32[4] get-tuple-element(p), index=3
              one = s32[] constant(1)
              j = s32[] add(i, one)
              y = f32[4] multiply(x, half)
              z = f32[4] add(unread, x)
              ROOT r = (s32[], f32[4], f32[4], f32[4]) tuple(j, y, half, z)
            }
            cond {
              p = (s32[], f32[4], f32[4], f32[4]) parameter(0)
              i = s32[] get-tuple-element(p), index=0
              three = s32[] constant(3)
              ROOT c = pred[] compare(i, three), direction=LT
            }
            ENTRY main {
              x = f32[4] parameter(0)
              zero = s32[] constant(0)
              h = f32[] constant(0.5)
              half = f32[4] broadcast(h), dimensions={}
              s = (s32[], f32[4], f32[4], f32[4]) tuple(zero, x, half, x)
              w = (s32[], f32[4], f32[4], f32[4]) while(s), condition=cond, body=body
              ROOT y = f32[4] get-tuple-element(w), index=1
            }""")
        self.assertPass(
            dce,
            m,
            """\
%body {
  %0 = (s32[], f32[4]) parameter(0)
  %1 = s32[] get-tuple-element(%0), index=0
  %2 = s32[] constant(1)
  %3 = s32[] add(%1, %2)
  %4 = f32[4] get-tuple-element(%0), index=1
  %5 = f32[] constant(0.5)
  %6 = f32[4] broadcast(%5), dimensions={}
  %7 = f32[4] multiply(%4, %6)
  ROOT %8 = (s32[], f32[4]) tuple(%3, %7)
}

%cond {
  %0 = (s32[], f32[4]) parameter(0)
  %1 = s32[] get-tuple-element(%0), index=0
  %2 = s32[] constant(3)
  ROOT %3 = pred[] compare(%1, %2), direction=LT
}

ENTRY %main {
  %0 = f32[4] parameter(0)
  %1 = s32[] constant(0)
  %2 = (s32[], f32[4]) tuple(%1, %0)
  %3 = (s32[], f32[4]) while(%2), condition=%cond, body=%body
  ROOT %4 = f32[4] get-tuple-element(%3), index=1
}
""",
        )

    def test_sort_payload(self):
        both = h.sort([X, Y], 0, "LT")
        self.assertRewrites(dce, h.get_tuple_element(both, 0), h.sort(X, 0, "LT"))
        # The keys are needed to order the payload.
        self.assertKept(dce, h.get_tuple_element(both, 1))

    def test_branch_results(self):
        pred = h.parameter(1, Shape("pred"))
        yes = h.computation(lambda x: [h.negate(x), h.exponential(x)], [X.shape], "yes")
        no = h.computation(lambda x: [x, x], [X.shape], "no")
        less = [
            h.computation(lambda x: [h.exponential(x)], [X.shape]),
            h.computation(lambda x: [x], [X.shape]),
        ]
        self.assertRewrites(
            dce,
            h.get_tuple_element(h.conditional(pred, [yes, no], [X, X]), 1),
            h.get_tuple_element(h.conditional(pred, less, [X, X]), 0),
        )

    def test_variadic_reduce(self):
        scalar = Shape("f32")
        c = h.computation(lambda a, b, x, y: [h.add(a, x), h.maximum(b, y)], [scalar] * 4)
        zero, low = h.constant(0, "f32"), h.constant(h.lowest("f32"), "f32")
        both = h.reduce([X, Y], [zero, low], (0,), c)
        self.assertRewrites(dce, h.get_tuple_element(both, 0), h.reduce(X, zero, (0,), "add"))

    def test_argmax_needs_both(self):
        scalar = Shape("f32")
        c = h.computation(
            lambda a, b, x, y: [h.maximum(a, x), h.select(h.compare(a, x, "GE"), b, y)],
            [scalar] * 4,
        )
        both = h.reduce([X, Y], [h.constant(h.lowest("f32"), "f32"), h.constant(0, "f32")], (0,), c)
        self.assertKept(dce, h.get_tuple_element(both, 1))
        self.assertRewrites(
            dce,
            h.get_tuple_element(both, 0),
            h.reduce(X, h.constant(h.lowest("f32"), "f32"), (0,), "maximum"),
        )

    def test_whole_tuple_is_read(self):
        self.assertKept(dce, h.sort([X, Y], 0, "LT"))
