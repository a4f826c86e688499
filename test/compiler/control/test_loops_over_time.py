"""loop_fill and loop_rows: loops over time that start from nothing, and run on each thread with
rows of their own."""

from __future__ import annotations

import re
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from test.compiler.compiled import check
from test.support import HloTestCase, hlo
from torch_hlo.compiler.compile import emit
from torch_hlo.compiler.control.loop_fill import is_unwritten, loop_fill
from torch_hlo.compiler.control.loop_rows import loop_rows
from torch_hlo.compiler.llvm.target import host
from torch_hlo.compiler.pipeline import optimize, passes_for
from torch_hlo.hlo.ir.instruction import Module, postorder

# h = tanh(h·w + x[i]), y[i] = h over 5 turns and 8 rows; k counts down.
TEXT = """HloModule recurrence

%body (p: (s64[], f32[8,4], f32[5,8,4], f32[4,4], f32[5,8,4], s32[])) -> (s64[], f32[8,4], f32[5,8,4], f32[4,4], f32[5,8,4], s32[]) {
  %p = (s64[], f32[8,4], f32[5,8,4], f32[4,4], f32[5,8,4], s32[]) parameter(0)
  %i = s64[] get-tuple-element(%p), index=0
  %h = f32[8,4] get-tuple-element(%p), index=1
  %x = f32[5,8,4] get-tuple-element(%p), index=2
  %w = f32[4,4] get-tuple-element(%p), index=3
  %y = f32[5,8,4] get-tuple-element(%p), index=4
  %k = s32[] get-tuple-element(%p), index=5
  %zero = s64[] constant(0)
  %one = s64[] constant(1)
  %last = s64[] constant(4)
  %none = s32[] constant(0)
  %step = s32[] constant(1)
  %at = s64[] subtract(%last, %i)
  %d = f32[8,4] dot(%h, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %s = f32[1,8,4] dynamic-slice(%x, %at, %zero, %zero), dynamic_slice_sizes={1,8,4}
  %r = f32[8,4] reshape(%s)
  %a = f32[8,4] add(%d, %r)
  %t = f32[8,4] tanh(%a)
  %u = f32[1,8,4] reshape(%t)
  %v = f32[5,8,4] dynamic-update-slice(%y, %u, %at, %zero, %zero)
  %n = s64[] add(%i, %one)
  %m = s32[] subtract(%k, %step)
  ROOT %o = (s64[], f32[8,4], f32[5,8,4], f32[4,4], f32[5,8,4], s32[]) tuple(%n, %t, %x, %w, %v, %m)
}

%more (p: (s64[], f32[8,4], f32[5,8,4], f32[4,4], f32[5,8,4], s32[])) -> pred[] {
  %p = (s64[], f32[8,4], f32[5,8,4], f32[4,4], f32[5,8,4], s32[]) parameter(0)
  %i = s64[] get-tuple-element(%p), index=0
  %five = s64[] constant(5)
  ROOT %c = pred[] compare(%i, %five), direction=LT
}

ENTRY %main (h: f32[8,4], x: f32[5,8,4], w: f32[4,4], k: s32[]) -> (f32[8,4], f32[5,8,4]) {
  %h = f32[8,4] parameter(0)
  %x = f32[5,8,4] parameter(1)
  %w = f32[4,4] parameter(2)
  %k = s32[] parameter(3)
  %zero = s64[] constant(0)
  %value = f32[] constant(0)
  %y = f32[5,8,4] broadcast(%value), dimensions={}
  %t = (s64[], f32[8,4], f32[5,8,4], f32[4,4], f32[5,8,4], s32[]) tuple(%zero, %h, %x, %w, %y, %k)
  %l = (s64[], f32[8,4], f32[5,8,4], f32[4,4], f32[5,8,4], s32[]) while(%t), condition=%more, body=%body
  %a = f32[8,4] get-tuple-element(%l), index=1
  %b = f32[5,8,4] get-tuple-element(%l), index=4
  ROOT %o = (f32[8,4], f32[5,8,4]) tuple(%a, %b)
}
"""

# What brings rows together: another order, a sum over them, an end that depends on one of them.
MEETING = (
    {
        "  %a = f32[8,4] add(%d, %r)": (
            "  %e = f32[8,4] reverse(%r), dimensions={0}\n  %a = f32[8,4] add(%d, %e)"
        )
    },
    {
        "  %a = f32[8,4] add(%d, %r)": (
            "  %f = f32[] constant(1)\n  %ones = f32[8,8] broadcast(%f), dimensions={}\n  %e ="
            " f32[8,4] dot(%ones, %h), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n  %b ="
            " f32[8,4] add(%d, %e)\n  %a = f32[8,4] add(%b, %r)"
        )
    },
    {
        "  ROOT %c = pred[] compare(%i, %five), direction=LT": (
            "  %c0 = pred[] compare(%i, %five), direction=LT\n  %h = f32[8,4]"
            " get-tuple-element(%p), index=1\n  %s = f32[1,1] slice(%h), slice={[0:1], [0:1]}\n  %q"
            " = f32[] reshape(%s)\n  %c1 = pred[] is-finite(%q)\n  ROOT %c = pred[] and(%c0, %c1)"
        )
    },
)


def loops(module: Module) -> list:
    return [x for x in postorder((module.entry.root,)) if x.op == "while"]


def on_cores(n: int):
    """What is compiled in the block is cut for so many."""
    return patch("torch_hlo.compiler.compile.host", lambda: replace(host(), cores=n))


class Fill(HloTestCase):
    def first(self, text: str) -> bool:
        """Whether y starts as memory that nobody has written."""
        (loop,) = loops(loop_fill(hlo(text)))
        return is_unwritten(loop.operands[0].operands[4])

    def test_results_of_all_turns(self) -> None:
        self.check(loop_fill, hlo(TEXT))
        self.assertTrue(self.first(TEXT))
        self.assertTrue(self.first(TEXT.replace("subtract(%last, %i)", "add(%zero, %i)")))

    def test_what_is_not_written_whole_is_filled(self) -> None:
        # a turn is missing
        for old, new in (
            ("%five = s64[] constant(5)", "%five = s64[] constant(4)"),
            # the first index is clamped, index 0 never comes
            ("%last = s64[] constant(4)", "%last = s64[] constant(5)"),
            ("%one = s64[] constant(1)", "%one = s64[] constant(2)"),
            ("dynamic-slice(%x, %at", "dynamic-slice(%y, %at"),  # it is read
            ("tuple(%zero, %h, %x, %w, %y", "tuple(%start, %h, %x, %w, %y"),
        ):
            text = TEXT.replace(old, new).replace(
                "  %value =", "  %start = s64[] constant(1)\n  %value ="
            )
            self.assertNotEqual(text, TEXT)
            self.assertFalse(self.first(text), new)


class Rows(HloTestCase):
    def parts(self, text: str, cores: int = 2) -> int:
        found = loops(self.check(loop_rows(cores), hlo(text)))
        return found[0].get("independent") or 0

    def test_each_part_has_rows_of_its_own(self) -> None:
        self.assertEqual(self.parts(TEXT), 2)
        self.assertEqual(self.parts(TEXT, 3), 2)  # 8 rows are not cut into three parts
        with patch("torch_hlo.compiler.control.loop_rows.LEAST", 2):
            self.assertEqual(self.parts(TEXT, 4), 4)
        (outer,) = loops(loop_rows(2)(hlo(TEXT)))
        (inner,) = [x for x in outer["body"].instructions() if x.op == "while"]
        # The state is a part's, arrays that turns take slices of are everybody's.
        self.assertEqual(
            [str(s) for s in inner.shape.elements],
            [
                "s64[]",
                "f32[4,4]",
                "f32[5,8,4]",
                "f32[4,4]",
                "f32[5,8,4]",
                "s32[]",
                "s64[]",
            ],
        )

    def test_rows_that_meet_stay_together(self) -> None:
        for changes in MEETING:
            text = TEXT
            for old, new in changes.items():
                self.assertIn(old, text)
                text = text.replace(old, new, 1)
            self.assertEqual(self.parts(text), 0, text)

    def test_a_counter_that_is_read_afterwards(self) -> None:
        text = (
            TEXT.replace("-> (f32[8,4], f32[5,8,4]) {", "-> (f32[8,4], s32[]) {")
            .replace(
                "%b = f32[5,8,4] get-tuple-element(%l), index=4",
                "%b = s32[] get-tuple-element(%l), index=5",
            )
            .replace("ROOT %o = (f32[8,4], f32[5,8,4])", "ROOT %o = (f32[8,4], s32[])")
        )
        self.assertEqual(self.parts(text), 0)

    def test_weights_that_leave_the_cache_are_read_by_many_rows(self) -> None:
        with patch("torch_hlo.compiler.control.loop_rows.NEAR", 10):
            self.assertEqual(self.parts(TEXT), 0)
            with patch("torch_hlo.compiler.control.loop_rows.ROWS", 4):
                self.assertEqual(self.parts(TEXT), 2)


def inputs(hidden: int) -> list:
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(s).astype(np.float32)
        for s in ((8, hidden), (5, 8, hidden), (hidden, hidden))
    ]
    return [*arrays[:2], arrays[2] / np.float32(hidden**0.5), np.int32(3)]


@pytest.mark.parametrize("cores", [1, 2, 4])
def test_values(cores: int) -> None:
    with on_cores(cores), patch("torch_hlo.compiler.control.loop_rows.LEAST", 2):
        for _ in range(5):
            check(hlo(TEXT), inputs(4), 1e-5, 1e-6, optimize=True)


@pytest.mark.parametrize("cores", [1, 2])
def test_large_matrices_are_packed_before_the_loop(cores: int) -> None:
    module = hlo(re.sub(r"(?<=,)4(?=[\]}])", "256", TEXT.replace("f32[4,4]", "f32[256,4]")))
    target = replace(host(), cores=cores)
    made = [emit(optimize(module, passes=passes_for(target)), target)[0].functions]
    with patch("torch_hlo.compiler.control.control_flow.LARGE", 1 << 16):
        made.append(emit(optimize(module, passes=passes_for(target)), target)[0].functions)
        with on_cores(cores):
            check(module, inputs(256), 1e-4, 1e-6, optimize=True)
    assert [any(name.startswith("prepack_b") for name in functions) for functions in made] == [
        False,
        True,
    ]
