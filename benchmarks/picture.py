"""Draws the speed picture of the documentation from what `python -m benchmarks --json FILE` wrote.

    python -m benchmarks.picture FILE.json docs/speed.svg

A group of bars per peer, a bar per way to use torch_hlo: the geometric mean of how many times
faster it is, over the workloads that both have finished.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

PEERS = {"eager": "eager PyTorch", "inductor": "TorchInductor", "torch_xla": "PyTorch/XLA"}
OURS = {
    "hlo": ("recorded", "#9ecae1"),
    "hlo_compile": ("torch.compile", "#4292c6"),
    "hlo_captured": ("captured", "#08519c"),
}
HEIGHT, BAR, GAP, UNIT = 260, 44, 70, 34


def mean(results: dict[str, dict], peer: str, ours: str) -> float | None:
    """Geometric mean of the peer's median time over ours; None without a common workload."""
    ratios = [
        engines[peer]["median_s"] / engines[ours]["median_s"]
        for engines in results.values()
        if "median_s" in engines.get(peer, {}) and "median_s" in engines.get(ours, {})
    ]
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else None


def picture(results: dict[str, dict]) -> str:
    """The SVG text."""
    parts, x = [], 40
    for peer, title in PEERS.items():
        bars = [(*OURS[o], m) for o in OURS if (m := mean(results, peer, o)) is not None]
        if not bars:
            continue
        middle = x + BAR * len(bars) / 2
        parts.append(f'<text x="{middle}" y="{HEIGHT + 20}" class="peer">{title}</text>')
        for label, color, value in bars:
            height = value * UNIT
            parts.append(
                f'<rect x="{x}" y="{HEIGHT - height:.1f}" width="{BAR - 4}" height="{height:.1f}"'
                f' fill="{color}"><title>{label}: {value:.2f} times as fast as {title}</title>'
                "</rect>"
                f'<text x="{x + BAR / 2 - 2}" y="{HEIGHT - height - 6:.1f}">{value:.1f}×</text>'
            )
            x += BAR
        x += GAP
    line = HEIGHT - UNIT
    legend = "".join(
        f'<rect x="{40 + i * 130}" y="14" width="12" height="12" fill="{color}"/>'
        f'<text x="{58 + i * 130}" y="25" class="legend">{label}</text>'
        for i, (label, color) in enumerate(OURS.values())
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{x}" height="{HEIGHT + 40}" '
        'role="img" aria-label="How many times faster torch_hlo is">'
        "<style>text{font:13px sans-serif;text-anchor:middle}.legend{text-anchor:start}"
        ".peer{font-weight:bold}.one{text-anchor:start;fill:#777}</style>"
        f'<rect width="100%" height="100%" fill="white"/>{legend}'
        f'<line x1="20" y1="{line}" x2="{x - GAP + 20}" y2="{line}" stroke="#777"'
        ' stroke-dasharray="4"/>'
        f'<text x="{x - GAP + 4}" y="{line - 5}" class="one">as fast</text>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    target.write_text(picture(json.loads(source.read_text())))


if __name__ == "__main__":
    main()
