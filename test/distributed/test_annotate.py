"""Meshes, partition specs and their errors; tensors with values are cut at once; pictures."""

from __future__ import annotations

import copy

import pytest
import torch

from torch_hlo import config, debug
from torch_hlo.distributed import (
    Dim,
    Mesh,
    PartitionSpec,
    ShardingError,
    clear_sharding,
    mark_sharding,
    sharding_of,
    visualize_sharding,
)
from torch_hlo.distributed.mesh import to_sharding


@pytest.fixture(autouse=True)
def eight_devices():
    with config.override(CPU_DEVICES=8):
        yield


def mesh() -> Mesh:
    return Mesh((2, 4), ("x", "y"))


@pytest.mark.parametrize(
    "spec, text",
    [
        (("x", None), "{[{x}, {}]}"),
        ((None, ("y", "x")), "{[{}, {y, x}]}"),
        ((Dim("x", open=True), Dim(open=True, priority=2)), "{[{x, ?}, {?}p2]}"),
        (("y:(2)2", "y:(1)2"), "{[{y:(2)2}, {y:(1)2}]}"),
        (PartitionSpec(None, None), "{[{}, {}]}"),
    ],
)
def test_specs(spec, text):
    assert str(to_sharding(mesh(), spec, (16, 16))) == text


def test_axes_that_propagation_must_not_use():
    assert (
        str(to_sharding(mesh(), (Dim(open=True),), (16,), replicated=("x",)))
        == "{[{?}], replicated={x}}"
    )


@pytest.mark.parametrize(
    "spec, message",
    [
        (("x", "x"), "tensor w of shape .4, 6.: axis 'x' is used twice"),
        (
            ("z", None),
            "tensor w of shape .4, 6.: mesh x=2,y=4 has no axis 'z'; its axes are x, y",
        ),
        (("x",), "tensor w of shape .4, 6. needs 2 entries"),
        (("y:(3)2", None), "y:.3.2 does not divide axis y of size 4"),
        ((3, None), "no axis name"),
    ],
)
def test_errors_name_tensor_and_axis(spec, message):
    with pytest.raises(ShardingError, match=message):
        mark_sharding(torch.zeros(4, 6).to("hlo"), mesh(), spec, name="w")


def test_a_clone_leaves_its_original_where_it_is():
    x = torch.arange(24.0).view(4, 6).to("hlo")
    plain, spread = x.clone(), mark_sharding(x.clone(), mesh(), ("x", None))
    other = mark_sharding(spread.clone(), mesh(), (None, "x"))
    assert [str(sharding_of(t)) for t in (x, plain)] == ["None", "None"]
    assert [str(sharding_of(t)) for t in (spread, other)] == ["{[{x}, {}]}", "{[{}, {x}]}"]
    assert x.equal(spread) and x.equal(other)
    assert [str(sharding_of(t)) for t in (spread, other)] == ["{[{x}, {}]}", "{[{}, {x}]}"]


def test_meshes_that_cannot_be():
    for shape, names, devices, message in (
        (
            (4, 4),
            ("x", "y"),
            None,
            "x=4,y=4 needs 16 devices, there are 8; set TORCH_HLO_CPU_DEVICES=16",
        ),
        ((4,), ("x", "y"), None, "needs 1 axis names"),
        ((2, 2), ("x", "x"), None, "axis x is given twice"),
        ((2, 2), ("x", "y"), [0, 1, 2], "has 4 devices, got 3"),
        ((2, 2), ("x", "y"), [0, 1, 2, 2], "once each"),
    ):
        with pytest.raises(ShardingError, match=message):
            Mesh(shape, names, devices)


def test_tensor_of_another_device():
    with pytest.raises(TypeError, match="tensor w of shape .4,. is on cpu"):
        mark_sharding(torch.zeros(4), mesh(), ("x",), name="w")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex128]
)
@pytest.mark.parametrize("spec", [("x", "y"), ("y", None), (None, ("x", "y")), (None, None)])
def test_values_are_cut_and_come_back(dtype, spec):
    values = torch.arange(9 * 21).reshape(9, 21).to(dtype)
    t = values.to("hlo")
    assert mark_sharding(t, mesh(), spec) is t
    assert sharding_of(t) == to_sharding(mesh(), spec, (9, 21))
    blocks = t._storage.value.data.memory.blocks
    # devices have memory of their own
    assert len(blocks) == 8 and len({b.address for b in blocks}) == 8
    assert torch.equal(t.cpu(), values)
    assert sharding_of(clear_sharding(t)) is None
    assert torch.equal(t.cpu(), values)


def test_pictures():
    t = mark_sharding(torch.zeros(4, 8).to("hlo"), Mesh((2, 2), ("x", "y")), ("x", "y"))
    assert visualize_sharding(t) == visualize_sharding("{devices=[2,2]<=[4]}")
    assert visualize_sharding(t).splitlines() == [
        "┌─────┬─────┐",
        "│  0  │  1  │",
        "├─────┼─────┤",
        "│  2  │  3  │",
        "└─────┴─────┘",
    ]
    mark_sharding(t, Mesh((2, 2), ("x", "y")), ("x", None))
    assert "│  0,1  │" in visualize_sharding(t) and "\x1b[" in visualize_sharding(t, use_color=True)
    assert (
        visualize_sharding(
            to_sharding(Mesh((2, 2), ("x", "y")), ("x", "y", None), (2, 2, 2))
        ).count("┌")
        == 1
    )


def test_annotations_inside_torch_compile():
    here, rows = mesh(), Dim("x")

    @torch.compile(backend="hlo", fullgraph=True)
    def f(a, b):
        return torch.relu(mark_sharding(a @ b, here, (rows, "y")))

    a, b = torch.randn(4, 8).to("hlo").requires_grad_(), torch.randn(8, 8).to("hlo")
    y = f(a, b)
    assert 'custom_call_target="Sharding", sharding={[{x}, {y}]}' in debug.hlo_text([y])
    y.sum().backward()
    want = (torch.relu(a @ b) > 0).float().cpu() @ b.cpu().T
    torch.testing.assert_close(a.grad.cpu(), want)
    with pytest.raises(ShardingError, match="no axis 'z'"):
        mark_sharding(a, here, ("z", None))


def test_recorded_values_are_annotated_not_evaluated():
    a = torch.randn(4, 8).to("hlo")
    h = a + 1
    assert mark_sharding(h, mesh(), ("x", None)) is h
    assert debug.hlo_text([h * 2]).count("sharding={[{x}, {}]}") == 1


def test_copies_and_in_place_writes_keep_the_sharding():
    t = mark_sharding(torch.arange(16.0).to("hlo"), Mesh((8,), ("x",)), ("x",))
    t.view(4, 4)[1].add_(100)
    assert sharding_of(copy.deepcopy(t)) == sharding_of(t)
    want = torch.arange(16.0)
    want[4:8] += 100
    assert torch.equal(t.cpu(), want) and str(sharding_of(t)) == "{[{x}]}"
    assert torch.equal(copy.deepcopy(t).mul_(2).cpu(), 2 * want) and torch.equal(t.cpu(), want)
