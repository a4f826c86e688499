"""Which kernel computes a product, and in which form it reads the operands."""

from __future__ import annotations

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Ints, Size, ceildiv

from ..thresholds import (
    CONFLICT_BYTES,
    FAR_ROWS_BYTES,
    GEMV_ROWS,
    GEMV_STRIP,
    IN_LANES_BYTES,
    KC,
    KC_DIRECT,
    REREAD,
    SHALLOW,
)
from . import blocking
from .product import Product, hint
from .tile import Source, Tile


def is_local(plan: Plan, p: Product) -> bool:
    """Whether the sums of a row tile are finished before the next one's are begun."""
    return (
        plan.kernel != "tiles"
        or isinstance(p.k, int)
        and p.k <= (KC_DIRECT if plan.form_b == "direct" else KC)
    )


def columns_each_item(n: Size, cores: int) -> int:
    """Columns of an item of gemv_columns: long pieces of rows, but work for every core."""
    share = ceildiv(n, 64 * cores) * 64 if isinstance(n, int) else GEMV_STRIP // 2
    return max(256, min(share, 2 * GEMV_STRIP))


def is_turned(p: Product, t: Tile) -> bool:
    """Whether a product of few columns is computed as the transposed one of few rows, which is
    written in columns."""
    if not isinstance(p.n, int) or not isinstance(p.k, int) or not t.is_float:
        return False
    if isinstance(p.m, int) and _few(p.m, p.k, t):
        return False
    if p.n == 1 and 1 in p.a:
        return True
    return _few(p.n, p.k, t) and p.a[1] == p.b[1] == 1 and p.k >= 4 * t.lanes


def _few(rows: int, k: Size, t: Tile) -> bool:
    """Whether rows are few enough for gemv_rows. It adds up the lanes of each sum at the end: of
    several sums when there is enough to be summed."""
    return rows == 1 or rows <= GEMV_ROWS and hint(k, 512) >= min(16, 2 * rows) * t.lanes


@frozen
class Plan:
    """How a product is computed. `kernel`: "tiles" (gemm.py), "rows" or "columns" (gemv.py); forms
    say how operands are read."""

    kernel: str
    form_a: str
    form_b: str
    heights: Ints
    vectors: int
    even: bool = False  # whole tiles of columns only
    turned: bool = False  # rows of the result are written as columns
    unroll: int = 1  # what K is a multiple of
    fetch: bool = True  # rows of B are asked for before they are read


def plan_of(p: Product, t: Tile, sources: tuple[Source, Source]) -> Plan:
    form_a = _form_a(p, t, sources[0])
    form_b = blocking.form_of(p.b)
    if isinstance(p.m, int) and t.is_float:
        if _few(p.m, p.k, t) and p.a[1] == 1 and p.b[1] == 1 and p.n != 1:
            return Plan("rows", form_a, form_b, (p.m,), 1)
        if p.m in (1, 2) and form_b == "copy" and hint(p.n, 64) >= 64:
            return Plan("columns", form_a, form_b, (p.m,), 1)
    unroll = 2 if isinstance(p.k, int) and p.k % 2 == 0 else 1
    if form_b == "copy" and not sources[1].steps and _reads_b(p, t):
        return _direct(p, t, form_a, unroll)
    if isinstance(p.m, int) and isinstance(p.n, int):
        heights, vectors = blocking.tile_shape(t, p.m, p.n, hint(p.k, KC), form_a)
    else:
        heights = blocking.tile_heights(t, p.m)
        vectors = min(t.vectors, ceildiv(hint(p.n, t.columns), t.lanes))
    return Plan("tiles", form_a, form_b, heights, vectors, unroll=unroll)


def _form_a(p: Product, t: Tile, source: Source) -> str:
    """How A is read: where it is, if its elements are accumulators and its rows do not share the
    sets of L1, or are all near, or are read only once."""
    form = blocking.form_of(p.a)
    row = p.a[0]
    if not isinstance(p.m, int) or source.steps:
        return form
    apart = isinstance(row, int) and row * t.itemsize % CONFLICT_BYTES != 0
    if form == "transpose" and (apart or hint(p.n, t.columns + 1) <= t.columns):
        return "rows"
    if form == "copy" and isinstance(p.k, int) and p.m * p.k * t.itemsize <= IN_LANES_BYTES:
        return "lanes"
    return form


def _reads_b(p: Product, t: Tile) -> bool:
    """Whether B is read where it is: there are too few rows to pay for packing it, or its rows are
    not far apart."""
    if not isinstance(p.m, int):
        return False
    far = FAR_ROWS_BYTES[t.masks_stores]
    if p.m <= (2 if _shares_sets(p, t) else 5) * t.rows:
        return True
    return hint(p.b[1], far) * t.itemsize <= far


def _shares_sets(p: Product, t: Tile) -> bool:
    """Whether rows of B share a few sets of caches that are small."""
    row = p.b[1]
    return not t.masks_stores and isinstance(row, int) and row * t.itemsize % CONFLICT_BYTES == 0


def _direct(p: Product, t: Tile, form_a: str, unroll: int) -> Plan:
    if isinstance(p.m, int) and isinstance(p.n, int):
        depth = hint(p.k, KC_DIRECT)
        heights, vectors = blocking.tile_shape(t, p.m, p.n, depth, form_a)
        even = p.n % (vectors * t.lanes) == 0
        near = isinstance(p.k, int) and p.k <= SHALLOW and p.m >= REREAD or _shares_sets(p, t)
        return Plan(
            "tiles",
            form_a,
            "direct",
            heights,
            vectors,
            even,
            unroll=unroll,
            fetch=not near,
        )
    # In wider strips when there are registers left.
    heights = blocking.tile_heights(t, p.m)
    vectors = min(blocking.MOST, max(1, t.rows * t.vectors // heights[0]))
    return Plan("tiles", form_a, "direct", heights, vectors, unroll=unroll)
