"""conv_planar: layers alone keep their channels first."""

from __future__ import annotations

from test.support import HloTestCase
from torch_hlo.compiler.convolution.conv_layout import conv_layout
from torch_hlo.compiler.pipeline import optimize
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.instruction import Instruction, called, postorder
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.ir.window import WindowDim
from torch_hlo.hlo.text.parser import parse_module


def p(index, *dims):
    return h.parameter(index, Shape("f32", dims))


def filtered(
    x: Instruction,
    k: Instruction,
    bias: Instruction,
    groups: int,
    size: int = 3,
    stride: int = 1,
) -> Instruction:
    digits = "".join(map(str, range(x.shape.rank - 2)))
    y = h.convolution(
        x,
        k,
        [WindowDim(size, stride, size // 2, size // 2)] * len(digits),
        f"bf{digits}_oi{digits}->bf{digits}",
        groups,
    )
    y = h.add(y, h.broadcast(bias, y.shape.dims, (1,)))
    return h.maximum(y, h.full_like(y, 0))


class ConvPlanar(HloTestCase):
    def turned(self, before: Instruction) -> tuple[int, set[str]]:
        """(how many transposes a program becomes, labels of its convolutions); its value stays."""
        module = self.program(before)
        after = optimize(module)
        self.assertSameValue(module, after, rtol=1e-4)
        everything = [
            y
            for x in postorder((after.entry.root,))
            for y in (x, *(z for c in called(x) for z in c.instructions()))
        ]
        return sum(y.op == "transpose" for y in everything), {
            y["dim_labels"] for y in everything if y.op == "convolution"
        }

    def test_channels_on_their_own(self):
        first = {"bf01_oi01->bf01"}
        assert self.turned(filtered(p(0, 2, 20, 12, 12), p(1, 20, 1, 3, 3), p(2, 20), 20)) == (
            0,
            first,
        )
        assert self.turned(
            filtered(p(0, 2, 20, 24, 24), p(1, 40, 1, 5, 5), p(2, 40), 20, 5, 2)
        ) == (0, first)
        assert self.turned(filtered(p(0, 2, 20, 40), p(1, 20, 1, 3), p(2, 20), 20)) == (
            0,
            {"bf0_oi0->bf0"},
        )

    def test_a_network_keeps_them_last(self):
        """What a convolution of all channels reads, and its result's own reader, stay as they were;
        so does what is also summed per channel."""
        x = filtered(p(0, 2, 20, 12, 12), p(1, 20, 20, 3, 3), p(2, 20), 1)
        assert self.turned(filtered(x, p(3, 20, 1, 3, 3), p(4, 20), 20))[1] == {"b01f_oi01->b01f"}
        alone = filtered(p(0, 2, 20, 12, 12), p(1, 20, 1, 3, 3), p(2, 20), 20)
        assert self.turned(
            h.tuple_(alone, h.reduce(alone, h.constant(0, "f32"), (0, 2, 3), "add"))
        )[1] == {"b01f_oi01->b01f"}

    def test_rows_of_few_pixels(self):
        assert self.turned(filtered(p(0, 2, 20, 7, 7), p(1, 20, 1, 3, 3), p(2, 20), 20))[1] == {
            "b01f_oi01->b01f"
        }

    def test_few_planes_are_never_turned(self):
        before = h.convolution(
            p(0, 2, 3, 12, 12),
            p(1, 3, 1, 5, 5),
            [WindowDim(5, 1, 2, 2)] * 2,
            "bf01_oi01->bf01",
            3,
        )
        self.assertKept(conv_layout, before)

    def test_windows_of_one_element(self):
        for count in (1, 3):
            with self.subTest(count):
                assert self.turned(
                    filtered(p(0, count, 12, 16, 16), p(1, 20, 12, 1, 1), p(2, 20), 1, 1)
                ) == (0, set())

    def test_products_of_which_there_would_be_large_copies(self):
        assert self.turned(filtered(p(0, 3, 40, 4, 4), p(1, 40, 40, 1, 1), p(2, 40), 1, 1))[0] == 2

    def test_products_in_loops(self):
        """The gradient of a weight, summed over the steps of a loop as JAX writes it."""
        module = parse_module("""HloModule gradient
body {
  s = (s32[], f32[8,32,24], f32[8,32,40], f32[40,24]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  xs = f32[8,32,24] get-tuple-element(s), index=1
  gs = f32[8,32,40] get-tuple-element(s), index=2
  sum = f32[40,24] get-tuple-element(s), index=3
  zero = s32[] constant(0)
  x1 = f32[1,32,24] dynamic-slice(xs, i, zero, zero), dynamic_slice_sizes={1,32,24}
  g1 = f32[1,32,40] dynamic-slice(gs, i, zero, zero), dynamic_slice_sizes={1,32,40}
  x = f32[32,24] reshape(x1)
  g = f32[32,40] reshape(g1)
  d = f32[24,40] dot(x, g), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  t = f32[40,24] transpose(d), dimensions={1,0}
  more = f32[40,24] add(sum, t)
  one = s32[] constant(1)
  next = s32[] add(i, one)
  ROOT r = (s32[], f32[8,32,24], f32[8,32,40], f32[40,24]) tuple(next, xs, gs, more)
}
condition {
  s = (s32[], f32[8,32,24], f32[8,32,40], f32[40,24]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] constant(8)
  ROOT go = pred[] compare(i, n), direction=LT
}
ENTRY main {
  xs = f32[8,32,24] parameter(0)
  gs = f32[8,32,40] parameter(1)
  sum = f32[40,24] parameter(2)
  zero = s32[] constant(0)
  s = (s32[], f32[8,32,24], f32[8,32,40], f32[40,24]) tuple(zero, xs, gs, sum)
  w = (s32[], f32[8,32,24], f32[8,32,40], f32[40,24]) while(s), condition=condition, body=body
  ROOT out = f32[40,24] get-tuple-element(w), index=3
}
""")
        after = optimize(module)
        self.assertSameValue(module, after, rtol=1e-4)
        assert " transpose(" in str(module) and " transpose(" not in str(after)
