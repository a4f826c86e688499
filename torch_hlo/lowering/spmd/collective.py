"""PyTorch's functional collectives -> HLO's collectives.

The group is the last argument of each of these nodes: XLA's replica groups as text,
`{{0,1},{2,3}}`, over the ranks of the default process group (lazy/ops/distributed_ops.py writes
it), so that equal programs have equal text on every rank. Every recorded collective has a channel
of its own: two of them are never merged, and they run in the order of their channels."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from torch_hlo.hlo.ir import Instruction, Ints, Size, instr
from torch_hlo.hlo.ir.build import binary_computation

from ..core import LoweringError, lowers, new_channel, permute, promote, reshape

Groups = tuple[Ints, ...]
functional = torch.ops._c10d_functional
# Reductions of torch.distributed -> HLO opcode. "avg" sums and divides.
REDUCTIONS = {
    "sum": "add",
    "avg": "add",
    "product": "multiply",
    "min": "minimum",
    "max": "maximum",
    "band": "and",
    "bor": "or",
    "bxor": "xor",
}


def parse_groups(text: str) -> Groups:
    """`{{0,1},{2,3}}` -> ((0, 1), (2, 3)). Raises LoweringError for the name of a process group."""
    if not (isinstance(text, str) and text.startswith("{{")):
        raise LoweringError(
            f"a collective over the process group {text!r} can be compiled on hlo tensors only:"
            " move them with .to('hlo')"
        )
    return tuple(tuple(int(i) for i in part.split(",")) for part in text[2:-2].split("},{"))


def format_groups(groups: Sequence[Sequence[int]]) -> str:
    """Inverse of `parse_groups`."""
    return "{" + ",".join("{" + ",".join(map(str, g)) + "}" for g in groups) + "}"


def _collective(op: str, x: Instruction, groups: Groups, **attrs: Any) -> Instruction:
    if any(not isinstance(d, int) for d in x.dims):
        raise LoweringError(f"{op} of {x.shape}: collectives are compiled for fixed sizes")
    return instr(
        op,
        (x,),
        channel_id=new_channel(),
        replica_groups=groups,
        use_global_device_ids=True,
        **attrs,
    )


def _reduced(op: str, x: Instruction, reduction: str, text: str, **attrs: Any) -> Instruction:
    groups = parse_groups(text)
    if reduction not in REDUCTIONS:
        raise LoweringError(
            f"{op} of {x.shape} with the reduction {reduction!r}; there are {', '.join(REDUCTIONS)}"
        )
    opcode = REDUCTIONS[reduction]
    if x.dtype == "pred":  # PyTorch sums booleans as "or"
        opcode = {
            "add": "or",
            "maximum": "or",
            "minimum": "and",
            "multiply": "and",
        }.get(opcode, opcode)
    result = _collective(op, x, groups, to_apply=binary_computation(opcode, x.dtype), **attrs)
    if reduction == "avg":
        n = len(groups[0])
        result = instr("divide", (result, promote.full(n, x.dtype, result.dims)))
    return result


lowers(functional.all_reduce.default)(partial(_reduced, "all-reduce"))


@lowers(functional.reduce_scatter_tensor.default)
def reduce_scatter(x: Instruction, reduction: str, size: int, group: str) -> Instruction:
    """Rank i of the group keeps block i of dimension 0 of the sum."""
    return _reduced("reduce-scatter", x, reduction, group, dimensions=(0,))


@lowers(functional.all_gather_into_tensor.default)
def all_gather(x: Instruction, size: int, group: str) -> Instruction:
    """The ranks' blocks one after another along dimension 0."""
    x = x if x.rank else reshape(x, (1,))
    return _collective("all-gather", x, parse_groups(group), dimensions=(0,))


@lowers(functional.all_to_all_single.default)
def all_to_all(
    x: Instruction,
    output_sizes: Sequence[Size],
    input_sizes: Sequence[Size],
    group: str,
) -> Instruction:
    """Block i of dimension 0 goes to rank i of the group; equal blocks only
    (lazy/ops/distributed_ops.py sees to that)."""
    return _collective("all-to-all", x, parse_groups(group), dimensions=(0,))


@lowers(functional.broadcast.default)
def broadcast(x: Instruction, source: int, group: str) -> Instruction:
    """`source`: rank within the group. HLO's broadcast starts at the first of each group."""
    groups = tuple((g[source], *g[:source], *g[source + 1 :]) for g in parse_groups(group))
    return _collective("collective-broadcast", x, groups)


@lowers(torch.ops._dtensor.shard_dim_alltoall.default)
def shard_dim_alltoall(x: Instruction, gather_dim: int, shard_dim: int, group: str) -> Instruction:
    """From sharded along `gather_dim` to sharded along `shard_dim`, which is whole and divisible
    before."""
    groups = parse_groups(group)
    n = len(groups[0])
    rank = x.rank
    gather_dim = gather_dim % rank
    shard_dim = shard_dim % rank
    dims = x.dims
    size = dims[shard_dim] // n
    y = _collective("all-to-all", x, groups, dimensions=(shard_dim,))
    # piece i of `shard_dim` came from rank i
    y = reshape(y, (*dims[:shard_dim], n, size, *dims[shard_dim + 1 :]))
    order = [d for d in range(rank + 1) if d != shard_dim]
    place = order.index(gather_dim if gather_dim < shard_dim else gather_dim + 1)
    y = permute(y, (*order[:place], shard_dim, *order[place:]))
    return reshape(
        y,
        tuple(
            s * n if d == gather_dim else size if d == shard_dim else s for d, s in enumerate(dims)
        ),
    )
