"""The native thread that runs programs: order, waiters that run what has not begun, no need of the
interpreter's lock, fork."""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np
import pytest

from test.support import hlo
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.llvm.stream import AVOIDED, RECORDS
from torch_hlo.device.buffer import Arena
from torch_hlo.device.cpu import loader
from torch_hlo.device.cpu.stream import Stream
from torch_hlo.device.cpu.workers import WORKERS

_TEXT = """HloModule affine
ENTRY main {
  x = s64[1000] parameter(0)
  three = s64[] constant(3)
  b = s64[1000] broadcast(three), dimensions={}
  m = s64[1000] multiply(x, b)
  i = s64[1000] iota(), iota_dimension=0
  ROOT r = s64[1000] add(m, i)
}
"""


class Affine:
    """x -> 3 x + i, from one array into another; not commutative, so the order of calls shows."""

    def __init__(self) -> None:
        self.program = loader.load(compile_module(hlo(_TEXT)))
        self.arrays = [np.zeros(1000, np.int64) for _ in range(2)]
        self.calls = 0
        self.blocks = []
        self.arena = Arena(1 << 16)

    def block(self):
        """The block of the next call."""
        source, target = self.arrays if self.calls % 2 == 0 else self.arrays[::-1]
        self.calls += 1
        words = (source.ctypes.data, target.ctypes.data)
        WORKERS.ensure()
        self.blocks.append(self.program.block(words, self.arena.address))
        return self.blocks[-1]

    def check(self) -> None:
        x = np.zeros(1000, np.int64)
        with np.errstate(over="ignore"):
            for _ in range(self.calls):
                x = x * 3 + np.arange(1000)
        np.testing.assert_array_equal(self.arrays[self.calls % 2], x)


def submit(stream: Stream, affine: Affine) -> int:
    number = stream.add(affine.program.address, affine.block())
    stream.publish(number)
    stream.publish(number)  # may be repeated
    return number


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_order(depth: int) -> None:
    stream, affine = Stream(), Affine()
    waiting = []
    for _ in range(5 * RECORDS):
        waiting.append(submit(stream, affine))
        if len(waiting) >= depth:
            stream.wait(waiting.pop(0))
    for number in waiting:
        stream.wait(number)
        assert stream.is_done(number)
        assert stream.seconds(number) > 0
    affine.check()


@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="threads know their processor on Linux only",
)
def test_only_long_jobs_leave_the_processor_of_who_submits_them() -> None:
    stream, affine = Stream(), Affine()
    for long in (True, False):
        number = stream.add(affine.program.address, affine.block())
        stream.publish(number, long)
        stream.wait(number)
        assert (stream._words[AVOIDED] in os.sched_getaffinity(0)) == long
    affine.check()


def test_what_its_caller_runs() -> None:
    """More jobs than there are records, of which the thread sees a few; then some that it runs."""
    stream, affine = Stream(), Affine()
    for i in range(5 * RECORDS):
        number = stream.add(affine.program.address, affine.block())
        stream.run(number)
        stream.run(number)  # may be repeated
        assert stream.is_done(number)
        if i % 50 == 49:
            stream.wait(submit(stream, affine))
    affine.check()


def test_several_threads_wait_for_the_same_jobs() -> None:
    stream, affine = Stream(), Affine()
    for _ in range(60):
        numbers = [submit(stream, affine) for _ in range(3)]

        def wait(numbers=numbers) -> None:
            for number in numbers:
                stream.wait(number)

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert all(map(stream.is_done, numbers))
    affine.check()


def test_runs_while_python_is_busy() -> None:
    stream, affine = Stream(), Affine()
    before = sys.getswitchinterval()
    sys.setswitchinterval(100)  # nobody gets the interpreter's lock from us
    try:
        number = submit(stream, affine)
        end = time.monotonic() + 60
        while not stream.is_done(number) and time.monotonic() < end:
            pass
        assert stream.is_done(number)
    finally:
        sys.setswitchinterval(before)
    affine.check()


def test_a_forked_child_has_a_stream_of_its_own() -> None:
    stream, affine = Stream(), Affine()
    stream.wait(submit(stream, affine))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            other = Stream()
            other.wait(submit(other, affine))
            affine.check()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    stream.wait(submit(stream, affine))
    affine.check()
