"""Elementwise kernels: one pass over an index space that writes one or more arrays, and the steps
made of them.

    run_loop(program, stores=[Store(root)], leaves=[p, q], sources=[place, place], targets=[place])

The index space is the first store's shape. Loops are chosen by compiler/codegen/loop_plan.py:
everything that can be is one flat loop; otherwise rows (split over threads) times a vector loop
along the innermost dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    Computation,
    Dims,
    Instruction,
    Size,
    ceildiv,
    fixed,
    instr,
    parameters_of,
    postorder,
    product,
    replace,
)

from ..codegen import (
    CodegenError,
    Index,
    Kernel,
    Place,
    Planner,
    Program,
    index as ix,
)
from ..codegen.loop_plan import Loops, plan_loops, widest_bits
from ..codegen.views import dynamic_starts
from ..fusion.fusion_place import behind_reshapes, written
from ..llvm.scalar import STORAGE
from ..thresholds import (
    CHAIN_COST,
    INSTRUCTION_NS,
    LOOP_BLOCK,
    RUN_COST,
    RUNS,
    SHORT,
    SHORT_COST,
    SHORT_MOVED,
    STATIC_ELEMENTS,
    STREAM_BYTES,
    TILE_COST,
)

_PANEL = 4  # rows of tiles that are walked together


@frozen
class Store:
    """What a loop writes: `value` at each index, to the element `at(index)` of the target array
    (None: the same element). `points`: of the value, for an index of the loop, where they are not
    one point at that index."""

    value: Instruction
    at: Callable[[tuple[Index, ...]], Index] | None = None
    points: Sequence[Callable[[tuple[Index, ...]], tuple[Index, ...]]] = ()


@frozen
class LoopKernel:
    """A compiled loop: call `name` on `items` items with the leaves, the targets and `sizes`."""

    name: str
    sizes: Dims
    items: Size
    grain: int
    cost: float


def run_loop(
    program: Program,
    stores: Sequence[Store],
    leaves: Sequence[Instruction],
    sources: Sequence[Place],
    targets: Sequence[Place],
    key: Hashable = None,
) -> None:
    """Write and call a loop kernel. `sources` are the leaves' places. `key`: identifies stores and
    leaves, so that equal loops are written once; None: never remembered."""
    space = stores[0].value.shape
    if space.size == 0:
        return
    numbers = {t: n for n, t in enumerate(dict.fromkeys(targets))}
    outputs = tuple(numbers[t] for t in targets)
    in_place = any((s.word, s.offset) == (t.word, t.offset) for s in sources for t in targets)

    def build() -> LoopKernel:
        nest: LoopNest = program.emitters["loop nest"](program, stores, leaves, in_place, outputs)
        return nest.make()

    kernel = build() if key is None else program.once((key, in_place, outputs), build)
    arguments = program.arguments((*sources, *numbers), kernel.sizes)
    program.parallel(kernel.name, arguments, kernel.items, kernel.grain, kernel.cost)


def _elements(
    store: Store, index: tuple[Index, ...], dims: Dims
) -> Iterator[tuple[tuple[Index, ...], Index]]:
    """Indices of the value and element numbers of its target."""
    shape = store.value.shape

    def same(index: tuple[Index, ...]) -> tuple[Index, ...]:
        return index if shape.dims == dims else ix.regroup(index, dims, shape.dims)

    for point in store.points or (same,):
        own = point(index)
        yield own, store.at(own) if store.at else ix.linear(own, shape.dims) if own else ix.ZERO


# what writes a vector at an index of the innermost loop
Write = Callable[[Index, Sequence[str]], None]


class LoopNest:
    """Writes a loop kernel: rows split over threads times vectors along the innermost dimension."""

    kernel: Kernel

    def __init__(
        self,
        program: Program,
        stores: Sequence[Store],
        leaves: Sequence[Instruction],
        in_place: bool,
        outputs: Sequence[int],
        dims: Dims | None = None,
    ) -> None:
        self.program = program
        self.target = program.target
        self.stores = stores
        self.leaves = leaves
        self.in_place = in_place
        self.outputs = outputs  # number of each store's array
        self.dims = stores[0].value.dims if dims is None else dims
        most = 1 if self.target.item_per_call else SHORT_COST
        self.loops = plan_loops(self._walk, self.dims, leaves, most=most)
        if self.loops.across is not None:  # tiles are not cut
            self.loops = plan_loops(self._walk, self.dims, leaves)
        self.extents: Dims = self.loops.extents
        self.cuts = self.loops.cuts
        self.runs = False  # whether a row is one vector: a few elements, adjacent in every array
        self.short: Dims = ()  # innermost loops that are written out around every vector

    def _walk(self, planner: Planner, index: tuple[Index, ...]) -> None:
        for s in self.stores:
            for own, element in _elements(s, index, self.dims):
                planner.value(s.value, own)
                planner.note(element)

    def make(self) -> LoopKernel:
        items, grain, elements = self.write()
        kernel = self.kernel
        name = kernel.define(self.program, _name(self.stores))
        moved = sum(x.itemsize for x in self.leaves)
        moved += sum(s.value.itemsize * max(1, len(s.points)) for s in self.stores)
        lines = kernel.body_lines / fixed(product(self.short))
        cost = max(lines * INSTRUCTION_NS / self.lanes, moved * 0.015) * elements
        return LoopKernel(name, tuple(kernel.sizes), items, grain, cost)

    def write(self) -> tuple[Size, int, float]:
        """Write the loops. Returns the number of items, the grain, and elements per item."""
        dtypes = self.loops.dtypes | {s.value.dtype for s in self.stores}
        self.lanes = lanes = self.target.lanes(widest_bits(dtypes))
        self._without_short(lanes)
        lanes = self.lanes
        loops = self.loops
        # Each operation waits for the one before it, and a core holds less than a whole expression:
        # two vectors in turns, where a loop has them.
        size = self.stores[0].value.size
        heavy = loops.cost > CHAIN_COST
        if (
            heavy
            and not (self.runs or self.target.masks_stores)
            and size not in range(STATIC_ELEMENTS)
        ):
            lanes *= 2
        self.kernel = kernel = Kernel(self.target, lanes, self.leaves, 1 + max(self.outputs))
        if self._streams():
            kernel.nontemporal.update(kernel.outputs)
        if self.program.cold:
            kernel.look_ahead()
        if _tiles(loops, self.extents, lanes, self.in_place):
            return _tiled_nest(kernel, loops, self.body)
        # what lies in turns is loaded and stored in whole vectors only
        turns = loops.turns[0] or bool(self.short) or any(s.points for s in self.stores)
        unroll = 1 if heavy or turns else 4 if loops.cost <= 2 else 2
        items, grain, elements = _nest(
            kernel,
            self.extents,
            self.cuts,
            self.body,
            unroll,
            heavy and not turns,
            self._together(),
        )
        return items, grain, elements * fixed(product(self.short))

    def _without_short(self, lanes: int) -> None:
        """Innermost loops that are too short for vectors: a dimension that was split is turned as a
        whole, in tiles. Others are written out, and vectors run along the loop around them. Where
        that is short, too, or rows are apart, vectors are as long as rows of adjacent elements,
        and others run over all elements, with gathers."""
        loops = self.loops
        extents = list(loops.extents)
        if loops.across is not None and isinstance(extents[-1], int) and extents[-1] < lanes:
            whole = plan_loops(self._walk, self.dims, self.leaves, lanes)
            if _tiles(whole, whole.extents, lanes, self.in_place):
                self.loops = whole
                self.extents = whole.extents
                return
        count = 1
        while len(extents) > 1:
            last = extents[-1]
            most = SHORT_MOVED if loops.across == len(extents) - 2 else SHORT
            if not isinstance(last, int) or last > most or count * last > SHORT_MOVED:
                break
            count *= last
            extents.pop()
        around = extents[-1] if extents else 1
        few = isinstance(around, int) and around < lanes or count * loops.cost > SHORT_COST
        last = loops.extents[-1] if len(loops.extents) > 1 else 1
        run = last if isinstance(last, int) and not loops.turns[0] else 1
        is_run = 1 < run <= lanes
        moves = is_run and loops.cost <= RUN_COST and loops.apart[len(extents) - 1]
        if count > 1 and not few and not moves:
            self.extents = tuple(extents)
            self.cuts = self.cuts[: len(extents)]
            self.short = loops.extents[len(extents) :]
        elif is_run:
            self.runs = True
            self.lanes = 1 << (run - 1).bit_length()
        elif count > 1 and fixed(loops.extents[-1]) * 4 <= lanes:
            self.extents = (product(loops.extents),)
            self.cuts = ((0, *self.extents),)

    def _together(self) -> int:
        """How many rows an item writes: those that share what they load, and rows of one vector,
        each of which costs less than to find out where it is."""
        loops = self.loops
        is_cut = any(len(at) > 2 for at in self.cuts[:-1])
        if is_cut or self.extents is not loops.extents or not (self.runs or loops.turns[1]):
            return 1
        outer = self.extents[:-1]
        most = RUNS
        if not self.runs:
            outer = outer[-1:] if isinstance(outer[-1], int) and outer[-1] >= 64 else ()
            most = 4
        most = min(most, SHORT_COST // max(1, loops.cost))
        together = 1
        for n in reversed(outer):
            if not isinstance(n, int):
                break
            fit = max((d for d in range(1, most // together + 1) if n % d == 0), default=1)
            together *= fit
            if fit < n:
                break
        return together

    def _streams(self) -> bool:
        """Whether the results are large, and written past the caches."""
        shapes = [s.value.shape for s in self.stores]
        nbytes = sum(s.size * s.itemsize for s in shapes if isinstance(s.size, int))
        return (
            not self.in_place
            and nbytes >= STREAM_BYTES
            and all(s.at is None and not s.points for s in self.stores)
            and not self.short
            and self._aligned()
        )

    def _aligned(self) -> bool:
        """Whether every piece of a row of every target starts at a multiple of what is stored at
        once."""
        whole = self.target.vector_bytes * self.kernel.lanes // self.lanes
        ends = self.cuts[-1][1 : -1 if len(self.extents) == 1 else None]
        return all(
            isinstance(at, int) and at * STORAGE[s.value.dtype].bytes % whole == 0
            for s in self.stores
            for at in ends
        )

    def body(self, parts: Sequence[Index]) -> Write:
        """What writes a vector of every result; `parts`: indices of the loops but the innermost."""

        def write(lane: Index, carried: Sequence[str]) -> None:
            k = self.kernel
            values = []
            for inside in itertools.product(*(range(fixed(n)) for n in self.short)):
                index = self._index((*parts, lane, *map(ix.constant, inside)))
                for n, s in zip(self.outputs, self.stores, strict=True):
                    for own, at in _elements(s, index, self.dims):
                        values.append((k.outputs[n], s.value.dtype, at, k.value(s.value, own)))
            for stored in values:
                k.store(*stored)

        return write

    def _index(self, parts: tuple[Index, ...]) -> tuple[Index, ...]:
        if not self.extents:
            return (ix.ZERO,) * len(self.dims)
        if len(parts) < len(self.loops.extents):
            parts = ix.delinear(parts[0], self.loops.extents)
        return self.loops.index(parts)


Body = Callable[[Sequence[Index]], Write]


def _nest(
    kernel: Kernel,
    extents: Dims,
    cuts: Sequence[Dims],
    body: Body,
    unroll: int,
    compact: bool,
    together: int = 1,
) -> tuple[Size, int, float]:
    """Write the loops, several rows `together`, one for every piece between `cuts`. Returns the
    number of items, the grain, and elements per item."""
    lanes = kernel.lanes
    if not extents:
        kernel.lanes = 1
        kernel.lane_loop(0, 1, 1, body(()), 1)
        return 1, 1, 1
    *outer, last = extents
    *around, pieces = cuts
    rows = product(outer)
    whole = len(pieces) == 2
    even = whole and isinstance(last, int) and last % (lanes * unroll) == 0

    def vectors(low: int | str, high: int | str, *rows: Sequence[Index]) -> None:
        for inside in _boxes(kernel, rows, around):
            writes = list(map(body, inside))
            for a, b in itertools.pairwise(pieces):
                ends = (low, high) if whole else _clipped(kernel, low, high, a, b)

                def write(lane: Index, carried: Sequence[str]) -> None:
                    for each in writes:
                        each(lane + a, carried)

                kernel.lane_loop(*ends, b - a, write, unroll, aligned=even, compact=compact)

    if not outer:
        if isinstance(last, int) and last <= STATIC_ELEMENTS:
            vectors(0, last, ())
            return 1, 1, last
        vectors("%lo", "%hi", ())
        return last, lanes * unroll * 16, 1
    if isinstance(rows, int) and isinstance(last, int) and rows < 32 and last >= 4 * LOOP_BLOCK:
        blocks = ceildiv(last, LOOP_BLOCK)
        with kernel.loop("%lo", "%hi", rows * blocks) as task:
            row, block = ix.divide(task, blocks)
            ends = kernel.block(block * LOOP_BLOCK, LOOP_BLOCK, str(last))
            vectors(*ends, ix.delinear(row, outer))
        return rows * blocks, 1, LOOP_BLOCK
    items = ix.exact(rows, together)
    assert items is not None
    with kernel.loop("%lo", "%hi", items) as item:
        high = last if isinstance(last, int) else kernel.size(last)
        vectors(0, high, *(ix.delinear(item * together + n, outer) for n in range(together)))
    return items, 1, (last if isinstance(last, int) else 1024) * together


def _boxes(
    kernel: Kernel, rows: Sequence[Sequence[Index]], cuts: Sequence[Dims]
) -> Iterator[Sequence[Sequence[Index]]]:
    """The rows; where loops around them are cut, one row in each of the boxes between, inside of a
    loop that runs once where the row lies in the box."""
    cut = [n for n, at in enumerate(cuts) if len(at) > 2]
    if not cut:
        yield rows
        return
    (row,) = rows
    for box in itertools.product(*(itertools.pairwise(cuts[n]) for n in cut)):
        test = kernel.condition([(row[n], *ends) for n, ends in zip(cut, box, strict=True)])
        taken = kernel.level.scalar.op(f"zext i1 {test} to i64")
        with kernel.loop(0, taken, 1, nonempty=False) as turn:
            inside = list(row)
            for n, (a, b) in zip(cut, box, strict=True):
                name = kernel.scalar(row[n] - a)
                inside[n] = ix.of(kernel.named(name, b - a, turn.depth)) + a
            yield [inside]


def _clipped(
    kernel: Kernel, low: int | str, high: int | str, a: Size, b: Size
) -> tuple[int | str, int | str]:
    """What of [low, high) lies between `a` and `b`, counted from `a`."""
    width = b - a
    first, size = kernel.size(a), kernel.size(width)
    if low == 0:  # a whole row
        return 0, width if isinstance(width, int) else size
    op = kernel.level.scalar.op
    kernel.ragged = True
    start, end = (
        op(f"call i64 @llvm.smax.i64(i64 {op(f'sub i64 {n}, {first}')}, i64 0)")
        for n in (low, high)
    )
    end = op(f"call i64 @llvm.smin.i64(i64 {end}, i64 {size})")
    return start, end


def _tiles(loops: Loops, extents: Dims, lanes: int, in_place: bool) -> bool:
    """Whether the loop goes through square tiles, transposing what is contiguous along another loop
    in registers."""
    if loops.across is None or extents != loops.extents or not 4 <= lanes <= 16:
        return False
    rows = extents[loops.across]
    columns = extents[-1]
    if not (
        isinstance(rows, int) and isinstance(columns, int) and rows >= lanes and columns >= lanes
    ):
        return False
    return not in_place or rows % lanes == columns % lanes == 0


def _tiled_nest(kernel: Kernel, loops: Loops, body: Body) -> tuple[Size, int, float]:
    """Like _nest: one item is a panel of a few rows of tiles, walked column by column, so that
    reads across the rows stay together."""
    lanes = kernel.lanes
    across = loops.across
    (*outer, last) = loops.extents
    assert across is not None
    rows = fixed(outer[across])
    columns = fixed(last)
    tiles = ceildiv(rows, lanes)
    panel = min(_PANEL, tiles)
    counts = list(outer)
    counts[across] = ceildiv(tiles, panel)
    items = product(counts)
    steps = ceildiv(columns, lanes)
    with kernel.loop("%lo", "%hi", items) as item:
        parts = list(ix.delinear(item, counts))
        first_tile = parts[across] * panel
        count: str | int = panel
        if tiles % panel:
            rest = kernel.scalar(ix.constant(tiles) - first_tile)
            count = kernel.level.scalar.op(f"call i64 @llvm.umin.i64(i64 {rest}, i64 {panel})")
        with (
            kernel.loop(0, steps, steps) as column,
            kernel.loop(0, count, panel) as tile,
        ):
            first = kernel.tile_start(first_tile + tile, rows)
            lane = kernel.tile_start(column, columns)

            def row(number: Index, lane: Index) -> None:
                parts[across] = ix.of(first) + number
                body(parts)(lane, ())

            kernel.tile(first, lane, row, loops.cost > TILE_COST)
    return items, 1, lanes * columns * panel


def _name(stores: Sequence[Store]) -> str:
    return "loop_" + "_".join(dict.fromkeys(s.value.op.replace("-", "_") for s in stores))


# -- steps
def emit_instruction(
    program: Program,
    x: Instruction,
    target: Place,
    at: Callable[[tuple[Index, ...]], Index] | None = None,
    key: Hashable = (),
) -> None:
    """One instruction as a loop of its own: operands from memory, except one-element constants,
    which are part of the code."""
    params: list[Instruction] = []
    operands: list[Instruction] = []
    sources: list[Place] = []
    for o in x.operands:
        if o.op == "constant" and o.size == 1:
            operands.append(o)
            continue
        p = instr("parameter", (), o.shape, index=len(params))
        params.append(p)
        operands.append(p)
        sources.append(program.place(o))
    y = replace(x, operands, x.shape)
    run_loop(program, [Store(y, at)], params, sources, [target], key=("step", y, key))


def elementwise(program: Program, x: Instruction) -> None:
    emit_instruction(program, x, program.place(x))


def constant(program: Program, x: Instruction) -> None:
    """Constants are in memory already, unless an emitter wants one in another place."""
    program.copy(program.place(x), program.constant(x["literal"]))


def in_memory(program: Program, x: Instruction) -> None:
    """These name memory that exists already."""


def reshape(program: Program, x: Instruction) -> None:
    program.copy(program.place(x), program.place(x.operand))


def bitcast_convert(program: Program, x: Instruction) -> None:
    """Row-major little-endian bytes are the same on both sides, also when the number of elements
    changes."""
    if x.itemsize * x.size != x.operand.nbytes:
        raise CodegenError(
            f"bitcast-convert {x.operand.shape} -> {x.shape}: types narrower than a byte are"
            " stored one per byte; convert them"
        )
    program.copy(program.place(x), program.place(x.operand))


def concatenate(program: Program, x: Instruction) -> None:
    d = x["dimensions"][0]
    start: Size = 0
    for o in x.operands:

        def at(index: tuple[Index, ...], start: Size = start) -> Index:
            return ix.linear((*index[:d], index[d] + start, *index[d + 1 :]), x.dims)

        emit_instruction(
            program,
            instr("copy", (o,), o.shape),
            program.place(x),
            at,
            key=(x.shape, d, start),
        )
        start += o.dims[d]


def dynamic_update_slice(program: Program, x: Instruction) -> None:
    params = parameters_of(o.shape for o in x.operands)
    _emit(program, x, Computation(x.op, params, replace(x, params, x.shape)))


def emit_fusion_loops(program: Program, x: Instruction) -> None:
    """A fusion of kind loop: a loop over all results that have equally many elements to write."""
    _emit(program, x, x["calls"])


def _emit(program: Program, x: Instruction, computation: Computation) -> None:
    operands = x.operands
    results = computation.results
    places = (
        [program.place(x, i) for i in range(len(results))] if x.is_tuple else [program.place(x)]
    )
    loops: dict[Size, list[int]] = {}
    for n, r in enumerate(results):
        loops.setdefault(written(r).size, []).append(n)
    numbers = {p: i for i, p in enumerate(computation.params)}
    for chosen in loops.values():
        stores = []
        starts: list[Instruction] = []
        for n in chosen:
            r = results[n]
            if r.op == "dynamic-update-slice":
                source = behind_reshapes(r.operand)
                program.copy(places[n], program.place(operands[numbers[source]]))
                starts += r.operands[2:]
                stores.append(_update(r))
            else:
                stores.append(Store(r))
        read = set(postorder((*(s.value for s in stores), *starts)))
        used = [p for p in computation.params if p in read]
        run_loop(
            program,
            stores,
            used,
            [program.place(operands[numbers[p]]) for p in used],
            [places[n] for n in chosen],
            key=("fusion", computation, tuple(chosen)),
        )


def _update(x: Instruction) -> Store:
    value = x.operands[1]
    starts = dynamic_starts(x.operands[2:], x.dims, value.dims)

    def at(index: tuple[Index, ...]) -> Index:
        return ix.linear([i + s for i, s in zip(index, starts, strict=True)], x.dims)

    return Store(value, at)
