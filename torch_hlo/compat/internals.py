"""torch_xla._XLAC: what scripts and tests take from its C++ extension."""

import hashlib

import torch

import torch_hlo
from torch_hlo import debug, metrics
from torch_hlo.distributed import spmd
from torch_hlo.hlo.text.printer import module_text
from torch_hlo.lazy.record import HloTensor, read
from torch_hlo.lowering.core import lower

from . import checkpoint_names, experimental_names, hardware, sharding_names, xla_model

_activate_preemption_sync_manager = checkpoint_names.Preemption.watch
_deactivate_preemption_sync_manager = checkpoint_names.Preemption.forget
_sync_point_reached = checkpoint_names.Preemption.sync_point_reached
_global_tensor_from_cpu_shards = sharding_names.global_tensor_from_cpu_shards
_get_executed_fallback_ops = metrics.executed_fallback_ops
_get_use_eager_mode = experimental_names.is_eager_mode
_set_use_eager_mode = experimental_names.eager_mode
_get_xla_sharding_spec = sharding_names.sharding_text
_get_xla_sharding_type = sharding_names.sharding_type
_xla_clear_sharding = sharding_names.clear_sharding
_xla_get_num_cached_compilation_graph = hardware.get_num_cached_compilation_graph
_xla_increment_counter = metrics.count
_xla_get_tensor_id = id
_xla_get_devices = _xla_real_devices = xla_model.xla_real_devices
_xla_wait_device_ops = xla_model.wait_device_ops
_xla_metrics_report = metrics.metrics_report


def _xla_get_default_device():
    return "xla:0"


def _get_git_revs():
    return {"xla": torch_hlo.__version__, "torch": str(torch.version.git_version)}


def _get_xla_tensors_hlo(tensors):
    """HLO text; of tensors that are computed, the program that returns them."""
    if any(map(debug.is_pending, tensors)):
        return module_text(debug.module(tensors), style="xla")
    leaves = [*map(read, tensors)]
    known = [*map(sharding_names.placement, tensors)]
    mesh = next((s.mesh for s in known if s is not None), None)
    found = lower([], leaves, leaves, placed=mesh and (mesh, known, known))
    return module_text(found, style="xla")


def _spmd_full_to_shard_shape(t):
    """The block of each device."""
    found = sharding_names.placement(t)
    if found is None:
        raise RuntimeError(f"the tensor of shape {[*t.shape]} has no sharding: use mark_sharding")
    return spmd.to_blocks(t, found)


def _spmd_shard_to_full_shape(t, sharding, shape, dtype=None):
    return spmd.from_blocks(t, sharding, shape)


def _unsafe_buffer_pointer(t):
    """A number of the tensor's memory; no address."""
    return t.data_ptr()


def _get_xla_tensor_shape_type(t):
    return t._meta.hlo.dtype


def _get_xla_tensor_dimension_size(t, dim):
    return torch.tensor(t.size(dim), dtype=torch.int32)


def dynamo_backend(graph, inputs):
    """The back end of torch.compile."""
    from torch_hlo import dynamo

    return dynamo.hlo(graph, inputs)


def _init_computation_client():
    """Nothing: the device is ready after import."""


_init_xla_lazy_backend = _init_computation_client


def _ensure_xla_coordinator_initialized(**options):
    """Nothing: torch.distributed joins the processes."""


def _xla_runtime_is_initialized():
    return True


def _xla_get_all_devices():
    return [f"{hardware.device_type()}:{i}" for i in range(hardware.process_count())]


def _xla_step_marker(device="", devices=(), wait=False, reset_scope=True):
    xla_model.sync(wait)


def _xla_sync_multi(tensors, devices=(), wait=True, **options):
    xla_model.unlazy(list(tensors))


def _get_local_shards(tensors):
    return [[(s.data, s.shard_device) for s in sharding_names.local_shards(t)] for t in tensors]


def _xla_get_cpu_tensors(tensors):
    return [t.cpu() for t in tensors]


def _xla_tensors_from_aten(tensors, devices):
    return [t.to(d) for t, d in zip(tensors, devices)]


def _get_graph_hash(tensors):
    """Equal for tensors that the same program computes."""
    return hashlib.blake2b(debug.hlo_text(tensors).encode(), digest_size=8).hexdigest()


def _get_xla_tensors_text(tensors):
    """What was recorded for tensors, in the form in which PyTorch/XLA prints it, without operands.
    (`torch_hlo.debug.graph` has all.)"""
    pending = [t for t in tensors if debug.is_pending(t)]
    rows = [f"{_shape(t)} xla::device_data()" for t in tensors if not debug.is_pending(t)]
    if pending:
        graph = debug.graph(pending)
        rows += [f"{getattr(x, 'shape', '')} prim::Constant()" for x in graph.numbers]
        rows += [f"{x.shape} xla::device_data()" for x in graph.leaves]
        rows += [f"{', '.join(map(str, n.outs))} {n.target._schema.name}()" for n in graph.nodes]
    return "\n".join(["IR {", *(f"  %{i} = {row}" for i, row in enumerate(rows)), "}", ""])


def _shape(t):
    return str(t._meta.hlo)


def _get_xla_tensor_debug_info(t):
    if not isinstance(t, HloTensor):
        return "Not a XLATensor"
    pending = debug.is_pending(t)
    text = _get_xla_tensors_text([t]) if pending else "None"
    where = xla_model.xla_real_devices()[0]
    data = None if pending else f"\n  Data Device: {where}\n  Data Shape: {_shape(t)}"
    return f"XLA Shape: {_shape(t)}\nIR: {text}\nXLAData: {data}\n"


def _check_tensor_need_materialization(tensors):
    """Whether a tensor is recorded and not yet computed."""
    return [debug.is_pending(t) for t in tensors]
