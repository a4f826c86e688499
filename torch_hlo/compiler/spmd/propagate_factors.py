"""One step of sharding propagation: what the factor rule of an instruction says about the
placements of its operands and results.

    new = transfer(rule, states)       # one State per array, operands first; the same objects where
                                       # nothing changed

The rule's factors (hlo/sharding/factors.py) are indices that several dimensions share. Each state
is projected on them; a factor takes the longest list of axes that no array contradicts; arrays that
lack axes of the list get them, if the dimension is open and the axes are free there. When two
factors want the same axis in one array, the factor that shards the weightiest array has it (as in
Shardy's aggressive propagation). Programs repeat their layers, so steps are memoized: states and
rules are interned and compare by identity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Ints
from torch_hlo.hlo.sharding.factors import Dims, Factors
from torch_hlo.hlo.sharding.sharding import (
    Axis,
    DimSharding,
    Mesh,
    Sharding,
    simplify,
)

Axes = tuple[Axis, ...]


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What is decided of one array: axes per dimension; which dimensions are open; axes it must not
    use (of them `manual`, `unreduced`). Made by `_state`: equal ones are one object."""

    dims: tuple[Axes, ...]
    open: tuple[bool, ...]
    blocked: Axes
    manual: Axes
    unreduced: Axes

    @staticmethod
    def free(rank: int, manual: Axes = ()) -> State:
        """Nothing decided."""
        return _state(((),) * rank, (True,) * rank, manual, manual, ())

    @staticmethod
    def given(s: Sharding, priority: int | None = None) -> State:
        """The annotation `s`; dimensions of a later priority than `priority` are hidden: no axes
        yet, but theirs are taken."""
        hidden = [priority is not None and dim.priority > priority for dim in s.dims]
        dims = tuple(() if h else simplify(dim.axes) for h, dim in zip(hidden, s.dims))
        later = tuple(axis for h, dim in zip(hidden, s.dims) if h for axis in dim.axes)
        is_open = tuple(dim.open and not h for h, dim in zip(hidden, s.dims))
        return _state(
            dims,
            is_open,
            s.replicated + s.unreduced + s.manual + later,
            s.manual,
            s.unreduced,
        )

    def sharding(self, mesh: Mesh) -> Sharding:
        return Sharding(
            mesh,
            tuple(DimSharding(axes) for axes in self.dims),
            unreduced=self.unreduced,
            manual=self.manual,
        )

    def with_dims(self, dims: tuple[Axes, ...]) -> State:
        return _state(dims, self.open, self.blocked, self.manual, self.unreduced)


_state = cache(State)


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """The factors of an instruction next to the sizes of its arrays.

    passes: every factor is in the result and in an operand. weights: per array, whose axes win when
    two factors want the same one: the larger array's, for it would be dearer to move. But a table
    that is looked up follows the indices: these say which device works on what (a batch of tokens),
    the table is a parameter that several devices store in parts."""

    factors: Factors
    arrays: tuple[Dims, ...]
    sizes: tuple[Ints, ...]
    passes: bool
    weights: tuple[float, ...]

    @staticmethod
    def of(factors: Factors, sizes: tuple[Ints, ...], op: str = "") -> Rule:
        arrays = factors.operands + factors.results
        ins = {f for dims in factors.operands for d in dims for f in d}
        outs = {f for dims in factors.results for d in dims for f in d}
        weights = tuple(
            math.inf if op == "gather" and i == 1 else math.prod(s) for i, s in enumerate(sizes)
        )
        return Rule(factors, arrays, sizes, ins == outs, weights)


@cache
def identity(sizes: Ints) -> Rule:
    """The rule of a value that flows from one place to another: a loop's state, a program's
    output."""
    dims = tuple((f,) for f in range(len(sizes)))
    return Rule.of(Factors(sizes, ("free",) * len(sizes), (dims,), (dims,)), (sizes, sizes))


@dataclass(frozen=True, slots=True, eq=False)
class ManualRule:
    """Entry into a region that is written per device along `axes` (operand whole, result a block):
    they lead each of its dimensions outside."""

    axes: Axes
    passes: bool = True


@frozen
class Reason:
    """Array `target` got axes in dimension `dim` from array `source`, along `factor`."""

    target: int
    dim: int
    factor: int
    source: int


Step = tuple[tuple[State, ...], tuple[Reason, ...]]


@lru_cache(1_000_000)
def transfer(rule: Rule | ManualRule, states: tuple[State, ...]) -> Step:
    """The states after one propagation along `rule`, and why."""
    return _manual(rule, *states) if isinstance(rule, ManualRule) else _transfer(rule, states)


def clear() -> None:
    """Forget the memoized steps and states of earlier programs."""
    for memo in (transfer, identity, _state):
        memo.cache_clear()


def _manual(rule: ManualRule, outer: State, inner: State) -> Step:
    reasons = []
    outside = list(outer.dims)
    inside = list(inner.dims)
    for d, axes in enumerate(outer.dims):
        lead = 0
        while lead < len(axes) and any(axes[lead].overlaps(m) for m in rule.axes):
            lead += 1
        rest = axes[lead:]
        if (
            extends(inner.dims[d], rest)
            and outer.open[d]
            and not any(a.overlaps(u) for a in inner.dims[d] for u in _used(outer, d))
        ):
            outside[d] = axes[:lead] + inner.dims[d]
            reasons.append(Reason(0, d, d, 1))
        elif (
            extends(rest, inner.dims[d])
            and inner.open[d]
            and not any(a.overlaps(u) for a in rest for u in _used(inner, d))
        ):
            inside[d] = rest
            reasons.append(Reason(1, d, d, 0))
    return (
        outer.with_dims(tuple(outside)),
        inner.with_dims(tuple(inside)),
    ), tuple(reasons)


def _used(state: State, but: int) -> list[Axis]:
    """Axes that dimension `but` cannot have."""
    return [a for d, axes in enumerate(state.dims) if d != but for a in axes] + list(state.blocked)


def extends(longer: Axes, shorter: Axes) -> bool:
    """Whether `shorter` is a proper beginning of `longer`."""
    return len(longer) > 0 and longer != shorter and _rest(longer, shorter) is not None


def _rest(longer: Axes, shorter: Axes) -> Axes | None:
    """What `longer` has after `shorter`; None when it does not begin with it. Sub-axes count: x
    begins with x:(1)2."""
    n = len(shorter)
    if longer[:n] == shorter:
        return longer[n:]
    if n == 0 or len(longer) < n or longer[: n - 1] != shorter[:-1]:
        return None
    a = longer[n - 1]
    b = shorter[-1]
    if a.name == b.name and a.pre == b.pre and a.size % b.size == 0:
        return (Axis(a.name, a.pre * b.size, a.size // b.size), *longer[n:])
    return None


def project(dims: Dims, sizes: Ints, state: State) -> tuple[dict[int, Axes], set[int]]:
    """The axes of each factor of an array, and the dimensions whose axes do not follow its
    factors."""
    found: dict[int, Axes] = {}
    odd: set[int] = set()
    for d, factors in enumerate(dims):
        axes = state.dims[d]
        if len(factors) == 1:
            found[factors[0]] = axes
            continue
        pending = list(axes)
        for f in factors:
            room = sizes[f]
            got = []
            while pending and room > 1:
                axis = pending[0]
                # the major part of the axis that divides what is left of the factor
                common = math.gcd(room, axis.size)
                if common == 1:
                    break
                got.append(Axis(axis.name, axis.pre, common))
                pending[0] = Axis(axis.name, axis.pre * common, axis.size // common)
                if pending[0].size == 1:
                    pending.pop(0)
                room //= common
            found[f] = simplify(got)
            if room > 1:
                break
        if pending:
            odd.add(d)
    return found, odd


def _wanted(
    rule: Rule, views: list[tuple[dict[int, Axes], set[int]]]
) -> list[tuple[float, int, Axes, int]]:
    """The axes that some array has a factor split over and no other contradicts, heaviest arrays
    first: (-weight of the array, factor, axes, array)."""
    wanted: list[tuple[float, int, Axes, int]] = []
    for f, role in enumerate(rule.factors.roles):
        if role == "whole":
            continue
        best: Axes = ()
        source = -1
        size = 0.0
        clash = False
        for t, (found, _) in enumerate(views):
            axes = found.get(f, ())
            if not axes:
                continue
            weight = rule.weights[t]
            if source < 0 or extends(axes, best):
                best = axes
                source = t
                size = weight
            elif axes == best:
                if weight > size:
                    source = t
                    size = weight
            elif not extends(best, axes):
                clash = True
                break
        if source >= 0 and not clash:
            wanted.append((-size, f, best, source))
    return sorted(wanted)


def _transfer(rule: Rule, states: tuple[State, ...]) -> Step:
    factors = rule.factors
    views = [project(dims, factors.sizes, state) for dims, state in zip(rule.arrays, states)]
    reasons: list[Reason] = []
    result = list(states)
    for _, f, axes, source in _wanted(rule, views):
        for t, (found, odd) in enumerate(views):
            d = _dimension(rule.arrays[t], f)
            if d is None or d in odd or not result[t].open[d]:
                continue
            have = found.get(f, ())
            more = _rest(axes, have)
            if not more:
                continue
            state = result[t]
            used = _used(state, d)
            used += [a for g in rule.arrays[t][d] if g != f for a in found.get(g, ())]
            count, room = (
                0,
                rule.sizes[t][d] if len(rule.arrays[t][d]) == 1 else factors.sizes[f],
            )
            shards = math.prod(a.size for a in have)
            for axis in more:
                shards *= axis.size
                if (
                    shards > room
                    or len(rule.arrays[t][d]) > 1
                    and room % shards
                    or any(axis.overlaps(u) for u in used)
                ):
                    break
                count += 1
            if not count or not _reachable(rule, t, d, f, found):
                continue
            found[f] = simplify(have + more[:count])
            dims = list(state.dims)
            dims[d] = _joined(rule.arrays[t][d], factors.sizes, found)
            result[t] = state.with_dims(tuple(dims))
            reasons.append(Reason(t, d, f, source))
    return tuple(result), tuple(reasons)


def _dimension(dims: Dims, factor: int) -> int | None:
    return next((d for d, factors in enumerate(dims) if factor in factors), None)


def _reachable(rule: Rule, t: int, d: int, f: int, found: dict[int, Axes]) -> bool:
    """Factors of a dimension before `f` are split into single elements (blocks of the dimension are
    then blocks of `f`)."""
    for g in rule.arrays[t][d]:
        if g == f:
            return True
        if math.prod(a.size for a in found.get(g, ())) != rule.factors.sizes[g]:
            return False
    return False


def _joined(dim: Ints, sizes: Ints, found: dict[int, Axes]) -> Axes:
    joined: list[Axis] = []
    for f in dim:
        joined += found.get(f, ())
        if len(dim) > 1 and math.prod(a.size for a in found.get(f, ())) != sizes[f]:
            break
    return simplify(joined)
