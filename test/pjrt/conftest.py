"""JAX with the plugin, in the tests that are not skipped for want of JAX."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "hlo,cpu")


@pytest.fixture(autouse=True, scope="session")
def plugin():
    import jax

    import torch_hlo.pjrt

    torch_hlo.pjrt.initialize()
    assert jax.devices()[0].platform == "hlo"
