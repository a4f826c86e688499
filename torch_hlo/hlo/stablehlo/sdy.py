"""Shardy's operations and attributes (https://openxla.org/shardy/sdy_dialect), and XLA's `mhlo.sharding`.

Everything becomes what XLA writes in HLO: attributes `sharding`; custom calls `Sharding` for constraints; regions written per device stand
between the custom calls `SPMDFullToShardShape` and `SPMDShardToFullShape`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch_hlo.hlo.ir import Instruction, instr
from torch_hlo.hlo.shape import Shape
from torch_hlo.hlo.sharding import Axis, DimSharding, Mesh, Sharding, ShardingError
from torch_hlo.hlo.sharding_text import common_mesh, onto, parse_sharding
from torch_hlo.hlo.stablehlo.attributes import Dense, Raw
from torch_hlo.hlo.stablehlo.convert import RULES, Context, Converter, rule
from torch_hlo.hlo.stablehlo.mlir import Operation
from torch_hlo.hlo.stablehlo.sdy_syntax import COLLECTIVES

_TILED = re.compile(r'mhlo\.sharding\s*=\s*"((?:[^"\\]|\\.)*)"')
_PARTITIONS = re.compile(r"mhlo\.num_partitions\s*=\s*(\d+)")
_MESH = re.compile(r"mesh<(\[[^\]]*\](?:\s*,\s*device_ids\s*=\s*\[[^\]]*\])?)>|@([\w.$\-]+)")


class Shardings:
    """The meshes of a module, and its shardings on one mesh: the first with the most devices."""

    def __init__(self, text: str, operations: Iterable[Operation]) -> None:
        self.named = {
            str(op.attrs["sym_name"]): _mesh(_raw(op.attrs["mesh"]))
            for op in operations
            if op.name == "sdy.mesh"
        }
        meshes = [m for m in self.named.values() if isinstance(m, Mesh)]
        if not meshes:
            meshes = [
                m
                for found in _MESH.finditer(text)
                if found.group(1) and isinstance(m := _mesh(found.group(1)), Mesh)
            ]
        self.mesh: Mesh | None = max(meshes, key=lambda m: m.size, default=None)
        tiled = [t.replace('\\"', '"') for t in _TILED.findall(text)]
        partitions = int(found.group(1)) if (found := _PARTITIONS.search(text)) else 1
        if self.mesh is None and (tiled or partitions > 1):
            self.mesh = common_mesh(tiled, partitions)
        # Axes along which the operations being read are per device: shardings inside do not mention them.
        self.manual: tuple[Axis, ...] = ()

    def shardy(self, text: str, shape: Shape) -> Sharding:
        """`@mesh, [{"x"}, {?}], replicated={"y"}`. Raises ShardingError."""
        found = _MESH.match(text.strip())
        if not found:
            raise ShardingError(f"cannot read the sharding {text!r}: it begins with no mesh")
        mesh = (
            self.named.get(found.group(2), self.mesh) if found.group(2) else _mesh(found.group(1))
        )
        if isinstance(mesh, int):
            return Sharding(self.mesh, maximal=mesh)
        if found.group(2) and found.group(2) not in self.named:
            raise ShardingError(f"mesh @{found.group(2)} is not defined")
        body = text.strip()[found.end() :].strip().removeprefix(",").strip()
        value = parse_sharding("{" + body.replace('"', "") + "}", shape, mesh)
        return self._inside(onto(value, shape, self.mesh))

    def tiled(self, text: str, shape: Shape) -> Sharding | tuple | None:
        """XLA's tile assignment."""
        return parse_sharding(text.replace('\\"', '"'), shape, self.mesh)

    def _inside(self, value: Sharding) -> Sharding:
        if not self.manual:
            return value
        return Sharding(
            value.mesh, value.dims, value.replicated, value.unreduced, value.manual + self.manual
        )

    def of(self, attrs: dict, shapes: list[Shape]) -> list | None:
        """The shardings that `sdy.sharding` or `mhlo.sharding` gives to values of these shapes."""
        given = attrs.get("sdy.sharding")
        if isinstance(given, Raw):
            text = given.text.strip()
            parts = _listed(text) if text[:1] == "[" else [text]
            if len(parts) != len(shapes):
                raise ShardingError(f"{len(parts)} shardings for {len(shapes)} values: {text}")
            return [self.shardy(part, shape) for part, shape in zip(parts, shapes)]
        if isinstance(given := attrs.get("mhlo.sharding"), str):
            if len(shapes) == 1:
                return [self.tiled(given, shapes[0])]
            return list(self.tiled(given, Shape("tuple", elements=tuple(shapes))))
        return None

    def open(self, rank: int) -> Sharding:
        """Nothing said."""
        return self._inside(Sharding.replicate(self.mesh, rank, open=True))


def _raw(value) -> str:
    return value.text if isinstance(value, Raw) else str(value)


def _mesh(text: str) -> Mesh | int:
    """`["x"=2, "y"=4], device_ids=[…]`; the one device of `[], device_ids=[3]`."""
    axes = re.findall(r'"([^"]*)"\s*=\s*(\d+)', text)
    ids = re.search(r"device_ids\s*=\s*\[([\d,\s]*)\]", text)
    devices = tuple(int(d) for d in ids.group(1).split(",") if d.strip()) if ids else ()
    if not axes and len(devices) == 1:
        return devices[0]
    return Mesh(tuple((name, int(size)) for name, size in axes), devices)


def _listed(text: str) -> list[str]:
    """The shardings in `[<@mesh, […]>, <@mesh, […]>]`."""
    parts, depth, begin = [], 0, 0
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
    x: Instruction, sharding: Sharding | tuple | None, operands: Iterable[Instruction] = ()
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
    x: Instruction, sharding: Sharding, target: str = "Sharding", shape: Shape | None = None
) -> Instruction:
    return instr(
        "custom-call", (x,), shape or x.shape, custom_call_target=target, sharding=sharding
    )


@rule("sdy.sharding_constraint", "sdy.reshard", *(f"sdy.{name}" for name in COLLECTIVES.split()))
def _constraint(c: Context):
    text = c.attr("out_sharding", "sharding")
    sharding = c.converter.shardings.shardy(_raw(text), c.x[0].shape)
    return constrained(c.x[0], sharding) if c.x[0].shape.rank else c.x[0]


@rule("sdy.propagation_barrier", "sdy.data_flow_edge")
def _barrier(c: Context):
    return c.x[0]


@rule("sdy.sharding_group")
def _group(c: Context):
    return []


@rule("sdy.constant")
def _constant(c: Context):
    if not isinstance(c.attr("value"), Dense):
        raise c.error("expected dense<…>")
    return RULES["constant"](c)


@rule("sdy.named_computation")
def _named(c: Context):
    table = c.converter.shardings
    ins, outs = (
        _listed(_raw(v)) if (v := c.attr(key)) is not None else None
        for key in ("in_shardings", "out_shardings")
    )
    values = (
        c.x
        if ins is None
        else [constrained(x, table.shardy(t, x.shape)) for x, t in zip(c.x, ins, strict=True)]
    )
    results = c.converter.inner_block(c, c.op.regions[0], values)
    return (
        results
        if outs is None
        else [constrained(x, table.shardy(t, x.shape)) for x, t in zip(results, outs, strict=True)]
    )


@rule("sdy.manual_computation")
def _manual_computation(c: Context):
    table: Shardings = c.converter.shardings
    ins, outs = (
        _listed(_raw(c.attr(key, default=""))) for key in ("in_shardings", "out_shardings")
    )
    axes = tuple(
        table.mesh.axis(name)
        for name in re.findall(r'"([^"]*)"', _raw(c.attr("manual_axes", default="")))
    )
    outside = table.manual
    values = []
    for x, text, (_, t) in zip(c.x, ins, c.op.regions[0].args, strict=True):
        whole = table.shardy(text, x.shape)
        values.append(
            constrained(
                constrained(x, whole), _without(whole, axes), "SPMDFullToShardShape", t.shape
            )
        )
    table.manual = outside + axes
    results = c.converter.inner_block(c, c.op.regions[0], values)
    table.manual = outside
    made = []
    for x, text, t in zip(results, outs, c.types, strict=True):
        whole = table.shardy(text, t.shape)
        made.append(
            constrained(
                constrained(x, _without(whole, axes)), whole, "SPMDShardToFullShape", t.shape
            )
        )
    return made


def _without(whole: Sharding, axes: tuple[Axis, ...]) -> Sharding:
    """The sharding of the blocks, inside a region that is per device along `axes`."""
    names = {a.name for a in axes}
    dims = (
        DimSharding(tuple(a for a in d.axes if a.name not in names), d.open, d.priority)
        for d in whole.dims
    )
    kept = tuple(a for a in whole.replicated if a.name not in names)
    return Sharding(whole.mesh, tuple(dims), kept, whole.unreduced, whole.manual + axes)


def boundary(
    converter: Converter, function: Operation, key: str, shapes: list[Shape]
) -> list | None:
    """Shardings of the arguments (`arg_attrs`) or results (`res_attrs`) of a function; None when none is given."""
    table: Shardings = converter.shardings
    found = function.attrs.get(key)
    if not isinstance(found, list) or table.mesh is None:
        return None
    values = []
    for attrs, shape in zip(found, shapes, strict=True):
        given = table.of(attrs, [shape]) if isinstance(attrs, dict) else None
        values.append(None if given is None else given[0])
    return values if any(v is not None for v in values) else None
