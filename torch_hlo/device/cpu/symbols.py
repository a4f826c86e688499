"""Where the C symbols that compiled programs call come from. LLVM looks names up in the process;
this makes sure they are there.

Linear algebra (sgemm_, …) is taken from the libtorch that is already loaded in the process;
mathematical functions from libm."""

import ctypes
import ctypes.util
import glob
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache

import llvmlite.binding as llvm


class Symbols:
    """C symbols that LLVM knows the addresses of."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def provide(self, names: Iterable[str]) -> None:
        """Register the addresses of C symbols with LLVM. Raises OSError naming a symbol that no
        library has."""
        for name in names:
            if name in self._known:
                continue
            address = _find(name)
            if address is None:
                raise OSError(
                    f"no loaded library has the C function {name!r} that a compiled program calls;"
                    " was it compiled on another machine?"
                )
            self.add(name, address)

    def add(self, name: str, address: int) -> None:
        """Register a function of our own."""
        llvm.add_symbol(name, address)
        self._known.add(name)


SYMBOLS = Symbols()


@lru_cache
def has(names: tuple[str, ...]) -> bool:
    """Whether some library has each of these C symbols."""
    return all(_find(name) is not None for name in names)


def _find(name: str) -> int | None:
    for library in _libraries():
        try:
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        except AttributeError:
            continue
    return None


def _libraries() -> Iterator[ctypes.CDLL]:
    yield ctypes.CDLL(None)
    for path in _paths():
        yield _open(path)


_open = lru_cache(ctypes.CDLL)


@lru_cache(1)
def _paths() -> tuple[str, ...]:
    found = []
    if name := ctypes.util.find_library("m"):
        found.append(name)
    # torch is only located, not imported: this module works without it until a program needs its
    # libraries.
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin:
        suffix = "dylib" if sys.platform == "darwin" else "so"
        for stem in ("libtorch_cpu", "libgomp*"):
            found += sorted(
                glob.glob(os.path.join(os.path.dirname(spec.origin), "lib", f"{stem}.{suffix}*"))
            )
    return tuple(found)
