"""conv_narrow: few features fill vectors."""

from __future__ import annotations

from test.support import HloTestCase
from torch_hlo.compiler.convolution.conv_narrow import conv_narrow
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.instruction import Instruction, postorder
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.ir.window import WindowDim


def p(index, *dims):
    return h.parameter(index, Shape("f32", dims))


def features(root: Instruction) -> list[int]:
    return [x.shape.dims[-1] for x in postorder((root,)) if x.op == "convolution"]


class ConvNarrow(HloTestCase):
    def narrowed(self, before: Instruction) -> list[int]:
        """The features of the convolutions that a program becomes; its value stays."""
        module = self.program(before)
        after = conv_narrow.run(module)
        self.assertSameValue(module, after, rtol=1e-4)
        return features(after.entry.root)

    def test_pixels_of_a_row(self):
        for window, labels, kernel, wide in [
            (WindowDim(5, 1, 2, 2), "b01f_oi01->b01f", (6, 1, 5, 5), 12),
            (WindowDim(3, 2, 1, 0), "b01f_io01->b01f", (1, 3, 3, 3), 9),
            (WindowDim(3, 1, 1, 1, 1, 1, True), "b01f_01io->b01f", (3, 3, 1, 3), 12),
        ]:
            with self.subTest(str(window)):
                assert self.narrowed(
                    h.convolution(p(0, 2, 12, 12, 1), p(1, *kernel), [window] * 2, labels)
                ) == [wide]

    def test_a_last_run_is_cut(self):
        assert self.narrowed(
            h.convolution(
                p(0, 2, 12, 13, 4),
                p(1, 2, 4, 3, 3),
                [WindowDim(3, 1, 1, 1)] * 2,
                "b01f_oi01->b01f",
            )
        ) == [14]

    def test_filters_of_channels(self):
        for window, labels, kernel, wide in [
            ([WindowDim(5, 1, 2, 2)] * 2, "b01f_oi01->b01f", (3, 1, 5, 5), 3 * 14),
            (
                [WindowDim(3, 2, 1, 0), WindowDim(5, 2, 0, 1)],
                "b01f_io01->b01f",
                (1, 6, 3, 5),
                6 * 6,
            ),
            (
                [WindowDim(3, 1, 1, 1, 1, 1, True)] * 2,
                "b01f_01io->b01f",
                (3, 3, 1, 3),
                3 * 14,
            ),
            (
                [WindowDim(3, 1, -1, 1), WindowDim(7, 1, -2, 3)],
                "b01f_oi01->b01f",
                (3, 1, 3, 7),
                3 * 9,
            ),
        ]:
            with self.subTest(str(window)):
                assert self.narrowed(
                    h.convolution(p(0, 2, 12, 14, 3), p(1, *kernel), window, labels, 3)
                ) == [wide]

    def test_kept(self):
        x = p(0, 2, 12, 13, 4)
        for why, before in {
            "features fill a vector": h.convolution(
                x, p(1, 16, 4, 3, 3), [WindowDim(3, 1, 1, 1)] * 2, "b01f_oi01->b01f"
            ),
            "channels fill a vector": h.convolution(
                p(0, 2, 12, 12, 12),
                p(1, 12, 1, 3, 3),
                [WindowDim(3)] * 2,
                "b01f_oi01->b01f",
                12,
            ),
            "windows share no pixels": h.convolution(
                x, p(1, 2, 4, 2, 1), [WindowDim(2, 2), WindowDim(1)], "b01f_oi01->b01f"
            ),
            "no pixels": h.convolution(p(0, 8, 4), p(1, 4, 2), [], "bf_io->bf"),
            "groups of channels": h.convolution(
                x, p(1, 4, 2, 3, 4), [WindowDim(3), WindowDim(4)], "b01f_oi01->b01f", 2
            ),
        }.items():
            with self.subTest(why):
                self.assertKept(conv_narrow, before)
