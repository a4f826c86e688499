"""OpenCL devices (TORCH_HLO_DEVICE=opencl or opencl:PATH): Intel's GPUs, and CPUs as a machine to
run GPU kernels on.

The library is the ICD loader (libOpenCL) or an implementation itself, such as libintelocl of the
PyPI package intel-opencl-rt. It must take SPIR-V and have shared virtual memory, so that arrays are
plain addresses."""

import atexit
import ctypes
import ctypes.util
import os
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache

from torch_hlo import config
from torch_hlo.compiler.gpu.gpu_program import Kernel
from torch_hlo.compiler.gpu.target import gpu_target

from .device_memory import DevicePool
from .driver import Driver, DriverError
from .gpu import GpuBackend

_P, _SIZE, _U32, _U64, _INT = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_uint32,
    ctypes.c_uint64,
    ctypes.c_int,
)
_ALL_DEVICES, _GPU = 0xFFFFFFFF, 4
_NAME, _IL_VERSION, _SVM, _BUILD_LOG = 0x102B, 0x105B, 0x1053, 0x1183
_COARSE_SVM = 1
_READ_WRITE = 1
_ERRORS = {
    -1: "no device found", -2: "device not available", -4: "out of device memory",
    -5: "out of resources", -6: "out of host memory", -11: "the program does not build",
    -30: "invalid value", -42: "the device does not take SPIR-V", -46: "no kernel of this name",
    -48: "invalid kernel", -50: "invalid argument value", -52: "not all arguments are set",
    -54: "the group is larger than the device allows", -61: "invalid buffer size",
    -1001: "no OpenCL implementation is installed (the ICD loader found none)",
}  # fmt: skip
# name -> (result, arguments); every function takes its errors through the result or through a last
# pointer
_FUNCTIONS = {
    "clGetPlatformIDs": (_INT, (_U32, _P, _P)), "clGetDeviceIDs": (_INT, (_P, _U64, _U32, _P, _P)),
    "clGetDeviceInfo": (_INT, (_P, _U32, _SIZE, _P, _P)),
    "clCreateContext": (_P, (_P, _U32, _P, _P, _P, _P)),
    "clCreateCommandQueueWithProperties": (_P, (_P, _P, _P, _P)),
    "clCreateProgramWithIL": (_P, (_P, _P, _SIZE, _P)),
    "clBuildProgram": (_INT, (_P, _U32, _P, _P, _P, _P)),
    "clGetProgramBuildInfo": (_INT, (_P, _P, _U32, _SIZE, _P, _P)),
    "clCreateKernel": (_P, (_P, ctypes.c_char_p, _P)),
    "clSetKernelArg": (_INT, (_P, _U32, _SIZE, _P)),
    "clSetKernelArgSVMPointer": (_INT, (_P, _U32, _P)),
    "clEnqueueNDRangeKernel": (_INT, (_P, _P, _U32, _P, _P, _P, _U32, _P, _P)),
    "clSVMAlloc": (_P, (_P, _U64, _SIZE, _U32)), "clSVMFree": (None, (_P, _P)),
    "clEnqueueSVMMemcpy": (_INT, (_P, _U32, _P, _P, _SIZE, _U32, _P, _P)),
    "clReleaseKernel": (_INT, (_P,)), "clReleaseProgram": (_INT, (_P,)),
    "clReleaseCommandQueue": (_INT, (_P,)), "clReleaseContext": (_INT, (_P,)),
    "clEnqueueSVMMemFill": (_INT, (_P, _P, _P, _SIZE, _SIZE, _U32, _P, _P)),
    "clFinish": (_INT, (_P,)), "clFlush": (_INT, (_P,)),
}  # fmt: skip


def library_paths(path: str = "") -> list[str]:
    """Where to look: the path given, else what the system has, else a Python environment's own."""
    if path:
        return [path]
    lib = os.path.join(sys.prefix, "lib")
    found = ctypes.util.find_library("OpenCL")
    return [
        p
        for p in (found, os.path.join(lib, "libintelocl.so"))
        if p and (not os.path.isabs(p) or os.path.exists(p))
    ]


class OpenCL(Driver):
    """A driver for the first GPU, else the first device."""

    def __init__(self, path: str = "") -> None:
        self.target = gpu_target("spirv64")
        # Of the kernels, which keep their arguments, from the first that is set until the launch.
        # Nothing is taken under it.
        self._lock = threading.Lock()
        problems = []
        for candidate in library_paths(path):
            try:
                self._open(candidate)
                return
            except (OSError, DriverError) as error:
                problems.append(f"{candidate}: {error}")
        raise DriverError(
            "TORCH_HLO_DEVICE=opencl: no usable OpenCL device. "
            + ("; ".join(problems) or "No library was found")
            + ". Install a driver, or `pip install intel-opencl-rt intel-cmplr-lib-rt` to run"
            " kernels on the CPU"
        )

    def _open(self, path: str) -> None:
        # Intel's CPU runtime vectorizes across threads; with loops in loops that diverge it gives
        # wrong results, or crashes (2026.0).
        config.suggest("CL_CONFIG_CPU_VECTORIZER_MODE", "1")
        lib = ctypes.CDLL(path)
        for name, (result, arguments) in _FUNCTIONS.items():
            try:
                function = getattr(lib, name)
            except AttributeError:
                raise DriverError(f"it has no {name}: OpenCL 2.1 or later is needed") from None
            function.restype, function.argtypes = result, arguments
        self._cl = lib
        self._device = self._choose()
        self.name = self._info(_NAME).rstrip(b"\0").decode(errors="replace")
        if b"SPIR-V" not in self._info(_IL_VERSION):
            raise DriverError(f"{self.name} does not take SPIR-V")
        if not int.from_bytes(self._info(_SVM), "little") & _COARSE_SVM:
            raise DriverError(f"{self.name} has no shared virtual memory")
        self._programs: list[tuple[_P, list[_P]]] = []
        self._context = self._made(
            "clCreateContext", None, 1, ctypes.byref(self._device), None, None
        )
        self._queue = self._made(
            "clCreateCommandQueueWithProperties", self._context, self._device, None
        )
        atexit.register(self.close)

    def _choose(self) -> _P:
        platforms, count = (_P * 16)(), _U32()
        self._check("clGetPlatformIDs", 16, platforms, ctypes.byref(count))
        for kind in (_GPU, _ALL_DEVICES):
            for platform in platforms[: count.value]:
                device = _P()
                if self._cl.clGetDeviceIDs(platform, kind, 1, ctypes.byref(device), None) == 0:
                    return device
        raise DriverError("no device found")

    def _info(self, what: int) -> bytes:
        size = _SIZE()
        if self._cl.clGetDeviceInfo(self._device, what, 0, None, ctypes.byref(size)):
            return b""
        data = ctypes.create_string_buffer(size.value)
        self._cl.clGetDeviceInfo(self._device, what, size.value, data, None)
        return data.raw

    def _check(self, function: str, *arguments: object, what: str = "") -> None:
        code = getattr(self._cl, function)(*arguments)
        if code:
            raise DriverError(
                f"{what or function}: {_ERRORS.get(code, 'OpenCL error')} ({function} gave {code})"
            )

    def _made(self, function: str, *arguments: object, what: str = "") -> _P:
        code = _INT()
        made = getattr(self._cl, function)(*arguments, ctypes.byref(code))
        if code.value:
            raise DriverError(
                f"{what or function}: {_ERRORS.get(code.value, 'OpenCL error')} ({function} gave"
                f" {code.value})"
            )
        return _P(made)

    # -- the protocol
    def allocate(self, nbytes: int) -> int:
        address = self._cl.clSVMAlloc(self._context, _READ_WRITE, max(nbytes, 64), 64)
        if not address:
            raise MemoryError(f"{self.name}: cannot allocate {nbytes} bytes")
        return address

    def free(self, address: int) -> None:
        self._cl.clFinish(self._queue)
        self._cl.clSVMFree(self._context, address)

    def _memcpy(self, target: int, source: int, nbytes: int, wait: bool) -> None:
        self._check(
            "clEnqueueSVMMemcpy",
            self._queue,
            wait,
            target,
            source,
            nbytes,
            0,
            None,
            None,
        )

    def upload(self, target: int, source: int, nbytes: int) -> None:
        if nbytes:
            self._memcpy(target, source, nbytes, True)

    def download(self, target: int, source: int, nbytes: int) -> None:
        if nbytes:
            self._memcpy(target, source, nbytes, True)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._memcpy(target, source, nbytes, False)

    def fill(self, target: int, value: int, count: int) -> None:
        pattern = ctypes.c_int32(value)
        self._check(
            "clEnqueueSVMMemFill",
            self._queue,
            target,
            ctypes.byref(pattern),
            4,
            4 * count,
            0,
            None,
            None,
        )

    def load(self, image: bytes, kernels: Sequence[Kernel]) -> list:
        program = self._made("clCreateProgramWithIL", self._context, image, len(image))
        code = self._cl.clBuildProgram(program, 1, ctypes.byref(self._device), None, None, None)
        if code:
            size = _SIZE()
            self._cl.clGetProgramBuildInfo(
                program, self._device, _BUILD_LOG, 0, None, ctypes.byref(size)
            )
            log = ctypes.create_string_buffer(max(size.value, 1))
            self._cl.clGetProgramBuildInfo(program, self._device, _BUILD_LOG, size.value, log, None)
            raise DriverError(
                f"{self.name} does not build the kernels {', '.join(k.name for k in kernels)}:"
                f" {log.value.decode(errors='replace')}"
            )
        handles = [
            self._made("clCreateKernel", program, k.name.encode(), what=k.name) for k in kernels
        ]
        self._programs.append((program, handles))
        return handles

    def close(self) -> None:
        """At exit: the implementation's threads must be idle before its libraries are taken
        down."""
        self._cl.clFinish(self._queue)
        for program, handles in self._programs:
            for h in handles:
                self._cl.clReleaseKernel(h)
            self._cl.clReleaseProgram(program)
        self._cl.clReleaseCommandQueue(self._queue)
        self._cl.clReleaseContext(self._context)

    def launch(self, handle: object, kernel: Kernel, groups: int, words: int) -> None:
        what = f"kernel {kernel.name} of {kernel.label}"
        values = (_U64 * len(kernel.arguments)).from_address(words)
        with self._lock:
            for i, kind in enumerate(kernel.arguments):
                if kind == "p":
                    self._check("clSetKernelArgSVMPointer", handle, i, values[i], what=what)
                else:
                    self._check("clSetKernelArg", handle, i, 8, words + 8 * i, what=what)
            size, group = _SIZE(groups * kernel.threads), _SIZE(kernel.threads)
            self._check(
                "clEnqueueNDRangeKernel",
                self._queue,
                handle,
                1,
                None,
                ctypes.byref(size),
                ctypes.byref(group),
                0,
                None,
                None,
                what=what,
            )

    def synchronize(self) -> None:
        self._check("clFinish", self._queue)


class OpenCLBackend(GpuBackend):
    """The device of the library whose path is the argument, by default the system's."""

    def pool(self) -> DevicePool:
        return pool_of(self.argument)


@lru_cache
def pool_of(path: str) -> DevicePool:
    """The memory of a library's device; one per process. Raises DriverError."""
    return DevicePool(OpenCL(path))


backend = OpenCLBackend
