"""Elementwise kernels that read across their rows (transposes, alone or fused): a group per square
tile, turned in shared memory.

An array whose neighbours lie along another loop than the innermost is brought to shared memory with
that loop's neighbours in neighbouring threads, and read from there along the innermost one: both
sides touch memory in whole vectors and segments. Rows of a tile are one element longer than the
tile, so that neither a row nor a column meets a bank twice.
"""

from collections.abc import Sequence

from torch_hlo.hlo.ir import Instruction, Size, ceildiv, fixed, product

from ..codegen import Index, Kernel, Program, index as ix
from ..codegen.index import Var, variable
from ..codegen.loop_plan import Loops
from ..gpu.gpu_program import GpuProgram
from ..gpu.target import BARRIER, GpuTarget
from ..llvm import Emit
from ..llvm.scalar import STORAGE, Storage
from .elementwise_loops import Body

THREADS = 256
_SEGMENT = 8  # vectors of a row of a tile: 128 bytes
_LEAST = 32  # rows and columns of a tile
_MOST_TILES = 8  # arrays that are brought to shared memory; the others are gathered


def fits(loops: Loops, lanes: int, in_place: bool) -> bool:
    """Whether a loop reads across its rows and is large enough for tiles."""
    if loops.across is None or in_place:
        return False
    return all(
        isinstance(n, int) and n >= _side(lanes)
        for n in (loops.extents[loops.across], loops.extents[-1])
    )


def _side(lanes: int) -> int:
    return max(_LEAST, _SEGMENT * lanes)


class TileKernel(Kernel):
    """A Kernel of a group of threads per tile. `lanes`: elements that a thread has of a row."""

    target: GpuTarget

    def __init__(
        self,
        target: GpuTarget,
        lanes: int,
        leaves: Sequence[Instruction],
        outputs: int,
    ) -> None:
        super().__init__(target, lanes, leaves, outputs)
        # (array, element type, index with canonical variables) -> tile
        self._turned: dict[tuple[str, str, Index], str] = {}
        self._canonical: tuple[Var, Var] | None = None

    def nest(self, loops: Loops, body: Body) -> Size:
        """Write the kernel; returns the number of groups. Tiles at the end are moved back where
        sizes do not divide: they compute some elements again, so nothing that is written may be
        read."""
        across = loops.across
        assert across is not None
        *outer, last = loops.extents
        rows = fixed(outer[across])
        columns = fixed(last)
        if rows % self.lanes or columns % self.lanes:
            self.lanes = 1
        self.side = side = _side(self.lanes)
        self.per_row = side // self.lanes
        counts = [*outer, ceildiv(columns, side)]
        counts[across] = ceildiv(rows, side)
        with self.loop("%lo", "%hi", product(counts)) as item:
            parts = list(ix.delinear(item, counts))
            op = self.level.scalar.op
            first_row, first_column = (
                self._start(parts[d], extent) for d, extent in ((across, rows), (-1, columns))
            )
            self.minor = op(f"urem i64 %kernel.t, {self.per_row}")
            self.minor = op(f"mul i64 {self.minor}, {self.lanes}")
            self.major = op(f"udiv i64 %kernel.t, {self.per_row}")
            self._canonical = (
                variable("loop", ("%row",), rows, 0),
                variable("loop", ("%column",), columns, 0),
            )
            parent = self.levels[-1]
            lines: list[str] = []
            lane = self.named(
                op(f"add i64 {first_column}, {self.minor}"),
                columns,
                parent.depth + 1,
            )
            saved = self.lane_var
            self.lane_var = lane
            with self._stored_last():
                for number in range(self._passes):
                    row = self.named(op(f"add i64 {first_row}, {self._at(number)}"), rows, 0)
                    self._row = row
                    self._number = number
                    self._enter(lines)
                    parts[across] = ix.of(row)
                    body(parts[:-1])(ix.of(lane), ())
                    self._pop(parent)
            self.lane_var = saved
            self._bring(first_row, first_column, rows, columns)
            parent.lines += lines
        return product(counts)

    @property
    def _passes(self) -> int:
        """Vectors of a tile that a thread has."""
        return self.side * self.per_row // THREADS

    def _at(self, number: int) -> str:
        """The thread's row in its vector `number`."""
        return (
            self.levels[0].scalar.op(f"add i64 {self.major}, {number * (THREADS // self.per_row)}")
            if number
            else self.major
        )

    def _start(self, tile: Index, extent: int) -> str:
        start = self.scalar(tile * self.side)
        return (
            self.level.scalar.op(f"call i64 @llvm.umin.i64(i64 {start}, i64 {extent - self.side})")
            if extent % self.side
            else start
        )

    def _load(self, pointer: str, storage: Storage, index: Index) -> str:
        key = self._key(pointer, storage, index)
        if key is None:
            return super()._load(pointer, storage, index)
        name = self._turned.setdefault(key, f"@SELF.tile{len(self._turned)}")
        kind = storage.memory
        scalar = self.level.scalar
        row = self._at(self._number)
        parts = []
        for i in range(self.lanes):
            column = scalar.op(f"add i64 {self.minor}, {i}") if i else self.minor
            parts.append(
                scalar.op(
                    f"load {kind}, ptr {self._slot(scalar, name, kind, column, row)}, align"
                    f" {storage.bytes}"
                )
            )
        return self.e.typed(kind).packed(parts)

    def _key(self, pointer: str, storage: Storage, index: Index) -> tuple[str, str, Index] | None:
        """What identifies the tile that an access reads, None when it does not read across rows."""
        if self._canonical is None or self.mask() is not None:
            return None
        row = self._row
        lane = self.lane_var
        assert lane is not None
        steps = dict(index.terms)
        if any(v.kind != "loop" and {row, lane} & ix.variables((ix.of(v),)) for v in steps):
            return None
        if steps.get(row) != 1 or steps.get(lane, 0) in {0, 1}:
            return None
        canonical = dict(zip((row, lane), self._canonical, strict=True))
        key = (
            pointer,
            storage.memory,
            ix.combine((ix.of(canonical.get(v, v)), c) for v, c in index.terms) + index.const,
        )
        return key if key in self._turned or len(self._turned) < _MOST_TILES else None

    def _slot(self, e: Emit, name: str, kind: str, column: str, row: str) -> str:
        at = e.op(f"add i64 {e.op(f'mul i64 {column}, {self.side + 1}')}, {row}")
        return e.op(f"getelementptr {kind}, ptr {name}, i64 {at}")

    def _bring(self, first_row: str, first_column: str, rows: int, columns: int) -> None:
        """Load the tiles with a thread's vector along the rows, and wait for all threads."""
        parent = self.levels[-1]
        op = parent.scalar.op
        lane = self.named(op(f"add i64 {first_row}, {self.minor}"), rows, parent.depth + 1)
        saved = self.lane_var
        self.lane_var = lane
        canonical = self._canonical
        self._canonical = None
        assert canonical is not None
        self._enter(parent.lines)
        e = self.level.emit
        scalar = self.level.scalar
        for number in range(self._passes):
            place = self._at(number)
            column = self.named(op(f"add i64 {first_column}, {place}"), columns, 0)
            actual = dict(zip(canonical, (lane, column), strict=True))
            for (pointer, kind, key), name in self._turned.items():
                storage = next(s for s in STORAGE.values() if s.memory == kind)
                index = ix.combine((ix.of(actual.get(v, v)), c) for v, c in key.terms) + key.const
                value = super()._load(pointer, storage, index)
                for i in range(self.lanes):
                    one = e.typed(kind).lane(value, i)
                    row = scalar.op(f"add i64 {self.minor}, {i}") if i else self.minor
                    scalar.do(
                        f"store {kind} {one}, ptr {self._slot(scalar, name, kind, place, row)},"
                        f" align {storage.bytes}"
                    )
        self._pop(parent)
        self.lane_var = saved
        self._canonical = canonical
        parent.lines.append(f"  {BARRIER}")

    def define(self, program: Program, name: str) -> str:
        assert isinstance(program, GpuProgram)
        self.unit.declare(program)
        size = self.side * (self.side + 1)
        memory = "".join(
            f"{tile} = internal addrspace(3) global [{size} x {kind}] undef, align 16\n"
            for (_, kind, _), tile in self._turned.items()
        )
        return program.group_function(name, memory + self.text(name), THREADS)
