"""The meaning of collectives, and programs on several devices.

    evaluate_spmd(module, [inputs of device 0, inputs of device 1, …]) -> [outputs of device 0, …]

Every device runs the program in a thread of its own; collectives are where the threads meet (rendezvous.py). Elsewhere, `evaluate` of a program
whose groups have one device only is all there is to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torch_hlo.hlo import collective
from torch_hlo.hlo.collective import Collective
from torch_hlo.hlo.evaluate_core import EvaluateError, meaning
from torch_hlo.hlo.ir import Computation, Instruction, Module, called
from torch_hlo.hlo.opcodes import OPCODES
from torch_hlo.hlo.rendezvous import Rendezvous
from torch_hlo.hlo.shape import numpy_dtype


def evaluate_spmd(
    module: Module, inputs: Sequence[Sequence], timeout: float | None = None
) -> list[list[np.ndarray]]:
    """Run a per-device program on as many devices as there are lists of inputs; the flat outputs of each, see `evaluate`.

    Raises CollectiveError, naming devices and collectives, when the devices do not run the same collectives in the same order, or one waits for
    more than `timeout` seconds; EvaluateError as `evaluate` does, with a note that names the device.
    """
    from torch_hlo.hlo.evaluate import evaluate

    if len(inputs) == 1:
        return [evaluate(module, inputs[0])]
    replicas, partitions = arrangement(module, len(inputs))
    return Rendezvous(module.name, replicas, partitions, timeout).run(
        lambda device: evaluate(module, inputs[device])
    )


def arrangement(module: Module, devices: int) -> tuple[int, int]:
    """(replicas, partitions) that `devices` are for a program: as its header says (`num_partitions`, `replica_count`); without a word in the header
    all are partitions if the program's collectives have channels, else replicas. Raises EvaluateError when the header is for another number."""
    stated = module.num_partitions * module.num_replicas
    if stated > 1:
        if devices != stated:
            raise EvaluateError(
                f"{module.name} is for {module.num_replicas} x {module.num_partitions} devices (replicas x partitions), not for {devices}"
            )
        return module.num_replicas, module.num_partitions
    by_replica = any("replica" in Collective.of(x).ids for x in collectives(module.entry))
    return (devices, 1) if by_replica else (1, devices)


def devices_of(module: Module) -> int:
    """How many devices the program is for: as its header says, else as its collectives name; 1 when there are none."""
    stated = module.num_partitions * module.num_replicas
    found = [Collective.of(x) for x in collectives(module.entry)]
    return (
        stated
        if stated > 1
        else 1 + max((d for c in found for g in c.members for d in g), default=0)
    )


def collectives(computation: Computation) -> list[Instruction]:
    """Instructions of the program that talk to other devices, those in called computations included; each start once, no done."""
    found: dict[Instruction, None] = {}
    seen = set()
    pending = [computation]
    while pending:
        current = pending.pop()
        if current not in seen:
            seen.add(current)
            for x in current.instructions():
                pending.extend(called(x))
                if x.op in OPS:
                    found[x] = None
    return list(found)


OPS = frozenset(
    name for name, row in OPCODES.items() if "collective" in row.traits and not name.endswith(("-done", "-id"))
)  # fmt: skip


def _exchange(x: Instruction, values: Sequence[np.ndarray], shape) -> tuple[np.ndarray, ...]:
    shapes = shape.elements if shape.is_tuple else (shape,)
    outputs = tuple(np.empty(s.dims, numpy_dtype(s.dtype)) for s in shapes)
    c = Collective.of(x)
    _check(x, c, [v.shape for v in values], [s.dims for s in shapes])
    collective.current().exchange(c, [np.ascontiguousarray(v) for v in values], outputs)
    return outputs


def _check(x: Instruction, c: Collective, operands: list[tuple], results: list[tuple]) -> None:
    """The result's sizes fit the group that this device is in."""
    link = collective.current()
    n = len(c.group(link.device, link.replicas, link.partitions))
    if c.op in ("all-gather", "reduce-scatter"):

        def scaled(dims: tuple, factor: int) -> tuple:
            return tuple(size * factor if i == c.dimension else size for i, size in enumerate(dims))

        whole, part = (results, operands) if c.op == "all-gather" else (operands, results)
        fits = [scaled(p, n) for p in part] == whole
    elif c.op == "all-to-all":
        fits = len(operands) == n if c.dimension is None else operands[0][c.dimension] % n == 0
    else:
        fits = True
    if not fits:
        shapes = ", ".join(str(o.shape) for o in x.operands)
        raise EvaluateError(
            f"{x.op}({shapes}) -> {x.shape} does not fit a group of {n} device{'s' if n > 1 else ''}"
        )


@meaning(*(name for name in OPS if not name.endswith("-start")), "all-reduce-start")
def _collective(x, *values):
    results = _exchange(x, values, x.shape)
    return results if x.shape.is_tuple else results[0]


@meaning("all-gather-start", "collective-permute-start")
def _start(x, *values):
    """(operands, results, contexts…)"""
    results = _exchange(x, values, x.shape.elements[1])
    several = x.shape.elements[1].is_tuple
    contexts = (np.zeros(s.dims, numpy_dtype(s.dtype)) for s in x.shape.elements[2:])
    return (values if several else values[0], results if several else results[0], *contexts)


@meaning("all-gather-done", "collective-permute-done")
def _second(x, state):
    return state[1]


@meaning("all-reduce-done")
def _all_reduce_done(x, state):
    return state


@meaning("replica-id")
def _replica_id(x):
    link = collective.current()
    return np.uint32(link.device // link.partitions)


@meaning("partition-id")
def _partition_id(x):
    link = collective.current()
    return np.uint32(link.device % link.partitions)
