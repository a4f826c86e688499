"""Programs in flight: they run in order on a native thread, while Python goes on.

    event = launches().launch(program, inputs, outputs)    # an event's address: has it run?
    launches().drain()                                     # all of them have

Arrays of a program in flight can be given to the next one. Programs that take less time than a
thread needs to wake up run here, and so do those that call Python or several devices.
"""

import atexit
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from torch_hlo.compiler.codegen.block import ARENA
from torch_hlo.device.buffer import ARENAS, Arena
from torch_hlo.device.cpu.native import NativeProgram
from torch_hlo.device.cpu.stream import Stream
from torch_hlo.device.memory import Buffer

from .client import client
from .functions import table

_DEPTH = 8  # programs in flight: their results have memory already
_BRIEF = 1e-4  # seconds of a program that runs here: two threads would have to wake up


class _Job(NamedTuple):
    number: int
    program: NativeProgram
    kept: object  # what it reads and writes


class Launches:
    def __init__(self) -> None:
        # One thread submits at a time. Whoever waits under it needs nothing of Python.
        self.lock = threading.RLock()
        self.stream: Stream | None = None
        self.jobs: deque[_Job] = deque()
        self.arena: Arena | None = None  # of all jobs, one after another
        atexit.register(self.drain)

    def launch(
        self, program: NativeProgram, inputs: Sequence[Buffer], outputs: Sequence[Buffer]
    ) -> int:
        """The event is held for the caller."""
        with self.lock:
            self._sweep()
            if self.jobs or program.seconds > _BRIEF:
                if program.streams and program.info is None:
                    return self._submit(program, inputs, outputs)
                self.drain()
        program.run(inputs, outputs)
        return client().ready.address

    def _submit(
        self, program: NativeProgram, inputs: Sequence[Buffer], outputs: Sequence[Buffer]
    ) -> int:
        if self.stream is None:
            self.stream = Stream()
        if len(self.jobs) >= _DEPTH:
            self.stream.wait(self.jobs[0].number)
            self._sweep()
        entry, nbytes, block, needed = program.prepare(inputs, b"", outputs)
        if self.arena is None or self.arena.nbytes < nbytes:
            self.drain()
            self.arena = ARENAS.borrow(nbytes)
        block[ARENA] = self.arena.address
        event = table().event()
        table().hold(event, 1)
        words = array("Q", [entry, block.buffer_info()[0], event])
        number = self.stream.add(table().run, words)
        kept = inputs, outputs, block, needed, words
        self.jobs.append(_Job(number, program, kept))
        self.stream.publish(number)  # on this processor if need be: JAX often only waits now
        return event

    def drain(self) -> None:
        """Wait for all."""
        with self.lock:
            while self.jobs:
                self.stream.wait(self.jobs[0].number)
                self._sweep()

    def _sweep(self) -> None:
        """Let go of what jobs that have run refer to."""
        while self.jobs and self.stream.is_done(self.jobs[0].number):
            number, program, _ = self.jobs.popleft()
            program.seconds = min(program.seconds, self.stream.seconds(number))
        if not self.jobs and self.arena is not None:
            ARENAS.give_back(self.arena)
            self.arena = None


launches = cache(Launches)
