"""What a captured call depends on besides its arguments, and does besides computing: see capture.py.

Compared before a replay: modules' modes, which parameters take and have gradients, options of optimizers, truth values that follow from data of the CPU, Python's numbers
that the function can see. Done again by a replay: gradients made, options set, schedules stepped.
"""
from __future__ import annotations

import contextlib
import inspect
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from weakref import ref

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import lr_scheduler
from torch.utils.weak import WeakIdRef

from torch_hlo.lazy import conditions, optimizer_state, tracked
from torch_hlo.lazy.storage import Array, Storage
from torch_hlo.lazy.tensor import HloTensor


class Surroundings:
    """Of one call. `inside`: why it cannot be replayed, or ""; `counted`: names of variables that tracked.py may follow."""

    def __init__(self, fn: Callable, known: Surroundings | None, counted: set[str]) -> None:
        self.settings = optimizer_state.Settings()
        self.modes: dict[ref, bool] = {}  # of every module that was called and outlived the call: whether it was training
        self.gradients = Gradients(known.gradients.parameters if known is not None else ())
        self.schedules: list[tuple[ref, tuple, dict]] = []  # steps of learning rate schedules, to be done again
        self.state = State(fn, counted | known.state.summed if known is not None else counted)
        self.assumed: Assumed | None = None  # known when the call is over
        self.inside = ""
        self._before = known.settings.present() if known is not None else None

    def see(self, module: torch.nn.Module, args: tuple) -> None:
        """A module is about to run."""
        self.modes[ref(module)] = module.training
        self.gradients.see(p for p in module._parameters.values() if p is not None)

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        self.settings.add(optimizer)
        self.gradients.see(p for group in optimizer.param_groups for p in group["params"])

    def scheduled(self, schedule, args: tuple, kwargs: dict) -> None:
        """A learning rate schedule is about to step."""
        if not self.settings.places and not self.settings.assigned:
            self.inside = f"{type(schedule).__name__} steps before the optimizer; step it after, or outside"
        plain = [tuple(a.how if type(a) in tracked.TRACKED else a for a in args), {k: v.how if type(v) in tracked.TRACKED else v for k, v in kwargs.items()}]
        self.schedules.append((ref(schedule), *plain))

    def end(self) -> None:
        """The function has returned."""
        for owner in [o for o in self.modes if o() is None]:  # modules that it made for itself (`nn.CrossEntropyLoss()(x, y)`); every call makes its own
            del self.modes[owner]
        self.gradients.end()
        self.settings.end()
        self.state.end()
        self.inside = self.inside or self.state.changes() or self.settings.inside(self._before, bool(self.schedules))

    def learn(self, other: Surroundings) -> None:
        """Another call had the same program: where the two differ does not matter."""
        self.gradients.learn(other.gradients)

    def hold(self, inputs: Sequence[Storage]) -> bool:
        """Whether everything is as it was."""
        for owner, training in self.modes.items():
            module = owner()
            if module is None or module.training is not training:
                return False
        return self.gradients.hold() and self.assumed.hold(inputs) and self.state.hold()

    def settle(self, sources: list) -> None:
        """The call has been computed again: do what else it did. `sources`: its numbers."""
        self.gradients.settle()
        self.settings.assign(sources)
        self.state.assign(sources)
        for schedule, args, kwargs in self.schedules:
            if schedule() is not None:
                schedule().step(*(a.value(sources) if type(a) is tracked.How else a for a in args), **{k: v.value(sources) if type(v) is tracked.How else v for k, v in kwargs.items()})


@contextlib.contextmanager
def watching(surroundings: Surroundings) -> Iterator[None]:
    """Look at what happens in the block."""
    hook = register_module_forward_pre_hook(surroundings.see)
    optimizer_state.WATCHING.append(surroundings.stepping)
    try:
        with _schedules(surroundings.scheduled):
            yield
    finally:
        hook.remove()
        optimizer_state.WATCHING.remove(surroundings.stepping)
        surroundings.end()


@contextlib.contextmanager
def _schedules(report: Callable) -> Iterator[None]:
    """Call `report(schedule, args, kwargs)` for each step of a schedule, but not for those that it steps itself."""
    inner = [0]

    def watched(step: Callable) -> Callable:
        def call(self, *args, **kwargs):
            if not inner[0]:
                report(self, args, kwargs)
            inner[0] += 1
            try:
                return step(self, *args, **kwargs)
            finally:
                inner[0] -= 1

        return call

    kinds, left = [], [lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau]
    while left:
        kind = left.pop()
        if "step" in vars(kind) and kind not in [k for k, _ in kinds]:
            kinds.append((kind, vars(kind)["step"]))
        left += kind.__subclasses__()
    for kind, step in kinds:
        kind.step = watched(step)
    try:
        yield
    finally:
        for kind, step in kinds:
            kind.step = step


def _reference(storage: Storage) -> ref:
    r = ref(storage)
    hash(r)
    return r


class Gradients:
    """The gradients of parameters: a slot that a call may find empty, and leave filled with another tensor."""

    def __init__(self, known: Sequence[WeakIdRef]) -> None:
        self.parameters: dict[WeakIdRef, bool] = {}  # -> whether it requires gradients
        self.before: dict[WeakIdRef, ref | None] = {}  # parameter -> the storage of its gradient when it was first seen
        self.start: dict[WeakIdRef, bool] = {}  # parameter -> whether it had one when the call began
        self.see(p for p in (r() for r in known) if p is not None)
        self.start = {p: storage is not None for p, storage in self.before.items()}
        self.emptied: list[WeakIdRef] = []
        self.after: dict[WeakIdRef, ref] = {}

    def see(self, parameters) -> None:
        for p in parameters:
            if type(p) is HloTensor or isinstance(p, HloTensor):
                r = WeakIdRef(p)
                if r not in self.before:
                    self.parameters[r] = p.requires_grad
                    gradient = p.grad
                    self.before[r] = _reference(gradient._storage) if gradient is not None and isinstance(gradient, HloTensor) and gradient._view is None else None

    def end(self) -> None:
        for r in self.before:
            p = r()
            gradient = None if p is None else p.grad
            if gradient is None:
                if p is not None:
                    self.emptied.append(r)
            elif isinstance(gradient, HloTensor) and gradient._view is None and gradient._meta is gradient._storage.meta:
                self.after[r] = _reference(gradient._storage)

    def place(self, written: Mapping[ref, object]) -> dict[ref, tuple]:
        """Storages of gradients -> their places."""
        places = {storage: ("made", p) for p, storage in self.after.items() if storage in written}
        places.update({storage: ("gradient", p) for p, storage in self.before.items() if storage is not None})
        return places

    def learn(self, other: Gradients) -> None:
        if other.start:
            self.start = {p: had for p, had in self.start.items() if other.start.get(p, had) is had}

    def hold(self) -> bool:
        for r, wanted in self.parameters.items():
            p = r()
            if p is None or p.requires_grad is not wanted:
                return False
        return all((r().grad is not None) is had for r, had in self.start.items())

    def settle(self) -> None:
        for r in self.emptied:
            p = r()
            if p.grad is not None:
                p.grad = None


class Assumed:
    """The truth values and numbers that Python asked for in a call: how each follows from arrays of the CPU, where those came from, and the answers."""

    def __init__(self, found: Sequence[tuple[conditions.Computation, bool | int]], inputs: Sequence[Storage]) -> None:
        self.asked = [c for c, _ in found]
        self.answers = tuple(answer for _, answer in found)
        self.arrays = {id(a): a for c in self.asked for a in c.arrays}
        self.origins = {leaf: _origin(a, inputs) for leaf, a in self.arrays.items()}

    def hold(self, inputs: Sequence[Storage]) -> bool:
        """Whether the answers are the same for these arguments. No, where the arrays no longer come from the CPU."""
        present = {}
        for leaf, x in self.origins.items():
            storage = inputs[x] if type(x) is int else None if x is None else x()
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


def _origin(array: Array, inputs: Sequence[Storage]) -> int | ref | None:
    owners = [s for s in (o() for o in array.owners) if s is not None]
    found = next((i for s in owners for i, x in enumerate(inputs) if x is s), None)
    return found if found is not None else ref(owners[0]) if owners else None


_SIMPLE = frozenset({int, float, bool, str, type(None)})
_MISSING = object()


class State:
    """Python's numbers and words that a function can see: in its closure, in globals that it names, in attributes and items of those. And the random
    generators of Python and NumPy."""

    def __init__(self, fn: Callable, counted: set[str]) -> None:
        self.random = _random_state()
        self.counters: list[tuple[Callable, object, object, object]] = []  # numbers that the function counts up: (how to read it, from what, key, how it follows)
        self.versions: list[tuple[torch.Tensor, int, str]] = []  # of tensors of the CPU
        self._counted = counted
        self.summed: set[str] = set()  # other floating-point variables that it changes: nothing looks into those unseen
        self.found: list[tuple[Callable, object, object, object, str]] = []  # (how to read it, from what, key, value, name)
        self.generators: list[tuple[Callable, str, str]] = []  # (how to read its state, the state, name)
        self._seen: set[int] = set()
        self._function(fn, 3)

    def _function(self, fn, depth: int) -> None:
        fn = getattr(fn, "__wrapped__", fn)
        if isinstance(fn, types.MethodType):
            owner, fn = fn.__self__, fn.__func__
            code = getattr(inspect.unwrap(fn), "__code__", None)
            self._look(owner, code.co_varnames[0] if code is not None and code.co_argcount else "self", depth)
        if not isinstance(fn, types.FunctionType) or id(fn) in self._seen:
            return
        self._seen.add(id(fn))
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
            self._value(_cell, cell, None, name, depth)
        for name in _names(fn.__code__):
            if name in fn.__globals__:
                self._value(_item, fn.__globals__, name, name, depth)

    def _value(self, read: Callable, owner, key, name: str, depth: int) -> None:
        value = read(owner, key)
        if name in self._counted and type(value) in (int, float):
            self.counters.append((read, owner, key, None))
        elif type(value) in _SIMPLE:
            self.found.append((read, owner, key, value, name))
        elif depth:
            self._look(value, name, depth - 1)

    def _look(self, value, name: str, depth: int) -> None:
        kind = type(value)
        if isinstance(value, types.FunctionType | types.MethodType):
            self._function(value, depth)
            return
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.is_inference():
            self.versions.append((value, value._version, name))
        if id(value) in self._seen or isinstance(value, type | types.ModuleType | torch.Tensor):
            return
        self._seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            for key, tensor in (*value.named_parameters(name), *value.named_buffers(name)):
                self._look(tensor, key, depth)
        state = getattr(value, "getstate", None) or getattr(value, "get_state", None) or (lambda: value.bit_generator.state if hasattr(value, "bit_generator") else None)
        if isinstance(value, random.Random) or kind.__module__.startswith("numpy.random"):
            self.generators.append((state, repr(state()), name))
        if kind is list or kind is dict:
            if len(value) <= 64:
                for key in range(len(value)) if kind is list else list(value):
                    self._value(_item, value, key, f"{name}[{key!r}]", depth)
        elif not (kind.__module__ or "").startswith(("torch.", "numpy", "builtins")) and isinstance(attributes := getattr(value, "__dict__", None), dict):
            for key in list(attributes):
                if isinstance(key, str) and not key.startswith("_"):
                    self._value(_item, attributes, key, f"{name}.{key}", depth)

    def begin(self, log: tracked.Log) -> None:
        """The function is about to be called: what it counts are numbers that remember it."""
        for read, owner, key, _ in self.counters:
            _set(read, owner, key, log.source(read(owner, key)))

    def end(self) -> None:
        """It has returned, or raised: what it has counted are plain numbers again."""
        for i, (read, owner, key, _) in enumerate(self.counters):
            value = read(owner, key)
            if type(value) in tracked.TRACKED:
                self.counters[i] = (read, owner, key, value.how)
                _set(read, owner, key, tracked.plain(value))
        self.summed = {name for read, owner, key, value, name in self.found if type(value) is float and read(owner, key) != value}
        self.summed |= self._counted
        for read, owner, key, _, _ in self.found:
            if type(now := read(owner, key)) in tracked.TRACKED:
                _set(read, owner, key, tracked.plain(now))

    def sources(self) -> list:
        """The present numbers that the function counts."""
        return [read(owner, key) for read, owner, key, _ in self.counters]

    def assign(self, sources: Sequence) -> None:
        """Count as the function does."""
        for read, owner, key, how in self.counters:
            _set(read, owner, key, how.value(sources))

    def changes(self) -> str:
        """What the call has changed, as a reason why it cannot be replayed, or ""."""
        if _random_state() != self.random or any(repr(read()) != state for read, state, _ in self.generators):
            return "it draws random numbers of Python or NumPy; draw them outside and pass them as arguments, or use torch's"
        for tensor, version, name in self.versions:
            if tensor._version != version:
                return f"it writes to {name}, a tensor of the CPU, which a replay does not do; move it to the device"
        self.versions = []
        if any(how is None for *_, how in self.counters):
            return "it gives a variable that it counts another kind of value"
        for read, owner, key, value, name in self.found:
            now = read(owner, key)
            if now is not value and not (type(now) is type(value) and now == value):
                return f"it changes {name} (from {value!r} to {now!r}), which a replay does not do; do that outside, or keep it in a tensor"
        return ""

    def hold(self) -> bool:
        for read, owner, key, value, _ in self.found:
            now = read(owner, key)
            if now is not value and (type(now) is not type(value) or now != value):
                return False
        return True


def _cell(cell, _):
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _set(read: Callable, owner, key, value) -> None:
    if read is _cell:
        owner.cell_contents = value
    else:
        owner[key] = value


def _item(owner, key):
    try:
        return owner[key]
    except LookupError:
        return _MISSING


def _names(code: types.CodeType) -> Iterator[str]:
    """Names of globals (and attributes) in a function and those within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _random_state() -> tuple:
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else (0, b"", 0)
    return random.getstate(), state[1].tobytes() if numpy is not None else b"", state[2]
