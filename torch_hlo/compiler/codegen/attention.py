"""Attention: softmax(q k^T scale + bias) v and its gradient, block by block of query rows; the scores of a block stay in the cache.

A `fusion` of kind=custom with backend_config={"attention": "forward" | "backward", …} (see passes/attention.py) is one parallel
step. Forward: an item is a block of query rows of one head. It multiplies the block with the keys (gemm.py), turns the scores into
weights, and multiplies those with the values; causal blocks stop at the diagonal. Backward: an item is one head; each block of rows
recomputes its weights from the saved log-sum-exp and adds to the gradients of keys and values.
"""
from __future__ import annotations

import math as numbers
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch_hlo.compiler.codegen import gemm, math
from torch_hlo.compiler.codegen.dot import SOURCES
from torch_hlo.compiler.codegen.function import Function, Int
from torch_hlo.compiler.codegen.gemm import Depth, Gemm, Tile, lane_mask
from torch_hlo.compiler.codegen.inline import Writer
from torch_hlo.compiler.passes.attention import Attention, attention_of
from torch_hlo.hlo.dim import ceildiv
from torch_hlo.hlo.ir import Instruction

TILE_BYTES = 512 << 10  # scores of one block: a part of the L2 cache
ROWS = {"forward": 126, "backward": 126}  # query rows of a block
_FMA_NS = 0.014  # per multiply-add, on one thread


class _Adding(Gemm):
    """C += A B."""

    label = "gemm_add"

    @contextmanager
    def k_blocks(self, f: Function) -> Iterator[Depth]:
        with super().k_blocks(f) as depth:
            yield replace(depth, more="true")


def emit_attention(program, x: Instruction) -> None:
    """Emit a fusion that `attention_of` describes; operands and results are f32, sizes static."""
    a = attention_of(x)
    t = gemm.tile("float", program.target.vector_bytes)
    name = program.once(("attention", a, t), lambda: _KINDS[a.kind](program, a, t).define())
    places = [program.place(o) for o in x.operands] + [program.place(x, i) for i in range(len(x.shape.elements))]
    blocks = ceildiv(a.rows, _block_rows(a, t)) if a.kind == "forward" else 1
    work = a.rows * a.columns * (a.size + a.width) * (1 if a.kind == "forward" else 2.5) / (2 if a.causal else 1)
    program.parallel(name, [f"ptr {program.at(p)}" for p in places], a.heads * blocks, cost=work * _FMA_NS / blocks)


def _block_rows(a: Attention, t: Tile) -> int:
    """Query rows of a block: a multiple of the micro-kernel's, evenly divided."""
    limit = max(t.rows, min(ROWS[a.kind], TILE_BYTES // 4 // (_stride(a, t))) // t.rows * t.rows)
    blocks = ceildiv(a.rows, limit)
    return ceildiv(ceildiv(a.rows, blocks), t.rows) * t.rows


def _stride(a: Attention, t: Tile) -> int:
    """Row stride of a block of scores: whole vectors, and not a multiple of a page."""
    return ceildiv(a.columns, t.lanes) * t.lanes + t.lanes


class _Kernel:
    """What forward and backward share. `f` is the function of parallel items, its pointer parameters are named by `pointers`."""

    pointers: tuple[str, ...] = ()

    def __init__(self, program, a: Attention, t: Tile) -> None:
        self.program, self.a, self.t = program, a, t
        names = [*self.inputs, *(["bias"] if a.bias is not None else []), *self.outputs]
        self.f = Writer(program, f"attention_{a.kind}", [("i64", "lo"), ("i64", "hi"), *(("ptr", n) for n in names)])
        self.e = self.f.emit(t.lanes)
        self.v = self.e.typed("float")
        self.block, self.stride = _block_rows(a, t), _stride(a, t)
        self.scratch = self.f.alloca("i8", t.scratch_bytes, 64)

    def define(self) -> str:
        with self.f.loop("%lo", "%hi") as item:
            self.item(item)
        return self.f.define()

    def tile(self) -> str:
        return self.f.alloca("float", self.block * self.stride, 64)

    def product(self, a: tuple, b: tuple, c: str, ldc: Int, m: Int, n: Int, k: Int, adding: bool = False) -> None:
        """C[m, n] (+)= A[m, k] B[k, n]; `a` and `b`: (pointer, stride along m or n, stride along k)."""
        source = SOURCES["f32", "float"]
        forms = [gemm.Strides(*p[1:]).form for p in (a, b)]
        engine = (_Adding if adding else Gemm)(self.t, source, source, *forms, (self.t.rows,), False)
        name = engine.block()
        for function, text in engine.functions.items():
            self.program.function(function, text)
        f = self.f
        arguments = [f"ptr {a[0]}", f"i64 {a[1]}", f"i64 {a[2]}", f"ptr {b[0]}", f"i64 {b[1]}", f"i64 {b[2]}", f"ptr {c}", f"i64 {ldc}"]
        f.call("void", name, *arguments, "i64 0", f"i64 {f.ceildiv(m, self.t.rows)}", *(f"i64 {v}" for v in (m, 0, n, k)), f"ptr {self.scratch}")

    def at(self, pointer: str, index: Int, width: int) -> str:
        """Row `index` of a matrix with rows of `width` elements."""
        return self.f.gep("float", pointer, self.f.mul(index, width))

    def rows_of(self, block: Int) -> tuple[Int, Int, Int]:
        """(first row, number of rows, columns that they look at) of a block."""
        f, a = self.f, self.a
        first = f.mul(block, self.block)
        count = f.min(self.block, f.sub(a.rows, first))
        return first, count, f.min(f.add(first, count), a.columns) if a.causal else a.columns

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
        return f.gep("i8" if bias.dtype == "pred" else "float", "%bias", at)

    def inside(self, j: Int, row: Int, end: Int) -> str:
        """Which columns from `j` on the query in `row` sees, `bias` aside."""
        return lane_mask(self.f, self.t.lanes, j, self.f.min(self.f.add(row, 1), end) if self.a.causal else end)

    def score(self, p: str, j: Int, mask: str, bias: str | None) -> str:
        """Scaled and masked scores of `lanes` columns."""
        v, a = self.v, self.a
        s = v.mul(v.load(p, 4), v.const(a.scale))
        minus_infinity = v.const(-numbers.inf)
        if bias is not None:
            b = self.bias_values(bias, j, mask)
            s = v.add(s, b) if a.bias.dtype == "f32" else v.select(b, s, minus_infinity)
        return v.select(mask, s, minus_infinity)

    def bias_values(self, pointer: str, j: Int, mask: str) -> str:
        f, e, pred = self.f, self.e, self.a.bias.dtype == "pred"
        kind = "i8" if pred else "float"
        t = e.typed(kind)
        if self.a.bias.column == 0:
            value = e.splat(kind, f.load(kind, pointer, 1 if pred else 4))
        else:
            value = t.load(f.gep(kind, pointer, j), 1 if pred else 4, mask)
        return t.cmp("ne", value, t.const(0)) if pred else value

    def total(self, name: str, start: str, vector: str) -> str:
        """The sum or maximum of a vector's lanes."""
        start = f"float {start}, " if start else ""
        return self.f.op(f"call reassoc float @llvm.vector.reduce.{name}.v{self.t.lanes}f32({start}{self.v.type} {vector})")


class _Forward(_Kernel):
    """Items: blocks of query rows, heads outermost."""

    inputs, outputs = ("q", "k", "v"), ("out", "lse")

    def item(self, item: Int) -> None:
        f, a = self.f, self.a
        tile, factors = self.tile(), f.alloca("float", self.block, 64)
        blocks = ceildiv(a.rows, self.block)
        head = f.div(item, blocks)
        first, count, end = self.rows_of(f.rem(item, blocks))
        shared = f.div(head, a.group)
        number = f.add(f.mul(head, a.rows), first)
        keys, values = self.at("%k", shared, a.columns * a.size), self.at("%v", shared, a.columns * a.width)
        self.product((self.at("%q", number, a.size), a.size, 1), (keys, a.size, 1), tile, self.stride, count, end, a.size)
        with f.loop(0, count) as i:
            self.weights(self.at(tile, i, self.stride), f.add(first, i), end, self.bias_row(head, f.add(first, i)), f.gep("float", factors, i),
                         f.gep("float", "%lse", f.add(number, i)))
        out = self.at("%out", number, a.width)
        self.product((tile, self.stride, 1), (values, 1, a.width), out, a.width, count, a.width, end)
        with f.loop(0, count) as i:
            factor = self.e.splat("float", f.load("float", f.gep("float", factors, i), 4))
            row = self.at(out, i, a.width)
            with f.loop(0, a.width, self.t.lanes) as j:
                mask = lane_mask(f, self.t.lanes, j, a.width)
                p = f.gep("float", row, j)
                self.v.store(self.v.mul(self.v.load(p, 4, mask), factor), p, 4, mask)

    def weights(self, row: str, number: Int, end: Int, bias: str | None, factor: str, lse: str) -> None:
        """Scores of one query -> exp(score - max); stores 1 / sum and max + log(sum). A query that sees nothing has weights 0."""
        f, v, lanes = self.f, self.v, self.t.lanes
        one = f.emit(1).typed("float")
        with f.loop(0, end, lanes, [(v.type, v.const(-numbers.inf))]) as loop:
            p = f.gep("float", row, loop.index)
            s = self.score(p, loop.index, self.inside(loop.index, number, end), bias)
            v.store(s, p, 4)
            loop.next = [v.call("maxnum", loop.vars[0], s)]
        top = self.total("fmax", "", loop.vars[0])
        top = one.select(one.cmp("oeq", top, one.const(-numbers.inf)), one.const(0), top)
        tops = self.e.splat("float", top)
        with f.loop(0, end, lanes, [(v.type, "zeroinitializer")]) as loop:
            p = f.gep("float", row, loop.index)
            w = math.exp(v, v.sub(v.load(p, 4), tops))
            v.store(w, p, 4)
            loop.next = [v.add(loop.vars[0], w)]
        total = self.total("fadd", "-0.0", loop.vars[0])
        total = one.select(one.cmp("oeq", total, one.const(0)), one.const(1), total)
        f.store("float", one.div(one.const(1), total), factor, 4)
        f.store("float", one.add(top, math.log(one, total)), lse, 4)


class _Backward(_Kernel):
    """Items: heads."""

    inputs, outputs = ("grad", "q", "k", "v", "out", "lse"), ("dq", "dk", "dv")

    def item(self, head: Int) -> None:
        f, a = self.f, self.a
        self.tiles = self.tile(), self.tile()
        self.keys, self.values = self.at("%k", head, a.columns * a.size), self.at("%v", head, a.columns * a.width)
        self.dk, self.dv = self.at("%dk", head, a.columns * a.size), self.at("%dv", head, a.columns * a.width)
        for p, n in ((self.dk, a.columns * a.size), (self.dv, a.columns * a.width)):
            f.do(f"call void @llvm.memset.p0.i64(ptr {p}, i8 0, i64 {4 * n}, i1 false)")
        with f.loop(0, ceildiv(a.rows, self.block)) as block:
            self.rows(head, *self.rows_of(block))

    def rows(self, head: Int, first: Int, count: Int, end: Int) -> None:
        """The contribution of a block of query rows."""
        f, a, stride = self.f, self.a, self.stride
        number = f.add(f.mul(head, a.rows), first)
        q, dq = (self.at(p, number, a.size) for p in ("%q", "%dq"))
        grad, out = (self.at(p, number, a.width) for p in ("%grad", "%out"))
        p, ds = self.tiles
        self.product((q, a.size, 1), (self.keys, a.size, 1), p, stride, count, end, a.size)
        self.product((grad, a.width, 1), (self.values, a.width, 1), ds, stride, count, end, a.width)
        with f.loop(0, count) as i:
            row = f.add(first, i)
            delta = self.inner(self.at(grad, i, a.width), self.at(out, i, a.width), a.width)
            lse = f.load("float", f.gep("float", "%lse", f.add(number, i)), 4)
            self.gradient(self.at(p, i, stride), self.at(ds, i, stride), row, end, self.bias_row(head, row), delta, lse)
        self.product((p, 1, stride), (grad, 1, a.width), self.dv, a.width, end, a.width, count, adding=True)
        self.product((ds, stride, 1), (self.keys, 1, a.size), dq, a.size, count, a.size, end)
        self.product((ds, 1, stride), (q, 1, a.size), self.dk, a.size, end, a.size, count, adding=True)

    def inner(self, x: str, y: str, n: int) -> str:
        """The inner product of two vectors."""
        f, v = self.f, self.v
        with f.loop(0, n, self.t.lanes, [(v.type, "zeroinitializer")]) as loop:
            mask = lane_mask(f, self.t.lanes, loop.index, n)
            a, b = (v.load(f.gep("float", p, loop.index), 4, mask) for p in (x, y))
            loop.next = [v.fma(a, b, loop.vars[0])]
        return self.total("fadd", "-0.0", loop.vars[0])

    def gradient(self, p_row: str, ds_row: str, row: Int, end: Int, bias: str | None, delta: str, lse: str) -> None:
        """Scores and gradients of weights of one query -> weights and gradients of the unscaled scores."""
        f, v = self.f, self.v
        deltas, sums = self.e.splat("float", delta), self.e.splat("float", lse)
        with f.loop(0, end, self.t.lanes) as j:
            at, ds_at = f.gep("float", p_row, j), f.gep("float", ds_row, j)
            w = math.exp(v, v.sub(self.score(at, j, self.inside(j, row, end), bias), sums))
            v.store(w, at, 4)
            v.store(v.mul(v.mul(w, v.sub(v.load(ds_at, 4), deltas)), v.const(self.a.scale)), ds_at, 4)


_KINDS = {"forward": _Forward, "backward": _Backward}
