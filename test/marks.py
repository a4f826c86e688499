"""Marks of tests that not every configuration runs."""

from __future__ import annotations

import pytest

from torch_hlo.pytorch import shortcuts


def needs(*names: str) -> pytest.MarkDecorator:
    """Mark of a test whose subject are shortcuts past PyTorch: skipped where one of them is off."""
    off = [name for name in names if not shortcuts.on(name)]
    return pytest.mark.skipif(
        bool(off), reason=f"TORCH_HLO_SHORTCUTS leaves out {', '.join(off) or 'nothing'}"
    )
