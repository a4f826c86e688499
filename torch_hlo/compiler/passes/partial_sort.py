"""partial_sort: a sort of which only the first few elements of each row are read finds just those.

    s = (f32[8,50000], s64[8,50000]) sort(x, iota), dimensions={1}; v = slice(get-tuple-element(s), 0:k); i = slice(get-tuple-element(s), index=1, 0:k)
 -> f = (f32[8,k], s64[8,k]) fusion(x), kind=custom, calls={the sort and its slices}, backend_config={"first":k}

So torch.topk, kthvalue and XLA's topk, which all are sorts, read each row about once (codegen/first.py). (XLA: TopkRewriter.)
"""
from __future__ import annotations

import json

from torch_hlo.compiler.codegen.sort import sort_key
from torch_hlo.compiler.passes.base import hlo_pass, over_computations
from torch_hlo.hlo import build as b
from torch_hlo.hlo.ir import Computation, Instruction, Module, instr, postorder, rewrite_bottom_up, users
from torch_hlo.hlo.match import carry_meta

MOST = 128  # elements that are kept in order while a row is read; more in rows of more than their square: few elements of those move any
FEWER = 4  # times fewer than the row has


@hlo_pass
def partial_sort(module: Module) -> Module:
    """Sorts cut after a few elements -> selection of these."""
    return over_computations(module, _selected)


def first_of(x: Instruction) -> int | None:
    """How many elements of each row a fusion made here selects."""
    config = x.get("backend_config")
    return json.loads(config)["first"] if config and '"first"' in config else None


def _selected(c: Computation) -> Computation:
    reads = users((c.root,))
    table: dict[Instruction, Instruction] = {}
    for x in postorder((c.root,)):
        if x.op == "sort":
            table.update(_slices(x, reads, c.root))
    return c if not table else Computation(c.name, c.params, rewrite_bottom_up(c.root, lambda x: table.get(x, x)))


def _slices(x: Instruction, reads: dict[Instruction, list[Instruction]], root: Instruction) -> dict[Instruction, Instruction]:
    """What replaces each slice of the sort's results; empty when something else is read of them, or not just a few elements."""
    found: dict[int, list[Instruction]] = {}
    for part in reads[x] if x.shape.is_tuple else [x]:
        number = 0 if part is x else part["index"] if part.op == "get-tuple-element" else -1
        if number < 0 or part is root or x is root:
            return {}
        found[number] = reads[part]
    axis = x["dimensions"][0]
    dims = x.operands[0].shape.dims
    cuts = [_cut(s, axis, dims) for slices in found.values() for s in slices]
    k = None if None in cuts else max(cuts, default=None)
    if k is None or sort_key(x["to_apply"], [o.shape.dtype for o in x.operands]) is None or any(o.shape.kind == "c" for o in x.operands):
        return {}
    # Positions need no memory: the iota stays inside.
    outside = [o for o in x.operands if not _is_positions(o, axis)]
    params = {o: instr("parameter", (), o.shape, index=i) for i, o in enumerate(dict.fromkeys(outside))}
    inner = instr("sort", tuple(params.get(o, o) for o in x.operands), x.shape, **dict(x.attrs))
    numbers = sorted(found)
    parts = [b.get_tuple_element(inner, n) if x.shape.is_tuple else inner for n in numbers]
    limits = (*dims[:axis], k, *dims[axis + 1:])
    results = b.tuple_(*(b.slice_(p, (0,) * len(dims), limits) for p in parts))
    config = json.dumps({"first": k}, separators=(",", ":"))
    made = instr("fusion", tuple(params), results.shape, kind="custom", calls=Computation("first", tuple(params.values()), results), backend_config=config)
    carry_meta(x, made)
    return {s: _of_first(b.get_tuple_element(made, numbers.index(n)), s) for n, slices in found.items() for s in slices}


def _of_first(part: Instruction, s: Instruction) -> Instruction:
    """The slice `s` of the sorted array as one of its first elements."""
    return part if part.shape == s.shape else b.slice_(part, *zip(*s["slice"]))


def _cut(s: Instruction, axis: int, dims: tuple) -> int | None:
    """k of a slice that takes none but the first k along `axis`, few of many, and everything else."""
    if s.op != "slice":
        return None
    for d, (low, high, step) in enumerate(s["slice"]):
        if step != 1 or d != axis and (low != 0 or high != dims[d]):
            return None
    k, n = s["slice"][axis][1], dims[axis]
    return k if isinstance(n, int) and isinstance(k, int) and 0 < k and (k <= MOST or k * k <= n) and k * FEWER <= n and s.shape.size else None


def _is_positions(o: Instruction, axis: int) -> bool:
    return o.op == "iota" and o["iota_dimension"] == axis and o.shape.kind in "su"
