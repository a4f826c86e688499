"""THE table: every opcode of the language in one row.

    OPCODES["transpose"].infer(x, dimensions=(1, 0))    # shape rule (ShapeError)
    OPCODES["transpose"].meaning                        # NumPy function, from evaluate.MEANINGS

To add an opcode: a row here, its shape rule in infer.py (or a check in explicit.py when the shape is given), its meaning in evaluate.py.
Traits: pointwise (element i of the result is a function of element i of the operands), commutative (in its first two operands),
view (moves or repeats elements, computes nothing), composite (passes/legalize.py expands it), control (calls computations),
collective (talks to other devices), impure (may not be merged or dropped; carries a `serial`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch_hlo.hlo import explicit, infer
from torch_hlo.hlo.infer import REAL_OF, ShapeError
from torch_hlo.hlo.ir import Instruction
from torch_hlo.hlo.shape import Shape

# Legal on every opcode; no shape rule or meaning looks at them.
COMMON_ATTRS = ("sharding", "serial", "backend_config", "frontend_attributes")


@dataclass(frozen=True, slots=True)
class Opcode:
    name: str
    arity: int | None  # number of operands; None: any
    attrs: tuple[str, ...]  # legal attributes, in print order
    required: frozenset[str]
    rule: Callable[..., Shape] | None  # None: the shape is always given
    check: Callable[..., None] | None  # of a given shape; None: it must equal the inferred one
    traits: frozenset[str]

    def infer(self, *operands: Instruction, **attrs) -> Shape:
        """Shape of the result. Raises ShapeError on a wrong number of operands, attribute, or shape."""
        attrs = self._checked(operands, attrs)
        if self.rule is None:
            raise ShapeError(f"{self.name}: the operands do not determine the shape; give one")
        return self.rule(*operands, **attrs)

    def verify(self, shape: Shape, *operands: Instruction, **attrs) -> None:
        """Raises ShapeError when `shape` is no legal result."""
        attrs = self._checked(operands, attrs)
        if self.check is not None:
            self.check(shape, *operands, **attrs)
        elif not infer.compatible(shape, expected := self.rule(*operands, **attrs)):
            infer.fail(self.name, f"has shape {shape}, expected {expected}", *operands)

    @property
    def meaning(self) -> Callable:
        """NumPy function of the operands and attributes (see evaluate.py)."""
        from torch_hlo.hlo.evaluate import MEANINGS

        return MEANINGS[self.name]

    def _checked(self, operands: tuple, attrs: dict) -> dict:
        if self.arity is not None and len(operands) != self.arity:
            infer.fail(self.name, f"takes {self.arity} operands, got {len(operands)}", *operands)
        kept = {k: v for k, v in attrs.items() if k not in COMMON_ATTRS}
        if bad := [k for k in kept if k not in self.attrs]:
            raise ShapeError(
                f"{self.name}: unknown attribute {bad[0]}; legal are {', '.join(self.attrs) or 'none'}"
            )
        if missing := self.required - kept.keys():
            raise ShapeError(f"{self.name}: missing attribute {min(missing)}")
        return kept


OPCODES: dict[str, Opcode] = {}


def row(
    name: str, arity: int | None, attrs: str = "", rule=None, check=None, traits: str = ""
) -> None:
    """Add an opcode. `attrs` in print order; a trailing `?` marks an optional one."""
    names = attrs.split()
    legal = tuple(n.rstrip("?") for n in names)
    OPCODES[name] = Opcode(
        name,
        arity,
        legal,
        frozenset(n for n in names if not n.endswith("?")),
        rule,
        check,
        frozenset(traits.split()),
    )


# Kinds of element types (see DType.kind) that a pointwise opcode accepts.
UNARY = {
    "fc": "acos acosh asin asinh atanh cbrt cosh cosine exponential exponential-minus-one log log-plus-one logistic rsqrt sine sinh sqrt tan tanh",
    "f": "ceil erf erf-inv erfc floor round-nearest-afz round-nearest-even",
    "sufc": "negate sign",
    "su": "count-leading-zeros popcnt",
    "psu": "not",
}
BINARY = {
    "psufc": "add multiply",
    "sufc": "subtract divide power",
    "suf": "remainder",
    "psuf": "maximum minimum",
    "fc": "atan2",
    "psu": "and or xor",
    "su": "shift-left shift-right-arithmetic shift-right-logical",
}
COMMUTATIVE = {"add", "multiply", "maximum", "minimum", "and", "or", "xor"}

for kinds, names in UNARY.items():
    for name in names.split():
        row(name, 1, "", partial(infer.unary, name, kinds), traits="pointwise")
for kinds, names in BINARY.items():
    for name in names.split():
        row(
            name,
            2,
            "",
            partial(infer.binary, name, kinds),
            traits="pointwise commutative" if name in COMMUTATIVE else "pointwise",
        )
row("copy", 1, "", infer.first)
row(
    "abs",
    1,
    "",
    partial(infer.unary_to, "abs", "sufc", lambda t: REAL_OF.get(t, t)),
    traits="pointwise",
)
row(
    "real",
    1,
    "",
    partial(infer.unary_to, "real", "fc", lambda t: REAL_OF.get(t, t)),
    traits="pointwise",
)
row(
    "imag",
    1,
    "",
    partial(infer.unary_to, "imag", "fc", lambda t: REAL_OF.get(t, t)),
    traits="pointwise",
)
row(
    "is-finite",
    1,
    "",
    partial(infer.unary_to, "is-finite", "f", lambda t: "pred"),
    traits="pointwise",
)
row("complex", 2, "", infer.complex_, traits="pointwise")
row("compare", 2, "direction type?", infer.compare, traits="pointwise")
row("select", 3, "", infer.select, traits="pointwise")
row("clamp", 3, "", infer.clamp, traits="pointwise")
row(
    "reduce-precision", 1, "exponent_bits mantissa_bits", infer.reduce_precision, traits="pointwise"
)
row("convert", 1, check=explicit.convert, traits="pointwise")
row("bitcast-convert", 1, check=explicit.bitcast_convert)
row("stochastic-convert", 2, check=explicit.stochastic_convert, traits="pointwise composite")
row("uniform-quantize", 3, "dimensions?", check=explicit.quantize, traits="composite")
row("uniform-dequantize", 3, "dimensions?", check=explicit.dequantize, traits="composite")

# Inputs and moving elements
row("parameter", 0, "index", check=explicit.parameter)
row("constant", 0, "literal", infer.constant)
row("iota", 0, "iota_dimension", check=explicit.iota)
row("broadcast", 1, "dimensions", check=explicit.broadcast, traits="view")
row("reshape", 1, check=explicit.reshape, traits="view")
row("dynamic-reshape", None, check=explicit.dynamic_reshape)
row("bitcast", 1, check=explicit.bitcast, traits="view")
row("transpose", 1, "dimensions", infer.transpose, traits="view")
row("slice", 1, "slice", infer.slice_, traits="view")
row("reverse", 1, "dimensions", infer.reverse, traits="view")
row("pad", 2, "padding", infer.pad, traits="view")
row("concatenate", None, "dimensions", infer.concatenate, traits="view")
row("dynamic-slice", None, "dynamic_slice_sizes", infer.dynamic_slice)
row("dynamic-update-slice", None, "", infer.dynamic_update_slice)
row(
    "gather", 2,
    "offset_dims collapsed_slice_dims? start_index_map operand_batching_dims? start_indices_batching_dims? index_vector_dim slice_sizes "
    "indices_are_sorted?",
    infer.gather,
)  # fmt: skip
row(
    "scatter", None,
    "update_window_dims inserted_window_dims? scatter_dims_to_operand_dims input_batching_dims? scatter_indices_batching_dims? index_vector_dim "
    "indices_are_sorted? unique_indices? to_apply",
    infer.scatter,
)  # fmt: skip
row(
    "get-dimension-size",
    1,
    "dimensions",
    partial(infer.dimension_size, "get-dimension-size", lambda x: Shape("s32")),
)
row(
    "set-dimension-size",
    2,
    "dimensions",
    partial(infer.dimension_size, "set-dimension-size", lambda x: x.shape),
)


# Contractions, reductions
def _given_dtype(rule: Callable[..., Shape]) -> Callable[..., None]:
    """dot and convolution may accumulate into, and return, another element type."""
    return lambda shape, *operands, **attrs: explicit.dims_match(
        shape, rule(*operands, **attrs), *operands
    )


_DOT = "lhs_batch_dims? lhs_contracting_dims? rhs_batch_dims? rhs_contracting_dims?"
row("dot", 2, _DOT + " operand_precision?", infer.dot, _given_dtype(infer.dot))
row(
    "ragged-dot",
    3,
    _DOT + " lhs_ragged_dims rhs_group_dims?",
    infer.ragged_dot,
    _given_dtype(infer.ragged_dot),
)
row(
    "convolution", 2, "window? dim_labels feature_group_count? batch_group_count? operand_precision?",
    infer.convolution, _given_dtype(infer.convolution),
)  # fmt: skip
row("reduce", None, "dimensions to_apply", infer.reduce)
row("reduce-window", None, "window? to_apply", infer.reduce_window)
row("select-and-scatter", 3, "window? select scatter", infer.select_and_scatter)
row("sort", None, "dimensions is_stable? to_apply", infer.sort)
row("topk", 1, "k largest", infer.topk, traits="composite")
row("map", None, "dimensions? to_apply", infer.map_, traits="composite")
row("fft", 1, "fft_type fft_length", infer.fft)
row("cholesky", 1, "lower?", infer.cholesky)
row("triangular-solve", 2, "left_side? lower? unit_diagonal? transpose_a?", infer.triangular_solve)
row(
    "batch-norm-training", 3, "epsilon feature_index", infer.batch_norm_training, traits="composite"
)
row(
    "batch-norm-inference",
    5,
    "epsilon feature_index",
    infer.batch_norm_inference,
    traits="composite",
)
row("batch-norm-grad", 5, "epsilon feature_index", infer.batch_norm_grad, traits="composite")

# Random numbers
row("rng", 2, "distribution", check=explicit.rng, traits="impure")
row("rng-bit-generator", 1, "algorithm", check=explicit.rng_bit_generator, traits="composite")
row("rng-get-and-update-state", 0, "delta", check=explicit.anything, traits="impure")

# Tuples, control flow, program boundary
row("tuple", None, "", infer.tuple_)
row("get-tuple-element", 1, "index", infer.get_tuple_element)
row("call", None, "to_apply", infer.call, traits="control")
row("while", 1, "condition body independent?", infer.while_, traits="control")
row("conditional", None, "branch_computations", infer.conditional, traits="control")
row("fusion", None, "kind? calls", infer.fusion, traits="control")
row(
    "custom-call",
    None,
    "custom_call_target called_computations? custom_call_has_side_effect? api_version? opaque?",
    check=explicit.anything,
)
row("opt-barrier", 1, "", infer.first)
row("after-all", None, "", infer.tokens)
row("add-dependency", 2, "", infer.first)
row("domain", 1, "domain?", infer.first)
row("infeed", 1, "infeed_config?", check=explicit.with_token, traits="impure")
row("outfeed", 2, "outfeed_shape? outfeed_config?", infer.tokens, traits="impure")
row("send", 2, "channel_id is_host_transfer?", infer.send, traits="impure")
row("send-done", 1, "channel_id is_host_transfer?", infer.tokens, traits="impure")
row("recv", 1, "channel_id is_host_transfer?", check=explicit.anything, traits="impure")
row("recv-done", 1, "channel_id is_host_transfer?", infer.recv_done, traits="impure")
row("copy-start", 1, "", lambda x: infer.tuple_shape(x.shape, x.shape, infer.U32))
row("copy-done", 1, "", partial(infer.finished, "copy-done", 0))
row(
    "async-start", None, "calls async_execution_thread?", infer.async_start, traits="impure control"
)
row("async-update", 1, "", infer.first, traits="impure")
row("async-done", 1, "", partial(infer.finished, "async-done", 1), traits="impure")

# Collectives
row("partition-id", 0, "", infer.constant_u32, traits="collective")
row("replica-id", 0, "", infer.constant_u32, traits="collective")
_GROUPS = "channel_id? replica_groups? use_global_device_ids? constrain_layout?"
for name, arity, extra, rule in (
    ("all-gather", None, "dimensions", infer.all_gather),
    ("all-reduce", None, "to_apply", infer.same_all),
    ("all-to-all", None, "dimensions?", infer.all_to_all),
    ("collective-broadcast", None, "", infer.same_all),
    ("reduce-scatter", None, "dimensions to_apply", infer.reduce_scatter),
    ("ragged-all-to-all", 6, "", lambda x, output, *sizes, **attrs: output.shape),
):
    # A check that accepts everything: without replica_groups the number of participants is not in the instruction.
    free = explicit.anything if name in ("all-gather", "reduce-scatter") else None
    row(name, arity, f"{_GROUPS} {extra}", rule, free, traits="collective impure")
row(
    "collective-permute",
    None,
    "channel_id? source_target_pairs",
    infer.same_all,
    traits="collective impure",
)
row("all-reduce-start", None, f"{_GROUPS} to_apply", infer.same_all, traits="collective impure")
row("all-reduce-done", 1, "", infer.first, traits="collective impure")
row(
    "all-gather-start",
    None,
    f"{_GROUPS} dimensions",
    partial(infer.started, infer.all_gather),
    explicit.anything,
    traits="collective impure",
)
row(
    "all-gather-done",
    1,
    "",
    partial(infer.finished, "all-gather-done", 1),
    traits="collective impure",
)
row(
    "collective-permute-start", None, "channel_id? source_target_pairs", partial(infer.started, infer.same_all), explicit.anything,
    traits="collective impure",
)  # fmt: skip
row(
    "collective-permute-done",
    1,
    "",
    partial(infer.finished, "collective-permute-done", 1),
    traits="collective impure",
)
