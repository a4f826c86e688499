"""Integers, bits and predicates (PTX ISA, sections 9.7.1, 9.7.2, 9.7.6, 9.7.8)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from test.ptx import floats
from test.ptx.syntax import SIZES, Instruction
from test.ptx.table import NUMPY, UNSIGNED, Code, Run, instruction

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
_WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
U32 = np.uint32


def simple(
    code: Code,
    x: Instruction,
    function: Callable,
    kind: str,
    kinds: tuple[str, ...] = (),
) -> Run:
    """`d = function(a, b, …)` with operands of `kinds`, or all of the result's kind."""
    write = code.write(x, 0, kind)
    reads = [code.read(x, i + 1, k) for i, k in enumerate(kinds or (kind,) * (len(x.operands) - 1))]
    if len(reads) == 1:
        (a,) = reads
        return lambda frame: write(frame, function(a(frame)))
    if len(reads) == 2:
        a, b = reads
        return lambda frame: write(frame, function(a(frame), b(frame)))
    return lambda frame: write(frame, function(*[r(frame) for r in reads]))


# -- multiplication
# --------------------------------------------------------------------------------------------------------
def high(a, b):
    """The upper half of the product, of any integer type."""
    dtype = a.dtype
    if dtype.itemsize < 8:
        wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
        return (a.astype(wide) * b.astype(wide) >> wide.type(8 * dtype.itemsize)).astype(dtype)
    ua, ub, low, by = (
        a.view(np.uint64),
        b.view(np.uint64),
        np.uint64(0xFFFFFFFF),
        np.uint64(32),
    )
    al, ah, bl, bh = ua & low, ua >> by, ub & low, ub >> by
    middle = ah * bl + (al * bl >> by)
    product = ah * bh + (middle >> by) + ((al * bh + (middle & low)) >> by)
    if dtype.kind == "i":  # a negative factor counts 2**64 too much
        product = product - np.where(a < 0, ub, np.uint64(0)) - np.where(b < 0, ua, np.uint64(0))
        product = product if product.ndim else product[()]
    return product.view(dtype)


@instruction("mul", "mad", "fma")
def multiply(code: Code, x: Instruction) -> Run:
    if x.modifiers[-1] not in INTEGERS:
        return floats.arithmetic(code, x)
    part, kind = code.modifiers(x, ("lo", "hi", "wide"), INTEGERS)
    result = _WIDE.get(kind, "") if part == "wide" else kind
    if not part or not result:
        raise code.fail(x, "no such product")
    wide = NUMPY[result]
    product = {
        "lo": np.multiply,
        "hi": high,
        "wide": lambda a, b: a.astype(wide) * b.astype(wide),
    }[part]
    if x.opcode == "mul":
        return simple(code, x, product, result, (kind, kind))
    return simple(code, x, lambda a, b, c: product(a, b) + c, result, (kind, kind, result))


@instruction("mul24", "mad24")
def multiply24(code: Code, x: Instruction) -> Run:
    _, kind = code.modifiers(x, "lo", ("u32", "s32"))
    by = NUMPY[kind].type(8)
    product = lambda a, b: ((a << by) >> by) * ((b << by) >> by)
    return simple(
        code,
        x,
        product if x.opcode == "mul24" else lambda a, b, c: product(a, b) + c,
        kind,
    )


# -- division
# ---------------------------------------------------------------------------------------------------------------
def quotient(a, b):
    """Truncated; by zero all ones, as hardware gives (the document leaves it open)."""
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    q = a // safe
    if a.dtype.kind == "i":
        q = q + ((q < 0) & (q * safe != a))
    return _scalar(
        np.where(
            zero, a.dtype.type(-1) if a.dtype.kind == "i" else np.iinfo(a.dtype).max, q
        ).astype(a.dtype)
    )


def remainder(a, b):
    return _scalar(np.where(b == 0, a, a - quotient(a, b) * b).astype(a.dtype))


def _scalar(value):
    return value if value.ndim else value[()]


@instruction("div")
def divide(code: Code, x: Instruction) -> Run:
    if x.modifiers[-1] in INTEGERS:
        return simple(code, x, quotient, x.modifiers[-1])
    return floats.arithmetic(code, x)


# -- add, sub, min, max, …
# -----------------------------------------------------------------------------------------------------
_INTEGER = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
    "rem": remainder,
    "neg": np.negative,
    "abs": np.abs,
    "sad": lambda a, b, c: c + np.where(a > b, a - b, b - a).astype(c.dtype),
}


@instruction(*_INTEGER)
def integer(code: Code, x: Instruction) -> Run:
    kind = x.modifiers[-1]
    if kind not in INTEGERS:
        return floats.arithmetic(code, x)
    if x.modifiers[:-1] == ("sat",) and kind == "s32" and x.opcode in ("add", "sub"):
        wide = {"add": np.add, "sub": np.subtract}[x.opcode]
        return simple(
            code,
            x,
            lambda a, b: np.clip(
                wide(a.astype(np.int64), b.astype(np.int64)), -(1 << 31), (1 << 31) - 1
            ).astype(np.int32),
            kind,
        )
    code.modifiers(x, INTEGERS)
    return simple(code, x, _INTEGER[x.opcode], kind)


# -- bits
# ---------------------------------------------------------------------------------------------------------------------
_LOGIC = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "cnot": lambda a: (a == 0).astype(a.dtype),
}


@instruction(*_LOGIC)
def logic(code: Code, x: Instruction) -> Run:
    (kind,) = code.modifiers(x, ("pred", "b16", "b32", "b64"))
    return simple(code, x, _LOGIC[x.opcode], kind)


@instruction("shl", "shr")
def shift(code: Code, x: Instruction) -> Run:
    """Section 9.7.8.8: amounts of the width or more give zero, or the sign; so do NumPy's
    shifts."""
    (kind,) = code.modifiers(x, ("b16", "b32", "b64", *INTEGERS))
    dtype = NUMPY[kind]
    operate = np.left_shift if x.opcode == "shl" else np.right_shift
    return simple(code, x, lambda a, n: operate(a, n.astype(dtype)), kind, (kind, "u32"))


@instruction("shf")
def funnel(code: Code, x: Instruction) -> Run:
    left, clamp, _ = code.modifiers(x, ("l", "r"), ("wrap", "clamp"), "b32")
    most = np.uint64(32)

    def shifted(low, upper, n):
        n = (
            (n & U32(31)).astype(np.uint64)
            if clamp == "wrap"
            else np.minimum(n, U32(32)).astype(np.uint64)
        )
        both = upper.astype(np.uint64) << most | low
        return ((both << n) >> most if left == "l" else both >> n).astype(np.uint32)

    return simple(code, x, shifted, "b32")


def leading_zeros(a):
    """Of unsigned values; the width for 0."""
    width = 8 * a.dtype.itemsize
    found = np.full(np.shape(a), width, np.uint32)
    rest = np.array(a)
    for step in (32, 16, 8, 4, 2, 1):
        if step < width:
            upper = rest >> rest.dtype.type(step)
            there = upper != 0
            found = np.where(there, found - U32(step), found)
            rest = np.where(there, upper, rest)
    return _scalar((found - (rest != 0)).astype(np.uint32))


def reversed_bits(a):
    width = 8 * a.dtype.itemsize
    for step in (1, 2, 4, 8, 16, 32):
        if step < width:
            mask = a.dtype.type(sum(((1 << step) - 1) << at for at in range(0, width, 2 * step)))
            by = a.dtype.type(step)
            a = (a >> by & mask) | ((a & mask) << by)
    return a


@instruction("clz", "popc", "brev", "bfind")
def count(code: Code, x: Instruction) -> Run:
    if x.opcode == "bfind":
        amount, kind = code.modifiers(x, "shiftamt", ("u32", "s32", "u64", "s64"))

        def find(a):
            raw = a.view(UNSIGNED[a.dtype.itemsize])
            z = leading_zeros(_scalar(np.where(a < 0, ~raw, raw)) if a.dtype.kind == "i" else raw)
            return _scalar(
                np.where(
                    z == 8 * a.dtype.itemsize,
                    U32(0xFFFFFFFF),
                    z if amount else U32(8 * a.dtype.itemsize - 1) - z,
                ).astype(np.uint32)
            )

        return simple(code, x, find, "u32", (kind,))
    (kind,) = code.modifiers(x, ("b32", "b64"))
    if x.opcode == "brev":
        return simple(code, x, reversed_bits, kind)
    return simple(
        code,
        x,
        leading_zeros if x.opcode == "clz" else lambda a: np.bitwise_count(a).astype(np.uint32),
        "u32",
        (kind,),
    )


@instruction("bfe")
def extract(code: Code, x: Instruction) -> Run:
    """Section 9.7.1.18: the field [pos, pos+len), extended by the sign bit of the field or, beyond
    the width, of the value."""
    (kind,) = code.modifiers(x, ("u32", "s32", "u64", "s64"))
    width, unsigned = 8 * SIZES[kind], UNSIGNED[SIZES[kind]]

    def field(a, pos, length):
        pos, length = pos & U32(255), length & U32(255)
        raw = a.view(unsigned)
        n = np.minimum(length, U32(width))
        mask = np.where(
            n == width,
            ~unsigned.type(0),
            (unsigned.type(1) << n.astype(unsigned)) - unsigned.type(1),
        )
        got = (raw >> pos.astype(unsigned)) & mask
        if kind[0] == "s":
            at = np.minimum(pos + length - U32(1), U32(width - 1)).astype(unsigned)
            sign = (raw >> at & unsigned.type(1) != 0) & (length != 0)
            have = np.clip(width - pos.astype(np.int64), 0, n)  # bits of the field that exist
            fill = np.where(
                have == width,
                unsigned.type(0),
                ~((unsigned.type(1) << have.astype(unsigned)) - unsigned.type(1)),
            )
            got = np.where(sign, got | fill, got)
        return _scalar(np.asarray(got, unsigned)).view(a.dtype)

    return simple(code, x, field, kind, (kind, "u32", "u32"))


@instruction("bfi")
def insert(code: Code, x: Instruction) -> Run:
    (kind,) = code.modifiers(x, ("b32", "b64"))
    width, dtype = 8 * SIZES[kind], NUMPY[kind]

    def field(a, b, pos, length):
        pos, length = (
            (pos & U32(255)).astype(dtype),
            np.minimum(length & U32(255), U32(width)).astype(dtype),
        )
        mask = (
            np.where(
                length == width,
                ~dtype.type(0),
                (dtype.type(1) << length) - dtype.type(1),
            )
            << pos
        )
        return _scalar(np.asarray((b & ~mask) | ((a << pos) & mask), dtype))

    return simple(code, x, field, kind, (kind, kind, "u32", "u32"))


@instruction("bmsk", "szext")
def mask(code: Code, x: Instruction) -> Run:
    mode, kind = code.modifiers(x, ("clamp", "wrap"), ("b32", "u32", "s32"))
    ones = np.uint64(0xFFFFFFFF)

    def limited(v):
        return (v & U32(31) if mode == "wrap" else np.minimum(v, U32(32))).astype(np.uint64)

    if x.opcode == "bmsk":
        return simple(
            code,
            x,
            lambda a, b: (
                (((np.uint64(1) << limited(b)) - np.uint64(1)) << limited(a)) & ones
            ).astype(np.uint32),
            "b32",
        )

    def extend(a, n):
        by = np.uint64(64) - limited(n)
        moved = a.astype(np.uint64) << by
        back = moved.view(np.int64) >> by.view(np.int64) if kind == "s32" else moved >> by
        return _scalar(np.where(limited(n) == 0, 0, back).astype(NUMPY[kind]))

    return simple(code, x, extend, kind, (kind, "u32"))


@instruction("lop3")
def lookup3(code: Code, x: Instruction) -> Run:
    """Section 9.7.8.7: bit i of the result is bit (4 a + 2 b + c) of the table."""
    code.modifiers(x, "b32")
    table = x.operands[4].value

    def combine(a, b, c, _):
        result = a & U32(0)
        for i in range(8):
            if table >> i & 1:
                result = result | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return result

    return simple(code, x, combine, "b32")


@instruction("prmt")
def permute(code: Code, x: Instruction) -> Run:
    """Section 9.7.9.7: bytes of {b, a} picked by the nibbles of c; the top bit of a nibble copies
    the byte's sign."""
    mode, _ = code.modifiers(x, ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"), "b32")
    if mode:
        raise code.fail(x, f"prmt.{mode} is not evaluated")
    seven, eight, four = np.uint64(7), np.uint64(8), U32(4)

    def pick(a, b, c):
        both = b.astype(np.uint64) << np.uint64(32) | a
        result = np.uint32(0)
        for i in range(4):
            nibble = c >> four * U32(i) & U32(15)
            byte = (both >> ((nibble.astype(np.uint64) & seven) * eight) & np.uint64(255)).astype(
                np.uint32
            )
            byte = np.where(nibble & U32(8), np.where(byte & U32(128), U32(255), U32(0)), byte)
            result = result | byte.astype(np.uint32) << U32(8 * i)
        return _scalar(np.asarray(result, np.uint32))

    return simple(code, x, pick, "b32")


@instruction("dp4a")
def dot4(code: Code, x: Instruction) -> Run:
    a_kind, b_kind = x.modifiers
    types = {"u32": np.uint8, "s32": np.int8}

    def product(a, b, c):
        parts = [
            np.ascontiguousarray(v).reshape(-1, 1).view(types[k]).astype(np.int32)
            for v, k in ((a, a_kind), (b, b_kind))
        ]
        return c + (parts[0] * parts[1]).sum(axis=1, dtype=np.int32).astype(c.dtype)

    return simple(
        code,
        x,
        product,
        "u32" if x.modifiers == ("u32", "u32") else "s32",
        (a_kind, b_kind, "u32" if x.modifiers == ("u32", "u32") else "s32"),
    )


# -- comparison
# -----------------------------------------------------------------------------------------------------------------
def _unordered(compare: Callable) -> Callable:
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


_ORDERED = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED = {
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
COMPARE = {
    "int": {**_ORDERED, **_UNSIGNED, "ne": np.not_equal},
    "float": {
        **_ORDERED,
        "ne": lambda a, b: (a < b) | (a > b),
        **{f"{n}u": _unordered(f) for n, f in _ORDERED.items()},
        "neu": np.not_equal,
        "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
        "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    },
}
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


@instruction("setp", "set")
def compare(code: Code, x: Instruction) -> Run:
    """Section 9.7.6. The second predicate of `p|q` is the comparison's opposite, combined with c
    too."""
    modifiers = [m for m in x.modifiers if m != "ftz"]
    result = "pred" if x.opcode == "setp" else modifiers.pop(-2)
    kind = modifiers[-1]
    family = "int" if kind in (*INTEGERS, "b16", "b32", "b64") else "float"
    test = COMPARE[family].get(modifiers[0])
    combine = _COMBINE.get(modifiers[1]) if len(modifiers) == 3 else None
    if (
        test is None
        or len(modifiers) == 3
        and combine is None
        or len(modifiers) > 3
        or kind in ("f16x2", "bf16x2")
    ):
        raise code.fail(x, "no such comparison")
    (a, b), ftz = (
        [
            floats.decoded(code, x, i, kind) if family == "float" else code.read(x, i, kind)
            for i in (1, 2)
        ],
        "ftz" in x.modifiers and kind == "f32",
    )
    third = code.read(x, 3, "pred") if combine else None
    targets = code.items(x, 0)
    writes = [code.write(x, t, "pred" if result == "pred" else result) for t in targets]
    true = {
        "u32": np.uint32(0xFFFFFFFF),
        "s32": np.int32(-1),
        "f32": np.float32(1),
        "u16": np.uint16(0xFFFF),
        "s16": np.int16(-1),
        "f16": np.float16(1),
    }.get(result)

    def run(frame):
        u, v = a(frame), b(frame)
        if ftz:
            u, v = floats.flushed(u), floats.flushed(v)
        found = test(u, v)
        answers = [found, ~found] if len(writes) == 2 else [found]
        for write, answer in zip(writes, answers, strict=True):
            if combine:
                answer = combine(answer, third(frame))
            write(
                frame,
                answer if result == "pred" else _scalar(np.where(answer, true, true.dtype.type(0))),
            )

    return run


@instruction("selp")
def select(code: Code, x: Instruction) -> Run:
    (kind,) = code.modifiers(x, ("b16", "b32", "b64", "f32", "f64", *INTEGERS))
    return simple(code, x, lambda a, b, p: _scalar(np.where(p, a, b)), kind, (kind, kind, "pred"))


@instruction("slct")
def select_by_sign(code: Code, x: Instruction) -> Run:
    kinds = [m for m in x.modifiers if m != "ftz"]
    return simple(
        code,
        x,
        lambda a, b, c: _scalar(np.where(c >= 0, a, b)),
        kinds[0],
        (kinds[0], kinds[0], kinds[1]),
    )
