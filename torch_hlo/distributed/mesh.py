"""What users write: a `Mesh` of devices, and per tensor a specification of how its dimensions are
spread over the mesh's axes.

    mesh = Mesh((2, 4), ("data", "model"))
    spec = ("data", None)                       # dimension 0 over "data", dimension 1 whole
    spec = (("data", "model"), None)            # over both, "data" major
    spec = (Dim("data", open=True), None)       # propagation may add axes to dimension 0
    spec = ("model:(2)2", None)                 # part of an axis: size 2, after a major part of 2

Errors are raised here, when the annotation is written, and name the tensor and the axis.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

from torch_hlo.device import multi_device
from torch_hlo.hlo.sharding import sharding
from torch_hlo.hlo.sharding.sharding import (
    Axis,
    DimSharding,
    Sharding,
    ShardingError,
)

Entry: TypeAlias = "None | str | tuple[str, ...] | Dim"


class Mesh:
    """`shape` devices along named axes. `devices`: their ids in row-major order; by default 0, 1,
    2, …

    Raises ShardingError for axes that have the wrong number, no name or the same name, and for more
    devices than there are (TORCH_HLO_CPU_DEVICES virtual ones in one process, else the processes
    that torch.distributed runs)."""

    def __init__(
        self,
        shape: Sequence[int],
        axis_names: Sequence[str],
        devices: Sequence[int] | None = None,
        *,
        check: bool = True,
    ) -> None:
        shape = tuple(int(n) for n in shape)
        axis_names = tuple(axis_names)
        if len(shape) != len(axis_names):
            raise ShardingError(
                f"a mesh of shape {shape} needs {len(shape)} axis names, got {axis_names}"
            )
        if devices is not None and len(list(devices)) != math.prod(shape):
            raise ShardingError(
                f"a mesh of shape {shape} has {math.prod(shape)} devices, got {len(list(devices))}:"
                f" {list(devices)}"
            )
        self.hlo = sharding.Mesh(
            tuple(zip(axis_names, shape)),
            tuple(int(d) for d in devices) if devices is not None else (),
        )
        if check:
            self._check_devices()

    def _check_devices(self) -> None:
        have = multi_device.device_count()
        if multi_device.process_count() > 1 and self.size != have:
            raise ShardingError(
                f"mesh {self.hlo} has {self.size} devices, but {have} processes run: a mesh spans"
                " them all"
            )
        if self.size > have:
            raise ShardingError(
                f"mesh {self.hlo} needs {self.size} devices, there are {have}; set"
                f" TORCH_HLO_CPU_DEVICES={self.size} or start {self.size} processes"
            )

    @property
    def shape(self) -> dict[str, int]:
        """Axis name -> size."""
        return dict(self.hlo.axes)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return self.hlo.names

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.hlo.size

    @property
    def devices(self) -> tuple[int, ...]:
        """Device ids in row-major order of the axes."""
        return self.hlo.devices or tuple(range(self.size))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and other.hlo == self.hlo

    def __hash__(self) -> int:
        return hash(self.hlo)

    def __repr__(self) -> str:
        return f"Mesh({self.hlo})"

    def _repr_html_(self) -> str:
        return self.hlo._repr_html_()


@dataclass(init=False, repr=False, unsafe_hash=True, slots=True)
class Dim:
    """A dimension over `axes`. `open`: propagation may add more axes. `priority`: of several
    annotations those with the lowest are propagated first."""

    axes: tuple[str, ...]
    open: bool
    priority: int

    def __init__(self, *axes: str, open: bool = False, priority: int = 0) -> None:
        self.axes = axes
        self.open = open
        self.priority = priority

    def __repr__(self) -> str:
        notes = ["open=True"] * self.open + [f"priority={self.priority}"] * bool(self.priority)
        return f"Dim({', '.join([*map(repr, self.axes), *notes])})"


class PartitionSpec(tuple[Entry, ...]):
    """A specification with the arguments in place of a tuple's brackets: `PartitionSpec("data",
    None)`."""

    def __new__(cls, *entries: Entry) -> Self:
        return super().__new__(cls, entries)

    def __repr__(self) -> str:
        return f"PartitionSpec{tuple.__repr__(self) if len(self) != 1 else f'({self[0]!r})'}"


_PART = re.compile(r"(.+):\((\d+)\)(\d+)")


def to_sharding(
    mesh: Mesh,
    spec: Sequence[Entry],
    dims: Sequence[int],
    replicated: Sequence[str] = (),
    what: str = "tensor",
) -> Sharding:
    """The Sharding of an array of extents `dims`; missing entries never: the specification has one
    per dimension.

    `replicated`: axes that propagation may not use for this tensor. Raises ShardingError naming
      `what` and the axis: wrong number of entries, unknown
    axis, an axis used twice. Sizes need not divide.
    """
    dims = tuple(dims)
    if isinstance(spec, str) or len(spec) != len(dims):
        raise ShardingError(
            f"{what} of shape {dims} needs {len(dims)} entries in its partition spec, got {spec!r}"
        )
    entries = _Entries(mesh, spec, f"{what} of shape {dims}")
    found = tuple(map(entries.dim, spec))
    return Sharding(mesh.hlo, found, tuple(map(entries.axis, replicated)))


class _Entries:
    """Entries of one specification -> the compiler's axes, each part of an axis used once. `what`
    begins the text of errors."""

    def __init__(self, mesh: Mesh, spec: Sequence[Entry], what: str) -> None:
        self.mesh = mesh.hlo
        self.spec = spec
        self.what = what
        self.used: list[Axis] = []

    def axis(self, text: str) -> Axis:
        mesh = self.mesh
        part = _PART.fullmatch(text) if isinstance(text, str) else None
        name = part[1] if part else text
        if name not in mesh.names:
            raise ShardingError(
                f"{self.what}: mesh {mesh} has no axis {name!r}; its axes are"
                f" {', '.join(mesh.names)}"
            )
        found = Axis(name, int(part[2]), int(part[3])) if part else mesh.axis(name)
        size = mesh.axis_size(name)
        if size % (found.pre * found.size):
            raise ShardingError(f"{self.what}: {text} does not divide axis {name} of size {size}")
        if any(found.overlaps(other) for other in self.used):
            raise ShardingError(f"{self.what}: axis {name!r} is used twice in {tuple(self.spec)!r}")
        self.used.append(found)
        return found

    def dim(self, entry: Entry) -> DimSharding:
        if entry is None:
            entry = Dim()
        elif isinstance(entry, str):
            entry = Dim(entry)
        elif isinstance(entry, (tuple, list)):
            entry = Dim(*entry)
        if not isinstance(entry, Dim):
            raise ShardingError(
                f"{self.what}: {entry!r} is no axis name, tuple of names, None or Dim"
            )
        return DimSharding(tuple(map(self.axis, entry.axes)), entry.open, entry.priority)


def get_1d_mesh(axis_name: str = "data") -> Mesh:
    """All devices along one axis."""
    return Mesh((multi_device.device_count(),), (axis_name,))
