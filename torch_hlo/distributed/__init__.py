"""Many devices: sharded tensors, pictures of shardings, a simulator. See docs/distributed.md.

    from torch_hlo.distributed import Mesh, mark_sharding

    mesh = Mesh((2, 4), ("data", "model"))
    mark_sharding(model.weight, mesh, ("model", None))
    mark_sharding(batch, mesh, ("data", None))
"""
from __future__ import annotations

from torch_hlo.distributed.annotate import clear_sharding, mark_sharding, sharding_of
from torch_hlo.distributed.mesh import Dim, Mesh, PartitionSpec, get_1d_mesh
from torch_hlo.distributed.visualize import visualize_sharding, visualize_tensor_sharding
from torch_hlo.hlo.sharding import Sharding, ShardingError

__all__ = [
    "Dim", "Mesh", "PartitionSpec", "Sharding", "ShardingError", "clear_sharding", "get_1d_mesh", "mark_sharding", "sharding_of",
    "visualize_sharding", "visualize_tensor_sharding",
]  # fmt: skip
