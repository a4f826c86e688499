"""Local identities, exact in IEEE arithmetic: signed zeros, infinities and NaNs come out as before
(a NaN's sign and payload may change).

Canonical forms, so that rules need not fight: constants on the right; broadcasts of scalars for
uniform constants; `negate` outward of products; broadcasts and reshapes without size-1 detours (see
moves.py). A rule is `lhs -> rhs`."""

import math
from collections.abc import Callable

from torch_hlo.hlo.ir import (
    DTYPES,
    Instruction,
    Module,
    build as h,
    inline,
    instr,
    lift,
    op,
    rewrite,
    rules,
    splat,
    var,
)
from torch_hlo.hlo.ir.match import const, merged
from torch_hlo.hlo.ir.numeric import SMALL_FLOATS

from ..hlo_pass import hlo_pass
from .moves import MOVES

# Significant bits (with the hidden one) of float types, and the exponents k for which 2**k and
# 2**-k are both normal.
PRECISION = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8} | {
    name: row.mantissa + 1 for name, row in SMALL_FLOATS.items()
}
_RECIPROCAL = {"f64": 1022, "f32": 126, "f16": 14, "bf16": 126}
_FORMAT = {"f64": (11, 52), "f32": (8, 23), "f16": (5, 10), "bf16": (8, 7)}
_FLIPPED = {
    "EQ": "EQ",
    "NE": "NE",
    "LT": "GT",
    "GT": "LT",
    "LE": "GE",
    "GE": "LE",
}
_INVERSE = {
    "EQ": "NE",
    "NE": "EQ",
    "LT": "GE",
    "GE": "LT",
    "GT": "LE",
    "LE": "GT",
}
_NEVER_NEGATIVE = frozenset("exponential abs cosh logistic".split())

x = var("x")
y = var("y")
z = var("z")
p = var("p")
c = const(name="c")
d = const(name="d")


def ints(x: Instruction) -> bool:
    return x.kind in "su"


def floats(x: Instruction) -> bool:
    return x.kind == "f"


def real(x: Instruction) -> bool:
    return x.kind in "suf"


def rounds_late(x: Instruction) -> bool:
    """Two roundings instead of one are no worse than what libraries do; in narrow floats they
    show."""
    return x.dtype in ("f32", "f64") or ints(x)


def exact(a: str, b: str) -> bool:
    """Every value of type `a` survives conversion to type `b`."""
    old = DTYPES[a]
    new = DTYPES[b]
    if a == b or old.kind == "p":
        return True
    if new.kind == "p" or old.kind == "c" and new.kind != "c":
        return False
    if new.kind == "c":
        return exact(a, "f32" if b == "c64" else "f64") if old.kind != "c" else old.bits <= new.bits
    if new.kind == "f":
        if "f8e8m0fnu" in (a, b):
            return b in ("bf16", "f32", "f64")
        if old.kind == "f":  # bf16 has the range of f32, and f8 fits in every larger type
            return old.bits < new.bits
        return old.bits - (old.kind == "s") <= PRECISION[b] and new.bits >= 16
    if old.kind == "f":
        return False
    return old.bits - (old.kind == "s") <= new.bits - (new.kind == "s") and not (
        old.kind == "s" and new.kind == "u"
    )


def convert_twice(out: Instruction, inner: Instruction, x: Instruction) -> Instruction | None:
    a = x.dtype
    b = inner.dtype
    final = out.dtype
    narrowing = (
        all(DTYPES[t].kind in "su" for t in (a, b, final))
        and DTYPES[final].bits <= DTYPES[b].bits <= DTYPES[a].bits
    )
    return h.convert(x, final) if exact(a, b) or narrowing else None


def divide_by_power_of_two(x: Instruction, c: Instruction) -> Instruction | None:
    value = splat(c)
    limit = _RECIPROCAL.get(x.dtype)
    if limit is None or not isinstance(value, float) or not math.isfinite(value) or value == 0:
        return None
    fraction, exponent = math.frexp(value)
    return (
        h.multiply(x, h.full_like(x, 1 / value))
        if abs(fraction) == 0.5 and abs(exponent - 1) <= limit
        else None
    )


def square(x: Instruction) -> Instruction:
    return h.multiply(x, x)


def root_of_any(
    x: Instruction, fn: Callable[[Instruction], Instruction], infinity: float
) -> Instruction:
    """x**±0.5 as sqrt/rsqrt: power maps -0 as +0 and -inf as +inf."""
    if x.op in _NEVER_NEGATIVE or x.op == "multiply" and x.operand is x.operands[1]:
        return fn(x)
    positive = fn(h.add(x, h.full_like(x, 0.0)))
    return h.select(
        h.compare(x, h.full_like(x, -math.inf), "EQ"),
        h.full_like(x, infinity),
        positive,
    )


def compare_self(out: Instruction, x: Instruction) -> Instruction | None:
    direction = out["direction"]
    if direction in ("LT", "GT") or direction == "NE" and x.kind in "psu":
        return h.full(False, "pred", x.dims)
    return h.full(True, "pred", x.dims) if x.kind in "psu" else None


def compare_pred(out: Instruction, x: Instruction, c: Instruction) -> Instruction | None:
    if x.dtype != "pred" or out["direction"] not in ("EQ", "NE"):
        return None
    return x if (out["direction"] == "EQ") == splat(c) else h.not_(x)


def compare_converted_pred(out: Instruction, x: Instruction, c: Instruction) -> Instruction | None:
    if x.dtype != "pred" or out["direction"] not in ("EQ", "NE") or splat(c) not in (0, 1):
        return None
    return x if (out["direction"] == "EQ") == (splat(c) == 1) else h.not_(x)


def compare_unsigned(out: Instruction, x: Instruction, c: Instruction) -> Instruction | None:
    if x.kind != "u" or splat(c) != 0 or out["direction"] not in ("LT", "GE"):
        return None
    return h.full(out["direction"] == "GE", "pred", x.dims)


def not_compare(inner: Instruction, x: Instruction, y: Instruction) -> Instruction | None:
    if inner["direction"] not in ("EQ", "NE") and x.kind not in "psu" or inner.get("type"):
        return None  # not (nan < 1) is true, nan >= 1 is not
    return h.compare(x, y, _INVERSE[inner["direction"]])


def extreme(out: Instruction, x: Instruction, c: Instruction) -> Instruction | None:
    """maximum(x, lowest) -> x, maximum(x, highest) -> highest unless NaN."""
    value = splat(c)
    dtype = x.dtype
    low = h.lowest(dtype)
    high = h.highest(dtype)
    if out.op == "minimum":
        low, high = high, low
    if value == low and (x.kind != "f" or math.isinf(low)):
        return x
    return c if value == high and x.kind != "f" else None


def whole_tuple(out: Instruction) -> Instruction | None:
    first = out.operand if out.operands else None
    if (
        first is None
        or first.op != "get-tuple-element"
        or len(first.operand.elements) != len(out.operands)
    ):
        return None
    source = first.operand
    if all(
        o.op == "get-tuple-element" and o.operand is source and o["index"] == i
        for i, o in enumerate(out.operands)
    ):
        return source
    return None


def constant_branch(out: Instruction, index: Instruction) -> Instruction | None:
    value = splat(index)
    branches = out["branch_computations"]
    if not isinstance(value, int):
        return None
    chosen = (
        (0 if value else 1)
        if index.dtype == "pred"
        else value
        if 0 <= value < len(branches)
        else len(branches) - 1
    )
    return inline(branches[chosen], (out.operands[1 + chosen],))


def first_operand_is(out: Instruction) -> Instruction | None:
    return constant_branch(out, out.operand)


def while_false(out: Instruction) -> Instruction | None:
    root = out["condition"].root
    return out.operand if root.op == "constant" and splat(root) is False else None


def reduce_single(out: Instruction) -> Instruction | None:
    """A reduction over nothing, or over dimensions of size 1, folds each element with the initial
    value once."""
    n = len(out.operands) // 2
    xs = out.operands[:n]
    dims = out["dimensions"]
    if any(xs[0].dims[i] != 1 for i in dims):
        return None
    kept = [s for i, s in enumerate(xs[0].dims) if i not in dims]
    arrays = [h.reshape(x, kept) for x in xs]
    return lift(out["to_apply"], [*(h.broadcast(i, kept, ()) for i in out.operands[n:]), *arrays])


def reduce_ones(out: Instruction) -> Instruction | None:
    """reduce(f32[4,1,8], {1,2}) -> reduce(reshape f32[4,8], {1})"""
    n = len(out.operands) // 2
    xs = out.operands[:n]
    dims = out["dimensions"]
    ones = [i for i in dims if xs[0].dims[i] == 1]
    if not ones or len(ones) == len(dims):
        return None
    kept = [i for i in range(xs[0].rank) if i not in ones]
    arrays = tuple(h.reshape(x, [x.dims[i] for i in kept]) for x in xs)
    return instr(
        "reduce",
        (*arrays, *out.operands[n:]),
        dimensions=tuple(kept.index(i) for i in dims if i not in ones),
        to_apply=out["to_apply"],
    )


def scatter_of_one(out: Instruction) -> Instruction | None:
    """scatter(broadcast(c), i, u) of one element per row -> select(iota == i, u, c): the gradient
    of max(x, dim) and of gather, one-hot codes"""
    if len(out.operands) != 3:
        return None
    x, index, u = out.operands
    dims = out["scatter_dims_to_operand_dims"]
    if (
        x.op != "broadcast"
        or x.operand.rank
        or len(dims) != 1
        or out["update_window_dims"]
        or out["inserted_window_dims"] != dims
    ):
        return None
    (d,), rank = dims, x.rank
    others = tuple(i for i in range(rank) if i != d)
    rows = tuple(x.dims[i] for i in others)
    if (
        out["input_batching_dims"] != others
        or out["scatter_indices_batching_dims"] != others
        or out["index_vector_dim"] != rank
    ):
        return None
    if index.dims != (*rows[:d], 1, *rows[d:]):
        return None
    i, u = (h.broadcast(h.reshape(o, rows), x.dims, others) for o in (index, u))
    new = lift(out["to_apply"], (x, u))
    return (
        None
        if new is None
        else h.select(h.compare(h.iota(index.dtype, x.dims, d), i, "EQ"), new, x)
    )


def sort_single(out: Instruction) -> Instruction | None:
    size = out.operand.dims[out["dimensions"][0]]
    if size not in (0, 1):
        return None
    return out.operand if len(out.operands) == 1 else h.tuple_(*out.operands)


def full_format(out: Instruction, x: Instruction) -> Instruction | None:
    exponent, mantissa = _FORMAT.get(x.dtype, (99, 99))
    return x if out["exponent_bits"] >= exponent and out["mantissa_bits"] >= mantissa else None


def is_all_ones(c: Instruction) -> bool:
    return splat(c) in (-1, (1 << c.bits) - 1) if c.kind in "su" else splat(c) is True


def not_constant(x: Instruction) -> bool:
    return x.op != "constant" and splat(x) is None


# A constant here would change places with c + d, until that is folded, for ever.
moving = var("x", not_constant)
ARITHMETIC = rules(
    # Constants on the right
    (op("add multiply maximum minimum and or xor", c, var("x", not_constant), name="o"),
     # c + x -> x + c
     lambda out, c, x: instr(out.op, (x, c)) if out.operand is c else None),
    (op("compare", c, var("x", not_constant)),
     lambda out, c, x:
     h.compare(x, c, _FLIPPED[out["direction"]]) if not out.get("type") else None),

    # Sums
    # x + 0 -> x
    (op("add", x, const(0), where=ints), lambda x: x),
    # x + -0.0 -> x
    (op("add", x, const(-0.0), where=floats), lambda x: x),
    # x - 0 -> x
    (op("subtract", x, const(0), where=ints), lambda x: x),
    # x - 0.0 -> x
    (op("subtract", x, const(0.0), where=floats), lambda x: x),
    # x - x -> 0
    (op("subtract", x, x, where=ints), lambda x: h.full_like(x, 0)),
    # 0 - x -> -x
    (op("subtract", const(0), x, where=ints), lambda x: h.negate(x)),
    # -0.0 - x -> -x
    (op("subtract", const(-0.0), x, where=floats), lambda x: h.negate(x)),
    # x - -y -> x + y
    (op("subtract", x, op("negate", y)), lambda x, y: h.add(x, y)),
    # x + -y -> x - y
    (op("add", x, op("negate", y)), lambda x, y: h.subtract(x, y)),
    # (x + c) + d -> x + (c + d)
    (op("add", op("add", moving, c), d, where=ints), lambda x, c, d: h.add(x, h.add(c, d))),
    # (x + c) - d -> x + (c - d)
    (op("subtract", op("add", moving, c), d, where=ints),
     lambda x, c, d: h.add(x, h.subtract(c, d))),
    # --x -> x
    (op("negate", op("negate", x)), lambda x: x),
    # -(x - y) -> y - x
    (op("negate", op("subtract", x, y), where=ints), lambda x, y: h.subtract(y, x)),

    # Products
    # x * 1 -> x
    (op("multiply", x, const(1), where=lambda x: x.kind in "psuf"), lambda x: x),
    # x * -1 -> -x
    (op("multiply", x, const(-1), where=real), lambda x: h.negate(x)),
    # x * 0 -> 0
    (op("multiply", x, const(0), where=lambda x: x.kind in "psu"),
     lambda x: h.full_like(x, 0)),
    (op("multiply", op("multiply", moving, c), d, where=ints),
     lambda x, c, d: h.multiply(x, h.multiply(c, d))),
    # -x * -y -> x * y
    (op("multiply", op("negate", x), op("negate", y)), lambda x, y: h.multiply(x, y)),
    # -x * c -> x * -c
    (op("multiply", op("negate", var("x", not_constant)), c, where=real),
     lambda x, c: h.multiply(x, h.negate(c))),
    # -(x * c) -> x * -c
    (op("negate", op("multiply", var("x", not_constant), c), where=real),
     lambda x, c: h.multiply(x, h.negate(c))),
    # -x / -y -> x / y
    (op("divide", op("negate", x), op("negate", y), where=floats), lambda x, y: h.divide(x, y)),
    # x / 1 -> x
    (op("divide", x, const(1), where=real), lambda x: x),
    # x / -1.0 -> -x
    (op("divide", x, const(-1.0), where=floats), lambda x: h.negate(x)),
    # x / 4.0 -> x * 0.25
    (op("divide", x, c, where=floats), divide_by_power_of_two),
    # x % 1 -> 0
    (op("remainder", x, const(1), where=ints), lambda x: h.full_like(x, 0)),

    # Powers
    # x ** 0 -> 1 (also of nan)
    (op("power", x, const(0), where=real), lambda x: h.full_like(x, 1)),
    # x ** 1 -> x
    (op("power", x, const(1), where=real), lambda x: x),
    # x ** 2 -> x * x
    (op("power", x, const(2)), square),
    # x ** 3 -> x * x * x
    (op("power", x, const(3), where=rounds_late), lambda x: h.multiply(square(x), x)),
    # x ** -1 -> 1 / x
    (op("power", x, const(-1), where=floats), lambda x: h.divide(h.full_like(x, 1), x)),
    (op("power", x, const(-2), where=rounds_late),
     lambda x: h.divide(h.full_like(x, 1), square(x))),
    (op("power", x, const(0.5), where=floats), lambda x: root_of_any(x, h.sqrt, math.inf)),
    (op("power", x, const(-0.5), where=floats), lambda x: root_of_any(x, h.rsqrt, 0.0)),
    # 1 ** x -> 1 (also nan)
    (op("power", const(1), x, where=floats), lambda out, x: h.full_like(out, 1)),

    # Signs and bounds
    # ||x|| -> |x|
    (op("abs", op("abs", x, name="inner")), lambda inner: inner),
    # |-x| -> |x|
    (op("abs", op("negate", x), where=lambda x: x.operand.kind != "u"),
     lambda x: h.abs_(x)),
    (op("abs", op("multiply", x, x, name="inner"), where=floats),
     lambda inner: inner if floats(inner) else None),
    (op("abs", op(" ".join(_NEVER_NEGATIVE), name="inner")),
     lambda inner: inner if floats(inner) else None),
    (op("abs", x, where=lambda x: x.kind == "u"), lambda x: x),
    # max(x, x) -> x
    (op("maximum minimum and or", x, x), lambda x: x),
    # max(x, -inf) -> x
    (op("maximum minimum", x, c, where=lambda x: x.kind in "psuf"), extreme),
    (op("floor ceil round-nearest-even round-nearest-afz",
        op("floor ceil round-nearest-even round-nearest-afz", name="inner")),
     
     # floor(ceil(x)) -> ceil(x)
     lambda inner: inner),
    (op("floor ceil round-nearest-even round-nearest-afz",
        op("convert", var("x", ints), name="inner")),
     lambda inner: inner),

    # Bits and predicates
    # x ^ x -> 0
    (op("xor", x, x), lambda x: h.full_like(x, 0)),
    (op("and multiply", x, const(False), where=lambda x: x.kind == "p"),
     lambda x: h.full_like(x, False)),
    # x & 0 -> 0
    (op("and", x, const(0)), lambda x: h.full_like(x, 0)),
    # x & ~0 -> x
    (op("and", x, c), lambda x, c: x if is_all_ones(c) else None),
    # x | 0 -> x
    (op("or xor", x, const(0)), lambda x: x),
    # x | ~0 -> ~0
    (op("or", x, c), lambda c: c if is_all_ones(c) else None),
    # x ^ ~0 -> not x
    (op("xor", x, c), lambda x, c: h.not_(x) if is_all_ones(c) else None),
    (op("not", op("not", x)), lambda x: x),
    # not (x == y) -> x != y
    (op("not", op("compare", x, y, name="inner")), not_compare),
    (op("shift-left shift-right-arithmetic shift-right-logical", x, const(0)), lambda x: x),
    # max(max(x, c), d) -> max(x, max(c, d))
    (op("maximum minimum and or xor",
        op("maximum minimum and or xor", x, c, name="inner"), d),
     lambda out, inner, x, c, d:
     instr(out.op, (x, instr(out.op, (c, d)))) if inner.op == out.op else None),

    # Comparisons and selection
    # x < x -> false
    (op("compare", x, x), compare_self),
    # p == true -> p
    (op("compare", x, c), compare_pred),
    # convert(p) != 0 -> p
    (op("compare", op("convert", x), c), compare_converted_pred),
    # u < 0 -> false
    (op("compare", x, c), compare_unsigned),
    (op("select", const(True), x, y), lambda x: x),
    (op("select", const(False), x, y), lambda y: y),
    # p ? x : x -> x
    (op("select", p, x, x), lambda x: x),
    (op("select", op("not", p), x, y), lambda p, x, y: h.select(p, y, x)),
    (op("select", p, const(True), const(False)),
     lambda out, p: p if out.dtype == "pred" else None),
    (op("select", p, const(False), const(True)),
     lambda out, p: h.not_(p) if out.dtype == "pred" else None),
    # p ? (p ? x : y) : z -> p ? x : z
    (op("select", p, op("select", p, x, y), z), lambda p, x, z: h.select(p, x, z)),
    (op("select", p, x, op("select", p, y, z)), lambda p, x, z: h.select(p, x, z)),

    # Conversions
    (op("convert", x, where=lambda x: x.dtype == x.operand.dtype), lambda x: x),
    # f32(f64(x: f32)) -> x
    (op("convert", op("convert", x, name="inner")), convert_twice),
    (op("bitcast-convert", x, where=lambda x: x.shape == x.operand.shape), lambda x: x),
    (op("bitcast-convert", op("bitcast-convert", x)),
     lambda out, x: x if out.shape == x.shape else None),
    (op("reduce-precision", x), full_format),
    (op("reduce-precision", op("reduce-precision", x, name="inner")),
     lambda out, inner: inner if out.attrs == inner.attrs else None),
    (op("real", op("complex", x, y)), lambda x: x),
    (op("imag", op("complex", x, y)), lambda y: y),
    (op("complex", op("real", x), op("imag", x)),
     lambda out, x: x if out.shape == x.shape else None),
    (op("real", x, where=floats), lambda out, x: x if floats(x) else None),

    # Tuples and control flow
    (op("get-tuple-element", op("tuple", name="t")), lambda out, t: t.operands[out["index"]]),
    # (x.0, x.1) -> x
    (op("tuple"), whole_tuple),
    # if true a else b -> a
    (op("conditional"), first_operand_is),
    (op("while"), while_false),
    (op("reduce"), reduce_single),
    (op("reduce"), reduce_ones),
    (op("scatter"), scatter_of_one),
    (op("sort"), sort_single),
    (op("copy", x), lambda x: x),
)  # fmt: skip

RULES = merged(ARITHMETIC, MOVES)


@hlo_pass
def algebra(module: Module) -> Module:
    """Local identities (tables ARITHMETIC and MOVES). Every rule removes an instruction, shrinks an
    array or moves a constant right."""
    return rewrite(module, RULES)
