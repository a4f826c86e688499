"""A block of one operand of a product in shared memory: how it is copied there, and how matrix
units read it.

Shared memory is lines of 128 bytes along the operand's contiguous dimension, in chunks of 16 bytes.
Chunk c of line l is at place c xor key(l), so that neither copies nor fragments touch a bank twice
(for 16-bit types it is the 128-byte swizzle of Hopper's units):

    contiguous along k:      a line per row, 128 bytes of k
    contiguous along rows:   slabs of 128 bytes of rows, in each a line per k

A slice of k is 128 bytes deep in both, four instructions of a matrix unit. Where rows are
contiguous and elements are not 16 bits wide, no instruction transposes; a fragment then holds the
block's rows in another order, which `Panel.row` gives and results undo.
"""

from torch_hlo.frozen import frozen

from ...gpu import ptx
from ...gpu.gpu_writer import GpuWriter
from ...gpu.ptx import MatrixUnit
from ...gpu.words import Words
from ...llvm import Int

LINE, CHUNK, STEPS = (
    128,
    16,
    4,
)  # bytes; bytes; instructions of a matrix unit per slice of k
FRAGMENT = 16  # rows of the block in one fragment


@frozen
class Operand:
    """`rows`: of the block (m or n); `along_k`: k is the contiguous dimension; `width`: bytes that
    may be copied at a time, by the alignment of rows in memory: 16, 8, 4, or less where copies go
    through registers."""

    unit: MatrixUnit
    along_k: bool
    rows: int
    width: int

    @property
    def depth(self) -> int:
        """Elements of k in a slice."""
        return LINE // self.unit.itemsize

    @property
    def lines(self) -> int:
        return self.rows if self.along_k else self.slabs * self.depth

    @property
    def slabs(self) -> int:
        """Groups of 128 bytes along the rows, when those are contiguous."""
        nbytes = self.rows * self.unit.itemsize
        if nbytes % LINE:
            raise ValueError(
                f"{self.rows} rows of {self.unit.name} are no multiple of {LINE} bytes"
            )
        return nbytes // LINE

    @property
    def nbytes(self) -> int:
        return self.lines * LINE

    @property
    def name(self) -> str:
        return f"{self.unit.name}{'k' if self.along_k else 'r'}{self.width}"

    # -- the order of rows in fragments
    def row(self, w: Words, fragment: int, r: Int) -> Int:
        """The row of the block, counted from the warp's first, that is row `r` (0 … 15) of a
        fragment."""
        if self.along_k or self.unit.itemsize == 2:
            return w.add(r, FRAGMENT * fragment)
        if self.unit.itemsize == 1:
            return w.add(w.mul(w.rem(r, 8), 2), w.div(r, 8), FRAGMENT * fragment)
        high = w.div(w.rem(r, 8), 4)
        half = w.div(r, 8)
        low = w.rem(r, 4)
        return w.add(
            w.mul(high, 16),
            w.mul(half, 4),
            low,
            32 * (fragment // 2) + 8 * (fragment % 2),
        )

    def runs(self, w: Words, t: Int) -> tuple[Int, list[tuple[int, list[tuple[int, int]]]]]:
        """Where the columns of a fragment's two halves (8 columns each) lie that lane 4g + t has
        sums of, when this is the right operand: (a place by the lane, [(place, [(half, column 0 or
        1), …]), …]): columns of one run are neighbours. Add `row(fragment, 0)`."""
        if self.along_k or self.unit.itemsize == 2:
            return w.mul(t, 2), [(0, [(0, 0), (0, 1)]), (8, [(1, 0), (1, 1)])]
        if self.unit.itemsize == 1:
            return w.mul(t, 4), [(0, [(0, 0), (1, 0), (0, 1), (1, 1)])]
        return w.muladd(w.div(t, 2), 16, w.mul(w.rem(t, 2), 2)), [
            (0, [(0, 0), (0, 1)]),
            (4, [(1, 0), (1, 1)]),
        ]

    def key(self, w: Words, line: Int) -> Int:
        """What the chunks of a line are exchanged by: different for the eight lines that are read
        together."""
        if self.along_k or self.unit.itemsize > 1:
            return w.rem(line, 8)
        # lines 4i and 4i + 1 are read together
        return w.muladd(w.rem(w.div(line, 4), 4), 2, w.rem(line, 2))


class Panel:
    """An operand inside a kernel of `threads` threads. `base`: pointer to the matrix; `stride`:
    bytes between its lines in memory; `first`, `size`: the block's first row and the number of rows
    of the matrix; `k`: its depth. All but `base` are i64."""

    def __init__(
        self,
        f: GpuWriter,
        operand: Operand,
        threads: int,
        base: str,
        stride: Int,
        first: Int,
        size: Int,
        k: Int,
    ) -> None:
        self.f, self.o, self.w = f, operand, Words(f)
        self.step = threads * CHUNK // LINE  # lines that all threads copy at a time
        self.k = k
        self.base = base
        if operand.lines % self.step:
            raise ValueError(f"{operand.lines} lines are not copied evenly by {threads} threads")
        w = self.w
        o = operand
        itemsize = operand.unit.itemsize
        thread = w.narrow("%kernel.t")
        chunk = w.rem(thread, 8)
        line = w.div(thread, 8)
        self.to = w.muladd(line, LINE, w.mul(w.xor(chunk, o.key(w, line)), CHUNK))
        self.chunk = w.wide(w.mul(chunk, CHUNK))
        self.line = w.wide(line)
        start: Int
        self.jumps: list[Int] = []  # bytes in memory from the first copy of a thread to the others
        if o.along_k:
            row = f.add(first, self.line)
            start = f.muladd(row, stride, self.chunk)
            self.advance: Int = LINE
            self.ok = [f.icmp("slt", f.add(row, i * self.step), size) for i in range(self.copies)]
            self.jumps = [f.mul(stride, i * self.step) for i in range(self.copies)]
        else:
            inside: Int = self.line
            slab: Int = 0
            if self.step > o.depth:
                inside = f.rem(self.line, o.depth)
                slab = f.div(self.line, o.depth)
            self.line = inside
            across = f.muladd(slab, LINE, self.chunk)
            start = f.muladd(inside, stride, f.muladd(first, itemsize, across))
            self.advance = f.mul(stride, o.depth)
            left = f.sub(f.mul(f.sub(size, first), itemsize), across)
            # (slab, k) from the first copy
            self.places = [divmod(i * self.step, o.depth) for i in range(self.copies)]
            widths = {
                s: w.saturate(f.sub(left, s * LINE), CHUNK)
                for s in dict.fromkeys(s for s, _ in self.places)
            }
            self.widths = [widths[s] for s, _ in self.places]
            self.jumps = [f.muladd(stride, d, s * LINE) for s, d in self.places]
        self.start = f.gep("i8", base, start)

    @property
    def copies(self) -> int:
        """Chunks that a thread copies per slice."""
        return self.o.lines // self.step

    def bring(self, to: Int, pointer: str, k: Int) -> str:
        """Copy the slice that begins at `k` (i64), which `pointer` is at, to shared address `to`.
        Returns the pointer of the next slice."""
        f = self.f
        w = self.w
        o = self.o
        to = w.add(to, self.to)
        left = f.sub(self.k, k)
        if o.along_k:
            inside = w.saturate(f.sub(f.mul(left, o.unit.itemsize), self.chunk), CHUNK)
            valid = [w.where(ok, inside, 0) for ok in self.ok]
        else:
            deep = f.sub(left, self.line)
            valid = [
                w.where(f.icmp("sgt", deep, d), n, 0)
                for (_, d), n in zip(self.places, self.widths, strict=True)
            ]
        copy = self._copy_async if o.width in ptx.COPY_WIDTHS else self._copy
        for i, (jump, nbytes) in enumerate(zip(self.jumps, valid, strict=True)):
            copy(w.add(to, i * self.step * LINE), f.gep("i8", pointer, jump), nbytes)
        return f.gep("i8", pointer, self.advance)

    def _copy_async(self, to: Int, source: str, nbytes: Int) -> None:
        width = self.o.width
        w = self.w
        for part in range(0, CHUNK, width):
            n = nbytes if width == CHUNK else w.min(w.max(w.sub(nbytes, part), 0), width)
            ptx.copy_async(self.f, width, w.add(to, part), self.f.gep("i8", source, part), n)

    def _copy(self, to: Int, source: str, nbytes: Int) -> None:
        """A chunk whose elements are not aligned to 4 bytes, one by one; those outside are read
        from the matrix's first."""
        f = self.f
        w = self.w
        size = self.o.unit.itemsize
        words: list[Int] = [0] * (CHUNK // 4)
        for at in range(0, CHUNK, size):
            ok = w.less(at, nbytes)
            value = f.load(
                f"i{8 * size}",
                f.select(ok, "ptr", f.gep("i8", source, at), self.base),
                size,
            )
            word = w.where(ok, f.op(f"zext i{8 * size} {value} to i32"), 0)
            words[at // 4] = w.muladd(word, 1 << 8 * (at % 4), words[at // 4])
        ptx.store_shared(f, "i32", words, to)

    # -- fragments
    def prepare(self, warp_first: Int) -> None:
        """Compute what the warp's reads have in common. `warp_first`: its first row in the block
        (i32)."""
        w = self.w
        o = self.o
        lane = w.rem(w.narrow("%kernel.t"), 32)
        if o.along_k:
            line = w.rem(lane, 16)
            chunk = w.div(lane, 16)
            self.lines = w.mul(w.add(line, warp_first), LINE)
        else:
            first = w.mul(warp_first, o.unit.itemsize)
            slab = w.mul(w.div(first, LINE), o.depth * LINE)
            chunk = w.div(w.rem(first, LINE), CHUNK)
            if o.unit.itemsize == 2:
                line = w.muladd(w.div(lane, 16), 8, w.rem(lane, 8))
                chunk = w.xor(chunk, w.rem(w.div(lane, 8), 2))
            elif o.unit.itemsize == 1:
                r = w.rem(lane, 8)
                q = w.div(lane, 8)
                line = w.add(
                    w.mul(w.div(r, 2), 4),
                    w.rem(r, 2),
                    w.mul(w.rem(q, 2), 2),
                    w.mul(w.div(q, 2), 16),
                )
            else:
                line = w.rem(lane, 4)
                chunk = w.xor(chunk, w.mul(w.div(lane, 16), 4))
                slab = w.muladd(w.rem(w.div(lane, 4), 4), 4, slab)
            self.lines = w.muladd(line, LINE, slab)
        column = w.mul(w.xor(chunk, o.key(w, line)), CHUNK)
        # the lane's chunk exchanged by a constant
        self.columns = {d: w.xor(column, d) for d in range(0, LINE, CHUNK)}

    def fragment(self, at: Int, i: int, step: int) -> list[str]:
        """Fragment `i` of the warp's rows at instruction `step` of the slice at shared address
        `at`: four registers, rows 0 … 7 and 8 … 15 of the first half of k, then of the second."""
        f = self.f
        w = self.w
        o = self.o
        if o.along_k:
            place = w.add(at, self.lines, self.columns[32 * step])
            return self._rounded(ptx.load_matrices(f, w.add(place, i * FRAGMENT * LINE)))
        depth = o.unit.k
        if o.unit.itemsize == 4:
            base = w.add(at, self.lines)
            parity = i % 2
            registers = []
            for half in range(2):
                for high in range(2):
                    column = self.columns[CHUNK * ((2 * parity + high) ^ (4 * half))]
                    place = w.add(base, column, (i // 2 * o.depth + step * depth + 4 * half) * LINE)
                    registers += ptx.load_shared(f, ["i32"], place)
            return self._rounded(registers)
        slab, inside = divmod(i * FRAGMENT * o.unit.itemsize, LINE)
        place = w.add(at, self.lines, self.columns[inside])
        got = ptx.load_matrices(
            f, w.add(place, (slab * o.depth + step * depth) * LINE), transposed=True
        )
        if o.unit.itemsize == 2:
            return got
        return [
            ptx.permute_bytes(f, got[2 * half], got[2 * half + 1], how)
            for half in range(2)
            for how in (0x6420, 0x7531)
        ]

    def _rounded(self, registers: list[str]) -> list[str]:
        """The unit ignores the low bits of 32-bit operands: round them instead, to nearest with
        ties away from zero."""
        if self.o.unit.name != "tf32":
            return registers
        return [
            ptx.assembly(self.f, "cvt.rna.tf32.f32 $0, $1;", ["i32"], [("i32", r)], effect=False)[0]
            for r in registers
        ]
