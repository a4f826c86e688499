"""What a captured call recorded, and how it is computed again: see capture.py.

A call is one graph, or several where Python asked for values between: `Segment`s, each a program,
or fewer (merged_segments.py). A replay launches them in turn, reads the values, and compares the
answers that Python got from them. Until the last comparison nothing is overwritten, so a call that
takes another way leaves everything as it was."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from weakref import ref

from torch.utils import _pytree as pytree

from torch_hlo.lazy.capture import traced_numbers
from torch_hlo.lazy.capture.dependencies import Dependencies
from torch_hlo.lazy.capture.guard import Guard
from torch_hlo.lazy.capture.merged_segments import join
from torch_hlo.lazy.capture.variables import Ended, reference
from torch_hlo.lazy.record import generator, session, tracing
from torch_hlo.lazy.record import meta as metas
from torch_hlo.lazy.record.engine import Engine
from torch_hlo.lazy.record.storage import (
    Array,
    Number,
    Storage,
    pending,
    pending_storages,
)
from torch_hlo.lazy.record.tensor import HloTensor, make
from torch_hlo.lazy.run import explain
from torch_hlo.lazy.run.fingerprint import Graph, collect
from torch_hlo.lazy.run.launch import Programs
from torch_hlo.lowering.core.graph import Node, Out
from torch_hlo.lowering.core.registry import HLO_TO_TORCH
from torch_hlo.lowering.core.tape import RECORDING

# replays of a trace after which its programs are joined: others compare numbers that change from
# call to call
JOIN = 3


class Different(Exception):
    """The values of this call are not those for which a trace was made."""


def _hashed(r: ref) -> bool:
    try:
        hash(r)
    except TypeError:  # it died before anybody asked
        return False
    return True


class Segment:
    """What was recorded up to a read, or up to the end: a graph, the storages that it writes, the
    values read after it.

    `checks`: (how, answer) of what Python compared while it was recorded; `reads`: (reference to a
      storage, metadata, view) of each value.
    """

    def __init__(self, log: traced_numbers.Log, known: int, uploads: list) -> None:
        storages = [s for s in pending_storages() if type(s.value) is Out and s.value.array is None]
        outs = {(id(s.value.node), s.value.index): s.value for s in storages}
        # as a step orders its results
        self.graph: Graph = collect(
            sorted(outs.values(), key=lambda out: (out.node.serial, out.index))
        )
        order = {(id(o.node), o.index): i for i, o in enumerate(self.graph.outputs)}
        self.written = [(reference(s), s.meta) for s in storages]
        self.outs = [s.value for s in storages]
        self.output_of = [order[id(o.node), o.index] for o in self.outs]
        self.owners = [[r for r in leaf.owners if _hashed(r)] for leaf in self.graph.leaves]
        # Constants outlive the call, so that no program takes their memory for a result.
        self.constants = {
            i: Storage(leaf, metas.contiguous(leaf.shape.dims, HLO_TO_TORCH[leaf.shape.dtype]))
            for i, leaf in enumerate(self.graph.leaves)
            if all(r() is None for r in leaf.owners)
            and (not leaf.owners or any(leaf.data is b for b in uploads))
        }
        self.dead = [not leaf.held() for leaf in self.graph.leaves]
        self.random = _random_numbers(self.graph)
        self.numbers = [n.value for n in self.graph.numbers]
        # number -> what gives it for (options of optimizers, sources): see Trace.difference
        self.varying: dict[int, Callable] = {}
        self.checks = log.answers[known:]
        self.sources = len(log.sources)  # numbers that are known when it is launched
        self.reads: list[tuple[ref, metas.Meta, object]] = []
        self.programs = Programs()
        self.leaf_at: list[int] = []
        self.output_at: list[int] = []
        self.read_at: list[int] = []
        self.ending: list[int] = []  # places whose storages end with this segment
        self.keeps = False  # a later comparison may undo it
        # whether it may be launched before earlier segments' values are read, and its own be read
        # after later ones are launched
        self.early = self.late = False
        self.after: list = []  # checks of values that it reads itself
        self.needs = -1  # the last source that its numbers follow from


class Trace:
    """One recorded call: its segments, where their inputs come from, and where their outputs go.

    A place is ("argument", i), ("storage", reference), ("gradient", parameter): what it had before
    the call, ("variable", Moving): what it held before, or one that a replay makes: ("new", i),
    ("made", parameter): its gradient after the call."""

    def __init__(
        self,
        name: str,
        segments: list[Segment],
        flat: list,
        form,
        inputs: list[Storage],
        offset: int,
        dependencies: Dependencies,
        log: traced_numbers.Log,
    ) -> None:
        self.name, self.segments, self.form, self.dependencies, self.log = (
            name,
            segments,
            form,
            dependencies,
            log,
        )
        self.call = session.current().traces
        self.offset, self.drawn = offset, generator.default.get_offset() - offset
        self.arguments = {id(s): i for i, s in enumerate(inputs)}
        # reference to a storage -> variable that held it
        self.variables = dependencies.variables.places
        self.metas = {r: meta for s in segments for r, meta in s.written}
        self.made = dependencies.gradients.place(self.metas)  # reference to a storage -> place
        self.count, self.single = len(flat), form.is_leaf()
        self._find: Callable | None = None
        flat = [*flat, *dependencies.variables.left]
        dependencies.variables.left = []
        self.returned = list(
            dict.fromkeys(reference(r._storage) for r in flat if isinstance(r, HloTensor))
        )
        self.numbered: dict[ref, int] = {}
        self.program, self.replays = segments, 0
        self.makers = [
            Ended(name) if isinstance(r, HloTensor) and r.requires_grad and not r.is_leaf else make
            for r in flat
        ]
        # the graph of autograd, and what it saved, goes
        flat = [
            make(r._meta, r._storage, r._view) if type(maker) is Ended else r
            for r, maker in zip(flat, self.makers)
        ]
        self.flat = flat

    def place(self) -> None:
        """Find the places. The call is over, and its temporary values are gone."""
        segments = self.segments
        self._collect_dropped()
        self.dependencies.settings.forget()
        self.leaves = [
            [
                ("constant", x) if i in s.constants else self._origin(x, s.owners[i])
                for i, x in enumerate(s.graph.leaves)
            ]
            for s in segments
        ]
        self.outputs = [[self._place(r) for r, _ in s.written] for s in segments]
        self.reads = [[self._place(r) for r, _, _ in s.reads] for s in segments]
        shared = self._sharing()
        self.results = [self._result(r) for r in self.flat]
        every = [
            *(p for one in (*self.leaves, *self.outputs, *self.reads, *shared) for p in one),
            *(r[0] for r in self.results),
        ]
        stored = [p for p in every if p[0] not in ("constant", "number", "value")]
        places = {p: i for i, p in enumerate(dict.fromkeys(stored))}
        self.places = list(places)
        self.shared = [[places[p] for p in group] for group in shared]  # places that had one array
        new = {self._place(r): meta for r, meta in self.metas.items()}
        self.new_metas = {
            places[p]: meta for p, meta in new.items() if p[0] in ("new", "made") and p in places
        }
        self.result_at = [places.get(r[0], -1) for r in self.results]
        self._place_segments(places)
        self._compare_early()
        self.gradients = [(at, p[1]) for at, p in enumerate(self.places) if p[0] == "made"]
        self.answers = (
            *self.dependencies.assumed.answers,
            *[a for _, a in self.log.answers],
        )
        self.owned = {p for p in self.places if p[0] == "storage"}
        self._forget_values()
        del self.arguments, self.variables, self.metas, self.returned, self.flat

    def _collect_dropped(self) -> None:
        """What the call made and dropped may be held by cycles (optimizers that it made)."""
        kept = {*self.returned, *self.made, *self.arguments}
        if any(
            (s := r()) is not None and s.traced == self.call and r not in kept for r in self.metas
        ):
            gc.collect()

    def _sharing(self) -> set[tuple]:
        """Groups of places that had one array before the call."""
        groups = {
            tuple([self._place(r) for r in owners if r() is not None])
            for s in self.segments
            for owners in s.owners
            if len(owners) > 1
        }
        return {
            group
            for group in groups
            if len(group) > 1 and not any(p[0] in ("new", "made") for p in group)
        }

    def _result(self, r: object) -> tuple:
        """Where a result comes from: (place, metadata, view)."""
        if isinstance(r, HloTensor):
            return self._place(reference(r._storage)), r._meta, r._view
        if type(r) in traced_numbers.TRACKED:
            return ("number", r.how), None, None
        return ("value", r), None, None

    def _place_segments(self, places: dict[tuple, int]) -> None:
        final = set(self.result_at)
        for s, mine, written, read in zip(self.segments, self.leaves, self.outputs, self.reads):
            s.leaf_at, s.output_at, s.read_at = (
                [places.get(p, -1) for p in found] for found in (mine, written, read)
            )
            s.given = [None if at >= 0 else p for at, p in zip(s.leaf_at, mine)]
            s.ending = [
                at
                for at, dead in zip(s.leaf_at, s.dead)
                if dead and at in self.new_metas and at not in final and at not in s.output_at
            ]

    def _compare_early(self) -> None:
        """Move checks to the first segment before which their numbers are known."""
        segments = self.segments
        for i, s in enumerate(segments):
            for check in s.checks:
                first = next(x for x in segments if check[0].last() < x.sources)
                if first is not s:
                    first.checks = [*first.checks, check]
            s.checks = [
                c for c in s.checks if not any(c[0].last() < x.sources for x in segments[:i])
            ]

    def _forget_values(self) -> None:
        """Only the call's results keep the values that it computed."""
        read = {id(leaf) for s in self.segments for leaf in s.graph.leaves}
        for out in (o for s in self.segments for o in (*s.graph.outputs, *s.outs)):
            if id(out.array) not in read:
                out.array = None

    def _place(self, r: ref) -> tuple:
        """The place of a storage that lives, or that the call wrote to."""
        storage = r()
        if storage is not None and id(storage) in self.arguments:
            return "argument", self.arguments[id(storage)]
        if r in self.made:
            return self.made[r]
        if r in self.variables:
            return "variable", self.variables[r]
        if r in self.metas and (
            storage is None or r in self.returned and storage.traced == self.call
        ):
            return "new", self.numbered.setdefault(r, len(self.numbered))
        return "storage", r

    def _origin(self, leaf: Array, owners: Sequence[ref]) -> tuple:
        """Where a leaf's array came from."""
        found = [self._place(r) for r in owners]
        for p in found:
            if p[0] != "storage":
                return p
        lives = [p for p in found if p[1]() is not None]
        if lives:
            return lives[0]
        # gone
        return (
            found[0]
            if found
            else (
                "storage",
                reference(
                    Storage(
                        leaf,
                        metas.contiguous(leaf.shape.dims, HLO_TO_TORCH[leaf.shape.dtype]),
                    )
                ),
            )
        )

    def storages(self, inputs: Sequence[Storage]) -> list[Storage | None] | None:
        """The storages of `places` (None for one that a replay makes); None if a tensor that the
        call read or wrote is gone."""
        if self._find is None:
            self._find = self._finder()
            self._fixed = frozenset([id(p[1]()) for p in self.places if p[0] == "storage"])
            self._moving = [
                at for at, p in enumerate(self.places) if p[0] not in ("storage", "new")
            ]
        try:
            found = self._find(inputs)
        except AttributeError:  # a parameter, or its gradient, is gone
            return None
        others = [id(s) for at in self._moving if (s := found[at]) is not None]
        if not self._fixed.isdisjoint(others) or len(set(others)) < len(others):  # two are one
            return None
        for first, *others in self.shared:
            if any(found[at].value is not found[first].value for at in others):
                return None
        return found

    def _finder(self) -> Callable[[Sequence[Storage]], list[Storage | None]]:
        """A function that looks into all places: one list of Python, as guard.py's conditions are
        one expression."""
        guard = Guard()
        held, gone = guard.name(self.dependencies.variables.held), guard.name(_gone)
        texts = {
            "argument": lambda at, x: f"inputs[{x}]",
            "new": lambda at, x: "None",
            "storage": lambda at, x: f"({guard.name(x)}() or {gone}())",
            "variable": lambda at, x: f"({held}({guard.name(x)}) or {gone}())",
            "gradient": lambda at, x: f"{guard.name(ref(x()))}().grad._storage",
            # a gradient that the replay makes may overwrite the present one
            "made": lambda at, x: (
                f"(g._storage if (g := {guard.name(ref(x()))}().grad) is not None and g._view is"
                f" None and g._storage.meta is {guard.name(self.new_metas.get(at))} else None)"
            ),
        }
        return guard.function(
            "inputs",
            f"[{', '.join([texts[kind](at, x) for at, (kind, x) in enumerate(self.places)])}]",
        )

    def prune(self) -> None:
        """Let arrays forget the storages that have another value by now."""
        with session.current().values:
            for storage in [p[1]() for p in self.owned]:
                if (
                    storage is not None
                    and type(array := storage.value) is Array
                    and len(array.owners) > 1
                ):
                    array.holders()

    def difference(self, before: Trace) -> str | None:
        """Why this call and the one before are not the same program on the same tensors; None if
        they are."""
        if self.log.shown:
            return self.log.shown
        if self.dependencies.inside:
            return self.dependencies.inside
        if len(self.segments) != len(before.segments):
            return "Python asked for another number of values"
        found = self._other_graph(before) or self._other_leaves(before)
        if found is None:
            self._check_sources(before)
            found = self._other_results(before)
        if found is not None:
            return found
        self.dependencies.learn(before.dependencies)
        for i, s in enumerate(self.segments):
            s.keeps = any(after.checks for after in self.segments[i + 1 :])
        return None

    def _other_graph(self, before: Trace) -> str | None:
        """Compare the operations and the numbers that they use; find what gives the numbers."""
        rest = ((), "", "", 0)
        self._values, before_values = _by_value(self.log.made), _by_value(before.log.made)
        inherited = self.dependencies.settings.inherit(before.dependencies.settings)
        for s, b in zip(self.segments, before.segments):
            if s.graph.key != b.graph.key:
                sources = [n.source for n in s.graph.nodes]
                return "the graph differs between calls: " + explain.difference(
                    (s.graph.key, *rest), (b.graph.key, *rest), sources
                )
            s.varying, s.needs = (dict(b.varying), b.needs) if inherited else ({}, -1)
            s.checks = [c for c in s.checks if c[0].function is not _same]
            for i, (new, old) in enumerate(zip(s.numbers, b.numbers)):
                if i not in s.random and not self._follows(s, i, old, new, before, before_values):
                    user = self._user(s, s.graph.numbers[i])
                    return (
                        f"the number {old!r}, now {new!r}, used by {user}, is computed in Python;"
                        " keep it in a tensor (optimizers: capturable=True)"
                    )
        return None

    def _other_leaves(self, before: Trace) -> str | None:
        """Compare the tensors that are read."""
        for s, new_leaves, old_leaves in zip(self.segments, self.leaves, before.leaves):
            for leaf, new, old in zip(s.graph.leaves, new_leaves, old_leaves):
                constant = new[0] == "constant"
                if new[0] != old[0] or not (
                    _equal(new[1], old[1]) if constant else new[1] == old[1]
                ):
                    return (
                        f"{self._user(s, leaf)} reads another tensor ({leaf.shape}) at each call;"
                        " pass it as an argument, or write it in place (gradients: zero_grad()"
                        " inside the function, or set_to_none=False)"
                    )
        return None

    def _check_sources(self, before: Trace) -> None:
        """A whole number that both calls read has to be the same in a replay: what Python computed
        with it unseen (`0.5 * n`) would be the same by chance."""
        for i, (new, old) in enumerate(zip(self.log.sources, before.log.sources)):
            if type(new) is int and new == old:
                later = next((s for s in self.segments if i < s.sources), None)
                if later is not None:
                    source = traced_numbers.How(None, (), i)
                    check = traced_numbers.How(_same, (source, new)), True
                    later.checks = [*later.checks, check]

    def _other_results(self, before: Trace) -> str | None:
        """Compare what is returned, left in variables, and written to."""
        mine, other = [[r[0] for r in t.results] for t in (self, before)]
        kinds = [[p if p[0] == "storage" else p[0] for p in found] for found in (mine, other)]
        if kinds[0] != kinds[1] and [p[0] for p in mine] == [p[0] for p in other]:
            return "it returned another tensor that is kept elsewhere"
        if self.dependencies.variables.forms != before.dependencies.variables.forms:
            return "it leaves values in other variables"
        hows = [[p[1] for p in found if p[0] == "number"] for found in (mine, other)]
        if len(hows[0]) == len(hows[1]) and not all(map(traced_numbers.How.alike, *hows)):
            return "it returned, or left in a variable, a number that was computed in another way"
        values = [[p[1] for p in found if p[0] == "value"] for found in (mine, other)]
        if self.form != before.form or values[0] != values[1] or kinds[0] != kinds[1]:
            return f"it returned {values[1]}, now {values[0]}"
        written = [
            [p for one in t.outputs for p in one if p[0] in ("argument", "made")]
            for t in (self, before)
        ]
        if self.drawn != before.drawn or not written[0] == written[1]:
            return "it wrote to other tensors"
        return None

    def _overwritten(self, s: Segment) -> int:
        """Bytes of what a segment gives new values, of what there was before the call."""
        return sum(
            {
                at: meta.hlo.nbytes
                for at, (_, meta) in zip(s.output_at, s.written)
                if self.places[at][0] != "new"
            }.values()
        )

    def _follows(
        self, s: Segment, i: int, old: float, new: float, before: Trace, before_values: dict
    ) -> bool:
        """Whether number i follows from what a replay knows: it is the same as before, an option of
        an optimizer (or its negative: alpha=-lr), or a number that Python computed from others."""
        for sign in (1, -1):
            alike = [
                k
                for k in self._values.get(sign * new, ())
                if k in before_values.get(sign * old, ()) and self.log.made[k][0].last() < s.sources
            ]
            if alike:
                hows = [self.log.made[k][0] for k in alike]
                if new == old:  # perhaps the same by chance
                    s.checks += [
                        (traced_numbers.How(_same, (how, sign * new)), True) for how in hows
                    ]
                    return True
                s.checks += [(traced_numbers.How(_same, (hows[0], how)), True) for how in hows[1:]]
                s.varying[i] = lambda options, sources, how=hows[0], sign=sign: (
                    sign * how.value(sources)
                )
                s.needs = max(s.needs, hows[0].last())
                return True
        if new == old or new != new and old != old:  # not a number: equal to nothing
            return True
        settings = self.dependencies.settings.alike(before.dependencies.settings, old, new)
        if settings is None:
            return False
        s.varying[i] = settings
        return True

    def _user(self, s: Segment, leaf: Number) -> str:
        for n in s.graph.nodes:
            if any(
                v is leaf
                for v in pytree.tree_leaves(
                    (n.args, n.kwargs),
                    is_leaf=lambda v: isinstance(v, (Array, Number, Out)),
                )
            ):
                return f"{n.target} at {n.source or 'an unknown line'}"
        return "an operation"

    def replay(self, current: Engine, storages: list[Storage | None], options: list, sources: list):
        """Compute again on present values with the `current` engine, and give storages their new
        ones. `storages` (changed), `options`: see the methods that make them; `sources`: numbers
        given to the call (changed). Raises Different, and changes nothing, where Python would have
        taken another way."""
        with RECORDING:
            tracing.after_traces()
        if session.current().effects or session.current().pending and pending():
            current.mark_step()
        first, seed = generator.default.get_offset(), generator.default.initial_seed()
        if self.drawn:
            generator.default.set_offset(first + self.drawn)
        made = [(at, parameter) for at, parameter in self.gradients if storages[at] is None]
        before: list[tuple[Storage, Array]] = []
        try:
            unread, unchecked = [], []
            for s in self.program:
                unchecked += s.checks
                if unread and not (s.early and s.needs < len(sources)):
                    self._read(unread, sources)
                if not unread:
                    self._compare(unchecked, sources)
                numbers = s.graph.numbers
                if s.random or s.varying:
                    numbers = self._numbers(s, options, sources, first, seed)
                self._run(current, s, storages, numbers, before)
                unread += [
                    make(meta, storages[at], view)
                    for at, (_, meta, view) in zip(s.read_at, s.reads)
                ]
                if not s.late:
                    self._read(unread, sources)
                unchecked += s.after
                for at in s.ending:
                    storages[at] = None
            self._compare(unchecked, sources)
        except (Different, ArithmeticError, ValueError):
            for storage, array in reversed(before):
                storage.replace(array)
            generator.default.set_offset(first)
            raise
        for at, parameter in made:
            parameter().grad = make(storages[at].meta, storages[at])
        results = []
        for (where, meta, view), at, make_result in zip(self.results, self.result_at, self.makers):
            if at >= 0:
                results.append(make_result(meta, storages[at], view))
            else:
                results.append(where[1].value(sources) if where[0] == "number" else where[1])
        self.dependencies.settle(sources, results[self.count :])
        self.replays += 1
        if self.replays == JOIN and len(self.segments) > 1:
            lasting = {at for at, p in enumerate(self.places) if p[0] != "new"} | {*self.result_at}
            self.program = join([copy.copy(s) for s in self.segments], self._overwritten, lasting)
        return (
            results[0] if self.single else pytree.tree_unflatten(results[: self.count], self.form)
        )

    def _read(self, unread: list[HloTensor], sources: list) -> None:
        if unread:
            sources += session.engine().items(unread)
            unread.clear()

    def _compare(self, unchecked: list, sources: list) -> None:
        for how, answer in unchecked:
            if how.value(sources) != answer:
                raise Different
        unchecked.clear()

    def _numbers(
        self, s: Segment, options: list, sources: list, first: int, seed: int
    ) -> list[Number]:
        """The numbers of a segment with the present options, sources and state of the generator."""
        numbers = list(s.graph.numbers)
        for i, compute in s.varying.items():
            numbers[i] = Number(compute(options, sources), numbers[i].dtype)
        for i, kind in s.random.items():
            if kind == "seed":
                numbers[i] = Number(seed - (1 << 64) if seed >> 63 else seed, "s64")
            else:
                numbers[i] = Number(numbers[i].value - self.offset + first, "s64")
        return numbers

    def _run(
        self,
        current,
        s: Segment,
        storages: list[Storage | None],
        numbers: list[Number],
        before: list,
    ) -> None:
        if not s.outs:
            return
        leaves = [p[1] if at < 0 else storages[at].value for at, p in zip(s.leaf_at, s.given)]
        for at in s.output_at:
            if storages[at] is None:
                meta = self.new_metas[at]
                # its value comes with the launch
                storages[at] = Storage(Array(meta.hlo, None), meta)
            elif s.keeps:
                before.append((storages[at], storages[at].value))
        outputs = [storages[at] for at in s.output_at]
        ending = [storages[at] for at in s.ending]
        if current.run_again(
            s.graph,
            leaves,
            numbers,
            outputs,
            s.output_of,
            s.programs,
            None if s.keeps else ending,
        ):
            return
        self._record(s, leaves, numbers, outputs)
        if s.keeps:
            current.evaluate(outputs)
        else:
            for at in s.ending:
                storages[at] = None
            del ending, leaves
            current.mark_step()

    def first(self):
        """The result of the call that was traced."""
        flat = [
            maker(r._meta, r._storage, r._view) if type(maker) is Ended else traced_numbers.plain(r)
            for r, maker in zip(self.flat[: self.count], self.makers)
        ]
        return pytree.tree_unflatten(flat, self.form)

    def _record(
        self,
        s: Segment,
        leaves: list[Array],
        numbers: list[Number],
        outputs: list[Storage],
    ) -> None:
        """Record the graph on these leaves and numbers, as the pending values of `outputs`."""
        values: dict[int, object] = dict(zip(map(id, s.graph.leaves), leaves))
        values.update(zip(map(id, s.graph.numbers), numbers))
        made: dict[int, Node] = {}

        def value(x):
            kind = type(x)
            if kind is Out:
                return Out(made[id(x.node)], x.index) if id(x.node) in made else values[id(x.array)]
            if kind is Array or kind is Number:
                return values[id(x)]
            if kind is list or kind is tuple:
                return [value(v) for v in x]
            return x

        shared: dict[tuple[int, int], Out] = {}
        with RECORDING:
            for n in s.graph.nodes:
                made[id(n)] = Node(
                    n.target,
                    tuple([value(a) for a in n.args]),
                    {k: value(v) for k, v in n.kwargs.items()} if n.kwargs else n.kwargs,
                    n.outs,
                    n.source,
                )
            for out, storage in zip(s.outs, outputs):
                storage.replace(
                    shared.setdefault((id(out.node), out.index), Out(made[id(out.node)], out.index))
                )


def _gone() -> None:
    raise AttributeError


def _same(a: object, b: object) -> bool:
    return a == b


def _by_value(
    made: Sequence[tuple[traced_numbers.How, int | float]],
) -> dict[int | float, list[int]]:
    found: dict[int | float, list[int]] = {}
    for k, (_, value) in enumerate(made):
        found.setdefault(value, []).append(k)
    return found


def _random_numbers(graph: Graph) -> dict[int, str]:
    """Numbers of the graph that are the default generator's: position -> seed or offset."""
    position = {id(n): i for i, n in enumerate(graph.numbers)}
    found = {}
    for n in graph.nodes:
        for name in ("seed", "offset"):
            x = n.kwargs.get(name)
            if type(x) is Number:
                found[position[id(x)]] = name
    return found


def _equal(a: Array, b: Array) -> bool:
    """True if two arrays hold the same bytes."""
    session.engine().synchronize()
    return (
        a is b
        or a.data is not None
        and b.data is not None
        and bytes(a.data.bytes) == bytes(b.data.bytes)
    )
