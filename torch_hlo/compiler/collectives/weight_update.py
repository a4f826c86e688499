"""Weight-update sharding: each data-parallel device updates its part of the weights and keeps its
part of the optimizer's state.

    g = all-reduce(dw); m' = b m + g; w' = w - m'        ->        g = reduce-scatter(dw); m' = b m
        + g; w' = all-gather(part of w - m')

It is an annotation of the whole program, before propagation: the update of every weight that its
output may overwrite is split over the given axes, and so is, inside and outside of the program,
what only updates read. (Xu et al., Automatic cross-replica sharding of weight update in
data-parallel training, 2020; stage 1 of ZeRO, Rajbhandari et al., 2020.)
"""

import math
from collections.abc import Sequence
from dataclasses import replace as changed

from torch_hlo.hlo.ir import (
    OPCODES,
    Computation,
    Instruction,
    Module,
    Replacements,
    Size,
    Users,
    build as h,
    carry_meta,
    outputs,
    postorder,
    replace,
    users,
)
from torch_hlo.hlo.sharding.sharding import (
    Axis,
    DimSharding,
    Mesh,
    Sharding,
    ShardingError,
)

from ..hlo_pass import Pass

_STRUCTURE = frozenset(("tuple", "broadcast", "reshape", "copy"))


def weight_update_sharding(axes: Sequence[str]) -> Pass:
    """The pass for the mesh axes that split the batch. Raises ShardingError for axes that the mesh
    does not have."""
    return Pass(
        "weight_update_sharding",
        lambda module: shard_weight_update(module, axes),
        shard_weight_update.__doc__ or "",
    )


def shard_weight_update(module: Module, axes: Sequence[str]) -> Module:
    """Updates of weights and the optimizer's state are split over `axes`; arrays that do not divide
    evenly stay as they are."""
    if module.mesh is None:
        raise ShardingError("weight-update sharding needs a program with a mesh")
    extra = tuple(module.mesh.axis(a) for a in axes)
    readers = users((module.entry.root,))
    params = module.entry.params
    results = list(outputs(module))
    new: Replacements = {}
    whole: dict[int, Sharding] = {}  # outputs that are gathered again
    for o, i in module.aliases:
        param = params[i]
        result = results[o]
        given = param.get("sharding") or Sharding.replicate(module.mesh, param.rank)
        split = _split(module.mesh, given, param.dims, extra)
        if split is None or result.shape != param.shape or result in params:
            continue
        if _only_updates(param, readers):
            new[param] = replace(param, (), param.shape, sharding=split)
        else:
            whole[o] = given
        new[result] = replace(result, shape=result.shape, sharding=split)
    if not new:
        return module
    done = _substituted((*params, *results), new)
    final = [
        (
            done[r]
            if o not in whole
            else h.custom_call("Sharding", (done[r],), r.shape, sharding=whole[o])
        )
        for o, r in enumerate(results)
    ]
    root = _root(module, final, new)
    return changed(
        module,
        entry=Computation(module.entry.name, tuple(done[p] for p in params), root),
    )


def _substituted(roots: Sequence[Instruction], new: Replacements) -> Replacements:
    """Every instruction, with what is `new` in place of the old."""
    done: Replacements = {}
    for x in postorder(roots):
        y = new.get(x, x)
        if y.operands and any(done[v] is not v for v in y.operands):
            y = replace(y, [done[v] for v in y.operands])
        done[x] = y
        carry_meta(x, y)
    return done


def _root(module: Module, final: list[Instruction], new: Replacements) -> Instruction:
    """The root that returns `final`, with its shardings."""
    root = module.entry.root
    results = list(outputs(module))
    if root.op == "tuple":
        shardings = root.get("sharding")
        if shardings is not None:
            shardings = tuple(
                f.get("sharding") if r in new else s
                for f, r, s in zip(final, results, shardings, strict=True)
            )
        return replace(root, final, root.shape, sharding=shardings)
    (root,) = final
    return root


def _split(
    mesh: Mesh, given: Sharding, dims: Sequence[Size], extra: tuple[Axis, ...]
) -> Sharding | None:
    """`given` with its largest evenly divisible dimension split further; None when an axis is in
    use or nothing divides."""
    used = (*given.axes, *given.unreduced, *given.manual)
    if not dims or given.maximal is not None or any(a.overlaps(b) for a in extra for b in used):
        return None
    parts = math.prod(a.size for a in extra)
    blocks = [
        (n // s.size, d)
        for d, (n, s) in enumerate(zip(dims, given.dims, strict=True))
        if isinstance(n, int) and n % (s.size * parts) == 0
    ]
    if not blocks:
        return None
    _, d = max(blocks, key=lambda b: (b[0], -b[1]))
    return Sharding(
        mesh,
        tuple(DimSharding(s.axes + extra) if e == d else s for e, s in enumerate(given.dims)),
    )


def _only_updates(param: Instruction, readers: Users) -> bool:
    """Whether everything that depends on the parameter, up to the program's outputs, is computed
    element by element."""
    pending = [param]
    seen = {param}
    while pending:
        for x in readers.get(pending.pop(), ()):
            if x.op not in _STRUCTURE and "pointwise" not in OPCODES[x.op].traits:
                return False
            if x not in seen:
                seen.add(x)
                pending.append(x)
    return True
