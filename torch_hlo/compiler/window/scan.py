"""Running folds: a reduce-window as long as its dimension that ends (or begins) at the element.

Along any dimension but the last, neighbouring columns are the lanes of a vector. Along the last one
a vector of elements becomes its own prefixes in log2(lanes) steps (Hillis and Steele, 1986), to
which what came before is added: one combination per vector is sequential."""

from __future__ import annotations

from torch_hlo.hlo.ir import Instruction, ceildiv, product

from ..codegen import Program, Writer, apply, leaves, load, store
from ..gather.gather_scatter import Sizes
from ..llvm import Int, item_parameters, scalar
from ..llvm.scalar import STORAGE
from ..loops.reducer import Reducer

# Running sums are kept in a wider type, as PyTorch does on the CPU.
_WIDER = {"f32": "double", "bf16": "float", "f16": "float"}
_IDEMPOTENT = ("maximum", "minimum", "and", "or")


def scan_dimension(x: Instruction) -> tuple[int, bool] | None:
    """(dimension, from the end) when output i of a reduce-window is the fold of the elements up to
    (or from) i along one dimension."""
    dims = x.operand.dims
    found = None
    for d, (n, w) in enumerate(zip(dims, x["window"], strict=True)):
        if w.is_trivial:
            continue
        plain = w.stride == 1 and w.base_dilation == 1 and w.window_dilation == 1 and w.size == n
        ends = (w.pad_low, w.pad_high)
        if found is not None or not plain or ends not in ((n - 1, 0), (0, n - 1)):
            return None
        found = d, ends[0] == 0
    return found


def is_scan(x: Instruction) -> bool:
    """Whether `emit_scan` can write a reduce-window: padding, which has the initial value, changes
    nothing that this value does not change by itself."""
    reducer = Reducer(x)
    return scan_dimension(x) is not None and (
        not reducer.needs_initial() or reducer.op in _IDEMPOTENT
    )


def pointer_names(count: int) -> list[str]:
    """Of each operand: itself, its initial value, its result."""
    return [f"{side}{i}" for i in range(count) for side in ("from", "init", "to")]


def pointers_of(program: Program, x: Instruction) -> list[str]:
    """The addresses of those."""
    half = len(x.operands) // 2
    found = []
    for o, init, place in zip(
        x.operands[:half], x.operands[half:], leaves(program.places(x)), strict=True
    ):
        found += [program.pointer(o), program.pointer(init), program.at(place)]
    return found


def emit_scan(program: Program, x: Instruction) -> None:
    """Write and call the kernel of a reduce-window for which `is_scan` holds."""
    scanned = scan_dimension(x)
    assert scanned is not None
    axis, backward = scanned
    dims = x.operand.dims
    outer = product(dims[:axis])
    inner = product(dims[axis + 1 :])
    f = Writer(program, "scan", item_parameters(pointer_names(len(x.operands) // 2)))
    size = Sizes(f)
    scan = _Scan(f, x, program.target.strip)
    length = size(dims[axis])
    width = size(inner)
    columns = scan.lanes if inner != 1 else 1  # per item
    with f.items() as item:
        if inner == 1:
            scan.along(f.mul(item, length), length, backward)
        else:
            blocks = f.ceildiv(width, columns)
            first = f.mul(f.rem(item, blocks), columns)
            scan.across(
                f.muladd(f.div(item, blocks), f.mul(length, width), first),
                first,
                length,
                width,
                backward,
            )
    items = outer * ceildiv(inner, columns)
    steps = n if isinstance(n := dims[axis], int) else 1000
    program.parallel(
        f.define(),
        program.arguments(pointers_of(program, x), size.names),
        items,
        cost=1.0 + 1.5 * steps,
    )


class _Scan:
    """What the two forms share: how elements are read, combined and written, `lanes` at a time.
    Accumulators are flat lists of operands (a complex value is two), in a wider type where sums are
    kept in one."""

    def __init__(self, f: Writer, x: Instruction, lanes: int) -> None:
        self.f = f
        self.computation = x["to_apply"]
        self.reducer = Reducer(x)
        self.types = [o.dtype for o in x.operands[: len(x.operands) // 2]]
        self.lanes = lanes if all(STORAGE[t].parts == 1 for t in self.types) else 1
        single = self.reducer.op in ("add", "multiply") and len(self.types) == 1
        self.wide = _WIDER.get(self.types[0]) if single else None
        self.kinds = (
            [self.wide]
            if self.wide
            else [STORAGE[t].register for t in self.types for _ in range(STORAGE[t].parts)]
        )

    def across(self, base: Int, first: Int, length: Int, width: Int, backward: bool) -> None:
        """Columns from `first` on, element `base` of the array: rows of `width` elements are
        combined one after the other."""
        f = self.f
        mask = f.lane_mask(self.lanes, first, width) if self.lanes > 1 else None
        with f.loop(0, length, carry=self._carry()) as loop:
            step = f.sub(f.sub(length, 1), loop.index) if backward else loop.index
            at = f.muladd(step, width, base)
            loop.next = self._fold(loop.vars, self._read(at, mask))
            self._write(loop.next, at, mask)

    def along(self, base: Int, length: Int, backward: bool) -> None:
        """A contiguous row of `length` elements that starts at element `base`."""
        f = self.f
        lanes = self.lanes
        rest = f.rem(length, lanes)
        whole = f.sub(length, rest)

        def block(start: Int, before: list[str], tail: bool) -> list[str]:
            """The vector whose first element in scan order is number `start`; returns the fold up
            to its last one, in all lanes."""
            at = f.add(base, f.sub(f.sub(length, lanes), start) if backward else start)
            mask = None
            if tail and backward:  # lanes before the row's first element
                mask = f.typed("i64", lanes).cmp("sge", self._numbers(f.sub(at, base)), 0)
            elif tail:
                mask = f.lane_mask(lanes, start, length)
            values = self._turned(self._read(at, mask), backward)
            values = self._fold(before, self._prefixes(values, initial))
            self._write(self._turned(values, backward), at, mask)
            return [
                (
                    f.emit(lanes).shuffle(kind, v, "poison", lanes, [lanes - 1] * lanes)
                    if lanes > 1
                    else v
                )
                for kind, v in zip(self.kinds, values, strict=True)
            ]

        carry = self._carry()
        initial = [v for _, v in carry]
        with f.loop(0, whole, lanes, carry=carry) as loop:
            loop.next = block(loop.index, loop.vars, tail=False)
        if lanes > 1 and rest != 0:
            with f.when(f.icmp("ne", rest, 0)):
                block(whole, loop.vars, tail=True)

    def _numbers(self, first: Int) -> str:
        """first, first + 1, …"""
        e = self.f.emit(self.lanes)
        return e.typed("i64").add(e.splat("i64", str(first)), e.iota("i64"))

    def _prefixes(self, values: list[str], initial: list[str]) -> list[str]:
        """Lane i becomes the fold of lanes 0 to i."""
        e = self.f.emit(self.lanes)
        lanes = self.lanes
        step = 1
        while step < lanes:
            # Lanes without an earlier one get the initial value. Selecting them afterwards would
            # let LLVM leave anything in them: a multiplication of bits that happen to be a denormal
            # number takes hundreds of cycles.
            order = [i - step if i >= step else lanes + i for i in range(lanes)]
            earlier = [
                e.shuffle(kind, v, first, lanes, order)
                for kind, v, first in zip(self.kinds, values, initial, strict=True)
            ]
            values = self._fold(earlier, values)
            step *= 2
        return values

    def _turned(self, values: list[str], backward: bool) -> list[str]:
        """Lanes in scan order, or back."""
        if not backward or self.lanes == 1:
            return values
        e = self.f.emit(self.lanes)
        return [e.reversed(kind, v) for kind, v in zip(self.kinds, values, strict=True)]

    def _carry(self) -> list[tuple[str, str]]:
        """(type, initial value) of the accumulators."""
        f = self.f
        e = self.f.emit(self.lanes)
        found = []
        for i, t in enumerate(self.types):
            parts = scalar.flat([load(f, t, f"%init{i}", 0)])
            found += [e.splat(STORAGE[t].register, p) for p in parts]
        if self.wide:
            found = [e.cast("fpext", found[0], STORAGE[self.types[0]].register, self.wide)]
        return list(zip([e.type(kind) for kind in self.kinds], found, strict=True))

    def _fold(self, a: list[str], b: list[str]) -> list[str]:
        if self.wide and self.reducer.op is not None:
            return [
                scalar.TABLE[self.reducer.op, "f"](self.f.typed(self.wide, self.lanes), a[0], b[0])
            ]
        results = apply(
            self.f,
            self.computation,
            [*scalar.grouped(a, self.types), *scalar.grouped(b, self.types)],
            self.lanes,
        )
        return scalar.flat(results)

    def _read(self, at: Int, mask: str | None) -> list[str]:
        values = scalar.flat(
            load(self.f, t, f"%from{i}", at, self.lanes, mask) for i, t in enumerate(self.types)
        )
        if self.wide:
            return [
                self.f.emit(self.lanes).cast(
                    "fpext", values[0], STORAGE[self.types[0]].register, self.wide
                )
            ]
        return values

    def _write(self, flat: list[str], at: Int, mask: str | None) -> None:
        if self.wide:
            flat = [
                self.f.emit(self.lanes).cast(
                    "fptrunc", flat[0], self.wide, STORAGE[self.types[0]].register
                )
            ]
        for i, (t, v) in enumerate(zip(self.types, scalar.grouped(flat, self.types), strict=True)):
            store(self.f, t, v, f"%to{i}", at, self.lanes, mask)
