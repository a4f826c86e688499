"""Matrix products on a grid: a group computes a tile of C, going through K in slices that its threads bring to shared memory.

    C[m, n] = sum_k A(m, k) B(k, n)       A, B: any functions of their indices, so convolutions are products too (conv.py)

Each of 256 threads holds 4 x 4 elements of a 64 x 64 tile in registers. Elements outside of the matrices are zero, so no size is special.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_hlo.compiler.codegen import scalar
from torch_hlo.compiler.codegen.function import Int
from torch_hlo.compiler.codegen.inline import Writer, load
from torch_hlo.compiler.codegen.scalar import STORAGE
from torch_hlo.hlo.dim import Size, ceildiv

TILE, SLICE, SIDE, EACH = 64, 8, 16, 4  # of C; of K; threads along a side; elements of a thread along a side
THREADS = SIDE * SIDE
REGISTER_TYPE = {"float": "f32", "double": "f64", "i32": "s32", "i64": "s64"}  # element type that values of a kind are loaded as
Element = Callable[[Int, Int], str]  # (row or column, k) -> register value; only called for indices inside


class Tile:
    """Writes the product of one tile into `f`, a group function. `kind`: register type of the accumulators."""

    def __init__(self, f: Writer, kind: str) -> None:
        self.f, self.kind = f, kind
        self.family = f.program.target.family
        self.t = f.emit().typed(kind)

    def declarations(self) -> str:
        return "".join(f"@SELF.{x} = internal addrspace(3) global [{SLICE * TILE} x {self.kind}] undef, align 16\n" for x in "ab")

    def write(self, m: Int, n: Int, k: Int, row: Int, column: Int, a: Element, b: Element, a_along_k: bool, b_along_k: bool,
              store: Callable[[Int, Int, str], None]) -> None:
        """C's tile at (row, column). `a_along_k`: neighbouring k are neighbours in memory; it decides which thread loads what."""
        f, t = self.f, self.t
        x, y = f.rem("%kernel.t", SIDE), f.div("%kernel.t", SIDE)
        zero = t.const(0)
        with f.loop(0, k, SLICE, carry=[(self.kind, zero)] * (EACH * EACH)) as step:
            for name, value, size, first, along in (("a", a, m, row, a_along_k), ("b", b, n, column, b_along_k)):
                for part in range(SLICE * TILE // THREADS):
                    self._bring(name, value, size, k, first, step.index, part, along)
            self._barrier()
            sums = list(step.vars)
            for i in range(SLICE):
                left = [self._take("a", i, f.add(f.mul(y, EACH), r)) for r in range(EACH)]
                right = [self._take("b", i, f.add(f.mul(x, EACH), c)) for c in range(EACH)]
                for r in range(EACH):
                    for c in range(EACH):
                        old = sums[r * EACH + c]
                        sums[r * EACH + c] = t.fma(left[r], right[c], old) if t.is_float else t.add(t.mul(left[r], right[c]), old)
            self._barrier()
            step.next = sums
        for r in range(EACH):
            at_row = f.add(row, f.add(f.mul(y, EACH), r))
            with f.when(f.icmp("slt", at_row, m)):
                for c in range(EACH):
                    at_column = f.add(column, f.add(f.mul(x, EACH), c))
                    with f.when(f.icmp("slt", at_column, n)):
                        store(at_row, at_column, step.vars[r * EACH + c])

    def _bring(self, name: str, value: Element, size: Int, k: Int, first: Int, base: Int, part: int, along: bool) -> None:
        """One element per thread into shared memory, as [k][row]."""
        f = self.f
        number = f.add("%kernel.t", part * THREADS)
        i, r = (f.rem(number, SLICE), f.div(number, SLICE)) if along else (f.div(number, TILE), f.rem(number, TILE))
        at, deep = f.add(first, r), f.add(base, i)
        inside = f.op(f"and i1 {f.icmp('slt', at, size)}, {f.icmp('slt', deep, k)}")
        got, = f.choose(inside, lambda: [value(at, deep)], lambda: [self.t.const(0)], [self.kind])
        f.store(self.kind, got, f.gep(self.kind, f"@SELF.{name}", f.add(f.mul(i, TILE), r)))

    def _take(self, name: str, i: int, r: Int) -> str:
        return self.f.load(self.kind, self.f.gep(self.kind, f"@SELF.{name}", self.f.add(r, i * TILE)))

    def _barrier(self) -> None:
        self.f.lines.append(f"  {self.family.barrier}")


def element(f: Writer, dtype: str, kind: str, pointer: str, at: Int) -> str:
    """An element as a value of register type `kind`."""
    value = load(f, dtype, pointer, at)
    wanted = REGISTER_TYPE[kind]
    return value if STORAGE[dtype].register == kind else scalar.convert(f.emit(), dtype, wanted, value)


def emit_product(program, p, kind: str, dtypes: tuple[str, str], pointers: Sequence[str]) -> None:
    """Launch the kernel of a strided product (dot.Product); `pointers` are A, B, C, whose elements are accumulators."""
    key = ("grid product", kind, dtypes, len(p.batch), p.a[1] == 1, p.b[1] == 1)
    name = program.once(key, lambda: _strided(program, kind, dtypes, len(p.batch), p.a[1] == 1, p.b[1] == 1))
    across, down = ceildiv(p.n, TILE), ceildiv(p.m, TILE)
    groups: Size = across * down
    for size, *_ in p.batch:
        groups = groups * size
    sizes = [p.m, p.n, p.k, *p.a, *p.b, p.c_m, across, down, *(v for entry in p.batch for v in entry)]
    program.parallel(name, [f"ptr {q}" for q in pointers] + [f"i64 {program.size(s)}" for s in sizes], program.size(groups))


def _strided(program, kind: str, dtypes: tuple[str, str], batch: int, a_along_k: bool, b_along_k: bool) -> str:
    """The function of a product with strides and sizes as arguments."""
    names = ["m", "n", "k", "a_m", "a_k", "b_n", "b_k", "c_m", "across", "down"]
    names += [f"{q}{i}" for i in range(batch) for q in ("size", "batch_a", "batch_b", "batch_c")]
    forms = "".join("k" if along else "o" for along in (a_along_k, b_along_k))
    f = Writer(program, f"dot_{dtypes[0]}_{dtypes[1]}_{kind}_{forms}_{batch}", [("i64", "lo"), ("i64", "hi"), *(("ptr", q) for q in "ABC"), *(("i64", q) for q in names)])
    rest, column = f.div("%lo", "%across"), f.mul(f.rem("%lo", "%across"), TILE)
    rest, row = f.div(rest, "%down"), f.mul(f.rem(rest, "%down"), TILE)
    offsets: list[Int] = [0, 0, 0]
    for i in reversed(range(batch)):
        index = f.rem(rest, f"%size{i}") if i else rest
        rest = f.div(rest, f"%size{i}") if i else rest
        offsets = [f.add(o, f.mul(index, f"%batch_{q}{i}")) for o, q in zip(offsets, "abc", strict=True)]

    def source(pointer: str, dtype: str, offset: Int, along_k: bool, free: str, deep: str) -> Element:
        def value(at: Int, k: Int) -> str:
            inner = k if along_k else f.mul(k, deep)
            return element(f, dtype, kind, pointer, f.add(offset, f.add(f.mul(at, free), inner)))

        return value

    a = source("%A", dtypes[0], offsets[0], a_along_k, "%a_m", "%a_k")
    b = source("%B", dtypes[1], offsets[1], b_along_k, "%b_n", "%b_k")

    def store(i: Int, j: Int, value: str) -> None:
        f.store(kind, value, f.gep(kind, "%C", f.add(offsets[2], f.add(f.mul(i, "%c_m"), j))))

    tile = Tile(f, kind)
    tile.write("%m", "%n", "%k", row, column, a, b, a_along_k, b_along_k, store)
    f.unit.declare(program)
    return program.group_function(f.name, tile.declarations() + f.text(), THREADS)
