"""The disk cache of compiled programs: never wrong, never in the way."""

import os
import signal
import subprocess
import sys
import time

import pytest

from torch_hlo import config
from torch_hlo.compiler import cache

KEY = cache.fingerprint("HloModule a", "x86_64")
OTHER = cache.fingerprint("HloModule b", "x86_64")
root = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    # these tests run while somebody edits the compiler
    monkeypatch.setattr(config, "STARTED", float("inf"))
    with config.override(CACHE=str(tmp_path / "cache")):
        yield tmp_path / "cache"
    cache._refused.clear()


def entry(directory, key=KEY):
    return directory / f"{key}.bin"


def names(directory):
    return [p.name for p in directory.iterdir() if p.name != cache._TALLY]


def test_round_trip(directory):
    assert cache.load(KEY) is None
    assert not directory.exists()  # looking creates nothing
    assert cache.store(KEY, b"code")
    assert cache.load(KEY) == b"code"
    assert cache.load(OTHER) is None
    assert cache.store(KEY, b"")
    assert cache.load(KEY) == b""
    assert directory.stat().st_mode & 0o777 == 0o700
    assert entry(directory).stat().st_mode & 0o777 == 0o600
    assert names(directory) == [f"{KEY}.bin"]


def test_fingerprint_separates_its_parts():
    keys = {
        cache.fingerprint(*args)
        for args in (
            ("ab", "c"),
            ("a", "bc"),
            ("ab", "c", "f"),
            ("abc", ""),
            ("", "abc"),
        )
    }
    assert len(keys) == 5
    assert cache.fingerprint("ab", "c") == cache.fingerprint("ab", "c")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small package, written before this process began; `run()` imports its module in a process
    of its own and gives the answer of the code that ran."""
    (tmp_path / "compiler" / "simplify").mkdir(parents=True)
    for name, text in (
        ("compiler/simplify/fold.py", "ANSWER = 1"),
        ("compiler/emit.py", "import sys"),
        ("compiler/notes.txt", "no code"),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(config, "STARTED", time.time() + 10)
    return tmp_path


def run(package):
    command = (
        "import sys; sys.path.insert(0, sys.argv[1]); from compiler.simplify.fold import ANSWER;"
        " print(ANSWER)"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(
        [sys.executable, "-c", command, str(package)],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    ).stdout.strip()


def test_sources_digest_knows_every_text_and_name(package):
    def digest():
        return cache.sources_digest(str(package), ["compiler"])

    first, fold = digest(), package / "compiler/simplify/fold.py"
    (package / "compiler/notes.txt").write_text("still none")
    assert first == digest() != cache.sources_digest(str(package), ["compiler/simplify"])
    fold.write_text("ANSWER = 2")
    second = digest()
    fold.rename(fold.with_name("fold2.py"))
    third = digest()
    assert len({first, second, third, None}) == 4
    assert cache.sources_digest(str(package), ["nothing"]) is None
    (package / "empty").mkdir()
    assert cache.sources_digest(str(package), ["empty"]) is None


def test_sources_that_are_edited_have_no_digest(package, monkeypatch):
    fold = package / "compiler/simplify/fold.py"
    now = fold.stat().st_ctime
    monkeypatch.setattr(config, "STARTED", now - 5)
    assert cache.sources_digest(str(package), ["compiler"]) is None
    # as copies that keep times do: the file says that it is old
    os.utime(fold, (now - 100, now - 100))
    os.utime(package / "compiler/emit.py", (now - 100, now - 100))
    assert cache.sources_digest(str(package), ["compiler"]) is None
    monkeypatch.setattr(config, "STARTED", now + 5)
    assert cache.sources_digest(str(package), ["compiler"]) is not None


def test_bytecode_of_an_older_source_has_no_digest(package):
    """An edit as long as the old text, within the second: Python goes on with the old one, under
    whose name nothing may be kept."""
    fold = package / "compiler/simplify/fold.py"
    before = fold.stat().st_mtime_ns
    assert run(package) == "1"
    assert cache.sources_digest(str(package), ["compiler"]) is not None
    (bytecode,) = (fold.parent / "__pycache__").iterdir()
    fold.write_text("ANSWER = 2")
    second = before // 10**9 * 10**9
    os.utime(bytecode, ns=(second, second + 10**8))
    os.utime(fold, ns=(second, second + 2 * 10**8))
    assert run(package) == "1", "Python has begun to notice: the digest need not"
    assert cache.sources_digest(str(package), ["compiler"]) is None
    fold.write_text("ANSWER = 20")
    assert run(package) == "20"
    assert cache.sources_digest(str(package), ["compiler"]) is not None


def test_an_edited_compiler_keeps_nothing(directory, monkeypatch):
    monkeypatch.setattr(config, "STARTED", 0.0)
    assert not cache.store(KEY, b"code")
    monkeypatch.setattr(config, "STARTED", float("inf"))
    assert cache.store(KEY, b"code")


def test_off(tmp_path):
    with config.override(CACHE=""):
        assert not cache.store(KEY, b"code")
        assert cache.load(KEY) is None
        assert cache.info()["directory"] == "(off)"


@pytest.mark.parametrize("cut", [0, 1, 10, 40, 59, 60, -1])
def test_truncated_is_a_miss_and_is_replaced(directory, cut):
    cache.store(KEY, b"code" * 100)
    raw = entry(directory).read_bytes()
    entry(directory).write_bytes(raw[:cut])
    assert cache.load(KEY) is None
    assert cache.store(KEY, b"again")
    assert cache.load(KEY) == b"again"


def test_every_flipped_byte_is_noticed(directory):
    cache.store(KEY, b"code")
    raw = bytearray(entry(directory).read_bytes())
    for i in range(len(raw)):
        damaged = raw.copy()
        damaged[i] ^= 1
        entry(directory).write_bytes(damaged)
        assert cache.load(KEY) is None, i
    entry(directory).write_bytes(raw + b"x")
    assert cache.load(KEY) is None


def test_an_entry_under_another_name_is_a_miss(directory):
    cache.store(KEY, b"code")
    entry(directory).rename(entry(directory, OTHER))
    assert cache.load(OTHER) is None


def make_fifo(path, tmp_path):
    os.mkfifo(path)


def make_link(path, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    with config.override(CACHE=str(tmp_path / "elsewhere")):
        os.chmod(tmp_path / "elsewhere", 0o700)
        cache.store(KEY, b"planted")
    path.symlink_to(tmp_path / "elsewhere" / path.name)


def make_hard_link(path, tmp_path):
    cache.store(KEY, b"mine")
    os.link(path, tmp_path / "second name")


def make_dangling(path, tmp_path):
    path.symlink_to(tmp_path / "nothing")


def make_directory(path, tmp_path):
    path.mkdir()
    (path / "file").write_text("x")


def make_device(path, tmp_path):
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "make",
    [make_fifo, make_link, make_hard_link, make_dangling, make_directory, make_device],
)
def test_foreign_entries_are_misses_and_are_replaced(directory, tmp_path, make):
    cache.store(OTHER, b"")
    make(entry(directory), tmp_path)
    start = time.monotonic()
    assert cache.load(KEY) is None
    assert cache.store(KEY, b"code")
    assert cache.load(KEY) == b"code"
    assert time.monotonic() - start < 5
    assert entry(directory).is_file() and not entry(directory).is_symlink()
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722, 0o1777])
def test_a_directory_that_others_can_write_is_refused(directory, mode):
    directory.mkdir()
    directory.chmod(mode)
    with pytest.warns(RuntimeWarning, match="others can write"):
        assert not cache.store(KEY, b"code")
    assert cache.load(KEY) is None
    assert list(directory.iterdir()) == []
    assert "others can write" in cache.info()["problem"]


@pytest.mark.parametrize("run", ["torch_hlo.mark_step()", "torch_hlo.sync()", "x.sum().item()"])
def test_a_script_is_told_once_that_its_directory_is_refused(tmp_path, run):
    """Whichever thread compiles."""
    tmp_path.chmod(0o777)
    script = f"import torch, torch_hlo; x = torch.randn(9, 9, device='hlo') @ torch.ones(9, 1).to('hlo'); {run}; y = x.sin(); {run}"
    told = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TORCH_HLO_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert told.count("does not cache compiled programs") == 1
    assert "others can write to it (mode 777" in told
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_everybody_can_write_is_refused(tmp_path):
    open_parent = tmp_path / "open"
    open_parent.mkdir()
    open_parent.chmod(0o777)
    with (
        config.override(CACHE=str(open_parent / "cache")),
        pytest.warns(RuntimeWarning, match="everybody can write"),
    ):
        assert not cache.store(KEY, b"code")
    cache._refused.clear()


@root
def test_read_only_directory_costs_only_caching(directory):
    cache.store(OTHER, b"code")
    directory.chmod(0o500)
    assert not cache.store(KEY, b"code")
    assert cache.load(OTHER) == b"code"
    directory.chmod(0o700)


@pytest.mark.parametrize("place", ["/proc/torch_hlo", "/dev/null", "/dev/null/x"])
def test_impossible_directories_cost_only_caching(place):
    with config.override(CACHE=place):
        cache.store(KEY, b"code")
        assert cache.load(KEY) is None
        cache.info(), cache.clear(), cache.verify()
    cache._refused.clear()


def test_full_disk_costs_only_caching(directory, monkeypatch):
    cache.store(OTHER, b"code")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not cache.store(KEY, b"code")
    assert names(directory) == [f"{OTHER}.bin"]


def test_entries_are_counted_once_a_day(directory, monkeypatch):
    """Not by every process that stores one: a folder may hold tens of thousands."""
    looks = []
    look = cache._entries
    monkeypatch.setattr(cache, "_entries", lambda folder: looks.append(folder) or look(folder))
    for i in range(3):
        cache.store(cache.fingerprint(str(i), ""), b"code")
    assert len(looks) == 1
    tally = directory / cache._TALLY
    total, counted = tally.read_text().split()
    assert 12 <= int(total) < 1000
    for damaged in (b"", b"x y", b"1", f"{total} {float(counted) - 1e6}".encode()):
        tally.write_bytes(damaged)
        cache.store(KEY, b"code")
    assert len(looks) == 5 and len(tally.read_text().split()) == 2


def test_bounded_by_dropping_the_least_recently_used(directory):
    keys = [cache.fingerprint(str(i), "") for i in range(8)]
    with config.override(CACHE_SIZE=1):
        for i, key in enumerate(keys[:6]):
            assert cache.store(key, bytes(150_000))
            os.utime(entry(directory, key), (i, i))
        cache.load(keys[0])  # used: the newest now
        for key in keys[6:]:
            cache.store(key, bytes(150_000))
        left = {p.stem for p in directory.iterdir()}
        assert sum(p.stat().st_size for p in directory.iterdir()) <= 1 << 20
    assert keys[0] in left and keys[7] in left and keys[1] not in left


def test_too_large_an_entry_is_not_stored(directory):
    with config.override(CACHE_SIZE=1):
        assert not cache.store(KEY, bytes(2 << 20))


def test_info_clear_verify(directory):
    cache.store(KEY, b"code")
    cache.store(OTHER, b"code")
    (directory / "notes.txt").write_text("not ours")
    entry(directory, OTHER).write_bytes(b"damaged")
    assert cache.info()["entries"] == 2
    assert cache.verify() == (1, [f"{OTHER}.bin"])
    assert cache.info()["entries"] == 1
    assert cache.clear() == 1
    assert names(directory) == ["notes.txt"]


def test_export_and_import(directory, tmp_path):
    cache.store(KEY, b"code")
    cache.store(OTHER, b"more")
    entry(directory, OTHER).write_bytes(b"damaged")
    assert cache.export_archive(tmp_path / "a.tar") == 1
    cache.clear()
    assert cache.import_archive(tmp_path / "a.tar") == (1, 0)
    assert cache.load(KEY) == b"code"


def test_import_takes_only_entries(directory, tmp_path):
    import tarfile

    cache.store(KEY, b"code")
    with tarfile.open(tmp_path / "evil.tar", "w") as archive:
        archive.add(entry(directory), arcname=f"../{KEY}.bin")
        archive.add(entry(directory), arcname=f"{OTHER}.bin")
        link = tarfile.TarInfo(f"{KEY}.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        fifo = tarfile.TarInfo(f"{KEY}.bin")
        fifo.type = tarfile.FIFOTYPE
        archive.addfile(fifo)
    cache.clear()
    assert cache.import_archive(tmp_path / "evil.tar") == (0, 4)
    assert list(directory.iterdir()) == []
    (tmp_path / "no.tar").write_text("no")
    with pytest.raises(tarfile.TarError):
        cache.import_archive(tmp_path / "no.tar")


WRITER = """
import sys
from torch_hlo import config
from torch_hlo.compiler import cache
key = sys.argv[2]
with config.override(CACHE=sys.argv[1]):
    print("go", flush=True)
    while True:
        cache.store(key, bytes([int(sys.argv[3])]) * 3_000_000)
"""


def test_concurrent_writers_and_kill_9(directory):
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory), KEY, str(i)],
            stdout=subprocess.PIPE,
        )
        for i in range(2)
    ]
    try:
        for w in writers:
            w.stdout.readline()
        hits = 0
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            data = cache.load(KEY)
            if data is not None:
                hits += 1
                assert len(data) == 3_000_000 and data[0] == data[-1] == data[1_500_000]
        assert hits
    finally:
        for w in writers:
            w.send_signal(signal.SIGKILL)
            w.wait()
    assert cache.load(KEY) is not None
    assert cache.verify() == (1, [])
    assert cache.clear() == 1
    assert list(directory.iterdir()) == []
