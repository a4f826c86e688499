"""MLIR bytecode: portable artifacts that StableHLO's own library wrote, of several versions, mean
what their text means; damaged ones are errors."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from test.sweeps.bytecode import MUTATIONS, attempt, mutated
from torch_hlo.hlo.bytecode import BytecodeError, parse_bytecode
from torch_hlo.hlo.bytecode.cursor import Cursor
from torch_hlo.hlo.bytecode.dialects import TYPES
from torch_hlo.hlo.ir import Shape
from torch_hlo.hlo.stablehlo import parse_stablehlo
from torch_hlo.hlo.stablehlo.attributes import Dense, dense_literal
from torch_hlo.hlo.stablehlo.types import Type
from torch_hlo.hlo.text.scanner import ParseError
from torch_hlo.tools.text_api import run_text

DATA = np.load(Path(__file__).parents[1] / "data" / "artifacts.npz")
ARTIFACTS = [key for key in DATA.files if not key.endswith("/text")]


def artifact(key: str) -> bytes:
    return DATA[key].tobytes()


@pytest.mark.parametrize("key", ARTIFACTS)
def test_means_what_its_text_means(key):
    text = artifact(f"{key.rpartition('/')[0]}/text").decode()
    got, want = parse_bytecode(artifact(key)), parse_stablehlo(text)
    assert got.entry.root is want.entry.root
    assert (got.name, got.mesh) == (want.name, want.mesh)


def test_all_programs_of_all_versions():
    """What is on the machine's jaxlib, if there is one."""
    stablehlo = pytest.importorskip("jaxlib.mlir.dialects.stablehlo", reason="needs jaxlib")
    programs = np.load(Path(__file__).parents[1] / "data" / "jax_programs.npz")
    compared = 0
    for key in [k for k in programs.files if k.endswith("/stablehlo")][::4]:
        text = programs[key].tobytes().decode()
        for version in ("1.5.0", "1.9.0", stablehlo.get_current_version()):
            try:
                data = stablehlo.serialize_portable_artifact_str(text, version)
            except ValueError:  # operations that this version has not
                continue
            assert parse_bytecode(data).entry.root is parse_stablehlo(text).entry.root, key
            compared += 1
    assert compared > 80


CHLO = """func.func @main(%x: tensor<4xf32>) -> (tensor<2xi32>, tensor<4xi1>, tensor<1x4xf32>) {
  %c = "chlo.constant"() {value = dense<2.0> : tensor<1x4xf32>} : () -> tensor<1x4xf32>
  %0:2 = chlo.top_k(%x, k = 2) : tensor<4xf32> -> (tensor<2xf32>, tensor<2xi32>)
  %1 = chlo.broadcast_compare %x, %x {comparison_direction = #chlo<comparison_direction LE>} :
      (tensor<4xf32>, tensor<4xf32>) -> tensor<4xi1>
  %2 = "chlo.broadcast_add"(%x, %c) {broadcast_dimensions = array<i64: 1>} :
      (tensor<4xf32>, tensor<1x4xf32>) -> tensor<1x4xf32>
  return %0#1, %1, %2 : tensor<2xi32>, tensor<4xi1>, tensor<1x4xf32>
}"""


def test_attributes_of_chlo():
    stablehlo = pytest.importorskip("jaxlib.mlir.dialects.stablehlo", reason="needs jaxlib")
    mlir = pytest.importorskip("jax._src.interpreters.mlir", reason="needs jax")
    with mlir.make_ir_context():
        module = mlir.ir.Module.parse(CHLO)
        data = stablehlo.serialize_portable_artifact(module, "1.15.0", True)
    assert parse_bytecode(data).entry.root is parse_stablehlo(CHLO).entry.root


ALONG_AXES = """module {
  sdy.mesh @mesh = <["x"=2, "y"=4]>
  func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
    %0 = "stablehlo.all_reduce"(%a) <{replica_groups = #stablehlo.replica_group_mesh_axes<MESH>}> ({
      ^bb0(%b: tensor<f32>, %c: tensor<f32>):
        %1 = stablehlo.add %b, %c : tensor<f32>
        stablehlo.return %1 : tensor<f32>
    }) : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}"""
_AXES = """mesh = #stablehlo.mesh<axes = [#stablehlo.mesh_axis<name = "x", size = 2>,
  #stablehlo.mesh_axis<name = "y", size = 2>], device_ids = dense<[3, 2, 1, 0]> : tensor<4xi64>>"""


@pytest.mark.parametrize(
    "mesh, axes, groups",
    [
        ("mesh = @mesh", 'name = "x"', ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh = @mesh", 'name = "y", sub_axis_info = (1)2', ((0, 2), (1, 3), (4, 6), (5, 7))),
        (_AXES, 'name = "x"', ((3, 1), (2, 0))),
    ],
)
def test_groups_along_axes_of_a_mesh(mesh, axes, groups):
    text = ALONG_AXES.replace("MESH", f"{mesh}, axes = [#stablehlo.axis_ref<{axes}>]")
    assert parse_stablehlo(text).entry.root["replica_groups"] == groups
    stablehlo = pytest.importorskip("jaxlib.mlir.dialects.stablehlo", reason="needs jaxlib")
    mlir = pytest.importorskip("jax._src.interpreters.mlir", reason="needs jax")
    with mlir.make_ir_context():
        data = stablehlo.serialize_portable_artifact(mlir.ir.Module.parse(text), "1.17.0", True)
    assert parse_bytecode(data).entry.root["replica_groups"] == groups


@pytest.mark.parametrize(
    "given, why",
    [
        (
            'mesh = @other, axes = [#stablehlo.axis_ref<name = "x">]',
            "need a mesh .*other",
        ),
        ('mesh = @mesh, axes = [#stablehlo.axis_ref<name = "z">]', "no axis 'z'"),
        (
            'mesh = @mesh, axes = [#stablehlo.axis_ref<name = "y", sub_axis_info = [2]>]',
            "need a mesh",
        ),
        ('mesh = @mesh, axes = [#stablehlo.axis_ref<name = "y", sub_axis_info = (3)2>]', "no part"),
        ("mesh = @mesh, axes = 2", "need a mesh and axes of it"),
    ],
)
def test_axes_that_are_not_there(given, why):
    with pytest.raises(ParseError, match=why):
        parse_stablehlo(ALONG_AXES.replace("MESH", given))


def test_what_mutations_found():
    tables = SimpleNamespace(type=lambda at: Type(Shape("token")))
    with pytest.raises(BytecodeError, match="bad quantized type"):
        TYPES["vhlo"][24](tables, Cursor(b"\3" * 9))
    mesh = '"sdy.mesh"() : () -> ()'
    parse_stablehlo(f"module {{ {mesh} func.func @main() {{ return }} }}")  # no KeyError


def test_runs():
    programs = np.load(Path(__file__).parents[1] / "data" / "jax_programs.npz")
    inputs = [programs[k] for k in programs.files if k.startswith("index_take/input")]
    (y,) = run_text(artifact("index_take/1.8.0"), *inputs)
    np.testing.assert_array_equal(y, programs["index_take/output0"])


@pytest.mark.parametrize(
    "data, value",
    [(b"\x01", 0), (b"\xff", 127), (b"\x02\x04", 256), (b"\x00" + b"\xff" * 8, (1 << 64) - 1)],
)
def test_numbers(data, value):
    assert Cursor(data).varint() == value


def test_a_constant_without_elements():
    """MLIR writes one element."""
    row = Dense(b"\x05\0", Type(Shape("s16", (3, 0))), 0)
    assert dense_literal(Cursor(b""), row)[0].shape == Shape("s16")


def test_signed_numbers():
    assert [Cursor(bytes([2 * n + 1])).signed() for n in range(5)] == [0, -1, 1, -2, 2]


def test_every_truncation_is_an_error():
    whole = artifact("control_while/1.8.0")
    for end in range(len(whole) - 1):
        with pytest.raises(BytecodeError, match="byte"):
            parse_bytecode(whole[:end])


def test_newer_version():
    whole = bytearray(artifact("control_while/1.8.0"))
    whole[4] = 2 * 99 + 1
    with pytest.raises(BytecodeError, match="version 99 is newer than 6; write it for an older"):
        parse_bytecode(bytes(whole))


@pytest.mark.parametrize("key", ["control_while/1.0.0", "manual_partly/1.13.3", "where/1.17.0"])
def test_mutations_are_errors_or_programs(key):
    whole = artifact(key)
    outcomes = [
        attempt(mutated(whole, random.Random(seed), MUTATIONS[seed % len(MUTATIONS)]))
        for seed in range(150)
    ]
    assert {"error", "program"} <= set(outcomes)
