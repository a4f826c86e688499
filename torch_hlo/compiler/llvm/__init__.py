"""LLVM IR as text: functions, vectors, elementary functions, threads; and LLVM itself, which makes
machine code of it.

In: opcodes and register names. Out: IR text, object code. Imports hlo/ir for types only.
"""

from .emit import BITS, Emit, Typed, Unit, apart, in_turns, literal, transposed
from .function import (
    Function,
    Int,
    Integers,
    Loop,
    item_parameters,
    parameters,
    signature,
)
from .target import PLATFORMS, CpuTarget, Target, deny, host, platform_target
