"""A libcuda without a GPU: memory is host memory, copies and fills happen, launches are recorded. Functions go through the C calling convention.

    stub = StubCuda()                   # stub.launches: [(function name, grid, threads, argument words)]
    stub.fail["cuLaunchKernel"] = 700   # what a function shall give
Inside a stream capture calls are kept; cuGraphLaunch replays them.
"""
from __future__ import annotations

import ctypes

import numpy as np

from torch_hlo.device import cuda

ERRORS = {2: b"out of memory", 100: b"no CUDA-capable device is detected", 218: b"a PTX JIT compilation failed", 700: b"an illegal memory access was encountered"}


class StubCuda:
    def __init__(self, version: int = 13000, devices: int = 1, capability: tuple[int, int] = (9, 0), memory: int = 1 << 30) -> None:
        self.version, self.devices, self.capability, self.memory = version, devices, capability, memory
        self.fail: dict[str, int] = {}
        self.launches: list[tuple[str, int, int, list[int]]] = []
        self.calls: list[str] = []
        self.blocks: dict[int, np.ndarray] = {}
        self.capturing: list | None = None
        self.graphs: dict[int, list] = {}
        self.images: list[bytes] = []
        self._names: dict[int, str] = {}
        self._next = 1000
        for name, arguments in cuda._FUNCTIONS.items():
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(self._function(name)))

    def _function(self, name: str):
        method = getattr(self, f"_{name}")

        def call(*arguments):
            self.calls.append(name)
            return self.fail.get(name) or method(*arguments) or 0

        return call

    def _number(self) -> int:
        self._next += 1
        return self._next

    @staticmethod
    def _put(address: int, value: int, kind=ctypes.c_uint64) -> None:
        kind.from_address(address).value = value

    def _enqueue(self, action) -> None:
        if self.capturing is None:
            action()
        else:
            self.capturing.append(action)

    def _cuInit(self, flags): ...
    def _cuDriverGetVersion(self, out): self._put(out, self.version, ctypes.c_int)
    def _cuDeviceGetCount(self, out): self._put(out, self.devices, ctypes.c_int)
    def _cuDeviceGet(self, out, number): self._put(out, number, ctypes.c_int)
    def _cuDeviceGetName(self, out, size, device): ctypes.memmove(out, b"Stub\0", 5)
    def _cuDeviceGetAttribute(self, out, what, device): self._put(out, self.capability[what - 75], ctypes.c_int)
    def _cuDevicePrimaryCtxRetain(self, out, device): self._put(out, 7)
    def _cuCtxSetCurrent(self, context): return 0 if context == 7 else 201
    def _cuStreamCreate(self, out, flags): self._put(out, 8)
    def _cuStreamSynchronize(self, stream): return 900 if self.capturing is not None else 0
    def _cuGraphDestroy(self, graph): del self.graphs[graph]
    def _cuGraphExecDestroy(self, graph): del self.graphs[graph]

    def _cuGetErrorString(self, code, out):
        self._text = ctypes.c_char_p(ERRORS.get(code, b"error"))
        self._put(out, ctypes.cast(self._text, ctypes.c_void_p).value)

    def _cuMemFreeAsync(self, address, stream):
        if self.capturing is not None:
            return 900
        del self.blocks[address]

    def _cuMemAllocAsync(self, out, size, stream):
        if self.capturing is not None:
            return 900
        if sum(b.size for b in self.blocks.values()) + size > self.memory:
            return 2
        block = np.empty(size + 256, np.uint8)
        address = block.ctypes.data + -block.ctypes.data % 256
        self.blocks[address] = block
        self._put(out, address)

    def _cuMemGetInfo_v2(self, free, total):
        self._put(free, self.memory - sum(b.size for b in self.blocks.values()))
        self._put(total, self.memory)

    def _cuMemcpyHtoDAsync_v2(self, target, source, size, stream):
        data = ctypes.string_at(source, size)
        self._enqueue(lambda: ctypes.memmove(target, data, size) and None)

    def _cuMemcpyDtoHAsync_v2(self, target, source, size, stream): self._enqueue(lambda: ctypes.memmove(target, source, size) and None)
    def _cuMemcpyDtoDAsync_v2(self, target, source, size, stream): self._enqueue(lambda: ctypes.memmove(target, source, size) and None)

    def _cuMemsetD32Async(self, target, value, count, stream):
        self._enqueue(lambda: ctypes.memmove(target, np.full(count, value, np.uint32).tobytes(), 4 * count) and None)

    def _cuModuleLoadDataEx(self, out, image, count, options, values):
        self.images.append(ctypes.string_at(image))
        self._put(out, self._number())

    def _cuModuleGetFunction(self, out, module, name):
        if f".entry {name.decode()}(".encode() not in self.images[-1]:
            return 500
        number = self._number()
        self._names[number] = name.decode()
        self._put(out, number)

    def _cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, pointers, extra):
        assert (gy, gz, by, bz, shared, stream) == (1, 1, 1, 1, 0, 8)
        name = self._names[function]
        start = self.images[-1].decode().split(f".entry {name}(", 1)[1].split(")", 1)[0]
        addresses = (ctypes.c_void_p * start.count(".param")).from_address(pointers)
        words = [ctypes.c_uint64.from_address(a).value for a in addresses]
        self._enqueue(lambda: self.launches.append((name, gx, bx, words)))

    def _cuStreamBeginCapture_v2(self, stream, mode): self.capturing = []

    def _cuStreamEndCapture(self, stream, out):
        number = self._number()
        self.graphs[number], self.capturing = self.capturing, None
        self._put(out, number)

    def _cuGraphInstantiateWithFlags(self, out, graph, flags):
        number = self._number()
        self.graphs[number] = self.graphs[graph]
        self._put(out, number)

    def _cuGraphExecUpdate_v2(self, executable, graph, result): self.graphs[executable] = self.graphs[graph]

    def _cuGraphLaunch(self, executable, stream):
        for action in self.graphs[executable]:
            action()
