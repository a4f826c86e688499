"""The first few elements of sorted rows, without sorting them: a row is read once, and those seen
so far that come first are kept in order.

Most of a row is only compared with the last one kept, a vector at a time. A row that keeps coming
with better elements (one sorted the other way round) is sorted after all. Equal elements stay in
the order of their positions, as a stable sort leaves them.

One element further back (a median) is found by its bytes, the highest first: those that share what
is known of it are counted and kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from torch_hlo.hlo.ir import DTYPES, Instruction, Instructions, Size, fixed, row_major_strides

from ..codegen import Program, Writer, store
from ..codegen.inline import move
from ..gather.gather_scatter import Sizes
from ..llvm import Int, Target, item_parameters
from ..matmul.product import hint
from .partial_sort import selection_of
from .sort import (
    Key,
    digit,
    key_of,
    radix_sort,
    row_offset,
    rows_of_slots,
    slots_for,
    sort_key,
    unsigned_key,
)

PATIENCE = 3  # moves of kept elements per element of a row


@dataclass
class _Selection:
    """What a fusion that compiler/sort/partial_sort.py made computes: `results[j]` gets the
    selected elements of the sort's operand `numbers[j]`, which is read from a parameter
    (`sources`) or is the positions."""

    sort: Instruction
    results: Instructions
    numbers: list[int]
    sources: dict[int, int]  # operand of the sort -> operand of the fusion

    @staticmethod
    def of(x: Instruction) -> _Selection:
        results = x["calls"].root.operands
        parts = [r.operand for r in results]
        sort = parts[0].operand if parts[0].op == "get-tuple-element" else parts[0]
        numbers = [part["index"] if part.op == "get-tuple-element" else 0 for part in parts]
        sources = {i: o["index"] for i, o in enumerate(sort.operands) if o.op == "parameter"}
        return _Selection(sort, results, numbers, sources)

    @property
    def axis(self) -> int:
        axis: int = self.sort["dimensions"][0]
        return axis

    @property
    def rows(self) -> Size:
        dims = self.sort.operand.dims
        return prod(size for d, size in enumerate(dims) if d != self.axis)

    def parameters(self) -> list[tuple[str, str]]:
        sources = [f"from{i}" for i in self.sources]
        return item_parameters(["scratch", *sources, *(f"to{j}" for j in range(len(self.numbers)))])

    def write(self, f: Writer, number: int, source: str, to: Int, row: Int, stride: Int) -> None:
        """Store operand `numbers[number]` of the element at position `source` of a row."""
        operand = self.numbers[number]
        dtype = self.sort.operands[operand].dtype
        pointer = f"%to{number}"
        if operand in self.sources:
            at = f.muladd(source, stride, row)
            return move(f, dtype, pointer, to, f"%from{operand}", at)
        bits = DTYPES[dtype].itemsize * 8
        value = source if bits == 64 else f.op(f"trunc i64 {source} to i{bits}")
        store(f, dtype, value, pointer, to)


def emit_selection(program: Program, x: Instruction) -> None:
    """Emit a fusion that compiler/sort/partial_sort.py made."""
    selected = _Selection.of(x)
    selection = selection_of(x)
    assert selection is not None, x
    what, k = selection
    dims = selected.sort.operand.dims
    axis = selected.axis
    rows = selected.rows
    n = fixed(dims[axis])
    slots = slots_for(rows)
    scratch = program.scratch(n * 32 * slots)
    types = [o.dtype for o in selected.sort.operands]
    key = sort_key(selected.sort["to_apply"], types)
    assert key is not None, x
    f = Writer(program, what, selected.parameters())
    size = Sizes(f)
    stride = fixed(row_major_strides(dims)[axis])
    row = _FINDERS[what](f, key, types[key.operand], n, k, stride, program.target)
    result_dims = selected.results[0].dims
    step = size(row_major_strides(result_dims)[axis])
    with rows_of_slots(f, size, rows, n) as (number, memory):
        base = row_offset(f, size, dims, axis, number)
        to = row_offset(f, size, result_dims, axis, number)
        order = row.order(base, memory)
        with f.loop(0, size(result_dims[axis])) as i:
            source = f.load_at("i64", order, i)
            for j in range(len(selected.numbers)):
                at = f.muladd(i, step, to)
                selected.write(f, j, source, at, base, stride)
    name = f.define()
    pointers = [
        program.at(scratch),
        *(program.pointer(x.operands[p]) for p in selected.sources.values()),
        *(program.at(program.place(x, j)) for j in range(len(selected.numbers))),
    ]
    cost = n * row.element_ns * hint(rows, 64) / slots
    program.parallel(
        name,
        program.arguments(pointers, size.names),
        slots,
        cost=cost,
    )


class _Finder(ABC):
    """Writes what finds the first `k` of a sorted row, or number `k`, of `n` elements that lie
    `stride` apart."""

    element_ns: ClassVar[float]

    def __init__(
        self,
        f: Writer,
        key: Key,
        dtype: str,
        n: int,
        k: int,
        stride: int,
        target: Target,
    ) -> None:
        self.f = f
        self.key = key
        self.dtype = dtype
        self.n = n
        self.k = k
        self.stride = stride
        self.bits = DTYPES[dtype].itemsize * 8
        self.allocate(target)

    @abstractmethod
    def allocate(self, target: Target) -> None:
        """Take what memory the search needs."""

    @abstractmethod
    def order(self, base: Int, memory: str) -> str:
        """Pointer to the positions of what is found in the row that starts at element `base`."""

    def element(self, base: Int, at: Int) -> str:
        """The key at position `at` as i64."""
        v = key_of(self.f, self.key, self.dtype, self.f.muladd(at, self.stride, base))
        return v if self.bits == 64 else self.f.op(f"zext i{self.bits} {v} to i64")


class _First(_Finder):
    """Writes the selection of the first k of a row of `n` elements: `keys` and `places` hold the
    best so far, best first."""

    element_ns = 0.3

    def allocate(self, target: Target) -> None:
        f = self.f
        self.lanes = target.lanes(max(self.bits, 32)) if self.stride == 1 else 1
        self.keys, self.places = (f.alloca("i64", self.k, 64) for _ in range(2))
        self.moves = f.alloca("i64")

    def order(self, base: Int, memory: str) -> str:
        """Pointer to the positions of the first k elements of the row that starts at element
        `base`."""
        f = self.f
        n = self.n
        k = self.k
        f.store("i64", 0, self.moves)
        with f.loop(0, k) as i:
            self.insert(self.element(base, i), i, i)
        whole = (n - k) // self.lanes * self.lanes + k
        with f.while_([("i64", str(k))]) as scan:
            at = scan.vars[0]
            f.break_if(scan, f.icmp("sge", at, whole))
            f.break_if(scan, f.icmp("sgt", f.load("i64", self.moves), PATIENCE * n + 16 * k))
            if self.lanes == 1:
                self.offer(base, at)
            else:
                with f.when(self.better(base, at)), f.loop(0, self.lanes) as lane:
                    self.offer(base, f.add(at, lane))
            scan.next = [f.add(at, self.lanes)]
        done = f.icmp("sge", scan.vars[0], whole)

        def rest() -> list[str]:
            with f.loop(whole, n) as i:
                self.offer(base, i)
            return [self.places]

        return f.choose(
            done,
            rest,
            lambda: [radix_sort(f, self.key, self.dtype, base, self.stride, n, memory)],
            ["ptr"],
        )[0]

    def offer(self, base: Int, at: Int) -> None:
        """Keep the element at `at` if it comes before the last one kept."""
        f = self.f
        key = self.element(base, at)
        with f.when(f.icmp("ult", key, f.load_at("i64", self.keys, self.k - 1))):
            self.insert(key, at, self.k - 1)

    def insert(self, key: str, at: Int, count: Int) -> None:
        """Put an element behind all of the first `count` kept ones that do not come after it; the
        last one beyond is lost."""
        f = self.f
        with f.while_([("i64", str(count))]) as hole:
            here = hole.vars[0]
            f.break_if(hole, f.icmp("sle", here, 0))
            before = f.sub(here, 1)
            f.break_if(hole, f.icmp("ule", f.load_at("i64", self.keys, before), key))
            for kept in (self.keys, self.places):
                f.store_at("i64", f.load_at("i64", kept, before), kept, here)
            hole.next = [before]
        to = hole.vars[0]
        f.store_at("i64", key, self.keys, to)
        f.store_at("i64", at, self.places, to)
        f.store("i64", f.add(f.load("i64", self.moves), f.sub(count, to)), self.moves)

    def better(self, base: Int, at: Int) -> str:
        """Whether some lane of the vector at `at` comes before the last one kept."""
        f = self.f
        kind = f"i{self.bits}"
        e = f.emit(self.lanes)
        t = e.typed(kind)
        found = unsigned_key(
            t,
            t.load(f.gep(kind, f"%from{self.key.operand}", f.add(base, at))),
            self.key,
            self.dtype,
        )
        last = f.load_at("i64", self.keys, self.k - 1)
        last = last if self.bits == 64 else f.op(f"trunc i64 {last} to {kind}")
        return e.any(t.cmp("ult", found, e.splat(kind, last)))


class _Nth(_Finder):
    """Writes the search for element k of a sorted row of `n` elements (Hoare's selection, by
    bytes)."""

    element_ns = 4.0

    def allocate(self, target: Target) -> None:
        self.counts = [self.f.alloca("i64", 256, 64) for _ in range(self.bits // 8)]

    def order(self, base: Int, memory: str) -> str:
        """Pointer to the position of element k of the row that starts at element `base`."""
        f = self.f
        n = self.n
        keys = memory
        places = f.gep("i64", memory, n)
        for counts in self.counts:
            f.do(f"call void @llvm.memset.p0.i64(ptr {counts}, i8 0, i64 2048, i1 false)")
        top = len(self.counts) - 1
        with f.loop(0, n) as i:
            key = self.element(base, i)
            f.store_at("i64", key, keys, i)
            f.store_at("i64", i, places, i)
            self.count(key, top, 1)
        left, rank = (
            str(n),
            str(self.k),
        )  # elements that may be it, and which of them
        for byte in range(top, -1, -1):
            bucket, rank = self.bucket(self.counts[byte], rank)
            left = self.keep(keys, places, left, byte, bucket)
        return f.gep("i64", places, rank)

    def count(self, key: str, byte: int, by: Int) -> None:
        slot = self.f.gep("i64", self.counts[byte], digit(self.f, key, byte))
        self.f.store("i64", self.f.add(self.f.load("i64", slot), by), slot)

    def bucket(self, counts: str, rank: str) -> tuple[str, str]:
        """The value of the byte in the element, and which of those with this value it is."""
        f = self.f
        with f.while_([("i64", "0"), ("i64", rank)]) as search:
            here, rest = search.vars
            some = f.load_at("i64", counts, here)
            f.break_if(search, f.icmp("slt", rest, some))
            search.next = [f.add(here, 1), f.sub(rest, some)]
        return search.vars[0], search.vars[1]

    def keep(self, keys: str, places: str, count: Int, byte: int, value: str) -> str:
        """Move those whose byte has this value to the front, in their order, and count their next
        byte. Returns how many they are."""
        f = self.f
        with f.loop(0, count, carry=[("i64", "0")]) as loop:
            key, place = (f.load_at("i64", p, loop.index) for p in (keys, places))
            to = loop.vars[0]
            f.store_at("i64", key, keys, to)
            f.store_at("i64", place, places, to)
            same = f.op(f"zext i1 {f.icmp('eq', digit(f, key, byte), value)} to i64")
            if byte:
                self.count(key, byte - 1, same)
            loop.next = [f.add(to, same)]
        kept: str = loop.vars[0]
        return kept


_FINDERS: dict[str, type[_Finder]] = {"first": _First, "nth": _Nth}
