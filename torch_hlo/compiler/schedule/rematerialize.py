"""rematerialize: values are computed again instead of kept, while a program's working memory
exceeds a budget.

    a = fusion(x); … the largest working set …; y = fusion(a, g)
-> a = fusion(x); …; b = opt-barrier((x, g)); a' = fusion(get-tuple-element(b), index=0); y =
fusion(a', g)

Works on fused programs. At the moment of the largest working set, values that lie there only for
later readers are candidates; those that give the most bytes per second of repeated work are
computed again right before their first reader. The barrier makes the repetition wait for another
operand of that reader, so that it neither moves up nor becomes the first computation again (as
jax.checkpoint does). Then the steps are scheduled anew, until the peak fits or nothing helps. (XLA:
HloRematerialization; Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch_hlo import config
from torch_hlo.hlo.ir import (
    Computation,
    Instruction,
    Ints,
    Module,
    Replacements,
    build as b,
    carry_meta,
    fixed,
    instr,
    postorder,
    replace,
)

from ..cost import instruction_cost
from ..hlo_pass import hlo_pass
from .memory import assign
from .schedule import VIEWS, schedule

ROUNDS = 24
PATIENCE = 4  # rounds without a lower peak before it is taken as the lowest
SMALLEST = 4096  # bytes that are worth a step
CHAIN = 12  # steps that one value may repeat
HELD = 8  # an operand this many times smaller than the value is kept rather than repeated
BYTES, FLOPS = (
    15e9,
    150e9,
)  # per second, about: they weigh memory traffic against multiplications
_AGAIN = frozenset(("fusion", "dot", "convolution"))  # steps that may run twice

Leaf = tuple[Instruction, int]  # a step and the number of one of its results


@hlo_pass
def rematerialize(module: Module) -> Module:
    """Compute values again that do not fit in the budget of working memory."""
    budget = config.get("MEMORY_BUDGET") * (1 << 20)
    return within(module, int(budget)) if budget > 0 else module


def within(module: Module, budget: int) -> Module:
    """`module`, fused, with a working set of at most `budget` bytes, or, with a RuntimeWarning, as
    near as computing again leads. Symbolic programs stay as they are."""
    if module.symbols:
        _warn(f"{module.name} has symbolic sizes, and keeps all its values")
        return module
    best = module
    lowest = math.inf
    idle = 0
    for _ in range(ROUNDS):
        order = schedule(module.entry, module.aliases)
        peak = assign(module.entry, order, module.aliases).peak
        idle += 1
        if peak < lowest:
            best = module
            lowest = peak
            idle = 0
        if peak <= budget or idle >= PATIENCE:
            break
        root = _Round(module.entry, order).rewritten(min(peak - budget, peak // 4))
        if root is None:
            break
        module = module.with_root(root)
    if lowest > budget:
        _warn(
            f"{module.name} needs {lowest / 2**20:.1f} MiB of working memory at least, the budget"
            f" is {budget / 2**20:.1f}; use a smaller batch"
        )
    return best


def _warn(text: str) -> None:
    warnings.warn(f"TORCH_HLO_MEMORY_BUDGET: {text}", RuntimeWarning, stacklevel=3)


@dataclass(slots=True)
class _Life:
    """A leaf's bytes, the step that computes it (-1: there from the start), and the steps that read
    it."""

    nbytes: int
    start: int
    uses: list[int]
    kept: bool = False  # a result of the program: it has memory of its own


@dataclass(slots=True)
class _Choice:
    chain: list[Leaf]  # what is repeated, operands first; the last one is the value in question
    gain: int  # bytes less at the peak
    seconds: float  # of repeated work
    late: list[int]  # readers of the repetition
    trigger: Leaf

    @property
    def leaf(self) -> Leaf:
        return self.chain[-1]


class _Round:
    def __init__(self, computation: Computation, order: Sequence[Instruction]) -> None:
        self.computation = computation
        self.order = order
        self.time = {x: t for t, x in enumerate(order)}
        self.lives: dict[Leaf, _Life] = {}
        for t, x in enumerate(order):
            for o in x.operands:
                for leaf in leaves(o):
                    self._life(leaf).uses.append(t)
        for leaf in leaves(computation.root):
            self._life(leaf).kept = True
        self.top = self._peak_time()

    def _life(self, leaf: Leaf) -> _Life:
        if leaf not in self.lives:
            x, n = leaf
            shape = x.elements[n] if x.is_tuple else x.shape
            size = 0 if shape.is_tuple else shape.nbytes
            self.lives[leaf] = _Life(size if isinstance(size, int) else 0, self.time.get(x, -1), [])
        return self.lives[leaf]

    def _peak_time(self) -> int:
        change = [0] * (len(self.order) + 1)
        for life in self.lives.values():
            if life.start >= 0 and not life.kept:
                change[life.start] += life.nbytes
                change[max(life.uses, default=life.start) + 1] -= life.nbytes
        live = 0
        totals = []
        for c in change:
            live += c
            totals.append(live)
        return totals.index(max(totals))

    # -- choosing
    def rewritten(self, excess: int) -> Instruction | None:
        """The root of the computation with values computed again that together take about `excess`
        bytes at the peak; None: there are none."""
        found = [c for c in map(self._choice, self.lives) if c is not None]
        found.sort(key=lambda c: c.seconds / c.gain)
        chosen: list[_Choice] = []
        given: set[Leaf] = set()
        needed: set[Leaf] = set()
        for c in found:
            operands = {leaf for x, _ in c.chain for o in x.operands for leaf in leaves(o)}
            if excess <= 0:
                break
            # its own operands are computed again: next round
            if c.leaf in needed or operands & given:
                continue
            chosen.append(c)
            given.add(c.leaf)
            needed |= operands | {c.trigger}
            excess -= c.gain
        return self._rebuilt(chosen) if chosen else None

    def _choice(self, leaf: Leaf) -> _Choice | None:
        x = leaf[0]
        life = self.lives[leaf]
        if not _may_repeat(x) or life.kept or life.nbytes < SMALLEST or life.start >= self.top:
            return None
        late = sorted({t for t in life.uses if t > self.top})
        if not late or self.top in life.uses:
            return None
        chain, held = self._chain(leaf)
        trigger = self._trigger(x, late[0])
        if life.nbytes - held < SMALLEST or trigger is None:
            return None
        return _Choice(
            chain,
            life.nbytes - held,
            sum(map(_seconds, dict.fromkeys(y for y, _ in chain))),
            late,
            trigger,
        )

    def _chain(self, leaf: Leaf) -> tuple[list[Leaf], int]:
        """(what has to run again for a leaf, operands first; bytes of the operands that have to
        live through the peak for that)."""
        chain: list[Leaf] = []
        held: dict[Leaf, int] = {}
        large = self.lives[leaf].nbytes // HELD

        def add(leaf: Leaf) -> None:
            for other in dict.fromkeys(o for operand in leaf[0].operands for o in leaves(operand)):
                source = self.lives[other]
                if (
                    source.start < 0
                    or source.kept
                    or max(source.uses) >= self.top
                    or other in chain
                    or other in held
                ):
                    continue
                if source.nbytes > large and _may_repeat(other[0]) and len(chain) < CHAIN:
                    add(other)
                else:
                    held[other] = source.nbytes
            chain.append(leaf)

        add(leaf)
        return chain, sum(held.values())

    def _trigger(self, x: Instruction, reader: int) -> Leaf | None:
        """What the reader waits for anyway, and the repetition of `x` shall wait for: the last of
        its operands, computed after the peak."""
        others = [
            leaf for o in self.order[reader].operands for leaf in leaves(o) if leaf[0] is not x
        ]
        last = max(others, key=lambda leaf: self.lives[leaf].start, default=None)
        return last if last is not None and self.lives[last].start >= self.top else None

    # -- rewriting
    def _rebuilt(self, chosen: list[_Choice]) -> Instruction:
        first: dict[int, list[_Choice]] = {}  # by first reader
        readers: dict[int, set[Leaf]] = {}
        for c in chosen:
            first.setdefault(c.late[0], []).append(c)
            for t in c.late:
                readers.setdefault(t, set()).add(c.leaf)
        new: Replacements = {}
        again: dict[Leaf, Instruction] = {}
        for t, x in enumerate(self.order):
            for c in first.get(t, ()):
                made: dict[Leaf, Instruction] = {}
                for leaf in c.chain:
                    made[leaf] = self._repeated(leaf, c.trigger, new, made)
                again[c.leaf] = made[c.leaf]
            swapped = {leaf: again[leaf] for leaf in readers.get(t, ())}
            operands = tuple(self._mapped(o, new, swapped) for o in x.operands)
            if operands != x.operands:
                new[x] = replace(x, operands)
                carry_meta(x, new[x])
        return self._mapped(self.computation.root, new, {})

    def _repeated(
        self,
        leaf: Leaf,
        trigger: Leaf,
        new: Replacements,
        made: dict[Leaf, Instruction],
    ) -> Instruction:
        """`leaf` computed once more, on the repetitions `made` before, not before `trigger`."""
        x, n = leaf
        operands = [self._mapped(o, new, made) for o in x.operands]
        attrs = dict(x.attrs)
        shape = x.shape
        if shape.is_tuple:
            used, attrs["calls"] = _only(x["calls"], n)
            operands = [operands[i] for i in used]
            shape = attrs["calls"].root.shape
            inside = {y.op for y in attrs["calls"].instructions()}
            if "reduce" not in inside and not inside & {"dot", "convolution"}:
                attrs["kind"] = "loop"
        awaited = new.get(trigger[0], trigger[0])
        awaited = b.get_tuple_element(awaited, trigger[1]) if awaited.is_tuple else awaited
        operands[0] = b.get_tuple_element(b.opt_barrier(b.tuple_(operands[0], awaited)), 0)
        repeated = instr(x.op, operands, shape, **attrs)
        carry_meta(x, repeated)
        return repeated

    def _mapped(
        self,
        x: Instruction,
        new: Replacements,
        swapped: dict[Leaf, Instruction],
    ) -> Instruction:
        """Operand `x` on the new steps; the leaves in `swapped` are replaced."""
        if x.op == "get-tuple-element" and (x.operand, x["index"]) in swapped:
            return swapped[x.operand, x["index"]]
        if x.op not in VIEWS:
            return new.get(x, x) if x.is_tuple else swapped.get((x, 0), new.get(x, x))
        operands = tuple(self._mapped(o, new, swapped) for o in x.operands)
        return x if operands == x.operands else replace(x, operands)


def _may_repeat(x: Instruction) -> bool:
    return x.op in _AGAIN and x.get("kind") != "custom" and bool(x.operands)


def _seconds(x: Instruction) -> float:
    """Roughly what running `x` once more costs."""
    moved = sum(fixed(v.nbytes) for v in (*x.operands, x))
    return moved / BYTES + instruction_cost(x, 1).matrix_flops / FLOPS


def leaves(x: Instruction) -> list[Leaf]:
    """The results of steps, parameters and constants that an operand's memory is made of."""
    path: Ints = ()
    while x.op in VIEWS:
        if x.op == "get-tuple-element":
            path = (x["index"], *path)
        elif x.op == "tuple":
            if not path:
                return [leaf for o in x.operands for leaf in leaves(o)]
            x = x.operands[path[0]]
            path = path[1:]
            continue
        x = x.operand
    if path:
        return [(x, path[0])]
    return [(x, n) for n in range(len(x.elements))] if x.is_tuple else [(x, 0)]


def _only(c: Computation, n: int) -> tuple[list[int], Computation]:
    """Result `n` of a fused computation as a computation of its own, and the numbers of the
    parameters that it needs."""
    root = c.root.operands[n]
    inside = set(postorder((root,)))
    used = [i for i, p in enumerate(c.params) if p in inside]
    params = {
        c.params[i]: instr("parameter", (), c.params[i].shape, index=k) for k, i in enumerate(used)
    }
    new = dict(params)
    for x in postorder((root,), c.params):
        new[x] = replace(x, [new[o] for o in x.operands]) if x.operands else x
        carry_meta(x, new[x])
    return used, Computation(c.name, tuple(params.values()), new[root])
