"""Functions that pack a tile of an operand as [K][lanes], whatever its strides and elements are."""

from ..llvm import Function
from ..thresholds import PREFETCH
from .tile import Source, Tile, converted

LINE = 64  # bytes


def pack_copy(name: str, t: Tile, source: Source, panels: int = 1) -> Function:
    """Pack where the lanes are adjacent in memory: dst[k][lane] = src[k * k_stride + lane], lanes
    >= valid are zero. `panels` beside each other, one after the other in memory."""
    f = Function(
        name,
        "ptr src, i64 k_stride, i64 depth, i64 valid, ptr dst",
        attrs="noinline #0",
    )
    masks = [f.lane_mask(t.lanes, i * t.lanes, "%valid") for i in range(panels)]
    starts = ["%dst"]
    for _ in masks[1:]:
        starts.append(t.gep(f, starts[-1], f.mul("%depth", t.lanes)))
    with f.loop(0, "%depth", known_nonempty=True) as k:
        ahead = f.gep(source.kind, "%src", f.mul(f.add(k, PREFETCH), "%k_stride"))
        f.do(f"call void @llvm.prefetch.p0(ptr {ahead}, i32 0, i32 3, i32 1)")
        row = f.gep(source.kind, "%src", f.mul(k, "%k_stride"))
        for i, (mask, to) in enumerate(zip(masks, starts, strict=True)):
            p = f.gep(source.kind, row, i * t.lanes)
            v = f.masked_load(source.kind, t.lanes, p, mask)
            at = t.gep(f, to, f.mul(k, t.lanes))
            t.store(f, converted(f, t, source, v), at)
    return f


def pack_transpose(name: str, t: Tile, source: Source) -> Function:
    """Pack where K is adjacent in memory: dst[k][lane] = src[lane * lane_stride + k]. Unused lanes
    repeat the last one."""
    f = Function(
        name,
        "ptr src, i64 lane_stride, i64 depth, i64 valid, ptr dst",
        attrs="noinline #0",
    )
    last = f.sub("%valid", 1)
    rows = [
        f.gep(source.kind, "%src", f.mul(f.min(i, last) if i else 0, "%lane_stride"))
        for i in range(t.lanes)
    ]
    with f.loop(0, "%depth", t.lanes, known_nonempty=True) as k:
        mask = f.lane_mask(t.lanes, k, "%depth")
        block = [
            converted(
                f,
                t,
                source,
                f.masked_load(
                    source.kind,
                    t.lanes,
                    f.gep(source.kind, r, k),
                    mask,
                ),
            )
            for r in rows
        ]
        to = t.gep(f, "%dst", f.mul(k, t.lanes))
        for i, v in enumerate(t.transposed(f, block)):
            t.store(f, v, t.gep(f, to, i * t.lanes))
    return f


def pack_strided(name: str, t: Tile, source: Source) -> Function:
    """Pack with any strides, one element at a time."""
    params = "ptr src, i64 lane_stride, i64 k_stride, i64 depth, i64 valid, ptr dst"
    f = Function(name, params, attrs="noinline #0")
    one = Tile(t.kind, 1, 1, 1)
    with f.loop(0, "%depth") as k, f.loop(0, t.lanes) as lane:
        inside = f.icmp("slt", lane, "%valid")
        at = f.muladd(f.select(inside, "i64", lane, 0), "%lane_stride", f.mul(k, "%k_stride"))
        v = f.op(
            f"load <1 x {source.kind}>, ptr {f.gep(source.kind, '%src', at)}, align"
            f" {source.itemsize}"
        )
        v = converted(f, one, source, v)
        f.store(f"<1 x {t.kind}>", v, t.gep(f, "%dst", f.muladd(k, t.lanes, lane)))
    return f
