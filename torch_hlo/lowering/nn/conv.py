"""Convolutions of any rank, grouped and transposed, and their gradients, as HLO convolutions (NCHW,
OIHW)."""

from collections.abc import Sequence
from typing import Any

import torch

from torch_hlo.hlo.ir import Instruction, Instructions, Size, WindowDim, build

from ..core import (
    Expr,
    LoweringError,
    Results,
    aten,
    compute,
    expected,
    finish,
    finish_all,
    guard,
    lowers,
    permute,
    promote,
    reduce,
    reshape,
    reverse,
)


def _labels(lhs: str, rhs: str, out: str, spatial: int) -> str:
    digits = "".join(str(i) for i in range(spatial))
    return f"{lhs}{digits}_{rhs}{digits}->{out}{digits}"


def _convolve(
    x: Instruction,
    kernel: Instruction,
    window: list[WindowDim],
    labels: str,
    groups: int = 1,
    batch_groups: int = 1,
) -> Expr:
    """Convolution in the compute type. Padding may be negative: pixels at the end that no window
    reaches."""
    if x.kind == "c":
        raise LoweringError(
            f"convolution of {x.dtype} is not supported; convolve real and imaginary parts"
        )
    return Expr(
        build.convolution(
            x,
            kernel,
            tuple(window),
            labels,
            groups,
            batch_groups,
            promote.compute_type(x.dtype),
        )
    )


def _forward(
    x: Instruction,
    weight: Instruction,
    stride: Sequence[int],
    padding: Sequence[Size],
    dilation: Sequence[int],
    groups: Size,
    sizes: Sequence[Size],
) -> Expr:
    """`sizes`: spatial dims of the result (fewer positions than fit when a transposed convolution
    had output padding)."""
    n = x.rank - 2
    window = []
    for i in range(n):
        k = weight.dims[2 + i]
        high = (sizes[i] - 1) * stride[i] + (k - 1) * dilation[i] + 1 - x.dims[2 + i] - padding[i]
        window.append(WindowDim(k, stride[i], padding[i], high, 1, dilation[i]))
    return _convolve(x, weight, window, _labels("bf", "oi", "bf", n), groups)


def _flipped(weight: Instruction, groups: Size) -> Instruction:
    """[in, out / groups, k…] -> [out, in / groups, k…] with the kernel mirrored."""
    weight = reverse(weight, range(2, weight.rank))
    a, b, *k = weight.dims
    split = permute(
        reshape(weight, (groups, a // groups, b, *k)),
        (0, 2, 1, *range(3, weight.rank + 1)),
    )
    return reshape(split, (groups * b, a // groups, *k))


def _transposed(
    x: Instruction,
    weight: Instruction,
    stride: Sequence[int],
    padding: Sequence[Size],
    dilation: Sequence[int],
    groups: Size,
    sizes: Sequence[Size],
) -> Expr:
    """The adjoint of _forward with respect to its input, which had spatial `sizes`."""
    n = x.rank - 2
    window = []
    for i in range(n):
        k = weight.dims[2 + i]
        low = dilation[i] * (k - 1) - padding[i]
        reach: Size = (x.dims[2 + i] - 1) * stride[i] + 1
        high = sizes[i] - reach - low + dilation[i] * (k - 1)
        window.append(WindowDim(k, 1, low, high, stride[i], dilation[i], groups == 1))
    # the kernel stays as it is: mirrored by the window, its output features read as input features
    if groups == 1:
        return _convolve(x, weight, window, _labels("bf", "io", "bf", n))
    return _convolve(x, _flipped(weight, groups), window, _labels("bf", "oi", "bf", n), groups)


def _weight_gradient(
    x: Instruction,
    grad: Instruction,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    kernel: Sequence[Size],
) -> Expr:
    """[out, in / groups, k…] of a convolution of `x` whose output gradient is `grad`: channels act
    as batch, batch as channels."""
    n = x.rank - 2
    window = []
    for i in range(n):
        reach = (grad.dims[2 + i] - 1) * stride[i] + 1
        high = (kernel[i] - 1) * dilation[i] + reach - x.dims[2 + i] - padding[i]
        window.append(
            WindowDim(
                grad.dims[2 + i],
                dilation[i],
                padding[i],
                high,
                1,
                stride[i],
            )
        )
    return _convolve(x, grad, window, _labels("fb", "io", "fb", n), 1, groups)


def _lengthen(values: Sequence[Size], n: int) -> list[Size]:
    return list(values) if len(values) == n else list(values) * n


@lowers(aten.convolution.default, aten.convolution_overrideable, aten._convolution.default)
def convolution(
    x: Instruction,
    weight: Instruction,
    bias: Instruction | None,
    stride: Sequence[Size],
    padding: Sequence[Size],
    dilation: Sequence[Size],
    transposed: bool,
    output_padding: Sequence[Size],
    groups: Size,
    *flags: Any,
) -> Instruction:
    shape = expected()
    n = x.rank - 2
    stride, padding, dilation = (_lengthen(v, n) for v in (stride, padding, dilation))
    convolve = _transposed if transposed else _forward
    out = convolve(x, weight, stride, padding, dilation, groups, shape.dims[2:])
    if bias is not None:
        column = promote.cast(bias, out.dtype)
        out += Expr(build.broadcast(column, out.dims, (1,)))
    return finish(out)


@lowers(aten.convolution_backward)
def convolution_backward(
    grad: Instruction,
    x: Instruction,
    weight: Instruction,
    bias_sizes: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> Instructions:
    n = x.rank - 2
    stride, padding, dilation = (_lengthen(v, n) for v in (stride, padding, dilation))
    dx = dw = db = None
    if mask[0]:
        convolve = _forward if transposed else _transposed
        dx = convolve(grad, weight, stride, padding, dilation, groups, x.dims[2:])
    if mask[1]:
        # A transposed convolution is the adjoint: input and gradient change places.
        a, b = (grad, x) if transposed else (x, grad)
        dw = _weight_gradient(a, b, stride, padding, dilation, groups, weight.dims[2:])
    if mask[2]:
        db = Expr(reduce(compute(grad).x, [d for d in range(grad.rank) if d != 1]))
    return finish_all(dx, dw, db)


@lowers(aten.convolution_backward_overrideable)
def convolution_backward_overrideable(
    grad: Instruction,
    x: Instruction,
    weight: Instruction,
    *rest: Any,
) -> Results:
    return convolution_backward(grad, x, weight, None, *rest)


@guard(aten.convolution.default, aten.convolution_backward)
def _is_real(x: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    return not x.is_complex()
