"""Kernels that are known before the passes end: LLVM, which needs no turn of the interpreter,
compiles them on another core meanwhile."""

from typing import Any

from torch_hlo.hlo.ir import instr, parameters_of

from .program import Program


def ahead(program: Program) -> None:
    """Write the functions of the module's products and attention, each form once. Fusion may give a
    product another engine, but what that calls (micro-kernels, packing) is the same; the calls of
    the functions are written when all steps are known."""
    forms: dict[tuple[Any, ...], None] = {}
    for x in program.module.entry.instructions():
        if x.op == "dot" or x.op == "fusion":
            forms[x.op, x.attrs, x.shape, tuple(o.shape for o in x.operands)] = None
    for op, attrs, shape, operands in forms:
        params = parameters_of(operands)
        program.try_step(instr(op, params, shape, **dict(attrs)))
