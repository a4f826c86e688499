"""Composite opcodes become primitive ones, so that later passes and codegen see fewer opcodes.

batch-norm-*, topk, map, call, ragged-dot, rng-bit-generator, stochastic-convert,
    uniform-(de)quantize, clamp with scalar bounds, bitcast-convert of values narrower than a byte,
and async-start/async-done of computations (a program runs on one stream of steps; only
    collectives run beside it).
"""

from __future__ import annotations

from collections.abc import Callable

from torch_hlo.hlo.ir import (
    DTYPES,
    Instruction,
    Module,
    Shape,
    build as h,
    inline,
    lift,
    op,
    product,
    rewrite,
    rules,
    var,
)
from torch_hlo.hlo.ir.infer import fail
from torch_hlo.hlo.ir.notation import Terms
from torch_hlo.hlo.ir.numeric import SMALL_FLOATS

from ..hlo_pass import hlo_pass
from .legalize_random import rng_bit_generator

ACCUMULATOR = dict.fromkeys(("f16", "bf16", *SMALL_FLOATS), "f32")
_INTEGER = {8: "s8", 16: "s16", 32: "s32", 64: "s64"}


# Batch normalisation, computed in f32 for narrower types


def _along(v: Terms, like: Terms, axis: int) -> Terms:
    return Terms(h.broadcast(v.x, like.x.dims, (axis,)))


def _total(x: Terms, axis: int) -> Terms:
    """The sum over every dimension but `axis`."""
    others = [d for d in range(x.x.rank) if d != axis]
    return Terms(h.reduce(x.x, h.constant(0, x.x.dtype), others, "add"))


def _mean(x: Terms, axis: int) -> Terms:
    total = _total(x, axis)
    return total / _count(x.x, axis, total)


def _count(x: Instruction, axis: int, like: Terms) -> Terms:
    """The number of elements beside `axis`, symbolic or not, with the shape and type of `like`."""
    dims = [d for d in range(x.rank) if d != axis]
    known = product(x.dims[d] for d in dims)
    if isinstance(known, int):
        return like.filled(known)
    count = h.constant(1.0, like.x.dtype)
    for d in dims:
        count = h.multiply(count, h.convert(h.get_dimension_size(x, d), count.dtype))
    return Terms(h.broadcast(count, like.x.dims, ()))


def _wide(*xs: Instruction) -> list[Terms]:
    return [Terms(h.convert(x, ACCUMULATOR.get(x.dtype, x.dtype))) for x in xs]


def _deviation(variance: Terms, out: Instruction) -> Terms:
    return variance.binary("add", out["epsilon"]).op("sqrt")


def batch_norm_inference(out: Instruction) -> Instruction:
    axis = out["feature_index"]
    x, scale, offset, mean, variance = _wide(*out.operands)
    factor = scale / _deviation(variance, out)
    y = (x - _along(mean, x, axis)) * _along(factor, x, axis) + _along(offset, x, axis)
    return h.convert(y.x, out.dtype)


def batch_norm_training(out: Instruction) -> Instruction:
    axis = out["feature_index"]
    x, scale, offset = _wide(*out.operands)
    mean = _mean(x, axis)
    centred = x - _along(mean, x, axis)
    variance = _mean(centred * centred, axis)
    factor = scale / _deviation(variance, out)
    y = centred * _along(factor, x, axis) + _along(offset, x, axis)
    return _tuple_like(out, y, mean, variance)


def batch_norm_grad(out: Instruction) -> Instruction:
    axis = out["feature_index"]
    x, scale, mean, variance, grad = _wide(*out.operands)
    inverse = 1 / _deviation(variance, out)
    centred = (x - _along(mean, x, axis)) * _along(inverse, x, axis)
    grad_offset = _total(grad, axis)
    grad_scale = _total(grad * centred, axis)
    count = _count(x.x, axis, grad_offset)
    inner = grad - _along(grad_offset / count, x, axis)
    inner = inner - centred * _along(grad_scale / count, x, axis)
    return _tuple_like(out, inner * _along(scale * inverse, x, axis), grad_scale, grad_offset)


def _tuple_like(out: Instruction, *values: Terms) -> Instruction:
    return h.tuple_(*(h.convert(v.x, s.dtype) for v, s in zip(values, out.elements)))


# Called computations


def call(out: Instruction) -> Instruction | None:
    """The called instructions; not yet where a later pass knows what is called."""
    if '"late":true' in (out.get("backend_config") or ""):
        return None
    return inline(out["to_apply"], out.operands)


def map_(out: Instruction) -> Instruction:
    body = lift(out["to_apply"], out.operands)
    if body is None:
        fail("map", "the computation must consist of pointwise opcodes", *out.operands)
    return body


def async_done(out: Instruction) -> Instruction | None:
    """The computation, in place of starting it and waiting."""
    start = out.operand
    while start.op == "async-update":
        start = start.operand
    return inline(start["calls"], start.operands) if start.op == "async-start" else None


# Sorting


def total_order(x: Instruction) -> Instruction:
    """Integers that order like the floats `x`: -nan < -inf < … < -0 < 0 < … < inf < nan. Other
    types are returned as they are."""
    if x.kind != "f":
        return x
    bits = h.bitcast_convert(x, _INTEGER[x.bits])
    flipped = h.xor(bits, h.full_like(bits, h.highest(bits.dtype)))
    return h.select(h.compare(bits, h.full_like(bits, 0), "LT"), flipped, bits)


def topk(out: Instruction) -> Instruction:
    """A stable sort of (values, positions), cut after k."""
    x = out.operand
    last = x.rank - 1
    direction = "GT" if out["largest"] else "LT"
    scalars = [Shape(t) for t in (x.dtype, x.dtype, "s32", "s32")]
    comparator = h.computation(
        lambda a, b, i, j: h.compare(total_order(a), total_order(b), direction),
        scalars,
        "topk_" + direction.lower(),
    )
    both = h.sort([x, h.iota("s32", x.dims, last)], last, comparator, is_stable=True)
    limits = (*x.dims[:-1], out["k"])
    return h.tuple_(
        *(h.slice_(h.get_tuple_element(both, i), (0,) * (last + 1), limits) for i in (0, 1))
    )


# Conversions


def clamp(out: Instruction) -> Instruction | None:
    """Scalar bounds are broadcast."""
    low, x, high = out.operands
    if low.dims == high.dims == x.dims:
        return None
    return h.clamp(*(h.broadcast(v, x.dims, ()) if not v.dims else v for v in out.operands))


def bitcast_convert(out: Instruction) -> Instruction | None:
    """Values narrower than a byte are stored one per byte: wider ones are put together, or cut, in
    integers."""
    x = out.operand
    have, want = (v.bits for v in (x, out))
    few = min(have, want)
    if few >= 8 or have == want and "s" not in (x.kind, out.kind):
        return None
    bits = _cast(x, f"u{have}")
    if have != want:
        word = f"u{max(have, want, 8)}"
        dims = (x if have < want else out).dims
        last = len(dims) - 1
        places = Terms(h.iota(word, dims, last)) * few
        bits = h.convert(bits, word)
        if have < want:
            bits = h.reduce((Terms(bits) << places).x, h.constant(0, word), (last,), "add")
        else:
            bits = (Terms(h.broadcast(bits, dims, range(x.rank))) >> places & (1 << few) - 1).x
        bits = h.convert(bits, f"u{want}")
    return _cast(bits, out.dtype)


def _cast(x: Instruction, dtype: str) -> Instruction:
    """The bits of `x` in a type of the same width."""
    both = x.kind + DTYPES[dtype].kind
    return h.convert(x, dtype) if both in ("su", "us", "uu") else h.bitcast_convert(x, dtype)


def stochastic_convert(out: Instruction) -> Instruction:
    """Rounds the magnitude up where the random bits are below the fraction. Results are
    integers."""
    x, random = out.operands
    if out.kind not in "su":
        fail(
            "stochastic-convert",
            f"results of type {out.dtype} have no defined rounding; convert to an integer type",
            x,
            random,
        )
    (wide,) = _wide(x)
    magnitude = wide.op("abs")
    whole = magnitude.op("floor")
    scaled = (magnitude - whole) * 2.0**random.bits
    up = Terms(h.compare(random, h.convert(scaled.x, random.dtype), "LT"))
    rounded = (whole + 1).where(up, whole)
    return h.convert((-rounded).where(wide < 0, rounded).x, out.dtype)


def _per_channel(out: Instruction) -> list[Instruction]:
    """Scale and zero point with the operand's dims."""
    return [h.broadcast(v, out.operand.dims, out.get("dimensions", ())) for v in out.operands[1:]]


def uniform_quantize(out: Instruction) -> Instruction:
    scale, zero = (h.convert(v, "f64") for v in _per_channel(out))
    x = h.round_nearest_even(h.divide(h.convert(out.operand, "f64"), scale))
    return h.convert(h.add(x, zero), out.dtype)


def uniform_dequantize(out: Instruction) -> Instruction:
    scale, zero = (h.convert(v, "f64") for v in _per_channel(out))
    return h.convert(h.multiply(h.subtract(h.convert(out.operand, "f64"), zero), scale), out.dtype)


def get_dimension_size(out: Instruction) -> Instruction | None:
    size = out.operand.dims[out["dimensions"][0]]
    return h.constant(size, "s32") if isinstance(size, int) else None


# Ragged dot


def ragged_dot(out: Instruction) -> Instruction | None:
    """Stays when it is a matrix product for each group, which has a kernel."""
    x, y, _ = out.operands
    (ragged,) = out["lhs_ragged_dims"]
    ranks = (2, 2) if ragged in out["lhs_contracting_dims"] else (2, 3)
    if (
        (x.rank, y.rank) == ranks
        and not out["lhs_batch_dims"]
        and len(out["lhs_contracting_dims"]) == 1
        and out.dtype in ("f32", "f64")
    ):
        return None
    return expand_ragged_dot(out)


def expand_ragged_dot(out: Instruction) -> Instruction:
    """One dot per group; a ragged batch is an ordinary batched dot.

    Ragged rows: every group multiplies all rows with its matrix, and its own rows are kept.
    Ragged contraction: both operands are zeroed outside of the group, and the groups' results are
    stacked."""
    x, y, sizes = out.operands
    (ragged,) = out["lhs_ragged_dims"]
    contract = out["lhs_contracting_dims"]
    batch = out["lhs_batch_dims"]
    dims = (contract, out["rhs_contracting_dims"], batch, out["rhs_batch_dims"])
    if ragged in batch:
        return h.dot(x, y, *dims, out.dtype)
    if sizes.rank != 1 or not isinstance(sizes.dims[0], int):
        why = "group sizes must be a vector of a static length"
        fail("ragged-dot", why, x, y, sizes)
    ends = _inclusive_sum(sizes)
    starts = h.subtract(ends, sizes)

    def inside(group: int, like: Instruction, dimension: int) -> Instruction:
        """Which elements along `dimension` belong to the group."""
        position = h.iota(sizes.dtype, like.dims, dimension)
        own = (h.reshape(h.slice_(v, (group,), (group + 1,)), ()) for v in (starts, ends))
        low, high = (h.broadcast(v, like.dims, ()) for v in own)
        return h.and_(h.compare(position, low, "GE"), h.compare(position, high, "LT"))

    if ragged in contract:
        other = out["rhs_contracting_dims"][contract.index(ragged)]
        results = []
        for g in range(sizes.dims[0]):
            left, right = (
                h.select(inside(g, v, d), v, h.full_like(v, 0))
                for v, d in ((x, ragged), (y, other))
            )
            one = h.dot(left, right, *dims, out.dtype)
            results.append(h.reshape(one, (1, *one.dims)))
        return h.concatenate(results, 0) if results else h.full(0, out.dtype, out.dims)
    (group_dim,) = out["rhs_group_dims"]
    free = [d for d in range(x.rank) if d not in batch and d not in contract]
    row = len(batch) + free.index(ragged)
    result = h.full(0, out.dtype, out.dims)
    kept = [d for d in range(y.rank) if d != group_dim]
    rhs_contract, rhs_batch = (
        [kept.index(d) for d in ds] for ds in (out["rhs_contracting_dims"], out["rhs_batch_dims"])
    )
    for g in range(sizes.dims[0]):
        ranges = [(g, g + 1, 1) if d == group_dim else (0, n, 1) for d, n in enumerate(y.dims)]
        matrix = h.reshape(h.slice_(y, *zip(*ranges)), [y.dims[d] for d in kept])
        one = h.dot(x, matrix, contract, rhs_contract, batch, rhs_batch, out.dtype)
        result = h.select(inside(g, one, row), one, result)
    return result


def _inclusive_sum(v: Instruction) -> Instruction:
    """Cumulative sum of a short vector: a masked square summed over its columns."""
    n = v.dims[0]
    square = (n, n)
    before = h.compare(h.iota("s32", square, 1), h.iota("s32", square, 0), "LE")
    spread = h.broadcast(v, square, (1,))
    return h.reduce(
        h.select(before, spread, h.full_like(spread, 0)),
        h.constant(0, v.dtype),
        (1,),
        "add",
    )


EXPANSIONS: dict[str, Callable[[Instruction], Instruction | None]] = {
    "batch-norm-inference": batch_norm_inference,
    "batch-norm-training": batch_norm_training,
    "batch-norm-grad": batch_norm_grad,
    "bitcast-convert": bitcast_convert,
    "call": call,
    "map": map_,
    "async-done": async_done,
    "topk": topk,
    "clamp": clamp,
    "stochastic-convert": stochastic_convert,
    "uniform-quantize": uniform_quantize,
    "uniform-dequantize": uniform_dequantize,
    "get-dimension-size": get_dimension_size,
    "ragged-dot": ragged_dot,
    "rng-bit-generator": rng_bit_generator,
}
x = var("x")
RULES = rules(
    *((op(name), expand) for name, expand in EXPANSIONS.items()),
    (op("domain", x), lambda x: x),
    (op("copy-done", op("copy-start", x)), lambda x: x),
)


@hlo_pass
def legalize(module: Module) -> Module:
    """Composite opcodes -> primitive opcodes. Every expansion is free of composite opcodes, except
    inlined computations, which are shorter."""
    return rewrite(module, RULES)
