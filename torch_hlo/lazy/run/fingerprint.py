"""The exact structural key of a recorded graph: two graphs have equal keys only if one program
computes both.

    graph = collect([out, ...])       # nodes in the order of recording (operands first), their
                                      # leaves and numbers by first use
    graph.key                         # compared in full, so there are no collisions to fear

A node's key is `(id of the op, *arguments)` where an argument is
* an int >= 0: result of an earlier node, `position << 20 | index`;  an int < 0: `~i`, leaf number
i;
* ("lift", i, dtype): number i of the program's scalar inputs;
* ("int", v), ("bool", v), ("float", text), ("complex", text), ("ints", ...), ("list", ...),
("name", keyword, argument): static;
* a string, None, dtype, layout, memory format or device: itself. Integers are tagged apart from
wiring, so that a key without them (one program for many sizes) can be derived from this one.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter

from torch_hlo.lowering.core import STATIC, Node, Out, Subgraph

from ..record import Array, Number

INDEX_BITS = 20  # in keys: which result of a node
# id -> op of every op that occurs in a key; ops live as long as the process
OPS: dict[int, object] = {}


class Graph:
    """Nodes that `outputs` need, in the order in which they were recorded. `position` maps id(node)
    to its place."""

    __slots__ = (
        "nodes",
        "outputs",
        "leaves",
        "numbers",
        "node_keys",
        "key",
        "position",
    )

    def __init__(self, nodes: list[Node], outputs: Sequence[Out]) -> None:
        self.nodes = nodes
        self.outputs = outputs
        self.position = position = dict(zip(map(id, nodes), range(len(nodes))))
        self.leaves: list[Array] = []
        self.numbers: list[Number] = []
        encoder = _Encoder(position, self.leaves, self.numbers)
        self.node_keys = tuple(map(encoder.node, nodes))
        encoder.table.clear()  # a circle, which would hold the arrays until it is collected
        roots = tuple(position[id(o.node)] << INDEX_BITS | o.index for o in outputs)
        self.key = (self.node_keys, tuple(leaf.shape for leaf in self.leaves), roots)


def collect(outputs: Sequence[Out]) -> Graph:
    """The graph that computes `outputs` (distinct), without recursion."""
    found = {out.node for out in outputs}
    stack = list(found)
    while stack:
        for operand in operands(stack.pop()):
            if operand not in found:
                found.add(operand)
                stack.append(operand)
    return Graph(sorted(found, key=_serial), outputs)


_serial = attrgetter("serial")


def operands(node: Node) -> list[Node]:
    """The nodes not yet evaluated whose results `node` uses, possibly repeated."""
    found: list[Node] = []
    _search(node.args, found)
    if node.kwargs:
        _search(node.kwargs.values(), found)
    return found


def _search(values, found: list[Node]) -> None:
    for x in values:
        kind = type(x)
        if kind is Out:
            if x.array is None:
                found.append(x.node)
        elif kind is list or kind is tuple:
            _search(x, found)


class _Encoder:
    """Keys of nodes; numbers leaves and lifted numbers by first use. One method call per node, a
    table per argument type."""

    __slots__ = (
        "position",
        "leaves",
        "numbers",
        "leaf_index",
        "number_index",
        "table",
    )

    def __init__(
        self, position: dict[int, int], leaves: list[Array], numbers: list[Number]
    ) -> None:
        self.position = position
        self.leaves = leaves
        self.numbers = numbers
        self.leaf_index: dict[int, int] = {}
        self.number_index: dict[int, int] = {}
        self.table: dict[type, Callable] = {
            **STATIC,
            Out: self._out,
            Array: self._leaf,
            Number: self._number,
        }
        self.table[list] = self.table[tuple] = self._list

    def node(self, node: Node) -> tuple:
        target = node.target
        OPS[id(target)] = target
        table = self.table
        key = [id(target)]
        for x in node.args:
            kind = type(x)
            if kind is Out and x.array is None:  # half of all arguments
                key.append(self.position[id(x.node)] << INDEX_BITS | x.index)
            else:
                encode = table.get(kind)
                key.append(self._other(x, node) if encode is None else encode(x))
        if node.kwargs:
            for name, x in node.kwargs.items():
                encode = table.get(type(x))
                key.append(
                    (
                        "name",
                        name,
                        self._other(x, node) if encode is None else encode(x),
                    )
                )
        # Result types may depend on global state (the default dtype), which the arguments do not
        # show.
        for out in node.outs:
            key.append(None if out is None else out.dtype)
        return tuple(key)

    def _out(self, x: Out) -> int:
        if x.array is not None:
            return self._leaf(x.array)
        return self.position[id(x.node)] << INDEX_BITS | x.index

    def _leaf(self, x: Array) -> int:
        index = self.leaf_index.get(id(x))
        if index is None:
            index = self.leaf_index[id(x)] = len(self.leaves)
            self.leaves.append(x)
        return ~index

    def _number(self, x: Number) -> tuple:
        index = self.number_index.get(id(x))
        if index is None:
            index = self.number_index[id(x)] = len(self.numbers)
            self.numbers.append(x)
        return ("lift", index, x.dtype)

    def _list(self, x: Sequence) -> tuple:
        if x and set(map(type, x)) == _INT:
            return ("ints", *x)
        table = self.table
        return ("list", *[table.get(type(v), self._other)(v) for v in x])

    def _other(self, x, node: Node | None = None):
        if isinstance(x, Subgraph):  # a recorded function, see lazy/ops/control.py
            return ("graph", x.key)
        if isinstance(x, (int, float)) and type(x).__mro__[1] in STATIC:  # IntEnum and the like
            return STATIC[type(x).__mro__[1]](x)
        where = f" in the arguments of {node.target}" if node is not None else ""
        raise TypeError(
            f"hlo device: a {type(x).__name__} cannot be recorded{where}; pass a tensor or a plain"
            " number"
        )


_INT = {int}
