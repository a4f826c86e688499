"""sort on a grid: chunks by a bitonic network in shared memory, then passes that merge runs, 8
elements of a result per thread.

What is sorted are items: (key, position) where the comparator orders one operand, else a position,
and the comparator runs on the elements there. Equal items are ordered by position, so the order is
total, the sort is stable, and the network needs no stability of its own. The operands move once, at
the end. Batcher 1968; merge path: Green, McColl and Bader 2012.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_hlo.hlo.ir import DTYPES, Instruction, Size, ceildiv, row_major_strides

from ..codegen import CodegenError, Writer, apply, leaves, load
from ..codegen.inline import move
from ..gather.gather_scatter import Sizes
from ..gpu.gpu_program import GpuProgram
from ..gpu.target import BARRIER
from ..llvm import Int, item_parameters
from ..llvm.scalar import single
from .sort import key_of, row_offset, sort_key

CHUNK, LEAST_CHUNK = (
    1024,
    64,
)  # items that a group of half as many threads sorts; a power of two
EACH = 8  # items of a merged run that a thread writes
_BYTES = {"i32": 4, "i64": 8}


def sort(program: GpuProgram, x: Instruction) -> None:
    if x.operand.size == 0:
        return
    s = _Sort(program, x)
    n = s.length
    rows = s.rows
    if isinstance(n, int) and n <= s.chunk:
        return s.launch("sort_row", s.chunk_kernel, [], rows)
    arrays = [
        [program.at(program.scratch(rows * n * _BYTES[kind])) for kind in s.kinds] for _ in range(2)
    ]
    s.launch("sort_chunk", s.chunk_kernel, arrays[0], rows * ceildiv(n, s.chunk))
    f = program.code
    count = len(s.kinds)
    with f.while_(
        [("i64", str(s.chunk)), *(("ptr", p) for p in (*arrays[0], *arrays[1]))]
    ) as merge:
        width = merge.vars[0]
        source = merge.vars[1 : 1 + count]
        target = merge.vars[1 + count :]
        f.break_if(merge, f.icmp("sge", width, program.size(n)))
        s.launch("sort_merge", s.merge_kernel, [*source, *target], rows * ceildiv(n, EACH), width)
        merge.next = [f.mul(width, 2), *target, *source]
    s.launch("sort_move", s.move_kernel, merge.vars[1 : 1 + count], rows * n)


class _Sort:
    """One sort: what its kernels share. `kinds`: LLVM types of the parts of an item, the position
    last."""

    def __init__(self, program: GpuProgram, x: Instruction) -> None:
        self.program = program
        self.x = x
        self.types = [o.dtype for o in x.operands]
        self.dims = x.operand.dims
        self.axis = x["dimensions"][0]
        self.length = self.dims[self.axis]
        if isinstance(self.length, int) and self.length >= 1 << 31:
            raise CodegenError(
                f"sort {x.shape}: rows of 2^31 elements or more are not sorted on GPUs; split them"
            )
        self.rows: Size = 1
        for d, size in enumerate(self.dims):
            self.rows *= size if d != self.axis else 1
        self.key = sort_key(x["to_apply"], self.types)
        self.kinds = ["i32"]
        if self.key is not None:
            self.kinds.insert(
                0,
                "i64" if DTYPES[self.types[self.key.operand]].itemsize == 8 else "i32",
            )
        self.chunk = CHUNK
        if isinstance(self.length, int):
            self.chunk = min(CHUNK, max(LEAST_CHUNK, 1 << (self.length - 1).bit_length()))

    def launch(
        self,
        name: str,
        kernel: Callable[..., Any],
        work: list[str],
        items: Size,
        *numbers: str,
    ) -> None:
        """Start `kernel(f, whole)` on items; it gets the operands, the results, arrays of items and
        i64 `numbers`."""
        program = self.program
        x = self.x
        places = tuple(leaves(program.places(x)))

        def build() -> tuple[str, list[Size]]:
            sides = [f"{side}{i}" for i in range(len(places)) for side in ("from", "to")]
            pointers = [*sides, *(f"work{i}" for i in range(len(work)))]
            words = [f"w{i}" for i in range(len(numbers))]
            self.f = f = Writer(program, name, item_parameters(pointers, words))
            self.size = Sizes(f)
            made = kernel()
            return made or f.define(), list(self.size.names)

        shapes = tuple((o.dtype, o.dims) for o in x.operands)
        function, sizes = program.once((name, shapes, self.axis, x["to_apply"]), build)
        pointers = [
            p
            for o, place in zip(x.operands, places, strict=True)
            for p in (program.pointer(o), program.at(place))
        ]
        arguments = program.arguments((*pointers, *work))
        arguments += [*(f"i64 {v}" for v in numbers), *program.arguments((), sizes)]
        program.parallel(function, arguments, items)

    # -- items
    def enter(self, row: Int) -> None:
        """Work on row number `row` from here on."""
        f = self.f
        self.base = row_offset(f, self.size, self.dims, self.axis, row)
        self.stride = self.size(row_major_strides(self.dims)[self.axis])
        self.start = f.mul(row, self.size(self.length))  # of the row in arrays of items

    def place(self, position: Int) -> Int:
        return self.f.muladd(position, self.stride, self.base)

    def item(self, position: Int) -> list[str]:
        """The item of an element; of positions beyond the row one that comes after all others."""
        f = self.f
        parts = [f.op(f"trunc i64 {position} to i32")]
        key = self.key
        if key is None:
            return parts
        dtype = self.types[key.operand]
        kind = self.kinds[0]
        bits = DTYPES[dtype].itemsize * 8

        def inside() -> list[str]:
            k = key_of(f, key, dtype, self.place(position))
            return [k if f"i{bits}" == kind else f.op(f"zext i{bits} {k} to {kind}")]

        return [
            *f.choose(
                f.icmp("slt", position, self.size(self.length)),
                inside,
                lambda: ["-1"],
                [kind],
            ),
            *parts,
        ]

    def before(self, a: list[str], b: list[str]) -> str:
        """i1: item a comes before item b."""
        f = self.f
        first = f.icmp("slt", a[-1], b[-1], "i32")
        if self.key is not None:
            less, same = (f.icmp(p, a[0], b[0], self.kinds[0]) for p in ("ult", "eq"))
            return f.op(f"or i1 {less}, {f.op(f'and i1 {same}, {first}')}")
        n = self.size(self.length)
        i, j = (f.op(f"zext i32 {v[-1]} to i64") for v in (a, b))
        real = f.op(f"and i1 {f.icmp('slt', i, n)}, {f.icmp('slt', j, n)}")

        def compared() -> list[str]:
            less = self._compare(i, j)
            more = self._compare(j, i)
            tied = f.op(f"and i1 {first}, {f.op(f'xor i1 {more}, true')}")
            return [f.op(f"or i1 {less}, {tied}")]

        return f.choose(real, compared, lambda: [first], ["i1"])[0]

    def _compare(self, i: Int, j: Int) -> str:
        """The comparator on the elements at two positions."""
        f = self.f
        values = [
            load(f, t, f"%from{k}", self.place(p)) for k, t in enumerate(self.types) for p in (i, j)
        ]
        return single(apply(f, self.x["to_apply"], values)[0])

    def load(self, arrays: list[str], at: Int) -> list[str]:
        return [self.f.load_at(kind, p, at) for kind, p in zip(self.kinds, arrays, strict=True)]

    def store(self, arrays: list[str], at: Int, item: list[str]) -> None:
        for kind, p, v in zip(self.kinds, arrays, item, strict=True):
            self.f.store_at(kind, v, p, at)

    def chosen(self, first: str, p: list[str], q: list[str]) -> list[str]:
        """The item `p` if `first`, else `q`."""
        return [self.f.select(first, k, u, v) for k, u, v in zip(self.kinds, p, q, strict=True)]

    def move(self, target: Int, position: str) -> None:
        """The elements at `position` become those at `target`."""
        source = self.place(self.f.op(f"zext i32 {position} to i64"))
        for k, t in enumerate(self.types):
            move(self.f, t, f"%to{k}", self.place(target), f"%from{k}", source)

    # -- kernels
    def chunk_kernel(self) -> str:
        """A group sorts a chunk of a row: into the arrays of items, or a whole row into the
        results."""
        f = self.f
        chunk = self.chunk
        n = self.size(self.length)
        whole = isinstance(n, int) and n <= chunk
        chunks = f.ceildiv(n, chunk)
        self.enter(f.div("%lo", chunks))
        first = f.mul(f.rem("%lo", chunks), chunk)
        threads = chunk // 2
        steps = chunk.bit_length() - 1
        shared = [f"@SELF.items{i}" for i in range(len(self.kinds))]
        thread = "%kernel.t"
        mine = [thread, f.add(thread, threads)]
        for at in mine:
            self.store(shared, at, self.item(f.add(first, at)))
        f.do(BARRIER)
        with f.loop(1, steps + 1) as a, f.loop(0, a) as back:
            b = f.sub(f.sub(a, 1), back)
            distance = f.op(f"shl i64 1, {b}")
            high = f.op(f"lshr i64 {thread}, {b}")
            low = f.op(f"and i64 {thread}, {f.sub(distance, 1)}")
            i = f.op(f"or i64 {f.op(f'shl i64 {high}, {f.add(b, 1)}')}, {low}")
            j = f.op(f"or i64 {i}, {distance}")
            down = f.op(f"trunc i64 {f.op(f'lshr i64 {i}, {a}')} to i1")
            p = self.load(shared, i)
            q = self.load(shared, j)
            swap = f.op(f"xor i1 {self.before(q, p)}, {down}")
            self.store(shared, i, self.chosen(swap, q, p))
            self.store(shared, j, self.chosen(swap, p, q))
            f.do(BARRIER)
        for at in mine:
            target = f.add(first, at)
            with f.when(f.icmp("slt", target, n)):
                item = self.load(shared, at)
                if whole:
                    self.move(target, item[-1])
                else:
                    self.store(
                        [f"%work{i}" for i in range(len(self.kinds))],
                        f.add(self.start, target),
                        item,
                    )
        f.unit.declare(self.program)
        memory = "".join(
            f"{name} = internal addrspace(3) global [{chunk} x {kind}] undef, align 16\n"
            for name, kind in zip(shared, self.kinds, strict=True)
        )
        return self.program.group_function(f.name, memory + f.text(), threads)

    def merge_kernel(self) -> None:
        """A thread writes some items of the runs of length 2 w0 that pairs of runs of length w0
        become."""
        f = self.f
        n = self.size(self.length)
        count = len(self.kinds)
        source, target = ([f"%work{i + side * count}" for i in range(count)] for side in (0, 1))
        per_row = f.ceildiv(n, EACH)
        self.enter(f.div("%lo", per_row))
        first = f.mul(f.rem("%lo", per_row), EACH)
        both = f.mul("%w0", 2)
        start = f.mul(f.div(first, both), both)
        middle, end = (f.min(f.add(start, w), n) for w in ("%w0", both))
        diagonal = f.sub(first, start)

        def at(position: Int) -> list[str]:
            return self.load(source, f.add(self.start, position))

        low = f.max(f.sub(diagonal, f.sub(end, middle)), 0)
        high = f.min(diagonal, f.sub(middle, start))
        # how many of the first `diagonal` items come from the left run
        with f.while_([("i64", low), ("i64", high)]) as search:
            low, high = search.vars
            f.break_if(search, f.icmp("sge", low, high))
            probe = f.div(f.add(low, high), 2)
            right_first = self.before(
                at(f.add(middle, f.sub(f.sub(diagonal, 1), probe))),
                at(f.add(start, probe)),
            )
            search.next = [
                f.select(right_first, "i64", low, f.add(probe, 1)),
                f.select(right_first, "i64", probe, high),
            ]
        left = f.add(start, search.vars[0])
        right = f.add(middle, f.sub(diagonal, search.vars[0]))
        with f.loop(
            first,
            f.min(f.add(first, EACH), n),
            carry=[("i64", left), ("i64", right)],
        ) as out:
            i, j = out.vars
            has_left = f.icmp("slt", i, middle)
            has_right = f.icmp("slt", j, end)
            p = at(f.select(has_left, "i64", i, start))
            q = at(f.select(has_right, "i64", j, start))
            right_first = f.op(f"or i1 {f.op(f'xor i1 {has_left}, true')}, {self.before(q, p)}")
            takes = f.op(f"and i1 {has_right}, {right_first}")
            self.store(target, f.add(self.start, out.index), self.chosen(takes, q, p))
            step = f.op(f"zext i1 {takes} to i64")
            out.next = [f.add(i, f.sub(1, step)), f.add(j, step)]

    def move_kernel(self) -> None:
        """A thread per element of the results, in the order of their memory."""
        f = self.f
        n = self.size(self.length)
        inner: Size = 1
        for d in self.dims[self.axis + 1 :]:
            inner *= d
        rest, low = f.divmod("%lo", self.size(inner))
        outer, target = f.divmod(rest, n)
        self.enter(f.muladd(outer, self.size(inner), low))
        order = f"%work{len(self.kinds) - 1}"
        at = f.add(self.start, target)
        self.move(target, f.load_at("i32", order, at))
