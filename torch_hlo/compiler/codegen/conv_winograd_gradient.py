"""Gradient of the weights of 3x3 convolutions with stride 1 by minimal filtering: see conv_winograd.py.

    lhs f01b (X), rhs i01o (Y), result 01bf or fb01, as in conv_gradient.py

An item of work is a piece of the tiles and a block of the weights: the sums of its 16 products stay in L2 while blocks of tiles are transformed and
added, and become 9 taps at the end. Pieces are added afterwards, in order. A block that is in one piece is turned to fb01, the order of PyTorch's
weights, on its way to memory.
"""

from __future__ import annotations

from torch_hlo.compiler.codegen.conv_direct import POINTERS, geometry, register_tile, tile_pointers
from torch_hlo.compiler.codegen.conv_gradient import ENTRY, add_pieces, is_gradient, micro, turn
from torch_hlo.compiler.codegen.conv_winograd import (
    F23,
    Filtering,
    applies,
    define,
    transform,
    transform_inputs,
    transposed,
)
from torch_hlo.compiler.codegen.dot import SPLITS
from torch_hlo.compiler.codegen.function import Function
from torch_hlo.compiler.codegen.gemm import ITEMS_PER_CORE, Tile, lane_mask, masked_store
from torch_hlo.hlo.dim import ceildiv
from torch_hlo.hlo.ir import Instruction
from torch_hlo.hlo.shape import row_major_strides

ROWS, COLUMNS = 64, 128  # weights of an item: sums of 512 KB
TILES = 48  # that are transformed at a time
NUMBERS = (
    "tiles",
    "tiles_each",
    "channels",
    "features",
    "rows",
    "columns",
    "blocks_m",
    "blocks_n",
    "height",
    "ldv",
    "ldz",
)


def both(what: str) -> list[tuple[str, str]]:
    return [(kind, f"{what}_{name}") for kind, name in geometry(2)]


def store_taps(name: str, t: Tile, s: Filtering) -> Function:
    """void(M, plane, ldm, rows, cols, C, ldc, tap_step): C[tap][row][column] = (G' m G)[tap], m[i] = M[i][row][column], of `rows` rows and `cols` columns."""
    params = [
        ("ptr", "M"),
        ("i64", "plane"),
        ("i64", "ldm"),
        ("i64", "rows"),
        ("i64", "cols"),
        ("ptr", "C"),
        ("i64", "ldc"),
        ("i64", "tap_step"),
    ]
    f = Function(name, "void", params, attrs="noinline #0")
    n = s.inputs
    with f.loop(0, "%rows") as row, f.loop(0, "%cols", t.lanes) as column:
        mask = lane_mask(f, t.lanes, column, "%cols")
        at = f.gep(t.kind, "%M", f.add(f.mul(row, "%ldm"), column))
        values = [
            f.load(t.vector, f.gep(t.kind, at, f.mul("%plane", i)), t.itemsize)
            for i in range(n * n)
        ]
        made = transform(f, t, transposed(s.G), [values[r * n : r * n + n] for r in range(n)])
        to = f.gep(t.kind, "%C", f.add(f.mul(row, "%ldc"), column))
        for i, v in enumerate(v for row_of_taps in made for v in row_of_taps):
            masked_store(
                f, t.kind, t.lanes, v, f.gep(t.kind, to, f.mul("%tap_step", i)), mask, t.itemsize
            )
    return f


def task(name: str, t: Tile, s: Filtering, height: int, turned: bool, program) -> str:
    """Items (piece of the tiles, block of rows, block of columns): void(lo, hi, X, Y, C, zeros, NUMBERS…, geometry of X…, geometry of Y…). `turned`:
    C is [feature][channel][tap], else [piece][tap][channel][feature]."""
    params = [
        ("i64", "lo"),
        ("i64", "hi"),
        *(("ptr", q) for q in ("X", "Y", "C", "zeros")),
        *(("i64", q) for q in NUMBERS),
        *both("x"),
        *both("y"),
    ]
    f = Function(name, "void", params)
    find = define(program, tile_pointers, f"tile_pointers_{t.kind}_2", t.kind, 2)
    of_x = define(program, transform_inputs, f"winograd_inputs_{t.suffix}", t, s.B)
    of_y = define(program, transform_inputs, f"winograd_results_{t.suffix}", t, transposed(s.A))
    kernel = define(
        program, micro, f"conv_gradient_{t.suffix}_{height}x{t.vectors}w", t, height, True
    )
    store = define(program, store_taps, f"winograd_taps_{t.suffix}", t, s)
    points = s.inputs**2
    P, run = f.alloca("ptr", points * POINTERS, 64), f.alloca("i64", ENTRY, 64)
    planes = []
    for ld in ("%ldv", "%ldz"):
        planes.append(f.mul(TILES, ld))
    V, Z = (f.op(f"alloca {t.kind}, i64 {f.mul(plane, points)}, align 64") for plane in planes)
    ldm = f.mul(f.ceildiv("%columns", t.columns), t.columns)
    m_plane = f.mul(f.mul(f.ceildiv("%rows", height), height), ldm)
    M = f.op(f"alloca {t.kind}, i64 {f.mul(m_plane, points)}, align 64")
    taps = s.taps**2
    here = (
        f.op(f"alloca {t.kind}, i64 {f.mul(f.mul('%rows', ldm), taps)}, align 64") if turned else ""
    )
    turning = define(program, turn, f"turn_{t.suffix}", t) if turned else ""
    weights = f.mul("%channels", "%features")
    with f.loop("%lo", "%hi") as item:
        rest, n0 = f.div(item, "%blocks_n"), f.mul(f.rem(item, "%blocks_n"), "%columns")
        piece, m0 = f.div(rest, "%blocks_m"), f.mul(f.rem(rest, "%blocks_m"), "%rows")
        rows, cols = (
            f.min(f.sub("%channels", m0), "%rows"),
            f.min(f.sub("%features", n0), "%columns"),
        )
        t0 = f.mul(piece, "%tiles_each")
        t1 = f.min(f.add(t0, "%tiles_each"), "%tiles")
        with f.loop(t0, t1, TILES) as tile:
            count = f.min(f.sub(t1, tile), TILES)
            sides = (("x", of_x, m0, rows, V, "%ldv"), ("y", of_y, n0, cols, Z, "%ldz"))
            for (what, make, first, many, to, ld), plane in zip(sides, planes, strict=True):
                source = f.gep(t.kind, f"%{what.upper()}", first)
                with f.loop(0, count, POINTERS) as i:
                    f.call(
                        "void",
                        find,
                        f"ptr {source}",
                        "ptr %zeros",
                        f"i64 {f.add(tile, i)}",
                        f"ptr {P}",
                        *(f"i64 %{q}" for _, q in both(what)),
                    )
                    f.call(
                        "void",
                        make,
                        f"ptr {P}",
                        f"i64 {f.min(f.sub(count, i), POINTERS)}",
                        f"i64 {many}",
                        f"ptr {f.gep(t.kind, to, f.mul(i, ld))}",
                        f"i64 {ld}",
                        f"i64 {plane}",
                    )
            f.store("i64", count, f.gep("i64", run, 2), 8)
            more = f.icmp("ne", tile, t0)
            with f.loop(0, points) as point:
                for i, (to, plane) in enumerate(zip((V, Z), planes, strict=True)):
                    f.store("ptr", f.gep(t.kind, to, f.mul(point, plane)), f.gep("i64", run, i), 8)
                m = f.gep(t.kind, M, f.mul(point, m_plane))
                with f.loop(0, rows, height) as r, f.loop(0, cols, t.columns) as c:
                    to = f.gep(t.kind, m, f.add(f.mul(r, ldm), c))
                    f.call(
                        "void",
                        kernel,
                        f"ptr {run}",
                        "i64 1",
                        f"i64 {r}",
                        f"i64 {c}",
                        "i64 %ldv",
                        "i64 %ldz",
                        f"ptr {to}",
                        f"i64 {ldm}",
                        f"i64 {t.columns}",
                        f"i1 {more}",
                    )
        sums = [f"ptr {M}", f"i64 {m_plane}", f"i64 {ldm}", f"i64 {rows}", f"i64 {cols}"]
        if turned:
            f.call("void", store, *sums, f"ptr {here}", f"i64 {ldm}", f"i64 {f.mul(rows, ldm)}")
            c = f.gep(t.kind, "%C", f.mul(f.add(f.mul(n0, "%channels"), m0), taps))
            f.call(
                "void",
                turning,
                "i64 0",
                f"i64 {f.ceildiv(cols, t.lanes)}",
                f"ptr {here}",
                f"ptr {c}",
                f"i64 {taps}",
                f"i64 {rows}",
                f"i64 {cols}",
                "i64 1",
                f"i64 {ldm}",
                f"i64 {f.mul('%channels', taps)}",
            )
        else:
            c = f.gep(
                t.kind,
                "%C",
                f.add(f.mul(f.mul(piece, weights), taps), f.add(f.mul(m0, "%features"), n0)),
            )
            f.call("void", store, *sums, f"ptr {c}", "i64 %features", f"i64 {weights}")
    return program.function(f.name, f.text())


def _tiles(x: Instruction) -> tuple[int, int, int]:
    """How many rows and columns of tiles an image of Y has, and how many tiles there are."""
    high, wide = (ceildiv(w.size, F23.outputs) for w in x["window"])
    return high, wide, x.operands[0].shape.dims[0] * high * wide


def is_winograd_gradient(x: Instruction) -> bool:
    """Whether a convolution has the form that `emit_winograd_gradient` takes, and is faster that way; in ns on one core."""
    if not is_gradient(x) or not applies(x) or x["batch_group_count"] != 1 or len(x["window"]) != 2:
        return False
    taps = x.shape.dims[2:] if x["dim_labels"].endswith("fb01") else x.shape.dims[:2]
    if taps != (F23.taps,) * 2 or any(w.stride != 1 or w.window_dilation != 1 for w in x["window"]):
        return False
    channels, features = (o.shape.dims[-1] for o in x.operands)
    tiles, weights = _tiles(x)[2], channels * features
    pixels = x.operands[0].shape.dims[0] * x["window"][0].size * x["window"][1].size
    passes = ceildiv(features, COLUMNS) * channels + ceildiv(channels, ROWS) * features
    return (
        weights * (tiles * 16 * 0.015 + 4) + tiles * 16 * passes * 0.1
        < pixels * 9 * weights * 0.0135
    )


def emit_winograd_gradient(program, x: Instruction, kind: str) -> None:
    """Emit a convolution for which `is_winograd_gradient` holds."""
    s, t = F23, register_tile(kind, program.target.vector_bytes)
    lhs, rhs = x.operands
    channels, features = lhs.shape.dims[-1], rhs.shape.dims[-1]
    tiles_high, tiles_wide, tiles = _tiles(x)
    blocks_m, blocks_n = ceildiv(channels, ROWS), ceildiv(features, COLUMNS)
    rows = ceildiv(channels, blocks_m)
    columns = ceildiv(ceildiv(features, blocks_n), t.columns) * t.columns
    blocks_m, blocks_n = ceildiv(channels, rows), ceildiv(features, columns)
    height = ceildiv(rows, ceildiv(rows, t.rows))
    wanted = ceildiv(min(ITEMS_PER_CORE * program.target.cores, SPLITS), blocks_m * blocks_n)
    pieces = max(1, min(wanted, tiles // (2 * TILES)))
    tiles_each = ceildiv(ceildiv(tiles, pieces), TILES) * TILES
    pieces = ceildiv(tiles, tiles_each)
    lds = [ceildiv(n, t.columns) * t.columns + t.lanes for n in (rows, columns)]
    numbers = [
        tiles,
        tiles_each,
        channels,
        features,
        rows,
        columns,
        blocks_m,
        blocks_n,
        height,
        *lds,
    ]
    for o, stride, taps, pads in (
        (lhs, s.outputs, s.inputs, [w.pad_low for w in x["window"]]),
        (rhs, s.outputs, s.outputs, (0, 0)),
    ):
        steps = row_major_strides(o.shape.dims)
        numbers += [tiles, steps[0]]
        for i, (out, pad) in enumerate(zip((tiles_high, tiles_wide), pads, strict=True)):
            numbers += [out, o.shape.dims[1 + i], stride, pad, taps, 1, steps[1 + i]]
    turned = x["dim_labels"].endswith("fb01")
    weights = channels * features * s.taps**2
    target = program.pointer(x)
    inside = turned and pieces == 1
    to = program.at(program.scratch(weights * pieces * t.itemsize)) if pieces > 1 else target
    zeros = program.constant(bytes((max(channels, features) + t.lanes) * t.itemsize))
    key = (t, s, height, inside)
    name = program.once(
        ("winograd_gradient", *key),
        lambda: task(f"winograd_gradient_{t.suffix}_{height}{'t' * inside}", *key, program),
    )
    items = pieces * blocks_m * blocks_n
    pointers = [program.pointer(lhs), program.pointer(rhs), to, program.at(zeros)]
    program.parallel(
        name,
        [*(f"ptr {p}" for p in pointers), *(f"i64 {v}" for v in numbers)],
        str(items),
        cost=100 + tiles * 16 * channels * features / items / (1.5 * t.lanes),
    )
    if not inside:
        add_pieces(program, t, to, target, s.taps**2, channels, features, pieces, turned)
