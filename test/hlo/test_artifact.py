"""Portable artifacts that we write: our reader and StableHLO's own one find the program in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from torch_hlo.hlo.bytecode import parse_bytecode, portable_artifact
from torch_hlo.hlo.read import parse_text
from torch_hlo.hlo.stablehlo import WriteError, parse_stablehlo, stablehlo_text

FOLDER = Path(__file__).parents[1] / "data"
DATA, PROGRAMS = np.load(FOLDER / "artifacts.npz"), np.load(FOLDER / "jax_programs.npz")
TEXTS = {k: DATA[k].tobytes().decode() for k in DATA.files if k.endswith("/text")}
OTHERS = {k: PROGRAMS[k].tobytes().decode() for k in PROGRAMS.files if k.endswith("/stablehlo")}
SHARDED = """module @m {
  sdy.mesh @mesh = <["x"=2]>
  func.func @main(%arg0: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>})
      -> tensor<4xf32> {
    %0 = chlo.erf %arg0 : tensor<4xf32> -> tensor<4xf32>
    %1 = sdy.sharding_constraint %0 <@mesh, [{}]> : tensor<4xf32>
    return %1 : tensor<4xf32>
  }
}
"""


def version(data: bytes) -> str:
    return data[5:].partition(b"\0")[0].decode().removeprefix("StableHLO_v")


@pytest.mark.parametrize("key", [*TEXTS, *[*OTHERS][::5]])
def test_reads_back(key):
    module = parse_stablehlo((TEXTS | OTHERS)[key])
    got, want = parse_bytecode(portable_artifact(module)), parse_stablehlo(stablehlo_text(module))
    assert got.entry.root is want.entry.root
    assert (got.name, got.mesh, got.aliases) == (want.name, want.mesh, want.aliases)


def test_stablehlo_reads_it():
    """StableHLO's library finds what it finds in its own artifact of the same text."""
    stablehlo = pytest.importorskip("jaxlib.mlir.dialects.stablehlo", reason="needs jaxlib")
    context = pytest.importorskip("jax._src.interpreters.mlir").make_ir_context()
    compared = 0
    for text in [SHARDED, *TEXTS.values(), *[*OTHERS.values()][::5]]:
        module = parse_stablehlo(text)
        data = portable_artifact(module)
        got = stablehlo.deserialize_portable_artifact(context, data)
        if version(data) != "1.11.0":  # the library writes no other dialects from here
            same = stablehlo.serialize_portable_artifact_str(stablehlo_text(module), version(data))
            want = stablehlo.deserialize_portable_artifact(context, same)
            assert str(got) == str(want)
            compared += 1
        assert parse_stablehlo(str(got)).entry.root is parse_bytecode(data).entry.root
    assert compared > 50


@pytest.mark.parametrize(
    "entry, wanted",
    [
        ("ROOT y = f32[4] cosine(x)", "1.0.0"),
        ("ROOT y = f8e4m3[4] convert(x)", "1.7.0"),
        ("ROOT y = f4e2m1fn[4] convert(x)", "1.8.0"),
        ("ROOT y = f8e8m0fnu[4] convert(x)", "1.8.0"),
        ("ROOT y = f32[4] erf(x)", "1.11.0"),
        ("ROOT y = f32[4] tan(x)", "1.4.0"),
    ],
)
def test_is_for_the_oldest_version_that_has_all(entry, wanted):
    module = parse_text(f"HloModule m\nENTRY e {{\n x = f32[4] parameter(0)\n {entry}\n}}\n")
    data = portable_artifact(module)
    assert version(data) == wanted
    assert parse_bytecode(data).entry.root is module.entry.root


def test_shardings_and_other_dialects():
    module = parse_stablehlo(SHARDED)
    got = parse_bytecode(portable_artifact(module))
    assert got.entry.root is module.entry.root
    assert got.mesh == module.mesh


CHLO = """HloModule m
ENTRY e {
  x = f32[4,5] parameter(0)
  b = f32[3,5,2] parameter(1)
  g = s32[3] parameter(2)
  y = f32[4,2] ragged-dot(x, b, g), lhs_contracting_dims={1}, rhs_contracting_dims={1},
      lhs_ragged_dims={0}, rhs_group_dims={0}
  t = (f32[4,2], s32[4,2]) topk(x), k=2, largest=true
  i = s32[4,2] get-tuple-element(t), index=1
  ROOT z = (f32[4,2], s32[4,2]) tuple(y, i)
}
"""
QUANTIZED = """func.func @main(%x: tensor<4x2xf32>) -> tensor<4x2xf32> {
  %0 = stablehlo.uniform_quantize %x :
      (tensor<4x2xf32>) -> tensor<4x2x!quant.uniform<i8:f32, 0.1:3>>
  %1 = stablehlo.uniform_dequantize %0 :
      (tensor<4x2x!quant.uniform<i8:f32, 0.1:3>>) -> tensor<4x2xf32>
  %2 = stablehlo.uniform_quantize %1 :
      (tensor<4x2xf32>) -> tensor<4x2x!quant.uniform<u8:f32:1, {1.0e-5:3, 0.25:200}>>
  %3 = stablehlo.uniform_dequantize %2 :
      (tensor<4x2x!quant.uniform<u8:f32:1, {1.0e-5:3, 0.25:200}>>) -> tensor<4x2xf32>
  return %3 : tensor<4x2xf32>
}
"""


@pytest.mark.parametrize("text, wanted", [(CHLO, "1.11.0"), (QUANTIZED, "1.0.0")])
def test_attributes_of_chlo_and_quantized_types(text, wanted):
    module = parse_text(text)
    data = portable_artifact(module)
    assert version(data) == wanted
    assert parse_bytecode(data).entry.root is module.entry.root
    stablehlo = pytest.importorskip("jaxlib.mlir.dialects.stablehlo", reason="needs jaxlib")
    context = pytest.importorskip("jax._src.interpreters.mlir").make_ir_context()
    theirs = str(stablehlo.deserialize_portable_artifact(context, data))
    assert parse_stablehlo(theirs).entry.root is module.entry.root
    if text is QUANTIZED:  # and what the library writes
        same = stablehlo.serialize_portable_artifact_str(text, wanted)
        assert parse_bytecode(same).entry.root is module.entry.root


def test_what_no_artifact_holds():
    text = "HloModule m\nENTRY e {\n x = f32[4] parameter(0)\n s = f32[] parameter(1)\n"
    text += " z = s32[] constant(0)\n ROOT y = s8[4] uniform-quantize(x, s, z)\n}\n"
    with pytest.raises(WriteError, match=r"uniform-quantize of f32\[4\] by f32\[\]: .* constants"):
        portable_artifact(parse_text(text))
