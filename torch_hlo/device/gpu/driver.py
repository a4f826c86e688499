"""What a GPU's driver does for the programs that launch kernels on it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch_hlo.compiler.gpu.gpu_program import Kernel, TensorMap
from torch_hlo.compiler.gpu.target import GpuTarget


class DriverError(RuntimeError):
    """The device or its driver refused something; the message says what, on which device, and what
    to do."""


class Driver(ABC):
    """One device and its stream. Addresses are the device's; calls are in order and need not wait,
    but `download` does."""

    name: str
    target: GpuTarget
    version = 0  # of CUDA, that the driver supports; 0: another kind of device
    number = 0  # of the device

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """The address of new memory. Raises MemoryError."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Give memory back once everything enqueued so far has happened."""

    @abstractmethod
    def upload(self, target: int, source: int, nbytes: int) -> None:
        """From host memory, which may be changed when this returns."""

    @abstractmethod
    def download(self, target: int, source: int, nbytes: int) -> None:
        """To host memory; waits for everything before it."""

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int) -> None:
        """From device memory to device memory."""

    @abstractmethod
    def fill(self, target: int, value: int, count: int) -> None:
        """`count` 32-bit words."""

    @abstractmethod
    def load(self, image: bytes, kernels: Sequence[Kernel]) -> list:
        """Handles of the image's entry points. Raises DriverError."""

    @abstractmethod
    def launch(self, handle: object, kernel: Kernel, groups: int, words: int) -> None:
        """Start a kernel; its arguments are 64-bit words at host address `words`. Raises
        DriverError naming kernel.label."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything. Raises DriverError for what failed meanwhile."""

    def memory_info(self) -> tuple[int, int] | None:
        """(free, total) bytes of the device; None where it cannot be asked."""
        return None

    # -- with other libraries on the same device

    def follow(self, stream: int) -> None:
        """What is enqueued from now on comes after everything on another stream of the device."""
        raise DriverError(f"{self.name} has no streams of other libraries")

    def precede(self, stream: int) -> None:
        """What is enqueued on another stream from now on comes after everything here."""
        raise DriverError(f"{self.name} has no streams of other libraries")


def tiled(
    tensor_map: TensorMap, words: Sequence[int]
) -> tuple[int, list[int], list[int], tuple[int, ...]]:
    """(address, sizes in elements, strides in bytes, box in elements) of a kernel's tensor map, for
    these argument words. Empty arrays, of which nothing will be copied, are described as the driver
    takes it."""
    strides = [max(words[i] * tensor_map.itemsize, 16) for i in tensor_map.strides]
    return (
        words[tensor_map.pointer],
        [max(words[i], 1) for i in tensor_map.sizes],
        strides,
        tensor_map.box,
    )


# CUtensorMapDataType by bytes (numbers are not looked at), CU_TENSOR_MAP_SWIZZLE_128B,
# CU_TENSOR_MAP_L2_PROMOTION_L2_256B
MAP_TYPES = {1: 0, 2: 1, 4: 2}
MAP_SWIZZLE = 3
MAP_PROMOTION = 3
