"""Operations whose sizes are operands. The operands are followed back to constants and sizes of
arrays (`sizes_of`), so that the result has symbolic sizes and the operation becomes its static
form; sizes that depend on data are an error."""

from ..ir import Shape, Size, WindowDim, build as b
from .converter import Context, Made, rule, unpacked
from .ops import broadcast_in_dim, convolution, gather_attributes, pairs, rng_bit_generator
from .sizes import sizes_of
from .types import UNKNOWN


def _sizes(c: Context, operand: int) -> list[Size]:
    found = sizes_of(c.x[operand], c.converter.known)
    if found is None:
        raise c.error(
            f"operand {operand} is not a function of constants and array sizes; sizes that depend"
            " on data are not supported"
        )
    return found


def _result_dims(c: Context, operand: int) -> list[Size]:
    """Sizes of the result: what the type says, else the shape operand."""
    declared = c.types[0].shape.dims
    if UNKNOWN not in declared:
        return list(declared)
    return [d if d != UNKNOWN else s for d, s in zip(declared, _sizes(c, operand), strict=True)]


@rule("dynamic_broadcast_in_dim")
def _dynamic_broadcast_in_dim(c: Context) -> Made:
    return broadcast_in_dim(c.x[0], _result_dims(c, 1), c.ints("broadcast_dimensions", "dims"))


@rule("dynamic_reshape")
def _dynamic_reshape(c: Context) -> Made:
    dims = _result_dims(c, 1)
    if dims.count(-1) == 1:
        rest: Size = 1
        for d in dims:
            rest = rest * d if d != -1 else rest
        dims = [c.x[0].size // rest if d == -1 else d for d in dims]
    return b.reshape(c.x[0], dims)


@rule("dynamic_iota")
def _dynamic_iota(c: Context) -> Made:
    return b.iota(c.dtype, _result_dims(c, 0), c.integer("iota_dimension", "dim"))


@rule("real_dynamic_slice")
def _real_dynamic_slice(c: Context) -> Made:
    x, start, limit, _ = c.x
    if (
        sizes_of(start, c.converter.known) is not None
        or limit.op != "add"
        or start not in limit.operands
    ):
        starts = _sizes(c, 1)
        limits = _sizes(c, 2)
        return b.slice_(x, starts, limits, [s for s in _sizes(c, 3) if isinstance(s, int)])
    # [start : start + sizes] with a start that depends on data
    sizes = sizes_of(limit.operands[1 - limit.operands.index(start)], c.converter.known)
    if sizes is None or any(s != 1 for s in _sizes(c, 3)):
        raise c.error("the sizes of its result depend on data")
    return b.dynamic_slice(
        x,
        [b.reshape(b.slice_(start, (i,), (i + 1,)), ()) for i in range(x.rank)],
        sizes,
    )


@rule("dynamic_pad")
def _dynamic_pad(c: Context) -> Made:
    return b.pad(c.x[0], c.x[1], list(zip(*(_sizes(c, i) for i in (2, 3, 4)), strict=True)))


@rule("dynamic_gather")
def _dynamic_gather(c: Context) -> Made:
    return b.gather(c.x[0], c.x[1], slice_sizes=_sizes(c, 2), **gather_attributes(c))


@rule("dynamic_conv")
def _dynamic_conv(c: Context) -> Made:
    return convolution(c, pairs(_sizes(c, 2)))


@rule("dynamic_reduce_window")
def _dynamic_reduce_window(c: Context) -> Made:
    """`custom_call @stablehlo.dynamic_reduce_window(inputs, inits, sizes, strides, base dilations,
    window dilations, padding)`."""
    count = (len(c.x) - 5) // 2
    columns = [_sizes(c, 2 * count + i) for i in range(5)]
    window = tuple(
        WindowDim(*row[:2], *pad, *row[2:])
        for *row, pad in zip(*columns[:4], pairs(columns[4]), strict=True)
    )
    reducer = c.attr("called_computations")[0].name
    arrays = c.x[:count]
    inits = c.x[count : 2 * count]
    scalars = [Shape(x.dtype) for x in inits]
    return unpacked(
        b.reduce_window(arrays, inits, window, c.converter.function(c, reducer, scalars * 2)),
        count,
    )


@rule("dynamic_rng_bit_generator")
def _dynamic_rng_bit_generator(c: Context) -> Made:
    return rng_bit_generator(c, c.types[1].shape.with_dims(_sizes(c, 1)))


@rule("dynamic_top_k")
def _dynamic_top_k(c: Context) -> Made:
    (k,) = _sizes(c, 1)
    if not isinstance(k, int):
        raise c.error("its k must be a number")
    return unpacked(b.topk(c.x[0], k), 2)
