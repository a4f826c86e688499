"""Matrix multiplication kernels written as LLVM IR: C[m, n] = sum_k A[m, k] B[k, n], any strides of
A and B, C row-major.

The scheme is BLIS's. A chunk of work owns a range of row tiles and of column panels of C:

    for each block of columns (fits L2)          for each block of K (KC)
        pack B into panels [K][lanes]                for each tile of rows: pack A into [K][lanes]
                                                         for each pair of panels: micro-kernel, C
                                                             tile in registers

Measured on one Granite Rapids core (AVX-512, f32) against MKL: 0.93 to 1.17 of its speed from
64x64x64 to 1576x384x384, 1.5 on 512x50257x384, 2.6 on 96 batches of 512x512x64.

Packing brings any stride (and any narrower element type) into one form, so one micro-kernel per
tile height serves every dot of a program. Rows of A along K for few columns, a small A whose rows
are adjacent, and rows of B that are not far apart are read where they are. Sizes are IR values or
Python ints: nothing but the tile heights is specialised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Ints, Size, ceildiv, round_up

from ..llvm import Function, Int, signature
from ..thresholds import KC, KC_DIRECT, LOCAL_GAP
from .blocking import MOST
from .epilogue import Epilogue
from .micro_kernel import MicroKernel
from .packing import LINE, pack_copy, pack_strided, pack_transpose
from .tile import Source, Tile


@frozen
class Depth:
    """One block of K inside a kernel: its `size`, where it starts (`first`, an element of K),
    whether C already holds a sum, and whether it is the `last`."""

    size: Int
    first: Int
    more: str
    last: str


BLOCK_PARAMETERS = tuple(
    signature(
        "ptr A, i64 a_free, i64 a_k, ptr B, i64 b_free, i64 b_k, ptr C, i64 ldc, i64 tile0,"
        " i64 tile1, i64 m, i64 n0, i64 n1, i64 k, ptr scratch"
    )
)


class Gemm:
    """The functions of one kind of product. `functions` collects name -> text of everything that
    `block` needs.

    `prepacked`: A lies as `prepack` leaves it. `even`: every range of columns is a multiple of the
      tile's.

    `epilogue` (epilogue.py) is called on every row tile of a block of columns that is finished. C
    then holds sums; with `local`, which is for a K of a single block, it is not used: the sums of a
    row tile stay in scratch memory.

    `unroll` divides K. `fetch`: see `micro`. With `form_b` "packed" the whole of B lies as
    `prepack_b` leaves it, and its column stride is the number of its columns."""

    def __init__(
        self,
        t: Tile,
        source_a: Source,
        source_b: Source,
        form_a: str,
        form_b: str,
        heights: Ints,
        static_m: bool,
        prepacked: bool = False,
        even: bool = False,
        epilogue: Epilogue | None = None,
        local: bool = False,
        unroll: int = 1,
        fetch: bool = True,
    ) -> None:
        self.t = t
        self.heights = heights
        self.static_m = static_m
        self.prepacked = prepacked
        self.unroll = unroll
        self.epilogue = epilogue
        self.local = local
        self.fetch = fetch
        self.direct = form_b == "direct"
        self.even = even
        self.kept = form_b == "packed"
        self.in_rows, self.in_lanes = (
            form_a == form and not prepacked for form in ("rows", "lanes")
        )
        self.block_ahead = self.kept or form_b in ("copy", "transpose") and not source_b.steps
        self.sources = (source_a, source_b)
        self.forms = (form_a, form_b)
        self.functions: dict[str, str] = {}
        height = (
            "_".join(map(str, heights))
            + "p" * (not static_m)
            + "q" * prepacked
            + "e" * even
            + "n" * (not fetch)
            + f"u{unroll}"
        )
        operands = f"{source_a.name}{form_a[0]}_{source_b.name}{form_b[0]}"
        self.name = f"gemm_{t.suffix}_{operands}_{height}_{t.vectors}"
        self.extra: tuple[tuple[str, str], ...] = ()  # parameters besides BLOCK_PARAMETERS
        if epilogue is not None:
            self.extra = (("i64", "first_row"), *epilogue.parameters)
            self.name += f"{'l' * local}_{epilogue.name}"

    @property
    def scratch_bytes(self) -> int:
        return self.t.scratch_bytes + self.t.sums_bytes * self.local

    def function(self, make: Callable[..., Any], name: str, *args: object) -> str:
        """Name of the function `make(name, *args)`, written once."""
        if name not in self.functions:
            self.functions[name] = make(name, *args).text()
        return name

    def _pack(
        self,
        f: Function,
        side: int,
        src: str,
        strides: tuple[str, str],
        depth: Int,
        valid: Int,
        dst: str,
        panels: int = 1,
    ) -> None:
        t = self.t
        source = self.sources[side]
        form = self.forms[side]
        make = {
            "copy": pack_copy,
            "transpose": pack_transpose,
            "strided": pack_strided,
        }[form]
        name = f"pack_{form}_{t.suffix}_{source.name}"
        if panels > 1:
            self.function(make, name := f"{name}_{panels}", t, source, panels)
        else:
            self.function(make, name, t, source)
        free, k = strides
        args = {"copy": [k], "transpose": [free], "strided": [free, k]}[form]
        f.call(
            name,
            f"ptr {src}",
            *(f"i64 {a}" for a in args),
            f"i64 {depth}",
            f"i64 {valid}",
            f"ptr {dst}",
        )

    @contextmanager
    def k_blocks(self, f: Function) -> Iterator[Depth]:
        """The loop over blocks of K."""
        depth = f.ceildiv("%k", f.max(f.ceildiv("%k", KC_DIRECT if self.direct else KC), 1))
        # packing writes whole vectors of K
        depth = f.round_up(depth, self.t.lanes)
        with f.loop(0, "%k", depth) as k0:
            size = f.min(depth, f.sub("%k", k0))
            yield Depth(size, k0, f.icmp("ne", k0, 0), f.icmp("eq", f.add(k0, size), "%k"))

    def pack_a(self, f: Function, depth: Depth, row: Int, height: Int, to: str) -> None:
        """Write rows [row, row + height) of the block of A as [depth][lanes]."""
        at = f.muladd(row, "%a_free", f.mul(depth.first, "%a_k"))
        self._pack(
            f,
            0,
            f.gep(self.sources[0].kind, "%A", at),
            ("%a_free", "%a_k"),
            depth.size,
            height,
            to,
        )

    def prepack(self) -> str:
        """Define void(lo, hi, A, packed, m, a_free, a_k, k): row tiles [lo, hi) of A as [tile][k +
        lanes][lanes].

        Worth its pass over A when several blocks of columns use it. (A packing may spill over the
        end of its block, hence the gap.)"""
        t = self.t
        source = self.sources[0]
        name = f"prepack_{self.name}"
        params = "i64 lo, i64 hi, ptr A, ptr packed, i64 m, i64 a_free, i64 a_k, i64 k"
        f = Function(name, params)
        tall = self._tall(f)
        with f.items() as i:
            row, height, _ = self._rows(f, i, tall)
            with f.loop(0, "%k", KC) as k0:
                src = f.muladd(row, "%a_free", f.mul(k0, "%a_k"))
                to = t.gep(f, "%packed", f.mul(f.muladd(i, f.add("%k", t.lanes), k0), t.lanes))
                self._pack(
                    f,
                    0,
                    f.gep(source.kind, "%A", src),
                    ("%a_free", "%a_k"),
                    f.min(f.sub("%k", k0), KC),
                    height,
                    to,
                )
        self.functions[name] = f.text()
        return name

    def prepacked_bytes(self, m: Size, k: Size) -> Size:
        """Size of the memory that `prepack` fills."""
        return ceildiv(m, self.heights[0]) * (k + self.t.lanes) * (self.t.lanes * self.t.itemsize)

    def prepack_b(self) -> str:
        """Define void(lo, hi, B, packed, n, b_free, b_k, k): panels [lo, hi) of `lanes` columns of
        B as [block of K][panel][depth][lanes]. K is a multiple of `lanes`: packing writes nothing
        beyond a panel."""
        t = self.t
        source = self.sources[1]
        name = f"prepack_b_gemm_{t.suffix}_{source.name}_{self.forms[1]}"
        f = Function(
            name,
            "i64 lo, i64 hi, ptr B, ptr packed, i64 n, i64 b_free, i64 b_k, i64 k",
        )
        with f.items() as panel, self.k_blocks(f) as depth:
            column = f.mul(panel, t.lanes)
            self.pack_b(
                f,
                depth,
                column,
                f.min(f.sub("%n", column), t.lanes),
                self.kept_panel(f, "%packed", "%n", depth, column),
            )
        self.functions[name] = f.text()
        return name

    def kept_bytes(self, n: int, k: int) -> int:
        """Size of the memory that `prepack_b` fills, and what a micro-kernel may read past it."""
        t = self.t
        return t.itemsize * (round_up(n, t.lanes) * k + KC * MOST * t.lanes)

    def kept_panel(self, f: Function, base: str, n: Int, depth: Depth, column: Int) -> str:
        """Where the panel of `column`, a multiple of `lanes`, is in a block of K of what
        `prepack_b` wrote."""
        columns = f.round_up(n, self.t.lanes)
        return f.gep(
            self.sources[1].kind,
            base,
            f.muladd(depth.first, columns, f.mul(column, depth.size)),
        )

    def _tall(self, f: Function) -> Int | None:
        """How many of the row tiles have the greater of two heights."""
        if len(self.heights) == 1:
            return None
        return f.sub("%m", f.mul(f.ceildiv("%m", self.heights[0]), self.heights[1]))

    def _rows(self, f: Function, i: Int, tall: Int | None) -> tuple[Int, Int, str | None]:
        """(first row, height, whether it is one of the tall ones) of row tile `i`."""
        high = self.heights[0]
        if tall is not None:
            is_tall = f.icmp("slt", i, tall)
            return (
                f.muladd(i, self.heights[1], f.min(i, tall)),
                f.select(is_tall, "i64", high, self.heights[1]),
                is_tall,
            )
        row = f.mul(i, high)
        return row, high if self.static_m else f.min(high, f.sub("%m", row)), None

    @property
    def panels(self) -> int:
        """Panels of B that are packed at a time: whole lines of its rows."""
        copied = self.forms[1] == "copy"
        return max(1, LINE // (self.t.lanes * self.sources[1].itemsize)) if copied else 1

    def pack_b(
        self, f: Function, depth: Depth, column: Int, count: Int, to: str, panels: int = 1
    ) -> None:
        """Write columns [column, column + min(count, lanes)) of the block of B as [depth][lanes],
        and those of `panels`."""
        at = f.muladd(column, "%b_free", f.mul(depth.first, "%b_k"))
        self._pack(
            f,
            1,
            f.gep(self.sources[1].kind, "%B", at),
            ("%b_free", "%b_k"),
            depth.size,
            count,
            to,
            panels,
        )

    def block(self) -> str:
        """Define and return the name of: void(A, a_free, a_k, B, b_free, b_k, C, ldc, tile0, tile1,
        m, n0, n1, k, scratch, extra…).

        Computes the columns [n0, n1) of the row tiles [tile0, tile1) of C. `first_row`: what number
        row 0 has for the epilogue."""
        t = self.t
        params = [*BLOCK_PARAMETERS, *self.extra]
        if self.name in self.functions:
            return self.name
        f = Function(self.name, params, attrs="noinline #0")
        a_panel = t.gep(f, "%scratch", KC * (t.block_columns + t.columns) + t.lanes * t.lanes)
        nc = t.block_columns // t.columns * t.columns
        tall = self._tall(f)
        with f.in_blocks("%n0", "%n1", nc) as (j0, j1):
            with self.k_blocks(f) as depth:
                panel = f.mul(depth.size, t.lanes)
                if not self.direct and not self.kept:
                    wide = t.lanes * self.panels
                    with f.loop(j0, j1, wide) as j:
                        number = f.div(f.sub(j, j0), t.lanes)
                        self.pack_b(
                            f,
                            depth,
                            j,
                            f.min(f.sub(j1, j), wide),
                            t.gep(f, "%scratch", f.mul(number, panel)),
                            self.panels,
                        )
                coming = self._next_block(f, depth, j0, j1) if self.block_ahead else None
                with f.loop("%tile0", "%tile1") as i:
                    self._row_tile(f, i, tall, depth, a_panel, panel, j0, j1, coming)
        self.functions[self.name] = f.text()
        return self.name

    def _next_block(self, f: Function, depth: Depth, j0: Int, j1: Int) -> str:
        """Where the block of B begins that comes after this one: further along K, or the next
        columns."""
        to = f.add(depth.first, depth.size)
        k = f.select(depth.last, "i64", 0, to)
        j = f.select(depth.last, "i64", j1, j0)
        if self.kept:  # all blocks are as deep, but for the last
            return self.kept_panel(
                f, "%B", "%b_free", Depth(depth.size, k, depth.more, depth.last), j
            )
        return f.gep(self.sources[1].kind, "%B", f.muladd(j, "%b_free", f.mul(k, "%b_k")))

    def _row_tile(
        self,
        f: Function,
        i: Int,
        tall: Int | None,
        depth: Depth,
        a_panel: str,
        panel: Int,
        j0: Int,
        j1: Int,
        coming: str | None,
    ) -> None:
        """Pack tile `i` of A and multiply it with every pair of panels; each of these calls asks
        for a line of B's block that begins at `coming`."""
        high = self.heights[0]
        row, height, is_tall = self._rows(f, i, tall)
        a_panel = self._a_panel(f, i, row, height, depth, a_panel)
        ldc: Int
        if self.local:
            c_row = f.gep("i8", "%scratch", self.t.scratch_bytes)
            ldc = self.t.block_columns + LOCAL_GAP
        else:
            ldc = "%ldc"
            c_row = self.t.gep(f, "%C", f.muladd(row, ldc, j0))
        one = _RowTile(
            self,
            f,
            i,
            row,
            height,
            depth,
            a_panel,
            panel,
            j0,
            j1,
            coming,
            c_row,
            ldc,
        )
        if is_tall is not None:
            low = self.heights[1]
            f.choose(is_tall, lambda: one.multiply(high), lambda: one.multiply(low))
        elif self.static_m:
            one.multiply(high)
        else:
            is_whole = f.icmp("eq", height, high)
            f.choose(is_whole, lambda: one.multiply(high), lambda: one.multiply(high, True))
        if self.epilogue is not None:
            with nullcontext() if self.local else f.when(depth.last):
                self.epilogue.call(
                    f,
                    f.add("%first_row", row),
                    height,
                    j0,
                    f.sub(j1, j0),
                    c_row,
                    ldc,
                )

    def _a_panel(
        self, f: Function, i: Int, row: Int, height: Int, depth: Depth, packed: str
    ) -> str:
        """Where the micro-kernel reads a tile of A: where it is, or in `packed`."""
        t = self.t
        if self.prepacked:
            at = f.muladd(i, f.add("%k", t.lanes), depth.first)
            return t.gep(f, "%A", f.mul(at, t.lanes))
        if self.in_rows or self.in_lanes:
            at = f.muladd(row, "%a_free", f.mul(depth.first, "%a_k"))
            return t.gep(f, "%A", at)
        self.pack_a(f, depth, row, height, packed)
        return packed

    @property
    def ahead(self) -> int:
        """Iterations of a micro-kernel that ask for one line of the next tile of A."""
        if self.prepacked:
            return 0
        return {"transpose": self.t.lanes, "copy": 2}.get(self.forms[0], 0)

    def micro_kernel(self, rows: int, partial: bool, whole: bool) -> str:
        kernel = MicroKernel(
            self.t,
            rows,
            partial,
            self.direct,
            whole,
            self.ahead,
            self.block_ahead,
            self.in_rows,
            self.in_lanes,
            self.unroll,
            self.fetch,
            self.sources[1] if self.kept and self.sources[1].steps else None,
        )
        if kernel.name not in self.functions:
            self.functions[kernel.name] = kernel.function().text()
        return kernel.name


@frozen
class _RowTile:
    """A row tile times a block of B: where its rows are, and what `block` knows of the block."""

    gemm: Gemm
    f: Function
    i: Int
    row: Int
    height: Int
    depth: Depth
    a_panel: str
    panel: Int
    j0: Int
    j1: Int
    coming: str | None
    c_row: str
    ldc: Int

    def multiply(self, rows: int, partial: bool = False) -> None:
        """The loop over pairs of panels."""
        f = self.f
        gemm = self.gemm
        rest = [f"i64 {self.height}"] * partial + ["i64 %b_k"] * gemm.direct
        with f.loop(self.j0, self.j1, gemm.t.columns) as j:
            b = self.b_panel(j)
            c = gemm.t.gep(f, self.c_row, f.sub(j, self.j0))
            cols = f.sub(self.j1, j)
            arguments = [
                f"ptr {self.a_panel}",
                f"ptr {b}",
                f"i64 {self.depth.size}",
                f"ptr {c}",
                f"i64 {self.ldc}",
                f"i64 {cols}",
                f"i1 {self.depth.more}",
                *rest,
            ]
            if gemm.ahead:
                arguments += self.next_of_a(j)
            if self.coming is not None:
                arguments.append(self.next_of_b(j, self.coming))
            arguments += ["i64 %a_free"] * gemm.in_rows + ["i64 %a_k"] * gemm.in_lanes

            def run(whole: bool, arguments: list[str] = arguments) -> None:
                f.call(gemm.micro_kernel(rows, partial, whole), *arguments)

            if gemm.direct and not gemm.even:
                is_whole = f.icmp("sge", cols, gemm.t.columns)
                f.choose(is_whole, lambda: run(True), lambda: run(False))
            else:
                run(gemm.direct)

    def b_panel(self, j: Int) -> str:
        f = self.f
        gemm = self.gemm
        t = self.gemm.t
        if gemm.direct:
            return t.gep(f, "%B", f.muladd(self.depth.first, "%b_k", j))
        if gemm.kept:
            return gemm.kept_panel(f, "%B", "%b_free", self.depth, j)
        number = f.div(f.sub(j, self.j0), t.lanes)
        return t.gep(f, "%scratch", f.mul(number, self.panel))

    def next_of_a(self, j: Int) -> list[str]:
        """Every call asks for a part of the next tile: one row, or half of K where the rows are
        contiguous."""
        f = self.f
        gemm = self.gemm
        source = self.gemm.sources[0]
        number = f.div(f.sub(j, self.j0), gemm.t.columns)
        next_row = f.add(self.row, self.height)
        k = self.depth.first
        step: Int = source.itemsize
        if gemm.forms[0] == "transpose":
            next_row = f.add(next_row, f.rem(number, 16))
            step = source.itemsize * gemm.t.lanes
        else:
            # four calls: the lines of the first rows, then those of the last
            half = f.ceildiv(self.depth.size, 2)
            first = f.icmp("slt", number, 2)
            next_row = f.add(next_row, f.select(first, "i64", 0, gemm.heights[0] - 1))
            k = f.muladd(f.rem(number, 2), half, k)
            step = f.mul("%a_k", source.itemsize)
        at = f.muladd(next_row, "%a_free", f.mul(k, "%a_k"))
        return [f"ptr {f.gep(source.kind, '%A', at)}", f"i64 {step}"]

    def next_of_b(self, j: Int, coming: str) -> str:
        """The line of B's next block that a call asks for."""
        f = self.f
        gemm = self.gemm
        calls = f.ceildiv(f.sub(self.j1, self.j0), gemm.t.columns)
        before = f.mul(f.sub(self.i, "%tile0"), calls)
        call = f.add(before, f.div(f.sub(j, self.j0), gemm.t.columns))
        along_k = gemm.forms[1] == "transpose"
        if gemm.kept:
            line = f.mul(f.min(call, f.sub(self.j1, self.j0)), self.depth.size)
        else:
            lines = f.sub(self.j1, self.j0) if along_k else self.depth.size
            line = f.mul(f.min(call, lines), "%b_free" if along_k else "%b_k")
        return f"ptr {f.gep(gemm.sources[1].kind, coming, line)}"
