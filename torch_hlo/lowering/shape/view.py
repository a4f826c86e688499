"""Views as pure functions, and the *_scatter ops that write through one."""

from collections.abc import Sequence
from typing import Any

import torch

from torch_hlo.hlo.ir import Dim, Instruction, Shape, Size, build, instr, row_major_strides

from ..core import (
    Expr,
    LoweringError,
    add_dim,
    aten,
    axis,
    broadcast_to,
    concatenate,
    expected,
    expected_shapes,
    gather_dim,
    iota,
    lowers,
    move_dim,
    on_diagonal,
    pad_dim,
    permute,
    promote,
    reduce,
    reshape,
    reverse,
    scatter_dim,
    select_dim,
    slice_dim,
    stack,
    swap,
    update_slice,
)
from ..core.shaping import from_front
from ..pointwise.pointwise import conjugate


@lowers(
    aten.alias,
    aten.detach,
    aten.clone,
    aten.lift_fresh,
    aten.lift_fresh_copy,
    aten.lift,
    aten.alias_copy,
    aten.detach_copy,
    aten.contiguous,
    aten._fw_primal,
)
def identity(x: Instruction, *args: Any, **kwargs: Any) -> Instruction:
    return x


@lowers(
    aten.view.default,
    aten._unsafe_view,
    aten.reshape,
    aten._reshape_alias,
    aten._reshape_alias_copy,
    aten.view_copy.default,
    aten._reshape_copy,
    aten.squeeze,
    aten.squeeze_copy,
    aten.unsqueeze,
    aten.unsqueeze_copy,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as,
    aten.reshape_as,
    aten.ravel,
)
def view(x: Instruction, *args: Any, **kwargs: Any) -> Instruction:
    return reshape(x, expected().dims)


@lowers(aten.expand, aten.expand_copy, aten.expand_as, aten.broadcast_to)
def expand(x: Instruction, *args: Any, **kwargs: Any) -> Instruction:
    return broadcast_to(x, expected().dims)


lowers(aten.permute, aten.permute_copy)(permute)
lowers(aten.transpose.int, aten.transpose_copy.int, aten.swapaxes, aten.swapdims)(swap)


@lowers(aten.t, aten.t_copy, aten.mT)
def t(x: Instruction) -> Instruction:
    return swap(x, -1, -2) if x.rank > 1 else x


@lowers(aten.numpy_T)
def numpy_t(x: Instruction) -> Instruction:
    return permute(x, range(x.rank - 1, -1, -1))


@lowers(aten.adjoint, aten.matrix_H, aten.mH)
def adjoint(x: Instruction) -> Instruction:
    return conjugate(Expr(t(x))).x


@lowers(aten.select.int, aten.select_copy.int)
def select(x: Instruction, dim: int, index: Size) -> Instruction:
    return select_dim(x, dim, _from_end(index, x.dims[dim]))


@lowers(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_(
    x: Instruction,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: Size = 1,
) -> Instruction:
    return slice_dim(x, dim, *_range(x.dims[dim], start, expected().dims[dim], step), step)


def _from_end(index: Size, size: Size) -> Size:
    return index + size if isinstance(index, int) and index < 0 else index


def _range(size: Size, start: Size | None, count: Size, step: Size) -> tuple[Size, Size]:
    """(start, stop) of a Python slice that takes `count` elements."""
    start = _from_end(0 if start is None else start, size)
    if isinstance(start, int):
        start = max(start, 0)
        if isinstance(size, int):
            start = min(start, size)
    if isinstance(count, int) and count == 0:
        return start, start
    return start, start + (count - 1) * step + 1


@lowers(
    aten.split,
    aten.split_with_sizes,
    aten.unsafe_split,
    aten.unsafe_split_with_sizes,
    aten.chunk,
    aten.unsafe_chunk,
    aten.split_copy,
    aten.split_with_sizes_copy,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
)
def split(x: Instruction, sizes: Size | Sequence[Size], dim: int = 0) -> list[Instruction]:
    pieces = []
    start = 0
    for shape in expected_shapes():
        stop = start + shape.dims[dim]
        pieces.append(slice_dim(x, dim, start, stop))
        start = stop
    return pieces


@lowers(aten.unbind.int, aten.unbind_copy)
def unbind(x: Instruction, dim: int = 0) -> list[Instruction]:
    return [select_dim(x, dim, i) for i in range(len(expected_shapes()))]


# Diagonals: in the matrix flattened to a row, a diagonal is a slice with stride columns + 1.
@lowers(aten.diagonal, aten.diagonal_copy)
def diagonal(x: Instruction, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Instruction:
    x = _matrix_last(x, dim1, dim2)
    *batch, rows, columns = x.dims
    length = expected().dims[-1]
    if isinstance(length, int) and length == 0:
        return promote.full(0, x.dtype, expected().dims)
    start = offset if offset >= 0 else -offset * columns
    flat = reshape(x, (*batch, rows * columns))
    return slice_dim(flat, -1, start, start + (length - 1) * (columns + 1) + 1, columns + 1)


def _matrix_last(x: Instruction, dim1: int, dim2: int) -> Instruction:
    return permute(x, _order(x.rank, dim1, dim2))


def _matrix_back(x: Instruction, dim1: int, dim2: int) -> Instruction:
    order = _order(x.rank, dim1, dim2)
    return permute(x, [order.index(d) for d in range(x.rank)])


def _order(rank: int, *last: int) -> list[int]:
    """All dimensions, these ones at the end."""
    last = from_front(last, rank)
    return [*(d for d in range(rank) if d not in last), *last]


@lowers(aten.diagonal_scatter)
def diagonal_scatter(
    x: Instruction,
    src: Instruction,
    offset: int = 0,
    dim1: int = 0,
    dim2: int = 1,
) -> Instruction:
    matrix = _matrix_last(x, dim1, dim2)
    return _matrix_back(_write_diagonal(matrix, promote.cast(src, x.dtype), offset), dim1, dim2)


def _write_diagonal(matrix: Instruction, src: Instruction, offset: int) -> Instruction:
    """`matrix` with the elements of `src` (last dimension along the diagonal) on its diagonal."""
    *batch, rows, columns = matrix.dims
    # Column vector or row vector repeated over the matrix: element (r, c) takes src[min(r, c) of
    # the diagonal].
    size, dim = (rows, -1) if offset >= 0 else (columns, -2)
    vector = pad_dim(src, src.rank - 1, 0, size - src.dims[-1])
    spread = broadcast_to(add_dim(vector, dim), matrix.dims)
    return instr("select", (on_diagonal(matrix.dims, offset), spread, matrix))


# Writing through a view.
@lowers(aten.select_scatter)
def select_scatter(x: Instruction, src: Instruction, dim: int, index: Size) -> Instruction:
    dim = axis(dim, x.rank)
    index = _from_end(index, x.dims[dim])
    src = add_dim(promote.cast(src, x.dtype), dim)
    return update_slice(x, src, [index if d == dim else 0 for d in range(x.rank)])


@lowers(aten.slice_scatter)
def slice_scatter(
    x: Instruction,
    src: Instruction,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: Size = 1,
) -> Instruction:
    dim = axis(dim, x.rank)
    size = x.dims[dim]
    count = src.dims[dim]
    src = promote.cast(src, x.dtype)
    start, stop = _range(size, start, count, step)
    if src.dims == x.dims:
        return src
    if isinstance(count, int) and count == 0:
        return x
    if step == 1:
        return update_slice(x, src, [start if d == dim else 0 for d in range(x.rank)])
    spread = pad_dim(src, dim, start, size - stop, step - 1)
    mask = pad_dim(
        promote.full(True, "pred", src.dims),
        dim,
        start,
        size - stop,
        step - 1,
        False,
    )
    return instr("select", (mask, spread, x))


@lowers(aten.select_backward)
def select_backward(grad: Instruction, sizes: Sequence[Size], dim: int, index: Size) -> Instruction:
    dims = expected().dims
    dim = axis(dim, len(dims))
    index = _from_end(index, dims[dim])
    return pad_dim(add_dim(grad, dim), dim, index, dims[dim] - index - 1)


@lowers(aten.slice_backward)
def slice_backward(
    grad: Instruction,
    sizes: Sequence[Size],
    dim: int,
    start: Size,
    end: Size,
    step: Size,
) -> Instruction:
    dims = expected().dims
    dim = axis(dim, len(dims))
    count = grad.dims[dim]
    start, stop = _range(dims[dim], start, count, step)
    if isinstance(count, int) and count == 0:
        return promote.full(0, grad.dtype, dims)
    return pad_dim(grad, dim, start, dims[dim] - stop, step - 1)


# Sliding windows and arbitrary strides.
@lowers(aten.unfold, aten.unfold_copy)
def unfold(x: Instruction, dim: int, size: int, step: int) -> Instruction:
    if not x.rank:
        return reshape(x, expected().dims)
    dim = axis(dim, x.rank)
    windows = expected().dims[dim]
    return move_dim(gather_dim(x, _window_indices(windows, size, step), dim), dim + 1, -1)


def _window_indices(windows: Size, size: Size, step: int) -> Instruction:
    dims = (windows, size)
    return (iota(dims, 0) * step + iota(dims, 1)).x


@lowers(aten.as_strided, aten.as_strided_copy)
def as_strided(
    x: Instruction,
    size: Sequence[Size],
    stride: Sequence[Size],
    storage_offset: Size | None = None,
) -> Instruction:
    """`x` is the whole storage in row-major order; other strides become a gather."""
    dims = expected().dims
    offset = storage_offset or 0
    if any(isinstance(d, int) and d == 0 for d in dims):
        return promote.full(0, x.dtype, dims)
    flat = reshape(x, (x.size,))
    if _is_row_major(dims, stride):
        count = Shape("pred", dims).size
        return reshape(slice_dim(flat, 0, offset, offset + count), dims)
    return gather_dim(flat, _strided_indices(dims, stride, offset), 0)


def _is_row_major(dims: Sequence[Size], stride: Sequence[Size]) -> bool:
    return all(
        a == b or (isinstance(d, int) and d == 1)
        for a, b, d in zip(stride, row_major_strides(dims), dims, strict=True)
    )


def _strided_indices(dims: Sequence[Size], stride: Sequence[Size], offset: Size) -> Instruction:
    index = Expr(promote.full(offset, "s64", dims))
    for i, s in enumerate(stride):
        index += iota(dims, i) * s
    return index.x


@lowers(aten.as_strided_scatter)
def as_strided_scatter(
    x: Instruction,
    src: Instruction,
    size: Sequence[Size],
    stride: Sequence[Size],
    storage_offset: Size | None = None,
) -> Instruction:
    offset = storage_offset or 0
    src = promote.cast(src, x.dtype)
    flat = reshape(x, (x.size,))
    if _is_row_major(src.dims, stride):
        written = update_slice(flat, reshape(src, (src.size,)), [offset])
    else:
        written = scatter_dim(flat, _strided_indices(src.dims, stride, offset), src, 0, None)
    return reshape(written, x.dims)


# The same bits as another type.
@lowers(aten.view_as_real, aten.view_as_real_copy)
def view_as_real(x: Instruction) -> Instruction:
    return stack([instr("real", (x,)), instr("imag", (x,))], -1)


@lowers(aten.view_as_complex, aten.view_as_complex_copy)
def view_as_complex(x: Instruction) -> Instruction:
    return instr("complex", (select_dim(x, -1, 0), select_dim(x, -1, 1)))


@lowers(aten.real)
def real(x: Instruction) -> Instruction:
    return instr("real", (x,)) if x.kind == "c" else x


@lowers(aten.imag)
def imag(x: Instruction) -> Instruction:
    return instr("imag", (x,))


@lowers(aten.view.dtype, aten.view_copy.dtype)
def view_dtype(x: Instruction, dtype: torch.dtype) -> Instruction:
    shape = expected()
    if x.dtype == shape.dtype:
        return x
    if x.kind == "c":
        x = reshape(view_as_real(x), _doubled(x.dims))
        return x if x.dtype == shape.dtype else _bits(x, shape)
    if shape.kind == "c":
        part = promote.real_type(shape.dtype)
        x = x if x.dtype == part else _bits(x, Shape(part, _doubled(shape.dims)))
        return view_as_complex(reshape(x, (*shape.dims, 2)))
    return _bits(x, shape)


def _doubled(dims: tuple[Size, ...]) -> tuple[Size, ...]:
    """Of complex numbers as pairs."""
    return (*dims[:-1], 2 * (dims or (1,))[-1])


def _bits(x: Instruction, shape: Shape) -> Instruction:
    old = x.bits
    new = shape.bits
    if old < new:
        x = reshape(x, (*shape.dims, new // old))
        return instr("bitcast-convert", (x,), shape)
    inner = shape.dims if old == new else (*x.dims, old // new)
    return reshape(instr("bitcast-convert", (x,), Shape(shape.dtype, inner)), shape.dims)


# Joining and repeating.
@lowers(aten.cat, aten.concat, aten.concatenate)
def cat(tensors: Sequence[Instruction], dim: int = 0) -> Instruction:
    shape = expected()
    # torch lets legacy empty tensors of shape [0] take part.
    tensors = [t for t in tensors if not (t.rank == 1 and t.dims[0] == 0 and shape.rank != 1)]
    if not tensors:
        return promote.full(0, shape.dtype, shape.dims)
    return concatenate([promote.cast(t, shape.dtype) for t in tensors], dim)


@lowers(aten.stack)
def stack_(tensors: Sequence[Instruction], dim: int = 0) -> Instruction:
    return stack([promote.cast(t, expected().dtype) for t in tensors], dim)


@lowers(aten.repeat, aten.tile)
def repeat(x: Instruction, repeats: Sequence[Size]) -> Instruction:
    dims = (1,) * (len(repeats) - x.rank) + x.dims
    mixed = [d for pair in zip((1,) * len(dims), dims, strict=True) for d in pair]
    target = [
        d
        for pair in zip((1,) * (len(dims) - len(repeats)) + tuple(repeats), dims, strict=True)
        for d in pair
    ]
    return reshape(broadcast_to(reshape(x, mixed), target), expected().dims)


@lowers(aten.flip)
def flip(x: Instruction, dims: Sequence[int]) -> Instruction:
    return reverse(x, from_front(dims, x.rank))


@lowers(aten.roll)
def roll(
    x: Instruction,
    shifts: Sequence[Size] | Size,
    dims: Sequence[int] | int = (),
) -> Instruction:
    shifts = shifts if isinstance(shifts, (list, tuple)) else [shifts]
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    if not dims:
        return reshape(_roll(reshape(x, (x.size,)), shifts[0], 0), x.dims)
    for shift, dim in zip(shifts, dims, strict=True):
        x = _roll(x, shift, dim)
    return x


def _roll(x: Instruction, shift: Size, dim: int) -> Instruction:
    size = x.dims[dim]
    if isinstance(shift, int):
        if isinstance(size, int):
            shift = shift % size if size else 0
        elif shift < 0:
            # assumes |shift| <= size, as no symbolic remainder may be negative
            shift += size
    if isinstance(shift, Dim):
        if any(c < 0 for _, c in shift.terms):
            raise LoweringError(f"roll by {shift}, which may be negative")
        size = promote.size_value(size)
        zero = promote.constant(0, "s64")
        start = instr("subtract", (size, instr("remainder", (promote.size_value(shift), size))))
        return build.dynamic_slice(
            concatenate([x, x], dim),
            [start if d == dim % x.rank else zero for d in range(x.rank)],
            x.dims,
        )
    if shift == 0:
        return x
    cut = size - shift
    return concatenate([slice_dim(x, dim, cut, size), slice_dim(x, dim, 0, cut)], dim)


def sum_to(x: Instruction, dims: Sequence[Size]) -> Instruction:
    """Sum over the dimensions that broadcasting `dims` to `x` repeated."""
    lead = x.rank - len(dims)
    repeated = [i for i, d in enumerate(x.dims) if i < lead or (dims[i - lead] != d)]
    return reshape(reduce(x, repeated), dims)
