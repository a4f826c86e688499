"""Products on Hopper's matrix units: four warps multiply 64 rows by up to 256 columns straight from
shared memory, while they go on.

The same slices, copies and results as in gpu_gemm.py. A slice's instructions run while the next
slice's are prepared, so its memory is free one slice later: copies are begun `stages` - 2 slices
ahead. Where rows of the operands are aligned to 16 bytes, one thread asks the copy engine for whole
slices (TMA), which puts them down in the same order; other operands are copied by all threads
(gpu_panel.py)."""

from __future__ import annotations

from collections.abc import Sequence

from ...gpu import ptx
from ...gpu.ptx import WARPGROUP_ROWS
from ...llvm import Int
from . import gpu_gemm
from .gpu_blocks import Place
from .gpu_panel import LINE, STEPS, Operand


class Copies:
    """Slices copied by all threads."""

    def __init__(self, product: Product, shared: str, at: Place, bases: Sequence[str]) -> None:
        self.f, self.product = product.f, product
        self.panels = product.panels(at, bases)
        # carried by the loop
        self.state: list[tuple[str, str]] = [("ptr", p.start) for p in self.panels]

    def bring(self, to: Int, state: Sequence[str], k: Int) -> list[str]:
        """Begin to copy the slice at `k` to shared address `to`; returns the state for the next."""
        return self.product.bring(to, self.panels, state, k)

    def wait(self, now: Int, pending: int, state: Sequence[Int]) -> None:
        """Until this thread's copies to the slice at `now` have come; those of `pending` slices
        after it are under way."""
        ptx.wait_copies(self.f, pending)
        ptx.fence_shared_for_units(self.f)

    def turn(self, state: list[str], first: str) -> list[str]:
        """The state of the next round; `first` (i1): it begins with the first stage."""
        return state

    def finish(self) -> None:
        ptx.wait_copies(self.f, 0)


class CopyEngine(Copies):
    """Slices copied by the copy engine: thread 0 asks. A barrier per stage follows the slices in
    shared memory."""

    def __init__(self, product: Product, shared: str, at: Place) -> None:
        self.f = product.f
        self.w = product.w
        self.product = product
        self.shared = shared
        self.at = at
        f, w, t = self.f, self.w, product.tile
        self.asks = f.icmp("eq", "%kernel.t", 0)
        self.barriers = w.add(shared, t.shared)
        self.state = [("i32", "0")]  # parity of the phase that the stages are in
        with f.when(self.asks):
            for stage in range(t.stages):
                ptx.initialize_barrier(f, w.add(self.barriers, 8 * stage))
            ptx.fence_barriers(f)
        f.barrier()

    def bring(self, to: Int, state: Sequence[str], k: Int) -> list[str]:
        f, w, at = self.f, self.w, self.at
        with f.when(f.op(f"and i1 {self.asks}, {f.icmp('slt', k, at.k)}")):
            barrier = self._barrier(to)
            ptx.expect_bytes(f, barrier, self.product.tile.slice_bytes)
            deep = w.narrow(f.add(at.start, k))
            outer = [w.narrow(i) for i in at.batch]
            for number, (o, first) in enumerate(
                ((self.product.a, at.row), (self.product.b, at.column))
            ):
                row = w.narrow(first)
                if o.along_k:
                    ptx.copy_tensor(f, to, f"%map{number}", [deep, row, *outer], barrier)
                for slab in range(0 if o.along_k else o.slabs):
                    across = w.add(row, slab * (LINE // o.unit.itemsize))
                    ptx.copy_tensor(
                        f,
                        w.add(to, slab * o.depth * LINE),
                        f"%map{number}",
                        [across, deep, *outer],
                        barrier,
                    )
                to = w.add(to, o.nbytes)
        return list(state)

    def _barrier(self, slot: Int) -> Int:
        """Address of the barrier of the stage at `slot`."""
        w = self.w
        return w.muladd(
            w.div(w.sub(slot, self.shared), self.product.tile.slice_bytes), 8, self.barriers
        )

    def wait(self, now: Int, pending: int, state: Sequence[Int]) -> None:
        ptx.wait_barrier(self.f, self._barrier(now), state[0])

    def turn(self, state: list[str], first: str) -> list[str]:
        return [str(self.w.xor(state[0], self.f.op(f"zext i1 {first} to i32")))]

    def finish(self) -> None:
        """What was asked for has been waited for."""


class Product(gpu_gemm.Product):
    """See gemm.Product. The tile's teams are warpgroups; operands that are not 16 bits wide are
    contiguous along k. `engine`: the copy engine copies."""

    engine = False

    def multiply(self, shared: str, at: Place, bases: Sequence[str]) -> list[str]:
        f, w, t = self.f, self.w, self.tile
        depth = self.a.depth
        ahead = t.stages - 2
        size = t.slice_bytes
        copies = CopyEngine(self, shared, at) if self.engine else Copies(self, shared, at, bases)
        kinds = [k for k, _ in copies.state]
        state = [v for _, v in copies.state]
        for stage in range(ahead):
            state = copies.bring(w.add(shared, stage * size), state, stage * depth)
        zero = "0.0" if self.kind == "float" else "0"
        end = w.add(shared, t.stages * size)
        starts = [
            self._first(self.a, self.warp_row),
            w.add(self._first(self.b, self.warp_column), self.a.nbytes),
        ]
        carry = [
            ("i32", str(shared)),
            ("i32", str(w.add(shared, ahead * size))),
            *zip(kinds, state, strict=True),
            *[(self.kind, zero)] * t.registers,
        ]
        with f.loop(0, at.k, depth, carry=carry) as loop:
            now, to, *rest = loop.vars
            state, sums = rest[: len(kinds)], rest[len(kinds) :]
            copies.wait(now, ahead - 1, state)
            # the slice is complete, and all warpgroups are done with the slice before the last
            self.f.barrier()
            each = len(sums) * WARPGROUP_ROWS // t.warp_m
            result = []
            for block in range(t.warp_m // WARPGROUP_ROWS):
                left = w.add(now, starts[0], self._jump(self.a, block))
                steps = [
                    self._descriptors(left, w.add(now, starts[1]), step) for step in range(STEPS)
                ]
                result += ptx.warpgroup_multiply(
                    f,
                    self.a.unit,
                    self.b.unit,
                    t.warp_n,
                    steps,
                    (not self.a.along_k, not self.b.along_k),
                    sums[block * each : (block + 1) * each],
                )
            state = copies.bring(to, state, f.add(loop.index, ahead * depth))
            ptx.wait_units(f, t.warp_m // WARPGROUP_ROWS)
            following = self.next(now, size, end, shared)
            state = copies.turn(state, f.icmp("eq", following, shared, "i32"))
            loop.next = [
                following,
                self.next(to, size, end, shared),
                *state,
                *result,
            ]
        ptx.wait_units(f, 0)
        copies.finish()
        self.f.barrier()
        totals: list[str] = loop.vars[2 + len(kinds) :]
        return totals

    def _first(self, o: Operand, row: Int) -> Int:
        """Bytes from an operand's slice to a row, a multiple of eight or, where rows are
        contiguous, of 64."""
        w = self.w
        return (
            w.mul(row, LINE)
            if o.along_k
            else w.mul(w.div(row, LINE // o.unit.itemsize), o.depth * LINE)
        )

    def _jump(self, o: Operand, block: int) -> int:
        return (
            block * WARPGROUP_ROWS * LINE
            if o.along_k
            else block * WARPGROUP_ROWS * o.unit.itemsize // LINE * o.depth * LINE
        )

    def _descriptors(self, left: Int, right: Int, step: int) -> tuple[str, str]:
        pairs = ((self.a, left), (self.b, right))
        a, b = (
            ptx.matrix_descriptor(
                self.w,
                self.w.add(at, step * (32 if o.along_k else o.unit.k * LINE)),
                o.along_k,
                o.depth * LINE,
            )
            for o, at in pairs
        )
        return a, b


class EngineProduct(Product):
    engine = True
