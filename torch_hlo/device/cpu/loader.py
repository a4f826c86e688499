"""Loading Executables into the process and running them.

    program = load(executable)
    program.call([address, ...], [address, ...], sizes=(…))       # of parameters and outputs; the
                                                                  # interpreter lock is released

Scratch memory (arenas) is shared by all programs: it is kept between calls, so steady state touches
no fresh page."""

import ctypes
import json
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

import llvmlite.binding as llvm
import numpy as np

from torch_hlo.compiler.codegen import HostCall
from torch_hlo.compiler.codegen.block import FAILED, FIXED_WORDS
from torch_hlo.compiler.codegen.registry import HOST_CALLS
from torch_hlo.compiler.executable import Executable
from torch_hlo.compiler.llvm import CpuTarget, deny, host
from torch_hlo.hlo.ir import DTYPES, Ints, Shape, function, substitute

from ..buffer import ARENAS, map_pages
from . import torch_fft
from .engine import engine
from .symbols import SYMBOLS
from .workers import WORKERS

_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_HOST = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
# of 64 bits; an array of "L" is made in half of the time, but it has 32 on Windows
_WORD = "L" if array("L").itemsize == 8 else "Q"


class Program:
    """A loaded Executable. `call` may be used by several threads at a time."""

    def __init__(self, executable: Executable, engine: llvm.ExecutionEngine) -> None:
        self.executable = executable
        self.engine = engine  # owns the machine code
        self.address = engine.get_function_address(executable.entry)
        self.entry = _ENTRY(self.address)
        self.constants = _copy_aligned(executable.constants)
        self.errors: dict[int, BaseException] = {}
        # some loop is worth more than one thread
        self.parallel = "torch_hlo_parallel" in executable.externals
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
        """Run on memory at these addresses. `sizes`: the values of executable.symbols. Aliased
        outputs must be given their parameter's address. `copies`: addresses for
        executable.packings, 0 for none. Raises what a host call raised."""
        e = self.executable
        if (
            len(inputs) != len(e.parameters)
            or len(outputs) != len(e.outputs)
            or len(sizes) != len(e.symbols)
        ):
            raise ValueError(
                f"{e.name} takes {len(e.parameters)} inputs, {len(e.outputs)} outputs and"
                f" {len(e.symbols)} sizes, got {len(inputs)}, {len(outputs)} and {len(sizes)}"
            )
        self.launch((*sizes, *inputs, *outputs), copies)

    def launch(self, words: Ints, copies: Sequence[int] = ()) -> None:
        """`call` without checks: the sizes, the addresses of the parameters, those of the outputs;
        of packed `copies`, where there are any."""
        words += tuple(copies) or self.no_copies
        arena = ARENAS.borrow(self.arena_bytes(words))
        try:
            block = self.block(words, arena.address)
            at = block.buffer_info()[0]
            if self.parallel:
                WORKERS.call(self.address, at, self.callback is None)
            else:
                self.entry(at)
        finally:
            ARENAS.give_back(arena)
        if self.errors and (error := self.errors.pop(at, None)) is not None:
            raise error

    def arena_bytes(self, words: Sequence[int]) -> int:
        """The bytes of scratch memory that a run needs; `words` as for `launch`."""
        if self.static_arena is not None:
            return self.static_arena
        return self.symbolic_arena(*words[: len(self.executable.symbols)])[0]

    def block(self, words: Sequence[int], arena: int = 0) -> array:
        """What the entry takes the address of; `words` with those of the packed copies; `arena`:
        the address of its scratch memory."""
        return array(_WORD, [arena, *self._head, 0, 0, *words])

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
        except BaseException as error:  # must not propagate into native code
            self.errors[block] = error
            ctypes.c_uint64.from_address(block + 8 * FAILED).value = 1


def run_host_call(call: HostCall, arguments: int, sizes: dict[str, int]) -> None:
    """Call a registered function with arrays over the buffers whose addresses are at
    `arguments`."""
    shapes = (*call.outputs, *call.inputs)
    addresses = (ctypes.c_uint64 * len(shapes)).from_address(arguments)
    arrays = [_array(a, s, sizes) for a, s in zip(addresses, shapes, strict=True)]
    n = len(call.outputs)
    (LIBRARIES.get(call.name) or HOST_CALLS[call.name])(
        arrays[:n], arrays[n:], **_attributes(call.attrs)
    )


# host calls that another library does better than the compiler's own
LIBRARIES = {"fft": torch_fft.fft}


# the text of a host call's attributes -> keywords
_attributes = lru_cache(maxsize=4096)(json.loads)


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
    """Ask the kernel for AMX tiles, once per process: without permission the first tile instruction
    is a fault."""
    arch_prctl = 158
    request_permission = 0x1023
    tile_data = 18
    if host().has("amx-tile") and (
        not sys.platform.startswith("linux")
        or ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) != 0
    ):
        deny("amx")


_request_tiles()


def load(executable: Executable, target: CpuTarget | None = None) -> Program:
    """Load machine code into the process. Raises ValueError when it was compiled for another
    machine."""
    target = target or host()
    if executable.target != target.key:
        raise ValueError(
            f"{executable.name} was compiled for {executable.target}, this machine is {target.key}"
        )
    WORKERS.load()
    SYMBOLS.provide(n for n in executable.externals if n != "torch_hlo_parallel")
    return Program(executable, engine(executable.objects, target))
