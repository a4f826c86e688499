"""Who takes part in parallel loops (compiler/llvm/thread_pool.py is their code), and how many."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch_hlo import config
from torch_hlo.compiler.llvm import host, thread_pool
from torch_hlo.pytorch import shortcuts

from .engine import loaded
from .symbols import SYMBOLS

# nanoseconds for which a program waits for PyTorch's threads: more than waking them up takes
_PATIENCE = 500_000
_CUT = 8  # on fewer threads a cut for more costs little
_PAUSE = 0.005  # seconds
_LONGEST_PAUSE = 1.0


@contextlib.contextmanager
def without_signals() -> Iterator[None]:
    """Threads that are started in the block handle no signals."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Thread(threading.local):
    follows = False


class Workers:
    """Who takes part in parallel loops: PyTorch's OpenMP threads, for programs that are called
    between its kernels; else native workers of our own, made when a program first wants them, and
    anew in a forked child."""

    def __init__(self) -> None:
        # Of `started` and `functions`, which are made once. Taken with no lock of ours held but
        # the stream's; LLVM compiles under it.
        self.lock = threading.Lock()
        self.started = 0
        self.active = 0
        self.functions: _Functions | None = None
        self.has_team = False
        self.pause = _PAUSE  # seconds without the team, once it has kept a program waiting
        self.alone_until = 0.0
        self._latest = 0  # what PyTorch last said on a thread that does not follow
        self._sharing = 1  # devices that compute at a time
        self._thread = _Thread()

    def threads(self) -> int:
        """Threads that one compiled program uses: TORCH_HLO_THREADS, else as many as PyTorch's own
        kernels; less when several devices share them."""
        return max(1, (config.get("THREADS") or self._torch_threads()) // self._sharing)

    def cut(self) -> int:
        """Threads that the work of a program is cut for. Sums of partial sums depend on it: under
        `torch.use_deterministic_algorithms` it is the same number, however many threads there
        are."""
        torch = sys.modules.get("torch")
        if torch and torch.are_deterministic_algorithms_enabled():
            return _CUT
        return self.threads()

    def _torch_threads(self) -> int:
        if not (self._latest and self._thread.follows):
            torch = sys.modules.get("torch")
            self._latest = torch.get_num_threads() if torch else os.cpu_count() or 1
        return self._latest

    def follow(self) -> None:
        """This thread works for others and has as many threads as the last of them. (PyTorch keeps
        a number per thread: it would not hear of a change.)"""
        self._thread.follows = True

    @contextlib.contextmanager
    def shared_by(self, devices: int) -> Iterator[None]:
        """In the block, as many programs run at a time: each device is a thread that computes, so
        that there are fewer to add."""
        before, self._sharing = self._sharing, max(devices, 1)
        try:
            yield
        finally:
            self._sharing = before

    def call(self, entry: int, block: int, may_team: bool) -> None:
        """entry(block) on this thread, with helpers. `may_team`: it calls no Python, whose kernels
        would find themselves in a parallel loop already."""
        n = self.threads()
        if n == 1 or not may_team or not self._wants_team():
            self.ensure(n)
            self.functions.call(entry, block, 0)
            return
        if n != self.active:
            self._activate(n)
        if self.functions.call(entry, block, n) > _PATIENCE:
            self.alone_until = time.perf_counter() + self.pause
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)
        else:
            self.pause = _PAUSE

    def _wants_team(self) -> bool:
        """OpenMP waits for each of its threads in the end: where a neighbour keeps those from
        running, our own do better."""
        # a team of another size than PyTorch's would be made anew
        if not self.has_team or config.get("THREADS") or self._sharing > 1:
            return False
        return not self.alone_until or time.perf_counter() > self.alone_until

    def ensure(self, threads: int = 0) -> None:
        """Have `threads` threads (the caller included; by default as many as a program uses) take
        part in parallel loops."""
        threads = threads or self.threads()
        if threads == self.active and threads <= self.started + 1:
            return
        with self.lock, without_signals():
            while self.started < threads - 1:
                if self.functions.add(self.started + 1):
                    break
                self.started += 1
        self._activate(threads)

    def _activate(self, threads: int) -> None:
        self.functions.active(threads)
        self.active = threads

    def load(self) -> None:
        """Load the code that parallel loops run on, for programs to be linked with; once."""
        with self.lock:
            if self.functions is not None:
                return
            # it waits for memory and other threads: as fast as optimised
            code = loaded(thread_pool.text(host().parallel_threshold_ps))
            kinds = (
                ("add", (ctypes.c_int, ctypes.c_int64)),
                ("active", (None, ctypes.c_int64)),
                ("reset", (None,)),
                ("team", (None, ctypes.c_void_p, ctypes.c_void_p)),
                (
                    "call",
                    (
                        ctypes.c_int64,
                        ctypes.c_void_p,
                        ctypes.c_void_p,
                        ctypes.c_int64,
                    ),
                ),
            )
            functions = _Functions(
                *(
                    ctypes.CFUNCTYPE(*kind)(code.get_function_address(f"torch_hlo_pool_{name}"))
                    for name, kind in kinds
                )
            )
            for name in ("torch_hlo_parallel", "torch_hlo_pool_help"):
                SYMBOLS.add(name, code.get_function_address(name))
            code.detach()  # workers run this code until the process ends
            parallel, number = _openmp()
            functions.team(parallel, number)
            self.has_team = bool(parallel)
            self.functions = functions

    def after_fork(self) -> None:
        self.lock = threading.Lock()
        self.started = self.active = 0
        self.has_team = False  # OpenMP's threads have stayed behind as well, and it does not notice
        if self.functions is not None:
            self.functions.reset()


class _Functions(NamedTuple):
    """The pool's native functions, see compiler/llvm/thread_pool.py."""

    add: Callable[[int], int]
    active: Callable[[int], None]
    reset: Callable[[], None]
    team: Callable[[int | None, int | None], None]
    call: Callable[[int, int, int], int]


def _openmp() -> tuple[int | None, int | None]:
    """The addresses of GOMP_parallel and omp_get_thread_num where PyTorch has brought an OpenMP
    library (libgomp, or LLVM's and Intel's, which have them too)."""
    if "torch" not in sys.modules or not shortcuts.on("openmp"):
        return None, None
    names = ctypes.CDLL(None)
    if not hasattr(names, "GOMP_parallel") or not hasattr(names, "omp_get_thread_num"):
        return None, None
    return tuple(
        ctypes.cast(f, ctypes.c_void_p).value
        for f in (names.GOMP_parallel, names.omp_get_thread_num)
    )


WORKERS = Workers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=WORKERS.after_fork)
