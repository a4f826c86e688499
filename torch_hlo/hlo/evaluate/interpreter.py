"""The interpreter under evaluate.py: the table of meanings and the loop that runs a computation on
NumPy arrays.

A meaning is `fn(x, *operands) -> array | tuple`: `x` is the instruction (its attributes and result
shape; all sizes are ints), the operands are its operands' values. A value is an ndarray of
`numpy_dtype`, or a tuple of values; a token is the empty tuple. The interpreter converts results to
the element type of `x.shape` (rounding bf16 and f8, wrapping 4-bit integers)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import numpy as np

from torch_hlo.tables import entry

from ..ir import (
    POINTWISE,
    Computation,
    Instruction,
    Shape,
    called,
    numpy_dtype,
)
from ..ir.numeric import round_to

Array: TypeAlias = np.ndarray
Value: TypeAlias = Any  # an array (or NumPy scalar), or a tuple of values
Meaning = TypeVar("Meaning", bound=Callable[..., Value])
MEANINGS: dict[str, Callable[..., Value]] = {}
# called with each instruction that has been computed, its operands and its value
WATCHERS: list[Callable[[Instruction, list[Value], Value], None]] = []

# These only move elements or pass values through: their results are already representable.
_MOVES = frozenset(
    "parameter tuple get-tuple-element reshape transpose broadcast slice reverse concatenate copy"
    " bitcast gather dynamic-slice constant while conditional call fusion sort opt-barrier"
    " custom-call".split()
)


class EvaluateError(ValueError):
    """An instruction that has no value on these inputs; the message names it and its shapes."""


def meaning(*ops: str) -> Callable[[Meaning], Meaning]:
    """Decorator: the function is the meaning of these opcodes."""
    return entry(MEANINGS, ops)


def run(computation: Computation, args: Sequence[Value], lifted: bool = False) -> Value:
    """The root's value. With `lifted`, the arguments of a scalar computation are whole arrays (see
    `pointwise`)."""
    steps, last_use = _plan(computation)
    values: dict[int, Value] = {id(p): a for p, a in zip(computation.params, args, strict=True)}
    with np.errstate(all="ignore"):
        for i, x in enumerate(steps):
            if x.op != "parameter":
                operands = [values[id(o)] for o in x.operands]
                values[id(x)] = value = step(x, operands, lifted)
                for watch in WATCHERS:
                    watch(x, operands, value)
            for dead in last_use[i]:
                del values[dead]
    return values[id(computation.root)]


def step(x: Instruction, operands: list[Value], lifted: bool = False) -> Value:
    """The value of one instruction for these operand values."""
    fn = MEANINGS.get(x.op)
    if fn is None:
        raise EvaluateError(f"opcode {x.op!r} has no meaning in the evaluator")
    if x.op in _CALLS and lifted:
        return run(called(x)[0], operands, lifted=True)
    try:
        value = fn(x, *operands)
        return conform(value, x.shape, x.op not in _MOVES, None if lifted else x)
    except EvaluateError:
        raise
    except Exception as error:
        error.add_note(f"while evaluating {x.op}({x.operand_shapes}) -> {x.shape}")
        raise


_CALLS = ("call", "fusion")


def conform(value: Value, shape: Shape, rounds: bool = True, x: Instruction | None = None) -> Value:
    """`value` as a value of `shape`'s element types. Given `x`, sizes are checked. Raises
    EvaluateError."""
    if shape.is_tuple:
        return tuple(conform(v, s, rounds, x) for v, s in zip(value, shape.elements, strict=True))
    kind = shape.kind
    bits = shape.bits
    if kind == "t":
        return ()
    dtype = numpy_dtype(shape.dtype)
    array = np.asarray(value)
    if array.dtype != dtype:
        array = array.astype(dtype)
    if rounds and kind == "f" and bits != dtype.itemsize * 8:
        array = round_to(array, shape.dtype)
    elif bits < 8 and kind in "su":
        array = wrap_bits(array, bits, kind == "s")
    if x is not None and array.shape != shape.dims:
        raise EvaluateError(
            f"{x.op}({x.operand_shapes}) gave sizes {list(array.shape)}, its shape says {shape}"
        )
    return array


def wrap_bits(array: Array, bits: int, signed: bool) -> Array:
    """The low `bits` of 8-bit integers, sign-extended when `signed`."""
    low = array & ((1 << bits) - 1)
    return (low ^ (1 << (bits - 1))) - (1 << (bits - 1)) if signed else low


@lru_cache(maxsize=256)
def _plan(computation: Computation) -> tuple[list[Instruction], list[list[int]]]:
    steps = computation.instructions()
    last: dict[int, int] = {}
    for i, x in enumerate(steps):
        last[id(x)] = i
        for o in x.operands:
            last[id(o)] = i
    last.pop(id(computation.root))
    dead: list[list[int]] = [[] for _ in steps]
    for key, i in last.items():
        dead[i].append(key)
    return steps, dead


_SCALAR = frozenset(POINTWISE) | frozenset(
    "constant parameter tuple get-tuple-element copy call fusion bitcast-convert"
    " opt-barrier".split()
)


@lru_cache(maxsize=256)
def pointwise(computation: Computation) -> bool:
    """Whether a computation on scalars means the same applied to whole arrays element by
    element."""
    return all(
        x.op in _SCALAR and not _has_dims(x.shape) and all(pointwise(c) for c in called(x))
        for x in computation.instructions()
    )


def _has_dims(shape: Shape) -> bool:
    return bool(shape.dims) or any(_has_dims(e) for e in shape.elements)


def apply(computation: Computation, args: Sequence[Array]) -> tuple[Array, ...]:
    """A scalar computation applied element by element to arrays of one size; its results as a
    tuple."""
    args = np.broadcast_arrays(*args)
    dims = args[0].shape if args else ()
    if pointwise(computation):
        value = run(computation, args, lifted=True)
        values = value if isinstance(value, tuple) else (value,)
        return tuple(np.broadcast_to(v, dims) for v in values)
    rows = [run(computation, [np.asarray(a[i]) for a in args]) for i in np.ndindex(dims)]
    shape = computation.root.shape
    if not shape.is_tuple:
        rows = [(r,) for r in rows]
    return tuple(
        np.array([r[k] for r in rows], numpy_dtype(s.dtype)).reshape(dims)
        for k, s in enumerate(shape.arrays)
    )


UFUNCS = {
    "add": np.add,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def simple_fold(computation: Computation) -> np.ufunc | None:
    """The ufunc of a computation that is one commutative instruction on its two parameters, else
    None."""
    root = computation.root
    params = computation.params
    if len(params) != 2 or set(root.operands) != set(params) or root.is_tuple:
        return None
    if root.kind == "c" and root.op not in ("add", "multiply"):
        return None
    return UFUNCS.get(root.op)


def wide(array: Array, shape: Shape) -> Array:
    """`array` in the type sums are accumulated in: float64 or complex128 for floats, else its
    own."""
    return array.astype(
        {"f": np.float64, "c": np.complex128}.get(shape.kind, array.dtype),
        copy=False,
    )
