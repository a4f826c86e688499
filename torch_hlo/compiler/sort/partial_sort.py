"""partial_sort: a sort of which only the first few elements of each row are read finds just those.

    s = (f32[8,50000], s64[8,50000]) sort(x, iota), dimensions={1}; v = slice(get-tuple-element(s),
        0:k); i = slice(get-tuple-element(s), index=1, 0:k)
-> f = (f32[8,k], s64[8,k]) fusion(x), kind=custom, calls={the sort and its slices},
backend_config={"first":k}

So torch.topk, kthvalue and XLA's topk, which all are sorts, read each row about once
(compiler/sort/top_k.py). (XLA: TopkRewriter.) A sort of which one element further back is read, a
median or a quantile, finds that one: {"nth":k}. Rows that lie across memory are transposed first.
"""

from __future__ import annotations

import json

from torch_hlo.hlo.ir import (
    Computation,
    Dims,
    Instruction,
    Ints,
    Module,
    Replacements,
    Size,
    Users,
    build as b,
    carry_meta,
    instr,
    postorder,
    substituted,
    users,
)

from ..hlo_pass import hlo_pass, over_computations
from .sort import sort_key

# elements that are kept in order while a row is read; more in rows of more than their square: few
# elements of those move any
MOST = 128
FEWER = 4  # times fewer than the row has
LONG = 64  # elements of a row in which one is looked for instead of sorting it


@hlo_pass
def partial_sort(module: Module) -> Module:
    """Sorts cut after a few elements -> selection of these."""
    return over_computations(module, _selected)


def selection_of(x: Instruction) -> tuple[str, int] | None:
    """What a fusion made here finds in each row: ("first", how many) or ("nth", which)."""
    config = x.get("backend_config")
    found = json.loads(config) if config and config.startswith(('{"first"', '{"nth"')) else {}
    return next(iter(found.items()), None)


def _selected(c: Computation) -> Computation:
    reads = users((c.root,))
    table: Replacements = {}
    for x in postorder((c.root,)):
        if x.op == "sort":
            table.update(_slices(x, reads, c.root))
    return c if not table else Computation(c.name, c.params, substituted(c.root, table))


def _slices(x: Instruction, reads: Users, root: Instruction) -> Replacements:
    """What replaces each slice of the sort's results; empty when something else is read of them, or
    not just a few elements."""
    found = _read_parts(x, reads, root)
    if found is None:
        return {}
    axis = x["dimensions"][0]
    dims = x.operand.dims
    what = _choice([_cut(s, axis, dims) for slices in found.values() for s in slices], dims[axis])
    if (
        what is None
        or sort_key(x["to_apply"], [o.dtype for o in x.operands]) is None
        or any(o.kind == "c" for o in x.operands)
    ):
        return {}
    turn = (*(d for d in range(len(dims)) if d != axis), axis)
    numbers = sorted(found)
    made = _selection(x, turn, numbers, *what)
    back = tuple(turn.index(d) for d in range(len(dims)))

    def result(n: int) -> Instruction:
        part = b.get_tuple_element(made, numbers.index(n))
        return part if axis == len(dims) - 1 else b.transpose(part, back)

    return {s: _of_first(result(n), s) for n, slices in found.items() for s in slices}


def _read_parts(
    x: Instruction, reads: Users, root: Instruction
) -> dict[int, list[Instruction]] | None:
    """What reads each result of a sort; None where something reads them all together."""
    found: dict[int, list[Instruction]] = {}
    for part in reads[x] if x.is_tuple else [x]:
        number = 0 if part is x else part["index"] if part.op == "get-tuple-element" else -1
        if number < 0 or part is root or x is root:
            return None
        found[number] = reads[part]
    return found


def _selection(x: Instruction, turn: Ints, numbers: list[int], kind: str, k: int) -> Instruction:
    """The fusion that finds what is read of the results `numbers` of a sort whose dimensions are
    turned so that its rows are innermost."""
    axis = turn[-1]
    dims = x.operand.dims
    rows = tuple(dims[d] for d in turn)
    # Positions need no memory: the iota stays inside.
    outside = {
        o: o if axis == len(dims) - 1 else b.transpose(o, turn)
        for o in dict.fromkeys(x.operands)
        if not _is_positions(o, axis)
    }
    params = {
        o: instr("parameter", (), t.shape, index=i) for i, (o, t) in enumerate(outside.items())
    }
    inner = b.sort(
        [params.get(o) or b.iota(o.dtype, rows, len(rows) - 1) for o in x.operands],
        len(rows) - 1,
        x["to_apply"],
        x["is_stable"],
    )
    parts = [b.get_tuple_element(inner, n) if x.is_tuple else inner for n in numbers]
    low, high = (0, k) if kind == "first" else (k, k + 1)
    results = b.tuple_(
        *(b.slice_(p, (*(0 for _ in rows[:-1]), low), (*rows[:-1], high)) for p in parts)
    )
    made = b.kernel(
        tuple(outside.values()),
        Computation(kind, tuple(params.values()), results),
        json.dumps({kind: k}, separators=(",", ":")),
    )
    carry_meta(x, made)
    return made


def _of_first(part: Instruction, s: Instruction) -> Instruction:
    """The slice `s` of the sorted array as one of its first elements."""
    return part if part.shape == s.shape else b.slice_(part, *zip(*s["slice"]))


def _cut(s: Instruction, axis: int, dims: Dims) -> tuple[int, int] | None:
    """First and last element of a slice along `axis` that takes everything else; None: it is
    something else."""
    if s.op != "slice" or not s.size:
        return None
    for d, (low, high, step) in enumerate(s["slice"]):
        if step != 1 or d != axis and (low != 0 or high != dims[d]):
            return None
    low, high, _ = s["slice"][axis]
    return (low, high) if all(isinstance(n, int) for n in (low, high, dims[axis])) else None


def _choice(cuts: list[tuple[int, int] | None], n: Size) -> tuple[str, int] | None:
    """How to find what is read of rows of `n`: ("first", k), or ("nth", k) when all read one
    element that is not among the first."""
    known = {c for c in cuts if c is not None}
    if None in cuts or not known or not isinstance(n, int):
        return None
    k = max(high for _, high in known)
    if 0 < k and (k <= MOST or k * k <= n) and k * FEWER <= n:
        return "first", k
    return ("nth", k - 1) if known == {(k - 1, k)} and n >= LONG else None


def _is_positions(o: Instruction, axis: int) -> bool:
    return o.op == "iota" and o["iota_dimension"] == axis and o.kind in "su"
