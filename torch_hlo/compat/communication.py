"""The collectives of torch_xla.core.xla_model, on torch.distributed's."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import hardware, spawning, utilities

Groups = Sequence[Sequence[int]] | None
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mul": dist.ReduceOp.PRODUCT,
    "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_groups: dict[tuple[Any, ...], Any] = {}


def _many():
    return not hardware.is_spmd() and spawning.join() > 1


def _group(groups):
    """The process group of this rank. All ranks come here with the same `groups`."""
    if not groups:
        return dist.group.WORLD
    key = (dist.group.WORLD, *map(tuple, groups))
    if key not in _groups:
        made = [dist.new_group(list(g)) for g in groups]
        _groups[key] = next(g for g, ranks in zip(made, groups) if dist.get_rank() in ranks)
    return _groups[key]


def _op(reduce_type):
    if reduce_type not in _OPS:
        raise ValueError(f"reduce type {reduce_type!r}: there are {', '.join(_OPS)}")
    return _OPS[reduce_type]


def all_reduce(
    reduce_type,
    inputs,
    scale=1.0,
    groups=None,
    pin_layout=True,
):
    """The reduced tensor, or the list of tensors, reduced in place. `scale` is a factor."""
    op, single = _op(reduce_type), isinstance(inputs, torch.Tensor)
    if not _many():
        return inputs.clone() if single else inputs
    with torch.no_grad():
        results = [inputs.detach().clone()] if single else inputs
        for x in results:
            dist.all_reduce(x, op, _group(groups))
            if scale != 1.0:
                x.mul_(scale)
    return results[0] if single else results


@functools.cache
def show_dynamo():
    """Dynamo looks into no module of this package: tell it what `all_reduce` of a tensor is."""
    from torch_hlo.pytorch import steps

    steps.trace_file(__file__)
    several = not hardware.is_spmd() and hardware.process_count() > 1

    @torch.compiler.substitute_in_graph(all_reduce, skip_signature_check=True)
    def traced(reduce_type, inputs, scale=1.0, groups=None, pin_layout=True):
        if groups is not None or several and not dist.is_initialized():
            raise NotImplementedError(
                "all_reduce inside torch.compile is one of all processes, which have joined: call"
                ' dist.init_process_group("xla", init_method="xla://") first, and give no groups'
            )
        result = inputs.clone()
        if several:
            dist.all_reduce(result, _OPS[reduce_type], group=dist.group.WORLD)
        return result * scale


def _each(function, value, output, *args):
    """`function` of a tensor or of each of a list; written to `output`, if there is one."""
    if isinstance(value, torch.Tensor):
        found = function(value, *args)
        return found if output is None else _replace(output, found)
    if not isinstance(value, list) or not all(isinstance(v, torch.Tensor) for v in value):
        raise TypeError(
            f"`value` needs to be a Tensor or a list of Tensors, but given {type(value)}."
        )
    if output is None:
        return [function(v, *args) for v in value]
    if not isinstance(output, list):
        raise TypeError(f"`output` needs to be a list of Tensors, but given {type(output)}.")
    if len(output) != len(value):
        raise ValueError(
            f"`output` length doesn't match `input` length: {len(output)} vs {len(value)}."
        )
    return [_replace(o, function(v, *args)) for v, o in zip(value, output)]


def _replace(output, value):
    """`output` with another value, which may have another shape."""
    output.data = value
    return output


def all_gather(
    value,
    dim=0,
    groups=None,
    output=None,
    pin_layout=True,
    channel_id=None,
    use_global_device_ids=None,
):
    """The values of all processes, one behind the other along `dim`."""
    return _each(_gathered, value, output, dim, groups)


def _gathered(x, dim, groups):
    if not _many():
        return x.clone()
    group = _group(groups)
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group)
    return torch.cat(parts, dim) if x.dim() else torch.stack(parts)


def reduce_scatter(
    reduce_type,
    input,
    scale,
    scatter_dim,
    shard_count,
    groups=None,
    output=None,
    pin_layout=True,
    channel_id=None,
    use_global_device_ids=None,
):
    """This process's part along `scatter_dim` of the reduced tensor."""
    return _each(_scattered, input, output, reduce_type, scale, scatter_dim, shard_count, groups)


def _scattered(x, reduce_type, scale, dim, count, groups):
    op = _op(reduce_type)
    if not _many():
        return x * scale
    parts = [p.contiguous() for p in x.detach().chunk(count, dim)]
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts, op, _group(groups))
    return out if scale == 1.0 else out * scale


def all_gather_bucketized(
    input_list,
    dim=0,
    groups=None,
    output=None,
    pin_layout=False,
    bucket_cap_mb=160,
):
    """`all_gather` of a list. (The compiler joins small collectives.)"""
    return all_gather(_listed(input_list, pin_layout), dim, groups, output)


def reduce_scatter_bucketized(
    reduce_type,
    input_list,
    scale,
    scatter_dim,
    shard_count,
    groups=None,
    output=None,
    pin_layout=False,
    bucket_cap_mb=160,
):
    """`reduce_scatter` of a list. (The compiler joins small collectives.)"""
    tensors = _listed(input_list, pin_layout)
    return reduce_scatter(reduce_type, tensors, scale, scatter_dim, shard_count, groups, output)


def _listed(tensors, pin_layout):
    if pin_layout:
        raise RuntimeError("pin_layout=True is not yet supported for lists of tensors")
    if not isinstance(tensors, list):
        raise TypeError(f"`input_list` needs to be a list of Tensors, but given {type(tensors)}.")
    return tensors


def all_to_all(
    value,
    split_dimension,
    concat_dimension,
    split_count,
    groups=None,
    pin_layout=True,
):
    """Part i along `split_dimension` goes to process i; what comes is joined along
    `concat_dimension`."""
    parts = [p.contiguous() for p in value.detach().chunk(split_count, split_dimension)]
    if _many():
        received = [torch.empty_like(p) for p in parts]
        dist.all_to_all(received, parts, _group(groups))
        parts = received
    return torch.cat(parts, concat_dimension)


def collective_permute(value, pairs):
    """Process s sends to t for each pair (s, t); zeros where nobody sends."""
    if not _many():
        return value.clone() if [0, 0] in map(list, pairs) else torch.zeros_like(value)
    everything = _gathered(value[None], 0, None)
    rank = dist.get_rank()
    source = next((s for s, t in pairs if t == rank), None)
    return torch.zeros_like(value) if source is None else everything[source]


def collective_broadcast(
    tensors,
    root_ordinal=0,
    groups=None,
    pin_layout=True,
):
    """Every process gets the values of `root_ordinal`, in place."""
    if _many():
        with torch.no_grad():
            for x in tensors:
                dist.broadcast(x.data, root_ordinal, _group(groups))


def broadcast_master_param(model):
    """Parameters and buffers become those of process 0."""
    collective_broadcast([*model.parameters(), *model.buffers()])


def fetch_gradients(optimizer):
    """Gradients of the parameters that have one."""
    found = (p.grad for group in optimizer.param_groups for p in group["params"])
    return [g for g in found if g is not None]


def reduce_gradients(optimizer, groups=None, pin_layout=True):
    """Gradients become their mean over the processes."""
    if not _many():
        return
    count = len(groups[0]) if groups else dist.get_world_size()
    all_reduce("sum", fetch_gradients(optimizer), 1.0 / count, groups)


def all_reduce_bucketized_gradients(
    gradients,
    scale,
    groups,
    pin_layout,
    bucket_cap_mb=0,
):
    """`all_reduce` of a list in place."""
    all_reduce("sum", gradients, scale, groups)


def rendezvous(tag, payload=b"", replicas=()):
    """Wait for all processes, or for those in `replicas`; what each gave as `payload`."""
    if spawning.join() == 1:
        return [payload]
    group = dist.group.WORLD
    if replicas and len(replicas) < dist.get_world_size():
        key = (group, tuple(replicas))
        if key not in _groups:  # the others do not come here
            _groups[key] = dist.new_group(list(replicas), use_local_synchronization=True)
        group = _groups[key]
    found: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (tag, payload), group)
    if any(other != tag for other, _ in found):
        raise RuntimeError(f"rendezvous {tag!r}: others came to {sorted({t for t, _ in found})}")
    return [data for _, data in found]


def mesh_reduce(tag, data, reduce_fn):
    """`reduce_fn` of the list of what all processes gave."""
    return reduce_fn(rendezvous(tag, utilities.to_cpu(data)))


def xla_rendezvous(payload=b"", ordinals=None, tag=None):
    return rendezvous(tag or "", payload)


_fetch_gradients = fetch_gradients
