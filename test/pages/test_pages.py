"""Pages: what is in them, and that a browser draws them without an error, where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from torch_hlo import pages
from torch_hlo.hlo.sharding.sharding import Mesh

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


def data_of(text: str):
    """What a page was made of."""
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])


def opened(file: Path, folder: Path, view: str = "") -> str:
    """The page's elements after its script has run in a browser. Fails on errors in its console."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command += ["--disable-sync", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    command += ["--enable-logging=stderr", "--v=0", "--virtual-time-budget=3000"]
    done = subprocess.run(
        [*command, f"file://{file}#{view}"], capture_output=True, text=True, timeout=120
    )
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not errors
    return done.stdout


def test_a_page_is_alone():
    """Nothing is fetched, and data cannot end its element."""
    data = {"compiles": [], "text": "</script><b>"}
    text = pages.page("explain", data, "a <title>", "plain <text>")
    assert data_of(text) == data
    assert "&lt;title&gt;" in text and "plain &lt;text&gt;" in text
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)\s*=\s*[\"']?(http|//|[\w./]+\.(js|css))", text)
    assert not re.search(r"\b(fetch|XMLHttpRequest|import)\s*\(", text)


def test_framed_pages_keep_to_themselves():
    text = pages.framed(pages.page("explain", {"compiles": []}, "x"))
    assert text.startswith('<iframe srcdoc="') and text.count("<") == 2


def test_meshes_are_tables():
    text = Mesh((("data", 2), ("model", 3)), (5, 4, 3, 2, 1, 0))._repr_html_()
    assert re.findall(r"<td>(\d)</td>", text) == ["5", "4", "3", "2", "1", "0"]
    assert re.findall(r"<th>(.*?)</th>", text) == ["data 0", "data 1"]
    assert "<td>0</td>" in Mesh(())._repr_html_()


@pytest.mark.skipif(BROWSER is None, reason="needs a browser")
@pytest.mark.parametrize("view", ["overview", "compiles"])
def test_a_browser_draws_explanations(tmp_path, view):
    one = {"name": "step_1", "text": "why", "kind": "size", "advice": "do this", "line": "a.py:3"}
    one |= {"where": "a.py:4", "ops": 3, "outcome": "compiled", "seconds": 0.5, "began": 9.0}
    file = tmp_path / "page.html"
    file.write_text(pages.page("explain", {"compiles": [one], "seconds": 2}, "x"))
    shown = opened(file, tmp_path, view)
    assert 'role="tab"' in shown and ("step_1" if view == "compiles" else "do this") in shown
