"""The CPU back end (TORCH_HLO_DEVICE=cpu): modules become machine code, kept on disk between
processes."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch_hlo.compiler import cache
from torch_hlo.compiler.codegen.profile import Profile
from torch_hlo.compiler.executable import Executable
from torch_hlo.compiler.llvm import CpuTarget, host
from torch_hlo.hlo.ir import Ints, Module
from torch_hlo.hlo.sharding.collective import current

from ..interfaces import (
    Backend,
    Observe,
    Prepared,
    StreamProgram,
)
from ..memory import Buffer, Memory
from ..programs import CompiledProgram, compiled
from . import loader, packed
from .stream import CODE
from .workers import WORKERS

# Imported by the first compile, in parts that nobody has to wait long for.
_COMPILER = (
    "matmul.gemm",
    "loops.fusion_step",
    "pipeline",
    "matmul.dot",
    "convolution.convolution",
    "attention.attention_step",
)


class NativeProgram(CompiledProgram, StreamProgram):
    """A loaded Executable. `sizes` of symbolic programs are read off the inputs' shapes."""

    def __init__(self, executable: Executable, profile: Profile | None = None) -> None:
        super().__init__(executable, profile)
        self.seconds = math.inf
        self._loaded = loader.load(executable)
        self.streams = self._loaded.callback is None
        self.plain = self.streams and not (executable.symbols or executable.packings)

    def starter(self) -> Callable[[Ints], None]:
        """A program whose host call raises may leave aliased inputs half written."""
        return self._loaded.launch

    def run(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        if self.info is not None:
            current().begin(self.info)
        if self.executable.exposed:
            self._run_or_restore(inputs, outputs)
        else:
            self._run(inputs, outputs)

    def _run(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        copies = self._copies(inputs)
        self._loaded.launch(
            (*self.sizes(inputs), *[b.memory.address for b in (*inputs, *outputs)]),
            [c.address for c in copies],
        )

    def _copies(self, inputs: Sequence[Buffer]) -> list[Memory]:
        """The memory of executable.packings in this run. Those of what it overwrites are dropped:
        jobs in flight keep theirs."""
        for _, i in self.aliases:
            inputs[i].memory.copies = None
        return packed.copies(self.executable.packings, inputs) if self.executable.packings else []

    def prepare(
        self, inputs: Sequence[Buffer], numbers: bytes, outputs: Sequence[Buffer]
    ) -> Prepared:
        loaded = self._loaded
        sizes = self.sizes(inputs)
        copies = self._copies(inputs)
        words = [*sizes, *[b.memory.address for b in inputs]]
        first = loader.FIXED_WORDS + len(words)
        count = len(numbers) // 16
        words += [0] * count
        words += [b.memory.address for b in outputs]
        words += [c.address for c in copies]
        block = loaded.block(words)
        if count:
            start = 8 * len(block)
            block.frombytes(numbers)
            start += block.buffer_info()[0]
            for i in range(count):
                block[first + i] = start + 16 * i
        WORKERS.ensure()
        return loaded.address, loaded.arena_bytes(sizes), block, copies

    def counts(self) -> list[tuple[int, int, int]]:
        return self.profile.read(self._loaded.constants)

    def times(self) -> list[list[tuple[int, int]]]:
        return self.profile.times(self._loaded.constants)

    def _run_or_restore(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        # Python code called from the program may raise half way, when these inputs have been
        # overwritten.
        saved = []
        for i in self.executable.exposed:
            copy = Memory(inputs[i].nbytes)
            copy.array[: inputs[i].nbytes] = inputs[i].bytes
            saved.append((inputs[i], copy))
        try:
            self._run(inputs, outputs)
        except BaseException:
            for buffer, copy in saved:
                buffer.bytes[:] = copy.array[: buffer.nbytes]
            raise


def target() -> CpuTarget:
    """This machine, with as many threads as the work of programs is cut for now."""
    return replace(host(), cores=WORKERS.cut())


def compile_program(module: Module, observe: Observe | None = None) -> NativeProgram:
    """Compile `module` for this machine, or load it from the disk cache. What is observed or
    checked is always compiled anew."""
    return compiled(module, target(), NativeProgram, observe)


class NativeBackend(Backend):
    """The machine that this process runs on."""

    def compile_program(self, module: Module, observe: Observe | None = None) -> NativeProgram:
        return compile_program(module, observe)

    def preparations(self) -> list[Callable[[], object]]:
        """What the first program needs whichever it is, in parts: the code that programs run on,
        the key of this compiler, its modules (last: a program on disk does without)."""
        modules = (
            partial(importlib.import_module, f"torch_hlo.compiler.{part}") for part in _COMPILER
        )
        return [CODE.load, cache.compiler_version, *modules]


backend = NativeBackend
