"""Sharding factors: per opcode, which dimensions of operands and results hold the same index, and
what sharding it costs.

    rule = factors(dot_instruction)       # f32[8,16] · f32[16,4] -> f32[8,4]
    str(rule)                             # 'ik,kj->ij {k: sum}'
    rule.sizes                            # (8, 4, 16)

A factor is one index of the einsum-like notation (Shardy's OpShardingRule, GSPMD's dimension
propagation). When a factor of every operand and result that has it is sharded alike, each device
runs the opcode on its blocks. `roles` tell what else that takes:

    free    nothing
    sum     the results are partial: reduce them over the devices (dot's contraction, reduced
            dimensions, rows that a gather looks up)
    shift   data of other devices at the block's edges, or a start that depends on the device
            (slice, pad, windows, concatenate, iota)
    whole   impossible: every device needs the whole dimension (of a sort, of an FFT, …)

A dimension lists its factors from major to minor (`reshape` merges and splits them); a dimension
without factors has to be whole. Propagation (compiler/spmd/propagate.py) and the partitioner
(compiler/spmd/partitioner.py) know opcodes by these rules only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch_hlo.frozen import frozen
from torch_hlo.tables import entry

from ..ir import (
    IDENTITIES,
    OPCODES,
    Computation,
    Instruction,
    Ints,
    Size,
    WindowDim,
    dim_max,
)
from ..ir.infer_products import conv_dims

Dims = tuple[Ints, ...]  # per dimension its factors, major to minor
_REDUCERS = frozenset(name for name, row in OPCODES.items() if "commutative" in row.traits)


@frozen
class Factors:
    """The rule of one instruction: one entry of `operands` per array of the (flat) operands, one of
    `results` per array of the result."""

    sizes: Ints
    roles: tuple[str, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]

    def __str__(self) -> str:
        def text(dims: Dims) -> str:
            return "".join(
                (
                    "1"
                    if not d
                    else _letter(d[0])
                    if len(d) == 1
                    else "(" + "".join(map(_letter, d)) + ")"
                )
                for d in dims
            )

        special = ", ".join(
            f"{_letter(f)}: {role}" for f, role in enumerate(self.roles) if role != "free"
        )
        return f"{','.join(map(text, self.operands))}->{','.join(map(text, self.results))}" + (
            f" {{{special}}}" if special else ""
        )


def _letter(factor: int) -> str:
    return "ijklmnopqrstuvwxyzabcdefgh"[factor] if factor < 26 else f"[{factor}]"


class _Maker:
    """Collects the factors of a rule."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.roles: list[str] = []

    def new(self, size: Size, role: str = "free") -> Ints:
        """A factor as the contents of a dimension; a dimension of size 1 (or of a symbolic size)
        has none."""
        if not isinstance(size, int) or size <= 1:
            return ()
        self.sizes.append(size)
        self.roles.append(role)
        return (len(self.sizes) - 1,)

    def each(self, dims: Sequence[Size], role: str = "free") -> list[Ints]:
        return [self.new(d, role) for d in dims]

    def rule(
        self,
        operands: Sequence[Sequence[Ints]],
        results: Sequence[Sequence[Ints]],
    ) -> Factors:
        return Factors(
            tuple(self.sizes),
            tuple(self.roles),
            tuple(map(tuple, operands)),
            tuple(map(tuple, results)),
        )


Rule = Callable[[Instruction, _Maker], Factors]
RULES: dict[str, Rule] = {}


def _rule(names: str) -> Callable[[Rule], Rule]:
    return entry(RULES, names.split())


def factors(x: Instruction) -> Factors:
    """The rule of `x`. Opcodes without one (control flow, tuples, collectives, tokens) have no
    factors: all dimensions whole."""
    fn = RULES.get(x.op) or (_pointwise if "pointwise" in OPCODES[x.op].traits else _opaque)
    return fn(x, _Maker())


def _opaque(x: Instruction, m: _Maker) -> Factors:
    return m.rule(
        [[()] * s.rank for o in x.operands for s in o.shape.arrays],
        [[()] * s.rank for s in x.shape.arrays],
    )


@_rule("copy map domain")
def _pointwise(x: Instruction, m: _Maker) -> Factors:
    if x.is_tuple:
        return _opaque(x, m)
    dims = m.each(x.dims)
    return m.rule([dims if o.rank == x.rank else [()] * o.rank for o in x.operands], [dims])


@_rule("opt-barrier")
def _identity(x: Instruction, m: _Maker) -> Factors:
    flat = [m.each(s.dims) for s in x.shape.arrays]
    return m.rule(flat, flat)


@_rule("set-dimension-size")
def _set_dimension_size(x: Instruction, m: _Maker) -> Factors:
    dims = m.each(x.dims)
    for d in x["dimensions"]:
        dims[d] = ()
    return m.rule([dims, []], [dims])


@_rule("uniform-quantize uniform-dequantize")
def _quantize(x: Instruction, m: _Maker) -> Factors:
    dims = m.each(x.dims)
    channels = [dims[d] for d in x.get("dimensions", ())]
    return m.rule([dims, channels, channels], [dims])


# Moving elements


@_rule("constant iota")
def _source(x: Instruction, m: _Maker) -> Factors:
    dims = m.each(x.dims)
    if x.op == "iota" and dims[x["iota_dimension"]]:
        m.roles[dims[x["iota_dimension"]][0]] = "shift"
    return m.rule([], [dims])


@_rule("broadcast")
def _broadcast(x: Instruction, m: _Maker) -> Factors:
    dims = m.each(x.dims)
    return m.rule([[dims[d] for d in x["dimensions"]]], [dims])


@_rule("transpose")
def _transpose(x: Instruction, m: _Maker) -> Factors:
    dims = m.each(x.operand.dims)
    return m.rule([dims], [[dims[d] for d in x["dimensions"]]])


@_rule("reshape bitcast")
def _reshape(x: Instruction, m: _Maker) -> Factors:
    """Both lists of sizes are walked from the major end; each step's greatest common divisor is a
    factor. When what is left of a dimension does not divide its counterpart, the rest of both is
    whole up to where the products meet again."""
    old = x.operand.shape
    new = x.shape
    if not (old.is_static and new.is_static) or old.dtype != new.dtype or 0 in new.dims:
        return _opaque(x, m)
    olds = old.sizes
    news = new.sizes
    left: list[list[int]] = [[] for _ in olds]
    right: list[list[int]] = [[] for _ in news]
    i = j = 0
    a = b = 1  # what is still to be matched of dimensions i - 1 and j - 1
    while True:
        while a == 1 and i < old.rank:
            a = olds[i]
            i = i + 1
        while b == 1 and j < new.rank:
            b = news[j]
            j = j + 1
        if a == 1 and b == 1:
            break
        common = math.gcd(a, b)
        if common > 1:
            (f,) = m.new(common)
            left[i - 1].append(f)
            right[j - 1].append(f)
            a = a // common
            b = b // common
        if a > 1 and b > 1:  # coprime rests
            left[i - 1] += m.new(a, "whole")
            right[j - 1] += m.new(b, "whole")
            while a != b:
                if a < b:
                    left[i] += m.new(olds[i], "whole")
                    a = a * olds[i]
                    i = i + 1
                else:
                    right[j] += m.new(news[j], "whole")
                    b = b * news[j]
                    j = j + 1
            a = b = 1
    return m.rule([[tuple(d) for d in left]], [[tuple(d) for d in right]])


@_rule("bitcast-convert")
def _bitcast_convert(x: Instruction, m: _Maker) -> Factors:
    a = x.operand.rank
    b = x.rank
    dims = m.each(x.dims[: min(a, b)])
    return m.rule([dims + [()] * (a - len(dims))], [dims + [()] * (b - len(dims))])


def _along(x: Instruction, m: _Maker, changed: Sequence[bool], inputs: int) -> Factors:
    """Dimensions are kept but for those `changed`, which keep their order and may have another
    size."""
    dims = [
        m.new(dim_max(size, x.dims[d]), "shift" if changed[d] else "free")
        for d, size in enumerate(x.operand.dims)
    ]
    return m.rule([dims] * inputs + [[]] * (len(x.operands) - inputs), [dims])


@_rule("dynamic-slice")
def _dynamic_slice(x: Instruction, m: _Maker) -> Factors:
    """A dimension that is cut may be sharded in the operand: the devices that hold the slice
    contribute to a sum."""
    source = []
    result = []
    for size, n in zip(x.operand.dims, x.dims, strict=True):
        source.append(m.new(size, "free" if size == n else "sum"))
        result.append(source[-1] if size == n else ())
    return m.rule([source] + [[]] * (len(x.operands) - 1), [result])


@_rule("dynamic-update-slice")
def _dynamic_update_slice(x: Instruction, m: _Maker) -> Factors:
    cut = [size != n for size, n in zip(x.dims, x.operands[1].dims, strict=True)]
    dims = [m.new(size, "shift" if c else "free") for size, c in zip(x.dims, cut, strict=True)]
    return m.rule(
        [dims, [() if c else d for d, c in zip(dims, cut, strict=True)]]
        + [[]] * (len(x.operands) - 2),
        [dims],
    )


def _none(rank: int) -> list[Ints]:
    """No factors of so many dimensions, yet."""
    return [()] * rank


@_rule("gather")
def _gather(x: Instruction, m: _Maker) -> Factors:
    """Looked-up dimensions may be sharded when one element of them is taken: the device that holds
    it contributes to a sum."""
    source = x.operand.shape
    indices = x.operands[1].shape
    result = _none(x.rank)
    starts = _none(indices.rank)
    outer = [d for d in range(indices.rank) if d != x["index_vector_dim"]]
    places = [d for d in range(x.rank) if d not in x["offset_dims"]]
    for d, at in zip(outer, places, strict=True):
        starts[d] = result[at] = m.new(indices.dims[d])
    paired = dict(zip(x["operand_batching_dims"], x["start_indices_batching_dims"], strict=True))
    offsets = iter(x["offset_dims"])
    dims: list[Ints] = []
    for d, (size, taken) in enumerate(zip(source.dims, x["slice_sizes"], strict=True)):
        if d in paired:
            dims.append(starts[paired[d]])
            continue
        place = None if d in x["collapsed_slice_dims"] else next(offsets)
        looked_up = d in x["start_index_map"] and taken == 1
        dims.append(m.new(size, "free" if taken == size else "sum" if looked_up else "whole"))
        if place is not None and taken == size:
            result[place] = dims[-1]
    return m.rule([dims, starts], [result])


@_rule("scatter")
def _scatter(x: Instruction, m: _Maker) -> Factors:
    """Scattered-to dimensions may be sharded (each device drops what is not its own); so may the
    list of updates when `to_apply` is a known reduction: the results are then partial."""
    n = len(x.operands) // 2
    source = x.operand.shape
    indices = x.operands[n].shape
    updates = x.operands[n + 1].shape
    spread = "sum" if n == 1 and reducer(x["to_apply"]) else "whole"
    starts = _none(indices.rank)
    change = _none(updates.rank)
    paired = dict(zip(x["input_batching_dims"], x["scatter_indices_batching_dims"], strict=True))
    outer = [d for d in range(indices.rank) if d != x["index_vector_dim"]]
    places = [d for d in range(updates.rank) if d not in x["update_window_dims"]]
    for d, place in zip(outer, places, strict=True):
        starts[d] = change[place] = m.new(
            indices.dims[d], "free" if d in paired.values() else spread
        )
    window = iter(x["update_window_dims"])
    dims: list[Ints] = []
    for d, size in enumerate(source.dims):
        if d in paired:
            dims.append(starts[paired[d]])
        elif d in x["inserted_window_dims"]:
            dims.append(m.new(size, "shift" if d in x["scatter_dims_to_operand_dims"] else "whole"))
        else:
            place = next(window)
            full = updates.dims[place] == size
            single = updates.dims[place] == 1 and d in x["scatter_dims_to_operand_dims"]
            dims.append(m.new(size, "free" if full else "shift" if single else "whole"))
            if full:
                change[place] = dims[-1]
    return m.rule([dims] * n + [starts] + [change] * n, [dims] * n)


# Contractions and reductions


def reducer(to_apply: Computation) -> str | None:
    """The opcode when the computation is one commutative, associative opcode on its two
    parameters."""
    root = to_apply.root
    params = to_apply.params
    if len(params) == 2 and root.op in _REDUCERS and root.operands in (params, params[::-1]):
        return root.op
    return None


@_rule("dot ragged-dot")
def _dot(x: Instruction, m: _Maker) -> Factors:
    """Of a ragged product columns and batch are free; rows and contraction know where groups
    begin."""
    a, b, *groups = (o.dims for o in x.operands)
    ragged = x.get("lhs_ragged_dims", ())
    left = _none(len(a))
    right = _none(len(b))
    result: list[Ints] = [()] if set(ragged) & set(x["lhs_contracting_dims"]) else []
    for i, j in zip(x["lhs_batch_dims"], x["rhs_batch_dims"], strict=True):
        left[i] = right[j] = m.new(a[i], "whole" if i in ragged else "free")
        result.append(left[i])
    for side, dims, used, whole in (
        (left, a, (*x["lhs_batch_dims"], *x["lhs_contracting_dims"]), ragged),
        (right, b, (*x["rhs_batch_dims"], *x["rhs_contracting_dims"], *x["rhs_group_dims"]), ()),
    ):
        for d, size in enumerate(dims):
            if d not in used:
                side[d] = m.new(size, "whole" if d in whole else "free")
                result.append(side[d])
    for i, j in zip(x["lhs_contracting_dims"], x["rhs_contracting_dims"], strict=True):
        left[i] = right[j] = m.new(a[i], "whole" if i in ragged else "sum")
    return m.rule([left, right, *(_none(len(g)) for g in groups)], [result])


@_rule("convolution")
def _convolution(x: Instruction, m: _Maker) -> Factors:
    n = conv_dims(x["dim_labels"])
    lhs, rhs = (o.shape for o in x.operands)
    features = x["feature_group_count"]
    batches = x["batch_group_count"]
    left = _none(lhs.rank)
    right = _none(rhs.rank)
    result = _none(x.rank)
    group = m.new(dim_max(features, batches))
    batch = m.new(x.dims[n.out_batch])
    contracted = m.new(rhs.dims[n.rhs_input], "sum")
    out = m.new(rhs.dims[n.rhs_output] // max(features, batches))
    left[n.lhs_batch] = (group if batches > 1 else ()) + batch
    left[n.lhs_feature] = (group if features > 1 else ()) + contracted
    right[n.rhs_input] = contracted
    right[n.rhs_output] = result[n.out_feature] = group + out
    result[n.out_batch] = batch
    for w, i, k, o in zip(x["window"], n.lhs_spatial, n.rhs_spatial, n.out_spatial, strict=True):
        taps = rhs.dims[k]
        positions = x.dims[o]
        # gradient of a kernel: the sum goes over the image
        if isinstance(taps, int) and isinstance(positions, int) and taps > positions:
            left[i] = right[k] = m.new(dim_max(lhs.dims[i], taps), "sum")
            result[o] = m.new(positions, "whole")
        else:
            left[i] = result[o] = m.new(
                dim_max(lhs.dims[i], positions),
                "free" if w == WindowDim(1) else "shift",
            )
            right[k] = m.new(taps, "whole")
    return m.rule([left, right], [result])


@_rule("reduce")
def _reduce(x: Instruction, m: _Maker) -> Factors:
    n = len(x.operands) // 2
    dims = [
        m.new(size, "sum" if d in x["dimensions"] else "free")
        for d, size in enumerate(x.operand.dims)
    ]
    return m.rule(
        [dims] * n + [[]] * n,
        [[f for d, f in enumerate(dims) if d not in x["dimensions"]]] * n,
    )


@_rule("reduce-window")
def _reduce_window(x: Instruction, m: _Maker) -> Factors:
    n = len(x.operands) // 2
    first = x.operand.dims
    result = x.shape.arrays[0].dims
    dims = [
        m.new(dim_max(a, b), "free" if w == WindowDim(1) else "shift")
        for w, a, b in zip(x["window"], first, result, strict=True)
    ]
    return m.rule([dims] * n + [[]] * n, [dims] * n)


@_rule("select-and-scatter")
def _select_and_scatter(x: Instruction, m: _Maker) -> Factors:
    dims = [
        m.new(size, "free" if w == WindowDim(1) else "shift")
        for w, size in zip(x["window"], x.dims, strict=True)
    ]
    return m.rule([dims, dims, []], [dims])


@_rule("sort")
def _sort(x: Instruction, m: _Maker) -> Factors:
    dims = [
        m.new(size, "whole" if d in x["dimensions"] else "free")
        for d, size in enumerate(x.operand.dims)
    ]
    return m.rule([dims] * len(x.operands), [dims] * len(x.operands))


@_rule("topk")
def _topk(x: Instruction, m: _Maker) -> Factors:
    outer = m.each(x.operand.dims[:-1])
    return m.rule([[*outer, m.new(x.operand.dims[-1], "whole")]], [[*outer, ()]] * 2)


# Linear algebra, normalisation, random numbers


RULES["slice"] = lambda x, m: _along(
    x,
    m,
    [r != (0, n, 1) for r, n in zip(x["slice"], x.operand.dims, strict=True)],
    1,
)
RULES["pad"] = lambda x, m: _along(x, m, [p != (0, 0, 0) for p in x["padding"]], 1)
RULES["reverse"] = lambda x, m: _along(x, m, [d in x["dimensions"] for d in range(x.rank)], 1)
RULES["concatenate"] = lambda x, m: _along(
    x, m, [d in x["dimensions"] for d in range(x.rank)], len(x.operands)
)
RULES["fft"] = lambda x, m: _batched(x, m, len(x["fft_length"]))
RULES["cholesky"] = lambda x, m: _batched(x, m, 2)


def _batched(x: Instruction, m: _Maker, inner: int) -> Factors:
    """Operands and results have equal outer dimensions; the last `inner` are whole."""
    outer = m.each(x.operand.dims[:-inner])
    return m.rule([[*outer, *[()] * inner] for _ in x.operands], [[*outer, *[()] * inner]])


@_rule("triangular-solve")
def _triangular_solve(x: Instruction, m: _Maker) -> Factors:
    outer = m.each(x.dims[:-2])
    rows, columns = x.dims[-2:]
    b = [*outer, (), m.new(columns)] if x["left_side"] else [*outer, m.new(rows), ()]
    return m.rule([[*outer, (), ()], b], [b])


@_rule("batch-norm-training batch-norm-grad batch-norm-inference")
def _batch_norm(x: Instruction, m: _Maker) -> Factors:
    """Statistics sum over everything but the features."""
    sums = "free" if x.op == "batch-norm-inference" else "sum"
    dims = [
        m.new(size, "free" if d == x["feature_index"] else sums)
        for d, size in enumerate(x.operand.dims)
    ]
    channel = [dims[x["feature_index"]]]
    whole = (0, 4) if x.op == "batch-norm-grad" else (0,)
    return m.rule(
        [dims if i in whole else channel for i in range(len(x.operands))],
        [dims, channel, channel] if x.is_tuple else [dims],
    )


@_rule("rng-bit-generator")
def _rng_bit_generator(x: Instruction, m: _Maker) -> Factors:
    """Any block of the numbers can be drawn by itself."""
    state, bits = x.shape.arrays
    return m.rule([[()] * state.rank], [[()] * state.rank, m.each(bits.dims)])


@_rule("custom-call")
def _custom_call(x: Instruction, m: _Maker) -> Factors:
    if x["custom_call_target"] in ANNOTATIONS:
        dims = m.each(x.dims)
        return m.rule([dims], [dims])
    if x["custom_call_target"].startswith("lapack_"):
        return _matrices(x, m)
    return _opaque(x, m)


def _matrices(x: Instruction, m: _Maker) -> Factors:
    """One routine per matrix of a batch: the outer dimensions that all arrays have in common are
    free."""
    operands = [o.shape for o in x.operands]
    results = x.shape.arrays
    shapes = [*operands, *results]
    batch = max(0, *(s.rank for s in shapes)) - 2
    while batch > 0 and any(s.dims[:batch] != shapes[0].dims[:batch] for s in shapes):
        batch -= 1
    outer = m.each(shapes[0].dims[: max(batch, 0)])
    return m.rule(
        [[*outer, *[()] * (s.rank - len(outer))] for s in operands],
        [[*outer, *[()] * (s.rank - len(outer))] for s in results],
    )


# Collectives inside regions that are written per device along some axes: the other axes may split
# what they carry


@_rule("all-reduce collective-permute collective-broadcast all-gather reduce-scatter all-to-all")
def _collective(x: Instruction, m: _Maker) -> Factors:
    """Dimensions that the devices exchange pieces of are whole; operand i becomes result i, but
    all-to-all of a tuple mixes them."""
    outs = x.shape.arrays
    ins = [s for o in x.operands for s in o.shape.arrays]
    if len(ins) != len(outs):
        return _opaque(x, m)
    exchanged = x.get("dimensions") or ()
    mixed = x.op == "all-to-all" and len(ins) > 1
    operands: list[list[Ints]] = []
    for shape in ins:
        operands.append(
            operands[0]
            if mixed and operands
            else [() if d in exchanged else m.new(n) for d, n in enumerate(shape.dims)]
        )
    return m.rule(operands, operands)


# Custom calls that only say something of their operand.
ANNOTATIONS = IDENTITIES - {"SPMDFullToShardShape", "SPMDShardToFullShape"}
