"""dot_narrow: a vector times a matrix of narrow numbers -> sums of products in a loop, which widens
the numbers as it reads them.

    dot(f32[k], convert(s8[n,k]))  ->  reduce(multiply(broadcast(f32[k]), convert(s8[n,k])))

The matrix may be computed from narrow arrays in several steps: nibbles that are taken out of bytes,
scales of groups. As an operand of a dot it would be written to memory first, four bytes a number;
such a product takes as long as its bytes take to be read. With several rows a product reads each
number several times, and what it costs to widen the matrix once is shared.

group_products: rows times a matrix of four-bit numbers whose groups along k have a scale and an
offset each, in one kernel.

    y = (f32[m,n]) call(x, sums, w, scales), backend_config={"product":"groups"}
->  y = (f32[m,n]) fusion(x, sums, w, scales), kind=custom, …

x f32[m, k], sums f32[m, groups] of its groups, w u8[blocks, k, half], scales [groups, n, 2] with
n = blocks * 2 * half. A byte holds a number of 0 to 15 of row i of a block, and one of row half + i
in its upper half. A number means (q - 8) * scale + offset.

The called computation says the same, and is inlined where there is no kernel (gemv.py)."""

from torch_hlo.hlo.ir import Instruction, Module, build as h, instr, op, rewrite, rules

from ..hlo_pass import hlo_pass
from ..simplify.algebra import exact
from ..thresholds import NARROW_BYTES, NARROW_ELEMENTS
from .dot_canon import Dot, parts, plain

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
    return _sums(d, out)


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


def _sums(d: Dot, out: Instruction) -> Instruction:
    w = d.y
    pairs = (*d.batch, *d.contract)
    wide = "f32" if d.dtype in ("bf16", "f16") else d.dtype
    order = sorted(pairs, key=lambda pair: pair[1])
    # kept in memory: what makes it is not done again beside each row of w
    x = h.transpose(h.convert(h.opt_barrier(d.x), wide), [a for a, _ in order])
    while w.op == "convert" and exact(w.operand.dtype, w.dtype):
        (w,) = w.operands
    terms = h.multiply(h.broadcast(x, w.dims, [b for _, b in order]), h.convert(w, wide))
    summed = [b for _, b in d.contract]
    sums = h.reduce(terms, h.full(0, wide), sorted(summed), "add")
    kept = [b for b in range(w.rank) if b not in summed]
    place = [kept.index(b) for b in (*[b for _, b in d.batch], *d.rhs_free)]
    return h.convert(h.transpose(sums, place), out.dtype)


RULES = rules((op("dot", where=plain), narrow_product))


@hlo_pass
def dot_narrow(module: Module) -> Module:
    """Products of a vector and a matrix of narrow numbers -> sums."""
    return rewrite(module, RULES)


def _fused(out: Instruction) -> Instruction | None:
    if out.get("backend_config") != GROUPS:
        return None
    attrs = {"calls": out["to_apply"], "backend_config": GROUPS}
    return instr("fusion", out.operands, out.shape, kind="custom", **attrs)


GROUP_RULES = rules((op("call"), _fused))


@hlo_pass
def group_products(module: Module) -> Module:
    """Calls that say they are products with groups of four-bit numbers -> kernels."""
    return rewrite(module, GROUP_RULES)
