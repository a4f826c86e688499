"""Every collective of a program has a channel of its own, numbered in program order: the order in
which devices meet."""

from __future__ import annotations

from torch_hlo.hlo.ir import (
    Computation,
    Module,
    Replacements,
    called,
    carry_meta,
    replace,
    with_computations,
)

from ..hlo_pass import hlo_pass


@hlo_pass
def number_channels(module: Module) -> Module:
    """Collectives with channels are numbered 1, 2, … in program order, those of called computations
    included."""
    count = 0
    done: dict[Computation, Computation] = {}
    communicates: dict[Computation, bool] = {}

    def talks(c: Computation) -> bool:
        if c not in communicates:
            communicates[c] = any(
                x.get("channel_id") is not None or any(map(talks, called(x)))
                for x in c.instructions()
            )
        return communicates[c]

    def visit(c: Computation) -> Computation:
        nonlocal count
        if c in done or not talks(c):
            return done.get(c, c)
        new: Replacements = {}
        for x in c.instructions():
            operands = tuple(new[o] for o in x.operands)
            y = x
            if x.get("channel_id") is not None:
                count += 1
                y = replace(x, operands, x.shape, channel_id=count)
            elif operands != x.operands:
                y = replace(x, operands, x.shape)
            if y.attrs and (inner := called(y)):
                y = with_computations(y, {i: visit(i) for i in inner})
            if y is not x:
                carry_meta(x, y)
            new[x] = y
        done[c] = (
            c
            if new[c.root] is c.root
            else Computation(c.name, tuple(new[p] for p in c.params), new[c.root])
        )
        return done[c]

    return module.with_root(visit(module.entry).root)
