"""The back end TORCH_HLO_DEVICE=test.ptx.driver (or test.ptx.driver:sm_80): programs for NVIDIA GPUs
whose kernels are evaluated, and checked, on the host.

Nothing is reused here: every array has a block of exactly its size, so accesses behind its end and
of freed arrays are found."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from test.ptx.evaluate import GlobalMemory, Image, PtxError
from test.ptx.tensor_map import encode_tiled
from torch_hlo.compiler.gpu.gpu_program import Kernel
from torch_hlo.compiler.gpu.target import gpu_target
from torch_hlo.device.gpu import driver
from torch_hlo.device.gpu.device_memory import DevicePool
from torch_hlo.device.gpu.driver import Driver, DriverError
from torch_hlo.device.gpu.gpu import GpuBackend

DEFAULT = "sm_90a"
_ALIGNMENT = 256  # of what a driver allocates
_FILL = 0xFF  # uninitialised floats are NaN


class Evaluator(Driver):
    """A driver whose device is NumPy. `cpu`: the architecture that kernels are
    written for."""

    def __init__(self, cpu: str = DEFAULT) -> None:
        try:
            self.target = gpu_target(f"nvptx:{cpu or DEFAULT}")
        except ValueError as error:
            raise DriverError(f"TORCH_HLO_DEVICE={__name__}:{cpu}: {error}") from None
        self.name = f"PTX evaluator for {self.target.cpu}"
        self.memory = GlobalMemory()
        self._blocks: dict[int, np.ndarray] = {}
        self._lock = threading.RLock()

    def allocate(self, nbytes: int) -> int:
        try:
            raw = np.full(nbytes + _ALIGNMENT, _FILL, np.uint8)
        except MemoryError:
            raise MemoryError(f"{self.name}: cannot allocate {nbytes} bytes") from None
        address = -(-raw.ctypes.data // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            self._blocks[address] = raw
            self.memory.add(address, nbytes)
        return address

    def free(self, address: int) -> None:
        with self._lock:
            del self._blocks[address]
            self.memory.remove(address)

    def upload(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    download = copy = upload

    def fill(self, target: int, value: int, count: int) -> None:
        np.frombuffer((ctypes.c_int32 * count).from_address(target), np.int32)[:] = value

    def load(self, image: bytes, kernels: Sequence[Kernel]) -> list:
        try:
            made = Image(image)
        except PtxError as error:
            raise DriverError(f"{self.name}: {error}") from None
        return [made] * len(kernels)

    def launch(self, handle: Image, kernel: Kernel, groups: int, words: int) -> None:
        values = np.frombuffer(
            (ctypes.c_uint64 * (len(kernel.arguments))).from_address(words), np.uint64
        ).tolist()
        try:
            for m in kernel.maps:
                address, sizes, strides, box = driver.tiled(m, values[: len(kernel.arguments)])
                values.append(
                    encode_tiled(
                        driver.MAP_TYPES[m.itemsize],
                        address,
                        sizes,
                        strides,
                        box,
                        swizzle=driver.MAP_SWIZZLE,
                        l2_promotion=driver.MAP_PROMOTION,
                    )
                )
            handle.launch(kernel.name, groups, kernel.threads, values, self.memory, kernel.shared)
        except (PtxError, ValueError) as error:
            raise DriverError(f"{error} (of {kernel.label})") from None

    def synchronize(self) -> None:
        """Everything has happened already."""


class Pool(DevicePool):
    """Blocks of exactly the size asked for, never used again."""

    def take(self, nbytes: int) -> tuple[int, tuple[None, int]]:
        size = max(nbytes, 1)
        block = (None, self.driver.allocate(size))
        with self.lock:
            self.used += size
            self.blocks += 1
            self.peak = max(self.peak, self.used)
        return size, block

    def give(self, size: int, block: tuple[None, int]) -> None:
        with self.lock:
            self.used -= size
            self.blocks -= 1
        self._release(block)


@lru_cache
def pool_of(cpu: str) -> Pool:
    """The device of an architecture; one per process. Raises DriverError."""
    return Pool(Evaluator(cpu))


class PtxBackend(GpuBackend):
    """The architecture is the argument."""

    saturating = 1 << 12, 32

    def pool(self) -> Pool:
        return pool_of(self.argument)


backend = PtxBackend
