"""Random numbers: a generator is a (seed, offset) pair in Python; every random op that is recorded
takes the next offset.

The pair enters the graph as two s64 inputs (`seed`, `offset` keywords of the node), so a new seed
does not recompile and the numbers do not depend on where steps are cut.
`torch.Generator(device="hlo")` makes one; the default one belongs to `torch.hlo`."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Iterator

import torch

from torch_hlo.lowering.core import is_random
from torch_hlo.pytorch import tensors
from torch_hlo.pytorch.operators import OpOverload, base_name
from torch_hlo.pytorch.registration import PLACE

from . import session
from .storage import Number

__all__ = [
    "Generator",
    "HloGenerator",
    "apart",
    "chosen",
    "cpu_generator",
    "default",
    "draw",
    "is_random",
    "plain",
]
_CpuGenerator = torch.Generator
_MASK = (1 << 64) - 1
_STATE = "<QQ"  # seed, offset


class HloGenerator(_CpuGenerator):
    """Counter-based generator of the hlo device. State: seed and the number of random ops so
    far."""

    inside: str  # what is recorded as a function: its draws count from 0

    def __new__(cls, device=None) -> HloGenerator:
        self = tensors.generator_new(cls)
        self._seed = 67280421310721  # PyTorch's default seed
        self._offset = 0
        self.inside = ""
        # Two threads that draw get two offsets. Nothing is taken under it.
        self._lock = threading.Lock()
        session.current().generators[self._cdata] = self
        return self

    def __init__(self, device=None) -> None:
        pass

    device = property(lambda self: PLACE.device)

    def manual_seed(self, seed: int) -> HloGenerator:
        """Seed and start over. Negative seeds count from 2**64, as in PyTorch."""
        seed = int(seed)
        if not -(1 << 63) <= seed <= _MASK:
            raise RuntimeError(
                f"Overflow when unpacking long long: the seed {seed} does not fit into 64 bits"
            )
        self._seed = seed & _MASK
        self._offset = 0
        return self

    def initial_seed(self) -> int:
        return self._seed

    def seed(self) -> int:
        """Seed with a number from the operating system; returns it."""
        import os

        self.manual_seed(int.from_bytes(os.urandom(8), "little"))
        return self._seed

    def get_state(self) -> torch.Tensor:
        """uint8[16] on the CPU."""
        words = struct.pack(_STATE, self._seed, self._offset)
        return torch.tensor(list(words), dtype=torch.uint8, device="cpu")

    def set_state(self, state: torch.Tensor) -> HloGenerator:
        """Inverse of get_state. Raises TypeError for another tensor."""
        if state.dtype != torch.uint8 or state.numel() != 16 or state.device.type != "cpu":
            raise TypeError(
                "an hlo generator state is a uint8 CPU tensor of 16 elements, not"
                f" {state.dtype}{list(state.shape)}"
            )
        self._seed, self._offset = struct.unpack(_STATE, bytes(state.tolist()))
        return self

    def clone_state(self) -> HloGenerator:
        return HloGenerator().set_state(self.get_state())

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, other: HloGenerator) -> HloGenerator:
        return self.set_state(other.get_state())

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> None:
        self._offset = int(offset)

    def __reduce__(self):
        return _rebuild, (self.get_state(),)

    def __deepcopy__(self, memo) -> HloGenerator:
        return self.clone_state()

    def next(self) -> tuple[int, int]:
        """Seed and offset of the next random op."""
        with self._lock:
            offset = self._offset
            self._offset = offset + 1
        return self._seed, offset


def _rebuild(state: torch.Tensor) -> HloGenerator:
    return HloGenerator().set_state(state)


class _AnyGenerator(type(_CpuGenerator)):
    """`torch.Generator("hlo")` cannot be made by C++; every other device can."""

    def __call__(cls, device: str | torch.device = "cpu") -> torch.Generator:
        if torch.device(device).type in PLACE.names:
            return HloGenerator()
        return _CpuGenerator(device)

    def __instancecheck__(cls, instance) -> bool:
        return isinstance(instance, _CpuGenerator)

    def __subclasscheck__(cls, other) -> bool:
        return issubclass(other, _CpuGenerator)


class Generator(_CpuGenerator, metaclass=_AnyGenerator):
    __doc__ = _CpuGenerator.__doc__


default = HloGenerator()


def plain(op: OpOverload) -> OpOverload:
    """The overload to record for one that only adds a `generator` argument."""
    if "generator" not in op._overloadname or "out" in op._overloadname:
        return op
    wanted = [a.name for a in op._schema.arguments if a.name != "generator"]
    packet = getattr(getattr(torch.ops, op.namespace), base_name(op))
    for name in packet.overloads():
        other = getattr(packet, name)
        if [a.name for a in other._schema.arguments] == wanted:
            return other
    return op


def chosen(kwargs: dict) -> HloGenerator:
    """The generator an op was given, or the default one. Raises RuntimeError for one of another
    device."""
    given = kwargs.get("generator")
    if given is None:
        return default
    if default.inside and given is not default:
        raise RuntimeError(
            f"torch_hlo.{default.inside}: the function draws from a generator of its own; let it"
            " draw from the default one, or draw before and pass the numbers in"
        )
    if isinstance(given, HloGenerator):
        return given
    found = session.current().generators.get(given._cdata)
    if found is None:
        raise RuntimeError(
            f"Expected a {PLACE.name!r} device type for generator but found '{given.device.type}'"
        )
    return found


def draw(kwargs: dict) -> tuple[Number, Number]:
    """Seed and offset of the next random op as inputs of the program (s64)."""
    seed, offset = chosen(kwargs).next()
    return Number(signed(seed), "s64"), Number(offset, "s64")


def signed(seed: int) -> int:
    """The s64 with the bits of a seed."""
    return seed - (1 << 64) if seed >> 63 else seed


@contextlib.contextmanager
def apart(what: str) -> Iterator[int]:
    """A function is recorded that runs any number of times: its draws are numbered from 0, and the
    generator goes on as if nothing had been drawn. Yields the seed that they carry."""
    before = default._seed, default._offset, default.inside
    default._offset, default.inside = 0, what
    try:
        yield signed(default._seed)
    finally:
        default._seed, default._offset, default.inside = before


def cpu_generator(kwargs: dict) -> torch.Generator:
    """A CPU generator that continues the chosen one, for a random op that has to run on the CPU."""
    if default.inside:
        raise RuntimeError(
            f"torch_hlo.{default.inside}: the function draws random numbers that the CPU has to"
            " draw; draw them before and pass them in"
        )
    seed, offset = chosen(kwargs).next()
    mixed = (seed * 0x9E3779B97F4A7C15 + offset * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
    return _CpuGenerator("cpu").manual_seed(mixed ^ (mixed >> 31))
