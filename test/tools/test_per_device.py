"""partition_text and `python -m torch_hlo partition`."""

from __future__ import annotations

import io
import tempfile
import unittest
from contextlib import redirect_stderr, redirect_stdout

import numpy as np

import torch_hlo
from torch_hlo.tools import UsageError, cli

MLP = """HloModule mlp

ENTRY main {
  x = f32[16,32] parameter(0), sharding={devices=[2,1,4]<=[8] last_tile_dim_replicate}
  up = f32[32,64] parameter(1), sharding={devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}
  down = f32[64,32] parameter(2), sharding={devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}
  a = f32[16,64] dot(x, up), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  t = f32[16,64] tanh(a)
  ROOT b = f32[16,32] dot(t, down), lhs_contracting_dims={1}, rhs_contracting_dims={0}, sharding={devices=[2,1,4]<=[8] last_tile_dim_replicate}
}
"""
SHARDY = """module @mlp {
  sdy.mesh @mesh = <["x"=2, "y"=4]>
  func.func @main(%x: tensor<16x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
                  %up: tensor<32x64xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"y"}]>},
                  %down: tensor<64x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>})
      -> (tensor<16x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
    %0 = stablehlo.dot_general %x, %up, contracting_dims = [1] x [0] : (tensor<16x32xf32>, tensor<32x64xf32>) -> tensor<16x64xf32>
    %1 = stablehlo.tanh %0 : tensor<16x64xf32>
    %2 = stablehlo.dot_general %1, %down, contracting_dims = [1] x [0] : (tensor<16x64xf32>, tensor<64x32xf32>) -> tensor<16x32xf32>
    return %2 : tensor<16x32xf32>
  }
}
"""


def command(*words: str, text: str = MLP) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with (
        tempfile.NamedTemporaryFile("w", suffix=".hlo") as file,
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        file.write(text)
        file.flush()
        return (
            cli.main(["partition", file.name, *words]),
            out.getvalue(),
            err.getvalue(),
        )


class TestPartitionText(unittest.TestCase):
    def test_one_all_reduce(self):
        for text in (MLP, SHARDY):
            result = torch_hlo.partition_text(text)
            self.assertEqual(result.count(" all-reduce("), 1)
            self.assertNotIn("all-gather", result)
            self.assertIn("replica_groups={{0,1,2,3},{4,5,6,7}}", result)
            self.assertIn("f32[8,32]", result)

    def test_the_program_of_a_device_runs_on_whole_arrays(self):
        r = np.random.default_rng(0)
        x, up, down = (
            r.standard_normal(d).astype(np.float32) for d in ((16, 32), (32, 64), (64, 32))
        )
        (got,) = torch_hlo.run_text(torch_hlo.partition_text(MLP), [x, up, down], devices=8)
        np.testing.assert_allclose(got, np.tanh(x @ up) @ down, rtol=1e-4, atol=1e-4)

    def test_partitioning_twice_changes_nothing(self):
        once = torch_hlo.partition_text(MLP)
        self.assertEqual(torch_hlo.partition_text(once), once)

    def test_without_annotations(self):
        with self.assertRaisesRegex(UsageError, "no shardings"):
            torch_hlo.partition_text("HloModule m\nENTRY main { ROOT x = f32[4] parameter(0) }")


class TestCommand(unittest.TestCase):
    def test_program_and_table(self):
        code, out, _ = command()
        self.assertEqual(code, 0)
        self.assertIn("all-reduce(", out)
        self.assertRegex(out, r"// all-reduce +1 +1,536")

    def test_explain(self):
        code, out, _ = command("--explain")
        self.assertEqual(code, 0)
        self.assertRegex(out, r"f32\[16,64\] \{\[\{a\}, \{b\}\]\}: dimension 0 as ")
        self.assertIn("all-reduce of f32[8,32]: 1,536 bytes, 2 groups of 4", out)

    def test_usage(self):
        code, _, err = command(text="HloModule m\nENTRY main { ROOT x = f32[4] parameter(0) }")
        self.assertEqual(code, cli.USAGE)
        self.assertIn("no shardings", err)


if __name__ == "__main__":
    unittest.main()
