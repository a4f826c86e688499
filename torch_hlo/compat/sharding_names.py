"""torch_xla.distributed.spmd: meshes with methods, specifications, blocks of tensors."""

import ast
import collections
import enum
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DeviceMesh, Replicate, Shard

from torch_hlo import debug
from torch_hlo.distributed import annotate, spmd, visualize
from torch_hlo.lazy.record import HloTensor, to_cpu
from torch_hlo.pytorch import tensors

from . import experimental_names, hardware


class ShardingType(enum.IntEnum):
    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


class Mesh:
    """All devices as an array. `shape()` and `size()` are methods, as in PyTorch/XLA; `ours` is the
    mesh of torch_hlo.distributed."""

    def __init__(
        self,
        device_ids,
        mesh_shape,
        axis_names=None,
    ):
        ids = np.asarray(device_ids)
        count = hardware.global_runtime_device_count()
        assert ids.size == count, (
            f"Number of device IDs ({ids.size}) must match the global number of devices ({count})"
        )
        assert ids.size == np.prod(mesh_shape), (
            f"Number of device IDs ({ids.size}) must match mesh size ({np.prod(mesh_shape)})"
        )
        if axis_names is not None:
            assert len(axis_names) == len(mesh_shape), (
                f"Number of axis names ({len(axis_names)}) must match mesh dimensions"
                f" ({len(mesh_shape)})"
            )
            assert len(set(axis_names)) == len(axis_names), (
                f"Axis names must be unique, got: {axis_names}"
            )
        assert len(np.unique(ids)) == ids.size, f"Device IDs must be unique, got: {ids}"
        assert (ids < ids.size).all(), f"Device IDs must be less than mesh size, got: {ids}"
        self.device_ids = ids
        self.mesh_shape = tuple(mesh_shape)
        self.axis_names = axis_names
        self.ours = spmd.Mesh(ids.ravel().tolist(), self.mesh_shape, axis_names)

    def size(self):
        return int(np.prod(self.mesh_shape))

    def shape(self):
        names = self.axis_names or range(len(self.mesh_shape))
        return collections.OrderedDict(zip(names, self.mesh_shape))

    def get_logical_mesh(self):
        return self.device_ids.reshape(self.mesh_shape)

    def get_axis_name_idx(self, name):
        names = self.axis_names or ()
        return names.index(name) if name in names else None

    def get_op_sharding(self, partition_spec):
        """The sharding of tensors with these entries."""
        dims = [self.size()] * len(partition_spec)
        return spmd.sharding(self.ours, tuple(partition_spec), dims)

    def __str__(self):
        ids, names = self.device_ids.tolist(), self.axis_names
        return str({"device_ids": ids, "mesh_shape": self.mesh_shape, "axis_names": names})

    def __eq__(self, other):
        return isinstance(other, Mesh) and self.ours == other.ours

    def __hash__(self):
        return hash(self.ours)


class HybridMesh(Mesh):
    """A mesh whose axes are products of an inner and an outer one; here all devices are near."""

    def __init__(
        self,
        *,
        ici_mesh_shape,
        dcn_mesh_shape=None,
        axis_names=None,
    ):
        if dcn_mesh_shape is not None and np.prod(dcn_mesh_shape) > 1:
            raise ValueError("Invalid dcn_mesh_shape for single slice mesh")
        devices = np.arange(hardware.global_runtime_device_count())
        super().__init__(devices, tuple(ici_mesh_shape), axis_names)


def get_1d_mesh(axis_name=None):
    count = hardware.global_runtime_device_count()
    return Mesh(np.arange(count), (count,), (axis_name,) if axis_name else None)


@dataclass
class ShardingSpec:
    """A mesh and what goes along its axes; `minibatch`: each process has its part of the batch."""

    mesh: Mesh
    partition_spec: Sequence[Any]
    minibatch: bool = False

    def can_apply(self, t):
        return t.dim() == len(self.partition_spec)

    def apply(self, t):
        count = hardware.addressable_runtime_device_count()
        if self.minibatch and t.shape[0] % count:
            raise RuntimeError(
                "When minibatch is configured, the per-host batch size must be divisible by local"
                f" runtime device count. Per host input data shape = {[*t.shape]}, {count} devices"
            )
        if self.minibatch and hardware.process_count() > 1:
            raise NotImplementedError(
                "ShardingSpec(minibatch=True): give every process the whole batch"
            )
        mark_sharding(t, self.mesh, self.partition_spec)


def mark_sharding(t, mesh, partition_spec):
    """See torch_hlo.distributed.mark_sharding."""
    assert t.dim() == len(partition_spec), (
        f"Partition spec length ({len(partition_spec)}) should be equal to the input rank"
        f" ({t.dim()})."
    )
    spec = tuple(partition_spec)
    marked = spmd.mark_sharding(t, mesh.ours, spec)
    marked.partition_spec = spec
    return marked


def _dynamo_mark_sharding(input, device_ids, mesh_shape, axis_names, partition_spec):
    """`mark_sharding` as an operator: what Dynamo cannot look into are texts."""
    if isinstance(input, HloTensor):  # not while Dynamo asks for shapes alone
        mesh = Mesh(device_ids, mesh_shape, ast.literal_eval(axis_names))
        mark_sharding(input, mesh, ast.literal_eval(partition_spec))
    return input


_library = torch.library.Library("xla", "FRAGMENT")
_library.define(
    "dynamo_mark_sharding(Tensor input, int[] device_ids, int[] mesh_shape, str axis_names,"
    " str partition_spec) -> Tensor"
)
_library.impl("dynamo_mark_sharding", _dynamo_mark_sharding, "CompositeImplicitAutograd")

annotate_custom_sharding = mark_sharding


def _mark_manual_sharding(t):
    """The tensor, which is made of blocks that `enable_manual_sharding` cut. Raises RuntimeError
    for another one."""
    nodes = debug.graph([t]).nodes if debug.is_pending(t) else ()
    if not any(n.target is torch.ops.torch_hlo.to_blocks.default for n in nodes):
        raise RuntimeError(
            f"the tensor of shape {[*t.shape]} is no block of another one: use"
            " enable_manual_sharding"
        )
    return t


def mark_sharding_with_gradients(t, mesh, partition_spec):
    return spmd.mark_sharding_with_gradients(t, mesh.ours, tuple(partition_spec))


class MarkShardingFunction:
    """`apply` is `mark_sharding_with_gradients`."""

    apply = staticmethod(mark_sharding_with_gradients)


def convert_to_xla_mesh(dt_mesh):
    """The mesh of a DeviceMesh."""
    return Mesh(dt_mesh.mesh.flatten().tolist(), tuple(dt_mesh.mesh.shape), dt_mesh.mesh_dim_names)


def convert_to_xla_partition_spec(tensor, placements):
    """What goes along each dimension, from what is done along each axis of the mesh."""
    spec = [None] * tensor.dim()
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            spec[placement.dim] = axis
        elif not placement.is_replicate():
            raise ValueError(f"Unsupported placement type: {type(placement).__name__}")
    return tuple(spec)


def xla_distribute_tensor(tensor, device_mesh, placements=None):
    """torch.distributed.tensor.distribute_tensor: the tensor, on the device and marked."""
    if tensor.device.type != "xla":
        tensor = tensor.detach().to("xla").requires_grad_(tensor.requires_grad)
    spec = convert_to_xla_partition_spec(tensor, placements or ())
    return mark_sharding(tensor, convert_to_xla_mesh(device_mesh), spec)


def xla_distribute_module(
    module, device_mesh=None, partition_fn=None, input_fn=None, output_fn=None
):
    """torch.distributed.tensor.distribute_module: `partition_fn` marks the parameters."""
    for name, part in module.named_modules() if partition_fn else ():
        partition_fn(name, part, device_mesh)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda m, inputs: input_fn(m, inputs, device_mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda m, _, outputs: output_fn(m, outputs, device_mesh))
    return module


def enable_manual_sharding(t, partition_spec, *, mesh=None):
    return spmd.enable_manual_sharding(t, partition_spec, mesh=(mesh or get_global_mesh()).ours)


def disable_manual_sharding(t, partition_spec, full_shape, *, mesh=None):
    where = (mesh or get_global_mesh()).ours
    return spmd.disable_manual_sharding(t, partition_spec, full_shape, mesh=where)


def clear_sharding(t):
    return annotate.clear_sharding(t)


def wrap_as_sharded_tensor(t, mesh_shape=None, partition_spec=None):
    """The tensor, marked if there is a shape."""
    if mesh_shape is not None:
        mark_sharding(t, Mesh(np.arange(np.prod(mesh_shape)), mesh_shape), partition_spec)
    return t


def wrap_if_sharded(x):
    """The tensor: it knows its shards itself."""
    return x


unwrap_sharded_tensor = wrap_if_sharded


def placement(t):
    """Where a tensor is to live, also after it has been computed."""
    return annotate.sharding_of(t) or t._storage.sharding


def sharding_text(t):
    """XLA's text of a tensor's sharding, with every device named; "" for one that has none."""
    found = placement(t)
    if found is None:
        return ""
    if found.mesh.size == 1:
        return "{maximal device=0}"
    if found.is_replicated:
        return "{replicated}"
    holders = sorted(range(found.mesh.size), key=lambda d: (found.tile(d), d))
    tiles = list(found.tiles)
    copies = found.mesh.size // int(np.prod(found.tiles))
    if copies > 1:
        tiles.append(copies)
    text = f"devices=[{','.join(map(str, tiles))}]{','.join(map(str, holders))}"
    return "{" + text + (" last_tile_dim_replicate}" if copies > 1 else "}")


def placements(t):
    """What is done along each axis of the mesh, in words of DTensor. Raises AttributeError for a
    tensor that is not sharded."""
    found = placement(t)
    if found is None:
        raise AttributeError("placements: the tensor has no sharding; use mark_sharding")
    dims = {axis.name: Shard(d) for d, dim in enumerate(found.dims) for axis in dim.axes}
    return tuple(dims.get(name, Replicate()) for name in found.mesh.names)


def mesh_shape(t):
    return tuple(size for _, size in placement(t).mesh.axes) if placement(t) else None


def dtensor_spec(t):
    """What DTensor's `_spec` is. Raises AttributeError for a tensor that is not sharded."""
    done = placements(t)
    ids = placement(t).mesh.devices or range(placement(t).mesh.size)
    mesh = DeviceMesh("xla", np.reshape(ids, mesh_shape(t)).tolist())
    return tensors.dtensor_spec(mesh, done, t.shape, t.stride(), t.dtype)


def sharding_type(t):
    found = placement(t)
    if found is None:
        return None
    if found.mesh.size == 1:
        return ShardingType.MAXIMAL
    if found.is_replicated:
        return ShardingType.REPLICATED
    whole = np.prod(found.tiles) == found.mesh.size
    return ShardingType.TILED if whole else ShardingType.PARTIAL


@dataclass
class XLAShard:
    """A block of a tensor: its values on the CPU, and where they are in the tensor."""

    data: torch.Tensor
    indices: Any
    shard_device: str
    replica_id: int

    @property
    def unpadded_data(self):
        if self.indices is Ellipsis:
            return self.data
        return self.data[tuple(slice(0, s.stop - s.start) for s in self.indices)]

    @unpadded_data.setter
    def unpadded_data(self, value):
        self.unpadded_data.copy_(value)


def local_shards(t):
    """The blocks of a tensor, one per device of this process."""
    found, whole = placement(t), to_cpu([t])[0]
    if found is None or found.is_replicated:
        count = 1 if found is None else found.mesh.size
        return [XLAShard(whole, Ellipsis, f"CPU:{d}", d) for d in range(count)]
    block = found.shard_dims(tuple(t.shape))
    seen: collections.Counter[tuple[int, ...]] = collections.Counter()
    shards = []
    for device in range(found.mesh.size):
        at = found.tile(device)
        begins = [min(i * n, size) for i, n, size in zip(at, block, t.shape)]
        where = [slice(b, min(b + n, s), 1) for b, n, s in zip(begins, block, t.shape)]
        data = torch.zeros(block, dtype=t.dtype, device="cpu")
        part = whole[tuple(where)]
        data[tuple(slice(0, n) for n in part.shape)] = part
        shards.append(XLAShard(data, where, f"CPU:{device}", seen[at]))
        seen[at] += 1
    return shards


def from_shards(shards, sharding, shape=None):
    """The tensor on the CPU that has these blocks, one per device. Raises RuntimeError for others
    than `sharding` has."""
    tiles = sharding.tiles
    block, count = shards[0].shape, sharding.mesh.size
    if len(shards) != count:
        raise RuntimeError(f"expected {count} shards, one for each device, got {len(shards)}")
    if sharding.is_replicated:
        tiles = (1,) * len(block)
    whole = [n * t for n, t in zip(block, tiles)]
    shape = list(whole if shape is None else shape)
    parts = [-(-n // t) for n, t in zip(shape, tiles)]
    if len(shape) != len(tiles) or any([*s.shape] != parts for s in shards):
        found = sorted({tuple(s.shape) for s in shards})
        raise RuntimeError(f"shards of {found} do not make up {shape} in blocks {tuple(tiles)}")
    result = torch.zeros(whole, dtype=shards[0].dtype, device="cpu")
    for device, part in enumerate(shards):
        begins = [0] * len(block) if sharding.is_replicated else sharding.tile(device)
        result[tuple(slice(b * n, b * n + n) for b, n in zip(begins, block))] = part
    return result[tuple(map(slice, shape))]


def global_tensor_from_cpu_shards(shards, sharding, global_shape=None):
    """A tensor of the device from its blocks on the CPU."""
    tensor = from_shards(shards, sharding, global_shape).to("hlo")
    if not sharding.is_replicated:
        annotate.annotate(tensor, sharding)
    return tensor


def load_local_shards_(self, shards):
    """Take the values of these blocks."""
    found = placement(self)
    if found is None or found.is_replicated:
        raise RuntimeError("load_local_shards_: the tensor is not sharded")
    self.copy_(from_shards([s.data for s in shards], found, self.shape))


def redistribute(self, device_mesh, placements, *, async_op=False):
    """A copy that is spread so over the mesh."""
    if len(placements) != len(device_mesh.mesh_shape):
        raise ValueError(
            f"Number of placements ({len(placements)}) must match mesh dimensions"
            f" ({len(device_mesh.mesh_shape)})"
        )
    if any(p.is_partial() for p in placements):
        raise NotImplementedError(f"Partial placement: {[*self.shape]} is whole; use Replicate")
    spec = convert_to_xla_partition_spec(self, placements)
    return mark_sharding(self.clone(), device_mesh, spec)


class _Sharded(type):
    def __instancecheck__(cls, instance):
        return isinstance(instance, HloTensor) and placement(instance) is not None


class XLAShardedTensor(metaclass=_Sharded):
    """A tensor with a sharding is one: tensors are not wrapped."""

    def __new__(cls, elem, *args, **kwargs):
        return elem


_VIEWS = {
    "global_tensor": lambda self: self,
    "local_shards": local_shards,
    "mesh_shape": mesh_shape,
    "_spec": dtensor_spec,
    "placements": placements,
    "sharding_spec": sharding_text,
    "sharding_type": sharding_type,
}


def install():
    """Give tensors the attributes of PyTorch/XLA's sharded ones."""
    for name, function in _VIEWS.items():
        setattr(HloTensor, name, property(function))
    HloTensor.load_local_shards_ = load_local_shards_
    HloTensor.redistribute = redistribute


def auto_policy(*args):
    raise NotImplementedError("choose a plan of torch_hlo.distributed with compare()")


def apply_backward_optimization_barrier(m):
    """A barrier behind the gradients of the module's parameters and inputs."""

    def barrier(module, grad_input, grad_output):
        grads = [p.grad for p in module.parameters()]
        experimental_names.optimization_barrier_(
            [g for g in (*grads, *grad_input) if g is not None]
        )

    m.register_full_backward_hook(barrier)


class XLAPatchedLinear:
    """`apply` is a linear layer that is written as one product of all its dimensions."""

    @staticmethod
    def apply(input, weight, bias=None):
        product = torch.einsum("...n,mn->...m", input, weight)
        return product if bias is None else product + bias


def xla_patched_nn_linear_forward(m, input):
    return XLAPatchedLinear.apply(input, m.weight, m.bias)


class EinsumLinear(torch.nn.Linear):
    forward = xla_patched_nn_linear_forward


def apply_xla_patch_to_nn_linear(module, patched_function=xla_patched_nn_linear_forward):
    """Give the linear layers of a module this `forward`; returns the module."""
    for m in module.modules():
        if isinstance(m, torch.nn.Linear):
            m.forward = types.MethodType(patched_function, m)
    return module


def prime_optimizer(optimizer):
    """Make the optimizer's state, with gradients of zero."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


get_global_mesh = spmd.get_global_mesh
set_global_mesh = spmd.set_global_mesh
construct_v1_sharding_str = sharding_text
visualize_sharding = visualize.visualize_sharding
visualize_tensor_sharding = visualize.visualize_tensor_sharding
