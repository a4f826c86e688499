"""How the dialects encode attributes and types: builtin, VHLO (StableHLO's portable form), Shardy.

A row reads what stands behind the code of an attribute: `(tables, cursor) -> value`. Values are
those of hlo/stablehlo/attributes.py; a sharding becomes Shardy's text, which sdy.py reads.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ..ir import DTYPES, Shape, tuple_shape
from ..stablehlo.attributes import Dense, FunctionType, Raw, Symbol, attribute
from ..stablehlo.types import ELEMENTS, UNKNOWN, Quantized, Type, parse_type
from ..text.scanner import MAX_INT, ParseError, Scanner
from .cursor import Cursor
from .tables import Tables

Read = Callable[[Tables, Cursor], Any]
DYNAMIC = -(1 << 63)
_FLOATS = {"f16": "<e", "f32": "<f", "f64": "<d"}
_SIGNS = ("i", "si", "ui")


def read_attribute(t: Tables, dialect: str, at: Cursor, encoded: bool) -> Any:
    if not encoded:
        return _from_text(at, attribute)
    return _row(ATTRIBUTES, "attribute", dialect, at)(t, at)


def read_type(t: Tables, dialect: str, at: Cursor, encoded: bool) -> Any:
    if not encoded:
        return _from_text(at, parse_type)
    return _row(TYPES, "type", dialect, at)(t, at)


def _row(table: dict[str, dict[int, Read]], what: str, dialect: str, at: Cursor) -> Read:
    begin = at.pos
    code = at.varint()
    rows = table.get(dialect)
    if rows is None:
        raise at.error(
            f"{what}s of dialect {dialect!r} cannot be read; write the module with"
            " stablehlo.serialize_portable_artifact",
            begin,
        )
    if code not in rows:
        raise at.error(f"{what} {code} of dialect {dialect!r} is not supported", begin)
    return rows[code]


def _from_text(at: Cursor, parse: Callable[[Scanner], Any]) -> Any:
    begin = at.pos
    try:
        return parse(Scanner(at.terminated()))
    except ParseError as error:
        raise at.error(str(error), begin) from None


# Types. An element type is a Type of rank 0, a function the list of its results.


def _element(name: str) -> Read:
    found = Type(Shape(ELEMENTS[name]))
    return lambda t, at: found


def _need_type(value: Any, at: Cursor) -> Type:
    if not isinstance(value, Type):
        raise at.error("expected the type of a value")
    return value


def _number_type(t: Tables, at: Cursor) -> Shape:
    found = _need_type(t.type(at), at).shape
    if found.is_tuple or found.rank:
        raise at.error(f"expected the type of a number, not {found}")
    return found


def _types(t: Tables, at: Cursor) -> list[Type]:
    return [_need_type(t.type(at), at) for _ in range(at.count())]


def _function_type(t: Tables, at: Cursor) -> FunctionType:
    _types(t, at)
    return FunctionType(tuple(_types(t, at)))


def _tensor(t: Tables, at: Cursor) -> Type:
    dims = _bounds(t, at)
    element = _need_type(t.type(at), at)
    if element.shape.is_tuple or element.shape.rank:
        raise at.error(f"{element.shape} cannot be an element")
    dims = [UNKNOWN if d in (DYNAMIC, -1) else d for d in dims]
    if any(d != UNKNOWN and not 0 <= d <= MAX_INT for d in dims):
        raise at.error(f"bad sizes {dims}")
    return Type(Shape(element.shape.dtype, tuple(dims)), element.quantized)


def _encoded_tensor(t: Tables, at: Cursor) -> Type:
    t.attribute(at)  # bounds of unknown sizes only help allocation
    return _tensor(t, at)


def _complex(t: Tables, at: Cursor) -> Type:
    part = _number_type(t, at).dtype
    if part not in ("f32", "f64"):
        raise at.error(f"complex numbers of {part} are not supported")
    return Type(Shape({"f32": "c64", "f64": "c128"}[part]))


def _tuple(t: Tables, at: Cursor) -> Type:
    return Type(tuple_shape(*(part.shape for part in _types(t, at))))


def _integer_type(t: Tables, at: Cursor) -> Type:
    code = at.varint()
    name = f"{_SIGNS[min(code & 3, 2)]}{code >> 2}"
    if name not in ELEMENTS:
        raise at.error(f"type {name[:30]} is not supported")
    return Type(Shape(ELEMENTS[name]))


def _quantized(axis: bool) -> Read:
    def read(t: Tables, at: Cursor) -> Type:
        signed = at.varint() & 1
        storage, expressed = (_number_type(t, at).dtype for _ in range(2))
        if not signed and storage[0] == "s":  # MLIR's integers have no sign, the flag has it
            storage = "u" + storage[1:]
        if axis:
            place: int | None = at.varint()
            limits = at.signed(), at.signed()
            scales = [_double(at) for _ in range(at.count())]
            zeros = _bounds(t, at)
        else:
            place = None
            scales = [_double(at)]
            zeros = [at.signed()]
            limits = at.signed(), at.signed()
        if storage[0] not in "su" or len(scales) != len(zeros) or not scales or min(scales) <= 0:
            raise at.error("bad quantized type")
        bits = DTYPES[storage].bits
        low = 0 if storage[0] == "u" else -(1 << (bits - 1))
        full = limits == (low, low + (1 << bits) - 1)
        kind = Quantized(
            storage, expressed, tuple(scales), tuple(zeros), place, None if full else limits
        )
        return Type(Shape(storage), kind)

    return read


def _none(t: Tables, at: Cursor) -> None:
    return None


_TOKEN = Type(Shape("token"))
VHLO_ELEMENTS = {
    0: "i1",
    2: "bf16",
    3: "f16",
    4: "f32",
    5: "f64",
    6: "f8E4M3FN",
    7: "f8E5M2",
    9: "index",
    10: "i4",
    11: "i8",
    12: "i16",
    13: "i32",
    14: "i64",
    15: "ui4",
    16: "ui8",
    17: "ui16",
    18: "ui32",
    19: "ui64",
    27: "f8E4M3FNUZ",
    28: "f8E5M2FNUZ",
    29: "f8E4M3B11FNUZ",
    31: "i2",
    32: "ui2",
    35: "f8E4M3",
    36: "f8E3M4",
    37: "f4E2M1FN",
    40: "f8E8M0FNU",
}
_BUILTIN_ELEMENTS = {1: "index", 3: "bf16", 4: "f16", 5: "f32", 6: "f64"}
TYPES: dict[str, dict[int, Read]] = {
    "vhlo": {
        **{code: _element(name) for code, name in VHLO_ELEMENTS.items()},
        1: _complex,
        8: _function_type,
        20: _tensor,
        21: _encoded_tensor,
        22: lambda t, at: _TOKEN,
        23: _tuple,
        24: _quantized(axis=False),
        30: _quantized(axis=True),
        33: _none,
        34: _none,  # tf32: only names the algorithm of a product
        42: _tuple,  # of a future
    },
    "stablehlo": {0: lambda t, at: _TOKEN},
    "builtin": {
        **{code: _element(name) for code, name in _BUILTIN_ELEMENTS.items()},
        0: _integer_type,
        2: _function_type,
        9: _complex,
        12: _none,
        13: _tensor,
        14: _encoded_tensor,
        15: _tuple,
    },
}


# Attributes


def _symbol(t: Tables, at: Cursor) -> Symbol:
    return Symbol(str(t.attribute(at)))


def _array(t: Tables, at: Cursor) -> list[Any]:
    return [t.attribute(at) for _ in range(at.count())]


def _dictionary(t: Tables, at: Cursor) -> dict[str, Any]:
    pairs = [(t.attribute(at), t.attribute(at)) for _ in range(at.count())]
    return {str(name): value for name, value in pairs}


def _bool(t: Tables, at: Cursor) -> bool:
    return bool(at.varint())


def _word(words: list[str]) -> Read:
    def read(t: Tables, at: Cursor) -> str:
        return str(t.pick(words, at.varint(), f"word among {', '.join(words)}", at))

    return read


def _integer(t: Tables, at: Cursor) -> int:
    shape = _number_type(t, at)
    if shape.kind not in "sup":
        raise at.error(f"expected an integer type, not {shape}")
    bits = 1 if shape.dtype == "pred" else DTYPES[shape.dtype].bits
    value = at.integer(bits)
    return value % (1 << bits) if shape.kind in "up" else value


def _builtin_integer(t: Tables, at: Cursor) -> int | bool:
    """Booleans are integers of one bit."""
    begin = at.pos
    shape = _number_type(t, at)
    at.pos = begin
    value = _integer(t, at)
    return bool(value) if shape.dtype == "pred" else value


def _double(at: Cursor) -> float:
    return float(struct.unpack("<d", struct.pack("<q", _fits(at.signed(), at)))[0])


def _fits(value: int, at: Cursor) -> int:
    if not -(1 << 63) <= value < 1 << 63:
        raise at.error("number too large")
    return value


def _float(t: Tables, at: Cursor) -> float:
    dtype = _number_type(t, at).dtype
    bits = DTYPES[dtype].bits
    raw = at.integer(bits) % (1 << bits)
    if dtype == "bf16":
        raw = raw << 16
        dtype = "f32"
        bits = 32
    if dtype not in _FLOATS:
        raise at.error(f"numbers of type {dtype} are not supported as attributes")
    return float(struct.unpack(_FLOATS[dtype], raw.to_bytes(bits // 8, "little"))[0])


def _dense(t: Tables, at: Cursor) -> Dense:
    begin = at.pos
    kind = _need_type(t.type(at), at)
    return Dense(at.bytes(at.varint()), kind, begin)


def _dense_array(t: Tables, at: Cursor) -> list[int]:
    begin = at.pos
    dtype = _number_type(t, at).dtype
    count = at.varint()
    data = at.bytes(at.varint())
    size = DTYPES[dtype].itemsize
    if dtype[0] not in "sup" or len(data) != size * count:
        raise at.error(f"bad array of {count} {dtype}", begin)
    parts = (data[i : i + size] for i in range(0, len(data), size))
    return [int.from_bytes(p, "little", signed=dtype[0] == "s") for p in parts]


def _fields(**reads: Read) -> Read:
    return lambda t, at: {name: read(t, at) for name, read in reads.items()}


def _optional(t: Tables, at: Cursor) -> Any:
    return t.attribute(at) if at.varint() else None


def _unread(t: Tables, at: Cursor) -> Raw:
    """What no rule asks for, such as locations and accuracies."""
    return Raw("")


def _bounds(t: Tables, at: Cursor) -> list[int]:
    return [at.signed() for _ in range(at.count())]


# Shardy's attributes as text


def _text_of(t: Tables, at: Cursor) -> str:
    value = t.attribute(at)
    if isinstance(value, Symbol):
        return f"@{value.name}"
    if not isinstance(value, Raw):
        raise at.error("expected an attribute of Shardy")
    return value.text


def _join(t: Tables, at: Cursor) -> str:
    return ", ".join(_text_of(t, at) for _ in range(at.count()))


def _raw(read: Callable[[Tables, Cursor], str]) -> Read:
    return lambda t, at: Raw(read(t, at))


def _manual_axes(t: Tables, at: Cursor) -> str:
    return ", ".join(f'"{t.attribute(at)}"' for _ in range(at.count()))


def _mesh_axis(t: Tables, at: Cursor) -> str:
    return f'"{t.string(at)}"={at.signed()}'


def _mesh(t: Tables, at: Cursor) -> str:
    axes = _join(t, at)
    ids = _bounds(t, at)
    found = f", device_ids={ids}" if ids else ""
    return f"mesh<[{axes}]{found}>"


def _sub_axis(t: Tables, at: Cursor) -> str:
    return f":({at.signed()}){at.signed()}"


def _axis(t: Tables, at: Cursor) -> str:
    name = t.string(at)
    part = t.optional(at)
    return f'"{name}"{part.text if isinstance(part, Raw) else ""}'


def _dim_sharding(t: Tables, at: Cursor) -> str:
    axes = _join(t, at)
    closed = at.byte()
    priority, given = at.flagged()
    parts = [*([axes] if axes else []), *([] if closed else ["?"])]
    return "{" + ", ".join(parts) + "}" + (f"p{priority}" if given else "")


def _sharding(parts: int) -> Read:
    """Mesh and dimensions, then `parts` lists of axes."""

    def read(t: Tables, at: Cursor) -> Raw:
        text = f"{_text_of(t, at)}, [{_join(t, at)}]"
        for name in ("replicated", "unreduced")[:parts]:
            if axes := _join(t, at):
                text += f", {name}={{{axes}}}"
        return Raw(text)

    return read


def _shardings(t: Tables, at: Cursor) -> str:
    return "[" + ", ".join(f"<{_text_of(t, at)}>" for _ in range(at.count())) + "]"


# VHLO's enumerations by the attribute that they are: its code, and the words in their order.
WORDS = {
    "comparison_direction": (3, "EQ NE GE GT LE LT"),
    "compare_type": (4, "NOTYPE FLOAT TOTALORDER SIGNED UNSIGNED"),
    "api_version": (5, "UNSPECIFIED ORIGINAL STATUS_RETURNING UNIFIED TYPED_FFI"),
    "fft_type": (7, "FFT IFFT RFFT IRFFT"),
    "precision_config": (11, "DEFAULT HIGH HIGHEST"),
    "rng_algorithm": (12, "DEFAULT THREE_FRY PHILOX"),
    "rng_distribution": (13, " UNIFORM NORMAL"),
    "transpose_a": (16, "TRANSPOSE_INVALID NO_TRANSPOSE TRANSPOSE ADJOINT"),
}
ATTRIBUTES: dict[str, dict[int, Read]] = {
    "builtin": {
        0: _array,
        1: _dictionary,
        2: Tables.string,
        3: Tables.string,
        4: _symbol,
        5: _symbol,
        6: Tables.type,
        7: lambda t, at: True,
        8: _builtin_integer,
        9: _float,
        **dict.fromkeys(range(10, 16), _unread),
        17: _dense_array,
        18: _dense,
    },
    "vhlo": {
        1: _array,
        2: _bool,
        6: _dictionary,
        8: _float,
        9: _integer,
        10: _unread,
        14: Tables.string,
        15: _dense,
        17: Tables.type,
        **{code: _word(words.split(" ")) for code, words in WORDS.values()},
        18: _bounds,
        19: _unread,
        20: _unread,
        21: lambda t, at: [at.signed(), at.signed()],
        22: _fields(name=Tables.attribute, sub_axis_info=_optional),
        23: _fields(mesh=Tables.attribute, axes=Tables.attribute),
        24: _fields(name=Tables.attribute, size=lambda t, at: at.signed()),
        25: _fields(axes=Tables.attribute, device_ids=Tables.optional),
    },
    "chlo": {
        code: _word(WORDS[key][1].split(" "))
        for code, key in enumerate(("comparison_direction", "compare_type"))
    },
    "sdy": {
        0: _raw(_manual_axes),
        1: _raw(_mesh_axis),
        2: _raw(_mesh),
        3: _raw(_sub_axis),
        4: _raw(_axis),
        5: _raw(_dim_sharding),
        6: _sharding(1),
        7: _raw(_shardings),
        **dict.fromkeys(range(8, 15), _unread),
        15: _sharding(2),
        16: _raw(_shardings),
    },
}
