"""A recorded graph of forward and backward -> a program for each, and what the first keeps for the
second.

    forward, saved, backward = cut(joint)

Every value that the backward pass needs is kept, or computed again from kept ones: the choice with
the fewest bytes is a minimal cut between what has to be there (inputs, results of products,
reductions, random numbers) and what is needed, as in PyTorch's partitioner
(https://arxiv.org/abs/2011.00327 has the idea for graphs of layers). Only elementwise ops and views
are computed again, and none whose result the backward pass has to write to memory anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from torch_hlo.hlo.ir import Shape
from torch_hlo.lazy.record.recording import copied
from torch_hlo.lowering.core import Leaf, Node, Out
from torch_hlo.lowering.fx.fx_graph import FxGraph, Input
from torch_hlo.lowering.fx.fx_size import Layout

aten = torch.ops.aten
_FREE = 1 << 62  # capacity of what is not cut


@dataclass
class Joint(FxGraph):
    """A graph and its gradients. `tangents`: for each output that has a gradient, its number and
    the leaf that stands for that; `gradients`: for each placeholder what is its gradient, if
    anything, and how it shall lie."""

    tangents: list[tuple[int, Leaf, Layout]] = field(default_factory=list)
    gradients: list[tuple[Out | Leaf | None, Layout | None]] = field(default_factory=list)


_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.slice.Tensor,
    aten.select.int,
    aten.diagonal.default,
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
}
_FACTORIES = {
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.scalar_tensor.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.empty.memory_format,
    aten.new_zeros.default,
}


def _is_cheap(node: Node) -> bool:
    """Elementwise, a view, or nothing but constants: part of whatever loop reads it."""
    target = node.target
    return (
        "seed" not in node.kwargs
        and len(node.outs) == 1
        and (
            target in _VIEWS
            or target in _FACTORIES
            or torch.Tag.pointwise in getattr(target, "tags", ())
        )
    )


def _operands(node: Node) -> Iterator[Out | Leaf]:
    stack = [*node.args, *node.kwargs.values()]
    while stack:
        x = stack.pop()
        if type(x) is Out or isinstance(x, Leaf):
            yield x
        elif type(x) is list or type(x) is tuple:
            stack += x


def key_of(value: Out | Leaf) -> tuple[int, int]:
    """What tells a value from others."""
    return (id(value.node), value.index) if type(value) is Out else (id(value), -1)


def shape_of(value: Out | Leaf) -> Shape:
    return value.node.outs[value.index] if type(value) is Out else value.shape


def needed(values: list) -> list[Node]:
    """The nodes that the values need, operands first."""
    found: dict[Node, None] = {}
    stack = [v.node for v in values if type(v) is Out]
    while stack:
        node = stack.pop()
        if node not in found:
            found[node] = None
            stack += [x.node for x in _operands(node) if type(x) is Out]
    return sorted(found, key=lambda n: n.serial)


def cut(joint: Joint) -> tuple[FxGraph, list[int | None], FxGraph]:
    """The forward graph, whose further outputs are kept; of each placeholder of the backward graph
    before the gradients of outputs, the input that it is, or None for the next kept output; the
    backward graph."""
    wanted_gradients = [g for g, _ in joint.gradients if g is not None]
    nodes = needed(wanted_gradients)
    given = {id(leaf) for _, leaf, _ in joint.tangents}
    later: set[Node] = set()
    for node in nodes:
        if any(x.node in later if type(x) is Out else id(x) in given for x in _operands(node)):
            later.add(node)
    early = lambda x: x.node not in later if type(x) is Out else id(x) not in given
    wanted = {key_of(x): x for node in nodes if node in later for x in _operands(node) if early(x)}
    wanted.update({key_of(g): g for g in wanted_gradients if early(g)})
    kept = _minimal(joint, nodes, later, wanted)
    return _programs(joint, kept)


def _minimal(joint: Joint, nodes: list[Node], later: set[Node], wanted: dict) -> list[Out | Leaf]:
    """The values to keep."""
    # the backward pass has them in memory
    firm = {
        key_of(x)
        for node in nodes
        if node in later and not _is_cheap(node)
        for x in _operands(node)
    }
    for node in reversed(nodes):
        if node.target in _VIEWS and (id(node), 0) in firm:
            firm.update(map(key_of, _operands(node)))
    written = {
        key_of(x)
        for node in needed([v for v, _ in joint.outputs] + [v for _, v in joint.writes])
        if not _is_cheap(node)
        for x in _operands(node)
    }
    constants = {id(x.leaf) for x in joint.inputs if isinstance(x.source, torch.Tensor)}
    flow = _Flow()
    values: dict[tuple, Out | Leaf] = {}
    stack = list(wanted.values())
    while stack:
        x = stack.pop()
        key = key_of(x)
        if key in values:
            continue
        values[key] = x
        if type(x) is not Out:
            flow.edge("source", (key, 0), _FREE)
            flow.edge((key, 0), (key, 1), 0 if id(x) in constants else 1)
            continue
        nbytes = shape_of(x).nbytes
        flow.edge(
            (key, 0),
            (key, 1),
            nbytes if key in written or not _is_cheap(x.node) else 2 * nbytes,
        )
        if _is_cheap(x.node) and (key not in firm or x.node.target in _VIEWS):
            for operand in _operands(x.node):
                flow.edge((key_of(operand), 1), (key, 0), _FREE)
                stack.append(operand)
            if not any(True for _ in _operands(x.node)):
                flow.edge("source", (key, 0), 0)
        else:
            flow.edge("source", (key, 0), _FREE)
    for key in wanted:
        flow.edge((key, 1), "sink", _FREE)
    near = flow.cut("source", "sink")
    return [
        x
        for key, x in values.items()
        if (key, 0) in near and (key, 1) not in near and id(x) not in constants
    ]


def _programs(joint: Joint, kept: list[Out | Leaf]) -> tuple[FxGraph, list[int | None], FxGraph]:
    forward = FxGraph(joint.placeholders, writes=joint.writes, outputs=list(joint.outputs))
    backward = FxGraph()
    known: dict[tuple, Out | Leaf] = {}
    saved = _take_kept(joint, kept, forward, backward, known)
    _take_tangents(joint, backward, known)
    constants = [x for x in joint.inputs if isinstance(x.source, torch.Tensor)]
    known.update({key_of(x.leaf): x.leaf for x in constants})
    backward.inputs += constants
    _copy_nodes([g for g, _ in joint.gradients if g is not None], known, backward.nodes)
    backward.outputs = [
        (g if g is None else known[key_of(g)], layout) for g, layout in joint.gradients
    ]
    results = [v for v, _ in forward.outputs] + [v for _, v in forward.writes]
    forward.nodes = needed(results)
    used = {id(x) for node in forward.nodes for x in _operands(node)} | set(map(id, results))
    written = {position for position, _ in forward.writes}
    forward.inputs = [
        x
        for x in joint.inputs
        if id(x.leaf) in used or type(x.source) is int and x.source in written
    ]
    used = {id(x) for node in backward.nodes for x in _operands(node)}
    used |= {id(v) for v, _ in backward.outputs}
    backward.inputs = [x for x in backward.inputs if id(x.leaf) in used]
    return forward, saved, backward


def _take_kept(
    joint: Joint,
    kept: list[Out | Leaf],
    forward: FxGraph,
    backward: FxGraph,
    known: dict[tuple, Out | Leaf],
) -> list[int | None]:
    """What is kept becomes inputs of the backward graph: for each, the input of the forward graph
    that it is, or None for a further output."""
    source = {id(x.leaf): x for x in joint.inputs}
    saved: list[int | None] = []
    for x in kept:
        given = None if type(x) is Out else source[id(x)]
        if given is not None and type(given.source) is int:
            saved.append(given.source)
            layout = given.layout
        else:
            saved.append(None)
            layout = Layout.row_major(shape_of(x).rank)
            forward.outputs.append((x, layout))
        known[key_of(x)] = leaf = Leaf(shape_of(x))
        backward.inputs.append(Input(leaf, backward.placeholders, layout))
        backward.placeholders += 1
    return saved


def _take_tangents(joint: Joint, backward: FxGraph, known: dict[tuple, Out | Leaf]) -> None:
    """Gradients of results become inputs of the backward graph, as they lie in memory."""
    for _, leaf, layout in joint.tangents:
        new: Out | Leaf = Leaf(Shape(leaf.shape.dtype, layout.physical(leaf.shape.dims)))
        backward.inputs.append(Input(new, backward.placeholders, layout))
        backward.placeholders += 1
        if not layout.plain:
            order = [layout.order.index(d) for d in range(leaf.shape.rank)]
            new = Out(Node(aten.permute.default, (new, order), {}, (leaf.shape,)))
            backward.nodes.append(new.node)
        known[key_of(leaf)] = new


def _copy_nodes(
    values: list[Out | Leaf], known: dict[tuple, Out | Leaf], copies: list[Node]
) -> None:
    """Copy the nodes that the values need and that are not known; `known` gets the copies'
    results."""

    def value(x: object) -> object:
        if type(x) is Out or isinstance(x, Leaf):
            return known[key_of(x)]
        return type(x)(map(value, x)) if type(x) is list or type(x) is tuple else x

    found: dict[Node, None] = {}
    stack = [v for v in values if key_of(v) not in known]
    while stack:
        node = stack.pop().node
        if node not in found:
            found[node] = None
            stack += [x for x in _operands(node) if key_of(x) not in known]
    for node in sorted(found, key=lambda n: n.serial):
        copy = copied(node, value)
        copies.append(copy)
        for i in range(len(node.outs)):
            known.setdefault((id(node), i), Out(copy, i))


class _Flow:
    """Maximal flow by shortest augmenting paths in layers (Dinic, 1970)."""

    def __init__(self) -> None:
        self.number: dict[object, int] = {}
        # of each vertex, its edges: even ones are given, the next odd one is the way back
        self.edges: list[list[int]] = []
        self.to: list[int] = []
        self.left: list[int] = []

    def _vertex(self, name: object) -> int:
        found = self.number.get(name)
        if found is None:
            found = self.number[name] = len(self.edges)
            self.edges.append([])
        return found

    def edge(self, start: object, end: object, capacity: int) -> None:
        a = self._vertex(start)
        b = self._vertex(end)
        for vertex, other, size in ((a, b, capacity), (b, a, 0)):
            self.edges[vertex].append(len(self.to))
            self.to.append(other)
            self.left.append(size)

    def cut(self, source: object, sink: object) -> set:
        """The vertices on the source's side of a minimal cut."""
        s = self._vertex(source)
        t = self._vertex(sink)
        level = self._levels(s)
        while t in level:
            following = [0] * len(self.edges)
            while self._augment(s, t, level, following):
                pass
            level = self._levels(s)
        return {name for name, vertex in self.number.items() if vertex in level}

    def _levels(self, s: int) -> dict[int, int]:
        level = {s: 0}
        queue = deque([s])
        while queue:
            v = queue.popleft()
            for e in self.edges[v]:
                if self.left[e] and self.to[e] not in level:
                    level[self.to[e]] = level[v] + 1
                    queue.append(self.to[e])
        return level

    def _augment(self, s: int, t: int, level: dict[int, int], following: list[int]) -> bool:
        """More flow along one path. `following`: of each vertex, the first edge that has not turned
        out to lead nowhere."""
        edges = self.edges
        to = self.to
        left = self.left
        path: list[int] = []
        v = s
        while v != t:
            own = edges[v]
            deeper = level[v] + 1
            i = following[v]
            while i < len(own) and not (left[own[i]] and level.get(to[own[i]]) == deeper):
                i += 1
            following[v] = i
            if i < len(own):
                path.append(own[i])
                v = to[own[i]]
            elif path:
                v = to[path.pop() ^ 1]
                following[v] += 1
            else:
                return False
        amount = min(left[e] for e in path)
        for e in path:
            left[e] -= amount
            left[e ^ 1] += amount
        return True
