"""The CPU back end (TORCH_HLO_DEVICE=cpu): modules become machine code, kept on disk between processes."""
from __future__ import annotations

import contextlib
import functools
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch_hlo.compiler.codegen.profile import Profile
from torch_hlo.compiler.codegen.target import Target, host
from torch_hlo.compiler.executable import Executable
from torch_hlo.device import collective, cpu, packed, runtime, stream
from torch_hlo.device.buffer import Arena
from torch_hlo.device.programs import compiled
from torch_hlo.device.runtime import Buffer, Memory, Observe
from torch_hlo.hlo.collective import current
from torch_hlo.hlo.ir import Module

TRIAL_SECONDS = 0.1


@functools.cache
def _warm_up() -> threading.Thread:
    """What programs run on, the pool and the stream, is compiled while the first program is: on a thread of its own, since LLVM needs no turn of the
    interpreter. It only gets ahead of what would happen a moment later: an error comes back there."""

    def work() -> None:
        with contextlib.suppress(Exception):
            cpu.load_pool()
            stream.load()

    thread = threading.Thread(target=work, name="torch_hlo warm-up", daemon=True)
    thread.start()
    return thread


class NativeProgram:
    """A loaded Executable, see runtime.Program. `sizes` of symbolic programs are read off the inputs' shapes."""

    def __init__(self, executable: Executable, profile: Profile | None = None) -> None:
        self.profile = profile
        self.from_disk = False  # another process has compiled it
        self.name = executable.name
        self.executable = executable
        self.aliases = executable.aliases
        self.brief = False  # it takes less time than waking a thread up
        self._loaded = cpu.load(executable)
        self.info: collective.Info | None = None  # of a program that speaks to other devices
        self.launch = self._loaded.launch  # on addresses; a program whose host call raises may leave aliased inputs half written

    def run(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        if self.info is not None:
            current().begin(self.info)
        if self.executable.exposed:
            self._run_or_restore(inputs, outputs)
        else:
            self._run(inputs, outputs)

    def _run(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        sizes = [inputs[i].shape.dims[dim] for _, i, dim in self.executable.symbols]
        copies = self._copies(inputs)
        self._loaded.call([b.memory.address for b in inputs], [b.memory.address for b in outputs], sizes, [c.address for c in copies])

    def _copies(self, inputs: Sequence[Buffer]) -> list[Memory]:
        """The memory of executable.packings in this run. Those of what it overwrites are dropped: jobs in flight keep theirs."""
        for _, i in self.aliases:
            inputs[i].memory.copies = None
        return packed.copies(self.executable.packings, inputs) if self.executable.packings else []

    @property
    def streams(self) -> bool:
        """Whether a thread without Python can run it."""
        return self._loaded.callback is None

    def prepare(self, inputs: Sequence[Buffer], numbers: bytes, outputs: Sequence[Buffer]) -> tuple[int, int, Callable[[Arena], array]]:
        """The entry's address, the bytes of scratch memory it needs, and what makes its block. `numbers`: values of the last inputs, 16 bytes each."""
        loaded = self._loaded
        words = [inputs[i].shape.dims[dim] for _, i, dim in self.executable.symbols]
        words += [b.memory.address for b in inputs]
        first, count = len(words), len(numbers) // 16
        words += [0] * count
        words += [b.memory.address for b in outputs]
        copies = self._copies(inputs)
        words += [c.address for c in copies]

        def block(arena: Arena) -> array:
            made = loaded.block(words, arena)
            made.copies = copies
            if count:
                at = len(made)
                made.frombytes(numbers)
                address = made.buffer_info()[0] + 8 * at
                for i in range(count):
                    made[cpu.FIXED_WORDS + first + i] = address + 16 * i
            return made

        return loaded.address, loaded.prepare(words), block

    def counts(self) -> list[tuple[int, int, int]]:
        """(calls, total ns, least ns) of each of `profile.steps`."""
        return self.profile.read(self._loaded.constants)

    def _run_or_restore(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        # Python code called from the program may raise half way, when these inputs have been overwritten.
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


def compile_program(module: Module, observe: Observe | None = None) -> NativeProgram:
    """Compile `module` for this machine, or load it from the disk cache. What is observed or checked is always compiled anew."""
    warm_up = _warm_up()
    try:
        target = replace(host(), cores=cpu.threads())
        return compiled(module, target, NativeProgram, lambda: _measured(module, target), observe)
    finally:
        warm_up.join()  # a process forks and ends between compiles, when no thread is inside LLVM


def _measured(module: Module, target: Target) -> bool:
    """See tuning.measure."""
    from torch_hlo.device import tuning

    return tuning.measure(_Host(target), NativeProgram, module, _seconds)


@dataclass(frozen=True, slots=True)
class _Host:
    """What is measured on, for tuning.measure."""

    target: Target


def _seconds(_: _Host, program: NativeProgram, module: Module) -> float:
    """Of the fastest of several runs, which take TRIAL_SECONDS together."""
    inputs = [runtime.from_bytes(p.shape, b"\x3c" * p.shape.nbytes) for p in module.entry.params]  # small numbers
    results = [runtime.allocate(s) for s in program.executable.outputs]
    best, end = float("inf"), time.perf_counter() + TRIAL_SECONDS
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        program.run(inputs, results)
        best = min(best, time.perf_counter() - start)
    return best
