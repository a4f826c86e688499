"""The PJRT C API through ctypes: any XLA plugin (CPU, GPU, TPU, …) is a shared library with a table
of functions.

    api = Api("/path/plugin.so")
    client = api.Client_Create().client    # every call takes fields by name and returns the
                                           # filled-in structure

A call that fails raises PjrtError with the plugin's message. The first word of a structure says
how long it is, so plugins of other versions of the API (major version 0) read them as well."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from .pjrt_structs import FUNCTIONS, HEAD, STRUCTURES

_INT = ctypes.c_int
_POINTER = ctypes.c_void_p  # and size_t: a word

# CompileOptionsProto: executable_build_options {device_ordinal: -1, num_replicas: 1,
# num_partitions: 1}
COMPILE_OPTIONS = b"\x1a\x0f\x08" + b"\xff" * 9 + b"\x01\x20\x01\x28\x01"

# PJRT_Buffer_Type
BUFFER_TYPES = {
    name: i
    for i, name in enumerate(
        ". pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 bf16 c64 c128 f8e5m2 f8e4m3fn"
        " f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s4 u4 token s2 u2 f8e4m3 f8e3m4 f8e8m0fnu"
        " f4e2m1fn".split()
    )
}


class PjrtError(RuntimeError):
    """What a plugin reports."""


def structure(name: str, **fields: int | None) -> ctypes.Structure:
    """A structure with its size filled in; pointers as addresses."""
    kind = STRUCTURES[name]
    last = getattr(kind, kind._fields_[-1][0])
    return kind(struct_size=last.offset + last.size, **fields)


def words(values: Sequence[int | None]) -> ctypes.Array:
    """A C array of pointers."""
    return (_POINTER * max(len(values), 1))(*values)


class Api:
    """A plugin's functions. Raises OSError when the file is no library, PjrtError when it is no
    PJRT plugin."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        if not hasattr(library, "GetPjrtApi"):
            raise PjrtError(f"{path} is not a PJRT plugin: it has no function GetPjrtApi")
        library.GetPjrtApi.restype = _POINTER
        address = library.GetPjrtApi()
        self.size = ctypes.c_size_t.from_address(address).value
        self.version = tuple((_INT * 2).from_address(address + HEAD - 8))
        if self.version[0] != 0:
            raise PjrtError(
                f"{path} speaks version {self.version[0]} of the PJRT C API; version 0 is supported"
            )
        self._table = address + HEAD
        self._library = library
        self.Plugin_Initialize()

    def __getattr__(self, name: str) -> Callable[..., ctypes.Structure]:
        if name not in FUNCTIONS:
            raise AttributeError(name)
        offset = FUNCTIONS.index(name) * ctypes.sizeof(_POINTER)
        pointer = (
            _POINTER.from_address(self._table + offset).value if HEAD + offset < self.size else None
        )
        if not pointer:
            raise PjrtError(f"the plugin has no function PJRT_{name}")
        function = ctypes.CFUNCTYPE(_POINTER, _POINTER)(pointer)
        kind = name

        def call(**fields: int | None) -> ctypes.Structure:
            arguments = structure(kind, **fields)
            error = function(ctypes.addressof(arguments))
            if error and not kind.startswith("Error"):
                self._raise(kind, error)
            return arguments

        setattr(self, name, call)
        return call

    def _raise(self, name: str, error: int) -> None:
        found = self.Error_Message(error=error)
        text = ctypes.string_at(found.message, found.message_size).decode(errors="replace")
        self.Error_Destroy(error=error)
        raise PjrtError(f"PJRT_{name}: {text}")

    def wait(self, event: int | None) -> None:
        """Until what the event stands for has happened; destroys it. Raises PjrtError when it
        failed."""
        if event:
            try:
                self.Event_Await(event=event)
            finally:
                self.Event_Destroy(event=event)

    def program(self, code: str, format: str = "mlir") -> tuple[ctypes.Structure, object]:
        """A PJRT_Program, and what must stay alive as long."""
        keep = (
            ctypes.create_string_buffer(code.encode()),
            ctypes.create_string_buffer(format.encode()),
        )
        text, kind = keep
        return (
            structure(
                "Program",
                code=ctypes.addressof(text),
                code_size=len(text) - 1,
                format=ctypes.addressof(kind),
                format_size=len(kind) - 1,
            ),
            keep,
        )
