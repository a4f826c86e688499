"""What a graph on hlo tensors recorded, and how it is started again: see device_graph.py.

`storages` of a recording are those of the graph's arguments, of its constants and of the state of
optimizers that step in it, in this order; those that each call makes anew come after them. Inputs,
results and writes are positions in that list."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch

from torch_hlo.lazy.record import (
    Array,
    Engine,
    HloTensor,
    Meta,
    Number,
    Storage,
    View,
    Watcher,
    conditions,
    generator,
    make,
    meta as metas,
    pending,
    pending_storages,
    session,
)
from torch_hlo.lazy.record.recording import copied
from torch_hlo.lazy.run.fingerprint import collect
from torch_hlo.lazy.run.launch import Programs
from torch_hlo.lowering.core import HLO_TO_TORCH, RECORDING, Node, Out
from torch_hlo.pytorch import participants
from torch_hlo.pytorch.numbers import KINDS, Conditions, How, followed

from .optimizers import Stepped
from .released import reused
from .signature import Given, Signature

_SECOND = (
    b"Trying to backward through the graph a second time (or directly access saved tensors after"
    b" they have already been freed). The gradients of this result were taken inside the captured"
    b" function."
)


class Unsuitable(Exception):
    """Why a call cannot be started again."""


def _ends(name: str, reason: str) -> Callable[..., Any]:
    """A method of the engine after which a recording is of no use."""

    def method(self: Watching, *args: Any, **kwargs: Any) -> Any:
        self.looks(reason)
        return getattr(self.inner, name)(*args, **kwargs)

    return method


class Watching(Watcher):
    """The engine while a graph is recorded: it notices what the recording depends on besides
    operations.

    `storages`: those that the graph is known to read; `before`: position of each one's array;
    `conditions`: numbers that must not change; `looked_at`: why the recording is of no use.
    """

    captures = True

    def __init__(self, inner: Engine, storages: Sequence[Storage]) -> None:
        super().__init__(inner)
        self.storages: list[Storage] = []
        self.held: list[Any] = []  # what they held
        self.before: dict[int, int] = {}
        self.arrays: list[Array] = []
        self.shared: list[tuple[int, int]] = []  # positions that have one array
        self.numbers: dict[int, How] = {}  # id of a lifted number -> how it follows from arguments
        self.conditions: Conditions = []
        self.stepped: list[Stepped] = []
        self.released: list[int] = []  # ids of parameters whose gradients are dropped
        self.uploads: list[Any] = []
        self.later_checks: list[tuple[HloTensor, conditions.Check]] = []
        self.looked_at = ""
        self._know(storages)

    def _know(self, storages: Sequence[Storage]) -> None:
        known = set(map(id, self.storages))
        for storage in storages:
            at = len(self.storages)
            self.storages.append(storage)
            self.held.append(storage.value)
            if id(storage) not in known and type(storage.value) is Array:
                self.arrays.append(storage.value)
                first = self.before.setdefault(id(storage.value), at)
                if first != at:
                    self.shared.append((first, at))

    def follow(self, numbers: Sequence[float]) -> list[torch.SymFloat]:
        """The graph's numbers, whose uses are followed."""
        return [followed(x, _source(i), self.conditions) for i, x in enumerate(numbers)]

    def hold(self, numbers: Sequence[float]) -> Sequence[float]:
        """These numbers, which must not change."""
        self.conditions += [(_source(i), x) for i, x in enumerate(numbers)]
        return numbers

    def undo(self) -> None:
        """Storages and states of optimizers hold what they held before."""
        for storage, value in reversed(list(zip(self.storages, self.held))):
            if storage.value is not value:
                storage.replace(value)
        for step in reversed(self.stepped):
            step.undo()

    def stepping(self, step: Stepped) -> None:
        self.stepped.append(step)
        self._know([t._storage for t in step.tensors() or ()])

    def releasing(self, parameters: Sequence[HloTensor]) -> None:
        self.released += [id(p) for p in parameters]

    def symbolic(self, value: torch.SymFloat) -> Number:
        number = Number(value.node.value, "f64")
        self.numbers[id(number)] = value.node.how
        return number

    def upload(self, tensor: torch.Tensor) -> Any:
        self.uploads.append(self.inner.upload(tensor))
        return self.uploads[-1]

    def later(self, value: HloTensor, check: conditions.Check) -> None:
        self.later_checks.append((value, check))
        self.inner.later(value, check)

    # ---- what ends a recording

    def looks(self, reason: str) -> None:
        self.looked_at = reason

    materialize = _ends("materialize", "it looks at values")
    evaluate = _ends("evaluate", "it evaluates values")
    mark_step = _ends("mark_step", "it marks a step")
    sync = _ends("sync", "it waits for values")
    synchronize = _ends("synchronize", "it waits for values")


class Recording:
    """One recorded call of a graph. Raises Unsuitable for a call that cannot be started again."""

    def __init__(
        self,
        watch: Watching,
        given: Given,
        results: list,
        signature: Signature,
        offset: int,
    ) -> None:
        if watch.looked_at:
            raise Unsuitable(watch.looked_at)
        if any(step.hooks for step in watch.stepped):
            raise Unsuitable("an optimizer's hooks run Python")
        self.key = given.key
        self.signature = signature
        self.conditions = watch.conditions
        self.shared = watch.shared
        self.stepped = watch.stepped
        for step in self.stepped:
            step.kept.clear()
        self.count = len(watch.storages)
        self.distinct = len(set(map(id, watch.storages)))
        self.pattern = _pattern(watch.storages)
        self.metas = [s.meta for s in watch.storages[len(given.storages) :]]
        self.written = given.written()
        self.programs = Programs()
        self.quick: Callable[[Sequence], list | None] | None = None  # see launcher.py
        self.offset, self.drawn = offset, generator.default.get_offset() - offset
        self._storages(watch, results)
        self.results = [self._result(i, r, results, given) for i, r in enumerate(results)]
        self.pairs = self._pairs([i for i, x in enumerate(given.args) if id(x) in watch.released])
        self.later = [
            (self.at[id(t._storage)], t._meta, t._view, check) for t, check in watch.later_checks
        ]
        self._program(watch)
        del self.at

    # ---- when it is made

    def _storages(self, watch: Watching, results: Sequence) -> None:
        """Number what the call made. Raises Unsuitable if that is kept where the graph's results do
        not say."""
        self.at = {id(s): i for i, s in reversed(list(enumerate(watch.storages)))}
        made = [r._storage for r in results if isinstance(r, HloTensor)]
        made += [t._storage for t, _ in watch.later_checks]
        self.new = []
        for storage in made:
            if id(storage) not in self.at:
                if type(storage.value) is not Out:
                    raise Unsuitable("a result is a tensor that was not made by the graph")
                self.at[id(storage)] = self.count + len(self.new)
                self.new.append(storage.meta)
        del made
        if others := [ref(s) for s in pending_storages() if id(s) not in self.at]:
            if any(r() is not None for r in others):
                gc.collect()
            if any(r() is not None for r in others):
                raise Unsuitable("it keeps a tensor elsewhere than in its results")

    def _result(self, i: int, result: Any, results: Sequence, given: Given) -> tuple:
        """(position of the storage, metadata, view, what becomes of the tensor), or a value that is
        the same each time."""
        for at, argument in enumerate(given.args):
            if result is argument and isinstance(result, HloTensor):
                return "argument", at
        for at in range(i):
            if result is results[at] and isinstance(result, HloTensor):
                return "result", at
        if isinstance(result, HloTensor):
            finish: Callable = make
            if result.requires_grad:
                finish = Ended() if result.grad_fn is not None else _leaf
            elif result.is_inference():
                finish = _of_inference
            return "made", self.at[id(result._storage)], result._meta, result._view, finish
        if isinstance(result, KINDS):
            return "number", result.node.how
        if i in self.signature.boxed:
            return "number", lambda sources: result
        if result is None or isinstance(result, (bool, int, float, str)):
            return "value", result
        raise Unsuitable(f"a result is of type {type(result).__qualname__}")

    def _pairs(self, released: Sequence[int]) -> list[tuple[int, int, Meta]]:
        """Parameters whose gradients the graph drops, by their positions, each with the storage of
        a result that may be that of the gradient, since no other result shares it, and its
        metadata."""
        made = [what for kind, *what in self.results if kind == "made"]
        count = Counter(at for at, *_ in made)
        free = [
            (at, meta)
            for at, meta, view, finish in made
            if at >= self.count
            and count[at] == 1
            and view is None
            and finish is make
            and meta is self.new[at - self.count]
        ]
        pairs = []
        for argument in released:
            meta = self.signature.meta(argument, self.key)
            found = next((pair for pair in free if pair[1] is meta), None)
            if found is not None:
                free.remove(found)
                pairs.append((argument, *found))
        return pairs

    def _program(self, watch: Watching) -> None:
        """The program, with empty arrays in place of those of this call."""
        storages = [s for s in pending_storages() if id(s) in self.at]
        values = {(id(s.value.node), s.value.index): s.value for s in storages}
        ordered = sorted(values.values(), key=lambda out: (out.node.serial, out.index))
        blank = _Blank(ordered)
        self.graph = collect([blank.out(out) for out in ordered])
        order = {key: i for i, key in enumerate(sorted(values, key=lambda k: _order(values[k])))}
        self.output_at = [self.at[id(s)] for s in storages]
        self.output_of = [order[id(s.value.node), s.value.index] for s in storages]
        self.outs = [blank.out(s.value) for s in storages]
        self.leaf_at = []
        self.constants: list[Storage] = []  # what holds the other leaves; their positions are last
        for leaf in self.graph.leaves:
            original = blank.original[id(leaf)]
            at = watch.before.get(id(original), -1)
            if at < 0:
                if not any(original.data is data for data in watch.uploads):
                    raise Unsuitable(
                        f"it reads a tensor ({original.shape}) that is no argument of the graph"
                    )
                dtype = HLO_TO_TORCH[original.shape.dtype]
                at = self.count + len(self.new) + len(self.constants)
                self.constants.append(
                    Storage(original, metas.contiguous(original.shape.dims, dtype))
                )
            self.leaf_at.append(at)
        self._numbers(watch)

    def _numbers(self, watch: Watching) -> None:
        """What follows from arguments, and what is drawn."""
        self.varying = {
            i: watch.numbers[id(n)]
            for i, n in enumerate(self.graph.numbers)
            if id(n) in watch.numbers
        }
        self.random: dict[int, str] = {}
        position = {id(n): i for i, n in enumerate(self.graph.numbers)}
        for node in self.graph.nodes:
            for name in ("seed", "offset"):
                if type(x := node.kwargs.get(name)) is Number:
                    self.random[position[id(x)]] = name
        offsets = list(self.random.values()).count("offset")
        if offsets != self.drawn:
            raise Unsuitable("it draws random numbers whose results are not in the program")

    # ---- when it is used

    def serves(self, given: Given) -> list[Storage] | None:
        """The storages that the program would run on; None if the recording is for other arguments
        than these."""
        if self.key != given.key:
            return None
        storages = given.storages + self.signature.constants
        for step in self.stepped:
            tensors = step.tensors()
            if tensors is None:
                return None
            storages += [t._storage for t in tensors]
        if [s.meta for s in storages[len(given.storages) :]] != self.metas:
            return None
        if len(set(storages)) != self.distinct or (
            self.distinct != self.count and _pattern(storages) != self.pattern
        ):
            return None
        for how, value in self.conditions:
            if how(given.numbers) != value:
                return None
        state = session.current()
        if state.effects or state.pending and pending():
            session.engine().mark_step()
        for first, other in self.shared:
            if storages[first].value is not storages[other].value:
                return None
        return storages

    def launch(self, storages: list[Storage], given: Given) -> list:
        """The graph's results for these arguments; `storages` are what `serves` has returned."""
        engine = session.engine()
        old = reused(self.pairs, given.args) if self.pairs else {}
        for at, meta in enumerate(self.new, self.count):
            storages.append(old[at]._storage if at in old else Storage(Array(meta.hlo, None), meta))
        storages += self.constants
        leaves = [storages[at].value for at in self.leaf_at]
        outputs = [storages[at] for at in self.output_at]
        numbers = self.graph.numbers
        first = generator.default.get_offset()
        if self.varying or self.random:
            numbers = self._present_numbers(given.numbers, first)
        if self.drawn:
            generator.default.set_offset(first + self.drawn)
        try:
            if outputs and not engine.run_again(
                self.graph, leaves, numbers, outputs, self.output_of, self.programs
            ):
                self._append(leaves, numbers, outputs)
                engine.mark_step()
        except BaseException:
            generator.default.set_offset(first)
            raise
        if self.written:
            torch.autograd.graph.increment_version([given.args[i] for i in self.written])
        for at, meta, view, check in self.later:
            session.current().expected.append((make(meta, storages[at], view), check))
        return self._results(storages, given, old)

    def _results(
        self, storages: Sequence[Storage], given: Given, old: dict[int, HloTensor]
    ) -> list:
        results: list[Any] = []
        for kind, what, *how in self.results:
            if kind == "made":
                meta, view, finish = how
                results.append(old[what] if what in old else finish(meta, storages[what], view))
            elif kind == "argument":
                results.append(given.args[what])
            elif kind == "result":
                results.append(results[what])
            else:
                value = what(given.numbers) if kind == "number" else what
                results.append(self.signature.result(len(results), value))
        return results

    def _present_numbers(self, sources: Sequence[float], first: int) -> list[Number]:
        numbers = list(self.graph.numbers)
        for i, how in self.varying.items():
            numbers[i] = Number(how(sources), "f64")
        seed = generator.signed(generator.default.initial_seed())
        for i, name in self.random.items():
            if name == "seed":
                numbers[i] = Number(seed, "s64")
            else:
                numbers[i] = Number(numbers[i].value - self.offset + first, "s64")
        return numbers

    def _append(
        self, leaves: Sequence[Array], numbers: Sequence[Number], outputs: Sequence[Storage]
    ) -> None:
        """Record the program's operations on these leaves and numbers, as the pending values of
        `outputs`."""
        operands: dict[int, Any] = dict(zip(map(id, self.graph.leaves), leaves))
        operands.update(zip(map(id, self.graph.numbers), numbers))
        made: dict[int, Node] = {}

        def value(x: Any) -> Any:
            kind = type(x)
            if kind is Out:
                return Out(made[id(x.node)], x.index)
            if kind is Array or kind is Number:
                return operands[id(x)]
            return [value(v) for v in x] if kind is list or kind is tuple else x

        shared: dict[tuple[int, int], Out] = {}
        with RECORDING:
            for n in self.graph.nodes:
                made[id(n)] = copied(n, value)
            for out, storage in zip(self.outs, outputs):
                key = id(out.node), out.index
                if key not in shared:
                    shared[key] = Out(made[key[0]], out.index)
                storage.replace(shared[key])


def _source(i: int) -> How:
    return lambda sources: sources[i]


def _order(out: Out) -> tuple[int, int]:
    return out.node.serial, out.index


def _pattern(storages: Sequence[Storage]) -> list[int]:
    """For each storage, where it comes first."""
    first: dict[int, int] = {}
    return [first.setdefault(id(s), i) for i, s in enumerate(storages)]


def _leaf(meta: Meta, storage: Storage, view: View | None) -> HloTensor:
    return make(meta, storage, view).requires_grad_()


def _of_inference(meta: Meta, storage: Storage, view: View | None) -> HloTensor:
    with torch.inference_mode():
        return make(meta, storage, view)


class Ended:
    """Makes results whose gradients were taken inside: many at a time, since alone each takes ten
    times as long."""

    COUNT = 16

    def __init__(self) -> None:
        self._spare: list[HloTensor] = []

    def __call__(self, meta: Meta, storage: Storage, view: View | None) -> HloTensor:
        if not self._spare:
            blank = Storage(Array(storage.meta.hlo, None), storage.meta)
            tensors = [make(meta, blank, view) for _ in range(self.COUNT)]
            with torch.enable_grad():
                self._spare += participants.refuse_second_backward(tensors, _SECOND)
        tensor = self._spare.pop()
        tensor._storage, tensor._view = storage, view
        return tensor


class _Blank:
    """Copies of nodes whose leaves have no data. `original`: by the id of a copied leaf, the
    leaf."""

    def __init__(self, outs: Sequence[Out]) -> None:
        self.nodes: dict[int, Node] = {}
        self.leaves: dict[int, Array] = {}
        self.original: dict[int, Array] = {}
        for node in collect(outs).nodes:
            made = self.nodes[id(node)] = copy.copy(node)
            made.args = tuple([self._value(x) for x in node.args])
            if node.kwargs:
                made.kwargs = {k: self._value(x) for k, x in node.kwargs.items()}

    def out(self, out: Out) -> Out:
        return Out(self.nodes[id(out.node)], out.index)

    def _value(self, x: Any) -> Any:
        kind = type(x)
        if kind is Out and x.array is None:
            return self.out(x)
        if kind is list or kind is tuple:
            return kind([self._value(v) for v in x])
        array = x.array if kind is Out else x
        if type(array) is not Array:
            return x
        if id(array) not in self.leaves:
            leaf = self.leaves[id(array)] = Array(array.shape, None)
            self.original[id(leaf)] = array
        return self.leaves[id(array)]
