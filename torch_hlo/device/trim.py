"""Memory that compiling leaves behind: pages of the compiler's own code, which the file system keeps anyway, and free heap.

LLVM is 170 MB of code and tables, of which a compile touches a third. None of it is used while programs run.
"""
from __future__ import annotations

import ctypes
import sys
from functools import lru_cache

_DONTNEED = 4  # MADV_DONTNEED: a page of a file is read again when it is used again


def release_compiler() -> None:
    """Give clean pages of the compiler's code and the free heap back to the system (Linux; elsewhere nothing happens)."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    for start, end in _code():
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


@lru_cache(1)
def _code() -> tuple[tuple[int, int], ...]:
    """Address ranges of the library up to the end of its code. What follows may have been relocated, and would lose that."""
    found = []
    try:
        with open("/proc/self/maps") as lines:
            mine = [line for line in lines if "libllvmlite" in line]
    except OSError:
        return ()
    for line in mine:
        span, access, *_ = line.split()
        if access[1] == "w":
            break
        low, _, high = span.partition("-")
        found.append((int(low, 16), int(high, 16), "x" in access))
    while found and not found[-1][2]:
        found.pop()
    return tuple((low, high) for low, high, _ in found)
