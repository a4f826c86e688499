"""`prims`: the primitive operators that some of PyTorch's decompositions and Dynamo itself end in. Operands need no promotion."""

from __future__ import annotations

import torch

from torch_hlo.hlo.ir import instr
from torch_hlo.lowering import binary, pointwise, promote, special  # noqa: F401 - prims share their lowerings
from torch_hlo.lowering.expr import Expr, iota
from torch_hlo.lowering.registry import LOWERINGS, expected, lowers

aten, prims = torch.ops.aten, torch.ops.prims

_SAME = """abs acos acosh asin asinh atan atanh cos cosh bitwise_not ceil digamma erf erfc exp expm1 exp2 floor isfinite lgamma log log1p log2
    log10 neg reciprocal round sign signbit sin sinh sqrt rsqrt tan tanh trunc add atan2 bitwise_and bitwise_or bitwise_xor eq fmax fmin fmod
    gcd ge gt hypot igamma igammac le lt maximum minimum mul ne nextafter remainder sub where""".split()


def _share() -> None:
    """A prim of the same name as an aten op whose overload on tensors has a lowering means the same."""
    for name in _SAME:
        prim, packet = getattr(prims, name, None), getattr(aten, name, None)
        for overload in ("default", "Tensor", "self"):
            fn = LOWERINGS.get(getattr(packet, overload, None)) if packet is not None else None
            if prim is not None and fn is not None:
                LOWERINGS.setdefault(prim.default, fn)
                break


_share()


@lowers(prims.convert_element_type.default)
def convert_element_type(x, dtype):
    return promote.cast(
        promote.scalar(x, expected()[0].dtype) if not hasattr(x, "shape") else x,
        expected()[0].dtype,
    )


@lowers(prims.div.default)
def div(a, b):
    """Of integers: rounded towards zero."""
    shape = expected()[0]
    a, b = (Expr(promote.operand(v, shape.dtype, shape.dims)) for v in (a, b))
    return (a / b).x


@lowers(prims.iota.default)
def prims_iota(length, *, start, step, dtype, device, requires_grad):
    shape = expected()[0]
    return promote.cast((iota(shape.dims, 0) * step + start).x, shape.dtype)


@lowers(prims.broadcast_in_dim.default)
def broadcast_in_dim(x, shape, dimensions):
    dims = expected()[0].dims
    kept = [
        d for d in range(x.shape.rank) if not (x.shape.dims[d] == 1 and dims[dimensions[d]] != 1)
    ]
    x = promote.reshape(x, [x.shape.dims[d] for d in kept])
    return instr("broadcast", (x,), expected()[0], dimensions=tuple(dimensions[d] for d in kept))


@lowers(prims.device_put.default, prims.view_of.default, prims.clone.default)
def same(x, *args, **kwargs):
    return x
