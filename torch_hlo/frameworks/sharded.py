"""FSDP: modules that were made on the CPU are moved to the hlo device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

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
