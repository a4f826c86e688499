"""Fourier transforms: of the innermost dimensions, others are moved there. Normalisation codes are
torch's: 0 none, 1 by sqrt(n), 2 by n."""

import math
from collections.abc import Sequence

from torch_hlo.hlo.ir import Instruction, Size, build

from ..core import Expr, LoweringError, aten, axis, expected, lowers, move_dim, promote


def _along(x: Instruction, dims: Sequence[int], kind: str, lengths: Sequence[Size]) -> Instruction:
    """Transforms along `dims`, of which the last is the one that real transforms halve; IFFT and
    IRFFT divide by the lengths. The innermost dimensions are one instruction, others are moved
    there one by one."""
    rank = x.rank
    dims = [axis(d, rank) for d in dims]
    for d, n in zip(dims, lengths, strict=True):
        if not isinstance(n, int):
            raise LoweringError(
                f"fft of {x.shape} along {d}: the length must be known; mark the dimension static"
            )
    if (
        sorted(dims) == list(range(rank - len(dims), rank))
        and len(dims) <= 3
        and (kind in ("FFT", "IFFT") or dims[-1] == rank - 1)
    ):
        return build.fft(x, kind, [n for _, n in sorted(zip(dims, lengths, strict=True))])
    *others, last = zip(dims, lengths, strict=True)
    order = (
        [(kind, *last), *(("FFT", *o) for o in others)]
        if kind == "RFFT"
        else [
            *(("IFFT" if kind == "IRFFT" else kind, *o) for o in others),
            (kind, *last),
        ]
    )
    for k, d, n in order:
        x = move_dim(build.fft(move_dim(x, d, -1), k, (n,)), -1, d)
    return x


def _scaled(x: Instruction, normalization: int, count: int, divided: bool) -> Instruction:
    """`divided`: x was divided by `count` already."""
    factor = {0: 1.0, 1: 1 / math.sqrt(count), 2: 1 / count}[normalization] * (
        count if divided else 1
    )
    return x if factor == 1 else (Expr(x) * factor).x


@lowers(aten._fft_c2c)
def fft_c2c(x: Instruction, dim: Sequence[Size], normalization: int, forward: bool) -> Instruction:
    sizes = [x.dims[d] for d in dim]
    return _scaled(
        _along(x, dim, "FFT" if forward else "IFFT", sizes) if dim else x,
        normalization,
        math.prod(sizes),
        not forward,
    )


@lowers(aten._fft_r2c)
def fft_r2c(x: Instruction, dim: Sequence[int], normalization: int, onesided: bool) -> Instruction:
    sizes = [x.dims[d] for d in dim]
    if not onesided:
        x = promote.cast(x, promote.complex_type(x.dtype))
    return _scaled(
        _along(x, dim, "RFFT" if onesided else "FFT", sizes),
        normalization,
        math.prod(sizes),
        False,
    )


@lowers(aten._fft_c2r)
def fft_c2r(
    x: Instruction,
    dim: Sequence[int],
    normalization: int,
    last_dim_size: Size,
) -> Instruction:
    sizes = [*(x.dims[d] for d in dim[:-1]), last_dim_size]
    return _scaled(
        _along(x, dim, "IRFFT", sizes),
        normalization,
        math.prod(expected().dims[d] for d in dim),
        True,
    )
