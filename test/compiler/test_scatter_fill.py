"""scatter_fill: which scatters fill their result themselves."""
from __future__ import annotations

import numpy as np

from test.compiler.codegen.compiled import check
from test.support import HloTestCase, hlo
from torch_hlo.compiler.passes.scatter_fill import scatter_fill

TEXT = """HloModule table

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (i: s64[40], u: f32[40,20], v: f32[40,20]) -> (f32[9,20], f32[9,20]) {
  %i = s64[40] parameter(0)
  %u = f32[40,20] parameter(1)
  %v = f32[40,20] parameter(2)
  %value = f32[] constant(0.5)
  %start = f32[9,20] broadcast(%value), dimensions={}
  %s = f32[9,20] scatter(%start, %i, %u), update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add
  %t = f32[9,20] scatter(%start, %i, %v), update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add
  ROOT %r = (f32[9,20], f32[9,20]) tuple(%s, %t)
}
"""


class Pass(HloTestCase):
    def test_two_scatters_into_equal_arrays_share_nothing(self) -> None:
        result = self.check(scatter_fill, hlo(TEXT))
        made = result.entry.root.operands
        self.assertEqual([x.op for x in made], ["fusion", "fusion"])
        self.assertEqual([o.op for x in made for o in x.operands], ["parameter"] * 4)

    def test_an_array_in_memory_stays_an_operand(self) -> None:
        text = TEXT.replace("%start = f32[9,20] broadcast(%value), dimensions={}", "%start = f32[9,20] slice(%u), slice={[0:9], [0:20]}")
        self.assertUnchanged(scatter_fill, hlo(text))


def test_values() -> None:
    rng = np.random.default_rng(0)
    indices = rng.integers(-2, 11, 40)  # some are outside and dropped
    updates = [rng.integers(-4, 5, (40, 20)).astype(np.float32) for _ in range(2)]
    check(hlo(TEXT), [indices, *updates], 0, optimize=True)
