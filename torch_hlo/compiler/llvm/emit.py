"""Writing straight-line IR text on values of `lanes` elements. A value is an SSA name (`%v7`) or a
literal (`0x3FF…`, `5`, `true`).

    e = Emit(16, lines, Unit(target))
    t = e.typed("float")
    y = t.fma(x, 2.0, 1.0)  # lines += ["%v1 = call <16 x float> @llvm.fma.v16f32(…)"]

Literals are written per use (`splat (float 0x…)`), so constants cost no instruction.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

from .target import Target

Operand = str | float  # of Typed's operations: a value, or a number for all lanes
LONG = 7  # coefficients of a polynomial
INT_OF = {"float": "i32", "double": "i64", "half": "i16", "bfloat": "i16"}
_SUFFIX = {"float": "f32", "double": "f64", "half": "f16", "bfloat": "bf16"}
BITS = {
    "i1": 1,
    "i8": 8,
    "i16": 16,
    "i32": 32,
    "i64": 64,
    "half": 16,
    "bfloat": 16,
    "float": 32,
    "double": 64,
    "ptr": 64,
}


def literal(kind: str, value: float) -> str:
    """Text of a number in scalar type `kind` (integers wrap)."""
    if kind == "float":
        value = float(value)
        if math.isfinite(value):
            try:
                value = struct.unpack("f", struct.pack("f", value))[0]
            except OverflowError:
                value = math.copysign(math.inf, value)
        return "0x" + struct.pack(">d", value).hex().upper()
    if kind == "double":
        return "0x" + struct.pack(">d", float(value)).hex().upper()
    if kind == "i1":
        return "true" if value else "false"
    bits = BITS[kind]
    value = int(value) & ((1 << bits) - 1)
    return str(value - (1 << bits) if value >> (bits - 1) else value)


def transposed(
    op: Callable[[str], str],
    kind: str,
    lanes: int,
    block: Sequence[str],
    group: int = 1,
) -> list[str]:
    """Transpose of `lanes` vectors of `lanes` elements, by log2(lanes) rounds of two-vector
    shuffles; with a `group`, of as many vectors as a vector has groups of so many elements.
    `op(expression)` writes an instruction and returns its name.

    The first rounds interleave inside 128-bit pieces, the others take the even or odd pieces:
    shuffles that x86 has as single instructions without an index register, which also compile
    several times faster than arbitrary ones."""
    n = lanes // group
    vector = f"<{lanes} x {kind}>"
    piece = min(128 // (BITS[kind] * group), n)
    block = list(block)
    # which element each lane now has
    holds = [[(row, column) for column in range(n)] for row in range(n)]
    distance = 1
    while distance < n:
        half = _round(n, piece, distance)
        for i in range(n):
            if not i & distance:
                a = block[i]
                b = block[i + distance]
                held = holds[i] + holds[i + distance]
                for at, order in zip((i, i + distance), half, strict=True):
                    text = ", ".join(f"i32 {m * group + g}" for m in order for g in range(group))
                    block[at] = op(
                        f"shufflevector {vector} {a}, {vector} {b}, <{lanes} x i32> <{text}>"
                    )
                    holds[at] = [held[m] for m in order]
        distance *= 2
        if distance == 4 < n:
            block = [_opaque(op, kind, lanes, v) for v in block]
    by_column = {held[0][1]: value for held, value in zip(holds, block, strict=True)}
    assert all(h == [(r, h[0][1]) for r in range(n)] for h in holds)
    return [by_column[column] for column in range(n)]


def _round(n: int, piece: int, distance: int) -> list[list[int]]:
    """What the two results of a round take of two vectors: the lower halves, the upper ones."""
    if distance < piece:
        return [
            [
                lane + base + k
                for lane in range(0, n, piece)
                for g in range(0, piece // 2, distance)
                for base in (g + h, g + h + n)
                for k in range(distance)
            ]
            for h in (0, piece // 2)
        ]
    return [
        [
            lane + base + k
            for base in (0, n)
            for lane in range(h, n, 2 * piece)
            for k in range(piece)
        ]
        for h in (0, piece)
    ]


def _opaque(op: Callable[[str], str], kind: str, lanes: int, value: str) -> str:
    """The vector, of whose making LLVM knows nothing: it would look through all rounds of a
    transpose for shorter ways, in vain, for half of a kernel's compile time."""
    floats = lanes * BITS[kind] // 32
    own = f"<{lanes} x {kind}>"
    fence = f"call <{floats} x float> @llvm.arithmetic.fence.v{floats}f32(<{floats} x float> "
    if kind == "float":
        return op(f"{fence}{value})")
    return op(
        f"bitcast <{floats} x float>"
        f" {op(fence + op(f'bitcast {own} {value} to <{floats} x float>') + ')')} to {own}"
    )


class Definitions(Protocol):
    """Where functions and symbols are defined: a Program."""

    def function(self, name: str, text: str) -> str: ...
    def symbol(self, symbol: str, declaration: str) -> str: ...


class Unit:
    """What all Emits of one function share: the numbers of its values, the target, the C functions
    called (name -> declaration), functions of our own (name -> definition), and the memory forms of
    values that were decoded: (element type, value) -> operand."""

    __slots__ = ("count", "target", "externals", "functions", "encoded")

    def __init__(self, target: Target | None = None) -> None:
        self.count = 0
        self.target = target
        self.externals: dict[str, str] = {}
        self.functions: dict[str, str] = {}
        self.encoded: dict[tuple[str, str], str] = {}

    def number(self) -> int:
        self.count += 1
        return self.count

    def declare(self, program: Definitions) -> None:
        """Give the program what the function calls."""
        for name, definition in self.functions.items():
            program.function(name, definition)
        for symbol, declaration in self.externals.items():
            program.symbol(symbol, declaration)

    def has(self, feature: str) -> bool:
        return self.target is not None and self.target.has(feature)

    def rounds(self, dtype: str) -> bool:
        """Whether every value of this type is rounded to it."""
        return dtype != "bf16" or self.target is None or not self.target.excess_precision

    @property
    def fuses(self) -> bool:
        """Whether `fma` rounds once."""
        return self.target is None or self.target.fuses


class Emit:
    """Appends lines; `lanes` 1 means scalars."""

    __slots__ = ("lanes", "lines", "unit", "_typed")

    def __init__(self, lanes: int, lines: list[str], unit: Unit) -> None:
        self.lanes = lanes
        self.lines = lines
        self.unit = unit
        self._typed: dict[str, Typed] = {}

    def op(self, expression: str) -> str:
        unit = self.unit
        unit.count += 1
        name = f"%v{unit.count}"
        self.lines.append(f"  {name} = {expression}")
        return name

    def do(self, line: str) -> None:
        self.lines.append("  " + line)

    def type(self, kind: str) -> str:
        return kind if self.lanes == 1 else f"<{self.lanes} x {kind}>"

    def typed(self, kind: str) -> Typed:
        found = self._typed.get(kind)
        if found is None:
            found = self._typed[kind] = Typed(self, kind)
        return found

    def splat(self, kind: str, value: str) -> str:
        """A scalar operand in all lanes."""
        if self.lanes == 1 or value.startswith(("splat", "<", "zeroinit")):
            return value
        if not value.startswith(("%", "@")):
            return f"splat ({kind} {value})"
        v = self.type(kind)
        first = self.op(f"insertelement {v} poison, {kind} {value}, i64 0")
        return self.op(
            f"shufflevector {v} {first}, {v} poison, <{self.lanes} x i32> zeroinitializer"
        )

    def iota(self, kind: str, step: int = 1) -> str:
        """<0, step, 2*step, …>."""
        return (
            "<" + ", ".join(f"{kind} {literal(kind, i * step)}" for i in range(self.lanes)) + ">"
            if self.lanes > 1
            else "0"
        )

    def cast(self, how: str, value: str, source: str, target: str) -> str:
        """`zext`, `fptrunc`, `bitcast`… from one scalar kind to another."""
        return (
            value
            if source == target
            else self.op(f"{how} {self.type(source)} {value} to {self.type(target)}")
        )

    def any(self, lanes: str) -> str:
        """Whether some lane of an i1 vector is set."""
        return self.op(f"call i1 @llvm.vector.reduce.or.v{self.lanes}i1({self.type('i1')} {lanes})")

    def shuffle(self, kind: str, a: str, b: str, lanes: int, order: Sequence[int]) -> str:
        """shufflevector of two vectors of `lanes` elements."""
        text = ", ".join(f"i32 {i}" for i in order)
        return self.op(
            f"shufflevector <{lanes} x {kind}> {a}, <{lanes} x {kind}> {b}, <{len(order)} x i32>"
            f" <{text}>"
        )

    def reversed(self, kind: str, value: str) -> str:
        """The lanes from last to first."""
        return self.shuffle(kind, value, "poison", self.lanes, range(self.lanes - 1, -1, -1))


def apart(e: Emit, kind: str, block: Sequence[str]) -> list[str]:
    """Elements that lie in turns in the vectors of `block`, each turn's in a vector of its own."""
    n = len(block)
    if n == 1:
        return list(block)
    p = _factor(n)
    found = []
    for turn in range(p):
        numbers = [i * p + turn for i in range(e.lanes)]
        found.append(
            apart(e, kind, [_picked(e, kind, block[v : v + p], numbers) for v in range(0, n, p)])
        )
    return [found[turn % p][turn // p] for turn in range(n)]


def in_turns(e: Emit, kind: str, values: Sequence[str]) -> list[str]:
    """The inverse: the vectors that hold element 0 of every value, then element 1 of every one."""
    n = len(values)
    lanes = e.lanes
    if n == 1:
        return list(values)
    p = _factor(n)
    found = [in_turns(e, kind, values[turn::p]) for turn in range(p)]
    numbers = [i % p * lanes + i // p for i in range(p * lanes)]
    return [
        _picked(e, kind, block, numbers[v : v + lanes])
        for block in zip(*found, strict=True)
        for v in range(0, p * lanes, lanes)
    ]


def _factor(n: int) -> int:
    return next(p for p in range(2, n + 1) if n % p == 0)


def _picked(e: Emit, kind: str, block: Sequence[str], numbers: Sequence[int]) -> str:
    """A vector of elements by their numbers in the whole block."""
    lanes = e.lanes
    vector = block[0]
    places = [n % lanes for n in numbers]
    for v, other in enumerate(block[1:], 1):
        places = [
            n - (v - 1) * lanes if n // lanes == v else at
            for n, at in zip(numbers, places, strict=True)
        ]
        vector = e.shuffle(kind, vector, other, lanes, places)
        places = list(range(lanes))
    return vector


class Typed:
    """Operations on one scalar kind (`float`, `double`, `i32`…) at the Emit's width. A Python
    number as an operand is its `const`."""

    __slots__ = ("e", "kind", "type", "suffix", "is_float")

    def __init__(self, e: Emit, kind: str) -> None:
        self.e = e
        self.kind = kind
        self.type = e.type(kind)
        self.suffix = ("" if e.lanes == 1 else f"v{e.lanes}") + _SUFFIX.get(kind, kind)
        self.is_float = kind in _SUFFIX

    def const(self, value: float) -> str:
        text = literal(self.kind, value)
        return text if self.e.lanes == 1 else f"splat ({self.kind} {text})"

    def of(self, value: Operand) -> str:
        return value if isinstance(value, str) else self.const(value)

    def bin(self, op: str, a: Operand, b: Operand) -> str:
        return self.e.op(f"{op} {self.type} {self.of(a)}, {self.of(b)}")

    def add(self, a: Operand, b: Operand) -> str:
        return self.bin("fadd" if self.is_float else "add", a, b)

    def sub(self, a: Operand, b: Operand) -> str:
        return self.bin("fsub" if self.is_float else "sub", a, b)

    def mul(self, a: Operand, b: Operand) -> str:
        return self.bin("fmul" if self.is_float else "mul", a, b)

    def div(self, a: Operand, b: Operand) -> str:
        """Floating-point division."""
        return self.bin("fdiv", a, b)

    def neg(self, a: str) -> str:
        return self.e.op(f"fneg {self.type} {a}") if self.is_float else self.sub(0, a)

    def fma(self, a: Operand, b: Operand, c: Operand) -> str:
        return self.call("fma", a, b, c) if self.is_float else self.add(c, self.mul(a, b))

    def call(self, name: str, *arguments: Operand) -> str:
        """LLVM intrinsic `llvm.<name>.<type>` whose arguments and result all have this type."""
        t = self.type
        typed = ", ".join([f"{t} {self.of(a)}" for a in arguments])
        return self.e.op(f"call {t} @llvm.{name}.{self.suffix}({typed})")

    def abs(self, a: str) -> str:
        if self.is_float:
            return self.call("fabs", a)
        return self.e.op(f"call {self.type} @llvm.abs.{self.suffix}({self.type} {a}, i1 false)")

    def sqrt(self, a: str) -> str:
        return self.call("sqrt", a)

    def copysign(self, magnitude: Operand, sign: Operand) -> str:
        return self.call("copysign", magnitude, sign)

    def cmp(self, predicate: str, a: Operand, b: Operand) -> str:
        """Comparison giving i1 lanes: fcmp predicates (`olt`, `une`) on floats, icmp (`slt`, `eq`)
        on integers."""
        return self.bin(f"{'fcmp' if self.is_float else 'icmp'} {predicate}", a, b)

    def bin_and(self, a: str, b: str) -> str:
        """Conjunction of two conditions."""
        return self.e.op(f"and {self.e.type('i1')} {a}, {b}")

    def bin_or(self, a: str, b: str) -> str:
        """Disjunction of two conditions."""
        return self.e.op(f"or {self.e.type('i1')} {a}, {b}")

    def select(self, condition: str, a: Operand, b: Operand) -> str:
        return self.e.op(
            f"select {self.e.type('i1')} {condition}, {self.type} {self.of(a)}, {self.type}"
            f" {self.of(b)}"
        )

    def poly(self, x: str, coefficients: Sequence[float]) -> str:
        """By Horner's rule, highest degree first; of long ones even and odd powers apart, which
        takes half as long."""
        if len(coefficients) >= LONG:
            z = self.mul(x, x)
            even = coefficients[-1::-2]
            odd = coefficients[-2::-2]
            return self.fma(self.horner(z, odd[::-1]), x, self.horner(z, even[::-1]))
        return self.horner(x, coefficients)

    def horner(self, x: str, coefficients: Sequence[float]) -> str:
        """A polynomial, one power after the other."""
        r = self.const(coefficients[0])
        for c in coefficients[1:]:
            r = self.fma(r, x, c)
        return r

    def ints(self) -> Typed:
        """The integer kind of the same width."""
        return self.e.typed(INT_OF[self.kind])

    def bits(self, a: str) -> str:
        """The value's bits in `ints()`."""
        return self.e.op(f"bitcast {self.type} {a} to {self.e.type(INT_OF[self.kind])}")

    def from_bits(self, a: str) -> str:
        return self.e.op(f"bitcast {self.e.type(INT_OF[self.kind])} {a} to {self.type}")

    def external(self, name: str, *arguments: str) -> str:
        """A C function of scalars of this kind, called for every lane."""
        e = self.e
        kind = self.kind
        e.unit.externals[name] = f"declare {kind} @{name}({', '.join([kind] * len(arguments))}) #1"
        if e.lanes == 1:
            return e.op(f"call {kind} @{name}({', '.join(f'{kind} {a}' for a in arguments)})")
        result = "poison"
        for i in range(e.lanes):
            parts = [e.op(f"extractelement {self.type} {a}, i64 {i}") for a in arguments]
            value = e.op(f"call {kind} @{name}({', '.join(f'{kind} {p}' for p in parts)})")
            result = e.op(f"insertelement {self.type} {result}, {kind} {value}, i64 {i}")
        return result

    def packed(self, values: Sequence[str]) -> str:
        """The vector of one scalar per lane."""
        if self.e.lanes == 1:
            return values[0]
        result = "poison"
        for i, value in enumerate(values):
            result = self.e.op(f"insertelement {self.type} {result}, {self.kind} {value}, i64 {i}")
        return result

    def lane(self, value: str, i: int) -> str:
        """The scalar in lane `i`."""
        if self.e.lanes == 1:
            return value
        return self.e.op(f"extractelement {self.type} {value}, i64 {i}")

    def unpacked(self, value: str) -> list[str]:
        """The scalars of all lanes."""
        return [self.lane(value, i) for i in range(self.e.lanes)]

    # -- memory
    def load(self, pointer: str, align: int = 0, mask: str | None = None) -> str:
        """Consecutive elements; lanes that are off in `mask` are not read and are zero. `align`: in
        bytes, where it is not that of an element."""
        t = self.type
        align = align or BITS[self.kind] // 8
        if not mask:
            return self.e.op(f"load {t}, ptr {pointer}, align {align}")
        # LLVM 22 reads the alignment of masked accesses as an argument too, as those before it do.
        return self.e.op(
            f"call {t} @llvm.masked.load.{self.suffix}.p0(ptr {pointer}, i32 {align},"
            f" {self.e.type('i1')} {mask}, {t} zeroinitializer)"
        )

    def store(
        self,
        value: str,
        pointer: str,
        align: int = 0,
        mask: str | None = None,
        nontemporal: bool = False,
    ) -> None:
        t = self.type
        align = align or BITS[self.kind] // 8
        if not mask:
            self.e.do(
                f"store {t} {value}, ptr {pointer}, align {align}"
                + (", !nontemporal !0" if nontemporal else "")
            )
        elif mask == _first_lane(self.e.lanes):
            # LLVM 22 makes a scalar store of this as well, but one of the type that the value had
            # before it was truncated.
            self.e.do(f"store {self.kind} {self.lane(value, 0)}, ptr {pointer}, align {align}")
        else:
            self.e.do(
                f"call void @llvm.masked.store.{self.suffix}.p0({t} {value}, ptr {pointer},"
                f" i32 {align}, {self.e.type('i1')} {mask})"
            )

    def gather(
        self,
        pointer: str,
        offsets: str,
        offset_kind: str,
        mask: str | None = None,
    ) -> str:
        """Elements at pointer[offsets]."""
        n = self.e.lanes
        t = self.type
        where, m = self._places(pointer, offsets, offset_kind, mask)
        return self.e.op(
            f"call {t} @llvm.masked.gather.{self.suffix}.v{n}p0({where}, {m}, {t} zeroinitializer)"
        )

    def scatter(
        self,
        value: str,
        pointer: str,
        offsets: str,
        offset_kind: str,
        mask: str | None = None,
    ) -> None:
        """pointer[offsets] = value."""
        where, m = self._places(pointer, offsets, offset_kind, mask)
        self.e.do(
            f"call void @llvm.masked.scatter.{self.suffix}.v{self.e.lanes}p0({self.type} {value},"
            f" {where}, {m})"
        )

    def _places(
        self, pointer: str, offsets: str, offset_kind: str, mask: str | None
    ) -> tuple[str, str]:
        """pointer[offsets] and the mask, as arguments of intrinsics."""
        n = self.e.lanes
        at = self.e.op(f"getelementptr {self.kind}, ptr {pointer}, <{n} x {offset_kind}> {offsets}")
        where = f"<{n} x ptr> {at}, i32 {BITS[self.kind] // 8}"
        return where, f"<{n} x i1> {mask or 'splat (i1 true)'}"


@lru_cache(16)
def _first_lane(lanes: int) -> str:
    return "<" + ", ".join(["i1 true"] + ["i1 false"] * (lanes - 1)) + ">"
