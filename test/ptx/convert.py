"""Conversions (PTX ISA, section 9.7.9.21, cvt): between integers and floats of every width, with
every rounding, and of pairs to narrow floats."""

from __future__ import annotations

import numpy as np

from test.ptx import floats
from test.ptx.syntax import Instruction
from test.ptx.table import NUMPY, Code, Run, instruction
from torch_hlo.hlo.ir.numeric import decode, encode

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
SMALL = {"e4m3x2": "f8e4m3fn", "e5m2x2": "f8e5m2"}
_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def to_integer(value, kind: str, mode: str):
    """Clamped to the range. NaN gives 0, but the smallest (for unsigned: the top bit) where f64 or
    64 bits take part."""
    dtype = NUMPY[kind]
    whole = _WHOLE[mode](value)
    info = np.iinfo(dtype)
    wide = whole.astype(np.float64)
    low, high = float(info.min), float(info.max)  # high may round up to a power of two
    inside = (wide >= low) & (wide <= high) & (wide != float(2**64 if dtype.kind == "u" else 2**63))
    result = np.where(inside, wide, 0.0).astype(dtype)
    nan = (
        dtype.type(info.min if dtype.kind == "i" else 1 << 8 * dtype.itemsize - 1)
        if dtype.itemsize == 8 or value.dtype == np.float64
        else dtype.type(0)
    )
    result = np.where(
        np.isnan(wide),
        nan,
        np.where(
            inside,
            result,
            np.where(wide < 0, dtype.type(info.min), dtype.type(info.max)),
        ),
    )
    return result.astype(dtype)[()]


def to_small(value, kind: str, relu: bool):
    """Bits of 8-bit floats, rounded to nearest even, too large ones the largest finite
    (.satfinite)."""
    name, most = SMALL[kind], {"e4m3x2": 448.0, "e5m2x2": 57344.0}[kind]
    value = np.asarray(value, np.float32)
    value = np.maximum(value, 0) if relu else value
    clipped = np.where(np.isnan(value), value, np.clip(value, -most, most)).astype(np.float32)
    return np.frombuffer(encode(clipped, name), np.uint8).reshape(value.shape)


def to_tf32(value, mode: str):
    """float32 bits with 10 bits of mantissa; .rna: halves away from zero."""
    raw = value.view(np.uint32)
    if mode == "rna":
        rounded = raw + np.uint32(0x1000)
    elif mode == "rn":
        rounded = raw + np.uint32(0xFFF) + (raw >> np.uint32(13) & np.uint32(1))
    else:
        rounded = raw
    return np.where(np.isfinite(value), rounded & np.uint32(0xFFFFE000), raw)[()]


@instruction("cvt")
def convert(code: Code, x: Instruction) -> Run:
    source, target = x.modifiers[-1], x.modifiers[-2]
    modes = [
        m
        for m in x.modifiers[:-2]
        if m in ("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi")
    ]
    flags = {m for m in x.modifiers[:-2] if m not in modes}
    if flags - {"ftz", "sat", "satfinite", "relu"}:
        raise code.fail(x, f".{min(flags - {'ftz', 'sat', 'satfinite', 'relu'})} is not evaluated")
    mode = modes[0] if modes else ""
    if target in ("f16x2", "bf16x2") and source == "f32":
        return _pack(code, x, target, mode, flags)
    if target in SMALL or source in SMALL:
        return _small(code, x, target, source, flags)
    if target == "tf32":
        write, read = code.write(x, 0, "b32"), code.read(x, 1, "f32")
        return lambda frame: write(frame, to_tf32(read(frame), mode))
    if target not in (*INTEGERS, *FLOATS) or source not in (*INTEGERS, *FLOATS):
        raise code.fail(x, f"conversion from .{source} to .{target} is not evaluated")
    if source in INTEGERS:
        return _from_integer(code, x, target, source, mode, flags)
    read = floats.decoded(code, x, 1, source)
    if "ftz" in flags and source == "f32":
        plain = read
        read = lambda frame: floats.flushed(plain(frame))
    if target in INTEGERS:
        write = code.write(x, 0, target)
        if mode not in _WHOLE:
            raise code.fail(x, "a conversion to an integer needs a rounding")
        return lambda frame: write(frame, to_integer(read(frame), target, mode))
    return _from_float(code, x, target, mode, flags, read)


def _from_integer(
    code: Code, x: Instruction, target: str, source: str, mode: str, flags: set[str]
) -> Run:
    read = code.read(x, 1, source)
    if target in INTEGERS:
        write, dtype = code.write(x, 0, target), NUMPY[target]
        if "sat" in flags:
            low, high = (
                max(np.iinfo(dtype).min, np.iinfo(NUMPY[source]).min),
                min(np.iinfo(dtype).max, np.iinfo(NUMPY[source]).max),
            )
            return lambda frame: write(frame, np.clip(read(frame), low, high).astype(dtype))
        return lambda frame: write(frame, read(frame).astype(dtype))
    if mode not in ("rn", "rz", "rm", "rp"):
        raise code.fail(x, "a conversion to a float needs a rounding")
    write = floats.encoded(code, x, 0, target)
    if target == "f64" or mode != "rn":
        if NUMPY[source].itemsize == 8 and mode != "rn":
            raise code.fail(x, f".{mode} is not evaluated here")
        finish = _directed(target, mode)
        return lambda frame: write(frame, finish(read(frame).astype(np.float64)))
    if target == "f32":
        return lambda frame: write(frame, read(frame).astype(np.float32))
    return lambda frame: write(frame, _odd_integer(read(frame)))


def _odd_integer(value):
    """float64 of an integer, rounded to odd where 53 bits do not hold it: it is rounded once
    more."""
    near = value.astype(np.float64)
    if value.dtype.itemsize < 8:
        return near
    low = (value & value.dtype.type(0xFFFF)).astype(np.float64)
    return floats.odd_sum((value - (value & value.dtype.type(0xFFFF))).astype(np.float64), low)


def _directed(target: str, mode: str):
    """float64 -> a value of the target type (bf16 as float32), rounded by `mode`; rn is left to who
    writes."""
    if mode in ("rn", ""):
        return lambda v: v
    dtype = np.dtype(
        {"f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": np.float32}[target]
    )

    def bf16(value):
        if mode != "rz":
            raise ValueError(f"conversion to bf16 with .{mode} is not evaluated")
        return (floats.odd(value).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    def other(value):
        near = value.astype(dtype)
        return floats.directed(near, value - near.astype(np.float64), mode)

    return bf16 if target == "bf16" else other


def _from_float(code: Code, x: Instruction, target: str, mode: str, flags: set[str], read) -> Run:
    write = floats.encoded(code, x, 0, target)
    finish = _WHOLE[mode] if mode in _WHOLE else None
    directed = _directed(target, mode) if mode in ("rz", "rm", "rp") else None

    def run(frame):
        value = read(frame)
        if finish is not None:
            value = finish(value)
        if directed is not None:
            value = directed(value.astype(np.float64))
        elif target == "f16" and value.dtype != np.float64:
            value = value.astype(np.float16)
        elif target == "bf16" and value.dtype == np.float16:
            value = value.astype(np.float32)
        if "sat" in flags:
            value = floats.saturated(value)
        if "relu" in flags:
            value = np.where(np.isnan(value), value, np.maximum(value, value.dtype.type(0)))[()]
        if "satfinite" in flags:
            most = 65504.0 if target == "f16" else 3.3895313892515355e38
            value = np.where(np.isnan(value), value, np.clip(value, -most, most)).astype(
                value.dtype
            )[()]
        if "ftz" in flags and target == "f32" and value.dtype == np.float32:
            value = floats.flushed(value)
        write(frame, value)

    return run


def _pack(code: Code, x: Instruction, target: str, mode: str, flags: set[str]) -> Run:
    """d = {a, b}: the first operand is the upper half."""
    high, low, write = (
        code.read(x, 1, "f32"),
        code.read(x, 2, "f32"),
        code.write(x, 0, "b32"),
    )
    if mode not in ("rn", "rz") or flags - {"relu"}:
        raise code.fail(x, "this conversion of a pair is not evaluated")

    def narrow(value):
        value = np.asarray(value)
        if "relu" in flags:
            value = np.where(np.isnan(value), value, np.maximum(value, np.float32(0)))
        if target == "f16x2":
            near = value.astype(np.float16)
            return (
                near
                if mode == "rn"
                else floats.directed(near, value.astype(np.float64) - near, "rz")
            ).view(np.uint16)
        return (
            floats.to_bf16(value)
            if mode == "rn"
            else (value.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        )

    def run(frame):
        upper, lower = narrow(high(frame)), narrow(low(frame))
        write(frame, (np.asarray(upper, np.uint32) << np.uint32(16) | lower)[()])

    return run


def _small(code: Code, x: Instruction, target: str, source: str, flags: set[str]) -> Run:
    if target in SMALL and source == "f32":
        high, low, write = (
            code.read(x, 1, "f32"),
            code.read(x, 2, "f32"),
            code.write(x, 0, "b16"),
        )

        def both(frame):
            upper, lower = (
                to_small(v(frame), target, "relu" in flags).astype(np.uint16) for v in (high, low)
            )
            write(frame, (upper << np.uint16(8) | lower)[()])

        return both
    if target in SMALL and source == "f16x2":
        read, write = code.read(x, 1, "b32"), code.write(x, 0, "b16")

        def narrow(frame):
            small = to_small(
                floats.pairs(read(frame)).view(np.float16), target, "relu" in flags
            ).astype(np.uint16)
            write(frame, (small[..., 1] << np.uint16(8) | small[..., 0])[()])

        return narrow
    if source in SMALL and target == "f16x2":
        read, write = code.read(x, 1, "b16"), code.write(x, 0, "b32")

        def widen(frame):
            raw = np.ascontiguousarray(np.asarray(read(frame)))[..., None].view(np.uint8)
            value = decode(raw.tobytes(), SMALL[source], raw.shape).astype(np.float16)
            write(frame, floats.joined(value.view(np.uint16)))

        return widen
    raise code.fail(x, f"conversion from .{source} to .{target} is not evaluated")
