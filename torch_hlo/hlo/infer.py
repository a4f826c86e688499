"""Shape rules of the opcode table: `rule(*operands, **attrs) -> Shape`, or ShapeError naming opcode and operand shapes.

    ShapeError: dot: contracting sizes 3 != 4 (f32[2,3] · f32[4,5])

Rules take the operand instructions. Sizes may be symbolic: two sizes are equal when they are the same polynomial, and bounds
are only checked between ints. Opcodes whose operands do not determine the result have a check
`check(shape, *operands, **attrs)` in its place (explicit.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch_hlo.hlo.dim import Dim, Size, ceildiv
from torch_hlo.hlo.ir import Computation, Instruction
from torch_hlo.hlo.shape import DTYPES, Literal, Shape, tuple_shape
from torch_hlo.hlo.window import Window

TOKEN = Shape("token")
U32 = Shape("u32")
REAL_OF = {"c64": "f32", "c128": "f64"}
COMPLEX_OF = {"f32": "c64", "f64": "c128"}


class ShapeError(ValueError):
    """Operands or attributes that an opcode does not accept."""


def fail(op: str, text: str, *operands: Instruction | Shape):
    shapes = " · ".join(str(o.shape if isinstance(o, Instruction) else o) for o in operands)
    raise ShapeError(f"{op}: {text} ({shapes})" if operands else f"{op}: {text}")


def array(op: str, *operands: Instruction) -> None:
    """Every operand is an array (no tuple, no token)."""
    for o in operands:
        if o.shape.dtype not in DTYPES or o.shape.dtype == "token":
            fail(op, "takes arrays", *operands)


def plain(shape: Shape) -> Shape:
    return shape if shape.layout is None else Shape(shape.dtype, shape.dims)


def compatible(a: Shape, b: Shape) -> bool:
    """Equal but for layouts."""
    return (
        a is b
        or a.dtype == b.dtype
        and a.dims == b.dims
        and len(a.elements) == len(b.elements)
        and all(map(compatible, a.elements, b.elements))
    )


def in_range(
    op: str,
    what: str,
    values: Iterable[int],
    rank: int,
    *operands: Instruction,
    distinct: bool = True,
) -> None:
    """`values` are dimension numbers below `rank`."""
    values = tuple(values)
    if any(not 0 <= v < rank for v in values):
        fail(op, f"{what} {list(values)} out of range for rank {rank}", *operands)
    if distinct and len(set(values)) != len(values):
        fail(op, f"{what} {list(values)} repeats a dimension", *operands)


def known(*sizes: Size) -> bool:
    return not any(isinstance(s, Dim) for s in sizes)


def result(shapes: Sequence[Shape]) -> Shape:
    """One array, or the tuple of several."""
    return shapes[0] if len(shapes) == 1 else tuple_shape(*shapes)


# Pointwise


def unary(op: str, kinds: str, x: Instruction) -> Shape:
    array(op, x)
    if x.shape.kind not in kinds:
        fail(op, f"is not defined on {x.shape.dtype}", x)
    return plain(x.shape)


def unary_to(op: str, kinds: str, dtype: Callable[[str], str], x: Instruction) -> Shape:
    """A unary opcode whose result has another element type."""
    return Shape(dtype(unary(op, kinds, x).dtype), x.shape.dims)


def binary(op: str, kinds: str, x: Instruction, y: Instruction) -> Shape:
    array(op, x, y)
    if x.shape.dims != y.shape.dims:
        fail(op, "shapes differ", x, y)
    if x.shape.dtype != y.shape.dtype:
        fail(op, "element types differ", x, y)
    if x.shape.kind not in kinds:
        fail(op, f"is not defined on {x.shape.dtype}", x, y)
    return plain(x.shape)


def compare(x: Instruction, y: Instruction, direction: str, type: str | None = None) -> Shape:
    if direction not in ("EQ", "NE", "LT", "LE", "GT", "GE"):
        fail("compare", f"bad direction {direction!r}", x, y)
    shape = binary("compare", "psufc", x, y)
    if shape.kind == "c" and direction not in ("EQ", "NE"):
        fail("compare", f"complex numbers have no {direction}", x, y)
    return shape.with_dtype("pred")


def complex_(x: Instruction, y: Instruction) -> Shape:
    shape = binary("complex", "f", x, y)
    if shape.dtype not in COMPLEX_OF:
        fail("complex", "parts must be f32 or f64", x, y)
    return shape.with_dtype(COMPLEX_OF[shape.dtype])


def select(pred: Instruction, x: Instruction, y: Instruction) -> Shape:
    shape = binary("select", "psufc", x, y)
    if pred.shape.dtype != "pred" or pred.shape.dims != shape.dims:
        fail("select", "the predicate must be pred with the dims of the branches", pred, x, y)
    return shape


def clamp(low: Instruction, x: Instruction, high: Instruction) -> Shape:
    array("clamp", low, x, high)
    for bound in (low, high):
        if bound.shape.dtype != x.shape.dtype or bound.shape.dims not in ((), x.shape.dims):
            fail("clamp", "bounds must be scalars or have the shape of the operand", low, x, high)
    if x.shape.kind == "c":
        fail("clamp", "is not defined on complex numbers", low, x, high)
    return plain(x.shape)


def reduce_precision(x: Instruction, exponent_bits: int, mantissa_bits: int) -> Shape:
    if exponent_bits < 1 or mantissa_bits < 0:
        fail("reduce-precision", f"bad format e{exponent_bits}m{mantissa_bits}", x)
    return unary("reduce-precision", "f", x)


# Moving elements


def constant(literal: Literal) -> Shape:
    return literal.shape


def transpose(x: Instruction, dimensions: tuple[int, ...]) -> Shape:
    array("transpose", x)
    if sorted(dimensions) != list(range(x.shape.rank)):
        fail("transpose", f"dimensions {list(dimensions)} are no permutation of {x.shape.rank}", x)
    return x.shape.with_dims(x.shape.dims[d] for d in dimensions)


def slice_(x: Instruction, slice: tuple) -> Shape:
    array("slice", x)
    if len(slice) != x.shape.rank:
        fail("slice", f"{len(slice)} ranges for rank {x.shape.rank}", x)
    dims = []
    for (start, limit, stride), size in zip(slice, x.shape.dims):
        if (
            known(stride)
            and stride < 1
            or known(start)
            and start < 0
            or known(start, limit)
            and start > limit
        ):
            fail("slice", f"bad range [{start}:{limit}:{stride}]", x)
        if known(limit, size) and limit > size:
            fail("slice", f"limit {limit} exceeds size {size}", x)
        dims.append(limit - start if stride == 1 else ceildiv(limit - start, stride))
    return x.shape.with_dims(dims)


def pad(x: Instruction, value: Instruction, padding: tuple) -> Shape:
    array("pad", x, value)
    if value.shape.dims or value.shape.dtype != x.shape.dtype:
        fail("pad", "the padding value must be a scalar of the operand's element type", x, value)
    if len(padding) != x.shape.rank:
        fail("pad", f"{len(padding)} paddings for rank {x.shape.rank}", x, value)
    dims = []
    for (low, high, interior), size in zip(padding, x.shape.dims):
        if known(interior) and interior < 0:
            fail("pad", f"interior padding {interior} is negative", x, value)
        inner = size if interior == 0 else 0 if size == 0 else size + (size - 1) * interior
        new = inner + low + high
        if known(new) and new < 0:
            fail("pad", f"padding {low}_{high}_{interior} leaves size {new}", x, value)
        dims.append(new)
    return x.shape.with_dims(dims)


def concatenate(*xs: Instruction, dimensions: tuple[int, ...]) -> Shape:
    array("concatenate", *xs)
    if not xs:
        fail("concatenate", "takes at least one operand")
    (d,) = dimensions
    first = xs[0].shape
    in_range("concatenate", "dimension", dimensions, first.rank, *xs[:2])
    total: Size = 0
    for x in xs:
        s = x.shape
        if (
            s.dtype != first.dtype
            or s.rank != first.rank
            or any(a != b for i, (a, b) in enumerate(zip(s.dims, first.dims)) if i != d)
        ):
            fail("concatenate", f"operands differ outside dimension {d}", xs[0], x)
        total = total + s.dims[d]
    return first.with_dims((*first.dims[:d], total, *first.dims[d + 1 :]))


def reverse(x: Instruction, dimensions: tuple[int, ...]) -> Shape:
    array("reverse", x)
    in_range("reverse", "dimensions", dimensions, x.shape.rank, x)
    return plain(x.shape)


def _index_operands(op: str, x: Instruction, starts: Sequence[Instruction]) -> None:
    if len(starts) != x.shape.rank:
        fail(op, f"{len(starts)} start indices for rank {x.shape.rank}", x, *starts)
    if (
        any(s.shape.dims or s.shape.kind not in "su" for s in starts)
        or len({s.shape.dtype for s in starts}) > 1
    ):
        fail(op, "start indices must be integer scalars of one type", x, *starts)


def dynamic_slice(x: Instruction, *starts: Instruction, dynamic_slice_sizes: tuple) -> Shape:
    array("dynamic-slice", x)
    _index_operands("dynamic-slice", x, starts)
    if len(dynamic_slice_sizes) != x.shape.rank or any(
        known(n, d) and not 0 <= n <= d for n, d in zip(dynamic_slice_sizes, x.shape.dims)
    ):
        fail("dynamic-slice", f"sizes {list(dynamic_slice_sizes)} do not fit", x)
    return x.shape.with_dims(dynamic_slice_sizes)


def dynamic_update_slice(x: Instruction, update: Instruction, *starts: Instruction) -> Shape:
    array("dynamic-update-slice", x, update)
    _index_operands("dynamic-update-slice", x, starts)
    if update.shape.dtype != x.shape.dtype or update.shape.rank != x.shape.rank:
        fail("dynamic-update-slice", "the update must have the operand's type and rank", x, update)
    if any(known(n, d) and n > d for n, d in zip(update.shape.dims, x.shape.dims)):
        fail("dynamic-update-slice", "the update is larger than the operand", x, update)
    return plain(x.shape)


def gather(
    x: Instruction, indices: Instruction, *, offset_dims, collapsed_slice_dims=(), start_index_map, index_vector_dim: int, slice_sizes,
    operand_batching_dims=(), start_indices_batching_dims=(), indices_are_sorted: bool = False,
) -> Shape:  # fmt: skip
    array("gather", x, indices)
    rank = x.shape.rank
    if indices.shape.kind not in "su":
        fail("gather", "indices must be integers", x, indices)
    if not 0 <= index_vector_dim <= indices.shape.rank:
        fail("gather", f"index_vector_dim {index_vector_dim} out of range", x, indices)
    vector: Size = (
        1 if index_vector_dim == indices.shape.rank else indices.shape.dims[index_vector_dim]
    )
    if len(start_index_map) != vector:
        fail(
            "gather",
            f"start_index_map has {len(start_index_map)} entries, index vectors {vector}",
            x,
            indices,
        )
    in_range("gather", "start_index_map", start_index_map, rank, x, indices)
    in_range(
        "gather",
        "collapsed and batching dims",
        (*collapsed_slice_dims, *operand_batching_dims),
        rank,
        x,
        indices,
    )
    if len(slice_sizes) != rank or any(
        known(n, d) and not 0 <= n <= d for n, d in zip(slice_sizes, x.shape.dims)
    ):
        fail("gather", f"slice_sizes {list(slice_sizes)} do not fit", x, indices)
    for d in (*collapsed_slice_dims, *operand_batching_dims):
        if known(slice_sizes[d]) and slice_sizes[d] > 1:
            fail(
                "gather",
                f"dimension {d} is collapsed but its slice size is {slice_sizes[d]}",
                x,
                indices,
            )
    _batching("gather", x, indices, operand_batching_dims, start_indices_batching_dims)
    offsets = [
        n
        for d, n in enumerate(slice_sizes)
        if d not in collapsed_slice_dims and d not in operand_batching_dims
    ]
    if len(offset_dims) != len(offsets):
        fail(
            "gather",
            f"{len(offset_dims)} offset_dims for {len(offsets)} window dimensions",
            x,
            indices,
        )
    batch = [n for d, n in enumerate(indices.shape.dims) if d != index_vector_dim]
    in_range("gather", "offset_dims", offset_dims, len(batch) + len(offsets), x, indices)
    offset, outer = iter(offsets), iter(batch)
    return x.shape.with_dims(
        next(offset) if d in offset_dims else next(outer) for d in range(len(batch) + len(offsets))
    )


def _batching(op: str, x: Instruction, indices: Instruction, operand_dims, index_dims) -> None:
    in_range(op, "index batching dims", index_dims, indices.shape.rank, x, indices)
    if len(operand_dims) != len(index_dims) or any(
        x.shape.dims[a] != indices.shape.dims[b] for a, b in zip(operand_dims, index_dims)
    ):
        fail(op, f"batching dims {list(operand_dims)} and {list(index_dims)} differ", x, indices)


def scatter(
    *operands: Instruction, to_apply: Computation, update_window_dims, inserted_window_dims=(), scatter_dims_to_operand_dims, index_vector_dim: int,
    input_batching_dims=(), scatter_indices_batching_dims=(), indices_are_sorted: bool = False, unique_indices: bool = False,
) -> Shape:  # fmt: skip
    if len(operands) < 3 or len(operands) % 2 == 0:
        fail("scatter", "takes n operands, the indices, n updates", *operands)
    n = len(operands) // 2
    xs, indices, updates = operands[:n], operands[n], operands[n + 1 :]
    array("scatter", *operands)
    rank = xs[0].shape.rank
    if indices.shape.kind not in "su":
        fail("scatter", "indices must be integers", *operands)
    if not 0 <= index_vector_dim <= indices.shape.rank:
        fail("scatter", f"index_vector_dim {index_vector_dim} out of range", *operands)
    vector: Size = (
        1 if index_vector_dim == indices.shape.rank else indices.shape.dims[index_vector_dim]
    )
    if len(scatter_dims_to_operand_dims) != vector:
        fail(
            "scatter",
            f"scatter_dims_to_operand_dims has {len(scatter_dims_to_operand_dims)} entries, index vectors {vector}",
            *operands,
        )
    in_range(
        "scatter", "scatter_dims_to_operand_dims", scatter_dims_to_operand_dims, rank, *operands
    )
    in_range(
        "scatter",
        "inserted and batching dims",
        (*inserted_window_dims, *input_batching_dims),
        rank,
        *operands,
    )
    _batching("scatter", xs[0], indices, input_batching_dims, scatter_indices_batching_dims)
    if len(update_window_dims) + len(inserted_window_dims) + len(input_batching_dims) != rank:
        fail("scatter", "window, inserted and batching dims do not cover the operand", *operands)
    batch = [s for d, s in enumerate(indices.shape.dims) if d != index_vector_dim]
    window = [
        s
        for d, s in enumerate(xs[0].shape.dims)
        if d not in inserted_window_dims and d not in input_batching_dims
    ]
    for x, u in zip(xs, updates):
        if x.shape.dims != xs[0].shape.dims or u.shape.rank != len(batch) + len(update_window_dims):
            fail("scatter", "operands or updates have the wrong rank", *operands)
        in_range("scatter", "update_window_dims", update_window_dims, u.shape.rank, *operands)
        outer = [s for d, s in enumerate(u.shape.dims) if d not in update_window_dims]
        inner = [s for d, s in enumerate(u.shape.dims) if d in update_window_dims]
        if outer != batch or any(known(a, b) and a > b for a, b in zip(inner, window)):
            fail(
                "scatter",
                f"the update does not match index dims {batch} and window {window}",
                *operands,
            )
    applies(
        "scatter",
        to_apply,
        [Shape(x.shape.dtype) for x in xs] + [Shape(u.shape.dtype) for u in updates],
    )
    return result([plain(x.shape) for x in xs])


# Contractions


def dot(
    x: Instruction, y: Instruction, *, lhs_contracting_dims=(), rhs_contracting_dims=(), lhs_batch_dims=(), rhs_batch_dims=(), operand_precision=None,
) -> Shape:  # fmt: skip
    array("dot", x, y)
    in_range("dot", "lhs dims", (*lhs_batch_dims, *lhs_contracting_dims), x.shape.rank, x, y)
    in_range("dot", "rhs dims", (*rhs_batch_dims, *rhs_contracting_dims), y.shape.rank, x, y)
    for what, left, right in (
        ("contracting", lhs_contracting_dims, rhs_contracting_dims),
        ("batch", lhs_batch_dims, rhs_batch_dims),
    ):
        if len(left) != len(right):
            fail("dot", f"{len(left)} and {len(right)} {what} dims", x, y)
        for a, b in zip(left, right):
            if x.shape.dims[a] != y.shape.dims[b]:
                fail("dot", f"{what} sizes {x.shape.dims[a]} != {y.shape.dims[b]}", x, y)
    batch = [x.shape.dims[d] for d in lhs_batch_dims]
    rows = [
        s
        for d, s in enumerate(x.shape.dims)
        if d not in lhs_batch_dims and d not in lhs_contracting_dims
    ]
    cols = [
        s
        for d, s in enumerate(y.shape.dims)
        if d not in rhs_batch_dims and d not in rhs_contracting_dims
    ]
    return Shape(_wider("dot", x, y), (*batch, *rows, *cols))


def _wider(op: str, x: Instruction, y: Instruction) -> str:
    a, b = x.shape.dtype, y.shape.dtype
    if x.shape.kind != y.shape.kind:
        fail(op, "element types are of different kinds", x, y)
    return b if DTYPES[b].bits > DTYPES[a].bits else a


def ragged_dot(
    x: Instruction, y: Instruction, group_sizes: Instruction, *, lhs_contracting_dims, rhs_contracting_dims, lhs_batch_dims=(), rhs_batch_dims=(),
    lhs_ragged_dims, rhs_group_dims=(),
) -> Shape:  # fmt: skip
    array("ragged-dot", x, y, group_sizes)
    in_range("ragged-dot", "lhs_ragged_dims", lhs_ragged_dims, x.shape.rank, x, y)
    in_range(
        "ragged-dot",
        "rhs dims",
        (*rhs_group_dims, *rhs_contracting_dims, *rhs_batch_dims),
        y.shape.rank,
        x,
        y,
    )
    if len(lhs_ragged_dims) != 1:
        fail("ragged-dot", "takes exactly one ragged dimension", x, y)
    for a, b in zip(
        (*lhs_contracting_dims, *lhs_batch_dims),
        (*rhs_contracting_dims, *rhs_batch_dims),
        strict=True,
    ):
        if x.shape.dims[a] != y.shape.dims[b]:
            fail("ragged-dot", f"sizes {x.shape.dims[a]} != {y.shape.dims[b]}", x, y)
    batch = [x.shape.dims[d] for d in lhs_batch_dims]
    rows = [
        s
        for d, s in enumerate(x.shape.dims)
        if d not in lhs_batch_dims and d not in lhs_contracting_dims
    ]
    cols = [
        s
        for d, s in enumerate(y.shape.dims)
        if d not in (*rhs_batch_dims, *rhs_contracting_dims, *rhs_group_dims)
    ]
    groups = [group_sizes.shape.dims[-1]] if lhs_ragged_dims[0] in lhs_contracting_dims else []
    return Shape(_wider("ragged-dot", x, y), (*groups, *batch, *rows, *cols))


@dataclass(frozen=True, slots=True)
class ConvDims:
    """Dimension numbers of a convolution: batch, feature and spatial dimensions of lhs, rhs (kernel) and output."""

    lhs_batch: int
    lhs_feature: int
    lhs_spatial: tuple[int, ...]
    rhs_input: int
    rhs_output: int
    rhs_spatial: tuple[int, ...]
    out_batch: int
    out_feature: int
    out_spatial: tuple[int, ...]


def conv_dims(dim_labels: str) -> ConvDims:
    """The numbers in `bf01_oi01->bf01`. Raises ShapeError."""
    lhs, _, rest = dim_labels.partition("_")
    rhs, _, out = rest.partition("->")
    n = len(lhs) - 2
    digits = [str(i) for i in range(n)]
    if any(
        sorted(text) != sorted(names + digits)
        for text, names in ((lhs, ["b", "f"]), (rhs, ["i", "o"]), (out, ["b", "f"]))
    ):
        fail("convolution", f"bad dim_labels {dim_labels!r}, expected e.g. bf01_oi01->bf01")

    def spatial(text: str) -> tuple[int, ...]:
        return tuple(text.index(d) for d in digits)

    return ConvDims(
        lhs.index("b"), lhs.index("f"), spatial(lhs), rhs.index("i"), rhs.index("o"), spatial(rhs),
        out.index("b"), out.index("f"), spatial(out),
    )  # fmt: skip


def convolution(
    x: Instruction, kernel: Instruction, *, window: Window = (), dim_labels: str, feature_group_count: int = 1, batch_group_count: int = 1,
    operand_precision=None,
) -> Shape:  # fmt: skip
    array("convolution", x, kernel)
    n = conv_dims(dim_labels)
    rank = len(n.lhs_spatial) + 2
    if x.shape.rank != rank or kernel.shape.rank != rank or len(window) != rank - 2:
        fail(
            "convolution",
            f"dim_labels {dim_labels} and a window of {len(window)} dimensions do not fit",
            x,
            kernel,
        )
    if feature_group_count > 1 and batch_group_count > 1:
        fail(
            "convolution",
            "only one of feature_group_count and batch_group_count may exceed 1",
            x,
            kernel,
        )
    features, outputs, batch = (
        x.shape.dims[n.lhs_feature],
        kernel.shape.dims[n.rhs_output],
        x.shape.dims[n.lhs_batch],
    )
    expected = kernel.shape.dims[n.rhs_input] * feature_group_count
    if features != expected:
        fail("convolution", f"{features} input features, the kernel expects {expected}", x, kernel)
    if (
        outputs % feature_group_count != 0
        or outputs % batch_group_count != 0
        or batch % batch_group_count != 0
    ):
        fail(
            "convolution",
            "batch or output features are not divisible by the group count",
            x,
            kernel,
        )
    dims: list[Size] = [0] * rank
    dims[n.out_batch] = batch // batch_group_count
    dims[n.out_feature] = outputs
    for w, i, k, o in zip(window, n.lhs_spatial, n.rhs_spatial, n.out_spatial):
        if w.size != kernel.shape.dims[k]:
            fail(
                "convolution",
                f"window size {w.size} != kernel size {kernel.shape.dims[k]}",
                x,
                kernel,
            )
        dims[o] = w.output_size(x.shape.dims[i])
    return Shape(_wider("convolution", x, kernel), tuple(dims))


# Reductions and called computations


def applies(op: str, called: Computation, takes: Sequence[Shape]) -> Shape:
    """The result of calling `called` on operands of shapes `takes`."""
    if not isinstance(called, Computation):
        fail(op, f"expected a computation, got {called!r}")
    if len(called.params) != len(takes):
        fail(
            op,
            f"computation {called.name} takes {len(called.params)} parameters, got {len(takes)}",
            *takes,
        )
    for i, (p, s) in enumerate(zip(called.params, takes)):
        if not compatible(p.shape, s):
            fail(op, f"parameter {i} of {called.name} is {p.shape}, got {s}", *takes)
    return called.root.shape


def _reducer(
    op: str, operands: Sequence[Instruction], to_apply: Computation
) -> tuple[Sequence[Instruction], tuple[Shape, ...]]:
    """(arrays, scalar result shapes) of a variadic reduction."""
    if not operands or len(operands) % 2:
        fail(op, "takes n operands and n initial values", *operands)
    n = len(operands) // 2
    xs, inits = operands[:n], operands[n:]
    array(op, *operands)
    for x, i in zip(xs, inits):
        if x.shape.dims != xs[0].shape.dims or i.shape.dims:
            fail(op, "operands must have equal dims and initial values must be scalars", *operands)
    if not isinstance(to_apply, Computation) or len(to_apply.params) != 2 * n:
        fail(op, f"to_apply must take {2 * n} scalars", *operands)
    # The accumulator has the initial value's type; the element may be narrower only if to_apply says so.
    takes = [Shape(i.shape.dtype) for i in inits] + [Shape(x.shape.dtype) for x in xs]
    root = applies(op, to_apply, takes)
    shapes = root.elements if root.is_tuple else (root,)
    if len(shapes) != n or any(s.dims or s.dtype != i.shape.dtype for s, i in zip(shapes, inits)):
        fail(op, f"to_apply returns {root}, expected the type of the initial values", *operands)
    return xs, shapes


def reduce(*operands: Instruction, dimensions: tuple[int, ...], to_apply: Computation) -> Shape:
    xs, scalars = _reducer("reduce", operands, to_apply)
    in_range("reduce", "dimensions", dimensions, xs[0].shape.rank, *operands)
    dims = tuple(s for d, s in enumerate(xs[0].shape.dims) if d not in dimensions)
    return result([Shape(s.dtype, dims) for s in scalars])


def reduce_window(*operands: Instruction, window: Window = (), to_apply: Computation) -> Shape:
    xs, scalars = _reducer("reduce-window", operands, to_apply)
    dims = _windowed("reduce-window", window, xs[0])
    return result([Shape(s.dtype, dims) for s in scalars])


def _windowed(op: str, window: Window, x: Instruction) -> tuple[Size, ...]:
    if len(window) != x.shape.rank:
        fail(op, f"a window of {len(window)} dimensions for rank {x.shape.rank}", x)
    if any(
        known(w.size) and w.size < 1 or w.stride < 1 or w.base_dilation < 1 or w.window_dilation < 1
        for w in window
    ):
        fail(op, f"window sizes, strides and dilations must be positive: {window}", x)
    return tuple(w.output_size(s) for w, s in zip(window, x.shape.dims))


def select_and_scatter(
    x: Instruction,
    source: Instruction,
    init: Instruction,
    *,
    window: Window = (),
    select: Computation,
    scatter: Computation,
) -> Shape:
    array("select-and-scatter", x, source, init)
    dims = _windowed("select-and-scatter", window, x)
    if source.shape.dims != dims:
        fail("select-and-scatter", f"the source must have dims {list(dims)}", x, source, init)
    scalar = Shape(x.shape.dtype)
    if applies("select-and-scatter", select, (scalar, scalar)).dtype != "pred":
        fail("select-and-scatter", "select must return pred", x, source, init)
    if (
        applies(
            "select-and-scatter", scatter, (Shape(init.shape.dtype), Shape(source.shape.dtype))
        ).dtype
        != x.shape.dtype
        or init.shape.dims
    ):
        fail(
            "select-and-scatter",
            "scatter and the initial value must have the operand's type",
            x,
            source,
            init,
        )
    return plain(x.shape)


def sort(
    *xs: Instruction, dimensions: tuple[int, ...], to_apply: Computation, is_stable: bool = False
) -> Shape:
    array("sort", *xs)
    if not xs or any(x.shape.dims != xs[0].shape.dims for x in xs):
        fail("sort", "takes arrays of equal dims", *xs)
    in_range("sort", "dimension", dimensions, xs[0].shape.rank, *xs)
    if len(dimensions) != 1:
        fail("sort", "sorts along one dimension", *xs)
    scalars = [Shape(x.shape.dtype) for x in xs for _ in range(2)]
    if applies("sort", to_apply, scalars) != Shape("pred"):
        fail("sort", "the comparator must return pred[]", *xs)
    return result([plain(x.shape) for x in xs])


def topk(x: Instruction, k: int, largest: bool = True) -> Shape:
    array("topk", x)
    if not x.shape.rank or known(x.shape.dims[-1]) and not 0 <= k <= x.shape.dims[-1]:
        fail("topk", f"k={k} does not fit the last dimension", x)
    dims = (*x.shape.dims[:-1], k)
    return tuple_shape(x.shape.with_dims(dims), Shape("s32", dims))


def map_(*xs: Instruction, dimensions: tuple[int, ...] = (), to_apply: Computation) -> Shape:
    array("map", *xs)
    if not xs or any(x.shape.dims != xs[0].shape.dims for x in xs):
        fail("map", "takes arrays of equal dims", *xs)
    root = applies("map", to_apply, [Shape(x.shape.dtype) for x in xs])
    return Shape(root.dtype, xs[0].shape.dims)


def call(*operands: Instruction, to_apply: Computation) -> Shape:
    return applies("call", to_apply, [o.shape for o in operands])


def fusion(*operands: Instruction, calls: Computation, kind: str | None = None) -> Shape:
    return applies("fusion", calls, [o.shape for o in operands])


def while_(
    state: Instruction, condition: Computation, body: Computation, independent: int = 0
) -> Shape:
    """`independent`: so many turns, counted by element 0 from 0 on, that read and write nothing which another one writes; 0 when they may."""
    if applies("while", condition, [state.shape]) != Shape("pred"):
        fail("while", "the condition must return pred[]", state)
    if not compatible(applies("while", body, [state.shape]), state.shape):
        fail("while", f"the body returns {body.root.shape}", state)
    return state.shape


def conditional(
    index: Instruction, *operands: Instruction, branch_computations: tuple[Computation, ...]
) -> Shape:
    """A pred index runs branch 0 when true; an s32 index out of range runs the last branch."""
    if index.shape not in (Shape("pred"), Shape("s32")):
        fail("conditional", "the branch index must be pred[] or s32[]", index)
    if index.shape.dtype == "pred" and len(branch_computations) != 2 or not branch_computations:
        fail("conditional", f"{len(branch_computations)} branches for index {index.shape}")
    if len(operands) != len(branch_computations):
        fail(
            "conditional",
            f"{len(branch_computations)} branches, {len(operands)} operands",
            index,
            *operands,
        )
    shapes = [applies("conditional", c, [o.shape]) for c, o in zip(branch_computations, operands)]
    if any(not compatible(s, shapes[0]) for s in shapes):
        fail("conditional", "branches return different shapes", *shapes)
    return shapes[0]


# Tuples, tokens, identity-shaped opcodes


def tuple_(*xs: Instruction) -> Shape:
    return tuple_shape(*(x.shape for x in xs))


def get_tuple_element(x: Instruction, index: int) -> Shape:
    if not x.shape.is_tuple or not 0 <= index < len(x.shape.elements):
        fail("get-tuple-element", f"no element {index}", x)
    return x.shape.elements[index]


def first(x: Instruction, *rest: Instruction, **attrs) -> Shape:
    """The first operand's shape."""
    return x.shape


def dimension_size(
    op: str,
    shape: Callable[[Instruction], Shape],
    x: Instruction,
    *rest: Instruction,
    dimensions: tuple[int, ...],
) -> Shape:
    array(op, x, *rest)
    in_range(op, "dimensions", dimensions, x.shape.rank, x)
    if any(r.shape != Shape("s32") for r in rest):
        fail(op, "the size must be s32[]", x, *rest)
    return shape(x)


# Linear algebra, signal, normalisation


def fft(x: Instruction, fft_type: str, fft_length: tuple) -> Shape:
    array("fft", x)
    n = len(fft_length)
    if fft_type not in ("FFT", "IFFT", "RFFT", "IRFFT"):
        fail("fft", f"bad fft_type {fft_type!r}", x)
    if not 1 <= n <= min(3, x.shape.rank):
        fail("fft", f"fft_length {list(fft_length)} does not fit (1 to 3 innermost dimensions)", x)
    if x.shape.kind != ("f" if fft_type == "RFFT" else "c") or x.shape.dtype in ("f16", "bf16"):
        fail("fft", f"{fft_type} is not defined on {x.shape.dtype}", x)
    sizes = list(fft_length)
    half = sizes[-1] // 2 + 1
    takes = sizes[:-1] + [half] if fft_type == "IRFFT" else sizes
    if list(x.shape.dims[-n:]) != takes:
        fail("fft", f"{fft_type} of length {sizes} takes inner dims {takes}", x)
    outer = x.shape.dims[:-n]
    if fft_type == "RFFT":
        return Shape(COMPLEX_OF[x.shape.dtype], (*outer, *sizes[:-1], half))
    return Shape(REAL_OF[x.shape.dtype] if fft_type == "IRFFT" else x.shape.dtype, (*outer, *sizes))


def cholesky(x: Instruction, lower: bool = False) -> Shape:
    shape = unary("cholesky", "fc", x)
    if shape.rank < 2 or shape.dims[-1] != shape.dims[-2]:
        fail("cholesky", "takes square matrices", x)
    return shape


def triangular_solve(
    a: Instruction, b: Instruction, *, left_side: bool = False, lower: bool = False, unit_diagonal: bool = False, transpose_a: str = "NO_TRANSPOSE",
) -> Shape:  # fmt: skip
    array("triangular-solve", a, b)
    if a.shape.dtype != b.shape.dtype or a.shape.kind not in "fc":
        fail("triangular-solve", "operands must be floating-point or complex of one type", a, b)
    if transpose_a not in ("NO_TRANSPOSE", "TRANSPOSE", "ADJOINT"):
        fail("triangular-solve", f"bad transpose_a {transpose_a!r}", a, b)
    rank = a.shape.rank
    if (
        rank < 2
        or b.shape.rank != rank
        or a.shape.dims[-1] != a.shape.dims[-2]
        or a.shape.dims[:-2] != b.shape.dims[:-2]
    ):
        fail(
            "triangular-solve",
            "takes square matrices and right-hand sides with equal batch dims",
            a,
            b,
        )
    if a.shape.dims[-1] != b.shape.dims[-2 if left_side else -1]:
        fail("triangular-solve", f"sizes differ with left_side={left_side}", a, b)
    return plain(b.shape)


def _features(op: str, x: Instruction, stats: Sequence[Instruction], feature_index: int) -> Shape:
    array(op, x, *stats)
    in_range(op, "feature_index", (feature_index,), x.shape.rank, x)
    if x.shape.kind != "f" or any(
        s.shape.dims != (x.shape.dims[feature_index],) or s.shape.kind != "f" for s in stats
    ):
        fail(
            op,
            f"scale and statistics must have one value per feature (dimension {feature_index})",
            x,
            *stats,
        )
    return plain(x.shape)


def batch_norm_training(
    x: Instruction, scale: Instruction, offset: Instruction, epsilon: float, feature_index: int
) -> Shape:
    shape = _features("batch-norm-training", x, (scale, offset), feature_index)
    return tuple_shape(shape, plain(scale.shape), plain(scale.shape))


def batch_norm_inference(
    x: Instruction, *stats: Instruction, epsilon: float, feature_index: int
) -> Shape:
    return _features("batch-norm-inference", x, stats, feature_index)


def batch_norm_grad(
    x: Instruction,
    scale: Instruction,
    mean: Instruction,
    variance: Instruction,
    grad: Instruction,
    epsilon: float,
    feature_index: int,
) -> Shape:
    shape = _features("batch-norm-grad", x, (scale, mean, variance), feature_index)
    if grad.shape.dims != x.shape.dims:
        fail("batch-norm-grad", "the gradient must have the operand's dims", x, grad)
    return tuple_shape(shape, plain(scale.shape), plain(scale.shape))


# Collectives


def _group_size(op: str, replica_groups, *operands: Instruction) -> int:
    if not replica_groups:
        fail(op, "empty replica_groups do not determine the shape; give one", *operands)
    return len(replica_groups[0])


def all_gather(*xs: Instruction, dimensions: tuple[int, ...], replica_groups=(), **attrs) -> Shape:
    array("all-gather", *xs)
    (d,) = dimensions
    n = _group_size("all-gather", replica_groups, *xs)
    return result(
        [x.shape.with_dims(s * n if i == d else s for i, s in enumerate(x.shape.dims)) for x in xs]
    )


def reduce_scatter(
    *xs: Instruction, dimensions: tuple[int, ...], replica_groups=(), **attrs
) -> Shape:
    array("reduce-scatter", *xs)
    (d,) = dimensions
    n = _group_size("reduce-scatter", replica_groups, *xs)
    for x in xs:
        if known(x.shape.dims[d]) and x.shape.dims[d] % n:
            fail("reduce-scatter", f"size {x.shape.dims[d]} is not divisible by {n}", x)
    return result(
        [x.shape.with_dims(s // n if i == d else s for i, s in enumerate(x.shape.dims)) for x in xs]
    )


def same_all(*xs: Instruction, **attrs) -> Shape:
    """The operands' shapes: one array, or a tuple of several."""
    return result([plain(x.shape) for x in xs])


def all_to_all(*xs: Instruction, dimensions: tuple[int, ...] = (), **attrs) -> Shape:
    """With a dimension the array is split along it and the pieces exchanged in place; without, operand i goes to peer i."""
    array("all-to-all", *xs)
    if dimensions and len(xs) != 1:
        fail("all-to-all", "takes one operand when split along a dimension", *xs)
    return plain(xs[0].shape) if dimensions else tuple_shape(*(plain(x.shape) for x in xs))


def started(rule: Callable[..., Shape], *xs: Instruction, **attrs) -> Shape:
    """`-start` of a collective: (operands, results)."""
    return tuple_shape(result([x.shape for x in xs]), rule(*xs, **attrs))


def finished(op: str, element: int, x: Instruction, **attrs) -> Shape:
    """`-done`: element of the `-start` tuple."""
    if not x.shape.is_tuple or len(x.shape.elements) <= element:
        fail(op, "takes the result of the matching -start", x)
    return x.shape.elements[element]


def async_start(*xs: Instruction, calls: Computation, **attrs) -> Shape:
    root = applies("async-start", calls, [x.shape for x in xs])
    return tuple_shape(tuple_shape(*(x.shape for x in xs)), root, U32)


def tokens(*xs: Instruction, **attrs) -> Shape:
    return TOKEN


def constant_u32() -> Shape:
    return U32


def send(x: Instruction, token: Instruction, **attrs) -> Shape:
    return tuple_shape(x.shape, U32, TOKEN)


def recv_done(x: Instruction, **attrs) -> Shape:
    return tuple_shape(finished("recv-done", 0, x), TOKEN)


def product(sizes: Iterable[Size]) -> Size:
    return math.prod(sizes)
