"""Blocks of memory: what arrays live in, the arrays, and the pool that blocks come from.

Every array is dense and row-major. Memory is pooled: a step that frees what the step before it
allocated touches no new page."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from torch_hlo.hlo.ir import Shape

from .buffer import ALIGNMENT, HUGE, map_pages

_KEEP = 64 << 20  # bytes the pool may always hold back; beyond that no more than the peak in use


class Memory:
    """A block of device memory: its bytes and where they are. `readers` counts who looks at it from
    outside (host copies in progress, arrays given to other libraries); no program overwrites it
    then. `copies`: packed ones that programs keep of it, see device/cpu/packed.py."""

    __slots__ = (
        "array",
        "address",
        "size",
        "readers",
        "owner",
        "copies",
        "__weakref__",
    )

    ready = device_address = 0  # see DeviceMemory

    @classmethod
    def adopt(cls, address: int, nbytes: int, owner: object) -> Memory:
        """Memory of another library at a device address, for as long as `owner` lives. It is never
        written to."""
        self = cls.__new__(cls)
        self.readers = 1
        self.size = 0
        self.owner = owner
        self.copies = None
        self.address = address
        self.array = (
            np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
            if nbytes
            else np.empty(0, np.uint8)
        )
        return self

    def __init__(self, nbytes: int, zeros: bool = False) -> None:
        self.readers = 0
        self.copies = None
        self.size = 0
        self.size, (self.array, self.address) = HOST_POOL.take(nbytes, zeros)

    def __del__(self) -> None:
        if self.size:
            HOST_POOL.give(self.size, (self.array, self.address))

    def copy(self, nbytes: int) -> Memory:
        """Another block whose first `nbytes` are the same."""
        other = Memory(nbytes)
        other.array[:nbytes] = self.array[:nbytes]
        return other


class Part(Memory):
    """A number of a launch: the block that holds all of them, which nobody writes to any more, from
    a byte on."""

    __slots__ = ("whole", "offset")

    def __init__(self, whole: Memory, offset: int) -> None:
        self.readers = self.size = 0
        self.copies = None
        self.whole = whole
        self.offset = offset
        self.address = whole.address + offset

    @property
    def array(self) -> np.ndarray:
        return self.whole.array[self.offset :]


class Buffer:
    """An array on the device. Two buffers share a Memory when a program updates an array in place.

    `job` is what computes the contents, None once they are there (see lazy/run/executor.py: wait
    before touching `memory`)."""

    __slots__ = ("shape", "memory", "job", "__weakref__")

    def __init__(self, shape: Shape, memory: Memory, job: Any = None) -> None:
        self.shape = shape
        self.memory = memory
        self.job = job

    @property
    def nbytes(self) -> int:
        return self.shape.nbytes

    @property
    def bytes(self) -> np.ndarray:
        """The contents as uint8[nbytes], without a copy."""
        return self.memory.array[: self.shape.nbytes]

    @property
    def address(self) -> int:
        return self.memory.address

    def over(self, memory: Memory) -> Buffer:
        """The same array in other memory."""
        return Buffer(self.shape, memory)

    def __repr__(self) -> str:
        return f"Buffer({self.shape}{', pending' if self.job is not None else ''})"


_Block = tuple[Any, int]  # what the pool of a device knows of it (its bytes), address


class Pool:
    """Free blocks by size class. The lock is reentrant because garbage collection may free a block
    while one is taken."""

    def __init__(self) -> None:
        # Of the free blocks and the counts below. Taken last: a driver's lock may be taken under it
        # (CudaPool: it is the driver's), no other.
        self.lock: contextlib.AbstractContextManager = threading.RLock()
        self.free: OrderedDict[int, list[_Block]] = OrderedDict()  # the size freed last comes last
        self.cached = self.used = self.peak = self.blocks = 0
        self.keeps = True  # what is given back

    def take(self, nbytes: int, zeros: bool = False) -> tuple[int, _Block]:
        """A block of at least `nbytes`, and its size. `zeros`, for blocks of the CPU's memory:
        filled with zeros, as fresh pages are."""
        size = size_class(nbytes)
        with self.lock:
            blocks = self.free.get(size)
            fresh = not blocks and size >= HUGE
            if blocks:
                block = blocks.pop()
                self.cached -= size
            else:
                block = self._new(size)
            self.keeps = True
            self.used += size
            self.blocks += 1
            if self.used > self.peak:
                self.peak = self.used
        if zeros and not fresh:
            block[0][:] = 0
        return size, block

    def give(self, size: int, block: _Block) -> None:
        with self.lock:
            self.used -= size
            self.blocks -= 1
            limit = max(_KEEP, self.peak - self.used) if self.keeps else 0
            if size > limit:
                self._release(block)
                return
            self.free.setdefault(size, []).append(block)
            self.free.move_to_end(size)
            self.cached += size
            while self.cached > limit:  # sizes that are no longer asked for make room
                oldest, blocks = next(iter(self.free.items()))
                if blocks:
                    self._release(blocks.pop())
                    self.cached -= oldest
                if not blocks:
                    del self.free[oldest]

    def make_room(self, nbytes: int) -> int:
        """Give blocks that nobody uses back to the system, at most `nbytes`; returns how many. If
        there were any, what is freed is not kept either until something is taken again."""
        with self.lock:
            left = nbytes
            for size, blocks in [*self.free.items()]:
                while blocks and size <= left:
                    self._release(blocks.pop())
                    self.cached -= size
                    left -= size
            self.keeps = left == nbytes
            return nbytes - left

    def _new(self, size: int) -> _Block:
        try:
            return self._allocate(size)
        except MemoryError:
            self.trim()
            self._reclaim()
            return self._allocate(size)

    def _allocate(self, size: int) -> _Block:
        array = map_pages(size)
        return array, array.ctypes.data

    def _reclaim(self) -> None:
        """Make room beside what this pool holds back."""

    def _release(self, block: _Block) -> None:
        """A block that is not kept. Pages go back to the system with their array."""

    def renew_lock(self) -> None:
        """In a forked child: a thread that has stayed behind may have held it."""
        self.lock = threading.RLock()

    def trim(self) -> None:
        """Give everything kept back to the system."""
        for blocks in self.free.values():
            for block in blocks:
                self._release(block)
        self.free = OrderedDict()
        self.cached = 0


@functools.lru_cache(maxsize=4096)
def size_class(nbytes: int) -> int:
    """Round up to a multiple of 64, and by at most 1/8 for large blocks, so that slightly different
    sizes share blocks."""
    step = max(ALIGNMENT, 1 << max(nbytes.bit_length() - 4, 0))
    return max(-(-nbytes // step) * step, ALIGNMENT)


HOST_POOL = Pool()  # pages of this process
os.register_at_fork(after_in_child=HOST_POOL.renew_lock)


class Exit:
    """Whether the interpreter is being taken apart: drivers are gone before its last objects, and
    what is left dies with the process."""

    def __init__(self) -> None:
        self.begun = False
        atexit.register(self.begin)

    def begin(self) -> None:
        self.begun = True


EXIT = Exit()
