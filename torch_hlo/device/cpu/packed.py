"""Packed copies of weights: products read an operand in panels (compiler/matmul/gemm.py,
compiler/matmul/gemm_amx.py); of a weight that stays, the panels are kept.

    for p, memory in zip(executable.packings, copies(executable.packings, inputs)):
        ...                          # memory.address is 0 where there is no copy

A copy belongs to the Memory it is of and dies with it, or when a program overwrites that
(native.py). The first run that meets a weight leaves a mark, the second asks for memory, and the
program fills it (Program.emit_packings). TORCH_HLO_PACKED_WEIGHTS limits all copies together; by
default they take what loading the model and compiling needed before and have given back, so that
the process's peak does not grow."""

from collections.abc import Sequence

from torch_hlo import config
from torch_hlo.compiler.codegen.block import PACKED_HEAD, Packing

from ..memory import Buffer, Memory

_MIB = 1 << 20


class _Copy(Memory):
    """A copy, empty as yet; `total` counts the bytes of all."""

    __slots__ = ("nbytes",)
    total = 0

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.array[:PACKED_HEAD] = 0
        self.nbytes = nbytes
        _Copy.total += nbytes

    def __del__(self) -> None:
        _Copy.total -= self.nbytes
        super().__del__()


_NONE = Memory.adopt(0, 0, None)  # no copy
_SEEN = Memory.adopt(0, 0, None)  # none yet, but a program has asked


def copies(packings: Sequence[Packing], inputs: Sequence[Buffer]) -> list[Memory]:
    """The copy, or memory to fill, for each packing of a run on `inputs`; with address 0 where
    there is none."""
    found = []
    room = None
    for p in packings:
        memory = inputs[p.parameter].memory
        kept = memory.copies
        if kept is None:
            kept = memory.copies = {}
        copy = kept.get(p.layout)
        if copy is None:
            copy = kept[p.layout] = _SEEN
        elif copy is _SEEN:
            if room is None:
                room = _room()
            nbytes = PACKED_HEAD + p.nbytes
            # whoever reads it from outside might write, too
            fits = nbytes <= room and not memory.readers
            copy = kept[p.layout] = _Copy(nbytes) if fits else _NONE
            room -= nbytes * fits
        found.append(copy)
    return found


def total() -> int:
    """Bytes of all copies."""
    return _Copy.total


def _room() -> int:
    """Bytes that copies may still take."""
    limit = config.get("PACKED_WEIGHTS")
    if limit >= 0:
        return int(limit * _MIB) - _Copy.total
    try:
        with open("/proc/self/status") as file:
            fields = dict(line.split(":", 1) for line in file)
        return 1024 * (int(fields["VmHWM"].split()[0]) - int(fields["VmRSS"].split()[0]))
    except (OSError, KeyError, ValueError):  # not Linux
        return 0
