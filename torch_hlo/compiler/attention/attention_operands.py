"""attention_operands: biases and factors of attention are computed inside the kernel, block by
block, where they are larger than what they are made of.

    # [batch, heads, rows, columns]
    f = select(greater-equal(random bits of (seed, iota)), 1.1, 0)
    y = fusion(q, k, v, f), kind=custom, backend_config={"attention":"forward", …}
-> y = fusion(q, k, v, seed), kind=custom, calls={… f = …; ROOT call(q, k, v, f)},
backend_config={"attention":"forward", …}

Forward and backward compute them again; nobody keeps an array of rows x columns. Small parts stay
arrays: what is repeated over heads is computed once.
"""

from torch_hlo.hlo.ir import (
    Computation,
    Instruction,
    Module,
    Replacements,
    Shape,
    carry_meta,
    instr,
    postorder,
    replace,
    rewrite_bottom_up,
)
from torch_hlo.hlo.ir.build import kernel

from ..fusion import fusion_table as table
from ..hlo_pass import hlo_pass, over_computations
from .attention import attention_of, known_attention

_USUAL = 256  # of a symbolic size
_SHARED = 16  # what is repeated this often is an array, unless it is cheap and reads none
_CHEAP = 8  # operations per element


@hlo_pass
def attention_operands(module: Module) -> Module:
    """Operands of fused attention -> expressions in its computation."""
    return over_computations(module, _computed)


def _computed(c: Computation) -> Computation:
    if not any(_is_plain(x) for x in c.instructions()):
        return c
    root = rewrite_bottom_up(c.root, lambda x: _absorbed(x) if _is_plain(x) else x)
    return c.with_root(root)


def _is_plain(x: Instruction) -> bool:
    return (
        x.op == "fusion"
        and x.get("kind") == "custom"
        and x["calls"].root.op == "tuple"
        and attention_of(x) is not None
    )


def _absorbed(x: Instruction) -> Instruction:
    computed = [role in ("bias", "factors") for role in known_attention(x).roles]
    regions = [_Region(o) for o, may in zip(x.operands, computed, strict=True) if may]
    inside = set().union(*(r.inside for r in regions if r.is_smaller))
    if not inside:
        return x
    leaves: Replacements = {}
    made: Replacements = {}
    for y in postorder(x.operands):
        if y in inside:
            made[y] = replace(y, (made.get(o) or _leaf(o, leaves) for o in y.operands), y.shape)
    operands = tuple(
        may and made.get(o) or _leaf(o, leaves) for o, may in zip(x.operands, computed, strict=True)
    )
    config = x["backend_config"]
    root = instr("call", operands, to_apply=x["calls"], backend_config=config)
    called = Computation("attention", tuple(leaves.values()), root)
    fused = kernel(tuple(leaves), called, config)
    carry_meta(x, fused)
    return fused


def _leaf(x: Instruction, leaves: Replacements) -> Instruction:
    if x not in leaves:
        leaves[x] = instr("parameter", (), x.shape, index=len(leaves))
    return leaves[x]


def _elements(shape: Shape) -> int:
    n = 1
    for d in shape.dims:
        n *= d if isinstance(d, int) else _USUAL
    return n


def _is_expression(x: Instruction) -> bool:
    """Whether an element is computed from elements at places that follow from its own. Numbers of
    64 bits would make vectors of half as many."""
    if x.op in ("constant", "get-tuple-element"):
        return x.op == "constant" and x.size == 1
    return table.classify(x) in (table.FREE, table.LIGHT, table.HEAVY) and (
        x.rank > 0 or all(y.itemsize <= 4 for y in (x, *x.operands))
    )


class _Region:
    """What of an operand would be computed in the kernel: `inside`, and whether that reads less
    than the operand."""

    def __init__(self, root: Instruction) -> None:
        self.full = _elements(root.shape)
        self.inside: set[Instruction] = set()
        reads = 0
        stack = [root]
        while stack:
            x = stack.pop()
            if x in self.inside:
                continue
            if not _is_expression(x) or x is not root and self._is_better_kept(x):
                reads += _elements(x.shape) * x.itemsize
                continue
            self.inside.add(x)
            stack.extend(x.operands)
        self.is_smaller = root in self.inside and reads < self.full * root.itemsize

    def _is_better_kept(self, x: Instruction) -> bool:
        if _elements(x.shape) * _SHARED > self.full:
            return False
        cost = 0
        for y in postorder((x,)):
            if y.rank and y.op != "constant":
                if not _is_expression(y):
                    return True
                cost += table.cost(y)
        return cost > _CHEAP
