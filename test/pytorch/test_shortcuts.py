"""The table of what changes PyTorch: whole, measured, and possible to do without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torch_hlo
from test.sweeps.shortcuts import ON, WORKLOADS
from torch_hlo import config
from torch_hlo.pytorch import shortcuts

PACKAGE = Path(torch_hlo.__file__).parent
OPTIONAL = sorted(row.name for row in shortcuts.ROWS if not row.needed)


def test_rows_say_where_they_are() -> None:
    names = [row.name for row in shortcuts.ROWS]
    assert len(set(names)) == len(names)
    for row in shortcuts.ROWS:
        assert (PACKAGE / row.where).exists() and row.what and row.why
    for name in OPTIONAL:
        (where,) = (row.where for row in shortcuts.ROWS if row.name == name)
        assert f'shortcuts.on("{name}")' in (PACKAGE / where).read_text(), name


def test_shortcuts_are_measured() -> None:
    assert sorted(ON) == OPTIONAL
    assert {workload for workloads in ON.values() for workload in workloads} <= {*WORKLOADS}


@pytest.mark.parametrize(
    "text, wanted",
    [("1", set(OPTIONAL)), ("0", set()), ("operators, direct", {"operators", "direct"})],
)
def test_chosen(text: str, wanted: set[str]) -> None:
    with config.override(SHORTCUTS=text):
        assert shortcuts.chosen() & {*OPTIONAL} == wanted
        assert "generator" in shortcuts.chosen()


@pytest.mark.parametrize("text", ["generator", "operator", "2"])
def test_no_such_shortcut(text: str) -> None:
    with config.override(SHORTCUTS=text), pytest.raises(ValueError, match=text):
        shortcuts.chosen()


STEP = """
import torch, torch_hlo
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)).to("hlo")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(5, 4).to("hlo")
    loss = (model(x) * 2).pow(2).mean()
    loss.backward()
    optimizer.step()
    torch_hlo.mark_step()
fast = torch.compile(lambda y: (y.exp() - 1).sum(), backend="hlo")
print(loss.item(), fast(torch.ones(3)).item())
"""


def test_the_same_without() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", STEP],
            env={**os.environ, "TORCH_HLO_SHORTCUTS": text},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for text in "01"
    }
    assert len(found) == 1 and found.pop()
