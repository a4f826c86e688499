"""Epilogues: what a fusion of kind output makes of the finished sums of a product, tile by tile,
while they are in cache.

    e = epilogue(program, body, product, "f32")      # a function void(row, rows, column, columns,
                                                     # sums, ld, leaves…, results…, sizes…)
    e.form.call(f, row, rows, column, columns, sums, ld)   # in an engine that has
                                                     # `e.form.parameters` among its own

The product's result is seen as a matrix: [batch and free dimensions of the left operand, free
dimensions of the right one]. `sums` points to accumulators of the tile that starts at (row,
column), its rows `ld` elements apart; leaves and results are whole arrays. Every element of a
result is written once, after what the expression reads of it, so a result may be a leaf's memory;
it may also be `sums`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    Computation,
    Dims,
    Instruction,
    Instructions,
    Ints,
    Size,
    build,
    instr,
    postorder,
    rewrite_bottom_up,
)

from ..codegen import Index, Kernel, Planner, Program, index as ix
from ..codegen.loop_plan import widest_bits
from ..llvm import Function, Int, Target
from ..llvm.scalar import STORAGE, Value
from ..thresholds import EXPENSIVE_EPILOGUE


@frozen
class Epilogue:
    """What an engine knows of the function: how many arrays and sizes it is given. Its address is
    an argument: products that differ only in what becomes of their sums share an engine."""

    arrays: int
    sizes: int

    @property
    def name(self) -> str:
        """Part of the engine's."""
        return f"finish{self.arrays}" + (f"_{self.sizes}" if self.sizes else "")

    @property
    def parameters(self) -> tuple[tuple[str, str], ...]:
        """What an engine that calls the function has to be given."""
        return (
            ("ptr", "finish"),
            *(("ptr", f"e{i}") for i in range(self.arrays)),
            *(("i64", f"es{i}") for i in range(self.sizes)),
        )

    def call(
        self,
        f: Function,
        row: Int,
        rows: Int,
        column: Int,
        columns: Int,
        sums: str,
        ld: Int,
    ) -> None:
        tile = [
            f"i64 {row}",
            f"i64 {rows}",
            f"i64 {column}",
            f"i64 {columns}",
            f"ptr {sums}",
            f"i64 {ld}",
        ]
        tile += [f"{kind} %{name}" for kind, name in self.parameters[1:]]
        f.do(f"call void %finish({', '.join(tile)})")


@frozen
class Tiles:
    """`leaves`: numbers of the body's parameters that the function reads. `sizes`: symbolic sizes
    that it is given."""

    name: str
    leaves: Ints
    results: int
    sizes: Dims

    @property
    def form(self) -> Epilogue:
        return Epilogue(len(self.leaves) + self.results, len(self.sizes))


def on_sums(body: Computation, product: Instruction, dtype: str) -> tuple[Computation, Instruction]:
    """(`body` with the product replaced by one more parameter: its accumulators of type `dtype`,
    that parameter)."""
    sums = instr("parameter", (), product.shape.with_dtype(dtype), index=len(body.params))
    value = sums if dtype == product.dtype else build.convert(sums, product.dtype)
    root = (
        rewrite_bottom_up(body.root, lambda x: value if x is product else x)
        if body.root is not product
        else value
    )
    return Computation(body.name, (*body.params, sums), root), sums


@frozen
class Expression:
    """What is made of a product's sums: `results` of the parameter `sums` and the arrays `leaves`,
    all seen as matrices whose rows have the indices `outer` and whose columns have `inner`. `cost`:
    vector instructions per vector; `bits`: of the widest type."""

    sums: Instruction
    leaves: Instructions
    results: Instructions
    outer: Dims
    inner: Dims
    cost: int
    bits: int

    def values(
        self,
        k: Planner | Kernel,
        row: Index,
        column: Index,
        store: Callable[..., None],
    ) -> None:
        """`store(number of the result, result, index of its element in memory, value)` for all
        results at (row, column)."""
        index = (*ix.delinear(row, self.outer), *ix.delinear(column, self.inner))
        dims = self.sums.dims
        own = [ix.regroup(index, dims, x.dims) for x in self.results]
        computed = [k.value(x, at) for x, at in zip(self.results, own, strict=True)]
        for number, (x, at, value) in enumerate(zip(self.results, own, computed, strict=True)):
            store(number, x, ix.linear(at, x.dims) if at else ix.ZERO, value)


def expression(
    body: Computation, product: Instruction, columns: int, dtype: str
) -> Expression | None:
    """The expression of `body`, whose product has `columns` trailing dimensions that are columns
    and sums of type `dtype`; None when it does not go along rows (an operand would be gathered), or
    rows have one element."""
    rest, sums = on_sums(body, product, dtype)
    dims = sums.dims
    outer = dims[: len(dims) - columns]
    inner = dims[len(dims) - columns :]
    if math.prod(inner) == 1:
        return None
    read = set(postorder((rest.root,)))
    leaves = tuple(p for p in rest.params if p in read and p is not sums)
    planner = Planner([*leaves, sums])
    row, column = (
        ix.variable("loop", (f"planned{n}",), math.prod(part), n + 1)
        for n, part in enumerate((outer, inner))
    )
    planned = Expression(sums, leaves, rest.results, outer, inner, 0, 0)
    planned.values(
        planner,
        ix.of(row),
        ix.of(column),
        lambda n, x, element, value: planner.note(element),
    )
    for index in planner.accesses:
        steps = dict(index.terms)
        if steps.get(column, 0) not in (0, 1) or any(
            v.depth == 2 and v is not column for v in steps
        ):
            return None
    return replace(planned, cost=planner.cost, bits=widest_bits(planner.dtypes))


def epilogue(
    program: Program,
    body: Computation,
    product: Instruction,
    columns: int,
    dtype: str,
) -> Tiles | None:
    """The function of an `expression`, if there is one."""
    return program.made(_build, body, product, columns, dtype)


def _build(
    program: Program, body: Computation, product: Instruction, columns: int, dtype: str
) -> Tiles | None:
    e = expression(body, product, columns, dtype)
    if e is None:
        return None
    kernel = _TileKernel(program.target, program.target.lanes(e.bits), e)
    with kernel.rows(math.prod(e.outer)) as r:

        def body_of(lane: Index, carried: object) -> None:
            kernel.lane = lane
            e.values(
                kernel,
                r,
                lane,
                lambda n, x, element, value: kernel.store(
                    kernel.outputs[n], x.dtype, element, value
                ),
            )

        kernel.along_columns(
            r,
            math.prod(e.inner),
            body_of,
            unroll=2 if e.cost <= EXPENSIVE_EPILOGUE else 1,
            compact=e.cost > EXPENSIVE_EPILOGUE,
        )
    numbers = {p: n for n, p in enumerate(body.params)}
    name = kernel.define(
        program,
        "epilogue_" + "_".join(dict.fromkeys(x.op.replace("-", "_") for x in e.results)),
    )
    leaves = tuple(numbers[p] for p in e.leaves)
    return Tiles(name, leaves, len(e.results), tuple(kernel.sizes))


class _TileKernel(Kernel):
    """A kernel over a tile of a matrix; `sums` is read from the tile's own memory."""

    def __init__(self, target: Target, lanes: int, e: Expression) -> None:
        super().__init__(target, lanes, e.leaves, len(e.results))
        self.sums = e.sums
        self.row = ""
        self.lane = ix.ZERO

    def rows(self, extent: Size) -> AbstractContextManager[Index]:
        op = self.level.scalar.op
        return self.loop("%row", op("add i64 %row, %rows"), extent)

    def along_columns(
        self,
        row: Index,
        extent: Size,
        body: Callable[..., None],
        unroll: int,
        compact: bool,
    ) -> None:
        """The loop along a row, inside of that over rows."""
        op = self.level.scalar.op
        skipped = op(f"mul i64 {op(f'sub i64 {self.scalar(row)}, %row')}, %ld")
        start = op(f"sub i64 {skipped}, %column")
        self.row = op(f"getelementptr {STORAGE[self.sums.dtype].memory}, ptr %sums, i64 {start}")
        self.lane_loop(
            "%column",
            op("add i64 %column, %columns"),
            extent,
            body,
            unroll,
            compact=compact,
        )

    def _compute(self, x: Instruction, index: tuple[Index, ...]) -> Value:
        # whatever the shape it is read through, it is the element at this row and lane
        if x is self.sums:
            return self.load(self.row, x.dtype, self.lane)
        return super()._compute(x, index)

    def text(self, name: str) -> str:
        tile = [
            "i64 %row",
            "i64 %rows",
            "i64 %column",
            "i64 %columns",
            "ptr %sums",
            "i64 %ld",
        ]
        return self.definition(name, tile, (*self.leaves.values(), *self.outputs))
