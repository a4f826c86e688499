"""Programs in order on a native thread, see compiler/codegen/stream.py. One thread at a time may submit.

number = stream.add(entry address, block)        # block: array("Q"), alive until the job is done
stream.publish(number)                           # from here it may run; may be repeated
stream.run(number)                               # or: it runs here, the jobs before it being done
stream.is_done(number); stream.wait(number)      # wait in order: whoever waits may be the one who runs it
"""

from __future__ import annotations

import ctypes
import functools
import signal
import threading
import time
from array import array

from torch_hlo.compiler.codegen import stream
from torch_hlo.compiler.codegen.stream import DONE, FIRST, QUEUED, RECORD, RECORDS, TAIL, TAKEN
from torch_hlo.compiler.codegen.target import host
from torch_hlo.compiler.machine_code import machine_code
from torch_hlo.device import cpu


def load() -> tuple:
    """(start, submit, run, wait). The code stays loaded until the process ends: threads run it."""
    with _LOADING:
        return _functions()


_LOADING = threading.Lock()


@functools.cache
def _functions() -> tuple:
    target = host()
    cpu.load_pool()  # who waits helps there
    loaded = cpu.engine([machine_code(stream.text(), target, level=0)[0]], target)
    # Submitting is short, as is what `run` is for: they keep the interpreter's lock. Waiting gives it up.
    kinds = (
        ("start", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
        ("submit", ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)),
        ("run", ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)),
        ("wait", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
    )
    functions = tuple(
        kind(loaded.get_function_address(f"torch_hlo_stream_{name}")) for name, kind in kinds
    )
    loaded.detach()
    return functions


_KEPT: list[array] = []  # threads look at their words until the process ends


class Stream:
    """A native thread and its queue of at most RECORDS jobs. A forked child makes a new one."""

    def __init__(self) -> None:
        start, self._submit, self._run, self._wait = load()
        self._words = array("Q", bytes(8 * (FIRST + RECORD * RECORDS)))
        _KEPT.append(self._words)
        self._address = self._words.buffer_info()[0]
        blocked = (
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            if hasattr(signal, "pthread_sigmask")
            else None
        )
        try:
            if start(self._address):
                raise OSError("the system gives no thread to run programs on")
        finally:
            if blocked is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def add(self, entry: int, block: array) -> int:
        """The number of the next job, `entry(block)`. It has to be published before another is added."""
        words = self._words
        number = words[TAIL]
        while (
            number - words[TAKEN] >= RECORDS - 1
        ):  # the thread has not even looked at jobs that others ran for it
            time.sleep(0)
        at = FIRST + RECORD * (number % RECORDS)
        words[at + 1], words[at + 2] = entry, block.buffer_info()[0]
        words[at] = QUEUED
        return number

    def publish(self, number: int, long: bool = False) -> None:
        """Let a job that was added run; a `long` one on another processor than this thread's."""
        if self._words[TAIL] == number:
            self._submit(self._address, long)

    def run(self, number: int) -> None:
        """Run a job that was added here: for one that takes less time than waking the thread up. The jobs before it must be done. May be repeated."""
        if self._words[TAIL] == number:
            self._run(self._address, self._record(number))

    def is_done(self, number: int) -> bool:
        """True when the job has run. Its record is forgotten RECORDS jobs later."""
        return self._words[FIRST + RECORD * (number % RECORDS)] == DONE

    def wait(self, number: int) -> None:
        """Until the job has run; here and now if nobody has begun. The jobs before it must be done."""
        record = self._record(number)
        while not self._wait(record):  # now and then, so that Ctrl-C is heard
            pass

    def _record(self, number: int) -> int:
        return self._address + 8 * (FIRST + RECORD * (number % RECORDS))

    def seconds(self, number: int) -> float:
        """How long the job, which is done, took."""
        return self._words[FIRST + RECORD * (number % RECORDS) + 3] * 1e-9
