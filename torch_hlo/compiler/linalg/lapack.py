"""Eigenvalues, eigenvectors and singular values by LAPACK's own routines, called by machine code,
one matrix of a stack after the other.

lowering/linalg/lapack_ops.py names the routine in a call's attributes where the process has it:
"lapack": [name, *options]. The arithmetic is PyTorch's: the same routines on the same matrices,
column by column. A routine that fails (no convergence, values that are no numbers) leaves the call
to PyTorch, which raises."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch_hlo.hlo.ir import Instruction, Size

from ..codegen import Program, leaves
from ..llvm import Function, Int, parameters
from .linalg import used_results

_KIND = {"f32": ("s", "float", 4), "f64": ("d", "double", 8)}
# of the calling thread, which may be one that PyTorch has never told how many it is to use
THREADS = "MKL_Set_Num_Threads_Local"
SYMBOLS = (
    THREADS,
    *(f"{letter}{name}_" for letter in "sd" for name in ("syevd", "gesdd", "geev")),
)

_LINE = 16


def call(program: Program, x: Instruction, host: Callable[[], None]) -> bool:
    """Emit a custom call as machine code, if there is some; `host` emits it as a call of Python,
    for when the routine fails."""
    if not program.target.shares_memory or '"lapack"' not in (x.get("opaque") or ""):
        return False
    routine, *options = json.loads(x["opaque"])["lapack"]
    a = x.operand.shape
    if a.dtype not in _KIND or a.size == 0:
        return False
    name, arguments = _ROUTINES[routine](program, x, *options)
    failed = program.call(name, arguments, "i64")
    with program.code.when(program.code.icmp("ne", failed, 0)):
        host()
    return True


class _Routine(Function):
    """i64 name(ptr a, results…, i64 batch, i64 sizes…): 1 when LAPACK says that something went
    wrong."""

    def __init__(
        self,
        program: Program,
        name: str,
        dtype: str,
        pointers: Sequence[str],
        sizes: Sequence[str],
    ) -> None:
        self.letter, self.kind, self.bytes = _KIND[dtype]
        self.failed = ""
        super().__init__(
            f"{self.letter}{name}",
            parameters(pointers, ("batch", *sizes)),
            "i64",
        )
        self.program = program
        self.info = self.integer(0)

    def integer(self, value: Int) -> str:
        """A pointer to a number as Fortran has them."""
        at = self.alloca("i32")
        self.store(
            "i32",
            value if isinstance(value, int) else self.op(f"trunc i64 {value} to i32"),
            at,
        )
        return at

    def letter_of(self, value: str) -> str:
        at = self.alloca("i8")
        self.store("i8", ord(value), at)
        return at

    def memory(self, *counts: Int) -> tuple[str, list[str]]:
        """What to `free`, and one array of each of so many numbers in it."""
        offsets: list[Int] = []
        total: Int = 0
        for n in counts:
            offsets.append(total)
            total = self.muladd(self.div(self.muladd(n, self.bytes, 63), 64), 64, total)
        whole = self.call(
            self.program.symbol("malloc", "declare ptr @malloc(i64)"),
            f"i64 {self.max(total, 64)}",
            result="ptr",
        )
        return whole, [self.gep("i8", whole, o) for o in offsets]

    def free(self, pointer: str) -> None:
        self.call(self.program.symbol("free", "declare void @free(ptr)"), f"ptr {pointer}")

    def fortran(self, name: str, *arguments: str) -> None:
        symbol = f"{self.letter}{name}_"
        self.program.symbol(
            symbol, f"declare void @{symbol}({', '.join(['ptr'] * len(arguments))})"
        )
        self.call(symbol, *(f"ptr {a}" for a in arguments))

    def answer(self, pointer: str) -> Int:
        """A size that a routine gave as one of its numbers."""
        return self.op(f"fptosi {self.kind} {self.load(self.kind, pointer)} to i64")

    def turn(self, source: str, target: str, rows: Int, columns: Int) -> None:
        """target [columns, rows] := source [rows, columns] transposed, a cache line of columns at a
        time."""
        with self.loop(0, columns, _LINE) as first:
            end = self.min(columns, self.add(first, _LINE))
            with self.loop(0, rows) as i:
                row = self.gep(self.kind, source, self.mul(i, columns))
                column = self.gep(self.kind, target, i)
                with self.loop(first, end) as j:
                    self.store_at(
                        self.kind,
                        self.load_at(self.kind, row, j),
                        column,
                        self.mul(j, rows),
                    )

    @contextmanager
    def matrices(self, target: str, rows: Int, columns: Int) -> Iterator[str]:
        """For each matrix of the stack, `target` being the transposed one, with as many threads as
        programs have. One that holds values that are not finite has failed: routines may do
        anything with it."""
        set_threads = self.program.symbol(THREADS, f"declare i32 @{THREADS}(i32)")
        self.failed = self.alloca("i64")
        self.store("i64", 0, self.failed)
        size = self.mul(rows, columns)
        before = self.call(set_threads, f"i32 {self.program.target.cores}", result="i32")
        with self.loop(0, "%batch") as item:
            source = self.gep(self.kind, "%a", self.mul(item, size))
            self.turn(source, target, rows, columns)
            with self.loop(0, size, carry=[(self.kind, "0.0")]) as i:
                value = self.load_at(self.kind, source, i.index)
                i.next = [
                    self.op(
                        f"fadd {self.kind} {i.vars[0]},"
                        f" {self.op(f'fsub {self.kind} {value}, {value}')}"
                    )
                ]
            self.store("i32", 1, self.info)
            with self.when(self.op(f"fcmp oeq {self.kind} {i.vars[0]}, 0.0")):
                yield item
            with self.when(self.icmp("ne", self.load("i32", self.info), 0, "i32")):
                self.store("i64", 1, self.failed)
        self.call(set_threads, f"i32 {before}", result="i32")

    def define(self) -> str:
        self.ret(f"i64 {self.load('i64', self.failed)}")
        return self.program.function(self.name, self.text())


def _arguments(program: Program, x: Instruction, *sizes: Size) -> list[str]:
    a = x.operand
    places = (program.place(a), *leaves(program.places(x)))
    return program.arguments(places, (math.prod(a.dims[:-2]), *sizes))


def _syevd(program: Program, x: Instruction, side: str, vectors: bool) -> tuple[str, list[str]]:
    """Of symmetric matrices, by the triangle `side`: -> (values [..., n], vectors [..., n, n])."""
    dtype = x.operand.dtype
    vectors = vectors and 1 in used_results(x)
    f = _Routine(program, f"syevd_{'V' if vectors else 'N'}{side}", dtype, ("a", "w", "v"), ("n",))
    job = f.letter_of("V" if vectors else "N")
    uplo = f.letter_of(side)
    n = f.integer("%n")
    query = f.integer(-1)
    least = f.alloca(f.kind)
    space = f.alloca("i32")
    f.fortran("syevd", job, uplo, n, least, n, least, least, query, space, query, f.info)
    length = f.answer(least)
    whole_length = f.op(f"sext i32 {f.load('i32', space)} to i64")
    square = f.mul("%n", "%n")
    whole, (m, work, numbers) = f.memory(square, length, whole_length)
    lwork = f.integer(length)
    liwork = f.integer(whole_length)
    with f.matrices(m, "%n", "%n") as item:
        f.fortran(
            "syevd",
            job,
            uplo,
            n,
            m,
            n,
            f.gep(f.kind, "%w", f.mul(item, "%n")),
            work,
            lwork,
            numbers,
            liwork,
            f.info,
        )
        if vectors:
            f.turn(m, f.gep(f.kind, "%v", f.mul(item, square)), "%n", "%n")
    f.free(whole)
    return f.define(), _arguments(program, x, x.operand.dims[-1])


def _gesdd(program: Program, x: Instruction, full: bool, vectors: bool) -> tuple[str, list[str]]:
    """-> (u [..., m, k or m], s [..., k], vh [..., k or n, n])."""
    a = x.operand.shape
    used = used_results(x)
    vectors = vectors and (0 in used or 2 in used)
    mode = ("A" if full else "S") if vectors else "N"
    f = _Routine(program, f"gesdd_{mode}", a.dtype, ("a", "u", "s", "vh"), ("m", "n"))
    least_side = f.min("%m", "%n")
    columns, rows = ("%m", "%n") if mode == "A" else (least_side, least_side)  # of u, of vh
    job = f.letter_of(mode)
    m = f.integer("%m")
    n = f.integer("%n")
    high = f.integer(rows)
    query = f.integer(-1)
    least = f.alloca(f.kind)
    sizes = job, m, n
    f.fortran(
        "gesdd",
        *sizes,
        least,
        m,
        least,
        least,
        m,
        least,
        high,
        least,
        query,
        least,
        f.info,
    )
    length = f.answer(least)
    u_size, v_size = (f.mul("%m", columns), f.mul(rows, "%n")) if vectors else (1, 1)
    whole, (matrix, u, v, work, numbers) = f.memory(
        f.mul("%m", "%n"), u_size, v_size, length, f.mul(8, least_side)
    )
    lwork = f.integer(length)
    with f.matrices(matrix, "%m", "%n") as item:
        s = f.gep(f.kind, "%s", f.mul(item, least_side))
        f.fortran(
            "gesdd",
            *sizes,
            matrix,
            m,
            s,
            u,
            m,
            v,
            high,
            work,
            lwork,
            numbers,
            f.info,
        )
        if vectors:
            f.turn(u, f.gep(f.kind, "%u", f.mul(item, u_size)), columns, "%m")
            f.turn(v, f.gep(f.kind, "%vh", f.mul(item, v_size)), "%n", rows)
    f.free(whole)
    return f.define(), _arguments(program, x, *a.dims[-2:])


def _geev(program: Program, x: Instruction) -> tuple[str, list[str]]:
    """-> (values [..., n], vectors [..., n, n]) or (values), of complex numbers. A pair of
    conjugate eigenvectors comes as real and imaginary part of the first, as columns."""
    dtype = x.operand.dtype
    wanted = len(x.elements) > 1
    vectors = wanted and 1 in used_results(x)
    name = f"geev_{'V' if vectors else 'N'}{len(x.elements)}"
    f = _Routine(program, name, dtype, ("a", "w", "v") if wanted else ("a", "w"), ("n",))
    no = f.letter_of("N")
    job = f.letter_of("V" if vectors else "N")
    n = f.integer("%n")
    one = f.integer(1)
    query = f.integer(-1)
    least = f.alloca(f.kind)
    values = least, least, least
    f.fortran("geev", no, job, n, least, n, *values, one, least, n, least, query, f.info)
    length = f.answer(least)
    square = f.mul("%n", "%n")
    whole, (m, v, re, im, work) = f.memory(square, square if vectors else 1, "%n", "%n", length)
    lwork = f.integer(length)

    with f.matrices(m, "%n", "%n") as item:
        f.fortran("geev", no, job, n, m, n, re, im, m, one, v, n, work, lwork, f.info)
        with f.loop(0, "%n") as j:
            at = f.muladd(item, "%n", j)
            real, imaginary = (f.load_at(f.kind, part, j) for part in (re, im))
            _write_complex(f, "%w", at, real, imaginary)
        if vectors:
            _write_eigenvectors(f, v, im, f.mul(item, square))
    f.free(whole)
    return f.define(), _arguments(program, x, x.operand.dims[-1])


def _write_complex(f: _Routine, to: str, at: Int, real: str, imaginary: str) -> None:
    for part, value in enumerate((real, imaginary)):
        f.store_at(f.kind, value, to, f.muladd(at, 2, part))


def _write_eigenvectors(f: _Routine, v: str, im: str, first: Int) -> None:
    """Make complex columns of the real ones `v`; `im`: the imaginary parts of the values."""
    with f.loop(0, "%n") as j:
        size = f.load_at(f.kind, im, j)
        upper = f.op(f"fcmp ogt {f.kind} {size}, 0.0")
        lower = f.op(f"fcmp olt {f.kind} {size}, 0.0")
        # the column of the real part, and that of the imaginary
        own = f.sub(j, f.op(f"zext i1 {lower} to i64"))
        other = f.add(j, f.op(f"zext i1 {upper} to i64"))
        is_real = f.op(f"fcmp oeq {f.kind} {size}, 0.0")
        with f.loop(0, "%n") as i:
            real, imaginary = (f.load_at(f.kind, v, f.muladd(c, "%n", i)) for c in (own, other))
            negated = f.op(f"fneg {f.kind} {imaginary}")
            imaginary = f.select(lower, f.kind, negated, imaginary)
            at = f.add(first, f.muladd(i, "%n", j))
            _write_complex(f, "%v", at, real, f.select(is_real, f.kind, "0.0", imaginary))


_ROUTINES: dict[str, Callable[..., tuple[str, list[str]]]] = {
    "syevd": _syevd,
    "gesdd": _gesdd,
    "geev": _geev,
}
