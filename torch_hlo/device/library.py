"""Compiled libraries (compiler/aot) in this process: what they say about themselves, and running
them on memory at given addresses.

    library = Library("./digits.so")
    shapes, workspace = library.plan([(1, 1, 8, 8)])
    library.run([(address, nbytes, (1, 1, 8, 8))], [(address, nbytes, shapes[0])])

Needs ctypes alone: neither NumPy, torch nor the compiler are imported.
"""

import ctypes
import errno
import json
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

_ABI = 1
_KINDS = ("user", "state", "seed")
Memory = tuple[int, int, Sequence[int]]  # address, bytes, sizes


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("nbytes", ctypes.c_uint64),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
    )


class _Array(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("initial", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("pair", ctypes.c_int32),
    )


class _Error(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int32), ("message", ctypes.c_char * 252))


_TENSORS = ctypes.POINTER(_Tensor)
_COUNT = ctypes.c_int32
_BYTES = ctypes.c_uint64
_PLAN = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    _TENSORS,
    _COUNT,
    _TENSORS,
    _COUNT,
    ctypes.POINTER(_BYTES),
    ctypes.POINTER(_Error),
)
_RUN = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    _TENSORS,
    _COUNT,
    _TENSORS,
    _COUNT,
    ctypes.c_void_p,
    _BYTES,
    ctypes.c_void_p,
    _BYTES,
    ctypes.POINTER(_Error),
)
_CHECK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, _BYTES, ctypes.POINTER(_Error))


class _Model(ctypes.Structure):
    _fields_ = (
        ("abi", ctypes.c_int32),
        ("input_count", ctypes.c_int32),
        ("output_count", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("name", ctypes.c_char_p),
        ("inputs", ctypes.POINTER(_Array)),
        ("outputs", ctypes.POINTER(_Array)),
        ("metadata", ctypes.c_char_p),
        ("plan", _PLAN),
        ("run", _RUN),
        ("check_weights", _CHECK),
        ("weights_bytes", ctypes.c_uint64),
        ("workspace_bytes", ctypes.c_int64),
    )


class LibraryError(RuntimeError):
    """A library refused a call; `code` is the C interface's (docs/guide/ahead_of_time.md)."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Array:
    """`dtype`: XLA's number. `sizes`: -1 where they differ from call to call. `initial`: address of
    a state's first value, else None."""

    name: str
    dtype: int
    sizes: tuple[int, ...]
    kind: str
    pair: int
    initial: int | None

    def first_value(self, nbytes: int) -> bytearray:
        """A copy of the first value of a state."""
        return bytearray(ctypes.string_at(self.initial, nbytes))


class Library:
    """A loaded library. Its methods may be used by several threads at a time."""

    def __init__(self, path: str | os.PathLike, weights: str | os.PathLike | None = None) -> None:
        """`weights`: the weights file, if the model has one; default: beside the library, with the
        suffix .weights. It is mapped and its checksum compared. Raises OSError for what is no
        library, LibraryError for another ABI or wrong weights."""
        path = os.path.abspath(os.fspath(path))
        self._library = _open(path)
        try:
            model = _Model.in_dll(self._library, "torch_hlo_library")
        except ValueError:
            raise OSError(f"{path} is no library made by torch_hlo.aot.compile") from None
        if model.abi != _ABI:
            raise LibraryError(
                -1,
                f"{path} has version {model.abi} of the C interface, this loader knows {_ABI}",
            )
        self._model = model
        self.name = model.name.decode()
        self.metadata: dict = json.loads(model.metadata)
        self.inputs = tuple(_array(model.inputs[i]) for i in range(model.input_count))
        self.outputs = tuple(_array(model.outputs[i]) for i in range(model.output_count))
        self._pages = None
        self._weights = (None, 0)
        if model.weights_bytes:
            self._map(
                os.fspath(weights)
                if weights is not None
                else os.path.splitext(path)[0] + ".weights"
            )

    def _map(self, path: str) -> None:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            # Copy on write: ctypes asks for writable memory to tell its address, and nothing
            # writes.
            self._pages = (
                mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
                if size
                else mmap.mmap(-1, 64)
            )
        self._weights = (
            ctypes.addressof(ctypes.c_char.from_buffer(self._pages)),
            size,
        )
        error = _Error()
        self._raise(
            self._model.check_weights(*self._weights, ctypes.byref(error)),
            error,
            f"{path}: ",
        )

    def plan(
        self, sizes: Sequence[Sequence[int]], dtypes: Sequence[int] | None = None
    ) -> tuple[list[tuple[int, ...]], int]:
        """Sizes of the outputs for inputs of these sizes, and bytes of workspace. Raises
        LibraryError saying which size or type is wrong."""
        inputs = _tensors([(None, 0, s) for s in sizes], dtypes or [a.dtype for a in self.inputs])
        outputs = _tensors(
            [(None, 0, [0] * len(a.sizes)) for a in self.outputs],
            [a.dtype for a in self.outputs],
        )
        workspace = _BYTES()
        error = _Error()
        self._raise(
            self._model.plan(
                inputs,
                len(sizes),
                outputs,
                len(self.outputs),
                ctypes.byref(workspace),
                ctypes.byref(error),
            ),
            error,
        )
        return [tuple(t.sizes[: t.rank]) for t in outputs[: len(self.outputs)]], workspace.value

    def run(
        self,
        inputs: Sequence[Memory],
        outputs: Sequence[Memory],
        workspace: tuple[int, int] | None = None,
        dtypes: Sequence[int] | None = None,
    ) -> None:
        """Run on memory; `workspace`: (address, bytes), made for this call if None. Raises
        LibraryError; then nothing was written."""
        if workspace is None:
            _, need = self.plan([s for _, _, s in inputs], dtypes)
            scratch = mmap.mmap(-1, need) if need else None
            workspace = (
                (ctypes.addressof(ctypes.c_char.from_buffer(scratch)), need) if scratch else (0, 0)
            )
        error = _Error()
        code = self._model.run(
            _tensors(inputs, dtypes or [a.dtype for a in self.inputs]),
            len(inputs),
            _tensors(outputs, [a.dtype for a in self.outputs]),
            len(outputs),
            *workspace,
            *self._weights,
            ctypes.byref(error),
        )
        self._raise(code, error)

    def _raise(self, code: int, error: _Error, where: str = "") -> None:
        if code:
            raise LibraryError(
                code,
                f"{where or self.name + ': '}{error.message.decode(errors='replace')}",
            )


def _open(path: str) -> ctypes.CDLL:
    """Load under a name of its own: for a name that it knows, the system's loader gives what was
    loaded first, not what is there now."""
    if not os.path.isfile(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    with tempfile.TemporaryDirectory(prefix="torch_hlo") as folder:
        name = os.path.join(folder, os.path.basename(path))
        os.symlink(path, name)
        return ctypes.CDLL(name)


def _array(a: _Array) -> Array:
    return Array(
        a.name.decode(),
        a.dtype,
        tuple(a.sizes[: a.rank]) if a.rank else (),
        _KINDS[a.kind],
        a.pair,
        a.initial,
    )


def _tensors(memory: Sequence[Memory], dtypes: Sequence[int]) -> ctypes.Array[_Tensor]:
    """An array of structures; it keeps its sizes alive."""
    found = (_Tensor * max(1, len(memory)))()
    for t, (address, nbytes, sizes), dtype in zip(found, memory, dtypes):
        t.data, t.nbytes, t.dtype, t.rank = address, nbytes, dtype, len(sizes)
        if sizes:
            t.sizes = (ctypes.c_int64 * len(sizes))(*sizes)
    return found
