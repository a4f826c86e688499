"""From one layout to another with the fewest bytes.

    plan = planner.plan((1024, 512), ((0,), ()), ((), (0,)))     # one all-to-all
    y = planner.apply(local, layout)

A plan is a list of moves of atoms between the dimensions of an array:

    slice     an atom starts to split a dimension: each device keeps its part
        no bytes
    exchange  the minor atoms of one dimension become the minor atoms of another: all-to-all
        block * (n-1)/n
    gather    the minor atoms of a dimension split it no more: all-gather
        result * (n-1)/n
              (a sum of zeros and the blocks when more than half of the gathered array would be
                  padding)
    permute   other atoms of the same sizes take the places of the old ones: collective-permute
        block

(compare Rink et al., Memory-efficient array redistribution through portable collective
communication, 2021.) Partial results are reduced on the way: reduce-scatter when the new layout
splits a dimension over the atoms, else all-reduce. A dimension whose size is not a multiple of its
number of blocks is padded at its end; where padded blocks of old and new layout do not line up, the
dimension is gathered and cut anew.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import replace
from functools import cache
from itertools import takewhile
from typing import Any

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import OPCODES, Instruction, Ints, Shape, build as h, ceildiv, instr, interned

from .grid import Atoms, Grid, Layout


@frozen
class Local:
    """One array inside the per-device program: `x` is this device's block of an array of extents
    `dims` in `layout`.

    Along the atoms in `partial` the devices hold contributions that `reducer` (an opcode) still has
    to combine; `goal` is the layout that the combined value is wanted in. What lies beyond the
    array's end in a padded block is arbitrary. `source`, when given, is the whole array made of
    nothing but constants, iotas and broadcast scalars: any block of it can be made on the spot.
    `rate`: how often the value changes per run of the code; in a loop that runs n times, 1/n for
    what stays the same (its collectives move out of the loop). `view`, when given, is (another
    array, a dimension, a start): this array is what the other has from there on; opcodes that move
    elements may read the other one, which spares the price that this one is `made_for`. `crop`:
    (dimension, start, size) of the part of this array that is meant."""

    x: Instruction
    dims: Ints
    layout: Layout
    partial: Atoms = ()
    reducer: str = "add"
    goal: Layout | None = None
    source: Instruction | None = None
    rate: float = 1.0
    view: tuple[Local, int, int] | None = None
    crop: tuple[int, int, int] | None = None
    made_for: float = 0.0

    @property
    def dtype(self) -> str:
        return self.x.dtype


@frozen
class Move:
    kind: str  # slice, exchange, gather, permute
    dim: int = 0
    to: int = 0
    atoms: Atoms = ()
    old: Layout = ()
    new: Layout = ()


@frozen
class Plan:
    moves: tuple[Move, ...]
    elements: float  # sent per device, in elements


_NONE: frozenset[Layout] = frozenset()


class Planner:
    """Plans and emits changes of layout on one grid; both are remembered."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.plan = cache(self._plan)
        self._done: dict[tuple[object, ...], Local] = {}
        self._cuts: dict[tuple[object, ...], Instruction] = {}
        self._made: dict[tuple[object, ...], frozenset[Layout]] = {}

    # Plans

    def bytes(self, local: Local, new: Layout) -> float:
        """Bytes per device of `apply`; none for what is there already."""
        if local.source is not None or new in self.layouts(local):
            return 0.0
        if local.partial:
            moves, elements, layout = self._reduction(local.dims, local.layout, local.partial, new)
            elements += self.plan(local.dims, layout, new).elements
        else:
            elements = self.plan(local.dims, local.layout, new).elements
        return elements * local.x.itemsize * local.rate

    def layouts(self, local: Local) -> frozenset[Layout]:
        """Layouts that the array has been brought into before."""
        return self._made.get((local.x, local.partial), _NONE)

    def _plan(self, dims: Ints, old: Layout, new: Layout) -> Plan:
        """The cheapest way."""
        if old == new:
            return Plan((), 0.0)
        plans = [self._direct(dims, old, new)]
        for middle in self._relabelled(old, new):
            head = self._permute(dims, old, middle)
            plans.append(_joined(head, self._direct(dims, middle, new)))
        for middle in (*self._relabelled(new, old), self._balanced(old, new)):
            plans.append(_joined(self._direct(dims, old, middle), self._permute(dims, middle, new)))
        return min(plans, key=lambda p: (p.elements, len(p.moves)))

    def _direct(self, dims: Ints, old: Layout, new: Layout) -> Plan:
        """Slices as soon as they fit, then all-to-alls; when neither fits, something is
        gathered."""
        now = list(old)
        moves: list[Move] = []
        total = 0.0
        while tuple(now) != new:
            found = (
                self._slice(dims, now, new)
                or self._exchange(dims, now, new)
                or self._gather(dims, now, new)
            )
            before = tuple(now)
            if found.kind == "slice":
                now[found.dim] += found.atoms
            else:
                now[found.dim] = now[found.dim][: len(now[found.dim]) - len(found.atoms)]
                if found.kind == "exchange":
                    now[found.to] += found.atoms
            moves.append(replace(found, old=before, new=tuple(now)))
            total += self._elements(dims, moves[-1])
        return Plan(tuple(moves), total)

    def _slice(
        self,
        dims: Ints,
        now: list[Atoms],
        new: Layout,
        partial: Container[int] = (),
    ) -> Move | None:
        """The next atoms of some dimension, when no other dimension has them: cut along them, or
        along those that are partial, sum and scatter."""
        used = _atoms(now)

        def test(a: int) -> bool:
            return a not in used and (a in partial) == summed

        for d, (have, want) in enumerate(zip(now, new)):
            if have == want[: len(have)] and len(have) < len(want):
                summed = want[len(have)] in partial
                run = tuple(takewhile(test, want[len(have) :]))
                while run and not self._aligned(dims[d], have, have + run):
                    run = run[:-1]
                if run:
                    return Move("scatter" if summed else "slice", d, atoms=run)
        return None

    def _exchange(self, dims: Ints, now: list[Atoms], new: Layout) -> Move | None:
        for i, have in enumerate(now):
            extra = have[_common(have, new[i]) :]
            for j, target in enumerate(now):
                if i == j or not extra or target != new[j][: len(target)]:
                    continue
                need = new[j][len(target) :]
                for k in range(min(len(extra), len(need)), 0, -1):
                    run = need[:k]
                    fits = (
                        extra[-k:] == run
                        and self._aligned(dims[i], have[:-k], have)
                        and self._aligned(dims[j], target, target + run)
                    )
                    if fits:
                        return Move("exchange", i, j, run)
        return None

    def _gather(self, dims: Ints, now: list[Atoms], new: Layout) -> Move:
        wanted = _atoms(new)
        best: tuple[tuple[bool, int, int], Move] | None = None
        for d, have in enumerate(now):
            extra = have[_common(have, new[d]) :]
            if extra:
                unwanted = [*takewhile(lambda a: a not in wanted, reversed(extra))]
                run = tuple(reversed(unwanted)) or extra[-1:]
                move = Move(
                    "gather",
                    d,
                    atoms=(
                        run if self._aligned(dims[d], have[: len(have) - len(run)], have) else have
                    ),
                )
                rank = (bool(set(run) & wanted), -len(run), d)
                if best is None or rank < best[0]:
                    best = (rank, move)
        if best is None:  # a split that does not line up with the one inside it: cut anew
            d = next(d for d, (have, want) in enumerate(zip(now, new)) if have != want)
            return Move("gather", d, atoms=now[d])
        return best[1]

    def _aligned(self, n: int, outer: Atoms, inner: Atoms) -> bool:
        """Whether blocks over `inner`, which `outer` begins, are cut out of whole blocks over
        `outer`."""
        p = self.grid.parts(outer)
        q = self.grid.parts(inner)
        return p == 1 or ceildiv(n, q) * (q // p) == ceildiv(n, p)

    def _relabelled(self, old: Layout, new: Layout) -> list[Layout]:
        """Layouts with as many blocks per dimension as `old` that a permutation reaches and that
        are nearer to `new`."""
        sizes = self.grid.sizes
        kept = _atoms(new)
        used = _atoms(old)
        # Within each dimension: first what stays there, then what leaves it, last what is dropped.
        found = [tuple(_ordered(have, want, kept) for have, want in zip(old, new))]
        # Atoms that nobody wants give their places to wanted atoms of the same size.
        spare = [a for atoms in old for a in atoms if a not in kept]
        lent: dict[int, int] = {}
        for have, want in zip(old, new):
            missing = [a for a in want if a not in used]
            for a in have:
                fits = (b for b in missing if sizes[b] == sizes[a] and b not in lent.values())
                if a in spare and (match := next(fits, None)) is not None:
                    lent[a] = match
        if lent:
            swapped = [tuple(lent.get(a, a) for a in atoms) for atoms in old]
            found.append(tuple(_ordered(have, want, ()) for have, want in zip(swapped, new)))
        if [self.grid.parts(a) for a in old] == [self.grid.parts(a) for a in new]:
            found.append(new)
        return [f for f in dict.fromkeys(found) if f != old]

    def _balanced(self, old: Layout, new: Layout) -> Layout:
        """A layout with as many blocks per dimension as `new`, in which dimensions keep as many of
        their old atoms as they can; the rest are atoms that other dimensions have too many of, or
        new ones."""
        sizes = self.grid.sizes
        missing = [[sizes[a] for a in atoms] for atoms in new]
        result: list[list[int]] = []
        surplus: list[int] = []
        for have, need in zip(old, missing):
            kept: list[int] = []
            for a in have:
                if sizes[a] in need and len(kept) == len(have[: have.index(a)]):
                    need.remove(sizes[a])
                    kept.append(a)
                else:
                    surplus.append(a)
            result.append(kept)
        used = _atoms(old)
        unused = [a for atoms in new for a in atoms if a not in used] + [
            a for a in range(len(sizes)) if a not in used
        ]
        for kept, need in zip(result, missing):
            for size in need:
                for pool in (surplus, unused):
                    found = next((a for a in pool if sizes[a] == size), None)
                    if found is not None:
                        kept.append(found)
                        surplus = [a for a in surplus if a != found]
                        unused = [a for a in unused if a != found]
                        break
        return tuple(map(tuple, result))

    def _permute(self, dims: Ints, old: Layout, new: Layout) -> Plan:
        if old == new:
            return Plan((), 0.0)
        move = Move("permute", old=old, new=new)
        return Plan((move,), self._elements(dims, move))

    def _elements(self, dims: Ints, move: Move) -> float:
        """Elements that a device sends, on average."""
        n = self.grid.parts(move.atoms)
        if move.kind == "slice":
            return 0.0
        if move.kind == "permute":
            pairs = self.pairs(move.old, move.new)
            return (
                math.prod(self.grid.block(dims, move.old))
                * sum(a != b for a, b in pairs)
                / self.grid.devices
            )
        sent = math.prod(self.grid.block(dims, move.old)) * (n - 1)
        if move.kind == "gather":
            return min(sent, 2 * math.prod(self.grid.block(dims, move.new)) * (n - 1) / n)
        return sent / n

    def pairs(self, old: Layout, new: Layout) -> tuple[tuple[int, int], ...]:
        """(source, target) devices such that every device gets its block of the new layout; devices
        that have it send to themselves."""
        grid = self.grid
        have: dict[tuple[object, ...], list[int]] = {}
        need: dict[tuple[object, ...], list[int]] = {}
        for layout, table in ((old, have), (new, need)):
            columns = [grid.indices(atoms) for atoms in layout]
            for device in range(grid.devices):
                table.setdefault(tuple(c[device] for c in columns), []).append(device)
        pairs = []
        for tile, targets in need.items():
            sources = have[tile]
            both = set(sources) & set(targets)
            pairs += [(d, d) for d in both]
            pairs += zip(
                [s for s in sources if s not in both],
                [t for t in targets if t not in both],
                strict=True,
            )
        return tuple(sorted(pairs))

    def _reduction(
        self, dims: Ints, layout: Layout, partial: Atoms, new: Layout
    ) -> tuple[list[Move], float, Layout]:
        """How partial results become whole ones: slices and reduce-scatters where `new` allows
        them, an all-reduce for the rest."""
        now = list(layout)
        left = set(partial)
        moves: list[Move] = []
        total = 0.0
        while (found := self._slice(dims, now, new, left)) is not None:
            before = tuple(now)
            now[found.dim] += found.atoms
            moves.append(replace(found, old=before, new=tuple(now)))
            if found.kind == "scatter":
                left -= set(found.atoms)
                total += math.prod(self.grid.block(dims, tuple(now))) * (
                    self.grid.parts(found.atoms) - 1
                )
        if left:
            atoms = tuple(sorted(left))
            n = self.grid.parts(atoms)
            moves.append(Move("all-reduce", atoms=atoms))
            total += 2 * math.prod(self.grid.block(dims, tuple(now))) * (n - 1) / n
        return moves, total, tuple(now)

    # Emitting

    def apply(self, local: Local, new: Layout) -> Local:
        """`local` whole (not partial) in layout `new`."""
        if local.layout == new and not local.partial:
            return local
        key = (
            local.x,
            local.dims,
            local.layout,
            local.partial,
            local.reducer,
            local.rate,
            local.view,
            local.crop,
            new,
        )
        found = self._done.get(key)
        if found is None:
            found = self._done[key] = self._apply(local, new)
            self._made[local.x, local.partial] = self.layouts(local) | {new}
        return found

    def _apply(self, local: Local, new: Layout) -> Local:
        x = local.x
        layout = local.layout
        if local.source is not None:
            return replace(local, x=self.block_of(local.source, local.dims, new), layout=new)
        if local.partial:
            moves, _, layout = self._reduction(local.dims, layout, local.partial, new)
            x = self._reduce(local, moves)
        for move in self.plan(local.dims, layout, new).moves:
            x = self._emit(x, local.dims, move)
        return Local(
            x,
            local.dims,
            new,
            rate=local.rate,
            view=local.view,
            crop=local.crop,
            made_for=local.made_for,
        )

    def reduced(self, local: Local, kept: Atoms, new: Layout) -> Local | None:
        """`local` in layout `new`, summed along all atoms but `kept`; None where more than a sum
        leads there."""
        rest = tuple(a for a in local.partial if a not in kept)
        moves, _, layout = self._reduction(local.dims, local.layout, rest, new)
        if layout != new:
            return None
        partial = tuple(a for a in local.partial if a in kept)
        return replace(local, x=self._reduce(local, moves), layout=new, partial=partial)

    def scattered(self, local: Local, atoms: Atoms, new: Layout) -> Local:
        """`local` in layout `new`. Along those of `atoms` that cut it, each device may keep its
        block among zeros, which makes summands."""
        x = local.x
        partial: Atoms = ()
        for d, (n, have, want) in enumerate(zip(local.dims, local.layout, new, strict=True)):
            run = have[len(want) :]
            if (
                have[: len(want)] != want
                or not {*run} <= {*atoms}
                or not self._aligned(n, want, have)
            ):
                return self.apply(local, new)
            if run:
                size = ceildiv(n, self.grid.parts(want))
                x = self._placed(x, d, run, self.grid.parts(run), size)
                partial += run
        return Local(x, local.dims, new, partial, rate=local.rate)

    def _reduce(self, local: Local, moves: Iterable[Move]) -> Instruction:
        x = local.x
        for move in moves:
            if move.kind == "all-reduce":
                x = self.all_reduce(x, move.atoms, local.reducer)
            elif move.kind == "scatter":
                x = self._emit_scatter(x, local.dims, move, local.reducer)
            else:
                x = self._emit(x, local.dims, move)
        return x

    def block_of(self, source: Instruction, dims: Ints, layout: Layout) -> Instruction:
        """This device's block of an array that any device can make."""
        x = source
        for d, (n, atoms) in enumerate(zip(self.grid.block(dims, layout), layout, strict=True)):
            if atoms:
                x = cut(
                    self.grid,
                    fit(x, d, n * self.grid.parts(atoms)),
                    d,
                    self.grid.indices(atoms),
                    n,
                    self._cuts,
                )
        return x

    def all_reduce(self, x: Instruction, atoms: Atoms, reducer: str) -> Instruction:
        return instr(
            "all-reduce",
            (x,),
            to_apply=h.binary_computation(reducer, x.dtype),
            **self.channel(atoms),
        )

    def all_gather(self, x: Instruction, dim: int, atoms: Atoms) -> Instruction:
        return instr("all-gather", (x,), dimensions=(dim,), **self.channel(atoms))

    def channel(self, atoms: Atoms) -> dict[str, Any]:
        """Attributes of a collective among the devices that differ along `atoms`; channels are
        numbered at the end."""
        return dict(
            replica_groups=self.grid.groups(atoms),
            channel_id=1,
            use_global_device_ids=True,
        )

    def all_to_all(self, x: Instruction, dim: int, atoms: Atoms) -> Instruction:
        return instr(
            "all-to-all",
            (x,),
            dimensions=(dim,),
            replica_groups=self.grid.groups(atoms),
            channel_id=1,
        )

    def permute(self, x: Instruction, pairs: Iterable[tuple[int, int]]) -> Instruction:
        return instr("collective-permute", (x,), source_target_pairs=tuple(pairs), channel_id=1)

    def _emit(self, x: Instruction, dims: Ints, move: Move) -> Instruction:
        grid = self.grid
        d = move.dim
        if move.kind == "permute":
            return self.permute(x, self.pairs(move.old, move.new))
        n = grid.parts(move.atoms)
        block = grid.block(dims, move.new)
        if move.kind == "slice":
            return cut(grid, fit(x, d, block[d] * n), d, grid.indices(move.atoms), block[d])
        if move.kind == "gather":
            if x.shape.sizes[d] * n > 2 * block[d] and x.dtype != "pred":
                return self.all_reduce(
                    self._placed(x, d, move.atoms, n, block[d]), move.atoms, "add"
                )
            return fit(self.all_gather(x, d, move.atoms), d, block[d])
        # exchange: dimension `to` falls into n pieces, which come back as n pieces of dimension d
        to = move.to
        x = fit(x, to, block[to] * n)
        sizes = x.dims
        x = h.reshape(x, (*sizes[:to], n, block[to], *sizes[to + 1 :]))
        x = self.all_to_all(x, to, move.atoms)
        order = [i for i in range(x.rank) if i != to]
        order.insert(d, to)
        x = h.transpose(x, order)
        merged = [*sizes]
        merged[to] = block[to]
        merged[d] = sizes[d] * n
        return fit(h.reshape(x, merged), d, block[d])

    def _placed(self, x: Instruction, d: int, atoms: Atoms, n: int, size: int) -> Instruction:
        """Zeros of `size` elements along d, with this device's block in its place."""
        sizes = [m * n if e == d else m for e, m in enumerate(x.dims)]
        zeros = h.broadcast(h.constant(0, x.dtype), sizes, ())
        start, zero = (
            self.grid.table(i * x.shape.sizes[d] for i in self.grid.indices(atoms)),
            h.constant(0, "s32"),
        )
        return fit(
            h.dynamic_update_slice(zeros, x, [start if e == d else zero for e in range(x.rank)]),
            d,
            size,
        )

    def _emit_scatter(self, x: Instruction, dims: Ints, move: Move, reducer: str) -> Instruction:
        n = self.grid.parts(move.atoms)
        x = fit(x, move.dim, self.grid.block(dims, move.new)[move.dim] * n)
        return instr(
            "reduce-scatter",
            (x,),
            dimensions=(move.dim,),
            to_apply=h.binary_computation(reducer, x.dtype),
            **self.channel(move.atoms),
        )


def _atoms(layout: Iterable[Atoms]) -> set[int]:
    """All that split some dimension."""
    return {a for atoms in layout for a in atoms}


def _joined(a: Plan, b: Plan) -> Plan:
    return Plan(a.moves + b.moves, a.elements + b.elements)


def _ordered(have: Atoms, want: Atoms, kept: Container[int]) -> Atoms:
    """First the atoms wanted here, in the order wanted, then the `kept` ones, last the others."""
    return tuple(
        sorted(have, key=lambda a: want.index(a) if a in want else len(want) + (a not in kept))
    )


def _common(a: Atoms, b: Atoms) -> int:
    k = 0
    while k < len(a) and k < len(b) and a[k] == b[k]:
        k += 1
    return k


def fit(x: Instruction, dim: int, size: int) -> Instruction:
    """`x` with `size` elements along `dim`: the end cut off, or padded with zeros."""
    have = x.shape.sizes[dim]
    if have == size:
        return x
    if x.op == "broadcast" and dim not in x["dimensions"]:
        return _rebroadcast(x, dim, size)
    if x.op == "iota":
        return h.iota(x.dtype, resized(x, dim, size), x["iota_dimension"])
    if have > size:
        return h.slice_(x, [0] * x.rank, resized(x, dim, size))
    padding = [(0, size - have if d == dim else 0, 0) for d in range(x.rank)]
    return h.pad(x, h.constant(0, x.dtype), padding)


def resized(x: Instruction, dim: int, size: int) -> Ints:
    dims = x.shape.sizes
    return (*dims[:dim], size, *dims[dim + 1 :])


def _rebroadcast(x: Instruction, dim: int, size: int) -> Instruction:
    return h.broadcast(x.operand, resized(x, dim, size), x["dimensions"])


def cut(
    grid: Grid,
    x: Instruction,
    dim: int,
    indices: Ints,
    size: int,
    memo: dict[tuple[object, ...], Instruction] | None = None,
) -> Instruction:
    """The block of `size` elements along `dim` number indices[device]. With `memo`, `x` is a
    `source`: what it is made of is cut, not the result."""
    if x.dims[dim] == size:
        return x
    if memo is None:
        return _cut(grid, x, dim, indices, size, None)
    key = (x, dim, indices, size)
    if key not in memo:
        memo[key] = _cut(grid, x, dim, indices, size, memo)
    return memo[key]


def _cut(
    grid: Grid,
    x: Instruction,
    dim: int,
    indices: Ints,
    size: int,
    memo: dict[tuple[object, ...], Instruction] | None,
) -> Instruction:
    if x.op == "broadcast":
        if dim not in x["dimensions"]:
            return _rebroadcast(x, dim, size)
        part = cut(grid, x.operand, x["dimensions"].index(dim), indices, size, memo)
        return h.broadcast(part, resized(x, dim, size), x["dimensions"])
    if x.op == "iota":
        smaller = h.iota(x.dtype, resized(x, dim, size), x["iota_dimension"])
        return (
            smaller
            if dim != x["iota_dimension"]
            else offset(smaller, grid.table(i * size for i in indices))
        )
    if memo is not None and x.operands and "pointwise" in OPCODES[x.op].traits:
        parts = [cut(grid, o, dim, indices, size, memo) if o.rank else o for o in x.operands]
        return interned(x.op, tuple(parts), x.attrs, Shape(x.dtype, resized(x, dim, size)))
    return sliced(grid, x, dim, [i * size for i in indices], size)


def sliced(grid: Grid, x: Instruction, dim: int, begins: Iterable[int], size: int) -> Instruction:
    """`size` elements along `dim` from begins[device] on, computed there."""
    start = grid.table(begins)
    zero = h.constant(0, "s32")
    starts = [start if d == dim else zero for d in range(x.rank)]
    return h.dynamic_slice(x, starts, resized(x, dim, size))


def offset(x: Instruction, by: Instruction) -> Instruction:
    """`x` plus the s32[] scalar `by`."""
    return h.add(x, h.broadcast(h.convert(by, x.dtype), x.dims, ()))
