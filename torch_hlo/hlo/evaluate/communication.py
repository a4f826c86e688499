"""The meaning of collectives: each goes to the communicator of its thread
(hlo/sharding/collective.py), and which devices a program is for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..ir import (
    OPCODES,
    Computation,
    Instruction,
    Ints,
    Module,
    Shape,
    called,
    numpy_dtype,
)
from ..sharding import collective
from ..sharding.collective import Collective
from .interpreter import EvaluateError, Value, meaning


def arrangement(module: Module, devices: int) -> tuple[int, int]:
    """(replicas, partitions) that `devices` are for a program: as its header says
    (`num_partitions`, `replica_count`); without a word in the header all are partitions if the
    program's collectives have channels, else replicas. Raises EvaluateError when the header is for
    another number."""
    stated = module.num_partitions * module.num_replicas
    if stated > 1:
        if devices != stated:
            raise EvaluateError(
                f"{module.name} is for {module.num_replicas} x {module.num_partitions} devices"
                f" (replicas x partitions), not for {devices}"
            )
        return module.num_replicas, module.num_partitions
    by_replica = any("replica" in Collective.of(x).ids for x in collectives(module.entry))
    return (devices, 1) if by_replica else (1, devices)


def devices_of(module: Module) -> int:
    """How many devices the program is for: as its header says, else as its collectives name; 1 when
    there are none."""
    stated = module.num_partitions * module.num_replicas
    if stated > 1:
        return stated
    found = [Collective.of(x) for x in collectives(module.entry)]
    return 1 + max((d for c in found for g in c.members for d in g), default=0)


def collectives(computation: Computation) -> list[Instruction]:
    """Instructions of the program that talk to other devices, those in called computations
    included; each start once, no done."""
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
    name
    for name, row in OPCODES.items()
    if "collective" in row.traits and not name.endswith(("-done", "-id"))
)


def _exchange(x: Instruction, values: Sequence[np.ndarray], shape: Shape) -> tuple[np.ndarray, ...]:
    shapes = shape.arrays
    outputs = tuple(np.empty(s.sizes, numpy_dtype(s.dtype)) for s in shapes)
    c = Collective.of(x)
    _check(x, c, [v.shape for v in values], [s.sizes for s in shapes])
    collective.current().exchange(c, [np.ascontiguousarray(v) for v in values], outputs)
    return outputs


def _check(
    x: Instruction,
    c: Collective,
    operands: list[Ints],
    results: list[Ints],
) -> None:
    """The result's sizes fit the group that this device is in."""
    link = collective.current()
    n = len(c.group(link.device, link.replicas, link.partitions))
    if c.op in ("all-gather", "reduce-scatter"):

        def scaled(dims: Ints, factor: int) -> Ints:
            return tuple(size * factor if i == c.dimension else size for i, size in enumerate(dims))

        whole, part = (results, operands) if c.op == "all-gather" else (operands, results)
        fits = [scaled(p, n) for p in part] == whole
    elif c.op == "all-to-all":
        fits = len(operands) == n if c.dimension is None else operands[0][c.dimension] % n == 0
    else:
        fits = True
    if not fits:
        raise EvaluateError(
            f"{x.op}({x.operand_shapes}) -> {x.shape} does not fit a group of {n}"
            f" device{'s' if n > 1 else ''}"
        )


@meaning(*(name for name in OPS if not name.endswith("-start")), "all-reduce-start")
def _collective(x: Instruction, *values: np.ndarray) -> Value:
    results = _exchange(x, values, x.shape)
    return results if x.is_tuple else results[0]


@meaning("all-gather-start", "collective-permute-start")
def _start(x: Instruction, *values: np.ndarray) -> Value:
    """(operands, results, contexts…)"""
    results = _exchange(x, values, x.elements[1])
    several = x.elements[1].is_tuple
    contexts = (np.zeros(s.sizes, numpy_dtype(s.dtype)) for s in x.elements[2:])
    return (
        values if several else values[0],
        results if several else results[0],
        *contexts,
    )


@meaning("all-gather-done", "collective-permute-done", "async-done")
def _second(x: Instruction, state: np.ndarray) -> Value:
    return state[1]


@meaning("replica-id")
def _replica_id(x: Instruction) -> Value:
    link = collective.current()
    return np.uint32(link.device // link.partitions)


@meaning("partition-id")
def _partition_id(x: Instruction) -> Value:
    link = collective.current()
    return np.uint32(link.device % link.partitions)
