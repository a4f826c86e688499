"""What the attention kernels of the CPU share: the arrays of a head, computed operands, working
memory, and the function of a range of items."""

from __future__ import annotations

import math as numbers
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Dim, Instruction, Size, ceildiv, round_up

from ..codegen import Program, Writer, load_real
from ..llvm import Int, Typed, item_parameters, math
from ..llvm.scalar import STORAGE
from ..matmul.tile import Tile
from .attention import Attention, Bias, inner, known_attention
from .attention_term import FLOAT_MAX, REPLACED, Term, term

LOG2E = 1 / numbers.log(2)


def symbolic_sizes(a: Attention[Size]) -> list[Dim]:
    """The distinct symbolic sizes and strides of `a`, in the order of the kernel's arguments."""
    strides = (
        []
        if a.bias is None
        else [n for pair in (*a.bias.batch, (a.bias.row, a.bias.column)) for n in pair]
    )
    return list(
        dict.fromkeys(
            n
            for n in (a.rows, a.columns, *strides, *(n for n, _ in a.bias_gradient))
            if isinstance(n, Dim)
        )
    )


def named(a: Attention[Size]) -> Attention[Int]:
    """`a` as the kernel sees it: symbolic sizes are its arguments."""
    names = {n: f"%n{i}" for i, n in enumerate(symbolic_sizes(a))}

    def name(size: Size) -> Int:
        return size if isinstance(size, int) else names[size]

    bias = None
    if a.bias is not None:
        batch = tuple((name(n), name(s)) for n, s in a.bias.batch)
        bias = Bias(batch, name(a.bias.row), name(a.bias.column))
    return Attention(
        a.kind,
        a.dtypes,
        a.results,
        a.causal,
        a.scale,
        a.heads,
        a.group,
        name(a.rows),
        name(a.columns),
        a.size,
        a.width,
        bias,
        a.fill,
        a.softmax,
        a.factors,
        a.dynamic,
        a.capped,
        tuple((name(n), kept) for n, kept in a.bias_gradient),
    )


def block_of(rows: Size, most: int, step: int) -> int:
    """Query rows of a block: a multiple of `step`, at most about `most`, evenly divided when the
    number is known."""
    limit = max(most // step, 1) * step
    if not isinstance(rows, int):
        return limit
    return round_up(ceildiv(rows, ceildiv(rows, limit)), step)


@frozen
class Arrays:
    """What a kernel reads: element types of the operands in memory; the number of each role's
    operand; roles that are computed."""

    dtypes: tuple[str, ...]
    numbers: tuple[tuple[str, int], ...]
    terms: tuple[tuple[str, Term], ...]

    @property
    def sizes(self) -> tuple[Dim, ...]:
        return tuple(dict.fromkeys(n for _, t in self.terms for n in t.sizes))


def arrays_of(program: Program, x: Instruction) -> Arrays:
    """The operands of a fusion that is attention."""
    a = known_attention(x)
    call = inner(x)
    params = x["calls"].params
    operands = dict(zip(a.roles, params if call is x else call.operands, strict=True))
    q = operands["q"].dims
    k = operands["k"].dims
    dims = (*q[:-1], k[-2])
    terms = tuple(
        (role, term(program, operands[role], params, dims, role == "bias", a.fill))
        for role in ("bias", "factors")
        if role in operands
    )
    numbers = tuple(
        (role, params.index(o)) for role, o in operands.items() if role not in ("bias", "factors")
    )
    return Arrays(tuple(o.dtype for o in x.operands), numbers, terms)


def sizes_of(a: Attention[Size], arrays: Arrays) -> list[Dim]:
    """The symbolic sizes that a kernel is given, in order."""
    return list(dict.fromkeys((*symbolic_sizes(a), *arrays.sizes)))


class AttentionKernel:
    """A kernel under construction. `f` is the function of parallel items: its pointers are the
    operands x0, x1, … and the results by name."""

    def __init__(self, program: Program, a: Attention[Size], arrays: Arrays, t: Tile) -> None:
        self.program = program
        self.a = named(a)
        self.t = t
        operands = [f"x{i}" for i in range(len(arrays.dtypes))]
        heap = [] if program.target.threads else ["heap"]
        self.size = {n: f"%n{i}" for i, n in enumerate(sizes_of(a, arrays))}
        self.f = Writer(
            program,
            f"attention_{a.kind}",
            item_parameters((*operands, *a.outputs, *heap), [n[1:] for n in self.size.values()]),
        )
        self.e = self.f.emit(t.lanes)
        self.v = self.e.typed("float")
        self.operands = [f"%{n}" for n in operands]
        self.pointer = {role: self.operands[i] for role, i in arrays.numbers} | {
            n: f"%{n}" for n in a.outputs
        }
        self.dtype = {role: arrays.dtypes[i] for role, i in arrays.numbers} | dict.fromkeys(
            a.outputs, "f32"
        )
        self.terms = dict(arrays.terms)
        self.heap: list[str] = []
        self.heap_bytes = 64

    @classmethod
    def items(cls, a: Attention[Size], t: Tile) -> tuple[Size, Size]:
        """(Items, query rows of one). By default those of a backward, see `heads_of`."""
        items = (
            a.heads // a.group
            if not a.bias_gradient
            else numbers.prod(n for n, kept in a.bias_gradient if kept)
        )
        return items, a.rows

    def item(self, item: Int) -> None:
        raise NotImplementedError

    def around(self) -> AbstractContextManager[object]:
        """What all items run in."""
        return nullcontext()

    def define(self) -> tuple[str, int]:
        """The function's name, and the bytes of memory that a range of items takes."""
        f = self.f
        with self.around(), f.loop("%lo", "%hi") as item:
            self.item(item)
        if not self.program.target.threads:
            f.entry_allocas += self.heap
            return f.define(), self.heap_bytes
        malloc = self.program.symbol("malloc", "declare ptr @malloc(i64)")
        free = self.program.symbol("free", "declare void @free(ptr)")
        f.do(f"call void @{free}(ptr %raw)")
        f.entry_allocas += [
            f"  %raw = call ptr @{malloc}(i64 {self.heap_bytes})",
            "  %past = getelementptr i8, ptr %raw, i64 63",
            "  %heap = call ptr @llvm.ptrmask.p0.i64(ptr %past, i64 -64)",
            *self.heap,
        ]
        return f.define(), self.heap_bytes

    def memory(self, nbytes: int) -> str:
        """Memory of a range of items, 64-byte aligned. From the heap: stacks of threads may be as
        small as 2 MB."""
        name = self.f.fresh("s")
        self.heap.append(f"  {name} = getelementptr i8, ptr %heap, i64 {self.heap_bytes - 64}")
        self.heap_bytes += round_up(nbytes, 64)
        return name

    def floats(self, count: int) -> str:
        return self.memory(4 * count)

    def at(self, pointer: str, index: Int, width: int, dtype: str = "f32") -> str:
        """Row `index` of a matrix with rows of `width` elements."""
        return self.f.gep(STORAGE[dtype].memory, pointer, self.f.mul(index, width))

    def row(self, name: str, index: Int, width: int) -> str:
        """The same for the array `name`."""
        return self.at(self.pointer[name], index, width, self.dtype[name])

    def zero(self, pointer: str, count: Int) -> None:
        self.f.do(
            f"call void @llvm.memset.p0.i64(ptr {pointer}, i8 0, i64 {self.f.mul(count, 4)}, i1"
            " false)"
        )

    def compute(
        self,
        role: str,
        head: Int,
        row: Int,
        rows: Int,
        column: Int,
        columns: Int,
        to: str,
        ld: Int,
    ) -> None:
        """to[i * ld + j] = the bias or factor of the query `row + i` of a head and the key `column
        + j`."""
        first = self.f.muladd(head, self.a.rows, row)
        self.terms[role].call(
            self.f, self.operands, self.size, first, rows, column, columns, to, ld
        )

    @contextmanager
    def heads_of(self, item: Int) -> Iterator[Int]:
        """The loop over the heads of an item of a backward: those that share keys, or whose
        gradients of the bias are one sum, `dbias`. What they add up, the gradients of keys, values
        and bias, begins with zeros."""
        f = self.f
        a = self.a
        if not a.bias_gradient:
            self._zero_keys(item)
            with f.loop(0, a.group, known_nonempty=True) as i:
                yield f.muladd(item, a.group, i)
            return
        self.dbias = f.gep("float", "%dbias", f.mul(item, f.mul(a.rows, a.columns)))
        self.zero(self.dbias, f.mul(a.rows, a.columns))
        own: list[tuple[Int, Int]] = []
        shared: list[tuple[Int, Int]] = []
        stride: Int = 1
        for n, kept in reversed(a.bias_gradient):
            (own if kept else shared).append((n, stride))
            stride = f.mul(stride, n)

        def head(number: Int, parts: list[tuple[Int, Int]]) -> Int:
            at: Int = 0
            for n, stride in parts:
                at = f.muladd(f.rem(number, n), stride, at)
                number = f.div(number, n)
            return at

        count: Int = 1
        for n, _ in shared:
            count = f.mul(count, n)
        with f.loop(0, count) as i:
            number = f.add(head(item, own), head(i, shared))
            self._zero_keys(number)
            yield number

    def _zero_keys(self, head: Int) -> None:
        f = self.f
        a = self.a
        for name, width in (("dk", a.size), ("dv", a.width)):
            self.zero(self.row(name, f.mul(head, a.columns), width), f.mul(a.columns, width))

    def finite(self, top: str) -> str:
        """The largest score, 0 when nothing was seen."""
        one = self.f.typed("float")
        return one.select(one.cmp("oeq", top, -numbers.inf), 0, top)

    def store_lse(self, top: str, total: str, row: Int) -> None:
        """What the backward needs of a row, from its largest score and the sum of its weights."""
        f = self.f
        one = self.f.typed("float")
        if self.a.softmax:
            f.store_at("float", top, "%lse", row)
            f.store_at("float", one.mul(math.log(one, total), LOG2E), "%total", row)
        else:
            f.store_at(
                "float",
                one.fma(self.finite(top), 1 / LOG2E, math.log(one, total)),
                "%lse",
                row,
            )

    def sum_of_weights(self, v: Typed, total: str) -> str:
        """What weights are divided by: for rows that saw nothing 1, unless they are to be NaN."""
        return total if self.a.softmax else v.select(v.cmp("oeq", total, 0), 1, total)

    def fill(self, f: Writer, pointer: str = "%fill") -> str:
        """The score of what a mask hides, in units of log 2."""
        one = f.typed("float")
        x = f.load("float", pointer)
        infinite = one.const(-numbers.inf)
        least = one.const(-FLOAT_MAX)
        y = one.mul(x, LOG2E)
        return one.select(
            one.cmp("oeq", x, infinite),
            infinite,
            one.select(one.cmp("olt", y, least), least, y),
        )

    def cap(self) -> tuple[str, str] | None:
        """The cap of scores in units of log 2 and its inverse, f32; None if there is none."""
        if not self.a.capped:
            return None
        one = self.f.typed("float")
        cap = one.mul(self.f.load("float", self.pointer["cap"]), LOG2E)
        return cap, one.div(1, cap)

    def capped(
        self,
        v: Typed,
        s: str,
        cap: str,
        inverse: str,
    ) -> tuple[str, str]:
        """cap tanh(s / cap) and its derivative, of vectors."""
        y = math.tanh(v, v.mul(s, inverse))
        return v.mul(cap, y), v.fma(v.neg(y), y, 1)

    def biased(self, v: Typed, s: str, x: str, fill: str) -> str:
        """A score and its bias. `fill`: in all lanes, or "" when nothing is replaced."""
        return v.select(v.cmp("oeq", x, REPLACED), fill, v.add(s, x)) if fill else v.add(s, x)

    def kept(self, v: Typed, ds: str, x: str) -> str:
        """The gradient of a score with the bias `x`: 0 where it was replaced."""
        return v.select(v.cmp("oeq", x, REPLACED), 0, ds)

    def scale(self, factor: float = 1.0) -> str:
        """The scale times a number, f32."""
        one = self.f.typed("float")
        if not self.a.dynamic:
            return one.const(self.a.scale * factor)
        return one.mul(self.f.load("float", self.pointer["scale"]), factor)

    def total(self, name: str, start: str, vector: str) -> str:
        """The sum or maximum of a vector's lanes."""
        start = f"float {start}, " if start else ""
        return self.f.op(
            f"call reassoc float @llvm.vector.reduce.{name}.v{self.t.lanes}f32({start}{self.v.type}"
            f" {vector})"
        )

    def inner(self, x: tuple[str, str], y: tuple[str, str], n: int) -> str:
        """The inner product of two vectors of `n` elements, each a (pointer, element type)."""
        f = self.f
        v = self.v
        with f.loop(0, n, self.t.lanes, [(v.type, "zeroinitializer")]) as loop:
            mask = f.lane_mask(self.t.lanes, loop.index, n)
            a, b = (load_real(f, dtype, p, loop.index, self.t.lanes, mask) for p, dtype in (x, y))
            loop.next = [v.fma(a, b, loop.vars[0])]
        return self.total("fadd", "-0.0", loop.vars[0])
