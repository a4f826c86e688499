"""Lightning and its Fabric: an accelerator named "hlo"."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from torch_hlo.pytorch.registration import NAME, PLACE


def device_ids(original: Callable[[Any], list[int] | None], strategy: Any) -> list[int] | None:
    """DDPStrategy: with a number of a device it would make streams of CUDA."""
    return None if strategy.root_device.type in PLACE.names else original(strategy)


def register(module: ModuleType) -> None:
    """Put the accelerator into the registry of `module`, a package of accelerators."""

    class HLOAccelerator(module.Accelerator):
        """The hlo device of this process; with several processes, one device in each."""

        def setup_device(self, device: torch.device) -> None:
            if device.type not in PLACE.names:
                raise ValueError(f"the accelerator 'hlo' trains on an hlo device, not on {device}")

        def get_device_stats(self, device: torch.device) -> dict[str, Any]:
            return torch.get_device_module(PLACE.name).memory_stats(device)

        def teardown(self) -> None:
            """Nothing is kept."""

        @staticmethod
        def parse_devices(devices: int | str | list[int]) -> int:
            number = len(devices) if isinstance(devices, (list, tuple)) else int(devices)
            return 1 if number == -1 else number

        @staticmethod
        def get_parallel_devices(devices: int) -> list[torch.device]:
            return [PLACE.device] * devices  # in each process its own, which is the first there

        @staticmethod
        def auto_device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return NAME

    names = ("AcceleratorRegistry", "ACCELERATOR_REGISTRY")
    registry = next(getattr(module, n) for n in names if hasattr(module, n))
    registry.register(NAME, HLOAccelerator, description="torch_hlo")
