"""Any PJRT plugin as the device behind "hlo": `TORCH_HLO_DEVICE=pjrt:/path/to/plugin.so`.

Programs are handed over as StableHLO text. Results stay on the plugin's device until somebody looks at them; a program that updates
parameters in place donates their buffers.
"""
from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import numpy as np

from torch_hlo import config
from torch_hlo.compiler.passes.legalize import legalize
from torch_hlo.device import runtime
from torch_hlo.device.pjrt_api import BUFFER_TYPES, COMPILE_OPTIONS, Api, PjrtError, structure, words
from torch_hlo.device.runtime import Buffer, Observe
from torch_hlo.hlo.evaluate import specialize
from torch_hlo.hlo.ir import Module, outputs, postorder
from torch_hlo.hlo.shape import DTYPES, Shape
from torch_hlo.hlo.stablehlo import stablehlo_text

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
            client=self.client, data=address, type=BUFFER_TYPES[shape.dtype], dims=ctypes.addressof(dims), num_dims=shape.rank,
            host_buffer_semantics=_DURING_CALL, device=self.device,
        )  # fmt: skip
        self.api.wait(made.done_with_host_buffer)
        return DeviceArray(self, made.buffer)

    def compile(self, text: str) -> int:
        """A PJRT_LoadedExecutable of StableHLO text."""
        options = ctypes.create_string_buffer(COMPILE_OPTIONS)
        program, keep = self.api.program(text)
        made = self.api.Client_Compile(client=self.client, program=ctypes.addressof(program), compile_options=ctypes.addressof(options),
                                       compile_options_size=len(COMPILE_OPTIONS))  # fmt: skip
        del keep
        return made.executable


_clients: dict[str, Client] = {}
_lock = threading.Lock()


def client() -> Client:
    """The client of the plugin that TORCH_HLO_DEVICE names; one per process. Raises PjrtError."""
    path = config.get("DEVICE").partition(":")[2]
    with _lock:
        if path not in _clients:
            try:
                _clients[path] = Client(path)
            except OSError as error:
                raise PjrtError(f"TORCH_HLO_DEVICE=pjrt:{path}: no such plugin ({error})") from None
        return _clients[path]


class DeviceArray:
    """A PJRT_Buffer, destroyed with this object."""

    __slots__ = ("client", "buffer")

    def __init__(self, client: Client, buffer: int) -> None:
        self.client, self.buffer = client, buffer

    def __del__(self) -> None:
        self.client.api.Buffer_Destroy(buffer=self.buffer)

    def download(self, address: int, nbytes: int) -> None:
        """Copy to the host; blocks until the array has been computed."""
        copy = self.client.api.Buffer_ToHostBuffer(src=self.buffer, dst=address, dst_size=nbytes)
        self.client.api.wait(copy.event)


class Memory(runtime.Memory):
    """Contents that are on the device or on the host, whoever wrote last. Looking at `array` or `address` brings them to the host."""

    __slots__ = ("nbytes", "device", "_host", "_lock")

    def __init__(self, nbytes: int) -> None:
        self.readers = self.size = 0
        self.nbytes = nbytes
        self.device: DeviceArray | None = None
        self._host: runtime.Memory | None = None
        self._lock = threading.Lock()

    def host(self) -> runtime.Memory:
        with self._lock:
            if self._host is None:
                self._host = runtime.Memory(self.nbytes)
            if self.device is not None:
                self.device.download(self._host.address, self.nbytes)
                self.device = None  # the host may write now
            return self._host

    def give(self, array: DeviceArray) -> None:
        """The device has new contents; the host's are forgotten."""
        with self._lock:
            self.device, self._host = array, None

    @property
    def array(self) -> np.ndarray:
        return self.host().array

    @property
    def address(self) -> int:
        return self.host().address


class PjrtProgram:
    """A module compiled by the plugin, once per set of sizes; see runtime.Program."""

    def __init__(self, module: Module, observe: Observe | None) -> None:
        self.name, self.aliases = module.name, module.aliases
        self.module, self.client, self._observe = module, client(), observe
        self._executables: dict[tuple[int, ...], int] = {}
        _check(module)
        if not module.symbols:
            self._executable(())

    def _executable(self, sizes: tuple[int, ...]) -> int:
        found = self._executables.get(sizes)
        if found is None:
            m = self.module
            if sizes:
                values = {name: n for (name, _, _), n in zip(m.symbols, sizes, strict=True)}
                m = Module(m.name, specialize(m.entry, values), m.aliases)
            text = stablehlo_text(legalize.run(m))
            if self._observe is not None:
                self._observe("stablehlo", text)
            found = self._executables[sizes] = self.client.compile(text)
        return found

    def __del__(self) -> None:
        for executable in getattr(self, "_executables", {}).values():
            self.client.api.LoadedExecutable_Destroy(executable=executable)

    def run(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        api = self.client.api
        executable = self._executable(tuple(inputs[i].shape.dims[d] for _, i, d in self.module.symbols))
        arrays = [self._array(b) for b in inputs]
        donated = {i for _, i in self.aliases}
        kept = (ctypes.c_int64 * max(len(inputs), 1))(*(i for i in range(len(inputs)) if i not in donated))
        options = structure("ExecuteOptions", non_donatable=ctypes.addressof(kept), num_non_donatable=len(inputs) - len(donated))
        arguments, results = words([a.buffer for a in arrays]), words([None] * len(outputs))
        argument_list, result_list, events = words([ctypes.addressof(arguments)]), words([ctypes.addressof(results)]), words([None])
        api.LoadedExecutable_Execute(
            executable=executable, options=ctypes.addressof(options), argument_lists=ctypes.addressof(argument_list), num_devices=1,
            num_args=len(inputs), output_lists=ctypes.addressof(result_list), device_complete_events=ctypes.addressof(events),
        )  # fmt: skip
        made = [DeviceArray(self.client, results[i]) for i in range(len(outputs))]
        api.wait(events[0])
        for buffer, array in zip(outputs, made, strict=True):
            if isinstance(buffer.memory, Memory):
                buffer.memory.give(array)
            elif buffer.nbytes:
                array.download(buffer.address, buffer.nbytes)

    def _array(self, buffer: Buffer) -> DeviceArray:
        """The input on the device, where it stays."""
        memory = buffer.memory
        if not isinstance(memory, Memory):
            return self.client.upload(buffer.shape, buffer.address)
        if memory.device is None:
            memory.give(self.client.upload(buffer.shape, memory.address))
        return memory.device


def _check(module: Module) -> None:
    """Raises PjrtError naming what a plugin cannot take."""
    for x in (*module.entry.params, *outputs(module)):
        if x.shape.dtype not in BUFFER_TYPES or DTYPES[x.shape.dtype].bits < 8:
            raise PjrtError(f"{module.name}: {x.shape} cannot be an input or result of a PJRT program; convert it inside the program")
    for x in postorder((module.entry.root,)):
        if x.op == "custom-call" and x["custom_call_target"] == "torch_op":
            name = (x.get("opaque") or "").partition('"op": "')[2].partition('"')[0]
            raise PjrtError(f"{name} runs in PyTorch on the host, which a PJRT plugin cannot call: compute it on CPU tensors, or register a lowering")


def compile_program(module: Module, observe: Observe | None = None) -> PjrtProgram:
    """Compile with the plugin. Raises PjrtError with its message, WriteError for what StableHLO cannot say."""
    return PjrtProgram(module, observe)
