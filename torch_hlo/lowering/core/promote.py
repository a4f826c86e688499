"""Operands of aten ops -> Instructions of one dtype and shape, by PyTorch's promotion and
broadcasting rules.

`result_type` looks at categories as torch does: tensors with dimensions outrank rank-0 tensors,
which outrank Python numbers (and `Weak` ones), unless the lower one is of a higher kind (bool < int
< float < complex)."""

from collections.abc import Sequence
from functools import cache

import torch

from torch_hlo.hlo.ir import (
    DTYPES,
    Dim,
    Dims,
    Instruction,
    Shape,
    Size,
    build,
    dim_max,
    instr,
)
from torch_hlo.hlo.ir.literal import literal

from .registry import HLO_TO_TORCH, TORCH_TO_HLO, Weak

Number = bool | int | float | complex
Scalar = Weak | Dim | bool | int | float | complex  # of PyTorch's schemas
Operand = Instruction | Scalar
# whether this PyTorch makes the largest f8e4m3fn, and not nan, of larger numbers
_SATURATES = torch.tensor(1e9, device="cpu").to(torch.float8_e4m3fn).item() == 448

SMALLEST_POWER = 2.0**-127  # what PyTorch's f8e8m0fnu has in place of zero
_COMPUTE = {
    "bf16": "f32",
    "f16": "f32",
    "f8e4m3fn": "f32",
    "f8e5m2": "f32",
    "f8e4m3fnuz": "f32",
    "f8e5m2fnuz": "f32",
    "f8e8m0fnu": "f32",
}
_RANK = {"p": 0, "u": 1, "s": 1, "f": 2, "c": 3}
_REAL = {"c64": "f32", "c128": "f64"}
_COMPLEX = {"f32": "c64", "f64": "c128", "f16": "c64", "bf16": "c64"}


def kind(dtype: str) -> str:
    """p, s, u, f or c."""
    return DTYPES[dtype].kind


def is_integral(dtype: str) -> bool:
    """Signed, unsigned and bool."""
    return kind(dtype) in "psu"


def is_floating(dtype: str) -> bool:
    return kind(dtype) == "f"


def is_complex(dtype: str) -> bool:
    return kind(dtype) == "c"


def real_type(dtype: str) -> str:
    """The type of the parts of a complex type; other types stand for themselves."""
    return _REAL.get(dtype, dtype)


def complex_type(dtype: str) -> str:
    return _COMPLEX.get(dtype, dtype)


def compute_type(dtype: str) -> str:
    """The type PyTorch computes in ("opmath"): f32 for the types narrower than it."""
    return _COMPUTE.get(dtype, dtype)


@cache
def promote(a: str, b: str) -> str:
    """The smallest type both convert to."""
    return TORCH_TO_HLO[torch.promote_types(HLO_TO_TORCH[a], HLO_TO_TORCH[b])]


def number_type(x: Operand) -> str:
    """The type a Python number (or Weak, or symbolic size) would have as a tensor of its own."""
    if isinstance(x, bool):
        return "pred"
    if isinstance(x, (int, Dim)):
        return "s64"
    if isinstance(x, float):
        return TORCH_TO_HLO[torch.get_default_dtype()]
    if isinstance(x, complex):
        return _COMPLEX[TORCH_TO_HLO[torch.get_default_dtype()]]
    if isinstance(x, Weak):
        return "s64" if is_integral(x.value.dtype) else TORCH_TO_HLO[torch.get_default_dtype()]
    raise TypeError(f"{x!r} is neither a tensor nor a number")


def result_type(*operands: Operand) -> str:
    """dtype of the result of an op that promotes `operands` (torch.result_type for any number of
    operands)."""
    # tensors with dimensions, rank-0 tensors, numbers
    ranked: list[str | None] = [None, None, None]
    for x in operands:
        if isinstance(x, Instruction):
            slot = 0 if x.dims else 1
            dtype = x.dtype
        else:
            slot = 2
            dtype = number_type(x)
        ranked[slot] = dtype if ranked[slot] is None else promote(ranked[slot], dtype)
    result = ranked[0]
    for lower in ranked[1:]:
        result = _combine(result, lower)
    if result is None:
        raise TypeError("result_type needs an operand")
    return result


def _combine(higher: str | None, lower: str | None) -> str | None:
    if higher is None or lower is None:
        return higher or lower
    if _RANK[kind(higher)] >= _RANK[kind(lower)] and kind(higher) != "p":
        return higher
    if kind(higher) == "f" and kind(lower) == "c":
        return _COMPLEX[higher] if higher in _COMPLEX else lower
    return promote(higher, lower)


def constant(value: Number, dtype: str) -> Instruction:
    """Rank-0 constant; a complex number loses its imaginary part in a real type."""
    if isinstance(value, complex) and not is_complex(dtype):
        value = bool(value) if dtype == "pred" else value.real
    if dtype == "f8e8m0fnu":
        value = max(abs(value), SMALLEST_POWER)
    if isinstance(value, int) and not isinstance(value, bool) and kind(dtype) in "su":
        bits = DTYPES[dtype].bits
        value &= (1 << bits) - 1
        if kind(dtype) == "s" and value >> (bits - 1):
            value -= 1 << bits
    return instr("constant", (), Shape(dtype), literal=literal(value, dtype))


def cast(x: Instruction, dtype: str) -> Instruction:
    """`x` converted as `Tensor.to(dtype)` does: to bool by != 0, float to int by truncation,
    complex to real by dropping, to f8e4m3fn without overflow."""
    have = x.dtype
    if have == dtype:
        return x
    if is_complex(have) and not is_complex(dtype):
        if dtype == "pred":
            return instr("compare", (x, full(0, have, x.dims)), direction="NE")
        return cast(instr("real", (x,)), dtype)
    if is_complex(dtype) and not is_complex(have):
        part = cast(x, real_type(dtype))
        return instr("complex", (part, full(0, part.dtype, part.dims)))
    if is_floating(have) and kind(dtype) in "su" and DTYPES[dtype].bits < 64 and dtype != "s32":
        # Narrow integers wrap around (and -1.0 becomes 255) as in C++ compiled for the CPU.
        x = _convert(x, "s64" if DTYPES[dtype].bits == 32 else "s32")
    if dtype == "f8e8m0fnu":  # without signs and zero
        x = instr("abs", (_convert(x, "f32"),))
        x = instr("maximum", (x, full(SMALLEST_POWER, "f32", x.dims)))
    if dtype == "f8e4m3fn" and _SATURATES:
        x = _convert(x, "f32")
        low, high = (full(v, "f32", x.shape.dims) for v in (-448, 448))
        x = instr("minimum", (instr("maximum", (x, low)), high))
    return _convert(x, dtype)


def _convert(x: Instruction, dtype: str) -> Instruction:
    return x if x.dtype == dtype else instr("convert", (x,), x.shape.with_dtype(dtype))


def broadcast_to(x: Instruction, dims: Sequence[Size]) -> Instruction:
    """`x` expanded to `dims` by torch's rule (trailing alignment, size 1 repeats)."""
    dims = tuple(dims)
    have = x.dims
    if have == dims:
        return x
    offset = len(dims) - len(have)
    if offset < 0:
        raise ValueError(f"cannot expand {x.shape} to {list(dims)}: too few dimensions")
    kept = [
        i
        for i, d in enumerate(have)
        if not (isinstance(d, int) and d == 1 and dims[i + offset] != 1)
    ]
    for i in kept:
        if have[i] != dims[i + offset]:
            raise ValueError(
                f"cannot expand {x.shape} to {list(dims)}: dimension {i} is neither 1 nor equal"
            )
    if len(kept) < len(have):
        x = reshape(x, [have[i] for i in kept])
    return instr(
        "broadcast",
        (x,),
        Shape(x.dtype, dims),
        dimensions=tuple(i + offset for i in kept),
    )


def reshape(x: Instruction, dims: Sequence[Size]) -> Instruction:
    """`x` with other dims of the same number of elements; itself when they are equal. Raises
    ShapeError for another number. That of symbolic sizes PyTorch has judged: of `view(-1, 2)` they
    do not show that it is even."""
    dims = tuple(dims)
    if x.dims != dims and any(isinstance(d, Dim) for d in (*x.dims, *dims)):
        return instr("reshape", (x,), Shape(x.dtype, dims))
    return build.reshape(x, dims)


def full(value: Operand, dtype: str, dims: Sequence[Size] = ()) -> Instruction:
    """An array of one value (a number, a Weak or a symbolic size)."""
    return broadcast_to(scalar(value, dtype), dims)


def scalar(value: Operand, dtype: str) -> Instruction:
    """A number, Weak or symbolic size as a rank-0 instruction of `dtype`; a rank-0 instruction is
    cast."""
    if isinstance(value, Weak):
        return cast(value.value, dtype)
    if isinstance(value, Instruction):
        return cast(reshape(value, ()), dtype)
    if isinstance(value, Dim):
        return cast(size_value(value), dtype)
    return constant(value, dtype)


def size_value(size: Size) -> Instruction:
    """A symbolic size as an s64 value of the running program."""
    if isinstance(size, int):
        return constant(size, "s64")
    return count_elements((size,))


def count_elements(dims: Sequence[Size], dtype: str = "s64") -> Instruction:
    """Product of `dims` as a rank-0 value of `dtype`, also when some are symbolic."""
    static = 1
    symbolic = []
    for d in dims:
        if isinstance(d, int):
            static *= d
        else:
            symbolic.append(d)
    if not symbolic:
        return constant(static, dtype)
    result = constant(static, "s64")
    for d in symbolic:
        result = instr("multiply", (result, _value(d)))
    return cast(result, dtype)


def _value(d: Dim) -> Instruction:
    """A size as s64[]; or an expression of sizes, which may be negative, as no array's size is."""
    if "-" in str(d):
        return instr("subtract", tuple(_value(part) for part in (dim_max(d, 0), dim_max(-d, 0))))
    size = instr("get-dimension-size", (full(False, "pred", (d,)),), dimensions=(0,))
    return cast(size, "s64")


def operand(x: Operand, dtype: str, dims: Sequence[Size], via: str | None = None) -> Instruction:
    """Any operand as an array of `dtype` and `dims`; `via`: the type it is rounded to first."""
    if not isinstance(x, Instruction):
        x = scalar(x, via or dtype)
    elif via is not None:
        x = cast(x, via)
    return broadcast_to(cast(x, dtype), dims)


def broadcast_dims(*shapes: Sequence[Size]) -> Dims:
    """Common dims of operands; ValueError when they do not broadcast."""
    result: list[Size] = []
    for dims in shapes:
        dims = tuple(dims)
        result = [*[1] * (len(dims) - len(result)), *result]
        offset = len(result) - len(dims)
        for i, d in enumerate(dims):
            have = result[offset + i]
            if have == 1 and isinstance(have, int):
                result[offset + i] = d
            elif d != have and d != 1:
                raise ValueError(f"sizes {have} and {d} do not broadcast")
    return tuple(result)
