"""torch_xla._XLAC: what scripts and tests take from its C++ extension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_hlo import debug, metrics
from torch_hlo.compat import experimental_names, hardware, sharding_names, xla_model
from torch_hlo.lazy.record.tensor import HloTensor

_get_executed_fallback_ops = metrics.executed_fallback_ops
_get_use_eager_mode = experimental_names.is_eager_mode
_set_use_eager_mode = experimental_names.eager_mode
_get_xla_sharding_spec = sharding_names.sharding_text
_get_xla_sharding_type = sharding_names.sharding_type
_get_xla_tensors_hlo = debug.hlo_text
_get_xla_tensors_text = debug.graph_text
_xla_clear_sharding = sharding_names.clear_sharding
_xla_get_num_cached_compilation_graph = hardware.get_num_cached_compilation_graph
_xla_increment_counter = metrics.count
_xla_get_devices = _xla_real_devices = xla_model.xla_real_devices
_xla_wait_device_ops = xla_model.wait_device_ops
_xla_metrics_report = metrics.metrics_report


def _xla_get_default_device() -> str:
    return "xla:0"


def _xla_get_all_devices() -> list[str]:
    return [f"{hardware.device_type()}:{i}" for i in range(hardware.process_count())]


def _xla_step_marker(device="", devices=(), wait=False, reset_scope=True):
    xla_model.sync(wait)


def _xla_sync_multi(tensors: Sequence[torch.Tensor], devices=(), wait=True, **options):
    xla_model.unlazy(list(tensors))


def _get_local_shards(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [[(s.data, s.shard_device) for s in sharding_names.local_shards(t)] for t in tensors]


def _xla_get_cpu_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t.cpu() for t in tensors]


def _xla_get_tensor_id(tensor: HloTensor) -> int:
    return id(tensor)


def _check_tensor_need_materialization(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Whether a tensor is recorded and not yet computed."""
    return [debug.is_pending(t) for t in tensors]


__all__ = [name for name in list(globals()) if name[0] == "_" and name[1] in "gscx"]
