"""What is recorded on the mesh, where every device has a process of its own.

A value is *on the mesh* if it follows from a sharded tensor, is annotated, or is written to a
tensor that is. This is a property of the program's text. So is the order in which such values are
recorded, and therefore a node's position in the journal means the same on all ranks, whatever else
a rank has recorded. Nodes stay in the journal until a step has computed all of it: a tensor that
this rank has lost may still be wanted by another one (agreement.py).

Values that are not on the mesh are this rank's own business. They are computed when it likes, by
programs of its own."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch_hlo.device.sharded import ShardedBuffer
from torch_hlo.lowering.core import TAPE, Node, Out
from torch_hlo.lowering.spmd.sharding import ANNOTATIONS

from ..record import Array
from .fingerprint import collect


class Journal:
    """The nodes on the mesh that are still to be computed, in the order of the program; who uses it
    holds RECORDING. `refused`: nodes that cannot be lowered, and what follows from them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.places: dict[Node, int] = {}
        self.refused: set[Node] = set()
        self.written: set[Node] = set()  # whose value went to a tensor that is on the mesh
        self._texts: dict[tuple[Any, ...], bytes] = {}
        self._digest = hashlib.blake2b(digest_size=16)
        TAPE.nodes = []

    def read(self) -> bool:
        """Sort what has been recorded since; whether any of it is on the mesh."""
        recorded = TAPE.nodes
        if not recorded:
            return False
        before = len(self.nodes)
        for node in recorded:
            if node.target in ANNOTATIONS or node in self.written or any(map(self.has, used(node))):
                self._add(node)
        recorded.clear()
        self.written.clear()
        return len(self.nodes) > before

    def _add(self, node: Node) -> None:
        if node not in self.places:
            self.places[node] = len(self.nodes)
            self.nodes.append(node)
            kind = node.target, node.outs
            text = self._texts.get(kind)
            if text is None:
                text = self._texts[kind] = f"{node.target}{node.outs}\n".encode()
            self._digest.update(text)

    def has(self, value: Any) -> bool:
        """Whether a value is on the mesh: of the nodes that were read."""
        if type(value) is Out:
            if value.array is None:
                return value.node in self.places
            value = value.array
        data = getattr(value, "data", None)
        return type(data) is ShardedBuffer and not data.sharding.is_replicated

    def write(self, value: Any) -> None:
        """A tensor that is on the mesh gets a value."""
        if type(value) is Out and value.array is None:
            if value.node in TAPE.nodes:
                self.written.add(value.node)
            else:  # perhaps a result of this rank's own, recorded earlier
                self._add(value.node)

    def locals(self, nodes: Iterable[Node]) -> list[Out]:
        """What these nodes read of pending values that are not on the mesh."""
        found = {}
        for node in nodes:
            for x in used(node):
                if type(x) is Out and x.array is None and x.node not in self.places:
                    found.setdefault(id(x), x)
        return list(found.values())

    def pending(self) -> int:
        """How many nodes a step of the mesh would have to look at."""
        return len(self.nodes) - len(self.refused)

    def digest(self) -> bytes:
        """Equal on ranks that have recorded the same operations."""
        return self._digest.digest()

    def lines(self) -> list[str]:
        """The nodes as text, each with its place in the user's program."""
        return [
            f"{n.target} -> {', '.join(map(str, n.outs))}{f' at {n.source}' if n.source else ''}"
            for n in self.nodes
        ]

    def refuse(self, culprit: Node) -> None:
        """`culprit` cannot be lowered: later steps leave out what needs it."""
        tainted = {culprit}
        for node in self.nodes:
            if any(type(x) is Out and x.node in tainted for x in used(node)):
                tainted.add(node)
        self.refused.update(node for node in self.nodes if node in tainted)

    def clear(self) -> None:
        """A step computes all but what was refused."""
        left = [node for node in self.nodes if node in self.refused]
        self.nodes, self.refused = [], set(left)
        self.places.clear()
        self._digest = hashlib.blake2b(digest_size=16)
        for node in left:
            self._add(node)

    def recall(self, values: list[Out]) -> None:
        """A step has failed: these are pending again."""
        TAPE.nodes[:0] = [node for node in collect(values).nodes if node not in self.places]


def used(node: Node) -> Iterator[Any]:
    """The values and arrays that a node uses, possibly repeated."""
    left = [*reversed(node.kwargs.values()), *reversed(node.args)]
    while left:
        x = left.pop()
        kind = type(x)
        if kind is Out or kind is Array:
            yield x
        elif kind is list or kind is tuple:
            left += reversed(x)
