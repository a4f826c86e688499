"""Operations whose sizes are operands. The operands are followed back to constants and sizes of arrays (`sizes_of`), so that the
result has symbolic sizes and the operation becomes its static form; sizes that depend on data are an error."""
from __future__ import annotations

from collections.abc import Callable

from torch_hlo.hlo import build as b
from torch_hlo.hlo.dim import Size, dim_max, dim_min
from torch_hlo.hlo.ir import Instruction, instr
from torch_hlo.hlo.stablehlo.convert import Context, rule
from torch_hlo.hlo.stablehlo.ops import broadcast_in_dim, conv_window, dim_labels, gather_attributes, pairs
from torch_hlo.hlo.stablehlo.types import UNKNOWN

MAX_SIZES = 64
_ARITHMETIC: dict[str, Callable[[Size, Size], Size]] = {
    "add": lambda x, y: x + y, "subtract": lambda x, y: x - y, "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x // y, "remainder": lambda x, y: x % y, "maximum": dim_max, "minimum": dim_min,
}  # fmt: skip


def sizes_of(x: Instruction, depth: int = 0) -> list[Size] | None:
    """The elements of an integer scalar or vector as sizes; None when they depend on data."""
    shape = x.shape
    if depth > 200 or shape.is_tuple or shape.kind not in "su" or shape.rank > 1 or not isinstance(shape.size, int) or shape.size > MAX_SIZES:
        return None
    if x.op == "constant":
        return [int(v) for v in x["literal"].numpy().ravel()]
    if x.op == "get-dimension-size":
        return [x.operands[0].shape.dims[x["dimensions"][0]]]
    if x.op == "iota":
        return list(range(shape.dims[0]))
    parts = [sizes_of(o, depth + 1) for o in x.operands]
    if not parts or any(p is None for p in parts):
        return None
    if x.op in ("reshape", "convert", "copy"):
        return parts[0]
    if x.op == "broadcast":
        return parts[0] * shape.size if x.operands[0].shape.rank == 0 else parts[0]
    if x.op == "concatenate":
        return [size for part in parts for size in part]
    if x.op == "slice":
        return parts[0][slice(*x["slice"][0])]
    if x.op in _ARITHMETIC:
        try:
            return [_ARITHMETIC[x.op](p, q) for p, q in zip(*parts, strict=True)]
        except ZeroDivisionError:
            return None
    return None


def _sizes(c: Context, operand: int) -> list[Size]:
    found = sizes_of(c.x[operand])
    if found is None:
        raise c.error(f"operand {operand} is not a function of constants and array sizes; sizes that depend on data are not supported")
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
    return b.slice_(c.x[0], *(_sizes(c, i) for i in (1, 2, 3)))


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
