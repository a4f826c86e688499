"""StableHLO bytecode; what needs jaxlib is skipped without it."""

from __future__ import annotations

import numpy as np
import pytest

from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.tools import UsageError
from torch_hlo.tools.artifact import portable_artifact
from torch_hlo.tools.cli import main
from torch_hlo.tools.text_api import load, load_inputs, parse_text

TEXT = """HloModule m
ENTRY main {
  x = f32[2,3] parameter(0)
  y = f32[2,3] tanh(x)
  ROOT t = (f32[2,3]) tuple(y)
}"""


def test_round_trip(tmp_path):
    pytest.importorskip("jaxlib")
    data = portable_artifact(parse_text(TEXT))
    (tmp_path / "m.mlirbc").write_bytes(data)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    (y,) = evaluate(load(str(tmp_path / "m.mlirbc")), [x])
    np.testing.assert_allclose(y, np.tanh(x), rtol=1e-6)


def test_damaged(tmp_path, capsys):
    (tmp_path / "m.mlirbc").write_bytes(b"ML\xefR\x0dStableHLO_v1.15")
    assert main(["run", str(tmp_path / "m.mlirbc")]) == 2
    assert "byte 5: this text has no end" in capsys.readouterr().err


def test_writing_without_jaxlib(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jaxlib.mlir", None)
    with pytest.raises(UsageError, match="pip install jaxlib"):
        portable_artifact(parse_text(TEXT))


def test_inputs_by_name(tmp_path):
    arrays = {f"arg{i}": np.full(1, i) for i in reversed(range(12))}
    np.savez(tmp_path / "x.npz", **arrays)
    assert [int(a[0]) for a in load_inputs(str(tmp_path / "x.npz"), 12)] == list(range(12))
