"""ragged-dot: one matrix product per group, of as many rows (or as long a sum) as the group has.

The sizes of the groups are values that the program computes, so the products are those of a
symbolic program: a function of the block that reads its number of rows when it is called, in a loop
over the groups."""

from torch_hlo.hlo.ir import Instruction, Size, row_major_strides

from ..codegen import CodegenError, Place, Program
from ..simplify.legalize import expand_ragged_dot
from .dot import emit_tree
from .dot_product import emit_product
from .product import ACCUMULATORS, SOURCES, Product


def ragged_dot(program: Program, x: Instruction) -> None:
    lhs, rhs, sizes = x.operands
    kind = ACCUMULATORS[x.dtype][0]
    types = lhs.dtype, rhs.dtype
    if any((t, kind) not in SOURCES for t in types):
        return by_masks(program, x)
    if sizes.kind not in "su":
        raise CodegenError(
            f"ragged-dot({lhs.shape}, {rhs.shape}, {sizes.shape}): group sizes must be integers"
        )
    rows, start, group = (program.scratch(8) for _ in range(3))
    (ragged,) = x["lhs_ragged_dims"]
    limit = lhs.dims[ragged]
    with (
        program.local_size("rows", rows, limit) as count,
        program.block_function("ragged") as f,
    ):
        _product(
            program,
            x,
            count,
            f.load("i64", program.at(start)),
            f.load("i64", program.at(group)),
        )
    name = program.plan_function("ragged", f.text())
    _over_groups(program, sizes, program.size(limit), (rows, start, group), name)
    if ragged not in x["lhs_contracting_dims"]:
        _clear_rest(program, x, start)


def by_masks(program: Program, x: Instruction) -> None:
    """As ordinary products of masked operands."""
    emit_tree(program, expand_ragged_dot(x), x.operands, x)


def _product(program: Program, x: Instruction, count: Size, start: str, group: str) -> None:
    """The product of one group: `count` rows from `start` on."""
    lhs, rhs, _ = x.operands
    kind = ACCUMULATORS[x.dtype][0]
    f = program.code
    (ragged,) = x["lhs_ragged_dims"]
    (k_lhs,) = x["lhs_contracting_dims"]
    (k_rhs,) = x["rhs_contracting_dims"]
    a = row_major_strides(lhs.dims)
    b = row_major_strides(rhs.dims)
    m, n = x.dims[-2:]
    pointers = [program.pointer(o) for o in (lhs, rhs, x)]
    if ragged == k_lhs:
        offsets = (
            f.mul(start, program.size(a[ragged])),
            f.mul(start, program.size(b[k_rhs])),
            f.mul(group, program.size(m * n)),
        )
        p = Product(m, n, count, (a[1 - k_lhs], a[k_lhs]), (b[1 - k_rhs], b[k_rhs]), n, ())
    else:
        (of_group,) = x["rhs_group_dims"]
        (free,) = {0, 1, 2} - {of_group, k_rhs}
        offsets = (
            f.mul(start, program.size(a[ragged])),
            f.mul(group, program.size(b[of_group])),
            f.mul(start, program.size(n)),
        )
        p = Product(
            count,
            n,
            lhs.dims[k_lhs],
            (a[ragged], a[k_lhs]),
            (b[free], b[k_rhs]),
            n,
            (),
        )
    types = lhs.dtype, rhs.dtype
    elements = (*(SOURCES[t, kind].kind for t in types), kind)
    emit_product(
        program,
        p,
        kind,
        types,
        [f.gep(e, q, o) for e, q, o in zip(elements, pointers, offsets, strict=True)],
    )


def _over_groups(
    program: Program,
    sizes: Instruction,
    limit: str,
    places: tuple[Place, Place, Place],
    name: str,
) -> None:
    """Call `name` for every group. Groups end where the array ends, whatever the sizes say."""
    f = program.code
    rows, start, group = places
    bits = 8 * sizes.itemsize
    values = program.pointer(sizes)
    f.store("i64", 0, program.at(start))
    with f.loop(0, program.size(sizes.dims[0])) as g:
        size = f.load_at(f"i{bits}", values, g)
        if bits < 64:
            size = f.op(f"{'sext' if sizes.kind == 's' else 'zext'} i{bits} {size} to i64")
        begin = f.load("i64", program.at(start))
        here = f.max(0, f.min(size, f.sub(limit, begin)))
        f.store("i64", here, program.at(rows))
        f.store("i64", g, program.at(group))
        program.call(name, ["ptr %block"])
        f.store("i64", f.add(begin, here), program.at(start))


def _clear_rest(program: Program, x: Instruction, start: Place) -> None:
    """Rows that belong to no group are 0."""
    m, n = (program.size(d) for d in x.dims)
    f = program.code
    itemsize = x.itemsize
    begin = f.mul(f.load("i64", program.at(start)), f.mul(n, itemsize))
    count = f.sub(f.mul(f.mul(m, n), itemsize), begin)
    f.do(
        f"call void @llvm.memset.p0.i64(ptr {f.gep('i8', program.pointer(x), begin)}, i8 0, i64"
        f" {count}, i1 false)"
    )
