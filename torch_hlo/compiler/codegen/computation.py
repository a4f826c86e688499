"""Computations as native functions `void f(ptr block)`: the entry, and what control flow calls.

The order of the steps and the memory of every array come from the passes `schedule` and `memory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import numpy as np

from torch_hlo.compiler.codegen.batch import batch, groups
from torch_hlo.compiler.codegen.program import STEPS_PER_FUNCTION, Place, Program
from torch_hlo.compiler.passes import memory
from torch_hlo.compiler.passes.memory import Slot
from torch_hlo.compiler.passes.schedule import schedule
from torch_hlo.hlo.ir import Computation, Instruction


def leaves(places) -> Iterator[Place]:
    """The Places (or slots) of a nested tuple, in order."""
    if isinstance(places, tuple):
        for p in places:
            yield from leaves(p)
    else:
        yield places


def emit_entry(program: Program) -> str:
    """Emit the module's entry computation; returns the buffer report."""
    module = program.module
    arguments = [program.parameter_place(i) for i in range(len(module.entry.params))]
    results = [program.output_place(i) for i in range(program.words - program.first_output)]
    order = schedule(module.entry, module.aliases)
    assignment = memory.assign(module.entry, order, module.aliases)
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


def _exposed(
    program: Program, order: Sequence[Instruction], assignment: memory.Assignment
) -> tuple[int, ...]:
    """Aliased parameters that are overwritten before the last call of the host, or by the step that makes it: when it fails, they are lost."""
    last = max((t for t, x in enumerate(order) if x in program.calling), default=-1)
    written = {
        s.index
        for x in order[: last + 1]
        for s in leaves(assignment.slots[x])
        if s.base == "parameter"
    }
    return tuple(sorted(written.intersection(p for _, p in program.module.aliases)))


def emit_computation(
    program: Program, computation: Computation, arguments: Sequence, result=None
) -> str:
    """See Program.computation."""
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
    order = schedule(computation, aliases)
    assignment = memory.assign(computation, order, aliases)
    bound = _Binding(program, assignment, given, wanted)
    name = f"{computation.name or 'computation'}.{program.number()}"
    profile = program.profile if program.profile is not None and program.profile.nested else None
    return _write(program, name, groups(program, order, bound), bound, assignment.copies, profile)


class _Binding(dict):
    """Places of instructions, made from their slots when asked for."""

    def __init__(
        self,
        program: Program,
        assignment: memory.Assignment,
        arguments: Sequence[Place],
        results: Sequence[Place],
    ) -> None:
        super().__init__()
        self.program, self.slots = program, assignment.slots
        self.bases = {"parameter": arguments, "output": results}
        self.arena = program.reserve(assignment.arena)
        self.literals = {s.index: x["literal"] for x, s in self.slots.items() if x.op == "constant"}

    def get(self, x: Instruction, default=None):
        found = super().get(x)
        if found is None and x in self.slots:
            found = self[x] = self.place(self.slots[x])
        return default if found is None else found

    def place(self, slots):
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
        self._known = (
            isinstance(assignment.arena, int) and not program.target.grid
        )  # a GPU runs several steps at once
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
        found, at = [], self.arena.offset
        for low, high in sorted(zip(lows[live].tolist(), highs[live].tolist(), strict=True)):
            low, high = (
                low + self.arena.offset,
                -(-high // memory.ALIGNMENT) * memory.ALIGNMENT + self.arena.offset,
            )
            if low > at:
                found.append((at, low))
            at = max(at, high)
        end = self.arena.offset + self.arena.nbytes
        return [*found, (at, end)] if end > at else found


def _write(
    program: Program,
    name: str,
    steps: Sequence[Sequence[Instruction]],
    bound: _Binding,
    copies: Sequence[tuple[Slot, Slot]],
    profile=None,
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
            program.copy(bound.place(target), bound.place(source))
    return program.plan_function(name, f.text())
