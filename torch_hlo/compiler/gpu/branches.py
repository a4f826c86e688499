"""Which steps of a program may run at the same time: branches for the graph that the steps become.

    branches = Branches()
    branch, waits = branches.place(reads, writes)      # of the next step in order; the memory it
                                                       # touches

A step comes after another when both touch the same bytes and one of them writes; memory that is
used again counts like data. Each branch is a queue in order; a step goes to the end of a branch
whose last step it needs, else to a branch of its own while there are some left. `waits` are the
branches whose present end it has to wait for besides. What is already known to be done, directly or
through others, is not waited for.
"""

from collections.abc import Iterable

from ..codegen.block import Span

LIMIT = 4  # branches: kernels of models seldom leave room on the device for more


class Branches:
    """Places the steps of a program, one after the other."""

    def __init__(self) -> None:
        # word -> (span, step, whether it writes) that later steps may depend on
        self._uses: dict[int, list[tuple[Span, int, bool]]] = {}
        self._branch: list[int] = []  # of each step
        self._last: list[int] = []  # step at the end of each branch
        # per branch: other branch -> the step of it up to which all is done
        self._known: list[dict[int, int]] = []

    @property
    def count(self) -> int:
        """Branches in use."""
        return len(self._last)

    def place(self, reads: Iterable[Span], writes: Iterable[Span]) -> tuple[int, tuple[int, ...]]:
        """(branch, branches to wait for) of the next step."""
        step = len(self._branch)
        needed: set[int] = set()
        accesses = [*((r, False) for r in reads), *((w, True) for w in writes)]
        for span, writing in accesses:
            for other, earlier, wrote in self._uses.get(span.word, ()):
                if (writing or wrote) and earlier != step and span.overlaps(other):
                    needed.add(earlier)
        for span, writing in accesses:
            uses = self._uses.setdefault(span.word, [])
            if writing:  # whoever comes after this step comes after what it covers
                uses[:] = [u for u in uses if not span.covers(u[0])]
            uses.append((span, step, writing))
        branch = self._choose(needed)
        known = self._known[branch]
        behind = {
            self._branch[d]
            for d in needed
            if self._branch[d] != branch and known.get(self._branch[d], -1) < d
        }
        waits = tuple(sorted(behind))
        for queue in waits:
            for b, s in self._known[queue].items():
                known[b] = max(known.get(b, -1), s)
            known[queue] = self._last[queue]
        self._branch.append(branch)
        self._last[branch] = step
        return branch, waits

    def _choose(self, needed: set[int]) -> int:
        ends = [b for b, s in enumerate(self._last) if s in needed]
        if ends:
            return max(ends, key=self._last.__getitem__)
        if len(self._last) < LIMIT:
            self._last.append(-1)
            self._known.append({})
            return len(self._last) - 1
        return min(range(LIMIT), key=self._last.__getitem__)
