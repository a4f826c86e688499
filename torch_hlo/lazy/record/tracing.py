"""One captured function is traced at a time, while other threads wait with their ops."""

import contextlib
from collections.abc import Iterator

from torch_hlo.lowering.core import RECORDING

from . import session
from .session import Tracing


@contextlib.contextmanager
def tracing() -> Iterator[Tracing]:
    """A captured function is traced in the block: one at a time."""
    state = session.current()
    mine = Tracing()
    alone = state.traced.acquire(timeout=mine.PATIENCE)
    mine.disturbed = not alone
    if alone:
        with RECORDING:  # no other thread is in the middle of an op
            state.tracing = mine
    try:
        yield mine
    finally:
        if alone:
            state.tracing = None
            mine.over.set()
            state.traced.release()


def after_traces() -> None:
    """Wait while another thread traces a captured function. The caller holds RECORDING, which is
    free while it waits and held when it goes on: no trace begins in between."""
    state = session.current()
    waited = True
    while waited and (tracing := state.tracing) is not None:
        RECORDING.release()
        try:
            waited = tracing.wait()
        finally:
            RECORDING.acquire()
