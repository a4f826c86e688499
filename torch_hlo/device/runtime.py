"""The device in use: the thin layer between the lazy device and a back end (interfaces.py), which
TORCH_HLO_DEVICE chooses.

    buffer = allocate(Shape("f32", (4,)))         # a Buffer: uninitialised device memory
    program = compile_program(module)             # for the back end in use
    program.run([buffer, ...], [result, ...])     # blocks; raises before it has written anything
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torch_hlo import config, metrics
from torch_hlo.hlo.ir import Module, Shape

from .buffer import ARENAS, populate
from .interfaces import Backend, Observe, Program
from .memory import HOST_POOL, Buffer, Memory, Pool

if TYPE_CHECKING:
    from .gpu.driver import Driver

# Modules with a function `backend`, loaded when first used. Others are named by their modules, as
# in TORCH_HLO_DEVICE=test.ptx.driver
BACKENDS = {
    "cpu": "torch_hlo.device.cpu.native",
    "evaluator": "torch_hlo.device.evaluator",
    "pjrt": "torch_hlo.device.pjrt.pjrt",
    "cuda": "torch_hlo.device.cuda.cuda",
}


def backend() -> Backend:
    """The back end in use. Raises ValueError for an unknown TORCH_HLO_DEVICE."""
    return _opened(config.get("DEVICE"))


@functools.cache
def _opened(name: str) -> Backend:
    """One that this process uses."""
    kind, _, argument = name.partition(":")
    module = BACKENDS.get(kind) or (kind if _is_module(kind) else None)
    takes_none = kind in ("cpu", "evaluator")
    if module is None or (kind == "pjrt") > bool(argument) or argument and takes_none:
        raise ValueError(
            f"TORCH_HLO_DEVICE={name!r}: choose cpu, cuda, cuda:NUMBER,"
            " evaluator, pjrt:PATH with the path of a PJRT plugin, or"
            " PACKAGE.MODULE of another back end"
        )
    return importlib.import_module(module).backend(argument)


def _is_module(name: str) -> bool:
    try:
        return "." in name and importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def backend_name() -> str:
    """The back end in use, with its argument. Raises ValueError for an unknown TORCH_HLO_DEVICE."""
    backend()
    return config.get("DEVICE")


def prepare(wanted: Callable[[], bool]) -> None:
    """What the first program needs of the back end in use (Backend.preparations), while it is
    still `wanted`. It only gets ahead of what would happen later: an error comes back there."""
    with contextlib.suppress(Exception):
        for part in backend().preparations():
            if not wanted():
                return
            part()


def driver() -> Driver | None:
    """The driver of the GPU in use, None where arrays are in the host's memory."""
    return backend().driver()


def synchronize() -> None:
    """Wait for what programs have enqueued on a GPU. Raises DriverError for what failed there."""
    if (found := driver()) is not None:
        found.synchronize()


# -- arrays


def allocate(shape: Shape) -> Buffer:
    """An uninitialised buffer. Raises MemoryError naming the shape."""
    return _allocate(shape, backend().memory)


def expect_writes(buffers: Sequence[Buffer]) -> None:
    """These arrays will be overwritten by a program that has yet to be compiled: memory of the CPU
    is made ready meanwhile."""
    if backend().on_host:
        populate([b.bytes for b in buffers if not b.memory.readers])


def zeros(shape: Shape) -> Buffer:
    """A buffer of zeros. On the CPU, pages that come from the system are not touched before they
    are used. Raises MemoryError naming the shape."""
    if backend().on_host:
        return _allocate(shape, functools.partial(Memory, zeros=True))
    buffer = _allocate(shape, backend().memory)
    buffer.bytes[:] = 0
    return buffer


def _allocate(shape: Shape, memory: Callable[[int], Memory]) -> Buffer:
    try:
        return Buffer(shape, memory(shape.nbytes))
    except MemoryError:
        raise MemoryError(
            f"hlo device: no memory for {shape} ({shape.nbytes / 2**20:.1f} MiB);"
            f" {memory_summary()}. Free tensors, use a smaller batch, or call torch_hlo.mark_step()"
            " more often"
        ) from None


def adopt(shape: Shape, address: int, owner: object) -> Buffer:
    """An array that another library has put at this address of the device."""
    return Buffer(shape, backend().adopt(address, shape.nbytes, owner))


def from_bytes(shape: Shape, data: bytes | np.ndarray) -> Buffer:
    """A buffer with these contents (dense row-major bytes of `shape`)."""
    buffer = allocate(shape)
    buffer.bytes[:] = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data
    return buffer


# -- memory in use


def memory_pool() -> Pool:
    """Where the arrays of the device in use come from."""
    return backend().pool()


def memory_stats() -> dict[str, int]:
    """Bytes and blocks in use, the peak, and bytes kept for reuse: of the device's memory where it
    has its own."""
    pool = memory_pool()
    return {
        "bytes": pool.used,
        "blocks": pool.blocks,
        "peak_bytes": pool.peak,
        "cached_bytes": pool.cached,
    }


def memory_summary() -> str:
    s = memory_stats()
    return (
        f"{s['bytes'] / 2**20:.1f} MiB in {s['blocks']} arrays in use, peak"
        f" {s['peak_bytes'] / 2**20:.1f} MiB"
    )


def reset_peak() -> None:
    """Start to measure the peak anew."""
    pool = memory_pool()
    pool.peak = pool.used


def make_room(nbytes: int) -> None:
    """Of the CPU's memory that is kept for reuse, give back to the system what is about to be
    allocated by others, at most `nbytes`."""
    ARENAS.release(nbytes - HOST_POOL.make_room(nbytes))


def empty_cache() -> None:
    """Give the memory kept for reuse back to the system."""
    HOST_POOL.trim()
    memory_pool().trim()


# -- programs


def compile_program(
    module: Module,
    observe: Observe | None = None,
    other: Backend | None = None,
) -> Program:
    """Compile and load `module` for the back end in use, or for another one.
    `observe(stage, value)` is called with what is made on the way: "hlo:input" and "hlo:<pass>" ->
    Module, "llvm" -> str, "asm" -> str, "buffers" -> str, "stablehlo" -> str (see dump.py)."""
    if observe is not None:
        observe("hlo:input", module)
    program = (other or backend()).compile_program(module, observe)
    metrics.count("CachedCompile" if program.from_disk else "UncachedCompile")
    return program
