"""Cutting a step out of what is recorded: its graph, the leaves that die with it, and which outputs
take their memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch_hlo.device.memory import Buffer
from torch_hlo.hlo.ir import Ints, Pairs, Shape
from torch_hlo.lowering.core import Out

from ..record import Array, Binding, Number, Storage
from . import spmd
from .fingerprint import Graph, collect
from .launch import Launch


@dataclass(slots=True)
class Plan:
    """A step ready to be run: how its program is launched, the arrays and numbers it reads."""

    known: Launch
    leaves: Sequence[Array]
    numbers: Sequence[Number]
    where: spmd.Placement | None


@dataclass(slots=True)
class Known:
    """What a tape needs: where its leaves and numbers stand on it, and the programs by which of the
    leaves die."""

    leaves: list[int]
    numbers: list[int]
    programs: dict[Ints, Launch] = field(default_factory=dict)


def dying(leaves: Sequence[Array], heirs: Sequence[Storage] = ()) -> Ints:
    """Which arrays are the value of no live storage but these, which get other values."""
    given = set(map(id, heirs))
    dead = []
    for i, leaf in enumerate(leaves):
        for owner in leaf.owners:
            storage = owner()
            if storage is not None and storage.value is leaf and id(storage) not in given:
                break
        else:
            dead.append(i)
    return tuple(dead)


def cut(
    bindings: list[Binding], donate: bool, apart: bool = False
) -> tuple[Graph, list[int], Ints, Pairs]:
    """(the graph, which of its outputs each binding gets, leaves that die with the step, donations)
    of sorted bindings. `apart`: arrays on a mesh are read only."""
    distinct: dict[tuple[int, int], Out] = {}
    for _, _, _, out, _ in bindings:
        distinct.setdefault((out.node.serial, out.index), out)
    order = {value: place for place, value in enumerate(distinct)}
    places = [order[out.node.serial, out.index] for _, _, _, out, _ in bindings]
    graph = collect(list(distinct.values()))
    dead = dying(graph.leaves) if donate else ()
    if apart:
        dead = tuple(i for i in dead if type(graph.leaves[i].data) is Buffer)
    return (
        graph,
        places,
        dead,
        donations(graph, graph.leaves, dead, bindings, places),
    )


def donations(
    graph: Graph,
    leaves: Sequence[Array],
    dead: Sequence[int],
    bindings: list[Binding],
    places: list[int],
) -> Pairs:
    """(output, leaf) pairs: leaves that die with this step (`dead`) give their memory to an output
    of the same shape, rather to the one that overwrites the same storage. Part of the program's
    key."""
    if not dead:
        return ()
    heirs = {id(b[2]): place for b, place in zip(bindings, places)}
    shapes = [o.node.outs[o.index] for o in graph.outputs]
    free = dict.fromkeys(range(len(shapes)))
    aliases = []
    rest = []
    for i in dead:
        leaf = leaves[i]
        for owner in leaf.owners:
            place = heirs.get(id(owner()))
            if place in free and shapes[place] == leaf.shape:
                del free[place]
                aliases.append((place, i))
                break
        else:
            rest.append(i)
    by_shape: dict[Shape, list[int]] = {}
    for place in reversed(free):
        by_shape.setdefault(shapes[place], []).append(place)
    for i in rest:
        places_left = by_shape.get(leaves[i].shape)
        if places_left:
            aliases.append((places_left.pop(), i))
    return tuple(sorted(aliases))
