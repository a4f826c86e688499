"""Small programs that several compiler tests share, built with hlo.build. Each function returns a
Module."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torch_hlo.hlo.ir import build as b
from torch_hlo.hlo.ir.instruction import Computation, Instruction, Module
from torch_hlo.hlo.ir.shape import Shape, numpy_dtype, tuple_shape


def module(
    name: str,
    outputs: Sequence[Instruction],
    params: Sequence[Instruction],
    aliases=(),
    symbols=(),
) -> Module:
    root = b.instr("tuple", tuple(outputs), tuple_shape(*(x.shape for x in outputs)))
    return Module(name, Computation("main", tuple(params), root), aliases, symbols)


def params(*shapes: tuple) -> list[Instruction]:
    """`params(("f32", (4,)), …)`: one parameter per (dtype, dims)."""
    return [b.parameter(i, Shape(dtype, tuple(dims))) for i, (dtype, dims) in enumerate(shapes)]


def zero(dtype: str = "f32") -> Instruction:
    return b.constant(0, dtype)


def across(x: Instruction, dims: tuple, kept: tuple[int, ...]) -> Instruction:
    return b.broadcast(x, dims, kept)


def scalar(value: float, like: Instruction) -> Instruction:
    return b.broadcast(b.constant(value, like.shape.dtype), like.shape.dims, ())


def softmax_of(x: Instruction, axis: int = -1) -> Instruction:
    axis %= x.shape.rank
    kept = tuple(i for i in range(x.shape.rank) if i != axis)
    top = b.reduce(x, b.constant(float("-inf"), x.shape.dtype), (axis,), "maximum")
    e = b.exponential(b.subtract(x, across(top, x.shape.dims, kept)))
    total = b.reduce(e, zero(x.shape.dtype), (axis,), "add")
    return b.divide(e, across(total, x.shape.dims, kept))


def softmax(dims=(64, 100), axis=-1) -> Module:
    (x,) = params(("f32", dims))
    return module("softmax", [softmax_of(x, axis)], [x])


def mean(x: Instruction, axes: tuple[int, ...]) -> Instruction:
    count = 1
    for a in axes:
        count *= x.shape.dims[a]
    total = b.reduce(x, zero(x.shape.dtype), axes, "add")
    return b.multiply(total, scalar(1.0 / count, total))


def layernorm(dims=(8, 16, 96)) -> Module:
    x, w, bias = params(("f32", dims), ("f32", dims[-1:]), ("f32", dims[-1:]))
    last = len(dims) - 1
    kept = tuple(range(last))
    mu = mean(x, (last,))
    centred = b.subtract(x, across(mu, dims, kept))
    var = mean(b.multiply(centred, centred), (last,))
    rstd = b.rsqrt(b.add(var, scalar(1e-5, var)))
    hat = b.multiply(centred, across(rstd, dims, kept))
    y = b.add(b.multiply(hat, across(w, dims, (last,))), across(bias, dims, (last,)))
    return module("layernorm", [y, mu, rstd], [x, w, bias])


def layernorm_backward(dims=(8, 16, 96)) -> Module:
    """(dx, dw, db) from (dy, x, w, mean, rstd); dw and db are reduced over a flattened view."""
    rows, last = dims[:-1], len(dims) - 1
    dy, x, w, mu, rstd = params(
        ("f32", dims), ("f32", dims), ("f32", dims[-1:]), ("f32", rows), ("f32", rows)
    )
    kept = tuple(range(last))
    hat = b.multiply(b.subtract(x, across(mu, dims, kept)), across(rstd, dims, kept))
    gw = b.multiply(dy, across(w, dims, (last,)))
    s1, s2 = mean(gw, (last,)), mean(b.multiply(gw, hat), (last,))
    inner = b.subtract(
        b.subtract(gw, across(s1, dims, kept)), b.multiply(hat, across(s2, dims, kept))
    )
    dx = b.multiply(across(rstd, dims, kept), inner)
    flat = (int(np.prod(rows)), dims[-1])
    dw = b.reduce(b.reshape(b.multiply(dy, hat), flat), zero(), (0,), "add")
    db = b.reduce(dy, zero(), kept, "add")
    return module("layernorm_backward", [dx, dw, db], [dy, x, w, mu, rstd])


def cross_entropy(dims=(32, 200)) -> Module:
    """Mean loss, and the gradient of the logits, from logits and s64 targets."""
    n, d = dims
    x, target = params(("f32", dims), ("s64", (n,)))
    top = b.reduce(x, b.constant(float("-inf"), "f32"), (1,), "maximum")
    shifted = b.subtract(x, across(top, dims, (0,)))
    total = b.reduce(b.exponential(shifted), zero(), (1,), "add")
    logp = b.subtract(shifted, across(b.log(total), dims, (0,)))
    hot = b.compare(b.iota("s64", dims, 1), across(target, dims, (0,)), "EQ")
    picked = b.reduce(b.select(hot, logp, scalar(0.0, logp)), zero(), (1,), "add")
    loss = b.negate(mean(picked, (0,)))
    one_hot = b.select(hot, scalar(1.0, logp), scalar(0.0, logp))
    grad = b.multiply(b.subtract(b.exponential(logp), one_hot), scalar(1.0 / n, logp))
    return module("cross_entropy", [loss, grad], [x, target])


def adam(sizes=((64, 32), (32,), (7,))) -> Module:
    """One AdamW-like step over several parameters, in place."""
    shapes = []
    for dims in sizes:
        shapes += [("f32", dims)] * 4
    lr, *rest = params(("f32", ()), *shapes)
    outs = []
    for k in range(len(sizes)):
        p, g, m, v = rest[4 * k : 4 * k + 4]
        m2 = b.add(b.multiply(m, scalar(0.9, m)), b.multiply(g, scalar(0.1, g)))
        v2 = b.add(
            b.multiply(v, scalar(0.99, v)),
            b.multiply(b.multiply(g, g), scalar(0.01, g)),
        )
        step = b.divide(m2, b.add(b.sqrt(v2), scalar(1e-8, v2)))
        p2 = b.subtract(
            p,
            b.multiply(
                across(lr, p.shape.dims, ()),
                b.add(step, b.multiply(p, scalar(0.01, p))),
            ),
        )
        outs += [p2, m2, v2]
    aliases = tuple(
        (3 * k + j, 1 + 4 * k + (0, 2, 3)[j]) for k in range(len(sizes)) for j in range(3)
    )
    return module("adam", outs, [lr, *rest], aliases)


def inputs_for(m: Module, seed: int = 0, sizes: dict | None = None) -> list[np.ndarray]:
    """Random inputs: normal floats, small non-negative integers, random booleans."""
    from torch_hlo.hlo.ir.dim import substitute

    rng = np.random.default_rng(seed)
    made = []
    for p in m.entry.params:
        dims = tuple(substitute(d, sizes or {}) for d in p.shape.dims)
        kind = numpy_dtype(p.shape.dtype)
        if kind.kind == "f":
            made.append(rng.standard_normal(dims).astype(kind))
        elif kind.kind == "c":
            made.append((rng.standard_normal(dims) + 1j * rng.standard_normal(dims)).astype(kind))
        else:
            made.append(rng.integers(0, 2 if kind.kind == "b" else 5, dims).astype(kind))
    return made
