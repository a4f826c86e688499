"""Any PJRT plugin as the device behind "hlo": `TORCH_HLO_DEVICE=pjrt:/path/to/plugin.so`.

Programs are handed over as StableHLO text. Results stay on the plugin's device until somebody looks
at them; a program that updates parameters in place donates their buffers.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import numpy as np

from torch_hlo.compiler.simplify.legalize import legalize
from torch_hlo.hlo.evaluate.evaluate import evaluate_instruction, specialize
from torch_hlo.hlo.ir import (
    DTYPES,
    Instruction,
    Ints,
    Module,
    Shape,
    decode,
    encode,
    outputs,
    postorder,
)
from torch_hlo.hlo.stablehlo import stablehlo_text

from ..interfaces import Backend, Observe, Program
from ..memory import Buffer, Memory
from .host_split import stages
from .pjrt_api import BUFFER_TYPES, COMPILE_OPTIONS, Api, PjrtError, structure, words

_DURING_CALL = 0  # PJRT_HostBufferSemantics: the host's memory is ours again when the call returns


class Client:
    """A plugin's client and its first device."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.api = Api(path)
        self.client = self.api.Client_Create().client
        found = self.api.Client_AddressableDevices(client=self.client)
        if not found.num_addressable_devices:
            raise PjrtError(f"{path} has no device on this machine")
        self.device = ctypes.c_void_p.from_address(found.addressable_devices).value

    @property
    def platform(self) -> str:
        found = self.api.Client_PlatformName(client=self.client)
        return ctypes.string_at(found.platform_name, found.platform_name_size).decode()

    def upload(self, shape: Shape, address: int) -> DeviceArray:
        """A copy of host memory on the device."""
        dims = (ctypes.c_int64 * max(shape.rank, 1))(*shape.dims)
        made = self.api.Client_BufferFromHostBuffer(
            client=self.client,
            data=address,
            type=BUFFER_TYPES[shape.dtype],
            dims=ctypes.addressof(dims),
            num_dims=shape.rank,
            host_buffer_semantics=_DURING_CALL,
            device=self.device,
        )
        self.api.wait(made.done_with_host_buffer)
        return DeviceArray(self, made.buffer)

    def compile(self, text: str) -> int:
        """A PJRT_LoadedExecutable of StableHLO text."""
        options = ctypes.create_string_buffer(COMPILE_OPTIONS)
        program, keep = self.api.program(text)
        made = self.api.Client_Compile(
            client=self.client,
            program=ctypes.addressof(program),
            compile_options=ctypes.addressof(options),
            compile_options_size=len(COMPILE_OPTIONS),
        )
        del keep
        return made.executable


class DeviceArray:
    """A PJRT_Buffer, destroyed with this object."""

    __slots__ = ("client", "buffer")

    def __init__(self, client: Client, buffer: int) -> None:
        self.client = client
        self.buffer = buffer

    def __del__(self) -> None:
        self.client.api.Buffer_Destroy(buffer=self.buffer)

    def download(self, address: int, nbytes: int) -> None:
        """Copy to the host; blocks until the array has been computed."""
        copy = self.client.api.Buffer_ToHostBuffer(src=self.buffer, dst=address, dst_size=nbytes)
        self.client.api.wait(copy.event)


class PjrtMemory(Memory):
    """Contents that are on the device or on the host, whoever wrote last. Looking at `array` or
    `address` brings them to the host."""

    __slots__ = ("nbytes", "device", "_host", "_lock")

    def __init__(self, nbytes: int) -> None:
        self.readers = self.size = 0
        self.nbytes = nbytes
        self.device: DeviceArray | None = None
        self._host: Memory | None = None
        # Of where the contents are. The CPU's pool and the plugin's code are entered under it.
        self._lock = threading.Lock()

    def host(self) -> Memory:
        with self._lock:
            if self._host is None:
                self._host = Memory(self.nbytes)
            if self.device is not None:
                self.device.download(self._host.address, self.nbytes)
                self.device = None  # the host may write now
            return self._host

    def give(self, array: DeviceArray) -> None:
        """The device has new contents; the host's are forgotten."""
        with self._lock:
            self.device = array
            self._host = None

    @property
    def array(self) -> np.ndarray:
        return self.host().array

    @property
    def address(self) -> int:
        return self.host().address


class PjrtProgram(Program):
    """A module compiled by the plugin, once per set of sizes. Host calls run
    between the stages they split it into."""

    def __init__(self, module: Module, client: Client, observe: Observe | None) -> None:
        self.name = module.name
        self.aliases = module.aliases
        self.module = module
        self.client = client
        self._observe = observe
        self._plans: dict[Ints, _Plan] = {}
        _check(module)
        if not module.symbols:
            self._plan(())

    def _plan(self, sizes: Ints) -> _Plan:
        found = self._plans.get(sizes)
        if found is None:
            m = self.module
            if sizes:
                values = {name: n for (name, _, _), n in zip(m.symbols, sizes, strict=True)}
                m = Module(m.name, specialize(m.entry, values), m.aliases)
            found = self._plans[sizes] = _Plan(m, self.client, self._observe)
        return found

    def run(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        plan = self._plan(tuple(inputs[i].shape.dims[d] for _, i, d in self.module.symbols))
        for buffer, array in zip(outputs, plan.run([self._array(b) for b in inputs]), strict=True):
            if isinstance(buffer.memory, PjrtMemory):
                buffer.memory.give(array)
            elif buffer.nbytes:
                array.download(buffer.address, buffer.nbytes)

    def _array(self, buffer: Buffer) -> DeviceArray:
        """The input on the device, where it stays."""
        memory = buffer.memory
        if not isinstance(memory, PjrtMemory):
            return self.client.upload(buffer.shape, buffer.address)
        if memory.device is None:
            memory.give(self.client.upload(buffer.shape, memory.address))
        return memory.device


class _Executable:
    """A PJRT_LoadedExecutable. `aliases`: (output, input) pairs; these inputs are donated."""

    def __init__(self, module: Module, client: Client, observe: Observe | None) -> None:
        self.client, self.count, self.executable = client, len(outputs(module)), 0
        text = stablehlo_text(legalize.run(module))
        if observe is not None:
            observe("stablehlo", text)
        donated = {i for _, i in module.aliases}
        self.kept = [i for i in range(len(module.entry.params)) if i not in donated]
        self.executable = client.compile(text)

    def __del__(self) -> None:
        if self.executable:
            self.client.api.LoadedExecutable_Destroy(executable=self.executable)

    def run(self, arrays: Sequence[DeviceArray]) -> list[DeviceArray]:
        """Results, computed."""
        api = self.client.api
        kept = (ctypes.c_int64 * max(len(self.kept), 1))(*self.kept)
        options = structure(
            "ExecuteOptions",
            non_donatable=ctypes.addressof(kept),
            num_non_donatable=len(self.kept),
        )
        arguments, results = (
            words([a.buffer for a in arrays]),
            words([None] * self.count),
        )
        argument_list, result_list, events = (
            words([ctypes.addressof(arguments)]),
            words([ctypes.addressof(results)]),
            words([None]),
        )
        api.LoadedExecutable_Execute(
            executable=self.executable,
            options=ctypes.addressof(options),
            argument_lists=ctypes.addressof(argument_list),
            num_devices=1,
            num_args=len(arrays),
            output_lists=ctypes.addressof(result_list),
            device_complete_events=ctypes.addressof(events),
        )
        made = [DeviceArray(self.client, results[i]) for i in range(self.count)]
        api.wait(events[0])
        return made


class _Plan:
    """What one call of a program does: a single executable, or stages with host calls between
    them."""

    def __init__(self, module: Module, client: Client, observe: Observe | None) -> None:
        self.module = module
        self.client = client
        self.stages = stages(module)
        split = len(self.stages) > 1
        self.whole = None if split else _Executable(module, client, observe)
        self.parts = (
            [
                _Executable(s.module, client, observe) if s.module is not None else None
                for s in self.stages
            ]
            if split
            else []
        )

    def run(self, arrays: Sequence[DeviceArray]) -> list[DeviceArray]:
        if self.whole is not None:
            return self.whole.run(arrays)
        known: dict[Instruction, DeviceArray] = dict(
            zip(self.module.entry.params, arrays, strict=True)
        )
        for stage, executable in zip(self.stages, self.parts, strict=True):
            if executable is not None:
                known.update(
                    zip(stage.values, executable.run([known[v] for v in stage.inputs]), strict=True)
                )
            for call in stage.calls:
                self._on_host(call, known)
        return [known[x] for x in outputs(self.module)]

    def _on_host(self, call: Instruction, known: dict[Instruction, DeviceArray]) -> None:
        result = evaluate_instruction(call, *(self._fetch(o, known[o]) for o in call.operands))
        if not call.shape.is_tuple:
            known[call] = self._send(call.shape, result)
            return
        for x in postorder((self.module.entry.root,)):
            if x.op == "get-tuple-element" and x.operand is call:
                known[x] = self._send(x.shape, result[x["index"]])

    def _fetch(self, x: Instruction, array: DeviceArray) -> np.ndarray:
        space = np.empty(x.shape.nbytes, np.uint8)
        if space.size:
            array.download(space.ctypes.data, space.size)
        return decode(space.tobytes(), x.shape.dtype, x.shape.dims)

    def _send(self, shape: Shape, value: np.ndarray) -> DeviceArray:
        data = np.frombuffer(encode(value, shape.dtype), np.uint8)
        return self.client.upload(shape, data.ctypes.data)


def _check(module: Module) -> None:
    """Raises PjrtError naming what a plugin cannot take."""
    for x in (*module.entry.params, *outputs(module)):
        if x.shape.dtype not in BUFFER_TYPES or DTYPES[x.shape.dtype].bits < 8:
            raise PjrtError(
                f"{module.name}: {x.shape} cannot be an input or result of a PJRT program; convert"
                " it inside the program"
            )


class PjrtBackend(Backend):
    """The plugin whose path is the argument."""

    on_host = False

    def __init__(self, argument: str) -> None:
        super().__init__(argument)
        # Of `_client`, which is made once, by the plugin's code. Nothing of ours is taken under it.
        self._lock = threading.Lock()
        self._client: Client | None = None

    def client(self) -> Client:
        """The plugin's; one per process. Raises PjrtError."""
        with self._lock:
            if self._client is None:
                try:
                    self._client = Client(self.argument)
                except OSError as error:
                    raise PjrtError(
                        f"TORCH_HLO_DEVICE=pjrt:{self.argument}: no such plugin ({error})"
                    ) from None
            return self._client

    def memory(self, nbytes: int) -> PjrtMemory:
        return PjrtMemory(nbytes)

    def compile_program(self, module: Module, observe: Observe | None = None) -> PjrtProgram:
        """Compile with the plugin. Raises PjrtError with its message, WriteError for what StableHLO
        cannot say."""
        return PjrtProgram(module, self.client(), observe)


backend = PjrtBackend
