"""One program for many sizes: a recorded graph that differs from an earlier one only in integers
becomes a symbolic program.

    # structure, and every integer of the graph in a fixed order
    bones, ints = split(graph)
    # what was seen with this structure
    family = families.of(bones)
    # a symbolic program whose expressions give exactly these integers
    family.find(ints) -> Generalized
    # new ones that explain instances seen, or why there is none: to be tried in this order
    family.proposals(graph, ints)

Sound whatever the guess: before each use every integer of the recorded graph (sizes of inputs and
results, static arguments) is compared with what the program's expressions predict for it. Sizes
that vary must be at least 2, in every instance and at every use, because 0 and 1 mean other things
to operators (broadcasting, "no", "the first"); positions may be 0 and 1. Numbers that are no sizes
(`x + i`) become inputs of the program where they vary (`lift`), and may be anything. Graphs with
convolutions get programs of their own for a few sizes first, and are never general in the sizes of
kernels, which are another model's."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cache, partial
from operator import add, lt, mul, ne

import torch

from torch_hlo.device.cpu.native import NativeProgram
from torch_hlo.hlo.ir import Dim, Ints, Pairs, Shape, Size, function, symbol
from torch_hlo.lowering.core import Leaf, Node, Out
from torch_hlo.lowering.core.registry import lifts
from torch_hlo.pytorch.operators import OpOverload

from ..record import Array, Number
from .explain import argument_names
from .fingerprint import Graph

aten = torch.ops.aten
INSTANCES = 6  # integer vectors remembered per structure
PROGRAMS = 4  # symbolic programs per structure
ATTEMPTS = 6  # after which no more are tried
STRUCTURES = 512
# instances with convolutions that get programs of their own first: those kernels are 1.2 to 4 times
# as fast where sizes are known
OWN_SIZES = 3
CONVOLUTIONS = frozenset(
    {
        aten.convolution.default,
        aten.convolution_overrideable.default,
        aten._convolution.default,
    }
)
_KNOWN = 48  # expressions that others are built from
_DIVISORS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 28, 32, 64)

# Integer arguments that are positions and decide no size: an input of the program each, unless a
# size explains it.
POSITIONS: dict[object, frozenset[int]] = {
    aten.select.int: frozenset({2}),
    aten.select_scatter.default: frozenset({3}),
    aten.select_backward.default: frozenset({3}),
    aten.roll.default: frozenset({1}),
}
# Integer arguments that are positions or lengths, nothing else: where no size and no other position
# explains one, it is an input of the program.
FREE: dict[object, frozenset[int]] = {
    **POSITIONS,
    aten.slice.Tensor: frozenset({2, 3}),
    aten.slice_scatter.default: frozenset({3, 4}),
    aten.slice_backward.default: frozenset({3, 4}),
    aten.arange.start: frozenset({0, 1}),
    aten.arange.default: frozenset({0}),
}


# ---- structure and integers


def split(graph: Graph) -> tuple[tuple, Ints]:
    """The graph's key without integers (hashable), and the integers: sizes of leaves, then per node
    static arguments and result sizes."""
    ints: list[int] = []
    for leaf in graph.leaves:
        ints += leaf.shape.dims
    leaves = tuple([(leaf.shape.dtype, leaf.shape.rank) for leaf in graph.leaves])
    bones: list[tuple] = []
    for key, node in zip(graph.node_keys, graph.nodes):
        bones.append(tuple([_strip(x, ints) if type(x) is tuple else x for x in key]))
        for out in node.outs:
            if out is not None:
                ints += out.dims
        bones.append(tuple([out and (out.dtype, out.rank) for out in node.outs]))
    return (tuple(bones), leaves, graph.key[2]), tuple(ints)


def _strip(x: tuple, ints: list[int]) -> tuple:
    tag = x[0]
    if tag == "int":
        ints.append(int(x[1]))
        return _INT
    if tag == "ints":
        ints += x[1:]
        return ("ints", len(x) - 1)
    if tag in ("list", "name"):
        return (tag, *[_strip(v, ints) if type(v) is tuple else v for v in x[1:]])
    return x


_INT = ("int",)


def _positions(graph: Graph) -> Iterator[tuple[Node | int, int, str]]:
    """For every integer of `split`, where it is: (leaf number, dimension, "size") or (node,
    argument, name)."""
    for i, leaf in enumerate(graph.leaves):
        for d in range(leaf.shape.rank):
            yield i, d, "size"
    for key, node in zip(graph.node_keys, graph.nodes):
        names = argument_names(node.target)
        for i, x in enumerate(key[1:]):
            if type(x) is tuple:
                found: list[int] = []
                _strip(x, found)
                name = x[1] if x[0] == "name" else names[i] if i < len(names) else f"argument {i}"
                for _ in found:
                    yield node, i, name
        for out in node.outs:
            for _ in range(out.rank if out is not None else 0):
                yield node, -1, "result size"


def _free(graph: Graph) -> list[bool]:
    """For every integer of `split`, whether it is a position."""
    return [
        type(place) is Node and argument in FREE.get(place.target, ())
        for place, argument, _ in _positions(graph)
    ]


def _numbers(graph: Graph) -> list[int]:
    """The integers of `split` that are numbers and decide nothing about the program."""
    return [
        i
        for i, (place, _, name) in enumerate(_positions(graph))
        if type(place) is Node and name in _number_arguments(place.target)
    ]


@cache
def _number_arguments(op: OpOverload) -> frozenset[str]:
    schema = getattr(op, "_schema", None)
    return frozenset(a.name for a in schema.arguments if lifts(op, a)) if schema else frozenset()


def lift(graph: Graph, places: Ints) -> list[tuple[Node, int]]:
    """Make these integers of `split` inputs of the program. Returns which arguments they were."""
    at = sum(leaf.shape.rank for leaf in graph.leaves)
    lifted = []

    def value(x):
        nonlocal at
        if isinstance(x, (list, tuple)):
            return [value(v) for v in x]
        if isinstance(x, int) and type(x) is not bool:
            at += 1
            return Number(x, "s64") if at - 1 in places else x
        return x

    for node in graph.nodes:
        before = at
        args = tuple(map(value, node.args))
        kwargs = {k: value(v) for k, v in node.kwargs.items()}
        if any(before <= place < at for place in places):
            pairs = enumerate(zip(node.args, args))
            lifted += [(node, i) for i, (n, x) in pairs if type(x) is Number and x is not n]
            node.args, node.kwargs = args, kwargs
        at += sum(out.rank for out in node.outs if out is not None)
    Graph.__init__(graph, graph.nodes, graph.outputs)
    return lifted


def _kernel_places(graph: Graph) -> list[int] | None:
    """Where in the integers of `split` the sizes of convolutions' kernels are; None without
    convolutions."""
    wanted = [node.args[1] for node in graph.nodes if node.target in CONVOLUTIONS]
    if not wanted:
        return None
    places = {}
    at = 0
    for leaf in graph.leaves:
        places[id(leaf), 0] = range(at, at := at + leaf.shape.rank)
    for key, node in zip(graph.node_keys, graph.nodes):
        found: list[int] = []
        for x in key:
            if type(x) is tuple:
                _strip(x, found)
        at += len(found)
        for i, out in enumerate(node.outs):
            places[id(node), i] = range(at, at := at + (out.rank if out is not None else 0))
    kernels = [
        (
            (id(k.node), k.index)
            if type(k) is Out and k.array is None
            else (id(k.array if type(k) is Out else k), 0)
        )
        for k in wanted
    ]
    return sorted({i for k in kernels for i in places.get(k, ())})


# ---- the graph with expressions instead of integers


class _Rewriter:
    """Copies nodes; integers are replaced by `sizes`, in the order of `split`."""

    def __init__(self, graph: Graph, sizes: Sequence[Size]) -> None:
        self.sizes = iter(sizes)
        self.leaves: dict[int, Leaf] = {}
        for leaf in graph.leaves:
            self.leaves[id(leaf)] = Leaf(self._shape(leaf.shape))
        self.made: dict[int, Node] = {}
        self.nodes = [self._node(n) for n in graph.nodes]
        self.outputs = [self.value(o) for o in graph.outputs]
        if next(self.sizes, None) is not None:
            raise AssertionError(
                "the integers of a graph were read in another order than they were written"
            )

    def _shape(self, shape: Shape) -> Shape:
        return Shape(shape.dtype, tuple([next(self.sizes) for _ in shape.dims]))

    def _node(self, n: Node) -> Node:
        args = tuple([self.value(a) for a in n.args])
        kwargs = {k: self.value(v) for k, v in n.kwargs.items()}
        outs = tuple([None if s is None else self._shape(s) for s in n.outs])
        node = self.made[id(n)] = Node(n.target, args, kwargs, outs, n.source)
        return node

    def value(self, x: Array | Out) -> Leaf | Out:
        kind = type(x)
        if kind is Out:
            return (
                Out(self.made[id(x.node)], x.index) if x.array is None else self.leaves[id(x.array)]
            )
        if kind is Array:
            return self.leaves[id(x)]
        if isinstance(x, int) and kind is not bool:
            size = next(self.sizes)
            return size if kind is int or isinstance(size, Dim) else x
        if kind is list or kind is tuple or kind is torch.Size:
            return [self.value(v) for v in x]
        return x


# ---- expressions


class Proposal:
    """A symbolic graph that explains all instances: lower `nodes` with `leaves` as inputs, then
    `extra` ones of shape u8[symbol, 0]."""

    def __init__(
        self,
        graph: Graph,
        ints: Ints,
        instances: list[Ints],
        sizes: list[Size],
        origins: dict[str, int],
        free: list[bool],
    ) -> None:
        rewritten = _Rewriter(graph, sizes)
        self.nodes = rewritten.nodes
        self.outputs = rewritten.outputs
        self.leaves = [rewritten.leaves[id(leaf)] for leaf in graph.leaves]
        self.extra: list[Leaf] = []
        self.origins = origins
        places = {}
        at = 0
        for i, leaf in enumerate(graph.leaves):
            for d in range(leaf.shape.rank):
                places[at] = (i, d)
                at += 1
        symbols = []
        for name, position in origins.items():
            if position in places:
                symbols.append((name, *places[position]))
            else:
                symbols.append((name, len(self.leaves) + len(self.extra), 0))
                self.extra.append(Leaf(Shape("u8", (symbol(name), 0))))
        self.symbols = tuple(symbols)
        self.sizes = sizes
        self.free = free
        self.text = ", ".join(f"{name} = {ints[p]}" for name, p in origins.items())

    def aliases(self, wanted: Pairs) -> Pairs:
        """Those of the exact graph's aliases where the sizes are equal for every value of the
        symbols."""
        return tuple(
            (o, i)
            for o, i in wanted
            if self.outputs[o].node.outs[self.outputs[o].index] == self.leaves[i].shape
        )


class Generalized:
    """A compiled symbolic program and the integers it predicts."""

    def __init__(self, program: NativeProgram, name: str, proposal: Proposal) -> None:
        self.program = program
        self.name = name
        self.aliases = proposal.aliases
        self.origins = tuple(proposal.origins.values())
        self.extra = tuple(proposal.origins[x.shape.dims[0]._text] for x in proposal.extra)
        self.base = [s if isinstance(s, int) else 0 for s in proposal.sizes]
        distinct: dict[Dim, int] = {}
        self.places = [
            (i, distinct.setdefault(s, len(distinct)))
            for i, s in enumerate(proposal.sizes)
            if isinstance(s, Dim)
        ]
        self.least = [0] * len(distinct)
        for i, k in self.places:
            if not proposal.free[i]:
                self.least[k] = 2
        self.evaluate = function(tuple(proposal.origins), tuple(distinct))

    def overwrites(self, wanted: Pairs, dead: Ints) -> bool:
        """Whether the program overwrites nothing but leaves that die with this step, and as many
        of them as one that is compiled for the exact graph's aliases."""
        mine = self.program.aliases
        return len(mine) >= len(self.aliases(wanted)) and {i for _, i in mine} <= {*dead}

    def fits(self, ints: Ints) -> bool:
        """True if the program computes the graph with these integers."""
        try:
            values = self.evaluate(*[ints[p] for p in self.origins])
        except ZeroDivisionError:
            return False
        if any(map(lt, values, self.least)):
            return False
        predicted = self.base.copy()
        for i, k in self.places:
            predicted[i] = values[k]
        return tuple(predicted) == ints


def _between(column: Ints, positions: list[tuple[Ints, Size]]) -> Size | None:
    """What lies between two positions of a slice."""
    for u, start in positions:
        for w, end in positions:
            if not isinstance(found := end - start, int) and all(
                b - a == v for v, a, b in zip(column, u, w)
            ):
                return found
    return None


def _kind(node: Node, argument: int, name: str) -> tuple:
    """Positions of one kind are likely to change together."""
    return node.target, argument, node.outs


class _Solver:
    """Expressions of the symbols that give a column of values, one per instance; simplest first."""

    def __init__(self) -> None:
        self.known: dict[Ints, Size] = {}

    def add(self, column: Ints, size: Size) -> None:
        self.known.setdefault(column, size)

    def solve(self, column: Ints) -> Size | None:
        found = self.known.get(column)
        if found is None:
            found = next(self._candidates(column), None)
            if found is not None and len(self.known) < _KNOWN:
                self.known[column] = found
        return found

    def _candidates(self, v: Ints) -> Iterator[Size]:
        atoms = list(self.known.items())
        pairs = [
            (tuple(map(mul, u, w)), d * e) for i, (u, d) in enumerate(atoms) for w, e in atoms[i:]
        ]
        sums = [
            (tuple(map(add, u, w)), d + e)
            for i, (u, d) in enumerate(atoms)
            for w, e in atoms[i + 1 :]
        ]
        # What layers do to sizes most often comes first; a wrong guess costs a compile, not a wrong
        # result.
        for rule, terms in (
            (_multiple, atoms),
            (_near, atoms),
            (_multiple, pairs),
            (_equal, sums),
            (_linear, atoms),
            (_divided, atoms),
            (_near, pairs),
            (_near, sums),
            (_shifted, atoms),
            (_reflected, atoms),
            (_multiple, sums),
            (_divided, pairs),
        ):
            for u, e in terms:
                if (size := rule(v, u, e)) is not None:
                    yield size
        for a, e in pairs[: _KNOWN * 4]:
            for w, f in atoms:
                if (size := _multiple(v, tuple(map(mul, a, w)), e * f)) is not None:
                    yield size


def _equal(v: Sequence[int], u: Sequence[int], e: Size) -> Size | None:
    return e if tuple(v) == tuple(u) else None


def _near(v: Sequence[int], u: Sequence[int], e: Size) -> Size | None:
    return _shifted(v, u, e) if abs(v[0] - u[0]) <= 4 else None


def _multiple(v: Sequence[int], u: Sequence[int], e: Size) -> Size | None:
    c, rest = divmod(v[0], u[0]) if u[0] else (0, 0)
    return c * e if not rest and c and all(c * b == a for a, b in zip(v, u)) else None


def _line(slope: int, v: Sequence[int], u: Sequence[int], e: Size) -> Size | None:
    c = v[0] - slope * u[0]
    return slope * e + c if all(slope * b + c == a for a, b in zip(v, u)) else None


_shifted = partial(_line, 1)
_reflected = partial(_line, -1)  # what is left behind a position: the length of x[i:]


def _linear(v: Sequence[int], u: Sequence[int], e: Size) -> Size | None:
    j = next((i for i in range(1, len(u)) if u[i] != u[0]), None)
    if j is None:
        return None
    slope, rest = divmod(v[j] - v[0], u[j] - u[0])
    if rest or not 0 < slope <= 8:
        return None
    return _line(slope, v, u, e) if abs(v[0] - slope * u[0]) <= 2 * slope else None


def _divided(v: Sequence[int], u: Sequence[int], e: Size) -> Size | None:
    for c in _DIVISORS:
        for shift in range(-c, c):
            d = v[0] - (u[0] + shift) // c
            if -2 <= d <= 2 and all((b + shift) // c + d == a for a, b in zip(v, u)):
                return (e + shift) // c + d
    return None


# ---- families


class Family:
    """Everything seen with one structure."""

    def __init__(self) -> None:
        self.instances: OrderedDict[Ints, None] = OrderedDict()
        self.programs: list[Generalized] = []
        self.attempts = 0
        self.numbers: list[int] | None = None  # see _numbers
        self.varying: set[int] = set()  # those that were seen to vary

    def find(self, ints: Ints, aliases: Pairs, dead: Ints) -> Generalized | None:
        """A symbolic program for a graph with these integers, aliases and dying leaves."""
        fitting = (p for p in self.programs if p.fits(ints) and p.overwrites(aliases, dead))
        return next(fitting, None)

    def remember(self, ints: Ints) -> None:
        """An instance was compiled."""
        self.instances[ints] = None
        while len(self.instances) > INSTANCES:
            self.instances.popitem(last=False)

    def lifts(self, graph: Graph, ints: Ints) -> Ints:
        """The numbers that are to be inputs."""
        if self.numbers is None and self.instances:
            self.numbers = _numbers(graph)
        for earlier in self.instances:
            self.varying.update(i for i in self.numbers if earlier[i] != ints[i])
        return tuple(i for i in self.varying if -(1 << 63) <= ints[i] < 1 << 63)

    def inherit(self, family: "Family", places: Ints, ints: Ints) -> bool:
        """What was seen of the structure where integers at `places` were no inputs yet. Returns
        whether nothing but those has changed, in one case."""
        seen = {tuple(n for i, n in enumerate(e) if i not in places) for e in family.instances}
        for earlier in seen - {ints}:
            self.remember(earlier)
        return ints in seen

    def forget(self, ints: Ints) -> None:
        """An instance that was imagined does not help."""
        del self.instances[ints]

    def proposals(self, graph: Graph, ints: Ints) -> Iterator[Proposal | str]:
        """Symbolic graphs that explain this instance and the earlier ones, or the reason why there
        is none: with input sizes that have nothing to do with each other; with some computed from
        others (an array of all tokens, and the batches that they come in); and one for the likest
        earlier instance alone."""
        if len(self.programs) >= PROGRAMS or self.attempts >= ATTEMPTS:
            yield f"{self.attempts} symbolic programs were tried for this graph, no more are"
            return
        if ints in self.instances:
            yield "it differs from earlier graphs in more than sizes"
            return
        chosen = [ints]
        free = _free(graph)
        kernels = _kernel_places(graph)
        likes = [
            earlier
            for earlier in self.instances
            if all(earlier[i] == ints[i] for i in kernels or ())
        ]
        if (
            kernels is not None
            and len(likes) < OWN_SIZES
            and all(any(a != b and not f for a, b, f in zip(ints, e, free)) for e in likes)
        ):
            yield (
                f"convolutions are faster that way, and these kernels were seen with {len(likes)}"
                " other sizes"
            )
            return
        for earlier in reversed(likes):
            if _compatible([*chosen, earlier], free):
                chosen.append(earlier)
        if len(chosen) < 2:
            yield "it differs from earlier graphs in sizes 0 or 1, which are never generalised"
            return
        self.attempts += 1
        again = bool(self.programs)
        yield _explain(graph, ints, chosen, free, again)
        yield _explain(graph, ints, chosen, free, again, related=True)
        if len(chosen) > 2:
            likest = min(chosen[1:], key=lambda earlier: sum(map(ne, ints, earlier)))
            yield _explain(graph, ints, [ints, likest], free, again)


def _changes(column: Ints) -> bool:
    return any(v != column[0] for v in column)


def _compatible(instances: list[Ints], free: list[bool]) -> bool:
    return all(
        min(column) >= (0 if position else 2)
        for column, position in zip(zip(*instances), free)
        if _changes(column)
    )


def _explain(
    graph: Graph,
    ints: Ints,
    instances: list[Ints],
    free: list[bool],
    again: bool,
    related: bool = False,
) -> Proposal | str:
    """`free`: which integers are positions; `again`: a program that took some of them for constants
    did not fit; `related`: sizes of inputs may be computed from those before them."""
    explained = _Explanation(graph, instances, free, again, related)
    for position in range(len(ints)):
        unexplained = explained.go_on(position)
        if unexplained is not None:
            return unexplained
    return Proposal(graph, ints, instances, explained.sizes, explained.origins, free)


class _Explanation:
    """An expression for each integer of the instances, in the order of `split`: `sizes`. Their
    symbols are the integers at `origins`."""

    def __init__(
        self,
        graph: Graph,
        instances: list[Ints],
        free: list[bool],
        again: bool,
        related: bool,
    ) -> None:
        self.free = free
        self.related = related
        self.columns = list(zip(*instances))
        self.where = list(_positions(graph))
        self.leaf_sizes = sum(leaf.shape.rank for leaf in graph.leaves)
        # else positions have nothing to do with sizes, except those that they cut out
        self.varies = any(map(_changes, self.columns[: self.leaf_sizes]))
        # one has nothing to do with another
        self.alone = [
            position and place[1] in POSITIONS.get(place[0].target, ())
            for position, place in zip(free, self.where)
        ]
        self.kinds = self._changing_kinds() if again else set()
        self.solver = _Solver()
        self.origins: dict[str, int] = {}
        self.sizes: list[Size] = []
        # the node looked at last, and its positions
        self.node: Node | int | None = None
        self.cut: list[tuple[Ints, Size]] = []

    def _changing_kinds(self) -> set[tuple]:
        return {
            _kind(*place)
            for column, place, own in zip(self.columns, self.where, self.alone)
            if own and _changes(column)
        }

    def go_on(self, position: int) -> str | None:
        """Add the size at a position; the reason where no expression gives it."""
        column = self.columns[position]
        is_free = self.free[position]
        node, _, name = self.where[position]
        if self.node is not node:
            self.node = node
            self.cut = []
        if self._constant(position):
            size = column[0]
        else:
            computed = position >= self.leaf_sizes and not is_free
            size = self._expression(position)
            if size is None:
                if computed:
                    at = f" at {node.source}" if node.source else ""
                    return (
                        f"{node.target}{at}: {name} was {column[1]}, is {column[0]}; no expression"
                        " of the input sizes gives these values"
                    )
                size = self._symbol(position)
            elif computed:
                self.solver.add(column, size)
        self.sizes.append(size)
        if is_free:
            self.cut.append((column, size))
        return None

    def _constant(self, position: int) -> bool:
        column = self.columns[position]
        if _changes(column):
            return False
        moves = self.alone[position] and column[0] >= 0
        return not (moves and _kind(*self.where[position]) in self.kinds)

    def _expression(self, position: int) -> Size | None:
        """What gives an integer that changes, from those before it."""
        column = self.columns[position]
        known = self.solver.known
        first = position < self.leaf_sizes and not self.related
        if first or self.free[position] and not self.varies:
            return None if self.alone[position] else known.get(column)
        return known.get(column) or _between(column, self.cut) or self.solver.solve(column)

    def _symbol(self, position: int) -> Size:
        """A new symbol, which is the integer at this position."""
        name = f"s{len(self.origins)}"
        self.origins[name] = position
        size = symbol(name)
        if not self.alone[position]:
            self.solver.add(self.columns[position], size)
        return size


class Families:
    """What was seen of each structure; the oldest structures leave."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple, Family] = OrderedDict()
        # arrays whose sizes have varied, in one structure or between them: None in place of those
        self._varied: set[tuple] = set()
        # dimensions of the integers that came from the CPU: tokens, masks and labels, not weights
        self._tokens: dict[tuple[str, int], Ints] = {}

    def of(self, bones: tuple) -> Family:
        """The family of a structure, made when it is new."""
        found = self._known.get(bones)
        if found is None:
            found = self._known[bones] = Family()
            while len(self._known) > STRUCTURES:
                self._known.popitem(last=False)
        return found

    def vary(self, leaves: Sequence[Leaf]) -> None:
        """Sizes of these leaves are symbols: they are likely to vary in other structures, too."""
        if len(self._varied) > STRUCTURES:
            self._varied.clear()
        for shape in [leaf.shape for leaf in leaves]:
            if not shape.is_static:
                dims = [None if isinstance(n, Dim) else n for n in shape.dims]
                self._varied.add((shape.dtype, *dims))

    def see(self, leaves: Sequence[Array]) -> None:
        """A structure is compiled for the first time: mark the sizes of its leaves that vary."""
        tokens = [x for x in leaves if x.bounds is not None and x.shape.kind in "psu"]
        for shape in [leaf.shape for leaf in tokens]:
            last = self._tokens.get((shape.dtype, shape.rank), shape.dims)
            self._tokens[shape.dtype, shape.rank] = shape.dims
            if last != shape.dims:
                dims = [n if n == m else None for n, m in zip(shape.dims, last)]
                self._varied.add((shape.dtype, *dims))
        for leaf in leaves:
            leaf.varying |= self._varying(leaf.shape)
        varying = {n for leaf in leaves for n in leaf.varying}
        for leaf in tokens:  # equal sizes are one size
            leaf.varying |= varying.intersection(leaf.shape.dims)

    def _varying(self, shape: Shape) -> frozenset[int]:
        """The sizes of a leaf that have varied in leaves like it."""
        found: set[int] = set()
        for dtype, *dims in self._varied:
            if dtype == shape.dtype and len(dims) == shape.rank:
                if all(a in (None, n) for a, n in zip(dims, shape.dims)):
                    found.update(n for a, n in zip(dims, shape.dims) if a is None)
        return frozenset(found)

    def clear(self) -> None:
        self._known.clear()
        self._varied.clear()
        self._tokens.clear()
