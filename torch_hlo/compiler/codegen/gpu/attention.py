"""Attention on a grid: softmax(q k^T scale + bias) v and its gradient in tiles of 64 x 64 scores that never leave the group of threads.

    forward        a group per block of query rows: scores, weights relative to the largest score so far, sums (Milakov and Gimelshein 2018, Dao 2023)
    backward, dq   a group per block of query rows: weights from the saved log-sum-exp; writes rowsum(grad * out) for the second kernel
    backward, dkv  a group per block of keys and values

Nothing is added by two groups, so there are no atomics and results do not depend on chance. Each of 256 threads holds 4 x 4 scores and 4 rows of every
output of its group. Matrices come through shared memory in slices of 16 along what is summed over; elements outside of them are zero.
"""
from __future__ import annotations

import math as numbers
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch_hlo.compiler.codegen import math, scalar
from torch_hlo.compiler.codegen.attention import named, symbolic_sizes
from torch_hlo.compiler.codegen.function import Int
from torch_hlo.compiler.codegen.gpu.exchange import Exchange
from torch_hlo.compiler.codegen.inline import Writer, load
from torch_hlo.compiler.codegen.scalar import STORAGE
from torch_hlo.compiler.passes.attention import Attention, attention_of
from torch_hlo.hlo.dim import Size, ceildiv
from torch_hlo.hlo.ir import Instruction

BLOCK, SLICE, SIDE, EACH = 64, 16, 16, 4  # rows and columns of a tile; depth of a slice; threads along a side; rows and columns of a thread
THREADS = SIDE * SIDE
PITCH = BLOCK + EACH  # elements between the rows of a tile in shared memory: 16-byte aligned, and neighbouring rows start in different banks
FORWARD_WIDTH, BACKWARD_WIDTH = 256, 128  # columns of an output that a group computes: they are registers


def emit_attention(program, x: Instruction) -> None:
    """Emit a fusion that `attention_of` describes; results are f32. Symbolic sizes are arguments of the kernels."""
    a = attention_of(x)
    inputs = [program.pointer(o) for o in x.operands]
    outputs = [program.pointer(x, i) for i in range(len(x.shape.elements))]
    sizes = [f"i64 {program.size(n)}" for n in symbolic_sizes(a)]

    def launch(kernel: type[_Tiles], pointers: list[str], items: Size) -> None:
        name = program.once(("grid attention", kernel, a), lambda: kernel(program, a).define())
        program.parallel(name, [f"ptr {p}" for p in pointers] + sizes, program.size(items))

    row_blocks, column_blocks = (a.heads * ceildiv(n, BLOCK) for n in (a.rows, a.columns))
    if a.kind == "forward":
        launch(_Forward, [*inputs, *outputs], row_blocks * ceildiv(a.width, FORWARD_WIDTH))
        return
    deltas = program.at(program.scratch(a.heads * a.rows * 4))
    dq, dk, dv = outputs
    launch(_QueryGradient, [*inputs, dq, deltas], row_blocks * ceildiv(a.size, BACKWARD_WIDTH))
    launch(_KeyGradient, [*inputs, deltas, dk, dv], column_blocks * ceildiv(max(a.size, a.width), BACKWARD_WIDTH))


class Matrix:
    """`count` rows of `width` elements of `dtype` from `pointer` on."""

    def __init__(self, pointer: str, dtype: str, count: Int, width: int) -> None:
        self.pointer, self.dtype, self.count, self.width = pointer, dtype, count, width


Sums = list[list[str]]  # [row of the thread][column of the thread]


class _Tiles:
    """What the kernels share. `inputs` and `outputs` name the pointers; q, k, v… are Matrix objects of the item's head."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __init__(self, program, a: Attention) -> None:
        self.a = named(a)
        names = [*self.inputs, *(["bias"] if a.bias is not None else []), *self.outputs]
        self.dtype = dict(zip(names, (*a.dtypes, *["f32"] * len(self.outputs)), strict=True))
        self.f = f = Writer(program, f"attention_{type(self).__name__.strip('_').lower()}", [
            ("i64", "lo"), ("i64", "hi"), *(("ptr", n) for n in names), *(("i64", f"n{i}") for i in range(len(symbolic_sizes(a))))])
        self.barrier_text = program.target.family.barrier
        self.exchange = Exchange(program.target, THREADS)
        self.shared: dict[str, int] = {}
        self.one = f.emit().typed("float")
        self.four = f.emit(EACH).typed("float")
        self.x, self.y = f.mul(f.rem("%kernel.t", SIDE), EACH), f.mul(f.div("%kernel.t", SIDE), EACH)  # first column and row of the thread

    def define(self) -> str:
        f = self.f
        self.item("%lo")
        f.unit.declare(f.program)
        memory = "".join(f"@SELF.{n} = internal addrspace(3) global [{count} x float] undef, align 16\n" for n, count in self.shared.items())
        return f.program.group_function(f.name, memory + self.exchange.declarations() + f.text(), THREADS)

    def item(self, item: Int) -> None:
        raise NotImplementedError

    # -- arrays ---------------------------------------------------------------------------------------------------
    def matrix(self, name: str, head: Int, count: Int, width: int) -> Matrix:
        """The rows of one head of the array `name`."""
        return Matrix(self.f.gep(STORAGE[self.dtype[name]].memory, f"%{name}", self.f.mul(self.f.mul(head, count), width)), self.dtype[name], count, width)

    def of_query(self, name: str, head: Int, width: int) -> Matrix:
        return self.matrix(name, head, self.a.rows, width)

    def of_key(self, name: str, head: Int, width: int) -> Matrix:
        return self.matrix(name, self.f.div(head, self.a.group), self.a.columns, width)

    def digits(self, item: Int, chunks: int, blocks: Int) -> tuple[Int, Int, Int]:
        """(head, block, chunk of the width) of an item."""
        f = self.f
        rest, chunk = f.div(item, chunks), f.rem(item, chunks)
        return f.div(rest, blocks), f.rem(rest, blocks), chunk

    def read(self, m: Matrix, row: Int, column: Int) -> str:
        """Four elements of a row as f32, zero outside of the matrix."""
        f, e, storage = self.f, self.f.emit(EACH), STORAGE[m.dtype]
        here = f.icmp("slt", row, m.count)
        if m.width % EACH == 0:
            inside = f.op(f"and i1 {here}, {f.icmp('slt', column, m.width)}")
            at = f.add(f.mul(row, m.width), column)

            def vector() -> list[str]:
                raw = e.typed(storage.memory).load(f.gep(storage.memory, m.pointer, at), EACH * storage.bytes)
                return [scalar.decode(e, m.dtype, raw)]

            return f.choose(inside, vector, lambda: ["zeroinitializer"], [self.four.type])[0]
        value = "zeroinitializer"
        for i in range(EACH):
            inside = f.op(f"and i1 {here}, {f.icmp('slt', f.add(column, i), m.width)}")
            at = f.add(f.mul(row, m.width), f.add(column, i))
            one, = f.choose(inside, lambda at=at: [load(f, m.dtype, m.pointer, at)], lambda: [self.one.const(0)], ["float"])
            value = f.op(f"insertelement {self.four.type} {value}, float {one}, i64 {i}")
        return value

    def write(self, m: Matrix, row: Int, column: Int, values: list[str]) -> None:
        """Four f32 values of a row, those inside of the matrix."""
        f = self.f
        at = f.add(f.mul(row, m.width), column)
        if m.width % EACH == 0:
            with f.when(f.icmp("slt", column, m.width)):
                self.four.store(self.packed(values), f.gep("float", m.pointer, at), 16)
            return
        for i, v in enumerate(values):
            with f.when(f.icmp("slt", f.add(column, i), m.width)):
                f.store("float", v, f.gep("float", m.pointer, f.add(at, i)), 4)

    # -- shared memory --------------------------------------------------------------------------------------------
    def barrier(self) -> None:
        self.f.do(self.barrier_text)

    def slot(self, name: str, row: Int, column: Int, pitch: int = PITCH, rows: int = BLOCK) -> str:
        self.shared[name] = max(self.shared.get(name, 0), pitch * rows)
        return self.f.gep("float", f"@SELF.{name}", self.f.add(self.f.mul(row, pitch), column))

    def packed(self, values: list[str]) -> str:
        v = "poison"
        for i, value in enumerate(values):
            v = self.f.op(f"insertelement {self.four.type} {v}, float {value}, i64 {i}")
        return v

    def unpacked(self, vector: str) -> list[str]:
        return [self.f.op(f"extractelement {self.four.type} {vector}, i64 {i}") for i in range(EACH)]

    def keep(self, name: str, values: Sums, turned: bool) -> None:
        """The threads' values as a tile [row][column] of shared memory; `turned`: [column][row]."""
        for i in range(EACH):
            some = [values[r][i] for r in range(EACH)] if turned else values[i]
            major, minor = (self.x, self.y) if turned else (self.y, self.x)
            self.four.store(self.packed(some), self.slot(name, self.f.add(major, i), minor), 16)

    def _bring_turned(self, name: str, m: Matrix, first: Int, depth: Int) -> None:
        """64 rows of a slice of a matrix's columns, as [column][row]. Four threads read 64 neighbouring bytes of a row."""
        f = self.f
        piece, r = f.mul(f.rem("%kernel.t", SLICE // EACH), EACH), f.div("%kernel.t", SLICE // EACH)
        for i, v in enumerate(self.unpacked(self.read(m, f.add(first, r), f.add(depth, piece)))):
            f.store("float", v, self.slot(name, f.add(piece, i), r, rows=SLICE), 4)

    def _bring_rows(self, name: str, m: Matrix, first: Int, column: Int, vectors: int) -> None:
        """16 rows of a matrix, 64 * vectors columns from `column` on, as [row][column]."""
        f, width = self.f, BLOCK * vectors
        for part in range(vectors):
            number = f.add("%kernel.t", part * THREADS)
            r, c = f.div(number, width // EACH), f.mul(f.rem(number, width // EACH), EACH)
            self.four.store(self.read(m, f.add(first, r), f.add(column, c)), self.slot(name, r, c, width, SLICE), 16)

    # -- products -------------------------------------------------------------------------------------------------
    def _fma(self, left: list[str], right: list[str], sums: list[str]) -> list[str]:
        return [self.one.fma(p, q, sums[r * len(right) + c]) for r, p in enumerate(left) for c, q in enumerate(right)]

    def scores(self, a: Matrix, first_row: Int, b: Matrix, first_column: Int) -> Sums:
        """A tile of A B^T: inner products of rows of `a` with rows of `b`."""
        f = self.f
        with f.loop(0, a.width, SLICE, [("float", self.one.const(0))] * (EACH * EACH)) as loop:
            self._bring_turned("a", a, first_row, loop.index)
            self._bring_turned("b", b, first_column, loop.index)
            self.barrier()
            sums = list(loop.vars)
            for i in range(SLICE):
                left, right = (self.unpacked(self.four.load(self.slot(n, i, at, rows=SLICE), 16)) for n, at in (("a", self.y), ("b", self.x)))
                sums = self._fma(left, right, sums)
            self.barrier()
            loop.next = sums
        return [loop.vars[r * EACH:(r + 1) * EACH] for r in range(EACH)]

    def add_product(self, weights: str, m: Matrix, first: Int, column: Int, sums: list[str]) -> list[str]:
        """sums[4 rows][columns] += W^T M: `weights` names a tile [64][rows of the thread's], `m` has 64 rows from `first`, columns from `column`."""
        f, vectors = self.f, len(sums) // (EACH * EACH)
        with f.loop(0, BLOCK, SLICE, [("float", s) for s in sums]) as loop:
            self._bring_rows("c", m, f.add(first, loop.index), column, vectors)
            self.barrier()
            following = list(loop.vars)
            for i in range(SLICE):
                left = self.unpacked(self.four.load(self.slot(weights, f.add(loop.index, i), self.y), 16))
                right = []
                for v in range(vectors):
                    right += self.unpacked(self.four.load(self.slot("c", i, f.add(self.x, v * BLOCK), vectors * BLOCK, SLICE), 16))
                following = self._fma(left, right, following)
            self.barrier()
            loop.next = following
        return loop.vars

    def vectors(self, width: int, most: int) -> int:
        """Vectors of 64 columns that a group holds of an output of this width."""
        return ceildiv(min(width, most), BLOCK)

    def write_rows(self, m: Matrix, first: Int, column: Int, sums: list[str], factors: list[str] | None = None) -> None:
        """The group's part of an output, rows multiplied by factors."""
        f, vectors = self.f, len(sums) // (EACH * EACH)
        for r in range(EACH):
            row = f.add(first, f.add(self.y, r))
            with f.when(f.icmp("slt", row, m.count)):
                for v in range(vectors):
                    at = (r * vectors + v) * EACH
                    values = sums[at:at + EACH]
                    if factors is not None:
                        values = [self.one.mul(s, factors[r]) for s in values]
                    self.write(m, row, f.add(column, f.add(self.x, v * BLOCK)), values)

    # -- rows and weights -----------------------------------------------------------------------------------------
    def across(self, combine: Callable[[str, str], str], values: list[str]) -> list[str]:
        """One value per row of the thread, folded over the 16 threads that share its rows."""
        e = self.f.emit()
        for distance in (1, 2, 4, 8):
            values = [combine(v, self.exchange.other(e, i, "float", v, distance)) for i, v in enumerate(values)]
        return values

    def of_rows(self, m: Matrix, first: Int) -> list[str]:
        """The element of a vector of rows for each row of the thread, zero outside."""
        f = self.f
        rows = [f.add(first, f.add(self.y, r)) for r in range(EACH)]
        return [f.choose(f.icmp("slt", row, m.count), lambda row=row: [load(f, m.dtype, m.pointer, row)], lambda: [self.one.const(0)], ["float"])[0] for row in rows]

    def scaled(self, sums: Sums, head: Int, first_row: Int, first_column: Int) -> Sums:
        """Scores with scale, bias and mask; minus infinity where nothing is seen."""
        f, a, t = self.f, self.a, self.one
        minus_infinity = t.const(-numbers.inf)
        bias_of_head = self._bias_of_head(head)
        result = []
        for r in range(EACH):
            row, values = f.add(first_row, f.add(self.y, r)), []
            for c in range(EACH):
                column = f.add(first_column, f.add(self.x, c))
                s = t.mul(sums[r][c], t.const(a.scale))
                seen = f.icmp("slt", column, a.columns)
                if a.causal:
                    seen = t.bin_and(seen, f.icmp("sle", column, row))
                if a.bias is not None:
                    s = self._biased(s, bias_of_head, row, column, t.bin_and(seen, f.icmp("slt", row, a.rows)))
                values.append(t.select(seen, s, minus_infinity))
            result.append(values)
        return result

    def _bias_of_head(self, head: Int) -> str:
        """Pointer to the bias of a head."""
        f, bias = self.f, self.a.bias
        if bias is None:
            return ""
        at: Int = 0
        for n, stride in reversed(bias.batch):
            at = f.add(at, f.mul(f.rem(head, n), stride))
            head = f.div(head, n)
        return f.gep(STORAGE[self.dtype["bias"]].memory, "%bias", at)

    def _biased(self, s: str, pointer: str, row: Int, column: Int, seen: str) -> str:
        f, t, dtype = self.f, self.one, self.dtype["bias"]
        at = f.add(f.mul(row, self.a.bias.row), f.mul(column, self.a.bias.column))

        def inside() -> list[str]:
            v = load(f, dtype, pointer, at)
            return [t.select(v, s, t.const(-numbers.inf)) if dtype == "pred" else t.add(s, v)]

        return f.choose(seen, inside, lambda: [s], ["float"])[0]

    @contextmanager
    def column_blocks(self, first_row: Int, carry: list[str]) -> Iterator:
        """The loop over blocks of columns that rows from `first_row` on see, with carried f32 values."""
        f, a = self.f, self.a
        end = f.min(f.add(first_row, BLOCK), a.columns) if a.causal else a.columns
        with f.loop(0, end, BLOCK, [("float", v) for v in carry]) as loop:
            yield loop


class _Forward(_Tiles):
    """Items: heads x blocks of rows x chunks of the width."""

    inputs, outputs = ("q", "k", "v"), ("out", "lse")

    def item(self, item: Int) -> None:
        f, a, t = self.f, self.a, self.one
        head, block, chunk = self.digits(item, ceildiv(a.width, FORWARD_WIDTH), f.ceildiv(a.rows, BLOCK))
        first, column = f.mul(block, BLOCK), f.mul(chunk, FORWARD_WIDTH)
        q, k, v = self.of_query("q", head, a.size), self.of_key("k", head, a.size), self.of_key("v", head, a.width)
        out, lse = self.of_query("out", head, a.width), self.of_query("lse", head, 1)
        zero, lowest = t.const(0), t.const(-numbers.inf)
        count = EACH * EACH * self.vectors(a.width, FORWARD_WIDTH)
        with self.column_blocks(first, [lowest] * EACH + [zero] * (EACH + count)) as loop:
            before, sums, totals = loop.vars[:EACH], loop.vars[EACH:2 * EACH], loop.vars[2 * EACH:]
            s = self.scaled(self.scores(q, first, k, loop.index), head, first, loop.index)
            tops = self.across(lambda p, q: t.call("maxnum", p, q), [self._fold("maxnum", row) for row in s])
            tops = [t.call("maxnum", p, q) for p, q in zip(before, tops, strict=True)]
            finite = [self.finite(v) for v in tops]
            weights = [[math.exp(t, t.sub(v, m)) for v in row] for row, m in zip(s, finite, strict=True)]
            factors = [math.exp(t, t.sub(p, m)) for p, m in zip(before, finite, strict=True)]
            self.keep("p", weights, turned=True)
            added = self.across(t.add, [t.add(t.add(w[0], w[1]), t.add(w[2], w[3])) for w in weights])
            sums = [t.fma(old, factor, new) for old, factor, new in zip(sums, factors, added, strict=True)]
            per_row = count // EACH
            totals = [t.mul(v, factors[i // per_row]) for i, v in enumerate(totals)]
            totals = self.add_product("p", v, loop.index, column, totals)
            loop.next = [*tops, *sums, *totals]
        tops, sums, totals = loop.vars[:EACH], loop.vars[EACH:2 * EACH], loop.vars[2 * EACH:]
        sums = [t.select(t.cmp("oeq", v, zero), t.const(1), v) for v in sums]
        self.write_rows(out, first, column, totals, [t.div(t.const(1), v) for v in sums])
        with f.when(f.op(f"and i1 {f.icmp('eq', self.x, 0)}, {f.icmp('eq', chunk, 0)}")):
            for r in range(EACH):
                row = f.add(first, f.add(self.y, r))
                with f.when(f.icmp("slt", row, a.rows)):
                    f.store("float", t.add(self.finite(tops[r]), math.log(t, sums[r])), f.gep("float", lse.pointer, row), 4)

    def finite(self, top: str) -> str:
        """The largest score, 0 when nothing was seen."""
        return self.one.select(self.one.cmp("oeq", top, self.one.const(-numbers.inf)), self.one.const(0), top)

    def _fold(self, name: str, values: list[str]) -> str:
        t = self.one
        return t.call(name, t.call(name, values[0], values[1]), t.call(name, values[2], values[3]))


class _Backward(_Tiles):
    """What both passes compute of a tile: the weights and the gradients of the unscaled scores."""

    def heads_arrays(self, head: Int) -> None:
        a = self.a
        self.q, self.grad, self.out = (self.of_query(n, head, w) for n, w in (("q", a.size), ("grad", a.width), ("out", a.width)))
        self.k, self.v = self.of_key("k", head, a.size), self.of_key("v", head, a.width)
        self.lse, self.deltas = self.of_query("lse", head, 1), self.of_query("deltas", head, 1)

    def gradients(self, head: Int, first_row: Int, first_column: Int, lse: list[str], deltas: list[str]) -> tuple[Sums, Sums]:
        t = self.one
        s = self.scaled(self.scores(self.q, first_row, self.k, first_column), head, first_row, first_column)
        weights = [[math.exp(t, t.sub(v, lse[r])) for v in row] for r, row in enumerate(s)]
        dp = self.scores(self.grad, first_row, self.v, first_column)
        scale = t.const(self.a.scale)
        ds = [[t.mul(t.mul(w, t.sub(d, deltas[r])), scale) for w, d in zip(weights[r], dp[r], strict=True)] for r in range(EACH)]
        return weights, ds


class _QueryGradient(_Backward):
    """Items: heads x blocks of rows x chunks of the size of a head."""

    inputs, outputs = ("grad", "q", "k", "v", "out", "lse"), ("dq", "deltas")

    def item(self, item: Int) -> None:
        f, a, t = self.f, self.a, self.one
        head, block, chunk = self.digits(item, ceildiv(a.size, BACKWARD_WIDTH), f.ceildiv(a.rows, BLOCK))
        first, column = f.mul(block, BLOCK), f.mul(chunk, BACKWARD_WIDTH)
        self.heads_arrays(head)
        lse, deltas = self.of_rows(self.lse, first), self._deltas(first)
        with f.when(f.icmp("eq", self.x, 0)):
            for r, delta in enumerate(deltas):
                row = f.add(first, f.add(self.y, r))
                with f.when(f.icmp("slt", row, a.rows)):
                    f.store("float", delta, f.gep("float", self.deltas.pointer, row), 4)
        with self.column_blocks(first, [t.const(0)] * (EACH * EACH * self.vectors(a.size, BACKWARD_WIDTH))) as loop:
            _, ds = self.gradients(head, first, loop.index, lse, deltas)
            self.keep("p", ds, turned=True)
            loop.next = self.add_product("p", self.k, loop.index, column, loop.vars)
        self.write_rows(self.of_query("dq", head, a.size), first, column, loop.vars)

    def _deltas(self, first: Int) -> list[str]:
        """rowsum(grad * out) of the thread's rows."""
        f, t = self.f, self.one
        with f.loop(0, self.a.width, BLOCK, [("float", t.const(0))] * EACH) as loop:
            column = f.add(loop.index, self.x)
            following = []
            for r in range(EACH):
                row = f.add(first, f.add(self.y, r))
                p, q = (self.unpacked(self.read(m, row, column)) for m in (self.grad, self.out))
                total = loop.vars[r]
                for u, v in zip(p, q, strict=True):
                    total = t.fma(u, v, total)
                following.append(total)
            loop.next = following
        return self.across(t.add, loop.vars)


class _KeyGradient(_Backward):
    """Items: heads x blocks of columns x chunks of the width and size of a head."""

    inputs, outputs = ("grad", "q", "k", "v", "out", "lse"), ("deltas", "dk", "dv")

    def item(self, item: Int) -> None:
        f, a, t = self.f, self.a, self.one
        head, block, chunk = self.digits(item, ceildiv(max(a.size, a.width), BACKWARD_WIDTH), f.ceildiv(a.columns, BLOCK))
        first, at = f.mul(block, BLOCK), f.mul(chunk, BACKWARD_WIDTH)
        self.heads_arrays(head)
        counts = [EACH * EACH * self.vectors(n, BACKWARD_WIDTH) for n in (a.width, a.size)]
        start = first if a.causal else 0  # rows before see none of these columns
        with f.loop(start, a.rows, BLOCK, [("float", t.const(0))] * sum(counts)) as loop:
            lse, deltas = self.of_rows(self.lse, loop.index), self.of_rows(self.deltas, loop.index)
            weights, ds = self.gradients(head, loop.index, first, lse, deltas)
            self.keep("p", weights, turned=False)
            dv = self.add_product("p", self.grad, loop.index, at, loop.vars[:counts[0]])
            self.keep("p", ds, turned=False)
            loop.next = [*dv, *self.add_product("p", self.q, loop.index, at, loop.vars[counts[0]:])]
        self.write_rows(self.of_key("dv", head, a.width), first, at, loop.vars[:counts[0]])
        self.write_rows(self.of_key("dk", head, a.size), first, at, loop.vars[counts[0]:])
