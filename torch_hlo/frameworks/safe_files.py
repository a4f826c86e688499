"""safetensors: files are opened for the hlo device, which its own code does not know."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from torch_hlo.pytorch.registration import PLACE


def safe_open(
    original: Callable[..., Any],
    filename: str | os.PathLike[str],
    framework: str,
    device: str | int | torch.device = "cpu",
    **kwargs: Any,
) -> Any:
    """safetensors.safe_open, also with device="hlo"."""
    if isinstance(device, int) or torch.device(device).type not in PLACE.names:
        return original(filename, framework, device, **kwargs)
    return _File(original(filename, framework, "cpu", **kwargs), torch.device(device))


class _Moved:
    """Like `inner`, whose tensors are on the CPU, but they come on `device`."""

    def __init__(self, inner: Any, device: torch.device) -> None:
        self.inner = inner
        self.device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        found: torch.Tensor = self.inner[index].to(self.device)
        return found


class _File(_Moved):
    def __enter__(self) -> _File:
        self.inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.inner.__exit__(*error)

    def get_tensor(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self.inner.get_tensor(name).to(self.device)
        return found

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self.inner.keys()}

    def get_slice(self, name: str) -> _Moved:
        return _Moved(self.inner.get_slice(name), self.device)
