"""Elementwise kernels on a grid: a thread per vector of the innermost dimension, or a group per
tile where a loop reads across its rows (gpu_tile.py)."""

from torch_hlo.hlo.ir import Size, product

from ..codegen import Kernel, index as ix
from ..codegen.loop_plan import stored_bits
from ..gpu.target import GpuTarget
from . import gpu_tile as tile
from .elementwise_loops import LoopNest


class GpuLoopNest(LoopNest):
    """A vector is what a thread moves at a time, whatever it computes in."""

    target: GpuTarget

    def write(self) -> tuple[Size, int, float]:
        stored = self.loops.moved | {s.value.dtype for s in self.stores}
        self.lanes = lanes = self.target.lanes(stored_bits(stored))
        outputs = 1 + max(self.outputs)
        if tile.fits(self.loops, lanes, self.in_place):
            self.kernel = tiles = tile.TileKernel(self.target, lanes, self.leaves, outputs)
            return tiles.nest(self.loops, self.body), 1, lanes
        self.kernel = kernel = Kernel(self.target, lanes, self.leaves, outputs)
        extents = self.extents
        if not extents or not (isinstance(extents[-1], int) and extents[-1] % lanes == 0):
            kernel.lanes = 1
        # the loops are digits of the thread's number, the innermost changing fastest
        *outer, last = extents or (1,)
        counts = (*outer, last // kernel.lanes)
        with kernel.loop("%lo", "%hi", product(counts)) as item:
            parts = ix.delinear(item, counts)
            write = self.body(parts[:-1])
            kernel.lanes_at(parts[-1] * kernel.lanes, last, lambda lane: write(lane, ()))
        return product(counts), 1, kernel.lanes
