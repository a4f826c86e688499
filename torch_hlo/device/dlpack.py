"""DLPack: arrays of other libraries in the memory where they are, and ours for them.
https://dmlc.github.io/dlpack/latest (ABI 0.8, which all take)

    # release() when nobody uses it any more
    capsule = export(Array(address, Shape("f32", (2, 3)), (CPU, 0)), release)
    # the memory stays as long as `owner` does
    array, owner = take(capsule)
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Shape

CPU = 1  # DLDeviceType
CUDA = 2
CUDA_HOST = 3
_CODES = {"s": 0, "u": 1, "f": 2, "c": 5}  # DLDataTypeCode
_TYPES = {
    name: (_CODES[name[0]], int(name[1:]))
    for name in "s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 c64 c128".split()
}
_TYPES |= {
    "bf16": (4, 16),
    "pred": (6, 8),
    "f8e3m4": (7, 8),
    "f8e4m3": (8, 8),
    "f8e4m3b11fnuz": (9, 8),
    "f8e4m3fn": (10, 8),
    "f8e4m3fnuz": (11, 8),
    "f8e5m2": (12, 8),
    "f8e5m2fnuz": (13, 8),
}
_NAMES = {v: k for k, v in _TYPES.items()}


@frozen
class Array:
    """A dense row-major array at an address of a device (DLDeviceType, number)."""

    address: int
    shape: Shape
    device: tuple[int, int]


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", _DELETER),
    )


# a consumer renames the capsule whose contents it takes over
_FRESH = b"dltensor"
_USED = b"used_dltensor"
_python = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _python)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _python)
)
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", _python)
)
# Of a capsule that is being freed: no Python object may be made of it.
_dying_is = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _python)
)
_dying_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _python)
)


# Other libraries give arrays back while Python raises an exception, and when it has ended: machine
# code puts them on a list, by the word for its owner's use, and asks Python to clear that soon.
_CODE = """
define void @torch_hlo_give_back(ptr %managed) {{
  %next = getelementptr i8, ptr %managed, i64 {context}
  br label %again
again:
  %first = load atomic ptr, ptr inttoptr (i64 {head} to ptr) acquire, align 8
  store ptr %first, ptr %next
  %pair = cmpxchg ptr inttoptr (i64 {head} to ptr), ptr %first, ptr %managed acq_rel acquire
  %done = extractvalue {{ ptr, i1 }} %pair, 1
  br i1 %done, label %listed, label %again
listed:
  %runs = call i32 inttoptr (i64 {runs} to ptr)()
  %ended = icmp eq i32 %runs, 0
  br i1 %ended, label %end, label %ask
ask:
  call i32 inttoptr (i64 {ask} to ptr)(ptr inttoptr (i64 {clear} to ptr), ptr null)
  br label %end
end:
  ret void
}}
define ptr @torch_hlo_given_back() {{
  %first = atomicrmw xchg ptr inttoptr (i64 {head} to ptr), ptr null acq_rel
  ret ptr %first
}}
"""


class _Exports:
    """What others hold, by address of the structure."""

    def __init__(self) -> None:
        from .cpu.engine import loaded

        self.held: dict[int, tuple[_Managed, object, Callable[[], None]]] = {}
        self.head = ctypes.c_uint64()
        self.clearing = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self.clear)
        text = _CODE.format(
            context=_Managed.context.offset,
            head=ctypes.addressof(self.head),
            clear=_address(self.clearing),
            runs=_address(_python.Py_IsInitialized),
            ask=_address(_python.Py_AddPendingCall),
        )
        code = loaded(text)
        self.delete = _DELETER(code.get_function_address("torch_hlo_give_back"))
        take = code.get_function_address("torch_hlo_given_back")
        self.take = ctypes.PYFUNCTYPE(ctypes.c_void_p)(take)
        code.detach()
        _python.Py_IncRef(ctypes.py_object(self))  # others may hold arrays when Python has ended

    def add(self, managed: _Managed, dims: object, release: Callable[[], None]) -> int:
        address = ctypes.addressof(managed)
        self.held[address] = managed, dims, release
        return address

    def clear(self, _: object = None) -> int:
        """Drop what has been given back."""
        address = self.take()
        while address:
            managed, _, release = self.held.pop(address)
            address = managed.context
            release()
        return 0


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


exports = functools.cache(_Exports)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _drop(capsule: int) -> None:
    """Nobody has taken what was in the capsule."""
    if _dying_is(capsule, _FRESH):
        exports().delete(_dying_pointer(capsule, _FRESH))


def export(array: Array, release: Callable[[], None]) -> object:
    """A capsule for `__dlpack__` to return. Raises BufferError for a type that DLPack lacks."""
    if array.shape.dtype not in _TYPES:
        raise BufferError(f"DLPack has no type for {array.shape.dtype} ({array.shape})")
    rank = array.shape.rank
    dims = (ctypes.c_int64 * max(rank, 1))(*array.shape.dims)
    code, bits = _TYPES[array.shape.dtype]
    tensor = _Tensor(
        array.address,
        _Device(*array.device),
        rank,
        _Type(code, bits, 1),
        dims,
        None,
        0,
    )
    exports().clear()
    managed = _Managed(tensor, None, exports().delete)
    address = exports().add(managed, dims, release)
    return _new(address, _FRESH, ctypes.cast(_drop, ctypes.c_void_p))


class Owner:
    """Keeps what was taken from a capsule; gives it back with itself."""

    def __init__(self, managed: _Managed) -> None:
        self.managed = managed

    def __del__(self) -> None:
        if self.managed.deleter:
            self.managed.deleter(ctypes.addressof(self.managed))


def take(capsule: object) -> tuple[Array, Owner]:
    """What a capsule holds. Raises BufferError for arrays with gaps or permuted dimensions, and for
    types that HLO lacks; the capsule is untouched then."""
    managed = _Managed.from_address(_pointer(capsule, _FRESH))
    t = managed.tensor
    name = _NAMES.get((t.dtype.code, t.dtype.bits)) if t.dtype.lanes == 1 else None
    if name is None:
        raise BufferError(
            f"a DLPack array of type code {t.dtype.code}, {t.dtype.bits} bits, {t.dtype.lanes}"
            " lanes is nothing that HLO has"
        )
    dims = tuple(t.shape[: t.ndim])
    if t.strides:
        step = 1
        for n, stride in zip(reversed(dims), reversed(t.strides[: t.ndim])):
            if n > 1 and stride != step:
                raise BufferError(
                    f"an array of sizes {list(dims)} with strides {t.strides[: t.ndim]} does not"
                    " lie row by row: make it contiguous first"
                )
            step *= n
    _rename(capsule, _USED)
    return Array(
        (t.data or 0) + t.byte_offset,
        Shape(name, dims),
        (t.device.type, t.device.id),
    ), Owner(managed)
