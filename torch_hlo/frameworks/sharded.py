"""What PyTorch's own modules for many processes do otherwise on the hlo device."""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from torch_hlo.device import runtime
from torch_hlo.lazy.record import HloTensor, session
from torch_hlo.pytorch.registration import PLACE


def build(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """FullyShardedDataParallel.__init__: the device of this process is its first, whatever the
    rank's number. Where the device's memory is the host's, all parameters are offloaded already."""
    given = inspect.signature(original).bind(*args, **kwargs)
    options = given.arguments
    offloads = getattr(options.get("cpu_offload"), "offload_params", False)
    device = options.get("device_id")
    if device is None and offloads:
        device = torch.accelerator.current_accelerator()
    if device is not None and torch.device(device).type in PLACE.names:
        options["device_id"] = PLACE.device
        if offloads and not runtime.backend().on_host:
            raise NotImplementedError(
                "FSDP with CPUOffload(offload_params=True): a parameter of the hlo device cannot"
                " become one of the CPU. Use fully_shard(…, offload_policy=CPUOffloadPolicy())"
            )
        options.pop("cpu_offload", None)
    original(*given.args, **given.kwargs)


def move_states(
    original: Callable[..., None],
    parameters: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    device: torch.device,
    *others: Any,
) -> None:
    """`x.data = x.to(device)` cannot change what a tensor is: it is exchanged, as Module.to does.

    Then `original` finds them there."""
    if device is not None and device.type in PLACE.names:
        for old in (*parameters, *buffers):
            if old.device.type == "cpu":
                new = old.detach().to(device)
                if isinstance(old, torch.nn.Parameter):
                    new = torch.nn.Parameter(new, old.requires_grad)
                torch.utils.swap_tensors(old, new)
        device = PLACE.device
    original(parameters, buffers, device, *others)


def stay(original: Callable[..., Any], handle: Any) -> Any:
    """FlatParamHandle.to_cpu, around the making of a state_dict: see `offload`."""
    if PLACE.has(handle.flat_param):
        return contextlib.nullcontext()
    return original(handle)


def offload(original: Callable[..., Any], module: Any, state: Any, *others: Any) -> dict[str, Any]:
    """The hook after FSDP's state_dict: what was to be on the CPU before goes there now. All ranks
    gather here, also those that read nothing and end then."""
    session.engine().mark_step(True)
    found: dict[str, Any] = original(module, state, *others)
    if state._state_dict_config.offload_to_cpu:
        for name, x in found.items():
            if PLACE.has(x):
                found[name] = x.cpu()
    return found


def stage(original: Callable[..., Any], stager: Any, x: Any, memo: Any, **kwargs: Any) -> Any:
    """StateDictStager, for checkpoints that are written in the background: the CPU's copy."""
    if not isinstance(x, HloTensor):
        return original(stager, x, memo, **kwargs)
    host = memo[id(x)] = x.detach().cpu()
    return host.share_memory_() if stager.share_memory else host


def renew(original: Callable[..., None], ddp: Any, *args: Any, **kwargs: Any) -> None:
    """DistributedDataParallel.__init__ with mixed_precision=…: PyTorch gives its buckets other
    memory then, and leaves their views where they were. Until it makes the buckets anew, after the
    first step, gradients are what that memory holds. So they are made anew here."""
    original(ddp, *args, **kwargs)
    on_device = any(map(PLACE.has, ddp.module.parameters()))
    if on_device and ddp.mixed_precision is not None:
        ddp.reducer._push_all_rebuilt_params()
        if not ddp.reducer._rebuild_buckets():
            raise NotImplementedError(
                "DistributedDataParallel(mixed_precision=…, find_unused_parameters=True): PyTorch"
                " would exchange other memory than the gradients. Use torch.autocast"
            )


class _Total(torch.autograd.Function):
    """The sum over the processes of a group, and of its gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        result = x.clone()
        torch.distributed.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Total.apply(gradient, ctx.group), None


def _normalize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    eps: float,
    momentum: float,
    group: Any,
    world: int,
) -> torch.Tensor:
    shape = [1, -1] + [1] * (x.dim() - 2)
    others = [d for d in range(x.dim()) if d != 1]
    wide = x.float()
    sums = torch.cat([wide.sum(others), wide.new_full((1,), x.numel() // x.size(1))])
    sums = _Total.apply(sums, group)
    count = sums[-1]
    mean = sums[:-1] / count
    centered = wide - mean.view(shape)
    variance = _Total.apply(centered.square().sum(others), group) / count
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = variance * count / (count - 1)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    result = centered * torch.rsqrt(variance + eps).view(shape)
    if weight is not None:
        result = result * weight.view(shape)
    return (result if bias is None else result + bias.view(shape)).to(x.dtype)


def synchronized_norm(module: ModuleType) -> None:
    """nn.SyncBatchNorm: recorded whole. PyTorch's reads how many processes had rows."""
    original = module.sync_batch_norm.apply

    def apply(x: torch.Tensor, *args: Any) -> torch.Tensor:
        return (_normalize if PLACE.has(x) else original)(x, *args)

    module.sync_batch_norm = SimpleNamespace(apply=apply)
