"""Random bits, uniform and normal numbers: a counter-based generator on the element's index, so
that dropout fuses like any elementwise op.

Threefry-2x32 (13 rounds, the fewest that pass BigCrush) turns (seed, offset, index) into 64 random
bits. `seed` and `offset` are inputs of the program (Weak s64): the recorder gives every op of a
step its own offset."""

import math
from collections.abc import Sequence

from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.evaluate.random_bits import threefry2x32
from torch_hlo.hlo.ir import Computation, Instruction, Shape, Size, instr

from ..core import (
    Expr,
    LoweringError,
    Operand,
    Weak,
    cos,
    log,
    promote,
    reshape,
    sqrt,
)

ROUNDS = 13
DIGITS = {
    "f64": 53,
    "f32": 24,
    "f16": 11,
    "bf16": 8,
}  # significant bits of a uniform number


Key = tuple[Operand | None, Operand | None]  # seed and offset of a draw


def random_words(
    dims: Sequence[Size],
    key: Key,
    stream: int = 0,
) -> tuple[Expr, Expr]:
    """Two arrays of random u32; another `stream` gives independent ones."""
    seed, offset = key
    if seed is None or offset is None:
        raise LoweringError(
            "a random op was recorded without seed and offset; record it through torch_hlo's"
            " dispatcher"
        )
    size = Shape("u32", tuple(dims)).size
    index = reshape(instr("iota", (), Shape("u32", (size,)), iota_dimension=0), tuple(dims))
    return _words(Expr(index), seed, offset, stream)


def turn_seeds(
    seed: Operand | None, offset: Operand | None, turns: Instruction, stream: int = 0
) -> Instruction:
    """Seeds (s64) for the turns with these numbers of a loop that has drawn (seed, offset)."""
    assert seed is not None and offset is not None
    high, low = _words(Expr(turns).cast("u32"), seed, offset, stream)
    return ((high.cast("u64") << 32) | low.cast("u64")).cast("s64").x


def turn_seed(seed: int, offset: int, turn: int, stream: int = 0) -> int:
    """The seed of one turn."""
    numbers = [promote.constant(n, "s64") for n in (seed, offset, turn)]
    root = turn_seeds(*numbers, stream)
    return int(evaluate(Computation("seed", (), root), ())[0])


def _words(index: Expr, seed: Operand, offset: Operand, stream: int) -> tuple[Expr, Expr]:
    """Two random u32 for each index."""
    seed, offset = (
        v.value if isinstance(v, Weak) else promote.scalar(v, "s64") for v in (seed, offset)
    )
    seed = Expr(reshape(seed, ())).cast("u64")
    offset = Expr(reshape(offset, ())).cast("u64")

    def low(v: Expr) -> Expr:
        return v.cast("u32")

    def high(v: Expr) -> Expr:
        return (v >> 32).cast("u32")

    key = (
        index.like(low(seed)),
        index.like(high(seed) ^ high(offset) ^ (0x9E3779B9 * stream & 0xFFFFFFFF)),
    )
    return threefry2x32(key, (index, index.like(low(offset))), ROUNDS)


def uniform_bits(words: tuple[Expr, Expr], dtype: str) -> Expr:
    """[0, 1) in f32 or f64, with as many random digits as `dtype` has."""
    digits = DIGITS[dtype]
    if dtype == "f64":
        wide = (words[0].cast("u64") << 32) | words[1].cast("u64")
        return (wide >> 64 - digits).cast("f64") * 2.0**-digits
    return (words[0] >> 32 - digits).cast("f32") * 2.0**-digits


def uniform(
    dims: Sequence[Size],
    dtype: str,
    key: Key,
    stream: int = 0,
) -> Expr:
    """[0, 1) in the compute type of `dtype`."""
    return uniform_bits(random_words(dims, key, stream), dtype)


def open_uniform(dims: Sequence[Size], dtype: str, key: Key) -> Expr:
    """(0, 1]: safe for a logarithm."""
    return 1 - uniform(dims, promote.compute_type(dtype), key)


def normal(
    dims: Sequence[Size],
    dtype: str,
    key: Key,
    stream: int = 0,
) -> Expr:
    """Standard normal numbers by Box and Muller, in the compute type."""
    wide = promote.compute_type(dtype)
    a, b = random_words(dims, key, stream)
    u = 1 - uniform_bits((a, b), wide)
    if wide == "f64":  # which took all bits of both words
        v = uniform(dims, wide, key, stream + 1)
    else:
        v = uniform_bits((b, a), wide)
    return sqrt(log(u) * -2) * cos(v * (2 * math.pi))
