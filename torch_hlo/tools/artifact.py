"""StableHLO portable artifacts (MLIR bytecode with a version), written through jaxlib.

# readable by every consumer of that version or newer
data = portable_artifact(module, "1.9.0")
"""

from __future__ import annotations

from types import ModuleType

from torch_hlo.hlo.ir import Module
from torch_hlo.hlo.stablehlo import stablehlo_text

from . import UsageError


def portable_artifact(module: Module, version: str | None = None) -> bytes:
    """`module` as a portable artifact of a StableHLO version (default: the oldest that jaxlib
    writes). Raises UsageError."""
    ir, stablehlo = _mlir()
    try:
        return stablehlo.serialize_portable_artifact_str(
            stablehlo_text(module), version or stablehlo.get_minimum_version()
        )
    except Exception as error:
        raise UsageError(
            f"this program cannot be written as a StableHLO artifact: {error}"
        ) from None


def _mlir() -> tuple[ModuleType, ModuleType]:
    try:
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import stablehlo
    except ImportError:
        raise UsageError(
            "StableHLO bytecode is written by jaxlib, which is not installed: pip install"
            " jaxlib, or use StableHLO text"
        ) from None
    return ir, stablehlo
