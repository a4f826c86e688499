"""Writers of the opcodes that are not plain element-wise operations, see write.py."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from ..ir import OPCODES, Instruction, Shape
from ..sharding.sharding_text import to_xla
from ..text.printer import quoted
from .chlo import RAGGED
from .types import Quantized, Type
from .writer import (
    WriteError,
    Writer,
    array,
    boolean,
    dense_text,
    dictionary,
    integer,
    matrix,
    sharding_text,
    writes,
)


def _pointwise(w: Writer, x: Instruction) -> list[str]:
    return w.op(x, OPCODES[x.op].spelling or "")


writes(*(name for name, row in OPCODES.items() if row.spelling is not None))(_pointwise)


_BATCH_NORM = "epsilon = {x[epsilon]:.9e} : f32, feature_index = {integer[feature_index]}"
# The attributes of operations that differ in no more; a computation `to_apply` is their region.
_ATTRIBUTES = {
    "all-gather": "all_gather_dim = {first[dimensions]}, {groups}",
    "all-reduce": "{groups}",
    "batch-norm-grad": _BATCH_NORM,
    "batch-norm-inference": _BATCH_NORM,
    "batch-norm-training": _BATCH_NORM,
    "bitcast-convert": "",
    "broadcast": "broadcast_dimensions = {array[dimensions]}",
    "cholesky": "lower = {boolean[lower]}",
    "concatenate": "dimension = {first[dimensions]}",
    "dynamic-slice": "slice_sizes = {array[dynamic_slice_sizes]}",
    "dynamic-update-slice": "",
    "fft": "fft_type = #stablehlo<fft_type {x[fft_type]}>, fft_length = {array[fft_length]}",
    "gather": (
        "dimension_numbers = {numbers}, slice_sizes = {array[slice_sizes]}, indices_are_sorted ="
        " {boolean[indices_are_sorted]}"
    ),
    "get-dimension-size": "dimension = {first[dimensions]}",
    "iota": "iota_dimension = {integer[iota_dimension]}",
    "opt-barrier": "",
    "partition-id": "",
    "reduce": "dimensions = {array[dimensions]}",
    "reduce-precision": (
        "exponent_bits = {x[exponent_bits]} : i32, mantissa_bits = {x[mantissa_bits]} : i32"
    ),
    "reduce-scatter": "scatter_dimension = {first[dimensions]}, {groups}",
    "replica-id": "",
    "reverse": "dimensions = {array[dimensions]}",
    "rng-bit-generator": "rng_algorithm = #stablehlo<rng_algorithm {algorithm}>",
    "scatter": (
        "scatter_dimension_numbers = {numbers}, indices_are_sorted ="
        " {boolean[indices_are_sorted]}, unique_indices = {boolean[unique_indices]}"
    ),
    "sort": "dimension = {first[dimensions]}, is_stable = {boolean[is_stable]}",
    "transpose": "permutation = {array[dimensions]}",
    "triangular-solve": (
        "left_side = {boolean[left_side]}, lower = {boolean[lower]}, unit_diagonal ="
        " {boolean[unit_diagonal]}, transpose_a = #stablehlo<transpose {x[transpose_a]}>"
    ),
}
# What they put together in one.
_NUMBERS = {
    "gather": (
        "offset_dims collapsed_slice_dims operand_batching_dims start_indices_batching_dims"
        " start_index_map index_vector_dim"
    ),
    "scatter": (
        "update_window_dims inserted_window_dims input_batching_dims"
        " scatter_indices_batching_dims scatter_dims_to_operand_dims index_vector_dim"
    ),
}
_NAMES = {"broadcast": "broadcast_in_dim", "opt-barrier": "optimization_barrier"}


class _Shown:
    """The attributes of an instruction, spelled by one of StableHLO's forms."""

    def __init__(self, x: Instruction, form: Callable[[Any], str]) -> None:
        self.x = x
        self.form = form

    def __getitem__(self, name: str) -> str:
        return self.form(self.x[name])


@writes(*_ATTRIBUTES)
def _by_attributes(w: Writer, x: Instruction) -> list[str]:
    forms: dict[str, Callable[[Any], str]] = {
        "array": array,
        "boolean": boolean,
        "integer": integer,
        "first": _first,
    }
    shown: dict[str, Any] = {name: _Shown(x, form) for name, form in forms.items()}
    if fields := _NUMBERS.get(x.op, "").split():
        shown["numbers"] = _struct(x.op, **{name: x[name] for name in fields})
    if x.op == "rng-bit-generator":
        shown["algorithm"] = x["algorithm"].removeprefix("rng_").upper()
    if x.get("replica_groups") is not None:
        shown["groups"] = dictionary(**_collective(x))
    body = x.get("to_apply")
    name = _NAMES.get(x.op, x.op.replace("-", "_"))
    attrs = _ATTRIBUTES[x.op].format(x=x, **shown)
    if x.op in ("broadcast", "iota") and not x.is_static:
        return w.sized(x, f"stablehlo.dynamic_{name}", attrs, x.dims)
    return w.op(x, f"stablehlo.{name}", attrs, [] if body is None else [w.region(body)])


def _first(values: Sequence[int]) -> str:
    return integer(values[0])


@writes("compare")
def _compare(w: Writer, x: Instruction) -> list[str]:
    kind = {
        "f": "FLOAT",
        "s": "SIGNED",
        "u": "UNSIGNED",
        "p": "UNSIGNED",
        "c": "FLOAT",
    }[x.operand.kind]
    attrs = dictionary(
        comparison_direction=f"#stablehlo<comparison_direction {x['direction']}>",
        compare_type=f"#stablehlo<comparison_type {x.get('type') or kind}>",
    )
    return w.op(x, "stablehlo.compare", attrs)


@writes("uniform-quantize", "uniform-dequantize")
def _quantize(w: Writer, x: Instruction) -> list[str]:
    """The scales are operands here and part of the type there, whose values are the stored
    integers."""
    value, scale, zero = x.operands
    into = x.op == "uniform-quantize"
    stored, real = (x.shape, value.shape) if into else (value.shape, x.shape)
    if not scale.op == zero.op == "constant" or scale.dtype != real.dtype or scale.rank > 1:
        raise WriteError(
            f"{x.op} of {value.shape} by {scale.shape}: there the scales are part of the type;"
            f" make them constants of {real.dtype}"
        )
    scales, zeros = (tuple(c["literal"].numpy().ravel().tolist()) for c in (scale, zero))
    axis = x["dimensions"][0] if scale.rank else None
    kind = Type(stored, Quantized(stored.dtype, real.dtype, scales, zeros, axis))
    ops = [f"stablehlo.{x.op.replace('-', '_')}", "stablehlo.bitcast_convert"]
    first, second = ops if into else ops[::-1]
    return w.emit(second, w.emit(first, w[value], [value.shape], [kind]), [kind], [x.shape])


# Shapes


@writes("constant")
def _constant(w: Writer, x: Instruction) -> list[str]:
    return w.emit("stablehlo.constant", [], [], [x.shape], f"value = {dense_text(x['literal'])}")


@writes("reshape", "bitcast")
def _reshape(w: Writer, x: Instruction) -> list[str]:
    if x.dtype != x.operand.dtype:
        raise WriteError(f"bitcast of {x.operand.shape} to {x.shape}: use bitcast-convert")
    if not x.is_static:
        return w.sized(x, "stablehlo.dynamic_reshape", "", x.dims)
    return w.op(x, "stablehlo.reshape")


@writes("copy", "add-dependency", "domain")
def _same(w: Writer, x: Instruction) -> list[str]:
    return w[x.operand]


@writes("abs", "sign")
def _of_unsigned(w: Writer, x: Instruction) -> list[str]:
    """StableHLO has neither for unsigned integers: |x| is x, and the sign is min(x, 1)."""
    if x.kind != "u":
        return w.op(x, "stablehlo." + x.op)
    if x.op == "abs":
        return w[x.operand]
    operands = [*w.operands(x), *w.filled(x.shape, 1)]
    return w.emit("stablehlo.minimum", operands, [x.shape, x.shape], [x.shape])


_BOUNDS = {
    "pad": "edge_padding_low edge_padding_high interior_padding",
    "slice": "start_indices limit_indices strides",
}


@writes(*_BOUNDS)
def _bounds(w: Writer, x: Instruction) -> list[str]:
    """What an operation says of each dimension, listed by what it says."""
    rows = x["slice" if x.op == "slice" else "padding"]
    columns = [*zip(*rows, strict=True)] or [()] * 3
    if x.op == "slice" and not all(isinstance(n, int) for row in rows for n in row):
        return w.sized(x, "stablehlo.real_dynamic_slice", "", *columns)
    attrs = dictionary(**dict(zip(_BOUNDS[x.op].split(), map(array, columns))))
    return w.op(x, f"stablehlo.{x.op}", attrs)


def _struct(kind: str, **fields: Any) -> str:
    shown = [
        f"{k} = {list(v) if isinstance(v, tuple) else v}" for k, v in fields.items() if v != ()
    ]
    return f"#stablehlo.{kind}<{', '.join(shown)}>"


# Contractions and reductions


def _precision(x: Instruction) -> str | None:
    words = x.get("operand_precision")
    return f"[{', '.join(f'#stablehlo<precision {p.upper()}>' for p in words)}]" if words else None


@writes("dot")
def _dot(w: Writer, x: Instruction) -> list[str]:
    numbers = _struct(
        "dot",
        lhs_batching_dimensions=x["lhs_batch_dims"],
        rhs_batching_dimensions=x["rhs_batch_dims"],
        lhs_contracting_dimensions=x["lhs_contracting_dims"],
        rhs_contracting_dimensions=x["rhs_contracting_dims"],
    )
    return w.op(
        x,
        "stablehlo.dot_general",
        dictionary(dot_dimension_numbers=numbers, precision_config=_precision(x)),
    )


@writes("convolution")
def _convolution(w: Writer, x: Instruction) -> list[str]:
    labels = re.sub(
        r"[bfio0-9]+", lambda m: "[" + ", ".join(m.group()) + "]", x["dim_labels"]
    ).replace("_", "x")
    window = x["window"]
    attrs = dictionary(
        dimension_numbers=f"#stablehlo.conv<{labels}>",
        window_strides=array([d.stride for d in window]),
        padding=matrix([(d.pad_low, d.pad_high) for d in window], 2),
        lhs_dilation=array([d.base_dilation for d in window]),
        rhs_dilation=array([d.window_dilation for d in window]),
        window_reversal=array([d.reversal for d in window], "i1"),
        feature_group_count=integer(x["feature_group_count"]),
        batch_group_count=integer(x["batch_group_count"]),
        precision_config=_precision(x),
    )
    return w.op(x, "stablehlo.convolution", attrs)


def _windows(x: Instruction) -> dict[str, str]:
    window = x["window"]
    return dict(
        window_dimensions=array([d.size for d in window]),
        window_strides=array([d.stride for d in window]),
        base_dilations=array([d.base_dilation for d in window]),
        window_dilations=array([d.window_dilation for d in window]),
        padding=matrix([(d.pad_low, d.pad_high) for d in window], 2),
    )


@writes("reduce-window")
def _reduce_window(w: Writer, x: Instruction) -> list[str]:
    if any(d.reversal for d in x["window"]):
        raise WriteError(f"reduce-window of {x.operand.shape}: a reversed window")
    return w.op(x, "stablehlo.reduce_window", dictionary(**_windows(x)), [w.region(x["to_apply"])])


@writes("select-and-scatter")
def _select_and_scatter(w: Writer, x: Instruction) -> list[str]:
    kept = {key: text for key, text in _windows(x).items() if not key.endswith("_dilations")}
    if any(d.base_dilation != 1 or d.window_dilation != 1 for d in x["window"]):
        raise WriteError(f"select-and-scatter of {x.operand.shape}: a dilated window")
    return w.op(
        x,
        "stablehlo.select_and_scatter",
        dictionary(**kept),
        [w.region(x["select"]), w.region(x["scatter"])],
    )


@writes("map")
def _map(w: Writer, x: Instruction) -> list[str]:
    return w.op(
        x,
        "stablehlo.map",
        f"dimensions = {array(range(x.rank))}",
        [w.region(x["to_apply"])],
    )


@writes("topk")
def _topk(w: Writer, x: Instruction) -> list[str]:
    if not x["largest"]:
        raise WriteError(f"topk of {x.operand.shape}: only the largest")
    return w.op(x, "chlo.top_k", f"k = {integer(x['k'])}")


@writes("ragged-dot")
def _ragged_dot(w: Writer, x: Instruction) -> list[str]:
    ours = [x[name.replace("batching", "batch") + "_dims"] for name in RAGGED]
    numbers = ", ".join(f"{n}_dimensions = {list(d)}" for n, d in zip(RAGGED, ours, strict=True))
    attrs = f"ragged_dot_dimension_numbers = #chlo.ragged_dot<{numbers}>"
    return w.op(x, "chlo.ragged_dot", attrs)


# Linear algebra, statistics, random numbers


@writes("rng")
def _rng(w: Writer, x: Instruction) -> list[str]:
    rank = x.rank
    text = "[" + ", ".join(map(str, x.dims)) + "]" if rank else ""
    sizes = w.emit(
        "stablehlo.constant",
        [],
        [],
        [Shape("s64", (rank,))],
        f"value = dense<{text}> : tensor<{rank}xi64>",
    )
    distribution = x["distribution"].removeprefix("rng_").upper()
    shapes = [*(o.shape for o in x.operands), Shape("s64", (rank,))]
    attrs = f"rng_distribution = #stablehlo<rng_distribution {distribution}>"
    return w.emit("stablehlo.rng", [*w.operands(x), *sizes], shapes, [x.shape], attrs)


# Tuples, control flow, calls


writes("tuple")(Writer.operands)


@writes("get-tuple-element")
def _get_tuple_element(w: Writer, x: Instruction) -> list[str]:
    counts = [len(e.arrays) for e in x.operand.elements]
    begin = sum(counts[: x["index"]])
    return w[x.operand][begin : begin + counts[x["index"]]]


@writes("after-all")
def _after_all(w: Writer, x: Instruction) -> list[str]:
    return w.op(x, "stablehlo.after_all" if x.operands else "stablehlo.create_token")


@writes("call", "fusion")
def _call(w: Writer, x: Instruction) -> list[str]:
    name = w.program.name_of(x["to_apply"] if x.op == "call" else x["calls"])
    results = w.op(x, "func.call", f"callee = @{name}")
    if (named := x.get("frontend_attributes")) is not None:
        w.annotate(f"mhlo.frontend_attributes = {named}")
    return results


@writes("while")
def _while(w: Writer, x: Instruction) -> list[str]:
    shapes = x.shape.arrays
    args = [[(w.fresh().replace("%", "%a"), s) for s in shapes] for _ in range(2)]
    regions = [w.calling(x[c], a, [n for n, _ in a]) for c, a in zip(("condition", "body"), args)]
    return w.op(x, "stablehlo.while", "", regions)


@writes("conditional")
def _conditional(w: Writer, x: Instruction) -> list[str]:
    selector, *operands = x.operands
    regions = [
        w.calling(c, [], w[o]) for c, o in zip(x["branch_computations"], operands, strict=True)
    ]
    name = "stablehlo.if" if selector.dtype == "pred" else "stablehlo.case"
    return w.emit(name, w[selector], [selector.shape], x.shape.arrays, "", regions)


@writes("custom-call")
def _custom_call(w: Writer, x: Instruction) -> list[str]:
    config = x.get("backend_config") or x.get("opaque") or ""
    sharding = x.get("sharding")
    if (
        x["custom_call_target"] == "Sharding"
        and sharding is not None
        and not x.is_tuple
        and not sharding.manual
    ):
        return w.op(
            x,
            "sdy.sharding_constraint",
            f"sharding = #sdy.sharding{sharding_text(sharding)}",
        )
    attrs = dictionary(
        call_target_name=quoted(x["custom_call_target"]),
        backend_config=quoted(str(config)),
        has_side_effect=boolean(x["custom_call_has_side_effect"]),
    )
    results = w.op(x, "stablehlo.custom_call", attrs)
    if sharding is not None:
        w.annotate(f"mhlo.sharding = {quoted(to_xla(sharding))}")
    return results


# Many devices


def _channel(x: Instruction) -> dict[str, str]:
    channel = x.get("channel_id")
    return (
        {}
        if channel is None
        else {"channel_handle": f"#stablehlo.channel_handle<handle = {channel}, type = 1>"}
    )


def _collective(x: Instruction) -> dict[str, str]:
    groups = x["replica_groups"]
    width = max(map(len, groups), default=0)
    rows = [(*g, *(-1,) * (width - len(g))) for g in groups]
    flag = {"use_global_device_ids": "unit"} if x["use_global_device_ids"] else {}
    return {"replica_groups": matrix(rows, width), **_channel(x), **flag}


@writes("all-to-all")
def _all_to_all(w: Writer, x: Instruction) -> list[str]:
    if x.get("dimensions") is None or not x["replica_groups"]:
        raise WriteError("all-to-all: needs dimensions and replica_groups")
    d = x["dimensions"][0]
    numbers = _collective(x)
    numbers.pop("use_global_device_ids", None)
    attrs = dictionary(
        split_dimension=integer(d),
        concat_dimension=integer(d),
        split_count=integer(len(x["replica_groups"][0])),
        **numbers,
    )
    return w.op(x, "stablehlo.all_to_all", attrs)


@writes("collective-permute")
def _collective_permute(w: Writer, x: Instruction) -> list[str]:
    attrs = _channel(x)
    return w.op(
        x,
        "stablehlo.collective_permute",
        dictionary(source_target_pairs=matrix(x["source_target_pairs"], 2), **attrs),
    )


@writes("collective-broadcast")
def _collective_broadcast(w: Writer, x: Instruction) -> list[str]:
    attrs = {k: v for k, v in _collective(x).items() if k != "use_global_device_ids"}
    return w.op(x, "stablehlo.collective_broadcast", dictionary(**attrs))


# Asynchronous pairs happen at their start.


@writes("copy-start")
def _copy_start(w: Writer, x: Instruction) -> list[str]:
    names = w[x.operand]
    return [*names, *names, *w.filled(Shape("u32"), 0)]


@writes("copy-done")
def _copy_done(w: Writer, x: Instruction) -> list[str]:
    return w[x.operand][: len(x.shape.arrays)]


@writes("async-start")
def _async_start(w: Writer, x: Instruction) -> list[str]:
    shapes = [leaf for o in x.operands for leaf in o.shape.arrays]
    results = w.emit(
        "func.call",
        w.operands(x),
        shapes,
        x.elements[1].arrays,
        f"callee = @{w.program.name_of(x['calls'])}",
    )
    rest = [name for e in x.elements[2:] for s in e.arrays for name in w.filled(s, 0)]
    return [*w.operands(x), *results, *rest]


@writes("async-update")
def _async_update(w: Writer, x: Instruction) -> list[str]:
    return w[x.operand]


@writes("async-done")
def _async_done(w: Writer, x: Instruction) -> list[str]:
    begin = len(x.operand.elements[0].arrays)
    return w[x.operand][begin : begin + len(x.shape.arrays)]
