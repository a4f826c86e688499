"""torch_xla's names: axes by number, global mesh, regions written per device."""

from __future__ import annotations

import pytest
import torch

import torch_hlo.distributed.spmd as xs
from torch_hlo import config
from torch_hlo.distributed import ShardingError, sharding_of


@pytest.fixture(autouse=True)
def eight_devices():
    with config.override(CPU_DEVICES=8):
        yield


def test_meshes_and_numbers():
    mesh = xs.Mesh([7, 6, 5, 4, 3, 2, 1, 0], (2, 4))
    assert (mesh.mesh_shape, mesh.device_ids[:2], mesh.axis_names) == (
        (2, 4),
        (7, 6),
        ("axis0", "axis1"),
    )
    values = torch.arange(32.0).reshape(4, 8)
    t = xs.mark_sharding(values.to("hlo"), mesh, (1, 0))
    order = "mesh['axis0'=2,'axis1'=4], device_ids=(7,6,5,4,3,2,1,0)"
    assert str(sharding_of(t)) == f"{{{order}, [{{axis1}}, {{axis0}}]}}"
    assert torch.equal((t * 2).cpu(), values * 2)
    with pytest.raises(ShardingError, match="no axis number 2"):
        xs.mark_sharding(t, mesh, (2, None))
    xs.set_global_mesh(mesh)
    assert xs.get_global_mesh() is mesh and xs.num_devices() == 8
    assert xs.get_1d_mesh("x").size == 8


def test_gradients_have_the_sharding():
    mesh = xs.Mesh(range(8), (8,), ("x",))
    t = torch.randn(8, 4).to("hlo").requires_grad_()
    (xs.mark_sharding_with_gradients(t, mesh, ("x", None)) * 3).sum().backward()
    assert t.grad.tolist() == torch.full((8, 4), 3.0).tolist()


def test_regions_written_per_device():
    mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
    values = torch.arange(64.0).reshape(8, 8)
    block = xs.enable_manual_sharding(values.to("hlo"), ("x", "y"), mesh=mesh)
    assert block.shape == (4, 2)
    block = block - block.sum()  # of the block
    whole = xs.disable_manual_sharding(block, ("x", "y"), (8, 8), mesh=mesh)
    want = values.clone()
    for i in range(2):
        for j in range(4):
            part = want[4 * i : 4 * i + 4, 2 * j : 2 * j + 2]
            part -= part.sum()
    assert torch.equal(whole.cpu(), want)
    with pytest.raises(
        ShardingError,
        match="dimension 0 of size 6 does not divide into 4 blocks along y",
    ):
        xs.enable_manual_sharding(torch.zeros(6, 8).to("hlo"), ("y", None), mesh=mesh)
    with pytest.raises(ShardingError, match="do not make a tensor of shape"):
        xs.disable_manual_sharding(block, ("x", "y"), (8, 16), mesh=mesh)
