"""Literal text such as `{ { 1, 2 }, { nan, -inf } }` -> Literal."""

import re
from typing import Any

import numpy as np

from ..ir import DTYPES, Literal, Shape, encode, numpy_dtype
from .scanner import ErrorAt

_COMMENT = re.compile(r"/\*(?s:.*?)\*/")
_TOKEN = re.compile(r"\{[^{}]*+\}|[{},]|\s++|(?s:.)")
_ELEMENT = re.compile(r"\((?:[^()]++|\([^()]*+\))*+\)|[^\s,()]++(?:\([^()]*+\))?")
_NAN = re.compile(r"([+-]?)nan\((?:0x([0-9a-fA-F]{1,16})|)\)")
_NUMBER = re.compile(
    r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?inf|[+-]?nan(?:\(.*\))?"
    r"|[+-]?infinity",
    re.I,
)
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_TRUTH = {"true": True, "false": False, "1": True, "0": False}


def parse_literal(scanner: ErrorAt, text: str, shape: Shape, position: int) -> Literal:
    """The literal of an array `shape` written as `text`, which starts at `position`. Raises
    ParseError.

    Memory stays proportional to the text: the elements are counted before an array is made.
    """
    if not shape.is_static:
        raise scanner.error(f"a constant needs static sizes, not {shape}", position)
    text = _COMMENT.sub("", text)
    if "..." in text:
        raise scanner.error(
            "the values of this constant were left out when it was printed ('...')",
            position,
        )
    elements = literal_elements(scanner, text, shape, position)
    if len(elements) != shape.size:
        raise scanner.error(
            f"{shape} has {shape.size} elements, the constant {len(elements)}",
            position,
        )
    return literal_of(scanner, elements, shape, position)


def literal_of(scanner: ErrorAt, elements: list[str], shape: Shape, position: int) -> Literal:
    """The literal of element texts in row-major order."""
    kind = shape.kind
    dtype = shape.dtype
    convert = {
        "p": _truths,
        "s": _integers,
        "u": _integers,
        "f": _floats,
        "c": _complexes,
    }.get(kind)
    if convert is None:
        raise scanner.error(f"no constants of type {dtype}", position)
    try:
        values = convert(elements, dtype)
    except (ValueError, OverflowError) as error:
        raise scanner.error(f"bad {dtype} constant: {error}", position) from None
    return Literal(dtype, shape.sizes, encode(values.reshape(shape.sizes), dtype))


def literal_elements(scanner: ErrorAt, text: str, shape: Shape, position: int) -> list[str]:
    """The element texts; the nesting of braces must be the shape's."""
    if not shape.dims:
        found = _ELEMENT.findall(text)
        if len(found) != 1 or text.strip() != found[0]:
            raise scanner.error(
                f"expected one value of {shape}, found {text.strip()[:40]!r}",
                position,
            )
        return found
    if 0 in shape.dims:
        if text.strip(" \t\n{},"):
            raise scanner.error(f"{shape} has no elements", position)
        return []
    elements: list[str] = []
    counts = [0]  # items seen at each open level
    dims = shape.dims
    for token in _TOKEN.findall(text):
        depth = len(counts) - 1
        if token[0].isspace():
            continue
        if token == ",":
            continue
        if token == "{":
            if depth >= shape.rank - 1:
                raise scanner.error(f"the constant is nested deeper than {shape}", position)
            counts.append(0)
        elif token == "}":
            if depth == 0 or counts.pop() != dims[depth - 1]:
                raise scanner.error(f"the constant does not have the sizes of {shape}", position)
            counts[-1] += 1
        elif token[0] == "{" and depth == shape.rank - 1:
            row = _ELEMENT.findall(token[1:-1])
            if len(row) != dims[-1]:
                raise scanner.error(
                    f"a row of the constant has {len(row)} elements, {shape} needs {dims[-1]}",
                    position,
                )
            elements += row
            counts[-1] += 1
        else:
            raise scanner.error(f"the constant is not nested like {shape}", position)
    if counts != [1]:
        raise scanner.error(f"the constant does not have the sizes of {shape}", position)
    return elements


def _truths(elements: list[str], dtype: str) -> np.ndarray:
    if bad := next((e for e in elements if e not in _TRUTH), None):
        raise ValueError(f"{bad[:40]!r} is not true or false")
    return np.array([_TRUTH[e] for e in elements], bool)


def _integers(elements: list[str], dtype: str) -> np.ndarray:
    bits = DTYPES[dtype].bits
    signed = DTYPES[dtype].kind == "s"
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    values = []
    for e in elements:
        if not _INTEGER.fullmatch(e):
            raise ValueError(f"{e[:40]!r} is no integer")
        values.append(int(e))
    if values and not low <= min(values) <= max(values) <= high:
        raise ValueError(f"{min(values) if min(values) < low else max(values)} is out of range")
    return np.array(values, numpy_dtype(dtype))


def _floats(elements: list[str], dtype: str) -> np.ndarray:
    for e in elements:
        if not _NUMBER.fullmatch(e):
            raise ValueError(f"{e[:40]!r} is no number")
    payloads = [(i, m) for i, e in enumerate(elements) if "(" in e and (m := _NAN.fullmatch(e))]
    wide = np.array([float(e.partition("(")[0]) for e in elements], np.float64)
    with np.errstate(all="ignore"):
        values = wide.astype(numpy_dtype(dtype))
    if np.any(np.isinf(values) & ~np.isinf(wide)):
        raise ValueError(f"{wide[np.isinf(values) & ~np.isinf(wide)][0]} is out of range")
    if payloads and not dtype.startswith("f8"):
        bits = values.view(f"u{values.dtype.itemsize}")
        fraction = {2: 10, 4: 23, 8: 52}[values.dtype.itemsize]
        for i, m in payloads:
            payload = int(m.group(2) or "0", 16) << (16 if dtype == "bf16" else 0)
            if 0 < payload < 1 << fraction:
                bits[i] = int(bits[i]) >> fraction << fraction | payload
    return values


def _complexes(elements: list[str], dtype: str) -> np.ndarray:
    parts = [e[1:-1].split(",") if e[0] == "(" else [e, "0"] for e in elements]
    if bad := next((p for p in parts if len(p) != 2), None):
        raise ValueError(f"{','.join(bad)[:40]!r} is no complex number")
    part_type = "f32" if dtype == "c64" else "f64"
    flat = _floats([t.strip() for p in parts for t in p], part_type)
    return flat.view(numpy_dtype(dtype))


def parse_nested_literal(
    scanner: ErrorAt, text: str, shape: Shape, position: int, depth: int = 0
) -> Literal | tuple[Any, ...]:
    """A Literal, or for a tuple shape a tuple of them: `(1, {2, 3})`."""
    if not shape.is_tuple:
        return parse_literal(scanner, text, shape, position)
    text = _COMMENT.sub("", text).strip()
    if depth > 20 or text[:1] != "(" or text[-1:] != ")":
        raise scanner.error(f"expected a tuple constant of {shape}", position)
    items = []
    level = 0
    begin = 1
    for i in range(1, len(text) - 1):
        level += {"(": 1, "{": 1, ")": -1, "}": -1}.get(text[i], 0)
        if text[i] == "," and level == 0:
            items.append(text[begin:i])
            begin = i + 1
    if text[begin:-1].strip():
        items.append(text[begin:-1])
    if len(items) != len(shape.elements):
        raise scanner.error(
            f"{shape} has {len(shape.elements)} elements, the constant {len(items)}",
            position,
        )
    return tuple(
        parse_nested_literal(scanner, t, s, position, depth + 1)
        for t, s in zip(items, shape.elements)
    )
