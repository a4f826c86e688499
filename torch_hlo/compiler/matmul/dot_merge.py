"""dot_merge: products that belong together, as unrolled loops over time leave them.

    dot(a, b) + dot(c, d) + e           ->  dot(concatenate(a, c), concatenate(b, d)) + e      one
        product with a longer sum
    dot(x, w), dot(y, w), … along w's   ->  dot(x, t), dot(y, t), …  with t = transpose(w)     w is
        turned once and not in each
    contiguous dimension, few rows

The first where the operands are smaller than the result: each product that is saved writes its
result and reads it again. Runs once, after the rewrites that would fold a transpose into a product.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch_hlo.hlo.ir import (
    Dims,
    Instruction,
    Module,
    Replacements,
    Users,
    build as h,
    fixed,
    postorder,
    replace,
    rewrite_bottom_up,
    substituted,
    users,
)

from ..hlo_pass import hlo_pass
from ..thresholds import FEW_MERGED_ROWS, MIN_SHARED


@hlo_pass
def dot_merge(module: Module) -> Module:
    """Sums of products -> products of concatenations; weights of many small products are transposed
    once."""
    if sum(x.op == "dot" for x in module.entry.instructions()) < 2:
        return module
    return module.with_root(_turn_weights(_merge_sums(module.entry.root)))


def _merge_sums(root: Instruction) -> Instruction:
    reads = users((root,))
    found: Replacements = {}
    for x in reads:
        if (
            x.op == "add"
            and x.kind == "f"
            and not (len(reads[x]) == 1 and (y := reads[x][0]).op == "add" and y.shape == x.shape)
        ):
            merged = _merged(list(_terms(x, reads)), reads)
            if merged is not None:
                found[x] = merged
    return substituted(root, found)


def _terms(x: Instruction, reads: Users) -> Iterator[Instruction]:
    """The terms of a sum, through additions that nothing else reads."""
    stack = [x]
    while stack:
        y = stack.pop()
        if y is x or y.op == "add" and y.shape == x.shape and len(reads[y]) == 1:
            stack.extend(reversed(y.operands))
        else:
            yield y


def _merged(terms: list[Instruction], reads: Users) -> Instruction | None:
    """The sum with its products merged, or None when there are none that belong together."""
    groups: dict[object, list[Instruction]] = {}
    for t in terms:
        key = _form(t) if t.op == "dot" and len(reads[t]) == 1 else None
        groups.setdefault(t if key is None else key, []).append(t)
    if all(len(g) == 1 or g[0].op != "dot" for g in groups.values()):
        return None
    total = None
    for group in groups.values():
        parts = [_product(group)] if len(group) > 1 and group[0].op == "dot" else group
        for p in parts:
            total = p if total is None else h.add(total, p)
    return total


def _form(x: Instruction) -> object | None:
    """What products must have in common to be merged; None for one that is not worth it."""
    lhs, rhs = x.operands
    if (
        x.get("lhs_batch_dims")
        or not x["lhs_contracting_dims"]
        or x.get("operand_precision") is not None
    ):
        return None
    if not (lhs.is_static and rhs.is_static) or fixed(lhs.size) + fixed(rhs.size) >= fixed(x.size):
        return None
    return (
        x.attrs,
        x.shape,
        *(
            (o.dtype, _without(o.dims, x[f"{side}_contracting_dims"][0]))
            for o, side in zip(x.operands, ("lhs", "rhs"))
        ),
    )


def _without(dims: Dims, d: int) -> Dims:
    return dims[:d] + dims[d + 1 :]


def _product(group: list[Instruction]) -> Instruction:
    first = group[0]
    operands = [
        h.concatenate([x.operands[i] for x in group], first[f"{side}_contracting_dims"][0])
        for i, side in enumerate(("lhs", "rhs"))
    ]
    return replace(first, operands, first.shape)


def _turn_weights(root: Instruction) -> Instruction:
    """Right operands [n, k] of many products with few rows become [k, n]: a product with few rows
    reads that form in place."""
    counts: dict[Instruction, int] = {}
    for x in postorder((root,)):
        if _reads_turned(x):
            counts[x.operands[1]] = counts.get(x.operands[1], 0) + 1
    if not any(n >= MIN_SHARED for n in counts.values()):
        return root

    def turn(x: Instruction) -> Instruction:
        if _reads_turned(x) and counts.get(x.operands[1], 0) >= MIN_SHARED:
            return replace(
                x,
                (x.operand, h.transpose(x.operands[1], (1, 0))),
                x.shape,
                rhs_contracting_dims=(0,),
            )
        return x

    return rewrite_bottom_up(root, turn)


def _reads_turned(x: Instruction) -> bool:
    """A product of [m, k], 8 < m <= FEW_MERGED_ROWS, with [n, k]. (With fewer rows it is a sum
    along k and reads both in place.)"""
    if (
        x.op != "dot"
        or x.get("lhs_batch_dims")
        or x["rhs_contracting_dims"] != (1,)
        or x["lhs_contracting_dims"] != (1,)
    ):
        return False
    lhs, rhs = x.operands
    return (
        lhs.rank == rhs.rank == 2
        and lhs.is_static
        and rhs.is_static
        and 8 < fixed(lhs.dims[0]) <= FEW_MERGED_ROWS
    )
