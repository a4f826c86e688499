"""Packed copies of weights (device/cpu/packed.py): same bits with and without, never older than the
weight, within their budget."""

import gc
import unittest
from dataclasses import replace as with_fields

import torch
import torch.nn.functional as F

import torch_hlo
from torch_hlo import config
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.executable import Executable
from torch_hlo.device.cpu import packed
from torch_hlo.hlo.ir.verify import VerifyError, verify
from torch_hlo.hlo.text.parser import parse_module
from torch_hlo.hlo.text.printer import module_text
from torch_hlo.lazy.record import session

LAYER = """HloModule layer, entry_computation_layout={(f32[40,64], f32[300,64])->f32[40,300]}, frontend_attributes={constants="1"}

ENTRY main {
  x = f32[40,64] parameter(0)
  w = f32[300,64] parameter(1)
  ROOT y = f32[40,300] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""


def run(f, *tensors: torch.Tensor) -> torch.Tensor:
    """One step."""
    result = f(*tensors)
    torch_hlo.mark_step()
    return result.cpu()


class PackedTest(unittest.TestCase):
    def setUp(self) -> None:
        torch.manual_seed(0)
        session.engine().clear_cache()  # programs of other sizes make symbolic ones
        gc.collect()
        self.before = packed.total()

    def kept(self) -> int:
        torch_hlo.sync()
        return packed.total() - self.before

    def test_same_bits(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for m, k, n in (
                (40, 64, 300),
                (17, 1024, 100),
                (100, 400, 333),
                (250, 96, 777),
            ):
                with (
                    self.subTest(dtype=dtype, shape=(m, k, n)),
                    config.override(PACKED_WEIGHTS=64.0, DYNAMIC=False),
                ):
                    x, w, b = (
                        torch.randn(m, k, dtype=dtype),
                        torch.randn(n, k, dtype=dtype),
                        torch.randn(n, dtype=dtype),
                    )
                    x, w, b = x.to("hlo"), w.to("hlo"), b.to("hlo")
                    without, marked, first, second = (
                        run(lambda x, w, b: F.relu(F.linear(x, w, b)), x, w, b) for _ in range(4)
                    )
                    # as narrow as the weight
                    self.assertGreaterEqual(self.kept(), k * n * w.element_size())
                    if dtype.itemsize == 2:  # and what kernels may read past it
                        self.assertLess(self.kept(), 2 * k * (n + 48) + (1 << 16))
                    self.assertTrue(
                        torch.equal(without, marked)
                        and torch.equal(without, first)
                        and torch.equal(without, second)
                    )
                    want = F.relu(F.linear(x.cpu().double(), w.cpu().double(), b.cpu().double()))
                    torch.testing.assert_close(
                        second.double(),
                        want,
                        rtol=2e-2 if dtype.itemsize == 2 else 1e-4,
                        atol=0.1 if dtype.itemsize == 2 else 1e-3,
                    )
                    del x, w, b
                    gc.collect()
                    self.assertEqual(self.kept(), 0)

    def test_written_weights(self):
        x, w = torch.randn(40, 64, device="hlo"), torch.randn(300, 64, device="hlo")
        with config.override(PACKED_WEIGHTS=64.0):
            for _ in range(3):
                old = run(F.linear, x, w)
            self.assertGreater(self.kept(), 0)
            w.mul_(2)
            torch_hlo.mark_step()
            self.assertEqual(self.kept(), 0)
            for _ in range(3):
                self.assertTrue(torch.equal(run(F.linear, x, w), 2 * old))
            with torch.no_grad():
                w[3] = 0.0
            for _ in range(3):
                self.assertFalse(run(F.linear, x, w)[:, 3].any())

    def test_given_to_other_libraries(self):
        x, w = torch.randn(40, 64, device="hlo"), torch.randn(300, 64, device="hlo")
        with config.override(PACKED_WEIGHTS=64.0):
            for _ in range(3):
                old = run(F.linear, x, w)
            self.assertGreater(self.kept(), 0)
            outside = torch.from_dlpack(w)
            for _ in range(3):
                outside.mul_(2)
                old *= 2
                self.assertTrue(torch.equal(run(F.linear, x, w), old))
            self.assertEqual(self.kept(), 0)

    def test_written_while_in_flight(self):
        x, w = torch.randn(200, 512, device="hlo"), torch.randn(512, 512, device="hlo")
        with config.override(PACKED_WEIGHTS=64.0):
            for _ in range(3):
                old = run(F.linear, x, w)
            results = []
            for _ in range(6):
                results.append(F.linear(x, w))
                torch_hlo.mark_step()
                w.mul_(2)
                torch_hlo.mark_step()
                torch.randn(600, 512).to("hlo")  # takes the memory that the copy had
            for i, r in enumerate(results):
                self.assertTrue(torch.equal(r.cpu(), old * 2**i))

    def test_captured(self):
        x, layer = torch.randn(40, 64, device="hlo"), torch.nn.Linear(64, 300).to("hlo")
        step = torch_hlo.compile(lambda x: layer(x))
        with config.override(PACKED_WEIGHTS=64.0), torch.no_grad():
            first = step(x).cpu()
            for _ in range(4):
                self.assertTrue(torch.equal(step(x).cpu(), first))
            self.assertGreater(self.kept(), 0)
            layer.weight.copy_(torch.ones(300, 64))
            torch.testing.assert_close(
                step(x).cpu(),
                x.cpu().sum(1, keepdim=True) + layer.bias.cpu(),
                rtol=1e-4,
                atol=1e-4,
            )

    def test_captured_updates(self):
        x, layer = (
            torch.randn(40, 64, device="hlo"),
            torch.nn.Linear(64, 300, bias=False).to("hlo"),
        )

        @torch_hlo.compile
        def double():
            layer.weight.mul_(2)

        look = torch_hlo.compile(lambda x: layer(x))
        with config.override(PACKED_WEIGHTS=64.0), torch.no_grad():
            right = look(x).cpu()
            for _ in range(6):
                double()
                right *= 2
                for _ in range(3):
                    self.assertTrue(torch.equal(look(x).cpu(), right))
            self.assertGreater(self.kept(), 0)

    def test_programs_share_copies(self):
        w = torch.randn(304, 64, device="hlo")
        with config.override(PACKED_WEIGHTS=64.0, DYNAMIC=False):
            for rows in (40, 40, 40, 56, 56, 56):
                run(F.linear, torch.randn(rows, 64, device="hlo"), w)
                sizes = self.kept()
                if rows == 40 and sizes:
                    one = sizes
            self.assertEqual(sizes, one)

    def test_symbolic_rows(self):
        w = torch.randn(304, 64, device="hlo")
        with config.override(PACKED_WEIGHTS=64.0):
            for rows in (33, 35, 40, 61, 70, 20, 300):
                x = torch.randn(rows, 64)
                torch.testing.assert_close(
                    run(F.linear, x.to("hlo"), w), x @ w.cpu().t(), rtol=1e-4, atol=1e-4
                )
            self.assertGreater(self.kept(), 0)

    def test_budget(self):
        x, ws = (
            torch.randn(40, 64, device="hlo"),
            [torch.randn(300 + i, 64, device="hlo") for i in range(4)],
        )
        for budget, count in ((0.0, 0), (0.25, 1)):
            with config.override(PACKED_WEIGHTS=budget, DYNAMIC=False):
                for _ in range(3):
                    for w in ws:
                        run(F.linear, x, w)
                self.assertEqual(self.kept() > 0, count > 0)
                self.assertLessEqual(self.kept(), budget * 2**20)
            ws = [w + 0 for w in ws]
            torch_hlo.mark_step()

    def test_text_and_executable(self):
        module = parse_module(LAYER)
        self.assertEqual(module.constants, (1,))
        self.assertEqual(parse_module(module_text(module)).constants, (1,))
        executable = compile_module(module)
        (packing,) = executable.packings
        self.assertEqual(packing.parameter, 1)
        self.assertEqual(Executable.from_bytes(executable.to_bytes()), executable)
        with self.assertRaisesRegex(VerifyError, "constants"):
            verify(with_fields(module, constants=(2,)))


if __name__ == "__main__":
    unittest.main()
