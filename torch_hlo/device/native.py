"""The CPU back end (TORCH_HLO_DEVICE=cpu): modules become machine code, kept on disk between processes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch_hlo.compiler import cache
from torch_hlo.compiler.codegen.profile import Profile
from torch_hlo.compiler.codegen.registry import load_emitters
from torch_hlo.compiler.codegen.target import Target, host
from torch_hlo.compiler.executable import Executable
from torch_hlo.device import collective, cpu, packed, runtime, stream, trim
from torch_hlo.device.programs import compiled
from torch_hlo.device.runtime import Buffer, Memory, Observe
from torch_hlo.hlo.collective import current
from torch_hlo.hlo.ir import Module

TRIAL_SECONDS = 0.1
# Imported by the first compile, in parts that nobody has to wait long for.
_COMPILER = (
    "passes.algebra",
    "passes.attention_match",
    "codegen.gemm",
    "codegen.loop",
    "passes.fusion",
    "passes.partial_sort",
    "pipeline",
)


def preparations() -> list[Callable[[], object]]:
    """What the first program needs whichever it is, in parts: the code that programs run on (first, while there is little in memory beside LLVM), the
    key of this compiler, its modules (last: a program on disk does without)."""
    modules = [
        functools.partial(importlib.import_module, f"torch_hlo.compiler.{name}")
        for name in _COMPILER
    ]
    return [
        cpu.load_pool,
        stream.load,
        trim.release_compiler,
        cache.compiler_version,
        *modules,
        load_emitters,
    ]


@functools.cache
def _warm_up() -> threading.Thread:
    """What programs run on, the pool and the stream, is compiled while the first program is, if it was not before (`preparations`): on a thread of its own,
    since LLVM needs no turn of the interpreter. It only gets ahead of what would happen a moment later: an error comes back there."""

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
        self.seconds = math.inf  # of its fastest run on the stream
        self._loaded = cpu.load(executable)
        self.streams = self._loaded.callback is None  # a thread without Python can run it
        self.info: collective.Info | None = None  # of a program that speaks to other devices
        self.launch = (
            self._loaded.launch
        )  # on addresses; a program whose host call raises may leave aliased inputs half written

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
        self._loaded.call(
            [b.memory.address for b in inputs],
            [b.memory.address for b in outputs],
            sizes,
            [c.address for c in copies],
        )

    def _copies(self, inputs: Sequence[Buffer]) -> list[Memory]:
        """The memory of executable.packings in this run. Those of what it overwrites are dropped: jobs in flight keep theirs."""
        for _, i in self.aliases:
            inputs[i].memory.copies = None
        return packed.copies(self.executable.packings, inputs) if self.executable.packings else []

    def prepare(
        self, inputs: Sequence[Buffer], numbers: bytes, outputs: Sequence[Buffer]
    ) -> tuple[int, int, array, object]:
        """The entry's address, the bytes of scratch memory it needs, its block, whose word ARENA is still to be given, and what that refers to: packed
        copies, which a later run may drop. `numbers`: values of the last inputs, 16 bytes each."""
        loaded = self._loaded
        sizes = (
            [inputs[i].shape.dims[dim] for _, i, dim in self.executable.symbols]
            if self.executable.symbols
            else ()
        )
        copies = self._copies(inputs)
        addresses = [b.memory.address for b in inputs]
        count = len(numbers) // 16
        block = loaded.block(
            [
                *sizes,
                *addresses,
                *[0] * count,
                *[b.memory.address for b in outputs],
                *[c.address for c in copies],
            ]
        )
        if count:
            first, at = cpu.FIXED_WORDS + len(sizes) + len(addresses), len(block)
            block.frombytes(numbers)
            start = block.buffer_info()[0] + 8 * at
            for i in range(count):
                block[first + i] = start + 16 * i
        cpu.ensure_pool()
        return loaded.address, loaded.arena_bytes(sizes), block, copies

    def bind(
        self,
        inputs: Sequence[Buffer],
        numbers: bytes,
        outputs: Sequence[Buffer],
        still: Sequence[int],
    ) -> Bound | None:
        """For more runs like this one, in which the inputs `still`, and what is written over them, are where they are. None where others write to the block."""
        return None if self.executable.packings else Bound(self, inputs, numbers, outputs, still)

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


class Bound:
    """A program's block of words for runs of which most arguments stay where they are: it is copied, and written to where they do not."""

    __slots__ = (
        "_block",
        "_entry",
        "_first",
        "_moving",
        "_nbytes",
        "_numbers",
        "_results",
        "_still",
        "_tail",
    )

    def __init__(
        self,
        program: NativeProgram,
        inputs: Sequence[Buffer],
        numbers: bytes,
        outputs: Sequence[Buffer],
        still: Sequence[int],
    ) -> None:
        self._entry, self._nbytes, self._block, _ = program.prepare(inputs, numbers, outputs)
        self._numbers = numbers
        self._still = [(i, inputs[i].memory.address) for i in still]
        first = cpu.FIXED_WORDS + len(program.executable.symbols)
        self._moving = [(first + i, i) for i in range(len(inputs)) if i not in still]
        self._first = first + len(inputs)
        first = self._first + len(numbers) // 16
        over = {o for o, i in program.aliases if i in still}
        self._results = [(first + o, o) for o in range(len(outputs)) if o not in over]
        self._tail = first + len(outputs)

    def prepare(
        self, inputs: Sequence[Buffer], numbers: bytes, outputs: Sequence[Buffer]
    ) -> tuple[int, int, array, object] | None:
        """As `NativeProgram.prepare`. None if something has moved that was to stay."""
        for i, address in self._still:
            memory = inputs[i].memory
            if memory.address != address:
                return None
            memory.copies = None
        block = self._block[:]
        for word, i in self._moving:
            block[word] = inputs[i].memory.address
        for word, o in self._results:
            block[word] = outputs[o].memory.address
        if numbers != self._numbers:  # else they are read where the first run found them
            block[self._tail :] = array("Q", numbers)
            start = block.buffer_info()[0] + 8 * self._tail
            for word in range(len(numbers) // 16):
                block[self._first + word] = start + 16 * word
        cpu.ensure_pool()
        return self._entry, self._nbytes, block, self._block


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
    inputs = [
        runtime.from_bytes(p.shape, b"\x3c" * p.shape.nbytes) for p in module.entry.params
    ]  # small numbers
    results = [runtime.allocate(s) for s in program.executable.outputs]
    best, end = float("inf"), time.perf_counter() + TRIAL_SECONDS
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        program.run(inputs, results)
        best = min(best, time.perf_counter() - start)
    return best
