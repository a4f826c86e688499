"""column_split: sums of few long columns, for a device that wants more threads than there are.

add over 800000 rows of 64 columns -> add over 2048 neighbouring rows at a time, then over the 392
parts. Statistics of batch norm are such sums, where channels lie last.
"""

from torch_hlo.hlo.ir import (
    Instruction,
    Module,
    build as h,
    ceildiv,
    fixed,
    op,
    product,
    rewrite,
    rules,
    splat,
)

from ..fusion import fusion_table as table
from ..hlo_pass import hlo_pass
from .row_plan import STRIDED_LENGTH

WORTH = 1 << 18  # elements
COLUMNS = 1 << 14  # of all parts together, each of which has several threads
GROUP = 32  # neighbouring columns that threads take together
LOOKED_AT = 64  # instructions of what is summed


def parts(out: Instruction) -> Instruction | None:
    """A sum over all but the last dimensions -> two sums."""
    operand = out.operand
    init = out.operands[-1]
    if len(out.operands) != 2 or out["to_apply"].root.op != "add" or splat(init) != 0:
        return None
    dims = operand.dims
    over = len(out["dimensions"])
    if set(out["dimensions"]) != set(range(over)) or not operand.is_static:
        return None
    rows = fixed(product(dims[:over]))
    columns = fixed(product(dims[over:]))
    if out.dtype not in ("f32", "f64") or rows * columns < WORTH or columns % GROUP:
        return None
    count = _count(rows, max(COLUMNS // columns, ceildiv(rows, STRIDED_LENGTH)))
    if count < 2 or _has_rows(operand):
        return None
    cut = h.reshape(operand, (count, rows // count, *dims[over:]))
    return h.reduce(h.reduce(cut, init, (1,), "add"), init, (0,), "add")


def _count(rows: int, least: int) -> int:
    """The smallest divisor of `rows` that is at least `least`, 1 where parts would be short."""
    most = min(STRIDED_LENGTH, rows // 16)
    return next((n for n in range(least, most + 1) if rows % n == 0), 1)


def _has_rows(x: Instruction) -> bool:
    """Whether values per row enter, as in gradients of layer norm: the sums that these come from
    are walked in the same kernel."""
    seen = {x}
    todo = [x]
    while todo and len(seen) < LOOKED_AT:
        for o in todo.pop().operands:
            if o.is_tuple or o.size != x.size or o in seen:
                continue
            if o.op == "broadcast" and (spans := table.broadcast_intervals(o)):
                if spans[0][0] != 1:
                    return True
            seen.add(o)
            todo.append(o)
    return False


RULES = rules((op("reduce"), parts))


@hlo_pass
def column_split(module: Module) -> Module:
    """Sums of few long columns are taken in parts."""
    return rewrite(module, RULES)
