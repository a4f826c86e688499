"""Products with few rows: no packing, the large operand streams through once.

rows:      y[m, n] = sum_k x[m, k] w[n, k]        m = 1..ROWS, both contiguous along K
columns:   y[m, n] = sum_k x[m, k] w[k, n]        m = 1 or 2, w contiguous along n
"""

from __future__ import annotations

from torch_hlo.compiler.llvm import Function, Int, signature
from torch_hlo.compiler.thresholds import GEMV_STRIP, PREFETCH_BYTES

from .tile import (
    KIND_SUFFIX,
    Source,
    Tile,
    converted,
    lane_mask,
    masked_load,
    masked_store,
    multiply_add,
    splat,
    vectors_of,
)


def gemv_rows(name: str, t: Tile, sources: tuple[Source, Source], rows: int) -> Function:
    """void(x, x_m, w, w_n, y, y_m, y_n, n0, n1, k): columns [n0, n1) of `rows` rows. Strides in
    elements."""
    params = signature(
        "ptr x, i64 x_m, ptr w, i64 w_n, ptr y, i64 y_m, i64 y_n, i64 n0, i64 n1, i64 k"
    )
    f = Function(name, "void", params, attrs="noinline #0")
    # sums in registers
    at_once = max(1, min(8, (24 if t.masks_stores else 12) // rows))
    while at_once & (at_once - 1):
        at_once -= 1
    whole = f.add("%n0", f.mul(f.div(f.sub("%n1", "%n0"), at_once), at_once))
    with f.loop("%n0", whole, at_once) as n:
        _strip(f, t, sources, rows, at_once, n)
    if at_once > 1:
        with f.loop(whole, "%n1") as n:
            _strip(f, t, sources, rows, 1, n)
    return f


def _strip(
    f: Function,
    t: Tile,
    sources: tuple[Source, Source],
    rows: int,
    count: int,
    n: str,
) -> None:
    x_rows = [f.gep(sources[0].kind, "%x", f.mul("%x_m", i)) for i in range(rows)]
    w_rows = [f.gep(sources[1].kind, "%w", f.mul("%w_n", f.add(n, j))) for j in range(count)]
    whole = f.op(f"and i64 %k, {-t.lanes}")

    def step(k: str, sums: list[str], mask: str) -> list[str]:
        def read(source: Source, row: str) -> str:
            p = f.gep(source.kind, row, k)
            v = masked_load(f, source.kind, t.lanes, p, mask, source.itemsize)
            return converted(f, t, source, v)

        if not mask:
            for row in w_rows:
                ahead = f.gep("i8", f.gep(sources[1].kind, row, k), PREFETCH_BYTES)
                f.do(f"call void @llvm.prefetch.p0(ptr {ahead}, i32 0, i32 3, i32 1)")
        ws = [read(sources[1], row) for row in w_rows]
        result = list(sums)
        for i, row in enumerate(x_rows):
            x = read(sources[0], row)
            for j, w in enumerate(ws):
                result[j * rows + i] = multiply_add(f, t, x, w, sums[j * rows + i])
        return result

    with f.loop(0, whole, t.lanes, [(t.vector, "zeroinitializer")] * (rows * count)) as loop:
        loop.next = step(loop.index, loop.vars, "")
    sums = loop.vars
    left = f.icmp("slt", whole, "%k")
    sums = f.choose(
        left,
        lambda: step(whole, sums, lane_mask(f, t.lanes, whole, "%k")),
        lambda: sums,
        [t.vector] * len(sums),
    )
    for j in range(count):
        for i in range(rows):
            total = f.op(
                f"call reassoc {t.kind}"
                f" @llvm.vector.reduce.fadd.v{t.lanes}{KIND_SUFFIX[t.kind]}({t.kind} -0.0,"
                f" {t.vector} {sums[j * rows + i]})"
            )
            f.store_at(
                t.kind,
                total,
                "%y",
                f.add(f.mul("%y_m", i), f.mul("%y_n", f.add(n, j))),
                t.itemsize,
            )


def gemv_columns(name: str, t: Tile, sources: tuple[Source, Source], rows: int) -> Function:
    """void(x, x_m, x_k, w, w_k, y, y_m, n0, n1, k): columns [n0, n1) of `rows` rows. Strides in
    elements.

    A few rows of w at a time are added to a strip of y, so that memory is read in long pieces.
    """
    params = signature(
        "ptr x, i64 x_m, i64 x_k, ptr w, i64 w_k, ptr y, i64 y_m, i64 n0, i64 n1, i64 k"
    )
    f = Function(name, "void", params, attrs="noinline #0")
    at_once = 8 // rows
    whole = f.mul(f.div("%k", at_once), at_once)
    with f.loop("%n0", "%n1", GEMV_STRIP) as n:
        count = f.min(f.sub("%n1", n), GEMV_STRIP)
        y_rows = [f.gep(t.kind, "%y", f.add(n, f.mul("%y_m", i))) for i in range(rows)]
        for y in y_rows:
            f.do(
                f"call void @llvm.memset.p0.i64(ptr {y}, i8 0, i64 {f.mul(count, t.itemsize)}, i1"
                " false)"
            )
        for first, last, step in ((0, whole, at_once), (whole, "%k", 1)):
            with f.loop(first, last, step) as k:
                _add_rows(f, t, sources, rows, step, n, count, k, y_rows)
    return f


def _add_rows(
    f: Function,
    t: Tile,
    sources: tuple[Source, Source],
    rows: int,
    at_once: int,
    n: Int,
    count: Int,
    k: Int,
    y_rows: list[str],
) -> None:
    """y[:, strip] += x[:, k : k + at_once] w[k : k + at_once, strip]."""
    right = sources[1]
    factors = _factors(f, t, sources[0], rows, at_once, k)
    w_rows = [f.gep(right.kind, "%w", f.add(n, f.mul("%w_k", f.add(k, j)))) for j in range(at_once)]
    for c, mask in vectors_of(f, t.lanes, 0, count):
        ws = []
        for w in w_rows:
            p = f.gep(right.kind, w, c)
            w_elements = masked_load(f, right.kind, t.lanes, p, mask, right.itemsize)
            ws.append(converted(f, t, right, w_elements))
        for i, y in enumerate(y_rows):
            p = f.gep(t.kind, y, c)
            total = masked_load(f, t.kind, t.lanes, p, mask, t.itemsize)
            for j, w in enumerate(ws):
                total = multiply_add(f, t, factors[i * at_once + j], w, total)
            masked_store(f, t.kind, t.lanes, total, p, mask, t.itemsize)


def _factors(f: Function, t: Tile, source: Source, rows: int, at_once: int, k: Int) -> list[str]:
    """The elements x[:, k : k + at_once], each in all lanes."""
    one = Tile(t.kind, t.itemsize, 1, 1, 1)
    factors = []
    for i in range(rows):
        for j in range(at_once):
            at = f.add(f.mul("%x_m", i), f.mul("%x_k", f.add(k, j)))
            p = f.gep(source.kind, "%x", at)
            v = f.load(f"<1 x {source.kind}>", p, source.itemsize)
            v = f.op(f"extractelement <1 x {t.kind}> {converted(f, one, source, v)}, i64 0")
            factors.append(splat(f, t.kind, t.lanes, v))
    return factors
