"""Memory of an NVIDIA GPU, and the page-locked memory of the host that it reads by itself."""

import atexit
from functools import lru_cache

import numpy as np

from ..gpu.device_memory import DeviceMemory, DevicePool
from ..memory import EXIT, Memory, Pool
from .cuda_driver import PINNED, Cuda


class CudaPool(DevicePool):
    """Blocks remember the mark after which nobody uses them, so that an upload need not wait for
    the programs started later. There is one lock per device, the driver's: programs free blocks
    while they are started, and blocks are taken while others start programs."""

    driver: Cuda

    def __init__(self, driver: Cuda) -> None:
        super().__init__(driver)
        self.lock = driver
        self.pinned = PinnedPool(driver)

    def give(self, size: int, block: tuple[object, int]) -> None:
        super().give(size, (self.driver.idle_since, block[1]))

    def _reclaim(self) -> None:
        self.driver.reclaim()


class PinnedPool(Pool):
    """Page-locked host memory by size class."""

    def __init__(self, driver: Cuda) -> None:
        super().__init__()
        self.driver = self.lock = driver

    def _allocate(self, size: int) -> tuple[np.ndarray, int]:
        array = self.driver.lock_pages(size)
        return array, array.ctypes.data

    def _release(self, block: tuple[object, int]) -> None:
        if not EXIT.begun:
            self.driver.unlock_pages(block[1])


class Pinned(Memory):
    """Host memory that the device reads and writes by itself."""

    __slots__ = ("pool",)

    def __init__(self, nbytes: int, pool: PinnedPool) -> None:
        self.readers = self.size = 0
        self.pool = pool
        self.size, (self.array, self.address) = pool.take(nbytes)

    def __del__(self) -> None:
        if self.size:
            self.pool.give(self.size, (self.array, self.address))


class CudaMemory(DeviceMemory):
    """See DeviceMemory; what is on the host is page-locked unless it is large."""

    __slots__ = ()
    _pool: CudaPool

    def _host_memory(self) -> Memory:
        return (
            Pinned(self.nbytes, self._pool.pinned) if self.nbytes <= PINNED else Memory(self.nbytes)
        )

    def _upload(self) -> None:
        if isinstance(self._host, Pinned):
            self._pool.driver.send(self._block[1], self._block[0], self._host, self.nbytes)
        else:
            super()._upload()


@lru_cache
def pool_of(number: int, library: str = "libcuda.so.1") -> CudaPool:
    """The memory of a device; one per process. Raises DriverError."""
    driver = Cuda(number, library)
    atexit.register(driver.synchronize)
    return CudaPool(driver)
