"""Rules of the collectives."""

from typing import Any

from ..ir import Ints, build as b, instr
from ..ir.infer import result
from ..sharding.sharding import Axis, Mesh, Sharding
from .attributes import Dense, integers
from .converter import Context, Made, rule, unpacked
from .ops import pairs


def _along_axes(c: Context, given: dict[str, Any]) -> tuple[Ints, ...]:
    """Groups along axes of a mesh, which stands there or has a name."""
    try:
        mesh = given["mesh"]
        if isinstance(mesh, dict):
            ids = integers(c.converter.s, mesh.get("device_ids") or (), c.op.position)
            mesh = Mesh(tuple((a["name"], a["size"]) for a in mesh["axes"]), ids)
        else:  # bytecode has a symbol's name
            mesh = c.converter.shardings.named[getattr(mesh, "name", mesh)]
        parts = [
            Axis(a["name"], *(a.get("sub_axis_info") or (1, mesh.axis_size(a["name"]))))
            for a in given["axes"]
        ]
        placed = Sharding(mesh, replicated=tuple(parts))  # which checks them
        return placed.mesh.groups(placed.replicated)
    except (AttributeError, KeyError, TypeError) as error:
        raise c.error(f"its groups need a mesh and axes of it: {error}") from None


def _groups(c: Context) -> tuple[Ints, ...]:
    value = c.attr("replica_groups")
    if value is None:
        return ()
    if isinstance(value, dict):
        return _along_axes(c, value)
    flat = c.ints("replica_groups")
    width = (
        value.type.shape.sizes[-1] if isinstance(value, Dense) and value.type.shape.rank == 2 else 0
    )
    if not flat or not width:
        return ()
    rows = [flat[i : i + width] for i in range(0, len(flat), width)]
    return tuple(tuple(d for d in row if d >= 0) for row in rows)  # -1 pads short groups


def _collective(c: Context) -> dict[str, Any]:
    channel = c.attr("channel_handle", "channel_id")
    handle = channel.get("handle") if isinstance(channel, dict) else channel
    flag = c.attr("use_global_device_ids")
    return dict(
        replica_groups=_groups(c),
        channel_id=handle if handle else None,
        use_global_device_ids=bool(flag),
    )


@rule("all_reduce")
def _all_reduce(c: Context) -> Made:
    return unpacked(
        instr("all-reduce", c.x, to_apply=c.region(0), **_collective(c)),
        len(c.x),
    )


@rule("all_gather")
def _all_gather(c: Context) -> Made:
    shape = result([c.shape(i) for i in range(len(c.x))])
    return unpacked(
        instr(
            "all-gather",
            c.x,
            shape,
            dimensions=(c.integer("all_gather_dim"),),
            **_collective(c),
        ),
        len(c.x),
    )


@rule("reduce_scatter")
def _reduce_scatter(c: Context) -> Made:
    return instr(
        "reduce-scatter",
        c.x,
        c.shape(),
        dimensions=(c.integer("scatter_dimension"),),
        to_apply=c.region(0),
        **_collective(c),
    )


@rule("all_to_all")
def _all_to_all(c: Context) -> Made:
    """Blocks of the split dimension are exchanged, then laid along the concatenated one."""
    split = c.integer("split_dimension")
    concat = c.integer("concat_dimension")
    count = c.integer("split_count")
    results = []
    for x in c.x:
        y = instr("all-to-all", (x,), x.shape, dimensions=(split,), **_collective(c))
        if split != concat:
            dims = list(x.dims)
            y = b.reshape(y, [*dims[:split], count, dims[split] // count, *dims[split + 1 :]])
            order = [d for d in range(len(dims) + 1) if d != split]
            order.insert(concat, split)
            dims[split] //= count
            dims[concat] *= count
            y = b.reshape(b.transpose(y, order), dims)
        results.append(y)
    return results


@rule("collective_permute")
def _collective_permute(c: Context) -> Made:
    channel = _collective(c)["channel_id"]
    return instr(
        "collective-permute",
        c.x,
        source_target_pairs=tuple(pairs(c.ints("source_target_pairs"))),
        channel_id=channel,
    )


@rule("collective_broadcast")
def _collective_broadcast(c: Context) -> Made:
    return instr(
        "collective-broadcast",
        c.x,
        replica_groups=_groups(c),
        channel_id=_collective(c)["channel_id"],
    )


@rule("partition_id", "replica_id")
def _device(c: Context) -> Made:
    return instr(c.op.name.replace("_", "-"), ())
