"""Values of single StableHLO operations by the specification, evaluated and compiled. A row:
operation with %0, %1 … for the arguments, their types, the result's type, arguments, expected
result."""

import math

import numpy as np
import pytest

from torch_hlo.tools.execute import ENGINES
from torch_hlo.tools.text_api import parse_text

INF, NAN = math.inf, math.nan
ROWS = [
    (
        "stablehlo.maximum",
        "4xcomplex<f32>",
        "4xcomplex<f32>",
        [[1 + 2j, 1 + 7j, -1j, 3], [7 + 1j, 1 + 2j, 1j, 2 + 9j]],
        [7 + 1j, 1 + 7j, 1j, 3],
    ),
    (
        "stablehlo.minimum",
        "2xcomplex<f64>",
        "2xcomplex<f64>",
        [[1 + 2j, 1 + 7j], [7 + 1j, 1 + 2j]],
        [1 + 2j, 1 + 2j],
    ),
    (
        "stablehlo.convert",
        "3xcomplex<f64>",
        "3xi1",
        [[1 + 0j, 2j, -3 + 1j]],
        [True, False, True],
    ),
    (
        "stablehlo.convert",
        "4xf32",
        "4xi8",
        [[1.9, -1.9, 127.0, -128.0]],
        [1, -1, 127, -128],
    ),
    ("chlo.mulhi", "3xi8", "3xi8", [[100, -100, 127], [100, 100, 127]], [39, -40, 63]),
    (
        "chlo.mulhi",
        "2xui32",
        "2xui32",
        [[2**32 - 1, 2**31], [2**32 - 1, 2]],
        [2**32 - 2, 1],
    ),
    (
        "chlo.mulhi",
        "4xi64",
        "4xi64",
        [[2**62, -(2**62), -1, 2**63 - 1], [4, 4, 1, 2**63 - 1]],
        [1, -1, -1, 2**62 - 1],
    ),
    (
        "chlo.mulhi",
        "2xui64",
        "2xui64",
        [[2**64 - 1, 2**63], [2**64 - 1, 2]],
        [2**64 - 2, 1],
    ),
    ("stablehlo.shift_left", "3xi8", "3xi8", [[1, -1, 5], [3, 8, 0]], [8, 0, 5]),
    (
        "stablehlo.shift_right_arithmetic",
        "3xi8",
        "3xi8",
        [[-8, -1, 5], [1, 9, 1]],
        [-4, -1, 2],
    ),
    ("stablehlo.shift_right_logical", "2xi8", "2xi8", [[-1, -1], [1, 8]], [127, 0]),
    (
        "stablehlo.divide",
        "4xi32",
        "4xi32",
        [[17, -17, 17, -17], [3, 3, -3, -3]],
        [5, -5, -5, 5],
    ),
    (
        "stablehlo.remainder",
        "4xi32",
        "4xi32",
        [[17, -17, 17, -17], [3, 3, -3, -3]],
        [2, -2, 2, -2],
    ),
    (
        "stablehlo.remainder",
        "4xf64",
        "4xf64",
        [[17.1, -17.1, 17.1, -17.1], [3.0, 3.0, -3.0, -3.0]],
        [2.1, -2.1, 2.1, -2.1],
    ),
    (
        "stablehlo.round_nearest_afz",
        "5xf32",
        "5xf32",
        [[-2.5, 0.4, 0.5, 0.6, 2.5]],
        [-3.0, 0.0, 1.0, 1.0, 3.0],
    ),
    (
        "stablehlo.round_nearest_even",
        "5xf32",
        "5xf32",
        [[-2.5, 0.4, 0.5, 0.6, 2.5]],
        [-2.0, 0.0, 0.0, 1.0, 2.0],
    ),
    (
        "stablehlo.sign",
        "4xf64",
        "4xf64",
        [[-INF, -0.0, 2.0, NAN]],
        [-1.0, -0.0, 1.0, NAN],
    ),
    ("stablehlo.popcnt", "4xi64", "4xi64", [[0, 1, 2, 127]], [0, 1, 1, 7]),
    ("stablehlo.count_leading_zeros", "3xi16", "3xi16", [[0, 1, -1]], [16, 15, 0]),
    (
        "stablehlo.power",
        "6xf64",
        "6xf64",
        [[-2.0, -0.0, -36.0, 5.0, 3.0, 10000.0], [2.0, 2.0, 1.1, 2.0, -1.0, 10.0]],
        [4.0, 0.0, NAN, 25.0, 1 / 3, 1e40],
    ),
    (
        "stablehlo.atan2",
        "3xf64",
        "3xf64",
        [[0.0, 1.0, -1.0], [0.0, 0.0, 0.0]],
        [0.0, math.pi / 2, -math.pi / 2],
    ),
    (
        "stablehlo.cbrt",
        "4xf64",
        "4xf64",
        [[0.0, 1.0, 8.0, -27.0]],
        [0.0, 1.0, 2.0, -3.0],
    ),
    (
        "stablehlo.is_finite",
        "4xf64",
        "4xi1",
        [[-INF, INF, NAN, -10.0]],
        [False, False, False, True],
    ),
    (
        "stablehlo.and",
        "4xi1",
        "4xi1",
        [[False, False, True, True], [False, True, False, True]],
        [False, False, False, True],
    ),
    ("stablehlo.not", "2xui8", "2xui8", [[1, 2]], [254, 253]),
    (
        "stablehlo.sine",
        "2xf32",
        "2xf32",
        [[3e38, 1e22]],
        np.sin(np.array([3e38, 1e22], "f").astype("d")),
    ),
    ("stablehlo.cosine", "2xf64", "2xf64", [[1e300, 1e22]], np.cos([1e300, 1e22])),
    ("stablehlo.tan", "2xf64", "2xf64", [[1e300, 0.5]], np.tan([1e300, 0.5])),
]
NUMPY = {
    "i1": "?", "i8": "i1", "i16": "i2", "i32": "i4", "i64": "i8", "ui8": "u1", "ui32": "u4",
    "ui64": "u8", "f32": "f4", "f64": "f8", "complex<f32>": "c8", "complex<f64>": "c16",
}  # fmt: skip


def numpy_type(text: str) -> str:
    return NUMPY[text.partition("x")[2]]


@pytest.mark.parametrize("engine", ["evaluator", "compiled"])
@pytest.mark.parametrize(("op", "operand", "result", "values", "want"), ROWS)
def test_value(engine, op, operand, result, values, want):
    names = [f"%arg{i}" for i in range(len(values))]
    types = ", ".join([f"tensor<{operand}>"] * len(values))
    arguments = ", ".join(f"{n}: tensor<{operand}>" for n in names)
    text = (
        f'func.func @main({arguments}) -> tensor<{result}> {{\n %0 = "{op}"({", ".join(names)}) :'
        f" ({types}) -> tensor<{result}>\n return %0 : tensor<{result}>\n}}"
    )
    ((got, _),) = ENGINES[engine](
        parse_text(text), [np.array(v, numpy_type(operand)) for v in values]
    )
    (
        np.testing.assert_allclose(got, np.array(want, numpy_type(result)), rtol=1e-6, atol=1e-6)
        if got.dtype.kind in "fc"
        else np.testing.assert_array_equal(got, want)
    )


@pytest.mark.parametrize("engine", ["evaluator", "compiled"])
def test_quantized_values_are_their_stored_integers(engine):
    text = """func.func @main(%x: tensor<2xf32>) -> (tensor<2xi8>, tensor<2xf32>) {
      %q = "stablehlo.uniform_quantize"(%x)
          : (tensor<2xf32>) -> tensor<2x!quant.uniform<i8:f32, 0.5:-20>>
      %i = "stablehlo.bitcast_convert"(%q) : (tensor<2x!quant.uniform<i8:f32, 0.5:-20>>) ->
          tensor<2xi8>
      %r = "stablehlo.bitcast_convert"(%i)
          : (tensor<2xi8>) -> tensor<2x!quant.uniform<i8:f32, 0.5:-20>>
      %y = "stablehlo.uniform_dequantize"(%r) : (tensor<2x!quant.uniform<i8:f32, 0.5:-20>>) ->
          tensor<2xf32>
      return %i, %y : tensor<2xi8>, tensor<2xf32>
    }"""
    (stored, _), (back, _) = ENGINES[engine](parse_text(text), [np.array([4.0, 15.1], "f")])
    assert stored.tolist() == [-12, 10] and back.tolist() == [4.0, 15.0]
