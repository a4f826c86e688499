"""Which block of which product a group of threads computes, for all product kernels: arguments of
the function, and their values.

A product is cut into blocks of C, and perhaps k into parts: groups of one block then each sum a
part to an array of their own, and a second kernel adds these in a fixed order, so results are the
same every time."""

from collections.abc import Callable, Sequence

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Size, ceildiv

from ...codegen import Writer, load_real
from ...codegen.index import exact
from ...gpu.gpu_program import GpuProgram
from ...gpu.gpu_writer import GpuWriter
from ...gpu.words import Words
from ...llvm import Int, scalar, signature
from ...llvm.scalar import STORAGE
from ...thresholds import BAND
from ..product import Product

SPLITS = (2, 3, 4, 6, 8, 12, 16)  # parts that k may be cut into
# element type that values of a kind are loaded and added as
REGISTER_TYPE = {"float": "f32", "double": "f64", "i32": "s32", "i64": "s64"}
# (row, first column, lanes, sums: a vector of so many, or a scalar); row and column are inside


@frozen
class Store:
    """`write(row, column, lanes, sums)` does the rest with neighbouring sums. `together`: rows that
    a thread finishes side by side, so that they wait for memory at the same time."""

    write: Callable[[Int, Int, int, str], None]
    together: int = 1

    def __call__(self, row: Int, column: Int, lanes: int, sums: str) -> None:
        self.write(row, column, lanes, sums)


@frozen
class Blocks:
    """`m` x `n` elements of C per group, `parts` of k, each a multiple of `depth`."""

    m: int
    n: int
    parts: int = 1
    depth: int = 1


def divides(number: int, sizes: Sequence[Size]) -> bool:
    """Whether all sizes are multiples for certain."""
    return all(exact(s, number) is not None for s in sizes)


def element(
    f: Writer,
    dtype: str,
    kind: str,
    pointer: str,
    at: Int,
    lanes: int = 1,
) -> list[str]:
    """`lanes` elements, aligned to their total, as values of register type `kind`."""
    storage = STORAGE[dtype]
    e = f.emit(lanes)
    value = load_real(f, dtype, pointer, at, lanes, align=storage.bytes * lanes)
    if storage.register != kind:
        value = scalar.single(scalar.convert(e, dtype, REGISTER_TYPE[kind], value))
    return e.typed(kind).unpacked(value)


def lanes_of(p: Product, itemsize: int) -> int:
    """Neighbouring elements of C that are written at a time, at most 16 bytes; rows and products
    are multiples."""
    return next(
        n
        for n in (8, 4, 2, 1)
        if n * itemsize <= 16 and divides(n, [p.n, p.c_m, *(entry[3] for entry in p.batch)])
    )


def parameters(batch: int, parts: int) -> list[str]:
    """Names of the i64 arguments of a kernel; strides are in elements. `k_each`, `c_part`: depth of
    a part of k, and elements between the parts' results."""
    names = [
        "m",
        "n",
        "k",
        "a_m",
        "a_k",
        "b_n",
        "b_k",
        "c_m",
        "across",
        "down",
        "tiles",
    ] + ["parts", "k_each", "c_part"] * (parts > 1)
    return names + [
        f"{q}{i}" for i in range(batch) for q in ("size", "batch_a", "batch_b", "batch_c")
    ]


def argument(name: str, batch: int, parts: int) -> int:
    """The number of a kernel's argument: the count of groups, A, B, C, then the parameters."""
    return "ABC".index(name) + 1 if name in "ABC" else 4 + parameters(batch, parts).index(name)


def writer(
    program: GpuProgram,
    name: str,
    batch: int,
    parts: int,
    more: Sequence[tuple[str, str]] = (),
) -> GpuWriter:
    """The function of a product's kernel: (lo, hi, A, B, C, parameters, more)."""
    names = parameters(batch, parts)
    return GpuWriter(
        program,
        f"{name}_{batch}{'_parts' * (parts > 1)}",
        [
            *signature("i64 lo, i64 hi"),
            *(("ptr", q) for q in "ABC"),
            *(("i64", q) for q in names),
            *more,
        ],
    )


def launch(
    program: GpuProgram,
    name: str,
    p: Product,
    cut: Blocks,
    pointers: Sequence[str],
    part: Size = 0,
    more: Sequence[str] = (),
) -> None:
    """Start the kernel of function `name`, made with `writer`. `part`: elements between the results
    of parts."""
    across = ceildiv(p.n, cut.n)
    down = ceildiv(p.m, cut.m)
    sizes = [p.m, p.n, p.k, *p.a, *p.b, p.c_m, across, down, across * down]
    if cut.parts > 1:
        sizes += [
            cut.parts,
            ceildiv(ceildiv(p.k, cut.parts), cut.depth) * cut.depth,
            part,
        ]
    sizes += [v for entry in p.batch for v in entry]
    arguments = [*program.arguments(pointers, sizes), *more]
    program.parallel(name, arguments, across * down * p.count * cut.parts)


@frozen
class Place:
    """Where a group works: its block's first row and column, the element offsets of A, B and C, the
    depth of its part of k, where that starts, and the indices of its product in the batch."""

    row: Int
    column: Int
    a: Int
    b: Int
    c: Int
    k: Int
    start: Int
    batch: tuple[Int, ...]


def place(f: Writer, cut: Blocks, batch: int) -> Place:
    """The block of group `%lo`. Neighbouring groups go down BAND blocks, then to the right."""
    w = Words(f)
    rest = f.div("%lo", "%tiles")
    number = w.narrow(f.rem("%lo", "%tiles"))
    across = w.narrow("%across")
    down = w.narrow("%down")
    band = w.mul(across, BAND)
    top = w.mul(w.div(number, band), BAND)
    inside = w.rem(number, band)
    height = w.min(w.sub(down, top), BAND)
    row = w.add(top, w.rem(inside, height))
    column = w.div(inside, height)
    offsets: list[Int] = [0, 0, 0]
    k: Int = "%k"
    before: Int = 0
    if cut.parts > 1:
        rest, part = f.div(rest, "%parts"), f.rem(rest, "%parts")
        before = f.mul(part, "%k_each")
        k = f.max(f.min(f.sub("%k", before), "%k_each"), 0)
        offsets = [
            f.mul(before, "%a_k"),
            f.mul(before, "%b_k"),
            f.mul(part, "%c_part"),
        ]
    indices: list[Int] = []
    for i in reversed(range(batch)):
        index = f.rem(rest, f"%size{i}") if i else rest
        indices.insert(0, index)
        rest = f.div(rest, f"%size{i}") if i else rest
        offsets = [
            f.muladd(index, f"%batch_{q}{i}", o) for o, q in zip(offsets, "abc", strict=True)
        ]
    a, b, c = offsets
    return Place(
        f.mul(w.wide(row), cut.m),
        f.mul(w.wide(column), cut.n),
        a,
        b,
        c,
        k,
        before,
        tuple(indices),
    )


def add_parts(
    program: GpuProgram,
    sums: str,
    result: str,
    total: Size,
    parts: int,
    wide: str,
    dtype: str,
) -> None:
    """The second kernel of a product cut in k: `sums` are `parts` arrays of `total` accumulators of
    type `wide`."""
    lanes = 4 if divides(4, [total]) else 1
    name = program.made(_sum_parts, wide, dtype, lanes)
    program.parallel(
        name,
        program.arguments((sums, result), (total, parts)),
        total // lanes,
    )


def store_sums(
    f: Writer, dtype: str, kind: str, lanes: int, sums: str, pointer: str, index: Int
) -> None:
    """`lanes` neighbouring accumulators as elements of `dtype` at `index`, aligned to their
    total."""
    storage = STORAGE[dtype]
    e = f.emit(lanes)
    value = (
        e.cast("trunc", sums, kind, storage.memory)
        if kind[0] == "i"
        else scalar.encode(e, dtype, sums)
    )
    e.typed(storage.memory).store(
        value, f.gep(storage.memory, pointer, index), storage.bytes * lanes
    )


def _sum_parts(program: GpuProgram, wide: str, dtype: str, lanes: int) -> str:
    """void(lo, hi, parts, c, size, count): c[i] = sum_p parts[p * size + i], in order, by vectors
    of `lanes`."""
    f = Writer(
        program,
        f"sum_parts_{wide}_{dtype}_{lanes}",
        "i64 lo, i64 hi, ptr parts, ptr c, i64 size, i64 count",
    )
    kind = STORAGE[wide].memory
    t = f.typed(kind, lanes)
    with f.loop("%lo", "%hi") as vector:
        i = f.mul(vector, lanes)
        with f.loop(0, "%count", carry=[(t.type, t.const(0))]) as part:
            value = t.load(
                f.gep(kind, "%parts", f.muladd(part.index, "%size", i)),
                STORAGE[wide].bytes * lanes,
            )
            part.next = [t.add(part.vars[0], value)]
        store_sums(f, dtype, kind, lanes, part.vars[0], "%c", i)
    return f.define()
