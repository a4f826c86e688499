"""conv_layout: channels last, and transposes that cancel."""

from __future__ import annotations

from test.support import HloTestCase
from torch_hlo.compiler.convolution.conv_layout import conv_layout
from torch_hlo.compiler.pipeline import optimize
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.instruction import called, postorder
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.ir.window import WindowDim


def p(index, *dims):
    return h.parameter(index, Shape("f32", dims))


def square(*args):
    return [WindowDim(*args)] * 2


def ops(root):
    """All opcodes of a program, also inside of its fusions."""
    return [
        y.op
        for x in postorder((root,))
        for y in (x, *(z for c in called(x) for z in c.instructions()))
    ]


class ConvLayout(HloTestCase):
    def test_channels_last(self):
        x, k = p(0, 2, 3, 8, 9), p(1, 4, 3, 3, 3)
        before = h.convolution(x, k, square(3, 1, 1, 1), "bf01_oi01->bf01")
        inner = h.convolution(
            h.transpose(x, (0, 2, 3, 1)), k, square(3, 1, 1, 1), "b01f_oi01->b01f"
        )
        self.assertRewrites(conv_layout, before, h.transpose(inner, (0, 3, 1, 2)))
        self.assertKept(conv_layout, inner)

    def test_gradient_of_weights(self):
        x, y = p(0, 2, 16, 8, 8), p(1, 2, 4, 8, 8)
        before = h.convolution(x, y, square(8, 1, 1, 1), "fb01_io01->fb01")
        after = h.convolution(
            h.transpose(x, (0, 2, 3, 1)),
            h.transpose(y, (0, 2, 3, 1)),
            square(8, 1, 1, 1),
            "f01b_i01o->fb01",
        )
        self.assertRewrites(conv_layout, before, after)

    def test_gradient_of_weights_as_large_as_the_image(self):
        x, y = p(0, 2, 6, 5, 5), p(1, 2, 6, 5, 5)  # of a depthwise kernel of 5x5
        before = h.convolution(x, y, square(5, 1, 2, 2), "fb01_io01->fb01", 1, 6)
        after = h.convolution(
            h.transpose(x, (0, 2, 3, 1)),
            h.transpose(y, (0, 2, 3, 1)),
            square(5, 1, 2, 2),
            "f01b_i01o->fb01",
            1,
            6,
        )
        self.assertRewrites(conv_layout, before, after)

    def test_pixels_that_no_window_reaches(self):
        """A 1x1 kernel with stride 2 on 8 pixels reads them where they are."""
        x, k = p(0, 2, 8, 8, 16), p(1, 32, 16, 1, 1)
        self.assertKept(
            conv_layout,
            h.convolution(x, k, [WindowDim(1, 2, 0, -1)] * 2, "b01f_oi01->b01f"),
        )

    def test_window_of_one_element(self):
        x, k = p(0, 2, 8, 9, 3), p(1, 4, 3, 1, 1)
        product = h.dot(h.reshape(x, (144, 3)), h.reshape(k, (4, 3)), (1,), (1,))
        self.assertRewrites(
            conv_layout,
            h.convolution(x, k, square(1), "b01f_oi01->b01f"),
            h.reshape(product, (2, 8, 9, 4)),
        )
        y = p(1, 2, 8, 8, 4)
        x = p(0, 2, 8, 8, 3)
        product = h.dot(h.reshape(y, (128, 4)), h.reshape(x, (128, 3)), (0,), (0,))
        self.assertRewrites(
            conv_layout,
            h.convolution(x, y, square(8), "f01b_i01o->fb01"),
            h.reshape(product, (4, 3, 1, 1)),
        )

    def test_windows_that_do_not_overlap(self):
        x, k = p(0, 2, 3, 8, 12), p(1, 5, 3, 4, 2)
        before = h.convolution(x, k, [WindowDim(4, 4), WindowDim(2, 2)], "bf01_oi01->bf01")
        patches = h.reshape(
            h.transpose(h.reshape(x, (2, 3, 2, 4, 6, 2)), (0, 2, 4, 1, 3, 5)), (24, 24)
        )
        after = h.transpose(
            h.reshape(h.dot(patches, h.reshape(k, (5, 24)), (1,), (1,)), (2, 2, 6, 5)),
            (0, 3, 1, 2),
        )
        self.assertRewrites(conv_layout, before, after)

    def test_result_that_meets_one_tap(self):
        x, k = p(0, 2, 3, 4, 4), p(1, 3, 5, 2, 2)  # a transposed convolution
        before = h.convolution(x, k, [WindowDim(2, 1, 1, 1, 2, 1, True)] * 2, "bf01_io01->bf01")
        after = conv_layout.run(self.program(before))
        self.assertNotIn("convolution", ops(after.entry.root))
        self.assertSameValue(self.program(before), after)
        x, k = p(0, 2, 3, 1, 1), p(1, 5, 3, 4, 3)  # one pixel, padded
        before = h.convolution(
            x, k, [WindowDim(4, 1, 3, 2), WindowDim(3, 1, 1, 1)], "bf01_oi01->bf01"
        )
        after = conv_layout.run(self.program(before))
        self.assertNotIn("convolution", ops(after.entry.root))
        self.assertSameValue(self.program(before), after)
        for depth in (
            1,
            2,
            6,
        ):  # three groups of channels; a row of pixels becomes an image
            x, k = p(0, 2, 3 * depth, 1, 4), p(1, 6, depth, 5, 1)
            before = h.convolution(
                x, k, [WindowDim(5, 1, 4, 4), WindowDim(1)], "bf01_oi01->bf01", 3
            )
            after = conv_layout.run(self.program(before))
            self.assertNotIn("convolution", ops(after.entry.root))
            self.assertSameValue(self.program(before), after)
        x, k = p(0, 2, 3, 4, 4), p(1, 3, 5, 3, 2)  # windows that overlap
        overlap = h.convolution(
            x,
            k,
            [WindowDim(3, 1, 2, 2, 2), WindowDim(2, 1, 1, 1, 2)],
            "bf01_io01->bf01",
        )
        self.assertIn("convolution", ops(conv_layout.run(self.program(overlap)).entry.root))

    def test_few_features_are_sums_of_pieces(self):
        for step, pad, taps, features in (
            (2, (2, 2), 4, 1),  # upsampling, as of the last layer of a generator
            (2, (1, 3), 3, 3),  # taps that do not fill the last step
            (1, (1, 1), 3, 2),  # an image of many channels -> one of few
        ):
            for dtype in ("f32", "bf16"):
                x = h.parameter(0, Shape(dtype, (2, 16, 5, 6)))
                k = h.parameter(1, Shape(dtype, (16, features, taps, 2)))
                window = [
                    WindowDim(taps, 1, *pad, step, 1, True),
                    WindowDim(2, 1, 1, 0),
                ]
                before = h.convolution(x, k, window, "bf01_io01->bf01")
                with self.subTest((step, taps, dtype)):
                    after = conv_layout.run(self.program(before))
                    self.assertNotIn("convolution", ops(after.entry.root))
                    self.assertSameValue(self.program(before), after)
        many = h.convolution(
            p(0, 2, 16, 5, 6), p(1, 16, 24, 3, 3), square(3, 1, 1, 1), "bf01_io01->bf01"
        )
        self.assertIn("convolution", ops(conv_layout.run(self.program(many)).entry.root))

    def test_windows_of_several_rows_over_one(self):
        for groups, low, high, reversal in (
            (1, 4, 4, False),
            (2, 4, 4, True),
            (1, 2, 2, False),
            (2, 6, 3, False),
        ):
            x, k = p(0, 2, 4, 1, 9), p(1, 6, 4 // groups, 5, 3)
            before = h.convolution(
                x,
                k,
                [WindowDim(5, 1, low, high, 1, 1, reversal), WindowDim(3, 2, 1, 1)],
                "bf01_oi01->bf01",
                groups,
            )
            with self.subTest((groups, low, high, reversal)):
                after = conv_layout.run(self.program(before))
                (inner,) = (y for y in postorder((after.entry.root,)) if y.op == "convolution")
                self.assertEqual([w.size for w in inner["window"]], [1, 3])
                self.assertSameValue(self.program(before), after)

    def test_few_channels_are_padded(self):
        x, k = p(0, 2, 8, 8, 3), p(1, 4, 3, 7, 7)
        before = h.convolution(x, k, [WindowDim(7, 2, 3, 3)] * 2, "b01f_oi01->b01f")
        wide = h.pad(x, h.constant(0, "f32"), [(0, 0, 0), (0, 0, 0), (3, 3, 0), (0, 0, 0)])
        after = h.convolution(wide, k, [WindowDim(7, 2, 3, 3), WindowDim(7, 2)], "b01f_oi01->b01f")
        self.assertRewrites(conv_layout, before, after)
        y = p(1, 2, 8, 8, 4)
        before = h.convolution(x, y, square(8, 1, 1, 1), "f01b_i01o->fb01")
        wide = h.pad(x, h.constant(0, "f32"), [(0, 0, 0), (0, 0, 0), (1, 1, 0), (0, 0, 0)])
        self.assertRewrites(
            conv_layout,
            before,
            h.convolution(wide, y, [WindowDim(8, 1, 1, 1), WindowDim(8)], "f01b_i01o->fb01"),
        )
        self.assertKept(
            conv_layout,
            h.convolution(
                p(0, 2, 8, 8, 16),
                p(1, 4, 16, 7, 7),
                [WindowDim(7, 2, 3, 3)] * 2,
                "b01f_oi01->b01f",
            ),
        )

    def test_gradient_of_a_pool(self):
        x, y = p(0, 2, 3, 8, 9), p(1, 2, 3, 4, 4)
        one, two = WindowDim(1), WindowDim(2, 2, 0, -1)
        before = h.select_and_scatter(
            x, y, h.constant(0, "f32"), (one, one, WindowDim(2, 2), two), "GE", "add"
        )
        turned = (
            h.transpose(x, (0, 2, 3, 1)),
            h.transpose(y, (0, 2, 3, 1)),
            h.constant(0, "f32"),
        )
        inner = h.select_and_scatter(*turned, (one, WindowDim(2, 2), two, one), "GE", "add")
        self.assertRewrites(conv_layout, before, h.transpose(inner, (0, 3, 1, 2)))
        self.assertKept(conv_layout, inner)

    def test_gradient_of_a_pool_of_rows(self):
        x, y = p(0, 2, 3, 1, 8), p(1, 2, 3, 1, 4)
        one, two = WindowDim(1), WindowDim(2, 2)
        before = h.select_and_scatter(x, y, h.constant(0, "f32"), (one, one, one, two), "GE", "add")
        turned = (
            h.transpose(x, (0, 2, 3, 1)),
            h.transpose(y, (0, 2, 3, 1)),
            h.constant(0, "f32"),
        )
        inner = h.select_and_scatter(*turned, (one, one, two, one), "GE", "add")
        self.assertRewrites(conv_layout, before, h.transpose(inner, (0, 3, 1, 2)))

    def test_gradient_of_an_average(self):
        x, zero = p(0, 2, 3, 4, 5), h.constant(0, "f32")
        one, spread = WindowDim(1), WindowDim(3, 1, 2, 2, 2)
        inner = h.reduce_window(
            h.transpose(x, (0, 2, 3, 1)), zero, (one, spread, spread, one), "add"
        )
        self.assertRewrites(
            conv_layout,
            h.reduce_window(x, zero, (one, one, spread, spread), "add"),
            h.transpose(inner, (0, 3, 1, 2)),
        )
        for kept in (
            inner,
            h.reduce_window(x, zero, (one, one, WindowDim(3), WindowDim(3)), "add"),
        ):
            self.assertKept(conv_layout, kept)

    def test_a_network_is_transposed_where_it_begins_and_ends(self):
        x = p(0, 2, 3, 16, 16)
        y = h.convolution(x, p(1, 32, 3, 3, 3), square(3, 1, 1, 1), "bf01_oi01->bf01")
        y = h.add(y, h.broadcast(p(2, 32), y.shape.dims, (1,)))
        y = h.maximum(y, h.full_like(y, 0))
        y = h.reduce_window(
            y,
            h.constant(-float("inf"), "f32"),
            (WindowDim(1), WindowDim(1), *square(2, 2)),
            "maximum",
        )
        shortcut = y
        for i in (3, 4):
            y = h.tanh(h.convolution(y, p(i, 32, 32, 3, 3), square(3, 1, 1, 1), "bf01_oi01->bf01"))
        y = h.concatenate([h.add(y, shortcut), y], 1)
        y = h.convolution(
            h.pad(y, h.constant(0, "f32"), [(0, 0, 0), (0, 0, 0), (1, 1, 0), (1, 1, 0)]),
            p(5, 8, 64, 3, 3),
            square(3, 2),
            "bf01_oi01->bf01",
        )
        module = self.program(y)
        result = optimize(module)
        assert ops(result.entry.root).count("transpose") == 2
        self.assertSameValue(module, result, 0, 1e-4)
