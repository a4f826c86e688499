"""Runs programs in order in the background, so that Python can trace the next step meanwhile; and compiles on another thread.

    throttle()                                          # waits while DEPTH jobs are in flight
    submit(Job("step", program, inputs, outputs, donated))
    wait(buffer)                                        # afterwards buffer.job is None, or a job with an error
    compiled = call_compiler(function)                  # on the compiler's thread: Ctrl-C ends the waiting, not the work
Native programs run on a native thread (device/stream.py), which needs no turn of the interpreter; programs that call Python, and other back ends,
on a Python thread. A job whose inputs come from a failed job fails with the same error. Nothing here takes the step's lock.
"""

from __future__ import annotations

import atexit
import contextlib
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

from torch_hlo import collector, config, metrics
from torch_hlo.compiler.codegen.program import ARENA
from torch_hlo.device import cpu, runtime
from torch_hlo.device.buffer import Arena
from torch_hlo.device.runtime import Buffer, Program
from torch_hlo.device.stream import Stream
from torch_hlo.device.trim import compiling, release_compiler
from torch_hlo.hlo.collective import named
from torch_hlo.lazy import log

DEPTH = 2
MEANWHILE: list[
    Callable[[Callable[[], bool]], None]
] = []  # what a thread does before it waits for a job, unless that is done: given what tells
_BRIEF = 15e-6  # seconds of a program that its caller runs himself: another thread would not even have woken up
_LONG = 2e-3  # of one that is worth changing the processor for: 0.1 ms, and what the old one's cache holds
T = TypeVar("T")


class Job:
    """One run of a program. `donated`: (output, input) pairs that share memory. `error` is set before it is done.

    On the stream it has a `number`, a `block` and what it refers to; on the Python thread it waits for the job `after` it comes, and `ended` is locked until it is done.
    """

    __slots__ = (
        "name",
        "program",
        "inputs",
        "outputs",
        "donated",
        "error",
        "closed",
        "number",
        "block",
        "needed",
        "after",
        "ended",
    )

    def __init__(
        self,
        name: str,
        program: Program,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        donated: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.name, self.program, self.inputs, self.outputs, self.donated = (
            name,
            program,
            inputs,
            outputs,
            donated,
        )
        self.error: BaseException | None = None
        self.closed = False
        self.number: int | None = None
        self.block: array | None = None
        self.needed: object = None
        self.after: Job | None = None
        self.ended: threading.Lock | None = None

    def is_done(self) -> bool:
        """True when it has run, or failed."""
        if not self.closed and self.number is not None and _EXECUTOR.stream.is_done(self.number):
            self._close(_EXECUTOR.stream.seconds(self.number))
        return self.closed

    def wait(self) -> None:
        """Until it is done, as the jobs before it are."""
        if self.is_done():
            return
        for work in MEANWHILE:
            work(self.is_done)
        if self.number is None:
            with self.ended:
                return
        _EXECUTOR.stream.wait(self.number)
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
                _FAILED.append(self)
        finally:
            self._close(time.perf_counter() - start)

    def _close(self, seconds: float) -> None:
        """It has run: its results are there, and what it only needed is let go."""
        executor = _EXECUTOR
        with executor.lock:
            if self.closed:
                return
            if self.error is None:
                for buffer in self.outputs:
                    if buffer.job is self:  # else a later job has it in hand
                        buffer.job = None
            self.inputs = self.outputs = ()
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
        for buffer in self.inputs:
            job = buffer.job
            if job is not None and job.error is not None:
                self.error = job.error
                raise _Upstream

    def _unshare(self) -> None:
        """An aliased input that a host copy is reading gets a private copy to be overwritten instead."""
        for o, i in self.donated:
            memory = self.inputs[i].memory
            if memory.readers:
                private = memory.copy(self.inputs[i].nbytes)
                self.outputs[o].memory = private
                self.inputs = [*self.inputs]
                self.inputs[i] = self.inputs[i].over(private)


class _Upstream(Exception):
    """An input was never computed."""


_FAILED: deque[Job] = deque(maxlen=8)  # whose error nobody has seen
_state_lock = threading.Lock()


class _Executor:
    """The threads and what is in flight. Made anew in a forked child; threads start on first use."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Job] = SimpleQueue()
        self.in_flight: deque[Job] = deque()
        self.thread: threading.Thread | None = None
        self.stream: Stream | None = None
        self.lock = threading.RLock()
        self.arena: Arena | None = (
            None  # scratch memory of the jobs on the stream, one at a time; None while there are none
        )
        self.streaming = 0  # how many there are

    def start(self) -> None:
        with _state_lock:
            if self.thread is None:
                self.thread = threading.Thread(
                    target=self._loop, name="torch_hlo executor", daemon=True
                )
                self.thread.start()

    def _loop(self) -> None:
        cpu.follow()
        while True:
            job = self.queue.get()
            if not job.closed:  # else submitted twice, after Ctrl-C
                if job.after is not None:
                    _await(job.after)
                job.run()
            del job  # no reference while waiting for the next

    def prepare(self, job: Job, entry: int, nbytes: int) -> None:
        """See `prepare`."""
        if self.stream is None:
            self.stream = Stream()
        with self.lock:
            if self.arena is not None and self.arena.nbytes < nbytes:
                drain()  # it is in use
            if self.arena is None:
                self.arena = Arena.borrow(nbytes)
            job.block[ARENA] = self.arena.address
            self.streaming += 1
            job.number = self.stream.add(entry, job.block)

    def release(self) -> None:
        """A job on the stream is done."""
        self.streaming -= 1
        if not self.streaming:
            self.arena.give_back()
            self.arena = None


_EXECUTOR = _Executor()


def throttle() -> None:
    """Wait while DEPTH jobs are in flight, so that Python does not run far ahead of the device."""
    in_flight = _EXECUTOR.in_flight
    while len(in_flight) >= DEPTH:
        try:
            oldest = in_flight[0]
        except IndexError:  # another thread was faster
            return
        oldest.wait()
        _forget_done(in_flight)


def streams(program: Program, inputs: Sequence[Buffer]) -> bool:
    """Whether a job could run on the native stream now, if nobody reads what it overwrites: it calls no Python, what is in flight runs there too, and its
    inputs did not fail. Until something is submitted this stays so."""
    if not config.get("ASYNC") or not getattr(program, "streams", False):
        return False
    in_flight = _EXECUTOR.in_flight
    _forget_done(in_flight)
    for job in in_flight:
        if job.number is None:
            return False
    return not (
        _FAILED
        and any(buffer.job is not None and buffer.job.error is not None for buffer in inputs)
    )


def prepare(job: Job, entry: int, nbytes: int, block: array, needed: object) -> None:
    """Give a job that `streams` its place on the stream: what NativeProgram.prepare returns."""
    job.block, job.needed = block, needed
    _EXECUTOR.prepare(job, entry, nbytes)


def submit(job: Job) -> None:
    """Queue a job; its output buffers are pending until it has run. With TORCH_HLO_ASYNC=0 it runs here. May be repeated, after Ctrl-C."""
    executor = _EXECUTOR
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
        if job.program.seconds < _BRIEF and len(in_flight) == 1:
            executor.stream.run(job.number)
        else:
            executor.stream.publish(job.number, job.program.seconds > _LONG)
        return
    if executor.thread is None:
        executor.start()
    if job.ended is None:
        job.after = in_flight[-1] if in_flight and in_flight[-1].number is not None else None
        ended = threading.Lock()
        ended.acquire()
        job.ended = ended
    if job not in in_flight:
        in_flight.append(job)
    executor.queue.put(job)


def _forget_done(in_flight: deque[Job]) -> None:
    while in_flight and in_flight[0].is_done():
        try:
            in_flight.popleft()
        except IndexError:
            return


def drain() -> None:
    """Wait until every submitted job has run, whether it failed or not."""
    in_flight = _EXECUTOR.in_flight
    while in_flight:
        try:
            in_flight[0].wait()
        except IndexError:
            return
        _forget_done(in_flight)


def _await(job: Job) -> None:
    """Wait for a job, and for those before it, in order."""
    in_flight = _EXECUTOR.in_flight
    while not job.is_done():
        try:
            first = in_flight[0]
        except IndexError:
            continue
        first.wait()
        _forget_done(in_flight)


def wait(buffer: Buffer) -> None:
    """Until the job that computes `buffer` has ended. If it failed, `buffer.job` stays and has an error."""
    job = buffer.job
    if job is not None:
        _await(job)


def forget_failures() -> None:
    """The errors of failed jobs have been raised."""
    _FAILED.clear()


class _Compiler:
    """One thread for all lowering and compiling. HLO is interned in tables without locks, and Ctrl-C (which only the main thread gets)
    in the middle of LLVM's ownership transfers would free things twice."""

    STACK = 256 << 20  # deep expressions; only what is used becomes memory

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[Callable, Future]] = SimpleQueue()
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        with _state_lock:
            if self.thread is None:
                before = threading.stack_size(self.STACK)
                try:
                    self.thread = threading.Thread(
                        target=self._loop, name="torch_hlo compiler", daemon=True
                    )
                    self.thread.start()
                finally:
                    threading.stack_size(before)

    def _loop(self) -> None:
        cpu.follow()
        rested = True
        while True:
            function, future = self.queue.get()
            try:
                if rested:
                    compiling()
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
        with contextlib.suppress(
            Exception
        ):  # it only gets ahead of what would happen later: an error comes back there
            for part in runtime.preparations():
                if not self.queue.empty():
                    return
                part()

    def _rest(self) -> None:
        """Nobody waits for this: a failure must not end the thread, for which the next caller would wait without end."""
        try:
            release_compiler()
        except Exception as error:
            log.warn_once(
                "release_compiler",
                f"torch_hlo: memory of the compiler could not be given back: {error!r}",
            )


_COMPILER = _Compiler()


def call_compiler(function: Callable[[], T]) -> T:
    """`function()` on the compiler's thread. Interrupted, it still runs to its end. Calls from that thread itself run here."""
    if threading.current_thread() is _COMPILER.thread:
        return function()
    return submit_compiler(function).result()


def prepare_compiler() -> None:
    """Have the compiler ready before there is anything to compile, on its thread: most of a small program's first step is imports and the code that
    programs run on. Called at import."""
    submit_compiler(_COMPILER.prepare)


def submit_compiler(function: Callable[[], T]) -> Future[T]:
    """`function()` on the compiler's thread, after what it has been given before; its result later."""
    if _COMPILER.thread is None:
        _COMPILER.start()
    future: Future = Future()
    _COMPILER.queue.put((function, future))
    return future


def _restart_in_child() -> None:
    global _EXECUTOR, _COMPILER, _state_lock
    _state_lock = threading.Lock()
    _EXECUTOR = _Executor()
    _COMPILER = _Compiler()


def drain_compiler() -> None:
    """Wait until the compiler's thread is idle."""
    if _COMPILER.thread is not None:
        call_compiler(lambda: None)


def _close() -> None:
    """At exit: let what is under way end, report errors that nobody has seen."""
    drain()
    for job in _FAILED:
        print(
            f"torch_hlo: {job.name} failed and nothing waited for it: {job.error!r}",
            file=sys.stderr,
        )
    drain_compiler()  # a thread that is inside LLVM while the process takes itself apart would crash


os.register_at_fork(
    before=drain_compiler, after_in_child=_restart_in_child
)  # a child has no thread that would keep a promise of its parent's
atexit.register(_close)
