"""Every test of this folder begins as in a new process."""

from __future__ import annotations

import pytest
import torch

import torch_hlo  # noqa: F401
from torch_hlo.lazy.record import session


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    torch._dynamo.reset()
    # once anything has been annotated, graphs are looked at for shardings
    monkeypatch.setattr(session.current(), "sharded", False)
