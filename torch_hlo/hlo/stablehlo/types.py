"""MLIR types of StableHLO text: `tensor<2x?xf32>`, `tuple<…>`, `!stablehlo.token`, quantized
element types. A future is the tuple of what it will hold.

A static tensor is a Shape. An unknown size `?` is the Unknown object in `dims` until conversion
gives it a symbol."""

from __future__ import annotations

import re

from torch_hlo.frozen import frozen

from ..ir import Ints, Shape, tuple_shape
from ..text.scanner import MAX_INT, Scanner

UNKNOWN = -1  # in `dims`: a size that the text leaves open
MAX_DEPTH = 50
ELEMENTS = {
    "i1": "pred",
    "i2": "s2",
    "i4": "s4",
    "i8": "s8",
    "i16": "s16",
    "i32": "s32",
    "i64": "s64",
    "index": "s64",
    "si2": "s2",
    "si4": "s4",
    "si8": "s8",
    "si16": "s16",
    "si32": "s32",
    "si64": "s64",
    "ui2": "u2",
    "ui4": "u4",
    "ui8": "u8",
    "ui16": "u16",
    "ui32": "u32",
    "ui64": "u64",
    "f16": "f16",
    "bf16": "bf16",
    "f32": "f32",
    "f64": "f64",
    "complex<f32>": "c64",
    "complex<f64>": "c128",
    "f8E4M3FN": "f8e4m3fn",
    "f8E5M2": "f8e5m2",
    "f8E4M3FNUZ": "f8e4m3fnuz",
    "f8E5M2FNUZ": "f8e5m2fnuz",
    "f8E4M3": "f8e4m3",
    "f8E3M4": "f8e3m4",
    "f8E4M3B11FNUZ": "f8e4m3b11fnuz",
    "f4E2M1FN": "f4e2m1fn",
    "f8E8M0FNU": "f8e8m0fnu",
}
NAMES = {v: k for k, v in reversed(ELEMENTS.items())}
_DIMS = re.compile(r"((?:(?:[0-9]{1,19}|\?)\s*x\s*)*+)")
_ELEMENT = re.compile(r"(complex<f(?:32|64)>|[A-Za-z]\w*)")
_SCALAR = re.compile(
    r"(?:[su]?i(?:1|2|4|8|16|32|64)|index|bf16|f(?:16|32|64)|f[48]E\w+|complex<f(?:32|64)>)\b"
)
_NUMBER = re.compile(
    r"[+-]?(?:0x[0-9A-Fa-f]{1,16}|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
)


@frozen
class Quantized:
    """`!quant.uniform<i8:f32:1, {0.1:2, 0.2:3}>`: integers that stand for (value - zero point) *
    scale."""

    storage: str
    expressed: str
    scales: tuple[float, ...]
    zero_points: Ints
    axis: int | None = None
    limits: tuple[int, int] | None = None


@frozen
class Type:
    """A value's type: `shape` (of the stored values), and how to read them when they are
    quantized."""

    shape: Shape
    quantized: Quantized | None = None


def parse_type(s: Scanner, depth: int = 0) -> Type:
    """A tensor, tuple, token or scalar type. Raises ParseError."""
    if depth > MAX_DEPTH:
        raise s.error(f"types nest deeper than {MAX_DEPTH}")
    if s.accept("tensor<"):
        return _tensor(s)
    if s.accept("tuple<") or s.accept("!stablehlo.future<"):
        parts = []
        while not s.accept(">"):
            parts.append(parse_type(s, depth + 1).shape)
            s.accept(",")
        return Type(tuple_shape(*parts))
    if s.accept("!stablehlo.token") or s.accept("!mhlo.token"):
        return Type(Shape("token"))
    if found := s.match(_SCALAR):
        return Type(Shape(_element(s, found.group())))
    raise s.error(f"expected a type, found {s.found()}")


def parse_types(s: Scanner) -> list[Type]:
    """`(type, …)`, or one type."""
    return s.listed("(", ")", lambda: parse_type(s)) if s.at("(") else [parse_type(s)]


def _tensor(s: Scanner) -> Type:
    dims = []
    for text in re.findall(r"[0-9]+|\?", s.need(_DIMS, "sizes").group()):
        dims.append(UNKNOWN if text == "?" else int(text))
        if dims[-1] > MAX_INT:
            raise s.error(f"size {text} does not fit 64 bits")
    quantized = None
    if s.at("!quant.uniform<"):
        quantized = _quantized(s)
        dtype = quantized.storage
    else:
        dtype = _element(s, s.need(_ELEMENT, "an element type").group())
    if s.accept(","):  # an encoding; bounds of unknown sizes only help allocation
        angle_group(s, opened=True)
    else:
        s.expect(">")
    return Type(Shape(dtype, tuple(dims)), quantized)


def _element(s: Scanner, text: str) -> str:
    if text not in ELEMENTS:
        raise s.error(
            f"unknown element type {text!r}; known are {', '.join(ELEMENTS)}",
            s.pos - len(text),
        )
    return ELEMENTS[text]


def _number(s: Scanner) -> float:
    text = s.need(_NUMBER, "a number").group()
    return float(int(text, 16)) if "0x" in text else float(text)


def _quantized(s: Scanner) -> Quantized:
    s.expect("!quant.uniform<")
    begin = s.pos
    storage = _element(s, re.sub(r"^u(?=\d)", "ui", s.need(_ELEMENT, "a storage type").group()))
    limits = None
    if s.accept("<"):
        low = s.integer()
        s.expect(":")
        limits = (low, s.integer())
        s.expect(">")
    s.expect(":")
    expressed = _element(s, s.need(_ELEMENT, "an expressed type").group())
    axis = s.integer() if s.accept(":") else None
    s.expect(",")

    def pair() -> tuple[float, int]:
        scale = _number(s)
        return scale, s.integer() if s.accept(":") else 0

    pairs = s.listed("{", "}", pair) if s.at("{") else [pair()]
    s.expect(">")
    if not pairs or any(scale <= 0 for scale, _ in pairs) or (axis is None and len(pairs) != 1):
        raise s.error("bad quantized type", begin)
    return Quantized(
        storage,
        expressed,
        tuple(p[0] for p in pairs),
        tuple(p[1] for p in pairs),
        axis,
        limits,
    )


_ANGLE = re.compile(r'->|[<>]|"(?:[^"\\\n]++|\\.)*+"')


def angle_group(s: Scanner, opened: bool = False) -> str:
    """The raw text inside `<…>`, nested ones included."""
    if not opened:
        s.expect("<")
    begin = s.pos
    depth = 1
    while True:
        found = _ANGLE.search(s.text, s.pos)
        if not found:
            raise s.error("this < is not closed", begin)
        s.pos = found.end()
        depth += {"<": 1, ">": -1}.get(found.group(), 0)
        if depth == 0:
            return s.text[begin : found.start()]


def _quantized_text(q: Quantized) -> str:
    pairs = ", ".join(f"{x:.17e}:{zero}" for x, zero in zip(q.scales, q.zero_points, strict=True))
    values = f", {pairs}" if q.axis is None else f":{q.axis}, {{{pairs}}}"
    return f"!quant.uniform<{NAMES[q.storage].replace('ui', 'u')}:{NAMES[q.expressed]}{values}>"


def type_text(found: Shape | Type) -> str:
    """MLIR's text of a type, with ? for symbolic sizes."""
    shape = found.shape if isinstance(found, Type) else found
    if shape.is_tuple:
        return "tuple<" + ", ".join(map(type_text, shape.elements)) + ">"
    if shape.dtype == "token":
        return "!stablehlo.token"
    q = found.quantized if isinstance(found, Type) else None
    dims = "".join(f"{d if isinstance(d, int) else '?'}x" for d in shape.dims)
    return f"tensor<{dims}{NAMES[shape.dtype] if q is None else _quantized_text(q)}>"
