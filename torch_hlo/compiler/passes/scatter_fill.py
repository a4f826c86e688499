"""scatter_fill: a scatter into a new array of equal elements fills its result itself.

    s = f32[50000,64] scatter(broadcast(0), i, u)
 -> f = f32[50000,64] fusion(i, u), kind=custom, calls={the same}, backend_config={"scatter":"filled"}

Otherwise all gradients of tables of one size would be copies of one array of zeros.
"""
from __future__ import annotations

from torch_hlo.compiler.passes.base import hlo_pass
from torch_hlo.hlo.ir import Computation, Instruction, Module, instr
from torch_hlo.hlo.match import op, rewrite, rules

_CONFIG = '{"scatter":"filled"}'


def is_filled_scatter(x: Instruction) -> bool:
    """Whether a fusion was made here."""
    return x.get("backend_config") == _CONFIG


def _filled(out: Instruction) -> Instruction | None:
    if out.shape.is_tuple:
        return None
    start, *rest = out.operands
    if start.op != "broadcast" or start.operands[0].op != "constant":
        return None
    params = {o: instr("parameter", (), o.shape, index=i) for i, o in enumerate(dict.fromkeys(rest))}
    inner = instr("scatter", (start, *(params[o] for o in rest)), out.shape, **dict(out.attrs))
    return instr("fusion", tuple(params), out.shape, kind="custom", calls=Computation("scatter", tuple(params.values()), inner), backend_config=_CONFIG)


RULES = rules((op("scatter"), _filled))


@hlo_pass
def scatter_fill(module: Module) -> Module:
    """Scatters into arrays of one value -> scatters that fill."""
    return rewrite(module, RULES)
