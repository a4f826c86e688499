"""What fusion knows about opcodes: a class and a cost per element for each, and the geometry of
broadcasts and reductions.

Geometry is expressed in *intervals of strides*: in a row-major array of dims (8, 1024, 768) the
last dimension is the interval (1, 768) of the linear index and the first two are (768, 6291456).
Intervals survive reshapes, so f32[8,1024,768] reduced over {2} and f32[8192,768] reduced over {1}
have the same geometry."""

from collections.abc import Iterable

from torch_hlo.hlo.ir import OPCODES, Dims, Instruction, Size

FREE, LIGHT, HEAVY, MOVE, REDUCE, STEP = range(6)

WIDEST_CONCATENATE = 8  # operands

_CLASSES = {
    "free": FREE,
    "light": LIGHT,
    "heavy": HEAVY,
    "move": MOVE,
    "reduce": REDUCE,
}
# Opcodes not listed run as steps of their own.
CLASS: dict[str, int] = {
    name: _CLASSES[row.fusion] for name, row in OPCODES.items() if row.fusion in _CLASSES
}
MOVES = frozenset(name for name, kind in CLASS.items() if kind == MOVE)
_CHEAP_HEAVY = frozenset(("divide", "sqrt", "rsqrt"))
# Rough cost of one element in units of one vector add.
COST = {FREE: 0, LIGHT: 1, HEAVY: 12, MOVE: 1, REDUCE: 1}

Intervals = tuple[tuple[Size, Size], ...]


def classify(x: Instruction) -> int:
    """FREE, LIGHT, … of an instruction of the entry computation."""
    if x.op == "constant":
        return FREE if x.size == 1 else STEP
    kind = CLASS.get(x.op, STEP)
    if kind in (STEP, FREE):
        return kind
    if x.op == "bitcast-convert" and x.operand.dims != x.dims:
        return STEP  # the same bytes as another number of elements
    if x.op == "concatenate" and len(x.operands) > WIDEST_CONCATENATE:
        return STEP  # inside a kernel every element would choose between all operands
    if x.op == "get-tuple-element":
        return LIGHT if x.operand.op == "reduce" else STEP
    if x.is_tuple and kind != REDUCE:
        return STEP
    return kind


def cost(x: Instruction) -> int:
    """Cost of one element of `x`, without its operands."""
    return 4 if x.op in _CHEAP_HEAVY else COST[classify(x)] if classify(x) != STEP else 0


def intervals(dims: Dims, chosen: Iterable[int]) -> Intervals:
    """Intervals of the linear index covered by the `chosen` dimensions, minor first, neighbours
    merged, size 1 left out."""
    wanted = set(chosen)
    found: list[tuple[Size, Size]] = []
    low: Size = 1
    for i in range(len(dims) - 1, -1, -1):
        d = dims[i]
        if d == 1:
            continue
        high = low * d
        if i in wanted:
            if found and found[-1][1] == low:
                found[-1] = (found[-1][0], high)
            else:
                found.append((low, high))
        low = high
    return tuple(found)


def broadcast_intervals(x: Instruction) -> Intervals:
    """What of a broadcast's space its operand spans; an operand dimension of size 1 may be
    stretched."""
    return intervals(x.dims, (d for d, n in zip(x["dimensions"], x.operand.dims) if n != 1))


def reduced_intervals(x: Instruction) -> Intervals:
    """What a reduce sums over, in the space of its first operand."""
    return intervals(x.operand.dims, x["dimensions"])


def kept_intervals(x: Instruction) -> Intervals:
    """What a reduce keeps, in the space of its first operand."""
    dims = x.operand.dims
    gone = set(x["dimensions"])
    return intervals(dims, (i for i in range(len(dims)) if i not in gone))


def is_degenerate(x: Instruction) -> bool:
    """A reduce that folds no or single elements: it has no rows to walk."""
    operand = x.operand.shape
    length: Size = 1
    for d in x["dimensions"]:
        length *= operand.dims[d]
    return length == 1 or operand.size == 0


def cuts(ivs: Intervals) -> frozenset[Size]:
    """Strides at which a space must be split so that `ivs` are whole dimensions."""
    return frozenset(s for iv in ivs for s in iv)


def divides(a: Size, b: Size) -> bool:
    """True when b is known to be a multiple of a."""
    if isinstance(a, int) and isinstance(b, int):
        return b % a == 0 if a else b == 0
    if isinstance(b, int):
        return False
    return (b // a) * a == b


def refine(a: frozenset[Size], b: frozenset[Size]) -> frozenset[Size] | None:
    """The union of two sets of cuts when it still is a chain of divisors, else None."""
    if a >= b:
        return a
    if b >= a:
        return b
    union = a | b
    for s in union:
        for t in union:
            if not divides(s, t) and not divides(t, s):
                return None
    return union
