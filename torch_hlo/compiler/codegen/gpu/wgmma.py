"""Products on Hopper's matrix units: four warps multiply 64 rows by up to 256 columns straight from shared memory, while they go on.

The same slices, copies and results as in gemm.py. A slice's instructions run while the next slice's are prepared, so its memory is free one
slice later: copies are begun `stages` - 2 slices ahead.
"""
from __future__ import annotations

from torch_hlo.compiler.codegen.function import Int
from torch_hlo.compiler.codegen.gpu import gemm, ptx
from torch_hlo.compiler.codegen.gpu.panel import LINE, STEPS, Operand, Panel
from torch_hlo.compiler.codegen.gpu.ptx import WARPGROUP_ROWS


class Product(gemm.Product):
    """See gemm.Product. The tile's teams are warpgroups; operands that are not 16 bits wide are contiguous along k."""

    def _multiply(self, shared: str, panels: list[Panel], k: Int) -> list[str]:
        f, w, t = self.f, self.w, self.tile
        depth, ahead, size = self.a.depth, t.stages - 2, t.slice_bytes
        pointers = self._start(shared, panels, ahead)
        zero = "0.0" if self.kind == "float" else "0"
        end = w.add(shared, t.stages * size)
        starts = [self._first(self.a, self.warp_row), w.add(self._first(self.b, self.warp_column), self.a.nbytes)]
        carry = [("i32", shared), ("i32", w.add(shared, ahead * size)), *(("ptr", p) for p in pointers), *[(self.kind, zero)] * t.registers]
        with f.loop(0, k, depth, carry=carry) as loop:
            now, to, *rest = loop.vars
            pointers, sums = rest[:2], rest[2:]
            ptx.wait_copies(f, ahead - 1)
            ptx.fence_shared_for_units(f)
            self._barrier()  # the slice is complete, and all warpgroups are done with the slice before the last
            each = len(sums) * WARPGROUP_ROWS // t.warp_m
            result = []
            for block in range(t.warp_m // WARPGROUP_ROWS):
                left = w.add(now, starts[0], self._jump(self.a, block))
                steps = [self._descriptors(left, w.add(now, starts[1]), step) for step in range(STEPS)]
                result += ptx.warpgroup_multiply(f, self.a.unit, self.b.unit, t.warp_n, steps, (not self.a.along_k, not self.b.along_k),
                                                 sums[block * each:(block + 1) * each])
            pointers = self._bring(to, panels, pointers, f.add(loop.index, ahead * depth))
            ptx.wait_units(f, t.warp_m // WARPGROUP_ROWS)
            loop.next = [self._next(now, size, end, shared), self._next(to, size, end, shared), *pointers, *result]
        ptx.wait_units(f, 0)
        ptx.wait_copies(f, 0)
        self._barrier()
        return loop.vars[4:]

    def _first(self, o: Operand, row: Int) -> Int:
        """Bytes from an operand's slice to a row, a multiple of eight or, where rows are contiguous, of 64."""
        w = self.w
        return w.mul(row, LINE) if o.along_k else w.mul(w.div(row, LINE // o.unit.itemsize), o.depth * LINE)

    def _jump(self, o: Operand, block: int) -> int:
        return block * WARPGROUP_ROWS * LINE if o.along_k else block * WARPGROUP_ROWS * o.unit.itemsize // LINE * o.depth * LINE

    def _descriptors(self, left: Int, right: Int, step: int) -> tuple[str, str]:
        pairs = ((self.a, left), (self.b, right))
        return tuple(ptx.matrix_descriptor(self.w, self.w.add(at, step * (32 if o.along_k else o.unit.k * LINE)), o.along_k, o.depth * LINE)
                     for o, at in pairs)
