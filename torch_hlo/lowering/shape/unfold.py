"""Patches of images as columns (torch.nn.functional.unfold), and columns added up to images (fold,
the gradient of it)."""

import itertools
from collections.abc import Sequence

import numpy as np

from torch_hlo.hlo.ir import Instruction, Size, build

from ..core import (
    aten,
    compute,
    expected,
    lowers,
    move_dim,
    pad,
    promote,
    reshape,
    select_dim,
    slice_dim,
)


def _places(size: Size, kernel: int, dilation: int, padding: int, stride: int) -> Size:
    """How many patches there are along a dimension."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


@lowers(aten.im2col)
def im2col(
    x: Instruction,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Instruction:
    """[n, c, h, w] -> [n, c * kernel, patches]. Every position in the kernel is a window of the
    padded image: one gather of large slices."""
    *batch, c, h, w = x.dims
    n = batch[0] if batch else 1
    spans = [
        (_places(size, *geometry) - 1) * geometry[-1] + 1
        for size, *geometry in zip((h, w), kernel_size, dilation, padding, stride, strict=True)
    ]
    image = pad(reshape(x, (n, c, h, w)), [(0, 0), (0, 0), *((p, p) for p in padding)])
    starts = np.array(
        [
            (i * dilation[0], j * dilation[1])
            for i, j in itertools.product(*map(range, kernel_size))
        ],
        np.int32,
    )
    windows = build.gather(
        image,
        build.constant(starts, "s32"),
        offset_dims=(0, 1, 3, 4),
        start_index_map=(2, 3),
        index_vector_dim=1,
        slice_sizes=(n, c, *spans),
        indices_are_sorted=True,
    )
    for d, span, step in zip((3, 4), spans, stride, strict=True):
        windows = slice_dim(windows, d, 0, span, step)
    return reshape(windows, expected().dims)


@lowers(aten.col2im)
def col2im(
    x: Instruction,
    output_size: Sequence[Size],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Instruction:
    """[n, c * kernel, patches] -> [n, c, h, w]: along one dimension after the other, the sum of
    what each position in the kernel contributes."""
    result = expected()
    *batch, columns, _ = x.dims
    n = batch[0] if batch else 1
    c = columns // (kernel_size[0] * kernel_size[1])
    places = [
        _places(*geometry)
        for geometry in zip(output_size, kernel_size, dilation, padding, stride, strict=True)
    ]
    value = compute(reshape(x, (n, c, *kernel_size, *places))).x
    # [n, c, kh, kw, h', w'] -> [n, c, kw, h, w'] -> [n, c, h, w]
    for axis, at in ((0, 4), (1, 4)):
        value = _added(
            value,
            at,
            output_size[axis],
            kernel_size[axis],
            dilation[axis],
            padding[axis],
            stride[axis],
        )
    return promote.cast(reshape(value, result.dims), result.dtype)


def _added(
    x: Instruction,
    at: int,
    size: Size,
    kernel: int,
    dilation: int,
    padding: int,
    stride: int,
) -> Instruction:
    """Dimension 2, the position in the kernel, and dimension `at`, the patch, become one, the
    pixel."""
    if stride == kernel and dilation == 1:  # patches are neighbours: nothing is added
        x = move_dim(x, 2, at)
        dims = x.dims
        whole = dims[at - 1] * kernel
        x = reshape(x, (*dims[: at - 1], whole, *dims[at + 1 :]))
        edges = [(0, 0)] * x.rank
        edges[at - 1] = (-padding, size + padding - whole)
        return pad(x, edges)
    total = None
    for k in range(kernel):
        part = select_dim(x, 2, k)
        low = k * dilation - padding
        taken = (part.dims[at - 1] - 1) * stride + 1
        spread = [(0, 0)] * part.rank
        spread[at - 1] = (low, size - low - taken, stride - 1)
        part = pad(part, spread)
        total = part if total is None else build.add(total, part)
    return total
