"""What becomes of a per-device program's collectives, in this order."""

from __future__ import annotations

from torch_hlo.compiler.passes.base import Pass
from torch_hlo.compiler.passes.collective_algebra import COLLECTIVE_ALGEBRA
from torch_hlo.compiler.passes.collective_combine import collective_combine
from torch_hlo.compiler.passes.collective_motion import collective_motion
from torch_hlo.compiler.passes.number_channels import number_channels

PASSES: tuple[Pass, ...] = (
    collective_motion,
    *COLLECTIVE_ALGEBRA,
    collective_combine,
    number_channels,
)
