"""Launches without Python: what a plan calls for every kernel is a native function that calls the
driver itself.

    launcher = Launcher(function, kernels, handles, python)    # addresses of cuLaunchKernel, and of
                                                # what launches the kernels that take more
    launcher.stream = driver.stream.value
    ...                                         # the plan runs
    launcher.failure                            # None, or (CUresult, number of the kernel)

A plan's table of functions has launcher.address for "launch", and launcher.state after the last
one."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import llvmlite.binding as llvm

from torch_hlo.compiler.codegen.block import FAILED, HOST
from torch_hlo.compiler.gpu.gpu_program import CALLS, Kernel
from torch_hlo.compiler.llvm import host
from torch_hlo.compiler.llvm.machine_code import machine_code

from ..cpu.engine import engine

# handle, threads, arguments, bytes of shared memory, unused
_KERNEL = "{ ptr, i32, i32, i32, i32 }"
# cuLaunchKernel, stream, kernels, CUresult of a failure, number of the last kernel, Python's launch
_STATE = "{ ptr, ptr, ptr, i64, i64, ptr }"


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("handle", ctypes.c_void_p),
        ("threads", ctypes.c_int32),
        ("arguments", ctypes.c_int32),
        ("shared", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class _State(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("kernels", ctypes.c_void_p),
        ("code", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("python", ctypes.c_void_p),
    )


# cuLaunchKernel(function, grid x 3, block x 3, shared bytes, stream, pointers to the arguments,
# extra); all arguments are words here.
_TEXT = f"""
define void @torch_hlo_cuda_launch(ptr %block, i64 %number, i64 %groups, ptr %words) {{
entry:
  %host.at = getelementptr ptr, ptr %block, i64 {HOST}
  %table = load ptr, ptr %host.at
  %state.at = getelementptr ptr, ptr %table, i64 {len(CALLS)}
  %state = load ptr, ptr %state.at
  %code.at = getelementptr {_STATE}, ptr %state, i32 0, i32 3
  %before = load i64, ptr %code.at
  %well = icmp eq i64 %before, 0
  %some = icmp sgt i64 %groups, 0
  %go = and i1 %well, %some
  br i1 %go, label %start, label %done
start:
  %last.at = getelementptr {_STATE}, ptr %state, i32 0, i32 4
  store i64 %number, ptr %last.at
  %function.at = getelementptr {_STATE}, ptr %state, i32 0, i32 0
  %function = load ptr, ptr %function.at
  %stream.at = getelementptr {_STATE}, ptr %state, i32 0, i32 1
  %stream = load ptr, ptr %stream.at
  %kernels.at = getelementptr {_STATE}, ptr %state, i32 0, i32 2
  %kernels = load ptr, ptr %kernels.at
  %handle.at = getelementptr {_KERNEL}, ptr %kernels, i64 %number, i32 0
  %handle = load ptr, ptr %handle.at
  %threads.at = getelementptr {_KERNEL}, ptr %kernels, i64 %number, i32 1
  %threads = load i32, ptr %threads.at
  %count.at = getelementptr {_KERNEL}, ptr %kernels, i64 %number, i32 2
  %count = load i32, ptr %count.at
  %shared.at = getelementptr {_KERNEL}, ptr %kernels, i64 %number, i32 3
  %shared = load i32, ptr %shared.at
  %plain = icmp sge i32 %count, 0
  br i1 %plain, label %pack, label %elsewhere
elsewhere:
  %python.at = getelementptr {_STATE}, ptr %state, i32 0, i32 5
  %python = load ptr, ptr %python.at
  call void %python(ptr %block, i64 %number, i64 %groups, ptr %words)
  br label %done
pack:
  %pointers = alloca ptr, i32 %count, align 8
  br label %each
each:
  %i = phi i32 [ 0, %pack ], [ %next, %more ]
  %left = icmp slt i32 %i, %count
  br i1 %left, label %more, label %call
more:
  %word = getelementptr i64, ptr %words, i32 %i
  %slot = getelementptr ptr, ptr %pointers, i32 %i
  store ptr %word, ptr %slot
  %next = add i32 %i, 1
  br label %each
call:
  %grid = trunc i64 %groups to i32
  %code = call i32 %function(
    ptr %handle, i32 %grid, i32 1, i32 1, i32 %threads, i32 1, i32 1,
    i32 %shared, ptr %stream, ptr %pointers, ptr null)
  %wrong = icmp ne i32 %code, 0
  br i1 %wrong, label %failed, label %done
failed:
  %code64 = zext i32 %code to i64
  store i64 %code64, ptr %code.at
  %flag = getelementptr i64, ptr %block, i64 {FAILED}
  store i64 1, ptr %flag
  br label %done
done:
  ret void
}}
"""


@lru_cache
def _engine() -> llvm.ExecutionEngine:
    code, _ = machine_code(_TEXT, host())
    return engine((code,), host())


class Launcher:
    """The kernels of a program as native code sees them. Those with tensor maps are left to
    Python."""

    def __init__(
        self,
        function: int,
        kernels: Sequence[Kernel],
        handles: Sequence,
        python: int,
    ) -> None:
        self._engine = _engine()
        self.address = self._engine.get_function_address("torch_hlo_cuda_launch")
        rows = [
            ((None, 0, -1, 0, 0) if k.maps else (h.value, k.threads, len(k.arguments), k.shared, 0))
            for k, h in zip(kernels, handles, strict=True)
        ]
        self._rows = (_Kernel * len(kernels))(*rows)
        self._state = _State(function, None, ctypes.addressof(self._rows), 0, -1, python)
        self.state = ctypes.addressof(self._state)

    @property
    def stream(self) -> int | None:
        return self._state.stream

    @stream.setter
    def stream(self, value: int | None) -> None:
        self._state.stream = value

    @property
    def last(self) -> int:
        """Number of the kernel launched last, -1 before the first."""
        return self._state.last

    @property
    def failure(self) -> tuple[int, int] | None:
        """(CUresult, number of the kernel) of a launch that failed since this was last asked."""
        code, self._state.code = self._state.code, 0
        return (code, self._state.last) if code else None
