"""Finding a linker and making shared libraries and WebAssembly modules with it."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch_hlo.frozen import frozen

STACK_BYTES = 4 << 20  # of WebAssembly modules: kernels keep packed panels on the stack
_INSTALL = {
    "elf": (
        "install one of: ld.lld (Debian: lld), GNU ld (binutils), a C compiler, or `pip install"
        " ziglang`"
    ),
    "wasm": "install wasm-ld (Debian: lld) or `pip install ziglang`",
}


class LinkError(RuntimeError):
    """No linker was found, or the one that was found failed; says what to install or what it
    printed."""


@frozen
class Linker:
    """`command`: how to start it. `driver`: a C compiler, whose linker options start with -Wl."""

    command: tuple[str, ...]
    driver: bool = False


def library(code: bytes, triple: str, output: Path, exports: Sequence[str]) -> None:
    """Link one object file that needs nothing else into `output`: a shared library, or a module
    with these functions exported.

    Raises LinkError, and OSError when `output` cannot be written.
    """
    kind = "wasm" if triple.startswith("wasm") else "elf"
    linker = find(kind, triple.partition("-")[0])
    with tempfile.TemporaryDirectory(prefix="torch_hlo") as folder:
        source = Path(folder, "model.o")
        result = Path(folder, "model.out")
        source.write_bytes(code)
        done = subprocess.run(
            [
                *linker.command,
                *_OPTIONS[kind](linker, output.name, exports),
                "-o",
                str(result),
                str(source),
            ],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode != 0 or not result.exists():
            raise LinkError(
                f"{' '.join(linker.command)} could not link {output.name} (exit code"
                f" {done.returncode}):\n{done.stderr or done.stdout}"
            )
        # Renamed into place, so that a process that has the old library mapped keeps it.
        with tempfile.NamedTemporaryFile(
            dir=output.parent, prefix=f".{output.name}", delete=False
        ) as file:
            file.write(result.read_bytes())
        os.chmod(file.name, 0o755)
        os.replace(file.name, output)


def find(kind: str, arch: str) -> Linker:
    """A linker for "elf" or "wasm" objects of `arch`. Raises LinkError saying what to install."""
    for linker in (_wasm if kind == "wasm" else _elf)(arch):
        return linker
    raise LinkError(f"no linker for {arch} found: {_INSTALL[kind]}")


def _elf(arch: str) -> Iterator[Linker]:
    for path in _versions("ld.lld"):
        yield Linker((path,))
    if arch == platform.machine() and (own := shutil.which("ld")):
        yield Linker((own,))
    if cross := shutil.which(f"{arch}-linux-gnu-ld"):
        yield Linker((cross,))
    if _has_zig():
        yield Linker((sys.executable, "-m", "ziglang", "ld.lld"))
    compilers = [
        f"{arch}-linux-gnu-gcc",
        *(("cc", "gcc", "clang") if arch == platform.machine() else ()),
    ]
    for name in compilers:
        if compiler := shutil.which(name):
            yield Linker((compiler,), driver=True)


def _wasm(arch: str) -> Iterator[Linker]:
    for path in _versions("wasm-ld"):
        yield Linker((path,))
    if _has_zig():
        yield Linker((sys.executable, "-m", "ziglang", "wasm-ld"))


def _versions(name: str) -> Iterator[str]:
    """`name` on PATH, then name-22, name-21, … as distributions install them."""
    if plain := shutil.which(name):
        yield plain
    found = []
    for folder in os.get_exec_path():
        for path in Path(folder).glob(f"{name}-*") if Path(folder).is_dir() else ():
            if (match := re.fullmatch(rf"{re.escape(name)}-(\d+)", path.name)) and os.access(
                path, os.X_OK
            ):
                found.append((int(match[1]), str(path)))
    yield from (text for _, text in sorted(found, reverse=True))


def _has_zig() -> bool:
    return importlib.util.find_spec("ziglang") is not None


def _elf_options(linker: Linker, soname: str, exports: Sequence[str]) -> list[str]:
    options = [
        "--no-undefined",
        "-z",
        "noexecstack",
        "-z",
        "relro",
        "-z",
        "now",
        "--build-id=none",
        "-soname",
        soname,
    ]
    if not linker.driver:
        return ["-shared", *options]
    return ["-shared", "-nostdlib", f"-Wl,{','.join(options)}"]


def _wasm_options(linker: Linker, soname: str, exports: Sequence[str]) -> list[str]:
    names = [*exports, "__heap_base", "__stack_pointer"]
    return [
        "--no-entry",
        "--export-table",
        "-z",
        f"stack-size={STACK_BYTES}",
        "--stack-first",
        *(f"--export={n}" for n in names if n != "__stack_pointer"),
    ]


_OPTIONS: dict[str, Callable[[Linker, str, Sequence[str]], list[str]]] = {
    "elf": _elf_options,
    "wasm": _wasm_options,
}
