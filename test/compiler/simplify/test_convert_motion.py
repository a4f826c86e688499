"""convert_motion: conversions where they touch fewer bytes."""

from __future__ import annotations

from test.support import HloTestCase
from torch_hlo.compiler.simplify.convert_motion import convert_motion
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.shape import Shape


def p(dtype, *dims, index=0):
    return h.parameter(index, Shape(dtype, dims))


def rows(table, indices):
    return h.gather(
        table,
        indices,
        offset_dims=[1],
        collapsed_slice_dims=[0],
        start_index_map=[0],
        index_vector_dim=1,
        slice_sizes=[1, 8],
    )


class ConvertMotion(HloTestCase):
    def test_rules(self):
        half, full, i = p("bf16", 4, 8), p("f32", 4, 8), p("s32", 3, index=1)
        other = p("bf16", 4, 8, index=1)
        for before, after in [
            (rows(h.convert(half, "f32"), i), h.convert(rows(half, i), "f32")),
            (rows(h.convert(full, "bf16"), i), h.convert(rows(full, i), "bf16")),
            (
                h.slice_(h.convert(full, "bf16"), (0, 0), (1, 8)),
                h.convert(h.slice_(full, (0, 0), (1, 8)), "bf16"),
            ),
            (
                h.reverse(h.convert(half, "f32"), (0,)),
                h.convert(h.reverse(half, (0,)), "f32"),
            ),
            (
                h.convert(h.reverse(full, (0,)), "bf16"),
                h.reverse(h.convert(full, "bf16"), (0,)),
            ),
            (
                h.concatenate([h.convert(half, "f32"), h.convert(other, "f32")], 0),
                h.convert(h.concatenate([half, other], 0), "f32"),
            ),
            (
                h.compare(h.convert(half, "f32"), h.convert(other, "f32"), "LT"),
                h.compare(half, other, "LT"),
            ),
            (
                h.compare(h.convert(p("u8", 4), "s32"), h.full(3, "s32", (4,)), "GE"),
                h.compare(p("u8", 4), h.full(3, "u8", (4,)), "GE"),
            ),
        ]:
            with self.subTest(str(before)):
                self.assertRewrites(convert_motion, before, after)

    def test_kept(self):
        full = p("f32", 4, 8)
        for why, x in {
            "narrowing before a concatenate would need two": h.convert(
                h.concatenate([full, full], 0), "bf16"
            ),
            "not exact": h.compare(h.convert(p("s32", 4), "f32"), h.full(3, "f32", (4,)), "LT"),
            "300 is no u8": h.compare(h.convert(p("u8", 4), "s32"), h.full(300, "s32", (4,)), "LT"),
            "0.1 is no bf16": h.compare(
                h.convert(p("bf16", 4), "f32"), h.full(0.1, "f32", (4,)), "LT"
            ),
            "more rows than the table has": rows(
                h.convert(p("f32", 2, 8), "bf16"), p("s32", 30, index=1)
            ),
            "a slice is already small": h.convert(h.slice_(full, (0, 0), (1, 8)), "bf16"),
        }.items():
            with self.subTest(why):
                self.assertKept(convert_motion, x)
