"""Where the elements of an array live: a Mesh of devices with named axes, and per array a Sharding
over those axes.

    mesh = Mesh((("x", 2), ("y", 4)))           # 8 devices; device 5 has coordinates x=1, y=1
    s = Sharding.of(mesh, ("x", None, ("y",)))  # dimension 0 is split over x, dimension 2 over y
    s.shard_dims((10, 3, 8))                    # (5, 3, 2): the block of one device
    blocks = shard(array, s)                    # one block per device
    unshard(blocks, s, array.shape)             # is the array

The model is Shardy's (https://openxla.org/shardy/sharding_representation): each dimension lists the
axes that split it, major first, and is closed or open to further ones; an axis may be split into
sub-axes; axes that no dimension names replicate the array. A Sharding is the value of the attribute
`sharding` of an Instruction; an instruction of tuple shape has a tuple of them. XLA's tile
assignments and our own text are in sharding_text.py.

A dimension of n elements over k blocks has blocks of ceil(n / k) elements; the last ones are padded
at their end, with whatever content."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from torch_hlo.frozen import frozen

from ..ir.dim import Ints

_AXIS_NAME = re.compile(r"[A-Za-z_][\w.\-]*")


class ShardingError(ValueError):
    """A mesh or a sharding that is not well formed, or does not fit an array."""


MAX_DEVICES = 1 << 20
MAX_RANK = 32  # of a list of devices that is transposed


@frozen
class Mesh:
    """`axes`: (name, size) pairs, major first. `devices`: device ids in row-major order of the
    axes; () means 0, 1, 2, …"""

    axes: tuple[tuple[str, int], ...]
    devices: Ints = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        for name, size in self.axes:
            if not _AXIS_NAME.fullmatch(name):
                raise ShardingError(
                    f"mesh axis {name!r}: names are letters, digits, '_', '.' and '-', starting"
                    " with a letter"
                )
            if size < 1:
                raise ShardingError(f"mesh axis {name} has size {size}; sizes are positive")
            if names.count(name) > 1:
                raise ShardingError(f"mesh axis {name} is given twice")
        if self.size > MAX_DEVICES:
            raise ShardingError(
                f"mesh {self} has {self.size} devices; at most {MAX_DEVICES} are supported"
            )
        if self.devices and sorted(self.devices) != list(range(self.size)):
            raise ShardingError(
                f"mesh {self} needs the devices 0 to {self.size - 1} once each, got {self.devices}"
            )
        if self.devices and self.devices == tuple(range(self.size)):
            object.__setattr__(self, "devices", ())

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    def axis_size(self, name: str) -> int:
        for axis, size in self.axes:
            if axis == name:
                return size
        raise ShardingError(
            f"mesh {self} has no axis {name!r}; its axes are {', '.join(self.names) or 'none'}"
        )

    def axis(self, name: str) -> Axis:
        """The whole axis `name`."""
        return Axis(name, 1, self.axis_size(name))

    def position(self, device: int) -> int:
        """Row-major index of a device in the mesh."""
        return self.devices.index(device) if self.devices else device

    def coordinates(self, device: int) -> dict[str, int]:
        """Axis name -> index of `device` along it."""
        rest = self.position(device)
        found = {}
        for name, size in reversed(self.axes):
            rest, found[name] = divmod(rest, size)
        return found

    def groups(self, axes: Iterable[Axis]) -> tuple[Ints, ...]:
        """Devices that differ only along `axes`, as XLA's replica_groups.

        Within a group devices are ordered by their index along `axes`, the first axis major: a
        group's i-th device holds the i-th block of a dimension split over `axes`.
        """
        return _groups(self, tuple(axes))

    def _repr_html_(self) -> str:
        devices = self.devices or range(self.size)
        row = self.axes[-1][1] if self.axes else 1
        lines = [devices[at : at + row] for at in range(0, self.size, row)]
        cells = ["".join(f"<td>{d}</td>" for d in line) for line in lines]
        at = [self.coordinates(line[0]) for line in lines]
        heads = [" ".join(f"{name} {c[name]}" for name in self.names[:-1]) for c in at]
        rows = "".join(f"<tr><th>{head}</th>{cell}</tr>" for head, cell in zip(heads, cells))
        return f"<table><caption>mesh {self}</caption>{rows}</table>"

    def __str__(self) -> str:
        text = ",".join(f"{name}={size}" for name, size in self.axes)
        return text + (f";devices={','.join(map(str, self.devices))}" if self.devices else "")


@frozen
class Axis:
    """The part of mesh axis `name` that is `size` long behind a major part of `pre` devices:
    Shardy's sub-axis "x":(pre)size."""

    name: str
    pre: int
    size: int

    def within(self, mesh: Mesh) -> str:
        """Text: `x` for a whole axis, `x:(2)4` for a part."""
        return (
            self.name
            if self.pre == 1 and self.size == mesh.axis_size(self.name)
            else f"{self.name}:({self.pre}){self.size}"
        )

    def overlaps(self, other: Axis) -> bool:
        """Whether some index of the mesh axis counts for both."""
        return (
            self.name == other.name
            and self.pre < other.pre * other.size
            and other.pre < self.pre * self.size
        )


@frozen
class DimSharding:
    """`axes` split the dimension, major first. `open`: propagation may add more. `priority`: 0 is
    propagated first."""

    axes: tuple[Axis, ...] = ()
    open: bool = False
    priority: int = 0

    @property
    def size(self) -> int:
        """Number of blocks."""
        return math.prod(a.size for a in self.axes)


@frozen
class Sharding:
    """How an array is spread over `mesh`.

    dims: one DimSharding per dimension. replicated: axes that propagation may not use to split this
    array. unreduced: axes along which devices hold partial sums of the array. manual: axes along
    which the program is already written per device: shapes are per-device there. maximal: the array
    lives on this one device.
    """

    mesh: Mesh
    dims: tuple[DimSharding, ...] = ()
    replicated: tuple[Axis, ...] = ()
    unreduced: tuple[Axis, ...] = ()
    manual: tuple[Axis, ...] = ()
    maximal: int | None = None
    # Hashing is hot: shardings are keys of every table that propagation and partitioning keep.
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        key = (
            self.mesh,
            self.dims,
            self.replicated,
            self.unreduced,
            self.manual,
            self.maximal,
        )
        object.__setattr__(self, "_hash", hash(key))
        used = self.axes + self.replicated + self.unreduced + self.manual
        for i, axis in enumerate(used):
            whole = self.mesh.axis_size(axis.name)
            if axis.size < 1 or axis.pre < 1 or whole % (axis.pre * axis.size):
                raise ShardingError(
                    f"{axis.name}:({axis.pre}){axis.size} is no part of axis {axis.name} of size"
                    f" {whole}"
                )
            for other in used[:i]:
                if axis.overlaps(other):
                    raise ShardingError(f"axis {axis.name} is used twice in the sharding {self}")

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    def of(mesh: Mesh, spec: Sequence[Any], open: bool = False) -> Sharding:
        """From one entry per dimension: None, an axis name, or a tuple of names."""

        def dim(entry: str | tuple[str, ...]) -> DimSharding:
            names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            return DimSharding(tuple(mesh.axis(n) for n in names), open)

        return Sharding(mesh, tuple(dim(entry) for entry in spec))

    @staticmethod
    def replicate(mesh: Mesh, rank: int, open: bool = False) -> Sharding:
        """A whole copy on every device."""
        return Sharding(mesh, (DimSharding((), open),) * rank)

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that split dimensions, in order of dimensions."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    @property
    def is_replicated(self) -> bool:
        """Every device has the whole array (of the region, where axes are manual)."""
        return (
            not self.unreduced and self.maximal is None and not any(dim.axes for dim in self.dims)
        )

    @property
    def tiles(self) -> Ints:
        """Number of blocks per dimension."""
        return tuple(dim.size for dim in self.dims)

    def shard_dims(self, dims: Sequence[int]) -> Ints:
        """Extents of one device's block. Raises ShardingError on a wrong rank."""
        self.check_rank(dims)
        return tuple(-(-n // k) for n, k in zip(dims, self.tiles))

    def check_rank(self, dims: Sequence[object]) -> None:
        if len(dims) != self.rank and self.maximal is None:
            raise ShardingError(
                f"the sharding {self} is for {self.rank} dimensions, the array has {len(dims)}:"
                f" {list(dims)}"
            )

    def tile(self, device: int) -> Ints:
        """Which block `device` holds: an index per dimension."""
        at = self.mesh.coordinates(device)
        return tuple(_index(self.mesh, at, dim.axes) for dim in self.dims)

    def with_dims(self, dims: Iterable[DimSharding]) -> Sharding:
        return replace(self, dims=tuple(dims))

    def closed(self) -> Sharding:
        """What is decided, without openness, priorities and explicitly replicated axes: equal for
        equal placements."""
        plain = tuple(DimSharding(dim.axes) for dim in self.dims)
        return (
            self
            if plain == self.dims and not self.replicated
            else replace(self, dims=plain, replicated=())
        )

    def __str__(self) -> str:
        return sharding_text(self)


def is_unreduced(value: object) -> bool:
    """Whether an array with this annotation is the sum of what devices hold."""
    return isinstance(value, Sharding) and bool(value.unreduced)


# The attribute `sharding`: of an instruction of tuple shape a tuple, nested as the shape is.
Placement = Sharding | tuple["Placement", ...]


def sharding_text(value: Placement) -> str:
    """The axis form, see sharding_text.py; a tuple of shardings in one more pair of braces."""
    if isinstance(value, tuple):
        return "{" + ", ".join(map(sharding_text, value)) + "}"
    if value.maximal is not None:
        return f"{{maximal device={value.maximal}}}"
    dims = ", ".join(_dim_text(d, value.mesh) for d in value.dims)
    parts = [f"[{dims}]"]
    mesh = value.mesh
    if mesh.devices:  # maybe not in the order of the program's
        axes = ",".join(f"'{name}'={size}" for name, size in mesh.axes)
        parts.insert(0, f"mesh[{axes}], device_ids=({','.join(map(str, mesh.devices))})")
    for name in ("replicated", "unreduced", "manual"):
        if given := getattr(value, name):
            parts.append(f"{name}={{{', '.join(axis.within(value.mesh) for axis in given)}}}")
    return "{" + ", ".join(parts) + "}"


def _dim_text(dim: DimSharding, mesh: Mesh) -> str:
    axes = [axis.within(mesh) for axis in dim.axes] + ["?"] * dim.open
    return "{" + ", ".join(axes) + "}" + (f"p{dim.priority}" if dim.priority else "")


def coordinate(mesh: Mesh, at: dict[str, int], axis: Axis) -> int:
    """Index along a (sub-)axis of the device with coordinates `at`."""
    return at[axis.name] // (mesh.axis_size(axis.name) // (axis.pre * axis.size)) % axis.size


def _index(mesh: Mesh, at: dict[str, int], axes: Iterable[Axis]) -> int:
    index = 0
    for axis in axes:
        index = index * axis.size + coordinate(mesh, at, axis)
    return index


@lru_cache(1024)
def _groups(mesh: Mesh, axes: tuple[Axis, ...]) -> tuple[Ints, ...]:
    found: dict[Ints, list[tuple[int, int]]] = {}
    rest = complement(mesh, axes)
    for device in range(mesh.size):
        at = mesh.coordinates(device)
        found.setdefault(tuple(coordinate(mesh, at, a) for a in rest), []).append(
            (_index(mesh, at, axes), device)
        )
    return tuple(tuple(device for _, device in sorted(group)) for _, group in sorted(found.items()))


def complement(mesh: Mesh, axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """The (sub-)axes of the mesh that `axes` leave free, in mesh order; size-1 parts are left
    out."""
    used = sorted(axes, key=lambda a: (a.name, a.pre))
    free = []
    for name, size in mesh.axes:
        begin = 1
        for axis in used:
            if axis.name == name:
                if axis.pre > begin:
                    free.append(Axis(name, begin, axis.pre // begin))
                begin = axis.pre * axis.size
        if begin < size:
            free.append(Axis(name, begin, size // begin))
    return tuple(free)


def simplify(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """`axes` with neighbours that continue each other (x:(1)2, x:(2)4) joined, and those of size 1
    left out."""
    joined: list[Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        if joined and (last := joined[-1]).name == axis.name and last.pre * last.size == axis.pre:
            joined[-1] = Axis(axis.name, last.pre, last.size * axis.size)
        else:
            joined.append(axis)
    return tuple(joined)


# Blocks of arrays


def shard(array: np.ndarray, sharding: Sharding) -> list[np.ndarray]:
    """The block of each device, in order of device ids; blocks beyond the array's end are padded
    with zeros."""
    array = np.asarray(array)
    sharding.check_rank(array.shape)
    if sharding.unreduced:
        raise ShardingError(
            f"an array has no blocks under {sharding}: along unreduced axes they are partial sums"
        )
    if sharding.maximal is not None:
        return [array] * sharding.mesh.size
    block = sharding.shard_dims(array.shape)
    blocks: dict[Ints, np.ndarray] = {}
    result = []
    for device in range(sharding.mesh.size):
        tile = sharding.tile(device)
        if tile not in blocks:
            piece = array[tuple(slice(i * n, (i + 1) * n) for i, n in zip(tile, block))]
            missing = [(0, n - have) for n, have in zip(block, piece.shape)]
            blocks[tile] = (
                np.pad(piece, missing)
                if any(high for _, high in missing)
                else np.ascontiguousarray(piece).reshape(block)
            )
        result.append(blocks[tile])
    return result


def unshard(blocks: Sequence[np.ndarray], sharding: Sharding, dims: Sequence[int]) -> np.ndarray:
    """The whole array of extents `dims` from the blocks of all devices. Partial sums along
    unreduced axes are added."""
    sharding.check_rank(dims)
    if len(blocks) != sharding.mesh.size:
        raise ShardingError(
            f"{len(blocks)} blocks for a mesh of {sharding.mesh.size} devices ({sharding.mesh})"
        )
    if sharding.maximal is not None:
        return np.asarray(blocks[sharding.maximal])
    block = sharding.shard_dims(dims)
    whole = np.zeros([n * k for n, k in zip(block, sharding.tiles)], np.asarray(blocks[0]).dtype)
    replicas = complement(sharding.mesh, sharding.axes + sharding.unreduced)
    for device, piece in enumerate(blocks):
        at = sharding.mesh.coordinates(device)
        if any(coordinate(sharding.mesh, at, axis) for axis in replicas):
            continue  # the same content as another device's
        if np.shape(piece) != block:
            raise ShardingError(
                f"device {device} holds {np.shape(piece)}, but {sharding} of {tuple(dims)} has"
                f" blocks of {block}"
            )
        place = tuple(slice(i * n, (i + 1) * n) for i, n in zip(sharding.tile(device), block))
        if sharding.unreduced:
            whole[place] += piece
        else:
            whole[place] = piece
    return whole[tuple(slice(0, n) for n in dims)]
