"""Integers that a program computes from constants and sizes of arrays, as sizes; and sizes as what
computes them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping

from ..ir import Instruction, Size, build as b, dim_max, dim_min, instr

MAX_SIZES = 64
_ARITHMETIC: dict[str, Callable[[Size, Size], Size]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.floordiv,
    "remainder": operator.mod,
    "maximum": dim_max,
    "minimum": dim_min,
}


def sizes_of(
    x: Instruction, known: Mapping[Instruction, list[Size]], depth: int = 0
) -> list[Size] | None:
    """The elements of a small integer array, in order, as sizes; None when they depend on data.
    `known` says more than the graph."""
    shape = x.shape
    if (
        depth > 200
        or shape.is_tuple
        or shape.kind not in "su"
        or not isinstance(shape.size, int)
        or shape.size > MAX_SIZES
    ):
        return None
    if x in known:
        return known[x]
    if x.op == "constant":
        return [int(v) for v in x["literal"].numpy().ravel()]
    if x.op == "get-dimension-size":
        return [x.operand.dims[x["dimensions"][0]]]
    if x.op == "iota" and shape.rank == 1:
        return list(range(shape.sizes[0]))
    found = [sizes_of(o, known, depth + 1) for o in x.operands]
    parts = [p for p in found if p is not None]
    if not parts or len(parts) < len(found):
        return None
    if x.op in ("reshape", "convert", "copy"):
        return parts[0]
    if x.op == "broadcast":
        return (
            parts[0] * shape.size
            if x.operand.rank == 0
            else parts[0]
            if x.operand.dims == shape.dims
            else None
        )
    if x.op == "concatenate" and x["dimensions"] == (0,):
        return [size for part in parts for size in part]
    if x.op == "slice" and shape.rank == 1:
        return parts[0][slice(*x["slice"][0])]
    if x.op in _ARITHMETIC:
        try:
            return [_ARITHMETIC[x.op](p, q) for p, q in zip(*parts, strict=True)]
        except ZeroDivisionError:
            return None
    return None


_OPCODES = {"floordiv": "divide", "mod": "remainder", "max": "maximum", "min": "minimum"}


def value_of(size: Size, symbols: Mapping[str, Instruction]) -> Instruction:
    """A size as an s32 number that is computed from those of symbols."""
    if isinstance(size, int):
        return b.constant(size, "s32")
    terms = []
    for monomial, coefficient in size.terms:
        factors = [b.constant(coefficient, "s32")]
        for kind, *rest in monomial:
            factors.append(
                symbols[rest[0]]
                if kind == "sym"
                else instr(_OPCODES[kind], tuple(value_of(s, symbols) for s in rest))
            )
        terms.append(functools.reduce(lambda x, y: instr("multiply", (x, y)), factors))
    return functools.reduce(lambda x, y: instr("add", (x, y)), terms)
