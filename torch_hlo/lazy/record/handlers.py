"""Which function handles which overload. Files with handlers fill TABLE when they are imported;
what is not in it is made from the op's schema, once, by the first of MAKERS that knows how.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_hlo.lowering.core import LOWERINGS
from torch_hlo.pytorch import participants
from torch_hlo.pytorch.operators import OpOverload
from torch_hlo.tables import entry

from . import session

Handler = Callable[[tuple, dict], object]
TABLE: dict[OpOverload, Handler] = {}
BY_ID: dict[int, Handler] = {}  # TABLE by the op's id, which needs no call of OpOverload.__hash__
WRITTEN_BY_HAND: set[OpOverload] = set()  # what `@handles` registered


class Foreign(Exception):
    """An argument is a tensor subclass that has to handle the op itself."""


# asked in turn for the handler of an op that nobody wrote by hand: None where it is not theirs
MAKERS: list[Callable[[OpOverload], Handler | None]] = []


def handles(*ops: OpOverload) -> Callable[[Handler], Handler]:
    """Register a handler for these overloads."""
    WRITTEN_BY_HAND.update(ops)
    return entry(TABLE, ops)


def find(op: OpOverload) -> Handler:
    """The handler of an op."""
    handler = BY_ID[id(op)] = TABLE.get(op) or make(op)
    return handler


def make(op: OpOverload) -> Handler:
    """Make, remember and return the handler of an op."""
    handler = next(filter(None, (maker(op) for maker in MAKERS)))
    return TABLE.setdefault(op, handler)


def has_lowering(op: OpOverload) -> bool:
    """True if the op may be recorded as it is."""
    return op in LOWERINGS


def call(op: OpOverload, *args, **kwargs):
    """The op through the table, without the dispatcher: for handlers built from other ops."""
    return (BY_ID.get(id(op)) or find(op))(args, kwargs)


def nested(fn: Callable, args: tuple, kwargs: dict):
    """Call a decomposition: ops on hlo tensors re-enter `handle`; autocast does not apply a second
    time."""
    here = session.current().here
    here.nested += 1
    try:
        with participants.without_autocast():
            return fn(*args, **kwargs)
    finally:
        here.nested -= 1
