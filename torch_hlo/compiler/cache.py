"""Compiled programs on disk: bytes under a key, shared by processes that run at the same time.

    key = fingerprint(module_text, target, flags)     # what the program is, for which machine, by
                                                      # which compiler
    data = load(key)                                  # None: a miss
    store(key, data)

An entry is one file `<key>.bin` with a checksum over key and contents. It is written aside and
renamed, so a reader sees a whole entry or none, whoever else writes and wherever a writer is
killed. Whatever is not a valid entry (truncated, a link, a FIFO, another program's file) is a miss
and gets replaced. Trouble with the disk costs caching, never a compile. Entries are machine code: a
directory that others can write to is refused.
"""

import contextlib
import hashlib
import importlib.util
import io
import os
import secrets
import shutil
import stat
import struct
import tarfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from torch_hlo import config, metrics

MAGIC = b"torch_hlo program 1\n"
_HEADER = struct.Struct("<32sQ")  # checksum of key and contents, length of the contents
_SUFFIX = ".bin"
_STALE = 3600.0  # seconds after which a temporary file has no writer any more
_MAX_ENTRY = 1 << 30
_refused: dict[str, str] = {}  # directory -> why it is not used
_TALLY = ".tally"  # the file that says how many bytes the entries are, and when that was counted
_COUNTED = 86400.0  # seconds after which they are counted again


def fingerprint(text: str, target: str, flags: str = "") -> str:
    """Key of a program: its canonical text, the machine (triple and features), the flags that
    change code, and this compiler."""
    parts = (compiler_version(), target, flags, text)
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.hexdigest()


_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_COMPILER = (
    "compiler",
    "hlo",
)  # what decides the code of a program whose text is given


@cache
def compiler_version() -> str:
    """Digest of the compiler's sources and of LLVM's version; a random text, so that nothing is
    found, where this process may run something else."""
    import llvmlite

    found = sources_digest(_PACKAGE, _COMPILER)
    return secrets.token_hex(32) if found is None else f"{found} llvmlite {llvmlite.__version__}"


def sources_digest(package: str, parts: Sequence[str]) -> str | None:
    """Digest of the Python files in these folders of a package. None if there are none to read, or
    if what is imported may differ from what they say: they were edited after this process began, or
    too soon after Python last looked at them."""
    digest = hashlib.sha256()
    files = 0
    try:
        for path, status in _sources(package, parts):
            bytecode = importlib.util.cache_from_source(path)
            if _changed(status) > config.STARTED or _is_stale(status, bytecode):
                return None
            digest.update(f"{path[len(package) :]}\0{status.st_size}\0".encode())
            with open(path, "rb", buffering=0) as file:
                digest.update(file.read())
            files += 1
    except OSError:
        return None
    return digest.hexdigest() if files else None


def _edited() -> bool:
    """Whether the compiler's sources were edited after this process began: modules that were
    imported since may be newer than the others."""
    try:
        return any(_changed(status) > config.STARTED for _, status in _sources(_PACKAGE, _COMPILER))
    except OSError:
        return True


def _changed(status: os.stat_result) -> float:
    """When a file was last written. Copies and archives set the time of modification back, but not
    that of the change of the file's entry."""
    return max(status.st_mtime, status.st_ctime)


def _sources(package: str, parts: Sequence[str]) -> Iterator[tuple[str, os.stat_result]]:
    """(path, status) of the Python files in these folders and below, in order. Raises OSError."""
    folders = [os.path.join(package, part) for part in reversed(parts)]
    while folders:
        folder = folders.pop()
        with os.scandir(folder) as items:
            listed = sorted(items, key=lambda item: item.name)
        folders += [
            item.path for item in reversed(listed) if item.is_dir() and item.name != "__pycache__"
        ]
        for item in listed:
            if item.name.endswith(".py"):
                yield item.path, item.stat()


def _is_stale(status: os.stat_result, bytecode: str) -> bool:
    """Whether Python takes older bytecode for that of this source: it compares the second of the
    last edit, and the size."""
    try:
        if os.stat(bytecode).st_mtime >= status.st_mtime:
            return False
        with open(bytecode, "rb") as file:
            found = struct.unpack("<4x3I", file.read(16))
    except (OSError, struct.error):  # there is none
        return False
    return found == (0, int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)


# ---- reading and writing


def load(key: str) -> bytes | None:
    """Contents of the entry, or None."""
    directory = folder()
    if directory is None:
        return None
    path = directory / (key + _SUFFIX)
    data = _read(path, key)
    metrics.count("DiskCacheHit" if data is not None else "DiskCacheMiss")
    if data is not None:
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)  # least recently used goes first
    return data


def store(key: str, data: bytes) -> bool:
    """Write an entry; False if that was not possible, or what made it has been edited while this
    process runs. Never raises OSError."""
    directory = folder(create=True)
    return directory is not None and not _edited() and _store(directory, key, data)


def _store(directory: Path, key: str, data: bytes) -> bool:
    if len(data) > min(_MAX_ENTRY, _limit()) or not _write(directory, key, data):
        return False
    now = time.time()
    total, counted = _tally(directory)
    total += len(data)
    if total > _limit() or not 0 <= now - counted < _COUNTED:
        total = _trim(directory)
        counted = now
    _write_tally(directory, total, counted)
    return True


def _tally(directory: Path) -> tuple[int, float]:
    """(bytes of all entries as writers have added them up, when they were counted last)."""
    try:
        fd = os.open(directory / _TALLY, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb", closefd=True) as f:
            total, counted = f.read(64).split()
        return int(total), float(counted)
    except (OSError, ValueError):
        return 0, 0.0


def _write_tally(directory: Path, total: int, counted: float) -> None:
    """Not atomic: what two writers make of it at a time is near enough, or no number."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        with open(os.open(directory / _TALLY, flags, 0o600), "wb", closefd=True) as f:
            f.write(f"{total} {counted}".encode())


def _read(path: Path, key: str) -> bytes | None:
    try:
        # A FIFO must not block, a link must not lead elsewhere.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with open(fd, "rb", closefd=True) as f:
            status = os.fstat(fd)
            if (
                not stat.S_ISREG(status.st_mode)
                or status.st_nlink != 1
                or status.st_uid != os.geteuid()
                or status.st_size > _MAX_ENTRY
            ):
                return None
            return _contents(f.read(), key)
    except (OSError, ValueError):
        return None


def _contents(raw: bytes, key: str) -> bytes | None:
    """What a whole, undamaged entry of this key holds, else None."""
    start = len(MAGIC) + _HEADER.size
    if len(raw) < start or not raw.startswith(MAGIC):
        return None
    checksum, length = _HEADER.unpack_from(raw, len(MAGIC))
    data = raw[start:]
    return data if length == len(data) and checksum == _checksum(key, data) else None


def _checksum(key: str, data: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + data).digest()


def _write(directory: Path, key: str, data: bytes) -> bool:
    final = directory / (key + _SUFFIX)
    aside = directory / f".{os.getpid()}-{secrets.token_hex(8)}.tmp"
    try:
        fd = os.open(
            aside,
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
        with open(fd, "wb", closefd=True) as f:
            f.write(MAGIC + _HEADER.pack(_checksum(key, data), len(data)))
            f.write(data)
        if final.is_dir() and not final.is_symlink():
            shutil.rmtree(final, ignore_errors=True)
        os.replace(aside, final)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        metrics.count("DiskCacheWriteError")
        _last_error[str(directory)] = str(error)
        return False
    except BaseException:  # Ctrl-C
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    return True


_last_error: dict[str, str] = {}


# ---- the directory


def folder(create: bool = False) -> Path | None:
    """The directory in use; None when caching is off, or the directory is missing or unsafe (one
    warning says why)."""
    name = config.get("CACHE")
    if not name:
        return None
    directory = Path(os.path.abspath(os.path.expanduser(name)))
    if str(directory) in _refused:
        return None
    try:
        if create:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not directory.exists():
            return None
        why = _unsafe(directory)
    except OSError as error:
        _last_error[str(directory)] = str(error)
        if create:
            _refused[str(directory)] = str(error)  # do not try again at every compile
        return None
    if why:
        _refused[str(directory)] = why
        import warnings

        warnings.warn(
            f"torch_hlo does not cache compiled programs in {directory}: {why}. Use a directory of"
            " your own (TORCH_HLO_CACHE=dir), or TORCH_HLO_CACHE= to turn the cache off",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return directory


def _unsafe(directory: Path) -> str:
    """Why code from this directory must not be run, or ""."""
    resolved = directory.resolve()
    status = resolved.stat()
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a directory"
    if status.st_uid != os.geteuid():
        return f"it belongs to another user (uid {status.st_uid})"
    if status.st_mode & 0o022:
        return (
            f"others can write to it (mode {stat.S_IMODE(status.st_mode):o}; chmod go-w makes it"
            " safe)"
        )
    for parent in resolved.parents:
        above = parent.stat()
        if above.st_mode & 0o002 and not above.st_mode & stat.S_ISVTX:
            return (
                f"others can replace it, because everybody can write to {parent} (mode"
                f" {stat.S_IMODE(above.st_mode):o})"
            )
    return ""


def _limit() -> int:
    megabytes: int = config.get("CACHE_SIZE")
    return megabytes << 20


def _entries(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The regular files that are named like entries."""
    try:
        listing = list(os.scandir(directory))
    except OSError:
        return
    for item in listing:
        if item.name.endswith(_SUFFIX) and _is_key(item.name[: -len(_SUFFIX)]):
            with contextlib.suppress(OSError):
                status = item.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield Path(item.path), status


def _is_key(text: str) -> bool:
    return len(text) == 64 and not set(text) - set("0123456789abcdef")


def _trim(directory: Path) -> int:
    """Remove what was used least recently until the rest fits, and what killed writers left.
    Returns the bytes of what remains."""
    entries = sorted(_entries(directory), key=lambda e: e[1].st_mtime)
    total = sum(status.st_size for _, status in entries)
    if total > _limit():
        for path, status in entries:
            if total <= _limit() * 9 // 10:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            total -= status.st_size
    with contextlib.suppress(OSError):
        for path in directory.glob(".*.tmp"):
            if time.time() - path.lstat().st_mtime > _STALE:
                path.unlink()
    return total


# ---- python -m torch_hlo cache ...


def info() -> dict[str, object]:
    """What `cache info` prints: directory, entries, bytes, limit, and the problem if the directory
    is not used."""
    directory = folder()
    entries = list(_entries(directory)) if directory is not None else []
    name = config.get("CACHE")
    path = os.path.abspath(os.path.expanduser(name)) if name else ""
    return {
        "directory": path or "(off)",
        "entries": len(entries),
        "bytes": sum(status.st_size for _, status in entries),
        "limit": _limit(),
        "problem": _refused.get(path) or _last_error.get(path) or "",
    }


def clear() -> int:
    """Remove every entry and temporary file; returns how many entries."""
    directory = folder()
    if directory is None:
        return 0
    removed = 0
    for path, _ in _entries(directory):
        with contextlib.suppress(OSError):
            path.unlink()
            removed += 1
    for path in (*directory.glob(".*.tmp"), directory / _TALLY):
        with contextlib.suppress(OSError):
            path.unlink()
    return removed


def verify() -> tuple[int, list[str]]:
    """Read every entry: (valid ones, file names of damaged ones). Damaged entries are removed."""
    directory = folder()
    valid = 0
    damaged = []
    for path, _ in _entries(directory) if directory is not None else ():
        if _read(path, path.stem) is not None:
            valid += 1
        else:
            damaged.append(path.name)
            with contextlib.suppress(OSError):
                path.unlink()
    return valid, sorted(damaged)


def export_archive(file: str | Path) -> int:
    """Write all valid entries to a tar file, for another machine of the same kind; returns how
    many."""
    directory = folder()
    count = 0
    with tarfile.open(file, "w") as archive:
        for path, _ in sorted(_entries(directory)) if directory is not None else ():
            data = _read(path, path.stem)
            if data is not None:
                member = tarfile.TarInfo(path.name)
                raw = MAGIC + _HEADER.pack(_checksum(path.stem, data), len(data)) + data
                member.size = len(raw)
                member.mode = 0o600
                archive.addfile(member, io.BytesIO(raw))
                count += 1
    return count


def import_archive(file: str | Path) -> tuple[int, int]:
    """Add the entries of an exported archive: (added, rejected). They are code: import only what
    you would run.

    Raises OSError or tarfile.TarError if the file is no archive, RuntimeError if there is no cache
    directory to import into."""
    directory = folder(create=True)
    if directory is None:
        raise RuntimeError(
            f"there is no cache to import into: {info()['problem'] or 'TORCH_HLO_CACHE is empty'}"
        )
    added = rejected = 0
    with tarfile.open(file, "r:") as archive:
        for member in archive:
            key = member.name.removesuffix(_SUFFIX)
            source = (
                archive.extractfile(member)
                if member.isreg() and member.size <= _MAX_ENTRY and _is_key(key)
                else None
            )
            data = _contents(source.read(), key) if source is not None else None
            if data is not None and _store(directory, key, data):
                added += 1
            else:
                rejected += 1
    return added, rejected
