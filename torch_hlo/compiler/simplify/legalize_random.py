"""rng-bit-generator as integer arithmetic on iota, bit for bit what XLA generates (Threefry-2x32
and Philox-4x32-10, Salmon et al. 2011).

The state is u64[2] (key, counter) or, for Philox, u64[3] with the upper half of the counter; u32
states hold the same words, low first."""

from torch_hlo.hlo.evaluate.random_bits import philox4x32, threefry2x32
from torch_hlo.hlo.ir import Dims, Instruction, Size, build as h, ceildiv, product
from torch_hlo.hlo.ir.infer import fail
from torch_hlo.hlo.ir.notation import Terms

Words = list[Instruction]


def rng_bit_generator(out: Instruction) -> Instruction:
    """(new state, bits)"""
    state = out.operand
    shape = out.elements[1]
    words = (
        h.bitcast_convert(h.reshape(state, (state.dims[0] // 2, 2)), "u64")
        if state.dtype == "u32"
        else state
    )
    threefry = out["algorithm"] == "rng_three_fry"
    if words.dtype != "u64" or words.dims not in (((2,),) if threefry else ((2,), (3,))):
        fail(
            "rng-bit-generator",
            f"{out['algorithm']} takes a state of u64[2]{'' if threefry else ' or u64[3]'}",
            state,
        )
    parts = [h.reshape(h.slice_(words, (i,), (i + 1,)), ()) for i in range(words.shape.sizes[0])]
    bits = shape.itemsize * 8
    parts, values = (_threefry_bits if threefry else _philox_bits)(parts, shape.dims, bits)
    values = h.convert(values, f"u{bits}")
    values = h.bitcast_convert(values, shape.dtype)
    new = h.concatenate([h.reshape(p, (1,)) for p in parts], 0)
    if state.dtype == "u32":
        new = h.reshape(h.bitcast_convert(new, "u32"), state.dims)
    return h.tuple_(new, values)


def _halves(v: Instruction) -> Words:
    """[low, high] words of u64."""
    return [
        h.convert(v, "u32"),
        h.convert(h.shift_right_logical(v, h.full_like(v, 32)), "u32"),
    ]


def _joined(low: Instruction, high: Instruction) -> Instruction:
    high = h.convert(high, "u64")
    return h.or_(h.convert(low, "u64"), h.shift_left(high, h.full_like(high, 32)))


def _spread(v: Instruction, dims: Dims) -> Instruction:
    return h.broadcast(v, dims, ())


def _multiplied(x: Terms, number: int) -> list[Terms]:
    wide = Terms(h.convert(x.x, "u64"))
    return [*map(Terms, _halves((wide * number).x))]


def _counter(start: Instruction, count: Size) -> Instruction:
    return h.add(_spread(start, (count,)), h.iota("u64", (count,), 0))


def _advanced(start: Instruction, count: Size, dims: Dims) -> Instruction:
    if not isinstance(count, int):
        fail("rng-bit-generator", f"needs static sizes, got {list(dims)}", start)
    return h.add(start, h.full_like(start, count))


def _threefry_bits(state: Words, dims: Dims, bits: int) -> tuple[Words, Instruction]:
    """Narrow values come in pairs along the first even dimension, or the largest one."""
    key, start = state
    split = None
    blocks = dims
    if bits < 64 and dims:
        static = [n if isinstance(n, int) else 0 for n in dims]
        split = next((d for d, n in enumerate(dims) if n % 2 == 0), static.index(max(static)))
        blocks = (*dims[:split], ceildiv(dims[split], 2), *dims[split + 1 :])
    count = product(blocks)
    keys = [Terms(_spread(k, (count,))) for k in _halves(key)]
    words = threefry2x32(keys, [*map(Terms, _halves(_counter(start, count)))])
    new = [key, _advanced(start, count, dims)]
    low, high = (h.reshape(w.x, blocks) for w in words)
    if bits == 64:
        return new, _joined(low, high)
    if split is None:
        return new, low
    pair = (*blocks[: split + 1], 1, *blocks[split + 1 :])
    both = h.concatenate([h.reshape(low, pair), h.reshape(high, pair)], split + 1)
    both = h.reshape(both, (*blocks[:split], blocks[split] * 2, *blocks[split + 1 :]))
    return new, h.slice_(both, (0,) * len(dims), dims)


def _philox_bits(state: Words, dims: Dims, bits: int) -> tuple[Words, Instruction]:
    """The words of consecutive blocks in order. The upper half of a short state's counter is the
    key."""
    key, start = state[:2]
    total = product(dims)
    per_block = 2 if bits == 64 else 4
    blocks = ceildiv(total, per_block)
    counter = _counter(start, blocks)
    upper = _spread(state[2] if len(state) > 2 else key, (blocks,))
    carried = h.add(upper, h.convert(h.compare(counter, _spread(start, (blocks,)), "LT"), "u64"))
    keys = [Terms(_spread(k, (blocks,))) for k in _halves(key)]
    numbers = [*map(Terms, (*_halves(counter), *_halves(carried)))]
    words = [w.x for w in philox4x32(numbers, keys, _multiplied)]
    after = _advanced(start, blocks, dims)
    new = [key, after]
    if len(state) > 2:
        new.append(h.add(state[2], h.convert(h.compare(after, start, "LT"), "u64")))
    values = [_joined(words[0], words[1]), _joined(words[2], words[3])] if bits == 64 else words
    flat = h.reshape(
        h.concatenate([h.reshape(v, (blocks, 1)) for v in values], 1),
        (blocks * per_block,),
    )
    return new, h.reshape(h.slice_(flat, (0,), (total,)), dims)
