"""torch.distributed on hlo tensors, collective by collective: evaluate, communicate on the CPU (gloo), upload.

A collective that writes to hlo tensors is complete when it returns, `async_op` or not: the Work that the caller gets is done. So a receive
blocks in `irecv` already: post sends before receives.
"""
from __future__ import annotations

import torch
from torch._ops import OpOverload

from torch_hlo.lazy import backend, fallback
from torch_hlo.lazy.dispatch import Handler
from torch_hlo.lazy.tensor import HloTensor, alias, from_cpu

_ONLY_READ = frozenset("send barrier monitored_barrier_ check_for_nan".split())


def handler(op: OpOverload) -> Handler:
    """Handler of a communication op."""
    if op.namespace == "c10d":
        return _process_group(op)
    if op._schema.name == "_c10d_functional::wait_tensor":
        return lambda args, kwargs: alias(args[0])
    return _functional(op)


def _process_group(op: OpOverload) -> Handler:
    """c10d ops write to their first argument (which the schema does not say) and return (it, Work), or Work."""
    writes = op._schema.name.split("::")[1] not in _ONLY_READ

    def run(args: tuple, kwargs: dict):
        hosts, host_args, host_kwargs = _to_host(args, kwargs)
        result = op(*host_args, **host_kwargs)
        work = result[-1] if isinstance(result, (tuple, list)) else result
        if writes:
            if work is not None:
                backend.wait_work(work)
            written: dict[int, HloTensor] = {}
            fallback._collect(args[0], written)
            for t in written.values():
                fallback._write_back(t, hosts[id(t)])
            if work is not None:  # some Works may be waited for only once
                work = backend.done_work(list(written.values()))
        return (args[0], work) if isinstance(result, (tuple, list)) else work

    return run


def _functional(op: OpOverload) -> Handler:
    def run(args: tuple, kwargs: dict):
        hosts, host_args, host_kwargs = _to_host(args, kwargs)
        result = op(*host_args, **host_kwargs)
        wait = torch.ops._c10d_functional.wait_tensor.default
        done = [wait(r) for r in result] if isinstance(result, (tuple, list)) else wait(result)
        written = {id(hosts[id(t)]): t for t in fallback._mutated(op, args, kwargs)}
        if not written:
            return [from_cpu(r) for r in done] if isinstance(done, list) else from_cpu(done)
        for host, t in zip(map(hosts.__getitem__, map(id, written.values())), written.values()):
            fallback._write_back(t, host)
        return kwargs["out"] if "out" in kwargs else args[0]

    return run


def _to_host(args: tuple, kwargs: dict) -> tuple[dict[int, torch.Tensor], list, dict]:
    found: dict[int, HloTensor] = {}
    fallback._collect((args, list(kwargs.values())), found)
    hosts = fallback._copies(list(found.values()))
    return hosts, [fallback._to_host(a, hosts) for a in args], {k: fallback._to_host(v, hosts) for k, v in kwargs.items()}

