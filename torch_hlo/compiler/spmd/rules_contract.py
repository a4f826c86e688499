"""Blocks of dot, convolution and reduce: padding is masked where it would be summed, sums over
split factors are partial."""

from torch_hlo.hlo.ir import build as h, instr
from torch_hlo.hlo.sharding.factors import reducer

from . import halo
from .reshard import Local
from .rules import Site, identity, localizes, on_first


@localizes("dot", roles="sum")
def dot(s: Site) -> list[Local]:
    sides = []
    for local, dims in zip(s.operands, (s.x["lhs_contracting_dims"], s.x["rhs_contracting_dims"])):
        sides.append(halo.masked(s.p, local, h.constant(0, local.dtype), dims))
    return s.results(s.on_blocks(sides))


@localizes("reduce", roles="sum")
def reduce(s: Site) -> list[Local]:
    p = s.p
    x = s.x
    choice = s.choice
    operands = s.operands
    n = len(operands) // 2
    arrays = operands[:n]
    inits = [o.x for o in operands[n:]]
    known = reducer(x["to_apply"]) if n == 1 else None
    blocks = [
        halo.masked(p, a, identity(known, a.dtype) if known else i, x["dimensions"])
        for a, i in zip(arrays, inits)
    ]
    if choice.partial and known:
        inits = [on_first(p, inits[0], choice.partial, identity(known, inits[0].dtype))]
    y = instr("reduce", (*blocks, *inits), dimensions=x["dimensions"], to_apply=x["to_apply"])
    if not choice.partial or known:
        return s.results(y, known or "add")
    # Any other computation: everybody folds everybody's results.
    parts = [h.get_tuple_element(y, i) for i in range(n)] if n > 1 else [y]
    gathered = [p.all_gather(h.reshape(v, (1, *v.dims)), 0, choice.partial) for v in parts]
    y = instr("reduce", (*gathered, *inits), dimensions=(0,), to_apply=x["to_apply"])
    return s.results(y, partial=())
