"""Loading Executables into the process and running them.

    program = load(executable)
    program.call([address, ...], [address, ...], sizes=(…))       # addresses of parameters and outputs; the interpreter lock is released

Scratch memory (arenas) is shared by all programs: it is kept between calls, so steady state touches no fresh page.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import llvmlite.binding as llvm
import numpy as np

from torch_hlo import config
from torch_hlo.compiler.codegen import pool
from torch_hlo.compiler.codegen.program import FAILED, FIXED_WORDS, HostCall
from torch_hlo.compiler.codegen.registry import HOST_CALLS, load_emitters
from torch_hlo.compiler.codegen.target import Target, deny, host
from torch_hlo.compiler.executable import Executable
from torch_hlo.compiler.machine_code import machine_code
from torch_hlo.device import fft, symbols
from torch_hlo.device.buffer import Arena, map_pages
from torch_hlo.hlo.dim import function, substitute
from torch_hlo.hlo.shape import DTYPES, Shape

_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_HOST = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)


class Program:
    """A loaded Executable. `call` may be used by several threads at a time."""

    def __init__(self, executable: Executable, engine: llvm.ExecutionEngine) -> None:
        self.executable = executable
        self.engine = engine  # owns the machine code
        self.address = engine.get_function_address(executable.entry)
        self.entry = _ENTRY(self.address)
        self.constants = _copy_aligned(executable.constants)
        self.errors: dict[int, BaseException] = {}
        self.parallel = (
            "torch_hlo_parallel" in executable.externals
        )  # some loop is worth more than one thread
        self.static_arena = executable.arena if isinstance(executable.arena, int) else None
        self.no_copies = (0,) * len(executable.packings)
        self.symbolic_arena = function(
            [name for name, _, _ in executable.symbols], (executable.arena,)
        )
        self.callback = _HOST(self._host_call) if executable.host_calls else None
        self._head = (
            self.constants.ctypes.data if len(executable.constants) else 0,
            ctypes.cast(self.callback, ctypes.c_void_p).value if self.callback else 0,
        )

    def call(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        sizes: Sequence[int] = (),
        copies: Sequence[int] = (),
    ) -> None:
        """Run on memory at these addresses. `sizes`: the values of executable.symbols. Aliased outputs must be given their parameter's
        address. `copies`: addresses for executable.packings, 0 for none. Raises what a host call raised."""
        e = self.executable
        if (
            len(inputs) != len(e.parameters)
            or len(outputs) != len(e.outputs)
            or len(sizes) != len(e.symbols)
        ):
            raise ValueError(
                f"{e.name} takes {len(e.parameters)} inputs, {len(e.outputs)} outputs and {len(e.symbols)} sizes, "
                f"got {len(inputs)}, {len(outputs)} and {len(sizes)}"
            )
        self.launch((*sizes, *inputs, *outputs), copies)

    def launch(self, words: tuple[int, ...], copies: Sequence[int] = ()) -> None:
        """`call` without checks: the sizes, the addresses of the parameters, those of the outputs; of packed `copies`, where there are any."""
        words += tuple(copies) or self.no_copies
        arena = Arena.borrow(self.arena_bytes(words))
        try:
            block = self.block(words, arena.address)
            at = block.buffer_info()[0]
            if self.parallel:
                _POOL.call(self.address, at, self.callback is None)
            else:
                self.entry(at)
        finally:
            arena.give_back()
        if self.errors and (error := self.errors.pop(at, None)) is not None:
            raise error

    def arena_bytes(self, words: Sequence[int]) -> int:
        """The bytes of scratch memory that a run needs; `words` as for `launch`."""
        if self.static_arena is not None:
            return self.static_arena
        return self.symbolic_arena(*words[: len(self.executable.symbols)])[0]

    def block(self, words: Sequence[int], arena: int = 0) -> array:
        """What the entry takes the address of; `words` with those of the packed copies; `arena`: the address of its scratch memory."""
        return array("Q", [arena, *self._head, 0, 0, *words])

    def _host_call(self, block: int, number: int, arguments: int) -> None:
        """Called from native code; an exception is kept until the program has returned."""
        call = self.executable.host_calls[number]
        if block in self.errors:
            return
        try:
            words = (ctypes.c_uint64 * self.executable.words).from_address(block)
            values = {
                name: words[FIXED_WORDS + i]
                for i, (name, _, _) in enumerate(self.executable.symbols)
            }
            run_host_call(call, arguments, values)
        except BaseException as error:  # noqa: BLE001 - must not propagate into native code
            self.errors[block] = error
            ctypes.c_uint64.from_address(block + 8 * FAILED).value = 1


def run_host_call(call: HostCall, arguments: int, sizes: dict[str, int]) -> None:
    """Call a registered function with arrays over the buffers whose addresses are at `arguments`."""
    shapes = (*call.outputs, *call.inputs)
    addresses = (ctypes.c_uint64 * len(shapes)).from_address(arguments)
    arrays = [_array(a, s, sizes) for a, s in zip(addresses, shapes, strict=True)]
    n = len(call.outputs)
    (LIBRARIES.get(call.name) or HOST_CALLS[call.name])(
        arrays[:n], arrays[n:], **_attributes(call.attrs)
    )


LIBRARIES = {"fft": fft.fft}  # host calls that another library does better than the compiler's own


_attributes = lru_cache(maxsize=4096)(
    json.loads
)  # the text of a host call's attributes -> keywords


def _array(address: int, shape: Shape, sizes: dict[str, int]) -> np.ndarray:
    dims = tuple(substitute(d, sizes) for d in shape.dims)
    dtype = storage_dtype(shape.dtype)
    count = int(np.prod(dims, dtype=np.int64))
    if count == 0:
        return np.empty(dims, dtype)
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype).reshape(dims)


def storage_dtype(dtype: str) -> np.dtype:
    """What host calls see elements as: NumPy has no bf16 and no f8."""
    name = DTYPES[dtype].numpy
    return np.dtype(
        {"bfloat16": "uint16"}.get(name, "uint8" if name.startswith("float8") else name)
    )


def _copy_aligned(data: bytes) -> np.ndarray:
    array = map_pages(len(data))[: len(data)]
    array[:] = np.frombuffer(data, np.uint8)
    return array


def _request_tiles() -> None:
    """Ask the kernel for AMX tiles, once per process: without permission the first tile instruction is a fault."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    if host().has("amx-tile") and (
        not sys.platform.startswith("linux")
        or ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) != 0
    ):
        deny("amx")


_request_tiles()


def load(executable: Executable, target: Target | None = None) -> Program:
    """Load machine code into the process. Raises ValueError when it was compiled for another machine."""
    target = target or host()
    if executable.target != target.key:
        raise ValueError(
            f"{executable.name} was compiled for {executable.target}, this machine is {target.key}"
        )
    if executable.host_calls:
        load_emitters()
    _POOL.load()
    symbols.provide(n for n in executable.externals if n != "torch_hlo_parallel")
    return Program(executable, engine(executable.objects, target))


def engine(objects: Sequence[bytes], target: Target) -> llvm.ExecutionEngine:
    """One MCJIT engine per program; it takes its TargetMachine over, so that must be a new one."""
    # In the global context: one of our own would have to outlive the engine, which garbage collection does not promise.
    empty = llvm.parse_assembly("")
    engine = llvm.create_mcjit_compiler(empty, target.machine())
    for data in objects:
        engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    return engine


def constant_function(first: int, second: int) -> int:
    """Address of a C function that returns these two words in registers, whatever it is called with. It stays until the process ends."""
    text = f"define {{i64, i64}} @torch_hlo_constant() {{\n  ret {{i64, i64}} {{i64 {first}, i64 {second}}}\n}}\n"
    loaded = engine([machine_code(text, host(), level=0)[0]], host())
    address = loaded.get_function_address("torch_hlo_constant")
    loaded.detach()
    return address


# -- the thread pool -----------------------------------------------------------------------------------------------------
_PATIENCE = 500_000  # nanoseconds for which a program waits for PyTorch's threads: more than waking them up takes
_PAUSE, _LONGEST_PAUSE = 0.005, 1.0  # seconds


class _Pool:
    """Who takes part in parallel loops: PyTorch's OpenMP threads, for programs that are called between its kernels; else native workers of
    our own, made when a program first wants them, and anew in a forked child."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.started = 0
        self.active = 0
        self.functions: _Functions | None = None
        self.has_team = False
        self.pause = _PAUSE  # seconds without the team, once it has kept a program waiting
        self.alone_until = 0.0

    def call(self, entry: int, block: int, may_team: bool) -> None:
        """entry(block) on this thread, with helpers. `may_team`: it calls no Python, whose kernels would find themselves in a parallel loop already."""
        n = threads()
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
        """OpenMP waits for each of its threads in the end: where a neighbour keeps those from running, our own do better."""
        if (
            not self.has_team or config.get("THREADS") or _sharing > 1
        ):  # a team of another size than PyTorch's would be made anew
            return False
        return not self.alone_until or time.perf_counter() > self.alone_until

    def ensure(self, threads: int) -> None:
        """Have `threads` threads (the caller included) take part in parallel loops."""
        if threads == self.active and threads <= self.started + 1:
            return
        with self.lock:
            blocked = (
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                if hasattr(signal, "pthread_sigmask")
                else None
            )
            try:
                while self.started < threads - 1:  # workers handle no signals
                    if self.functions.add(self.started + 1):
                        break
                    self.started += 1
            finally:
                if blocked is not None:
                    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._activate(threads)

    def _activate(self, threads: int) -> None:
        self.functions.active(threads)
        self.active = threads

    def load(self) -> None:
        """Load the pool's code, for programs to be linked with."""
        with self.lock:
            if self.functions is not None:
                return
            target = host()
            code, _ = machine_code(
                pool.text(target.parallel_threshold_ps), target, level=0
            )  # it waits for memory and other threads: as fast as with 2
            loaded = engine([code], target)
            kinds = (("add", (ctypes.c_int, ctypes.c_int64)), ("active", (None, ctypes.c_int64)), ("reset", (None,)),
                     ("team", (None, ctypes.c_void_p, ctypes.c_void_p)), ("call", (ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)))  # fmt: skip
            functions = _Functions(
                *(
                    ctypes.CFUNCTYPE(*kind)(loaded.get_function_address(f"torch_hlo_pool_{name}"))
                    for name, kind in kinds
                )
            )
            for name in ("torch_hlo_parallel", "torch_hlo_pool_help"):
                symbols.add(name, loaded.get_function_address(name))
            loaded.detach()  # workers run this code until the process ends
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
    """The pool's native functions, see compiler/codegen/pool.py."""

    add: Callable[[int], int]
    active: Callable[[int], None]
    reset: Callable[[], None]
    team: Callable[[int | None, int | None], None]
    call: Callable[[int, int, int], int]


def _openmp() -> tuple[int | None, int | None]:
    """The addresses of GOMP_parallel and omp_get_thread_num where PyTorch has brought an OpenMP library (libgomp, or LLVM's and Intel's, which have
    them too)."""
    if "torch" not in sys.modules:
        return None, None
    names = ctypes.CDLL(None)
    if not hasattr(names, "GOMP_parallel") or not hasattr(names, "omp_get_thread_num"):
        return None, None
    return tuple(
        ctypes.cast(f, ctypes.c_void_p).value
        for f in (names.GOMP_parallel, names.omp_get_thread_num)
    )


_POOL = _Pool()


def ensure_pool() -> None:
    """Before a run on another thread: have the workers it wants."""
    _POOL.ensure(threads())


def load_pool() -> None:
    """Load the code that parallel loops run on, once per process."""
    _POOL.load()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_POOL.after_fork)


def threads() -> int:
    """Threads that one compiled program uses: TORCH_HLO_THREADS, else as many as PyTorch's own kernels; less when several devices share them."""
    return max(1, (config.get("THREADS") or _torch_threads()) // _sharing)


def _torch_threads() -> int:
    global _latest
    if not (_latest and _thread.follows):
        torch = sys.modules.get("torch")
        _latest = torch.get_num_threads() if torch else os.cpu_count() or 1
    return _latest


def follow() -> None:
    """This thread works for others and has as many threads as the last of them. (PyTorch keeps a number per thread: it would not hear of a change.)"""
    _thread.follows = True


class _Thread(threading.local):
    follows = False


_thread = _Thread()
_latest = 0  # what `threads` last found on a thread that does not follow
_sharing = 1


@contextlib.contextmanager
def shared_by(devices: int) -> Iterator[None]:
    """In the block, as many programs run at a time: each device is a thread that computes, so that the pool has fewer to add."""
    global _sharing
    before, _sharing = _sharing, max(devices, 1)
    try:
        yield
    finally:
        _sharing = before
