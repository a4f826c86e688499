"""What a step would cost on a machine that is not here: memory, operations, bytes and time per
device, for up to thousands of devices.

    mesh = Mesh((64, 16), ("data", "model"), check=False)
    model = abstract(GPT(...))     # tensors without memory; also of one built under "meta"
    plan = Plan(model, mesh, [megatron("model"), fsdp("data")])
    plan.mark()
    found = simulate(lambda: step(model, *plan.mark_batch(abstract(x), abstract(y))), H100)
    print(found.table())
    tactics = [data_parallel("data"), megatron("model")]
    print(compare(model, step, (x, y), mesh, tactics, H100))      # a row per tactic

The program is the one that would run: recorded, propagated, partitioned, fused, scheduled, with
memory assigned. Time is that of a model of the machine: a kernel takes what its operations or its
bytes need, whichever is more; a collective what a ring over its slowest link needs; those in flight
(`-start`, `-done`) run beside kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torch_hlo.compiler.cost import KINDS, Cost, cost, instruction_cost
from torch_hlo.compiler.pipeline import optimize
from torch_hlo.compiler.schedule.memory import assign
from torch_hlo.compiler.schedule.schedule import is_step, schedule
from torch_hlo.compiler.spmd.spmd_pipeline import spmd as partitioned
from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction, Module, Shape, Size
from torch_hlo.lazy.record import (
    Array,
    Storage,
    Watcher,
    fresh,
    meta as metas,
    pending_storages,
    session,
)
from torch_hlo.lazy.run import spmd
from torch_hlo.lazy.run.fingerprint import collect
from torch_hlo.lowering.core import Out

from .mesh import Mesh
from .tactics import Plan, Tactic


@frozen
class Link:
    """bandwidth: bytes per second that a device sends; latency: seconds of a message."""

    bandwidth: float
    latency: float = 5e-6


@frozen
class Machine:
    """flops: operations per second of one device in matrix products; memory: bytes; bandwidth:
    bytes per second to its memory. `links`: mesh axis -> Link, `link` for the other axes.
    `efficiency`: the part of `flops` that matrix products reach."""

    name: str
    flops: float
    memory: float
    bandwidth: float
    link: Link
    links: Mapping[str, Link] = field(default_factory=dict)
    efficiency: float = 0.6


# Data sheets: bf16 operations, HBM, NVLink or ICI in one direction.
H100 = Machine("H100 80GB", 989e12, 80e9, 3.35e12, Link(450e9))
A100 = Machine("A100 80GB", 312e12, 80e9, 2.0e12, Link(300e9))
TPU_V4 = Machine("TPU v4", 275e12, 32e9, 1.2e12, Link(100e9, 2e-6))


@dataclass
class Simulation:
    """Of one device and one step. memory: bytes at the peak, of which `resident` are arguments;
    seconds: kernels and the collectives that they do not hide."""

    machine: Machine
    devices: int
    cost: Cost
    resident: int
    memory: int
    compute: float
    communication: float
    seconds: float

    @property
    def fits(self) -> bool:
        return self.memory <= self.machine.memory

    def table(self) -> str:
        """The numbers, one per line."""
        return "\n".join(
            [
                f"{self.devices} x {self.machine.name}",
                f"memory per device     {_bytes(self.memory)} at the peak, {_bytes(self.resident)}"
                " of it arguments" + ("" if self.fits else ": DOES NOT FIT"),
                (
                    f"estimated step time   {self.seconds * 1e3:.3f} ms: kernels"
                    f" {self.compute * 1e3:.3f} ms, collectives {self.communication * 1e3:.3f} ms"
                ),
                self.cost.table(),
            ]
        )


# ---- tensors without memory


def abstract(x: Any) -> Any:
    """`x` on the hlo device without memory: a module (converted in place), a tensor, or tuples,
    lists and dicts of them."""
    if isinstance(x, nn.Module):
        with torch.no_grad():
            return x._apply(abstract)
    if isinstance(x, Tensor):
        meta = metas.contiguous(tuple(x.shape), x.dtype)
        return fresh(meta, Array(meta.hlo, spmd.Abstract(None)))
    if isinstance(x, dict):
        return {k: abstract(v) for k, v in x.items()}
    return type(x)(abstract(v) for v in x) if isinstance(x, (tuple, list)) else x


class _NoValues(Watcher):
    """The engine while a step is recorded for simulation: nothing may be evaluated."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            "simulate: the step needs a value (.item(), print, .cpu()); leave that out, nothing is"
            " computed here"
        )

    # whatever they are given
    materialize = sync = synchronize = _refuse  # type: ignore[assignment]

    def mark_step(self, wait: bool = False) -> None:
        """The step ends where the function does."""


def record(step: Callable[[], object]) -> Module:
    """The annotated program of what `step` does to hlo tensors. Afterwards tensors without memory
    have values without memory; what was done to others is still pending. Raises ValueError when
    nothing is recorded or sharded."""
    current = session.engine()
    current.mark_step()
    with session.use(_NoValues(current)):
        result = step()
    storages = [(s, s.value) for s in pending_storages() if isinstance(s.value, Out)]
    places: dict[tuple[int, int], int] = {}
    distinct: list[Out] = []
    pairs: list[tuple[Storage, int]] = []
    for s, value in storages:
        key = (id(value.node), value.index)
        if key not in places:
            places[key] = len(distinct)
            distinct.append(value)
        pairs.append((s, places[key]))
    if not distinct:
        raise ValueError("simulate: the step records nothing on the hlo device")
    graph = collect(distinct)
    where = spmd.placement(graph, spmd.wanted(pairs, len(distinct)))
    if where is None:
        raise ValueError(
            "simulate: none of the step's tensors is sharded; mark_sharding says over which mesh"
        )
    del result
    leaves = {id(leaf): i for i, leaf in enumerate(graph.leaves)}
    aliases: list[tuple[int, int]] = []
    # an argument whose storage has a new value gives its memory to that
    for s, place in pairs:
        for leaf in graph.leaves:
            if (
                leaf.shape == s.shape
                and not leaf.held()
                and any(o() is s for o in leaf.owners)
                and all(o != place for o, _ in aliases)
            ):
                aliases.append((place, leaves[id(leaf)]))
                break
    module = spmd.annotated(graph, where, tuple(aliases))
    if any(isinstance(leaf.data, spmd.Abstract) for leaf in graph.leaves):
        _bind(pairs, distinct)
    return module


def _bind(pairs: list[tuple[Storage, int]], distinct: list[Out]) -> None:
    shapes = [out.node.outs[out.index] for out in distinct]
    arrays = [Array(shape, spmd.Abstract(None)) for shape in shapes if shape is not None]
    for s, place in pairs:
        array = arrays[place]
        if s.sharding is not None:
            array.data = spmd.Abstract(s.sharding.closed())
            array.data.note(s.sharding)
        distinct[place].array = array
        s.bind(distinct[place], array)


# ---- what a program costs


def simulate(what: Callable[[], object] | Module | str, machine: Machine = H100) -> Simulation:
    """`what`: a function that records a step on hlo tensors, an HLO module, or its text; annotated,
    or the program of one device.

    Raises ValueError for a program without a mesh, and what propagation and partitioning raise.
    """
    if isinstance(what, str):
        from torch_hlo import parse_text

        what = parse_text(what)
    module = what if isinstance(what, Module) else record(what)
    if module.num_partitions == 1:
        if module.mesh is None:
            raise ValueError(
                "simulate: the program has no mesh; annotate it, or give the program of one device"
            )
        module = partitioned(module)
    total = cost(module)
    fused = optimize(module)
    order = schedule(fused.entry, fused.aliases)
    a = assign(fused.entry, order, fused.aliases)
    resident = sum(_nbytes(p.shape) for p in fused.entry.params)
    shared = {o for o, _ in fused.aliases}
    memory = (
        resident
        + _known(a.arena)
        + sum(_nbytes(r.shape) for i, r in enumerate(fused.entry.results) if i not in shared)
    )
    compute, communication, seconds = _time(fused, order, machine)
    return Simulation(
        machine,
        max(module.num_partitions, module.num_replicas),
        total,
        resident,
        memory,
        compute,
        communication,
        seconds,
    )


def _time(
    module: Module,
    order: Sequence[Instruction],
    machine: Machine,
) -> tuple[float, float, float]:
    """Seconds of kernels, of collectives, and of the step."""
    now = link_free = compute = communication = 0.0
    ends: dict[Instruction, float] = {}
    for x in order:
        if not is_step(x):
            continue
        if x.op.endswith("-done"):
            now = max(now, ends.get(x.operand, now))
            continue
        one = instruction_cost(x, module.num_partitions)
        if x.op.removesuffix("-start") in KINDS:
            seconds = _collective_time(x, one.bytes, module, machine)
            communication += seconds
            ends[x] = link_free = max(now, link_free) + seconds
            if not x.op.endswith("-start"):
                now = ends[x]
            continue
        moved = _nbytes(x.shape) + sum(_nbytes(o.shape) for o in x.operands)
        seconds = max(
            one.matrix_flops / (machine.flops * machine.efficiency),
            moved / machine.bandwidth,
        )
        if one.bytes:  # collectives inside a loop
            inside = one.bytes / machine.link.bandwidth
            communication += inside
            now += inside
        compute += seconds
        now += seconds
    return compute, communication, now


def _collective_time(x: Instruction, sent: float, module: Module, machine: Machine) -> float:
    group = next(iter(x.get("replica_groups") or ()), ()) or tuple(range(module.num_partitions))
    if x.op.startswith("collective-permute"):
        pairs = x["source_target_pairs"]
        group = pairs[0] if pairs else (0,)
    axes = set()
    if module.mesh is not None and len(group) > 1:
        first = module.mesh.coordinates(group[0])
        for device in group[1:]:
            axes |= {
                name for name, i in module.mesh.coordinates(device).items() if i != first[name]
            }
    link = min(
        (machine.links.get(name, machine.link) for name in axes),
        key=lambda k: k.bandwidth,
        default=machine.link,
    )
    hops = {"all-reduce": 2 * (len(group) - 1), "collective-permute": 1}.get(
        x.op.removesuffix("-start"), len(group) - 1
    )
    return sent / link.bandwidth + hops * link.latency


def _known(size: Size) -> int:
    """Raises ValueError for a program of symbolic sizes."""
    if not isinstance(size, int):
        raise ValueError(f"simulate: size {size} is not known; give every dimension a size")
    return size


def _nbytes(shape: Shape) -> int:
    return sum(_known(s.nbytes) for s in shape.arrays if s.dtype != "token")


# ---- comparing tactics


@dataclass
class Comparison:
    """`rows`: (name of the last tactic, Simulation) after none, one, two, … of the tactics."""

    rows: list[tuple[str, Simulation]]

    def __str__(self) -> str:
        kinds = [k for k in KINDS if any(s.cost.collectives[k] for _, s in self.rows)]
        head = f"{'tactic':30}{'memory':>11}{'GFLOP':>10}{'ms':>10}" + "".join(
            f"{k:>26}" for k in kinds
        )
        lines = [head]
        for name, s in self.rows:
            cells = "".join(
                f"{f'{s.cost.collectives[k]:.0f} x, {_bytes(s.cost.sent[k])}':>26}" for k in kinds
            )
            sizes = f"{_bytes(s.memory):>11}{s.cost.flops / 1e9:>10.3f}{s.seconds * 1e3:>10.3f}"
            lines.append(f"{name:30}{sizes}{cells}" + ("" if s.fits else "  does not fit"))
        return "\n".join(lines)


def compare(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batch: Sequence[Tensor],
    mesh: Mesh,
    tactics: Sequence[Tactic],
    machine: Machine = H100,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> Comparison:
    """Simulate a training step `loss(model, *batch).backward(); optimizer.step()` after none, the
    first, the first two, … of `tactics`.

    `model` may be on any device, meta too; it and the batch only give shapes.
    """
    names = ["replicated", *("+ " + getattr(t, "__name__", str(t)) for t in tactics)]
    return Comparison(
        [
            (name, simulate_training(model, loss, batch, mesh, tactics[:n], machine, optimizer))
            for n, name in enumerate(names)
        ]
    )


def simulate_training(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batch: Sequence[Tensor],
    mesh: Mesh,
    tactics: Sequence[Tactic],
    machine: Machine = H100,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> Simulation:
    """One row of `compare`: all of `tactics`, in a step whose optimizer has its states already."""
    mine = abstract(copy.deepcopy(model))
    plan = Plan(mine, mesh, tactics)
    plan.mark()
    made = optimizer(mine.parameters())
    plan.mark_optimizer(made)

    def step() -> None:
        loss(mine, *plan.mark_batch(*(abstract(t) for t in batch))).backward()
        made.step()
        made.zero_grad()

    record(step)  # makes the states
    return simulate(step, machine)


def _bytes(n: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"
