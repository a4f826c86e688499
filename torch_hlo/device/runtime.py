"""Device memory and what runs programs: the thin layer between the lazy device and a back end.

    buffer = allocate(Shape("f32", (4,)))         # a Buffer: uninitialised device memory with a shape
    program = compile_program(module)             # by TORCH_HLO_DEVICE
    program.run([buffer, ...], [result, ...])     # blocks; raises before it has written anything
Every array is dense and row-major. Memory is pooled: a step that frees what the step before it allocated touches no new page.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from torch_hlo import config, metrics
from torch_hlo.device.buffer import ALIGNMENT, HUGE, Arena, map_pages, populate
from torch_hlo.hlo.ir import Module
from torch_hlo.hlo.shape import Shape

_KEEP = 64 << 20  # bytes the pool may always hold back; beyond that no more than the peak in use


class Memory:
    """A block of device memory: its bytes and where they are. `readers` counts who looks at it from outside (host copies in progress, arrays
    given to other libraries); no program overwrites it then. `copies`: packed ones that programs keep of it, see packed.py."""

    __slots__ = ("array", "address", "size", "readers", "owner", "copies", "__weakref__")

    @classmethod
    def adopt(cls, address: int, nbytes: int, owner: object) -> Memory:
        """Memory of another library at a device address, for as long as `owner` lives. It is never written to."""
        self = cls.__new__(cls)
        self.readers, self.size, self.owner, self.copies = 1, 0, owner, None
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
        self.size, (self.array, self.address) = _POOL.take(nbytes, zeros)

    def __del__(self) -> None:
        if self.size:
            _POOL.give(self.size, (self.array, self.address))

    def copy(self, nbytes: int) -> Memory:
        """Another block whose first `nbytes` are the same."""
        other = Memory(nbytes)
        other.array[:nbytes] = self.array[:nbytes]
        return other

    def part(self, offset: int) -> Memory:
        """The block from a byte of this one on. This one stays alive as long."""
        return _Part(self, offset)

    def within(self, nbytes: int) -> tuple[Memory, int, int]:
        """The block that the first `nbytes` of this one are a part of, where they start in it, and its bytes: what to move at once."""
        return self, 0, nbytes


class _Part(Memory):
    __slots__ = ("whole", "offset")

    def __init__(self, whole: Memory, offset: int) -> None:
        self.readers = self.size = 0
        self.copies = None
        self.whole, self.offset = whole, offset
        self.address = whole.address + offset

    @property
    def array(self) -> np.ndarray:
        return self.whole.array[self.offset :]

    def within(self, nbytes: int) -> tuple[Memory, int, int]:
        return self.whole, self.offset, len(self.whole.array)


class Buffer:
    """An array on the device. Two buffers share a Memory when a program updates an array in place.

    `job` is what computes the contents, None once they are there (see lazy/executor.py: wait before touching `memory`).
    """

    __slots__ = ("shape", "memory", "job", "__weakref__")

    def __init__(self, shape: Shape, memory: Memory, job=None) -> None:
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


class Program(Protocol):
    """A compiled module, loaded. `aliases`: (output, input) pairs that must be given the same memory."""

    name: str
    aliases: tuple[tuple[int, int], ...]

    def run(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        """Compute `outputs` from `inputs`; blocks. May be called from any thread, by one at a time.
        When it raises, neither outputs nor aliased inputs have been written."""


def allocate(shape: Shape, job=None) -> Buffer:
    """An uninitialised buffer, which `job` will fill. Raises MemoryError naming the shape."""
    return _allocate(shape, _memory_type(), job)


def expect_writes(buffers: Sequence[Buffer]) -> None:
    """These arrays will be overwritten by a program that has yet to be compiled: memory of the CPU is made ready meanwhile."""
    if _memory_type() is Memory:
        populate([b.bytes for b in buffers if not b.memory.readers])


def zeros(shape: Shape) -> Buffer:
    """A buffer of zeros. On the CPU, pages that come from the system are not touched before they are used. Raises MemoryError naming the shape."""
    kind = _memory_type()
    if kind is Memory:
        return _allocate(shape, functools.partial(Memory, zeros=True))
    buffer = _allocate(shape, kind)
    buffer.bytes[:] = 0
    return buffer


def _allocate(shape: Shape, memory: Callable[[int], Memory], job=None) -> Buffer:
    try:
        return Buffer(shape, memory(shape.nbytes), job)
    except MemoryError:
        raise MemoryError(
            f"hlo device: no memory for {shape} ({shape.nbytes / 2**20:.1f} MiB); {memory_summary()}. "
            "Free tensors, use a smaller batch, or call torch_hlo.mark_step() more often"
        ) from None


def adopt(shape: Shape, address: int, owner: object) -> Buffer:
    """An array that another library has put at this address of the device."""
    return Buffer(shape, _memory_type().adopt(address, shape.nbytes, owner))


def from_bytes(shape: Shape, data: bytes | np.ndarray) -> Buffer:
    """A buffer with these contents (dense row-major bytes of `shape`)."""
    buffer = allocate(shape)
    buffer.bytes[:] = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data
    return buffer


_Block = tuple[np.ndarray, int]  # bytes, address


class Pool:
    """Free blocks by size class. The lock is reentrant because garbage collection may free a block while one is taken."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.free: OrderedDict[int, list[_Block]] = OrderedDict()  # the size freed last comes last
        self.cached = self.used = self.peak = self.blocks = 0
        self.keeps = True  # what is given back

    def take(self, nbytes: int, zeros: bool = False) -> tuple[int, _Block]:
        """A block of at least `nbytes`, and its size. `zeros`, for blocks of the CPU's memory: filled with zeros, as fresh pages are."""
        size = _size_class(nbytes)
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
        """Give blocks that nobody uses back to the system, at most `nbytes`; returns how many. If there were any, what is freed is not kept either
        until something is taken again."""
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

    def trim(self) -> None:
        for blocks in self.free.values():
            for block in blocks:
                self._release(block)
        self.free = OrderedDict()
        self.cached = 0


_exiting: list[bool] = []
atexit.register(_exiting.append, True)


def exiting() -> bool:
    """Whether the interpreter is being taken apart: drivers are gone before its last objects, and what is left dies with the process."""
    return bool(_exiting)


@functools.lru_cache(maxsize=4096)
def _size_class(nbytes: int) -> int:
    """Round up to a multiple of 64, and by at most 1/8 for large blocks, so that slightly different sizes share blocks."""
    step = max(ALIGNMENT, 1 << max(nbytes.bit_length() - 4, 0))
    return max(-(-nbytes // step) * step, ALIGNMENT)


_POOL = Pool()
os.register_at_fork(after_in_child=lambda: setattr(_POOL, "lock", threading.RLock()))


def memory_stats() -> dict[str, int]:
    """Bytes and blocks in use, the peak, and bytes kept for reuse: of the device's memory where it has its own."""
    pool = memory_pool()
    return {
        "bytes": pool.used,
        "blocks": pool.blocks,
        "peak_bytes": pool.peak,
        "cached_bytes": pool.cached,
    }


def memory_pool() -> Pool:
    """Where the arrays of the device in use come from; a GPU's has a `driver`."""
    memory = _memory_type()
    return memory.pool() if hasattr(memory, "pool") else _POOL


def memory_summary() -> str:
    s = memory_stats()
    return f"{s['bytes'] / 2**20:.1f} MiB in {s['blocks']} arrays in use, peak {s['peak_bytes'] / 2**20:.1f} MiB"


def reset_peak() -> None:
    """Start to measure the peak anew."""
    pool = memory_pool()
    pool.peak = pool.used


def make_room(nbytes: int) -> None:
    """Of the CPU's memory that is kept for reuse, give back to the system what is about to be allocated by others, at most `nbytes`."""
    Arena.release(nbytes - _POOL.make_room(nbytes))


def empty_cache() -> None:
    """Give the memory kept for reuse back to the system."""
    _POOL.trim()
    memory_pool().trim()


# Back ends: module holding `compile_program(module, observe) -> Program`. Loaded when first used.
BACKENDS = {
    "cpu": "torch_hlo.device.native", "evaluator": "torch_hlo.device.evaluator", "pjrt": "torch_hlo.device.pjrt",
    "opencl": "torch_hlo.device.opencl", "cuda": "torch_hlo.device.cuda", "ptx": "torch_hlo.device.ptx.driver",
}  # fmt: skip
Observe = Callable[[str, object], None]


def backend_name() -> str:
    """The back end in use, with its argument. Raises ValueError for an unknown TORCH_HLO_DEVICE."""
    name = config.get("DEVICE")
    if name in _CHECKED:
        return name
    kind, _, path = name.partition(":")
    if (
        kind not in BACKENDS
        or (kind == "pjrt") > bool(path)
        or path
        and kind in ("cpu", "evaluator")
    ):
        raise ValueError(
            f"TORCH_HLO_DEVICE={name!r}: choose cpu, cuda, cuda:NUMBER, opencl, opencl:PATH of its library, ptx, ptx:sm_80, evaluator, "
            "or pjrt:PATH with the path of a PJRT plugin"
        )
    _CHECKED.add(name)
    return name


_CHECKED: set[str] = set()  # names that are right


@functools.cache
def _module(name: str):
    return importlib.import_module(BACKENDS[name.partition(":")[0]])


def _memory_type() -> type[Memory]:
    """What arrays live in: pages of this process, unless the back end has memory of its own."""
    kind = _MEMORIES.get(config.get("DEVICE"))
    if kind is None:
        kind = _MEMORIES[config.get("DEVICE")] = getattr(_module(backend_name()), "Memory", Memory)
    return kind


_MEMORIES: dict[str, type[Memory]] = {}  # by back end


def preparations() -> list[Callable[[], object]]:
    """What every first program of the back end in use waits for, in short parts that may be called before there is one, on the compiler's thread."""
    found = getattr(_module(backend_name()), "preparations", None)
    return found() if found is not None else []


def compile_program(
    module: Module,
    observe: Observe | None = None,
    compiler: Callable[[Module, Observe | None], Program] | None = None,
) -> Program:
    """Compile and load `module` for the back end in use, or with the `compiler` of another one. `observe(stage, value)` is called with what is
    made on the way: "hlo:<pass>" -> Module, "llvm" -> str, "asm" -> str, "buffers" -> str, "stablehlo" -> str (see lazy/dump.py)."""
    program = (compiler or _module(backend_name()).compile_program)(module, observe)
    metrics.count("CachedCompile" if getattr(program, "from_disk", False) else "UncachedCompile")
    return program
