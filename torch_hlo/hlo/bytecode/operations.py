"""The operations of a bytecode file, and the Module they mean.

The operations become those of MLIR text (hlo/stablehlo/operation.py). Values are numbered in the
file; a number becomes a name.
"""

from collections.abc import Callable
from typing import Any

from ..ir import Module
from ..stablehlo.convert import converted
from ..stablehlo.mlir import MAX_NESTING, Program, collect
from ..stablehlo.operation import Block, Operation
from ..stablehlo.types import Type
from .cursor import BytecodeError, Cursor
from .dialects import read_attribute, read_type
from .properties import PROPERTIES
from .spelling import short_name, spelled
from .tables import Tables

ATTRIBUTES, RESULTS, OPERANDS, SUCCESSORS, REGIONS, USES, KEPT = (1 << i for i in range(7))
Names = list[tuple[str, int] | None]  # the values in sight; None: not defined yet


def parse_bytecode(data: bytes) -> Module:
    """The program of a StableHLO portable artifact. Raises BytecodeError, which names the
    offset."""
    reader = _Reader(data)
    try:
        return converted(reader.at, *reader.program())
    except RecursionError:
        raise reader.at.error("the operations nest too deeply", 0) from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.tables = Tables(data, read_attribute, read_type)
        self.at = self.tables.section("ir")
        self.made = 0  # names given so far

    def program(self) -> Program:
        block = Block()
        self._block(self.at, block, [], 0)
        return collect(block.ops, self.at)

    def _block(self, at: Cursor, block: Block, names: Names, next_: int, depth: int = 0) -> int:
        """Read the arguments and operations; the number of the value that follows them."""
        count, has_arguments = at.flagged()
        if has_arguments:
            next_ = self._arguments(at, block, names, next_)
        if count > at.end - at.pos:
            raise at.error(f"{count} operations do not fit the bytes that are left")
        for _ in range(count):
            op = self._operation(at, names, next_, depth)
            next_ += sum(n for _, n in op.results)
            if op.name == "builtin.unrealized_conversion_cast":
                self._alias(op, names, next_)
            else:
                block.ops.append(op)
        return next_

    def _arguments(self, at: Cursor, block: Block, names: Names, next_: int) -> int:
        version = self.tables.version
        for _ in range(at.count()):
            if version >= 4:
                index, located = at.flagged()
            else:
                index = at.varint()
                located = True
            found = self._type(self.tables.value(1, index, at), at)
            if located:
                at.varint()
            block.args.append((self._define(names, next_, 1, at), found))
            next_ += 1
        if version >= 3 and at.byte():
            self._use_orders(at, len(block.args))
        return next_

    def _type(self, found: object, at: Cursor) -> Type:
        if not isinstance(found, Type):
            raise at.error("expected the type of a value")
        return found

    def _define(self, names: Names, first: int, count: int, at: Cursor) -> str:
        if first + count > len(names):
            raise at.error(f"{len(names)} values were announced, here is one more")
        name = str(self.made)
        self.made += 1
        names[first : first + count] = [(name, i) for i in range(count)]
        return name

    def _alias(self, op: Operation, names: Names, next_: int) -> None:
        """A cast between dialects: its results are its operands."""
        count = sum(n for _, n in op.results)
        if count != len(op.operands):
            raise self.at.error("a cast changes the number of values", op.position)
        names[next_ - count : next_] = op.operands

    def _use_orders(self, at: Cursor, values: int) -> None:
        for _ in range(at.count() if values > 1 else 1):
            if values > 1:
                at.varint()
            for _ in range(at.flagged()[0]):
                at.varint()

    def _operation(self, at: Cursor, names: Names, next_: int, depth: int) -> Operation:
        t = self.tables
        begin = at.pos
        if depth > MAX_NESTING:
            raise at.error(f"regions nest deeper than {MAX_NESTING}")
        full = t.pick(t.operations, at.varint(), "operation name", at)
        op = Operation(short_name(full), begin)
        mask = at.byte()
        at.varint()  # the location
        attrs = self._dictionary(at) if mask & ATTRIBUTES else {}
        if mask & KEPT:
            attrs |= self._properties(full, at)
        if mask & RESULTS:
            op.types = [self._type(t.type(at), at) for _ in range(at.count())]
        if mask & OPERANDS:
            op.operands = [self._use(names, at) for _ in range(at.count())]
        if mask & SUCCESSORS:
            raise at.error(
                "control flow between blocks is not supported; use stablehlo.while and"
                " stablehlo.case"
            )
        if mask & USES:
            self._use_orders(at, len(op.types))
        if mask & REGIONS:
            self._regions(at, op, names, depth)
        if op.types:
            op.results = [(self._define(names, next_, len(op.types), at), len(op.types))]
        op.attrs = spelled(op.name, attrs, at)
        return op

    def _dictionary(self, at: Cursor) -> dict[str, Any]:
        found = self.tables.attribute(at)
        if not isinstance(found, dict):
            raise at.error("expected a dictionary of attributes")
        return dict(found)

    def _properties(self, name: str, at: Cursor) -> dict[str, Any]:
        found = self.tables.pick(self.tables.properties, at.varint(), "property", at)
        if name not in PROPERTIES:
            raise at.error(
                f"the properties of operation {name!r} cannot be read; write the module with"
                " stablehlo.serialize_portable_artifact"
            )
        begin = found.pos
        values = {}
        for key in PROPERTIES[name]:
            read: Callable[[Cursor], Any] = (
                self.tables.optional if key.endswith("?") else self.tables.attribute
            )
            if (value := read(found)) is not None:
                values[key.removesuffix("?")] = value
        found.pos = begin
        return values

    def _use(self, names: Names, at: Cursor) -> tuple[str, int]:
        index = at.varint()
        if index >= len(names) or (found := names[index]) is None:
            raise at.error(f"value {index} is not defined before its use")
        return found

    def _regions(self, at: Cursor, op: Operation, names: Names, depth: int) -> None:
        count, isolated = at.flagged()
        if count > at.end - at.pos:
            raise at.error(f"{count} regions do not fit the bytes that are left")
        if isolated:
            names = []  # the regions see nothing from outside
            if self.tables.version >= 2:
                number, at = at.section()
                if number != 4:
                    raise at.error("expected a section of operations")
        for _ in range(count):
            op.regions.append(self._region(at, names, depth + 1))

    def _region(self, at: Cursor, names: Names, depth: int) -> Block:
        blocks = at.varint()
        if blocks > 1:
            raise at.error("a region of several blocks is not supported")
        block = Block()
        if blocks:
            values = at.count()
            outer = len(names)
            names.extend([None] * values)
            self._block(at, block, names, outer, depth)
            del names[outer:]
        return block


__all__ = ["BytecodeError", "parse_bytecode"]
