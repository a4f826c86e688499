"""memory: where every array of a scheduled computation lives.

    a = assign(module.entry, schedule(module.entry, module.aliases), module.aliases)
    a.slots[x]      # Slot(base="arena", index=0, offset=4096, nbytes=512); tuples nest
    a.copies        # (source, target) slots to copy after the last step, in order
    a.arena         # bytes of the arena, an expression when sizes are symbolic
    print(a)        # the buffer report

Views (reshape, get-tuple-element, tuple, …) share their operand's slot, and so do the values that a
loop only reads. A step may write over an operand that dies with it when it reads that operand only
at the element it writes. An output is written where it belongs from the start whenever possible; an
output aliased to a parameter is computed in the parameter's buffer if nothing reads the old value
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import numpy as np

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    Computation,
    Instruction,
    Shape,
    Size,
    fixed,
    postorder,
    round_up,
)

from ..fusion.fusion_inplace import in_place
from ..thresholds import LARGE_SCRATCH
from .schedule import DONES, STARTS, VIEWS

ALIGNMENT = 64
_Bytes = TypeVar("_Bytes", int, Size)


@frozen
class Slot:
    """Memory of one array. base: arena | parameter | output | constant; `index`: which one (leaves
    of tuples counted)."""

    base: str
    index: int
    offset: Size
    nbytes: Size

    def __str__(self) -> str:
        return f"arena+{self.offset}" if self.base == "arena" else f"{self.base} {self.index}"


Slots: TypeAlias = "Slot | tuple[Slots, ...]"  # of a tuple, one for each element


@frozen
class BufferLine:
    """A line of the report: one buffer and the arrays that live in it, from step `start` to step
    `end`."""

    slot: Slot
    start: int
    end: int
    names: tuple[str, ...]


@frozen
class Assignment:
    """Result of `assign`; see the module's docstring. `lines` is the report's data."""

    slots: dict[Instruction, Slots]
    copies: tuple[tuple[Slot, Slot], ...]
    arena: Size
    lines: tuple[BufferLine, ...]
    peak: int  # largest sum of arena buffers alive at once: no packing can do better

    def __str__(self) -> str:
        head = (
            f"arena {self.arena} bytes, live peak {self.peak}, {len(self.lines)} buffers,"
            f" {len(self.copies)} final copies"
        )
        rows = [
            f"  {str(b.slot):>20}  {str(b.slot.nbytes):>12}  [{b.start:>4},{b.end:>4}] "
            f" {', '.join(b.names)}"
            for b in self.lines
        ]
        return "\n".join([head, *rows, *(f"  copy {s} -> {t}" for s, t in self.copies)])

    def largest(self, rows: int = 6) -> str:
        """The buffers of the arena that take most, a line each, for who has too little memory."""
        arena = [(b.slot.nbytes, b.names) for b in self.lines if b.slot.base == "arena"]
        found = [(n, names) for n, names in arena if isinstance(n, int)]
        found.sort(key=lambda row: -row[0])
        return "\n".join(
            f"  {n / 2**20:10.1f} MiB  {', '.join(names)[:150]}" for n, names in found[:rows]
        )


@dataclass(eq=False, slots=True)
class _Buffer:
    """Arrays that share memory one after the other. Steps are numbered; parameters start at -1,
    outputs end at `inf`."""

    nbytes: Size
    start: int
    end: int
    fixed: Slot | None = None  # a parameter, output or constant; None: in the arena
    arrays: list[Instruction] = field(default_factory=list)
    slot: Slot = field(init=False, repr=False)  # set when buffers are packed
    heir: _Buffer | None = None  # the buffer that this one became part of


# What holds a value: of a tuple, one for each element.
_Held: TypeAlias = "_Buffer | tuple[_Held, ...]"


def assign(
    computation: Computation,
    order: Sequence[Instruction],
    aliases: Sequence[tuple[int, int]] = (),
) -> Assignment:
    """Assign memory to the steps in `order` (see schedule.py). `aliases`: (output, parameter)
    pairs, leaves counted."""
    return _Assigner(computation, order, aliases).run()


class _Assigner:
    def __init__(
        self,
        computation: Computation,
        order: Sequence[Instruction],
        aliases: Sequence[tuple[int, int]],
    ) -> None:
        self.computation = computation
        self.order = order
        self.target = dict(aliases)  # output leaf -> parameter leaf
        self.time = {x: t for t, x in enumerate(order)}
        self.end = len(order)
        self.held: dict[Instruction, _Held] = {}  # instruction -> nested tuples of _Buffer
        self.buffers: list[_Buffer] = []
        self.parameters: list[_Buffer] = []
        self.copies: list[tuple[_Buffer, Slot]] = []

    def run(self) -> Assignment:
        self._make_buffers()
        self._place_outputs()
        self._reuse_operands()
        arena, peak = self._pack()
        slots = {x: _slots(h) for x, h in self.held.items()}
        copies, arena = self._final_copies(arena)
        return Assignment(slots, copies, arena, tuple(self._report()), peak)

    # -- live ranges
    def _make_buffers(self) -> None:
        self._hold_parameters()
        constants = 0
        for x in postorder((self.computation.root, *self.order)):
            if x in self.held:
                continue
            if x.op == "constant":
                slot = Slot("constant", constants, 0, x.nbytes)
                self.held[x] = _Buffer(x.nbytes, -1, self.end, slot, [x])
                constants += 1
            else:
                self.held[x] = self._held_by(x)
        for t, x in enumerate(self.order):
            # What a collective reads and writes is its own until it is done.
            for o in (
                *x.operands,
                *(v for s in x.operands if x.op in DONES for v in s.operands),
            ):
                for b in _leaves(self.held[o]):
                    b.end = max(b.end, t)

    def _hold_parameters(self) -> None:
        leaf = 0
        for p in self.computation.params:

            def parameter(shape: Shape) -> _Buffer:
                nonlocal leaf
                made = _Buffer(shape.nbytes, -1, -1, Slot("parameter", leaf, 0, shape.nbytes))
                leaf += 1
                self.parameters.append(made)
                return made

            self.held[p] = self._new(p.shape, parameter, p)

    def _held_by(self, x: Instruction) -> _Held:
        """What holds the results of a step or a view."""
        if x.op in VIEWS or x.op in DONES:
            return self._view(x)
        t = self.time[x]

        def own(shape: Shape) -> _Held:
            return self._new(shape, lambda s: _Buffer(s.nbytes, t, t), x)

        # (operands, results, contexts…): the operands stay where they are
        if x.op in STARTS and x.op != "all-reduce-start":
            given = tuple(self.held[o] for o in x.operands)
            rest = map(own, x.elements[1:])
            return (given if x.elements[0].is_tuple else given[0], *rest)
        if x.op == "while" and x["body"].root.op == "tuple":
            shared = self._shared(x)
            return tuple(shared[i] if i in shared else own(e) for i, e in enumerate(x.elements))
        return own(x.shape)

    def _shared(self, x: Instruction) -> dict[int, _Held]:
        """Elements of a loop's state that its body hands on as they are: index -> what holds the
        initial value."""
        body = x["body"]
        given = _elements(self.held[x.operand])
        return {
            i: given[i]
            for i, y in enumerate(body.root.operands)
            if y.op == "get-tuple-element" and y.operands == body.params and y["index"] == i
        }

    def _new(self, shape: Shape, make: Callable[[Shape], _Buffer], x: Instruction) -> _Held:
        if shape.is_tuple:
            return tuple(self._new(e, make, x) for e in shape.elements)
        made = make(shape)
        made.arrays.append(x)
        self.buffers.append(made)
        return made

    def _view(self, x: Instruction) -> _Held:
        if x.op == "tuple":
            return tuple(self.held[o] for o in x.operands)
        if x.op == "get-tuple-element":
            index: int = x["index"]
            return _elements(self.held[x.operand])[index]
        held = self.held[x.operand]
        return _elements(held)[1] if x.op in DONES and x.op != "all-reduce-done" else held

    # -- outputs
    def _place_outputs(self) -> None:
        leaves = _leaves(self.held[self.computation.root])
        for b in leaves:
            if b.fixed is not None:
                b.end = self.end  # a parameter or constant that is returned: read by a final copy
        for o, b in enumerate(leaves):
            p = self.target.get(o)
            slot = (
                Slot("output", o, 0, b.nbytes) if p is None else Slot("parameter", p, 0, b.nbytes)
            )
            if b.fixed is None and (p is None or self._may_overwrite(b, self.parameters[p])):
                b.fixed = slot
            elif b.fixed != slot:
                self.copies.append((b, slot))
            b.end = self.end

    def _may_overwrite(self, b: _Buffer, parameter: _Buffer) -> bool:
        """True when the step that writes `b` may write it into the parameter's memory."""
        if parameter.end > b.start or parameter.nbytes != b.nbytes:
            return False
        return parameter.end < b.start or self._reads_only_in_place(
            self.order[b.start], parameter, b
        )

    # -- writing over an operand
    def _reuse_operands(self) -> None:
        """A result takes the memory of an operand that dies with its step."""
        for t, x in enumerate(self.order):
            results = [b for b in _leaves(self.held[x]) if b.start == t]
            if not any(b.fixed is None or b.fixed.base == "output" for b in results):
                continue
            dying = [
                b
                for b in dict.fromkeys(_root(b) for o in x.operands for b in _leaves(self.held[o]))
                if b.fixed is None and b.end == t and b.start < t
            ]
            for b in results:
                if b.fixed is not None and b.fixed.base != "output":
                    continue
                for d in dying:
                    if d.nbytes == b.nbytes and self._reads_only_in_place(x, d, b):
                        self._unite(d, b)
                        dying.remove(d)
                        break

    def _unite(self, old: _Buffer, new: _Buffer) -> None:
        new.start = old.start
        new.arrays = old.arrays + new.arrays
        old.heir = new

    def _reads_only_in_place(self, x: Instruction, operand: _Buffer, result: _Buffer) -> bool:
        """True when `x` reads `operand` only at the element of `result` that it then writes."""
        numbers = [
            k
            for k, o in enumerate(x.operands)
            if any(_root(b) is operand for b in _leaves(self.held[o]))
        ]
        leaf = next(j for j, b in enumerate(_leaves(self.held[x])) if b is result)
        if x.op == "fusion":
            return all((k, leaf) in in_place(x["calls"], x["kind"]) for k in numbers)
        if x.op in ("dynamic-update-slice", "scatter"):
            return numbers == [leaf]
        if x.op == "while":
            return (
                numbers == [0]
                and [_root(b) for b in _leaves(self.held[x.operand])].count(operand) == 1
                and _root(_leaves(self.held[x.operand])[leaf]) is operand
            )
        return False

    # -- packing
    def _pack(self) -> tuple[Size, int]:
        """Offsets of the arena's buffers: large ones first, each in the smallest gap that is free
        during its whole life."""
        for h in self.held.values():
            for b in _leaves(h):
                if b.fixed is not None:
                    b.slot = b.fixed
        self.buffers = [b for b in self.buffers if b.heir is None]
        mine = [b for b in self.buffers if b.fixed is None]
        static = [b for b in mine if isinstance(b.nbytes, int)]
        places, top = self._offsets(static)
        # among the arrays where that takes hardly more; else behind them, where emitters put it
        if scratch := self._scratch():
            among, end = self._offsets([*static, *scratch])
            if end <= top + top // 32:
                places = among
                top = end
        for b in static:
            b.slot = Slot("arena", 0, places[b], b.nbytes)
        arena = self._pack_symbolic([b for b in mine if not isinstance(b.nbytes, int)], top)
        return arena, self._peak(static)

    @staticmethod
    def _offsets(buffers: Sequence[_Buffer]) -> tuple[dict[_Buffer, int], int]:
        """Where buffers of known size start, and where the last one ends."""
        order = sorted(buffers, key=lambda b: (-fixed(b.nbytes), b.start))
        n = len(order)
        starts, ends, lows, highs = (np.zeros(n, np.int64) for _ in range(4))
        places = {}
        top = 0
        for i, b in enumerate(order):
            size = _align(fixed(b.nbytes))
            clash = np.nonzero(
                (starts[:i] <= b.end) & (ends[:i] >= b.start) & (highs[:i] > lows[:i])
            )[0]
            gaps = []  # those that are large enough: size, start
            at = 0
            for k in clash[np.argsort(lows[clash], kind="stable")]:
                gap = int(lows[k]) - at
                if gap >= size:
                    gaps.append((gap, at))
                at = max(at, int(highs[k]))
            offset = min(gaps)[1] if gaps else at
            starts[i] = b.start
            ends[i] = b.end
            lows[i] = offset
            highs[i] = offset + size
            places[b] = offset
            top = max(top, offset + size)
        return places, top

    def _scratch(self) -> list[_Buffer]:
        """What products keep their sums in for what follows them in a fusion, where the first
        result lies over an operand."""
        found = []
        for t, x in enumerate(self.order):
            if x.op != "fusion" or x.get("kind") != "output":
                continue
            result = _root(_leaves(self.held[x])[0])
            operands = [_root(b) for o in x.operands for b in _leaves(self.held[o])]
            if any(
                b is result or b.fixed is not None and b.fixed == result.fixed for b in operands
            ):
                sizes = [
                    y.size * max(y.itemsize, 4) for y in x["calls"].instructions() if y.op == "dot"
                ]
                found += [
                    _Buffer(n, t, t) for n in sizes if isinstance(n, int) and n >= LARGE_SCRATCH
                ]
        return found

    @staticmethod
    def _pack_symbolic(buffers: list[_Buffer], top: Size) -> Size:
        """Buffers of equal symbolic size take turns in the same places."""
        places: dict[Size, list[_Buffer]] = {}  # size -> the last buffer of each place
        for b in sorted(buffers, key=lambda b: b.start):
            last = places.setdefault(b.nbytes, [])
            for k, old in enumerate(last):
                if old.end < b.start:
                    b.slot, last[k] = old.slot, b
                    break
            else:
                b.slot = Slot("arena", 0, top, b.nbytes)
                last.append(b)
                top += _align(b.nbytes)
        return top

    def _peak(self, buffers: list[_Buffer]) -> int:
        change = [0] * (self.end + 2)
        for b in buffers:
            size = _align(fixed(b.nbytes))
            change[b.start] += size
            change[min(b.end, self.end) + 1] -= size
        live = peak = 0
        for c in change:
            live += c
            peak = max(peak, live)
        return peak

    # -- the end
    def _final_copies(self, arena: Size) -> tuple[tuple[tuple[Slot, Slot], ...], Size]:
        """Copies ordered so that nothing is overwritten before it is read; a cycle goes through the
        arena."""
        waiting = [(_root(b).slot, target) for b, target in self.copies]
        waiting = [(s, t) for s, t in waiting if s != t]
        done: list[tuple[Slot, Slot]] = []
        while waiting:
            for i, (_, target) in enumerate(waiting):
                if not any(_same_memory(s, target) for j, (s, _) in enumerate(waiting) if j != i):
                    done.append(waiting.pop(i))
                    break
            else:
                source, target = waiting[0]
                spare = Slot("arena", 0, arena, source.nbytes)
                arena += _align(source.nbytes)
                done.append((source, spare))
                waiting = [(spare if s == source else s, t) for s, t in waiting]
        return tuple(done), arena

    def _report(self) -> Iterator[BufferLine]:
        for b in sorted(self.buffers, key=lambda b: (b.start, b.slot.base, b.slot.index)):
            yield BufferLine(b.slot, b.start, b.end, tuple(_name(x) for x in b.arrays))


def _align(nbytes: _Bytes) -> _Bytes:
    return round_up(nbytes, ALIGNMENT)


def _same_memory(a: Slot, b: Slot) -> bool:
    return a.base == b.base and a.index == b.index and (a.base != "arena" or a.offset == b.offset)


def _root(b: _Buffer) -> _Buffer:
    while b.heir is not None:
        b = b.heir
    return b


def _leaves(held: _Held) -> Sequence[_Buffer]:
    return [b for h in held for b in _leaves(h)] if isinstance(held, tuple) else (held,)


def _elements(held: _Held) -> tuple[_Held, ...]:
    assert isinstance(held, tuple)
    return held


def _slots(held: _Held) -> Slots:
    return tuple(map(_slots, held)) if isinstance(held, tuple) else _root(held).slot


def _name(x: Instruction) -> str:
    return x.meta.name or f"{x.op} {x.shape}"
