"""scatter_fusion: which scatters fill their result and compute their updates themselves."""

from __future__ import annotations

import numpy as np
import pytest

from test.compiler.compiled import check
from test.support import HloTestCase, hlo
from torch_hlo import config
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.gather.scatter_fusion import scatter_fusion

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
        result = self.check(scatter_fusion, hlo(TEXT))
        made = result.entry.root.operands
        self.assertEqual([x.op for x in made], ["fusion", "fusion"])
        self.assertEqual([o.op for x in made for o in x.operands], ["parameter"] * 4)

    def test_an_array_in_memory_stays_an_operand(self) -> None:
        text = TEXT.replace(
            "%start = f32[9,20] broadcast(%value), dimensions={}",
            "%start = f32[9,20] slice(%u), slice={[0:9], [0:20]}",
        )
        self.assertUnchanged(scatter_fusion, hlo(text))


def test_values() -> None:
    rng = np.random.default_rng(0)
    indices = rng.integers(-2, 11, 40)  # some are outside and dropped
    updates = [rng.integers(-4, 5, (40, 20)).astype(np.float32) for _ in range(2)]
    check(hlo(TEXT), [indices, *updates], 0, optimize=True)


def test_equal_rows_are_not_equal_elements() -> None:
    row = ", ".join(map(str, range(20)))
    text = TEXT.replace("%value = f32[] constant(0.5)", f"%value = f32[20] constant({{{row}}})")
    text = text.replace("broadcast(%value), dimensions={}", "broadcast(%value), dimensions={1}")
    indices = np.arange(40) % 9
    check(hlo(text), [indices, *np.ones((2, 40, 20), np.float32)], 0, optimize=True)


MESSAGES = """HloModule messages

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: f32[7,WIDTH], s: s32[50], i: s64[50], w: f32[50], start: f32[9,WIDTH]) -> f32[9,WIDTH] {
  %x = f32[7,WIDTH] parameter(0)
  %s = s32[50] parameter(1)
  %i = s64[50] parameter(2)
  %w = f32[50] parameter(3)
  %start = f32[9,WIDTH] parameter(4)
  %g = f32[50,WIDTH] gather(%x, %s), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,WIDTH}
  %v = f32[50,WIDTH] broadcast(%w), dimensions={0}
  %m = f32[50,WIDTH] multiply(%g, %v)
  %t = f32[50,WIDTH] tanh(%m)
  ROOT %r = f32[9,WIDTH] scatter(%start, %i, %t), update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add
}
"""


def messages(width: int) -> str:
    return MESSAGES.replace("WIDTH", str(width))


class Updates(HloTestCase):
    def test_updates_are_computed_where_they_are_applied(self) -> None:
        (made,) = [
            x
            for x in self.check(scatter_fusion, hlo(messages(64))).entry.instructions()
            if x.op != "parameter"
        ]
        self.assertEqual(made.op, "fusion")

    def test_elements_are_computed_in_vectors_before(self) -> None:
        # A row of 8 fills no vector: a loop of its own computes them faster.
        self.assertUnchanged(scatter_fusion, hlo(messages(8)))

    def test_what_others_read_is_in_memory_anyway(self) -> None:
        text = (
            messages(64)
            .replace("ROOT %r =", "%r =")
            .replace(
                "to_apply=%add\n}",
                "to_apply=%add\n  ROOT %both = (f32[9,64], f32[50,64]) tuple(%r, %t)\n}",
            )
        )
        self.assertUnchanged(
            scatter_fusion,
            hlo(text.replace("-> f32[9,64] {", "-> (f32[9,64], f32[50,64]) {")),
        )


@pytest.mark.parametrize("width", [16, 20, 64, 150])
@pytest.mark.parametrize("threads", [1, 3])
def test_messages(width: int, threads: int) -> None:
    rng = np.random.default_rng(1)
    inputs = [
        rng.standard_normal((7, width)).astype(np.float32),
        rng.integers(-2, 9, 50).astype(np.int32),
        rng.integers(-2, 11, 50),
        rng.standard_normal(50).astype(np.float32),
        rng.standard_normal((9, width)).astype(np.float32),
    ]
    with config.override(THREADS=threads):
        check(hlo(messages(width)), inputs, 1e-5, 1e-6, optimize=True)


def copies(text: str) -> bool:
    found: list[str] = []
    compile_module(
        hlo(text),
        dump=lambda name, value: found.append(value) if name == "llvm" else None,
    )
    return any("copy_bytes" in text for text in found)


def test_the_result_may_lie_where_the_scatter_starts() -> None:
    text = messages(64)
    assert copies(text)
    assert not copies(
        text.replace(
            "HloModule messages",
            "HloModule messages, input_output_alias={ {}: (4, {}) }",
        )
    )
