"""Sharding propagation: from the annotations a user made, a placement of every array of a program.

    annotated = propagate(module)          # every instruction has the attribute `sharding`; calls
                                           # are inlined
    print(explain(module))                 # the same as text, each array with the reason for each
                                           # of its sharded dimensions

What is given stays as it is: attributes `sharding` (of parameters, the root, any instruction),
`Sharding` custom calls, regions written per device between `SPMDFullToShardShape` and
`SPMDShardToFullShape`. Open dimensions and arrays without annotation are filled by propagation
along factor rules (propagate_factors.py), forward and backward until nothing changes: first
annotations of priority 0, then 1, …; within each first through instructions that only pass
shardings on (pointwise, transpose, reshape, …), then through all. Loops: a carried value has one
placement, which the values that enter and the values of the next round follow. Constants, and what
is computed from nothing else, get a copy for each placement that a user wants.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace as with_fields
from functools import cache
from itertools import chain
from typing import TypeAlias

from torch_hlo.hlo.ir import (
    OPCODES,
    Computation,
    Instruction,
    Instructions,
    Ints,
    Module,
    Replacements,
    Shape,
    carry_meta,
    inline,
    instr,
    replace,
)
from torch_hlo.hlo.sharding.factors import factors
from torch_hlo.hlo.sharding.sharding import Axis, Mesh, Sharding, complement, is_unreduced

from ..hlo_pass import hlo_pass
from .grid import ShardingTree
from .propagate_factors import ManualRule, Reason, Rule, State, clear, identity, transfer

Tree: TypeAlias = "int | tuple[Tree, ...]"  # a slot per array, nested as the shape is

# Opcodes that, of constants, make constants: cheaper to compute again than to move.
_CHEAP = frozenset(
    "constant iota broadcast reshape transpose slice pad concatenate reverse copy".split()
)
_CALLS = {"call": "to_apply", "fusion": "calls"}
_UNSPECIFIED = re.compile(r"unspecified_dims=\[([\d,\s]*)\]")


@dataclass(slots=True)
class _Slot:
    """One array to be placed."""

    shape: Shape
    state: State
    label: str
    given: Sharding | None = None
    edges: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Edge:
    """A rule between slots; `label` says which instruction it is of."""

    rule: Rule | ManualRule
    slots: Ints
    label: str


@dataclass(slots=True)
class _Scope:
    """A computation at one place of the program: slots of its instructions, of constants by use,
    and scopes of what its instructions call."""

    computation: Computation
    order: list[Instruction]
    values: dict[Instruction, Tree] = field(default_factory=dict)
    # (user, operand) -> slot of a constant
    uses: dict[tuple[Instruction, int], int] = field(default_factory=dict)
    manual: dict[Instruction, tuple[Axis, ...]] = field(default_factory=dict)
    inner: dict[Instruction, list[_Scope]] = field(default_factory=dict)
    constants: set[Instruction] = field(default_factory=set)


class _Graph:
    """All slots and edges of a program."""

    def __init__(self, module: Module) -> None:
        assert module.mesh is not None, module.name
        self.mesh = module.mesh
        self.slots: list[_Slot] = []
        self.edges: list[_Edge] = []
        self.rules: dict[tuple[object, ...], Rule] = {}
        self.why: dict[int, list[tuple[_Edge, Reason]]] = {}
        self.outputs: list[int] = []
        self.scope = self._visit(inlined(module.entry), None)
        self._connect_outputs(module)

    # Building

    def _slot(
        self,
        shape: Shape,
        label: str,
        given: Sharding | None = None,
        manual: tuple[Axis, ...] = (),
    ) -> int:
        if given is not None and given.maximal is not None:
            given = Sharding.replicate(self.mesh, shape.rank)  # one program runs on all devices
        state = State.free(shape.rank, manual) if given is None else State.given(given)
        self.slots.append(_Slot(shape, state, label, given))
        return len(self.slots) - 1

    def _tree(
        self,
        shape: Shape,
        label: str,
        given: ShardingTree = None,
        manual: tuple[Axis, ...] = (),
    ) -> Tree:
        if not shape.is_tuple:
            assert not isinstance(given, tuple), given
            return self._slot(shape, label, given, manual)
        given = given if isinstance(given, tuple) else (given,) * len(shape.elements)
        return tuple(
            self._tree(e, label, g, manual) for e, g in zip(shape.elements, given, strict=True)
        )

    def _edge(self, rule: Rule | ManualRule, slots: Ints, label: str) -> None:
        self.edges.append(_Edge(rule, slots, label))
        for s in set(slots):
            self.slots[s].edges.append(len(self.edges) - 1)

    def _flow(self, source: int, target: int, label: str) -> None:
        """A value goes from one slot to another, perhaps placed anew on the way."""
        shape = self.slots[target].shape
        if shape.rank and source != target:
            self._edge(identity(_sizes(shape)), (source, target), label)

    def _visit(self, c: Computation, args: list[Tree] | None) -> _Scope:
        scope = _Scope(c, c.instructions())
        for x in scope.order:
            if x.op == "parameter" and args is not None:
                scope.values[x] = args[x["index"]]
                scope.manual[x] = next(
                    (self.slots[s].state.manual for s in leaves(args[x["index"]])),
                    (),
                )
            else:
                self._instruction(scope, x)
        return scope

    def _instruction(self, scope: _Scope, x: Instruction) -> None:
        label = x.meta.name or x.op
        given = x.get("sharding")
        if given is None and _is_constant(x, scope.constants):
            scope.constants.add(x)
            return
        manual = next((m for o in x.operands if (m := scope.manual.get(o))), ())
        if x.get("custom_call_target") in _BOUNDARIES and given is not None:
            manual = given.manual
        scope.manual[x] = manual
        structural = _STRUCTURE.get(x.op)
        if structural is not None:
            tree = structural(self, scope, x)
            if given is not None and x.op != "while":
                outside = self._tree(x.shape, label, given, manual)
                for a, b in zip(leaves(tree), leaves(outside)):
                    self._flow(a, b, f"the annotation of {label}")
                tree = outside
            scope.values[x] = tree
            return
        tree = scope.values[x] = self._tree(x.shape, label, _with_open_dims(x, given), manual)
        operands = [s for i in range(len(x.operands)) for s in leaves(self._operand(scope, x, i))]
        if x.get("custom_call_target") in _BOUNDARIES:
            outer, inner = *operands, *leaves(tree)
            if x["custom_call_target"] == "SPMDShardToFullShape":
                outer, inner = inner, outer
            before = self.slots[outer].state.manual
            axes = tuple(
                a for a in self.slots[inner].state.manual if not any(a.overlaps(b) for b in before)
            )
            self._edge(ManualRule(axes), (outer, inner), label)
            return
        slots = (*operands, *leaves(tree))
        if sum(1 for s in slots if self.slots[s].shape.rank) > 1:
            self._edge(self._rule(x), slots, label)

    def _rule(self, x: Instruction) -> Rule:
        key = (
            x.op,
            x.shape,
            tuple([o.shape for o in x.operands]),
            tuple([p for p in x.attrs if p[0] not in _PLAIN]),
        )
        rule = self.rules.get(key)
        if rule is None:
            shapes = [s for o in x.operands for s in o.shape.arrays] + list(x.shape.arrays)
            rule = self.rules[key] = Rule.of(factors(x), tuple(map(_sizes, shapes)), x.op)
        return rule

    def _operand(self, scope: _Scope, x: Instruction, i: int) -> Tree:
        """The slots of an operand; those of a constant are for this use only."""
        o = x.operands[i]
        if o not in scope.constants:
            return scope.values[o]
        slot = self._slot(o.shape, o.meta.name or o.op, None, scope.manual.get(x, ()))
        scope.uses[x, i] = slot
        return slot

    def _while(self, scope: _Scope, x: Instruction) -> Tree:
        label = x.meta.name or x.op
        carried = self._tree(x.shape, f"the state of {label}", x.get("sharding"), scope.manual[x])
        entering = self._operand(scope, x, 0)
        body, condition = (
            self._visit(x["body"], [carried]),
            self._visit(x["condition"], [carried]),
        )
        scope.inner[x] = [body, condition]
        for a, b, c in zip(
            leaves(entering),
            leaves(self._root(body)),
            leaves(carried),
            strict=True,
        ):
            self._flow(a, c, f"the values that enter {label}")
            self._flow(b, c, f"the next round of {label}")
        return carried

    def _conditional(self, scope: _Scope, x: Instruction) -> Tree:
        label = x.meta.name or x.op
        result = self._tree(x.shape, label, None, scope.manual[x])
        self._operand(scope, x, 0)
        scopes = scope.inner[x] = []
        for i, branch in enumerate(x["branch_computations"]):
            scopes.append(self._visit(branch, [self._operand(scope, x, i + 1)]))
            for a, b in zip(leaves(self._root(scopes[-1])), leaves(result), strict=True):
                self._flow(a, b, f"branch {i} of {label}")
        return result

    def _root(self, scope: _Scope) -> Tree:
        root = scope.computation.root
        if root in scope.constants:
            slot = self._slot(root.shape, root.meta.name or root.op)
            return scope.uses.setdefault((root, -1), slot)
        return scope.values[root]

    def _connect_outputs(self, module: Module) -> None:
        """An output that overwrites a parameter should lie as the parameter does."""
        root = self._root(self.scope)
        self.outputs = list(leaves(root))
        whole = root if isinstance(root, tuple) else (root,)
        for output, param in module.aliases:
            for a, b in zip(
                leaves(whole[output]),
                leaves(self.scope.values[self.scope.computation.params[param]]),
            ):
                self._flow(a, b, f"output {output} overwrites parameter {param}")

    # Running

    def run(self) -> None:
        given = [(slot, slot.given) for slot in self.slots if slot.given is not None]
        priorities = sorted({dim.priority for _, s in given for dim in s.dims} | {0})
        for priority in priorities:
            for slot, sharding in given:
                shown = State.given(sharding, None if priority == priorities[-1] else priority)
                if priority != priorities[0]:  # dimensions that have been open keep what they got
                    shown = shown.with_dims(
                        tuple(
                            old if len(old) > len(new) else new
                            for old, new in zip(slot.state.dims, shown.dims)
                        )
                    )
                slot.state = shown
            for through_all in (False, True):
                self._settle(through_all)

    def _settle(self, through_all: bool) -> None:
        """Visit edges, in program order and back, until no state changes."""
        members = [i for i, e in enumerate(self.edges) if through_all or e.rule.passes]
        active = bytearray(len(self.edges))
        for i in members:
            active[i] = 1
        dirty = bytearray(active)
        while any(dirty):
            for i in chain(members, reversed(members)):
                if dirty[i]:
                    dirty[i] = 0
                    for j in self._apply(self.edges[i]):
                        dirty[j] = active[j]

    def _apply(self, edge: _Edge) -> list[int]:
        """Carry shardings along an edge; numbers of the edges of every slot that changed."""
        states = tuple([self.slots[s].state for s in edge.slots])
        new, reasons = transfer(edge.rule, states)
        for reason in reasons:
            self.why.setdefault(edge.slots[reason.target], []).append((edge, reason))
        changed = (
            [
                (self.slots[s], state)
                for s, old, state in zip(edge.slots, states, new)
                if state is not old
            ]
            if reasons
            else []
        )
        for slot, state in changed:
            slot.state = state
        return [j for slot, _ in changed for j in slot.edges]

    # The result

    def sharding(self, tree: Tree) -> ShardingTree:
        if isinstance(tree, tuple):
            return tuple([self.sharding(t) for t in tree])
        slot = self.slots[tree]
        return _sharding(slot.state, slot.given.mesh if slot.given else self.mesh)

    def rebuilt(self, scope: _Scope) -> Computation:
        """The computation with a `sharding` on every instruction."""
        done: Replacements = {}
        made: dict[tuple[Instruction, State], Instruction] = {}

        def constant(x: Instruction, state: State) -> Instruction:
            key = (x, state)
            if key not in made:
                operands: Instructions = ()
                if x.operands:
                    free = [State.free(o.rank, state.manual) for o in x.operands]
                    states, _ = transfer(self._rule(x), (*free, state))
                    operands = tuple(constant(o, s) for o, s in zip(x.operands, states))
                made[key] = _with_sharding(x, operands, _sharding(state, self.mesh), ())
            return made[key]

        def operand(x: Instruction, i: int) -> Instruction:
            slot = scope.uses.get((x, i))
            return (
                done[x.operands[i]]
                if slot is None
                else constant(x.operands[i], self.slots[slot].state)
            )

        for x in scope.order:
            if x in scope.constants:
                continue
            operands = tuple([operand(x, i) for i in range(len(x.operands))])
            inner = tuple([self.rebuilt(s) for s in scope.inner.get(x, ())])
            done[x] = _with_sharding(x, operands, self.sharding(scope.values[x]), inner)
            carry_meta(x, done[x])
        root = scope.computation.root
        if root in scope.constants:
            new_root = constant(root, self.slots[scope.uses[root, -1]].state)
        else:
            new_root = done[root]
        return Computation(
            scope.computation.name,
            tuple(done[p] for p in scope.computation.params),
            new_root,
        )


def _element(graph: _Graph, scope: _Scope, x: Instruction) -> Tree:
    whole = graph._operand(scope, x, 0)
    assert isinstance(whole, tuple), x
    index: int = x["index"]
    return whole[index]


def _alias(graph: _Graph, scope: _Scope, x: Instruction) -> Tree:
    return graph._operand(scope, x, 0)


_STRUCTURE = {
    "tuple": lambda g, scope, x: tuple(g._operand(scope, x, i) for i in range(len(x.operands))),
    "get-tuple-element": _element,
    "while": _Graph._while,
    "conditional": _Graph._conditional,
    "opt-barrier": _alias,
    "domain": _alias,
}
_BOUNDARIES = ("SPMDFullToShardShape", "SPMDShardToFullShape")
# no part of an instruction's rule
_PLAIN = ("sharding", "frontend_attributes", "backend_config", "serial")


def _with_open_dims(x: Instruction, given: ShardingTree) -> ShardingTree:
    """XLA writes the open dimensions of an annotation as
    `backend_config="unspecified_dims=[0]"`."""
    if x.op != "custom-call" or not isinstance(given, Sharding):
        return given
    found = _UNSPECIFIED.search(x.get("backend_config") or "")
    if found is None:
        return given
    is_open = {int(d) for d in found.group(1).split(",") if d.strip()}
    return given.with_dims(
        with_fields(dim, open=dim.open or d in is_open) for d, dim in enumerate(given.dims)
    )


def leaves(tree: Tree) -> Iterator[int]:
    if isinstance(tree, tuple):
        for t in tree:
            yield from leaves(t)
    else:
        yield tree


def _sizes(shape: Shape) -> Ints:
    """Extents; an unknown one counts as 1, so that propagation leaves it whole."""
    return tuple(n if type(n) is int else 1 for n in shape.dims)


@cache
def _sharding(state: State, mesh: Mesh) -> Sharding:
    return state.sharding(mesh)


def _is_constant(x: Instruction, known: set[Instruction]) -> bool:
    if x.op in ("constant", "iota"):
        return True
    if x.is_tuple or not x.operands or not (x.op in _CHEAP or "pointwise" in OPCODES[x.op].traits):
        return False
    return all(o in known for o in x.operands)


def _with_sharding(
    x: Instruction,
    operands: Instructions,
    sharding: ShardingTree,
    inner: tuple[Computation, ...],
) -> Instruction:
    attrs = dict(x.attrs)
    attrs["sharding"] = sharding
    if x.op == "while":
        attrs["body"], attrs["condition"] = inner
    elif x.op == "conditional":
        attrs["branch_computations"] = inner
    return instr(x.op, operands, x.shape, **attrs)


def inlined(c: Computation) -> Computation:
    """`c` without calls and fusions, in the bodies of its loops and branches too."""
    done: dict[Computation, Computation] = {}

    def instruction(x: Instruction, operands: Instructions) -> Instruction:
        if x.op in _CALLS:
            return inline(computation(x[_CALLS[x.op]]), operands)
        if (
            x.get("custom_call_target") == "Sharding"
            and not x.rank
            and not x.is_tuple
            and not any(is_unreduced(y.get("sharding")) for y in (x, operands[0]))
        ):
            # a number is everywhere; inside reducers such a call would be in the way
            return operands[0]
        attrs: dict[str, object] = {}
        for name, value in x.attrs:
            if isinstance(value, Computation):
                attrs[name] = computation(value)
            elif name == "branch_computations":
                attrs[name] = tuple(map(computation, value))
        if operands == x.operands and all(x[name] == value for name, value in attrs.items()):
            return x
        return replace(x, operands, x.shape, **attrs)

    def computation(c: Computation) -> Computation:
        if c not in done:
            values: Replacements = {}
            for x in c.instructions():
                values[x] = instruction(x, tuple([values[o] for o in x.operands]))
            done[c] = Computation(c.name, c.params, values[c.root])
        return done[c]

    return computation(c)


@hlo_pass
def propagate(module: Module) -> Module:
    """A placement for every array, from those that are given. Does nothing to a program without a
    mesh."""
    if module.mesh is None:
        return module
    graph = _propagated(module)
    entry = graph.rebuilt(graph.scope)
    return module if entry == module.entry else with_fields(module, entry=entry)


def _propagated(module: Module) -> _Graph:
    clear()
    _sharding.cache_clear()
    graph = _Graph(module)
    graph.run()
    return graph


def explain(module: Module) -> str:
    """One line per array of the program: its sharding, and why each sharded dimension is what it
    is."""
    graph = _propagated(module)
    lines = []
    for i, slot in enumerate(graph.slots):
        if not slot.shape.rank:
            continue
        sharding = _sharding(slot.state, graph.mesh)
        reasons = ["annotated"] if slot.given is not None else []
        for edge, reason in graph.why.get(i, ()):
            source = (
                graph.slots[edge.slots[reason.source]].label
                if not isinstance(edge.rule, ManualRule)
                else edge.label
            )
            reasons.append(f"dimension {reason.dim} as {source} through {edge.label}")
        if not reasons and sharding.is_replicated:
            reasons.append(
                "nothing says how to split it"
                if complement(graph.mesh, sharding.manual)
                else "per-device code"
            )
        lines.append(f"{slot.label} {slot.shape} {sharding}: {'; '.join(reasons)}")
    return "\n".join(lines)
