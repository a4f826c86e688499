"""The documentation site, built by one command: `sphinx-build -W docs site`."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import generate  # noqa: E402

project = "torch_hlo"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "torch_hlo"
myst_heading_anchors = 3
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
exclude_patterns = ["generate.py"]

generate.write_pages(FOLDER / "reference")
