"""Accelerate and the Trainer of transformers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from torch_hlo.pytorch.registration import PLACE


def processes(
    original: Callable[..., tuple[str | None, Any]],
    state: Any,
    cpu: bool = False,
    sagemaker_dp: bool = False,
    backend: str | None = None,
) -> tuple[str | None, Any]:
    """PartialState._prepare_backend: several processes train on the device, over gloo."""
    found, kind = original(state, cpu, sagemaker_dp, backend)
    if kind.value != "NO" or cpu or int(os.environ.get("LOCAL_RANK", -1)) == -1:
        return found, kind
    state.device = PLACE.device
    # the kind that every strategy is offered for
    return backend or "gloo", type(kind).MULTI_GPU


def setup_devices(original: Callable[[Any], torch.device], arguments: Any) -> torch.device:
    """TrainingArguments._setup_devices: the device that Accelerate has chosen."""
    device = original(arguments)
    state = arguments.distributed_state
    return state.device if state is not None and state.device.type in PLACE.names else device
