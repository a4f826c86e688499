"""What object files need from elsewhere: undefined symbols of ELF and WebAssembly objects."""

import struct
from collections.abc import Iterator

_SYMTAB = 2
_UNDEFINED = 0


def undefined(data: bytes) -> list[str]:
    """Names of the symbols that a 64-bit ELF or a WebAssembly object file uses and does not define.
    Raises ValueError for anything else."""
    if data.startswith(b"\x7fELF\x02\x01"):
        return sorted(set(_elf(data)))
    if data.startswith(b"\0asm"):
        return sorted(set(_wasm(data)))
    raise ValueError("not a 64-bit little-endian ELF object or a WebAssembly module")


def _elf(data: bytes) -> Iterator[str]:
    """System V ABI, object files: the section headers, then the symbol table and its string
    table."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + entry * i) for i in range(count)]
    for _, kind, _, _, offset, size, link, _, _, _ in sections:
        if kind != _SYMTAB:
            continue
        strings = sections[link][4]
        for at in range(offset + 24, offset + size, 24):  # the first symbol is no symbol
            name, _, _, section = struct.unpack_from("<IBBH", data, at)
            if section == _UNDEFINED:
                start = strings + name
                yield data[start : data.index(b"\0", start)].decode()


def _wasm(data: bytes) -> Iterator[str]:
    """WebAssembly core specification, import section; the linker's own names (memory, stack
    pointer, table) are no functions."""
    at = 8
    while at < len(data):
        kind = data[at]
        size, at = _leb(data, at + 1)
        end = at + size
        if kind == 2:
            count, at = _leb(data, at)
            for _ in range(count):
                _, at = _string(data, at)
                name, at = _string(data, at)
                what = data[at]
                at += 1
                if what == 0:
                    _, at = _leb(data, at)
                    yield name
                elif what == 3:
                    at += 2
                else:
                    at += what == 1  # a table has an element type before its limits
                    flags, at = _leb(data, at)
                    for _ in range(1 + (flags & 1)):
                        _, at = _leb(data, at)
        at = end


def _leb(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _string(data: bytes, at: int) -> tuple[str, int]:
    size, at = _leb(data, at)
    return data[at : at + size].decode(), at + size
