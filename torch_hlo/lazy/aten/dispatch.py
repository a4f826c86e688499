"""Every operation on hlo tensors arrives here: `handle(op, types, args, kwargs)`.

An op has one handler, a function `(args, kwargs) -> result`:
* hand-written, in the files that this one imports,
* or made once from the op's schema, by the first of MAKERS that can. A mutation is the functional
  twin, then a write; a view is new metadata over the same storage; a function is a node in the
  graph; an op without a lowering is its decomposition, else runs on the CPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

from torch_hlo import config, metrics
from torch_hlo.lowering.core import NO_KWARGS, RECORDING
from torch_hlo.pytorch.operators import OpOverload, base_name

from ..record import (
    TABLE,
    Handler,
    after_traces,
    checks,
    conditions,
    decompose,
    generator,
    nested,
    recording,
    session,
    storage,
    tensor,
)
from ..record.handlers import BY_ID, MAKERS, Foreign, find
from . import batch_norm, copies, data_dependent, indexing, judged, mutation, strides, view_ops

ENTRIES: dict[int, Handler] = {}  # handlers by their op's id, as `entry` made them
_session = session.current()


def handle(
    func: OpOverload,
    types: Sequence[type],
    args: tuple = (),
    kwargs: dict | None = None,
):
    """Record (or run) one op, when it is this thread's turn: HloTensor's `__torch_dispatch__`.
    Raises what PyTorch raises for bad arguments."""
    with RECORDING:
        if _session.tracing is not None:
            after_traces()
        if len(_session.pending) >= _session.limit:
            cut()
        try:
            return (ENTRIES.get(id(func)) or entry(func))(args, kwargs or NO_KWARGS)
        except Foreign:
            return NotImplemented


def entry(op: OpOverload) -> Handler:
    """The handler of an op that arrives from outside."""
    found = find(op)
    ENTRIES[id(op)] = found = _counted(op, found) if config.get("COUNT_OPS") else found
    return found


def _counted(op: OpOverload, handler: Handler) -> Handler:
    """A handler that counts its calls; reads of a number are called what torch_xla calls them."""
    name = base_name(op).removesuffix("_")
    name = f"aten::{name}" if name == "_local_scalar_dense" else f"xla::{name}"

    def counting(args: tuple, kwargs: dict):
        metrics.count(name)
        return handler(args, kwargs)

    return counting


def eager_handle(
    func: OpOverload,
    types: Sequence[type],
    args: tuple = (),
    kwargs: dict | None = None,
):
    """`handle` for TORCH_HLO_EAGER: evaluate before returning."""
    result = handle(func, types, args, kwargs)
    if not (_session.here.nested or generator.default.inside):
        session.engine().mark_step(wait=True)
    return result


def journaled_handle(
    func: OpOverload,
    types: Sequence[type],
    args: tuple = (),
    kwargs: dict | None = None,
):
    """`handle` where all ranks have to cut what is on the mesh at the same place: not where this
    one's graph has grown to MAX_NODES, but where the common part of it has."""
    journal = _session.journal
    with RECORDING:
        journal.read()
        result = handle(func, types, args, kwargs)
        if (
            journal.read()
            and not _session.here.nested
            and _session.limit < sys.maxsize
            and journal.pending() >= config.get("MAX_NODES")
        ):
            session.engine().mark_step()
    return result


def cut() -> None:
    """The graph has grown to MAX_NODES: evaluate it."""
    _session.limit = config.get("MAX_NODES")
    if len(_session.pending) >= _session.limit:
        storage.forget_bound()
        session.engine().make_room()
        _session.limit += len(_session.pending)  # what stays is somebody else's to cut


@contextlib.contextmanager
def uncut() -> Iterator[None]:
    """Inside, the graph may grow beyond MAX_NODES: one program is made of all of it."""
    before, _session.limit = _session.limit, sys.maxsize
    try:
        yield
    finally:
        _session.limit = before


def set_eager(on: bool) -> None:
    """Evaluate every op at once (True) or record (False)."""
    if on:
        session.engine().mark_step(wait=True)
    tensor.install(eager_handle if on else _recording_handle())


def lower_or_fall_back(op: OpOverload) -> Handler:
    """The handler of a functional op without a lowering."""

    def on_cpu(args: tuple, kwargs: dict):
        return decompose.on_cpu(op, args, kwargs)

    decomposition = decompose.decomposition(op)
    if decomposition is None:
        return on_cpu

    def decomposed(args: tuple, kwargs: dict):
        # many of PyTorch's decompositions end in a primitive that is the op itself
        if op in _session.here.decomposing:
            TABLE[op] = BY_ID[id(op)] = on_cpu
            ENTRIES.pop(id(op), None)
            return on_cpu(args, kwargs)
        _session.here.decomposing.add(op)
        try:
            return nested(decomposition, args, kwargs)
        except (AssertionError, TypeError, ValueError):  # not the words of a kernel
            checks.explain(op, args, kwargs)
            raise
        finally:
            _session.here.decomposing.discard(op)

    return decomposed


# in this order
MAKERS += (mutation.maker, view_ops.maker, recording.maker, lower_or_fall_back)
WRITTEN = (batch_norm, conditions, copies, data_dependent, indexing, judged, strides)


def install() -> None:
    """From now on ops are handled here."""
    tensor.install(eager_handle if config.get("EAGER") else _recording_handle())


def _recording_handle() -> Callable:
    return handle if _session.journal is None else journaled_handle
