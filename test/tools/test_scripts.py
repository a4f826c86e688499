"""Scripts that are run and looked at: a size that changes, a read in the loop, a leak."""

from __future__ import annotations

import sys

import pytest
import torch

from test.pages.test_pages import data_of
from torch_hlo import metrics
from torch_hlo.lazy.record import session
from torch_hlo.tools import cli

SIZES = """
import sys
import torch, torch_hlo

weight = torch.ones(8, 8).to("hlo")
for n in (3, 3, 4):
    x = torch.ones(n, 8).to("hlo")
    y = (x @ weight).reshape(-1, 4)[: n * 2 - 1].sum()  # line 8
    torch_hlo.mark_step()  # line 9
print("given", sys.argv[1:])
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a script; what was compiled before is forgotten."""
    monkeypatch.chdir(tmp_path)
    session.engine().clear_cache()
    metrics.clear_all()

    def write(text: str):
        (tmp_path / "script.py").write_text(text)
        return tmp_path / "script.py"

    return write


def test_why_a_script_compiled(script, tmp_path, capsys):
    path, before = script(SIZES), [*sys.argv]
    page = tmp_path / "page.html"
    assert cli.main(["explain", str(path), "-o", str(page), "--", "--lr", "2"]) == cli.OK
    assert "given ['--lr', '2']" in capsys.readouterr().out
    assert sys.argv == before and not session.current().sources
    data = data_of(page.read_text())
    first, second = data["compiles"]
    assert first["kind"] == "first program" and first["where"] == f"{path}:9"
    assert second["kind"] in ("size", "all sizes from now on")
    assert second["line"] == f"{path}:8" and "was f32[3,8], is f32[4,8]" in second["text"]
    assert 0 < second["seconds"] < data["seconds"] and data["steps"] == 3


def test_why_a_script_compiled_as_text(script, capsys):
    assert cli.main(["explain", str(script(SIZES))]) == cli.OK
    assert "first program of this process" in capsys.readouterr().out


def test_scripts_that_fail(script, capsys):
    path = script("import sys\nsys.exit(3)")
    assert cli.main(["explain", str(path)]) == cli.FAILED
    path.write_text("raise ValueError('mine')")
    assert cli.main(["explain", str(path)]) == cli.FAILED
    assert "ValueError: mine" in capsys.readouterr().err
    assert cli.main(["explain", str(path.with_name("none.py"))]) == cli.USAGE


def test_notebooks_show_explanations():
    (torch.ones(3).to("hlo") + 1).tolist()
    found = metrics.explain()
    assert isinstance(found, str) and found._repr_html_().startswith("<iframe")
    assert len(data_of(found.page())["compiles"]) == len(found.compiles)
