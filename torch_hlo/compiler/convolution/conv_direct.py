"""Convolution of channels-last arrays: a matrix product whose left operand is the input, read in
place.

Output pixels are rows and output features columns. A tile of C stays in registers over the whole
sum: for every tap of the window each row has a pointer to a run of channels (to zeros where the tap
lies in the padding), and the kernel is packed as [panel][tap][channel][columns]:

    for each group of panels (fits L2)       for each tile of rows: find the pointers
        for each panel of the group                 for each tap, for each channel: rows x vectors
            multiply-adds

This is the indirect convolution of Dukhan (The Indirect Convolution Algorithm, 2019) with the
pointers made on the way. Nothing is copied, padded or added up in memory. Measured on one Granite
Rapids core: see benchmarks/notes/measurements.md.
"""

from __future__ import annotations

from dataclasses import replace

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    Instruction,
    Ints,
    Size,
    ceildiv,
    dim_max,
    product,
    round_up,
    row_major_strides,
)

from ..codegen import Program
from ..conv_forms import is_channels_last
from ..llvm import BITS, Function, Int, item_parameters, signature
from ..matmul.blocking import Partition, tile_heights
from ..matmul.dot_task import Finish
from ..matmul.epilogue import Epilogue
from ..matmul.micro_kernel import store_tile
from ..matmul.product import hint
from ..matmul.tile import (
    Tile,
)
from ..thresholds import (
    CONV_B_BYTES,
    CONV_FINISHED,
    ITEMS_PER_CORE,
    TABLE_BYTES,
)
from .conv_pack import PACK_PARAMETERS, packing

POINTERS = 16  # entries of a row of the table of pointers
MOST_COLUMNS = 1 << 20
# vectors of the packed kernel that a step of the inner loop reads: rows have more pointers than
# there are registers for
UNROLLED = 4
CHAIN = 576  # products that are added one after the other, about
NUMBERS = (
    "features",
    "k",
    "runs",
    "run",
    "ldc",
    "tiles_each",
    "blocks_m",
    "columns_each",
    "blocks_n",
    "x_group",
    "b_group",
    "c_group",
    "groups",
    "groups_each",
)


def register_tile(kind: str, vector_bytes: int) -> Tile:
    """The register block: 14 x 2 vectors with 32 registers, 6 x 2 with 16."""
    return Tile(kind, 8 * vector_bytes // BITS[kind], 14 if vector_bytes >= 64 else 6, 2)


def micro(name: str, t: Tile, rows: int, vectors: int, partial: bool) -> Function:
    """C[rows, vectors * lanes] (+)= sum over taps and channels of P[tap][row][at + channel] *
    B[tap][channel]; `cols` columns are valid, and with `partial` only `valid_rows` rows."""
    params = [
        ("ptr noalias", "P"),
        ("ptr noalias", "B"),
        *signature("i64 taps, i64 depth, i64 at"),
    ]
    params += [("ptr noalias", "C"), *signature("i64 ldc, i64 cols, i1 more")]
    f = Function(name, params + [("i64", "valid_rows")] * partial, attrs="noinline #0")
    width = vectors * t.lanes
    carry = [(t.vector, "zeroinitializer")] * (rows * vectors)
    with f.loop(0, "%taps", carry=carry, known_nonempty=True) as taps:
        row_of_table = f.gep("ptr", "%P", f.mul(taps.index, POINTERS))
        pointers = [f.load_at("ptr", row_of_table, i) for i in range(rows)]
        b_tap = t.gep(f, "%B", f.mul(f.sub(f.mul(taps.index, "%depth"), "%at"), width))
        end = f.add("%at", "%depth")
        each = UNROLLED // vectors
        whole = f.sub(end, f.rem("%depth", each))

        def steps(count: int, index: Int, sums: list[str]) -> list[str]:
            return _channels(f, t, vectors, pointers, b_tap, count, index, sums)

        with f.loop("%at", whole, each, carry=[(t.vector, v) for v in taps.vars]) as long:
            long.next = steps(each, long.index, list(long.vars))
        with f.loop(whole, end, carry=[(t.vector, v) for v in long.vars]) as run:
            run.next = steps(1, run.index, list(run.vars))
        taps.next = run.vars
    store_tile(f, replace(t, vectors=vectors), rows, taps.vars, partial=partial)
    return f


def _channels(
    f: Function,
    t: Tile,
    vectors: int,
    pointers: list[str],
    b_tap: str,
    count: int,
    index: Int,
    sums: list[str],
) -> list[str]:
    """The sums of a tile after `count` channels of a tap from `index` on."""
    width = vectors * t.lanes
    b: list[list[str]] = []
    for u in range(count):
        row = []
        for j in range(vectors):
            at = f.muladd(f.add(index, u), width, j * t.lanes)
            row.append(t.load(f, t.gep(f, b_tap, at)))
        b.append(row)
    for i, pointer in enumerate(pointers):
        p = t.gep(f, pointer, index)
        for u in range(count):
            element = f.load_at(t.kind, p, u)
            a = f.splat(t.kind, t.lanes, element)
            for j in range(vectors):
                at = i * vectors + j
                sums[at] = t.fma(f, a, b[u][j], sums[at])
    return sums


def micro_grouped(
    name: str,
    t: Tile,
    rows: int,
    size: int,
    partial: bool,
    whole: bool,
) -> Function:
    """C[rows, lanes] for groups of `size` channels that have as many output features: lane l sums
    P[tap][row][at + l - l % size + i] * B[tap][i][l] over taps and i. `cols` lanes are valid, all
    with `whole`."""
    params = [
        ("ptr noalias", "P"),
        ("ptr noalias", "B"),
        *signature("i64 taps, i64 at"),
        ("ptr noalias", "C"),
        *signature("i64 ldc, i64 cols"),
    ]
    f = Function(name, params + [("i64", "valid_rows")] * partial, attrs="noinline #0")
    n = t.lanes
    mask = f.lane_mask(n, 0, "%cols")
    with f.loop(
        0, "%taps", carry=[(t.vector, "zeroinitializer")] * rows, known_nonempty=True
    ) as taps:
        row_of_table = f.gep("ptr", "%P", f.mul(taps.index, POINTERS))
        b_tap = t.gep(f, "%B", f.mul(taps.index, n * size))
        b = [t.load(f, t.gep(f, b_tap, i * n)) for i in range(size)]
        taps.next = []
        for r in range(rows):
            p = t.gep(f, f.load_at("ptr", row_of_table, r), "%at")
            x = t.load(f, p, "" if whole else mask)
            total = taps.vars[r]
            for i in range(size):
                lanes = ", ".join(f"i32 {lane - lane % size + i}" for lane in range(n))
                a = (
                    f.op(f"shufflevector {t.vector} {x}, {t.vector} poison, <{n} x i32> <{lanes}>")
                    if size > 1
                    else x
                )
                total = t.fma(f, a, b[i], total)
            taps.next.append(total)
    for i in range(rows):
        p = t.gep(f, "%C", f.mul("%ldc", i))
        at_row = mask
        if partial:
            at_row = f.op(
                f"select i1 {f.icmp('slt', i, '%valid_rows')}, <{n} x i1> {mask}, <{n} x i1>"
                " zeroinitializer"
            )
        t.store(f, taps.vars[i], p, at_row)
    return f


# per spatial dimension: output and input extent, window, element step
GEOMETRY = ("out", "size", "stride", "low", "taps", "dilation", "step")


def geometry(spatial: int) -> list[tuple[str, str]]:
    """Parameters that describe the pixels and the window."""
    return [
        *signature("i64 pixels, i64 image_step"),
        *(("i64", f"{what}{i}") for i in range(spatial) for what in GEOMETRY),
    ]


def _spread(f: Function, value: Int) -> str:
    return f.splat("i64", POINTERS, value)


def _moved(f: Function) -> str:
    """How many pixels each one of a tile is after the first; beyond the last pixel it is that."""
    numbers = "<" + ", ".join(f"i64 {i}" for i in range(POINTERS)) + ">"
    last = _spread(f, f.sub(f.sub("%pixels", 1), "%pixel"))
    return f.typed("i64", POINTERS).call("smin", numbers, last)


def _pointers_of_runs(f: Function, kind: str) -> None:
    """The pointers where pixel i is the run at i * image_step."""
    v = f.typed("i64", POINTERS)
    at = v.mul(v.add(_moved(f), _spread(f, "%pixel")), _spread(f, "%image_step"))
    f.store(f"<{POINTERS} x ptr>", f.op(f"getelementptr {kind}, ptr %x, {v.type} {at}"), "%P")


def _positions(f: Function, spatial: int) -> list[str]:
    """Vectors over the pixels of a tile: the element offset of the window, and the window's first
    position in every dimension."""
    v = f.typed("i64", POINTERS)
    rest: Int = "%pixel"
    moved = _moved(f)
    most: Int = POINTERS - 1
    offset = v.const(0)
    firsts: list[str] = []
    for i in reversed(range(spatial)):
        out = f"%out{i}"
        rest, start = f.divmod(rest, out)
        # those that are beyond a row's end are in the next one, perhaps several times
        ends = f.div(f.add(start, most), out)
        carry = [(v.type, v.add(moved, _spread(f, start))), (v.type, v.const(0))]
        with f.loop(0, ends, carry=carry) as end:
            at, rows = end.vars
            beyond = v.cmp("sge", at, _spread(f, out))
            end.next = [
                v.select(beyond, v.sub(at, _spread(f, out)), at),
                v.select(beyond, v.add(rows, 1), rows),
            ]
        at, moved = end.vars
        most = ends
        first = v.sub(v.mul(at, _spread(f, f"%stride{i}")), _spread(f, f"%low{i}"))
        offset = v.fma(first, _spread(f, f"%step{i}"), offset)
        firsts.insert(0, first)
    image = v.add(moved, _spread(f, rest))
    return [v.fma(image, _spread(f, "%image_step"), offset), *firsts]


def tile_pointers(name: str, kind: str, spatial: int) -> Function:
    """P[tap][i] = address of what the window's `tap` meets at output pixel `pixel + i` (of the last
    pixel beyond it): in x or, outside of it, `zeros`. Without spatial dimensions pixel i is the run
    at i * image_step."""
    params = [
        *signature("ptr x, ptr zeros, i64 pixel, ptr P"),
        *geometry(spatial),
    ]
    f = Function(name, params, attrs="noinline #0")
    n = POINTERS
    vector = f"<{POINTERS} x i64>"
    if not spatial:
        _pointers_of_runs(f, kind)
        return f
    offsets, *firsts = _positions(f, spatial)
    nowhere = f.splat("ptr", n, "%zeros")

    def nest(i: int, offset: Int, inside: str | None, number: Int) -> None:
        if i == spatial:
            shifted = f.op(f"add {vector} {offsets}, {f.splat('i64', n, offset)}")
            addresses = f.op(f"getelementptr {kind}, ptr %x, {vector} {shifted}")
            found = f.op(
                f"select <{n} x i1> {inside}, <{n} x ptr> {addresses}, <{n} x ptr> {nowhere}"
            )
            f.store(f"<{n} x ptr>", found, f.gep("ptr", "%P", f.mul(number, n)))
            return
        with f.loop(0, f"%taps{i}") as tap:
            shift = f.mul(tap, f"%dilation{i}")
            position = f.op(f"add {vector} {firsts[i]}, {f.splat('i64', n, shift)}")
            valid = f.op(f"icmp ult {vector} {position}, {f.splat('i64', n, f'%size{i}')}")
            both = valid if inside is None else f.op(f"and <{n} x i1> {inside}, {valid}")
            nest(
                i + 1,
                f.muladd(shift, f"%step{i}", offset),
                both,
                f.muladd(number, f"%taps{i}", tap),
            )

    nest(0, 0, None, 0)
    return f


def pointer_table(f: Function, program: Program, count: Int, many: bool) -> str:
    """Memory for `count` pointers while the function runs: of the stack or, if there are `many`, of
    the heap. Stacks of threads may be as small as 2 MB."""
    nbytes = f.mul(count, 8)
    if not many:
        return f.op(f"alloca i8, i64 {nbytes}, align 64")
    malloc = program.symbol("malloc", "declare ptr @malloc(i64)")
    free = program.symbol("free", "declare void @free(ptr)")
    table = f.op(f"call ptr @{malloc}(i64 {nbytes})")
    f.endings.append(f"  call void @{free}(ptr {table})")
    return table


@frozen
class Form:
    """What a task is written for.

    `odd`: the last panel is one vector wide. `size`: channels of the groups of `micro_grouped`, or
    0. `pack`: a function of `pack_kernel` with which an item packs its panels for itself, B is then
    the kernel, or "". `many`: of the taps. With an epilogue C is not used: it takes the sums of a
    row tile from the stack."""

    tile: Tile
    heights: Ints
    static: bool
    spatial: int
    odd: bool
    size: int
    pack: str
    many: bool
    epilogue: Epilogue | None

    @property
    def name(self) -> str:
        flags = f"{'o' * self.odd}{'k' * bool(self.pack)}{'m' * self.many}"
        return f"conv_{self.spatial}_{'_'.join(map(str, self.heights))}_{self.size}{flags}"

    def kernel(
        self,
        program: Program,
        rows: int,
        vectors: int,
        partial: bool,
        whole: bool,
    ) -> str:
        t = self.tile
        p = "p" * partial
        if self.size:
            name = f"conv_grouped_{t.suffix}_{rows}x{self.size}{p}{'w' * whole}"
            made = micro_grouped(name, t, rows, self.size, partial, whole)
        else:
            name = f"conv_micro_{t.suffix}_{rows}x{vectors}{p}"
            made = micro(name, t, rows, vectors, partial)
        return program.define(made)


def task(program: Program, form: Form) -> str:
    """Items (groups, block of panels, block of row tiles): void(lo, hi, X, B, C, zeros, NUMBERS…,
    geometry…, the epilogue's). Returns the name, its functions defined in `program`."""
    t = form.tile
    heights = form.heights
    epilogue = form.epilogue
    params = item_parameters(("X", "B", "C", "zeros"), NUMBERS)
    params += geometry(form.spatial)
    params += [(kind, f"pack_{q}") for kind, q in PACK_PARAMETERS] if form.pack else []
    params += epilogue.parameters if epilogue else ()
    f = Function(form.name, params)
    make = tile_pointers(f"tile_pointers_{t.kind}_{form.spatial}", t.kind, form.spatial)
    find = program.define(make)
    P = pointer_table(f, program, f.mul("%runs", POINTERS), form.many)
    tall = None
    if len(heights) > 1:
        tall = f.sub("%pixels", f.mul(f.ceildiv("%pixels", heights[0]), heights[1]))
    sums = panels = ""
    if epilogue:
        count = f.mul("%columns_each", heights[0])
        sums = f.op(f"alloca {t.kind}, i64 {count}, align 64")
    if form.pack:
        panels = f.op(f"alloca {t.kind}, i64 {f.mul('%columns_each', '%k')}, align 64")
    together = f.max(f.div(CHAIN, "%run"), 1)
    with f.items() as item:
        rest, row_block = f.divmod(item, "%blocks_m")
        group0 = f.mul(f.div(rest, "%blocks_n"), "%groups_each")
        column_block = f.rem(rest, "%blocks_n")
        group1 = f.min(f.add(group0, "%groups_each"), "%groups")
        x = t.gep(f, "%X", f.mul(group0, "%x_group"))
        b = "%B"
        n0, n1 = f.part(column_block, "%columns_each", "%features")
        if form.pack:
            b = _pack_panels(f, form, panels, n0, n1)
        first = f.mul(row_block, "%tiles_each")
        last = f.min(f.add(first, "%tiles_each"), f.ceildiv("%pixels", heights[0]))
        at = _RowTile(program, f, form, P, b, sums, together, n0, n1, group0)
        with f.loop(first, last) as tile:
            is_tall: str | None = None
            if tall is None:
                row = f.mul(tile, heights[0])
            else:
                is_tall = f.icmp("slt", tile, tall)
                row = f.muladd(tile, heights[1], f.min(tile, tall))
            numbers = (f"i64 %{q}" for _, q in geometry(form.spatial))
            f.call(
                find,
                f"ptr {x}",
                "ptr %zeros",
                f"i64 {row}",
                f"ptr {P}",
                *numbers,
            )
            with f.loop(group0, group1) as group:  # they read at the same pointers
                at.multiply(row, is_tall, group)
    return program.define(f)


def _pack_panels(f: Function, form: Form, panels: str, n0: Int, n1: Int) -> str:
    """Pack the panels of the columns [n0, n1); where panel 0 would be."""
    t = form.tile
    b = f.op(f"getelementptr {t.kind}, ptr {panels}, i64 {f.sub(0, f.mul(n0, '%k'))}")
    f.call(
        form.pack,
        f"i64 {f.div(n0, t.lanes)}",
        f"i64 {f.ceildiv(n1, t.lanes)}",
        "ptr %B",
        f"ptr {b}",
        *(f"{kind} %pack_{q}" for kind, q in PACK_PARAMETERS),
    )
    return b


@frozen
class _RowTile:
    """An item's row tiles: the table of pointers, packed kernel and sums of `task`, the runs that a
    call adds up, columns and first group."""

    program: Program
    f: Function
    form: Form
    pointers: str
    b: str
    sums: str
    together: Int
    n0: Int
    n1: Int
    group0: Int

    def multiply(self, row: Int, is_tall: str | None, group: Int) -> None:
        """All columns of the tile that begins at `row`."""
        f = self.f
        heights = self.form.heights
        if is_tall is not None:
            f.choose(
                is_tall,
                lambda: self.columns(row, heights[0], False, group),
                lambda: self.columns(row, heights[1], False, group),
            )
        elif self.form.static:
            self.columns(row, heights[0], False, group)
        else:
            f.choose(
                f.icmp("sge", f.sub("%pixels", row), heights[0]),
                lambda: self.columns(row, heights[0], False, group),
                lambda: self.columns(row, heights[0], True, group),
            )

    def columns(self, row: Int, rows: int, partial: bool, group: Int) -> None:
        f = self.f
        form = self.form
        t = self.form.tile
        at = f.mul(f.sub(group, self.group0), "%x_group")
        c = t.gep(f, "%C", f.mul(group, "%c_group"))
        b = self.b if form.pack else t.gep(f, self.b, f.mul(group, "%b_group"))
        rest = [f"i64 {f.sub('%pixels', row)}"] * partial

        def call(j: Int, vectors: int, whole: bool = False) -> None:
            if form.epilogue:
                to = t.gep(f, self.sums, f.sub(j, self.n0))
            else:
                to = t.gep(f, c, f.muladd(row, "%ldc", j))
            panel = t.gep(f, b, f.mul(j, "%k"))
            kernel = form.kernel(self.program, rows, vectors, partial, whole)
            ldc = "i64 %columns_each" if form.epilogue else "i64 %ldc"
            place = [f"ptr {to}", ldc, f"i64 {f.sub(self.n1, j)}"]
            if form.size:
                sources = f"ptr {self.pointers}", f"ptr {panel}"
                f.call(kernel, *sources, "i64 %runs", f"i64 {j}", *place, *rest)
            else:
                self.runs(kernel, panel, vectors, at, place, rest)

        with f.loop(self.n0, self.n1, t.columns) as j:
            if form.size:
                is_whole = f.icmp("sge", f.sub(self.n1, j), t.lanes)
                f.choose(is_whole, lambda: call(j, 1, True), lambda: call(j, 1))
            elif form.odd:
                is_wide = f.icmp("sgt", f.sub(self.n1, j), t.lanes)
                f.choose(is_wide, lambda: call(j, t.vectors), lambda: call(j, 1))
            else:
                call(j, t.vectors)
        if form.epilogue:
            column = f.muladd(group, "%c_group", self.n0)
            height = f.min(rows, f.sub("%pixels", row)) if partial else rows
            width = f.sub(self.n1, self.n0)
            form.epilogue.call(f, row, height, column, width, self.sums, "%columns_each")

    def runs(
        self,
        kernel: str,
        panel: str,
        vectors: int,
        at: Int,
        place: list[str],
        rest: list[str],
    ) -> None:
        """Sums of sums: a single chain would lose digits."""
        f = self.f
        t = self.form.tile
        with f.loop(0, "%runs", self.together) as tap:
            pointers = f.gep("ptr", self.pointers, f.mul(tap, POINTERS))
            part = t.gep(f, panel, f.mul(f.mul(tap, "%run"), vectors * t.lanes))
            count = f.min(self.together, f.sub("%runs", tap))
            sources = (
                f"ptr {pointers}",
                f"ptr {part}",
                f"i64 {count}",
                "i64 %run",
                f"i64 {at}",
            )
            f.call(kernel, *sources, *place, f"i1 {f.icmp('ne', tap, 0)}", *rest)


def is_direct(x: Instruction) -> bool:
    """Whether a convolution has the form that `emit_direct` takes: channels last, and elements of
    one type."""
    return is_channels_last(x) and len({o.dtype for o in (*x.operands, x)}) == 1


def _group_size(x: Instruction, t: Tile) -> int:
    """The channels of a group when `micro_grouped` takes it: as many output features, and whole
    groups in a vector. Else 0."""
    groups = x["feature_group_count"]
    channels = x.operand.dims[-1]
    if groups == 1 or x["batch_group_count"] > 1 or channels != x.dims[-1]:
        return 0
    size = channels // groups
    return (
        size
        if isinstance(size, int) and size <= t.lanes // 2 and t.lanes % size == 0 and t.is_float
        else 0
    )


def emit_direct(program: Program, x: Instruction, kind: str, finish: Finish | None = None) -> None:
    """Emit a convolution of the form of `is_direct`, or what `finish` makes of it."""
    lhs, rhs = x.operands
    t = register_tile(kind, program.target.vector_bytes)
    feature_groups = x["feature_group_count"]
    batch_groups = x["batch_group_count"]
    size = _group_size(x, t)
    if size:
        feature_groups = 1
        t = replace(t, vectors=1)
    groups = feature_groups * batch_groups
    steps = row_major_strides(lhs.dims)
    channels = size or lhs.dims[-1] // feature_groups
    features = x.dims[-1] // groups
    taps = product(w.size for w in x["window"])
    k = taps * channels
    pixels = product(x.dims[:-1])
    kernel = packing(program, x, t, groups, features, taps, channels)
    shape, runs, run, numbers = _geometry(x, channels, feature_groups == 1 and not size)
    heights = tile_heights(t, pixels)
    together = _together(t, features, k, feature_groups) if batch_groups == 1 else 1
    blocks = ceildiv(groups, together)
    most = CONV_FINISHED if finish else MOST_COLUMNS
    tiles = ceildiv(pixels, heights[0])
    cut = _cut(program.target.cores, t, tiles, features, k, blocks, pixels * together, most)
    # every panel is used by one item
    own = groups == cut.blocks_m == 1 and not size and x.is_static and rhs.is_static
    own = own and cut.columns_each * k * t.itemsize <= CONV_B_BYTES
    form = Form(
        t,
        heights,
        isinstance(pixels, int),
        shape,
        odd=not size and (not isinstance(features, int) or ceildiv(features, t.lanes) % 2 == 1),
        size=size,
        pack=kernel.name if own else "",
        many=hint(runs, 4096) * POINTERS * 8 > TABLE_BYTES,
        epilogue=finish.epilogue if finish else None,
    )
    name = program.made(task, form)
    pixel = dim_max(run, lhs.dims[-1]) if size or together > 1 else run
    zeros = program.constant(bytes(hint(pixel, 4096) * t.itemsize))
    x_group = channels if feature_groups > 1 else steps[0] * (lhs.dims[0] // batch_groups)
    b_group = round_up(features, t.lanes) * k
    arguments = [features, k, runs, run, x.dims[-1]]
    arguments += [cut.tiles_each, cut.blocks_m, cut.columns_each, cut.blocks_n]
    arguments += [x_group, b_group, features, groups, together, *numbers]
    source = program.pointer(lhs)
    packed = kernel.kernel if own else kernel.everything(program)
    target = "null" if finish else program.pointer(x)
    items = blocks * cut.blocks_m * cut.blocks_n
    work = float(hint(pixels, 4096) * hint(features, 64) * hint(k, 512))
    texts = program.arguments((source, packed, target, zeros), arguments)
    texts += [f"ptr {kernel.table}", *kernel.numbers] if own else []
    texts += finish.arguments if finish else ()
    cost = 100 + work * groups / max(1, hint(items, 8)) / (1.5 * t.lanes)
    program.parallel(name, texts, items, cost=cost)


def _together(t: Tile, features: Size, k: Size, groups: int) -> int:
    """Groups whose packed kernels stay in L2 together."""
    kernel_bytes = hint(k, 512) * hint(ceildiv(features, t.lanes), 4) * t.lanes * t.itemsize
    return min(groups, max(1, CONV_B_BYTES // kernel_bytes))


def _geometry(
    x: Instruction, channels: Size, one_group: bool
) -> tuple[int, Size, Size, list[Size]]:
    """(spatial dimensions, runs of channels that a window meets, their length, the arguments for
    `geometry`). Taps that are neighbours in memory are one run."""
    lhs = x.operand
    window = x["window"]
    steps = row_major_strides(lhs.dims)
    pixels = product(x.dims[:-1])
    runs: Size = product(w.size for w in window)
    run = channels
    padded = any(w.pad_low or w.pad_high for w in window)
    if all(w.size == 1 and w.stride == 1 for w in window) and not padded:
        return 0, runs, run, [pixels, steps[-2]]
    numbers = [pixels, steps[0]]
    for i, (w, n, out) in enumerate(zip(window, lhs.dims[1:-1], x.dims[1:-1], strict=True)):
        count = w.size
        if (
            i == len(window) - 1
            and one_group
            and w.window_dilation == 1
            and w.pad_low == 0
            and w.pad_high <= 0
            and w.size != 1
        ):
            # Neighbouring taps of a row meet neighbouring runs of channels: one longer run.
            runs //= w.size
            run *= w.size
            n = n - w.size + 1
            count = 1
        numbers += [
            out,
            n,
            w.stride,
            w.pad_low,
            count,
            w.window_dilation,
            steps[1 + i],
        ]
    return len(window), runs, run, numbers


def _cut(
    cores: int,
    t: Tile,
    tiles: Size,
    features: Size,
    k: Size,
    groups: int,
    pixels: Size,
    most: int,
) -> Partition:
    """Columns, at most `most` of them, in blocks whose packed kernel stays in L2, rows in enough
    blocks for so many cores."""
    panels = min(CONV_B_BYTES // (hint(k, 512) * t.columns * t.itemsize), most // t.columns)
    columns = max(1, panels) * t.columns
    blocks_n: Size = ceildiv(features, columns)
    if isinstance(features, int):  # equal blocks
        blocks_n = ceildiv(features, columns)
        columns = min(columns, round_up(ceildiv(features, blocks_n), t.columns))
        blocks_n = ceildiv(features, columns)
    work = hint(pixels, 4096) * hint(features, 64) * hint(k, 512)
    wanted = min(ITEMS_PER_CORE * cores, work * groups >> 21)
    blocks_m = max(1, ceildiv(wanted, hint(blocks_n, 1) * groups))
    each = ceildiv(tiles, min(blocks_m, tiles) if isinstance(tiles, int) else blocks_m)
    return Partition(each, columns, ceildiv(tiles, each), blocks_n, True)
