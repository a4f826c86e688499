"""Memory spaces (PTX ISA, section 5.1) with the checks that hardware does not make.

Addresses are int64. Global memory is this process's memory, and only blocks that were added may be
touched. Shared and local memory are windows that begin at 0 in their own space; their generic
addresses lie above every address of the host."""

from __future__ import annotations

import ctypes
from bisect import bisect_right

import numpy as np

SHARED_WINDOW, LOCAL_WINDOW = 1 << 48, 1 << 49  # generic addresses
_FIRST = 4096  # NumPy takes no array at address 0
STORAGE = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
    16: np.dtype((np.void, 16)),
}


class Fault(Exception):
    """What a thread of a frame did; `threads` are positions in the frame."""

    def __init__(self, message: str, threads=None) -> None:
        super().__init__(message)
        self.threads = threads


def check_alignment(address, nbytes: int) -> None:
    """An access of 2, 4, 8 or 16 bytes is a multiple of its size (section 6.4.1)."""
    wrong = address & (nbytes - 1)
    if wrong.any():
        at = np.flatnonzero(wrong)
        raise Fault(
            f"address {int(np.atleast_1d(address)[at[0]]):#x} is not a multiple of {nbytes}",
            at,
        )


class Bytes:
    """A range of memory seen as elements of 1, 2, 4, 8 or 16 bytes."""

    def __init__(self, raw: np.ndarray) -> None:
        self.views = {
            size: raw[: len(raw) // size * size].view(dtype)
            for size, dtype in STORAGE.items()
            if len(raw) >= size
        }

    def take(self, address, size: int, count: int) -> list:
        """`count` neighbouring elements at each address, as bits."""
        if count == 1:
            return [self.views[size][address >> (size.bit_length() - 1)]]
        whole = size * count
        rows = self.views[whole][address >> (whole.bit_length() - 1)]
        parts = (
            np.ascontiguousarray(np.frombuffer(rows.tobytes(), STORAGE[size]).reshape(-1, count).T)
            if np.ndim(rows)
            else np.frombuffer(rows.tobytes(), STORAGE[size])
        )
        return list(parts)

    def put(self, address, values: list, size: int) -> None:
        """Raises Fault when threads put different values into one place."""
        view = self.views[size]
        first = address >> (size.bit_length() - 1)
        for i, value in enumerate(values):
            view[first + i] = value
        for i, value in enumerate(values):
            if np.ndim(address):
                lost = view[first + i] != value
                if lost.any():
                    raise Fault(
                        "several threads write different values to one address",
                        np.flatnonzero(lost),
                    )


_PROCESS: list[Bytes] = []


def _process() -> Bytes:
    if not _PROCESS:
        _PROCESS.append(
            Bytes(
                np.frombuffer(
                    (ctypes.c_uint8 * ((1 << 47) - _FIRST)).from_address(_FIRST),
                    np.uint8,
                )
            )
        )
    return _PROCESS[0]


class GlobalMemory:
    """Blocks of the process's memory that kernels may touch: `add(address, nbytes)`,
    `remove(address)`."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def add(self, address: int, nbytes: int) -> None:
        at = bisect_right(self.starts, address)
        self.starts.insert(at, address)
        self.ends.insert(at, address + nbytes)

    def remove(self, address: int) -> None:
        at = bisect_right(self.starts, address) - 1
        if at < 0 or self.starts[at] != address:
            raise ValueError(f"no block at {address:#x}")
        del self.starts[at], self.ends[at]

    def check(self, address, nbytes: int) -> None:
        """Raises Fault for threads whose access is not inside of a block."""
        low, high = int(address.min()), int(address.max()) + nbytes
        at = bisect_right(self.starts, low) - 1
        if at >= 0 and high <= self.ends[at]:
            return
        address = np.atleast_1d(address)
        if not self.starts:
            raise Fault("access of global memory, and there is none", np.arange(len(address)))
        starts, ends = np.array(self.starts), np.array(self.ends)
        at = np.searchsorted(starts, address, "right") - 1
        wrong = np.flatnonzero((at < 0) | (address + nbytes > ends[np.maximum(at, 0)]))
        if len(wrong):
            a = int(address[wrong[0]])
            block = max(int(at[wrong[0]]), 0)
            distance = (
                f"{a - self.ends[block]} bytes after the end"
                if a >= self.starts[block]
                else f"{self.starts[block] - a} bytes before the start"
            )
            raise Fault(
                f"access of {nbytes} bytes at {a:#x} is outside of every array: {distance} of one"
                f" of {self.ends[block] - self.starts[block]} bytes",
                wrong,
            )

    def load(self, frame, address, size: int, count: int, watch: bool = False) -> list:
        """`watch`: an ordinary access of the frame's threads, which may race with others
        (global_races.py)."""
        check_alignment(address, size * count)
        self.check(address, size * count)
        if watch:
            frame.run.global_races.read(frame, address, size * count, size)
        return _process().take(address - _FIRST, size, count)

    def store(self, frame, address, values: list, size: int, watch: bool = False) -> None:
        check_alignment(address, size * len(values))
        self.check(address, size * len(values))
        if watch:
            frame.run.global_races.write(
                frame,
                address,
                size * len(values),
                size,
                lambda: self._unchanged(address, values, size),
            )
        _process().put(address - _FIRST, values, size)

    @staticmethod
    def _unchanged(address, values: list, size: int):
        """Which accesses store what is there."""
        there = _process().take(address - _FIRST, size, len(values))
        return np.logical_and.reduce([a == b for a, b in zip(there, values, strict=True)])


class Window:
    """Memory that every owner (a group of threads for shared memory, a thread for local memory) has
    for itself, from address 0 on.

    `first`, `nbytes`: the part of the window that is there."""

    def __init__(self, what: str, owners: int, first: int, nbytes: int) -> None:
        self.what, self.first, self.nbytes = what, first, nbytes
        self.stride = -(-nbytes // 16) * 16 + 16
        self.raw = np.full(owners * self.stride, 0xCD, np.uint8)  # uninitialised values stand out
        self.bytes = Bytes(self.raw)

    def owner(self, frame):
        raise NotImplementedError

    def place(self, frame, address, nbytes: int):
        """Where the accesses are in `raw`. Raises Fault."""
        check_alignment(address, nbytes)
        if (
            int(address.min()) < self.first
            or int(address.max()) + nbytes > self.first + self.nbytes
        ):
            a = np.atleast_1d(address)
            wrong = np.flatnonzero((a < self.first) | (a + nbytes > self.first + self.nbytes))
            raise Fault(
                f"access of {nbytes} bytes at {self.what} address {int(a[wrong[0]]):#x},"
                f" {int(a[wrong[0]]) - self.first} bytes after the first variable; there are"
                f" {self.nbytes}",
                wrong,
            )
        return address - self.first + self.owner(frame) * self.stride

    def load(self, frame, address, size: int, count: int) -> list:
        return self.bytes.take(self.place(frame, address, size * count), size, count)

    def store(self, frame, address, values: list, size: int) -> None:
        self.bytes.put(self.place(frame, address, size * len(values)), values, size)


class Shared(Window):
    """`races(nbytes)` makes what watches it, see races.py."""

    def __init__(self, groups: int, first: int, nbytes: int, races) -> None:
        super().__init__("shared", groups, first, nbytes)
        self.races = races(groups * self.stride)

    def load(self, frame, address, size: int, count: int, lanes: int | None = None) -> list:
        """`lanes`: see Races.read."""
        place = self.place(frame, address, size * count)
        self.races.read(frame, place, size * count, lanes)
        return self.bytes.take(place, size, count)

    def store(self, frame, address, values: list, size: int, lanes: int | None = None) -> None:
        place = self.place(frame, address, size * len(values))
        self.races.write(frame, place, size * len(values), lanes)
        self.bytes.put(place, values, size)

    def owner(self, frame):
        return frame.group


class Local(Window):
    def __init__(self, threads: int, nbytes: int) -> None:
        super().__init__("local", threads, 0, nbytes)

    def owner(self, frame):
        return frame.threads


def swizzled(address: np.ndarray, units: int) -> np.ndarray:
    """Where the swizzle of 16 * units bytes puts a byte."""
    return address ^ (address >> 7 & units - 1) << 4
