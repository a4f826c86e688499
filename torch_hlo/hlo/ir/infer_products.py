"""Shape rules of products, reductions, sorts, transforms and normalisations; see infer.py."""

from __future__ import annotations

from collections.abc import Sequence

from torch_hlo.frozen import frozen

from .dim import Ints, Size
from .infer import (
    COMPLEX_OF,
    REAL_OF,
    applies,
    array,
    compatible,
    fail,
    in_range,
    larger,
    outside,
    plain,
    result,
    unary,
)
from .instruction import Computation, Instruction
from .shape import DTYPES, Shape, tuple_shape
from .window import Window

# Contractions


def dot(
    x: Instruction,
    y: Instruction,
    *,
    lhs_contracting_dims: Ints = (),
    rhs_contracting_dims: Ints = (),
    lhs_batch_dims: Ints = (),
    rhs_batch_dims: Ints = (),
    rhs_group_dims: Ints = (),
    operand_precision: tuple[str, ...] | None = None,
    op: str = "dot",
) -> Shape:
    """`rhs_group_dims`: of a ragged product (`op`), dimensions that the result lacks."""
    array(op, x, y)
    of_x = lhs_batch_dims + lhs_contracting_dims
    of_y = rhs_batch_dims + rhs_contracting_dims + rhs_group_dims
    in_range(op, "lhs dims", of_x, x.rank, x, y)
    in_range(op, "rhs dims", of_y, y.rank, x, y)
    for what, left, right in (
        ("contracting", lhs_contracting_dims, rhs_contracting_dims),
        ("batch", lhs_batch_dims, rhs_batch_dims),
    ):
        if len(left) != len(right):
            fail(op, f"{len(left)} and {len(right)} {what} dims", x, y)
        for a, b in zip(left, right):
            if x.dims[a] != y.dims[b]:
                fail(op, f"{what} sizes {x.dims[a]} != {y.dims[b]}", x, y)
    batch = [x.dims[d] for d in lhs_batch_dims]
    return Shape(_wider(op, x, y), (*batch, *_others(x, *of_x), *_others(y, *of_y)))


def _others(x: Instruction, *used: int) -> list[Size]:
    """The sizes of the dimensions that are left."""
    return [n for d, n in enumerate(x.dims) if d not in used]


def _wider(op: str, x: Instruction, y: Instruction) -> str:
    a = x.dtype
    b = y.dtype
    if x.kind != y.kind:
        fail(op, "element types are of different kinds", x, y)
    return b if DTYPES[b].bits > DTYPES[a].bits else a


def ragged_dot(
    x: Instruction,
    y: Instruction,
    group_sizes: Instruction,
    *,
    lhs_ragged_dims: Ints,
    **dims: Ints,
) -> Shape:
    array("ragged-dot", group_sizes)
    in_range("ragged-dot", "lhs_ragged_dims", lhs_ragged_dims, x.rank, x, y)
    if len(lhs_ragged_dims) != 1:
        fail("ragged-dot", "takes exactly one ragged dimension", x, y)
    product = dot(x, y, op="ragged-dot", **dims)  # type: ignore[arg-type]
    if lhs_ragged_dims[0] in dims.get("lhs_contracting_dims", ()):
        return product.with_dims((group_sizes.dims[-1], *product.dims))
    return product


@frozen
class ConvDims:
    """Dimension numbers of a convolution: batch, feature and spatial dimensions of lhs, rhs
    (kernel) and output."""

    lhs_batch: int
    lhs_feature: int
    lhs_spatial: Ints
    rhs_input: int
    rhs_output: int
    rhs_spatial: Ints
    out_batch: int
    out_feature: int
    out_spatial: Ints


def conv_dims(dim_labels: str) -> ConvDims:
    """The numbers in `bf01_oi01->bf01`. Raises ShapeError."""
    lhs, _, rest = dim_labels.partition("_")
    rhs, _, out = rest.partition("->")
    n = len(lhs) - 2
    digits = [str(i) for i in range(n)]
    if any(
        sorted(text) != sorted(names + digits)
        for text, names in (
            (lhs, ["b", "f"]),
            (rhs, ["i", "o"]),
            (out, ["b", "f"]),
        )
    ):
        fail("convolution", f"bad dim_labels {dim_labels!r}, expected e.g. bf01_oi01->bf01")

    def spatial(text: str) -> Ints:
        return tuple(text.index(d) for d in digits)

    return ConvDims(
        lhs.index("b"),
        lhs.index("f"),
        spatial(lhs),
        rhs.index("i"),
        rhs.index("o"),
        spatial(rhs),
        out.index("b"),
        out.index("f"),
        spatial(out),
    )


def _groups_fit(
    x: Instruction,
    kernel: Instruction,
    n: ConvDims,
    feature_groups: int,
    batch_groups: int,
) -> None:
    if feature_groups > 1 and batch_groups > 1:
        text = "only one of feature_group_count and batch_group_count may exceed 1"
        fail("convolution", text, x, kernel)
    features = x.dims[n.lhs_feature]
    batch = x.dims[n.lhs_batch]
    outputs = kernel.dims[n.rhs_output]
    expected = kernel.dims[n.rhs_input] * feature_groups
    if features != expected:
        text = f"{features} input features, the kernel expects {expected}"
        fail("convolution", text, x, kernel)
    if outputs % feature_groups != 0 or outputs % batch_groups != 0 or batch % batch_groups != 0:
        text = "batch or output features are not divisible by the group count"
        fail("convolution", text, x, kernel)


def convolution(
    x: Instruction,
    kernel: Instruction,
    *,
    window: Window = (),
    dim_labels: str,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    operand_precision: tuple[str, ...] | None = None,
) -> Shape:
    array("convolution", x, kernel)
    n = conv_dims(dim_labels)
    rank = len(n.lhs_spatial) + 2
    if x.rank != rank or kernel.rank != rank or len(window) != rank - 2:
        fail(
            "convolution",
            f"dim_labels {dim_labels} and a window of {len(window)} dimensions do not fit",
            x,
            kernel,
        )
    _groups_fit(x, kernel, n, feature_group_count, batch_group_count)
    dims: list[Size] = [0] * rank
    dims[n.out_batch] = x.dims[n.lhs_batch] // batch_group_count
    dims[n.out_feature] = kernel.dims[n.rhs_output]
    for w, i, k, o in zip(window, n.lhs_spatial, n.rhs_spatial, n.out_spatial):
        if w.size != kernel.dims[k]:
            fail("convolution", f"window size {w.size} != kernel size {kernel.dims[k]}", x, kernel)
        dims[o] = w.output_size(x.dims[i])
    return Shape(_wider("convolution", x, kernel), tuple(dims))


# Reductions and called computations


def _reducer(
    op: str, operands: Sequence[Instruction], to_apply: Computation
) -> tuple[Sequence[Instruction], tuple[Shape, ...]]:
    """(arrays, scalar result shapes) of a variadic reduction."""
    if not operands or len(operands) % 2:
        fail(op, "takes n operands and n initial values", *operands)
    n = len(operands) // 2
    xs = operands[:n]
    inits = operands[n:]
    array(op, *operands)
    for x, i in zip(xs, inits):
        if x.dims != xs[0].dims or i.dims:
            fail(op, "operands must have equal dims and initial values must be scalars", *operands)
    if not isinstance(to_apply, Computation) or len(to_apply.params) != 2 * n:
        fail(op, f"to_apply must take {2 * n} scalars", *operands)
    # The accumulator has the initial value's type; the element may be narrower only if to_apply
    # says so.
    takes = [Shape(i.dtype) for i in inits] + [Shape(x.dtype) for x in xs]
    root = applies(op, to_apply, takes)
    shapes = root.elements if root.is_tuple else (root,)
    if len(shapes) != n or any(s.dims or s.dtype != i.dtype for s, i in zip(shapes, inits)):
        fail(op, f"to_apply returns {root}, expected the type of the initial values", *operands)
    return xs, shapes


def reduce(*operands: Instruction, dimensions: Ints, to_apply: Computation) -> Shape:
    xs, scalars = _reducer("reduce", operands, to_apply)
    in_range("reduce", "dimensions", dimensions, xs[0].rank, *operands)
    dims = tuple(s for d, s in enumerate(xs[0].dims) if d not in dimensions)
    return result([Shape(s.dtype, dims) for s in scalars])


def reduce_window(*operands: Instruction, window: Window = (), to_apply: Computation) -> Shape:
    xs, scalars = _reducer("reduce-window", operands, to_apply)
    dims = _windowed("reduce-window", window, xs[0])
    return result([Shape(s.dtype, dims) for s in scalars])


def _windowed(op: str, window: Window, x: Instruction) -> tuple[Size, ...]:
    if len(window) != x.rank:
        fail(op, f"a window of {len(window)} dimensions for rank {x.rank}", x)
    if any(
        larger(1, w.size) or w.stride < 1 or w.base_dilation < 1 or w.window_dilation < 1
        for w in window
    ):
        fail(op, f"window sizes, strides and dilations must be positive: {window}", x)
    return tuple(w.output_size(s) for w, s in zip(window, x.dims))


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
    if source.dims != dims:
        fail("select-and-scatter", f"the source must have dims {list(dims)}", x, source, init)
    scalar = Shape(x.dtype)
    if applies("select-and-scatter", select, (scalar, scalar)).dtype != "pred":
        fail("select-and-scatter", "select must return pred", x, source, init)
    if (
        applies("select-and-scatter", scatter, (Shape(init.dtype), Shape(source.dtype))).dtype
        != x.dtype
        or init.dims
    ):
        fail(
            "select-and-scatter",
            "scatter and the initial value must have the operand's type",
            x,
            source,
            init,
        )
    return plain(x.shape)


def _of_equal_dims(op: str, *xs: Instruction) -> None:
    array(op, *xs)
    if not xs or any(x.dims != xs[0].dims for x in xs):
        fail(op, "takes arrays of equal dims", *xs)


def sort(
    *xs: Instruction,
    dimensions: Ints,
    to_apply: Computation,
    is_stable: bool = False,
) -> Shape:
    _of_equal_dims("sort", *xs)
    in_range("sort", "dimension", dimensions, xs[0].rank, *xs)
    if len(dimensions) != 1:
        fail("sort", "sorts along one dimension", *xs)
    scalars = [Shape(x.dtype) for x in xs for _ in range(2)]
    if applies("sort", to_apply, scalars) != Shape("pred"):
        fail("sort", "the comparator must return pred[]", *xs)
    return result([plain(x.shape) for x in xs])


def topk(x: Instruction, k: int, largest: bool = True) -> Shape:
    array("topk", x)
    if not x.rank or outside(k, x.dims[-1]):
        fail("topk", f"k={k} does not fit the last dimension", x)
    dims = (*x.dims[:-1], k)
    return tuple_shape(x.shape.with_dims(dims), Shape("s32", dims))


def map_(*xs: Instruction, dimensions: Ints = (), to_apply: Computation) -> Shape:
    _of_equal_dims("map", *xs)
    root = applies("map", to_apply, [Shape(x.dtype) for x in xs])
    return Shape(root.dtype, xs[0].dims)


def call(*operands: Instruction, to_apply: Computation) -> Shape:
    return applies("call", to_apply, [o.shape for o in operands])


def fusion(*operands: Instruction, calls: Computation, kind: str | None = None) -> Shape:
    return applies("fusion", calls, [o.shape for o in operands])


def while_(
    state: Instruction,
    condition: Computation,
    body: Computation,
    independent: int = 0,
) -> Shape:
    """`independent`: so many turns, counted by element 0 from 0 on, that read and write nothing
    which another one writes; 0 when they may."""
    if applies("while", condition, [state.shape]) != Shape("pred"):
        fail("while", "the condition must return pred[]", state)
    if not compatible(applies("while", body, [state.shape]), state.shape):
        fail("while", f"the body returns {body.root.shape}", state)
    return state.shape


def conditional(
    index: Instruction,
    *operands: Instruction,
    branch_computations: tuple[Computation, ...],
) -> Shape:
    """A pred index runs branch 0 when true; an s32 index out of range runs the last branch."""
    if index.shape not in (Shape("pred"), Shape("s32")):
        fail("conditional", "the branch index must be pred[] or s32[]", index)
    if index.dtype == "pred" and len(branch_computations) != 2 or not branch_computations:
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


# Linear algebra, signal, normalisation


def fft(x: Instruction, fft_type: str, fft_length: Ints) -> Shape:
    array("fft", x)
    n = len(fft_length)
    if fft_type not in ("FFT", "IFFT", "RFFT", "IRFFT"):
        fail("fft", f"bad fft_type {fft_type!r}", x)
    if not 1 <= n <= min(3, x.rank):
        fail("fft", f"fft_length {list(fft_length)} does not fit (1 to 3 innermost dimensions)", x)
    if x.kind != ("f" if fft_type == "RFFT" else "c") or x.dtype in (
        "f16",
        "bf16",
    ):
        fail("fft", f"{fft_type} is not defined on {x.dtype}", x)
    sizes = list(fft_length)
    half = sizes[-1] // 2 + 1
    takes = sizes[:-1] + [half] if fft_type == "IRFFT" else sizes
    if list(x.dims[-n:]) != takes:
        fail("fft", f"{fft_type} of length {sizes} takes inner dims {takes}", x)
    outer = x.dims[:-n]
    if fft_type == "RFFT":
        return Shape(COMPLEX_OF[x.dtype], (*outer, *sizes[:-1], half))
    return Shape(REAL_OF[x.dtype] if fft_type == "IRFFT" else x.dtype, (*outer, *sizes))


def cholesky(x: Instruction, lower: bool = False) -> Shape:
    shape = unary("cholesky", "fc", x)
    if shape.rank < 2 or shape.dims[-1] != shape.dims[-2]:
        fail("cholesky", "takes square matrices", x)
    return shape


def triangular_solve(
    a: Instruction,
    b: Instruction,
    *,
    left_side: bool = False,
    lower: bool = False,
    unit_diagonal: bool = False,
    transpose_a: str = "NO_TRANSPOSE",
) -> Shape:
    array("triangular-solve", a, b)
    if a.dtype != b.dtype or a.kind not in "fc":
        fail("triangular-solve", "operands must be floating-point or complex of one type", a, b)
    if transpose_a not in ("NO_TRANSPOSE", "TRANSPOSE", "ADJOINT"):
        fail("triangular-solve", f"bad transpose_a {transpose_a!r}", a, b)
    rank = a.rank
    if rank < 2 or b.rank != rank or a.dims[-1] != a.dims[-2] or a.dims[:-2] != b.dims[:-2]:
        fail(
            "triangular-solve",
            "takes square matrices and right-hand sides with equal batch dims",
            a,
            b,
        )
    if a.dims[-1] != b.dims[-2 if left_side else -1]:
        fail("triangular-solve", f"sizes differ with left_side={left_side}", a, b)
    return plain(b.shape)


def _features(op: str, x: Instruction, stats: Sequence[Instruction], feature_index: int) -> Shape:
    array(op, x, *stats)
    in_range(op, "feature_index", (feature_index,), x.rank, x)
    if x.kind != "f" or any(s.dims != (x.dims[feature_index],) or s.kind != "f" for s in stats):
        fail(
            op,
            f"scale and statistics must have one value per feature (dimension {feature_index})",
            x,
            *stats,
        )
    return plain(x.shape)


def batch_norm_training(
    x: Instruction,
    scale: Instruction,
    offset: Instruction,
    epsilon: float,
    feature_index: int,
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
    if grad.dims != x.dims:
        fail("batch-norm-grad", "the gradient must have the operand's dims", x, grad)
    return tuple_shape(shape, plain(scale.shape), plain(scale.shape))
