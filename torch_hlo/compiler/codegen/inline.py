"""Functions whose loops are written by hand and whose element arithmetic comes from the scalar
tables.

    f = Writer(program, "count", "i64 lo, i64 hi, ptr x")
    less, = apply(f, x["to_apply"], [a, b])        # a scalar computation on register operands, one
                                                   # element or W lanes at a time
    name = f.define()
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch_hlo.hlo.ir import Computation, Instruction, Size

from ..llvm import Function, Int, Unit, scalar
from ..llvm.scalar import STORAGE, Value
from . import index as ix
from .kernel import Kernel
from .kernel_values import Level
from .loop_plan import Planner
from .program import Program


class Writer(Function):
    """A Function of a program that can use the scalar tables."""

    def __init__(
        self, program: Program, name: str, params: Sequence[tuple[str, str]] | str
    ) -> None:
        super().__init__(name, params)
        self.program = program
        self.unit = Unit(program.target)

    @contextmanager
    def loop(
        self,
        low: Int,
        high: Int,
        step: Int = 1,
        carry: Sequence[tuple[str, Int]] = (),
        known_nonempty: bool = False,
    ) -> Iterator[Any]:
        if self.program.target.item_per_call and (low, high) == ("%lo", "%hi"):
            yield "%lo"  # a thread has one item: see compiler/gpu/gpu_program.py
            return
        with super().loop(low, high, step, carry, known_nonempty) as state:
            yield state

    def define(self) -> str:
        """Add the function to the program; returns the name to call it by."""
        self.unit.declare(self.program)
        return self.program.define(self)


def apply(
    f: Writer, computation: Computation, values: Sequence[Value], lanes: int = 1
) -> list[Value]:
    """The results of a computation on scalars, applied to `values` (register operands, `lanes`
    wide)."""
    kernel = Kernel(f.program.target, lanes, [], outputs=0)
    kernel.unit = f.unit
    kernel.level = Level(0, f.lines, f.block, lanes, f.unit)
    kernel.levels = [kernel.level]
    kernel.e = kernel.level.emit
    for p, v in zip(computation.params, values, strict=True):
        kernel.level.cache[p, ()] = v
    results = [kernel.value(r, ()) for r in computation.results]
    f.block = kernel.level.label
    return results


class Values:
    """Elements of instructions that are computed from arrays in memory, at indices that a Writer's
    loops give.

        v = Values(f, {p: "%by0"}, x, (i, None))       # within the loop over i: what changes with
                                                       # it alone is written here
        with f.loop(0, n, lanes) as j: v.element(x, (i, j), lanes)

    `leaves`: pointer of each instruction in memory. All sizes are numbers.
    """

    def __init__(
        self,
        f: Writer,
        leaves: Mapping[Instruction, str],
        x: Instruction,
        outer: Sequence[Int | None],
    ) -> None:
        self.f = f
        self.leaves = leaves
        kernel = self._kernel({}, 1)
        index = [
            (
                ix.of(ix.variable("loop", (f"inner{d}",), n, 1))
                if i is None
                else self._index(kernel, i, n)
            )
            for d, (i, n) in enumerate(zip(outer, x.dims, strict=True))
        ]
        planner = Planner(list(leaves))
        planner.value(x, tuple(index))
        for v in ix.variables(planner.accesses):  # addresses that are read from memory
            if v.kind == "value" and v.depth == 0:
                kernel.scalar(ix.of(v))
        self.cache = kernel.levels[0].cache

    def element(
        self,
        x: Instruction,
        index: Sequence[Int],
        lanes: int = 1,
        mask: str | None = None,
    ) -> Value:
        """The element at `index`, or `lanes` neighbours along the last dimension, those in
        `mask`."""
        kernel = self._kernel(self.cache, lanes, mask)
        at = [self._index(kernel, i, n) for i, n in zip(index[: len(index) - (lanes > 1)], x.dims)]
        if lanes > 1:
            first = index[-1]
            assert isinstance(first, str)
            kernel.lane_var = kernel.named(first, x.dims[-1], 1)
            at.append(ix.of(kernel.lane_var))
        return kernel.value(x, tuple(at))

    def _kernel(self, cache: dict[Any, Any], lanes: int, mask: str | None = None) -> Kernel:
        f = self.f
        kernel = Kernel(f.program.target, lanes, [], outputs=0)
        kernel.unit = f.unit
        kernel.leaves = dict(self.leaves)
        kernel.ragged = True
        kernel.levels = [Level(0, f.lines, f.block, 1, f.unit)]
        # what is written from here on may be within a loop, and unknown after it
        kernel.levels[0].cache = dict(cache)
        if lanes > 1:
            kernel.levels.append(Level(1, f.lines, f.block, lanes, f.unit, mask))
        kernel.level = kernel.levels[-1]
        kernel.e = kernel.level.emit
        return kernel

    def _index(self, kernel: Kernel, i: Int, extent: Size) -> ix.Index:
        if isinstance(i, int):
            return ix.constant(i)
        return ix.of(kernel.named(i, extent, 0))


def load(
    f: Writer,
    dtype: str,
    pointer: str,
    index: Int,
    lanes: int = 1,
    mask: str | None = None,
    align: int = 0,
) -> Value:
    """Element `index` (and the following lanes) of an array of `dtype`, as register operands.
    `align`: of the first, when more than an element's."""
    storage = STORAGE[dtype]
    if storage.parts == 1:
        return load_real(f, dtype, pointer, index, lanes, mask, align)
    assert lanes == 1, "complex elements are handled one at a time"
    e = f.emit()
    t = e.typed(storage.memory)
    raw = [t.load(f.gep(storage.memory, pointer, f.muladd(index, 2, i))) for i in range(2)]
    real, imaginary = (scalar.decode(e, dtype, r) for r in raw)
    return real, imaginary


def load_real(
    f: Writer,
    dtype: str,
    pointer: str,
    index: Int,
    lanes: int = 1,
    mask: str | None = None,
    align: int = 0,
) -> str:
    """`load` of a type that is not complex."""
    storage = STORAGE[dtype]
    e = f.emit(lanes)
    raw = e.typed(storage.memory).load(f.gep(storage.memory, pointer, index), align, mask)
    return scalar.decode(e, dtype, raw)


def store(
    f: Writer,
    dtype: str,
    value: Value,
    pointer: str,
    index: Int,
    lanes: int = 1,
    mask: str | None = None,
    align: int = 0,
) -> None:
    """Write register operands to element `index` (and the following lanes). `align`: as for
    load."""
    storage = STORAGE[dtype]
    e = f.emit(lanes)
    t = e.typed(storage.memory)
    if storage.parts == 2:
        for i, v in enumerate(value):
            t.store(
                scalar.encode(e, dtype, v),
                f.gep(storage.memory, pointer, f.muladd(index, 2, i)),
            )
    else:
        t.store(
            scalar.encode(e, dtype, scalar.single(value)),
            f.gep(storage.memory, pointer, index),
            align,
            mask,
        )


def move(
    f: Function,
    dtype: str,
    target: str,
    target_index: Int,
    source: str,
    source_index: Int,
) -> None:
    """Copy one element without decoding it."""
    storage = STORAGE[dtype]
    kind = f"i{storage.bytes * 8 * storage.parts}"
    value = f.load(kind, f.gep(kind, source, source_index), storage.bytes)
    f.store(kind, value, f.gep(kind, target, target_index), storage.bytes)
