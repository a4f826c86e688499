"""Which atoms split which factors of an instruction: the layouts its operands are brought into, and
the one its result comes out with.

The choices are the ways to merge what operands and wanted results already have, in every order of
precedence. Each is priced: bytes to bring the operands there, to combine partial results and to
bring results to where they are wanted, edges exchanged with neighbours, and the work of one device,
at FLOPS_PER_BYTE operations for the time of a byte. The cheapest wins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import permutations

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction
from torch_hlo.hlo.sharding.factors import Dims, Factors

from .grid import Atoms, Grid, Layout
from .reshard import Local, Planner

FLOPS_PER_BYTE = 4  # work of a device in the time it sends a byte
MAX_ORDERS = 24

Assignment = tuple[Atoms, ...]  # per factor


@frozen
class Choice:
    atoms: Assignment
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    partial: Atoms  # atoms of the factors with role sum


@frozen
class Question:
    """Everything a choice depends on; `extra` prices an assignment beyond the common terms, None
    forbids it."""

    x: Instruction
    rule: Factors
    locals: tuple[Local, ...]
    wants: tuple[Layout | None, ...]  # per result
    allowed: tuple[bool, ...]  # per factor: may be split
    extra: Callable[[Assignment], float | None] | None = None


def choose(planner: Planner, q: Question) -> tuple[float, Choice]:
    """The cheapest assignment and its price."""
    best: tuple[float, Choice] | None = None
    for atoms in _candidates(planner.grid, q):
        choice = _choice(q.rule, atoms)
        price = _price(planner, q, choice)
        if price is not None and (best is None or price < best[0]):
            best = (price, choice)
    return best or (float("inf"), _choice(q.rule, ((),) * len(q.rule.sizes)))


def _choice(rule: Factors, atoms: Assignment) -> Choice:
    def layout(dims: Dims) -> Layout:
        return tuple(sum((atoms[f] for f in d), ()) for d in dims)

    partial = tuple(
        sorted(a for f, role in enumerate(rule.roles) if role == "sum" for a in atoms[f])
    )
    return Choice(
        atoms,
        tuple(map(layout, rule.operands)),
        tuple(map(layout, rule.results)),
        partial,
    )


def _price(planner: Planner, q: Question, choice: Choice) -> float | None:
    total = 0.0
    if q.extra is not None:
        more = q.extra(choice.atoms)
        if more is None:
            return None
        total += more
    for local, layout in zip(q.locals, choice.operands):
        total += planner.bytes(local, layout)
    for shape, layout, want in zip(q.x.shape.arrays, choice.results, q.wants):
        if want is None and not choice.partial:
            continue
        made = _Sized(shape.itemsize)
        whole = Local(made, shape.dims, layout, choice.partial)  # type: ignore[arg-type]
        total += planner.bytes(whole, want or layout)
    devices = 1
    for f, atoms in enumerate(choice.atoms):
        if q.x.op == "dot" and q.rule.roles[f] == "sum":
            held = _held(planner.grid, q, f)
            if not held <= {a for other in choice.atoms for a in other}:
                # every device would repeat products that the operands' placement has already
                # divided among them
                return None
            atoms = tuple(a for a in atoms if a in held)
        devices *= planner.grid.parts(atoms)
    return total + work(q.x, q.rule) / devices / FLOPS_PER_BYTE


def _held(grid: Grid, q: Question, factor: int) -> set[int]:
    """Atoms that split `factor` in every operand already. Summing partial products over them is
    what the annotations meant; to cut an operand that is whole for it saves work, but the sums are
    often larger than the operand that could be gathered once for several products."""
    found: set[int] | None = None
    for dims, local in zip(q.rule.operands, q.locals):
        if any(factor in d for d in dims):
            atoms = {
                a
                for f, part in split(grid, q.rule, dims, local.layout)
                if f == factor
                for a in part
            }
            found = atoms if found is None else found & atoms
    return found or set()


@frozen
class _Sized:
    """Stands for an instruction that is not made yet."""

    itemsize: int


def work(x: Instruction, rule: Factors) -> float:
    """Operations of the whole instruction: two per term of a product, else one per element."""
    if x.op in ("dot", "convolution"):
        return 2.0 * math.prod(rule.sizes)
    sizes = [s.size for s in x.shape.arrays] + [o.size for o in x.operands if not o.is_tuple]
    return float(max((s for s in sizes if isinstance(s, int)), default=0))


def _candidates(grid: Grid, q: Question) -> list[Assignment]:
    """Distinct assignments, the one that follows results before operands first."""
    rule = q.rule
    given: list[list[tuple[int, Atoms]]] = []
    # atoms of a factor that must be whole may split a free one instead
    displaced: list[list[tuple[int, Atoms]]] = []
    for dims, layout in [
        *zip(rule.results, q.wants),
        *((d, v.layout) for d, v in zip(rule.operands, q.locals)),
    ]:
        if layout is not None:
            found = [(f, a) for f, a in split(grid, rule, dims, layout) if q.allowed[f]]
            if found and found not in given:
                given.append(found)
            rest = tuple(
                a for f, atoms in split(grid, rule, dims, layout) if not q.allowed[f] for a in atoms
            )
            displaced += [
                [(f, rest)]
                for f, role in enumerate(rule.roles)
                if rest and role == "free" and q.allowed[f]
            ]
    orders = (
        permutations(range(len(given)))
        if len(given) <= 4
        else (
            (i, *(j for j in range(len(given)) if j != i))
            for i in range(min(len(given), MAX_ORDERS))
        )
    )
    merged: dict[Assignment, None] = {}
    for order in orders:
        merged.setdefault(_merge(grid, rule, [given[i] for i in order]))
    sums = [f for f, role in enumerate(rule.roles) if role == "sum"]
    for atoms in list(merged):
        if any(atoms[f] for f in sums):  # the same without partial results
            kept = [[(f, a) for f, a in g if f not in sums] for g in given]
            merged.setdefault(
                _merge(
                    grid,
                    rule,
                    [
                        [(f, a) for f, a in enumerate(atoms) if f not in sums],
                        *kept,
                    ],
                )
            )
    for entries in given:
        merged.setdefault(_merge(grid, rule, [entries]))
    for entries in displaced:
        merged.setdefault(_merge(grid, rule, [*given, _unsplit(entries, given)]))
    merged.setdefault(((),) * len(rule.sizes))
    return list(merged)


def _unsplit(
    entries: list[tuple[int, Atoms]], given: list[list[tuple[int, Atoms]]]
) -> list[tuple[int, Atoms]]:
    """`entries` behind the atoms that their factors have already."""
    return [
        (f, next((a for g in given for e, a in g if e == f), ()) + atoms) for f, atoms in entries
    ]


def _merge(grid: Grid, rule: Factors, given: Sequence[Sequence[tuple[int, Atoms]]]) -> Assignment:
    """Earlier entries have precedence; later ones add atoms that are still unused to factors that
    have none, or continue them."""
    result: list[Atoms] = [()] * len(rule.sizes)
    used: set[int] = set()
    for entries in given:
        for f, atoms in entries:
            have = result[f]
            if atoms[: len(have)] == have:
                for a in atoms[len(have) :]:
                    if a in used:
                        break
                    used.add(a)
                    result[f] += (a,)
    return _sound(grid, rule, result)


def _sound(grid: Grid, rule: Factors, atoms: list[Atoms]) -> Assignment:
    """In a dimension of several factors each split one but the last must be split entirely, and
    evenly."""
    changed = True
    while changed:
        changed = False
        for dims in (*rule.operands, *rule.results):
            for factors in dims:
                if len(factors) < 2:
                    continue
                full = True
                for f in factors:
                    keep = atoms[f] if full else ()
                    while rule.sizes[f] % grid.parts(keep):
                        keep = keep[:-1]
                    if keep != atoms[f]:
                        atoms[f], changed = keep, True
                    full = full and grid.parts(keep) == rule.sizes[f]
    return tuple(atoms)


def split(grid: Grid, rule: Factors, dims: Dims, layout: Layout) -> list[tuple[int, Atoms]]:
    """The atoms of each factor when an array has `layout`; atoms that cut across factors are left
    out."""
    found = []
    for factors, atoms in zip(dims, layout, strict=True):
        if len(factors) == 1:
            if atoms:
                found.append((factors[0], atoms))
            continue
        at = 0
        for f in factors:
            begin = at
            parts = 1
            while at < len(atoms) and rule.sizes[f] % (parts * grid.sizes[atoms[at]]) == 0:
                parts = parts * grid.sizes[atoms[at]]
                at = at + 1
            if at > begin:
                found.append((f, atoms[begin:at]))
            if parts < rule.sizes[f]:
                break
    return found
