"""How a product is cut: the shape of its tiles, and items for threads."""

from dataclasses import replace
from functools import lru_cache

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Ints, Size, ceildiv, round_up

from ..thresholds import (
    CALL_CYCLES,
    IMBALANCE,
    ITEM_WORK,
    KC_DIRECT,
    L1_BYTES,
    MULTIPLIES_PER_NS,
    NEAR_BYTES,
    PACK_CYCLES,
    PACK_NS,
    PREPACK_NS,
    READ_NS,
)
from .tile import Tile


@frozen
class Partition:
    """How one product is cut for threads: `blocks_m` x `blocks_n` items; `prepacked`: A is packed
    beforehand."""

    tiles_each: Size
    columns_each: Size
    blocks_m: Size
    blocks_n: Size
    prepacked: bool


def partition(
    t: Tile,
    tiles: Size,
    m: Size,
    n: Size,
    k: Size,
    batch: Size,
    forms: tuple[str, str],
    cores: int,
    may_prepack: bool,
) -> Partition:
    """The cheapest cut into items for so many cores: A is packed once per block of columns and B
    once per block of rows, unless A is packed beforehand, while few items leave cores idle at the
    end. `forms`: how the operands are read; the costs above were measured on one thread. Which cut
    is taken does not change results: every element of C is summed in one item."""
    step = t.columns
    if not (isinstance(tiles, int) and isinstance(n, int)):
        rows = 16
        columns = 8 * step
        return Partition(rows, columns, ceildiv(tiles, rows), ceildiv(n, columns), False)
    m, k, batch = (
        v if isinstance(v, int) else usual for v, usual in ((m, 512), (k, 512), (batch, 8))
    )
    far_a = m * k * t.itemsize > NEAR_BYTES
    far_b = n * k * t.itemsize > NEAR_BYTES
    multiply = m * n * k / (MULTIPLIES_PER_NS * t.lanes)
    best = (float("inf"), 1, 1, False)
    for per_core, idle in IMBALANCE.items():
        items = max(1, min(per_core * cores, m * n * k * batch // ITEM_WORK) // max(1, batch))
        for blocks_n in range(1, min(items, ceildiv(n, step)) + 1):
            blocks_m = min(ceildiv(items, blocks_n), tiles)
            lost = multiply * (idle + max(0, 1 - blocks_m * blocks_n / items))
            passes = blocks_n * ceildiv(ceildiv(n, blocks_n), t.block_columns)
            for prepacked in (False, True) if may_prepack and passes > 1 else (False,):
                a_cost = (
                    PREPACK_NS + READ_NS[far_a] * passes
                    if prepacked
                    else PACK_NS[forms[0]][far_a] * passes
                )
                best = min(
                    best,
                    (
                        m * k * a_cost + blocks_m * n * k * PACK_NS[forms[1]][far_b] + lost,
                        blocks_m,
                        blocks_n,
                        prepacked,
                    ),
                )
    return cut(t, tiles, n, *best[1:])


def cut(
    t: Tile,
    tiles: int,
    n: int,
    blocks_m: int,
    blocks_n: int,
    prepacked: bool = False,
) -> Partition:
    """At most `blocks_m` x `blocks_n` items of whole tiles."""
    tiles_each = ceildiv(tiles, blocks_m)
    columns_each = round_up(ceildiv(n, blocks_n), t.columns)
    return Partition(
        tiles_each,
        columns_each,
        ceildiv(tiles, tiles_each),
        ceildiv(n, columns_each),
        prepacked,
    )


def form_of(strides: tuple[Size, Size]) -> str:
    """How an operand is packed whose element strides along its free dimension (rows of A, columns
    of B) and along K are these."""
    free, k = strides
    return "copy" if free == 1 else "transpose" if k == 1 else "strided"


def tile_heights(t: Tile, m: Size) -> Ints:
    """Heights of the row tiles for M rows: balanced (two neighbouring heights), or the full height
    when M is symbolic."""
    if not isinstance(m, int):
        return (t.rows,)
    count = max(1, ceildiv(m, t.rows))
    high = ceildiv(m, count)
    return (high,) if m % count == 0 else (high, high - 1)


MOST = 4  # vectors of a tile's rows


@lru_cache(1024)
def tile_shape(t: Tile, m: int, n: int, k: int, form_a: str) -> tuple[Ints, int]:
    """(heights of the row tiles, vectors of a tile) in which an m x n product costs least: narrow
    matrices in tiles that they fill, few rows in as many vectors as there are registers for.

    A step along K takes half a cycle per multiplication, and at least the four that each waits for
    the one before it; a quarter per element of A; a quarter or one per vector of B, which comes
    from the first cache or the second; and what packing A takes per row tile."""
    read = 0.25 if min(n, t.block_columns) * min(k, KC_DIRECT) * t.itemsize <= L1_BYTES else 1.0
    # beside the element of A
    registers = 31 if t.lanes * t.itemsize >= 64 else 15
    best: tuple[float, Ints, int] = float("inf"), (1,), 1
    for vectors in range(1, min(MOST, ceildiv(n, t.lanes)) + 1):
        for high in range(min(t.lanes, (registers - vectors) // vectors, m), 0, -1):
            heights = tile_heights(replace(t, rows=high), m)
            count = ceildiv(m, high)
            tall = m - count * heights[1] if len(heights) > 1 else count
            tiles = ((heights[0], tall), (heights[-1], count - tall))
            each = sum(
                number
                * (
                    max(4.0, rows * vectors / 2)
                    + rows / 4
                    + vectors * read
                    + (CALL_CYCLES + rows * vectors) / k
                )
                for rows, number in tiles
            )
            cost = each * ceildiv(n, vectors * t.lanes) + count * PACK_CYCLES.get(form_a, 0.0)
            if cost < best[0] * 0.98:
                best = (cost, heights, vectors)
    return best[1:]
