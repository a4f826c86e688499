"""Programs as pages: the data, dumps, and what a browser makes of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from test.pages.test_pages import BROWSER, data_of, opened
from torch_hlo.hlo.text.parser import parse_module
from torch_hlo.tools import cli, view

PROGRAM = """HloModule small
ENTRY main {
  x = f32[8,16] parameter(0)
  w = f32[16,32] parameter(1)
  d = f32[8,32] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="aten.mm" source_file="model.py:3, in module fc"}
  one = f32[] constant(1)
  ones = f32[8,32] broadcast(one), dimensions={}
  m = f32[8,32] multiply(d, ones)
  t = f32[8,32] tanh(m)
  s = f32[32,8] transpose(t), dimensions={1,0}
  e = f32[32,8] exponential(s)
  ROOT r = (f32[8,32], f32[32,8]) tuple(t, e)
}
"""


def test_what_is_told_of_a_program():
    found = view.program(parse_module(PROGRAM), "name", "because")
    names = [name for name, _ in found["passes"]]
    assert names[0] == "input" and names[-1] == "fusion" and len(names) > 2
    final = found["passes"][-1][1]
    lines = final[final.index("ENTRY") :].splitlines()[1:]
    assert found["steps"]
    for index, moved, _, _, functions in found["steps"]:  # each is a line of the entry
        assert "fusion(" in lines[index] or "dot(" in lines[index] or "transpose" in lines[index]
        assert moved > 0 and functions
        for name in functions:
            assert f"@{name}(" in found["llvm"] or f"@{name}" in found["llvm"]
    assert max(matrix for _, _, _, matrix, _ in found["steps"]) == 2 * 8 * 32 * 16
    assert found["buffers"].startswith("arena ") and found["asm"]
    assert 'source_file="model.py:3, in module fc"' in final
    assert (found["name"], found["reason"]) == ("name", "because")


def test_dumps(tmp_path, capsys):
    code = (
        "import torch, torch_hlo\nx = torch.ones(3).to('hlo')\n(x + 1).tolist(); (x * 2).tolist()"
    )
    env = {**os.environ, "TORCH_HLO_DUMP": str(tmp_path / "dump"), "TORCH_HLO_CPU_NUMBERS": "0"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=120)
    page = tmp_path / "v.html"
    assert cli.main(["view", str(tmp_path / "dump"), "-o", str(page)]) == cli.OK
    programs = data_of(page.read_text())["programs"]
    assert [p["name"] for p in programs] == ["0001_step_1", "0002_step_2"]
    assert "nearest cached program step_1" in programs[1]["reason"]
    assert cli.main(["view", str(tmp_path)[:-1] + "x"]) == cli.USAGE
    (tmp_path / "empty").mkdir()
    assert cli.main(["view", str(tmp_path / "empty")]) == cli.USAGE
    assert "TORCH_HLO_DUMP writes such folders" in capsys.readouterr().err


def test_annotated_programs_are_partitioned():
    text = PROGRAM.replace("parameter(0)", "parameter(0), sharding={devices=[2,1]<=[2]}")
    names = [name for name, _ in view.program(parse_module(text))["passes"]]
    assert names[:3] == ["input", "propagate", "partition"]


def test_notebooks_show_programs():
    text = parse_module(PROGRAM)._repr_html_()
    assert text.startswith("<iframe") and "aten.mm" not in text and "exponential" in text


@pytest.mark.skipif(BROWSER is None, reason="needs a browser")
@pytest.mark.parametrize("look", ["graph", "passes", "steps", "memory", "code"])
def test_a_browser_draws_programs(tmp_path, look):
    file, page = tmp_path / "p.hlo", tmp_path / "v.html"
    file.write_text(PROGRAM)
    assert cli.main(["view", str(file), "-o", str(page)]) == cli.OK
    shown = opened(page, tmp_path, look)
    wanted = {"graph": "fc", "passes": "transpose", "steps": "dot", "code": "vmov"}
    assert wanted.get(look, "parameter 0") in shown


SHARDED = """HloModule layers
ENTRY main {
  x = f32[16,64] parameter(0), sharding={devices=[2,1,2]<=[4] last_tile_dim_replicate}
  w = f32[64,128] parameter(1), sharding={devices=[1,2,2]<=[2,2]T(1,0) last_tile_dim_replicate}
  v = f32[128,32] parameter(2), sharding={devices=[2,1,2]<=[2,2]T(1,0) last_tile_dim_replicate}
  h = f32[16,128] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  o = f32[16,32] dot(h, v), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="aten.mm" source_file="model.py:5, in module down"}
  ROOT e = f32[16,32] exponential(o)
}
"""


def test_what_is_told_of_a_sharded_program():
    found = view.program(parse_module(SHARDED))
    names = [name for name, _ in found["passes"]]
    assert names[:3] == ["input", "propagate", "partition"]
    assert "h f32[16,128] {[{a}, {b}]}: dimension 1 as w through h" in found["shardings"]
    assert "sharding={[{a}, {b}]}" in found["passes"][1][1]
    assert view.program(parse_module(PROGRAM))["shardings"] == ""


@pytest.mark.skipif(BROWSER is None, reason="needs a browser")
@pytest.mark.parametrize("look", ["mesh", "passes"])
def test_a_browser_draws_sharded_programs(tmp_path, look):
    file, page = tmp_path / "p.hlo", tmp_path / "v.html"
    file.write_text(SHARDED)
    assert cli.main(["view", str(file), "-o", str(page)]) == cli.OK
    shown = opened(page, tmp_path, look)
    if look == "mesh":  # where an array is, why, and the one collective
        assert "[8,64]" in shown and "dimension 1 as w through h" in shown
        assert "Collectives: 1, 1.00 KB from each device" in shown and "model.py:5" in shown
    else:
        assert "picture of what propagate changed" in shown
