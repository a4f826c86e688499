"""What names CUDA, or the CPU, where nobody chose: the device takes its place."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_hlo.pytorch.registration import PLACE


def scaler(
    original: Callable[..., None], instance: Any, device: str = "cuda", *args: Any, **kwargs: Any
) -> None:
    """GradScaler(): CUDA is its default, and where there is none it would do nothing."""
    original(instance, _present(device), *args, **kwargs)


def casts(
    original: Callable[..., None], instance: Any, device_type: str, *args: Any, **kwargs: Any
) -> None:
    """autocast("cuda"), as loops of other packages say it."""
    original(instance, _present(device_type), *args, **kwargs)


def _present(device: str) -> str:
    return PLACE.name if device == "cuda" and not torch.cuda.is_available() else device


def clip(
    original: Callable[..., torch.Tensor],
    parameters: Iterable[torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """clip_grad_norm_: without gradients the norm is on the parameters' device too."""
    alone = isinstance(parameters, torch.Tensor)
    given = [parameters] if alone else list(parameters)
    norm = original(given, *args, **kwargs)
    ours = any(p.device.type in PLACE.names for p in given)
    return norm.to(PLACE.device) if ours and norm.device.type == "cpu" else norm


def fastai_device(original: Callable[..., torch.device], *args: Any, **kwargs: Any) -> torch.device:
    """fastai's default_device, unless `use_cuda` is False."""
    device = original(*args, **kwargs)
    asked = original.__globals__["defaults"].use_cuda is False
    return device if asked or device.type != "cpu" else PLACE.device
