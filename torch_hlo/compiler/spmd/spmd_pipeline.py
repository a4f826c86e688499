"""From an annotated program to the program of one device: propagation, partitioning, optimization
of the collectives.

    per_device = spmd(module)
    stages(module)["propagate"]         # the program after each stage
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch_hlo import collector
from torch_hlo.hlo.ir import Module

from ..collectives.collectives import PASSES
from ..collectives.weight_update import weight_update_sharding
from ..hlo_pass import hlo_pass
from ..pipeline import Dump, optimize
from .partitioner import is_per_device, partition
from .propagate import propagate


@collector.paused()
def spmd(module: Module, dump: Dump | None = None, update_axes: Sequence[str] = ()) -> Module:
    """The per-device program; itself when it is one already. `dump`: called with the input and
    after every stage that changed something.
    `update_axes`: mesh axes over which updates of weights are split, see
      compiler/collectives/weight_update.py.

    Raises ShardingError and PartitionError.
    """
    if dump is not None:
        dump("input", module, 0.0)
    if is_per_device(module):
        return module
    first = [weight_update_sharding(update_axes)] if update_axes else []
    for stage in (*first, propagate, hlo_pass(partition)):
        start = time.perf_counter()
        result = stage(module)
        if dump is not None and result is not module:
            dump(stage.name, result, (time.perf_counter() - start) * 1e3)
        module = result
    after = (
        None if dump is None else lambda name, m, ms: dump(name, m, ms) if name != "input" else None
    )
    return optimize(module, after, PASSES) if module.num_partitions > 1 else module


def stages(module: Module) -> dict[str, Module]:
    """The program given ("input"), and what it was after every stage that changed it."""
    found: dict[str, Module] = {}

    def keep(name: str, after: Module, ms: float) -> None:
        found.setdefault(name, after)

    spmd(module, keep)
    return found
