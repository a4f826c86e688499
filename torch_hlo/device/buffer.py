"""Pages of memory: aligned blocks for arrays, and the arenas that programs compute in.

Fresh pages are the most expensive memory there is (zeroing runs at a quarter of the copy speed), so
large blocks ask for huge pages, and arenas are kept and shared by all programs. On virtual machines
whose host takes free memory back, fresh huge pages may cost more than as many small ones: then
blocks have small ones from there on."""

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

ALIGNMENT = 64
HUGE = 2 << 20
# A forked child gets copies: by default Python maps pages that it would share with its parent (and
# that are never huge).
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def map_pages(nbytes: int) -> np.ndarray:
    """Uninitialised bytes, 64-byte aligned (2 MB aligned huge pages when large); freed with the
    array.

    Raises MemoryError naming the size when the machine cannot have that much.
    """
    if nbytes < HUGE:
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        skip = -raw.ctypes.data % ALIGNMENT
        return raw[skip : skip + nbytes]
    if nbytes > _physical():
        raise MemoryError(f"cannot allocate {nbytes} bytes: the machine has {_physical()}")
    try:
        pages = mmap.mmap(-1, nbytes + HUGE, **_PRIVATE)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"cannot allocate {nbytes} bytes: {error}") from None
    raw = np.frombuffer(pages, np.uint8)
    skip = -raw.ctypes.data % HUGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        whole = nbytes - nbytes % HUGE  # the rest of a last one would be wasted
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            if not _Huge.slow:
                pages.madvise(mmap.MADV_HUGEPAGE, skip, whole)
                _Huge.slow = (
                    nbytes >= _Huge.ASKED
                    and _seconds_of_first(raw.ctypes.data + skip) > _Huge.LIMIT
                )
            if _Huge.slow:
                pages.madvise(mmap.MADV_NOHUGEPAGE, skip, whole)
    return raw[skip : skip + nbytes]


class _Huge:
    """Whether a fresh huge page took this thread longer than LIMIT seconds: 512 small ones take 0.8
    ms, one that the machine has 0.2."""

    LIMIT = 0.001
    ASKED = 16 * HUGE  # bytes of the blocks whose first page is made to find out
    slow = False


def _seconds_of_first(address: int) -> float:
    """The thread's time for the huge page at an address, which is there then; 0 where the system
    cannot be asked for it."""
    madvise = _madvise()
    start = time.thread_time()
    return 0.0 if madvise(address, HUGE, _POPULATE_WRITE) else time.thread_time() - start


def _madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


# MADV_POPULATE_WRITE, Linux 5.14: as if every page were written to, contents stay
_POPULATE_WRITE = 23
_AT_ONCE = 16 << 20  # bytes
# what a compile takes itself and gives back before the program starts: as much is left to the
# program, so the peak does not grow
COMPILER = 48 << 20


def populate(blocks: Sequence[np.ndarray]) -> None:
    """Have the pages of these blocks there before they are written to, on a thread of its own:
    while a program is compiled, a core is idle, and fresh pages take the system longer than
    computing what they will hold. Small blocks, and the last COMPILER bytes, are left out."""
    blocks = [b for b in blocks if len(b) >= HUGE]
    if sum(map(len, blocks)) > COMPILER and sys.platform.startswith("linux"):
        threading.Thread(
            target=_populate, args=(blocks,), name="torch_hlo-pages", daemon=True
        ).start()


def _populate(blocks: list[np.ndarray]) -> None:
    madvise = _madvise()
    left = sum(map(len, blocks)) - COMPILER
    while blocks:
        block = blocks.pop()
        low = -(-block.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        high = (block.ctypes.data + len(block)) // mmap.PAGESIZE * mmap.PAGESIZE
        for start in range(low, high, _AT_ONCE):
            left -= _AT_ONCE
            if left < 0 or madvise(start, min(_AT_ONCE, high - start), _POPULATE_WRITE):
                return  # that was all; or an older kernel, or memory that is not for writing


def _physical() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 1 << 46


class Arena:
    """Scratch memory of one running program."""

    __slots__ = ("array", "address", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.array = map_pages(nbytes)
        self.nbytes = nbytes
        self.address = self.array.ctypes.data


class Arenas:
    """Those that no program uses: borrowed for a call, kept afterwards, grown when a program needs
    more."""

    def __init__(self) -> None:
        self._free: list[Arena] = []

    def borrow(self, nbytes: int) -> Arena:
        """An arena of at least `nbytes`, nobody else's until it is given back."""
        try:
            arena = self._free.pop()
        except IndexError:
            return Arena(max(nbytes, 1 << 16))
        if arena.nbytes < nbytes:
            del arena
            arena = Arena(nbytes + nbytes // 8)
        return arena

    def give_back(self, arena: Arena) -> None:
        self._free.append(arena)

    def release(self, nbytes: int) -> None:
        """Return idle arenas to the system, at most `nbytes`."""
        kept = []
        while self._free:
            arena = self._free.pop()
            if arena.nbytes <= nbytes:
                nbytes -= arena.nbytes
            else:
                kept.append(arena)
        self._free += kept


ARENAS = Arenas()
