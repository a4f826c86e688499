"""The tables of a bytecode file: strings, dialects, names of operations, attributes, types.

Attributes and types are decoded when they are asked for: most locations never are.
"""

from collections.abc import Callable
from typing import Any

from .cursor import MAGIC, BytecodeError, Cursor

MAX_VERSION = 6
MAX_DEPTH = 100
MAX_WEIGHT = 1 << 22  # parts of one attribute or type, those it shares counted each time
SECTIONS = (
    "strings", "dialects", "values", "offsets", "ir", "resources", "resource_offsets",
    "dialect_versions", "properties",
)  # fmt: skip
Entry = tuple[str, Cursor, bool]  # (dialect, content, whether the dialect has encoded it)
Decode = Callable[["Tables", str, Cursor, bool], Any]


class Tables:
    """All of a file but its operations."""

    def __init__(self, data: bytes, attribute: Decode, type_: Decode) -> None:
        file = Cursor(data)
        if file.bytes(4) != MAGIC:
            raise file.error("MLIR bytecode begins with 'ML\\xefR'", 0)
        self.version = file.varint()
        if self.version > MAX_VERSION:
            raise file.error(
                f"bytecode of version {self.version} is newer than {MAX_VERSION};"
                " write it for an older one"
            )
        self.producer = file.terminated()
        self.sections: dict[str, Cursor] = {}
        while not file.done():
            begin = file.pos
            number, content = file.section()
            if number >= len(SECTIONS) or SECTIONS[number] in self.sections:
                raise file.error(f"section {number} is unknown, or here twice", begin)
            self.sections[SECTIONS[number]] = content
        self.end = file.pos
        self.strings = self._strings()
        self.dialects, self.operations = self._dialects()
        self.attributes, self.types = self._values()
        self.properties = self._properties()
        self._decoders = attribute, type_
        self._found: tuple[dict[int, Any], dict[int, Any]] = {}, {}
        self._weights: tuple[dict[int, int], dict[int, int]] = {}, {}
        self._weight = 0
        self._depth = 0

    def section(self, name: str) -> Cursor:
        if name not in self.sections:
            raise BytecodeError(f"the section of {name} is missing", self.end)
        return self.sections[name]

    def _strings(self) -> list[str]:
        at = self.section("strings")
        lengths = [at.varint() for _ in range(at.count())]
        found = [at.text(n)[:-1] for n in reversed(lengths)]
        return found

    def string(self, at: Cursor) -> str:
        return str(self.pick(self.strings, at.varint(), "string", at))

    def pick(self, table: list[Any], index: int, what: str, at: Cursor) -> Any:
        if index >= len(table):
            raise at.error(f"there is no {what} {index}, only {len(table)}")
        return table[index]

    def _dialects(self) -> tuple[list[str], list[str]]:
        at = self.section("dialects")
        names: list[str] = []
        for _ in range(at.count()):
            index, versioned = at.flagged() if self.version >= 1 else (at.varint(), False)
            names.append(self.pick(self.strings, index, "string", at))
            if versioned:
                at.section()
        if self.version >= 4:
            at.varint()  # how many operations follow
        operations: list[str] = []
        while not at.done():
            dialect = self.pick(names, at.varint(), "dialect", at)
            for _ in range(at.count()):
                index = at.flagged()[0] if self.version >= 5 else at.varint()
                operations.append(f"{dialect}.{self.pick(self.strings, index, 'string', at)}")
        return names, operations

    def _values(self) -> tuple[list[Entry], list[Entry]]:
        offsets = self.section("offsets")
        content = self.section("values")
        wanted = offsets.count(), offsets.count()
        tables: tuple[list[Entry], list[Entry]] = [], []
        at = content.pos
        for count, table in zip(wanted, tables):
            while len(table) < count:
                dialect = self.pick(self.dialects, offsets.varint(), "dialect", offsets)
                group = offsets.count()
                if not 0 < group <= count - len(table):
                    raise offsets.error(f"a group of {group} does not fit")
                for _ in range(group):
                    size, encoded = offsets.flagged()
                    if size > content.end - at:
                        raise offsets.error("an attribute goes beyond its section")
                    table.append((dialect, Cursor(content.data, at, at + size), encoded))
                    at += size
        return tables

    def _properties(self) -> list[Cursor]:
        at = self.sections.get("properties")
        return [at.part(at.varint()) for _ in range(at.count())] if at else []

    def attribute(self, at: Cursor) -> Any:
        return self.value(0, at.varint(), at)

    def optional(self, at: Cursor) -> Any:
        index, here = at.flagged()
        return self.value(0, index, at) if here else None

    def type(self, at: Cursor) -> Any:
        return self.value(1, at.varint(), at)

    def value(self, kind: int, index: int, at: Cursor) -> Any:
        """Attribute (`kind` 0) or type (1) number `index`."""
        found = self._found[kind]
        weights = self._weights[kind]
        if index not in found:
            table = (self.attributes, self.types)[kind]
            entry = self.pick(table, index, ("attribute", "type")[kind], at)
            if self._depth > MAX_DEPTH:
                raise at.error(f"attributes nest deeper than {MAX_DEPTH}, or hold themselves")
            outer = self._weight
            self._weight = 1
            self._depth += 1
            content = entry[1]
            begin = content.pos
            found[index] = self._decoders[kind](self, *entry)
            content.pos = begin
            self._depth -= 1
            weights[index], self._weight = self._weight, outer
        self._weight += weights[index]
        if self._weight > MAX_WEIGHT:
            raise at.error("this attribute is too large")
        return found[index]
