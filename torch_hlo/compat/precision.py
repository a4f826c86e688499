"""torch_xla.amp: PyTorch's own autocast and optimizers, which know the device."""

from __future__ import annotations

import logging

import torch
from torch.amp import GradScaler as _GradScaler

logger = logging.getLogger(__name__)
_WARNING_MESSAGE = "products are computed in the precision of their operands, whatever is set"


class autocast(torch.autocast):
    """`torch.autocast` of a device; bfloat16 unless said."""

    def __init__(
        self,
        device,
        enabled=True,
        dtype=None,
        cache_enabled=None,
    ):
        kind = torch.device(device).type
        super().__init__(kind, dtype or torch.bfloat16, enabled, cache_enabled)


class GradScaler(_GradScaler):
    """`torch.amp.GradScaler` of the device."""

    def __init__(self, *args, use_zero_grad=False, **kwargs):
        super().__init__("xla", *args, **kwargs)


def _skipping(kind):
    class SyncFree(kind):
        """The optimizer of PyTorch, whose step does nothing where `found_inf` is true."""

        def step(self, closure=None, found_inf=None):
            return None if found_inf is not None and found_inf else super().step(closure)

    return SyncFree


Adam, AdamW, SGD = map(_skipping, (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD))


class _Products:
    precision = "default"


def set_mat_mul_precision(precision):
    """Products are computed in the precision of their operands, whatever is asked for."""
    if precision not in ("default", "high", "highest"):
        raise ValueError(f"precision {precision!r}: there are default, high and highest")
    logger.warning(_WARNING_MESSAGE)
    _Products.precision = precision


def get_mat_mul_precision():
    return _Products.precision


_xla_set_mat_mul_precision = set_mat_mul_precision
_xla_get_mat_mul_precision = get_mat_mul_precision
