"""`torch_hlo.compile`: a function of lazy tensors, traced until two calls record the same program, and replayed after that.

    @torch_hlo.compile(full_graph=True)
    def train(x, y):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

A replay runs none of the function's Python and records nothing: the program is launched on the tensors' present values (arguments, parameters,
optimizer state, gradients), with new random numbers and the present learning rates: what a schedule changes between calls is an input. Modules that
were switched between training and evaluation are traced again, as are calls in which Python asks for a truth value (`if mask.all():`) or a whole number
of small data that came from the CPU and gets another answer. What else differs between two traced calls cannot be replayed: a number computed
in Python (a schedule's step inside the function), data uploaded inside, another graph. With `full_graph=True` that is an error which names the
line, as is needing a value (`print`, `if loss > 1`); with `full_graph=False` such a function is simply traced at each call. What `.item()` gives may be
returned: the number is read when the program of that call has run.

Gradients are taken inside the function: its results have values only, and a backward pass from one of them is an error.
"""
from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from weakref import ref

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from torch_hlo.lazy import conditions, dispatch, engine, explain, generator, optimizer_state
from torch_hlo.lazy import meta as metas
from torch_hlo.lazy.fingerprint import Graph, collect
from torch_hlo.lazy.storage import Array, Number, Storage, pending, pending_storages
from torch_hlo.lazy.tensor import HloTensor, make, to_cpu
from torch_hlo.lowering.graph import Node, Out
from torch_hlo.lowering.registry import HLO_TO_TORCH

_SIMPLE = {HloTensor, int, float, bool, str, type(None)}  # arguments that hold no others
MODES = 4  # traces kept for modules in training or not, and for answers to what Python asks
TRACES = 4  # calls that may differ (optimizer state is created in the first) before that is an error


def compile(fn: Callable | None = None, *, full_graph: bool = True) -> Callable:
    """Decorate `fn`; also usable as `@torch_hlo.compile(full_graph=True)`."""
    if fn is None:
        return functools.partial(compile, full_graph=full_graph)
    captured = Captured(fn, full_graph)
    return functools.wraps(fn)(lambda *args, **kwargs: captured(args, kwargs))


class Captured:
    """A function and what its calls recorded, per kind of arguments."""

    def __init__(self, fn: Callable, full_graph: bool) -> None:
        self.fn, self.full_graph = fn, full_graph
        self.name = getattr(fn, "__qualname__", repr(fn))
        self.last: dict[object, list[Trace]] = {}  # the latest first, one for each answer to what Python asks
        self.ready: dict[object, list[Trace]] = {}  # one for each way in which modules are training
        self.traces: dict[object, int] = {}
        self.different: set[object] = set()  # calls that are not worth watching any more

    def __call__(self, args: tuple, kwargs: dict):
        if kwargs or not _SIMPLE.issuperset(map(type, args)):
            flat, form = pytree.tree_flatten((args, kwargs))
        else:
            flat, form = args, len(args)
        key = (form, tuple(map(_describe, flat)), torch.is_grad_enabled(), torch.is_autocast_enabled("hlo"), torch.get_default_dtype())
        inputs = [a._storage for a in flat if isinstance(a, HloTensor)]
        trace = next((t for t in self.ready.get(key, ()) if t.modes.hold() and t.assumed.hold(inputs)), None)
        if trace is not None:
            numbers = trace.present_numbers()
            if numbers is not None and len({id(s) for s in inputs}) == len(inputs) and (storages := trace.storages(inputs)) is not None:
                return trace.replay(storages, numbers)
            self.ready[key].remove(trace)  # a tensor that it reads or writes is gone, or an option of an optimizer has changed
        if key in self.different:
            engine.current().mark_step()
            result = self.fn(*args, **kwargs)
            engine.current().mark_step()
            return result
        before = self.last.get(key)
        settings = before[0].settings.present() if before else None
        result, trace = self._trace(flat, args, kwargs)
        if trace is None:
            self._differs(key)
        else:
            trace.settings.compare(settings)
            self._learn(key, trace)
        return result

    def _differs(self, key) -> int:
        count = self.traces[key] = self.traces.get(key, 0) + 1
        if count > TRACES and not self.full_graph:
            self.different.add(key)
        return count

    def _trace(self, flat: Sequence, args: tuple, kwargs: dict) -> tuple[object, Trace | None]:
        current = engine.current()
        current.mark_step()
        guard = _Watching(current, self.name, self.full_graph)
        inputs = [a._storage for a in flat if isinstance(a, HloTensor)]
        start = generator.default.get_offset()
        sources, dispatch.SOURCE = dispatch.SOURCE, True
        try:
            with engine.use(guard), optimizer_state.watching() as settings, _modes() as modes:
                result = self.fn(*args, **kwargs)
        finally:
            dispatch.SOURCE = sources
        if guard.evaluated:
            return result, None
        flat, form = pytree.tree_flatten(result)
        del result
        read = [i for i, r in enumerate(flat) if type(r) is Item]
        flat = [r.tensor if type(r) is Item else r for r in flat]
        ends = [isinstance(r, HloTensor) and r.requires_grad and not r.is_leaf for r in flat]
        flat = [make(r._meta, r._storage, r._view) if end else r for r, end in zip(flat, ends)]  # the graph of autograd, and what it saved, goes
        ends = [end and i not in read for i, end in enumerate(ends)]
        trace = Trace(self.name, flat, form, ends, read, inputs, start, settings, modes, _Assumed(guard.assumptions, inputs))
        current.mark_step()
        return trace.pack(flat), trace

    def _learn(self, key, trace: Trace) -> None:
        seen = self.last.get(key, [])
        before = next((t for t in seen if t.assumed.answers == trace.assumed.answers), None)
        self.last[key] = [trace, *(t for t in seen if t is not before)][:MODES]
        if before is None:
            if len(seen) >= MODES and self._differs(key) > TRACES and self.full_graph:
                raise RuntimeError(f"torch_hlo.compile: {self.name} cannot be replayed: the truth values and numbers that it asks for keep changing; use torch.where")
            return
        difference = trace.difference(before)
        if difference is None:
            others = [t for t in self.ready.get(key, ()) if t.modes != trace.modes or t.assumed.answers != trace.assumed.answers]
            self.ready[key], self.traces[key] = [trace, *others][:MODES], 0
        elif (trace.settings.inside or trace.settings.same(before.settings)) and self._differs(key) > TRACES and self.full_graph:
            raise RuntimeError(f"torch_hlo.compile: {self.name} cannot be replayed: {difference}")


class _Modes(dict):
    """Of every module that was called and outlived the call: a reference, and whether it was training."""

    def see(self, module: torch.nn.Module, args: tuple) -> None:
        self[ref(module)] = module.training

    def settle(self) -> None:
        """The call is over: modules that it made for itself (`nn.CrossEntropyLoss()(x, y)`) are gone, and every call makes its own."""
        for owner in [o for o in self if o() is None]:
            del self[owner]

    def hold(self) -> bool:
        """Whether the modules are as they were."""
        for owner, training in self.items():
            module = owner()
            if module is None or module.training is not training:
                return False
        return True


@contextlib.contextmanager
def _modes() -> Iterator[_Modes]:
    """Yields the modes of the modules that are called in the block."""
    modes = _Modes()
    hook = register_module_forward_pre_hook(modes.see)
    try:
        yield modes
    finally:
        hook.remove()
        modes.settle()


class _Assumed:
    """The truth values and numbers that Python asked for in a call: how each follows from arrays of the CPU, where those came from, and the answers."""

    def __init__(self, found: Sequence[tuple[conditions.Computation, bool | int]], inputs: Sequence[Storage]) -> None:
        arguments = {id(s): i for i, s in enumerate(inputs)}
        self.asked = [c for c, _ in found]
        self.answers = tuple(answer for _, answer in found)
        self.arrays = {id(a): a for c in self.asked for a in c.arrays}
        self.origins = {leaf: _origin(a, arguments) for leaf, a in self.arrays.items()}

    def hold(self, inputs: Sequence[Storage]) -> bool:
        """Whether the answers are the same for these arguments. No, where the arrays no longer come from the CPU."""
        present = {}
        for leaf, (kind, x) in self.origins.items():
            storage = inputs[x] if kind == "argument" else x() if kind == "storage" else None
            if storage is None or not conditions.from_cpu(storage.value):
                return False
            present[leaf] = storage.value
        changed = {leaf for leaf, array in present.items() if array is not self.arrays[leaf]}
        for computation, answer in zip(self.asked, self.answers) if changed else ():
            if changed.isdisjoint(map(id, computation.arrays)):
                continue
            value = computation.run(present)
            if value is None or value.item() != answer:
                return False
        return True


class _Ended(torch.autograd.Function):
    """A result that needs gradients, of a function whose backward pass is over, or was never recorded."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, name: str, result: Callable[[], HloTensor]) -> HloTensor:
        ctx.name = name
        return result()

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(f"torch_hlo.compile: a result of {ctx.name} has no graph to go back through; call backward() or torch.autograd.grad() inside {ctx.name}")


_ANCHOR = torch.zeros((), requires_grad=True)


class Item:
    """What `tensor.item()` gives in a traced call: something to return. A call returns the number, which is there when its program has run; whoever
    wants to know it earlier evaluates the tensor, as `print(tensor)` would, or is told that this cannot be replayed."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: HloTensor) -> None:
        self.tensor = tensor

    def number(self) -> int | float | complex:
        return torch.Tensor.item(self.tensor)

    def __getattr__(self, name: str):
        return getattr(self.number(), name)


def _forwarded(function: Callable) -> Callable:
    return lambda self, *others: function(self.number(), *(o.number() if type(o) is Item else o for o in others))


def _reflected(function: Callable) -> Callable:
    return lambda self, other: function(other, self.number())


_UNARY = (bool, int, float, complex, abs, round, repr, str, format, hash, math.trunc, math.floor, math.ceil, operator.neg, operator.pos, operator.index)
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _function in (*_UNARY, *(getattr(operator, f"__{name}__") for name in (*_BINARY, "lt", "le", "gt", "ge", "eq", "ne"))):
    setattr(Item, f"__{_function.__name__.strip('_')}__", _forwarded(_function))
for _name in _BINARY:
    setattr(Item, f"__r{_name}__", _reflected(getattr(operator, f"__{_name}__")))


class _Watching:
    """The engine while a function is traced: evaluating is an error that names the line (full_graph), or noticed."""

    def __init__(self, inner, name: str, full_graph: bool) -> None:
        self.inner, self.name, self.full_graph, self.evaluated = inner, name, full_graph, False
        self.assumptions: list[tuple[conditions.Computation, bool | int]] = []

    def assume(self, x: HloTensor) -> torch.Tensor | None:
        """A truth value or whole number that follows from small data of the CPU. A replay is for calls in which it is the same."""
        computation = conditions.Computation.of(x)
        value = None if computation is None else computation.run()
        if value is not None:
            self.assumptions.append((computation, value.item()))
        return value

    def item(self, x: HloTensor):
        """The number, where it is known or a truth value; else one that can be returned."""
        if x.numel() != 1 or x.dtype is torch.bool or conditions.known(x, constant=True) is not None:
            return torch.Tensor.item(x)
        return Item(x)

    def later(self, value: HloTensor, check) -> None:
        """A condition on values that a replay computes again: not looked at (see conditions.py)."""

    def __getattr__(self, attribute: str):
        found = getattr(self.inner, attribute)
        if attribute not in ("mark_step", "materialize", "synchronize", "sync"):
            return found

        def checked(*args, **kwargs):
            self.evaluated = True
            if self.full_graph:
                raise RuntimeError(
                    f"torch_hlo.compile: {self.name} needs a value, or ends a step, at {dispatch.source()}; keep it in tensors, return what you want to "
                    "look at (`.item()` may be returned), or use full_graph=False"
                )
            return found(*args, **kwargs)

        return checked


def _describe(x) -> object:
    """What a call's arguments must have in common with the traced one's."""
    if isinstance(x, HloTensor):
        return (x._meta, x.requires_grad, _chain(x._view))
    if isinstance(x, torch.Tensor):
        raise TypeError(f"torch_hlo.compile: arguments must be hlo tensors or constants, not a tensor on {x.device}")
    return (type(x), x)


def _chain(view) -> tuple:
    steps = []
    while view is not None:
        steps.append((view.op, repr(view.args)))
        view = view.parent
    return tuple(steps)


class Trace:
    """One recorded call: the graph, where its inputs come from, and where its outputs go.

    A place is ("argument", i), ("storage", weak reference) or, for outputs, ("new", i): a storage made by the call that it returns.
    """

    def __init__(
        self, name: str, flat: list, form: pytree.TreeSpec, ends: list[bool], read: list[int], inputs: list[Storage], offset: int,
        settings: optimizer_state.Settings, modes: _Modes, assumed: _Assumed,
    ) -> None:  # fmt: skip
        self.assumed, self.read = assumed, read
        self.name, self.form, self.ends, self.settings, self.modes = name, form, ends if any(ends) else None, settings, modes
        self.varying: dict[int, tuple[int, tuple[int, ...]]] = {}  # number -> (sign, settings that it is): see _setting
        arguments = {id(s): i for i, s in enumerate(inputs)}
        storages = [s for s in pending_storages() if type(s.value) is Out and s.value.array is None]
        outs = {(id(s.value.node), s.value.index): s.value for s in storages}
        self.graph: Graph = collect(sorted(outs.values(), key=lambda out: (out.node.serial, out.index)))  # as a step orders its results
        self.offset, self.drawn = offset, generator.default.get_offset() - offset
        self.results = []
        self.new: list[Storage] = []
        for r in flat:
            if isinstance(r, HloTensor):
                known = r._storage.meta, r._meta, r._view
                if id(r._storage) in arguments:
                    self.results.append((("argument", arguments[id(r._storage)]), *known))
                elif any(r._storage is s for s in storages):
                    if not any(r._storage is s for s in self.new):
                        self.new.append(r._storage)
                    self.results.append((("new", next(i for i, s in enumerate(self.new) if s is r._storage)), *known))
                else:
                    self.results.append((("storage", ref(r._storage)), *known))
            else:
                self.results.append((("value", r), None, None, None))
        made = {id(s): i for i, s in enumerate(self.new)}
        self.outputs = []
        for s in storages:
            place = ("argument", arguments[id(s)]) if id(s) in arguments else ("new", made[id(s)]) if id(s) in made else ("storage", ref(s))
            self.outputs.append((place, s.value))
        self.new_metas = [s.meta for s in self.new]
        self.new = []
        self.leaves = [_origin(leaf, arguments) for leaf in self.graph.leaves]
        # Constants outlive the call, so that no program takes their memory for a result.
        self.constants = [Storage(leaf, metas.contiguous(leaf.shape.dims, HLO_TO_TORCH[leaf.shape.dtype])) for kind, leaf in self.leaves if kind == "constant"]
        self.random = _random_numbers(self.graph)
        self.numbers = [n.value for n in self.graph.numbers]
        # For replays: the distinct places, and where leaves, outputs and results are among them.
        places = {p: i for i, p in enumerate(dict.fromkeys(p for p in [*self.leaves, *[p for p, _ in self.outputs], *[r[0] for r in self.results]]
                                                           if p[0] in ("argument", "storage", "new")))}  # fmt: skip
        self.places = list(places)
        self.leaf_at = [places.get(p, -1) for p in self.leaves]
        self.output_at = [places[p] for p, _ in self.outputs]
        self.result_at = [places.get(r[0], -1) for r in self.results]
        order = {(id(o.node), o.index): i for i, o in enumerate(self.graph.outputs)}
        self.output_of = [order[id(o.node), o.index] for _, o in self.outputs]
        self.programs: dict = {}

    def storages(self, inputs: list[Storage]) -> list[Storage | None] | None:
        """The storages of `places` (None for one that a replay makes); None if a tensor that the call read or wrote is gone."""
        found = []
        for kind, x in self.places:
            if kind == "argument":
                found.append(inputs[x])
            elif kind == "new":
                found.append(None)
            else:
                storage = x()
                if storage is None:
                    return None
                found.append(storage)
        return found

    def difference(self, before: Trace) -> str | None:
        """Why this call and the one before are not the same program on the same tensors; None if they are."""
        sources = [n.source for n in self.graph.nodes]
        rest = ((), "", "")
        if self.graph.key != before.graph.key:
            return "the graph differs between calls: " + explain.difference((self.graph.key, *rest), (before.graph.key, *rest), sources)
        if self.settings.inside:
            return f"{self.settings.inside} changes inside the function, which a replay does not run; step the schedule outside"
        self.varying = dict(before.varying) if self.settings.places == before.settings.places else {}
        for i, (new, old) in enumerate(zip(self.numbers, before.numbers)):
            if i not in self.random and new != old and not self._setting(i, old, new, before):
                user = self._user(self.graph.numbers[i])
                return f"the number {old!r}, now {new!r}, used by {user}, is computed in Python; keep it in a tensor (optimizers: capturable=True)"
        for leaf, new, old in zip(self.graph.leaves, self.leaves, before.leaves):
            if new[0] != old[0] or new[0] != "constant" and new[1] != old[1] or new[0] == "constant" and not _equal(new[1], old[1]):
                return (
                    f"{self._user(leaf)} reads another tensor ({leaf.shape}) at each call; pass it as an argument, or write it in place "
                    "(gradients: zero_grad() inside the function, or set_to_none=False)"
                )
        values = [[r[0][1] for r in t.results if r[0][0] == "value"] for t in (self, before)]
        if self.form != before.form or values[0] != values[1] or self.read != before.read:
            return f"it returned {values[1]}, now {values[0]}"
        if self.drawn != before.drawn or [p for p, _ in self.outputs if p[0] == "argument"] != [p for p, _ in before.outputs if p[0] == "argument"]:
            return "it wrote to other tensors"
        return None

    def _setting(self, i: int, old, new, before: Trace) -> bool:
        """Whether number i is an option of an optimizer, or its negative (alpha=-lr), as it was in both calls."""
        for sign in (1, -1):
            alike = tuple(k for k, pair in enumerate(zip(before.settings.values, self.settings.values)) if pair == (sign * old, sign * new))
            if alike and self.settings.places == before.settings.places:
                self.varying[i] = (sign, alike)
                return True
        return False

    def present_numbers(self) -> list[Number] | None:
        """The numbers for a replay with the present options of optimizers. None if one has changed of which it is not known what it changes."""
        present = self.settings.present()
        if present == self.settings.values:
            return self.graph.numbers
        if present is None:
            return None
        unknown = {k for k, (a, b) in enumerate(zip(present, self.settings.values)) if a != b}
        numbers = list(self.graph.numbers)
        for i, (sign, alike) in self.varying.items():
            values = {present[k] for k in alike}
            if len(values) > 1 or type(value := values.pop()) is bool or not isinstance(value, (int, float)):
                return None
            numbers[i] = Number(sign * value, numbers[i].dtype)
            unknown.difference_update(alike)
        return None if unknown else numbers

    def _user(self, leaf) -> str:
        for n in self.graph.nodes:
            if any(v is leaf for v in pytree.tree_leaves((n.args, n.kwargs), is_leaf=lambda v: isinstance(v, (Array, Number, Out)))):
                return f"{n.target} at {n.source or 'an unknown line'}"
        return "an operation"

    def replay(self, storages: list[Storage | None], numbers: list[Number]):
        """Compute again on present values, and give storages their new ones. `storages` (changed), `numbers`: see the methods that make them."""
        current = engine.current()
        if pending():
            current.mark_step()
        leaves = [origin[1] if at < 0 else storages[at].value for at, origin in zip(self.leaf_at, self.leaves)]
        numbers = self._with_random(numbers)
        for i, (kind, x) in enumerate(self.places):
            if kind == "new":
                storages[i] = Storage(Array(self.new_metas[x].hlo, None), self.new_metas[x])  # its value comes with the launch
        again = getattr(current, "run_again", None)
        outputs = [storages[i] for i in self.output_at]
        if again is None or not again(self.graph, leaves, numbers, outputs, self.output_of, self.programs):
            self._record(leaves, numbers, outputs)
            current.mark_step()
        results = []
        for (where, _, meta, view), at in zip(self.results, self.result_at):
            results.append(where[1] if at < 0 else make(meta, storages[at], view))
        return self.pack(results)

    def pack(self, flat: list):
        """What the function returns, of the tensors in it."""
        for i, value in zip(self.read, to_cpu([flat[i] for i in self.read]) if self.read else ()):
            flat[i] = value.item()
        if self.ends is not None:
            flat = [_Ended.apply(_ANCHOR, self.name, lambda r=r: r) if end else r for r, end in zip(flat, self.ends)]
        return pytree.tree_unflatten(flat, self.form)

    def _with_random(self, numbers: list[Number]) -> list[Number]:
        """The numbers of a replay, with the generator's."""
        if not self.random:
            return numbers
        first, seed = generator.default.get_offset(), generator.default.initial_seed()
        generator.default.set_offset(first + self.drawn)
        numbers = list(numbers)
        for i, kind in self.random.items():
            if kind == "seed":
                numbers[i] = Number(seed - (1 << 64) if seed >> 63 else seed, "s64")
            else:
                numbers[i] = Number(numbers[i].value - self.offset + first, "s64")
        return numbers

    def _record(self, leaves: list[Array], numbers: list[Number], outputs: list[Storage]) -> None:
        """Record the graph on these leaves and numbers, as the pending values of `outputs`."""
        values: dict[int, object] = dict(zip(map(id, self.graph.leaves), leaves))
        values.update(zip(map(id, self.graph.numbers), numbers))
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

        for n in self.graph.nodes:
            made[id(n)] = Node(n.target, tuple([value(a) for a in n.args]), {k: value(v) for k, v in n.kwargs.items()} if n.kwargs else n.kwargs, n.outs, n.source)
        shared: dict[tuple[int, int], Out] = {}
        for (_, out), storage in zip(self.outputs, outputs):
            storage.replace(shared.setdefault((id(out.node), out.index), Out(made[id(out.node)], out.index)))


def _origin(leaf: Array, arguments: dict[int, int]) -> tuple:
    """Where a leaf's array came from. Without an owner it was made in the call: a constant."""
    owners = [s for s in (o() for o in leaf.owners) if s is not None]
    for s in owners:
        if id(s) in arguments:
            return "argument", arguments[id(s)]
    return ("storage", ref(owners[0])) if owners else ("constant", leaf)


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
    engine.current().synchronize()
    return a is b or a.data is not None and b.data is not None and bytes(a.data.bytes) == bytes(b.data.bytes)
