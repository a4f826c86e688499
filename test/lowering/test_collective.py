"""Functional collectives become HLO collectives; groups as text."""

from __future__ import annotations

import pytest
import torch

from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.lowering.core.graph import Leaf, Node, Out, lower
from torch_hlo.lowering.core.registry import LoweringError
from torch_hlo.lowering.spmd.collective import format_groups, parse_groups

functional = torch.ops._c10d_functional
GROUPS = "{{0,1},{2,3}}"


def lowered(op, dims, result, *args, dtype="f32"):
    leaf = Leaf(Shape(dtype, dims))
    node = Node(op, (leaf, *args, GROUPS), {}, (Shape(dtype, result),))
    return [
        x
        for x in lower([node], [Out(node)], [leaf]).entry.instructions()
        if x.op not in ("parameter", "tuple")
    ]


def test_groups_are_text_and_back():
    assert (
        parse_groups(GROUPS) == ((0, 1), (2, 3)) and format_groups(parse_groups(GROUPS)) == GROUPS
    )
    with pytest.raises(LoweringError, match="process group '0'.*to\\('hlo'\\)"):
        parse_groups("0")


@pytest.mark.parametrize(
    "op, dims, result, args, opcodes",
    [
        (functional.all_reduce.default, (4,), (4,), ("sum",), ["all-reduce"]),
        (
            functional.all_reduce.default,
            (4,),
            (4,),
            ("avg",),
            ["all-reduce", "constant", "broadcast", "divide"],
        ),
        (
            functional.all_gather_into_tensor.default,
            (4, 3),
            (8, 3),
            (2,),
            ["all-gather"],
        ),
        (
            functional.all_gather_into_tensor.default,
            (),
            (2,),
            (2,),
            ["reshape", "all-gather"],
        ),
        (
            functional.reduce_scatter_tensor.default,
            (4, 3),
            (2, 3),
            ("sum", 2),
            ["reduce-scatter"],
        ),
        (
            functional.all_to_all_single.default,
            (4, 3),
            (4, 3),
            ([2, 2], [2, 2]),
            ["all-to-all"],
        ),
        (functional.broadcast.default, (4,), (4,), (1,), ["collective-broadcast"]),
        (
            torch.ops._dtensor.shard_dim_alltoall.default,
            (4, 6),
            (8, 3),
            (0, 1),
            ["all-to-all", "reshape", "transpose", "reshape"],
        ),
    ],
)
def test_lowering(op, dims, result, args, opcodes):
    instructions = lowered(op, dims, result, *args)
    assert [x.op for x in instructions] == opcodes
    (collective,) = (x for x in instructions if x.get("replica_groups"))
    source_first = ((1, 0), (3, 2)) if op is functional.broadcast.default else ((0, 1), (2, 3))
    assert (collective["channel_id"], collective["replica_groups"]) == (1, source_first)


def test_booleans_are_summed_as_or():
    (x,) = lowered(functional.all_reduce.default, (4,), (4,), "sum", dtype="pred")
    assert x["to_apply"].root.op == "or"


def test_equal_collectives_stay_two():
    """Ranks may cut their graphs at different places, so each recorded collective has to run."""
    leaf = Leaf(Shape("f32", (4,)))
    nodes = [
        Node(functional.all_reduce.default, (leaf, "sum", GROUPS), {}, (leaf.shape,))
        for _ in range(2)
    ]
    module = lower(nodes, [Out(n) for n in nodes], [leaf])
    assert [x["channel_id"] for x in module.entry.instructions() if x.op == "all-reduce"] == [1, 2]
