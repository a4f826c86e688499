"""The four 8-bit float formats as straight-line integer code on floats: exact decoding, round-to-nearest-even encoding."""
from __future__ import annotations

from torch_hlo.compiler.codegen.emit import Emit

# exponent bits, mantissa bits, bias, has infinities, fnuz ("finite, nan, unsigned zero")
FORMATS = {
    "f8e4m3fn": (4, 3, 7, False, False), "f8e5m2": (5, 2, 15, True, False),
    "f8e4m3fnuz": (4, 3, 8, False, True), "f8e5m2fnuz": (5, 2, 16, False, True),
}  # fmt: skip
_NAN = 0x7FC00000


def decode(e: Emit, dtype: str, raw: str) -> str:
    """float of an i8 code."""
    _, mantissa, bias, has_inf, fnuz = FORMATS[dtype]
    t, i = e.typed("float"), e.typed("i32")
    code = e.cast("zext", raw, "i8", "i32")
    magnitude = i.bin("and", code, i.const(0x7F))
    normal = i.add(i.bin("shl", magnitude, i.const(23 - mantissa)), i.const((127 - bias) << 23))
    tiny = t.mul(e.op(f"uitofp {i.type} {magnitude} to {t.type}"), t.const(2.0 ** (1 - bias - mantissa)))
    bits = i.select(i.cmp("ult", magnitude, i.const(1 << mantissa)), t.bits(tiny), normal)
    if has_inf:
        special = i.select(i.cmp("eq", magnitude, i.const(0x7C)), i.const(0x7F800000), i.const(_NAN))
        bits = i.select(i.cmp("uge", magnitude, i.const(0x7C)), special, bits)
    elif not fnuz:
        bits = i.select(i.cmp("eq", magnitude, i.const(0x7F)), i.const(_NAN), bits)
    signed = i.bin("or", bits, i.bin("shl", i.bin("and", code, i.const(0x80)), i.const(24)))
    if fnuz:
        signed = i.select(i.cmp("eq", code, i.const(0x80)), i.const(_NAN), signed)
    return t.from_bits(signed)


def encode(e: Emit, dtype: str, value: str) -> str:
    """i8 code of a float; too large values become infinity, or nan where there is none."""
    exponent, mantissa, bias, has_inf, fnuz = FORMATS[dtype]
    t, i = e.typed("float"), e.typed("i32")
    magnitude = t.abs(value)
    # Adding 2^23 quanta (a quantum: the distance of neighbours here) makes the FPU round to the quantum.
    smallest = i.const((1 - bias + 127) << 23)
    power = i.bin("and", t.bits(magnitude), i.const(0x7F800000))
    power = i.select(i.cmp("ugt", power, smallest), power, smallest)
    magic = t.from_bits(i.add(power, i.const((23 - mantissa) << 23)))
    rounded = t.sub(t.add(magnitude, magic), magic)
    normal = i.sub(i.bin("lshr", t.bits(rounded), i.const(23 - mantissa)), i.const((127 - bias) << mantissa))
    tiny = e.op(f"fptosi {t.type} {_finite(t, t.mul(rounded, t.const(2.0 ** (mantissa + bias - 1))))} to {i.type}")
    code = i.select(t.cmp("olt", rounded, t.const(2.0 ** (1 - bias))), tiny, normal)
    nan = 0x80 if fnuz else 0x7E if has_inf else 0x7F
    top = 0x7B if has_inf else 0x7F if fnuz else 0x7E
    code = i.select(i.cmp("sgt", code, i.const(top)), i.const(0x7C if has_inf else nan), code)
    code = i.select(t.cmp("oeq", magnitude, t.const(float("inf"))), i.const(0x7C if has_inf else nan), code)
    sign = i.bin("lshr", i.bin("and", t.bits(value), i.const(-(1 << 31))), i.const(24))
    signed = i.bin("or", code, sign)
    if fnuz:
        signed = i.select(i.cmp("eq", code, i.const(0)), i.const(0), signed)
        signed = i.select(i.cmp("eq", code, i.const(0x80)), i.const(0x80), signed)
    signed = i.select(t.cmp("uno", value, value), i.const(nan), signed)
    return e.cast("trunc", signed, "i32", "i8")


def _finite(t, value: str) -> str:
    return t.select(t.cmp("olt", value, t.const(256.0)), value, t.const(0.0))
