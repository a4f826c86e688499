"""StableHLO text in and out: `parse_stablehlo(text) -> Module` and `stablehlo_text(module) -> str`."""

from torch_hlo.hlo.stablehlo.convert import parse_stablehlo
from torch_hlo.hlo.stablehlo.write import WriteError, stablehlo_text

__all__ = ["WriteError", "parse_stablehlo", "stablehlo_text"]
