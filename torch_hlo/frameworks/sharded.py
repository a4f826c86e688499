"""FSDP: modules that were made on the CPU are moved to the hlo device."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_hlo.lazy.record import session
from torch_hlo.pytorch.registration import PLACE


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
    if handle.flat_param.device.type in PLACE.names:
        return contextlib.nullcontext()
    return original(handle)


def offload(original: Callable[..., Any], module: Any, state: Any, *others: Any) -> dict[str, Any]:
    """The hook after FSDP's state_dict: what was to be on the CPU before goes there now. All ranks
    gather here, also those that read nothing and end then."""
    session.engine().mark_step(True)
    found: dict[str, Any] = original(module, state, *others)
    if state._state_dict_config.offload_to_cpu:
        for name, x in found.items():
            if isinstance(x, torch.Tensor) and x.device.type in PLACE.names:
                found[name] = x.cpu()
    return found
