"""dot_narrow: a vector times a matrix of narrow numbers -> sums of products in a loop, which widens
the numbers as it reads them.

    dot(f32[k], convert(s8[n,k]))  ->  reduce(multiply(broadcast(f32[k]), convert(s8[n,k])))

The matrix may be computed from narrow arrays in several steps: nibbles that are taken out of bytes,
scales of groups. As an operand of a dot it would be written to memory first, four bytes a number;
such a product takes as long as its bytes take to be read. With several rows a product reads each
number several times, and what it costs to widen the matrix once is shared.

    dot(f32[b,3,3], f32[b,3,3])    ->  reduce(multiply(broadcast, broadcast))

Sums of few terms are no work for kernels of products, which pack their operands and fill tiles.

group_products: rows times a matrix of four-bit numbers whose groups along k have a scale and an
offset each, in one kernel.

    y = (f32[m,n]) call(x, sums, w, scales), backend_config={"product":"groups"}
->  y = (f32[m,n]) fusion(x, sums, w, scales), kind=custom, …

x f32[m, k], sums f32[m, groups] of its groups, w u8[blocks, k, half], scales [groups, n, 2] with
n = blocks * 2 * half. A byte holds a number of 0 to 15 of row i of a block, and one of row half + i
in its upper half. A number means (q - 8) * scale + offset.

The called computation says the same, and is inlined where there is no kernel (gemv.py)."""

from dataclasses import replace as with_fields

from torch_hlo.hlo.ir import Instruction, Module, build as h, op, product, rewrite, rules

from ..hlo_pass import hlo_pass
from ..thresholds import NARROW_BYTES, NARROW_ELEMENTS, SHORT
from .dot_canon import parts, plain, sums

GROUPS = '{"product":"groups"}'
_IN_REGISTERS = frozenset(
    "convert broadcast reshape constant iota add subtract multiply negate and or shift-left"
    " shift-right-logical shift-right-arithmetic".split()
)


def narrow_product(out: Instruction) -> Instruction | None:
    """dot(x, w) -> sums of x * w where x is a vector and w is made of few bytes"""
    d = parts(out)
    if d.lhs_free:
        d = d.swapped()
    if d.lhs_free or not d.contract or out.kind not in "fsu" or not _is_narrow(d.y):
        return None
    # kept in memory: what makes it is not done again beside each row of w
    return sums(with_fields(d, x=h.opt_barrier(d.x)), out)


def _is_narrow(w: Instruction) -> bool:
    """Whether the numbers of `w` are made of at most NARROW_BYTES bytes each."""
    size = w.size
    if not isinstance(size, int) or size < NARROW_ELEMENTS:
        return False
    left = NARROW_BYTES * size
    seen = {w}
    stack = [w]
    while stack and left >= 0:
        x = stack.pop()
        if x.op in _IN_REGISTERS:
            new = set(x.operands) - seen
            seen |= new
            stack.extend(new)
        elif not isinstance(nbytes := x.nbytes, int):
            return False
        else:
            left -= nbytes
    return left >= 0


def few_terms(out: Instruction) -> Instruction | None:
    """dot(x, y) -> sums of x * y where those are of few terms, or of some in small matrices"""
    d = parts(out)
    depth, rows, columns = (
        product(x.dims[i] for i in chosen)
        for x, chosen in (
            (d.x, [a for a, _ in d.contract]),
            (d.x, d.lhs_free),
            (d.y, d.rhs_free),
        )
    )
    narrow = any(isinstance(n, int) and n <= SHORT for n in (rows, columns))
    if not isinstance(depth, int) or depth > SHORT * (1 + narrow) or out.kind == "p":
        return None
    return sums(d, out)


RULES = rules((op("dot", where=plain), narrow_product), (op("dot", where=plain), few_terms))


@hlo_pass
def dot_narrow(module: Module) -> Module:
    """Products of a vector and a matrix of narrow numbers, and of few terms -> sums."""
    return rewrite(module, RULES)


def _fused(out: Instruction) -> Instruction | None:
    return h.kernel_of(out) if out.get("backend_config") == GROUPS else None


GROUP_RULES = rules((op("call"), _fused))


@hlo_pass
def group_products(module: Module) -> Module:
    """Calls that say they are products with groups of four-bit numbers -> kernels."""
    return rewrite(module, GROUP_RULES)
