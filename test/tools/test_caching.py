"""`python -m torch_hlo cache …` on a cache of its own."""

from __future__ import annotations

import pytest

from torch_hlo import config
from torch_hlo.compiler import cache
from torch_hlo.tools.cli import main


@pytest.fixture
def entries(tmp_path):
    with config.override(CACHE=str(tmp_path / "cache")):
        keys = [cache.fingerprint(f"program {i}", "target") for i in range(3)]
        assert all(cache.store(key, b"code" * i) for i, key in enumerate(keys))
        yield keys


def test_info_and_clear(entries, capsys):
    assert main(["cache", "info"]) == 0
    assert "entries    3" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert cache.load(entries[1]) is None


def test_export_and_import(entries, tmp_path, capsys):
    file = str(tmp_path / "x.tar")
    assert main(["cache", "export", file]) == 0
    cache.clear()
    assert main(["cache", "import", file]) == 0
    assert "3 entries added" in capsys.readouterr().out
    assert cache.load(entries[2]) == b"codecode"


def test_verify_removes_damaged_entries(entries, capsys):
    (victim,) = cache.folder().rglob(f"{entries[1]}*")
    victim.write_bytes(b"garbage")
    assert main(["cache", "verify"]) == 1
    assert "1 were damaged" in capsys.readouterr().out
    assert main(["cache", "verify"]) == 0


def test_mistakes(entries, tmp_path, capsys):
    assert main(["cache", "export"]) == 2
    (tmp_path / "no.tar").write_bytes(b"no archive")
    assert main(["cache", "import", str(tmp_path / "no.tar")]) == 2
    with pytest.raises(SystemExit):
        main(["cache", "explode"])
