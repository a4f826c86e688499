"""Ops without a lowering run on the CPU: arguments are materialised, results and mutated arguments
go back to the device. So do ops that write to memory which their arguments share: what becomes of
it follows from the order in which PyTorch's kernels read and write.

Nothing is silent: counter `aten::<op>`, a warning once per op, and with TORCH_HLO_FALLBACK=error an
exception instead."""

import torch
from torch import Tensor

from torch_hlo import config, log, metrics
from torch_hlo.pytorch import participants
from torch_hlo.pytorch.operators import OpOverload
from torch_hlo.pytorch.registration import PLACE

from . import generator, meta as metas, views
from .storage import Storage, write
from .tensor import HloTensor, adopt, from_cpu, make, to_cpu, upload

MODES = ("warn", "allow", "error")


def run_fallback(
    op: OpOverload,
    args: tuple,
    kwargs: dict,
    reason: str = "torch_hlo has no lowering for it",
):
    """Execute an aten overload on the CPU: functional, in-place, `out=` and list variants.

    Returned tensors are new hlo tensors, except that a mutated argument is returned as itself.
    Raises NotImplementedError with TORCH_HLO_FALLBACK=error, and what the op raises on the CPU."""
    name = op._schema.name
    _announce(op, name, args, kwargs, reason)
    metrics.count(name)
    return execute(op, args, kwargs)


def execute(op: OpOverload, args: tuple, kwargs: dict):
    """Run an overload on the CPU, without warning or counter: what a data-dependent op does,
    too."""
    found: dict[int, HloTensor] = {}
    collect((args, list(kwargs.values())), found)
    written, _ = by_use(op, args, kwargs)
    memories = shared_memories(list(found.values()), written)
    on_cpu = copies([t for t in found.values() if t._storage not in memories])
    for t in found.values():
        if t._storage in memories:
            on_cpu[id(t)] = _part(memories[t._storage], t)
    host_args = [to_host(a, on_cpu) for a in args]
    host_kwargs = {k: to_host(v, on_cpu) for k, v in kwargs.items()}
    if generator.is_random(op) and any(a.name == "generator" for a in op._schema.arguments):
        host_kwargs["generator"] = generator.cpu_generator(kwargs)
    with participants.on_the_host():
        result = op(*host_args, **host_kwargs)
        for storage, memory in memories.items():
            write(make(storage.meta, storage), upload(memory))
        back = {id(on_cpu[id(t)]): t for t in written}
        for t in back.values():
            write_back(t, on_cpu[id(t)], t._storage in memories)
        return _to_device(result, back)


def copies(tensors: list[HloTensor]) -> dict[int, Tensor]:
    """id -> CPU copy. Tensors that are the same view of the same storage share a copy, as they do
    on the device."""
    same: dict[tuple, HloTensor] = {}
    for t in tensors:
        same.setdefault((id(t._storage), t._view, t._meta), t)
    copies = dict(zip(same, to_cpu(list(same.values())), strict=True))
    return {id(t): copies[id(t._storage), t._view, t._meta] for t in tensors}


def shared_memories(tensors: list[HloTensor], written: list[HloTensor]) -> dict[Storage, Tensor]:
    """CPU copies of the storages of which a tensor that is written shares memory with itself or
    with another view."""
    views = {(t._storage, t._view, t._meta) for t in tensors}
    seen = [storage for storage, _, _ in views]
    bases = {
        t._storage: make(t._storage.meta, t._storage)
        for t in written
        if t._meta.shares or seen.count(t._storage) > 1
    }
    return dict(zip(bases, to_cpu(list(bases.values())), strict=True))


def _part(memory: Tensor, tensor: HloTensor) -> Tensor:
    """What the tensor shows of a copy of its storage."""
    meta = tensor._meta
    view = torch.empty(0, dtype=meta.dtype, device="cpu")
    view.set_(memory.untyped_storage(), meta.offset, meta.size, meta.stride)
    for op in views.lazy_bits(tensor._view, meta):
        view = views.LAZY_BITS[op](view)
    return view


def collect(value, found: dict[int, HloTensor]) -> None:
    if isinstance(value, HloTensor):
        found[id(value)] = value
    elif isinstance(value, (list, tuple)):
        for v in value:
            collect(v, found)


def to_host(value, on_cpu: dict[int, Tensor]):
    if isinstance(value, HloTensor):
        return on_cpu[id(value)]
    if type(value) in (list, tuple):
        return type(value)(to_host(v, on_cpu) for v in value)
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type in PLACE.names else value
    return value


def by_use(op: OpOverload, args: tuple, kwargs: dict) -> tuple[list[HloTensor], list[HloTensor]]:
    """The hlo tensors among the arguments, in order: those that the schema says are written to, and
    the others."""
    found: tuple[list[HloTensor], list[HloTensor]] = ([], [])
    for i, argument in enumerate(op._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        reads = not (argument.alias_info and argument.alias_info.is_write)
        values = value if isinstance(value, (list, tuple)) else (value,)
        found[reads].extend(v for v in values if isinstance(v, HloTensor))
    return found


def write_back(tensor: HloTensor, value: Tensor, done: bool = False) -> None:
    """The value of a tensor that was written to; `done`: it is there, unless its size changed."""
    if tuple(value.shape) == tensor._meta.size and value.dtype == tensor._meta.dtype:
        if not done:
            write(tensor, upload(value))
    else:  # the op resized it
        adopt(tensor, from_cpu(value))


def _to_device(result: object, back: dict[int, HloTensor]) -> object:
    if isinstance(result, Tensor):
        return back[id(result)] if id(result) in back else from_cpu(result)
    if isinstance(result, (list, tuple)):
        return (
            type(result)([_to_device(r, back) for r in result])
            if type(result) in (list, tuple)
            else [_to_device(r, back) for r in result]
        )
    return result


def _announce(op: OpOverload, name: str, args: tuple, kwargs: dict, reason: str) -> None:
    mode = config.get("FALLBACK")
    if mode not in MODES:
        raise ValueError(f"TORCH_HLO_FALLBACK={mode!r}: choose one of {', '.join(MODES)}")
    if mode == "error":
        raise NotImplementedError(
            f"{op} ({describe(args, kwargs)}) would run on the CPU: {reason}. Lower it"
            " (torch_hlo/lowering), replace it in the model, or set TORCH_HLO_FALLBACK=warn to let"
            " it run there"
        )
    if mode == "warn":
        log.warn_once(
            str(op),
            f"{op} ({describe(args, kwargs)}) runs on the CPU: {reason}. Each call waits for the"
            f" device; calls are counted as {name!r} in torch_hlo.metrics. TORCH_HLO_FALLBACK=error"
            " makes it an error, =allow silences this",
        )


def describe(args: tuple, kwargs: dict) -> str:
    """Arguments for messages: shapes of tensors, values of the rest."""
    return ", ".join([*map(_describe, args), *(f"{k}={_describe(v)}" for k, v in kwargs.items())])


def _describe(value) -> str:
    if isinstance(value, HloTensor):
        return str(value._meta.hlo)
    if isinstance(value, Tensor):
        return (
            f"{value.device.type} {metas.of(value).hlo}"
            if value.layout is torch.strided
            else f"{value.layout} {value.dtype} {[*value.shape]}"
        )
    if isinstance(value, (list, tuple)):
        shown = [_describe(v) for v in value[:8]] + (["..."] if len(value) > 8 else [])
        return "[" + ", ".join(shown) + "]"
    return repr(value)
