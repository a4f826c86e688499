"""Steps with reductions: a fusion, a reduce outside of one, the combination of partial results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    DTYPES,
    Computation,
    Dims,
    Instruction,
    Ints,
    Size,
    fixed,
    instr,
    parameters_of,
    product,
    replace,
    tuple_shape,
)

from ..codegen import CodegenError, Index, Program
from ..codegen.index import ZERO, constant, delinear, linear, regroup
from ..fusion import fusion_table as table
from ..llvm.scalar import Value
from ..thresholds import (
    BYTE_NS,
    HEAVY_NS,
    LIGHT_NS,
    SHORT_COST,
    STREAM_BYTES,
)
from .elementwise_loops import Store
from .reducer import fold_pairwise
from .row import RowEmitter
from .row_kernel import ReduceValue, RowKernel, tuple_users
from .row_plan import RowPlan, Walk, plan
from .row_strided import StridedEmitter


@frozen
class _Call:
    """A compiled kernel of a fusion: `sizes` and `items` are what its call needs. `partials`: also
    gets the partial buffers."""

    name: str
    sizes: Dims
    items: Size
    grain: int
    cost: float
    results: Ints
    partials: bool


@frozen
class _Code:
    calls: tuple[_Call, ...]
    partial_bytes: Dims


def fusion(program: Program, x: Instruction) -> None:
    """A fused computation with reductions."""
    _run(program, x, x["calls"])


def reduce(program: Program, x: Instruction) -> None:
    """A reduce that no fusion took in."""
    params = parameters_of(o.shape for o in x.operands)
    root = replace(x, params, x.shape)
    if x.is_tuple:
        parts = tuple(
            instr("get-tuple-element", (root,), s, index=i) for i, s in enumerate(x.elements)
        )
        root = instr("tuple", parts, tuple_shape(*x.elements))
    _run(program, x, Computation("reduce", params, root))


def _run(program: Program, x: Instruction, computation: Computation) -> None:
    count = len(computation.results)
    targets = [program.place(x, n) for n in range(count)] if x.is_tuple else [program.place(x)]
    in_place = any(
        (s.word, s.offset) == (t.word, t.offset)
        for s in map(program.place, x.operands)
        for t in targets
    )
    code = program.made(_build, computation, in_place)
    partials = [program.scratch(n) for n in code.partial_bytes]
    for call in code.calls:
        places = [
            *(program.place(o) for o in x.operands),
            *(targets[n] for n in call.results),
            *(partials if call.partials else ()),
        ]
        arguments = program.arguments(places, call.sizes)
        program.parallel(call.name, arguments, call.items, call.grain, call.cost)


def _build(program: Program, computation: Computation, in_place: bool) -> _Code:
    if any(table.is_degenerate(x) for x in computation.instructions() if x.op == "reduce"):
        return _trivial(program, computation)
    forms = program.emitters["rows"](program.target)
    p = plan(computation, forms.walk)
    if _folds_alone(p, forms.walk):
        return _alone(program, computation, p, in_place)
    if p.style == "strided":
        columns = StridedEmitter(forms, computation, p)
        if not in_place:
            columns.stream(STREAM_BYTES)
        kernel = columns.emit()
        name = kernel.define(program, "columns")
        main = _main(name, kernel, p, computation, columns.items)
        return _Code((main, *_small_results(program, computation, p)), ())
    rows = RowEmitter(forms, computation, p)
    if program.cold and p.passes == 1:
        rows.k.look_ahead()
    if not in_place:
        rows.stream(STREAM_BYTES)
    kernel = rows.emit()
    name = kernel.define(program, "rows" if p.passes > 1 else "reduce")
    main = _main(name, kernel, p, computation, rows.items)
    if p.style == "rows":
        return _Code((main, *_small_results(program, computation, p)), ())
    calls = (main, *_combine(program, computation, p, rows))
    return _Code(calls, tuple(_partial_bytes(p, rows)) * (1 + rows.column_blocks))


def _folds_alone(p: RowPlan, walk: Walk) -> bool:
    """Whether rows are so short that every lane folds one in registers."""
    length = product(p.inner_sizes())
    # rows across memory are walked well one element after the other, too
    most = SHORT_COST if p.style == "rows" else SHORT_COST // 4
    return (
        p.style != "partial"
        and not p.late_outputs
        and isinstance(length, int)
        and length <= walk.alone
        and length * sum(map(table.cost, p.order)) <= most
    )


def _alone(program: Program, computation: Computation, p: RowPlan, in_place: bool) -> _Code:
    """A loop over the rows: what has an element per point is written at all of a row's."""
    rows = p.outer_sizes()

    def at(x: Instruction, inside: tuple[int, ...], row: tuple[Index, ...]) -> tuple[Index, ...]:
        where = dict(zip(p.inner, map(constant, inside))) | dict(zip(p.outer, row, strict=True))
        return regroup([where[d] for d in range(len(p.dims))], p.dims, x.dims)

    points = list(itertools.product(*(range(fixed(n)) for n in p.inner_sizes())))
    order = (*p.row_outputs, *p.full_outputs)
    stores = [
        Store(x, None, [partial(at, x, i) for i in points] if n in p.full_outputs else ())
        for n, x in ((n, computation.results[n]) for n in order)
    ]
    nest = program.emitters["loop nest"]
    k = nest(program, stores, computation.params, in_place, range(len(order)), rows).make()
    return _Code((_Call(k.name, k.sizes, k.items, k.grain, k.cost, order, False),), ())


def _main(
    name: str,
    kernel: RowKernel,
    p: RowPlan,
    computation: Computation,
    items: Size,
) -> _Call:
    """The call of the kernel that walks the rows."""
    every = tuple(range(len(computation.results)))
    cost = _cost(p, computation, items)
    return _Call(name, tuple(kernel.sizes), items, 1, cost, every, p.style == "partial")


def _trivial(program: Program, computation: Computation) -> _Code:
    """Nothing to walk: results are loops in which a reduce is its initial value, or that and one
    element."""
    results = computation.results
    order = computation.instructions()
    if not all(table.is_degenerate(x) for x in order if x.op == "reduce"):
        raise CodegenError(
            f"fusion {computation.name}: reductions of nothing or single elements cannot share a"
            " kernel with others"
        )
    sizes = list(dict.fromkeys(r.size for r in results if r.size != 0))
    return _Code(
        tuple(
            _late_kernel(
                program,
                computation,
                [n for n, r in enumerate(results) if r.size == size],
                None,
            )
            for size in sizes
        ),
        (),
    )


def _cost(p: RowPlan, computation: Computation, items: Size) -> float:
    """Estimated nanoseconds of one item."""
    full = [x for x in (*computation.params, *computation.results) if x.size == p.size]
    heavy = sum(table.classify(y) == table.HEAVY for y in p.order)
    point = max(sum(x.itemsize for x in full) * BYTE_NS, len(p.order) * LIGHT_NS + heavy * HEAVY_NS)
    if isinstance(p.size, int) and isinstance(items, int):
        return point * p.size / max(items, 1)
    return point * 1024


def _partial_bytes(p: RowPlan, emitter: RowEmitter) -> Iterator[Size]:
    """The size of every partial buffer: `count` times the result."""
    for r in p.late_reduces:
        for dtype in emitter.reducers[r].stored_dtypes():
            yield product(emitter.widths(r)[1]) * emitter.count * DTYPES[dtype].itemsize


def _small_results(program: Program, computation: Computation, p: RowPlan) -> list[_Call]:
    """Results that no reduction of the space is part of and that fit no row: loops of their own."""
    return [_late_kernel(program, computation, [n], None) for n in p.late_outputs]


def _combine(
    program: Program, computation: Computation, p: RowPlan, emitter: RowEmitter
) -> list[_Call]:
    """Kernels that fold the chunks' partial results and compute what depends on them, one per
    result size."""
    results = computation.results
    gtes = tuple_users(p.order)
    partials = emitter.partial_count * (1 + emitter.column_blocks)
    calls = []
    for size in dict.fromkeys(results[n].size for n in p.late_outputs):
        numbers = [n for n in p.late_outputs if results[n].size == size]

        def bind(k: RowKernel, numbers: list[int] = numbers) -> None:
            for r in p.late_reduces:
                first = len(numbers) + emitter.partials[r] - len(results)
                k.bind_reduce(r, gtes.get(r, ()), _folded(k, r, emitter, k.outputs[first:]))

        calls.append(_late_kernel(program, computation, numbers, bind, partials, emitter.count))
    return calls


def _late_kernel(
    program: Program,
    computation: Computation,
    numbers: list[int],
    bind: Callable[[RowKernel], None] | None,
    partials: int = 0,
    reads: int = 0,
) -> _Call:
    """A loop that writes the results `numbers` (of one size). `bind` gives the reductions their
    values; `partials` buffers follow the results' pointers, of each of which `reads` elements are
    read per result."""
    results = computation.results
    size = results[numbers[0]].size
    k = RowKernel(
        program.target,
        program.target.lanes(32),
        computation.params,
        len(numbers) + partials,
    )
    if bind:
        bind(k)

    def write(at: Index, _: object = None) -> list[str]:
        # All values first: a result may lie in the memory of an operand.
        values = [k.value(results[n], delinear(at, results[n].dims)) for n in numbers]
        for pointer, n, value in zip(k.outputs, numbers, values):
            k.store(pointer, results[n].dtype, at, value)
        return []

    if size == 1:
        write(ZERO)
        items: Size = 1
    elif k.target.item_per_call:
        k.lanes = 1
        with k.loop("%lo", "%hi", size) as item:
            write(item)
        items = size
    else:
        k.lane_loop(
            "%lo",
            "%hi",
            size,
            write,
            aligned=isinstance(size, int) and size % k.lanes == 0,
            compact=True,
        )
        items = size
    name = k.define(program, "combine")
    return _Call(
        name,
        tuple(k.sizes),
        items,
        k.lanes * 4,
        0.1 * (1 + reads),
        tuple(numbers),
        bool(partials),
    )


def _folded(k: RowKernel, x: Instruction, emitter: RowEmitter, pointers: list[str]) -> ReduceValue:
    """The value of a late reduce at an index: the chunks' partial results in a balanced tree."""
    r = emitter.reducers[x]
    dims = x.shape.arrays[0].dims
    kept, widths = emitter.widths(x)

    def value(index: tuple[Index, ...]) -> list[Value]:
        if kept != widths:
            at = linear(regroup(index, dims, kept), widths)
        else:
            at = linear(index, dims) if index else ZERO
        starts = (at + product(widths) * c for c in range(emitter.count))
        parts = [r.fetched(k, pointers, start) for start in starts]
        return r.grouped(r.finish(k, fold_pairwise(lambda a, b: r.combine(k, a, b), parts)))

    return value
