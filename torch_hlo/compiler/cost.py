"""What a per-device program costs: operations of one device, and the bytes it sends in each kind of
collective.

    found = cost(module)
    found.matrix_flops, found.flops, found.bytes       # operations, operations, bytes
    print(found.table())

Bytes are those a device sends (and receives) in a ring of the n devices of its group, the least
possible for these collectives (Thakur et al., Optimization of collective communication operations
in MPICH, 2005):

    all-gather            result * (n-1)/n              all-to-all            operand * (n-1)/n
    reduce-scatter        operand * (n-1)/n             collective-permute    operand, on average
        over all devices
    all-reduce            2 * operand * (n-1)/n         collective-broadcast  operand

The body of a loop counts as often as it runs, when its counter tells; otherwise once. Of a
conditional the dearest branch counts.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

from torch_hlo.hlo.ir import OPCODES, Computation, Instruction, Module, Shape, fixed
from torch_hlo.hlo.ir.infer_products import conv_dims
from torch_hlo.hlo.ir.match import scalar_value

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)


class Tally(dict[str, float]):
    """Numbers by kind of collective: 0 where there is none."""

    def __missing__(self, kind: str) -> float:
        return 0


@dataclass(slots=True)
class Cost:
    """matrix_flops: multiplications and additions of dots and convolutions. flops: these, and one
    per element of other arithmetic. collectives, sent: per kind how many run, and the bytes that
    one device sends in them."""

    matrix_flops: float = 0.0
    flops: float = 0.0
    collectives: Tally = field(default_factory=Tally)
    sent: Tally = field(default_factory=Tally)

    @property
    def bytes(self) -> float:
        """Bytes that one device sends in all collectives."""
        return sum(self.sent.values())

    def add(self, other: Cost, times: float = 1) -> None:
        self.matrix_flops += times * other.matrix_flops
        self.flops += times * other.flops
        for mine, theirs in (
            (self.collectives, other.collectives),
            (self.sent, other.sent),
        ):
            for kind, n in theirs.items():
                mine[kind] += times * n

    def table(self) -> str:
        """One line per kind of collective, and the operations of a device."""
        lines = [f"{'collective':22}{'number':>8}{'bytes sent per device':>24}"]
        lines += [
            f"{kind:22}{self.collectives[kind]:8,.0f}{self.sent[kind]:24,.0f}"
            for kind in KINDS
            if self.collectives[kind]
        ]
        lines.append(f"{'total':22}{sum(self.collectives.values()):8,.0f}{self.bytes:24,.0f}")
        lines.append(
            f"operations per device: {self.flops:,.0f}, of these {self.matrix_flops:,.0f} in dots"
            " and convolutions"
        )
        return "\n".join(lines)


def cost(module: Module) -> Cost:
    """Of one device. Works on programs before and after optimization, XLA's too."""
    devices = module.num_partitions if module.num_partitions > 1 else module.num_replicas
    return _Counting(devices).computation(module.entry)


def instruction_cost(x: Instruction, devices: int) -> Cost:
    """Of one instruction of a program of `devices` devices, with what it calls."""
    found = Cost()
    _Counting(devices).instruction(found, x)
    return found


class _Counting:
    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.known: dict[Computation, Cost] = {}

    def computation(self, c: Computation) -> Cost:
        found = self.known.get(c)
        if found is None:
            found = self.known[c] = Cost()
            for x in c.instructions():
                self.instruction(found, x)
        return found

    def instruction(self, total: Cost, x: Instruction) -> None:
        kind = x.op.removesuffix("-start")
        if kind in KINDS:
            total.collectives[kind] += 1
            total.sent[kind] += sent(x, self.devices)
        elif x.op == "while":
            times = trip_count(x) or 1
            total.add(self.computation(x["body"]), times)
            total.add(self.computation(x["condition"]), times)
        elif x.op == "conditional":
            branches = x.get("branch_computations") or (
                x["true_computation"],
                x["false_computation"],
            )
            total.add(
                max((self.computation(b) for b in branches), key=lambda c: (c.bytes, c.flops))
            )
        elif x.op in ("call", "fusion", "async-start"):
            total.add(self.computation(x["to_apply"] if x.op == "call" else x["calls"]))
        elif x.op in ("dot", "convolution"):
            flops = matrix_flops(x)
            total.matrix_flops += flops
            total.flops += flops
        elif x.op in (
            "reduce",
            "reduce-window",
            "select-and-scatter",
            "scatter",
            "map",
            "sort",
        ):
            total.flops += _size(x.operand.shape) * (
                math.prod(w.size for w in x["window"]) if x.op == "reduce-window" else 1
            )
        elif x.op in _ARITHMETIC:
            total.flops += _size(x.shape)


_ARITHMETIC = frozenset(
    name for name, row in OPCODES.items() if not row.traits.isdisjoint(("flop", "heavy"))
)


def _size(shape: Shape) -> float:
    return sum(math.prod(s.sizes) for s in shape.arrays)


def matrix_flops(x: Instruction) -> float:
    """Multiplications and additions of a dot or a convolution (positions in the padding count
    too)."""
    sums = 2.0 * math.prod(x.shape.sizes)
    if x.op == "dot":
        lhs = x.operand.shape.sizes
        return sums * math.prod([lhs[int(d)] for d in x["lhs_contracting_dims"]])
    n = conv_dims(x["dim_labels"])
    kernel = x.operands[1].shape.sizes
    return sums * math.prod([kernel[d] for d in n.rhs_spatial]) * kernel[n.rhs_input]


def sent(x: Instruction, devices: int) -> float:
    """Bytes that one of `devices` sends in a collective."""
    kind = x.op.removesuffix("-start")
    size = float(sum(fixed(o.nbytes) for o in x.operands))
    if kind == "collective-permute":
        pairs: tuple[tuple[int, int], ...] = x["source_target_pairs"]
        return size * sum(a != b for a, b in pairs) / max(devices, 1)
    groups = x["replica_groups"]
    n = len(groups[0]) if groups else devices
    if n < 2:
        return 0.0
    if kind == "all-gather":
        return size * (n - 1)
    if kind in ("collective-broadcast", "ragged-all-to-all"):
        return size
    return size * (n - 1) / n * (2 if kind == "all-reduce" else 1)


def trip_count(x: Instruction) -> int | None:
    """How often the body of a loop runs: what XLA's backend_config says, or a counter from one
    constant in steps to another. None: not known."""
    config = x.get("backend_config")
    if isinstance(config, str) and "known_trip_count" in config:
        try:
            return int(json.loads(config)["known_trip_count"]["n"])
        except (ValueError, KeyError, TypeError):
            pass
    root = x["condition"].root
    (state,) = x.operands
    if root.op != "compare" or root["direction"] not in ("LT", "LE", "NE"):
        return None
    counter, end = root.operands
    if counter.op != "get-tuple-element" or counter.operand not in x["condition"].params:
        return None
    i = counter["index"]
    body = x["body"].root
    if body.op != "tuple" or state.op != "tuple":
        return None
    begin = _constant(state.operands[i], x, None)
    step = body.operands[i]
    last = _constant(end, x, x["condition"])
    if begin is None or last is None or step.op != "add":
        return None
    by = next(
        (
            _constant(o, x, x["body"])
            for o in step.operands
            if _constant(o, x, x["body"]) is not None
        ),
        None,
    )
    reads = any(
        o.op == "get-tuple-element" and o["index"] == i and o.operand in x["body"].params
        for o in step.operands
    )
    if not by or not reads:
        return None
    return max(0, -(-(last - begin + (1 if root["direction"] == "LE" else 0)) // by))


def _constant(v: Instruction, loop: Instruction, inside: Computation | None) -> int | None:
    """The integer that `v` is, in the loop's computation `inside`: a constant, or an element of the
    state that the body passes on."""
    if v.op == "constant" and not v.dims and v.kind in "su":
        value = scalar_value(v["literal"])
        return value if isinstance(value, int) else None
    if inside is not None and v.op == "get-tuple-element" and v.operand in inside.params:
        i = v["index"]
        body = loop["body"].root
        (state,) = loop.operands
        if body.op == "tuple" and state.op == "tuple":
            kept = body.operands[i]
            if (
                kept.op == "get-tuple-element"
                and kept["index"] == i
                and kept.operand in loop["body"].params
            ):
                return _constant(state.operands[i], loop, None)
    return None
