"""Collectives in two halves, so that work can go on while bytes travel.

    y = all-gather(x)      ->      s = all-gather-start(x); y = all-gather-done(s)

The schedule starts each as early as its operands allow and waits as late as its readers do
(compiler/schedule/schedule.py).
"""

from __future__ import annotations

from torch_hlo.hlo.ir import Computation, Instruction, Module, instr, rewrite_bottom_up, tuple_shape
from torch_hlo.hlo.ir.infer import result

from ..hlo_pass import hlo_pass, over_computations

SPLIT = frozenset(("all-gather", "all-reduce", "collective-permute"))


@hlo_pass
def collective_async(module: Module) -> Module:
    """all-gather, all-reduce and collective-permute become pairs of start and done."""

    def split(x: Instruction) -> Instruction:
        if x.op not in SPLIT:
            return x
        shape = (
            x.shape
            if x.op == "all-reduce"
            else tuple_shape(result([o.shape for o in x.operands]), x.shape)
        )
        return instr(f"{x.op}-done", (instr(f"{x.op}-start", x.operands, shape, **dict(x.attrs)),))

    def rewritten(c: Computation) -> Computation:
        root = rewrite_bottom_up(c.root, split)
        return c.with_root(root)

    return over_computations(module, rewritten)
