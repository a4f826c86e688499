"""Plans: the order of a computation's steps, and the memory of its arrays."""

from collections.abc import Sequence

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Computation, Instruction

from .memory import Assignment, assign
from .schedule import schedule


@frozen
class Plan:
    """What code is written from."""

    order: Sequence[Instruction]
    memory: Assignment


def plan(computation: Computation, aliases: Sequence[tuple[int, int]]) -> Plan:
    """The plan of a computation that a step calls, made when the step is emitted: only then are the
    places of its arguments known, and with them what may be overwritten. That of the entry is made
    by the last stages of the pipeline."""
    order = schedule(computation, aliases)
    return Plan(order, assign(computation, order, aliases))
