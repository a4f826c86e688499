"""Shape rules of the opcode table: `rule(*operands, **attrs) -> Shape`, or ShapeError naming opcode
and operand shapes.

    ShapeError: dot: contracting sizes 3 != 4 (f32[2,3] · f32[4,5])

Rules take the operand instructions. Sizes may be symbolic: two sizes are equal when they are the
same polynomial, and bounds are only checked between ints. Opcodes whose operands do not determine
the result have a check `check(shape, *operands, **attrs)` in its place (explicit.py).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

from .dim import Dim, Ints, Size, ceildiv
from .instruction import Computation, Instruction
from .literal import Literal
from .shape import DTYPES, Shape, tuple_shape

N = TypeVar("N", int, Size)
TOKEN = Shape("token")
U32 = Shape("u32")
Rows = tuple[tuple[Size, Size, int], ...]  # per dimension
REAL_OF = {"c64": "f32", "c128": "f64"}
COMPLEX_OF = {"f32": "c64", "f64": "c128"}


class ShapeError(ValueError):
    """Operands or attributes that an opcode does not accept."""


def fail(op: str, text: str, *operands: Instruction | Shape) -> NoReturn:
    shapes = " · ".join(str(o.shape if isinstance(o, Instruction) else o) for o in operands)
    raise ShapeError(f"{op}: {text} ({shapes})" if operands else f"{op}: {text}")


def array(op: str, *operands: Instruction) -> None:
    """Every operand is an array (no tuple, no token)."""
    for o in operands:
        if o.dtype not in DTYPES or o.dtype == "token":
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
    *operands: Instruction | Shape,
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


def larger(a: Size, b: Size) -> bool:
    """Whether `a > b` is certain."""
    return isinstance(a, int) and isinstance(b, int) and a > b


def outside(n: Size, size: Size) -> bool:
    """Whether `0 <= n <= size` is certainly wrong."""
    return isinstance(n, int) and isinstance(size, int) and not 0 <= n <= size


def result(shapes: Sequence[Shape]) -> Shape:
    """One array, or the tuple of several."""
    return shapes[0] if len(shapes) == 1 else tuple_shape(*shapes)


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


# Pointwise


def unary(op: str, kinds: str, x: Instruction) -> Shape:
    array(op, x)
    if x.kind not in kinds:
        fail(op, f"is not defined on {x.dtype}", x)
    return plain(x.shape)


def unary_to(op: str, kinds: str, dtype: Callable[[str], str], x: Instruction) -> Shape:
    """A unary opcode whose result has another element type."""
    return Shape(dtype(unary(op, kinds, x).dtype), x.dims)


def binary(op: str, kinds: str, x: Instruction, y: Instruction) -> Shape:
    array(op, x, y)
    if x.dims != y.dims:
        fail(op, "shapes differ", x, y)
    if x.dtype != y.dtype:
        fail(op, "element types differ", x, y)
    if x.kind not in kinds:
        fail(op, f"is not defined on {x.dtype}", x, y)
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
    if pred.dtype != "pred" or pred.dims != shape.dims:
        fail("select", "the predicate must be pred with the dims of the branches", pred, x, y)
    return shape


def clamp(low: Instruction, x: Instruction, high: Instruction) -> Shape:
    array("clamp", low, x, high)
    for bound in (low, high):
        if bound.dtype != x.dtype or bound.dims not in (
            (),
            x.dims,
        ):
            fail("clamp", "bounds must be scalars or have the shape of the operand", low, x, high)
    if x.kind == "c":
        fail("clamp", "is not defined on complex numbers", low, x, high)
    return plain(x.shape)


def reduce_precision(x: Instruction, exponent_bits: int, mantissa_bits: int) -> Shape:
    if exponent_bits < 1 or mantissa_bits < 0:
        fail("reduce-precision", f"bad format e{exponent_bits}m{mantissa_bits}", x)
    return unary("reduce-precision", "f", x)


# Moving elements


def constant(literal: Literal) -> Shape:
    return literal.shape


def transpose(x: Instruction, dimensions: Ints) -> Shape:
    array("transpose", x)
    if sorted(dimensions) != list(range(x.rank)):
        fail("transpose", f"dimensions {list(dimensions)} are no permutation of {x.rank}", x)
    return x.shape.with_dims(x.dims[d] for d in dimensions)


def slice_(x: Instruction, slice: Rows) -> Shape:
    array("slice", x)
    if len(slice) != x.rank:
        fail("slice", f"{len(slice)} ranges for rank {x.rank}", x)
    dims = []
    for (start, limit, stride), size in zip(slice, x.dims):
        if larger(1, stride) or larger(0, start) or larger(start, limit):
            fail("slice", f"bad range [{start}:{limit}:{stride}]", x)
        if larger(limit, size):
            fail("slice", f"limit {limit} exceeds size {size}", x)
        dims.append(limit - start if stride == 1 else ceildiv(limit - start, stride))
    return x.shape.with_dims(dims)


def pad(x: Instruction, value: Instruction, padding: Rows) -> Shape:
    array("pad", x, value)
    if value.dims or value.dtype != x.dtype:
        fail("pad", "the padding value must be a scalar of the operand's element type", x, value)
    if len(padding) != x.rank:
        fail("pad", f"{len(padding)} paddings for rank {x.rank}", x, value)
    dims = []
    for (low, high, interior), size in zip(padding, x.dims):
        if larger(0, interior):
            fail("pad", f"interior padding {interior} is negative", x, value)
        inner = size if interior == 0 else 0 if size == 0 else size + (size - 1) * interior
        new = inner + low + high
        if larger(0, new):
            fail("pad", f"padding {low}_{high}_{interior} leaves size {new}", x, value)
        dims.append(new)
    return x.shape.with_dims(dims)


def concatenate(*xs: Instruction, dimensions: Ints) -> Shape:
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
        total += s.dims[d]
    return first.with_dims((*first.dims[:d], total, *first.dims[d + 1 :]))


def reverse(x: Instruction, dimensions: Ints) -> Shape:
    array("reverse", x)
    in_range("reverse", "dimensions", dimensions, x.rank, x)
    return plain(x.shape)


def _index_operands(op: str, x: Instruction, starts: Sequence[Instruction]) -> None:
    if len(starts) != x.rank:
        fail(op, f"{len(starts)} start indices for rank {x.rank}", x, *starts)
    if any(s.dims or s.kind not in "su" for s in starts) or len({s.dtype for s in starts}) > 1:
        fail(op, "start indices must be integer scalars of one type", x, *starts)


def dynamic_slice(
    x: Instruction, *starts: Instruction, dynamic_slice_sizes: tuple[Size, ...]
) -> Shape:
    array("dynamic-slice", x)
    _index_operands("dynamic-slice", x, starts)
    if len(dynamic_slice_sizes) != x.rank or any(
        outside(n, d) for n, d in zip(dynamic_slice_sizes, x.dims)
    ):
        fail("dynamic-slice", f"sizes {list(dynamic_slice_sizes)} do not fit", x)
    return x.shape.with_dims(dynamic_slice_sizes)


def dynamic_update_slice(x: Instruction, update: Instruction, *starts: Instruction) -> Shape:
    array("dynamic-update-slice", x, update)
    _index_operands("dynamic-update-slice", x, starts)
    if update.dtype != x.dtype or update.rank != x.rank:
        fail("dynamic-update-slice", "the update must have the operand's type and rank", x, update)
    if any(larger(n, d) for n, d in zip(update.dims, x.dims)):
        fail("dynamic-update-slice", "the update is larger than the operand", x, update)
    return plain(x.shape)


def gather(
    x: Instruction,
    indices: Instruction,
    *,
    offset_dims: Ints,
    collapsed_slice_dims: Ints = (),
    start_index_map: Ints,
    index_vector_dim: int,
    slice_sizes: Ints,
    operand_batching_dims: Ints = (),
    start_indices_batching_dims: Ints = (),
    indices_are_sorted: bool = False,
) -> Shape:
    array("gather", x, indices)
    rank = x.rank
    given = (x, indices)
    mapped = "start_index_map", start_index_map
    batch = _index_dims("gather", indices, index_vector_dim, *mapped, *given)
    in_range("gather", *mapped, rank, *given)
    dropped = (*collapsed_slice_dims, *operand_batching_dims)
    in_range("gather", "collapsed and batching dims", dropped, rank, *given)
    if len(slice_sizes) != rank or any(outside(n, d) for n, d in zip(slice_sizes, x.dims)):
        fail("gather", f"slice_sizes {list(slice_sizes)} do not fit", x, indices)
    for d in dropped:
        if larger(slice_sizes[d], 1):
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
    in_range("gather", "offset_dims", offset_dims, len(batch) + len(offsets), x, indices)
    offset = iter(offsets)
    outer = iter(batch)
    return x.shape.with_dims(
        next(offset) if d in offset_dims else next(outer) for d in range(len(batch) + len(offsets))
    )


def _index_dims(
    op: str,
    indices: Instruction,
    index_vector_dim: int,
    name: str,
    mapped: Ints,
    *operands: Instruction,
) -> list[Size]:
    """The sizes of `indices` but that of its vectors, which hold an entry for each of `mapped`."""
    if indices.kind not in "su":
        fail(op, "indices must be integers", *operands)
    if not 0 <= index_vector_dim <= indices.rank:
        fail(op, f"index_vector_dim {index_vector_dim} out of range", *operands)
    vector: Size = (*indices.dims, 1)[index_vector_dim]
    if len(mapped) != vector:
        fail(op, f"{name} has {len(mapped)} entries, index vectors {vector}", *operands)
    return [n for d, n in enumerate(indices.dims) if d != index_vector_dim]


def _batching(
    op: str,
    x: Instruction,
    indices: Instruction,
    operand_dims: Ints,
    index_dims: Ints,
) -> None:
    in_range(op, "index batching dims", index_dims, indices.rank, x, indices)
    if len(operand_dims) != len(index_dims) or any(
        x.dims[a] != indices.dims[b] for a, b in zip(operand_dims, index_dims)
    ):
        fail(op, f"batching dims {list(operand_dims)} and {list(index_dims)} differ", x, indices)


def _update_fits(
    update: Instruction,
    window_dims: Ints,
    batch: Sequence[Size],
    window: Sequence[Size],
    operands: Sequence[Instruction],
) -> None:
    """The update has the sizes of the indices, and of a window inside the operand."""
    outer = [s for d, s in enumerate(update.dims) if d not in window_dims]
    inner = [s for d, s in enumerate(update.dims) if d in window_dims]
    if outer != batch or any(larger(a, b) for a, b in zip(inner, window)):
        text = f"the update does not match index dims {batch} and window {window}"
        fail("scatter", text, *operands)


def scatter(
    *operands: Instruction,
    to_apply: Computation,
    update_window_dims: Ints,
    inserted_window_dims: Ints = (),
    scatter_dims_to_operand_dims: Ints,
    index_vector_dim: int,
    input_batching_dims: Ints = (),
    scatter_indices_batching_dims: Ints = (),
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
) -> Shape:
    if len(operands) < 3 or len(operands) % 2 == 0:
        fail("scatter", "takes n operands, the indices, n updates", *operands)
    n = len(operands) // 2
    xs = operands[:n]
    indices = operands[n]
    updates = operands[n + 1 :]
    array("scatter", *operands)
    rank = xs[0].rank
    name = "scatter_dims_to_operand_dims"
    mapped = scatter_dims_to_operand_dims
    batch = _index_dims("scatter", indices, index_vector_dim, name, mapped, *operands)
    in_range("scatter", name, mapped, rank, *operands)
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
    window = [
        s
        for d, s in enumerate(xs[0].dims)
        if d not in inserted_window_dims and d not in input_batching_dims
    ]
    for x, u in zip(xs, updates):
        if x.dims != xs[0].dims or u.rank != len(batch) + len(update_window_dims):
            fail("scatter", "operands or updates have the wrong rank", *operands)
        in_range("scatter", "update_window_dims", update_window_dims, u.rank, *operands)
        _update_fits(u, update_window_dims, batch, window, operands)
    applies("scatter", to_apply, [Shape(x.dtype) for x in xs] + [Shape(u.dtype) for u in updates])
    return result([plain(x.shape) for x in xs])


# Tuples, tokens, identity-shaped opcodes


def tuple_(*xs: Instruction) -> Shape:
    return tuple_shape(*(x.shape for x in xs))


def get_tuple_element(x: Instruction, index: int) -> Shape:
    if not x.is_tuple or not 0 <= index < len(x.elements):
        fail("get-tuple-element", f"no element {index}", x)
    return x.elements[index]


def first(x: Instruction, *rest: Instruction, **attrs: Any) -> Shape:
    """The first operand's shape."""
    return x.shape


def dimension_size(
    op: str,
    shape: Callable[[Instruction], Shape],
    x: Instruction,
    *rest: Instruction,
    dimensions: Ints,
) -> Shape:
    array(op, x, *rest)
    in_range(op, "dimensions", dimensions, x.rank, x)
    if any(r.shape != Shape("s32") for r in rest):
        fail(op, "the size must be s32[]", x, *rest)
    return shape(x)


# Collectives


def _group_size(op: str, replica_groups: tuple[Ints, ...], *operands: Instruction) -> int:
    if not replica_groups:
        fail(op, "empty replica_groups do not determine the shape; give one", *operands)
    return len(replica_groups[0])


def all_gather(
    *xs: Instruction,
    dimensions: Ints,
    replica_groups: tuple[Ints, ...] = (),
    **attrs: Any,
) -> Shape:
    array("all-gather", *xs)
    (d,) = dimensions
    n = _group_size("all-gather", replica_groups, *xs)
    return result(
        [x.shape.with_dims(s * n if i == d else s for i, s in enumerate(x.dims)) for x in xs]
    )


def reduce_scatter(
    *xs: Instruction,
    dimensions: Ints,
    replica_groups: tuple[Ints, ...] = (),
    **attrs: Any,
) -> Shape:
    array("reduce-scatter", *xs)
    (d,) = dimensions
    n = _group_size("reduce-scatter", replica_groups, *xs)
    for x in xs:
        if known(x.dims[d]) and x.dims[d] % n:
            fail("reduce-scatter", f"size {x.dims[d]} is not divisible by {n}", x)
    return result(
        [x.shape.with_dims(s // n if i == d else s for i, s in enumerate(x.dims)) for x in xs]
    )


def same_all(*xs: Instruction, **attrs: Any) -> Shape:
    """The operands' shapes: one array, or a tuple of several."""
    return result([plain(x.shape) for x in xs])


def all_to_all(*xs: Instruction, dimensions: Ints = (), **attrs: Any) -> Shape:
    """With a dimension the array is split along it and the pieces exchanged in place; without,
    operand i goes to peer i."""
    array("all-to-all", *xs)
    if dimensions and len(xs) != 1:
        fail("all-to-all", "takes one operand when split along a dimension", *xs)
    return plain(xs[0].shape) if dimensions else tuple_shape(*(plain(x.shape) for x in xs))


def started(rule: Callable[..., Shape], *xs: Instruction, **attrs: Any) -> Shape:
    """`-start` of a collective: (operands, results)."""
    return tuple_shape(result([x.shape for x in xs]), rule(*xs, **attrs))


def finished(op: str, element: int, x: Instruction, **attrs: Any) -> Shape:
    """`-done`: element of the `-start` tuple."""
    if not x.is_tuple or len(x.elements) <= element:
        fail(op, "takes the result of the matching -start", x)
    return x.elements[element]


def async_start(*xs: Instruction, calls: Computation, **attrs: Any) -> Shape:
    root = applies("async-start", calls, [x.shape for x in xs])
    return tuple_shape(tuple_shape(*(x.shape for x in xs)), root, U32)


def tokens(*xs: Instruction, **attrs: Any) -> Shape:
    return TOKEN


def constant_u32() -> Shape:
    return U32


def send(x: Instruction, token: Instruction, **attrs: Any) -> Shape:
    return tuple_shape(x.shape, U32, TOKEN)


def recv_done(x: Instruction, **attrs: Any) -> Shape:
    return tuple_shape(finished("recv-done", 0, x), TOKEN)


def product(sizes: Iterable[N]) -> N:
    return math.prod(sizes)
