"""Segments of a captured call that need not wait for each other.

A call is cut where Python asks for a value. If it only compares it (`while residual.item() >
1e-6:`, `if token == stop:`, the check after a solve), what comes next does not depend on the answer
as long as that is the same, and a replay undoes a call in which it is not. So such segments become
one program, up to NODES operations, and programs that follow each other are launched before the
values between them are read.

    whole, = join([a, b], kept)       # b's inputs that a computes are values of one graph; what
                                      # only b read of a is no output any more
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from torch_hlo.lazy.run.fingerprint import Graph, collect
from torch_hlo.lazy.run.launch import Programs
from torch_hlo.lowering.core.graph import Node, Out

V = TypeVar("V")
NODES = 500  # compiling takes a millisecond per operation
# of what a segment overwrites: it is kept twice where the segment may have to be undone
BYTES = 1 << 20


def join(
    segments: Sequence, overwritten: Callable[[object], int], lasting: Collection[int]
) -> list:
    """The segments of which a replay consists, with `late` and `keeps` set. `overwritten(segment)`:
    bytes of what it gives new values. `lasting`: places that outlive the call."""
    found: list = []
    for i, s in enumerate(segments):
        s.early = overwritten(s) <= BYTES
        if (
            found
            and s.early
            and s.needs < found[-1].sources
            and not {*found[-1].read_at} & {*s.output_at}
            and len(found[-1].graph.nodes) + len(s.graph.nodes) <= NODES
        ):
            found[-1] = _joined(
                found[-1],
                s,
                {
                    *lasting,
                    *(at for after in segments[i + 1 :] for at in (*after.leaf_at, *after.read_at)),
                },
            )
        else:
            found.append(s)
    for i, s in enumerate(found):
        after = found[i + 1 :]
        s.late = bool(after) and not any({*s.read_at} & {*x.output_at} for x in after)
        s.keeps = bool(s.after or i and found[i - 1].late and s.early and s.checks) or any(
            x.checks or x.after for x in after
        )
    return found


def _joined(a, b, wanted: Collection[int]):
    """One segment that computes both. Places say which of a's outputs are b's inputs, and which
    others are `wanted` later."""
    copies = _copied(a, b)
    wanted = {*wanted, *a.read_at, *b.read_at}
    left = [
        (at, _of(out, copies))
        for at, out in zip(a.output_at, a.outs)
        if at in wanted and at not in b.output_at
    ]
    left += [(at, _of(out, copies)) for at, out in zip(b.output_at, b.outs) if at in wanted]
    outputs = {(id(out.node), out.index): out for _, out in left}
    order = sorted(outputs, key=lambda k: (outputs[k].node.serial, k[1]))
    whole = copy.copy(a)
    # without what only replaced values needed: as it is when it is recorded
    whole.graph = collect([outputs[k] for k in order])
    whole.outs, whole.output_at = [out for _, out in left], [at for at, _ in left]
    index = {k: i for i, k in enumerate(order)}
    whole.output_of = [index[id(out.node), out.index] for out in whole.outs]
    places = {
        id(x): (at, given)
        for s in (a, b)
        for x, at, given in zip(s.graph.leaves, s.leaf_at, s.given)
    }
    whole.leaf_at, whole.given = ([places[id(x)][i] for x in whole.graph.leaves] for i in (0, 1))
    whole.reads, whole.read_at = [*a.reads, *b.reads], [*a.read_at, *b.read_at]
    whole.ending = sorted({*a.ending, *b.ending} & {*whole.leaf_at} - {*whole.output_at})
    whole.after = [*a.after, *b.checks]
    position = {id(n): i for i, n in enumerate(whole.graph.numbers)}
    whole.random = _moved([(s.graph, s.random) for s in (a, b)], position)
    whole.varying = _moved([(s.graph, s.varying) for s in (a, b)], position)
    whole.held = (a, b)  # with their constants
    whole.programs = Programs()
    return whole


def _copied(a, b) -> dict[int, Node]:
    """Copies of both graphs' nodes, by the nodes' ids: b's take from a's what a computes."""
    out_of = {at: out for at, out in zip(a.output_at, a.outs)}
    computed = {id(x): out_of[at] for x, at in zip(b.graph.leaves, b.leaf_at) if at in out_of}
    copies: dict[int, Node] = {}
    for s, known in ((a, {}), (b, computed)):
        for n in s.graph.nodes:
            if id(n) in copies:  # of whose results a needed one, b another
                continue
            made = copies[id(n)] = copy.copy(n)
            made.args = tuple([_value(x, copies, known) for x in n.args])
            made.kwargs = {k: _value(x, copies, known) for k, x in n.kwargs.items()}
    return copies


def _of(out: Out, copies: dict[int, Node]) -> Out:
    return Out(copies[id(out.node)], out.index)


def _value(x: object, copies: dict[int, Node], known: dict[int, Out]) -> object:
    """What a copy has for an operand. `known`: what gives an array, by the array's id."""
    kind = type(x)
    if kind is Out and id(x.node) in copies:
        return _of(x, copies)
    if kind is list or kind is tuple:
        return kind([_value(v, copies, known) for v in x])
    array = x.array if kind is Out else x
    return _of(known[id(array)], copies) if id(array) in known else array


def _moved(found: list[tuple[Graph, dict[int, V]]], position: dict[int, int]) -> dict[int, V]:
    """What is known of some numbers of graphs, where the numbers are now."""
    return {
        position[at]: x
        for graph, known in found
        for i, x in known.items()
        if (at := id(graph.numbers[i])) in position
    }
