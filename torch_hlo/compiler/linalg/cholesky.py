"""cholesky and triangular-solve, one matrix of the batch per thread at a time: in blocks
(blocked_factors.py), or for complex numbers and on GPUs by textbook loops."""

from __future__ import annotations

import math
from typing import Any

from torch_hlo.hlo.ir import Instruction, build, instr, replace

from ..codegen import CodegenError, Program, Writer, load, store
from ..control.control_flow import copy_places
from ..gather.gather_scatter import Sizes
from ..llvm import Int
from ..matmul.dot import emit_tree
from ..matmul.product import hint
from .blocked_factors import KINDS, Kernel, Matrix

REAL_KIND = {"f32": "float", "f64": "double", "c64": "float", "c128": "double"}


class _Number:
    """Arithmetic on one element of a real or complex type, in a Function."""

    def __init__(self, f: Writer, dtype: str) -> None:
        self.f = f
        self.dtype = dtype
        self.kind = REAL_KIND[dtype]
        self.complex = dtype[0] == "c"
        self.zero = ("0.0", "0.0") if self.complex else "0.0"
        self.types = [self.kind] * (2 if self.complex else 1)

    def _op(self, name: str, a: str, b: str) -> str:
        return self.f.op(f"{name} {self.kind} {a}, {b}")

    def parts(self, value: Any) -> list[str]:
        return list(value) if self.complex else [value]

    def whole(self, parts: list[str]) -> Any:
        return tuple(parts) if self.complex else parts[0]

    def conj(self, a: Any) -> Any:
        return (a[0], self.f.op(f"fneg {self.kind} {a[1]}")) if self.complex else a

    def sub(self, a: Any, b: Any) -> Any:
        return self.whole(
            [self._op("fsub", p, q) for p, q in zip(self.parts(a), self.parts(b), strict=True)]
        )

    def mul(self, a: Any, b: Any) -> Any:
        if not self.complex:
            return self._op("fmul", a, b)
        (ar, ai), (br, bi) = a, b
        m = self._op
        return m("fsub", m("fmul", ar, br), m("fmul", ai, bi)), m(
            "fadd", m("fmul", ar, bi), m("fmul", ai, br)
        )

    def div(self, a: Any, b: Any) -> Any:
        if not self.complex:
            return self._op("fdiv", a, b)
        m = self._op
        size = m("fadd", m("fmul", b[0], b[0]), m("fmul", b[1], b[1]))
        real, imag = self.mul(a, self.conj(b))
        return m("fdiv", real, size), m("fdiv", imag, size)

    def select(self, condition: str, a: Any, b: Any) -> Any:
        return self.whole(
            [
                self.f.select(condition, self.kind, p, q)
                for p, q in zip(self.parts(a), self.parts(b), strict=True)
            ]
        )


def _check(x: Instruction) -> None:
    if x.dtype not in REAL_KIND:
        raise CodegenError(
            f"{x.op}({x.operand_shapes}): only f32, f64, c64 and c128; convert first"
        )


def cholesky(program: Program, x: Instruction) -> None:
    """The factor of each matrix; a matrix that is not positive definite gives NaNs."""
    if x.dtype in ("f16", "bf16"):
        return emit_tree(
            program,
            build.convert(replace(x, (build.convert(x.operand, "f32"),)), x.dtype),
            x.operands,
            x,
        )
    _check(x)
    n = x.dims[-1]
    dtype = x.dtype
    if x.size == 0:
        return
    lower = x["lower"]
    f = Writer(program, "cholesky", "i64 lo, i64 hi, ptr a, ptr l")
    size = Sizes(f)
    rows = size(n)
    with f.items() as item:
        base = f.mul(item, f.mul(rows, rows))
        if dtype in KINDS and program.target.computes_in_vectors:
            _cholesky_in_blocks(f, dtype, base, rows, lower)
        else:
            _cholesky_by_elements(f, _Number(f, dtype), base, rows, lower)
    batch = math.prod(x.dims[:-2])
    name = f.define()
    arguments = program.arguments(map(program.pointer, (x.operand, x)), size.names)
    program.parallel(name, arguments, batch, cost=0.1 * hint(n, 64) ** 3 + 50)


def _cholesky_in_blocks(f: Writer, dtype: str, base: Int, rows: Int, lower: bool) -> None:
    kernel = Kernel(f, dtype)
    x = Matrix("%l", base, rows)
    if lower:
        kernel.mirror(Matrix("%a", base, rows), x, rows, lower=False)
    else:
        kernel.map_rows(
            lambda own, v: [v],
            f.mul(rows, rows),
            Matrix("%l", base, 1),
            Matrix("%a", base, 1),
        )
    kernel.cholesky(x, rows)
    last = kernel.get(x, f.sub(rows, 1), f.sub(rows, 1))
    bad = f.op(f"fcmp uno {kernel.kind} {last}, {last}")  # one bad pivot makes the whole factor NaN
    if lower:
        kernel.mirror(x, x, rows, lower=True)
    with f.loop(0, rows) as i:
        with f.when(bad), f.loop(0, rows) as j:
            kernel.put(kernel.t.const(float("nan")), x, i, j)
        first, end = (f.add(i, 1), rows) if lower else (0, i)
        kernel.map_rows(lambda v: ["zeroinitializer"], f.sub(end, first), x.part(f, i, first))


def _cholesky_by_elements(f: Writer, number: _Number, base: Int, rows: Int, lower: bool) -> None:
    """L[i][j] = (A[i][j] - sum_k L[i][k] conj(L[j][k])) / L[j][j]; an upper factor is stored
    transposed and conjugated."""
    dtype = number.dtype

    def at(i: Int, j: Int) -> Int:
        return f.add(base, f.muladd(i, rows, j) if lower else f.muladd(j, rows, i))

    with f.loop(0, rows) as i:
        with f.loop(0, rows) as j:
            above = f.icmp("sgt", j, i)
            with f.when(above):
                store(f, dtype, number.zero, "%l", at(i, j))
            with f.when(f.op(f"xor i1 {above}, true")):
                start = load(f, dtype, "%a", at(i, j))
                start = start if lower else number.conj(start)
                with f.loop(
                    0,
                    j,
                    carry=list(zip(number.types, number.parts(start), strict=True)),
                ) as k:
                    left, right = (load(f, dtype, "%l", at(r, k.index)) for r in (i, j))
                    left, right = (
                        (left, number.conj(right)) if lower else (number.conj(left), right)
                    )
                    k.next = number.parts(number.sub(number.whole(k.vars), number.mul(left, right)))
                value = number.whole(k.vars)
                diagonal = f.icmp("eq", i, j)
                real = number.parts(value)[0]
                root = f.typed(number.kind).sqrt(real)
                # sqrt(0) would divide by zero: XLA's answer for a singular matrix is nan too
                valid = f.op(f"fcmp ogt {number.kind} {real}, 0.0")
                root = f.select(
                    valid,
                    number.kind,
                    root,
                    f.typed(number.kind).const(float("nan")),
                )
                pivot = load(f, dtype, "%l", at(j, j))
                value = number.select(
                    diagonal,
                    number.whole([root] + ["0.0"] * number.complex),
                    number.div(value, pivot),
                )
                store(f, dtype, value if lower else number.conj(value), "%l", at(i, j))
    # One bad pivot makes the whole factor NaN.
    last = number.parts(load(f, dtype, "%l", at(f.sub(rows, 1), f.sub(rows, 1))))[0]
    with f.when(f.op(f"fcmp uno {number.kind} {last}, {last}")):
        nan = f.typed(number.kind).const(float("nan"))
        with f.loop(0, rows) as i, f.loop(0, f.add(i, 1)) as j:
            store(f, dtype, number.whole([nan] * len(number.types)), "%l", at(i, j))


def triangular_solve(program: Program, x: Instruction) -> None:
    """op(a) x = b by substitution; the right-hand side solves the transposed system."""
    a, b = x.operands
    attrs = {k: x[k] for k in ("left_side", "lower", "unit_diagonal", "transpose_a")}
    if x.size == 0:
        return
    if x.dtype in ("f16", "bf16"):
        wide = instr(
            "triangular-solve",
            (build.convert(a, "f32"), build.convert(b, "f32")),
            **attrs,
        )
        return emit_tree(program, build.convert(wide, x.dtype), x.operands, x)
    _check(x)
    if not attrs["left_side"]:
        return emit_tree(program, _from_the_left(x, attrs), x.operands, x)
    copy_places(program, program.places(x), program.places(b))
    n, columns = x.dims[-2:]
    dtype = x.dtype
    transposed = attrs["transpose_a"] != "NO_TRANSPOSE"
    lower = attrs["lower"] != transposed
    unit = attrs["unit_diagonal"]
    f = Writer(program, "triangular_solve", "i64 lo, i64 hi, ptr a, ptr x")
    size = Sizes(f)
    rows = size(n)
    width = size(columns)
    with f.items() as item:
        coefficients = Matrix("%a", f.mul(item, f.mul(rows, rows)), rows)
        coefficients = coefficients.turned if transposed else coefficients
        solution = Matrix("%x", f.mul(item, f.mul(rows, width)), width)
        if dtype in KINDS and program.target.computes_in_vectors:
            Kernel(f, dtype).substitute(coefficients, solution, rows, width, lower, unit)
        else:
            number = _Number(f, dtype)
            adjoint = attrs["transpose_a"] == "ADJOINT"
            _substitute(f, number, coefficients, solution, rows, width, lower, unit, adjoint)
    name = f.define()
    arguments = program.arguments(map(program.pointer, (a, x)), size.names)
    cost = 50 + 0.1 * hint(n, 64) ** 2 * hint(columns, 64)
    program.parallel(name, arguments, math.prod(x.dims[:-2]), cost=cost)


def _from_the_left(x: Instruction, attrs: dict[str, Any]) -> Instruction:
    """x op(a) = b as the transposed system."""
    a, b = x.operands
    swap = (*range(x.rank - 2), x.rank - 1, x.rank - 2)
    transposed = attrs["transpose_a"] != "NO_TRANSPOSE"
    if attrs["transpose_a"] == "ADJOINT" and x.kind == "c":
        a = build.complex_(build.real(a), build.negate(build.imag(a)))
    flipped = {
        "left_side": True,
        "transpose_a": "NO_TRANSPOSE" if transposed else "TRANSPOSE",
    }
    solved = instr("triangular-solve", (a, build.transpose(b, swap)), **{**attrs, **flipped})
    return build.transpose(solved, swap)


def _substitute(
    f: Writer,
    number: _Number,
    a: Matrix,
    x: Matrix,
    rows: Int,
    width: Int,
    lower: bool,
    unit: bool,
    conjugate: bool,
) -> None:
    dtype = number.dtype

    def coefficient(i: Int, j: Int) -> Any:
        v = load(f, dtype, a.pointer, a.at(f, i, j))
        return number.conj(v) if conjugate else v

    with f.loop(0, rows) as step:
        i = step if lower else f.sub(f.sub(rows, 1), step)
        first, last = (0, i) if lower else (f.add(i, 1), rows)
        with f.loop(first, last) as j:
            factor = coefficient(i, j)
            with f.loop(0, width) as c:
                old, by = (load(f, dtype, x.pointer, x.at(f, r, c)) for r in (i, j))
                store(f, dtype, number.sub(old, number.mul(factor, by)), x.pointer, x.at(f, i, c))
        if not unit:
            pivot = coefficient(i, i)
            with f.loop(0, width) as c:
                own = x.at(f, i, c)
                store(f, dtype, number.div(load(f, dtype, x.pointer, own), pivot), x.pointer, own)
