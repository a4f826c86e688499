"""THE table: every opcode of the language in one row.

    OPCODES["transpose"].infer(x, dimensions=(1, 0))    # shape rule (ShapeError)

To add a pointwise opcode: a row here, its meaning in hlo/evaluate/elementwise.py, its code in
compiler/llvm/scalar.py. Builder, StableHLO text, fusion, costs and sharding follow from the row.
To add another: a row, its shape rule in infer.py (or a check in explicit.py when the shape is
given), its meaning in hlo/evaluate/.

Traits: pointwise (element i of the result is a function of element i of the operands), heavy (of
many instructions), exact (rounds nothing: the result is a value of the operands' type), flop
(counts as arithmetic, as every heavy one does), commutative (in its first two operands), view
(moves or repeats elements, computes nothing), composite (compiler/simplify/legalize.py expands it),
control (calls computations), collective (talks to other devices), impure (may not be merged or
dropped; carries a `serial`)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch_hlo.frozen import frozen

from . import explicit, infer, infer_products
from .infer import REAL_OF, ShapeError
from .instruction import Instruction
from .shape import Shape, tuple_shape

# Legal on every opcode; no shape rule or meaning looks at them.
COMMON_ATTRS = ("sharding", "serial", "backend_config", "frontend_attributes")


@frozen
class Opcode:
    name: str
    arity: int | None  # number of operands; None: any
    attrs: tuple[str, ...]  # legal attributes, in print order
    required: frozenset[str]
    rule: Callable[..., Shape] | None  # None: the shape is always given
    check: Callable[..., None] | None  # of a given shape; None: it must equal the inferred one
    traits: frozenset[str]
    fusion: str  # light, heavy, move, free, reduce; step: what runs as a step of its own
    weight: int  # rough cost of an element inside a kernel, in vector instructions
    kinds: str  # element types (see DType.kind) that a pointwise opcode takes; "": its rule says
    spelling: str | None  # the operation of StableHLO or CHLO that a pointwise opcode is

    def infer(self, *operands: Instruction, **attrs: Any) -> Shape:
        """Shape of the result. Raises ShapeError on a wrong number of operands, attribute, or
        shape."""
        attrs = self._checked(operands, attrs)
        if self.rule is None:
            raise ShapeError(f"{self.name}: the operands do not determine the shape; give one")
        return self.rule(*operands, **attrs)

    def verify(self, shape: Shape, *operands: Instruction, **attrs: Any) -> None:
        """Raises ShapeError when `shape` is no legal result."""
        attrs = self._checked(operands, attrs)
        if self.check is not None:
            self.check(shape, *operands, **attrs)
        elif self.rule is not None and not infer.compatible(
            shape, expected := self.rule(*operands, **attrs)
        ):
            infer.fail(self.name, f"has shape {shape}, expected {expected}", *operands)

    def _checked(self, operands: tuple[Instruction, ...], attrs: dict[str, Any]) -> dict[str, Any]:
        if self.arity is not None and len(operands) != self.arity:
            infer.fail(self.name, f"takes {self.arity} operands, got {len(operands)}", *operands)
        kept = {k: v for k, v in attrs.items() if k not in COMMON_ATTRS}
        if bad := [k for k in kept if k not in self.attrs]:
            raise ShapeError(
                f"{self.name}: unknown attribute {bad[0]}; legal are"
                f" {', '.join(self.attrs) or 'none'}"
            )
        if missing := self.required - kept.keys():
            raise ShapeError(f"{self.name}: missing attribute {min(missing)}")
        return kept


OPCODES: dict[str, Opcode] = {}


def row(
    name: str,
    arity: int | None,
    attrs: str = "",
    rule: Callable[..., Shape] | None = None,
    check: Callable[..., None] | None = None,
    traits: str = "",
    *,
    fusion: str = "step",
    weight: int = 0,
    kinds: str = "",
    spelling: str | None = None,
) -> None:
    """Add an opcode. `attrs` in print order; a trailing `?` marks an optional one."""
    names = attrs.split()
    legal = tuple(n.rstrip("?") for n in names)
    required = frozenset(n for n in names if not n.endswith("?"))
    OPCODES[name] = Opcode(
        name,
        arity,
        legal,
        required,
        rule,
        check,
        frozenset(traits.split()),
        fusion,
        weight,
        kinds,
        spelling,
    )


def pointwise(
    name: str,
    arity: int,
    kinds: str,
    traits: str = "",
    rule: Callable[..., Shape] | None = None,
    *,
    result: Callable[[str], str] | None = None,
    dialect: str = "stablehlo",
    **columns: Any,
) -> None:
    """Add a pointwise opcode. Without a rule it takes operands of one shape with elements of
    `kinds` (see DType.kind); its result has that shape too, or the element type `result` says."""
    if rule is None and kinds:
        of_kinds = infer.unary if arity == 1 else infer.binary
        rule = (
            partial(infer.unary_to, name, kinds, result)
            if result
            else partial(of_kinds, name, kinds)
        )
    row(
        name,
        arity,
        rule=rule,
        traits=f"pointwise {traits}",
        fusion="heavy" if "heavy" in traits else "light",
        kinds=kinds,
        spelling=f"{dialect}.{name.replace('-', '_')}",
        **{"weight": 1, **columns},
    )


def _real(dtype: str) -> str:
    return REAL_OF.get(dtype, dtype)


# fmt: off
#         name            operands  kinds  traits
pointwise("abs",                   1, "sufc", "exact flop", result=_real)
pointwise("acos",                  1, "fc", "heavy", dialect="chlo")
pointwise("acosh",                 1, "fc", "heavy", dialect="chlo")
pointwise("asin",                  1, "fc", "heavy", dialect="chlo")
pointwise("asinh",                 1, "fc", "heavy", dialect="chlo")
pointwise("atanh",                 1, "fc", "heavy", dialect="chlo")
pointwise("cbrt",                  1, "fc", "heavy", weight=80)
pointwise("ceil",                  1, "f", "exact flop")
pointwise("cosh",                  1, "fc", "heavy", dialect="chlo")
pointwise("cosine",                1, "fc", "heavy", weight=45)
pointwise("count-leading-zeros",   1, "su")
pointwise("erf",                   1, "f", "heavy", weight=35, dialect="chlo")
pointwise("erf-inv",               1, "f", "heavy", weight=70, dialect="chlo")
pointwise("erfc",                  1, "f", "heavy", weight=45, dialect="chlo")
pointwise("exponential",           1, "fc", "heavy", weight=18)
pointwise("exponential-minus-one", 1, "fc", "heavy", weight=80)
pointwise("floor",                 1, "f", "exact flop")
pointwise("imag",                  1, "fc", result=_real)
pointwise("is-finite",             1, "f", result=lambda dtype: "pred")
pointwise("log",                   1, "fc", "heavy", weight=25)
pointwise("log-plus-one",          1, "fc", "heavy", weight=60)
pointwise("logistic",              1, "fc", "heavy", weight=22)
pointwise("negate",                1, "sufc", "exact flop")
pointwise("not",                   1, "psu")
pointwise("popcnt",                1, "su")
pointwise("real",                  1, "fc", result=_real)
pointwise("round-nearest-afz",     1, "f", "exact")
pointwise("round-nearest-even",    1, "f", "exact")
pointwise("rsqrt",                 1, "fc", "heavy", weight=10)
pointwise("sign",                  1, "sufc", "exact")
pointwise("sine",                  1, "fc", "heavy", weight=45)
pointwise("sinh",                  1, "fc", "heavy", dialect="chlo")
pointwise("sqrt",                  1, "fc", "heavy", weight=6)
pointwise("tan",                   1, "fc", "heavy", weight=60)
pointwise("tanh",                  1, "fc", "heavy", weight=30)
pointwise("add",                   2, "psufc", "commutative flop")
pointwise("and",                   2, "psu", "commutative")
pointwise("atan2",                 2, "fc", "heavy", weight=60)
pointwise("complex",               2, "", "", infer.complex_)
pointwise("divide",                2, "sufc", "heavy", weight=6)
pointwise("maximum",               2, "psuf", "commutative exact flop")
pointwise("minimum",               2, "psuf", "commutative exact flop")
pointwise("multiply",              2, "psufc", "commutative flop")
pointwise("next-after",            2, "f", "exact", weight=8, dialect="chlo")
pointwise("or",                    2, "psu", "commutative")
pointwise("power",                 2, "sufc", "heavy", weight=90)
pointwise("remainder",             2, "suf", "heavy", weight=40)
pointwise("shift-left",            2, "su")
pointwise("shift-right-arithmetic", 2, "su")
pointwise("shift-right-logical",   2, "su")
pointwise("subtract",              2, "sufc", "flop")
pointwise("xor",                   2, "psu", "commutative")
pointwise("compare",               2, "", "flop", infer.compare, attrs="direction type?")
pointwise("select",                3, "", "exact flop", infer.select)
pointwise("clamp",                 3, "", "exact flop", infer.clamp)
pointwise("convert",               1, "", check=explicit.convert)
pointwise("reduce-precision",      1, "", "", infer.reduce_precision,
          attrs="exponent_bits mantissa_bits")
# fmt: on
row("stochastic-convert", 2, check=explicit.stochastic_convert, traits="pointwise composite")
row("copy", 1, "", infer.first, fusion="light", weight=1)
row("bitcast-convert", 1, check=explicit.bitcast_convert, fusion="light")
for name, kinds in (("uniform-quantize", ("f", "su")), ("uniform-dequantize", ("su", "f"))):
    checked = partial(explicit.quantized, name, *kinds)
    row(name, 3, "dimensions?", check=checked, traits="composite")

# Inputs and moving elements
row("parameter", 0, "index", check=explicit.parameter)
row("constant", 0, "literal", infer.constant)
row("iota", 0, "iota_dimension", check=explicit.iota, fusion="free", weight=3)
row(
    "broadcast",
    1,
    "dimensions",
    check=explicit.broadcast,
    traits="view",
    fusion="free",
)
row("reshape", 1, check=explicit.reshape, traits="view", fusion="free")
row("dynamic-reshape", None, check=explicit.dynamic_reshape)
row("bitcast", 1, check=explicit.bitcast, traits="view")
row("transpose", 1, "dimensions", infer.transpose, traits="view", fusion="move")
row("slice", 1, "slice", infer.slice_, traits="view", fusion="move")
row("reverse", 1, "dimensions", infer.reverse, traits="view", fusion="move")
row("pad", 2, "padding", infer.pad, traits="view", fusion="move")
row(
    "concatenate",
    None,
    "dimensions",
    infer.concatenate,
    traits="view",
    fusion="move",
)
row("dynamic-slice", None, "dynamic_slice_sizes", infer.dynamic_slice, fusion="move")
row("dynamic-update-slice", None, "", infer.dynamic_update_slice)
row(
    "gather",
    2,
    "offset_dims collapsed_slice_dims? start_index_map operand_batching_dims?"
    " start_indices_batching_dims? index_vector_dim slice_sizes indices_are_sorted?",
    infer.gather,
    fusion="move",
)
row(
    "scatter",
    None,
    "update_window_dims inserted_window_dims? scatter_dims_to_operand_dims input_batching_dims?"
    " scatter_indices_batching_dims? index_vector_dim indices_are_sorted? unique_indices? to_apply",
    infer.scatter,
)
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
row("dot", 2, _DOT + " operand_precision?", infer_products.dot, _given_dtype(infer_products.dot))
row(
    "ragged-dot",
    3,
    _DOT + " lhs_ragged_dims rhs_group_dims?",
    infer_products.ragged_dot,
    _given_dtype(infer_products.ragged_dot),
)
row(
    "convolution",
    2,
    "window? dim_labels feature_group_count? batch_group_count? operand_precision?",
    infer_products.convolution,
    _given_dtype(infer_products.convolution),
)
row("reduce", None, "dimensions to_apply", infer_products.reduce, fusion="reduce")
row("reduce-window", None, "window? to_apply", infer_products.reduce_window)
row("select-and-scatter", 3, "window? select scatter", infer_products.select_and_scatter)
row("sort", None, "dimensions is_stable? to_apply", infer_products.sort)
row("topk", 1, "k largest", infer_products.topk, traits="composite")
row("map", None, "dimensions? to_apply", infer_products.map_, traits="composite")
row("fft", 1, "fft_type fft_length", infer_products.fft)
row("cholesky", 1, "lower?", infer_products.cholesky)
row(
    "triangular-solve",
    2,
    "left_side? lower? unit_diagonal? transpose_a?",
    infer_products.triangular_solve,
)
row(
    "batch-norm-training",
    3,
    "epsilon feature_index",
    infer_products.batch_norm_training,
    traits="composite",
)
row(
    "batch-norm-inference",
    5,
    "epsilon feature_index",
    infer_products.batch_norm_inference,
    traits="composite",
)
row(
    "batch-norm-grad",
    5,
    "epsilon feature_index",
    infer_products.batch_norm_grad,
    traits="composite",
)

# Random numbers
row("rng", 2, "distribution", check=explicit.rng, traits="impure")
row("rng-bit-generator", 1, "algorithm", check=explicit.rng_bit_generator, traits="composite")
row("rng-get-and-update-state", 0, "delta", check=explicit.anything, traits="impure")

# Tuples, control flow, program boundary
row("tuple", None, "", infer.tuple_)
row("get-tuple-element", 1, "index", infer.get_tuple_element, fusion="light")
row("call", None, "to_apply", infer_products.call, traits="control")
row("while", 1, "condition body independent?", infer_products.while_, traits="control")
row("conditional", None, "branch_computations", infer_products.conditional, traits="control")
row("fusion", None, "kind? calls", infer_products.fusion, traits="control")
row(
    "custom-call",
    None,
    "custom_call_target called_computations? custom_call_has_side_effect? api_version? opaque?",
    check=explicit.anything,
)
row("opt-barrier", 1, "", infer.first, weight=1)
row("after-all", None, "", infer.tokens)
row("add-dependency", 2, "", infer.first)
row("domain", 1, "domain?", infer.first)
row("infeed", 1, "infeed_config?", check=explicit.with_token, traits="impure")
row("outfeed", 2, "outfeed_shape? outfeed_config?", infer.tokens, traits="impure")
row("send", 2, "channel_id is_host_transfer?", infer.send, traits="impure")
row("send-done", 1, "channel_id is_host_transfer?", infer.tokens, traits="impure")
row("recv", 1, "channel_id is_host_transfer?", check=explicit.anything, traits="impure")
row("recv-done", 1, "channel_id is_host_transfer?", infer.recv_done, traits="impure")
row("copy-start", 1, "", lambda x: tuple_shape(x.shape, x.shape, infer.U32))
row("copy-done", 1, "", partial(infer.finished, "copy-done", 0))
row(
    "async-start",
    None,
    "calls async_execution_thread?",
    infer.async_start,
    traits="impure control",
)
row("async-update", 1, "", infer.first, traits="impure")
row("async-done", 1, "", partial(infer.finished, "async-done", 1), traits="impure")

# Collectives
row("partition-id", 0, "", infer.constant_u32, traits="collective")
row("replica-id", 0, "", infer.constant_u32, traits="collective")
_PAIRS = "channel_id? source_target_pairs"
_GROUPS = "channel_id? replica_groups? use_global_device_ids? constrain_layout?"
for name, arity, extra, rule in (
    ("all-gather", None, "dimensions", infer.all_gather),
    ("all-reduce", None, "to_apply", infer.same_all),
    ("all-to-all", None, "dimensions?", infer.all_to_all),
    ("collective-broadcast", None, "", infer.same_all),
    ("reduce-scatter", None, "dimensions to_apply", infer.reduce_scatter),
    ("ragged-all-to-all", 6, "", lambda x, output, *sizes, **attrs: output.shape),
):
    # A check that accepts everything: without replica_groups the number of participants is not in
    # the instruction.
    free = explicit.anything if name in ("all-gather", "reduce-scatter") else None
    row(name, arity, f"{_GROUPS} {extra}", rule, free, traits="collective impure")
row("collective-permute", None, _PAIRS, infer.same_all, traits="collective impure")
row("all-reduce-start", None, f"{_GROUPS} to_apply", infer.same_all, traits="collective impure")
row("all-reduce-done", 1, "", infer.first, traits="collective impure")
for name, extra, rule in (
    ("all-gather", f"{_GROUPS} dimensions", infer.all_gather),
    ("collective-permute", _PAIRS, infer.same_all),
):
    begun = partial(infer.started, rule)
    row(f"{name}-start", None, extra, begun, explicit.anything, traits="collective impure")
    ended = partial(infer.finished, f"{name}-done", 1)
    row(f"{name}-done", 1, "", ended, traits="collective impure")
# What is computed element by element, and is not rewritten into other opcodes
POINTWISE = tuple(
    name
    for name, opcode in OPCODES.items()
    if "pointwise" in opcode.traits and "composite" not in opcode.traits
)
