"""Computations as native functions `void f(ptr block)`: the entry, and what control flow calls.

The order of the steps and the memory of every array come from the passes `schedule` and `memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from torch_hlo.hlo.ir import Computation, Instruction, Ints, fixed, round_up

from ..schedule import memory
from ..schedule.memory import Slot, Slots
from ..schedule.plan import Plan, plan
from ..thresholds import STEPS_PER_FUNCTION
from .batch import batch, groups
from .block import Place, Places, leaves
from .program import Program, StepProfile


def emit_entry(program: Program, planned: Plan) -> str:
    """Emit the module's entry computation as planned; returns the buffer report."""
    module = program.module
    arguments = [program.parameter_place(i) for i in range(len(module.entry.params))]
    results = [program.output_place(i) for i in range(program.words - program.first_output)]
    order = planned.order
    assignment = planned.memory
    bound = _Entry(program, order, assignment, arguments, results)
    if program.profile is not None:
        program.profile.start(program, order)
    parts: list[list[list[Instruction]]] = [[]]
    for group in groups(program, order, bound):
        if sum(map(len, parts[-1])) >= STEPS_PER_FUNCTION:
            parts.append([])
        parts[-1].append(group)
    names = []
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        names.append(
            _write(
                program,
                f"entry.part{number}",
                part,
                bound,
                assignment.copies if last else (),
                program.profile,
            )
        )
    program.exposed = _exposed(program, order, assignment)
    with program.block_function("entry") as f:
        program.emit_packings()
        for name in names:
            program.call(name, ["ptr %block"])
            if program.calling and name != names[-1]:
                program.return_if_failed()
    program.plan_function("entry", f.text())
    program.largest = assignment.largest()
    return str(assignment)


def _exposed(program: Program, order: Sequence[Instruction], assignment: memory.Assignment) -> Ints:
    """Aliased parameters that are overwritten before the last call of the host, or by the step that
    makes it: when it fails, they are lost."""
    last = max((t for t, x in enumerate(order) if x in program.calling), default=-1)
    written = {
        s.index
        for x in order[: last + 1]
        for s in leaves(assignment.slots[x])
        if s.base == "parameter"
    }
    return tuple(sorted(written.intersection(p for _, p in program.module.aliases)))


def emit_computation(
    program: Program,
    computation: Computation,
    arguments: Sequence[Places],
    result: Places | None = None,
) -> str:
    """Emit a called computation (a loop body, a branch) as a function `void f(ptr block)` and
    return its name; call it with `program.call(f, ["ptr %block"])`. `arguments`: the Places (tuples
    of Places for tuples) of its parameters; the root's value is left in `result` (same form). Its
    own buffers live in the arena until the calling step ends.

    `result` may be the same memory as `arguments`: what would be overwritten too early goes through
    a copy."""
    given = [p for a in arguments for p in leaves(a)]
    wanted = (
        list(leaves(result))
        if result is not None
        else list(leaves(program.allocate_shape(computation.root.shape)))
    )
    where = {(p.word, p.offset): i for i, p in enumerate(given)}
    aliases = [
        (o, where[p.word, p.offset]) for o, p in enumerate(wanted) if (p.word, p.offset) in where
    ]
    made = plan(computation, aliases)
    bound = _Binding(program, made.memory, given, wanted)
    name = f"{computation.name or 'computation'}.{program.number()}"
    profile = program.profile if program.profile is not None and program.profile.nested else None
    steps = groups(program, made.order, bound)
    return _write(program, name, steps, bound, made.memory.copies, profile)


class _Binding(dict[Instruction, Places]):
    """Places of instructions, made from their slots when asked for."""

    def __init__(
        self,
        program: Program,
        assignment: memory.Assignment,
        arguments: Sequence[Place],
        results: Sequence[Place],
    ) -> None:
        super().__init__()
        self.program = program
        self.slots = assignment.slots
        self.bases: dict[str, Sequence[Place]] = {"parameter": arguments, "output": results}
        self.arena = program.reserve(assignment.arena)
        self.literals = {s.index: x["literal"] for x, s in self.slots.items() if x.op == "constant"}

    def __missing__(self, x: Instruction) -> Places:
        found = self[x] = self.place(self.slots[x])
        return found

    def get(self, x: Instruction, default: Any = None) -> Any:
        return self[x] if x in self or x in self.slots else default

    def place(self, slots: Slots) -> Places:
        if isinstance(slots, tuple):
            return tuple(self.place(s) for s in slots)
        if slots.base == "arena":
            return Place(self.arena.word, self.arena.offset + slots.offset, slots.nbytes)
        if slots.base == "constant":
            return self.program.constant(self.literals[slots.index])
        return self.bases[slots.base][slots.index]


class _Entry(_Binding):
    """The entry's, which knows where in the arena no array lives during a step."""

    def __init__(
        self,
        program: Program,
        order: Sequence[Instruction],
        assignment: memory.Assignment,
        arguments: Sequence[Place],
        results: Sequence[Place],
    ) -> None:
        super().__init__(program, assignment, arguments, results)
        self._time = {x: t for t, x in enumerate(order)}
        self._known = isinstance(assignment.arena, int) and not program.target.overlaps_steps
        lines = [b for b in assignment.lines if b.slot.base == "arena"] if self._known else []
        self._lives = np.array(
            [(b.start, b.end, b.slot.offset, b.slot.offset + b.slot.nbytes) for b in lines],
            np.int64,
        ).reshape(-1, 4)

    def gaps(self, x: Instruction) -> list[tuple[int, int]]:
        """(from, to) of the arena's bytes that no array has during the step `x`, in order."""
        t = self._time.get(x)
        if not self._known or t is None:
            return []
        starts, ends, lows, highs = self._lives.T
        live = (starts <= t) & (ends >= t)
        offset = fixed(self.arena.offset)
        nbytes = fixed(self.arena.nbytes)
        found: list[tuple[int, int]] = []
        at = offset
        for low, high in sorted(zip(lows[live].tolist(), highs[live].tolist(), strict=True)):
            low += offset
            high = round_up(high, memory.ALIGNMENT) + offset
            if low > at:
                found.append((at, low))
            at = max(at, high)
        end = offset + nbytes
        return [*found, (at, end)] if end > at else found


def _write(
    program: Program,
    name: str,
    steps: Sequence[Sequence[Instruction]],
    bound: _Binding,
    copies: Sequence[tuple[Slot, Slot]],
    profile: StepProfile | None = None,
) -> str:
    with program.block_function(name, bound) as f:
        for group in steps:
            calls = len(program.host_calls)
            with (
                batch(program, group)
                if len(group) > 1
                else profile.step(group[0])
                if profile is not None
                else nullcontext()
            ):
                for x in group:
                    program.step(x)
            if len(program.host_calls) > calls:
                program.calling.add(group[0])
                program.return_if_failed()
        for source, target in copies:
            to = bound.place(target)
            origin = bound.place(source)
            assert isinstance(to, Place) and isinstance(origin, Place)
            program.copy(to, origin)
    return program.plan_function(name, f.text())
