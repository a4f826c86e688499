"""Programs in order on a native thread, see compiler/llvm/stream.py. One thread at a time may
submit.

    number = stream.add(entry address, block)    # block: array("Q"), alive until the job is done
    stream.publish(number)                       # from here it may run; may be repeated
    stream.run(number)                           # or: it runs here, the jobs before it being done
    stream.is_done(number)
    stream.wait(number)                          # in order: whoever waits may be who runs it
"""

import ctypes
import threading
import time
from array import array
from collections.abc import Callable

from torch_hlo.compiler.llvm import stream
from torch_hlo.compiler.llvm.stream import (
    DONE,
    FIRST,
    QUEUED,
    RECORD,
    RECORDS,
    TAIL,
    TAKEN,
)

from .engine import loaded
from .workers import WORKERS, without_signals


class Code:
    """The stream's native functions (start, submit, run, wait), made once; they stay loaded until
    the process ends: threads run them."""

    def __init__(self) -> None:
        # Of `functions`. Taken with no lock of ours held; LLVM compiles and that of Workers is
        # taken under it.
        self._lock = threading.Lock()
        self._functions: tuple[Callable[..., int], ...] | None = None
        self._words: list[array] = []  # threads look at them until the process ends

    def keep(self, words: array) -> None:
        self._words.append(words)

    def load(self) -> tuple[Callable[..., int], ...]:
        with self._lock:
            if self._functions is None:
                self._functions = self._load()
            return self._functions

    @staticmethod
    def _load() -> tuple[Callable[..., int], ...]:
        WORKERS.load()  # who waits helps there
        code = loaded(stream.text())
        # Submitting is short, as is what `run` is for: they keep the interpreter's lock. Waiting
        # gives it up.
        kinds = (
            ("start", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
            ("submit", ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)),
            ("run", ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)),
            ("wait", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
        )
        functions = tuple(
            kind(code.get_function_address(f"torch_hlo_stream_{name}")) for name, kind in kinds
        )
        code.detach()
        return functions


CODE = Code()


class Stream:
    """A native thread and its queue of at most RECORDS jobs. A forked child makes a new one."""

    def __init__(self) -> None:
        start, self._submit, self._run, self._wait = CODE.load()
        self._words = array("Q", bytes(8 * (FIRST + RECORD * RECORDS)))
        CODE.keep(self._words)
        self._address = self._words.buffer_info()[0]
        with without_signals():
            if start(self._address):
                raise OSError("the system gives no thread to run programs on")

    def add(self, entry: int, block: array) -> int:
        """The number of the next job, `entry(block)`. It has to be published before another is
        added."""
        words = self._words
        number = words[TAIL]
        # the thread has not even looked at jobs that others ran for it
        while number - words[TAKEN] >= RECORDS - 1:
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
        """Run a job that was added here: for one that takes less time than waking the thread up.
        The jobs before it must be done. May be repeated."""
        if self._words[TAIL] == number:
            self._run(self._address, self._record(number))

    def is_done(self, number: int) -> bool:
        """True when the job has run. Its record is forgotten RECORDS jobs later."""
        return self._words[FIRST + RECORD * (number % RECORDS)] == DONE

    def wait(self, number: int) -> None:
        """Until the job has run; here and now if nobody has begun. The jobs before it must be
        done."""
        record = self._record(number)
        while not self._wait(record):  # now and then, so that Ctrl-C is heard
            pass

    def _record(self, number: int) -> int:
        return self._address + 8 * (FIRST + RECORD * (number % RECORDS))

    def seconds(self, number: int) -> float:
        """How long the job, which is done, took."""
        return self._words[FIRST + RECORD * (number % RECORDS) + 3] * 1e-9

    def began(self, number: int) -> float:
        """When the job, which is done, began: a time of `time.monotonic`."""
        return self._words[FIRST + RECORD * (number % RECORDS) + 2] * 1e-9
