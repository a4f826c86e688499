"""Meshes, shardings, their two text forms, and blocks of arrays."""

import itertools

import numpy as np
import pytest

from test.support import hlo
from torch_hlo.hlo.ir.shape import Shape, tuple_shape
from torch_hlo.hlo.sharding.sharding import (
    Axis,
    DimSharding,
    Mesh,
    Sharding,
    ShardingError,
    complement,
    shard,
    simplify,
    unshard,
)
from torch_hlo.hlo.sharding.sharding_text import (
    common_mesh,
    mesh_from_text,
    parse_sharding,
    to_xla,
)
from torch_hlo.hlo.text.parser import ParseError, parse_module
from torch_hlo.hlo.text.printer import module_text


def from_xla(text, shape, mesh=None):
    """`parse_sharding` over `mesh`, or over the coarsest mesh that fits."""
    return parse_sharding(text, shape, mesh if mesh is not None else common_mesh([text]))


MESH = Mesh((("x", 2), ("y", 4)))
CUBE = Mesh((("a", 2), ("b", 2), ("c", 2)))


def spec(*entries, mesh=MESH) -> Sharding:
    return Sharding.of(mesh, entries)


def test_mesh():
    assert (MESH.size, MESH.axis_size("y"), MESH.coordinates(5)) == (
        8,
        4,
        {"x": 1, "y": 1},
    )
    assert Mesh((("x", 2),), (1, 0)).coordinates(1) == {"x": 0}
    assert Mesh((("x", 2),), (0, 1)).devices == ()
    for mesh in (MESH, CUBE, Mesh((("x", 4),), (0, 3, 2, 1))):
        assert mesh_from_text(str(mesh)) == mesh


def test_groups_follow_the_order_of_axes():
    x, y = MESH.axis("x"), MESH.axis("y")
    assert MESH.groups((y,)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert MESH.groups((x,)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert MESH.groups((y, x)) == ((0, 4, 1, 5, 2, 6, 3, 7),)
    assert MESH.groups((Axis("y", 1, 2),)) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert MESH.groups((Axis("y", 2, 2),)) == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_axis_algebra():
    major, minor = Axis("y", 1, 2), Axis("y", 2, 2)
    assert complement(MESH, (minor,)) == (MESH.axis("x"), major)
    assert complement(MESH, (MESH.axis("x"),)) == (MESH.axis("y"),)
    assert simplify((major, minor)) == (MESH.axis("y"),)
    assert simplify((minor, major)) == (minor, major)
    assert not major.overlaps(minor) and major.overlaps(MESH.axis("y"))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: spec("x", "x"), "axis x is used twice"),
        (lambda: spec("z"), "no axis 'z'"),
        (
            lambda: Sharding(MESH, (DimSharding((Axis("y", 1, 3),)),)),
            "no part of axis y of size 4",
        ),
        (
            lambda: Sharding(
                MESH, (DimSharding((Axis("y", 1, 2),)),), replicated=(MESH.axis("y"),)
            ),
            "axis y is used twice",
        ),
        (lambda: spec("x").shard_dims((4, 4)), "for 1 dimensions, the array has 2"),
        (lambda: Mesh((("x", 2), ("x", 2))), "axis x is given twice"),
        (lambda: Mesh((("x", 2),), (0, 2)), "devices 0 to 1 once each"),
        (lambda: Mesh((("x", 0),)), "sizes are positive"),
        (
            lambda: parse_sharding("{devices=[8]<=[8] last_tile_dims={manual", Shape("f32"), MESH),
            "cannot read",
        ),
    ],
)
def test_errors(make, message):
    with pytest.raises(ShardingError, match=message):
        make()


def all_shardings(mesh: Mesh, rank: int):
    """Every way to deal the mesh's axes, in every order, to `rank` dimensions or to none."""
    for order in itertools.permutations(mesh.names):
        for homes in itertools.product(range(rank + 1), repeat=len(order)):
            yield Sharding.of(
                mesh,
                [tuple(n for n, home in zip(order, homes) if home == d) for d in range(rank)],
            )


@pytest.mark.parametrize("mesh", [MESH, CUBE, Mesh((("x", 2), ("y", 2)), (0, 3, 1, 2))], ids=str)
def test_both_texts_read_back(mesh):
    shape = Shape("f32", (8, 8))
    for s in all_shardings(mesh, 2):
        assert parse_sharding(str(s), shape, mesh) == s
        assert parse_sharding(to_xla(s), shape, mesh) == s
        if not mesh.devices:
            other = from_xla(to_xla(s), shape)  # on the coarsest mesh: other axes, the same blocks
            assert other.mesh.size in (1, mesh.size)
            if other.mesh.size > 1:
                assert [other.tile(d) for d in range(mesh.size)] == [
                    s.tile(d) for d in range(mesh.size)
                ]


@pytest.mark.parametrize(
    "text",
    [
        "{[{x, ?}, {y:(2)2}p1, {?}], replicated={y:(1)2}}",
        "{[{}, {}], unreduced={x}}",
        "{[{y}], manual={x}}",
        "{maximal device=3}",
        "{[]}",
    ],
)
def test_axis_form(text):
    rank = text.partition("]")[0].count("{") - 1
    value = parse_sharding(text, Shape("f32", (4,) * rank), MESH)
    assert str(value) == text


@pytest.mark.parametrize(
    "text, want",
    [
        ("{devices=[2,1,4]<=[8] last_tile_dim_replicate}", "{[{x}, {}]}"),
        ("{devices=[4,2]<=[2,4]T(1,0)}", "{[{y}, {x}]}"),
        ("{devices=[2,4]0,1,2,3,4,5,6,7}", "{[{x}, {y}]}"),
        (
            "{devices=[1,2,4]0,4,1,5,2,6,3,7 last_tile_dim_replicate}",
            "{[{}, {y:(1)2}]}",
        ),
        (
            "{devices=[2,1,2,2]<=[8] last_tile_dims={manual, replicated}}",
            "{[{x}, {}], manual={y:(1)2}}",
        ),
        (
            '{devices=[8,1]<=[8] metadata={op_name="a/b}c" source_line=3}}',
            "{[{x, y}, {}]}",
        ),
        ("{replicated}", "{[{}, {}]}"),
        ("{manual}", "{[{}, {}], manual={x, y}}"),
        ("{maximal device=2}", "{maximal device=2}"),
        ("{devices=[1,1]0}", "{[{}, {}]}"),  # in a program for one device
    ],
)
def test_tile_assignments(text, want):
    assert str(from_xla(text, Shape("f32", (8, 8)), MESH)) == want


def test_tuples():
    shape = tuple_shape(Shape("f32", (8,)), Shape("f32"))
    value = from_xla("{{devices=[8]<=[8]}, {replicated}}", shape, MESH)
    assert (
        value == (spec(("x", "y")), spec())
        and to_xla(value) == "{{devices=[8]<=[8]}, {replicated}}"
    )
    assert from_xla("{replicated}", shape, MESH) == (spec(None), spec())
    with pytest.raises(ShardingError, match="1 shardings"):
        from_xla("{{replicated}}", shape, MESH)


def test_common_mesh():
    assert common_mesh(["{devices=[2,4]<=[8]}", "{devices=[4,2]<=[8]}"]) == Mesh(
        (("a", 2), ("b", 2), ("c", 2))
    )
    assert common_mesh(["{replicated}"], 8) == Mesh((("a", 8),))
    assert common_mesh(["{devices=[4]0,2,3,1}"]).devices == (0, 2, 3, 1)
    for texts, message in (
        (["{devices=[2,3]<=[6]}", "{devices=[3,2]<=[6]}"], "no mesh of 6 devices"),
        (["{devices=[2]<=[2]}", "{devices=[4]<=[4]}"], "different numbers of devices"),
        (["{devices=[4]0,2,3,1}", "{devices=[4]0,1,3,2}"], "no reordering"),
        (["{devices=[2,2]<=[8]}"], "cannot read"),
    ):
        with pytest.raises(ShardingError, match=message):
            common_mesh(texts)


def test_devices_in_an_order_of_their_own():
    odd = parse_sharding("{devices=[4,2]0,3,1,2,4,5,6,7}", Shape("f32", (8, 8)), MESH)
    assert odd.mesh == Mesh(MESH.axes, (0, 3, 1, 2, 4, 5, 6, 7))
    for text in (str(odd), to_xla(odd)):
        again = parse_sharding(text, Shape("f32", (8, 8)), MESH)
        assert again == odd and again.tile(3) == (0, 1)


@pytest.mark.parametrize("dims", [(8, 8), (5, 3), (1, 9)])
def test_blocks(dims):
    array = np.arange(np.prod(dims)).reshape(dims)
    for s in all_shardings(CUBE, 2):
        blocks = shard(array, s)
        assert {b.shape for b in blocks} == {s.shard_dims(dims)}
        np.testing.assert_array_equal(unshard(blocks, s, dims), array)


def test_blocks_of_partial_sums():
    s = Sharding(MESH, (DimSharding((MESH.axis("x"),)),), unreduced=(MESH.axis("y"),))
    np.testing.assert_array_equal(
        unshard([np.full(2, d) for d in range(8)], s, (4,)), [6, 6, 22, 22]
    )
    with pytest.raises(ShardingError, match="partial sums"):
        shard(np.ones(4), s)


PROGRAM = """\
HloModule m, entry_computation_layout={(f32[8,4]{1,0})->(f32[8,4]{1,0}, f32[])}, num_partitions=8, \
frontend_attributes={mesh="x=2,y=4"}

ENTRY %main (parameter.0: f32[8,4]) -> (f32[8,4], f32[]) {
  %parameter.0 = f32[8,4] parameter(0), sharding={[{x, ?}, {}p1]}
  %constant.1 = f32[] constant(1), sharding={[]}
  ROOT %tuple.2 = (f32[8,4], f32[]) tuple(%parameter.0, %constant.1), sharding={{[{x}, {y}]}, {[]}}
}
"""


def test_module_text():
    module = hlo(PROGRAM)
    assert module.mesh == MESH
    assert module_text(module) == PROGRAM
    xla = module_text(module, style="xla")
    assert (
        "sharding={devices=[2,1,4]<=[8] last_tile_dim_replicate}" in xla
        and "sharding={{devices=[2,4]<=[8]}, {replicated}}" in xla
    )
    assert parse_module(xla).entry.root["sharding"][0] == spec("x", "y")


def test_mesh_of_xlas_text():
    module = hlo("""
        HloModule m, num_partitions=8
        ENTRY main {
          p = f32[8,4] parameter(0), sharding={devices=[8,1]<=[8]}
          ROOT r = f32[8,4] negate(p), sharding={devices=[2,1,4]<=[8] last_tile_dim_replicate}
        }""")
    assert (
        str(module.mesh) == "a=2,b=4"
        and str(module.entry.params[0]["sharding"]) == "{[{a, b}, {}]}"
    )


def test_per_device_module():
    text = """\
HloModule m, entry_computation_layout={(f32[4]{0})->f32[4]{0}}, num_partitions=8, \
frontend_attributes={mesh="x=2,y=4",in_shardings="{{[{x}]}}",out_shardings="{{[{}]}}"}

ENTRY %main (parameter.0: f32[4]) -> f32[4] {
  %parameter.0 = f32[4] parameter(0)
  ROOT %negate.1 = f32[4] negate(%parameter.0)
}
"""
    module = hlo(text)
    assert (module.num_partitions, module.in_shardings, module.out_shardings) == (
        8,
        (spec("x"),),
        (spec(None),),
    )
    assert module_text(module) == text


@pytest.mark.parametrize(
    "sharding, message",
    [
        ("{devices=[2,2]<=[4]}", "different numbers of devices"),
        ("{[{q}]}", "no axis 'q'"),
        ("{nonsense}", "cannot read"),
        ("{devices=[8]<=[8]}", "on an array of 2"),
    ],
)
def test_bad_text(sharding, message):
    with pytest.raises(ParseError, match=message):
        parse_module(
            "HloModule m, num_partitions=8\nENTRY main { ROOT p = f32[8,4] parameter(0),"
            f" sharding={sharding} }}"
        )


@pytest.mark.parametrize(
    "text, groups",
    [
        ("mesh['a'=2,'b'=4] {'b'}", MESH.groups((MESH.axis("y"),))),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", MESH.groups((Axis("y", 2, 2),))),
        (
            "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}",
            MESH.groups((MESH.axis("y"),)),
        ),
    ],
)
def test_replica_groups_along_axes(text, groups):
    root = parse_module(
        f"p = f32[8,4] parameter(0)\nROOT r = f32[8,4] all-reduce(p), replica_groups={text},"
        " to_apply=f\nf { a = f32[] parameter(0)\nb = f32[] parameter(1)\nROOT c = f32[] add(a,"
        " b) }"
    ).entry.root
    assert root["replica_groups"] == groups


@pytest.mark.parametrize(
    "allowed, want",
    [("", "{[{}]}"), (", allow_spmd_sharding_propagation_to_output={true}", "{[{?}]}")],
)
def test_outputs_that_propagation_may_place(allowed, want):
    module = parse_module(
        f"HloModule m{allowed}, num_partitions=8\nENTRY main {{ p = f32[8] parameter(0),"
        " sharding={devices=[8]<=[8]}\nROOT t = (f32[8]) tuple(p),"
        " sharding={{replicated}} }"
    )
    assert str(module.entry.root["sharding"][0]) == want


@pytest.mark.parametrize(
    "text, want",
    [
        ("{mesh['x'=2,'y'=4], [{'x'}, {'y'}]}", "{[{x}, {y}]}"),
        (
            "{mesh['x'=2,'y'=4], [{'x', ?}, {'y':(1)2}], replicated={'y':(2)2}}",
            "{[{x, ?}, {y:(1)2}], replicated={y:(2)2}}",
        ),
        (
            "{mesh['b'=4,'a'=2], device_ids=([2,4]T(1,0)), [{'b'}, {'a', ?}]}",
            "{[{y}, {x, ?}]}",
        ),
        ("{mesh['q'=8] [{'q'}, {}]}", "{[{x, y}, {}]}"),
    ],
)
def test_shardings_that_name_their_mesh(text, want):
    assert str(parse_sharding(text, Shape("f32", (8, 8)), MESH)) == want


def test_mesh_of_shardings_that_name_it():
    assert common_mesh(["{mesh['x'=2,'y'=4], [{'x'}]}", "{replicated}"]) == MESH
    assert str(common_mesh(["{mesh['x'=2,'y'=4], [{'x'}]}", "{mesh['z'=8], [{'z'}]}"])) == "a=2,b=4"
    assert (
        str(common_mesh(["{{mesh['x'=2,'y'=4], [{'x'}]}, {devices=[4,2]<=[8]}}"])) == "a=2,b=2,c=2"
    )
