"""Cholesky and LU factors of real matrices and triangular solves, in blocks: what a block of columns does to all that follow is one product.

Everything is row-major and in place in the result. `subtract_product` keeps a tile of C in registers; its left operand is read an element at a
time, so that either of its strides may be long.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

from torch_hlo.compiler.codegen.emit import BITS
from torch_hlo.compiler.codegen.function import Int
from torch_hlo.compiler.codegen.gemm import KIND_SUFFIX, lane_mask, splat
from torch_hlo.compiler.codegen.indexing import Sizes
from torch_hlo.compiler.codegen.inline import Writer, load, store
from torch_hlo.hlo.ir import Instruction

KINDS = {"f32": "float", "f64": "double"}
BLOCK = 16  # columns of a panel
TILE_ROWS, TILE_VECTORS = 6, 2


@dataclass(frozen=True, slots=True)
class Matrix:
    """Elements of an array from number `base` on, `row` and `column` apart."""

    pointer: str
    base: Int
    row: Int
    column: Int = 1

    def at(self, f: Writer, i: Int, j: Int) -> Int:
        return f.add(self.base, f.add(f.mul(i, self.row), f.mul(j, self.column)))

    def part(self, f: Writer, i: Int, j: Int) -> Matrix:
        return Matrix(self.pointer, self.at(f, i, j), self.row, self.column)

    @property
    def turned(self) -> Matrix:
        return Matrix(self.pointer, self.base, self.column, self.row)


class Kernel:
    """What is done to rows, `lanes` elements at a time."""

    def __init__(self, f: Writer, dtype: str) -> None:
        self.f, self.dtype, self.kind, self.lanes = f, dtype, KINDS[dtype], f.program.target.lanes(BITS[KINDS[dtype]])
        self.vector = f"<{self.lanes} x {self.kind}>"
        self.t = f.emit().typed(self.kind)

    def get(self, m: Matrix, i: Int, j: Int) -> str:
        return load(self.f, self.dtype, m.pointer, m.at(self.f, i, j))

    def put(self, value: str, m: Matrix, i: Int, j: Int) -> None:
        store(self.f, self.dtype, value, m.pointer, m.at(self.f, i, j))

    @contextmanager
    def strips(self, columns: Int):
        """(first column, mask) of vectors that cover the columns."""
        with self.f.loop(0, columns, self.lanes) as c:
            yield c, lane_mask(self.f, self.lanes, c, columns)

    def map_rows(self, fn: Callable, columns: Int, *rows: Matrix) -> None:
        """Rows := fn(vectors of them), a list with a vector per row that is written, first rows first."""
        f = self.f
        with self.strips(columns) as (c, mask):
            at = [f.add(m.base, c) for m in rows]
            values = [load(f, self.dtype, m.pointer, i, self.lanes, mask) for m, i in zip(rows, at, strict=True)]
            for v, m, i in zip(fn(*values), rows, at, strict=False):
                store(f, self.dtype, v, m.pointer, i, self.lanes, mask)

    def subtract_product(self, c: Matrix, a: Matrix, b: Matrix, rows: Int, columns: Int, depth: Int) -> None:
        """c -= a b; rows of b and c are contiguous."""
        f, width = self.f, TILE_VECTORS * self.lanes
        whole = f.mul(f.div(columns, width), width)
        with f.loop(0, whole, width) as j:
            self._column_strip(c, a, b, rows, j, depth, [None] * TILE_VECTORS)
        with f.loop(whole, columns, self.lanes) as j:
            self._column_strip(c, a, b, rows, j, depth, [lane_mask(f, self.lanes, j, columns)])

    def _column_strip(self, c: Matrix, a: Matrix, b: Matrix, rows: Int, j: Int, depth: Int, masks: list) -> None:
        f = self.f
        whole = f.mul(f.div(rows, TILE_ROWS), TILE_ROWS)
        with f.loop(0, whole, TILE_ROWS) as i:
            self._tile(c.part(f, i, j), a.part(f, i, 0), b.part(f, 0, j), TILE_ROWS, depth, masks)
        with f.loop(whole, rows) as i:
            self._tile(c.part(f, i, j), a.part(f, i, 0), b.part(f, 0, j), 1, depth, masks)

    def _tile(self, c: Matrix, a: Matrix, b: Matrix, rows: int, depth: Int, masks: list) -> None:
        f, v, n = self.f, self.vector, len(masks)
        suffix = f"v{self.lanes}{KIND_SUFFIX[self.kind]}"
        with f.loop(0, depth, carry=[(v, "zeroinitializer")] * (rows * n)) as k:
            right = [load(f, self.dtype, b.pointer, b.at(f, k.index, s * self.lanes), self.lanes, mask) for s, mask in enumerate(masks)]
            k.next = []
            for i in range(rows):
                left = splat(f, self.kind, self.lanes, self.get(a, i, k.index))
                k.next += [f.op(f"call {v} @llvm.fma.{suffix}({v} {left}, {v} {x}, {v} {k.vars[i * n + s]})") for s, x in enumerate(right)]
        for i in range(rows):
            for s, mask in enumerate(masks):
                at = c.at(f, i, s * self.lanes)
                old = load(f, self.dtype, c.pointer, at, self.lanes, mask)
                store(f, self.dtype, f.op(f"fsub {v} {old}, {k.vars[i * n + s]}"), c.pointer, at, self.lanes, mask)

    def divide_row(self, row: Matrix, columns: Int, by: str) -> None:
        divisor = splat(self.f, self.kind, self.lanes, by)
        self.map_rows(lambda v: [self.f.op(f"fdiv {self.vector} {v}, {divisor}")], columns, row)

    def substitute(self, a: Matrix, x: Matrix, rows: Int, columns: Int, lower: bool, unit: bool) -> None:
        """x := a^-1 x, a triangular: forward when it is lower, else from the last row on."""
        f = self.f
        with f.loop(0, rows, BLOCK) as start:
            count = f.min(BLOCK, f.sub(rows, start))
            first = start if lower else f.sub(f.sub(rows, start), count)
            solved, many = (0, start) if lower else (f.add(first, count), start)
            self.subtract_product(x.part(f, first, 0), a.part(f, first, solved), x.part(f, solved, 0), count, columns, many)
            with f.loop(0, count) as step:
                i = f.add(first, step if lower else f.sub(f.sub(count, 1), step))
                near = first if lower else f.add(i, 1)
                self.subtract_product(x.part(f, i, 0), a.part(f, i, near), x.part(f, near, 0), 1, columns, step)
                if not unit:
                    self.divide_row(x.part(f, i, 0), columns, self.get(a, i, i))

    def cholesky(self, x: Matrix, n: Int) -> None:
        """The lower triangle of x := its factor. Above the diagonal is what is already known of the factor's transpose, row by row as products want it."""
        f = self.f
        with f.loop(0, n, BLOCK) as start:
            end = f.min(f.add(start, BLOCK), n)
            with f.loop(start, end) as k:
                below = f.add(k, 1)
                square = self.get(x, k, k)
                # sqrt(0) would divide by zero: XLA's answer for a singular matrix is nan too
                valid = f.op(f"fcmp ogt {self.kind} {square}, 0.0")
                pivot = f.select(valid, self.kind, self.t.sqrt(square), self.t.const(float("nan")))
                self.put(pivot, x, k, k)
                with f.loop(below, n) as i:
                    value = f.op(f"fdiv {self.kind} {self.get(x, i, k)}, {pivot}")
                    self.put(value, x, i, k)
                    self.put(value, x, k, i)
                with f.loop(below, n) as i:
                    self._eliminate(x, i, k, f.min(f.sub(end, below), f.sub(i, k)), self.get(x, i, k))
            with f.loop(end, n, BLOCK) as i:  # no further right than the block that holds the diagonal
                rows = f.min(BLOCK, f.sub(n, i))
                self.subtract_product(x.part(f, i, end), x.part(f, i, start), x.part(f, start, end), rows, f.sub(f.add(i, rows), end), f.sub(end, start))

    def _eliminate(self, x: Matrix, i: Int, k: Int, columns: Int, factor: str) -> None:
        """Row i, from column k + 1 on, loses `factor` times row k."""
        f, v = self.f, self.vector
        minus = splat(f, self.kind, self.lanes, f.op(f"fneg {self.kind} {factor}"))
        fma = f"@llvm.fma.v{self.lanes}{KIND_SUFFIX[self.kind]}"
        self.map_rows(lambda own, by: [f.op(f"call {v} {fma}({v} {minus}, {v} {by}, {v} {own})")], columns,
                      x.part(f, i, f.add(k, 1)), x.part(f, k, f.add(k, 1)))  # fmt: skip

    def lu(self, x: Matrix, m: Int, n: Int, steps: Int, pivots: str, order: str) -> None:
        """x := L below and U on and above the diagonal, with LAPACK's pivots: `pivots` as s64 from 0, `order` the rows' numbers, which they permute."""
        f = self.f
        with f.loop(0, m) as i:
            f.store("i64", i, f.gep("i64", order, i))
        with f.loop(0, steps, BLOCK) as start:
            end = f.min(f.add(start, BLOCK), steps)
            with f.loop(start, end) as k:
                p = self._pivot(x, k, m)
                f.store("i64", p, f.gep("i64", pivots, k))
                with f.when(f.icmp("ne", p, k)):
                    self.map_rows(lambda a, b: [b, a], n, x.part(f, k, 0), x.part(f, p, 0))
                    at = [f.gep("i64", order, i) for i in (k, p)]
                    values = [f.load("i64", q) for q in at]
                    for q, value in zip(at, reversed(values), strict=True):
                        f.store("i64", value, q)
                pivot = self.get(x, k, k)
                divisor = f.select(f.op(f"fcmp oeq {self.kind} {pivot}, 0.0"), self.kind, self.t.const(1.0), pivot)
                with f.loop(f.add(k, 1), m) as i:
                    factor = f.op(f"fdiv {self.kind} {self.get(x, i, k)}, {divisor}")
                    self.put(factor, x, i, k)
                    self._eliminate(x, i, k, f.sub(f.sub(end, 1), k), factor)
            right = f.sub(n, end)
            diagonal, above = x.part(f, start, start), x.part(f, start, end)
            with f.loop(1, f.sub(end, start)) as i:
                self.subtract_product(above.part(f, i, 0), diagonal.part(f, i, 0), above, 1, right, i)
            self.subtract_product(x.part(f, end, end), x.part(f, end, start), above, f.sub(m, end), right, f.sub(end, start))

    def _pivot(self, x: Matrix, k: Int, m: Int) -> str:
        """The row, from k on, with the largest element in column k; the first NaN is larger than any number."""
        f = self.f
        with f.loop(f.add(k, 1), m, carry=[(self.kind, self.t.abs(self.get(x, k, k))), ("i64", k)]) as i:
            best, row = i.vars
            size = self.t.abs(self.get(x, i.index, k))
            ordered = f.op(f"fcmp ord {self.kind} {best}, {best}")
            larger = f.op(f"and i1 {f.op(f'fcmp ugt {self.kind} {size}, {best}')}, {ordered}")
            i.next = [f.select(larger, self.kind, size, best), f.select(larger, "i64", i.index, row)]
        return i.vars[1]


def emit_lu(program, x: Instruction) -> None:
    """(packed factors, pivots from 0, permutation) of each matrix of a batch, a matrix per item."""
    a = x.operands[0]
    *batch, m, n = a.shape.dims
    f = Writer(program, "lu", [("i64", "lo"), ("i64", "hi"), ("ptr", "a"), ("ptr", "x"), ("ptr", "pivots"), ("ptr", "order")])
    kernel, size = Kernel(f, a.shape.dtype), Sizes(f)
    rows, columns = size(m), size(n)
    steps, elements = f.min(rows, columns), f.mul(rows, columns)
    with f.loop("%lo", "%hi") as item:
        base = f.mul(item, elements)
        kernel.map_rows(lambda own, v: [v], elements, Matrix("%x", base, 1), Matrix("%a", base, 1))
        pivots, order = (f.gep("i64", p, f.mul(item, k)) for p, k in (("%pivots", steps), ("%order", rows)))
        kernel.lu(Matrix("%x", base, columns), rows, columns, steps, pivots, order)
    usual = [d if isinstance(d, int) else 64 for d in (m, n)]
    pointers = [program.pointer(a), *(program.at(program.place(x, i)) for i in range(3))]
    program.parallel(f.define(), [f"ptr {p}" for p in pointers] + size.arguments(program), program.size(math.prod(batch)), cost=100 + 0.1 * usual[0] * usual[1] * min(usual))
