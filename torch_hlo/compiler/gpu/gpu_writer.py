"""Writers of functions that groups of a GPU's threads run."""

from collections.abc import Sequence

from ..codegen import Writer
from .gpu_program import GpuProgram


class GpuWriter(Writer):
    program: GpuProgram

    def __init__(self, program: GpuProgram, name: str, params: Sequence[tuple[str, str]]) -> None:
        super().__init__(program, name, params)

    def barrier(self) -> None:
        """The threads of a group wait for each other."""
        self.do(self.program.target.family.barrier)
