"""The table aten overload -> lowering function, and the dtype names of both sides.

A lowering takes the arguments of the aten op with every tensor replaced by an Instruction (every
`Lift` by a rank-0 Instruction wrapped in `Weak`), and returns an Instruction, or a (nested)
tuple/list of Instructions and Nones in the order of the op's results. It knows nothing of lazy
tensors, views or mutation: only functional overloads are lowered."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import torch

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import DTYPES, Instruction, Shape
from torch_hlo.pytorch.operators import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    base_name,
)
from torch_hlo.tables import entry

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")

aten = torch.ops.aten
LOWERINGS: dict[OpOverload, Callable[..., Any]] = {}
# Filled by lowering/fx, which alone makes nodes of these operators.
HIGHER_ORDER: dict[HigherOrderOperator, Callable[..., Any]] = {}
TORCH_TO_HLO = {
    getattr(torch, d.torch): d.name for d in DTYPES.values() if d.torch and hasattr(torch, d.torch)
}
HLO_TO_TORCH = {v: k for k, v in TORCH_TO_HLO.items()}


# Scalars that choose the structure of the computation or the shape of the result: they stay in the
# graph.
STATIC_PACKETS = frozenset(
    "pow float_power norm linalg_vector_norm linalg_norm linalg_matrix_norm renorm dist cdist"
    " arange range linspace logspace histc histogram _foreach_pow _foreach_norm native_norm"
    " polygamma mvlgamma multi_margin_loss multi_margin_loss_backward embedding_renorm"
    " constant_pad_nd _pdist_forward pdist full_like".split()
)


def lifts(op: OpOverload, argument: Any) -> bool:
    """True if a float given for this argument travels beside the graph: `argument`, of the
    operator's schema, is a number that decides nothing about the program."""
    name = base_name(op).removesuffix("_")
    if name.startswith("_fused_"):
        return str(argument.type) in ("float", "number", "Scalar", "Tensor")
    if name in STATIC_PACKETS:
        return False
    kind = str(argument.type)
    return kind in ("number", "Tensor", "List[number]", "Optional[number]")


# Overloads whose lowering serves only some arguments: the guard gets the arguments of the call
# (torch tensors) and says whether it does. Where it says no, the op goes the way of one without a
# lowering.
GUARDS: dict[OpOverload, Callable[..., bool]] = {}


class LoweringError(RuntimeError):
    """An op that a program needs cannot be lowered; names the op, the operand shapes and what to
    do."""


Results = tuple[Instruction | None, ...]  # of a lowering; None: what nobody asked for


@frozen
class Weak:
    """A Python number that enters the program as a rank-0 input (f64 or s64): it takes part in type
    promotion as a Python scalar does, that is, only its category (int, float) counts."""

    value: Instruction

    def __eq__(self, other: object) -> bool:
        raise TypeError("this number is known when the program runs: ask is_number first")

    __hash__ = object.__hash__


def lowers(*targets: OpOverloadPacket | OpOverload) -> Callable[[F], F]:
    """Register the decorated function for these overloads. A packet stands for all its functional
    overloads (no argument written to, no `out=`). Registering an overload twice is an error."""
    return entry(LOWERINGS, chain.from_iterable(map(overloads, targets)))


def guard(*targets: OpOverloadPacket | OpOverload) -> Callable[[F], F]:
    """Register the decorated predicate of metadata and static arguments as the guard of these
    overloads: false means that they run on the CPU."""
    return entry(GUARDS, chain.from_iterable(map(overloads, targets)))


def overloads(target: OpOverloadPacket | OpOverload) -> list[OpOverload]:
    """The functional overloads of a packet; an overload stands for itself."""
    if isinstance(target, OpOverload):
        return [target]
    every = [getattr(target, name) for name in target.overloads()]
    return [
        o
        for o in every
        if _returns_tensor(o)
        and not any(a.alias_info and a.alias_info.is_write for a in o._schema.arguments)
    ]


def _returns_tensor(overload: OpOverload) -> bool:
    """False for TorchScript's overloads on plain numbers and lists."""
    return any("Tensor" in str(r.type) for r in overload._schema.returns)


# Packets with a lowering that works element by element.
POINTWISE: set[OpOverloadPacket] = set()


def is_pointwise(op: OpOverload) -> bool:
    """True if the op works element by element. Not all such ops have PyTorch's tag."""
    return torch.Tag.pointwise in op.tags or op.overloadpacket in POINTWISE


def is_random(op: OpOverload) -> bool:
    """True if the op's result depends on a generator: its node carries `seed` and `offset`
    keywords."""
    return torch.Tag.nondeterministic_seeded in op.tags and bool(op._schema.returns)


EXPECTED: list[tuple[Shape | None, ...]] = [()]


def expected(index: int = 0) -> Shape:
    """The shape that PyTorch gave a (flat) result of the op being lowered. Use it for the result
    dtype and for sizes that the arguments do not determine."""
    shape = EXPECTED[-1][index]
    assert shape is not None, f"result {index} is undefined"
    return shape


def expected_shapes() -> tuple[Shape | None, ...]:
    """The same of all results; None for an undefined one."""
    return EXPECTED[-1]


_CHANNELS: list[Iterator[int]] = [itertools.count(1)]


def new_channel() -> int:
    """A channel id for the next collective of the program being lowered; they count from 1 in the
    order of recording."""
    return next(_CHANNELS[-1])


@contextlib.contextmanager
def numbering_channels() -> Iterator[None]:
    """A program is lowered in this block: its channels start from 1."""
    _CHANNELS.append(itertools.count(1))
    try:
        yield
    finally:
        _CHANNELS.pop()


def nested(
    shapes: tuple[Shape | None, ...],
    fn: Callable[P, T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call the lowering `fn` of one part of an op (an element of a foreach list), whose results
    have `shapes`."""
    EXPECTED.append(shapes)
    try:
        return fn(*args, **kwargs)
    finally:
        EXPECTED.pop()
