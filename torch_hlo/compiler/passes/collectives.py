"""What becomes of a per-device program's collectives, in this order."""
from __future__ import annotations

from torch_hlo.compiler.passes.base import Pass
from torch_hlo.compiler.passes.collective_motion import collective_motion

PASSES: tuple[Pass, ...] = (collective_motion,)
