"""What users write: a `Mesh` of devices, and per tensor a specification of how its dimensions are spread over the mesh's axes.

    mesh = Mesh((2, 4), ("data", "model"))
    spec = ("data", None)                       # dimension 0 over "data", dimension 1 whole
    spec = (("data", "model"), None)            # over both, "data" major
    spec = (Dim("data", open=True), None)       # propagation may add axes to dimension 0
    spec = ("model:(2)2", None)                 # a part of an axis: size 2, minor of a major part of size 2

Errors are raised here, when the annotation is written, and name the tensor and the axis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from torch_hlo.device import collective
from torch_hlo.hlo import sharding
from torch_hlo.hlo.sharding import Axis, DimSharding, Sharding, ShardingError

Entry = "None | str | tuple[str, ...] | Dim"


class Mesh:
    """`shape` devices along named axes. `devices`: their ids in row-major order; by default 0, 1, 2, …

    Raises ShardingError for axes that have the wrong number, no name or the same name, and for more devices than there are (TORCH_HLO_CPU_DEVICES
    virtual ones in one process, else the processes that torch.distributed runs).
    """

    def __init__(
        self,
        shape: Sequence[int],
        axis_names: Sequence[str],
        devices: Sequence[int] | None = None,
        *,
        check: bool = True,
    ) -> None:
        shape, axis_names = tuple(int(n) for n in shape), tuple(axis_names)
        if len(shape) != len(axis_names):
            raise ShardingError(
                f"a mesh of shape {shape} needs {len(shape)} axis names, got {axis_names}"
            )
        if devices is not None and len(list(devices)) != math.prod(shape):
            raise ShardingError(
                f"a mesh of shape {shape} has {math.prod(shape)} devices, got {len(list(devices))}: {list(devices)}"
            )
        self.hlo = sharding.Mesh(
            tuple(zip(axis_names, shape)),
            tuple(int(d) for d in devices) if devices is not None else (),
        )
        if check:
            self._check_devices()

    def _check_devices(self) -> None:
        have = collective.device_count()
        if collective.process_count() > 1 and self.size != have:
            raise ShardingError(
                f"mesh {self.hlo} has {self.size} devices, but {have} processes run: a mesh spans them all"
            )
        if self.size > have:
            raise ShardingError(
                f"mesh {self.hlo} needs {self.size} devices, there are {have}; set TORCH_HLO_CPU_DEVICES={self.size} or start {self.size} processes"
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

    def __eq__(self, other) -> bool:
        return isinstance(other, Mesh) and other.hlo == self.hlo

    def __hash__(self) -> int:
        return hash(self.hlo)

    def __repr__(self) -> str:
        return f"Mesh({self.hlo})"


class Dim:
    """A dimension over `axes`. `open`: propagation may add more axes. `priority`: of several annotations those with the lowest are propagated first."""

    __slots__ = ("axes", "open", "priority")

    def __init__(self, *axes: str, open: bool = False, priority: int = 0) -> None:
        self.axes, self.open, self.priority = axes, open, priority

    def __eq__(self, other) -> bool:
        return isinstance(other, Dim) and (self.axes, self.open, self.priority) == (
            other.axes,
            other.open,
            other.priority,
        )

    def __hash__(self) -> int:
        return hash((self.axes, self.open, self.priority))

    def __repr__(self) -> str:
        return f"Dim({', '.join([*map(repr, self.axes), *['open=True'] * self.open, *[f'priority={self.priority}'] * bool(self.priority)])})"


class PartitionSpec(tuple):
    """A specification with the arguments in place of a tuple's brackets: `PartitionSpec("data", None)`."""

    def __new__(cls, *entries):
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
    """The Sharding of an array of extents `dims`; missing entries never: the specification has one per dimension.

    `replicated`: axes that propagation may not use for this tensor. Raises ShardingError naming `what` and the axis: wrong number of entries, unknown
    axis, an axis used twice. Sizes need not divide.
    """
    dims = tuple(dims)
    if isinstance(spec, str) or len(spec) != len(dims):
        raise ShardingError(
            f"{what} of shape {dims} needs {len(dims)} entries in its partition spec, got {spec!r}"
        )
    used: list[Axis] = []

    def axis(text: str) -> Axis:
        part = _PART.fullmatch(text) if isinstance(text, str) else None
        name = part[1] if part else text
        if name not in mesh.hlo.names:
            raise ShardingError(
                f"{what} of shape {dims}: mesh {mesh.hlo} has no axis {name!r}; its axes are {', '.join(mesh.hlo.names)}"
            )
        found = Axis(name, int(part[2]), int(part[3])) if part else mesh.hlo.axis(name)
        if mesh.hlo.axis_size(name) % (found.pre * found.size):
            raise ShardingError(
                f"{what} of shape {dims}: {text} does not divide axis {name} of size {mesh.hlo.axis_size(name)}"
            )
        if any(found.overlaps(other) for other in used):
            raise ShardingError(
                f"{what} of shape {dims}: axis {name!r} is used twice in {tuple(spec)!r}"
            )
        used.append(found)
        return found

    def dim(i: int, entry) -> DimSharding:
        entry = (
            Dim()
            if entry is None
            else Dim(entry)
            if isinstance(entry, str)
            else Dim(*entry)
            if isinstance(entry, (tuple, list))
            else entry
        )
        if not isinstance(entry, Dim):
            raise ShardingError(
                f"{what} of shape {dims}: {entry!r} is no axis name, tuple of names, None or Dim"
            )
        found = DimSharding(tuple(map(axis, entry.axes)), entry.open, entry.priority)
        return found

    return Sharding(
        mesh.hlo, tuple(dim(i, entry) for i, entry in enumerate(spec)), tuple(map(axis, replicated))
    )


def get_1d_mesh(axis_name: str = "data") -> Mesh:
    """All devices along one axis."""
    return Mesh((collective.device_count(),), (axis_name,))
