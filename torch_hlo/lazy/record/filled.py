"""Storages that begin as one number everywhere, as the state of optimizers does (see
lazy/ops/optimizer_state.py).
"""

from __future__ import annotations

from weakref import ref

from torch_hlo.lowering.core import Out

from . import session
from .handlers import Handler
from .meta import aten
from .storage import Storage
from .tensor import HloTensor

# Ops whose result is one number everywhere: the number, or the position of the argument that is it.
FILLS: dict = {
    aten.zeros.default: 0, aten.zeros_like.default: 0, aten.new_zeros.default: 0,
    aten.ones.default: 1, aten.ones_like.default: 1, aten.new_ones.default: 1,
    aten.full.default: [1], aten.full_like.default: [1], aten.new_full.default: [2],
    aten.zero.default: 0, aten.fill.Scalar: [1],
}  # fmt: skip


def noted(handler: Handler) -> Handler:
    """The handler of one of FILLS, which remembers what the result's storage began as."""

    def fill(args: tuple, kwargs: dict):
        result = handler(args, kwargs)
        if type(result) is HloTensor:
            note(result._storage)
        return result

    return fill


def note(storage: Storage) -> None:
    """The storage's value is the result of one of FILLS."""
    if type(storage.value) is Out:
        session.current().filled.append((ref(storage), storage.value))
