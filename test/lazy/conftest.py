"""Every test of this folder that asks for `recorded` runs on the interpreter; the others on the
device."""

from __future__ import annotations

import pytest
import torch

import torch_hlo  # noqa: F401
from torch_hlo.lazy.record import session

from .interpreter import Interpreter


@pytest.fixture
def recorded():
    """Evaluate with the oracle. Yields it."""
    session.current().pending.clear()  # what failed tests left behind
    with session.use(Interpreter()) as _:
        yield session.engine()
    session.current().pending.clear()


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    # once anything has been annotated, graphs are looked at for shardings
    monkeypatch.setattr(session.current(), "sharded", False)
