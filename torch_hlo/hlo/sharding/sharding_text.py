"""Shardings as text: our axis form, and XLA's tile assignments.

    {[{x}, {y:(1)2, z, ?}, {}p1], replicated={w}}   # per dimension its axes; ? open; p1 priority
    {[{x}], unreduced={y}, manual={z}}
    {maximal device=3}

    {mesh['x'=2,'y'=4], [{'x'}, {?}]}               # the same in XLA's text, with its mesh
    {replicated}   {manual}   {devices=[2,1,4]<=[8] last_tile_dim_replicate}
    {devices=[2,2]0,2,1,3}   {{replicated}, {devices=[8]<=[8]}}

A tile assignment names no axes. `common_mesh` finds the coarsest mesh whose (sub-)axes express all
the tile assignments of a program, and `parse_sharding` expresses one of them on a mesh.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from torch_hlo.frozen import frozen

from ..ir.dim import Ints
from ..ir.shape import Shape
from .sharding import (
    MAX_DEVICES,
    MAX_RANK,
    Axis,
    DimSharding,
    Mesh,
    Placement,
    Sharding,
    ShardingError,
    complement,
    simplify,
)

# Our own form


def mesh_from_text(text: str) -> Mesh:
    """`x=2,y=4` or `x=2,y=4;devices=0,2,…`, as str(mesh) writes. Raises ShardingError."""
    axes, _, devices = text.partition(";devices=")
    pairs = [part.partition("=") for part in axes.split(",") if part.strip()]
    try:
        return Mesh(
            tuple((name.strip(), int(size)) for name, _, size in pairs),
            tuple(map(int, devices.split(","))) if devices else (),
        )
    except ValueError as error:
        if isinstance(error, ShardingError):
            raise
        raise ShardingError(f"bad mesh {text!r}; write x=2,y=4") from None


_TOKEN = re.compile(r"\s*(<=|'[A-Za-z_][\w.\-]*'|[A-Za-z_][\w.\-]*|\d+|[\[\]{}(),:?=])")


_METADATA = re.compile(
    r'/\*.*?\*/|\s*metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*"|\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\})*\}'
)


class _Tokens:
    """A cursor over the tokens of a sharding."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.items = []
        self.at = 0
        text = _METADATA.sub("", text)
        position = 0
        while position < len(text.rstrip()):
            found = _TOKEN.match(text, position)
            if not found:
                raise self.error()
            self.items.append(found.group(1).strip("'"))
            position = found.end()

    def error(self) -> ShardingError:
        return ShardingError(f"cannot read the sharding {self.text!r}")

    def peek(self, ahead: int = 0) -> str:
        return self.items[self.at + ahead] if self.at + ahead < len(self.items) else ""

    def next(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def accept(self, token: str) -> bool:
        if self.peek() != token:
            return False
        self.at += 1
        return True

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise self.error()

    def integer(self) -> int:
        token = self.next()
        if not token.isdigit():
            raise self.error()
        return int(token)

    def listed(self, begin: str, end: str) -> Iterator[None]:
        """Once per element of a bracketed list; the body of the loop reads the element."""
        self.expect(begin)
        while not self.accept(end):
            if not self.peek():
                raise self.error()
            yield
            self.accept(",")

    def integers(self, begin: str, end: str) -> Ints:
        return tuple(self.integer() for _ in self.listed(begin, end))


def parse_sharding(text: str, shape: Shape, mesh: Mesh) -> Placement | None:
    """A sharding in either form, of a value of `shape`, over `mesh`; None for XLA's `{unknown}`.
    Raises ShardingError."""
    tokens = _Tokens(text)
    value = _parsed(tokens, shape, mesh)
    if tokens.peek():
        raise tokens.error()
    return value


def _parsed(t: _Tokens, shape: Shape, mesh: Mesh) -> Placement | None:
    if shape.is_tuple:
        leaves = shape.arrays
        if t.peek(1) == "{" or (t.peek(1) == "}" and not shape.elements):
            given = iter(leaves)
            values = []
            for _ in t.listed("{", "}"):
                values.append(_parsed(t, next(given, Shape("token")), mesh))
            if not leaves and len(values) == 1:  # XLA gives an empty tuple one: it places nothing
                values = []
            if len(values) != len(leaves):
                raise ShardingError(
                    f"{len(values)} shardings in {t.text} for the {len(leaves)} arrays of {shape}"
                )
            return _grouped(iter(values), shape)
        start = t.at
        values = []
        for leaf in leaves or (Shape("token"),):
            t.at = start
            values.append(_parsed(t, leaf, mesh))
        return _grouped(iter(values), shape)
    if t.peek(1) == "mesh":
        return onto(_named_form(t), shape, mesh)
    if t.peek(1) == "[":
        t.expect("{")
        value = _axis_form(t, mesh)
        value.check_rank(shape.dims)
        return value
    tile = _tile_form(t)
    return None if tile is None else tile.on(mesh, shape.rank)


def _grouped(values: Iterator[Placement | None], shape: Shape) -> Placement | None:
    """Values of leaves, nested as the shape is."""
    if not shape.is_tuple:
        return next(values)
    nested: list[Any] = [_grouped(values, e) for e in shape.elements]  # None: unknown
    return tuple(nested)


def onto(value: Sharding, shape: Shape, mesh: Mesh) -> Sharding:
    """The same blocks by axes of another mesh, which may have to list its devices in another order.
    Raises ShardingError when it has none for them."""
    value.check_rank(shape.dims)
    if value.mesh.axes == mesh.axes:
        return value
    if value.maximal is not None:
        return Sharding(mesh, maximal=value.maximal)
    other = parse_sharding(to_xla(value), shape, mesh)
    assert isinstance(other, Sharding)
    dims = tuple(DimSharding(a.axes, b.open, b.priority) for a, b in zip(other.dims, value.dims))
    return replace(other, dims=dims)


def _named_form(t: _Tokens) -> Sharding:
    """`{mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)), [{'x'}, {?}]}`, on its own mesh."""
    t.expect("{")
    t.expect("mesh")
    axes = []
    for _ in t.listed("[", "]"):
        name = t.next()
        t.expect("=")
        axes.append((name, t.integer()))
    t.accept(",")
    mesh = Mesh(tuple(axes))
    if t.accept("device_ids"):
        t.expect("=")
        t.expect("(")
        mesh = Mesh(mesh.axes, _iota(t, mesh.size) if t.peek() == "[" else _numbers(t))
        t.expect(")")
        t.accept(",")
    return _axis_form(t, mesh)


def _axis_form(t: _Tokens, mesh: Mesh) -> Sharding:
    """What follows the opening brace."""

    def axis() -> Axis:
        name = t.next()
        if not t.accept(":"):
            return mesh.axis(name)
        pre = t.integers("(", ")")
        return Axis(name, pre[0] if pre else 1, t.integer())

    def dim() -> DimSharding:
        axes = []
        is_open = False
        for _ in t.listed("{", "}"):
            if t.accept("?"):
                is_open = True
            else:
                axes.append(axis())
        priority = int(t.next()[1:]) if re.fullmatch(r"p\d+", t.peek()) else 0
        return DimSharding(tuple(axes), is_open, priority)

    dims = tuple(dim() for _ in t.listed("[", "]"))
    extra: dict[str, Any] = {}
    while t.accept(","):
        key = t.next()
        if key not in ("replicated", "unreduced", "manual") or key in extra:
            raise t.error()
        t.expect("=")
        extra[key] = tuple(axis() for _ in t.listed("{", "}"))
    t.expect("}")
    return Sharding(mesh, dims, **extra)


# XLA's form


@frozen
class TileAssignment:
    """`devices[i]` is the device of tile i of an array cut into `tiles` pieces; trailing tile
    dimensions have the meanings `subgroups`.

    kind: "tiled", or "replicated", "manual", "unreduced", "maximal", which say it all (devices[0]
    is the device of "maximal")."""

    kind: str
    tiles: Ints = ()
    devices: Ints = ()
    subgroups: tuple[str, ...] = ()

    def on(self, mesh: Mesh, rank: int) -> Sharding:
        """This placement by axes of `mesh`, or of the mesh that lists the devices in the order of
        the tiles. Raises ShardingError when neither can express it."""
        if self.kind == "maximal":
            return Sharding(mesh, maximal=self.devices[0])
        if _factors(_places(self, mesh)) is None and len(self.devices) == mesh.size:
            mesh = Mesh(mesh.axes, self.devices)
        flat = Sharding.replicate(mesh, rank)
        if len(self.devices) == 1:  # of a program for one device, which now runs on several
            return flat
        if self.kind != "tiled":
            everything: dict[str, Any] = {self.kind: complement(mesh, ())}
            return flat if self.kind == "replicated" else replace(flat, **everything)
        if len(self.devices) != mesh.size:
            raise ShardingError(
                f"a sharding over {len(self.devices)} devices in a program for {mesh.size} ({mesh})"
            )
        if len(self.tiles) - len(self.subgroups) != rank:
            raise ShardingError(
                f"a sharding of {len(self.tiles) - len(self.subgroups)} dimensions on an array of"
                f" {rank}"
            )
        axes = [_axes_of(mesh, factors) for factors in _tile_factors(self, mesh)]
        extra: dict[str, Any] = {}
        for kind, found in zip(self.subgroups, axes[rank:]):
            if kind != "replicated":
                extra[kind] = extra.get(kind, ()) + found
        return Sharding(mesh, tuple(DimSharding(a) for a in axes[:rank]), **extra)


def _tile_form(t: _Tokens) -> TileAssignment | None:
    t.expect("{")
    word = t.next()
    value: TileAssignment | None
    if word == "maximal":
        t.expect("device")
        t.expect("=")
        value = TileAssignment("maximal", devices=(t.integer(),))
    elif word in ("replicated", "manual", "unreduced", "unknown"):
        value = None if word == "unknown" else TileAssignment(word)
    elif word == "devices":
        t.expect("=")
        value = _tiled(t)
    else:
        raise t.error()
    while not t.accept("}"):  # shard_as 3, shard_like 3: for propagation, no placement
        if t.next() not in ("shard_as", "shard_like"):
            raise t.error()
        t.integer()
    return value


def _iota(t: _Tokens, count: int) -> Ints:
    """`[2,4]T(1,0)`: 0, 1, … of these sizes, transposed."""
    source = t.integers("[", "]")
    order = t.integers("(", ")") if t.accept("T") else tuple(range(len(source)))
    if (
        math.prod(source) != count
        or sorted(order) != list(range(len(source)))
        or not count
        or len(source) > MAX_RANK
    ):
        raise t.error()
    return tuple(np.arange(count).reshape(source).transpose(order).ravel().tolist())


def _numbers(t: _Tokens) -> Ints:
    numbers = [t.integer()]
    while t.accept(","):
        numbers.append(t.integer())
    return tuple(numbers)


def _tiled(t: _Tokens) -> TileAssignment:
    tiles = t.integers("[", "]")
    count = math.prod(tiles)
    if count > MAX_DEVICES:
        raise t.error()
    if t.accept("<="):
        devices = _iota(t, count)
    else:
        devices = _numbers(t)
    if sorted(devices) != list(range(count)):
        raise t.error()
    subgroups: tuple[str, ...] = ()
    if t.accept("last_tile_dim_replicate"):
        subgroups = ("replicated",)
    elif t.accept("last_tile_dims"):
        t.expect("=")
        subgroups = tuple(t.next() for _ in t.listed("{", "}"))
        if len(subgroups) > len(tiles) or not set(subgroups) <= {
            "replicated",
            "manual",
            "unreduced",
        }:
            raise t.error()
    return TileAssignment("tiled", tiles, devices, subgroups)


def _factors(devices: Ints) -> list[tuple[int, int]] | None:
    """`devices` as digits: (size, stride) pairs, minor first, with devices[i] = sum of digit *
    stride; None when there are none such."""
    count = len(devices)
    done = 1
    factors = []
    array = np.array(devices)
    while done < count:
        stride = devices[done] - devices[0]
        size = 1
        while size * done < count and devices[size * done] == devices[0] + size * stride:
            size += 1
        size = math.gcd(size, count // done) if count // done % size else size
        if stride <= 0 or size < 2:
            return None
        factors.append((size, stride))
        done *= size
    rebuilt = np.zeros(1, np.int64)
    for size, stride in factors:
        rebuilt = (np.arange(size)[:, None] * stride + rebuilt).ravel()
    return factors if np.array_equal(rebuilt, array) else None


def _places(tile: TileAssignment, mesh: Mesh | None) -> Ints:
    """The positions of its devices in the mesh."""
    if mesh is None or not mesh.devices:
        return tile.devices
    position = {device: i for i, device in enumerate(mesh.devices)}
    return tuple(position[d] for d in tile.devices)


def _tile_factors(tile: TileAssignment, mesh: Mesh | None = None) -> list[list[tuple[int, int]]]:
    """For each tile dimension its (size, stride) digits of the position in the mesh, major
    first."""
    factors = _factors(_places(tile, mesh))
    if factors is None:
        raise ShardingError(
            f"the device order {list(tile.devices[:16])}{'…' if len(tile.devices) > 16 else ''} is"
            f" no reordering of the axes of a mesh{f' {mesh}' if mesh else ''}"
        )
    result: list[list[tuple[int, int]]] = []
    size = 1
    stride = 0
    rest = iter(factors)
    for extent in reversed(tile.tiles):
        found: list[tuple[int, int]] = []
        while extent > 1:
            if size == 1:
                size, stride = next(rest)
            take = math.gcd(extent, size)
            if take == 1:
                raise ShardingError(
                    f"tiles {list(tile.tiles)} over devices {list(tile.devices[:16])} cut across"
                    " the axes of every mesh"
                )
            found.append((take, stride))
            extent //= take
            size //= take
            stride *= take
        result.append(found[::-1])
    return result[::-1]


def _axes_of(mesh: Mesh, factors: Iterable[tuple[int, int]]) -> tuple[Axis, ...]:
    """(size, stride) digits, major first, as axes."""
    spans = []
    stride = 1
    for name, size in reversed(mesh.axes):
        spans.append((name, size, stride))
        stride *= size
    found: list[Axis] = []
    for size, begin in factors:
        digits: list[Axis] = []
        while size > 1:
            name, extent, unit = next((s for s in spans if s[2] <= begin < s[1] * s[2]), ("", 1, 1))
            take = math.gcd(size, extent * unit // begin)
            if (
                begin % unit
                or extent % (begin // unit)
                or take == 1
                or extent % (begin // unit * take)
            ):
                raise ShardingError(
                    f"a digit of size {size} and stride {begin} is no part of an axis of the mesh"
                    f" {mesh}"
                )
            digits.append(Axis(name, extent // (begin // unit * take), take))
            size = size // take
            begin = begin * take
        found += digits[::-1]
    return simplify(found)


def common_mesh(texts: Iterable[str], devices: int = 1) -> Mesh:
    """The coarsest mesh, with axes named a, b, c, …, on which all the given tile assignments of a
    program can be expressed.

    `devices`: the number of devices when no text says it. Raises ShardingError when there is none,
      as for `[2,3]<=[6]` next to `[3,2]<=[6]`.
    """
    found = [item for text in dict.fromkeys(texts) for item in _all_tiles(text)]
    tiles = [item for item in found if isinstance(item, TileAssignment)]
    named = [item for item in found if isinstance(item, Sharding)]
    if named and len({s.mesh for s in named}) == 1 and not any(t.kind == "tiled" for t in tiles):
        return named[0].mesh
    again = [tile for s in named for tile in _all_tiles(to_xla(s))]
    tiles += [tile for tile in again if isinstance(tile, TileAssignment)]
    counts = {len(t.devices) for t in tiles if t.kind == "tiled"}
    if len(counts | ({devices} if devices > 1 else set())) > 1:
        raise ShardingError(
            f"shardings over different numbers of devices: {sorted(counts | {devices})}"
        )
    count = next(iter(counts), devices)
    tiled = [t for t in tiles if t.kind == "tiled"]
    odd = next((t.devices for t in tiled if _factors(t.devices) is None), ())
    order = Mesh((("a", count),), odd) if odd else None  # a mesh may list its devices in any order
    cuts = {1, count}
    for tile in tiled:
        for factors in _tile_factors(tile, order):
            for size, stride in factors:
                cuts |= {stride, stride * size}
    strides = sorted(cuts)
    if any(b % a for a, b in zip(strides, strides[1:])):
        raise ShardingError(
            f"no mesh of {count} devices has axes for all the shardings of the program: they cut it"
            f" at strides {strides}"
        )
    sizes = [b // a for a, b in zip(strides, strides[1:])][::-1] or [1]
    return Mesh(tuple((_letter(i), size) for i, size in enumerate(sizes)), odd)


def _letter(i: int) -> str:
    return chr(ord("a") + i) if i < 26 else f"a{i}"


def _all_tiles(text: str) -> list[TileAssignment | Sharding]:
    """The tile assignments in a text, and the shardings that name their mesh."""
    t = _Tokens(text)

    def read() -> Iterator[TileAssignment | Sharding | None]:
        if t.peek(1) == "mesh":
            yield _named_form(t)
        elif t.peek(1) == "{":
            for _ in t.listed("{", "}"):
                yield from read()
        elif t.peek(1) in (
            "[",
            "}",
        ):  # our own form names its axes; {} is of an empty tuple
            while t.next():
                pass
        else:
            yield _tile_form(t)

    return [tile for tile in read() if tile is not None]


def to_xla(value: Placement) -> str:
    """The tile assignment; openness, priorities and axis names are lost."""
    if isinstance(value, tuple):
        return "{" + ", ".join(to_xla(v) for v in _flat(value)) + "}"
    return _to_xla(value.closed())


def _flat(value: tuple[Any, ...]) -> Iterator[Sharding]:
    for v in value:
        if type(v) is tuple:
            yield from _flat(v)
        else:
            yield v


@lru_cache(4096)
def _to_xla(value: Sharding) -> str:
    mesh = value.mesh
    if value.maximal is not None:
        return f"{{maximal device={value.maximal}}}"
    used = [axis for dim in value.dims for axis in dim.axes]
    rest = complement(mesh, (*used, *value.unreduced, *value.manual))
    groups = [
        (name, axes)
        for name, axes in (
            ("manual", value.manual),
            ("unreduced", value.unreduced),
            ("replicated", rest),
        )
        if axes
    ]
    if not used and len(groups) <= 1:
        return "{" + (groups[0][0] if groups else "replicated") + "}"
    tiles = [
        *value.tiles,
        *(math.prod(a.size for a in axes) for _, axes in groups),
    ]
    order = [*used, *(a for _, axes in groups for a in axes)]
    text = f"devices=[{','.join(map(str, tiles))}]" + _device_order(mesh, order)
    if [name for name, _ in groups] == ["replicated"]:
        text += " last_tile_dim_replicate"
    elif groups:
        text += f" last_tile_dims={{{', '.join(name for name, _ in groups)}}}"
    return "{" + text + "}"


def _device_order(mesh: Mesh, order: list[Axis]) -> str:
    """`<=[2,4]T(1,0)`: all devices, the first of the axes major; a plain list when the mesh has an
    order of its own."""
    parts = sorted(order, key=lambda a: (mesh.names.index(a.name), a.pre))
    sizes = [a.size for a in parts]
    turn = [parts.index(a) for a in order]
    if mesh.devices:
        places = np.array(mesh.devices).reshape(sizes).transpose(turn)
        return ",".join(map(str, places.ravel().tolist()))
    # Neighbours that stay neighbours are one.
    runs: list[list[int]] = []
    for i in turn:
        if runs and runs[-1][-1] + 1 == i:
            runs[-1].append(i)
        else:
            runs.append([i])
    ordered = sorted(runs)
    dims = [math.prod(sizes[i] for i in run) for run in ordered]
    text = f"<=[{','.join(map(str, dims))}]"
    return (
        text
        if runs == ordered
        else text + f"T({','.join(str(ordered.index(run)) for run in runs)})"
    )
