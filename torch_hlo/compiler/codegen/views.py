"""Value emitters: the pointwise opcodes through compiler/llvm/scalar.py, and the opcodes that only
move elements as index arithmetic."""

from __future__ import annotations

from collections.abc import Callable

from torch_hlo.hlo.ir import DTYPES, Dims, Instruction, Instructions, Size

from ..llvm import scalar
from ..llvm.scalar import STORAGE, Value
from . import index as ix
from .block import CodegenError
from .index import Index
from .kernel import Kernel
from .kernel_values import Condition, excluded
from .loop_plan import Planner

Indices = tuple[Index, ...]


def pointwise(k: Kernel, x: Instruction, index: Indices) -> Value:
    # a rank-0 predicate or bound applies to every element
    values = [k.value(o, index if o.rank == len(index) else ()) for o in x.operands]
    operand = x.operands[1 if x.op in ("select", "clamp") else 0].dtype
    attrs = {"to": x.dtype} if x.op == "convert" else dict(x.attrs)
    try:
        return scalar.apply(k.e, x.op, operand, values, attrs)
    except KeyError:
        raise CodegenError(
            f"{x.op} of {operand} has no code on the CPU ({x.shape}); convert the operands first"
        ) from None


def copy(k: Kernel, x: Instruction, index: Indices) -> Value:
    return k.value(x.operand, index)


def constant(k: Kernel, x: Instruction, index: Indices) -> Value:
    raise CodegenError(f"constant {x.shape} inside a kernel must be one of its leaves")


def broadcast(k: Kernel, x: Instruction, index: Indices) -> Value:
    # an operand dimension of size 1 may be stretched
    dims = x.operand.dims
    return k.value(
        x.operand,
        tuple(ix.ZERO if n == 1 else index[d] for d, n in zip(x["dimensions"], dims, strict=True)),
    )


def reshape(k: Kernel, x: Instruction, index: Indices) -> Value:
    source = x.operand
    if source.dtype != x.dtype:
        return bitcast_convert(k, x, index)
    return k.value(source, ix.regroup(index, x.dims, source.dims))


def transpose(k: Kernel, x: Instruction, index: Indices) -> Value:
    order = x["dimensions"]
    return k.value(x.operand, tuple(index[order.index(d)] for d in range(len(index))))


def slice_(k: Kernel, x: Instruction, index: Indices) -> Value:
    return k.value(
        x.operand,
        tuple(i * step + start for i, (start, _, step) in zip(index, x["slice"], strict=True)),
    )


def reverse(k: Kernel, x: Instruction, index: Indices) -> Value:
    flipped = x["dimensions"]
    return k.value(
        x.operand,
        tuple(
            i * -1 + (n - 1) if d in flipped else i
            for d, (i, n) in enumerate(zip(index, x.dims, strict=True))
        ),
    )


def iota(k: Kernel, x: Instruction, index: Indices) -> Value:
    i = index[x["iota_dimension"]]
    size = x.dims[x["iota_dimension"]]
    wide = not isinstance(size, int) or size >= 1 << 31
    return scalar.convert(
        k.e,
        "s64" if wide else "s32",
        x.dtype,
        k.element(i, "i64" if wide else "i32"),
    )


def pad(k: Kernel, x: Instruction, index: Indices) -> Value:
    source, fill = x.operands
    place: list[Index] = []
    conditions: list[Condition] = []
    for i, n, (low, _, interior) in zip(index, source.dims, x["padding"], strict=True):
        at = i - low
        if interior:
            at, rest = ix.divide(at, interior + 1)
            conditions.append((i, low, low + (n - 1) * (interior + 1) + 1))
            conditions.append((rest, 0, 1))
        else:
            conditions.append((at, 0, n))
        place.append(at)
    return choose(
        k,
        x.dtype,
        conditions,
        lambda: k.value(source, tuple(place)),
        lambda: k.value(fill, ()),
    )


def choose(
    k: Kernel | Planner,
    dtype: str,
    conditions: list[Condition],
    inside: Callable[[], Value],
    outside: Callable[[], Value],
) -> Value:
    """`inside()` where the conditions hold, loading nothing elsewhere, and `outside()` in other
    places."""
    if any(map(excluded, conditions)):
        return outside()
    test = k.condition(conditions)
    if test is None:
        return inside()
    with k.guard(conditions):
        a = inside()
    b = outside()
    t = k.e.typed(STORAGE[dtype].register)
    if isinstance(a, tuple):
        real, imaginary = (t.select(test, p, q) for p, q in zip(a, b, strict=True))
        return real, imaginary
    assert isinstance(a, str) and isinstance(b, str)
    return t.select(test, a, b)


def concatenate(k: Kernel, x: Instruction, index: Indices) -> Value:
    d = x["dimensions"][0]
    start: Size = 0
    parts = []
    for o in x.operands:
        if o.size != 0:
            parts.append((o, start))
        start += o.dims[d]

    def value(number: int) -> Value:
        o, low = parts[number]
        place = (*index[:d], index[d] - low, *index[d + 1 :])
        if number == len(parts) - 1:
            with k.guard([(place[d], 0, o.dims[d])]):
                return k.value(o, place)
        conditions = [(index[d], low, low + o.dims[d])]
        return choose(k, x.dtype, conditions, lambda: k.value(o, place), lambda: value(number + 1))

    return value(0)


def dynamic_starts(starts: Instructions, dims: Dims, sizes: Dims) -> list[Index]:
    """Clamped start index per dimension. A start vector (one rank-1 operand) is read element by
    element."""
    vector = len(starts) == 1 and starts[0].rank == 1
    result = []
    for d, (n, size) in enumerate(zip(dims, sizes, strict=True)):
        room = n - size
        if room == 0:
            result.append(ix.ZERO)
        elif vector:
            result.append(ix.loaded(starts[0], (ix.constant(d),), room + 1))
        else:
            result.append(ix.loaded(starts[d], (), room + 1))
    return result


def dynamic_slice(k: Kernel, x: Instruction, index: Indices) -> Value:
    source, *starts = x.operands
    at = dynamic_starts(tuple(starts), source.dims, x.dims)
    return k.value(source, tuple(i + s for i, s in zip(index, at, strict=True)))


def dynamic_update_slice(k: Kernel, x: Instruction, index: Indices) -> Value:
    source, update, *starts = x.operands
    at = dynamic_starts(tuple(starts), source.dims, update.dims)
    place = tuple(i - s for i, s in zip(index, at, strict=True))
    conditions: list[Condition] = [(i, 0, n) for i, n in zip(place, update.dims, strict=True)]
    return choose(
        k,
        x.dtype,
        conditions,
        lambda: k.value(update, place),
        lambda: k.value(source, index),
    )


def bitcast_convert(k: Kernel, x: Instruction, index: Indices) -> Value:
    source = x.operand
    have = source.dtype
    want = x.dtype
    if DTYPES[have].bits != DTYPES[want].bits or "c" in (
        DTYPES[have].kind,
        DTYPES[want].kind,
    ):
        raise CodegenError(
            f"bitcast-convert {source.shape} -> {x.shape} changes the number of elements: it needs"
            " a step of its own"
        )
    held = k.value(source, index)
    assert isinstance(held, str)
    value = scalar.encode(k.e, have, held)
    value = k.e.cast("bitcast", value, STORAGE[have].memory, STORAGE[want].memory)
    return scalar.decode(k.e, want, value)
