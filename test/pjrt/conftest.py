"""JAX with the plugin; without JAX these tests are skipped."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "hlo,cpu")
jax = pytest.importorskip("jax", reason="needs JAX: pip install 'torch_hlo[jax]'")


@pytest.fixture(autouse=True, scope="session")
def plugin():
    import torch_hlo.pjrt

    torch_hlo.pjrt.initialize()
    assert jax.devices()[0].platform == "hlo"
