"""What a graph would be with other sizes, before it was seen with any: torch.compile may say which
sizes vary.

    # the integers (generalize.split) of the graph with other sizes, the likeliest first
    others(graph, aliases)

The sizes that vary are changed in the leaves, and results are inferred again, op by op. Which of an
op's integers change with them is a guess: the first that PyTorch accepts. As everything in
generalize.py a wrong one costs a compile, and never gives a wrong result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product
from math import prod

import torch

from torch_hlo.hlo.ir import Ints, Shape
from torch_hlo.lowering.core import HLO_TO_TORCH, Node, Out
from torch_hlo.pytorch.operators import OpOverload, integers

from ..record import Array, Number, blank, inference, meta as metas
from . import generalize
from .fingerprint import Graph

aten = torch.ops.aten
GUESSES = 64  # for the integers of one op
# Tables of positions end somewhere, so smaller ones come first; some models want even sizes.
_CHANGES: tuple[Callable[[int], int], ...] = (
    lambda n: n - 1 if n > 2 else n + 1,
    lambda n: n // 2 if n > 3 else 2 * n,
    lambda n: 2 * n,
)
_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_FACTOR = 2  # a number that is no size in PyTorch's schema: mostly a power or a factor


def others(graph: Graph, aliases: tuple[tuple[int, int], ...]) -> Iterator[Ints]:
    """The integers of the graph with other sizes in place of those that vary; then with the small
    ones as they are, because other numbers are equal to those by chance. `aliases`: which outputs
    replace which leaves, with the same sizes."""
    varying = sorted({n for leaf in graph.leaves for n in leaf.varying if n > 1})
    for i in range(len(varying)):
        for change in _CHANGES:
            try:
                imagined = _Imagined(graph, {n: change(n) for n in varying[i:]}).graph
            except Exception:  # PyTorch refuses sizes with errors of any class
                continue
            if all(_shape(imagined.outputs[o]) == imagined.leaves[i].shape for o, i in aliases):
                yield generalize.split(imagined)[1]
                break


class _Imagined:
    """A copy of a graph: `sizes` says what becomes of those that vary. Raises what PyTorch raises
    for an op that no guess makes fit."""

    def __init__(self, graph: Graph, sizes: dict[int, int]) -> None:
        self.sizes = sizes
        self.leaves = {id(leaf): Array(self._changed(leaf), None) for leaf in graph.leaves}
        self.made: dict[int, Node] = {}
        for node in graph.nodes:
            self.made[id(node)] = self._node(node)
        outputs = [Out(self.made[id(o.node)], o.index) for o in graph.outputs]
        self.graph = Graph(list(self.made.values()), outputs)

    def _changed(self, leaf: Array) -> Shape:
        dims = [self.sizes.get(n, n) if n in leaf.varying else n for n in leaf.shape.dims]
        return Shape(leaf.shape.dtype, tuple(dims))

    def _node(self, node: Node) -> Node:
        became = self._became(node)
        choices: list[list[int]] = []

        def collect(n: int, kind: str) -> int:
            choices.append(self._choices(n, kind, became))
            return n

        args, kwargs = self._arguments(node, collect)
        if not became and all(len(c) == 1 for c in choices):
            return Node(node.target, args, kwargs, node.outs, node.source)
        if node.target in _RESHAPES:
            self._reshape(node, choices)
        error: Exception = RuntimeError(f"{node.target} is not known for other sizes")
        for guess in islice(product(*choices), GUESSES):
            numbers = iter(guess)
            args, kwargs = self._arguments(node, lambda n, kind: next(numbers))
            try:
                outs = _infer(node, args, kwargs)
            except Exception as reason:
                error = reason
                continue
            if list(map(_kind, outs)) == list(map(_kind, node.outs)):
                return Node(node.target, args, kwargs, outs, node.source)
        raise error

    def _became(self, node: Node) -> dict[int, list[int]]:
        """What has become of sizes of the node's operands, where they have changed."""
        found: dict[int, list[int]] = {}
        left: list[object] = [*node.args, *node.kwargs.values()]
        while left:
            x = left.pop()
            if isinstance(x, (list, tuple)):
                left += x
            elif isinstance(x, (Out, Array)):
                for n, m in zip(_shape(x).dims, _shape(self._tensor(x)).dims):
                    if n != m:
                        found.setdefault(n, []).append(m)
        return found

    def _choices(self, n: int, kind: str, became: dict[int, list[int]]) -> list[int]:
        """What an integer may become, the likeliest first."""
        if kind == "int" or kind == "Scalar" and n == _FACTOR:
            return [n]
        sizes = [self.sizes[n]] if n in self.sizes else []
        last = [m - 1 for m in became.get(n + 1, ())]  # the position of the last one
        return list(dict.fromkeys([*sizes, *became.get(n, ()), n, *last]))

    def _reshape(self, node: Node, choices: list[list[int]]) -> None:
        """Narrow the choices for the sizes of a result that holds the operand's elements in order:
        the size of what was one, or was several, is known."""
        was = _shape(node.args[0]).dims
        now = _shape(self._tensor(node.args[0])).dims
        for sources, targets in _groups(was, node.outs[0].dims) if 0 not in was else ():
            first = targets.start
            if len(targets) == 1 and choices[first] != [-1]:
                choices[first] = [prod(now[sources.start : sources.stop])]

    def _arguments(self, node: Node, integer: Callable) -> tuple[tuple, dict]:
        """The node's arguments with `integer(n, kind)` in place of its integers."""
        names, kinds = _integers(node)

        def value(x: object, name: str) -> object:
            if isinstance(x, (list, tuple)):
                return [value(v, name) for v in x]
            if isinstance(x, (Out, Array)):
                return self._tensor(x)
            return integer(x, kinds.get(name, "int")) if type(x) is int else x

        args = tuple([value(x, name) for x, name in zip(node.args, names)])
        return args, {name: value(x, name) for name, x in node.kwargs.items()}

    def _tensor(self, x: Out | Array) -> Out | Array:
        if isinstance(x, Array):
            return self.leaves[id(x)]
        if x.array is not None:
            return self.leaves[id(x.array)]
        return Out(self.made[id(x.node)], x.index)


def _groups(was: Sequence[int], now: Sequence[int]) -> Iterator[tuple[range, range]]:
    """The smallest runs of dimensions that hold the same elements in two shapes."""
    i = j = 0
    while i < len(was) and j < len(now):
        k = i + 1
        m = j + 1
        while prod(was[i:k]) != prod(now[j:m]):
            if prod(was[i:k]) < prod(now[j:m]):
                k += 1
            else:
                m += 1
        yield range(i, k), range(j, m)
        i = k
        j = m


def _integers(node: Node) -> tuple[list[str], dict[str, str]]:
    """The names of the node's arguments by position, and what integers are in them (see
    `integers`). Numbers that an op takes besides tensors are none of sizes: "Scalar"."""
    if not isinstance(node.target, OpOverload):
        return [""] * len(node.args), {}
    arguments = node.target._schema.arguments
    tensors = any(isinstance(a.type, torch.TensorType) for a in arguments)
    kinds = {a.name: "Scalar" if tensors else "SymInt" for a in arguments}
    return list(kinds), kinds | integers(node.target)


def _infer(node: Node, args: tuple, kwargs: dict) -> tuple[Shape | None, ...]:
    """Shapes of an op's results. Raises what PyTorch raises."""
    if not isinstance(node.target, OpOverload):
        raise RuntimeError(f"{node.target} is not known for other sizes")
    wanted = {a.name for a in node.target._schema.arguments}  # seeds of random ops are ours
    kept = {name: _meta(x) for name, x in kwargs.items() if name in wanted}
    return inference.unchecked(node.target, tuple(map(_meta, args)), kept).outs


def _meta(x: object) -> object:
    if isinstance(x, list):
        return [_meta(v) for v in x]
    if isinstance(x, Number):
        return x.value
    if isinstance(x, (Out, Array)):
        shape = _shape(x)
        return blank(metas.contiguous(shape.dims, HLO_TO_TORCH[shape.dtype]))
    return x


def _shape(x: Out | Array) -> Shape:
    return x.shape if isinstance(x, Array) else x.node.outs[x.index]


def _kind(shape: Shape | None) -> tuple[str, list[int]] | None:
    """What other sizes leave as it is: the type, the rank, and sizes 0 and 1."""
    return shape and (shape.dtype, [min(n, 2) for n in shape.dims])
