"""Choosing the loops of a kernel before it is written: which dimensions collapse into one, which
must be split.

`plan_loops` walks the expressions once with symbolic indices and looks at the addresses that come
out. Neighbouring dimensions through which every address steps evenly become one loop; a dimension
that a reshape cuts is split where the reshape cuts it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    DTYPES,
    OPCODES,
    POINTWISE,
    Dims,
    Instruction,
    Size,
    product,
)

from ..llvm import Emit, Unit
from ..llvm.scalar import Value
from . import index as ix
from .block import CodegenError
from .index import Index, Var
from .kernel_values import Condition
from .registry import VALUES

_POINTWISE = frozenset(POINTWISE) | {"copy", "opt-barrier"}
_MAX_SPLITS = 12


class Planner:
    """Looks like a Kernel to value emitters; collects the addresses they would use, and what the
    values would cost."""

    def __init__(self, leaves: Sequence[Instruction]) -> None:
        self.leaves = frozenset(leaves)
        self.accesses: dict[Index, None] = {}
        self.conditions: dict[Condition, None] = {}
        self.e = Emit(1, [], Unit())
        self.cost = 0
        self.dtypes: set[str] = set()  # of the values that are vectors
        # element types of the arrays that are read, without those that only give addresses
        self.moved: set[str] = set()
        self._settling = False
        self._seen: set[tuple[Instruction, tuple[Index, ...]]] = set()

    def value(self, x: Instruction, index: tuple[Index, ...]) -> Value:
        dummy: Value = ("%0", "%0") if x.kind == "c" else "%0"
        stack = [(x, index)]
        while stack:
            key = x, index = stack.pop()
            if key in self._seen:
                continue
            self._seen.add(key)
            if index:  # scalars stay in scalar registers
                self.dtypes.add(x.dtype)
            if x in self.leaves:
                if not self._settling:
                    self.moved.add(x.dtype)
                self.note(ix.linear(index, x.dims) if index else ix.ZERO)
            elif x.op in _POINTWISE:
                self.cost += OPCODES[x.op].weight
                stack.extend((o, index if o.rank == len(index) else ()) for o in x.operands)
            elif x.op != "constant" or x.size != 1:
                emitter = VALUES.get(x.op)
                if emitter is None:
                    raise CodegenError(
                        f"{x.op} {x.shape} cannot be computed inside a kernel: it needs a step of"
                        " its own"
                    )
                self.cost += OPCODES[x.op].weight
                emitter(self, x, index)
        return dummy

    def note(self, index: Index) -> None:
        self.accesses[index] = None

    def element(self, index: Index, kind: str) -> str:
        self.note(index)
        return "%0"

    def scalar(self, index: Index) -> str:
        self.note(index)
        return "%0"

    def condition(self, conditions: Sequence[Condition]) -> str:
        if self._settling:
            self.accesses.update(dict.fromkeys(index for index, _, _ in conditions))
        self.conditions.update(dict.fromkeys(conditions))
        return "%0"

    @contextmanager
    def guard(self, conditions: Sequence[Condition]) -> Iterator[None]:
        self.condition(conditions)
        yield

    def settle(self) -> None:
        """Also visit the index arrays that addresses are loaded from."""
        done = 0
        self._settling = True
        while done < len(self.accesses):
            todo = list(self.accesses)[done:]
            done = len(self.accesses)
            for v in ix.variables(todo):
                if v.kind == "value":
                    self.value(*v.payload)


@frozen
class Loops:
    """`extents`: sizes of the loops, outermost first. `cost`: vector instructions per element.
    `split`: factors of every dimension."""

    extents: Dims
    split: tuple[Dims, ...]
    groups: tuple[Dims, ...]  # the factors that each loop runs over
    cost: int
    dtypes: frozenset[str]
    moved: frozenset[str]  # of the arrays that are read element by element
    # a loop along which some array is contiguous that is strided along the innermost loop
    across: int | None = None
    # some array's elements lie in turns along the innermost loop: (at all, and the same for every
    # turn of the loop around it)
    turns: tuple[bool, bool] = (False, False)
    # by loop: whether in some array rows are apart, and what lies inside of the loop is, too
    apart: tuple[bool, ...] = ()
    # where each loop is cut: no condition changes between two neighbours
    cuts: tuple[Dims, ...] = ()

    def index(self, loops: Sequence[Index]) -> tuple[Index, ...]:
        """The multi-index over the planned dimensions, from one Index per loop."""
        factors = [
            f for i, group in zip(loops, self.groups, strict=True) for f in ix.delinear(i, group)
        ]
        pending = iter(factors)
        return tuple(
            (
                ix.linear([next(pending) if f != 1 else ix.ZERO for f in parts], parts)
                if parts
                else ix.ZERO
            )
            for parts in self.split
        )


def plan_loops(
    walk: Callable[[Planner, tuple[Index, ...]], None],
    dims: Sequence[Size],
    leaves: Sequence[Instruction],
    lanes: int = 1,
    most: int = 1,
) -> Loops:
    """Loops over `dims` for the values that `walk(planner, index)` asks for. The last dimension
    stays whole where vectors of so many `lanes` have whole parts of it. Loops are cut into `most`
    operations at most."""
    split = [[d] for d in dims]
    for _ in range(_MAX_SPLITS):
        variables = [
            [ix.variable("loop", (f"d{d}.{j}",), f, 1) for j, f in enumerate(parts)]
            for d, parts in enumerate(split)
        ]
        index = tuple(
            ix.linear(
                [ix.of(v) if f != 1 else ix.ZERO for v, f in zip(vs, parts, strict=True)],
                parts,
            )
            for vs, parts in zip(variables, split, strict=True)
        )
        planner = Planner(leaves)
        walk(planner, index)
        cuts, others = _cuts(planner.conditions, most // max(1, planner.cost))
        planner.accesses.update(dict.fromkeys(others))
        planner.settle()
        if not _refine(planner.accesses, variables, split, lanes):
            break
    order = [
        v
        for vs, parts in zip(variables, split, strict=True)
        for v, f in zip(vs, parts, strict=True)
        if f != 1
    ]
    groups = _merge(order, list(planner.accesses), cuts)
    extents = tuple(product(v.extent for v in g) for g in groups)
    factors = tuple(tuple(v.extent for v in g) for g in groups)
    across = _across(groups, planner.accesses)
    return Loops(
        extents,
        tuple(map(tuple, split)),
        factors,
        planner.cost,
        frozenset(planner.dtypes),
        frozenset(planner.moved),
        across,
        _turns(groups, planner.accesses),
        _apart(groups, planner.accesses),
        tuple(
            (0, *(product(inner) * n for n in sorted(cuts.get(g[0], ()))), size)
            for g, (_, *inner), size in zip(groups, factors, extents, strict=True)
        ),
    )


def _refine(
    accesses: Iterable[Index],
    variables: list[list[Var]],
    split: list[list[Size]],
    lanes: int,
) -> bool:
    """Split the dimension that some quotient or remainder cuts evenly. False when there is none."""
    for v in sorted(ix.variables(accesses), key=lambda v: v.serial):
        if v.kind not in ("div", "mod"):
            continue
        inner, d = v.payload
        if (
            len(inner.terms) != 1
            or inner.const != 0
            or inner.terms[0][1] != 1
            or inner.terms[0][0].kind != "loop"
        ):
            continue
        var = inner.terms[0][0]
        outer = ix.exact(var.extent, d)
        if outer is None:
            continue
        if (
            var in variables[-1]
            and ix.exact(lanes, d) is not None
            and ix.exact(var.extent, lanes) is not None
        ):
            continue
        for vs, parts in zip(variables, split, strict=True):
            if var in vs:
                at = vs.index(var)
                parts[at : at + 1] = [outer, d]
                return True
    return False


def _cuts(conditions: Iterable[Condition], most: int) -> tuple[dict[Var, set[int]], list[Index]]:
    """Where loop variables are cut, into `most` parts in all, so that conditions are known in each
    part; and what other conditions depend on."""
    cuts: dict[Var, set[int]] = {}
    others = []
    for index, *bounds in conditions:
        match index.terms:
            case ((Var(kind="loop", extent=int(size)) as var, 1 | -1 as step),):
                at = [(n - index.const) * step + (step < 0) for n in bounds]
                cuts.setdefault(var, set()).update(
                    n for n in at if isinstance(n, int) and 0 < n < size
                )
                if all(isinstance(n, int) for n in at):
                    continue
        others.append(index)
    if prod(len(at) + 1 for at in cuts.values()) <= most:
        return cuts, others
    return {}, [index for index, _, _ in conditions]


def _merge(
    order: list[Var], accesses: list[Index], cuts: Mapping[Var, Collection[int]]
) -> list[list[Var]]:
    """Group neighbouring loop variables that every address treats as one; one that is cut is the
    first of its group."""
    steps = [dict(i.terms) for i in accesses]
    opaque = {
        w
        for v in ix.variables(accesses)
        if v.kind in ("div", "mod")
        for w in ix.variables((v.payload[0],))
    }
    groups: list[list[Var]] = []
    for v in order:
        last = groups[-1][-1] if groups else None
        if (
            last is not None
            and last not in opaque
            and v not in opaque
            and not cuts.get(v)
            and all(s.get(last, 0) == s.get(v, 0) * v.extent for s in steps)
        ):
            groups[-1].append(v)
        else:
            groups.append([v])
    return groups


def _across(groups: list[list[Var]], accesses: Iterable[Index]) -> int | None:
    """See Loops.across."""
    if len(groups) < 2:
        return None
    inner = groups[-1][-1]
    for index in accesses:
        steps = dict(index.terms)
        if steps.get(inner, 0) not in (0, 1) and all(v.kind == "loop" for v in steps):
            for number, group in enumerate(groups[:-1]):
                if steps.get(group[-1]) == 1:
                    return number
    return None


def _turns(groups: list[list[Var]], accesses: Iterable[Index]) -> tuple[bool, bool]:
    """See Loops.turns."""
    found = [dict(i.terms) for i in accesses if groups and i.terms]
    found = [s for s in found if s.get(groups[-1][-1], 0) not in (0, 1)]
    around = groups[-2] if len(groups) > 1 else []
    return bool(found), bool(around) and any(not any(v in s for v in around) for s in found)


def _apart(groups: list[list[Var]], accesses: Iterable[Index]) -> tuple[bool, ...]:
    """See Loops.apart."""
    sizes = [product(v.extent for v in group) for group in groups]
    steps = [dict(i.terms) for i in accesses]
    rows = [s for s in steps if groups and groups[-1][-1] in s]
    return tuple(
        any(s.get(group[-1], 0) not in (0, sizes[-1], product(sizes[n + 1 :])) for s in rows)
        for n, group in enumerate(groups)
    )


def stored_bits(dtypes: Iterable[str]) -> int:
    """Bits of the widest element, or part of a complex one, in memory."""
    rows = [DTYPES[name] for name in dtypes]
    return max((8 * row.itemsize // (2 if row.kind == "c" else 1) for row in rows), default=32)


def widest_bits(dtypes: frozenset[str] | set[str]) -> int:
    """Bits of the widest register that values of these types need."""
    bits = 8
    for name in dtypes:
        row = DTYPES[name]
        if row.kind == "c":
            bits = max(bits, row.bits // 2)
        elif row.kind == "f":
            bits = max(bits, row.bits, 32)
        elif row.kind in "su":
            bits = max(bits, row.bits)
    return bits
