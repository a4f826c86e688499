"""N devices as threads of one process: where they meet for collectives.

    meeting = Rendezvous("step_1", replicas=1, partitions=8)
    results = meeting.run(lambda device: …)         # one call per device, concurrently

A collective starts when every device of its group has come. The last one to come makes the list of
tasks (collective.py); all of them work on it when it is long. The order of sums does not depend on
who is last. Nothing can hang: a device that fails releases the others, devices that all wait for
different things are told so at once, and one that never comes is given up on after `timeout`
seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from . import collective
from .collective import Arrays, Collective, CollectiveError, Communicator

_LONG = 1 << 18  # bytes moved from which waking the others to help is worth it
_GRACE = 5.0  # seconds that the other devices have to end after a failure


class _Job:
    """Tasks of a group. When `long`, all members work them off together; else the one that came
    last does, before it wakes the others."""

    def __init__(self, tasks: list[Callable[[], object]], long: bool) -> None:
        self.tasks = tasks
        self.left = len(tasks)
        self.long = long
        self.lock = threading.Lock()
        self.error: BaseException | None = None

    def work(self) -> bool:
        """Do tasks until none is unclaimed; whether this call finished the last one."""
        done = 0
        while True:
            try:
                task = self.tasks.pop()  # atomic
            except IndexError:
                break
            try:
                task()
            except BaseException as error:  # raised on every member
                self.error = error
            done += 1
        with self.lock:
            self.left -= done
            return done > 0 and self.left == 0


@dataclass(slots=True)
class _Post:
    """A device that waits in a collective."""

    what: Collective
    shapes: tuple[tuple[int, ...], ...]
    group: tuple[int, ...]
    inputs: Sequence[np.ndarray]
    outputs: Sequence[np.ndarray]
    job: _Job | None = None

    def agrees(self, other: _Post) -> bool:
        return self.what == other.what and self.shapes == other.shapes and self.group == other.group

    def __str__(self) -> str:
        return f"{self.what} of sizes {', '.join(map(str, map(list, self.shapes)))}"


class _Link(Communicator):
    """One device of several in a process."""

    def __init__(self, meeting: Rendezvous, device: int) -> None:
        self.meeting = meeting
        self.device = device
        self.replicas = meeting.replicas
        self.partitions = meeting.partitions
        self.signals: SimpleQueue[None] = SimpleQueue()  # what wakes the device

    def wait(self, timeout: float | None = None) -> bool:
        """Until a signal comes: whether one did."""
        try:
            self.signals.get(timeout=timeout)
        except Empty:
            return False
        return True

    def exchange(self, c: Collective, inputs: Arrays, outputs: Arrays) -> None:
        if not collective.solo(c, self, inputs, outputs):
            self.meeting.meet(self, c, inputs, outputs)


class Rendezvous:
    """One run of a program on `replicas * partitions` devices. `timeout`: seconds that a device
    waits for the others; None: for ever. `links`: of devices that meet elsewhere, since others are
    in other processes."""

    def __init__(
        self,
        program: str,
        replicas: int,
        partitions: int,
        timeout: float | None = None,
        links: Sequence[Communicator] = (),
    ) -> None:
        self.program = program
        self.replicas = replicas
        self.partitions = partitions
        self.timeout = timeout
        self.links: Sequence[Any] = links or [_Link(self, d) for d in range(replicas * partitions)]
        self.lock = threading.Lock()
        self.posts: dict[int, _Post] = {}
        self.running = len(self.links)  # devices that neither wait nor have finished
        self.finished: set[int] = set()
        self.failure: BaseException | None = None

    # -- the devices

    def run(
        self,
        device_program: Callable[[int], object],
        start: Callable[[Callable[[], None]], object] | None = None,
    ) -> list[Any]:
        """The results of `device_program(device)` on every device. Raises the first error, with a
        note that names the device.

        `start(call)` runs `call()` on another thread; by default on a new one.
        """
        results: list[Any] = [None] * len(self.links)
        ended = threading.Semaphore(0)

        def device(i: int, link: Communicator) -> None:
            error = None
            try:
                with collective.communicator(link):
                    results[i] = device_program(i)
            except BaseException as e:  # raised by `run`
                error = e
                error.add_note(f"on device {link.device} of {len(self.links)}, in {self.program}")
            self._leave(link, error)
            ended.release()

        try:
            for i, link in enumerate(self.links):
                (start or _thread)(partial(device, i, link))
            self._await_all(ended)
        except BaseException as error:
            with self.lock:
                self._fail(error)
            raise
        if self.failure is not None:
            raise self.failure
        return results

    def _await_all(self, ended: threading.Semaphore) -> None:
        patience = _GRACE
        for _ in self.links:
            while not ended.acquire(timeout=0.5):
                if self.failure is not None:
                    patience -= 0.5
                    if patience <= 0:
                        # a device that neither computes nor fails any more: its thread is left
                        # alone
                        return

    def _leave(self, link: Communicator, error: BaseException | None = None) -> None:
        with self.lock:
            self.running -= 1
            self.finished.add(link.device)
            if error is not None:
                self._fail(error)
            else:
                self._check()

    # -- meeting

    def meet(self, link: _Link, c: Collective, inputs: Arrays, outputs: Arrays) -> None:
        """Take part in `c`; blocks."""
        post = _Post(
            c,
            tuple(i.shape for i in inputs),
            c.group(link.device, self.replicas, self.partitions),
            inputs,
            outputs,
        )
        with self.lock:
            self._raise_failure()
            self.posts[link.device] = post
            self.running -= 1
            job = self._complete(post)
            if job is None:
                self._check()
        if job is None:
            if not link.wait(self.timeout) and self._give_up(post):
                link.wait()  # it has come in the last moment
            job = post.job
            if job is None:
                self._raise_failure()
                raise AssertionError("a device was woken without a job")
            if not job.long:  # done
                return self._raise_error(job, post)
        if job.work():
            for d in post.group:
                if d != link.device:
                    self.links[d].signals.put(None)
        else:
            link.wait()
        self._raise_error(job, post)

    def _raise_error(self, job: _Job, post: _Post) -> None:
        if job.error is not None:
            raise CollectiveError(f"{self.program}: {post}: {job.error}") from job.error

    def _complete(self, post: _Post) -> _Job | None:
        """The job of a group that is all there."""
        members = [m for d in post.group if (m := self.posts.get(d)) and post.agrees(m)]
        if len(members) < len(post.group):
            return None
        c = post.what
        pairs = c.pairs(self.replicas, self.partitions) if c.op == "collective-permute" else ()
        tasks = c.tasks(
            post.group,
            [m.inputs for m in members],
            [m.outputs for m in members],
            pairs,
        )
        long = sum(a.nbytes for m in members for a in (*m.inputs, *m.outputs)) >= _LONG
        job = _Job(tasks or [collective.nothing], long)
        self.running += len(members)
        for d, m in zip(post.group, members, strict=True):
            del self.posts[d]
            m.job = job
        if long:  # only now: who is woken first may finish the job and wake the rest
            for d, m in zip(post.group, members, strict=True):
                if m is not post:
                    self.links[d].signals.put(None)
        return job

    def _check(self) -> None:
        """Nobody runs, somebody waits: that cannot end well."""
        if self.running == 0 and self.posts and self.failure is None:
            self._fail(
                CollectiveError(
                    f"{self.program}: the devices do not run the same collectives. "
                    + self._whereabouts()
                )
            )

    def _whereabouts(self) -> str:
        said: dict[str, list[int]] = {}
        for d in range(len(self.links)):
            post = self.posts.get(d)
            said.setdefault(
                (
                    f"in {post}"
                    if post
                    else "finished"
                    if d in self.finished
                    else "busy with something else"
                ),
                [],
            ).append(d)
        return "; ".join(
            f"device{'s' if len(ds) > 1 else ''} {', '.join(map(str, ds))}: {text}"
            for text, ds in said.items()
        )

    def _give_up(self, post: _Post) -> bool:
        """The time is over: fail, unless the others have come (then their signal is under way)."""
        with self.lock:
            if post.job is not None or self.failure is not None:
                return True
            missing = [
                d for d in post.group if d not in self.posts or not self.posts[d].agrees(post)
            ]
            names = f"device{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            self._fail(
                CollectiveError(
                    f"{self.program}: {names} did not come to {post} within {self.timeout:g} s"
                    " (TORCH_HLO_COLLECTIVE_TIMEOUT). " + self._whereabouts()
                )
            )
            return False

    def _fail(self, error: BaseException) -> None:
        """Release everybody who waits."""
        if self.failure is None:
            self.failure = error
        for d in self.posts:
            self.links[d].signals.put(None)
        self.posts.clear()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise CollectiveError(
                f"{self.program}: given up, since another device failed: {self.failure}"
            ) from self.failure


def _thread(call: Callable[[], None]) -> None:
    threading.Thread(target=call, daemon=True, name="torch_hlo device").start()
