"""What every GPU back end shares: memory that lives on the device or on the host, programs that launch kernels, and the protocol of a driver.

    program = compile_program(driver, module)       # Executable with a plan for the host and an image for the device
    program.run([buffer, ...], [buffer, ...])       # enqueues; looking at a result waits for it

Everything of one device runs on one stream in order, so a block that is freed may be handed out again at once.
"""

from __future__ import annotations

import ctypes
import json
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from torch_hlo.compiler.codegen.gpu.program import CALLS, GpuProfile, Kernel, TensorMap
from torch_hlo.compiler.codegen.gpu.target import GpuTarget
from torch_hlo.compiler.codegen.profile import Profile
from torch_hlo.compiler.codegen.program import FAILED, HostCall
from torch_hlo.compiler.codegen.registry import HOST_CALLS, load_emitters
from torch_hlo.compiler.codegen.target import host
from torch_hlo.compiler.executable import Executable
from torch_hlo.device import collective, cpu, runtime
from torch_hlo.device.programs import compiled
from torch_hlo.device.runtime import Buffer, Observe, exiting
from torch_hlo.hlo.collective import current
from torch_hlo.hlo.dim import function, substitute
from torch_hlo.hlo.ir import Module
from torch_hlo.hlo.shape import Shape


class DriverError(RuntimeError):
    """The device or its driver refused something; the message says what, on which device, and what to do."""


class Driver(Protocol):
    """One device and its stream. Addresses are the device's; calls are in order and need not wait, but `download` does."""

    name: str
    target: GpuTarget

    def allocate(self, nbytes: int) -> int:
        """Raises MemoryError."""

    def free(self, address: int) -> None: ...

    def upload(self, target: int, source: int, nbytes: int) -> None:
        """From host memory, which may be changed when this returns."""

    def download(self, target: int, source: int, nbytes: int) -> None:
        """To host memory; waits for everything before it."""

    def copy(self, target: int, source: int, nbytes: int) -> None: ...

    def fill(self, target: int, value: int, count: int) -> None:
        """`count` 32-bit words."""

    def load(self, image: bytes, kernels: Sequence[Kernel]) -> list:
        """Handles of the image's entry points. Raises DriverError."""

    def launch(self, handle, kernel: Kernel, groups: int, words: int) -> None:
        """Start a kernel; its arguments are 64-bit words at host address `words`. Raises DriverError naming kernel.label."""

    def synchronize(self) -> None:
        """Wait for everything. Raises DriverError for what failed meanwhile."""


def tiled(
    tensor_map: TensorMap, words: Sequence[int]
) -> tuple[int, list[int], list[int], tuple[int, ...]]:
    """(address, sizes in elements, strides in bytes, box in elements) of a kernel's tensor map, for these argument words. Empty arrays, of which nothing
    will be copied, are described as the driver takes it."""
    strides = [max(words[i] * tensor_map.itemsize, 16) for i in tensor_map.strides]
    return (
        words[tensor_map.pointer],
        [max(words[i], 1) for i in tensor_map.sizes],
        strides,
        tensor_map.box,
    )


# CUtensorMapDataType by bytes (numbers are not looked at), CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B
MAP_TYPES, MAP_SWIZZLE, MAP_PROMOTION = {1: 0, 2: 1, 4: 2}, 3, 3


# -- memory --------------------------------------------------------------------------------------------------------------
class DevicePool(runtime.Pool):
    """Free blocks of one device by size class, and the arena that its programs work in one after the other."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self.driver = driver
        self._arena: Block | None = None

    def arena(self, nbytes: int) -> Block:
        """Working memory of at least `nbytes`, to be held while a program is started: everybody gets the same block until it is too small."""
        with self.lock:
            arena = self._arena
            if arena is None or arena.size < nbytes:
                self._arena = None  # what it is replaced by may need the room
                del arena
                arena = self._arena = Block(self, nbytes)
            return arena

    def trim(self) -> None:
        self._arena = None
        super().trim()

    def _allocate(self, size: int):
        return None, self.driver.allocate(size)

    def _release(self, block) -> None:
        # Not a finalizer of the block: the collector would call it for blocks that their owner's finalizer has just given back.
        if not exiting():
            self.driver.free(block[1])


class DeviceMemory(runtime.Memory):
    """Contents that are on the device, on the host, or on both (the pool's lock guards which). Looking at `array` or `address` brings them to the host, and counts as writing
    there unless `readers` says that somebody only reads. A back end's own class says which `pool` they come from."""

    __slots__ = ("nbytes", "_pool", "_block", "_host", "_current", "_lock")
    pool: Callable[[], DevicePool]  # of the device in use

    def __init__(self, nbytes: int) -> None:
        self.readers = self.size = 0
        self.nbytes = nbytes
        self._host: runtime.Memory | None = None
        self._current = "none"  # where the contents are: none, host, device, both
        self._pool = type(self).pool()
        self._lock = self._pool.lock
        self.size, self._block = self._pool.take(nbytes)

    @classmethod
    def adopt(cls, address: int, nbytes: int, owner: object) -> DeviceMemory:
        self = cls.__new__(cls)
        self.readers, self.size, self.nbytes, self.owner = 1, 0, nbytes, owner
        self._host, self._current = None, "device"
        self._pool, self._block = cls.pool(), (None, address)
        self._lock = self._pool.lock
        return self

    def __del__(self) -> None:
        if self.size:
            self._pool.give(self.size, self._block)
        elif hasattr(self, "owner") and not exiting():
            self._pool.driver.synchronize()  # a program may be reading what its owner is about to use again

    @property
    def device_address(self) -> int:
        """Where a program reads the contents."""
        with self._lock:
            if self._current == "host":
                self._upload()
                self._current = "both" if self.readers else "device"
                if not self.readers:
                    self._host = None
            return self._block[1]

    def written(self) -> int:
        """Where a program writes; what was here before is gone."""
        with self._lock:
            self._current, self._host = "device", None
            return self._block[1]

    def _to_host(self) -> runtime.Memory:
        with self._lock:
            if self._host is None:
                self._host = self._host_memory()
            if self._current == "device":
                self._pool.driver.download(self._host.address, self._block[1], self.nbytes)
                self._current = "both"
            if not self.readers:
                if self._current == "both":
                    self._pool.driver.synchronize()  # it may be on its way to the device
                self._current = "host"
            return self._host

    def _host_memory(self) -> runtime.Memory:
        return runtime.Memory(self.nbytes)

    def _upload(self) -> None:
        """Bring the host's contents to the device."""
        self._pool.driver.upload(self._block[1], self._host.address, self.nbytes)

    def copy(self, nbytes: int) -> DeviceMemory:
        other = type(self)(nbytes)
        source = self.device_address
        other._pool.driver.copy(other.written(), source, nbytes)
        return other

    @property
    def array(self) -> np.ndarray:
        return self._to_host().array

    @property
    def address(self) -> int:
        return self._to_host().address


# -- programs ------------------------------------------------------------------------------------------------------------
_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_P, _N = ctypes.c_void_p, ctypes.c_int64
_CALLS = {
    "host_call": ctypes.CFUNCTYPE(None, _P, _N, _P), "launch": ctypes.CFUNCTYPE(None, _P, _N, _N, _P), "copy": ctypes.CFUNCTYPE(None, _P, _P, _P, _N),
    "fetch": ctypes.CFUNCTYPE(None, _P, _P, _P, _N), "fill": ctypes.CFUNCTYPE(None, _P, _P, ctypes.c_int32, _N),
    "branch": ctypes.CFUNCTYPE(None, _P, _N, _N), "mark": ctypes.CFUNCTYPE(None, _P, _N),
}  # fmt: skip


class GpuProgram:
    """A loaded Executable for a GPU; see runtime.Program. `run` is used by one thread at a time."""

    def __init__(
        self, executable: Executable, pool: DevicePool, profile: Profile | None = None
    ) -> None:
        driver = pool.driver
        self.profile = profile
        self.from_disk = False  # another process has compiled it
        self.info: collective.Info | None = None  # of a program that speaks to other devices
        self._counts = [[0, 0, 0] for _ in profile.steps] if profile is not None else []
        self._stamps: list[tuple[int, object]] = []
        if executable.target != driver.target.key:
            raise ValueError(
                f"{executable.name} was compiled for {executable.target}, the device is {driver.target.key}"
            )
        if executable.host_calls:
            load_emitters()
        self.name, self.executable, self.aliases = executable.name, executable, executable.aliases
        self.driver, self.pool = driver, pool
        self._engine = cpu.engine(executable.objects, host())
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
        self._functions = [_CALLS[name](self._guarded(getattr(self, f"_{name}"))) for name in CALLS]
        self._table = array("Q", [ctypes.cast(f, _P).value for f in self._functions])
        self._arena = function([name for name, _, _ in executable.symbols], (executable.arena,))

    def run(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        e = self.executable
        if self.info is not None:
            current().begin(self.info)
        sizes = [inputs[i].shape.dims[d] for _, i, d in e.symbols]
        try:
            arena = self.pool.arena(max(self.arena_bytes(*sizes), 1))
            staged: dict[int, Block] = {}
            given = [self._input(b, staged) for b in inputs]
            saved = self._save(inputs)
            own = {o for o, _ in e.aliases}
            targets = [
                b.memory.written()
                if isinstance(b.memory, DeviceMemory)
                else 0
                if o in own
                else self._stage(b.memory, b.nbytes, staged)
                for o, b in enumerate(outputs)
            ]
        except MemoryError as error:
            raise self._out_of_memory(sizes, error) from None
        for o, i in e.aliases:
            targets[o] = given[i]
        try:
            self._start(arena.address, (*sizes, *given, *targets))
        except BaseException:
            for target, copy, nbytes in saved:
                self.driver.copy(target, copy.address, nbytes)
            raise
        for b, target in zip(outputs, targets, strict=True):
            if not isinstance(b.memory, DeviceMemory) and b.nbytes:
                self.driver.download(b.address, target, b.nbytes)

    def arena_bytes(self, *sizes: int) -> int:
        """Bytes of working memory that a run with these sizes needs."""
        return self._arena(*sizes)[0]

    def _out_of_memory(self, sizes: Sequence[int], error: MemoryError) -> MemoryError:
        return MemoryError(
            f"{self.name}: no device memory for {self.arena_bytes(*sizes) / 2**20:.1f} MiB of working arrays ({error}); "
            f"{runtime.memory_summary()}. Its largest buffers:\n{self.executable.buffers}\nTORCH_HLO_DUMP writes the whole buffer report; "
            "use a smaller batch or free tensors"
        )

    def _start(self, arena: int, words: Sequence[int]) -> None:
        """Enqueue a run. `words`: the sizes, the addresses of the parameters, those of the outputs. Raises what went wrong on the way."""
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
            error, self._error = self._error, None
            raise error

    def _call(self, words: Sequence[int], sizes: Sequence[int]) -> None:
        block = array("Q", words)
        self._sizes = {
            name: n for (name, _, _), n in zip(self.executable.symbols, sizes, strict=True)
        }
        self._entry(block.buffer_info()[0])

    def _input(self, buffer: Buffer, staged: dict[int, Block]) -> int:
        memory = buffer.memory
        if isinstance(memory, DeviceMemory):
            return memory.device_address
        if not buffer.nbytes:
            return 0
        whole, offset, nbytes = memory.within(buffer.nbytes)
        if id(whole) in staged:
            return staged[id(whole)].address + offset
        address = self._stage(whole, nbytes, staged)
        self.driver.upload(address, whole.address, nbytes)
        return address + offset

    def _stage(self, memory: runtime.Memory, nbytes: int, staged: dict[int, Block]) -> int:
        """Device memory for the time of a run, for what lives on the host."""
        staged[id(memory)] = block = Block(self.pool, max(nbytes, 1))
        return block.address

    def _save(self, inputs: Sequence[Buffer]) -> list[tuple[int, Block, int]]:
        """Copies of what will be overwritten: Python code called on the way may raise."""
        saved = []
        for i in self.executable.exposed:
            copy = Block(self.pool, max(inputs[i].nbytes, 1))
            address = self._input(inputs[i], {})
            self.driver.copy(copy.address, address, inputs[i].nbytes)
            saved.append((address, copy, inputs[i].nbytes))
        return saved

    # -- called by the plan ---------------------------------------------------------------------------------------
    def _guarded(self, method):
        """An exception must not go through native code: it is kept, and what is called after it does nothing."""

        def call(block: int, *arguments: int) -> None:
            if self._error is None:
                try:
                    return method(*arguments)
                except BaseException as error:  # noqa: BLE001
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

    # -- the times of a profiled program's steps --------------------------------------------------------------------
    def counts(self) -> list[tuple[int, int, int]]:
        """(calls, total ns, least ns) of each of `profile.steps`."""
        return [tuple(c) for c in self._counts]

    def _stamp(self) -> object:
        """A point in the order of the device's work; `_elapsed` gives the seconds between two."""
        self.driver.synchronize()
        return time.perf_counter()

    def _elapsed(self, start, end) -> float:
        return end - start

    def _count(self) -> None:
        self._mark(len(self._counts))
        self.driver.synchronize()
        for (step, start), (_, end) in pairwise(self._stamps):
            ns, count = int(self._elapsed(start, end) * 1e9), self._counts[step]
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
            tuple(substitute(d, self._sizes) for d in shape.dims), cpu.storage_dtype(shape.dtype)
        )


def run_host_call(call: HostCall, outputs: list[np.ndarray], inputs: list[np.ndarray]) -> None:
    """Call a registered function on arrays. A collective is done when it has been started: its results go to the device here."""
    attributes = json.loads(call.attrs)
    if call.name == "collective-start":
        return HOST_CALLS["collective"](outputs, inputs, text=attributes["text"])
    HOST_CALLS[call.name](outputs, inputs, **attributes)


class Block:
    """A block of a pool, given back with this object."""

    __slots__ = ("pool", "size", "block")

    def __init__(self, pool: DevicePool, nbytes: int) -> None:
        self.pool, self.size = pool, 0
        self.size, self.block = pool.take(nbytes)

    @property
    def address(self) -> int:
        return self.block[1]

    def __del__(self) -> None:
        if self.size:
            self.pool.give(self.size, self.block)


def compile_program(
    pool: DevicePool,
    module: Module,
    observe: Observe | None = None,
    program: type[GpuProgram] = GpuProgram,
) -> GpuProgram:
    """Compile `module` for the pool's device, or load it from the disk cache."""

    def load(executable: Executable, profile: Profile | None = None) -> GpuProgram:
        return program(executable, pool, profile)

    def measure() -> bool:
        from torch_hlo.device import tuning

        return tuning.measure(pool.driver, load, module)

    return compiled(module, pool.driver.target, load, measure, observe, GpuProfile)
