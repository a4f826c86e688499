"""Meaning of the pointwise opcodes on register values: tables opcode x kind of element type.

A value of type bf16, f16 or f8 is computed in `float` and rounded after each opcode; `pred` is i1;
integers narrower than a byte are kept wrapped in i8; complex values are pairs. `decode` and
`encode` go between memory and registers."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import DTYPES, OPCODES, DType, Literal

from . import complex as complex_math, emit, math as functions, math_error, small_float
from .emit import Emit, Typed
from .math_function import INF

Value = str | tuple[str, str]
Attrs = Mapping[str, Any]  # of an instruction


def flat(values: Iterable[Value]) -> list[str]:
    """Operands of values, two for a pair."""
    return [p for v in values for p in (v if isinstance(v, tuple) else (v,))]


def grouped(flat: Iterable[str], types: Iterable[str]) -> list[Value]:
    """The values of `types` that `flat` made operands of."""
    rest = iter(flat)
    return [(next(rest), next(rest)) if STORAGE[t].parts == 2 else next(rest) for t in types]


@frozen
class Storage:
    """`memory`: LLVM type of one element (of one part of a complex number) in memory; `register`:
    the type it is computed in."""

    memory: str
    register: str
    bytes: int
    parts: int = 1


STORAGE: dict[str, Storage] = {
    "pred": Storage("i8", "i1", 1), "bf16": Storage("i16", "float", 2),
    "f16": Storage("half", "float", 2),
    "f32": Storage("float", "float", 4), "f64": Storage("double", "double", 8),
    "c64": Storage("float", "float", 4, 2), "c128": Storage("double", "double", 8, 2),
}  # fmt: skip
for _d in DTYPES.values():
    if _d.kind in "su":
        STORAGE[_d.name] = Storage(f"i{_d.itemsize * 8}", f"i{_d.itemsize * 8}", _d.itemsize)
    elif _d.name in small_float.FORMATS and _d.bits <= 8:
        STORAGE[_d.name] = Storage("i8", "float", 1)


def single(value: Value) -> str:
    """A value that is known to be no pair."""
    assert isinstance(value, str)
    return value


# -- memory form <-> register form
def decode(e: Emit, dtype: str, raw: str) -> str:
    """Register value of an element (or part) as loaded."""
    if dtype == "pred":
        t = e.typed("i8")
        return t.cmp("ne", raw, 0)
    if dtype == "bf16":
        t = e.typed("i32")
        value = e.typed("float").from_bits(t.bin("shl", e.cast("zext", raw, "i16", "i32"), 16))
    elif dtype == "f16":
        value = (
            e.cast("fpext", raw, "half", "float")
            if _has_half(e)
            else small_float.decode(e, dtype, e.cast("bitcast", raw, "half", "i16"))
        )
    elif dtype in small_float.FORMATS:
        value = small_float.decode(e, dtype, raw)
    else:
        return raw
    e.unit.encoded[dtype, value] = raw
    return value


def encode(e: Emit, dtype: str, value: str) -> str:
    """Memory form of a register value; one that was decoded, or rounded, has it already."""
    if (dtype, value) in e.unit.encoded:
        return e.unit.encoded[dtype, value]
    if dtype == "pred":
        return e.cast("zext", value, "i1", "i8")
    if dtype == "bf16":
        return _bf16(e, value)
    if dtype == "f16":
        return (
            _rounded(e, value, "half")
            if _has_half(e)
            else e.cast("bitcast", small_float.encode(e, dtype, value), "i16", "half")
        )
    if dtype in small_float.FORMATS:
        return small_float.encode(e, dtype, value)
    return value


def _has_half(e: Emit) -> bool:
    """Whether conversions of f16 are instructions. Otherwise LLVM would call functions that nobody
    provides."""
    return e.unit.has("f16c") or e.unit.has("neon")


def _rounded(e: Emit, value: str, to: str) -> str:
    """Floats rounded by themselves. LLVM moves a scalar's `copysign` behind the rounding, and then
    rounds where the sign came from, too: a double, on x86 by a function that nobody provides. It
    moves a `select` of a constant behind that of vectors to bf16, and has no such constants."""
    if e.unit.has("avx") and (e.lanes == 1 or to == "bfloat"):
        value = _fenced(e, value, e.lanes)
    return e.cast("fptrunc", value, "float", to)


def _fenced(e: Emit, floats: str, lanes: int) -> str:
    """The same floats, which LLVM may not look behind."""
    t, name = (f"<{lanes} x float>", f"v{lanes}f32") if lanes > 1 else ("float", "f32")
    return e.op(f"call {t} @llvm.arithmetic.fence.{name}({t} {floats})")


def _bf16(e: Emit, value: str) -> str:
    """The i16 bits of a float rounded to nearest even."""
    if e.unit.has("cvt-bf16"):
        return e.cast("bitcast", _rounded(e, value, "bfloat"), "bfloat", "i16")
    if e.unit.has("avx512bf16") and e.lanes > 1:
        # LLVM would turn what moves these bits into moves of bf16, which it has no instructions for
        n = e.lanes
        pairs = f"<{e.lanes // 2} x float>"
        rounded = _rounded(e, value, "bfloat")
        bits = e.op(f"bitcast <{n} x bfloat> {rounded} to {pairs}")
        if n > 2:
            bits = _fenced(e, bits, n // 2)
        return e.op(f"bitcast {pairs} {bits} to <{n} x i16>")
    t = e.typed("float")
    i = e.typed("i32")
    bits = t.bits(value)
    last = i.bin("and", i.bin("lshr", bits, 16), 1)
    rounded = i.bin("lshr", i.add(i.add(bits, last), 0x7FFF), 16)
    quiet = i.bin("or", i.bin("lshr", bits, 16), 0x40)
    return e.cast("trunc", i.select(t.cmp("uno", value, value), quiet, rounded), "i32", "i16")


def round_to(e: Emit, dtype: str, value: str) -> str:
    """A float rounded to the values of a narrower type; integers below 8 bits wrapped; others
    unchanged."""
    row = DTYPES[dtype]
    if row.kind == "f" and row.bits < 32:
        return decode(e, dtype, encode(e, dtype, value))
    if row.bits < 8 and row.kind in "su":
        t = e.typed("i8")
        up = t.bin("shl", value, 8 - row.bits)
        return t.bin("ashr" if row.kind == "s" else "lshr", up, 8 - row.bits)
    return value


def literal_value(e: Emit, x: Literal) -> Value:
    """Operand(s) of a one-element constant."""
    storage = STORAGE[x.dtype]
    if storage.parts == 2:
        parts = struct.unpack("<2f" if x.dtype == "c64" else "<2d", x.data)
        real, imaginary = (e.typed(storage.register).const(p) for p in parts)
        return real, imaginary
    return e.typed(storage.register).const(np.asarray(x.numpy()).reshape(-1)[0].item())


# -- tables
# (opcode, kind) -> function(typed, *operands). Kinds as in DType.kind.
TABLE: dict[tuple[str, str], Callable[..., str]] = {}


def _row(op: str, kinds: str, fn: Callable[..., str]) -> None:
    for kind in kinds:
        TABLE[op, kind] = fn


def _bin(name: str) -> Callable[..., str]:
    return lambda t, a, b: t.bin(name, a, b)


def _intrinsic(name: str) -> Callable[..., str]:
    return lambda t, *operands: t.call(name, *operands)


def _extreme(predicate: str) -> Callable[..., str]:
    # nan in either operand gives nan; the first select is one maxps/minps
    def pick(t: Typed, a: str, b: str) -> str:
        return t.select(t.cmp("uno", a, a), a, t.select(t.cmp(predicate, a, b), a, b))

    return pick


def _select_extreme(predicate: str) -> Callable[..., str]:
    return lambda t, a, b: t.select(t.cmp(predicate, a, b), a, b)


def _int_divide(t: Typed, a: str, b: str, signed: bool) -> str:
    """Quotient towards zero; x / 0 is all ones and the smallest integer / -1 itself."""
    zero = t.cmp("eq", b, 0)
    # every quotient of 32-bit integers is exact in double, and vectors have no integer division
    if t.kind != "i64":
        e, d = t.e, t.e.typed("double")
        how = "si" if signed else "ui"
        x, y = (e.cast(f"{how}tofp", v, t.kind, "double") for v in (a, t.select(zero, 1, b)))
        bits = e.typed("i64")
        wide = e.op(f"fptosi {d.type} {d.div(x, y)} to {bits.type}")
        return t.select(zero, -1, e.cast("trunc", wide, "i64", t.kind))
    if not signed:
        return t.select(zero, -1, t.bin("udiv", a, t.select(zero, 1, b)))
    negative = t.cmp("eq", b, -1)
    safe = t.select(t.e.typed("i1").bin("or", zero, negative), 1, b)
    q = t.select(negative, t.neg(a), t.bin("sdiv", a, safe))
    return t.select(zero, -1, q)


def _int_remainder(t: Typed, a: str, b: str, signed: bool) -> str:
    q = _int_divide(t, a, b, signed)
    return t.select(t.cmp("eq", b, 0), a, t.sub(a, t.mul(q, b)))


def _int_power(t: Typed, a: str, b: str, signed: bool) -> str:
    """By squaring; a negative exponent gives 1, -1 or 0 as integer division of 1 would."""
    result = t.const(1)
    square = a
    left = b
    bits = emit.BITS[t.kind]
    for i in range(bits if bits <= 32 else 64):
        odd = t.cmp("ne", t.bin("and", left, 1), 0)
        result = t.select(odd, t.mul(result, square), result)
        if i + 1 < bits:
            square = t.mul(square, square)
            left = t.bin("lshr", left, 1)
    if not signed:
        return result
    odd = t.cmp("ne", t.bin("and", b, 1), 0)
    minus = t.select(odd, -1, 1)
    inverse = t.select(t.cmp("eq", a, 1), 1, t.select(t.cmp("eq", a, -1), minus, 0))
    return t.select(t.cmp("slt", b, 0), inverse, result)


def _shift(name: str) -> Callable[..., str]:
    def shift(t: Typed, a: str, b: str, bits: int = 0) -> str:
        bits = bits or emit.BITS[t.kind]
        small = t.cmp("ult", b, bits)
        if name == "ashr":
            return t.bin(name, a, t.select(small, b, bits - 1))
        return t.select(small, t.bin(name, a, t.select(small, b, 0)), 0)

    return shift


def _sign_float(t: Typed, a: str) -> str:
    return t.select(t.cmp("une", a, 0.0), t.select(t.cmp("uno", a, a), a, t.copysign(1.0, a)), a)


def _sign_int(t: Typed, a: str) -> str:
    return t.select(t.cmp("sgt", a, 0), 1, t.bin("ashr", a, emit.BITS[t.kind] - 1))


for _name, _op in (
    ("add", "fadd"),
    ("subtract", "fsub"),
    ("multiply", "fmul"),
    ("divide", "fdiv"),
):
    _row(_name, "f", _bin(_op))
for _name, _op in (("add", "add"), ("subtract", "sub"), ("multiply", "mul")):
    _row(_name, "su", _bin(_op))
for _name in ("and", "or", "xor"):
    _row(_name, "psu", _bin(_name))
_row("add", "p", _bin("or"))
_row("multiply", "p", _bin("and"))
_row("maximum", "p", _bin("or"))
_row("minimum", "p", _bin("and"))
_row("maximum", "f", _extreme("ogt"))
_row("minimum", "f", _extreme("olt"))
for _name, _predicate in (("maximum", "gt"), ("minimum", "lt")):
    _row(_name, "s", _select_extreme("s" + _predicate))
    _row(_name, "u", _select_extreme("u" + _predicate))
for _kind, _signed in (("s", True), ("u", False)):
    for _name, _fn in (
        ("divide", _int_divide),
        ("remainder", _int_remainder),
        ("power", _int_power),
    ):
        _row(_name, _kind, lambda t, a, b, fn=_fn, signed=_signed: fn(t, a, b, signed))
_row("shift-left", "su", _shift("shl"))
_row("shift-right-logical", "su", _shift("lshr"))
_row("shift-right-arithmetic", "su", _shift("ashr"))
_row("negate", "suf", lambda t, a: t.neg(a))
_row("abs", "sf", lambda t, a: t.abs(a))
_row("abs", "u", lambda t, a: a)
_row("sign", "f", _sign_float)
_row("sign", "s", _sign_int)
_row("sign", "u", lambda t, a: t.select(t.cmp("ne", a, 0), 1, a))
_row("not", "su", lambda t, a: t.bin("xor", a, -1))
_row("not", "p", lambda t, a: t.bin("xor", a, 1))
_row("popcnt", "su", _intrinsic("ctpop"))
_row(
    "count-leading-zeros",
    "su",
    lambda t, a: t.e.op(f"call {t.type} @llvm.ctlz.{t.suffix}({t.type} {a}, i1 false)"),
)
_row("is-finite", "f", lambda t, a: t.cmp("olt", t.abs(a), float("inf")))
_row("sqrt", "f", lambda t, a: t.sqrt(a))
for _name, _op in (
    ("floor", "floor"),
    ("ceil", "ceil"),
    ("round-nearest-even", "roundeven"),
    ("round-nearest-afz", "round"),
):
    _row(_name, "f", _intrinsic(_op))
for _name, _fn in (functions.FUNCTIONS | math_error.FUNCTIONS).items():
    _row(_name, "f", _fn)
_row("real", "f", lambda t, a: a)
_row("imag", "f", lambda t, a: t.const(0.0))


# what small differences change much: it sees the rounded values, where others need not
_ABRUPT = frozenset(
    (
        "compare convert floor ceil round-nearest-even round-nearest-afz sign remainder is-finite"
    ).split()
)


def apply(e: Emit, op: str, dtype: str, operands: list[Any], attrs: Attrs | None = None) -> Value:
    """Value of a pointwise opcode; `dtype` is the first operand's (select: the second's) element
    type. KeyError if there is none."""
    row = DTYPES[dtype]
    special = SPECIAL.get(op)
    rounds = e.unit.rounds(dtype)
    if not rounds and op in _ABRUPT and (attrs or {}).get("to") not in ("f32", "f64"):
        operands = [round_to(e, dtype, v) for v in operands]
    if special is not None:
        return special(e, dtype, operands, attrs or {})
    t = e.typed(STORAGE[dtype].register)
    if row.kind == "c":
        pair: Value = complex_math.FUNCTIONS[op](t, *operands)
        return pair
    if row.bits < 8 and row.kind in "su":
        return _sub_byte(e, t, op, dtype, operands)
    result = TABLE[op, row.kind](t, *operands)
    exact = "exact" in OPCODES[op].traits or op == "is-finite"
    if row.kind == "f" and row.bits < 32 and not exact and rounds:
        return round_to(e, dtype, result)
    return result


def _sub_byte(e: Emit, t: Typed, op: str, dtype: str, operands: list[Any]) -> str:
    row = DTYPES[dtype]
    if op.startswith("shift"):
        # amounts and logical shifts look at the bits of the narrow value
        unsigned = [round_to(e, f"u{row.bits}", v) for v in operands]
        first = operands[0] if op != "shift-right-logical" else unsigned[0]
        if op == "shift-right-arithmetic":
            first = round_to(e, f"s{row.bits}", operands[0])
        name = {
            "shift-left": "shl",
            "shift-right-logical": "lshr",
            "shift-right-arithmetic": "ashr",
        }[op]
        return round_to(e, dtype, _shift(name)(t, first, unsigned[1], row.bits))
    if op in ("popcnt", "count-leading-zeros"):
        result = TABLE[op, row.kind](t, round_to(e, f"u{row.bits}", operands[0]))
        return round_to(e, dtype, result if op == "popcnt" else t.sub(result, 8 - row.bits))
    return round_to(e, dtype, TABLE[op, row.kind](t, *operands))


# -- opcodes with types of their own
_PREDICATES = {
    "EQ": ("oeq", "eq"),
    "NE": ("une", "ne"),
    "LT": ("olt", "lt"),
    "LE": ("ole", "le"),
    "GT": ("ogt", "gt"),
    "GE": ("oge", "ge"),
}


def _compare(e: Emit, dtype: str, operands: list[Any], attrs: Attrs) -> str:
    kind = DTYPES[dtype].kind
    direction = attrs["direction"]
    t = e.typed(STORAGE[dtype].register)
    a, b = operands
    if kind == "c":
        re, im = (t.cmp(_PREDICATES[direction][0], a[i], b[i]) for i in (0, 1))
        if direction not in ("EQ", "NE"):
            raise KeyError(f"compare {direction} of complex numbers has no meaning")
        return e.typed("i1").bin("and" if direction == "EQ" else "or", re, im)
    floating, integer = _PREDICATES[direction]
    if kind == "f":
        if attrs.get("type") == "TOTALORDER":
            i = t.ints()
            a, b = (_total_order(t, v) for v in (a, b))
            return i.cmp(integer if direction in ("EQ", "NE") else "s" + integer, a, b)
        return t.cmp(floating, a, b)
    return t.cmp(
        integer if direction in ("EQ", "NE") else ("s" if kind == "s" else "u") + integer,
        a,
        b,
    )


def _total_order(t: Typed, a: str) -> str:
    i = t.ints()
    bits = t.bits(a)
    width = emit.BITS[i.kind]
    return i.bin("xor", bits, i.bin("lshr", i.bin("ashr", bits, width - 1), 1))


def _select(e: Emit, dtype: str, operands: list[Any], attrs: Attrs) -> Value:
    condition, a, b = operands
    t = e.typed(STORAGE[dtype].register)
    if isinstance(a, tuple):
        return t.select(condition, a[0], b[0]), t.select(condition, a[1], b[1])
    return t.select(condition, a, b)


def _clamp(e: Emit, dtype: str, operands: list[Any], attrs: Attrs) -> Value:
    low, v, high = operands
    kind = DTYPES[dtype].kind
    t = e.typed(STORAGE[dtype].register)
    return TABLE["minimum", kind](t, TABLE["maximum", kind](t, v, low), high)


def _next_after(e: Emit, dtype: str, operands: list[Any], attrs: Attrs) -> Value:
    """One step of the code: away from zero it grows, whatever the sign."""
    storage = STORAGE[dtype]
    width = DTYPES[dtype].bits
    t = e.typed(storage.register)
    i = e.typed(f"i{width}")
    a, b = operands
    memory = storage.memory
    zero = t.const(0.0)
    code_a, code_b = (
        raw if memory == i.kind else e.cast("bitcast", raw, memory, i.kind)
        for raw in (encode(e, dtype, a), encode(e, dtype, b))
    )
    sign = i.const(-(1 << width - 1))
    grows = e.typed("i1").bin("xor", t.cmp("ogt", b, a), t.cmp("olt", a, zero))
    stepped = i.add(code_a, i.select(grows, 1, -1))
    smallest = i.bin("or", i.bin("and", code_b, sign), 1)
    stepped = i.select(t.cmp("oeq", a, zero), smallest, stepped)
    if dtype.endswith("fnuz"):  # has no -0
        stepped = i.select(i.cmp("eq", stepped, sign), 0, stepped)
    # Codes to the end: rounding anew would lose subnormal values.
    there = t.bin_or(t.cmp("oeq", a, b), t.cmp("uno", b, b))
    code = i.select(t.cmp("uno", a, a), code_a, i.select(there, code_b, stepped))
    return decode(e, dtype, code if memory == i.kind else e.cast("bitcast", code, i.kind, memory))


def _complex(e: Emit, dtype: str, operands: list[Any], attrs: Attrs) -> Value:
    return (operands[0], operands[1])


def convert(e: Emit, source: str, target: str, value: Any) -> Value:
    """XLA's conversion: floats to integers truncate and saturate (nan gives 0), integers wrap,
    anything to pred is `!= 0`."""
    a = DTYPES[source]
    b = DTYPES[target]
    have = STORAGE[source].register
    want = STORAGE[target].register
    if a.kind == "c":
        if b.kind == "c":
            real, imaginary = (_resize_float(e, v, have, want) for v in value)
            return real, imaginary
        if b.kind == "p":
            t = e.typed(have)
            return e.typed("i1").bin("or", *(t.cmp("une", v, 0.0) for v in value))
        return convert(e, REAL_PART[source], target, value[0])
    if b.kind == "c":
        number = convert(e, source, REAL_PART[target], value)
        assert isinstance(number, str)
        return number, e.typed(want).const(0.0)
    if b.kind == "p":
        t = e.typed(have)
        return value if a.kind == "p" else t.cmp("une" if t.is_float else "ne", value, 0)
    if b.kind == "f":
        if a.kind == "f":
            result = _resize_float(e, value, have, want)
        else:
            result = e.cast("sitofp" if a.kind == "s" else "uitofp", value, have, want)
        if source == "f64" and target == "f16" and e.unit.has("avx512fp16"):
            return e.cast("fpext", e.cast("fptrunc", value, "double", "half"), "half", "float")
        return (
            result
            if a.kind == b.kind and _contains(target, source)
            else round_to(e, target, result)
        )
    if a.kind == "f":
        return _float_to_int(e, value, have, b)
    bits = emit.BITS[have]
    wanted = emit.BITS[want]
    if wanted < bits:
        value = e.cast("trunc", value, have, want)
    elif wanted > bits:
        value = e.cast("sext" if a.kind == "s" else "zext", value, have, want)
    return round_to(e, target, value)


REAL_PART = {"c64": "f32", "c128": "f64"}


def _contains(target: str, source: str) -> bool:
    """Whether every value of float type `source` is one of `target`."""
    return target == source or target == "f64" or target == "f32" and source != "f64"


def _resize_float(e: Emit, value: str, have: str, want: str) -> str:
    return (
        value
        if have == want
        else e.cast("fpext" if want == "double" else "fptrunc", value, have, want)
    )


def _float_to_int(e: Emit, value: str, have: str, row: DType) -> str:
    t = e.typed(have)
    narrow = row.bits < 8
    i = e.typed("i32" if narrow else f"i{row.bits}")
    name = "fptosi" if row.kind == "s" else "fptoui"
    if narrow:
        low, high = row.limits
        value = t.select(t.cmp("uno", value, value), 0.0, value)
        value = t.select(t.cmp("olt", value, high), value, high)
        value = t.select(t.cmp("ogt", value, low), value, low)
        return e.cast("trunc", e.op(f"fptosi {t.type} {value} to {i.type}"), "i32", "i8")
    # GPUs saturate, but say nothing about nan
    target = e.unit.target
    if target is not None and not target.computes_in_vectors:
        value = t.select(t.cmp("uno", value, value), 0.0, value)
    elif e.lanes > 1:
        return _saturated(e, t, row, value)
    return e.op(f"call {i.type} @llvm.{name}.sat.{i.suffix}.{t.suffix}({t.type} {value})")


def _saturated(e: Emit, t: Typed, row: DType, value: str) -> str:
    """A vector of floats as integers of `row`, with comparisons around the plain conversion: LLVM
    takes the saturating one apart lane by lane."""
    signed = row.kind == "s"
    low, past = (-(1 << row.bits - 1), 1 << row.bits - 1) if signed else (0, 1 << row.bits)
    i = e.typed(f"i{max(row.bits, 32)}")
    value = t.select(t.cmp("uno", value, value), 0.0, value)
    above = t.cmp("oge", value, float(past))
    inside = t.select(t.cmp("ogt", value, float(low)), value, float(low))
    inside = t.select(above, 0.0, inside)
    whole = e.op(
        f"{'fptosi' if signed or row.bits < 32 else 'fptoui'} {t.type} {inside} to {i.type}"
    )
    return e.cast("trunc", i.select(above, past - 1, whole), i.kind, f"i{row.bits}")


def _reduce_precision(e: Emit, dtype: str, operands: list[Any], attrs: Attrs) -> str:
    """Round to `mantissa_bits` (nearest even), then flush or overflow what `exponent_bits` cannot
    hold. Works on f32 and f64 bits."""
    row = DTYPES[dtype]
    t = e.typed(STORAGE[dtype].register)
    i = t.ints()
    width = emit.BITS[i.kind]
    mantissa = 23 if width == 32 else 52
    own_mantissa, own_exponent = {
        "f64": (52, 11),
        "f32": (23, 8),
        "f16": (10, 5),
        "bf16": (7, 8),
    }[row.name]
    keep_m = min(attrs["mantissa_bits"], own_mantissa)
    keep_e = min(attrs["exponent_bits"], own_exponent)
    value = operands[0]
    bits = t.bits(value)
    if keep_m < mantissa:
        drop = mantissa - keep_m
        last = i.bin("and", i.bin("lshr", bits, drop), 1)
        rounded = i.add(i.add(bits, (1 << (drop - 1)) - 1), last)
        bits = i.bin("and", rounded, -(1 << drop))
    if keep_e < own_exponent:
        sign = i.bin("and", bits, 1 << (width - 1))
        magnitude = i.bin("xor", bits, sign)
        bias = (1 << (width - mantissa - 2)) - 1
        kept = (1 << (keep_e - 1)) - 1
        field = i.bin("lshr", magnitude, mantissa)
        infinity = t.bits(t.const(INF)) if e.lanes > 1 else str((2 * bias + 1) << mantissa)
        magnitude = i.select(i.cmp("sgt", field, bias + kept), infinity, magnitude)
        magnitude = i.select(i.cmp("sle", field, bias - kept), 0, magnitude)
        bits = i.bin("or", sign, magnitude)
    result = t.from_bits(bits)
    special = value if attrs["mantissa_bits"] else t.copysign(INF, value)
    return t.select(t.cmp("uno", value, value), special, result)


def _convert(e: Emit, dtype: str, operands: list[Any], attrs: Attrs) -> Value:
    return convert(e, dtype, attrs["to"], operands[0])


SPECIAL: dict[str, Callable[[Emit, str, list[Any], Attrs], Value]] = {
    "compare": _compare, "select": _select, "clamp": _clamp, "complex": _complex,
    "convert": _convert, "reduce-precision": _reduce_precision, "next-after": _next_after,
}  # fmt: skip
