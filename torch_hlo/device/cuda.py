"""NVIDIA GPUs through the driver's own library (TORCH_HLO_DEVICE=cuda or cuda:NUMBER): libcuda by ctypes, nothing compiled, no toolkit.

The driver translates PTX for the device it has. The primary context is the one that PyTorch uses in the same process. Launches are
asynchronous on one stream; a program without host reads becomes a CUDA graph when it is run again, whose nodes get new arguments when
buffers have moved. cuda driver API: https://docs.nvidia.com/cuda/cuda-driver-api
"""
from __future__ import annotations

import atexit
import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache

from torch_hlo import config
from torch_hlo.compiler.codegen.gpu.program import Kernel
from torch_hlo.compiler.codegen.gpu.target import nvptx_target
from torch_hlo.device import gpu
from torch_hlo.device.gpu import DeviceMemory, DevicePool, DriverError, GpuProgram
from torch_hlo.device.runtime import Buffer, Observe
from torch_hlo.hlo.ir import Module

_P, _SIZE, _INT, _UINT, _U64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint, ctypes.c_uint64
OLDEST_DRIVER = 12000  # CUDA 12.0: graphs with updated nodes, PTX 7.8 and later
OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE, INVALID_DEVICE, NO_BINARY, INVALID_PTX = 2, 3, 100, 101, 209, 218
_MAJOR, _MINOR = 75, 76  # CUdevice_attribute: compute capability
_LOG, _LOG_SIZE = 5, 6  # CUjit_option: error log buffer and its size
_THREAD_LOCAL_CAPTURE, _NON_BLOCKING = 1, 1
# name -> argument types; every function gives a CUresult
_FUNCTIONS = {
    "cuInit": (_UINT,), "cuDriverGetVersion": (_P,), "cuDeviceGetCount": (_P,), "cuDeviceGet": (_P, _INT), "cuDeviceGetName": (_P, _INT, _INT),
    "cuDeviceGetAttribute": (_P, _INT, _INT), "cuDevicePrimaryCtxRetain": (_P, _INT), "cuCtxSetCurrent": (_P,), "cuGetErrorString": (_INT, _P),
    "cuStreamCreate": (_P, _UINT), "cuStreamSynchronize": (_P,), "cuMemAllocAsync": (_P, _SIZE, _P), "cuMemFreeAsync": (_U64, _P),
    "cuMemGetInfo_v2": (_P, _P), "cuMemcpyHtoDAsync_v2": (_U64, _P, _SIZE, _P), "cuMemcpyDtoHAsync_v2": (_P, _U64, _SIZE, _P),
    "cuMemcpyDtoDAsync_v2": (_U64, _U64, _SIZE, _P), "cuMemsetD32Async": (_U64, _UINT, _SIZE, _P), "cuModuleLoadDataEx": (_P, _P, _UINT, _P, _P),
    "cuModuleGetFunction": (_P, _P, ctypes.c_char_p), "cuLaunchKernel": (_P, *(_UINT,) * 7, _P, _P, _P),
    "cuStreamBeginCapture_v2": (_P, _INT), "cuStreamEndCapture": (_P, _P), "cuGraphInstantiateWithFlags": (_P, _P, ctypes.c_ulonglong),
    "cuGraphExecUpdate_v2": (_P, _P, _P), "cuGraphLaunch": (_P, _P),
    "cuGraphDestroy": (_P,), "cuGraphExecDestroy": (_P,),
}  # fmt: skip


class LaunchError(DriverError):
    """A kernel could not be started, or failed while running; names its HLO instruction."""


class Cuda:
    """A driver (see gpu.Driver) for one device. `library`: the name of libcuda, or an object with its functions (tests)."""

    def __init__(self, number: int = 0, library: str | object = "libcuda.so.1") -> None:
        try:
            self._cu = ctypes.CDLL(library) if isinstance(library, str) else library
        except OSError as error:
            raise DriverError(f"TORCH_HLO_DEVICE=cuda: no NVIDIA driver on this machine ({error}). Install the driver, or choose another "
                              "TORCH_HLO_DEVICE") from None
        for name, arguments in _FUNCTIONS.items():
            try:
                function = getattr(self._cu, name)
            except AttributeError:
                raise DriverError(f"the NVIDIA driver has no {name}: it is older than CUDA {OLDEST_DRIVER // 1000}.0; update it") from None
            function.argtypes, function.restype = arguments, _INT
        self._last: Kernel | None = None  # launched last: what an asynchronous failure most likely is about
        self._check("cuInit", 0)
        version = self._get("cuDriverGetVersion")
        if version < OLDEST_DRIVER:
            raise DriverError(f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}; {OLDEST_DRIVER // 1000}.0 or later is needed: update it")
        count = self._get("cuDeviceGetCount")
        if number >= count:
            raise DriverError(f"TORCH_HLO_DEVICE=cuda:{number}: the driver sees {count} device{'s' * (count != 1)}, numbered from 0")
        self.device = self._get("cuDeviceGet", number)
        name = ctypes.create_string_buffer(256)
        self._check("cuDeviceGetName", ctypes.addressof(name), 256, self.device)
        self.name = name.value.decode()
        self.capability = tuple(self._get("cuDeviceGetAttribute", what, self.device) for what in (_MAJOR, _MINOR))
        try:
            self.target = nvptx_target(*self.capability)
        except ValueError as error:
            raise DriverError(f"{self.name}: {error}") from None
        self._context = self._made("cuDevicePrimaryCtxRetain", self.device)
        self._thread_context()
        self.stream = self._made("cuStreamCreate", _NON_BLOCKING)
        self._modules: list[_P] = []
        # While one thread captures, others must not use the stream, and what it frees itself must not become part of the graph.
        self._capture = threading.RLock()
        self._capturing = False
        self._freed_meanwhile: list[int] = []

    # -- calls ----------------------------------------------------------------------------------------------------
    def _check(self, function: str, *arguments, what: str = "") -> None:
        code = getattr(self._cu, function)(*arguments)
        if code:
            raise self._error(function, code, what)

    def _error(self, function: str, code: int, what: str) -> BaseException:
        text = ctypes.c_char_p()
        self._cu.cuGetErrorString(code, ctypes.addressof(text))
        message = f"{text.value.decode() if text.value else 'unknown error'} ({function} gave {code})"
        if code == OUT_OF_MEMORY:
            free, total = _SIZE(), _SIZE()
            self._cu.cuMemGetInfo_v2(ctypes.addressof(free), ctypes.addressof(total))
            return MemoryError(f"{what or function}: {message}; {free.value >> 20} of {total.value >> 20} MiB are free")
        return DriverError(f"{what or 'CUDA'}: {message}")

    def _get(self, function: str, *arguments) -> int:
        value = _INT()
        self._check(function, ctypes.addressof(value), *arguments)
        return value.value

    def _made(self, function: str, *arguments, what: str = "") -> _P:
        value = _P()
        self._check(function, ctypes.addressof(value), *arguments, what=what)
        return value

    def _thread_context(self) -> None:
        """The context belongs to a thread; programs run on the executor's, arrays are read on any."""
        self._check("cuCtxSetCurrent", self._context)

    # -- the protocol ---------------------------------------------------------------------------------------------
    def allocate(self, nbytes: int) -> int:
        value = _U64()
        with self._capture:
            self._thread_context()
            self._check("cuMemAllocAsync", ctypes.addressof(value), max(nbytes, 64), self.stream, what=f"{self.name}: {nbytes} bytes")
        return value.value

    def free(self, address: int) -> None:
        with self._capture:
            if self._capturing:
                self._freed_meanwhile.append(address)
                return
            self._thread_context()
            self._check("cuMemFreeAsync", address, self.stream)

    def upload(self, target: int, source: int, nbytes: int) -> None:
        if nbytes:
            with self._capture:
                self._thread_context()
                # from pageable memory it returns when the driver has taken its copy
                self._check("cuMemcpyHtoDAsync_v2", target, source, nbytes, self.stream)

    def download(self, target: int, source: int, nbytes: int) -> None:
        with self._capture:
            if nbytes:
                self._thread_context()
                self._check("cuMemcpyDtoHAsync_v2", target, source, nbytes, self.stream)
            self.synchronize()

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._check("cuMemcpyDtoDAsync_v2", target, source, nbytes, self.stream)

    def fill(self, target: int, value: int, count: int) -> None:
        self._check("cuMemsetD32Async", target, value & 0xFFFFFFFF, count, self.stream)

    def load(self, image: bytes, kernels: Sequence[Kernel]) -> list[_P]:
        self._thread_context()
        log = ctypes.create_string_buffer(8192)
        options, values = (_INT * 2)(_LOG, _LOG_SIZE), (_P * 2)(ctypes.addressof(log), len(log))
        text = ctypes.create_string_buffer(image)  # ends with a zero
        module = _P()
        code = self._cu.cuModuleLoadDataEx(ctypes.addressof(module), ctypes.addressof(text), 2, ctypes.addressof(options), ctypes.addressof(values))
        if code in (NO_BINARY, INVALID_PTX):
            raise DriverError(f"{self.name} does not take code for {self.target.name}: {log.value.decode(errors='replace') or 'wrong architecture'}")
        if code:
            raise self._error("cuModuleLoadDataEx", code, f"kernels {', '.join(k.name for k in kernels)}")
        self._modules.append(module)
        return [self._made("cuModuleGetFunction", module, k.name.encode(), what=k.name) for k in kernels]

    def launch(self, handle: _P, kernel: Kernel, groups: int, words: int) -> None:
        # the driver wants an array of pointers to the arguments, all of which are words here
        pointers = (_P * len(kernel.arguments))(*range(words, words + 8 * len(kernel.arguments), 8))
        self._last = kernel
        code = self._cu.cuLaunchKernel(handle, groups, 1, 1, kernel.threads, 1, 1, 0, self.stream, pointers, None)
        if code:
            error = self._error("cuLaunchKernel", code, f"kernel {kernel.name} of {kernel.label}")
            raise error if isinstance(error, MemoryError) else LaunchError(str(error))

    def synchronize(self) -> None:
        code = self._cu.cuStreamSynchronize(self.stream)
        if code:
            last = f"; the last kernel started was {self._last.name} of {self._last.label}" if self._last else ""
            raise LaunchError(f"{self._error('cuStreamSynchronize', code, self.name)}{last}")

    # -- graphs ---------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def captured(self) -> Iterator[_P]:
        """Yields what becomes, at the end of the block, the graph of what was enqueued in it, none of which has run."""
        graph = _P()
        with self._capture:
            self._check("cuStreamBeginCapture_v2", self.stream, _THREAD_LOCAL_CAPTURE)
            self._capturing = True
            try:
                yield graph
            finally:
                self._capturing = False
                self._check("cuStreamEndCapture", self.stream, ctypes.addressof(graph))
                while self._freed_meanwhile:
                    self.free(self._freed_meanwhile.pop())

    def instantiate(self, graph: _P) -> _P:
        return self._made("cuGraphInstantiateWithFlags", graph, 0)

    def update(self, executable: _P, graph: _P) -> bool:
        """Give an executable graph the arguments of another of the same form. False when the driver cannot."""
        result = (_U64 * 4)()
        return self._cu.cuGraphExecUpdate_v2(executable, graph, ctypes.addressof(result)) == 0

    def run_graph(self, executable: _P) -> None:
        self._check("cuGraphLaunch", executable, self.stream)

    def drop_graph(self, graph: _P | None, executable: _P | None = None) -> None:
        if graph is not None:
            self._check("cuGraphDestroy", graph)
        if executable is not None:
            self._check("cuGraphExecDestroy", executable)


class CudaProgram(GpuProgram):
    """A program whose second run captures its launches into a graph. Later runs replay it; when an address differs, the launches are
    captured again (on the host, nothing runs) and the graph gets their arguments."""

    def __init__(self, executable, pool: DevicePool) -> None:
        super().__init__(executable, pool)
        self._runs = 0
        self._graph: _P | None = None
        self._words: tuple[int, ...] = ()

    def run(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        self.driver._thread_context()
        super().run(inputs, outputs)

    def _call(self, words: Sequence[int], sizes: Sequence[int]) -> None:
        self._runs += 1
        if self._runs == 1 or self.executable.fetches or not self.executable.kernels:
            return super()._call(words, sizes)
        driver = self.driver
        if self._graph is None or tuple(words) != self._words:
            with driver.captured() as graph:
                super()._call(words, sizes)
            if self._error is not None:
                return driver.drop_graph(graph)
            if self._graph is None or not driver.update(self._graph, graph):
                driver.drop_graph(None, self._graph)
                self._graph = driver.instantiate(graph)
            driver.drop_graph(graph)
            self._words = tuple(words)
        try:
            driver.run_graph(self._graph)
        except DriverError as error:
            self._error = LaunchError(f"{self.name}: {error}")


@lru_cache
def _pool(number: int, library: str = "libcuda.so.1") -> DevicePool:
    driver = Cuda(number, library)
    atexit.register(driver.synchronize)
    return DevicePool(driver)


def pool() -> DevicePool:
    """The device that TORCH_HLO_DEVICE names; one per process. Raises DriverError."""
    number = config.get("DEVICE").partition(":")[2] or "0"
    if not number.isdigit():
        raise ValueError(f"TORCH_HLO_DEVICE=cuda:{number}: the device's number is wanted, such as cuda:0")
    return _pool(int(number))


class Memory(DeviceMemory):
    __slots__ = ()
    pool = staticmethod(pool)


def compile_program(module: Module, observe: Observe | None = None) -> CudaProgram:
    return gpu.compile_program(pool(), module, observe, CudaProgram)
