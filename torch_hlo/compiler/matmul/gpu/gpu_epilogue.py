"""What a product's kernel does with finished sums, a vector of neighbouring columns at a time:
convert and store, or whatever has been fused.

    finish = Fused(expression)                           # or Plain(dtype)
    f = blocks.writer(…, finish.parameters)
    store = finish.store(f, place, kind)                 # a blocks.Store
    finish.sizes                                         # symbolic sizes that the function got as
                                                         # last arguments
"""

from __future__ import annotations

from dataclasses import field

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Dim, Instruction, Size, product

from ...codegen import Index, Kernel, index as ix
from ...codegen.kernel_values import Level
from ...gpu.gpu_writer import GpuWriter
from ...llvm import Int
from ...llvm.scalar import STORAGE, Value
from ...thresholds import EXPENSIVE_EPILOGUE
from ..epilogue import Expression
from . import gpu_blocks
from .gpu_blocks import Place, Store

TOGETHER = 4  # rows of sums that a thread finishes side by side


@frozen
class Plain:
    """Sums become elements of `dtype` of the array C."""

    dtype: str
    parameters = ()
    sizes = ()

    @property
    def name(self) -> str:
        return self.dtype

    @property
    def bytes(self) -> int:
        """Of the widest element that is read or written along a row."""
        return STORAGE[self.dtype].bytes

    def store(self, f: GpuWriter, at: Place, kind: str) -> Store:
        def write(i: Int, j: Int, lanes: int, sums: str) -> None:
            gpu_blocks.store_sums(
                f,
                self.dtype,
                kind,
                lanes,
                sums,
                "%C",
                f.add(at.c, f.muladd(i, "%c_m", j)),
            )

        return Store(write, TOGETHER)


def _together(cost: int) -> int:
    """Rows side by side of an expression: fewer, the more code it is."""
    return next((n for n in (TOGETHER, 2) if cost * n <= TOGETHER * EXPENSIVE_EPILOGUE), 1)


@frozen
class Fused:
    """Sums go into an expression (epilogue.py), whose leaves and results are further arguments,
    `e0` …, then its symbolic sizes. `apart`: no result lies where a leaf does."""

    e: Expression
    apart: bool = False
    sizes: dict[Dim, str] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        return "_".join(dict.fromkeys(x.op.replace("-", "_") for x in self.e.results))

    @property
    def bytes(self) -> int:
        wide = (x.dtype for x in (*self.e.leaves, *self.e.results) if x.size != 1)
        return max(STORAGE[d].bytes * STORAGE[d].parts for d in wide)

    def store(self, f: GpuWriter, at: Place, kind: str) -> Store:
        first = f.div(at.c, "%c_m")  # row of the whole result that the product's first one is

        def write(i: Int, j: Int, lanes: int, sums: str) -> None:
            kernel = _Element(f, self, lanes, sums)
            kernel.write(f.add(first, i), j)

        return Store(write, _together(self.e.cost))

    @property
    def parameters(self) -> list[tuple[str, str]]:
        leaf = "ptr noalias readonly" if self.apart else "ptr"
        types = [leaf] * len(self.e.leaves) + ["ptr"] * len(self.e.results)
        return [(t, f"e{i}") for i, t in enumerate(types)]


class _Element(Kernel):
    """The expression at one place, written into a function as it stands."""

    def __init__(self, f: GpuWriter, finish: Fused, lanes: int, sums: str) -> None:
        e = finish.e
        super().__init__(f.program.target, lanes, e.leaves, len(e.results))
        names = [f"%e{i}" for i in range(len(e.leaves) + len(e.results))]
        self.leaves = dict(zip(e.leaves, names))
        self.outputs = names[len(e.leaves) :]
        self.f = f
        self.expression = e
        self.sizes = finish.sizes
        self.sums = sums
        self.unit = f.unit
        self.levels = [Level(0, f.lines, f.block, 1, f.unit)]
        self.level = self.levels[0]
        self.e = self.level.emit

    def write(self, row: Int, column: Int) -> None:
        e = self.expression
        places = []
        for name, dims in ((row, e.outer), (column, e.inner)):
            var = ix.variable("loop", (f"%t{self.unit.number()}",), product(dims), 1)
            self._names[var] = str(name)
            places.append(ix.of(var))
        self._enter(self.f.lines, self.f.block, lanes=1)

        def at(lane: Index) -> None:
            e.values(
                self,
                places[0],
                lane,
                lambda n, x, element, value: self.store(self.outputs[n], x.dtype, element, value),
            )

        self.lanes_at(places[1], product(e.inner), at)

    def size(self, size: Size) -> str:
        if isinstance(size, int):
            return str(size)
        if size not in self.sizes:
            self.sizes[size] = f"%es{len(self.sizes)}"
            self.f.params.append(("i64", f"es{len(self.sizes) - 1}"))
        return self.sizes[size]

    def _compute(self, x: Instruction, index: tuple[Index, ...]) -> Value:
        return self.sums if x is self.expression.sums else super()._compute(x, index)
