"""The profiler: counters of compiled steps, the table, the command."""

from __future__ import annotations

import torch

import torch_hlo
from torch_hlo import profiler
from torch_hlo.compiler.codegen.profile import describe
from torch_hlo.hlo.ir import build as b
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.tools.cli import main


def test_lines_of_a_recorded_program() -> None:
    x = torch.randn(64, 64).to("hlo")
    with profiler.profile() as report:
        for _ in range(3):
            y = torch.softmax(x @ x, -1)
            torch_hlo.mark_step()
    assert torch.isfinite(y.cpu()).all()
    dots = [line for line in report.lines if line.step.op == "dot"]
    assert [line.calls for line in dots] == [3]
    assert dots[0].step.matrix_flops == 2 * 64**3 and dots[0].step.bytes >= 2 * 4 * 64 * 64
    assert 0 < dots[0].best <= dots[0].total
    assert all(0 <= line.limit <= 1 for line in report.lines)  # these arrays are in caches
    assert "dot(f32[64,64])" in report.table()


def test_steps_of_loops_are_counted() -> None:
    model = torch.nn.LSTM(8, 16).to("hlo")
    with profiler.profile() as report, torch.no_grad():
        out = model(torch.randn(6, 2, 8).to("hlo"))[0].cpu()
    assert torch.isfinite(out).all()
    inside = [line for line in report.lines if line.step.depth]
    assert {line.calls for line in inside if line.step.op == "dot"} == {6}
    loop = next(line for line in report.lines if line.step.op == "while")
    assert sum(line.total for line in inside) <= loop.total
    assert "in a loop: dot" in report.table()


def test_traffic() -> None:
    x = b.parameter(0, Shape("f32", (1000, 8)))
    assert describe(b.negate(x)).bytes == 2 * 4 * 8000 and describe(b.negate(x)).flops == 8000
    piece = b.slice_(x, (0, 0), (10, 8))
    assert describe(piece).bytes == 2 * 4 * 80 and describe(piece).flops == 0


def test_command(tmp_path, capsys) -> None:
    file = tmp_path / "x.hlo"
    file.write_text(
        "HloModule m\nENTRY e {\n  p = f32[256,256] parameter(0)\n  ROOT d = f32[256,256] dot(p,"
        " p), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n"
    )
    assert main(["profile", str(file), "--runs", "2"]) == 0
    out = capsys.readouterr().out
    assert "dot" in out and "GB/s" in out
