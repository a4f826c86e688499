"""Pictures of shardings as text: a grid of the array's blocks, each with the devices that hold it.

print(visualize_sharding("{devices=[2,2]<=[4]}"))
┌─────┬─────┐
│  0  │  1  │
├─────┼─────┤
│  2  │  3  │
└─────┴─────┘
"""

from __future__ import annotations

import itertools
import re

import torch

from torch_hlo.hlo.ir import Ints, Shape
from torch_hlo.hlo.sharding.sharding import Mesh as HloMesh, Sharding, ShardingError
from torch_hlo.hlo.sharding.sharding_text import common_mesh, parse_sharding


def visualize_sharding(
    what: torch.Tensor | Sharding | str,
    *,
    mesh: HloMesh | None = None,
    use_color: bool = False,
) -> str:
    """The grid of `what`: a tensor of the hlo device, a Sharding, or XLA's or our text of one (ours
    needs its `mesh`).

    Arrays of up to two split dimensions become a grid (rows, columns); with more, one grid per
    index along the leading ones. Raises ShardingError."""
    if isinstance(what, torch.Tensor):
        from .annotate import sharding_of

        found = sharding_of(what)
        if found is None:
            return _grid([["0"]])
        return _picture(found, use_color)
    if isinstance(what, str):
        mesh = getattr(mesh, "hlo", mesh) or common_mesh([what])
        tiles = re.search(r"devices=\[([\d,]+)\]", what)
        rank = len(tiles[1].split(",")) if tiles else 1
        rank -= "last_tile_dim_replicate" in what
        parsed = parse_sharding(what, Shape("f32", (1,) * rank), mesh)
        if not isinstance(parsed, Sharding):
            raise ShardingError(f"{what} is not the sharding of one array")
        return _picture(parsed, use_color)
    return _picture(what, use_color)


visualize_tensor_sharding = visualize_sharding


def _picture(sharding: Sharding, color: bool) -> str:
    if sharding.maximal is not None:
        return _grid([[str(sharding.maximal)]])
    holders: dict[Ints, list[int]] = {}
    for device in range(sharding.mesh.size):
        holders.setdefault(sharding.tile(device), []).append(device)
    tiles = sharding.tiles
    split = [d for d, n in enumerate(tiles) if n > 1]
    rows, columns = (
        (split[-2], split[-1]) if len(split) > 1 else (split[0], None) if split else (None, None)
    )
    if split == [len(tiles) - 1] and len(tiles) > 1:  # a matrix split along its columns
        rows = None
        columns = split[0]
    lead = [d for d in split if d not in (rows, columns)]
    pictures = []
    for index in itertools.product(*(range(tiles[d]) for d in lead)):

        def cell(row: int, column: int) -> str:
            at: dict[int | None, int] = {**dict(zip(lead, index)), rows: row, columns: column}
            return ",".join(map(str, holders[tuple(at.get(d, 0) for d in range(len(tiles)))]))

        across = range(1 if columns is None else tiles[columns])
        cells = [[cell(r, c) for c in across] for r in range(1 if rows is None else tiles[rows])]
        title = ", ".join(f"dimension {d} block {i}" for d, i in zip(lead, index))
        pictures.append((title + ":\n" if title else "") + _grid(cells, color))
    return "\n".join(pictures)


_COLORS = (44, 42, 45, 46, 41, 43, 100, 104)


def _grid(cells: list[list[str]], color: bool = False) -> str:
    width = max(len(cell) for line in cells for cell in line) + 4
    distinct = list(dict.fromkeys(cell for line in cells for cell in line))

    def show(cell: str) -> str:
        text = cell.center(width)
        return (
            f"\x1b[{_COLORS[distinct.index(cell) % len(_COLORS)]}m{text}\x1b[0m" if color else text
        )

    def rule(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * width for _ in cells[0]) + right

    lines = [rule("┌", "┬", "┐")]
    for i, line in enumerate(cells):
        lines += [rule("├", "┼", "┤")] * (i > 0) + ["│" + "│".join(map(show, line)) + "│"]
    return "\n".join([*lines, rule("└", "┴", "┘")])
