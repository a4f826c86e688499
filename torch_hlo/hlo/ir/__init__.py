"""Programs as data: shapes, instructions, the table of opcodes, shape rules, builders, patterns.

In: Python calls. Out: interned instructions, computations, modules. Imports NumPy, and of
its neighbours only data and text: sharding/sharding.py, text/printer.py.
"""

from .dim import (
    Dim,
    Ints,
    Size,
    ceildiv,
    dim_max,
    dim_min,
    fixed,
    function,
    parse_dim,
    substitute,
    symbol,
    symbols,
)
from .instruction import (
    META,
    Attrs,
    Computation,
    Instruction,
    Meta,
    Module,
    called,
    has_effect,
    lost_effect,
    needs,
    outputs,
    postorder,
    users,
)
from .intern import instr, interned, on_operands, parameters_of, replace, rewrite_bottom_up
from .literal import Literal
from .opcodes import COMMON_ATTRS, OPCODES
from .shape import DTYPES, DType, Shape, numpy_dtype, row_major_strides, tuple_shape
from .window import Window, WindowDim

__all__ = [
    "Attrs",
    "COMMON_ATTRS",
    "Computation",
    "DTYPES",
    "DType",
    "Dim",
    "Instruction",
    "Ints",
    "Literal",
    "META",
    "Meta",
    "Module",
    "OPCODES",
    "Shape",
    "Size",
    "Window",
    "WindowDim",
    "called",
    "ceildiv",
    "dim_max",
    "dim_min",
    "fixed",
    "function",
    "has_effect",
    "instr",
    "interned",
    "lost_effect",
    "needs",
    "numpy_dtype",
    "on_operands",
    "outputs",
    "parameters_of",
    "parse_dim",
    "postorder",
    "replace",
    "rewrite_bottom_up",
    "row_major_strides",
    "substitute",
    "symbol",
    "symbols",
    "tuple_shape",
    "users",
]
