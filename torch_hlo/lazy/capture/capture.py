"""`torch_hlo.compile`: a function of lazy tensors, traced until two calls record the same program,
and replayed after that.

    @torch_hlo.compile
    def train(x, y):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

A replay runs none of the function's Python and records nothing: its programs are launched on the
tensors' present values (arguments, parameters, optimizer state, gradients), with new random numbers
and the present learning rates. It is for calls in which nothing else has changed, and any other is
traced (dependencies.py: which parameters have and take gradients; variables.py: what the function
sees of Python's variables, modules and containers).

Values may be read (`.item()`, `if loss.isnan():`): the call is then several programs (replay.py),
and what Python computes with numbers that it read or was given is computed again
(traced_numbers.py).
Where a comparison comes out otherwise than when it was traced, the call is undone and traced; up to
MODES ways through a function are kept.

What the call leaves in variables (`self.hidden = h.detach()`, `losses.append(loss.item())`,
`self.steps += 1`), a replay leaves there, too.

What cannot be replayed: a number that comes from elsewhere, or is printed; data uploaded inside;
other changes to Python's variables; tensors read as a whole. With `full_graph=True` that is an
error which names the line, with `full_graph=False` such a function is simply traced at each call.
TORCH_HLO_LOG=1 says why a call that could have been replayed is traced again.

Gradients are taken inside the function: its results have values only, and a backward pass from one
of them is an error."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch.utils import _pytree as pytree

from torch_hlo.device.memory import Buffer
from torch_hlo.lazy.capture import source_variables, traced_numbers
from torch_hlo.lazy.capture.dependencies import Assumed, Dependencies, watching
from torch_hlo.lazy.capture.replay import Different, Segment, Trace
from torch_hlo.lazy.capture.variables import like, reference
from torch_hlo.lazy.record import (
    conditions,
    generator,
    recording,
    session,
    tracing,
)
from torch_hlo.lazy.record.engine import Engine, Watcher
from torch_hlo.lazy.record.storage import Storage, pending
from torch_hlo.lazy.record.tensor import HloTensor, from_cpu
from torch_hlo.log import level, say
from torch_hlo.pytorch import participants

_SIMPLE = {
    HloTensor,
    int,
    float,
    bool,
    str,
    type(None),
}  # arguments that hold no others
MODES = 4  # traces kept for modules in training or not, and for answers to what Python asks
# whole numbers with which a function may be called before it is told that they are constants
KINDS = 32
# calls that may differ (optimizer state is created in the first) before that is an error
TRACES = 4


def compile(fn: Callable | None = None, *, full_graph: bool = True) -> Callable:
    """Decorate `fn`; also usable as `@torch_hlo.compile(full_graph=True)`. Raises RuntimeError in a
    call that shows that `fn` cannot be replayed (`full_graph=False`: traces every call)."""
    if fn is None:
        return functools.partial(compile, full_graph=full_graph)
    captured = Captured(fn, full_graph)
    call = captured.call

    @functools.wraps(fn)
    def replayed(*args, **kwargs) -> object:
        return call(args, kwargs)

    return replayed


class Captured:
    """A function and what its calls recorded, per kind of arguments."""

    def __init__(self, fn: Callable, full_graph: bool) -> None:
        self.fn, self.full_graph = fn, full_graph
        self.name = getattr(fn, "__qualname__", repr(fn))
        names, self.counted = source_variables.compared(fn)
        code = getattr(inspect.unwrap(fn), "__code__", None)
        own = isinstance(fn, types.MethodType)
        self.compared = {
            i - own
            for i, name in enumerate(
                code.co_varnames[: code.co_argcount] if code is not None else ()
            )
            if name in names
        }
        self.last: dict[object, list[Trace]] = {}  # the latest first
        self.ready: dict[object, list[Trace]] = {}  # one for each way through the function
        self.traces: dict[object, int] = {}
        self.different: set[object] = set()  # calls that are not worth watching any more
        # calls that are alike but for whole numbers -> those
        self.constants: dict[object, set] = {}

    def call(self, args: tuple, kwargs: dict) -> object:
        """The function's result, or a replay of it."""
        current = session.engine()
        if type(current) is _Watching:  # part of another function
            return self.fn(*args, **kwargs)
        if session.current().journal is not None:  # what a trace leaves out may differ on the ranks
            return self._leave_alone(args, kwargs)
        if kwargs or not _SIMPLE.issuperset(map(type, args)):
            flat, form = _flattened(args, kwargs)
            followed = ()
        else:
            flat, form, followed = args, len(args), self.compared
        if not _SIMPLE.issuperset(map(type, flat)) and any(map(_elsewhere, flat)):
            flat = [from_cpu(a) if _elsewhere(a) and a.device.type == "cpu" else a for a in flat]
            args, kwargs = (flat, {}) if type(form) is int else pytree.tree_unflatten(flat, form)
        try:
            key, inputs, numbers = _kind(flat, form, followed)
        except TypeError:
            if self.full_graph:
                raise
            return self._leave_alone(args, kwargs)
        ready = self.ready.get(key, ())
        reasons: list[str] = []
        for trace in ready:
            options, storages, changed = _present(trace, inputs)
            if options is None or storages is None:
                reasons.append(changed)
                continue
            sources = [flat[i] for i in numbers] + trace.dependencies.variables.sources()
            try:
                result = trace.replay(current, storages, options, sources)
            except Different:
                reasons.append("a comparison of numbers came out otherwise")
                continue
            if trace is not ready[0]:
                ready.remove(trace)
                ready.insert(0, trace)
            return result
        if key not in self.last and any(type(a) is int for a in flat):
            self._count_constants(key, flat)
        if key in self.different:
            return self._leave_alone(args, kwargs)
        if ready and level():
            self._say_why(ready, inputs, reasons)
        result, trace = self._trace(flat, form, numbers, args, kwargs, self.last.get(key))
        if trace is None:
            self._differs(key)
        else:
            self._learn(key, trace)
        return result

    def _count_constants(self, key: tuple, flat: Sequence) -> None:
        """A kind of call that has not been seen: too many that differ only in whole numbers are an
        error, or not watched."""
        form, described, *rest = key
        alike = (
            form,
            tuple([int if type(a) is int else k for a, k in zip(flat, described)]),
            *rest,
        )
        known = self.constants.setdefault(alike, set())
        known.add(tuple([a for a in flat if type(a) is int]))
        if len(known) > KINDS:
            if self.full_graph:
                raise RuntimeError(
                    f"torch_hlo.compile: {self.name} is traced for every whole number that it"
                    f" is given, {KINDS} so far: pass what changes as a float or a tensor, or"
                    " only compare it in the function"
                )
            self.different.add(key)

    def _say_why(self, ready: list[Trace], inputs: list[Storage], reasons: list[str]) -> None:
        """Log why none of the traces could be replayed."""
        changed = [trace.dependencies.reason(inputs) for trace in ready]
        found = dict.fromkeys(filter(None, [*changed, *reasons]))
        say(
            1,
            f"{self.name} is traced again: {'; '.join(found) or 'an argument is given twice'}",
        )

    def _leave_alone(self, args: tuple, kwargs: dict) -> object:
        session.engine().mark_step()
        result = self.fn(*args, **kwargs)
        session.engine().mark_step()
        return result

    def _differs(self, key: tuple) -> int:
        count = self.traces[key] = self.traces.get(key, 0) + 1
        if count > TRACES and not self.full_graph:
            self.different.add(key)
        return count

    def _trace(self, *call) -> tuple[object, Trace | None]:
        with tracing.tracing() as trace_under_way:
            result, trace = self._trace_alone(*call)
        if trace is not None and trace_under_way.disturbed:
            trace.dependencies.inside = "another thread recorded operations while it was traced"
        return result, trace

    def _trace_alone(
        self,
        flat: Sequence,
        form: int,
        numbers: Sequence[int],
        args: tuple,
        kwargs: dict,
        before: list[Trace] | None,
    ) -> tuple[object, Trace | None]:
        current = session.engine()
        current.mark_step()
        for t in before or ():
            t.prune()
        tensors = [a for a in flat if isinstance(a, HloTensor)]
        inputs, forms = [a._storage for a in tensors], [a._meta for a in tensors]
        session.current().traces += 1
        start = generator.default.get_offset()
        state = session.current()
        sources, state.sources = state.sources, True
        dependencies = Dependencies(
            self.fn, before[0].dependencies if before else None, self.counted
        )
        with traced_numbers.logging() as log:
            guard = _Watching(current, self.name, self.full_graph, log)
            given = [log.counter(a) if i in numbers else a for i, a in enumerate(flat)]
            if len(log.sources):
                args, kwargs = (
                    (given, {}) if type(form) is int else pytree.tree_unflatten(given, form)
                )
            del given
            try:
                with session.use(guard, everywhere=False), watching(dependencies):
                    dependencies.variables.begin(log)
                    result = self.fn(*args, **kwargs)
                    guard.cut(last=True)
            finally:
                state.sources = sources
            del args, kwargs
        dependencies.assumed = Assumed(guard.assumptions, inputs)
        if forms != [a._meta for a in tensors]:
            dependencies.inside = (
                "it changes the shape or the strides of an argument (unsqueeze_, resize_, set_, …):"
                " do that outside, or to a view"
            )
        del tensors
        results, shape = pytree.tree_flatten(result)
        if guard.evaluated:
            log.active = False
            return pytree.tree_unflatten([traced_numbers.plain(r) for r in results], shape), None
        del result
        trace = Trace(self.name, guard.segments, results, shape, inputs, start, dependencies, log)
        del results
        current.mark_step()
        first = trace.first()
        trace.place()
        log.close()
        return first, trace

    def _learn(self, key: tuple, trace: Trace) -> None:
        seen = self.last.get(key, [])
        alike = [t for t in seen if t.answers == trace.answers]
        self.last[key] = [trace, *seen][: 2 * MODES]
        ways = {t.answers for t in self.last[key]}
        if not alike:
            if len(ways) > MODES and self._differs(key) > TRACES and self.full_graph:
                raise RuntimeError(
                    f"torch_hlo.compile: {self.name} cannot be replayed: the truth values and"
                    " numbers that it asks for keep"
                    f" changing{trace.log.asked and f', lately at {trace.log.asked}'}; use"
                    " torch.where, or `.item()` for numbers to compute with"
                )
            return
        reason = None
        for t in alike:
            difference = trace.difference(t)
            if difference is None:
                break
            reason = reason or difference
        if difference is None:
            self.ready[key], self.traces[key] = (
                [trace, *self.ready.get(key, ())][:MODES],
                0,
            )
        elif self._differs(key) > TRACES and self.full_graph:
            raise RuntimeError(f"torch_hlo.compile: {self.name} cannot be replayed: {reason}")


class _Watching(Watcher):
    """The engine while a function is traced: reads end a segment; evaluating anything else is an
    error that names the line (full_graph), or noticed."""

    captures = True

    def __init__(self, inner: Engine, name: str, full_graph: bool, log: traced_numbers.Log) -> None:
        super().__init__(inner)
        self.name, self.full_graph, self.log, self.evaluated = name, full_graph, log, False
        self.assumptions: list[tuple[conditions.Computation, bool | int]] = []
        self.segments: list[Segment] = []
        self.uploads: list = []  # arrays that the function uploads
        self._answered = 0
        self._seen = False

    def assume(self, x: HloTensor) -> torch.Tensor | None:
        """A truth value or whole number that follows from small data of the CPU. A replay is for
        calls in which it is the same."""
        computation = conditions.Computation.of(x)
        value = None if computation is None else computation.run()
        if value is not None:
            self.assumptions.append((computation, value.item()))
        return value

    def cut(self, last: bool = False) -> None:
        """What has been recorded is a segment; it is run (not the last one)."""
        if last or pending() or not self.segments:
            self.segments.append(Segment(self.log, self._answered, self.uploads))
            self._answered = len(self.log.answers)
            if not last:
                self.inner.mark_step()

    def item(self, x: HloTensor):
        """The number, which remembers that it was read."""
        if (
            x.numel() != 1
            or not x.dtype.is_floating_point
            and (x.dtype in (torch.bool, *_COMPLEX) or self.assume(x) is not None)
            or conditions.known(x, constant=True) is not None
        ):
            return torch.Tensor.item(x)
        return self.log.source(self._read(x))

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Numbers that are read in the block are seen by Python."""
        before, self._seen = self._seen, True
        try:
            yield
        finally:
            self._seen = before

    def number(self, x: HloTensor) -> float:
        """The number, to somebody who does not remember that: code of PyTorch, for an op, or
        Python."""
        value = self._read(x)
        number = self.log.source(value)
        if self._seen or type(value) is not float:
            self.log.exact(number)
        return value

    def _read(self, x: HloTensor) -> float:
        self.cut()
        self.segments[-1].reads.append((reference(x._storage), x._meta, x._view))
        return self.values(x).item()

    def values(self, x: HloTensor) -> torch.Tensor:
        """The values, for an error that ends the call."""
        return self.inner.values(x)

    def mark_step(self, wait: bool = False) -> None:
        self.cut()

    def upload(self, tensor: torch.Tensor) -> Buffer | torch.Tensor:
        self.uploads.append(self.inner.upload(tensor))
        return self.uploads[-1]

    def later(self, value: HloTensor, check: conditions.Check) -> None:
        """A condition on values that a replay computes again: not looked at (see
        lazy/record/conditions.py)."""

    def materialize(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._evaluates()
        return self.inner.materialize(tensors)

    def sync(self, tensors: Sequence[torch.Tensor] | None = None) -> None:
        self._evaluates()
        self.inner.sync(tensors)

    def synchronize(self) -> None:
        self._evaluates()
        self.inner.synchronize()

    def _evaluates(self) -> None:
        self.evaluated = True
        if self.full_graph:
            raise RuntimeError(
                f"torch_hlo.compile: {self.name} needs the values of a tensor at"
                f" {recording.source()}; keep them in tensors, return what you want to look at"
                " (`.item()` may be used), or use full_graph=False"
            )


_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)


def _flattened(args: tuple, kwargs: dict) -> tuple[list, pytree.TreeSpec]:
    """The arguments, with those in lists, tuples, dicts and dataclasses by themselves."""
    flat, form = pytree.tree_flatten((args, kwargs))
    unknown = {type(a) for a in flat if dataclasses.is_dataclass(a) and not isinstance(a, type)}
    if unknown:
        for kind in unknown:
            pytree.register_dataclass(kind)
        flat, form = pytree.tree_flatten((args, kwargs))
    return flat, form


def _elsewhere(x: object) -> bool:
    return isinstance(x, torch.Tensor) and not isinstance(x, HloTensor)


def _kind(
    flat: Sequence, form: int | pytree.TreeSpec, followed: Collection[int]
) -> tuple[tuple, list[Storage], list[int]]:
    """What calls that one trace may serve have in common (hashable), the storages of the tensors
    given, and which arguments are numbers that may change: floats, and whole ones at `followed`."""
    described: list[object] = []
    inputs: list[Storage] = []
    numbers: list[int] = []
    with participants.plain_attributes():
        for i, a in enumerate(flat):
            if isinstance(a, HloTensor):
                described.append(like(a))
                inputs.append(a._storage)
            elif type(a) is float or type(a) is int and i in followed:
                described.append(type(a))
                numbers.append(i)
            else:
                described.append(_describe(a))
    key = (
        form,
        tuple(described),
        torch.is_grad_enabled(),
        participants.autocasts(),
        torch.get_default_dtype(),
    )
    return key, inputs, numbers


def _present(
    trace: Trace, inputs: list[Storage]
) -> tuple[list | None, list[Storage | None] | None, str]:
    """The optimizers' options and the storages for a replay. None where the trace does not serve,
    and why, if that is no condition of the trace (Dependencies.reason says those)."""
    with participants.plain_attributes():
        if len(set(inputs)) < len(inputs) or not trace.dependencies.hold(inputs):
            return None, None, ""
        options = trace.dependencies.settings.followable()
        storages = trace.storages(inputs)
    if options is None:
        return None, storages, "an option of an optimizer has changed"
    return options, storages, "a tensor that it used is gone, or two of them share memory"


def _describe(x: object) -> object:
    """What an argument that is no tensor must have in common with the traced call's."""
    if isinstance(x, torch.Tensor):
        raise TypeError(
            "torch_hlo.compile: arguments must be tensors on hlo or the CPU, or constants, not a"
            f" tensor on {x.device}"
        )
    try:
        hash(x)
    except TypeError:
        raise TypeError(
            f"torch_hlo.compile: an argument of type {type(x).__qualname__} cannot be compared"
            " between calls; pass its tensors, by themselves or in lists, tuples and dicts (arrays"
            " of NumPy: torch.from_numpy)"
        ) from None
    return type(x), x
