"""Gradient of the weights of 3x3 convolutions with stride 1 by minimal filtering: see
conv_winograd.py.

    lhs f01b (X), rhs i01o (Y), result 01bf or fb01, as in conv_gradient.py

An item of work is a piece of the tiles and a block of the weights: the sums of its 16 products stay
in L2 while blocks of tiles are transformed and added, and become 9 taps at the end. Pieces are
added afterwards, in order. A block that is in one piece is turned to fb01, the order of PyTorch's
weights, on its way to memory.
"""

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction, Size, ceildiv, fixed, round_up

from ..codegen import Program
from ..llvm import Function, Int, item_parameters
from ..matmul.dot_product import SPLITS
from ..matmul.tile import Tile
from ..thresholds import (
    CONV_MULTIPLY_NS,
    GRADIENT_TILES,
    ITEMS_PER_CORE,
    WINOGRAD_MULTIPLY_NS,
    WINOGRAD_PASS_NS,
    WINOGRAD_TAPS_NS,
)
from .conv_direct import POINTERS, geometry, register_tile, tile_pointers
from .conv_gradient import ENTRY, add_pieces, is_gradient, micro, turn
from .conv_pack import static_dims
from .conv_winograd import (
    F23,
    Filtering,
    applies,
    define,
    points_at,
    tile_geometry,
    transform,
    transform_inputs,
    transposed,
)

ROWS = 64  # weights of an item: sums of 512 KB
COLUMNS = 128
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
    """void(M, plane, ldm, rows, cols, C, ldc, tap_step): C[tap][row][column] = (G' m G)[tap], m[i]
    = M[i][row][column], of `rows` rows and `cols` columns."""
    params = "ptr M, i64 plane, i64 ldm, i64 rows, i64 cols, ptr C, i64 ldc, i64 tap_step"
    f = Function(name, params, attrs="noinline #0")
    with f.loop(0, "%rows") as row, f.loop(0, "%cols", t.lanes) as column:
        mask = f.lane_mask(t.lanes, column, "%cols")
        at = t.gep(f, "%M", f.muladd(row, "%ldm", column))
        made = transform(f, t, transposed(s.G), points_at(f, t, at, s.inputs))
        to = t.gep(f, "%C", f.muladd(row, "%ldc", column))
        for i, v in enumerate(v for row_of_taps in made for v in row_of_taps):
            t.store(
                f,
                v,
                t.gep(f, to, f.mul("%tap_step", i)),
                mask,
            )
    return f


def task(
    program: Program,
    name: str,
    t: Tile,
    s: Filtering,
    height: int,
    turned: bool,
) -> str:
    """Items (piece of the tiles, block of rows, block of columns): void(lo, hi, X, Y, C, zeros,
    NUMBERS…, geometry of X…, geometry of Y…). `turned`: C is [feature][channel][tap], else
    [piece][tap][channel][feature]."""
    params = item_parameters(("X", "Y", "C", "zeros"), NUMBERS)
    f = Function(name, [*params, *both("x"), *both("y")])
    find = define(program, tile_pointers, f"tile_pointers_{t.kind}_2", t.kind, 2)
    of_x = define(program, transform_inputs, f"winograd_inputs_{t.suffix}", t, s.B)
    of_y = define(program, transform_inputs, f"winograd_results_{t.suffix}", t, transposed(s.A))
    label = f"conv_gradient_{t.suffix}_{height}x{t.vectors}w"
    kernel = define(program, micro, label, t, height, True)
    store = define(program, store_taps, f"winograd_taps_{t.suffix}", t, s)
    points = s.inputs**2
    P = f.alloca("ptr", points * POINTERS, 64)
    run = f.alloca("i64", ENTRY, 64)
    planes = f.mul(GRADIENT_TILES, "%ldv"), f.mul(GRADIENT_TILES, "%ldz")
    V, Z = (f.op(f"alloca {t.kind}, i64 {f.mul(plane, points)}, align 64") for plane in planes)
    ldm = f.round_up("%columns", t.columns)
    m_plane = f.mul(f.round_up("%rows", height), ldm)
    M = f.op(f"alloca {t.kind}, i64 {f.mul(m_plane, points)}, align 64")
    here = turning = ""
    if turned:
        size = f.mul(f.mul("%rows", ldm), s.taps**2)
        here = f.op(f"alloca {t.kind}, i64 {size}, align 64")
        turning = define(program, turn, f"turn_{t.suffix}", t)
    weights = f.mul("%channels", "%features")
    at = _Item(f, t, s, height, P, run, (V, Z), planes, M, m_plane, ldm)
    with f.items() as item:
        rest = f.div(item, "%blocks_n")
        n0 = f.mul(f.rem(item, "%blocks_n"), "%columns")
        piece = f.div(rest, "%blocks_m")
        m0 = f.mul(f.rem(rest, "%blocks_m"), "%rows")
        rows = f.min(f.sub("%channels", m0), "%rows")
        cols = f.min(f.sub("%features", n0), "%columns")
        t0, t1 = f.part(piece, "%tiles_each", "%tiles")
        with f.loop(t0, t1, GRADIENT_TILES) as tile:
            count = f.min(f.sub(t1, tile), GRADIENT_TILES)
            at.transform("x", find, of_x, tile, count, m0, rows)
            at.transform("y", find, of_y, tile, count, n0, cols)
            f.store_at("i64", count, run, 2)
            at.multiply(kernel, f.icmp("ne", tile, t0), rows, cols)
        if turned:
            at.store_turned(store, turning, here, rows, cols, m0, n0)
        else:
            in_piece = f.mul(f.mul(piece, weights), s.taps**2)
            c = t.gep(f, "%C", f.add(in_piece, f.muladd(m0, "%features", n0)))
            steps = "i64 %features", f"i64 {weights}"
            f.call(store, *at.sums(rows, cols), f"ptr {c}", *steps)
    return program.define(f)


@frozen
class _Item:
    """An item's memory: pointers, a run for the micro-kernel, the transformed tiles of X and Y, a
    plane per point, and their products M."""

    f: Function
    t: Tile
    s: Filtering
    height: int
    pointers: str
    run: str
    transformed: tuple[str, str]
    planes: tuple[Int, Int]
    M: str
    m_plane: Int
    ldm: Int

    def transform(
        self,
        what: str,
        find: str,
        make: str,
        tile: Int,
        count: Int,
        first: Int,
        many: Int,
    ) -> None:
        """Transform `count` tiles of X or Y from `tile` on, `many` channels from `first` on."""
        f = self.f
        t = self.t
        side = "xy".index(what)
        to = self.transformed[side]
        plane = self.planes[side]
        ld = ("%ldv", "%ldz")[side]
        source = t.gep(f, f"%{what.upper()}", first)
        with f.loop(0, count, POINTERS) as i:
            table = f"ptr {self.pointers}"
            numbers = (f"i64 %{q}" for _, q in both(what))
            pixel = f"i64 {f.add(tile, i)}"
            f.call(find, f"ptr {source}", "ptr %zeros", pixel, table, *numbers)
            f.call(
                make,
                table,
                f"i64 {f.min(f.sub(count, i), POINTERS)}",
                f"i64 {many}",
                f"ptr {t.gep(f, to, f.mul(i, ld))}",
                f"i64 {ld}",
                f"i64 {plane}",
            )

    def multiply(self, kernel: str, more: str, rows: Int, cols: Int) -> None:
        """M, point by point, added to what is there when `more`."""
        f = self.f
        t = self.t
        with f.loop(0, self.s.inputs**2) as point:
            for i, (to, plane) in enumerate(zip(self.transformed, self.planes, strict=True)):
                place = t.gep(f, to, f.mul(point, plane))
                f.store("ptr", place, f.gep("i64", self.run, i))
            m = t.gep(f, self.M, f.mul(point, self.m_plane))
            with f.loop(0, rows, self.height) as r, f.loop(0, cols, t.columns) as c:
                to = t.gep(f, m, f.muladd(r, self.ldm, c))
                f.call(
                    kernel,
                    f"ptr {self.run}",
                    "i64 1",
                    f"i64 {r}",
                    f"i64 {c}",
                    "i64 %ldv",
                    "i64 %ldz",
                    f"ptr {to}",
                    f"i64 {self.ldm}",
                    f"i64 {t.columns}",
                    f"i1 {more}",
                )

    def sums(self, rows: Int, cols: Int) -> list[str]:
        sizes = (f"i64 {v}" for v in (self.m_plane, self.ldm, rows, cols))
        return [f"ptr {self.M}", *sizes]

    def store_turned(
        self,
        store: str,
        turning: str,
        here: str,
        rows: Int,
        cols: Int,
        m0: Int,
        n0: Int,
    ) -> None:
        """The taps by way of the memory `here`, turned to [feature][channel][tap]."""
        f = self.f
        t = self.t
        taps = self.s.taps**2
        steps = f"i64 {self.ldm}", f"i64 {f.mul(rows, self.ldm)}"
        f.call(store, *self.sums(rows, cols), f"ptr {here}", *steps)
        c = t.gep(f, "%C", f.mul(f.muladd(n0, "%channels", m0), taps))
        f.call(
            turning,
            "i64 0",
            f"i64 {f.ceildiv(cols, t.lanes)}",
            f"ptr {here}",
            f"ptr {c}",
            f"i64 {taps}",
            f"i64 {rows}",
            f"i64 {cols}",
            "i64 1",
            f"i64 {self.ldm}",
            f"i64 {f.mul('%channels', taps)}",
        )


def _tiles(x: Instruction) -> tuple[int, int, int]:
    """How many rows and columns of tiles an image of Y has, and how many tiles there are."""
    high, wide = (ceildiv(fixed(w.size), F23.outputs) for w in x["window"])
    return high, wide, static_dims(x.operand)[0] * high * wide


def is_winograd_gradient(x: Instruction) -> bool:
    """Whether a convolution has the form that `emit_winograd_gradient` takes, and is faster that
    way; in ns on one core."""
    if not is_gradient(x) or not applies(x) or x["batch_group_count"] != 1 or len(x["window"]) != 2:
        return False
    taps = x.dims[2:] if x["dim_labels"].endswith("fb01") else x.dims[:2]
    if taps != (F23.taps,) * 2 or any(w.stride != 1 or w.window_dilation != 1 for w in x["window"]):
        return False
    channels, features = (static_dims(o)[-1] for o in x.operands)
    tiles = _tiles(x)[2]
    weights = channels * features
    pixels = static_dims(x.operand)[0] * x["window"][0].size * x["window"][1].size
    passes = ceildiv(features, COLUMNS) * channels + ceildiv(channels, ROWS) * features
    return bool(
        weights * (tiles * 16 * WINOGRAD_MULTIPLY_NS + WINOGRAD_TAPS_NS)
        + tiles * 16 * passes * WINOGRAD_PASS_NS
        < pixels * 9 * weights * CONV_MULTIPLY_NS
    )


def emit_winograd_gradient(program: Program, x: Instruction, kind: str) -> None:
    """Emit a convolution for which `is_winograd_gradient` holds."""
    s = F23
    t = register_tile(kind, program.target.vector_bytes)
    lhs, rhs = x.operands
    channels = static_dims(lhs)[-1]
    features = static_dims(rhs)[-1]
    tiles_high, tiles_wide, tiles = _tiles(x)
    blocks_m = ceildiv(channels, ROWS)
    blocks_n = ceildiv(features, COLUMNS)
    rows = ceildiv(channels, blocks_m)
    columns = round_up(ceildiv(features, blocks_n), t.columns)
    blocks_m = ceildiv(channels, rows)
    blocks_n = ceildiv(features, columns)
    height = ceildiv(rows, ceildiv(rows, t.rows))
    wanted = ceildiv(min(ITEMS_PER_CORE * program.target.cores, SPLITS), blocks_m * blocks_n)
    pieces = max(1, min(wanted, tiles // (2 * GRADIENT_TILES)))
    tiles_each = round_up(ceildiv(tiles, pieces), GRADIENT_TILES)
    pieces = ceildiv(tiles, tiles_each)
    lds = [round_up(n, t.columns) + t.lanes for n in (rows, columns)]
    numbers: list[Size] = [
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
    pads = [w.pad_low for w in x["window"]]
    for o, pad, taps in ((lhs, pads, s.inputs), (rhs, [0, 0], s.outputs)):
        numbers += tile_geometry(o, s, (tiles_high, tiles_wide, tiles), pad, taps)
    turned = x["dim_labels"].endswith("fb01")
    weights = channels * features * s.taps**2
    target = program.pointer(x)
    inside = turned and pieces == 1
    to = program.at(program.scratch(weights * pieces * t.itemsize)) if pieces > 1 else target
    zeros = program.constant(bytes((max(channels, features) + t.lanes) * t.itemsize))
    label = f"winograd_gradient_{t.suffix}_{height}{'t' * inside}"
    name = program.made(task, label, t, s, height, inside)
    items = pieces * blocks_m * blocks_n
    pointers = [program.pointer(lhs), program.pointer(rhs), to, program.at(zeros)]
    program.parallel(
        name,
        program.arguments(pointers, numbers),
        items,
        cost=100 + tiles * 16 * channels * features / items / (1.5 * t.lanes),
    )
    if not inside:
        add_pieces(program, t, to, target, s.taps**2, channels, features, pieces, turned)
