"""Floating point (PTX ISA, sections 9.7.3 to 9.7.5). Sums and products are rounded once, `fma` too;
approximate functions are exact here.

Types: f16 and f64 are NumPy's, f32 too; bf16 values travel as float32. Pairs (f16x2, bf16x2, f32x2)
are arrays with a last dimension of 2."""

from __future__ import annotations

import numpy as np

from test.ptx.syntax import Instruction
from test.ptx.table import Code, Run, instruction

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)


# -- representation
# ---------------------------------------------------------------------------------------------------------
def from_bf16(raw):
    """float32 of the bits of bf16 values."""
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(value):
    """The bits of float32 values rounded to nearest even."""
    raw = value.view(np.uint32)
    rounded = (raw + np.uint32(0x7FFF) + (raw >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    result = np.where(np.isnan(value), np.uint32(0x7FFF), rounded).astype(np.uint16)
    return result if result.ndim else result[()]


def pairs(raw, half=np.uint16):
    """The two halves of 32-bit (64-bit) values, the lower first, as a last dimension."""
    return np.ascontiguousarray(np.asarray(raw))[..., None].view(half)


def joined(halves, whole=np.uint32):
    result = np.ascontiguousarray(halves).view(whole)[..., 0]
    return result if result.ndim else result[()]


def decoded(code: Code, x: Instruction, number, kind: str):
    """An operand as floating point values."""
    read = code.read(x, number, kind)
    if kind == "bf16":
        return lambda frame: from_bf16(read(frame))
    if kind == "f16x2":
        return lambda frame: pairs(read(frame)).view(np.float16)
    if kind == "bf16x2":
        return lambda frame: from_bf16(pairs(read(frame)))
    if kind == "f32x2":
        return lambda frame: pairs(read(frame), np.float32)
    return read


def encoded(code: Code, x: Instruction, number, kind: str):
    """How a result is written: float64 or narrower values are rounded to `kind`."""
    write = code.write(x, number, kind)
    if kind in ("bf16", "bf16x2"):
        pack = joined if kind == "bf16x2" else lambda v: v
        return lambda frame, value: write(
            frame, pack(to_bf16(odd(value) if value.dtype is F64 else value))
        )
    if kind == "f16x2":
        return lambda frame, value: write(frame, joined(value.astype(np.float16).view(np.uint16)))
    if kind == "f32x2":
        return lambda frame, value: write(frame, joined(value.astype(np.float32), np.uint64))
    dtype = {"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind]
    return lambda frame, value: write(frame, value if value.dtype == dtype else value.astype(dtype))


def flushed(value):
    """.ftz: subnormal numbers are zeros of their sign."""
    tiny = np.abs(value) < np.finfo(value.dtype).tiny
    if not tiny.any():
        return value
    return np.where(tiny, np.copysign(value.dtype.type(0), value), value)[()]


def saturated(value):
    """.sat: to [0, 1], NaN gives 0."""
    return np.where(
        np.isnan(value),
        value.dtype.type(0),
        np.clip(value, value.dtype.type(0), value.dtype.type(1)),
    )[()]


# -- rounding
# ---------------------------------------------------------------------------------------------------------------
def exact_sum(a, b):
    """(s, e): s the rounded float64 sum, s + e the exact one (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def odd_sum(a, b):
    """The float64 sum rounded to odd: rounding it once more to a narrower type is as good as
    rounding the exact sum (Boldo and Melquiond 2008)."""
    s, e = exact_sum(a, b)
    raw = s.view(np.int64)
    wrong = (e != 0) & (raw & 1 == 0) & np.isfinite(s)
    if not wrong.any():
        return s
    toward = np.where((e > 0) == (s > 0), 1, -1)  # one unit away from, or to zero
    return np.where(wrong, raw + toward, raw)[()].view(np.float64)


def odd(value):
    """float64 -> float32 rounded to odd, for a further rounding."""
    near = value.astype(np.float32)
    raw = near.view(np.int32)
    back = near.astype(np.float64)
    wrong = (back != value) & (raw & 1 == 0) & np.isfinite(near)
    toward = np.where((np.abs(value) > np.abs(back)), 1, -1)
    return np.where(wrong, raw + toward, raw).astype(np.int32)[()].view(np.float32)


def fused(a, b, c):
    """a * b + c rounded once, for float32."""
    product = a.astype(F64) * b  # exact: 48 of 53 bits
    near = product + c
    # Rounding twice is wrong only where the first result lies in the middle between two float32, or
    # is subnormal there.
    middle = near.view(np.int64) & 0x1FFFFFFF == 0x10000000
    if middle.any():
        near = odd_sum(product, c.astype(F64))
    result = near.astype(F32)
    tiny = (np.abs(near) < 1.2e-38) & (near != 0)
    if tiny.any():
        result = np.where(tiny, odd_sum(product, c.astype(F64)).astype(F32), result)[()]
    return result


def exact_product(a, b):
    """(p, e): p the rounded float64 product, p + e the exact one (Veltkamp and Dekker)."""
    p = a * b
    split = 134217729.0
    ah, bh = a * split, b * split
    ah, bh = ah - (ah - a), bh - (bh - b)
    al, bl = a - ah, b - bh
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def fused64(a, b, c):
    """a * b + c rounded once, for float64 (Boldo and Melquiond); plain where the parts would
    overflow or underflow."""
    uh, ul = exact_product(a, b)
    th, tl = exact_sum(c, ul)
    vh, vl = exact_sum(uh, th)
    result = vh + odd_sum(tl, vl)
    plain = uh + c
    return np.where(np.isfinite(result) & ((np.abs(uh) > 1e-270) | (uh == 0)), result, plain)[()]


def directed(value, exact_error, mode: str):
    """A rounded result moved to the neighbour that .rz, .rm or .rp ask for; `exact_error`: exact
    value minus `value`."""
    down, up = (
        np.nextafter(value, value.dtype.type(-np.inf)),
        np.nextafter(value, value.dtype.type(np.inf)),
    )
    lower, higher = exact_error < 0, exact_error > 0
    if mode == "rm":
        return np.where(lower, down, value)[()]
    if mode == "rp":
        return np.where(higher, up, value)[()]
    return np.where(lower & (value > 0), down, np.where(higher & (value < 0), up, value))[()]


_EXACT = {
    "add": exact_sum,
    "sub": lambda a, b: exact_sum(a, -b),
    "mul": exact_product,
    "fma": None,
}


def _directed(opcode: str, mode: str):
    """add, sub, mul, fma with .rz, .rm, .rp, for float32 through float64, and float64."""

    def run(a, b, c=None):
        dtype = a.dtype
        a, b = a.astype(F64), b.astype(F64)
        if opcode == "fma":
            p, pe = exact_product(a, b)
            s, e = exact_sum(p, c.astype(F64))
            s, e = exact_sum(s, e + pe)
        else:
            s, e = _EXACT[opcode](a, b)
        if dtype == F64:
            return directed(s, e, mode)
        near = s.astype(dtype)
        return directed(near, (s - near.astype(F64)) + e, mode)

    return run


# -- minimum and maximum
# ------------------------------------------------------------------------------------------------------
def minimum(a, b):
    """The number where one operand is NaN; -0 is less than +0 (section 9.7.3.11)."""
    return _zeros(np.fmin(a, b), a, b, np.signbit(a) | np.signbit(b))


def maximum(a, b):
    return _zeros(np.fmax(a, b), a, b, np.signbit(a) & np.signbit(b))


def _zeros(result, a, b, negative):
    both = (a == 0) & (b == 0)
    if not both.any():
        return result
    return np.where(
        both, np.where(negative, result.dtype.type(-0.0), result.dtype.type(0)), result
    )[()]


def with_nan(function):
    """.NaN: NaN where one operand is NaN."""
    return lambda a, b: np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), function(a, b))[
        ()
    ]


# -- the table
# -----------------------------------------------------------------------------------------------------------------
FLOATS = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64")
_BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": minimum,
    "max": maximum,
}
_UNARY = {"neg": np.negative, "abs": np.abs}


@instruction("copysign")
def copysign(code: Code, x: Instruction) -> Run:
    """Section 9.7.3.9: the sign of the first operand, the magnitude of the second."""
    (kind,) = code.modifiers(x, ("f32", "f64"))
    a, b, write = code.read(x, 1, kind), code.read(x, 2, kind), code.write(x, 0, kind)
    return lambda frame: write(frame, np.copysign(b(frame), a(frame)))


def arithmetic(code: Code, x: Instruction) -> Run:
    """add, sub, mul, fma, mad, div, min, max, neg, abs on floating point types."""
    opcode = "fma" if x.opcode == "mad" else x.opcode
    mode, ftz, sat, relu, nan, xorsign, _, kind = code.modifiers(
        x,
        ("rn", "rz", "rm", "rp", "approx", "full"),
        "ftz",
        "sat",
        "relu",
        "NaN",
        "xorsign",
        "abs",
        FLOATS,
    )
    reads = [decoded(code, x, i, kind) for i in range(1, len(x.operands))]
    write = encoded(code, x, 0, kind)
    half = kind not in ("f32", "f32x2", "f64")
    if opcode in ("neg", "abs"):  # of NaN too: only the sign bit changes
        function = _UNARY[opcode]
    elif mode in ("rz", "rm", "rp"):
        if half or opcode not in _EXACT:
            raise code.fail(x, f".{mode} is not evaluated here")
        function = _directed(opcode, mode)
    elif opcode == "fma":
        function = {"f32": fused, "f32x2": fused, "f64": fused64}.get(
            kind, lambda a, b, c: odd_sum(a.astype(F64) * b.astype(F64), c.astype(F64))
        )
    elif opcode in _BINARY:
        function = _BINARY[opcode]
        if nan:
            function = with_nan(function)
    else:
        raise code.fail(x, f"{x.opcode} of .{kind} is not evaluated")
    if xorsign:
        plain = function
        function = lambda a, b: np.copysign(
            plain(np.abs(a), np.abs(b)),
            np.where(np.signbit(a) ^ np.signbit(b), -1, 1).astype(a.dtype),
        )
    last = len(reads) == 2 and reads
    if not (ftz or sat or relu) and last:
        a, b = reads
        return lambda frame: write(frame, function(a(frame), b(frame)))

    def run(frame):
        values = [r(frame) for r in reads]
        if ftz:
            values = [flushed(v) for v in values]
        result = function(*values)
        if sat:
            result = saturated(result)
        if relu:
            result = np.where(np.isnan(result), result, np.maximum(result, result.dtype.type(0)))[
                ()
            ]
        if ftz and result.dtype == F32:
            result = flushed(result)
        write(frame, result)

    return run


def _in_double(function):
    return lambda a: function(a.astype(F64)).astype(a.dtype) if a.dtype != F64 else function(a)


_FUNCTIONS = {
    "sqrt": np.sqrt,
    "rcp": lambda a: a.dtype.type(1) / a,
    "rsqrt": _in_double(lambda a: 1.0 / np.sqrt(a)),
    "sin": _in_double(np.sin),
    "cos": _in_double(np.cos),
    "lg2": _in_double(np.log2),
    "ex2": _in_double(np.exp2),
    "tanh": _in_double(np.tanh),
}


@instruction(*_FUNCTIONS)
def function(code: Code, x: Instruction) -> Run:
    mode, ftz, _, kind = code.modifiers(x, ("rn", "rz", "rm", "rp", "approx"), "ftz", "ftz", FLOATS)
    if mode in ("rz", "rm", "rp"):
        raise code.fail(x, f".{mode} is not evaluated here")
    read, write, operate = (
        decoded(code, x, 1, kind),
        encoded(code, x, 0, kind),
        _FUNCTIONS[x.opcode],
    )
    if not ftz:
        return lambda frame: write(frame, operate(read(frame)))
    return lambda frame: write(frame, flushed(operate(flushed(read(frame)))))


_TESTS = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: ~np.isnan(a),
    "notanumber": np.isnan,
    "normal": lambda a: np.isfinite(a) & (np.abs(a) >= np.finfo(a.dtype).tiny),
    "subnormal": lambda a: (a != 0) & (np.abs(a) < np.finfo(a.dtype).tiny),
}


@instruction("testp")
def test(code: Code, x: Instruction) -> Run:
    what, kind = code.modifiers(x, tuple(_TESTS), ("f32", "f64"))
    read, write = code.read(x, 1, kind), code.write(x, 0, "pred")
    return lambda frame: write(frame, _TESTS[what](read(frame)))
