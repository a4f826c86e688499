"""Attention: softmax(q k^T scale + bias) v and its gradient, block by block of query rows; the scores of a block stay in the cache.

A `fusion` of kind=custom with backend_config={"attention": "forward" | "backward", …} (see passes/attention.py) is one parallel
step. Forward: an item is a block of query rows of one head. Block by block of columns, it multiplies with the keys (gemm.py), turns the
scores into weights relative to the largest score so far, and adds their product with the values; causal blocks stop at the diagonal.
Backward: an item is one head; each block recomputes its weights from the saved log-sum-exp and adds to the three gradients.
"""
from __future__ import annotations

import math as numbers
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch_hlo.compiler.codegen import gemm, math
from torch_hlo.compiler.codegen.dot import SOURCES
from torch_hlo.compiler.codegen.function import Function, Int, float_constant
from torch_hlo.compiler.codegen.gemm import Depth, Gemm, Tile, lane_mask
from torch_hlo.compiler.codegen.gemm_amx import BLOCK, ELEMENTS, AmxGemm
from torch_hlo.compiler.codegen.inline import Writer, load, store
from torch_hlo.compiler.codegen.scalar import STORAGE
from torch_hlo.compiler.passes.attention import Attention, Bias, attention_of
from torch_hlo.hlo.dim import Dim, ceildiv
from torch_hlo.hlo.ir import Instruction

ROWS, CAUSAL_ROWS = 252, 84  # query rows of a block, at most
COLUMNS = 512  # columns of a block, about: a block of scores takes a part of the L2 cache
_USUAL = 256  # rows or columns when they are symbolic, for the estimated time
_FMA_NS = 0.014  # per multiply-add, on one thread


class _Adding(Gemm):
    """C += A B."""

    label = "gemm_add"

    @contextmanager
    def k_blocks(self, f: Function) -> Iterator[Depth]:
        with super().k_blocks(f) as depth:
            yield replace(depth, more="true")


def _on_tiles(a: Attention, target) -> bool:
    """Whether the products are bf16 ones on AMX tiles: then weights are rounded to bf16 too."""
    return a.dtypes[0] == "bf16" and target.has("amx-bf16")


def emit_attention(program, x: Instruction) -> None:
    """Emit a fusion that `attention_of` describes; results are f32. Symbolic sizes are arguments of the kernel."""
    if program.target.grid:
        from torch_hlo.compiler.codegen.gpu import attention as grid

        return grid.emit_attention(program, x)
    a = attention_of(x)
    t = gemm.tile("float", program.target.vector_bytes)
    name, heap_bytes = program.once(("attention", a, t), lambda: _KINDS[a.kind](program, a, t).define())
    places = [program.place(o) for o in x.operands] + [program.place(x, i) for i in range(len(x.shape.elements))]
    if not program.target.threads:  # one range of items at a time: its memory can be the program's
        places.append(program.scratch(heap_bytes))
    high = BLOCK if _on_tiles(a, program.target) else t.rows
    block = _block_rows(a, high)
    forward = a.kind == "forward"
    rows, columns = (n if isinstance(n, int) else _USUAL for n in (a.rows, a.columns))
    work = (min(rows, block) if forward else 2.5 * rows) * columns * (a.size + a.width) / (2 if a.causal else 1)
    items = a.heads * (ceildiv(a.rows, block) if forward else 1)
    arguments = [f"ptr {program.at(p)}" for p in places] + [f"i64 {program.size(n)}" for n in symbolic_sizes(a)]
    program.parallel(name, arguments, program.size(items), cost=work * _FMA_NS)


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


def _block_rows(a: Attention, high: int) -> int:
    """Query rows of a block: a multiple of the micro-kernel's, evenly divided."""
    limit = (CAUSAL_ROWS if a.causal else ROWS) // high * high
    if not isinstance(a.rows, int):
        return limit
    blocks = ceildiv(a.rows, limit)
    return ceildiv(ceildiv(a.rows, blocks), high) * high


def _block_columns(a: Attention, t: Tile) -> int:
    """Columns of a block: a multiple of the vector size, evenly divided."""
    if not isinstance(a.columns, int):
        return COLUMNS
    blocks = max(1, round(a.columns / COLUMNS))
    return ceildiv(ceildiv(a.columns, blocks), t.lanes) * t.lanes


class _Kernel:
    """What forward and backward share. `f` is the function of parallel items; `inputs` and `outputs` name its pointers."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __init__(self, program, a: Attention, t: Tile) -> None:
        self.program, self.a, self.t = program, named(a), t
        names = [*self.inputs, *(["bias"] if a.bias is not None else []), *self.outputs]
        heap = [] if program.target.threads else ["heap"]
        self.f = Writer(program, f"attention_{a.kind}", [("i64", "lo"), ("i64", "hi"), *(("ptr", n) for n in (*names, *heap)),
                         *(("i64", f"n{i}") for i in range(len(symbolic_sizes(a))))])
        self.e = self.f.emit(t.lanes)
        self.v = self.e.typed("float")
        self.on_tiles = _on_tiles(a, program.target)
        self.high = BLOCK if self.on_tiles else t.rows
        self.dtype = dict(zip(names, (*a.dtypes, *["f32"] * len(self.outputs)), strict=True))
        self.weight = "bf16" if self.on_tiles else "f32"  # type of a block of weights
        self.block, self.width = _block_rows(a, self.high), _block_columns(a, t)
        self.stride = self.width + t.lanes  # of rows of scores: not a multiple of a page
        self.heap, self.heap_bytes = [], 64
        self.scratch = self.memory(AmxGemm(ELEMENTS["bf16", "bf16"], "k", "k", adding=True).scratch_bytes if self.on_tiles else t.scratch_bytes)

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

    def tile(self, dtype: str = "f32") -> str:
        return self.memory(self.block * self.stride * STORAGE[dtype].bytes)

    def weight_tile(self, scores: str) -> str:
        """Where the weights of a block go: over its scores when they have the same type."""
        return scores if self.weight == "f32" else self.tile(self.weight)

    def product(self, a: tuple, b: tuple, c: str, ldc: Int, m: Int, n: Int, k: Int, adding: bool = False) -> None:
        """C[m, n] (+)= A[m, k] B[k, n]; `a` and `b`: (pointer, type, stride along m or n, stride along k). C is f32."""
        f = self.f
        if self.on_tiles:
            forms = ["k" if p[3] == 1 else "lane" if p[2] == 1 else "none" for p in (a, b)]
            engine = AmxGemm(ELEMENTS["bf16", "bf16"], *forms, adding=adding)
        else:
            forms = [gemm.Strides(*p[2:]).form for p in (a, b)]
            sources = [SOURCES[p[1], "float"] for p in (a, b)]
            engine = (_Adding if adding else Gemm)(self.t, *sources, *forms, (self.t.rows,), False)
        name = engine.block()
        for function, text in engine.functions.items():
            self.program.function(function, text)
        arguments = [f"ptr {a[0]}", f"i64 {a[2]}", f"i64 {a[3]}", f"ptr {b[0]}", f"i64 {b[2]}", f"i64 {b[3]}", f"ptr {c}", f"i64 {ldc}"]
        f.call("void", name, *arguments, "i64 0", f"i64 {f.ceildiv(m, self.high)}", *(f"i64 {v}" for v in (m, 0, n, k)), f"ptr {self.scratch}")

    def at(self, pointer: str, index: Int, width: int, dtype: str = "f32") -> str:
        """Row `index` of a matrix with rows of `width` elements."""
        return self.f.gep(STORAGE[dtype].memory, pointer, self.f.mul(index, width))

    def row(self, name: str, index: Int, width: int) -> str:
        """The same for the array `name`."""
        return self.at(f"%{name}", index, width, self.dtype[name])

    def zero(self, pointer: str, count: Int) -> None:
        self.f.do(f"call void @llvm.memset.p0.i64(ptr {pointer}, i8 0, i64 {self.f.mul(count, 4)}, i1 false)")

    @contextmanager
    def columns(self, end: Int) -> Iterator[tuple[Int, Int]]:
        """The loop over blocks of columns before `end`: (first column, number of columns)."""
        with self.f.loop(0, end, self.width) as first:
            yield first, self.f.min(self.width, self.f.sub(end, first))

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
        return self.row("bias", at, 1)

    def vectors(self, row: Int, start: Int, width: Int, end: Int, carry: list[tuple[str, str]], body: Callable) -> list[str]:
        """Loops over the columns [start, start + width) that the query in `row` sees, in vectors: `body(offset, mask, carried)` returns
        the next carried values. First those seen in full, with mask None; then the others."""
        f, lanes = self.f, self.t.lanes
        limit = f.sub(f.min(f.add(row, 1), end) if self.a.causal else end, start)
        whole = f.op(f"and i64 {f.max(f.min(limit, width), 0)}, {-lanes}")
        values = [v for _, v in carry]
        lane = self.e.iota("i32")
        for masked, low, high in ((False, 0, whole), (True, whole, width)):
            with f.loop(low, high, lanes, [(kind, v) for (kind, _), v in zip(carry, values, strict=True)]) as loop:
                at, now = (loop.index, loop.vars) if carry else (loop, [])
                mask = None
                if masked:
                    seen = f.op(f"trunc i64 {f.sub(limit, at)} to i32")
                    mask = self.e.typed("i32").cmp("slt", lane, self.e.splat("i32", seen))
                following = body(at, mask, now)
                if carry:
                    loop.next = following
            values = loop.vars if carry else []
        return values

    def score(self, p: str, j: Int, mask: str | None, bias: str | None) -> str:
        """Scaled and masked scores of `lanes` columns from number `j`."""
        v, a = self.v, self.a
        s = v.mul(v.load(p, 4), v.const(a.scale))
        minus_infinity = v.const(-numbers.inf)
        if bias is not None and self.dtype["bias"] == "pred":
            s = v.select(self.bias_values(bias, j, mask), s, minus_infinity)
        elif bias is not None:
            s = v.add(s, self.bias_values(bias, j, mask))
        return s if mask is None else v.select(mask, s, minus_infinity)

    def bias_values(self, pointer: str, j: Int, mask: str | None) -> str:
        """`lanes` elements of a row of the bias."""
        dtype = self.dtype["bias"]
        if self.a.bias.column == 0:
            return self.e.splat(STORAGE[dtype].register, load(self.f, dtype, pointer, 0))
        return load(self.f, dtype, pointer, j, self.t.lanes, mask)

    def total(self, name: str, start: str, vector: str) -> str:
        """The sum or maximum of a vector's lanes."""
        start = f"float {start}, " if start else ""
        return self.f.op(f"call reassoc float @llvm.vector.reduce.{name}.v{self.t.lanes}f32({start}{self.v.type} {vector})")


class _Forward(_Kernel):
    """Items: blocks of query rows, heads outermost."""

    inputs, outputs = ("q", "k", "v"), ("out", "lse")

    def item(self, item: Int) -> None:
        f, a = self.f, self.a
        tile = self.tile()
        weights = self.weight_tile(tile)
        self.tops, self.sums = (f.alloca("float", self.block, 64) for _ in range(2))
        blocks = f.ceildiv(a.rows, self.block)
        head = f.div(item, blocks)
        first, count, end = self.rows_of(f.rem(item, blocks))
        shared = f.div(head, a.group)
        number = f.add(f.mul(head, a.rows), first)
        q, out = self.row("q", number, a.size), self.row("out", number, a.width)
        keys, values = (self.row(name, f.mul(shared, a.columns), n) for name, n in (("k", a.size), ("v", a.width)))
        dtype = self.dtype["q"]
        self.zero(out, f.mul(count, a.width))
        self.zero(self.sums, count)
        with f.loop(0, count) as i:
            f.store("float", float_constant(-numbers.inf), f.gep("float", self.tops, i), 4)
        with self.columns(end) as (start, width):
            k, v = self.at(keys, start, a.size, dtype), self.at(values, start, a.width, dtype)
            self.product((q, dtype, a.size, 1), (k, dtype, a.size, 1), tile, self.stride, count, width, a.size)
            with f.loop(0, count) as i:
                row = f.add(first, i)
                to = self.at(weights, i, self.stride, self.weight)
                self.weights(self.at(tile, i, self.stride), to, i, row, start, width, end, self.bias_row(head, row), self.at(out, i, a.width))
            self.product((weights, self.weight, self.stride, 1), (v, dtype, 1, a.width), out, a.width, count, a.width, width, adding=True)
        one = f.emit(1).typed("float")
        with f.loop(0, count) as i:
            total = f.load("float", f.gep("float", self.sums, i), 4)
            total = one.select(one.cmp("oeq", total, one.const(0)), one.const(1), total)
            self.scale_row(self.at(out, i, a.width), one.div(one.const(1), total))
            lse = one.add(self.finite(f.load("float", f.gep("float", self.tops, i), 4)), math.log(one, total))
            f.store("float", lse, f.gep("float", "%lse", f.add(number, i)), 4)

    def finite(self, top: str) -> str:
        """The largest score, 0 when nothing was seen."""
        one = self.f.emit(1).typed("float")
        return one.select(one.cmp("oeq", top, one.const(-numbers.inf)), one.const(0), top)

    def scale_row(self, row: str, factor: str) -> None:
        f, v, width = self.f, self.v, self.a.width
        factors = self.e.splat("float", factor)
        with f.loop(0, width, self.t.lanes) as j:
            mask, p = lane_mask(f, self.t.lanes, j, width), f.gep("float", row, j)
            v.store(v.mul(v.load(p, 4, mask), factors), p, 4, mask)

    def weights(self, scores: str, to: str, i: Int, row: Int, start: Int, width: Int, end: Int, bias: str | None, out: str) -> None:
        """Scores of one query -> exp(score - largest so far); what was summed before is brought to the new largest."""
        f, v, lanes = self.f, self.v, self.t.lanes
        one = f.emit(1).typed("float")
        top_at, sum_at = f.gep("float", self.tops, i), f.gep("float", self.sums, i)
        before = f.load("float", top_at, 4)

        def largest(k: Int, mask: str | None, carried: list[str]) -> list[str]:
            p = f.gep("float", scores, k)
            s = self.score(p, f.add(start, k), mask, bias)
            v.store(s, p, 4)
            return [v.call("maxnum", carried[0], s)]

        (tops,) = self.vectors(row, start, width, end, [(v.type, v.const(-numbers.inf))], largest)
        top = one.call("maxnum", before, self.total("fmax", "", tops))
        tops = self.e.splat("float", self.finite(top))
        with f.loop(0, width, lanes, [(v.type, "zeroinitializer")]) as loop:
            p = f.gep("float", scores, loop.index)
            w = math.exp(v, v.sub(v.load(p, 4), tops))
            store(f, self.weight, w, to, loop.index, lanes)
            loop.next = [v.add(loop.vars[0], w)]
        total = self.total("fadd", "-0.0", loop.vars[0])

        def rescaled() -> list[str]:
            factor = math.exp(one, one.sub(before, self.finite(top)))
            self.scale_row(out, factor)
            return [one.mul(f.load("float", sum_at, 4), factor)]

        moved = f.op(f"and i1 {f.icmp('ne', start, 0)}, {one.cmp('une', before, top)}")
        (older,) = f.choose(moved, rescaled, lambda: [f.load("float", sum_at, 4)], ["float"])
        f.store("float", one.add(older, total), sum_at, 4)
        f.store("float", top, top_at, 4)


class _Backward(_Kernel):
    """Items: heads."""

    inputs, outputs = ("grad", "q", "k", "v", "out", "lse"), ("dq", "dk", "dv")

    def item(self, head: Int) -> None:
        f, a = self.f, self.a
        self.tiles = self.tile(), self.tile()
        self.narrow = tuple(map(self.weight_tile, self.tiles))
        sizes = {"k": (a.columns, a.size), "v": (a.columns, a.width), "dk": (a.columns, a.size), "dv": (a.columns, a.width), "dq": (a.rows, a.size)}
        self.of_head = {name: self.row(name, f.mul(head, count), width) for name, (count, width) in sizes.items()}
        for name in self.outputs:
            self.zero(self.of_head[name], f.mul(*sizes[name]))
        with f.loop(0, f.ceildiv(a.rows, self.block)) as block:
            first, count, end = self.rows_of(block)
            with self.columns(end) as (start, width):
                self.tile_of(head, first, count, start, width, end)

    def tile_of(self, head: Int, first: Int, count: Int, start: Int, width: Int, end: Int) -> None:
        """The contribution of a block of query rows and columns."""
        f, a, stride = self.f, self.a, self.stride
        number = f.add(f.mul(head, a.rows), first)
        q, grad, out = (self.row(p, number, n) for p, n in (("q", a.size), ("grad", a.width), ("out", a.width)))
        dtype, weight = self.dtype["q"], self.weight
        dq = self.at(self.of_head["dq"], first, a.size)
        keys, values, dk, dv = (self.at(self.of_head[p], start, n, self.dtype[p]) for p, n in (("k", a.size), ("v", a.width), ("dk", a.size), ("dv", a.width)))
        (s, dp), (p, ds) = self.tiles, self.narrow
        self.product((q, dtype, a.size, 1), (keys, dtype, a.size, 1), s, stride, count, width, a.size)
        self.product((grad, dtype, a.width, 1), (values, dtype, a.width, 1), dp, stride, count, width, a.width)
        with f.loop(0, count) as i:
            row = f.add(first, i)
            delta = self.inner(self.at(grad, i, a.width, dtype), self.at(out, i, a.width, self.dtype["out"]), a.width)
            lse = load(f, self.dtype["lse"], "%lse", f.add(number, i))
            rows = [*(self.at(q, i, stride) for q in (s, dp)), *(self.at(q, i, stride, weight) for q in (p, ds))]
            self.gradient(*rows, row, start, width, end, self.bias_row(head, row), delta, lse)
        self.product((p, weight, 1, stride), (grad, dtype, 1, a.width), dv, a.width, width, a.width, count, adding=True)
        self.product((ds, weight, stride, 1), (keys, dtype, 1, a.size), dq, a.size, count, a.size, width, adding=True)
        self.product((ds, weight, 1, stride), (q, dtype, 1, a.size), dk, a.size, width, a.size, count, adding=True)

    def inner(self, x: str, y: str, n: int) -> str:
        """The inner product of two vectors."""
        f, v = self.f, self.v
        with f.loop(0, n, self.t.lanes, [(v.type, "zeroinitializer")]) as loop:
            mask = lane_mask(f, self.t.lanes, loop.index, n)
            a, b = (load(f, self.dtype[q], p, loop.index, self.t.lanes, mask) for q, p in (("grad", x), ("out", y)))
            loop.next = [v.fma(a, b, loop.vars[0])]
        return self.total("fadd", "-0.0", loop.vars[0])

    def gradient(self, s_row: str, dp_row: str, p_row: str, ds_row: str, row: Int, start: Int, width: Int, end: Int, bias: str | None, delta: str, lse: str) -> None:
        """Scores and gradients of weights of one query -> weights and gradients of the unscaled scores."""
        f, v = self.f, self.v
        deltas, sums = self.e.splat("float", delta), self.e.splat("float", lse)

        def both(k: Int, mask: str | None, _) -> None:
            w = math.exp(v, v.sub(self.score(f.gep("float", s_row, k), f.add(start, k), mask, bias), sums))
            dp = v.load(f.gep("float", dp_row, k), 4)
            store(f, self.weight, w, p_row, k, self.t.lanes)
            store(f, self.weight, v.mul(v.mul(w, v.sub(dp, deltas)), v.const(self.a.scale)), ds_row, k, self.t.lanes)

        self.vectors(row, start, width, end, [], both)


_KINDS = {"forward": _Forward, "backward": _Backward}
