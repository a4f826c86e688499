"""What JAX holds pointers to: blocks of 64-bit words, one for each property.

    device = Object("device", id=0, device_kind="cpu")
    device.address                  # what JAX gets

A getter of the C API copies words whose names are those of its fields (functions.py), so the words
of a kind follow from its getters.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch_hlo.device.pjrt.pjrt_structs import STRUCTURES

CALLBACK = "torch_hlo_python_callback"  # the target of calls of Python functions
# kind of object: the functions that only read it
GETTERS = {
    "error": "Error_Message Error_GetCode",
    "client": (
        "Client_PlatformName Client_ProcessIndex Client_PlatformVersion Client_Devices"
        " Client_AddressableDevices Client_AddressableMemories Client_TopologyDescription"
    ),
    "topology": (
        "TopologyDescription_PlatformName TopologyDescription_PlatformVersion"
        " TopologyDescription_GetDeviceDescriptions TopologyDescription_Attributes"
    ),
    "device": (
        "DeviceDescription_Id DeviceDescription_ProcessIndex DeviceDescription_Attributes"
        " DeviceDescription_Kind DeviceDescription_DebugString DeviceDescription_ToString"
        " Device_GetDescription Device_IsAddressable Device_LocalHardwareId"
        " Device_AddressableMemories Device_DefaultMemory Device_GetAttributes"
    ),
    "memory": (
        "Memory_Id Memory_Kind Memory_Kind_Id Memory_DebugString Memory_ToString"
        " Memory_AddressableByDevices"
    ),
    "executable": (
        "Executable_Name Executable_NumReplicas Executable_NumPartitions Executable_NumOutputs"
        " Executable_SizeOfGeneratedCodeInBytes Executable_OutputMemoryKinds"
        " Executable_OutputElementTypes Executable_OutputDimensions Executable_Fingerprint"
        " LoadedExecutable_Fingerprint LoadedExecutable_GetExecutable"
        " LoadedExecutable_AddressableDevices LoadedExecutable_IsDeleted"
        " LoadedExecutable_GetDeviceAssignment Executable_GetCompiledMemoryStats"
        " Layouts_Executable_GetOutputLayouts Layouts_Executable_GetParameterLayouts"
    ),
    "buffer": (
        "Buffer_ElementType Buffer_Dimensions Buffer_UnpaddedDimensions"
        " Buffer_DynamicDimensionIndices Buffer_GetMemoryLayout Buffer_OnDeviceSizeInBytes"
        " Buffer_Device Buffer_Memory Buffer_IsDeleted Buffer_IsOnCpu Buffer_ReadyEvent"
        " Buffer_UnsafePointer Buffer_OpaqueDeviceMemoryDataPointer Layouts_Buffer_MemoryLayout"
    ),
    "event": "Event_IsReady",
    "layout": "Layouts_MemoryLayout_Serialize",
}


def outputs_of(function: str) -> list[str]:
    """The fields that a getter fills in: all behind the object."""
    return [name for name, _ in STRUCTURES[function]._fields_[3:]]


# Word 0 is the next in a list of those that JAX holds no longer.
WORDS = {
    kind: {
        name: i + 1
        for i, name in enumerate(
            dict.fromkeys(field for getter in getters.split() for field in outputs_of(getter))
        )
    }
    for kind, getters in GETTERS.items()
}

WORDS["event"] |= {"listeners": 2, "holders": 3}


class Object:
    """`kind`: a row of GETTERS. Text sets its size as well, a list of objects its number."""

    alive: ClassVar[dict[int, Object]] = {}  # by address: what JAX may hold

    def __init__(self, kind: str, **properties: Any) -> None:
        self.kind = kind
        self.words = array("q", bytes(8 * (len(WORDS[kind]) + 1)))
        self.address = self.words.buffer_info()[0]
        self.kept: list[object] = []  # what the words point to
        self.alive[self.address] = self
        self.set(**properties)

    def set(self, **properties: Any) -> None:
        words = WORDS[self.kind]
        for name, value in properties.items():
            if isinstance(value, int):
                self.words[words[name]] = value
                continue
            if isinstance(value, (str, bytes)):
                data = value.encode() if isinstance(value, str) else value
                # no type of so many characters, which would be garbage in a circle of objects
                held: Any = ctypes.c_char.from_buffer(bytearray(data + b"\0"))
                count = f"{name}_size"
            else:
                data = value
                held = (ctypes.c_int64 * max(len(value), 1))(*value)
                count = f"num_{name}"  # the kind may have no word for it
            self.words[words[name]] = self.keep(held)
            if count in words:
                self.words[words[count]] = len(data)

    def keep(self, value: Any) -> int:
        """The address of a C value, which stays as long as this object."""
        self.kept.append(value)
        return ctypes.addressof(value)

    @classmethod
    def forget(cls, first: int | None) -> None:
        """JAX holds the objects of this list no longer."""
        while first:
            found = cls.alive.pop(first)
            first = found.words[0]
            found.released()

    def released(self) -> None:
        """Give back what it holds."""


class PluginError(Exception):
    """What becomes a PJRT_Error of this code."""

    INVALID_ARGUMENT = 3
    UNIMPLEMENTED = 12
    INTERNAL = 13
    RESOURCE_EXHAUSTED = 8

    def __init__(self, message: str, code: int = INVALID_ARGUMENT) -> None:
        super().__init__(message)
        self.code = code


def error(code: int, message: str) -> int:
    return Object("error", message=message, code=code).address


def named_values(owner: Object, values: Mapping[str, float | Sequence[int]]) -> int:
    """The address of an array of PJRT_NamedValue: numbers and lists of integers."""
    kind = STRUCTURES["NamedValue"]
    table = (kind * len(values))()
    for row, (name, value) in zip(table, values.items()):
        row.struct_size = ctypes.sizeof(kind)
        data = name.encode()
        row.name, row.name_size = owner.keep(ctypes.create_string_buffer(data)), len(data)
        if isinstance(value, float):
            row.type, row.value_size = 3, 1
            row.value = int.from_bytes(struct.pack("<f", value), "little")
        else:
            row.type, row.value_size = 2, len(value)
            row.value = owner.keep((ctypes.c_int64 * len(value))(*value))
    return owner.keep(table)
