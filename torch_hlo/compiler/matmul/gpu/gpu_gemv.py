"""Products with few rows (decoding with a language model, a batch of one): bound by reading the
matrix B once, with 16-byte loads.

    rows:     B contiguous along k: a warp takes EACH columns, its lanes go along k, sums are folded
        by shuffles
    columns:  B contiguous along its columns: a lane takes neighbouring columns, the warps of a
        group go through k together

Sums are in the accumulator's type, in an order that depends on sizes only.
"""

from __future__ import annotations

from torch_hlo.frozen import frozen

from ...gpu.exchange import Exchange
from ...gpu.gpu_program import TensorMap
from ...gpu.gpu_writer import GpuWriter
from ...gpu.target import GpuTarget, machine
from ...llvm import Int
from ...llvm.scalar import STORAGE
from ...thresholds import GEMV_PART_DEPTH
from ..product import Product
from .gpu_blocks import SPLITS, Blocks, Place, Store, divides, element

MOST_ROWS = 8
# columns of a warp; warps of a group; of a warp; rows of B that a warp loads before it uses them
EACH = 4
WARPS = 8
LANES = 32
AHEAD = 4


@frozen
class Gemv:
    """An engine (see gpu_dot.py). `rows`: of C, all of them; `along_k`: the form;
    `lanes`: elements of B, and in the form `rows` of A, loaded at a time."""

    blocks: Blocks
    kind: str
    dtypes: tuple[str, str]
    rows: int
    along_k: bool
    lanes: int
    shared = resident = 0

    @property
    def name(self) -> str:
        types = f"{self.dtypes[0]}_{self.dtypes[1]}_{self.kind}"
        return f"gemv_{types}_{self.rows}{'k' if self.along_k else 'r'}{self.lanes}"

    @property
    def threads(self) -> int:
        return WARPS * LANES

    def width(self, most: int) -> int:
        """Columns that a store has, of at most so many."""
        return min(most, EACH if self.along_k else self.lanes)

    def maps(self, batch: int) -> tuple[TensorMap, ...]:
        return ()

    def write(self, f: GpuWriter, at: Place, lanes: int, store: Store) -> str:
        return (_rows if self.along_k else _columns)(f, self, at, lanes, store)


def engine(target: GpuTarget, p: Product, dtypes: tuple[str, str], kind: str) -> Gemv | None:
    """The engine for a product with few rows, or None."""
    if not isinstance(p.m, int) or p.m > MOST_ROWS or 1 not in p.b or p.n == 1:
        return None
    along_k = p.b[1] == 1 and (p.a[1] == 1 or p.m == 1)
    if not along_k and p.b[0] != 1:
        return None
    sizes = [STORAGE[d].bytes for d in dtypes]
    if along_k:
        if p.a[1] != 1:
            return None
        inside = [p.k, p.b[0], *(v for entry in p.batch for v in entry[1:3])] + [p.a[0]] * (p.m > 1)
        lanes = next(
            n
            for n in (8, 4, 2, 1)
            if n * max(sizes) <= 16 and (n == 1 or target.vector_bytes == 16) and divides(n, inside)
        )
        columns = WARPS * EACH
        depth = GEMV_PART_DEPTH
    else:
        most = min(
            16 // sizes[1],
            8 if p.m <= 4 else 4,
            16 // STORAGE["f32" if kind in ("float", "i32") else "f64"].bytes * 2,
        )
        lanes = next(
            n
            for n in (8, 4, 2, 1)
            if n <= most
            and (n == 1 or target.vector_bytes == 16)
            and (n == 1 or not isinstance(p.n, int) or LANES * n < 2 * p.n)
            and divides(n, [p.n, p.b[1], *(e[2] for e in p.batch)])
        )
        columns = LANES * lanes
        depth = 4 * WARPS * AHEAD
    count = p.count
    groups = -(-p.n // columns) * count if isinstance(p.n, int) and isinstance(count, int) else 0
    parts = max(
        (
            s
            for s in SPLITS
            if groups
            and isinstance(p.k, int)
            and p.k >= s * depth
            and groups * s <= 2 * machine(target).cores
        ),
        default=1,
    )
    return Gemv(Blocks(p.m, columns, parts, LANES * 8), kind, dtypes, p.m, along_k, lanes)


def _multiply(f: GpuWriter, kind: str, a: str, b: str, total: str) -> str:
    t = f.typed(kind)
    return t.fma(a, b, total) if t.is_float else t.add(t.mul(a, b), total)


def _rows(f: GpuWriter, g: Gemv, at: Place, lanes: int, store: Store) -> str:
    lane = f.rem("%kernel.t", LANES)
    warp = f.div("%kernel.t", LANES)
    first = f.muladd(warp, EACH, at.column)
    last = f.sub("%n", 1)
    starts = [f.muladd(f.min(f.add(first, c), last), "%b_n", at.b) for c in range(EACH)]
    rows = [f.muladd("%a_m", r, at.a) for r in range(g.rows)]
    t = f.typed(g.kind)
    with f.loop(
        f.mul(lane, g.lanes),
        at.k,
        LANES * g.lanes,
        carry=[(g.kind, t.const(0))] * (g.rows * EACH),
    ) as loop:
        matrix = [
            element(f, g.dtypes[1], g.kind, "%B", f.add(s, loop.index), g.lanes) for s in starts
        ]
        vectors = [
            element(f, g.dtypes[0], g.kind, "%A", f.add(s, loop.index), g.lanes) for s in rows
        ]
        sums = list(loop.vars)
        for i in range(g.lanes):
            for n in range(g.rows * EACH):
                r, c = divmod(n, EACH)
                sums[n] = _multiply(f, g.kind, vectors[r][i], matrix[c][i], sums[n])
        loop.next = sums
    exchange = Exchange(f.program.target, g.threads)
    e = f.emit()
    sums = loop.vars
    distance = 1
    while distance < LANES:
        sums = list(map(t.add, sums, exchange.others(e, [g.kind] * len(sums), sums, distance)))
        distance *= 2
    with f.when(f.icmp("eq", lane, 0)):
        for r in range(g.rows):
            for c in range(0, EACH, lanes):
                with f.when(f.icmp("slt", f.add(first, c), "%n")):
                    store(
                        r,
                        f.add(first, c),
                        lanes,
                        f.typed(g.kind, lanes).packed(sums[r * EACH + c : r * EACH + c + lanes]),
                    )
    return exchange.declarations()


def _columns(f: GpuWriter, g: Gemv, at: Place, lanes: int, store: Store) -> str:
    lane = f.rem("%kernel.t", LANES)
    warp = f.div("%kernel.t", LANES)
    across = f.mul(lane, g.lanes)
    column = f.add(at.column, across)
    ok = f.icmp("slt", column, "%n")
    base = f.add(at.b, f.select(ok, "i64", column, 0))
    sums = _column_sums(f, g, at, base, warp)
    width = LANES * g.lanes
    vt = f.typed(g.kind, g.lanes)

    def slot(of_warp: Int, row: Int) -> str:
        return f.gep(
            g.kind,
            "@SELF.sums",
            f.add(f.muladd(of_warp, g.rows * width, f.mul(row, width)), across),
        )

    for r in range(g.rows):
        vt.store(
            vt.packed(sums[r * g.lanes : (r + 1) * g.lanes]),
            slot(warp, r),
            4 * g.lanes,
        )
    f.barrier()
    with f.when(f.op(f"and i1 {f.icmp('slt', warp, g.rows)}, {ok}")):  # warp i folds row i
        total = vt.load(slot(0, warp), 4 * g.lanes)
        for other in range(1, WARPS):
            total = vt.add(total, vt.load(slot(other, warp), 4 * g.lanes))
        parts = vt.unpacked(total)
        for c in range(0, g.lanes, lanes):
            store(
                warp, f.add(column, c), lanes, f.typed(g.kind, lanes).packed(parts[c : c + lanes])
            )
    return (
        f"@SELF.sums = internal addrspace(3) global [{WARPS * g.rows * width} x {g.kind}] undef,"
        " align 16\n"
    )


def _column_sums(f: GpuWriter, g: Gemv, at: Place, base: Int, warp: Int) -> list[str]:
    """The sums of a warp's share of k: `g.lanes` columns from `base` on, for every row."""
    last = f.sub(at.k, 1)
    t = f.typed(g.kind)
    carry = [(g.kind, t.const(0))] * (g.rows * g.lanes)
    with f.loop(f.mul(warp, AHEAD), at.k, WARPS * AHEAD, carry=carry) as loop:
        deep = [f.add(loop.index, u) for u in range(AHEAD)]
        inside = [f.icmp("slt", k, at.k) for k in deep]
        near = [f.min(k, last) for k in deep]
        matrix = [
            element(f, g.dtypes[1], g.kind, "%B", f.muladd(k, "%b_k", base), g.lanes) for k in near
        ]
        sums = list(loop.vars)
        for u in range(AHEAD):
            for r in range(g.rows):
                place = f.add(at.a, f.muladd("%a_m", r, f.mul(near[u], "%a_k")))
                (a,) = element(f, g.dtypes[0], g.kind, "%A", place)
                a = f.select(inside[u], g.kind, a, t.const(0))
                for c in range(g.lanes):
                    n = r * g.lanes + c
                    sums[n] = _multiply(f, g.kind, a, matrix[u][c], sums[n])
        loop.next = sums
    totals: list[str] = loop.vars
    return totals
