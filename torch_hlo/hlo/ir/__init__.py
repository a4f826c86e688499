"""Programs as data: shapes, instructions, the table of opcodes, shape rules, builders, patterns.

In: Python calls. Out: interned instructions, computations, modules. Imports NumPy, and of
its neighbours only data and text: sharding/sharding.py, text/printer.py.
"""

from .dim import (
    Dim,
    Dims,
    Ints,
    Pairs,
    Size,
    ceildiv,
    dim_max,
    dim_min,
    fixed,
    function,
    parse_dim,
    round_up,
    substitute,
    symbol,
    symbols,
)
from .infer import ShapeError, product
from .instruction import (
    IDENTITIES,
    IGNORED,
    Attrs,
    Computation,
    Instruction,
    Instructions,
    Meta,
    Module,
    Replacements,
    Users,
    begin_program,
    called,
    carry_meta,
    has_effect,
    lost_effect,
    needs,
    noted,
    outputs,
    postorder,
    users,
)
from .intern import instr, interned, on_operands, parameters_of, replace, rewrite_bottom_up
from .literal import Literal
from .match import (
    Op,
    Var,
    all_or_none,
    inline,
    lift,
    op,
    rebuild,
    rewrite,
    rules,
    splat,
    substituted,
    var,
    with_computations,
)
from .numeric import decode, encode
from .opcodes import COMMON_ATTRS, OPCODES, POINTWISE
from .shape import DTYPES, DType, Shape, numpy_dtype, row_major_strides, tuple_shape
from .window import Window, WindowDim
