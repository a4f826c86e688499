"""What becomes of a per-device program's collectives, in this order."""

from __future__ import annotations

from torch_hlo.compiler.collectives.collective_algebra import COLLECTIVE_ALGEBRA
from torch_hlo.compiler.collectives.collective_combine import collective_combine
from torch_hlo.compiler.collectives.collective_motion import collective_motion
from torch_hlo.compiler.collectives.number_channels import number_channels
from torch_hlo.compiler.hlo_pass import Pass

PASSES: tuple[Pass, ...] = (
    collective_motion,
    *COLLECTIVE_ALGEBRA,
    collective_combine,
    number_channels,
)
