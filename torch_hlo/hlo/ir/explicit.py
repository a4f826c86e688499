"""Checks of opcodes whose result the operands do not determine: `check(shape, *operands, **attrs)`
raises ShapeError."""

from typing import Any

from .dim import Ints
from .infer import TOKEN, array, compatible, fail, in_range, known, product
from .instruction import Instruction
from .shape import DTYPES, Shape


def anything(shape: Shape, *operands: Instruction, **attrs: Any) -> None:
    """The shape is free."""


def parameter(shape: Shape, index: int) -> None:
    if index < 0:
        fail("parameter", f"bad index {index}", shape)


def iota(shape: Shape, iota_dimension: int) -> None:
    in_range("iota", "iota_dimension", (iota_dimension,), shape.rank, shape)
    if shape.kind not in "sufc":
        fail("iota", f"is not defined on {shape.dtype}", shape)


def broadcast(shape: Shape, x: Instruction, dimensions: Ints) -> None:
    array("broadcast", x)
    in_range("broadcast", "dimensions", dimensions, shape.rank, x, shape)
    if (
        shape.dtype != x.dtype
        or len(dimensions) != x.rank
        or any(shape.dims[d] != s for d, s in zip(dimensions, x.dims))
    ):
        fail(
            "broadcast",
            f"dimensions {list(dimensions)} do not carry the operand into the result",
            x,
            shape,
        )


def reshape(shape: Shape, x: Instruction) -> None:
    array("reshape", x)
    if shape.dtype != x.dtype or product(shape.dims) != product(x.dims):
        fail("reshape", "element types or counts differ", x, shape)


def dynamic_reshape(shape: Shape, x: Instruction, *sizes: Instruction) -> None:
    array("dynamic-reshape", x)
    if (
        shape.dtype != x.dtype
        or len(sizes) != shape.rank
        or any(s.dims or s.kind not in "su" for s in sizes)
    ):
        fail(
            "dynamic-reshape",
            "takes one integer scalar per dimension of the result",
            x,
            *sizes,
            shape,
        )


def convert(shape: Shape, x: Instruction) -> None:
    array("convert", x)
    if shape.dims != x.dims or shape.dtype not in DTYPES or shape.kind == "t":
        fail("convert", "only the element type may change", x, shape)


def stochastic_convert(shape: Shape, x: Instruction, bits: Instruction) -> None:
    convert(shape, x)
    if x.kind != "f" or bits.dims != x.dims or bits.kind != "u" or bits.bits != x.bits:
        fail(
            "stochastic-convert",
            "takes floats and random unsigned integers of their width",
            x,
            bits,
            shape,
        )


def bitcast_convert(shape: Shape, x: Instruction) -> None:
    """A narrower result gets a new innermost dimension, a wider one loses it."""
    array("bitcast-convert", x)
    old = x.bits
    new = shape.bits
    if old >= new:
        expected = x.dims if old == new else (*x.dims, old // new)
    else:
        expected = x.dims[:-1]
        if not x.rank or x.dims[-1] != new // old:
            fail("bitcast-convert", f"the innermost dimension must be {new // old}", x, shape)
    if shape.dims != expected:
        fail("bitcast-convert", f"the result must have dims {list(expected)}", x, shape)


def bitcast(shape: Shape, x: Instruction) -> None:
    if known(shape.nbytes, x.nbytes) and shape.nbytes != x.nbytes:
        fail("bitcast", "sizes in bytes differ", x, shape)


def rng(shape: Shape, a: Instruction, b: Instruction, distribution: str) -> None:
    if distribution not in ("rng_uniform", "rng_normal"):
        fail("rng", f"bad distribution {distribution!r}", a, b, shape)
    if any(o.dims or o.dtype != shape.dtype for o in (a, b)):
        fail("rng", "parameters must be scalars of the result's type", a, b, shape)


def rng_bit_generator(shape: Shape, state: Instruction, algorithm: str) -> None:
    if algorithm not in ("rng_default", "rng_three_fry", "rng_philox"):
        fail("rng-bit-generator", f"bad algorithm {algorithm!r}", state, shape)
    if len(shape.elements) != 2 or not compatible(shape.elements[0], state.shape):
        fail("rng-bit-generator", "the result must be (state, bits)", state, shape)
    if shape.elements[1].kind not in "su" or DTYPES[shape.elements[1].dtype].bits < 8:
        fail("rng-bit-generator", "bits must be integers of 8 bits or more", state, shape)


_NUMBERS = {"f": "floats", "su": "integers"}


def quantized(
    op: str,
    kinds: str,
    result_kinds: str,
    shape: Shape,
    x: Instruction,
    scale: Instruction,
    zero_point: Instruction,
    dimensions: Ints = (),
) -> None:
    """uniform-quantize: `round(x / scale) + zero_point` clamped to the integer type of the result;
    uniform-dequantize: `(x - zero_point) * scale`. Per channel along `dimensions`."""
    if x.kind not in kinds or shape.kind not in result_kinds:
        fail(op, f"turns {_NUMBERS[kinds]} into {_NUMBERS[result_kinds]}", x, shape)
    in_range(op, "dimensions", dimensions, x.rank, x)
    dims = tuple(x.dims[d] for d in dimensions)
    if (
        shape.dims != x.dims
        or scale.kind != "f"
        or scale.dims != dims
        or zero_point.kind not in "su"
        or zero_point.dims != dims
    ):
        fail(op, f"scale and zero point must have dims {list(dims)}", x, scale, zero_point)


def with_token(shape: Shape, *operands: Instruction, **attrs: Any) -> None:
    """infeed: (data, token)."""
    if len(shape.elements) != 2 or shape.elements[1] != TOKEN:
        fail("infeed", "the result must be (data, token)", shape)


def dims_match(shape: Shape, inferred: Shape, *operands: Instruction) -> None:
    """dot and convolution may accumulate into another type."""
    if shape.dims != inferred.dims:
        fail("dot", f"the result must have dims {list(inferred.dims)}", *operands, shape)
