"""The kernel that rows are written with, and how rows are walked on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_hlo.hlo.ir import Instruction, Size, Users, fixed

from ..codegen import Index, Kernel
from ..llvm import Target
from ..llvm.scalar import Value
from ..thresholds import SHORT_REDUCED, STASH_LIMIT
from .row_plan import RowPlan, Walk

# vectors of rows per item: each row is a burst of 2 KB where rows are pages apart
BLOCK_VECTORS = 32


# the value(s) of a reduce at an index
ReduceValue = Callable[[tuple[Index, ...]], Sequence[Value]]


class RowKernel(Kernel):
    """A Kernel in which some instructions have values of their own: `computed[x](index)`, None
    meaning "the usual way"."""

    def __init__(
        self,
        target: Target,
        lanes: int,
        leaves: Sequence[Instruction],
        outputs: int,
    ) -> None:
        super().__init__(target, lanes, leaves, outputs)
        self.computed: dict[Instruction, Callable[[tuple[Index, ...]], Value | None]] = {}

    def _compute(self, x: Instruction, index: tuple[Index, ...]) -> Value:
        special = self.computed.get(x)
        value = special(index) if special is not None else None
        return super()._compute(x, index) if value is None else value

    def bind_reduce(
        self,
        x: Instruction,
        users: Sequence[Instruction],
        value: ReduceValue,
    ) -> None:
        """Give a reduce its value(s); those of a tuple-shaped one are seen through
        get-tuple-element."""
        for u in users if x.is_tuple else (x,):

            def part(
                index: tuple[Index, ...],
                n: int = u["index"] if x.is_tuple else 0,
            ) -> Value:
                return value(index)[n]

            self.computed[u] = part


def stream(k: RowKernel, plan: RowPlan, results: Sequence[Instruction], nbytes: int) -> None:
    """Let the results with an element per point bypass the caches when they take `nbytes` or more.
    Their vectors have to be aligned."""
    large = [n for n in plan.full_outputs if results[n].kind != "c"]
    if (
        k.target.steers_caches
        and isinstance(plan.size, int)
        and sum(fixed(results[n].nbytes) for n in large) >= nbytes
    ):
        k.nontemporal.update(k.outputs[n] for n in large)


def tuple_users(
    order: Sequence[Instruction],
) -> Users:
    """get-tuple-element instructions by operand."""
    found: Users = {}
    for x in order:
        if x.op == "get-tuple-element":
            found.setdefault(x.operand, []).append(x)
    return found


class RowForms:
    """How rows are walked: one item after the other, in vectors.

    `walk`: what plans depend on. `lanes`: of vectors of f32. `stash_limit`: elements of a row whose
    expensive values are kept on the stack between passes. `block`: rows across memory of an item.
    """

    stash_limit = STASH_LIMIT

    def __init__(self, target: Target) -> None:
        self.target = target
        self.lanes = target.lanes(32)
        self.block = self.lanes * BLOCK_VECTORS
        self.walk = Walk(alone=SHORT_REDUCED)

    def neighbours(self, moved: bool) -> int:
        """How many rows across memory fill an item. `moved`: what is cut or moved has rows that are
        no neighbours: blocks do not run over several if one fills a vector."""
        return self.lanes if moved else self.block

    def row_kernel(self, plan: RowPlan, leaves: Sequence[Instruction], outputs: int) -> RowKernel:
        """What rows along memory are written with."""
        return RowKernel(self.target, self.lanes, leaves, outputs)

    def column_kernel(
        self,
        plan: RowPlan,
        width: Size,
        leaves: Sequence[Instruction],
        outputs: int,
    ) -> RowKernel:
        """What rows across memory, `width` neighbours, are written with."""
        return RowKernel(self.target, self.lanes, leaves, outputs)
