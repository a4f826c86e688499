"""The HLO printer."""

import numpy as np
import pytest

from torch_hlo.hlo.ir import build as b
from torch_hlo.hlo.ir.instruction import Computation, Meta, Module
from torch_hlo.hlo.ir.intern import instr
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.ir.window import WindowDim
from torch_hlo.hlo.text.parser import parse_module
from torch_hlo.hlo.text.printer import computations, instruction_text, module_text


def row_sums() -> Module:
    x = b.parameter(0, Shape("f32", (4, 3)))
    y = b.reduce(b.multiply(x, x), b.constant(0.0, "f32"), (1,), "add")
    return Module("sums", Computation("main", (x,), b.tuple_(x, y)), ((0, 0),))


def test_canonical():
    assert (
        module_text(row_sums())
        == """\
HloModule sums, input_output_alias={ {0}: (0, {}, may-alias) }, \
entry_computation_layout={(f32[4,3]{1,0})->(f32[4,3]{1,0}, f32[4]{0})}

%add_f32 (parameter.0: f32[], parameter.1: f32[]) -> f32[] {
  %parameter.0 = f32[] parameter(0)
  %parameter.1 = f32[] parameter(1)
  ROOT %add.2 = f32[] add(%parameter.0, %parameter.1)
}

ENTRY %main (parameter.0: f32[4,3]) -> (f32[4,3], f32[4]) {
  %parameter.0 = f32[4,3] parameter(0)
  %multiply.1 = f32[4,3] multiply(%parameter.0, %parameter.0)
  %constant.2 = f32[] constant(0)
  %reduce.3 = f32[4] reduce(%multiply.1, %constant.2), dimensions={1}, to_apply=%add_f32
  ROOT %tuple.4 = (f32[4,3], f32[4]) tuple(%parameter.0, %reduce.3)
}
"""
    )


def test_short_of_one_computation_is_its_lines():
    x = b.parameter(0, Shape("f32", (2,)))
    module = Module("m", Computation("main", (x,), b.add(x, b.exponential(x))))
    assert (
        module_text(module, "short")
        == """\
%0 = f32[2] parameter(0)
%1 = f32[2] exponential(%0)
ROOT %2 = f32[2] add(%0, %1)"""
    )


def test_full_style_shows_names_and_metadata():
    x = b.parameter(0, Shape("f32", (77,)))
    y = b.sine(x)
    y.meta = Meta("wave/1", "aten::sin", "model.py:31")
    text = module_text(Module("m", Computation("main", (x,), y)), "full")
    assert (
        'ROOT %wave_1 = f32[77] sine(%parameter.0), metadata={op_name="aten::sin"'
        ' source_file="model.py" source_line=31}' in text
    )


def test_bad_style():
    with pytest.raises(ValueError, match="canonical, full, xla, short"):
        module_text(row_sums(), "pretty")


def test_elided_constants():
    module = Module("m", Computation("main", (), b.constant(np.arange(100), "s32")))
    assert "constant({...})" in module_text(module, elide=10)


def test_instruction_text_is_one_line():
    x = b.parameter(0, Shape("f32", (2, 31)))
    assert instruction_text(b.transpose(x, (1, 0))).endswith(
        "= f32[31,2] transpose(f32[2,31] %parameter), dimensions={1,0}"
    )


def test_called_computations_come_first_and_once():
    scalar = Shape("f32")
    inner = b.computation(lambda p: b.negate(p), (scalar,), "inner")
    outer = b.computation(lambda p: b.call(inner, (b.call(inner, (p,)),)), (scalar,), "outer")
    entry = b.computation(lambda p: b.call(outer, (b.call(inner, (p,)),)), (scalar,), "main")
    assert [c.name for c in computations(entry)] == ["inner", "outer", "main"]


def attributes_program() -> Module:
    x = b.parameter(0, Shape("f32", (2, 3, 8, 8)))
    k = b.parameter(1, Shape("f32", (4, 3, 3, 3)))
    window = (WindowDim(3, 2, 1, -1, 1, 2), WindowDim(3, 1, 0, 2, 2, 1, True))
    conv = b.convolution(x, k, window, "bf01_oi01->bf01")
    padded = b.pad(conv, b.constant(-0.0, "f32"), [(0, 0, 0), (1, -1, 2), (0, 0, 0), (0, 0, 0)])
    cut = b.slice_(padded, (0, 0, 0, 0), (1, 4, 2, 2), (1, 2, 1, 1))
    custom = b.custom_call(
        'my"call',
        (cut,),
        Shape("f32", (3,)),
        opaque="a\\b\n",
        custom_call_has_side_effect=True,
    )
    reduced = instr(
        "all-reduce",
        (custom,),
        custom.shape,
        to_apply=b.binary_computation("add", "f32"),
        replica_groups=((0, 1), (2, 3)),
        serial=4,
    )
    branches = (
        b.computation(lambda p: b.negate(p), (Shape("f32", (3,)),)),
        b.computation(lambda p: b.exponential(p), (Shape("f32", (3,)),)),
    )
    chosen = b.conditional(b.constant(True, "pred"), branches, (reduced, reduced))
    return Module("attributes", Computation("main", (x, k), chosen))


def test_attributes_round_trip():
    module = attributes_program()
    text = str(module)
    assert (
        "window={size=3x3 stride=2x1 pad=1_-1x0_2 lhs_dilate=1x2 rhs_dilate=2x1 rhs_reversal=0x1}"
        in text
    )
    assert "padding=0_0x1_-1_2x0_0x0_0" in text and "slice={[0:1], [0:4:2], [0:2], [0:2]}" in text
    assert 'frontend_attributes={serial="4"}' in text and "true_computation=" in text
    assert parse_module(text) == module
