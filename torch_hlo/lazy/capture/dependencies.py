"""What a captured call depends on besides its arguments, and does besides computing: see
capture.py.

Compared before a replay: Python's variables (variables.py), which parameters take and have
gradients, options of optimizers, truth values that follow from data of the CPU. Done again by a
replay: gradients made, variables and options set, schedules stepped."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from weakref import ref

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import lr_scheduler
from torch.utils.weak import WeakIdRef

from torch_hlo.lazy.capture import options, traced_numbers
from torch_hlo.lazy.capture.guard import Guard
from torch_hlo.lazy.capture.variables import Variables, reference
from torch_hlo.lazy.record import conditions, session
from torch_hlo.lazy.record.storage import Array, Storage
from torch_hlo.lazy.record.tensor import HloTensor


class Dependencies:
    """Of one call. `inside`: why it cannot be replayed, or ""; `counted`: names of variables that
    traced_numbers.py may follow."""

    def __init__(self, fn: Callable, known: Dependencies | None, counted: set[str]) -> None:
        self.settings = options.Settings()
        self.gradients = Gradients(known.gradients.parameters if known is not None else ())
        # steps of learning rate schedules, to be done again
        self.schedules: list[tuple[ref, tuple, dict]] = []
        self.variables = Variables(fn, known.variables if known is not None else None, counted)
        self.assumed: Assumed | None = None  # known when the call is over
        self.inside = ""
        self._guard = Guard()
        self._thread = threading.get_ident()
        self._before = known.settings.present() if known is not None else None

    def see(self, module: torch.nn.Module, args: tuple) -> None:
        """A module is about to run."""
        if threading.get_ident() != self._thread:
            return
        self.variables.meet(module)
        self.gradients.see(p for p in module._parameters.values() if p is not None)

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        if threading.get_ident() != self._thread:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # else the call made it for itself
        if not all(
            isinstance(p, HloTensor) and p._storage.traced == session.current().traces
            for p in parameters
        ):
            self.settings.add(optimizer)
        self.gradients.see(parameters)

    def scheduled(self, schedule, args: tuple, kwargs: dict) -> None:
        """A learning rate schedule is about to step."""
        if not self.settings.places and not self.settings.assigned:
            self.inside = (
                f"{type(schedule).__name__} steps before the optimizer; step it after, or outside"
            )
        plain = [
            tuple(a.how if type(a) in traced_numbers.TRACKED else a for a in args),
            {k: v.how if type(v) in traced_numbers.TRACKED else v for k, v in kwargs.items()},
        ]
        self.schedules.append((ref(schedule), *plain))

    def end(self) -> None:
        """The function has returned."""
        self.gradients.end()
        self.settings.end()
        self.variables.end()
        self.variables.conditions(self._guard)
        self.inside = (
            self.inside
            or self.variables.inside
            or self.settings.inside(self._before, bool(self.schedules))
        )

    def learn(self, other: Dependencies) -> None:
        """Another call had the same program: where the two differ does not matter."""
        self.gradients.learn(other.gradients)

    def hold(self, inputs: Sequence[Storage]) -> bool:
        """Whether everything is as it was."""
        if self.gradients.unguarded:
            self.gradients.conditions(self._guard)
        return self._guard.holds() and (not self.assumed.asked or self.assumed.hold(inputs))

    def reason(self, inputs: Sequence[Storage]) -> str:
        """Why `hold` is false, as a part of a sentence; "" if it is true."""
        return self._guard.reason() or (
            ""
            if self.assumed.hold(inputs)
            else "what Python asked of data from the CPU has another answer"
        )

    def settle(self, sources: list, left: Sequence) -> None:
        """The call has been computed again: do what else it did. `sources`: its numbers; `left`:
        what it leaves in variables."""
        if self.gradients.emptied:
            self.gradients.settle()
        if self.settings.assigned:
            self.settings.assign(sources)
        if self.variables.forms:
            self.variables.assign(left)
        for schedule, args, kwargs in self.schedules:
            if schedule() is not None:
                schedule().step(
                    *(a.value(sources) if type(a) is traced_numbers.How else a for a in args),
                    **{
                        k: v.value(sources) if type(v) is traced_numbers.How else v
                        for k, v in kwargs.items()
                    },
                )


@contextlib.contextmanager
def watching(dependencies: Dependencies) -> Iterator[None]:
    """Look at what happens in the block."""
    hook = register_module_forward_pre_hook(dependencies.see)
    session.current().optimizer_watchers.append(dependencies.stepping)
    try:
        with _schedules(dependencies.scheduled):
            yield
    finally:
        hook.remove()
        session.current().optimizer_watchers.remove(dependencies.stepping)
        dependencies.end()


class _Here(threading.local):
    """What a thread does: whom it tells of schedules' steps (None: nobody), and how many of them it
    is in."""

    report, depth = None, 0


_here = _Here()


@contextlib.contextmanager
def _schedules(report: Callable) -> Iterator[None]:
    """Call `report(schedule, args, kwargs)` for each step of a schedule by this thread, but not for
    those that it steps itself."""
    left = [lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau]
    while left:
        kind = left.pop()
        watched = session.current().schedules
        if "step" in vars(kind) and watched.get(kind) is not kind.step:
            kind.step = watched[kind] = _telling(kind.step)
        left += kind.__subclasses__()
    before, _here.report = _here.report, report
    try:
        yield
    finally:
        _here.report = before


def _telling(step: Callable) -> Callable:
    """A schedule's `step` that tells of itself."""

    @functools.wraps(step)
    def call(self, *args, **kwargs):
        if _here.report is None:
            return step(self, *args, **kwargs)
        if not _here.depth:
            _here.report(self, args, kwargs)
        _here.depth += 1
        try:
            return step(
                self,
                *map(traced_numbers.plain, args),
                **{k: traced_numbers.plain(v) for k, v in kwargs.items()},
            )
        finally:
            _here.depth -= 1

    return call


class Gradients:
    """The gradients of parameters: a slot that a call may find empty, and leave filled with another
    tensor."""

    def __init__(self, known: Sequence[WeakIdRef]) -> None:
        self.parameters: dict[WeakIdRef, bool] = {}  # -> whether it requires gradients
        # parameter -> the storage of its gradient when it was first seen
        self.before: dict[WeakIdRef, ref | None] = {}
        # parameter -> whether it had one when the call began
        self.start: dict[WeakIdRef, bool] = {}
        self.see(p for p in (r() for r in known) if p is not None)
        self.start = {r: p.grad is not None for r in self.before if (p := r()) is not None}
        self.emptied: list[WeakIdRef] = []
        self.unguarded = True
        self.after: dict[WeakIdRef, ref] = {}

    def see(self, parameters) -> None:
        for p in parameters:
            # not one that the call makes for itself
            if (
                isinstance(p, HloTensor)
                and p.is_leaf
                and p._storage.traced != session.current().traces
            ):
                r = WeakIdRef(p)
                if r not in self.before:
                    self.parameters[r] = p.requires_grad
                    gradient = p.grad
                    self.before[r] = (
                        reference(gradient._storage)
                        if gradient is not None
                        and isinstance(gradient, HloTensor)
                        and gradient._view is None
                        else None
                    )

    def end(self) -> None:
        for r in self.before:
            p = r()
            gradient = None if p is None else p.grad
            if gradient is None:
                if p is not None:
                    self.emptied.append(r)
            elif (
                isinstance(gradient, HloTensor)
                and gradient._view is None
                and gradient._meta is gradient._storage.meta
            ):
                self.after[r] = reference(gradient._storage)

    def place(self, written: Mapping[ref, object]) -> dict[ref, tuple]:
        """Storages of gradients -> their places."""
        places = {storage: ("made", p) for p, storage in self.after.items() if storage in written}
        places.update(
            {storage: ("gradient", p) for p, storage in self.before.items() if storage is not None}
        )
        return places

    def learn(self, other: Gradients) -> None:
        if other.start:
            self.start = {p: had for p, had in self.start.items() if other.start.get(p, had) is had}

    def conditions(self, guard: Guard) -> None:
        """Those under which the call may be replayed."""
        self.unguarded = False
        for r, wanted in self.parameters.items():
            p = r()
            had = "" if r not in self.start else f" and p.grad is {'not ' * self.start[r]}None"
            guard.term(
                (
                    "False"
                    if p is None
                    else f"(p := {guard.name(ref(p))}()).requires_grad is {wanted}{had}"
                ),
                "whether a parameter takes gradients, or has one,",
            )

    def settle(self) -> None:
        for r in self.emptied:
            p = r()
            if p.grad is not None:
                p.grad = None


class Assumed:
    """The truth values and numbers that Python asked for in a call: how each follows from arrays of
    the CPU, where those came from, and the answers."""

    def __init__(
        self,
        found: Sequence[tuple[conditions.Computation, bool | int]],
        inputs: Sequence[Storage],
    ) -> None:
        self.asked = [c for c, _ in found]
        self.answers = tuple(answer for _, answer in found)
        self.arrays = {id(a): a for c in self.asked for a in c.arrays}
        self.origins = {leaf: _origin(a, inputs) for leaf, a in self.arrays.items()}

    def hold(self, inputs: Sequence[Storage]) -> bool:
        """Whether the answers are the same for these arguments. No, where the arrays no longer come
        from the CPU."""
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
