"""torch.distributed on hlo tensors: collectives are recorded like other operations and run inside
the compiled program.

`RECORDED` says how each op of `_c10d_functional` and `c10d` becomes functional collectives. What a
program cannot express (send and recv, blocks of unequal sizes, gather and scatter to one rank) is
done at once: evaluate, communicate on the CPU, upload.

A recorded collective is part of the next step even if nobody wants its result, because the other
ranks wait for it: `storage.must_run`. The Work that a c10d op returns is done, `async_op` or not. A
receive blocks in `irecv` already: post sends before receives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torch_hlo.lowering.core import Node
from torch_hlo.lowering.spmd.collective import REDUCTIONS, format_groups
from torch_hlo.pytorch import tensors
from torch_hlo.pytorch.operators import OpOverload, base_name
from torch_hlo.pytorch.tensors import done_work, process_group, wait_work

from ..record import (
    Handler,
    HloTensor,
    aten,
    call,
    fallback,
    from_cpu,
    inference,
    meta as metas,
    must_run,
    recording,
    session,
)
from ..record.tensor import alias

functional = torch.ops._c10d_functional
_ONLY_READ = frozenset("send barrier monitored_barrier_ check_for_nan".split())


class Unrecordable(Exception):
    """The collective has to be done at once."""


def handler(op: OpOverload) -> Handler:
    """Handler of a communication op."""
    plan = RECORDED.get(op._schema.name)
    at_once = _process_group(op) if op.namespace == "c10d" else _functional(op)
    if plan is None:
        return at_once

    def run(args: tuple, kwargs: dict):
        try:
            return plan(*args, **kwargs)
        except Unrecordable:
            return at_once(args, kwargs)

    return run


# ---- recording


def groups_of(ranks: list[int], world: int) -> tuple[tuple[int, ...], ...]:
    """The groups of all ranks, of which `ranks` is this one's, if that is a dimension of a mesh
    over the world; else `ranks` alone.

    Ranks a, a+s, a+2s, ... inside an aligned block of n*s ranks are a mesh's dimension of stride s,
    and the others have theirs."""
    n = len(ranks)
    stride = ranks[1] - ranks[0] if n > 1 else 1
    block = n * stride
    regular = (
        stride > 0
        and ranks == list(range(ranks[0], ranks[0] + block, stride))
        and world % block == 0
        and ranks[0] % block < stride
    )
    if not regular:
        return (tuple(ranks),)
    return tuple(
        tuple(range(b + i, b + i + block, stride))
        for b in range(0, world, block)
        for i in range(stride)
    )


def _groups(group) -> tuple[str, int]:
    """Replica groups as text, and the group's size, of a process group or its name."""
    group = process_group(group)
    ranks = torch.distributed.get_process_group_ranks(group)
    return format_groups(groups_of(ranks, torch.distributed.get_world_size())), len(ranks)


_results: dict[tuple, metas.Result] = inference.remembered()


def _record(op: OpOverload, *args):
    """Record a functional collective; the last argument is the process group or its name."""
    groups, _ = _groups(args[-1])
    key: list = [op]
    nodes = [recording.operand(a, key, [], False) for a in args[:-1]]
    result = _results.get((*key, groups))
    if result is None:
        result = _results[(*key, groups)] = inference.infer(
            op, (*args[:-1], tensors.process_group(args[-1]).group_name), {}
        )
    node = Node(
        op,
        (*nodes, groups),
        {},
        result.outs,
        session.current().sources and recording.source(),
    )
    found = recording.build(result.form, result.metas, node)
    must_run(found._storage.value)
    return found


def _reducing(op: OpOverload) -> Callable:
    """`op(x, reduction, ...)`, for the reductions that HLO has."""

    def record(x, reduction: str, *rest):
        if reduction not in REDUCTIONS:
            raise Unrecordable
        return _record(op, x, reduction, *rest)

    return record


def _each(record: Callable) -> Callable:
    """A collective on a list of tensors: one for each."""
    return lambda xs, *args: [record(x, *args) for x in xs]


def _written(record: Callable) -> Callable:
    """In-place form of a functional collective: the results are written to the first argument,
    which is returned."""

    def run(target, *args):
        results = record(target, *args)
        for t, r in (
            zip(target, results) if isinstance(results, (list, tuple)) else [(target, results)]
        ):
            call(aten.copy_.default, t, r)
        return target

    return run


def _out(record: Callable) -> Callable:
    def run(*args, out):
        call(aten.copy_.default, out, record(*args))
        return out

    return run


def _all_to_all_single(x, output_sizes, input_sizes, group):
    n = _groups(group)[1]
    rows = x.shape[0] if x.dim() else 0
    equal = {rows // n} if rows % n == 0 else ()
    if any(set(sizes) - set(equal) for sizes in (output_sizes, input_sizes)) or not equal:
        raise Unrecordable
    return _record(functional.all_to_all_single.default, x, output_sizes, input_sizes, group)


_all_reduce = _reducing(functional.all_reduce.default)
_reduce_scatter = _reducing(functional.reduce_scatter_tensor.default)
_all_gather = partial(_record, functional.all_gather_into_tensor.default)
_broadcast = partial(_record, functional.broadcast.default)

# ---- c10d: operations on lists of tensors that are written to, and a Work


def _reduction(op) -> str:
    """Name of a boxed ReduceOp. Raises Unrecordable for a scaled sum."""
    name = torch.distributed.ReduceOp.RedOpType(op.op()).name.lower()
    if name not in REDUCTIONS:
        raise Unrecordable
    return name


def _copy(target: HloTensor, value: HloTensor) -> None:
    call(
        aten.copy_.default,
        target,
        value if value.shape == target.shape else call(aten.reshape.default, value, target.shape),
    )


def _flat(x: HloTensor) -> HloTensor:
    return call(aten.reshape.default, x, [-1])


def _allreduce_(tensors, group, op, *rest):
    reduction = _reduction(op)
    if rest and isinstance(rest[0], torch.Tensor):  # indices of sparse tensors
        raise Unrecordable
    for t in tensors:
        _copy(t, _all_reduce(t, reduction, group))
    return tensors


def _broadcast_(tensors, group, root, root_tensor, *rest):
    for t in tensors:
        _copy(t, _broadcast(t, root, group))
    return tensors


def _allgather_base_(out, x, group, *rest):
    _copy(out, _all_gather(_flat(x), _groups(group)[1], group))
    return out


def _pairwise(record: Callable) -> Callable:
    """An op on lists of tensors from that on one of each."""

    def run(outs, xs, *args):
        for out, x in zip(outs, xs, strict=True):
            record(out, x, *args)
        return outs

    return run


def _allgather_(lists, xs, group, *rest):
    n = _groups(group)[1]
    if any(len(outs) != n or any(o.shape != x.shape for o in outs) for outs, x in zip(lists, xs)):
        raise Unrecordable
    for outs, x in zip(lists, xs, strict=True):
        for out, part in zip(
            outs,
            call(aten.split.Tensor, _all_gather(_flat(x), n, group), x.numel() or 1),
        ):
            _copy(out, part)
    return lists


def _allgather_coalesced_(lists, xs, group, *rest):
    # The outer list is by rank here.
    for i, x in enumerate(xs):
        _allgather_([[outs[i] for outs in lists]], [x], group)
    return lists


def _reduce_scatter_base_(out, x, group, op, *rest):
    _copy(out, _reduce_scatter(_flat(x), _reduction(op), _groups(group)[1], group))
    return out


def _reduce_scatter_(outs, lists, group, op, *rest):
    if any(x.shape != out.shape for out, xs in zip(outs, lists) for x in xs):
        raise Unrecordable
    for out, xs in zip(outs, lists, strict=True):
        _reduce_scatter_base_(out, call(aten.cat.default, [_flat(x) for x in xs]), group, op)
    return outs


def _alltoall_base_(out, x, group, output_sizes, input_sizes, *rest):
    n = _groups(group)[1]
    if (
        x.numel() != out.numel()
        or x.dim() == 0
        or x.shape[0] % n
        or any(len(set(sizes)) > 1 for sizes in (output_sizes, input_sizes))
    ):
        raise Unrecordable
    even = [x.shape[0] // n] * n
    _copy(out, _record(functional.all_to_all_single.default, x, even, even, group))
    return out


def _alltoall_(outs, xs, group, *rest):
    if len({t.numel() for t in (*outs, *xs)}) > 1 or not xs[0].numel():
        raise Unrecordable
    each = [xs[0].numel()] * len(xs)
    exchanged = _record(
        functional.all_to_all_single.default,
        call(aten.cat.default, [_flat(x) for x in xs]),
        each,
        each,
        group,
    )
    for out, part in zip(outs, call(aten.split.Tensor, exchanged, each[0])):
        _copy(out, part)
    return outs


def _with_work(record: Callable, returns_tensors: bool) -> Callable:
    """A c10d op from what records it: it returns its tensors and a Work that is done, or the Work
    alone."""

    def run(*args, **kwargs):
        if not _all_on_device(args):
            raise Unrecordable
        tensors = record(*args, **kwargs)
        written: dict[int, HloTensor] = {}
        fallback.collect(tensors, written)
        work = done_work(list(written.values()))
        return (tensors, work) if returns_tensors else work

    return run


def _all_on_device(args: tuple) -> bool:
    return all(
        (
            _all_on_device(a)
            if isinstance(a, (list, tuple))
            else not isinstance(a, torch.Tensor) or isinstance(a, HloTensor)
        )
        for a in args
    )


# Schema name -> function of the op's arguments that records it.
RECORDED: dict[str, Callable] = {
    **{
        f"_c10d_functional::{name}": record
        for name, record in {
            "all_reduce": _all_reduce,
            "all_reduce_": _written(_all_reduce),
            "all_reduce_coalesced": _each(_all_reduce),
            "all_reduce_coalesced_": _written(_each(_all_reduce)),
            "broadcast": _broadcast,
            "broadcast_": _written(_broadcast),
            "all_gather_into_tensor": _all_gather,
            "all_gather_into_tensor_out": _out(_all_gather),
            "all_gather_into_tensor_coalesced": _each(_all_gather),
            "reduce_scatter_tensor": _reduce_scatter,
            "reduce_scatter_tensor_out": _out(_reduce_scatter),
            "reduce_scatter_tensor_coalesced": _each(_reduce_scatter),
            "all_to_all_single": _all_to_all_single,
            "wait_tensor": alias,  # a value that a recorded operation uses is there
            "_wrap_tensor_autograd": alias,
        }.items()
    },
    "_dtensor::shard_dim_alltoall": partial(_record, torch.ops._dtensor.shard_dim_alltoall.default),
    **{
        f"c10d::{name}": _with_work(record, returns_tensors)
        for name, record, returns_tensors in (
            ("allreduce_", _allreduce_, True),
            ("allreduce_coalesced_", _allreduce_, False),
            ("broadcast_", _broadcast_, True),
            ("_allgather_base_", _allgather_base_, True),
            ("allgather_", _allgather_, True),
            ("allgather_coalesced_", _allgather_coalesced_, False),
            (
                "allgather_into_tensor_coalesced_",
                _pairwise(_allgather_base_),
                False,
            ),
            ("_reduce_scatter_base_", _reduce_scatter_base_, True),
            ("reduce_scatter_", _reduce_scatter_, True),
            (
                "reduce_scatter_tensor_coalesced_",
                _pairwise(_reduce_scatter_base_),
                False,
            ),
            ("alltoall_base_", _alltoall_base_, False),
            ("alltoall_", _alltoall_, True),
        )
    },
}


# ---- at once


def _process_group(op: OpOverload) -> Handler:
    """c10d ops write to their first argument (which the schema does not say) and return (it, Work),
    or Work."""
    writes = base_name(op) not in _ONLY_READ

    def run(args: tuple, kwargs: dict):
        hosts, result = _on_host(op, args, kwargs)
        work = result[-1] if isinstance(result, (tuple, list)) else result
        if writes:
            if work is not None:
                wait_work(work)
            written: dict[int, HloTensor] = {}
            fallback.collect(args[0], written)
            for t in written.values():
                fallback.write_back(t, hosts[id(t)])
            if work is not None:  # some Works may be waited for only once
                work = done_work(list(written.values()))
        return (args[0], work) if isinstance(result, (tuple, list)) else work

    return run


def _functional(op: OpOverload) -> Handler:
    def run(args: tuple, kwargs: dict):
        hosts, result = _on_host(op, args, kwargs)
        wait = functional.wait_tensor.default
        done = [wait(r) for r in result] if isinstance(result, (tuple, list)) else wait(result)
        written = {id(hosts[id(t)]): t for t in fallback.by_use(op, args, kwargs)[0]}
        if not written:
            return [from_cpu(r) for r in done] if isinstance(done, list) else from_cpu(done)
        for t in written.values():
            fallback.write_back(t, hosts[id(t)])
        return kwargs["out"] if "out" in kwargs else args[0]

    return run


def _on_host(op: OpOverload, args: tuple, kwargs: dict) -> tuple[dict[int, torch.Tensor], Any]:
    """CPU copies of the tensors, and what the op returns for them. All that is recorded runs
    before, so that the ranks' collectives keep their order."""
    session.engine().synchronize()
    found: dict[int, HloTensor] = {}
    fallback.collect((args, list(kwargs.values())), found)
    hosts = fallback.copies(list(found.values()))
    given = [fallback.to_host(a, hosts) for a in args]
    return hosts, op(*given, **{k: fallback.to_host(v, hosts) for k, v in kwargs.items()})
