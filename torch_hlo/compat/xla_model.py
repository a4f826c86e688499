"""torch_xla.core.xla_model without the collectives: devices, steps, optimizers, saving."""

import contextlib
import functools
import sys
import time
from typing import Any

import torch

import torch_hlo
from torch_hlo import config
from torch_hlo.lazy import device_module
from torch_hlo.lazy.record import session

from . import closures, communication, experimental_names, hardware, sharding_names, utilities

REDUCE_SUM, REDUCE_MUL, REDUCE_AND = "sum", "mul", "and"
REDUCE_OR, REDUCE_MIN, REDUCE_MAX = "or", "min", "max"


def xla_device(n=None, devkind=None):
    if n:
        raise IndexError(f"Device index {n} out of range in {get_xla_supported_devices()}")
    return torch_hlo.device()


def get_xla_supported_devices(devkind=None, max_devices=None):
    return ["xla:0"]


def set_replication(device, devices):
    """Nothing to do: a process has one device, and steps of several processes find each other."""


def xla_real_devices(local_devices=None):
    kind = hardware.device_type()
    return [f"{kind}:{torch.device(d).index or 0}" for d in local_devices or ["xla:0"]]


def xla_device_hw(device):
    """The kind of a device: CPU."""
    if torch.device(device).type != "xla":
        raise RuntimeError(f"Invalid device format: {device}")
    return hardware.device_type()


def xla_device_kind(device=None):
    return hardware.device_type()


def is_xla_tensor(tensor):
    return tensor.device.type == "xla"


def is_master_ordinal(local=True):
    return hardware.global_ordinal() == 0


def master_print(*args, fd=None, local=False, flush=False):
    if is_master_ordinal(local):
        print(*args, file=fd or sys.stdout, flush=flush)


def sync(wait=False, reset_scope=True):
    """End of a step: what was recorded runs, then what waited for that."""
    torch_hlo.mark_step(wait)
    closures.run_step_closures()


def wait_device_ops(devices=()):
    session.engine().synchronize()


def optimizer_step(
    optimizer,
    barrier=False,
    optimizer_args=None,
    groups=None,
    pin_layout=True,
):
    """Average the gradients over the processes, then step; `barrier`: and end the step."""
    communication.reduce_gradients(optimizer, groups)
    loss = optimizer.step(**(optimizer_args or {}))
    if barrier:
        sync()
    return loss


def send_cpu_data_to_device(datas, device, input_sharding=None):
    """Nested data on the device; `input_sharding`: a ShardingSpec for its tensors."""

    def move(tensor):
        moved = tensor.to(device)
        if input_sharding is not None and input_sharding.can_apply(moved):
            input_sharding.apply(moved)
        return moved

    datas = [datas] if isinstance(datas, torch.Tensor) else datas
    kept = utilities.ToXlaTensorArena(
        lambda tensors: list(map(move, tensors)),
        lambda v: isinstance(v, torch.Tensor) and v.device.type == "cpu",
    )
    return kept.transform(datas)


def check_view_sharing(obj):
    """Raises RuntimeError if two tensors of nested data share memory."""
    seen: dict[Any, torch.Tensor] = {}

    def check(x):
        key = x.untyped_storage().data_ptr()
        if seen.setdefault(key, x) is not x:
            raise RuntimeError(f"{x.dtype}{list(x.shape)} is sharing a view with another tensor")

    utilities.for_each_instance(obj, lambda v: isinstance(v, torch.Tensor), check)


class RateTracker:
    """Samples per second, smoothed."""

    def __init__(self, smooth_factor=None):
        self._smooth = 0.4 if smooth_factor is None else smooth_factor
        self._start = self._last = time.time()
        self._rate: float | None = None
        self._before = self._count = 0.0

    def add(self, count):
        self._count += count

    def rate(self):
        now = time.time()
        if now <= self._last:
            return 0.0
        rate = self._count / (now - self._last)
        if self._rate is not None:
            rate = (1 - self._smooth) * rate + self._smooth * self._rate
        self._before, self._count = self._before + self._count, 0.0
        self._last, self._rate = now, rate
        return rate

    def global_rate(self):
        passed = time.time() - self._start
        return (self._before + self._count) / passed if passed > 0 else 0.0


def set_rng_state(seed, device=None):
    torch_hlo.manual_seed(seed)


def get_rng_state(device=None):
    """The seed. (What was drawn since is not in it; torch.hlo.get_rng_state has that, too.)"""
    return device_module.initial_seed()


@contextlib.contextmanager
def fork_rng(device=None, enabled=True):
    state = device_module.get_rng_state()
    try:
        yield
    finally:
        if enabled:
            device_module.set_rng_state(state)


def get_memory_info(device=None):
    free, total = device_module.mem_get_info()
    used = device_module.memory_allocated()
    peak = device_module.max_memory_allocated()
    return {"bytes_used": used, "bytes_limit": total, "peak_bytes_used": peak}


def get_stablehlo(tensors=None):
    """StableHLO text of what was recorded for the tensors."""
    from torch_hlo import debug

    return debug.stablehlo_text(tensors)


def get_stablehlo_bytecode(tensors=None):
    """The same as a portable artifact."""
    from torch_hlo import debug, export

    return export.to_portable_artifact(debug.module(tensors))


def do_on_ordinals(target, data=(), ordinals=(0,)):
    cpu = utilities.to_cpu(data)
    return target(*cpu) if hardware.global_ordinal() in ordinals else None


def install():
    """Give tensors what scripts ask of them, and the back end of torch.compile its name."""
    sharding_names.install()
    config.assign("COUNT_OPS", True)
    config.assign("CPU_DEVICES", int(config.variable("CPU_NUM_DEVICES", config.get("CPU_DEVICES"))))
    original = torch.compile

    @functools.wraps(original)
    def compile(*args, backend="inductor", **kwargs):
        communication.show_dynamo()
        return original(*args, backend="hlo" if backend == "openxla" else backend, **kwargs)

    torch.compile = compile
    _aten.impl("nll_loss_nd", _nll_loss, "AutogradXLA")


_aten = torch.library.Library("aten", "IMPL")


def _nll_loss(self, target, *options):
    """Classes may be floating-point numbers, as in PyTorch/XLA."""
    return torch.ops.aten.nll_loss_nd.default.decompose(self, target.long(), *options)


get_ordinal = hardware.global_ordinal
get_local_ordinal = hardware.local_ordinal
xrt_world_size = hardware.world_size
unlazy = torch_hlo.sync
mark_step, xla_replication_devices = sync, xla_real_devices
optimization_barrier_ = experimental_names.optimization_barrier_
save = utilities.save
_maybe_convert_to_cpu = to_cpu = utilities.to_cpu
ToXlaTensorArena = utilities.ToXlaTensorArena
