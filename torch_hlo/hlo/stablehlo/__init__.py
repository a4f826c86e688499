"""StableHLO text in and out: `parse_stablehlo(text) -> Module` and `stablehlo_text(module) -> str`."""
from torch_hlo.hlo.stablehlo.convert import parse_stablehlo

__all__ = ["parse_stablehlo"]
