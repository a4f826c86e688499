"""The compiled back end (TORCH_HLO_DEVICE=cpu): modules become machine code, kept on disk between processes."""
from __future__ import annotations

from collections.abc import Sequence

from torch_hlo import config, metrics
from torch_hlo.compiler import cache
from torch_hlo.compiler.codegen.target import host
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.executable import Executable
from torch_hlo.device import cpu
from torch_hlo.device.runtime import Buffer, Observe
from torch_hlo.hlo import ir


class NativeProgram:
    """See runtime.Program. `sizes` of symbolic programs are read off the inputs' shapes."""

    def __init__(self, executable: Executable) -> None:
        self.name = executable.name
        self.aliases = executable.aliases
        self.symbols = executable.symbols
        self.program = cpu.load(executable)

    def run(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        sizes = [inputs[p].shape.dims[d] for _, p, d in self.symbols]
        self.program.call([b.memory.address for b in inputs], [b.memory.address for b in outputs], sizes)


def compile_program(module: ir.Module, observe: Observe | None = None) -> NativeProgram:
    """See runtime.compile_program. With an observer the program is compiled even if the disk has it."""
    key = cache.fingerprint(str(module), host().key, str(config.get("DISABLE")))
    executable = _stored(key) if observe is None else None
    if executable is None:
        executable = compile_module(module, dump=observe)
        cache.store(key, executable.to_bytes())
    return NativeProgram(executable)


def _stored(key: str) -> Executable | None:
    data = cache.load(key)
    if data is None:
        return None
    try:
        return Executable.from_bytes(data)
    except ValueError:
        metrics.count("DiskCacheUnreadable")
        return None
