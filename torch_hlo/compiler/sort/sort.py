"""sort: stable, any number of operands, any comparator. Rows are sorted independently, in parallel.

A comparator that only orders one array becomes an unsigned integer key, and rows are sorted by
byte-wise counting (radix) of (key, position) pairs, short ones by counting for each element how
many come before it; any other comparator runs inside a bottom-up merge sort of positions. The
operands then move once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import NamedTuple

from torch_hlo.hlo.ir import DTYPES, Computation, Dims, Instruction, Size, build, row_major_strides
from torch_hlo.hlo.ir.numeric import SMALL_FLOATS

from ..codegen import Program, Writer, apply, leaves, load
from ..codegen.inline import move
from ..gather.gather_scatter import Sizes
from ..llvm import Int, Typed, item_parameters
from ..llvm.scalar import Value, single
from ..matmul.product import hint

SLOTS = 16  # rows that may be in work at the same time; each has its own scratch memory
# elements of a row below which all are compared with all: there are 256 counts per byte to clear
# and add up otherwise
SHORT = 64
RUN = 16  # length of the runs that insertion sort makes before merging


class Key(NamedTuple):
    """What a comparator orders that is no function of its own: one operand. Not `total`: -0 equals
    0 and every NaN is the largest (build.comparison)."""

    operand: int
    descending: bool
    total: bool


def sort(program: Program, x: Instruction) -> None:
    operands = x.operands
    shape = operands[0].shape
    axis = x["dimensions"][0]
    n = shape.dims[axis]
    if shape.size == 0:
        return
    rows = prod(extent for d, extent in enumerate(shape.dims) if d != axis)
    slots = slots_for(rows)
    scratch = program.scratch(n * 32 * slots)
    types = [o.dtype for o in operands]
    pointers = [f"{side}{i}" for i in range(len(types)) for side in ("from", "to")]
    f = Writer(program, "sort", item_parameters(["scratch", *pointers]))
    size = Sizes(f)
    key = sort_key(x["to_apply"], types)
    with rows_of_slots(f, size, rows, n) as (row, memory):
        base = row_offset(f, size, shape.dims, axis, row)
        stride = size(row_major_strides(shape.dims)[axis])
        if key is None:
            order = _merge_sort(f, x["to_apply"], types, base, stride, size(n), memory)
        elif isinstance(n, int) and n <= SHORT:
            order = _rank_sort(f, key, types[key.operand], base, stride, n)
        else:
            order = radix_sort(f, key, types[key.operand], base, stride, size(n), memory)
        with f.loop(0, size(n)) as i:
            source = f.load_at("i64", order, i)
            for k, t in enumerate(types):
                to = f.muladd(i, stride, base)
                by = f.muladd(source, stride, base)
                move(f, t, f"%to{k}", to, f"%from{k}", by)
    name = f.define()
    pointers = [program.at(scratch)]
    for operand, place in zip(operands, leaves(program.places(x)), strict=True):
        pointers += [program.pointer(operand), program.at(place)]
    length = hint(n, 1000)
    each = length * max(1, length.bit_length()) * (2.0 if key is None else 0.8)
    cost = each * hint(rows, 64) / slots
    program.parallel(
        name,
        program.arguments(pointers, size.names),
        slots,
        cost=cost,
    )


def slots_for(rows: Size) -> int:
    return min(rows, SLOTS) if isinstance(rows, int) else SLOTS


@contextmanager
def rows_of_slots(f: Writer, size: Sizes, rows: Size, n: Size) -> Iterator[tuple[str, str]]:
    """(a row of `n` elements, the scratch memory of its slot, 32 bytes per element). Slot s has the
    rows [s * rows / slots, (s + 1) * rows / slots)."""
    slots = slots_for(rows)
    with f.items() as slot:
        first, last = (f.div(f.mul(s, size(rows)), slots) for s in (slot, f.add(slot, 1)))
        memory = f.gep("i8", "%scratch", f.mul(slot, size(n * 32)))
        with f.loop(first, last) as row:
            yield row, memory


def row_offset(f: Writer, size: Sizes, dims: Dims, axis: int, row: Int) -> Int:
    """Element offset of row number `row` (row-major over the other dimensions)."""
    inner: Size = 1
    for d in dims[axis + 1 :]:
        inner *= d
    if inner == 1:
        return f.mul(row, size(dims[axis]))
    outer_index = f.div(row, size(inner))
    return f.muladd(outer_index, f.mul(size(inner), size(dims[axis])), f.rem(row, size(inner)))


NO_KEYS = "fnuz", "fnu", "m1fn"  # whose codes are in no order of whole bytes


def sort_key(comparator: Computation, types: list[str]) -> Key | None:
    """The key of a comparator that orders one operand, or None."""
    for direction in ("LT", "GT"):
        if (
            DTYPES[types[0]].kind != "c"
            and not types[0].endswith(NO_KEYS)
            and comparator == build.comparison(direction, tuple(types))
        ):
            return Key(0, direction == "GT", False)
    found = build.compared(comparator)
    if found is None:
        return None
    operand, descending = found
    dtype = types[operand]
    kind = DTYPES[dtype].kind
    if (
        kind == "f"
        and comparator.root.get("type") != "TOTALORDER"
        or kind == "c"
        or dtype.endswith(NO_KEYS)
    ):
        return None
    return Key(operand, descending, True)


def key_of(f: Writer, key: Key, dtype: str, at: Int) -> str:
    """The unsigned key, as wide as the element, of element `at` of the array %from{operand}."""
    row = DTYPES[dtype]
    kind = f"i{row.itemsize * 8}"
    return unsigned_key(
        f.typed(kind),
        f.load_at(kind, f"%from{key.operand}", at),
        key,
        dtype,
    )


def unsigned_key(t: Typed, v: str, key: Key, dtype: str) -> str:
    """The unsigned keys of elements whose bits are `v`, integers of `t`."""
    row = DTYPES[dtype]
    bits = row.itemsize * 8
    sign = t.const(-(1 << (bits - 1)))
    if row.kind == "s":
        v = t.bin("xor", v, sign)
    elif row.kind == "f":
        magnitude = t.bin("and", v, (1 << (bits - 1)) - 1)
        if not key.total:
            v = t.select(t.cmp("eq", magnitude, 0), 0, v)
            nan = t.cmp("ugt", magnitude, _infinity(dtype))
        negative = t.bin("ashr", v, bits - 1)  # all ones or zero
        flipped = t.bin("xor", v, t.bin("or", negative, sign))
        v = flipped if key.total else t.select(nan, -1, flipped)
    return t.bin("xor", v, -1) if key.descending else v


def _infinity(dtype: str) -> int:
    """Bits of the largest magnitude that is not a NaN. The fnuz types have their only NaN at -0:
    `_key` is not used for them."""
    if dtype in _INFINITY:
        return _INFINITY[dtype]
    exponent_bits, mantissa_bits, _, has_infinity, *_ = SMALL_FLOATS[dtype]
    return ((1 << exponent_bits) - 1) << mantissa_bits if has_infinity else 0x7E


_INFINITY = {
    "f64": 0x7FF0 << 48,
    "f32": 0x7F80 << 16,
    "bf16": 0x7F80,
    "f16": 0x7C00,
}


def radix_sort(
    f: Writer,
    key: Key,
    dtype: str,
    base: Int,
    stride: Int,
    n: Int,
    memory: str,
) -> str:
    """Sort (key, position) pairs of i64 by counting bytes, least significant first; bytes that all
    agree are skipped. Returns the pointer to the sorted positions."""
    keys = memory
    order = f.gep("i64", memory, n)
    keys2 = f.gep("i64", order, n)
    order2 = f.gep("i64", f.gep("i64", order, n), n)
    itemsize = DTYPES[dtype].itemsize
    counts = f.alloca("i64", 256 * itemsize, 64)
    f.do(f"call void @llvm.memset.p0.i64(ptr {counts}, i8 0, i64 {2048 * itemsize}, i1 false)")
    with f.loop(0, n) as i:
        k = key_of(f, key, dtype, f.muladd(i, stride, base))
        k = k if itemsize == 8 else f.op(f"zext i{8 * itemsize} {k} to i64")
        f.store_at("i64", k, keys, i)
        f.store_at("i64", i, order, i)
        for byte in range(itemsize):
            slot = f.gep("i64", counts, f.add(digit(f, k, byte), 256 * byte))
            f.store("i64", f.add(f.load("i64", slot), 1), slot)
    current = [keys, order, keys2, order2]
    for byte in range(itemsize):
        count = f.gep("i64", counts, 256 * byte)
        some = f.load_at("i64", count, digit(f, f.load("i64", current[0]), byte))
        current = f.choose(
            f.icmp("eq", some, n),
            lambda: current,
            lambda: _radix_pass(f, current, byte, count, n),
            ["ptr"] * 4,
        )
    return current[1]


def _rank_sort(f: Writer, key: Key, dtype: str, base: Int, stride: Int, n: int) -> str:
    """Sort a short row: an element's place is the number of smaller ones, and of equal ones before
    it. Returns the pointer to the sorted positions."""
    bits = max(32, DTYPES[dtype].itemsize * 8)
    kind = f"i{bits}"
    lanes = f.program.target.lanes(bits)
    t = f.typed(kind, lanes)
    flags = f.typed("i1", lanes)
    starts = range(0, n, lanes)
    keys = f.alloca(kind, len(starts) * lanes, 64)
    order = f.alloca("i64", n, 64)
    # what is behind the row comes before nothing
    f.store(t.type, t.const(-1), f.gep(kind, keys, starts[-1]))
    with f.loop(0, n) as i:
        k = key_of(f, key, dtype, f.muladd(i, stride, base))
        f.store_at(
            kind,
            (
                f.op(f"zext i{DTYPES[dtype].itemsize * 8} {k} to {kind}")
                if DTYPES[dtype].itemsize * 8 < bits
                else k
            ),
            keys,
            i,
        )
    with f.loop(0, n) as i:
        own = t.e.splat(kind, f.load_at(kind, keys, i))
        position = t.e.splat(kind, i if bits == 64 else f.op(f"trunc i64 {i} to i32"))
        rank: Int = 0
        for start in starts:
            other = t.load(f.gep(kind, keys, start))
            earlier = t.cmp("ult", t.add(t.e.iota(kind), start), position)
            before = flags.bin(
                "or",
                t.cmp("ult", other, own),
                flags.bin("and", t.cmp("eq", other, own), earlier),
            )
            mask = f.op(f"bitcast {flags.type} {before} to i{lanes}")
            wide = mask if lanes == 64 else f.op(f"zext i{lanes} {mask} to i64")
            rank = f.add(rank, f.op(f"call i64 @llvm.ctpop.i64(i64 {wide})"))
        f.store_at("i64", i, order, rank)
    return order


def digit(f: Writer, key: str, byte: int) -> str:
    """Byte number `byte` of a key, as i64."""
    return f.op(f"and i64 {f.op(f'lshr i64 {key}, {8 * byte}') if byte else key}, 255")


def _radix_pass(f: Writer, buffers: list[str], byte: int, counts: str, n: Int) -> list[str]:
    keys, order, keys2, order2 = buffers
    with f.loop(0, 256, carry=[("i64", "0")]) as loop:
        slot = f.gep("i64", counts, loop.index)
        count = f.load("i64", slot)
        f.store("i64", loop.vars[0], slot)
        loop.next = [f.add(loop.vars[0], count)]
    with f.loop(0, n) as i:
        k = f.load_at("i64", keys, i)
        slot = f.gep("i64", counts, digit(f, k, byte))
        to = f.load("i64", slot)
        f.store("i64", f.add(to, 1), slot)
        f.store_at("i64", k, keys2, to)
        f.store_at("i64", f.load_at("i64", order, i), order2, to)
    return [keys2, order2, keys, order]


def _merge_sort(
    f: Writer,
    comparator: Computation,
    types: list[str],
    base: Int,
    stride: Int,
    n: Int,
    memory: str,
) -> str:
    """Stable sort of positions with the comparator; returns the pointer to them."""
    order = memory
    other = f.gep("i64", memory, n)

    def less(i: Int, j: Int) -> str:
        """Whether the element at position i comes before the one at j."""
        values: list[Value] = []
        for k, t in enumerate(types):
            values += [load(f, t, f"%from{k}", f.muladd(p, stride, base)) for p in (i, j)]
        return single(apply(f, comparator, values)[0])

    with f.loop(0, n, RUN) as start:  # insertion sort of runs
        stop = f.min(f.add(start, RUN), n)
        with f.loop(start, stop) as i:
            with f.while_([("i64", i)]) as hole:
                at = hole.vars[0]
                f.break_if(hole, f.icmp("sle", at, start))
                before = f.load_at("i64", order, f.sub(at, 1))
                f.break_if(hole, f.op(f"xor i1 {less(i, before)}, true"))
                f.store_at("i64", before, order, at)
                hole.next = [f.sub(at, 1)]
            f.store_at("i64", i, order, hole.vars[0])
    with f.while_([("i64", str(RUN)), ("ptr", order), ("ptr", other)]) as merge:
        width, source, target = merge.vars
        f.break_if(merge, f.icmp("sge", width, n))
        with f.loop(0, n, f.mul(width, 2)) as start:
            middle, end = (f.min(f.muladd(width, k, start), n) for k in (1, 2))
            with f.loop(start, end, carry=[("i64", start), ("i64", middle)]) as out:
                left, right = out.vars
                has_left = f.icmp("slt", left, middle)
                has_right = f.icmp("slt", right, end)
                at = f.gep("i64", source, f.select(has_left, "i64", left, start))
                a = f.load("i64", at)
                at = f.gep("i64", source, f.select(has_right, "i64", right, start))
                b = f.load("i64", at)
                no_left = f.op(f"xor i1 {has_left}, true")
                right_first = f.op(f"or i1 {less(b, a)}, {no_left}")
                takes_right = f.op(f"and i1 {has_right}, {right_first}")
                f.store_at("i64", f.select(takes_right, "i64", b, a), target, out.index)
                step = f.op(f"zext i1 {takes_right} to i64")
                out.next = [f.add(left, f.sub(1, step)), f.add(right, step)]
        merge.next = [f.mul(width, 2), target, source]
    return merge.vars[1]
