"""Steps with reductions: the `fusion` step of every kind, a reduce outside of a fusion, and the combination of partial results."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from torch_hlo.compiler.codegen.index import ZERO, Index, delinear, linear
from torch_hlo.compiler.codegen.indexing import emit_fused_scatter
from torch_hlo.compiler.codegen.loop import STREAM_BYTES, emit_fusion_loops
from torch_hlo.compiler.codegen.program import CodegenError
from torch_hlo.compiler.codegen.reducer import Reducer, fold_pairwise
from torch_hlo.compiler.codegen.registry import emits_step
from torch_hlo.compiler.codegen.row import RowEmitter, RowKernel, lanes_for, results_of, tuple_users
from torch_hlo.compiler.codegen.row_plan import RowPlan, plan
from torch_hlo.compiler.codegen.row_strided import StridedEmitter
from torch_hlo.compiler.passes import fusion_table as table
from torch_hlo.compiler.passes.attention import attention_of
from torch_hlo.compiler.passes.fourier import across
from torch_hlo.compiler.passes.linalg import is_lu, is_qr
from torch_hlo.compiler.passes.partial_sort import selection_of
from torch_hlo.compiler.passes.scatter_fusion import is_fused_scatter
from torch_hlo.hlo.dim import Size
from torch_hlo.hlo.ir import Computation, Instruction, instr
from torch_hlo.hlo.shape import DTYPES, tuple_shape

# Nanoseconds per point on one thread: per byte of an operand or result, per cheap opcode and per expensive one.
_BYTE_NS, _LIGHT_NS, _HEAVY_NS = 0.02, 0.015, 0.2


@dataclass(frozen=True, slots=True)
class _Call:
    """A compiled kernel of a fusion: `sizes` and `items` are what its call needs. `partials`: also gets the partial buffers."""

    name: str
    sizes: tuple[Size, ...]
    items: Size
    grain: int
    cost: float
    results: tuple[int, ...]
    partials: bool


@dataclass(frozen=True, slots=True)
class _Code:
    calls: tuple[_Call, ...]
    partial_bytes: tuple[Size, ...]


# What fusions of kind=custom may be: (how they are recognized, module, emitter).
_CUSTOM = (
    (attention_of, "attention", "emit_attention"), (selection_of, "first", "emit_selection"), (across, "fft", "emit_across"), (is_lu, "linalg_blocked", "emit_lu"),
    (is_qr, "linalg_qr", "emit_qr"),
)  # fmt: skip


@emits_step("fusion")
def fusion(program, x: Instruction) -> None:
    """A fused computation. kind=loop without values per row is loop.py's; anything with reductions is a row kernel. Large emitters that many
    programs do without are imported when they are needed."""
    kind = x.get("kind", "loop")
    if (
        kind == "custom"
        and (found := next((entry for entry in _CUSTOM if entry[0](x)), None)) is not None
    ):
        getattr(importlib.import_module(f"torch_hlo.compiler.codegen.{found[1]}"), found[2])(
            program, x
        )
    elif kind == "custom" and is_fused_scatter(x):
        emit_fused_scatter(program, x)
    elif kind == "output":
        if any(y.op == "convolution" for y in x["calls"].instructions()):
            from torch_hlo.compiler.codegen.conv import emit_output
        else:
            from torch_hlo.compiler.codegen.dot import emit_output
        emit_output(program, x, x["calls"])
    elif any(y.op == "reduce" for y in x["calls"].instructions()):
        _run(program, x, x["calls"])
    elif kind in ("loop", "reduce", "row"):
        emit_fusion_loops(program, x)
    else:
        raise CodegenError(
            f"fusion of kind {kind!r} {x.shape}: kinds are loop, reduce, row, output, and custom for what a backend_config names"
        )


@emits_step("reduce")
def reduce(program, x: Instruction) -> None:
    """A reduce that no fusion took in."""
    params = tuple(instr("parameter", (), o.shape, index=i) for i, o in enumerate(x.operands))
    root = instr("reduce", params, x.shape, **dict(x.attrs))
    if x.shape.is_tuple:
        parts = tuple(
            instr("get-tuple-element", (root,), s, index=i) for i, s in enumerate(x.shape.elements)
        )
        root = instr("tuple", parts, tuple_shape(*x.shape.elements))
    _run(program, x, Computation("reduce", params, root))


def _run(program, x: Instruction, computation: Computation) -> None:
    count = len(results_of(computation))
    targets = (
        [program.place(x, n) for n in range(count)] if x.shape.is_tuple else [program.place(x)]
    )
    in_place = any(
        (s.word, s.offset) == (t.word, t.offset)
        for s in map(program.place, x.operands)
        for t in targets
    )
    code = program.once(
        ("rows", computation, in_place), lambda: _build(program, computation, in_place)
    )
    partials = [program.scratch(n) for n in code.partial_bytes]
    for call in code.calls:
        places = [
            *(program.place(o) for o in x.operands),
            *(targets[n] for n in call.results),
            *(partials if call.partials else ()),
        ]
        arguments = [f"ptr {program.at(p)}" for p in places] + [
            f"i64 {program.size(n)}" for n in call.sizes
        ]
        program.parallel(call.name, arguments, program.size(call.items), call.grain, call.cost)


def _build(program, computation: Computation, in_place: bool) -> _Code:
    if any(table.is_degenerate(x) for x in computation.instructions() if x.op == "reduce"):
        return _trivial(program, computation)
    p = plan(
        computation, 1 if program.target.grid else lanes_for(program.target), program.target.grid
    )
    results = results_of(computation)
    every = tuple(range(len(results)))
    if p.style == "strided":
        emitter = StridedEmitter(program.target, computation, p)
        if not in_place:
            emitter.stream(STREAM_BYTES)
        kernel = emitter.emit()
        name = kernel.define(program, "columns")
        rest = _small_results(program, computation, p)
        return _Code(
            (
                _Call(
                    name,
                    tuple(kernel.sizes),
                    emitter.items,
                    1,
                    _cost(p, computation, emitter.items),
                    every,
                    False,
                ),
                *rest,
            ),
            (),
        )
    emitter = RowEmitter(program.target, computation, p)
    if program.cold and p.passes == 1:
        emitter.k.look_ahead()
    if not in_place:
        emitter.stream(STREAM_BYTES)
    kernel = emitter.emit()
    name = kernel.define(program, "rows" if p.passes > 1 else "reduce")
    if p.style == "rows":
        items = emitter.items
        main = _Call(
            name, tuple(kernel.sizes), items, 1, _cost(p, computation, items), every, False
        )
        return _Code((main, *_small_results(program, computation, p)), ())
    items = emitter.chunks.items
    calls = [_Call(name, tuple(kernel.sizes), items, 1, _cost(p, computation, items), every, True)]
    calls += _combine(program, computation, p, emitter)
    sizes = tuple(n for _, _, n in _partial_arrays(p, emitter))
    return _Code(tuple(calls), sizes * 2 if emitter.column_blocks else sizes)


def _trivial(program, computation: Computation) -> _Code:
    """Nothing to walk: results are loops in which a reduce is its initial value, or that and one element."""
    results = results_of(computation)
    order = computation.instructions()
    if not all(table.is_degenerate(x) for x in order if x.op == "reduce"):
        raise CodegenError(
            f"fusion {computation.name}: reductions of nothing or single elements cannot share a kernel with others"
        )
    sizes = list(dict.fromkeys(r.shape.size for r in results if r.shape.size != 0))
    gtes = tuple_users(order)

    def bind(k: RowKernel) -> None:
        for x in order:
            if x.op == "reduce":
                k.bind_reduce(x, gtes.get(x, ()), _single(k, x, Reducer(x)))

    return _Code(
        tuple(
            _late_kernel(
                program,
                computation,
                [n for n, r in enumerate(results) if r.shape.size == size],
                bind,
            )
            for size in sizes
        ),
        (),
    )


def _single(k: RowKernel, x: Instruction, r: Reducer) -> Callable:
    operand = x.operands[0].shape
    kept = [d for d in range(operand.rank) if d not in x["dimensions"]]

    def value(index: tuple[Index, ...]) -> list:
        if operand.size == 0:
            return r.grouped([v for i in r.initials for v in r.initial(k, i)])
        at = [ZERO] * operand.rank
        for d, i in zip(kept, index, strict=True):
            at[d] = i
        return r.grouped(r.finish(k, r.values(k, lambda o: tuple(at))))

    return value


def _cost(p: RowPlan, computation: Computation, items: Size) -> float:
    """Estimated nanoseconds of one item."""
    full = [x for x in (*computation.params, *results_of(computation)) if x.shape.size == p.size]
    heavy = sum(table.classify(y) == table.HEAVY for y in p.order)
    point = max(
        sum(x.shape.itemsize for x in full) * _BYTE_NS, len(p.order) * _LIGHT_NS + heavy * _HEAVY_NS
    )
    if isinstance(p.size, int) and isinstance(items, int):
        return point * p.size / max(items, 1)
    return point * 1024


def _partial_arrays(p: RowPlan, emitter: RowEmitter) -> list[tuple[Instruction, str, Size]]:
    """(reduce, element type, bytes) of every partial buffer: `count` times the result."""
    found = []
    for r in p.late_reduces:
        for dtype in emitter.reducers[r].stored_dtypes():
            found.append(
                (r, dtype, _kept_size(p, r) * emitter.chunks.count * DTYPES[dtype].itemsize)
            )
    return found


def _kept_size(p: RowPlan, r: Instruction) -> Size:
    total: Size = 1
    for d in p.late_kept[r]:
        total = total * p.dims[d]
    return total


def _small_results(program, computation: Computation, p: RowPlan) -> list[_Call]:
    """Results that no reduction of the space is part of and that fit no row: loops of their own."""
    return [_late_kernel(program, computation, [n], None) for n in p.late_outputs]


def _combine(program, computation: Computation, p: RowPlan, emitter: RowEmitter) -> list[_Call]:
    """Kernels that fold the chunks' partial results and compute what depends on them, one per result size."""
    results = results_of(computation)
    gtes = tuple_users(p.order)
    partials = len(_partial_arrays(p, emitter)) * (1 + emitter.column_blocks)
    calls = []
    for size in dict.fromkeys(results[n].shape.size for n in p.late_outputs):
        numbers = [n for n in p.late_outputs if results[n].shape.size == size]

        def bind(k: RowKernel, numbers=numbers) -> None:
            for r in p.late_reduces:
                first = len(numbers) + emitter.partials[r] - len(results)
                k.bind_reduce(
                    r,
                    gtes.get(r, ()),
                    _folded(
                        k,
                        r,
                        emitter.reducers[r],
                        k.outputs[first:],
                        emitter.chunks.count,
                        _kept_size(p, r),
                    ),
                )

        calls.append(
            _late_kernel(program, computation, numbers, bind, partials, emitter.chunks.count)
        )
    return calls


def _late_kernel(
    program,
    computation: Computation,
    numbers: list[int],
    bind: Callable[[RowKernel], None] | None,
    partials: int = 0,
    reads: int = 0,
) -> _Call:
    """A loop that writes the results `numbers` (of one size). `bind` gives the reductions their values; `partials` buffers follow
    the results' pointers, of each of which `reads` elements are read per result."""
    results = results_of(computation)
    size = results[numbers[0]].shape.size
    k = RowKernel(
        program.target, lanes_for(program.target), computation.params, len(numbers) + partials
    )
    if bind:
        bind(k)

    def write(at: Index, _=None) -> list[str]:
        # All values first: a result may lie in the memory of an operand.
        values = [k.value(results[n], delinear(at, results[n].shape.dims)) for n in numbers]
        for pointer, n, value in zip(k.outputs, numbers, values):
            k.store(pointer, results[n].shape.dtype, at, value)
        return []

    if size == 1:
        write(ZERO)
        items: Size = 1
    elif k.grid:
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
        name, tuple(k.sizes), items, k.lanes * 4, 0.1 * (1 + reads), tuple(numbers), bool(partials)
    )


def _folded(
    k: RowKernel, x: Instruction, r: Reducer, pointers: list[str], count: int, kept: Size
) -> Callable:
    """The value of a late reduce at an index: the chunks' partial results in a balanced tree."""
    dims = x.shape.elements[0].dims if x.shape.is_tuple else x.shape.dims

    def value(index: tuple[Index, ...]) -> list:
        at = linear(index, dims) if index else ZERO
        parts = []
        for c in range(count):
            accs: list[str] = []
            for pointer, dtype in zip(pointers, r.stored_dtypes()):
                v = k.load(pointer, dtype, at + kept * c)
                accs += list(v) if isinstance(v, tuple) else [v]
            parts.append(accs)
        return r.grouped(r.finish(k, fold_pairwise(lambda a, b: r.combine(k, a, b), parts)))

    return value
