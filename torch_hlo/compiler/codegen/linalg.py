"""cholesky and triangular-solve: textbook loops, vectorised along rows, one matrix of the batch per thread at a time."""
from __future__ import annotations

from torch_hlo.compiler.codegen.control import copy_places
from torch_hlo.compiler.codegen.dot import emit_tree
from torch_hlo.compiler.codegen.function import Int
from torch_hlo.compiler.codegen.gemm import KIND_SUFFIX, lane_mask, splat
from torch_hlo.compiler.codegen.indexing import Sizes
from torch_hlo.compiler.codegen.inline import Writer, load, store
from torch_hlo.compiler.codegen.program import CodegenError
from torch_hlo.compiler.codegen.registry import emits_step
from torch_hlo.hlo import build
from torch_hlo.hlo.dim import Dim, Size
from torch_hlo.hlo.ir import Instruction, instr

REAL_KIND = {"f32": "float", "f64": "double", "c64": "float", "c128": "double"}


class _Number:
    """Arithmetic on one element of a real or complex type, in a Function."""

    def __init__(self, f: Writer, dtype: str) -> None:
        self.f, self.dtype, self.kind = f, dtype, REAL_KIND[dtype]
        self.complex = dtype[0] == "c"
        self.zero = ("0.0", "0.0") if self.complex else "0.0"
        self.types = [self.kind] * (2 if self.complex else 1)

    def _op(self, name: str, a: str, b: str) -> str:
        return self.f.op(f"{name} {self.kind} {a}, {b}")

    def parts(self, value) -> list[str]:
        return list(value) if self.complex else [value]

    def whole(self, parts: list[str]):
        return tuple(parts) if self.complex else parts[0]

    def conj(self, a):
        return (a[0], self.f.op(f"fneg {self.kind} {a[1]}")) if self.complex else a

    def sub(self, a, b):
        return self.whole([self._op("fsub", p, q) for p, q in zip(self.parts(a), self.parts(b), strict=True)])

    def mul(self, a, b):
        if not self.complex:
            return self._op("fmul", a, b)
        (ar, ai), (br, bi) = a, b
        m = self._op
        return m("fsub", m("fmul", ar, br), m("fmul", ai, bi)), m("fadd", m("fmul", ar, bi), m("fmul", ai, br))

    def div(self, a, b):
        if not self.complex:
            return self._op("fdiv", a, b)
        m = self._op
        size = m("fadd", m("fmul", b[0], b[0]), m("fmul", b[1], b[1]))
        real, imag = self.mul(a, self.conj(b))
        return m("fdiv", real, size), m("fdiv", imag, size)

    def select(self, condition: str, a, b):
        return self.whole([self.f.select(condition, self.kind, p, q) for p, q in zip(self.parts(a), self.parts(b), strict=True)])


def _batch(dims: tuple[Size, ...]) -> Size:
    total: Size = 1
    for d in dims:
        total = total * d
    return total


def _hint(size: Size) -> int:
    return size if isinstance(size, int) else 64


def _check(x: Instruction) -> None:
    if x.shape.dtype not in REAL_KIND:
        raise CodegenError(f"{x.op}({', '.join(str(o.shape) for o in x.operands)}): only f32, f64, c64 and c128; convert first")


@emits_step("cholesky")
def cholesky(program, x: Instruction) -> None:
    """The factor of each matrix; a matrix that is not positive definite gives NaNs."""
    if x.shape.dtype in ("f16", "bf16"):
        return emit_tree(program, build.convert(instr("cholesky", (build.convert(x.operands[0], "f32"),), **dict(x.attrs)), x.shape.dtype), x.operands, x)
    _check(x)
    n, dtype = x.shape.dims[-1], x.shape.dtype
    if x.shape.size == 0:
        return
    lower = x["lower"]
    f = Writer(program, "cholesky", [("i64", "lo"), ("i64", "hi"), ("ptr", "a"), ("ptr", "l")])
    size, number = Sizes(f), _Number(f, dtype)
    rows = size(n)
    with f.loop("%lo", "%hi") as item:
        base = f.mul(item, f.mul(rows, rows))

        def at(i: Int, j: Int) -> Int:
            return f.add(base, f.add(f.mul(i, rows), j) if lower else f.add(f.mul(j, rows), i))

        # L[i][j] = (A[i][j] - sum_k L[i][k] conj(L[j][k])) / L[j][j]; an upper factor is stored transposed and conjugated.
        with f.loop(0, rows) as i:
            with f.loop(0, rows) as j:
                above = f.icmp("sgt", j, i)
                with f.when(above):
                    store(f, dtype, number.zero, "%l", at(i, j))
                with f.when(f.op(f"xor i1 {above}, true")):
                    start = load(f, dtype, "%a", at(i, j))
                    start = start if lower else number.conj(start)
                    if number.complex or not lower or program.target.strip == 1:
                        with f.loop(0, j, carry=list(zip(number.types, number.parts(start), strict=True))) as k:
                            left, right = (load(f, dtype, "%l", at(r, k.index)) for r in (i, j))
                            left, right = (left, number.conj(right)) if lower else (number.conj(left), right)
                            k.next = number.parts(number.sub(number.whole(k.vars), number.mul(left, right)))
                        value = number.whole(k.vars)
                    else:
                        value = number.sub(start, _row_dot(f, program.target.strip, number.kind, f.add(base, f.mul(i, rows)), f.add(base, f.mul(j, rows)), j))
                    diagonal = f.icmp("eq", i, j)
                    real = number.parts(value)[0]
                    root = f.emit().typed(number.kind).sqrt(real)
                    # sqrt(0) would divide by zero: XLA's answer for a singular matrix is nan too
                    valid = f.op(f"fcmp ogt {number.kind} {real}, 0.0")
                    root = f.select(valid, number.kind, root, f.emit().typed(number.kind).const(float("nan")))
                    pivot = load(f, dtype, "%l", at(j, j))
                    value = number.select(diagonal, number.whole([root] + ["0.0"] * number.complex), number.div(value, pivot))
                    store(f, dtype, value if lower else number.conj(value), "%l", at(i, j))
        # One bad pivot makes the whole factor NaN.
        last = number.parts(load(f, dtype, "%l", at(f.sub(rows, 1), f.sub(rows, 1))))[0]
        with f.when(f.op(f"fcmp uno {number.kind} {last}, {last}")):
            nan = f.emit().typed(number.kind).const(float("nan"))
            with f.loop(0, rows) as i, f.loop(0, f.add(i, 1)) as j:
                store(f, dtype, number.whole([nan] * len(number.types)), "%l", at(i, j))
    batch = _batch(x.shape.dims[:-2])
    name = f.define()
    arguments = [f"ptr {program.pointer(x.operands[0])}", f"ptr {program.pointer(x)}", *size.arguments(program)]
    program.parallel(name, arguments, program.size(batch), cost=0.1 * _hint(n) ** 3 + 50)


def _row_dot(f: Writer, lanes: int, kind: str, a: Int, b: Int, n: Int) -> str:
    """sum_k l[a + k] l[b + k] over k < n, of real elements."""
    vector, suffix = f"<{lanes} x {kind}>", f"v{lanes}{KIND_SUFFIX[kind]}"
    dtype = {"float": "f32", "double": "f64"}[kind]
    whole = f.mul(f.div(n, lanes), lanes)

    def step(k: Int, total: str, mask: str | None) -> str:
        p, q = (load(f, dtype, "%l", f.add(o, k), lanes, mask) for o in (a, b))
        return f.op(f"call {vector} @llvm.fma.{suffix}({vector} {p}, {vector} {q}, {vector} {total})")

    with f.loop(0, whole, lanes, carry=[(vector, "zeroinitializer")]) as loop:
        loop.next = [step(loop.index, loop.vars[0], None)]
    total, = f.choose(f.icmp("slt", whole, n), lambda: [step(whole, loop.vars[0], lane_mask(f, lanes, whole, n))], lambda: [loop.vars[0]], [vector])
    return f.op(f"call reassoc {kind} @llvm.vector.reduce.fadd.{suffix}({kind} -0.0, {vector} {total})")


@emits_step("triangular-solve")
def triangular_solve(program, x: Instruction) -> None:
    """op(a) x = b by substitution; the right-hand side solves the transposed system."""
    a, b = x.operands
    attrs = {k: x[k] for k in ("left_side", "lower", "unit_diagonal", "transpose_a")}
    if x.shape.size == 0:
        return
    if x.shape.dtype in ("f16", "bf16"):
        wide = instr("triangular-solve", (build.convert(a, "f32"), build.convert(b, "f32")), **attrs)
        return emit_tree(program, build.convert(wide, x.shape.dtype), x.operands, x)
    _check(x)
    if not attrs["left_side"]:
        swap = (*range(x.shape.rank - 2), x.shape.rank - 1, x.shape.rank - 2)
        flipped = {"NO_TRANSPOSE": "TRANSPOSE", "TRANSPOSE": "NO_TRANSPOSE", "ADJOINT": "NO_TRANSPOSE"}[attrs["transpose_a"]]
        if attrs["transpose_a"] == "ADJOINT" and x.shape.kind == "c":
            a = build.complex_(build.real(a), build.negate(build.imag(a)))
        solved = instr("triangular-solve", (a, build.transpose(b, swap)), **{**attrs, "left_side": True, "transpose_a": flipped})
        return emit_tree(program, build.transpose(solved, swap), x.operands, x)
    copy_places(program, program.places(x), program.places(b))
    n, columns = x.shape.dims[-2:]
    dtype = x.shape.dtype
    transposed = attrs["transpose_a"] != "NO_TRANSPOSE"
    lower = attrs["lower"] != transposed
    f = Writer(program, "triangular_solve", [("i64", "lo"), ("i64", "hi"), ("ptr", "a"), ("ptr", "x")])
    size, number = Sizes(f), _Number(f, dtype)
    rows, width = size(n), size(columns)
    lanes = 1 if number.complex else program.target.strip

    def coefficient(base: Int, i: Int, j: Int):
        v = load(f, dtype, "%a", f.add(base, f.add(f.mul(j, rows), i) if transposed else f.add(f.mul(i, rows), j)))
        return number.conj(v) if attrs["transpose_a"] == "ADJOINT" else v

    with f.loop("%lo", "%hi") as item:
        a_base, x_base = f.mul(item, f.mul(rows, rows)), f.mul(item, f.mul(rows, width))
        with f.loop(0, rows) as step:
            i = step if lower else f.sub(f.sub(rows, 1), step)
            own = f.add(x_base, f.mul(i, width))
            first, last = (0, i) if lower else (f.add(i, 1), rows)
            with f.loop(first, last) as j:
                _row_update(f, number, dtype, lanes, own, f.add(x_base, f.mul(j, width)), coefficient(a_base, i, j), width)
            if not attrs["unit_diagonal"]:
                pivot = coefficient(a_base, i, i)
                with f.loop(0, width) as c:
                    store(f, dtype, number.div(load(f, dtype, "%x", f.add(own, c)), pivot), "%x", f.add(own, c))
    name = f.define()
    arguments = [f"ptr {program.pointer(a)}", f"ptr {program.pointer(x)}", *size.arguments(program)]
    cost = 50 + 0.1 * _hint(n) ** 2 * (columns if not isinstance(columns, Dim) else 64)
    program.parallel(name, arguments, program.size(_batch(x.shape.dims[:-2])), cost=cost)


def _row_update(f: Writer, number: _Number, dtype: str, lanes: int, own: Int, other: Int, factor, width: Int) -> None:
    """x[own + c] -= factor * x[other + c] for c < width."""
    if lanes == 1:
        with f.loop(0, width) as c:
            old = load(f, dtype, "%x", f.add(own, c))
            store(f, dtype, number.sub(old, number.mul(factor, load(f, dtype, "%x", f.add(other, c)))), "%x", f.add(own, c))
        return
    vector, suffix = f"<{lanes} x {number.kind}>", f"v{lanes}{KIND_SUFFIX[number.kind]}"
    minus = splat(f, number.kind, lanes, f.op(f"fneg {number.kind} {factor}"))
    with f.loop(0, width, lanes) as c:
        mask = lane_mask(f, lanes, c, width)
        old, by = (load(f, dtype, "%x", f.add(o, c), lanes, mask) for o in (own, other))
        new = f.op(f"call {vector} @llvm.fma.{suffix}({vector} {minus}, {vector} {by}, {vector} {old})")
        store(f, dtype, new, "%x", f.add(own, c), lanes, mask)


