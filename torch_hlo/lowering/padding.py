"""Padding with a constant, by reflection or by repeating the border; backward by adding the padded parts to what they copied."""
from __future__ import annotations

import torch

from torch_hlo.hlo.dim import Size
from torch_hlo.hlo.ir import Instruction
from torch_hlo.lowering import promote
from torch_hlo.lowering.expr import Expr, absolute, is_number, maximum, minimum
from torch_hlo.lowering.registry import expected, lowers
from torch_hlo.lowering.shaping import gather_dim, iota, pad, scatter_dim

aten = torch.ops.aten


@lowers(aten.constant_pad_nd)
def constant_pad(x, padding, value=0):
    """`padding`: (low, high) pairs from the last dimension backwards."""
    pairs = [(0, 0)] * x.shape.rank
    for i in range(len(padding) // 2):
        pairs[x.shape.rank - 1 - i] = (padding[2 * i], padding[2 * i + 1])
    if is_number(value) and isinstance(value, bool) and x.shape.dtype != "pred":
        value = int(value)
    return pad(x, pairs, value)


def _padded_dims(padding) -> list[tuple[int, Size, Size]]:
    """(dimension from the end, low, high) of each padded dimension."""
    return [(-1 - i, padding[2 * i], padding[2 * i + 1]) for i in range(len(padding) // 2)]


def _reflected(size: Size, low: Size, high: Size) -> Instruction:
    """Source position of every element of the padded dimension: mirrored without repeating the border."""
    i = absolute(Expr(iota((size + low + high,), 0)) - low)
    last = i.like(size) - 1
    return (last - absolute(last - i)).x


def _repeated(size: Size, low: Size, high: Size) -> Instruction:
    i = Expr(iota((size + low + high,), 0)) - low
    return minimum(maximum(i, 0), i.like(size) - 1).x


def _pad_by(positions):
    def lowering(x, padding):
        for d, low, high in _padded_dims(padding):
            x = gather_dim(x, positions(x.shape.dims[d], low, high), d)
        return x

    return lowering


def _backward_by(positions):
    def lowering(grad, x, padding):
        shape = expected()[0]
        g = promote.cast(grad, promote.compute_type(shape.dtype))
        for d, low, high in _padded_dims(padding):
            dims = list(g.shape.dims)
            dims[d] = shape.dims[d]
            g = scatter_dim(promote.full(0, g.shape.dtype, dims), positions(shape.dims[d], low, high), g, d)
        return promote.cast(g, shape.dtype)

    return lowering


lowers(aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d)(_pad_by(_reflected))
lowers(aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d)(_pad_by(_repeated))
lowers(aten.reflection_pad1d_backward, aten.reflection_pad2d_backward, aten.reflection_pad3d_backward)(_backward_by(_reflected))
lowers(aten.replication_pad1d_backward, aten.replication_pad2d_backward, aten.replication_pad3d_backward)(_backward_by(_repeated))
