"""Equal calls of a joint graph of forward and backward are computed once.

PyTorch's own search for them imports all of Inductor, 0.7 s of a model's first step, to ask where a
graph writes."""

import operator

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from torch_hlo.lowering.core import is_random
from torch_hlo.pytorch.operators import OpOverload

aten = torch.ops.aten


def share(graph: fx.Graph) -> int:
    """Have equal calls computed once; returns how many calls that spares. Results that are returned
    stay apart: PyTorch sees them as different memory."""
    (output,) = graph.find_nodes(op="output")
    writes = {
        n for n in graph.nodes if isinstance(n.target, OpOverload) and n.target._schema.is_mutable
    }
    written = {_memory(x) for n in writes for x in n.all_input_nodes} - {None}
    returned = {_memory(x) for x in output.all_input_nodes} - {None}
    first: dict[tuple, fx.Node] = {}
    spared = epoch = 0
    for node in graph.nodes:
        epoch += node in writes
        if node.op != "call_function" or not _is_pure(node.target) or _memory(node) in returned:
            continue
        reads_written = bool(written) and any(_memory(x) in written for x in node.all_input_nodes)
        key = (_key((node.target, node.args, node.kwargs)), reads_written and epoch)
        try:
            known = first.setdefault(key, node)
        except TypeError:  # an argument without a hash
            continue
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)
            spared += 1
    return spared


def _is_pure(target: object) -> bool:
    if target is operator.getitem:
        return True
    return (
        isinstance(target, OpOverload)
        and not target._schema.is_mutable
        and not is_random(target)
        and target not in _UNDEFINED
    )


_UNDEFINED = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


def _key(x: object) -> tuple:
    """A hashable value that differs where arguments do: 1, 1.0 and True are equal in Python, 0.0
    and -0.0 too."""
    kind = type(x)
    if isinstance(x, (list, tuple)):
        return (kind, *map(_key, x))
    if isinstance(x, dict):
        return (kind, *((k, _key(v)) for k, v in x.items()))
    if kind is float:
        return (kind, x.hex())
    if kind is complex:
        return (kind, x.real.hex(), x.imag.hex())
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (kind, x.node.expr)
    return (kind, x)


def _memory(node: fx.Node) -> StorageWeakRef | None:
    """What the node's tensor shares with its aliases; None for anything else."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return StorageWeakRef(value.untyped_storage())
    except NotImplementedError:
        return None
