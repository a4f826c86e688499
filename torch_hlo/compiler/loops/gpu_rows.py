"""Kernels whose rows are walked by a group of threads: the row emitters' passes, with a row's
elements spread over threads.

Rows along memory (RowGroup): a `lane_loop` gives each thread every `threads`-th vector. What is
folded over lanes is then folded over the group's threads in a fixed order (a butterfly: registers
of a warp are exchanged directly, those of different warps through shared memory), so every thread
has the same sum and results do not depend on chance. Barriers stand where all threads of the group
come by.

Rows across memory (ColumnGroup): 32 neighbouring threads have neighbouring rows, and a few such
slices of threads take turns along them."""

from collections.abc import Sequence

from torch_hlo.hlo.ir import Instruction, Size, product

from ..codegen import Index, Program
from ..codegen.index import of
from ..codegen.kernel import Body, Fold
from ..codegen.loop_plan import stored_bits
from ..gpu.exchange import Exchange
from ..gpu.gpu_program import GpuProgram
from ..gpu.target import BARRIER, GpuTarget
from .row_kernel import RowForms, RowKernel
from .row_plan import RowPlan, Walk

COLUMNS = 32  # rows across memory whose threads are neighbours
MOST_THREADS = 256
LONG_ROW = 8192  # elements of a row that more threads walk
LONG_THREADS = 512
MOST_SLICES = 32
BUSY_THREADS = 1 << 16  # that a device should have
SHORT_ROW = 32  # elements: one thread walks such a row alone


class GroupKernel(RowKernel):
    """See the module. `workers`: threads of one group, a power of two."""

    target: GpuTarget

    def __init__(
        self,
        target: GpuTarget,
        lanes: int,
        leaves: Sequence[Instruction],
        outputs: int,
        workers: int,
    ) -> None:
        super().__init__(target, lanes, leaves, outputs)
        self.workers = workers
        self.exchange = Exchange(target, workers)

    def fold(self, reducer: Fold, accs: Sequence[str], distance: int) -> list[str]:
        """Scalar accumulators folded over the threads whose numbers differ by multiples of
        `distance`; all of them get the result."""
        accs = list(accs)
        e = self.level.scalar
        kinds = reducer.kinds
        first = distance
        while distance < self.workers:
            others = list(self.exchange.others(e, kinds, accs, distance))
            accs = reducer.combine(self, accs, others)
            distance *= 2
        # both sides of an exchange need not agree when the reducer is not quite commutative
        if reducer.op is None:
            accs = list(self.exchange.first(e, kinds, accs, first))
        return accs

    def barrier(self) -> None:
        self.level.lines.append(f"  {BARRIER}")

    def define(self, program: Program, name: str) -> str:
        assert isinstance(program, GpuProgram)
        self.unit.declare(program)
        return program.group_function(
            name, self.exchange.declarations() + self.text(name), self.workers
        )


class RowGroup(GroupKernel):
    """A group per row."""

    def lane_loop(
        self,
        low: int | str,
        high: int | str,
        extent: Size,
        body: Body,
        unroll: int = 1,
        carry: Sequence[tuple[str, str]] = (),
        aligned: bool = False,
        compact: bool = False,
    ) -> list[list[str]]:
        """Vectors `low + lanes * thread`, and every `threads`-th after it. The range is a multiple
        of `lanes`."""
        op = self.levels[-1].scalar.op
        var, kinds, state = self._carried(extent, carry)
        first = op(f"mul i64 %kernel.t, {self.lanes}") if self.lanes > 1 else "%kernel.t"
        if str(low) != "0":
            first = op(f"add i64 {first}, {low}")
        saved = self.lane_var
        self.lane_var = var
        try:
            return self._vector_loop(
                var,
                first,
                str(high),
                body,
                kinds,
                state,
                nonempty=False,
                step=self.lanes * self.workers,
            )
        finally:
            self.lane_var = saved

    def fold_threads(self, reducer: Fold, accs: Sequence[str]) -> list[str]:
        """Scalar accumulators folded over the group; every thread gets the result."""
        return self.fold(reducer, accs, 1)


class ColumnGroup(GroupKernel):
    """A group per 32 neighbouring rows; `slices` threads share one."""

    columns = COLUMNS

    def __init__(
        self,
        target: GpuTarget,
        leaves: Sequence[Instruction],
        outputs: int,
        slices: int,
    ) -> None:
        super().__init__(target, 1, leaves, outputs, COLUMNS * slices)
        self.slices = slices
        op = self.level.scalar.op
        self.slice = op(f"udiv i64 %kernel.t, {COLUMNS}")
        self._column = self.named(op(f"urem i64 %kernel.t, {COLUMNS}"), COLUMNS, 0)

    def column(self, block: Index) -> Index:
        return block * COLUMNS + of(self._column)

    def fold_slices(self, reducer: Fold, accs: Sequence[str]) -> list[str]:
        return self.fold(reducer, accs, COLUMNS)


class GpuRowForms(RowForms):
    """See the module."""

    stash_limit = 0
    target: GpuTarget

    def __init__(self, target: GpuTarget) -> None:
        super().__init__(target)
        self.lanes = self.block = 1  # neighbouring threads have neighbouring rows
        # an item is a group of threads, and hundreds keep a device busy
        self.walk = Walk(
            (256, 512, 4096),
            column_chunks=2,  # rows of a chunk wait for each other, other chunks' do not
            apart=(),
            few=512,
            long=8192,
            columns=COLUMNS,
        )

    def neighbours(self, moved: bool) -> int:
        return COLUMNS

    def row_kernel(self, plan: RowPlan, leaves: Sequence[Instruction], outputs: int) -> RowKernel:
        """A thread per row when they are short, else a group."""
        length: Size = 1
        for size in plan.inner_sizes():
            length *= size
        if plan.style == "rows" and isinstance(length, int) and length <= SHORT_ROW:
            return RowKernel(self.target, 1, leaves, outputs)
        last = plan.dims[plan.inner[-1]]
        lanes = self.target.lanes(stored_bits(x.dtype for x in leaves if x.size == plan.size))
        while not isinstance(last, int) and lanes > 1 or isinstance(last, int) and last % lanes:
            lanes //= 2
        threads = 128
        if isinstance(last, int):
            threads = 32
            most = LONG_THREADS if isinstance(length, int) and length >= LONG_ROW else MOST_THREADS
            while threads < most and threads * lanes < last:
                threads *= 2
        return RowGroup(self.target, lanes, leaves, outputs, max(threads, self.target.warp))

    def column_kernel(
        self,
        plan: RowPlan,
        width: Size,
        leaves: Sequence[Instruction],
        outputs: int,
    ) -> RowKernel:
        """A thread per row where they are short or do not fill groups, else a group per 32."""
        length = plan.dims[plan.inner[0]]
        rows = plan.outer_sizes()
        if not (
            isinstance(width, int)
            and width % COLUMNS == 0
            and isinstance(length, int)
            and length >= 16
        ):
            return RowKernel(self.target, 1, leaves, outputs)
        total = product(rows)
        slices = 8
        while (
            slices < MOST_SLICES
            and isinstance(total, int)
            and total * slices < BUSY_THREADS
            and slices * 16 <= length
        ):
            slices *= 2
        while slices * 4 > length:
            slices //= 2
        return ColumnGroup(self.target, leaves, outputs, slices)
