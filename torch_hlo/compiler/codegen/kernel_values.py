"""Values of instructions inside a kernel: guards, index expressions, loads and stores."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch_hlo.hlo.ir import Dim, Instruction, Size, fixed, round_up

from ..llvm import Emit, Target, Unit, apart, in_turns, literal, scalar, transposed
from ..llvm.scalar import STORAGE, Storage, Value
from ..thresholds import AHEAD_BYTES, STREAMED_BYTES
from .block import CodegenError, blame
from .index import Index, Var, below, combine, constant, exact, linear, of
from .registry import VALUES

Condition = tuple[Index, Size, Size]  # low <= index < high
_TURNS = 16  # elements that lie in turns at most, which are loaded together, or stored
ZEROS = "@torch_hlo_zeros"  # readable bytes for loads that a guard turns off


class Level:
    """One loop level: its lines (the body so far), the label of its current block, and what was
    computed in it."""

    __slots__ = ("depth", "lines", "label", "scalar", "emit", "cache", "tail")

    def __init__(
        self,
        depth: int,
        lines: list[str],
        label: str,
        lanes: int,
        unit: Unit,
        tail: str | None = None,
    ) -> None:
        self.depth = depth
        self.lines = lines
        self.label = label
        self.tail = tail
        self.scalar = Emit(1, lines, unit)
        self.emit = Emit(lanes, lines, unit) if lanes > 1 else self.scalar
        self.cache: dict[Any, Any] = {}


class KernelValues:
    """`lanes`: vector width of the lane loop. `leaves`: instructions that are read from memory,
    parameters p0, p1, … of the function in this order; `outputs` more pointers follow. Symbolic
    sizes become trailing i64 parameters, see `sizes`."""

    def __init__(
        self,
        target: Target,
        lanes: int,
        leaves: Sequence[Instruction],
        outputs: int = 1,
    ) -> None:
        self.lanes = lanes
        self.leaves = {x: f"%p{i}" for i, x in enumerate(leaves)}
        self.outputs = [f"%p{len(leaves) + i}" for i in range(outputs)]
        self._rooms = {f"%p{i}": x.size for i, x in enumerate(leaves)}  # elements behind a pointer
        self.sizes: dict[Dim, str] = {}
        self.unit = Unit(target)
        self.target = target
        self.levels = [Level(0, [], "entry", 1, self.unit)]
        self.level = self.levels[0]
        self.e = self.level.emit
        self.guards: list[Condition] = []
        self.nontemporal: set[str] = set()
        # arrays of whole vectors: processors wait long for what was stored under a mask
        self.padded: set[str] = set()
        # bytes: when a vector of an operand is loaded, the line that far behind it is asked for
        self.ahead = 0
        # a lane loop may start at any element, not only at a multiple of `lanes`
        self.ragged = False
        self.lane_var: Var | None = None
        self.body_lines = 0  # lines of the innermost body per copy: for the cost estimate
        self._names: dict[Var, str] = {}
        self._splats: set[str] = set()
        self._pending: list[Callable[[], None]] | None = None
        # row and column variables, row number and loaded blocks of a tile
        self._tile: tuple[Var, Var, Index, dict[tuple[str, Index], list[str]]] | None = None

    # -- values
    def value(self, x: Instruction, index: tuple[Index, ...]) -> Value:
        """The element of `x` at `index`: an operand of the current width (complex: a pair)."""
        depth = max([i.depth for i in index]) if index else 0
        level = self.levels[depth]
        key = (x, index, self._active(depth)) if self.guards else (x, index)
        found = level.cache.get(key)
        if found is None:
            with self._in(level):
                found = self._compute(x, index)
            level.cache[key] = found
        return self.splat(found, x.dtype) if self.e.lanes > level.emit.lanes else found

    def _compute(self, x: Instruction, index: tuple[Index, ...]) -> Value:
        leaf = self.leaves.get(x)
        if leaf is not None:
            return self.load(leaf, x.dtype, linear(index, x.dims) if index else constant(0))
        if x.op == "constant" and x.size == 1:
            return scalar.literal_value(self.e, x["literal"])
        emitter = VALUES.get(x.op)
        if emitter is None:
            raise CodegenError(
                f"{x.op} {x.shape} cannot be computed inside a kernel: it needs a step of its own"
            )
        try:
            found: Value = emitter(self, x, index)
        except Exception as error:
            blame(error, x)
            raise
        return found

    def splat(self, value: Value, dtype: str) -> Value:
        """A scalar value in all lanes of the current width."""
        if isinstance(value, tuple):
            real, imaginary = (self.widen(v, STORAGE[dtype].register) for v in value)
            return real, imaginary
        return self.widen(value, STORAGE[dtype].register)

    def widen(self, value: str, kind: str) -> str:
        """A scalar operand of an LLVM type in all lanes of the current width; what is that wide
        already stays."""
        if value[0] not in "%@":
            return self.e.splat(kind, value)
        if value in self._splats:
            return value
        # The shuffle belongs to the level outside of the lane loop, but must come after the scalar:
        # keep it here, per copy.
        key = ("splat", value, kind)
        found = self.level.cache.get(key)
        if found is None:
            found = self.level.cache[key] = self.e.splat(kind, value)
            if self.e.lanes > 1:
                self._splats.add(found)
        return found

    def element(self, index: Index, kind: str) -> str:
        """The index itself as an operand of integer kind `kind` at the current width."""
        if index.depth < len(self.levels) - 1 or self.e.lanes == 1:
            return self.widen(self._resize(self.scalar(index), index.depth, kind), kind)
        vector, have = self.vector(index)
        return (
            vector
            if have == kind
            else self.e.cast("trunc" if have == "i64" else "sext", vector, have, kind)
        )

    def _resize(self, value: str, depth: int, kind: str) -> str:
        if kind == "i64":
            return value
        if value[0] != "%":
            return literal(kind, int(value))
        return self.levels[depth].scalar.op(f"trunc i64 {value} to {kind}")

    @contextmanager
    def _in(self, level: Level) -> Iterator[None]:
        saved = self.level, self.e
        self.level = level
        self.e = level.emit
        try:
            yield
        finally:
            self.level, self.e = saved

    # -- guards
    @contextmanager
    def guard(self, conditions: Sequence[Condition]) -> Iterator[None]:
        """Loads inside only happen where all conditions (low <= index < high) hold; elsewhere
        values are arbitrary."""
        needed = [c for c in conditions if not _holds(c)]
        self.guards.extend(needed)
        try:
            yield
        finally:
            if needed:
                del self.guards[-len(needed) :]

    def condition(self, conditions: Sequence[Condition]) -> str | None:
        """i1 operand at the current width: whether all conditions hold. None when they always
        do."""
        result = None
        for c in conditions:
            if not _holds(c):
                one = self._condition(c)
                result = one if result is None else self.e.typed("i1").bin("and", result, one)
        return result

    def _condition(self, c: Condition) -> str:
        index, low, high = c
        shifted = index - low
        extent = high - low
        lane = index.depth == len(self.levels) - 1 and self.e.lanes > 1
        level = self.level if lane else self.levels[index.depth]
        key = (c, *self._active(index.depth)) if self.guards else c
        found = level.cache.get(key)
        if found is None:
            if lane:
                v, kind = self.vector(shifted)
                limit = self.e.splat(kind, self._resize(self.size(extent), 0, kind))
                found = self.e.typed(kind).cmp("ult", v, limit)
            else:
                found = level.scalar.op(f"icmp ult i64 {self.scalar(shifted)}, {self.size(extent)}")
            level.cache[key] = found
        return found if lane or self.e.lanes == 1 else self.widen(found, "i1")

    def _active(self, depth: int) -> tuple[Condition, ...]:
        return tuple(c for c in self.guards if c[0].depth <= depth)

    def mask(self, pointer: str = "") -> str | None:
        """Which lanes of the current level may touch memory, or this array; None: all."""
        result = None
        for c in self._active(self.level.depth):
            # An index in a condition may itself be loaded: only the guards around it hold then.
            outer = self.guards
            self.guards = outer[: outer.index(c)]
            try:
                one = self._condition(c)
            finally:
                self.guards = outer
            result = one if result is None else self.e.typed("i1").bin("and", result, one)
        tail = self.level.tail if self.e.lanes > 1 and pointer not in self.padded else None
        if tail is None or result is None:
            return result if tail is None else tail
        return self.e.typed("i1").bin("and", result, tail)

    # -- index expressions
    def size(self, size: Size) -> str:
        """i64 operand of a size: a literal, or a parameter of the function."""
        if isinstance(size, int):
            return str(size)
        found = self.sizes.get(size)
        if found is None:
            found = self.sizes[size] = f"%n{len(self.sizes)}"
        return found

    def scalar(self, index: Index) -> str:
        """i64 operand of an index; of its first lane when it varies along the lane loop."""
        if not index.terms:
            return self.size(index.const)
        level = self.levels[index.depth]
        key = (index, self._active(index.depth)) if self.guards else index
        found = level.cache.get(key)
        if found is None:
            found = level.cache[key] = self._scalar(index, level)
        return found

    def _scalar(self, index: Index, level: Level) -> str:
        op = level.scalar.op
        if index.const != 0:
            return op(f"add i64 {self.scalar(index - index.const)}, {self.size(index.const)}")
        if len(index.terms) > 1:
            outer = [t for t in index.terms if t[0].depth < index.depth] or list(index.terms[:-1])
            inner = [t for t in index.terms if t not in outer]
            a, b = (self.scalar(combine((of(v), c) for v, c in part)) for part in (outer, inner))
            return op(f"add i64 {a}, {b}")
        var, coefficient = index.terms[0]
        if coefficient != 1:
            return op(f"mul i64 {self.scalar(of(var))}, {self.size(coefficient)}")
        if var.kind == "loop":
            return self._names[var]
        if var.kind == "value":
            return self._loaded(var, level.scalar, level)
        inner, d = var.payload
        a = self.scalar(inner)
        if isinstance(d, int) and d & (d - 1) == 0:
            return op(
                f"lshr i64 {a}, {d.bit_length() - 1}"
                if var.kind == "div"
                else f"and i64 {a}, {d - 1}"
            )
        return op(f"{'udiv' if var.kind == 'div' else 'urem'} i64 {a}, {self.size(d)}")

    def _loaded(self, var: Var, e: Emit, level: Level) -> str:
        """The clamped i64 value(s) of an index that is an element of an integer array."""
        x, index = var.payload
        if level.emit is not e and e.lanes == 1:
            raise CodegenError(f"index {x.op} {x.shape} varies along the lane loop")
        with self._in(level):
            raw = self.value(x, index)
        assert isinstance(raw, str)
        storage = STORAGE[x.dtype]
        t = e.typed("i64")
        wide = e.cast("sext" if x.kind == "s" else "zext", raw, storage.register, "i64")
        last = e.splat("i64", self.size(var.extent - 1))
        return (
            t.call("smin", t.call("smax", wide, 0), last)
            if x.kind == "s"
            else t.call("umin", wide, last)
        )

    def lane_stride(self, index: Index) -> Size | None:
        """Distance between neighbouring lanes, None when it is not the same everywhere."""
        stride: Size = 0
        for v, c in index.terms:
            if v.depth == len(self.levels) - 1:
                if v is not self.lane_var:
                    return None
                stride = c
        return stride

    def vector(self, index: Index, kind: str = "") -> tuple[str, str]:
        """(operand, integer kind) of an index per lane, in i32 when it certainly fits."""
        kind = kind or ("i32" if _fits(index) else "i64")
        key = ("vector", index, kind, self._active(index.depth))
        found = self.level.cache.get(key)
        if found is None:
            found = self.level.cache[key] = self._vector(index, kind)
        return found, kind

    def _vector(self, index: Index, kind: str) -> str:
        e = self.level.emit
        t = e.typed(kind)
        depth = len(self.levels) - 1
        flat = (
            combine((of(v), c) for v, c in index.terms if v.depth < depth or v is self.lane_var)
            + index.const
        )
        total = ""
        if flat.terms or flat.const != 0:
            base = self.scalar(flat)
            total = e.splat(kind, self._resize(base, flat.depth, kind))
            stride = self.lane_stride(flat)
            assert stride is not None
            if stride != 0:
                steps = (
                    e.iota(kind, stride)
                    if isinstance(stride, int)
                    else t.mul(e.iota(kind), e.splat(kind, self.size(stride)))
                )
                total = steps if base == "0" else t.add(total, steps)
        for v, c in index.terms:
            if v.depth < depth or v is self.lane_var:
                continue
            if v.kind == "value":
                part = (
                    e.cast("trunc", self._loaded(v, e, self.level), "i64", kind)
                    if kind != "i64"
                    else self._loaded(v, e, self.level)
                )
            else:
                inner, d = v.payload
                a, inner_kind = self.vector(inner, "i64" if kind == "i64" else "")
                it = e.typed(inner_kind)
                part = it.bin(
                    "udiv" if v.kind == "div" else "urem",
                    a,
                    e.splat(inner_kind, self._resize(self.size(d), 0, inner_kind)),
                )
                part = e.cast("trunc", part, inner_kind, kind)
            if c != 1:
                part = t.mul(part, e.splat(kind, self._resize(self.size(c), 0, kind)))
            total = t.add(total, part) if total else part
        return total or t.const(0)

    def address(self, pointer: str, kind: str, index: Index) -> str:
        """Pointer to element `index` (its first lane) of an array of `kind`."""
        if not index.terms and index.const == 0:
            return pointer
        level = self.levels[index.depth]
        key = (pointer, kind, index, self._active(index.depth))
        found = level.cache.get(key)
        if found is None:
            if index.const != 0:
                base = self.address(pointer, kind, index - index.const)
                offset = self.size(index.const)
            else:
                inner = combine((of(v), c) for v, c in index.terms if v.depth == index.depth)
                base = self.address(
                    pointer,
                    kind,
                    combine((of(v), c) for v, c in index.terms if v.depth < index.depth),
                )
                offset = self.scalar(inner)
            found = level.cache[key] = level.scalar.op(
                f"getelementptr {kind}, ptr {base}, i64 {offset}"
            )
        return found

    # -- memory
    def load(self, pointer: str, dtype: str, index: Index) -> Value:
        """Element `index` (row-major element number) of the array at `pointer`."""
        storage = STORAGE[dtype]
        raw = [
            self._load(pointer, storage, combine(((index, storage.parts),)) + part)
            for part in range(storage.parts)
        ]
        values = [scalar.decode(self.e, dtype, r) for r in raw]
        return (values[0], values[1]) if storage.parts == 2 else values[0]

    def _load(self, pointer: str, storage: Storage, index: Index) -> str:
        e = self.e
        kind = storage.memory
        align = storage.bytes
        mask = self.mask(pointer)
        t = e.typed(kind)
        if e.lanes == 1:
            p = self.address(pointer, kind, index)
            if mask is not None:
                # the array's own start can be read, and is in the same address space
                safe = ZEROS if self.target.shares_memory else pointer
                p = e.op(f"select i1 {mask}, ptr {p}, ptr {safe}")
            return t.load(p)
        stride = self.lane_stride(index)
        if stride == 1 and (mask is None or self.target.masks_vectors):
            if self.ahead and mask is None and pointer in self.leaves.values():
                self.prefetch(pointer, kind, index + self.ahead // align)
            at = self._reached(self.address(pointer, kind, index))
            return t.load(at, self.alignment(index, align), mask)
        if stride == -1 and mask is None:
            raw = t.load(self.address(pointer, kind, index - (e.lanes - 1)))
            return e.reversed(kind, raw)
        if (
            self._tile is not None
            and mask is None
            and stride is not None
            and dict(index.terms).get(self._tile[0]) == 1
            and (row := self._tile_row(pointer, storage, index, stride)) is not None
        ):
            return row
        if (
            mask is None
            and self.target.computes_in_vectors
            and isinstance(stride, int)
            and 2 <= stride <= _TURNS
        ):
            return self._strided(pointer, storage, index, stride)
        # the tiles of a loop start at multiples of `lanes`, or overlap at its end
        even = self._tile is None or exact(self._tile[1].extent - 1, self.lanes) is not None
        if stride is None and self.target.computes_in_vectors and even:
            found = self._periodic(pointer, storage, index, mask)
            if found is not None:
                return found
        at, offsets, offset_kind = self._offsets(pointer, kind, index, stride)
        return t.gather(at, offsets, offset_kind, mask)

    def _reached(self, address: str) -> str:
        """The address, but where no lane may touch memory one that can be read: processors take
        long for vectors that are masked out where there is no memory."""
        with self._in(self.levels[-2]):
            test = self.mask()
        return (
            address if test is None else self.e.op(f"select i1 {test}, ptr {address}, ptr {ZEROS}")
        )

    def look_ahead(self) -> None:
        """Ask for operands before their turn, if they are large: the processor's own prefetcher
        stops at every page and follows few streams, and an AdamW step reads four. Worth it for data
        that no cache holds, see Program.cold."""
        if (
            self.target.steers_caches
            and sum(fixed(x.nbytes) for x in self.leaves if isinstance(x.size, int))
            >= STREAMED_BYTES
        ):
            self.ahead = AHEAD_BYTES

    def prefetch(self, pointer: str, kind: str, index: Index) -> None:
        """Ask for the line of element `index`, which need not exist, to be brought to the second
        cache."""
        self.e.do(
            f"call void @llvm.prefetch.p0(ptr {self.address(pointer, kind, index)}, i32 0, i32 2,"
            " i32 1)"
        )

    def _periodic(
        self, pointer: str, storage: Storage, index: Index, mask: str | None
    ) -> str | None:
        """A load at base + i mod d or base + i div d, i counting lanes and d or the vector a
        multiple of the other: contiguous elements that repeat, or elements that each fill some
        lanes. None: it is something else."""
        deep = [(v, c) for v, c in index.terms if v.depth == len(self.levels) - 1]
        if len(deep) != 1 or deep[0][1] != 1 or deep[0][0].kind not in ("mod", "div"):
            return None
        if self.ragged:  # the first lane may be anything
            return None
        var = deep[0][0]
        inner, d = var.payload
        lane = [(v, c) for v, c in inner.terms if v.depth == len(self.levels) - 1]
        steps = [c for v, c in inner.terms if v.depth < len(self.levels) - 1] + [inner.const]
        if (
            [c for v, c in lane if v is self.lane_var] != [1]
            or len(lane) != 1
            or not all(isinstance(n, int) for n in (d, *steps))
        ):
            return None
        lanes = self.e.lanes
        kind = storage.memory
        align = storage.bytes
        span = min(d, lanes)
        # the first lane is a multiple of `lanes`
        if max(d, lanes) % span or math.gcd(*steps) % span or d == 1:
            return None
        t = self.e.typed(kind)
        address = self.address(pointer, kind, index)
        if var.kind == "mod" and d >= lanes:
            return t.load(address, mask=mask)
        if mask is not None and (var.kind == "div" or self.guards):
            return None
        count = span if var.kind == "mod" else lanes // span
        if count == 1:
            return self.e.splat(kind, self.level.scalar.typed(kind).load(address))
        few = self.e.op(f"load <{count} x {kind}>, ptr {address}, align {align}")
        return self.e.shuffle(
            kind,
            few,
            "poison",
            count,
            [i % count if var.kind == "mod" else i // span for i in range(lanes)],
        )

    def alignment(self, index: Index, itemsize: int) -> int:
        """Bytes that the address of the first of `lanes` consecutive elements is known to be a
        multiple of, where that matters; buffers and the vectors of a row start at multiples of 16
        bytes."""
        if not self.target.splits_unaligned:
            return itemsize
        step = math.gcd(self.e.lanes, index.const) if isinstance(index.const, int) else 1
        for v, c in index.terms:
            if v is not self.lane_var:
                step = math.gcd(step, c) if isinstance(c, int) else 1
        return min(16, itemsize * step)

    def _strided(self, pointer: str, storage: Storage, index: Index, stride: int) -> str:
        """Every `stride`-th element. Those between are loaded, too, and kept for who asks for them
        next; where the array may end before, no vector ends behind the last element."""
        turn = index.const % stride if isinstance(index.const, int) else 0
        if not below(-1, (index - turn).bounds()[0]):
            turn = 0  # there may be nothing before
        start = index - turn
        room = self._rooms.get(pointer, 0) * storage.parts
        high = start.bounds()[1]
        less = 0 if below(high + stride, room + 1) else stride - 1 - turn
        kind = storage.memory
        key = ("turns", pointer, kind, start, stride, less)
        found = self.level.cache.get(key)
        if found is None:
            t = self.e.typed(kind)
            lanes = self.lanes
            block = []
            for n in range(0, stride * lanes, lanes):
                at = min(n, stride * lanes - less - lanes)
                v = t.load(self.address(pointer, kind, start + at))
                order = [min(i + n - at, lanes - 1) for i in range(lanes)]
                block.append(self.e.shuffle(kind, v, "poison", lanes, order) if at < n else v)
            found = self.level.cache[key] = apart(self.e, kind, block)
        return str(found[turn])

    def alloca(self, kind: str, count: int = 1, align: int = 64) -> str:
        """A stack slot of the function, of whole vectors if of several elements."""
        name = f"%s{self.unit.number()}"
        if count > 1:
            count = round_up(count, 2 * self.lanes)  # of pairs, if complex
            self.padded.add(name)
        self.levels[0].lines.insert(0, f"  {name} = alloca [{count} x {kind}], align {align}")
        return name

    def _tile_row(self, pointer: str, storage: Storage, index: Index, stride: Size) -> str | None:
        """One row of a transposed block: `lanes` contiguous loads along the row variable serve all
        rows of the tile. They come before a loop over its rows, which finds the block on the stack;
        None where what is read depends on the row in other ways, too."""
        assert self._tile is not None and self.lane_var is not None
        _, column, number, blocks = self._tile
        kind = storage.memory
        lanes = self.lanes
        start = index - number + (of(column) - of(self.lane_var)) * stride
        room = self._rooms[pointer] * storage.parts
        inside = below(-1, start.bounds()[0]) and below(
            (start + stride * (lanes - 1)).bounds()[1] + lanes, room + 1
        )
        if not inside or 0 < number.depth <= start.depth:
            return None
        found = blocks.get((pointer, start))
        if found is None:
            e = Emit(lanes, self.levels[number.depth - 1].lines, self.unit)
            t = e.typed(kind)
            columns = [
                t.load(self.address(pointer, kind, start + stride * n)) for n in range(lanes)
            ]
            found = blocks[pointer, start] = transposed(e.op, kind, lanes, columns)
            if number.depth:
                slot = self.alloca(kind, lanes * lanes)
                for n, v in enumerate(found):
                    t.store(v, self.address(slot, kind, constant(n * lanes)))
                found[0] = slot
        if number.depth:
            return self.e.typed(kind).load(self.address(found[0], kind, number * lanes))
        return found[fixed(number.const)]

    def _offsets(
        self, pointer: str, kind: str, index: Index, stride: Size | None
    ) -> tuple[str, str, str]:
        """Scalar base pointer and per-lane offsets of a strided or irregular access."""
        if isinstance(stride, int) and abs(stride) * self.lanes < 1 << 31:
            return (
                self.address(pointer, kind, index),
                self.e.iota("i32", stride),
                "i32",
            )
        depth = len(self.levels) - 1
        outer = combine((of(v), c) for v, c in index.terms if v.depth < depth) + index.const
        offsets, offset_kind = self.vector(
            combine((of(v), c) for v, c in index.terms if v.depth == depth)
        )
        return self.address(pointer, kind, outer), offsets, offset_kind

    def store(self, pointer: str, dtype: str, index: Index, value: Value) -> None:
        """Write element `index`. Inside a lane loop the stores of all copies come after their
        loads."""
        storage = STORAGE[dtype]
        values = value if isinstance(value, tuple) else (value,)
        e = self.e
        mask = self.mask(pointer)
        encoded = [scalar.encode(e, dtype, v) for v in values]
        if storage.parts == 2 and e.lanes > 1 and mask is None and self.lane_stride(index) == 1:
            n = e.lanes
            pair = e.shuffle(
                storage.memory,
                encoded[0],
                encoded[1],
                n,
                [i // 2 + i % 2 * n for i in range(2 * n)],
            )
            address = self.address(pointer, storage.memory, combine(((index, 2),)))
            self._later(
                lambda: e.do(
                    f"store <{2 * n} x {storage.memory}> {pair}, ptr {address}, align"
                    f" {storage.bytes}"
                )
            )
            return
        for part, v in enumerate(encoded):
            self._store(pointer, storage, combine(((index, storage.parts),)) + part, v, mask)

    def _store(
        self,
        pointer: str,
        storage: Storage,
        index: Index,
        value: str,
        mask: str | None,
    ) -> None:
        e = self.e
        kind = storage.memory
        align = storage.bytes
        t = e.typed(kind)
        stride = self.lane_stride(index) if e.lanes > 1 else 1
        if stride == 1 and (mask is None or e.lanes == 1 or self.target.masks_vectors):
            at = self.address(pointer, kind, index)
            if e.lanes == 1 and mask is not None:
                # A scalar store under a condition only happens in kernels that are one lane wide.
                raise CodegenError("a guarded scalar store needs a branch")
            nontemporal = pointer in self.nontemporal and mask is None and e.lanes > 1
            align = (
                align * e.lanes
                if nontemporal
                else self.alignment(index, align)
                if e.lanes > 1
                else align
            )
            self._later(lambda: t.store(value, at, align, mask, nontemporal))
        elif stride == -1 and mask is None:
            reversed_ = e.reversed(kind, value)
            at = self.address(pointer, kind, index - (e.lanes - 1))
            self._later(lambda: t.store(reversed_, at))
        elif (
            isinstance(stride, int)
            and 2 <= stride <= _TURNS
            and isinstance(index.const, int)
            and self._pending is not None
            and self.target.computes_in_vectors
        ):
            turn = index.const % stride
            key = ("stored", pointer, kind, index - turn, stride, mask)
            found = self.level.cache.get(key)
            if found is None:
                found = self.level.cache[key] = {}
                start = self.address(pointer, kind, index - turn)
                self._later(partial(_store_turns, e, kind, start, stride, found, mask))
            found[turn] = value
        else:
            at, offsets, offset_kind = self._offsets(pointer, kind, index, stride)
            self._later(lambda: t.scatter(value, at, offsets, offset_kind, mask))

    def _later(self, write: Callable[[], None]) -> None:
        if self._pending is None:
            write()
        else:
            self._pending.append(write)


def _store_turns(
    e: Emit, kind: str, start: str, stride: int, found: dict[int, str], mask: str | None
) -> None:
    """Write what is stored at every `stride`-th element from `start` on, by distance from that:
    together, if those are all elements."""
    t = e.typed(kind)

    def at(number: int) -> str:
        return e.op(f"getelementptr {kind}, ptr {start}, i64 {number}") if number else start

    if len(found) < stride:
        for turn, value in found.items():
            t.scatter(value, at(turn), e.iota("i32", stride), "i32", mask)
        return
    masks = in_turns(e, "i1", [mask] * stride) if mask else [None] * stride
    vectors = in_turns(e, kind, [found[n] for n in range(stride)])
    for n, (vector, m) in enumerate(zip(vectors, masks, strict=True)):
        t.store(vector, at(n * e.lanes), mask=m)


def _holds(c: Condition) -> bool:
    low, high = c[0].bounds()
    return below(high, c[2]) and (low == c[1] or below(c[1], low))


def excluded(c: Condition) -> bool:
    """Whether the condition holds nowhere."""
    low, high = c[0].bounds()
    return below(high, c[1]) or below(c[2], low + 1) or c[1] == c[2]


def _fits(index: Index) -> bool:
    """Whether the index and everything it is made of is an int that fits in 31 bits."""
    low, high = index.bounds()
    if not (isinstance(low, int) and isinstance(high, int)) or low < -(1 << 31) or high >= 1 << 31:
        return False
    if any(isinstance(c, Dim) or abs(c) >= 1 << 31 for _, c in index.terms):
        return False
    return all(_fits(v.payload[0]) for v, _ in index.terms if v.kind in ("div", "mod"))
