"""Collectives of partitioned programs between GPUs: torch.distributed's NCCL groups on the arrays
where they are, in the order of the program's stream.

    tensors = Tensors(driver)        # addresses of the device as PyTorch's tensors
    finish = start(link, collective, inputs, outputs)    # None: NCCL has no such collective, the
                                                         # host does it
    finish()                         # what comes after on the stream comes after the collective

One process per GPU. NCCL adds in an order of its own, so sums differ from those of other runtimes
in their last bits; on one machine they repeat. What it cannot do (sums of f8, bitwise operations,
computations that are not one operation) goes through the host like on the CPU, counted as
HostCollective. https://docs.pytorch.org/docs/stable/distributed.html"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Ints, Shape
from torch_hlo.hlo.sharding.collective import Collective, CollectiveError

from .. import dlpack
from ..process_group import ProcessLink
from .cuda_driver import Cuda

BACKEND = "nccl"
Group = Ints
Finish = Callable[[], None]
T = TypeVar("T")
_SUMS = {
    "add": "SUM",
    "multiply": "PRODUCT",
    "maximum": "MAX",
    "minimum": "MIN",
}
_FLAGS = {
    "and": "MIN",
    "or": "MAX",
    "maximum": "MAX",
    "minimum": "MIN",
}  # of bytes that are 0 or 1
# the name until PyTorch 2.12
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sums = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_REDUCED = frozenset("f16 bf16 f32 f64 s8 u8 s32 s64".split())


class Tensors:
    """PyTorch's view of a driver's memory and streams."""

    def __init__(self, driver: Cuda) -> None:
        self.driver = driver
        self.place = dlpack.CUDA, driver.number

    def at(self, address: int, shape: Shape) -> Tensor:
        """The array at an address; flags are bytes, and so is what PyTorch computes nothing
        with."""
        if not shape.size:
            return torch.empty(shape.dims, dtype=torch.uint8)
        plain = (
            Shape("u8", shape.dims)
            if shape.nbytes == shape.size and shape.dtype not in ("s8", "u8")
            else shape
        )
        return torch.from_dlpack(
            _Capsule(
                dlpack.export(dlpack.Array(address, plain, self.place), lambda: None),
                self.place,
            )
        )

    def stream(self) -> AbstractContextManager[object]:
        """Makes the program's stream PyTorch's current one."""
        device = torch.device("cuda", self.driver.number)
        return torch.cuda.stream(torch.cuda.ExternalStream(self.driver.stream.value, device=device))


@frozen
class _Capsule:
    capsule: object
    place: tuple[int, int]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self, **options: object) -> object:
        return self.capsule


def start(
    link: ProcessLink,
    c: Collective,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    order: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> Finish | None:
    """Take part in a collective for this process. `order()`:
    a context in which PyTorch works in the program's order. Raises CollectiveError naming the
    collective and the program."""
    run = _RUN.get(c.op)
    if (
        run is None
        or c.op in ("all-reduce", "reduce-scatter")
        and any(_operation(c, d) is None for d in c.dtypes)
    ):
        return None
    group = c.group(link.device, link.replicas, link.partitions)

    def guarded(work: Callable[[], T]) -> T:
        try:
            with order():
                return work()
        except RuntimeError as error:
            if isinstance(error, CollectiveError):
                raise
            raise CollectiveError(
                f"{c} of ranks {','.join(map(str, group))}, in {link.program}: {error}"
            ) from error

    if len(group) < 2:
        finish = guarded(lambda: _alone(group, inputs, outputs))
    else:
        finish = guarded(lambda: run(_Run(link, c, group, inputs, outputs)))
    return lambda: guarded(finish)


@dataclass
class _Run:
    """One collective: who takes part, on what."""

    link: ProcessLink
    c: Collective
    group: Group
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]

    def __post_init__(self) -> None:
        self.torch_group = _group(self.link, self.group)
        # torch.distributed counts the members of a group by their numbers
        self.order = [sorted(self.group).index(d) for d in self.group]

    def exchange(
        self,
        sends: dict[int, Sequence[Tensor]],
        receives: dict[int, Sequence[Tensor]],
    ) -> Finish:
        """Send `sends[device]` to each, fill `receives[device]` from each. What a device has for
        itself is copied."""
        operations = []
        landed = []
        me = self.link.device
        for device, arrays in sends.items():
            operations += [
                dist.P2POp(dist.isend, _bytes(a.contiguous()), device, self.torch_group)
                for a in arrays
                if device != me and a.numel()
            ]
        for device, arrays in receives.items():
            for i, target in enumerate(arrays):
                if device == me:
                    target.copy_(sends[me][i])
                elif target.numel():
                    buffer = (
                        target
                        if target.is_contiguous()
                        else torch.empty_like(target, memory_format=torch.contiguous_format)
                    )
                    operations.append(
                        dist.P2POp(dist.irecv, _bytes(buffer), device, self.torch_group)
                    )
                    if buffer is not target:
                        landed.append((target, buffer))
        works = dist.batch_isend_irecv(operations) if operations else []

        def finish() -> None:
            for work in works:
                work.wait()
            for target, buffer in landed:
                target.copy_(buffer)
            operations.clear()  # what was sent has been kept until here

        return finish


def _group(link: ProcessLink, group: Group) -> dist.ProcessGroup:
    """torch.distributed's group of these ranks; all of them ask for it in the same order."""
    members = BACKEND, *sorted(group)
    found = link.groups.get(members)
    if found is None:
        limit = datetime.timedelta(seconds=link.timeout)
        found = link.groups[members] = dist.new_group(
            sorted(group),
            limit,
            BACKEND,
            use_local_synchronization=True,
            group_desc="torch_hlo gpu",
        )
    return found


def _operation(c: Collective, dtype: str) -> dist.ReduceOp.RedOpType | None:
    """PyTorch's name for the reduction of an element type; None where there is none."""
    name = (
        _FLAGS.get(c.reduction)
        if dtype == "pred"
        else _SUMS.get(c.reduction)
        if dtype in _REDUCED
        else None
    )
    if dtype in ("c64", "c128") and c.reduction == "add":
        name = "SUM"
    return getattr(dist.ReduceOp, name) if name else None


def _alone(group: Group, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Finish:
    for i, o in enumerate(outputs):
        if group:
            o.copy_(inputs[i])
        else:  # a permutation or a broadcast that leaves this device out
            o.zero_()
    return lambda: None


def _waits(works: list) -> Finish:
    def finish() -> None:
        for work in works:
            work.wait()

    return finish


def _bytes(x: Tensor) -> Tensor:
    """A contiguous array as what every transport moves."""
    return x.view(-1).view(torch.uint8)


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _all_reduce(r: _Run) -> Finish:
    works = []
    for i, o, dtype in zip(r.inputs, r.outputs, r.c.dtypes, strict=True):
        o.copy_(i)
        works.append(
            dist.all_reduce(_real(o), _operation(r.c, dtype), r.torch_group, async_op=True)
        )
    return _waits(works)


def _all_gather(r: _Run) -> Finish:
    n = len(r.group)
    works = []
    landed = []
    for i, o in zip(r.inputs, r.outputs, strict=True):
        rows = (
            o
            if r.c.dimension == 0 and r.order == sorted(r.order)
            else torch.empty((n * i.shape[0], *i.shape[1:]), dtype=o.dtype, device=o.device)
        )
        works.append(_gather(_bytes(rows), _bytes(i), r.torch_group, async_op=True))
        landed.append((o, rows))

    def finish() -> None:
        _waits(works)()
        for o, rows in landed:
            if rows is not o:
                blocks = rows.chunk(n)
                torch.cat([blocks[k] for k in r.order], r.c.dimension, out=o)

    return finish


def _reduce_scatter(r: _Run) -> Finish:
    works = []
    for i, o, dtype in zip(r.inputs, r.outputs, r.c.dtypes, strict=True):
        blocks = i.chunk(len(r.group), r.c.dimension)
        rows = torch.cat(
            [blocks[r.order.index(k)].contiguous().view(-1) for k in range(len(blocks))]
        )
        works.append(
            _scatter_sums(
                _real(o).view(-1),
                _real(rows).view(-1),
                _operation(r.c, dtype),
                r.torch_group,
                async_op=True,
            )
        )
    return _waits(works)


def _all_to_all(r: _Run) -> Finish:
    def of(arrays: Sequence[Tensor], k: int) -> Sequence[Tensor]:
        return (
            [arrays[k]]
            if r.c.dimension is None
            else [arrays[0].chunk(len(r.group), r.c.dimension)[k]]
        )

    return r.exchange(
        {d: of(r.inputs, k) for k, d in enumerate(r.group)},
        {d: of(r.outputs, k) for k, d in enumerate(r.group)},
    )


def _collective_permute(r: _Run) -> Finish:
    pairs = r.c.pairs(r.link.replicas, r.link.partitions)
    me = r.link.device
    sources = [s for s, t in pairs if t == me]
    if not sources:
        for o in r.outputs:
            o.zero_()
    return r.exchange({t: r.inputs for s, t in pairs if s == me}, dict.fromkeys(sources, r.outputs))


def _collective_broadcast(r: _Run) -> Finish:
    for i, o in zip(r.inputs, r.outputs, strict=True):
        o.copy_(i)
    return _waits(
        [dist.broadcast(_bytes(o), r.group[0], r.torch_group, async_op=True) for o in r.outputs]
    )


_RUN = {
    "all-reduce": _all_reduce,
    "reduce-scatter": _reduce_scatter,
    "all-gather": _all_gather,
    "all-to-all": _all_to_all,
    "collective-permute": _collective_permute,
    "collective-broadcast": _collective_broadcast,
}
