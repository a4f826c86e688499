"""The back end of NVIDIA GPUs (TORCH_HLO_DEVICE=cuda or cuda:NUMBER)."""

from .. import dlpack, multi_device
from ..gpu.gpu import GpuBackend
from . import cuda_memory
from .cuda_memory import CudaMemory, CudaPool
from .cuda_program import CudaProgram


class CudaBackend(GpuBackend):
    """The device whose number is the argument; by default the process's own (torchrun's local
    rank)."""

    saturating = 1 << 27, 8192
    arrays = CudaMemory
    programs = CudaProgram

    def pool(self) -> CudaPool:
        number = self.argument or str(multi_device.local_rank())
        if not number.isdigit():
            raise ValueError(
                f"TORCH_HLO_DEVICE=cuda:{number}: the device's number is wanted, such as cuda:0"
            )
        return cuda_memory.pool_of(int(number))

    def place(self) -> tuple[int, int]:
        return dlpack.CUDA, self.driver().number


backend = CudaBackend
