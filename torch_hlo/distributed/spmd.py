"""torch_xla's names and signatures (torch_xla.distributed.spmd): programs written for it run after
a change of imports.

    import torch_hlo.distributed.spmd as xs
    mesh = xs.Mesh(np.arange(8), (2, 4), ("data", "model"))
    xs.mark_sharding(t, mesh, ("data", None))            # axes by name or number
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_hlo.device import multi_device
from torch_hlo.hlo.sharding.sharding import Sharding, ShardingError
from torch_hlo.lazy.record import HloTensor
from torch_hlo.lowering.spmd.sharding import SHARD, encode

from . import annotate, mesh
from .annotate import clear_sharding
from .mesh import get_1d_mesh, to_sharding

Spec = Sequence[Any]  # per dimension: an axis by name or number, a tuple of them, None, or a Dim


_global: mesh.Mesh | None = None


class Mesh(mesh.Mesh):
    """`device_ids` in row-major order of `mesh_shape`; axes without names are called "0", "1", …"""

    def __init__(
        self,
        device_ids: Sequence[int],
        mesh_shape: Sequence[int],
        axis_names: Sequence[str] | None = None,
    ) -> None:
        names = (
            tuple(axis_names)
            if axis_names is not None
            else tuple(f"axis{i}" for i in range(len(mesh_shape)))
        )
        super().__init__(mesh_shape, names, [int(d) for d in device_ids])

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        return tuple(self.shape.values())

    @property
    def device_ids(self) -> tuple[int, ...]:
        return self.devices


def _spec(where: mesh.Mesh, spec: Spec) -> tuple[mesh.Entry, ...]:
    """Axis numbers as names."""

    def entry(e: Any) -> Any:
        if isinstance(e, int) and not isinstance(e, bool):
            if not 0 <= e < len(where.axis_names):
                raise ShardingError(
                    f"mesh {where.hlo} has no axis number {e}; it has {len(where.axis_names)} axes"
                )
            return where.axis_names[e]
        return tuple(map(entry, e)) if isinstance(e, (tuple, list)) else e

    return tuple(map(entry, spec))


def sharding(where: mesh.Mesh, spec: Spec, dims: Sequence[int]) -> Sharding:
    """The sharding of arrays of extents `dims`. Raises ShardingError for a specification that does
    not fit."""
    return to_sharding(where, _spec(where, spec), dims)


def mark_sharding(t: Tensor, mesh: mesh.Mesh, partition_spec: Spec) -> Tensor:
    """See torch_hlo.distributed.mark_sharding."""
    return annotate.mark_sharding(t, mesh, _spec(mesh, partition_spec))


def mark_sharding_with_gradients(
    t: Tensor,
    mesh: mesh.Mesh,
    partition_spec: Spec,
) -> Tensor:
    """An annotated copy of `t` whose gradient has the same sharding."""
    annotate.begin()
    found = sharding(mesh, partition_spec, t.shape)
    noted: Tensor = SHARD(t, encode(found))
    return noted


def set_global_mesh(mesh: mesh.Mesh) -> None:
    """What `get_global_mesh` returns from now on."""
    global _global
    _global = mesh


def get_global_mesh() -> mesh.Mesh | None:
    """What `set_global_mesh` was given last; None before."""
    return _global


def num_devices() -> int:
    """Devices that a mesh can span."""
    return multi_device.device_count()


def enable_manual_sharding(
    t: Tensor,
    partition_spec: Spec,
    *,
    mesh: mesh.Mesh | None = None,
) -> Tensor:
    """The block of each device as a tensor of the block's shape: what is done to it until
    `disable_manual_sharding` each device does alone.

    Raises ShardingError for dimensions that do not divide: blocks of a program that is written per
    device have no padding."""
    return to_blocks(t, sharding(_mesh(mesh), partition_spec, t.shape))


def to_blocks(t: Tensor, found: Sharding) -> Tensor:
    """`enable_manual_sharding` with the compiler's own kind of sharding."""
    for i, (n, k) in enumerate(zip(t.shape, found.tiles)):
        if n % k:
            raise ShardingError(
                f"tensor of shape {tuple(t.shape)}: dimension {i} of size {n} does not divide into"
                f" {k} blocks along {', '.join(a.name for a in found.dims[i].axes)}, which manual"
                " sharding needs"
            )
    annotate.begin()
    block: Tensor = torch.ops.torch_hlo.to_blocks(_on_device(t), encode(found))
    return block


def disable_manual_sharding(
    t: Tensor,
    partition_spec: Spec,
    full_shape: Sequence[int],
    *,
    mesh: mesh.Mesh | None = None,
) -> Tensor:
    """The whole tensor of `full_shape` whose blocks are `t`. Raises ShardingError where they do not
    fit."""
    return from_blocks(t, sharding(_mesh(mesh), partition_spec, full_shape), full_shape)


def from_blocks(t: Tensor, found: Sharding, full_shape: Sequence[int]) -> Tensor:
    """`disable_manual_sharding` with the compiler's own kind of sharding."""
    if tuple(n * k for n, k in zip(t.shape, found.tiles)) != tuple(full_shape):
        raise ShardingError(
            f"blocks of shape {tuple(t.shape)} do not make a tensor of shape {tuple(full_shape)}"
            f" under {found}"
        )
    note = encode(found)
    dims = list(full_shape)
    whole: Tensor = torch.ops.torch_hlo.from_blocks(_on_device(t), note, dims)
    return whole


def _mesh(given: mesh.Mesh | None) -> mesh.Mesh:
    found = given or get_global_mesh()
    if found is None:
        raise ShardingError("no mesh given, and set_global_mesh was not called")
    return found


def _on_device(t: Tensor) -> Tensor:
    if not isinstance(t, HloTensor):
        raise TypeError(
            f"the tensor of shape {tuple(t.shape)} is on {t.device}, move it with .to('hlo') first"
        )
    return t


__all__ = [
    "Mesh",
    "clear_sharding",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "num_devices",
    "set_global_mesh",
]
