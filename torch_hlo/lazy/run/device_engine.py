"""Steps: cut the recorded graph, find or compile its program, run it in the background, give the
storages their new values.

    mark_step()          everything recorded so far becomes one program; returns while it runs
    sync()               the same, and wait
    materialize([t])     CPU copies; an implicit cut (print, .item(), .cpu()) evaluates the whole
        pending graph, so that work is not split

A failure leaves the tensors as they were. While cutting (an op cannot be lowered, no memory,
Ctrl-C) nothing has changed yet and the graph stays pending. While running, the storages get their
graph back when the error surfaces: at the next cut or wait, with the name of the step. A program
raises before it writes, so donated inputs are intact.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor

from torch_hlo import collector, config, log, metrics
from torch_hlo.device import runtime
from torch_hlo.device.cpu import trim
from torch_hlo.device.memory import Buffer, Memory
from torch_hlo.hlo.ir import Module
from torch_hlo.hlo.sharding.collective import CollectiveError, nothing
from torch_hlo.lowering.core import RECORDING, TAPE, Node, Out, lower

from ..record import (
    Array,
    Binding,
    Effect,
    Engine,
    Number,
    Storage,
    after_traces,
    conditions,
    exchange,
    meta as metas,
    must_run,
    pending,
    pending_storages,
    session,
)
from ..record.storage import take_effects
from ..record.tensor import make_ahead
from . import executor, nan_checks, spmd, transfer
from .agreement import Meeting
from .fingerprint import Graph, collect, operands
from .journal import Journal
from .launch import Compiled, Launch, Programs, Run, launch, leaf_buffer, number_buffers
from .plan import Known, Plan, cut, donations, dying
from .program_cache import ProgramCache, program_key, variant


def _replace(x, replaced: dict[int, Out]):
    if type(x) is Array:
        return replaced.get(id(x), x)
    if type(x) is tuple or type(x) is list:
        return type(x)(_replace(v, replaced) for v in x)
    return x


def _substitute(replaced: dict[int, Out]) -> None:
    """Pending nodes that read an array that was never computed read the pending value again."""
    TAPE.exact = False
    pending = [s.value for s in pending_storages()]
    stack = [out.node for out in pending if type(out) is Out]
    done: set[Node] = set()
    while stack:
        node = stack.pop()
        if node not in done:
            done.add(node)
            node.args = _replace(node.args, replaced)
            node.kwargs = {k: _replace(v, replaced) for k, v in node.kwargs.items()}
            stack += operands(node)


_ARRAYS = frozenset({Array})
_BUFFERS = frozenset({Buffer})


class DeviceEngine(Engine):
    """The engine that compiles and runs."""

    def __init__(self) -> None:
        self.known: dict[tuple, Known] = {}  # steps by their tapes
        self.programs = ProgramCache(self.known.clear)
        self.in_flight: deque[Run] = deque()  # what may have to be undone
        # The graph that was cut last, until somebody waits or looks: taking it apart takes half as
        # long as starting its program, and while the device computes it costs nothing.
        self.recorded: list[list[Binding]] = []
        # Storages whose pending value cannot be lowered: the step that found out has raised. Later
        # steps leave them out, so that one such tensor that is still alive does not end all work;
        # reading it raises again.
        self.refused: WeakKeyDictionary[Storage, Out] = WeakKeyDictionary()
        self.told: set[str] = set()  # one warning for each error
        # with TORCH_HLO_NAN=1: what looks at steps, those that have run, and whether it does now
        self.judge: Callable[[list[Out]], nan_checks.Step] = nan_checks.Step
        self.unchecked: list[nan_checks.Step] = []
        self.checking = False
        self.allowance = collector.Allowance()
        # Protects `readers` of all memory. Of its own and reentrant: the collector may close a
        # lease while any other lock is held. Nothing is taken under it.
        self.counting = threading.RLock()
        session.current().executor.meanwhile[:] = [self._take_apart, make_ahead]

    def _take_apart(self, enough: Callable[[], bool]) -> None:
        self.recorded.clear()

    def lease(self, storage: Storage) -> Lease:
        return Lease(self, storage)

    def mark_step(self, wait: bool = False) -> None:
        """Make one program of everything recorded and run it; in the background unless `wait`.

        Raises the error of an earlier step that failed in the background, LoweringError if an op
        cannot
        be compiled, MemoryError."""
        metrics.count("MarkStep")
        self._evaluate()
        executor.all_submitted()
        if wait:
            self._wait_all()

    def sync(self, tensors: Sequence[Tensor] | None = None) -> None:
        """Evaluate everything recorded and wait: for all of it, or until `tensors` are there."""
        session.current().executor.awaited = True
        if not TAPE.words and self._idle():
            self.recorded.clear()
            runtime.synchronize()
            return
        self._evaluate()
        if tensors is None:
            self._wait_all()
            return
        for tensor in tensors:
            value = tensor._storage.value
            if type(value) is Array and value.data is not None:
                executor.wait(value.data)
        self._surface()

    def synchronize(self) -> None:
        """Evaluate everything recorded and wait for all work under way."""
        self.sync()

    def has_ended(self, since: int) -> bool:
        return executor.has_ended(since, self.mark_step)

    def upload(self, tensor: Tensor) -> Buffer:
        """The values of a tensor of the CPU, or of torch.cuda, as a new device array. Later
        writes to
        `tensor` do not show."""
        start = time.perf_counter()
        if exchange.shares(tensor.device):
            return exchange.take_in(tensor)
        shape = metas.contiguous(tuple(tensor.shape), tensor.dtype).hlo
        if transfer.is_zeros(tensor):
            buffer = runtime.zeros(shape)
        else:
            trim.UPLOADS.add(shape.nbytes)
            buffer = runtime.allocate(shape)
            transfer.fill(buffer, tensor)
        metrics.moved("TransferToDeviceTime", start, "OutboundData", buffer.nbytes)
        return buffer

    def number(self, tensor: Tensor) -> Any:
        """The value of a tensor with one element, as `.item()` gives it: read where it is, if that
        is memory of the CPU."""
        storage = tensor._storage
        if tensor._view is not None or session.current().journal is not None:
            return super().number(tensor)
        self._evaluate_for([storage])
        array = storage.value
        if (
            type(array) is not Array
            or type(array.data) is not Buffer
            or array.shape.dtype not in transfer.NUMBERS
        ):
            return super().number(tensor)
        executor.wait(array.data)
        start = time.perf_counter()
        with RECORDING:  # nobody overwrites it meanwhile
            buffer = array.data
            if (
                storage.value is not array
                or buffer is None
                or buffer.job is not None
                or type(buffer.memory) is not Memory
            ):
                return super().number(tensor)
            found = transfer.NUMBERS[array.shape.dtype].unpack_from(buffer.memory.array)[0]
        self._forget_done()
        if session.current().expected:
            conditions.surface()
        metrics.moved("TransferFromDeviceTime", start, "InboundData", buffer.nbytes)
        return found

    def materialize(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous CPU copies of the logical values of hlo tensors. Evaluates what is pending,
        once.

        If the pending graph cannot be compiled because of an op that these tensors do not need,
        only
        their part of it runs, with a RuntimeWarning (once for each error) and the counter
        PartialEvaluation."""
        storages = list({id(t._storage): t._storage for t in tensors}.values())
        self._evaluate_for(storages)
        journal = session.current().journal
        if journal is not None and any(journal.has(s.value) for s in storages):
            self.start_collectives()
        start = time.perf_counter()
        leases: dict[int, Lease] = {}
        try:
            for s in storages:
                leases[id(s)] = Lease(self, s)
            results = [transfer.value(leases[id(t._storage)].buffer, t) for t in tensors]
        finally:
            for lease in leases.values():
                lease.close()
        self._forget_done()
        if session.current().expected:
            conditions.surface()
        nbytes = sum([r.nbytes for r in results])
        metrics.moved("TransferFromDeviceTime", start, "InboundData", nbytes)
        return results

    def later(self, value: Tensor, check: conditions.Check) -> None:
        """Judge a value once it has been computed (see lazy/record/conditions.py)."""
        session.current().expected.append((value, check))

    def evaluate(self, storages: Sequence[Storage]) -> None:
        """Run what these storages need, and overwrite nothing: the arrays that they had stay
        valid."""
        self._evaluate(storages)

    def run_again(
        self,
        graph: Graph,
        leaves: Sequence[Array],
        numbers: Sequence[Number],
        storages: Sequence[Storage],
        places: Sequence[int],
        known: Programs,
    ) -> bool:
        """Launch a graph that ran before on other arrays and numbers; storage i gets output
        `places[i]`. Nothing may be pending. False, and nothing done, where the step has to be
        recorded."""
        executor.throttle()
        with RECORDING:
            after_traces()
            self._surface()
            if session.current().sharded or config.get("NAN"):
                return False
            last = known.last
            if not (last and last.launch(leaves, numbers, storages, self.in_flight)) and not (
                self._run_again(graph, leaves, numbers, storages, places, known)
            ):
                return False
            metrics.launched(len(graph.nodes))
        return True

    def start(
        self, compiled: Compiled, leaves: Sequence[Array], numbers: Sequence[Buffer], ops: int
    ) -> list[Buffer] | None:
        """Run a program that overwrites nothing here and now; its results. None, and nothing done,
        where it is long, and unless nothing is recorded or under way."""
        with RECORDING:
            if not executor.runs_here(compiled.program) or not self._idle():
                return None
            if not _ARRAYS.issuperset(map(type, leaves)):
                return None
            inputs = [leaf.data for leaf in leaves]
            if not _BUFFERS.issuperset(map(type, inputs)):
                return None
            outputs = list(map(runtime.allocate, compiled.outputs))
            buffers = *inputs, *numbers, *outputs
            compiled.program.starter()(tuple([b.memory.address for b in buffers]))
            metrics.launched(ops)
        return outputs

    def _idle(self) -> bool:
        """Whether nothing is recorded or under way."""
        state = session.current()
        return executor.idle() and not (
            state.effects
            or state.expected
            or state.sharded
            or state.tracing is not None
            or self.in_flight
            or self.unchecked
            or state.pending
            and pending()
        )

    def pending_step(self) -> tuple[Module, list[Buffer]]:
        """What `mark_step()` would run now: the module before any pass, with its donations, and the
        arrays and numbers that it takes. Nothing is run but what was under way. Raises
        ValueError when
        nothing is pending."""
        self._wait_all()
        with RECORDING:
            bindings = sorted(b for b in pending() if b[3].array is None)
            if not bindings:
                raise ValueError("nothing is recorded")
            graph, _, _, aliases = cut(bindings, donate=True)
            module = executor.call_compiler(
                lambda: lower(graph.nodes, graph.outputs, [*graph.leaves, *graph.numbers], aliases)
            )
            return module, [*map(leaf_buffer, graph.leaves), *number_buffers(graph.numbers)]

    def clear_cache(self) -> None:
        """Forget the compiled programs in memory."""
        with RECORDING:
            self.programs.clear()
            self.known.clear()

    def cache_size(self) -> int:
        """Number of compiled programs in memory."""
        return len(self.programs.programs)

    def start_collectives(self) -> None:
        """What is recorded of torch.distributed is under way: another rank may wait for it before
        it comes to what this one is about to wait for."""
        if session.current().effects:
            self._evaluate(near=True)

    def make_room(self) -> None:
        """Run the pending graph, but for what other processes take part in: that has its own
        moment."""
        self._evaluate(near=True)

    def _evaluate(self, only: Sequence[Storage] | None = None, near: bool = False) -> None:
        """Run the pending graph: all of it, or what the storages `only` need. `near`: without what
        is on the mesh, where every device has its own process."""
        self._evaluate_unchecked(only, near)
        if self.unchecked and not self.checking:
            unchecked = self.unchecked
            self.unchecked = []
            self.checking = True
            try:
                self._wait_all()
                for step in unchecked:
                    step.check()
            finally:
                self.checking = False

    def _evaluate_unchecked(self, only: Sequence[Storage] | None, near: bool) -> None:
        executor.throttle()
        collector.collect_wanted()
        with RECORDING:
            after_traces()
            self._surface()
            bindings = (
                pending()
                if only is None
                else [
                    (s.value.place, i, s, s.value, ref(s))
                    for i, s in enumerate(only)
                    if type(s.value) is Out
                ]
            )
            for binding in [b for b in bindings if b[3].array is not None]:
                # the value was read by another thread just before it was computed
                binding[2].bind(binding[3], binding[3].array)
                bindings.remove(binding)
            if only is None and self.refused:
                bindings = [b for b in bindings if self.refused.get(b[2]) is not b[3]]
            journal = session.current().journal
            if journal is None:
                self._run(bindings, only is None)
                return
            journal.read()
            shared = [b for b in bindings if b[3].node in journal.places]
            here = [b for b in bindings if b[3].node not in journal.places]
            if near or not (journal.pending() if only is None else shared):
                self._run(here, only is None)
                return
            # what the step on the mesh computes anyway it keeps
            reached = set(collect([b[3] for b in shared]).nodes) if not self._own_effects() else ()
            beside = [b for b in here if b[3].node in reached]
            self._run([b for b in here if b[3].node not in reached], only is None)
            self._run_together(journal, shared, beside, only is None)

    def _run(self, bindings: list[Binding], whole: bool) -> None:
        """Run what computes these values, and recorded collectives: all of them, or (not `whole`)
        those that come before one that is needed."""
        start = time.perf_counter()
        effects = self._take_effects(bindings, whole)
        if bindings:
            # the same program results from the same operations, whichever was written first
            bindings.sort()
            checks = config.get("NAN")
            step = self.judge([b[3] for b in bindings]) if checks and not self.checking else None
            try:
                self._submit(bindings, self._plan(bindings, donate=whole and not checks), start)
            except Exception as error:
                for out in effects:
                    must_run(out)
                self._refuse(bindings, getattr(error, "node", None))
                raise
            if step is not None:
                self.unchecked.append(step)
            if not config.get("ASYNC"):
                self._surface()
        elif whole and not self.refused:
            TAPE.restart()

    def _take_effects(self, bindings: list[Binding], whole: bool) -> list[Out]:
        """Recorded collectives that have to run with these values, now among `bindings`: other
        ranks run them in the order in which they were recorded, whatever this one reads first."""
        effects = take_effects()
        if not effects:
            return effects
        reached = set(collect([b[3] for b in bindings]).nodes)
        journal = session.current().journal
        last = max([out.node.serial for out in effects if out.node in reached], default=-1)
        taken = []
        for out in effects:
            shared = journal is not None and out.node in journal.places
            if shared or not whole and out.node.serial > last:
                must_run(out)
                continue
            taken.append(out)
            if not whole or out.node not in reached:
                bindings.append(_effect(out, len(bindings)))
        return taken

    def _own_effects(self) -> bool:
        """Whether collectives are recorded that are not on the mesh."""
        state = session.current()
        return any(out.node not in state.journal.places for out in state.effects)

    def _run_together(
        self, journal: Journal, bindings: list[Binding], beside: list[Binding], whole: bool
    ) -> None:
        """Run what computes these values on the mesh, with all other processes. `beside`: others
        that may be computed with them."""
        start = time.perf_counter()
        effects: list[Out] = []
        if whole:
            effects = take_effects()
            bindings += [_effect(out, len(bindings) + i) for i, out in enumerate(effects)]
            bindings = [b for b in bindings if b[3].node not in journal.refused]
        conditions.surface(together=True)
        meeting = Meeting(journal, self.programs, whole, self._evaluate_outs)
        try:
            plan, bindings = meeting.plan(bindings, sorted(beside))
        except Exception as error:
            if (culprit := getattr(error, "node", None)) is not None:
                journal.refuse(culprit)
            for out in effects:
                must_run(out)
            raise
        if plan is not None:
            self._submit(bindings, plan, start, journal.clear if whole else nothing)
            journal.refused.difference_update([b[3].node for b in bindings])
        elif whole:
            journal.clear()
        if not config.get("ASYNC"):
            self._surface()

    def _evaluate_outs(self, wanted: list[tuple[Storage | Effect, Out]]) -> None:
        """Compute pending values that are not on the mesh, for these storages."""
        self._run([(out.place, i, s, out, ref(s)) for i, (s, out) in enumerate(wanted)], False)

    def _refuse(self, bindings: list[Binding], culprit: Node | None) -> None:
        """Remember which storages need the node that could not be lowered."""
        if culprit is None:
            return
        tainted = {culprit}
        for node in collect([b[3] for b in bindings]).nodes:  # operands come first
            if not tainted.isdisjoint(operands(node)):
                tainted.add(node)
        for _, _, storage, out, _ in bindings:
            if out.node in tainted:
                self.refused[storage] = out

    def _evaluate_for(self, storages: Sequence[Storage]) -> None:
        if not any(type(s.value) is Out for s in storages):
            return
        self._surface()
        session.current().executor.awaited = True
        try:
            self._evaluate(near=not self._on_mesh(storages))
        except (CollectiveError, FloatingPointError):  # which no operation raises
            raise
        except Exception as whole:
            try:
                self._evaluate(storages)
            except Exception as part:
                raise part from (
                    None if type(part) is type(whole) and str(part) == str(whole) else whole
                )
            self._tell_partial(whole)
        if any(self._is_refused(s) for s in storages):
            self._evaluate(storages)  # raises why

    def _on_mesh(self, storages: Sequence[Storage]) -> bool:
        """Whether all processes have to take part when these are evaluated."""
        journal = session.current().journal
        if journal is None:
            return False
        with RECORDING:
            journal.read()
            return any(type(s.value) is Out and journal.has(s.value) for s in storages)

    def _is_refused(self, storage: Storage) -> bool:
        journal = session.current().journal
        return self.refused.get(storage) is storage.value or (
            journal is not None
            and type(storage.value) is Out
            and storage.value.node in journal.refused
        )

    def _tell_partial(self, error: Exception) -> None:
        """Warn that other tensors than those read are still pending because of `error`."""
        metrics.count("PartialEvaluation")
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if text in self.told:
            return
        self.told.add(text)
        warnings.warn(
            f"hlo device: not all of the recorded operations could be run ({text}), so only those"
            " that this value needs were. Reading a tensor that needs the rest raises the error;"
            " delete"
            " such tensors if they are not wanted.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _plan(self, bindings: list[Binding], donate: bool) -> Plan:
        """Recognize the step by its tape, or look at its graph."""
        base = TAPE.base
        key = None
        if donate and TAPE.exact and bindings[0][0] >= base and not session.current().sharded:
            key = (
                tuple(TAPE.words),
                tuple([b[0] - base for b in bindings]),
                variant(),
            )
            known = self.known.get(key)
            if known is not None:
                inputs = TAPE.inputs
                leaves = [inputs[place]() for place in known.leaves]
                program = known.programs.get(dying(leaves))
                if program is not None:
                    metrics.count("CachedCompile")
                    numbers = [inputs[place]() for place in known.numbers]
                    return Plan(program, leaves, numbers, None)
        state = session.current()
        apart = state.journal is not None
        graph, places, dead, aliases = cut(
            bindings, donate and not (apart and state.journal.nodes), apart
        )
        where = None
        if state.sharded and not apart:
            pairs = [(b[2], place) for b, place in zip(bindings, places)]
            where = spmd.placement(graph, spmd.wanted(pairs, len(graph.outputs)))
        program = Launch(self.programs.find(graph, aliases, dead, where), places)
        if key is not None and TAPE.exact:
            if len(self.known) >= 4 * config.get("PROGRAMS"):
                self.known.clear()
            leaves, numbers = (
                [x.place - base for x in found] for found in (graph.leaves, graph.numbers)
            )
            if not {*leaves, *numbers} - TAPE.inputs.keys():
                known = self.known.setdefault(key, Known(leaves, numbers))
                known.programs[dead] = program
        return Plan(program, graph.leaves, graph.numbers, where)

    def _run_again(
        self,
        graph: Graph,
        leaves: Sequence[Array],
        numbers: Sequence[Number],
        storages: Sequence[Storage],
        places: Sequence[int],
        known: Programs,
    ) -> bool:
        """`run_again`, for a launch that is not like the last one."""
        if not _ARRAYS.issuperset(map(type, leaves)):
            return False  # another thread has just recorded a new value
        if len(set(map(id, leaves))) < len(leaves):
            return False  # one array in two places: donating one would overwrite the other
        bindings = [
            (place, i, s, s.value, ref(s)) for i, (s, place) in enumerate(zip(storages, places))
        ]
        found = known.by_dead.get(died := dying(leaves, storages))
        if found is None:
            # a graph that has run cannot be compiled again: its values look like inputs
            compiled = self.programs.programs.get(
                program_key(graph, donations(graph, leaves, died, bindings, places))
            )
            if compiled is None:
                return False
            found = known.by_dead[died] = Launch(compiled, places)
        compiled = found.compiled
        known.last = None if compiled.extra or found.spares(leaves, storages) else found
        if any(leaf_buffer(leaves[i]).memory.readers for _, i in compiled.aliases):
            return False
        launch(found, leaves, numbers, bindings, None, self.in_flight)
        return True

    def _submit(
        self,
        bindings: list[Binding],
        plan: Plan,
        start: float,
        before: Callable[[], None] = nothing,
    ) -> None:
        size = len(plan.known.compiled.sources)
        metrics.record("TensorsGraphSize", size, "")
        traced = time.perf_counter()
        launch(plan.known, plan.leaves, plan.numbers, bindings, plan.where, self.in_flight, before)
        self.recorded.append(bindings)
        self.allowance.step(size)
        if config.get("LOG") >= 2:
            end = time.perf_counter()
            log.say(
                2,
                f"{plan.known.compiled.name}: {size} ops, cut {(traced - start) * 1e3:.2f} ms,"
                f" submit {(end - traced) * 1e3:.2f} ms",
            )

    def _wait_all(self) -> None:
        executor.drain()
        self._surface()
        runtime.synchronize()

    def _surface(self) -> None:
        """Forget runs that are done. If one failed, give its storages their graph back and raise
        its error."""
        if not (self.in_flight or self.recorded or session.current().expected):
            return
        with RECORDING:
            self._forget_done()
            if not self.in_flight or not self.in_flight[0].job.is_done():
                if session.current().expected:
                    conditions.surface()
                return
            executor.drain()  # what came after may have failed with it
            error = self.in_flight[0].job.error
            replaced: dict[int, Out] = {}
            for run in reversed(self.in_flight):
                if run.job.error is not None:
                    run.undo(replaced)
            executor.forget_failures()
            self.in_flight.clear()
            _substitute(replaced)
            if (journal := session.current().journal) is not None:
                journal.recall([b[3] for b in pending()])
        raise error

    def _forget_done(self) -> None:
        """Let go of the graphs of runs that succeeded, and of the arrays that only they read."""
        self.recorded.clear()
        with RECORDING:
            while (
                self.in_flight
                and self.in_flight[0].job.is_done()
                and self.in_flight[0].job.error is None
            ):
                self.in_flight.popleft()


def _effect(out: Out, number: int) -> Binding:
    """For a value that no tensor has."""
    effect = Effect(out)
    return out.place, number, effect, out, ref(effect)


class Lease:
    """A storage's value as a buffer that no step overwrites until `close`. Evaluates what is
    pending."""

    __slots__ = ("buffer", "_engine", "_memory")

    def __init__(self, engine: DeviceEngine, storage: Storage) -> None:
        self._engine = engine
        while True:
            value = storage.value
            if type(value) is not Array:  # another thread, or a failure, made it pending again
                engine._evaluate_for([storage])
                continue
            buffer = value.data
            if buffer is None:
                with RECORDING:  # nobody is in the middle of a launch
                    if storage.value is value and value.data is None:
                        leaf_buffer(value)  # raises why
                continue
            executor.wait(buffer)
            with RECORDING:
                if buffer.job is not None:
                    engine._surface()
                elif storage.value is value:
                    self.buffer, self._memory = buffer, buffer.memory
                    with self._engine.counting:
                        self._memory.readers += 1
                    return

    def close(self) -> None:
        memory = self._memory
        self._memory = None
        if memory is not None:
            with self._engine.counting:
                memory.readers -= 1


def _before_fork() -> None:
    # The child has no executor thread: what is under way must be there before memory is copied.
    RECORDING.acquire()
    executor.drain()
    executor.drain_compiler()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=RECORDING.release,
    after_in_child=RECORDING.release,
)
