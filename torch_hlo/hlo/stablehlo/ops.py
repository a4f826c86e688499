"""Rules of the StableHLO operations. Attribute names: the generic form's, then the pretty
form's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..ir import (
    IGNORED,
    OPCODES,
    Dim,
    Instruction,
    Ints,
    Shape,
    Size,
    WindowDim,
    build as b,
    has_effect,
    instr,
)
from ..ir.infer import result
from .attributes import Dense, Symbol, dense_literal, integers
from .converter import RULES, Context, Made, dequantized, quantized, rule, unpacked
from .types import UNKNOWN


def _plain(opcode: str, c: Context) -> Instruction:
    return instr(opcode, c.x)


@rule("select")
def _select(c: Context) -> Made:
    pred, x, y = c.x
    return b.select(pred if pred.dims == x.dims else b.broadcast(pred, x.dims), x, y)


def compared(c: Context, x: Instruction, y: Instruction) -> Instruction:
    kind = c.attr("compare_type", "word2")
    return instr(
        "compare",
        (x, y),
        direction=c.attr("comparison_direction", "word"),
        type=kind if kind == "TOTALORDER" else None,
    )


@rule("reduce_precision")
def _reduce_precision(c: Context) -> Made:
    found = re.fullmatch(r"e(\d+)m(\d+)", str(c.attr("format", default="")))
    exponent, mantissa = (
        map(int, found.groups())
        if found
        else (c.integer("exponent_bits"), c.integer("mantissa_bits"))
    )
    return b.reduce_precision(c.x[0], exponent, mantissa)


@rule("convert")
def _convert(c: Context) -> Made:
    x = c.x[0]
    dtype = c.dtype
    return b.convert(b.real(x) if x.kind == "c" and dtype == "pred" else x, dtype)


@rule("bitcast_convert")
def _bitcast_convert(c: Context) -> Made:
    """A quantized value is its stored integer."""
    q = c.types[0].quantized
    dtype = q.storage if q is not None else c.dtype
    return c.x[0] if c.x[0].dtype == dtype else b.bitcast_convert(c.x[0], dtype)


@rule("maximum", "minimum")
def _extremum(c: Context) -> Made:
    """Complex numbers are ordered by their real parts, then by the imaginary ones."""
    x, y = c.x
    if x.kind != "c":
        return instr(c.op.name.rpartition(".")[2], (x, y))
    direction = "GT" if c.op.name.endswith("maximum") else "LT"
    first = b.compare(b.real(x), b.real(y), direction)
    tie = b.and_(b.compare(b.real(x), b.real(y), "EQ"), b.compare(b.imag(x), b.imag(y), direction))
    return b.select(b.or_(first, tie), x, y)


@rule("uniform_quantize")
def _uniform_quantize(c: Context) -> Made:
    q = c.types[0].quantized
    if q is None:
        raise c.error("its result type is not quantized")
    x = dequantized(c.x[0], c.kinds[0]) if c.kinds[0] is not None else c.x[0]
    return quantized(x, q)


@rule("uniform_dequantize")
def _uniform_dequantize(c: Context) -> Made:
    if c.kinds[0] is None:
        raise c.error("its operand is not quantized")
    return dequantized(c.x[0], c.kinds[0])


@rule("constant")
def _constant(c: Context) -> Made:
    value = c.attr("value")
    if not isinstance(value, Dense):
        raise c.error("expected dense<…>")
    found, splat = dense_literal(c.converter.s, value)
    scalar = b.constant(found, found.dtype)
    return b.broadcast(scalar, value.type.shape.dims) if splat else scalar


@rule("iota")
def _iota(c: Context) -> Made:
    shape = c.shape()
    return b.iota(shape.dtype, shape.dims, c.integer("iota_dimension", "dim"))


# Shapes


def broadcast_in_dim(
    x: Instruction, dims: Sequence[Size], dimensions: Sequence[int]
) -> Instruction:
    """Like broadcast, but a dimension of size 1 is stretched."""
    stretched = [i for i, d in enumerate(dimensions) if x.dims[i] == 1 and dims[d] != 1]
    if stretched:
        kept = [i for i in range(x.rank) if i not in stretched]
        x = b.reshape(x, [x.dims[i] for i in kept])
        dimensions = [dimensions[i] for i in kept]
    return b.broadcast(x, dims, dimensions)


@rule("broadcast")
def _broadcast(c: Context) -> Made:
    sizes = c.ints("broadcast_sizes", "sizes")
    return b.broadcast(c.x[0], (*sizes, *c.x[0].dims), range(len(sizes), len(sizes) + c.x[0].rank))


@rule("reshape")
def _reshape(c: Context) -> Made:
    dims = c.types[0].shape.dims
    if dims.count(UNKNOWN) == 1 and isinstance(c.x[0].size, Dim):
        rest = Shape("pred", tuple(d for d in dims if d != UNKNOWN)).size
        dims = tuple(c.x[0].size // rest if d == UNKNOWN else d for d in dims)
        return b.reshape(c.x[0], dims)
    return b.reshape(c.x[0], c.shape().dims)


@rule("slice")
def _slice(c: Context) -> Made:
    if (ranges := c.attr("ranges")) is not None:
        return b.slice_(c.x[0], *zip(*ranges, strict=True))
    if c.x[0].rank == 0:
        return c.x[0]
    return b.slice_(c.x[0], c.ints("start_indices"), c.ints("limit_indices"), c.ints("strides"))


@rule("pad")
def _pad(c: Context) -> Made:
    low = c.ints("edge_padding_low", "low")
    high = c.ints("edge_padding_high", "high")
    inner = c.ints("interior_padding", "interior")
    return instr("pad", c.x, padding=tuple(zip(low, high, inner, strict=True)))


def dimension_numbers(c: Context, name: str) -> dict[str, Any]:
    found = c.attr(name)
    if not isinstance(found, dict):
        raise c.error(f"attribute {name} is missing")
    return {k: integers(c.converter.s, v, c.op.position) for k, v in found.items()}


def gather_attributes(c: Context) -> dict[str, Any]:
    return _indexing(
        c,
        "dimension_numbers",
        "offset_dims collapsed_slice_dims start_index_map operand_batching_dims"
        " start_indices_batching_dims",
    )


def _indexing(c: Context, name: str, fields: str) -> dict[str, Any]:
    """Attributes of a gather or scatter from the `fields` of its dimension numbers."""
    n = dimension_numbers(c, name)
    return {field: n.get(field, ()) for field in fields.split()} | {
        "index_vector_dim": n.get("index_vector_dim", (0,))[0],
        "indices_are_sorted": bool(c.attr("indices_are_sorted")),
    }


@rule("scatter")
def _scatter(c: Context) -> Made:
    count = (len(c.x) - 1) // 2
    dims = _indexing(
        c,
        "scatter_dimension_numbers",
        "update_window_dims inserted_window_dims scatter_dims_to_operand_dims"
        " input_batching_dims scatter_indices_batching_dims",
    )
    x = b.scatter(
        c.x[:count],
        c.x[count],
        c.x[count + 1 :],
        c.region(0),
        unique_indices=bool(c.attr("unique_indices")),
        **dims,
    )
    return unpacked(x, count)


@rule("torch_index_select")
def _torch_index_select(c: Context) -> Made:
    x, index = c.x
    axis = c.integer("dim")
    batch = c.integer("batch_dims", default=0)
    sizes = [1 if d == axis or d < batch else n for d, n in enumerate(x.dims)]
    free = index.rank - batch
    offset = [d for d in range(axis)][batch:] + [d + free for d in range(axis, x.rank - 1)]
    return b.gather(
        x,
        index,
        offset_dims=offset,
        collapsed_slice_dims=(axis,),
        start_index_map=(axis,),
        index_vector_dim=index.rank,
        slice_sizes=sizes,
        operand_batching_dims=range(batch),
        start_indices_batching_dims=range(batch),
    )


# Contractions and reductions


def _precision(c: Context) -> tuple[str, ...] | None:
    words = tuple(str(w).lower() for w in c.attr("precision_config", "precision", default=()))
    return words if set(words) - {"default"} else None


@rule("dot_general")
def _dot_general(c: Context) -> Made:
    if c.attr("dot_dimension_numbers") is not None:
        n = dimension_numbers(c, "dot_dimension_numbers")
        batch, contract = (
            [n.get(f"{side}_{what}_dimensions", ()) for side in ("lhs", "rhs")]
            for what in ("batching", "contracting")
        )
    else:
        batch = c.attr("batching_dims", default=((), ()))
        contract = c.attr("contracting_dims", default=((), ()))
    return _product(c, contract, batch)


def _product(
    c: Context, contract: Sequence[Sequence[int]], batch: Sequence[Sequence[int]] = ((), ())
) -> Instruction:
    """A dot over these dimensions of both sides."""
    return _typed(
        c,
        instr(
            "dot",
            c.x,
            lhs_batch_dims=tuple(batch[0]),
            rhs_batch_dims=tuple(batch[1]),
            lhs_contracting_dims=tuple(contract[0]),
            rhs_contracting_dims=tuple(contract[1]),
            operand_precision=_precision(c),
        ),
    )


def _typed(c: Context, x: Instruction) -> Instruction:
    """dot and convolution in the declared element type."""
    dtype = c.dtype
    return (
        x
        if x.dtype == dtype
        else instr(x.op, x.operands, x.shape.with_dtype(dtype), **dict(x.attrs))
    )


@rule("dot")
def _dot(c: Context) -> Made:
    return _product(c, ((c.x[0].rank - 1,), (0,)))


@rule("einsum")
def _einsum(c: Context) -> Made:
    inputs, _, output = str(c.attr("einsum_config", "config")).replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    x, y = c.x
    for letters, operand in ((left, x), (right, y)):
        if len(letters) != operand.rank or len(set(letters)) != len(letters):
            raise c.error(f"{inputs}->{output} does not fit {x.shape} and {y.shape}")
    batch = [d for d in left if d in right and d in output]
    contract = [d for d in left if d in right and d not in output]
    x = _summed(x, left, [d for d in left if d not in right and d not in output])
    y = _summed(y, right, [d for d in right if d not in left and d not in output])
    left, right = (
        "".join(d for d in side if d in other + output)
        for side, other in ((left, right), (right, left))
    )
    found = b.dot(
        x,
        y,
        [left.index(d) for d in contract],
        [right.index(d) for d in contract],
        [left.index(d) for d in batch],
        [right.index(d) for d in batch],
        c.dtype,
    )
    order = (
        batch
        + [d for d in left if d not in batch + contract]
        + [d for d in right if d not in batch + contract]
    )
    return b.transpose(found, [order.index(d) for d in output])


def _summed(x: Instruction, letters: str, gone: list[str]) -> Instruction:
    return (
        b.reduce(x, b.constant(0, x.dtype), [letters.index(d) for d in gone], "add") if gone else x
    )


@rule("unary_einsum")
def _unary_einsum(c: Context) -> Made:
    letters, _, output = str(c.attr("einsum_config", "config")).replace(" ", "").partition("->")
    kept = [d for d in letters if d in output]
    return b.transpose(
        _summed(c.x[0], letters, [d for d in letters if d not in output]),
        [kept.index(d) for d in output],
    )


# The fields of a convolution's dimension numbers, and their letters: "" is a spatial one's number.
CONVOLUTION = dict(
    input_batch_dimension="b",
    input_feature_dimension="f",
    input_spatial_dimensions="",
    kernel_input_feature_dimension="i",
    kernel_output_feature_dimension="o",
    kernel_spatial_dimensions="",
    output_batch_dimension="b",
    output_feature_dimension="f",
    output_spatial_dimensions="",
)


def dim_labels(c: Context) -> str:
    found = c.attr("dimension_numbers", "dim_numbers")
    if isinstance(found, str):
        left, right, out = (
            re.sub(r"[\[\],\s]", "", part) for part in re.split(r"\]\s*x\s*\[|->", found)
        )
        return f"{left}_{right}->{out}"
    n = dimension_numbers(c, "dimension_numbers")
    sides: dict[str, dict[int, str]] = {"input": {}, "kernel": {}, "output": {}}
    for field, letter in CONVOLUTION.items():
        spatial = enumerate(n[field])
        sides[field.partition("_")[0]] |= {d: letter or str(i) for i, d in spatial}
    left, right, out = ("".join(row[i] for i in range(len(row))) for row in sides.values())
    return f"{left}_{right}->{out}"


def pairs(values: Sequence[Size]) -> list[tuple[Any, Any]]:
    return list(zip(values[0::2], values[1::2], strict=True))


def conv_window(
    c: Context, labels: str, padding: Sequence[tuple[Size, Size]] | None
) -> tuple[WindowDim, ...]:
    pretty = c.attr("window", default={})
    s = c.converter.s
    at = c.op.position
    kernel = labels.partition("_")[2].partition("->")[0]
    rank = len(kernel) - 2

    def column(generic: str, short: str, default: int) -> Ints:
        value = c.attr(generic, default=pretty.get(short))
        return (default,) * rank if value is None else integers(s, value, at)

    pads = pairs(
        column("padding", "pad", 0)
        if c.attr("padding") is not None or "pad" in pretty
        else (0,) * 2 * rank
    )
    sizes = [c.x[1].dims[kernel.index(str(i))] for i in range(rank)]
    columns = zip(
        sizes,
        column("window_strides", "stride", 1),
        padding or pads,
        column("lhs_dilation", "lhs_dilate", 1),
        column("rhs_dilation", "rhs_dilate", 1),
        column("window_reversal", "reverse", 0),
        strict=True,
    )
    return tuple(
        WindowDim(size, stride, low, high, lhs, rhs, bool(flip))
        for size, stride, (low, high), lhs, rhs, flip in columns
    )


@rule("convolution")
def convolution(c: Context, padding: Sequence[tuple[Size, Size]] | None = None) -> Instruction:
    """`padding`: what an operand behind the first two says."""
    labels = dim_labels(c)
    return _typed(
        c,
        instr(
            "convolution",
            c.x[:2],
            window=conv_window(c, labels, padding),
            dim_labels=labels,
            operand_precision=_precision(c),
            feature_group_count=c.integer("feature_group_count", default=1),
            batch_group_count=c.integer("batch_group_count", default=1),
        ),
    )


@rule("reduce")
def _reduce(c: Context) -> Made:
    count = len(c.x) // 2
    scalars = [Shape(x.dtype) for x in c.x[count:]]
    if (applied := c.attr("applies")) is not None:
        to_apply = b.computation(
            lambda x, y: instr(str(applied).replace("_", "-"), (x, y)),
            [scalars[0]] * 2,
            str(applied),
        )
    else:
        to_apply = c.region(0, scalars * 2)
    x = instr(
        "reduce",
        c.x,
        dimensions=tuple(sorted(c.ints("dimensions"))),
        to_apply=to_apply,
    )
    return unpacked(x, count)


def _windows(c: Context, rank: int) -> tuple[WindowDim, ...]:
    ones = (1,) * rank
    sizes = c.ints("window_dimensions", default=ones)
    columns = zip(
        sizes,
        c.ints("window_strides", default=ones),
        pairs(c.ints("padding", default=(0,) * 2 * rank)),
        c.ints("base_dilations", default=ones),
        c.ints("window_dilations", default=ones),
        strict=True,
    )
    return tuple(
        WindowDim(size, stride, low, high, base, dilation)
        for size, stride, (low, high), base, dilation in columns
    )


@rule("reduce_window")
def _reduce_window(c: Context) -> Made:
    count = len(c.x) // 2
    return unpacked(
        instr("reduce-window", c.x, window=_windows(c, c.x[0].rank), to_apply=c.region(0)),
        count,
    )


@rule("select_and_scatter")
def _select_and_scatter(c: Context) -> Made:
    return instr(
        "select-and-scatter",
        c.x,
        window=_windows(c, c.x[0].rank),
        select=c.region(0),
        scatter=c.region(1),
    )


@rule("sort")
def _sort(c: Context) -> Made:
    axis = c.integer("dimension", default=-1) % max(c.x[0].rank, 1)
    x = instr(
        "sort",
        c.x,
        dimensions=(axis,),
        is_stable=bool(c.attr("is_stable")),
        to_apply=c.region(0),
    )
    return unpacked(x, len(c.x))


# Linear algebra, statistics, random numbers


@rule("triangular_solve")
def _triangular_solve(c: Context) -> Made:
    flags: dict[str, Any] = {
        name: bool(c.attr(name)) for name in ("left_side", "lower", "unit_diagonal")
    }
    return instr(
        "triangular-solve",
        c.x,
        transpose_a=str(c.attr("transpose_a", default="NO_TRANSPOSE")),
        **flags,
    )


@rule("batch_norm_training", "batch_norm_inference", "batch_norm_grad")
def _batch_norm(c: Context) -> Made:
    x = instr(
        c.op.name.replace("_", "-"),
        c.x,
        epsilon=float(c.attr("epsilon")),
        feature_index=c.integer("feature_index"),
    )
    return unpacked(x, len(x.elements) or 1)


@rule("rng")
def _rng(c: Context) -> Made:
    low, high = c.x[:2]
    distribution = "rng_" + str(c.attr("rng_distribution", "distribution")).lower()
    return instr("rng", (low, high), c.shape(), distribution=distribution)


@rule("rng_bit_generator")
def rng_bit_generator(c: Context, bits: Shape | None = None) -> Made:
    """`bits`: their shape, where the type alone does not say it."""
    algorithm = "rng_" + str(c.attr("rng_algorithm", "algorithm")).lower()
    return unpacked(b.rng_bit_generator(c.x[0], algorithm, bits or c.shape(1)), 2)


# Tuples, tokens, calls out


@rule("optimization_barrier")
def _optimization_barrier(c: Context) -> Made:
    if not c.x:
        return []
    return unpacked(instr("opt-barrier", (b.tuple_(*c.x),)), len(c.x))


@rule("custom_call")
def _custom_call(c: Context) -> Made:
    callee = c.attr("callee")
    target = (
        callee.name if isinstance(callee, Symbol) else str(c.attr("call_target_name", default=""))
    )
    if target in IGNORED:
        return []
    dialect, _, name = target.partition(".")
    if dialect in ("mhlo", "stablehlo", "chlo") and (
        convert := RULES.get("chlo." + name) or RULES.get(name)
    ):
        for name, value in (c.attr("mhlo.attributes", default={}) or {}).items():
            c.op.attrs.setdefault(name, value)
        return convert(c)
    shapes = [c.shape(i) for i in range(len(c.types))]
    config = c.attr("mhlo.backend_config", "backend_config")
    opaque = None
    if isinstance(config, dict):
        config = "{" + ", ".join(f"{k} = {quoted_value(v)}" for k, v in config.items()) + "}"
    else:
        config, opaque = None, config or None
    given = c.converter.shardings.of(c.op.attrs, shapes)
    sharding = None if given is None else given[0] if len(shapes) == 1 else tuple(given)
    acts = bool(c.attr("has_side_effect"))
    alone = any(getattr(s, "maximal", None) is not None for s in given or ())  # by one device
    x = instr(
        "custom-call",
        c.x,
        result(shapes),
        custom_call_target=target,
        backend_config=config,
        opaque=opaque,
        custom_call_has_side_effect=acts,
        serial=len(c.converter.effects) if acts or alone else None,  # equal calls are two
        sharding=sharding or None,  # no arrays, no places
    )
    if has_effect(x) or target == "InspectSharding":
        c.converter.effects.append(x)
    return [x] if len(shapes) == 1 else unpacked(x, len(shapes))


def quoted_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


# What is one expression.
RULES.update(
    {
        "broadcast_in_dim": lambda c: broadcast_in_dim(
            c.x[0], c.shape().dims, c.ints("broadcast_dimensions", "dims")
        ),
        "cholesky": lambda c: instr("cholesky", c.x, lower=bool(c.attr("lower"))),
        "compare": lambda c: compared(c, *c.x),
        "concatenate": lambda c: b.concatenate(c.x, c.integer("dimension", "dim")),
        "copy": lambda c: c.x[0],  # MHLO's
        "dynamic_slice": lambda c: b.dynamic_slice(c.x[0], c.x[1:], c.ints("slice_sizes", "sizes")),
        "dynamic_update_slice": lambda c: b.dynamic_update_slice(c.x[0], c.x[1], c.x[2:]),
        "fft": lambda c: b.fft(
            c.x[0], str(c.attr("fft_type", "type")), c.ints("fft_length", "length")
        ),
        "gather": lambda c: b.gather(
            c.x[0], c.x[1], slice_sizes=c.ints("slice_sizes"), **gather_attributes(c)
        ),
        "get_dimension_size": lambda c: b.get_dimension_size(c.x[0], c.integer("dimension", "dim")),
        "get_tuple_element": lambda c: b.get_tuple_element(c.x[0], c.integer("index")),
        "interpreter.probe": lambda c: c.x[0],
        "map": lambda c: instr("map", c.x, dimensions=c.ints("dimensions"), to_apply=c.region(0)),
        "reverse": lambda c: b.reverse(c.x[0], c.ints("dimensions", "dims")),
        "set_dimension_size": lambda c: instr(
            "set-dimension-size", c.x, dimensions=(c.integer("dimension", "dim"),)
        ),
        "transpose": lambda c: instr("transpose", c.x, dimensions=c.ints("permutation", "dims")),
        "tuple": lambda c: b.tuple_(*c.x),
        **dict.fromkeys(("create_token", "after_all"), lambda c: instr("after-all", c.x)),
    }
)
# Pointwise operations without a rule of their own, with and without their dialect.
for _opcode, _row in OPCODES.items():
    if _row.spelling is not None and _row.check is None:
        for _name in (
            _opcode.replace("-", "_"),
            _row.spelling.removeprefix("stablehlo."),
        ):
            RULES.setdefault(_name, partial(_plain, _opcode))
RULES["chlo.tan"] = RULES["tan"]
