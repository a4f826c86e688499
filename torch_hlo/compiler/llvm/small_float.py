"""Small float formats as straight-line integer code on floats: exact decoding,
round-to-nearest-even encoding.

The 8-bit formats, and f16 for machines without instructions for it.
"""

from __future__ import annotations

from torch_hlo.compiler.llvm.emit import Emit, Typed
from torch_hlo.hlo.ir.numeric import SMALL_FLOATS

FORMATS = {**SMALL_FLOATS, "f16": (5, 10, 15, True, False)}
_NAN = 0x7FC00000


def decode(e: Emit, dtype: str, raw: str) -> str:
    """float of a code (i8, for f16 i16)."""
    exponent, mantissa, bias, has_inf, fnuz = FORMATS[dtype]
    bits = 1 + exponent + mantissa
    sign, infinity = 1 << (bits - 1), ((1 << exponent) - 1) << mantissa
    t, i = e.typed("float"), e.typed("i32")
    code = e.cast("zext", raw, f"i{bits}", "i32")
    magnitude = i.bin("and", code, i.const(sign - 1))
    normal = i.add(i.bin("shl", magnitude, i.const(23 - mantissa)), i.const((127 - bias) << 23))
    tiny = t.mul(
        e.op(f"uitofp {i.type} {magnitude} to {t.type}"),
        t.const(2.0 ** (1 - bias - mantissa)),
    )
    value = i.select(i.cmp("ult", magnitude, i.const(1 << mantissa)), t.bits(tiny), normal)
    if has_inf:
        special = i.select(
            i.cmp("eq", magnitude, i.const(infinity)),
            i.const(0x7F800000),
            i.const(_NAN),
        )
        value = i.select(i.cmp("uge", magnitude, i.const(infinity)), special, value)
    elif not fnuz:
        value = i.select(i.cmp("eq", magnitude, i.const(sign - 1)), i.const(_NAN), value)
    signed = i.bin(
        "or",
        value,
        i.bin("shl", i.bin("and", code, i.const(sign)), i.const(32 - bits)),
    )
    if fnuz:
        signed = i.select(i.cmp("eq", code, i.const(sign)), i.const(_NAN), signed)
    return t.from_bits(signed)


def encode(e: Emit, dtype: str, value: str) -> str:
    """Code of a float; too large values become infinity, or nan where there is none."""
    exponent, mantissa, bias, has_inf, fnuz = FORMATS[dtype]
    bits = 1 + exponent + mantissa
    t, i = e.typed("float"), e.typed("i32")
    magnitude = t.abs(value)
    # Adding 2^23 quanta (a quantum: the distance of neighbours here) makes the FPU round to the
    # quantum.
    smallest = i.const((1 - bias + 127) << 23)
    power = i.bin("and", t.bits(magnitude), i.const(0x7F800000))
    power = i.select(i.cmp("ugt", power, smallest), power, smallest)
    magic = t.from_bits(i.add(power, i.const((23 - mantissa) << 23)))
    rounded = t.sub(t.add(magnitude, magic), magic)
    normal = i.sub(
        i.bin("lshr", t.bits(rounded), i.const(23 - mantissa)),
        i.const((127 - bias) << mantissa),
    )
    tiny = e.op(
        f"fptosi {t.type}"
        f" {_small(t, t.mul(rounded, t.const(2.0 ** (mantissa + bias - 1))), mantissa)} to {i.type}"
    )
    code = i.select(t.cmp("olt", rounded, t.const(2.0 ** (1 - bias))), tiny, normal)
    infinity, everything = ((1 << exponent) - 1) << mantissa, (1 << (bits - 1)) - 1
    nan = everything + 1 if fnuz else infinity | 1 << (mantissa - 1) if has_inf else everything
    top = infinity - 1 if has_inf else everything if fnuz else everything - 1
    overflow = infinity if has_inf else nan
    code = i.select(i.cmp("sgt", code, i.const(top)), i.const(overflow), code)
    code = i.select(t.cmp("oge", magnitude, t.const(2.0**100)), i.const(overflow), code)
    sign = i.bin("lshr", i.bin("and", t.bits(value), i.const(-(1 << 31))), i.const(32 - bits))
    signed = i.bin("or", code, sign)
    if fnuz:
        signed = i.select(i.cmp("eq", code, i.const(0)), i.const(0), signed)
        signed = i.select(i.cmp("eq", code, i.const(nan)), i.const(nan), signed)
    signed = i.select(t.cmp("uno", value, value), i.const(nan), signed)
    return e.cast("trunc", signed, "i32", f"i{bits}")


def _small(t: Typed, value: str, mantissa: int) -> str:
    """Values that may be converted to integers; the others are not looked at."""
    return t.select(t.cmp("olt", value, t.const(2.0 ** (mantissa + 2))), value, t.const(0.0))
