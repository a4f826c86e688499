"""`prims`: the primitive operators that some of PyTorch's decompositions and Dynamo itself end in.
Operands need no promotion."""

from collections.abc import Sequence
from typing import Any

import torch

from torch_hlo.hlo.ir import Instruction, Size, instr

from ..core import LOWERINGS, Expr, expected, finish, iota, lowers, promote
from . import binary, pointwise, special

SHARED = (binary, pointwise, special)  # prims share their lowerings

aten = torch.ops.aten
prims = torch.ops.prims

_SAME = """
    abs acos acosh asin asinh atan atanh cos cosh bitwise_not ceil digamma erf erfc exp expm1
    exp2 floor isfinite lgamma log log1p log2 log10 neg reciprocal round sign signbit sin sinh
    sqrt rsqrt tan tanh trunc add atan2 bitwise_and bitwise_or bitwise_xor eq fmax fmin fmod gcd
    ge gt hypot igamma igammac le lt maximum minimum mul ne nextafter remainder sub where
""".split()


def _share() -> None:
    """A prim of the same name as an aten op whose overload on tensors has a lowering means the
    same."""
    for name in _SAME:
        prim = getattr(prims, name, None)
        packet = getattr(aten, name, None)
        for overload in ("default", "Tensor", "self"):
            fn = LOWERINGS.get(getattr(packet, overload, None)) if packet is not None else None
            if prim is not None and fn is not None:
                LOWERINGS.setdefault(prim.default, fn)
                break


_share()


@lowers(prims.convert_element_type.default)
def convert_element_type(x: Instruction, dtype: torch.dtype) -> Instruction:
    return promote.cast(
        promote.scalar(x, expected().dtype) if not hasattr(x, "shape") else x,
        expected().dtype,
    )


@lowers(prims.div.default)
def div(a: Instruction, b: Instruction) -> Instruction:
    """Of integers: rounded towards zero."""
    shape = expected()
    a, b = (Expr(promote.operand(v, shape.dtype, shape.dims)) for v in (a, b))
    return (a / b).x


@lowers(prims.iota.default)
def prims_iota(
    length: Size,
    *,
    start: Size,
    step: Size,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> Instruction:
    shape = expected()
    return finish(iota(shape.dims, 0) * step + start)


@lowers(prims.broadcast_in_dim.default)
def broadcast_in_dim(
    x: Instruction,
    shape: Sequence[Size],
    dimensions: Sequence[int],
) -> Instruction:
    dims = expected().dims
    kept = [d for d in range(x.rank) if not (x.dims[d] == 1 and dims[dimensions[d]] != 1)]
    x = promote.reshape(x, [x.dims[d] for d in kept])
    return instr("broadcast", (x,), expected(), dimensions=tuple(dimensions[d] for d in kept))


@lowers(prims.device_put.default, prims.view_of.default, prims.clone.default)
def same(x: Instruction, *args: Any, **kwargs: Any) -> Instruction:
    return x
