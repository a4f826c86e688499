"""Products on AMX tiles: C[m, n] = sum_k A[m, k] B[k, n] of bf16 with f32 sums, or of bytes with
i32 sums. Other results are an epilogue's affair.

A register tile is 16 rows of 64 bytes. The micro-kernel holds 32 x 32 of C in four tiles; a step
takes 64 bytes of K from 32 rows of A and 32 columns of B: two tiles of A ([16 rows][64 bytes of k])
and two of B ([16 groups of k][16 columns][group], a group is 4 bytes). Packing brings any operand
into a sequence of such tiles, padded with zeros along K.

A step takes 64 cycles of the tile units; on random data 33 to 40 ns as long as one operand comes
from L1 and the other from L2, 43 when both come from L2. So a block of B stays in L2 and is read
past L1 (tileloaddt1), A is packed in panels of PANEL_STEPS steps, and while a panel is multiplied
the rows of the next one are asked for.

A product whose right operand is contiguous along K (a layer's weights) may be computed transposed:
then packing the weights, the larger operand, only copies, and nothing of them goes back to memory.
It pays while the other operand stays in L2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Size, ceildiv

from ..llvm import Function, Int
from ..thresholds import (
    AMX_B_BYTES,
    AMX_COLUMNS,
    AMX_FINISHED,
    AMX_ROWS_AHEAD,
    AMX_TOGETHER,
    AMX_TURNED,
    K_BLOCK,
    K_SINGLE,
    PANEL_STEPS,
)
from .amx_kernels import BLOCK, GAP, STEP_BYTES, Element, fetch, micro, pack, turn
from .epilogue import Epilogue
from .gemm import BLOCK_PARAMETERS


@contextmanager
def pieces(f: Function, steps: Int) -> Iterator[tuple[Int, Int]]:
    """The loop over the steps of panels: (first one, number)."""
    each = f.ceildiv(steps, f.ceildiv(steps, PANEL_STEPS))
    with f.loop(0, steps, each) as s:
        yield s, f.min(each, f.sub(steps, s))


def b_panel(f: Function, base: str, s: Int, count: Int, number: Int, panels: Int) -> str:
    """Where steps [s, s + count) of a panel of packed B are: one panel follows the other, as they
    are read."""
    return f.gep("i8", base, f.mul(f.muladd(s, panels, f.mul(number, count)), STEP_BYTES))


class AmxGemm:
    """The same interface as gemm.Gemm, for an `element` of ELEMENTS. With an `epilogue`, K is at
    most K_SINGLE unless B is packed, and C is not used.

    `packed`: which of A and B was packed as a whole by `prepack` functions (K up to K_SINGLE for A
      alone); b_free of a packed B is its number of columns.
    `in_rows`: A has rows along K, whole tiles of them, which are read where they are.
    `transposed`: for a packed B; C is written transposed, element (i, j) at j * ldc + i. `adding`:
      what is in C is added.
    """

    heights = (BLOCK,)

    def __init__(
        self,
        element: Element,
        form_a: str,
        form_b: str,
        packed: tuple[bool, bool] = (False, False),
        transposed: bool = False,
        epilogue: Epilogue | None = None,
        adding: bool = False,
        in_rows: bool = False,
    ) -> None:
        self.element = element
        self.forms = (form_a, form_b)
        self.packed = packed
        self.transposed = transposed
        self.epilogue = epilogue
        self.adding = adding
        self.in_rows = in_rows
        self.reads_rows = form_a == "k" and not packed[0]
        self.functions: dict[str, str] = {}
        kinds = ("packed" if p else form for p, form in zip(packed, self.forms, strict=True))
        flags = f"{'_transposed' * transposed}{'_add' * adding}{'_rows' * in_rows}"
        self.name = f"gemm_amx_{element.name}_{'_'.join(kinds)}{flags}"
        self.extra: tuple[tuple[str, str], ...] = ()
        if epilogue is not None:
            self.extra = (("i64", "first_row"), *epilogue.parameters)
            self.name += f"_{epilogue.name}"
        # scratch memory: a panel of A, a block of B, sums, sums turned
        self._b_at = STEP_BYTES * PANEL_STEPS
        self._sums_at = self._b_at + (0 if packed[1] else AMX_B_BYTES + BLOCK * STEP_BYTES)
        self._turned_at = self._sums_at
        if transposed:
            self._turned_at += 4 * BLOCK * AMX_TOGETHER * AMX_TURNED
        turned = (
            4 * BLOCK * (BLOCK * AMX_TOGETHER + GAP)
            if transposed
            else 4 * BLOCK * (AMX_COLUMNS + GAP)
        )
        self.scratch_bytes = self._turned_at + (turned if epilogue is not None else 0) + 64

    def function(self, make: Callable[..., Function], name: str, *args: object) -> str:
        if name not in self.functions:
            self.functions[name] = make(name, *args).text()
        return name

    def pack(
        self,
        f: Function,
        side: int,
        src: str,
        free: str,
        k: str,
        depth: Int,
        valid: Int,
        to: str,
    ) -> None:
        """Both groups of 16 lanes of a panel; an empty second group is left as it is."""
        e = self.element
        name = self.function(
            pack,
            f"pack_amx_{e.kind}_{'ab'[side]}_{self.forms[side]}",
            "ab"[side],
            self.forms[side],
            e,
        )
        f.call(
            name,
            f"ptr {src}",
            f"i64 {free}",
            f"i64 {k}",
            f"i64 {depth}",
            f"i64 {f.min(valid, 16)}",
            f"ptr {to}",
        )
        with f.when(f.icmp("sgt", valid, 16)):
            second = f.gep(e.kind, src, f.mul(free, 16))
            rest = f.min(f.sub(valid, 16), 16)
            f.call(
                name,
                f"ptr {second}",
                f"i64 {free}",
                f"i64 {k}",
                f"i64 {depth}",
                f"i64 {rest}",
                f"ptr {f.gep('i8', to, 1024)}",
            )

    def block(self) -> str:
        """See Gemm.block; a tile is 32 rows. To be called within `tiles`."""
        f = Function(self.name, [*BLOCK_PARAMETERS, *self.extra], attrs="noinline #0")
        (
            self._transposed_blocks
            if self.transposed
            else self._packed_blocks
            if self.packed[1]
            else self._blocks
        )(f)
        self.functions[self.name] = f.text()
        return self.name

    def _row_tile(
        self,
        f: Function,
        i: Int,
        first_k: Int,
        depth: Int,
        b: tuple[str, Int, Int],
        j0: Int,
        j1: Int,
        more: str,
    ) -> None:
        """Row tile `i` times the columns [j0, j1) of the block of K into C or through the epilogue;
        `b`: (packed B, number of the first panel, panels)."""
        e = self.element
        row = f.mul(i, BLOCK)
        if self.epilogue is None:
            c = f.gep(e.sums, "%C", f.muladd(row, "%ldc", j0))
            return self._panels(f, i, first_k, depth, b, j0, j1, c, "%ldc", more)
        c = f.gep("i8", "%scratch", self._sums_at)
        ldc = AMX_COLUMNS + GAP

        epilogue = self.epilogue

        def finish(first: Int, last: Int) -> None:
            sums = f.gep(e.sums, c, f.sub(first, j0))
            epilogue.call(
                f,
                f.add("%first_row", row),
                f.min(f.sub("%m", row), BLOCK),
                first,
                f.sub(last, first),
                sums,
                ldc,
            )

        self._panels(f, i, first_k, depth, b, j0, j1, c, ldc, more, BLOCK, finish)

    def _panels(
        self,
        f: Function,
        i: Int,
        first_k: Int,
        depth: Int,
        b: tuple[str, Int, Int],
        j0: Int,
        j1: Int,
        c: str,
        ldc: Int,
        more: str,
        room: int = 0,
        finish: Callable[[Int, Int], None] | None = None,
    ) -> None:
        """Sums of row tile `i`, panel by panel of A. `room`: distance of blocks of 32 columns where
        `c` has room for whole ones; 0: it has not. `finish(first, last)` is for columns whose sums
        are complete, while they are in L1."""
        e = self.element
        kernel = self.function(
            micro,
            f"micro_amx_{e.name}{'_ahead' * self.reads_rows}{'_rows' * self.in_rows}",
            e,
            self.reads_rows,
            self.in_rows,
        )
        row = f.mul(i, BLOCK)
        steps = f.ceildiv(depth, e.depth)
        rows = f.sub("%m", row)
        tile = _RowTile(self, f, i, row, rows, first_k, depth, steps, b, j0, j1, c, ldc, room)
        with pieces(f, steps) as (s, count):
            a = tile.packed_a(s, count)
            more_here = f.op(f"or i1 {more}, {f.icmp('ne', s, 0)}")
            coming = tile.next_of_a(s, count) if self.reads_rows else None
            with f.in_blocks(j0, j1, AMX_FINISHED) as (group, end):
                with f.loop(group, end, BLOCK) as j:
                    tile.multiply(kernel, j, s, count, a, more_here, coming)
                if finish is not None:
                    with f.when(f.icmp("sge", f.add(s, count), steps)):
                        finish(group, end)

    def _pack_b(
        self,
        f: Function,
        src: str,
        free: str,
        k: str,
        depth: Int,
        valid: Int,
        base: str,
        numbers: tuple[Int, Int],
        panels: Int,
    ) -> None:
        """Pack the panels of 32 columns with the given numbers (first, end) of `panels` at `base`;
        `src` is the first one's, `valid` counts columns from there.

        Where columns are contiguous, a step of all panels comes before the next step: rows are read
        in long pieces, each page once."""
        e = self.element
        begin, end = numbers

        def pack_panel(j: Int, s: Int, count: Int, first: Int, most: Int) -> None:
            """Elements [first, first + most) of K of panel `j`, part of the piece of `count` steps
            from step `s` on."""
            lane = f.mul(f.sub(j, begin), BLOCK)
            here = f.gep(e.kind, src, f.muladd(first, k, f.mul(lane, free)))
            to = f.gep(
                "i8",
                b_panel(f, base, s, count, j, panels),
                f.mul(f.sub(f.div(first, e.depth), s), STEP_BYTES),
            )
            self.pack(
                f,
                1,
                here,
                free,
                k,
                f.min(most, f.sub(depth, first)),
                f.sub(valid, lane),
                to,
            )

        with pieces(f, f.ceildiv(depth, e.depth)) as (s, count):
            if self.forms[1] == "lane":
                with f.loop(s, f.add(s, count)) as step, f.loop(begin, end) as j:
                    pack_panel(j, s, count, f.mul(step, e.depth), e.depth)
            else:
                with f.loop(begin, end) as j:
                    pack_panel(j, s, count, f.mul(s, e.depth), f.mul(count, e.depth))

    def _columns(self, f: Function, depth: Int, most: int = AMX_COLUMNS) -> Int:
        """How many columns of a packed B of this depth stay in L2."""
        fits = f.div(AMX_B_BYTES // (64 * BLOCK), f.ceildiv(depth, self.element.depth))
        return f.mul(f.max(f.min(fits, most // BLOCK), 1), BLOCK)

    def _transposed_blocks(self, f: Function) -> None:
        """Tiles of A a few at a time, so that rows of C are written in longer pieces."""
        e = self.element
        sums = f.gep("i8", "%scratch", self._sums_at)
        columns = self._columns(f, "%k", AMX_TURNED)
        with f.in_blocks("%n0", "%n1", columns) as (j0, j1):
            b = "%B", f.div(j0, BLOCK), f.ceildiv("%b_free", BLOCK)
            with f.in_blocks("%tile0", "%tile1", AMX_TOGETHER) as (first, last):
                start = f.mul(first, BLOCK)
                count = f.sub(f.min(f.mul(last, BLOCK), "%m"), start)
                with f.loop(first, last) as i:
                    c = f.gep(e.sums, sums, f.mul(f.sub(i, first), BLOCK * AMX_TURNED))
                    self._panels(f, i, 0, "%k", b, j0, j1, c, BLOCK, "false", BLOCK * BLOCK)
                self._finish(f, start, count, j0, j1)

    def _finish(self, f: Function, start: Int, count: Int, j0: Int, j1: Int) -> None:
        """Turn the sums of `count` rows from `start` on, in blocks of 32 x 32, into C or through
        the epilogue."""
        e = self.element
        sums = f.gep("i8", "%scratch", self._sums_at)
        name = self.function(
            turn,
            f"turn_amx{'_masked' * (self.epilogue is None)}",
            self.epilogue is None,
        )
        ld = BLOCK * AMX_TOGETHER + GAP
        turned = f.gep("i8", "%scratch", self._turned_at)
        with f.loop(j0, j1, BLOCK) as j:
            columns = f.min(f.sub(j1, j), BLOCK)
            with f.loop(0, count, BLOCK) as i:
                block = f.gep(e.sums, sums, f.muladd(i, AMX_TURNED, f.mul(f.sub(j, j0), BLOCK)))
                to, ld_to = (
                    (
                        f.gep(e.sums, "%C", f.muladd(j, "%ldc", f.add(start, i))),
                        "%ldc",
                    )
                    if self.epilogue is None
                    else (f.gep(e.sums, turned, i), ld)
                )
                f.call(
                    name,
                    f"ptr {block}",
                    f"ptr {to}",
                    f"i64 {ld_to}",
                    f"i64 {f.min(f.sub(count, i), BLOCK)}",
                    f"i64 {columns}",
                )
            if self.epilogue is not None:
                self.epilogue.call(f, f.add("%first_row", j), columns, start, count, turned, ld)

    def _packed_blocks(self, f: Function) -> None:
        columns = self._columns(f, "%k")
        with f.when(f.icmp("sgt", "%k", 0)), f.in_blocks("%n0", "%n1", columns) as (j0, j1):
            b = "%B", f.div(j0, BLOCK), f.ceildiv("%b_free", BLOCK)
            with f.loop("%tile0", "%tile1") as i:
                self._row_tile(f, i, 0, "%k", b, j0, j1, "false")

    def _blocks(self, f: Function) -> None:
        e = self.element
        depth_each = f.select(f.icmp("sle", "%k", K_SINGLE), "i64", f.max("%k", 1), K_BLOCK)
        columns = self._columns(f, depth_each)
        b_base = f.gep("i8", "%scratch", self._b_at)
        with f.in_blocks("%n0", "%n1", columns) as (j0, j1):
            with f.loop(0, "%k", depth_each) as k0:
                depth = f.min(depth_each, f.sub("%k", k0))
                panels = f.ceildiv(f.sub(j1, j0), BLOCK)
                src = f.gep(e.kind, "%B", f.muladd(j0, "%b_free", f.mul(k0, "%b_k")))
                self._pack_b(
                    f,
                    src,
                    "%b_free",
                    "%b_k",
                    depth,
                    f.sub(j1, j0),
                    b_base,
                    (0, panels),
                    panels,
                )
                with f.loop("%tile0", "%tile1") as i:
                    self._row_tile(
                        f,
                        i,
                        k0,
                        depth,
                        (b_base, 0, panels),
                        j0,
                        j1,
                        "true" if self.adding else f.icmp("ne", k0, 0),
                    )

    def prepack(self, side: int) -> str:
        """Define void(lo, hi, src, packed, lanes, lane_stride, k_stride, k): panels [lo, hi) of 32
        lanes of an operand."""
        e = self.element
        name = f"prepack_amx_{e.kind}_{'ab'[side]}_{self.forms[side]}"
        params = (
            "i64 lo, i64 hi, ptr src, ptr packed, i64 lanes, i64 lane_stride, i64 k_stride, i64 k"
        )
        f = Function(name, params)

        def operand(i: Int) -> tuple[str, str, str, str, Int]:
            first = f.mul(i, BLOCK)
            return (
                f.gep(e.kind, "%src", f.mul(first, "%lane_stride")),
                "%lane_stride",
                "%k_stride",
                "%k",
                f.sub("%lanes", first),
            )

        with f.when(f.icmp("sgt", "%k", 0)):
            if side == 0:
                with f.items() as i:
                    self.pack(
                        f,
                        0,
                        *operand(i),
                        f.gep(
                            "i8",
                            "%packed",
                            f.mul(f.mul(i, f.ceildiv("%k", e.depth)), STEP_BYTES),
                        ),
                    )
            else:
                self._pack_b(
                    f,
                    *operand("%lo"),
                    "%packed",
                    ("%lo", "%hi"),
                    f.ceildiv("%lanes", BLOCK),
                )
        self.functions[name] = f.text()
        return name

    def packed_bytes(self, lanes: Size, k: Size) -> Size:
        """Size of the memory that `prepack` fills."""
        return ceildiv(lanes, BLOCK) * ceildiv(k, self.element.depth) * STEP_BYTES


@frozen
class _RowTile:
    """A row tile times columns of a block of K, see `AmxGemm._panels`."""

    gemm: AmxGemm
    f: Function
    i: Int
    row: Int
    rows: Int
    first_k: Int
    depth: Int
    steps: Int
    b: tuple[str, Int, Int]
    j0: Int
    j1: Int
    c: str
    ldc: Int
    room: int

    def packed_a(self, s: Int, count: Int) -> str:
        """Where the micro-kernel reads `count` steps of A from step `s` on."""
        f = self.f
        gemm = self.gemm
        e = self.gemm.element
        if gemm.packed[0]:
            at = f.muladd(self.i, self.steps, s)
            return f.gep("i8", "%A", f.mul(at, STEP_BYTES))
        k = f.mul(s, e.depth)
        at = f.muladd(self.row, "%a_free", f.mul(f.add(self.first_k, k), "%a_k"))
        source = f.gep(e.kind, "%A", at)
        if gemm.in_rows:
            return source
        depth = f.min(f.mul(count, e.depth), f.sub(self.depth, k))
        gemm.pack(f, 0, source, "%a_free", "%a_k", depth, self.rows, "%scratch")
        return "%scratch"

    def next_of_a(self, s: Int, count: Int) -> tuple[str, Int]:
        """What is packed next, more of the same rows or the next ones from the start, and the bytes
        of a row."""
        f = self.f
        e = self.gemm.element
        last = f.icmp("sge", f.add(s, count), self.steps)
        further = f.select(last, "i64", 0, f.mul(f.add(s, count), e.depth))
        k = f.add(self.first_k, further)
        row = f.mul(f.add(self.row, f.select(last, "i64", BLOCK, 0)), "%a_free")
        coming = f.gep(e.kind, "%A", f.muladd(k, "%a_k", row))
        return coming, f.mul("%a_free", e.itemsize)

    def multiply(
        self,
        kernel: str,
        j: Int,
        s: Int,
        count: Int,
        a: str,
        more: str,
        coming: tuple[str, Int] | None,
    ) -> None:
        """Call the micro-kernel on a piece of K of the panel at column `j`."""
        f = self.f
        gemm = self.gemm
        b_base, first, panels = self.b
        number = f.div(f.sub(j, self.j0), BLOCK)
        b = b_panel(f, b_base, s, count, f.add(number, first), panels)
        # the first row tile reads B from memory, where no prefetcher follows tiles: ask for the
        # next panel
        if gemm.packed[1]:
            with f.when(f.icmp("eq", self.i, "%tile0")):
                nbytes = f.mul(count, STEP_BYTES)
                name = gemm.function(fetch, "fetch_amx")
                f.call(name, f"ptr {f.gep('i8', b, nbytes)}", f"i64 {nbytes}")
        # where there is room, tiles are written as a whole, and vectors of the rows that are there
        rows = BLOCK if self.room and gemm.element.instruction else self.rows
        valid = [f"i64 {rows}", f"i64 {BLOCK if self.room else f.sub(self.j1, j)}"]
        ahead: list[str] = []
        if coming is not None:
            rows, row_bytes = coming
            at = f.mul(f.rem(f.mul(number, AMX_ROWS_AHEAD), BLOCK), row_bytes)
            ahead = [f"ptr {f.gep('i8', rows, at)}", f"i64 {row_bytes}"]
            ahead += [f"i64 {row_bytes}"] * gemm.in_rows
        to = f.gep(gemm.element.sums, self.c, f.mul(number, self.room or BLOCK))
        f.call(
            kernel,
            f"ptr {a}",
            f"ptr {b}",
            f"i64 {count}",
            f"ptr {to}",
            f"i64 {self.ldc}",
            *valid,
            f"i1 {more}",
            *ahead,
        )
