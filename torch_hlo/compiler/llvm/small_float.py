"""Small float formats as straight-line integer code on floats: exact decoding,
round-to-nearest-even encoding.

The 8-bit formats, and f16 for machines without instructions for it.
"""

from torch_hlo.hlo.ir.numeric import SMALL_FLOATS, SmallFloat

from .emit import Emit, Typed

FORMATS = {**SMALL_FLOATS, "f16": SmallFloat(5, 10, 15, True, False)}
_NAN = 0x7FC00000


def decode(e: Emit, dtype: str, raw: str) -> str:
    """float of a code (i8, for f16 i16)."""
    form = FORMATS[dtype]
    exponent, mantissa, bias, has_inf, fnuz, has_nan, signed = form
    sign = 1 << (form.bits - 1)
    infinity = ((1 << exponent) - 1) << mantissa
    t = e.typed("float")
    i = e.typed("i32")
    code = e.cast("zext", raw, f"i{max(8, form.bits)}", "i32")
    if not signed:  # powers of two
        value = i.select(i.cmp("eq", code, 0), 1 << 22, i.bin("shl", code, 23))
        return t.from_bits(i.select(i.cmp("eq", code, infinity), _NAN, value))
    magnitude = i.bin("and", code, sign - 1)
    normal = i.add(i.bin("shl", magnitude, 23 - mantissa), (127 - bias) << 23)
    tiny = t.mul(e.op(f"uitofp {i.type} {magnitude} to {t.type}"), 2.0 ** (1 - bias - mantissa))
    value = i.select(i.cmp("ult", magnitude, 1 << mantissa), t.bits(tiny), normal)
    if has_inf:
        special = i.select(i.cmp("eq", magnitude, infinity), 0x7F800000, _NAN)
        value = i.select(i.cmp("uge", magnitude, infinity), special, value)
    elif has_nan and not fnuz:
        value = i.select(i.cmp("eq", magnitude, sign - 1), _NAN, value)
    value = i.bin("or", value, i.bin("shl", i.bin("and", code, sign), 32 - form.bits))
    if fnuz:
        value = i.select(i.cmp("eq", code, sign), _NAN, value)
    return t.from_bits(value)


def encode(e: Emit, dtype: str, value: str) -> str:
    """Code of a float; too large values become infinity, or nan where there is none."""
    form = FORMATS[dtype]
    exponent, mantissa, bias, has_inf, fnuz, has_nan, has_sign = form
    bits = form.bits
    t = e.typed("float")
    i = e.typed("i32")
    if not has_sign:
        whole = t.bits(value)
        half = i.select(i.cmp("ult", whole, 1 << 23), (1 << 22) - 1, 1 << 22)
        code = i.bin("lshr", i.add(whole, half), 23)
        code = i.select(t.cmp("ogt", value, 0.0), code, 255)
        return e.cast("trunc", code, "i32", "i8")
    magnitude = t.abs(value)
    # Adding 2^23 quanta (a quantum: the distance of neighbours here) makes the FPU round to the
    # quantum.
    smallest = i.const((1 - bias + 127) << 23)
    power = i.bin("and", t.bits(magnitude), 0x7F800000)
    power = i.select(i.cmp("ugt", power, smallest), power, smallest)
    magic = t.from_bits(i.add(power, (23 - mantissa) << 23))
    rounded = t.sub(t.add(magnitude, magic), magic)
    normal = i.sub(i.bin("lshr", t.bits(rounded), 23 - mantissa), (127 - bias) << mantissa)
    tiny = e.op(
        f"fptosi {t.type}"
        f" {_small(t, t.mul(rounded, 2.0 ** (mantissa + bias - 1)), mantissa)} to {i.type}"
    )
    code = i.select(t.cmp("olt", rounded, 2.0 ** (1 - bias)), tiny, normal)
    infinity = ((1 << exponent) - 1) << mantissa
    everything = (1 << (bits - 1)) - 1
    full = fnuz or not has_nan  # all codes with a sign bit are numbers, or all but one
    nan = everything + full if not has_inf else infinity | 1 << (mantissa - 1)
    top = infinity - 1 if has_inf else everything - 1 + full
    overflow = infinity if has_inf else nan if has_nan else top
    code = i.select(i.cmp("sgt", code, top), overflow, code)
    code = i.select(t.cmp("oge", magnitude, 2.0**100), overflow, code)
    sign = i.bin("lshr", i.bin("and", t.bits(value), -(1 << 31)), 32 - bits)
    signed = i.bin("or", code, sign)
    if fnuz:
        signed = i.select(i.cmp("eq", code, 0), 0, signed)
        signed = i.select(i.cmp("eq", code, nan), nan, signed)
    signed = i.select(t.cmp("uno", value, value), nan, signed)
    return e.cast("trunc", signed, "i32", f"i{max(8, bits)}")


def _small(t: Typed, value: str, mantissa: int) -> str:
    """Values that may be converted to integers; the others are not looked at."""
    return t.select(t.cmp("olt", value, 2.0 ** (mantissa + 2)), value, 0.0)
