"""CompileOptionsProto: for how many devices a program is, and which.

options = CompileOptions.parse(data)         # replicas, partitions, devices
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from torch_hlo.frozen import frozen

from .objects import PluginError

# numbers of fields
_BUILD = 3
_REPLICAS = 4
_PARTITIONS = 5
_ASSIGNMENT = 9
_COMPUTATIONS = 3
_DEVICES = 1
_OVERRIDE = 7
_KEY = 1
_VALUE = 2
_TEXT = 1
_FLAGS = 3  # those of XLA_FLAGS; the folder of --xla_dump_to
_DUMP = 109

# Options that XLA knows besides its own flags, and flags that are on or off. Except for xla_dump_to
# they are for XLA's compiler and change nothing here; a wrong name or value is an error, as there.
_EFFORTS = """exec_time_optimization_effort memory_fitting_effort optimization_level
memory_fitting_level""".split()
_SWITCHES = "xla_embed_ir_in_executable xla_dump_hlo_as_text xla_dump_hlo_as_proto".split()


@frozen
class CompileOptions:
    replicas: int = 1
    partitions: int = 1
    devices: tuple[int, ...] = ()  # [replica * partitions + partition]
    dump: str = ""  # the folder that gets what the compiler makes on the way

    @classmethod
    def parse(cls, data: bytes) -> CompileOptions:
        given = [_option(dict(_fields(_message(v)))) for n, v in _fields(data) if n == _OVERRIDE]
        found = {n: v for n, v in _fields(data) if n == _BUILD}
        build: dict[int, int | bytes] = dict(_fields(_message(found.get(_BUILD, b""))))
        flags = dict(_fields(_message(build.get(_FLAGS, b""))))
        dump = dict(given).get("xla_dump_to") or flags.get(_DUMP, b"")
        replicas, partitions = (int(build.get(n) or 1) for n in (_REPLICAS, _PARTITIONS))
        columns = [
            _numbers(_message(value))
            for n, value in _fields(_message(build.get(_ASSIGNMENT, b"")))
            if n == _COMPUTATIONS
        ]
        count = replicas * partitions
        devices = tuple(row for rank in zip(*columns) for row in rank) or tuple(range(count))
        if len(devices) != count:
            raise PluginError(
                f"{len(devices)} devices for {replicas} replicas of {partitions} partitions",
            )
        return cls(replicas, partitions, devices, os.fsdecode(_message(dump)))

    def assignment(self) -> bytes:
        """DeviceAssignmentProto."""
        columns = b""
        for p in range(self.partitions):
            ids = b"".join(map(_varint, self.devices[p :: self.partitions]))
            columns += b"\x1a" + _sized(b"\x0a" + _sized(ids))
        return b"\x08" + _varint(self.replicas) + b"\x10" + _varint(self.partitions) + columns


def _option(option: dict[int, int | bytes]) -> tuple[str, int | bytes]:
    """An entry of `compiler_options`: its name, and its value where that is a text."""
    name = _message(option.get(_KEY, b"")).decode(errors="replace")
    if not name.startswith("xla_") and name not in _EFFORTS:
        raise PluginError(f"No such compile option: '{name}'")
    text = dict(_fields(_message(option.get(_VALUE, b"")))).get(_TEXT)
    if name in _SWITCHES and text not in (None, b"true", b"false"):
        raise PluginError(f"compile option {name}: {text!r} is not a valid bool value.")
    return name, text or b""


def _message(value: int | bytes) -> bytes:
    return value if isinstance(value, bytes) else b""


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _sized(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _numbers(data: bytes) -> list[int]:
    """Repeated integers, packed or not."""
    found: list[int] = []
    for number, value in _fields(data):
        if number == _DEVICES and isinstance(value, int):
            found.append(value)
        elif number == _DEVICES and isinstance(value, bytes):
            at = 0
            while at < len(value):
                one, at = _read(value, at)
                found.append(one)
    return found


def _read(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise PluginError("damaged compile options")
        byte = data[at]
        value |= (byte & 127) << shift
        at = at + 1
        shift = shift + 7
        if byte < 128:
            return value & ((1 << 64) - 1), at


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = _read(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _read(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _read(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise PluginError("damaged compile options")
        if at + size > len(data):
            raise PluginError("damaged compile options")
        yield key >> 3, data[at : at + size]
        at += size
