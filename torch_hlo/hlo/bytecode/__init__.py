"""MLIR bytecode, in and out: StableHLO's portable artifacts (VHLO), with Shardy.

In: bytes that begin with `ML\\xefR`, such as a file `.mlirbc`, or a Module. Out: a Module
(`parse_bytecode`), or such bytes (`portable_artifact`).
Imports hlo/stablehlo, whose rules give the operations their meaning.

    module = parse_bytecode(Path("program.mlirbc").read_bytes())
"""

from .artifact import portable_artifact
from .cursor import MAGIC, BytecodeError
from .operations import parse_bytecode

__all__ = ["MAGIC", "BytecodeError", "parse_bytecode", "portable_artifact"]
