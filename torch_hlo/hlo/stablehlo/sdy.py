"""Shardy's operations and attributes (https://openxla.org/shardy/sdy_dialect), and XLA's
`mhlo.sharding`.

Everything becomes what XLA writes in HLO: attributes `sharding`; custom calls `Sharding` for
constraints; regions written per device stand between the custom calls `SPMDFullToShardShape` and
`SPMDShardToFullShape`."""

import re

from ..ir import Instruction, build as b
from ..sharding.sharding import (
    Axis,
    DimSharding,
    Sharding,
    ShardingError,
    complement,
    is_unreduced,
)
from .attributes import Dense
from .converter import RULES, Context, Made, rule
from .sdy_syntax import COLLECTIVES
from .shardings import Shardings, constrained, listed, raw_text


@rule("sdy.sharding_constraint", "sdy.reshard", *(f"sdy.{name}" for name in COLLECTIVES.split()))
def _constraint(c: Context) -> Made:
    text = c.attr("out_sharding", "sharding")
    sharding = c.converter.shardings.shardy(raw_text(text), c.x[0].shape)
    sums = sharding.unreduced or is_unreduced(c.x[0].get("sharding"))
    return constrained(c.x[0], sharding) if c.x[0].rank or sums else c.x[0]


@rule("sdy.propagation_barrier", "sdy.data_flow_edge")
def _barrier(c: Context) -> Made:
    return c.x[0]


@rule("sdy.sharding_group")
def _group(c: Context) -> Made:
    """Members of a group lie alike: from here on each is a choice between two, always itself."""
    ((name, index),) = c.op.operands
    _, values = c.scope.find(name) or (None, [])
    place = values, index
    first, at = c.converter.groups.setdefault(c.integer("group_id"), place)
    if (first, at) != place:
        x = first[at]
        y = values[index]
        first[at], values[index] = _alike(x, y), _alike(y, x)
    return []


def _alike(x: Instruction, y: Instruction) -> Instruction:
    always = b.broadcast(b.constant(True, "pred"), x.dims)
    return b.select(always, x, b.convert(y, x.dtype))


@rule("sdy.constant")
def _constant(c: Context) -> Made:
    if not isinstance(c.attr("value"), Dense):
        raise c.error("expected dense<…>")
    return RULES["constant"](c)


@rule("sdy.named_computation")
def _named(c: Context) -> Made:
    table = c.converter.shardings

    def placed(values: list[Instruction], key: str) -> list[Instruction]:
        if (text := c.attr(key)) is None:
            return values
        pairs = zip(values, listed(raw_text(text)), strict=True)
        return [constrained(x, table.shardy(t, x.shape)) for x, t in pairs]

    values = placed(c.x, "in_shardings")
    return placed(c.converter.inner_block(c, c.op.regions[0], values), "out_shardings")


@rule("sdy.manual_computation")
def _manual_computation(c: Context) -> Made:
    table: Shardings = c.converter.shardings
    ins, outs = (
        listed(raw_text(c.attr(key, default=""))) for key in ("in_shardings", "out_shardings")
    )
    axes = tuple(
        table.only().axis(name)
        for name in re.findall(r'"([^"]*)"', raw_text(c.attr("manual_axes", default="")))
    )
    outside = table.manual
    values = []
    for x, text, (_, t) in zip(c.x, ins, c.op.regions[0].args, strict=True):
        whole = table.shardy(text, x.shape)
        if whole.mesh != table.only() and complement(whole.mesh, axes):
            raise ShardingError(
                f"a region that is manual over some axes of {table.only()} cannot take {whole}:"
                " list the devices of both meshes in one order"
            )
        values.append(
            constrained(
                constrained(x, whole),
                _without(whole, axes),
                "SPMDFullToShardShape",
                t.shape,
            )
        )
    table.manual = outside + axes
    results = c.converter.inner_block(c, c.op.regions[0], values)
    table.manual = outside
    if not c.types:
        return results
    made = []
    for x, text, t in zip(results, outs, c.types, strict=True):
        whole = table.shardy(text, t.shape)
        made.append(
            constrained(
                constrained(x, _without(whole, axes)),
                whole,
                "SPMDShardToFullShape",
                t.shape,
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
    kept, sums = (
        tuple(a for a in given if a.name not in names)
        for given in (whole.replicated, whole.unreduced)
    )
    return Sharding(whole.mesh, tuple(dims), kept, sums, whole.manual + axes)
