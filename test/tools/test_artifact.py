"""StableHLO bytecode in the command line."""

from __future__ import annotations

from torch_hlo.tools.cli import main


def test_damaged(tmp_path, capsys):
    (tmp_path / "m.mlirbc").write_bytes(b"ML\xefR\x0dStableHLO_v1.15")
    assert main(["run", str(tmp_path / "m.mlirbc")]) == 2
    assert "byte 5: this text has no end" in capsys.readouterr().err
