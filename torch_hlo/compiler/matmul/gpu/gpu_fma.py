"""Blocks of a matrix product by multiply-adds, for every element type and any functions as
operands: exact f32, f64, integers, convolutions.

A group of 256 threads goes through k in slices: while one is multiplied from shared memory, the
next is loaded to registers, and stored to the other of two buffers. A thread has four neighbouring
rows and columns, or 2 x 2 such squares 64 apart, so what it reads of shared memory are vectors that
no two threads of a warp fetch from one bank."""

from collections.abc import Callable
from functools import partial

from torch_hlo.frozen import frozen

from ...gpu.gpu_writer import GpuWriter
from ...llvm import Int
from .gpu_blocks import Store

# threads along a side of a block; neighbouring elements of a thread, and elements it loads per
# slice
SIDE = 16
QUAD = 4
THREADS = SIDE * SIDE
PADDING = 4  # elements between lines of shared memory


@frozen
class Operand:
    """One operand of a product. `load(row, k, lanes)`: `lanes` register values, neighbours along
    the contiguous dimension, which is k with `along_k`; only called for what is inside. `size`:
    rows of the matrix; `first`: of the block. `lanes`: 4 where neighbours are aligned and inside
    together, else 1."""

    load: Callable[[Int, Int, int], list[str]]
    size: Int
    first: Int
    along_k: bool
    lanes: int = 1


class Block:
    """Writes one block of C into `f`, a group function of THREADS threads. `side`: 64 or 128, its
    rows and columns; `kind`: register type of sums."""

    def __init__(self, f: GpuWriter, kind: str, side: int) -> None:
        self.f = f
        self.kind = kind
        self.side = side
        self.slice = THREADS * QUAD // side  # of k: each thread loads a quad of both operands
        self.pitch = side + PADDING
        self.quads = side // (SIDE * QUAD)
        self.t = f.typed(kind)

    def declarations(self) -> str:
        return "".join(
            f"@SELF.{x} = internal addrspace(3) global [{2 * self.slice * self.pitch} x"
            f" {self.kind}] undef, align 16\n"
            for x in "ab"
        )

    def write(self, a: Operand, b: Operand, k: Int, store: Store, lanes: int = 1) -> None:
        """`store` is called with `lanes` (1, 2 or 4) neighbouring columns, of which the matrix has
        a multiple."""
        f = self.f
        t = self.t
        x = f.rem("%kernel.t", SIDE)
        y = f.div("%kernel.t", SIDE)
        length = self.slice * self.pitch
        for name, operand in (("a", a), ("b", b)):
            self._put(name, operand, 0, self._fetch(operand, 0, k))
        self.f.barrier()
        zero = t.const(0)
        count = (QUAD * self.quads) ** 2
        with f.loop(0, k, self.slice, carry=[("i64", "0"), *[(self.kind, zero)] * count]) as loop:
            now, *sums = loop.vars
            after = f.sub(length, now)
            ahead = f.add(loop.index, self.slice)
            fetched = [self._fetch(operand, ahead, k) for operand in (a, b)]
            for i in range(self.slice):
                left, right = (
                    self._take(name, f.add(now, i * self.pitch), place)
                    for name, place in (("a", y), ("b", x))
                )
                sums = [
                    t.fma(p, q, sums[n]) if t.is_float else t.add(t.mul(p, q), sums[n])
                    for n, (p, q) in enumerate((p, q) for p in left for q in right)
                ]
            for name, operand, values in zip("ab", (a, b), fetched, strict=True):
                self._put(name, operand, after, values)
            self.f.barrier()
            loop.next = [after, *sums]
        sums = loop.vars[1:]
        width = QUAD * self.quads
        for r in range(width):
            row = f.add(f.muladd(y, QUAD, a.first), self._place(r))
            with f.when(f.icmp("slt", row, a.size)):
                for c in range(0, width, lanes):
                    column = f.add(f.muladd(x, QUAD, b.first), self._place(c))
                    with f.when(f.icmp("slt", column, b.size)):
                        store(
                            row,
                            column,
                            lanes,
                            f.typed(self.kind, lanes).packed(
                                sums[r * width + c : r * width + c + lanes]
                            ),
                        )

    @staticmethod
    def _place(i: int) -> int:
        """The block's row (or column) that is a thread's i-th, less four times its number."""
        return i // QUAD * SIDE * QUAD + i % QUAD

    # -- slices
    def _places(self, o: Operand) -> list[tuple[Int, Int]]:
        """(row of the block, k of the slice) of what this thread brings: neighbouring threads read
        neighbouring memory."""
        f = self.f
        extent = self.slice if o.along_k else self.side
        result = []
        for part in range(QUAD // o.lanes):
            number = f.mul(f.add("%kernel.t", part * THREADS), o.lanes)
            inner = f.rem(number, extent)
            outer = f.div(number, extent)
            result.append((outer, inner) if o.along_k else (inner, outer))
        return result

    def _fetch(self, o: Operand, base: Int, k: Int) -> list[list[str]]:
        f = self.f
        result = []
        for row, deep in self._places(o):
            at = f.add(o.first, row)
            depth = f.add(base, deep)
            inside = f.op(f"and i1 {f.icmp('slt', at, o.size)}, {f.icmp('slt', depth, k)}")
            result.append(
                f.choose(
                    inside,
                    partial(o.load, at, depth, o.lanes),
                    lambda: [self.t.const(0)] * o.lanes,
                    [self.kind] * o.lanes,
                )
            )
        return result

    def _put(self, name: str, o: Operand, buffer: Int, fetched: list[list[str]]) -> None:
        """Fetched values into shared memory, as [k][row]."""
        f = self.f
        for (row, deep), values in zip(self._places(o), fetched, strict=True):
            if o.lanes > 1 and not o.along_k:
                where = f.add(buffer, f.muladd(deep, self.pitch, row))
                t = f.typed(self.kind, o.lanes)
                t.store(t.packed(values), f.gep(self.kind, f"@SELF.{name}", where), 16)
                continue
            for i, value in enumerate(values):
                where = f.add(buffer, f.muladd(f.add(deep, i), self.pitch, row))
                f.store_at(self.kind, value, f"@SELF.{name}", where)

    def _take(self, name: str, line: Int, thread: Int) -> list[str]:
        """A thread's rows (or columns) at one k."""
        f = self.f
        t = f.typed(self.kind, QUAD)
        result = []
        for q in range(self.quads):
            where = f.add(f.muladd(thread, QUAD, line), q * SIDE * QUAD)
            result += t.unpacked(t.load(f.gep(self.kind, f"@SELF.{name}", where), 16))
        return result
