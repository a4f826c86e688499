"""A position in bytes: the numbers, strings and lists that MLIR bytecode is made of.

https://mlir.llvm.org/docs/BytecodeFormat/ describes them.
"""

from __future__ import annotations

from ..text.scanner import ParseError

MAGIC = b"ML\xefR"
PADDING = 0xCB


class BytecodeError(ParseError):
    """Bytes that are no program. `offset` counts from 0."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message, "", 0)
        self.offset = offset
        self.args = (f"byte {offset}: {message[:600]}",)


class Cursor:
    """Reads `data` from `pos` up to `end`, and never beyond."""

    def __init__(self, data: bytes, pos: int = 0, end: int | None = None) -> None:
        self.data = data
        self.pos = pos
        self.end = len(data) if end is None else end

    def error(self, message: str, position: int | None = None) -> BytecodeError:
        return BytecodeError(message, self.pos if position is None else position)

    def done(self) -> bool:
        return self.pos >= self.end

    def byte(self) -> int:
        if self.pos >= self.end:
            raise self.error("the bytes end here, more were announced")
        self.pos += 1
        return self.data[self.pos - 1]

    def bytes(self, count: int) -> bytes:
        begin = self.pos
        if count > self.end - begin:
            raise self.error(f"{count} bytes were announced, {self.end - begin} are left")
        self.pos += count
        return self.data[begin : self.pos]

    def varint(self) -> int:
        """The zeros at the low end of the first byte count the bytes that follow."""
        first = self.byte()
        if first & 1:
            return first >> 1
        if first == 0:
            return int.from_bytes(self.bytes(8), "little")
        more = (first & -first).bit_length() - 1
        rest = int.from_bytes(self.bytes(more), "little")
        return (rest << (7 - more)) | (first >> (more + 1))

    def signed(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def flagged(self) -> tuple[int, bool]:
        value = self.varint()
        return value >> 1, bool(value & 1)

    def count(self) -> int:
        """The length of a list: each of its elements takes a byte or more."""
        found = self.varint()
        if found > self.end - self.pos:
            raise self.error(f"a list of {found} elements does not fit the bytes that are left")
        return found

    def integer(self, bits: int) -> int:
        """A signed integer of known width."""
        if bits <= 8:
            value = self.byte() & ((1 << bits) - 1)
            return value - (1 << bits) if bits > 1 and value >> (bits - 1) else value
        if bits <= 64:
            return self.signed()
        raise self.error(f"integers of {bits} bits are not supported")

    def terminated(self) -> str:
        """Text up to a zero."""
        end = self.data.find(0, self.pos, self.end)
        if end < 0:
            raise self.error("this text has no end")
        return self.text(end + 1 - self.pos)[:-1]

    def text(self, count: int) -> str:
        return self.bytes(count).decode("utf-8", "surrogateescape")

    def section(self) -> tuple[int, Cursor]:
        """(number, content) of the section that begins here."""
        head = self.byte()
        length = self.varint()
        if head & 0x80:
            alignment = self.varint()
            if alignment & (alignment - 1) or not 0 < alignment < 1 << 32:
                raise self.error(f"alignment {alignment} is not a power of two")
            while self.pos % alignment:
                if self.byte() != PADDING:
                    raise self.error("a byte of padding has another value", self.pos - 1)
        return head & 0x7F, self.part(length)

    def part(self, length: int) -> Cursor:
        """What the next bytes hold."""
        begin = self.pos
        self.bytes(length)
        return Cursor(self.data, begin, self.pos)
