"""Cholesky and LU factors of real matrices and triangular solves, in blocks: what a block of
columns does to all that follow is one product.

Everything is row-major and in place in the result. `subtract_product` keeps a tile of C in
registers; its left operand is read an element at a time, so that either of its strides may be long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction

from ..codegen import Program, Writer, load_real, store
from ..gather.gather_scatter import Sizes
from ..llvm import BITS, Int, transposed
from ..matmul.product import hint
from .linalg import BLOCK

KINDS = {"f32": "float", "f64": "double"}
TILE_VECTORS = 2


@frozen
class Matrix:
    """Elements of an array from number `base` on, `row` and `column` apart."""

    pointer: str
    base: Int
    row: Int
    column: Int = 1

    def at(self, f: Writer, i: Int, j: Int) -> Int:
        return f.add(self.base, f.muladd(i, self.row, f.mul(j, self.column)))

    def part(self, f: Writer, i: Int, j: Int) -> Matrix:
        return Matrix(self.pointer, self.at(f, i, j), self.row, self.column)

    @property
    def turned(self) -> Matrix:
        return Matrix(self.pointer, self.base, self.column, self.row)


class Kernel:
    """What is done to rows, `lanes` elements at a time."""

    def __init__(self, f: Writer, dtype: str) -> None:
        self.f = f
        self.dtype = dtype
        self.kind = KINDS[dtype]
        target = f.program.target
        # a thread of a GPU has one element: its vectors have no masks
        self.lanes = target.lanes(BITS[self.kind]) if target.computes_in_vectors else 1
        self.vector = f.typed(self.kind, self.lanes).type
        self.t = f.typed(self.kind)
        # sums of two vectors per row in registers; a block is a number of such rows
        self.tile_rows = 8 if f.program.target.vector_bytes == 64 else 4

    def get(self, m: Matrix, i: Int, j: Int) -> str:
        return load_real(self.f, self.dtype, m.pointer, m.at(self.f, i, j))

    def put(self, value: str, m: Matrix, i: Int, j: Int) -> None:
        store(self.f, self.dtype, value, m.pointer, m.at(self.f, i, j))

    def mask(self, first: Int, count: Int) -> str | None:
        """Lanes of the vector from `first` on that are below `count`, where not all are."""
        return self.f.lane_mask(self.lanes, first, count) if self.lanes > 1 else None

    @contextmanager
    def strips(self, columns: Int) -> Iterator[tuple[str, str | None]]:
        """(first column, mask) of vectors that cover the columns."""
        with self.f.loop(0, columns, self.lanes) as c:
            yield c, self.mask(c, columns)

    def map_rows(self, fn: Callable[..., list[str]], columns: Int, *rows: Matrix) -> None:
        """Rows := fn(vectors of them), a list with a vector per row that is written, first rows
        first."""
        f = self.f
        with self.strips(columns) as (c, mask):
            at = [f.add(m.base, c) for m in rows]
            values = [
                load_real(f, self.dtype, m.pointer, i, self.lanes, mask)
                for m, i in zip(rows, at, strict=True)
            ]
            for v, m, i in zip(fn(*values), rows, at, strict=False):
                store(f, self.dtype, v, m.pointer, i, self.lanes, mask)

    def subtract_product(
        self, c: Matrix, a: Matrix, b: Matrix, rows: Int, columns: Int, depth: Int
    ) -> None:
        """c -= a b; rows of b and c are contiguous."""
        for width, strip in self.column_strips(columns):
            with strip as j, self.f.loop(0, rows, self.tile_rows) as i:
                numbers = self._numbers(i, self.f.sub(self.f.sub(rows, i), 1))
                sums = self._sums(
                    a,
                    b.part(self.f, 0, j),
                    numbers,
                    depth,
                    self._masks(width, j, columns),
                )
                self._subtracted(
                    c.part(self.f, 0, j),
                    sums,
                    numbers,
                    self._masks(width, j, columns),
                )

    def column_strips(self, columns: Int) -> list[Any]:
        """(vectors, loop over first columns) of strips: as many wide ones as fit, then vectors, of
        which the last may have fewer columns."""
        f = self.f
        width = TILE_VECTORS * self.lanes
        whole = f.mul(f.div(columns, width), width)
        return [
            (TILE_VECTORS, f.loop(0, whole, width)),
            (1, f.loop(whole, columns, self.lanes)),
        ]

    def _masks(self, width: int, j: Int, columns: Int) -> list[Any]:
        return [None] * width if width > 1 else [self.mask(j, columns)]

    def _numbers(self, first: Int, last: Int, step: int = 1) -> list[Int]:
        """`tile_rows` rows from `first` on, or as many as there are up to `last` rows further,
        which is repeated: as results are stored last rows first, those of the repetitions are
        overwritten."""
        f = self.f
        return [
            f.muladd(f.min(r, last), step, first) if r else first for r in range(self.tile_rows)
        ]

    def _sums(
        self, a: Matrix, b: Matrix, numbers: list[Int], depth: Int, masks: list[Any]
    ) -> list[list[str]]:
        """Vectors of the rows `numbers` of a b: one list per row."""
        f = self.f
        v = self.vector
        n = len(masks)
        rows = [a.part(f, i, 0) for i in numbers]
        with f.loop(0, depth, carry=[(v, "zeroinitializer")] * (len(rows) * n)) as k:
            right = [
                load_real(
                    f,
                    self.dtype,
                    b.pointer,
                    b.at(f, k.index, s * self.lanes),
                    self.lanes,
                    mask,
                )
                for s, mask in enumerate(masks)
            ]
            k.next = []
            for i, row in enumerate(rows):
                left = f.splat(self.kind, self.lanes, self.get(row, 0, k.index))
                k.next += [self.fma(left, x, k.vars[i * n + s]) for s, x in enumerate(right)]
        return [k.vars[i * n : (i + 1) * n] for i in range(len(rows))]

    def _subtracted(
        self,
        c: Matrix,
        sums: list[list[str]],
        numbers: list[Int],
        masks: list[Any],
        after: Callable[[list[list[str]]], list[list[str]]] = lambda rows: rows,
    ) -> None:
        """Rows of c, less the sums, become what `after` makes of them."""
        f = self.f
        places = [[c.at(f, i, s * self.lanes) for s in range(len(masks))] for i in numbers]
        rows = [
            [
                f.op(
                    f"fsub {self.vector}"
                    f" {load_real(f, self.dtype, c.pointer, at, self.lanes, mask)}, {x}"
                )
                for at, x, mask in zip(spots, row, masks, strict=True)
            ]
            for spots, row in zip(places, sums, strict=True)
        ]
        for spots, row in reversed(list(zip(places, after(rows), strict=True))):
            for at, x, mask in zip(spots, row, masks, strict=True):
                store(f, self.dtype, x, c.pointer, at, self.lanes, mask)

    def substitute(
        self, a: Matrix, x: Matrix, rows: Int, columns: Int, lower: bool, unit: bool
    ) -> None:
        """x := a^-1 x, a triangular: forward when it is lower, else from the last row on. What the
        rows of a tile owe each other is settled in registers."""
        f = self.f
        with f.loop(0, rows, self.tile_rows) as many:
            left = f.sub(f.sub(rows, many), 1)
            numbers = self._numbers(many, left) if lower else self._numbers(left, left, -1)
            solved = 0 if lower else f.sub(rows, many)
            inverses = (
                []
                if unit
                else [
                    f.op(f"fdiv {self.kind} {self.t.const(1.0)}, {self.get(a, i, i)}")
                    for i in numbers
                ]
            )

            def settle(tile: list[list[str]]) -> list[list[str]]:
                for s, i in enumerate(numbers):
                    if inverses:
                        by = f.splat(self.kind, self.lanes, inverses[s])
                        tile[s] = [f.op(f"fmul {self.vector} {x}, {by}") for x in tile[s]]
                    for t in range(s + 1, len(numbers)):
                        minus = f.splat(
                            self.kind,
                            self.lanes,
                            f.op(f"fneg {self.kind} {self.get(a, numbers[t], i)}"),
                        )
                        tile[t] = [
                            self.fma(minus, p, q) for p, q in zip(tile[s], tile[t], strict=True)
                        ]
                return tile

            for width, strip in self.column_strips(columns):
                with strip as j:
                    masks = self._masks(width, j, columns)
                    sums = self._sums(
                        a.part(f, 0, solved),
                        x.part(f, solved, j),
                        numbers,
                        many,
                        masks,
                    )
                    self._subtracted(x.part(f, 0, j), sums, numbers, masks, settle)

    def fma(self, a: str, b: str, c: str) -> str:
        return self.f.typed(self.kind, self.lanes).fma(a, b, c)

    def cholesky(self, x: Matrix, n: Int) -> None:
        """The upper triangle of x := U with U^T U = x, of which the upper triangle is read;
        anything may be left in the blocks of the diagonal below it."""
        f = self.f
        with f.loop(0, n, BLOCK) as start:
            count = f.min(BLOCK, f.sub(n, start))
            end = f.add(start, count)
            diagonal = x.part(f, start, start)
            with f.loop(0, count) as k:
                square = self.get(diagonal, k, k)
                # sqrt(0) would divide by zero: XLA's answer for a singular matrix is nan too
                valid = f.op(f"fcmp ogt {self.kind} {square}, 0.0")
                pivot = f.select(valid, self.kind, self.t.sqrt(square), self.t.const(float("nan")))
                inverse = f.splat(
                    self.kind,
                    self.lanes,
                    f.op(f"fdiv {self.kind} {self.t.const(1.0)}, {pivot}"),
                )
                self.map_rows(
                    lambda v: [f.op(f"fmul {self.vector} {v}, {inverse}")],
                    count,
                    diagonal.part(f, k, 0),
                )
                self.put(pivot, diagonal, k, k)
                with f.loop(f.add(k, 1), count) as i:
                    self._eliminate(diagonal, i, k, count, self.get(diagonal, k, i))
            self.substitute(
                diagonal.turned,
                x.part(f, start, end),
                count,
                f.sub(n, end),
                True,
                False,
            )
            # no further left than the block that holds the diagonal
            with f.loop(end, n, BLOCK) as i:
                above = x.part(f, start, i)
                self.subtract_product(
                    x.part(f, i, i),
                    above.turned,
                    above,
                    f.min(BLOCK, f.sub(n, i)),
                    f.sub(n, i),
                    count,
                )

    def _eliminate(
        self,
        x: Matrix,
        i: Int,
        k: Int,
        end: Int,
        factor: str,
    ) -> None:
        """Row i, from column k + 1 to `end`, loses `factor` times row k."""
        minus = self.f.splat(self.kind, self.lanes, f"{self.f.op(f'fneg {self.kind} {factor}')}")
        first = self.f.add(k, 1)
        self.map_rows(
            lambda own, by: [self.fma(minus, by, own)],
            self.f.sub(end, first),
            x.part(self.f, i, first),
            x.part(self.f, k, first),
        )

    def mirror(self, source: Matrix, target: Matrix, n: Int, lower: bool) -> None:
        """The lower (upper) triangle of target := the other one of source, turned, and as much as
        the blocks of the diagonal hold besides."""
        f = self.f
        width = self.lanes
        with f.loop(0, n, width) as i, f.loop(0, f.add(i, 1), width) as j:
            first, other = (j, i) if lower else (i, j)  # of the block's rows in source
            rows, columns = (
                [f.add(b, f.min(r, f.sub(f.sub(n, b), 1))) for r in range(width)]
                for b in (first, other)
            )
            masks = [self.mask(b, n) for b in (other, first)]
            block = []
            for r in rows:
                at = source.at(f, r, other)
                block.append(load_real(f, self.dtype, source.pointer, at, width, masks[0]))
            for r, value in reversed(
                list(zip(columns, transposed(f.op, self.kind, width, block), strict=True))
            ):
                store(
                    f,
                    self.dtype,
                    value,
                    target.pointer,
                    target.at(f, r, first),
                    width,
                    masks[1],
                )

    def lu(
        self,
        x: Matrix,
        m: Int,
        n: Int,
        steps: Int,
        pivots: str,
        order: str,
    ) -> None:
        """x := L below and U on and above the diagonal, with LAPACK's pivots: `pivots` as s64 from
        0, `order` the rows' numbers, which they permute."""
        f = self.f
        with f.loop(0, m) as i:
            f.store_at("i64", i, order, i)
        with f.in_blocks(0, steps, BLOCK) as (start, end):
            with f.loop(start, end) as k:
                p = self._pivot(x, k, m)
                f.store_at("i64", p, pivots, k)
                with f.when(f.icmp("ne", p, k)):
                    self.map_rows(lambda a, b: [b, a], n, x.part(f, k, 0), x.part(f, p, 0))
                    at = [f.gep("i64", order, i) for i in (k, p)]
                    values = [f.load("i64", q) for q in at]
                    for q, value in zip(at, reversed(values), strict=True):
                        f.store("i64", value, q)
                pivot = self.get(x, k, k)
                divisor = f.select(
                    f.op(f"fcmp oeq {self.kind} {pivot}, 0.0"),
                    self.kind,
                    self.t.const(1.0),
                    pivot,
                )
                with f.loop(f.add(k, 1), m) as i:
                    factor = f.op(f"fdiv {self.kind} {self.get(x, i, k)}, {divisor}")
                    self.put(factor, x, i, k)
                    self._eliminate(x, i, k, end, factor)
            right = f.sub(n, end)
            above = x.part(f, start, end)
            self.substitute(x.part(f, start, start), above, f.sub(end, start), right, True, True)
            self.subtract_product(
                x.part(f, end, end),
                x.part(f, end, start),
                above,
                f.sub(m, end),
                right,
                f.sub(end, start),
            )

    def _pivot(self, x: Matrix, k: Int, m: Int) -> str:
        """The row, from k on, with the largest element in column k; the first NaN is larger than
        any number."""
        f = self.f
        with f.loop(
            f.add(k, 1),
            m,
            carry=[(self.kind, self.t.abs(self.get(x, k, k))), ("i64", str(k))],
        ) as i:
            best, row = i.vars
            size = self.t.abs(self.get(x, i.index, k))
            ordered = f.op(f"fcmp ord {self.kind} {best}, {best}")
            larger = f.op(f"and i1 {f.op(f'fcmp ugt {self.kind} {size}, {best}')}, {ordered}")
            i.next = [
                f.select(larger, self.kind, size, best),
                f.select(larger, "i64", i.index, row),
            ]
        found: str = i.vars[1]
        return found


def emit_lu(program: Program, x: Instruction) -> None:
    """(packed factors, pivots from 0, permutation) of each matrix of a batch, a matrix per item."""
    a = x.operand
    *_, m, n = a.dims
    f = Writer(program, "lu", "i64 lo, i64 hi, ptr a, ptr x, ptr pivots, ptr order")
    kernel = Kernel(f, a.dtype)
    size = Sizes(f)
    rows = size(m)
    columns = size(n)
    steps = f.min(rows, columns)
    elements = f.mul(rows, columns)
    with f.items() as item:
        base = f.mul(item, elements)
        kernel.map_rows(lambda own, v: [v], elements, Matrix("%x", base, 1), Matrix("%a", base, 1))
        pivots, order = (
            f.gep("i64", p, f.mul(item, k)) for p, k in (("%pivots", steps), ("%order", rows))
        )
        kernel.lu(Matrix("%x", base, columns), rows, columns, steps, pivots, order)
    run_factors(f, x, size, 100)


def run_factors(f: Writer, x: Instruction, size: Sizes, base_cost: float) -> None:
    """A step that makes the three results of `x`: a function of a matrix of the batch per item."""
    program = f.program
    a = x.operand
    *batch, m, n = a.dims
    usual = [hint(d, 64) for d in (m, n)]
    pointers = [program.pointer(a), *(program.at(program.place(x, i)) for i in range(3))]
    program.parallel(
        f.define(),
        program.arguments(pointers, size.names),
        math.prod(batch),
        cost=base_cost + 0.1 * usual[0] * usual[1] * min(usual),
    )
