"""Runs programs in order on one background thread, so that Python can trace the next step meanwhile.

    job = Job("step", program, inputs, outputs, donated)
    reserve(); submit(job)          # returns at once; blocks in reserve() while DEPTH jobs are in flight
    wait(buffer)                    # until its contents are there; raises the error of the job that should have made them
A job whose inputs come from a failed job fails with the same error. Nothing here takes the step's lock.
"""
from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from torch_hlo import config, metrics
from torch_hlo.device.runtime import Buffer, Memory, Program

DEPTH = 2


class Job:
    """One run of a program. `donated`: (output, input) pairs that share memory. `error` is set before `done`.

    `undo` is called by the step with the job when `error` must be rolled back; the executor only keeps it.
    """

    __slots__ = ("name", "program", "inputs", "outputs", "donated", "done", "error", "undo", "reported")

    def __init__(
        self, name: str, program: Program, inputs: Sequence[Buffer], outputs: Sequence[Buffer], donated: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.name, self.program, self.inputs, self.outputs, self.donated = name, program, inputs, outputs, donated
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.undo: Callable[[], None] | None = None
        self.reported = False

    def wait(self) -> None:
        """Block until the job has run. Raises what it raised."""
        self.done.wait()
        if self.error is not None:
            self.reported = True
            raise self.error

    def run(self) -> None:
        """Run here. Never raises: the error is kept."""
        start = time.perf_counter()
        try:
            self._check_inputs()
            self._unshare()
            self.program.run(self.inputs, self.outputs)
        except BaseException as error:  # noqa: B036 - surfaces at the next wait
            if not isinstance(error, _Upstream):
                error.add_note(f"while running {self.name}")
                self.error = error
            _FAILED.append(self)
        else:
            for buffer in self.outputs:
                buffer.job = None
        finally:
            self.inputs = ()
            self.program = None
            metrics.record("ExecuteTime", time.perf_counter() - start)
            self.done.set()

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
                private = Memory(self.inputs[i].nbytes)
                private.array[: self.inputs[i].nbytes] = self.inputs[i].bytes
                self.outputs[o].memory = private
                self.inputs = [*self.inputs]
                self.inputs[i] = Buffer(self.inputs[i].shape, private)


class _Upstream(Exception):
    """An input was never computed."""


_FAILED: list[Job] = []
_state_lock = threading.Lock()


class _Executor:
    """The thread, its queue and the slots that bound it. Made on first use; anew in a forked child."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Job | None] = SimpleQueue()
        self.slots = threading.Semaphore(DEPTH)
        self.last: Job | None = None
        self.closing = False
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        with _state_lock:
            if self.thread is None:
                self.thread = threading.Thread(target=self._loop, name="torch_hlo executor", daemon=True)
                self.thread.start()

    def _loop(self) -> None:
        while (job := self.queue.get()) is not None:
            if self.closing:
                job.error = RuntimeError(f"{job.name} was dropped: Python is exiting")
                job.done.set()
            else:
                job.run()
            self.slots.release()
            job = None  # no reference while waiting for the next


_EXECUTOR = _Executor()


def reserve() -> None:
    """Wait until another job may be submitted. Every reserve is followed by submit or cancel."""
    _EXECUTOR.slots.acquire()


def cancel() -> None:
    """Give back a reservation."""
    _EXECUTOR.slots.release()


def submit(job: Job) -> None:
    """Queue a job (its slot is reserved). With TORCH_HLO_ASYNC=0 it runs here."""
    executor = _EXECUTOR
    for buffer in job.outputs:
        buffer.job = job
    if not config.get("ASYNC"):
        if executor.last is not None:
            executor.last.done.wait()
        job.run()
        executor.slots.release()
        return
    if executor.thread is None:
        executor.start()
    executor.last = job
    executor.queue.put(job)


def drain() -> None:
    """Wait until every submitted job has run, whether it failed or not."""
    last = _EXECUTOR.last
    if last is not None:
        last.done.wait()
        if _EXECUTOR.last is last:
            _EXECUTOR.last = None


def wait(buffer: Buffer) -> None:
    """Until the contents of `buffer` are there. Raises the error of the job that failed to make them."""
    job = buffer.job
    if job is not None:
        job.wait()


def take_failed() -> list[Job]:
    """Jobs that failed since the last call, in order."""
    failed = _FAILED[:]
    del _FAILED[: len(failed)]
    return failed


def _restart_in_child() -> None:
    global _EXECUTOR, _state_lock
    _state_lock = threading.Lock()
    _EXECUTOR = _Executor()


def _close() -> None:
    """At exit: let the running job end, drop the others, report errors that nobody has seen."""
    _EXECUTOR.closing = True
    drain()
    for job in take_failed():
        if not job.reported:
            import sys

            print(f"torch_hlo: {job.name} failed and nothing waited for it: {job.error!r}", file=sys.stderr)
            job.reported = True


os.register_at_fork(after_in_child=_restart_in_child)
atexit.register(_close)
