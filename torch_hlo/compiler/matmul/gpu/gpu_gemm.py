"""Matrix products on the matrix units of NVIDIA GPUs: a group computes a block of C, k in slices
that are copied ahead of their use.

    C[m, n] = sum_k A[m, k] B[k, n]        any of the four combinations of contiguous dimensions,
        sizes as arguments, any edges

A ring of `stages` slices of both operands is in shared memory (gpu_panel.py): while the warps
multiply one, asynchronous copies fill the others. What is outside of the matrices is copied as
zeros, so nothing else knows of edges. Finished sums pass through shared memory once more, so that a
lane has neighbouring elements of a row, and go to `store`: conversion, or whatever has been fused
with the product.
"""

from collections.abc import Callable, Sequence

from torch_hlo.frozen import frozen

from ...gpu import ptx
from ...gpu.gpu_writer import GpuWriter
from ...gpu.words import Words
from ...llvm import Int
from .gpu_blocks import Place, Store
from .gpu_panel import FRAGMENT, STEPS, Operand, Panel

PADDING = 8  # sums between rows of a warp's results in shared memory: rows begin in different banks


@frozen
class Tile:
    """A block of C: `m` x `n` of a group of threads, `warp_m` x `warp_n` of a warp, or of `team`
    warps that multiply together; `stages` slices in shared memory."""

    m: int
    n: int
    warp_m: int
    warp_n: int
    stages: int
    team: int = 1

    @property
    def warps(self) -> int:
        return self.m // self.warp_m * (self.n // self.warp_n) * self.team

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def name(self) -> str:
        return f"{'w' * (self.team > 1)}{self.m}x{self.n}_{self.stages}"

    @property
    def slice_bytes(self) -> int:
        """Shared memory of one slice of both operands: 128 bytes per row or column."""
        return 128 * (self.m + self.n)

    @property
    def shared(self) -> int:
        """Bytes of shared memory; the results' way out uses the same."""
        return max(
            self.stages * self.slice_bytes,
            self.warps * FRAGMENT * (self.warp_n + PADDING) * 4,
        )

    @property
    def registers(self) -> int:
        """Sums that a thread holds."""
        return self.warp_m * self.warp_n // (32 * self.team)

    @property
    def fragments(self) -> int:
        """Fragments of rows of a warp."""
        return self.warp_m // (FRAGMENT * self.team)


class Product:
    """Writes one group's block of C into `f`, a group function made by blocks.writer; shared memory
    is @SELF.shared."""

    def __init__(self, f: GpuWriter, tile: Tile, a: Operand, b: Operand, lanes: int) -> None:
        """`lanes`: neighbouring columns that `store` is called with; the number of columns is a
        multiple."""
        self.f = f
        self.tile = tile
        self.a = a
        self.b = b
        self.lanes = lanes
        self.w = Words(f)
        self.kind = a.unit.accumulator

    @staticmethod
    def declarations() -> str:
        return "@SELF.shared = external addrspace(3) global [0 x i8], align 1024\n"

    def write(self, at: Place, bases: Sequence[str], store: Store) -> None:
        """The block at `at` of the product of the matrices at pointers `bases`."""
        f = self.f
        w = self.w
        t = self.tile
        shared = ptx.shared_address(f)
        team = w.div(w.narrow("%kernel.t"), 32 * t.team)
        down = t.m // t.warp_m
        self.warp_row = w.mul(w.rem(team, down), t.warp_m)
        self.warp_column = w.mul(w.div(team, down), t.warp_n)
        self._give(shared, self.multiply(shared, at, bases), at.row, at.column, store)

    def panels(self, at: Place, bases: Sequence[str]) -> list[Panel]:
        """Both operands' blocks in shared memory."""
        sides = (
            (self.a, ("%a_m", "%a_k"), at.row, "%m"),
            (self.b, ("%b_n", "%b_k"), at.column, "%n"),
        )
        return [
            Panel(
                self.f,
                o,
                self.tile.threads,
                base,
                self.f.mul(strides[0 if o.along_k else 1], o.unit.itemsize),
                first,
                size,
                at.k,
            )
            for base, (o, strides, first, size) in zip(bases, sides, strict=True)
        ]

    def multiply(self, shared: str, at: Place, bases: Sequence[str]) -> list[str]:
        """The loop over k: the warp's sums by [fragment of rows][half fragment of
        columns][four]."""
        f = self.f
        w = self.w
        t = self.tile
        panels = self.panels(at, bases)
        panels[0].prepare(self.warp_row)
        panels[1].prepare(self.warp_column)
        depth = self.a.depth
        ahead = t.stages - 1
        places = (0, self.a.nbytes)  # of the operands in a slice
        size = self.a.nbytes + self.b.nbytes
        pointers = [p.start for p in panels]
        for stage in range(ahead):
            pointers = self.bring(w.add(shared, stage * size), panels, pointers, stage * depth)
        zero = "0.0" if self.kind == "float" else "0"
        end = w.add(shared, t.stages * size)
        carry = [
            ("i32", shared),
            ("i32", str(w.add(shared, ahead * size))),
            *(("ptr", str(p)) for p in pointers),
            *[(self.kind, zero)] * t.registers,
        ]
        with f.loop(0, at.k, depth, carry=carry) as loop:
            now, to, *rest = loop.vars
            pointers = rest[:2]
            sums = rest[2:]
            ptx.wait_copies(f, ahead - 1)
            # the slice is complete, and all warps are done with the one that is overwritten now
            self.f.barrier()
            pointers = self.bring(to, panels, pointers, f.add(loop.index, ahead * depth))
            for step in range(STEPS):
                left = [
                    panels[0].fragment(w.add(now, places[0]), i, step) for i in range(t.fragments)
                ]
                right = [
                    panels[1].fragment(w.add(now, places[1]), j, step)
                    for j in range(t.warp_n // FRAGMENT)
                ]
                sums = self._step(left, right, sums)
            loop.next = [
                self.next(now, size, end, shared),
                self.next(to, size, end, shared),
                *pointers,
                *sums,
            ]
        ptx.wait_copies(f, 0)
        self.f.barrier()
        totals: list[str] = loop.vars[4:]
        return totals

    def bring(self, to: Int, panels: Sequence[Panel], pointers: Sequence[str], k: Int) -> list[str]:
        """Begin to copy the slice at `k` to shared address `to`."""
        places = (to, self.w.add(to, self.a.nbytes))
        result = [
            p.bring(place, at, k) for p, place, at in zip(panels, places, pointers, strict=True)
        ]
        ptx.commit_copies(self.f)
        return result

    def _row(self, fragment: int, r: Int) -> Int:
        """The row of the warp's part of the block that is row `r` of a fragment."""
        if self.tile.team == 1:
            return self.a.row(self.w, fragment, r)
        member = self.w.rem(self.w.div(self.w.narrow("%kernel.t"), 32), self.tile.team)
        return self.w.add(r, self.w.mul(member, FRAGMENT), fragment * FRAGMENT * self.tile.team)

    def _step(self, left: list[list[str]], right: list[list[str]], sums: list[str]) -> list[str]:
        result = []
        numbers = iter(range(0, len(sums), 4))
        for a in left:
            for b in right:
                for half in range(2):
                    at = next(numbers)
                    result += ptx.matrix_multiply(
                        self.f,
                        self.a.unit,
                        self.b.unit,
                        a,
                        (b[half], b[half + 2]),
                        sums[at : at + 4],
                    )
        return result

    def next(self, slot: str, size: int, end: Int, start: str) -> Int:
        """The stage after the one at `slot`, in a ring."""
        after = self.w.add(slot, size)
        return self.f.select(self.f.icmp("eq", after, end, "i32"), "i32", start, after)

    # -- results
    def _give(self, shared: str, sums: list[str], row: Int, column: Int, store: Store) -> None:
        """Warp by warp and fragment by fragment through shared memory, to lanes that have
        neighbouring columns."""
        f = self.f
        w = self.w
        t = self.tile
        pitch = 4 * (t.warp_n + PADDING)
        thread = w.narrow("%kernel.t")
        lane = w.rem(thread, 32)
        warp = w.div(thread, 32)
        patch = w.muladd(warp, FRAGMENT * pitch, shared)
        g = w.div(lane, 4)
        q = w.rem(lane, 4)
        offset, runs = self.b.runs(w, q)
        own = w.add(patch, w.mul(g, pitch), w.mul(offset, 4))
        # that a warp reads at a time: a power of two that divides the columns
        columns = min(self.lanes * 32, t.warp_n & -t.warp_n)
        height = self.lanes * 32 // columns  # rows
        each = columns // self.lanes
        line = w.div(lane, each)
        across = w.mul(w.rem(lane, each), self.lanes)
        theirs = w.add(patch, w.mul(line, pitch), w.mul(across, 4))
        first_row = f.add(row, w.wide(self.warp_row))
        first_column = f.add(column, w.wide(w.add(self.warp_column, across)))
        fragments = t.warp_n // FRAGMENT
        for i in range(t.fragments):
            mine = sums[i * 8 * fragments :]
            for j in range(fragments):
                base = self.b.row(w, j, 0)
                assert isinstance(base, int)
                for high in range(2):  # rows g, g + 8
                    for place, members in runs:
                        values = [mine[8 * j + 4 * half + 2 * high + c] for half, c in members]
                        ptx.store_shared(
                            f,
                            self.kind,
                            values,
                            w.add(own, 8 * high * pitch + 4 * (base + place)),
                        )
            ptx.meet_warp(f)

            def row_at(r: Int, i: int = i) -> Int:
                return f.add(first_row, w.wide(self._row(i, w.add(line, r))))

            # a loop, because what is fused may be long
            together = min(store.together, FRAGMENT // height)
            with f.loop(0, FRAGMENT, height * together, known_nonempty=True) as step:
                down = w.narrow(step)
                for right in range(0, t.warp_n, columns):
                    at_column = f.add(first_column, right)

                    def finish(r: Int, right: int = right, at_column: Int = at_column) -> None:
                        place = w.add(theirs, w.mul(r, pitch), 4 * right)
                        store(row_at(r), at_column, self.lanes, self._read(place))

                    rows = [w.add(down, n * height) for n in range(together)]
                    self._finish(finish, row_at, rows, height, f.icmp("slt", at_column, "%n"))
            ptx.meet_warp(f)

    def _finish(
        self,
        finish: Callable[[Int], None],
        row_at: Callable[[Int], Int],
        rows: Sequence[Int],
        height: int,
        inside: str,
    ) -> None:
        """`finish(r)` for the `rows` that exist: without branches between them where all do, else
        one by one."""
        f = self.f
        w = self.w
        whole = inside
        for r in rows:
            whole = f.op(f"and i1 {whole}, {f.icmp('slt', row_at(r), '%m')}")
        with f.when(whole):
            for r in rows:
                finish(r)
        if len(rows) == 1:
            return
        some = f.op(f"and i1 {inside}, {f.op(f'xor i1 {whole}, true')}")
        with f.when(some), f.loop(0, len(rows), known_nonempty=True) as n:
            r = w.muladd(w.narrow(n), height, rows[0])
            with f.when(f.icmp("slt", row_at(r), "%m")):
                finish(r)

    def _read(self, address: Int) -> str:
        """The lane's neighbouring sums, as a vector."""
        f = self.f
        n = self.lanes
        each = min(n, 4)
        values = [
            v
            for part in range(0, n, each)
            for v in ptx.load_shared(f, [self.kind] * each, self.w.add(address, 4 * part))
        ]
        return f.typed(self.kind, n).packed(values)
