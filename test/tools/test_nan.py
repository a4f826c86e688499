"""torch_hlo.debug.nan_checks with programs in text."""

import numpy as np
import pytest

import torch_hlo
from torch_hlo import debug

LOOP = """
func.func @main(%a: tensor<3xf32>) -> tensor<3xf32> {
  %c = stablehlo.constant dense<0> : tensor<i32>
  %0:2 = stablehlo.while(%i = %c, %x = %a) : tensor<i32>, tensor<3xf32>
  cond {
    %n = stablehlo.constant dense<4> : tensor<i32>
    %p = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %f = stablehlo.constant dense<1.0> : tensor<3xf32>
    %j = stablehlo.add %i, %one : tensor<i32>
    %y = stablehlo.subtract %x, %f : tensor<3xf32>
    %z = stablehlo.log %y : tensor<3xf32>
    stablehlo.return %j, %z : tensor<i32>, tensor<3xf32>
  }
  return %0#1 : tensor<3xf32>
}
"""


def test_the_instruction_in_a_loop_is_named():
    x = np.array([5, 3, 2], np.float32)
    assert np.isnan(torch_hlo.run_text(LOOP, x)).all()
    with pytest.raises(FloatingPointError) as error, debug.nan_checks():
        torch_hlo.run_text(LOOP, x)
    assert str(error.value) == "log(f32[3]) -> f32[3] makes 2 NaN, in its run 2"
    with debug.nan_checks():
        assert not np.isnan(torch_hlo.run_text(LOOP, np.full(3, 1e30, np.float32))).all()


DIVIDED = """
HloModule m
ENTRY %main (a: f32[3], b: f32[3]) -> f32[3] {
  %a = f32[3] parameter(0)
  %b = f32[3] parameter(1)
  ROOT %c = f32[3] divide(%a, %b)
}
"""


def test_infinities():
    one, x = np.ones(3, np.float32), np.array([1, 0, 2], np.float32)
    with pytest.raises(FloatingPointError) as error, debug.nan_checks():
        torch_hlo.run_text(DIVIDED, one, x)
    assert str(error.value) == "divide(f32[3], f32[3]) -> f32[3] makes 1 infinities, in its run 1"
    with debug.nan_checks(infinities=False):
        torch_hlo.run_text(DIVIDED, one, x)
