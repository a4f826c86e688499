"""MLIR attributes as Python values: int, float, bool, str, list, dict, Dense, Type; enumerations
become their word."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from torch_hlo.frozen import frozen

from ..ir import DTYPES, Ints, Literal, Shape
from ..text.literals import literal_elements, literal_of
from ..text.scanner import ErrorAt, Scanner
from .types import MAX_DEPTH, Type, angle_group, parse_type, parse_types

_NUMBER = re.compile(
    r"-?(?:0x[0-9A-Fa-f]+|[0-9]+(?:\.[0-9]*(?:[eE][+-]?[0-9]+)?|[eE][+-]?[0-9]+)?)"
)
_DENSE = re.compile(r'dense<\s*(?:("(?:[^"\\]++)*+")|([^<>"]*+))\s*>')
RESOURCES = "{-#"  # begins the end of a text
_RESOURCE = re.compile(r'<\s*"?([\w.$\-]+)"?\s*>')
_BLOB = re.compile(r'"?([\w.$\-]+)"?\s*:\s*"0x[0-9A-Fa-f]{8}([0-9A-Fa-f]*)"')
_WORD = re.compile(r"[A-Za-z_][\w.$\-]*+")
_SYMBOL = re.compile(r'@(?:([\w$.\-]+)|"([^"\n]*)")(?:::@(?:[\w$.\-]+|"[^"\n]*"))*')
_HASH = re.compile(r"#([A-Za-z_][\w$]*)((?:\.[\w$]+)*)|#(\d+)")
_KEY = re.compile(r'([A-Za-z_][\w$.\-]*+)|"([^"\n]*)"')
_PART = re.compile(r"\((\d{1,18})\)(\d{1,18})")  # of an axis of a mesh
_HEX = re.compile(r"0x[0-9A-Fa-f]+")


@frozen
class Symbol:
    name: str


@frozen
class Dense:
    """`dense<…> : tensor<…>`; `text` is the part in angle brackets, or the bytes of the elements;
    `position` is where it stands."""

    text: str | bytes
    type: Type
    position: int


@frozen
class FunctionType:
    """`(…) -> (…)`: only the results; the arguments stand at the block."""

    results: tuple[Type, ...]


@frozen
class Raw:
    """Text of an attribute that nothing here reads."""

    text: str


def attribute(s: Scanner, depth: int = 0, typed: bool = True) -> Any:
    """Any attribute value. Raises ParseError. Not `typed`: a colon after a number belongs to the
    operation."""
    if depth > MAX_DEPTH:
        raise s.error(f"attributes nest deeper than {MAX_DEPTH}")
    s.skip()
    head = s.text[s.pos : s.pos + 1]
    if head == '"':
        value = s.string()
        if typed and s.accept(":"):
            parse_type(s)
        return value
    if head == "[":
        return s.listed("[", "]", lambda: attribute(s, depth + 1))
    if head == "{":
        return dictionary(s, depth + 1)
    if head == "@":
        return Symbol(symbol(s))
    if head == "#":
        return _hash(s, depth)
    if found := s.match(_NUMBER):
        return _number(s, found, typed)
    if s.at("dense<"):
        return dense(s)
    if s.accept("array<"):
        return _array(s)
    if s.at("tensor<") or s.at("tuple<") or head == "!":
        return parse_type(s)
    if found := s.match(_PART):
        return [*map(int, found.groups())]
    if head == "(":  # a function type
        s.balanced()
        s.expect("->")
        return FunctionType(tuple(parse_types(s)))
    if s.at("loc("):
        s.pos += 3
        return Raw(s.balanced())
    return _bare_word(s, typed)


def symbol(s: Scanner, what: str = "a symbol") -> str:
    """The name behind the @."""
    found = s.need(_SYMBOL, what)
    return found.group(1) or found.group(2) or ""


def _number(s: Scanner, found: re.Match[str], typed: bool) -> float:
    text = found.group()
    is_float = "0x" not in text and any(c in text for c in ".eE")
    if len(text) > 400:
        raise s.error("number too long", found.start())
    value = float(text) if is_float else int(text, 0 if "0x" in text else 10)
    if typed and s.accept(":"):
        shape = parse_type(s).shape
        if shape.kind == "f" and "0x" not in text:
            try:
                value = float(np.float32(value)) if shape.dtype == "f32" else float(value)
            except OverflowError:
                raise s.error("number too large for its type", found.start()) from None
    return value


def _bare_word(s: Scanner, typed: bool) -> bool | str | Raw | Dense:
    begin = s.skip()
    word = s.need(_WORD, "an attribute").group()
    if word in ("true", "false"):
        if typed and s.accept(":"):
            parse_type(s)
        return word == "true"
    if word == "dense_resource":
        return _resource(s, begin)
    if word in ("opaque", "sparse"):
        raise s.error(f"{word} constants cannot be read", begin)
    if s.text[s.pos : s.pos + 1] == "<":  # affine_map<…>, complex<f32>, strided<…>
        return Raw(f"{word}<{angle_group(s)}>")
    return word


def _resource(s: Scanner, begin: int) -> Dense:
    """A constant whose bytes stand at the end of the text, behind their alignment (4 bytes)."""
    name = s.need(_RESOURCE, "the name of a resource").group(1)
    s.expect(":")
    kind = parse_type(s)
    if s.resources is None:
        s.resources = dict(_BLOB.findall(s.text, max(s.text.rfind(RESOURCES), 0)))
    if name not in s.resources:
        raise s.error(f"the bytes of resource {name!r} are not at the end of this text", begin)
    return Dense(f'"0x{s.resources[name]}"', kind, begin)


def _array(s: Scanner) -> list[Any]:
    s.need(_WORD, "an element type")
    values: list[Any] = []
    if s.accept(":"):
        while True:
            values.append(attribute(s))
            if not s.accept(","):
                break
    s.expect(">")
    return values


def dictionary(s: Scanner, depth: int = 0, brackets: str = "{}") -> dict[str, object]:
    """`{a = 1, b}` or `<raw a = 1>`; a name without a value is True."""
    result: dict[str, object] = {}

    def entry() -> None:
        s.match(_RAW)
        found = s.need(_KEY, "an attribute's name")
        key = found.group(1) or found.group(2) or ""
        result[key] = attribute(s, depth + 1) if s.accept("=") else True

    s.listed(brackets[0], brackets[1], entry)
    return result


def _hash(s: Scanner, depth: int) -> Any:
    """`#stablehlo<precision DEFAULT>` -> "DEFAULT", `#stablehlo.dot<a = [1]>` -> {"a": [1]};
    `#alias` stays a name."""
    found = s.need(_HASH, "an attribute")
    dialect = found.group(1)
    kind = found.group(2)
    if s.text[s.pos : s.pos + 1] != "<":
        return Raw(found.group())
    begin = s.pos
    text = angle_group(s)
    if dialect not in ("stablehlo", "mhlo", "chlo"):
        return Raw(text)
    if not kind:
        return text.split()[-1] if text.split() else ""
    if kind == ".conv" and "raw" not in text:
        return text
    if "=" not in text:
        return Raw(text)
    s.pos = begin
    return dictionary(s, depth + 1, "<>")


_RAW = re.compile(r"raw\b")


def dense(s: Scanner) -> Dense:
    begin = s.skip()
    found = s.need(_DENSE, "dense<…>")
    s.expect(":")
    return Dense((found.group(1) or found.group(2) or "").strip(), parse_type(s), begin)


def dense_literal(s: ErrorAt, value: Dense) -> tuple[Literal, bool]:
    """(literal, whether it is a splat: one value, of rank 0, that fills the type)."""
    shape = value.type.shape
    text = value.text
    if shape.is_tuple or any(d < 0 for d in shape.sizes) or DTYPES[shape.dtype].kind == "t":
        raise s.error(f"a constant needs a static array type, not {shape}", value.position)
    if isinstance(text, bytes):
        return _from_bytes(s, text, shape, value.position)
    if text[:1] == '"':
        return _from_hex(s, text[1:-1], shape, value.position)
    splat = "[" not in text and bool(text)
    inner = Shape(shape.dtype) if splat else shape
    if splat:
        elements = [text]
    else:
        elements = literal_elements(
            s, text.replace("[", "{").replace("]", "}"), inner, value.position
        )
        if len(elements) != inner.size:
            raise s.error(
                f"{shape} has {shape.size} elements, the constant {len(elements)}",
                value.position,
            )
    return _from_elements(s, elements, inner, value.position), splat


def _from_hex(s: ErrorAt, text: str, shape: Shape, position: int) -> tuple[Literal, bool]:
    """The raw little-endian bytes of all elements, or of the one that fills the type."""
    if not re.fullmatch(r"0x(?:[0-9A-Fa-f]{2})*", text):
        raise s.error("expected a string of hexadecimal bytes", position)
    return _from_bytes(s, bytes.fromhex(text[2:]), shape, position)


def _from_bytes(s: ErrorAt, data: bytes, shape: Shape, position: int) -> tuple[Literal, bool]:
    size = DTYPES[shape.dtype].itemsize
    count = math.prod(shape.sizes)
    if shape.dtype == "pred":
        if len(data) == (count + 7) // 8 and len(data) != count:
            data = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[:count].tobytes()
        data = bytes(b != 0 for b in data)
    if len(data) == size and shape.sizes:
        return Literal(shape.dtype, (), data), True
    if len(data) != size * count:
        raise s.error(
            f"{shape} has {count} elements of {size} bytes, the constant {len(data)} bytes",
            position,
        )
    return Literal(shape.dtype, shape.sizes, data), False


def _from_elements(s: ErrorAt, elements: list[str], shape: Shape, position: int) -> Literal:
    """Like parse_literal, with MLIR's hexadecimal bit patterns for floats."""
    row = DTYPES[shape.dtype]
    if row.kind in "su":
        elements = [str(int(e, 16)) if _HEX.fullmatch(e) and len(e) < 40 else e for e in elements]
    if row.kind not in "fc" or not any("0x" in e for e in elements):
        return literal_of(s, elements, shape, position)
    part = {"c64": "f32", "c128": "f64"}.get(shape.dtype, shape.dtype)
    size = DTYPES[part].itemsize
    parts = [p.strip() for e in elements for p in (e[1:-1].split(",") if e[0] == "(" else [e])]
    plain = ["0" if _HEX.fullmatch(p) else p for p in parts]
    data = bytearray(literal_of(s, plain, Shape(part, (len(plain),)), position).data)
    for i, p in enumerate(parts):
        if _HEX.fullmatch(p):
            bits = int(p, 16) if len(p) < 40 else 1 << 200
            if bits >= 1 << (8 * size):
                raise s.error(f"{p} does not fit {shape.dtype}", position)
            data[i * size : (i + 1) * size] = bits.to_bytes(size, "little")
    if len(data) != row.itemsize * shape.size:
        raise s.error(f"bad {shape.dtype} constant", position)
    return Literal(shape.dtype, shape.sizes, bytes(data))


def integers(s: ErrorAt, value: Any, position: int) -> Ints:
    """A list attribute, `array<i64: …>` or `dense<…> : tensor<…xi64>`, flattened."""
    if isinstance(value, Dense):
        found, splat = dense_literal(s, value)
        count = math.prod(value.type.shape.sizes)
        if count > 1 << 20:
            raise s.error("integer list too long", position)
        flat = found.numpy().ravel().tolist()
        return tuple(int(v) for v in (flat * count if splat else flat))
    if isinstance(value, (list, tuple)):
        if all(type(v) in (int, bool) for v in value):
            return tuple(int(v) for v in value)
        return tuple(v for inner in value for v in integers(s, inner, position))
    if type(value) in (int, bool):
        return (int(value),)
    raise s.error("expected a list of integers", position)
