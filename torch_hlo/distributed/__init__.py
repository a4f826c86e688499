"""Many devices: sharded tensors, pictures of shardings, a simulator. docs/guide/many_devices.md
tells how to use them.

from torch_hlo.distributed import Mesh, mark_sharding

mesh = Mesh((2, 4), ("data", "model"))
mark_sharding(model.weight, mesh, ("model", None))
mark_sharding(batch, mesh, ("data", None))

In: tensors, models, optimizers. Out: annotated tensors, prices of plans, checkpoints. Imports
lazy/, lowering/, compiler/, device/ and hlo/.
"""

from torch_hlo.hlo.sharding.sharding import Sharding, ShardingError

from . import checkpoint
from .annotate import clear_sharding, mark_sharding, sharding_of
from .mesh import Dim, Mesh, PartitionSpec, get_1d_mesh
from .report import programs, report, total
from .simulate import (
    A100,
    H100,
    TPU_V4,
    Link,
    Machine,
    abstract,
    compare,
    simulate,
)
from .tactics import (
    Plan,
    data_parallel,
    fsdp,
    megatron,
    sequence_parallel,
    zero1,
)
from .visualize import (
    visualize_sharding,
    visualize_tensor_sharding,
)

__all__ = [
    "A100",
    "Dim",
    "H100",
    "Link",
    "Machine",
    "Mesh",
    "PartitionSpec",
    "Plan",
    "Sharding",
    "ShardingError",
    "TPU_V4",
    "abstract",
    "checkpoint",
    "clear_sharding",
    "compare",
    "data_parallel",
    "fsdp",
    "get_1d_mesh",
    "mark_sharding",
    "megatron",
    "programs",
    "report",
    "sequence_parallel",
    "sharding_of",
    "simulate",
    "total",
    "visualize_sharding",
    "visualize_tensor_sharding",
    "zero1",
]
