"""reduce-window.

A window as long as its dimension that ends at the element (a running sum) is a scan (scan.py). A
small window is unrolled into a value, so that pooling is a vector loop over its output. Any other
window is a loop nest over its positions."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, nullcontext

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    DTYPES,
    Dim,
    Dims,
    Instruction,
    Window,
    instr,
    parameters_of,
    product,
    replace,
    row_major_strides,
)

from ..codegen import (
    Index,
    Kernel,
    Planner,
    Program,
    Writer,
    apply,
    index as ix,
    load,
    store,
)
from ..codegen.kernel_values import Condition
from ..codegen.views import choose
from ..gather.gather_scatter import Sizes, dot_product, loop_nest
from ..llvm import Int, item_parameters, scalar
from ..llvm.scalar import STORAGE, Value
from ..loops.elementwise_loops import Store, run_loop
from ..loops.reducer import Reducer, joined
from .scan import emit_scan, is_scan, pointer_names, pointers_of

UNROLLED_TAPS = 64  # windows up to this size are written out


def tap_count(window: Window) -> int | None:
    """Number of positions in a window, None when symbolic."""
    total = 1
    for w in window:
        if isinstance(w.size, Dim):
            return None
        total *= w.size
    return total


def reduce_window(program: Program, x: Instruction) -> None:
    shape = x.shape.arrays[0]
    if shape.size == 0:
        return
    if is_scan(x):
        return emit_scan(program, x)
    taps = tap_count(x["window"])
    if taps is not None and taps <= UNROLLED_TAPS and not x.is_tuple:
        params = parameters_of(o.shape for o in x.operands[:1])
        inits = [
            o if o.op == "constant" else instr("parameter", (), o.shape, index=1)
            for o in x.operands[1:]
        ]
        leaves = [*params, *(i for i in inits if i.op == "parameter")]
        sources = [
            program.place(o) for o in x.operands if not (o.op == "constant" and o is not x.operand)
        ]
        y = replace(x, (*params, *inits), x.shape)
        return run_loop(
            program,
            [Store(y)],
            leaves,
            sources,
            [program.place(x)],
            key=("window", y),
        )
    _nested(program, x)


def window_value(k: Kernel | Planner, x: Instruction, index: tuple[ix.Index, ...]) -> Value:
    """One output of a small window: every tap that lies on an element, folded in row-major
    order."""
    operand = x.operand
    window = x["window"]
    reducer = Reducer(x)
    taps = []
    for offsets in itertools.product(*(range(w.size) for w in window)):
        place: list[Index] = []
        conditions: list[Condition] = []
        for i, o, w, n in zip(index, offsets, window, operand.dims, strict=True):
            at = i * w.stride + (o * w.window_dilation - w.pad_low)
            reach = n
            if w.base_dilation > 1:
                conditions.append((at, 0, (n - 1) * w.base_dilation + 1))
                # never negative
                at, rest = ix.divide(at + w.base_dilation * (1 << 20), w.base_dilation)
                at -= 1 << 20
                conditions.append((rest, 0, 1))
            else:
                conditions.append((at, 0, reach))
            place.append(at)
        taps.append((tuple(place), conditions))
    initial = x.operands[1]

    def read(place: tuple[Index, ...], conditions: list[Condition]) -> Value:
        return choose(
            k,
            x.dtype,
            conditions,
            lambda: k.value(operand, place),
            lambda: _padding(k, reducer, initial),
        )

    values = [read(*t) for t in taps]
    if isinstance(k, Planner):
        k.value(initial, ())
        k.cost += len(taps)
        return values[0] if values else "%0"
    flat = [list(v) if isinstance(v, tuple) else [v] for v in values]
    (value,) = joined(k, reducer, flat)
    return value


def _padding(k: Kernel | Planner, reducer: Reducer, initial: Instruction) -> Value:
    """The value of a tap outside of the operand: the initial value, or the same thing without
    loading it."""
    if isinstance(k, Planner) or reducer.needs_initial() or reducer.op is None:
        return k.value(initial, ())
    parts = [k.e.splat(kind, v) for kind, v in zip(reducer.kinds, reducer.identity(k), strict=True)]
    return (parts[0], parts[1]) if len(parts) == 2 else parts[0]


# -- any window
def positions(
    f: Writer,
    size: Sizes,
    window: Window,
    dims: Dims,
    output: list[Int],
    taps: list[Int],
) -> tuple[list[Int], str | None]:
    """(index of each operand dimension, condition that it is an element) for an output index and an
    offset in the window."""
    place: list[Int] = []
    inside: str | None = None
    for o, tap, w, n in zip(output, taps, window, dims, strict=True):
        at = f.sub(f.muladd(o, w.stride, f.mul(tap, w.window_dilation)), size(w.pad_low))
        if w.is_trivial:
            place.append(at)
            continue
        tests = []
        if w.base_dilation > 1:
            tests.append(f.icmp("sge", at, 0))
            quotient = f.op(f"sdiv i64 {at}, {w.base_dilation}")
            tests.append(f.icmp("eq", f.mul(quotient, w.base_dilation), at))
            at = quotient
        tests.append(f.icmp("ult", at, size(n)))
        for t in tests:
            inside = t if inside is None else f.op(f"and i1 {inside}, {t}")
        place.append(at)
    return place, inside


@frozen
class _Accumulators:
    """What a window has folded so far, in a stack slot per operand."""

    f: Writer
    x: Instruction
    reducer: Reducer
    types: list[str]
    slots: list[str]

    @classmethod
    def of(cls, f: Writer, x: Instruction, types: list[str]) -> _Accumulators:
        slots = []
        for t in types:
            register = STORAGE[t].register
            slots.append(f.alloca(register if STORAGE[t].parts == 1 else f"[2 x {register}]"))
        return cls(f, x, Reducer(x), types, slots)

    def load(self, pointer: str, at: Int) -> list[Value]:
        """Element `at` of each array of "from" or "init"."""
        return [load(self.f, t, f"%{pointer}{i}", at) for i, t in enumerate(self.types)]

    def keep(self, i: int, value: Value) -> None:
        kind = STORAGE[self.types[i]].register
        for part, v in enumerate(value if isinstance(value, tuple) else (value,)):
            self.f.store_at(kind, v, self.slots[i], part)

    def kept(self, i: int) -> Value:
        f = self.f
        storage = STORAGE[self.types[i]]
        kind = storage.register
        parts = [f.load_at(kind, self.slots[i], part) for part in range(storage.parts)]
        return (parts[0], parts[1]) if len(parts) == 2 else parts[0]

    def fold(self, values: list[Value]) -> None:
        reducer = self.reducer
        # narrow floats are rounded once, at the end
        if reducer.op is not None and len(reducer.kinds) == 1:
            combine = scalar.TABLE[reducer.op, DTYPES[self.types[0]].kind]
            typed = self.f.typed(reducer.kinds[0])
            return self.keep(0, combine(typed, self.kept(0), values[0]))
        before = [self.kept(i) for i in range(len(values))]
        for i, v in enumerate(apply(self.f, self.x["to_apply"], [*before, *values])):
            self.keep(i, v)


def _nested(program: Program, x: Instruction) -> None:
    """One output element at a time, with loops over the window."""
    half = len(x.operands) // 2
    operands = x.operands[:half]
    out = x.shape.arrays[0].dims
    f = Writer(program, "reduce_window", item_parameters(pointer_names(half)))
    size = Sizes(f)
    sums = _Accumulators.of(f, x, [o.dtype for o in operands])
    strides = [size(s) for s in row_major_strides(operands[0].dims)]
    with f.items() as item:
        output = _output_index(f, size, item, out)
        for i, t in enumerate(sums.types):
            sums.keep(i, load(f, t, f"%init{i}", 0))
        _fold_window(size, sums, output, strides)
        for i, t in enumerate(sums.types):
            store(f, t, sums.kept(i), f"%to{i}", item)
    name = f.define()
    program.parallel(
        name,
        program.arguments(pointers_of(program, x), size.names),
        product(out),
        cost=2.0 * (tap_count(x["window"]) or 100),
    )


def _output_index(f: Writer, size: Sizes, item: Int, dims: Dims) -> list[Int]:
    """The multi-index of element number `item`."""
    found: list[Int] = []
    for n in reversed(dims[1:]):
        found.insert(0, f.rem(item, size(n)))
        item = f.div(item, size(n))
    return [item, *found] if dims else []


def _fold_window(size: Sizes, sums: _Accumulators, output: list[Int], strides: list[Int]) -> None:
    """Fold all positions of the window of one output element."""
    f = sums.f
    window = sums.x["window"]
    dims = sums.x.operand.dims
    with ExitStack() as stack:
        taps = loop_nest(f, stack, [(0, size(w.size)) for w in window])
        place, inside = positions(f, size, window, dims, output, taps)
        with f.when(inside) if inside else nullcontext():
            sums.fold(sums.load("from", dot_product(f, place, strides)))
        # padding has the initial value
        if inside and (sums.reducer.op is None or sums.reducer.needs_initial()):
            with f.when(f.op(f"xor i1 {inside}, true")):
                sums.fold(sums.load("init", 0))
