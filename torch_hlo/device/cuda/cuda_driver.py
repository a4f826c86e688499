"""NVIDIA GPUs through the driver's own library: libcuda by ctypes, nothing compiled, no toolkit.

The driver translates PTX for the device it has. The primary context is the one that PyTorch uses in
the same process. Work is asynchronous: kernels in order on one stream (`main`), uploads from
page-locked memory on another, so that they overlap with programs under way; events keep the two in
order (`send`). Programs and their graphs are in cuda_program.py. cuda driver API:
https://docs.nvidia.com/cuda/cuda-driver-api"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from torch_hlo.compiler.gpu.gpu_program import Kernel, TensorMap
from torch_hlo.compiler.gpu.target import nvptx_target

from ..gpu.driver import (
    MAP_PROMOTION,
    MAP_SWIZZLE,
    MAP_TYPES,
    Driver,
    DriverError,
    tiled,
)
from ..memory import Memory

_P, _SIZE, _INT, _UINT, _U64 = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_uint64,
)
OLDEST_DRIVER = 12040  # CUDA 12.4: PTX 8.4, which knows the f8 matrix units
_OLDEST = f"{OLDEST_DRIVER // 1000}.{OLDEST_DRIVER % 1000 // 10}"
OUT_OF_MEMORY = 2
NO_BINARY = 209
INVALID_PTX = 218
NOT_READY = 600
# after one of these every call fails: the context is gone
_LOST = frozenset((214, 700, 702, 709, 710, *range(714, 721)))
_MAJOR = 75  # CUdevice_attribute: compute capability
_MINOR = 76
_LOG = 5  # CUjit_option: error log buffer and its size
_LOG_SIZE = 6
_THREAD_LOCAL_CAPTURE = 1
_NON_BLOCKING = 1
_NO_TIMING = 2
_RELEASE_THRESHOLD = 4  # CUmemPool_attribute: bytes that the driver keeps when nobody waits
# CUfunction_attribute: the largest amount of shared memory that a launch may give
_DYNAMIC_SHARED = 8
_STATIC_SHARED = 48 << 10  # bytes for which no permission is needed
MAPS = 4096  # tensor maps that are remembered
MARKS = 64  # points in the order of the main stream that are remembered
# bytes up to which host memory is page-locked: locking pages costs more than it gains for arrays
# that travel once
PINNED = 32 << 20
# name -> argument types; every function gives a CUresult
_FUNCTIONS = {
    "cuInit": (_UINT,),
    "cuDriverGetVersion": (_P,),
    "cuDeviceGetCount": (_P,),
    "cuDeviceGet": (_P, _INT),
    "cuDeviceGetName": (_P, _INT, _INT),
    "cuDeviceGetAttribute": (_P, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_P, _INT),
    "cuCtxPushCurrent_v2": (_P,),
    "cuCtxPopCurrent_v2": (_P,),
    "cuGetErrorString": (_INT, _P),
    "cuStreamCreate": (_P, _UINT),
    "cuStreamSynchronize": (_P,),
    "cuStreamWaitEvent": (_P, _P, _UINT),
    "cuEventCreate": (_P, _UINT),
    "cuEventRecord": (_P, _P),
    "cuEventQuery": (_P,),
    "cuEventElapsedTime": (_P, _P, _P),
    "cuDeviceGetDefaultMemPool": (_P, _INT),
    "cuMemPoolSetAttribute": (_P, _INT, _P),
    "cuMemPoolTrimTo": (_P, _SIZE),
    "cuMemAllocAsync": (_P, _SIZE, _P),
    "cuMemFreeAsync": (_U64, _P),
    "cuMemHostAlloc": (_P, _SIZE, _UINT),
    "cuMemFreeHost": (_P,),
    "cuMemGetInfo_v2": (_P, _P),
    "cuMemcpyHtoDAsync_v2": (_U64, _P, _SIZE, _P),
    "cuMemcpyDtoHAsync_v2": (_P, _U64, _SIZE, _P),
    "cuMemcpyDtoDAsync_v2": (_U64, _U64, _SIZE, _P),
    "cuMemsetD32Async": (_U64, _UINT, _SIZE, _P),
    "cuModuleLoadDataEx": (_P, _P, _UINT, _P, _P),
    "cuModuleGetFunction": (_P, _P, ctypes.c_char_p),
    "cuFuncSetAttribute": (_P, _INT, _INT),
    "cuLaunchKernel": (_P, *(_UINT,) * 7, _P, _P, _P),
    "cuTensorMapEncodeTiled": (
        _P,
        _INT,
        _UINT,
        _U64,
        _P,
        _P,
        _P,
        _P,
        _INT,
        _INT,
        _INT,
        _INT,
    ),
    "cuStreamBeginCapture_v2": (_P, _INT),
    "cuStreamEndCapture": (_P, _P),
    "cuGraphInstantiateWithFlags": (_P, _P, ctypes.c_ulonglong),
    "cuGraphExecUpdate_v2": (_P, _P, _P),
    "cuGraphLaunch": (_P, _P),
    "cuGraphDestroy": (_P,),
    "cuGraphExecDestroy": (_P,),
}


class LaunchError(DriverError):
    """A kernel could not be started, or failed while running; names its HLO instruction."""


class Cuda(Driver):
    """A driver for one device. `library`: the name of libcuda, or an object with
    its functions (tests).

    `with driver:` makes its context the thread's and keeps other threads out; every method does so
    itself. `stream` is where kernels, copies and fills go: `main`, unless `on` or a graph's
    branches say otherwise."""

    def __init__(self, number: int = 0, library: str | object = "libcuda.so.1") -> None:
        self._cu = _functions(library)
        # Of everything below, of the context's being the thread's, and of the pools of this device
        # (CudaPool.lock is this driver). A reentrant one: programs free blocks while they are
        # started. Nothing of ours is taken under it but the CPU's pool.
        self._lock = threading.RLock()
        self._depth = 0
        # tensor maps by what they are made of: address and memory
        self._maps: dict[tuple[int, ...], tuple[int, object]] = {}
        # launched last: what an asynchronous failure most likely is about
        self._last: Kernel | None = None
        self._check("cuInit", 0)
        version = self._get("cuDriverGetVersion")
        if version < OLDEST_DRIVER:
            raise DriverError(
                f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10};"
                f" {_OLDEST} or later is needed: update it"
            )
        count = self._get("cuDeviceGetCount")
        if number >= count:
            raise DriverError(
                f"TORCH_HLO_DEVICE=cuda:{number}: the driver sees {count}"
                f" device{'s' * (count != 1)}, numbered from 0"
            )
        self.number = number
        self.version = version
        self.device = self._get("cuDeviceGet", number)
        name = ctypes.create_string_buffer(256)
        self._check("cuDeviceGetName", ctypes.addressof(name), 256, self.device)
        self.name = name.value.decode()
        self.capability = tuple(
            self._get("cuDeviceGetAttribute", what, self.device) for what in (_MAJOR, _MINOR)
        )
        try:
            self.target = nvptx_target(*self.capability)
        except ValueError as error:
            raise DriverError(f"{self.name}: {error}") from None
        self._context = self._made("cuDevicePrimaryCtxRetain", self.device)
        self._modules: list[_P] = []
        self._events: list[_P] = []  # that nobody uses
        self._marks: list[_P] = []  # a ring
        # number of the last mark, and whether something was enqueued since
        self.epoch = 0
        self._busy = False
        # uploads under way, and the host memory that they read
        self._sending: deque[tuple[_P, object]] = deque()
        self._branches: list[_P] = []  # streams of a graph's branches; the first is `main`
        self._forked: dict[int, _P] | None = None  # while capturing: branches in use
        # while capturing: what the collector freed must not become part of the graph
        self._freed_meanwhile: list[int] = []
        with self:
            self.main = self.stream = self._made("cuStreamCreate", _NON_BLOCKING)
            self.uploads = self._made("cuStreamCreate", _NON_BLOCKING)
            self._keep_memory()

    def _keep_memory(self) -> None:
        """The driver's pool gives nothing back to the system while somebody waits; `reclaim`
        does."""
        self._memory = self._made("cuDeviceGetDefaultMemPool", self.device)
        everything = _U64(2**64 - 1)
        self._check(
            "cuMemPoolSetAttribute",
            self._memory,
            _RELEASE_THRESHOLD,
            ctypes.addressof(everything),
        )

    # -- calls
    def __enter__(self) -> Cuda:
        """The context belongs to a thread; programs run on the executor's, arrays are read on
        any."""
        self._lock.acquire()
        if self._depth == 0 and (code := self._cu.cuCtxPushCurrent_v2(self._context)):
            self._lock.release()
            raise self._error("cuCtxPushCurrent_v2", code, self.name)
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            context = _P()
            self._cu.cuCtxPopCurrent_v2(ctypes.addressof(context))  # back to what PyTorch had there
        self._lock.release()

    def _check(self, function: str, *arguments: object, what: str = "") -> None:
        code = getattr(self._cu, function)(*arguments)
        if code:
            raise self._error(function, code, what)

    def _error(self, function: str, code: int, what: str) -> BaseException:
        text = ctypes.c_char_p()
        self._cu.cuGetErrorString(code, ctypes.addressof(text))
        message = (
            f"{text.value.decode() if text.value else 'unknown error'} ({function} gave {code})"
        )
        if code == OUT_OF_MEMORY:
            free = _SIZE()
            total = _SIZE()
            self._cu.cuMemGetInfo_v2(ctypes.addressof(free), ctypes.addressof(total))
            return MemoryError(
                f"{what or function}: {message}; {free.value >> 20} of {total.value >> 20} MiB are"
                " free"
            )
        if code in _LOST:
            message += "; a CUDA context does not recover from this: start the process anew"
        return DriverError(f"{what or 'CUDA'}: {message}")

    def _get(self, function: str, *arguments: object) -> int:
        value = _INT()
        self._check(function, ctypes.addressof(value), *arguments)
        return value.value

    def _made(self, function: str, *arguments: object, what: str = "") -> _P:
        value = _P()
        self._check(function, ctypes.addressof(value), *arguments, what=what)
        return value

    # -- memory
    def allocate(self, nbytes: int) -> int:
        value = _U64()
        with self:
            self._check(
                "cuMemAllocAsync",
                ctypes.addressof(value),
                max(nbytes, 64),
                self.main,
                what=f"{self.name}: {nbytes} bytes",
            )
            self._busy = True
        return value.value

    def free(self, address: int) -> None:
        with self:
            if self._forked is not None:
                self._freed_meanwhile.append(address)
            else:
                self._check("cuMemFreeAsync", address, self.main)

    def reclaim(self) -> None:
        """Make room: what unreachable objects and PyTorch's cache hold, and what the driver has
        kept."""
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        with self:
            self.synchronize()
            self._check("cuMemPoolTrimTo", self._memory, 0)

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        free = _SIZE()
        total = _SIZE()
        with self:
            self._check("cuMemGetInfo_v2", ctypes.addressof(free), ctypes.addressof(total))
        return free.value, total.value

    def lock_pages(self, nbytes: int) -> np.ndarray:
        """Page-locked host memory, which the device reads and writes by itself. Raises
        MemoryError."""
        with self:
            address = self._made(
                "cuMemHostAlloc",
                nbytes,
                0,
                what=f"{nbytes} bytes of page-locked memory",
            ).value
        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)

    def unlock_pages(self, address: int) -> None:
        with self:
            self._check("cuMemFreeHost", address)

    # -- transfers
    def upload(self, target: int, source: int, nbytes: int) -> None:
        if nbytes:
            with self:
                # from pageable memory it returns when the driver has taken its copy
                self._check("cuMemcpyHtoDAsync_v2", target, source, nbytes, self.stream)
                self._busy = True

    def send(self, target: int, epoch: int | None, source: Memory, nbytes: int) -> None:
        """Start to copy page-locked memory, which is kept and must not be written to meanwhile, to
        a block that nobody uses since the mark `epoch` (None: since now). Kernels enqueued from now
        on wait for it."""
        with self:
            if epoch is None or epoch > self.epoch:
                self.mark()
                epoch = self.epoch
            oldest = max(self.epoch - MARKS + 1, 1)
            if epoch:
                self._check(
                    "cuStreamWaitEvent",
                    self.uploads,
                    self._marks[max(epoch, oldest) % MARKS],
                    0,
                )
            self._check("cuMemcpyHtoDAsync_v2", target, source.address, nbytes, self.uploads)
            event = self._event()
            self._check("cuEventRecord", event, self.uploads)
            self._check("cuStreamWaitEvent", self.main, event, 0)
            self._busy = True
            self._sending.append((event, source))
            while self._cu.cuEventQuery(self._sending[0][0]) == 0:
                event, source = self._sending.popleft()
                self._events.append(event)
                if not self._sending:
                    break

    def download(self, target: int, source: int, nbytes: int) -> None:
        with self:
            if nbytes:
                self._check("cuMemcpyDtoHAsync_v2", target, source, nbytes, self.stream)
            self.synchronize()

    def copy(self, target: int, source: int, nbytes: int) -> None:
        with self:
            self._check("cuMemcpyDtoDAsync_v2", target, source, nbytes, self.stream)
            self._busy = True

    def fill(self, target: int, value: int, count: int) -> None:
        with self:
            self._check("cuMemsetD32Async", target, value & 0xFFFFFFFF, count, self.stream)
            self._busy = True

    # -- kernels
    def load(self, image: bytes, kernels: Sequence[Kernel]) -> list[_P]:
        log = ctypes.create_string_buffer(8192)
        options, values = (
            (_INT * 2)(_LOG, _LOG_SIZE),
            (_P * 2)(ctypes.addressof(log), len(log)),
        )
        text = ctypes.create_string_buffer(image)  # ends with a zero
        module = _P()
        with self:
            code = self._cu.cuModuleLoadDataEx(
                ctypes.addressof(module),
                ctypes.addressof(text),
                2,
                ctypes.addressof(options),
                ctypes.addressof(values),
            )
            if code in (NO_BINARY, INVALID_PTX):
                raise DriverError(
                    f"{self.name} does not take code for {self.target.name}:"
                    f" {log.value.decode(errors='replace') or 'wrong architecture'}"
                )
            if code:
                raise self._error(
                    "cuModuleLoadDataEx",
                    code,
                    f"kernels {', '.join(k.name for k in kernels)}",
                )
            self._modules.append(module)
            handles = [
                self._made("cuModuleGetFunction", module, k.name.encode(), what=k.name)
                for k in kernels
            ]
            for handle, k in zip(handles, kernels, strict=True):
                if k.shared > _STATIC_SHARED:
                    self._check(
                        "cuFuncSetAttribute",
                        handle,
                        _DYNAMIC_SHARED,
                        k.shared,
                        what=f"{k.name} of {k.label}: {k.shared} bytes of shared memory",
                    )
        return handles

    def launch(self, handle: _P, kernel: Kernel, groups: int, words: int) -> None:
        # the driver wants an array of pointers to the arguments, all of which are words here, and
        # to the tensor maps
        count = len(kernel.arguments)
        with self:
            maps = [
                self._tensor_map(m, kernel, (_U64 * count).from_address(words)) for m in kernel.maps
            ]
            pointers = (_P * (count + len(maps)))(*range(words, words + 8 * count, 8), *maps)
            self._last = kernel
            self._busy = True
            code = self._cu.cuLaunchKernel(
                handle,
                groups,
                1,
                1,
                kernel.threads,
                1,
                1,
                kernel.shared,
                self.stream,
                pointers,
                None,
            )
            if code:
                raise self.launch_error(code, kernel)

    def entry_point(self, function: str) -> int:
        """Address of a function of libcuda, for native code."""
        return ctypes.cast(getattr(self._cu, function), _P).value

    def launched(self, kernel: Kernel) -> None:
        """Native code has started kernels, the last of which was this one."""
        self._last = kernel
        self._busy = True

    def launch_error(self, code: int, kernel: Kernel) -> BaseException:
        """What to raise when cuLaunchKernel gave `code`."""
        error = self._error("cuLaunchKernel", code, f"kernel {kernel.name} of {kernel.label}")
        return error if isinstance(error, MemoryError) else LaunchError(str(error))

    def _tensor_map(self, m: TensorMap, kernel: Kernel, words: Sequence[int]) -> int:
        """Address of what the copy engine wants to know of an array; made once."""
        address, sizes, strides, box = tiled(m, words)
        key = (address, m.itemsize, *sizes, *strides, *box)
        if key not in self._maps:
            room = ctypes.create_string_buffer(128 + 64)
            place = -(-ctypes.addressof(room) // 64) * 64
            rank = len(sizes)
            arrays = (
                (_U64 * rank)(*sizes),
                (_U64 * rank)(*strides),
                (_UINT * rank)(*box),
                (_UINT * rank)(*[1] * rank),
            )
            self._check(
                "cuTensorMapEncodeTiled",
                place,
                MAP_TYPES[m.itemsize],
                rank,
                address,
                *map(ctypes.addressof, arrays),
                0,
                MAP_SWIZZLE,
                MAP_PROMOTION,
                0,
                what=(
                    f"kernel {kernel.name} of {kernel.label}: sizes {sizes}, strides {strides}"
                    " bytes"
                ),
            )
            if len(self._maps) >= MAPS:
                self._maps.pop(next(iter(self._maps)))
            self._maps[key] = place, room
        return self._maps[key][0]

    # -- order
    def synchronize(self) -> None:
        """Wait for everything enqueued on `stream`; if that is `main`, also for the uploads it
        waits for."""
        with self:
            code = self._cu.cuStreamSynchronize(self.stream)
            if code:
                last = (
                    f"; the last kernel started was {self._last.name} of {self._last.label}"
                    if self._last
                    else ""
                )
                raise LaunchError(f"{self._error('cuStreamSynchronize', code, self.name)}{last}")

    def mark(self) -> None:
        """Remember this point in the order of `main`: what is enqueued up to here uses no block
        that was free before."""
        with self:
            self.epoch = self.epoch + 1
            self._busy = False
            if not self._marks:
                self._marks = [self._event() for _ in range(MARKS)]
            self._check("cuEventRecord", self._marks[self.epoch % MARKS], self.main)

    @property
    def idle_since(self) -> int:
        """The mark after which a block given back now is used by nobody."""
        return self.epoch + self._busy

    def _event(self, timing: bool = False) -> _P:
        if self._events and not timing:
            return self._events.pop()
        return self._made("cuEventCreate", 0 if timing else _NO_TIMING)

    def timers(self, count: int) -> list[_P]:
        """Events that remember when they were reached."""
        with self:
            return [self._event(timing=True) for _ in range(count)]

    def reach(self, timer: _P) -> None:
        """The time at which the device comes to this point."""
        with self:
            self._check("cuEventRecord", timer, self.stream)

    def elapsed(self, start: _P, end: _P) -> float:
        """Seconds between two timers that have been reached."""
        value = ctypes.c_float()
        with self:
            self._check("cuEventElapsedTime", ctypes.addressof(value), start, end)
        return value.value * 1e-3

    def follow(self, stream: int) -> None:
        """What is enqueued on `main` from now on comes after everything on another stream of the
        device."""
        self._order(_P(stream), self.main)

    def precede(self, stream: int) -> None:
        """What is enqueued on another stream from now on comes after everything on `main`."""
        self._order(self.main, _P(stream))

    def _order(self, first: _P, then: _P) -> None:
        with self:
            event = self._event()
            self._check("cuEventRecord", event, first)
            self._check("cuStreamWaitEvent", then, event, 0)
            self._events.append(event)  # the wait is for this record of it
            self._busy = True

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Kernels, copies and fills go to another stream of the device."""
        with self:
            before, self.stream = self.stream, _P(stream)
            try:
                yield
            finally:
                self.stream = before

    # -- graphs
    @contextlib.contextmanager
    def captured(self) -> Iterator[_P]:
        """Yields what becomes, at the end of the block, the graph of what was enqueued in it, none
        of which has run."""
        graph = _P()
        with self, self.on(self.main.value):
            self._check("cuStreamBeginCapture_v2", self.main, _THREAD_LOCAL_CAPTURE)
            self._forked = {0: self.main}
            start = self._event()
            try:
                self._check("cuEventRecord", start, self.main)
                self._start = start
                yield graph
                self.branch(0, sum(1 << b for b in self._forked if b))
            finally:
                self._forked = None
                self._check("cuStreamEndCapture", self.main, ctypes.addressof(graph))
                self._events.append(start)
                while self._freed_meanwhile:
                    self.free(self._freed_meanwhile.pop())

    def branch(self, number: int, after: int) -> None:
        """What follows goes to branch `number` of the graph being captured, after the present ends
        of the branches whose bits are set in `after`. Elsewhere the order is that of the calls."""
        if self._forked is None:
            return
        while len(self._branches) <= number:
            # A graph may be launched on any stream: what only `main` may use (`stream is main`) is
            # not for its first branch either.
            self._branches.append(
                self._made("cuStreamCreate", _NON_BLOCKING)
                if self._branches
                else _P(self.main.value)
            )
        stream = self._branches[number]
        if number not in self._forked:
            self._check("cuStreamWaitEvent", stream, self._start, 0)
            self._forked[number] = stream
        for other, first in self._forked.items():
            if after >> other & 1 and other != number:
                self._order(first, stream)
        self.stream = stream

    def instantiate(self, graph: _P) -> _P:
        with self:
            return self._made("cuGraphInstantiateWithFlags", graph, 0)

    def update(self, executable: _P, graph: _P) -> bool:
        """Give an executable graph the arguments of another of the same form. False when the driver
        cannot."""
        result = (_U64 * 4)()
        with self:
            return self._cu.cuGraphExecUpdate_v2(executable, graph, ctypes.addressof(result)) == 0

    def run_graph(self, executable: _P) -> None:
        with self:
            self._check("cuGraphLaunch", executable, self.stream)
            self._busy = True

    def drop_graph(self, graph: _P | None, executable: _P | None = None) -> None:
        with self:
            if graph is not None:
                self._check("cuGraphDestroy", graph)
            if executable is not None:
                self._check("cuGraphExecDestroy", executable)


def _functions(library: str | object) -> Any:
    """libcuda with the types of its functions. Raises DriverError when it is not there, or too old
    to have them."""
    try:
        found = ctypes.CDLL(library) if isinstance(library, str) else library
    except OSError as error:
        raise DriverError(
            f"TORCH_HLO_DEVICE=cuda: no NVIDIA driver on this machine ({error}). Install the"
            " driver, or choose another TORCH_HLO_DEVICE"
        ) from None
    for name, arguments in _FUNCTIONS.items():
        try:
            function = getattr(found, name)
        except AttributeError:
            raise DriverError(
                f"the NVIDIA driver has no {name}: it is older than CUDA {_OLDEST}; update it"
            ) from None
        function.argtypes, function.restype = arguments, _INT
    return found
