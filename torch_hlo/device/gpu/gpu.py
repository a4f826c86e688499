"""What every GPU back end shares: programs that launch kernels, and how they are compiled.

    program = compile_program(pool, module, None, GpuProgram)
    program.run([buffer, ...], [buffer, ...])       # enqueues

An Executable has a plan for the host and an image for the device. Looking at a result waits for it.
"""

from __future__ import annotations

import ctypes
import json
import time
from abc import abstractmethod
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from torch_hlo.compiler.codegen import HostCall
from torch_hlo.compiler.codegen.block import FAILED
from torch_hlo.compiler.codegen.profile import Profile
from torch_hlo.compiler.codegen.registry import HOST_CALLS
from torch_hlo.compiler.executable import Executable
from torch_hlo.compiler.gpu.gpu_program import CALLS, GpuProfile
from torch_hlo.compiler.llvm import host
from torch_hlo.hlo.ir import Ints, Module, Shape, function, substitute
from torch_hlo.hlo.sharding.collective import current

from .. import runtime
from ..cpu import loader
from ..cpu.engine import engine
from ..interfaces import Backend, Observe
from ..memory import Buffer, Memory, Part
from ..programs import CompiledProgram, compiled
from .device_memory import Block, DeviceMemory, DevicePool
from .driver import Driver

_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_P = ctypes.c_void_p
_N = ctypes.c_int64
_CALLS = {
    "host_call": ctypes.CFUNCTYPE(None, _P, _N, _P),
    "launch": ctypes.CFUNCTYPE(None, _P, _N, _N, _P),
    "copy": ctypes.CFUNCTYPE(None, _P, _P, _P, _N),
    "fetch": ctypes.CFUNCTYPE(None, _P, _P, _P, _N),
    "fill": ctypes.CFUNCTYPE(None, _P, _P, ctypes.c_int32, _N),
    "branch": ctypes.CFUNCTYPE(None, _P, _N, _N),
    "mark": ctypes.CFUNCTYPE(None, _P, _N),
}


class GpuProgram(CompiledProgram):
    """A loaded Executable for a GPU. `run` is used by one thread at a time."""

    virtual = False

    def __init__(
        self,
        executable: Executable,
        pool: DevicePool,
        profile: Profile | None = None,
    ) -> None:
        super().__init__(executable, profile)
        driver = pool.driver
        self._counts = [[0, 0, 0] for _ in profile.steps] if profile is not None else []
        self._stamps: list[tuple[int, object]] = []
        if executable.target != driver.target.key:
            raise ValueError(
                f"{executable.name} was compiled for {executable.target}, the device is"
                f" {driver.target.key}"
            )
        self.driver = driver
        self.pool = pool
        self._engine = engine(executable.objects, host())
        self._entry = _ENTRY(self._engine.get_function_address(executable.entry))
        self._handles = (
            driver.load(executable.image, executable.kernels) if executable.kernels else []
        )
        self._constants = Block(pool, len(executable.constants)) if executable.constants else None
        if self._constants is not None:
            driver.upload(
                self._constants.address,
                ctypes.cast(executable.constants, _P).value,
                len(executable.constants),
            )
        self._error: BaseException | None = None
        self._own = dict(executable.aliases)  # input by output
        # the numbers of the last run, and where they are: runs are in order, so that is one place
        self._numbers: Memory | None = None
        self._block: Block | None = None
        self._functions = [_CALLS[name](self._guarded(getattr(self, f"_{name}"))) for name in CALLS]
        self._table = array("Q", [ctypes.cast(f, _P).value for f in self._functions])
        self._arena = function([name for name, _, _ in executable.symbols], (executable.arena,))

    def run(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        if self.info is not None:
            current().begin(self.info)
        sizes = self.sizes(inputs)
        staged: list[Block] = []
        n = len(inputs)
        try:
            arena = self.pool.arena(max(self.arena_bytes(*sizes), 1))
            words = [b.memory.ready for b in (*inputs, *outputs)]
            for i in [i for i, word in enumerate(words) if not word]:
                if i < n:
                    words[i] = self._input(inputs[i], staged)
                elif isinstance(memory := outputs[i - n].memory, DeviceMemory):
                    words[i] = memory.written()
                elif i - n in self._own:
                    words[i] = words[self._own[i - n]]
                else:
                    words[i] = self._stage(outputs[i - n].nbytes, staged)
            saved = self._save(inputs, words)
        except MemoryError as error:
            raise self._out_of_memory(sizes, error) from None
        try:
            self._start(arena.address, (*sizes, *words))
        except BaseException:
            for target, copy, nbytes in saved:
                self.driver.copy(target, copy.address, nbytes)
            raise
        if staged:
            for b, target in zip(outputs, words[n:], strict=True):
                if not isinstance(b.memory, DeviceMemory) and b.nbytes:
                    self.driver.download(b.address, target, b.nbytes)

    def arena_bytes(self, *sizes: int) -> int:
        """Bytes of working memory that a run with these sizes needs."""
        return self._arena(*sizes)[0]

    def _out_of_memory(self, sizes: Sequence[int], error: MemoryError) -> MemoryError:
        return MemoryError(
            f"{self.name}: no device memory for {self.arena_bytes(*sizes) / 2**20:.1f} MiB of"
            f" working arrays ({error}); {runtime.memory_summary()}. Its largest"
            f" buffers:\n{self.executable.buffers}\nTORCH_HLO_DUMP writes the whole buffer report;"
            " use a smaller batch or free tensors"
        )

    def _start(self, arena: int, words: Sequence[int]) -> None:
        """Enqueue a run. `words`: the sizes, the addresses of the parameters, those of the outputs.
        Raises what went wrong on the way."""
        n = len(self.executable.symbols)
        self._call(
            (
                arena,
                self._constants.address if self._constants else 0,
                self._table.buffer_info()[0],
                0,
                0,
                *words,
            ),
            words[:n],
        )
        if self.profile is not None:
            self._count()
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    def _call(self, words: Ints, sizes: Sequence[int]) -> None:
        block = array("Q", words)
        self._sizes = {
            name: n for (name, _, _), n in zip(self.executable.symbols, sizes, strict=True)
        }
        self._entry(block.buffer_info()[0])

    def _input(self, buffer: Buffer, staged: list[Block]) -> int:
        memory = buffer.memory
        if isinstance(memory, Part):
            if memory.whole is not self._numbers:
                nbytes = len(memory.whole.array)
                self._block = self._block or Block(self.pool, nbytes)
                self.driver.upload(self._block.address, memory.whole.address, nbytes)
                self._numbers = memory.whole
            return self._block.address + memory.offset
        address = memory.device_address
        if not address and buffer.nbytes:
            address = self._stage(buffer.nbytes, staged)
            self.driver.upload(address, buffer.address, buffer.nbytes)
        return address

    def _stage(self, nbytes: int, staged: list[Block]) -> int:
        """Device memory for the time of a run, for what lives on the host."""
        staged.append(Block(self.pool, max(nbytes, 1)))
        return staged[-1].address

    def _save(self, inputs: Sequence[Buffer], words: Sequence[int]) -> list[tuple[int, Block, int]]:
        """Copies of what will be overwritten: Python code called on the way may raise."""
        saved = []
        for i in self.executable.exposed:
            copy = Block(self.pool, max(inputs[i].nbytes, 1))
            self.driver.copy(copy.address, words[i], inputs[i].nbytes)
            saved.append((words[i], copy, inputs[i].nbytes))
        return saved

    # -- called by the plan
    def _guarded(self, method: Callable[..., None]) -> Callable[..., None]:
        """An exception must not go through native code: it is kept, and what is called after it
        does nothing."""

        def call(block: int, *arguments: int) -> None:
            if self._error is None:
                try:
                    return method(*arguments)
                except BaseException as error:
                    self._error = error
                    ctypes.c_uint64.from_address(block + 8 * FAILED).value = 1
            if method == self._fetch:
                ctypes.memset(arguments[0], 0, arguments[2])  # ends loops

        return call

    def _launch(self, number: int, groups: int, words: int) -> None:
        if groups > 0:
            self.driver.launch(
                self._handles[number], self.executable.kernels[number], groups, words
            )

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        if nbytes:
            self.driver.copy(target, source, nbytes)

    def _fetch(self, target: int, source: int, nbytes: int) -> None:
        self.driver.download(target, source, nbytes)

    def _fill(self, target: int, value: int, count: int) -> None:
        self.driver.fill(target, value, count)

    def _branch(self, number: int, after: int) -> None:
        """Devices without graphs run steps in order."""

    def _mark(self, step: int) -> None:
        self._stamps.append((step, self._stamp()))

    # -- the times of a profiled program's steps
    def counts(self) -> list[tuple[int, int, int]]:
        return [(calls, total, least) for calls, total, least in self._counts]

    def _stamp(self) -> object:
        """A point in the order of the device's work; `_elapsed` gives the seconds between two."""
        self.driver.synchronize()
        return time.perf_counter()

    def _elapsed(self, start: Any, end: Any) -> float:
        return end - start

    def _count(self) -> None:
        self._mark(len(self._counts))
        self.driver.synchronize()
        for (step, start), (_, end) in pairwise(self._stamps):
            ns = int(self._elapsed(start, end) * 1e9)
            count = self._counts[step]
            count[:] = count[0] + 1, count[1] + ns, min(count[2] or ns, ns)
        self._stamps = []

    def _host_call(self, number: int, words: int) -> None:
        call = self.executable.host_calls[number]
        addresses = (ctypes.c_uint64 * (len(call.outputs) + len(call.inputs))).from_address(words)
        results = [self._array(s) for s in call.outputs]
        values = []
        for address, shape in zip(addresses[len(call.outputs) :], call.inputs, strict=True):
            values.append(value := self._array(shape))
            if value.nbytes:
                self.driver.download(value.ctypes.data, address, value.nbytes)
        if call.name == "collective-done":
            return
        run_host_call(call, results, values)
        for address, value in zip(addresses, results):
            if value.nbytes:
                self.driver.upload(address, value.ctypes.data, value.nbytes)

    def _array(self, shape: Shape) -> np.ndarray:
        return np.zeros(
            tuple(substitute(d, self._sizes) for d in shape.dims),
            loader.storage_dtype(shape.dtype),
        )


def run_host_call(call: HostCall, outputs: list[np.ndarray], inputs: list[np.ndarray]) -> None:
    """Call a registered function on arrays. A collective is done when it has been started: its
    results go to the device here."""
    attributes = json.loads(call.attrs)
    if call.name == "collective-start":
        return HOST_CALLS["collective"](outputs, inputs, text=attributes["text"])
    HOST_CALLS[call.name](outputs, inputs, **attributes)


P = TypeVar("P", bound=GpuProgram)


class GpuBackend(Backend):
    """A device with memory of its own, driven by `Driver`. It says which pool its memory comes
    from."""

    on_host = False
    arrays: type[DeviceMemory] = DeviceMemory
    programs: type[GpuProgram] = GpuProgram

    @abstractmethod
    def pool(self) -> DevicePool:
        """The device that TORCH_HLO_DEVICE names; one per process. Raises DriverError."""

    def driver(self) -> Driver:
        return self.pool().driver

    def memory(self, nbytes: int) -> DeviceMemory:
        return self.arrays(nbytes, self.pool())

    def adopt(self, address: int, nbytes: int, owner: object) -> DeviceMemory:
        return self.arrays.adopted(address, nbytes, owner, self.pool())

    def compile_program(self, module: Module, observe: Observe | None = None) -> GpuProgram:
        return compile_program(self.pool(), module, observe, self.programs)


def compile_program(
    pool: DevicePool,
    module: Module,
    observe: Observe | None,
    program: type[P],
) -> P:
    """Compile `module` for the pool's device, or load it from the disk cache."""

    def load(executable: Executable, profile: Profile | None = None) -> P:
        return program(executable, pool, profile)

    return compiled(module, pool.driver.target, load, observe, GpuProfile)
