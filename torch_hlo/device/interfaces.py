"""What a back end is to the rest of the package: `Backend`, and the `Program`s that it makes.

A module that offers a back end has a function `backend(argument) -> Backend`; runtime.py finds it
by TORCH_HLO_DEVICE."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch_hlo.hlo.ir import Ints, Module

from . import dlpack
from .memory import HOST_POOL, Buffer, Memory, Pool

if TYPE_CHECKING:
    from .gpu.driver import Driver

Observe = Callable[[str, object], None]


class Program(ABC):
    """A compiled module, loaded."""

    name: str
    # (output, input) pairs that must be given the same memory
    aliases: Sequence[tuple[int, int]] = ()
    # found in the disk cache: another process has compiled it
    from_disk = False
    # a thread without Python can run it: it is a StreamProgram
    streams = False
    # and a run of it takes the addresses of its arrays, and nothing else
    plain = False
    # virtual devices of one process may run it, several at a time
    virtual = True

    @abstractmethod
    def run(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        """Compute `outputs` from `inputs`; blocks. May be called from any thread, by one at a time.
        When it raises, neither outputs nor aliased inputs have been written."""

    def starter(self) -> Callable[[Ints], None] | None:
        """A function of a tuple of sizes and addresses that runs the program on the CPU; None where
        buffers are wanted."""
        return None


# the entry's address, the bytes of scratch memory it needs, its block, whose word ARENA is still to
# be given, and what that refers to, which a later run may drop
Prepared = tuple[int, int, array, object]


class StreamProgram(Program):
    """One that a native thread can run, if it `streams`: whoever submits it there (cpu/stream.py)
    asks what to submit."""

    seconds: float  # of its fastest run on the stream; kept by who submits it

    @abstractmethod
    def prepare(
        self, inputs: Sequence[Buffer], numbers: bytes, outputs: Sequence[Buffer]
    ) -> Prepared:
        """For a run. `numbers`: values of the last inputs, 16 bytes each."""


class Backend(ABC):
    """What runs programs, and the memory that their arrays live in. `argument`: what follows the
    colon in TORCH_HLO_DEVICE; the device is opened when something first needs it."""

    # arrays are pages of this process: `memory` gives plain `Memory`
    on_host = True
    # what saturates it, for profiler.measured_limits: elements of an f32 array that is copied, rows
    # of square matrices
    saturating = 1 << 25, 1024

    def __init__(self, argument: str = "") -> None:
        self.argument = argument

    @abstractmethod
    def compile_program(self, module: Module, observe: Observe | None = None) -> Program:
        """Compile and load; see runtime.compile_program."""

    def preparations(self) -> list[Callable[[], object]]:
        """What every first program waits for, in short parts that may be called before there is
        one, on the compiler's thread."""
        return []

    def memory(self, nbytes: int) -> Memory:
        """An uninitialised block. Raises MemoryError."""
        return Memory(nbytes)

    def adopt(self, address: int, nbytes: int, owner: object) -> Memory:
        """Memory of another library at an address of the device, for as long as `owner` lives. It
        is never written to."""
        return Memory.adopt(address, nbytes, owner)

    def pool(self) -> Pool:
        """Where blocks come from."""
        return HOST_POOL

    def driver(self) -> Driver | None:
        """That of a GPU; None where there is none. Raises DriverError when it cannot be used."""
        return None

    def place(self) -> tuple[int, int] | None:
        """DLPack's (type, number) of where arrays live; None where other libraries cannot reach
        them."""
        return (dlpack.CPU, 0) if self.on_host else None
