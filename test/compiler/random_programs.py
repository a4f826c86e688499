"""Random well-typed programs of elementwise, moving and reducing opcodes, for differential
tests."""

from __future__ import annotations

import random

from test.compiler.programs import module, scalar, softmax_of
from torch_hlo.hlo.ir import build as b
from torch_hlo.hlo.ir.instruction import Instruction, Module
from torch_hlo.hlo.ir.shape import Shape

UNARY = (b.negate, b.abs_, b.exponential, b.tanh, b.logistic, b.sine)
BINARY = (b.add, b.subtract, b.multiply, b.maximum, b.minimum)


def random_module(seed: int, count: int = 40, dims=(4, 6, 5)) -> Module:
    """About `count` instructions over shapes derived from `dims`, a few of them returned."""
    r = random.Random(seed)
    a, c, d = dims
    shapes = [(a, c, d), (a * c, d), (d,), (a, c), (a,), (a, d, c), ()]
    pool: list[Instruction] = [b.parameter(i, Shape("f32", s)) for i, s in enumerate(shapes[:5])]
    params = list(pool)

    def alike(x: Instruction) -> Instruction:
        same = [y for y in pool if y.shape == x.shape]
        return r.choice(same)

    def pick() -> Instruction:
        return pool[-1 - min(int(r.expovariate(0.25)), len(pool) - 1)]

    def unary(x):
        return b.tanh(r.choice(UNARY)(x))

    def binary(x):
        return b.tanh(r.choice(BINARY)(x, alike(x)))

    def spread(x):
        targets = [s for s in shapes if x.shape.rank < len(s)]
        for s in r.sample(targets, len(targets)):
            axes = [i for i in range(len(s))]
            kept = tuple(sorted(r.sample(axes, x.shape.rank)))
            if tuple(s[i] for i in kept) == x.shape.dims:
                return b.broadcast(x, s, kept)
        return unary(x)

    def reduce(x):
        if not x.shape.rank:
            return unary(x)
        axes = tuple(sorted(r.sample(range(x.shape.rank), r.randint(1, x.shape.rank))))
        name, init = r.choice((("add", 0.0), ("maximum", float("-inf")), ("minimum", float("inf"))))
        total = b.reduce(x, b.constant(init, "f32"), axes, name)
        return b.multiply(total, scalar(0.1, total))

    def move(x):
        if x.shape.rank < 2:
            return b.reverse(x, tuple(range(x.shape.rank))) if x.shape.rank else unary(x)
        kind = r.randrange(4)
        if kind == 0:
            return b.transpose(x, tuple(r.sample(range(x.shape.rank), x.shape.rank)))
        if kind == 1:
            half = b.slice_(x, [0] * (x.shape.rank - 1) + [1], x.shape.dims)
            return b.pad(
                half,
                zero_of(x),
                [(0, 1, 0) if i == x.shape.rank - 1 else (0, 0, 0) for i in range(x.shape.rank)],
            )
        if kind == 2:
            n = x.shape.dims[0]
            if n < 2:
                return unary(x)
            start, rest = [0] * (x.shape.rank - 1), list(x.shape.dims[1:])
            return b.concatenate(
                [
                    b.slice_(x, [1, *start], x.shape.dims),
                    b.slice_(x, [0, *start], [1, *rest]),
                ],
                0,
            )
        return b.reshape(
            x,
            r.choice([s for s in shapes if Shape("f32", s).size == x.shape.size] or [x.shape.dims]),
        )

    def choose(x):
        return b.select(b.compare(x, alike(x), "GT"), x, alike(x))

    def normalize(x):
        if not x.shape.rank or not x.shape.size:
            return unary(x)
        return softmax_of(x, r.randrange(x.shape.rank))

    def zero_of(x):
        return b.constant(0.5, x.shape.dtype)

    makers = (
        [unary] * 3 + [binary] * 5 + [spread] * 4 + [reduce] * 3 + [move] * 2 + [choose, normalize]
    )
    for _ in range(count):
        pool.append(r.choice(makers)(pick()))
    outs = [pool[-1], *r.sample(pool[5:], min(4, count))]
    return module(f"random{seed}", outs, params)
