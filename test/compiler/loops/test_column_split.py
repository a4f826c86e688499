"""column_split: sums of few long columns become sums of parts."""

from __future__ import annotations

from test.support import HloTestCase
from torch_hlo.compiler.loops.column_split import column_split
from torch_hlo.compiler.pipeline import compare
from torch_hlo.hlo.ir import Shape, build as h


def total(x, over, op="add", init=0):
    return h.reduce(x, h.constant(init, x.dtype), over, op)


class ColumnSplit(HloTestCase):
    def test_parts(self):
        x = h.parameter(0, Shape("f32", (4, 2048, 64)))
        before = self.program(total(x, (0, 1)))
        after = column_split(before)
        parts = after.entry.root.operand
        assert parts.op == "reduce" and parts.dims == (256, 64)
        compare(before, after, 1)
        assert column_split(after) is after

    def test_kept(self):
        def x(dtype, *dims):
            return h.parameter(0, Shape(dtype, dims))

        rows = total(x("f32", 8192, 64), (1,))
        for why, out in {
            "rows": rows,
            "columns that fill no group": total(x("f32", 8192, 40), (0,)),
            "few elements": total(x("f32", 2048, 64), (0,)),
            "no sum": total(x("f32", 8192, 64), (0,), "maximum"),
            "a prime number of rows": total(x("f32", 8191, 64), (0,)),
            "sums of two bytes, which would be rounded between": total(x("bf16", 8192, 64), (0,)),
            "with values per row": total(
                h.multiply(x("f32", 8192, 64), h.broadcast(rows, (8192, 64), (0,))), (0,)
            ),
        }.items():
            with self.subTest(why):
                self.assertKept(column_split, out)
