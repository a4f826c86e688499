"""Constants are computed at compile time: results of at most LIMIT elements, and any size when
every element is the same.

    add(broadcast(constant 2), broadcast(constant 3)) -> broadcast(constant 5)

A constant array whose elements are all equal becomes the broadcast of a scalar. Large broadcasts
and iotas are never materialised.
"""

from collections.abc import Iterable

import numpy as np

from torch_hlo.hlo.evaluate.evaluate import evaluate_instruction
from torch_hlo.hlo.evaluate.interpreter import EvaluateError
from torch_hlo.hlo.ir import (
    OPCODES,
    Instruction,
    Literal,
    Module,
    Shape,
    build as h,
    encode,
    fixed,
    replace,
    splat,
)
from torch_hlo.hlo.ir.match import new_mark, rewrite_module

from ..hlo_pass import hlo_pass

LIMIT = 1024  # elements of a result, and of each operand, that is computed
_POINTWISE = frozenset(name for name, row in OPCODES.items() if "pointwise" in row.traits)
_MARK = new_mark()
_KEPT_EMPTY = frozenset("parameter broadcast get-tuple-element custom-call".split())
_FOLDABLE = _POINTWISE | frozenset(
    "slice transpose reshape reverse concatenate pad gather scatter dynamic-slice"
    " dynamic-update-slice reduce reduce-window dot convolution sort bitcast-convert"
    " select-and-scatter cholesky triangular-solve fft".split()
)


@hlo_pass
def fold(module: Module) -> Module:
    """Compute instructions of constants. Every firing replaces an instruction by a constant."""
    return rewrite_module(module, _fire, _MARK)


def _fire(x: Instruction) -> tuple[Instruction | None, str]:
    y = folded(x)
    return (y, "fold") if y is not None and y is not x else (None, "")


def folded(x: Instruction) -> Instruction | None:
    """The constant that `x` is, or None."""
    if 0 in x.dims and x.op not in _KEPT_EMPTY and "impure" not in OPCODES[x.op].traits:
        return h.full(0, x.dtype, x.dims)  # an array without elements
    if x.op == "constant":
        return _uniform(x)
    if x.op == "reduce" and 0 in (x.operand.dims[d] for d in x["dimensions"]):
        inits = [
            h.broadcast(i, s.dims, ())
            for i, s in zip(x.operands[len(x.operands) // 2 :], x.shape.arrays)
        ]
        return h.tuple_(*inits) if x.is_tuple else inits[0]  # a fold over nothing
    if x.op not in _FOLDABLE or not x.operands:
        return None
    for o in x.operands:
        if o.op != "constant" and (o.op != "broadcast" or o.operand.op != "constant"):
            return None
    if x.op in _POINTWISE and all(splat(o) is not None for o in x.operands):
        scalars = [o.operand if o.op == "broadcast" else o for o in x.operands]
        value = _compute(replace(x, scalars, Shape(x.dtype)), scalars)
        return None if value is None else h.broadcast(value, x.dims, ())
    if x.is_tuple or not all(_is_small(o.shape) for o in (x, *x.operands)):
        return None
    known = any(o.op == "constant" and o.dims for o in x.operands)
    return _compute(x, x.operands) if known else None


def _is_small(shape: Shape) -> bool:
    return shape.is_static and fixed(shape.size) <= LIMIT


def _uniform(x: Instruction) -> Instruction | None:
    """constant {c, c, …} -> broadcast(constant c)"""
    literal = x["literal"]
    if not literal.dims or not literal.data:
        return None
    width = x.itemsize
    first = literal.data[:width]
    if literal.data != first * (len(literal.data) // width):
        return None
    return h.broadcast(
        h.constant(Literal(literal.dtype, (), first), literal.dtype),
        literal.dims,
        (),
    )


def _compute(x: Instruction, operands: Iterable[Instruction]) -> Instruction | None:
    try:
        value = evaluate_instruction(x, *(_value(o) for o in operands))
    except EvaluateError:
        return None  # e.g. a computation that calls out of the program: left to run time
    return h.constant(Literal(x.dtype, x.shape.sizes, encode(value, x.dtype)), x.dtype)


def _value(o: Instruction) -> np.ndarray:
    source = o if o.op == "constant" else o.operand
    literal: Literal = source["literal"]
    return literal.numpy() if source is o else evaluate_instruction(o, literal.numpy())
