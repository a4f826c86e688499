"""Convolution of channels-last arrays: a matrix product whose left operand is the input, read in place.

Output pixels are rows and output features columns. A tile of C stays in registers over the whole sum: for every tap of the window each row has
a pointer to a run of channels (to zeros where the tap lies in the padding), and the kernel is packed as [panel][tap][channel][columns]:

    for each group of panels (fits L2)       for each tile of rows: find the pointers
        for each panel of the group                 for each tap, for each channel: rows x vectors multiply-adds

This is the indirect convolution of Dukhan (The Indirect Convolution Algorithm, 2019) with the pointers made on the way. Nothing is
copied, padded or added up in memory. Measured on one Granite Rapids core: see docs/measurements.md.
"""

from __future__ import annotations

from dataclasses import replace

from torch_hlo.compiler.codegen.conv_pack import PACK_PARAMETERS, packing, product, usual
from torch_hlo.compiler.codegen.dot import Finish
from torch_hlo.compiler.codegen.epilogue import Epilogue
from torch_hlo.compiler.codegen.function import Function, Int
from torch_hlo.compiler.codegen.gemm import (
    ITEMS_PER_CORE,
    Partition,
    Tile,
    lane_mask,
    masked_load,
    masked_store,
    multiply_add,
    splat,
    store_tile,
    tile_heights,
)
from torch_hlo.compiler.passes.conv_layout import is_channels_last
from torch_hlo.hlo.dim import Size, ceildiv
from torch_hlo.hlo.ir import Instruction
from torch_hlo.hlo.shape import row_major_strides

POINTERS = 16  # entries of a row of the table of pointers
B_BYTES = 768 << 10  # packed kernel that stays in L2 while the pixels pass
TABLE_BYTES = 1 << 20  # of a table of pointers on the stack
FINISHED = 256  # columns of a row tile that an epilogue finishes at a time
MOST_COLUMNS = 1 << 20
UNROLLED = 4  # vectors of the packed kernel that a step of the inner loop reads: rows have more pointers than there are registers for
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
    itemsize = {"float": 4, "double": 8, "i32": 4, "i64": 8}[kind]
    return Tile(kind, itemsize, vector_bytes // itemsize, 14 if vector_bytes >= 64 else 6, 2)


def micro(name: str, t: Tile, rows: int, vectors: int, partial: bool) -> Function:
    """C[rows, vectors * lanes] (+)= sum over taps and channels of P[tap][row][at + channel] * B[tap][channel]; `cols` columns are valid, and with
    `partial` only `valid_rows` rows."""
    params = [
        ("ptr noalias", "P"),
        ("ptr noalias", "B"),
        ("i64", "taps"),
        ("i64", "depth"),
        ("i64", "at"),
    ]
    params += [("ptr noalias", "C"), ("i64", "ldc"), ("i64", "cols"), ("i1", "more")]
    f = Function(name, "void", params + [("i64", "valid_rows")] * partial, attrs="noinline #0")
    width = vectors * t.lanes
    carry = [(t.vector, "zeroinitializer")] * (rows * vectors)
    with f.loop(0, "%taps", carry=carry, known_nonempty=True) as taps:
        row_of_table = f.gep("ptr", "%P", f.mul(taps.index, POINTERS))
        pointers = [f.load("ptr", f.gep("ptr", row_of_table, i), 8) for i in range(rows)]
        b_tap = f.gep(t.kind, "%B", f.mul(f.sub(f.mul(taps.index, "%depth"), "%at"), width))
        end, each = f.add("%at", "%depth"), UNROLLED // vectors
        whole = f.sub(end, f.rem("%depth", each))

        def steps(count: int, index: Int, sums: list[str]) -> list[str]:
            """The sums after `count` channels from `index` on."""
            b = [
                [
                    f.load(
                        t.vector,
                        f.gep(t.kind, b_tap, f.add(f.mul(f.add(index, u), width), j * t.lanes)),
                        t.itemsize,
                    )
                    for j in range(vectors)
                ]
                for u in range(count)
            ]
            for i in range(rows):
                p = f.gep(t.kind, pointers[i], index)
                for u in range(count):
                    a = splat(f, t.kind, t.lanes, f.load(t.kind, f.gep(t.kind, p, u), t.itemsize))
                    for j in range(vectors):
                        sums[i * vectors + j] = multiply_add(
                            f, t, a, b[u][j], sums[i * vectors + j]
                        )
            return sums

        with f.loop("%at", whole, each, carry=[(t.vector, v) for v in taps.vars]) as long:
            long.next = steps(each, long.index, list(long.vars))
        with f.loop(whole, end, carry=[(t.vector, v) for v in long.vars]) as run:
            run.next = steps(1, run.index, list(run.vars))
        taps.next = run.vars
    masks = [lane_mask(f, t.lanes, j * t.lanes, "%cols") for j in range(vectors)]
    store_tile(f, replace(t, vectors=vectors), rows, taps.vars, masks, partial)
    return f


def micro_grouped(name: str, t: Tile, rows: int, size: int, partial: bool, whole: bool) -> Function:
    """C[rows, lanes] for groups of `size` channels that have as many output features: lane l sums P[tap][row][at + l - l % size + i] * B[tap][i][l]
    over taps and i. `cols` lanes are valid, all with `whole`."""
    params = [
        ("ptr noalias", "P"),
        ("ptr noalias", "B"),
        ("i64", "taps"),
        ("i64", "at"),
        ("ptr noalias", "C"),
        ("i64", "ldc"),
        ("i64", "cols"),
    ]
    f = Function(name, "void", params + [("i64", "valid_rows")] * partial, attrs="noinline #0")
    n = t.lanes
    mask = lane_mask(f, n, 0, "%cols")
    with f.loop(
        0, "%taps", carry=[(t.vector, "zeroinitializer")] * rows, known_nonempty=True
    ) as taps:
        row_of_table = f.gep("ptr", "%P", f.mul(taps.index, POINTERS))
        b_tap = f.gep(t.kind, "%B", f.mul(taps.index, n * size))
        b = [f.load(t.vector, f.gep(t.kind, b_tap, i * n), t.itemsize) for i in range(size)]
        taps.next = []
        for r in range(rows):
            p = f.gep(t.kind, f.load("ptr", f.gep("ptr", row_of_table, r), 8), "%at")
            x = (
                f.load(t.vector, p, t.itemsize)
                if whole
                else masked_load(f, t.kind, n, p, mask, t.itemsize)
            )
            total = taps.vars[r]
            for i in range(size):
                lanes = ", ".join(f"i32 {lane - lane % size + i}" for lane in range(n))
                a = (
                    f.op(f"shufflevector {t.vector} {x}, {t.vector} poison, <{n} x i32> <{lanes}>")
                    if size > 1
                    else x
                )
                total = multiply_add(f, t, a, b[i], total)
            taps.next.append(total)
    for i in range(rows):
        p, at_row = f.gep(t.kind, "%C", f.mul("%ldc", i)), mask
        if partial:
            at_row = f.op(
                f"select i1 {f.icmp('slt', i, '%valid_rows')}, <{n} x i1> {mask}, <{n} x i1> zeroinitializer"
            )
        masked_store(f, t.kind, n, taps.vars[i], p, at_row, t.itemsize)
    return f


GEOMETRY = (
    "out",
    "size",
    "stride",
    "low",
    "taps",
    "dilation",
    "step",
)  # per spatial dimension: output and input extent, window, element step


def geometry(spatial: int) -> list[tuple[str, str]]:
    """Parameters that describe the pixels and the window."""
    return [
        ("i64", "pixels"),
        ("i64", "image_step"),
        *(("i64", f"{what}{i}") for i in range(spatial) for what in GEOMETRY),
    ]


def tile_pointers(name: str, kind: str, spatial: int) -> Function:
    """P[tap][i] = address of what the window's `tap` meets at output pixel `pixel + i` (of the last pixel beyond it): in x or, outside of
    it, `zeros`. Without spatial dimensions pixel i is the run at i * image_step."""
    params = [("ptr", "x"), ("ptr", "zeros"), ("i64", "pixel"), ("ptr", "P"), *geometry(spatial)]
    f = Function(name, "void", params, attrs="noinline #0")
    n, vector = POINTERS, f"<{POINTERS} x i64>"
    if not spatial:
        numbers = "<" + ", ".join(f"i64 {i}" for i in range(n)) + ">"
        at = f.op(f"add {vector} {numbers}, {splat(f, 'i64', n, '%pixel')}")
        last = splat(f, "i64", n, f.sub("%pixels", 1))
        at = f.op(f"call {vector} @llvm.smin.v{n}i64({vector} {at}, {vector} {last})")
        at = f.op(f"mul {vector} {at}, {splat(f, 'i64', n, '%image_step')}")
        f.store(f"<{n} x ptr>", f.op(f"getelementptr {kind}, ptr %x, {vector} {at}"), "%P", 8)
        return f
    slots = [
        f.alloca("i64", n, 64) for _ in range(spatial + 1)
    ]  # per pixel: element offset, and the window's first position
    rest, at = "%pixel", []
    for i in reversed(range(spatial)):
        at.insert(0, f.rem(rest, f"%out{i}"))
        rest = f.div(rest, f"%out{i}")
    with f.loop(0, n, carry=[("i64", v) for v in (rest, *at)], known_nonempty=True) as lane:
        image, *place = lane.vars
        offset = f.mul(image, "%image_step")
        for i, p in enumerate(place):
            first = f.sub(f.mul(p, f"%stride{i}"), f"%low{i}")
            offset = f.add(offset, f.mul(first, f"%step{i}"))
            f.store("i64", first, f.gep("i64", slots[1 + i], lane.index), 8)
        f.store("i64", offset, f.gep("i64", slots[0], lane.index), 8)
        # The next pixel, unless this is the last one.
        more = f.op(
            f"zext i1 {f.icmp('slt', f.add(f.add('%pixel', lane.index), 1), '%pixels')} to i64"
        )
        following = []
        for i in reversed(range(spatial)):
            p = f.add(place[i], more)
            wrap = f.icmp("eq", p, f"%out{i}")
            following.insert(0, f.select(wrap, "i64", 0, p))
            more = f.op(f"zext i1 {wrap} to i64")
        lane.next = [f.add(image, more), *following]
    offsets = f.load(vector, slots[0], 64)
    firsts = [f.load(vector, s, 64) for s in slots[1:]]
    nowhere = splat(f, "ptr", n, "%zeros")

    def nest(i: int, offset: Int, inside: str | None, number: Int) -> None:
        if i == spatial:
            shifted = f.op(f"add {vector} {offsets}, {splat(f, 'i64', n, offset)}")
            addresses = f.op(f"getelementptr {kind}, ptr %x, {vector} {shifted}")
            found = f.op(
                f"select <{n} x i1> {inside}, <{n} x ptr> {addresses}, <{n} x ptr> {nowhere}"
            )
            f.store(f"<{n} x ptr>", found, f.gep("ptr", "%P", f.mul(number, n)), 8)
            return
        with f.loop(0, f"%taps{i}") as tap:
            shift = f.mul(tap, f"%dilation{i}")
            position = f.op(f"add {vector} {firsts[i]}, {splat(f, 'i64', n, shift)}")
            valid = f.op(f"icmp ult {vector} {position}, {splat(f, 'i64', n, f'%size{i}')}")
            both = valid if inside is None else f.op(f"and <{n} x i1> {inside}, {valid}")
            nest(
                i + 1,
                f.add(offset, f.mul(shift, f"%step{i}")),
                both,
                f.add(f.mul(number, f"%taps{i}"), tap),
            )

    nest(0, 0, None, 0)
    return f


def pointer_table(f: Function, program, count: Int, many: bool) -> str:
    """Memory for `count` pointers while the function runs: of the stack or, if there are `many`, of the heap. Stacks of threads may be as small as 2 MB."""
    nbytes = f.mul(count, 8)
    if not many:
        return f.op(f"alloca i8, i64 {nbytes}, align 64")
    malloc, free = (
        program.symbol("malloc", "declare ptr @malloc(i64)"),
        program.symbol("free", "declare void @free(ptr)"),
    )
    table = f.op(f"call ptr @{malloc}(i64 {nbytes})")
    f.endings.append(f"  call void @{free}(ptr {table})")
    return table


def task(name: str, t: Tile, heights: tuple[int, ...], static: bool, spatial: int, odd: bool, size: int, pack: str, many: bool,
         epilogue: Epilogue | None, program) -> str:  # fmt: skip
    """Items (groups, block of panels, block of row tiles): void(lo, hi, X, B, C, zeros, NUMBERS…, geometry…, the epilogue's). `odd`: the last panel
    is one vector wide. `size`: channels of the groups of `micro_grouped`, or 0. `pack`: a function of `pack_kernel` with which
    an item packs its panels for itself, B is then the kernel, or "". `many`: of the taps. With an epilogue C is not used: it takes the sums of a row tile from the stack.
    Returns the name, its functions defined in `program`."""
    params = [
        ("i64", "lo"),
        ("i64", "hi"),
        *(("ptr", q) for q in ("X", "B", "C", "zeros")),
        *(("i64", q) for q in NUMBERS),
        *geometry(spatial),
    ]
    params += [(kind, f"pack_{q}") for kind, q in PACK_PARAMETERS] if pack else []
    params += epilogue.parameters if epilogue else ()
    f = Function(name, "void", params)
    make = tile_pointers(f"tile_pointers_{t.kind}_{spatial}", t.kind, spatial)
    find = program.function(make.name, make.text())

    def kernel(rows: int, vectors: int, partial: bool, whole: bool = False) -> str:
        if size:
            made = micro_grouped(
                f"conv_grouped_{t.suffix}_{rows}x{size}{'p' * partial}{'w' * whole}",
                t,
                rows,
                size,
                partial,
                whole,
            )
        else:
            made = micro(
                f"conv_micro_{t.suffix}_{rows}x{vectors}{'p' * partial}", t, rows, vectors, partial
            )
        return program.function(made.name, made.text())

    P = pointer_table(f, program, f.mul("%runs", POINTERS), many)
    tall = (
        f.sub("%pixels", f.mul(f.ceildiv("%pixels", heights[0]), heights[1]))
        if len(heights) > 1
        else None
    )
    sums = (
        f.op(f"alloca {t.kind}, i64 {f.mul('%columns_each', heights[0])}, align 64")
        if epilogue
        else ""
    )
    panels = f.op(f"alloca {t.kind}, i64 {f.mul('%columns_each', '%k')}, align 64") if pack else ""
    together = f.max(f.div(CHAIN, "%run"), 1)
    with f.loop("%lo", "%hi") as item:
        rest, row_block = f.div(item, "%blocks_m"), f.rem(item, "%blocks_m")
        group0, column_block = (
            f.mul(f.div(rest, "%blocks_n"), "%groups_each"),
            f.rem(rest, "%blocks_n"),
        )
        group1 = f.min(f.add(group0, "%groups_each"), "%groups")
        x, b = f.gep(t.kind, "%X", f.mul(group0, "%x_group")), "%B"
        n0 = f.mul(column_block, "%columns_each")
        n1 = f.min(f.add(n0, "%columns_each"), "%features")
        if pack:
            b = f.op(
                f"getelementptr {t.kind}, ptr {panels}, i64 {f.sub(0, f.mul(n0, '%k'))}"
            )  # where panel 0 would be
            f.call(
                "void",
                pack,
                f"i64 {f.div(n0, t.lanes)}",
                f"i64 {f.ceildiv(n1, t.lanes)}",
                "ptr %B",
                f"ptr {b}",
                *(f"{kind} %pack_{q}" for kind, q in PACK_PARAMETERS),
            )
        first = f.mul(row_block, "%tiles_each")
        last = f.min(f.add(first, "%tiles_each"), f.ceildiv("%pixels", heights[0]))
        with f.loop(first, last) as tile:
            if tall is None:
                row, is_tall = f.mul(tile, heights[0]), None
            else:
                is_tall = f.icmp("slt", tile, tall)
                row = f.add(f.mul(tile, heights[1]), f.min(tile, tall))
            f.call(
                "void",
                find,
                f"ptr {x}",
                "ptr %zeros",
                f"i64 {row}",
                f"ptr {P}",
                *(f"i64 %{q}" for _, q in geometry(spatial)),
            )

            def columns(
                rows: int, partial: bool, group: Int, row=row, b=b, n0=n0, n1=n1, group0=group0
            ) -> None:
                at, c = (
                    f.mul(f.sub(group, group0), "%x_group"),
                    f.gep(t.kind, "%C", f.mul(group, "%c_group")),
                )
                b = b if pack else f.gep(t.kind, b, f.mul(group, "%b_group"))
                rest = [f"i64 {f.sub('%pixels', row)}"] * partial

                def call(j: Int, vectors: int, whole: bool = False) -> None:
                    to = (
                        f.gep(t.kind, sums, f.sub(j, n0))
                        if epilogue
                        else f.gep(t.kind, c, f.add(f.mul(row, "%ldc"), j))
                    )
                    panel, made = (
                        f.gep(t.kind, b, f.mul(j, "%k")),
                        kernel(rows, vectors, partial, whole),
                    )
                    place = [
                        f"ptr {to}",
                        "i64 %columns_each" if epilogue else "i64 %ldc",
                        f"i64 {f.sub(n1, j)}",
                    ]
                    if size:
                        f.call(
                            "void",
                            made,
                            f"ptr {P}",
                            f"ptr {panel}",
                            "i64 %runs",
                            f"i64 {j}",
                            *place,
                            *rest,
                        )
                        return
                    with f.loop(
                        0, "%runs", together
                    ) as tap:  # sums of sums: a single chain would lose digits
                        pointers, part = (
                            f.gep("ptr", P, f.mul(tap, POINTERS)),
                            f.gep(t.kind, panel, f.mul(f.mul(tap, "%run"), vectors * t.lanes)),
                        )
                        f.call(
                            "void",
                            made,
                            f"ptr {pointers}",
                            f"ptr {part}",
                            f"i64 {f.min(together, f.sub('%runs', tap))}",
                            "i64 %run",
                            f"i64 {at}",
                            *place,
                            f"i1 {f.icmp('ne', tap, 0)}",
                            *rest,
                        )

                with f.loop(n0, n1, t.columns) as j:
                    if size:
                        f.choose(
                            f.icmp("sge", f.sub(n1, j), t.lanes),
                            lambda: call(j, 1, True),
                            lambda: call(j, 1),
                        )
                    elif odd:
                        f.choose(
                            f.icmp("sgt", f.sub(n1, j), t.lanes),
                            lambda: call(j, t.vectors),
                            lambda: call(j, 1),
                        )
                    else:
                        call(j, t.vectors)
                if epilogue:
                    column = f.add(f.mul(group, "%c_group"), n0)
                    epilogue.call(
                        f,
                        row,
                        f.min(rows, f.sub("%pixels", row)) if partial else rows,
                        column,
                        f.sub(n1, n0),
                        sums,
                        "%columns_each",
                    )

            with f.loop(group0, group1) as group:  # they read at the same pointers
                if is_tall is not None:
                    f.choose(
                        is_tall,
                        lambda: columns(heights[0], False, group),
                        lambda: columns(heights[1], False, group),
                    )
                elif static:
                    columns(heights[0], False, group)
                else:
                    whole = f.icmp("sge", f.sub("%pixels", row), heights[0])
                    f.choose(
                        whole,
                        lambda: columns(heights[0], False, group),
                        lambda: columns(heights[0], True, group),
                    )
    return program.function(f.name, f.text())


def is_direct(x: Instruction) -> bool:
    """Whether a convolution has the form that `emit_direct` takes: channels last, and elements of one type."""
    return is_channels_last(x) and len({o.shape.dtype for o in (*x.operands, x)}) == 1


def _group_size(x: Instruction, t: Tile) -> int:
    """The channels of a group when `micro_grouped` takes it: as many output features, and whole groups in a vector. Else 0."""
    groups, channels = x["feature_group_count"], x.operands[0].shape.dims[-1]
    if groups == 1 or x["batch_group_count"] > 1 or channels != x.shape.dims[-1]:
        return 0
    size = channels // groups
    return (
        size
        if isinstance(size, int) and size <= t.lanes // 2 and t.lanes % size == 0 and t.is_float
        else 0
    )


def emit_direct(program, x: Instruction, kind: str, finish: Finish | None = None) -> None:
    """Emit a convolution of the form of `is_direct`, or what `finish` makes of it."""
    lhs, rhs = x.operands
    window, spatial = x["window"], len(x["window"])
    t = register_tile(kind, program.target.vector_bytes)
    feature_groups, batch_groups = x["feature_group_count"], x["batch_group_count"]
    size = _group_size(x, t)
    if size:
        feature_groups, t = 1, replace(t, vectors=1)
    groups = feature_groups * batch_groups
    sizes, outs = lhs.shape.dims[1:-1], x.shape.dims[1:-1]
    steps = row_major_strides(lhs.shape.dims)
    channels, features = size or lhs.shape.dims[-1] // feature_groups, x.shape.dims[-1] // groups
    taps = product(w.size for w in window)
    k = taps * channels
    pixels = product(x.shape.dims[:-1])

    kernel = packing(program, x, t, groups, features, taps, channels)
    runs, run = taps, channels
    pads = [(w.pad_low, w.pad_high) for w in window]
    if all(w.size == 1 and w.stride == 1 for w in window) and not any(map(any, pads)):
        shape, numbers = 0, [pixels, steps[-2]]
    else:
        shape, numbers = spatial, [pixels, steps[0]]
        for i, (w, n, out) in enumerate(zip(window, sizes, outs, strict=True)):
            count = w.size
            if (
                i == spatial - 1
                and feature_groups == 1
                and not size
                and w.window_dilation == 1
                and w.pad_low == 0
                and w.pad_high <= 0
                and w.size != 1
            ):
                # Neighbouring taps of a row meet neighbouring runs of channels: one longer run.
                runs, run, n, count = runs // w.size, run * w.size, n - w.size + 1, 1
            numbers += [out, n, w.stride, w.pad_low, count, w.window_dilation, steps[1 + i]]
    heights = tile_heights(t, pixels)
    tiles = ceildiv(pixels, heights[0])
    together = (
        min(
            feature_groups,
            max(
                1,
                B_BYTES
                // (usual(k, 512) * usual(ceildiv(features, t.lanes), 4) * t.lanes * t.itemsize),
            ),
        )
        if batch_groups == 1
        else 1
    )
    blocks = ceildiv(groups, together)
    cut = _cut(
        program.target.cores,
        t,
        tiles,
        features,
        k,
        blocks,
        pixels * together,
        FINISHED if finish else MOST_COLUMNS,
    )
    odd = not size and (not isinstance(features, int) or ceildiv(features, t.lanes) % 2 == 1)
    own = (
        groups == cut.blocks_m == 1 and not size and x.shape.is_static and rhs.shape.is_static
    )  # every panel is used by one item
    own = own and cut.columns_each * k * t.itemsize <= B_BYTES
    many = usual(runs, 4096) * POINTERS * 8 > TABLE_BYTES
    key = (
        t,
        heights,
        isinstance(pixels, int),
        shape,
        odd,
        size,
        kernel.name if own else "",
        many,
        finish and finish.epilogue,
    )
    name = program.once(
        ("conv_direct", *key),
        lambda: task(
            f"conv_{shape}_{'_'.join(map(str, heights))}_{size}{'o' * odd}{'k' * own}{'m' * many}",
            *key,
            program,
        ),
    )
    zeros = program.constant(
        bytes(
            usual(max(run, lhs.shape.dims[-1]) if size or together > 1 else run, 4096) * t.itemsize
        )
    )
    groups_step = {
        "x": channels if feature_groups > 1 else steps[0] * (lhs.shape.dims[0] // batch_groups),
        "c": features,
    }
    arguments = [
        features,
        k,
        runs,
        run,
        x.shape.dims[-1],
        cut.tiles_each,
        cut.blocks_m,
        cut.columns_each,
        cut.blocks_n,
        groups_step["x"],
        ceildiv(features, t.lanes) * t.lanes * k,
        groups_step["c"],
        groups,
        together,
        *numbers,
    ]
    pointers = [
        program.pointer(lhs),
        kernel.kernel if own else kernel.everything(program),
        "null" if finish else program.pointer(x),
        program.at(zeros),
    ]
    items = blocks * cut.blocks_m * cut.blocks_n
    work = float(usual(pixels, 4096) * usual(features, 64) * usual(k, 512))
    texts = [
        *(f"ptr {p}" for p in pointers),
        *(f"i64 {program.size(v)}" for v in arguments),
        *([f"ptr {kernel.table}", *kernel.numbers] if own else ()),
        *(finish.arguments if finish else ()),
    ]
    program.parallel(
        name,
        texts,
        program.size(items),
        cost=100 + work * groups / max(1, usual(items, 8)) / (1.5 * t.lanes),
    )


def _cut(
    cores: int, t: Tile, tiles: Size, features: Size, k: Size, groups: int, pixels: Size, most: int
) -> Partition:
    """Columns, at most `most` of them, in blocks whose packed kernel stays in L2, rows in enough blocks for so many cores."""
    panels = min(B_BYTES // (usual(k, 512) * t.columns * t.itemsize), most // t.columns)
    columns = max(1, panels) * t.columns
    blocks_n = ceildiv(features, columns)
    if isinstance(features, int):  # equal blocks
        columns = min(columns, ceildiv(ceildiv(features, blocks_n), t.columns) * t.columns)
        blocks_n = ceildiv(features, columns)
    work = usual(pixels, 4096) * usual(features, 64) * usual(k, 512)
    wanted = min(ITEMS_PER_CORE * cores, work * groups >> 21)
    blocks_m = max(1, -(-wanted // (usual(blocks_n, 1) * groups)))
    each = ceildiv(tiles, min(blocks_m, tiles) if isinstance(tiles, int) else blocks_m)
    return Partition(each, columns, ceildiv(tiles, each), blocks_n, True)
