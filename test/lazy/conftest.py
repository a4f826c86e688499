"""Every test of this folder that asks for `recorded` runs on the interpreter; the others on the device."""
from __future__ import annotations

import pytest
import torch

import torch_hlo  # noqa: F401
from torch_hlo.lazy import engine

from .interpreter import Interpreter


@pytest.fixture
def recorded():
    """Evaluate with the oracle. Yields it."""
    with engine.use(Interpreter()) as _:
        yield engine.current()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
