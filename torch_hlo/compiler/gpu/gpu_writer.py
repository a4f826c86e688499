"""Writers of functions that groups of a GPU's threads run."""

from ..codegen import Writer
from .gpu_program import GpuProgram
from .target import BARRIER


class GpuWriter(Writer):
    program: GpuProgram

    def barrier(self) -> None:
        """The threads of a group wait for each other."""
        self.do(BARRIER)
