"""Terms: what attention adds to scores or multiplies weights with, computed block by block where it
is needed.

    # root: an expression of `params`, broadcast to [batch…, rows, columns]
    t = term(program, root, params, (8, 12, 512, 512), log2=True, fill=False)
    # to[i * ld + j] = element (row + i, column + j), f32
    t.call(f, pointers, row, rows, column, columns, to, ld)

Rows are counted over all heads. A mask becomes 0 and -inf, or REPLACED; a bias can be had in units
of log 2. An expression of numbers and arrays (masks of windows, positions times slopes, random
numbers for dropout) is never an array in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    Dim,
    Dims,
    Instruction,
    Instructions,
    Ints,
    Size,
    build as b,
    postorder,
    product,
)

from ..codegen import Kernel, Planner, Program, index as ix
from ..codegen.loop_plan import widest_bits
from ..llvm import Function, Int, Target

REPLACED = math.inf  # added to a score: it is the fill
FLOAT_MAX = 3.4028234663852886e38


@frozen
class Term:
    """`leaves`: numbers of the parameters that are read. `sizes`: symbolic sizes that the function
    is given. `rows`: rows differ."""

    name: str
    leaves: Ints
    sizes: tuple[Dim, ...]
    rows: bool

    def call(
        self,
        f: Function,
        pointers: Sequence[str],
        sizes: dict[Dim, str],
        row: Int,
        rows: Int,
        column: Int,
        columns: Int,
        to: str,
        ld: Int,
    ) -> None:
        block = [
            f"i64 {row}",
            f"i64 {rows}",
            f"i64 {column}",
            f"i64 {columns}",
            f"ptr {to}",
            f"i64 {ld}",
        ]
        f.call(
            self.name,
            *block,
            *(f"ptr {pointers[i]}" for i in self.leaves),
            *(f"i64 {sizes[n]}" for n in self.sizes),
        )


def term(
    program: Program,
    root: Instruction,
    params: Instructions,
    dims: Dims,
    log2: bool,
    fill: bool,
) -> Term:
    """The function of an expression, written once per program. Of a `root` of rank below that of
    `dims` the last dimensions are meant. `fill`: a mask is to replace scores."""
    return program.made(_build, root, params, dims, log2, fill)


def _numbers(x: Instruction, log2: bool, fill: bool) -> Instruction:
    """`x` as numbers to add, f32. In units of log 2 large finite ones stay finite: rows with
    nothing else are their mean."""
    dims = x.dims
    if x.dtype == "pred":
        return b.select(
            x,
            b.full(0.0, "f32", dims),
            b.full(REPLACED if fill else -math.inf, "f32", dims),
        )
    x = x if x.dtype == "f32" else b.convert(x, "f32")
    if not log2:
        return x
    y = b.multiply(x, b.full(1 / math.log(2), "f32", dims))
    infinite = b.full(-math.inf, "f32", dims)
    return b.select(
        b.compare(x, infinite, "EQ"),
        infinite,
        b.maximum(y, b.full(-FLOAT_MAX, "f32", dims)),
    )


def _build(
    program: Program,
    root: Instruction,
    params: Instructions,
    dims: Dims,
    log2: bool,
    fill: bool,
) -> Term:
    x = _numbers(root, log2, fill)
    read = set(postorder((x,)))
    leaves = [p for p in params if p in read]
    *outer, columns = dims
    own = x.dims
    planner = Planner(leaves)
    row, column = (
        ix.variable("loop", (f"planned{n}",), product(part), n + 1)
        for n, part in enumerate((outer, (columns,)))
    )
    planner.value(x, _index(ix.of(row), ix.of(column), outer, own))
    kernel = _TermKernel(program.target, program.target.lanes(widest_bits(planner.dtypes)), leaves)
    op = kernel.level.scalar.op
    with kernel.loop("%row", op("add i64 %row, %rows"), product(outer)) as r:
        op = kernel.level.scalar.op
        skipped = op(f"mul i64 {op(f'sub i64 {kernel.scalar(r)}, %row')}, %ld")
        to = op(
            f"getelementptr float, ptr %p{len(leaves)}, i64 {op(f'sub i64 {skipped}, %column')}"
        )

        def body(lane: ix.Index, carried: list[str]) -> None:
            kernel.store(to, "f32", lane, kernel.value(x, _index(r, lane, outer, own)))

        kernel.lane_loop("%column", op("add i64 %column, %columns"), columns, body, compact=True)
    name = kernel.define(program, "attention_term")
    numbers = {p: n for n, p in enumerate(params)}
    return Term(
        name,
        tuple(numbers[p] for p in leaves),
        tuple(kernel.sizes),
        len(own) > 1 and own[-2] != 1,
    )


def _index(
    row: ix.Index, column: ix.Index, outer: Sequence[Size], own: Sequence[Size]
) -> tuple[ix.Index, ...]:
    """The index of an array of dims `own` that broadcasts to [*outer, columns]."""
    index = (*ix.delinear(row, tuple(outer)), column)
    return tuple(
        ix.ZERO if n == 1 else i for n, i in zip(own, index[len(index) - len(own) :], strict=True)
    )


class _TermKernel(Kernel):
    def __init__(self, target: Target, lanes: int, leaves: Sequence[Instruction]) -> None:
        super().__init__(target, lanes, leaves)
        self.ragged = True

    def text(self, name: str) -> str:
        block = [
            "i64 %row",
            "i64 %rows",
            "i64 %column",
            "i64 %columns",
            f"ptr %p{len(self.leaves)}",
            "i64 %ld",
        ]
        return self.definition(name, block, self.leaves.values())
