"""schedule: the order in which the steps of a computation run, chosen for a small memory peak.

Three orders are made, depth-first from the root, greedy by bytes freed, and greedy by bytes needed.
The one with the lowest peak is returned. All run the readers of a donated parameter before the step
that overwrites it, when dependencies allow. Collectives run in the order of their channels: other
devices may run programs that were cut elsewhere, and meet only if everybody keeps the order in
which collectives were recorded. Calls with effects run in the order of the program, whatever runs
them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from torch_hlo.hlo.ir import (
    Computation,
    Instruction,
    Shape,
    called,
    fixed,
    has_effect,
    substitute,
    symbols,
)

# Instructions that compute nothing: their value is (part of) an operand's memory.
VIEWS = frozenset(
    (
        "reshape",
        "bitcast",
        "get-tuple-element",
        "tuple",
        "opt-barrier",
        "add-dependency",
        "domain",
    )
)
_NO_STEP = VIEWS | {"parameter", "constant"}
STARTS = frozenset(("all-reduce-start", "all-gather-start", "collective-permute-start"))
DONES = frozenset(s.replace("start", "done") for s in STARTS)
COLLECTIVES = STARTS | frozenset(
    "all-reduce all-gather reduce-scatter all-to-all collective-broadcast collective-permute"
    " ragged-all-to-all".split()
)
# steps that a collective may start sooner than memory would have it: its result lives for that much
# longer
AHEAD = 12
ASSUMED_SIZE = 64  # value of a symbol when orders are compared


def is_step(x: Instruction) -> bool:
    """True when `x` runs code, false for parameters, constants and views."""
    return x.op not in _NO_STEP


def schedule(
    computation: Computation, aliases: Sequence[tuple[int, int]] = ()
) -> list[Instruction]:
    """The steps of `computation` in execution order. `aliases`: (output, parameter) pairs that
    share memory."""
    order = computation.instructions()
    graph = _Graph(computation, order, aliases)
    candidates = [graph.depth_first(), graph.greedy(), graph.greedy(careful=True)]
    best = min(candidates, key=graph.peak)
    return [graph.steps[i] for i in graph.started_early(best)]


def _channel(x: Instruction) -> int | None:
    return x.get("channel_id") if x.op in COLLECTIVES else None


def _effect(x: Instruction) -> int | None:
    """The place in the program of the first call with an effect that a step makes."""
    if x.op == "custom-call":
        return x.get("serial") if has_effect(x) else None
    if x.op not in ("while", "conditional", "call"):
        return None
    below = [_effect(y) for c in called(x) for y in c.instructions()]
    return min((serial for serial in below if serial is not None), default=None)


class _Graph:
    """Steps with their true and wanted predecessors, by number."""

    def __init__(
        self,
        computation: Computation,
        order: list[Instruction],
        aliases: Sequence[tuple[int, int]],
    ) -> None:
        self.steps = [x for x in order if is_step(x)]
        number = {x: i for i, x in enumerate(self.steps)}
        # what an instruction's memory is made of: steps and parameters
        base: dict[Instruction, tuple[Instruction, ...]] = {}
        for x in order:
            base[x] = (
                (x,)
                if x.op not in VIEWS
                else tuple(dict.fromkeys(b for o in x.operands for b in base[o]))
            )
        self.before: list[list[int]] = []
        readers: dict[Instruction, list[int]] = {}
        for i, x in enumerate(self.steps):
            sources = dict.fromkeys(b for o in x.operands for b in base[o])
            for s in sources:
                readers.setdefault(s, []).append(i)
            self.before.append([number[s] for s in sources if s in number])
        self.users: list[list[int]] = [[] for _ in self.steps]
        for i, needed in enumerate(self.before):
            for j in needed:
                self.users[j].append(i)
        self.wanted: list[list[int]] = [[] for _ in self.steps]
        results = computation.results
        for output, p in aliases:
            if output < len(results) and p < len(computation.params):
                for writer in base[results[output]]:
                    if writer in number:
                        w = number[writer]
                        self.wanted[w] += [
                            r for r in readers.get(computation.params[p], ()) if r != w
                        ]
        self.kept = {number[b] for b in base[computation.root] if b in number}
        self.bytes = [_bytes(x.shape) for x in self.steps]
        for result in dict.fromkeys(results):  # those have memory of their own
            if len(base[result]) == 1 and (at := number.get(base[result][0])) is not None:
                self.bytes[at] = max(self.bytes[at] - _bytes(result.shape), 0)
        # which steps may write over what they read, and what products that do need for their sums
        self.over = [x.get("kind") in ("loop", "row") for x in self.steps]
        self.sums = [
            sum(_bytes(y.shape) for y in x["calls"].instructions() if y.op == "dot")
            if x.get("kind") == "output" and not self.bytes[i]
            else 0
            for i, x in enumerate(self.steps)
        ]
        # what orders steps: data, and channels and effects where those agree with the data
        self.must = self.before
        self.then = self.users
        for turn in (_channel, _effect):
            self._order(
                sorted((t, i) for i, x in enumerate(self.steps) if (t := turn(x)) is not None)
            )

    def _order(self, turns: list[tuple[int, int]]) -> None:
        if len(turns) < 2:
            return
        must = [*map(list, self.must)]
        then = [*map(list, self.then)]
        for (_, i), (_, j) in zip(turns, turns[1:]):
            must[j].append(i)
            then[i].append(j)
        before = self.must
        after = self.then
        self.must = must
        self.then = then
        # a program that is numbered against its data flow
        if len(self._topological()) < len(self.steps):
            self.must = before
            self.then = after

    def _topological(self) -> list[int]:
        """Any legal order, in program order as far as possible; without the steps that wait for
        themselves."""
        missing = [len(m) for m in self.must]
        ready = [i for i, m in enumerate(missing) if not m]
        order = []
        while ready:
            i = heapq.heappop(ready)
            order.append(i)
            for j in self.then[i]:
                missing[j] -= 1
                if not missing[j]:
                    heapq.heappush(ready, j)
        return order

    def depth_first(self) -> list[int]:
        """Postorder; wanted predecessors count unless they would close a cycle."""
        state = [0] * len(self.steps)  # 1: on the stack, 2: done
        order: list[int] = []
        for start in range(len(self.steps)):
            if state[start]:
                continue
            state[start] = 1
            stack = [(start, iter(self.must[start] + self.wanted[start]))]
            while stack:
                i, pending = stack[-1]
                for j in pending:
                    if not state[j]:
                        state[j] = 1
                        stack.append((j, iter(self.must[j] + self.wanted[j])))
                        break
                else:
                    state[i] = 2
                    order.append(i)
                    stack.pop()
        # A wanted edge skipped on the way down may have put a step before its operand: keep true
        # dependencies only then.
        return order if self._is_legal(order) else self._topological()

    def _is_legal(self, order: list[int]) -> bool:
        at = {i: k for k, i in enumerate(order)}
        return all(at[j] < at[i] for i in order for j in self.must[i])

    def started_early(self, order: list[int]) -> list[int]:
        """Asynchronous collectives start up to AHEAD steps sooner and are waited for right before
        their first reader: there is work to do until then."""
        order = list(order)
        for k in reversed(range(len(order))):
            i = order[k]
            if self.steps[i].op in DONES:
                to = k
                while (
                    to + 1 < len(order)
                    and i not in self.must[order[to + 1]]
                    and self.steps[order[to + 1]].op not in DONES
                ):
                    to += 1
                order.insert(to, order.pop(k))
        for k in range(len(order)):
            i = order[k]
            if self.steps[i].op in STARTS:
                to = k
                while (
                    to > max(k - AHEAD, 0)
                    and order[to - 1] not in self.must[i]
                    and self.steps[order[to - 1]].op not in STARTS
                ):
                    to -= 1
                order.insert(to, order.pop(k))
        return order

    def greedy(self, careful: bool = False) -> list[int]:
        """Always the ready step that frees the most (or adds the fewest) bytes; `careful`: the one
        that needs the fewest while it runs. Ties in program order."""
        n = len(self.steps)
        missing = [len(b) for b in self.must]
        waiting = [len(w) for w in self.wanted]
        wanted_by: list[list[int]] = [[] for _ in range(n)]
        for i, before in enumerate(self.wanted):
            for j in before:
                wanted_by[j].append(i)
        uses = [len(u) + (i in self.kept) for i, u in enumerate(self.users)]

        def grows(i: int) -> tuple[int, int]:
            freed = sum(self.bytes[j] for j in self.before[i] if uses[j] == 1)
            return careful * (self.bytes[i] + self.sums[i]), self.bytes[i] - freed

        ready = [(waiting[i] > 0, grows(i), i) for i in range(n) if not missing[i]]
        heapq.heapify(ready)
        order: list[int] = []
        done = [False] * n
        while ready:
            late, key, i = heapq.heappop(ready)
            if done[i]:
                continue
            now = (waiting[i] > 0, grows(i))
            if now != (late, key):
                heapq.heappush(ready, (*now, i))
                continue
            done[i] = True
            order.append(i)
            for j in wanted_by[i]:
                waiting[j] -= 1
                if not waiting[j] and not missing[j] and not done[j]:
                    heapq.heappush(ready, (False, grows(j), j))
            for j in self.before[i]:
                uses[j] -= 1
                if uses[j] == 1:
                    for u in self.users[j]:
                        if not missing[u] and not done[u]:
                            heapq.heappush(ready, (waiting[u] > 0, grows(u), u))
            for u in self.then[i]:
                missing[u] -= 1
                if not missing[u]:
                    heapq.heappush(ready, (waiting[u] > 0, grows(u), u))
        return order

    def peak(self, order: list[int]) -> int:
        """Largest sum of live results over the steps of `order`."""
        uses = [len(u) + (i in self.kept) for i, u in enumerate(self.users)]
        live = top = 0
        for i in order:
            live += self.bytes[i]
            given = self.over[i] * sum(self.bytes[j] for j in self.before[i] if uses[j] == 1)
            top = max(top, live + self.sums[i] - min(given, self.bytes[i]))
            for j in self.before[i]:
                uses[j] -= 1
                if not uses[j]:
                    live -= self.bytes[j]
            if not uses[i]:
                live -= self.bytes[i]
        return top


def _bytes(shape: Shape) -> int:
    n = shape.nbytes
    return fixed(substitute(n, dict.fromkeys(symbols(n), ASSUMED_SIZE)))
