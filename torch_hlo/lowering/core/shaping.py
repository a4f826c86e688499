"""Moving elements: short forms of slice, transpose, pad, concatenate, gather, reduce used by all
lowerings."""

from collections.abc import Sequence

from torch_hlo.hlo.ir import Dims, Instruction, Ints, Shape, Size, instr, row_major_strides
from torch_hlo.hlo.ir.build import binary_computation, highest, lowest

from . import promote
from .promote import Number, Operand, reshape


def axis(dim: int, rank: int) -> int:
    """A torch dimension number, counted from the front (a rank-0 tensor has dimension 0)."""
    return dim % max(rank, 1)


def axes(dim: int | Sequence[int] | None, rank: int) -> Ints:
    """Dimension numbers of a reduction, sorted; None and [] mean all."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(rank))
    dims = dim if isinstance(dim, (list, tuple)) else (dim,)
    return tuple(sorted({axis(d, rank) for d in dims})) if rank else ()


def from_front(dims: Sequence[int], rank: int) -> Ints:
    """Dimension numbers counted from the front; a rank-0 array has none."""
    return tuple(axis(d, rank) for d in dims) if rank else ()


def slice_dim(x: Instruction, dim: int, start: Size, stop: Size, step: int = 1) -> Instruction:
    """x[start:stop:step] along `dim`; 0 <= start <= stop <= size."""
    dim = axis(dim, x.rank)
    if isinstance(start, int) and start == 0 and stop == x.dims[dim] and step == 1:
        return x
    ranges = tuple((start, stop, step) if i == dim else (0, d, 1) for i, d in enumerate(x.dims))
    return instr("slice", (x,), slice=ranges)


def select_dim(x: Instruction, dim: int, index: Size) -> Instruction:
    """x[index] along `dim`, which disappears; 0 <= index."""
    dim = axis(dim, x.rank)
    return drop_dim(slice_dim(x, dim, index, index + 1), dim)


def drop_dim(x: Instruction, dim: int) -> Instruction:
    """Remove a dimension of size 1."""
    dims = x.dims
    return reshape(x, dims[:dim] + dims[dim + 1 :])


def add_dim(x: Instruction, dim: int) -> Instruction:
    """Insert a dimension of size 1, which becomes `dim`."""
    dims = x.dims
    dim %= len(dims) + 1
    return reshape(x, (*dims[:dim], 1, *dims[dim:]))


def permute(x: Instruction, dims: Sequence[int]) -> Instruction:
    dims = tuple(d % max(x.rank, 1) for d in dims)
    return x if dims == tuple(range(len(dims))) else instr("transpose", (x,), dimensions=dims)


def swap(x: Instruction, a: int, b: int) -> Instruction:
    order = list(range(x.rank))
    if not order:
        return x
    order[a], order[b] = order[b], order[a]
    return permute(x, order)


def move_dim(x: Instruction, source: int, target: int) -> Instruction:
    order = list(range(x.rank))
    if not order:
        return x
    order.insert(axis(target, len(order)), order.pop(axis(source, len(order))))
    return permute(x, order)


def concatenate(xs: Sequence[Instruction], dim: int) -> Instruction:
    return xs[0] if len(xs) == 1 else instr("concatenate", xs, dimensions=(axis(dim, xs[0].rank),))


def stack(xs: Sequence[Instruction], dim: int) -> Instruction:
    dim %= xs[0].rank + 1
    return concatenate([add_dim(x, dim) for x in xs], dim)


def pad(x: Instruction, padding: Sequence[Dims], value: Operand = 0) -> Instruction:
    """`padding`: (low, high[, interior]) per dimension; a negative one cuts."""
    full = tuple((*p, 0) if len(p) == 2 else tuple(p) for p in padding)
    if all(p == (0, 0, 0) for p in full):
        return x
    return instr("pad", (x, promote.scalar(value, x.dtype)), padding=full)


def pad_dim(
    x: Instruction,
    dim: int,
    low: Size,
    high: Size,
    interior: int = 0,
    value: Operand = 0,
) -> Instruction:
    return pad(x, [(low, high, interior) if i == dim else (0, 0, 0) for i in range(x.rank)], value)


def reverse(x: Instruction, dims: Sequence[int]) -> Instruction:
    dims = tuple(dims)
    return instr("reverse", (x,), dimensions=dims) if dims else x


def iota(dims: Sequence[Size], dim: int, dtype: str = "s64") -> Instruction:
    return instr("iota", (), Shape(dtype, tuple(dims)), iota_dimension=axis(dim, len(dims)))


def on_diagonal(dims: Sequence[Size], offset: int = 0, direction: str = "EQ") -> Instruction:
    """pred[dims]: column - row <direction> offset, over the last two dimensions."""
    matrix = dims[-2:]
    shifted = instr("add", (iota(matrix, 0), promote.full(offset, "s64", matrix)))
    mask = instr("compare", (iota(matrix, 1), shifted), direction=direction)
    return promote.broadcast_to(mask, dims)


def start_value(op: str, dtype: str) -> Number:
    """The neutral element of a combiner."""
    if op in ("maximum", "minimum"):
        return lowest(dtype) if op == "maximum" else highest(dtype)
    return {"add": 0, "multiply": 1, "and": True, "or": False}[op]


def reduce(
    x: Instruction,
    dims: Sequence[int],
    op: str = "add",
    init: Number | None = None,
) -> Instruction:
    """Fold `dims` with an opcode; `init` defaults to its neutral element."""
    dims = from_front(dims, x.rank)
    if not dims:
        return x
    dtype = x.dtype
    if op == "add" and promote.is_complex(dtype):
        return instr("complex", tuple(reduce(instr(part, (x,)), dims) for part in ("real", "imag")))
    start = promote.constant(start_value(op, dtype) if init is None else init, dtype)
    return instr("reduce", (x, start), dimensions=dims, to_apply=binary_computation(op, dtype))


def _is_zero(size: Size) -> bool:
    return isinstance(size, int) and size == 0


def gather_dim(x: Instruction, indices: Instruction, dim: int) -> Instruction:
    """x indexed along `dim` by an integer array of any rank, whose dims take its place. Indices are
    in range."""
    dim = axis(dim, x.rank)
    rank, n = x.rank, indices.rank
    if _is_zero(x.dims[dim]):  # nothing to pick from: no index either
        return promote.full(0, x.dtype, (*x.dims[:dim], *indices.dims, *x.dims[dim + 1 :]))
    offset = tuple(range(dim)) + tuple(range(dim + n, rank - 1 + n))
    return instr(
        "gather",
        (x, indices),
        offset_dims=offset,
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
        index_vector_dim=n,
        slice_sizes=tuple(1 if i == dim else d for i, d in enumerate(x.dims)),
    )


def scatter_dim(
    x: Instruction,
    indices: Instruction,
    updates: Instruction,
    dim: int,
    op: str | None = "add",
    unique: bool = False,
) -> Instruction:
    """Inverse of gather_dim: fold `updates` into `x` at `indices` along `dim`; `op` None
    overwrites."""
    dim = axis(dim, x.rank)
    n = indices.rank
    if _is_zero(x.dims[dim]):
        return x
    window = tuple(range(dim)) + tuple(range(dim + n, updates.rank))
    return instr(
        "scatter",
        (x, indices, updates),
        update_window_dims=window,
        inserted_window_dims=(dim,),
        scatter_dims_to_operand_dims=(dim,),
        index_vector_dim=n,
        unique_indices=unique or None,
        to_apply=binary_computation(op or "second", x.dtype),
    )


def wrap_negative(indices: Instruction, size: Size) -> Instruction:
    """Python's negative indices made positive."""
    if indices.kind == "u":
        return indices
    zero = promote.full(0, indices.dtype, indices.dims)
    below = instr("compare", (indices, zero), direction="LT")
    return instr(
        "select",
        (
            below,
            instr("add", (indices, promote.full(size, indices.dtype, indices.dims))),
            indices,
        ),
    )


def update_slice(x: Instruction, update: Instruction, starts: Sequence[Size]) -> Instruction:
    """`x` with `update` written at constant `starts`."""
    index = tuple(promote.cast(promote.size_value(s), "s64") for s in starts)
    return instr("dynamic-update-slice", (x, update, *index))


def _batching(x: Instruction, indices: Instruction, dim: int) -> Ints | None:
    """The dimensions besides `dim`, when `indices` goes through all of `x` along them."""
    others = tuple(d for d in range(x.rank) if d != dim)
    return (
        others
        if others
        and all(indices.dims[d] == x.dims[d] for d in others)
        and not any(map(_is_zero, x.dims))
        else None
    )


def take_along(x: Instruction, indices: Instruction, dim: int) -> Instruction:
    """x[..., indices[...], ...]: element-wise choice along `dim` (aten.gather); the other sizes of
    `indices` may be smaller."""
    dim = axis(dim, x.rank)
    others = _batching(x, indices, dim)
    if others is None:
        return gather_dim(reshape(x, (x.size,)), linear_index(x.dims, indices, dim), 0)
    return instr(
        "gather",
        (x, indices),
        offset_dims=(),
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
        operand_batching_dims=others,
        start_indices_batching_dims=others,
        index_vector_dim=x.rank,
        slice_sizes=(1,) * x.rank,
    )


def put_along(
    x: Instruction,
    indices: Instruction,
    updates: Instruction,
    dim: int,
    op: str | None = "add",
) -> Instruction:
    """Inverse of take_along: fold `updates` into `x`; `op` None overwrites."""
    dim = axis(dim, x.rank)
    others = _batching(x, indices, dim)
    if others is None:
        flat = scatter_dim(
            reshape(x, (x.size,)),
            linear_index(x.dims, indices, dim),
            updates,
            0,
            op,
        )
        return reshape(flat, x.dims)
    return instr(
        "scatter",
        (x, indices, updates),
        update_window_dims=(),
        inserted_window_dims=(dim,),
        scatter_dims_to_operand_dims=(dim,),
        input_batching_dims=others,
        scatter_indices_batching_dims=others,
        index_vector_dim=x.rank,
        to_apply=binary_computation(op or "second", x.dtype),
    )


def linear_index(dims: Sequence[Size], indices: Instruction, dim: int) -> Instruction:
    """Row-major position in an array of `dims` of the elements chosen by `indices` along `dim`."""
    index = None
    for d, stride in enumerate(row_major_strides(tuple(dims))):
        step = promote.cast(indices, "s64") if d == dim else iota(indices.dims, d)
        if not (isinstance(stride, int) and stride == 1):
            step = instr("multiply", (step, promote.full(stride, "s64", indices.dims)))
        index = step if index is None else instr("add", (index, step))
    return index if index is not None else promote.cast(indices, "s64")


def get(x: Instruction, index: int) -> Instruction:
    return instr("get-tuple-element", (x,), index=index)
