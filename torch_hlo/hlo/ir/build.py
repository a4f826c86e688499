"""Builders with the opcode's name (`-` becomes `_`, Python words get a trailing `_`).

    x = parameter(0, Shape("f32", (4, 3)))
    y = reduce(multiply(x, x), constant(0.0, "f32"), (1,), "add")     # f32[4]

Operands must fit exactly: nothing promotes or broadcasts by itself. Builders of identities
(`reshape` to the same dims, …) return their operand. All raise ShapeError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .dim import Size
from .infer import ShapeError, fail
from .instruction import Computation, Instruction
from .intern import instr, replace
from .literal import Literal, literal
from .opcodes import OPCODES
from .shape import DTYPES, Shape, tuple_shape
from .window import Window, WindowDim

Reducer = Computation | str
Dims = Sequence[Size]


def _pointwise(op: str, arity: int) -> Callable[..., Instruction]:
    def build(*operands: Instruction) -> Instruction:
        return instr(op, operands)

    build.__name__ = op.replace("-", "_")
    build.__doc__ = f"`{op}` of {arity} operand{'s' * (arity > 1)} of equal shape."
    return build


_PYTHON_WORDS = frozenset("abs and complex not or".split())
# Every pointwise opcode without attributes has its builder from its row: `add`, `erf_inv`, `not_`.
for _row in OPCODES.values():
    if "pointwise" in _row.traits and _row.check is None and not _row.attrs:
        _name = _row.name.replace("-", "_") + "_" * (_row.name in _PYTHON_WORDS)
        globals()[_name] = _pointwise(_row.name, _row.arity or 0)
if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Instruction]: ...


copy = _pointwise("copy", 1)
opt_barrier = _pointwise("opt-barrier", 1)


def compare(x: Instruction, y: Instruction, direction: str) -> Instruction:
    """pred; `direction` is EQ NE LT LE GT GE."""
    return instr("compare", (x, y), direction=direction)


def select(pred: Instruction, x: Instruction, y: Instruction) -> Instruction:
    """`x` where `pred`, else `y`; all of the same dims."""
    return instr("select", (pred, x, y))


def clamp(low: Instruction, x: Instruction, high: Instruction) -> Instruction:
    """min(max(x, low), high); bounds are scalars or shaped like `x`."""
    return instr("clamp", (low, x, high))


def reduce_precision(x: Instruction, exponent_bits: int, mantissa_bits: int) -> Instruction:
    return instr("reduce-precision", (x,), exponent_bits=exponent_bits, mantissa_bits=mantissa_bits)


def convert(x: Instruction, dtype: str) -> Instruction:
    """`x` with another element type; itself when it has it."""
    return x if x.dtype == dtype else instr("convert", (x,), x.shape.with_dtype(dtype))


def bitcast_convert(x: Instruction, dtype: str) -> Instruction:
    """The bits of `x` as `dtype`: narrower appends a dimension, wider drops the innermost one."""
    if dtype == x.dtype:
        return x
    old = x.bits
    new = DTYPES[dtype].bits
    dims = x.dims if old == new else (*x.dims, old // new) if old > new else x.dims[:-1]
    return _checked("bitcast-convert", (x,), Shape(dtype, dims))


def stochastic_convert(x: Instruction, bits: Instruction, dtype: str) -> Instruction:
    return _checked("stochastic-convert", (x, bits), x.shape.with_dtype(dtype))


def uniform_quantize(
    x: Instruction,
    scale: Instruction,
    zero_point: Instruction,
    dtype: str,
    dimensions: Sequence[int] = (),
) -> Instruction:
    """Integers `round(x / scale) + zero_point`, saturated; scale and zero point per index of
    `dimensions`."""
    return _checked(
        "uniform-quantize",
        (x, scale, zero_point),
        x.shape.with_dtype(dtype),
        dimensions=tuple(dimensions) or None,
    )


def uniform_dequantize(
    x: Instruction,
    scale: Instruction,
    zero_point: Instruction,
    dtype: str = "f32",
    dimensions: Sequence[int] = (),
) -> Instruction:
    """`(x - zero_point) * scale`."""
    return _checked(
        "uniform-dequantize",
        (x, scale, zero_point),
        x.shape.with_dtype(dtype),
        dimensions=tuple(dimensions) or None,
    )


# Inputs


def parameter(index: int, shape: Shape) -> Instruction:
    return instr("parameter", (), shape, index=index)


def constant(value: object, dtype: str) -> Instruction:
    """A scalar, nested list, array or Literal as a constant of `dtype`."""
    if not isinstance(value, Literal):
        value = literal(value, dtype)
    return instr("constant", (), value.shape, literal=value)


def full(value: bool | float, dtype: str, dims: Dims = ()) -> Instruction:
    """Every element `value` (a Python number)."""
    return broadcast(constant(value, dtype), dims, ())


def full_like(x: Instruction, value: bool | float) -> Instruction:
    return full(value, x.dtype, x.dims)


def iota(dtype: str, dims: Dims, dimension: int) -> Instruction:
    """Element i holds its index along `dimension`."""
    return _checked("iota", (), Shape(dtype, tuple(dims)), iota_dimension=dimension)


# Moving elements


def broadcast(x: Instruction, dims: Dims, dimensions: Sequence[int] = ()) -> Instruction:
    """Dimension i of `x` becomes dimension `dimensions[i]` of the result; the others repeat `x`.
    Sizes must be equal."""
    dims = tuple(dims)
    dimensions = tuple(dimensions)
    if dims == x.dims and dimensions == tuple(range(len(dims))):
        return x
    return _checked("broadcast", (x,), Shape(x.dtype, dims), dimensions=dimensions)


def reshape(x: Instruction, dims: Dims) -> Instruction:
    dims = tuple(dims)
    return x if dims == x.dims else _checked("reshape", (x,), Shape(x.dtype, dims))


def transpose(x: Instruction, dimensions: Sequence[int]) -> Instruction:
    """Dimension i of the result is dimension `dimensions[i]` of `x`."""
    dimensions = tuple(dimensions)
    return (
        x if dimensions == tuple(range(x.rank)) else instr("transpose", (x,), dimensions=dimensions)
    )


def slice_(
    x: Instruction,
    starts: Dims,
    limits: Dims,
    strides: Sequence[int] | None = None,
) -> Instruction:
    strides = (1,) * len(starts) if strides is None else strides
    ranges = tuple(zip(starts, limits, strides, strict=True))
    if ranges == tuple((0, n, 1) for n in x.dims):
        return x
    return instr("slice", (x,), slice=ranges)


def pad(
    x: Instruction, value: Instruction, padding: Sequence[tuple[Size, Size, int]]
) -> Instruction:
    """(low, high, interior) per dimension; negative low or high crops."""
    rows = tuple((low, high, interior) for low, high, interior in padding)
    if not any(any(p != 0 for p in row) for row in rows) and len(rows) == x.rank:
        return x
    return instr("pad", (x, value), padding=rows)


def concatenate(xs: Sequence[Instruction], dimension: int) -> Instruction:
    return xs[0] if len(xs) == 1 else instr("concatenate", xs, dimensions=(dimension,))


def reverse(x: Instruction, dimensions: Sequence[int]) -> Instruction:
    return instr("reverse", (x,), dimensions=tuple(dimensions)) if len(dimensions) else x


def dynamic_slice(x: Instruction, starts: Sequence[Instruction], sizes: Dims) -> Instruction:
    """The block of `sizes` at `starts` (integer scalars, clamped so that it lies inside)."""
    return instr("dynamic-slice", (x, *starts), dynamic_slice_sizes=tuple(sizes))


def dynamic_update_slice(
    x: Instruction, update: Instruction, starts: Sequence[Instruction]
) -> Instruction:
    return instr("dynamic-update-slice", (x, update, *starts))


def dynamic_reshape(x: Instruction, sizes: Sequence[Instruction], dims: Dims) -> Instruction:
    return _checked("dynamic-reshape", (x, *sizes), x.shape.with_dims(dims))


def gather(x: Instruction, indices: Instruction, **dims: Any) -> Instruction:
    """XLA's gather; out-of-range start indices are clamped. `dims`: offset_dims, start_index_map,
    index_vector_dim, slice_sizes, and where there are some collapsed_slice_dims,
    operand_batching_dims, start_indices_batching_dims and indices_are_sorted."""
    return instr("gather", (x, indices), **_tuples(dims))


def scatter(
    xs: Instruction | Sequence[Instruction],
    indices: Instruction,
    updates: Instruction | Sequence[Instruction],
    to_apply: Reducer,
    **dims: Any,
) -> Instruction:
    """XLA's scatter: `x[i] = to_apply(x[i], update)`; out-of-range updates are dropped. `to_apply`
    may be an opcode or "second" (overwrite). `dims`: update_window_dims,
    scatter_dims_to_operand_dims, index_vector_dim, and where there are some inserted_window_dims,
    input_batching_dims, scatter_indices_batching_dims, indices_are_sorted and unique_indices."""
    xs = _listed(xs)
    return instr(
        "scatter",
        (*xs, indices, *_listed(updates)),
        to_apply=_reducer(to_apply, xs),
        **_tuples(dims),
    )


def _tuples(attrs: dict[str, Any]) -> dict[str, Any]:
    return {k: v if isinstance(v, int) else tuple(v) for k, v in attrs.items()}


def get_dimension_size(x: Instruction, dimension: int) -> Instruction:
    """s32[]: the size at run time."""
    return instr("get-dimension-size", (x,), dimensions=(dimension,))


# Contractions and reductions


def dot(
    x: Instruction,
    y: Instruction,
    lhs_contract: Sequence[int],
    rhs_contract: Sequence[int],
    lhs_batch: Sequence[int] = (),
    rhs_batch: Sequence[int] = (),
    dtype: str | None = None,
) -> Instruction:
    """Result dims: batch, free of `x`, free of `y`. `dtype`: type to accumulate into and return."""
    attrs: dict[str, Any] = dict(
        lhs_contracting_dims=tuple(lhs_contract),
        rhs_contracting_dims=tuple(rhs_contract),
        lhs_batch_dims=tuple(lhs_batch),
        rhs_batch_dims=tuple(rhs_batch),
    )
    return _with_dtype(instr("dot", (x, y), **attrs), dtype)


def ragged_dot(
    x: Instruction,
    y: Instruction,
    group_sizes: Instruction,
    *,
    dtype: str | None = None,
    **dims: Sequence[int],
) -> Instruction:
    """Rows of `x` are split in consecutive groups of `group_sizes`, each multiplied with its own
    matrix of `y`. `dims`: lhs_contract, rhs_contract, lhs_ragged, and where there are some
    rhs_group, lhs_batch and rhs_batch."""
    names = (name.replace("contract", "contracting") for name in dims)
    attrs: dict[str, Any] = {f"{n}_dims": tuple(d) for n, d in zip(names, dims.values())}
    return _with_dtype(instr("ragged-dot", (x, y, group_sizes), **attrs), dtype)


def convolution(
    x: Instruction,
    kernel: Instruction,
    window: Sequence[WindowDim],
    dim_labels: str,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    dtype: str | None = None,
) -> Instruction:
    """`dim_labels` as in `bf01_oi01->bf01`; one WindowDim per spatial dimension."""
    attrs: dict[str, Any] = dict(
        window=tuple(window),
        dim_labels=dim_labels,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
    )
    return _with_dtype(instr("convolution", (x, kernel), **attrs), dtype)


def reduce(
    x: Instruction | Sequence[Instruction],
    init: Instruction | Sequence[Instruction],
    dimensions: Sequence[int],
    to_apply: Reducer,
) -> Instruction:
    """Fold `dimensions` with `to_apply`, an opcode name or a computation (acc…, element…) -> acc….
    Several arrays give a tuple."""
    xs = _listed(x)
    inits = _listed(init)
    if not len(dimensions) and len(xs) == 1 and isinstance(to_apply, str):
        return xs[0] if xs[0].dtype == inits[0].dtype else convert(xs[0], inits[0].dtype)
    return instr(
        "reduce",
        (*xs, *inits),
        dimensions=tuple(sorted(dimensions)),
        to_apply=_reducer(to_apply, inits),
    )


def reduce_window(
    x: Instruction | Sequence[Instruction],
    init: Instruction | Sequence[Instruction],
    window: Window,
    to_apply: Reducer,
) -> Instruction:
    """`to_apply` over every window position; one WindowDim per dimension of `x`."""
    xs = _listed(x)
    inits = _listed(init)
    return instr(
        "reduce-window",
        (*xs, *inits),
        window=tuple(window),
        to_apply=_reducer(to_apply, inits),
    )


def select_and_scatter(
    x: Instruction,
    source: Instruction,
    init: Instruction,
    window: Window,
    select: Reducer | str,
    scatter: Reducer,
) -> Instruction:
    """Add (`scatter`) each element of `source` at the element of its window that `select` ("GE",
    "LE" or a computation) keeps."""
    if isinstance(select, str):
        select = computation(
            lambda a, b, direction=select: compare(a, b, direction),
            (Shape(x.dtype),) * 2,
            select.lower(),
        )
    return instr(
        "select-and-scatter",
        (x, source, init),
        window=tuple(window),
        select=select,
        scatter=_reducer(scatter, (x,)),
    )


def sort(
    xs: Instruction | Sequence[Instruction],
    dimension: int,
    comparator: Computation | str,
    is_stable: bool = True,
) -> Instruction:
    """Sort along `dimension`. `comparator` gets (a0, b0, a1, b1, …) scalars; "LT" or "GT" compares
    the first array, with floats in total order except that -0 equals 0 and every NaN is the
    largest. Several arrays give a tuple."""
    xs = _listed(xs)
    if isinstance(comparator, str):
        comparator = comparison(comparator, tuple(x.dtype for x in xs))
    return instr("sort", xs, dimensions=(dimension,), to_apply=comparator, is_stable=is_stable)


def topk(x: Instruction, k: int, largest: bool = True) -> Instruction:
    """(values, s32 indices) of the k largest along the last dimension, sorted, ties by index."""
    return instr("topk", (x,), k=k, largest=largest)


def map_(xs: Sequence[Instruction], to_apply: Computation) -> Instruction:
    return instr("map", xs, dimensions=tuple(range(xs[0].rank)), to_apply=to_apply)


def fft(x: Instruction, fft_type: str, fft_length: Dims) -> Instruction:
    """FFT, IFFT, RFFT, IRFFT over the last len(fft_length) dimensions."""
    return instr("fft", (x,), fft_type=fft_type, fft_length=tuple(fft_length))


def cholesky(x: Instruction, lower: bool = True) -> Instruction:
    return instr("cholesky", (x,), lower=lower)


def triangular_solve(
    a: Instruction,
    b: Instruction,
    *,
    left_side: bool = True,
    lower: bool = True,
    unit_diagonal: bool = False,
    transpose_a: str = "NO_TRANSPOSE",
) -> Instruction:
    """op(a) x = b, or x op(a) = b when not left_side."""
    return instr(
        "triangular-solve",
        (a, b),
        left_side=left_side,
        lower=lower,
        unit_diagonal=unit_diagonal,
        transpose_a=transpose_a,
    )


def rng_bit_generator(state: Instruction, algorithm: str, shape: Shape) -> Instruction:
    """(new state, random bits of `shape`); algorithm is rng_philox, rng_three_fry or
    rng_default."""
    return _checked(
        "rng-bit-generator",
        (state,),
        tuple_shape(state.shape, shape),
        algorithm=algorithm,
    )


# Tuples and control flow


def tuple_(*xs: Instruction) -> Instruction:
    return instr("tuple", xs)


def get_tuple_element(x: Instruction, index: int) -> Instruction:
    return x.operands[index] if x.op == "tuple" else instr("get-tuple-element", (x,), index=index)


def while_(condition: Computation, body: Computation, state: Instruction) -> Instruction:
    return instr("while", (state,), condition=condition, body=body)


def conditional(
    index: Instruction,
    branches: Sequence[Computation],
    operands: Sequence[Instruction],
) -> Instruction:
    """Branch `index` (s32[]; out of range is the last) on its operand; with pred[] branch 0 is the
    true one."""
    return instr("conditional", (index, *operands), branch_computations=tuple(branches))


def call(to_apply: Computation, operands: Sequence[Instruction]) -> Instruction:
    return instr("call", operands, to_apply=to_apply)


def kernel(operands: Sequence[Instruction], calls: Computation, config: str) -> Instruction:
    """A fusion that code of its own computes; `config` says which."""
    return instr("fusion", operands, kind="custom", calls=calls, backend_config=config)


def kernel_of(call: Instruction) -> Instruction:
    """The same of a call that says what it computes."""
    return kernel(call.operands, call["to_apply"], call["backend_config"])


def custom_call(
    target: str, operands: Sequence[Instruction], shape: Shape, **attrs: Any
) -> Instruction:
    """Attributes: opaque (str), called_computations, custom_call_has_side_effect, …"""
    return instr("custom-call", operands, shape, custom_call_target=target, **attrs)


def computation(fn: Callable[..., Any], shapes: Sequence[Shape], name: str = "") -> Computation:
    """Trace `fn` on one parameter per shape; a tuple or list result becomes a tuple root."""
    params = tuple(parameter(i, s) for i, s in enumerate(shapes))
    root = fn(*params)
    if isinstance(root, (tuple, list)):
        root = tuple_(*root)
    return Computation(
        name or getattr(fn, "__name__", "").strip("<>") or "computation",
        params,
        root,
    )


@cache
def binary_computation(op: str, dtype: str) -> Computation:
    """The scalar computation (x, y) -> op(x, y); "second" returns y, "first" x."""
    pick = {"first": 0, "second": 1}.get(op)
    scalar = Shape(dtype)
    return computation(
        lambda x, y: instr(op, (x, y)) if pick is None else (x, y)[pick],
        (scalar, scalar),
        f"{op}_{dtype}",
    )


@cache
def comparison(direction: str, dtypes: tuple[str, ...]) -> Computation:
    """Comparator of sort on the first of several arrays: NaNs are the largest and equal, -0 equals
    0."""

    def compare_first(a: Instruction, b: Instruction, *rest: Instruction) -> Instruction:
        if a.kind != "f":
            return compare(a, b, direction)
        if direction in ("GT", "GE"):
            a, b = b, a
        # a < b, or a is a number and b is not.
        only_b_is_nan = instr("and", (compare(a, a, "EQ"), compare(b, b, "NE")))
        return instr("or", (compare(a, b, "LT"), only_b_is_nan))

    if direction not in ("LT", "GT"):
        raise ShapeError(f"sort: the comparator must be LT or GT, got {direction!r}")
    return computation(
        compare_first,
        [Shape(t) for t in dtypes for _ in range(2)],
        f"sort_{direction.lower()}",
    )


def compared(comparator: Computation) -> tuple[int, bool] | None:
    """(which array it looks at, whether the largest comes first) of a comparator of sort that only
    compares one array with < or >."""
    root = comparator.root
    params = comparator.params
    if (
        root.op != "compare"
        or root["direction"] not in ("LT", "GT")
        or any(o not in params for o in root.operands)
    ):
        return None
    a, b = (params.index(o) for o in root.operands)
    if a // 2 != b // 2 or a == b:
        return None
    return a // 2, (root["direction"] == "GT") != (a % 2 == 1)


def lowest(dtype: str) -> float:
    """The identity of maximum as a Python value: -inf, the smallest integer, or False."""
    return _extreme(dtype, "min")


def highest(dtype: str) -> float:
    """The identity of minimum."""
    return _extreme(dtype, "max")


def _extreme(dtype: str, end: str) -> float:
    row = DTYPES[dtype]
    if row.kind == "p":
        return end == "max"
    if row.kind == "f":
        value = np.inf if end == "max" else -np.inf
        if np.isinf(literal(value, dtype).numpy()):
            return value
        # f8e4m3fn, fnuz have no infinity
        return float(_finite(dtype).max() if end == "max" else _finite(dtype).min())
    if row.kind in "su":
        signed = row.kind == "s"
        top = (1 << (row.bits - signed)) - 1
        return top if end == "max" else -(top + 1) if signed else 0
    raise ShapeError(f"{dtype} has no order")


def _finite(dtype: str) -> np.ndarray:
    values = Literal(dtype, (256,), bytes(range(256))).numpy()
    finite: np.ndarray = values[np.isfinite(values)]
    return finite


def _reducer(to_apply: Reducer, inits: Sequence[Instruction]) -> Computation:
    if isinstance(to_apply, str):
        if len(inits) != 1:
            fail("reduce", "several operands need a computation", *inits)
        return binary_computation(to_apply, inits[0].dtype)
    return to_apply


def _listed(x: Instruction | Sequence[Instruction]) -> tuple[Instruction, ...]:
    return (x,) if isinstance(x, Instruction) else tuple(x)


def _with_dtype(x: Instruction, dtype: str | None) -> Instruction:
    return x if dtype is None or dtype == x.dtype else replace(x, shape=x.shape.with_dtype(dtype))


def _checked(op: str, operands: tuple[Instruction, ...], shape: Shape, **attrs: Any) -> Instruction:
    """An opcode whose shape is given, verified on the spot."""
    attrs = {k: v for k, v in attrs.items() if v is not None}
    OPCODES[op].verify(shape, *operands, **attrs)
    return instr(op, operands, shape, **attrs)
