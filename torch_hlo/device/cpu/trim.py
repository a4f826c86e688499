"""Memory that starting and compiling leave behind: pages of libraries' code, which the file system
keeps anyway, and free heap.

The static constructors of PyTorch and LLVM (registrations, options) touch 45 and 35 MB of code
once. LLVM is 170 MB of code and tables, of which a compile touches a third. None of it is used
while programs run; what is used again is mapped again by a fault, not read again."""

import ctypes
import mmap
import sys

from torch_hlo.hlo.ir import Pairs
from torch_hlo.pytorch import shortcuts

_DONTNEED = 4  # MADV_DONTNEED: a page of a file is mapped again when it is used again
COMPILER = ("libllvmlite",)
PYTORCH = ("libtorch_cpu", "libtorch_python")
STARTED = (*COMPILER, *PYTORCH)


def release_compiler() -> None:
    """Give clean pages of the compiler's code and the free heap back to the system (Linux;
    elsewhere nothing happens)."""
    release_code(COMPILER)
    release_heap()


def release_heap() -> None:
    """Give the pages of freed memory back to the system (glibc; elsewhere nothing happens)."""
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


class Uploads:
    """Bytes copied to the device since the last look, and the resident bytes above which a look
    ends in giving memory back."""

    STEP = 32 << 20

    def __init__(self) -> None:
        self.bytes = self.limit = 0

    def add(self, nbytes: int) -> None:
        """Before an array is copied to the device, and exists twice. A model that moves tensor by
        tensor frees its old memory into a heap that does not shrink by itself: while the process
        grows, the heap is given back every 32 MB, and PyTorch's code with it. One that does not
        grow keeps both."""
        self.bytes += nbytes
        if self.bytes >= self.STEP:
            self.bytes = 0
            if _resident() + nbytes > self.limit:
                release_heap()
                release_code(PYTORCH)
                self.limit = _resident() + nbytes

    def compiling(self) -> None:
        """Before the compiler works, after a rest: PyTorch's code makes room for it, and what
        moving a model has left in the heap."""
        release_code()
        if self.bytes >= self.STEP // 8:
            self.bytes = 0
            release_heap()


UPLOADS = Uploads()


def _resident() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def release_code(libraries: tuple[str, ...] = STARTED) -> None:
    """Give clean pages of the code of `libraries` (beginnings of file names) back to the system
    (Linux; elsewhere nothing happens)."""
    if sys.platform.startswith("linux") and shortcuts.on("release_code"):
        libc = ctypes.CDLL(None)
        for start, end in _CODE.spans(libraries):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED)


class _Code:
    """Where the code of loaded libraries lies; it stays there."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], Pairs] = {}

    def spans(self, libraries: tuple[str, ...]) -> Pairs:
        """Address ranges of code and constants of `libraries`. The last mapping before the writable
        ones may have been relocated, and would lose that."""
        if libraries in self._known:
            return self._known[libraries]
        spans: dict[str, list[tuple[int, int, bool]]] = {}
        try:
            with open("/proc/self/maps") as lines:
                for line in lines:
                    span, access, *rest = line.split(maxsplit=5)
                    name = rest[-1].strip().rpartition("/")[2]
                    if len(rest) == 4 and name.startswith(libraries):
                        low, _, high = span.partition("-")
                        spans.setdefault(name, []).append(
                            (int(low, 16), int(high, 16), access[1] == "w")
                        )
        except OSError:
            return ()
        found = []
        for parts in spans.values():
            first_writable = next((i for i, (_, _, writable) in enumerate(parts) if writable), 0)
            found += [(low, high) for low, high, _ in parts[: max(first_writable - 1, 0)]]
        if all(any(name.startswith(wanted) for name in spans) for wanted in libraries):
            self._known[libraries] = tuple(found)
        return tuple(found)


_CODE = _Code()
