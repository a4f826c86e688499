"""When everything happened: what Python did with the device, programs and their steps, compiles,
waits, and memory with who holds it.

An engine in front of the device's notes what it is asked for, so that nothing is noted elsewhere
while no profile is recorded. Times are those of `time.monotonic`, in seconds."""

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from torch_hlo.compiler.codegen.profile import KEPT
from torch_hlo.device import runtime
from torch_hlo.device.memory import Memory
from torch_hlo.device.programs import CompiledProgram
from torch_hlo.lazy.record import Engine, Watcher, pending, session
from torch_hlo.lazy.run.fingerprint import operands
from torch_hlo.lowering.core import Node, Out

from .python import Place, holder, sampled

FEW = 5  # steps from which there is a rule to see
HISTORY = 256  # steps at which who holds memory is kept


class Span(NamedTuple):
    """Something that took time. `track`: steps, transfers, waits, programs, kernels, collectives or
    compiles; `note`: bytes of a transfer, or what it was."""

    track: str
    name: str
    start: float
    seconds: float
    line: str = ""
    note: Any = ""


class Held(NamedTuple):
    """Arrays that one Python line made: how many are alive, and their bytes."""

    line: str
    what: str
    bytes: int
    arrays: int


class Timeline(Watcher):
    """Notes what the engine is asked for."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.executor = session.current().executor
        self.began = time.monotonic()
        self.spans: list[Span] = []
        self.memory: list[tuple[float, int, int]] = []  # time, bytes in arrays, bytes of scratch
        self.peak: tuple[float, int, list[Held]] = (0.0, 0, [])
        self.history: list[list[Held]] = []
        self.every = 1  # steps between entries of the history
        self.steps = 0
        self.scratch = 0
        self.passes: Counter[str] = Counter()  # of the script's loop, by the line that ended steps
        self.unrolled: tuple[int, str] = (0, "")  # most passes in one step; where it was cut
        self.python: Counter[Place] = Counter()  # where it was, now and then
        self.holders: dict[tuple[str, str], str] = {}  # of what grows
        self.programs: dict[CompiledProgram, str] = {}
        self.launched: list[Any] = []  # what captured steps keep of their programs
        self._made: WeakKeyDictionary[Memory, tuple[str, str]] = WeakKeyDictionary()
        self._waits: dict[int, tuple[float, str]] = {}  # by thread
        self._read: dict[CompiledProgram, list[int]] = {}  # calls of steps that are spans already
        self._runs: Counter[CompiledProgram] = Counter()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Note what happens in the block."""
        self.executor.watchers.append(self._ended)
        self.executor.meanwhile.insert(0, self._waiting)
        try:
            with session.use(self), sampled(self.python):
                yield
        finally:
            self.executor.watchers.remove(self._ended)
            self.executor.meanwhile.remove(self._waiting)
            for program in self.programs:
                self._kernels(program)
            for known in self.launched:
                known.forget()

    # -- what the engine is asked for
    @contextlib.contextmanager
    def _span(self, track: str, name: str, note: Any = "") -> Iterator[None]:
        start = time.monotonic()
        line = session.line()
        try:
            yield
        finally:
            self._awaited()
            self.spans.append(Span(track, name, start, time.monotonic() - start, line, note))

    def upload(self, tensor: torch.Tensor) -> Any:
        with self._span("transfers", "upload", tensor.nbytes):
            buffer = self.inner.upload(tensor)
        self._made[buffer.memory] = (session.line(), "copied to the device")
        return buffer

    def materialize(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        cuts = any(is_pending(t) for t in tensors)
        passes = self._passes() if cuts else 0
        nbytes = sum(t.numel() * t.element_size() for t in tensors)
        with self._span("transfers", "read that cuts the step" if cuts else "read", nbytes):
            found = self.inner.materialize(tensors)
        self._stepped(passes)
        return found

    def mark_step(self, wait: bool = False) -> None:
        self._cut("mark_step", lambda: self.inner.mark_step(wait))

    def sync(self, tensors: Sequence[torch.Tensor] | None = None) -> None:
        self._cut("sync", lambda: self.inner.sync(tensors))

    def make_room(self) -> None:
        self._cut("cut: much is recorded", self.inner.make_room, self._passes())

    def _cut(self, name: str, work: Callable[[], None], passes: int = 1) -> None:
        passes = passes if pending() else 0
        with self._span("steps", name):
            work()
        self._stepped(passes)

    def _passes(self) -> int:
        """How often the loop has come round since the last step, which nobody has ended: how often
        each line has recorded something, at least."""
        line = session.line()
        left = [b[3].node for b in pending() if type(b[3]) is Out]
        counts: Counter[tuple[str, str]] = Counter()
        seen: set[Node] = set()
        while left:
            if (node := left.pop()) not in seen:
                seen.add(node)
                left += operands(node)
                if node.source and node.source.partition(", ")[0] != line:
                    counts[node.source, str(node.target)] += 1
        found = min(counts.values(), default=1)
        self.unrolled = max(self.unrolled, (found, line))
        return found

    def run_again(self, *launch: Any) -> bool:
        if (known := launch[-1]) not in self.launched:  # compiled before: it has no counters
            known.forget()
            self.launched.append(known)
        with self._span("steps", "launch"):
            launched = self.inner.run_again(*launch)
        if launched:
            graph, _, _, storages, places, _ = launch
            self._note((s.value, graph.outputs[place]) for s, place in zip(storages, places))
            self._stepped(1)
        return launched

    # -- memory
    def _stepped(self, passes: int) -> None:
        """`passes`: of the loop, that a step has now been made of."""
        self._note_steps()
        self._sample()
        self.passes[session.line()] += passes
        self.steps += bool(passes)
        if passes and self.steps % self.every == 0:
            self.history.append(self.held())
            if len(self.history) > HISTORY:
                del self.history[::2]
                self.every *= 2
            if self.steps & (self.steps - 1) == 0:
                self._find_holders()

    def growing(self) -> list[tuple[Held, list[int]]]:
        """What is held more of in each quarter of the run; first steps make optimizer states."""
        if len(self.history) < FEW:
            return []
        points = [self.history[len(self.history) * i // 4] for i in (1, 2, 3)] + [self.history[-1]]
        counts = [{h[:2]: h.arrays for h in held} for held in points]
        found = [(h, [c.get(h[:2], 0) for c in counts]) for h in points[-1]]
        return [(h, grown) for h, grown in found if all(a < b for a, b in zip(grown, grown[1:]))]

    def _find_holders(self) -> None:
        wanted = {h[:2] for h, _ in self.growing()} - {*self.holders}
        for memory, origin in [*self._made.items()]:
            if origin in wanted:  # the oldest
                wanted.remove(origin)
                # a variable without a value; another thread changes a dict
                with contextlib.suppress(ValueError, RuntimeError):
                    self.holders[origin] = holder(memory)

    def _note_steps(self) -> None:
        """`_note` what was launched, before the engine forgets it."""
        engine: Any = self.base()
        for bindings in [*engine.recorded]:
            self._note((b[3].array, b[3]) for b in bindings if type(b[3]) is Out)

    def _note(self, results: Iterable[tuple[Any, Out]]) -> None:
        """Remember which operation the memory of these arrays comes from."""
        for array, out in results:
            buffer = getattr(array, "data", None)
            if type(memory := getattr(buffer, "memory", None)) is Memory:
                # which a result may have taken over
                self._made[memory] = out.node.source, str(out.node.target)

    def _sample(self) -> None:
        arena = self.executor.arena
        self.scratch = max(self.scratch, arena.nbytes if arena is not None else 0)
        used = runtime.memory_pool().used
        now = time.monotonic()
        self.memory.append((now, used, self.scratch))
        if used > self.peak[1] * 1.01:
            self.peak = (now, used, self.held())

    def held(self) -> list[Held]:
        """Who holds the device's memory, most first."""
        size: Counter[tuple[str, str]] = Counter()
        count: Counter[tuple[str, str]] = Counter()
        for memory, origin in [*self._made.items()]:
            size[origin] += memory.size
            count[origin] += 1
        return [Held(*origin, n, count[origin]) for origin, n in size.most_common()]

    # -- what runs
    def _waiting(self, is_done: Callable[[], bool]) -> None:
        self._note_steps()
        if not is_done():
            self._waits[threading.get_ident()] = time.monotonic(), session.line()

    def _awaited(self) -> None:
        start, line = self._waits.pop(threading.get_ident(), (0.0, ""))
        if start:
            self.spans.append(Span("waits", "wait", start, time.monotonic() - start, line))

    def _ended(self, job: Any, seconds: float) -> None:
        self._note_steps()
        began = time.monotonic() - seconds
        if job.number is not None:
            began = self.executor.stream.began(job.number)
        self.spans.append(Span("programs", job.name, began, seconds))
        self._awaited()
        program = job.program
        if isinstance(program, CompiledProgram) and program.profile is not None:
            self.programs[program] = job.name
            self._runs[program] += 1
            if self._runs[program] % (KEPT // 2) == 0:
                self._kernels(program)

    def _kernels(self, program: CompiledProgram) -> None:
        """Spans of the calls since they were looked at last, as far as they are kept."""
        assert program.profile is not None
        name = self.programs[program]
        calls = [n for n, _, _ in program.counts()]
        seen = self._read.get(program, [0] * len(calls))
        rows = zip(program.profile.steps, program.times(), calls, seen)
        for number, (step, times, now, before) in enumerate(rows):
            new = times[max(len(times) - (now - before), 0) :]
            track = "collectives" if step.op.startswith(COLLECTIVES) else "kernels"
            line = step.sources[0] if step.sources else ""
            self.spans += [
                Span(track, step.what, start / 1e9, ns / 1e9, line, (name, number))
                for start, ns in new
            ]
        self._read[program] = calls


COLLECTIVES = ("all-", "reduce-scatter", "collective-", "send", "recv")


def is_pending(tensor: Any) -> bool:
    """Whether a tensor of the device is recorded and not computed."""
    return type(tensor._storage.value) is Out


class Modules:
    """The names of modules as their root module calls them."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()

    def __call__(self) -> str:
        """The path of the innermost module whose `forward` is running, or ""."""
        frame: FrameType | None = sys._getframe(1)
        inner = root = None
        while frame is not None:
            code = frame.f_code
            if code.co_name == "forward" and code.co_argcount:
                module = frame.f_locals.get(code.co_varnames[0])
                if isinstance(module, torch.nn.Module):
                    inner = inner or module
                    root = module
            frame = frame.f_back
        if inner is None or root is None:
            return session.current().here.module
        if inner not in self._names:
            self._names[root] = type(root).__name__
            for name, module in root.named_modules():
                self._names.setdefault(module, name)
        return self._names.get(inner, type(inner).__name__)
