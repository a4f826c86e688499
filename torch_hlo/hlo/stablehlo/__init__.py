"""StableHLO text in and out, with CHLO and Shardy.

In: text, or a Module. Out: a Module (`parse_stablehlo`), or text (`stablehlo_text`). Imports
hlo/ir, hlo/sharding and hlo/text.
"""

from .convert import parse_stablehlo
from .write import WriteError, stablehlo_text

__all__ = ["WriteError", "parse_stablehlo", "stablehlo_text"]
