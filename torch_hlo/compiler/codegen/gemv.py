"""Products with few rows where both operands are contiguous along K: no packing, the large operand streams through once.

    y[m, n] = sum_k x[m, k] w[n, k]        m = 1..8
"""
from __future__ import annotations

from torch_hlo.compiler.codegen.function import Function
from torch_hlo.compiler.codegen.gemm import KIND_SUFFIX, Source, Tile, _converted, lane_mask, masked_load, multiply_add

PREFETCH_BYTES = 1024


def gemv_rows(name: str, t: Tile, sources: tuple[Source, Source], rows: int) -> Function:
    """void(x, x_m, w, w_n, y, y_m, y_n, n0, n1, k): columns [n0, n1) of `rows` rows. Strides in elements."""
    params = [("ptr", "x"), ("i64", "x_m"), ("ptr", "w"), ("i64", "w_n"), ("ptr", "y"), ("i64", "y_m"), ("i64", "y_n"), ("i64", "n0"), ("i64", "n1"),
              ("i64", "k")]
    f = Function(name, "void", params, attrs="noinline #0")
    at_once = max(1, min(8, 24 // rows))
    while at_once & (at_once - 1):
        at_once -= 1
    whole = f.add("%n0", f.mul(f.div(f.sub("%n1", "%n0"), at_once), at_once))
    with f.loop("%n0", whole, at_once) as n:
        _strip(f, t, sources, rows, at_once, n)
    if at_once > 1:
        with f.loop(whole, "%n1") as n:
            _strip(f, t, sources, rows, 1, n)
    return f


def _strip(f: Function, t: Tile, sources: tuple[Source, Source], rows: int, count: int, n) -> None:
    x_rows = [f.gep(sources[0].kind, "%x", f.mul("%x_m", i)) for i in range(rows)]
    w_rows = [f.gep(sources[1].kind, "%w", f.mul("%w_n", f.add(n, j))) for j in range(count)]
    whole = f.op(f"and i64 %k, {-t.lanes}")

    def step(k, sums: list[str], mask: str | None) -> list[str]:
        def read(source: Source, row: str) -> str:
            p = f.gep(source.kind, row, k)
            if mask:
                return _converted(f, t, source, masked_load(f, source.kind, t.lanes, p, mask, source.itemsize))
            return _converted(f, t, source, f.load(f"<{t.lanes} x {source.kind}>", p, source.itemsize))

        if not mask:
            for row in w_rows:
                ahead = f.gep("i8", f.gep(sources[1].kind, row, k), PREFETCH_BYTES)
                f.do(f"call void @llvm.prefetch.p0(ptr {ahead}, i32 0, i32 3, i32 1)")
        xs = [read(sources[0], r) for r in x_rows]
        result = []
        for j, row in enumerate(w_rows):
            w = read(sources[1], row)
            result += [multiply_add(f, t, x, w, sums[j * rows + i]) for i, x in enumerate(xs)]
        return result

    with f.loop(0, whole, t.lanes, [(t.vector, "zeroinitializer")] * (rows * count)) as loop:
        loop.next = step(loop.index, loop.vars, None)
    sums = loop.vars
    left = f.icmp("slt", whole, "%k")
    sums = f.choose(left, lambda: step(whole, sums, lane_mask(f, t.lanes, whole, "%k")), lambda: sums, [t.vector] * len(sums))
    for j in range(count):
        for i in range(rows):
            total = f.op(f"call reassoc {t.kind} @llvm.vector.reduce.fadd.v{t.lanes}{KIND_SUFFIX[t.kind]}({t.kind} -0.0, {t.vector} {sums[j * rows + i]})")
            f.store(t.kind, total, f.gep(t.kind, "%y", f.add(f.mul("%y_m", i), f.mul("%y_n", f.add(n, j)))), t.itemsize)
