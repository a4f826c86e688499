"""Products on AMX tiles: which are for them, how they are cut, which operands are packed before."""

from dataclasses import replace

from torch_hlo.hlo.ir import Instruction, Size, ceildiv, fixed

from ..codegen import Program
from ..llvm import Target
from ..thresholds import (
    AMX_B_BYTES,
    AMX_COLUMNS,
    AMX_TURNED,
    K_SINGLE,
    K_TRANSPOSED,
)
from . import blocking
from .amx_kernels import BLOCK, STEP_BYTES, Element, element
from .dot_task import Finish, call_task, define, engine_task
from .gemm_amx import AmxGemm
from .product import Product, hint, types_of
from .tile import Tile


def on_amx(x: Instruction, target: Target, p: Product) -> bool:
    """Whether a dot is for AMX tiles: of their types, with enough rows and depth to pay."""
    if element(target, types_of(x)) is None or x.itemsize > 4:
        return False
    if all(isinstance(v, int) and v <= 16 for v in (p.m, p.n, p.k)):
        return False  # an eighth of a step
    return (
        isinstance(p.k, int)
        and p.k >= 16
        and not (isinstance(p.m, int) and p.m <= (4 if p.b[1] == 1 else 2))
        and p.n != 1
    )


def amx_form(strides: tuple[Size, Size]) -> str:
    """What is contiguous in an operand whose strides along its free dimension and along K are
    these."""
    return "k" if strides[1] == 1 else "lane" if strides[0] == 1 else "none"


def emit_on_amx(
    program: Program,
    x: Instruction,
    p: Product,
    pointers: list[str],
    finish: Finish | None,
    copy: str | None,
) -> bool:
    """Emit a dot on AMX tiles, with a packed `copy` of the right operand if there is one; False
    when it is not for them."""
    e = element(program.target, types_of(x))
    if e is None or not on_amx(x, program.target, p):
        return False
    transposed = copy is None and _is_transposed(p, e)
    forms = amx_form(p.a), amx_form(p.b)
    if transposed:
        p = replace(p, m=p.n, n=p.m, a=p.b, b=p.a)
        forms = forms[1], forms[0]
        pointers = [pointers[1], pointers[0], pointers[2]]
    cut, packed = _cut_amx(p, e, transposed, program.target.cores)
    if copy is not None:
        packed = (packed[0], True)
        pointers = [pointers[0], copy, pointers[2]]
    if finish is not None and fixed(p.k) > K_SINGLE and not packed[1]:
        return False  # sums of several blocks of K need an array
    engine = AmxGemm(
        e,
        *forms,
        packed,
        transposed,
        finish.epilogue if finish else None,
        in_rows=not packed[0] and forms[0] == "k" and _reads_tiles(p, e),
    )
    left, right, c = pointers
    if packed[0]:
        left = _packed(program, engine, 0, left, p.m, p.a, p.k)
    if packed[1] and copy is None:
        right = _packed(program, engine, 1, right, p.n, p.b, p.k)
    if packed[1]:
        p = replace(p, b=(p.n, 1))
    kinds = e.kind, e.kind, e.sums
    name = program.once(
        ("dot", engine.name, len(p.batch)),
        lambda: engine_task(program, engine, kinds, len(p.batch), True),
    )
    call_task(program, name, p, cut, [left, right, c], finish, e.ns)
    return True


def _is_transposed(p: Product, e: Element) -> bool:
    """Whether a product is computed transposed: its left operand fits L2 and has fewer rows than
    there are columns."""
    rows = hint(p.m, 512)
    k = fixed(p.k)
    fits = rows * k * e.itemsize <= AMX_B_BYTES and rows <= hint(p.n, 512)
    return fits and not p.batch and p.b[1] == 1 and k <= K_TRANSPOSED and isinstance(p.n, int)


def _packed(
    program: Program,
    engine: AmxGemm,
    side: int,
    source: str,
    lanes: Size,
    strides: tuple[Size, Size],
    k: Size,
) -> str:
    """Pack all of an operand, in parallel; returns the pointer to it."""
    to = program.at(program.scratch(engine.packed_bytes(lanes, k)))
    name = program.once(
        ("prepack", engine.element.kind, engine.forms[side], side),
        lambda: _prepack_amx(program, engine, side),
    )
    program.parallel(
        name,
        program.arguments((source, to), (lanes, *strides, k)),
        ceildiv(lanes, BLOCK),
        cost=0.06 * BLOCK * fixed(k),
    )
    return to


def _reads_tiles(p: Product, e: Element) -> bool:
    """Whether tiles of A are read where they are: whole ones, whose rows do not share the sets of
    L1."""
    static = all(isinstance(v, int) for v in (p.m, p.n, p.k, p.a[0]))
    return static and not p.m % BLOCK and not p.k % e.depth and bool(p.a[0] * e.itemsize % 2048)


def _cut_amx(
    p: Product, e: Element, transposed: bool, cores: int
) -> tuple[blocking.Partition, tuple[bool, bool]]:
    """How a product on AMX is cut, and which of its operands are packed beforehand.

    A block of B that stays in L2 is packed by the item that reads it, which has all rows; of a
    product with many more rows than columns, whose items share blocks of B, it is packed before. A
    is packed beforehand where several blocks of columns read it."""
    tiles = ceildiv(p.m, BLOCK)
    count = hint(p.count, 8)
    k = fixed(p.k)
    widest = (AMX_TURNED if transposed else AMX_COLUMNS) // BLOCK
    in_l2 = AMX_B_BYTES // (STEP_BYTES * ceildiv(k, e.depth))
    fit = max(1, min(widest, in_l2)) * BLOCK
    work = hint(p.m, 512) * hint(p.n, 512) * k * count
    items = ceildiv(max(1, min(2 * cores, work >> 24)), count)
    if not isinstance(p.m, int) or not isinstance(p.n, int):
        cut = blocking.Partition(16, fit, ceildiv(tiles, 16), ceildiv(p.n, fit), False)
        return cut, (False, transposed or not p.batch)
    rows = ceildiv(p.m, BLOCK)
    blocks_n = ceildiv(p.n, fit)
    tall = not p.batch and (transposed or p.m > 2 * p.n or k > K_SINGLE)
    blocks_m = min(rows, ceildiv(items, blocks_n)) if tall else 1
    t = Tile("float", 16, BLOCK, 2)
    cut = blocking.cut(t, rows, p.n, blocks_m, blocks_n if tall else max(blocks_n, items))
    return cut, (not p.batch and fixed(cut.blocks_n) > 1, tall)


def _prepack_amx(program: Program, engine: AmxGemm, side: int) -> str:
    name = engine.prepack(side)
    define(program, engine)
    return name
