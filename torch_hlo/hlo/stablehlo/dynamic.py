"""Operations whose sizes are operands. The operands are followed back to constants and sizes of arrays (`sizes_of`), so that the
result has symbolic sizes and the operation becomes its static form; sizes that depend on data are an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch_hlo.hlo import build as b
from torch_hlo.hlo.dim import Size, dim_max, dim_min
from torch_hlo.hlo.ir import Instruction, instr
from torch_hlo.hlo.shape import Shape
from torch_hlo.hlo.stablehlo.convert import Context, rule, unpacked
from torch_hlo.hlo.stablehlo.ops import (
    broadcast_in_dim,
    conv_window,
    dim_labels,
    gather_attributes,
    pairs,
)
from torch_hlo.hlo.stablehlo.types import UNKNOWN
from torch_hlo.hlo.window import WindowDim

MAX_SIZES = 64
_ARITHMETIC: dict[str, Callable[[Size, Size], Size]] = {
    "add": lambda x, y: x + y, "subtract": lambda x, y: x - y, "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x // y, "remainder": lambda x, y: x % y, "maximum": dim_max, "minimum": dim_min,
}  # fmt: skip


def sizes_of(
    x: Instruction, known: Mapping[Instruction, list[Size]], depth: int = 0
) -> list[Size] | None:
    """The elements of a small integer array, in order, as sizes; None when they depend on data. `known` says more than the graph."""
    shape = x.shape
    if (
        depth > 200
        or shape.is_tuple
        or shape.kind not in "su"
        or not isinstance(shape.size, int)
        or shape.size > MAX_SIZES
    ):
        return None
    if x in known:
        return known[x]
    if x.op == "constant":
        return [int(v) for v in x["literal"].numpy().ravel()]
    if x.op == "get-dimension-size":
        return [x.operands[0].shape.dims[x["dimensions"][0]]]
    if x.op == "iota" and shape.rank == 1:
        return list(range(shape.dims[0]))
    parts = [sizes_of(o, known, depth + 1) for o in x.operands]
    if not parts or any(p is None for p in parts):
        return None
    if x.op in ("reshape", "convert", "copy"):
        return parts[0]
    if x.op == "broadcast":
        return (
            parts[0] * shape.size
            if x.operands[0].shape.rank == 0
            else parts[0]
            if x.operands[0].shape.dims == shape.dims
            else None
        )
    if x.op == "concatenate" and x["dimensions"] == (0,):
        return [size for part in parts for size in part]
    if x.op == "slice" and shape.rank == 1:
        return parts[0][slice(*x["slice"][0])]
    if x.op in _ARITHMETIC:
        try:
            return [_ARITHMETIC[x.op](p, q) for p, q in zip(*parts, strict=True)]
        except ZeroDivisionError:
            return None
    return None


def _sizes(c: Context, operand: int) -> list[Size]:
    found = sizes_of(c.x[operand], c.converter.known)
    if found is None:
        raise c.error(
            f"operand {operand} is not a function of constants and array sizes; sizes that depend on data are not supported"
        )
    return found


def _result_dims(c: Context, operand: int) -> list[Size]:
    """Sizes of the result: what the type says, else the shape operand."""
    declared = c.types[0].shape.dims
    if UNKNOWN not in declared:
        return list(declared)
    return [d if d != UNKNOWN else s for d, s in zip(declared, _sizes(c, operand), strict=True)]


@rule("dynamic_broadcast_in_dim")
def _dynamic_broadcast_in_dim(c: Context):
    return broadcast_in_dim(c.x[0], _result_dims(c, 1), c.ints("broadcast_dimensions", "dims"))


@rule("dynamic_reshape")
def _dynamic_reshape(c: Context):
    dims = _result_dims(c, 1)
    if dims.count(-1) == 1:
        rest: Size = 1
        for d in dims:
            rest = rest * d if d != -1 else rest
        dims = [c.x[0].shape.size // rest if d == -1 else d for d in dims]
    return b.reshape(c.x[0], dims)


@rule("dynamic_iota")
def _dynamic_iota(c: Context):
    return b.iota(c.types[0].shape.dtype, _result_dims(c, 0), c.int("iota_dimension", "dim"))


@rule("real_dynamic_slice")
def _real_dynamic_slice(c: Context):
    x, start, limit, _ = c.x
    if (
        sizes_of(start, c.converter.known) is not None
        or limit.op != "add"
        or start not in limit.operands
    ):
        return b.slice_(x, *(_sizes(c, i) for i in (1, 2, 3)))
    # [start : start + sizes] with a start that depends on data
    sizes = sizes_of(limit.operands[1 - limit.operands.index(start)], c.converter.known)
    if sizes is None or any(s != 1 for s in _sizes(c, 3)):
        raise c.error("the sizes of its result depend on data")
    return b.dynamic_slice(
        x, [b.reshape(b.slice_(start, (i,), (i + 1,)), ()) for i in range(x.shape.rank)], sizes
    )


@rule("dynamic_pad")
def _dynamic_pad(c: Context):
    return b.pad(c.x[0], c.x[1], list(zip(*(_sizes(c, i) for i in (2, 3, 4)), strict=True)))


@rule("dynamic_gather")
def _dynamic_gather(c: Context):
    return b.gather(c.x[0], c.x[1], slice_sizes=_sizes(c, 2), **gather_attributes(c))


@rule("dynamic_conv")
def _dynamic_conv(c: Context):
    labels = dim_labels(c)
    window = conv_window(c, labels, pairs(_sizes(c, 2)))
    return instr(
        "convolution", tuple(c.x[:2]), window=window, dim_labels=labels, feature_group_count=c.int("feature_group_count", default=1),
        batch_group_count=c.int("batch_group_count", default=1),
    )  # fmt: skip


@rule("dynamic_reduce_window")
def _dynamic_reduce_window(c: Context):
    """`custom_call @stablehlo.dynamic_reduce_window(inputs, inits, sizes, strides, base dilations, window dilations, padding)`."""
    count = (len(c.x) - 5) // 2
    columns = [_sizes(c, 2 * count + i) for i in range(5)]
    window = tuple(
        WindowDim(*row[:2], *pad, *row[2:])
        for *row, pad in zip(*columns[:4], pairs(columns[4]), strict=True)
    )
    reducer = c.attr("called_computations")[0].name
    arrays, inits = c.x[:count], c.x[count : 2 * count]
    scalars = [Shape(x.shape.dtype) for x in inits]
    return unpacked(
        b.reduce_window(arrays, inits, window, c.converter.function(c, reducer, scalars * 2)), count
    )


@rule("dynamic_rng_bit_generator")
def _dynamic_rng_bit_generator(c: Context):
    algorithm = "rng_" + str(c.attr("rng_algorithm")).lower()
    return unpacked(
        b.rng_bit_generator(c.x[0], algorithm, Shape(c.types[1].shape.dtype, tuple(_sizes(c, 1)))),
        2,
    )


@rule("dynamic_top_k")
def _dynamic_top_k(c: Context):
    return unpacked(b.topk(c.x[0], _sizes(c, 1)[0]), 2)
