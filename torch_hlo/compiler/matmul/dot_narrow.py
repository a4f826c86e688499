"""dot_narrow: a vector times a matrix of narrow numbers -> sums of products in a loop, which widens
the numbers as it reads them.

    dot(f32[k], convert(s8[n,k]))  ->  reduce(multiply(broadcast(f32[k]), convert(s8[n,k])))

The matrix may be computed from narrow arrays in several steps: nibbles that are taken out of bytes,
scales of groups. As an operand of a dot it would be written to memory first, four bytes a number;
such a product takes as long as its bytes take to be read. With several rows a product reads each
number several times, and what it costs to widen the matrix once is shared.

group_products: rows times a matrix of four-bit numbers whose groups along k have a scale and an
offset each, in one kernel.

    y = (f32[m,n]) call(x, sums, w, scales), backend_config={"product":"groups"}
->  y = (f32[m,n]) fusion(x, sums, w, scales), kind=custom, …

x f32[m, k], sums f32[m, groups] of its groups, w u8[blocks, k, half], scales [groups, n, 2] with
n = blocks * 2 * half. A byte holds a number of 0 to 15 of row i of a block, and one of row half + i
in its upper half. A number means (q - 8) * scale + offset.

The called computation says the same, and is inlined where there is no kernel. The kernel reads each
byte once per six rows of x and makes floats of it in registers: two instructions a vector,
beside one multiply-add per row of x. Sums of a group are scaled when it ends."""

from __future__ import annotations

from torch_hlo.compiler.codegen.program import Program
from torch_hlo.compiler.hlo_pass import hlo_pass
from torch_hlo.compiler.llvm import Function, Int, signature
from torch_hlo.compiler.simplify.algebra import exact
from torch_hlo.compiler.thresholds import NARROW_BYTES, NARROW_ELEMENTS
from torch_hlo.hlo.ir import Instruction, Module, fixed, instr
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.match import op, rewrite, rules

from .dot_canon import Dot, parts, plain
from .product import SOURCES, hint
from .tile import Tile, converted, multiply_add, splat

HEIGHTS = 6, 3, 2, 1  # rows of x at a time: sums of six fill the registers of AVX2
AHEAD = 4  # groups whose scales are asked for
GROUPS = '{"product":"groups"}'
_IN_REGISTERS = frozenset(
    "convert broadcast reshape constant iota add subtract multiply negate and or shift-left"
    " shift-right-logical shift-right-arithmetic".split()
)


def narrow_product(out: Instruction) -> Instruction | None:
    """dot(x, w) -> sums of x * w where x is a vector and w is made of few bytes"""
    d = parts(out)
    if d.lhs_free:
        d = d.swapped()
    if d.lhs_free or not d.contract or out.shape.kind not in "fsu" or not _is_narrow(d.y):
        return None
    return _sums(d, out)


def _is_narrow(w: Instruction) -> bool:
    """Whether the numbers of `w` are made of at most NARROW_BYTES bytes each."""
    size = w.shape.size
    if not isinstance(size, int) or size < NARROW_ELEMENTS:
        return False
    left, seen, stack = NARROW_BYTES * size, {w}, [w]
    while stack and left >= 0:
        x = stack.pop()
        if x.op in _IN_REGISTERS:
            new = set(x.operands) - seen
            seen |= new
            stack.extend(new)
        elif not isinstance(nbytes := x.shape.nbytes, int):
            return False
        else:
            left -= nbytes
    return left >= 0


def _sums(d: Dot, out: Instruction) -> Instruction:
    w, pairs = d.y, (*d.batch, *d.contract)
    wide = "f32" if d.dtype in ("bf16", "f16") else d.dtype
    order = sorted(pairs, key=lambda pair: pair[1])
    # kept in memory: what makes it is not done again beside each row of w
    x = h.transpose(h.convert(h.opt_barrier(d.x), wide), [a for a, _ in order])
    while w.op == "convert" and exact(w.operands[0].shape.dtype, w.shape.dtype):
        (w,) = w.operands
    terms = h.multiply(
        h.broadcast(x, w.shape.dims, [b for _, b in order]),
        h.convert(w, wide),
    )
    summed = [b for _, b in d.contract]
    sums = h.reduce(terms, h.full(0, wide), sorted(summed), "add")
    kept = [b for b in range(w.shape.rank) if b not in summed]
    place = [kept.index(b) for b in (*[b for _, b in d.batch], *d.rhs_free)]
    return h.convert(h.transpose(sums, place), out.shape.dtype)


RULES = rules((op("dot", where=plain), narrow_product))


@hlo_pass
def dot_narrow(module: Module) -> Module:
    """Products of a vector and a matrix of narrow numbers -> sums."""
    return rewrite(module, RULES)


def _fused(out: Instruction) -> Instruction | None:
    if out.get("backend_config") != GROUPS:
        return None
    attrs = {"calls": out["to_apply"], "backend_config": GROUPS}
    return instr("fusion", out.operands, out.shape, kind="custom", **attrs)


GROUP_RULES = rules((op("call"), _fused))


@hlo_pass
def group_products(module: Module) -> Module:
    """Calls that say they are products with groups of four-bit numbers -> kernels."""
    return rewrite(module, GROUP_RULES)


class _Kernel(Function):
    """void(lo, hi, x, sums, w, scales, y, m): an item is a strip of `vectors` * `lanes` bytes of a
    block."""

    def __init__(self, x: Instruction, lanes: int) -> None:
        left, sums, w, scales = x.operands
        self.rows, self.source = left.dims[0], SOURCES[scales.dtype, "float"]
        self.blocks, self.k, self.half = map(fixed, w.dims)
        self.groups, self.n = fixed(sums.dims[1]), fixed(scales.dims[1])
        few = hint(self.rows, 512) <= HEIGHTS[1]
        self.t = Tile(
            "float", 4, lanes, HEIGHTS[0], 2 if few and self.half % (2 * lanes) == 0 else 1
        )
        shape = (*w.dims, self.groups, self.source.name, self.rows)
        pointers = "ptr x, ptr sums, ptr w, ptr scales, ptr y"
        super().__init__(
            f"groups_{'_'.join(map(str, shape))}",
            "void",
            signature(f"i64 lo, i64 hi, {pointers}, i64 m"),
        )
        with self.loop("%lo", "%hi") as item:
            strips = self.half // self.t.columns
            block, at = self.div(item, strips), self.mul(self.rem(item, strips), self.t.columns)
            low = self.add(self.mul(block, 2 * self.half), at)
            source = self.gep("i8", "%w", self.add(self.mul(block, self.k * self.half), at))
            first: Int = 0
            m: Int = self.rows if isinstance(self.rows, int) else "%m"
            for height in HEIGHTS:
                end = self.sub(m, self.rem(self.sub(m, first), height))
                if first != end:
                    with self.loop(first, end, height) as row:
                        self._tile(source, low, row, height)
                first = end

    def _tile(self, source: str, low: Int, row: Int, height: int) -> None:
        """`height` rows of y from `row` on, of the bytes at `source`, of which the first holds the
        row `low` of the matrix."""
        t, group = self.t, self.k // self.groups
        columns = [
            self.add(low, half * self.half + v * t.lanes)
            for v in range(t.vectors)
            for half in (0, 1)
        ]
        zeros = [(t.vector, "zeroinitializer")] * (len(columns) * height)
        unroll = 2 if len(zeros) <= 4 else 1  # sums wait for themselves, four cycles
        with self.loop(0, self.groups, 1, zeros) as totals:
            first = self.mul(totals.index, group)
            with self.loop(first, self.add(first, group), unroll, zeros * unroll, True) as sums:
                sums.next = []
                for i in range(unroll):
                    old = sums.vars[i * len(zeros) :]
                    sums.next += self._step(source, self.add(sums.index, i), row, height, old)
            found = sums.vars[: len(zeros)]
            if unroll == 2:
                other = sums.vars[len(zeros) :]
                found = [self.op(f"fadd {t.vector} {a}, {b}") for a, b in zip(found, other)]
            totals.next = self._scaled(totals.index, columns, row, found, totals.vars)
        for i, total in enumerate(totals.vars):
            r, c = divmod(i, len(columns))
            at = self.add(self.mul(self.add(row, r), self.n), columns[c])
            self.store(t.vector, total, self.gep("float", "%y", at), 4)

    def _x(self, pointer: str, row: Int, width: int, at: Int) -> str:
        """An element of a matrix, in all lanes."""
        place = self.add(self.mul(row, width), at)
        return splat(self, "float", self.t.lanes, self.load_at("float", pointer, place, 4))

    def _step(self, source: str, k: Int, row: Int, height: int, sums: list[str]) -> list[str]:
        """The products with the bytes of one k: per row of x, per vector, low and high halves."""
        t, numbers, integers = self.t, [], f"<{self.t.lanes} x i32>"
        for v in range(t.vectors):
            at = self.gep("i8", source, self.add(self.mul(k, self.half), v * t.lanes))
            code = self.load(f"<{t.lanes} x i8>", at, 1)
            code = self.op(f"zext <{t.lanes} x i8> {code} to {integers}")
            for half in ("and {} {}, splat (i32 15)", "lshr {} {}, splat (i32 4)"):
                q = self.op(half.format(integers, code))
                numbers.append(self.op(f"sitofp {integers} {q} to {t.vector}"))
        following: list[str] = []
        for r in range(height):
            by = self._x("%x", self.add(row, r), self.k, k)
            for q in numbers:
                following.append(multiply_add(self, t, by, q, sums[len(following)]))
        return following

    def _scaled(
        self, group: Int, columns: list[Int], row: Int, sums: list[str], totals: list[str]
    ) -> list[str]:
        """The totals with the sums of a group."""
        t, scales = self.t, [self._scales(group, c) for c in columns]
        result = []
        for i, (total, found) in enumerate(zip(totals, sums, strict=True)):
            r, c = divmod(i, len(columns))
            whole = self._x("%sums", self.add(row, r), self.groups, group)
            total = multiply_add(self, t, found, scales[c][0], total)
            result.append(multiply_add(self, t, whole, scales[c][1], total))
        return result

    def _scales(self, group: Int, column: Int) -> list[str]:
        """Scales, and offsets less 8 scales, of the rows of a vector."""
        t, kind, size = self.t, self.source.kind, 2 * self.source.itemsize
        at = self.add(self.mul(group, self.n), column)
        p = self.gep("i8", "%scales", self.mul(at, size))
        ahead = self.gep("i8", p, AHEAD * self.n * size)
        self.do(f"call void @llvm.prefetch.p0(ptr {ahead}, i32 0, i32 3, i32 1)")
        both, vector = self.load(f"<{2 * t.lanes} x {kind}>", p, 1), f"<{2 * t.lanes} x {kind}>"
        pair = []
        for first in (0, 1):
            order = ", ".join(f"i32 {first + 2 * i}" for i in range(t.lanes))
            v = f"shufflevector {vector} {both}, {vector} poison, <{t.lanes} x i32> <{order}>"
            pair.append(converted(self, t, self.source, self.op(v)))
        eight = self.op(f"fmul {t.vector} {pair[0]}, splat (float 8.0)")
        return [pair[0], self.op(f"fsub {t.vector} {pair[1]}, {eight}")]


def emit_groups(program: Program, x: Instruction) -> None:
    """A step with such a product."""
    kernel = _Kernel(x, min(program.target.lanes(32), fixed(x.operands[2].dims[2])))
    name = program.function(kernel.name, kernel.text())
    places = [*map(program.place, x.operands), program.place(x, 0)]
    arguments = [f"ptr {program.at(p)}" for p in places] + [f"i64 {program.size(kernel.rows)}"]
    items = kernel.blocks * kernel.half // kernel.t.columns
    each = kernel.k * kernel.t.columns * (0.04 + 0.05 * hint(kernel.rows, 512))
    program.parallel(name, arguments, items, cost=50 + each)
