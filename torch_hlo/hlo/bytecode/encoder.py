"""The tables of a bytecode file that is being written: the way back from tables.py and dialects.py.

What is written twice gets one number, in the order in which it is first asked for.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..ir import DTYPES, Shape
from ..stablehlo.attributes import Dense, Raw, Symbol, dense_literal
from ..stablehlo.types import NAMES, UNKNOWN, Quantized, Type, type_text
from ..text.scanner import Scanner
from .cursor import MAGIC
from .dialects import DYNAMIC, VHLO_ELEMENTS, WORDS
from .tables import MAX_VERSION, SECTIONS

_UNKNOWN_LOCATION = b"\x1f"
_ELEMENTS = {name: code for code, name in VHLO_ELEMENTS.items()}
# The minor version of StableHLO that introduced something; all else is in 1.0.
SINCE = {
    "s2": 2,
    "u2": 2,
    "f8e4m3": 7,
    "f8e3m4": 7,
    "f4e2m1fn": 8,
    "f8e8m0fnu": 8,
    "chlo": 11,
    "sdy": 11,
    "tan": 4,
    "gather_v2": 1,
    "dynamic_gather_v2": 1,
    "scatter_v2": 1,
    "all_gather_v2": 5,
    "all_reduce_v2": 5,
    "all_to_all_v2": 5,
}
_I32 = ("exponent_bits", "mantissa_bits", "mhlo.num_partitions", "tf.aliasing_output")
_ARRAYS = (
    "arg_attrs", "called_computations", "operand_layouts", "output_operand_aliases",
    "precision_config", "res_attrs", "result_layouts",
)  # fmt: skip


def varint(n: int) -> bytes:
    if n >> 56:
        return b"\0" + n.to_bytes(8, "little")
    more = max(n.bit_length() - 1, 0) // 7
    return ((n << 1 | 1) << more).to_bytes(more + 1, "little")


def signed(n: int) -> bytes:
    return varint(2 * n if n >= 0 else -2 * n - 1)


def joined(numbers: Iterable[int]) -> bytes:
    return b"".join(map(varint, numbers))


def listed(numbers: list[int]) -> bytes:
    return varint(len(numbers)) + joined(numbers)


def sized(data: bytes) -> bytes:
    return varint(len(data)) + data


def section(name: str, data: bytes) -> bytes:
    return bytes([SECTIONS.index(name)]) + sized(data)


class Numbers(defaultdict[Any, int]):
    """The number of a key: how many were asked for before it."""

    def __init__(self) -> None:
        super().__init__(self.__len__)


class Encoder:
    """`s` says where constants stand that cannot be read."""

    def __init__(self, s: Scanner) -> None:
        self.s = s
        self.minor = 0
        self.strings, self.dialects, self.operations = (Numbers() for _ in range(3))
        self.attributes, self.types, self.properties = (Numbers() for _ in range(3))
        self.location = varint(self._attribute("builtin", _UNKNOWN_LOCATION))

    def need(self, what: str) -> None:
        self.minor = max(self.minor, SINCE.get(what, 0))

    def file(self, ir: bytes) -> bytes:
        """The whole file, around the section of operations."""
        tables = self.attributes, self.types
        sizes = [n for t in tables for d, x, own in t for n in (d, 1, len(x) << 1 | own)]
        heads = [self.strings[dialect] << 1 for dialect in self.dialects]
        strings = [text.encode("utf-8", "surrogateescape") + b"\0" for text in self.strings]
        operations = joined(n for row in self.operations for n in row)
        content = {
            "dialects": listed(heads) + varint(len(self.operations)) + operations,
            "offsets": joined([*map(len, tables), *sizes]),
            "values": b"".join(x for t in tables for _, x, _ in t),
            "ir": ir,
            "strings": listed([len(text) for text in reversed(strings)]) + b"".join(strings),
            "properties": varint(len(self.properties)) + b"".join(map(sized, self.properties)),
        }
        producer = varint(MAX_VERSION) + f"StableHLO_v1.{self.minor}.0\0".encode()
        return MAGIC + producer + b"".join(section(name, x) for name, x in content.items())

    def operation(self, full: str) -> int:
        dialect, _, name = full.partition(".")
        self.need(dialect)
        self.need(name.removesuffix("_v1"))
        return self.operations[self.dialects[dialect], 1, self.strings[name] << 1 | 1]

    # Types

    def type(self, found: Type) -> int:
        """The type of a value."""
        shape = found.shape
        if shape.dtype == "token":
            return self._type(22)
        dims = b"".join(signed(DYNAMIC if d == UNKNOWN else d) for d in shape.sizes)
        q = found.quantized
        element = self.element(shape.dtype) if q is None else self._quantized(q)
        return self._type(20, varint(len(shape.dims)) + dims, element)

    def _quantized(self, q: Quantized) -> int:
        """Integers have no sign: a flag has it."""
        flag = q.storage[0] == "s"
        parts = flag, self.element("s" + q.storage[1:]), self.element(q.expressed)
        bits = DTYPES[q.storage].bits - flag
        limits = signed(-flag << bits) + signed((1 << bits) - 1)
        scales = [signed(*struct.unpack("<q", struct.pack("<d", x))) for x in q.scales]
        zeros = [*map(signed, q.zero_points)]
        if q.axis is None:
            return self._type(24, joined(parts) + scales[0] + zeros[0] + limits)
        lists = b"".join(varint(len(row)) + b"".join(row) for row in (scales, zeros))
        return self._type(30, joined([*parts, q.axis]) + limits + lists)

    def element(self, dtype: str) -> int:
        self.need(dtype)
        if dtype in ("c64", "c128"):
            return self._type(1, b"", self.element("f32" if dtype == "c64" else "f64"))
        return self._type(_ELEMENTS[NAMES[dtype]])

    def _type(self, code: int, content: bytes = b"", *types: int) -> int:
        return self.types[self.dialects["vhlo"], varint(code) + content + joined(types), True]

    def outside(self, found: Type) -> int:
        """A type of what is no operation of VHLO."""
        text = type_text(found.shape).replace("-1x", "?x")
        return self.types[self.dialects["builtin"], text.encode() + b"\0", False]

    # Attributes

    def _attribute(self, dialect: str, content: bytes, own: bool = True) -> int:
        return self.attributes[self.dialects[dialect], content, own]

    def vhlo(self, code: int, content: bytes, *numbers: int) -> int:
        return self._attribute("vhlo", varint(code) + joined(numbers) + content)

    def attribute(self, value: Any, key: str) -> int:
        """VHLO's attribute. The key says what the value cannot, such as its width."""
        if isinstance(value, list) and key in _ARRAYS:
            return self.vhlo(1, listed([self.attribute(v, key) for v in value]))
        if key in WORDS:
            code, words = WORDS[key]
            return self.vhlo(code, b"", words.split(" ").index(value))
        return WAYS[type(value)](self, value, key)

    def _numbers(self, value: list[int], key: str) -> int:
        dtype = "pred" if key == "window_reversal" else "s64"
        data = np.array(value, bool if dtype == "pred" else "<i8").tobytes()
        return self._dense(Dense(data, Type(Shape(dtype, (len(value),))), 0), key)

    def _dense(self, value: Dense, key: str) -> int:
        found, splat = dense_literal(self.s, value)
        data = found.data
        if found.dtype == "pred":  # eight a byte; one that fills the type is all ones
            bits = np.frombuffer(data, np.uint8)
            data = (-bits if splat else np.packbits(bits, bitorder="little")).tobytes()
        return self.vhlo(15, sized(data), self.type(value.type))

    def _function(self, value: tuple[list[Type], list[Type]], key: str) -> int:
        """The type of a function: of its arguments and results."""
        parts = [listed([self.type(x) for x in part]) for part in value]
        return self.vhlo(17, b"", self._type(8, b"".join(parts)))

    def outer(self, value: Any, key: str) -> int:
        """An attribute of what is no operation of VHLO, as text."""
        dialect = "builtin"
        text = f"{value} : {'i32' if key in _I32 else 'i64'}"
        if isinstance(value, str):
            text = json.dumps(value)
        elif isinstance(value, dict):
            dialect = "chlo"
            text = f"#chlo.ragged_dot<{', '.join(f'{k} = {v}' for k, v in value.items())}>"
        elif isinstance(value, Raw):
            dialect = "sdy"
            kind = "mesh" if key == "mesh" else "sharding"
            many = "_per_value" if value.text.startswith("[<") else ""
            text = f"#sdy.{kind}{many}<{value.text}>"
        self.need(dialect)
        return self._attribute(dialect, text.encode() + b"\0", False)

    def dictionary(self, values: dict[str, int]) -> int:
        """The attributes that an operation's dialect does not know."""
        pairs = [n for k in sorted(values) for n in (self.outer(k, k), values[k])]
        return self._attribute("builtin", joined([1, len(values), *pairs]))


WAYS: dict[type, Callable[[Encoder, Any, str], int]] = {
    bool: lambda e, v, key: e.vhlo(2, varint(v)),
    int: lambda e, v, key: e.vhlo(9, signed(v), e.element("s32" if key in _I32 else "s64")),
    float: lambda e, v, key: e.vhlo(
        8, signed(*struct.unpack("<I", struct.pack("<f", v))), e.element("f32")
    ),
    str: lambda e, v, key: e.vhlo(14, b"", e.strings[v]),
    Symbol: lambda e, v, key: e.attribute(v.name, key),
    list: Encoder._numbers,
    dict: lambda e, v, key: e.vhlo(
        6, joined(n for k in v for n in (e.attribute(k, ""), e.attribute(v[k], k))), len(v)
    ),
    tuple: Encoder._function,
    Dense: Encoder._dense,
    Raw: Encoder.outer,
}
