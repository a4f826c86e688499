"""Epilogues: what a fusion of kind output makes of the finished sums of a product, tile by tile, while they are in cache.

    e = epilogue(program, body, product, "f32")      # a function void(row, rows, column, columns, sums, ld, leaves…, results…, sizes…)
    e.call(f, row, rows, column, columns, sums, ld)  # in an engine that has `e.parameters` among its own

The product's result is seen as a matrix: [batch and free dimensions of the left operand, free dimensions of the right one]. `sums` points to
accumulators of the tile that starts at (row, column), its rows `ld` elements apart; leaves and results are whole arrays. Every element of a
result is written once, after what the expression reads of it, so a result may be a leaf's memory; it may also be `sums`.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_hlo.compiler.codegen import index as ix
from torch_hlo.compiler.codegen.function import Function, Int
from torch_hlo.compiler.codegen.index import Index
from torch_hlo.compiler.codegen.kernel import Kernel
from torch_hlo.compiler.codegen.plan import Planner, widest_bits
from torch_hlo.compiler.codegen.scalar import STORAGE, Value
from torch_hlo.hlo import build
from torch_hlo.hlo.dim import Size
from torch_hlo.hlo.ir import Computation, Instruction, instr, postorder, rewrite_bottom_up

_EXPENSIVE = 40  # vector instructions of an expression from which on it is written once, always masked


@dataclass(frozen=True, slots=True)
class Epilogue:
    """`leaves`: numbers of the body's parameters that the function reads. `sizes`: symbolic sizes that it is given. `cost`: vector instructions."""

    name: str
    leaves: tuple[int, ...]
    results: int
    sizes: tuple[Size, ...]
    cost: int

    @property
    def parameters(self) -> tuple[tuple[str, str], ...]:
        """What an engine that calls the function has to be given."""
        return (*(("ptr", f"e{i}") for i in range(len(self.leaves) + self.results)), *(("i64", f"es{i}") for i in range(len(self.sizes))))

    def call(self, f: Function, row: Int, rows: Int, column: Int, columns: Int, sums: str, ld: Int) -> None:
        tile = [f"i64 {row}", f"i64 {rows}", f"i64 {column}", f"i64 {columns}", f"ptr {sums}", f"i64 {ld}"]
        f.call("void", self.name, *tile, *(f"{kind} %{name}" for kind, name in self.parameters))


def on_sums(body: Computation, product: Instruction, dtype: str) -> tuple[Computation, Instruction]:
    """(`body` with the product replaced by one more parameter: its accumulators of type `dtype`, that parameter)."""
    sums = instr("parameter", (), product.shape.with_dtype(dtype), index=len(body.params))
    value = sums if dtype == product.shape.dtype else build.convert(sums, product.shape.dtype)
    root = rewrite_bottom_up(body.root, lambda x: value if x is product else x) if body.root is not product else value
    return Computation(body.name, (*body.params, sums), root), sums


def results_of(computation: Computation) -> tuple[Instruction, ...]:
    root = computation.root
    return root.operands if root.op == "tuple" else (root,)


def epilogue(program, body: Computation, product: Instruction, columns: int, dtype: str) -> Epilogue | None:
    """The epilogue of `body`, whose product has `columns` trailing dimensions that are columns; None when its expression does not go along
    rows (an operand would be gathered), or rows have one element."""
    return program.once(("epilogue", body, product, columns, dtype), lambda: _build(program, *on_sums(body, product, dtype), columns))


def _build(program, body: Computation, sums: Instruction, trailing: int) -> Epilogue | None:
    dims = sums.shape.dims
    outer, inner = dims[: len(dims) - trailing], dims[len(dims) - trailing:]
    if ix.product(inner) == 1:
        return None
    results = results_of(body)
    read = set(postorder((body.root,)))
    leaves = [p for p in body.params if p in read and p is not sums]

    def values(k: Planner | Kernel, row: Index, column: Index, store: Callable) -> None:
        index = (*ix.delinear(row, outer), *ix.delinear(column, inner))
        own = [ix.regroup(index, dims, x.shape.dims) for x in results]
        computed = [k.value(x, at) for x, at in zip(results, own, strict=True)]
        for number, (x, at, value) in enumerate(zip(results, own, computed, strict=True)):
            store(number, x, ix.linear(at, x.shape.dims) if at else ix.ZERO, value)

    planner = Planner([*leaves, sums])
    row, column = (ix.variable("loop", (f"planned{n}",), ix.product(part), n + 1) for n, part in enumerate((outer, inner)))
    values(planner, ix.of(row), ix.of(column), lambda n, x, element, value: planner.note(element))
    for index in planner.accesses:
        steps = dict(index.terms)
        if steps.get(column, 0) not in (0, 1) or any(v.depth == 2 and v is not column for v in steps):
            return None
    lanes = program.target.lanes(widest_bits(planner.dtypes))
    kernel = _TileKernel(program.target, lanes, leaves, sums, len(results))
    cost = planner.cost
    with kernel.rows(ix.product(outer)) as r:

        def body_of(lane: Index, carried) -> None:
            kernel.lane = lane
            values(kernel, r, lane, lambda n, x, element, value: kernel.store(kernel.outputs[n], x.shape.dtype, element, value))

        kernel.columns(r, ix.product(inner), body_of, unroll=2 if cost <= _EXPENSIVE else 1, compact=cost > _EXPENSIVE)
    numbers = {p: n for n, p in enumerate(body.params)}
    name = kernel.define(program, "epilogue_" + "_".join(dict.fromkeys(x.op.replace("-", "_") for x in results)))
    return Epilogue(name, tuple(numbers[p] for p in leaves), len(results), tuple(kernel.sizes), cost)


class _TileKernel(Kernel):
    """A kernel over a tile of a matrix; `sums` is read from the tile's own memory."""

    def __init__(self, target, lanes: int, leaves: list[Instruction], sums: Instruction, outputs: int) -> None:
        super().__init__(target, lanes, leaves, outputs)
        self.sums, self.row, self.lane = sums, "", ix.ZERO

    def rows(self, extent: Size):
        op = self.level.scalar.op
        return self.loop("%row", op("add i64 %row, %rows"), extent)

    def columns(self, row: Index, extent: Size, body: Callable, unroll: int, compact: bool) -> None:
        """The loop along a row, inside of that over rows."""
        op = self.level.scalar.op
        skipped = op(f"mul i64 {op(f'sub i64 {self.scalar(row)}, %row')}, %ld")
        start = op(f"sub i64 {skipped}, %column")
        self.row = op(f"getelementptr {STORAGE[self.sums.shape.dtype].memory}, ptr %sums, i64 {start}")
        self.lane_loop("%column", op("add i64 %column, %columns"), extent, body, unroll, compact=compact)

    def _compute(self, x: Instruction, index: tuple[Index, ...]) -> Value:
        if x is self.sums:  # whatever the shape it is read through, it is the element at this row and lane
            return self.load(self.row, x.shape.dtype, self.lane)
        return super()._compute(x, index)

    def text(self, name: str) -> str:
        tile = ["i64 %row", "i64 %rows", "i64 %column", "i64 %columns", "ptr %sums", "i64 %ld"]
        params = [*tile, *(f"ptr {p}" for p in (*self.leaves.values(), *self.outputs)), *(f"i64 {n}" for n in self.sizes.values())]
        return f"define void @{name}({', '.join(params)}) #0 {{\nentry:\n" + "\n".join(self.levels[0].lines) + "\n  ret void\n}\n"
