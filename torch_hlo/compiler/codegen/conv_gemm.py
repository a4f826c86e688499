"""Matrix kernels whose second operand is a convolution's input, read as the matrix V[(channel, tap), pixel] that is never stored.

The input `x` is padded already. Entry (r, p) of V is x[table[r] + offset(p)]: `table` has the element offset of every channel and tap,
and offset(p) = y * step_y + x * step_x of output pixel p. Neighbouring pixels of a row are `step_x` apart, so packing is
vector loads along rows of pixels.

    PixelColumns: C[m, pixel] = sum_r A[m, r] V[r, pixel]                    forward, gradient of the input
    TapColumns:   C[m, r] = sum over images and pixels A[m, pixel] V[r, pixel]      gradient of the weights
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch_hlo.compiler.codegen.function import Function, Int
from torch_hlo.compiler.codegen.gemm import (
    KC,
    KIND_SUFFIX,
    Depth,
    Gemm,
    Source,
    Tile,
    converted,
    masked_load,
    masked_store,
    splat,
    transposed,
)


def _lanes_between(f: Function, lanes: int, first: Int, count: Int) -> str:
    """Mask of the lanes first <= i < first + count (first may be negative)."""
    numbers = "<" + ", ".join(f"i64 {i}" for i in range(lanes)) + ">"
    shifted = f.op(f"sub <{lanes} x i64> {numbers}, {splat(f, 'i64', lanes, first)}")
    return f.op(f"icmp ult <{lanes} x i64> {shifted}, {splat(f, 'i64', lanes, count)}")


def _row_reader(f: Function, t: Tile, source: Source, step: int | None, first: Int, count: Int):
    """A function (pointer to lane 0) -> the lanes [first, first + count), which are `step` elements apart (None: %step_x)."""
    n, kind = t.lanes, source.kind
    if step == 1:
        mask = _lanes_between(f, n, first, count)
        return lambda p: converted(f, t, source, masked_load(f, kind, n, p, mask, source.itemsize)), mask
    mask = _lanes_between(f, n, first, count)
    if step == 2:
        elements = f.sub(f.mul(count, 2), 1)
        low, high = (_lanes_between(f, n, f.sub(f.mul(first, 2), shift), elements) for shift in (0, n))
        even = ", ".join(f"i32 {2 * i}" for i in range(n))

        def read(p: str) -> str:
            a = masked_load(f, kind, n, p, low, source.itemsize)
            b = masked_load(f, kind, n, f.gep(kind, p, n), high, source.itemsize)
            v = f.op(f"shufflevector <{n} x {kind}> {a}, <{n} x {kind}> {b}, <{n} x i32> <{even}>")
            return converted(f, t, source, v)

        return read, mask
    numbers = "<" + ", ".join(f"i64 {i}" for i in range(n)) + ">"
    offsets = f.op(f"mul <{n} x i64> {numbers}, {splat(f, 'i64', n, '%step_x')}")

    def gather(p: str) -> str:
        at = f.op(f"getelementptr {kind}, ptr {p}, <{n} x i64> {offsets}")
        name = f"llvm.masked.gather.v{n}{KIND_SUFFIX[kind]}.v{n}p0"
        v = f.op(f"call <{n} x {kind}> @{name}(<{n} x ptr> align {source.itemsize} {at}, <{n} x i1> {mask}, <{n} x {kind}> zeroinitializer)")
        return converted(f, t, source, v)

    return gather, mask


def _pixel_offset(f: Function, outer: int, pixel: Int) -> tuple[Int, Int]:
    """(element offset, x) of a pixel number; sizes and steps are the parameters size_i, step_i and size_x, step_x."""
    x, rest = f.rem(pixel, "%size_x"), f.div(pixel, "%size_x")
    offset = f.mul(x, "%step_x")
    for i in reversed(range(outer)):
        part = f.rem(rest, f"%size{i}") if i else rest
        rest = f.div(rest, f"%size{i}") if i else rest
        offset = f.add(offset, f.mul(part, f"%step{i}"))
    return offset, x


def geometry(outer: int) -> list[tuple[str, str]]:
    """Parameters that describe output pixels with `outer` dimensions above the row."""
    return [("i64", f"{what}{i}") for what in ("size", "step") for i in range(outer)] + [("i64", "size_x"), ("i64", "step_x")]


def pack_pixels(name: str, t: Tile, source: Source, outer: int, step: int | None) -> Function:
    """dst[k][lane] = x[table[k] + offset(pixel + lane)], one run of pixels of a row after the other."""
    params = [("ptr", "x"), ("ptr", "table"), ("i64", "depth"), ("i64", "pixel"), ("i64", "valid"), ("ptr", "dst"), *geometry(outer)]
    f = Function(name, "void", params, attrs="noinline #0")
    with f.while_([("i64", "0")]) as runs:
        lane = runs.vars[0]
        f.break_if(runs, f.icmp("sge", lane, "%valid"))
        offset, x = _pixel_offset(f, outer, f.add("%pixel", lane))
        run = f.min(f.sub("%size_x", x), f.sub("%valid", lane))
        base = f.gep(source.kind, "%x", f.sub(offset, f.mul(lane, "%step_x")))
        read, mask = _row_reader(f, t, source, step, lane, run)
        with f.loop(0, "%depth", known_nonempty=True) as k:
            row = f.gep(source.kind, base, f.load("i64", f.gep("i64", "%table", k), 8))
            masked_store(f, t.kind, t.lanes, read(row), f.gep(t.kind, "%dst", f.mul(k, t.lanes)), mask, t.itemsize)
        runs.next = [f.add(lane, run)]
    return f


def pack_taps(name: str, t: Tile, source: Source, outer: int, step: int | None) -> Function:
    """dst[k][lane] = x[table[lane] + offset(pixel + k)]: rows of pixels, transposed. Unused lanes repeat the last one."""
    params = [("ptr", "x"), ("ptr", "table"), ("i64", "depth"), ("i64", "pixel"), ("i64", "valid"), ("ptr", "dst"), *geometry(outer)]
    f = Function(name, "void", params, attrs="noinline #0")
    last = f.sub("%valid", 1)
    lanes = [f.gep(source.kind, "%x", f.load("i64", f.gep("i64", "%table", f.min(i, last) if i else 0), 8)) for i in range(t.lanes)]
    with f.while_([("i64", "0")]) as runs:
        done = runs.vars[0]
        f.break_if(runs, f.icmp("sge", done, "%depth"))
        offset, x = _pixel_offset(f, outer, f.add("%pixel", done))
        run = f.min(f.sub("%size_x", x), f.sub("%depth", done))
        with f.loop(0, run, t.lanes, known_nonempty=True) as k:
            at = f.add(offset, f.mul(k, "%step_x"))
            read, _ = _row_reader(f, t, source, step, 0, f.sub(run, k))
            block = [read(f.gep(source.kind, p, at)) for p in lanes]
            to = f.gep(t.kind, "%dst", f.mul(f.add(done, k), t.lanes))
            for i, v in enumerate(transposed(f, t, block)):
                f.store(t.vector, v, f.gep(t.kind, to, i * t.lanes), t.itemsize)
        runs.next = [f.add(done, run)]
    return f


class PixelColumns(Gemm):
    """Columns are pixels, K is (channel, tap). `B` is the input of one image and group."""

    label = "conv"

    def __init__(self, t: Tile, source_a: Source, source_b: Source, heights: tuple[int, ...], static_m: bool, outer: int, step: int | None,
                 prepacked: bool = False) -> None:  # fmt: skip
        super().__init__(t, source_a, source_b, "transpose", "pixels", heights, static_m, prepacked)
        self.outer, self.step = outer, step
        self.extra = (("ptr", "table"), *geometry(outer))
        self.name = f"{self.name}_{outer}_{step}"

    def arguments(self) -> list[str]:
        return [f"i64 %{name}" for _, name in geometry(self.outer)]

    def pack_b(self, f: Function, depth: Depth, column: Int, count: Int, to: str) -> None:
        source = self.sources[1]
        name = self.function(pack_pixels, f"pack_pixels_{self.t.suffix}_{source.name}_{self.outer}_{self.step}", self.t, source, self.outer, self.step)
        table = f.gep("i64", "%table", depth.first)
        f.call("void", name, "ptr %B", f"ptr {table}", f"i64 {depth.size}", f"i64 {column}", f"i64 {count}", f"ptr {to}", *self.arguments())


class TapColumns(Gemm):
    """Columns are (channel, tap), K is (image, pixel). `a_image`, `b_image`: strides between images."""

    label = "conv_taps"

    def __init__(self, t: Tile, source_a: Source, source_b: Source, heights: tuple[int, ...], static_m: bool, outer: int, step: int | None,
                 prepacked: bool = False) -> None:  # fmt: skip
        super().__init__(t, source_a, source_b, "transpose", "taps", heights, static_m, prepacked)
        self.outer, self.step = outer, step
        self.extra = (("ptr", "table"), ("i64", "images"), ("i64", "a_image"), ("i64", "b_image"), *geometry(outer))
        self.name = f"{self.name}_{outer}_{step}"

    arguments = PixelColumns.arguments

    @contextmanager
    def k_blocks(self, f: Function) -> Iterator[Depth]:
        """Blocks of whole rows of pixels where they fit, else of parts of a row; `k` is the number of pixels of an image."""
        rows = f.max(f.div(KC, "%size_x"), 1)
        depth = f.min(f.mul(rows, f.min("%size_x", KC)), KC)
        with f.loop(0, "%images") as image:
            self.image = image
            with f.loop(0, "%k", depth) as k0:
                more = f.op(f"or i1 {f.icmp('ne', image, 0)}, {f.icmp('ne', k0, 0)}")
                size = f.min(depth, f.sub("%k", k0))
                last = f.op(f"and i1 {f.icmp('eq', f.add(image, 1), '%images')}, {f.icmp('eq', f.add(k0, size), '%k')}")
                yield Depth(size, k0, more, last)

    def total_k(self, f: Function) -> Int:
        return f.mul("%images", "%k")

    def k_number(self, f: Function, depth: Depth) -> Int:
        return f.add(f.mul(self.image, "%k"), depth.first)

    def pack_a(self, f: Function, depth: Depth, row: Int, height: Int, to: str) -> None:
        at = f.add(f.mul(row, "%a_free"), f.add(f.mul(self.image, "%a_image"), depth.first))
        self._pack(f, 0, f.gep(self.sources[0].kind, "%A", at), ("%a_free", "1"), depth.size, height, to)

    def pack_b(self, f: Function, depth: Depth, column: Int, count: Int, to: str) -> None:
        source = self.sources[1]
        name = self.function(pack_taps, f"pack_taps_{self.t.suffix}_{source.name}_{self.outer}_{self.step}", self.t, source, self.outer, self.step)
        x, table = f.gep(source.kind, "%B", f.mul(self.image, "%b_image")), f.gep("i64", "%table", column)
        f.call("void", name, f"ptr {x}", f"ptr {table}", f"i64 {depth.size}", f"i64 {depth.first}", f"i64 {count}", f"ptr {to}", *self.arguments())


def offset_table(name: str, taps: int) -> Function:
    """void(table, channels, channel_step, start, then size and step per tap dimension): element offsets, row-major."""
    params = [("ptr", "table"), ("i64", "channels"), ("i64", "channel_step"), ("i64", "start")]
    params += [("i64", f"{what}{i}") for i in range(taps) for what in ("size", "step")]
    f = Function(name, "void", params)

    def nest(level: int, number: Int, offset: Int) -> None:
        if level == taps:
            f.store("i64", offset, f.gep("i64", "%table", number), 8)
            return
        with f.loop(0, f"%size{level}") as i:
            nest(level + 1, f.add(f.mul(number, f"%size{level}"), i), f.add(offset, f.mul(i, f"%step{level}")))

    with f.loop(0, "%channels") as c:
        nest(0, c, f.add("%start", f.mul(c, "%channel_step")))
    return f
