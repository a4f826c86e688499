"""The back end of NVIDIA GPUs (TORCH_HLO_DEVICE=cuda or cuda:NUMBER)."""

from torch_hlo.hlo.ir import Module

from .. import dlpack, multi_device
from ..gpu.gpu import GpuBackend
from ..interfaces import Observe
from . import cuda_memory
from .cuda_memory import CudaMemory, CudaPool
from .cuda_program import CudaProgram, compile_program


class CudaBackend(GpuBackend):
    """The device whose number is the argument; by default the process's own (torchrun's local
    rank)."""

    saturating = 1 << 27, 8192

    def pool(self) -> CudaPool:
        number = self.argument or str(multi_device.local_rank())
        if not number.isdigit():
            raise ValueError(
                f"TORCH_HLO_DEVICE=cuda:{number}: the device's number is wanted, such as cuda:0"
            )
        return cuda_memory.pool_of(int(number))

    def memory(self, nbytes: int) -> CudaMemory:
        return CudaMemory(nbytes, self.pool())

    def adopt(self, address: int, nbytes: int, owner: object) -> CudaMemory:
        return CudaMemory.adopted(address, nbytes, owner, self.pool())

    def place(self) -> tuple[int, int]:
        return dlpack.CUDA, self.driver().number

    def compile_program(self, module: Module, observe: Observe | None = None) -> CudaProgram:
        return compile_program(self.pool(), module, observe)


backend = CudaBackend
