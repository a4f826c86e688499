"""Collectives that become fewer, smaller, or cheaper ones.

all-reduce(x) + all-reduce(y)              ->  all-reduce(x + y)             when nobody else
    reads the sums
all-gather(convert-to-wider(x))            ->  convert(all-gather(x))        narrow values
    travel
convert-to-narrower(all-gather(x))         ->  all-gather(convert(x))
dynamic-slice(all-reduce(x), own part)     ->  reduce-scatter(x)             when every reader
    keeps its own part
"""

from __future__ import annotations

from collections.abc import Callable

from torch_hlo.hlo.ir import (
    Computation,
    Instruction,
    Module,
    Replacements,
    build as h,
    carry_meta,
    instr,
    on_operands,
    postorder,
    replace,
    users,
)
from torch_hlo.hlo.sharding.factors import reducer

from ..hlo_pass import Pass, hlo_pass, over_computations

MOVES = frozenset("all-gather all-to-all collective-permute".split())  # these only move elements
Rule = Callable[[Instruction, Callable[[Instruction], int]], Instruction | None]


@hlo_pass
def collective_reassociate(module: Module) -> Module:
    """Sums of all-reduces become all-reduces of sums."""
    return _with_rule(module, _sum_first)


@hlo_pass
def collective_convert(module: Module) -> Module:
    """Conversions move to the side of a gather, an all-to-all or a permutation on which the values
    are narrow."""
    return _with_rule(module, _narrow)


@hlo_pass
def reduce_scatter_creation(module: Module) -> Module:
    """An all-reduce of which every device keeps its part is a reduce-scatter."""
    return _with_rule(module, _scattered)


def _with_rule(module: Module, rule: Rule) -> Module:
    """`rule` applied bottom-up in every computation until it fires no more; it is told how many
    readers an instruction has."""

    def once(c: Computation) -> Computation:
        readers = {x: len(set(u)) for x, u in users((c.root,)).items()}
        readers[c.root] = readers.get(c.root, 0) + 1
        new: Replacements = {}
        old: Replacements = {}
        for x in postorder((c.root,)):
            y = on_operands(x, new)
            z = rule(y, lambda v: readers.get(old.get(v, v), 1))
            if y is not x or z is not None:
                carry_meta(x, z or y)
            new[x] = z or y
            old[new[x]] = x
        root = new[c.root]
        return c.with_root(root)

    def settled(c: Computation) -> Computation:
        while (d := once(c)) is not c:
            c = d
        return c

    return over_computations(module, settled)


def _sum_first(x: Instruction, readers: Callable[[Instruction], int]) -> Instruction | None:
    if x.op not in ("add", "subtract") or any(
        o.op != "all-reduce" or len(o.operands) != 1 or readers(o) > 1 for o in x.operands
    ):
        return None
    a, b = x.operands
    if (
        a is b
        or a["replica_groups"] != b["replica_groups"]
        or reducer(a["to_apply"]) != "add"
        or reducer(b["to_apply"]) != "add"
    ):
        return None
    return replace(a, (instr(x.op, (a.operand, b.operand)),))


def _narrow(x: Instruction, readers: Callable[[Instruction], int]) -> Instruction | None:
    (y,) = x.operands if len(x.operands) == 1 else (None,)
    if y is None:
        return None
    if x.op in MOVES and y.op == "convert" and _width(y.operand) < _width(y):
        return h.convert(replace(x, [y.operand]), x.dtype)
    if (
        x.op == "convert"
        and y.op in MOVES
        and len(y.operands) == 1
        and _width(x) < _width(y)
        and readers(y) == 1
    ):
        return replace(y, [h.convert(y.operand, x.dtype)])
    return None


def _width(x: Instruction) -> int:
    return x.bits


def _scattered(x: Instruction, readers: Callable[[Instruction], int]) -> Instruction | None:
    if (
        x.op != "dynamic-slice"
        or x.operand.op != "all-reduce"
        or len(x.operand.operands) != 1
        or readers(x.operand) > 1
    ):
        return None
    whole = x.operand
    starts = x.operands[1:]
    cut = [d for d, (a, b) in enumerate(zip(whole.dims, x.dims, strict=True)) if a != b]
    groups = whole["replica_groups"]
    if len(cut) != 1 or not groups or whole.get("channel_id") is None:
        return None
    (d,) = cut
    n = len(groups[0])
    begins = per_partition(starts[d], 1 + max(p for g in groups for p in g))
    size = x.dims[d]
    if begins is None or size * n != whole.dims[d]:
        return None
    ordered = tuple(tuple(sorted(g, key=lambda p: begins[p])) for g in groups)
    if any([begins[p] for p in g] != [i * size for i in range(n)] for g in ordered):
        return None
    attrs = {**dict(whole.attrs), "replica_groups": ordered}
    return instr("reduce-scatter", whole.operands, dimensions=(d,), **attrs)


def per_partition(x: Instruction, partitions: int) -> list[int] | None:
    """The integers that `x`, looked up in a table by partition id, is on each partition; None when
    it is anything else."""
    if x.op == "reshape":
        x = x.operand
    if x.op == "constant" and x.size == 1:
        return [int(x["literal"].numpy().reshape(()))] * partitions
    if (
        x.op == "dynamic-slice"
        and x.operand.op == "constant"
        and [o.op for o in x.operands[1:]] == ["partition-id"]
    ):
        values = x.operand["literal"].numpy().tolist()
        return values if len(values) == partitions else None
    return None


COLLECTIVE_ALGEBRA: tuple[Pass, ...] = (
    collective_reassociate,
    collective_convert,
    reduce_scatter_creation,
)
