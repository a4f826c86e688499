"""Meanings of rng-bit-generator (bit-exact with XLA's expansion on the CPU) and of the
stateless-by-chance `rng`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..ir import Instruction, Ints
from .elementwise import reinterpret
from .interpreter import Array, EvaluateError, Value, meaning

Product = Callable[[Any, int], Sequence[Any]]
U32 = np.uint32
U64 = np.uint64
_LOW = U64(0xFFFFFFFF)
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)


def _halves(v: Array) -> tuple[Array, Array]:
    v = np.asarray(v, U64)
    return (v & _LOW).astype(U32), (v >> U64(32)).astype(U32)


def threefry2x32(key: Sequence[Any], counter: Sequence[Any], rounds: int = 20) -> tuple[Any, Any]:
    """Threefry-2x32 of Salmon et al. 2011 on u32: of arrays, or of what has their operators."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x = counter[0] + keys[0]
    y = counter[1] + keys[1]
    for i in range(rounds):
        x = x + y
        turn = _ROTATIONS[i % 8]
        y = (y << turn | y >> 32 - turn) ^ x
        if i % 4 == 3:
            round_ = i // 4 + 1
            x = x + keys[round_ % 3]
            y = y + (keys[(round_ + 1) % 3] + round_)
    return x, y


def philox4x32(counter: Sequence[Any], key: Sequence[Any], multiplied: Product) -> list[Any]:
    """10 rounds of Philox on four counter words; `multiplied` gives the words of a product."""
    x = list(counter)
    keys = list(key)
    for _ in range(10):
        low0, high0 = multiplied(x[0], 0xD2511F53)
        low1, high1 = multiplied(x[2], 0xCD9E8D57)
        x = [high1 ^ x[1] ^ keys[0], low1, high0 ^ x[3] ^ keys[1], low0]
        keys = [k + step for k, step in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return x


def _multiplied(x: Array, number: int) -> tuple[Array, Array]:
    return _halves(x.astype(U64) * U64(number))


def _threefry_bits(state: Array, dims: Ints, bits: int) -> tuple[Array, Array]:
    """(values of `bits` bits, new state). Narrow values come in pairs along the first even
    dimension (or the largest)."""
    state = state.copy()
    split = None
    blocks = dims
    if bits < 64 and dims:
        split = next((d for d, n in enumerate(dims) if n % 2 == 0), int(np.argmax(dims)))
        blocks = (*dims[:split], -(-dims[split] // 2), *dims[split + 1 :])
    count = math.prod(blocks)
    low, high = threefry2x32(_halves(state[:1]), _halves(state[1] + np.arange(count, dtype=U64)))
    state[1] += U64(count)
    low = low.reshape(blocks)
    high = high.reshape(blocks)
    if bits == 64:
        return low.astype(U64) | (high.astype(U64) << U64(32)), state
    if split is None:
        return low, state
    pairs = np.stack([low, high], split + 1).reshape((*dims[:split], -1, *dims[split + 1 :]))
    return pairs[(slice(None),) * split + (slice(0, dims[split]),)], state


def _philox_bits(state: Array, dims: Ints, bits: int) -> tuple[Array, Array]:
    """(values of `bits` bits, new state): the words of consecutive blocks in order. The state is
    key, counter, [upper counter]."""
    state = state.copy()
    count = math.prod(dims)
    blocks = -(-count // (2 if bits == 64 else 4))
    counter = state[1] + np.arange(blocks, dtype=U64)
    # a short state's upper half is the key
    upper = (state[2] if len(state) > 2 else state[0]) + (counter < state[1]).astype(U64)
    words = np.stack(
        philox4x32([*_halves(counter), *_halves(upper)], _halves(state[:1]), _multiplied), -1
    ).ravel()
    after = state[1] + U64(blocks)
    if len(state) > 2:
        state[2] += U64(after < state[1])
    state[1] = after
    values = words[0::2].astype(U64) | (words[1::2].astype(U64) << U64(32)) if bits == 64 else words
    return values[:count].reshape(dims), state


_ALGORITHMS = {
    "rng_three_fry": _threefry_bits,
    "rng_philox": _philox_bits,
    "rng_default": _philox_bits,
}


@meaning("rng-bit-generator")
def _rng_bit_generator(x: Instruction, state: Array) -> Value:
    shape = x.shape.arrays[-1]
    key = np.ascontiguousarray(state).view(U64) if state.dtype == U32 else state
    fn = _ALGORITHMS.get(x["algorithm"])
    if fn is None or key.shape not in ((2,), (3,)):
        raise EvaluateError(
            f"rng-bit-generator with state {x.operand.shape} and algorithm {x['algorithm']}"
        )
    bits = max(shape.bits, 8)
    values, new = fn(key, shape.sizes, bits)
    values = reinterpret(values.astype(f"u{bits // 8}"), f"u{bits}", shape.dtype)
    return (new.view(state.dtype), values) if x.is_tuple else values


_STATE = np.random.default_rng(0)


@meaning("rng")
def _rng(x: Instruction, a: Array, b: Array) -> Value:
    if x["distribution"] == "rng_normal":
        return _STATE.normal(a, b, x.shape.sizes)
    if x.kind == "f":
        return _STATE.uniform(a, b, x.shape.sizes)
    return _STATE.integers(int(a), int(b), x.shape.sizes)


@meaning("rng-get-and-update-state")
def _rng_get_and_update_state(x: Instruction) -> Value:
    raise EvaluateError(
        "rng-get-and-update-state: a hidden state has no meaning here; use rng-bit-generator"
    )
