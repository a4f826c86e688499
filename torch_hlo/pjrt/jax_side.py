"""What JAX is told beside the C API: that the plugin is there, and which of its lowerings fit."""

from __future__ import annotations

from torch_hlo.pjrt.client import PLATFORM


def initialize() -> None:
    """Called by JAX for each plugin that is installed."""
    from jax._src import xla_bridge

    from torch_hlo.pjrt import arrays, executables  # noqa: F401  their functions fill the table
    from torch_hlo.pjrt.functions import Table

    xla_bridge.register_plugin(PLATFORM, priority=-100, c_api=Table().capsule())
    _lowerings()


def _lowerings() -> None:
    """Lowerings of JAX for its CPU back end are good for us."""
    from jax._src.interpreters import mlir

    tables = mlir._platform_specific_lowerings
    tables[PLATFORM] = tables["cpu"]
