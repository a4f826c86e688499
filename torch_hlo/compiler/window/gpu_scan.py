"""Running folds along the last dimension (cumsum, cumprod, cummax…): a group of threads per row, or
per chunk of a long one.

A group goes through its elements in tiles. A thread folds four neighbours in registers; what lies
before them in the tile comes from a butterfly over the threads, what lies before the tile from the
group's last carry. Chunks of a long row are folded first; then each group begins with the fold of
the chunks before its own. Every fold has a fixed shape and keeps the order of the elements, so the
reducer need not commute and results do not depend on chance."""

from __future__ import annotations

from torch_hlo.hlo.ir import DTYPES, Instruction, Size, ceildiv, product

from ..codegen import Writer, apply, leaves, load, load_real, store
from ..gather.gather_scatter import Sizes
from ..gpu.exchange import Exchange
from ..gpu.gpu_program import GpuProgram
from ..llvm import Int, item_parameters, scalar
from ..llvm.scalar import STORAGE
from ..loops.reducer import Reducer
from . import reduce_window as window
from .scan import pointer_names, scan_dimension

THREADS = 256  # of a group; elements of a thread
EACH = 4
TILE = THREADS * EACH
SHORT_ROW = 64  # elements: a thread walks such a row alone
GROUPS = 1024  # that keep a device busy
_SYMBOLIC_CHUNKS = 32


def reduce_window(program: GpuProgram, x: Instruction) -> None:
    scanned = scan_dimension(x)
    dims = x.operand.dims
    short = isinstance(dims[-1], int) and dims[-1] <= SHORT_ROW
    if (
        scanned is None
        or scanned[0] != len(dims) - 1
        or short
        or x.operand.size == 0
        or Reducer(x).needs_initial()
    ):
        return window.reduce_window(program, x)
    s = _Scan(program, x, backward=scanned[1])
    if s.chunks == 1:
        return s.launch("scan_rows", [], s.rows)
    totals = [program.at(program.scratch(s.rows * s.chunks * 8)) for _ in s.kinds]
    s.launch("scan_totals", totals, s.rows * s.chunks)
    s.launch("scan_chunks", totals, s.rows * s.chunks)


class _Scan:
    """What the kernels of one scan share. `kinds`: register types of what is carried; narrow floats
    are summed in f32."""

    def __init__(self, program: GpuProgram, x: Instruction, backward: bool) -> None:
        self.program = program
        self.x = x
        self.backward = backward
        half = len(x.operands) // 2
        self.operands = x.operands[:half]
        self.initials = x.operands[half:]
        self.types = [o.dtype for o in self.operands]
        self.reducer = Reducer(x)
        self.kinds = self.reducer.kinds
        *outer, self.length = self.operands[0].dims
        self.rows: Size = product(outer)
        self.chunks = _SYMBOLIC_CHUNKS
        if isinstance(self.length, int):
            wanted = ceildiv(GROUPS, self.rows) if isinstance(self.rows, int) else 1
            self.chunks = max(1, min(THREADS, wanted, ceildiv(self.length, 2 * TILE)))

    def launch(self, name: str, totals: list[str], items: Size) -> None:
        program = self.program
        x = self.x
        places = leaves(program.places(x))
        key = (
            name,
            x["to_apply"],
            x["window"],
            tuple(o.shape for o in x.operands),
        )
        function, sizes = program.once(key, lambda: self._write(name, len(totals)))
        pointers = [
            p
            for o, i, place in zip(self.operands, self.initials, places, strict=True)
            for p in (program.pointer(o), program.pointer(i), program.at(place))
        ]
        arguments = program.arguments((*pointers, *totals), sizes)
        program.parallel(function, arguments, items)

    def _write(self, name: str, totals: int) -> tuple[str, list[Size]]:
        pointers = pointer_names(len(self.types)) + [f"total{i}" for i in range(totals)]
        self.f = f = Writer(
            self.program,
            name,
            item_parameters(pointers),
        )
        size = Sizes(f)
        self.exchange = Exchange(self.program.target, THREADS)
        n = size(self.length)
        row, chunk = f.divmod("%lo", self.chunks)
        per = f.round_up(f.ceildiv(n, self.chunks), TILE)
        first, end = f.part(chunk, per, n)
        self.identity = scalar.flat(load(f, t, f"%init{i}", 0) for i, t in enumerate(self.types))
        before = self._before(row, chunk) if name == "scan_chunks" else self.identity
        with f.loop(first, end, TILE, list(zip(self.kinds, before, strict=True))) as loop:
            at = f.muladd("%kernel.t", EACH, loop.index)
            running = self._running(self._elements(row, at, end, n))
            left, total = self._across(running[-1])
            if name != "scan_totals":
                left = self._combine(loop.vars, left)
                self._keep(row, at, end, n, [self._combine(left, r) for r in running])
            loop.next = self._combine(loop.vars, total)
        if name == "scan_totals":
            with f.when(f.icmp("eq", "%kernel.t", 0)):
                for i, (kind, v) in enumerate(zip(self.kinds, loop.vars, strict=True)):
                    f.store_at(self._memory(kind), self._stored(kind, v), f"%total{i}", "%lo")
        f.unit.declare(self.program)
        return self.program.group_function(
            name, self.exchange.declarations() + f.text(), THREADS
        ), list(size.names)

    # -- values
    def _combine(self, a: list[str], b: list[str]) -> list[str]:
        """The fold of neighbours a and b."""
        f = self.f
        r = self.reducer
        if r.op is None:
            return scalar.flat(apply(f, r.computation, [*r.grouped(a), *r.grouped(b)]))
        kind = DTYPES[self.types[0]].kind
        fn = scalar.TABLE[r.op, "f" if kind == "c" else kind]
        return [fn(f.typed(t), p, q) for t, p, q in zip(self.kinds, a, b, strict=True)]

    def _running(self, elements: list[list[str]]) -> list[list[str]]:
        found = elements[:1]
        for e in elements[1:]:
            found.append(self._combine(found[-1], e))
        return found

    def _across(self, own: list[str]) -> tuple[list[str], list[str]]:
        """(fold over the threads before this one, fold over all) of a value per thread. At every
        step a thread knows the fold of its block of `distance` threads, and of those before it in
        the block."""
        f = self.f
        left = self.identity
        total = own
        distance = 1
        while distance < THREADS:
            e = f.emit()
            other = list(self.exchange.others(e, self.kinds, total, distance))
            upper = f.icmp("ne", f.op(f"and i64 %kernel.t, {distance}"), 0)
            further = self._combine(other, left)
            lower_first = self._combine(total, other)
            upper_first = self._combine(other, total)
            left = [
                f.select(upper, k, p, q) for k, p, q in zip(self.kinds, further, left, strict=True)
            ]
            total = [
                f.select(upper, k, p, q)
                for k, p, q in zip(self.kinds, upper_first, lower_first, strict=True)
            ]
            distance *= 2
        return left, total

    def _before(self, row: Int, chunk: Int) -> list[str]:
        """The fold of the chunks before the group's: a thread has one chunk's."""
        f = self.f

        def loaded() -> list[str]:
            at = f.muladd(row, self.chunks, "%kernel.t")
            raw = [
                f.load_at(self._memory(kind), f"%total{i}", at) for i, kind in enumerate(self.kinds)
            ]
            return [
                f.op(f"trunc i8 {v} to i1") if kind == "i1" else v
                for kind, v in zip(self.kinds, raw, strict=True)
            ]

        own = f.choose(f.icmp("slt", "%kernel.t", chunk), loaded, lambda: self.identity, self.kinds)
        return self._across(own)[1]

    def _memory(self, kind: str) -> str:
        return "i8" if kind == "i1" else kind

    def _stored(self, kind: str, value: str) -> str:
        return self.f.op(f"zext i1 {value} to i8") if kind == "i1" else value

    # -- memory
    def _whole(self) -> bool:
        """Whether a thread's elements are a vector, all inside or all outside."""
        return (
            not self.backward
            and isinstance(self.length, int)
            and self.length % EACH == 0
            and all(STORAGE[t].parts == 1 for t in self.types)
        )

    def _place(self, row: Int, at: Int, n: Int) -> Int:
        f = self.f
        return f.muladd(row, n, f.sub(f.sub(n, 1), at) if self.backward else at)

    def _align(self, dtype: str) -> int:
        return min(16, EACH * STORAGE[dtype].bytes)

    def _elements(self, row: Int, at: Int, end: Int, n: Int) -> list[list[str]]:
        """The accumulators of a thread's elements, identities beyond the end."""
        f = self.f
        if self._whole():

            def vector() -> list[str]:
                return [
                    load_real(
                        f,
                        t,
                        f"%from{i}",
                        self._place(row, at, n),
                        EACH,
                        align=self._align(t),
                    )
                    for i, t in enumerate(self.types)
                ]

            e = f.emit(EACH)
            vectors = f.choose(
                f.icmp("slt", at, end),
                vector,
                lambda: [e.splat(k, v) for k, v in zip(self.kinds, self.identity, strict=True)],
                [e.type(k) for k in self.kinds],
            )
            return [
                [e.typed(k).lane(v, j) for k, v in zip(self.kinds, vectors, strict=True)]
                for j in range(EACH)
            ]
        found = []
        for j in range(EACH):
            one = f.add(at, j)

            def read() -> list[str]:
                return scalar.flat(
                    load(f, t, f"%from{i}", self._place(row, one, n))
                    for i, t in enumerate(self.types)
                )

            found.append(f.choose(f.icmp("slt", one, end), read, lambda: self.identity, self.kinds))
        return found

    def _keep(self, row: Int, at: Int, end: Int, n: Int, values: list[list[str]]) -> None:
        f = self.f
        if self._whole():
            with f.when(f.icmp("slt", at, end)):
                for i, (t, kind) in enumerate(zip(self.types, self.kinds, strict=True)):
                    vector = f.typed(kind, EACH).packed([v[i] for v in values])
                    store(
                        f,
                        t,
                        vector,
                        f"%to{i}",
                        self._place(row, at, n),
                        EACH,
                        align=self._align(t),
                    )
            return
        for j, flat in enumerate(values):
            one = f.add(at, j)
            with f.when(f.icmp("slt", one, end)):
                for i, (t, value) in enumerate(
                    zip(self.types, self.reducer.grouped(flat), strict=True)
                ):
                    store(f, t, value, f"%to{i}", self._place(row, one, n))
