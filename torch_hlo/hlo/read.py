"""Programs in whatever form they come: HLO text, StableHLO text, MLIR bytecode."""

import re

from .bytecode import MAGIC, parse_bytecode
from .ir.instruction import Module
from .ir.verify import verify
from .stablehlo import parse_stablehlo
from .text.parser import parse_module

_MLIR = re.compile(
    r"\s*(?://[^\n]*\n\s*)*"
    r'(?:module\b|"builtin\.module"|func\.func\b|"func\.func"|#[\w.]+\s*=|![\w.]+\s*=)'
)


def parse_text(text: str | bytes) -> Module:
    """The program in HLO or StableHLO text or in MLIR bytecode, verified. Raises ParseError with
    line, column and a caret; of bytes with the offset."""
    if isinstance(text, bytes):
        if text.startswith(MAGIC):
            return verify(parse_bytecode(text))
        text = text.decode()
    return verify(parse_stablehlo(text) if is_stablehlo(text) else parse_module(text))


def is_stablehlo(text: str) -> bool:
    return _MLIR.match(text) is not None
