"""Which instructions share a kernel: greedy grouping in program order, decided by the bytes that no
longer move.

Every group iterates over one *space* (a number of elements, split at `cuts`). A member has a role,
the intervals of the space that its elements span: FULL for one element per point, the kept
intervals of a reduction for its result and for what is computed from it. One role may be the
group's `rows`: values per row, which FULL members may read back (softmax, layernorm). Results with
any other role are complete only after the last point of the space; nothing FULL may read them.

FREE instructions (broadcast, iota, reshape, scalar constants, widening converts, …) belong to no
group: every kernel that needs one computes it in place. Moving instructions (transpose, slice,
gather, …) read operands of other groups only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal

from torch_hlo.hlo.ir import DTYPES, Computation, Dims, Instruction, Size, Users, postorder

from ..thresholds import (
    CHEAP_EXPANSION,
    CHEAP_INDEX,
    FEWER_BYTES,
    LARGE,
    MAX_INPUTS,
    MAX_MEMBERS,
    MAX_SCALARS,
    MIN_SIBLING_BYTES,
    ROW_LIMIT,
    SEARCH_BUDGET,
    STRIDED_ROW_LIMIT,
)
from . import fusion_table as table
from .fusion_inline import inlined
from .fusion_table import FREE, HEAVY, LIGHT, MOVE, REDUCE, STEP, Intervals

FEW_ROWS = 8
NEAR = 16  # instructions between a value per column and the reduction that it comes from


class _Mark(Enum):
    """Edges and roles that are no intervals."""

    SAME = "same"
    FULL = "full"
    __hash__ = object.__hash__  # quick


OTHER: Final = None  # an edge that no role explains: the operand must be in memory
SAME: Final = _Mark.SAME  # an edge that reads the operand at the user's own linear index
FULL: Final = _Mark.FULL
Inside = Intervals | Literal[_Mark.SAME]  # an edge within a kernel
Edge = Inside | None
Role = Intervals | Literal[_Mark.FULL]


@dataclass(eq=False, slots=True)
class Group:
    """One kernel in the making. `roles` maps member numbers (positions in postorder) to their
    role."""

    size: Size
    roles: dict[int, Role] = field(default_factory=dict)
    rows: Intervals | None = None
    cuts: frozenset[Size] = frozenset()
    reads: dict[int, set[Edge]] = field(default_factory=dict)  # source number -> how it is read
    readers: set[int] = field(default_factory=set)  # members of other groups that read this one
    first: int = 0
    # a group that depends on another has at least its reach: cycle checks skip what is too low
    reach: int = 0
    step: bool = False  # a single instruction that is not fusible
    merged_into: Group | None = None

    @property
    def plain(self) -> bool:
        return self.rows is None and all(r is FULL for r in self.roles.values())


class Plan:
    """The grouping of a computation: `group_of[number]` for every instruction that is not FREE."""

    def __init__(self, computation: Computation) -> None:
        root = computation.root
        self.order: list[Instruction] = _results_beside(postorder((*computation.params, root)))
        self.root = len(self.order) - 1 if self.order[-1] is root else self.order.index(root)
        self.number = {x: i for i, x in enumerate(self.order)}
        self.kind = [table.classify(x) for x in self.order]
        self.users: list[list[int]] = [[] for _ in self.order]
        for i, x in enumerate(self.order):
            for o in x.operands:
                self.users[self.number[o]].append(i)
        self._group: list[Group | None] = [None] * len(self.order)
        # what an instruction reads that is not FREE
        self.sources: list[list[tuple[int, Edge]]] = []
        self._cuts: list[frozenset[Size]] = []
        self.free_cost = [0] * len(self.order)
        for i in inlined(self.order, self.kind, self.users, self.root):
            self.kind[i] = FREE
        for i in range(len(self.order)):
            self._describe(i)
        for i in range(len(self.order)):
            self._add(i)
        self._merge_siblings()

    # -- what an instruction reads, and how
    def _describe(self, i: int) -> None:
        x = self.order[i]
        kind = self.kind[i]
        if kind == REDUCE and (
            table.is_degenerate(x)
            or x.is_tuple
            and any(self.order[u].op != "get-tuple-element" for u in self.users[i])
        ):
            kind = self.kind[i] = STEP
        sources: list[tuple[int, Edge]] = []
        cuts: frozenset[Size] = frozenset()
        if kind == STEP:
            sources = [(s, OTHER) for o in x.operands for s in self._in_memory(o)]
        elif kind == MOVE or x.op in table.MOVES:
            sources = [(s, OTHER) for o in x.operands for s, _ in self._reaches(o)]
            cuts = table.cuts(tuple((s, s) for s in _suffixes(x.dims)))
        elif kind == REDUCE:
            half = len(x.operands) // 2
            for o in x.operands[:half]:
                sources += self._reaches(o)
                cuts |= self._free_cuts(o)
            sources += [(s, OTHER) for o in x.operands[half:] for s, _ in self._reaches(o)]
            cuts |= table.cuts(table.reduced_intervals(x))
        elif x.op == "broadcast":
            operand = x.operand
            kept = table.broadcast_intervals(x)
            cuts = table.cuts(kept)
            increasing = list(x["dimensions"]) == sorted(x["dimensions"])
            for s, edge in self._reaches(operand):
                if edge is not SAME and operand.size == x.size and increasing:
                    sources.append((s, edge))
                elif edge is SAME and increasing:
                    sources.append((s, SAME if operand.size == x.size else kept))
                else:
                    sources.append((s, OTHER))
            if not increasing:
                cuts = frozenset(_suffixes(x.dims))
        elif x.op == "iota":
            cuts = table.cuts(table.intervals(x.dims, (x["iota_dimension"],)))
        else:
            size = None if x.is_tuple else x.size
            for o in x.operands:
                scalar = not o.is_tuple and o.size == 1 and size != 1
                sources += [(s, () if scalar and e is SAME else e) for s, e in self._reaches(o)]
                cuts |= self._free_cuts(o)
        merged: dict[tuple[int, Edge], None] = dict.fromkeys(sources)
        self.sources.append(list(merged))
        self._cuts.append(cuts)
        if kind == FREE:
            self.free_cost[i] = table.cost(x) + sum(self._cost_of_free(o) for o in x.operands)
        elif kind == LIGHT and self._is_free(i):
            self.kind[i] = FREE
            self.free_cost[i] = 1 + sum(self._cost_of_free(o) for o in x.operands)

    def _is_free(self, i: int) -> bool:
        """Cheaper to compute again in each kernel than to read from memory: widening converts,
        masks made of iotas, expansions."""
        x = self.order[i]
        if (
            x.is_tuple
            or x.op == "get-tuple-element"
            or sum(self._cost_of_free(o) for o in x.operands) > 16
        ):
            return False
        if x.size == 1:
            return all(self.kind[s] == STEP for s, _ in self.sources[i])
        if self._is_index_table(i):
            return False
        if x.op == "convert":
            before = DTYPES[x.operand.dtype]
            return (
                before.bits < x.bits
                and before.kind != "c"
                and self.kind[self.number[x.operand]] in (FREE, STEP)
            )
        return not self.sources[i] or self._is_expansion(i) or self._is_normalised(i)

    def _is_cheap(self, i: int) -> bool:
        """A few operations, and not for a kernel that reads its operands from memory."""
        cost = 1 + sum(self._cost_of_free(o) for o in self.order[i].operands)
        return cost <= CHEAP_EXPANSION and not self._feeds_memory(i)

    def _is_expansion(self, i: int) -> bool:
        """A few operations on repeated elements of much smaller arrays, such as a mask of labels:
        reading them takes fewer bytes than the result."""
        x = self.order[i]
        if not self._is_cheap(i):
            return False
        read: Size = 0
        for s, edge in self.sources[i]:
            if edge is OTHER or edge is SAME:
                return False
            read += self.order[s].nbytes
        return (
            isinstance(read, int) and isinstance(x.nbytes, int) and read * FEWER_BYTES <= x.nbytes
        )

    def _is_normalised(self, i: int) -> bool:
        """A few operations on an array and on its own totals per column (batch norm), or on an
        argument and values per column: the array is in memory when they are known, and reading it
        takes no more bytes than reading the result, which need not be written."""
        x = self.order[i]
        if not self._is_cheap(i):
            return False
        arrays = {s for s, edge in self.sources[i] if edge is SAME}
        others = [(s, edge) for s, edge in self.sources[i] if edge is not SAME]
        if (
            len(arrays) != 1
            or not others
            or any(edge is OTHER or edge and edge[0][0] != 1 for _, edge in others)
        ):
            return False
        (a,) = arrays
        if (
            self.order[a].is_tuple
            or self.order[a].itemsize > x.itemsize
            or any(self.order[s].is_tuple for s, _ in others)
        ):
            return False
        return self.order[a].op == "parameter" or any(self._is_total(s, a) for s, _ in others)

    def _is_total(self, i: int, a: int) -> bool:
        """Whether `i` is computed from a reduction of the array `a`, in a few steps."""
        stack = [i]
        seen = {i}
        while stack and len(seen) <= NEAR:
            i = stack.pop()
            if self.kind[i] == REDUCE and (a, SAME) in self.sources[i]:
                return True
            for s, _ in self.sources[i] if self.kind[i] != STEP else ():
                if s not in seen and s != a:
                    seen.add(s)
                    stack.append(s)
        return False

    def _is_index_table(self, i: int) -> bool:
        """Indices that a gather reads several times each, and that take more than a few
        operations."""
        x = self.order[i]
        own = 1 + sum(self._cost_of_free(o) for o in x.operands)
        return own > CHEAP_INDEX and any(
            y.op == "gather"
            and y.operands[1] is x
            and isinstance(y.size, int)
            and isinstance(x.size, int)
            and y.size > 2 * x.size
            for y in map(self.order.__getitem__, self.users[i])
        )

    def _cost_of_free(self, o: Instruction) -> int:
        return self.free_cost[self.number[o]]

    def _reaches(self, o: Instruction) -> list[tuple[int, Edge]]:
        """The non-FREE instructions that an operand is computed from, with the edge from the
        operand's own index."""
        i = self.number[o]
        return self.sources[i] if self.kind[i] == FREE else [(i, SAME)]

    def _in_memory(self, o: Instruction) -> list[int]:
        """What a step waits for to read `o`: a FREE value is put in memory for it by a group of its
        own."""
        while o.op == "reshape":
            o = o.operand
        i = self.number[o]
        return [i] if self.kind[i] != FREE or o.op != "constant" else []

    def _free_cuts(self, o: Instruction) -> frozenset[Size]:
        i = self.number[o]
        return self._cuts[i] if self.kind[i] == FREE else frozenset()

    # -- grouping
    def group(self, i: int) -> Group | None:
        """The group of instruction number `i`; None for a FREE one that no memory needs."""
        first = g = self._group[i]
        while g is not None and g.merged_into is not None:
            g = g.merged_into
        if g is not first:
            self._group[i] = g  # the next search is short
        return g

    def group_of(self, i: int) -> Group:
        """The group of an instruction that has one."""
        g = self.group(i)
        assert g is not None, self.order[i]
        return g

    def put(self, i: int, group: Group) -> None:
        """Make instruction number `i` a member of another group."""
        self._group[i] = group

    def _needs_memory(self, i: int) -> bool:
        """True when a step or the program's result reads this FREE instruction (views of arrays in
        memory excepted)."""
        x = self.order[i]
        if x.op == "constant" or x.op == "reshape" and not self._is_computed(x):
            return False
        return self._feeds_memory(i)

    def _feeds_memory(self, i: int) -> bool:
        return i == self.root or any(
            self.kind[u] == STEP or self.order[u].op == "reshape" and self._feeds_memory(u)
            for u in self.users[i]
        )

    def _is_computed(self, x: Instruction) -> bool:
        """A reshape of something FREE that has no memory of its own."""
        while x.op == "reshape":
            x = x.operand
        return self.kind[self.number[x]] == FREE and x.op != "constant"

    def _add(self, i: int) -> None:
        x = self.order[i]
        kind = self.kind[i]
        if self._group[i] is not None:  # came with its reduction
            return
        if kind == FREE and not (x.op != "reshape" and self._needs_memory(i)):
            return
        reads: dict[int, set[Edge]] = {}
        for s, edge in self.sources[i]:
            reads.setdefault(s, set()).add(edge)
        for s in reads:
            source = self.group(s)
            if source is not None:
                source.readers.add(i)
        self._group[i] = self._own_group(i, reads)
        if kind in (STEP, FREE):
            return
        candidates: dict[int, tuple[Group, Size, int, Inside]] = {}
        for s, edge in self.sources[i]:
            h = self.group(s)
            if edge is OTHER or h is None or h.step:
                continue
            saved = self.order[s].nbytes
            before = candidates.get(id(h))
            candidates[id(h)] = (
                h,
                saved + before[1] if before else saved,
                s,
                edge,
            )
        ranked = sorted(
            candidates.values(),
            key=lambda c: c[1] if isinstance(c[1], int) else 1 << 60,
            reverse=True,
        )
        for h, _, s, edge in ranked:
            g = self.group_of(i)
            h = self.group_of(s)
            if g is not h:
                self._try_merge(g, h, i, s, edge)

    def _own_group(self, i: int, reads: dict[int, set[Edge]]) -> Group:
        """Instruction `i` in a group of its own."""
        x = self.order[i]
        kind = self.kind[i]
        if kind == STEP:
            return Group(1, {i: FULL}, None, frozenset(), reads, set(), i, i, step=True)
        if kind != REDUCE:
            size = 1 if x.is_tuple else x.size
            return Group(size, {i: FULL}, None, self._cuts[i], reads, set(), i, i)
        kept = table.kept_intervals(x)
        # The several results of one reduction are named by the instructions that follow it; the
        # tuple itself is never in memory.
        parts = self.users[i] if x.is_tuple else []
        g = Group(
            x.operand.size,
            dict.fromkeys([i, *parts], kept),
            None,
            self._cuts[i],
            reads,
            set(),
            i,
            max([i, *parts]),
        )
        for part in parts:
            self._group[part] = g
        if kept and kept[0][0] != 1 and rows_fit(g.size, kept):
            g.rows = kept
        return g

    def _try_merge(
        self,
        g: Group,
        h: Group,
        user: int,
        source: int,
        edge: Inside,
    ) -> bool:
        """Merge `h`, which has `source`, with `g`, whose member `user` reads it through `edge`."""
        reads_at: Role = FULL if self.kind[user] == REDUCE else g.roles[user]
        has: Role = h.roles[source]
        g_as: Role = FULL  # what FULL of g becomes in the merged group
        h_as: Role = FULL
        rows: Intervals | None = None
        if edge is SAME:
            if reads_at is FULL and has is not FULL:
                g_as = has
            elif reads_at is not FULL and has is FULL:
                h_as = reads_at
            elif reads_at != has:
                return False
        else:
            if reads_at is not FULL:
                return False
            rows = edge
            if has is FULL:
                h_as = edge
            elif has != edge:
                return False
        return self._merge(g, h, g_as, h_as, rows)

    def _turns(self, g: Group) -> bool:
        """Whether neighbours in the group's space are far apart in a large array that it reads:
        loops turn it in blocks, reductions would read it element by element."""
        return any(
            x.op == "transpose"
            and x["dimensions"][-1] != x.rank - 1
            and isinstance(n := x.nbytes, int)
            and n >= LARGE
            for x in map(self.order.__getitem__, g.roles)
        )

    def _merge(
        self,
        g: Group,
        h: Group,
        g_as: Role,
        h_as: Role,
        rows: Intervals | None,
    ) -> bool:
        """Merge when roles fit, edges between the two stay in one kernel, and no cycle appears."""
        if g_as is not FULL and not g.plain or h_as is not FULL and not h.plain:
            return False
        host = g if g_as is FULL else h
        if g_as is FULL and h_as is FULL and g.size is not h.size and g.size != h.size:
            return False
        inputs = g.reads.keys() | h.reads.keys()
        if len(g.roles) + len(h.roles) > MAX_MEMBERS or len(inputs) > MAX_INPUTS:
            return False
        if self._turns(g) and _totals(h) or self._turns(h) and _totals(g):
            return False
        own = (g.rows if g_as is FULL else None, h.rows if h_as is FULL else None)
        if len(wanted := {r for r in (rows, *own) if r is not None}) > 1:
            return False
        chosen = next(iter(wanted), None)
        if rows is not None and (not rows or not rows_fit(host.size, rows)):
            return False
        moved, role = (g, g_as) if g_as is not FULL else (h, h_as)
        if role is FULL:
            cuts = table.refine(g.cuts, h.cuts)
        else:
            cuts = self._cuts_of_moved(host, moved, role, rows)
        if cuts is not None and chosen is not None:
            cuts = table.refine(cuts, table.cuts(chosen))
        if cuts is None:
            return False
        roles = {i: g_as if g_as is not FULL else r for i, r in g.roles.items()}
        roles.update((i, h_as if h_as is not FULL else r) for i, r in h.roles.items())
        if (
            not _outputs_fit(roles, chosen)
            or not self._edges_fit(g, h, roles, chosen)
            or not self._edges_fit(h, g, roles, chosen)
            or self.depends(g, h)
            or self.depends(h, g)
        ):
            return False
        raised = self.below(g, h)
        if raised is None:
            return False
        reads = reads_of_both(g, h)
        # Reads of a group that became rows are no longer at the space's own index.
        if role is not FULL:
            for s, e in moved.reads.items():
                at = (role if k is SAME else OTHER for k in e)
                reads[s] = {*at, *host.reads.get(s, ())}
        merge_into(Group(host.size, roles, chosen, cuts, reads), g, h, raised)
        return True

    def _cuts_of_moved(
        self, host: Group, moved: Group, role: Intervals, rows: Intervals | None
    ) -> frozenset[Size] | None:
        """The cuts of `host` with `moved`, whose elements are at `role` of it; None when that does
        not go."""
        if (
            rows is not None
            and not rows[0][0] != 1
            and not any(r == rows for r in host.roles.values())
        ):
            # a value per column is cheaper to keep in memory than to make per element
            return None
        cuts = table.refine(host.cuts, table.cuts(role))
        # Cuts of the moved group speak about its own linear index; they survive only when its
        # role is one interval.
        if cuts is not None and moved.cuts:
            if len(role) != 1:
                return None
            low = role[0][0]
            cuts = table.refine(cuts, frozenset(c * low for c in moved.cuts))
        return cuts

    def _edges_fit(
        self,
        user: Group,
        source: Group,
        roles: dict[int, Role],
        rows: Intervals | None,
    ) -> bool:
        """Every read of a member of `source` by a member of `user` is at the same point of the
        merged space."""
        for s in user.reads:
            if s not in source.roles:
                continue
            has = roles[s]
            for u in self._readers(s, user):
                at: Role = FULL if self.kind[u] == REDUCE else roles[u]
                for found, edge in self.sources[u]:
                    if found != s:
                        continue
                    if edge is SAME:
                        if at != has:
                            return False
                    elif edge is OTHER or at is not FULL or edge != has or edge != rows:
                        return False
        return True

    def _readers(self, s: int, group: Group) -> list[int]:
        """Members of `group` that read `s`, also through FREE instructions."""
        found = []
        stack = [s]
        seen = {s}
        while stack:
            for u in self.users[stack.pop()]:
                if u in group.roles:
                    found.append(u)
                if self.kind[u] == FREE and u not in seen:
                    seen.add(u)
                    stack.append(u)
        return found

    def depends(self, g: Group, h: Group) -> bool:
        """True when `g` depends on `h` through a third group, or the search is too long to tell."""
        seen: set[int] = {id(g), id(h)}
        stack: list[Group] = []

        def push(reads: dict[int, set[Edge]]) -> bool:
            """Whether `h` is among them; the others are searched."""
            found = False
            for s in reads:
                k = self.group(s)
                found |= k is h
                if k is not None and id(k) not in seen and k.reach >= h.reach:
                    seen.add(id(k))
                    stack.append(k)
            return found

        push(g.reads)
        budget = SEARCH_BUDGET
        while stack:
            budget -= 1
            if budget < 0 or push(stack.pop().reads):
                return True
        return False

    def below(self, g: Group, h: Group) -> list[Group] | None:
        """The groups whose reach a merge of the two would raise; None when they are too many to
        keep track of."""
        reach = max(g.reach, h.reach)
        seen: dict[int, Group] = {id(g): g, id(h): h}
        stack = [g, h]
        groups = self._group
        while stack:
            for i in stack.pop().readers:
                k = groups[i]
                if k is None:
                    continue
                if k.merged_into is not None:
                    k = self.group_of(i)
                if k.reach < reach and id(k) not in seen:
                    if len(seen) > SEARCH_BUDGET:
                        return None
                    seen[id(k)] = k
                    stack.append(k)
        return list(seen.values())[2:]

    def _is_number(self, i: int) -> bool:
        shape = self.order[i].shape
        return not shape.is_tuple and shape.size == 1

    def _merge_siblings(self) -> None:
        """Kernels over the same space that read the same large array become one; so do the few that
        compute numbers from the same number (what an optimizer makes of a parameter's step count):
        a kernel of one element is all call."""
        readers: dict[int, list[int]] = {}
        for i in range(len(self.order)):
            if (
                self.kind[i] in (LIGHT, HEAVY, REDUCE, MOVE)
                or self._group[i] is not None
                and self._is_number(i)
            ):
                for s, edge in self.sources[i]:
                    if edge is SAME:
                        readers.setdefault(s, []).append(i)
        for s, members in readers.items():
            nbytes = self.order[s].nbytes
            small = isinstance(nbytes, int) and nbytes < MIN_SIBLING_BYTES
            if (
                len(members) < 2
                or small
                and not (self._is_number(s) and len(members) <= MAX_SCALARS)
            ):
                continue
            groups = list(
                {id(g): g for g in map(self.group_of, members) if g is not self.group(s)}.values()
            )
            done: list[int] = []
            for g in groups[:32]:
                i = next(iter(g.roles))
                for j in done:
                    a = self.group_of(i)
                    b = self.group_of(j)
                    if (
                        a is b
                        or a.size != b.size
                        or SAME not in a.reads.get(s, ())
                        or SAME not in b.reads.get(s, ())
                    ):
                        continue
                    if self._merge(b, a, FULL, FULL, None):
                        break
                else:
                    done.append(i)

    def groups(self) -> list[Group]:
        """All groups, steps included, each once."""
        found = {id(g): g for g in map(self.group, range(len(self.order))) if g is not None}
        return list(found.values())


def _results_beside(order: list[Instruction]) -> list[Instruction]:
    """The order with every get-tuple-element right behind the reduction it reads."""
    results: Users = {}
    for x in order:
        if x.op == "get-tuple-element" and x.operand.op == "reduce":
            results.setdefault(x.operand, []).append(x)
    if not results:
        return order
    moved = {x for xs in results.values() for x in xs}
    return [y for x in order if x not in moved for y in (x, *results.get(x, ()))]


def _suffixes(dims: Dims) -> list[Size]:
    """Strides of the dimensions that are not 1, and the total size."""
    found: list[Size] = []
    low: Size = 1
    for d in reversed(dims):
        if d != 1:
            found.append(low)
            low *= d
    return found + [low]


def _totals(g: Group) -> bool:
    """Whether a group sums over more than rows that lie in one piece: over images and pixels, for
    each channel."""
    return not g.plain and (
        g.rows is None or all(high is not g.size and high != g.size for _, high in g.rows)
    )


def rows_fit(size: Size, kept: Intervals) -> bool:
    """True when one thread can walk whole rows: enough rows, or short ones."""
    rows: Size = 1
    for low, high in kept:
        rows *= high // low
    if not isinstance(size, int) or not isinstance(rows, int):
        return bool(kept)
    if rows == 0 or size == 0:
        return False
    length = size // rows
    if kept[0][0] == 1:
        return length <= STRIDED_ROW_LIMIT
    return rows >= FEW_ROWS or length <= ROW_LIMIT


def _outputs_fit(roles: dict[int, Role], rows: Intervals | None) -> bool:
    """Results complete only at the end: of one kind, or beside contiguous rows totals and results
    along a row."""
    late = {r for r in roles.values() if r is not FULL and r != rows}
    if not late:
        return True
    if len(late) > 1:
        return (
            rows is not None
            and rows[0][0] != 1
            and len(late - {()}) == 1
            and all(_along_row(r, rows) for r in late)
        )
    return rows is None or rows[0][0] != 1 and all(_along_row(r, rows) for r in late)


def _along_row(role: Intervals, rows: Intervals) -> bool:
    return not role or role[0][0] == 1 and _disjoint(role, rows)


def _disjoint(a: Intervals, b: Intervals) -> bool:
    for low, high in a:
        for other_low, other_high in b:
            if not (table.divides(high, other_low) or table.divides(other_high, low)):
                return False
    return True


def merge_into(merged: Group, g: Group, h: Group, raised: list[Group]) -> None:
    """`merged`, with the roles and reads of both, replaces `g` and `h`; see `Plan.below` for
    `raised`."""
    merged.reads = {s: e for s, e in merged.reads.items() if s not in merged.roles}
    merged.readers = (g.readers | h.readers) - merged.roles.keys()
    merged.first = min(g.first, h.first)
    merged.reach = max(g.reach, h.reach)
    g.merged_into = h.merged_into = merged
    for k in raised:
        k.reach = merged.reach


def reads_of_both(g: Group, h: Group) -> dict[int, set[Edge]]:
    reads = {s: set(e) for s, e in g.reads.items()}
    for s, e in h.reads.items():
        reads.setdefault(s, set()).update(e)
    return reads
