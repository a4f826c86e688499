"""What becomes of a per-device program's collectives, in this order."""

from ..hlo_pass import Pass
from .collective_algebra import COLLECTIVE_ALGEBRA
from .collective_combine import collective_combine
from .collective_motion import collective_motion
from .number_channels import number_channels

PASSES: tuple[Pass, ...] = (
    collective_motion,
    *COLLECTIVE_ALGEBRA,
    collective_combine,
    number_channels,
)
