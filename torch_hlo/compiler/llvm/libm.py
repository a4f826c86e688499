"""Mathematical functions that compiled code calls for rare cases, as scalar IR: libraries have no
libm.

`ROUTINES[name](target)` is the definition of the C function `name`. Reductions of huge angles: M.
Payne, R. Hanek, "Radian reduction for trigonometric functions", SIGNUM 18 (1983). Products and sums
of two doubles: T. Dekker, Numer. Math. 18 (1971). erf: Abramowitz and Stegun 7.1.6 and 7.1.14.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial

from . import math as functions
from .emit import Emit, Typed, Unit
from .math_circular import in_quadrant, sin_cos
from .target import Target

Routine = Callable[[Target, str], str]  # the text of the function of that name

ROUTINES: dict[str, Callable[[Target], str]] = {}
NEEDS: dict[str, tuple[str, ...]] = {}  # routine -> others that it calls


def _named(fn: Routine, name: str, target: Target) -> str:
    return fn(target, name)


def _routine(*names: str, needs: tuple[str, ...] = ()) -> Callable[[Routine], Routine]:
    def register(fn: Routine) -> Routine:
        for name in names:
            ROUTINES[name] = partial(_named, fn, name)
            NEEDS[name] = needs
        return fn

    return register


class _Code:
    """A scalar function under construction."""

    def __init__(self, target: Target) -> None:
        self.lines: list[str] = []
        self.e = Emit(1, self.lines, Unit(target))
        self.d = self.e.typed("double")
        self.i = self.e.typed("i64")

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")

    def text(self, name: str, result: str, params: str) -> str:
        if self.e.unit.functions or self.e.unit.externals:
            raise AssertionError(f"{name} calls {[*self.e.unit.functions, *self.e.unit.externals]}")
        return "\n".join(
            [
                f"define internal {result} @{name}({params}) #0 {{",
                "entry:",
                *self.lines,
                "}",
                "",
            ]
        )


def _in_double(name: str, of: str, count: int) -> str:
    """The single-precision function `name` by way of the double one."""
    kinds = ", ".join(f"float %x{i}" for i in range(count))
    wide = "".join(f"  %d{i} = fpext float %x{i} to double\n" for i in range(count))
    arguments = ", ".join(f"double %d{i}" for i in range(count))
    return (
        f"define internal float @{name}({kinds}) #0 {{\n{wide}  %r = call double"
        f" @{of}({arguments})\n  %f = fptrunc double %r to float\n  ret float %f\n}}\n"
    )


def _singles(of: str, count: int) -> None:
    ROUTINES[f"{of}f"] = lambda target: _in_double(f"{of}f", of, count)
    NEEDS[f"{of}f"] = (of,)


# -- circular functions
def _two_over_pi(bits: int) -> int:
    """floor(2^bits * 2/pi), by Machin's formula."""
    one = 1 << (bits + 32)

    def arctan_of_inverse(n: int) -> int:
        total = term = one // n
        k = 1
        while term:
            term //= -n * n
            k += 2
            total += term // k
        return total

    quarter_pi = 4 * arctan_of_inverse(5) - arctan_of_inverse(239)
    return (one << bits) // (2 * quarter_pi)


_LIMBS = 6  # of 32 bits: what is kept of the product
_LEAD = 2  # words of zeros before 2/pi: bits that stand before the point
_TABLE_BITS = 1184


def _times_two_over_pi(c: _Code, mantissa: str, exponent: str) -> list[str]:
    """The product of `mantissa` and the bits of 2/pi that matter at this exponent, in words, least
    significant first."""
    i = c.i
    # Bit number j after the point has the weight 2^-j. The first that matters is j = e - 1, counted
    # here from the table's start.
    first = i.add(exponent, 32 * _LEAD - 2)
    word = i.bin("lshr", first, 5)
    shift = i.bin("and", first, 31)
    raw = []
    for k in range(_LIMBS + 1):
        p = c.e.op(f"getelementptr i32, ptr @torch_hlo_two_over_pi, i64 {i.add(word, k)}")
        raw.append(c.e.cast("zext", c.e.op(f"load i32, ptr {p}"), "i32", "i64"))
    mask = i.const(0xFFFFFFFF)
    limbs = []  # least significant first
    for k in reversed(range(_LIMBS)):
        pair = i.bin("or", i.bin("shl", raw[k], 32), raw[k + 1])
        limbs.append(i.bin("and", i.bin("lshr", pair, i.sub(32, shift)), mask))
    low = i.bin("and", mantissa, mask)
    high = i.bin("lshr", mantissa, 32)
    product = []
    # the upper half of a product of two words belongs to the next word
    carry = previous = i.const(0)
    for k in range(_LIMBS):
        a = i.mul(limbs[k], low)
        b = i.mul(limbs[k - 1], high) if k else i.const(0)
        total = i.add(i.add(i.bin("and", a, mask), i.bin("and", b, mask)), i.add(carry, previous))
        product.append(i.bin("and", total, mask))
        carry = i.bin("lshr", total, 32)
        previous = i.add(i.bin("lshr", a, 32), i.bin("lshr", b, 32))
    return product


@_routine("torch_hlo_reduce")
def _reduce(target: Target, name: str) -> str:
    """{double, i64} reduce(x): x minus the nearest multiple of pi/2, and that multiple's number
    modulo 4. For 8 <= |x| < infinity.

    x = m 2^e. Of m * 2/pi * 2^e only the bits below 4 matter: 192 bits of 2/pi from there on times
    the 53 bits of m."""
    c = _Code(target)
    i = c.i
    d = c.d
    words = [0] * _LEAD + [
        (_two_over_pi(_TABLE_BITS) >> (_TABLE_BITS - 32 * (k + 1))) & 0xFFFFFFFF
        for k in range(_TABLE_BITS // 32)
    ]
    table = (
        f"@torch_hlo_two_over_pi = private constant [{len(words)} x i32]"
        f" [{', '.join(f'i32 {w}' for w in words)}]\n"
    )
    bits = i.bin("and", d.bits("%x"), (1 << 63) - 1)
    exponent = i.sub(i.bin("lshr", bits, 52), 1075)
    mantissa = i.bin("or", i.bin("and", bits, (1 << 52) - 1), 1 << 52)
    product = _times_two_over_pi(c, mantissa, exponent)

    def join(a: int, b: int) -> str:
        return i.bin("or", i.bin("shl", product[a], 32), product[b])

    top = join(5, 4)
    middle = join(3, 2)
    bottom = join(1, 0)
    quadrant = i.bin("lshr", top, 62)
    fraction = [
        i.bin("or", i.bin("shl", a, 2), i.bin("lshr", b, 62))
        for a, b in ((top, middle), (middle, bottom))
    ]
    quadrant = i.bin("and", i.add(quadrant, i.bin("lshr", fraction[0], 63)), 3)
    # the nearest multiple lies above: the rest is negative
    sign = i.bin("ashr", fraction[0], 63)
    size = [i.bin("xor", f, sign) for f in fraction]
    parts = [c.e.op(f"uitofp i64 {s} to double") for s in size]
    value = d.add(d.mul(parts[0], 2.0**-64), d.mul(parts[1], 2.0**-128))
    value = d.mul(value, math.pi / 2)
    below = i.bin("xor", sign, i.bin("ashr", d.bits("%x"), 63))
    value = d.from_bits(i.bin("xor", d.bits(value), i.bin("and", below, -(1 << 63))))
    negative = i.cmp("slt", d.bits("%x"), 0)
    number = i.bin("and", i.select(negative, i.sub(0, quadrant), quadrant), 3)
    one = c.e.op(f"insertvalue {{double, i64}} poison, double {value}, 0")
    both = c.e.op(f"insertvalue {{double, i64}} {one}, i64 {number}, 1")
    c.e.do(f"ret {{double, i64}} {both}")
    return table + c.text(name, "{double, i64}", "double %x")


def _near_or_reduced(c: _Code, function: Callable[[str, str], str]) -> None:
    """`function(t, r, quadrant)` of x itself or, when it is large, of what reduce gives."""
    d = c.d
    large = d.bin_and(d.cmp("oge", d.abs("%x"), 8.0), d.cmp("olt", d.abs("%x"), math.inf))
    c.e.do(f"br i1 {large}, label %far, label %join")
    c.label("far")
    pair = c.e.op("call {double, i64} @torch_hlo_reduce(double %x)")
    r = c.e.op(f"extractvalue {{double, i64}} {pair}, 0")
    q = c.e.op(f"extractvalue {{double, i64}} {pair}, 1")
    c.e.do("br label %join")
    c.label("join")
    rest = c.e.op(f"phi double [%x, %entry], [{r}, %far]")
    number = c.e.op(f"phi i64 [0, %entry], [{q}, %far]")
    result = function(rest, number)
    c.e.do(f"ret double {d.select(d.cmp('olt', d.abs('%x'), math.inf), result, math.nan)}")


@_routine("sin", "cos", "tan", needs=("torch_hlo_reduce",))
def _circular(target: Target, name: str) -> str:
    c = _Code(target)
    d = c.d
    i = c.i

    def value(r: str, number: str) -> str:
        sine, cosine, own = sin_cos(d, r)
        q = i.add(number, own)
        if name == "cos":
            return in_quadrant(d, sine, cosine, i.add(q, 1))
        if name == "sin":
            result = in_quadrant(d, sine, cosine, q)
        else:
            odd = i.cmp("ne", i.bin("and", q, 1), 0)
            result = d.div(d.select(odd, d.neg(cosine), sine), d.select(odd, sine, cosine))
        return d.select(d.cmp("oeq", "%x", 0.0), "%x", result)

    _near_or_reduced(c, value)
    return c.text(name, "double", "double %x")


for _name in ("sin", "cos", "tan"):
    _singles(_name, 1)


# -- power
Pair = tuple[str, str]  # a number as a sum of two doubles


def _split(value: Fraction) -> tuple[float, float]:
    high = float(value)
    return high, float(value - Fraction(high))


def _sum(d: Typed, a: str, b: str) -> Pair:
    """a + b exactly."""
    s = d.add(a, b)
    bb = d.sub(s, a)
    return s, d.add(d.sub(a, d.sub(s, bb)), d.sub(b, bb))


def _halves(d: Typed, a: str) -> Pair:
    """26 bits and the rest."""
    i = d.ints()
    high = d.from_bits(i.bin("and", d.bits(a), -(1 << 27)))
    return high, d.sub(a, high)


def _product(d: Typed, a: str, b: str) -> Pair:
    """a * b exactly, with or without a fused multiply-add."""
    p = d.mul(a, b)
    ah, al = _halves(d, a)
    bh, bl = _halves(d, b)
    error = d.sub(d.mul(ah, bh), p)
    for x, y in ((ah, bl), (al, bh), (al, bl)):
        error = d.add(error, d.mul(x, y))
    return p, error


def _times(d: Typed, a: Pair, b: Pair) -> Pair:
    p, e = _product(d, a[0], b[0])
    return _sum(d, p, d.add(e, d.add(d.mul(a[0], b[1]), d.mul(a[1], b[0]))))


def _plus(d: Typed, a: Pair, b: Pair) -> Pair:
    s, e = _sum(d, a[0], b[0])
    return _sum(d, s, d.add(e, d.add(a[1], b[1])))


def _pair(d: Typed, value: Fraction) -> Pair:
    high, low = _split(value)
    return d.const(high), d.const(low)


@_routine("pow")
def _pow(target: Target, name: str) -> str:
    """x^y = 2^n exp(r). log x is a pair of doubles, so that y log x is right to the last bits even
    where it is large."""
    c = _Code(target)
    d = c.d
    i = c.i
    e = c.e
    a = d.abs("%x")
    # ln 2 = sum of 1 / (k 2^k), to 160 bits
    two = sum((Fraction(1, k << k) for k in range(1, 160)), Fraction(0))
    high = Fraction(math.floor(two * 2**42), 2**42)  # times a number below 2^11 exactly
    log = _log_of_pair(c, a, high, two - high)
    # y log x, limited to where the result is 0 or infinite anyway
    limit = d.const(2.0**70)
    y = d.select(d.cmp("olt", d.abs("%y"), limit), "%y", d.copysign(limit, "%y"))
    product = _times(d, log, (y, d.const(0.0)))
    finite = d.cmp("olt", d.abs(product[0]), 800.0)
    value = (
        d.select(finite, product[0], d.copysign(800.0, product[0])),
        d.select(finite, product[1], 0.0),
    )
    n = d.call("roundeven", d.mul(value[0], functions.LOG2E))
    r = _sum(
        d,
        d.sub(value[0], d.mul(n, float(high))),
        d.sub(value[1], d.mul(n, float(two - high))),
    )
    power = functions.exp(d, r[0])
    power = d.add(power, d.mul(power, r[1]))
    whole = e.op(f"fptosi double {n} to i64")
    half = i.bin("ashr", whole, 1)
    for part in (half, i.sub(whole, half)):
        power = d.mul(power, d.from_bits(i.bin("shl", i.add(part, 1023), 52)))
    e.do(f"ret double {_special_powers(c, a, power)}")
    return c.text(name, "double", "double %x, double %y")


def _log_of_pair(c: _Code, a: str, high: Fraction, low: Fraction) -> Pair:
    """log a, as a pair; `high` + `low` = log 2."""
    d = c.d
    i = c.i
    e = c.e
    tiny = d.cmp("olt", a, 2.0**-1022)
    bits = d.bits(d.select(tiny, d.mul(a, 2.0**54), a))
    k = i.bin("ashr", i.sub(bits, 0x3FE6A09E667F3BCD), 52)
    m = d.from_bits(i.sub(bits, i.bin("shl", k, 52)))  # in [sqrt(1/2), sqrt(2))
    k = i.sub(k, i.select(tiny, 54, 0))
    # log m = 2 s (1 + z/3 + z^2/5 + ...), s = (m - 1) / (m + 1), z = s^2
    top = d.sub(m, 1.0)
    bottom = _sum(d, m, d.const(1.0))
    q = d.div(top, bottom[0])
    p, error = _product(d, q, bottom[0])
    rest = d.sub(d.sub(d.sub(top, p), error), d.mul(q, bottom[1]))
    s = _sum(d, q, d.div(rest, bottom[0]))
    z = _times(d, s, s)
    tail = d.poly(z[0], [1 / n for n in range(27, 5, -2)])
    inner = _plus(d, _pair(d, Fraction(1, 5)), _product(d, z[0], tail))
    inner = _plus(d, _pair(d, Fraction(1, 3)), _times(d, z, inner))
    series = _times(d, s, _times(d, z, inner))
    log = _plus(d, s, series)
    log = (d.add(log[0], log[0]), d.add(log[1], log[1]))
    number = e.op(f"sitofp i64 {k} to double")
    power_of_two = _plus(
        d,
        (d.mul(number, float(high)), d.const(0.0)),
        (d.mul(number, float(low)), d.const(0.0)),
    )
    return _plus(d, power_of_two, log)


def _special_powers(c: _Code, a: str, power: str) -> str:
    """`power` but for zero, infinity, and negative numbers (C standard, annex F)."""
    d = c.d
    e = c.e
    grows = d.cmp("ogt", "%y", 0.0)

    def edge(t: float, f: float) -> str:
        return d.select(grows, t, f)

    power = d.select(d.cmp("oeq", a, 0.0), edge(0.0, math.inf), power)
    power = d.select(d.cmp("oeq", a, math.inf), edge(math.inf, 0.0), power)
    infinite = d.cmp("oeq", d.abs("%y"), math.inf)
    over = d.cmp("ogt", a, 1.0)
    power = d.select(infinite, d.select(over, edge(math.inf, 0.0), edge(0.0, math.inf)), power)
    integral = d.cmp("oeq", d.call("floor", "%y"), "%y")
    half_y = d.mul("%y", 0.5)
    odd = d.bin_and(integral, d.cmp("une", d.call("floor", half_y), half_y))
    power = d.select(odd, d.copysign(power, "%x"), power)
    negative = d.bin_and(d.cmp("olt", "%x", 0.0), d.cmp("one", a, math.inf))
    no_number = d.bin_and(negative, e.typed("i1").bin("xor", integral, "true"))
    power = d.select(no_number, math.nan, power)
    power = d.select(d.cmp("uno", "%x", "%y"), math.nan, power)
    power = d.select(d.bin_and(d.cmp("oeq", a, 1.0), infinite), 1.0, power)
    power = d.select(d.cmp("oeq", "%x", 1.0), 1.0, power)
    return d.select(d.cmp("oeq", "%y", 0.0), 1.0, power)


_singles("pow", 2)


# -- remainder, rounding, extremes
@_routine("fmod")
def _fmod(target: Target, name: str) -> str:
    return _FMOD


_singles("fmod", 2)


def _each(
    kinds: tuple[str, ...],
    template: Callable[[Typed], str],
    name: str,
    params: int,
) -> None:
    for suffix, kind in zip(kinds, ("float", "double")):

        def define(target: Target, full: str = name + suffix, kind: str = kind) -> str:
            c = _Code(target)
            c.e.do(f"ret {kind} {template(c.e.typed(kind))}")
            return c.text(full, kind, ", ".join(f"{kind} %{v}" for v in "xy"[:params]))

        ROUTINES[name + suffix] = define
        NEEDS[name + suffix] = ()


def _round(t: Typed) -> str:
    whole = t.call("trunc", "%x")
    far = t.cmp("oge", t.abs(t.sub("%x", whole)), 0.5)
    return t.copysign(t.select(far, t.add(whole, t.copysign(1.0, "%x")), whole), "%x")


def _extreme(predicate: str) -> Callable[[Typed], str]:
    """The other operand when one is nan."""
    return lambda t: t.select(
        t.cmp("uno", "%y", "%y"),
        "%x",
        t.select(t.cmp(predicate, "%x", "%y"), "%x", "%y"),
    )


_each(("f", ""), _round, "round", 1)
_each(("f", ""), _extreme("ogt"), "fmax", 2)
_each(("f", ""), _extreme("olt"), "fmin", 2)

# Division of the mantissas bit by bit: exact.
_FMOD = """
define internal i64 @torch_hlo_mantissa(i64 %bits, ptr %exponent) #0 {
  ; 53 bits, the upper one set, of a finite number that is not 0
  %e = lshr i64 %bits, 52
  %m = and i64 %bits, 4503599627370495
  %normal = icmp ne i64 %e, 0
  br i1 %normal, label %plain, label %tiny
plain:
  store i64 %e, ptr %exponent
  %one = or i64 %m, 4503599627370496
  ret i64 %one
tiny:
  %zeros = call i64 @llvm.ctlz.i64(i64 %m, i1 false)
  %up = sub i64 %zeros, 11
  %shifted = shl i64 %m, %up
  %down = sub i64 1, %up
  store i64 %down, ptr %exponent
  ret i64 %shifted
}

define internal double @fmod(double %x, double %y) #0 {
entry:
  %ex = alloca i64
  %ey = alloca i64
  %xb = bitcast double %x to i64
  %yb = bitcast double %y to i64
  %sign = and i64 %xb, -9223372036854775808
  %a = and i64 %xb, 9223372036854775807
  %b = and i64 %yb, 9223372036854775807
  %zero = icmp eq i64 %b, 0
  %ynan = icmp ugt i64 %b, 9218868437227405312
  %xbad = icmp uge i64 %a, 9218868437227405312
  %bad0 = or i1 %zero, %ynan
  %bad = or i1 %bad0, %xbad
  br i1 %bad, label %nan, label %compare
nan:
  ret double 0x7FF8000000000000
compare:
  %less = icmp ult i64 %a, %b
  br i1 %less, label %same, label %divide
same:
  ret double %x
divide:
  %m = call i64 @torch_hlo_mantissa(i64 %a, ptr %ex)
  %n = call i64 @torch_hlo_mantissa(i64 %b, ptr %ey)
  %e0 = load i64, ptr %ex
  %e1 = load i64, ptr %ey
  br label %step
step:
  %r = phi i64 [%m, %divide], [%doubled, %again]
  %e = phi i64 [%e0, %divide], [%lower, %again]
  %d = sub i64 %r, %n
  %fits = icmp sge i64 %d, 0
  %rest = select i1 %fits, i64 %d, i64 %r
  %left = icmp sgt i64 %e, %e1
  br i1 %left, label %again, label %done
again:
  %doubled = shl i64 %rest, 1
  %lower = sub i64 %e, 1
  br label %step
done:
  %none = icmp eq i64 %rest, 0
  br i1 %none, label %empty, label %scale
empty:
  %z = bitcast i64 %sign to double
  ret double %z
scale:
  %zeros = call i64 @llvm.ctlz.i64(i64 %rest, i1 false)
  %up = sub i64 %zeros, 11
  %room = sub i64 %e1, 1
  %small = icmp slt i64 %room, %up
  %by = select i1 %small, i64 %room, i64 %up
  %positive = icmp sge i64 %by, 0
  %left_by = select i1 %positive, i64 %by, i64 0
  %minus = sub i64 0, %by
  %right_by = select i1 %positive, i64 0, i64 %minus
  %l = shl i64 %rest, %left_by
  %v = lshr i64 %l, %right_by
  %field = sub i64 %e1, %by
  %hidden = and i64 %v, 4503599627370496
  %is_normal = icmp ne i64 %hidden, 0
  %low = and i64 %v, 4503599627370495
  %high = shl i64 %field, 52
  %normal = or i64 %low, %high
  %magnitude = select i1 %is_normal, i64 %normal, i64 %low
  %result = or i64 %magnitude, %sign
  %f = bitcast i64 %result to double
  ret double %f
}
"""
