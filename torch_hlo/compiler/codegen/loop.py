"""Elementwise kernels: one pass over an index space that writes one or more arrays, and the steps made of them.

    run_loop(program, stores=[Store(root)], leaves=[p, q], sources=[place, place], targets=[place])

The index space is the first store's shape. Loops are chosen by plan.py: everything that can be is one flat loop; otherwise rows (split over
threads) times a vector loop along the innermost dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_hlo.compiler.codegen import index as ix
from torch_hlo.compiler.codegen.gpu import tile
from torch_hlo.compiler.codegen.index import Index
from torch_hlo.compiler.codegen.kernel import Kernel
from torch_hlo.compiler.codegen.plan import Loops, Planner, plan_loops, stored_bits, widest_bits
from torch_hlo.compiler.codegen.program import CodegenError, Place
from torch_hlo.compiler.codegen.registry import emits_step
from torch_hlo.compiler.codegen.scalar import STORAGE
from torch_hlo.compiler.codegen.views import POINTWISE, dynamic_starts
from torch_hlo.compiler.passes.fusion_place import behind_reshapes, joined, parts, pieces
from torch_hlo.hlo.dim import Size
from torch_hlo.hlo.ir import Instruction, instr, postorder

STATIC_ELEMENTS = 1024  # below this a flat loop has constant bounds and no parallel form
BLOCK = 8192  # elements of a task where rows are few and long
STREAM_BYTES = 16 << 20  # outputs larger than this are written past the caches
_PANEL = 4  # rows of tiles that are walked together
_TILE_COST = 12  # dearer bodies are not worth repeating for every row of a tile
_INSTRUCTION_NS = 0.16  # one vector instruction of a body that overlaps with its neighbours


@dataclass(frozen=True, slots=True)
class Store:
    """What a loop writes: `value` at each index, to the element `at(index)` of the target array (None: the same element)."""

    value: Instruction
    at: Callable[[tuple[Index, ...]], Index] | None = None


@dataclass(frozen=True, slots=True)
class LoopKernel:
    """A compiled loop: call `name` on `items` items with the leaves, the targets and `sizes`."""

    name: str
    sizes: tuple[Size, ...]
    items: Size
    grain: int
    cost: float


def run_loop(
    program,
    stores: Sequence[Store],
    leaves: Sequence[Instruction],
    sources: Sequence[Place],
    targets: Sequence[Place],
    key=None,
) -> None:
    """Write and call a loop kernel. `sources` are the leaves' places. `key`: identifies stores and leaves, so that equal loops are
    written once; None: never remembered."""
    space = stores[0].value.shape
    if space.size == 0:
        return
    in_place = any((s.word, s.offset) == (t.word, t.offset) for s in sources for t in targets)

    def build() -> LoopKernel:
        return _build(program, stores, leaves, in_place)

    kernel = build() if key is None else program.once((key, in_place), build)
    arguments = [f"ptr {program.at(p)}" for p in (*sources, *targets)] + [
        f"i64 {program.size(n)}" for n in kernel.sizes
    ]
    program.parallel(kernel.name, arguments, program.size(kernel.items), kernel.grain, kernel.cost)


def _element(
    store: Store, index: tuple[Index, ...], dims: tuple[Size, ...]
) -> tuple[tuple[Index, ...], Index]:
    """Index of the value and element number of its target."""
    shape = store.value.shape
    own = index if shape.dims == dims else ix.regroup(index, dims, shape.dims)
    return own, store.at(own) if store.at else ix.linear(own, shape.dims) if own else ix.ZERO


def _build(
    program, stores: Sequence[Store], leaves: Sequence[Instruction], in_place: bool
) -> LoopKernel:
    dims = stores[0].value.shape.dims

    def walk(planner: Planner, index: tuple[Index, ...]) -> None:
        for s in stores:
            own, element = _element(s, index, dims)
            planner.value(s.value, own)
            planner.note(element)

    loops = plan_loops(walk, dims, leaves)
    target = program.target
    dtypes = loops.dtypes | {s.value.shape.dtype for s in stores}
    # Vectors are registers on a CPU; on a grid what a thread moves at a time, whatever it computes in.
    stored = loops.moved | {s.value.shape.dtype for s in stores}
    lanes = target.lanes(stored_bits(stored) if target.grid else widest_bits(dtypes))
    extents = loops.extents
    if (
        not target.grid
        and len(extents) > 1
        and isinstance(extents[-1], int)
        and extents[-1] * 4 <= lanes
    ):
        # The innermost loop is too short for vectors: run over all elements, with gathers.
        extents, index_of = (
            (ix.product(extents),),
            lambda parts: loops.index(ix.delinear(parts[0], loops.extents)),
        )
    else:
        index_of = loops.index
    turns = target.grid and tile.fits(loops, lanes, in_place)
    kernel = (tile.TileKernel if turns else Kernel)(target, lanes, leaves, outputs=len(stores))
    nbytes = sum(
        s.value.shape.size * s.value.shape.itemsize
        for s in stores
        if isinstance(s.value.shape.size, int)
    )
    if (
        not target.grid
        and not in_place
        and nbytes >= STREAM_BYTES
        and all(s.at is None for s in stores)
        and _aligned(extents, stores, target)
    ):
        kernel.nontemporal.update(kernel.outputs)
    if program.cold:
        kernel.look_ahead()

    def body(parts: Sequence[Index]) -> Callable:
        def write(lane: Index, carried) -> None:
            index = index_of((*parts, lane)) if extents else (ix.ZERO,) * len(dims)
            values = []
            for s in stores:
                own, element = _element(s, index, dims)
                values.append((s, element, kernel.value(s.value, own)))
            for out, (s, element, value) in zip(kernel.outputs, values, strict=True):
                kernel.store(out, s.value.shape.dtype, element, value)

        return write

    unroll = 4 if loops.cost <= 2 else 2 if loops.cost <= 40 else 1
    if turns:
        items, grain, elements = kernel.nest(loops, body), 1, lanes
    elif target.grid:
        items, grain, elements = _grid_nest(kernel, extents, body)
    elif _tiles(loops, extents, lanes, in_place):
        items, grain, elements = _tiled_nest(kernel, loops, body)
    else:
        items, grain, elements = _nest(kernel, extents, body, unroll, compact=loops.cost > 40)
    name = kernel.define(program, _name(stores))
    moved = sum(x.shape.itemsize for x in leaves) + sum(s.value.shape.itemsize for s in stores)
    cost = max(kernel.body_lines * _INSTRUCTION_NS / lanes, moved * 0.015) * elements
    return LoopKernel(name, tuple(kernel.sizes), items, grain, cost)


def _nest(
    kernel: Kernel, extents: tuple[Size, ...], body, unroll: int, compact: bool
) -> tuple[Size, int, float]:
    """Write the loops. Returns the number of items, the grain, and elements per item."""
    lanes = kernel.lanes
    if not extents:
        kernel.lanes = 1
        kernel.lane_loop(0, 1, 1, body(()), 1)
        return 1, 1, 1
    *outer, last = extents
    rows = ix.product(outer)
    even = isinstance(last, int) and last % (lanes * unroll) == 0
    if not outer:
        if isinstance(last, int) and last <= STATIC_ELEMENTS:
            kernel.lane_loop(0, last, last, body(()), unroll, compact=compact)
            return 1, 1, last
        kernel.lane_loop("%lo", "%hi", last, body(()), unroll, aligned=even, compact=compact)
        return last, lanes * unroll * 16, 1
    if isinstance(rows, int) and isinstance(last, int) and rows < 32 and last >= 4 * BLOCK:
        blocks = -(-last // BLOCK)
        with kernel.loop("%lo", "%hi", rows * blocks) as task:
            row, block = ix.divide(task, blocks)
            start = kernel.scalar(block * BLOCK)
            op = kernel.level.scalar.op
            end = op(f"call i64 @llvm.umin.i64(i64 {op(f'add i64 {start}, {BLOCK}')}, i64 {last})")
            kernel.lane_loop(
                start,
                end,
                last,
                body(ix.delinear(row, outer)),
                unroll,
                aligned=even,
                compact=compact,
            )
        return rows * blocks, 1, BLOCK
    with kernel.loop("%lo", "%hi", rows) as row:
        high = last if isinstance(last, int) else kernel.size(last)
        kernel.lane_loop(0, high, last, body(ix.delinear(row, outer)), unroll, compact=compact)
    return rows, 1, last if isinstance(last, int) else 1024


def _grid_nest(kernel: Kernel, extents: tuple[Size, ...], body) -> tuple[Size, int, float]:
    """Like _nest, with a thread per vector: the loops are digits of the thread's number, the innermost changing fastest."""
    if not extents or not (isinstance(extents[-1], int) and extents[-1] % kernel.lanes == 0):
        kernel.lanes = 1
    *outer, last = extents or (1,)
    counts = (*outer, last // kernel.lanes)
    with kernel.loop("%lo", "%hi", ix.product(counts)) as item:
        parts = ix.delinear(item, counts)
        kernel.lanes_at(parts[-1] * kernel.lanes, last, lambda lane: body(parts[:-1])(lane, ()))
    return ix.product(counts), 1, kernel.lanes


def _tiles(loops: Loops, extents: tuple[Size, ...], lanes: int, in_place: bool) -> bool:
    """Whether the loop goes through square tiles, transposing what is contiguous along another loop in registers."""
    if (
        loops.across is None
        or extents != loops.extents
        or not 4 <= lanes <= 16
        or loops.cost > _TILE_COST
    ):
        return False
    rows, columns = extents[loops.across], extents[-1]
    if not (
        isinstance(rows, int) and isinstance(columns, int) and rows >= lanes and columns >= lanes
    ):
        return False
    return not in_place or rows % lanes == columns % lanes == 0


def _tiled_nest(kernel: Kernel, loops: Loops, body) -> tuple[Size, int, float]:
    """Like _nest: one item is a panel of a few rows of tiles, walked column by column, so that reads across the rows stay together."""
    lanes, (*outer, columns) = kernel.lanes, loops.extents
    rows = outer[loops.across]
    tiles = -(-rows // lanes)
    panel = min(_PANEL, tiles)
    counts = list(outer)
    counts[loops.across] = -(-tiles // panel)
    items = ix.product(counts)
    across = -(-columns // lanes)
    with kernel.loop("%lo", "%hi", items) as item:
        parts = list(ix.delinear(item, counts))
        first_tile = parts[loops.across] * panel
        count: str | int = panel
        if tiles % panel:
            rest = kernel.scalar(ix.constant(tiles) - first_tile)
            count = kernel.level.scalar.op(f"call i64 @llvm.umin.i64(i64 {rest}, i64 {panel})")
        with kernel.loop(0, across, across) as column, kernel.loop(0, count, panel) as tile:
            first = kernel.tile_start(first_tile + tile, rows)
            lane = kernel.tile_start(column, columns)

            def row(number: int, lane: Index) -> None:
                parts[loops.across] = ix.of(first) + number
                body(parts)(lane, ())

            kernel.tile(first, lane, row)
    return items, 1, lanes * columns * panel


def _aligned(extents: tuple[Size, ...], stores: Sequence[Store], target) -> bool:
    """Whether every row of every target starts at a multiple of the vector size."""
    if len(extents) == 1:
        return True
    return all(
        isinstance(extents[-1], int)
        and extents[-1] * STORAGE[s.value.shape.dtype].bytes % target.vector_bytes == 0
        for s in stores
    )


def _name(stores: Sequence[Store]) -> str:
    return "loop_" + "_".join(dict.fromkeys(s.value.op.replace("-", "_") for s in stores))


# -- steps ---------------------------------------------------------------------------------------------------------------
def emit_instruction(program, x: Instruction, target: Place, at=None, key=()) -> None:
    """One instruction as a loop of its own: operands from memory, except one-element constants, which are part of the code."""
    params: list[Instruction] = []
    operands: list[Instruction] = []
    sources: list[Place] = []
    for o in x.operands:
        if o.op == "constant" and o.shape.size == 1:
            operands.append(o)
            continue
        p = instr("parameter", (), o.shape, index=len(params))
        params.append(p)
        operands.append(p)
        sources.append(program.place(o))
    y = instr(x.op, tuple(operands), x.shape, **dict(x.attrs))
    run_loop(program, [Store(y, at)], params, sources, [target], key=("step", y, key))


@emits_step(
    *POINTWISE,
    "broadcast",
    "iota",
    "transpose",
    "slice",
    "reverse",
    "pad",
    "dynamic-slice",
    "copy",
    "gather",
)
def elementwise(program, x: Instruction) -> None:
    emit_instruction(program, x, program.place(x))


@emits_step("constant")
def constant(program, x: Instruction) -> None:
    """Constants are in memory already, unless an emitter wants one in another place."""
    program.copy(program.place(x), program.constant(x["literal"]))


@emits_step("parameter", "tuple", "get-tuple-element")
def in_memory(program, x: Instruction) -> None:
    """These name memory that exists already."""


@emits_step("reshape", "bitcast")
def reshape(program, x: Instruction) -> None:
    program.copy(program.place(x), program.place(x.operands[0]))


@emits_step("bitcast-convert")
def bitcast_convert(program, x: Instruction) -> None:
    """Row-major little-endian bytes are the same on both sides, also when the number of elements changes."""
    if x.shape.itemsize * x.shape.size != x.operands[0].shape.nbytes:
        raise CodegenError(
            f"bitcast-convert {x.operands[0].shape} -> {x.shape}: types narrower than a byte are stored one per byte; convert them"
        )
    program.copy(program.place(x), program.place(x.operands[0]))


@emits_step("concatenate")
def concatenate(program, x: Instruction) -> None:
    d = x["dimensions"][0]
    start: Size = 0
    for o in x.operands:

        def at(index: tuple[Index, ...], start: Size = start) -> Index:
            return ix.linear((*index[:d], index[d] + start, *index[d + 1 :]), x.shape.dims)

        emit_instruction(
            program, instr("copy", (o,), o.shape), program.place(x), at, key=(x.shape, d, start)
        )
        start = start + o.shape.dims[d]


@emits_step("dynamic-update-slice")
def dynamic_update_slice(program, x: Instruction) -> None:
    source, update, *starts = x.operands
    program.copy(program.place(x), program.place(source))
    params = tuple(
        instr("parameter", (), o.shape, index=i) for i, o in enumerate((update, *starts))
    )
    offsets = dynamic_starts(params[1:], x.shape.dims, update.shape.dims)

    def at(index: tuple[Index, ...]) -> Index:
        return (
            ix.linear([i + o for i, o in zip(index, offsets, strict=True)], x.shape.dims)
            if index
            else ix.ZERO
        )

    y = instr("copy", params[:1], update.shape)
    key = ("dynamic-update-slice", x.shape, params)
    run_loop(
        program,
        [Store(y, at)],
        params,
        [program.place(o) for o in (update, *starts)],
        [program.place(x)],
        key,
    )


def emit_fusion_loops(program, x: Instruction) -> None:
    """A fusion of kind loop: a loop over the `parts` (passes/fusion_place.py) of all results whose parts have equally many elements."""
    computation, operands = x["calls"], x.operands
    root = computation.root
    results = root.operands if root.op == "tuple" else (root,)
    places = (
        [program.place(x, i) for i in range(len(results))]
        if root.op == "tuple"
        else [program.place(x)]
    )
    whole = {
        r.shape.size for r in results if not pieces(r)
    }  # a concatenation beside results of its size is written element by element
    loops: dict[Size, list[int]] = {}
    for n, r in enumerate(results):
        loops.setdefault(
            r.shape.size
            if r.op == "concatenate" and r.shape.size in whole
            else parts(r)[0].shape.size,
            [],
        ).append(n)
    numbers = {p: i for i, p in enumerate(computation.params)}
    for size, chosen in loops.items():
        stores, targets, starts = [], [], []
        for n in chosen:
            r = results[n]
            if r.op == "dynamic-update-slice":
                program.copy(
                    places[n], program.place(operands[numbers[behind_reshapes(r.operands[0])]])
                )
                starts += r.operands[2:]
            written = (
                [Store(r)]
                if r.shape.size == size and r.op != "dynamic-update-slice"
                else _stores(r, lambda i, dims=r.shape.dims: ix.linear(i, dims) if i else ix.ZERO)
            )
            stores += written
            targets += [places[n]] * len(written)
        read = set(postorder((*(s.value for s in stores), *starts)))
        used = [p for p in computation.params if p in read]
        run_loop(
            program,
            stores,
            used,
            [program.place(operands[numbers[p]]) for p in used],
            targets,
            key=("fusion", computation, tuple(chosen)),
        )


def _stores(x: Instruction, at: Callable[[tuple[Index, ...]], Index]) -> list[Store]:
    """What a loop over the `parts` of `x` writes, and where; `at`: the element of the target for an index of `x`."""
    found, inner, start = [], joined(x), 0
    for o in pieces(x):
        if x.op == "dynamic-update-slice":
            starts = dynamic_starts(x.operands[2:], x.shape.dims, o.shape.dims)
        else:
            starts = [start if d == x["dimensions"][0] else 0 for d in range(x.shape.rank)]
            start = start + o.shape.dims[x["dimensions"][0]]

        def place(index: tuple[Index, ...], starts=starts) -> Index:
            return at(tuple(i + s for i, s in zip(index, starts, strict=True)))

        if inner is None:
            found.append(Store(o, place))
        else:
            found += _stores(
                inner,
                lambda index, o=o, place=place: place(
                    ix.regroup(index, inner.shape.dims, o.shape.dims)
                ),
            )
    return found
