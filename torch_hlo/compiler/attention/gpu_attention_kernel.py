"""What the attention kernels of a grid share: the arrays of a head, the bias, and which block an
item is.

    forward        a group per block of query rows: scores, weights relative to the largest score so
        far, sums (Milakov and Gimelshein 2018, Dao 2023)
    backward, dq   a group per block of query rows: weights from the saved log-sum-exp; writes
        rowsum(grad * out) for the second kernel
    backward, dkv  a group per block of keys and values

Nothing is added by two groups, so there are no atomics and results do not depend on chance.
"""

from __future__ import annotations

import math as numbers
from collections.abc import Callable

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Size, ceildiv

from ..codegen import load_real
from ..gpu.exchange import Exchange
from ..gpu.gpu_program import GpuProgram
from ..gpu.gpu_writer import GpuWriter
from ..llvm import Int, signature
from ..llvm.scalar import STORAGE
from .attention import Attention, N
from .attention_kernel import named, symbolic_sizes

BLOCK = 64  # rows, and columns, of a block
EACH = 4  # elements that are read and written together
# Columns of an output that a group computes, by kernel: they are registers.
WIDTHS = {"forward": 256, "dq": 128, "dkv": 128}


@frozen
class Matrix:
    """`count` rows of `width` elements of `dtype` from `pointer` on."""

    pointer: str
    dtype: str
    count: Int
    width: int


class AttentionKernel:
    """One of the three kernels. `part`: its key in WIDTHS; `inputs` and `outputs` name its
    pointers; `threads`: of a group."""

    part = ""
    threads = 0
    inputs: tuple[str, ...] = ("grad", "q", "k", "v", "out", "lse")  # of gradients
    outputs: tuple[str, ...] = ()
    # what `enter` gives to those that are inputs or outputs
    q: Matrix
    k: Matrix
    v: Matrix
    grad: Matrix
    out: Matrix
    lse: Matrix
    deltas: Matrix
    dq: Matrix
    dk: Matrix
    dv: Matrix

    def __init__(self, program: GpuProgram, a: Attention[Size]) -> None:
        self.a = named(a)
        names = [
            *self.inputs,
            *(["bias"] if a.bias is not None else []),
            *self.outputs,
        ]
        results = dict(zip(a.outputs, a.results, strict=True)) | {"deltas": "f32"}
        types = (*a.dtypes, *(results[name] for name in self.outputs))
        self.dtype = dict(zip(names, types, strict=True))
        self.f = f = GpuWriter(
            program,
            f"attention_{self.part}",
            [
                *signature("i64 lo, i64 hi"),
                *(("ptr", n) for n in names),
                *(("i64", f"n{i}") for i in range(len(symbolic_sizes(a)))),
            ],
        )
        self.exchange = Exchange(program.target, self.threads)
        self.one = f.typed("float")
        self.four = f.typed("float", EACH)

    @classmethod
    def items(cls, a: Attention[Size]) -> Size:
        """Groups: heads x blocks x chunks of the width."""
        return a.heads * ceildiv(a.columns if cls.part == "dkv" else a.rows, BLOCK) * cls.chunks(a)

    @classmethod
    def chunks(cls, a: Attention[N]) -> int:
        width = {"forward": a.width, "dq": a.size, "dkv": max(a.size, a.width)}[cls.part]
        return ceildiv(width, WIDTHS[cls.part])

    def define(self) -> str:
        """The kernel's name."""
        f = self.f
        rest = f.div("%lo", self.chunks(self.a))
        chunk = f.rem("%lo", self.chunks(self.a))
        blocks = f.ceildiv(self.a.columns if self.part == "dkv" else self.a.rows, BLOCK)
        head = f.div(rest, blocks)
        block = f.rem(rest, blocks)
        if self.a.causal and self.part != "dkv":
            block = f.sub(f.sub(blocks, 1), block)  # those with most columns first
        self.enter(head)
        self.item(head, f.mul(block, BLOCK), f.mul(chunk, WIDTHS[self.part]))
        f.unit.declare(f.program)
        return f.program.group_function(
            f.name,
            self.declarations() + self.exchange.declarations() + f.text(),
            self.threads,
            self.shared_bytes(),
        )

    def item(self, head: Int, first: Int, at: Int) -> None:
        """The block of rows (dkv: columns) from `first` on, and columns of outputs from `at` on."""
        raise NotImplementedError

    def declarations(self) -> str:
        """Shared variables."""
        raise NotImplementedError

    def shared_bytes(self) -> int:
        """Bytes of shared memory whose size the launch gives."""
        return 0

    # -- arrays
    def enter(self, head: Int) -> None:
        """Work on one head from here on: its matrices are attributes, self.q, self.lse…, vectors
        being matrices of one column."""
        f = self.f
        a = self.a
        shared = f.div(head, a.group)
        of_query = (head, a.rows)
        of_key = (shared, a.columns)
        shapes = {
            "q": (of_query, a.size),
            "k": (of_key, a.size),
            "v": (of_key, a.width),
            "grad": (of_query, a.width),
            "out": (of_query, a.width),
            "lse": (of_query, 1),
            "deltas": (of_query, 1),
            "dq": (of_query, a.size),
            "dk": (of_key, a.size),
            "dv": (of_key, a.width),
        }
        for name, ((number, count), width) in shapes.items():
            if name in self.dtype:
                pointer = f.gep(
                    STORAGE[self.dtype[name]].memory,
                    f"%{name}",
                    f.mul(f.mul(number, count), width),
                )
                setattr(self, name, Matrix(pointer, self.dtype[name], count, width))

    def read(self, m: Matrix, row: Int, column: Int) -> str:
        """Four elements of a row as f32, zero outside of the matrix."""
        f = self.f
        align = EACH * STORAGE[m.dtype].bytes
        here = f.icmp("slt", row, m.count)
        if m.width % EACH == 0:
            inside = f.op(f"and i1 {here}, {f.icmp('slt', column, m.width)}")
            at = f.muladd(row, m.width, column)
            return f.choose(
                inside,
                lambda: [load_real(f, m.dtype, m.pointer, at, EACH, align=align)],
                lambda: ["zeroinitializer"],
                [self.four.type],
            )[0]
        value = "zeroinitializer"
        for i in range(EACH):
            inside = f.op(f"and i1 {here}, {f.icmp('slt', f.add(column, i), m.width)}")
            at = f.muladd(row, m.width, f.add(column, i))
            (one,) = f.choose(
                inside,
                lambda: [load_real(f, m.dtype, m.pointer, at)],
                lambda: [self.one.const(0)],
                ["float"],
            )
            value = f.op(f"insertelement {self.four.type} {value}, float {one}, i64 {i}")
        return value

    # -- rows and scores
    def across(
        self, combine: Callable[[str, str], str], values: list[str], threads: int
    ) -> list[str]:
        """Values folded over the `threads` neighbouring threads that share their rows."""
        e = self.f.emit()
        distance = 1
        while distance < threads:
            others = self.exchange.others(e, ["float"] * len(values), values, distance)
            values = list(map(combine, values, others))
            distance *= 2
        return values

    def of_row(self, m: Matrix, row: Int) -> str:
        """The element of a vector of rows, zero outside."""
        return self.f.choose(
            self.f.icmp("slt", row, m.count),
            lambda: [load_real(self.f, m.dtype, m.pointer, row)],
            lambda: [self.one.const(0)],
            ["float"],
        )[0]

    def row_products(self, rows: list[Int], lane: Int, threads: int) -> list[str]:
        """Inner products of rows of the output and its gradient, by `threads` neighbouring threads;
        `lane` is the number of this one."""
        f = self.f
        t = self.one
        with f.loop(
            0, self.grad.width, EACH * threads, [("float", t.const(0))] * len(rows)
        ) as loop:
            column = f.muladd(lane, EACH, loop.index)
            following = []
            for row, total in zip(rows, loop.vars, strict=True):
                p, q = (
                    self.four.unpacked(self.read(m, row, column)) for m in (self.grad, self.out)
                )
                for u, v in zip(p, q, strict=True):
                    total = t.fma(u, v, total)
                following.append(total)
            loop.next = following
        return self.across(t.add, loop.vars, threads)

    def score(
        self,
        s: str,
        bias_of_head: str,
        row: Int,
        column: Int,
        unit: float = 1.0,
    ) -> str:
        """A score with scale, bias and mask, in units of 1 / unit; minus infinity where nothing is
        seen."""
        f = self.f
        a = self.a
        t = self.one
        s = t.mul(s, a.scale * unit)
        seen = f.icmp("slt", column, a.columns)
        if a.causal:
            seen = t.bin_and(seen, f.icmp("sle", column, row))
        if a.bias is not None:
            here = t.bin_and(seen, f.icmp("slt", row, a.rows))
            at = f.muladd(row, a.bias.row, f.mul(column, a.bias.column))
            s = self._biased(s, bias_of_head, at, here, unit)
        return t.select(seen, s, -numbers.inf)

    def bias_of_head(self, head: Int) -> str:
        """Pointer to the bias of a head."""
        f = self.f
        bias = self.a.bias
        if bias is None:
            return ""
        at: Int = 0
        for n, stride in reversed(bias.batch):
            at = f.muladd(f.rem(head, n), stride, at)
            head = f.div(head, n)
        return f.gep(STORAGE[self.dtype["bias"]].memory, "%bias", at)

    def _biased(
        self,
        s: str,
        pointer: str,
        at: Int,
        seen: str,
        unit: float,
    ) -> str:
        f = self.f
        t = self.one
        dtype = self.dtype["bias"]

        def inside() -> list[str]:
            v = load_real(f, dtype, pointer, at)
            return [(t.select(v, s, -numbers.inf) if dtype == "pred" else t.fma(v, unit, s))]

        return f.choose(seen, inside, lambda: [s], ["float"])[0]

    def finite(self, top: str) -> str:
        """The largest score, 0 when nothing was seen."""
        return self.one.select(self.one.cmp("oeq", top, -numbers.inf), 0, top)

    def last_column(self, first_row: Int) -> Int:
        """The end of the columns that a block of rows sees."""
        return (
            self.f.min(self.f.add(first_row, BLOCK), self.a.columns)
            if self.a.causal
            else self.a.columns
        )
