"""Steps of the mesh where every device has a process of its own: all ranks run the same programs.

Which values a step computes follows from which tensors are alive, and that follows from Python's
garbage collector. What memory it overwrites does, too; and the cache of programs is each rank's
own. So before a step of the mesh is started the ranks compare what they would run:

1. everybody sends a digest. Mostly it is the same, and that is all.
2. otherwise everybody sends what it has recorded, and wants. Other operations are an error. The
   step computes what any rank wants, and overwrites what none does.
3. and a program that only some ranks have is compiled by all.

These are collectives of the user's thread (device/process_group.py), in the program's order: the
journal says which values are on the mesh, and cuts of other values do not come here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, NoReturn
from weakref import ref

import numpy as np

from torch_hlo import log
from torch_hlo.device import multi_device
from torch_hlo.hlo.sharding.collective import CollectiveError
from torch_hlo.hlo.sharding.sharding import Sharding
from torch_hlo.lowering.core import Node, Out
from torch_hlo.lowering.spmd.sharding import decode, encode

from ..record import Binding, Effect
from . import spmd
from .fingerprint import INDEX_BITS, OPS, Graph
from .journal import Journal
from .launch import Launch, pack_numbers
from .plan import Plan, cut
from .program_cache import ProgramCache

Aliases = tuple[tuple[int, int], ...]
Value = tuple[int, int]  # the place of a node in the journal, and which of its results


@dataclass
class _Draft:
    """A step as this rank sees it. `wanted`: where its values are to live, as text, or ""."""

    bindings: list[Binding]
    wanted: dict[Value, str]
    graph: Graph
    places: list[int]
    aliases: Aliases
    where: spmd.Placement

    def digest(self) -> str:
        """Equal on ranks whose program is made of the same, and is given the same numbers."""
        return _digest(self.graph.key, self.where) + pack_numbers(self.graph.numbers).hex()


class Meeting:
    """All ranks make one step of the mesh. `evaluate` computes values that are not on the mesh, for
    storages."""

    def __init__(
        self,
        journal: Journal,
        programs: ProgramCache,
        whole: bool,
        evaluate: Callable[[list[tuple[Any, Out]]], None],
    ) -> None:
        self.journal, self.programs, self.whole, self.evaluate = (
            journal,
            programs,
            whole,
            evaluate,
        )
        self.line = log.source()

    def plan(
        self, bindings: list[Binding], beside: list[Binding]
    ) -> tuple[Plan | None, list[Binding]]:
        """The step that computes these values of this rank, and what other ranks want; with the
        bindings that are all of that. No plan if nobody wants anything. `beside`: values that are
        not on the mesh, which the step computes too if all ranks do so.

        Raises CollectiveError where the ranks have recorded different things, and what lowering
        raises."""
        draft = self._draft([*bindings, *beside], self._wanted(bindings))
        known = None
        mine = b""
        if draft is not None:
            known = self.programs.known(draft.graph, draft.aliases, draft.where)
            mine = f"{draft.digest()} {draft.aliases} {_print(known)}".encode()
        if not self._same(self.journal.digest() + bytes([self.whole]) + mine):
            self.evaluate([(b[2], b[3]) for b in beside])
            draft = self._agreed(bindings)
            known = None
        if draft is None:
            return None, []
        graph = draft.graph
        compiled = known or self.programs.canonical(graph, draft.aliases, draft.where)
        if known is None:
            self._compare_programs(compiled)
        return (
            Plan(
                Launch(compiled, draft.places),
                graph.leaves,
                graph.numbers,
                draft.where,
            ),
            draft.bindings,
        )

    def _place(self, out: Out) -> int:
        """The order of results. Serial numbers are this rank's own, but their order is the
        program's."""
        return out.node.serial << INDEX_BITS | out.index

    def _wanted(self, bindings: list[Binding]) -> dict[Value, str]:
        found: dict[Value, str] = {}
        for _, _, storage, out, _ in bindings:
            sharding = getattr(storage, "sharding", None)
            value = self.journal.places[out.node], out.index
            found[value] = max(found.get(value, ""), encode(sharding) if sharding else "")
        return found

    def _draft(self, bindings: list[Binding], wanted: dict[Value, str]) -> _Draft | None:
        if not bindings:
            return None
        bindings = [(self._place(b[3]), i, *b[2:]) for i, b in enumerate(bindings)]
        bindings.sort(key=itemgetter(0, 1))
        graph, places, _, aliases = cut(bindings, self.whole)
        at = self.journal.places
        shardings: list[Sharding | None] = []
        for out in graph.outputs:
            text = wanted[at[out.node], out.index] if out.node in at else ""
            shardings.append(decode(text) if text else None)
        where = spmd.placement(graph, shardings)
        assert where is not None, "a value on the mesh follows from one"
        return _Draft(bindings, wanted, graph, places, aliases, where)

    # ---- where the ranks differ

    def _agreed(self, bindings: list[Binding]) -> _Draft | None:
        """The step that all ranks can make."""
        wanted = self._wanted(bindings)
        parts = self._all(
            "what is recorded",
            {
                "ops": self.journal.lines(),
                "whole": "all that is recorded" if self.whole else "one value",
                "wanted": [[*value, text] for value, text in wanted.items()],
            },
        )
        self._compare("have recorded other operations", [part["ops"] for part in parts])
        self._compare("evaluate other values", [[part["whole"]] for part in parts])
        for part in parts:
            for place, index, text in part["wanted"]:
                value = place, index
                if value not in wanted:
                    bindings.append(self._effect(self.journal.nodes[place], index, len(bindings)))
                wanted[value] = max(wanted.get(value, ""), text)
        outs = self.journal.locals(_needed(bindings, self.journal))
        self.evaluate([(Effect(out), out) for out in outs])
        draft = self._draft(bindings, wanted)
        if draft is None:
            return None
        numbers = [str(n.value) for n in draft.graph.numbers]
        parts = self._all(
            "what is to be run",
            {
                "graph": [*_lines(draft.graph.key), str(draft.where)],
                "numbers": numbers,
                "aliases": draft.aliases,
            },
        )
        self._compare("have recorded other operands", [part["graph"] for part in parts])
        self._compare("compute with other numbers", [part["numbers"] for part in parts])
        spared = [{tuple(alias) for alias in part["aliases"]} for part in parts]
        draft.aliases = tuple(sorted(set.intersection(*spared)))
        return draft

    def _effect(self, node: Node, index: int, number: int) -> Binding:
        """A value that only other ranks want."""
        out = Out(node, index)
        effect = Effect(out)
        return self._place(out), number, effect, out, ref(effect)

    def _same(self, data: bytes) -> bool:
        digest = hashlib.blake2b(data, digest_size=16).digest()
        what = "the comparison of steps"
        block = np.frombuffer(digest, np.uint8)
        found = multi_device.communicator().gather(block, what, self.line)
        return len({print.tobytes() for print in found}) == 1

    def _compare_programs(self, compiled: Any) -> None:
        """Raises CollectiveError where compiling the same gave something else."""
        if not self._same(_print(compiled).encode()):
            info = getattr(compiled.program.program, "info", None)
            text = info.text() if info is not None else _print(compiled)
            parts = self._all(f"the programs of {compiled.name}", {"text": text.splitlines()})
            self._compare("have compiled other programs", [part["text"] for part in parts])

    def _all(self, what: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        data = json.dumps(mine).encode()
        return [json.loads(d) for d in multi_device.communicator().share(data, what, self.line)]

    def _compare(self, what: str, lines: list[list[str]]) -> None:
        """Raises CollectiveError with the first line in which a rank differs from rank 0."""
        for rank, found in enumerate(lines):
            if found != lines[0]:
                self._differ(what, rank, lines[0], found)

    def _differ(self, what: str, rank: int, mine: list[str], found: list[str]) -> NoReturn:
        pairs = zip(mine, found, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(found)))

        def line(lines: list[str]) -> str:
            return lines[at] if at < len(lines) else "(nothing more)"

        raise CollectiveError(
            f"the step at {self.line}: the ranks {what}. Ranks 0 and {rank} differ first in number"
            f" {at + 1}:\n  rank 0: {line(mine)}\n  rank {rank}: {line(found)}\nAll processes run"
            " the same code on sharded tensors, and on what follows from them."
        )


def _needed(bindings: Sequence[Binding], journal: Journal) -> list[Node]:
    """The nodes on the mesh that compute these values."""
    graph, _, _, _ = cut(list(bindings), False)
    return [node for node in graph.nodes if node in journal.places]


@lru_cache(maxsize=256)
def _digest(key: tuple[Any, ...], where: spmd.Placement) -> str:
    text = repr((_lines(key), where))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _lines(key: tuple[Any, ...]) -> list[str]:
    """The key of a graph as text that is equal on all ranks if the graphs are."""
    nodes, shapes, roots = key
    return [*map(_text, nodes), str(shapes), str(roots)]


def _text(key: Any) -> str:
    if type(key) is tuple:
        return f"({', '.join(map(_text, key))})"
    return str(OPS.get(key, key)) if type(key) is int else repr(key)


def _print(compiled: Any) -> str:
    """What a known program does that another for the same step might not."""
    if compiled is None:
        return ""
    program = compiled.program
    info = getattr(program.program, "info", None)
    return f"{program.in_shardings} {program.out_shardings} {info and info.fingerprint.hex()}"
