"""3x3 convolutions with stride 1, channels last, by minimal filtering: F(2x2, 3x3) takes 16
multiplications for four outputs, the definition 36.

With d a tile of 4x4 inputs, g the 3x3 kernel and y the tile of 2x2 outputs (Winograd, Arithmetic
Complexity of Computations, 1980; Lavin and Gray, Fast Algorithms for Convolutional Neural Networks,
2016):

    y = A' [(G g G') * (B' d B)] A                     summed over channels before A: 16 matrix
        products of [tiles, channels] x [channels, features]
    dg = G' [(B' d B) * (A dy A')] G                   the gradient of the kernel, summed over tiles
        before G: 16 products [channels, tiles] x [tiles, features]

The matrices hold 0, 1 and 1/2, so sums and halves are all that is added to the products; measured
errors are those of the direct kernels (larger tiles multiply less but lose digits). An item of work
is a run of tiles: their transforms stay in L2 while panels of the kernel pass.

    for each 16 tiles: find the pointers, transform the inputs         V[16][tile][channel]
    for each panel of features: 16 products                            M[16][tile][columns]
                                transform back, finish (epilogue)      pixels of the result
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from torch_hlo import config
from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction, Size, ceildiv, product, round_up, row_major_strides

from ..codegen import Program
from ..llvm import Function, Int, item_parameters, literal
from ..matmul.dot_task import Finish
from ..matmul.epilogue import Epilogue
from ..matmul.tile import (
    Tile,
)
from ..thresholds import (
    CONV_MULTIPLY_NS,
    ITEMS_PER_CORE,
    WINOGRAD_FAR_BYTES,
    WINOGRAD_FAR_NS,
    WINOGRAD_KERNEL_NS,
    WINOGRAD_MULTIPLY_NS,
    WINOGRAD_TILE_NS,
    WINOGRAD_TILES,
    WINOGRAD_V_BYTES,
)
from .conv_direct import POINTERS, geometry, is_direct, micro, register_tile, tile_pointers
from .conv_pack import packing, static_dims

Matrix = tuple[tuple[float, ...], ...]


@frozen
class Filtering:
    """F(outputs, taps) of one dimension; `inputs` = outputs + taps - 1 points."""

    outputs: int
    taps: int
    B: Matrix  # B' [inputs, inputs]: what is done to inputs
    G: Matrix  # [inputs, taps]: to kernels
    A: Matrix  # A' [outputs, inputs]: to products

    @property
    def inputs(self) -> int:
        return self.outputs + self.taps - 1


F23 = Filtering(
    2,
    3,
    B=((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
    G=((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1)),
    A=((1, 1, 1, 0), (0, 1, -1, -1)),
)
CHAIN = 256  # products that are added one after the other
NUMBERS = (
    "tiles",
    "tiles_each",
    "channels",
    "ldv",
    "features",
    "columns_each",
    "blocks_n",
    "ldc",
    "high",
    "wide",
    "tiles_high",
    "tiles_wide",
)


def transposed(m: Matrix) -> Matrix:
    return tuple(zip(*m, strict=True))


def combine(
    f: Function,
    t: Tile,
    m: Matrix,
    values: Sequence[str],
) -> list[str]:
    """The product of a small matrix and a column of vectors."""
    found = []
    for row in m:
        total = ""
        for factor, v in sorted(zip(row, values, strict=True), key=lambda pair: -pair[0]):
            if factor == 0:
                continue
            if abs(factor) != 1:
                v = f.op(
                    f"fmul {t.vector} {v}, {f.splat(t.kind, t.lanes, literal(t.kind, abs(factor)))}"
                )
            if total:
                total = f.op(f"{'fadd' if factor > 0 else 'fsub'} {t.vector} {total}, {v}")
            else:
                total = v if factor > 0 else f.op(f"fneg {t.vector} {v}")
        found.append(total)
    return found


def transform(
    f: Function,
    t: Tile,
    m: Matrix,
    square: list[list[str]],
) -> list[list[str]]:
    """m s m' for a square of vectors."""
    columns = [combine(f, t, m, column) for column in zip(*square, strict=True)]
    return [combine(f, t, m, row) for row in zip(*columns, strict=True)]


def transform_inputs(name: str, t: Tile, m: Matrix) -> Function:
    """void(P, count, channels, V, ldv, plane): V[i][tile][c] = (m d m')[i], d[r] of tile number n
    read at P[r][n] for n < count. Rows of V end in zeros."""
    params = "ptr P, i64 count, i64 channels, ptr V, i64 ldv, i64 plane"
    f = Function(name, params, attrs="noinline #0")
    n = len(m[0])
    with f.loop(0, "%count", known_nonempty=True) as tile:
        row = f.gep("ptr", "%P", tile)
        pointers = [f.load_at("ptr", row, r * POINTERS) for r in range(n * n)]
        to = t.gep(f, "%V", f.mul(tile, "%ldv"))

        for c, mask in f.vectors_of(t.lanes, 0, "%channels"):
            places = [t.gep(f, p, c) for p in pointers]
            values = [t.load(f, p, mask) for p in places]
            made = transform(f, t, m, [values[r * n : r * n + n] for r in range(n)])
            at = t.gep(f, to, c)
            for i, v in enumerate(v for row in made for v in row):
                t.store(f, v, t.gep(f, at, f.mul("%plane", i)))
    return f


def transform_outputs(name: str, t: Tile, s: Filtering) -> Function:
    """void(M, plane, count, to, ld, row_step, cols, wide, high): pixel (r, outputs * n + c) at to +
    r * row_step + (outputs * n + c) * ld is (A' m A)[r][c] of tile number n < count, for r < high,
    outputs * n + c < wide; `cols` columns are valid."""
    params = (
        "ptr M, i64 plane, i64 count, ptr to, i64 ld, i64 row_step, i64 cols, i64 wide, i64 high"
    )
    f = Function(name, params, attrs="noinline #0")
    n = s.inputs
    masks = t.masks(f, "%cols")

    def only(condition: str, mask: str) -> str:
        return f.op(
            f"select i1 {condition}, <{t.lanes} x i1> {mask}, <{t.lanes} x i1> zeroinitializer"
        )

    inside = [[only(f.icmp("sgt", "%high", r), m) for m in masks] for r in range(s.outputs)]
    with f.loop(0, "%count", known_nonempty=True) as tile:
        first = f.mul(tile, s.outputs)
        right = [f.icmp("slt", f.add(first, c), "%wide") for c in range(s.outputs)]
        for j in range(t.vectors):
            at = t.gep(f, "%M", f.muladd(tile, t.columns, j * t.lanes))
            made = transform(f, t, s.A, points_at(f, t, at, n))
            for r, row in enumerate(made):
                for c, v in enumerate(row):
                    place = t.gep(
                        f,
                        "%to",
                        f.muladd(f.add(first, c), "%ld", f.muladd("%row_step", r, j * t.lanes)),
                    )
                    t.store(
                        f,
                        v,
                        place,
                        only(right[c], inside[r][j]) if c else inside[r][j],
                    )
    return f


def points_at(
    f: Function,
    t: Tile,
    at: str,
    n: int,
) -> list[list[str]]:
    """The n x n points of a vector of tiles, %plane apart."""
    values = [t.load(f, t.gep(f, at, f.mul("%plane", i))) for i in range(n * n)]
    return [values[r * n : r * n + n] for r in range(n)]


def transform_kernel(name: str, t: Tile, s: Filtering) -> Function:
    """void(lo, hi, packed, U, features, depth): panels [lo, hi) of a packed kernel
    [panel][tap][channel][columns] -> [panel][point][channel][columns]."""
    f = Function(
        name,
        "i64 lo, i64 hi, ptr packed, ptr U, i64 features, i64 depth",
    )
    lanes = f.round_up("%features", t.lanes)
    with f.items() as panel:
        first = f.mul(panel, t.columns)
        size = f.mul(f.min(f.sub(lanes, first), t.columns), "%depth")  # of one tap
        start = f.mul(first, "%depth")
        source = t.gep(f, "%packed", f.mul(start, s.taps**2))
        target = t.gep(f, "%U", f.mul(start, s.inputs**2))
        with f.loop(0, size, t.lanes) as at:
            taps = [t.load(f, t.gep(f, source, f.muladd(size, i, at))) for i in range(s.taps**2)]
            made = transform(
                f,
                t,
                s.G,
                [taps[r * s.taps : (r + 1) * s.taps] for r in range(s.taps)],
            )
            for i, v in enumerate(v for row in made for v in row):
                t.store(f, v, t.gep(f, target, f.muladd(size, i, at)))
    return f


def define(program: Program, make: Callable[..., Function], name: str, *arguments: Hashable) -> str:
    """The name of the function `make(name, *arguments)`, defined in `program`."""
    key = "define", name, *arguments
    defined: str = program.once(key, lambda: program.function(name, make(name, *arguments).text()))
    return defined


def task(
    program: Program,
    name: str,
    t: Tile,
    s: Filtering,
    height: int,
    odd: bool,
    epilogue: Epilogue | None,
) -> str:
    """Items (block of tiles, block of columns): void(lo, hi, X, U, C, zeros, NUMBERS…, geometry…,
    the epilogue's). `odd`: the last panel is one vector wide. With an epilogue C is not used.
    Returns the name, its functions defined in `program`."""
    params = [*item_parameters(("X", "U", "C", "zeros"), NUMBERS), *geometry(2)]
    f = Function(name, params + list(epilogue.parameters if epilogue else ()))
    find, rows_of = (
        define(program, tile_pointers, f"tile_pointers_{t.kind}_{d}", t.kind, d) for d in (2, 0)
    )
    inputs = define(program, transform_inputs, f"winograd_inputs_{t.suffix}", t, s.B)
    outputs = define(program, transform_outputs, f"winograd_outputs_{t.suffix}", t, s)
    points = s.inputs**2
    P = f.alloca("ptr", points * POINTERS, 64)
    plane = f.mul("%tiles_each", "%ldv")
    V = f.op(f"alloca {t.kind}, i64 {f.mul(plane, points)}, align 64")
    m_plane = f.mul("%tiles_each", t.columns)
    # the last rows of a plane are a whole tile's: what is too much comes before the next plane
    M = f.op(f"alloca {t.kind}, i64 {f.muladd(m_plane, points, height * t.columns)}, align 64")
    sums = ""
    if epilogue:
        sums = f.op(f"alloca {t.kind}, i64 {f.mul(m_plane, s.outputs**2)}, align 64")
    lanes = f.round_up("%features", t.lanes)
    at = _Item(program, f, t, s, height, odd, epilogue, P, V, plane, M, m_plane, sums)
    with f.items() as item:
        t0, t1 = f.part(f.div(item, "%blocks_n"), "%tiles_each", "%tiles")
        count = f.sub(t1, t0)
        n0, n1 = f.part(f.rem(item, "%blocks_n"), "%columns_each", "%features")
        at.transform_inputs(find, inputs, t0, count)
        with f.loop(n0, n1, t.columns) as j:
            cols = f.sub(n1, j)
            size = f.mul(f.min(f.sub(lanes, j), t.columns), "%channels")
            panel = t.gep(f, "%U", f.mul(f.mul(j, "%channels"), points))
            at.multiply(rows_of, count, cols, panel, size)
            at.transform_back(outputs, t0, t1, j, cols)
    return program.define(f)


@frozen
class _Item:
    """An item's memory: pointers, transformed inputs V and products M of its tiles, a `plane` per
    point, the results before the epilogue."""

    program: Program
    f: Function
    t: Tile
    s: Filtering
    height: int
    odd: bool
    epilogue: Epilogue | None
    pointers: str
    V: str
    plane: Int
    M: str
    m_plane: Int
    sums: str

    def transform_inputs(self, find: str, inputs: str, t0: Int, count: Int) -> None:
        """V of `count` tiles from tile `t0` on."""
        f = self.f
        with f.loop(0, count, POINTERS) as i:
            tile = f.add(t0, i)
            numbers = (f"i64 %{q}" for _, q in geometry(2))
            table = f"ptr {self.pointers}"
            f.call(find, "ptr %X", "ptr %zeros", f"i64 {tile}", table, *numbers)
            to = self.t.gep(f, self.V, f.mul(i, "%ldv"))
            f.call(
                inputs,
                f"ptr {self.pointers}",
                f"i64 {f.min(f.sub(count, i), POINTERS)}",
                "i64 %channels",
                f"ptr {to}",
                "i64 %ldv",
                f"i64 {self.plane}",
            )

    def multiply(
        self,
        rows_of: str,
        count: Int,
        cols: Int,
        panel: str,
        size: Int,
    ) -> None:
        """M, the product of V and a panel, of whose points each has `size` elements."""
        f = self.f
        t = self.t
        height = self.height
        with (
            f.loop(0, self.s.inputs**2) as point,
            f.loop(0, "%channels", CHAIN) as first,
            f.loop(0, count, height) as row,
        ):
            x = t.gep(f, self.V, f.muladd(point, self.plane, first))
            f.call(
                rows_of,
                f"ptr {x}",
                "ptr %zeros",
                f"i64 {row}",
                f"ptr {self.pointers}",
                f"i64 {count}",
                "i64 %ldv",
            )
            at = f.muladd(point, self.m_plane, f.mul(row, t.columns))
            to = t.gep(f, self.M, at)

            def products(vectors: int) -> None:
                name = f"conv_micro_{t.suffix}_{height}x{vectors}"
                kernel = define(self.program, micro, name, t, height, vectors, False)
                start = f.muladd(point, size, f.mul(first, vectors * t.lanes))
                f.call(
                    kernel,
                    f"ptr {self.pointers}",
                    f"ptr {t.gep(f, panel, start)}",
                    "i64 1",
                    f"i64 {f.min(f.sub('%channels', first), CHAIN)}",
                    "i64 0",
                    f"ptr {to}",
                    f"i64 {t.columns}",
                    f"i64 {vectors * t.lanes}",
                    f"i1 {f.icmp('ne', first, 0)}",
                )

            if self.odd:
                f.choose(
                    f.icmp("sgt", cols, t.lanes),
                    lambda: products(t.vectors),
                    lambda: products(1),
                )
            else:
                products(t.vectors)

    def transform_back(
        self,
        outputs: str,
        t0: Int,
        t1: Int,
        j: Int,
        cols: Int,
    ) -> None:
        """The pixels of the tiles [t0, t1), a run of tiles of one row of an image at a time."""
        f = self.f
        t = self.t
        s = self.s
        with f.while_([("i64", str(t0))]) as runs:
            (tile,) = runs.vars
            f.break_if(runs, f.icmp("sge", tile, t1))
            tile_row, left = f.divmod(tile, "%tiles_wide")
            run = f.min(f.sub(t1, tile), f.sub("%tiles_wide", left))
            image = f.div(tile_row, "%tiles_high")
            y = f.mul(f.rem(tile_row, "%tiles_high"), s.outputs)
            x = f.mul(left, s.outputs)
            high = f.min(f.sub("%high", y), s.outputs)
            wide = f.min(f.sub("%wide", x), f.mul(run, s.outputs))
            pixel = f.muladd(f.muladd(image, "%high", y), "%wide", x)
            source = t.gep(f, self.M, f.mul(f.sub(tile, t0), t.columns))
            ld: Int
            if self.epilogue is None:
                to = t.gep(f, "%C", f.muladd(pixel, "%ldc", j))
                ld = "%ldc"
                row_step = f.mul("%wide", "%ldc")
                valid = cols
            else:
                to = self.sums
                ld = t.columns
                row_step = f.mul(wide, t.columns)
                valid = t.columns
            sizes = (f"i64 {v}" for v in (ld, row_step, valid, wide, high))
            plane = f"i64 {self.m_plane}"
            count = f"i64 {run}"
            f.call(outputs, f"ptr {source}", plane, count, f"ptr {to}", *sizes)
            if self.epilogue is not None:
                self.finish(self.epilogue, pixel, wide, high, j, cols)
            runs.next = [str(f.add(tile, run))]

    def finish(
        self, epilogue: Epilogue, pixel: Int, wide: Int, high: Int, j: Int, cols: Int
    ) -> None:
        """The epilogue on pixels; whole rows of an image follow each other."""
        f = self.f
        t = self.t
        each = f.select(f.icmp("eq", wide, "%wide"), "i64", f.mul(high, wide), wide)
        with f.loop(0, f.mul(high, wide), each) as done:
            at = f.muladd(f.div(done, each), "%wide", pixel)
            valid = f.min(cols, t.columns)
            sums = t.gep(f, self.sums, f.mul(done, t.columns))
            epilogue.call(f, at, each, j, valid, sums, t.columns)


def _tiles(x: Instruction, s: Filtering) -> tuple[int, int, int]:
    """How many rows and columns of tiles an image has, and how many tiles there are."""
    images, *sizes, _ = static_dims(x)
    high, wide = (ceildiv(n, s.outputs) for n in sizes)
    return high, wide, images * high * wide


def tile_geometry(
    x: Instruction, s: Filtering, tiles: tuple[int, int, int], pads: Sequence[Size], taps: int
) -> list[Size]:
    """The values of `geometry(2)` for tiles of an image, `taps` wide."""
    *counts, every = tiles
    steps = row_major_strides(x.dims)
    numbers: list[Size] = [every, steps[0]]
    for i, (count, pad) in enumerate(zip(counts, pads, strict=True), 1):
        numbers += [count, x.dims[i], s.outputs, pad, taps, 1, steps[i]]
    return numbers


def applies(x: Instruction) -> bool:
    """Whether element type and sizes allow minimal filtering."""
    return (
        bool(config.get("WINOGRAD"))
        and x.dtype == "f32"
        and x.is_static
        and all(o.is_static for o in x.operands)
    )


def is_winograd(x: Instruction) -> bool:
    """Whether a convolution has the form that `emit_winograd` takes, and is faster that way. The
    estimate, in ns on one core, counts products at equal rates, the passes over tiles and over the
    kernel, and the reads of a kernel that does not stay near."""
    if not is_direct(x) or not applies(x):
        return False
    plain = all(w.size == F23.taps and w.stride == w.window_dilation == 1 for w in x["window"])
    if len(x["window"]) != 2 or not plain or x["feature_group_count"] * x["batch_group_count"] != 1:
        return False
    channels = static_dims(x.operand)[-1]
    features = static_dims(x)[-1]
    tiles = _tiles(x, F23)[2]
    weights = channels * features
    direct = product(static_dims(x)[:-1]) * 9 * weights * CONV_MULTIPLY_NS
    far = weights * 16 * x.itemsize > WINOGRAD_FAR_BYTES
    return (
        weights * (tiles * (16 * WINOGRAD_MULTIPLY_NS + far * WINOGRAD_FAR_NS) + WINOGRAD_KERNEL_NS)
        + tiles * 16 * (channels + features) * WINOGRAD_TILE_NS
        < direct
    )


def emit_winograd(
    program: Program, x: Instruction, kind: str, finish: Finish | None = None
) -> None:
    """Emit a convolution for which `is_winograd` holds, or what `finish` makes of it."""
    s = F23
    t = register_tile(kind, program.target.vector_bytes)
    lhs = x.operand
    channels = static_dims(lhs)[-1]
    features = static_dims(x)[-1]
    points = s.inputs**2
    tiles_high, tiles_wide, tiles = _tiles(x, s)
    panels = ceildiv(features, t.columns)
    U = _transformed_kernel(program, x, t, s)
    # rows a power of two apart would share few sets of L1
    ldv = round_up(channels, t.lanes) + t.lanes
    most = max(t.rows, min(WINOGRAD_TILES, WINOGRAD_V_BYTES // (points * ldv * t.itemsize)))
    work = tiles * points * channels * features
    wanted = min(ITEMS_PER_CORE * program.target.cores, max(1, work >> 21))
    blocks = max(ceildiv(tiles, most), min(wanted, tiles // (2 * t.rows)), 1)
    tiles_each = ceildiv(tiles, blocks)
    blocks = ceildiv(tiles, tiles_each)
    height = ceildiv(tiles_each, ceildiv(tiles_each, t.rows))
    blocks_n = min(max(1, wanted // blocks), panels)
    columns_each = ceildiv(panels, blocks_n) * t.columns
    blocks_n = ceildiv(features, columns_each)
    odd = ceildiv(features, t.lanes) % 2 == 1 and t.vectors == 2
    epilogue = finish.epilogue if finish else None
    label = f"winograd_{height}{'o' * odd}{'' if not epilogue else '_' + epilogue.name}"
    name = program.made(task, label, t, s, height, odd, epilogue)
    numbers: list[Size] = [
        tiles,
        tiles_each,
        channels,
        ldv,
        features,
        columns_each,
        blocks_n,
        features,
    ]
    pads = [w.pad_low for w in x["window"]]
    numbers += [*x.dims[1:-1], tiles_high, tiles_wide]
    numbers += tile_geometry(lhs, s, (tiles_high, tiles_wide, tiles), pads, s.inputs)
    zeros = program.constant(bytes((channels + t.lanes) * t.itemsize))
    pointers = program.pointer(lhs), U, "null" if finish else program.pointer(x), zeros
    texts = program.arguments(pointers, numbers)
    texts += finish.arguments if finish else ()
    items = blocks * blocks_n
    program.parallel(name, texts, items, cost=100 + work / items / (1.5 * t.lanes))


def _transformed_kernel(program: Program, x: Instruction, t: Tile, s: Filtering) -> str:
    """Emit the packing and the transform of the kernel; the pointer to it."""
    channels = static_dims(x.operand)[-1]
    features = static_dims(x)[-1]
    packed = packing(program, x, t, 1, features, s.taps**2, channels).everything(program)
    columns = round_up(features, t.lanes)
    U = program.at(program.scratch(columns * channels * s.inputs**2 * t.itemsize))
    name = define(program, transform_kernel, f"winograd_kernel_{t.suffix}", t, s)
    texts = program.arguments((packed, U), (features, channels))
    panels = ceildiv(features, t.columns)
    program.parallel(name, texts, panels, cost=10.0 * channels * t.columns / t.lanes)
    return U
