"""Runs programs in order in the background, so that Python can trace the next step meanwhile; and
compiles on another thread.

    throttle()                                          # waits while DEPTH jobs are in flight
    submit(Job("step", program, inputs, outputs, donated))
    wait(buffer)                                        # afterwards buffer.job is None, or a job
                                                        # with an error
    compiled = call_compiler(function)                  # on the compiler's thread: Ctrl-C ends the
                                                        # waiting, not the work
Native programs run on a native thread (device/cpu/stream.py), which needs no turn of the
interpreter; programs that call Python, and other back ends, on a Python thread. A job whose inputs
come from a failed job fails with the same error. Nothing here takes the step's lock.
"""

import atexit
import os
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from torch_hlo import collector, config, log, metrics
from torch_hlo.compiler.codegen.block import ARENA
from torch_hlo.device import runtime
from torch_hlo.device.buffer import ARENAS, Arena
from torch_hlo.device.cpu.stream import Stream
from torch_hlo.device.cpu.trim import UPLOADS, release_compiler
from torch_hlo.device.cpu.workers import WORKERS
from torch_hlo.device.interfaces import Program
from torch_hlo.device.memory import Buffer
from torch_hlo.hlo.sharding.collective import named
from torch_hlo.pytorch import participants

from ..record import session

DEPTH = 2
# seconds of a program that its caller runs himself: another thread would not even have woken up
BRIEF = 15e-6
# and of one that its caller waits for, or would as he did after the program before
AWAITED = 1e-3
# of one that is worth changing the processor for: 0.1 ms, and what the old one's cache holds
_LONG = 2e-3
T = TypeVar("T")
Meanwhile = Callable[[Callable[[], bool]], None]


class Job:
    """One run of a program. `donated`: (output, input) pairs that share memory. `error` is set
    before it is done.

    `before`: of results that take the place of inputs, what computed those.
    On the stream it has a `number`, a `block` and what it refers to, and may be so short that it
    runs `here`, where it is submitted, and nobody sees it under way; on the Python thread it waits
    for the job `after` it comes, and `ended` is locked until it is done. None of its operations was
    recorded before `since`."""

    __slots__ = (
        "name",
        "program",
        "inputs",
        "outputs",
        "donated",
        "error",
        "closed",
        "number",
        "here",
        "block",
        "needed",
        "after",
        "before",
        "ended",
        "since",
    )

    def __init__(
        self,
        name: str,
        program: Program,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        donated: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.name = name
        self.program = program
        self.inputs = inputs
        self.outputs = outputs
        self.donated = donated
        self.error: BaseException | None = None
        self.closed = False
        self.number: int | None = None
        self.here = False
        self.block: array | None = None
        self.needed: object = None
        self.after: Job | None = None
        self.before: Sequence[Job | None] = ()
        self.ended: threading.Lock | None = None
        self.since = _session.executor.cut

    def is_done(self) -> bool:
        """True when it has run, or failed."""
        if (
            not self.closed
            and self.number is not None
            and _session.executor.stream.is_done(self.number)
        ):
            self._close(_session.executor.stream.seconds(self.number))
        return self.closed

    def wait(self) -> None:
        """Until it is done, as the jobs before it are."""
        if self.is_done():
            return
        if participants.profiled():
            with participants.block("hlo::wait"):
                self.await_end()
        else:
            self.await_end()

    def await_end(self) -> None:
        """`wait`, and PyTorch's profiler does not see it."""
        for work in _session.executor.meanwhile:
            work(self.is_done)
        if self.number is None:
            with self.ended:
                return
        _session.executor.stream.wait(self.number)
        self.is_done()

    def run(self) -> None:
        """Run here. Never raises: the error is kept."""
        start = time.perf_counter()
        try:
            self._check_inputs()
            self._unshare()
            with named(self.name):
                self.program.run(self.inputs, self.outputs)
        except BaseException as error:  # noqa: B036 - surfaces at the next wait
            if not isinstance(error, _Upstream):
                error.add_note(f"while running {self.name}")
                self.error = error
                _session.executor.failed.append(self)
        finally:
            self._close(time.perf_counter() - start)

    def _close(self, seconds: float) -> None:
        """It has run: its results are there, and what it only needed is let go."""
        executor = _session.executor
        with executor.lock:
            if self.closed:
                return
            if self.error is None:
                for buffer in self.outputs:
                    if buffer.job is self:  # else a later job has it in hand
                        buffer.job = None
                self.before = ()
            self.inputs = self.outputs = ()
            for watch in executor.watchers:
                watch(self, seconds)
            if self.number is not None and seconds < self.program.seconds:
                self.program.seconds = seconds
            self.program = self.block = self.needed = self.after = None
            if self.number is not None:
                executor.release()
            self.closed = True
        metrics.record("ExecuteTime", seconds)
        if self.ended is not None:
            self.ended.release()

    def _check_inputs(self) -> None:
        if not _session.executor.failed:
            return
        for job in (*self.before, *[buffer.job for buffer in self.inputs]):
            if job is not None and job.error is not None:
                self.error = job.error
                raise _Upstream

    def _unshare(self) -> None:
        """An aliased input that a host copy is reading gets a private copy to be overwritten
        instead."""
        for o, i in self.donated:
            memory = self.inputs[i].memory
            if memory.readers:
                private = memory.copy(self.inputs[i].nbytes)
                self.outputs[o].memory = private
                self.inputs = [*self.inputs]
                self.inputs[i] = self.inputs[i].over(private)


class _Upstream(Exception):
    """An input was never computed."""


class _Worker:
    """A thread that is started when there is something to do."""

    name: str
    STACK = 0  # bytes; 0: as many as threads have

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        # One thread is started. Nothing is taken under it.
        self.starting = threading.Lock()

    def start(self) -> None:
        with self.starting:
            if self.thread is None:
                before = threading.stack_size(self.STACK)
                try:
                    self.thread = threading.Thread(target=self._loop, name=self.name, daemon=True)
                    self.thread.start()
                finally:
                    threading.stack_size(before)


class _Executor(_Worker):
    """The threads and what is in flight. Made anew in a forked child; threads start on first
    use."""

    name = "torch_hlo executor"

    def __init__(self, meanwhile: Sequence[Meanwhile] = ()) -> None:
        super().__init__()
        self.queue: SimpleQueue[Job] = SimpleQueue()
        self.in_flight: deque[Job] = deque()
        self.failed: deque[Job] = deque(maxlen=8)  # whose error nobody has seen
        # what a thread does before it waits for a job, unless that is done: given what tells
        self.meanwhile = list(meanwhile)
        # told of jobs that have just ended, with their seconds
        self.watchers: list[Callable[[Job, float], None]] = []
        self.stream: Stream | None = None
        # Protects the arena, how many jobs stream, and the end of a job. RECORDING may be held;
        # reentrant, since a job that ends gives back the arena. Under it only the pool of memory
        # locks, and `drain`, which waits for jobs that need no other lock.
        self.lock = threading.RLock()
        # scratch memory of the jobs on the stream, one at a time; None while there are none
        self.arena: Arena | None = None
        self.streaming = 0  # how many there are
        self.awaited = False  # somebody has waited since a program was started
        self.cut = 0  # time in nanoseconds; all that was recorded before it is submitted

    def _loop(self) -> None:
        WORKERS.follow()
        while True:
            job = self.queue.get()
            if not job.closed:  # else submitted twice, after Ctrl-C
                if job.after is not None:
                    _await(job.after)
                job.run()
            del job  # no reference while waiting for the next

    def release(self) -> None:
        """A job on the stream is done."""
        self.streaming -= 1
        if not self.streaming:
            ARENAS.give_back(self.arena)
            self.arena = None


_session = session.current()
_session.executor = _Executor()


def throttle() -> None:
    """Wait while DEPTH jobs are in flight, so that Python does not run far ahead of the device."""
    drain(DEPTH - 1)


def streams(program: Program, inputs: Sequence[Buffer]) -> bool:
    """Whether a job could run on the native stream now, if nobody reads what it overwrites: it
    calls no Python, what is in flight runs there too, and its inputs did not fail. Until something
    is submitted this stays so."""
    if not config.get("ASYNC") or not program.streams:
        return False
    in_flight = _session.executor.in_flight
    _forget_done(in_flight)
    if any(job.number is None for job in in_flight):
        return False
    return not (_session.executor.failed and any(b.job and b.job.error for b in inputs))


def runs_here(program: Program) -> bool:
    """Whether who starts it now is to run it himself. Asked once for each start: that somebody
    waited for what came before is then forgotten."""
    executor = _session.executor
    limit = AWAITED if executor.awaited else BRIEF
    executor.awaited = False
    return program.seconds < limit


def idle() -> bool:
    """Whether nothing is under way, and nobody watches what is run."""
    executor = _session.executor
    _forget_done(executor.in_flight)
    return not (
        executor.in_flight or executor.failed or executor.watchers or participants.profiled()
    )


def prepare(job: Job, entry: int, nbytes: int, block: array, needed: object) -> None:
    """Give a job that `streams` its place on the stream: what NativeProgram.prepare returns."""
    executor = _session.executor
    job.block = block
    job.needed = needed
    job.here = runs_here(job.program) and not executor.in_flight and not participants.profiled()
    if executor.stream is None:
        executor.stream = Stream()
    with executor.lock:
        if executor.arena is not None and executor.arena.nbytes < nbytes:
            drain()  # it is in use
        if executor.arena is None:
            executor.arena = ARENAS.borrow(nbytes)
        block[ARENA] = executor.arena.address
        executor.streaming += 1
        job.number = executor.stream.add(entry, block)


def submit(job: Job) -> None:
    """Queue a job; its output buffers are pending until it has run. With TORCH_HLO_ASYNC=0 it runs
    here. May be repeated, after Ctrl-C."""
    if job.here:
        _session.executor.stream.run(job.number)
        while not job.is_done():  # the stream's thread was faster
            _session.executor.stream.wait(job.number)
    elif participants.profiled():  # what PyTorch's profiler shows is what this thread does
        with participants.block(f"hlo::{job.name}"):
            _submit(job)
            job.await_end()
    else:
        _submit(job)


def _submit(job: Job) -> None:
    executor = _session.executor
    if not config.get("ASYNC"):
        drain()
        job.run()
        return
    in_flight = executor.in_flight
    _forget_done(in_flight)
    if job.closed:
        return
    if job.number is not None:
        if job not in in_flight:
            in_flight.append(job)
        executor.stream.publish(job.number, job.program.seconds > _LONG)
        return
    executor.start()
    if job.ended is None:
        job.after = in_flight[-1] if in_flight and in_flight[-1].number is not None else None
        ended = threading.Lock()
        ended.acquire()
        job.ended = ended
    if job not in in_flight:
        in_flight.append(job)
    executor.queue.put(job)


def watched(
    name: str,
    program: Program,
    run: Callable[..., None],
) -> Callable[..., None]:
    """`run` of a program that is called and not submitted; who watches jobs is told."""

    def call(*args: object) -> None:
        start = time.perf_counter()
        run(*args)
        for watch in _session.executor.watchers:
            watch(Job(name, program, (), ()), time.perf_counter() - start)

    return call


def all_submitted() -> None:
    """Nothing is recorded now."""
    _session.executor.cut = time.perf_counter_ns()


def has_ended(since: int, submit_all: Callable[[], object]) -> bool:
    """Whether all has run that was recorded before that time."""
    executor = _session.executor
    in_flight = executor.in_flight
    _forget_done(in_flight)
    if executor.cut < since and len(in_flight) < DEPTH:  # no need to wait
        submit_all()
        _forget_done(in_flight)
    if in_flight and in_flight[0].since < since:
        return False
    runtime.synchronize()  # other back ends only know when a program has started
    return True


def _forget_done(in_flight: deque[Job]) -> None:
    while in_flight and in_flight[0].is_done():
        try:
            in_flight.popleft()
        except IndexError:
            return


def drain(left: int = 0) -> None:
    """Wait until all submitted jobs but the last few have run, whether they failed or not."""
    in_flight = _session.executor.in_flight
    while len(in_flight) > left:
        try:
            in_flight[0].wait()
        except IndexError:  # another thread was faster
            return
        _forget_done(in_flight)


def _await(job: Job) -> None:
    """Wait for a job, and for those before it, in order."""
    in_flight = _session.executor.in_flight
    while not job.is_done():
        try:
            first = in_flight[0]
        except IndexError:
            continue
        first.wait()
        _forget_done(in_flight)


def wait(buffer: Buffer) -> None:
    """Until the job that computes `buffer` has ended. If it failed, `buffer.job` stays and has an
    error."""
    _session.executor.awaited = True
    job = buffer.job
    if job is not None:
        _await(job)


def forget_failures() -> None:
    """The errors of failed jobs have been raised."""
    _session.executor.failed.clear()


class _Compiler(_Worker):
    """One thread for all lowering and compiling. HLO is interned in tables without locks, and
    Ctrl-C (which only the main thread gets) in the middle of LLVM's ownership transfers would free
    things twice."""

    name = "torch_hlo compiler"
    STACK = 256 << 20  # deep expressions; only what is used becomes memory

    def __init__(self) -> None:
        super().__init__()
        self.queue: SimpleQueue[tuple[Callable, Future]] = SimpleQueue()

    def _loop(self) -> None:
        WORKERS.follow()
        rested = True
        while True:
            function, future = self.queue.get()
            try:
                if rested:
                    UPLOADS.compiling()
                with collector.paused():
                    result = function()
                future.set_result(result)
                del result
            except BaseException as error:  # noqa: B036 - raised where the result is wanted
                future.set_exception(error)
            del function, future
            rested = self.queue.empty()
            if rested:
                self._rest()

    def prepare(self) -> None:
        """What the first compile needs, until somebody asks for something."""
        runtime.prepare(self.queue.empty)

    def _rest(self) -> None:
        """Nobody waits for this: a failure must not end the thread, for which the next caller would
        wait without end."""
        try:
            release_compiler()
        except Exception as error:
            log.warn_once(
                "release_compiler",
                f"torch_hlo: memory of the compiler could not be given back: {error!r}",
            )


_session.compiler = _Compiler()


def call_compiler(function: Callable[[], T]) -> T:
    """`function()` on the compiler's thread. Interrupted, it still runs to its end. Calls from that
    thread itself run here."""
    if threading.current_thread() is _session.compiler.thread:
        return function()
    return submit_compiler(function).result()


def prepare_compiler() -> None:
    """Have the compiler ready before there is anything to compile, on its thread: most of a small
    program's first step is imports and the code that programs run on. Called at import."""
    submit_compiler(_session.compiler.prepare)


def submit_compiler(function: Callable[[], T]) -> Future[T]:
    """`function()` on the compiler's thread, after what it has been given before; its result
    later."""
    _session.compiler.start()
    future: Future = Future()
    _session.compiler.queue.put((function, future))
    return future


def _restart_in_child() -> None:
    _session.executor = _Executor(_session.executor.meanwhile)
    _session.compiler = _Compiler()


def drain_compiler() -> None:
    """Wait until the compiler's thread is idle."""
    if _session.compiler.thread is not None:
        call_compiler(lambda: None)


def _close() -> None:
    """At exit: let what is under way end, report errors that nobody has seen."""
    drain()
    for job in _session.executor.failed:
        print(
            f"torch_hlo: {job.name} failed and nothing waited for it: {job.error!r}",
            file=sys.stderr,
        )
    # a thread that is inside LLVM while the process takes itself apart would crash
    drain_compiler()


# a child has no thread that would keep a promise of its parent's
os.register_at_fork(before=drain_compiler, after_in_child=_restart_in_child)
atexit.register(_close)
