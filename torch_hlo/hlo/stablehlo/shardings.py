"""The shardings of a StableHLO module, Shardy's and XLA's, on one mesh."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..ir import Instruction, Shape, instr
from ..sharding.sharding import (
    Axis,
    Mesh,
    Placement,
    Sharding,
    ShardingError,
)
from ..sharding.sharding_text import common_mesh, onto, parse_sharding
from .attributes import Raw
from .operation import Block, Operation, walk

_MESH = re.compile(r"mesh<(\[[^\]]*\](?:\s*,\s*device_ids\s*=\s*\[[^\]]*\])?)>|@([\w.$\-]+)")
Placements = list[Placement | None]


class Annotations:
    """What a program says of its mesh outside of `sdy.mesh`."""

    def __init__(self, operations: list[Operation]) -> None:
        self.tiled: list[str] = []  # XLA's tile assignments
        self.meshes: list[str] = []  # Shardy's meshes inside of shardings
        self.partitions = 1
        for op in walk(Block(ops=operations)):
            self._note(op.attrs)

    def _note(self, attrs: dict[str, Any]) -> None:
        for key, value in attrs.items():
            if key == "mhlo.sharding" and isinstance(value, str) and value.strip():
                self.tiled.append(value)
            elif key == "mhlo.num_partitions" and isinstance(value, int):
                self.partitions = value
            elif isinstance(value, Raw) and "mesh<" in value.text:
                self.meshes.append(value.text)
            elif key in ("arg_attrs", "res_attrs") and isinstance(value, list):
                for inner in value:
                    if isinstance(inner, dict):
                        self._note(inner)


class Shardings:
    """The meshes of a module, and its shardings on one mesh: the first with the most devices."""

    def __init__(self, operations: Iterable[Operation], given: Annotations) -> None:
        self.named = {
            str(op.attrs.get("sym_name")): _mesh(raw_text(op.attrs.get("mesh")))
            for op in operations
        }
        meshes = [m for m in self.named.values() if isinstance(m, Mesh)]
        if not meshes:
            meshes = [m for text in given.meshes if isinstance(m := _mesh(text), Mesh)]
        self.mesh: Mesh | None = max(meshes, key=lambda m: m.size, default=None)
        if self.mesh is None and (given.tiled or given.partitions > 1):
            self.mesh = common_mesh(given.tiled, given.partitions)
        # Axes along which the operations being read are per device: shardings inside do not mention
        # them.
        self.manual: tuple[Axis, ...] = ()

    def shardy(self, text: str, shape: Shape) -> Sharding:
        """`@mesh, [{"x"}, {?}], replicated={"y"}`. Raises ShardingError."""
        found = _MESH.match(text.strip())
        if not found:
            raise ShardingError(f"cannot read the sharding {text!r}: it begins with no mesh")
        axes, name = found.groups()
        mesh = self.named.get(name, self.mesh) if name else _mesh(axes)
        if isinstance(mesh, int):
            return Sharding(self.mesh or Mesh(()), maximal=mesh)
        if name and name not in self.named:
            raise ShardingError(f"mesh @{name} is not defined")
        body = text.strip()[found.end() :].strip().removeprefix(",").strip()
        value = parse_sharding("{" + body.replace('"', "") + "}", shape, mesh or self.only())
        assert isinstance(value, Sharding)
        return self._inside(onto(value, shape, self.only()))

    def only(self) -> Mesh:
        """The mesh of a program that shards something."""
        if self.mesh is None:
            raise ShardingError("the program has shardings but no mesh")
        return self.mesh

    def tiled(self, text: str, shape: Shape) -> Placement | None:
        """XLA's tile assignment."""
        return parse_sharding(text.replace('\\"', '"'), shape, self.only())

    def _inside(self, value: Sharding) -> Sharding:
        return replace(value, manual=value.manual + self.manual)

    def of(self, attrs: dict[str, Any], shapes: list[Shape]) -> list[Any] | None:
        """The shardings that `sdy.sharding` or `mhlo.sharding` gives to values of these shapes."""
        given = attrs.get("sdy.sharding")
        if isinstance(given, Raw):
            text = given.text.strip()
            parts = listed(text) if text[:1] == "[" else [text]
            if not shapes and len(parts) == 1:  # where an operation without results runs
                return []
            if len(parts) != len(shapes):
                raise ShardingError(f"{len(parts)} shardings for {len(shapes)} values: {text}")
            return [self.shardy(part, shape) for part, shape in zip(parts, shapes)]
        given = attrs.get("mhlo.sharding")
        if isinstance(given, str) and given.strip():  # "" says nothing
            if len(shapes) == 1:
                return [self.tiled(given, shapes[0])]
            whole = self.tiled(given, Shape("tuple", elements=tuple(shapes)))
            return list(whole) if isinstance(whole, tuple) else None
        return None

    def open(self, rank: int) -> Sharding:
        """Nothing said."""
        return self._inside(Sharding.replicate(self.only(), rank, open=True))

    def boundary(self, function: Operation, key: str, shapes: list[Shape]) -> Placements | None:
        """Shardings of the arguments (`arg_attrs`) or results (`res_attrs`) of a function; None
        when none is given."""
        found = function.attrs.get(key)
        if not found or not isinstance(found, list) or self.mesh is None:
            return None
        if len(found) != len(shapes):
            raise ShardingError(f"{key} has {len(found)} entries for {len(shapes)} values")
        values = []
        for attrs, shape in zip(found, shapes, strict=True):
            given = self.of(attrs, [shape]) if isinstance(attrs, dict) else None
            values.append(None if given is None else given[0])
        return values if any(v is not None for v in values) else None


def raw_text(value: object) -> str:
    return value.text if isinstance(value, Raw) else str(value)


def _mesh(text: str) -> Mesh | int:
    """`["x"=2, "y"=4], device_ids=[…]`; the one device of `[], device_ids=[3]`."""
    axes = re.findall(r'"([^"]*)"\s*=\s*(\d+)', text)
    ids = re.search(r"device_ids\s*=\s*\[([\d,\s]*)\]", text)
    devices = tuple(int(d) for d in ids.group(1).split(",") if d.strip()) if ids else ()
    if not axes and len(devices) == 1:
        return devices[0]
    return Mesh(tuple((name, int(size)) for name, size in axes), devices)


def listed(text: str) -> list[str]:
    """The shardings in `[<@mesh, […]>, <@mesh, […]>]`."""
    parts = []
    depth = 0
    begin = 0
    for i, c in enumerate(text):
        if c == "<":
            if depth == 0:
                begin = i + 1
            depth += 1
        elif c == ">":
            depth -= 1
            if depth == 0:
                parts.append(text[begin:i])
    return parts


def annotated(
    x: Instruction,
    sharding: Placement | None,
    operands: Iterable[Instruction] = (),
) -> Instruction:
    """`x` with a sharding: on the instruction itself when it is new here, else by a custom call."""
    if sharding is None:
        return x
    if (
        x.op in ("parameter", "get-tuple-element")
        or x.get("sharding") is not None
        or any(x is o for o in operands)
    ):
        return constrained(x, sharding)
    return instr(x.op, x.operands, x.shape, **{**dict(x.attrs), "sharding": sharding})


def constrained(
    x: Instruction,
    sharding: Placement | None,
    target: str = "Sharding",
    shape: Shape | None = None,
) -> Instruction:
    return instr(
        "custom-call",
        (x,),
        shape or x.shape,
        custom_call_target=target,
        sharding=sharding,
    )
