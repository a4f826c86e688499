"""NVIDIA's cuBLASLt by ctypes, for products that it was measured to be faster at
(compiler/tune.py). Nothing here is needed otherwise.

C's row-major matrix is its column-major C^T = B^T A^T, so operands change places. Plans
(descriptors and the heuristic's first algorithm) are made once per set of sizes.
https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api"""

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch_hlo.compiler.gpu.gpu_program import LibraryProduct

from ..gpu.driver import DriverError

_P, _SIZE, _I32, _I64, _U64 = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_uint64,
)
WORKSPACE = 32 << 20  # bytes that NVIDIA recommends for Hopper
NAMES = ("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so")
# cudaDataType_t by HLO type; cublasComputeType_t and scale type by type of sums
TYPES = {
    "f32": 0,
    "f64": 1,
    "f16": 2,
    "s8": 3,
    "s32": 10,
    "bf16": 14,
    "f8e4m3fn": 28,
    "f8e5m2": 29,
}
COMPUTE = {"f32": 68, "tf32": 77, "f64": 70, "s32": 72}
_TRANSA, _TRANSB = 3, 4  # cublasLtMatmulDescAttributes_t
_BATCH, _STRIDE = 5, 6  # cublasLtMatrixLayoutAttribute_t
_MAX_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t
# cublasLtMatmulHeuristicResult_t begins with the algorithm
_RESULT_BYTES, _ALGORITHM_BYTES = 96, 64
# name -> argument types; every function gives a cublasStatus_t
FUNCTIONS = {
    "cublasLtCreate": (_P,), "cublasLtMatmulDescCreate": (_P, _I32, _I32),
    "cublasLtMatmulDescSetAttribute": (_P, _I32, _P, _SIZE),
    "cublasLtMatrixLayoutCreate": (_P, _I32, _U64, _U64, _I64),
    "cublasLtMatrixLayoutSetAttribute": (_P, _I32, _P, _SIZE),
    "cublasLtMatmulPreferenceCreate": (_P,),
    "cublasLtMatmulPreferenceSetAttribute": (_P, _I32, _P, _SIZE),
    "cublasLtMatmulAlgoGetHeuristic": (_P, _P, _P, _P, _P, _P, _P, _I32, _P, _P),
    "cublasLtMatmul": (_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _SIZE, _P),
}  # fmt: skip


@lru_cache(1)
def find() -> ctypes.CDLL | None:
    """The library: the system's, or the one in PyTorch's wheels."""
    wheels = (
        [str(p) for d in sys.path for p in sorted(Path(d).glob("nvidia/*/lib/libcublasLt.so.*"))]
        if sys.path
        else []
    )
    for name in (*NAMES, *wheels):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


class CublasLt:
    """The library for one device and its current context. `library`: an object with its functions.
    `allocate(nbytes)`: device memory for good; one block serves the main stream, and products on
    other streams, which may run at the same time, do without."""

    def __init__(self, library: Any, allocate: Callable[[int], int]) -> None:
        for name, arguments in FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _I32
        self._library, self._allocate = library, allocate
        self._handle = self._made("cublasLtCreate")
        self._workspace = 0
        self._plans: dict[tuple, tuple] = {}

    def _check(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise DriverError(f"cuBLASLt: {name} gave status {status}")

    def _made(self, name: str, *arguments: object) -> int:
        value = _P()
        self._check(name, ctypes.addressof(value), *arguments)
        return value.value

    def _set(self, name: str, thing: int, attribute: int, value: ctypes._SimpleCData) -> None:
        self._check(name, thing, attribute, ctypes.addressof(value), ctypes.sizeof(value))

    def product(self, p: LibraryProduct, words: list[int], stream: int, main: bool) -> None:
        """Enqueue C = A B on a stream; `main`: it is the main one. `words`: items, A, B, C, m, n,
        k, line of A, of B, of C (elements), products, their strides in A, B and C. Raises
        DriverError, also when the library has no algorithm for the sizes."""
        _, a, b, c, *sizes = words
        if main and not self._workspace:
            self._workspace = self._allocate(WORKSPACE)
        room = WORKSPACE if main else 0
        key = (p, *sizes, room)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(p, room, *sizes)
        operation, layouts, algorithm, one, zero = plan
        left, right, out = layouts
        self._check(
            "cublasLtMatmul",
            self._handle,
            operation,
            ctypes.addressof(one),
            b,
            left,
            a,
            right,
            ctypes.addressof(zero),
            c,
            out,
            c,
            out,
            ctypes.addressof(algorithm),
            self._workspace if room else 0,
            room,
            stream,
        )

    def _plan(self, p: LibraryProduct, room: int, *sizes: int) -> tuple:
        m, n, k = sizes[:3]
        scale = TYPES["s32" if p.sums == "s32" else "f64" if p.sums == "f64" else "f32"]
        operation = self._made("cublasLtMatmulDescCreate", COMPUTE[p.sums], scale)
        for attribute, turned in (
            (_TRANSA, p.b_along_k),
            (_TRANSB, not p.a_along_k),
        ):
            self._set("cublasLtMatmulDescSetAttribute", operation, attribute, _I32(int(turned)))
        layouts = self._layouts(p, *sizes)
        algorithm = self._algorithm(operation, layouts, room)
        if algorithm is None:
            raise DriverError(
                f"cuBLASLt has no algorithm for {p.a}[{m},{k}] x {p.b}[{k},{n}] -> {p.c}"
            )
        number = {"s32": _I32, "f64": ctypes.c_double}.get(p.sums, ctypes.c_float)
        return operation, layouts, algorithm, number(1), number(0)

    def _layouts(
        self,
        p: LibraryProduct,
        m: int,
        n: int,
        k: int,
        line_a: int,
        line_b: int,
        line_c: int,
        count: int,
        *strides: int,
    ) -> list[int]:
        """Of B, A and C. Column-major, B with k contiguous is k x n and has to be turned, else it
        is n x k; A is the other way round."""
        b = (k, n) if p.b_along_k else (n, k)
        a = (k, m) if p.a_along_k else (m, k)
        layouts = []
        for dtype, (rows, columns), line, stride in (
            (p.b, b, line_b, strides[1]),
            (p.a, a, line_a, strides[0]),
            (p.c, (n, m), line_c, strides[2]),
        ):
            layout = self._made("cublasLtMatrixLayoutCreate", TYPES[dtype], rows, columns, line)
            if count > 1:
                self._set("cublasLtMatrixLayoutSetAttribute", layout, _BATCH, _I32(count))
                self._set("cublasLtMatrixLayoutSetAttribute", layout, _STRIDE, _I64(stride))
            layouts.append(layout)
        return layouts

    def _algorithm(
        self, operation: int, layouts: list[int], room: int
    ) -> ctypes.Array[ctypes.c_char] | None:
        """The heuristic's first; None when it has none."""
        preference = self._made("cublasLtMatmulPreferenceCreate")
        name = "cublasLtMatmulPreferenceSetAttribute"
        self._set(name, preference, _MAX_WORKSPACE, _U64(room))
        found, result = _I32(), ctypes.create_string_buffer(_RESULT_BYTES)
        left, right, out = layouts
        self._check(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            operation,
            left,
            right,
            out,
            out,
            preference,
            1,
            ctypes.addressof(result),
            ctypes.addressof(found),
        )
        if not found.value:
            return None
        return ctypes.create_string_buffer(result.raw[:_ALGORITHM_BYTES], _ALGORITHM_BYTES)
