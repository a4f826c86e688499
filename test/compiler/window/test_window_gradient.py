"""window_gradient: select-and-scatter without conflicts."""

from __future__ import annotations

from test.support import HloTestCase
from torch_hlo.compiler.pipeline import compare
from torch_hlo.compiler.window.window_gradient import window_gradient
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.instruction import postorder
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.ir.window import WindowDim

ONE = WindowDim(1)


def gradient(dims, window, select="GE", scatter="add", dtype="f32"):
    x = h.parameter(0, Shape(dtype, dims))
    source = h.parameter(1, Shape(dtype, tuple(w.output_size(n) for w, n in zip(window, dims))))
    return h.select_and_scatter(x, source, h.constant(0, dtype), window, select, scatter)


class WindowGradient(HloTestCase):
    def test_looks_at_the_windows_over_an_element(self):
        for window in [
            (ONE, ONE, WindowDim(3, 2, 1, 1), WindowDim(3, 2, 1, 1)),
            (ONE, ONE, WindowDim(2, 2, 0, -1), WindowDim(2, 2)),
            (ONE, WindowDim(3, 1, 2, 2, 1, 2), WindowDim(2, 3, 0, 1), ONE),
            (ONE, ONE, WindowDim(4, 3, 2, 5), ONE),
        ]:
            for dtype, select in (("f32", "GE"), ("s32", "LE")):
                with self.subTest(f"{window} {dtype}"):
                    before = self.program(gradient((2, 3, 9, 10), window, select, dtype=dtype))
                    after = window_gradient(before)
                    assert "select-and-scatter" not in {
                        x.op for x in postorder((after.entry.root,))
                    }
                    for seed in range(3):
                        compare(before, after, seed)

    def test_kept(self):
        pool = (ONE, WindowDim(2, 2))
        for why, x in {
            "not a sum": gradient((2, 8), pool, scatter="multiply"),
            "many windows over an element": gradient((2, 40), (ONE, WindowDim(20))),
        }.items():
            with self.subTest(why):
                self.assertKept(window_gradient, x)
