"""What the attention kernels of the CPU share: the arrays of a head, the bias, working memory, and the function of a range of items."""
from __future__ import annotations

import math as numbers
from dataclasses import replace

from torch_hlo.compiler.codegen.emit import Typed
from torch_hlo.compiler.codegen.function import Int
from torch_hlo.compiler.codegen.gemm import Tile, lane_mask
from torch_hlo.compiler.codegen.inline import Writer, load
from torch_hlo.compiler.codegen.scalar import STORAGE
from torch_hlo.compiler.passes.attention import Attention, Bias
from torch_hlo.hlo.dim import Dim, Size, ceildiv

FLOAT_MAX = 3.4028234663852886e38


def symbolic_sizes(a: Attention) -> list[Dim]:
    """The distinct symbolic sizes and strides of `a`, in the order of the kernel's arguments."""
    strides = [] if a.bias is None else [n for pair in (*a.bias.batch, (a.bias.row, a.bias.column)) for n in pair]
    return list(dict.fromkeys(n for n in (a.rows, a.columns, *strides) if isinstance(n, Dim)))


def named(a: Attention) -> Attention:
    """`a` as the kernel sees it: symbolic sizes are its arguments."""
    names = {n: f"%n{i}" for i, n in enumerate(symbolic_sizes(a))}

    def name(size):
        return names.get(size, size)

    bias = a.bias
    if bias is not None:
        bias = Bias(tuple((name(n), name(s)) for n, s in bias.batch), name(bias.row), name(bias.column))
    return replace(a, rows=name(a.rows), columns=name(a.columns), bias=bias)


def block_of(rows: Size, most: int, step: int) -> int:
    """Query rows of a block: a multiple of `step`, at most about `most`, evenly divided when the number is known."""
    limit = max(most // step, 1) * step
    if not isinstance(rows, int):
        return limit
    return ceildiv(ceildiv(rows, ceildiv(rows, limit)), step) * step


def in_log2(v: Typed, x: str) -> str:
    """A bias in units of log 2. Large finite ones stay finite: rows with nothing else are their mean."""
    y, least = v.mul(x, v.const(1 / numbers.log(2))), v.const(-FLOAT_MAX)
    return v.select(v.cmp("oeq", x, v.const(-numbers.inf)), x, v.select(v.cmp("olt", y, least), least, y))


class AttentionKernel:
    """A kernel under construction. `f` is the function of parallel items; `inputs` and `outputs` name its pointers."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __init__(self, program, a: Attention, t: Tile) -> None:
        self.program, self.a, self.t = program, named(a), t
        names = [*self.inputs, *["bias"] * (a.bias is not None), *["fill"] * a.fill, *self.outputs]
        heap = [] if program.target.threads else ["heap"]
        self.f = Writer(program, f"attention_{a.kind}", [("i64", "lo"), ("i64", "hi"), *(("ptr", n) for n in (*names, *heap)),
                         *(("i64", f"n{i}") for i in range(len(symbolic_sizes(a))))])
        self.e = self.f.emit(t.lanes)
        self.v = self.e.typed("float")
        self.dtype = dict(zip(names, (*a.dtypes, *["f32"] * len(self.outputs)), strict=True))
        self.heap: list[str] = []
        self.heap_bytes = 64

    @classmethod
    def items(cls, a: Attention, t: Tile) -> tuple[Size, Size]:
        """How many items there are, and the query rows of each."""
        raise NotImplementedError

    def item(self, item: Int) -> None:
        raise NotImplementedError

    def define(self) -> tuple[str, int]:
        """The function's name, and the bytes of memory that a range of items takes."""
        f = self.f
        with f.loop("%lo", "%hi") as item:
            self.item(item)
        if not self.program.target.threads:
            f.entry_allocas += self.heap
            return f.define(), self.heap_bytes
        malloc = self.program.symbol("malloc", "declare ptr @malloc(i64)")
        free = self.program.symbol("free", "declare void @free(ptr)")
        f.do(f"call void @{free}(ptr %raw)")
        f.entry_allocas += [f"  %raw = call ptr @{malloc}(i64 {self.heap_bytes})", "  %past = getelementptr i8, ptr %raw, i64 63",
                            "  %heap = call ptr @llvm.ptrmask.p0.i64(ptr %past, i64 -64)", *self.heap]
        return f.define(), self.heap_bytes

    def memory(self, nbytes: int) -> str:
        """Memory of a range of items, 64-byte aligned. From the heap: stacks of threads may be as small as 2 MB."""
        name = self.f.fresh("s")
        self.heap.append(f"  {name} = getelementptr i8, ptr %heap, i64 {self.heap_bytes - 64}")
        self.heap_bytes += ceildiv(nbytes, 64) * 64
        return name

    def floats(self, count: int) -> str:
        return self.memory(4 * count)

    def at(self, pointer: str, index: Int, width: int, dtype: str = "f32") -> str:
        """Row `index` of a matrix with rows of `width` elements."""
        return self.f.gep(STORAGE[dtype].memory, pointer, self.f.mul(index, width))

    def row(self, name: str, index: Int, width: int) -> str:
        """The same for the array `name`."""
        return self.at(f"%{name}", index, width, self.dtype[name])

    def zero(self, pointer: str, count: Int) -> None:
        self.f.do(f"call void @llvm.memset.p0.i64(ptr {pointer}, i8 0, i64 {self.f.mul(count, 4)}, i1 false)")

    def bias_row(self, head: Int, row: Int) -> str | None:
        """Pointer to the row of the mask or bias for one query."""
        f, bias = self.f, self.a.bias
        if bias is None:
            return None
        at: Int = f.mul(row, bias.row)
        rest = head
        for n, stride in reversed(bias.batch):
            at = f.add(at, f.mul(f.rem(rest, n), stride))
            rest = f.div(rest, n)
        return self.row("bias", at, 1)

    def sum_of_weights(self, v: Typed, total: str) -> str:
        """What weights are divided by: for rows that saw nothing 1, unless they are to be NaN."""
        return total if self.a.softmax else v.select(v.cmp("oeq", total, v.const(0)), v.const(1), total)

    def total(self, name: str, start: str, vector: str) -> str:
        """The sum or maximum of a vector's lanes."""
        start = f"float {start}, " if start else ""
        return self.f.op(f"call reassoc float @llvm.vector.reduce.{name}.v{self.t.lanes}f32({start}{self.v.type} {vector})")

    def inner(self, x: tuple[str, str], y: tuple[str, str], n: int) -> str:
        """The inner product of two vectors of `n` elements, each a (pointer, element type)."""
        f, v = self.f, self.v
        with f.loop(0, n, self.t.lanes, [(v.type, "zeroinitializer")]) as loop:
            mask = lane_mask(f, self.t.lanes, loop.index, n)
            a, b = (load(f, dtype, p, loop.index, self.t.lanes, mask) for p, dtype in (x, y))
            loop.next = [v.fma(a, b, loop.vars[0])]
        return self.total("fadd", "-0.0", loop.vars[0])
