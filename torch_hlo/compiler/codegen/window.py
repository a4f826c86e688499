"""reduce-window.

A window as long as its dimension that ends at the element (a running sum) is a scan (scan.py). A small window is unrolled into a value, so
that pooling is a vector loop over its output. Any other window is a loop nest over its positions.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack

from torch_hlo.compiler.codegen import index as ix
from torch_hlo.compiler.codegen import scalar
from torch_hlo.compiler.codegen.function import Int
from torch_hlo.compiler.codegen.indexing import Sizes, dot_product, loop_nest
from torch_hlo.compiler.codegen.inline import Writer, apply, load, store
from torch_hlo.compiler.codegen.loop import Store, run_loop
from torch_hlo.compiler.codegen.plan import Planner
from torch_hlo.compiler.codegen.reducer import Reducer
from torch_hlo.compiler.codegen.registry import emits_step, emits_value
from torch_hlo.compiler.codegen.scalar import STORAGE, Value
from torch_hlo.compiler.codegen.scan import emit_scan, is_scan
from torch_hlo.compiler.codegen.views import choose
from torch_hlo.hlo.dim import Dim
from torch_hlo.hlo.ir import Instruction, instr
from torch_hlo.hlo.shape import DTYPES, row_major_strides
from torch_hlo.hlo.window import Window

UNROLLED_TAPS = 64  # windows up to this size are written out


def tap_count(window: Window) -> int | None:
    """Number of positions in a window, None when symbolic."""
    total = 1
    for w in window:
        if isinstance(w.size, Dim):
            return None
        total *= w.size
    return total


def _elements(x: Instruction) -> tuple:
    return x.shape.elements if x.shape.is_tuple else (x.shape,)


@emits_step("reduce-window")
def reduce_window(program, x: Instruction) -> None:
    shape = _elements(x)[0]
    if shape.size == 0:
        return
    if is_scan(x):
        return emit_scan(program, x)
    taps = tap_count(x["window"])
    if taps is not None and taps <= UNROLLED_TAPS and not x.shape.is_tuple:
        params = tuple(
            instr("parameter", (), o.shape, index=i) for i, o in enumerate(x.operands[:1])
        )
        inits = [
            o if o.op == "constant" else instr("parameter", (), o.shape, index=1)
            for o in x.operands[1:]
        ]
        leaves = [*params, *(i for i in inits if i.op == "parameter")]
        sources = [
            program.place(o)
            for o in x.operands
            if not (o.op == "constant" and o is not x.operands[0])
        ]
        y = instr(x.op, (*params, *inits), x.shape, **dict(x.attrs))
        return run_loop(program, [Store(y)], leaves, sources, [program.place(x)], key=("window", y))
    _nested(program, x)


@emits_value("reduce-window")
def window_value(k, x: Instruction, index: tuple[ix.Index, ...]) -> Value:
    """One output of a small window: every tap that lies on an element, folded in row-major order."""
    operand, window = x.operands[0], x["window"]
    reducer = Reducer(x)
    taps = []
    for offsets in itertools.product(*(range(w.size) for w in window)):
        place, conditions = [], []
        for i, o, w, n in zip(index, offsets, window, operand.shape.dims, strict=True):
            at = i * w.stride + (o * w.window_dilation - w.pad_low)
            reach = n
            if w.base_dilation > 1:
                conditions.append((at, 0, (n - 1) * w.base_dilation + 1))
                at, rest = ix.divide(
                    at + w.base_dilation * (1 << 20), w.base_dilation
                )  # never negative
                at = at - (1 << 20)
                conditions.append((rest, 0, 1))
            else:
                conditions.append((at, 0, reach))
            place.append(at)
        taps.append((tuple(place), conditions))
    initial = x.operands[1]

    def read(place, conditions) -> Value:
        return choose(
            k,
            x.shape.dtype,
            conditions,
            lambda: k.value(operand, place),
            lambda: _padding(k, reducer, initial),
            operand.shape.size,
        )

    values = [read(*t) for t in taps]
    if isinstance(k, Planner):
        k.value(initial, ())
        k.cost += len(taps)
        return values[0] if values else "%0"
    flat = [list(v) if isinstance(v, tuple) else [v] for v in values]
    total = flat[0]
    for v in flat[1:]:
        total = reducer.combine(k, total, v)
    total = reducer.finish(k, total)
    return tuple(total) if len(total) == 2 else total[0]


def _padding(k, reducer: Reducer, initial: Instruction) -> Value:
    """The value of a tap outside of the operand: the initial value, or the same thing without loading it."""
    if isinstance(k, Planner) or reducer.needs_initial() or reducer.op is None:
        return k.value(initial, ())
    parts = [k.e.splat(kind, v) for kind, v in zip(reducer.kinds, reducer.identity(k), strict=True)]
    return tuple(parts) if len(parts) == 2 else parts[0]


# -- any window ----------------------------------------------------------------------------------------------------------
def positions(
    f: Writer, size: Sizes, window: Window, dims, output: list[Int], taps: list[Int]
) -> tuple[list[Int], str | None]:
    """(index of each operand dimension, condition that it is an element) for an output index and an offset in the window."""
    place: list[Int] = []
    inside: str | None = None
    for o, tap, w, n in zip(output, taps, window, dims, strict=True):
        at = f.sub(f.add(f.mul(o, w.stride), f.mul(tap, w.window_dilation)), size(w.pad_low))
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


def _nested(program, x: Instruction) -> None:
    """One output element at a time, with loops over the window."""
    half = len(x.operands) // 2
    operands, inits, window = x.operands[:half], x.operands[half:], x["window"]
    dims, types, out = (
        operands[0].shape.dims,
        [o.shape.dtype for o in operands],
        _elements(x)[0].dims,
    )
    reducer = Reducer(x)
    f = Writer(
        program,
        "reduce_window",
        [
            ("i64", "lo"),
            ("i64", "hi"),
            *(("ptr", f"{side}{i}") for i in range(half) for side in ("from", "init", "to")),
        ],
    )
    size = Sizes(f)
    sums = [
        f.alloca(STORAGE[t].register if STORAGE[t].parts == 1 else f"[2 x {STORAGE[t].register}]")
        for t in types
    ]
    strides = [size(s) for s in row_major_strides(dims)]

    def keep(i: int, value: Value) -> None:
        kind = STORAGE[types[i]].register
        for part, v in enumerate(value if isinstance(value, tuple) else (value,)):
            f.store(kind, v, f.gep(kind, sums[i], part))

    def kept(i: int) -> Value:
        kind = STORAGE[types[i]].register
        parts = tuple(
            f.load(kind, f.gep(kind, sums[i], part)) for part in range(STORAGE[types[i]].parts)
        )
        return parts if len(parts) == 2 else parts[0]

    def fold(values: list[Value]) -> None:
        if (
            reducer.op is not None and len(reducer.kinds) == 1
        ):  # narrow floats are rounded once, at the end
            kind = DTYPES[types[0]].kind
            return keep(
                0,
                scalar.TABLE[reducer.op, kind](
                    f.emit().typed(reducer.kinds[0]), kept(0), values[0]
                ),
            )
        for i, v in enumerate(apply(f, x["to_apply"], [*(kept(i) for i in range(half)), *values])):
            keep(i, v)

    with f.loop("%lo", "%hi") as item:
        output, rest = [], item
        for n in reversed(out[1:]):
            output.insert(0, f.rem(rest, size(n)))
            rest = f.div(rest, size(n))
        output = ([rest] + output) if out else []
        for i, t in enumerate(types):
            keep(i, load(f, t, f"%init{i}", 0))
        with ExitStack() as stack:
            taps = loop_nest(f, stack, [(0, size(w.size)) for w in window])
            place, inside = positions(f, size, window, dims, output, taps)
            with f.when(inside) if inside else ExitStack():
                at = dot_product(f, place, strides)
                fold([load(f, t, f"%from{i}", at) for i, t in enumerate(types)])
            if inside and reducer.needs_initial():  # padding has the initial value
                with f.when(f.op(f"xor i1 {inside}, true")):
                    fold([load(f, t, f"%init{i}", 0) for i, t in enumerate(types)])
        for i, t in enumerate(types):
            store(f, t, kept(i), f"%to{i}", item)
    places = program.places(x) if x.shape.is_tuple else (program.places(x),)
    pointers = []
    for o, i, place in zip(operands, inits, places, strict=True):
        pointers += [
            f"ptr {program.pointer(o)}",
            f"ptr {program.pointer(i)}",
            f"ptr {program.at(place)}",
        ]
    name = f.define()
    program.parallel(
        name,
        pointers + size.arguments(program),
        program.size(ix.product(out)),
        cost=2.0 * (tap_count(window) or 100),
    )
